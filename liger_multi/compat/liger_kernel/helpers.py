"""What trainers import of ``liger_kernel.utils`` and ``liger_kernel.ops``."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

PEFT_AVAILABLE = importlib.util.find_spec("peft") is not None
IMPL_REGISTRY: dict[str, Any] = {}
"""Liger's alternative implementations; ``liger_multi.configure`` chooses backends here."""

_LARGEST = 65536


def is_peft_available() -> bool:
    """Whether PEFT is installed."""
    return PEFT_AVAILABLE


def is_npu_available() -> bool:
    """Whether PyTorch drives an Ascend device."""
    return infer_device() == "npu"


def infer_device() -> str:
    """The type of the accelerator that PyTorch drives, or ``cpu``."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if found is None else found.type


def calculate_settings(n: int) -> tuple[int, int]:
    """Block size and warps for rows of ``n`` elements.

    Raises:
        RuntimeError: The row is longer than the longest block, 65536.
    """
    block = 1 << max(0, n - 1).bit_length()
    if block > _LARGEST:
        raise RuntimeError(f"a row of {n} elements needs a block of {block}, more than {_LARGEST}")
    wide = 16 if torch.version.hip else 32
    for size, warps in ((32768, wide), (8192, 16), (2048, 8)):
        if block >= size:
            return block, warps
    return block, 4


def compare_version(package: str, operator: Callable[[Any, Any], bool], target: str) -> bool:
    """Whether the installed version of a package compares so with ``target``."""
    from packaging.version import parse

    try:
        return operator(parse(importlib.metadata.version(package)), parse(target))
    except importlib.metadata.PackageNotFoundError:
        return False


def ensure_contiguous(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of tensors see contiguous ones."""

    def laid(x: Any) -> Any:
        return x.contiguous() if isinstance(x, Tensor) else x

    @functools.wraps(fn)
    def wrapped(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        return fn(ctx, *map(laid, args), **{k: laid(v) for k, v in kwargs.items()})

    return wrapped


class _TritonDtypes(dict[torch.dtype, Any]):
    """Filled at the first look, so that Triton is loaded for those who need it."""

    def __missing__(self, dtype: torch.dtype) -> Any:
        names = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
        if dtype not in names:
            raise KeyError(dtype)
        language = importlib.import_module("triton.language")
        self[dtype] = getattr(language, names[dtype])
        return self[dtype]


torch_to_triton_dtype = _TritonDtypes()


def _no_halves(direction: str) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"fused_linear_cross_entropy_{direction}: forward and backward are no functions here; "
            "call liger_multi.ops.fused_linear_cross_entropy"
        )

    function.__name__ = function.__qualname__ = f"fused_linear_cross_entropy_{direction}"
    return function


fused_linear_cross_entropy_forward = _no_halves("forward")
fused_linear_cross_entropy_backward = _no_halves("backward")


class _FSDPForwardRedirection:
    """Run a function of a wrapped module within the forward of its wrapper.

    The wrapper's hooks gather parameters around its forward only, so a method that is called beside
    it would see shards.
    """

    def __call__(
        self,
        wrapper_module: nn.Module,
        method: Callable[..., Any],
        original_module: nn.Module,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        held = vars(original_module).get("forward")

        def once(*inner: Any, **named: Any) -> Any:
            back()
            return method(original_module, *inner, **named)

        def back() -> None:
            if held is None:
                vars(original_module).pop("forward", None)
            else:
                vars(original_module)["forward"] = held

        vars(original_module)["forward"] = once
        try:
            return wrapper_module(*args, **kwargs)
        finally:
            back()
