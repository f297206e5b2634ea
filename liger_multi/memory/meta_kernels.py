"""Operators on the meta device as a card runs them: references around kernels that only allocate.

Loops over chunks, GEMMs and adapters are the reference's own, so that memory and work are those of
the code that runs. What a backend computes by a kernel only allocates here; what it reads and
writes besides is read and written by one operation of PyTorch, so that a planner counts the bytes.

Other operators run as one kernel, whose results have known shapes. An entry of :data:`SCRATCH`
allocates what the launchers on an accelerator allocate besides; a test compares both. Sizes that
depend on the card are those of a Hopper card.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_multi._torch_private import may_overwrite

if TYPE_CHECKING:
    from liger_multi.reference.activations.gated_mlp import CodedGradients
    from liger_multi.reference.float8.rows import Float8Rows

CHUNKED = (
    "fused_linear_cross_entropy",
    "fused_linear_log_prob",
    "gated_mlp",
    "gated_mlp_float8",
    "linear_float8",
    "lora_mlp",
    "lora_qkv",
    "lora_update",
)
"""Operators of more than one kernel."""


class _Rounding:
    """Rounding to FP8 by a kernel: a copy in one layout, or in two."""

    def rounded(self, x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Any:
        from liger_multi.reference.common.float8 import Rounded

        return Rounded(torch.empty_like(x, dtype=dtype), x.new_empty((), dtype=torch.float32))

    def both_ways(self, x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Any:
        return self.rounded(x, dtype), self.rounded(x.t(), dtype)


class _LossKernels:
    """Row kernels of losses, which overwrite the logits and return numbers per row."""

    rounding = _Rounding()

    def statistics(
        self, raw: Tensor, target: Tensor, weight: Any, objective: Any, outputs: str
    ) -> Any:
        from liger_multi.reference.cross_entropy.rows import RowStats

        return RowStats.empty(raw.shape[0], objective, outputs, raw)

    def statistics_and_gradient_(
        self, raw: Tensor, target: Tensor, weight: Any, objective: Any, scales: Any, outputs: str
    ) -> Any:
        return self.statistics(raw, target, weight, objective, outputs)

    def results(self, *args: Any) -> Any:
        from liger_multi.reference.cross_entropy.reduction import results

        return results(*args)

    def gradient_(self, *_: Any) -> None:
        return None

    log_prob_gradient_ = gradient_

    def scale(
        self,
        gradient: Tensor,
        factor: Any,
        dtype: torch.dtype,
        by: Any = None,
        over: bool = False,
    ) -> Tensor:
        if (factor is None or over) and gradient.dtype == dtype:
            return gradient
        return torch.empty_like(gradient, dtype=dtype)


class _RowQuantizer:
    """Rounding of rows by a kernel: a conversion, which moves as many bytes."""

    def rows(self, x: Tensor, columns: Any, format: torch.dtype) -> Float8Rows:
        from liger_multi.reference.float8.rows import Float8Rows

        return Float8Rows(x.to(format), x.new_empty(x.shape[0], dtype=torch.float32))

    def across(self, x: Tensor, scale: Any, format: torch.dtype) -> Tensor:
        if x.dtype == format:
            return x.t().clone(memory_format=torch.contiguous_format)
        return x.t().to(format, memory_format=torch.contiguous_format)

    def of(self, x: Tensor) -> Float8Rows:
        """Rows in the format of their device."""
        from liger_multi.reference.float8.rows import format_of

        return self.rows(x, None, format_of(x.device))


_ROWS = _RowQuantizer()


class _ActivationKernels:
    """The activation of a gated MLP as one kernel.

    What it reads and writes is read and written by multiplications, which are counted.
    """

    def product(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        return gate * up

    def gradients(
        self, dproduct: Tensor, gate: Tensor, up: Tensor, activation: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        return dproduct * gate, dproduct * up, dproduct

    def coded(
        self, gate: Tensor, up: Tensor, activation: str, needs_product: bool
    ) -> tuple[Tensor, Float8Rows]:
        return gate * up if needs_product else gate.new_empty(0), _ROWS.of(gate)

    def coded_gradients(
        self,
        dproduct: Tensor,
        gate: Tensor,
        up: Tensor,
        activation: str,
        columns: Any,
        needs_grads: tuple[bool, bool],
        product: bool,
    ) -> CodedGradients:
        from liger_multi.reference.activations.gated_mlp import CodedGradients

        gradients = [
            dproduct * x if w else x.new_empty(0)
            for x, w in zip((gate, up), needs_grads, strict=True)
        ]
        pairs = zip((gate, up), columns, strict=True)
        codes = [None if column is None else _ROWS.of(x) for x, column in pairs]
        return CodedGradients(gradients[0], gradients[1], dproduct, codes[0], codes[1])


def _parts_of_thin(x: Tensor, order: Sequence[int], axis: int) -> Tensor:
    """A thin matrix as parts in bf16, by one kernel."""
    shape = list(x.shape)
    shape[axis] *= len(order)
    return x.new_empty(shape, dtype=torch.bfloat16)


Directions = tuple[Callable[..., Any], Callable[..., Any]]


@functools.cache
def around_kernels(name: str) -> Directions:
    """Forward and backward of one of :data:`CHUNKED`."""
    from liger_multi.reference.activations import gated_mlp
    from liger_multi.reference.adapters import lora_mlp, lora_qkv, lora_update, low_rank
    from liger_multi.reference.cross_entropy import (
        fused_linear_cross_entropy,
        fused_linear_log_prob,
    )
    from liger_multi.reference.float8 import gated_mlp_float8, linear_float8

    loss: Any = _LossKernels()
    thin: Any = low_rank.LowRank(_parts_of_thin, _ROWS)
    makers: Mapping[str, Callable[[], Directions]] = {
        "fused_linear_cross_entropy": functools.partial(
            fused_linear_cross_entropy.implement_fused_linear_cross_entropy, loss
        ),
        "fused_linear_log_prob": functools.partial(
            fused_linear_log_prob.implement_fused_linear_log_prob, loss
        ),
        "gated_mlp": functools.partial(gated_mlp.implement_gated_mlp, _ActivationKernels()),
        "gated_mlp_float8": functools.partial(
            gated_mlp_float8.implement_gated_mlp_float8, _ActivationKernels(), _ROWS
        ),
        "linear_float8": functools.partial(linear_float8.implement_linear_float8, _ROWS),
        "lora_mlp": functools.partial(lora_mlp.implement_lora_mlp, _ActivationKernels(), thin),
        "lora_qkv": functools.partial(lora_qkv.implement_lora_qkv, thin),
        "lora_update": functools.partial(lora_update.implement_lora_update, thin),
    }
    return makers[name]()


# --- scratch memory of single kernels ---

Arguments = Mapping[str, Any]
FP32 = torch.float32
WRITTEN_BYTES, WRITTEN_SHARE, PAIRS_BYTES = 2**26, 1.0, 2**27  # of experts
CHUNK = 64  # tokens of a chunk of linear attention
SPAN = 256  # tokens of a program of the selective scan
CHANNELS, TOKENS = 32, 4  # of a program of the selective scan, and between states in memory
PROGRAMS = 32 * 132  # of backward of the selective scan that run at a time at least


def _experts(args: Arguments) -> list[Tensor]:
    """Rows gathered by expert, or results of GEMMs before they are summed: the most at a time.

    In backward, the gradient of the first weight is not there yet while rows of dy are; those of x
    stand beside it, where they are large as far as a share reaches.
    """
    index, second = args["index"], args["down_weight"]
    hidden, inner = second.shape[1:][:: -1 if args["transposed"] else 1]
    rows, size = index.numel(), second.dtype.itemsize
    wide, thin = rows * hidden * size, rows * inner * size
    if "dy" not in args:
        return [index.new_empty(thin + wide, dtype=torch.uint8)]
    trained = args.get("needs_gate_up_weight", False)
    first = second.shape[0] * args["gate_up"].shape[1] * hidden * size if trained else 0
    written = wide if wide <= WRITTEN_BYTES else int(wide * WRITTEN_SHARE)
    summed = min(wide, PAIRS_BYTES) if "needs_gate_up_weight" in args else wide
    most = max(wide + thin - first, written if trained else 0, summed if args["needs_x"] else 0)
    beside = 0 if may_overwrite() else args["gate_up"].nbytes
    return [index.new_empty(most + beside, dtype=torch.uint8)]


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
    tensors = [
        k.new_empty(2, streams, tokens, CHUNK),
        k.new_empty(4, streams, tokens, dtype=FP32),
        k.new_empty(2, batch * heads, tokens * args["qk_l2norm"], dtype=FP32),
    ]
    if "dy" in args:
        tensors += [
            v.new_empty(2, streams, chunks, dim, value),
            v.new_empty(streams, length, value),
            k.new_empty(2, streams, tokens, dtype=FP32),
        ]
    return tensors


def _channel_delta_rule(args: Arguments) -> list[Tensor]:
    """The same with gates of channels: rows of q and k by their gates, sums of gates in fp32."""
    k, v = args["k"], args["v"]
    (batch, length, many, value), (heads, dim) = v.shape, k.shape[2:]
    streams, chunks = batch * many, -(-length // CHUNK)
    tokens, back = chunks * CHUNK, "dy" in args
    padded, planes = max(16, 1 << (dim - 1).bit_length()), k.element_size() // 2
    tensors = [
        k.new_empty(planes, streams, tokens, padded, dtype=FP32),
        k.new_empty(3, streams, tokens, dim),
        k.new_empty(streams, chunks, padded, dtype=FP32),
        k.new_empty(2, batch * heads, tokens * args["qk_l2norm"], dtype=FP32),
        k.new_empty(2 + back, streams, tokens, CHUNK),
    ]
    if back:
        tensors += [
            v.new_empty(2, streams, chunks, dim, value),
            v.new_empty(streams, length, value),
            k.new_empty(2, streams, tokens, padded, dtype=FP32),
        ]
    return tensors


def _state_space(args: Arguments) -> list[Tensor]:
    """Gates and states of chunks; for backward, gradients of states and sums of chunks too."""
    x = args["x"]
    (batch, length, many, value), (groups, size) = x.shape, args["B"].shape[2:]
    streams, chunks = batch * many, -(-length // CHUNK)
    tokens, back = chunks * CHUNK, "dy" in args
    tensors = [
        x.new_empty(5, streams * tokens, dtype=FP32),
        x.new_empty(1 + back, streams, chunks, size, value),
    ]
    if back and args["z"] is not None:
        tensors += [torch.empty_like(x)]  # the gradient of y before the gate
    if back:
        tensors += [
            x.new_empty(batch * groups * chunks, CHUNK, CHUNK),
            x.new_empty(2 + -(-size // 128), streams * tokens, dtype=FP32),
        ]
    return tensors


def _scan(args: Arguments) -> list[Tensor]:
    """B and C in order; for backward, A, parts of sums, and what some sequences at a time have.

    These are gradients after spans and sums of spans, states of chunks, and parts of dB and dC.
    """
    u, states, back = args["u"], args["B"].shape[2], "dy" in args
    batch, length, cols = u.shape
    spans, blocks = -(-length // SPAN), -(-cols // CHANNELS)
    some = min(batch, -(-PROGRAMS // (spans * blocks)))
    # forward by spans turns A as well
    tensors = [args[n].new_empty(args[n].shape, dtype=FP32) for n in ("ABC" if back else "BC")]
    if back:
        tensors += [u.new_empty(some, spans * (spans > 1), states + 1, cols, dtype=FP32)]
        tensors += [u.new_empty(some, -(-length // TOKENS), states, cols, dtype=FP32)]
        tensors += [
            u.new_empty(batch, spans, args[f"needs_{n}"] * k, cols, dtype=FP32)
            for n, k in (("A", states), ("D", 1), ("delta_bias", 1))
        ]
        if args["needs_B"] or args["needs_C"]:  # side by side
            tensors += [u.new_empty(blocks, some, length, 2, states, dtype=FP32)]
    return tensors


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
