"""RMSNorm modulated by a condition, ``norm(x) * (1 + scale) + shift``, in PyTorch's order."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import as_rows, row_blocks, statistics_dtype
from liger_multi.reference.common.strict import by_rows
from liger_multi.reference.norms import rms_norm


def _slabs(modulations: int, group_rows: int, row_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of modulations, and of the rows of each, that stay below the limit of a block."""
    for groups in row_blocks(modulations, group_rows * row_bytes):
        for rows in row_blocks(group_rows, (groups.stop - groups.start) * row_bytes):
            yield groups, rows


def _split(x: Tensor, modulations: int) -> Tensor:
    """(modulations, rows of each, H)."""
    x2d = as_rows(x)
    parts: Tensor = x2d.unflatten(0, (modulations, x2d.shape[0] // max(modulations, 1)))
    return parts


def _row_by_row(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    """The norm of every row alone, on memory of its own, so that its bits show no other row."""
    separate_rows = (
        row.clone(memory_format=torch.contiguous_format) for row in as_rows(x).split(1)
    )
    outputs = [rms_norm.forward(row, weight, eps, offset, casting) for row in separate_rows]
    n, rstd = (torch.cat(parts) for parts in zip(*outputs, strict=True))
    return n.view(x.shape), rstd.view(x.shape[:-1])


def forward(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
) -> tuple[Tensor, Tensor]:
    """Norm, product and sum, each rounded where PyTorch rounds it."""
    norm = _row_by_row if by_rows() else rms_norm.forward
    n, rstd = norm(x, weight, eps, offset, casting)
    dtype = torch.promote_types(n.dtype, scale.dtype)
    dtype = dtype if shift is None else torch.promote_types(dtype, shift.dtype)
    y = n.new_empty(n.shape, dtype=dtype)
    if x.numel() == 0:
        return y, rstd
    scales = as_rows(scale if dtype != torch.float64 else scale.double())
    parts, y_rows = _split(n, scales.shape[0]), _split(y, scales.shape[0])
    factors, terms = 1 + scales, None if shift is None else as_rows(shift)
    for groups, rows in _slabs(parts.shape[0], parts.shape[1], 2 * parts.shape[2] * dtype.itemsize):
        row = parts[groups, rows] * factors[groups, None]
        y_rows[groups, rows] = row if terms is None else row + terms[groups, None]
    return y, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    scale: Tensor,
    shift_dtype: torch.dtype | None,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting: str,
    needs_x: bool,
    needs_scale: bool,
    needs_shift: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``dscale`` sums ``dy * norm``, ``dshift`` sums ``dy``; then the gradients of the norm.

    Norm and product are rounded as PyTorch rounds them. Sums over many rows that nearly cancel
    show it: half an ulp of a term is 4 % of such a sum in bf16.
    """
    acc_dtype, scale2d, none = rstd.dtype, as_rows(scale), x.new_empty(0)
    acc_dtype = torch.promote_types(acc_dtype, statistics_dtype(scale.dtype))
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else none
    ds = scale2d.new_zeros(scale2d.shape if needs_scale else (0,), dtype=acc_dtype)
    db = scale2d.new_zeros(scale2d.shape if needs_shift else (0,), dtype=acc_dtype)
    dw = None if weight is None or not needs_weight else torch.zeros_like(weight, dtype=acc_dtype)
    w = None if weight is None else weight.to(acc_dtype) + offset
    norm_dtype = rms_norm.output_dtype(x, weight, casting)
    product_dtype = torch.promote_types(norm_dtype, scale.dtype)
    if x.numel():
        count = scale2d.shape[0]
        xs, dys, rstds = (_split(t, count) for t in (x, dy, rstd.reshape(-1, 1)))
        dx_rows, factors = _split(dx, count) if needs_x else none, 1 + scale2d.to(acc_dtype)
        for groups, rows in _slabs(xs.shape[0], xs.shape[1], 5 * xs.shape[2] * acc_dtype.itemsize):
            n, g = (
                xs[groups, rows].to(acc_dtype) * rstds[groups, rows],
                dys[groups, rows].to(acc_dtype),
            )
            rounded = n.to(x.dtype).to(acc_dtype) if casting == "llama" else n
            if needs_shift:
                db[groups] += g.sum(1)
            if needs_scale:
                norm = (rounded if w is None else rounded * w).to(norm_dtype)
                ds[groups] += (g * norm).to(product_dtype).to(acc_dtype).sum(1)
            g = g * factors[groups, None]
            if dw is not None:
                dw += (g * rounded).sum((0, 1))
            if needs_x:
                g = g if w is None else g * w
                r = rstds[groups, rows]
                dx_rows[groups, rows] = ((g - n * (g * n).mean(-1, keepdim=True)) * r).to(x.dtype)
    dscale, dshift = ds.to(scale.dtype), db.to(shift_dtype or scale.dtype)
    return (
        dx,
        dscale.view(scale.shape) if needs_scale else dscale,
        dshift.view(scale.shape) if needs_shift else dshift,
        none if dw is None or weight is None else dw.to(weight.dtype),
    )
