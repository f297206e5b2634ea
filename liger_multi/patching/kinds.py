"""What is known about the norms and gated MLPs of models, as data.

Adding a name here widens where the probes look; whether a module is patched is decided by its
numbers.
"""

from __future__ import annotations

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
