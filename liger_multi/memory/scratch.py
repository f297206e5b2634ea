"""What kernels of an operator allocate besides its results, for estimates.

An entry allocates on the meta device what the launchers on an accelerator allocate; a test compares
both. Sizes that depend on the card are those of a Hopper card.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Arguments = Mapping[str, Any]
FP32 = torch.float32
CHUNK = 64  # tokens of a chunk of linear attention
SPAN = 256  # tokens of a program of the selective scan
CHANNELS, TOKENS = 32, 4  # of a program of the selective scan, and between states in memory
PROGRAMS = 32 * 132  # of backward of the selective scan that run at a time at least


def _experts(args: Arguments) -> list[Tensor]:
    """Rows gathered by expert, and the results of their GEMMs before these are summed."""
    index, second = args["index"], args["down_weight"]
    widths = second.shape[1:]  # hidden and inner, or the other way round
    inner = widths[0] if args["transposed"] else widths[1]
    both, back = sum(widths), "dy" in args
    return [second.new_empty(index.numel(), both + 2 * inner if back else both)]


def _filters(tokens: int) -> Callable[[Arguments], list[Tensor]]:
    """Sums of every program's tokens for the gradients of a convolution's weight and bias."""

    def allocate(args: Arguments) -> list[Tensor]:
        weight, (batch, length) = args["weight"], args["x"].shape[:2]
        programs = batch * -(-length // tokens) if "dy" in args else 0
        sizes = [weight.numel(), len(weight) if args["bias"] is not None else 0]
        return [weight.new_empty(programs, size, dtype=FP32) for size in sizes]

    return allocate


def _delta_rule(args: Arguments) -> list[Tensor]:
    """Squares and gates of chunks; for backward, states and their gradients, and N."""
    k, v = args["k"], args["v"]
    (batch, length, many, value), (heads, dim) = v.shape, k.shape[2:]
    streams, chunks = batch * many, -(-length // CHUNK)
    tokens = chunks * CHUNK
    held = [
        k.new_empty(2, streams, tokens, CHUNK),
        k.new_empty(4, streams, tokens, dtype=FP32),
        k.new_empty(2, batch * heads, tokens * args["qk_l2norm"], dtype=FP32),
    ]
    if "dy" in args:
        held += [
            v.new_empty(2, streams, chunks, dim, value),
            v.new_empty(streams, length, value),
            k.new_empty(2, streams, tokens, dtype=FP32),
        ]
    return held


def _channel_delta_rule(args: Arguments) -> list[Tensor]:
    """The same with gates of channels: rows of q and k by their gates, sums of gates in fp32."""
    k, v = args["k"], args["v"]
    (batch, length, many, value), (heads, dim) = v.shape, k.shape[2:]
    streams, chunks = batch * many, -(-length // CHUNK)
    tokens, back = chunks * CHUNK, "dy" in args
    padded, planes = max(16, 1 << (dim - 1).bit_length()), k.element_size() // 2
    held = [
        k.new_empty(planes, streams, tokens, padded, dtype=FP32),
        k.new_empty(3, streams, tokens, dim),
        k.new_empty(streams, chunks, padded, dtype=FP32),
        k.new_empty(2, batch * heads, tokens * args["qk_l2norm"], dtype=FP32),
        k.new_empty(2 + back, streams, tokens, CHUNK),
    ]
    if back:
        held += [
            v.new_empty(2, streams, chunks, dim, value),
            v.new_empty(streams, length, value),
            k.new_empty(2, streams, tokens, padded, dtype=FP32),
        ]
    return held


def _state_space(args: Arguments) -> list[Tensor]:
    """Gates and states of chunks; for backward, gradients of states and sums of chunks too."""
    x = args["x"]
    (batch, length, many, value), (groups, size) = x.shape, args["B"].shape[2:]
    streams, chunks = batch * many, -(-length // CHUNK)
    tokens, back = chunks * CHUNK, "dy" in args
    held = [
        x.new_empty(5, streams * tokens, dtype=FP32),
        x.new_empty(1 + back, streams, chunks, size, value),
    ]
    if back and args["z"] is not None:
        held += [torch.empty_like(x)]  # the gradient of y before the gate
    if back:
        held += [
            x.new_empty(batch * groups * chunks, CHUNK, CHUNK),
            x.new_empty(2 + -(-size // 128), streams * tokens, dtype=FP32),
        ]
    return held


def _scan(args: Arguments) -> list[Tensor]:
    """B and C in order; for backward, A, parts of sums, and what some sequences at a time have.

    These are gradients after spans and sums of spans, states of chunks, and parts of dB and dC.
    """
    u, states, back = args["u"], args["B"].shape[2], "dy" in args
    batch, length, cols = u.shape
    spans, blocks = -(-length // SPAN), -(-cols // CHANNELS)
    some = min(batch, -(-PROGRAMS // (spans * blocks)))
    # forward by spans turns A as well
    held = [args[n].new_empty(args[n].shape, dtype=FP32) for n in ("ABC" if back else "BC")]
    if back:
        held += [u.new_empty(some, spans * (spans > 1), states + 1, cols, dtype=FP32)]
        held += [u.new_empty(some, -(-length // TOKENS), states, cols, dtype=FP32)]
        held += [
            u.new_empty(batch, spans, args[f"needs_{n}"] * k, cols, dtype=FP32)
            for n, k in (("A", states), ("D", 1), ("delta_bias", 1))
        ]
        if args["needs_B"] or args["needs_C"]:  # side by side
            held += [u.new_empty(blocks, some, length, 2, states, dtype=FP32)]
    return held


SCRATCH: dict[str, Callable[[Arguments], list[Tensor]]] = {
    "causal_conv1d": _filters(128),
    "fused_moe": _experts,
    "gated_delta_rule": _delta_rule,
    "gated_short_conv": _filters(64),
    "kimi_delta_attention": _channel_delta_rule,
    "lora_moe": _experts,
    "selective_scan": _scan,
    "ssd_scan": _state_space,
}
