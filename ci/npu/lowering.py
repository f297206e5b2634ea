"""Triton kernels through triton-ascend's front end, on a machine without its driver.

A launch is caught where Triton would compile it, with the specialization that the launcher gave it,
and lowered to linalg: what the vendor's compiler takes, and what runs on the CPU.

Execution: Triton, linalg (triton-ascend's front end: its analysis of pointers and masks), LLVM
(upstream passes of bishengir-opt), x86 (Triton's own LLVM), a shared library. Programs run one
after another, forwards or backwards; on-chip buffers are poisoned first. It checks what the NPU's
front end made of a kernel. What comes after linalg on the device (schedules, synchronization,
buffers, the device's exponentials) does not run here.

The vendor's own compiler goes up to the machine-code generator, which is not free:
bishengir-compile schedules the kernel and plans its unified buffer; when it then looks for hivmc
and finds none, the kernel has passed. Nothing about speed or results follows from that.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_BACKENDS_IN_TREE", "1")

import ascendnpuir
import torch
import triton.backends.ascend.compiler as ascend
from triton._C.libtriton import ir, llvm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from ci.sources import text_of

# --- launches, and their lowering ---


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
        return hashlib.sha256((text + text_of(self.kernel)).encode()).hexdigest()


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
        launch = bind(self, args, kwargs, grid)
        if math.prod(launch.grid) > LARGEST_GRID:
            raise RuntimeError(
                f"{launch.name}: a grid of {launch.grid}; Ascend takes {LARGEST_GRID}"
            )
        handle(launch)

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
    reported = [n for n in errors if "hivmc" not in n] or lines
    return re.sub(r'loc\("[^"]*":', "loc(", reported[0])[:400] if reported else ""


def host(value: Any) -> Any:
    """The address of a tensor, which is host memory on the simulated device."""
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


# --- execution on the CPU ---

BIN = Path(ascendnpuir.__file__).parent / "bin"
CACHE = Path(os.environ.get("ASCEND_CACHE", "build/npu"))
PASSES = [
    "--execution-engine-convert-hfusion-to-upstream",
    "--convert-elementwise-to-linalg",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--convert-linalg-to-loops",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--convert-cf-to-llvm",
    "--arith-expand=include-bf16=true",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--expand-strided-metadata",
    "--memref-expand",
    "--lower-affine",
    "--convert-arith-to-llvm",
    "--convert-complex-to-llvm",
    "--convert-index-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-arith-to-llvm",
    "--reconcile-unrealized-casts",
]
# Buffers of a program come from an arena that is poisoned as it is handed out.
RUNTIME = r"""
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef struct { int64_t rank; void *descriptor; } Unranked;
typedef struct { char *base, *data; int64_t offset; int64_t d[]; } Ranked;
static char *arena;
static size_t used, capacity = (size_t)1 << 28;
void *kernel_malloc(int64_t n) {
  if (!arena) arena = malloc(capacity);
  used = (used + 63) & ~(size_t)63;
  if (used + n > capacity) abort();
  void *p = arena + used;
  used += n;
  memset(p, 0xA5, n);
  return p;
}
void kernel_reset(void) { used = 0; }
void kernel_free(void *p) {}
void memrefCopy(int64_t size, Unranked *s, Unranked *t) {
  Ranked *a = s->descriptor, *b = t->descriptor;
  int64_t rank = s->rank, at[16] = {0}, from = 0, to = 0;
  char *source = a->data + a->offset * size, *target = b->data + b->offset * size;
  for (int i = 0; i < rank; i++) if (a->d[i] == 0) return;
  for (;;) {
    memcpy(target + to * size, source + from * size, size);
    int k = rank - 1;
    for (; k >= 0; k--) {
      at[k]++; from += a->d[rank + k]; to += b->d[rank + k];
      if (at[k] < a->d[k]) break;
      from -= at[k] * a->d[rank + k]; to -= at[k] * b->d[rank + k]; at[k] = 0;
    }
    if (k < 0) return;
  }
}
float rsqrtf(float x) { return 1.f / sqrtf(x); }
float __hmf_rsqrtf(float x) { return 1.f / sqrtf(x); }
float __hmf_recipf(float x) { return 1.f / x; }
float __hmf_relu_f(float x) { return x > 0 ? x : 0; }
float __hmf_powf(float a, float b) { return powf(a, b); }
"""
MATHS = (
    "tanh",
    "exp",
    "log",
    "sin",
    "cos",
    "tan",
    "erf",
    "sqrt",
    "log2",
    "exp2",
    "log1p",
    "expm1",
    "atan",
    "ceil",
    "floor",
    "log10",
)
RUNTIME += "".join(
    f"float __hmf_{n}f(float x) {{ return {n}f(x); }}\n"
    f"float __hmf_{n}Dh(float x) {{ return {n}f(x); }}\n"
    for n in MATHS
)
SCALARS = {
    "i1": ctypes.c_bool,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "u32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_int64,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}
FLAGS = ("-shared", "-fPIC", "-O2", "-w", "-fno-builtin")
_loaded: dict[str, tuple[Any, Any]] = {}
launched: Counter[str] = Counter()


def _call(*command: str | Path) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name}: {first_error(done.stderr)}")


def _runtime() -> Path:
    path = CACHE / "runtime.o"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        own = CACHE / f"runtime-{os.getpid()}"
        own.with_suffix(".c").write_text(RUNTIME)
        _call("gcc", "-c", *FLAGS[1:], "-o", own.with_suffix(".o"), own.with_suffix(".c"))
        own.with_suffix(".o").rename(path)
    return path


def _build(launch: Launch, chip: Chip, path: Path) -> None:
    lowered = lower(launch, chip)
    # what has no numeric meaning has no upstream lowering either
    kept = [n for n in lowered.text.splitlines() if not re.match(r"\s*(annotation\.mark|gpu\.)", n)]
    own = path.with_name(f"{path.stem}-{os.getpid()}")
    source, opened, code = (own.with_suffix(s) for s in (".mlir", ".llvm.mlir", ".o"))
    source.write_text("\n".join(kept))
    _call(BIN / "bishengir-opt", source, *PASSES, "-o", opened)
    context = ir.context()
    ir.load_dialects(context)
    module = ir.parse_mlir_module(str(opened), context)
    llvm.init_targets()
    text = str(llvm.to_module(module, llvm.context()))
    text = text.replace("@malloc(", "@kernel_malloc(").replace("@free(", "@kernel_free(")
    target: tuple[Any, ...] = ("x86_64-unknown-linux-gnu", "x86-64-v3", "", [], True, True)
    code.write_bytes(llvm.translate_to_asm(text, *target))
    library = own.with_suffix(".so")
    _call("gcc", *FLAGS, "-o", library, _runtime(), code, "-lm", "-Wl,-z,notext,-z,defs")
    for file in (source, opened, code):
        file.unlink()
    library.with_suffix(".name").write_text(lowered.metadata["kernel_name"])
    library.with_suffix(".name").rename(path.with_suffix(".name"))
    library.rename(path)


def _function(launch: Launch, chip: Chip) -> tuple[Any, Any]:
    loaded = _loaded.get(launch.key)
    if loaded is None:
        CACHE.mkdir(parents=True, exist_ok=True)
        path = CACHE / f"{launch.key[:32]}.so"
        if not path.exists():
            _build(launch, chip, path)
        library = ctypes.CDLL(str(path.absolute()))
        name = path.with_suffix(".name").read_text()
        loaded = _loaded[launch.key] = (library, getattr(library, name))
    return loaded


def _memory(address: int, size: int) -> list[Any]:
    return [
        ctypes.c_void_p(address),
        ctypes.c_void_p(address),
        ctypes.c_int64(0),
        ctypes.c_int64(size),
        ctypes.c_int64(1),
    ]


def run(launch: Launch, chip: Chip = CHIPS["Ascend910B3"]) -> None:
    """Run every program of a launch."""
    library, function = _function(launch, chip)
    launched[launch.name] += 1
    scratch = ctypes.create_string_buffer(1 << 16)
    address = ctypes.addressof(scratch)
    arguments = _memory(address, 4096) + _memory(address, 1 << 16)
    for name, type_name in launch.signature.items():
        if name in launch.constants:
            continue
        value = launch.arguments[name]
        arguments += (
            _memory(host(value), value.numel())
            if type_name[0] == "*"
            else [SCALARS[type_name](value)]
        )
    grid = (*launch.grid, 1, 1)[:3]
    programs = list(itertools.product(*map(range, grid[::-1])))
    if os.environ.get("ASCEND_GRID") == "reversed":
        programs.reverse()  # programs may not depend on each other's order
    function.restype = None
    for z, y, x in programs:
        library.kernel_reset()
        function(*arguments, *[ctypes.c_int32(i) for i in (*grid, x, y, z)])


@contextlib.contextmanager
def launches(chip: Chip = CHIPS["Ascend910B3"]) -> Iterator[None]:
    """Run every launch inside on the CPU, through the lowering."""
    with caught(lambda launch: run(launch, chip), chip):
        yield


# --- the vendor's compiler ---

KINDS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
BITS = {"f32": 32, "i32": 32, "bf16": 16, "f16": 16, "i16": 16, "i8": 8, "i1": 1, "i64": 64}
OVERFLOW = re.compile(r"(\w+) overflow, requires (\d+) bits while (\d+) bits available", re.I)
CAST = re.compile(
    r"hivm\.hir\.pointer_cast\(([^)]*)\)[^:\n]*: memref<([^,>]*?)(?:, strided<[^>]*>)?, "
    r"#hivm\.address_space<ub>>"
)
CONSTANT = re.compile(
    r"%(\w+) = (?:arith|llvm)\.(?:mlir\.)?constant\(?\s*(-?\d+)(?: : i64)?\)? ?(?:: i64)?"
)
LOOP = re.compile(r"^( *)scf\.for[^\n]*\n(.*?)^\1\}", re.M | re.S)


@dataclass(frozen=True)
class Verdict:
    """What the compiler made of a kernel on a chip."""

    kernel: str
    chip: str
    error: str
    buffer: int = 0
    room: int = 0
    scalar_loops: int = 0
    unstructured: int = 0
    multibuffer: bool = True


def buffer_bytes(code: str) -> int:
    """The highest byte of the unified buffer that a function's buffers reach."""
    top = 0
    for function in code.split("func.func")[1:]:  # names of values are per function
        constant = {m[0]: int(m[1]) for m in CONSTANT.findall(function)}
        for where, shape in CAST.findall(function):
            *sizes, type_name = shape.split("x")
            bits = BITS.get(type_name, 64)
            for size in sizes:
                bits *= int(size) if size.isdigit() else 0
            names = [a.strip(" %") for a in where.split("[")[0].split(",")]
            at = [constant[n] for n in names if n in constant]
            top = max(top, (max(at) if at else 0) + (bits + 7) // 8)
    return (top + 31) // 32 * 32


def scalar_loops(code: str) -> int:
    """Innermost loops that load and store single elements."""
    bodies = [m.group(2) for m in LOOP.finditer(code)]
    return sum("scf.for" not in b and "memref.store" in b and "memref.load" in b for b in bodies)


@functools.cache
def _facts() -> str:
    """What a verdict depends on beside the launch and the chip."""
    versions = [importlib.metadata.version(name) for name in ("triton-ascend", "ascendnpu-ir")]
    return repr((versions, Path(__file__).read_text(encoding="utf-8")))


def compile_by_vendor(launch: Launch, chip: Chip) -> Verdict:
    """Compile for a chip, or read what was said of the same before."""
    text = repr((launch.key, chip, _facts()))
    kept = CACHE / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    if not kept.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(asdict(_compiled(launch, chip))), encoding="utf-8")
    return Verdict(**json.loads(kept.read_text(encoding="utf-8")))


def _compiled(launch: Launch, chip: Chip) -> Verdict:
    try:
        lowered = lower(launch, chip)
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        said = getattr(cause, "stderr", None)
        text = first_error(said.decode()) if said else " ".join(str(cause).split())[-400:]
        return Verdict(launch.name, chip.name, f"front end: {text}")
    options = lowered.metadata
    with tempfile.TemporaryDirectory() as folder:
        source, code = Path(folder, "kernel.mlir"), Path(folder, "module.hivm.opt.mlir")
        source.write_text(lowered.text)
        command = [
            str(BIN / ("bishengir-compile-a5" if chip.a5 else "bishengir-compile")),
            str(source),
            f"--target={chip.name}",
            f"--enable-auto-multi-buffer={options['multibuffer']}",
            f"--enable-auto-bind-sub-block={options['enable_auto_bind_sub_block']}",
            "--enable-hfusion-compile=true",
            "--enable-triton-kernel-compile=true",
            f"--save-temps={folder}",
            "-o",
            str(Path(folder, "kernel")),
            "--enable-print-memory-allocated-size" if chip.a5 else "--enable-hivm-compile=true",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        said, assembly = done.stdout + done.stderr, code.read_text() if code.exists() else ""
    passed = done.returncode == 0 or ("Cannot find hivmc" in said and assembly)
    if passed and "inline_asm" in assembly:
        passed, said = False, "error: inline assembly, which the compiler hands on unread"
    if not passed:
        full = OVERFLOW.search(said)
        wrong = (
            f"{full[1]} overflow: {int(full[2]) // 8} bytes of {int(full[3]) // 8}"
            if full
            else first_error(said) or f"exit {done.returncode}"
        )
        return Verdict(launch.name, chip.name, wrong, room=chip.buffer)
    sizes = re.findall(r"Allocated UB size = (\d+) bits", said)
    return Verdict(
        launch.name,
        chip.name,
        "",
        int(sizes[-1]) // 8 if sizes else buffer_bytes(assembly),
        chip.buffer,
        scalar_loops(assembly),
        lowered.text.count("ExtractedLoadOrStore"),
        "set enable-auto-multi-buffer to false" not in said,
    )
