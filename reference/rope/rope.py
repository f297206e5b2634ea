"""RoPE, ``out = x * cos + rotate_half(x) * sin``, in the order of Hugging Face.

``rotate_half`` maps a pair of channels ``(a, b)`` to ``(-b, a)``; its transposed is its negative.
"""

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import row_blocks, statistics_dtype


def dense(x: Tensor, order: str, dtype: torch.dtype) -> Tensor:
    """Room of the shape of ``x``, without gaps; ``order`` names its axes from the outermost in."""
    shape, step = [*x.shape], 1
    strides = [0] * len(shape)
    for digit in reversed(order):
        axis = int(digit)
        strides[axis] = step
        step = step * shape[axis]
    return x.new_empty_strided(shape, strides, dtype=dtype)


def output_dtype(x: Tensor, cos: Tensor, sin: Tensor, casting: str) -> torch.dtype:
    """What a rotation of ``x`` returns."""
    if casting == "cohere":
        return x.dtype
    return torch.promote_types(x.dtype, torch.promote_types(cos.dtype, sin.dtype))


def rotate_half(x: Tensor, style: str) -> Tensor:
    """``(-b, a)`` in place of every pair ``(a, b)``."""
    if style == "half":
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _each_channel(angle: Tensor, style: str, rotary_dim: int) -> Tensor:
    if angle.shape[-1] == rotary_dim:
        return angle
    return torch.cat((angle, angle), -1) if style == "half" else angle.repeat_interleave(2, -1)


def _terms(
    x: Tensor, cos: Tensor, sin: Tensor, style: str, casting: str, inverse: bool
) -> tuple[Tensor, Tensor]:
    """What is multiplied by cos, and what is added: of the rotation, or of its transposed."""
    if casting == "cohere":
        x = x.to(statistics_dtype(x.dtype))
    return x, -rotate_half(x * sin, style) if inverse else rotate_half(x, style) * sin


def _rotate_into(out: Tensor, x: Tensor, cos: Tensor, added: Tensor) -> None:
    if out.dtype == torch.promote_types(x.dtype, cos.dtype):
        torch.mul(x, cos, out=out).add_(added)
    else:
        out.copy_(x * cos + added)


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    style: str,
    head_axis: int,
    rotary_dim: int,
    casting: str,
    order: str,
    dtype: torch.dtype,
    inverse: bool = False,
) -> Tensor:
    """All channels of x, tokens in blocks; in one piece where a compiler fuses it."""
    cos, sin = (
        _each_channel(t, style, rotary_dim).unsqueeze(head_axis - x.ndim) for t in (cos, sin)
    )
    options = (style, casting, inverse)
    if torch.compiler.is_compiling():
        wide, added = _terms(x[..., :rotary_dim], cos, sin, *options)
        rotated = wide * cos + added
        # a cast that does nothing lost the gradient in a traced function of torch 2.11
        rotated = rotated if rotated.dtype == dtype else rotated.to(dtype)
        if rotary_dim == x.shape[-1]:
            return rotated
        return torch.cat((rotated, x[..., rotary_dim:].to(dtype)), -1)
    out = dense(x, order, dtype)
    axis = (3 - head_axis if x.ndim == 4 else 0) - x.ndim
    tokens, passes = x.shape[axis], rotary_dim < x.shape[-1]
    token_bytes = 3 * (x.numel() // max(tokens, 1)) * statistics_dtype(x.dtype).itemsize
    for block in row_blocks(tokens, token_bytes):
        source_block, target_block, c, s = (x, out, cos, sin)
        if block != slice(0, tokens):
            start, count = block.start, block.stop - block.start
            source_block, target_block, c, s = (
                t.narrow(axis, start, count) for t in (x, out, cos, sin)
            )
        source, target = (
            t[..., :rotary_dim] if passes else t for t in (source_block, target_block)
        )
        wide, added = _terms(source, c, s, *options)
        _rotate_into(target, wide, c, added)
        if passes:
            target_block[..., rotary_dim:] = source_block[..., rotary_dim:]
    return out


def forward(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    style: str,
    head_axis: int,
    rotary_dim: int,
    casting: str,
    q_order: str,
    k_order: str,
) -> tuple[Tensor, Tensor]:
    """Rotate q and k."""
    options = (cos, sin, style, head_axis, rotary_dim, casting)
    return (
        rotate(q, *options, q_order, output_dtype(q, cos, sin, casting)),
        rotate(k, *options, k_order, output_dtype(k, cos, sin, casting)),
    )


def backward(
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    style: str,
    head_axis: int,
    rotary_dim: int,
    casting: str,
    q_order: str,
    k_order: str,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    needs_q: bool,
    needs_k: bool,
) -> tuple[Tensor, Tensor]:
    """Rotate back: ``dx = dout * cos - rotate_half(dout * sin)``."""
    options = (cos, sin, style, head_axis, rotary_dim, casting)
    dq, dk = cos.new_empty(0, dtype=q_dtype), cos.new_empty(0, dtype=k_dtype)
    if needs_q and dq_out is not None:
        dq = rotate(dq_out, *options, q_order, q_dtype, inverse=True)
    if needs_k and dk_out is not None:
        dk = rotate(dk_out, *options, k_order, k_dtype, inverse=True)
    return dq, dk
