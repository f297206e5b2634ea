"""Tables of ``docs/performance.md`` and README's headline, each from the newest results alone.

Every table answers one question and names the card, the date and the versions of its rows. A row is
of one run, in which all variants took turns; of several runs, the newest counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import store
from benchmarks.configs import EAGER, HEADLINE, MIXTURE
from benchmarks.tables import Row, newest as newest_of, provenance, table
from liger_multi.dispatch import registry
from liger_multi.grouping import grouped
from liger_multi.testing import samples

Run = Mapping[str, Any]
Rows = dict[str, Mapping[str, Any]]  # of one measurement, by who was measured
PEOPLE = {"stock": "Hugging Face", "liger": "Liger-Kernel", "ours": "liger_multi"}
ABSENT = "-"
NOT_THERE = ("No module named", "has no such")
"""How failures of a provider begin that was not installed, or that lacks the function."""
NOISE, TOO_NOISY = 15.0, 40.0
"""Percent between the fastest and the slowest step: what is shown, and what makes no headline."""


# --- what was measured ---


def newest(run_type: str, name: Callable[[Run, Any], Any], who: str) -> dict[Any, tuple[Run, Rows]]:
    """Every measurement by its name: its newest run that has ours, and the rows of that run."""
    newest_rows: dict[Any, tuple[Run, Rows]] = {}
    for data in store.read(run_type):
        rows: dict[Any, Rows] = {}
        for row in data["rows"]:
            rows.setdefault(name(data, row), {})[row[who]] = row
        newest_rows |= {key: (data, some) for key, some in rows.items() if "ours" in some}
    return newest_rows


def by_card(run_type: str) -> dict[tuple[str, str, float | None], tuple[Run, Rows]]:
    """The newest rows of every run of a model, by card, run and limit of memory."""
    return newest(
        run_type, lambda data, row: (store.device(data), row["run"], data["limit_gb"]), "variant"
    )


def models() -> dict[str, tuple[Run, Rows]]:
    """Whole models without a limit of memory, the variants that run eagerly."""
    newest_rows = newest("models", lambda data, row: (row["run"], data["limit_gb"]), "variant")
    return {run: one for (run, limit), one in newest_rows.items() if limit is None}


def longest() -> dict[tuple[str, float | None], list[tuple[Run, Any]]]:
    """Searches for the longest sequence by model and limit.

    Those of the newest search's card come first; of another card are those that it lacks.
    """
    newest_rows: dict[tuple[str, float | None], list[tuple[Run, Any]]] = {}
    for data in sorted(store.read("longest"), key=store.moment):
        for row in data["rows"]:
            if "longest" not in row:
                continue
            searches = newest_rows.setdefault((row["model"], data["limit_gb"]), [])
            card, who = store.device(data), row["provider"]
            same = [
                one for run, one in searches if (store.device(run), one["provider"]) == (card, who)
            ]
            # a search that ended early goes on where an older one of its card stopped
            known = {name: value for name, value in row.items() if value is not None}
            others = [one for one in searches if one[1]["provider"] != who]
            searches[:] = [(data, {**(same[0] if same else {}), **known}), *others]
    for searches in newest_rows.values():
        card = store.device(searches[0][0])
        searches.sort(key=lambda one: store.device(one[0]) != card)
    return newest_rows


def from_elsewhere(searches: Sequence[tuple[Run, Any]], who: str) -> str:
    """The card of a search, where it is not that of the first one."""
    cards = {row["provider"]: store.device(run) for run, row in searches}
    card = cards.get(who)
    return "" if card in (None, store.device(searches[0][0])) else f" ({card})"


# --- how it is written ---


def block(runs: Sequence[Run], heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table below its provenance; empty where nothing was measured."""
    return "\n".join([provenance(runs), "", *table(heads, lines)]) if lines else ""


def number(row: Mapping[str, Any] | None, unit: str) -> str:
    """A number of a row, or why there is none."""
    if row is None:
        return ABSENT
    field, shown = store.UNITS[unit]
    value = row.get(field)
    if value:
        return shown(value)
    why = str(row.get("failure") or row.get("status") or ABSENT).partition(":")[0]
    if why.startswith(NOT_THERE):
        return ABSENT
    return why if why in (ABSENT, "out of memory", "not supported") else "failed"


def is_wrong(row: Mapping[str, Any] | None) -> bool:
    """Whether the result was beyond the tolerance."""
    error = None if row is None else row.get("error")
    return isinstance(error, int | float) and error > 1


def ratio(rows: Rows, field: str, other: str) -> str:
    """Ours over another one's, unless that was wrong."""
    ours, its = (rows.get(who, {}).get(field) for who in ("ours", other))
    return f"{ours / its:.2f}" if ours and its and not is_wrong(rows.get(other)) else ABSENT


def title(run: str) -> str:
    """A run as people write it."""
    from benchmarks.pictures import named

    return named(run)


def speed(row: Mapping[str, Any] | None) -> str:
    """Tokens a second, with the spread of steps where it is wide."""
    text, spread = number(row, "tokens"), (row or {}).get("spread_percent") or 0.0
    return f"{text} ± {spread / 2:.0f} %" if spread >= NOISE else text


# --- the tables ---


def several_cards() -> str:
    """FSDP2 over the cards of a machine."""
    newest_rows = newest("several-cards", lambda _, row: (row["run"], row["cards"]), "variant")
    runs = [data for data, _ in newest_rows.values()]
    lines = [
        [
            f"{title(run)} a card",
            str(cards),
            *[number(rows.get(who), "tokens") for who in EAGER],
            ratio(rows, "tokens_per_second", "liger"),
            *[number(rows.get(who), "GiB") for who in EAGER],
        ]
        for (run, cards), (_, rows) in sorted(newest_rows.items())
    ]
    heads = [f"{PEOPLE[who]}, tokens/s" for who in EAGER]
    memory = [f"{PEOPLE[who]}, GiB a card" for who in EAGER]
    return block(runs, ["run", "cards", *heads, "ours / Liger", *memory], lines)


def compiled() -> str:
    """Variants that pass through torch.compile, beside those that do not."""
    names = {
        "stock": "unpatched",
        "liger": "Liger-Kernel",
        "ours": "ours",
        "ours+attention": "ours with `register_attention`",
    }
    newest_rows = {
        run: one for run, one in models().items() if any(who.endswith("+compile") for who in one[1])
    }
    newest_run = max(newest_rows.items(), key=lambda item: store.moment(item[1][0]), default=None)
    if newest_run is None:
        return ""
    run, (data, rows) = newest_run
    lines = [
        [
            title(run),
            shown,
            *[number(rows.get(f"{who}{end}"), "tokens") for end in ("", "+compile")],
        ]
        for who, shown in names.items()
    ]
    return block([data], ["run", "variant", "eager, tokens/s", "compiled, tokens/s"], lines)


def longest_sequences() -> str:
    """The longest sequence of each variant, and the shortest that failed."""
    lines, runs = [], []
    for (model, limit), rows in sorted(longest().items(), key=str):
        by_provider = {row["provider"]: row for _, row in rows}
        runs += [data for data, _ in rows]
        where = store.device(rows[0][0]) if limit is None else f"{limit:g} GB"
        cells = [
            number(by_provider.get(who), unit) + from_elsewhere(rows, who)
            for who in EAGER
            for unit in ("longest", "too-long")
        ]
        lines.append([title(model), where, *cells])
    heads = [f"{PEOPLE[who]}, {what}" for who in EAGER for what in ("trains", "fails")]
    return block(runs, ["model", "within", *heads], lines)


HEADS = {
    "ours": "ours",
    "ours-512MiB": "ours within `512MiB`",
    "ours-lean": "ours, `lean`",
    "torch-fused": "PyTorch in chunks",
    "liger-hopper": "Liger CuTe",
    "quack": "QuACK",
    "liger": "Liger",
    "compile": "`compile`",
    "products": "the GEMMs",
}


def heads() -> str:
    """The fused linear cross entropy beside peers; each peer's time is of its newest run."""
    lines, used = [], []
    for (op, sample), rows in operators_measured().items():
        if op != "fused_linear_cross_entropy":
            continue
        used += [rows[who].data for who in HEADS if who in rows]
        cells = [sample]
        for who in HEADS:
            one = rows.get(who)
            cells.append(ABSENT if one is None else number(one.row, "ms"))
            if who != "ours":
                cells.append("-" if one is None else _over(one.ours, one.row))
        cells += [
            number(rows[who].row, "GiB") if who in rows else ABSENT
            for who in ("ours", "ours-512MiB", "ours-lean", "liger", "products")
        ]
        lines.append(cells)
    heads = ["shape"]
    for who, shown in HEADS.items():
        heads += [f"{shown}, ms", *["ours / it"] * (who != "ours")]
    heads += ["ours, GiB", "within `512MiB`, GiB", "`lean`, GiB", "Liger, GiB", "GEMMs, GiB"]
    return block(used, heads, lines)


def _over(ours: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    a, b = ours.get("both_ms"), row.get("both_ms")
    return f"{a / b:.2f}" if a and b else ABSENT


def losses() -> str:
    """Losses on hidden states beside the GEMMs that they need, TRL, Liger-Kernel and PyTorch."""
    newest_rows = newest(
        "losses",
        lambda data, row: (row["case"], store.shape(row), store.device(data)),
        "provider",
    )
    lines = []
    who = ("ours", "products", "trl", "liger", "torch")
    for (case, shape, _), (data, rows) in sorted(newest_rows.items()):
        lines.append(
            [
                case,
                shape,
                *[_within(rows.get(name)) for name in who],
                *[ratio(rows, "both_ms", name) for name in who[1:]],
                *[number(rows.get(name), "GiB") for name in ("ours", "trl", "liger", "torch")],
                store.short(data),
            ]
        )
    shown = {
        "ours": "ours",
        "products": "the GEMMs",
        "trl": "TRL",
        "liger": "Liger",
        "torch": "PyTorch",
    }
    heads = ["loss", "shape", *[f"{shown[name]}, ms" for name in who]]
    heads += [f"ours / {shown[name]}" for name in who[1:]]
    heads += [f"{shown[name]}, GiB" for name in ("ours", "trl", "liger", "torch")] + ["card"]
    return block([data for data, _ in newest_rows.values()], heads, lines)


def _within(row: Mapping[str, Any] | None) -> str:
    """A time; not where the result is beyond the tolerance."""
    return "wrong" if is_wrong(row) else number(row, "ms")


def experts() -> str:
    """Experts of Qwen3-30B-A3B beside grouped GEMMs of PyTorch, Liger-Kernel and transformers."""
    who = {"torch": "PyTorch", "liger": "Liger", "transformers-grouped": "transformers"}
    lines, used = [], []
    moe = [
        (sample, rows) for (op, sample), rows in operators_measured().items() if op == "fused_moe"
    ]
    for sample, rows in sorted(moe, key=lambda item: _tokens(item[0])):
        used += [rows[name].data for name in ("ours", *who) if name in rows]
        cells = [sample.partition("x")[0], number(rows["ours"].row, "ms")]
        for name in who:
            one = rows.get(name)
            cells += (
                [ABSENT] * 2 if one is None else [number(one.row, "ms"), _over(one.ours, one.row)]
            )
        lines.append(cells)
    heads = ["tokens", "ours, ms"]
    for shown in who.values():
        heads += [f"{shown}, ms", f"ours / {shown}"]
    return block(used, heads, lines)


def _tokens(sample: str) -> int:
    first = sample.partition("x")[0]
    return int(first) if first.isdigit() else 0


# --- operators beside their peers ---

COLUMNS = {
    "Liger": ("liger",),
    "Liger CuTe": ("liger-hopper", "liger-cute"),
    "QuACK": ("quack",),
    "PyTorch": ("aten", "torch", "transformers", "reference"),
    "`compile`": ("compile", "flex"),
}
"""Columns of peers, and the providers of each: the first that has a time stands there, or else the
first that was run."""
BESIDE = ("Liger", "PyTorch")
"""Peers whose memory and error stand there too."""
WORDS = {"out of memory": "memory"}


def _operator_time(one: Row | None) -> str:
    if one is None:
        return "-"
    time = one.row.get("both_ms")
    return f"{time:#.3g}".rstrip(".") if time else WORDS.get(one.row["status"], one.row["status"])


def _timeless(one: Row) -> bool:
    return not one.row.get("both_ms")


def _memory(one: Row | None) -> str:
    peak = None if one is None else one.row.get("peak_bytes")
    return "-" if peak is None else f"{peak / 2**30:.2f}"


def _error(one: Row | None) -> str:
    error = None if one is None else (one.row.get("error") or {}).get("tolerances")
    return "-" if error is None else f"{float(error):.2f}"


def operator_line(op: str, sample: str, rows: Mapping[str, Row]) -> list[str]:
    """Ours and the peers of one sample."""
    ours = rows["ours"]
    peers = {
        head: next(iter(sorted(filter(None, map(rows.get, names)), key=_timeless)), None)
        for head, names in COLUMNS.items()
    }
    ratios = [
        one.ours["both_ms"] / one.row["both_ms"]
        for one in peers.values()
        if one is not None and one.row.get("both_ms") and one.ours.get("both_ms")
    ]
    reached = peak(ours)
    others = [ours, *(peers[head] for head in BESIDE)]
    return [
        f"`{op}`",
        sample,
        _operator_time(ours),
        "-" if reached is None else f"{reached:.0f}",
        *map(_operator_time, peers.values()),
        f"{max(ratios):.2f}" if ratios else "-",
        *map(_memory, others),
        *map(_error, others),
    ]


def operators_measured(card: str | None = "h100") -> dict[tuple[str, str], dict[str, Row]]:
    """The newest rows of every operator and sample of which a card has one of ours."""
    runs = [run for run in store.read("operators") if store.device(run) == store.DEVICES[card]]
    newest_rows = newest_of(runs, lambda _, row: (row["op"], row["sample"]), "provider")
    return {key: rows for key, rows in sorted(newest_rows.items()) if "ours" in rows}


def peak(ours: Row) -> float | None:
    """Percent of what the least bytes or operations allow, forward and backward."""
    percent: float | None = (ours.row.get("percent_of_peak") or {}).get("both")
    return percent


def operator_block(newest_rows: Mapping[tuple[str, str], dict[str, Row]]) -> str:
    """Ours beside its peers, a line for every operator and sample."""
    heads = ["operator", "shape", "ours, ms", "% of peak", *COLUMNS, "ours / best"]
    heads += [f"{what}: {who}" for what in ("GiB", "error") for who in ("ours", *BESIDE)]
    lines = [operator_line(op, name, rows) for (op, name), rows in newest_rows.items()]
    used = [one.data for rows in newest_rows.values() for one in rows.values()]
    return block(used, heads, lines) if lines else ""


def later_operators() -> str:
    """Rows of another card that are newer than those of the page's card, of the same shapes."""
    before = operators_measured()
    return operator_block(
        {
            key: rows
            for key, rows in operators_measured(None).items()
            if key in before
            and store.moment(rows["ours"].data) > store.moment(before[key]["ours"].data)
        }
    )


def operators() -> str:
    """The newest rows of every operator."""
    newest_rows = operators_measured()
    if not newest_rows:
        return ""
    lacking = sorted(
        {samples.public(op) for op in registry.operators()} - {op for op, _ in newest_rows}
    )
    names = ", ".join(f"`{op}`" for op in lacking)
    text = operator_block(newest_rows)
    return f"{text}\n\nNot measured: {names}." if names else text


# --- README ---


def shown_models() -> dict[str, tuple[Run, Rows]]:
    """The runs of the headline, of which all three trained: two dense models and a mixture.

    All are of one card: that with the most of them, and of several the one measured last.
    """
    by_name: dict[str, dict[str, tuple[Run, Rows]]] = {}
    for (_, run, limit), one in sorted(
        by_card("models").items(), key=lambda item: store.moment(item[1][0])
    ):
        trained = all(one[1].get(who, {}).get("peak_bytes") for who in EAGER)
        if limit is not None or run not in HEADLINE or not trained:
            continue
        if max(one[1][who]["spread_percent"] for who in EAGER) < TOO_NOISY:
            card = store.device(one[0])
            by_name[card] = {**by_name.pop(card, {}), run: one}
    shown = [_headline_of(runs) for runs in by_name.values()]
    return max(reversed(shown), key=len, default={})


def _headline_of(runs: Mapping[str, tuple[Run, Rows]]) -> dict[str, tuple[Run, Rows]]:
    dense = grouped((run.partition(":")[0], run) for run in HEADLINE if run in runs)
    mixture = dense.pop(MIXTURE.partition(":")[0], [])
    return {run: runs[run] for run in [*[one[0] for one in dense.values()][:2], *mixture]}


def headline() -> str:
    """README's table: one card, several cards and the longest sequence."""
    lines: list[list[str]] = []
    runs: list[Run] = []

    def add(data: Sequence[Run], name: str, rows: Rows, unit: str, ending: str) -> None:
        runs.extend(data)
        cells = [number(rows.get(who), unit) for who in EAGER]
        cells = [f"{cell} {ending}" if cell[:1].isdigit() else cell for cell in cells]
        lines.append([name, *cells[:-1], f"**{cells[-1]}**"])

    for place, (run, (data, rows)) in enumerate(shown_models().items()):
        if place == 0:
            add([data], f"{title(run)}, peak memory", rows, "GiB", "GiB")
        if place == 0 or run == MIXTURE:
            add([data], f"{title(run)}, speed", rows, "tokens", "tokens/s")
    cards = newest("several-cards", lambda _, row: (row["run"], row["cards"]), "variant")
    for (run, count), (data, rows) in sorted(cards.items()):
        name = f"{title(run)} on each of {count} cards, FSDP2, speed"
        add([data], name, rows, "tokens", "tokens/s")
    long_rows = [pair for pair in store.rows("long-context") if pair[1]["part"] == "step"]
    if long_rows:
        data, row = max(long_rows, key=lambda pair: pair[1]["tokens"])
        name = f"{title(row['model'])}, a row of {row['tokens']:,} tokens over {row['cards']} cards"
        add([data], f"[{name}](docs/long-context.md), speed", {"ours": row}, "tokens", "tokens/s")
    for (model, limit), some in sorted(longest().items(), key=str):
        if limit is not None:
            by_provider = {row["provider"]: row for _, row in some}
            name = f"{title(model)} within `{limit:g} GB`, longest sequence"
            add([data for data, _ in some], name, by_provider, "longest", "tokens")
            for place, who in enumerate(EAGER, 1):
                lines[-1][place] += from_elsewhere(some, who)
    return block(runs, ["bf16, fused AdamW", *PEOPLE.values()], lines)


TABLES: dict[str, Callable[[], str]] = {
    "several-cards": several_cards,
    "compiled": compiled,
    "longest": longest_sequences,
    "heads": heads,
    "losses": losses,
    "experts": experts,
    "operators-h100": operators,
    "operators-later": later_operators,
    "headline": headline,
}
