"""A gated MLP, ``y = (act(x Wg') * (x Wu')) Wd'``; its activation is one launch each way.

The kernels are in gated.py, and stand between GEMMs of the vendor's library. The launch of backward
writes act(gate) * up over the gradient that it read. The gradient of down_weight needs it, and gets
it for one more write and no memory.
"""

from torch import Tensor

from liger_multi.backends.triton.activations import gated, gated_rows
from liger_multi.backends.triton.float8.rows import code_buffers
from liger_multi.reference.activations.gated_mlp import CodedGradients, Columns, implement_gated_mlp
from liger_multi.reference.float8.rows import Float8Rows, format_of


class TritonActivation:
    """Launches of the kernels in gated.py."""

    @staticmethod
    def product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """act(gate) * up."""
        return gated.forward("gated_mlp", activation, gate, up)

    @staticmethod
    def coded(
        gate: Tensor, up: Tensor, activation: str, needs_output: bool
    ) -> tuple[Tensor, Float8Rows]:
        """act(gate) * up, empty if not needed, and its rows in FP8."""
        buffer = code_buffers(gate, needs_output)
        y, codes, scale = gated_rows.forward("gated_mlp", activation, gate, up, gated.NONE, buffer)
        return y, Float8Rows(codes.view(format_of(gate.device)), scale)

    @staticmethod
    def gradients(
        dproduct: Tensor, gate: Tensor, up: Tensor, activation: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of gate and up; act(gate) * up overwrites ``dproduct``."""
        args = ("gated_mlp", activation, dproduct, gate, up, True, True)
        return *gated.backward(*args, product=True), dproduct

    @staticmethod
    def coded_gradients(
        dproduct: Tensor,
        gate: Tensor,
        up: Tensor,
        activation: str,
        columns: Columns,
        needs_output: tuple[bool, bool],
        product: bool,
    ) -> CodedGradients:
        """The gradients, codes of each times a factor per column, and optionally the product."""
        pairs = zip((gate, up), columns, strict=True)
        first, second = buffers = [None if c is None else code_buffers(x, False) for x, c in pairs]
        gradients = gated_rows.backward(
            "gated_mlp",
            activation=activation,
            dy=dproduct,
            gate=gate,
            up=up,
            multipliers=gated.NONE,
            buffers=(first, second),
            columns=columns,
            needs_output=needs_output,
            product=product,
        )
        codes = [
            None if buffer is None else buffer.rows_of(format_of(gate.device)) for buffer in buffers
        ]
        return CodedGradients(*gradients, dproduct, *codes)


forward, backward = implement_gated_mlp(TritonActivation())
