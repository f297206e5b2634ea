"""Which modules compute a mixture of experts that ``ops.fused_moe`` has.

transformers keeps the weights of all experts in two stacked tensors, with flags for their layout,
and calls ``_apply_gate`` between the GEMMs. :func:`find_experts` yields a patch for every such
module. :func:`experts_kind` compares the gate of a replica with all formulas, and then its whole
forward with the operator, so no list of models is needed.

:func:`register_experts` adds the operator to transformers' own interface.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_multi.errors import ConfigurationError
from liger_multi.patching.evidence.facts import ClassFacts, ModelFacts
from liger_multi.patching.evidence.probe import (
    LARGE,
    MODES,
    TINY,
    Call,
    Overridden,
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
    is_current,
    signature_of,
    watched_code,
)
from liger_multi.patching.experts.fused import (
    NO_GATE,
    SHARED,
    WEIGHTS,
    ExpertsKind,
    ExpertsSettings,
    FusedExperts,
    apply_experts,
    bias_names,
    is_probed_call,
    routes_of,
    selected,
)
from liger_multi.patching.experts.quantized import stack_of, unparametrized
from liger_multi.patching.options import Request
from liger_multi.patching.report import Skipped
from liger_multi.patching.swap import (
    Change,
    Replace,
    Restore,
    Swap,
    conflict_of,
    stock_class,
    unpatched_class,
)


def looks_like_experts(module: nn.Module) -> bool:
    """Whether a module has the stacked weights of transformers' experts interface.

    A module without ``_apply_gate`` may have no other parameters.
    """
    own_shapes = set(_shapes(module))
    if hasattr(module, "_apply_gate"):
        return "down_proj" in own_shapes
    return _named_experts(module) and (own_shapes == set(WEIGHTS[True]) or _are_shared(module))


def _are_shared(module: nn.Module) -> bool:
    """Whether a module has one stack per layer: experts that all tokens go to."""
    shapes = _shapes(module)
    return set(shapes) == set(SHARED) and all(len(shape) == 3 for shape in shapes.values())


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    """Shapes of parameters, also of partitioned ones (ZeRO-3) and those in 4 bits."""
    own_shapes = {
        n: getattr(p, "ds_shape", p.shape) for n, p in module._parameters.items() if p is not None
    }
    packed = {n: stack_of(module, n) for n in {*WEIGHTS[True], *WEIGHTS[False]}}
    return own_shapes | {n: stack.shape for n, stack in packed.items() if stack is not None}


def _own_class(module: nn.Module) -> type[nn.Module]:
    return unparametrized(module, unpatched_class(module))


def are_other_experts(module: nn.Module) -> bool:
    """Whether a module has stacked weights of experts in another form."""
    has_names = _named_experts(module) and not looks_like_experts(module)
    return has_names and any(p is not None and p.ndim >= 3 for p in module._parameters.values())


def _named_experts(module: nn.Module) -> bool:
    return "Experts" in unpatched_class(module).__name__


def _may_be_experts(facts: ClassFacts) -> bool:
    return facts.answers("_apply_gate") or "Experts" in facts.module_class.__name__


_known_experts: dict[Any, ExpertsKind | str] = {}


def experts_kind(module: nn.Module) -> ExpertsKind | str:
    """The formula of a module, or the reason why it stays as it is."""
    module_class = _own_class(module)
    signature = _signature(module, module_class, ())
    if isinstance(signature, str):
        return signature
    attributes = (tuple(sorted(_shapes(module).items())), scalars(module))
    probe = partial(_measure_experts, module)
    return cached_verdict(_known_experts, module_class, signature, attributes, probe)


def _weights(module: nn.Module) -> tuple[str, ...]:
    if _are_shared(module) and not hasattr(module, "_apply_gate"):
        return SHARED
    return WEIGHTS[bool(getattr(module, "has_gate", True))]


_NORM = "post_expert_norm"


def _norm(module: nn.Module) -> str:
    """The name of a norm on outputs of experts, by the flag of transformers' interface; or ""."""
    return _NORM if getattr(module, f"has_{_NORM}", False) else ""


_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")


def _signature(
    module: nn.Module, module_class: type[nn.Module], flags_read: Collection[str]
) -> Signature | str:
    """The signature of gate, forward and flags, without the configuration.

    The interface reads the name of an implementation there, all of which compute the same.
    """
    flags = [name for name in _FLAGS if name in vars(module)]
    weights = _weights(module)
    excluded = ("config", *weights, *bias_names(weights), *filter(None, (_norm(module),)))
    starts = [name for name in ("forward", "_apply_gate") if hasattr(module_class, name)]
    return signature_of(module, module_class, excluded, [*flags, *flags_read], tuple(starts))


def _measure_experts(module: nn.Module) -> ExpertsKind | str:
    """The formula with the gate of a replica and equal results, or why there is none."""
    module_class, watch = _own_class(module), Watch()
    try:
        with probe_context() as generator:
            replica, inputs = _replica_experts(module, generator)
            with watch.over(replica):
                for training, grad in MODES:
                    set_mode(replica, training)
                    with torch.set_grad_enabled(grad):
                        replica.forward(*inputs)
                spec = _with_the_gate(module, replica, inputs, generator)
            if watch.written:
                return f"its forward sets its {', '.join(sorted(watch.written))}"
            if getattr(replica, "config", Overridden(None)).read:
                return "its forward reads its configuration, which may change later"
            if spec is None:
                part = "activation" if _weights(module) == WEIGHTS[False] else "gate"
                return f"the {part} of {module_class.__name__} is none that fused_moe has"
            difference = _disagreement(replica, inputs, spec, generator)
            difference = difference or _experts_at_extremes(replica, inputs, spec, generator)
            if difference:
                return f"{module_class.__name__} is more than its gate and products: {difference}"
    except Exception as error:  # of any forward
        return f"its forward failed on a replica: {type(error).__name__}: {error}"
    signature = _signature(module, module_class, watch.read)
    return signature if isinstance(signature, str) else replace(spec, signature=signature)


def _with_the_gate(
    module: nn.Module, replica: Any, inputs: list[Tensor], generator: torch.Generator
) -> ExpertsKind | None:
    """The first formula with the gate of a replica, or with its forward if it has no gate."""
    if not hasattr(replica, "_apply_gate"):
        return next(
            (k for k in _candidates(module) if not _disagreement(replica, inputs, k, generator)),
            None,
        )
    x = (random(generator, 6, 48) * 4).requires_grad_()
    stock = replica.act_fn(x) if _weights(module) == WEIGHTS[False] else replica._apply_gate(x)
    return next((k for k in _candidates(module) if _same_gate(stock, x, k)), None)


def _same_gate(stock: Tensor, x: Tensor, spec: ExpertsKind) -> bool:
    y = _gate(x, spec)
    if y.shape != stock.shape or not _near_experts(y, stock):
        return False
    (slope,) = torch.autograd.grad(stock.sum(), x, retain_graph=True)
    (formula_slope,) = torch.autograd.grad(y.sum(), x)
    return _near_experts(formula_slope, slope)


def _replica_experts(module: nn.Module, generator: torch.Generator) -> tuple[Any, list[Tensor]]:
    """A small copy, and the inputs of its form: hidden states, indices and routing weights."""
    shapes, weights = _shapes(module), _weights(module)
    # By size: sizes that are equal in the module are equal in the copy, as its code may need them.
    experts, *axes = shapes[weights[0]]
    hidden, wide = axes if _transposed(module) else reversed(axes)
    sizes = {wide // 2: 6, wide: 12} if weights == WEIGHTS[True] else {wide: 6}
    sizes.setdefault(hidden, 8)
    first, second = shapes[weights[1]][0], experts - shapes[weights[1]][0]
    for size, small_size in ((first, 4), (second, 4 if second == first else 2)):
        sizes.setdefault(size, small_size)
    sizes.setdefault(experts, sizes[first] + (sizes[second] if second else 0))
    replica: Any = skeleton(module, sizes)
    replica.__class__ = _own_class(module)
    for name, shape in shapes.items():
        small = random(generator, *(sizes[n] for n in shape)) * 0.5
        replica._parameters[name] = nn.Parameter(small)
    for name, part in module._modules.items():
        if name != "parametrizations":
            replica._modules[name] = (
                None
                if part is None
                else with_weights(skeleton(part, sizes), part, generator, sizes=sizes)
            )
    if "config" in vars(replica):
        replica.__dict__["config"] = Overridden(replica.config, _experts_implementation="eager")
    if _form(module) == "blocks":
        return replica, [random(generator, 5 * sizes[experts], sizes[hidden])]
    if _form(module) == "shared":
        return replica, [random(generator, 7, n) for n in (sizes[hidden], sizes[experts])]
    scores = random(generator, 7, sizes[experts])
    routing, index = scores.softmax(-1).topk(min(2, sizes[experts]), -1)
    return replica, [random(generator, 7, sizes[hidden]), index, routing]


def _disagreement(
    replica: Any, inputs: list[Tensor], spec: ExpertsKind, generator: torch.Generator
) -> str | None:
    def close(a: Tensor, b: Tensor) -> bool:
        return torch.allclose(a, b, rtol=1e-4, atol=1e-5)

    return disagreement(replica, *_calls(replica, spec), inputs, close, generator)


def _calls(replica: Any, spec: ExpertsKind) -> tuple[Call, Call]:
    """The forward of a replica, and the operator."""

    def stock(*args: Tensor) -> Any:
        return replica.forward(*args)

    def operator(x: Tensor, *routing: Tensor) -> Tensor:
        routes = routes_of(replica, spec, x, routing)
        assert routes is not None
        return apply_experts(replica, spec, x, *routes)

    return stock, operator


def _experts_at_extremes(
    replica: Any, inputs: list[Tensor], spec: ExpertsKind, generator: torch.Generator
) -> str | None:
    """How experts differ from the operator for zeros, tiny and large numbers; or None."""
    stock, operator = _calls(replica, spec)
    return differs_at_extremes(replica, stock, operator, inputs, generator, (*TINY[2:], *LARGE[:3]))


def _near_experts(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def _gate(x: Tensor, spec: ExpertsKind) -> Tensor:
    from liger_multi.reference.experts.fused_moe import product

    if spec.activation == "swiglu_clamped":
        numbers = dict(spec.clamps)
        clamps = tuple(numbers[name] for name in ("limit", "alpha", "up_offset"))
        return product(x, (spec.activation, *clamps, spec.interleaved))
    return product(x, (spec.activation, 7.0, 1.0, 0.0, spec.interleaved))


def _transposed(module: nn.Module) -> bool:
    """Whether weights are (inputs, outputs); without a flag, by their shapes."""
    is_transposed = getattr(module, "is_transposed", None)
    if is_transposed is None and not hasattr(module, "_apply_gate") and not _are_shared(module):
        first, second = (_shapes(module)[name] for name in WEIGHTS[True])
        return len(first) == len(second) == 3 and first[1:] == (second[2], 2 * second[1])
    return bool(is_transposed)


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
    return [replace(spec, form=_form(module), norm=_norm(module)) for spec in _gates(module)]


def _gates(module: nn.Module) -> list[ExpertsKind]:
    """Known gates that the weights and numbers of a module allow."""
    weights = _weights(module)
    bias = all(getattr(module, name, None) is not None for name in bias_names(weights))
    transposed = _transposed(module)
    if weights == SHARED:
        return [ExpertsKind(name, False, False, False) for name in _ACTIVATIONS]
    if weights != WEIGHTS[True]:
        return [ExpertsKind(NO_GATE, False, transposed, bias)]
    orders = (False, True)
    specs = [
        ExpertsKind(activation, order, transposed, bias)
        for activation in _ACTIVATIONS
        for order in orders
    ]
    values = dict(scalars(module))
    numbers = {n: v for n, v in values.items() if isinstance(v, (int, float)) and v is not True}
    limits = {float(v) for n, v in numbers.items() if "limit" in n and v > 0}
    alphas = {float(v) for n, v in numbers.items() if "alpha" in n} | {1.0, 1.702}
    for limit in sorted(limits):
        for alpha in sorted(alphas):
            for offset in (0.0, 1.0):
                clamps = (("limit", limit), ("alpha", alpha), ("up_offset", offset))
                specs += [
                    ExpertsKind("swiglu_clamped", o, transposed, bias, clamps) for o in orders
                ]
    return specs


_INSTEAD = {
    "Mxfp4GptOssExperts": "; liger_multi.integrations.load_mxfp4 loads the same codes to be trained"
}


def find_experts(model: ModelFacts, request: Request) -> Iterator[Change]:
    """Stacks of experts."""
    options = request.get("fused_moe")
    for path, module in model.of_class(_may_be_experts):
        if are_other_experts(module) and options is not None:
            layer = type(module).__name__
            other = f"{layer} does not use the experts interface of transformers"
            yield Skipped(path, "fused_moe", other + _INSTEAD.get(layer, ""))
        if not looks_like_experts(module):
            continue
        if options is None:
            yield Restore(path, module)
            continue
        verdict = conflict_of(module) or experts_kind(module)
        if isinstance(verdict, str):
            yield Skipped(path, "fused_moe", verdict)
            continue
        if selected(module) is None:
            name = getattr(module.config, "_experts_implementation", None)
            reason = (
                f"patched, but experts_implementation={name!r} runs itself while it is selected"
            )
            yield Skipped(path, "fused_moe", reason, False)
        settings = ExpertsSettings(verdict, options)
        swap = Swap("fused_moe", stock_class(module), FusedExperts, settings)
        yield Replace(path, module, swap, settings.shown, options.shown())


# --- ``experts_implementation="liger_multi"``: the operator in transformers' own interface ---

NAME = "liger_multi"


_kinds_by_class: dict[type, list[tuple[ExpertsKind, Callable[[], bool]]]] = {}
"""Formulas of instances by class, each with a test whether the code of the class is unchanged."""


def _cached_kind(module: nn.Module) -> ExpertsKind | str:
    """The result of :func:`experts_kind`, which takes ten times as long as the rest of a call."""
    module_class = unpatched_class(module)
    bias = module._parameters.get("down_proj_bias") is not None
    cached = _kinds_by_class.get(module_class, [])
    for spec, unchanged in cached:
        if spec.bias == bias and unchanged() and is_current(module, spec.signature):
            return spec
    verdict = experts_kind(module)
    if isinstance(verdict, ExpertsKind):
        current = [entry for entry in cached if entry[0] != verdict and entry[1]()]
        _kinds_by_class[module_class] = [
            *current,
            (verdict, watched_code(module_class, verdict.signature)),
        ]
    return verdict


def implementation(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The function of ``experts_implementation``; other formulas run grouped GEMMs."""
    spec = _cached_kind(module)
    if isinstance(spec, ExpertsKind) and is_probed_call(module, spec, hidden_states):
        return apply_experts(module, spec, hidden_states, top_k_index, top_k_weights)
    from transformers.integrations.moe import grouped_mm_experts_forward

    output = grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    return cast(Tensor, output)


def register_experts(name: str = NAME) -> None:
    """Make ``experts_implementation=name`` this library's operator, for all models.

    Models that do not select the name are not affected. A second registration has no effect.

    Raises:
        ConfigurationError: The name is registered for another function, or this transformers
            (before 5.7) accepts its own names only; ``patch`` works there.
    """
    from packaging.version import parse
    from transformers import __version__
    from transformers.integrations.moe import ExpertsInterface

    if parse(__version__) < parse("5.7"):
        raise ConfigurationError(
            f"register_experts needs transformers >= 5.7, this is {__version__}, whose models take "
            "no names but its own; patch(model) runs the same operator"
        )
    registered = ExpertsInterface._global_mapping.get(name)
    if registered is not None and registered is not implementation:
        raise ConfigurationError(
            f"register_experts: transformers has another {name!r}, {registered!r}; "
            "register under a name of your own"
        )
    ExpertsInterface.register(name, implementation)


def unregister_experts(name: str = NAME) -> None:
    """Remove ``name`` from transformers; models that still select it raise an error with it."""
    from transformers.integrations.moe import ExpertsInterface

    if ExpertsInterface._global_mapping.get(name) is implementation:
        del ExpertsInterface._global_mapping[name]
