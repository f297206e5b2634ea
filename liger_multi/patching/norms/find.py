"""Norms, and activations that are one operator: which instances compute one of the known kinds.

A replica of the module runs on random numbers, and its outputs and gradients are compared with
every formula of :data:`liger_multi.patching.norms.kinds.NORM_KINDS`.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from liger_multi._torch_private import BatchNorms
from liger_multi.patching import registered
from liger_multi.patching.changes import Change, Replace, Restore
from liger_multi.patching.evidence.branches import Outcomes
from liger_multi.patching.evidence.probe import (
    HUGE,
    LARGE,
    MODES,
    TINY,
    Call,
    Watch,
    differs_at_extremes,
    disagreement,
    probe_context,
    random,
    scalars,
    set_mode,
    skeleton,
)
from liger_multi.patching.evidence.reached import Reached
from liger_multi.patching.evidence.signature import code_of, functions_of, signature_of
from liger_multi.patching.norms.fused import FusedNorm, NormSettings, apply_norm
from liger_multi.patching.norms.kinds import (
    EPS_NAMES,
    GATE_NAMES,
    GROUP_NAMES,
    HEADS_NAMES,
    INPUT_NAMES,
    TENSOR_NAMES,
    NormKind,
)
from liger_multi.patching.options import Options, Request
from liger_multi.patching.report import Skipped
from liger_multi.patching.swap import Swap, conflict_of, stock_class, unpatched_class


class _Looks(NamedTuple):
    """What tells a norm before it is run.

    Attributes:
        module: An instance.
        module_class: Its class without a patch.
        roles: What its parameters are by their names, None for an unknown one.
    """

    module: nn.Module
    module_class: type[nn.Module]
    roles: set[str | None]

    @property
    def has_eps(self) -> bool:
        """Whether it has a number that keeps it from dividing by zero."""
        return any(hasattr(self.module, name) for name in EPS_NAMES)

    def elements(self, role: str) -> int:
        """The size of a parameter; 0 where there is none."""
        parameters = [self.module._parameters.get(name) for name in TENSOR_NAMES[role]]
        return next((p.numel() for p in parameters if p is not None), 0)

    def takes(self, count: int, last: Sequence[str]) -> bool:
        """Whether forward takes so many arguments, the last of which has one of these names."""
        try:
            names = list(inspect.signature(self.module_class.forward).parameters)
        except (TypeError, ValueError):
            return False
        return len(names) == 1 + count and names[-1] in last


_LOOKS: tuple[tuple[str | None, Callable[[_Looks], bool]], ...] = (
    (None, lambda m: bool(m.module._modules)),
    (None, lambda m: any(b is not None for b in m.module._buffers.values())),
    (None, lambda m: None in m.roles),
    (None, lambda m: isinstance(m.module, (nn.GroupNorm, BatchNorms))),
    ("layer_norm", lambda m: isinstance(m.module, nn.LayerNorm)),
    ("dyt", lambda m: "alpha" in m.roles),
    (
        "relu_squared",
        lambda m: (
            not (m.has_eps or m.roles)
            and m.module_class.__module__.partition(".")[0] != "torch"
            and m.takes(1, INPUT_NAMES)
        ),
    ),
    (None, lambda m: not m.has_eps),
    ("gated_rms_norm", lambda m: m.takes(2, GATE_NAMES)),
    ("poly_norm", lambda m: m.elements("weight") == 3),
    ("layer_norm", lambda m: "bias" in m.roles),
    ("rms_norm", lambda m: bool(m.roles) or "Norm" in m.module_class.__name__),
)
"""Operators by what a module looks like; the first that holds, and None for no norm."""


class _Likely(NamedTuple):
    """How a norm is probed by what it looks like.

    Attributes:
        word: What messages call it.
        also: Operators that are tried after the likely one: a norm with one weight may be either.
        least: Elements that a parameter has at least whose length is the number of channels; None
            where no parameter tells that.
        reported: Whether a module that is no such norm is worth a line. Not where only the name of
            a parameter, or the lack of any, makes it look like one.
    """

    word: str
    also: tuple[str, ...] = ()
    least: int | None = 1
    reported: bool = True


_LIKELY = {
    "rms_norm": _Likely("RMSNorm", also=("layer_norm", "gated_rms_norm")),
    "layer_norm": _Likely("LayerNorm"),
    "gated_rms_norm": _Likely("gated RMSNorm"),
    "poly_norm": _Likely("poly_norm", least=None),
    "dyt": _Likely("dyt", least=2, reported=False),
    "relu_squared": _Likely("relu_squared", reported=False),
}


def looks_like_norm(module: nn.Module) -> str | None:
    """The operator that may stand for a module, for which to ask the probe; None for no norm."""
    roles = {_ROLES.get(name) for name, p in module._parameters.items() if p is not None}
    looks = _Looks(module, unpatched_class(module), roles)
    return next((op for op, holds in _LOOKS if holds(looks)), None)


def worth_a_line(likely: str) -> bool:
    """Whether a module that looks like an operator's, and is not, is named in reports."""
    return _LIKELY[likely].reported


_ROLES = {name: role for role, several in TENSOR_NAMES.items() for name in several}
_known: dict[Any, NormSettings | str] = {}
_STOCK = Options()


def norm_settings(module: nn.Module, likely: str) -> NormSettings | str:
    """The settings for an instance, or the reason why it stays as it is.

    Args:
        module: A module.
        likely: What :func:`looks_like_norm` says.
    """
    parameters = {n: p for n, p in module._parameters.items() if p is not None}
    module_class = unpatched_class(module)
    signature = signature_of(module, module_class, parameters)
    if isinstance(signature, str):
        return signature
    shapes = tuple((n, tuple(p.shape), str(p.dtype)) for n, p in parameters.items())
    attributes = (shapes, scalars(module), likely, registered.generation())
    key = (module_class, code_of(module_class, signature), signature, attributes)
    known = _known.get(key)
    if known is None:
        taken = Outcomes(Reached(functions_of(module_class, signature)).functions)
        with taken.watched():
            known = _measure(module, likely)
        if isinstance(known, NormSettings):
            known = taken.one_sided(argument_count=2 if known.spec.gated else 1) or known
        _known[key] = known
    return known


def _candidates(likely: str) -> list[NormKind]:
    """The kinds of the likely operator first; a gate is an argument, or it is none."""
    also, gated = _LIKELY[likely].also, likely == "gated_rms_norm"
    every = [k for k in registered.norm_kinds() if k.gated == gated]
    return [k for k in every if k.op == likely] + [k for k in every if k.op in also]


def _measure(module: nn.Module, likely: str) -> NormSettings | str:
    eps = next((name for name in EPS_NAMES if hasattr(module, name)), None)
    if eps is not None and not isinstance(getattr(module, eps), float):
        return f"its {eps} is {getattr(module, eps)!r}, not a number"
    shapes = [p.shape for p in module._parameters.values() if p is not None]
    least = _LIKELY[likely].least
    vectors = [s for s in shapes if least is not None and s.numel() >= least]
    row = tuple(vectors[0] if vectors else (_width(module),))
    if any(not 0 < len(s) < 3 or s.numel() == 0 or s[:-1] != row[:-1] for s in shapes):
        return "its weight is not a vector with elements (is it partitioned?)"
    ran, error = False, None
    for spec in _candidates(likely):
        for group in _groups(module, row[-1], spec):
            settings = NormSettings(spec, _tensors(module, spec), eps, group, _STOCK)
            if len([n for _, n in settings.tensors if n]) != len(shapes):
                continue  # it holds a parameter that the operator does not take
            own = _by_head(row, getattr(module, group[0])) if spec.joined and group else row
            try:
                if _agrees(module, settings, own):
                    return _settled(module, settings, own)
                ran = True
            except Exception as raised:  # somebody's forward: failing, it is not of this kind
                error = error or raised
    if not shapes and _changes_shape(module, row):
        return NO_NORM
    if error is not None and not ran:
        return f"its forward failed on a replica: {type(error).__name__}: {error}"
    name = unpatched_class(module).__name__
    return f"{name} is no {_LIKELY[likely].word} that is known, bit for bit in bf16"


NO_NORM = "its output has another shape than its input"
"""The reason against a module of which only the name says that it is a norm."""


def _changes_shape(module: nn.Module, row: tuple[int, ...]) -> bool:
    with probe_context() as generator, contextlib.suppress(Exception):  # somebody's forward
        x = random(generator, 2, 3, *row)
        return bool(skeleton(module).forward(x).shape != x.shape)
    return False


def _width(module: nn.Module) -> int:
    """The number of channels of a norm without weight, where an attribute tells it."""
    shape = getattr(module, "normalized_shape", None)
    return int(shape[0]) if isinstance(shape, tuple) and len(shape) == 1 else 64


def _by_head(row: tuple[int, ...], heads: int) -> tuple[int, ...]:
    """The last axes of an input whose heads the output has joined."""
    return (heads, row[-1] // heads)


def _groups(module: nn.Module, size: int, spec: NormKind) -> list[tuple[str, bool] | None]:
    """Attributes that tell groups of channels; None for a kind without, or a norm of one group."""
    if not spec.grouped and not spec.joined:
        return [None]
    groups: list[tuple[str, bool] | None] = [
        (name, counts)
        for name, counts in (HEADS_NAMES if spec.joined else GROUP_NAMES)
        if isinstance(value := getattr(module, name, None), int) and value > 0 and size % value == 0
    ]
    return groups or [None] * (not spec.joined)


def _tensors(module: nn.Module, spec: NormKind) -> tuple[tuple[str, str | None], ...]:
    parameters = module._parameters
    return tuple(
        (argument, next((n for n in TENSOR_NAMES[argument] if parameters.get(n) is not None), None))
        for argument in spec.tensors
    )


_PAIRS = ((torch.bfloat16,) * 2, (torch.bfloat16, torch.float32), (torch.float32,) * 2)
_CLOSE: Mapping[torch.dtype, tuple[float, float]] = {
    torch.bfloat16: (2**-6, 2**-7),
    torch.float32: (1e-5, 1e-5),
}


def _agrees(module: nn.Module, settings: NormSettings, row: tuple[int, ...]) -> bool:
    """Whether forward is equal in bits (or close) and dtype, and the gradients in fp32 close."""
    spec, rows = settings.spec, max(4, 4096 // math.prod(row))
    with probe_context() as generator:
        values = {
            name: random(generator, *cast(Tensor, module._parameters[name]).shape)
            for _, name in settings.tensors
            if name is not None
        }
        x, gate = _rows(generator, spec, rows, row), None
        if spec.gated:
            gate = random(generator, *x.shape)
        for of_x, of_weight in _PAIRS:
            if spec.one_dtype and of_x != of_weight:
                continue  # left to the module
            replica = skeleton(module)
            set_mode(replica, False)
            for name, value in values.items():
                replica._parameters[name] = nn.Parameter(value.to(of_weight))
            inputs = [x.to(of_x).requires_grad_() for _ in range(2)]
            gates = [] if gate is None else [gate.to(of_x).requires_grad_() for _ in range(2)]
            stock = cast(Tensor, replica.forward(inputs[0], *gates[:1]))
            ours = _formula(replica, inputs[1], gates[1] if gates else None, settings)
            same = stock.dtype == ours.dtype and stock.shape == ours.shape
            if not same or not _equal(stock, ours, spec.exact):
                return False
        if not _same_in_every_rank(replica, x, gate, settings):
            return False
        leaves = [p for p in replica._parameters.values() if p is not None]
        upstream = random(generator, *stock.shape)
        gradients = torch.autograd.grad(stock, [inputs[0], *gates[:1], *leaves], upstream)
        got = torch.autograd.grad(ours, [inputs[1], *gates[1:], *leaves], upstream)
        return all(
            torch.allclose(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max().clamp(min=1)))
            for a, b in zip(got, gradients, strict=True)
        )


def _rows(generator: torch.Generator, spec: NormKind, rows: int, row: tuple[int, ...]) -> Tensor:
    """Rows of different lengths, in the form that a kind takes; ``row`` has the channels last."""
    lead = {0: (rows, 1), 3: (2, -(-rows // 2)), 4: (2, -(-rows // 6), 3)}[spec.ndim]
    if len(row) > 1:
        lead = (rows,) if not spec.ndim else (2, -(-rows // 2))
    x = random(generator, *lead, *row) * random(generator, *lead, *row[:-1], 1).exp()
    return x.movedim(-1, spec.axis).contiguous()


def _same_in_every_rank(
    replica: nn.Module, x: Tensor, gate: Tensor | None, settings: NormSettings
) -> bool:
    """Whether it takes the mean over the last axis whatever stands before it."""
    if settings.spec.ndim or x.shape[1] > 1:
        return True  # calls of another rank are left to the module, or have rows of two axes
    rows = x.shape[0] - x.shape[0] % 4
    for shape in ((rows, -1), (2, rows // 4, 2, -1)):
        flat = x[:rows].reshape(*shape[:-1], x.shape[-1])
        flat_gate = None if gate is None else gate[:rows].reshape(flat.shape)
        with torch.no_grad():
            try:
                stock = replica.forward(flat, *([] if flat_gate is None else [flat_gate]))
            except Exception:  # somebody's forward, which does not take this rank
                continue
            if not _equal(stock, _formula(replica, flat, flat_gate, settings), False):
                return False
    return True


def _formula(replica: nn.Module, x: Tensor, gate: Tensor | None, settings: NormSettings) -> Tensor:
    tensors = [None if name is None else getattr(replica, name) for _, name in settings.tensors]
    return apply_norm(replica, x, gate, tensors, settings)


def _settled(module: nn.Module, settings: NormSettings, row: tuple[int, ...]) -> NormSettings | str:
    """The settings with the signature of the module, or why the kind does not hold always."""
    module_class, watch, parameters = unpatched_class(module), Watch(), module._parameters
    with probe_context() as generator:
        replica = skeleton(module)
        for _, name in settings.tensors:
            if name is not None:
                shape = cast(Tensor, parameters[name]).shape
                replica._parameters[name] = nn.Parameter(random(generator, *shape))
        inputs = [_rows(generator, settings.spec, 10, row)]
        if settings.spec.gated:
            inputs.append(random(generator, *inputs[0].shape))
        with watch.over(replica):
            for training, grad in MODES:
                set_mode(replica, training)
                with torch.set_grad_enabled(grad):
                    replica.forward(*(x * 1 for x in inputs))

        def stock(*args: Tensor) -> Any:
            return replica.forward(*args)

        def ours(x: Tensor, gate: Tensor | None = None) -> Tensor:
            return _formula(replica, x, gate, settings)

        def close(a: Tensor, b: Tensor) -> bool:
            return _equal(a, b, False)

        difference = disagreement(replica, stock, ours, inputs, close, generator)
        difference = difference or _differs_at_extremes(
            replica, stock, ours, inputs, settings, generator
        )
    if watch.written:
        difference = f"its forward sets its {', '.join(sorted(watch.written))}"
    if difference:
        return f"{module_class.__name__} is no {settings.spec.op}: {difference}"
    signature = signature_of(
        module, module_class, [n for n, p in parameters.items() if p is not None], watch.read
    )
    if isinstance(signature, str):
        return signature
    return replace(settings, signature=signature, copied=_copied(module, settings, row))


def _copied(
    module: nn.Module, settings: NormSettings, row: tuple[int, ...]
) -> tuple[tuple[torch.dtype, torch.dtype], ...]:
    """Dtypes for which a write to the weight between forward and backward is no error."""
    spec, name = settings.spec, settings.tensors[0][1] if settings.tensors else None
    if name is None or spec.plus or spec.weight != "inside":
        return ()
    pairs = []
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for pair in itertools.product(dtypes, dtypes):
        with probe_context() as generator, contextlib.suppress(Exception):
            replica = skeleton(module)
            for _, each in settings.tensors:
                if each is not None:
                    shape = cast(Tensor, module._parameters[each]).shape
                    replica._parameters[each] = nn.Parameter(random(generator, *shape).to(pair[1]))
            x = _rows(generator, spec, 2, row).to(pair[0]).requires_grad_()
            operands = [x, *([x.detach() * 1] if spec.gated else [])]
            y = replica.forward(*operands)
            with torch.no_grad():
                cast(Tensor, replica._parameters[name]).zero_()
            torch.autograd.grad(y.float().sum(), x)
            pairs.append(pair)
    return tuple(pairs)


def _differs_at_extremes(
    replica: nn.Module,
    stock: Call,
    ours: Call,
    inputs: list[Tensor],
    settings: NormSettings,
    generator: torch.Generator,
) -> str | None:
    """As for every module, in all dtypes; kinds that agree in bits are tried with huge numbers."""
    spec, weights = settings.spec, dict(replica._parameters)
    powers = (*TINY, *LARGE, *HUGE) if spec.exact else (*TINY, *LARGE)
    difference = None
    for of_x, of_weight in (_PAIRS[0], _PAIRS[-1]):
        if difference or (spec.one_dtype and of_x != of_weight):
            continue
        for name, p in weights.items():
            replica._parameters[name] = None if p is None else nn.Parameter(p.to(of_weight))
        cast_inputs = [x.to(of_x) for x in inputs]
        difference = differs_at_extremes(
            replica, stock, ours, cast_inputs, generator, powers, spec.exact, spec.axis
        )
    replica._parameters.update(weights)
    return difference


def _equal(stock: Tensor, ours: Tensor, exact: bool) -> bool:
    if stock.shape != ours.shape:
        return False
    if exact:
        return torch.equal(stock, ours)
    rtol, atol = _CLOSE[stock.dtype]
    # in bf16 nearly every bit, or it rounds at another place
    same = stock.dtype != torch.bfloat16 or bool((stock == ours).double().mean() > 0.95)
    return same and torch.allclose(stock, ours, rtol=rtol, atol=atol)


def find_norms(model: nn.Module, request: Request) -> Iterator[Change]:
    """Norms, and activations that are one operator."""
    for path, module in model.named_modules():
        likely = looks_like_norm(module)
        if likely is None:
            continue
        overridden = conflict_of(module)
        verdict = overridden or norm_settings(module, likely)
        op = likely if isinstance(verdict, str) else verdict.spec.op
        options = request.get(op)
        if options is None:
            yield Restore(path, module)
        elif isinstance(verdict, str):
            if overridden or (verdict != NO_NORM and worth_a_line(likely)):
                yield Skipped(path, op, verdict)
        else:
            settings = replace(verdict, options=options)
            swap = Swap(op, stock_class(module), FusedNorm, settings)
            yield Replace(path, module, swap, settings.shown, options.shown())
