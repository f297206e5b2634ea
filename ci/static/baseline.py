"""The committed baseline: what the suite compiles, a line for each kernel and target."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping, Sequence

import triton

from ci.sources import text_of
from ci.static import TARGETS, kernels
from ci.static.code import CORES, Code
from ci.static.rows import Row
from ci.static.selection import BASELINE, kept, label_of, suite
from ci.static.store import formulas
from liger_multi.grouping import grouped

ARCH = 8
LABEL = 48  # width of what made a launch, in a line of the baseline


def occupancy(row: Row) -> int:
    """Threads that a core holds, in percent of what it could."""
    return round(100 * row.code.resident / CORES[row.arch].threads)


def _widths(widths: dict[int, int]) -> str:
    return " ".join(f"{width}x{count}" for width, count in widths.items()) or "-"


def line(row: Row) -> str:
    """One row in full."""
    code = row.code
    facts = [
        f"{code.threads:>5} threads",
        f"{code.registers:>4} registers",
        f"{occupancy(row):>4} %",
        f"{code.shared:>6} B",
        f"ld {_widths(code.loads)}",
        f"st {_widths(code.stores)}",
        f"{code.instructions} instructions",
        *[f"mma {name}" for name in code.matrix],
        *_bad(code),
    ]
    return "  ".join(facts)


def _bad(code: Code) -> list[str]:
    said = [f"{code.spills} B spilled"] if code.spills else []
    said += [f"{code.swaps} swaps"] if code.swaps else []
    said += [f"{code.narrow_atomics} 16-bit atomics"] if code.narrow_atomics else []
    lost = {"loads": code.unbounded_loads, "stores": code.unbounded_stores}
    return said + [f"{count} unbounded {what}" for what, count in lost.items() if count]


def _short(row: Row) -> str:
    """A variant beside the first: what usually differs."""
    facts = [f"{row.code.registers} r", f"{occupancy(row)} %", f"{row.code.instructions} i"]
    return f"{row.variant.name} {', '.join([*facts, *_bad(row.code)])}"


def block(name: str, rows: Sequence[Row]) -> list[str]:
    """The lines of one kernel in the baseline: its source, then a line a target and launch."""
    launches = grouped(((row.arch, row.case.label, row.case.identity), row) for row in rows)
    out = [f"{name} {sources(name)}"]
    for (arch, label, _), (first, *others) in launches.items():
        facts = "; ".join([line(first), *map(_short, others)])
        out.append(f"  {arch:<{ARCH}}{label + ' ':<{LABEL}}{facts}")
    return out


def page(blocks: Mapping[str, Sequence[str]]) -> str:
    """The baseline, of the lines of its kernels."""
    out = [f"# triton {triton.__version__}: made by `make static ARGS=--write`"]
    for name in sorted(blocks):
        out += ["", *blocks[name]]
    return "\n".join(out) + "\n"


def compiled_by() -> str:
    """The Triton that compiled the kept baseline; empty without one."""
    text = BASELINE.read_text("utf-8") if BASELINE.exists() else ""
    match = re.match(r"# triton (\S+): ", text)
    return match[1] if match else ""


@functools.cache
def _facts() -> dict[str, str]:
    """For every kernel, the launches of its baseline."""
    texts = (
        (case.name, " ".join([arch, case.label, case.identity, variant.name, *formulas(case)]))
        for arch in TARGETS
        for case, variant in suite(arch)
    )
    return {name: "\n".join(lines) for name, lines in grouped(texts).items()}


def sources(name: str) -> str:
    """A hash of a kernel's statements, of those that it calls, and of its launches."""
    text = text_of(kernels()[name]) + _facts().get(name, "")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def stale() -> dict[str, str]:
    """Kernels whose baseline is absent or of another source, and baselines of no kernel."""
    blocks, reasons = kept(), dict[str, str]()
    for name in sorted(kernels()):
        lines = blocks.get(name, [""])
        absent = [arch for arch in TARGETS if not label_of(lines, arch)]
        if absent:
            reasons[name] = f"absent for {', '.join(absent)}"
        elif lines[0] != f"{name} {sources(name)}":
            reasons[name] = "of another source or other launches"
    return reasons | dict.fromkeys(blocks.keys() - kernels(), "of a kernel that is no more")


def write_baseline(rows: Sequence[Row]) -> None:
    """Write the lines of the kernels that have rows; remove those of kernels that are gone.

    Raises:
        ValueError: Lines that stay were compiled by another Triton.
    """
    names = {row.case.name for row in rows}
    stay = {n: b for n, b in kept().items() if n in kernels() and n not in names}
    if stay and compiled_by() != triton.__version__:
        raise ValueError(
            f"{BASELINE.name} is of triton {compiled_by()}, this is {triton.__version__}: "
            "write every kernel, without --kernel"
        )
    blocks = {name: block(name, [r for r in rows if r.case.name == name]) for name in names}
    BASELINE.write_text(page({**stay, **blocks}), encoding="utf-8")
    print(f"wrote {BASELINE}")
