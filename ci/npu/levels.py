"""How far every operator got on Ascend, by the levels of docs/ascend.md.

The reference on the device and the operators of torch_npu reach level 3, which is as far as there
is anything to check; levels 4 and 5 are about kernels. So the level of an operator follows from
the backend: whether its implementation has a kernel. For the first two levels there is one
call of every operator of torch_npu that the backend uses.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import torch

from liger_multi.dispatch.registry import module, operators, packages

# --- levels ---

SIMULATED, COMPILED = 3, 5


def level(op: str) -> int:
    """The level of an operator: whether it, or what its family shares, has a kernel."""
    return COMPILED if "_kernel" in (source(op) or "") else SIMULATED


def source(op: str) -> str | None:
    """The source of an operator and of what it shares in its family; None without one."""
    served = module("npu", op)
    if served is None:
        return None
    family = Path(served.__file__).parent
    texts: dict[str, str] = {}
    waiting = [op]
    while waiting:
        name = waiting.pop()
        texts[name] = (family / f"{name}.py").read_text(encoding="utf-8")
        words = re.findall(rf"npu\.{family.name}(?:\.| import )(\w+)", texts[name])
        waiting += {word for word in words if word not in texts and word not in operators()}
    return "\n".join(texts.values())


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
        (_t(2, 5, 64), _t(2, 5, 64), _t(64), _t(2, 5, 1).float()),
        [(2, 5, 64), (64,)],
    ),
    "npu_add_rms_norm": (
        (_t(2, 5, 64), _t(2, 5, 64), _t(64), 1e-6),
        [(2, 5, 64), (2, 5, 1), (2, 5, 64)],
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
        (_t(3, 64, 32).float(), _t(10, 64), _t(10, 32), _ids(3)),
        [(3, 64, 32)],
    ),
}
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
    names = set()
    for file in folder().rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.ops.npu":
                names.add(node.attr)
    return names
