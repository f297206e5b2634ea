"""Contract of ``indexer_topk``: the keys that a lightning indexer selects, and their scores."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._formulas import at_listed_keys, document_ids, scores_of_all_keys
from liger_multi.ops._samples import each_frozen
from liger_multi.ops.attention import from_lengths, key_ranges
from liger_multi.ops.indexer_scores import case, check_indexer, statistics, work as work
from liger_multi.testing.samples import Sample, Tensor as T

op = Op(
    "indexer_topk",
    family="attention",
    bitwise=bitwise(PER_ROW, "q k w ranges indices scores"),
)


class IndexerTopkOutput(NamedTuple):
    """The selection of an indexer.

    Attributes:
        indices: Of the selected keys.
        scores: Of the selected keys.
    """

    indices: Tensor
    scores: Tensor


@op.forward(returns="indices scores")
def forward(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    ranges: Tensor | None,
    topk: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    shape = (*q.shape[:2], min(topk, k.shape[1]))
    return q.new_empty(shape, dtype=torch.int32), q.new_empty(shape, dtype=statistics(q))


op.backward(reads="dscores q k w indices scale", returns="dq dk dw")


def indexer_topk(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    topk: int,
    *,
    causal: bool = True,
    documents: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    ranges: Tensor | None = None,
    scale: float | None = None,
) -> IndexerTopkOutput:
    """The keys with the highest scores of a lightning indexer, for every query.

    Math:
        ``score[s] = scale sum_h w[h] relu(q[h] . k[s])``. Of the keys that a query sees, the
        ``topk`` with the highest scores are selected; of equal scores, the first keys. Indices are
        in increasing order. Where a query sees fewer keys, -1 fills the end of its list, with
        scores of -inf. The queries are the last positions of the keys. Scores have gradients, as in
        :func:`indexer_scores`; the selection has none.

    Shapes:
        q ``(B, L, H, D)``, k ``(B, S, D)``, w ``(B, L, H)`` with any strides. documents ``(B, S)``,
        ids whose runs are documents, below 0 for padding, or cu_seqlens ``(N + 1,)`` for B = 1;
        ranges ``(B or 1, L, 2)`` int32, in place of all other masks: the first key of a query and
        one past its last. indices and scores ``(B, L, min(topk, S))``.

    Dtypes:
        In: q and k of one floating dtype, w of any. Inside: fp32 (fp64 for fp64). indices: int32;
        scores: fp32 (fp64 for fp64).

    Memory:
        Kept for backward: q, k, w and the indices. Scores of all keys exist for some queries at a
        time, in up to 256 MiB; nothing is of size L x S. Backward as of :func:`indexer_scores`.

    Raises:
        TypeError: An argument has not the dtype that it must have.
        ValueError: Shapes that do not fit together, mixed devices, a topk below 1, options that
            contradict each other.

    Source:
        DeepSeek-AI 2025 (arXiv:2512.02556), equations 1 and 2.
    """
    name = op.name
    check_indexer(name, q, k, w)
    if checks.integer(name, "topk", topk) < 1:
        checks.refuse(name, "topk must be at least 1", f"{topk}")
    checks.boolean(name, "causal", causal)
    if ranges is None:
        ranges = _ranges(q, k, causal, documents, cu_seqlens)
    elif documents is not None or cu_seqlens is not None:
        raise ValueError(f"{name}: ranges stand in place of all other masks, got both")
    else:
        _ranges_fit(q, ranges)
    factor = q.shape[3] ** -0.5 if scale is None else checks.number(name, "scale", scale)
    return IndexerTopkOutput(*op(q, k, w, ranges, topk, causal and ranges is None, factor))


def _ranges(
    q: Tensor, k: Tensor, causal: bool, documents: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor | None:
    """Ranges of keys; None where ``causal`` says all."""
    name, shape = op.name, (q.shape[0], k.shape[1])
    if cu_seqlens is not None:
        checks.integers(name, "cu_seqlens", cu_seqlens)
        if documents is not None or cu_seqlens.ndim != 1 or q.shape[0] != 1:
            checks.refuse(
                name,
                "cu_seqlens has one axis, is for a batch of one, and stands in place of documents",
                f"{checks.describe(cu_seqlens)} for a batch of {q.shape[0]}",
            )
        documents = from_lengths(cu_seqlens.to(q.device), k.shape[1])
    if documents is None:
        return None
    checks.targets(name, documents, torch.Size(shape), k, name="documents")
    if q.shape[1] > k.shape[1]:
        checks.refuse(
            name,
            "with documents every query is a position of the keys",
            f"{q.shape[1]} queries and {k.shape[1]} keys",
        )
    return key_ranges(
        q.shape[1],
        k.shape[1],
        q.device,
        causal=causal,
        left=-1,
        right=-1,
        global_tokens=0,
        documents=documents,
    )


def _ranges_fit(q: Tensor, ranges: Tensor) -> None:
    if not isinstance(ranges, Tensor):
        raise TypeError(f"{op.name}: ranges must be a tensor, got {checks.describe(ranges)}")
    batches = (1, q.shape[0])
    if (
        ranges.dtype != torch.int32
        or ranges.ndim != 3
        or ranges.shape[0] not in batches
        or (ranges.shape[1:] != (q.shape[1], 2) or ranges.device != q.device)
    ):
        checks.refuse(
            op.name,
            f"ranges must be int32 of shape ({q.shape[0]} or 1, {q.shape[1]}, 2) on {q.device}",
            ranges,
        )


def _documents(batch: int, length: int, ignored: float = 0.0) -> dict[str, Any]:
    return {"documents": T((batch, length), classes=2, ignored=ignored, ignore_index=-1)}


def _topk(count: int, **options: Any) -> dict[str, Any]:
    return {"topk": count, **options}


def formula(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    topk: int,
    *,
    causal: bool = True,
    documents: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    ranges: Tensor | None = None,
    scale: float | None = None,
) -> IndexerTopkOutput:
    """A stable sort of the scores of all keys.

    Raises:
        NotImplementedError: ``ranges`` were given, which say what the other masks say.
    """
    if ranges is not None:
        raise NotImplementedError("the formula takes masks, not ranges")
    if cu_seqlens is not None:
        documents = document_ids(cu_seqlens, k.shape[1])
    scores, (queries, keys) = scores_of_all_keys(q, k, w, scale), (q.shape[1], k.shape[1])
    key = torch.arange(keys, device=q.device)
    own_key = torch.arange(queries, device=q.device)[:, None] + (keys - queries)
    visible = ((key <= own_key) if causal else key >= 0 * own_key)[None]
    if documents is not None:
        change = torch.nn.functional.pad((documents[:, 1:] != documents[:, :-1]).cumsum(1), (1, 0))
        same_document = change[:, keys - queries :, None] == change[:, None]
        visible = visible & same_document & (documents >= 0)[:, None]
    masked = scores.detach().masked_fill(~visible, -torch.inf)
    best = masked.sort(stable=True, dim=-1, descending=True).indices[..., : min(topk, keys)]
    selected = torch.where(masked.gather(-1, best).isfinite(), best, keys).sort(-1).values
    selected = torch.where(selected < keys, selected, -1).to(torch.int32)
    return IndexerTopkOutput(selected, at_listed_keys(scores, selected, -torch.inf))


SAMPLES = (
    Sample("causal", case((2, 19, 4, 16)), _topk(7)),
    Sample("tiny", case((1, 5, 2, 3), weights=None), _topk(2, causal=False)),
    Sample("tiny-all", case((1, 4, 2, 2), weights=None), _topk(3, causal=False, scale=0.7)),
    Sample("few-documents", case((1, 6, 2, 3), **_documents(1, 6)), _topk(2)),
    # where all keys are seen: scores of -inf have no numeric derivative
    *[
        Sample(f"tiny-{name}", case(shape, keys, weights=None), _topk(count, causal=False))
        for name, shape, keys, count in (
            ("heads", (1, 4, 5, 2), 0, 3),
            ("keys", (2, 2, 3, 3), 9, 4),
            ("query", (1, 1, 3, 4), 6, 2),
        )
    ],
    Sample("everything-seen", case((2, 12, 3, 8)), _topk(5, causal=False)),
    Sample("fewer-keys-than-topk", case((1, 9, 3, 8)), _topk(40)),
    Sample("documents", case((2, 40, 3, 8), **_documents(2, 40, 0.2)), _topk(3)),
    Sample("all-padding", case((1, 8, 3, 8), **_documents(1, 8, 1.0)), _topk(3)),
    Sample("later-queries", case((2, 5, 3, 8), keys=30), _topk(6)),
    Sample("fewer-keys-than-queries", case((1, 9, 2, 8), keys=4), _topk(3)),
    Sample("many-heads", case((1, 9, 70, 24)), _topk(4)),
    Sample("odd-sizes", case((1, 10, 5, 37)), _topk(4)),
    Sample("several-tiles", case((1, 40, 2, 8), keys=300), _topk(33)),
    Sample("weights-of-the-dtype", case((1, 9, 4, 16), weights=None), _topk(3)),
    Sample("one-token", case((1, 1, 2, 8)), _topk(1)),
    Sample("no-queries", case((1, 0, 2, 8), keys=4), _topk(2)),
    Sample("no-batch", case((0, 5, 2, 8)), _topk(2)),
    Sample("swapped", case((2, 12, 2, 8), layout="swapped"), _topk(5)),
    Sample("sliced", case((2, 12, 2, 8), layout="sliced"), _topk(5)),
    Sample("expanded", case((3, 12, 2, 8), layout="expanded"), _topk(5)),
    *each_frozen(case((1, 9, 2, 8)), "q k w", _topk(3)),
    Sample("past-65535-rows", case((1, 65537, 1, 2), keys=3), _topk(2), size="thin"),
    # of integers, so that scores in every dtype have one order and select the same keys
    Sample(
        "8192x64x128-2048",
        case((1, 8192, 64, 128), whole=8.0),
        _topk(2048, scale=0.125),
        size="bench",
    ),
)
COMPILE_SAMPLES = (
    Sample("128x8x32-2048", case((1, 128, 8, 32), 8192), _topk(2048)),
    Sample(
        "8192x64x128-2048 documents", case((1, 8192, 64, 128), **_documents(1, 8192)), _topk(2048)
    ),
)
