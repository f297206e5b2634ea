"""What a LoRA adapter adds to a linear layer, ``y = base + scale (x a') b'``.

``x a'`` is not kept: backward computes it again.
"""

import torch
from torch import Tensor

from liger_multi.reference.chunking import as_rows
from liger_multi.reference.low_rank import add_, gradient, narrow, widened


def forward(base: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The sum in the dtype of the base."""
    low, rows = narrow(as_rows(x), a.t()), as_rows(base)
    if low.dtype == base.dtype:
        y = torch.addmm(rows, low, b.t(), alpha=scale)
    else:
        y = add_(rows.clone(memory_format=torch.contiguous_format), low, b.t(), scale)
    return y.view(base.shape)


def backward(
    dy: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float,
    needs_x: bool, needs_a: bool, needs_b: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Three thin products, five with those that are made again; none is as large as the layer."""
    rows, upstream = as_rows(x), as_rows(dy)
    dx, da, db = x.new_empty(0), a.new_empty(0), b.new_empty(0)
    if needs_x or needs_a:
        low = narrow(upstream, b)
        if needs_x:
            dx = widened(low, a, scale, x.dtype).view(x.shape)
        if needs_a:
            da = gradient(low, rows, scale, a.dtype)
    if needs_b:
        db = gradient(upstream, narrow(rows, a.t()), scale, b.dtype)
    return dx, da, db
