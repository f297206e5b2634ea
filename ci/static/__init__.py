"""Compile every Triton kernel for eight accelerators, without one, and read the machine code.

Triton carries the code generators of both vendors, so this needs no driver. It says that code fits
the hardware and what it costs there, not that it is right or fast. :mod:`ci.static.code` reads the
machine code, :mod:`ci.static.selection` says which launches are compiled, :mod:`ci.static.rows`
compiles them, :mod:`ci.static.judge` says what is wrong, and :mod:`ci.static.baseline` keeps what
they cost. ``python -m ci.static`` runs all of it.

The launches are those of the real launchers: each case of :mod:`ci.static.cases` calls an operator
on meta tensors under :func:`liger_multi.dispatch.launch.simulate`, and the launches are recorded
instead of run. So formulas, launch tables, constants and types are never written down twice. Every
launch is compiled as it stands and for the arguments nobody hopes for: nothing aligned, and on AMD
tensors of more than 2 GiB, for which Triton compiles other code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction

from ci.static.code import BINARIES, Code, read
from liger_multi.dispatch.launch import DeviceInfo, simulate

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
# the oldest Triton whose code is judged: 3.3 spilled 16 bytes where this spills none, and had no
# linker for AMD's
JUDGED = (3, 7)


@dataclasses.dataclass(frozen=True)
class Target:
    """One architecture: its limits, the code generator's name for it, and its shared memory."""

    info: DeviceInfo
    gpu: GPUTarget


def _nvidia(arch: int, shared: int, cores: int) -> Target:
    info = DeviceInfo("cuda", f"sm{arch}", 32, 1024, shared, cores)
    return Target(info, GPUTarget("cuda", arch, 32))


def _amd(arch: str, warp_size: int, shared: int, cores: int) -> Target:
    info = DeviceInfo("rocm", arch, warp_size, 1024, shared, cores)
    return Target(info, GPUTarget("hip", arch, warp_size))


TARGETS = {
    target.info.arch: target
    for target in (
        _nvidia(80, 166912, 108),
        _nvidia(90, 232448, 132),
        _nvidia(100, 232448, 148),
        _amd("gfx90a", 64, 65536, 104),
        _amd("gfx942", 64, 65536, 304),
        _amd("gfx950", 64, 163840, 256),
        _amd("gfx1100", 32, 65536, 48),
        _amd("gfx1201", 32, 65536, 32),
    )
}


@dataclasses.dataclass(frozen=True)
class StaticCase:
    """One launch to compile.

    Attributes:
        label: Which call of which operator made it.
        kernel: The jitted function.
        signature: Type of every argument in Triton's spelling, ``constexpr`` for constants; those
            of a tuple as a tuple.
        constants: Values of the constant arguments, None and 1 among them, as a launch makes them;
            of a tuple's elements under (number of the argument, number of the element).
        aligned: Arguments known to be multiples of 16; ``name.0`` is an element of a tuple.
        large: Tensors of several axes, which may have more than 2 GiB.
        options: ``num_warps`` and other options of the compiler.
        streams: Whether the arguments are aligned enough for 16-byte loads to be demanded.
    """

    label: str
    kernel: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    aligned: tuple[str, ...]
    large: tuple[str, ...]
    options: dict[str, Any]
    streams: bool

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return str(self.kernel.__name__)

    def constant(self, name: str, default: int) -> int:
        """A number among the constants, or among those that the kernel takes from a tuple."""
        source = inspect.getsource(getattr(self.kernel, "fn", self.kernel))
        place = re.search(rf"^    {name}: tl\.constexpr = (\w+)\[(\d+)\]$", source, re.MULTILINE)
        if place is not None:
            return int(self.constants[place[1]][int(place[2])])
        return int(self.constants.get(name, default))

    @property
    def identity(self) -> str:
        """All that a compiler is told beside the target and the source."""
        parts = (self.signature, self.constants, self.aligned, self.large, self.options)
        return repr((self.name, *parts))


@dataclasses.dataclass(frozen=True)
class Variant:
    """Which arguments a launch is compiled for; the first variant is what the case recorded.

    Attributes:
        aligned: Pointers and sizes are multiples of 16, where the recorded call's were.
        large: Tensors of several axes have more than 2 GiB (AMD compiles other code for them).
    """

    aligned: bool = True
    large: bool = False

    @property
    def name(self) -> str:
        """As tables say it."""
        words = ["64-bit"] * self.large + ["unaligned"] * (not self.aligned)
        return " ".join(words) or "aligned"


def variants(target: Target) -> tuple[Variant, ...]:
    """The variants that differ on a target."""
    sizes = (False, True) if target.gpu.backend == "hip" else (False,)
    return tuple(Variant(aligned, large) for large in sizes for aligned in (True, False))


def _leaves(name: str, types: Any) -> Iterator[tuple[str, str]]:
    """Every number or tensor of an argument, as ``aligned`` calls it, with its type."""
    if isinstance(types, tuple):
        yield from ((f"{name}.{j}", element) for j, element in enumerate(types))
    else:
        yield name, types


def _case(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], label: str) -> StaticCase:
    """Type the arguments of a launch as Triton's own launcher does."""
    values = dict(zip(kernel.arg_names, args, strict=False))
    values |= {k: v for k, v in kwargs.items() if k in kernel.arg_names}
    constant = {p.name for p in kernel.params if p.is_constexpr}
    general = {p.name for p in kernel.params if p.do_not_specialize}
    signature: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    aligned: list[str] = []

    def typed(value: Any, name: str, key: Any, is_constant: bool) -> Any:
        """The type of one number or tensor, after noting what else is known of it."""
        one = isinstance(value, int) and value == 1 and name not in general
        if is_constant or value is None or one:
            constants[key] = value
            return "constexpr"
        if isinstance(value, torch.Tensor):
            if value.storage_offset() * value.element_size() % 16 == 0:
                aligned.append(name)
            return "*" + TYPES[value.dtype]
        if isinstance(value, int):
            if value % 16 == 0 and name not in general:
                aligned.append(name)
            return "i32" if -(2**31) <= value < 2**31 else "i64"
        return "fp32"

    for i, name in enumerate(kernel.arg_names):
        value = values[name]
        if isinstance(value, tuple) and name not in constant:
            signature[name] = tuple(
                typed(element, f"{name}.{j}", (i, j), False) for j, element in enumerate(value)
            )
        else:
            signature[name] = typed(value, name, name, name in constant)
    options = {k: v for k, v in kwargs.items() if k not in kernel.arg_names}
    streams = all(n in aligned for n, v in values.items() if isinstance(v, torch.Tensor))
    streams = streams and all(
        leaf_type == "constexpr" or label in aligned
        for n in values
        if n in ("cols", "strides") or n.endswith(("_stride", "_strides"))
        for label, leaf_type in _leaves(n, signature[n])
    )
    large = tuple(n for n, v in values.items() if isinstance(v, torch.Tensor) and v.dim() > 1)
    return StaticCase(label, kernel, signature, constants, tuple(aligned), large, options, streams)


@contextlib.contextmanager
def recorded(label: str, cases: list[StaticCase]) -> Iterator[None]:
    """Collect the launches made inside, in place of running them."""
    real = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        cases.append(_case(self, args, kwargs, label))

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = real


def static_cases(info: DeviceInfo, calls: Mapping[str, Callable[[], object]]) -> list[StaticCase]:
    """The launches that labeled calls of operators make on a device with the limits ``info``."""
    cases: list[StaticCase] = []
    with simulate(info):
        for label, call in calls.items():
            with recorded(label, cases):
                call()
    return cases


def build(case: StaticCase, target: Target, variant: Variant) -> Any:
    """Compile a case."""
    attrs: dict[tuple[int, ...], list[list[object]]] = {}
    for i, (name, type_name) in enumerate(case.signature.items()):
        small = not (variant.large and name in case.large)
        for j, (label, leaf) in enumerate(_leaves(name, type_name)):
            known: list[list[object]] = []
            if variant.aligned and label in case.aligned:
                known.append(["tt.divisibility", 16])
            if leaf[0] == "*" and target.gpu.backend == "hip" and small:
                known.append(["tt.pointer_range", 32])
            if known:
                attrs[(i, j) if isinstance(type_name, tuple) else (i,)] = known
    source = ASTSource(case.kernel, case.signature, case.constants, attrs)
    return triton.compile(source, target=target.gpu, options=dict(case.options))


def lower(case: StaticCase, target: Target) -> str:
    """Take a case through Triton's front end and its own simplification, and return that form.

    It finds what no interpreter minds. :mod:`ci.static.patterns` reads the text.
    """
    source = ASTSource(case.kernel, case.signature, case.constants, {})
    backend = make_backend(target.gpu)
    options = backend.parse_options(dict(case.options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(target.gpu, options, functions, backend.get_module_map(), context)
    stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
    backend.add_stages(stages, options, source.language)
    return str(stages["ttir"](module, {}))


def report(case: StaticCase, target: Target, variant: Variant = Variant()) -> Code:
    """Compile a case and read its machine code."""
    return read(build(case, target, variant), target.info.arch, target.info.warp_size)


def missing(target: Target) -> str | None:
    """Why this installation of Triton cannot compile for a target, or None."""
    from triton.backends import backends

    vendor = {"hip": "amd", "cuda": "nvidia"}[target.gpu.backend]
    if tuple(int(n) for n in triton.__version__.split(".")[:2]) < JUDGED:
        said = ".".join(map(str, JUDGED))
        return f"code is judged as Triton {said} and later compile it, this is {triton.__version__}"
    if vendor not in backends:
        return f"this Triton was built without the code generator of {vendor}"
    if vendor == "nvidia" and not (BINARIES / "nvdisasm").exists():
        return "this Triton comes without NVIDIA's disassembler"
    return None


@functools.cache
def kernels(backend: str = "triton") -> dict[str, Any]:
    """Every jitted ``_*_kernel`` of a backend, by name."""
    by_kernel: dict[str, Any] = {}
    for path in sorted((Path(__file__).parents[2] / "backends" / backend).glob("*/*.py")):
        package = f"liger_multi.backends.{backend}.{path.parent.name}"
        for name, value in vars(importlib.import_module(f"{package}.{path.stem}")).items():
            if not isinstance(value, JITFunction) or not re.fullmatch(r"_\w+_kernel", name):
                continue
            if by_kernel.setdefault(name, value) is not value:
                raise RuntimeError(f"two kernels are called {name}")
    return by_kernel
