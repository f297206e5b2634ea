"""Contract of ``gated_delta_rule``."""

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._formulas import TOKENS_AT_ONCE, document_ids, statistics_dtype
from liger_multi.ops._samples import each_frozen
from liger_multi.ops._work import Options, Shapes, Work
from liger_multi.ops.attention import runs
from liger_multi.testing.samples import Sample, Tensor as T

op = Op(
    "gated_delta_rule",
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


def gated_delta_rule(
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
    """Linear attention by the gated delta rule, in memory linear in the sequence.

    Math:
        A value head has a state S of shape (K, V), 0 at the first token of a document, or
        initial_state at the first token of all. Token by token, ``S = exp(g) S``, ``d = beta (v -
        S' k)``, ``S = S + k d'`` and ``y = scale S' q``; scale is ``K ** -0.5`` by default. With
        ``qk_l2norm``, q and k are first divided by ``sqrt(sum(x^2) + 1e-6)``. Value head h uses
        key head ``h // (HV / H)``.

    Shapes:
        q and k ``(B, T, H, K)``, v ``(B, T, HV, V)``, g and beta ``(B, T, HV)`` with any strides,
        HV a multiple of H; initial_state ``(B, HV, K, V)``; cu_seqlens ``(N + 1,)``, where
        documents begin and the last one ends, for B = 1 (what follows is one more document), or
        documents ``(B, T)``, ids whose runs are documents, below 0 for single tokens; y
        ``(B, T, HV, V)``; :func:`gated_delta_rule_with_state` also returns the states after the
        last token, ``(B, HV, K, V)``.

    Dtypes:
        In: one floating dtype of q, k and v, any of the others. Inside: fp32 (fp64 for fp64);
        kernels round factors of GEMMs to the dtype of v. Out: that of v, states fp32 (fp64 for
        fp64).

    Memory:
        Kept for backward: the arguments. Backward takes 2 K V numbers per 64 tokens of a value
        head in kernels, and fewer in the reference.

    Raises:
        TypeError: An argument is not a floating-point tensor, or dtypes of q, k and v differ.
        ValueError: Shapes do not fit together, mixed devices, both kinds of documents.

    Source:
        Yang et al. 2024 (arXiv:2412.06464 and arXiv:2406.06484); transformers
        ``torch_chunk_gated_delta_rule`` of Qwen3-Next. Results grow without bound where keys of
        about one direction have ``beta sum(k^2) > 2``; with ``qk_l2norm`` and a beta of at most 2
        none has.
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


def gated_delta_rule_with_state(
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
    """:func:`gated_delta_rule`, and the states after the last token, ``(B, HV, K, V)``."""
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
    _shapes_fit(q, k, v, g=g, beta=beta, initial_state=initial_state)
    checks.boolean(name, "qk_l2norm", qk_l2norm)
    factor = q.shape[3] ** -0.5 if scale is None else checks.number(name, "scale", scale)
    first = _first(v, cu_seqlens, documents)
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


def _delta_steps(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, begins: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Token after token; the state is 0 where a document begins."""
    outs = []
    for t in range(q.shape[1]):
        decay = torch.where(begins[:, t, None, None], 0, g[:, t].exp())
        state = state * decay[..., None]
        prediction = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        d = beta[:, t, :, None] * (v[:, t] - prediction)
        state = state + k[:, t, :, :, None] * d[:, :, None]
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outs, 1), state


def formula_of_channel_gates(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    qk_l2norm: bool = False,
    cu_seqlens: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The recurrence of one state for every value head, token by token, with a gate per channel."""
    (batch, length, heads, size), value = q.shape, v.shape[3]
    acc_dtype = statistics_dtype(q)
    q, k, wide_v, g, beta = (x.to(acc_dtype) for x in (q, k, v, g, beta))
    if qk_l2norm:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // heads, 2) for x in (q, k))
    q = q * (size**-0.5 if scale is None else scale)
    if cu_seqlens is not None:
        documents = document_ids(cu_seqlens, length)
        documents = torch.where(documents < 0, len(cu_seqlens), documents)
    begins = torch.zeros(batch, length, dtype=torch.bool, device=q.device)
    if documents is not None:
        begins[:, 1:] = (documents[:, 1:] != documents[:, :-1]) | (documents[:, 1:] < 0)
    state = q.new_zeros(batch, v.shape[2], size, value)
    state = state if initial_state is None else state + initial_state.to(acc_dtype)
    outs = [wide_v[:, :0]]
    for t in range(0, length, TOKENS_AT_ONCE):
        part = [x[:, t : t + TOKENS_AT_ONCE] for x in (q, k, wide_v, g, beta, begins)]
        y, state = checkpoint(_delta_steps, *part, state, use_reentrant=False)
        outs.append(y)
    output = torch.cat(outs, 1).to(v.dtype)
    return (output, state) if output_final_state else output


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    qk_l2norm: bool = False,
    cu_seqlens: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The recurrence with gates that all channels share."""
    return formula_of_channel_gates(
        q,
        k,
        v,
        g.unsqueeze(-1),
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        qk_l2norm=qk_l2norm,
        cu_seqlens=cu_seqlens,
        documents=documents,
    )


def work(shapes: Shapes, size: int, options: Options) -> Work:
    keys, values = math.prod(shapes["q"]) * size, math.prod(shapes["v"]) * size
    size_k, size_v, chunk = shapes["k"][-1], shapes["v"][-1], 64
    rows = math.prod(shapes["v"][:-1])  # tokens of value heads
    gates = math.prod(shapes["g"]) * 4 + rows * size  # of 4 bytes; beta
    # q, k, v and gates read, y written; those and dy read, their gradients written
    forward = 2 * keys + 2 * values + gates
    # of each token a row of three squares and of three states; backward makes them again, and has
    # the gradients of both factors of each
    product = 2.0 * rows * (chunk * (2 * size_k + 2 * size_v) + 3 * size_k * size_v)
    return Work(forward, forward + 4 * keys + 3 * values + 2 * gates, product, 4 * product)


def _shapes_fit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    op: str = op.name,
    gates: tuple[int, ...] = (),
    **others: Tensor | None,
) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            checks.refuse(op, f"{name} must have four axes", x)
        if x.dtype != q.dtype:
            raise TypeError(f"{op}: q is {q.dtype}, got {name} as {checks.describe(x)}")
    checks.same_shape(op, q=q, k=k)
    if (
        v.shape[:2] != k.shape[:2]
        or min(*k.shape[2:], *v.shape[2:]) < 1
        or (v.shape[2] % k.shape[2])
    ):
        checks.refuse(
            op,
            f"v must have shape (B, T, HV, V) for k {tuple(k.shape)}, HV a "
            "multiple of its heads, sizes of heads at least 1",
            v,
        )
    batch, length, heads, value = v.shape
    expected = {
        "initial_state": (batch, heads, k.shape[3], value),
        "g": (batch, length, heads, *gates),
    }
    for name, tensor in others.items():
        shape = expected.get(name, (batch, length, heads))
        if tensor is not None and tensor.shape != shape:
            checks.refuse(op, f"{name} must have shape {shape}", tensor)


def _first(
    v: Tensor, cu_seqlens: Tensor | None, documents: Tensor | None, op: str = op.name
) -> Tensor | None:
    """Where the document of every token begins, ``(B, T)`` int32; None for one document."""
    if cu_seqlens is not None:
        checks.integers(op, "cu_seqlens", cu_seqlens)
        if documents is not None or cu_seqlens.ndim != 1 or v.shape[0] != 1:
            checks.refuse(
                op,
                "cu_seqlens has one axis, is for a batch of one, and stands in place of documents",
                f"{checks.describe(cu_seqlens)} for a batch of {v.shape[0]}",
            )
        begins = cu_seqlens.to(v.device)
        position = torch.arange(v.shape[1], device=v.device, dtype=begins.dtype)
        document = torch.searchsorted(begins.contiguous(), position, right=True)
        return torch.cat([begins.new_zeros(1), begins])[document].to(torch.int32)[None]
    if documents is None:
        return None
    checks.targets(op, documents, v.shape[:2], v, name="documents")
    return runs(documents)[0].to(torch.int32).contiguous()


def _case(
    *shape: int,
    value: int = 0,
    group: int = 1,
    state: bool = False,
    ids: int = 0,
    layout: str = "contiguous",
    gates: torch.dtype | None = None,
    decay: float = 0.1,
    channels: bool = False,
) -> dict[str, T]:
    """Tensors of (B, T, H, K), with keys so short that beta k k' is below 2."""
    batch, length, heads, size = shape
    value_heads = heads * group
    channel_axis = (size,) if channels else ()
    tensors = {
        "q": T(shape, layout=layout),
        "k": T(shape, layout=layout, scale=0.7 * size**-0.5),
        "v": T((batch, length, value_heads, value or size), layout=layout),
        "g": T(
            (batch, length, value_heads, *channel_axis), gates, decay, negative=True, layout=layout
        ),
        "beta": T((batch, length, value_heads), positive=True, layout=layout),
    }
    if state:
        tensors["initial_state"] = T((batch, value_heads, size, value or size), gates)
    if ids:
        tensors["documents"] = T((batch, length), classes=ids, ignored=0.1, ignore_index=-1)
    return tensors


L2, FINAL, LONG = {"qk_l2norm": True}, {"output_final_state": True}, (2, 8192, 16, 128)
SAMPLES = (
    Sample("qwen3-next", _case(2, 70, 2, 16, group=2, gates=torch.float32), L2),
    Sample("tiny", _case(1, 5, 1, 4)),
    Sample("tiny-group", _case(2, 4, 1, 3, group=2), {"scale": 0.7}),
    Sample("tiny-states", _case(1, 6, 1, 3, value=2, group=2, state=True), L2 | FINAL),
    Sample("tiny-documents", _case(1, 8, 1, 3, ids=3, state=True), FINAL),
    Sample("one-token", _case(2, 1, 2, 8, state=True), FINAL),
    Sample("no-tokens", _case(2, 0, 2, 8, state=True), FINAL),
    Sample("no-sequences", _case(0, 9, 2, 8), L2 | FINAL),
    Sample("narrow-values", _case(1, 17, 1, 8, value=5), L2),
    Sample("chunk-and-one", _case(1, 65, 1, 16, state=True), FINAL),
    Sample("several-chunks", _case(1, 200, 1, 16, value=20, group=3), L2 | FINAL),
    Sample("documents", _case(2, 150, 1, 16, group=2, ids=2), L2),
    Sample("strong-decay", _case(1, 130, 1, 8, decay=40.0), L2),
    Sample("no-decay", _case(1, 130, 1, 32, decay=0.0), L2),
    Sample("wide-keys", _case(1, 67, 1, 96, value=72), L2),
    Sample("fp32-states", _case(1, 20, 2, 8, gates=torch.float32, state=True), FINAL),
    Sample("swapped", _case(2, 40, 2, 8, layout="swapped"), L2),
    Sample("sliced", _case(2, 20, 2, 8, layout="sliced")),
    Sample("expanded", _case(3, 20, 2, 8, layout="expanded"), FINAL),
    *each_frozen(_case(1, 20, 2, 8, state=True), "q k v g beta initial_state", FINAL),
    Sample("past-65535-rows", _case(65537, 1, 1, 2), size="thin"),
    Sample("2x8192 16/32x128", _case(*LONG, group=2, gates=torch.float32), L2, size="bench"),
    Sample("2x8192 16x96", _case(2, 8192, 16, 96, value=192, gates=torch.float32), L2, "bench"),
)
COMPILE_SAMPLES = tuple(
    Sample(
        f"2x8192 4x{size} everything",
        _case(2, 8192, 4, size, group=2, state=True, ids=2, gates=torch.float32),
        FINAL,
    )
    for size in (32, 64, 128)
)
