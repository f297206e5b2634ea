"""Numbers in pages, from the results of :mod:`benchmarks.store`.

:func:`quoted` fills them in:
``<!-- = models llama-3.2-1b:8x4096 ours GiB -->38.4<!-- / -->`` in a page is the newest peak of
that run and variant, which ``make docs`` keeps so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import store

DEVICE = "NVIDIA H200"  # whose numbers pages quote
_KEY = re.compile(r"(\w+) (.+) (\S+) (\S+)")
QUOTE = re.compile(r"(<!-- = ([^>]*?) -->)(.*?)(<!-- / -->)")
UNITS: dict[str, tuple[str, Callable[[float], str]]] = {
    "GiB": ("peak_bytes", lambda x: f"{x / 2**30:.1f}"),
    "extra-MiB": ("extra_bytes", lambda x: f"{x / 2**20:,.0f}"),
    "tokens": ("tokens_per_second", lambda x: f"{x / 1000:.1f}k"),
    "ms": ("both_ms", lambda x: f"{x:#.3g}".rstrip(".")),
    "peak": ("both", lambda x: f"{x:.0f}"),
    "longest": ("longest", lambda x: f"{x:,.0f}"),
    "too-long": ("shortest_failed", lambda x: f"{x:,.0f}"),
    "s": ("step_seconds", lambda x: f"{x:.0f}"),
    "loss-error": ("loss", lambda x: f"{100 * x:.2g}"),
    "hidden-error": ("hidden_gradient", lambda x: f"{100 * x:.2g}"),
    "weight-error": ("weight_gradient", lambda x: f"{100 * x:.2g}"),
}


# --- numbers in pages ---


def quoted(text: str) -> str:
    """A page with the current value in each of its quotes."""
    return QUOTE.sub(lambda match: match[1] + value(match[2]) + match[4], text)


def quotes(text: str) -> list[tuple[str, str]]:
    """The quotes of a page: what each names, and the value that stands there."""
    return [(match[2], match[3]) for match in QUOTE.finditer(text)]


def value(key: str) -> str:
    """What a quote names, as pages write it.

    ``KIND WHAT WHO UNIT``: of kind ``models`` WHAT is a run and WHO a variant, of ``ops`` and
    ``losses`` WHAT is ``operator/sample`` or ``case/shape`` and WHO a provider. Of ``float8``
    WHAT is a shape and WHO also a part, of ``lora`` WHAT is ``part/form``, of ``longest`` a model,
    with ``/24GB`` within so much. ``ours/liger`` is a ratio; both numbers are of one run.

    Raises:
        ValueError: No result has it.
    """
    try:
        kind, what, who, unit = _KEY.fullmatch(key).groups()  # type: ignore[union-attr]
        field, shown = UNITS[unit]
        rows = _KINDS[kind]
    except (AttributeError, KeyError):
        known = f"one of {', '.join(_KINDS)}; a unit one of {', '.join(UNITS)}"
        raise ValueError(f"a quote is KIND WHAT WHO UNIT, KIND {known}; got {key!r}") from None
    names = who.split("/")
    for data in reversed(store.read(_STORED.get(kind, kind))):
        if store.device(data) == DEVICE:
            found = {w: _number(row, field) for w, row in rows(data, what) if w in names}
            numbers = [found.get(name) for name in names]
            if all(number is not None for number in numbers):
                first, *rest = (float(number or 0.0) for number in numbers)
                return f"{first / rest[0]:.2f}" if rest else shown(first)
    raise ValueError(f"no result of {DEVICE} in benchmarks/results has {key!r}")


def _number(row: Mapping[str, Any], field: str) -> float | None:
    source = row.get("percent_of_peak") or {} if field == "both" else row
    return source.get(field)


def _of_models(data: Mapping[str, Any], what: str) -> list[tuple[str, Any]]:
    return [(row["variant"], row) for row in data["rows"] if row["run"] == what]


def _of_operators(data: Mapping[str, Any], what: str) -> list[tuple[str, Any]]:
    return [
        (row["provider"], row) for row in data["rows"] if f"{row['op']}/{row['sample']}" == what
    ]


def _of_losses(data: Mapping[str, Any], what: str) -> list[tuple[str, Any]]:
    return [(row["provider"], row) for row in data["rows"] if f"{row['case']}/{shape(row)}" == what]


def _of_float8(data: Mapping[str, Any], what: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for row in data["rows"]:
        if "x".join(map(str, row["shape"])) == what:
            made = {who: one for who, one in row.items() if who not in ("shape", "parts")}
            for who, one in made.items():
                found.append((who, {**one["error"], **one, "both_ms": 1e3 * one["seconds"]}))
            for part, seconds in row.get("parts", {}).items():
                found.append((part.replace(" ", "-"), {"both_ms": 1e3 * seconds}))
    return found


def _of_lora(data: Mapping[str, Any], what: str) -> list[tuple[str, Any]]:
    return [
        (row["variant"], {"both_ms": row["milliseconds"], "extra_bytes": row["added_bytes"]})
        for row in data["rows"]
        if f"{row['part']}/{row['form']}" == what
    ]


def _of_longest(data: Mapping[str, Any], what: str) -> list[tuple[str, Any]]:
    limit = f"/{data['limit_gb']:g}GB" if data["limit_gb"] else ""
    found = []
    for row in data["rows"]:
        steps = {tried["tokens"]: tried["seconds"] for tried in row["tries"]}
        step = {"step_seconds": steps.get(row["longest"])}
        found += [(row["provider"], row | step)] if row["model"] + limit == what else []
    return found


def shape(row: Mapping[str, Any]) -> str:
    """The shape of a loss's row in one word."""
    return "x".join(str(n) for n in row["shape"].values())


_STORED = {"ops": "operators"}  # kinds whose results have another name
_KINDS: dict[str, Callable[[Mapping[str, Any], str], list[tuple[str, Any]]]] = {
    "models": _of_models,
    "ops": _of_operators,
    "losses": _of_losses,
    "float8": _of_float8,
    "lora": _of_lora,
    "longest": _of_longest,
}
