"""Known norms and gated MLPs, as data.

Adding a name here widens where the probes look; whether a module is patched is decided by its
numbers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

# --- norms, and functions that stand for one ---


@dataclass(frozen=True)
class NormKind:
    """How one norm, or a function that stands for one, computes.

    Attributes:
        name: In the report.
        op: Operator.
        options: Its keyword arguments.
        tensors: Names of its arguments after the input, of which the module holds those that exist.
        exact: Whether it must agree bit for bit in bf16.
        plus: Added to the first of the tensors, where the operator has no option for it.
        one_dtype: Whether calls with a weight of another dtype are left to the module.
        gated: Whether a gate follows the input.
        grouped: Whether an attribute of the module may tell groups of channels.
        axis: The axis of the channels.
        ndim: The number of axes of the input; 0 where it does not matter.
        weight: Where weight and bias act: "inside" of the operator; "after" it, which rounds its
            result first, where they may have an axis before that of the channels; or "before" it,
            on the input, which is rounded then.
        joined: Whether the input has an axis of heads before that of the channels, and the output
            has one axis of both, which is that of the weight.
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
        """Whether the first tensor has a value for every channel."""
        return self.op in ("rms_norm", "layer_norm", "gated_rms_norm")


def _cast(casting: str, offset: float = 0.0, **more: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted({"casting": casting, "offset": offset, **more}.items()))


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
"""Tried in this order; a norm without weight is the same in the castings of the first three."""

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
"""Names of parameters by the argument that they are."""
INPUT_NAMES = ("x", "input", "hidden_states", "hidden_state")
"""Names of the argument of an activation."""
GATE_NAMES = ("gate", "z", "gate_states")
HEADS_NAMES = (("num_heads", True), ("n_heads", True))
"""Attributes that count the heads of a norm that joins them, as in :data:`GROUP_NAMES`."""
GROUP_NAMES = (("group_size", False), ("n_groups", True), ("num_groups", True), ("ngroups", True))
"""Attributes that tell the groups of a norm, and whether they count them."""


# --- gated MLPs: names of their layers, and their activations ---


@dataclass(frozen=True)
class MlpNames:
    """Names of the layers of a gated MLP; ``up`` is None where one holds gate and up."""

    gate: str
    up: str | None
    down: str

    @functools.cached_property
    def all(self) -> tuple[str, ...]:
        """The names of the layers that exist."""
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
        op: Operator; the one for packed layers is ``<op>_packed``.
        formula: What it computes, for messages.
        activation: The same for ``gated_mlp``, which takes the layers as well; empty where it does
            not know the formula.
        options: Keyword arguments of the operator.
        packed: More of them where one layer holds gate and up.
        numbers: Further ones, whose values the module's attributes of such a name hold.
        sparse: Whether the gate is cut first, to the share of it that ``sparsity``, one of the
            numbers, leaves (activation sparsity of Gemma 3n).
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
