"""Measured figures that pages have by hand, and whether the notes of a result have them.

A measured figure is a number with a unit of time, rate, size or share (``1.4 ms``, ``3 x``), every
number of a list that ends in one (``83 and 80 %``), and every number with a decimal part. No
figures, by their form: code (options, limits, commands), versions, shapes (``8192x4096``), names
with digits (``Llama-3.2-1B``), and a table's column of targets. What comes from a measured row is
a quote (:mod:`benchmarks.store`), which is none by hand either. What comes from notes stands in
a paragraph, list item or table row that names them (```benchmarks/results/cpu.json#lora-host```),
and in the notes with the same digits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks import store

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
