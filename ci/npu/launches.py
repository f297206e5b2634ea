"""What operators of hybrid models start on an NPU: launches by name, for the tests.

Forward and backward run on FakeTensors of the device ``npu``, at sizes of models. A launch is an
operator of PyTorch that writes memory, or an Ascend kernel. Nothing is computed, and no time
follows from this.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_multi.backends.npu.common import launching
from liger_multi.dispatch.registry import module

NOT_STARTED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
NPU = torch.device("npu", 0)


class Case(NamedTuple):
    """Shapes of tensors by name, with B sequences of T tokens, options, and which are in fp32."""

    shapes: dict[str, tuple[Any, ...]]
    options: dict[str, Any]
    wide: str = ""


B, T = "B", "T"
ROWS, KEYS = (B, T, 8192), (B, T, 32, 128)
DELTA = dict.fromkeys("qkv", KEYS)
RULE = {"scale": 0.1, "qk_l2norm": True, "output_final_state": False}
CASES = {
    "causal_conv1d": Case({"x": ROWS, "weight": (8192, 4)}, {"activation": "silu"}),
    "gated_short_conv": Case({"x": (B, T, 6144), "weight": (2048, 3)}, {}),
    "selective_scan": Case(
        {
            "u": ROWS,
            "delta": ROWS,
            "A": (8192, 16),
            "B": (B, T, 16),
            "C": (B, T, 16),
            "D": (8192,),
            "z": ROWS,
            "delta_bias": (8192,),
        },
        {"delta_softplus": True, "output_final_state": False},
        "A D delta_bias",
    ),
    "ssd_scan": Case(
        {
            "x": (B, T, 128, 64),
            "dt": (B, T, 128),
            "A": (128,),
            "B": (B, T, 8, 128),
            "C": (B, T, 8, 128),
            "D": (128,),
            "dt_bias": (128,),
        },
        {
            "dt_softplus": True,
            "dt_min": 0.0,
            "dt_max": float("inf"),
            "chunk": 256,
            "output_final_state": False,
        },
        "A D dt_bias",
    ),
    "gated_delta_rule": Case(
        {**DELTA, "q": (B, T, 16, 128), "k": (B, T, 16, 128), "g": (B, T, 32), "beta": (B, T, 32)},
        RULE,
        "g",
    ),
    "kimi_delta_attention": Case({**DELTA, "g": KEYS, "beta": (B, T, 32)}, RULE, "g"),
}


class Count(TorchDispatchMode):
    """Launches by name, with overloads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on FakeTensors."""
        out = func(*args, **(kwargs or {}))
        writes = not func.is_view and any(isinstance(t, Tensor) for t in tree_leaves(out))
        if writes and func.overloadpacket.__name__ not in NOT_STARTED:
            self.launches[func.name()] += 1
        return out


@contextlib.contextmanager
def counted() -> Iterator[Count]:
    """Count what runs inside, kernels included: whichever module starts them, none runs."""
    count, original = Count(), launching.start

    def start(kernel: Any, pieces: int, /, *args: Any, **more: Any) -> None:
        count.launches[kernel.__name__] += 1

    with contextlib.ExitStack() as stack:
        for loaded in list(sys.modules.values()):
            if getattr(loaded, "__dict__", {}).get("start") is original:
                stack.enter_context(mock.patch.object(loaded, "start", start))
        stack.enter_context(count)
        yield count


def run(op: str, backend: str, tokens: int, batch: int = 1) -> dict[str, Count]:
    """Both directions of an operator in bf16, gates and parameters in fp32."""
    case, implementation = CASES[op], module(backend, op)
    counts = {}
    with FakeTensorMode(), torch.no_grad():
        arguments: dict[str, Any] = {
            n: torch.empty(
                [{"T": tokens, "B": batch}.get(s, s) for s in shape],
                device=NPU,
                dtype=torch.float32 if n in case.wide.split() else torch.bfloat16,
            )
            for n, shape in case.shapes.items()
        }
        contract = importlib.import_module(f"liger_multi.ops.{op}").op
        arguments |= case.options | {f"needs_{n}": True for n in arguments}
        for way, half, function in (
            ("forward", contract.fwd, implementation.forward),
            ("backward", contract.bwd, implementation.backward),
        ):
            absent = {n: n[:6] != "needs_" and None for n in half.params}
            with counted() as count:
                output = function(**{n: arguments.get(n, absent[n]) for n in half.params})
            arguments["dy"] = output[0] if isinstance(output, tuple) else output
            counts[way] = count
            del output
    return counts
