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
from typing import Any

import torch
from torch import Tensor

from ci.liger import cases, interpreted, kernel_cases
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


def ran(group: Any) -> dict[str, Any]:
    """The cases of a group by name."""
    return {name: attempt(case) for name, case in group()}


def every(exact: bool) -> dict[str, Found]:
    """Results of all groups; with ``exact`` also those that 16 bits are compared with."""
    made = {name: ran(group) for name, group in {**cases.GROUPS, **kernel_cases.GROUPS}.items()}
    wide = {}
    for name, (group, half) in SIXTEEN.items():
        dtype = half if torch.get_default_device().type == "cpu" else torch.bfloat16
        title = f"{name}, {NAMES[dtype]}"
        with using(dtype, dtype):
            made[title] = ran(group)
        if exact:
            with using(dtype, torch.float32):
                wide[title] = ran(group)
    return {"groups": made, "exact": wide}


def main() -> int:
    """Run the cases and save what came."""
    parser = argparse.ArgumentParser(description="Run the cases with the package that is found.")
    parser.add_argument("file")
    parser.add_argument("--alias", action="store_true")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    if asked.device != "cpu":  # which sets a mode, that every function goes through
        torch.set_default_device(asked.device)
    importlib.import_module("torch.distributed.tensor")  # the real package reads it unimported
    if asked.alias:
        importlib.import_module("liger_multi.compat.liger_kernel").install(force=True)
    elif os.environ.get(interpreted.VARIABLE) == "1":
        interpreted.prepare()
    version = importlib.import_module("importlib.metadata").version("liger-kernel")
    torch.save({"version": version, **every(exact=not asked.alias)}, asked.file)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
