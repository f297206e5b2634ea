"""Activations in a byte: codes with a scale per row, for what waits for backward."""

from __future__ import annotations

import torch
from torch import Tensor

FORMATS = ("float8",)
CODES = torch.float8_e4m3fn
LARGEST = torch.finfo(CODES).max
SHORTEST_ROW = 16  # of elements: scales take no more than a quarter of the codes
_SLICE = 2**24  # elements that are converted at a time, so that their fp32 copy is small


def row_length(x: Tensor) -> int:
    """Elements of a row: the axis whose elements are neighbors in memory."""
    sizes = [size for size, stride in zip(x.shape, x.stride(), strict=True) if stride == 1]
    return max(sizes, default=1)


def compressible(x: Tensor) -> bool:
    """Whether a tensor holds numbers in rows that are long enough."""
    return x.is_floating_point() and x.dtype.itemsize > 1 and row_length(x) >= SHORTEST_ROW


def encode(x: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Codes in E4M3 and a scale per row, in which the largest of a row is the largest code.

    Args:
        x: Memory of a tensor without gaps, as one row.
        columns: Elements of a row, from :func:`row_length`.

    Returns:
        Codes of x and fp32 scales ``(len(x) / columns,)``. ``codes * scale`` is x with a relative
        error of at most 1/16 above 2^-15 of the row's largest element. A row with a number that is
        not finite has no finite numbers afterwards.
    """
    rows = x.view(-1, columns)
    scales = torch.empty(len(rows), dtype=torch.float32, device=x.device)
    codes = torch.empty(rows.shape, dtype=CODES, device=x.device)
    for part in _slices(len(rows), columns):
        values = rows[part].float()
        scale = (values.abs().amax(1) / LARGEST).clamp_min_(torch.finfo(torch.float32).tiny)
        scales[part] = scale
        codes[part] = (values / scale[:, None]).to(CODES)
    return codes.view(-1), scales


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What :func:`encode` made codes of, rounded to them and to a dtype, as one row."""
    rows = codes.view(len(scales), -1)
    x = torch.empty(rows.shape, dtype=dtype, device=codes.device)
    for part in _slices(*rows.shape):
        x[part] = rows[part].float().mul_(scales[part, None]).to(dtype)
    return x.view(-1)


def _slices(rows: int, columns: int) -> list[slice]:
    step = max(1, _SLICE // columns)
    return [slice(start, start + step) for start in range(0, rows, step)]
