"""Which launches are compiled for which variant: all, what the baseline has, or a share of that.

``ci/baseline.txt`` keeps what the suite compiles, a line for each kernel and target: a review sees
what a change costs. It says which Triton compiled it, and of which source the lines of a kernel are
made, so that the suite finds stale ones without compiling anything (:mod:`ci.static.baseline`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ci.static import TARGETS, StaticCase, Variant, variants
from ci.static.cases import launched
from liger_multi.grouping import grouped

BASELINE = Path(__file__).parent.parent / "baseline.txt"
# beside one launch of every kernel on every target, what the baseline has
SUITE_VARIANTS = {"gfx942": Variant(large=True), "gfx1100": Variant(aligned=False, large=True)}
# NVIDIA, CDNA and RDNA by turns
TURNS = ("sm90", "gfx942", "sm80", "gfx1100", "sm100", "gfx90a", "gfx1201", "gfx950")

Pair = tuple[StaticCase, Variant]


def kept() -> dict[str, list[str]]:
    """The lines of every kernel in the baseline."""
    text = BASELINE.read_text(encoding="utf-8") if BASELINE.exists() else ""
    parts = [part.strip("\n").split("\n") for part in text.split("\n\n")[1:]]
    return {lines[0].partition(" ")[0]: lines for lines in parts}


def label_of(lines: Iterable[str], arch: str) -> str:
    """What made the launch of a kernel on a target; empty without one."""
    matches = (re.match(rf"  {arch} +(\S.*?) +\d+ threads ", text) for text in lines)
    return next((match[1] for match in matches if match), "")


@functools.cache
def launches(arch: str) -> tuple[StaticCase, ...]:
    """The launches of all operators on one target that a compiler tells apart."""
    cases = {case.identity: case for case in reversed(launched(arch))}
    return tuple(reversed(cases.values()))


def full(arch: str) -> Sequence[Pair]:
    """Every launch in every variant."""
    return [(case, v) for case in launches(arch) for v in variants(TARGETS[arch])]


@functools.cache
def suite(arch: str) -> Sequence[Pair]:
    """A launch of every kernel; on some targets in another variant too.

    It is the launch that the baseline has, so that a new sample changes no other line; of a new
    kernel it is the one in the middle.
    """
    pairs: list[Pair] = []
    blocks = kept()
    for name, cases in grouped((case.name, case) for case in launches(arch)).items():
        label = label_of(blocks.get(name, ()), arch)
        chosen = next((case for case in cases if case.label == label), cases[len(cases) // 2])
        pairs.append((chosen, Variant()))
        if arch in SUITE_VARIANTS:
            pairs.append((chosen, SUITE_VARIANTS[arch]))
    return pairs


def turn(arch: str) -> Sequence[Pair]:
    """What `make test` compiles of :func:`suite`: a kernel on one target.

    The baseline holds every kernel on every target, and has to be of today's sources.
    """
    names = sorted({case.name for case, _ in suite(arch)})
    mine = set(names[TURNS.index(arch) :: len(TURNS)])
    return [(case, variant) for case, variant in suite(arch) if case.name in mine]


SELECTIONS: dict[str, Callable[[str], Sequence[Pair]]] = {
    "full": full,
    "suite": suite,
    "turn": turn,
}


class Request(NamedTuple):
    """Some rows of one target.

    Attributes:
        arch: The target.
        selection: A name in :data:`SELECTIONS`.
        pattern: Of names of kernels.
    """

    arch: str
    selection: str
    pattern: str = ""

    def pairs(self) -> list[Pair]:
        """The launches and variants that are asked for."""
        pairs = SELECTIONS[self.selection](self.arch)
        return [pair for pair in pairs if re.search(self.pattern, pair[0].name)]
