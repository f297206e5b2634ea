"""Run a module's own forward on a replica: a small copy on the CPU with random weights.

The module itself is never executed, so meta, quantized and partitioned weights are safe, and no
random state moves.
"""

from __future__ import annotations

import contextlib
import random as random_numbers
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from liger_multi.patching.replace.swap import has_own_forward, unpatched_class


@contextlib.contextmanager
def probe_context() -> Iterator[torch.Generator]:
    """The same surroundings for every probe, whatever holds where the patch is called.

    Gradients on, autocast off, fp32 by default and on the CPU, the reference backends, and every
    source of random numbers put back. Gives a generator.
    """
    from liger_multi.dispatch.config import use

    ops = {"*": "reference"}
    with (
        _disable_current_modes(),  # fake tensors have no numbers to compare
        torch._C.DisableTorchFunction(),  # nor should a default device or a user's mode interfere
        _random_state_kept(),
        _defaults(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        use(**ops),
    ):
        yield torch.Generator(device="cpu").manual_seed(20)


@contextlib.contextmanager
def _defaults() -> Iterator[None]:
    """What PyTorch starts with, of the settings of a process that change results or refuse them."""
    dtype, strict = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    lenient = torch.is_deterministic_algorithms_warn_only_enabled()
    onednn = torch._C._get_mkldnn_enabled()  # its fp32 products may be told to round to bf16
    try:
        torch.set_default_dtype(torch.float32)
        torch._C._set_mkldnn_enabled(False)
        torch.use_deterministic_algorithms(False)
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch._C._set_mkldnn_enabled(onednn)
        torch.use_deterministic_algorithms(strict, warn_only=lenient)


def random_state() -> tuple[Any, ...]:
    """The state of every source of random numbers on the host that a forward may use."""
    numpy = sys.modules.get("numpy")
    drawn = None if numpy is None else numpy.random.get_state(legacy=False)
    return torch.default_generator.get_state(), random_numbers.getstate(), drawn


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    torch_state, state, drawn = random_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random_numbers.setstate(state)
        if drawn is not None:
            sys.modules["numpy"].random.set_state(drawn)


def random(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers on the CPU."""
    return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32).to(dtype)


def skeleton(module: nn.Module, sizes: dict[int, int] | None = None) -> nn.Module:
    """A copy of a module's attributes without parameters, buffers, submodules and hooks.

    Args:
        module: The module to copy; its stock class is taken.
        sizes: Integers among the attributes to replace, for a copy with smaller layers.
    """
    kind = unpatched_class(module)
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
        _buffers=dict.fromkeys(module._buffers),  # one that a forward reads was refused before
        _modules={name: None for name, child in module._modules.items() if child is None},
    )
    return made


def linear(generator: torch.Generator, inputs: int, outputs: int, bias: bool) -> nn.Linear:
    """A small linear layer on the CPU, made without the initializers that others replace."""
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
