"""``attn_implementation="liger_multi"``: the attention operator in transformers' interfaces.

transformers calls two functions that are registered under one name: :func:`mask`, once per forward
pass and type of layer, and :func:`forward`, once per layer. :func:`mask` takes a mask function of
transformers and returns a :class:`KeyMask`. :func:`forward` takes queries, keys, values and that
mask, and returns the output of ``ops.attention``.

A :class:`KeyMask` holds ranges of keys: two numbers per query instead of a row of booleans.
transformers evaluates its mask function for a block of queries at a time, and each row is reduced
to its first and last key. A row with one gap becomes two ranges; other masks stay dense. So
windows, chunks, packed sequences, padding and caches need no code of their own.

Three checks ensure that a model computes its eager attention:

* The class of a model that selects the name must call transformers' attention interface
  (:mod:`liger_multi.patching.attention.support`).
* A :class:`KeyMask` raises when other code reads it. transformers passes masks to models with
  attention code of their own too, which would add them to their scores.
* :func:`forward` refuses masks and keyword arguments that it does not know.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Container, Iterator
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_multi import checks
from liger_multi._torch_private import assert_async, constant_in_graphs
from liger_multi.dispatch.resolve import by_rows
from liger_multi.errors import ConfigurationError, PackingError
from liger_multi.ops.attention import attention
from liger_multi.patching import shards
from liger_multi.patching.attention import support as attention_support
from liger_multi.patching.packing.tree import Tree, causal_ranges, run, running

# --- tiles of keys at fixed tokens, for ``deterministic="rows"`` ---

# A kernel sums over keys tile by tile, and tiles start at multiples of their size. With left
# padding, or in the cache of a sliding window, a token is in another column than in the whole
# sequence. It then falls into another tile, which changes the order of the sum. Hidden columns in
# front of the keys shift it back to its own tile.

TILE = 128
"""A multiple of every kernel's tile of keys."""


def key_shifts(attention_mask: Tensor | None, offset: int) -> tuple[int, ...]:
    """Hidden columns to add in front of the keys, per element of the batch or for all; () for none.

    Waits for the device if there is a mask.

    Args:
        attention_mask: ``(B, T)``, true at tokens; None if all columns are tokens.
        offset: Column of the first key in that mask, or in the sequence.
    """
    first = [0] if attention_mask is None else attention_mask.bool().int().argmax(-1).tolist()
    columns = tuple((offset - token) % TILE for token in first)
    return columns if any(columns) else ()


def shifted(x: Tensor, columns: tuple[int, ...]) -> Tensor:
    """Keys or values ``(B, H, S, D)`` after these columns of zeros, all padded to one length."""
    if len(set(columns)) == 1:
        return F.pad(x, (0, 0, columns[0], 0))
    longest = max(columns)
    pads = [(0, 0, zeros, longest - zeros) for zeros in columns]
    return torch.stack([F.pad(row, pad) for row, pad in zip(x, pads, strict=True)])


def shifted_ranges(
    ranges: Tensor | None,
    causal: bool,
    columns: tuple[int, ...],
    sizes: tuple[int, int],
    device: torch.device,
) -> Tensor:
    """The ranges ``(B or 1, L, 2 n)`` of queries, moved by the same columns.

    Args:
        ranges: Ranges before the shift; None for a causal mask or no mask.
        causal: Whether the mask is causal; the queries are then the last keys.
        columns: Result of :func:`key_shifts`.
        sizes: Numbers of queries and keys.
        device: Of the result.
    """
    queries, keys = sizes
    if ranges is None:
        last = torch.arange(keys - queries + 1, keys + 1, dtype=torch.int32, device=device)
        last = last if causal else torch.full_like(last, keys)
        ranges = torch.stack([torch.zeros_like(last), last], -1)[None]
    zeros = torch.tensor(columns, dtype=torch.int32, device=device)
    return ranges.to(device) + zeros[:, None, None]


# --- masks ---

NAME = "liger_multi"
ELEMENTS = 2**26  # of the part of a dense mask that is materialized at a time
LONG = 8192  # tokens; ranges of longer sequences are computed by bisection


class MaskReadError(ConfigurationError, AttributeError, TypeError):
    """Code other than our attention read a :class:`KeyMask`."""


class KeyMask:
    """The keys that each query attends to. It has a shape and moves to devices; other uses raise.

    Attributes:
        causal: If there are no tensors: whether queries, which are the last keys, attend to no
            later key. Otherwise every query attends to every key.
        ranges: ``(B or 1, L, 2 n)`` int32, as ``ops.attention`` takes them.
        dense: ``(B, 1, L, S)`` bool, for masks that are not made of ranges.
        shape: ``(B, 1, L, S)``, the shape of the dense mask.
        shifts: Result of :func:`key_shifts`, under ``deterministic="rows"``.
    """

    ndim = 4

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        *,
        causal: bool = False,
        ranges: Tensor | None = None,
        dense: Tensor | None = None,
        shifts: tuple[int, ...] = (),
    ) -> None:
        self.shape, self.causal, self.ranges, self.dense = shape, causal, ranges, dense
        self.shifts = shifts
        self._shifted: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether there are no tensors: the mask is causal or full."""
        return self.ranges is None and self.dense is None

    def to(self, *args: Any, **kwargs: Any) -> KeyMask:
        """The mask on another device, for models on several devices."""
        ranges, dense = (
            None if x is None else x.to(*args, **kwargs) for x in (self.ranges, self.dense)
        )
        return KeyMask(
            self.shape, causal=self.causal, ranges=ranges, dense=dense, shifts=self.shifts
        )

    def shifted_ranges(self, device: torch.device) -> Tensor:
        """The ranges of queries after :attr:`shifts`, computed once for all layers."""
        if self._shifted is None:
            sizes = self.shape[2:]
            self._shifted = shifted_ranges(self.ranges, self.causal, self.shifts, sizes, device)
        return self._shifted

    def contiguous(self) -> KeyMask:
        """The mask itself: generation calls this on the mask of every step."""
        return self

    def __repr__(self) -> str:
        form = "ranges" if self.ranges is not None else "dense" if self.dense is not None else ""
        return f"KeyMask({tuple(self.shape)}, {form or ('causal' if self.causal else 'all keys')})"

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise MaskReadError(_misread(getattr(function, "__name__", str(function))))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MaskReadError(_misread(f".{name}"))


def _raising(name: str) -> Callable[..., NoReturn]:
    def operation(self: KeyMask, *others: Any) -> NoReturn:
        raise MaskReadError(_misread(name))

    return operation


_BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("and", "or", "xor", "lshift", "rshift"),
)
_OTHERS = (
    *("eq", "ne", "lt", "le", "gt", "ge", "neg", "invert", "abs", "bool", "int", "float", "index"),
    *("len", "iter", "getitem", "setitem", "contains"),
)
for _name in (*(f"{side}{name}" for name in _BINARY for side in ("", "r", "i")), *_OTHERS):
    setattr(KeyMask, f"__{_name}__", _raising(f"__{_name}__"))
KeyMask.__hash__ = object.__hash__  # type: ignore[method-assign]


def _misread(operation: str) -> str:
    module, model = _reader()
    return (
        f"attn_implementation={NAME!r} cannot serve {model}: {module} reads the attention mask "
        f"itself ({operation}) where it must only hand it to transformers' AttentionInterface; "
        "use 'sdpa' where the model supports it, or 'eager'"
    )


def _reader() -> tuple[str, str]:
    """Names of the innermost module and the outermost model on the call stack."""
    if torch.compiler.is_compiling():
        return "one of its modules", "this model"
    from transformers import PreTrainedModel

    frame, module, model = sys._getframe(1), "", ""
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            module = module or type(owner).__name__
            model = type(owner).__name__ if isinstance(owner, PreTrainedModel) else model
        frame = frame.f_back  # type: ignore[assignment]
    return module or "code outside of modules", model or "this model"


_samples: ContextVar[tuple[Callable[[], Tensor | None], Container[str]] | None] = ContextVar(
    "samples", default=None
)


@contextlib.contextmanager
def samples_of_call(
    ids: Callable[[], Tensor | None], other_types: Container[str] = ()
) -> Iterator[None]:
    """Let masks within a block separate the samples of packed rows.

    transformers detects samples from positions, which some models (gpt_oss) do not pass to masks.

    Args:
        ids: Returns ids of samples ``(B or 1, T)``, or None for one sample per row; called once.
        other_types: Types of models with other tokens, such as image patches.
    """
    token = _samples.set((functools.cache(ids), other_types))
    try:
        yield
    finally:
        _samples.reset(token)


class _Graph:
    """Ids of samples ``(B or 1, T)`` of a traced call; compilers do not trace a ContextVar."""

    ids: Tensor | None = None


_graph = _Graph()


def samples_in_graph(ids: Tensor | None, call: Callable[[], Any]) -> Any:
    """``call()`` with masks as in :func:`samples_of_call`, while a compiler traces it."""
    outer_ids = _graph.ids
    _graph.ids = ids
    try:
        return call()
    finally:
        _graph.ids = outer_ids


def _kept_apart(mask_function: Any, batch: int, tokens: int, config: Any) -> Any:
    """A mask function limited to samples of a row; the same function if there is one sample."""
    from transformers.masking_utils import and_masks, packed_sequence_mask_function

    if torch.compiler.is_compiling():
        of_tokens = _graph.ids
    else:
        ids, other_types = _samples.get() or (None, ())
        if ids is None or getattr(config, "model_type", None) in other_types:
            return mask_function
        if _has_part(mask_function, packed_sequence_mask_function.__name__):
            return mask_function
        of_tokens = ids()
    if of_tokens is None or of_tokens.shape[1] != tokens:
        return mask_function
    return and_masks(mask_function, packed_sequence_mask_function(of_tokens.expand(batch, -1)))


def mask(
    batch_size: int,
    kv_length: int,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | KeyMask | None = None,
    cache_position: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> KeyMask:
    """The mask function of transformers' interface, which returns a :class:`KeyMask`."""
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        sdpa_mask,
    )

    if isinstance(attention_mask, KeyMask):  # built before the forward pass, as in generation
        return attention_mask
    row = shards.row()
    queries_of_call = q_length if cache_position is None else len(cache_position)
    if row is not None and queries_of_call == kv_length == row.share:
        if cache_position is not None:  # the form of transformers 5.0
            options["cache_position"] = torch.arange(row.tokens, device=cache_position.device)
        return _of_whole(row, batch_size, mask_function, allow_is_causal_skip, options)
    tree = running(kv_length, batch_size)
    if tree is not None and tree.is_path and not tree.padding:
        attention_mask = None  # an ordinary row
    elif tree is not None:
        device = options.get("device") or getattr(attention_mask, "device", None)
        return _of_tree(tree, mask_function, cache_position is None, device, options)
    if cache_position is not None:  # positions of queries are known on the device only
        q_length, q_offset = len(cache_position), cache_position[0]
    assert q_length is not None
    queries = q_length
    shape = (batch_size, 1, queries, kv_length)
    if (
        not torch.compiler.is_compiling()
        and attention_mask is not None
        and attention_mask.shape[-1] >= kv_length
    ):
        attention_mask = None if bool(attention_mask.all()) else attention_mask
    if attention_mask is None and queries == kv_length:
        mask_function = _kept_apart(mask_function, batch_size, queries, options.get("config"))
    last = isinstance(q_offset, int) and q_offset + queries == kv_length + kv_offset
    padding = None if torch.compiler.is_compiling() else attention_mask
    shifts = key_shifts(padding, kv_offset) if by_rows() else ()
    if attention_mask is None and (last or queries == kv_length):
        if mask_function is causal_mask_function and allow_is_causal_skip:
            return KeyMask(shape, causal=True, shifts=shifts)
        if mask_function is bidirectional_mask_function and allow_is_bidirectional_skip:
            return KeyMask(shape, shifts=shifts)

    device = options.get("device")
    is_long_row = (
        queries == kv_length >= LONG and isinstance(q_offset, int) and q_offset == kv_offset
    )
    if (
        is_long_row
        and attention_mask is None
        and device is not None
        and _is_interval(mask_function)
    ):
        ranges = _bisected(mask_function, batch_size, queries, device)
        return KeyMask(shape, ranges=ranges, shifts=shifts)

    def dense() -> Iterator[Tensor]:
        step = max(1, ELEMENTS // max(1, batch_size * kv_length))
        for start in range(0, queries, step):
            count = min(step, queries - start)
            query_range: dict[str, Any] = {"q_length": count, "q_offset": q_offset + start}
            if cache_position is not None:
                query_range = {"cache_position": cache_position[start : start + count]}
            dense_mask = sdpa_mask(
                batch_size=batch_size,
                kv_length=kv_length,
                kv_offset=kv_offset,
                **query_range,
                mask_function=mask_function,
                attention_mask=attention_mask,
                **options,
                allow_is_causal_skip=False,
                allow_is_bidirectional_skip=False,
            )
            yield dense_mask.expand(batch_size, -1, count, kv_length)

    return _compressed(shape, dense, shifts)


BIDIRECTIONAL = ("bidirectional_mask_function", "sliding_window_bidirectional_overlay")
INTERVALS = (
    *("causal_mask_function", "and_masks", "sliding_window_overlay", "chunked_overlay"),
    *BIDIRECTIONAL,
    *("packed_sequence_mask_function", "remap_positions_for_packed_sequence"),
)
"""Mask functions of transformers whose rows are an interval of keys around the query itself."""


def _is_interval(function: Any) -> bool:
    """Whether a mask function is composed of those in ``INTERVALS`` alone."""
    module_name = getattr(function, "__module__", "")
    interval = module_name == "transformers.masking_utils" and _outer_name(function) in INTERVALS
    return (interval or module_name == shards.__name__) and all(
        map(_is_interval, _functions_in(function))
    )


def _outer_name(function: Any) -> str:
    """The name of the function that returned a mask function."""
    return str(getattr(function, "__qualname__", "")).partition(".")[0]


def _functions_in(function: Any) -> list[Any]:
    """The mask functions that a mask function is composed of."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    parts = [part for v in cells for part in (v if isinstance(v, tuple) else (v,))]
    return [part for part in parts if inspect.isfunction(part)]


def _has_part(function: Any, name: str) -> bool:
    """Whether a mask function is composed of one with this name, at any depth."""
    return _outer_name(function) == name or any(_has_part(f, name) for f in _functions_in(function))


def _bisected(function: Any, batch: int, tokens: int, device: Any) -> Tensor:
    """Ranges ``(B, T, 2)`` of a mask function of intervals, by bisection of all rows at once."""
    token = torch.arange(tokens, device=device)

    def edge(row: int, outer_bound: int) -> Tensor:
        inner, outer = token, torch.full_like(token, outer_bound)
        for _ in range(tokens.bit_length()):
            middle = (inner + outer) // 2
            between = (middle - inner) * (middle - outer) < 0
            visible = function(row, 0, token, middle.clamp(0, tokens - 1)) & between
            inner = torch.where(visible, middle, inner)
            outer = torch.where(between & ~visible, middle, outer)
        return inner

    rows = [torch.stack([edge(row, -1), edge(row, tokens) + 1], -1) for row in range(batch)]
    return torch.stack(rows).to(torch.int32)


def _of_whole(
    row: shards.Row, batch_size: int, mask_function: Any, skip: bool, options: dict[str, Any]
) -> KeyMask:
    """The mask of a whole row, when the model holds one rank's share of its tokens."""
    padding_mask = row.mask
    hidden = padding_mask is None and row.ids is None and row.padding > 0
    if hidden and any(_has_part(mask_function, name) for name in BIDIRECTIONAL):
        is_token = torch.arange(row.tokens, device=options.get("device")) < row.length
        padding_mask = is_token.expand(batch_size, -1)
    with shards.suspended(), run(row.tree):
        return mask(
            batch_size,
            row.tokens,
            row.tokens,
            mask_function=row.visible(mask_function),
            attention_mask=padding_mask,
            allow_is_causal_skip=skip,
            **options,
        )


def _of_tree(
    tree: Tree, mask_function: Any, by_length: bool, device: Any, options: dict[str, Any]
) -> KeyMask:
    """The mask of a row of trees: the mask of a sequence, applied to the path of every token."""
    if _reads_tensors(mask_function):
        raise PackingError(
            f"attn_implementation={NAME!r} cannot serve shared prefixes with a mask that is made "
            f"of tokens, got {getattr(mask_function, '__qualname__', mask_function)}; masks by "
            "position alone are served"
        )
    length = tree.longest
    position_options: dict[str, Any] = (
        {} if by_length else {"cache_position": torch.arange(length, device=device)}
    )
    with run(None):
        path = mask(1, length, length, mask_function=mask_function, **position_options, **options)
    shape = (1, 1, tree.tokens, tree.tokens)
    attends_later, causal = (False, path.causal) if path.plain else _visible(path.ranges, length)
    if attends_later or not (causal or path.ranges is not None):
        raise PackingError(
            f"attn_implementation={NAME!r} serves shared prefixes where a token sees no later "
            f"ones, and earlier ones in two ranges of positions at most, got {path}"
        )
    if causal and tree.is_path:  # padding comes last, where no token attends to it
        return KeyMask(shape, causal=True)
    if causal:
        return KeyMask(shape, ranges=causal_ranges(tree, torch.device(device or "cpu")))
    assert path.ranges is not None
    return KeyMask(shape, ranges=tree.ranges(path.ranges[0]))


def _visible(ranges: Tensor | None, length: int) -> tuple[bool, bool]:
    """Whether some token attends to later ones, and whether the ranges are exactly causal."""
    if ranges is None:
        return False, False
    end = torch.arange(1, length + 1, device=ranges.device, dtype=ranges.dtype)
    causal = torch.stack([torch.zeros_like(end), end], -1)
    equals_causal = (ranges == causal).all() if ranges.shape[-1] == 2 else end.new_zeros(())
    attends_later, plain = torch.stack(
        [(ranges > end[:, None]).any(), equals_causal.bool()]
    ).tolist()
    return attends_later, plain


def _reads_tensors(function: Any) -> bool:
    """Whether a mask function indexes tensors by token, which positions on a path cannot do."""
    cells = getattr(function, "__closure__", None) or ()
    values = [cell.cell_contents for cell in cells]
    values += [part for v in values if isinstance(v, tuple) for part in v]
    tensors = [v for v in values if isinstance(v, Tensor) and v.numel() > 1]
    return bool(tensors) or any(_reads_tensors(v) for v in values if callable(v))


def _compressed(
    shape: tuple[int, int, int, int],
    dense: Callable[[], Iterator[Tensor]],
    shifts: tuple[int, ...],
) -> KeyMask:
    """A dense mask, in blocks of rows, as ranges if it has at most two per row."""
    for ranges_of in (one_range, _two_ranges):
        parts = [ranges_of(part) for part in dense()]
        ranges, exact = (torch.cat(chunks, 2) for chunks in zip(*parts, strict=True))
        if torch.compiler.is_compiling():
            assert_async(
                exact.all(), "attention: under a compiler, padding must be at one end of a sequence"
            )
        if torch.compiler.is_compiling() or bool(exact.all()):
            return KeyMask(shape, ranges=ranges[:, 0], shifts=shifts)
    return KeyMask(shape, dense=torch.cat(list(dense()), 2))


def _extent(visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Columns, and per row its first column and one past its last; (0, 0) for empty rows."""
    column = torch.arange(visible.shape[-1], device=visible.device, dtype=torch.int32)
    last = torch.where(visible, column + 1, 0).amax(-1)
    first = torch.where(visible, column, visible.shape[-1]).amin(-1)
    return column, torch.minimum(first, last), last


def one_range(visible: Tensor) -> tuple[Tensor, Tensor]:
    """The range of every row, and whether the row has no gap in it."""
    _, first, last = _extent(visible)
    return torch.stack([first, last], -1), visible.sum(-1) == last - first


def _two_ranges(visible: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last run of keys of every row, and whether the row has no other."""
    column, first, last = _extent(visible)
    hole = torch.where(visible | (column < first[..., None]), visible.shape[-1], column).amin(-1)
    end = torch.minimum(hole, last)
    begin = torch.where(visible | (column >= last[..., None]), 0, column + 1).amax(-1)
    begin = torch.where(end == last, last, begin)
    exact = visible.sum(-1) == (end - first) + (last - begin)
    return torch.stack([first, end, begin, last], -1), exact


# --- attention ---

REFUSED = ("position_bias", "head_mask", "score_mod", "alibi")  # arguments that change scores
HARMLESS = (
    *("use_cache", "return_dict", "position_ids", "cache_position", "labels", "logits_to_keep"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "num_items_in_batch"),
    # the mask contains windows and packed sequences
    *("sliding_window", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
)
logger = logging.getLogger("liger_multi")
_warned: set[str] = set()


def register_attention(name: str = NAME) -> None:
    """Make ``attn_implementation=name`` this library's attention, for models that support it.

    Other models are not affected. A model that selects the name but does not call transformers'
    attention interface raises. A second registration has no effect.

    Raises:
        ConfigurationError: The name is registered for another function.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    for interface, function in ((AttentionInterface, forward), (AttentionMaskInterface, mask)):
        registered = interface._global_mapping.get(name)
        if registered is not None and registered is not function:
            raise ConfigurationError(
                f"register_attention: transformers has another {name!r}, {registered!r}; "
                "register under a name of your own"
            )
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, mask)
    attention_support.watch(name)


def unregister_attention(name: str = NAME) -> None:
    """Remove ``name`` from transformers; models that still select it raise an error with it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for interface, function in ((AttentionInterface, forward), (AttentionMaskInterface, mask)):
        if interface._global_mapping.get(name) is function:
            del interface._global_mapping[name]
    attention_support.unwatch(name)


def forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | KeyMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer, ``(B, L, H, E)``; the mask contains windows and padding.

    Raises:
        ValueError: Dropout, an unknown keyword argument or mask, or a missing mask.
    """
    if dropout:
        raise ValueError(
            f"attn_implementation={NAME!r} has no dropout of probabilities, got {dropout}; set "
            "attention_dropout to 0 in the model's configuration, or use 'eager'"
        )
    for name, argument in options.items():
        if argument is not None and name not in HARMLESS and _changes_scores(type(module), name):
            raise _refusal(module, f"does not support {name}")
    dtype = checks.autocast_dtype(value.device.type) or value.dtype
    q, k, v = (x.to(dtype) for x in (query, key, value))

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        if isinstance(attention_mask, Tensor):
            _dense_fits(module, q, k, attention_mask)
            return _by_rows(q, k, v, attention_mask, scaling, softcap, sinks)
        key_mask = attention_mask
        if key_mask is None:
            key_mask = KeyMask(
                (q.shape[0], 1, q.shape[2], k.shape[2]),
                causal=_causal_without_mask(module, q, k, is_causal, options),
            )
        _mask_fits(module, q, k, key_mask, is_causal, options)
        if key_mask.dense is not None:
            return _by_rows(q, k, v, key_mask.dense, scaling, softcap, sinks)
        causal, ranges = key_mask.causal, key_mask.ranges
        if key_mask.shifts:
            causal, ranges = False, key_mask.shifted_ranges(k.device)
            k, v = (shifted(x, key_mask.shifts) for x in (k, v))
        return attention(
            q, k, v, causal=causal, sinks=sinks, softcap=softcap, scale=scaling, ranges=ranges
        )

    return shards.spread("attention", attend, (q, k, v), {"sinks": s_aux}).transpose(1, 2), None


@constant_in_graphs
def _changes_scores(layer: type, name: str) -> bool:
    """Whether a keyword argument may change scores: the eager attention of the file uses it.

    Models pass on unknown arguments, such as the token types of a tokenizer, which eager attention
    ignores. Without an eager attention to compare with, any argument may matter.
    """
    return _known_changes(layer, name)


@functools.lru_cache(maxsize=1024)
def _known_changes(layer: type, name: str) -> bool:
    eager = attention_support.eager_functions(layer)
    return (
        name in REFUSED
        or not eager
        or any(name in attention_support.names_read(function) for function in eager)
    )


def _refusal(module: torch.nn.Module, reason: str) -> ValueError:
    return ValueError(
        f"attn_implementation={NAME!r} {reason}, asked by {type(module).__name__}; use 'eager'"
    )


def _causal_without_mask(
    module: torch.nn.Module, q: Tensor, k: Tensor, is_causal: bool | None, options: dict[str, Any]
) -> bool:
    """Whether a layer without a mask is causal: by ``is_causal`` as SDPA, but never by default."""
    queries, keys = q.shape[2], k.shape[2]
    window = options.get("sliding_window")
    if window is not None and keys > window and is_causal is not False:
        raise _refusal(module, f"needs a mask for a window of {window} in {keys} keys, got None")
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if queries == 1 or causal is False:
        return False
    if causal is None:
        raise _refusal(module, "needs a mask, or is_causal as argument or attribute, got neither")
    if queries != keys:
        raise _refusal(module, f"needs a mask for {queries} queries of {keys} keys, got None")
    return True


def _mask_fits(
    module: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    key_mask: KeyMask,
    is_causal: bool | None,
    options: dict[str, Any],
) -> None:
    batch, _, queries, keys = key_mask.shape
    if (queries, keys) != (q.shape[2], k.shape[2]) or batch not in (1, q.shape[0]):
        raise _refusal(
            module,
            f"got {key_mask} for {q.shape[2]} queries and {k.shape[2]} keys, batch {q.shape[0]}",
        )
    if key_mask.plain and is_causal is not None and queries > 1 and is_causal != key_mask.causal:
        raise _refusal(module, f"got is_causal={is_causal}, which contradicts its mask, {key_mask}")
    lengths = options.get("cu_seq_lens_q")
    if key_mask.plain and lengths is not None and len(lengths) > 2:
        raise _refusal(
            module,
            f"got cu_seq_lens_q of {len(lengths) - 1} sequences with {key_mask}, in which they are "
            "one; pass position_ids, and neither attention_mask nor past_key_values",
        )


def _dense_fits(module: torch.nn.Module, q: Tensor, k: Tensor, mask: Tensor) -> None:
    """Refuse dense masks of another dtype or shape."""
    required = (*q.shape[:3], k.shape[2])
    dtype_fits = mask.dtype == torch.bool or mask.is_floating_point()
    if (
        not dtype_fits
        or mask.ndim != 4
        or any(size not in (1, want) for size, want in zip(mask.shape, required, strict=True))
    ):
        raise _refusal(
            module,
            f"needs a mask of bool or floating dtype that broadcasts to {tuple(required)}, got "
            f"{checks.describe(mask)}",
        )


def _by_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention in PyTorch for any dense mask; it materializes L x S scores."""
    if "dense" not in _warned:
        _warned.add("dense")
        logger.warning(
            "attention: this mask is not made of one or two ranges of keys a query; it stays dense "
            "(%s), and scores of that size exist",
            tuple(mask.shape),
        )
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = (q @ k.mT).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        s = torch.tanh(s / softcap) * softcap
    s = s.masked_fill(~mask, torch.finfo(s.dtype).min) if mask.dtype == torch.bool else s + mask
    if sinks is not None:
        s = torch.cat([s, sinks.to(s)[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    p = torch.softmax(s, -1)[..., : k.shape[2]].to(v.dtype)
    return (p @ v).transpose(1, 2).contiguous().transpose(1, 2)
