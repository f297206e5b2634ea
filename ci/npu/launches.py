"""What operators of hybrid models start on an NPU: launches by name, for the tests.

Forward and backward run on FakeTensors of the device ``npu``, at sizes of models. A launch is an
operator of PyTorch that writes memory, or an Ascend kernel. Nothing is computed, and no time
follows from this.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ci.static.cases import directions, launch_all
from liger_multi.backends.npu.common import launching
from liger_multi.dispatch.registry import OPS, operators
from liger_multi.testing import samples

NOT_STARTED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
NPU = torch.device("npu", 0)
HYBRIDS = [op for op in operators() if OPS[op].family == "linear_attention"]
"""Operators of hybrid models, whose launches are counted."""


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


def on_device(t: Tensor) -> Tensor:
    """A tensor of the same layout on the device; under FakeTensorMode one without values."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=NPU)


def run(op: str, backend: str, tokens: int, batch: int = 1) -> dict[str, Count]:
    """Both directions of the contract's first benchmark, with other tokens and sequences.

    Tensors are in bf16 but for those that the contract has in fp32.
    """
    sample = next(s for s in samples.of(op) if s.size == "bench")
    lead = next(iter(sample.tensors.values())).shape[:2]
    tensors = {
        name: replace(t, shape=(batch, tokens, *t.shape[2:])) if t.shape[:2] == lead else t
        for name, t in sample.tensors.items()
    }
    counts = {}
    for call in directions(op, replace(sample, tensors=tensors), torch.bfloat16):
        with FakeTensorMode(), torch.no_grad(), counted() as count:
            launch_all([call], backend, on_device)
        counts[call[0].direction] = count
    return counts
