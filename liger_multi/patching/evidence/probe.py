"""Compare a module's own forward with a formula, on a replica: a small copy with random weights.

:func:`skeleton` copies a module without its tensors. :func:`disagreement` and
:func:`differs_at_extremes` take the forward of a replica and a formula, and return how they differ,
or None. The module itself never runs. So meta, quantized and partitioned weights are safe, and
random state stays as it is.

A module that is patched in evaluation may be trained later, and the other way round. So a formula
must hold in both modes, with gradients and without. The forward must have no side effects: no
random numbers, no writes to inputs or attributes.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import itertools
import pickle
import random as random_numbers
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from liger_multi._torch_private import (
    DisableTorchFunction,
    disable_current_modes,
    get_onednn,
    set_onednn,
)
from liger_multi.modules.arguments import is_cache
from liger_multi.patching.swap import has_own_forward, unpatched_class

# --- replicas ---


@contextlib.contextmanager
def probe_context() -> Iterator[torch.Generator]:
    """The same global settings for every probe, whatever they are where ``patch`` is called.

    Gradients on, autocast off, fp32 and the CPU as defaults, the reference backends. Yields a
    generator; the state of all other random numbers is restored.
    """
    from liger_multi.dispatch.config import use

    ops: dict[str, Any] = {"*": "reference", "deterministic": False}
    with (
        disable_current_modes(),  # fake tensors have no values to compare
        DisableTorchFunction(),  # no default device, no mode of the user
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
    """PyTorch's defaults of the settings of a process that change results or raise."""
    dtype, strict = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    lenient = torch.is_deterministic_algorithms_warn_only_enabled()
    onednn = get_onednn()  # its fp32 GEMMs may be set to round to bf16
    try:
        torch.set_default_dtype(torch.float32)
        set_onednn(False)
        torch.use_deterministic_algorithms(False)
        yield
    finally:
        torch.set_default_dtype(dtype)
        set_onednn(onednn)
        torch.use_deterministic_algorithms(strict, warn_only=lenient)


def random_state() -> tuple[Any, ...]:
    """The states of the generators on the host that a forward may use."""
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
    """A copy of a module, of its original class, without parameters, buffers, submodules and hooks.

    Args:
        module: The module.
        sizes: Integers to replace among the attributes, for a copy with smaller layers.
    """
    module_class = unpatched_class(module)
    replica: nn.Module = object.__new__(module_class)
    fresh = {
        name: OrderedDict() if isinstance(value, OrderedDict) else value
        for name, value in vars(module).items()
    }
    fresh = {
        name: value
        for name, value in fresh.items()
        if not (type(value) is Tensor and value.numel() > LARGEST)
    }
    fresh |= own_copies(fresh, {})
    if has_own_forward(module):
        del fresh["forward"]  # it is bound to the module
    for name, value in fresh.items():
        if sizes and type(value) is int:
            fresh[name] = sizes.get(value, value)
    vars(replica).update(
        fresh,
        _parameters=dict.fromkeys(module._parameters),
        _buffers=dict.fromkeys(module._buffers),  # a forward that reads one was refused before
        _modules={name: None for name, child in module._modules.items() if child is None},
    )
    return replica


def with_weights(
    replica: nn.Module,
    module: nn.Module,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    sizes: Mapping[int, int] | None = None,
) -> nn.Module:
    """A replica with random parameters for a module's; ``sizes`` replaces some of their sizes."""
    for name, p in module._parameters.items():
        if p is not None:
            shape = [(sizes or {}).get(size, size) for size in p.shape]
            replica._parameters[name] = nn.Parameter(random(generator, *shape).to(dtype))
    return replica


_TABLES = frozenset(vars(nn.Module()))  # of every module
LARGEST = 2**22
"""Elements of tensors among attributes; a replica has no copy of larger ones."""
LONGEST = 2**14
"""Elements of containers that are copied; a replica shares those of longer ones, such as data."""


def own_copies(attributes: Mapping[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    """Copies of those attributes of a module that a forward may write to.

    Containers, tensors, caches, the configuration, generators and objects of the user's classes are
    copied. Parameters, buffers, submodules, functions and objects of libraries are not.

    Args:
        attributes: The attributes by name.
        memo: Copies by the ids of their originals.
    """
    copies: dict[str, Any] = {}
    for name, value in attributes.items():
        if name not in _TABLES:
            with contextlib.suppress(Exception):  # of objects that cannot be copied
                if name == "config" and value is not None and id(value) not in memo:
                    memo[id(value)] = copy.copy(value)  # without what is in it
                copied = _copy_of(value, memo)
                if copied is not value:
                    copies[name] = copied
    return copies


def _copy_of(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of a value that a forward may write to, as deep as its containers are."""
    if id(value) in memo:
        return memo[id(value)]
    if type(value) is Tensor:  # with a history, it cannot be copied
        copied: Any = value.detach().clone()
    elif isinstance(value, (list, deque, set, bytearray, dict)):
        copied = memo[id(value)] = copy.copy(value)
        is_short = len(value) <= LONGEST
        if is_short and isinstance(value, dict):
            copied.update((key, _copy_of(part, memo)) for key, part in value.items())
        elif is_short and isinstance(value, (list, deque)):
            for index, part in enumerate(value):
                copied[index] = _copy_of(part, memo)
    elif type(value) is tuple:
        parts = tuple(_copy_of(part, memo) for part in value)
        copied = value if all(a is b for a, b in zip(parts, value, strict=True)) else parts
    elif isinstance(value, torch.Generator):
        copied = torch.Generator(value.device)
        copied.set_state(value.get_state())
    elif type(value) is itertools.count:  # since Python 3.14 it has no copy but its text
        copied = itertools.count(*ast.literal_eval(f"({repr(value)[len('count(') : -1]},)"))
    elif is_cache(value) or _is_state(value):
        copied = copy.deepcopy(value)
    else:
        copied = _object(value, memo) if _is_of_user(value) else value
    memo[id(value)] = copied
    return copied


_COPIED = ("numpy", "itertools", "random")
"""Packages whose objects are numbers or counters."""
_LIBRARIES = sys.stdlib_module_names | {
    *("torch", "triton", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes"),
    *("torchao", "builtins", "liger_multi"),
}


def _is_state(value: Any) -> bool:
    package = type(value).__module__.partition(".")[0]
    return package in _COPIED and getattr(value, "size", 0) <= LARGEST


def _is_of_user(value: Any) -> bool:
    """Whether an object belongs to no library, and has attributes that a forward may write to."""
    if isinstance(value, SimpleNamespace):
        return True
    left = isinstance(value, (nn.Module, type, FunctionType, ModuleType, Enum))
    package = type(value).__module__.partition(".")[0]
    return not left and hasattr(value, "__dict__") and package not in _LIBRARIES


def _object(value: Any, memo: dict[int, Any]) -> Any:
    copied = memo[id(value)] = copy.copy(value)
    if copied is not value:
        parts = {name: _copy_of(part, memo) for name, part in vars(value).items()}
        vars(copied).update(parts)
    return copied


def linear(generator: torch.Generator, inputs: int, outputs: int, bias: bool) -> nn.Linear:
    """A small linear layer on the CPU, built without initializers, which users may replace."""
    layer = nn.Linear(inputs, outputs, bias=bias, device="meta", dtype=torch.float32)
    layer.weight = nn.Parameter(random(generator, outputs, inputs) * 0.3)
    if bias:
        layer.bias = nn.Parameter(random(generator, outputs) * 0.3)
    return layer


def scalars(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Numbers, strings and None among a module's attributes, without its mode."""
    plain = (int, float, bool, str, type(None))
    names = sorted(n for n, v in vars(module).items() if isinstance(v, plain) and n != "training")
    return tuple((name, vars(module)[name]) for name in names)


class Overridden:
    """An object with other values for some attributes.

    Attributes:
        read: Names of the other attributes that were read.
    """

    def __init__(self, original: Any, **attributes: Any) -> None:
        self.original, self.read = original, set[str]()
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.original, name)


# --- comparing a forward with a formula ---

Call: TypeAlias = Callable[..., Any]
Close: TypeAlias = Callable[[Tensor, Tensor], bool]


class Watch:
    """The attributes that a replica's forward reads, and those that it writes."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.written: set[str] = set()

    @contextlib.contextmanager
    def over(self, replica: nn.Module) -> Iterator[None]:
        """Record them within a block, by another class of the replica."""
        module_class, reads, writes = type(replica), self.read, self.written

        class Watched(module_class):  # type: ignore[valid-type, misc]
            def __getattribute__(self, name: str) -> Any:
                reads.add(name)
                return super().__getattribute__(name)

            def __setattr__(self, name: str, value: Any) -> None:
                writes.add(name)
                super().__setattr__(name, value)

            def __delattr__(self, name: str) -> None:
                writes.add(name)
                super().__delattr__(name)

        replica.__class__ = Watched
        try:
            yield
        finally:
            object.__setattr__(replica, "__class__", module_class)


MODES = ((False, True), (True, True), (True, False), (False, False))
"""Training or evaluation, with or without gradients."""


def set_mode(replica: nn.Module, training: bool) -> None:
    """What ``train`` does, which a class may override."""
    for module in replica.modules():
        module.__dict__["training"] = training


def disagreement(
    replica: nn.Module,
    stock: Call,
    formula: Call,
    inputs: Sequence[Tensor],
    close: Close,
    generator: torch.Generator,
) -> str | None:
    """How a forward differs from a formula in any mode: outputs, gradients or side effects.

    Args:
        replica: The module that both calls use.
        stock: Its own forward, called with the inputs.
        formula: The formula, called with the inputs.
        inputs: Tensors; gradients of those in floating point are compared.
        close: Whether the outputs of both agree.
        generator: For upstream gradients.
    """
    for training, grad in MODES:
        set_mode(replica, training)
        mode = "training" if training else "evaluation"
        with torch.set_grad_enabled(grad):
            difference = _difference(replica, stock, formula, inputs, close, generator)
        if difference:
            return f"{difference} in {mode}{'' if grad else ' without gradients'}"
    return None


# --- unusual numbers ---

TINY = (-38, -30, -20, -15, -12, -10, -8, -7, -6, -5, -4, -3, -2, -1)
LARGE = (1, 2, 3, 4, 5, 6)
HUGE = (9, 12, 15, 20, 30)
"""Powers of ten that inputs are multiplied by; squares of ``HUGE`` overflow in fp32."""
_CONSTANTS = (1.0, -(2.0**-20), 2.0**10, -4.0, 2.0**-60, 2.0**20)
"""Powers of two: their sums and means are exact in any order."""
_DIFFERENTIATED = 1e9
"""Largest input with a gradient: above, the third power of ``rstd`` underflows in fp32."""
_NARROWEST = 8
"""Shortest rows with gradients: those of shorter ones cancel to rounding errors."""
_ROUNDINGS = {torch.float32: 1e-4, torch.bfloat16: 2.0**-5}


def unusual(
    x: Tensor, powers: Sequence[int], generator: torch.Generator, axis: int = -1
) -> Iterator[Tensor]:
    """Inputs of the shape of ``x``: zeros, constant rows, one-hot rows, tiny and huge numbers.

    Args:
        x: Random rows.
        powers: Of ten. All rows are multiplied by the first and by the last, then every row by
            another one.
        generator: For random numbers.
        axis: The axis of a row.
    """
    for power in (min(powers), max(powers)):
        yield x * 10.0**power
    rows = x.movedim(axis, -1)
    flat = rows.reshape(-1, rows.shape[-1])
    count, size = flat.shape

    def shaped(values: Tensor) -> Tensor:
        return values.to(x.dtype).reshape(rows.shape).movedim(-1, axis).contiguous()

    for first in range(0, len(powers), count):
        factors = [10.0 ** powers[(first + i) % len(powers)] for i in range(count)]
        scales = torch.tensor(factors)
        yield shaped(flat * scales.unsqueeze(-1))
    constants = torch.tensor([_CONSTANTS[i % len(_CONSTANTS)] for i in range(count)])
    single = torch.zeros_like(flat, dtype=torch.float32)
    single[torch.arange(count), torch.arange(count) % size] = scales
    drawn = torch.rand(flat.shape, generator=generator)
    for lowest, highest in ((-38, 0), (-9, 1)):
        yield shaped(flat.sign() * 10.0 ** (lowest + (highest - lowest) * drawn))
    yield shaped(torch.zeros_like(flat))
    yield shaped(flat * (torch.arange(count) % 2).unsqueeze(-1))
    yield shaped(flat * (drawn < 0.5))
    yield shaped(constants.unsqueeze(-1).expand(flat.shape))
    yield shaped(single)


def _biases(replica: nn.Module) -> list[tuple[Any, str, nn.Parameter]]:
    """The tables of parameters that hold biases, with their names and values."""
    return [
        (table, name, p)
        for table in (module._parameters for module in replica.modules())
        for name, p in table.items()
        if p is not None and ("bias" in name or name == "beta")
    ]


@contextlib.contextmanager
def without_biases(replica: nn.Module) -> Iterator[None]:
    """Set the biases of a replica to 0 within a block: they would hide tiny numbers."""
    biases = _biases(replica)
    for table, name, p in biases:
        table[name] = nn.Parameter(torch.zeros_like(p))
    try:
        yield
    finally:
        for table, name, p in biases:
            table[name] = p


def differs_at_extremes(
    replica: nn.Module,
    stock: Call,
    formula: Call,
    inputs: Sequence[Tensor],
    generator: torch.Generator,
    powers: Sequence[int] = (*TINY, *LARGE),
    exact: bool = False,
    axis: int = -1,
) -> str | None:
    """How a forward differs from a formula for unusual numbers, in outputs or gradients; or None.

    Each row is compared relative to its own largest number. This detects a forward that clamps or
    replaces tiny numbers, rows of zeros, constant rows or huge numbers.

    Args:
        replica: The module that both calls use.
        stock: Its own forward, called with the inputs.
        formula: The formula, called with the inputs.
        inputs: Tensors; those in floating point get unusual numbers, one tensor at a time. Their
            first axis may have any length, if all have the same.
        generator: For upstream gradients.
        powers: Of ten, that inputs are multiplied by.
        exact: Whether outputs must be equal in every bit.
        axis: The axis of a row.
    """
    for position, x in enumerate(inputs):
        if not x.is_floating_point():
            continue
        for unbiased in (False, True) if _biases(replica) else (False,):
            with without_biases(replica) if unbiased else contextlib.nullcontext():
                inputs_of_x = list(unusual(x, powers, generator, axis))
                # alone, for forwards that look at all rows of a call, and all in one call
                for extreme in (*inputs_of_x[:2], torch.zeros_like(x), torch.cat(inputs_of_x)):
                    times = extreme.shape[0] // x.shape[0]
                    arguments = [torch.cat([tensor] * times) for tensor in inputs]
                    arguments[position] = extreme
                    difference = _unlike(stock, formula, arguments, generator, exact, axis)
                    if difference:
                        return difference
    x, *rest = inputs
    for value in (float("nan"), float("inf"), float("-inf")):
        arguments = [x.clone(), *rest]
        arguments[0].view(-1)[0] = value
        with torch.no_grad():
            if not torch.equal(stock(*arguments).isfinite(), formula(*arguments).isfinite()):
                return (
                    "its output differs for numbers that are equal, zero, tiny, large or not finite"
                )
    return None


def _unlike(
    stock: Call,
    formula: Call,
    inputs: Sequence[Tensor],
    generator: torch.Generator,
    exact: bool,
    axis: int,
) -> str | None:
    """How one call differs: in outputs, or in gradients of rows that are not too large."""
    leaves = [
        [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs] for _ in range(2)
    ]
    expected, actual = (
        call(*(x * 1 for x in row)) for call, row in zip((stock, formula), leaves, strict=True)
    )
    agree = _same_bits(expected, actual) if exact else rows_agree(expected, actual, axis)
    if not agree:
        return "its output differs for numbers that are equal, zero, tiny, large or not finite"
    if not expected.requires_grad or expected.shape[axis] < _NARROWEST:
        return None
    bounded: Any = True
    for x in leaves[0]:
        bounded &= x.abs().amax(axis, keepdim=True) < _DIFFERENTIATED
    upstream = random(generator, *expected.shape, dtype=expected.dtype)
    by_stock, by_ours = (
        torch.autograd.grad(y, [x for x in row if x.requires_grad], upstream, allow_unused=True)
        for y, row in ((expected, leaves[0]), (actual, leaves[1]))
    )
    for index, (a, b) in enumerate(zip(by_stock, by_ours, strict=True)):
        if a is None or b is None:
            continue  # disagreement() compares which gradients exist
        a, b = torch.where(bounded, a, 0), torch.where(bounded, b, 0)
        if rows_agree(a, b, axis, 10):
            continue
        nudged = _nudged_gradient(stock, leaves[0], index, upstream)
        noise = (torch.where(bounded, nudged, 0) - a).abs().amax(axis, keepdim=True)
        stable = noise <= 10 * _ROUNDINGS.get(a.dtype, 1e-4) * a.abs().amax(axis, keepdim=True)
        if not rows_agree(torch.where(stable, a, 0), torch.where(stable, b, 0), axis, 10):
            return "its gradient differs for numbers that are equal, zero, tiny or large"
    return None


def _nudged_gradient(stock: Call, inputs: Sequence[Tensor], index: int, upstream: Tensor) -> Tensor:
    """The gradient of a forward for inputs that differ by one rounding.

    Where this changes it, two forwards cannot be compared. An example is the norm of a constant row
    with a tiny epsilon, which normalizes the rounding error of the mean.
    """
    inputs_nudged = []
    for x in inputs:
        copied = x.detach()
        if x.requires_grad:
            nudge = torch.finfo(x.dtype).eps * (torch.arange(x.numel()).reshape(x.shape) % 3 - 1)
            copied = (copied * (1 + nudge)).to(x.dtype).requires_grad_()
        inputs_nudged.append(copied)
    leaves = [x for x in inputs_nudged if x.requires_grad]
    y = stock(*(x * 1 for x in inputs_nudged))
    (nudged,) = torch.autograd.grad(y, leaves[index], upstream, allow_unused=True)
    return torch.zeros_like(leaves[index]) if nudged is None else nudged


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def rows_agree(a: Tensor, b: Tensor, axis: int = -1, factor: float = 1.0) -> bool:
    """Whether rows agree within roundings of their own largest number, times ``factor``."""
    if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
        return False
    a, b = a.nan_to_num(0.0, 0.0, 0.0), b.nan_to_num(0.0, 0.0, 0.0)
    bound = factor * _ROUNDINGS.get(a.dtype, 1e-4) * a.abs().amax(axis, keepdim=True) + 1e-37
    return bool(((a - b).abs() <= bound).all())


def _difference(
    replica: nn.Module,
    stock: Call,
    formula: Call,
    inputs: Sequence[Tensor],
    close: Close,
    generator: torch.Generator,
) -> str | None:
    """The first difference of a forward and a formula on one set of inputs, or None.

    In order: random numbers drawn, inputs written, output, gradients of inputs and weights.
    """
    grad = torch.is_grad_enabled()
    leaves = [[x.detach().clone() for x in inputs] for _ in range(2)]
    for x in (*leaves[0], *leaves[1]):
        x.requires_grad_(grad and x.is_floating_point())
    # not the leaves themselves, which must not be written
    arguments, ours_of = ([x * 1 if x.is_floating_point() else x for x in row] for row in leaves)
    versions, drawn = [x._version for x in arguments], random_state()
    expected = stock(*arguments)
    if not _equal_states(drawn, random_state()):
        return "it draws random numbers"
    if [x._version for x in arguments] != versions:
        return "it writes to its input"
    actual = formula(*ours_of)
    if (
        not isinstance(expected, Tensor)
        or expected.dtype != actual.dtype
        or expected.shape != actual.shape
    ):
        return "its output has another form"
    if expected.requires_grad != actual.requires_grad or not close(expected, actual):
        return "its output differs"
    if not expected.requires_grad:
        return None
    upstream = random(generator, *expected.shape, dtype=expected.dtype)
    weights = [p for p in replica.parameters() if p.requires_grad]
    by_stock, by_ours = (
        torch.autograd.grad(
            y, [*(x for x in row if x.requires_grad), *weights], upstream, allow_unused=True
        )
        for y, row in ((expected, leaves[0]), (actual, leaves[1]))
    )
    for a, b in zip(by_stock, by_ours, strict=True):
        if (a is None) != (b is None):
            return "it stops a gradient"
        if a is not None and (a.dtype != b.dtype or not _almost_equal(a, b)):
            return "its gradient differs"
    return None


def _almost_equal(a: Tensor, b: Tensor) -> bool:
    """Whether gradients agree row by row; a different order of sums changes what cancels."""
    size = a.abs()
    bound = 1e-4 * size.amax(-1, keepdim=True) + 1e-6 * size.max() + 1e-9
    return bool(((a - b).abs() <= bound).all())


def _equal_states(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return torch.equal(a[0], b[0]) and a[1] == b[1] and pickle.dumps(a[2]) == pickle.dumps(b[2])
