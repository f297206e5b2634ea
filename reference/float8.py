"""Products of a head in 8 bits: one scale a tensor, e4m3 for factors, e5m2 for gradients.

``logits = h @ w.T`` and ``dh = dlogits @ w`` are products of rounded factors, accumulated in fp32
and rounded to the dtype of logits. Scales are powers of two, so that they move no rounding and
chunks agree. The gradient of the weight is left in 16 bits. A CPU has no such product and
multiplies the rounded factors.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from liger_multi.reference.chunking import row_blocks

FACTOR, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
ALIGNED = 16  # columns that the matrix library asks for


def logits_dtype(compute_dtype: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """The dtype of logits; what is multiplied in 8 bits is written in 16."""
    if compute_dtype is not None and compute_dtype.itemsize == 1:
        return dtype if dtype.itemsize == 2 else torch.bfloat16
    return compute_dtype or dtype


class Rounded(NamedTuple):
    """A tensor in 8 bits: ``data * scale``."""

    data: Tensor
    scale: Tensor


def rounded(x: Tensor, dtype: torch.dtype = FACTOR) -> Rounded:
    """The nearest values of 8 bits, by the smallest power of two under which none overflows."""
    low, high = torch.aminmax(x) if x.numel() else (x.new_zeros(()), x.new_zeros(()))
    largest = torch.maximum(-low, high).float().clamp_min(torch.finfo(torch.float32).tiny)
    scale = torch.exp2(torch.ceil(torch.log2(largest / torch.finfo(dtype).max)))
    data = torch.empty(x.shape, dtype=dtype, device=x.device)
    for block in row_blocks(x.shape[0], x.shape[1] * 4):
        data[block].copy_(x[block].float() / scale)
    return Rounded(data, scale)


def unsupported(device: torch.device, weight: Tensor) -> str | None:
    """Why a device cannot multiply in 8 bits; None where it can, and on a CPU, which need not."""
    if device.type in ("cpu", "meta"):
        return None
    if weight.shape[0] % ALIGNED or weight.shape[1] % ALIGNED:
        return f"both axes of weight must be multiples of {ALIGNED}, got {tuple(weight.shape)}"
    return _refusal(device)


@functools.cache
def _refusal(device: torch.device) -> str | None:
    try:
        one = torch.ones((), device=device)
        a = torch.zeros(ALIGNED, ALIGNED, device=device)
        _multiply(a.to(GRADIENT), a.to(FACTOR), one, one, a.to(torch.bfloat16))
    except (RuntimeError, TypeError, NotImplementedError, AttributeError) as wrong:
        return f"no product in 8 bits here: {wrong!s:.80}"
    return None


def _multiply(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """``out = a @ b.T``, both factors with contiguous rows."""
    product = torch._scaled_mm
    product(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=out.dtype, out=out)


def multiply(a: Rounded, b: Rounded, out: Tensor) -> Tensor:
    """``out = a @ b.T``."""
    if out.is_meta:
        return out
    if out.device.type == "cpu":
        left, right = (t.data.to(out.dtype) * t.scale.to(out.dtype) for t in (a, b))
        return torch.mm(left, right.t(), out=out)
    _multiply(a.data, b.data, a.scale, b.scale, out)
    return out


class Head:
    """The weight of a head in 8 bits, and its products.

    Args:
        weight: ``(V, H)``, in the dtype of logits.

    Raises:
        RuntimeError: The device has no such product, or the sizes do not suit it.
    """

    def __init__(self, weight: Tensor) -> None:
        reason = unsupported(weight.device, weight)
        if reason is not None:
            raise RuntimeError(f"head_products: float8: {reason}")
        self.weight = rounded(weight)
        self._across: Rounded | None = None

    def logits(self, hidden: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """``hidden @ weight.T + bias``."""
        multiply(rounded(hidden), self.weight, out)
        return out if bias is None else out.add_(bias)

    def hidden_gradient(self, dlogits: Tensor, out: Tensor) -> Tensor:
        """``dlogits @ weight``; the weight is laid out for it once."""
        if self._across is None:
            self._across = Rounded(self.weight.data.t().contiguous(), self.weight.scale)
        return multiply(rounded(dlogits, GRADIENT), self._across, out)
