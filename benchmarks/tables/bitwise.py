"""What equal bits cost: the tables of ``docs/bitwise.md``.

They are made of what ``python -m benchmarks.bitwise --store`` writes. Ratios divide by the default
of the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks import store
from benchmarks.tables import OPERATOR_FAMILIES, table
from liger_multi.grouping import grouped

SETTINGS = ("deterministic", "rows")
TARGETS = {
    "norms": 1.10,
    "activations": 1.10,
    "cross_entropy": 1.10,
    "divergences": 1.10,
}
"""The most that "rows" may cost, by family; the whole step may cost :data:`STEP`."""
STEP = 1.25
UNMEASURED = ["Not measured yet: `python -m benchmarks.bitwise --store`.", ""]
WHO = {
    "baseline": "unpatched",
    "baseline-deterministic": "unpatched, PyTorch's deterministic algorithms",
    "baseline-deterministic-unfilled": "the same, without filling uninitialized memory",
    "default": "patched",
    "deterministic": "patched, `deterministic=True`",
    "rows": 'patched, `deterministic="rows"`',
    "sgemm-bi": "unpatched, linear layers of `sgemm-bi`",
}
"""Variants of a whole step as the page calls them, in its order."""
Row = Mapping[str, Any]
Group = dict[str, tuple[Mapping[str, Any], Row]]  # by variant: the run and the row


def measured(part: str) -> dict[tuple[str, str, str], Group]:
    """The newest rows of a part, by device, name and shape; trials do not count."""
    groups: dict[tuple[str, str, str], Group] = {}
    for run, row in store.rows("bitwise"):
        if row["part"] == part and "variant" in row and not run.get("tiny"):
            key = (store.device(run), row["name"], row["shape"])
            groups.setdefault(key, {})[row["variant"]] = (run, row)
    return groups


def ratio(
    group: Group, variant: str, field: str = "both_ms", base: str = "default"
) -> float | None:
    """A variant's time over that of a base in the same run; None where one is missing."""
    if variant not in group:
        return None
    run, row = group[variant]
    others = (
        other[field]
        for other in run["rows"]
        if (other["part"], other["name"], other.get("shape"), other.get("variant"))
        == (row["part"], row["name"], row["shape"], base)
        and other.get(field)
    )
    divisor = next(others, None)
    own = row.get(field)
    return own / divisor if own and divisor else None


def _shown(value: float | None, form: str = "{:.2f}") -> str:
    return "-" if value is None else form.format(value)


def _said(groups: Iterable[Group]) -> str:
    """When and where rows were measured."""
    runs = {id(run): run for group in groups for run, _ in group.values()}
    texts = {
        f"{store.device(run)}, torch {run['versions']['torch'].partition('+')[0]}, "
        f"{run['date'][:10]}, commit {run['commit']}"
        for run in runs.values()
    }
    return "; ".join(sorted(texts))


# --- the tables of the page ---


def families() -> list[str]:
    """Median and worst cost of each family of operators, for every device."""
    by_device = grouped((key[0], group) for key, group in sorted(measured("time").items()))
    head = ["Operators", "count", "`True`, median", "worst", '`"rows"`, median', "worst", "target"]
    lines = []
    for groups in by_device.values():
        said = f"Forward and backward over the default ({_said(groups)}):"
        lines += [said, "", *table(head, _by_family(groups)), ""]
    return lines or UNMEASURED


def _by_family(groups: Sequence[Group]) -> Iterable[list[str]]:
    titles: Mapping[str, str] = OPERATOR_FAMILIES
    for family, title in titles.items():
        own = [g for g in groups if next(iter(g.values()))[1].get("family") == family]
        cells = [title, str(len(own))]
        for setting in SETTINGS:
            ratios = [r for r in (ratio(g, setting) for g in own) if r is not None]
            cells += (
                [_shown(statistics.median(ratios)), _shown(max(ratios))] if ratios else ["-"] * 2
            )
        limit = TARGETS.get(family)
        if own:
            yield [*cells, "-" if limit is None else f"`{limit:.2f}`"]


def _bits() -> dict[tuple[str, str, str], dict[tuple[str, str], Row]]:
    """Rows of checks, by device, operator and setting, then by direction."""
    rows: dict[tuple[str, str, str], dict[tuple[str, str], Row]] = {}
    for run, row in store.rows("bitwise"):
        if row["part"] == "check" and "direction" in row and not run.get("tiny"):
            key = (store.device(run), row["name"], row["variant"])
            rows.setdefault(key, {})[row["direction"], row["shape"]] = row
    return rows


def checked() -> list[str]:
    """How many promises were checked on each device, and those that did not hold."""
    counts: dict[str, int] = {}
    broken: dict[str, list[str]] = {}
    for (device, name, setting), rows in sorted(_bits().items()):
        for (direction, _), row in rows.items():
            measured_promises = [key for key in ("repeat", "rows") if row.get(key) is not None]
            counts[device] = counts.get(device, 0) + len(
                {*measured_promises} & {*row.get("promised", ())}
            )
            for lost in row.get("broken", ()):
                said = f"`{lost}` of `{name}` {direction}, setting {setting}"
                broken.setdefault(device, []).append(said)
    lines = []
    for device, count in counts.items():
        lost = "; ".join(broken.get(device, ["none"]))
        text = f"On {device}, {count} promises of operators were checked. Broken: {lost}."
        lines += [text, ""]
    return lines


def steps() -> list[str]:
    """The whole step of a model, with what was found of its bits."""
    text = []
    for (_, name, shape), group in sorted(measured("step").items()):
        lines = []
        for variant, title in WHO.items():
            if variant not in group:
                continue
            _, row = group[variant]
            if "failure" in row:
                lines.append([title, f"failed: {row['failure']}", *["-"] * 5])
                continue
            base = "baseline" if variant.startswith(("baseline", "sgemm")) else "default"
            cells = [title, f"{row['tokens_per_second']:,.0f}", f"{row['both_ms']:.0f}"]
            cells += [_shown(ratio(group, variant, base=base)), _gib(row.get("extra_bytes"))]
            lines.append([*cells, *(_yes(row.get(key)) for key in ("repeat", "rows"))])
        head = ["Step", "tokens/s", "ms", "/ its default", "peak above weights, GiB"]
        head += ["repeats", "rows independent"]
        notes = {
            row["note"]
            for key, (_, row) in group.items()
            if key in (*SETTINGS, "default") and row.get("note")
        }
        said = f"{name}, {shape} tokens, forward, backward and AdamW, bf16 ({_said([group])})"
        said += f"; {'; '.join(sorted(notes))}" if notes else ""
        text += [f"{said}:", "", *table(head, lines), ""]
        text += [f'Target of `"rows"`: at most `{STEP:.2f}` times the default.', ""]
    return text or UNMEASURED


def _gib(count: float | None) -> str:
    return "-" if count is None else f"{count / 2**30:.1f}"


def _yes(outcome: bool | None) -> str:
    return "-" if outcome is None else "yes" if outcome else "no"


def trained() -> list[str]:
    """Whether small models end with equal bits when they are trained twice."""
    lines, groups = [], measured("training")
    for (device, name, steps), group in sorted(groups.items()):
        for _, row in group.values():
            lines.append([name.replace("+", ", "), steps, device, _yes(row.get("repeat"))])
    if not lines:
        return UNMEASURED
    head = ["Trained twice under `deterministic=True`", "", "device", "equal bits"]
    return [*table(head, lines), ""]


def costs() -> list[str]:
    """All tables of the page."""
    return [*families(), *steps(), *checked(), *trained()]


TABLES: dict[str, Callable[[], list[str]]] = {"bitwise-costs": costs}
