"""What torch_npu's fused operators compute, in plain PyTorch, with the limits of their pages.

The meta functions of torch_npu check names and counts alone. A reference here raises where the
vendor's documentation does, so that a call which a device would refuse fails in the simulation too.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

REFERENCES: dict[str, Callable[..., Any]] = {}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def reference(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register under the operator's name."""
    REFERENCES[function.__name__] = function
    return function


def limit(holds: bool, text: str) -> None:
    """Raise where a documented limit does not hold."""
    if not holds:
        raise RuntimeError(f"limit of torch_npu: {text}")


def _norm_limits(x: Tensor, gamma: Tensor) -> None:
    limit(gamma is not None, "gamma is required")
    limit(x.dtype in FLOATS and gamma.dtype == x.dtype, f"x {x.dtype} and gamma {gamma.dtype}")
    limit(2 <= x.dim() <= 8, f"x of {x.dim()} axes")
    limit(x.shape[-gamma.dim() :] == gamma.shape, f"gamma {gamma.shape} for x {x.shape}")
    limit(x.numel() > 0, "x is empty")


@reference
def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Y and rstd."""
    _norm_limits(x, gamma)
    rstd = torch.rsqrt(x.float().pow(2).mean(-1, True) + epsilon)
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


@reference
def npu_rms_norm_backward(
    dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Dx, and dgamma in fp32."""
    _norm_limits(x, gamma)
    limit(dy.dtype == x.dtype, f"dy {dy.dtype} and x {x.dtype}")
    n, g = x.float() * rstd, dy.float() * gamma.float()
    dx = rstd * (g - n * (g * n).mean(-1, True))
    return dx.to(x.dtype), (dy.float() * n).reshape(-1, gamma.numel()).sum(0)


@reference
def npu_add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Y, rstd and the sum."""
    limit(x1.dtype == x2.dtype and x1.shape == x2.shape, "x1 and x2 differ")
    total = x1 + x2
    y, rstd = npu_rms_norm(total, gamma, epsilon)
    return y, rstd, total


def _halves(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    limit(x.dtype in FLOATS and 1 <= x.dim() <= 8 and x.shape[dim] % 2 == 0, f"x {x.shape}")
    limit(x.numel() > 0, "x is empty")
    a, b = x.float().chunk(2, dim)
    return a, b


@reference
def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """Silu of the first half times the second."""
    a, b = _halves(x, dim)
    return (F.silu(a) * b).to(x.dtype)


@reference
def npu_swiglu_backward(dy: Tensor, x: Tensor, dim: int = -1) -> Tensor:
    """Both halves' gradients."""
    a, b = _halves(x, dim)
    g, s = dy.float(), a.sigmoid()
    return torch.cat([g * b * s * (1 + a * (1 - s)), g * a * s], dim).to(x.dtype)


@reference
def npu_geglu(
    x: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[Tensor, Tensor]:
    """Y and the activation; by default that of the right half, by tanh."""
    a, b = _halves(x, dim)
    gate, up = (a, b) if activate_left else (b, a)
    gelu = F.gelu(gate, approximate="tanh" if approximate else "none")
    return (gelu * up).to(x.dtype), gelu.to(x.dtype)


@reference
def npu_geglu_grad(
    dy: Tensor,
    x: Tensor,
    gelu: Tensor,
    dim: int = -1,
    approximate: int = 1,
    activate_left: bool = False,
) -> Tensor:
    """Both halves' gradients."""
    a, b = _halves(x, dim)
    gate, up = (a, b) if activate_left else (b, a)
    g = dy.float()
    dgate = torch.ops.aten.gelu_backward(
        g * up, gate, approximate="tanh" if approximate else "none"
    )
    parts = (dgate, g * gelu.float())
    return torch.cat(parts if activate_left else parts[::-1], dim).to(x.dtype)


def _rotated(x: Tensor, mode: str, sign: int = 1) -> Tensor:
    if mode == "half":
        a, b = x.chunk(2, -1)
        return torch.cat([-sign * b, sign * a], -1)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([-sign * b, sign * a], -1).flatten(-2)


def _rotary_limits(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> None:
    limit(mode in ("half", "interleave"), f"rotary_mode {mode!r}")
    limit(x.dim() == cos.dim() == 4 and cos.shape == sin.shape, "four axes")
    limit(x.dtype == cos.dtype == sin.dtype and x.dtype in FLOATS, "dtypes")
    limit(x.shape[-1] < 896 and x.shape[-1] % 2 == 0, f"D = {x.shape[-1]}")
    limit(cos.shape[-1] == x.shape[-1] and x.numel() > 0, "D of cos")
    limit(all(c in (1, n) for c, n in zip(cos.shape, x.shape, strict=True)), f"cos {cos.shape}")
    limit(x.shape[0] < 1000 and min(x.shape[1:3]) < 1000, "B and N")
    if mode == "interleave":
        limit(x.shape[0] * min(x.shape[1:3]) < 1000, "B N")
        limit(sum(c != 1 for c in cos.shape[:3]) <= 1, f"cos {cos.shape} of interleave")


@reference
def npu_rotary_mul(
    x: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """The rotation."""
    _rotary_limits(x, cos, sin, rotary_mode)
    f = x.float()
    return (f * cos.float() + _rotated(f, rotary_mode) * sin.float()).to(x.dtype)


@reference
def npu_rotary_mul_backward(
    dy: Tensor, x: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """The rotation back, and the gradients of cos and sin."""
    _rotary_limits(x, cos, sin, rotary_mode)
    g, f = dy.float(), x.float()
    dx = g * cos.float() + _rotated(g * sin.float(), rotary_mode, -1)
    dcos, dsin = (
        (g * f).sum_to_size(cos.shape),
        (g * _rotated(f, rotary_mode)).sum_to_size(sin.shape),
    )
    return dx.to(x.dtype), dcos.to(cos.dtype), dsin.to(sin.dtype)


def _attention_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    layout: str,
    mask: Tensor | None,
    sparse: int,
    others: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Heads before tokens in fp32, keys and values repeated; what is hidden."""
    limit(not any(x is not None for x in others.values()), f"options {sorted(others)}")
    limit(layout == "BSND" and q.dim() == 4 and q.shape[2] == heads, f"layout {layout!r}")
    limit(q.dtype == k.dtype == v.dtype and q.dtype in FLOATS, "dtypes")
    limit(v.shape[3] <= q.shape[3] == k.shape[3] <= 768 and heads <= 256, "D and N")
    limit(heads % k.shape[2] == 0 and k.shape[:3] == v.shape[:3], f"k {k.shape} of {heads} heads")
    limit(q.numel() > 0 and k.numel() > 0, "an empty tensor")
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    hidden = torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool)
    if sparse == 3:
        expected_mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
        limit(
            mask is not None and torch.equal(mask.bool(), expected_mask),
            "the mask of sparse_mode 3",
        )
        hidden = torch.ones_like(hidden).triu(k.shape[2] - q.shape[2] + 1)
        limit(not bool(hidden.all(1).any()), "a query that sees no key wants inner_precise 2")
    else:
        limit(sparse == 0 and mask is None, f"sparse_mode {sparse} and its mask")
    each = heads // k.shape[1]
    return q, k.repeat_interleave(each, 1), v.repeat_interleave(each, 1), hidden


@reference
def npu_fusion_attention_v3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None,
    sparse_mode: int = 0,
    **others: Any,
) -> tuple[Tensor, ...]:
    """The result, eight copies of every row's maximum and sum, and what dropout would leave."""
    unsupported = (pse, padding_mask, prefix, actual_seq_qlen, actual_seq_kvlen)
    limit(
        all(x is None for x in unsupported) and keep_prob == 1.0, "options that nothing here wants"
    )
    wide, keys, values, hidden = _attention_scores(
        q, k, v, head_num, input_layout, atten_mask, sparse_mode, others
    )
    s = (wide @ keys.mT * scale).masked_fill(hidden, -torch.inf)
    top = s.amax(-1, keepdim=True)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    y = (p / total @ values).transpose(1, 2).to(q.dtype).contiguous()
    copies = [x.expand(*x.shape[:3], 8).contiguous() for x in (top, total)]
    return y, *copies, q.new_empty(0), *(torch.zeros(1, dtype=torch.int64) for _ in range(2))


@reference
def npu_fusion_attention_grad_v3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    attention_in: Tensor,
    scale_value: float = 1.0,
    atten_mask: Tensor | None = None,
    sparse_mode: int = 0,
    **others: Any,
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v from the statistics; of a bias and of sinks, nothing."""
    wide, keys, values, hidden = _attention_scores(
        q, k, v, head_num, input_layout, atten_mask, sparse_mode, others
    )
    limit(dy.dtype == q.dtype and dy.shape == attention_in.shape, f"dy {dy.shape}")
    limit(softmax_max.shape == softmax_sum.shape == (*wide.shape[:3], 8), "statistics")
    limit(softmax_max.dtype == softmax_sum.dtype == torch.float32, "dtypes of statistics")
    s = (wide @ keys.mT * scale_value).masked_fill(hidden, -torch.inf)
    p = torch.exp(s - softmax_max[..., :1]) / softmax_sum[..., :1]
    up, y = (x.transpose(1, 2).float() for x in (dy, attention_in))
    ds = p * (up @ values.mT - (up * y).sum(-1, keepdim=True)) * scale_value
    groups = (k.shape[2], head_num // k.shape[2])
    # over 65 537 queries a CPU's product adds in an order that costs a tolerance of fp32
    sums = ((x.mT.double() @ w.double()) for x, w in ((ds, wide), (p, up)))
    gradients = [ds @ keys, *(total.unflatten(1, groups).sum(2) for total in sums)]
    converted = [x.transpose(1, 2).to(q.dtype).contiguous() for x in gradients]
    return *converted, q.new_empty(0), torch.zeros(())


@reference
def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Rows sorted by expert and the row of every pair; of an expert's pairs the last comes first.

    The page promises no order among them.
    """
    limit(num_out_tokens is None and not padded_mode, "options that nothing here wants")
    limit(tokens.dim() == indices.dim() == 2 and tokens.dtype in FLOATS, f"tokens {tokens.dtype}")
    limit(indices.dtype in (torch.int32, torch.int64), f"indices {indices.dtype}")
    limit(indices.shape[1] <= 512 and indices.numel() < 16777215, f"indices {indices.shape}")
    limit(bool(((indices >= 0) & (indices < 16777215)).all()), "a value of indices")
    flat = indices.reshape(-1)
    order = flat.numel() - 1 - flat.flip(0).argsort(stable=True)
    place = torch.empty(flat.numel(), dtype=torch.int32)
    place[order] = torch.arange(flat.numel(), dtype=torch.int32)
    return tokens[order // indices.shape[1]], place


@reference
def npu_moe_token_unpermute(
    rows: Tensor,
    place: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Any = None,
) -> Tensor:
    """The weighted sum over the token-expert pairs of every token."""
    limit(restore_shape is None and not padded_mode, "options that nothing here wants")
    limit(rows.dim() == 2 and rows.dtype in FLOATS, f"rows {rows.dtype} {rows.shape}")
    limit(place.dtype == torch.int32 and place.shape == rows.shape[:1], f"place {place.shape}")
    limit(bool((place.sort().values == torch.arange(place.numel())).all()), "no permutation")
    weights = torch.ones(place.numel(), 1, dtype=rows.dtype) if probs is None else probs
    # the page lists dtypes, and does not say that they may differ
    limit(weights.dim() == 2 and weights.dtype == rows.dtype, f"probs {weights.dtype}")
    limit(weights.numel() == rows.shape[0] and weights.shape[1] <= 512, f"probs {weights.shape}")
    wide = rows.float()[place.long()].view(*weights.shape, -1)
    return (wide * weights.float().unsqueeze(-1)).sum(1).to(rows.dtype)


def _grouped_limits(x: Tensor, weight: Tensor, group_list: Tensor, dtypes: Any) -> list[int]:
    """What both grouped GEMMs want; where groups begin and end."""
    limit(x.dtype == weight.dtype and x.dtype in dtypes, f"x {x.dtype} and weight {weight.dtype}")
    limit(x.dim() == 2 and x.is_contiguous(), f"x {x.shape} {x.stride()}")
    limit(group_list.dtype == torch.int64 and group_list.dim() == 1, f"groups {group_list.dtype}")
    limit(group_list.numel() <= 1024, f"{group_list.numel()} groups")
    limit(max(*x.shape[1:], *weight.shape[1:]) < 65536, f"x {x.shape} and weight {weight.shape}")
    ends: list[int] = [0, *group_list.tolist()]
    limit(ends == sorted(ends), f"groups {ends}")
    return ends


@reference
def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    group_list: Tensor,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
) -> list[Tensor]:
    """The rows of every group times its weight."""
    limit(len(x) == len(weight) == 1 and split_item in (2, 3) and group_type == 0, "the form")
    rows, factors = x[0], weight[0]
    ends = _grouped_limits(rows, factors, group_list, FLOATS)
    limit(factors.dim() == 3 and factors.shape[1] == rows.shape[1], f"weight {factors.shape}")
    limit(factors.is_contiguous() or factors.mT.is_contiguous(), f"strides {factors.stride()}")
    limit(len(ends) == factors.shape[0] + 1 and group_list_type == 0, f"{len(ends) - 1} groups")
    limit(ends[-1] == rows.shape[0], f"groups end at {ends[-1]}, of {rows.shape[0]} rows")
    groups = zip(pairwise(ends), factors, strict=True)
    parts = [rows[a:b].float() @ w.float() for (a, b), w in groups]
    return [torch.cat(parts).to(rows.dtype)]


@reference
def npu_grouped_matmul_add_(
    total: Tensor,
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    *,
    transpose_x: bool = True,
    transpose_weight: bool = False,
    group_type: int = 2,
    group_list_type: int = 0,
) -> Tensor:
    """Products of both sides' rows of every group, added in place."""
    limit(transpose_x and not transpose_weight and group_type == 2, "the form")
    ends = _grouped_limits(x, weight, group_list, FLOATS[1:])
    limit(weight.dim() == 2 and weight.is_contiguous(), f"weight {weight.shape}")
    limit(weight.shape[0] == x.shape[0] and ends[-1] <= x.shape[0], f"groups end at {ends[-1]}")
    limit(total.dtype == torch.float32 and group_list_type == 0, f"total {total.dtype}")
    limit(total.shape == (len(ends) - 1, x.shape[1], weight.shape[1]), f"total {total.shape}")
    for e, (a, b) in enumerate(pairwise(ends)):
        total[e] += x[a:b].float().mT @ weight[a:b].float()
    return total


# Of autograd's formulas that torch_npu replaces.


@reference
def _npu_moe_token_unpermute(
    rows: Tensor,
    place: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Any = None,
) -> tuple[Tensor, Tensor]:
    """What a call outside of operators of ours becomes: the sum, and rows to keep."""
    return npu_moe_token_unpermute(rows, place, probs, padded_mode, restore_shape), rows


@reference
def matmul_backward(
    dy: Tensor, a: Tensor, b: Tensor, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of both factors."""
    wide_a = a.unsqueeze(0) if a.dim() == 1 else a
    wide_b = b.unsqueeze(-1) if b.dim() == 1 else b
    dy = dy.unsqueeze(-1) if b.dim() == 1 else dy
    dy = dy.unsqueeze(-2) if a.dim() == 1 else dy
    da = (dy @ wide_b.mT).sum_to_size(wide_a.shape).reshape(a.shape)
    db = (wide_a.mT @ dy).sum_to_size(wide_b.shape).reshape(b.shape)
    return da if mask[0] else None, db if mask[1] else None


@reference
def npu_gather_backward(
    dy: Tensor, size: list[int], dim: int, index: Tensor, sparse_grad: bool
) -> Tensor:
    """Scatter what was gathered."""
    return dy.new_zeros(size).scatter_add_(dim, index, dy)


@reference
def repeat_interleave_backward_int(
    dy: Tensor, x: Tensor, repeats: int, dim: int | None = None
) -> Tensor:
    """Sum over repetitions."""
    if dim is None:
        return dy.view(-1, repeats).sum(1).view(x.shape)
    parts: Tensor = dy.unflatten(dim, (x.shape[dim], repeats))
    return parts.sum(dim + 1 if dim >= 0 else dim)


@reference
def _npu_dtype_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A cast."""
    return x.to(dtype, copy=True)


@reference
def _npu_dtype_cast_backward(dy: Tensor, dtype: torch.dtype) -> Tensor:
    """The cast back."""
    return dy.to(dtype, copy=True)
