"""Rotary embedding by npu_rotary_mul within its limits, else an Ascend kernel.

npu_apply_rotary_pos_emb has no derivative, and npu_rotary_mul_backward wants the queries: the
gradient is a rotation too, with the sines of each pair exchanged and negated.

The kernel serves where npu_rotary_mul does not fit. A piece is a token and some of its heads: a
tile of heads by pairs of channels (a, b), and one row of angles for all of them. With cosines c and
sines s, each perhaps different for a and b,

    forward  (a c_a - b s_a, b c_b + a s_b),   backward  (a c_a + b s_b, b c_b - a s_a).

Channels are in fp32 inside and rounded once; those that are not rotated are copied by PyTorch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.npu.common.launching import block_of, jitted, start
from liger_multi.backends.npu.common.limits import rotation
from liger_multi.reference.rope import rope as reference

# --- the kernel ---

LEAST = 16  # pairs a row of a tile: 32 bytes of bf16
MOST = 256  # wider heads went through no compiler


@triton.jit
def _angles_of(angle_ptr, far, pair, some, EVERY: tl.constexpr):
    """The angles of first and second channels of a token's pairs, as rows of a tile."""
    first = tl.load(angle_ptr + pair * EVERY, mask=some, other=0.0).to(tl.float32)
    second = tl.load(angle_ptr + far + pair * EVERY, mask=some, other=0.0).to(tl.float32)
    return first[None, :], second[None, :]


@jitted
def _rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    x_batch,
    x_token,
    x_head,
    y_batch,
    y_token,
    y_head,
    cos_batch,
    cos_token,
    sin_batch,
    sin_token,
    angle_far,
    count,
    tokens,
    heads,
    pairs,
    HALF: tl.constexpr,
    EVERY: tl.constexpr,
    BACK: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate heads, piece by piece.

    Program: every num_programs-th piece, BLOCK / PAIRS heads of one token; reads its angles and
    channels, writes the rotated channels. HALF: a pair's channels are ``pairs`` apart, as two
    tiles; otherwise they are neighbors, one tile that is split and interleaved again. BACK: the
    transposed rotation.
    """
    HEADS: tl.constexpr = BLOCK // PAIRS
    head, pair, both = tl.arange(0, HEADS), tl.arange(0, PAIRS), tl.arange(0, 2 * PAIRS)
    some, steps = pair < pairs, (heads + HEADS - 1) // HEADS
    for piece in range(tl.program_id(0), count * tokens * steps, tl.num_programs(0)):
        first = (piece % steps) * HEADS
        batch = tl.cast(piece // steps // tokens, tl.int64)
        token = tl.cast(piece // steps % tokens, tl.int64)
        x_at = x_ptr + batch * x_batch + token * x_token + tl.cast(first, tl.int64) * x_head
        y_at = y_ptr + batch * y_batch + token * y_token + tl.cast(first, tl.int64) * y_head
        cos_at, sin_at = cos_ptr + batch * cos_batch, sin_ptr + batch * sin_batch
        cos_a, cos_b = _angles_of(cos_at + token * cos_token, angle_far, pair, some, EVERY)
        sin_a, sin_b = _angles_of(sin_at + token * sin_token, angle_far, pair, some, EVERY)
        live = (head < heads - first)[:, None]
        if HALF:
            place, mask = head[:, None] * x_head + pair[None, :], live & some[None, :]
            a = tl.load(x_at + place, mask=mask, other=0.0).to(tl.float32)
            b = tl.load(x_at + pairs + place, mask=mask, other=0.0).to(tl.float32)
        else:  # one contiguous load; strided ones need four times the buffer
            place, mask = head[:, None] * x_head + both[None, :], live & (both < 2 * pairs)[None, :]
            # split first, then cast: A5's compiler crashes on the other order in bf16
            whole = tl.load(x_at + place, mask=mask, other=0.0)
            a, b = tl.split(tl.reshape(whole, (HEADS, PAIRS, 2)))
            a, b = a.to(tl.float32), b.to(tl.float32)
        if BACK:
            new_a, new_b = a * cos_a + b * sin_b, b * cos_b - a * sin_a
        else:
            new_a, new_b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
        if HALF:
            place = head[:, None] * y_head + pair[None, :]
            tl.store(y_at + place, new_a.to(y_ptr.dtype.element_ty), mask=mask)
            tl.store(y_at + pairs + place, new_b.to(y_ptr.dtype.element_ty), mask=mask)
        else:
            whole = tl.interleave(new_a, new_b).to(y_ptr.dtype.element_ty)
            tl.store(y_at + head[:, None] * y_head + both[None, :], whole, mask=mask)


def _tokens_first(x: Tensor, head_axis: int) -> Tensor:
    """(batch, tokens, heads, channels), a view."""
    if x.dim() == 3:
        return x.unsqueeze(0)
    return x.transpose(1, 2) if head_axis == 1 else x


def _adjacent(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _angles(angle: Tensor) -> tuple[Tensor, int, int]:
    """Rows of angles, and the steps to the next sequence and token."""
    wide = _adjacent(angle if angle.dim() == 3 else angle.unsqueeze(0))
    return wide, 0 if wide.shape[0] == 1 else wide.stride(0), wide.stride(1)


def _tile(x: Tensor, y: Tensor, heads: int, pairs: int) -> int:
    """Pairs of a tile: as many heads as the table's block holds."""
    block = block_of("rope", x, triton.next_power_of_2(heads) * pairs, pairs)
    while block > pairs and block // pairs * max(x.stride(2), y.stride(2)) >= 2**31:
        block //= 2  # offsets within a tile are int32
    return block


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
    inverse: bool,
) -> Tensor:
    """A rotation, or back, of the first channels of every head."""
    pairs, half, wide = rotary_dim // 2, style == "half", cos.shape[-1] == rotary_dim
    row = max(LEAST, triton.next_power_of_2(pairs))
    if row > MOST:
        options = (style, head_axis, rotary_dim, casting, order, dtype, inverse)
        return reference.rotate(x, cos, sin, *options)
    out = reference.dense(x, order, dtype)
    if not out.numel():
        return out
    rows, buffer = _adjacent(_tokens_first(x, head_axis)), _tokens_first(out, head_axis)
    count, tokens, heads, _ = rows.shape
    if rotary_dim < x.shape[-1]:
        out[..., rotary_dim:] = x[..., rotary_dim:]
    (cos, *cos_by), (sin, *sin_by) = _angles(cos), _angles(sin)
    block = _tile(rows, buffer, heads, row)
    steps, distance = -(-heads // (block // row)), pairs if half else 1
    start(
        _rope_kernel,
        count * tokens * steps,
        rows,
        cos,
        sin,
        buffer,
        *rows.stride()[:3],
        *buffer.stride()[:3],
        *cos_by,
        *sin_by,
        distance if wide else 0,
        count,
        tokens,
        heads,
        pairs,
        HALF=half,
        EVERY=2 if wide and not half else 1,
        BACK=inverse,
        PAIRS=row,
        BLOCK=block,
    )
    return out


# --- operators ---

MODES = {"half": "half", "interleaved": "interleave"}


def _exchanged(sin: Tensor, style: str) -> Tensor:
    """The sines of a rotation back."""
    if style == "half":
        return -sin.roll(sin.shape[-1] // 2, -1)
    return -sin.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def rotate_within_limits(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    style: str,
    head_axis: int,
    rotary_dim: int,
    casting: str,
    order: str,
    dtype: torch.dtype,
    inverse: bool,
) -> Tensor:
    """A rotation, or its inverse, by npu_rotary_mul where that takes it."""
    fits = dtype == x.dtype and rotation(x, _batched(cos), sin, style, rotary_dim, order) is None
    if not fits:
        options = (style, head_axis, rotary_dim, casting, order, dtype, inverse)
        return rotate(x, cos, sin, *options)
    sin = _exchanged(sin, style) if inverse else sin
    axes = [int(digit) for digit in order]  # this permutation is its own inverse
    angles = [_batched(a).unsqueeze(head_axis).permute(axes).contiguous() for a in (cos, sin)]
    rotated = torch.ops.npu.npu_rotary_mul(x.permute(axes).contiguous(), *angles, MODES[style])
    return rotated.permute(axes)


def _batched(angle: Tensor) -> Tensor:
    return angle if angle.dim() == 3 else angle.unsqueeze(0)


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
    dtypes = [reference.output_dtype(x, cos, sin, casting) for x in (q, k)]
    return (
        rotate_within_limits(q, *options, q_order, dtypes[0], False),
        rotate_within_limits(k, *options, k_order, dtypes[1], False),
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
    """Rotate the gradients back."""
    options = (cos, sin, style, head_axis, rotary_dim, casting)
    dq, dk = cos.new_empty(0, dtype=q_dtype), cos.new_empty(0, dtype=k_dtype)
    if needs_q and dq_out is not None:
        dq = rotate_within_limits(dq_out, *options, q_order, q_dtype, True)
    if needs_k and dk_out is not None:
        dk = rotate_within_limits(dk_out, *options, k_order, k_dtype, True)
    return dq, dk
