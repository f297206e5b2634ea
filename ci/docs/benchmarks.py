"""Pages of measured numbers: times, curves, memory, plans, and those that pages have by hand.

The page of times is made of ``benchmarks/results``, the newest row of each kind; that of training
curves of what ``python -m benchmarks.convergence`` writes. The tables of ``docs/memory.md``,
``docs/planning.md`` and ``docs/recompute.md`` are made of what ``python -m benchmarks.memory``,
``benchmarks.plans`` and ``benchmarks.recompute`` write.

Measured figures that pages have by hand, and whether the notes of a result have them.

A measured figure is a number with a unit of time, rate, size or share (``1.4 ms``, ``3 x``), every
number of a list that ends in one (``83 and 80 %``), and every number with a decimal part. No
figures, by their form: code (options, limits, commands), versions, shapes (``8192x4096``), names
with digits (``Llama-3.2-1B``), and a table's column of targets. What comes from a measured row is
a quote (:mod:`benchmarks.store`), which is none by hand either. What comes from notes stands in
a paragraph, list item or table row that names them (```benchmarks/results/cpu.json#lora-host```),
and in the notes with the same digits.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import convergence, store
from benchmarks.convergence import EARLIEST, FACTOR, FINAL, LAST, Verdict

# --- times ---

BAR = 24  # characters of the longest bar
HEAD = """# Benchmarks

Every measured row that the repository keeps, from the files in `benchmarks/results`. To measure on
your own device:

    liger-multi bench --ops rms_norm

Times are medians of one run. Each row is the newest of its implementation, and "/ ours" divides it
by ours in the same run. Do not compare times of different runs; compare ratios, or use
`python -m benchmarks.store compare OLD NEW`. [Performance](performance.md) has targets and limits.
"wrong" is an error beyond the tolerance of the tests, "failed" an exception; neither has a time.
"error" is in tolerances of the tests.

| who | meaning |
|---|---|
| ours | the backend that was chosen automatically; `ours-512MiB`: with a smaller chunk of logits |
| stock | the unpatched model |
| torch, aten, compile | the plain formula, PyTorch's own function, `torch.compile` of the formula |
| liger, cce, flex, cudnn, flash | Liger-Kernel, Cut Cross Entropy, and kernels of attention |
| liger-cute, liger-hopper, quack, trl | Liger-Kernel's CuTe kernels, QuACK, and heads of TRL |
| transformers-grouped, -batched, -loop | experts of transformers |
| torch-fused | `torch.nn.functional.linear_cross_entropy` |
| products | the GEMMs of a loss on an LM head alone, a lower bound |
"""


class Row(NamedTuple):
    """A row of a result, with its run.

    Attributes:
        data: The run.
        row: This row.
        ours: Our row of the same run, if it has one.
    """

    data: Mapping[str, Any]
    row: Mapping[str, Any]
    ours: Mapping[str, Any]

    def of_ours(self, field: str) -> str:
        """A number over ours in the same run."""
        own, ours = self.row.get(field), self.ours.get(field)
        return f"{own / ours:.2f}" if own and ours else "-"

    @property
    def source(self) -> str:
        """When it was measured, and at which commit."""
        return f"{self.data['date'][:10]}, {self.data.get('commit', 'unknown')}"


def newest(
    runs: Iterable[Mapping[str, Any]], group: Callable[[Any, Any], Any], who: str
) -> dict[Any, dict[str, Row]]:
    """The newest row of every implementation, by group.

    Args:
        runs: Results, the oldest first.
        group: From a result and its row to what rows are compared within.
        who: The column that names an implementation.
    """
    found: dict[Any, dict[str, Row]] = {}
    for data in runs:
        ours = {group(data, row): row for row in data["rows"] if row[who] == "ours"}
        for row in data["rows"]:
            key = group(data, row)
            found.setdefault(key, {})[row[who]] = Row(data, row, ours.get(key, {}))
    return found


def _place(who: str) -> tuple[int, str]:
    """Where an implementation stands in a table: what others are held against first."""
    first = ("products", "stock", "torch", "liger", "ours")
    return (first.index(who) if who in first else len(first), who)


def _versions(data: Mapping[str, Any]) -> str:
    names = ("torch", "triton", "liger-kernel")
    return ", ".join(f"{n} {data['versions'][n]}" for n in names if n in data["versions"])


def _size(count: float | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.0f}"


def _group(sample: str, rows: Mapping[str, Row]) -> list[str]:
    """Lines of the providers of one sample, ours first and those without a time last, with bars."""
    longest = max((r.row.get("both_ms") or 0.0 for r in rows.values()), default=0.0)
    lines = []
    for one in sorted(rows.values(), key=_order):
        row, time = one.row, one.row.get("both_ms")
        peak = (row.get("percent_of_peak") or {}).get("both")
        error = (row.get("error") or {}).get("tolerances")
        cells = (
            sample, row["provider"], f"{time:.3g}" if time else row["status"],
            one.of_ours("both_ms"), "█" * max(1, round(BAR * time / longest)) if time else "",
            "-" if peak is None else f"{peak:.0f} %", _size(row.get("extra_bytes")),
            "-" if error is None else f"{float(error):.2f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _order(one: Row) -> tuple[bool, float]:
    return one.row["provider"] != "ours", one.row.get("both_ms") or float("inf")


def _operators() -> list[str]:
    runs = store.read("operators")
    found = newest(runs, lambda d, r: (store.device(d), r["op"], r["sample"]), "provider")
    by_op: dict[tuple[str, str], dict[str, Mapping[str, Row]]] = {}
    for (device, op, sample), rows in found.items():
        by_op.setdefault((op, device), {})[sample] = rows
    lines: list[str] = []
    for (op, device), samples in sorted(by_op.items()):
        every = [one for rows in samples.values() for one in rows.values()]
        sources = {f"{r.source} ({_versions(r.data)})" for r in every}
        lines += [f"\n## {op} on {device}\n", f"Measured {'; '.join(sorted(sources))}.\n"]
        lines += [
            "| sample | who | fwd+bwd, ms | / ours | | % of peak | extra, MiB | error |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for sample, providers in samples.items():
            lines += _group(sample, providers)
    return lines


def _models() -> list[str]:
    found = newest(
        store.read("models"),
        lambda d, r: (r["run"], d["limit_gb"] or 0.0, store.device(d)),
        "variant",
    )
    lines = ["\n## Models\n", "| model | who | tokens/s | / ours | peak, GiB | measured |"]
    lines.append("|---|---|---|---|---|---|")
    for (run, limit, device), rows in sorted(found.items()):
        where = f"{run}, {device}" + (f", {limit} GB" if limit else "")
        for variant, one in sorted(rows.items(), key=lambda item: _place(item[0])):
            speed, peak = one.row.get("tokens_per_second"), one.row.get("peak_bytes")
            cells = (
                where, variant, f"{speed:,.0f}" if speed else one.row.get("failure", "-"),
                one.of_ours("tokens_per_second"), f"{peak / 2**30:.1f}" if peak else "-",
                one.source,
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return lines if found else []


def _losses() -> list[str]:
    """Losses, and their time over that of the GEMMs of the head."""
    found = newest(
        store.read("losses"),
        lambda d, r: (r["case"], store.shape(r), store.device(d)),
        "provider",
    )
    lines = ["\n## Losses\n", "| loss | who | fwd+bwd, ms | / GEMMs | extra, MiB |"]
    lines[-1] += " error / tolerance | measured |\n|---|---|---|---|---|---|---|"
    for (case, shape, device), rows in sorted(found.items()):
        for provider, one in sorted(rows.items(), key=lambda item: _place(item[0])):
            row, floor = one.row, _products(one)
            time, error = row.get("both_ms"), row.get("error")
            cells = (
                f"{case} {shape}, {device}", provider, f"{time:.1f}" if time else row["status"],
                f"{time / floor:.2f}" if time and floor else "-", _size(row.get("extra_bytes")),
                "-" if error is None else f"{error:.2f}", one.source,
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return lines if found else []


def _products(one: Row) -> float | None:
    """The time of the GEMMs alone in the run of a row."""
    own = (one.row["case"], one.row["shape"])
    rows = [r for r in one.data["rows"] if (r["case"], r["shape"]) == own]
    return next((r.get("both_ms") for r in rows if r["provider"] == "products"), None)


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD.rstrip(), *_models(), *_losses(), *_operators()]) + "\n"


# --- training curves ---

PICTURES = store.ROOT / "docs"
SHORT = {"float32": "fp32", "bfloat16": "bf16"}
BUGS = {
    "bug-eps": "every norm's epsilon ten times too large",
    "bug-gradient": "the gradient that one MLP receives 1 % too large",
    "bug-weights": "weights of norms left without gradient",
}
CURVES_HEAD = f"""<!-- generated by `make site` from the files in `benchmarks/results` -->

# Training curves

Do patched models learn the same? Unpatched and patched models train from the same weights on the
same batches of real text, the sources of Python's standard library. The loss and the gradient norm
of every step are compared. To train one yourself, in a checkout:

    python -m benchmarks.convergence --help

## Method

Training amplifies rounding, so two correct programs diverge too. Two **controls** measure how far:
unpatched runs whose initial weights, and whose gradients in every step, differ by at most one unit
in the last place. The bounds were fixed before the first run (`benchmarks/convergence.py`):

| bound | value |
|---|---|
| distance, from step {EARLIEST} on | {FACTOR:g} times that of the farther control, plus 1e-6 |
| last {LAST} steps, fp32 | mean loss within {100 * FINAL["float32"]:g} % |
| last {LAST} steps, bf16 | mean loss within {100 * FINAL["bfloat16"]:g} % |

* The distance is the root mean square of the relative differences from the unpatched run over all
  steps so far. It is computed for the loss and for the gradient norm.
* The factor is above 1 because a patched layer rounds at some ten other places in each direction.
  A control is rounded once. Independent errors add as a root.
* Other initial weights move the mean loss of the last steps by about the bound for bf16.
* "Used" is the largest share of the allowed distance in any step. Above 1 is out of bounds.
* In bf16 runs, weights, gradients and the optimizer's state are bf16.

The files in `benchmarks/results` have every curve. `make test-full` trains some of the models.
"""


def _percent(value: float) -> str:
    return f"{100 * value + 0.0:+.4f} %"


def _judged(found: Verdict) -> list[str]:
    """The largest share of the allowed distance, of loss and gradient, and whether all is well."""
    shares = [f"{found.shares[name]:,.2f}" for name in convergence.CURVES]
    return [*shares, "yes" if found.good else "**no**"]


def runs(data: Mapping[str, Any]) -> list[str]:
    """A row for every model, dtype and patch."""
    columns = "| model | dtype | unpatched loss: first | last mean | patched by | last mean, "
    columns += "difference | used: loss | gradient | in bounds | other weights: difference |"
    lines = [columns, "|---|---|---|---|---|---|---|---|---|---|"]
    for row in data["rows"]:
        found, stock = row["curves"], row["curves"]["stock"]["loss"]
        last = sum(stock[-LAST:]) / LAST
        seed = _percent(convergence.final(found, "seed")) if "seed" in found else "-"
        for provider in ("ours", "liger"):
            if provider in found:
                verdict = convergence.judge(row, provider)
                cells = [row["model"], SHORT[row["dtype"]], f"{stock[0]:.3f}", f"{last:.3f}"]
                cells += [provider, _percent(verdict.final), *_judged(verdict), seed]
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def bugs(data: Mapping[str, Any]) -> list[str]:
    """Seeded bugs, and whether the bounds found them."""
    columns = "| bug | model | dtype | used: loss | gradient | found |"
    lines = [columns, "|---|---|---|---|---|---|"]
    for name, text in BUGS.items():
        for row in data["rows"]:
            if name in row["curves"]:
                verdict = convergence.judge(row, name)
                word = "no" if verdict.good else f"in step {verdict.beyond or row['steps']}"
                used = _judged(verdict)[:-1]
                cells = [text, row["model"], SHORT[row["dtype"]], *used, word]
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def curves_page() -> str:
    """The page: every run with its picture; what a later run trained again is in that one."""
    out = [CURVES_HEAD]
    for (device, seeded), data in sorted(_runs(), key=lambda item: item[0]):
        versions = ", ".join(
            f"{n} {data['versions'][n]}" for n in ("torch", "liger-kernel") if n in data["versions"]
        )
        first = data["rows"][0]
        size = f"{first['steps']} steps of {first['batch']} x {first['tokens']} tokens"
        said = f"{size}, {versions}, {data['date'][:10]}, commit {data['commit']}:"
        out += [f"## {'Seeded bugs, ' if seeded else ''}{device}", "", said, ""]
        picture = PICTURES / f"convergence-{store.card(data)}{'-bugs' if seeded else ''}.png"
        if picture.exists():
            out += [f"![losses, and their distance from the unpatched run]({picture.name})", ""]
        out += [*(bugs(data) if seeded else runs(data)), ""]
    return "\n".join(out)


def _runs() -> list[tuple[tuple[str, bool], Mapping[str, Any]]]:
    found = store.read("convergence")
    seeded = [any(name in row["curves"] for row in data["rows"] for name in BUGS) for data in found]
    return [((store.device(data), s), data) for data, s in zip(found, seeded, strict=True)]


# --- figures by hand ---

GENERATED = re.compile(r"<!-- ([\w-]+):(?!end)\w+ -->.*?<!-- \1:end -->", re.S)
CODE = re.compile(r"^```.*?^```|^ {4}(?! *\|)[^\n]*(?=\n)", re.S | re.M)  # blocks
SPAN = re.compile(r"`([^`\n]*)`")
NOTES = re.compile(r"`benchmarks/results/([\w-]+)\.json#([\w-]+)`")
COMMENT = re.compile(r"<!--.*?-->|\]\([^)\s]*\)", re.S)

NUMBER = re.compile(r"(?<![\w.])(?<!\w[-:/])\d+(?:,\d{3})*(?:\.\d+)?(?!\.?\d)")
TIME = r"[num]?s\b|seconds|minutes|tokens/s|TFLOP/s|times\b|x\b(?! ?\d)"
UNIT = re.compile(rf"\s?(?:{TIME}|%|[KMGT]i?B\b)")
JOINED = re.compile(r",? (?:and|to|or)\s|,\s")
PACKAGES = "[Tt]orch|PyTorch|[Tt]riton|[Tt]ransformers|Python|TRL|PEFT|peft|[Ll]iger(?:-kernel)?"
VERSION = re.compile(
    rf"\b(?:{PACKAGES}|kernels)(?:'s)?(?: |\s?>=\s?)\d+\.\d+"
    r"(?:(?:, | and | to | or )\d+\.\d+)*"
)


def unsupported(text: str, folder: Path | None = None) -> list[str]:
    """Figures of a page that no notes have which their block names, with the block's beginning."""
    found = []
    for block in _blocks(_written(text)):
        named = NOTES.findall(block)
        noted = [line for card, name in named[:1] for line in lines(card, name, folder)]
        known = _numbers(noted) if len(named) == 1 else set()
        found += [f"{n} in: {block[:60]}" for n in figures(block) if _value(n) not in known]
    return found


def figures(block: str) -> list[str]:
    """The measured figures of a block."""
    text = VERSION.sub("-", SPAN.sub(_span, COMMENT.sub("-", block)))
    found: list[str] = []
    counts, following = False, len(text)
    for match in reversed(list(NUMBER.finditer(text))):
        listed = counts and JOINED.fullmatch(text, match.end(), following)
        counts = bool(listed or UNIT.match(text, match.end()))
        following = match.start()
        if counts or "." in match[0]:
            found.append(match[0])
    return found[::-1]


def _span(match: re.Match[str]) -> str:
    """What is between backquotes counts where it is a time, a rate or a ratio and nothing else."""
    alone = re.fullmatch(rf"[\d.,]+\s?(?:{TIME})", match[1])
    return match[1] if alone else "code"


def _written(text: str) -> str:
    """What people wrote: no generated part, quote or block of code."""
    return CODE.sub("", store.QUOTE.sub("quote", GENERATED.sub("", text)))


def _blocks(text: str) -> Iterator[str]:
    """Paragraphs, list items and table rows, these without their targets."""
    block: list[str] = []
    heads: list[str] = []
    for line in [*text.splitlines(), ""]:
        row = line.lstrip().startswith("|")
        if row or not line.strip() or re.match(r"\s*(?:[*-]|\d+\.) |#", line):
            yield "\n".join(block)
            block = []
        if row:
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            heads = heads or cells
            yield " | ".join(_cell(*pair) for pair in zip(heads, cells, strict=False))
            continue
        heads = []
        block.append(line)


def _cell(head: str, cell: str) -> str:
    """A cell with the unit of its column; targets are no results."""
    unit = re.search(rf"(?:^|[ ,])({UNIT.pattern})$", head)
    return "" if head.startswith("target") else f"{cell} {unit[1].strip() if unit else ''}"


def lines(card: str, name: str, folder: Path | None = None) -> list[str]:
    """The notes of a card with a name; none where there are no such."""
    runs = store.read("notes", folder)
    return [
        line
        for run in runs
        if (store.card(run), run["name"]) == (card, name)
        for line in run["rows"]
    ]


def _numbers(noted: list[str]) -> set[float]:
    text = "\n".join(noted)
    return {_value(n) for n in re.findall(r"\d+(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?", text)}


def _value(number: str) -> float:
    return float(number.replace(",", ""))


# --- memory ---

MEMORY_START, MEMORY_END = "<!-- memory-tables:start -->", "<!-- memory-tables:end -->"
GIB = 2**30


def _gib(count: float) -> str:
    return f"{count / GIB:,.2f}"


def _how(row: dict[str, Any]) -> str:
    """How a story's training is spread, in words."""
    parts = [row.get("dtype", "bfloat16")]
    if row.get("fsdp") or row.get("zero_stage"):
        spread = "FSDP2" if row.get("fsdp") else f"ZeRO-{row['zero_stage']}"
        parts.append(f"{spread} on {row['world']}")
    return ", ".join(parts + ["checkpointing"] * row.get("checkpointing", False))


def stories() -> list[str]:
    """Static and dynamic bytes, unpatched and patched, and what the patch saves of the peak."""
    columns = "| model, batch x tokens | how | static | unpatched: dynamic | logits | peak "
    columns += "| patched: dynamic | logits | peak | saved |"
    lines = [columns, "|---|---|---|---|---|---|---|---|---|---|"]
    for _, row in store.rows("memory-estimates"):
        stock, ours = row["stock"], row["patched"]
        cells = [f"{row['model']}, {row['batch']} x {row['sequence']:,}", _how(row)]
        cells.append(_gib(stock["static_bytes"]))
        for made in (stock, ours):
            cells += [_gib(made[f"{n}_bytes"]) for n in ("dynamic", "logits", "peak")]
        cells.append(f"{100 * (1 - ours['peak_bytes'] / stock['peak_bytes']):.0f} %")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def measured_peaks() -> list[str]:
    """Every measured case beside its estimate, newest of each device."""
    newest: dict[tuple[str, str], tuple[Any, Any]] = {}
    for data, row in store.rows("memory"):
        newest[store.device(data), json.dumps(row["case"], sort_keys=True)] = (data, row)
    lines = [
        "| device | case | limit, GB | measured, MiB | estimated, MiB | error |",
        "|---|---|---|---|---|---|",
    ]
    for (device, _), (_, row) in newest.items():
        case = row["case"]
        name = [f"{case['model']} {case['batch']} x {case['sequence']}", case["dtype"]]
        name += ["LoRA"] * case["lora"] + ["checkpointing"] * case["checkpointing"]
        name.append("patched" if case["patched"] else "baseline")
        got = row.get("measured_bytes")
        shown = f"{got / 2**20:,.1f}" if got else row["failure"]
        error = f"{round(row['error_percent'], 1) + 0.0:+.1f} %" if got else "-"
        guess = f"{row['estimated_bytes'] / 2**20:,.1f}"
        limit = f"{case['limit_gb']:g}" if case["limit_gb"] else "-"
        lines.append(f"| {device} | {', '.join(name)} | {limit} | {shown} | {guess} | {error} |")
    return lines


def reused() -> list[str]:
    """What the chunked loss keeps in the allocator, and what it does when memory is short."""
    lines = []
    for data, found in store.rows("memory-reuse"):
        if "steps" not in found:
            continue
        steps, short = found["steps"], found["shortage"]
        device, count = store.device(data), len(steps)
        limit, asked = short["limit_bytes"] / GIB, short["logits_bytes"] / GIB
        lines += [
            f"{device}, `fused_linear_cross_entropy` of 32 768 tokens, {count} steps:", "",
            "| after step | allocated, MiB | reserved, MiB | segments | retries |",
            "|---|---|---|---|---|",
        ]  # fmt: skip
        for i in (0, count - 1):
            row = steps[i]
            sizes = [f"{row[n] / 2**20:,.1f}" for n in ("allocated", "reserved")]
            counts = [str(row[n]) for n in ("segments", "retries")]
            lines.append(f"| {i + 1} | {' | '.join(sizes + counts)} |")
        text = f"With {limit:.2f} GiB free and chunks of {asked:.2f} GiB requested, the operator "
        text += f'warned "{short["said"][0]}". The loss differed by {short["loss_difference"]:g}.'
        lines += ["", text, ""]
    return lines


def memory_page(old: str) -> str:
    """The page with current tables between its markers."""
    if old.count(MEMORY_START) != 1 or old.count(MEMORY_END) != 1:
        raise SystemExit(
            f"docs/memory.md needs the lines {MEMORY_START} and {MEMORY_END}, once each"
        )
    before, rest = old.split(MEMORY_START)
    tables = [
        "<!-- generated by `make docs` from the files in `benchmarks/results` -->", "",
        "### Predicted", "", "In GiB per device. Logits include the loss and its gradients.", "",
        *stories(), "", "### Measured", "", *measured_peaks(), "", "### Reused", "", *reused(),
    ]  # fmt: skip
    return (
        before
        + MEMORY_START
        + "\n"
        + "\n".join(tables)
        + "\n"
        + MEMORY_END
        + rest.split(MEMORY_END)[1]
    )


# --- planning ---

PLANNING_START, PLANNING_END = "<!-- planning-tables:start -->", "<!-- planning-tables:end -->"
ROWS = 14


def cards() -> list[str]:
    """Published figures that times are predicted with."""
    from liger_multi.memory.planning.cost import CARDS

    columns = "| name | card | GB | bf16, TFLOPS | fp32, TFLOPS | FP8, TFLOPS | memory, GB/s "
    lines = [
        columns + "| link, GB/s | host, GB/s | from |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key, card in CARDS.items():
        rates = [card.products16 / 1e12, card.products32 / 1e12, card.products8 / 1e12]
        rates += [rate / 1e9 for rate in (card.bandwidth, card.link, card.host)]
        shown = (f"{rate:,.6g}" if rate else "-" for rate in rates)
        cells = [f"`{key}`", card.name, f"{card.memory / 1e9:g}", *shown]
        lines.append(f"| {' | '.join([*cells, card.source])} |")
    return lines


def example() -> list[str]:
    """The committed plan's first candidates."""
    found = store.read("plan-example")
    if not found:
        return ["Not made yet: `python -m benchmarks.plans --explain`.", ""]
    from liger_multi.memory import TrainingPlan
    from liger_multi.memory.planning.result import HEADER, row_of

    made = TrainingPlan.from_data({**found[-1]["plan"], "candidates": found[-1]["rows"]})
    size = f"{made.devices} x {made.memory_bytes / 1e9:g} GB, {made.batch} sequences a step"
    lines = [f"{made.model}, {made.layers} layers, {size}; {made.simulations} steps simulated:", ""]
    lines += [f"| {' | '.join(HEADER)} |", "|" + "---|" * len(HEADER)]
    lines += [f"| {' | '.join(row_of(one))} |" for one in made.candidates[:ROWS]]
    limits = ["| limit | first way | smallest way |", "|---|---|---|"]
    limits += [f"| largest micro-batch | {made.largest_batch} | {made.most_batch} |"]
    longest = f"{made.longest_sequence:,} | {made.most_sequence:,}"
    limits += [f"| longest sequence, tokens | {longest} |"]
    if (store.ROOT / "docs" / "plan-example.png").exists():
        text = "Memory by part for each way to train, the budget as a dashed line"
        lines += ["", f"![{text}](plan-example.png)"]
    return [*lines, "", *limits, ""]


def executed() -> list[str]:
    """Executed plans; a plan that was executed again is shown in the later run."""
    lines = []
    for data in store.read("plans"):
        columns = "| model, batch x tokens | memory | way to train | micro-batch x accumulation "
        columns += "| predicted, GiB | measured, GiB | error | predicted, s | measured, s |"
        lines += [
            f"{store.device(data)}, {data['date'][:10]}:",
            "",
            columns,
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for row in data["rows"]:
            case = row["case"]
            name = f"{case['model']} {case['batch']} x {case['sequence']}"
            for run in row["runs"]:
                s, got = run["settings"], run.get("measured_bytes")
                way = run["name"].replace("stock", "baseline", 1)
                cells = [name, case["memory"], way, f"{s['micro_batch']} x {s['accumulation']}"]
                cells.append(f"{run['predicted_bytes'] / 2**30:.2f}")
                cells.append(f"{got / 2**30:.2f}" if got else run["failure"])
                cells.append(f"{run['error_percent']:+.1f} %" if got else "-")
                cells.append(f"{run['predicted_seconds']:.3f}")
                cells.append(f"{run['measured_seconds']:.3f}" if got else "-")
                lines.append(f"| {' | '.join(cells)} |")
        agreed = sum(row["order_agrees"] for row in data["rows"])
        said = f"The predicted order of speeds is the measured one in {agreed} of "
        lines += ["", f"{said}{len(data['rows'])} cases.", ""]
    return lines or ["No device has executed plans yet.", ""]


def planning_page(old: str) -> str:
    """The page with current tables between its markers."""
    if old.count(PLANNING_START) != 1 or old.count(PLANNING_END) != 1:
        raise SystemExit(
            f"docs/planning.md needs the lines {PLANNING_START} and {PLANNING_END}, once each"
        )
    before, rest = old.split(PLANNING_START)
    tables = [
        "<!-- generated by `make docs` from `liger_multi` and `benchmarks/results` -->", "",
        "### Example plan", "", *example(), "### Executed plans", "", *executed(), "### Cards", "",
        "Dense GEMMs with fp32 accumulation; links and hosts in one direction.", "", *cards(),
    ]  # fmt: skip
    return (
        before
        + PLANNING_START
        + "\n"
        + "\n".join(tables)
        + "\n"
        + PLANNING_END
        + rest.split(PLANNING_END)[1]
    )


# --- recompute ---

RECOMPUTE_START, RECOMPUTE_END = "<!-- recompute:start -->", "<!-- recompute:end -->"


def table() -> list[str]:
    """Step and peak of the newest run, by policy, unpatched and patched."""
    found = store.rows("recompute")
    data = found[-1][0]
    by: dict[str, dict[bool, Any]] = {}
    for _, row in found:
        by.setdefault(row["variant"], {})[row["patched"]] = row
    said = f"{store.device(data)}, torch {data['versions']['torch'].partition('+')[0]}, "
    said += f"{data['date'][:10]}; step and peak:"
    lines = [said, "", "| | unpatched, ms | GiB | patched, ms | GiB |", "|---|---|---|---|---|"]
    for variant, rows in by.items():
        cells = [variant]
        for patched in (False, True):
            row = rows[patched]
            cells += [f"{1e3 * row['step_seconds']:.0f}", f"{row['peak_bytes'] / 2**30:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def recompute_page(old: str) -> str:
    """The page with the current table between its markers, and its quotes."""
    if old.count(RECOMPUTE_START) != 1 or old.count(RECOMPUTE_END) != 1:
        raise SystemExit(
            f"docs/recompute.md needs the lines {RECOMPUTE_START} and {RECOMPUTE_END}, once each"
        )
    before, rest = old.split(RECOMPUTE_START)
    made = "\n".join([RECOMPUTE_START, "", *table(), "", RECOMPUTE_END])
    return store.quoted(before + made + rest.split(RECOMPUTE_END)[1])


# --- the page of the examples ---

EXAMPLES_START, EXAMPLES_END = "<!-- examples:start -->", "<!-- examples:end -->"
COMMAND = re.compile(r"^ {4}(\S.*)", re.M)


def script(name: str) -> tuple[str, str, str]:
    """What a script shows, and its commands for a CPU and for GPUs, from its first lines."""
    source = (store.ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    doc = ast.get_docstring(ast.parse(source)) or ""
    tiny, gpu = (" ".join(command.split()) for command in COMMAND.findall(doc))
    return doc.partition("\n")[0], tiny, gpu


def examples() -> list[str]:
    """A table of the scripts with what they took, and one of their commands for GPUs."""
    found = {row["example"]: (run, row) for run, row in store.rows("examples")}
    lines = ["| on a CPU | shows | time, s | CPU time, s | peak, MiB |", "|---|---|---|---|---|"]
    commands = []
    for name, (_, row) in sorted(found.items()):
        shows, tiny, gpu = script(name)
        took = f"{row['seconds']:.0f} | {row['processor_seconds']:.0f}"
        size = f"{row['peak_bytes'] / 2**20:.0f}"
        lines.append(f"| [`{tiny}`]({name}.py) | {shows} | {took} | {size} |")
        commands.append(f"    {gpu}")
    runs = [run for run, _ in found.values()]
    loads = sorted(row["load"] for _, row in found.values())
    run = max(runs, key=store.moment)
    said = f"Measured on {run['device']['cores']} CPU cores, torch {run['versions']['torch']}, "
    said += f"{run['date'][:10]}, other work beside (load average before each: {loads[0]} to "
    said += f"{loads[-1]}), which lengthens the first time and not the second:"
    gpus = "On GPUs; these commands have not been run on one:"
    return [said, "", *lines, "", gpus, "", *commands]


def examples_page(old: str) -> str:
    """The page with the current tables between its markers."""
    before, found, rest = old.partition(EXAMPLES_START)
    _, end, after = rest.partition(EXAMPLES_END)
    if not found or not end:
        raise SystemExit(f"examples/README.md needs {EXAMPLES_START} and {EXAMPLES_END} after it")
    return "\n".join([before + found, "", *examples(), "", end + after])
