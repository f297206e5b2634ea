"""What trainers import of ``liger_kernel.utils`` and ``liger_kernel.ops``."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from operator import lt
from typing import Any

import torch
from torch import Tensor, nn

PEFT_AVAILABLE = importlib.util.find_spec("peft") is not None
IMPL_REGISTRY: dict[str, Any] = {}
"""Liger's alternative sets of operators; ``liger_multi.configure`` chooses backends here."""
_LARGEST = 65536


def is_hip() -> bool:
    """Whether PyTorch was built for ROCm."""
    return torch.version.hip is not None


_COLLECTIVES = {"cuda": "nccl", "npu": "hccl", "xpu": "xccl"}


def infer_comm_backend() -> str:
    """The backend of ``torch.distributed`` for the device of this machine."""
    return _COLLECTIVES.get(infer_device(), "gloo")


def get_total_gpu_memory() -> int:
    """Memory of the accelerator in GiB.

    Raises:
        RuntimeError: There is none.
    """
    device = infer_device()
    if device == "cpu":
        raise RuntimeError("Unsupported device: cpu")
    total: int = torch.get_device_module(device).mem_get_info()[1]
    return total // 2**30


def transformers_version_dispatch(
    required_version: str,
    before_fn: Callable[..., Any],
    after_fn: Callable[..., Any],
    before_args: tuple[Any, ...] = (),
    after_args: tuple[Any, ...] = (),
    before_kwargs: dict[str, Any] | None = None,
    after_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Call one function below a version of transformers, another from it on."""
    if compare_version("transformers", lt, required_version):
        return before_fn(*before_args, **(before_kwargs or {}))
    return after_fn(*after_args, **(after_kwargs or {}))


def apply_liger_triton_cache_manager() -> None:
    """Nothing: Triton's cache is safe for several processes."""


def print_env_report() -> None:
    """What this machine has, as ``liger-multi doctor`` says it."""
    importlib.import_module("liger_multi.cli.main").main(["doctor"])


def is_transformers_available() -> bool:
    """Whether transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


def is_peft_available() -> bool:
    """Whether PEFT is installed."""
    return PEFT_AVAILABLE


def is_npu_available() -> bool:
    """Whether PyTorch drives an Ascend device."""
    return infer_device() == "npu"


def infer_device() -> str:
    """The type of the accelerator that PyTorch drives, or ``cpu``."""
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    return "cpu" if accelerator is None else accelerator.type


_CHIPS = {
    arch: family
    for family, chips in {
        "volta_turing": "sm70 sm75",
        "ampere_ada": "sm80 sm86 sm89",
        "hopper": "sm90",
        "blackwell": "sm100",
        "blackwell_ultra": "sm103",
        "blackwell_consumer": "sm120",
        "cdna": "gfx908",
        "cdna2": "gfx90a",
        "cdna3": "gfx940 gfx941 gfx942",
        "rdna3": "gfx1100 gfx1101 gfx1102",
    }.items()
    for arch in chips.split()
}
"""An architecture's key to Liger-Kernel's name."""


def _infer_nvidia_arch(device_id: int) -> str:
    major, minor = torch.cuda.get_device_capability(device_id)
    return _CHIPS.get(f"sm{major}{minor}", f"sm_{major}{minor}")


def _infer_amd_arch(device_id: int) -> str:
    properties = torch.cuda.get_device_properties(device_id)
    arch = getattr(properties, "gcnArchName", "").partition(":")[0]  # gfx942:sramecc+:xnack-
    return _CHIPS.get(arch, arch or "cuda")


def _by_name(device_type: str, device_id: int, families: dict[str, str]) -> str:
    """The first family that the name of a chip speaks of, else the type of the device."""
    name = getattr(torch, device_type).get_device_properties(device_id).name.lower()
    return next((family for word, family in families.items() if word in name), device_type)


def _infer_xpu_arch(device_id: int) -> str:
    names = {"pvc": "max pvc ponte", "arc": "arc battlemage alchemist"}
    families = {word: family for family, words in names.items() for word in words.split()}
    return _by_name("xpu", device_id, families)


def _infer_npu_arch(device_id: int) -> str:
    return _by_name("npu", device_id, {"910": "ascend910", "310": "ascend310"})


@functools.cache
def infer_device_arch(device_id: int = 0) -> str:
    """The family of a chip by its name in Liger-Kernel, else the type of the device; cached."""
    public = sys.modules.get("liger_kernel.utils", sys.modules[__name__])
    device_type: str = public.infer_device()
    vendor = "amd" if torch.version.hip else "nvidia"
    name = f"_infer_{vendor if device_type == 'cuda' else device_type}_arch"
    try:
        return getattr(public, name)(device_id) if hasattr(public, name) else device_type
    except Exception:  # whatever a driver raises, as Liger-Kernel does
        return device_type


def calculate_settings(n: int) -> tuple[int, int]:
    """Block size and warps for rows of ``n`` elements.

    Raises:
        RuntimeError: The row is longer than the longest block, 65536.
    """
    block = 1 << max(0, n - 1).bit_length()
    if block > _LARGEST:
        raise RuntimeError(f"a row of {n} elements needs a block of {block}, more than {_LARGEST}")
    wide = 16 if is_hip() else 32
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
        self[dtype] = getattr(importlib.import_module("triton.language"), names[dtype])
        return self[dtype]


torch_to_triton_dtype = _TritonDtypes()


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
        own_forward = vars(original_module).get("forward")

        def forward_once(*inner: Any, **kwargs: Any) -> Any:
            restore()
            return method(original_module, *inner, **kwargs)

        def restore() -> None:
            if own_forward is None:
                vars(original_module).pop("forward", None)
            else:
                vars(original_module)["forward"] = own_forward

        vars(original_module)["forward"] = forward_once
        try:
            return wrapper_module(*args, **kwargs)
        finally:
            restore()
