"""Find the first record that differs between two runs, and say how far and why."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from liger_multi.dispatch.bitwise import MODES, promised
from liger_multi.errors import ConfigurationError, shown
from liger_multi.files.documents import plain
from liger_multi.files.page import Page, Paged
from liger_multi.files.pictures import ALARM, INK, LIGER, OURS, SOFT, STOCK, figure
from liger_multi.grouping import grouped
from liger_multi.testing.bisection import recorder as recording
from liger_multi.testing.bisection.recorder import (
    Digest,
    Distance,
    Key,
    Record,
    Taken,
    distance,
    relative,
)
from liger_multi.testing.bisection.sides import Loss, Recorded, Running, batch_of, side_of

# --- what is found: rows, the first difference, a table, a picture ---

EQUAL, DIFFERS, SHAPE, UNREAD = "equal", "differs", "other shape", "not compared"
ONLY_A, ONLY_B = "only in a", "only in b"
AROUND = 3  # rows before and after the first difference in the table
HEADER = ("call", "kind", "name", "direction", "shape", "dtype", "largest", "difference", "")


@dataclass(frozen=True)
class Row:
    """One record of both sides.

    Attributes:
        index: Its place in the run.
        kind: data, weight, operator, module, output, gradient, loss or parameter gradient.
        name: Name of the operator, module or tensor.
        direction: forward, backward or recompute.
        number: Number of the call among those of the same name.
        where: The module that runs an operator.
        shape: Shape of the first output that differs, else of the first output.
        dtype: Dtype of the same output.
        state: equal, differs, other shape, not compared, only in a, or only in b.
        inputs: State of its inputs; empty where it has none.
        difference: Estimated norm of the outputs' difference, relative to the norm of a's outputs.
        largest: The largest magnitude of that output in a and in b.
        norm: The norm of that output in a and in b.
        hashes: Hashes of the outputs of a and of b.
        backends: The backends that ran an operator for a and for b.
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
        module_text = f" in {self.where}" if self.where and self.kind == recording.OPERATOR else ""
        return f"{self.name} {self.direction} ({self.kind}, call {self.number}){module_text}"


@dataclass(frozen=True)
class Difference:
    """The first row that differs, measured in a second run.

    Attributes:
        row: The row.
        cause: computation (equal inputs, other outputs), between (something that is not recorded),
            shape, sequence, data or weights.
        reason: The cause in a sentence.
        distances: Distance of every tensor that differs.
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
        """Name of the operator, module or tensor."""
        return self.row.name

    @property
    def direction(self) -> str:
        """forward, backward or recompute."""
        return self.row.direction

    @property
    def kind(self) -> str:
        """Kind of the record."""
        return self.row.kind

    @property
    def ulps(self) -> float:
        """The largest distance of all tensors that differ."""
        return max((d.ulps for d in self.distances), default=0.0)


@dataclass(frozen=True)
class Bisection(Paged):
    """Two runs side by side.

    Attributes:
        a: The first configuration, in words.
        b: The second one.
        rows: The records of both, in the order of the first.
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

    def page(self) -> Page:
        """The first difference, the rows around it, and counts."""
        page = Page()
        entries = [("a", self.a), ("b", self.b)]
        if self.first is None:
            page.add("Result", [*entries, ("", "every record that was compared has equal bits")])
        else:
            page.add("Result", [*entries, *_in_words(self.first)])
            index = self.first.row.index
            neighbors = self.rows[max(0, index - AROUND) : index + AROUND + 1]
            page.add(
                "Calls around it", [_cells(row, row.index == index) for row in neighbors], HEADER
            )
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
        return plain(data)  # type: ignore[no-any-return]

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
    """Format a number of ulps."""
    return f"{value:,.0f}" if math.isfinite(value) else "NaN against a number"


def share(count: int, total: int) -> str:
    """Format a share, also in percent."""
    percent = 100 * count / total if total else 0
    return f"{count:,} of {total:,} ({percent:.3g} %)"


def _in_words(first: Difference) -> list[tuple[str, str]]:
    lines = [("first difference", str(first.row)), ("", first.reason)]
    for d in first.distances:
        text = f"at most {number_of(d.ulps)} ulp of {d.dtype} ({d.largest:.3g}); "
        text += f"{share(d.elements, d.of_elements)} elements, {share(d.rows, d.of_rows)} rows"
        lines.append((d.name or "values", text))
    backend_a, backend_b = first.row.backends
    if backend_a or backend_b:
        lines.append(
            (
                "backend",
                backend_a
                if backend_a == backend_b
                else f"a: {backend_a or '-'}, b: {backend_b or '-'}",
            )
        )
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
    differences = [r.difference for r in rows if 0 < r.difference < math.inf]
    lowest = 10 ** (math.floor(math.log10(min(differences))) - 1) if differences else 1e-9
    highest = 10 ** (math.ceil(math.log10(max(differences))) + 1) if differences else 1.0
    floor = lowest / 4

    def height(row: Row) -> float:
        return floor if row.difference <= 0 else min(row.difference, highest)

    with figure(path, 9.2, 4.6) as canvas:
        axis = canvas.subplots()
        axis.set_yscale("log")
        for direction, (color, marker) in _SIDES.items():
            for is_operator in (True, False):
                points = [
                    r
                    for r in rows
                    if r.direction == direction and is_operator == (r.kind == recording.OPERATOR)
                ]
                if points:
                    group = "operators" if is_operator else "modules and tensors"
                    axis.scatter(
                        [r.index for r in points],
                        [height(r) for r in points],
                        s=34 if is_operator else 9,
                        color=color,
                        marker=marker,
                        label=f"{direction}: {group}",
                        clip_on=False,
                        zorder=3,
                    )
        axis.axhline(lowest / 2, color=SOFT, lw=0.8, ls=(0, (3, 3)))
        axis.set_ylim(lowest / 8, highest)
        axis.annotate(
            "equal bits below",
            (0, lowest / 2),
            xycoords=("axes fraction", "data"),
            xytext=(4, 3),
            textcoords="offset points",
            fontsize=8,
            color=SOFT,
        )
        _mark_first(axis, bisection, height)
        axis.set_xlabel("records in order")
        axis.set_ylabel("relative difference (estimated)")
        axis.set_title(f"a: {_shortened(bisection.a)}\nb: {_shortened(bisection.b)}")
        canvas.legend(loc="outside lower center", ncols=3, fontsize=9)


def _mark_first(axis: Any, bisection: Bisection, height: Any) -> None:
    """Draw a ring around the first difference, with its name."""
    if bisection.first is None:
        return
    row = bisection.first.row
    point = (row.index, height(row))
    axis.scatter(*point, s=150, facecolors="none", edgecolors=ALARM, linewidths=2, zorder=4)
    axis.axvline(row.index, color=ALARM, lw=0.9)
    right = row.index < len(bisection.rows) * 0.6
    ulps = f"\n{number_of(bisection.first.ulps)} ulp" if bisection.first.distances else ""
    axis.annotate(
        f"first: {_shortened(row.name, 40)}\n{row.direction}{ulps}",
        (row.index, 0.98),
        xycoords=("data", "axes fraction"),
        xytext=(6 if right else -6, 0),
        textcoords="offset points",
        ha="left" if right else "right",
        va="top",
        color=INK,
        fontsize=9,
    )


def _shortened(text: str, limit: int = 90) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


Several = dict[Key, list[Record]]
Entries = list[tuple[int, Taken]]
"""One tensor in every run of a side, each with the number of sequences of that run."""


def bisect(
    model_a: nn.Module,
    model_b: nn.Module | None,
    batch: Any,
    *,
    a: Mapping[str, Any] | None = None,
    b: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    backward: bool = True,
    said: Callable[[str], None] | None = None,
) -> Bisection:
    """Run two configurations, and find the first record whose bits differ.

    Recorded are the inputs and outputs of every operator of this library, forward and backward, of
    every module, the gradients of modules' outputs, the model's outputs, the loss, and the
    gradients of parameters. A second run keeps the tensors of the first difference alone and
    measures it. With equal configurations this checks that a run is repeatable.

    Parameters, gradients, buffers, hooks, random states, modes and the configuration are afterwards
    what they were. No optimizer steps.

    Args:
        model_a: The model of the first run, in the mode it is to run in.
        model_b: That of the second run; ``model_a`` where None.
        batch: Keyword arguments as a mapping, positional ones as a tuple, or one tensor.
        a: The first configuration: what :func:`liger_multi.use` takes, ``chunk_bytes``,
            ``head_gemms``, ``split`` (sequences of the batch per run), ``compile`` (True or a
            backend of ``torch.compile``), ``checkpoint``, ``patch`` (patch the model for the run)
            and ``seed``.
        b: The second one.
        loss: From outputs and batch to a scalar; the losses of several runs are added. By default
            the model's own loss, or half the sum of squares of its first output.
        backward: Whether to compute gradients; False runs under ``no_grad``.
        said: Receives messages about progress.

    Shapes:
        Of the batch: tensors with sequences on the first axis are split by ``split``, others are
        passed whole.

    Dtypes:
        All. Bits are compared, so NaN equals NaN with the same bits, and -0 differs from 0.

    Memory:
        About 1 KiB per tensor of a call on its device until the end, and 70 MiB at most while it is
        read. The second run keeps the tensors of one call.

    Raises:
        ConfigurationError: A configuration, model or batch has the wrong form.
        RuntimeError: Another bisect records in this process.

    Source:
        ``liger_multi/testing/bisection``; ``docs/bisect.md`` says how it works.
    """
    if model_b is None:
        model_b = model_a
    for name, model in (("model_a", model_a), ("model_b", model_b)):
        if not isinstance(model, nn.Module):
            raise ConfigurationError(f"{name} must be a torch.nn.Module, got {shown(model)}")
    sides = side_of("a", a or {}), side_of("b", b or {})
    full_batch = batch_of(batch)
    split = any(0 < side.split < full_batch.rows for side in sides)
    said = said or (lambda text: None)
    a_run, b_run = (
        Running(side, model, full_batch, loss, backward, split, said)
        for side, model in zip(sides, (model_a, model_b), strict=True)
    )
    return _Comparison(a_run, b_run).result()


# --- records of two sides, together ---


class _Comparison:
    """Compares the records of two sides that have run."""

    def __init__(self, a_run: Running, b_run: Running) -> None:
        self.one, self.other = a_run, b_run
        self.recorded = a_run.record(), b_run.record()
        first, second = map(_by_key, self.recorded)
        if a_run.side.checkpoint != b_run.side.checkpoint:
            first, second = _without_recompute(first), _without_recompute(second)
        self.pairs = list(_aligned(first, second))
        self.rows = [self._row(i, x, y) for i, (x, y) in enumerate(self.pairs)]

    @property
    def per_sequence(self) -> bool:
        """Whether tensors are compared sequence by sequence."""
        return self.one.per_sequence

    @property
    def same_calls(self) -> bool:
        """Whether both sides should make the same calls in the same order."""
        a, b = self.one, self.other
        settings = ("compile", "checkpoint", "patch")
        kinds = [[(name, type(m)) for name, m in s.model.named_modules()] for s in (a, b)]
        return kinds[0] == kinds[1] and all(
            getattr(a.side, n) == getattr(b.side, n) for n in settings
        )

    def result(self) -> Bisection:
        """The rows and the first of them that differs."""
        first = next((row for row in self.rows if self._is_finding(row)), None)
        difference = None if first is None else self._difference(first)
        return Bisection(
            str(self.one.side),
            str(self.other.side),
            tuple(self.rows),
            difference,
            tuple(self._notes()),
        )

    def _is_finding(self, row: Row) -> bool:
        if row.state in (ONLY_A, ONLY_B):
            return self.same_calls
        return row.state in (DIFFERS, SHAPE) or row.inputs in (DIFFERS, SHAPE)

    # --- rows ---

    def _entries(self, records: list[Record], side: int, side_of_call: str, name: str) -> Entries:
        rows = self.recorded[side].rows
        sizes = rows if len(records) == len(rows) else [1] * len(records)
        entries = [getattr(record, side_of_call).get(name) for record in records]
        return [(n, entry) for n, entry in zip(sizes, entries, strict=True) if entry is not None]

    def _compare(
        self, x: list[Record], y: list[Record], side_of_call: str
    ) -> tuple[dict[str, str], dict[str, float]]:
        """Compare every tensor that both sides have: its state and estimated difference."""
        states, differences = {}, {}
        is_in_model = x[0].key.kind not in _WHOLE
        for name in getattr(x[0], side_of_call):
            if name not in getattr(y[0], side_of_call):
                continue
            a_entries, b_entries = (
                self._entries(r, i, side_of_call, name) for i, r in enumerate((x, y))
            )
            if self.per_sequence and is_in_model:
                state, difference = _per_sequence(a_entries, b_entries, side_of_call == "inputs")
            else:
                state, difference = _compare_whole(a_entries[0][1], b_entries[0][1])
            states[name], differences[name] = state, difference
        return states, differences

    def _row(self, index: int, x: list[Record], y: list[Record]) -> Row:
        records = x or y
        record = records[0]
        key = record.key
        row = Row(index, key.kind, key.name, key.direction, key.number, record.where)
        if not x or not y:
            output = next(iter(record.outputs.values()), None)
            return replace(_described(row, output), state=ONLY_B if y else ONLY_A)
        states, differences = self._compare(x, y, "outputs")
        inputs, _ = self._compare(x, y, "inputs")
        worst = _worst(states)
        name = next((n for n, s in states.items() if s == worst), "")
        return replace(
            _described(row, record.outputs.get(name)),
            where=record.where or y[0].where,
            state=worst or UNREAD,
            inputs=_worst(inputs),
            difference=max((d for d in differences.values()), default=0.0),
            largest=_statistic(x, y, name, lambda d: d.largest),
            norm=_statistic(x, y, name, lambda d: d.norm),
            hashes={n: (_hashes(x, n), _hashes(y, n)) for n in record.outputs},
            backends=(record.backend, y[0].backend),
            differing=tuple(
                n for side in (inputs, states) for n, s in side.items() if s in (DIFFERS, SHAPE)
            ),
        )

    # --- the first difference ---

    def _difference(self, row: Row) -> Difference:
        x, y = self.pairs[row.index]
        if row.state in (ONLY_A, ONLY_B):
            runs, lacks = ("a", "b") if row.state == ONLY_A else ("b", "a")
            return Difference(row, "sequence", f"{runs} makes this call, {lacks} does not")
        if SHAPE in (row.state, row.inputs):
            return Difference(row, "shape", _shapes(x[0], y[0], self.per_sequence))
        cause, reason = self._cause(row)
        distances, repeatable = self._measured(row)
        if not repeatable:
            reason += (
                "; the second run gave other bits than the first on the same side, so the run "
                "itself is not repeatable"
            )
        broken, promise = self._promise(x[0], y[0], row, {d.name for d in distances})
        if cause != "computation":
            broken, promise = (), ""
        arguments = [
            f"{n}={v} in a, {y[0].arguments[n]} in b"
            for n, v in x[0].arguments.items()
            if y[0].arguments.get(n, v) != v
        ]
        if arguments:
            reason += f"; other arguments: {', '.join(arguments)}"
        return Difference(row, cause, reason, distances, repeatable, promise, broken)

    def _cause(self, row: Row) -> tuple[str, str]:
        names = ", ".join(name for name in row.differing if name)
        if row.kind == recording.DATA:
            return "data", "the batches differ"
        if row.kind == recording.WEIGHT:
            return "weights", "the models start with other weights or buffers"
        if row.state == DIFFERS and row.inputs == EQUAL:
            change = f"returns another {names}" if names else "returns other values"
            return "computation", f"it gets equal inputs and {change}"
        run_text = self._since(row)
        if row.kind in (recording.LOSS, recording.PARAMETER) and self.per_sequence:
            return "between", (
                "all sequences agree and their sum over rows and runs differs: it is added in "
                "another order"
            )
        if row.inputs in (DIFFERS, SHAPE):
            return "between", (
                f"it gets another {names or 'input'}, and all records before agree: the cause is "
                f"what is not recorded on both sides{run_text}"
            )
        return "between", (
            f"all records before agree: the cause is what is not recorded on both sides{run_text}"
        )

    def _since(self, row: Row) -> str:
        """Where unrecorded code ran: after the last record that agrees."""
        earlier = self.rows[: row.index]
        last = next((r for r in reversed(earlier) if r.state == EQUAL), None)
        between = earlier[last.index + 1 :] if last is not None else earlier
        lone = [
            f"{r.name} {r.direction} ({r.state})"
            for r in between
            if r.kind == recording.OPERATOR and r.state in (ONLY_A, ONLY_B)
        ]
        text = f" after {last}" if last is not None else ""
        return text + (f"; there ran {', '.join(dict.fromkeys(lone))}" if lone else "")

    def _measured(self, row: Row) -> tuple[tuple[Distance, ...], bool]:
        """Distances of the tensors that differ in a second run, and whether it repeats the first.

        Equal bits on both sides now are a run that is not repeatable, too.
        """
        x, y = self.pairs[row.index]
        second_runs = [
            running.record(records[0].key)
            for running, records in zip((self.one, self.other), (x, y), strict=True)
        ]
        states = all(
            _same_bits(first_run, second_run, x[0].key)
            for first_run, second_run in zip(self.recorded, second_runs, strict=True)
        )
        distances = []
        for name in dict.fromkeys(row.differing):
            for side_of_call in ("inputs", "outputs"):
                a_tensor, b_tensor = (
                    _kept_tensor(side, (side_of_call, name), x[0]) for side in second_runs
                )
                if a_tensor is None or b_tensor is None:
                    continue
                if a_tensor.shape == b_tensor.shape and a_tensor.dtype == b_tensor.dtype:
                    measured = distance(name, a_tensor, b_tensor)
                    distances += [measured] if measured.elements else []
        return tuple(distances), states and bool(distances)

    def _promise(
        self, x: Record, y: Record, row: Row, differ: set[str]
    ) -> tuple[tuple[str, ...], str]:
        """Names of broken promises, and a sentence on them."""
        a, b = self.one.side, self.other.side
        if x.prim is None:
            return (), ""
        if x.backend != y.backend:
            return (), "none: no operator promises equal bits of two backends"
        if x.mode != y.mode:
            return (), "none: the sides have other settings of deterministic"
        if a.compile != b.compile:
            return (), "none: compiled code may round in another way"
        promised_names = [
            name
            for name, differs in (
                ("rows", a.split != b.split),
                ("chunk", a.process != b.process),
                ("recompute", a.checkpoint != b.checkpoint),
            )
            if differs
        ] or ["repeat"]
        promises = promised(x.backend, x.prim)
        subject = f"{row.name} {x.prim.direction} of {x.backend}"
        setting = f"deterministic={x.mode!r}" if x.mode else "the default setting"
        for name in promised_names:
            if name not in promises.under(x.mode):
                earliest = promises.since(name)
                added_by = (
                    "" if earliest is None else f"; deterministic={_SETTING[earliest]} adds it"
                )
                reason = promises.because.get(name)
                reason_text = f" ({reason})" if reason else ""
                refused = f"none: {subject} does not promise {name!r} under {setting}"
                return (), f"{refused}{reason_text}{added_by}"
        per_row = {"rows", "chunk"} & {*promised_names}
        if per_row and not any(x.prim.op.bitwise.axis(n) is not None for n in differ):
            return (
                (),
                f"none: {promised_names[0]!r} is a promise on rows, and this is a sum over them",
            )
        return tuple(
            promised_names
        ), f"broken: {subject} promises {', '.join(map(repr, promised_names))}"

    def _notes(self) -> Iterator[str]:
        a, b = self.one, self.other
        if a.compiles or b.compiles:
            yield (
                "a compiled model records operators that stay one call in its graph, outputs, loss "
                "and parameter gradients; modules and operators that the compiler traces are "
                "not recorded"
            )
        if self.per_sequence:
            yield (
                "records are compared per sequence; sums over rows are compared as gradients of "
                "parameters, after all runs"
            )
        if a.side.checkpoint != b.side.checkpoint:
            yield "calls that run again in backward are left out, as only one side has them"
        lone = sum(row.state in (ONLY_A, ONLY_B) for row in self.rows)
        if lone and not self.same_calls:
            yield f"{lone} records are on one side only, as the sides run other code"


_WHOLE = (recording.DATA, recording.WEIGHT, recording.LOSS, recording.PARAMETER)
_SETTING = {"": "False", "deterministic": "True", "rows": "'rows'"}
assert set(_SETTING) == set(MODES)


# --- pairs of records ---


def _by_key(recorded: Recorded) -> Several:
    """The records of a side, of all runs together, in the order of the first run."""
    records = grouped(
        (record.key, record) for recorder in recorded.recorders for record in recorder.records
    )
    runs = len(recorded.runs)
    keys_of_run = {r.key for r in recorded.runs[0].records}
    return {k: v for k, v in records.items() if k not in keys_of_run or len(v) == runs}


def _without_recompute(records: Several) -> Several:
    return {k: v for k, v in records.items() if k.direction != recording.RECOMPUTE}


def _aligned(x: Several, y: Several) -> Iterator[tuple[list[Record], list[Record]]]:
    """Records of both sides by key, in the order of the first; those of one side where they ran.

    Where one side calls an operator or module more often, which calls belong together is unknown,
    so that all of them stay apart.
    """
    counts = [Counter(key[:3] for key in records) for records in (x, y)]

    def may_match(key: Key) -> bool:
        calls = [key[:3]]
        if key.kind == recording.GRADIENT:
            calls.append((recording.MODULE, x[key][0].where, recording.FORWARD))
        return all(counts[0][c] == counts[1][c] for c in calls)

    common = {key for key in x if key in y and may_match(key)}
    b_only: dict[Key | None, list[Key]] = {}
    last: Key | None = None
    for key in y:
        if key in common:
            last = key
        else:
            b_only.setdefault(last, []).append(key)
    yield from (([], y[key]) for key in b_only.get(None, ()))
    for key in x:
        yield x[key], y[key] if key in common else []
        yield from (([], y[b_key]) for b_key in b_only.get(key, ()) if key in common)


# --- pairs of tensors ---


def _compare_whole(a: Taken, b: Taken) -> tuple[str, float]:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return SHAPE, 0.0
    if a.whole is None or b.whole is None:
        return UNREAD, 0.0
    return _state([a.whole], [b.whole])


def _state(a_digests: Sequence[Digest], b_digests: Sequence[Digest]) -> tuple[str, float]:
    if [d.hash for d in a_digests] == [d.hash for d in b_digests]:
        return EQUAL, 0.0
    return DIFFERS, relative(a_digests, b_digests)


def _per_sequence(a_entries: Entries, b_entries: Entries, is_input: bool) -> tuple[str, float]:
    """Compare the sequences of all runs in order; whole tensors where they have none."""
    entries = [*a_entries, *b_entries]
    parts = [_sequences(side) for side in (a_entries, b_entries)]
    if _scales(entries) and len({entry.dtype for _, entry in entries}) > 1:
        return SHAPE, 0.0
    if _scales(entries) and parts[0] and len(parts[0]) == len(parts[1]):
        return _state(*parts)
    wholes = [entry.whole for _, entry in entries]
    same_shape = len({entry.shape for _, entry in entries}) == 1
    if is_input and same_shape and wholes[0] and len({d.hash if d else 0 for d in wholes}) == 1:
        return EQUAL, 0.0
    return UNREAD, 0.0  # a sum over rows


def _sequences(entries: Entries) -> list[Digest]:
    return [d for n, t in entries for d in (t.parts if n > 1 or t.parts else [t.whole]) if d]


def _scales(entries: Entries) -> bool:
    """Whether the axis of sequences has the expected length in all runs."""
    lengths = set()
    for rows, entry in entries:
        if len(entry.shape) <= entry.axis or entry.shape[entry.axis] % rows:
            return False
        shape = list(entry.shape)
        shape[entry.axis] //= rows
        lengths.add(tuple(shape))
    return len(lengths) == 1


def _worst(states: Mapping[str, str]) -> str:
    """The combined state of several tensors; empty for none."""
    for state in (SHAPE, DIFFERS):
        if state in states.values():
            return state
    if not states:
        return ""
    return EQUAL if EQUAL in states.values() else UNREAD


def _described(row: Row, output: Taken | None) -> Row:
    if output is None:
        return row
    return replace(row, shape=output.shape, dtype=str(output.dtype).removeprefix("torch."))


def _statistic(
    x: list[Record], y: list[Record], name: str, statistic: Callable[[Digest], float]
) -> tuple[float, ...]:
    largest = []
    for records in (x, y):
        outputs = [r.outputs.get(name) for r in records]
        values = [statistic(t.whole) for t in outputs if t is not None and t.whole is not None]
        largest += [max(values)] if values else []
    return tuple(largest)


def _hashes(records: list[Record], name: str) -> str:
    outputs = [r.outputs.get(name) for r in records]
    return " ".join(
        f"{t.whole.hash:016x}" for t in outputs if t is not None and t.whole is not None
    )


def _same_bits(first: Recorded, second: Recorded, key: Key) -> bool:
    """Whether a record has the same bits in two runs of one side."""
    sides = []
    for recorded in (first, second):
        records = [r for recorder in recorded.recorders for r in recorder.records if r.key == key]
        sides.append(
            [
                (name, None if t.whole is None else t.whole.hash)
                for r in records
                for entries in (r.inputs, r.outputs)
                for name, t in entries.items()
            ]
        )
    return sides[0] == sides[1]


def _kept_tensor(
    recorded: Recorded, side_and_name: tuple[str, str], record: Record
) -> Tensor | None:
    """A kept tensor, joined over all runs in order."""
    parts = [r.kept[side_and_name] for r in recorded.recorders if side_and_name in r.kept]
    if not parts or len(parts) == 1:
        return parts[0] if parts else None
    return torch.cat(parts, getattr(record, side_and_name[0])[side_and_name[1]].axis)


def _shapes(x: Record, y: Record, per_sequence: bool) -> str:
    for side_of_call in ("inputs", "outputs"):
        for name, a_entry in getattr(x, side_of_call).items():
            b_entry = getattr(y, side_of_call).get(name)
            if b_entry is None:
                continue
            if a_entry.dtype != b_entry.dtype or (
                a_entry.shape != b_entry.shape and not per_sequence
            ):
                text = f"{side_of_call.removesuffix('s')} {name}".rstrip()
                a, b = (f"{entry.shape} {entry.dtype}" for entry in (a_entry, b_entry))
                return f"{text} is {a} in a, {b} in b"
    return "shapes or dtypes differ"
