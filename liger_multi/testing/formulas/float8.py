"""Rows in FP8: E4M3 codes as numbers, and one power-of-two scale per row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi.ops import Float8Rows
from liger_multi.ops._float8 import QuantizedOutput


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes as numbers, and the power-of-two scale of every row."""
    padded = F.pad(x.detach().abs(), (0, 1))  # a row of no columns has a largest element, 0
    acc_dtype = torch.promote_types(x.dtype, torch.float32)
    largest = padded.amax(-1, keepdim=True).to(acc_dtype).clamp_min(2.0**-100)
    # a logarithm in 16 bits would round down, and a code above 448 is NaN
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448.0))).to(x.dtype)
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype), scale


def coded(y: Tensor, outputs: tuple[str, ...]) -> tuple[Tensor | None, Float8Rows]:
    """A result where it is wanted, and its rows in FP8."""
    codes, scale = rounded(y.detach())
    rows = Float8Rows(codes.to(torch.float8_e4m3fn), scale.squeeze(-1).float())
    return y if "y" in outputs else None, rows


def either(y: Tensor, quantize: str | None, outputs: tuple[str, ...]) -> Tensor | QuantizedOutput:
    """A result, or with ``quantize`` beside its rows in FP8."""
    return y if quantize is None else QuantizedOutput(*coded(y, outputs))
