"""Ascend's lowering of a kernel, executed on the CPU.

Triton, linalg (triton-ascend's front end: its analysis of pointers and masks), LLVM (upstream
passes of bishengir-opt), x86 (Triton's own LLVM), a shared library. Programs run one after another,
forwards or backwards; on-chip buffers are poisoned first. It checks what the NPU's front end made
of a kernel. What comes after linalg on the device (schedules, synchronization, buffers, the
device's exponentials) does not run here.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ascendnpuir
from triton._C.libtriton import ir, llvm

from ci.npu.lowering import CHIPS, Chip, Launch, caught, first_error, host, lower

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
    "tanh", "exp", "log", "sin", "cos", "tan", "erf", "sqrt",
    "log2", "exp2", "log1p", "expm1", "atan", "ceil", "floor", "log10",
)  # fmt: skip
RUNTIME += "".join(
    f"float __hmf_{n}f(float x) {{ return {n}f(x); }}\n"
    f"float __hmf_{n}Dh(float x) {{ return {n}f(x); }}\n"
    for n in MATHS
)
SCALARS = {
    "i1": ctypes.c_bool, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32,
    "u32": ctypes.c_int32, "i64": ctypes.c_int64, "u64": ctypes.c_int64, "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}  # fmt: skip
FLAGS = ("-shared", "-fPIC", "-O2", "-w", "-fno-builtin")
_loaded: dict[str, tuple[Any, Any]] = {}
launched: Counter[str] = Counter()


def _call(*command: str | Path) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name}: {first_error(done.stderr)}")


def _runtime() -> Path:
    made = CACHE / "runtime.o"
    if not made.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        own = CACHE / f"runtime-{os.getpid()}"
        own.with_suffix(".c").write_text(RUNTIME)
        _call("gcc", "-c", *FLAGS[1:], "-o", own.with_suffix(".o"), own.with_suffix(".c"))
        own.with_suffix(".o").rename(made)
    return made


def _build(launch: Launch, chip: Chip, made: Path) -> None:
    lowered = lower(launch, chip)
    # what has no numeric meaning has no upstream lowering either
    kept = [n for n in lowered.text.splitlines() if not re.match(r"\s*(annotation\.mark|gpu\.)", n)]
    own = made.with_name(f"{made.stem}-{os.getpid()}")
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
    library.with_suffix(".name").rename(made.with_suffix(".name"))
    library.rename(made)


def _function(launch: Launch, chip: Chip) -> tuple[Any, Any]:
    found = _loaded.get(launch.key)
    if found is None:
        CACHE.mkdir(parents=True, exist_ok=True)
        made = CACHE / f"{launch.key[:32]}.so"
        if not made.exists():
            _build(launch, chip, made)
        library = ctypes.CDLL(str(made.absolute()))
        name = made.with_suffix(".name").read_text()
        found = _loaded[launch.key] = (library, getattr(library, name))
    return found


def _memory(address: int, size: int) -> list[Any]:
    return [
        ctypes.c_void_p(address), ctypes.c_void_p(address), ctypes.c_int64(0),
        ctypes.c_int64(size), ctypes.c_int64(1),
    ]  # fmt: skip


def run(launch: Launch, chip: Chip = CHIPS["Ascend910B3"]) -> None:
    """Run every program of a launch."""
    library, function = _function(launch, chip)
    launched[launch.name] += 1
    scratch = ctypes.create_string_buffer(1 << 16)
    address = ctypes.addressof(scratch)
    given = _memory(address, 4096) + _memory(address, 1 << 16)
    for name, kind in launch.signature.items():
        if name in launch.constants:
            continue
        value = launch.arguments[name]
        given += _memory(host(value), value.numel()) if kind[0] == "*" else [SCALARS[kind](value)]
    grid = (*launch.grid, 1, 1)[:3]
    programs = list(itertools.product(*map(range, grid[::-1])))
    if os.environ.get("ASCEND_GRID") == "reversed":
        programs.reverse()  # programs may not depend on each other's order
    function.restype = None
    for z, y, x in programs:
        library.kernel_reset()
        function(*given, *[ctypes.c_int32(i) for i in (*grid, x, y, z)])


@contextlib.contextmanager
def launches(chip: Chip = CHIPS["Ascend910B3"]) -> Iterator[None]:
    """Run every launch inside on the CPU, through the lowering."""
    with caught(lambda launch: run(launch, chip), chip):
        yield
