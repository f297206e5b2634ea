"""Contract of ``indexer_scores``, and what it shares with ``indexer_topk``."""

import math
from typing import Any

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._formulas import at_listed_keys, scores_of_all_keys
from liger_multi.ops._samples import each_frozen
from liger_multi.ops._work import Options, Shapes, Work, visible_pairs
from liger_multi.testing.samples import Sample, Tensor as T

op = Op(
    "indexer_scores",
    family="attention",
    bitwise=bitwise(PER_ROW, "q k w indices scores"),
)


@op.forward(returns="scores")
def forward(q: Tensor, k: Tensor, w: Tensor, indices: Tensor, scale: float) -> Tensor:
    return q.new_empty(indices.shape, dtype=statistics(q))


op.backward(reads="dscores q k w indices scale", returns="dq dk dw")


def statistics(q: Tensor) -> torch.dtype:
    """The dtype of scores."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def indexer_scores(
    q: Tensor, k: Tensor, w: Tensor, indices: Tensor, *, scale: float | None = None
) -> Tensor:
    """Scores of a lightning indexer for the keys that every query lists, with gradients.

    Math:
        ``scores[j] = scale sum_h w[h] relu(q[h] . k[indices[j]])``, and -inf where an index is -1.
        The loss of an indexer is the KL divergence of ``softmax(scores)`` from the probabilities of
        the attention that it selects for, ``kl_div(scores, weights, form="logits")`` with weights
        from :func:`sparse_attention`.

    Shapes:
        q ``(B, L, H, D)``, k ``(B, S, D)``, w ``(B, L, H)`` with any strides; indices and scores
        ``(B, L, K)``.

    Dtypes:
        In: q and k of one floating dtype, w of any, int32 or int64 indices. Inside: fp32 (fp64 for
        fp64); kernels round gradients of products to the dtype of q for GEMMs. Scores: fp32 (fp64
        for fp64).

    Memory:
        Kept for backward: the arguments. Backward of k takes fp32 sums of its size, and the
        gradients that some queries give to each listed key, up to 1 GiB. Nothing is of size L x S.

    Raises:
        TypeError: An argument has not the dtype that it must have.
        ValueError: Shapes that do not fit together, mixed devices. On a CPU also an index of S or
            more; on a device, its score is NaN.

    Source:
        DeepSeek-AI 2025 (arXiv:2512.02556), equations 1 and 4.
    """
    check_indexer(op.name, q, k, w)
    checks.integers(op.name, "indices", indices)
    if indices.ndim != 3 or indices.shape[:2] != q.shape[:2]:
        checks.refuse(op.name, f"indices must have shape {(*q.shape[:2], 'K')}", indices)
    if indices.device != q.device:
        checks.refuse(op.name, "all tensors must be on one device", indices)
    factor = q.shape[3] ** -0.5 if scale is None else checks.number(op.name, "scale", scale)
    result: Tensor = op(q, k, w, indices.to(torch.int32), factor)
    return result


def formula(
    q: Tensor, k: Tensor, w: Tensor, indices: Tensor, *, scale: float | None = None
) -> Tensor:
    """Scores of all keys, of which the listed ones are taken."""
    return at_listed_keys(scores_of_all_keys(q, k, w, scale), indices, -torch.inf)


def work(shapes: Shapes, size: int, options: Options) -> Work:
    (batch, length, heads, width), keys = shapes["q"], shapes["k"][1]
    tensor_bytes = (math.prod(shapes["q"]) + math.prod(shapes["k"])) * size + math.prod(
        shapes["w"]
    ) * 4
    topk = options.get("topk", 0)
    flops_of_lists = 2.0 * heads * width * batch * length * (topk or shapes["indices"][-1])
    # the selection has a product of all pairs that are seen, scores of a list one of listed pairs
    flops = 2.0 * heads * width * batch * visible_pairs(length, keys, {"causal": True})
    forward = flops if topk else flops_of_lists
    return Work(tensor_bytes, 3 * tensor_bytes, forward, forward + 3 * flops_of_lists)


def check_indexer(name: str, q: Tensor, k: Tensor, w: Tensor) -> None:
    """Queries, keys and weights of an indexer fit together."""
    checks.floating(name, q=q, k=k, w=w)
    if q.ndim != 4 or min(q.shape[2:]) < 1:
        checks.refuse(name, "q must have four axes, (B, L, H, D), with H and D at least 1", q)
    if k.ndim != 3 or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[3]:
        checks.refuse(name, f"k must have shape ({q.shape[0]}, S, {q.shape[3]})", k)
    if k.dtype != q.dtype:
        raise TypeError(f"{name}: q is {q.dtype}, got k as {checks.describe(k)}")
    if w.shape != q.shape[:3]:
        checks.refuse(name, f"w must have shape {tuple(q.shape[:3])}", w)


def case(
    shape: tuple[int, int, int, int],
    keys: int = 0,
    layout: str = "contiguous",
    weights: torch.dtype | None = torch.float32,
    whole: float = 0.0,
    **extra: T,
) -> dict[str, T]:
    """Queries of a shape (B, L, H, D), as many keys, and weights; integers up to some ``whole``."""
    batch, length, heads, size = shape
    key_layout = layout if layout != "swapped" else "sliced"
    exact: dict[str, Any] = {"scale": whole or 1.0, "whole": whole > 0}
    return {
        "q": T(shape, layout=layout, **exact),
        "k": T((batch, keys or length, size), layout=key_layout, **exact),
        "w": T((batch, length, heads), weights, layout=key_layout, whole=whole > 0),
        **extra,
    }


def _case(
    shape: tuple[int, int, int, int],
    list_length: int,
    keys: int = 0,
    absent_share: float = 0.2,
    **extra: Any,
) -> dict[str, T]:
    """The first lists are of absent keys, and random lists have keys twice."""
    tensors = case(shape, keys, **extra)
    lists = (*shape[:2], list_length)
    ids = T(lists, classes=tensors["k"].shape[1], ignored=absent_share, ignore_index=-1, grad=False)
    return {**tensors, "indices": ids}


SAMPLES = (
    Sample("several", _case((2, 19, 4, 16), 11)),
    Sample("tiny", _case((1, 4, 2, 3), 3, absent_share=0.0, weights=None)),
    Sample("tiny-scale", _case((1, 3, 2, 2), 4, absent_share=0.0, weights=None), {"scale": 0.7}),
    # without absent keys, whose scores of -inf have no numeric derivative
    *[
        Sample(f"tiny-{name}", _case(shape, listed, keys, absent_share=0.0, weights=None))
        for name, shape, listed, keys in (
            ("heads", (1, 3, 5, 2), 3, 0),
            ("keys", (2, 2, 2, 3), 4, 9),
            ("query", (1, 1, 3, 4), 2, 6),
        )
    ],
    Sample("odd-sizes", _case((1, 10, 5, 37), 9)),
    Sample("many-heads", _case((1, 5, 70, 24), 9)),
    Sample("many-listed", _case((1, 5, 3, 24), 150, keys=90)),
    Sample("weights-of-the-dtype", _case((1, 9, 4, 16), 11, weights=None)),
    Sample("no-keys-listed", _case((1, 6, 2, 8), 5, absent_share=1.0)),
    Sample("empty-lists", _case((1, 6, 2, 8), 0)),
    Sample("one-token", _case((1, 1, 2, 8), 1, absent_share=0.0)),
    Sample("one-query", _case((2, 1, 2, 8), 9, keys=30)),
    Sample("one-key", _case((1, 40, 2, 8), 3, keys=1)),
    Sample("no-queries", _case((1, 0, 2, 8), 3, keys=4)),
    Sample("no-batch", _case((0, 5, 2, 8), 3)),
    Sample("swapped", _case((2, 12, 2, 8), 5, layout="swapped")),
    Sample("sliced", _case((2, 12, 2, 8), 5, layout="sliced")),
    Sample("expanded", _case((3, 12, 2, 8), 5, layout="expanded")),
    *each_frozen(_case((1, 9, 2, 8), 5), "q k w"),
    Sample("past-65535-rows", _case((1, 65537, 2, 2), 2, keys=3), size="thin"),
    # integers, because rounding may flip the sign of other products
    Sample(
        "8192x64x128-2048",
        _case((1, 8192, 64, 128), 2048, absent_share=0.0, whole=8.0),
        size="bench",
    ),
)
COMPILE_SAMPLES = (Sample("128x8x32-2048", _case((1, 128, 8, 32), 2048, keys=8192)),)
