"""Known gated MLPs, as data: names of their layers, and their activations.

Adding a name here widens where the probes look; whether a module is patched is decided by its
numbers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any


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
