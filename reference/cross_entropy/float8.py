"""Tensors in 8 bits: one scale a tensor, e4m3 for factors, e5m2 for gradients.

Scales are powers of two, so that they move no rounding and chunks agree.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import row_blocks

# Of factors and of gradients: those of OCP's standard, and those without infinities and negative
# zero that some hardware multiplies instead.
FORMATS = (
    (torch.float8_e4m3fn, torch.float8_e5m2),
    (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
FACTOR, GRADIENT = FORMATS[0]
LEAST = 2.0**-100  # a largest element that is smaller counts as this: scales have an inverse


class Rounded(NamedTuple):
    """A tensor in 8 bits: ``data * scale``."""

    data: Tensor
    scale: Tensor


class Rounding(Protocol):
    """How a backend rounds to 8 bits."""

    def rounded(self, x: Tensor, dtype: torch.dtype = FACTOR) -> Rounded:
        """The nearest values, by the smallest power of two under which none overflows."""

    def both_ways(self, x: Tensor, dtype: torch.dtype = FACTOR) -> tuple[Rounded, Rounded]:
        """Rounded factors, and the same laid out as ``x.t()``."""


def scale_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest power of two by which ``largest`` is divided to fit into ``dtype``."""
    room = largest.float().clamp_min(LEAST) / torch.finfo(dtype).max
    return torch.exp2(torch.ceil(torch.log2(room)))


class PlainRounding:
    """Rounding in plain PyTorch."""

    @staticmethod
    def rounded(x: Tensor, dtype: torch.dtype = FACTOR) -> Rounded:
        """The nearest values, by the smallest power of two under which none overflows."""
        low, high = torch.aminmax(x) if x.numel() else (x.new_zeros(()), x.new_zeros(()))
        scale = scale_for(torch.maximum(-low, high), dtype)
        data = torch.empty(x.shape, dtype=dtype, device=x.device)
        for block in row_blocks(x.shape[0], x.shape[1] * 4):
            data[block].copy_(x[block].float() / scale)
        return Rounded(data, scale)

    @staticmethod
    def both_ways(x: Tensor, dtype: torch.dtype = FACTOR) -> tuple[Rounded, Rounded]:
        """Rounded factors, and the same laid out as ``x.t()``."""
        made = PlainRounding.rounded(x, dtype)
        return made, Rounded(made.data.t().contiguous(), made.scale)


PLAIN = PlainRounding()
