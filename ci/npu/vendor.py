"""A kernel through the vendor's own compiler, up to the machine-code generator, which is not free.

bishengir-compile schedules the kernel and plans its unified buffer; when it then looks for hivmc
and finds none, the kernel has passed. Nothing about speed or results follows from that.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ci.npu.execute import BIN, CACHE
from ci.npu.lowering import Chip, Launch, first_error, lower

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
            *sizes, kind = shape.split("x")
            bits = BITS.get(kind, 64)
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
def _told() -> str:
    """What a verdict depends on beside the launch and the chip."""
    versions = [importlib.metadata.version(name) for name in ("triton-ascend", "ascendnpu-ir")]
    return repr((versions, Path(__file__).read_text(encoding="utf-8")))


def compile(launch: Launch, chip: Chip) -> Verdict:
    """Compile for a chip, or read what was said of the same before."""
    text = repr((launch.key, chip, _told()))
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
            str(BIN / ("bishengir-compile-a5" if chip.a5 else "bishengir-compile")), str(source),
            f"--target={chip.name}", f"--enable-auto-multi-buffer={options['multibuffer']}",
            f"--enable-auto-bind-sub-block={options['enable_auto_bind_sub_block']}",
            "--enable-hfusion-compile=true", "--enable-triton-kernel-compile=true",
            f"--save-temps={folder}", "-o", str(Path(folder, "kernel")),
            "--enable-print-memory-allocated-size" if chip.a5 else "--enable-hivm-compile=true",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        said, made = done.stdout + done.stderr, code.read_text() if code.exists() else ""
    passed = done.returncode == 0 or ("Cannot find hivmc" in said and made)
    if passed and "inline_asm" in made:
        passed, said = False, "error: inline assembly, which the compiler hands on unread"
    if not passed:
        full = OVERFLOW.search(said)
        wrong = (
            f"{full[1]} overflow: {int(full[2]) // 8} bytes of {int(full[3]) // 8}"
            if full
            else first_error(said) or f"exit {done.returncode}"
        )
        return Verdict(launch.name, chip.name, wrong, room=chip.buffer)
    told = re.findall(r"Allocated UB size = (\d+) bits", said)
    return Verdict(
        launch.name, chip.name, "", int(told[-1]) // 8 if told else buffer_bytes(made),
        chip.buffer, scalar_loops(made), lowered.text.count("ExtractedLoadOrStore"),
        "set enable-auto-multi-buffer to false" not in said,
    )  # fmt: skip
