"""Clamped SwiGLU, ``(clamp(up) + offset) * g * sigmoid(alpha * g)``, in the order of GPT-OSS."""

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import as_rows, row_blocks, statistics_dtype
from liger_multi.reference.common.one_piece import in_one_piece

Numbers = tuple[float, float, float]  # limit, alpha, offset


def _activate(gate: Tensor, alpha: float) -> Tensor:
    if alpha == 1.0:
        return torch.nn.functional.silu(gate)
    return gate * torch.sigmoid(gate * alpha)


def product(gate: Tensor, up: Tensor, numbers: Numbers) -> Tensor:
    """Every step in the dtype of the inputs, as the Hugging Face MLPs have it."""
    limit, alpha, offset = numbers
    up = up.clamp(-limit, limit).to(torch.promote_types(gate.dtype, up.dtype))
    y = (up + offset if offset else up) * _activate(gate.clamp(max=limit), alpha)
    return y if y.is_contiguous() else y.contiguous()


def _gradients(dy: Tensor, gate: Tensor, up: Tensor, numbers: Numbers) -> tuple[Tensor, Tensor]:
    """``dgate = dy u (p + a g p (1 - p))`` and ``dup = dy act``, zero where a clamp holds."""
    limit, alpha, offset = numbers
    kind, none = statistics_dtype(gate.dtype), dy.new_zeros(())
    g, d = gate.to(kind).clamp(max=limit), dy.to(kind)
    p = torch.sigmoid(g * alpha)
    u = up.to(kind).clamp(-limit, limit) + offset
    dgate = torch.where(gate > limit, none, d * u * (p + alpha * g * p * (1 - p)))
    dup = torch.where(up.abs() > limit, none, d * _activate(gate.clamp(max=limit), alpha))
    return dgate.to(gate.dtype), dup.to(up.dtype)


def gradients(dy: Tensor, gate: Tensor, up: Tensor, numbers: Numbers) -> tuple[Tensor, Tensor]:
    """Both gradients, block by block of rows; in one piece where a compiler fuses them."""
    if in_one_piece():
        return _gradients(dy, gate, up, numbers)
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    _gradients_into(dgate, dup, dy, gate, up, numbers)
    return dgate, dup


def _gradients_into(
    dgate: Tensor, dup: Tensor, dy: Tensor, gate: Tensor, up: Tensor, numbers: Numbers
) -> None:
    rooms = [as_rows(t) for t in (dgate, dup)]
    dys, gates, ups = (as_rows(t) for t in (dy, gate, up))
    row_bytes = 6 * gates.shape[1] * statistics_dtype(gate.dtype).itemsize
    for block in row_blocks(gates.shape[0], row_bytes):
        made = _gradients(dys[block], gates[block], ups[block], numbers)
        for room, part in zip(rooms, made, strict=True):
            room[block] = part


def _parts(gate_up: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = gate_up.chunk(2, -1)
    return gate, up


def packed_product(gate_up: Tensor, numbers: Numbers, interleaved: bool) -> Tensor:
    """The same of one tensor with both; neither is copied."""
    return product(*_parts(gate_up, interleaved), numbers)


def packed_gradients(dy: Tensor, gate_up: Tensor, numbers: Numbers, interleaved: bool) -> Tensor:
    """Both gradients, written to their places in one tensor."""
    if in_one_piece():
        made = _gradients(dy, *_parts(gate_up, interleaved), numbers)
        return torch.stack(made, -1).flatten(-2) if interleaved else torch.cat(made, -1)
    rows = as_rows(gate_up)
    room = rows.new_empty(rows.shape)
    parts = _parts(rows, interleaved)
    _gradients_into(*_parts(room, interleaved), as_rows(dy), *parts, numbers)
    return room.view(gate_up.shape)
