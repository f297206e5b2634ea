"""Gated activations of two tensors, or of one that holds both; the gated MLP and the squared ReLU.

The kernels are in gated.py and pointwise.py. A gated MLP's activation is one launch each way,
between GEMMs of the vendor's library. The launch of backward writes act(gate) * up over the
gradient that it read. The gradient of down_weight needs it, and gets it for one more write and no
memory. Of the squared rectifier, y = max(x, 0)^2 (arXiv:2109.08668), a NaN stays NaN: only what is
below zero becomes zero. A linear layer is the reference's: where its rows must be independent, its
GEMMs are those of common/gemm.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.activations import gated, gated_rows
from liger_multi.backends.triton.activations.gated import GELU, multipliers
from liger_multi.backends.triton.activations.pointwise import pointwise
from liger_multi.backends.triton.float8.rows import code_room
from liger_multi.reference.activations.operators import (
    CodedGradients,
    Columns,
    Linear,
    implement_gated_mlp,
)
from liger_multi.reference.common.implementation import Implementation
from liger_multi.reference.float8.rows import Float8Rows, format_of


class SwiGLU:
    """SwiGLU of two tensors: silu(gate) * up; the kernels stand in gated.py."""

    @staticmethod
    def forward(gate: Tensor, up: Tensor, gate_multiplier: float, down_multiplier: float) -> Tensor:
        """silu(gate) * up in the promoted dtype."""
        by = multipliers(gate_multiplier, down_multiplier)
        return gated.forward("swiglu", "silu", gate, up, by)

    @staticmethod
    def backward(
        dy: Tensor, gate: Tensor, up: Tensor, gate_multiplier: float, down_multiplier: float,
        needs_gate: bool, needs_up: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Gradients of gate and up; one that nobody needs is an empty tensor."""
        by = multipliers(gate_multiplier, down_multiplier)
        return gated.backward("swiglu", "silu", dy, gate, up, needs_gate, needs_up, by)


class SwiGLUQuantized:
    """SwiGLU whose rows leave in FP8 too; the kernel stands in gated_rows.py."""

    @staticmethod
    def forward(
        gate: Tensor, up: Tensor, gate_multiplier: float, down_multiplier: float, writes_y: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """silu(gate) * up where it is wanted, its codes and scales."""
        by = multipliers(gate_multiplier, down_multiplier)
        return gated_rows.forward("swiglu", "silu", gate, up, by, code_room(gate, writes_y))

    backward = staticmethod(SwiGLU.backward)


class PackedSwiGLU:
    """SwiGLU of one tensor that holds gate and up side by side (Phi-3's layout)."""

    @staticmethod
    def forward(gate_up: Tensor, gate_multiplier: float, down_multiplier: float) -> Tensor:
        """silu(first half) * second half."""
        by = multipliers(gate_multiplier, down_multiplier)
        return gated.packed_forward("swiglu_packed", "silu", gate_up, by)

    @staticmethod
    def backward(
        dy: Tensor, gate_up: Tensor, gate_multiplier: float, down_multiplier: float
    ) -> Tensor:
        """Gradient of gate_up, both halves in one buffer."""
        by = multipliers(gate_multiplier, down_multiplier)
        return gated.packed_backward("swiglu_packed", "silu", dy, gate_up, by)


class GEGLU:
    """GEGLU of two tensors: gelu(gate) * up; the kernels stand in gated.py."""

    @staticmethod
    def forward(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
        """gelu(gate) * up in the promoted dtype."""
        return gated.forward("geglu", GELU[approximate], gate, up)

    @staticmethod
    def backward(
        dy: Tensor, gate: Tensor, up: Tensor, approximate: str, needs_gate: bool, needs_up: bool
    ) -> tuple[Tensor, Tensor]:
        """Gradients of gate and up; one that nobody needs is an empty tensor."""
        return gated.backward("geglu", GELU[approximate], dy, gate, up, needs_gate, needs_up)


class GEGLUQuantized:
    """GEGLU whose rows leave in FP8 too; the kernel stands in gated_rows.py."""

    @staticmethod
    def forward(
        gate: Tensor, up: Tensor, approximate: str, writes_y: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """gelu(gate) * up where it is wanted, its codes and scales."""
        room = code_room(gate, writes_y)
        return gated_rows.forward("geglu", GELU[approximate], gate, up, gated.NONE, room)

    backward = staticmethod(GEGLU.backward)


class PackedGEGLU:
    """GEGLU of one tensor that holds gate and up side by side on its last axis (as ModernBERT)."""

    @staticmethod
    def forward(gate_up: Tensor, approximate: str) -> Tensor:
        """gelu(first half) * second half."""
        return gated.packed_forward("geglu_packed", GELU[approximate], gate_up)

    @staticmethod
    def backward(dy: Tensor, gate_up: Tensor, approximate: str) -> Tensor:
        """Gradient of gate_up, both halves in one buffer."""
        return gated.packed_backward("geglu_packed", GELU[approximate], dy, gate_up)


class ClampedSwiGLU:
    """Clamped SwiGLU of two tensors; the kernels stand in gated.py."""

    @staticmethod
    def forward(gate: Tensor, up: Tensor, limit: float, alpha: float, up_offset: float) -> Tensor:
        """(up + offset) * gate * sigmoid(alpha * gate) of clamped values."""
        return gated.clamped_forward(gate, up, (limit, alpha, up_offset))

    @staticmethod
    def backward(
        dy: Tensor, gate: Tensor, up: Tensor, limit: float, alpha: float, up_offset: float,
        needs_gate: bool, needs_up: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Gradients of gate and up; one that nobody needs is an empty tensor."""
        return gated.clamped_backward(dy, gate, up, (limit, alpha, up_offset), needs_gate, needs_up)


class PackedClampedSwiGLU:
    """Clamped SwiGLU of one tensor that holds gate and up, in turn (GPT-OSS) or as halves."""

    @staticmethod
    def forward(
        gate_up: Tensor, limit: float, alpha: float, up_offset: float, interleaved: bool
    ) -> Tensor:
        """(up + offset) * gate * sigmoid(alpha * gate) of clamped values."""
        return gated.packed_clamped_forward(gate_up, (limit, alpha, up_offset), interleaved)

    @staticmethod
    def backward(
        dy: Tensor, gate_up: Tensor, limit: float, alpha: float, up_offset: float, interleaved: bool
    ) -> Tensor:
        """Gradient of gate_up in one buffer."""
        return gated.packed_clamped_backward(dy, gate_up, (limit, alpha, up_offset), interleaved)


# --- a gated MLP ---


class TritonActivation:
    """Launches of the kernels in gated.py."""

    @staticmethod
    def product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """act(gate) * up."""
        return gated.forward("gated_mlp", activation, gate, up)

    @staticmethod
    def coded(gate: Tensor, up: Tensor, activation: str, wanted: bool) -> tuple[Tensor, Float8Rows]:
        """act(gate) * up where it is wanted, and its rows in FP8."""
        room = code_room(gate, wanted)
        y, codes, scale = gated_rows.forward("gated_mlp", activation, gate, up, gated.NONE, room)
        return y, Float8Rows(codes.view(format_of(gate.device)), scale)

    @staticmethod
    def gradients(
        dproduct: Tensor, gate: Tensor, up: Tensor, activation: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of gate and up; act(gate) * up overwrites ``dproduct``."""
        given = ("gated_mlp", activation, dproduct, gate, up, True, True)
        return *gated.backward(*given, product=True), dproduct

    @staticmethod
    def coded_gradients(
        dproduct: Tensor, gate: Tensor, up: Tensor, activation: str, columns: Columns,
        wanted: tuple[bool, bool], product: bool,
    ) -> CodedGradients:  # fmt: skip
        """The gradients, and codes of each times a number per column; the product on wish."""
        pairs = zip((gate, up), columns, strict=True)
        first, second = rooms = [None if c is None else code_room(x, False) for x, c in pairs]
        made = gated_rows.backward(
            "gated_mlp", activation, dproduct, gate, up, gated.NONE, (first, second), columns,
            wanted, product,
        )  # fmt: skip
        codes = [None if room is None else room.rows_of(format_of(gate.device)) for room in rooms]
        return CodedGradients(*made, dproduct, *codes)


gated_mlp = Implementation(*implement_gated_mlp(TritonActivation()))


# --- squared ReLU ---


@triton.jit
def _value(x):
    """max(x, 0)^2."""
    x = tl.where(x < 0.0, 0.0, x)
    return x * x


@triton.jit
def _slope(x):
    """2 max(x, 0)."""
    return tl.where(x < 0.0, 0.0, x) * 2.0


relu_squared = Implementation(*pointwise("relu_squared", _value, _slope))


OPERATORS = {
    "swiglu": SwiGLU,
    "swiglu_quantized": SwiGLUQuantized,
    "swiglu_packed": PackedSwiGLU,
    "geglu": GEGLU,
    "geglu_quantized": GEGLUQuantized,
    "geglu_packed": PackedGEGLU,
    "swiglu_clamped": ClampedSwiGLU,
    "swiglu_clamped_packed": PackedClampedSwiGLU,
    "gated_mlp": gated_mlp,
    "linear": Linear,
    "relu_squared": relu_squared,
}
