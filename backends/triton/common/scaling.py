"""A gradient times a factor on the device, rounded once to another dtype.

PyTorch has one vectorized launch only where all dtypes agree: an fp32 sum of 128256x2048 that
becomes bf16 took 1.4 ms there (H200, 2026-11), four times what its bytes need.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import cdiv, round_to, warps
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.cross_entropy.fused_linear import scale_to


@dataclass(frozen=True)
class FlatConfig:
    """Elements and warps of a program."""

    block: int
    num_warps: int


def flat_config(info: DeviceInfo) -> FlatConfig:
    """8 elements a thread: one 16-byte access of a 16-bit dtype."""
    return FlatConfig(1024, warps(128, info.warp_size))


@triton.jit
def _scale_kernel(x_ptr, factor_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """Multiply a contiguous tensor by a factor and cast it.

    Program: BLOCK elements; reads the factor from the device, so that the host needs no sync.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    lane = tl.arange(0, BLOCK)
    mask = first + lane < size
    factor = tl.load(factor_ptr).to(tl.float32)
    x = tl.load(x_ptr + first + lane, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + first + lane, round_to(x * factor, out_ptr.dtype.element_ty), mask=mask)


def scale(gradient: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``gradient * factor`` in fp32, rounded once; without a factor a cast, or nothing."""
    if factor is None or not gradient.numel():
        return scale_to(gradient, factor, dtype)
    out = torch.empty_like(gradient, dtype=dtype)
    k = launch_config("scale", flat_config, gradient.device)
    size = gradient.numel()
    launch(
        _scale_kernel, cdiv(size, k.block), (gradient, factor, out, size), (k.block,), k.num_warps
    )
    return out
