"""What is known about the norms, gated MLPs and rotary functions of models, as data.

Adding a name here widens where the probes look; whether a module is patched is decided by its
numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class NormKind:
    """How one RMSNorm computes.

    Attributes:
        casting: Where the rounding to the dtype of the input happens, as in ``rms_norm``.
        offset: Added to the weight.
    """

    casting: str
    offset: float = 0.0


NORM_KINDS = (NormKind("llama"), NormKind("olmo"), NormKind("gemma", 1.0), NormKind("gemma"))
"""Tried in this order; a norm without weight is the same in all of them."""

EPS_NAMES = (
    "variance_epsilon",
    "eps",
    "epsilon",
    "norm_eps",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
)
WEIGHT_NAMES = ("weight", "scale", "gamma")


@dataclass(frozen=True)
class MlpNames:
    """Names of the layers of a gated MLP; ``up`` is None where one holds gate and up."""

    gate: str
    up: str | None
    down: str

    @property
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
        activation: The same for ``gated_mlp``, which takes the layers as well.
        options: Keyword arguments of the operator.
    """

    op: str
    formula: str
    activation: str
    options: tuple[tuple[str, str], ...] = ()


MLP_KINDS = (
    MlpKind("swiglu", "silu(gate) * up", "silu"),
    MlpKind("geglu", "gelu(gate) * up", "gelu_tanh", (("approximate", "tanh"),)),
    MlpKind("geglu", "gelu(gate) * up", "gelu", (("approximate", "none"),)),
)
"""Tried in this order."""


@dataclass(frozen=True)
class RotaryKind:
    """How one rotary function computes, in terms of the operator ``rope``.

    Attributes:
        name: In the report.
        style: Which channels make a pair, as in ``rope``.
        casting: Dtype inside and out, as in ``rope``.
        angles: What cos and sin hold: a value for every "channel", for every "pair", or for every
            pair in their "first half".
        backwards: Whether it turns the other way.
        sorted: Whether interleaved pairs come in and halves go out.
    """

    name: str
    style: str = "half"
    casting: str = "llama"
    angles: str = "channel"
    backwards: bool = False
    sorted: bool = False


ROTARY_KINDS = (
    RotaryKind("half"),
    RotaryKind("half, cast back", casting="cohere"),
    RotaryKind("half, an angle a pair", angles="pair"),
    RotaryKind("interleaved", style="interleaved"),
    RotaryKind("interleaved, cast back", style="interleaved", casting="cohere"),
    RotaryKind("interleaved, angles in the first half", style="interleaved", angles="first half"),
    RotaryKind("interleaved, an angle a pair", style="interleaved", angles="pair"),
    RotaryKind(
        "interleaved, angles in the first half, cast back",
        style="interleaved",
        casting="cohere",
        angles="first half",
    ),
    RotaryKind("pairs to halves", sorted=True),
    RotaryKind("pairs to halves, angles in the first half", angles="first half", sorted=True),
    RotaryKind("pairs to halves, cast back", casting="cohere", sorted=True),
    RotaryKind("half, backwards", backwards=True),
    RotaryKind("half, cast back, backwards", casting="cohere", backwards=True),
)
"""Tried in this order."""

ROTARY_NAME = re.compile(r"apply_.*rotary")
ROTARY_ARGUMENTS = ("q", "k", "cos", "sin")
ROTARY_OPTIONS = ("position_ids", "unsqueeze_dim")
"""What may follow; a call that gives position ids is left to the function."""


@dataclass(frozen=True)
class RotaryForm:
    """One form of a call, as shapes for a stand-in; heads differ between q and k."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    angles: tuple[int, ...]
    unsqueeze_dim: int = 1


ROTARY_FORMS = (
    RotaryForm((2, 4, 5, 8), (2, 3, 5, 8), (2, 5, 8)),
    RotaryForm((2, 4, 5, 8), (2, 3, 5, 8), (1, 5, 8)),
    RotaryForm((2, 4, 5, 8), (2, 3, 5, 8), (2, 5, 4)),
    RotaryForm((2, 5, 4, 8), (2, 5, 3, 8), (2, 5, 8), 2),
    RotaryForm((2, 5, 4, 8), (2, 5, 3, 8), (2, 5, 4), 2),
    RotaryForm((5, 4, 8), (5, 3, 8), (5, 8)),
    RotaryForm((5, 4, 8), (5, 3, 8), (5, 4)),
)
