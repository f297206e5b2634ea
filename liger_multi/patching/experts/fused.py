"""A patched mixture of experts: one operator for the stacked weights.

:class:`FusedExperts` takes hidden states, indices and weights of experts, and returns the weighted
sum of the experts' outputs, by ``ops.fused_moe``. :func:`selected` tells whether the implementation
that a configuration selects may be replaced.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_multi import ops
from liger_multi._torch_private import constant_in_graphs
from liger_multi.checks import autocast, autocast_dtype
from liger_multi.patching.evidence.signature import (
    Signature,
    code_holds,
    globally_hooked,
    is_current,
)
from liger_multi.patching.experts.quantized import (
    Stack,
    in_groups,
    in_one_piece,
    stack_declared,
    stacked,
    viewed,
)
from liger_multi.patching.options import Options, run_bound
from liger_multi.patching.swap import Patched, original, unpatched_class

# --- the implementation that a model selects ---

# transformers maps names to functions, and a configuration selects one, which may change at any
# time. So every call looks it up. The operator replaces only transformers' own functions. Functions
# that a user registered run themselves, and so do those that need other packages.

EAGER, BATCHED, GROUPED = "eager", "batched_mm_experts_forward", "grouped_mm_experts_forward"
"""The loop of a modeling file, and transformers' functions with the same results."""
_HOME = "transformers.integrations.moe"


def selected(module: Any) -> str | None:
    """The implementation that an unpatched call runs; None if the operator must not replace it."""
    module_class = unpatched_class(module)
    if not _asks_an_interface(module_class):
        return EAGER
    config = vars(module).get("config")
    return _known_implementation(module_class, getattr(config, "_experts_implementation", None))


def computes_in_weight_dtype(module: Any, device_type: str) -> bool:
    """Whether autocast does not apply: grouped GEMMs use the dtype of the weights."""
    return autocast_dtype(device_type) is not None and selected(module) == GROUPED


def autocast_of(module: Any, device_type: str) -> contextlib.AbstractContextManager[Any]:
    """A context without autocast if the selected implementation has none."""
    if computes_in_weight_dtype(module, device_type):
        return autocast(device_type, None)
    return contextlib.nullcontext()


@constant_in_graphs
def _asks_an_interface(module_class: type) -> bool:
    return _interface(getattr(module_class, "forward", None)) is not None


@constant_in_graphs
def _known_implementation(module_class: type, name: str | None) -> str | None:
    interface: Any = _interface(module_class.forward)  # type: ignore[attr-defined]
    function = interface.get(name)
    if function is None:
        return EAGER if name in (None, EAGER) else None
    module_name, function_name = (
        getattr(function, "__module__", ""),
        getattr(function, "__name__", ""),
    )
    if module_name.startswith("liger_multi."):
        return EAGER  # register_experts
    return function_name if module_name == _HOME and function_name in (BATCHED, GROUPED) else None


@functools.lru_cache(maxsize=256)
def _interface(forward: Callable[..., Any] | None) -> Any:
    """The mapping of names that a forward uses: a variable of its decorator, or a global."""
    code = getattr(forward, "__code__", None)
    if code is None or "_experts_implementation" not in code.co_names:
        return None
    variables = inspect.getclosurevars(forward)  # type: ignore[arg-type]
    values = (*variables.nonlocals.values(), *variables.globals.values())
    return next((value for value in values if _maps_names(value)), None)


def _maps_names(value: Any) -> bool:
    """Whether a value is the mapping, which is a dictionary in transformers 5.0."""
    is_dict = isinstance(value, dict) and "grouped_mm" in value
    return is_dict or hasattr(type(value), "_global_mapping")


# --- experts ---

WEIGHTS = {True: ("gate_up_proj", "down_proj"), False: ("up_proj", "down_proj")}
"""Names of the stacked weights, with and without a gate."""
SHARED = ("gate_proj", "up_proj", "down_proj")
"""Names of the stacked weights of experts that all tokens go to."""
NO_GATE = "relu_squared"
"""The activation of experts without a gate."""


def bias_names(weights: tuple[str, ...]) -> tuple[str, str]:
    """Names of the biases of stacked weights."""
    return (f"{weights[0]}_bias", f"{weights[1]}_bias")


WEIGHT_TYPES = (Tensor, nn.Parameter, ops.QuantizedWeight)


FORMS = ("routed", "identity", "blocks", "shared")
"""Forms of a call: hidden states, indices and routing weights; the same with indices past the last
expert, which select the hidden states themselves; hidden states in equal blocks per expert; hidden
states and a routing weight per expert, for experts that all tokens go to."""


@dataclass(frozen=True)
class ExpertsKind:
    """The formula of a module: its gate, the layout of its weights, and the form of its calls.

    ``norm`` is the name of a norm on the outputs of experts before their sum.
    """

    activation: str
    interleaved: bool
    transposed: bool
    bias: bool
    clamps: tuple[tuple[str, float], ...] = ()
    form: str = "routed"
    norm: str = ""
    signature: Signature = field(default_factory=Signature)

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the stacks."""
        return SHARED if self.form == "shared" else WEIGHTS[self.activation != NO_GATE]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the stacked weights and biases."""
        return (*self.weights, *bias_names(self.weights)) if self.bias else self.weights

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of ``fused_moe``."""
        layout = {"interleaved": self.interleaved, "transposed": self.transposed}
        return {"activation": self.activation, **layout, **dict(self.clamps)}


@dataclass(frozen=True)
class ExpertsSettings:
    """The formula, and the options of the patch."""

    spec: ExpertsKind
    options: Options

    @property
    def signature(self) -> Signature:
        """The signature at the probe; if it has changed, the original forward runs."""
        return self.spec.signature

    @property
    def shown(self) -> str:
        """The operator and formula for the report."""
        op = "gated_mlp" if self.spec.form == "shared" else "fused_moe"
        return f"{op}[{self.spec.activation}{', norm' if self.spec.norm else ''}]"


class FusedExperts(Patched):
    """All experts of a layer as one operator."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The operator, or the original forward for calls of another form."""
        module_class = type(self)
        if not issubclass(module_class, FusedExperts):
            return cast(Tensor, module_class.forward(self, hidden_states, *args, **kwargs))
        settings = cast(ExpertsSettings, module_class._liger_multi_swap.settings)
        routing = (*args, *kwargs.values())  # the index first, under any name
        is_probed = code_holds(module_class) and is_probed_call(self, settings.spec, hidden_states)
        routes = routes_of(self, settings.spec, hidden_states, routing) if is_probed else None
        if routes is None:
            return cast(Tensor, original(module_class)(self, hidden_states, *args, **kwargs))
        bound = (self, settings.spec, hidden_states, *routes)
        names = ("fused_moe", "gated_mlp")
        return cast(Tensor, run_bound(settings.options, names, apply_experts, *bound))


def routes_of(
    module: Any, spec: ExpertsKind, x: Tensor, routing: Sequence[Any]
) -> tuple[Tensor, Tensor] | None:
    """Experts of every token and their routing weights; None for calls of another form.

    transformers 5.0 passes phimoe's experts weights of all experts, of which they read two.
    """
    if spec.form == "blocks":
        experts = stack_declared(module, "down_proj").shape[0]
        # autocast would change the dtype of the result
        is_dense = not routing and x.ndim == 2 and autocast_dtype(x.device.type) is None
        if not is_dense or x.shape[0] % experts:
            return None
        index = torch.arange(experts, device=x.device)
        index = index.repeat_interleave(x.shape[0] // experts).unsqueeze(1)
        return index, x.new_ones(index.shape)
    if spec.form == "shared":
        experts = stack_declared(module, "down_proj").shape[0]
        rows = x.shape[:-1].numel()
        is_dense = len(routing) == 1 and routing[0].numel() == rows * experts
        if not is_dense or routing[0].dtype != x.dtype or autocast_dtype(x.device.type) is not None:
            return None
        index = torch.arange(experts, device=x.device).expand(rows, experts)
        return index, routing[0].reshape(rows, experts)
    same_shape = len(routing) == 2 and routing[0].shape == routing[1].shape
    return (routing[0], routing[1]) if same_shape and not routing[0].is_floating_point() else None


def is_probed_call(module: Any, spec: ExpertsKind, hidden: Tensor) -> bool:
    """Whether a call has a form that was probed, with ordinary weights."""
    if globally_hooked() or not is_current(module, spec.signature) or selected(module) is None:
        return False
    return type(hidden) is Tensor and all(
        isinstance(t, Stack)
        or (type(t) in WEIGHT_TYPES and t.is_floating_point() and t.itemsize > 1)
        for t in (stack_declared(module, name) for name in spec.parameters)
    )


def apply_experts(
    module: Any,
    spec: ExpertsKind,
    x: Tensor,
    index: Tensor,
    routing: Tensor,
    factors: Mapping[str, Any] | None = None,
) -> Tensor:
    """Run the operator with the weights of ``module`` and the matrices of its adapters."""
    if spec.form == "shared":
        return _shared(module, spec, x, routing)
    if not spec.norm:
        return _summed(module, spec, x, index, routing, factors or {})
    # every token-expert pair is a row, since the norm applies to the output of one expert
    pairs = x.unsqueeze(1).expand(-1, index.shape[1], -1).reshape(-1, x.shape[1])
    unit_routing = routing.new_ones(index.numel(), 1)
    y = _summed(module, spec, pairs, index.reshape(-1, 1), unit_routing, factors or {})
    y = getattr(module, spec.norm)(y) * routing.reshape(-1, 1)
    wide = torch.promote_types(y.dtype, torch.float32)
    return cast(Tensor, y.view(*index.shape, y.shape[-1]).sum(1, dtype=wide).to(x.dtype))


def _shared(module: Any, spec: ExpertsKind, x: Tensor, routing: Tensor) -> Tensor:
    """The weighted sum of MLPs that all tokens go to."""
    rows, total = x.reshape(-1, x.shape[-1]), None
    stacks = [getattr(module, name).unbind(0) for name in spec.weights]
    for weight, parts in zip(routing.split(1, 1), zip(*stacks, strict=True), strict=True):
        y = ops.gated_mlp(rows, *parts, activation=spec.activation) * weight
        y = y.to(torch.promote_types(y.dtype, torch.float32))
        total = y if total is None else total + y
    return cast(Tensor, total).to(x.dtype).view(x.shape)


def _summed(
    module: Any,
    spec: ExpertsKind,
    x: Tensor,
    index: Tensor,
    routing: Tensor,
    factors: Mapping[str, Any],
) -> Tensor:
    """The weighted sum of the outputs of every token's experts."""
    parts, dtype = [stacked(module, name) for name in spec.parameters], x.dtype
    experts = parts[1].shape[0]
    if autocast_dtype(x.device.type) is None or computes_in_weight_dtype(module, x.device.type):
        x = x.to(parts[1].dtype)
    if spec.form == "identity":
        parts[0] = parts[0][:experts]
    run = functools.partial(_run, spec)
    fits_at_once = in_one_piece(parts)
    parts = [viewed(part) for part in parts] if fits_at_once else parts
    with autocast_of(module, x.device.type):
        y = (run if fits_at_once else functools.partial(in_groups, run))(
            parts, x, index, routing, factors
        )
    if spec.form == "identity":
        y = y + torch.where(index < experts, 0, routing).sum(-1, keepdim=True).to(y.dtype) * x
    return y.to(dtype)


def _run(
    spec: ExpertsKind,
    parts: Sequence[Tensor],
    x: Tensor,
    index: Tensor,
    routing: Tensor,
    factors: Mapping[str, Any],
) -> Tensor:
    weight, down, *biases = parts
    options: dict[str, Any] = spec.options
    if biases:
        options |= {"gate_up_bias": biases[0], "down_bias": biases[1]}
    if not factors:
        return ops.fused_moe(x, weight, down, index, routing, **options)
    adapters = [_adapter(factors, layer) for layer in ("gate_up", "down")]
    return ops.lora_moe(x, weight, down, index, routing, *adapters, **options)


def _adapter(factors: Mapping[str, Any], layer: str) -> ops.LoRA | None:
    if f"{layer}_a" not in factors:
        return None
    scale = factors.get(f"{layer}_scale", 1.0)
    return ops.LoRA(factors[f"{layer}_a"], factors[f"{layer}_b"], scale)
