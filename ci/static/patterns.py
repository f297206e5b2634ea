"""Patterns in Triton's IR that compilers got wrong, found in every launch without compiling it.

The IR is that after Triton's own simplification (TTIR): calls are inlined, and ``acc += dot(a, b)``
has become a dot with an accumulator. It is the same on all targets of a vendor, so a launch that
several of them share is read once, in some 50 ms: `make test` reads every launch of every target.
What was read is remembered by the source of the kernel.

``chained_dots``
    Two dots of one turn of a loop through one accumulator. Triton 3.6 to 3.8 pipelined such a pair
    wrongly where tensor memory holds the accumulator (sm_100 and sm_103 from 64 rows on): results
    are off by half, the same in every run (triton#10821). Right are an accumulator for each dot, or
    a loop for each in turn, which share one.
``transposed_dots``
    A dot of which a factor is the transpose of another dot's result. On sm_90 such kernels were
    wrong with 4 warps and 64 rows, from Triton 3.4 to 3.7 (fla#640, fla#984).
``overwritten``
    A store to where a load of fewer elements than the program has threads read before, if what was
    read is used for more than that store. Several threads read each element, perhaps again in
    another layout, and the one that writes waits for none of them. Interpreters have one thread,
    and see nothing. Right is ``tl.debug_barrier()`` between. Constants (flags) may
    be stored.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ci.sources import text_of
from ci.static import TARGETS, StaticCase, lower
from ci.static.selection import launches
from ci.static.store import key_of, store

VALUE = re.compile(r"%[\w$.\-]+(?:#\d+)?")
RESULTS = re.compile(r"^\s*(%[\w$.\-]+)(?::\d+)?\s*=\s*\"?([\w.]+)\"?(.*)$")
SHAPE = re.compile(r"tensor<(\d+)x(\d+)x")
ACCESS = re.compile(r"\btt\.(load|store) (%[\w$.\-#]+)(?:, (%[\w$.\-]+))?")
POINTERS = re.compile(r" : (?:tensor<((?:\d+x)+))?!tt\.ptr<")
BARRIER = re.compile(r"\b(ttg|gpu)\.barrier\b")
ELEMENTWISE = ("arith.", "math.", "tt.bitcast", "tt.fp_to_fp", "tt.extern_elementwise")
PURE = ("arith.", "tt.addptr", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.make_range")
TRANSPOSED = {
    "_indexer_backward_kernel": "right on an H100 with Triton 3.6 and ptxas 12.8: indexer_scores, "
    "8192x64x128-2048, bf16, 0.22 of the tolerance from fp64 (2026-11-26)",
}
"""Kernels that may have transposed dots on sm_90, with the compiler that they were proved with."""


@dataclass
class Operation:
    """One operation that has a result.

    Attributes:
        name: Such as ``tt.dot``.
        operands: Names of values.
        loops: Numbers of the loops around it, the outermost first.
        text: The line.
        yields: Of an ``scf.if``, the operands that its branches end with.
    """

    name: str
    operands: list[str]
    loops: tuple[int, ...]
    text: str
    yields: list[list[str]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Rows of the result."""
        return int(SHAPE.findall(self.text)[-1][0])


def operations(ttir: str) -> dict[str, Operation]:
    """The operations of a module by the name of their result (of several: without a number)."""
    by_name: dict[str, Operation] = {}
    regions: list[tuple[Operation | None, bool]] = []  # what stands around: operation, is a loop
    loops: list[int] = []
    for number, line in enumerate(ttir.splitlines()):
        match = RESULTS.match(line)
        name, rest = (match[2], match[3]) if match else (line.strip().split(" ")[0], line)
        operation = Operation(name, VALUE.findall(rest.split(" : ")[0]), tuple(loops), line)
        if match:
            by_name[match[1]] = operation
        if name == "scf.yield" and regions and regions[-1][0] is not None:
            regions[-1][0].yields.append(operation.operands)
        opened = line.rstrip().split(" loc(")[0].endswith("{")
        if line.lstrip().startswith("}") and regions:
            operation_around, is_loop = regions.pop()
            if is_loop:
                loops.pop()
            if opened:  # "} else {" and "} do {"
                regions.append((operation_around, is_loop))
                loops += [number] if is_loop else []
        elif opened:
            is_loop = name in ("scf.for", "scf.while")
            regions.append((operation if name == "scf.if" else None, is_loop))
            loops += [number] if is_loop else []
    return by_name


def _sources(value: str, by_name: dict[str, Operation], through: tuple[str, ...]) -> Iterator[str]:
    """The values that a value is made of, through operations of some names and through branches."""
    left, visited = [value], set()
    while left:
        value = left.pop()
        name, _, number = value.partition("#")
        operation = by_name.get(name)
        if operation is None or value in visited:
            continue
        visited.add(value)
        if operation.name == "scf.if":
            left += [yields[int(number or 0)] for yields in operation.yields]
        elif operation.name.startswith(through):
            left += operation.operands
        else:
            yield name


def chained_dots(ttir: str) -> list[str]:
    """The dots whose accumulator is the result of another dot of the same turn of a loop."""
    by_name = operations(ttir)
    chained = []
    for operation in by_name.values():
        if operation.name == "tt.dot" and operation.loops:
            for name in _sources(operation.operands[2], by_name, ("arith.addf",)):
                other = by_name[name]
                if other.name == "tt.dot" and other.loops == operation.loops:
                    chained.append(operation.text.strip())
    return chained


def transposed_dots(ttir: str) -> list[Operation]:
    """The dots of which a factor is the transpose of what another dot's result was made into."""
    by_name, through = operations(ttir), ("arith.", "math.", "tt.fp_to_fp")
    transposed = []
    for operation in by_name.values():
        if operation.name == "tt.dot":
            turned = [n for v in operation.operands[:2] for n in _sources(v, by_name, through)]
            inner = [by_name[n].operands[0] for n in turned if by_name[n].name == "tt.trans"]
            if any(
                by_name[n].name == "tt.dot" for v in inner for n in _sources(v, by_name, through)
            ):
                transposed.append(operation)
    return transposed


def _only_stored(lines: list[str], load: int, store: int) -> bool:
    """Whether what a line loads goes to one store, element by element, and nowhere else."""
    values, region = {lines[load].split()[0]}, len(lines[load]) - len(lines[load].lstrip())
    for number, line in enumerate(lines[load + 1 :], load + 1):
        if line.strip() and not line.startswith(" " * region):
            break  # names may come again
        match = RESULTS.match(line)
        name, rest = (match[2], match[3]) if match else (line.strip().split(" ")[0], line)
        if number == store or values.isdisjoint(VALUE.findall(rest)):
            continue
        if not match or not name.startswith(ELEMENTWISE):
            return False
        values.add(match[1])
    return True


def overwritten(ttir: str) -> list[tuple[int, str]]:
    """The stores to what was read before, with their elements: more threads may still read it."""
    lines, stores = ttir.splitlines(), []
    constants = {line.split()[0] for line in lines if " = arith.constant " in line}
    computed: dict[str, str] = {}  # by value, in which way; that of others is their line
    reads: dict[str, list[int]] = {}  # by address, the lines that load from it
    for number, line in enumerate(lines):
        if match := RESULTS.match(line):
            text = line.partition(" = ")[2].split(" loc(")[0]
            text = VALUE.sub(lambda value: computed.get(value[0], value[0]), text)
            key = text if match[2].startswith(PURE) else f"{match[2]} {number}"
            computed[match[1]] = hashlib.sha256(key.encode()).hexdigest()
        access, pointers = ACCESS.search(line), POINTERS.search(line)
        elements = math.prod(int(n) for n in ((pointers and pointers[1]) or "").split("x")[:-1])
        if BARRIER.search(line):
            reads.clear()
        elif access and access[1] == "load":
            reads.setdefault(computed.get(access[2], access[2]), []).append(number)
        elif access and access[3] not in constants:
            loads = reads.get(computed.get(access[2], access[2]), ())
            if not all(_only_stored(lines, load, number) for load in loads):
                stores.append((elements, line.strip()))
    return stores


def read(ttir: str) -> dict[str, list[Any]]:
    """What a module has of the patterns, as JSON keeps it: texts, of two with a size before it."""
    return {
        "chained": chained_dots(ttir),
        "transposed": [(dot.rows, dot.text.strip()) for dot in transposed_dots(ttir)],
        "overwritten": overwritten(ttir),
    }


def problems(case: StaticCase, arch: str, patterns: dict[str, list[Any]]) -> list[str]:
    """What a launch must not have on a target, of what :func:`read` found."""
    wrong = [f"chains dots through one accumulator: {text}" for text in patterns["chained"]]
    warps = case.options["num_warps"]
    threads = warps * TARGETS[arch].info.warp_size
    stores = [text for elements, text in patterns["overwritten"] if elements < threads]
    wrong += [f"overwrites what is being read: {text}" for text in stores]
    if arch == "sm90" and warps >= 4 and case.name not in TRANSPOSED:
        large = [text for rows, text in patterns["transposed"] if rows >= 64]
        wrong += [f"multiplies by the transpose of a dot: {text}" for text in large]
    return wrong


def _may_overwrite(text: str) -> bool:
    """Whether a name of a pointer is loaded from and stored to, perhaps in different functions."""
    loaded, stored = (re.findall(rf"tl\.{do}\(\s*(\w+)", text) for do in ("load", "store"))
    return not {*loaded}.isdisjoint(stored)


def problems_of(vendor: str) -> list[str]:
    """The problems of all launches of all targets of a vendor, as Triton calls its backend."""
    known, wrong = store(f"patterns-{vendor}"), []

    @functools.cache
    def to_read(kernel: Any) -> bool:
        text = text_of(kernel)
        return "tl.dot(" in text or _may_overwrite(text)

    for arch in (arch for arch, target in TARGETS.items() if target.gpu.backend == vendor):
        for case in launches(arch):
            if not to_read(case.kernel):
                continue
            key = key_of(case, (sys.modules[__name__],))
            if key not in known:
                known.keep(key, read(lower(case, TARGETS[arch])))
            texts = problems(case, arch, known[key])
            wrong += [f"{case.name} on {arch}, {case.label}: {text}" for text in texts]
    return wrong
