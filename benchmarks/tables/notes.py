"""Tables of notes: of lines that commands printed, the newest of every card."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from benchmarks import store, tables
from benchmarks.traces import plain
from liger_multi.grouping import grouped

NUMBER = r"\s*([\d.]+|nan)"
NEAR = 0.9  # of peak bandwidth
Cells: TypeAlias = "tuple[str, ...]"
KERNEL = r"(\S.*?) (\d+\.\d)(?:, |$)"


class Table(NamedTuple):
    """How the lines of some notes become rows.

    Attributes:
        notes: Name of the notes.
        heads: Of the columns.
        line: A pattern with a group for every cell; lines that it does not take are left out.
        join: Makes the rows of a table of all cells that were found.
    """

    notes: str
    heads: tuple[str, ...]
    line: str
    join: Callable[[Iterable[Cells]], list[list[str]]]


def one_each(lines: Iterable[Cells]) -> list[list[str]]:
    """A row a line."""
    return [[cell or "-" for cell in cells] for cells in lines]


def of_shapes(lines: Iterable[Cells]) -> list[list[str]]:
    """A row a line of the shapes that have several; an earlier line may have named the shape."""
    rows: dict[tuple[str, str], Cells] = {}
    shape = ""
    for named, what, *numbers in lines:
        shape = named or shape
        rows.setdefault((shape, what), (shape, what, *numbers))
    shapes = [shape for shape, _ in rows]
    return one_each(cells for cells in rows.values() if shapes.count(cells[0]) > 1)


def both_ways(lines: Iterable[Cells]) -> list[list[str]]:
    """Forward and backward of one shape as one row, and of all kernels the two longest.

    Shapes near the peak are left out.
    """
    table_rows = []
    for names, ways in grouped((cells[:2], cells[2:]) for cells in lines).items():
        numbers = zip(*(map(float, (cell or 0 for cell in way[:4])) for way in ways), strict=True)
        launches, time, least, floor = map(sum, numbers)
        if floor > NEAR * time:
            continue
        kernels = re.findall(KERNEL, ", ".join(way[4] for way in ways))
        longest = sorted(kernels, key=lambda kernel: -float(kernel[1]))[:2]
        shown = "; ".join(f"{plain(name)} {length}" for name, length in longest)
        bound = [f"{least:.1f}", f"{floor:.1f}", f"{100 * floor / time:.0f}"]
        table_rows.append(
            [*names, f"{launches:.0f}", f"{time:.1f}", *(bound if floor else "---"), shown]
        )
    return table_rows


def by_provider(lines: Iterable[Cells]) -> list[list[str]]:
    """Forward and backward of one shape and provider as one row, with the longest kernels."""
    table_rows = []
    for names, ways in grouped((cells[:3], cells[3:]) for cells in lines).items():
        launches, time = (sum(map(float, numbers)) for numbers in zip(*(way[:2] for way in ways)))
        kernels = re.findall(KERNEL, ", ".join(way[2] for way in ways))
        longest = sorted(kernels, key=lambda kernel: -float(kernel[1]))[:3]
        shown = "; ".join(f"{plain(name)} {length}" for name, length in longest)
        table_rows.append([*names, f"{launches:.0f}", f"{time:.1f}", shown])
    return table_rows


STALL = (
    rf"(\S+) +(\w+) +idle at the head, us: median{NUMBER} least{NUMBER} most{NUMBER} of \d+ heads, "
    rf"(\d+) copies to the host; kernels of a step{NUMBER} ms, idle{NUMBER} ms"
)
STALL_HEADS = (
    "model",
    "form",
    "idle at a head, us: median",
    "least",
    "most",
    "copies",
    "kernels of a step, ms",
    "idle in a step, ms",
)
HEAD = (
    rf"{NUMBER} ms +(?:x([\d.]+) +)?\(least [\d.]+\) +peak{NUMBER} MiB(?: \(gradients{NUMBER}\))?"
)
HEAD_HEADS = ("shape", "what", "ms", "over the GEMMs", "peak beyond inputs, MiB", "of it gradients")
TIMED = rf"(\S+): (.+?) {NUMBER} ms"
HYBRID = (
    rf"([^:]*), ([^,:]+): fwd{NUMBER} ms, fwd\+bwd:?(?:{NUMBER} ms, peak{NUMBER} MiB, error "
    rf"(?:on \S+ tokens )?(\S+) .*| (out of memory).*)"
)
HYBRID_HEADS = (
    "operator and sizes",
    "implementation",
    "forward, ms",
    "both, ms",
    "peak, MiB",
    "error",
    "failure",
)
NOTES = {
    "experts": Table(
        "experts-memory",
        ("form", "what trains", "forward, ms", "both, ms", "forward, MiB", "both, MiB"),
        rf"(before|after) (\w+) fwd{NUMBER} both{NUMBER} peak of forward, MiB{NUMBER} of both "
        rf"beyond gradients{NUMBER}",
        one_each,
    ),
    "small": Table(
        "small-steps-turns",
        ("model", "ours / unpatched"),
        r"after: (\S+) ours / unpatched, .*; median ([\d.]+);.*",
        one_each,
    ),
    "make-bench": Table(
        "make-bench",
        ("run", "who", "tokens/s", "of unpatched", "GiB", "loss", "± %", "first turn, s"),
        rf"(\S+:\S+) +(stock|liger|ours){NUMBER} tok/s{NUMBER} x stock{NUMBER} GiB  loss{NUMBER}  "
        rf"\+-{NUMBER} %  turns of{NUMBER} s .*",
        one_each,
    ),
    "ahead": Table("stalls-ahead", ("logits", *STALL_HEADS), rf"(\w+) +{STALL}", one_each),
    "stalls": Table("stalls", STALL_HEADS, rf"new +{STALL}", one_each),
    "heads": Table(
        "head-kernels",
        ("shape", "what", "kernels, ms", "GEMMs, ms", "others, ms", "idle, ms", "kernels / GEMMs"),
        rf"(\S+) (.+?) +kernels{NUMBER} ms \(GEMMs{NUMBER}, others{NUMBER}\), idle{NUMBER} *"
        rf"(?:{NUMBER} x the bare GEMMs)?",
        one_each,
    ),
    "fusion": Table(
        "head-fusion",
        ("shape", "what", "median, ms", "least, ms"),
        rf"(\S+) (.+?) +{NUMBER} ms, least{NUMBER}",
        one_each,
    ),
    "operators": Table(
        "operator-kernels",
        (
            "operator",
            "shape",
            "launches",
            "kernels, us",
            "least, MiB",
            "at a copy's rate, us",
            "% of peak",
            "longest kernels, us",
        ),
        rf"(\w+) ((?:(?! by ).)+)(?: by ours)? (?:forward|backward): (\d+) launches,{NUMBER} us"
        rf"(?:, least{NUMBER} MiB ={NUMBER} us:\s*\d+ %)?; (.*)",
        both_ways,
    ),
    "peers": Table(
        "peer-kernels",
        ("operator", "shape", "who", "launches", "kernels, us", "longest kernels, us"),
        rf"(\w+) (.+) by (\S+) (?:forward|backward): (\d+) launches,{NUMBER} us[^;]*; (.*)",
        by_provider,
    ),
    "sparse-layers": Table(
        "sparse-layers",
        ("who", "tokens", "ms", "GiB", "failure"),
        rf"(stock|ours) +(\d+) +(?:{NUMBER} ms{NUMBER} GiB|CUDA (out of memory).*)",
        one_each,
    ),
    "rotated-norms": Table(
        "rotated-norms",
        ("model", "norm and rotation", "GEMMs, ms", "attention, ms", "element-wise, ms"),
        rf"(\S+) +(apart|together) +GEMMs{NUMBER} attention{NUMBER} element-wise{NUMBER} ms",
        one_each,
    ),
    "lora-experts": Table(
        "lora-experts",
        ("adapters", "who", "ms", "of PEFT's", "extra MiB", "of PEFT's"),
        rf"(\w+) adapters +(stock|ours){NUMBER}{NUMBER}{NUMBER}{NUMBER}",
        one_each,
    ),
    "head-lean": Table(
        "head-lean",
        HEAD_HEADS,
        rf"(?:(\S+): )?(three whole GEMMs|lean, \S+ ignored) +{HEAD}",
        of_shapes,
    ),
    "row-parts": Table("head-row-parts", ("shape", "what", "ms"), TIMED, one_each),
    "lean-gemms": Table("lean-gemms", ("rows, width, classes", "GEMM", "ms"), TIMED, one_each),
    "head-chunks": Table(
        "head-chunks",
        HEAD_HEADS,
        rf"(?:(16384x2048x151936): )?(three whole GEMMs|auto|chunk \d+) +{HEAD}",
        of_shapes,
    ),
    "decode": Table(
        "decode-rows",
        ("model", "decode, tokens/s", "training step, ms"),
        rf"\[.*?\] (patched.*?) ([\d.]+) tokens/s{NUMBER} ms a step",
        one_each,
    ),
    "decode-gemm": Table(
        "decode-rows",
        ("outputs", "inputs", "rows of a tile", "peer", "one row, us"),
        r"\[.*?\] {'cols': (\d+), 'inner': (\d+), 'tile': (?:\((256|64|16), 128, .*?\)|'(library)')"
        r".*'us_of_1': ([\d.]+),.*",
        one_each,
    ),
    "hybrid-models": Table(
        "hybrid-models",
        ("model", "tokens", "who", "tokens/s", "GiB", "failure"),
        rf"(\S+) (\d+[ a-z]*), (patched|unpatched)(?:, \[tokens/s\]:{NUMBER}; "
        rf"peak \[GiB\]:{NUMBER}; .*|: (out of memory))",
        one_each,
    ),
    "hybrid-memory": Table(
        "hybrid-memory",
        ("model", "tokens", "who", "GiB"),
        rf"(\S+) (\d+) checkpointing, (patched|unpatched), peak \[GiB\]:{NUMBER}",
        one_each,
    ),
    "hybrid-peers": Table("hybrid-peers", HYBRID_HEADS, HYBRID, one_each),
    "hybrid-operators": Table(
        "hybrid-operators", HYBRID_HEADS, f"(?!gated_delta_rule){HYBRID}", one_each
    ),
    "selective-scan": Table("selective-scan", HYBRID_HEADS, HYBRID, one_each),
    "hybrid-fallbacks": Table(
        "hybrid-fallbacks",
        ("function and sizes", "transformers, ms", "MiB", "operator, ms", "MiB"),
        rf"([^:]+): transformers{NUMBER} ms [^,]*,{NUMBER} MiB; operator{NUMBER} ms [^,]*,"
        rf"{NUMBER} MiB; .*",
        one_each,
    ),
    "ascend-launches": Table(
        "ascend-launches",
        ("operator", "backend", "launches", "GiB"),
        rf"(\w+) both (npu|reference):{NUMBER} launches,{NUMBER} GiB",
        one_each,
    ),
    "adapters": Table(
        "adapter-kernels",
        ("layers", "precision", "who", "launches", "kernels, ms", "host, ms", "both, ms"),
        rf"([^,]+), ([^:]+): (\w+) +(\d+) launches, kernels{NUMBER} ms, the host enqueues in"
        rf"{NUMBER} ms, both{NUMBER} ms",
        one_each,
    ),
}


def rows(table: Table, lines: Iterable[str]) -> list[list[str]]:
    """Cells of the lines that are rows; others are headings or lists of kernels."""
    matches = [re.fullmatch(table.line, line.strip()) for line in lines]
    return table.join(match.groups() for match in matches if match)


def block(name: str) -> str:
    """The table of the newest notes of every card."""
    known, parts = NOTES[name], []
    newest: dict[str, Mapping[str, Any]] = {
        store.device(run): run for run in store.read("notes") if run["name"] == known.notes
    }
    for card, run in newest.items():
        said = f"{card}, {run['date'][:10]}, commit {run['commit']}:"
        parts.append("\n".join([said, "", *tables.table(known.heads, rows(known, run["rows"]))]))
    return "\n\n".join(parts)


TABLES: dict[str, Callable[[], str]] = {f"notes-{name}": partial(block, name) for name in NOTES}
