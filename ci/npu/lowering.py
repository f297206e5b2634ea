"""Triton kernels through triton-ascend's front end, on a machine without its driver.

A launch is caught where Triton would compile it, with the specialization that the launcher gave it,
and lowered to linalg: what the vendor's compiler takes (:mod:`ci.npu.vendor`), and what runs on the
CPU (:mod:`ci.npu.execute`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("TRITON_BACKENDS_IN_TREE", "1")

import torch
import triton.backends.ascend.compiler as ascend
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from ci.kernel_source import statements


@dataclass(frozen=True)
class Chip:
    """A target of the vendor's compilers, with the limits that it states itself."""

    name: str
    cores: int
    buffer: int
    a5: bool


CHIPS = {
    "Ascend910B3": Chip("Ascend910B3", 40, 196608, False),
    "Ascend910_9589": Chip("Ascend910_9589", 64, 253952, True),
}
LARGEST_GRID = 65535


@functools.cache
def source_of(kernel: Any) -> str:
    """The statements of a kernel and of the functions, and the constants, that it names."""
    parts: dict[str, str] = {}
    left = [kernel]
    while left:
        function = left.pop()
        parts[function.__name__] = statements(function.src)
        for used in re.findall(r"\b[A-Za-z_]\w*", parts[function.__name__]):
            other = function.fn.__globals__.get(used)
            if isinstance(other, JITFunction) and other.__name__ not in parts:
                left.append(other)
            elif hasattr(other, "value"):  # a constexpr of the module
                parts[used] = repr(other.value)
    return repr(sorted(parts.items()))


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: what Triton would compile, and the arguments by name."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any] = field(repr=False)

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.__name__)

    @property
    def key(self) -> str:
        """A hash of the source, with all that it calls, and of the arguments that are compiled."""
        text = f"{self.name} {self.signature} {self.constants} {self.attributes.hash()}"
        return hashlib.sha256((text + source_of(self.kernel)).encode()).hexdigest()


class Driver:
    """Enough of a driver for Triton to specialize a launch; it can launch nothing."""

    def __init__(self, chip: Chip) -> None:
        self.chip, self.utils = chip, self

    def get_current_target(self) -> GPUTarget:
        """The chip."""
        return GPUTarget("npu", self.chip.name, 0)

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Cores."""
        cores = {"num_aicore": self.chip.cores // 2, "num_vectorcore": self.chip.cores}
        return {"max_shared_mem": 1, **cores}

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """The only one."""
        return 0


def bind(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Any) -> Launch:
    """What a launch asks for."""
    backend = make_backend(driver.active.get_current_target())
    if kernel.binder is None:
        kernel.create_binder(backend)
    bound, specialized, *_ = kernel.binder(*args, **kwargs, debug=False)
    names = [kernel.params[i].name for i in kernel.non_constexpr_indices]
    signature = {n: "*i8" if s == "none" else s for n, s in zip(names, specialized)}
    values = tuple(bound.values())
    attributes = backend.get_attrs_descriptor(kernel.params, values)
    known = attributes.get_constants()
    constants = {
        p.name: v
        for v, p in zip(values, kernel.params)
        if p.is_constexpr or p.num in known or v is None
    }
    size = grid(bound) if callable(grid) else grid
    return Launch(kernel, signature, constants, attributes, tuple(size), dict(bound))


@contextlib.contextmanager
def caught(handle: Callable[[Launch], None], chip: Chip = CHIPS["Ascend910B3"]) -> Iterator[None]:
    """Hand every launch to ``handle`` instead of running it."""
    driver.set_active(Driver(chip))
    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        made = bind(self, args, kwargs, grid)
        if math.prod(made.grid) > LARGEST_GRID:
            raise RuntimeError(f"{made.name}: a grid of {made.grid}; Ascend takes {LARGEST_GRID}")
        handle(made)

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = original


@dataclass(frozen=True)
class Lowered:
    """A kernel as linalg, and the compiler's options for it."""

    text: str
    metadata: dict[str, Any]


def lower(launch: Launch, chip: Chip) -> Lowered:
    """Triton to linalg, by the vendor's front end."""
    ascend.is_compile_on_910_95 = chip.a5
    target = GPUTarget("npu", chip.name, 0)
    backend = ascend.AscendBackend(target)
    options = backend.parse_options(
        {
            "compile_on_910_95": chip.a5,
            "multibuffer": not chip.a5,
            "enable_auto_bind_sub_block": not chip.a5,
            "enable_select_analysis": chip.a5,
        }
    )
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        options, backend.get_codegen_implementation(), backend.get_module_map(), context
    )
    metadata = {**options.__dict__, "target": target}
    module = ascend.make_ttir(module, metadata, options)
    text = ascend.ttir_to_linalg(module, metadata, options, named_ops=True)
    text, metadata = ascend._parse_linalg_metadata(text, metadata)
    return Lowered(text, metadata)


@functools.cache
def first_error(text: str) -> str:
    """The line of a compiler's output that says what is wrong."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [n for n in lines if "error:" in n.lower() and "Failed to run" not in n]
    found = [n for n in errors if "hivmc" not in n] or lines
    return re.sub(r'loc\("[^"]*":', "loc(", found[0])[:400] if found else ""


def host(value: Any) -> Any:
    """The address of a tensor, which is host memory on the simulated device."""
    return value.data_ptr() if isinstance(value, torch.Tensor) else value
