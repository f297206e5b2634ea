"""Gated activations, ``y = act(gate) * up``: silu, gelu, and gelu by tanh.

The activation is rounded to the dtype of ``gate`` before the product. Every activation and every
slope is one call of PyTorch, which a compiler opens and fuses.

Clamped SwiGLU, ``(clamp(up) + offset) * g * sigmoid(alpha * g)``, has the order of GPT-OSS.
"""

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import (
    as_rows,
    in_one_piece,
    row_blocks,
    statistics_dtype,
)
from liger_multi.reference.common.clamp import blocks_gradient

GELU = {"tanh": "gelu_tanh", "none": "gelu"}  # keys are values of the argument ``approximate``
APPROXIMATION = {activation: approximate for approximate, activation in GELU.items()}

ONE = (1.0, 1.0)  # multipliers of gate and of the output


def activate(gate: Tensor, activation: str) -> Tensor:
    """The activation in the dtype of ``gate``; PyTorch computes it in fp32 inside."""
    if activation == "silu":
        return torch.nn.functional.silu(gate)
    return torch.nn.functional.gelu(gate, approximate=APPROXIMATION[activation])


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def forward(
    gate: Tensor, up: Tensor, activation: str, multipliers: tuple[float, float] = ONE
) -> Tensor:
    """``act(gate) * up``; ``multipliers`` are those of gate and output."""
    y = _times(activate(_times(gate, multipliers[0]), activation) * up, multipliers[1])
    return y if y.is_contiguous() else y.contiguous()


def backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    needs_gate: bool,
    needs_up: bool,
    multipliers: tuple[float, float] = ONE,
) -> tuple[Tensor, Tensor]:
    """Both gradients, block by block of rows; in one piece where a compiler fuses them."""
    if in_one_piece():
        dgate, dup = gradients(dy, gate, up, activation, multipliers)
        dgate, dup = dgate.contiguous(), dup.contiguous()
        return (dgate if needs_gate else gate.new_empty(0), dup if needs_up else up.new_empty(0))
    dgate = gate.new_empty(gate.shape if needs_gate else (0,))
    dup = up.new_empty(up.shape if needs_up else (0,))
    buffers = (dgate if needs_gate else None, dup if needs_up else None)
    gradients_into(*buffers, dy, gate, up, activation, multipliers)
    return dgate, dup


def gradients_and_product(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Both gradients, and the product; block by block it takes the place of ``dy``."""
    if in_one_piece():
        # not forward(), which asks for strides: a compiler's backward has none
        return *gradients(dy, gate, up, activation, ONE), activate(gate, activation) * up
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    for block in row_blocks(gate.shape[0], 4 * gate.shape[1] * dy.element_size()):
        buffers, inputs = (dgate[block], dup[block]), (gate[block], up[block])
        gradients_into(*buffers, dy[block], *inputs, activation, ONE)
        dy[block] = forward(*inputs, activation)
    return dgate, dup, dy


def gradients(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, multipliers: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """``dgate = dy up act'(gate)`` and ``dup = dy act(gate)``."""
    acc_dtype, aten = statistics_dtype(gate.dtype), torch.ops.aten
    gate = _times(gate, multipliers[0])
    g, d = gate.to(acc_dtype), _times(dy.to(acc_dtype), multipliers[1])
    if activation == "silu":
        dgate = aten.silu_backward(d * up.to(acc_dtype), g)
    else:
        # from 100 on the slope is 0 or 1; where a square overflows, PyTorch's would be NaN
        form = APPROXIMATION[activation]
        dgate = aten.gelu_backward(d * up.to(acc_dtype), g.clamp(-100, 100), approximate=form)
    return _times(dgate, multipliers[0]).to(gate.dtype), (d * activate(gate, activation)).to(
        up.dtype
    )


def gradients_into(
    dgate: Tensor | None,
    dup: Tensor | None,
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    multipliers: tuple[float, float],
) -> None:
    """Write the needed gradients, block by block of rows."""
    gate2d, up2d, dy2d = as_rows(gate), as_rows(up), as_rows(dy)
    row_bytes = 4 * gate2d.shape[1] * statistics_dtype(gate.dtype).itemsize
    for block in row_blocks(gate2d.shape[0], row_bytes):
        grads = gradients(dy2d[block], gate2d[block], up2d[block], activation, multipliers)
        for buffer, part in zip((dgate, dup), grads, strict=True):
            if buffer is not None:
                as_rows(buffer)[block] = part


def packed_forward(
    gate_up: Tensor, activation: str, multipliers: tuple[float, float] = ONE
) -> Tensor:
    """Gate is the first half of the last axis, up the second; neither is copied."""
    gate, up = gate_up.chunk(2, -1)
    return forward(gate, up, activation, multipliers)


def packed_backward(
    dy: Tensor, gate_up: Tensor, activation: str, multipliers: tuple[float, float] = ONE
) -> Tensor:
    """Both gradients side by side, written where a concatenation would copy them."""
    if in_one_piece():
        gate, up = gate_up.chunk(2, -1)
        return torch.cat(gradients(dy, gate, up, activation, multipliers), -1)
    gate_up2d = as_rows(gate_up)
    packed = gate_up2d.new_empty(gate_up2d.shape)
    gate, up = gate_up2d.chunk(2, -1)
    dgate, dup = packed.chunk(2, -1)
    gradients_into(dgate, dup, as_rows(dy), gate, up, activation, multipliers)
    return packed.view(gate_up.shape)


# --- clamped ---

Numbers = tuple[float, float, float]  # limit, alpha, offset


def _clamped_activation(gate: Tensor, alpha: float) -> Tensor:
    if alpha == 1.0:
        return torch.nn.functional.silu(gate)
    return gate * torch.sigmoid(gate * alpha)


def clamped_product(gate: Tensor, up: Tensor, numbers: Numbers) -> Tensor:
    """Every step in the dtype of the inputs, as the Hugging Face MLPs have it."""
    limit, alpha, offset = numbers
    up = up.clamp(-limit, limit).to(torch.promote_types(gate.dtype, up.dtype))
    y = (up + offset if offset else up) * _clamped_activation(gate.clamp(max=limit), alpha)
    return y if y.is_contiguous() else y.contiguous()


def _clamped_gradients(
    dy: Tensor, gate: Tensor, up: Tensor, numbers: Numbers
) -> tuple[Tensor, Tensor]:
    """``dgate = dy u (p + a g p (1 - p))`` and ``dup = dy act``, zero where a clamp holds."""
    limit, alpha, offset = numbers
    acc_dtype, none = statistics_dtype(gate.dtype), dy.new_zeros(())
    g, d = gate.to(acc_dtype).clamp(max=limit), dy.to(acc_dtype)
    p = torch.sigmoid(g * alpha)
    u = up.to(acc_dtype).clamp(-limit, limit) + offset
    dgate = torch.where(blocks_gradient(gate, limit), none, d * u * (p + alpha * g * p * (1 - p)))
    act = _clamped_activation(gate.clamp(max=limit), alpha)
    dup = torch.where(blocks_gradient(up, limit) | blocks_gradient(-up, limit), none, d * act)
    return dgate.to(gate.dtype), dup.to(up.dtype)


def clamped_gradients(
    dy: Tensor, gate: Tensor, up: Tensor, numbers: Numbers
) -> tuple[Tensor, Tensor]:
    """Both gradients, block by block of rows; in one piece where a compiler fuses them."""
    if in_one_piece():
        return _clamped_gradients(dy, gate, up, numbers)
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    _clamped_gradients_into(dgate, dup, dy, gate, up, numbers)
    return dgate, dup


def _clamped_gradients_into(
    dgate: Tensor, dup: Tensor, dy: Tensor, gate: Tensor, up: Tensor, numbers: Numbers
) -> None:
    buffers = [as_rows(t) for t in (dgate, dup)]
    dys, gates, ups = (as_rows(t) for t in (dy, gate, up))
    row_bytes = 6 * gates.shape[1] * statistics_dtype(gate.dtype).itemsize
    for block in row_blocks(gates.shape[0], row_bytes):
        grads = _clamped_gradients(dys[block], gates[block], ups[block], numbers)
        for buffer, part in zip(buffers, grads, strict=True):
            buffer[block] = part


def _clamped_parts(gate_up: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = gate_up.chunk(2, -1)
    return gate, up


def packed_clamped_product(gate_up: Tensor, numbers: Numbers, interleaved: bool) -> Tensor:
    """The same of one tensor with both; neither is copied."""
    return clamped_product(*_clamped_parts(gate_up, interleaved), numbers)


def packed_clamped_gradients(
    dy: Tensor, gate_up: Tensor, numbers: Numbers, interleaved: bool
) -> Tensor:
    """Both gradients, written to their places in one tensor."""
    if in_one_piece():
        grads = _clamped_gradients(dy, *_clamped_parts(gate_up, interleaved), numbers)
        return torch.stack(grads, -1).flatten(-2) if interleaved else torch.cat(grads, -1)
    gate_up2d = as_rows(gate_up)
    buffer = gate_up2d.new_empty(gate_up2d.shape)
    parts = _clamped_parts(gate_up2d, interleaved)
    _clamped_gradients_into(*_clamped_parts(buffer, interleaved), as_rows(dy), *parts, numbers)
    return buffer.view(gate_up.shape)
