"""Formats of FP8, and scales that are powers of two."""

from typing import NamedTuple

import torch
from torch import Tensor

# Of factors and of gradients: those of OCP's standard, and those without infinities and negative
# zero that some hardware multiplies instead.
FORMATS = (
    (torch.float8_e4m3fn, torch.float8_e5m2),
    (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
FACTOR, GRADIENT = FORMATS[0]
LEAST = 2.0**-100  # a largest element that is smaller counts as this: scales have an inverse
LEAST_BITS = 27 << 23
INFINITY_BITS = 0x7F800000
ALIGNED = 16  # columns that the matrix library asks for
LARGEST = {  # the largest number of a format of rows: its mantissa in fp32, and its exponent
    torch.float8_e4m3fn: (0x600000, 8),
    torch.float8_e4m3fnuz: (0x700000, 7),
}


class Rounded(NamedTuple):
    """A tensor in FP8: ``data * scale``."""

    data: Tensor
    scale: Tensor
