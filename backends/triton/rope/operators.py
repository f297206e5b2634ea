"""The rotary kinds beside the plain one; rope_kinds.py launches their kernel."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from liger_multi.backends.triton.rope.rope_kinds import ROUNDED, Angles, angles, rotate
from liger_multi.reference.rope.rope import output_dtype


def _complex_angles(freqs: Tensor, rotary_dim: int) -> Angles:
    flat = freqs.contiguous().flatten(-2)
    flat = flat.view((1,) * (4 - flat.ndim) + flat.shape)
    return Angles("complex", flat, flat, rotary_dim)


def _position_angles(
    like: torch.dtype, position_ids: Tensor, inv_freq: Tensor, scaling: float, sections: str,
    chunked: bool, casting: str,
) -> Angles:  # fmt: skip
    rounded = "" if casting == "cohere" else ROUNDED.get(like, "")
    return Angles(
        "positions", position_ids, inv_freq.contiguous(), 2 * inv_freq.numel(), sections=sections,
        chunked=chunked, scaling=scaling, round=rounded,
    )  # fmt: skip


class ComplexRope:
    """Rotary embedding by complex numbers; the kernel stands in rope_kinds_kernel.py."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, freqs: Tensor, head_axis: int, rotary_dim: int, q_order: str,
        k_order: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Rotate q and k; products and sums in fp32, rounded once."""
        orders, dtypes, turning = (
            (q_order, k_order),
            (q.dtype, k.dtype),
            _complex_angles(freqs, rotary_dim),
        )
        return rotate(
            "rope_complex", (q, k), orders, dtypes, head_axis, turning, (True, True), False
        )

    @staticmethod
    def backward(
        dq_out: Optional[Tensor], dk_out: Optional[Tensor], freqs: Tensor, head_axis: int,
        rotary_dim: int, q_order: str, k_order: str, q_dtype: torch.dtype, k_dtype: torch.dtype,
        needs_q: bool, needs_k: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Gradients of q and k; empty where not needed, or where nothing upstream has one."""
        given = (dq_out if needs_q else None, dk_out if needs_k else None)
        orders, dtypes, turning = (
            (q_order, k_order),
            (q_dtype, k_dtype),
            _complex_angles(freqs, rotary_dim),
        )
        return rotate("rope_complex", given, orders, dtypes, head_axis, turning, (True, True), True)


class MultimodalRope:
    """Rotary embedding with sections of several grids (M-RoPE, arXiv:2409.12191).

    The kernel stands in rope_kinds_kernel.py; it reads each pair's angles from its grid.
    """

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sections: str, chunked: bool, style: str,
        head_axis: int, rotary_dim: int, casting: str, q_order: str, k_order: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Rotate q and k; products and sums in fp32, rounded once."""
        beside = style == "interleaved"
        dtypes = (output_dtype(q, cos, sin, casting), output_dtype(k, cos, sin, casting))
        turning = angles(
            "", cos, sin, rotary_dim, beside=beside, sections=sections, chunked=chunked
        )
        orders = (q_order, k_order)
        return rotate(
            "rope_multimodal", (q, k), orders, dtypes, head_axis, turning, (beside, beside), False
        )

    @staticmethod
    def backward(
        dq_out: Optional[Tensor], dk_out: Optional[Tensor], cos: Tensor, sin: Tensor, sections: str,
        chunked: bool, style: str, head_axis: int, rotary_dim: int, casting: str, q_order: str,
        k_order: str, q_dtype: torch.dtype, k_dtype: torch.dtype, needs_q: bool, needs_k: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Gradients of q and k; empty where not needed, or where nothing upstream has one."""
        beside = style == "interleaved"
        given = (dq_out if needs_q else None, dk_out if needs_k else None)
        turning = angles(
            "", cos, sin, rotary_dim, beside=beside, sections=sections, chunked=chunked
        )
        return rotate(
            "rope_multimodal", given, (q_order, k_order), (q_dtype, k_dtype), head_axis, turning,
            (beside, beside), True,
        )  # fmt: skip


class PositionRope:
    """Rotary embedding of integer positions, whose angles the kernel makes and never stores.

    The kernel stands in rope_kinds_kernel.py.
    """

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, position_ids: Tensor, inv_freq: Tensor, scaling: float, sections: str,
        chunked: bool, style: str, head_axis: int, casting: str, q_order: str, k_order: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Rotate q and k; products and sums in fp32, rounded once."""
        beside, orders = style == "interleaved", (q_order, k_order)
        kind = k.dtype if casting == "cohere" else torch.promote_types(k.dtype, q.dtype)
        turning = _position_angles(
            q.dtype, position_ids, inv_freq, scaling, sections, chunked, casting
        )
        return rotate(
            "rope_positions",
            (q, k),
            orders,
            (q.dtype, kind),
            head_axis,
            turning,
            (beside, beside),
            False,
        )

    @staticmethod
    def backward(
        dq_out: Optional[Tensor], dk_out: Optional[Tensor], inv_freq: Tensor, position_ids: Tensor,
        scaling: float, sections: str, chunked: bool, style: str, head_axis: int, casting: str,
        q_order: str, k_order: str, q_dtype: torch.dtype, k_dtype: torch.dtype, needs_q: bool,
        needs_k: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Gradients of q and k; empty where not needed, or where nothing upstream has one."""
        beside, given = (
            style == "interleaved",
            (dq_out if needs_q else None, dk_out if needs_k else None),
        )
        turning = _position_angles(
            q_dtype, position_ids, inv_freq, scaling, sections, chunked, casting
        )
        return rotate(
            "rope_positions", given, (q_order, k_order), (q_dtype, k_dtype), head_axis, turning,
            (beside, beside), True,
        )  # fmt: skip


class SortedRope:
    """Rotary embedding of interleaved pairs with half-split output, in one pass (arXiv:2412.19437).

    The kernel stands in rope_kinds_kernel.py: pairs are loaded side by side, and stored half-split.
    """

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, head_axis: int, rotary_dim: int,
        casting: str, q_order: str, k_order: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Rotate q and k; products and sums in fp32, rounded once."""
        dtypes = (output_dtype(q, cos, sin, casting), output_dtype(k, cos, sin, casting))
        orders, turning = (q_order, k_order), angles("", cos, sin, rotary_dim)
        return rotate(
            "rope_sorted", (q, k), orders, dtypes, head_axis, turning, (True, False), False
        )

    @staticmethod
    def backward(
        dq_out: Optional[Tensor], dk_out: Optional[Tensor], cos: Tensor, sin: Tensor,
        head_axis: int, rotary_dim: int, casting: str, q_order: str, k_order: str,
        q_dtype: torch.dtype, k_dtype: torch.dtype, needs_q: bool, needs_k: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Gradients of q and k; empty where not needed, or where nothing upstream has one."""
        given = (dq_out if needs_q else None, dk_out if needs_k else None)
        orders, dtypes, turning = (
            (q_order, k_order),
            (q_dtype, k_dtype),
            angles("", cos, sin, rotary_dim),
        )
        return rotate("rope_sorted", given, orders, dtypes, head_axis, turning, (False, True), True)


OPERATORS = {
    "rope_complex": ComplexRope,
    "rope_multimodal": MultimodalRope,
    "rope_positions": PositionRope,
    "rope_sorted": SortedRope,
}
