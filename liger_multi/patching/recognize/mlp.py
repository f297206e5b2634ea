"""Which modules are gated MLPs, and which compute a gated mixture of experts.

A small copy of an MLP is compared with every formula.

Of experts, transformers keeps the weights of all experts in two tensors, states their layout by
flags, and asks ``_apply_gate`` for what is computed between the GEMMs. That method of a replica is
compared with the formulas of the operator, and then its whole forward, so models that nobody listed
are served.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import permutations
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_multi.patching.recognize import registered
from liger_multi.patching.recognize.branches import Outcomes
from liger_multi.patching.recognize.kinds import MLP_KINDS, MlpNames
from liger_multi.patching.recognize.probe import (
    LARGE,
    MODES,
    TINY,
    Call,
    Watch,
    differs_at_extremes,
    disagreement,
    linear,
    probe_context,
    random,
    scalars,
    set_mode,
    skeleton,
)
from liger_multi.patching.recognize.reached import Reached
from liger_multi.patching.recognize.signature import (
    Signature,
    code_of,
    functions_of,
    signature_of,
)
from liger_multi.patching.replace import mlp
from liger_multi.patching.replace.mlp import (
    NO_GATE,
    SHARED,
    WEIGHTS,
    ExpertsKind,
    MlpSettings,
    apply_experts,
    bias_names,
    routes_of,
)
from liger_multi.patching.replace.quantized_experts import stack_of, unparametrized
from liger_multi.patching.replace.swap import unpatched_class

# --- gated MLPs ---


def mlp_names(module: nn.Module) -> tuple[list[MlpNames], bool]:
    """Which layers may be gate, up and down, and whether their names say so.

    Nothing when the module has more than an activation and dropouts besides.
    """
    linears = {n: m for n, m in module._modules.items() if _is_linear(m)}
    if len(linears) not in (2, 3) or module._parameters:
        return [], False
    others = [m for n, m in module._modules.items() if n not in linears and m is not None]
    acts = [m for m in others if not isinstance(m, (nn.Dropout, nn.Identity))]
    if len(acts) > 1 or any(list(m.parameters()) or m._modules for m in acts):
        return [], False
    known = [n for n in registered.mlp_names() if set(n.all) == set(linears)]
    if known:
        return known, True
    found = []
    for order in permutations(linears):
        gate, up, down = order if len(order) == 3 else (order[0], None, order[1])
        names = MlpNames(gate, up, down)
        if _fit(module, names):
            found.append(names)
    return found, False


def _fit(module: nn.Module, names: MlpNames) -> bool:
    layers: Any = module._modules
    gate, down = layers[names.gate], layers[names.down]
    wide = 2 * down.in_features if names.up is None else down.in_features
    same = names.up is None or (
        (layers[names.up].in_features, layers[names.up].out_features)
        == (gate.in_features, gate.out_features)
    )
    return bool(gate.out_features == wide and same and down.out_features == gate.in_features)


def _is_linear(layer: nn.Module | None) -> bool:
    return isinstance(getattr(layer, "in_features", None), int) and isinstance(
        getattr(layer, "out_features", None), int
    )


_known: dict[Any, MlpSettings | str] = {}


def mlp_kind(module: nn.Module, candidates: list[MlpNames]) -> MlpSettings | str:
    """The kind of an instance, or the reason why it stays as it is."""
    kind, linears = unpatched_class(module), candidates[0].all
    drops = [n for n, m in module._modules.items() if isinstance(m, nn.Dropout)]
    signature = signature_of(module, kind, (*linears, *drops))
    if isinstance(signature, str):
        return signature
    sizes = tuple(
        (m.in_features, m.out_features, getattr(m, "bias", None) is not None)
        for m in (module._modules[name] for name in linears)
        if m is not None
    )
    others = tuple((n, type(m)) for n, m in module._modules.items() if n not in linears)
    beside = (sizes, others, scalars(module), registered.generation())
    key = (kind, code_of(kind, signature), signature, tuple(candidates), beside)
    found = _known.get(key)
    if found is None:
        taken = Outcomes(Reached(functions_of(kind, signature)).functions)
        with taken.watched():
            found = _measure_mlp(module, candidates)
        if isinstance(found, MlpSettings) and (where := taken.one_sided(given=1)):
            found = where
        _known[key] = found
    return found


class _Marker(nn.Module):
    """Stands where a dropout stands: what comes out shows where it acted."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(0.5, dtype=torch.float32, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        return 1.25 * x + self.bias


def _measure_mlp(module: nn.Module, candidates: list[MlpNames]) -> MlpSettings | str:
    """Compare a small replica with every formula; the one that agrees, or the reason why not."""
    fitting = [names for names in candidates if _fit(module, names)]
    if not fitting:
        return "its layers do not fit together as gate, up and down"
    kind, watch = unpatched_class(module), Watch()
    try:
        with probe_context() as generator:
            replica, x = _replica_mlp(module, fitting[0], generator)
            with watch.over(replica):
                for training, grad in MODES:
                    set_mode(replica, training)
                    with torch.set_grad_enabled(grad):
                        replica.forward(x * 1)
            if watch.written:
                return f"its forward sets its {', '.join(sorted(watch.written))}"
            settings = _formula(replica, x, module, fitting)
            if settings is not None:
                found = _tried(replica, x, settings, generator) or _narrow(replica, x, settings)
                if isinstance(found, str):
                    return f"{kind.__name__} is no {settings.kind.formula}: {found}"
                settings = found
    except Exception as error:  # somebody's forward: failing, it is not this kind of module
        return f"its forward failed on a replica: {type(error).__name__}: {error}"
    if settings is None:
        formulas = " nor ".join(f"down({f})" for f in dict.fromkeys(k.formula for k in MLP_KINDS))
        return f"{kind.__name__} computes neither {formulas}"
    drops = [name for name in (settings.inner, settings.outer) if name]
    signature = signature_of(module, kind, (*settings.names.all, *drops), watch.read)
    return signature if isinstance(signature, str) else replace(settings, signature=signature)


@torch.no_grad()
def _formula(
    replica: nn.Module, x: Tensor, module: nn.Module, candidates: list[MlpNames]
) -> MlpSettings | None:
    """The first formula with the output of a replica."""
    set_mode(replica, False)
    stock = replica.forward(x)
    for settings in _settings(module, candidates) if isinstance(stock, Tensor) else ():
        ours = mlp.apply_mlp(replica, x, settings)
        if _close(stock, ours):
            return settings
    return None


def _tried(
    replica: nn.Module, x: Tensor, settings: MlpSettings, generator: torch.Generator
) -> str | None:
    """What else a replica does, in any mode, form of a call and dtype."""

    def stock(x: Tensor) -> Any:
        return replica.forward(x)

    def ours(x: Tensor) -> Tensor:
        return mlp.apply_mlp(replica, x, settings)

    found = disagreement(replica, stock, ours, [x], _close, generator)
    if found:
        return found
    found = differs_at_extremes(replica, stock, ours, [x], generator)
    if found:
        return found
    with torch.no_grad():
        for shape in ((6, 24), (1, 2, 3, 24)):
            with contextlib.suppress(RuntimeError, ValueError, IndexError):  # it takes no such rank
                if not _close(stock(x.view(shape)), ours(x.view(shape))):
                    return f"its output differs for {len(shape)} axes"
        with torch.autocast("cpu", torch.bfloat16):
            if not _near_mlp(stock(x), ours(x)):
                return "its output differs under autocast"
        hooks = [_shifted(cast(nn.Module, replica._modules[n])) for n in settings.names.all]
        agree = _close(stock(x), ours(x))
        for hook in hooks:
            hook.remove()
        if not agree:
            return "it does not call its layers"
    return None


@torch.no_grad()
def _narrow(replica: nn.Module, x: Tensor, settings: MlpSettings) -> MlpSettings | str:
    """The settings with what bf16 shows, or what differs there."""
    x, down = x.bfloat16(), cast(Any, replica._modules[settings.names.down])
    wide = dict(down._parameters)
    for layer in replica.modules():
        for name, p in layer._parameters.items():
            layer._parameters[name] = None if p is None else nn.Parameter(p.bfloat16())
    if not _near_mlp(replica.forward(x), mlp.apply_mlp(replica, x, settings)):
        return "its output differs in bf16"
    down._parameters.update(wide)
    try:
        stock = replica.forward(x)
    except RuntimeError:  # two dtypes, as in most models
        return settings
    settings = replace(settings, casts=True)
    return (
        settings if _near_mlp(stock, mlp.apply_mlp(replica, x, settings)) else "it casts otherwise"
    )


def _shifted(layer: nn.Module) -> Any:
    return layer.register_forward_hook(lambda module, args, output: output * 1.25 + 0.125)


def _near_mlp(stock: Tensor, ours: Tensor) -> bool:
    """Within the roundings of bf16."""
    bound = 2**-5 * stock.abs().amax(-1, keepdim=True)
    return stock.dtype == ours.dtype and bool(((stock - ours).abs() <= bound).all())


def _close(stock: Tensor, ours: Tensor) -> bool:
    """Every row for itself: in a large one the forms of gelu agree."""
    bound = 1e-5 * stock.abs().amax(-1, keepdim=True) + 1e-6
    return stock.shape == ours.shape and bool(((stock - ours).abs() <= bound).all())


def _replica_mlp(
    module: nn.Module, names: MlpNames, generator: torch.Generator
) -> tuple[nn.Module, Tensor]:
    """A small copy and an input, of which some rows are large enough to be clamped."""
    layers: dict[str, Any] = {name: module._modules[name] for name in names.all}
    hidden, inner = layers[names.gate].in_features, layers[names.down].in_features
    small_inner = (
        24 if inner == hidden else 12 if 2 * inner == hidden else 48 if inner == 2 * hidden else 40
    )
    sizes = {2 * inner: 2 * small_inner, inner: small_inner, hidden: 24}
    replica = skeleton(module, sizes)
    for name, m in module._modules.items():
        if name in layers:
            bias = getattr(m, "bias", None) is not None
            inputs, outputs = (sizes[getattr(layers[name], f)] for f in _FEATURES)
            replica._modules[name] = linear(generator, inputs, outputs, bias)
        elif isinstance(m, nn.Dropout):
            replica._modules[name] = _Marker()
        elif m is not None:
            replica._modules[name] = skeleton(m)  # the activation, without its hooks
    return replica, random(generator, 2, 3, 24) * torch.tensor([[1.0], [0.3], [12.0]])


_FEATURES = ("in_features", "out_features")


def _settings(module: nn.Module, candidates: list[MlpNames]) -> Iterator[MlpSettings]:
    """What the module may compute: every formula, by the layers' roles and places of dropouts."""
    drops = [n for n, m in module._modules.items() if isinstance(m, nn.Dropout)]
    places: dict[int, list[tuple[str | None, str | None]]] = {
        0: [(None, None)],
        1: [(drops[0], None), (None, drops[0])] if drops else [],
        2: [(drops[0], drops[1]), (drops[1], drops[0])] if len(drops) == 2 else [],
    }
    floats = [n for n, v in vars(module).items() if isinstance(v, float)]
    for names in candidates:
        for kind in registered.mlp_kinds():
            if kind.sparse and names.up is None:
                continue
            numbers = tuple(
                (number, next((n for n in floats if number in n), "")) for number in kind.numbers
            )
            if all(held for _, held in numbers):
                for inner, outer in places.get(len(drops), []):
                    yield MlpSettings(kind, names, inner, outer, numbers)


# --- experts ---


def looks_like_experts(module: nn.Module) -> bool:
    """Whether a module has the stacks of transformers' interface to experts.

    With code of its own, that is all that it may have.
    """
    held = set(_shapes(module))
    if hasattr(module, "_apply_gate"):
        return "down_proj" in held
    return _named_experts(module) and (held == set(WEIGHTS[True]) or _are_shared(module))


def _are_shared(module: nn.Module) -> bool:
    """Whether a module has a stack a layer, and so no experts that tokens are routed to."""
    shapes = _shapes(module)
    return set(shapes) == set(SHARED) and all(len(shape) == 3 for shape in shapes.values())


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    """Shapes of parameters, also of those that are partitioned (ZeRO-3) or in 4 bits."""
    held = {
        n: getattr(p, "ds_shape", p.shape) for n, p in module._parameters.items() if p is not None
    }
    packed = {n: stack_of(module, n) for n in {*WEIGHTS[True], *WEIGHTS[False]}}
    return held | {n: stack.shape for n, stack in packed.items() if stack is not None}


def _own_class(module: nn.Module) -> type[nn.Module]:
    return unparametrized(module, unpatched_class(module))


def are_other_experts(module: nn.Module) -> bool:
    """Whether a module has matrices of experts of another form."""
    named = _named_experts(module) and not looks_like_experts(module)
    return named and any(p is not None and p.ndim == 3 for p in module._parameters.values())


def _named_experts(module: nn.Module) -> bool:
    return "Experts" in unpatched_class(module).__name__


_known_experts: dict[Any, ExpertsKind | str] = {}


def experts_kind(module: nn.Module) -> ExpertsKind | str:
    """The kind of an instance, or the reason why it stays as it is."""
    kind = _own_class(module)
    signature = _signature(module, kind, ())
    if isinstance(signature, str):
        return signature
    code, shapes = code_of(kind, signature), tuple(sorted(_shapes(module).items()))
    key = (kind, code, signature, shapes, scalars(module))
    found = _known_experts.get(key)
    if found is None:
        found = _known_experts[key] = _measure_experts(module)
    return found


def _weights(module: nn.Module) -> tuple[str, ...]:
    if _are_shared(module) and not hasattr(module, "_apply_gate"):
        return SHARED
    return WEIGHTS[bool(getattr(module, "has_gate", True))]


_NORM = "post_expert_norm"


def _norm(module: nn.Module) -> str:
    """The module that outputs of experts go through, by the flag of transformers' interface."""
    return _NORM if getattr(module, f"has_{_NORM}", False) else ""


_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")


def _signature(module: nn.Module, kind: type[nn.Module], seen: Collection[str]) -> Signature | str:
    """Of gate, forward and flags, without the configuration: see :class:`_Eager`."""
    flags = [name for name in _FLAGS if name in vars(module)]
    weights = _weights(module)
    taken = ("config", *weights, *bias_names(weights), *filter(None, (_norm(module),)))
    starts = [name for name in ("forward", "_apply_gate") if hasattr(kind, name)]
    return signature_of(module, kind, taken, [*flags, *seen], tuple(starts))


def _measure_experts(module: nn.Module) -> ExpertsKind | str:
    """Compare the gate of a replica with every formula, and the forward with the operator."""
    own, watch = _own_class(module), Watch()
    try:
        with probe_context() as generator:
            replica, inputs = _replica_experts(module, generator)
            with watch.over(replica):
                for training, grad in MODES:
                    set_mode(replica, training)
                    with torch.set_grad_enabled(grad):
                        replica.forward(*inputs)
                kind = _with_the_gate(module, replica, inputs, generator)
            if watch.written:
                return f"its forward sets its {', '.join(sorted(watch.written))}"
            if getattr(replica, "config", _Eager(None)).read:
                return "its forward reads its configuration, which may change later"
            if kind is None:
                what = "activation" if _weights(module) == WEIGHTS[False] else "gate"
                return f"the {what} of {own.__name__} is none that fused_moe has"
            found = _disagreement(replica, inputs, kind, generator)
            found = found or _experts_at_extremes(replica, inputs, kind, generator)
            if found:
                return f"{own.__name__} is more than its gate and products: {found}"
    except Exception as error:  # somebody's forward: any failure means that it is not one of ours
        return f"its forward failed on a replica: {type(error).__name__}: {error}"
    signature = _signature(module, own, watch.read)
    return signature if isinstance(signature, str) else replace(kind, signature=signature)


def _with_the_gate(
    module: nn.Module, replica: Any, inputs: list[Tensor], generator: torch.Generator
) -> ExpertsKind | None:
    """The first kind that has the gate of a replica, or its whole forward where it has none."""
    if not hasattr(replica, "_apply_gate"):
        return next(
            (k for k in _candidates(module) if not _disagreement(replica, inputs, k, generator)),
            None,
        )
    x = (random(generator, 6, 48) * 4).requires_grad_()
    stock = replica.act_fn(x) if _weights(module) == WEIGHTS[False] else replica._apply_gate(x)
    return next((k for k in _candidates(module) if _same_gate(stock, x, k)), None)


def _same_gate(stock: Tensor, x: Tensor, kind: ExpertsKind) -> bool:
    y = _gate(x, kind)
    if y.shape != stock.shape or not _near_experts(y, stock):
        return False
    (slope,) = torch.autograd.grad(stock.sum(), x, retain_graph=True)
    (ours,) = torch.autograd.grad(y.sum(), x)
    return _near_experts(ours, slope)


class _Eager:
    """A configuration that asks for the loop over experts of the modeling file.

    The interface reads the name of an implementation, all of which compute the same; what else is
    read is noted.
    """

    _experts_implementation = "eager"

    def __init__(self, config: Any) -> None:
        self.config, self.read = config, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.config, name)


def _replica_experts(module: nn.Module, generator: torch.Generator) -> tuple[Any, list[Tensor]]:
    """A small copy, and hidden states, indices and weights of experts, as its form takes them."""
    shapes, weights = _shapes(module), _weights(module)
    experts, *axes = shapes[weights[0]]
    hidden, wide = axes if _transposed(module) else reversed(axes)
    sizes = {wide // 2: 6, wide: 12} if weights == WEIGHTS[True] else {wide: 6}
    sizes.setdefault(hidden, 8)
    own, more = shapes[weights[1]][0], experts - shapes[weights[1]][0]
    for many, few in ((own, 4), (more, 4 if more == own else 2)):
        sizes.setdefault(many, few)
    sizes.setdefault(experts, sizes[own] + (sizes[more] if more else 0))
    replica: Any = skeleton(module, sizes)
    replica.__class__ = _own_class(module)
    for name, whole in shapes.items():
        small = random(generator, *(sizes[n] for n in whole)) * 0.5
        replica._parameters[name] = nn.Parameter(small)
    for name, part in module._modules.items():
        if name != "parametrizations":
            replica._modules[name] = None if part is None else _part(part, sizes, generator)
    if "config" in vars(replica):
        replica.__dict__["config"] = _Eager(replica.config)
    if _form(module) == "blocks":
        return replica, [random(generator, 5 * sizes[experts], sizes[hidden])]
    if _form(module) == "shared":
        return replica, [random(generator, 7, n) for n in (sizes[hidden], sizes[experts])]
    scores = random(generator, 7, sizes[experts])
    routing, index = scores.softmax(-1).topk(min(2, sizes[experts]), -1)
    return replica, [random(generator, 7, sizes[hidden]), index, routing]


def _part(module: nn.Module, sizes: dict[int, int], generator: torch.Generator) -> nn.Module:
    """A small copy of a module within, with random parameters."""
    made = skeleton(module, sizes)
    for name, p in module._parameters.items():
        if p is not None:
            made._parameters[name] = nn.Parameter(random(generator, *(sizes[n] for n in p.shape)))
    return made


def _disagreement(
    replica: Any, inputs: list[Tensor], kind: ExpertsKind, generator: torch.Generator
) -> str | None:
    def close(a: Tensor, b: Tensor) -> bool:
        return torch.allclose(a, b, rtol=1e-4, atol=1e-5)

    return disagreement(replica, *_calls(replica, kind), inputs, close, generator)


def _calls(replica: Any, kind: ExpertsKind) -> tuple[Call, Call]:
    """The forward of a replica, and the operator."""

    def stock(*given: Tensor) -> Any:
        return replica.forward(*given)

    def ours(x: Tensor, *given: Tensor) -> Tensor:
        routes = routes_of(replica, kind, x, given)
        assert routes is not None
        return apply_experts(replica, kind, x, *routes)

    return stock, ours


def _experts_at_extremes(
    replica: Any, inputs: list[Tensor], kind: ExpertsKind, generator: torch.Generator
) -> str | None:
    """What experts do with zeros, tiny and large numbers that the operator does not."""
    stock, ours = _calls(replica, kind)
    return differs_at_extremes(replica, stock, ours, inputs, generator, (*TINY[2:], *LARGE[:3]))


def _near_experts(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def _gate(x: Tensor, kind: ExpertsKind) -> Tensor:
    from liger_multi.reference.experts.fused_moe import product

    if kind.activation == "swiglu_clamped":
        numbers = dict(kind.clamps)
        by = tuple(numbers[name] for name in ("limit", "alpha", "up_offset"))
        return product(x, (kind.activation, *by, kind.interleaved))
    return product(x, (kind.activation, 7.0, 1.0, 0.0, kind.interleaved))


def _transposed(module: nn.Module) -> bool:
    """Whether the inputs of a layer stand before its outputs; told by the shapes without a flag."""
    told = getattr(module, "is_transposed", None)
    if told is None and not hasattr(module, "_apply_gate") and not _are_shared(module):
        first, second = (_shapes(module)[name] for name in WEIGHTS[True])
        return len(first) == len(second) == 3 and first[1:] == (second[2], 2 * second[1])
    return bool(told)


def _form(module: nn.Module) -> str:
    """The form of a call, by the arguments of forward and the numbers of experts."""
    if hasattr(module, "_apply_gate"):
        return "routed"
    if _are_shared(module):
        return "shared"
    if len(inspect.signature(unpatched_class(module).forward).parameters) == 2:
        return "blocks"
    first, second = (_shapes(module)[name] for name in WEIGHTS[True])
    return "routed" if first[0] == second[0] else "identity"


_ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


def _candidates(module: nn.Module) -> list[ExpertsKind]:
    return [replace(kind, form=_form(module), norm=_norm(module)) for kind in _gates(module)]


def _gates(module: nn.Module) -> list[ExpertsKind]:
    weights = _weights(module)
    bias = all(getattr(module, name, None) is not None for name in bias_names(weights))
    transposed = _transposed(module)
    if weights == SHARED:
        return [ExpertsKind(name, False, False, False) for name in _ACTIVATIONS]
    if weights != WEIGHTS[True]:
        return [ExpertsKind(NO_GATE, False, transposed, bias)]
    orders = (False, True)
    found = [
        ExpertsKind(activation, order, transposed, bias)
        for activation in _ACTIVATIONS
        for order in orders
    ]
    given = dict(scalars(module))
    numbers = {n: v for n, v in given.items() if isinstance(v, (int, float)) and v is not True}
    limits = {float(v) for n, v in numbers.items() if "limit" in n and v > 0}
    alphas = {float(v) for n, v in numbers.items() if "alpha" in n} | {1.0, 1.702}
    for limit in sorted(limits):
        for alpha in sorted(alphas):
            for offset in (0.0, 1.0):
                clamps = (("limit", limit), ("alpha", alpha), ("up_offset", offset))
                found += [
                    ExpertsKind("swiglu_clamped", o, transposed, bias, clamps) for o in orders
                ]
    return found
