"""Tensors in FP8: one scale a tensor, e4m3 for factors, e5m2 for gradients.

Scales are powers of two, so that they move no rounding and chunks agree.

GEMMs of a head in FP8: ``logits = h @ w.T`` and, where asked for, ``dh = dlogits @ w``.
Factors are rounded, products accumulated in fp32 and rounded to the dtype of logits. The gradient
of the weight is left in 16 bits. A CPU has no such product and multiplies the rounded factors.
"""

import functools
from typing import Protocol

import torch
from torch import Tensor

from liger_multi._torch_private import scaled_mm
from liger_multi.reference.common.chunking import row_blocks
from liger_multi.reference.common.float8 import ALIGNED, FACTOR, FORMATS, LEAST, Rounded
from liger_multi.reference.common.stored import opened, pieces

# --- rounding ---


class Rounding(Protocol):
    """How a backend rounds to FP8."""

    def rounded(self, x: Tensor, dtype: torch.dtype = FACTOR) -> Rounded:
        """The nearest values, by the smallest power of two under which none overflows."""

    def both_ways(self, x: Tensor, dtype: torch.dtype = FACTOR) -> tuple[Rounded, Rounded]:
        """Rounded factors, and the same laid out as ``x.t()``."""


def scale_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest power of two by which ``largest`` is divided to fit into ``dtype``."""
    ratio = largest.float().clamp_min(LEAST) / torch.finfo(dtype).max
    return torch.exp2(torch.ceil(torch.log2(ratio)))


def _largest(x: Tensor) -> Tensor:
    smallest, largest = torch.aminmax(x) if x.numel() else (x.new_zeros(()), x.new_zeros(()))
    return torch.maximum(-smallest, largest)


class PlainRounding:
    """Rounding in plain PyTorch."""

    @staticmethod
    def rounded(x: Tensor, dtype: torch.dtype = FACTOR) -> Rounded:
        """The nearest values, by the smallest power of two under which none overflows."""
        scale = scale_for(_largest(x), dtype)
        data = torch.empty(x.shape, dtype=dtype, device=x.device)
        for block in row_blocks(x.shape[0], x.shape[1] * 4):
            data[block].copy_(x[block].float() / scale)
        return Rounded(data, scale)

    @staticmethod
    def both_ways(x: Tensor, dtype: torch.dtype = FACTOR) -> tuple[Rounded, Rounded]:
        """Rounded factors, and the same laid out as ``x.t()``."""
        rounded = PlainRounding.rounded(x, dtype)
        return rounded, Rounded(rounded.data.t().contiguous(), rounded.scale)


PLAIN = PlainRounding()


def _rounded_by_pieces(parts: list[Tensor], cols: int, dtype: torch.dtype) -> Rounded:
    """A weight of several pieces, each opened twice: for the largest number, and to be rounded."""
    sizes, device = [part.shape[0] for part in parts], parts[0].device
    scale = scale_for(torch.stack([_largest(opened(part)) for part in parts]).amax(), dtype)
    data = torch.empty(sum(sizes), cols, dtype=dtype, device=device)
    for part, out in zip(parts, data.split(sizes), strict=True):
        numbers = opened(part)
        for block in row_blocks(out.shape[0], cols * 4):
            out[block].copy_(numbers[block].float() / scale)
        del numbers
    return Rounded(data, scale)


# --- products of a head ---


def logits_dtype(compute_dtype: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """The dtype of logits; what is multiplied in FP8 is written in 16 bits."""
    if compute_dtype is not None and compute_dtype.itemsize == 1:
        return dtype if dtype.itemsize == 2 else torch.bfloat16
    return compute_dtype or dtype


def unsupported(device: torch.device, weight: Tensor) -> str | None:
    """Why a device cannot multiply in 8 bits; None where it can, and on a CPU, which need not."""
    if device.type in ("cpu", "meta"):
        return None
    if weight.shape[0] % ALIGNED or weight.shape[1] % ALIGNED:
        return f"both axes of weight must be multiples of {ALIGNED}, got {tuple(weight.shape)}"
    return _supported_formats(device)[1]


def formats(device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """The FP8 dtypes of factors and gradients on a device; OCP's if it supports none."""
    return FORMATS[0] if device.type in ("cpu", "meta") else _supported_formats(device)[0]


@functools.cache
def _supported_formats(device: torch.device) -> tuple[tuple[torch.dtype, torch.dtype], str | None]:
    """The first pair of formats that the device supports; if none, the error of the first pair."""
    reasons = []
    for factor, gradient in FORMATS:
        try:
            unit = torch.ones((), device=device)
            a = torch.zeros(ALIGNED, ALIGNED, device=device)
            b, out = Rounded(a.to(factor), unit), a.to(torch.bfloat16)
            _multiply(b, b, out, True)
            _multiply(Rounded(a.to(gradient), unit), b, out, False)
        except (RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
            reasons.append(f"no product in 8 bits here: {error!s:.80}")
        else:
            return (factor, gradient), None
    return FORMATS[0], reasons[0]


def _multiply(a: Rounded, b: Rounded, out: Tensor, fast: bool) -> None:
    """``out = a @ b.T``, both factors with contiguous rows."""
    scaled_mm(
        a.data,
        b.data.t(),
        scale_a=a.scale,
        scale_b=b.scale,
        out_dtype=out.dtype,
        use_fast_accum=fast,
        out=out,
    )


def multiply(a: Rounded, b: Rounded, out: Tensor, fast: bool = False) -> Tensor:
    """``out = a @ b.T``; ``fast``: a Hopper card may keep 14 bits of its sums between steps."""
    if out.is_meta:
        return out
    if out.device.type == "cpu":
        left, right = (t.data.to(out.dtype) * t.scale.to(out.dtype) for t in (a, b))
        return torch.mm(left, right.t(), out=out)
    _multiply(a, b, out, fast)
    return out


class Head:
    """The weight of a head in 8 bits, and its products.

    Args: weight: ``(V, H)``, in the dtype of logits; codes of 4 bits are opened by pieces.
        gradients: Whether the gradient of hidden states is such a product as well.
        needs_gradient: Whether that gradient is needed. rounding: How to round.

    Raises:
        RuntimeError: The device has no such product, or the sizes do not suit it.
    """

    def __init__(
        self, weight: Tensor, gradients: bool, needs_gradient: bool, rounding: Rounding = PLAIN
    ) -> None:
        reason = unsupported(weight.device, weight)
        if reason is not None:
            raise RuntimeError(f"head_gemms in 8 bits: {reason}")
        self.gradients, self._rounding = gradients, rounding
        self._factor, self._gradient = formats(weight.device)
        parts, by_columns = pieces(weight), gradients and needs_gradient
        if len(parts) > 1:
            self._weight = _rounded_by_pieces(parts, weight.shape[1], self._factor)
            if by_columns:
                self._across = Rounded(self._weight.data.t().contiguous(), self._weight.scale)
        elif by_columns:
            self._weight, self._across = rounding.both_ways(opened(weight), self._factor)
        else:
            self._weight = rounding.rounded(opened(weight), self._factor)

    def logits(self, hidden: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """``hidden @ weight.T + bias``; sums of so few products as a row has need no fp32."""
        multiply(self._rounding.rounded(hidden, self._factor), self._weight, out, fast=True)
        return out if bias is None else out.add_(bias)

    def hidden_gradient(self, dlogits: Tensor, out: Tensor) -> Tensor:
        """``dlogits @ weight``; only after ``needs_gradient``."""
        return multiply(self._rounding.rounded(dlogits, self._gradient), self._across, out)
