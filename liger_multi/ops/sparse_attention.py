"""Contract of ``sparse_attention``: softmax attention of every query over a list of keys."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._formulas import MOST_SCORES, at_listed_keys, statistics_dtype
from liger_multi.ops._samples import each_frozen
from liger_multi.ops._work import Options, Shapes, Work
from liger_multi.testing.samples import Sample, Tensor as T

op = Op(
    "sparse_attention",
    family="attention",
    bitwise=bitwise(PER_ROW, "q k v indices y weights lse"),
)


class SparseAttentionOutput(NamedTuple):
    """What :func:`sparse_attention_with_weights` returns.

    Attributes:
        y: The output.
        weights: Of every listed key, the mean of its probabilities over the heads.
    """

    y: Tensor
    weights: Tensor


def _ordered(tensor: Tensor, heads: int, length: int, size: int) -> Tensor:
    """``(B, heads, length, size)`` whose memory has the order (B, length, heads, size)."""
    return tensor.new_empty(tensor.shape[0], length, heads, size).transpose(1, 2)


@op.forward(returns="y weights", residuals="lse")
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    value_dim: int,
    scale: float,
    output_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    acc_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    y = _ordered(q, q.shape[1], q.shape[2], value_dim)
    weights = q.new_empty(indices.shape if output_weights else (0,), dtype=acc_dtype)
    return y, weights, q.new_empty(q.shape[:3], dtype=acc_dtype)


def gradients(**kwargs: Any) -> tuple[Tensor, ...]:
    """Gradients of queries, keys and values, in memory as a projection's output."""
    outputs = []
    for name in "qkv":
        x = kwargs[name]
        if x is None or not kwargs[f"needs_{name}"]:
            outputs.append(kwargs["q"].new_empty(0))
        else:
            outputs.append(_ordered(x, x.shape[1], x.shape[2], x.shape[3]))
    return tuple(outputs)


op.backward(reads="dy q k v indices y lse value_dim scale", returns="dq dk dv", shapes=gradients)


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    *,
    value_dim: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention of every query over its own list of keys.

    Math:
        ``s[j] = scale q . k[indices[j]]``, ``p = softmax(s)`` over the list of the query, and ``y =
        sum_j p[j] v[indices[j]]``. An index of -1 is absent. A key that is listed twice counts
        twice. A query whose indices are all absent has y 0. Nothing else masks: causality and
        packing are up to the list (:func:`indexer_topk` makes such lists). Without v, the first
        ``value_dim`` channels of a key are its value: multi-head latent attention (MLA) in its
        absorbed form, where all heads share one latent of 512 channels beside 64 rotated ones.

    Shapes:
        q ``(B, H, L, D)``, k ``(B, G, S, D)``, v ``(B, G, S, E)`` with any strides, H a multiple of
        G. indices ``(B, L, K)`` of int32 or int64, shared by all heads, or ``(B, G, L, K)``. y
        ``(B, H, L, E)``, in memory ``(B, L, H, E)``, E being ``value_dim`` without v.
        :func:`sparse_attention_with_weights` also returns weights, of the shape of indices: the
        mean of p over the heads that share a list, 0 where absent. They have no gradient.

    Dtypes:
        In: one floating dtype, int32 or int64 indices. Inside: fp32 (fp64 for fp64); kernels round
        probabilities and their gradients to the dtype of q for GEMMs. y: that of q; weights: fp32
        (fp64 for fp64).

    Memory:
        Kept for backward: q, k, v, y, 4 bytes an index and 4 bytes a query and head (``lse``).
        Backward of k and v takes fp32 sums of their size, and the gradients that some queries give
        to each listed key, up to 1 GiB. Nothing is of size L x S.

    Raises:
        TypeError: An argument has not the dtype that it must have.
        ValueError: Shapes that do not fit together, mixed devices; both v and ``value_dim``, or
            none of them. On a CPU also an index of S or more; on a device, the output of that query
            is NaN.

    Source:
        DeepSeek-AI 2025 (arXiv:2512.02556); Liu et al. 2024 for MLA (arXiv:2405.04434).
    """
    return _y_and_weights(q, k, v, indices, value_dim, scale, False)[0]


def sparse_attention_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    *,
    value_dim: int | None = None,
    scale: float | None = None,
) -> SparseAttentionOutput:
    """:func:`sparse_attention`, and the mean probability of every listed key over the heads."""
    y, weights = _y_and_weights(q, k, v, indices, value_dim, scale, True)
    return SparseAttentionOutput(y, weights.view(indices.shape))


def _y_and_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    value_dim: int | None,
    scale: float | None,
    output_weights: bool,
) -> tuple[Tensor, Tensor]:
    """Check the arguments and call the operator; without ``output_weights``, no weights."""
    checks.floating(op.name, q=q, k=k, v=v, optional=("v",))
    size = _shapes_fit(q, k, v, value_dim)
    lists = _indices(q, k, indices)
    factor = q.shape[3] ** -0.5 if scale is None else checks.number(op.name, "scale", scale)
    return op(q, k, v, lists, size, factor, output_weights)  # type: ignore[no-any-return]


def _counts(indices: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """How often every key is listed: ``(..., K)`` to (..., S)."""
    is_listed = (indices >= 0).to(dtype)
    counts = torch.zeros(*indices.shape[:-1], keys + 1, dtype=dtype, device=indices.device)
    return counts.scatter_add(-1, indices.long() % (keys + 1), is_listed)[..., :keys]


def _outputs_and_probabilities(
    q: Tensor, k: Tensor, v: Tensor, counts: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Outputs and probabilities of some heads, (B, H, L, S)."""
    empty = counts.sum(-1, keepdim=True) == 0
    s = (q @ k.mT * scale).to(statistics_dtype(q)) + counts.log().masked_fill(empty, 0)
    p = torch.softmax(s, -1).masked_fill(empty, 0)
    return p.to(v.dtype) @ v, p


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    *,
    value_dim: int | None = None,
    scale: float | None = None,
    output_weights: bool = False,
) -> Tensor | SparseAttentionOutput:
    """Attention with the scores of all keys; many of them are made a head at a time, twice."""
    v = k[..., :value_dim] if v is None else v
    lists = indices[:, None] if indices.ndim == 3 else indices
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    shared = q.shape[1] // k.shape[1]
    counts = _counts(lists, k.shape[2], statistics_dtype(q)).expand(-1, k.shape[1], -1, -1)
    if not q.is_meta and q.shape[:3].numel() * k.shape[2] > MOST_SCORES and not output_weights:
        heads = []
        for h in range(q.shape[1]):
            g = slice(h // shared, h // shared + 1)
            part = (q[:, h : h + 1], k[:, g], v[:, g], counts[:, g], factor)
            heads.append(checkpoint(_outputs_and_probabilities, *part, use_reentrant=False)[0])
        return torch.cat(heads, 1)
    k, v, counts = (x.repeat_interleave(shared, 1) for x in (k, v, counts))
    y, p = _outputs_and_probabilities(q, k, v, counts, factor)
    if not output_weights:
        return y
    weights = (p / counts.clamp(min=1)).detach().unflatten(1, (lists.shape[1], -1)).mean(2)
    return SparseAttentionOutput(y, at_listed_keys(weights, lists, 0.0).view(indices.shape))


def work(shapes: Shapes, size: int, options: Options) -> Work:
    (batch, heads, length, width), list_length = shapes["q"], shapes["indices"][-1]
    value = shapes["v"][-1] if "v" in shapes else width  # a latent's value is nearly all of it
    tensor_bytes = (math.prod(shapes["q"]) + batch * heads * length * value) * size
    tensor_bytes += math.prod(shapes["k"]) * size + math.prod(shapes["indices"]) * 4
    # forward: two products of listed pairs; backward: the scores again and four more
    product = 2.0 * batch * heads * length * list_length
    forward = product * (width + value)
    return Work(
        tensor_bytes, 3 * tensor_bytes, forward, forward + product * (3 * width + 2 * value)
    )


def _shapes_fit(q: Tensor, k: Tensor, v: Tensor | None, value_dim: int | None) -> int:
    """Channels of a value."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is None:
            continue
        if x.ndim != 4:
            checks.refuse(op.name, f"{name} must have four axes", x)
        if x.dtype != q.dtype:
            raise TypeError(f"{op.name}: q is {q.dtype}, got {name} as {checks.describe(x)}")
    if (
        k.shape[0] != q.shape[0]
        or k.shape[3] != q.shape[3]
        or min(k.shape[1], k.shape[3]) < 1
        or (q.shape[1] % k.shape[1])
    ):
        checks.refuse(
            op.name,
            f"k must have shape (B, G, S, {q.shape[3]}) for q {tuple(q.shape)}, "
            "whose heads are a multiple of G, sizes at least 1",
            k,
        )
    if (v is None) == (value_dim is None):
        checks.refuse(
            op.name,
            "either v or value_dim says what a value is",
            "none" if v is None else f"both, value_dim {value_dim}",
        )
    if v is None:
        size = checks.integer(op.name, "value_dim", value_dim)
        if not 1 <= size <= k.shape[3]:
            checks.refuse(op.name, f"value_dim must be in [1, {k.shape[3]}]", f"{size}")
        return size
    if v.shape[:3] != k.shape[:3] or v.shape[3] < 1:
        checks.refuse(op.name, f"v must have shape {(*k.shape[:3], 'E')}", v)
    return v.shape[3]


def _indices(q: Tensor, k: Tensor, indices: Tensor) -> Tensor:
    """Lists as (B, 1 or G, L, K) int32."""
    checks.integers(op.name, "indices", indices)
    batch, _, queries, _ = q.shape
    grouped = indices[:, None] if indices.ndim == 3 else indices
    lists = (batch, grouped.shape[1] if grouped.ndim == 4 else 0, queries)
    if grouped.ndim != 4 or grouped.shape[:3] != lists or lists[1] not in (1, k.shape[1]):
        checks.refuse(
            op.name,
            f"indices must have shape ({batch}, {queries}, K) or ({batch}, "
            f"{k.shape[1]}, {queries}, K)",
            indices,
        )
    if indices.device != q.device:
        checks.refuse(op.name, "all tensors must be on one device", indices)
    return grouped.to(torch.int32)


def _case(
    shape: tuple[int, int, int, int],
    list_length: int,
    keys: int = 0,
    groups: int = 1,
    value: int = 0,
    layout: str = "contiguous",
    lists: int = 0,
    absent_share: float = 0.2,
) -> dict[str, T]:
    """Queries with ``list_length`` keys each; separate values where ``value`` is not 0.

    The first lists are of absent keys, and random lists have keys twice.
    """
    batch, _, length, size = shape
    key_rows = (batch, groups, keys or length)
    values = {"v": T((*key_rows, value), layout=layout)} if value else {}
    rows = (batch, lists, length) if lists else (batch, length)
    return {
        "q": T(shape, layout=layout),
        "k": T((*key_rows, size), layout=layout),
        **values,
        "indices": T(
            (*rows, list_length),
            classes=key_rows[2],
            ignored=absent_share,
            ignore_index=-1,
            grad=False,
        ),
    }


def _latent(value: int, **options: Any) -> dict[str, Any]:
    return {"v": None, "value_dim": value, **options}


WEIGHTS: dict[str, Any] = {"output_weights": True}
SAMPLES = (
    Sample("latent", _case((2, 4, 19, 24), 11), _latent(16)),
    Sample("separate", _case((2, 4, 19, 16), 11, groups=2, value=16)),
    Sample("tiny-latent", _case((1, 2, 4, 4), 3), _latent(3)),
    Sample("tiny-separate", _case((1, 2, 4, 3), 3, groups=2, value=2), {"scale": 0.7}),
    Sample("tiny-lists", _case((1, 2, 4, 3), 3, groups=2, value=3, lists=2)),
    Sample("tiny-weights", _case((1, 2, 4, 3), 3), _latent(3) | WEIGHTS, path="weights"),
    Sample("weights", _case((2, 6, 9, 20), 21, groups=2, value=8, lists=2), WEIGHTS),
    Sample("weights-of-shared-lists", _case((1, 6, 9, 8), 21, groups=3, value=8), WEIGHTS),
    Sample("value-is-the-key", _case((1, 3, 10, 16), 7), _latent(16)),
    Sample("value-is-little", _case((1, 3, 10, 40), 7), _latent(8)),
    Sample("odd-sizes", _case((1, 5, 10, 37), 9, value=21)),
    Sample("many-heads", _case((1, 70, 5, 24), 9), _latent(16)),
    Sample("many-listed", _case((1, 2, 5, 24), 150, keys=90), _latent(16)),
    Sample("no-keys-listed", _case((1, 2, 6, 8), 5, absent_share=1.0), _latent(8)),
    Sample("empty-lists", _case((1, 2, 6, 8), 0), _latent(8)),
    Sample("one-query", _case((2, 2, 1, 8), 9, keys=30), _latent(4)),
    Sample("two-keys", _case((1, 2, 40, 8), 3, keys=2), _latent(4)),
    Sample("no-queries", _case((1, 2, 0, 8), 3, keys=4), _latent(4)),
    Sample("no-batch", _case((0, 2, 5, 8), 3), _latent(4)),
    Sample("swapped", _case((2, 2, 12, 8), 5, layout="swapped", value=8)),
    Sample("sliced", _case((2, 2, 12, 8), 5, layout="sliced"), _latent(4)),
    Sample("expanded", _case((3, 2, 12, 8), 5, layout="expanded"), _latent(4)),
    *each_frozen(_case((1, 2, 8, 8), 5, value=8), "q k v"),
    *[Sample("frozen-latent", each_frozen(_case((1, 2, 8, 8), 5), "k")[0].tensors, _latent(4))],
    Sample("past-65535-rows", _case((1, 1, 65537, 2), 2, keys=3), _latent(2), size="thin"),
    Sample(
        "latent-8192x32x576-2048",
        _case((1, 32, 8192, 576), 2048, layout="swapped", absent_share=0.0),
        _latent(512),
        size="bench",
    ),
    Sample(
        "latent-8192x128x576-2048",
        _case((1, 128, 8192, 576), 2048, layout="swapped", absent_share=0.0),
        _latent(512),
        size="bench",
    ),
)
COMPILE_SAMPLES = (
    Sample("latent-128x32x320-2048", _case((1, 32, 128, 320), 2048, keys=8192), _latent(256)),
    *[
        Sample(
            f"128x{heads}x{size}-2048",
            _case((1, heads, 128, size), 2048, keys=8192, groups=groups, value=value),
            WEIGHTS,
        )
        for heads, groups, size, value in ((32, 2, 128, 128), (16, 16, 192, 128), (8, 2, 64, 64))
    ],
)
