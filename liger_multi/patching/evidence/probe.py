"""Run a module's own forward on a replica: a small copy on the CPU with random weights.

The module itself is never executed, so meta, quantized and partitioned weights are safe, and no
random state moves.

A replica is compared with a formula in every mode, by its outputs and by its gradients. A module
that is patched in evaluation will train, and the other way round. So a formula has to hold in both
modes, with gradients and without, and the forward may do nothing else: draw no random numbers,
write to no input and to no attribute.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import random as random_numbers
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from liger_multi._torch_private import (
    DisableTorchFunction,
    disable_current_modes,
    get_onednn,
    set_onednn,
)
from liger_multi.arguments import is_cache
from liger_multi.patching.swap import has_own_forward, unpatched_class

# --- replicas ---


@contextlib.contextmanager
def probe_context() -> Iterator[torch.Generator]:
    """The same surroundings for every probe, whatever holds where the patch is called.

    Gradients on, autocast off, fp32 by default and on the CPU, the reference backends, and every
    source of random numbers put back. Gives a generator.
    """
    from liger_multi.dispatch.config import use

    ops: dict[str, Any] = {"*": "reference", "deterministic": False}
    with (
        disable_current_modes(),  # fake tensors have no numbers to compare
        DisableTorchFunction(),  # nor should a default device or a user's mode interfere
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
    onednn = get_onednn()  # its fp32 products may be told to round to bf16
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
        module: The module to copy; its original class is taken.
        sizes: Integers among the attributes to replace, for a copy with smaller layers.
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
        _buffers=dict.fromkeys(module._buffers),  # one that a forward reads was refused before
        _modules={name: None for name, child in module._modules.items() if child is None},
    )
    return replica


_TABLES = frozenset(vars(nn.Module()))  # of every module
LARGEST = 2**22
"""Elements of a tensor among attributes that a replica has a copy of; larger ones it lacks."""


def own_copies(attributes: Mapping[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    """Copies of what a forward may write to among a module's attributes, which are its user's.

    Containers, tensors, caches and the configuration are copied; parameters, buffers, submodules
    and whatever else a container holds are not.

    Args:
        attributes: Of the module, by name.
        memo: Copies by the ids of the objects that they were made of.
    """
    copies: dict[str, Any] = {}
    for name, value in attributes.items():
        if name not in _TABLES:
            with contextlib.suppress(Exception):  # of objects that nobody can copy
                configured = name == "config" and value is not None
                own = _configuration(value, memo) if configured else _own(value, memo)
                if own is not value:
                    copies[name] = own
    return copies


def _configuration(config: Any, memo: dict[int, Any]) -> Any:
    if id(config) not in memo:
        memo[id(config)] = copy.copy(config)
    return memo[id(config)]


def _own(value: Any, memo: dict[int, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if type(value) is Tensor:  # one with a history cannot be copied, but cloned
        own: Any = value.detach().clone()
    elif isinstance(value, (list, deque, set, bytearray, dict)):
        own = memo[id(value)] = copy.copy(value)
        if isinstance(value, dict):
            own.update((key, _own(part, memo)) for key, part in value.items())
        elif isinstance(value, (list, deque)):
            for place, part in enumerate(value):
                own[place] = _own(part, memo)
    elif type(value) is tuple:
        parts = tuple(_own(part, memo) for part in value)
        own = value if all(a is b for a, b in zip(parts, value, strict=True)) else parts
    else:
        own = copy.deepcopy(value) if is_cache(value) else value
    memo[id(value)] = own
    return own


def linear(generator: torch.Generator, inputs: int, outputs: int, bias: bool) -> nn.Linear:
    """A small linear layer on the CPU, made without the initializers that others replace."""
    layer = nn.Linear(inputs, outputs, bias=bias, device="meta", dtype=torch.float32)
    layer.weight = nn.Parameter(random(generator, outputs, inputs) * 0.3)
    if bias:
        layer.bias = nn.Parameter(random(generator, outputs) * 0.3)
    return layer


def scalars(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """The plain attributes of a module, which its forward may depend on."""
    kinds = (int, float, bool, str, type(None))
    return tuple(
        sorted(
            ((k, v) for k, v in vars(module).items() if isinstance(v, kinds) and k != "training"),
            key=lambda pair: pair[0],
        )
    )


# --- two forwards, compared ---

Call: TypeAlias = Callable[..., Any]
Close: TypeAlias = Callable[[Tensor, Tensor], bool]


class Watch:
    """The attributes that a replica's forward asks for, and those that it sets."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.written: set[str] = set()

    @contextlib.contextmanager
    def over(self, replica: nn.Module) -> Iterator[None]:
        """Give the replica a class that notes them."""
        module_class, read, written = type(replica), self.read, self.written

        class Watched(module_class):  # type: ignore[valid-type, misc]
            def __getattribute__(self, name: str) -> Any:
                read.add(name)
                return super().__getattribute__(name)

            def __setattr__(self, name: str, value: Any) -> None:
                written.add(name)
                super().__setattr__(name, value)

            def __delattr__(self, name: str) -> None:
                written.add(name)
                super().__delattr__(name)

        replica.__class__ = Watched
        try:
            yield
        finally:
            object.__setattr__(replica, "__class__", module_class)


MODES = ((False, True), (True, True), (True, False), (False, False))
"""Training or not, with gradients or without."""


def set_mode(replica: nn.Module, training: bool) -> None:
    """As ``train`` does, which a class may have replaced."""
    for module in replica.modules():
        module.__dict__["training"] = training


def disagreement(
    replica: nn.Module,
    stock: Call,
    ours: Call,
    inputs: Sequence[Tensor],
    close: Close,
    generator: torch.Generator,
) -> str | None:
    """Where a formula leaves a forward: in a mode, in a gradient or in what else happens.

    Args:
        replica: The module of both calls.
        stock: Its own forward, called with the inputs.
        ours: The formula, called with the same.
        inputs: Tensors; gradients by those of floating point are compared.
        close: Whether an output of the original's and one of ours agree.
        generator: For upstream gradients.
    """
    for training, grad in MODES:
        set_mode(replica, training)
        mode = "training" if training else "evaluation"
        with torch.set_grad_enabled(grad):
            difference = _difference(replica, stock, ours, inputs, close, generator)
        if difference:
            return f"{difference} in {mode}{'' if grad else ' without gradients'}"
    return None


# --- numbers that a probe meets and training rarely does ---

TINY = (-38, -30, -20, -15, -12, -10, -8, -7, -6, -5, -4, -3, -2, -1)
LARGE = (1, 2, 3, 4, 5, 6)
HUGE = (9, 12, 15, 20, 30)
"""Powers of ten that inputs are multiplied by; squares of the last ones are infinite in fp32."""
_CONSTANTS = (1.0, -(2.0**-20), 2.0**10, -4.0, 2.0**-60, 2.0**20)
"""Powers of two, whose sums and means are exact in any order."""
_DIFFERENTIATED = 1e9
"""Above it, third powers of the factor of a norm are 0 in fp32, and so no gradient is right."""
_NARROWEST = 8
"""Gradients of shorter rows are differences of nearly equal numbers."""
_ROUNDINGS = {torch.float32: 1e-4, torch.bfloat16: 2.0**-5}


def unusual(
    x: Tensor, powers: Sequence[int], generator: torch.Generator, axis: int = -1
) -> Iterator[Tensor]:
    """Inputs of the form of ``x``: zeros, constant rows, one number a row, tiny and huge numbers.

    Args:
        x: Random rows.
        powers: Of ten, by which rows are multiplied: each by another, and first all by one.
        generator: For what is drawn.
        axis: The one that a row lies along.
    """
    for power in (min(powers), max(powers)):
        yield x * 10.0**power
    rows = x.movedim(axis, -1)
    flat = rows.reshape(-1, rows.shape[-1])
    count, size = flat.shape

    def shaped(values: Tensor) -> Tensor:
        return values.to(x.dtype).reshape(rows.shape).movedim(-1, axis).contiguous()

    for first in range(0, len(powers), count):
        some = [10.0 ** powers[(first + i) % len(powers)] for i in range(count)]
        several = torch.tensor(some)
        yield shaped(flat * several.unsqueeze(-1))
    constants = torch.tensor([_CONSTANTS[i % len(_CONSTANTS)] for i in range(count)])
    single = torch.zeros_like(flat, dtype=torch.float32)
    single[torch.arange(count), torch.arange(count) % size] = several
    drawn = torch.rand(flat.shape, generator=generator)
    for lowest, highest in ((-38, 0), (-9, 1)):
        yield shaped(flat.sign() * 10.0 ** (lowest + (highest - lowest) * drawn))
    yield shaped(torch.zeros_like(flat))
    yield shaped(flat * (torch.arange(count) % 2).unsqueeze(-1))
    yield shaped(flat * (drawn < 0.5))
    yield shaped(constants.unsqueeze(-1).expand(flat.shape))
    yield shaped(single)


def _biases(replica: nn.Module) -> list[tuple[Any, str, nn.Parameter]]:
    """Where biases stand, their names and values."""
    return [
        (table, name, p)
        for table in (module._parameters for module in replica.modules())
        for name, p in table.items()
        if p is not None and ("bias" in name or name == "beta")
    ]


@contextlib.contextmanager
def without_biases(replica: nn.Module) -> Iterator[None]:
    """Biases of a replica are 0, which would hide what happens to tiny numbers."""
    before = _biases(replica)
    for table, name, p in before:
        table[name] = nn.Parameter(torch.zeros_like(p))
    try:
        yield
    finally:
        for table, name, p in before:
            table[name] = p


def differs_at_extremes(
    replica: nn.Module,
    stock: Call,
    ours: Call,
    inputs: Sequence[Tensor],
    generator: torch.Generator,
    powers: Sequence[int] = (*TINY, *LARGE),
    exact: bool = False,
    axis: int = -1,
) -> str | None:
    """Whether a forward treats some numbers in a way of its own, or their gradients.

    Every row is compared for itself, by its largest number: so a forward that bounds or replaces
    tiny numbers, rows of zeros, constant rows or huge numbers is seen.

    Args:
        replica: The module of both calls.
        stock: Its own forward, called with the inputs.
        ours: The formula, called with the same.
        inputs: Tensors; those of floating point take unusual numbers, one at a time. Their first
            axis may have any length, if it is the same for all.
        generator: For upstream gradients.
        powers: Of ten, by which inputs are multiplied.
        exact: Whether outputs agree in every bit.
        axis: The one that a row lies along.
    """
    for at, x in enumerate(inputs):
        if not x.is_floating_point():
            continue
        for bare in (False, True) if _biases(replica) else (False,):
            with without_biases(replica) if bare else contextlib.nullcontext():
                several = list(unusual(x, powers, generator, axis))
                # one by one where a forward may look at all rows at once, and all rows in one call
                for extreme in (*several[:2], torch.zeros_like(x), torch.cat(several)):
                    times = extreme.shape[0] // x.shape[0]
                    arguments = [torch.cat([other] * times) for other in inputs]
                    arguments[at] = extreme
                    difference = _unlike(stock, ours, arguments, generator, exact, axis)
                    if difference:
                        return difference
    x, *more = inputs
    for number in (float("nan"), float("inf"), float("-inf")):
        arguments = [x.clone(), *more]
        arguments[0].view(-1)[0] = number
        with torch.no_grad():
            if not torch.equal(stock(*arguments).isfinite(), ours(*arguments).isfinite()):
                return (
                    "its output differs for numbers that are equal, zero, tiny, large or not finite"
                )
    return None


def _unlike(
    stock: Call,
    ours: Call,
    inputs: Sequence[Tensor],
    generator: torch.Generator,
    exact: bool,
    axis: int,
) -> str | None:
    """What differs in one call: outputs, or gradients where all numbers are finite."""
    leaves = [
        [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs] for _ in range(2)
    ]
    expected, got = (
        call(*(x * 1 for x in row)) for call, row in zip((stock, ours), leaves, strict=True)
    )
    same = _same_bits(expected, got) if exact else alike(expected, got, axis)
    if not same:
        return "its output differs for numbers that are equal, zero, tiny, large or not finite"
    if not expected.requires_grad or expected.shape[axis] < _NARROWEST:
        return None
    bounded: Any = True
    for x in leaves[0]:
        bounded &= x.abs().amax(axis, keepdim=True) < _DIFFERENTIATED
    upstream = random(generator, *expected.shape, dtype=expected.dtype)
    by_stock, by_ours = (
        torch.autograd.grad(y, [x for x in row if x.requires_grad], upstream, allow_unused=True)
        for y, row in ((expected, leaves[0]), (got, leaves[1]))
    )
    for index, (a, b) in enumerate(zip(by_stock, by_ours, strict=True)):
        if a is None or b is None:
            continue  # which gradients there are, all other probes compare
        a, b = torch.where(bounded, a, 0), torch.where(bounded, b, 0)
        if alike(a, b, axis, 10):
            continue
        nudged = _nudged_gradient(stock, leaves[0], index, upstream)
        noise = (torch.where(bounded, nudged, 0) - a).abs().amax(axis, keepdim=True)
        known = noise <= 10 * _ROUNDINGS.get(a.dtype, 1e-4) * a.abs().amax(axis, keepdim=True)
        if not alike(torch.where(known, a, 0), torch.where(known, b, 0), axis, 10):
            return "its gradient differs for numbers that are equal, zero, tiny or large"
    return None


def _nudged_gradient(stock: Call, inputs: Sequence[Tensor], index: int, upstream: Tensor) -> Tensor:
    """A gradient of the forward for inputs that differ by a rounding.

    Where it is another one, no comparison tells two forwards apart: a norm of a constant row with a
    tiny epsilon normalizes the rounding of its mean.
    """
    near = []
    for x in inputs:
        copied = x.detach()
        if x.requires_grad:
            nudge = torch.finfo(x.dtype).eps * (torch.arange(x.numel()).reshape(x.shape) % 3 - 1)
            copied = (copied * (1 + nudge)).to(x.dtype).requires_grad_()
        near.append(copied)
    leaves = [x for x in near if x.requires_grad]
    y = stock(*(x * 1 for x in near))
    (nudged,) = torch.autograd.grad(y, leaves[index], upstream, allow_unused=True)
    return torch.zeros_like(leaves[index]) if nudged is None else nudged


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def alike(a: Tensor, b: Tensor, axis: int = -1, by: float = 1.0) -> bool:
    """Every row for itself, by its largest number."""
    if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
        return False
    a, b = a.nan_to_num(0.0, 0.0, 0.0), b.nan_to_num(0.0, 0.0, 0.0)
    bound = by * _ROUNDINGS.get(a.dtype, 1e-4) * a.abs().amax(axis, keepdim=True) + 1e-37
    return bool(((a - b).abs() <= bound).all())


def _difference(
    replica: nn.Module,
    stock: Call,
    ours: Call,
    inputs: Sequence[Tensor],
    close: Close,
    generator: torch.Generator,
) -> str | None:
    grad = torch.is_grad_enabled()
    leaves = [[x.detach().clone() for x in inputs] for _ in range(2)]
    for x in (*leaves[0], *leaves[1]):
        x.requires_grad_(grad and x.is_floating_point())
    # not the leaves themselves, to which nobody may write
    arguments, mine = ([x * 1 if x.is_floating_point() else x for x in row] for row in leaves)
    versions, drawn = [x._version for x in arguments], random_state()
    expected = stock(*arguments)
    if not _equal_states(drawn, random_state()):
        return "it draws random numbers"
    if [x._version for x in arguments] != versions:
        return "it writes to its input"
    got = ours(*mine)
    if (
        not isinstance(expected, Tensor)
        or expected.dtype != got.dtype
        or expected.shape != got.shape
    ):
        return "its output has another form"
    if expected.requires_grad != got.requires_grad or not close(expected, got):
        return "its output differs"
    if not expected.requires_grad:
        return None
    upstream = random(generator, *expected.shape, dtype=expected.dtype)
    weights = [p for p in replica.parameters() if p.requires_grad]
    by_stock, by_ours = (
        torch.autograd.grad(
            y, [*(x for x in row if x.requires_grad), *weights], upstream, allow_unused=True
        )
        for y, row in ((expected, leaves[0]), (got, leaves[1]))
    )
    for a, b in zip(by_stock, by_ours, strict=True):
        if (a is None) != (b is None):
            return "it stops a gradient"
        if a is not None and (a.dtype != b.dtype or not _near(a, b)):
            return "its gradient differs"
    return None


def _near(a: Tensor, b: Tensor) -> bool:
    """Every row for itself; sums in another order differ by what they cancel."""
    size = a.abs()
    bound = 1e-4 * size.amax(-1, keepdim=True) + 1e-6 * size.max() + 1e-9
    return bool(((a - b).abs() <= bound).all())


def _equal_states(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return torch.equal(a[0], b[0]) and a[1] == b[1] and pickle.dumps(a[2]) == pickle.dumps(b[2])
