"""Launches on vector cores: as many programs as there are cores, each of which loops over its rows.

Blocks are columns at a time, by kernel, chip and bytes of an element, from ``launch/<chip>.yaml``:
the largest for which the vendor's compiler finds room in the unified buffer.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from liger_multi.dispatch.launch import DeviceInfo, device_info, launch_config


@dataclass(frozen=True)
class Block:
    """Columns a step."""

    block: int


def small(info: DeviceInfo, bytes: int, cols: int) -> Block:
    """A block that fits in every kernel on every chip, for a chip without a table."""
    return Block(1024)


def jitted(function: Callable[..., Any]) -> Any:
    """``triton.jit`` without specialization on sizes, which would gain nothing here."""
    names = inspect.signature(function).parameters
    sizes = [name for name in names if not name.endswith("_ptr") and not name.isupper()]
    return triton.jit(function, do_not_specialize=sizes)


@triton.jit
def summed(x, BLOCK: tl.constexpr):
    """The sum of a block in two steps: of 4096 numbers, none passes through over 128 additions.

    A reduction promises no order. Added one after another, the sums of rows of 32,777 classes were
    off by 1.2e-6, which moved a gradient by 1.45 times the tolerance of fp32. With two steps it is
    0.46 times.
    """
    SIDE: tl.constexpr = 64
    return tl.sum(tl.sum(tl.reshape(x, (SIDE, BLOCK // SIDE)), 0), 0)


def power_of_2(n: int) -> int:
    """The next power of two."""
    return 1 << max(0, n - 1).bit_length()


def block_of(name: str, x: Tensor, cols: int, smallest: int = 128) -> int:
    """Columns a step of kernel ``name`` on rows of ``cols`` columns like ``x``."""
    block = launch_config(name, small, x.device, bytes=x.element_size(), cols=cols).block
    return max(smallest, min(block, power_of_2(cols)))


def start(kernel: Any, pieces: int, /, *args: Any, **constants: Any) -> None:
    """Run a kernel whose programs share ``pieces`` of work; the first argument is a tensor."""
    if pieces > 0:
        kernel[(min(pieces, device_info(args[0].device).cores),)](*args, **constants)


def as_rows(x: Tensor) -> Tensor:
    """View ``x`` as (rows, cols) with adjacent columns; copies only where no such view exists."""
    cols = x.shape[-1]
    rows = x if x.dim() == 2 else x.reshape(x.numel() // max(cols, 1), cols)
    return rows if rows.stride(1) == 1 or cols == 1 else rows.contiguous()


def flatten(*tensors: Tensor) -> list[Tensor]:
    """View tensors of one shape as one long row where all are contiguous, else as rows."""
    if all(t.is_contiguous() for t in tensors) and tensors[0].numel() < 2**31 - 2**16:
        return [t.view(1, -1) for t in tensors]
    return [as_rows(t) for t in tensors]
