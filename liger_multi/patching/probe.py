"""Run a module's own forward on a stand-in: a small copy on the CPU with random weights.

The module itself is never executed, so meta, quantised and partitioned weights are safe, and no
random state moves.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from liger_multi.patching.swap import has_own_forward, stock_class


@contextlib.contextmanager
def laboratory() -> Iterator[torch.Generator]:
    """Gradients on, autocast off, the reference backends, random state kept; gives a generator."""
    from liger_multi.config import use

    ops = {"*": "reference"}
    with (
        _disable_current_modes(),  # fake tensors have no numbers to compare
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        use(**ops),
    ):
        yield torch.Generator(device="cpu").manual_seed(20)


def random(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers on the CPU."""
    return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32).to(dtype)


def shell(module: nn.Module, sizes: dict[int, int] | None = None) -> nn.Module:
    """A copy of a module's attributes without parameters, submodules and hooks.

    Args:
        module: The module to copy; its stock class is taken.
        sizes: Integers among the attributes to replace, for a copy with smaller layers.
    """
    kind = stock_class(module)
    made: nn.Module = object.__new__(kind)
    fresh = {
        name: OrderedDict() if isinstance(value, OrderedDict) else value
        for name, value in vars(module).items()
    }
    if has_own_forward(module):
        del fresh["forward"]  # it is bound to the module
    for name, value in fresh.items():
        if sizes and type(value) is int:
            fresh[name] = sizes.get(value, value)
    vars(made).update(
        fresh,
        _parameters=dict.fromkeys(module._parameters),
        _buffers=dict(module._buffers),
        _modules={},
    )
    return made


def linear(generator: torch.Generator, inputs: int, outputs: int, bias: bool) -> nn.Linear:
    """A small linear layer on the CPU, made without the initialisers that others replace."""
    made = nn.Linear(inputs, outputs, bias=bias, device="meta", dtype=torch.float32)
    made.weight = nn.Parameter(random(generator, outputs, inputs) * 0.3)
    if bias:
        made.bias = nn.Parameter(random(generator, outputs) * 0.3)
    return made


def scalars(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """The plain attributes of a module, which its forward may depend on."""
    kinds = (int, float, bool, str, type(None))
    return tuple(
        sorted(
            ((k, v) for k, v in vars(module).items() if isinstance(v, kinds) and k != "training"),
            key=lambda pair: pair[0],
        )
    )
