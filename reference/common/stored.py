"""Weights that are stored in another form, at the GEMM that needs their numbers."""

from typing import Any

from torch import Tensor


def opened(weight: Tensor) -> Tensor:
    """The numbers of a weight: as it is, or what its ``dequantized`` makes for this one GEMM."""
    dequantized: Any = getattr(weight, "dequantized", None)
    return weight if dequantized is None else dequantized()


def pieces(weight: Tensor) -> list[Tensor]:
    """Parts of a weight by its rows, (..., rows, K), whose numbers fit in the configured memory."""
    parts: Any = getattr(weight, "pieces", None)
    return [weight] if parts is None else parts()
