"""Weights that are stored in another form, at the GEMM that needs their numbers."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from liger_multi.reference.common.strict import linear, matmul, multiply

_PLAIN = (Tensor, Parameter)  # asked first: looking for what a tensor lacks is slow


def opened(weight: Tensor) -> Tensor:
    """The numbers of a weight: as it is, or what its ``dequantized`` makes for this one GEMM."""
    dequantized: Any = None if type(weight) in _PLAIN else getattr(weight, "dequantized", None)
    return weight if dequantized is None else dequantized()


def pieces(weight: Tensor) -> list[Tensor]:
    """Parts of a weight by its rows, (..., rows, K), whose numbers fit in the configured memory."""
    parts: Any = None if type(weight) in _PLAIN else getattr(weight, "pieces", None)
    return [weight] if parts is None else parts()


def opened_if_small(weight: Tensor) -> Tensor:
    """The numbers of a weight that is one piece, for a caller that multiplies with it repeatedly.

    A larger one stays as it is, and is opened piece by piece in each GEMM.
    """
    return opened(weight) if len(pieces(weight)) == 1 else weight


def _by_pieces(
    weight: Tensor, bias: Tensor | None, y: Tensor
) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
    """Every piece of a weight with its part of the bias, and its columns of y."""
    parts = pieces(weight)
    sizes = [part.shape[0] for part in parts]
    biases = [None] * len(parts) if bias is None else bias.split(sizes)
    yield from zip(parts, biases, y.split(sizes, 1), strict=True)


def linear_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` of rows (..., K), one piece of the weight after the other."""
    if len(pieces(weight)) == 1:
        return linear(x, opened(weight), bias)
    rows = x.flatten(0, -2) if x.ndim > 1 else x.unsqueeze(0)
    y = x.new_empty(rows.shape[0], weight.shape[0])
    for part, part_bias, out in _by_pieces(weight, bias, y):
        out.copy_(linear(rows, opened(part), part_bias))
    return y.view(*x.shape[:-1], weight.shape[0])


def linear_into(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Write ``rows @ weight.T + bias`` of rows (M, K) into ``out``, piece by piece."""
    if len(pieces(weight)) == 1:
        return multiply(rows, opened(weight).t(), bias, out)
    for part, part_bias, out_part in _by_pieces(weight, bias, out):
        multiply(rows, opened(part).t(), part_bias, out_part)
    return out


def gradient_into(dy: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """Write ``dy @ weight`` of rows (M, N) into ``out``; a sum over pieces."""
    if len(pieces(weight)) == 1:
        return multiply(dy, opened(weight), None, out)
    return out.copy_(gradient_of(dy, weight))


def gradient_of(dy: Tensor, weight: Tensor, onto: Tensor | None = None) -> Tensor:
    """``dy @ weight`` of rows (M, N), added to ``onto`` in its buffer; a sum over pieces."""
    parts, total = pieces(weight), onto
    if len(parts) == 1:
        return matmul(dy, opened(weight), onto)
    columns = dy.split([part.shape[0] for part in parts], 1)
    for part, dy_part in zip(parts, columns, strict=True):
        total = matmul(dy_part, opened(part), total)
    assert total is not None
    return total
