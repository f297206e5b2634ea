"""Norms, and activations that are one operator.

:func:`find_norms` takes the facts of a model and yields a patch for every module that computes one
of :data:`~liger_multi.patching.kinds.NORM_KINDS`. :func:`looks_like_norm` selects modules by their
parameters and names. :func:`norm_settings` compares outputs and gradients of a replica with every
formula of the likely operator. A patched module (:class:`FusedNorm`) calls the operator.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from liger_multi import ops
from liger_multi._torch_private import BatchNorms
from liger_multi.checks import autocast_dtype
from liger_multi.patching import registered
from liger_multi.patching.evidence.facts import ModelFacts
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
    with_weights,
)
from liger_multi.patching.evidence.signature import (
    Signature,
    cached_verdict,
    code_holds,
    is_current,
    signature_of,
)
from liger_multi.patching.float8.linear import handed_out, hands_out
from liger_multi.patching.kinds import (
    EPS_NAMES,
    GATE_NAMES,
    GROUP_NAMES,
    HEADS_NAMES,
    INPUT_NAMES,
    TENSOR_NAMES,
    NormKind,
)
from liger_multi.patching.options import ROTATED, Options, Request, run_bound
from liger_multi.patching.report import Skipped
from liger_multi.patching.swap import (
    Change,
    Patched,
    Replace,
    Restore,
    Swap,
    conflict_of,
    original,
    stock_class,
    unpatched_class,
)

# --- a patched instance calls the operator ---


@dataclass(frozen=True)
class NormSettings:
    """The formula of an instance, and the names of its attributes.

    Attributes:
        spec: The formula.
        tensors: Name of the parameter by argument of the operator; None if there is none.
        eps: Name of the attribute; None if the operator takes none.
        group: Name of the attribute for groups, or for joined heads, and whether it is their number
            rather than their size.
        options: Options of the patch call.
        signature: The signature at the probe; if it has changed, the original forward runs.
        copied: Dtypes of input and weight for which the original saves a copy of its weight (such
            as 1 + weight) for backward, so that the weight may be written before.
    """

    spec: NormKind
    tensors: tuple[tuple[str, str | None], ...]
    eps: str | None
    group: tuple[str, bool] | None
    options: Options
    signature: Signature = field(default_factory=Signature)
    copied: tuple[tuple[torch.dtype, torch.dtype], ...] = ()

    @property
    def shown(self) -> str:
        """The operator and formula for the report."""
        has_no_tensor = (
            all(name is None for _, name in self.tensors) and self.spec.op != "relu_squared"
        )
        name = "no weight" if has_no_tensor else self.spec.name
        return self.spec.op if name == "plain" else f"{self.spec.op}[{name}]"


class FusedNorm(Patched):
    """A norm that calls the operator."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The operator, or the original forward for calls of another form."""
        module_class = type(self)
        if not issubclass(module_class, FusedNorm):
            return cast(Tensor, module_class.forward(self, *args, **kwargs))
        settings: NormSettings = module_class._liger_multi_swap.settings  # type: ignore[assignment]
        gate = kwargs.get("gate", args[1] if len(args) == 2 else None)
        form = len(args) + len(kwargs) == (1 if gate is None else 2) and len(args) > 0
        is_usual_call = form and code_holds(module_class)
        tensors = operands(self, args[0], gate, settings) if is_usual_call else None
        if tensors is None:
            return cast(Tensor, original(module_class)(self, *args, **kwargs))
        bound = (self, args[0], gate, tensors, settings)
        return run_bound(settings.options, (settings.spec.op,), apply_norm, *bound)  # type: ignore[no-any-return]


class Rotation(NamedTuple):
    """The rotation of queries or keys: angles, axis of the heads, casting and options.

    It has the settings of the norm too, whose class may have changed by the time that it runs.
    """

    cos: Tensor
    sin: Tensor
    axis: int
    casting: str
    options: Options
    settings: NormSettings


def apply_rotated(module: Any, x: Tensor, rotation: Rotation) -> Tensor:
    """The norm of queries or keys and their rotation, as one operator."""
    return run_bound(rotation.options, (ROTATED,), _rotated, module, x, rotation)  # type: ignore[no-any-return]


def _rotated(module: Any, x: Tensor, rotation: Rotation) -> Tensor:
    cos, sin, axis, casting, _, settings = rotation
    weight, eps = getattr(module, settings.tensors[0][1] or ""), getattr(module, settings.eps or "")
    options = dict(settings.spec.options)
    weight = _saved_weight(weight, settings, x)
    return ops.rms_norm_rope(
        x, weight, cos, sin, eps, unsqueeze_dim=axis, rope_casting=casting, **options
    )


def operands(module: nn.Module, x: Any, gate: Any, settings: NormSettings) -> list[Any] | None:
    """The tensors of the operator, or None for calls that the original forward must serve."""
    spec = settings.spec
    if not is_current(module, settings.signature):
        return None
    if (gate is not None) != spec.gated or not isinstance(x, Tensor):  # a proxy of torch.fx
        return None
    if type(x).__name__ == "DTensor":
        return None
    parameters, tensors = module.__dict__["_parameters"], []
    for _, name in settings.tensors:
        # replicas of DataParallel and parametrized modules have other attributes
        tensor = None if name is None else parameters.get(name)
        tensors.append(tensor if name is None or tensor is not None else getattr(module, name))
        if name is not None and tensors[-1] is None:
            return None
    first = tensors[0] if tensors else None
    if spec.ndim and x.ndim != spec.ndim:
        return None
    if first is not None and spec.of_channels and not _fits(first, x, spec):
        return None  # the original may broadcast it
    if spec.joined and settings.group and x.shape[-2] != getattr(module, settings.group[0]):
        return None
    if spec.one_dtype:
        # autocast chooses the dtype of torch's layer_norm
        allowed_dtype = spec.op != "layer_norm" or autocast_dtype(x.device.type) is None
        if not allowed_dtype or (first is not None and first.dtype != x.dtype):
            return None
    return tensors


def _saved_weight(weight: Any, settings: NormSettings, *inputs: Tensor | None) -> Any:
    """The weight that backward reads: a copy if the original saves one."""
    if not settings.copied or weight is None or torch.compiler.is_compiling():
        return weight
    x = inputs[0]
    differentiable = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in inputs
    )
    if differentiable and x is not None and (x.dtype, weight.dtype) in settings.copied:
        return weight.clone()
    return weight


def _fits(weight: Tensor, x: Tensor, spec: NormKind) -> bool:
    """Whether a weight has the shape of the channels, without broadcasting."""
    if spec.joined:
        return weight.ndim == 1 and weight.shape[0] == x.shape[-2] * x.shape[-1]
    if spec.weight_applied == "after":
        return weight.shape == x.shape[-weight.ndim :]
    return x.ndim > 0 and weight.shape == (x.shape[spec.axis],)


def apply_norm(
    module: Any, x: Tensor, gate: Tensor | None, tensors: list[Any], settings: NormSettings
) -> Tensor:
    """Run the operator on the tensors of :func:`operands`."""
    spec = settings.spec
    if spec.weight_offset and tensors[0] is not None:
        tensors = [tensors[0] + spec.weight_offset, *tensors[1:]]
    elif tensors and spec.weight_applied == "inside":
        tensors = [_saved_weight(tensors[0], settings, x, gate), *tensors[1:]]
    if spec.weight_applied == "before":
        scaled = x * tensors[0]
        return _run(module, scaled.to(x.dtype), None, [None], settings)
    if spec.weight_applied == "after":
        y = _run(module, x, gate, [None] * len(tensors), settings)
        return _weighted(y.flatten(-2) if spec.joined else y, *tensors)
    if spec.axis == -1:  # movedim would cost microseconds of host time
        return _run(module, x, gate, tensors, settings)
    return _run(module, x.movedim(spec.axis, -1), gate, tensors, settings).movedim(-1, spec.axis)


def _weighted(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _run(
    module: Any, x: Tensor, gate: Tensor | None, tensors: list[Any], settings: NormSettings
) -> Tensor:
    """The operator on inputs with channels on the last axis."""
    spec, options = settings.spec, dict(settings.spec.options)
    if settings.group is not None and not spec.joined:
        name, counts = settings.group
        value = getattr(module, name)
        options["group_size"] = x.shape[-1] // value if counts else value
    eps = [] if settings.eps is None else [getattr(module, settings.eps)]
    first = [x, gate] if spec.op == "gated_rms_norm" else [x]
    operator = getattr(ops, spec.op)
    if spec.weight_applied == "inside" and spec.axis == -1 and hands_out(spec.op):
        call = functools.partial(operator, *first, *tensors, *eps, **options)
        return handed_out(module, spec.op, call)
    return operator(*first, *tensors, *eps, **options)  # type: ignore[no-any-return]


# --- which modules may be a norm ---


class _Traits(NamedTuple):
    """Properties that tell a norm without running it.

    Attributes:
        module: The module.
        module_class: Its original class.
        roles: Arguments of operators that its parameters are, by name; None for unknown names.
    """

    module: nn.Module
    module_class: type[nn.Module]
    roles: set[str | None]

    @property
    def has_eps(self) -> bool:
        """Whether it has an epsilon."""
        return any(hasattr(self.module, name) for name in EPS_NAMES)

    def elements(self, role: str) -> int:
        """The number of elements of a parameter; 0 if there is none."""
        parameters = [self.module._parameters.get(name) for name in TENSOR_NAMES[role]]
        return next((p.numel() for p in parameters if p is not None), 0)

    def takes(self, count: int, last: Sequence[str]) -> bool:
        """Whether forward takes so many arguments, the last with one of these names."""
        try:
            names = list(inspect.signature(self.module_class.forward).parameters)
        except (TypeError, ValueError):
            return False
        return len(names) == 1 + count and names[-1] in last


_OPERATORS: tuple[tuple[str | None, Callable[[_Traits], bool]], ...] = (
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
"""Likely operators with conditions on a module; the first that holds counts. None: no norm."""


class _Likely(NamedTuple):
    """How a module is probed for its likely operator.

    Attributes:
        name: Its name in messages.
        also: Operators that are tried after the likely one: a norm with one weight may be either.
        least: Least elements of a parameter with one value per channel; None if no parameter tells
            the number of channels.
        reported: Whether reports name a module that is no such norm. Not if only the name of a
            parameter, or the lack of parameters, made it likely.
    """

    name: str
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
    """The operator that a module may compute, for :func:`norm_settings`; None for no norm."""
    roles = {_ROLES.get(name) for name, p in module._parameters.items() if p is not None}
    traits = _Traits(module, unpatched_class(module), roles)
    return next((op for op, is_current in _OPERATORS if is_current(traits)), None)


# --- which of them compute a known formula ---

_ROLES = {name: role for role, tensor_names in TENSOR_NAMES.items() for name in tensor_names}
_verdicts: dict[Any, NormSettings | str] = {}
_GATED = "gated_rms_norm"
_STOCK = Options()


def norm_settings(module: nn.Module, likely: str) -> NormSettings | str:
    """The settings of a module, or the reason why it stays as it is.

    Args:
        module: A module.
        likely: Result of :func:`looks_like_norm`.
    """
    parameters = {n: p for n, p in module._parameters.items() if p is not None}
    module_class = unpatched_class(module)
    signature = signature_of(module, module_class, parameters)
    if isinstance(signature, str):
        return signature
    shapes = tuple((n, tuple(p.shape), str(p.dtype)) for n, p in parameters.items())
    attributes = (shapes, scalars(module), likely, registered.generation())
    probe, arguments = functools.partial(_measure, module, likely), 1 + (likely == _GATED)
    return cached_verdict(_verdicts, module_class, signature, attributes, probe, arguments)


def _candidates(likely: str) -> list[NormKind]:
    """The formulas to try, those of the likely operator first."""
    order = (likely, *_LIKELY[likely].also)
    formulas = [
        k for k in registered.rows_of(NormKind) if k.gated == (likely == _GATED) and k.op in order
    ]
    return sorted(formulas, key=lambda k: k.op != likely)


def _measure(module: nn.Module, likely: str) -> NormSettings | str:
    """The settings of the first formula that agrees, or why none does.

    A formula agrees on rows of every pair of dtypes first (:func:`_agrees`), and then in training,
    without gradients and for extreme numbers (:func:`_with_signature`).
    """
    eps = next((name for name in EPS_NAMES if hasattr(module, name)), None)
    if eps is not None and not isinstance(getattr(module, eps), float):
        return f"its {eps} is {getattr(module, eps)!r}, not a number"
    shapes = [p.shape for p in module._parameters.values() if p is not None]
    smallest = _LIKELY[likely].least
    vectors = [s for s in shapes if smallest is not None and s.numel() >= smallest]
    row = tuple(vectors[0] if vectors else (_width(module),))
    if any(not 0 < len(s) < 3 or s.numel() == 0 or s[:-1] != row[:-1] for s in shapes):
        return "its weight is not a vector with elements (is it partitioned?)"
    ran, error = False, None
    for spec in _candidates(likely):
        for group in _groups(module, row[-1], spec):
            settings = NormSettings(spec, _tensors(module, spec), eps, group, _STOCK)
            if len([n for _, n in settings.tensors if n]) != len(shapes):
                continue  # a parameter is no argument of the operator
            row_of_formula = (
                _by_head(row, getattr(module, group[0])) if spec.joined and group else row
            )
            try:
                if _agrees(module, settings, row_of_formula):
                    return _with_signature(module, settings, row_of_formula)
                ran = True
            except Exception as raised:  # of any forward, which then is another formula
                error = error or raised
    if not shapes and _changes_shape(module, row):
        return NO_NORM
    if error is not None and not ran:
        return f"its forward failed on a replica: {type(error).__name__}: {error}"
    name = unpatched_class(module).__name__
    return f"{name} is no {_LIKELY[likely].name} that is known, bit for bit in bf16"


NO_NORM = "its output has another shape than its input"
"""The reason against a module that is a norm by its name only."""


def _changes_shape(module: nn.Module, row: tuple[int, ...]) -> bool:
    with probe_context() as generator, contextlib.suppress(Exception):  # of any forward
        x = random(generator, 2, 3, *row)
        return bool(skeleton(module).forward(x).shape != x.shape)
    return False


def _width(module: nn.Module) -> int:
    """The number of channels of a norm without weight: by an attribute, or any number."""
    shape = getattr(module, "normalized_shape", None)
    return int(shape[0]) if isinstance(shape, tuple) and len(shape) == 1 else 64


def _by_head(row: tuple[int, ...], heads: int) -> tuple[int, ...]:
    """The last axes of an input whose heads the output joins."""
    return (heads, row[-1] // heads)


def _groups(module: nn.Module, size: int, spec: NormKind) -> list[tuple[str, bool] | None]:
    """Attributes for groups of channels or joined heads; None for a formula without groups."""
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
    """Whether outputs are equal in bits (or close) and dtype, and fp32 gradients are close."""
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
                continue  # the original forward serves such calls
            replica = skeleton(module)
            set_mode(replica, False)
            for name, value in values.items():
                replica._parameters[name] = nn.Parameter(value.to(of_weight))
            inputs = [x.to(of_x).requires_grad_() for _ in range(2)]
            gates = [] if gate is None else [gate.to(of_x).requires_grad_() for _ in range(2)]
            stock = cast(Tensor, replica.forward(inputs[0], *gates[:1]))
            actual = _formula(replica, inputs[1], gates[1] if gates else None, settings)
            same_form = stock.dtype == actual.dtype and stock.shape == actual.shape
            if not same_form or not _equal(stock, actual, spec.exact):
                return False
        if not _same_in_every_rank(replica, x, gate, settings):
            return False
        leaves = [p for p in replica._parameters.values() if p is not None]
        upstream = random(generator, *stock.shape)
        gradients = torch.autograd.grad(stock, [inputs[0], *gates[:1], *leaves], upstream)
        by_formula = torch.autograd.grad(actual, [inputs[1], *gates[1:], *leaves], upstream)
        return all(
            torch.allclose(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max().clamp(min=1)))
            for a, b in zip(by_formula, gradients, strict=True)
        )


def _rows(generator: torch.Generator, spec: NormKind, rows: int, row: tuple[int, ...]) -> Tensor:
    """Rows of different norms in the layout of a formula; ``row`` has the channels last."""
    leading = {0: (rows, 1), 3: (2, -(-rows // 2)), 4: (2, -(-rows // 6), 3)}[spec.ndim]
    if len(row) > 1:
        leading = (rows,) if not spec.ndim else (2, -(-rows // 2))
    x = random(generator, *leading, *row) * random(generator, *leading, *row[:-1], 1).exp()
    return x.movedim(-1, spec.axis).contiguous()


def _same_in_every_rank(
    replica: nn.Module, x: Tensor, gate: Tensor | None, settings: NormSettings
) -> bool:
    """Whether outputs do not depend on the number of axes before the last one."""
    if settings.spec.ndim or x.shape[1] > 1:
        return True  # the original forward serves other ranks, or rows have two axes
    rows = x.shape[0] - x.shape[0] % 4
    for shape in ((rows, -1), (2, rows // 4, 2, -1)):
        flat = x[:rows].reshape(*shape[:-1], x.shape[-1])
        flat_gate = None if gate is None else gate[:rows].reshape(flat.shape)
        with torch.no_grad():
            try:
                stock = replica.forward(flat, *([] if flat_gate is None else [flat_gate]))
            except Exception:  # of a forward that does not take this rank
                continue
            if not _equal(stock, _formula(replica, flat, flat_gate, settings), False):
                return False
    return True


def _formula(replica: nn.Module, x: Tensor, gate: Tensor | None, settings: NormSettings) -> Tensor:
    tensors = [None if name is None else getattr(replica, name) for _, name in settings.tensors]
    return apply_norm(replica, x, gate, tensors, settings)


def _with_signature(
    module: nn.Module, settings: NormSettings, row: tuple[int, ...]
) -> NormSettings | str:
    """The settings with a signature, or why the formula is not true in all modes."""
    module_class, watch, parameters = unpatched_class(module), Watch(), module._parameters
    with probe_context() as generator:
        replica = with_weights(skeleton(module), module, generator)
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

        def formula(x: Tensor, gate: Tensor | None = None) -> Tensor:
            return _formula(replica, x, gate, settings)

        def close(a: Tensor, b: Tensor) -> bool:
            return _equal(a, b, False)

        difference = disagreement(replica, stock, formula, inputs, close, generator)
        difference = difference or _differs_at_extremes(
            replica, stock, formula, inputs, settings, generator
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
    """Pairs of dtypes for which backward accepts a write to the weight after forward."""
    spec, name = settings.spec, settings.tensors[0][1] if settings.tensors else None
    if name is None or spec.weight_offset or spec.weight_applied != "inside":
        return ()
    pairs = []
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for pair in itertools.product(dtypes, dtypes):
        with probe_context() as generator, contextlib.suppress(Exception):
            replica = with_weights(skeleton(module), module, generator, pair[1])
            x = _rows(generator, spec, 2, row).to(pair[0]).requires_grad_()
            y = replica.forward(*[x, *([x.detach() * 1] if spec.gated else [])])
            with torch.no_grad():
                cast(Tensor, replica._parameters[name]).zero_()
            torch.autograd.grad(y.float().sum(), x)
            pairs.append(pair)
    return tuple(pairs)


def _differs_at_extremes(
    replica: nn.Module,
    stock: Call,
    formula: Call,
    inputs: list[Tensor],
    settings: NormSettings,
    generator: torch.Generator,
) -> str | None:
    """How outputs differ for unusual numbers in all dtypes; huge ones for exact formulas only."""
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
            replica, stock, formula, cast_inputs, generator, powers, spec.exact, spec.axis
        )
    replica._parameters.update(weights)
    return difference


def _equal(stock: Tensor, actual: Tensor, exact: bool) -> bool:
    if stock.shape != actual.shape:
        return False
    if exact:
        return torch.equal(stock, actual)
    rtol, atol = _CLOSE[stock.dtype]
    # nearly all bits in bf16, or it rounds elsewhere
    enough_equal_bits = stock.dtype != torch.bfloat16 or bool(
        (stock == actual).double().mean() > 0.95
    )
    return enough_equal_bits and torch.allclose(stock, actual, rtol=rtol, atol=atol)


def find_norms(model: ModelFacts, request: Request) -> Iterator[Change]:
    """Norms, and activations that are one operator."""
    for path, module in model.leaves:
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
            if overridden or (verdict != NO_NORM and _LIKELY[likely].reported):
                yield Skipped(path, op, verdict)
        else:
            settings = replace(verdict, options=options)
            swap = Swap(op, stock_class(module), FusedNorm, settings)
            yield Replace(path, module, swap, settings.shown, options.shown())
