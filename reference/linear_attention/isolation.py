"""Sums over the tokens of a chunk in which a NaN or inf stays with those who see its token.

A matmul multiplies every pair of tokens, and 0 times NaN is NaN: by the zeros of pairs that do not
see each other, one number would reach every token of its chunk. So what is not finite is taken as 0
in such a matmul, and the sums of those who see it become NaN. Elsewhere, masks replace and do not
multiply. Whatever is finite has the same bits as without.
"""

import math

import torch
from torch import Tensor


def where_true(x: Tensor, mask: Tensor | None) -> Tensor:
    """``x`` where the mask is true, 0 elsewhere; all of it without a mask."""
    return x if mask is None else x.masked_fill(~mask, 0)


ON_HOST = ("cpu", "meta")  # the meta device stands for a CPU here


def is_finite(x: Tensor) -> bool:
    """Whether all is finite; False on a device, where the answer would need a wait."""
    device_type = x.device.type
    return device_type == "meta" or (device_type == "cpu" and bool(x.sum().isfinite()))


def spread(pairs: Tensor, rows: Tensor, visible: Tensor) -> Tensor:
    """``pairs @ rows``, where row i has what is not finite of the rows that it sees.

    Column by column; on a device, which does this for every call, all columns of a row at once.

    Args:
        pairs: ``(..., i, j)``, 0 where i does not see j.
        rows: ``(..., j, columns)``.
        visible: Bool, as pairs.
    """
    if is_finite(rows):
        return pairs @ rows
    nonfinite = ~rows.isfinite()
    product = pairs @ rows.masked_fill(nonfinite, 0)
    nonfinite = nonfinite if rows.device.type in ON_HOST else nonfinite.any(-1, keepdim=True)
    hit = visible.to(rows.dtype) @ nonfinite.to(rows.dtype) > 0
    return product.masked_fill_(hit, math.nan)


def spread_vector(pairs: Tensor, numbers: Tensor, visible: Tensor) -> Tensor:
    """As :func:`spread`, of one number a token."""
    return spread(pairs, numbers.unsqueeze(-1), visible).squeeze(-1)


def levels(chunk: int, device: torch.device) -> Tensor:
    """Pairs of rows whose blocks of 1, 2, 4 ... rows are neighbors, the later one first.

    Bool, (log2(chunk), chunk, chunk); together, every pair below the diagonal once.
    """
    sizes = 2 ** torch.arange(chunk.bit_length() - 1, device=device).unsqueeze(-1)
    half = torch.arange(chunk, device=device) // sizes
    pair = half // 2
    same_pair: Tensor = pair.unsqueeze(-1) == pair.unsqueeze(-2)
    return same_pair & (half.unsqueeze(-1) > half.unsqueeze(-2))


def _finite_part(x: Tensor, bad_rows: Tensor) -> tuple[Tensor, Tensor]:
    """The rest of what is not finite, and rows that had it or were wrong before."""
    nonfinite = ~x.isfinite()
    return x.masked_fill(nonfinite, 0), bad_rows | nonfinite.any(-1)


def _with_nan_rows(inverse: Tensor, bad_rows: Tensor, visible: Tensor) -> Tensor:
    """An inverse with NaN in the rows that see a wrong one."""
    hit = (visible.to(inverse.dtype) @ bad_rows.to(inverse.dtype).unsqueeze(-1)) > 0
    return inverse.masked_fill(hit & visible, math.nan)


def _doubled(lower: Tensor) -> tuple[Tensor, Tensor]:
    """``(I + lower)^-1`` by blocks of 2, 4, 8 ... rows, and rows that are not finite.

    Two blocks A and C of s rows with B below A have the inverse of 2 s rows with -C^-1 B A^-1 below
    A^-1. Where X holds the inverses of the blocks, and B the blocks below them, that is X - X B X:
    two matmuls of whole chunks per doubling, and no solver of triangular systems.
    """
    chunk, shape = lower.shape[-1], lower.shape
    matrix, bad_rows = _finite_part(lower.flatten(0, -3), lower.new_zeros((), dtype=torch.bool))
    inverse = torch.eye(chunk, dtype=lower.dtype, device=lower.device).expand_as(matrix)
    for i, mask in enumerate(levels(chunk, lower.device).unbind(0)):
        part = matrix * mask
        inverse = torch.baddbmm(inverse, inverse @ part, inverse, alpha=-1) if i else inverse - part
        inverse, bad_rows = _finite_part(inverse, bad_rows)
    return inverse.reshape(shape), bad_rows.reshape(shape[:-1])


def doubled(lower: Tensor, visible: Tensor) -> Tensor:
    """``(I + lower)^-1`` by matmuls alone, of what is 0 on and above the diagonal."""
    return _with_nan_rows(*_doubled(lower), visible)


def solved(lower: Tensor, visible: Tensor) -> Tensor:
    """``(I + lower)^-1`` by a triangular solve.

    Used on a CPU. A device would have to wait to learn whether all is finite, so it uses
    :func:`doubled`.
    """
    if lower.device.type not in ON_HOST:
        return doubled(lower, visible)
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower)
    inverse: Tensor = torch.linalg.solve_triangular(lower, eye, upper=False, unitriangular=True)
    if is_finite(inverse):
        return inverse
    _, bad_rows = _doubled(lower)
    inverse = torch.linalg.solve_triangular(
        where_true(lower, ~bad_rows.unsqueeze(-1)), eye, upper=False, unitriangular=True
    )
    return _with_nan_rows(inverse, bad_rows, visible)
