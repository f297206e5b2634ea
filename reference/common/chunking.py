"""Blocks of rows that bound memory, the size of chunks of logits, and products in fp32.

Under a compiler, all rows are one block: the compiler fuses operations and bounds memory itself.
"""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

from liger_multi.reference.common.strict import strict

BLOCK_BYTES = 32 * 2**20  # fp32 temporaries of one block of rows in the reference
AUTO_BYTES = 5 * 2**28  # largest automatic chunk of logits: 4096 rows of 151 936 columns in bf16
FREE_SHARE = 8  # an automatic chunk takes at most this part of the free memory
assumed_free: ContextVar[int] = ContextVar("liger_multi_assumed_free", default=0)  # where none is
MIN_ROWS = 256  # below this, products on a device are too thin to be worth the memory
STEP_ROWS = 128  # of which a budget takes multiples


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and losses: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_blocks(rows: int, row_bytes: int, limit: int = BLOCK_BYTES) -> Iterator[slice]:
    """Slices over ``rows`` whose blocks stay below ``limit`` bytes (one row at least)."""
    step = max(1, limit // max(1, row_bytes))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def as_rows(x: Tensor) -> Tensor:
    """View (or copy) ``(..., H)`` as ``(rows, H)``, also where H or the number of rows is zero."""
    return x.flatten(0, -2) if x.ndim > 1 else x.unsqueeze(0)  # sizes may be symbolic


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on ``device``; 0 if unknown."""
    if device.type in ("cpu", "meta"):
        return assumed_free.get()
    module = torch.get_device_module(device.type)
    query, stats = getattr(module, "mem_get_info", None), getattr(module, "memory_reserved", None)
    if query is None or stats is None or capturing(device):
        return 0
    return int(query(device)[0] + module.memory_reserved(device) - module.memory_allocated(device))


def capturing(device: torch.device) -> bool:
    """Whether a graph of the device's stream is being captured (nothing may be read back then)."""
    module = None if device.type in ("cpu", "meta") else torch.get_device_module(device.type)
    return bool(getattr(module, "is_current_stream_capturing", bool)())


def chunk_rows(
    rows: int,
    hidden: Tensor,
    vocabulary: int,
    chunk: int,
    budget: int,
    free_memory: int | None = None,
) -> int:
    """Rows of logits to hold at a time; ``free_memory`` is a known :func:`free_bytes`.

    A number of rows is kept to, and a byte budget by as many steps of 128 rows as fit. Otherwise
    all rows are one chunk where their logits cost no more than an fp32 accumulator of the weight's
    gradient, and else at least two share an eighth of the free memory, at most 1.25 GiB, by powers
    of two, which tiles of products fill (16384x2048x151936, H200: 47.9 ms; 3328 rows: 52.4). Where
    equal bits are asked for, free memory does not count.
    """
    size = hidden.element_size()
    row_bytes = max(1, vocabulary * size)
    if fits_one_chunk(rows, hidden.shape[1], vocabulary, size, chunk, budget):
        return max(1, rows)
    if chunk > 0 or budget:
        return chunk or max(1, whole_steps(budget // row_bytes))
    if strict():
        free_memory = 0
    elif free_memory is None:
        free_memory = free_bytes(hidden.device)
    share = free_memory // FREE_SHARE or (AUTO_BYTES if strict() else AUTO_BYTES // 16)
    fit, half = min(AUTO_BYTES, share) // row_bytes, -(-rows // 2)
    if min(half, fit) < MIN_ROWS:
        return max(1, min(half, fit))
    return min(1 << (half - 1).bit_length(), 1 << (fit.bit_length() - 1))


def whole_steps(rows: int) -> int:
    """The number of rows, rounded down to whole tiles of a GEMM unless it is small."""
    return rows if rows < MIN_ROWS else rows // STEP_ROWS * STEP_ROWS


def fits_one_chunk(
    rows: int, width: int, vocabulary: int, itemsize: int, chunk: int, budget: int
) -> bool:
    """Whether one chunk holds the logits of all ``rows``; decided without asking a device."""
    fit = chunk or budget // max(1, vocabulary * itemsize)
    return rows <= fit if chunk > 0 or budget else rows * itemsize <= 4 * width


def weight_gradient_dtype(
    dtype: torch.dtype, weight: torch.dtype, accumulate: torch.dtype, one_chunk: bool
) -> torch.dtype:
    """The dtype of the unnormalized gradient of a weight.

    With a single chunk, a GEMM in the weight's dtype also rounds once. float16 is excluded, because
    a sum over rows can exceed its range.
    """
    rounds_once = one_chunk and dtype == weight and dtype != torch.float16
    return dtype if rounds_once or dtype == torch.float64 else accumulate


@functools.cache
def has_out_dtype(device_type: str, dtype: torch.dtype) -> bool:
    """Whether products of low precision can be written in float32 here (asked once, on 16x16)."""
    try:
        a, out = (torch.zeros(16, 16, dtype=k, device=device_type) for k in (dtype, torch.float32))
        torch.addmm(out, a, a, out_dtype=torch.float32, out=out)
    except (TypeError, RuntimeError, NotImplementedError):
        return False
    return True


def add_product_(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """``total += a @ b`` in the precision of ``total``; ``first`` ignores what stands in it."""
    beta = 0 if first else 1
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif total.dtype == torch.float32 and has_out_dtype(total.device.type, a.dtype):
        torch.addmm(total, a, b, beta=beta, out_dtype=torch.float32, out=total)
    else:
        right = b.to(total.dtype)
        for block in row_blocks(total.shape[0], a.shape[1] * total.element_size()):
            torch.addmm(total[block], a[block].to(total.dtype), right, beta=beta, out=total[block])


# --- in one piece ---

_in_one_piece: ContextVar[bool] = ContextVar("liger_multi_in_one_piece", default=False)


@contextlib.contextmanager
def one_piece() -> Iterator[None]:
    """A block in which rows are not divided: a compiler fuses the intermediate tensors.

    ``torch.compiler.is_compiling()`` does not say so: before torch 2.13 it is false where
    AOTAutograd traces.
    """
    token = _in_one_piece.set(True)
    try:
        yield
    finally:
        _in_one_piece.reset(token)


def in_one_piece() -> bool:
    """Whether all rows are computed at once."""
    return _in_one_piece.get()
