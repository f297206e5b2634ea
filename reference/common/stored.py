"""Weights that are stored in another form, at the GEMM that needs their numbers."""

from typing import Any, Optional

from torch import Tensor

from liger_multi.reference.common.strict import linear, matmul


def opened(weight: Tensor) -> Tensor:
    """The numbers of a weight: as it is, or what its ``dequantized`` makes for this one GEMM."""
    dequantized: Any = getattr(weight, "dequantized", None)
    return weight if dequantized is None else dequantized()


def pieces(weight: Tensor) -> list[Tensor]:
    """Parts of a weight by its rows, (..., rows, K), whose numbers fit in the configured memory."""
    parts: Any = getattr(weight, "pieces", None)
    return [weight] if parts is None else parts()


def linear_of(rows: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    """``rows @ weight.T + bias`` of rows (M, K), one piece of the weight after the other."""
    parts = pieces(weight)
    if len(parts) == 1:
        return linear(rows, opened(weight), bias)
    y = rows.new_empty(rows.shape[0], weight.shape[0])
    sizes = [part.shape[0] for part in parts]
    biases = [None] * len(parts) if bias is None else bias.split(sizes)
    for part, own, place in zip(parts, biases, y.split(sizes, 1), strict=True):
        place.copy_(linear(rows, opened(part), own))
    return y


def gradient_of(dy: Tensor, weight: Tensor, onto: Optional[Tensor] = None) -> Tensor:
    """``dy @ weight`` of rows (M, N), added to ``onto`` in its buffer; a sum over pieces."""
    parts, total = pieces(weight), onto
    columns = dy.split([part.shape[0] for part in parts], 1) if len(parts) > 1 else [dy]
    for part, own in zip(parts, columns, strict=True):
        total = matmul(own, opened(part), total)
    assert total is not None
    return total
