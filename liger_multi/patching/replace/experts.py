"""Experts: a patched instance runs all of them as one operator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn

from liger_multi.checks import autocast_dtype
from liger_multi.patching.lazy_logits.loss import run_bound
from liger_multi.patching.options import Options
from liger_multi.patching.recognize.plain_linear import globally_hooked
from liger_multi.patching.recognize.signature import (
    Signature,
    code_holds,
    holds,
)
from liger_multi.patching.replace.swap import Patched

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
        known = alike and is_probed_call(self, settings.kind, hidden_states)
        if not (known and code_holds(type(self))):
            return cast(Tensor, super().forward(hidden_states, *args, **kwargs))
        bound = (self, settings.kind, hidden_states, *routes)
        return cast(Tensor, run_bound(settings.options, ("fused_moe",), apply_experts, *bound))


def is_probed_call(module: Any, kind: ExpertsKind, hidden: Tensor) -> bool:
    """Whether a call is one of those that were probed, with ordinary weights."""
    if globally_hooked() or not holds(module, kind.signature):
        return False
    names = (*WEIGHTS, *BIASES) if kind.bias else WEIGHTS
    tensors = [getattr(module, name, None) for name in names]
    return type(hidden) is Tensor and all(
        type(t) in PLAIN and t.is_floating_point() and t.itemsize > 1  # type: ignore[union-attr]
        for t in tensors
    )


def apply_experts(
    module: Any, kind: ExpertsKind, x: Tensor, index: Tensor, routing: Tensor
) -> Tensor:
    """Run the operator with the weights of ``module``."""
    from liger_multi import ops

    weight = module.gate_up_proj
    given = x.dtype
    if autocast_dtype(x.device.type) is None:
        x = x.to(weight.dtype)
    options: dict[str, Any] = kind.options
    if kind.bias:
        options |= {"gate_up_bias": module.gate_up_proj_bias, "down_bias": module.down_proj_bias}
    return ops.fused_moe(x, weight, module.down_proj, index, routing, **options).to(given)
