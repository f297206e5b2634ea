"""How far a result may stand from fp64, by dtype: one table for tests, benchmarks and pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """``|got - exact| <= relative * |exact| + of_largest * max|exact|`` for every element."""

    relative: float
    of_largest: float
    reason: str


TOLERANCES = {
    torch.float64: Tolerance(1e-10, 1e-12, "the same equations in another order"),
    torch.float32: Tolerance(1e-5, 2e-6, "fp32 statistics; sums of a few thousand terms"),
    torch.float16: Tolerance(
        2**-9, 2**-9, "two roundings of 2^-11 on a result, and products of rounded factors"
    ),
    torch.bfloat16: Tolerance(
        2**-6, 2**-7, "two roundings of 2^-9 on a result, and products of rounded factors"
    ),
}


def excess(got: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    """The largest error in units of the tolerance of ``dtype``: 1 passes; NaN must meet NaN."""
    if got.shape != exact.shape:
        raise ValueError(f"shapes differ: got {tuple(got.shape)}, exact {tuple(exact.shape)}")
    if exact.numel() == 0:
        return 0.0
    allowed, right = TOLERANCES[dtype], exact.double()
    bound = (
        allowed.relative * right.abs() + allowed.of_largest * right[right.isfinite()].abs().max()
        if (right.isfinite().any())
        else right.new_zeros(right.shape)
    )
    error = (got.double() - right).abs()
    equal = (got.double() == right) | (got.isnan() & right.isnan())
    return float(torch.nan_to_num(torch.where(equal, 0, error / bound), nan=float("inf")).max())
