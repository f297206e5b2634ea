"""Columns a step of every Ascend kernel, found with the vendor's compiler.

``python -m ci.npu.blocks`` searches and writes two things, of every kernel, chip and type of
elements: ``backends/npu/launch/<family>.yaml``, the largest block with which every form of the
kernel compiles within the unified buffer, double buffers included; and ``ci/npu/forms/<chip>.txt``,
what each of those forms takes there, and which one refuses the next larger block. ``--kernel``
searches for some kernels and leaves what stands of the others. A search is finished when both ends
are known, and an entry says so. tests/kernels/test_npu.py compares the second file with today's
sources, and compiles some of it again.

The forms are those that the samples of every contract start. Sizes are plain arguments of the
kernels, so that a small sample compiles what a model would; samples of real sizes add the blocks of
rows that are narrower than the largest.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml

from ci.npu import levels, lowering
from ci.npu.lowering import CHIPS, Chip, Launch, caught
from ci.static import kernels
from ci.static.cases import as_on_devices, directions, launch_all
from liger_multi.backends.npu.common import launching as npu
from liger_multi.dispatch import launch as launching
from liger_multi.dispatch.backend import DeviceInfo
from liger_multi.dispatch.registry import operators
from liger_multi.grouping import grouped
from liger_multi.testing import samples

# --- forms ---

OPERATORS = [op for op in operators() if levels.level(op) == levels.COMPILED]
"""Operators that have a kernel."""


@dataclass(frozen=True)
class Form(Launch):
    """What is compiled of a launch.

    Attributes:
        size: Bytes of an element of the tensor that the block was chosen for.
    """

    size: int


def key(launch: Launch) -> str:
    """The name by which the table speaks of a kernel."""
    return launch.name.removeprefix("_").removesuffix("_kernel")


NAMES = tuple(n.removeprefix("_").removesuffix("_kernel") for n in sorted(kernels("npu")))


@contextlib.contextmanager
def blocks(block: int | None, widest: bool = True) -> Iterator[dict[str, tuple[int, int]]]:
    """Choose a block for every kernel, and collect by kernel what was chosen for which size.

    Args:
        block: Columns of a step; None takes the table's.
        widest: Whether narrow rows take it too.
    """
    chosen: dict[str, tuple[int, int]] = {}

    def config(name: str, formula: Any, device: torch.device, **shape: int) -> npu.Block:
        numbers = (
            npu.Block(block) if block else launching.launch_config(name, formula, device, **shape)
        )
        chosen[name] = (shape["bytes"], numbers.block)
        return numbers

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(npu, "launch_config", config))
        if widest:
            stack.enter_context(mock.patch.object(npu, "power_of_2", return_value=2**30))
        yield chosen


@functools.cache
def _calls(op: str, dtype: torch.dtype, real: bool) -> list[Any]:
    """Forward and backward of the samples of an operator, or of those of real sizes alone."""
    chosen = samples.compiled(op) if real else (*samples.of(op), *samples.compiled(op))
    unique = {sample.name: sample for sample in chosen}  # benchmarks are in both
    return [call for sample in unique.values() for call in directions(op, sample, dtype)]


def _info(chip: Chip, cores: int) -> DeviceInfo:
    """What the backend would say of a chip with so many cores."""
    return DeviceInfo("npu", chip.name, 1, 1, chip.buffer, cores, "a5" if chip.a5 else "a2")


@functools.cache
def forms_of(op: str, chip: Chip, dtype: torch.dtype, block: int | None = None) -> dict[str, Form]:
    """What an operator's samples launch on a chip, by what is compiled.

    With the table's blocks (None), samples of real sizes are also launched as they are: narrow rows
    take smaller blocks. Other forms have the largest block: a chip of one core leaves none without
    work, for which a launcher would split a block.
    """
    forms: dict[str, Form] = {}
    for widest in (True, False) if block is None else (True,):

        def handle(launch: Launch, widest: bool = widest) -> None:
            size, largest = chosen[key(launch)]
            if launch.constants["BLOCK"] == largest or not widest:
                form = Form(**{**vars(launch), "arguments": {}}, size=size)
                forms.setdefault(launch.key, form)

        with (
            as_on_devices(),
            launching.simulate(_info(chip, 1 if widest else chip.cores)),
            blocks(block, widest) as chosen,
            caught(handle, chip),
        ):
            launch_all(_calls(op, dtype, not widest), "npu")
    return forms


def launches_of(chip: Chip, dtype: torch.dtype, block: int | None = None) -> dict[str, Form]:
    """The same of all operators."""
    forms: dict[str, Form] = {}
    for op in OPERATORS:
        forms |= forms_of(op, chip, dtype, block)
    return forms


# By what was seen of the compiler: the mixture of two distributions takes the most, and tanh, and
# levels that are selected.
ROOM = {
    "FORMULA": (1, 2, 3, 0),
    "ACTIVATION": (0, 2, 1),
    "CAPPED": (0, 1),
    "HALF": (1, 0),
    "HIGH_FIRST": (0, 1),
}


def appetite(launch: Launch) -> tuple[int, int]:
    """How a kernel's forms rank by the room that they want: that with fewer parts left out."""
    constants = launch.constants
    features = sum(ROOM[n][int(v)] for n, v in constants.items() if n in ROOM)
    return features, -sum(v is None for v in constants.values())


# --- the search, and what it writes ---

HERE = Path(__file__).parent
FOLDER = HERE.parent.parent / "backends" / "npu" / "launch"
SIZES = (512, 1024, 2048, 4096, 8192, 16384)
TYPES = {2: torch.bfloat16, 4: torch.float32}
HEAD = """# Columns a step, written by `python -m ci.npu.blocks` with bishengir-compile {version} for {chip}:
# the largest with which every form of a kernel leaves room for double buffers in the {buffer}
# bytes of its unified buffer; ci/npu/forms/{chip}.txt has what each takes. Never run on a chip.
entries:
"""  # noqa: E501


Judged = tuple[Form, lowering.Verdict]


@dataclass(frozen=True)
class Search:
    """What a search says of a kernel and a type of elements.

    Attributes:
        block: The largest that every form compiles with.
        forms: The forms with it, and the compiler's verdicts.
        refused: The form that does not compile with the next larger one, and why; None where the
            largest block of the search fits.
    """

    block: int
    forms: list[Judged]
    refused: Judged | None


def by_kernel(forms: Iterable[Form]) -> dict[str, list[Form]]:
    """Forms of each kernel, the ones that want the most room first."""
    return grouped((key(form), form) for form in sorted(forms, key=appetite, reverse=True))


def fits(verdict: lowering.Verdict) -> bool:
    """Whether a form compiled within the buffer, with double buffers and no scalar loops."""
    clean = not (verdict.scalar_loops or verdict.unstructured)
    return not verdict.error and verdict.multibuffer and clean


def why(verdict: lowering.Verdict) -> str:
    """What the compiler made of a form, in a few words."""
    if verdict.error:
        return verdict.error
    loops = verdict.scalar_loops + verdict.unstructured
    said = f"{verdict.buffer} of {verdict.room} bytes"
    said += "" if verdict.multibuffer else ", without double buffers"
    return said + (f", {loops} scalar loops" if loops else "")


@functools.cache
def _forms(chip: Chip, size: int, block: int) -> dict[str, list[Form]]:
    """Forms of every kernel at a block, the hungriest first."""
    forms: dict[str, Form] = {}
    for dtype in TYPES.values():  # some tensors of a call may be wider than others
        forms |= launches_of(chip, dtype, block)
    return by_kernel(form for form in forms.values() if form.size == size)


def _judged(forms: list[Form], chip: Chip) -> Iterator[Judged]:
    """Verdicts of forms up to the first that does not fit."""
    for form in forms:
        verdict = lowering.compile_by_vendor(form, chip)
        yield form, verdict
        if not fits(verdict):
            return


def search(name: str, chip: Chip, size: int) -> Search:
    """The largest block of a kernel: down from where its hungriest form still compiles."""
    refused = None
    for block in reversed(SIZES):
        judged = list(_judged(_forms(chip, size, block)[name], chip))
        if fits(judged[-1][1]):
            return Search(block, judged, refused)
        refused = judged[-1]
    raise RuntimeError(f"{name}: no block of {SIZES} fits {chip.name}: {refused}")


def constants(launch: Launch) -> str:
    """How a form differs from others."""
    items = launch.constants.items()
    parts = [f"{n}={v}" for n, v in items if v is not None and n != "BLOCK"]
    absent = [n.removesuffix("_ptr") for n, v in items if v is None]
    types = sorted({v for v in launch.signature.values() if v[0] == "*"} - {"*i8", "*i64"})
    return " ".join([*parts, *types, *(["without " + ",".join(absent)] if absent else [])])


def row(form: Form, verdict: lowering.Verdict) -> str:
    """One line of a chip's file."""
    type_name, block = lowering.KINDS[TYPES[form.size]], form.constants["BLOCK"]
    said = f"{key(form):<16}{type_name:<6}{block:>6}  {form.key[:16]}  "
    return f"{said}{why(verdict):<32}  {constants(form)}"


def entry(size: int, result: Search, chip: Chip) -> str:
    """One entry of a launch table."""
    version = importlib.metadata.version("ascendnpu-ir")
    most = max(verdict.buffer for _, verdict in result.forms)
    said = f"finished search, bishengir-compile {version}, {chip.name}: {len(result.forms)} forms, "
    said += f"at most {most} of {chip.buffer} bytes"
    if result.refused is not None:
        said += f"; {2 * result.block}: {why(result.refused[1])}"
    text = yaml.safe_dump(said, width=10**6).splitlines()[0]
    return (
        f"  - when: {{bytes: [{size}, {size}]}}\n    config: {{block: {result.block}}}\n"
        f"    source: {text}\n"
    )


def _standing(chip: Chip, names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Entries of the launch table by kernel, and lines of forms, of kernels that are not named."""
    table, listed = files(chip)
    if set(names) == set(NAMES):
        return {}, []
    parts = re.split(r"^  (\w+):\n", table.read_text(encoding="utf-8"), flags=re.M)[1:]
    entries = {n: t for n, t in zip(parts[::2], parts[1::2], strict=True) if n not in names}
    lines = listed.read_text(encoding="utf-8").splitlines()
    return entries, [n for n in lines if n[0] != "#" and n.split()[0] not in names]


def files(chip: Chip) -> tuple[Path, Path]:
    """The launch table of a chip's family, and the list of forms."""
    return FOLDER / f"{'a5' if chip.a5 else 'a2'}.yaml", HERE / "forms" / f"{chip.name}.txt"


def write(chip: Chip, names: Iterable[str] = NAMES) -> list[Path]:
    """The table of a chip's family, and what the compiler said of every form."""
    table, listed = files(chip)
    entries, lines = _standing(chip, names)
    for name in names:
        entries[name] = ""
        for size in TYPES:
            result = search(name, chip, size)
            entries[name] += entry(size, result, chip)
            lines += [row(*each) for each in (*result.forms, result.refused) if each is not None]
            print(lines[-1], flush=True)
    version = importlib.metadata.version("ascendnpu-ir")
    head = HEAD.format(version=version, chip=chip.name, buffer=chip.buffer)
    text = "".join(f"  {name}:\n{entries[name]}" for name in sorted(entries))
    table.write_text(head + text, encoding="utf-8")
    launching.table.cache_clear()
    # rows narrower than a block take a smaller one: what models launch beside the search
    kept = {text.split()[3] for text in lines}
    for dtype in TYPES.values():
        for form in launches_of(chip, dtype).values():
            if form.key[:16] not in kept:
                kept.add(form.key[:16])
                lines.append(row(form, lowering.compile_by_vendor(form, chip)))
    listed.parent.mkdir(exist_ok=True)
    head = (
        f"# Written by `python -m ci.npu.blocks` with bishengir-compile {version}: kernel, type,\n"
    )
    head += "# columns a step, hash of source and arguments, the compiler's verdict, form.\n"
    lines.sort(key=lambda line: line.split()[0])  # stable: by the order of the search
    listed.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    return [table, listed]


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chips", nargs="*", default=list(CHIPS))
    parser.add_argument("--kernel", action="append", choices=NAMES, help="this one, or several")
    options = parser.parse_args()
    for chip in options.chips:
        for file in write(CHIPS[chip], options.kernel or NAMES):
            print(file)


if __name__ == "__main__":
    main()
