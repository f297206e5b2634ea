"""Known norms and gated MLPs as data: formulas, and names of parameters, attributes and layers.

Probes try these formulas for modules with such names. A comparison of results decides whether a
module is patched.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

# --- norms, and activations that are one operator ---


@dataclass(frozen=True)
class NormKind:
    """The formula of a norm, or of an activation that is one operator.

    Attributes:
        name: Name in the report.
        op: Operator.
        options: Keyword arguments of the operator.
        tensors: Arguments of the operator that are parameters of the module, if it has them.
        exact: Whether outputs must agree bit for bit in bf16.
        plus: Number to add to the first tensor, if the operator has no option for that.
        one_dtype: Whether the original forward runs if input and weight have different dtypes.
        gated: Whether the second argument is a gate.
        grouped: Whether an attribute of the module may give groups of channels.
        axis: Axis of the channels.
        ndim: Number of axes of the input; 0 for any.
        weight: Where weight and bias are applied: "inside" the operator; "after" it, to its rounded
            result, where they may have an axis before the channels; or "before" it, to the input,
            which is rounded then.
        joined: Whether the input has an axis of heads before the channels, and the output joins
            both, with a weight of that size.
    """

    name: str
    op: str = "rms_norm"
    options: tuple[tuple[str, Any], ...] = ()
    tensors: tuple[str, ...] = ("weight",)
    exact: bool = True
    plus: float = 0.0
    one_dtype: bool = False
    gated: bool = False
    grouped: bool = False
    axis: int = -1
    ndim: int = 0
    weight: str = "inside"
    joined: bool = False

    @property
    def of_channels(self) -> bool:
        """Whether the first tensor has one value per channel."""
        return self.op in ("rms_norm", "layer_norm", "gated_rms_norm")


def _cast(casting: str, offset: float = 0.0, **options: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted({"casting": casting, "offset": offset, **options}.items()))


def _layer_norm(name: str, plus: float = 0.0, axis: int = -1, ndim: int = 0) -> NormKind:
    tensors = ("weight", "bias")
    return NormKind(name, "layer_norm", (), tensors, False, plus, True, axis=axis, ndim=ndim)


def _rounded_first(name: str, ndim: int = 0, joined: bool = False) -> NormKind:
    return replace(_layer_norm(name, ndim=ndim), weight="after", joined=joined)


def _gated(casting: str, activation: str, first: bool) -> NormKind:
    options = _cast(casting, activation=activation, norm_before_gate=first)
    order = "norm first" if first else "gate first"
    return NormKind(
        f"{casting}, {activation}, {order}", "gated_rms_norm", options, gated=True, grouped=True
    )


NORM_KINDS = (
    NormKind("llama", options=_cast("llama")),
    NormKind("olmo", options=_cast("olmo")),
    NormKind("gemma", options=_cast("gemma", 1.0)),
    NormKind("gemma", options=_cast("gemma")),
    NormKind("llama", options=_cast("llama"), one_dtype=True),
    NormKind("gemma", options=_cast("gemma"), one_dtype=True),
    NormKind("gemma, rounded 1 + weight", options=_cast("gemma"), plus=1.0),
    NormKind("scaled before it", options=_cast("llama"), plus=1.0, weight="before"),
    NormKind("factor", options=_cast("factor")),
    NormKind("gemma, groups", "gated_rms_norm", _cast("gemma", 1.0), grouped=True),
    _layer_norm("plain"),
    _layer_norm("1 + weight", plus=1.0),
    _layer_norm("channels second", axis=1, ndim=4),
    _layer_norm("channels second", axis=1, ndim=3),
    _rounded_first("rounded before the weight"),
    _rounded_first("heads joined", ndim=4, joined=True),
    *(
        _gated(casting, activation, first)
        for first in (True, False)
        for activation in ("silu", "sigmoid")
        for casting in ("llama", "olmo", "gemma")
    ),
    NormKind("plain", "poly_norm", tensors=("weight", "bias"), exact=False),
    NormKind("plain", "dyt", tensors=("alpha", "weight", "bias"), exact=False),
    NormKind("plain", "relu_squared", tensors=(), exact=False),
)
"""In the order of trials; without weight, the first three castings are equal."""

NORM_OPS = tuple(dict.fromkeys(spec.op for spec in NORM_KINDS))

EPS_NAMES = (
    "variance_epsilon",
    "eps",
    "epsilon",
    "norm_eps",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
)
TENSOR_NAMES = {
    "weight": ("weight", "scale", "gamma", "g"),
    "bias": ("bias", "beta"),
    "alpha": ("alpha",),
}
"""Names of parameters by argument of an operator."""
INPUT_NAMES = ("x", "input", "hidden_states", "hidden_state")
"""Names of the input of an activation."""
GATE_NAMES = ("gate", "z", "gate_states")
HEADS_NAMES = (("num_heads", True), ("n_heads", True))
"""Attributes with the number of heads of a norm that joins them, as in :data:`GROUP_NAMES`."""
GROUP_NAMES = (("group_size", False), ("n_groups", True), ("num_groups", True), ("ngroups", True))
"""Attributes for the groups of a norm: their number if True, else their size."""


# --- gated MLPs: names of their layers, and their activations ---


@dataclass(frozen=True)
class MlpNames:
    """Names of the layers of a gated MLP; ``up`` is None if one layer computes gate and up."""

    gate: str
    up: str | None
    down: str

    @functools.cached_property
    def all(self) -> tuple[str, ...]:
        """The names of all layers."""
        return tuple(name for name in (self.gate, self.up, self.down) if name)


MLP_NAMES = (
    MlpNames("gate_proj", "up_proj", "down_proj"),
    MlpNames("w1", "w3", "w2"),
    MlpNames("wi_0", "wi_1", "wo"),
    MlpNames("gate_up_proj", None, "down_proj"),
    MlpNames("Wi", None, "Wo"),
)


@dataclass(frozen=True)
class MlpKind:
    """The gated activation of an MLP.

    Attributes:
        op: Operator; for packed layers ``<op>_packed``.
        formula: Formula in messages.
        activation: Its name for ``gated_mlp``, which includes the layers; empty if that does not
            have it.
        options: Keyword arguments of the operator.
        packed: Further ones if one layer computes gate and up.
        numbers: Further ones with values from attributes of the module whose names contain them.
        sparse: Whether all but the largest values of the gate are dropped first, by the number
            ``sparsity`` (activation sparsity of Gemma 3n).
    """

    op: str
    formula: str
    activation: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    packed: tuple[tuple[str, Any], ...] = ()
    numbers: tuple[str, ...] = ()
    sparse: bool = False


MLP_KINDS = (
    MlpKind("swiglu", "silu(gate) * up", "silu"),
    MlpKind("geglu", "gelu(gate) * up", "gelu_tanh", (("approximate", "tanh"),)),
    MlpKind("geglu", "gelu(gate) * up", "gelu", (("approximate", "none"),)),
    *(
        MlpKind(
            "swiglu_clamped",
            "silu(clamped gate) * clamped up",
            options=(("up_offset", offset), *alpha),
            packed=(("interleaved", interleaved),),
            numbers=("limit",) if alpha else ("limit", "alpha"),
        )
        for alpha in ((), (("alpha", 1.0),))
        for offset in (1.0, 0.0)
        for interleaved in (False, True)
    ),
    *(
        MlpKind(
            "geglu",
            "gelu(sparse gate) * up",
            "",
            (("approximate", approximate),),
            (),
            ("sparsity",),
            True,
        )
        for approximate in ("tanh", "none")
    ),
)
MLP_OPS = tuple(dict.fromkeys(spec.op for spec in MLP_KINDS))
"""Tried in this order."""
