"""What a recorded step held, over time and at its peak: as data, as tables, and as a picture."""

from __future__ import annotations

import bisect
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from liger_multi._torch_private import memory_history
from liger_multi.errors import ConfigurationError, shown
from liger_multi.files.documents import read_json
from liger_multi.files.page import Page, Paged
from liger_multi.files.pictures import INK, PARTS, figure
from liger_multi.grouping import grouped
from liger_multi.memory.measure import format_bytes, resolve_device
from liger_multi.memory.recorder import (
    CATEGORIES,
    FORWARD,
    OTHER,
    SAVED,
    TEMPORARY,
    Block,
    Recorder,
)

# --- data ---

POINTS = 600  # of a timeline; between two of them the highest moment is kept
LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass
class Holder:
    """Blocks of one origin that were alive at the peak.

    Attributes:
        category: Their category.
        kind: Class of the module that they belong to.
        module: Its path; numbers of layers are stars.
        op: Operator that allocated them.
        phase: Phase in which they were allocated.
        bytes: Their total size.
        count: Number of blocks.
    """

    category: str
    kind: str
    module: str
    op: str
    phase: str
    bytes: int = 0
    count: int = 0


@dataclass
class Profile(Paged):
    """Memory of one step.

    Attributes:
        title: What ran.
        device: Where.
        method: How it was recorded: ``"live tensors"``, ``"allocator history"`` or ``"shapes"``.
        peak_bytes: Largest number of bytes alive at once.
        peak_phase: When that was.
        peak_module: Module that was running then.
        peak_op: Operator that was running then.
        at_peak: Bytes by category at that moment.
        largest: Each category's own largest bytes, whenever that was.
        holders: What was alive at the peak, by origin, largest first.
        saved: What forward kept for backward when it held most, by origin, largest first.
        timeline: Bytes of every category, in the order of :data:`CATEGORIES`, over time.
        phases: Place in the timeline and name of every phase.
        allocator: Of an accelerator: ``allocated``, ``reserved`` and ``fragmentation`` bytes (the
            part of the reserved memory that was in no block at the reserved peak), and ``hidden``
            bytes at the peak that belong to no recorded tensor.
    """

    title: str
    device: str
    method: str
    peak_bytes: int = 0
    peak_phase: str = ""
    peak_module: str = ""
    peak_op: str = ""
    at_peak: dict[str, int] = field(default_factory=dict)
    largest: dict[str, int] = field(default_factory=dict)
    holders: list[Holder] = field(default_factory=list)
    saved: list[Holder] = field(default_factory=list)
    timeline: list[list[int]] = field(default_factory=list)
    phases: list[tuple[int, str]] = field(default_factory=list)
    allocator: dict[str, int] = field(default_factory=dict)

    def by(self, *keys: str, saved: bool = False) -> dict[tuple[str, ...], int]:
        """Bytes at the peak summed by attributes of :class:`Holder`, largest first.

        Args:
            *keys: ``"category"``, ``"kind"``, ``"module"``, ``"op"``, ``"phase"``.
            saved: Of what forward kept for backward instead.
        """
        attributes = ("category", "kind", "module", "op", "phase")
        if not keys or set(keys) - set(attributes):
            raise ValueError(f"by wants some of {', '.join(attributes)}, got {keys}")
        sums: dict[tuple[str, ...], int] = {}
        for holder in self.saved if saved else self.holders:
            key = tuple(getattr(holder, k) for k in keys)
            sums[key] = sums.get(key, 0) + holder.bytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def as_data(self) -> dict[str, Any]:
        """The profile as plain data."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Profile:
        """A profile from :meth:`as_data`, or from JSON of it."""
        rows = {name: [Holder(**row) for row in data[name]] for name in ("holders", "saved")}
        phases = [(event, name) for event, name in data["phases"]]
        return cls(**{**data, **rows, "phases": phases})

    def save(self, path: str | Path) -> None:
        """Write JSON."""
        Path(path).write_text(json.dumps(self.as_data(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read what :meth:`save` wrote.

        Raises:
            ConfigurationError: The file cannot be read or holds something else.
        """
        data = read_json(path, "the profile")
        try:
            return cls.from_data(data)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"{str(path)!r} is no profile of this version, got {shown(data)}"
            ) from error

    def draw(self, path: str | Path) -> None:
        """Write a PNG of the timeline (needs matplotlib)."""
        draw_timelines([self], Path(path))

    def page(self) -> Page:
        """One step: what was held at the peak, and what forward kept."""
        page, peak = Page(), self.peak_bytes
        location = " in ".join(part for part in (self.peak_op, self.peak_module) if part)
        facts = [
            ("peak", format_bytes(peak)),
            ("reached", f"{self.peak_phase}: {location}" if location else self.peak_phase),
            ("seen by", f"{self.method} on {self.device}"),
        ]
        facts += [(name, format_bytes(size)) for name, size in self.allocator.items()]
        page.add(f"Memory of {self.title}", facts)
        rows = [
            (name, format_bytes(size), percent(size, peak), format_bytes(self.largest[name]))
            for name, size in self.at_peak.items()
            if size or self.largest[name]
        ]
        page.add("By category", rows, ("category", "at the peak", "share", "own largest"))
        _origins(page, self, peak)
        return page


@dataclass
class Comparison(Paged):
    """Two profiles in one table, as ``stock`` and ``patched``."""

    first: Profile
    second: Profile

    @property
    def saved_bytes(self) -> int:
        """How much lower the second peak is."""
        return self.first.peak_bytes - self.second.peak_bytes

    def draw(self, path: str | Path) -> None:
        """Write a PNG with both timelines on one scale (needs matplotlib)."""
        draw_timelines([self.first, self.second], Path(path))

    def page(self) -> Page:
        """Two steps in one table."""
        page = Page()
        a, b = self.first, self.second

        def row(name: str, x: int, y: int) -> Sequence[str]:
            ratio = f"{y / x:.2f}" if x else "-"
            return name, format_bytes(x), format_bytes(y), format_bytes(y - x), ratio

        rows = [row("peak", a.peak_bytes, b.peak_bytes)]
        rows += [
            row(f"  {name}", a.at_peak.get(name, 0), b.at_peak.get(name, 0)) for name in CATEGORIES
        ]
        saved = [sum(p.by("kind", saved=True).values()) for p in (a, b)]
        rows.append(row("kept by forward", *saved))
        for key in dict.fromkeys(k for p in (a, b) for k in p.by("kind", saved=True)):
            sizes = [p.by("kind", saved=True).get(key, 0) for p in (a, b)]
            rows.append(row(f"  {key[0] or '-'}", *sizes))
        header = ("", a.title, b.title, "difference", "ratio")
        page.add("Peak memory and where it goes", rows, header)
        return page


def summarize(
    profile: Profile,
    blocks: Sequence[Block],
    events: Sequence[tuple[int, int]],
    phases: Sequence[tuple[int, str]],
    scale: Mapping[str, float] | None = None,
) -> Profile:
    """Fill ``profile`` from a record.

    Args:
        profile: With title, device and method.
        blocks: Every recorded block.
        events: ``(block, bytes)`` in order.
        phases: ``(event, phase)``.
        scale: Factor on the bytes of a category, where only a share of it is on this device.
    """
    index_of = {name: i for i, name in enumerate(CATEGORIES)}
    factors = [(scale or {}).get(name, 1.0) for name in CATEGORIES]
    category = [index_of[block.category] for block in blocks]
    live, totals = [0] * len(CATEGORIES), []
    best, peak_at, kept_at, kept_most = -1.0, -1, -1, -1
    largest = [0] * len(CATEGORIES)
    in_forward = _phase_of(phases)
    for event, (index, change) in enumerate(events):
        category_index = category[index]
        live[category_index] += change
        largest[category_index] = max(largest[category_index], live[category_index])
        total = sum(n * f for n, f in zip(live, factors, strict=True))
        totals.append((total, tuple(live)))
        if total > best:
            best, peak_at = total, event
        if live[index_of[SAVED]] > kept_most and in_forward(event) == FORWARD:
            kept_most, kept_at = live[index_of[SAVED]], event
    if peak_at < 0:
        return profile

    def share(values: Sequence[int]) -> list[int]:
        return [round(n * f) for n, f in zip(values, factors, strict=True)]

    profile.at_peak = dict(zip(CATEGORIES, share(totals[peak_at][1]), strict=True))
    profile.peak_bytes = sum(profile.at_peak.values())
    profile.largest = dict(zip(CATEGORIES, share(largest), strict=True))
    last = blocks[events[peak_at][0]]
    profile.peak_phase = in_forward(peak_at)
    profile.peak_module, profile.peak_op = last.module, last.op
    alive = _alive(events, peak_at)
    profile.holders = _holders(blocks, alive, dict(zip(CATEGORIES, factors, strict=True)))
    saved = {i: n for i, n in _alive(events, kept_at).items() if blocks[i].category == SAVED}
    profile.saved = _holders(blocks, saved, {SAVED: 1.0})
    # all that stood there before the first phase is one moment
    begin = max(0, phases[0][0] - 1) if phases else 0
    step = max(1, -(-(len(totals) - begin) // POINTS))
    for start in range(begin, len(totals), step):
        moment = max(totals[start : start + step], key=lambda pair: pair[0])
        profile.timeline.append(share(moment[1]))
    last_point = len(profile.timeline) - 1
    profile.phases = [(min((event - begin) // step, last_point), name) for event, name in phases]
    return profile


def _phase_of(phases: Sequence[tuple[int, str]]) -> Any:
    starts = [start for start, _ in phases]

    def phase(event: int) -> str:
        index = bisect.bisect_right(starts, event) - 1
        return phases[index][1] if index >= 0 else ""

    return phase


def _alive(events: Sequence[tuple[int, int]], last_event: int) -> dict[int, int]:
    """Bytes of every block after ``last_event``."""
    alive: dict[int, int] = {}
    for index, change in events[: last_event + 1]:
        alive[index] = alive.get(index, 0) + change
    return {index: size for index, size in alive.items() if size}


def _holders(
    blocks: Sequence[Block], alive: Mapping[int, int], factors: Mapping[str, float]
) -> list[Holder]:
    holders: dict[tuple[str, ...], Holder] = {}
    for index, size in alive.items():
        block = blocks[index]
        category = block.category
        key = (category, block.module_class, LAYER.sub("*", block.module), block.op, block.phase)
        holder = holders.setdefault(key, Holder(*key))
        holder.bytes += round(size * factors.get(category, 1.0))
        holder.count += 1
    return sorted(holders.values(), key=lambda holder: -holder.bytes)


# --- pages of tables ---

ROWS = 10  # of a list of origins


def percent(part: int, total: int) -> str:
    """A part of a total."""
    return f"{100 * part / total:.0f} %" if total else "-"


def _origins(page: Page, profile: Profile, peak: int) -> None:
    at_peak = list(profile.by("category", "kind", "op").items())
    page.add(
        "Held at the peak by",
        [
            (category, module_class or "-", op or "-", format_bytes(size), percent(size, peak))
            for (category, module_class, op), size in at_peak[:ROWS]
        ],
        ("category", "module", "operator", "bytes", "share"),
    )
    saved = list(profile.by("kind", "op", saved=True).items())
    total = sum(size for _, size in saved)
    page.add(
        "Kept by forward for backward",
        [
            (module_class or "-", op or "-", format_bytes(size), percent(size, total))
            for (module_class, op), size in saved[:ROWS]
        ],
        ("module", "operator", "bytes", "share"),
    )


# --- timelines ---

UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def draw_timelines(profiles: Sequence[Profile], path: Path, plotted: str = "") -> None:
    """Stacked bytes by category over a step, one panel per profile, all on one scale."""
    top = max(max(map(sum, p.timeline), default=0) for p in profiles)
    unit, name = next(((u, n) for u, n in UNITS if top >= u), (1, "B"))
    with figure(path, 9.2, 1.0 + 3.1 * len(profiles), plotted) as canvas:
        axes = canvas.subplots(len(profiles), 1, squeeze=False, sharey=True)[:, 0]
        for axis, profile in zip(axes, profiles, strict=True):
            _timeline(axis, profile, unit)
            axis.set_ylabel(name)
            axis.set_ylim(0, 1.18 * top / unit)
        handles, labels = axes[0].get_legend_handles_labels()
        canvas.legend(handles, labels, loc="outside lower center", ncols=4)


def _timeline(axis: Any, profile: Profile, unit: int) -> None:
    steps = range(len(profile.timeline))
    columns = [[row[i] / unit for row in profile.timeline] for i in range(len(CATEGORIES))]
    axis.stackplot(steps, columns, labels=CATEGORIES, colors=PARTS, lw=0)
    axis.grid(axis="x", visible=False)
    axis.set_xlim(0, max(1, len(profile.timeline) - 1))
    axis.set_xticks([])
    axis.set_xlabel("allocations in order")
    totals = [sum(row) for row in profile.timeline]
    best = max(steps, key=totals.__getitem__)
    axis.plot([best], [totals[best] / unit], marker="o", color=INK, ms=5, clip_on=False)
    axis.set_title(
        f"{profile.title}: peak {format_bytes(profile.peak_bytes)} in {profile.peak_phase}"
    )
    for event, name in profile.phases:
        axis.axvline(event, color=INK, lw=0.8, ls=(0, (3, 3)))
        axis.annotate(
            f" {name}", (event, 1), xycoords=("data", "axes fraction"), va="top", fontsize=9
        )


# --- record a real step ---

# On an accelerator the history of the allocator is joined with a recorder's blocks. The allocator
# knows every block, also those inside native kernels, and nothing about models; a recorder knows
# modules and operators. A storage belongs to the block that stood at its address when it was
# first recorded.

MOST_ENTRIES = 2_000_000  # of an allocator's history


def profile(
    step_fn: Callable[[], Any],
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
    vocabulary: int | None = None,
    warm: int = 1,
    title: str = "a step",
) -> Profile:
    """Run a training step and report what its memory was spent on, when, and by which operators.

    On an accelerator whose PyTorch keeps a history of its allocator, every block is counted, also
    those inside native kernels; elsewhere all storages that operators touch. Operators cost some
    microseconds more while they are recorded, and gradients that meet are added out of place.

    Args:
        step_fn: Forward, backward and, if it belongs to the step, the optimizer's step.
        model: Gives parameters and modules their names.
        optimizer: Tells its states apart from other tensors.
        device: The device to watch; None takes that of the model, else the current accelerator or
            the CPU.
        vocabulary: Tensors with a last axis of this length are logits; None asks the model's
            configuration.
        warm: Steps that run before, unrecorded: the first step has no optimizer states yet.
        title: What the profile is of.

    Raises:
        ValueError: ``warm`` is negative.
    """
    if warm < 0:
        raise ValueError(f"warm must be a number of steps, 0 or more, got {warm!r}")
    target = _device(device, model)
    vocabulary = vocabulary or _vocabulary(model)
    for _ in range(warm):
        step_fn()
    recorder = Recorder(target.type, model, optimizer, vocabulary)
    with _history(target) as history, recorder.recording():
        step_fn()
    if not history:
        report = Profile(title, str(target), "live tensors")
        return summarize(report, recorder.blocks, recorder.events, recorder.phases)
    phases = [(m, name) for m, (_, name) in zip(recorder.moments, recorder.phases, strict=True)]
    record = join(history["entries"], recorder.blocks, phases, *history["start"])
    report = Profile(title, str(target), "allocator history", allocator=record.facts)
    return summarize(report, record.blocks, record.events, record.phases)


def compare(first: Profile, second: Profile) -> Comparison:
    """Compare two profiles, such as unpatched and patched."""
    return Comparison(first, second)


def _device(device: torch.device | str | None, model: nn.Module | None) -> torch.device:
    if device is None and model is not None:
        parameter = next(model.parameters(), None)
        if parameter is not None:
            return parameter.device
    return resolve_device(device)


def _vocabulary(model: Any) -> int | None:
    config = getattr(model, "config", None)
    return getattr(getattr(config, "get_text_config", lambda: config)(), "vocab_size", None)


@contextlib.contextmanager
def _history(device: torch.device) -> Iterator[dict[str, Any]]:
    """Record what the device's allocator does; the dictionary is filled when the block ends.

    It stays empty where there is no such record.
    """
    captured: dict[str, Any] = {}
    module = None if device.type == "cpu" else torch.get_device_module(device.type)
    memory: Any = getattr(module, "memory", None)
    history = memory_history(memory)
    if module is None or history is None:
        yield captured
        return
    record, snapshot = history
    index = module.current_device() if device.index is None else device.index
    module.synchronize(index)
    start = (module.memory_allocated(index), module.memory_reserved(index))
    record(enabled="all", context=None, max_entries=MOST_ENTRIES)
    try:
        yield captured
        module.synchronize(index)
        captured.update(entries=snapshot()["device_traces"][index], start=start)
    finally:
        record(enabled=None)


# --- the allocator's history ---

OLDER, HIDDEN = "older than the step", "inside a kernel"


@dataclass
class JoinedRecord:
    """Blocks, events and phases as :func:`liger_multi.memory.breakdown.summarize` takes them."""

    blocks: list[Block] = field(default_factory=list)
    events: list[tuple[int, int]] = field(default_factory=list)
    phases: list[tuple[int, str]] = field(default_factory=list)
    facts: dict[str, int] = field(default_factory=dict)


def join(
    entries: Sequence[Mapping[str, Any]],
    recorded: Sequence[Block],
    phases: Sequence[tuple[float, str]],
    allocated: int,
    reserved: int,
) -> JoinedRecord:
    """Allocator events with the modules and operators of a recorder.

    Args:
        entries: Of the device's trace in a snapshot: ``action``, ``addr``, ``size``, ``time_us``.
        recorded: Blocks of the recorder, with address and time.
        phases: ``(time in microseconds, phase)``.
        allocated: Bytes allocated when the history began.
        reserved: Bytes reserved then.
    """
    record = JoinedRecord()
    owners = _owners(entries, [b for b in recorded if b.phase])
    at_start: dict[int, int] = {}
    for block in recorded:
        if not block.phase:
            at_start[block.address] = _open(record, block, block.size)
    untracked = max(0, allocated - sum(b.size for b in record.blocks))
    older = _open(record, Block(untracked, role=OTHER, op=OLDER), untracked)
    live: dict[int, tuple[int, int]] = {}
    allocated_now, names = allocated, iter(phases)
    next_phase = next(names, None)
    best, highest_reserved = -1, reserved
    for entry_index, entry in enumerate(entries):
        action, address, size = entry["action"], entry.get("addr", 0), entry.get("size", 0)
        while next_phase is not None and entry.get("time_us", 0) >= next_phase[0]:
            record.phases.append((len(record.events), next_phase[1]))
            next_phase = next(names, None)
        if action == "alloc":
            phase = record.phases[-1][1] if record.phases else ""
            block = owners.get(entry_index) or Block(size, phase, op=HIDDEN, role=TEMPORARY)
            live[address] = (_open(record, block, size), size)
            allocated_now += size
        elif action == "free_requested":
            index, size = live.pop(address, (at_start.pop(address, older), size))
            record.events.append((index, -size))
            allocated_now -= size
        elif action == "segment_alloc":
            reserved += size
        elif action == "segment_free":
            reserved -= size
        highest_reserved = max(highest_reserved, reserved)
        if allocated_now > best:
            best = allocated_now
            record.facts = {
                "allocated": allocated_now,
                "reserved": reserved,
                "fragmentation": reserved - allocated_now,
            }
            record.facts["hidden"] = sum(
                size for i, size in live.values() if record.blocks[i].op == HIDDEN
            )
    record.facts["largest reserved"] = highest_reserved
    return record


def _open(record: JoinedRecord, block: Block, size: int) -> int:
    record.blocks.append(block)
    record.events.append((len(record.blocks) - 1, size))
    return len(record.blocks) - 1


def _owners(entries: Sequence[Mapping[str, Any]], recorded: Sequence[Block]) -> dict[int, Block]:
    """The recorder's block of an entry: the first one at its address before the next entry."""
    allocations = grouped((e["addr"], i) for i, e in enumerate(entries) if e["action"] == "alloc")
    times = {
        a: [entries[p].get("time_us", 0) for p in numbers] for a, numbers in allocations.items()
    }
    owners: dict[int, Block] = {}
    for block in recorded:
        position = bisect.bisect_right(times.get(block.address, []), block.time) - 1
        if position >= 0:
            owners.setdefault(allocations[block.address][position], block)
    return owners
