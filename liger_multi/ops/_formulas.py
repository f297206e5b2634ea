"""What formulas of operators share: statistics, rows, masks and recurrences in plain PyTorch.

A contract's ``formula`` has the signature of its public function. It is differentiable and rounds
nothing in fp64: there it is the reference of the suite. In 16-bit dtypes it casts where Hugging
Face casts: there it is what the benchmarks time as ``torch``. Arguments that only say how an
operator computes or where 16-bit dtypes round (``inplace``, ``chunk``, ``casting``) are ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Pair = tuple[Tensor, Tensor]
Rows = Callable[[Tensor, Tensor], Tensor]
"""The divergence of each row from the logarithms of the student and of the teacher."""
APPROXIMATIONS = {"gelu": "none", "gelu_tanh": "tanh"}
"""The argument of GELU by the name of an MLP's activation."""
MOST_SCORES = 2**27
"""Scores of all heads that stand in memory at once."""
TOKENS_AT_ONCE = 64
"""Tokens of a recurrence whose states autograd keeps; those of others are computed again."""


# --- norms ---


def wide(x: Tensor) -> Tensor:
    """At least fp32, in which Hugging Face computes statistics; fp64 stays fp64."""
    return x if x.dtype is torch.float64 else x.float()


def statistics_dtype(x: Tensor) -> torch.dtype:
    """The dtype of :func:`wide`."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def rms_normalized(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` over the last axis, in the dtype of x."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def weighted(x: Tensor, weight: Tensor | None, offset: float = 0.0) -> Tensor:
    """``x * (weight + offset)``; x where there is no weight."""
    if weight is None:
        return x
    return (weight + offset if offset else weight) * x


def weighted_rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    """RMSNorm with the statistics of :func:`wide`, rounded before the weight as Llama does."""
    return weighted(rms_normalized(wide(x), eps).to(x.dtype), weight, offset)


# --- rows in FP8 ---


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes as numbers, and the power-of-two scale of every row."""
    padded = F.pad(x.detach().abs(), (0, 1))  # a row without columns: 0
    acc_dtype = torch.promote_types(x.dtype, torch.float32)
    largest = padded.amax(-1, keepdim=True).to(acc_dtype).clamp_min(2.0**-100)
    # a logarithm in 16 bits would round down, and a code above 448 is NaN
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448.0))).to(x.dtype)
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype), scale


# --- divergences of two distributions ---


def kl_rows(log_q: Tensor, log_p: Tensor) -> Tensor:
    """``sum p (log p - log q)``."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def jsd_rows(beta: float) -> Rows:
    """``beta KL(p | m) + (1 - beta) KL(q | m)`` of ``m = beta p + (1 - beta) q``."""
    if beta == 0.0:
        return kl_rows
    if beta == 1.0:
        return lambda log_q, log_p: kl_rows(log_p, log_q)

    def rows(log_q: Tensor, log_p: Tensor) -> Tensor:
        p, q = log_p.exp(), log_q.exp()
        log_m = (beta * p + (1 - beta) * q).log()
        return (beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)).sum(-1)

    return rows


def tvd_rows(log_q: Tensor, log_p: Tensor) -> Tensor:
    """``sum |q - p| / 2``."""
    return (log_q.exp() - log_p.exp()).abs().sum(-1) / 2


def log_probabilities(x: Tensor, form: str, temperature: float) -> Tensor:
    """The logarithms of rows that are logits, log-probabilities or probabilities."""
    x = wide(x)
    if form == "logits":
        return torch.log_softmax(x if temperature == 1.0 else x / temperature, -1)
    return x if form == "log_prob" else x.log()


def reduced_rows(rows: Tensor, target: Tensor | None, ignore_index: int, reduction: str) -> Tensor:
    """The rows that count: their mean, their sum, or all with 0 for the others."""
    if target is None:
        mean = reduction == "mean" and rows.numel() > 0
        return rows if reduction == "none" else rows.mean() if mean else rows.sum()
    valid = target != ignore_index
    rows = torch.where(valid, rows, 0)
    if reduction == "none":
        return rows
    return rows.sum() / valid.sum().clamp(min=1) if reduction == "mean" else rows.sum()


def rows_of_heads(
    rows: Rows,
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Divergence of each row over the classes that both heads have."""
    common = min(weight.shape[0], teacher_weight.shape[0])

    def logarithms(x: Tensor, head: Tensor, head_bias: Tensor | None) -> Tensor:
        logits = F.linear(x, head, head_bias)
        logits = logits if head.shape[0] == common else logits[..., :common]
        return log_probabilities(logits, "logits", temperature)

    log_q = logarithms(hidden, weight, bias)
    return rows(log_q, logarithms(teacher_hidden, teacher_weight, teacher_bias))


# --- gated activations ---


def scaled_swiglu(
    gate: Tensor, up: Tensor, gate_multiplier: float, down_multiplier: float
) -> Tensor:
    """``silu(gate_multiplier * gate) * up * down_multiplier``."""
    if gate_multiplier == down_multiplier == 1.0:
        return F.silu(gate) * up
    return F.silu(gate * gate_multiplier) * up * down_multiplier


def gated_product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up`` by the name of an MLP's activation."""
    if activation in APPROXIMATIONS:
        return F.gelu(gate, approximate=APPROXIMATIONS[activation]) * up
    return scaled_swiglu(gate, up, 1.0, 1.0)


# --- causal convolutions and packed sequences ---


def sequence_runs(seq_idx: Tensor | None, cu_seqlens: Tensor | None, length: int) -> Tensor | None:
    """The number of the sequence of every token, (B, T)."""
    if cu_seqlens is not None:
        position = torch.arange(length, device=cu_seqlens.device)
        return (position[:, None] >= cu_seqlens).sum(-1)[None]
    if seq_idx is None:
        return None
    return F.pad((seq_idx[:, 1:] != seq_idx[:, :-1]).long(), (1, 0)).cumsum(-1)[:, :length]


def convolved(
    z: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, runs: Tensor | None
) -> Tensor:
    """The convolution of channels-first z: PyTorch's own where nothing is packed."""
    reach, length = weight.shape[1] - 1, z.shape[-1]
    z = F.pad(z, (reach, 0)) if state is None else torch.cat([state.to(z.dtype), z], -1)
    if runs is None and length > 0:
        return F.conv1d(z.to(weight.dtype), weight[:, None], bias, groups=z.shape[1])
    runs = z.new_zeros(z.shape[0], length) if runs is None else runs
    runs = runs - runs[:, :1]  # tokens before the row are of its first sequence
    padded = F.pad(runs, (reach, 0))
    u = torch.zeros_like(z[..., :length]) + (0 if bias is None else bias[:, None])
    for k in range(reach + 1):
        same_run = (padded[:, k : k + length] == runs).unsqueeze(1)
        u = u + weight[:, k, None] * z[..., k : k + length] * same_run
    return u


def document_ids(cu_seqlens: Tensor, length: int) -> Tensor:
    """Ids of documents from where they begin; what follows the last end is padding."""
    position = torch.arange(length, device=cu_seqlens.device)
    ids = (position[:, None] >= cu_seqlens[None]).sum(-1) - 1
    return torch.where(position < cu_seqlens[-1], ids, -1)[None]


# --- rotary position embeddings ---


def per_channel(angle: Tensor, style: str) -> Tensor:
    """A value for both channels of every pair."""
    if style == "half":
        return torch.cat((angle, angle), dim=-1)
    return angle.repeat_interleave(2, -1)


def angles_of_sections(
    angle: Tensor, sections: Sequence[int], arrangement: str, style: str
) -> Tensor:
    """The angles of each pair, taken from the grid that the pair belongs to."""
    count, pairs = len(sections), sum(sections)
    per_channel = angle.shape[-1] == 2 * pairs  # a value for each channel
    if per_channel and style == "interleaved":
        even = angles_of_sections(angle[..., ::2], sections, arrangement, style)
        odd = angles_of_sections(angle[..., 1::2], sections, arrangement, style)
        return torch.stack((even, odd), dim=-1).flatten(-2)
    if arrangement == "chunked":
        parts = angle.split([*sections] * (1 + per_channel), dim=-1)
        return torch.cat([part[i % count] for i, part in enumerate(parts)], dim=-1)
    chosen = angle[0].clone()
    for grid in range(1, count):
        for start in (0, pairs)[: 1 + per_channel]:
            end = start + min(sections[grid] * count, pairs)
            channels = slice(start + grid, end, count)
            chosen[..., channels] = angle[grid, ..., channels]
    return chosen


# --- attention over lists of keys, and the indexer that makes them ---


def at_listed_keys(x: Tensor, indices: Tensor, fill: float) -> Tensor:
    """Gather a (queries, keys) tensor at the listed keys."""
    padded = torch.cat([x, x.new_full((*x.shape[:-1], 1), fill)], -1)
    return padded.gather(-1, indices.long() % padded.shape[-1])


def score_of_head(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """The weighted scores of one head of the indexer."""
    return torch.relu(q @ k.mT).to(w.dtype) * w[..., None]


def scores_of_all_keys(q: Tensor, k: Tensor, w: Tensor, scale: float | None) -> Tensor:
    """Scores of all keys, (B, L, S), head after head."""
    w = w.to(statistics_dtype(q))
    run = functools.partial(checkpoint, score_of_head, use_reentrant=False)
    heads = [run(q[:, :, h], k, w[:, :, h]) for h in range(q.shape[2])]
    return torch.stack(heads).sum(0) * (q.shape[-1] ** -0.5 if scale is None else scale)
