"""Columns a step of every Ascend kernel, found with the vendor's compiler.

``python -m ci.npu.blocks`` searches and writes two things, of every kernel, chip and type of
elements: ``backends/npu/launch/<family>.yaml``, the largest block with which every form of the
kernel compiles within the unified buffer, double buffers included; and ``ci/npu/forms/<chip>.txt``,
what each of those forms takes there, and which one refuses the next larger block. A search is
finished when both ends are known, and an entry says so. tests/kernels/test_npu.py compares the
second file with today's sources, and compiles some of it again.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from ci.npu import cases, vendor
from ci.npu.lowering import CHIPS, Chip, Launch
from liger_multi.dispatch import launch as launching

HERE = Path(__file__).parent
FOLDER = HERE.parent.parent / "backends" / "npu" / "launch"
SIZES = (512, 1024, 2048, 4096, 8192, 16384)
TYPES = {2: torch.bfloat16, 4: torch.float32}
NAMES = (
    "row_statistics", "row_gradient", "pair_sums", "pair_gradient", "norm_forward",
    "norm_backward", "norm_weight", "gated_forward", "gated_backward", "dyt_forward",
    "dyt_backward", "rope",
)  # fmt: skip
# by whose elements a kernel's block is chosen
ASKED = {
    "row": "raw", "pair": "student", "norm_forward": "y", "norm_backward": "dx", "norm_weight": "x",
    "gated_forward": "y", "gated_backward": "dy", "dyt": "x", "rope": "x",
}  # fmt: skip
SIZE = {"*bf16": 2, "*fp16": 2, "*fp32": 4}
HEAD = """# Columns a step, written by `python -m ci.npu.blocks` with bishengir-compile {version} for {chip}:
# the largest with which every form of a kernel leaves room for double buffers in the {buffer}
# bytes of its unified buffer; ci/npu/forms/{chip}.txt has what each takes. Never run on a chip.
entries:
"""  # noqa: E501


@dataclass(frozen=True)
class Found:
    """What a search says of a kernel and a type of elements.

    Attributes:
        block: The largest that every form compiles with.
        forms: The forms with it, and the compiler's verdicts.
        refused: The form that does not compile with the next larger one, and why; None where the
            largest block of the search fits.
    """

    block: int
    forms: tuple[tuple[Launch, vendor.Verdict], ...]
    refused: tuple[Launch, vendor.Verdict] | None


def key(launch: Launch) -> str:
    """The name by which the table speaks of a kernel."""
    return launch.name.removeprefix("_").removesuffix("_kernel")


def grouped(launches: Iterable[Launch]) -> dict[str, list[Launch]]:
    """Forms of each kernel, the ones that want the most room first."""
    found = defaultdict(list)
    for launch in sorted(launches, key=cases.appetite, reverse=True):
        found[key(launch)].append(launch)
    return dict(found)


def fits(verdict: vendor.Verdict) -> bool:
    """Whether a form compiled within the buffer, with double buffers and no scalar loops."""
    clean = not (verdict.scalar_loops or verdict.unstructured)
    return not verdict.error and verdict.multibuffer and clean


def why(verdict: vendor.Verdict) -> str:
    """What the compiler made of a form, in a few words."""
    if verdict.error:
        return verdict.error
    loops = verdict.scalar_loops + verdict.unstructured
    said = f"{verdict.buffer} of {verdict.room} bytes"
    said += "" if verdict.multibuffer else ", without double buffers"
    return said + (f", {loops} scalar loops" if loops else "")


def size_of(launch: Launch) -> int:
    """Bytes of an element of the tensor whose block was asked for."""
    name = key(launch)
    asked = next(tensor for start, tensor in ASKED.items() if name.startswith(start))
    return SIZE[launch.signature[f"{asked}_ptr"]]


@functools.cache
def _launched(chip: Chip, block: int) -> list[Launch]:
    made: dict[str, Launch] = {}
    for dtype in TYPES.values():  # some tensors of a call may be wider than others
        made |= cases.launches(chip, dtype, dict.fromkeys(NAMES, block))
    return list(made.values())


def forms(chip: Chip, size: int, block: int) -> dict[str, list[Launch]]:
    """Forms of every kernel at a block, the hungriest first."""
    return grouped(launch for launch in _launched(chip, block) if size_of(launch) == size)


def compiled(
    launches: list[Launch], chip: Chip
) -> tuple[list[tuple[Launch, vendor.Verdict]], tuple[Launch, vendor.Verdict] | None]:
    """Verdicts of forms up to the first that does not fit, and that one."""
    made: list[tuple[Launch, vendor.Verdict]] = []
    for launch in launches:
        verdict = vendor.compile(launch, chip)
        if not fits(verdict):
            return made, (launch, verdict)
        made.append((launch, verdict))
    return made, None


def search(name: str, chip: Chip, size: int) -> Found:
    """The largest block of a kernel: down from where its hungriest form still compiles."""
    refused = None
    for block in reversed(SIZES):
        made, refusal = compiled(forms(chip, size, block)[name], chip)
        if refusal is None:
            return Found(block, tuple(made), refused)
        refused = refusal
    raise RuntimeError(f"{name}: no block of {SIZES} fits {chip.name}: {refused}")


def constants(launch: Launch) -> str:
    """How a form differs from others."""
    given = launch.constants.items()
    parts = [f"{n}={v}" for n, v in given if v is not None and n != "BLOCK"]
    absent = [n.removesuffix("_ptr") for n, v in given if v is None]
    kinds = sorted({v for v in launch.signature.values() if v[0] == "*"} - {"*i8", "*i64"})
    return " ".join([*parts, *kinds, *(["without " + ",".join(absent)] if absent else [])])


def row(size: int, launch: Launch, verdict: vendor.Verdict) -> str:
    """One line of a chip's file."""
    kind, block = vendor.KINDS[TYPES[size]], launch.constants["BLOCK"]
    said = f"{key(launch):<16}{kind:<6}{block:>6}  {launch.key[:16]}  "
    return f"{said}{why(verdict):<32}  {constants(launch)}"


def entry(size: int, found: Found, chip: Chip) -> str:
    """One entry of a launch table."""
    version = importlib.metadata.version("ascendnpu-ir")
    most = max(verdict.buffer for _, verdict in found.forms)
    said = f"finished search, bishengir-compile {version}, {chip.name}: {len(found.forms)} forms, "
    said += f"at most {most} of {chip.buffer} bytes"
    if found.refused is not None:
        said += f"; {2 * found.block}: {why(found.refused[1])}"
    text = yaml.safe_dump(said, width=10**6).splitlines()[0]
    return (
        f"  - when: {{bytes: [{size}, {size}]}}\n    config: {{block: {found.block}}}\n"
        f"    source: {text}\n"
    )


def write(chip: Chip, names: Iterable[str] = NAMES) -> list[Path]:
    """The table of a chip's family, and what the compiler said of every form."""
    table = FOLDER / f"{'a5' if chip.a5 else 'a2'}.yaml"
    listed = HERE / "forms" / f"{chip.name}.txt"
    lines, entries = [], []
    for name in sorted(names):
        entries.append(f"  {name}:\n")
        for size in TYPES:
            found = search(name, chip, size)
            entries.append(entry(size, found, chip))
            lines += [row(size, *each) for each in found.forms]
            if found.refused is not None:
                lines.append(row(size, *found.refused))
            print(lines[-1], flush=True)
    version = importlib.metadata.version("ascendnpu-ir")
    head = HEAD.format(version=version, chip=chip.name, buffer=chip.buffer)
    table.write_text(head + "".join(entries), encoding="utf-8")
    launching.table.cache_clear()
    # rows narrower than a block take a smaller one: what models launch beside the search
    kept = {text.split()[3] for text in lines}
    for dtype in TYPES.values():
        for launch in cases.launches(chip, dtype).values():
            if launch.key[:16] not in kept:
                kept.add(launch.key[:16])
                lines.append(row(size_of(launch), launch, vendor.compile(launch, chip)))
    listed.parent.mkdir(exist_ok=True)
    head = (
        f"# Written by `python -m ci.npu.blocks` with bishengir-compile {version}: kernel, type,\n"
    )
    head += "# columns a step, hash of source and arguments, the compiler's verdict, form.\n"
    listed.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    return [table, listed]


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chips", nargs="*", default=list(CHIPS))
    for chip in parser.parse_args().chips:
        for file in write(CHIPS[chip]):
            print(file)


if __name__ == "__main__":
    main()
