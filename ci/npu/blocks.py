"""Columns a step of every Ascend kernel, found with the vendor's compiler.

``python -m ci.npu.blocks`` writes ``backends/npu/launch/<family>.yaml``: for every kernel, family
of chips and bytes of an element, the largest block with which the form that takes the most room
still compiles within the unified buffer, double buffers included.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch

from ci.npu import cases, vendor
from ci.npu.lowering import CHIPS, Chip, Launch

FOLDER = Path(__file__).parent.parent.parent / "backends" / "npu" / "launch"
SIZES = (1024, 2048, 4096, 8192, 16384)
TYPES = {2: torch.bfloat16, 4: torch.float32}
HEAD = """# Written by `python -m ci.npu.blocks` with bishengir-compile {version}, for {chip}:
# the largest blocks that leave room for double buffers in {buffer} bytes. Never run on a chip.
"""


def key(launch: Launch) -> str:
    """The name by which the table speaks of a kernel."""
    return launch.name.removeprefix("_").removesuffix("_kernel")


def grouped(launches: Iterable[Launch]) -> dict[str, list[Launch]]:
    """Forms of each kernel."""
    found = defaultdict(list)
    for launch in launches:
        found[key(launch)].append(launch)
    return dict(found)


def fits(verdict: vendor.Verdict) -> bool:
    """Whether a form compiled within the buffer, with double buffers and no scalar loops."""
    return not verdict.error and verdict.multibuffer and not verdict.scalar_loops


def largest(chip: Chip, size: int, hungriest: int = 2) -> dict[str, int]:
    """Blocks by kernel, for elements of ``size`` bytes; the suite compiles the other forms."""
    found: dict[str, int] = {}
    for block in SIZES:
        launches = cases.launches(chip, TYPES[size], dict.fromkeys(NAMES, block))
        for name, forms in grouped(launches.values()).items():
            if block != SIZES[0] and found.get(name) != block // 2:
                continue  # a smaller block failed already
            chosen = sorted(forms, key=cases.appetite)[-hungriest:]
            if all(fits(vendor.compile(form, chip)) for form in chosen):
                found[name] = block
    return found


NAMES = (
    "row_statistics", "row_gradient", "pair_sums", "pair_gradient", "norm_forward",
    "norm_backward", "norm_weight", "gated_forward", "gated_backward", "dyt_forward",
    "dyt_backward",
)  # fmt: skip


def write(chip: Chip) -> Path:
    """The table of a chip's family."""
    import importlib.metadata

    import yaml

    entries: dict[str, list[dict[str, object]]] = {name: [] for name in NAMES}
    for size in TYPES:
        for name, block in largest(chip, size).items():
            entries[name].append({"when": {"bytes": [size, size]}, "knobs": {"block": block}})
    file = FOLDER / f"{'a5' if chip.a5 else 'a2'}.yaml"
    head = HEAD.format(
        version=importlib.metadata.version("ascendnpu-ir"), chip=chip.name, buffer=chip.buffer
    )
    FOLDER.mkdir(exist_ok=True)
    body = yaml.safe_dump({"entries": entries}, sort_keys=True, default_flow_style=None)
    file.write_text(head + body, encoding="utf-8")
    return file


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chips", nargs="*", default=list(CHIPS))
    for chip in parser.parse_args().chips:
        print(write(CHIPS[chip]))


if __name__ == "__main__":
    main()
