"""Contract of ``causal_conv1d``, and what says where the sequences of a packed row begin."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import BY_PIECES, PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._formulas import convolved, sequence_runs
from liger_multi.ops._samples import each_frozen
from liger_multi.ops._work import elementwise
from liger_multi.testing.samples import Sample, Tensor as T

ACTIVATIONS = ("none", "silu")
op = Op(
    "causal_conv1d",
    family="linear_attention",
    bitwise=bitwise(PER_ROW, "x initial_state segments y", backward=BY_PIECES),
)


@op.forward(returns="y")
def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    segments: Tensor | None,
    activation: str,
) -> Tensor:
    """Shape rule; channels are the last axis of x and initial_state."""
    return x.new_empty(x.shape)


op.backward(
    reads="dy x weight bias initial_state segments activation",
    returns="dx dweight dbias dinitial_state",
)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    channel_axis: int = -1,
) -> Tensor:
    """Causal convolution of every channel with its own filter, for packed sequences too.

    Math:
        ``u[t] = bias + sum over j < W of weight[:, W - 1 - j] * x[t - j]``, over the tokens ``t -
        j`` of the sequence of t; ``y = u`` or ``silu(u)``. A sequence begins where ``seq_idx``
        differs from the token before, so ids may come again, or at each of ``cu_seqlens``, whose
        sequences may be empty. What stands past its last number is a sequence of its own.
        ``initial_state`` holds the W - 1 tokens before the first sequence of each row.

    Shapes:
        x ``(B, T, C)``, or ``(B, C, T)`` with ``channel_axis=1``, with any strides; channels that
        are not adjacent in memory are copied first. weight ``(C, W)``, bias ``(C,)``;
        initial_state as x, with W - 1 tokens. seq_idx ``(B, T)``, or cu_seqlens ``(N + 1,)`` for B
        = 1. y as x, with adjacent channels: in memory ``(B, T, C)``.

    Dtypes:
        In: any floating dtypes, ids int32 or int64. Inside: products and sums in fp32 (fp64 for
        fp64). Out: that of x.

    Memory:
        Kept for backward: x, the ids of packed sequences and what else is given; u is computed
        again. Ids are compared on the device, which the host does not wait for.

    Raises:
        TypeError: An argument has not the dtype that it must have.
        ValueError: Shapes that do not fit together, cu_seqlens of several rows or with seq_idx,
            mixed devices, an unknown activation.

    Source:
        Gu and Dao 2023 (arXiv:2312.00752); ``causal_conv1d_fn`` of causal-conv1d and of
        transformers' Mamba, Qwen3-Next and LFM2, which pass ``(B, C, T)``.
    """
    name = "causal_conv1d"
    checks.floating(
        name,
        x=x,
        weight=weight,
        bias=bias,
        initial_state=initial_state,
        optional=("bias", "initial_state"),
    )
    if checks.integer(name, "channel_axis", channel_axis) not in (-1, 1, 2):
        checks.refuse(name, "channel_axis must be 1 or the last axis", f"{channel_axis}")
    if x.ndim != 3:
        checks.refuse(name, "x must have three axes: batch, tokens and channels", x)
    first = channel_axis == 1
    tokens = x.mT if first else x
    state = initial_state if initial_state is None or not first else initial_state.mT
    check_filter(name, weight, bias, tokens.shape[2])
    if state is not None:
        state_shape = (x.shape[0], weight.shape[1] - 1, tokens.shape[2])
        if tuple(state.shape) != state_shape:
            shape = (state_shape[0], state_shape[2], state_shape[1]) if first else state_shape
            checks.refuse(name, f"initial_state must have shape {shape}", initial_state)
    activation_name = "none" if activation is None else activation
    checks.one_of(name, "activation", activation_name, ACTIVATIONS)
    ids = segments_of(name, tokens, cu_seqlens, seq_idx)
    y: Tensor = op(tokens, weight, bias, state, ids, activation_name)
    return y.mT if first else y


def formula(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    channel_axis: int = -1,
) -> Tensor:
    """A depthwise convolution over the tokens before, and silu."""
    first = channel_axis == 1
    z, state = (x, initial_state) if first else (x.mT, initial_state)
    state = state.mT if state is not None and not first else state
    u = convolved(z, weight, bias, state, sequence_runs(seq_idx, cu_seqlens, z.shape[-1]))
    y = (F.silu(u) if activation == "silu" else u).to(x.dtype)
    return y if first else y.mT


# x read, y written; dy and x read, dx written
work = elementwise(2, 5)


def check_filter(name: str, weight: Tensor, bias: Tensor | None, channels: int) -> None:
    """Shapes of weight and bias."""
    if weight.ndim != 2 or weight.shape[0] != channels or weight.shape[1] < 1:
        checks.refuse(name, f"weight must have shape ({channels}, W), a filter a channel", weight)
    checks.vector(name, "bias", bias, channels, "number of channels")


def segments_of(
    name: str, x: Tensor, cu_seqlens: Tensor | None, seq_idx: Tensor | None
) -> Tensor | None:
    """An id a token of x ``(B, T, C)`` that differs where a sequence begins, or None."""
    if cu_seqlens is not None:
        checks.integers(name, "cu_seqlens", cu_seqlens)
        if seq_idx is not None or cu_seqlens.ndim != 1 or x.shape[0] != 1:
            checks.refuse(
                name,
                "cu_seqlens has one axis, is for a batch of one row, and stands in "
                "place of seq_idx",
                f"{tuple(cu_seqlens.shape)} beside {x.shape[0]} rows",
            )
        starts = cu_seqlens.to(x.device).contiguous()
        token = torch.arange(x.shape[1], device=x.device, dtype=starts.dtype)
        return torch.searchsorted(starts, token, right=True, out_int32=True)[None]
    if seq_idx is not None:
        checks.integers(name, "seq_idx", seq_idx)
        if seq_idx.shape != x.shape[:2] or seq_idx.device != x.device:
            checks.refuse(
                name,
                f"seq_idx must have shape {tuple(x.shape[:2])}, an id a token, and "
                f"be on {x.device}",
                seq_idx,
            )
    return seq_idx


def _case(
    batch: int,
    length: int,
    channels: int,
    width: int = 4,
    *,
    bias: bool = True,
    state: bool = False,
    ids: int = 0,
    layout: str = "contiguous",
    dtype: torch.dtype | None = None,
) -> dict[str, T]:
    tensors = {
        "x": T((batch, length, channels), layout=layout),
        "weight": T((channels, width), scale=width**-0.5, dtype=dtype),
    }
    if bias:
        tensors["bias"] = T((channels,), dtype=dtype)
    if state:
        tensors["initial_state"] = T((batch, width - 1, channels))
    if ids:
        tensors["seq_idx"] = T((batch, length), classes=ids, grad=False)
    return tensors


SILU: dict[str, Any] = {"activation": "silu"}
EVERYTHING = _case(2, 37, 8, state=True, ids=2)
CHANNELS_FIRST = {
    **_case(2, 19, 8),
    "x": T((2, 8, 19), layout="transposed"),
    "initial_state": T((2, 8, 3)),
}
SAMPLES = (
    Sample("silu", _case(2, 19, 8), SILU),
    Sample("plain", _case(2, 19, 8, bias=False)),
    Sample("everything", EVERYTHING, SILU),
    Sample("packed", _case(2, 70, 24, 3, ids=3)),
    Sample("tiny", _case(1, 7, 3, 2, state=True, ids=2), SILU),
    Sample("shorter-than-the-filter", _case(2, 2, 5, 7, state=True), SILU),
    Sample("one-token", _case(3, 1, 8, ids=2)),
    Sample("width-1", _case(1, 5, 4, 1), SILU),
    Sample("width-7", _case(2, 21, 6, 7, bias=False, ids=2)),
    Sample("odd-channels", _case(1, 33, 37, ids=4)),
    Sample("channels-first", CHANNELS_FIRST, {"channel_axis": 1}),
    Sample("time-adjacent", {**_case(2, 19, 8), "x": T((2, 8, 19))}, SILU | {"channel_axis": 1}),
    Sample("no-tokens", _case(2, 0, 8, state=True), SILU),
    Sample("no-rows", _case(0, 5, 8)),
    Sample("sliced", _case(2, 19, 8, layout="sliced")),
    Sample("row-gaps", _case(2, 19, 8, layout="rows"), SILU),
    Sample("fp32-weight", _case(2, 19, 8, dtype=torch.float32), SILU),
    *each_frozen(EVERYTHING, "x weight bias initial_state", SILU),
    Sample("several-programs", _case(2, 90, 520, ids=20), SILU),
    Sample("past-65535-rows", _case(1, 65537, 2), size="thin"),
    Sample("2x8192x8192", _case(2, 8192, 8192, bias=False), SILU, size="bench"),
    Sample("2x8192x8192 packed", _case(2, 8192, 8192, bias=False, ids=2), SILU, size="bench"),
)
COMPILE_SAMPLES = (
    Sample("2x8192x4096 width 7", _case(2, 8192, 4096, 7, bias=False), SILU),
    Sample("2x8192x2048 width 8 everything", _case(2, 8192, 2048, 8, state=True, ids=2), SILU),
)
