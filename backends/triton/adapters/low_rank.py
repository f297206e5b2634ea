"""GEMMs with adapters: those of thin_gemm.py where they are faster, else the vendor's library.

Thin GEMMs that read one wide matrix and write a thin one are the library's: it reads as fast as a
copy does. Beside bf16, it gets thin fp32 matrices as parts in bf16; the parts of a matrix are one
launch where PyTorch takes seven.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.adapters import thin_gemm
from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    as_rows,
    assume_rows,
    bf16_parts,
    cdiv,
    power_of_2,
    warps,
)
from liger_multi.backends.triton.float8.rows import TritonQuantizer
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.adapters import low_rank as reference
from liger_multi.reference.adapters.low_rank import LowRank
from liger_multi.reference.common.strict import has_own_gemm


@dataclass(frozen=True)
class SplitConfig:
    """Rows and columns of a tile, and its warps."""

    rows: int
    cols: int
    num_warps: int


def split_config(info: DeviceInfo, cols: int) -> SplitConfig:
    """8 elements a thread: 16 bytes of every part."""
    wide = min(power_of_2(cols), 1024)
    return SplitConfig(1024 // wide, wide, warps(128, info.warp_size))


@triton.jit
def _split_kernel(
    x_ptr,
    out_ptr,
    rows,
    cols,
    col_steps,
    x_stride,
    out_stride,
    step,
    ORDER: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Split an fp32 matrix into bf16 parts and write them in the given order.

    Program: a tile of ROWS by COLS; reads it once and writes it COUNT times, ``step`` elements
    apart.
    ORDER holds the part to write in base 4, the first in its last digit.
    """
    assume_rows(x_ptr, x_stride, ROWS)
    assume_rows(out_ptr, out_stride, ROWS)
    row = (tl.program_id(0) // col_steps).to(tl.int64) * ROWS
    first = (tl.program_id(0) % col_steps) * COLS
    r, c = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    mask = (row + r < rows) & (first + c < cols)
    x = tl.load(x_ptr + (row * x_stride + first) + (r * x_stride + c), mask=mask, other=0.0)
    p0, p1, p2 = bf16_parts(x)
    out_ptr += row * out_stride + first
    place = r * out_stride + c
    for k in tl.static_range(COUNT):
        if (ORDER >> (2 * k)) & 3 == 0:
            tl.store(out_ptr + place, p0, mask=mask)
        elif (ORDER >> (2 * k)) & 3 == 1:
            tl.store(out_ptr + place, p1, mask=mask)
        else:
            tl.store(out_ptr + place, p2, mask=mask)
        out_ptr += step


def split(x: Tensor, order: Sequence[int], axis: int) -> Tensor:
    """Parts of a matrix in ``order``, beside each other (axis 1) or below."""
    if x.stride(0) == 1 < x.stride(1):
        return split(x.t(), order, 1 - axis).t()
    if not x.numel():
        return reference.split(x, order, axis)
    (rows, cols), count = x.shape, len(order)
    shape = (rows, count * cols) if axis else (count * rows, cols)
    out = torch.empty(shape, dtype=torch.bfloat16, device=x.device)
    k = launch_config("low_rank.split", split_config, x.device, cols=cols)
    x = as_rows(x, k.cols)
    steps = cdiv(cols, k.cols)
    code = sum(part << 2 * index for index, part in enumerate(order))
    args = (x, out, rows, cols, steps, x.stride(0), shape[1], cols if axis else rows * cols)
    launch(
        _split_kernel, cdiv(rows, k.rows) * steps, args, (code, count, k.rows, k.cols), k.num_warps
    )
    return out


class TritonLowRank(LowRank):
    """Products by the kernels of thin_gemm.py where they serve the tensors and are faster."""

    def add_(self, rows: Tensor, projected: Tensor, factor: Tensor, scale: float) -> Tensor:
        """As :meth:`LowRank.add_`."""
        if _widens(rows, projected, factor):
            return thin_gemm.widen(rows, projected, factor, scale, rows)
        return super().add_(rows, projected, factor, scale)

    def added(self, rows: Tensor, projected: Tensor, factor: Tensor, scale: float) -> Tensor:
        """As :meth:`LowRank.added`."""
        if _widens(rows, projected, factor):
            out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
            return thin_gemm.widen(rows, projected, factor, scale, out)
        return super().added(rows, projected, factor, scale)

    def widened(
        self, projected: Tensor, factor: Tensor, scale: float, dtype: torch.dtype
    ) -> Tensor:
        """As :meth:`LowRank.widened`; of fp32 factors, the library has fewer products."""
        if dtype == projected.dtype:
            out = projected.new_empty(projected.shape[0], factor.shape[1])
            if _widens(out, projected, factor):
                return thin_gemm.widen(None, projected, factor, scale, out)
        return super().widened(projected, factor, scale, dtype)

    def narrow_and_gradient(
        self,
        dy: Tensor,
        factor: Tensor,
        low: Tensor,
        scale: float,
        needs_narrow: bool = True,
        needs_gradient: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`LowRank.narrow_and_gradient`."""
        rank, needs_both = low.shape[-1], needs_narrow and needs_gradient
        most = thin_gemm.MOST_SUMS
        if needs_both and _by_kernel(dy, factor, rank, most) and _by_kernel(dy, low, rank, most):
            return thin_gemm.narrow_and_sums(dy, factor, low, scale)
        return super().narrow_and_gradient(dy, factor, low, scale, needs_narrow, needs_gradient)


def _by_kernel(wide: Tensor, thin: Tensor, rank: int, most_rank: int) -> bool:
    return thin_gemm.serves(wide, thin, rank, most_rank) and not has_own_gemm()


def _widens(rows: Tensor, projected: Tensor, factor: Tensor) -> bool:
    rank, most = projected.shape[1], thin_gemm.MOST_RANK.get(projected.element_size(), 0)
    return _by_kernel(rows, projected, rank, most) and _by_kernel(rows, factor, rank, most)


THIN = TritonLowRank(split, TritonQuantizer())
