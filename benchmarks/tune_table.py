"""Measure a launch table on this machine: ``python -m benchmarks.tune_table`` (``make tune``).

For every operator's bench samples, each direction is timed with the launch numbers in force and
with their neighbors (those of :mod:`ci.static.launch`). A neighbor that is right and at least 3 %
faster becomes an entry of ``backends/<backend>/launch/<arch>.yaml``, which says the device, the
versions and both times, and stands before the entries of the static model. ``git diff`` shows what
was found; send that file in. Nothing is tuned at run time.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import tune
from ci.static.launch import Asked, bounds, neighbors, write
from liger_multi.dispatch import launch
from liger_multi.dispatch.op import OPS
from liger_multi.dispatch.registry import operators
from liger_multi.testing import samples

FASTER = 0.97


def questions(prim: Any, args: tuple[Any, ...], label: str) -> list[Asked]:
    """What launch numbers a call asks for, with those in force."""
    found: list[Asked] = []
    real = launch._config

    def spy(name: str, formula: Any, info: Any, shape: dict[str, int]) -> Any:
        made = real(name, formula, info, shape)
        found.append(Asked(label, name, dict(shape), made))
        return made

    launch._found.clear()
    launch._config = spy
    try:
        prim.call(*[a.clone() if n in prim.mutates else a for n, a in zip(prim.params, args)])
    finally:
        launch._config = real
    return list({a.key: a for a in found}.values())


def measure(prim: Any, args: tuple[Any, ...], label: str, device: torch.device) -> dict[str, Any]:
    """Entries by key, for one direction and sample."""
    info = launch.device_info(device)
    made = {}
    for question in questions(prim, args, label):
        with tune.Forced(question.key, None):
            base, right = tune.time_us(prim, args, device)
        best, chosen = base, None
        for config in neighbors(info, question.formula):
            with tune.Forced(question.key, config):
                try:
                    spent, found = tune.time_us(prim, args, device)
                except Exception as wrong:  # a launch that does not fit is an answer
                    print(f"    {question.key} {config}: {type(wrong).__name__}")
                    continue
            if spent < best and tune.agrees(found, right):
                best, chosen = spent, config
        print(f"{question.key} {label}: {base:.1f} us, best {best:.1f} us {chosen or ''}")
        if chosen is not None and best <= FASTER * base:
            source = f"{where(device)}: {label}, {base:.1f} -> {best:.1f} us"
            made[question.key] = {"when": bounds(question), "config": chosen, "source": source}
    return made


def where(device: torch.device) -> str:
    """The device, the versions and the day, as an entry says it."""
    name = torch.get_device_module(device).get_device_name(device)
    triton = __import__("triton").__version__
    day = datetime.date.today().isoformat()
    return f"measured on {name}, torch {torch.__version__}, triton {triton}, {day}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every operator, or some, and write this device's launch table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune_table", description=__doc__)
    parser.add_argument("--op", action="append", choices=operators(), help="default: all")
    parser.add_argument("--sample", default="", help="only samples whose name contains this")
    options = parser.parse_args(arguments)
    kind = torch.accelerator.current_accelerator()
    if kind is None or not torch.accelerator.is_available():
        parser.error("launch numbers are measured on an accelerator; this machine has none")
    device = torch.device(kind.type, 0)
    info = launch.device_info(device)
    made: dict[str, list[dict[str, Any]]] = {}
    for op in options.op or operators():
        for sample in samples.of(op):
            if sample.size != "bench" or options.sample not in sample.name:
                continue
            for direction, prim in (("forward", OPS[op].fwd), ("backward", OPS[op].bwd)):
                args = tune.arguments(op, direction, sample, device)
                for key, entry in measure(prim, args, f"{op} {sample.name}", device).items():
                    known = made.setdefault(key, [])
                    if entry["when"] not in [e["when"] for e in known]:
                        known.append(entry)
    if not made:
        print("nothing is faster than the numbers in force: no table was written")
        return 0
    print(f"wrote {write(info, made)}; see git diff")
    return 0


if __name__ == "__main__":
    sys.exit(main())
