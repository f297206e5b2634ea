"""What :func:`liger_multi.testing.bisect` found: rows, the first difference, a table, a picture."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from liger_multi.page import Page
from liger_multi.pictures import ALARM, INK, LIGER, OURS, SOFT, STOCK, figure
from liger_multi.testing.bisection import recorder as recording
from liger_multi.testing.bisection.digest import Distance

EQUAL, DIFFERS, SHAPE, UNREAD = "equal", "differs", "other shape", "not compared"
ONLY_A, ONLY_B = "only in a", "only in b"
AROUND = 3  # rows before and after the first difference in the table
HEADER = ("call", "kind", "name", "direction", "shape", "dtype", "largest", "difference", "")


@dataclass(frozen=True)
class Row:
    """One record of both sides.

    Attributes:
        index: Its place.
        kind: data, weight, operator, module, output, gradient, loss or parameter gradient.
        name: Of the operator, module or tensor.
        direction: forward, backward or recompute.
        number: Which call of that name.
        where: The module that runs an operator.
        shape: Of the first output that differs, else of the first.
        dtype: Likewise.
        state: equal, differs, other shape, not compared, only in a, or only in b.
        inputs: The same of its inputs; empty where it has none.
        difference: Estimated norm of the difference of the outputs by that of a's.
        largest: The largest magnitude of that output in a and in b.
        norm: Its norm likewise.
        hashes: Hashes of the outputs of a and of b.
        backends: That ran an operator for a and for b.
        differing: Names of tensors that differ.
    """

    index: int
    kind: str
    name: str
    direction: str
    number: int
    where: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    state: str = EQUAL
    inputs: str = ""
    difference: float = 0.0
    largest: tuple[float, ...] = ()
    norm: tuple[float, ...] = ()
    hashes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    backends: tuple[str, str] = ("", "")
    differing: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" in {self.where}" if self.where and self.kind == recording.OPERATOR else ""
        return f"{self.name} {self.direction} ({self.kind}, call {self.number}){where}"


@dataclass(frozen=True)
class Difference:
    """The first row that differs, measured in a second run.

    Attributes:
        row: That row.
        cause: computation (equal inputs, other outputs), between (something that is not recorded),
            shape, sequence, data or weights.
        reason: The same in a sentence.
        distances: Of every tensor that differs.
        repeatable: Whether the second run gave both sides the bits of the first.
        promise: Which promise of the operator is broken, or why none is.
        broken: Names of broken promises.
    """

    row: Row
    cause: str
    reason: str
    distances: tuple[Distance, ...] = ()
    repeatable: bool = True
    promise: str = ""
    broken: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of the operator, module or tensor."""
        return self.row.name

    @property
    def direction(self) -> str:
        """forward, backward or recompute."""
        return self.row.direction

    @property
    def kind(self) -> str:
        """Of the record."""
        return self.row.kind

    @property
    def ulps(self) -> float:
        """The largest distance of all tensors that differ."""
        return max((d.ulps for d in self.distances), default=0.0)


@dataclass(frozen=True)
class Bisection:
    """Two runs side by side.

    Attributes:
        a: The first configuration, in words.
        b: The second one.
        rows: What both recorded, in the order of the first.
        first: The first difference, or None.
        notes: What was not compared, and why.
    """

    a: str
    b: str
    rows: tuple[Row, ...]
    first: Difference | None
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether no record differs."""
        return self.first is None

    def __str__(self) -> str:
        return self.page().plain()

    def page(self) -> Page:
        """The first difference, the rows around it, and counts."""
        page = Page()
        entries = [("a", self.a), ("b", self.b)]
        if self.first is None:
            page.add("Result", [*entries, ("", "every record that was compared has equal bits")])
        else:
            page.add("Result", [*entries, *_described(self.first)])
            at = self.first.row.index
            near = self.rows[max(0, at - AROUND) : at + AROUND + 1]
            page.add("Calls around it", [_cells(row, row.index == at) for row in near], HEADER)
        counts = Counter((row.kind, row.state) for row in self.rows)
        states = [
            s
            for s in (EQUAL, DIFFERS, SHAPE, UNREAD, ONLY_A, ONLY_B)
            if any(state == s for _, state in counts)
        ]
        kinds = list(dict.fromkeys(row.kind for row in self.rows))
        cells = [[name, *(str(counts[name, state]) for state in states)] for name in kinds]
        page.add("Records", cells, ("kind", *states))
        page.add("Notes", [(f"{i}.", note) for i, note in enumerate(self.notes, 1)])
        return page

    def as_data(self) -> dict[str, Any]:
        """The same facts for JSON; numbers that JSON lacks are text."""
        first = self.first
        difference = (
            None
            if first is None
            else {
                **asdict(first),
                "row": first.row.index,
                "name": first.name,
                "kind": first.kind,
                "direction": first.direction,
                "ulps": first.ulps,
            }
        )
        data = {
            "equal": self.equal,
            "a": self.a,
            "b": self.b,
            "first": difference,
            "rows": [asdict(row) for row in self.rows],
            "notes": list(self.notes),
        }
        document: dict[str, Any] = _finite(data)
        return document

    def to_json(self) -> str:
        """:meth:`as_data` as text."""
        return json.dumps(self.as_data(), indent=1, allow_nan=False)

    def picture(self, path: str | Path) -> None:
        """Draw the relative difference of every call in order, as a PNG.

        Raises:
            MissingPackageError: No matplotlib.
        """
        draw(self, Path(path))


def number_of(value: float) -> str:
    """A number of ulps."""
    return f"{value:,.0f}" if math.isfinite(value) else "NaN against a number"


def share(count: int, total: int) -> str:
    """Some of all, also in percent."""
    percent = 100 * count / total if total else 0
    return f"{count:,} of {total:,} ({percent:.3g} %)"


def _described(first: Difference) -> list[tuple[str, str]]:
    lines = [("first difference", str(first.row)), ("", first.reason)]
    for d in first.distances:
        text = f"at most {number_of(d.ulps)} ulp of {d.dtype} ({d.largest:.3g}); "
        text += f"{share(d.elements, d.of_elements)} elements, {share(d.rows, d.of_rows)} rows"
        lines.append((d.name or "values", text))
    one, other = first.row.backends
    if one or other:
        lines.append(("backend", one if one == other else f"a: {one or '-'}, b: {other or '-'}"))
    if first.promise:
        lines.append(("promise", first.promise))
    return lines


def _cells(row: Row, first: bool) -> list[str]:
    largest = " ".join(dict.fromkeys(f"{value:.4g}" for value in row.largest))
    state = row.state if row.state != EQUAL or row.inputs in ("", EQUAL) else f"inputs {row.inputs}"
    return [
        str(row.index),
        row.kind,
        row.name,
        row.direction,
        "x".join(map(str, row.shape)),
        row.dtype,
        largest,
        f"{row.difference:.1e}" if row.difference else "",
        f"{state} <- first" if first else state,
    ]


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


# --- the picture ---

SHOWN = (
    recording.OPERATOR,
    recording.MODULE,
    recording.GRADIENT,
    recording.OUTPUT,
    recording.LOSS,
    recording.PARAMETER,
)
_SIDES = {
    recording.FORWARD: (OURS, "o"),
    recording.RECOMPUTE: (STOCK, "D"),
    recording.BACKWARD: (LIGER, "s"),
}


def draw(bisection: Bisection, path: Path) -> None:
    """One mark a record: operators large, others small; equal ones on the line below."""
    rows = [r for r in bisection.rows if r.kind in SHOWN and r.state in (EQUAL, DIFFERS, SHAPE)]
    known = [r.difference for r in rows if 0 < r.difference < math.inf]
    low = 10 ** (math.floor(math.log10(min(known))) - 1) if known else 1e-9
    high = 10 ** (math.ceil(math.log10(max(known))) + 1) if known else 1.0
    floor = low / 4

    def height(row: Row) -> float:
        return floor if row.difference <= 0 else min(row.difference, high)

    with figure(path, 9.2, 4.6) as canvas:
        axis = canvas.subplots()
        axis.set_yscale("log")
        for direction, (color, marker) in _SIDES.items():
            for own in (True, False):
                some = [r for r in rows if r.direction == direction and own == _is_operator(r)]
                if some:
                    group = "operators" if own else "modules and tensors"
                    axis.scatter(
                        [r.index for r in some],
                        [height(r) for r in some],
                        s=34 if own else 9,
                        color=color,
                        marker=marker,
                        label=f"{direction}: {group}",
                        clip_on=False,
                        zorder=3,
                    )
        axis.axhline(low / 2, color=SOFT, lw=0.8, ls=(0, (3, 3)))
        axis.set_ylim(low / 8, high)
        axis.annotate(
            "equal bits below",
            (0, low / 2),
            xycoords=("axes fraction", "data"),
            xytext=(4, 3),
            textcoords="offset points",
            fontsize=8,
            color=SOFT,
        )
        _mark_first(axis, bisection, height)
        axis.set_xlabel("records in order")
        axis.set_ylabel("relative difference (estimated)")
        axis.set_title(f"a: {_short(bisection.a)}\nb: {_short(bisection.b)}")
        canvas.legend(loc="outside lower center", ncols=3, fontsize=9)


def _is_operator(row: Row) -> bool:
    return row.kind == recording.OPERATOR


def _mark_first(axis: Any, bisection: Bisection, height: Any) -> None:
    """A ring around the first difference, with its name."""
    if bisection.first is None:
        return
    row = bisection.first.row
    place = (row.index, height(row))
    axis.scatter(*place, s=150, facecolors="none", edgecolors=ALARM, linewidths=2, zorder=4)
    axis.axvline(row.index, color=ALARM, lw=0.9)
    right = row.index < len(bisection.rows) * 0.6
    ulps = f"\n{number_of(bisection.first.ulps)} ulp" if bisection.first.distances else ""
    axis.annotate(
        f"first: {_short(row.name, 40)}\n{row.direction}{ulps}",
        (row.index, 0.98),
        xycoords=("data", "axes fraction"),
        xytext=(6 if right else -6, 0),
        textcoords="offset points",
        ha="left" if right else "right",
        va="top",
        color=INK,
        fontsize=9,
    )


def _short(text: str, most: int = 90) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
