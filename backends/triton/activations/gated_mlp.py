"""A gated MLP: its activation is one launch each way, between GEMMs of the vendor's library.

The launch of backward writes act(gate) * up over the gradient that it read. The gradient of
down_weight needs it, and gets it for one more write and no memory.
"""

from __future__ import annotations

from torch import Tensor

from liger_multi.backends.triton.activations import gated
from liger_multi.reference.activations.operators import implement_gated_mlp


class TritonActivation:
    """Launches of the kernels in gated.py."""

    @staticmethod
    def product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """act(gate) * up."""
        return gated.forward("gated_mlp", activation, gate, up)

    @staticmethod
    def gradients(
        dproduct: Tensor, gate: Tensor, up: Tensor, activation: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of gate and up; act(gate) * up overwrites ``dproduct``."""
        return gated.backward_and_product("gated_mlp", activation, dproduct, gate, up)


forward, backward = implement_gated_mlp(TritonActivation())
