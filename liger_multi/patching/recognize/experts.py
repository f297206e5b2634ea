"""Expert instances: recognize their gate, and run all experts as one operator.

transformers keeps the weights of all experts in two tensors, says by flags how they lie, and asks
``_apply_gate`` for what stands between the products. That method of a replica is compared with the
formulas of the operator, and then its whole forward; so models that nobody has listed are served as
well.
``experts_implementation="liger_multi"`` is the same through transformers' own interface.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_multi.checks import autocast_dtype
from liger_multi.errors import ConfigurationError
from liger_multi.patching.lazy_logits.loss import run_bound
from liger_multi.patching.options import Options
from liger_multi.patching.recognize.compare import MODES, Watch, disagreement, set_mode
from liger_multi.patching.recognize.plain_linear import globally_hooked
from liger_multi.patching.recognize.probe import probe_context, random, scalars, skeleton
from liger_multi.patching.recognize.signature import (
    Signature,
    code_holds,
    code_of,
    holds,
    signature_of,
    watched_code,
)
from liger_multi.patching.replace.swap import Patched, unpatched_class

NAME = "liger_multi"
WEIGHTS = ("gate_up_proj", "down_proj")
BIASES = ("gate_up_proj_bias", "down_proj_bias")
PLAIN = (Tensor, nn.Parameter)


@dataclass(frozen=True)
class ExpertsKind:
    """What the operator needs to know of a module: its gate, and how its weights lie."""

    activation: str
    interleaved: bool
    transposed: bool
    bias: bool
    clamps: tuple[tuple[str, float], ...] = ()
    signature: Signature = field(default_factory=Signature)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of ``fused_moe``."""
        how = {"interleaved": self.interleaved, "transposed": self.transposed}
        return {"activation": self.activation, **how, **dict(self.clamps)}


@dataclass(frozen=True)
class ExpertsSettings:
    """The kind, and the options of the patch."""

    kind: ExpertsKind
    options: Options

    @property
    def signature(self) -> Signature:
        """What must not have changed since the probe, or the stock forward runs."""
        return self.kind.signature

    @property
    def shown(self) -> str:
        """What the report says that runs now."""
        return f"fused_moe[{self.kind.activation}]"


class FusedExperts(Patched):
    """All experts of a layer as one operator."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The experts with nothing kept but gate and up; what was not probed runs stock."""
        if not isinstance(self, FusedExperts):
            return cast(Tensor, type(self).forward(self, hidden_states, *args, **kwargs))
        settings = cast(ExpertsSettings, type(self)._liger_multi_swap.settings)
        routes = (*args, *kwargs.values())  # the index first, whatever a model calls it
        # transformers 5.0 hands phimoe's experts a routing of all experts, and reads two of them
        alike = len(routes) == 2 and routes[0].shape == routes[1].shape
        alike = alike and not routes[0].is_floating_point()
        known = alike and _plain(self, settings.kind, hidden_states) and code_holds(type(self))
        if not known:
            return cast(Tensor, super().forward(hidden_states, *args, **kwargs))
        found = run_bound(
            settings.options, ("fused_moe",), _apply, self, settings.kind, hidden_states, *routes
        )
        return cast(Tensor, found)


def _plain(module: Any, kind: ExpertsKind, hidden: Tensor) -> bool:
    """Whether a call is one of those that were probed, with ordinary weights."""
    if globally_hooked() or not holds(module, kind.signature):
        return False
    names = (*WEIGHTS, *BIASES) if kind.bias else WEIGHTS
    tensors = [getattr(module, name, None) for name in names]
    return type(hidden) is Tensor and all(
        type(t) in PLAIN and t.is_floating_point() and t.itemsize > 1  # type: ignore[union-attr]
        for t in tensors
    )


def _apply(module: Any, kind: ExpertsKind, x: Tensor, index: Tensor, routing: Tensor) -> Tensor:
    from liger_multi import ops

    weight = module.gate_up_proj
    given = x.dtype
    if autocast_dtype(x.device.type) is None:
        x = x.to(weight.dtype)
    options: dict[str, Any] = kind.options
    if kind.bias:
        options |= {"gate_up_bias": module.gate_up_proj_bias, "down_bias": module.down_proj_bias}
    return ops.fused_moe(x, weight, module.down_proj, index, routing, **options).to(given)


def looks_like_experts(module: nn.Module) -> bool:
    """Whether transformers' interface serves the experts of a module."""
    return hasattr(module, "_apply_gate") and any(name in module._parameters for name in WEIGHTS)


_known: dict[Any, ExpertsKind | str] = {}


def experts_kind(module: nn.Module) -> ExpertsKind | str:
    """The kind of an instance, or the reason why it stays as it is."""
    for flag, wanted, reason in (
        ("has_gate", True, "its experts have no gate"),
        ("has_post_expert_norm", False, "its experts end in a norm"),
    ):
        if getattr(module, flag, wanted) is not wanted:
            return reason
    kind = unpatched_class(module)
    signature = _signature(module, kind, ())
    if isinstance(signature, str):
        return signature
    code = code_of(kind, signature)
    shapes = tuple((n, tuple(p.shape)) for n, p in module._parameters.items() if p is not None)
    key = (kind, code, signature, shapes, scalars(module))
    found = _known.get(key)
    if found is None:
        found = _known[key] = _measure(module)
    return found


_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")


def _signature(module: nn.Module, kind: type[nn.Module], seen: Collection[str]) -> Signature | str:
    """Of gate, forward and flags, without the configuration: see :class:`_Eager`."""
    flags = [name for name in _FLAGS if name in vars(module)]
    taken = ("config", *WEIGHTS, *BIASES)
    return signature_of(module, kind, taken, [*flags, *seen], ("forward", "_apply_gate"))


def _measure(module: nn.Module) -> ExpertsKind | str:
    """Compare the gate of a replica with every formula, and the forward with the operator."""
    own, watch = unpatched_class(module), Watch()
    try:
        with probe_context() as generator:
            replica, inputs = _replica(module, generator)
            x = (random(generator, 6, 48) * 4).requires_grad_()
            with watch.over(replica):
                for training, grad in MODES:
                    set_mode(replica, training)
                    with torch.set_grad_enabled(grad):
                        replica.forward(*inputs)
                stock = replica._apply_gate(x)
            if watch.written:
                return f"its forward sets its {', '.join(sorted(watch.written))}"
            if getattr(replica, "config", _Eager(None)).read:
                return "its forward reads its configuration, which may change later"
            kind = next((k for k in _candidates(module) if _same_gate(stock, x, k)), None)
            if kind is None:
                return f"the gate of {own.__name__} is none that fused_moe has"
            found = _disagreement(replica, inputs, kind, generator)
            if found:
                return f"{own.__name__} is more than its gate and products: {found}"
    except Exception as error:  # somebody's forward: any failure means that it is not one of ours
        return f"its forward failed on a replica: {type(error).__name__}: {error}"
    signature = _signature(module, own, watch.read)
    return signature if isinstance(signature, str) else replace(kind, signature=signature)


def _same_gate(stock: Tensor, x: Tensor, kind: ExpertsKind) -> bool:
    y = _gate(x, kind)
    if y.shape != stock.shape or not _near(y, stock):
        return False
    (slope,) = torch.autograd.grad(stock.sum(), x, retain_graph=True)
    (ours,) = torch.autograd.grad(y.sum(), x)
    return _near(ours, slope)


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


def _replica(module: nn.Module, generator: torch.Generator) -> tuple[Any, list[Tensor]]:
    """A small copy, and hidden states, indices and weights of experts."""
    held = {n: p for n, p in module._parameters.items() if p is not None}
    shapes = {n: getattr(p, "ds_shape", p.shape) for n, p in held.items()}  # partitioned by ZeRO-3
    experts, *axes = shapes[WEIGHTS[0]]
    hidden, wide = axes if getattr(module, "is_transposed", False) else reversed(axes)
    sizes = {wide // 2: 6, wide: 12}
    sizes.setdefault(hidden, 8)
    sizes.setdefault(experts, 4)
    replica: Any = skeleton(module, sizes)
    for name, whole in shapes.items():
        small = random(generator, *(sizes[n] for n in whole)) * 0.5
        replica._parameters[name] = nn.Parameter(small)
    for name, part in module._modules.items():
        replica._modules[name] = None if part is None else skeleton(part)
    if "config" in vars(replica):
        replica.__dict__["config"] = _Eager(replica.config)
    scores = random(generator, 7, sizes[experts])
    routing, index = scores.softmax(-1).topk(min(2, sizes[experts]), -1)
    return replica, [random(generator, 7, sizes[hidden]), index, routing]


def _disagreement(
    replica: Any, inputs: list[Tensor], kind: ExpertsKind, generator: torch.Generator
) -> str | None:
    def stock(*given: Tensor) -> Any:
        return replica.forward(*given)

    def ours(*given: Tensor) -> Tensor:
        return _apply(replica, kind, *given)

    def close(a: Tensor, b: Tensor) -> bool:
        return torch.allclose(a, b, rtol=1e-4, atol=1e-5)

    return disagreement(replica, stock, ours, inputs, close, generator)


def _near(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def _gate(x: Tensor, kind: ExpertsKind) -> Tensor:
    from liger_multi.reference.experts.pairs import product

    if kind.activation == "swiglu_clamped":
        numbers = dict(kind.clamps)
        by = tuple(numbers[name] for name in ("limit", "alpha", "up_offset"))
        return product(x, (kind.activation, *by, kind.interleaved))
    return product(x, (kind.activation, 7.0, 1.0, 0.0, kind.interleaved))


def _candidates(module: nn.Module) -> list[ExpertsKind]:
    bias = all(getattr(module, name, None) is not None for name in BIASES)
    transposed = bool(getattr(module, "is_transposed", False))
    orders = (False, True)
    found = [
        ExpertsKind(activation, order, transposed, bias)
        for activation in ("silu", "gelu_tanh", "gelu")
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


# --- transformers' own interface ---

_found: dict[type, list[tuple[ExpertsKind, Callable[[], bool]]]] = {}
"""What the probe found for instances of a class, and whether the class is as it was then."""


def _kind_at_a_call(module: nn.Module) -> ExpertsKind | str:
    """As :func:`experts_kind`, which would take ten times as long as the rest of a call."""
    own = unpatched_class(module)
    bias = all(module._parameters.get(name) is not None for name in BIASES)
    known = _found.get(own, [])
    for kind, unchanged in known:
        if kind.bias == bias and unchanged() and holds(module, kind.signature):
            return kind
    found = experts_kind(module)
    if isinstance(found, ExpertsKind):
        kept = [entry for entry in known if entry[0] != found and entry[1]()]
        _found[own] = [*kept, (found, watched_code(own, found.signature))]
    return found


def implementation(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What ``experts_implementation`` calls; gates of other kinds go to the grouped products."""
    kind = _kind_at_a_call(module)
    if isinstance(kind, ExpertsKind) and _plain(module, kind, hidden_states):
        return _apply(module, kind, hidden_states, top_k_index, top_k_weights)
    from transformers.integrations.moe import grouped_mm_experts_forward

    found = grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    return cast(Tensor, found)


def register_experts(name: str = NAME) -> None:
    """Make ``experts_implementation=name`` this library's operator, for all models.

    Models that do not ask for the name are not affected. Registering twice is registering once.

    Raises:
        ConfigurationError: Somebody else has registered the name, or models of this transformers
            take its own names only (before 5.7); ``patch`` works there.
    """
    from packaging.version import parse
    from transformers import __version__
    from transformers.integrations.moe import ExpertsInterface

    if parse(__version__) < parse("5.7"):
        raise ConfigurationError(
            f"register_experts needs transformers >= 5.7, this is {__version__}, whose models take "
            "no names but its own; patch(model) runs the same operator"
        )
    there = ExpertsInterface._global_mapping.get(name)
    if there is not None and there is not implementation:
        raise ConfigurationError(
            f"register_experts: transformers has another {name!r}, {there!r}; register under a "
            "name of your own"
        )
    ExpertsInterface.register(name, implementation)


def unregister_experts(name: str = NAME) -> None:
    """Take ``name`` out of transformers again; models that still ask for it fail with its name."""
    from transformers.integrations.moe import ExpertsInterface

    if ExpertsInterface._global_mapping.get(name) is implementation:
        del ExpertsInterface._global_mapping[name]
