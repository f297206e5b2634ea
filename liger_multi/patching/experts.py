"""Expert instances: recognise their gate, and run all experts as one operator.

transformers keeps the weights of all experts in two tensors, says by flags how they lie, and asks
``_apply_gate`` for what stands between the products. A stand-in of that method is compared with the
formulas of the operator; so models that nobody has listed are served as well.
``experts_implementation="liger_multi"`` is the same through transformers' own interface.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_multi.checks import autocast_dtype
from liger_multi.errors import ConfigurationError
from liger_multi.patching.loss import run_bound
from liger_multi.patching.options import Options
from liger_multi.patching.probe import laboratory, random, scalars, shell
from liger_multi.patching.swap import Patched, stock_class

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
    def shown(self) -> str:
        """What the report says that runs now."""
        return f"fused_moe[{self.kind.activation}]"


class FusedExperts(Patched):
    """All experts of a layer as one operator."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The experts with nothing kept but gate and up; stock for weights that are not plain."""
        settings = cast(ExpertsSettings, type(self)._liger_multi_swap.settings)
        routes = (*args, *kwargs.values())  # the index first, whatever a model calls it
        # transformers 5.0 hands phimoe's experts a routing of all experts, and reads two of them
        alike = len(routes) == 2 and routes[0].shape == routes[1].shape
        if not (alike and _plain(self, settings.kind, hidden_states)):
            return cast(Tensor, super().forward(hidden_states, *args, **kwargs))
        found = run_bound(
            settings.options, ("fused_moe",), _apply, self, settings.kind, hidden_states, *routes
        )
        return cast(Tensor, found)


def _plain(module: Any, kind: ExpertsKind, hidden: Tensor) -> bool:
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
    parts = tuple((n, type(m), scalars(m)) for n, m in module._modules.items() if m is not None)
    kind = stock_class(module)
    key = (kind, kind._apply_gate, parts, scalars(module))  # type: ignore[attr-defined]
    try:
        found = _known.get(key)
    except TypeError:  # an attribute that cannot be hashed
        return _measure(module)
    if found is None:
        found = _known[key] = _measure(module)
    return found


def _measure(module: nn.Module) -> ExpertsKind | str:
    """Compare the gate of a stand-in with every formula, by its values and its gradient."""
    try:
        with laboratory() as generator:
            standin: Any = shell(module)
            for name, part in module._modules.items():
                standin._modules[name] = None if part is None else shell(part)
            x = (random(generator, 6, 48) * 4).requires_grad_()
            stock = standin._apply_gate(x)
            (slope,) = torch.autograd.grad(stock.sum(), x)
            for kind in _candidates(module):
                y = _gate(x, kind)
                (ours,) = torch.autograd.grad(y.sum(), x)
                if y.shape == stock.shape and _near(y, stock) and _near(ours, slope):
                    return kind
    except Exception as error:  # somebody's gate: any failure means that it is not one of ours
        return f"its gate failed on a stand-in: {type(error).__name__}: {error}"
    return f"the gate of {stock_class(module).__name__} is none that fused_moe has"


def _near(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def _gate(x: Tensor, kind: ExpertsKind) -> Tensor:
    from liger_multi.reference.slots import product

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


def implementation(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What ``experts_implementation`` calls; gates of other kinds go to the grouped products."""
    kind = experts_kind(module)
    if isinstance(kind, ExpertsKind) and _plain(module, kind, hidden_states):
        return _apply(module, kind, hidden_states, top_k_index, top_k_weights)
    from transformers.integrations.moe import grouped_mm_experts_forward

    found = grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    return cast(Tensor, found)


def register_experts(name: str = NAME) -> None:
    """Make ``experts_implementation=name`` this library's operator, for all models.

    Models that do not ask for the name are not affected. Registering twice is registering once.

    Raises:
        ConfigurationError: Somebody else has registered the name.
    """
    from transformers.integrations.moe import ExpertsInterface

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
