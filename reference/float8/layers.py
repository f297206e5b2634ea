"""GEMMs of layers in FP8, and their gradients; the GEMMs stand in frozen.py.

The gradient of a weight is a GEMM of unrounded numbers.
"""

from typing import TypeVar

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import as_rows
from liger_multi.reference.float8.frozen import coded_gradient, coded_linear, coded_weight
from liger_multi.reference.float8.rows import Float8Rows, Quantizer

Weight = TypeVar("Weight", Tensor, Tensor | None)


def read_weight(weight: Weight, codes: Tensor | None) -> Weight:
    """What is read of a weight: the codes beside it, where it has been rounded before."""
    return weight if codes is None else codes


def layer(
    left: Float8Rows,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    quantizer: Quantizer,
) -> tuple[Tensor, Tensor]:
    """A layer's output, and the scales of its weight; empty where they were given."""
    right = coded_weight(weight, scale, left.codes.dtype, quantizer)
    y = coded_linear(left, right, bias, dtype)
    return y, right.scale if scale is None else right.scale.new_empty(0)


def input_gradient(
    left: Float8Rows,
    weight: Tensor,
    scale: Tensor | None,
    own_scale: Tensor,
    quantizer: Quantizer,
    dtype: torch.dtype,
    onto: Tensor | None = None,
) -> Tensor:
    """The gradient of a layer's input; a weight without given scales is rounded by its own."""
    return coded_gradient(
        left, weight, own_scale if scale is None else None, quantizer, dtype, onto
    )


def weight_gradient(dy: Tensor, x: Tensor | None, is_needed: bool, dtype: torch.dtype) -> Tensor:
    """``dy' x``, or nothing."""
    if not is_needed or x is None:
        return dy.new_empty(0, dtype=dtype)
    return (dy.t() @ as_rows(x)).to(dtype)
