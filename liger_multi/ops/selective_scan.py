"""Contract of ``selective_scan``."""

import math
from typing import Any

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._samples import each_frozen
from liger_multi.ops._work import Options, Shapes, Work
from liger_multi.ops.causal_conv1d import segments_of
from liger_multi.ops.ssd_scan import first_tokens, formula as ssd_scan_formula, shapes_are
from liger_multi.testing.samples import Sample, Tensor as T

op = Op(
    "selective_scan",
    family="linear_attention",
    bitwise=bitwise(PER_ROW, "u delta B C z initial_state first y final_state"),
)


@op.forward(returns="y final_state", residuals="states")
def forward(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
    first: Tensor | None,
    delta_softplus: bool,
    output_final_state: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from liger_multi.reference.linear_attention.selective_scan import kept_shape

    acc_dtype = torch.float64 if u.dtype == torch.float64 else torch.float32
    state = (u.shape[0], *A.shape) if output_final_state else (0,)
    final, states = (u.new_empty(shape, dtype=acc_dtype) for shape in (state, kept_shape(u, A)))
    return u.new_empty(u.shape), final, states


op.backward(
    reads="dy dfinal_state u delta A B C D z delta_bias initial_state first states delta_softplus",
    returns="du ddelta dA dB dC dD dz ddelta_bias dinitial_state",
)


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """Selective scan of Mamba, in memory linear in the sequence.

    Math:
        ``delta = softplus(delta + delta_bias)``, without the softplus unless ``delta_softplus``. A
        channel has a state h of N numbers, 0 at the first token of a sequence, or initial_state at
        the first token of all. Token by token, ``h = exp(delta A) h + delta u B`` and ``y = C . h
        + D u``, times ``silu(z)``. A sequence begins where ``seq_idx`` differs from the token
        before, or at each of ``cu_seqlens``, as in :func:`causal_conv1d`. A is below 0.

    Shapes:
        u, delta and z ``(B, T, D)``, B and C ``(B, T, N)``, with any strides: pass the ``(B, D,
        T)`` of other libraries as ``u.mT``. A ``(D, N)``, D and delta_bias ``(D,)``;
        initial_state ``(B, D, N)``; seq_idx ``(B, T)``, or cu_seqlens ``(N + 1,)`` for B = 1. y
        as u; :func:`selective_scan_with_state` also returns the states after the last token,
        ``(B, D, N)``.

    Dtypes:
        In: any floating dtypes, ids int32 or int64. Inside: fp32 (fp64 for u in fp64). Out: that
        of u, states fp32 (fp64 for fp64).

    Memory:
        Kept for backward: the arguments, and N fp32 numbers of a channel per 256 tokens of longer
        sequences. Backward computes the other states again. For its time, kernels take N fp32
        numbers of a channel per 4 tokens and 2 N of a token per 32 channels (16 where N is above
        128) of as many sequences as are work for the whole card; the reference takes some channels
        and spans of tokens at a time.

    Raises:
        TypeError: An argument has not the dtype that it must have.
        ValueError: Shapes that do not fit together, cu_seqlens of several rows or with seq_idx,
            mixed devices.

    Source:
        Gu and Dao 2023 (arXiv:2312.00752); ``selective_scan_fn`` of mamba-ssm and
        ``mamba_selective_scan`` of transformers, which take ``(B, D, T)``.
    """
    return _y_and_state(
        u,
        delta,
        A,
        B,
        C,
        D=D,
        z=z,
        delta_bias=delta_bias,
        delta_softplus=delta_softplus,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        seq_idx=seq_idx,
        output_final_state=False,
    )[0]


def selective_scan_with_state(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`selective_scan`, and the states after the last token, ``(B, D, N)``."""
    return _y_and_state(
        u,
        delta,
        A,
        B,
        C,
        D=D,
        z=z,
        delta_bias=delta_bias,
        delta_softplus=delta_softplus,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        seq_idx=seq_idx,
        output_final_state=True,
    )


def _y_and_state(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    seq_idx: Tensor | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:
    """Check the arguments and call the operator; without ``output_final_state``, no state."""
    name = op.name
    checks.floating(
        name,
        u=u,
        delta=delta,
        A=A,
        B=B,
        C=C,
        D=D,
        z=z,
        delta_bias=delta_bias,
        initial_state=initial_state,
        optional=("D", "z", "delta_bias", "initial_state"),
    )
    if u.ndim != 3:
        checks.refuse(name, "u must have three axes: batch, tokens and channels", u)
    batch, length, width = u.shape
    if A.ndim != 2 or A.shape[0] != width or min(A.shape) < 1:
        checks.refuse(name, f"A must have shape ({width}, N), sizes at least 1", A)
    pairs, rows, vector = (batch, length, A.shape[1]), tuple(u.shape), (width,)
    shapes_are(
        name,
        {
            "delta": delta,
            "B": B,
            "C": C,
            "D": D,
            "z": z,
            "delta_bias": delta_bias,
            "initial_state": initial_state,
        },
        {
            "delta": rows,
            "B": pairs,
            "C": pairs,
            "D": vector,
            "z": rows,
            "delta_bias": vector,
            "initial_state": (batch, *A.shape),
        },
    )
    checks.boolean(name, "delta_softplus", delta_softplus)
    first = first_tokens(segments_of(name, u, cu_seqlens, seq_idx))
    return op(  # type: ignore[no-any-return]
        u,
        delta,
        A,
        B,
        C,
        D=D,
        z=z,
        delta_bias=delta_bias,
        initial_state=initial_state,
        first=first,
        delta_softplus=delta_softplus,
        output_final_state=output_final_state,
    )


def formula(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The recurrence of heads with one channel, whose decays differ over the state."""
    outputs = ssd_scan_formula(
        u.unsqueeze(-1),
        delta,
        A.unsqueeze(1),
        B.unsqueeze(2),
        C.unsqueeze(2),
        D=D,
        z=None if z is None else z.unsqueeze(-1),
        dt_bias=delta_bias,
        dt_softplus=delta_softplus,
        dt_limit=(-torch.inf, torch.inf),
        initial_state=None if initial_state is None else initial_state.unsqueeze(2),
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        seq_idx=seq_idx,
    )
    y, state = outputs[0].squeeze(-1), outputs[1].squeeze(2)
    return (y, state) if output_final_state else y


def work(shapes: Shapes, size: int, options: Options) -> Work:
    rows, pairs = math.prod(shapes["u"]) * size, math.prod(shapes["B"]) * size
    steps = math.prod(shapes["delta"]) * 4
    # u, z, delta, B and C read, y written; those and dy read, five gradients written
    forward = 3 * rows + steps + 2 * pairs
    return Work(forward, 2 * forward + 2 * rows + steps + 2 * pairs)


def _case(
    *shape: int,
    states: int = 4,
    layout: str = "contiguous",
    ids: int = 0,
    dtype: torch.dtype | None = None,
    strength: float = 1.0,
    omitted: str = "",
) -> dict[str, T]:
    """Tensors of u (B, T, D), all of them but for those named by ``omitted``."""
    batch, length, width = shape
    tensors = {
        "u": T(shape, layout=layout),
        "delta": T(shape, dtype, scale=0.5, layout=layout),
        "A": T((width, states), dtype, strength, negative=True),
        "B": T((batch, length, states), layout=layout, scale=states**-0.5),
        "C": T((batch, length, states), layout=layout),
        "D": T((width,), dtype),
        "z": T(shape, layout=layout),
        "delta_bias": T((width,), dtype),
        "initial_state": T((batch, width, states), dtype),
    }
    if ids:
        tensors["seq_idx"] = T((batch, length), classes=ids, grad=False)
    return {n: t for n, t in tensors.items() if n not in omitted.split()}


SOFT: dict[str, Any] = {"delta_softplus": True}
FINAL: dict[str, Any] = {"output_final_state": True}
SCAN = "D z delta_bias initial_state"
SAMPLES = (
    Sample("mamba", _case(2, 35, 12, dtype=torch.float32, omitted="initial_state"), SOFT),
    Sample("everything", _case(2, 35, 12, ids=3), SOFT | FINAL),
    Sample("plain", _case(1, 20, 6, omitted=SCAN)),
    Sample("tiny", _case(1, 5, 3, states=2, omitted="z initial_state"), SOFT),
    Sample("tiny-everything", _case(1, 6, 3, states=2), SOFT | FINAL),
    Sample("tiny-packed", _case(2, 8, 2, states=3, ids=2), SOFT | FINAL),
    Sample("tiny-raw-steps", _case(1, 7, 2, states=2), FINAL),
    Sample("tiny-state", _case(2, 4, 3, states=1, omitted="D z"), SOFT | FINAL),
    Sample("one-token", _case(2, 1, 4), SOFT | FINAL),
    Sample("no-tokens", _case(2, 0, 4), SOFT | FINAL),
    Sample("no-sequences", _case(0, 9, 4), SOFT | FINAL),
    Sample("packed", _case(2, 70, 5, ids=2, omitted="initial_state"), SOFT),
    Sample("strong-decay", _case(1, 70, 5, strength=16.0, omitted="initial_state"), SOFT),
    Sample("no-decay", _case(1, 70, 5, strength=0.0, omitted="initial_state"), SOFT),
    Sample("many-states", _case(1, 33, 3, states=40, omitted="initial_state"), SOFT),
    Sample("transposed", _case(2, 20, 8, layout="transposed"), SOFT),
    Sample("sliced", _case(2, 20, 8, layout="sliced"), SOFT),
    Sample("expanded", _case(3, 20, 8, layout="expanded"), SOFT | FINAL),
    *each_frozen(_case(1, 20, 4), "u delta A B C D z delta_bias initial_state", SOFT | FINAL),
    Sample("past-65535-rows", _case(65537, 1, 2, states=2, omitted=SCAN), SOFT, size="thin"),
    Sample(
        "past-one-span", _case(1, 300, 4, states=2, omitted=SCAN), SOFT, size="thin", path="spans"
    ),
    Sample(
        "2x8192x8192 N16",
        _case(2, 8192, 8192, states=16, dtype=torch.float32, omitted="initial_state"),
        SOFT,
        "bench",
    ),
)
COMPILE_SAMPLES = (
    *[
        Sample(
            f"2x8192x{channels} N{states}",
            _case(2, 8192, channels, states=states, dtype=torch.float32, omitted="initial_state"),
            SOFT,
        )
        for channels, states in ((4096, 64), (2048, 128), (1024, 256))
    ],
    Sample(
        "2x8192x8192 N16 plain", _case(2, 8192, 8192, states=16, dtype=torch.float32, omitted=SCAN)
    ),
    Sample(
        "2x8192x8192 N16 everything",
        _case(2, 8192, 8192, states=16, ids=2, dtype=torch.float32),
        SOFT | FINAL,
    ),
)
