"""Contract of ``kimi_delta_attention``."""

import functools

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._samples import each_frozen
from liger_multi.ops.gated_delta_rule import (
    _case as case,
    _first as first_tokens,
    _shapes_fit as shapes_fit,
    formula_of_channel_gates,
    work as work,
)
from liger_multi.testing.samples import Sample

op = Op(
    "kimi_delta_attention",
    family="linear_attention",
    bitwise=bitwise(PER_ROW, "q k v g beta initial_state first y final_state"),
)


@op.forward(returns="y final_state")
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    first: Tensor | None,
    scale: float,
    qk_l2norm: bool,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:
    acc_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    state = (v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    return v.new_empty(v.shape), v.new_empty(state if output_final_state else (0,), dtype=acc_dtype)


op.backward(
    reads="dy dfinal_state q k v g beta initial_state first scale qk_l2norm",
    returns="dq dk dv dg dbeta dinitial_state",
)


def kimi_delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    qk_l2norm: bool = False,
    cu_seqlens: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Linear attention by the delta rule with a gate per channel, in memory linear in the sequence.

    Math:
        As :func:`gated_delta_rule`, where every channel of a key has a gate. A value head has a
        state S of shape (K, V), 0 at the first token of a document, or initial_state at the first
        token of all. Token by token, ``S = diag(exp(g)) S``, ``d = beta (v - S' k)``, ``S = S + k
        d'`` and ``y = scale S' q``; scale is ``K ** -0.5`` by default. With ``qk_l2norm``, q and k
        are first divided by ``sqrt(sum(x^2) + 1e-6)``. Value head h uses key head ``h // (HV /
        H)``. Gates are at most 0.

    Shapes:
        q and k ``(B, T, H, K)``, v ``(B, T, HV, V)``, g ``(B, T, HV, K)`` and beta ``(B, T, HV)``
        with any strides, HV a multiple of H; initial_state ``(B, HV, K, V)``; cu_seqlens
        ``(N + 1,)``, where documents begin and the last one ends, for B = 1 (what follows is one
        more document), or documents ``(B, T)``, ids whose runs are documents, below 0 for single
        tokens; y ``(B, T, HV, V)``; :func:`kimi_delta_attention_with_state` also returns the
        states after the last token, ``(B, HV, K, V)``.

    Dtypes:
        In: one floating dtype of q, k and v, any of the others. Inside: fp32 (fp64 for fp64);
        kernels round factors of GEMMs to the dtype of v, and in 16 bits take a gate below -44 for
        -44, a decay of 5e-20. Out: that of v, states fp32 (fp64 for fp64).

    Memory:
        Kept for backward: the arguments. Backward takes 2 K V numbers per 64 tokens of a value
        head in kernels, beside 4 K numbers a token of either; the reference takes some heads and
        spans of chunks at a time.

    Raises:
        TypeError: An argument is not a floating-point tensor, or dtypes of q, k and v differ.
        ValueError: Shapes do not fit together, mixed devices, both kinds of documents.

    Source:
        Kimi Team 2025 (arXiv:2510.26692); transformers ``chunk_kimi_delta_attention`` of Kimi
        Linear. Results grow without bound where keys of about one direction have
        ``beta sum(k^2) > 2``; with ``qk_l2norm`` and a beta of at most 2 none has.
    """
    return _y_and_state(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        qk_l2norm=qk_l2norm,
        cu_seqlens=cu_seqlens,
        documents=documents,
        output_final_state=False,
    )[0]


def kimi_delta_attention_with_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    qk_l2norm: bool = False,
    cu_seqlens: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`kimi_delta_attention`, and the states after the last token, ``(B, HV, K, V)``."""
    return _y_and_state(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        qk_l2norm=qk_l2norm,
        cu_seqlens=cu_seqlens,
        documents=documents,
        output_final_state=True,
    )


def _y_and_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None,
    initial_state: Tensor | None,
    qk_l2norm: bool,
    cu_seqlens: Tensor | None,
    documents: Tensor | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:
    """Check the arguments and call the operator; without ``output_final_state``, no state."""
    name = op.name
    checks.floating(
        name,
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=initial_state,
        optional=("initial_state",),
    )
    shapes_fit(q, k, v, op=name, gates=k.shape[3:], g=g, beta=beta, initial_state=initial_state)
    checks.boolean(name, "qk_l2norm", qk_l2norm)
    factor = q.shape[3] ** -0.5 if scale is None else checks.number(name, "scale", scale)
    first = first_tokens(v, cu_seqlens, documents, name)
    return op(  # type: ignore[no-any-return]
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        first,
        scale=factor,
        qk_l2norm=qk_l2norm,
        output_final_state=output_final_state,
    )


_case = functools.partial(case, channels=True)
L2, FINAL, FP32 = {"qk_l2norm": True}, {"output_final_state": True}, torch.float32
formula = formula_of_channel_gates
SAMPLES = (
    Sample("kimi-linear", _case(2, 70, 2, 16, gates=FP32), L2),
    Sample("tiny", _case(1, 5, 1, 4)),
    Sample("tiny-group", _case(2, 4, 1, 3, group=2), {"scale": 0.7}),
    Sample("tiny-states", _case(1, 6, 1, 5, value=2, group=2, state=True), L2 | FINAL),
    Sample("tiny-documents", _case(1, 8, 1, 3, ids=3, state=True), FINAL),
    Sample("one-token", _case(2, 1, 2, 8, state=True), FINAL),
    Sample("no-tokens", _case(2, 0, 2, 8, state=True), FINAL),
    Sample("no-sequences", _case(0, 9, 2, 8), L2 | FINAL),
    Sample("narrow-values", _case(1, 17, 1, 8, value=5), L2),
    Sample("chunk-and-one", _case(1, 65, 1, 16, state=True), FINAL),
    Sample("several-chunks", _case(1, 200, 1, 16, value=20, group=3), L2 | FINAL),
    Sample("documents", _case(2, 150, 1, 16, group=2, ids=2), L2),
    Sample("strong-decay", _case(1, 130, 1, 8, decay=40.0), L2),
    Sample("no-decay", _case(1, 70, 1, 32, decay=0.0), L2),
    Sample("wide-keys", _case(1, 67, 1, 96, value=72), L2),
    Sample("fp32-states", _case(1, 20, 2, 8, gates=FP32, state=True), FINAL),
    Sample("swapped", _case(2, 40, 2, 8, layout="swapped"), L2),
    Sample("sliced", _case(2, 20, 2, 8, layout="sliced")),
    Sample("expanded", _case(3, 20, 2, 8, layout="expanded"), FINAL),
    *each_frozen(_case(1, 20, 2, 8, state=True), "q k v g beta initial_state", FINAL),
    Sample("past-65535-rows", _case(65537, 1, 1, 2), size="thin"),
    Sample("2x8192 32x128", _case(2, 8192, 32, 128, gates=FP32), L2, size="bench"),
)
COMPILE_SAMPLES = tuple(
    Sample(
        f"2x8192 8x{size} everything", _case(2, 8192, 8, size, state=True, ids=2, gates=FP32), FINAL
    )
    for size in (32, 64, 128)
)
