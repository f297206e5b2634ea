"""The rotary kinds beside the plain one: merged sections of grids, positions, sorted pairs."""

from typing import Optional

import torch
from torch import Tensor

from liger_multi.reference.rope import rope

# --- angles ---


def grids(sections: str, chunked: bool, device: torch.device) -> Tensor:
    """Which grid every pair belongs to.

    Chunked, each section is a run of pairs. Interleaved, pair p belongs to grid ``p % G`` while
    that section lasts, and to the first one then.
    """
    sizes = [int(size) for size in sections.split(",")]
    pair = torch.arange(sum(sizes), device=device)
    if chunked:
        return torch.arange(len(sizes), device=device).repeat_interleave(
            torch.tensor(sizes, device=device), output_size=sum(sizes)
        )
    grid = pair % len(sizes)
    ends = torch.tensor(sizes, device=device)[grid] * len(sizes)
    return torch.where(pair < ends, grid, 0)


def merged(angle: Tensor, sections: str, chunked: bool, style: str) -> Tensor:
    """``(grids, batch, tokens, width)`` to ``(batch, tokens, width)``, of a value a pair or two."""
    grid = grids(sections, chunked, angle.device)
    if angle.shape[-1] == 2 * grid.numel():
        grid = torch.cat((grid, grid)) if style == "half" else grid.repeat_interleave(2)
    index = grid.expand(1, *angle.shape[1:])
    return angle.gather(0, index).squeeze(0)


def of_positions(
    position_ids: Tensor, inv_freq: Tensor, scaling: float, sections: str, chunked: bool
) -> tuple[Tensor, Tensor]:
    """Cos and sin ``(batch, tokens, pairs)`` of positions ``(grids, batch, tokens)``.

    Every product and every function in the dtype of the frequencies, fp32 at least.
    """
    kind = torch.float64 if inv_freq.dtype == torch.float64 else torch.float32
    turns = position_ids[..., None].to(kind) * inv_freq.to(kind)
    turns = merged(turns, sections, chunked, "half") if sections else turns.squeeze(0)
    return turns.cos() * scaling, turns.sin() * scaling


# --- operators ---


def _merged(
    cos: Tensor, sin: Tensor, sections: str, chunked: bool, style: str, order: str
) -> tuple[Tensor, Tensor]:
    made = [merged(t, sections, chunked, style) for t in (cos, sin)]
    return (made[0], made[1]) if len(order) == 4 else (made[0][0], made[1][0])


def _position_angles(
    like: torch.dtype, position_ids: Tensor, inv_freq: Tensor, scaling: float, sections: str,
    chunked: bool, casting: str, order: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """In the dtype of q, as the rotary modules make them; in fp32 where that is inside anyway."""
    made = of_positions(position_ids, inv_freq, scaling, sections, chunked)
    cos, sin = (t if casting == "cohere" else t.to(like) for t in made)
    return (cos, sin) if len(order) == 4 else (cos[0], sin[0])


def _halves(x: Tensor, rotary_dim: int) -> Tensor:
    """Even channels first; those that do not turn stay."""
    turned = x[..., :rotary_dim].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return turned if rotary_dim == x.shape[-1] else torch.cat((turned, x[..., rotary_dim:]), -1)


def _pairs(x: Tensor, rotary_dim: int) -> Tensor:
    """The way back."""
    turned = x[..., :rotary_dim].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return turned if rotary_dim == x.shape[-1] else torch.cat((turned, x[..., rotary_dim:]), -1)


class ComplexRope:
    """Rotary embedding by complex numbers: interleaved pairs in fp32, cast back."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, freqs: Tensor, head_axis: int, rotary_dim: int, q_order: str,
        k_order: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Multiply every pair of channels by its number."""
        how = ("interleaved", head_axis, rotary_dim, "cohere", q_order, k_order)
        return rope.forward(q, k, freqs[..., 0], freqs[..., 1], *how)

    @staticmethod
    def backward(
        dq_out: Optional[Tensor], dk_out: Optional[Tensor], freqs: Tensor, head_axis: int,
        rotary_dim: int, q_order: str, k_order: str, q_dtype: torch.dtype, k_dtype: torch.dtype,
        needs_q: bool, needs_k: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Multiply the gradients by the conjugated numbers."""
        how = ("interleaved", head_axis, rotary_dim, "cohere", q_order, k_order, q_dtype, k_dtype)
        return rope.backward(dq_out, dk_out, freqs[..., 0], freqs[..., 1], *how, needs_q, needs_k)


class MultimodalRope:
    """RoPE with sections of several grids (M-RoPE): merged angles, then plain ``rope``."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sections: str, chunked: bool, style: str,
        head_axis: int, rotary_dim: int, casting: str, q_order: str, k_order: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Rotate q and k."""
        cos, sin = _merged(cos, sin, sections, chunked, style, q_order)
        return rope.forward(q, k, cos, sin, style, head_axis, rotary_dim, casting, q_order, k_order)

    @staticmethod
    def backward(
        dq_out: Optional[Tensor], dk_out: Optional[Tensor], cos: Tensor, sin: Tensor, sections: str,
        chunked: bool, style: str, head_axis: int, rotary_dim: int, casting: str, q_order: str,
        k_order: str, q_dtype: torch.dtype, k_dtype: torch.dtype, needs_q: bool, needs_k: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Rotate the gradients by the transposed matrix."""
        cos, sin = _merged(cos, sin, sections, chunked, style, q_order)
        how = (style, head_axis, rotary_dim, casting, q_order, k_order, q_dtype, k_dtype)
        return rope.backward(dq_out, dk_out, cos, sin, *how, needs_q, needs_k)


class PositionRope:
    """Rotary embedding of integer positions: their angles, then plain ``rope``."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, position_ids: Tensor, inv_freq: Tensor, scaling: float, sections: str,
        chunked: bool, style: str, head_axis: int, casting: str, q_order: str, k_order: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Rotate q and k."""
        angles = (scaling, sections, chunked, casting, q_order)
        cos, sin = _position_angles(q.dtype, position_ids, inv_freq, *angles)
        how = (style, head_axis, 2 * inv_freq.numel(), casting, q_order, k_order)
        return rope.forward(q, k, cos, sin, *how)

    @staticmethod
    def backward(
        dq_out: Optional[Tensor], dk_out: Optional[Tensor], inv_freq: Tensor, position_ids: Tensor,
        scaling: float, sections: str, chunked: bool, style: str, head_axis: int, casting: str,
        q_order: str, k_order: str, q_dtype: torch.dtype, k_dtype: torch.dtype, needs_q: bool,
        needs_k: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Rotate the gradients by the transposed matrix."""
        angles = (scaling, sections, chunked, casting, q_order)
        cos, sin = _position_angles(q_dtype, position_ids, inv_freq, *angles)
        how = (style, head_axis, 2 * inv_freq.numel(), casting, q_order, k_order, q_dtype, k_dtype)
        made: tuple[Tensor, Tensor] = rope.backward(
            dq_out, dk_out, cos, sin, *how, needs_q, needs_k
        )
        if dq_out is None and dk_out is None:
            return inv_freq.new_empty(0, dtype=q_dtype), inv_freq.new_empty(0, dtype=k_dtype)
        return made


class SortedRope:
    """Rotary embedding of interleaved pairs with half-split output."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, head_axis: int, rotary_dim: int,
        casting: str, q_order: str, k_order: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Sort the channels, then rotate halves."""
        q, k = _halves(q, rotary_dim), _halves(k, rotary_dim)
        return rope.forward(
            q, k, cos, sin, "half", head_axis, rotary_dim, casting, q_order, k_order
        )

    @staticmethod
    def backward(
        dq_out: Optional[Tensor], dk_out: Optional[Tensor], cos: Tensor, sin: Tensor,
        head_axis: int, rotary_dim: int, casting: str, q_order: str, k_order: str,
        q_dtype: torch.dtype, k_dtype: torch.dtype, needs_q: bool, needs_k: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Rotate halves back, then put the channels of each pair side by side."""
        how = ("half", head_axis, rotary_dim, casting, q_order, k_order, q_dtype, k_dtype)
        made = rope.backward(dq_out, dk_out, cos, sin, *how, needs_q, needs_k)
        outs = []
        for grad, order in zip(made, (q_order, k_order), strict=True):
            if grad.numel():
                room = rope.dense(grad, order, grad.dtype)
                outs.append(room.copy_(_pairs(grad, rotary_dim)))
            else:
                outs.append(grad)
        return outs[0], outs[1]


OPERATORS = {
    "rope_complex": ComplexRope,
    "rope_multimodal": MultimodalRope,
    "rope_positions": PositionRope,
    "rope_sorted": SortedRope,
}
