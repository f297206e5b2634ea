"""Contract of ``ssd_scan``, and what it shares with ``selective_scan``."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._formulas import TOKENS_AT_ONCE, sequence_runs, statistics_dtype
from liger_multi.ops._samples import each_frozen
from liger_multi.ops._work import Options, Shapes, Work
from liger_multi.ops.causal_conv1d import segments_of
from liger_multi.testing.samples import Sample, Tensor as T

op = Op(
    "ssd_scan",
    family="linear_attention",
    bitwise=bitwise(PER_ROW, "x dt B C z initial_state first y final_state"),
)


@op.forward(returns="y final_state")
def forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    first: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    chunk: int,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:
    acc_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    state = (x.shape[0], *x.shape[2:], B.shape[3])
    return x.new_empty(x.shape), x.new_empty(state if output_final_state else (0,), dtype=acc_dtype)


op.backward(
    reads="dy dfinal_state x dt A B C D z dt_bias initial_state first dt_softplus dt_min dt_max "
    "chunk",
    returns="dx ddt dA dB dC dD dz ddt_bias dinitial_state",
)


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    chunk: int = 256,
) -> Tensor:
    """Scan of Mamba-2 (state space duality), in memory linear in the sequence.

    Math:
        ``dt = clamp(softplus(dt + dt_bias), *dt_limit)``, without the softplus unless
        ``dt_softplus``. A head has a state S of shape (P, N), 0 at the first token of a sequence,
        or initial_state at the first token of all. Token by token, ``S = exp(dt A) S + dt x B'``
        and ``y = S C + D x``, times ``silu(z)``. Head h uses B and C of group ``h // (H / G)``. A
        sequence begins where ``seq_idx`` differs from the token before, or at each of
        ``cu_seqlens``, as in :func:`causal_conv1d`. A is below 0.

    Shapes:
        x and z ``(B, T, H, P)``, dt ``(B, T, H)``, B and C ``(B, T, G, N)`` with any strides, H a
        multiple of G; A and dt_bias ``(H,)``, D ``(H,)`` or ``(H, P)``; initial_state ``(B, H, P,
        N)``; seq_idx ``(B, T)``, or cu_seqlens ``(N + 1,)`` for B = 1. y as x;
        :func:`ssd_scan_with_state` also returns the states after the last token, ``(B, H, P, N)``.
        ``chunk`` is the
        largest number of tokens that a backend takes at once (kernels take 16 at least); results
        agree to rounding.

    Dtypes:
        In: any floating dtypes, ids int32 or int64. Inside: fp32 (fp64 for x in fp64); kernels
        round factors of GEMMs to the dtype of x. Out: that of x, states fp32 (fp64 for fp64).

    Memory:
        Kept for backward: the arguments. Per 64 tokens of a head, kernels take P N numbers of the
        dtype of x forward and twice as many backward; the reference takes some heads and spans of
        chunks at a time.

    Raises:
        TypeError: An argument has not the dtype that it must have.
        ValueError: Shapes that do not fit together, cu_seqlens of several rows or with seq_idx,
            mixed devices, an empty dt_limit, a chunk below 1.

    Source:
        Dao and Gu 2024 (arXiv:2405.21060); ``mamba_chunk_scan_combined`` of mamba-ssm and
        ``mamba2_chunk_scan`` of transformers.
    """
    return _y_and_state(
        x,
        dt,
        A,
        B,
        C,
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        seq_idx=seq_idx,
        chunk=chunk,
        output_final_state=False,
    )[0]


def ssd_scan_with_state(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    chunk: int = 256,
) -> tuple[Tensor, Tensor]:
    """:func:`ssd_scan`, and the states after the last token, ``(B, H, P, N)``."""
    return _y_and_state(
        x,
        dt,
        A,
        B,
        C,
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        seq_idx=seq_idx,
        chunk=chunk,
        output_final_state=True,
    )


def _y_and_state(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    seq_idx: Tensor | None,
    chunk: int,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:
    """Check the arguments and call the operator; without ``output_final_state``, no state."""
    name = op.name
    checks.floating(
        name,
        x=x,
        dt=dt,
        A=A,
        B=B,
        C=C,
        D=D,
        z=z,
        dt_bias=dt_bias,
        initial_state=initial_state,
        optional=("D", "z", "dt_bias", "initial_state"),
    )
    _shapes_fit(x, B, C)
    batch, length, heads, value = x.shape
    shapes_are(
        name,
        {"dt": dt, "A": A, "z": z, "dt_bias": dt_bias, "initial_state": initial_state},
        {
            "dt": (batch, length, heads),
            "A": (heads,),
            "z": tuple(x.shape),
            "dt_bias": (heads,),
            "initial_state": (batch, heads, value, B.shape[3]),
        },
    )
    if D is not None and tuple(D.shape) not in ((heads,), (heads, value)):
        checks.refuse(name, f"D must have shape ({heads},) or ({heads}, {value})", D)
    checks.boolean(name, "dt_softplus", dt_softplus)
    low, high = _limits(dt_limit)
    if checks.integer(name, "chunk", chunk) < 1:
        checks.refuse(name, "chunk must be at least 1", f"{chunk}")
    first = first_tokens(segments_of(name, x, cu_seqlens, seq_idx))
    return op(  # type: ignore[no-any-return]
        x,
        dt,
        A,
        B,
        C,
        D=D,
        z=z,
        dt_bias=dt_bias,
        initial_state=initial_state,
        first=first,
        dt_softplus=dt_softplus,
        dt_min=low,
        dt_max=high,
        chunk=chunk,
        output_final_state=output_final_state,
    )


def _state_steps(
    dt: Tensor, a: Tensor, rows: Tensor, b: Tensor, c: Tensor, begins: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Token after token; the state is 0 where a sequence begins."""
    outs = []
    for t in range(dt.shape[1]):
        decay = torch.exp(dt[:, t, :, None, None] * a)
        decay = torch.where(begins[:, t, None, None, None], 0, decay)
        state = decay * state + rows[:, t, :, :, None] * b[:, t, :, None]
        outs.append((state * c[:, t, :, None]).sum(-1))
    return torch.stack(outs, 1), state


def formula(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    chunk: int = 256,
) -> Tensor | tuple[Tensor, Tensor]:
    """The recurrence of one state for every head; A may have a number for each entry of it."""
    acc_dtype, (batch, length, heads, value) = statistics_dtype(x), x.shape
    dt = dt.to(acc_dtype) if dt_bias is None else dt.to(acc_dtype) + dt_bias.to(acc_dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    b, c = (t.to(acc_dtype).repeat_interleave(heads // t.shape[2], 2) for t in (B, C))
    a = A.to(acc_dtype) if A.ndim == 3 else A.to(acc_dtype)[:, None, None]
    begins = torch.zeros(batch, length, dtype=torch.bool, device=x.device)
    runs = sequence_runs(seq_idx, cu_seqlens, length)
    if runs is not None:
        begins[:, 1:] = runs[:, 1:] != runs[:, :-1]
    rows, wide = dt.unsqueeze(-1) * x.to(acc_dtype), x.to(acc_dtype)
    state = rows.new_zeros(batch, heads, value, b.shape[3])
    state = state if initial_state is None else state + initial_state.to(acc_dtype)
    outs = [wide[:, :0]]
    for t in range(0, length, TOKENS_AT_ONCE):
        part = slice(t, t + TOKENS_AT_ONCE)
        args = (dt[:, part], a, *(v[:, part] for v in (rows, b, c, begins)), state)
        y, state = checkpoint(_state_steps, *args, use_reentrant=False)
        outs.append(y)
    y = torch.cat(outs, 1)
    if D is not None:
        y = y + (D if D.ndim == 2 else D.unsqueeze(-1)).to(acc_dtype) * wide
    y = y if z is None else y * F.silu(z.to(acc_dtype))
    return (y.to(x.dtype), state) if output_final_state else y.to(x.dtype)


def work(shapes: Shapes, size: int, options: Options) -> Work:
    rows, groups = math.prod(shapes["x"]) * size, math.prod(shapes["B"]) * size
    value, states, chunk = shapes["x"][-1], shapes["B"][-1], 64
    steps = math.prod(shapes["dt"]) * 4
    # x, B, C and dt read, y written; those and dy read, four gradients written
    forward = 2 * rows + 2 * groups + steps
    # of each token a row of a square and of two states, and of a group a row of another square
    tokens, shared = math.prod(shapes["dt"]), math.prod(shapes["B"][:-1])
    product = 2.0 * (tokens * (chunk * value + 2 * states * value) + shared * chunk * states)
    return Work(forward, forward + 2 * rows + 2 * groups + steps, product, 4 * product)


def _shapes_fit(x: Tensor, B: Tensor, C: Tensor) -> None:
    for name, tensor in (("x", x), ("B", B), ("C", C)):
        if tensor.ndim != 4:
            checks.refuse(op.name, f"{name} must have four axes", tensor)
    checks.same_shape(op.name, B=B, C=C)
    if (
        B.shape[:2] != x.shape[:2]
        or min(*x.shape[2:], *B.shape[2:]) < 1
        or (x.shape[2] % B.shape[2])
    ):
        checks.refuse(
            op.name,
            f"B must have shape (B, T, G, N) for x {tuple(x.shape)}, whose "
            "heads are a multiple of G, sizes at least 1",
            B,
        )


def _limits(limits: object) -> tuple[float, float]:
    if not isinstance(limits, (tuple, list)) or len(limits) != 2:
        raise TypeError(f"{op.name}: dt_limit must be two numbers, got {checks.describe(limits)}")
    low = checks.number(op.name, "dt_limit[0]", limits[0])
    return low, checks.number(op.name, "dt_limit[1]", limits[1], low, infinite=True)


def shapes_are(
    name: str, tensors: dict[str, Tensor | None], expected: dict[str, tuple[int, ...]]
) -> None:
    """Given tensors have the required shapes."""
    for argument, x in tensors.items():
        if x is not None and tuple(x.shape) != expected[argument]:
            checks.refuse(name, f"{argument} must have shape {expected[argument]}", x)


def first_tokens(ids: Tensor | None) -> Tensor | None:
    """Where the run of equal ids of every token begins, ``(B, T)`` int32."""
    if ids is None:
        return None
    token = torch.arange(ids.shape[1], device=ids.device)
    change = ids[:, 1:] != ids[:, :-1]
    edge = change.new_ones(ids.shape[0], 1)
    begins = torch.cat([edge, change], 1)[:, : ids.shape[1]]
    return torch.where(begins, token, 0).cummax(-1).values.to(torch.int32)


def _case(
    *shape: int,
    groups: int = 1,
    states: int = 8,
    layout: str = "contiguous",
    ids: int = 0,
    dtype: torch.dtype | None = None,
    strength: float = 1.0,
    omitted: str = "",
    wide: bool = False,
) -> dict[str, T]:
    """Tensors of x (B, T, H, P), all of them but for those named by ``omitted``."""
    batch, length, heads, value = shape
    tensors = {
        "x": T(shape, layout=layout),
        "dt": T((batch, length, heads), dtype, layout=layout, scale=0.5),
        "A": T((heads,), dtype, strength, negative=True),
        "B": T((batch, length, groups, states), layout=layout, scale=states**-0.5),
        "C": T((batch, length, groups, states), layout=layout),
        "D": T((heads, value) if wide else (heads,), dtype),
        "z": T(shape, layout=layout),
        "dt_bias": T((heads,), dtype),
        "initial_state": T((batch, heads, value, states), dtype),
    }
    if ids:
        tensors["seq_idx"] = T((batch, length), classes=ids, grad=False)
    return {n: t for n, t in tensors.items() if n not in omitted.split()}


SOFT: dict[str, Any] = {"dt_softplus": True}
FINAL: dict[str, Any] = {"output_final_state": True}
MAMBA2, MANY = "z initial_state", (2, 8192, 128, 64)
LIMITED: dict[str, Any] = {"dt_limit": (0.4, 1.2)}
SAMPLES = (
    Sample("mamba2", _case(2, 70, 4, 16, groups=2, dtype=torch.float32, omitted=MAMBA2), SOFT),
    Sample("everything", _case(2, 70, 4, 6, groups=2, ids=3), SOFT | FINAL, path="gate"),
    Sample("plain", _case(1, 40, 2, 8, omitted="D z dt_bias initial_state")),
    Sample("tiny", _case(1, 5, 2, 3, states=4, omitted="D z initial_state"), SOFT),
    Sample("tiny-everything", _case(1, 6, 2, 3, states=2, wide=True), SOFT | FINAL),
    Sample("tiny-packed", _case(1, 8, 2, 2, groups=2, states=3, ids=2), SOFT | FINAL),
    Sample("tiny-limits", _case(2, 4, 3, 2, states=3, omitted="z"), SOFT | LIMITED),
    Sample("tiny-raw-steps", _case(1, 7, 1, 2, states=2, omitted="D"), FINAL | {"chunk": 3}),
    Sample("one-token", _case(2, 1, 2, 8), SOFT | FINAL),
    Sample("no-tokens", _case(2, 0, 2, 8), SOFT | FINAL),
    Sample("no-sequences", _case(0, 9, 2, 8), SOFT | FINAL),
    Sample("chunk-and-one", _case(1, 65, 2, 8, groups=2), SOFT | FINAL),
    Sample("several-chunks", _case(1, 200, 6, 20, groups=2, states=24, omitted="z"), SOFT),
    Sample("small-chunks", _case(1, 100, 2, 8, omitted="z"), SOFT | {"chunk": 16}),
    Sample("packed", _case(2, 150, 4, 8, groups=4, ids=2, omitted=MAMBA2), SOFT),
    Sample("strong-decay", _case(1, 130, 2, 8, strength=16.0, omitted=MAMBA2), SOFT),
    Sample(
        "no-decay",
        _case(1, 130, 2, 8, strength=0.0, dtype=torch.float32, omitted=MAMBA2),
        SOFT,
    ),
    Sample("two-parts", _case(1, 20, 4, 8, groups=2, states=136, omitted="z"), SOFT | FINAL),
    Sample("wide-states", _case(1, 67, 2, 12, states=96, omitted=MAMBA2), SOFT),
    Sample("fp32-parameters", _case(1, 20, 2, 8, dtype=torch.float32), SOFT | FINAL),
    Sample("swapped", _case(2, 40, 2, 8, layout="swapped"), SOFT),
    Sample("sliced", _case(2, 20, 2, 8, layout="sliced"), SOFT),
    Sample("expanded", _case(3, 20, 2, 8, layout="expanded"), SOFT | FINAL),
    *each_frozen(
        _case(1, 20, 2, 8), "x dt A B C D z dt_bias initial_state", SOFT | FINAL | LIMITED
    ),
    Sample("past-65535-rows", _case(65537, 1, 1, 2, states=2, omitted=MAMBA2), size="thin"),
    Sample(
        "2x8192 128x64 G8 N128",
        _case(*MANY, groups=8, states=128, dtype=torch.float32, omitted=MAMBA2),
        SOFT,
        "bench",
    ),
    Sample(
        "2x8192 128x64 G1 N256",
        _case(*MANY, states=256, dtype=torch.float32, omitted=MAMBA2),
        SOFT,
        "bench",
    ),
)
COMPILE_SAMPLES = (
    *[
        Sample(
            f"2x8192 16x{value} G{groups} N{states}",
            _case(
                2,
                8192,
                16,
                value,
                groups=groups,
                states=states,
                dtype=torch.float32,
                omitted=MAMBA2,
            ),
            SOFT,
        )
        for groups, value, states in ((8, 64, 64), (16, 32, 128), (2, 64, 32), (2, 128, 128))
    ],
    Sample(
        "2x8192 16x64 G1 N128 everything",
        _case(2, 8192, 16, 64, states=128, ids=2, dtype=torch.float32),
        SOFT | FINAL,
    ),
)
