"""How far every operator got on Ascend, by the levels of docs/ascend.md.

The reference on the device and the operators of torch_npu reach level 3, which is as far as there
is anything to check; levels 4 and 5 are about kernels. So the level of an operator follows from
the backend: whether its implementation reaches a kernel. For the first two levels there is one
call of every operator of torch_npu that the backend uses.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from liger_multi.dispatch.registry import module, packages

# --- levels ---

SIMULATED, COMPILED = 3, 5
KERNEL = re.compile(r"^def _\w+_kernel\(", re.M)
IMPORT = re.compile(r"^from (liger_multi\.backends\.npu[\w.]*) import ([\w, ]+|\([^)]*\))", re.M)


def level(op: str) -> int:
    """The level that an operator reaches."""
    served = module("npu", op)
    if served is None:
        return SIMULATED
    home = inspect.getfile(served)
    return COMPILED if has_kernel(Path(home)) else SIMULATED


@functools.cache
def has_kernel(file: Path) -> bool:
    """Whether a file of the backend has a kernel, or one that it imports."""
    text = file.read_text(encoding="utf-8")
    return KERNEL.search(text) is not None or any(map(has_kernel, imported(text)))


def imported(text: str) -> Iterator[Path]:
    """The files of the backend that a source imports."""
    root = folder()
    for package, names in IMPORT.findall(text):
        home = root.joinpath(*package.split(".")[3:])
        if home.with_suffix(".py").exists():
            yield home.with_suffix(".py")
        for name in re.findall(r"\w+", names):
            if (home / f"{name}.py").exists():
                yield home / f"{name}.py"


# --- calls ---


def _t(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def _ids(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


ANGLES = (1, 1, 5, 64)
# arguments by operator, and the shapes of what it returns
CALLS: dict[str, tuple[tuple[Any, ...], list[tuple[int, ...]]]] = {
    "npu_rms_norm": ((_t(2, 5, 64), _t(64), 1e-6), [(2, 5, 64), (2, 5, 1)]),
    "npu_rms_norm_backward": (
        (_t(2, 5, 64), _t(2, 5, 64), _t(64), _t(2, 5, 1).float()), [(2, 5, 64), (64,)],
    ),
    "npu_add_rms_norm": (
        (_t(2, 5, 64), _t(2, 5, 64), _t(64), 1e-6), [(2, 5, 64), (2, 5, 1), (2, 5, 64)],
    ),
    "npu_swiglu": ((_t(3, 128), -1), [(3, 64)]),
    "npu_swiglu_backward": ((_t(3, 64), _t(3, 128), -1), [(3, 128)]),
    "npu_geglu": ((_t(3, 128), -1, 1, True), [(3, 64), (3, 64)]),
    "npu_rotary_mul": ((_t(2, 4, 5, 64), _t(*ANGLES), _t(*ANGLES), "half"), [(2, 4, 5, 64)]),
    "npu_fusion_attention_v3": (
        (_t(2, 5, 4, 64), _t(2, 5, 2, 64), _t(2, 5, 2, 64), 4, "BSND"),
        [(2, 5, 4, 64), (2, 4, 5, 8), (2, 4, 5, 8), (0,), (1,), (1,)],
    ),
    "npu_fusion_attention_grad_v3": (
        (*(_t(2, 5, n, 64) for n in (4, 2, 2, 4)), 4, "BSND"),
        [(2, 5, 4, 64), (2, 5, 2, 64), (2, 5, 2, 64), (0,), ()],
    ),
    "npu_moe_token_permute": ((_t(5, 64), _ids(5, 2)), [(10, 64), (10,)]),
    "npu_moe_token_unpermute": ((_t(10, 64), _ids(10).int(), _t(5, 2)), [(5, 64)]),
    "npu_grouped_matmul": (([_t(10, 64)], [_t(3, 64, 32)]), [(10, 32)]),
    "npu_grouped_matmul_add_": (
        (_t(3, 64, 32).float(), _t(10, 64), _t(10, 32), _ids(3)), [(3, 64, 32)],
    ),
}  # fmt: skip
# what is given by name
OPTIONS: dict[str, dict[str, Any]] = {
    "npu_grouped_matmul": {"group_list": _ids(3), "split_item": 3, "group_type": 0},
}


def folder() -> Path:
    """Where the backend stands."""
    module = __import__(packages()["npu"], fromlist=["BACKEND"])
    return Path(module.__file__ or "").parent


def used() -> set[str]:
    """Names of torch_npu's operators in the backend's sources."""
    found = set()
    for file in folder().rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.ops.npu":
                found.add(node.attr)
    return found
