"""Compile every Triton kernel for eight accelerators, without one, and read the machine code.

``python -m ci.static`` prints one line a kernel, case and target: threads, registers, spills,
on-chip memory and the widest global load. Triton carries the code generators of both vendors, so
this needs no driver. It says that code fits the hardware, not that it is right or fast.

The launches are those of the real launchers: each case of :mod:`ci.static_cases` calls an operator
on meta tensors under :func:`liger_multi.launch.simulate`, and the kernels' launches are recorded
instead of run. So formulas, launch tables, constants and types are never written down twice.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from liger_multi.launch import DeviceInfo, simulate

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


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
        _amd("gfx1100", 32, 65536, 96),
        _amd("gfx1201", 32, 65536, 64),
    )
}


@dataclasses.dataclass(frozen=True)
class StaticCase:
    """One launch to compile.

    Attributes:
        label: Which call of which operator made it.
        kernel: The jitted function.
        signature: Type of every argument in Triton's spelling, ``constexpr`` for constants.
        constants: Values of the constant arguments, None and 1 among them, as a launch makes them.
        aligned: Arguments known to be multiples of 16.
        options: ``num_warps`` and other options of the compiler.
        streams: Whether the arguments are aligned enough for 16-byte loads to be demanded.
    """

    label: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...]
    options: dict[str, Any]
    streams: bool

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return str(self.kernel.__name__)


@dataclasses.dataclass(frozen=True)
class Report:
    """What the machine code of one case uses; memory in bytes."""

    threads: int
    registers: int
    spills: int
    shared: int
    widest_load: int


def _case(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], label: str) -> StaticCase:
    """Type the arguments of a launch as Triton's own launcher does."""
    values = dict(zip(kernel.arg_names, args, strict=False))
    values |= {k: v for k, v in kwargs.items() if k in kernel.arg_names}
    constant = {p.name for p in kernel.params if p.is_constexpr}
    signature, constants, aligned = {}, {}, []
    for name in kernel.arg_names:
        value = values[name]
        if name in constant or value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            if value.storage_offset() * value.element_size() % 16 == 0:
                aligned.append(name)
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                aligned.append(name)
        else:
            signature[name] = "fp32"
    options = {k: v for k, v in kwargs.items() if k not in kernel.arg_names}
    streams = all(n in aligned for n, v in values.items() if isinstance(v, torch.Tensor))
    streams = streams and all(
        n in aligned or signature[n] == "constexpr"
        for n in values if n == "cols" or n.endswith("_stride")
    )  # fmt: skip
    return StaticCase(label, kernel, signature, constants, tuple(aligned), options, streams)


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
    """The launches that labelled calls of operators make on a device with the limits ``info``."""
    cases: list[StaticCase] = []
    with simulate(info):
        for label, call in calls.items():
            with recorded(label, cases):
                call()
    return cases


def build(case: StaticCase, target: Target, *, wide_pointers: bool = False) -> Any:
    """Compile a case; ``wide_pointers`` leaves out AMD's promise that a tensor is below 2 GiB."""
    attrs: dict[tuple[int], list[list[object]]] = {}
    for i, (name, kind) in enumerate(case.signature.items()):
        known: list[list[object]] = [["tt.divisibility", 16]] if name in case.aligned else []
        if kind[0] == "*" and target.gpu.backend == "hip" and not wide_pointers:
            known.append(["tt.pointer_range", 32])
        if known:
            attrs[i,] = known
    source = ASTSource(case.kernel, case.signature, case.constants, attrs)
    return triton.compile(source, target=target.gpu, options=dict(case.options))


def report(case: StaticCase, target: Target, *, wide_pointers: bool = False) -> Report:
    """Compile a case and read its machine code."""
    compiled = build(case, target, wide_pointers=wide_pointers)
    threads = compiled.metadata.num_warps * target.info.warp_size
    shared = max(int(compiled.metadata.shared), 0)
    read = _read_amd if target.gpu.backend == "hip" else _read_nvidia
    return Report(threads, shared=shared, **read(compiled))


def _read_amd(compiled: Any) -> dict[str, int]:
    text = compiled.asm["amdgcn"]

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s*(\d+)", text)
        return int(found.group(1)) if found else 0

    words = {"x4": 16, "x3": 12, "x2": 8, "": 4}
    loads = [words[m] for m in re.findall(r"\b(?:global|buffer|flat)_load_dword(x[234])?\b", text)]
    loads += [int(m) // 8 for m in re.findall(r"\b(?:global|buffer|flat)_load_b(\d+)\b", text)]
    loads += [2] * len(re.findall(r"\b(?:global|buffer|flat)_load_\w*(?:short|16)\b", text))
    spills = number("vgpr_spill_count") * 4 + number("private_segment_fixed_size")
    widest = max(loads, default=0)
    return {"registers": number("vgpr_count"), "spills": spills, "widest_load": widest}


def _read_nvidia(compiled: Any) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(BINARIES / "cuobjdump"), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # the kernels have no arrays of their own: a stack is spilled registers
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no registers and stack: {usage!r}")
    ptx = compiled.asm["ptx"]
    loads = [
        int(count or 1) * int(bits) // 8
        for count, bits in re.findall(r"\bld\.global\S*?(?:\.v(\d))?\.[bfus](\d+)\b", ptx)
    ]
    loads += [int(size, 0) for size in re.findall(r"\bcp\.async\.c\S+ [^;]*?\], (\w+)", ptx)]
    return {
        "registers": int(found.group(1)), "spills": int(found.group(2)),
        "widest_load": max(loads, default=0),
    }  # fmt: skip


@functools.cache
def kernels() -> dict[str, Any]:
    """Every jitted ``_*_kernel`` of the shared Triton backend, by name."""
    import importlib
    import pkgutil

    import liger_multi.backends.triton as package

    found: dict[str, Any] = {}
    for entry in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{entry.name}")
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and re.fullmatch(r"_\w+_kernel", name):
                found[name] = value
    return found


def main() -> None:
    """Compile every Triton kernel for every target and print what the machine code uses."""
    from ci.static_cases import calls

    parser = argparse.ArgumentParser(prog="python -m ci.static", description=main.__doc__)
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    options = parser.parse_args()
    table = Table("kernel", "case", "target", "threads", "registers", "spills", "shared", "load")
    for arch in options.target or TARGETS:
        for case in static_cases(TARGETS[arch].info, calls()):
            if options.kernel in case.name:
                facts = report(case, TARGETS[arch])
                table.add_row(case.name, case.label, arch, *map(str, dataclasses.astuple(facts)))
    Console(width=None if os.isatty(1) else 160).print(table)


if __name__ == "__main__":
    main()
