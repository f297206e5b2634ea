"""What every operator should return: one plain differentiable formula each, run in fp64."""

from typing import NamedTuple

import torch
import torch.nn.functional as F


def rms_norm(x, weight=None, eps=1e-6, *, offset=0.0, casting="llama"):
    n = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return n if weight is None else n * (weight + offset)


class AddNorm(NamedTuple):
    y: torch.Tensor
    new_residual: torch.Tensor


def fused_add_rms_norm(x, residual, weight=None, eps=1e-6, **options):
    s = x + residual
    return AddNorm(rms_norm(s, weight, eps, **options), s)


def layer_norm(x, weight=None, bias=None, eps=1e-5):
    n = x - x.mean(-1, keepdim=True)
    n = n / torch.sqrt((n * n).mean(-1, keepdim=True) + eps)
    return n * (1 if weight is None else weight) + (0 if bias is None else bias)


def swiglu(gate, up):
    return gate * torch.sigmoid(gate) * up


def swiglu_packed(gate_up):
    half = gate_up.shape[-1] // 2
    return swiglu(gate_up[..., :half], gate_up[..., half:])


def geglu(gate, up, approximate="tanh"):
    if approximate == "none":
        return gate * (1 + torch.erf(gate * 0.5**0.5)) / 2 * up
    u = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return gate * (1 + torch.tanh(u)) / 2 * up


def geglu_packed(gate_up, approximate="tanh"):
    half = gate_up.shape[-1] // 2
    return geglu(gate_up[..., :half], gate_up[..., half:], approximate)


def rope(q, k, cos, sin, *, style="half", unsqueeze_dim=1, rotary_dim=None, casting="llama"):
    """A matrix of 2 x 2 blocks for every token: slow, and nothing to get wrong."""
    width = rotary_dim or cos.shape[-1]
    i = torch.arange(width // 2, device=q.device)
    a, b = (i, i + width // 2) if style == "half" else (2 * i, 2 * i + 1)
    if width != cos.shape[-1]:
        full = cos.new_empty(*cos.shape[:-1], width)
        cos, sin = (full.index_copy(-1, a, t).index_copy(-1, b, t) for t in (cos, sin))
    matrix = torch.eye(q.shape[-1], dtype=cos.dtype, device=q.device)
    matrix = matrix.repeat(*cos.shape[:-1], 1, 1)  # out[channel] = sum of matrix[channel, other] x
    matrix[..., a, a], matrix[..., b, b] = cos[..., a], cos[..., b]
    matrix[..., a, b], matrix[..., b, a] = -sin[..., a], sin[..., b]
    if q.ndim == 3:
        return tuple(torch.einsum("scd,shd->shc", matrix, x) for x in (q, k))
    matrix = matrix.expand(q.shape[0], *matrix.shape[-3:])
    term = "bscd,bhsd->bhsc" if unsqueeze_dim == 1 else "bscd,bshd->bshc"
    return tuple(torch.einsum(term, matrix, x) for x in (q, k))


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
    z = (hidden @ weight.mT + (0 if bias is None else bias)) * logit_scale
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
