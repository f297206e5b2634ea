"""Contract of ``attention``, and the ranges of keys that a query sees.

Windows, packing, padding and global tokens become such ranges.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.dispatch.torch_ops import LIBRARY
from liger_multi.ops._formulas import MOST_SCORES, document_ids, statistics_dtype
from liger_multi.ops._samples import each_frozen, frozen
from liger_multi.ops._work import Options, Shapes, Work, visible_pairs
from liger_multi.testing.samples import Sample, Tensor as T

op = Op(
    "attention",
    family="attention",
    bitwise=bitwise(PER_ROW, "q k v ranges y lse", reference="itself"),
)


def _ordered(tensor: Tensor, heads: int, length: int, size: int) -> Tensor:
    """``(B, heads, length, size)`` whose memory has the order of a projection's output."""
    return tensor.new_empty(tensor.shape[0], length, heads, size).transpose(1, 2)


@op.forward(returns="y", residuals="lse")
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    ranges: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
    y = _ordered(q, q.shape[1], q.shape[2], v.shape[3])
    return y, q.new_empty(q.shape[:3], dtype=statistics)


def gradients_of_heads(**kwargs: Any) -> tuple[Tensor, ...]:
    """Gradients of queries, keys and values, in memory as a projection's output."""
    outputs = [
        _ordered(x, x.shape[1], x.shape[2], x.shape[3]) if kwargs[f"needs_{n}"] else x.new_empty(0)
        for n, x in ((n, kwargs[n]) for n in "qkv")
    ]
    if "sinks" in kwargs:
        sinks = kwargs["sinks"]
        requested = sinks is not None and kwargs["needs_sinks"]
        outputs.append(sinks.new_empty(sinks.shape) if requested else kwargs["q"].new_empty(0))
    return tuple(outputs)


op.backward(
    reads="dy q k v sinks ranges y lse causal scale softcap",
    returns="dq dk dv dsinks",
    shapes=gradients_of_heads,
)


# --- ranges of keys ---


def _looked_at(ranges: Tensor, keys: int) -> Tensor:
    from liger_multi.reference.attention.attention import looked_at

    return looked_at(ranges, keys)


LIBRARY.define("looked_at_ranges(Tensor ranges, SymInt keys) -> Tensor")
LIBRARY.impl("looked_at_ranges", _looked_at, "CompositeExplicitAutograd")
torch.library.register_fake(
    "liger_multi::looked_at_ranges", lambda ranges, keys: torch.empty_like(ranges), lib=LIBRARY
)


def runs(documents: Tensor) -> tuple[Tensor, Tensor]:
    """First and one past the last place of every token's run of equal ids; none below 0."""
    length = documents.shape[-1]
    token = torch.arange(length, device=documents.device)
    change = documents[:, 1:] != documents[:, :-1]
    edge = change.new_ones(documents.shape[0], 1)
    first = torch.where(torch.cat([edge, change], 1), token, 0).cummax(-1).values
    ends = torch.where(torch.cat([change, edge], 1), token + 1, length)
    last = ends.flip(-1).cummin(-1).values.flip(-1)
    padding = documents < 0
    return torch.where(padding, token, first), torch.where(padding, token, last)


def from_lengths(cu_seqlens: Tensor, length: int) -> Tensor:
    """Ids of documents from where each begins; what stands past the last end is padding."""
    token = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    ids = torch.searchsorted(cu_seqlens.contiguous(), token, right=True) - 1
    return torch.where(token < cu_seqlens[-1], ids, -1)[None]


def key_ranges(
    queries: int,
    keys: int,
    device: torch.device,
    *,
    causal: bool,
    left: int,
    right: int,
    global_tokens: int,
    documents: Tensor | None,
) -> Tensor | None:
    """One or two ranges of keys for every query, ``(B or 1, queries, 2 or 4)`` int32.

    The queries are the last positions of the keys. None where all is said by ``causal`` alone.

    Args:
        queries: Number of queries.
        keys: Number of keys.
        device: Where the ranges are wanted.
        causal: Nobody sees later positions.
        left: Earlier positions that a query sees; all below 0.
        right: Later ones, where not causal.
        global_tokens: First tokens of every document that see all and that all see.
        documents: An id a key; only keys of the query's own run of ids are seen.
    """
    if documents is None and left < 0 and (right < 0 or causal):
        return None
    offset = keys - queries
    acc_dtype = torch.int32 if documents is None else torch.int64
    position = torch.arange(offset, keys, device=device, dtype=acc_dtype)[None]
    first: Any = 0
    last: Any = keys
    if documents is not None:
        first, last = (bound[:, offset:] for bound in runs(documents))
    start = (position - left).clamp(min=first) if left >= 0 else position * 0 + first
    stop = (position + 1).clamp(max=last) if causal else position * 0 + last
    end = stop if right < 0 or causal else (position + (right + 1)).clamp(max=last)
    if not global_tokens:
        return torch.stack([start, torch.maximum(start, end)], -1).to(torch.int32)
    everywhere = position < first + global_tokens
    start = torch.where(everywhere, first, start)
    end = torch.maximum(start, end)
    second_start = torch.where(everywhere, end, first)
    past = torch.where(everywhere, stop, start.clamp(max=first + global_tokens))
    return torch.stack([start, end, second_start, torch.maximum(second_start, past)], -1).to(
        torch.int32
    )


def in_graphs(ranges: Tensor | None, keys: int) -> Tensor | None:
    """The ranges; a compiled graph inspects them when it runs, once per mask for all layers."""
    if ranges is None or not torch.compiler.is_compiling():
        return ranges
    looked: Tensor = torch.ops.liger_multi.looked_at_ranges(ranges, keys)
    return looked


# --- the operator ---

MOST_RANGES = 16
"""Ranges of keys of one query; kernels take two at a time."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    global_tokens: int = 0,
    documents: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    ranges: Tensor | None = None,
) -> Tensor:
    """Softmax attention in memory linear in the sequence, with every usual mask.

    Math:
        ``s = scale q k'``; with a softcap ``s = softcap tanh(s / softcap)``. Over the keys that a
        query sees, ``p = exp(s) / (sum exp(s) + exp(sink))`` and ``y = p v``; without sinks the
        last term is absent. A query that sees nothing has y 0. The queries are the last positions
        of the keys. ``window`` is how many positions a query sees to the left and to the right; an
        int w means w tokens with its own, ``(w - 1, w - 1)``. The first ``global_tokens`` of a
        document see all and are seen by all, as far as ``causal`` lets them.

    Shapes:
        q ``(B, H, L, D)``, k ``(B, G, S, D)``, v ``(B, G, S, E)`` with any strides, H a multiple of
        G; sinks ``(H,)``; documents ``(B, S)``, ids whose runs are documents, below 0 for padding,
        or cu_seqlens ``(N + 1,)``, where documents begin and the last one ends, for B = 1; ranges
        ``(B or 1, L, 2 n)`` int32, in place of all other masks: n disjoint ranges of keys for each
        query, at most 16; y ``(B, H, L, E)``, in memory ``(B, L, H, E)``.

    Dtypes:
        In: one floating dtype, sinks of any. Inside: fp32 (fp64 for fp64); kernels round the
        probabilities to the dtype of v for the second GEMM. Out: that of q.

    Memory:
        Kept for backward: q, k, v, y, 4 bytes a query and head (``lse``), 8 or 16 bytes a query for
        masks other than ``causal``. Nothing of size L x S exists.

    Raises:
        TypeError: An argument is not a floating-point tensor, or dtypes differ.
        ValueError: Shapes do not fit together, mixed devices, options that contradict each other.

    Source:
        Dao 2023 (arXiv:2307.08691), Beltagy et al. 2020 (arXiv:2004.05150), Xiao et al. 2023
        (arXiv:2309.17453); ``torch.nn.functional.scaled_dot_product_attention``, transformers
        ``eager_attention_forward`` of Llama, Gemma 2 and GPT-OSS.
    """
    checks.floating("attention", q=q, k=k, v=v, sinks=sinks, optional=("sinks",))
    _shapes_fit(q, k, v)
    checks.vector("attention", "sinks", sinks, q.shape[1], "heads of q")
    checks.boolean("attention", "causal", causal)
    if ranges is None:
        ids = _documents(q, k, documents, cu_seqlens)
        left, right = _window(window, global_tokens)
        ranges = key_ranges(
            q.shape[2],
            k.shape[2],
            q.device,
            causal=causal,
            left=left,
            right=right,
            global_tokens=global_tokens if left >= 0 or right >= 0 else 0,
            documents=ids,
        )
    else:
        if not isinstance(ranges, Tensor):
            raise TypeError(f"attention: ranges must be a tensor, got {checks.describe(ranges)}")
        if causal or global_tokens or any(m is not None for m in (window, documents, cu_seqlens)):
            raise ValueError("attention: ranges stand in place of all other masks, got both")
        _ranges_fit(q, ranges)
    cap = 0.0 if softcap is None else checks.number("attention", "softcap", softcap, 0, above=True)
    factor = q.shape[3] ** -0.5 if scale is None else checks.number("attention", "scale", scale)
    ranges = in_graphs(ranges, k.shape[2])
    result: Tensor = op(q, k, v, sinks, ranges, causal and ranges is None, factor, cap)
    return result


Window = int | tuple[int, int] | None


def _visible(
    q: Tensor,
    k: Tensor,
    causal: bool,
    window: Window,
    global_tokens: int,
    documents: Tensor | None,
    ranges: Tensor | None,
) -> Tensor:
    """Which keys each query sees, pair by pair."""
    if ranges is not None:
        first, last = ranges.unflatten(-1, (-1, 2)).unsqueeze(-1).unbind(-2)
        key = torch.arange(k.shape[2], device=k.device)
        in_range: Tensor = (key >= first) & (key < last)
        return in_range.any(-2)[:, None]
    i = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)[:, None]
    j = torch.arange(k.shape[2], device=q.device)
    left, right = (window - 1, window - 1) if isinstance(window, int) else window or (-1, -1)
    right = 0 if causal else right
    begin: Tensor | int = 0
    same_document = None
    if documents is not None:
        edges = (documents[:, 1:] != documents[:, :-1]).cumsum(-1)
        run = torch.cat([torch.zeros_like(edges[:, :1]), edges], -1)
        begin = (run[:, None] < run[:, :, None]).sum(-1)[:, -q.shape[2] :, None]
        same_document = (run[:, -q.shape[2] :, None] == run[:, None]) & (documents >= 0)[:, None]
    visible = ((j >= i - left) | (left < 0)) & ((j <= i + right) | (right < 0))
    if window is not None:
        visible = visible | (j < begin + global_tokens) | (i < begin + global_tokens)
    visible = visible & (j <= i) if causal else visible
    return visible if same_document is None else (visible & same_document)[:, None]


def of_all_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    *,
    causal: bool = False,
    window: Window = None,
    global_tokens: int = 0,
    documents: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    ranges: Tensor | None = None,
) -> Tensor:
    """Attention with the scores of all heads in memory."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if softcap is None else torch.tanh(s / softcap) * softcap
    visible = _visible(q, k, causal, window, global_tokens, documents, ranges)
    s = s.masked_fill(~visible, torch.finfo(s.dtype).min)
    if sinks is not None:
        s = torch.cat([s, sinks[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    p = torch.softmax(s, -1, dtype=statistics_dtype(s))
    p = p[..., : k.shape[2]].to(v.dtype)
    masked = documents is not None or ranges is not None
    if masked or q.shape[2] > k.shape[2]:  # queries that see nothing
        p = p.masked_fill(~visible, 0)
    return p @ v


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    global_tokens: int = 0,
    documents: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    ranges: Tensor | None = None,
) -> Tensor:
    """``softmax(q @ k.T * scale + mask) @ v``; many scores are made a head at a time, twice."""
    if cu_seqlens is not None:
        documents = document_ids(cu_seqlens, k.shape[2])
    run = functools.partial(
        of_all_heads,
        causal=causal,
        window=window,
        global_tokens=global_tokens,
        documents=documents,
        softcap=softcap,
        scale=scale,
        ranges=ranges,
    )
    if q.is_meta or q.shape[:3].numel() * k.shape[2] <= MOST_SCORES:
        return run(q, k, v, sinks)
    shared = q.shape[1] // k.shape[1]
    heads = []
    for h in range(q.shape[1]):
        head, group = slice(h, h + 1), slice(h // shared, h // shared + 1)
        part = (q[:, head], k[:, group], v[:, group], None if sinks is None else sinks[head])
        heads.append(checkpoint(run, *part, use_reentrant=False))
    return torch.cat(heads, 1)


def work(shapes: Shapes, size: int, options: Options) -> Work:
    (batch, heads, length, width), (_, groups, keys, value) = shapes["q"], shapes["v"]
    tokens = batch * (heads * length + groups * keys) * (width + value) * size
    # forward: two products; backward: the scores again and four more
    product = 2.0 * batch * heads * visible_pairs(length, keys, options)
    forward = product * (width + value)
    return Work(tokens, 3 * tokens, forward, forward + product * (3 * width + 2 * value))


def _shapes_fit(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"attention: {name} must have four axes, got {checks.describe(x)}")
        if x.dtype != q.dtype:
            raise TypeError(f"attention: q is {q.dtype}, got {name} as {checks.describe(x)}")
    if k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        checks.refuse(
            "attention",
            f"k and v must have shapes (B, G, S, {q.shape[3]}) and (B, G, "
            f"S, E) for q {tuple(q.shape)}",
            f"{tuple(k.shape)} and {tuple(v.shape)}",
        )
    if q.shape[3] < 1 or k.shape[1] < 1 or q.shape[1] % k.shape[1]:
        checks.refuse(
            "attention",
            "heads of q must be a multiple of heads of k, of at least one element",
            f"{tuple(q.shape)} and {tuple(k.shape)}",
        )


def _documents(
    q: Tensor, k: Tensor, documents: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor | None:
    if cu_seqlens is not None:
        checks.integers("attention", "cu_seqlens", cu_seqlens)
        if documents is not None or cu_seqlens.ndim != 1 or q.shape[0] != 1:
            checks.refuse(
                "attention",
                "cu_seqlens has one axis, is for a batch of one, and stands in place of documents",
                f"{checks.describe(cu_seqlens)} for a batch of {q.shape[0]}",
            )
        documents = from_lengths(cu_seqlens.to(q.device), k.shape[2])
    if documents is None:
        return None
    checks.targets(
        "attention", documents, torch.Size((q.shape[0], k.shape[2])), k, name="documents"
    )
    if q.shape[2] > k.shape[2]:
        checks.refuse(
            "attention",
            "with documents every query is a position of the keys",
            f"{q.shape[2]} queries and {k.shape[2]} keys",
        )
    return documents


def _window(window: int | tuple[int, int] | None, global_tokens: int) -> tuple[int, int]:
    if checks.integer("attention", "global_tokens", global_tokens) < 0:
        raise ValueError(f"attention: global_tokens must be at least 0, got {global_tokens}")
    if window is None:
        return -1, -1
    if isinstance(window, tuple):
        if len(window) != 2:
            raise ValueError(f"attention: window must be (left, right), got {window!r}")
        left, right = (checks.integer("attention", "window", side) for side in window)
        return left, right
    size = checks.integer("attention", "window", window)
    if size < 1:
        raise ValueError(f"attention: window must be at least 1 token, got {window}")
    return size - 1, size - 1


def _ranges_fit(q: Tensor, ranges: Tensor) -> None:
    fits = ranges.ndim == 3 and ranges.shape[0] in (1, q.shape[0])
    fits = fits and ranges.shape[1] == q.shape[2]
    # a compiled graph has symbols here, of which no range can be asked
    fits = fits and ranges.shape[2] % 2 == 0 and 2 <= ranges.shape[2] <= 2 * MOST_RANGES
    if ranges.dtype != torch.int32 or not fits or ranges.device != q.device:
        checks.refuse(
            "attention",
            f"ranges must be int32 of shape ({q.shape[0]} or 1, {q.shape[2]}, 2 n) on {q.device}, "
            f"n from 1 to {MOST_RANGES}",
            ranges,
        )


def _case(
    shape: tuple[int, int, int, int],
    groups: int = 0,
    keys: int = 0,
    value: int = 0,
    layout: str = "contiguous",
    **extra: T,
) -> dict[str, T]:
    """Queries of a shape; keys perhaps of fewer heads or another length, values of another size."""
    batch, heads, length, size = shape
    key_rows = (batch, groups or heads, keys or length)
    return {
        "q": T(shape, layout=layout),
        "k": T((*key_rows, size), layout=layout),
        "v": T((*key_rows, value or size), layout=layout),
        **extra,
    }


def _ids(batch: int, length: int, ignored: float = 0.0) -> T:
    return T((batch, length), classes=3, ignored=ignored, ignore_index=-1)


CAUSAL: dict[str, Any] = {"causal": True}
LONG = (2, 32, 8192, 128)
SAMPLES = (
    Sample("full", _case((2, 1, 19, 8))),
    Sample("tiny-causal", _case((1, 2, 5, 4)), CAUSAL),
    Sample("tiny-window", _case((1, 2, 7, 3), 1), {"causal": True, "window": 3}),
    Sample("tiny-softcap", _case((1, 2, 5, 4), value=3), {"softcap": 1.5}),
    Sample("tiny-sinks", _case((1, 4, 5, 3), 2, sinks=T((4,), dtype=None)), CAUSAL),
    Sample("tiny-global", _case((1, 1, 9, 3)), {"window": (1, 1), "global_tokens": 2}),
    Sample("tiny-documents", _case((1, 2, 8, 3), documents=_ids(1, 8))),
    Sample("groups", _case((1, 4, 21, 16), 2), CAUSAL),
    Sample("wider-values", _case((1, 1, 17, 8), value=40), {"scale": 0.2}),
    Sample("left-alone", _case((1, 1, 29, 8)), {"window": (5, -1)}),
    Sample(
        "global-causal", _case((1, 1, 70, 8)), {"window": 4, "global_tokens": 3, "causal": True}
    ),
    Sample(
        "documents-everything",
        _case((2, 2, 37, 8), 1, documents=_ids(2, 37, 0.2), sinks=T((2,))),
        {"window": 3, "global_tokens": 1, "softcap": 2.0},
        path="documents",
    ),
    Sample("all-padding", _case((1, 2, 6, 4), documents=_ids(1, 6, 1.0))),
    Sample("fp32-sinks", _case((1, 2, 9, 8), sinks=T((2,), dtype=torch.float32))),
    Sample("later-queries", _case((2, 1, 5, 8), keys=21), CAUSAL),
    Sample(
        "later-documents",
        _case((2, 1, 4, 8), keys=19, documents=_ids(2, 19, 0.1)),
        {"causal": True, "window": 6},
    ),
    Sample("one-query", _case((2, 2, 1, 8), 1, keys=30), CAUSAL),
    Sample("one-query-full", _case((2, 2, 1, 8), 1, keys=30)),
    Sample("fewer-keys", _case((1, 2, 9, 8), keys=4), CAUSAL),
    Sample("one-token", _case((1, 2, 1, 8), sinks=T((2,))), CAUSAL),
    Sample("no-queries", _case((0, 2, 5, 8)), CAUSAL),
    Sample("two-blocks", _case((1, 1, 150, 16)), CAUSAL),
    Sample("swapped", _case((2, 2, 16, 8), layout="swapped"), CAUSAL),
    Sample("sliced", _case((2, 2, 16, 8), layout="sliced"), CAUSAL),
    Sample("expanded", _case((3, 2, 11, 8), layout="expanded"), CAUSAL),
    *each_frozen(_case((1, 2, 12, 8), sinks=T((2,))), "q", CAUSAL),
    Sample("frozen-keys", frozen(_case((1, 2, 12, 8), sinks=T((2,))), "k", "v", "sinks")),
    Sample(
        "three-ranges",
        _case(
            (1, 2, 70, 8),
            1,
            ranges=T((1, 70, 6), classes=71, dtype=torch.int32, layout="sorted", grad=False),
        ),
        path="ranges",
    ),
    Sample("past-65535-rows", _case((1, 1, 65537, 2), keys=3), size="thin"),
    Sample(
        "past-2048-queries",
        _case((1, 1, 2048, 8), documents=_ids(1, 2048)),
        {"window": (256, 256), "global_tokens": 64},
        size="thin",
        path="parts of queries",
    ),
    Sample("causal-2x8192x128", _case(LONG, 8, layout="swapped"), CAUSAL, size="bench"),
    Sample("causal-8x4096x64", _case((8, 32, 4096, 64), 8, layout="swapped"), CAUSAL, size="bench"),
    Sample(
        "window-2x8192x128",
        _case(LONG, 8, layout="swapped"),
        {"causal": True, "window": 1024},
        size="bench",
    ),
    Sample(
        "sinks-2x8192x64",
        _case((2, 64, 8192, 64), 8, layout="swapped", sinks=T((64,))),
        CAUSAL,
        size="bench",
    ),
    Sample(
        "sinks-window-2x8192x64",
        _case((2, 64, 8192, 64), 8, layout="swapped", sinks=T((64,))),
        {"causal": True, "window": 128},
        size="bench",
    ),
    Sample(
        "softcap-2x8192x128",
        _case(LONG, 8, layout="swapped"),
        {"causal": True, "softcap": 50.0},
        size="bench",
    ),
    Sample(
        "global-2x8192x64",
        _case((2, 12, 8192, 64), layout="swapped"),
        {"window": (256, 256), "global_tokens": 64},
        size="bench",
    ),
)
_PATHS = T((1, 8192, 6), classes=8192, dtype=torch.int32)  # ranges of a tree
COMPILE_SAMPLES = (
    Sample("paths-8192x128", _case((1, 8, 8192, 128), layout="swapped", ranges=_PATHS)),
    *(
        Sample(
            f"everything-2x8192x{size}",
            _case((2, 8, 8192, size), layout="swapped", documents=_ids(2, 8192), sinks=T((8,))),
            {"window": (256, 256), "global_tokens": 64, "softcap": 50.0},
        )
        for size in (64, 128)
    ),
)
