"""Codes of 4 bits as checkpoints of GPTQ and AWQ pack them: eight in a word of 32 bits.

Bit 4 i of a word is where its code i begins. GPTQ packs eight inputs of one output, in order. AWQ
packs eight outputs of one input: the four with even places, then the four with odd ones.
"""

import torch
from torch import Tensor

PACKINGS = ("gptq", "awq")


def shape_of(codes: Tensor, packing: str | None) -> tuple[int, ...]:
    """The shape (..., N, K) of a weight by that of its codes."""
    *leading, width = codes.shape
    if packing == "gptq":
        return (*leading[:-1], width, 8 * leading[-1])
    if packing == "awq":
        return (*leading[:-1], 8 * width, leading[-1])
    return (*leading, 2 * width)


def part_of(codes: Tensor, packing: str | None, columns: bool, first: int, last: int) -> Tensor:
    """Codes of some rows of a weight (N, K), or of some columns: whole words, or whole bytes."""
    step = {"gptq": 8 if columns else 1, "awq": 1 if columns else 8}.get(packing or "", 0)
    if not step:
        return codes[..., first // 2 : last // 2] if columns else codes[..., first:last, :]
    part = slice(first // step, last // step)
    return codes[..., part, :] if columns else codes[..., part]


def as_bytes(codes: Tensor, packing: str) -> Tensor:
    """Bytes (..., N, K / 2) of words, the lower code first; temporaries of 4 bits a code."""
    if packing == "gptq":
        return codes.mT.contiguous().view(torch.uint8)
    # bytes (..., K, words, 4): even outputs in the first two, odd ones in the last two
    raw = codes.unsqueeze(-1).view(torch.uint8)
    even, odd = raw[..., 0::2, :, :], raw[..., 1::2, :, :]
    pairs = torch.stack(((even & 15) | (odd << 4), (even >> 4) | (odd & 240)), -1)
    return _in_order(pairs)


def codes_of_outputs(words: Tensor, packing: str) -> Tensor:
    """Codes (N, groups) of words (groups, N / 8), such as those of zeros."""
    raw = words.unsqueeze(-1).view(torch.uint8)
    pairs = torch.stack((raw & 15, raw >> 4), -1)
    return pairs.flatten(-3).mT if packing == "gptq" else _in_order(pairs)


def _in_order(pairs: Tensor) -> Tensor:
    """Outputs in order, (..., N, rows), of (..., rows, words, 4 bytes, 2 codes) in that of AWQ."""
    by_word: Tensor = pairs.unflatten(-2, (2, 2)).movedim(-5, -1)  # words, odd, 4 apart, 2 apart
    words, odd, four, two, rows = range(-5, 0)
    axes = [*range(by_word.ndim - 5), *(by_word.ndim + a for a in (words, four, two, odd, rows))]
    return by_word.permute(axes).flatten(-5, -2).contiguous()
