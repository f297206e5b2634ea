"""RMSNorm of groups times an activated gate, in the order of the Hugging Face classes."""

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import as_rows, row_blocks, statistics_dtype


def _activate(gate: Tensor, activation: str) -> Tensor:
    return torch.nn.functional.silu(gate) if activation == "silu" else torch.sigmoid(gate)


def _slope(gate: Tensor, activation: str) -> Tensor:
    p = torch.sigmoid(gate)
    return p * (1 + gate * (1 - p)) if activation == "silu" else p * (1 - p)


def _scaled(
    n: Tensor, weight: Tensor | None, offset: float, casting: str, dtype: torch.dtype
) -> Tensor:
    """``w * n`` before a gate and the last rounding."""
    if weight is None:
        return n
    if casting == "gemma":
        return n * (offset + weight.to(n.dtype))
    w = weight + offset if offset else weight
    return w * n.to(dtype) if casting == "llama" else w * n


def forward(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
    group_size: int,
    norm_first: bool,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """Normalize block by block of rows; statistics and gate in fp32 (fp64 for fp64)."""
    acc_dtype, x2d, gates = (
        statistics_dtype(x.dtype),
        as_rows(x),
        None if gate is None else as_rows(gate),
    )
    groups, dtype = x.shape[-1] // group_size, x.dtype
    if weight is not None and casting == "llama" and (gate is None or not norm_first):
        dtype = torch.promote_types(x.dtype, weight.dtype)
    result = x.new_empty(x.shape, dtype=dtype)
    y = result.view(x2d.shape)  # the result is no view, so that models may write to it
    rstd = x2d.new_empty((x2d.shape[0], groups), dtype=acc_dtype)
    for block in row_blocks(x2d.shape[0], 5 * x2d.shape[1] * acc_dtype.itemsize):
        f = x2d[block].to(acc_dtype)
        act = None if gates is None else _activate(gates[block].to(acc_dtype), activation)
        if act is not None and not norm_first:
            f = f * act
        parts = f.unflatten(-1, (groups, group_size)) if f.numel() else f[..., None]
        r = torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + eps)
        n = _scaled((parts * r).flatten(-2), weight, offset, casting, x.dtype)
        y[block] = n * act if act is not None and norm_first else n
        rstd[block] = r.squeeze(-1)[:, :groups]
    return result, rstd.view(*x.shape[:-1], groups)


def backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting: str,
    group_size: int,
    norm_first: bool,
    activation: str,
    needs_x: bool,
    needs_gate: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Through the gate; ``du = rstd * (g - n * mean(g * n))`` with ``g = d(w * n) * w``."""
    acc_dtype, x2d, dy2d, none = rstd.dtype, as_rows(x), as_rows(dy), x.new_empty(0)
    rstd2d, gates = as_rows(rstd), none if gate is None else as_rows(gate)
    groups, last = rstd2d.shape[1], gate is not None and norm_first
    dx = x2d.new_empty(x2d.shape) if needs_x else none
    dgate = gates.new_empty(gates.shape if needs_gate else (0,))
    dw = None if weight is None or not needs_weight else torch.zeros_like(weight, dtype=acc_dtype)
    w = None if weight is None else weight.to(acc_dtype) + offset
    for block in row_blocks(x2d.shape[0], 8 * x2d.shape[1] * acc_dtype.itemsize):
        f, g = x2d[block].to(acc_dtype), dy2d[block].to(acc_dtype)
        z = None if gate is None else gates[block].to(acc_dtype)
        act = None if z is None else _activate(z, activation)
        u = f if act is None or last else f * act
        r = rstd2d[block].repeat_interleave(group_size, -1)
        n = u * r
        rounded = n.to(x.dtype).to(acc_dtype) if casting == "llama" and w is not None else n
        if z is not None and last and needs_gate:
            dgate[block] = g * (rounded if w is None else rounded * w) * _slope(z, activation)
        g = g * act if act is not None and last else g
        if dw is not None:
            dw += (g * rounded).sum(0)
        if not needs_x and (last or not needs_gate):
            continue
        g = g if w is None else g * w
        shape = (-1, groups, group_size)
        projection = (g * n).view(shape).mean(-1).repeat_interleave(group_size, -1)
        du = (g - n * projection) * r
        if needs_x:
            dx[block] = du if act is None or last else du * act
        if z is not None and not last and needs_gate:
            dgate[block] = du * f * _slope(z, activation)
    dweight = none if dw is None or weight is None else dw.to(weight.dtype)
    shaped = dgate if gate is None or not needs_gate else dgate.view(gate.shape)
    return dx.view(x.shape) if needs_x else dx, shaped, dweight
