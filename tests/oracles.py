"""What every operator should return: one plain differentiable formula each, run in fp64."""

import importlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def __getattr__(name):
    """The formula of an operator that states it in its contract."""
    if name.startswith("__"):
        raise AttributeError(name)
    return importlib.import_module(f"liger_multi.ops.{name}").formula


def rms_norm(x, weight=None, eps=1e-6, *, offset=0.0, casting="llama"):
    n = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return n if weight is None else n * (weight + offset)


class AddNorm(NamedTuple):
    y: torch.Tensor
    new_residual: torch.Tensor


def fused_add_rms_norm(x, residual, weight=None, eps=1e-6, **options):
    s = x + residual
    return AddNorm(rms_norm(s, weight, eps, **options), s)


def fused_scaled_add_rms_norm(
    x, residual, weight=None, eps=1e-6, *, x_scale=1.0, residual_scale=1.0, **options
):
    return fused_add_rms_norm(x * x_scale, residual * residual_scale, weight, eps, **options)


def layer_norm(x, weight=None, bias=None, eps=1e-5):
    n = x - x.mean(-1, keepdim=True)
    n = n / torch.sqrt((n * n).mean(-1, keepdim=True) + eps)
    return n * (1 if weight is None else weight) + (0 if bias is None else bias)


def swiglu(gate, up, *, gate_multiplier=1.0, down_multiplier=1.0):
    scaled = gate * gate_multiplier
    return scaled * torch.sigmoid(scaled) * up * down_multiplier


def swiglu_packed(gate_up, **options):
    half = gate_up.shape[-1] // 2
    return swiglu(gate_up[..., :half], gate_up[..., half:], **options)


def swiglu_clamped(gate, up, *, limit=7.0, alpha=1.702, up_offset=1.0):
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + up_offset)


def swiglu_clamped_packed(gate_up, *, interleaved=True, **options):
    half = gate_up.shape[-1] // 2
    first, second = (slice(None, None, 2), slice(1, None, 2))
    if not interleaved:
        first, second = slice(0, half), slice(half, None)
    return swiglu_clamped(gate_up[..., first], gate_up[..., second], **options)


def relu_squared(x):
    return torch.relu(x) ** 2


def geglu(gate, up, approximate="tanh"):
    if approximate == "none":
        return gate * (1 + torch.erf(gate * 0.5**0.5)) / 2 * up
    u = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return gate * (1 + torch.tanh(u)) / 2 * up


def geglu_packed(gate_up, approximate="tanh"):
    half = gate_up.shape[-1] // 2
    return geglu(gate_up[..., :half], gate_up[..., half:], approximate)


def gated_mlp(
    x,
    gate_weight,
    up_weight,
    down_weight,
    *,
    gate_bias=0,
    up_bias=0,
    down_bias=0,
    activation="silu",
):
    gate, up = x @ gate_weight.T + gate_bias, x @ up_weight.T + up_bias
    approximate = {"gelu": "none", "gelu_tanh": "tanh"}.get(activation)
    product = swiglu(gate, up) if approximate is None else geglu(gate, up, approximate)
    return product @ down_weight.T + down_bias


def lora_update(base, x, a, b, scale=1.0):
    return base + scale * (x @ a.T) @ b.T


def lora_mlp(x, gate_weight, up_weight, down_weight, activation="silu", **rest):
    def layer(name, x, weight):
        y = x @ weight.T + rest.get(f"{name}_bias", 0)
        if f"{name}_a" in rest:
            scale = rest.get(f"{name}_scale", 1.0)
            y = lora_update(y, x, rest[f"{name}_a"], rest[f"{name}_b"], scale)
        return y

    gate, up = layer("gate", x, gate_weight), layer("up", x, up_weight)
    approximate = {"gelu": "none", "gelu_tanh": "tanh"}.get(activation)
    inner = swiglu(gate, up) if approximate is None else geglu(gate, up, approximate)
    return layer("down", inner, down_weight)


class LoraQKV(NamedTuple):
    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None


def lora_qkv(x, **rest):
    def layer(name):
        if f"{name}_weight" not in rest:
            return None
        y = x @ rest[f"{name}_weight"].T + rest.get(f"{name}_bias", 0)
        if f"{name}_a" not in rest:
            return y
        scale = rest.get(f"{name}_scale", 1.0)
        return lora_update(y, x, rest[f"{name}_a"], rest[f"{name}_b"], scale)

    return LoraQKV(*(layer(name) for name in LoraQKV._fields))


def fused_moe(
    x,
    gate_up_weight,
    down_weight,
    index,
    routing,
    *,
    gate_up_bias=None,
    down_bias=None,
    activation="silu",
    interleaved=False,
    transposed=False,
    **clamps,
):
    first, second = (w.mT if transposed else w for w in (gate_up_weight, down_weight))
    experts, width = first.shape[0], x.shape[-1]
    rows, chosen = x.reshape(index.shape[:-1].numel(), width), index.reshape(-1, index.shape[-1])
    weights = routing.reshape(chosen.shape)
    y = torch.zeros_like(rows)
    for e in range(experts):  # dense: every token through every expert
        share = torch.where(chosen == e, weights, 0).sum(-1, keepdim=True)
        inner = rows @ first[e].T + (0 if gate_up_bias is None else gate_up_bias[e])
        half = inner.shape[-1] // 2
        gate, up = inner[:, :half], inner[:, half:]
        if interleaved:
            gate, up = inner[:, ::2], inner[:, 1::2]
        if activation == "swiglu_clamped":
            product = swiglu_clamped(gate, up, **clamps)
        elif activation == "silu":
            product = swiglu(gate, up)
        else:
            product = geglu(gate, up, {"gelu": "none", "gelu_tanh": "tanh"}[activation])
        y = y + share * (product @ second[e].T + (0 if down_bias is None else down_bias[e]))
    return y.view(x.shape)


class HyperCoefficients(NamedTuple):
    pre: torch.Tensor
    post: torch.Tensor
    mix: torch.Tensor


def hyper_connections(
    x, weight, bias, scale, *, iterations=20, rms_eps=1e-6, eps=1e-6, post_scale=2.0
):
    n, v = x.shape[-2], x.flatten(-2)
    m = (v / torch.sqrt((v * v).mean(-1, keepdim=True) + rms_eps)) @ weight.T
    a, b, c = m.split([n, n, n * n], -1)
    p, q, r = bias.split([n, n, n * n])
    mix = torch.exp((scale[2] * c + r).unflatten(-1, (n, n)))
    mix = mix / mix.sum(-1, keepdim=True) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    pre, post = torch.sigmoid(scale[0] * a + p) + eps, post_scale * torch.sigmoid(scale[1] * b + q)
    return HyperCoefficients(pre, post, mix)


def hyper_connections_pre(x, pre):
    return (pre.unsqueeze(-1) * x).sum(-2)


def hyper_connections_post(x, out, post, mix):
    return post.unsqueeze(-1) * out.unsqueeze(-2) + mix @ x


def dyt(x, alpha, weight=None, bias=None):
    return (1 if weight is None else weight) * torch.tanh(alpha * x) + (0 if bias is None else bias)


def gated_rms_norm(
    x,
    gate=None,
    weight=None,
    eps=1e-6,
    *,
    group_size=None,
    norm_before_gate=True,
    activation="silu",
    offset=0.0,
    casting="llama",
):
    act = 1
    if gate is not None:
        act = torch.sigmoid(gate) * (gate if activation == "silu" else 1)
    u = x if norm_before_gate else x * act
    parts = u.unflatten(-1, (-1, group_size or max(x.shape[-1], 1)))
    n = rms_norm(parts, None, eps).flatten(-2)
    y = n if weight is None else n * (weight + offset)
    return y * act if norm_before_gate else y


def modulated_rms_norm(x, scale, shift=None, weight=None, eps=1e-6, **options):
    n = rms_norm(x, weight, eps, **options)
    if x.numel() == 0:
        return n * (1 + 0 * scale.sum()) + (0 if shift is None else 0 * shift.sum())
    each = x.numel() // scale.numel()
    scale, shift = (
        0 if t is None else t.reshape(-1, x.shape[-1]).repeat_interleave(each, 0).view(x.shape)
        for t in (scale, shift)
    )
    return n * (1 + scale) + shift


def poly_norm(x, weight, bias=None, eps=1e-6):
    terms = [weight[i] * rms_norm(x**power, None, eps) for i, power in enumerate((3, 2, 1))]
    return sum(terms) + (0 if bias is None else bias)


def group_norm(x, num_groups, weight=None, bias=None, eps=1e-5):
    if x.numel() == 0:
        return x * (1 if weight is None else weight[:, None]) + (
            0 if bias is None else bias[:, None]
        )
    n = layer_norm(x.reshape(x.shape[0], num_groups, -1), None, None, eps).view(x.shape)
    each = (-1, *[1] * (x.ndim - 2))
    n = n if weight is None else n * weight.view(each)
    return n if bias is None else n + bias.view(each)


def rope(q, k, cos, sin, *, style="half", unsqueeze_dim=1, rotary_dim=None, casting="llama"):
    width = rotary_dim or cos.shape[-1]
    first, second = slice(0, width // 2), slice(width // 2, width)
    if style == "interleaved":
        first, second = slice(0, width, 2), slice(1, width, 2)
    cos, sin = cos.unsqueeze(unsqueeze_dim - q.ndim), sin.unsqueeze(unsqueeze_dim - q.ndim)
    each = cos.shape[-1] == width  # a value for each channel, or for each pair of them
    cosines = (cos[..., first], cos[..., second]) if each else (cos, cos)
    sines = (sin[..., first], sin[..., second]) if each else (sin, sin)
    outs = []
    for x in (q, k):
        a, b, out = x[..., first], x[..., second], x.clone()
        out[..., first] = a * cosines[0] - b * sines[0]
        out[..., second] = b * cosines[1] + a * sines[1]
        outs.append(out)
    return tuple(outs)


def _sections(angle, sections, arrangement, style):
    """Angles of the grid that each pair belongs to, channel by channel."""
    pairs, count = sum(sections), len(sections)
    chosen = [0] * pairs
    for pair in range(pairs):
        if arrangement == "chunked":
            chosen[pair] = next(g for g in range(count) if pair < sum(sections[: g + 1]))
        elif pair < count * sections[pair % count]:
            chosen[pair] = pair % count
    if angle.shape[-1] == 2 * pairs:
        chosen = chosen * 2 if style == "half" else [g for g in chosen for _ in range(2)]
    return torch.stack([angle[g, ..., c] for c, g in enumerate(chosen)], -1)


def rope_multimodal(q, k, cos, sin, sections, *, arrangement="chunked", style="half", **options):
    cos, sin = (_sections(t, sections, arrangement, style) for t in (cos, sin))
    return rope(q, k, cos, sin, style=style, **options)


def rope_complex(q, k, freqs, *, unsqueeze_dim=2):
    numbers = torch.view_as_complex(freqs.double().contiguous()).unsqueeze(unsqueeze_dim - q.ndim)
    outs = []
    for x in (q, k):
        width = 2 * numbers.shape[-1]
        pairs = torch.view_as_complex(x[..., :width].unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * numbers).flatten(-2)
        outs.append(torch.cat((turned, x[..., width:]), -1))
    return tuple(outs)


def rope_sorted(q, k, cos, sin, *, rotary_dim=None, **options):
    width = rotary_dim or cos.shape[-1]
    places = [*range(0, width, 2), *range(1, width, 2), *range(width, q.shape[-1])]
    return rope(q[..., places], k[..., places], cos, sin, rotary_dim=rotary_dim, **options)


def rope_positions(
    q,
    k,
    position_ids,
    inv_freq,
    *,
    scaling=1.0,
    sections=None,
    arrangement="chunked",
    **options,
):
    turns = position_ids.double()[..., None] * inv_freq
    if sections is not None:
        turns = _sections(turns, sections, arrangement, "half")
    cos, sin = turns.cos() * scaling, turns.sin() * scaling
    return rope(q, k, cos, sin, rotary_dim=2 * inv_freq.numel(), **options)


def cross_entropy(
    logits,
    target,
    weight=None,
    *,
    ignore_index=-100,
    label_smoothing=0.0,
    z_loss=0.0,
    softcap=None,
    reduction="mean",
    outputs=(),
    **_,
):
    shape, logits, target = target.shape, logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    z = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    valid = target != ignore_index
    rows = F.cross_entropy(
        z,
        target,
        weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    lse = torch.logsumexp(z, -1)
    extra = torch.where(valid, z_loss * lse**2, 0)
    count, total = (
        valid.sum(),
        (valid if weight is None else weight[target.clamp(min=0)] * valid).sum(),
    )
    if reduction == "none":
        loss, z_out = (rows + extra).view(shape), extra.view(shape)
    else:
        mean = reduction == "mean"
        z_out = extra.sum() / (count.clamp(min=1) if mean else 1)
        loss = rows.sum() / (torch.where(total == 0, 1, total) if mean else 1) + z_out
    label, log_p = target.clamp(min=0, max=max(z.shape[-1] - 1, 0)), torch.log_softmax(z, -1)
    hit = torch.where(valid, (z.argmax(-1) == target).to(z.dtype), 0)
    made = {
        "z_loss": z_out,
        "token_accuracy": hit.view(shape)
        if reduction == "none"
        else hit.sum() / count.clamp(min=1),
        "predicted_tokens": torch.where(valid, z.argmax(-1), -1).view(shape),
        "log_prob": torch.where(valid, log_p.gather(1, label[:, None])[:, 0], 0).view(shape),
        "entropy": torch.where(valid, -(log_p.exp() * log_p).sum(-1), 0).view(shape),
        "lse": torch.where(valid, lse, 0).view(shape),
    }
    return loss, {n: made[n].detach() for n in outputs}


cross_entropy_inplace = cross_entropy


def fused_linear_cross_entropy(
    hidden, weight, target, bias=None, *, class_weight=None, logit_scale=1.0, **options
):
    logits = (hidden @ weight.mT + (0 if bias is None else bias)) * logit_scale
    return cross_entropy(logits, target, class_weight, **options)


class LogProb(NamedTuple):
    log_prob: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    argmax: torch.Tensor | None = None


def fused_linear_log_prob(
    hidden,
    weight,
    target,
    bias=None,
    *,
    temperature=1.0,
    softcap=None,
    logit_scale=1.0,
    ignore_index=-100,
    outputs=LogProb._fields,
    **_,
):
    logits = hidden @ weight.mT + (0 if bias is None else bias)
    return token_log_prob(
        logits, target, temperature=temperature, softcap=softcap, logit_scale=logit_scale,
        ignore_index=ignore_index, outputs=outputs,
    )  # fmt: skip


def token_log_prob(
    logits,
    target,
    *,
    temperature=1.0,
    softcap=None,
    logit_scale=1.0,
    ignore_index=-100,
    outputs=LogProb._fields,
):
    z = logits * logit_scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    valid = target != ignore_index
    log_p = torch.log_softmax(z, -1)
    own = log_p.gather(-1, torch.where(valid, target, 0).unsqueeze(-1)).squeeze(-1)
    made = {
        "log_prob": own,
        "entropy": torch.special.entr(log_p.exp()).sum(-1),
        "lse": torch.logsumexp(z, -1),
    }
    made = {n: torch.where(valid, x, 0) for n, x in made.items()}
    made["argmax"] = torch.where(valid, z.argmax(-1), -1)
    return LogProb(**{n: made[n] for n in outputs})


def _log_of(x, form, temperature):
    if form == "logits":
        return torch.log_softmax(x / temperature, -1)
    return x.log() if form == "prob" else x


def _divergence(student, teacher, target, loss_of, form, teacher_form, options):
    """Loss of rows, computed from probabilities and their logarithms, then reduced."""
    temperature = options.get("temperature", 1.0)
    log_q = _log_of(student, form, temperature)
    log_p = _log_of(teacher, teacher_form or form, temperature)
    rows = loss_of(log_q, log_p).sum(-1)
    valid = torch.ones_like(rows, dtype=torch.bool)
    if target is not None:
        valid = target != options.get("ignore_index", -100)
    rows = torch.where(valid, rows, 0)
    reduction = options.get("reduction", "mean")
    if reduction == "none":
        return rows
    return rows.sum() / (valid.sum().clamp(min=1) if reduction == "mean" else 1)


def _kl(log_q, log_p):
    return log_p.exp() * (log_p - log_q)


def _jensen(log_q, log_p, beta):
    if beta in (0.0, 1.0):
        return _kl(log_q, log_p) if beta == 0.0 else _kl(log_p, log_q)
    p, q = log_p.exp(), log_q.exp()
    log_m = (beta * p + (1 - beta) * q).log()
    return beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)


def _variation(log_q, log_p):
    return (log_q.exp() - log_p.exp()).abs() / 2


def kl_div(student, teacher, target=None, *, form="log_prob", teacher_form="prob", **options):
    return _divergence(student, teacher, target, _kl, form, teacher_form, options)


def jsd(student, teacher, target=None, *, beta=0.5, form="log_prob", teacher_form=None, **options):
    def loss_of(log_q, log_p):
        return _jensen(log_q, log_p, beta)

    return _divergence(student, teacher, target, loss_of, form, teacher_form, options)


def tvd(student, teacher, target=None, *, form="prob", teacher_form=None, **options):
    return _divergence(student, teacher, target, _variation, form, teacher_form, options)


kl_div_inplace, jsd_inplace, tvd_inplace = kl_div, jsd, tvd


def _of_heads(rows_of):
    def oracle(
        hidden, weight, teacher_hidden, teacher_weight, target=None, bias=None, teacher_bias=None,
        *, temperature=1.0, square_temperature=False, vocabulary="equal", **options,
    ):  # fmt: skip
        logits = hidden @ weight.mT + (0 if bias is None else bias)
        teacher = teacher_hidden @ teacher_weight.mT
        teacher = teacher + (0 if teacher_bias is None else teacher_bias)
        common = min(logits.shape[-1], teacher.shape[-1])
        options = {k: v for k, v in options.items() if k not in ("chunk", "compact", "accumulate")}
        loss = rows_of(
            logits[..., :common], teacher[..., :common], target, form="logits",
            teacher_form="logits", temperature=temperature, **options,
        )  # fmt: skip
        return loss * temperature**2 if square_temperature else loss

    return oracle


fused_linear_kl_div, fused_linear_jsd, fused_linear_tvd = map(_of_heads, (kl_div, jsd, tvd))


def selective_log_softmax(logits, index, *, temperature=1.0, ignore_index=-100, **_):
    log_p = torch.log_softmax(logits / temperature, -1)
    several = index.ndim == logits.ndim
    places = index if several else index.unsqueeze(-1)
    valid = places != ignore_index
    found = torch.where(valid, log_p.gather(-1, torch.where(valid, places, 0)), 0)
    return found if several else found.squeeze(-1)


def softmax(x, dim=-1):
    return torch.softmax(x, dim)


def sparsemax(x, dim=-1):
    x = x.movedim(dim, -1)
    fallen = x.sort(-1, descending=True).values
    count = torch.arange(1, x.shape[-1] + 1, device=x.device)
    total = fallen.cumsum(-1) - 1
    k = (fallen * count > total).sum(-1, keepdim=True)
    total = total.gather(-1, k - 1)  # an element at tau itself is outside: clamp would give it dy
    return torch.where(x * k > total, x - total / k, 0).movedim(-1, dim)


def embedding(index, weight, padding_idx=None, *, scale=1.0):
    return F.embedding(index, weight, padding_idx) * scale


def _seen(queries, keys, causal, window, global_tokens, documents):
    """Who sees whom, written pair by pair: (B or 1, 1, queries, keys)."""
    place = torch.arange(keys)
    i, j = torch.arange(keys - queries, keys)[:, None], place[None]
    first, seen = torch.zeros(1, 1, 1, dtype=torch.int64), torch.ones(1, queries, keys).bool()
    if documents is not None and not documents.is_meta:
        ids = documents.cpu()
        run = torch.cat([ids[:, :1] * 0, (ids[:, 1:] != ids[:, :-1]).cumsum(-1)], -1)
        begin = (run[:, None] < run[:, :, None]).sum(-1)  # tokens before this one's document
        of, first = run[:, keys - queries :], begin[:, keys - queries :, None]
        seen = (of[:, :, None] == run[:, None]) & (ids >= 0)[:, None]
    left, right = (window - 1, window - 1) if isinstance(window, int) else window or (-1, -1)
    near = ((left < 0) | (j >= i - left)) & ((right < 0) | causal | (j <= i + right))
    either = (j < first + global_tokens) | (i < first + global_tokens)
    seen = seen & (near | either if window else near)
    return (seen & (j <= i) if causal else seen)[:, None]


def attention(q, k, v, sinks=None, **options):
    """Many scores at once are made a head at a time, and again for the gradients."""
    if q.is_meta or q.shape[:3].numel() * k.shape[2] <= 2**27:
        return _attention(q, k, v, sinks, **options)
    shared = q.shape[1] // k.shape[1]
    heads = []
    for h in range(q.shape[1]):
        one, group = slice(h, h + 1), slice(h // shared, h // shared + 1)
        part = (q[:, one], k[:, group], v[:, group], None if sinks is None else sinks[one])
        heads.append(checkpoint(_attention, *part, use_reentrant=False, **options))
    return torch.cat(heads, 1)


def _attention(
    q, k, v, sinks, *, causal=False, window=None, global_tokens=0, documents=None, softcap=None,
    scale=None,
):  # fmt: skip
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if softcap is None else torch.tanh(s / softcap) * softcap
    seen = _seen(q.shape[2], k.shape[2], causal, window, global_tokens, documents).to(q.device)
    s = s.masked_fill(~seen, torch.finfo(s.dtype).min)
    if sinks is not None:
        s = torch.cat([s, sinks[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    p = torch.softmax(s, -1)[..., : k.shape[2]]
    return p.masked_fill(~seen, 0) @ v


def neighborhood_attention(q, k, v, kernel_size=7, dilation=1, scale=None):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    place = torch.arange(q.shape[2], device=q.device)
    steps = (torch.arange(kernel_size, device=q.device) - kernel_size // 2) * dilation
    near = place[:, None] + steps
    inside = (near >= 0) & (near < q.shape[2])
    near = near.clamp(0, max(0, q.shape[2] - 1))
    s = torch.einsum("bhld,bhlnd->bhln", q, k[:, :, near]) * (
        q.shape[-1] ** -0.5 if scale is None else scale
    )
    p = torch.softmax(s.masked_fill(~inside, -torch.inf), -1)
    return torch.einsum("bhln,bhlnd->bhld", p, v[:, :, near])


def attention_residuals(blocks, query, weight=None, eps=1e-6):
    n = blocks / torch.sqrt((blocks * blocks).mean(-1, keepdim=True) + eps)
    p = torch.softmax((n * (query if weight is None else query * weight)).sum(-1), 0)
    return (p.unsqueeze(-1) * blocks).sum(0)


def multi_token_attention(scores, weight, bias=None, *, sparse=False, **options):
    seen = torch.ones(scores.shape[-2:], device=scores.device).tril().bool()
    masked = scores.masked_fill(~seen, -1e30)
    p = sparsemax(masked) if sparse else torch.softmax(masked, -1)
    return F.conv2d(p.masked_fill(~seen, 0), weight, bias, **options).tril()
