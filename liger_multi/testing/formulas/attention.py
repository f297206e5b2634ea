"""Attention from whole scores, linear attention by tokens, and rotary position embeddings.

``casting`` of rotations says where 16-bit dtypes round and changes no formula.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_multi.testing.formulas.losses import sparsemax
from liger_multi.testing.formulas.norms import rms_normalized, statistics_dtype, weighted, wide

# --- attention and its variants, from whole scores ---

Window = int | tuple[int, int] | None
MOST_SCORES = 2**27
"""Scores of all heads that stand in memory at once."""


def _visible(
    q: Tensor, k: Tensor, causal: bool, window: Window, global_tokens: int, documents: Tensor | None
) -> Tensor:
    """Which keys each query sees, pair by pair."""
    i = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)[:, None]
    j = torch.arange(k.shape[2], device=q.device)
    left, right = (window - 1, window - 1) if isinstance(window, int) else window or (-1, -1)
    right = 0 if causal else right
    begin: Tensor | int = 0
    same = None
    if documents is not None:
        edges = (documents[:, 1:] != documents[:, :-1]).cumsum(-1)
        run = torch.cat([torch.zeros_like(edges[:, :1]), edges], -1)
        begin = (run[:, None] < run[:, :, None]).sum(-1)[:, -q.shape[2] :, None]
        same = (run[:, -q.shape[2] :, None] == run[:, None]) & (documents >= 0)[:, None]
    visible = ((j >= i - left) | (left < 0)) & ((j <= i + right) | (right < 0))
    if window is not None:
        visible = visible | (j < begin + global_tokens) | (i < begin + global_tokens)
    visible = visible & (j <= i) if causal else visible
    return visible if same is None else (visible & same)[:, None]


def _documents(cu_seqlens: Tensor, length: int) -> Tensor:
    """Ids of documents from where they begin; what follows the last end is padding."""
    place = torch.arange(length, device=cu_seqlens.device)
    ids = (place[:, None] >= cu_seqlens[None]).sum(-1) - 1
    return torch.where(place < cu_seqlens[-1], ids, -1)[None]


def of_all_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    *,
    causal: bool = False,
    window: Window = None,
    global_tokens: int = 0,
    documents: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention with the scores of all heads in memory."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if softcap is None else torch.tanh(s / softcap) * softcap
    visible = _visible(q, k, causal, window, global_tokens, documents)
    s = s.masked_fill(~visible, torch.finfo(s.dtype).min)
    if sinks is not None:
        s = torch.cat([s, sinks[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    p = torch.softmax(s, -1, dtype=statistics_dtype(s))
    p = p[..., : k.shape[2]].to(v.dtype)
    if documents is not None or q.shape[2] > k.shape[2]:  # queries that see nothing
        p = p.masked_fill(~visible, 0)
    return p @ v


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    global_tokens: int = 0,
    documents: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    ranges: Tensor | None = None,
) -> Tensor:
    """``softmax(q @ k.T * scale + mask) @ v``; many scores are made a head at a time, twice.

    Raises:
        NotImplementedError: ``ranges`` were given, which say what the other masks say.
    """
    if ranges is not None:
        raise NotImplementedError("the formula takes masks, not ranges")
    if cu_seqlens is not None:
        documents = _documents(cu_seqlens, k.shape[2])
    run = functools.partial(
        of_all_heads,
        causal=causal,
        window=window,
        global_tokens=global_tokens,
        documents=documents,
        softcap=softcap,
        scale=scale,
    )
    if q.is_meta or q.shape[:3].numel() * k.shape[2] <= MOST_SCORES:
        return run(q, k, v, sinks)
    shared = q.shape[1] // k.shape[1]
    heads = []
    for h in range(q.shape[1]):
        one, group = slice(h, h + 1), slice(h // shared, h // shared + 1)
        part = (q[:, one], k[:, group], v[:, group], None if sinks is None else sinks[one])
        heads.append(checkpoint(run, *part, use_reentrant=False))
    return torch.cat(heads, 1)


def neighborhood_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel_size: int = 7,
    dilation: int = 1,
    scale: float | None = None,
) -> Tensor:
    """Attention to the ``kernel_size`` positions around each query, ``dilation`` apart."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    place = torch.arange(q.shape[2], device=q.device)
    steps = (torch.arange(kernel_size, device=q.device) - kernel_size // 2) * dilation
    near = place[:, None] + steps
    inside = (near >= 0) & (near < q.shape[2])
    near = near.clamp(0, max(0, q.shape[2] - 1))
    s = torch.einsum("bhld,bhlnd->bhln", q, k[:, :, near])
    s = s * (q.shape[-1] ** -0.5 if scale is None else scale)
    p = torch.softmax(s.masked_fill(~inside, -torch.inf), -1)
    return torch.einsum("bhln,bhlnd->bhld", p, v[:, :, near])


def attention_residuals(
    blocks: Tensor | Sequence[Tensor],
    query: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """A mixture of the outputs of all blocks, by a query to their norms."""
    stacked = blocks if isinstance(blocks, Tensor) else torch.stack([*blocks])
    normed = F.rms_norm(stacked, stacked.shape[-1:], weight, eps)
    scores = (normed * query).sum(-1, dtype=statistics_dtype(stacked))
    p = torch.softmax(scores, 0).to(stacked.dtype)
    return torch.einsum("n...,n...d->...d", p, stacked)


def multi_token_attention(
    scores: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
    sparse: bool = False,
) -> Tensor:
    """A convolution over causal probabilities, of which the causal part stays."""
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    if sparse:
        p = sparsemax(scores.masked_fill(hidden, -1e30)).masked_fill(hidden, 0)
    else:
        p = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
    return F.conv2d(p, weight, bias, stride, padding, dilation, groups).tril()


# --- linear attention ---

TOKENS_AT_ONCE = 64
"""Tokens of a recurrence whose states autograd keeps; those of others are computed again."""


def _delta_steps(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, begins: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Token after token; the state is 0 where a document begins."""
    outs = []
    for t in range(q.shape[1]):
        decay = torch.where(begins[:, t, None, None], 0, g[:, t].exp())
        state = state * decay[..., None]
        read = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        d = beta[:, t, :, None] * (v[:, t] - read)
        state = state + k[:, t, :, :, None] * d[:, :, None]
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outs, 1), state


def kimi_delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    qk_l2norm: bool = False,
    cu_seqlens: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The recurrence of one state for every value head, token by token, with a gate per channel."""
    (batch, length, heads, size), value = q.shape, v.shape[3]
    acc_dtype = statistics_dtype(q)
    q, k, wide_v, g, beta = (x.to(acc_dtype) for x in (q, k, v, g, beta))
    if qk_l2norm:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // heads, 2) for x in (q, k))
    q = q * (size**-0.5 if scale is None else scale)
    if cu_seqlens is not None:
        documents = _documents(cu_seqlens, length)
        documents = torch.where(documents < 0, len(cu_seqlens), documents)
    begins = torch.zeros(batch, length, dtype=torch.bool, device=q.device)
    if documents is not None:
        begins[:, 1:] = (documents[:, 1:] != documents[:, :-1]) | (documents[:, 1:] < 0)
    state = q.new_zeros(batch, v.shape[2], size, value)
    state = state if initial_state is None else state + initial_state.to(acc_dtype)
    outs = [wide_v[:, :0]]
    for t in range(0, length, TOKENS_AT_ONCE):
        part = [x[:, t : t + TOKENS_AT_ONCE] for x in (q, k, wide_v, g, beta, begins)]
        y, state = checkpoint(_delta_steps, *part, state, use_reentrant=False)
        outs.append(y)
    output = torch.cat(outs, 1).to(v.dtype)
    return (output, state) if output_final_state else output


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    qk_l2norm: bool = False,
    cu_seqlens: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The recurrence with gates that all channels share."""
    return kimi_delta_attention(
        q,
        k,
        v,
        g.unsqueeze(-1),
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        qk_l2norm=qk_l2norm,
        cu_seqlens=cu_seqlens,
        documents=documents,
    )


# --- rotary position embeddings ---

Pair = tuple[Tensor, Tensor]


def _rotated(x: Tensor, style: str) -> Tensor:
    """Each pair (a, b) becomes (-b, a)."""
    if style == "half":
        a, b = x.chunk(2, dim=-1)
        return torch.cat((-b, a), dim=-1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def _per_channel(angle: Tensor, style: str) -> Tensor:
    """A value for both channels of every pair."""
    if style == "half":
        return torch.cat((angle, angle), dim=-1)
    return angle.repeat_interleave(2, -1)


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    style: str = "half",
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
    casting: str = "llama",
) -> Pair:
    """``x * cos + rotate(x) * sin`` of the first ``rotary_dim`` channels."""
    width = rotary_dim or cos.shape[-1]
    if cos.shape[-1] != width:  # one value per pair
        cos, sin = _per_channel(cos, style), _per_channel(sin, style)
    cos, sin = cos.unsqueeze(unsqueeze_dim - q.ndim), sin.unsqueeze(unsqueeze_dim - q.ndim)

    def turned(x: Tensor) -> Tensor:
        if width < x.shape[-1]:
            return torch.cat((turned(x[..., :width]), x[..., width:]), dim=-1)
        return x * cos + _rotated(x, style) * sin

    return turned(q), turned(k)


def rms_norm_rope(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    *,
    unsqueeze_dim: int = 1,
    offset: float = 0.0,
    casting: str = "llama",
    rope_casting: str = "llama",
) -> Tensor:
    """The rotation of the norm of every head, or of every token where weight is as wide."""
    rows, last = x, x.ndim - 2
    if weight.shape[0] != x.shape[-1]:
        rows = x.movedim(unsqueeze_dim, last).flatten(last)
    u = weighted(rms_normalized(wide(rows), eps).to(x.dtype), weight, offset)
    if weight.shape[0] != x.shape[-1]:
        u = u.unflatten(last, (x.shape[unsqueeze_dim], -1)).movedim(last, unsqueeze_dim)
    return rope(u, u, cos, sin, unsqueeze_dim=unsqueeze_dim)[0]


def _of_sections(angle: Tensor, sections: Sequence[int], arrangement: str, style: str) -> Tensor:
    """From the angles of every grid, those of the grid that each pair belongs to."""
    count, pairs = len(sections), sum(sections)
    both = angle.shape[-1] == 2 * pairs  # a value for each channel
    if both and style == "interleaved":
        even = _of_sections(angle[..., ::2], sections, arrangement, style)
        odd = _of_sections(angle[..., 1::2], sections, arrangement, style)
        return torch.stack((even, odd), dim=-1).flatten(-2)
    if arrangement == "chunked":
        parts = angle.split([*sections] * (1 + both), dim=-1)
        return torch.cat([part[i % count] for i, part in enumerate(parts)], dim=-1)
    chosen = angle[0].clone()
    for grid in range(1, count):
        for start in (0, pairs)[: 1 + both]:
            end = start + min(sections[grid] * count, pairs)
            place = slice(start + grid, end, count)
            chosen[..., place] = angle[grid, ..., place]
    return chosen


def rope_multimodal(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    sections: Sequence[int],
    *,
    arrangement: str = "chunked",
    style: str = "half",
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
    casting: str = "llama",
) -> Pair:
    """RoPE whose pairs take their angles from different grids (time, height, width)."""
    cos, sin = (_of_sections(t, sections, arrangement, style) for t in (cos, sin))
    return rope(q, k, cos, sin, style=style, unsqueeze_dim=unsqueeze_dim, rotary_dim=rotary_dim)


def rope_complex(q: Tensor, k: Tensor, freqs: Tensor, *, unsqueeze_dim: int = 2) -> Pair:
    """Neighboring channels as complex numbers, times ``freqs``; other channels stay."""
    numbers = torch.view_as_complex(wide(freqs).contiguous()).unsqueeze(unsqueeze_dim - q.ndim)
    width = 2 * numbers.shape[-1]

    def turned(x: Tensor) -> Tensor:
        if width < x.shape[-1]:
            return torch.cat((turned(x[..., :width]), x[..., width:]), dim=-1)
        pairs = torch.view_as_complex(wide(x).unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * numbers).flatten(-2).type_as(x)

    return turned(q), turned(k)


def rope_sorted(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
    casting: str = "llama",
) -> Pair:
    """RoPE with interleaved input and half-split output (DeepSeek layout)."""
    width = rotary_dim or cos.shape[-1]
    both = cos.shape[-1] == width  # a value for each channel of the output
    cos, sin = cos.unsqueeze(unsqueeze_dim - q.ndim), sin.unsqueeze(unsqueeze_dim - q.ndim)
    cosines, sines = (t.chunk(2, dim=-1) if both else (t, t) for t in (cos, sin))

    def turned(x: Tensor) -> Tensor:
        if width < x.shape[-1]:
            return torch.cat((turned(x[..., :width]), x[..., width:]), dim=-1)
        a, b = x[..., ::2], x[..., 1::2]
        first, second = a * cosines[0] - b * sines[0], b * cosines[1] + a * sines[1]
        return torch.cat((first, second), dim=-1)

    return turned(q), turned(k)


def rope_positions(
    q: Tensor,
    k: Tensor,
    position_ids: Tensor,
    inv_freq: Tensor,
    *,
    scaling: float = 1.0,
    sections: Sequence[int] | None = None,
    arrangement: str = "chunked",
    style: str = "half",
    unsqueeze_dim: int = 1,
    casting: str = "llama",
) -> Pair:
    """RoPE whose angles are ``position_ids * inv_freq``."""
    frequencies = wide(inv_freq)
    turns = position_ids[..., None].to(frequencies.dtype) * frequencies
    if sections is not None:
        turns = _of_sections(turns, sections, arrangement, "half")
    turns = _per_channel(turns, style)

    def cast(wave: Tensor) -> Tensor:
        return (wave if scaling == 1.0 else wave * scaling).to(q.dtype)

    cos, sin = cast(turns.cos()), cast(turns.sin())
    return rope(q, k, cos, sin, style=style, unsqueeze_dim=unsqueeze_dim)
