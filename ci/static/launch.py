"""Launch tables of a static model, for cards that nobody has measured on yet.

``python -m ci.static --tables`` writes ``backends/rocm/launch/<arch>.yaml``. For every launch of
:mod:`ci.static.cases` in 16-bit numbers it compiles the formula's choice and its neighbors (tiles
of half the size, half or twice the warps, fewer stages), and reads the machine code. A neighbor
becomes an entry where all of this holds:

* a core keeps at least half as many threads again as with the formula: what hides latency (of a
  kernel with a few persistent programs a core, those that there are),
* it has no fewer bytes of loads on their way, counted as threads times bytes loaded a thread,
* no register is spilled, and nothing loaded in 16 bytes a thread is loaded in fewer.

Elsewhere the formula stays. No time is predicted. An entry says that it comes from here; one that
``python -m benchmarks.tune table`` found on a card takes its place, and the next run leaves it
alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from ci.static import TARGETS, StaticCase, cases, static_cases
from ci.static.code import CORES, Code
from ci.static.rows import facts_of
from liger_multi.dispatch import launch
from liger_multi.dispatch.backend import DeviceInfo
from liger_multi.dispatch.launch import forced

ROOT = Path(__file__).parent.parent.parent
MODEL = "static model, not measured"
MORE_THREADS = 1.5
HALVED = ("rows", "tokens", "stages", "block")
UNBOUNDED = 2**30
HEAD = """\
# Launch numbers of {arch}, over the formulas beside the kernels: the first entry whose bounds hold.
# Written by `python -m ci.static --tables` from a static model of compiled code (registers,
# occupancy, 16-byte loads): no time was taken on this hardware. docs/rocm.md says how to measure
# and send back a table; entries whose source starts with "measured" stay when it is written again.
"""

Call = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Asked:
    """One question for launch numbers: by which call, under which key, for which shape."""

    label: str
    key: str
    shape: Mapping[str, int]
    formula: Any


def asked(info: DeviceInfo, calls: Mapping[str, Call]) -> list[Asked]:
    """What the calls' launchers ask of the formulas, without any table."""
    questions: list[Asked] = []
    real = launch._config

    def spy(name: str, formula: Any, info: DeviceInfo, shape: dict[str, int]) -> Any:
        config = real(name, formula, info, shape)
        questions.append(Asked(label, name, dict(shape), config))
        return config

    launch._config = spy
    try:
        with forced({}), launch.simulate(info):
            for label, call in calls.items():
                static_cases(info, {label: call})
    finally:
        launch._config = real
    unique = {(a.key, tuple(a.shape.items())): a for a in reversed(questions)}
    return list(unique.values())[::-1]


def neighbors(info: DeviceInfo, formula_config: Any) -> Iterator[dict[str, int]]:
    """Launch numbers beside the formula's."""
    fields = dataclasses.asdict(formula_config)
    most = info.max_threads // info.warp_size
    warps = {w for w in (fields["num_warps"] // 2, 2 * fields["num_warps"]) if 1 <= w <= most}
    smaller = [{}, *({f: fields[f] // 2} for f in HALVED if fields.get(f, 1) > 1)]
    for tile, count in itertools.product(smaller, (fields["num_warps"], *sorted(warps))):
        config = {**tile, "num_warps": count}
        if any(fields[name] != value for name, value in config.items()):
            yield config


def limited(code: Code, config: Any, info: DeviceInfo) -> Code:
    """The code, with no more threads a core than the programs of its launch have."""
    programs = getattr(config, "programs", None)
    if programs is None:
        return code
    there = -(-programs // info.cores) * code.threads
    return dataclasses.replace(code, resident=min(code.resident, there))


def in_flight(code: Code) -> int:
    """Bytes that a core's threads ask for, once each load."""
    return code.resident * sum(width * count for width, count in code.loads.items())


def better(mine: Code, other: Code) -> bool:
    """Whether the model takes ``other`` over the formula's ``mine``."""
    return (
        other.resident >= MORE_THREADS * mine.resident
        and in_flight(other) >= in_flight(mine)
        and not other.spills
        and other.widest_load == mine.widest_load
        and other.widest_store >= mine.widest_store
    )


def entries(
    arch: str, calls: Mapping[str, Call], facts: Callable[[str, StaticCase], Code]
) -> dict[str, list[dict[str, Any]]]:
    """Entries for one architecture; ``facts`` compiles a launch."""
    info = TARGETS[arch].info
    full = CORES[arch].threads
    by_kernel: dict[str, list[dict[str, Any]]] = {}
    for question in asked(info, calls):
        call = {question.label: calls[question.label]}
        with forced({}):
            base = static_cases(info, call)
        best: tuple[int, int, dict[str, int], Code, Code] | None = None
        for config in neighbors(info, question.formula):
            with forced({question.key: config}):
                other = static_cases(info, call)
            pair = _changed(base, other)
            if pair is None:
                continue
            mine = limited(facts(arch, pair[0]), question.formula, info)
            if mine.resident * MORE_THREADS > full and not mine.spills:
                break  # no neighbor can hold so many more
            numbers = dataclasses.replace(question.formula, **config)
            code = limited(facts(arch, pair[1]), numbers, info)
            rank = (code.resident, in_flight(code))
            if better(mine, code) and (best is None or rank > best[:2]):
                best = (*rank, config, mine, code)
        if best is not None:
            entry = _entry(question, *best[2:], full)
            if entry["when"] not in [e["when"] for e in by_kernel.get(question.key, [])]:
                by_kernel.setdefault(question.key, []).append(entry)
    return by_kernel


def _changed(
    base: list[StaticCase], other: list[StaticCase]
) -> tuple[StaticCase, StaticCase] | None:
    """The one launch that other numbers changed, or None where another kernel or several ran."""
    if [case.name for case in base] != [case.name for case in other]:
        return None
    pairs = zip(base, other, strict=True)
    changed = [(a, b) for a, b in pairs if (a.constants, a.options) != (b.constants, b.options)]
    return changed[0] if len(changed) == 1 else None


def bounds(question: Asked) -> dict[str, list[int]]:
    """For which shapes an entry holds: as many columns once rounded up, a quarter of the rows."""
    when = {}
    for axis, value in question.shape.items():
        if axis == "rows":
            when[axis] = [value // 4, UNBOUNDED]
        elif axis == "cols" and value > 1:
            when[axis] = [(1 << (value - 1).bit_length() - 1) + 1, 1 << (value - 1).bit_length()]
        else:
            when[axis] = [int(value), int(value)]
    if question.key.startswith(("rope", "gemm_by_rows")):
        when.pop("rows", None)  # one kernel serves every length, or its bits must
    return when


def _entry(
    question: Asked, config: dict[str, int], mine: Code, code: Code, full: int
) -> dict[str, Any]:
    said = [
        f"{mine.registers} -> {code.registers} registers",
        f"{mine.resident} -> {code.resident} of {full} threads a core",
        f"{in_flight(mine)} -> {in_flight(code)} bytes in flight",
        f"{code.widest_load}-byte loads",
    ]
    source = f"{MODEL}: {question.label}, {', '.join(said)}"
    return {"when": bounds(question), "config": config, "source": source}


def _modeled(entry: Mapping[str, Any]) -> bool:
    said = str(entry.get("source"))
    return said.startswith(MODEL) and not said.startswith(f"{MODEL}: by hand")


def write(info: DeviceInfo, tables: Mapping[str, list[dict[str, Any]]]) -> Path:
    """Put entries into a device's table, measured ones before the model's.

    Entries of the model take the place of all of the model's; measured ones that of entries with
    the same bounds.
    """
    path = ROOT / "backends" / info.backend / "launch" / f"{info.arch}.yaml"
    old = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    model = any(_modeled(entry) for several in tables.values() for entry in several) or not tables
    kept: dict[str, list[dict[str, Any]]] = {}
    for key, several in ((old or {}).get("entries") or {}).items():
        taken = [] if model else [entry["when"] for entry in tables.get(key, [])]
        stay = [e for e in several if not (model and _modeled(e)) and e["when"] not in taken]
        if stay:
            kept[key] = stay
    out = [HEAD.format(arch=info.arch)]
    out += [f"device: {{warp_size: {info.warp_size}, shared_bytes: {info.shared_bytes}}}\n"]
    every = {key: [*kept.get(key, []), *tables.get(key, [])] for key in sorted({*kept, *tables})}
    every = {key: sorted(several, key=_modeled) for key, several in every.items()}
    out += ["entries:\n" if every else "entries: {}\n"]
    for key, several in every.items():
        out += [f"  {key}:\n"]
        for entry in several:
            for name, lead in (("when", "- "), ("config", "  ")):
                out += [f"    {lead}{name}: {_flow(entry[name])}\n"]
            out += [f"      source: {_scalar(entry['source'])}\n"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(out), encoding="utf-8")
    return path


def write_model(arch: str) -> Path:
    """Write the launch table of one architecture from the static model."""
    chosen = {label: call for label, call in cases.calls().items() if "float32" not in label}
    return write(TARGETS[arch].info, entries(arch, chosen, facts_of)).relative_to(ROOT)


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6).strip()


def _scalar(text: str) -> str:
    return yaml.safe_dump(text, width=10**6).splitlines()[0]
