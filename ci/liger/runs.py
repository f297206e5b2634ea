"""Runs the cases with the ``liger_kernel`` that is found: ``python -m ci.liger.runs FILE``.

With ``--alias`` that is this library. The real package runs its kernels in Triton's interpreter,
which has no arithmetic in bf16: operators run in fp32 and fp16, chunked losses in fp32 and bf16.
On another device than the CPU it runs them there, in fp32 and bf16.
What 16 bits are compared with is the real package in fp32 on the same rounded inputs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ci.liger import cases, interpreted, kernel_cases, model_cases
from ci.liger.precision import using

Found = dict[str, dict[str, Any]]
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
SIXTEEN: dict[str, tuple[Any, torch.dtype]] = {
    **{name: (cases.GROUPS[name], torch.bfloat16) for name in cases.IN_16_BITS},
    **{
        name: (group, torch.float16)
        for name, group in kernel_cases.GROUPS.items()
        if name not in kernel_cases.ONLY_FP32
    },
}
"""Groups that run in 16 bits too, with their dtype."""


def attempt(case: cases.Case) -> dict[str, Any]:
    """What a case returns, or the classes and the message of its error."""
    try:
        found = case()
    except Exception as error:
        classes = [kind.__name__ for kind in type(error).__mro__]
        return {"error": classes, "message": str(error)}
    return {k: x.detach().cpu() if isinstance(x, Tensor) else x for k, x in found.items()}


@dataclass(frozen=True)
class Part:
    """Every ``of``-th case, from the ``first`` one on, for processes that share the work."""

    first: int = 0
    of: int = 1

    def ran(self, group: Any) -> dict[str, Any]:
        """These cases of a group by name."""
        return {name: attempt(case) for name, case in [*group()][self.first :: self.of]}


def every(part: Part, exact: bool, only: str = "") -> Iterator[dict[str, Found]]:
    """Results of all groups so far; with ``exact`` also those that 16 bits are compared with.

    ``only`` is a pattern that the titles of groups have to match.
    """
    found: dict[str, Found] = {"groups": {}, "exact": {}}
    for name, group in {**cases.GROUPS, **kernel_cases.GROUPS, **model_cases.GROUPS}.items():
        if re.search(only, name):
            found["groups"][name] = part.ran(group)
            yield found
    for name, (group, half) in SIXTEEN.items():
        dtype = half if torch.get_default_device().type == "cpu" else torch.bfloat16
        title = f"{name}, {NAMES[dtype]}"
        if not re.search(only, title):
            continue
        if exact:
            with using(dtype, torch.float32):
                found["exact"][title] = part.ran(group)
        with using(dtype, dtype):
            found["groups"][title] = part.ran(group)
        yield found


def save(found: dict[str, Any], file: Path) -> None:
    """Write a whole file or nothing: a run may be cut."""
    torch.save(found, file.with_suffix(".part"))
    file.with_suffix(".part").replace(file)


def main() -> int:
    """Run the cases and save what came."""
    parser = argparse.ArgumentParser(description="Run the cases with the package that is found.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--alias", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("FIRST", "OF"))
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    started = time.perf_counter()
    if asked.device != "cpu":  # which sets a mode, that every function goes through
        torch.set_default_device(asked.device)
    importlib.import_module("torch.distributed.tensor")  # the real package reads it unimported
    if asked.alias:
        importlib.import_module("liger_multi.compat.liger_kernel").install(force=True)
    else:
        interpreted.first_configuration()
        if os.environ.get(interpreted.VARIABLE) == "1":
            interpreted.prepare()
    version = importlib.import_module("importlib.metadata").version("liger-kernel")
    for found in every(Part(*asked.part), exact=not asked.alias, only=asked.only):
        save({"version": version, **found}, asked.file)
        who, name = "alias" if asked.alias else "liger-kernel", [*found["groups"]][-1]
        seconds = time.perf_counter() - started
        print(f"{who} {asked.part}: {name} after {seconds:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
