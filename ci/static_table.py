"""The table of what every kernel costs on every target: made, judged, printed, kept.

Rows are cached by the source of the kernel and all that the compiler was told, in
``.cache/static``. ``ci/baseline/<kernel>.txt`` keeps what the suite compiles, one line a launch and
target: a review sees what a change costs. Such a file also says which source it is made of, so that
the suite finds a stale one without compiling anything.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.runtime.jit import JITFunction

from ci import static_code
from ci.static import (
    TARGETS,
    StaticCase,
    Target,
    Variant,
    kernels,
    missing,
    report,
    static_cases,
    variants,
)
from ci.static_code import CORES, Code

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache" / "static"
BASELINE = ROOT / "ci" / "baseline"
# beside one launch of every kernel on every target, what the committed table has
SUITE_VARIANTS = {"gfx942": Variant(large=True), "gfx1100": Variant(aligned=False, large=True)}
BYTES = {"*bf16": 2, "*fp16": 2, "*fp32": 4, "*i32": 4, "*i64": 8}
# kernels, by how their names begin, that may address tensors of more than 2 GiB by 64 bits a thread
ADDRESSED = {
    "_sum_partials_": "partials are some programs a core of fp32 rows, far from 2 GiB",
    "_embedding_": "every row of a tile is gathered from another place",
    "_rope_": "tokens of a tile may stand in two sequences, so they have no common base",
    "_moe_": "rows stand in the order of their experts, and are gathered",
    "_grouped_": "likewise",
    "_streams_": "streams and rows of a tile have strides of their own",
    "_squash_": "rows of a tile are matrices of a few numbers each",
}
# kernels, by how their names begin, that read a few numbers and stream nothing in
NOT_READ = ("_zero_groups_", "_squash_")


class Row(NamedTuple):
    """One compiled launch."""

    case: StaticCase
    arch: str
    variant: Variant
    code: Code


def distinct(cases: Iterable[StaticCase]) -> list[StaticCase]:
    """Cases that the compiler can tell apart; the first of equals."""
    return list({case.identity: case for case in reversed(list(cases))}.values())[::-1]


@functools.cache
def launches(arch: str) -> tuple[StaticCase, ...]:
    """The distinct launches of all operators on one target."""
    from ci.static_cases import calls

    return tuple(distinct(static_cases(TARGETS[arch].info, calls())))


def full(arch: str) -> list[tuple[StaticCase, Variant]]:
    """Every launch in every variant."""
    return [(case, v) for case in launches(arch) for v in variants(TARGETS[arch])]


def suite(arch: str) -> list[tuple[StaticCase, Variant]]:
    """A launch of every kernel, from the middle of them; on some targets in another variant too."""
    found = []
    for name in dict.fromkeys(case.name for case in launches(arch)):
        mine = [case for case in launches(arch) if case.name == name]
        middle = mine[len(mine) // 2]
        found.append((middle, Variant()))
        if arch in SUITE_VARIANTS:
            found.append((middle, SUITE_VARIANTS[arch]))
    return found


# NVIDIA, and AMD with waves of 64 and of 32
FAMILIES = (("sm90", "sm80", "sm100"), ("gfx942", "gfx90a", "gfx950"), ("gfx1100", "gfx1201"))


def turn(arch: str) -> list[tuple[StaticCase, Variant]]:
    """What the tests compile of :func:`suite` in two minutes: a kernel on one target a family."""
    family = next((f for f in FAMILIES if arch in f), (arch,))
    names = sorted({case.name for case, _ in suite(arch)})
    mine = set(names[family.index(arch) :: len(family)])
    return [(case, variant) for case, variant in suite(arch) if case.name in mine]


# --- compiling, once ---


@functools.cache
def _reader() -> str:
    """What the facts depend on beside the kernel: the compiler and the code that reads them."""
    tree = ast.dump(ast.parse(Path(static_code.__file__).read_text(encoding="utf-8")))
    return f"{triton.__version__} {hashlib.sha256(tree.encode()).hexdigest()}"


def _key(case: StaticCase, target: Target, variant: Variant) -> str:
    told = (_reader(), case.kernel.cache_key, case.identity, str(target.gpu), variant)
    return hashlib.sha256(repr(told).encode()).hexdigest()


def _known(arch: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((CACHE / f"{arch}.json").read_text(encoding="utf-8"))
        return found
    except (OSError, ValueError):
        return {}


def _to_code(facts: dict[str, Any]) -> Code:
    widths = {k: {int(w): n for w, n in facts[k].items()} for k in ("loads", "stores")}
    return Code(**{**facts, **widths, "matrix": tuple(facts["matrix"])})


def facts_of(arch: str, case: StaticCase) -> Code:
    """Facts of one launch, from the cache where it is known."""
    known, key = _known(arch), _key(case, TARGETS[arch], Variant())
    if key not in known:
        known = {key: dataclasses.asdict(report(case, TARGETS[arch]))}
        _store(arch, known)
    return _to_code(known[key])


def write_table(arch: str) -> str:
    """Write the launch table of one architecture from the static model."""
    from ci.static_cases import calls
    from ci.static_launch import entries, write

    wanted = {label: call for label, call in calls().items() if "float32" not in label}
    return str(write(TARGETS[arch].info, entries(arch, wanted, facts_of)).relative_to(ROOT))


def _wanted(arch: str, which: str, pattern: str) -> list[tuple[StaticCase, Variant]]:
    pairs = {"full": full, "suite": suite, "turn": turn}[which](arch)
    return [(case, variant) for case, variant in pairs if re.search(pattern, case.name)]


def compile_rows(arch: str, which: str, pattern: str) -> list[dict[str, Any]]:
    """Facts of one target's part of what is asked for, compiled or from the cache."""
    target, known, used = TARGETS[arch], _known(arch), 0
    found = []
    for case, variant in _wanted(arch, which, pattern):
        key = _key(case, target, variant)
        if key not in known:
            known[key] = dataclasses.asdict(report(case, target, variant))
            used += 1
            if used % 50 == 0:
                _store(arch, known)
        found.append(known[key])
    if used:
        _store(arch, known)
    return found


def _store(arch: str, known: dict[str, Any]) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    part = CACHE / f"{arch}.{os.getpid()}"
    part.write_text(json.dumps(_known(arch) | known), encoding="utf-8")
    part.replace(CACHE / f"{arch}.json")


def _pool() -> concurrent.futures.ProcessPoolExecutor:
    return concurrent.futures.ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn"))


def rows_of(archs: Sequence[str], which: str, pattern: str = "") -> list[Row]:
    """Rows of several targets, compiled by one process a core."""
    found = []
    with _pool() as pool:
        many = pool.map(compile_rows, archs, [which] * len(archs), [pattern] * len(archs))
        for arch, facts in zip(archs, many, strict=True):
            wanted = _wanted(arch, which, pattern)  # jitted functions do not travel
            found += [
                Row(case, arch, variant, _to_code(each))
                for (case, variant), each in zip(wanted, facts, strict=True)
            ]
    return found


# --- judging ---


def streamed(case: StaticCase, code: Code) -> int:
    """Bytes a thread that a streaming kernel loads at a time: 16, or all that its tile has."""
    widths = [BYTES.get(kind, 16) for kind in case.signature.values() if kind[0] == "*"]
    tile: int = case.constants.get("ROWS", 1) * case.constants.get("BLOCK", 2**20)
    return max(1, min(16, tile * min(widths, default=16) // code.threads))


def failures(row: Row) -> list[str]:
    """What a row must not have."""
    case, info, code = row.case, TARGETS[row.arch].info, row.code
    wrong = []
    if code.threads > info.max_threads:
        wrong.append(f"{code.threads} threads, at most {info.max_threads}")
    if code.shared > info.shared_bytes:
        wrong.append(f"{code.shared} bytes on chip, at most {info.shared_bytes}")
    # formulas do not know alignment, and accesses of 2 bytes take the registers of some launches:
    # the table shows what those spill
    if code.spills and row.variant.aligned:
        wrong.append(f"{code.spills} bytes of spilled registers")
    wanted = streamed(case, code)
    reads = not case.name.startswith(NOT_READ)
    if reads and case.streams and row.variant.aligned and code.widest_load < wanted:
        wrong.append(f"loads {code.widest_load} bytes at a time, wanted {wanted}")
    if code.swaps:
        wrong.append(f"{code.swaps} compare-and-swap instructions")
    if code.narrow_atomics:
        wrong.append(f"{code.narrow_atomics} atomic operations on 16 bits")
    if row.variant.large and code.unbounded and not case.name.startswith(tuple(ADDRESSED)):
        wrong.append(f"{code.unbounded} 16-byte accesses lost their buffer operation")
    return wrong


def verdicts(rows: Iterable[Row]) -> list[str]:
    """One line a failure."""
    return [
        f"{row.arch} {row.case.name} ({row.case.label}, {row.variant.name}): {text}"
        for row in rows
        for text in failures(row)
    ]


# --- writing ---


def occupancy(row: Row) -> int:
    """Threads that a core holds, in percent of what it could."""
    return round(100 * row.code.resident / CORES[row.arch].threads)


def _widths(widths: dict[int, int]) -> str:
    return " ".join(f"{width}x{count}" for width, count in widths.items()) or "-"


def line(row: Row) -> str:
    """One row in full."""
    code = row.code
    facts = [
        f"{row.arch:<8}{code.threads:>5} threads", f"{code.registers:>4} registers",
        f"{occupancy(row):>4} %", f"{code.shared:>6} B", f"ld {_widths(code.loads)}",
        f"st {_widths(code.stores)}", f"{code.instructions} instructions",
        *[f"mma {name}" for name in code.matrix], *_bad(code),
    ]  # fmt: skip
    return "  ".join(facts)


def _bad(code: Code) -> list[str]:
    said = [f"{code.spills} B spilled"] if code.spills else []
    said += [f"{code.swaps} swaps"] if code.swaps else []
    said += [f"{code.narrow_atomics} 16-bit atomics"] if code.narrow_atomics else []
    return said + ([f"{code.unbounded} unbounded"] if code.unbounded else [])


def _short(row: Row) -> str:
    """A variant beside the first: what usually differs."""
    facts = [f"{row.code.registers} r", f"{occupancy(row)} %", f"{row.code.instructions} i"]
    return f"{row.variant.name} {', '.join([*facts, *_bad(row.code)])}"


def page(name: str, rows: Sequence[Row]) -> str:
    """The baseline of one kernel: a block a case, a line a target."""
    out = [f"# {name}: made by `python -m ci.static --write` with triton {triton.__version__}"]
    out += [f"# source {sources(name)}"]
    by_case: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        by_case.setdefault(row.case.label, {}).setdefault(_launch(row), []).append(row)
    for label, by_line in by_case.items():
        out += ["", label]
        for first, *others in by_line.values():
            out.append("; ".join(["  " + line(first), *map(_short, others)]))
    return "\n".join(out) + "\n"


def _launch(row: Row) -> str:
    return f"{row.arch} {row.case.identity}"


@functools.cache
def _told() -> dict[str, str]:
    """For every kernel, the launches of its baseline."""
    found: dict[str, list[str]] = {}
    for arch in TARGETS:
        for case, variant in suite(arch):
            told = f"{arch} {case.label} {case.identity} {variant.name}"
            found.setdefault(case.name, []).append(told)
    return {name: "\n".join(lines) for name, lines in found.items()}


def sources(name: str) -> str:
    """A hash of a kernel's source, of what it calls, and of its launches."""
    parts: dict[str, str] = {}
    left = [kernels()[name]]
    while left:
        function = left.pop()
        parts[function.__name__] = function.src
        for used in re.findall(r"\b[A-Za-z_]\w*", function.src):
            other = function.fn.__globals__.get(used)
            if isinstance(other, JITFunction) and other.__name__ not in parts:
                left.append(other)
            elif hasattr(other, "value"):  # a constexpr of the module
                parts[used] = repr(other.value)
    text = repr(sorted(parts.items())) + _told().get(name, "")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def stale() -> dict[str, str]:
    """Kernels whose baseline is absent or of another source, and baselines of no kernel."""
    found = {}
    for name in kernels():
        file = BASELINE / f"{name}.txt"
        said = re.search(r"^# source (\w+)$", file.read_text(), re.M) if file.exists() else None
        if said is None or said[1] != sources(name):
            found[name] = "absent" if not file.exists() else "of another source or other launches"
    kept = {path.stem for path in BASELINE.glob("*.txt")}
    return found | dict.fromkeys(kept - set(kernels()), "of a kernel that is no more")


def write_baseline(rows: Sequence[Row]) -> None:
    """Write the baselines of the kernels that have rows; remove those of kernels that are gone."""
    BASELINE.mkdir(exist_ok=True)
    for name in sorted({row.case.name for row in rows}):
        path = BASELINE / f"{name}.txt"
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        new = page(name, [row for row in rows if row.case.name == name])
        if old != new:
            path.write_text(new, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    for path in BASELINE.glob("*.txt"):
        if path.stem not in kernels():
            path.unlink()
            print(f"removed {path.relative_to(ROOT)}")


def main() -> int:
    """Compile every Triton kernel for every target; print, judge and keep what it costs."""
    parser = argparse.ArgumentParser(prog="python -m ci.static", description=main.__doc__)
    parser.add_argument("--full", action="store_true", help="every launch in every variant "
                        "(half an hour of a core or more)")  # fmt: skip
    parser.add_argument("--write", action="store_true", help="rewrite ci/baseline")
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--kernel", default="", help="only kernels whose name has this pattern")
    parser.add_argument("--store", type=Path, help="write the table to a file too")
    parser.add_argument("--tables", action="store_true", help="write the launch tables of the "
                        "targets that nobody measured on, by a static model (minutes)")  # fmt: skip
    options = parser.parse_args()
    archs = [arch for arch in options.target or TARGETS if missing(TARGETS[arch]) is None]
    for arch in set(options.target or TARGETS) - set(archs):
        print(f"{arch}: {missing(TARGETS[arch])}")
    if options.tables:
        chosen = [a for a in archs if TARGETS[a].gpu.backend == "hip"]
        with _pool() as pool:
            for path in pool.map(write_table, chosen):
                print(f"wrote {path}")
        return 0
    rows = rows_of(archs, "full" if options.full else "suite", options.kernel)
    if options.write:
        if options.full or archs != list(TARGETS):
            parser.error("ci/baseline has what the suite compiles, for all targets: without --full")
        write_baseline(rows)
    text = "\n".join(f"{r.case.name:<44}{r.case.label:<40}{r.variant.name:<17}{line(r)}"
                     for r in rows)  # fmt: skip
    if options.store:
        options.store.parent.mkdir(parents=True, exist_ok=True)
        options.store.write_text(text + "\n", encoding="utf-8")
    wrong = verdicts(rows)
    print("\n".join([*([] if options.write else [text, ""]), *wrong]))
    print(f"{len(rows)} compiled launches of {len({r.case.name for r in rows})} kernels, "
          f"{len(wrong)} failures")  # fmt: skip
    return 1 if wrong else 0
