"""Triton kernels that NVIDIA and AMD share; vendors add launch tables and what truly differs."""

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable

import torch

from liger_multi.dispatch.backend import Backend


def _probe() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed"
    return None


def _supports(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "runs on a CPU only under its interpreter (TRITON_INTERPRET=1)"
    # uint8 holds two 4-bit codes per byte
    if dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.uint8):
        name = str(dtype).removeprefix("torch.")
        return f"has kernels for float32, float16 and bfloat16, not {name}"
    return None


def _describe() -> dict[str, str]:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # PyTorch for ROCm brings it by another name
        spec = importlib.util.find_spec("triton")
        version = importlib.import_module("triton").__version__ if spec else "not installed"
    return {"triton": version} | (
        {"TRITON_INTERPRET": "1 (kernels are interpreted)"} if interpreted else {}
    )


def _gemm_by_rows() -> Callable[..., None]:
    """The GEMM with independent rows; imported here because it needs Triton."""
    gemm: Callable[..., None] = importlib.import_module(f"{__name__}.common.gemm").gemm_by_rows
    return gemm


BACKEND = Backend(
    "triton", probe=_probe, supports=_supports, describe=_describe, gemm_by_rows=_gemm_by_rows
)
