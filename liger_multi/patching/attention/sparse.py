"""Sparse attention with an indexer (DSA): attention over lists of keys in place of dense masks.

transformers computes the scores of all keys for every head of the indexer, and makes a dense mask
of the selected ones. Two behaviors take their place; both let the module's own forward run.

:class:`SparseAttention` hands the forward a mask of ranges (:class:`RangeMask`), keeps keys as the
latents that they are made of, and names an attention function of ours. :class:`SparseIndexer` hands
the forward keys whose products are not computed (:class:`IndexKeys`): the forward goes on to write
down which scores it wants, and the operator selects from them. Any other operation on these
objects raises; :mod:`liger_multi.patching.attention.find` tries each class before it is
patched.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from liger_multi import checks
from liger_multi.arguments import by_name, cache_parameter, caches
from liger_multi.errors import ConfigurationError
from liger_multi.patching import shards
from liger_multi.patching.attention import interface as attention
from liger_multi.patching.options import Options, run_bound
from liger_multi.patching.swap import Patched, Swap

OPS = ("sparse_attention", "indexer_topk")
NAME = "liger_multi_sparse"
"""The attention implementation that modules of :class:`SparseAttention` name while they run."""
ABSORBED_BYTES = 2**31
"""Absorbed queries with their outputs that are kept; of a longer sequence, those of some queries
exist at a time, and are made again in backward."""
SERVED = ("sdpa", attention.NAME)
"""Attention implementations of a model whose sparse layers are served; eager returns weights."""
_serving: ContextVar[nn.Module | None] = ContextVar("liger_multi_sparse", default=None)


def settings_of(module_class: Any) -> Options:
    """The options of a class of ours, whether ours is its behavior or stands around another one."""
    swap: Swap = module_class._liger_multi_swap
    return cast(Options, swap.settings if swap.around is None else swap.around_settings)


# --- masks ---


class RangeMask:
    """The mask of a layer: a range of keys for each query, ``(B or 1, L, 2)`` int32.

    A forward may take the mask of a head, ask for its dtype, and negate it.
    """

    dtype = torch.bool

    def __init__(self, ranges: Tensor) -> None:
        self.ranges = ranges

    def __getitem__(self, at: Any) -> RangeMask:
        whole = slice(None)
        if at in ((whole, 0), (whole, 0, whole, whole)):
            return self
        raise _unknown(f"mask[{at}]")

    def __invert__(self) -> RangeMask:
        return self


def _unknown(what: str) -> ConfigurationError:
    return ConfigurationError(f"sparse_attention: the module's forward does something else: {what}")


class _LastMask(NamedTuple):
    """A mask of the last forward pass, and what was made of it; all layers get the same one."""

    mask: weakref.ref[Tensor]
    version: int
    ranges: RangeMask | None


_last: ContextVar[_LastMask | None] = ContextVar("liger_multi_sparse_mask", default=None)


def range_mask(mask: object, queries: int) -> RangeMask | None:
    """The ranges of a mask; None where it has none."""
    if isinstance(mask, attention.KeyMask):
        if mask.ranges is None or mask.ranges.shape[2] > 2:
            return None
        over = shards.ranks()
        return RangeMask(mask.ranges if over is None else over.share(mask.ranges, 1))
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != 4:
        return None
    if mask.shape[1] != 1 or mask.shape[2] != queries:
        return None
    last = _last.get()
    if last is not None and last.mask() is mask and last.version == mask._version:
        return last.ranges
    ranges, exact = attention.one_range(mask[:, 0])
    range_rows = RangeMask(ranges.to(torch.int32)) if bool(exact.all()) else None
    _last.set(_LastMask(weakref.ref(mask), mask._version, range_rows))
    return range_rows


# --- the indexer ---


class _Recorder:
    """Something whose operations are written down; others than the named ones raise."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", str(function))
        owner = next(a for a in args if isinstance(a, _Recorder))
        return owner.operation(name, args, kwargs or {})

    def operation(self, name: str, args: Any, kwargs: Any) -> Any:
        """What a function of PyTorch makes of it."""
        raise _unknown(name)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _unknown(f".{name}")


class IndexCache:
    """In place of a layer's cache: the keys that it gives back are :class:`IndexKeys`."""

    def __init__(self, cache: Any, select: Callable[..., Tensor]) -> None:
        self.cache, self.select = cache, select

    def update_indexer(self, keys: Tensor, *args: Any, **kwargs: Any) -> IndexKeys:
        """All keys, after the cache has taken the new ones."""
        all_keys = keys if self.cache is None else self.cache.update_indexer(keys, *args, **kwargs)
        return IndexKeys(shards.keys_of_row(all_keys, 1), self.select)


class IndexKeys(_Recorder):
    """Keys ``(B, S, D)`` of an indexer, to be multiplied as ``(B, 1, D, S)`` in fp32."""

    def __init__(self, keys: Tensor, select: Callable[..., Tensor], done: str = "") -> None:
        self.keys, self.select, self.done = keys, select, done

    def _next(self, step: str) -> IndexKeys:
        return IndexKeys(self.keys, self.select, f"{self.done} {step}".strip())

    def transpose(self, a: int, b: int) -> IndexKeys:
        """Keys on the last axis."""
        return self._next(f"transpose{min(a, b)}{max(a, b)}")

    def float(self) -> IndexKeys:
        """In fp32."""
        return self._next("float")

    def unsqueeze(self, axis: int) -> IndexKeys:
        """With an axis of heads."""
        return self._next(f"unsqueeze{axis}")

    def operation(self, name: str, args: Any, kwargs: Any) -> Any:
        """The product of queries with them."""
        if name != "matmul" or self.done != "transpose-2-1 float unsqueeze1" or kwargs:
            raise _unknown(f"{name} of keys after {self.done or 'nothing'}")
        return HeadScores(args[0], self, 1.0, False)


class HeadScores(_Recorder):
    """Products ``(B, L, H, S)`` of queries and keys, times a factor, or their positive part."""

    def __init__(self, queries: Tensor, keys: IndexKeys, scale: float, positive: bool) -> None:
        self.queries, self.of, self.scale, self.positive = queries, keys, scale, positive

    def __mul__(self, factor: Any) -> HeadScores:
        if not isinstance(factor, (int, float)) or factor <= 0:
            raise _unknown(f"scores * {checks.describe(factor)}")
        return HeadScores(self.queries, self.of, self.scale * factor, self.positive)

    __rmul__ = __mul__

    def operation(self, name: str, args: Any, kwargs: Any) -> Any:
        """The positive part of it, or the weighted sum over heads."""
        if name == "relu" and not self.positive:
            return HeadScores(self.queries, self.of, self.scale, True)
        if name == "matmul" and self.positive and args[0].shape[-2] == 1:
            return KeyScores(self, args[0].squeeze(-2), False, None)
        raise _unknown(f"{name} of scores")


class KeyScores(_Recorder):
    """Scores ``(B, L, S)`` of keys, of which some are seen."""

    def __init__(
        self, heads: HeadScores, weights: Tensor, squeezed: bool, mask: RangeMask | None
    ) -> None:
        self.heads, self.weights, self.squeezed, self.mask = heads, weights, squeezed, mask

    @property
    def shape(self) -> torch.Size:
        """As of the sums over heads."""
        return torch.Size((*self.weights.shape[:2], self.heads.of.keys.shape[1]))

    def squeeze(self, axis: int) -> KeyScores:
        """Without the axis of a single row."""
        if axis != -2 or self.squeezed:
            raise _unknown(f"squeeze({axis})")
        return KeyScores(self.heads, self.weights, True, self.mask)

    def masked_fill(self, hidden: Any, value: float) -> KeyScores:
        """With a mask."""
        if not isinstance(hidden, RangeMask) or value != -torch.inf or not self.squeezed:
            raise _unknown(f"masked_fill({checks.describe(hidden)}, {value})")
        return KeyScores(self.heads, self.weights, True, hidden)

    def topk(self, count: int, dim: int = -1) -> SimpleNamespace:
        """The selection: indices alone."""
        if dim != -1 or self.mask is None:
            raise _unknown(f"topk({count}, {dim}) without a mask")
        of = self.heads.of
        queries = self.heads.queries.to(of.keys.dtype)  # from where float() took them
        indices = of.select(
            queries, of.keys, self.weights, self.mask.ranges, count, self.heads.scale
        )
        return SimpleNamespace(indices=indices)


class SparseIndexer(Patched):
    """An indexer that selects keys by the operator, where its mask is of ranges."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward, with keys whose products it only names."""
        module_class = type(self)
        if not issubclass(module_class, SparseIndexer):
            return module_class.forward(self, *args, **kwargs)
        inner = module_class._liger_multi_inner.forward
        if not any(isinstance(a, RangeMask) for a in (*args, *kwargs.values())):
            return inner(self, *args, **kwargs)
        stock = module_class._liger_multi_swap.stock.forward
        arguments, name = by_name(stock, args, kwargs), cache_parameter(stock)
        if name is None:
            raise _unknown("no argument of its forward takes a cache")
        index_caches = caches(arguments)  # under another name too, which the forward may still take
        cache = next(iter(index_caches.values()), None)
        arguments = {n: value for n, value in arguments.items() if n not in index_caches}
        arguments[name] = IndexCache(cache, functools.partial(_select, settings_of(module_class)))
        return inner(self, **arguments)


def _select(
    options: Options, q: Tensor, k: Tensor, w: Tensor, ranges: Tensor, count: int, scale: float
) -> Tensor:
    from liger_multi import ops

    def run(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        return ops.indexer_topk(q, k, w, count, ranges=ranges, scale=scale).indices

    return cast(Tensor, run_bound(options, ("indexer_topk",), run, q, k, w))


# --- the attention module ---


class _Config:
    """A configuration that names our attention function."""

    _attn_implementation = NAME

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class SparseAttention(Patched):
    """Multi-head latent attention over keys that its indexer lists, or that of a layer before."""

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """The latents themselves, as keys and values of one head.

        Expanded where the matrix is not plain: adapters and quantized weights run as they do alone.
        """
        if _serving.get() is not self or not _plain(self.kv_b_proj):
            return cast("tuple[Tensor, Tensor]", super().expand_kv(kv_nope, k_rot))  # type: ignore[misc]
        latents = torch.cat([kv_nope, k_rot.to(kv_nope.dtype)], -1)
        return latents, latents

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward, alone in compiled graphs and for calls that are not served."""
        module_class = type(self)
        if not issubclass(module_class, SparseAttention):
            return module_class.forward(self, *args, **kwargs)
        inner = module_class._liger_multi_inner.forward
        arguments = (
            None if torch.compiler.is_compiling() else _served(self, module_class, args, kwargs)
        )
        if arguments is None:
            return inner(self, *args, **kwargs)
        served = _naming_ours(self)
        token = _serving.set(served)
        try:
            return inner(served, **arguments)
        finally:
            _serving.reset(token)


def _naming_ours(module: Any) -> Any:
    """A module of one call, whose parts and values are the module's and whose attention is ours.

    Other threads, and graphs that are compiled, meet the module with its own configuration.
    """
    copied = object.__new__(type(module))
    vars(copied).update(vars(module), config=_Config(module.config))
    return copied


def _served(
    module: Any, module_class: type[Any], args: Any, kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """The arguments of a call that is served, with a mask of ranges; None for others."""
    arguments = by_name(module_class._liger_multi_swap.stock.forward, args, kwargs)
    hidden, indexer = arguments.get("hidden_states"), module.indexer
    if not isinstance(hidden, Tensor) or type(hidden).__name__ == "DTensor":
        return None
    by_us = indexer is None or isinstance(indexer, SparseIndexer)
    if not by_us or module.config._attn_implementation not in SERVED:
        return None
    if module.training and module.attention_dropout:
        return None
    mask = range_mask(arguments.get("attention_mask"), hidden.shape[1])
    return None if mask is None else {**arguments, "attention_mask": mask}


def _plain(layer: Any) -> bool:
    """Whether a layer is a matrix and nothing else: it is multiplied with queries and outputs."""
    return (
        type(layer) is nn.Linear
        and layer.bias is None
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        and type(layer.weight.data).__name__ != "DTensor"
    )


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: RangeMask,
    scaling: float,
    indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function; for latents, queries and outputs go through the expanding matrix.

    Raises:
        ConfigurationError: A module that is not served called it.
    """
    served: Any = _serving.get()
    if served is not module or indices is None:
        raise ConfigurationError(
            f"attention implementation {NAME!r} serves sparse layers of patched models alone, got "
            f"{type(module).__name__}"
        )
    run = functools.partial(run_bound, settings_of(type(module)), ("sparse_attention",), _run)
    latent, key = value is key, shards.keys_of_row(key, 2)
    value = key if latent else shards.keys_of_row(value, 2)
    if not latent:
        dtype = checks.autocast_dtype(value.device.type) or value.dtype
        q, k, v = (x.to(dtype) for x in (query, key, value))
        return run(q, k, v, indices, None, scaling).transpose(1, 2), None
    rank = module.kv_lora_rank
    matrix = module.kv_b_proj.weight.view(query.shape[1], -1, rank)
    absorbed = _Absorbed(run, module.qk_nope_head_dim, rank, scaling)
    each = (query.shape[3] - absorbed.nope + 2 * rank) * query[:, :, :1, 0].numel()
    step = max(1, ABSORBED_BYTES // max(1, each * query.element_size()))
    if step >= query.shape[2]:
        return absorbed(query, key, matrix, indices), None
    # gradients of keys and matrix are sums over the parts: they are taken in fp32
    wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in (key, matrix)]
    outputs = []
    for some in zip(query.split(step, 2), indices.split(step, 1), strict=True):
        operands = (some[0], *wide, some[1])
        checkpoint_options: Any = {"use_reentrant": False, "preserve_rng_state": False}
        grads = torch.is_grad_enabled()
        outputs.append(
            checkpoint(absorbed, *operands, **checkpoint_options) if grads else absorbed(*operands)
        )
    return torch.cat(outputs, 1), None


class _Absorbed(NamedTuple):
    """Attention of queries over latents: queries and outputs go through the expanding matrix."""

    run: Callable[..., Tensor]
    nope: int
    rank: int
    scaling: float

    def __call__(self, query: Tensor, latents: Tensor, matrix: Tensor, indices: Tensor) -> Tensor:
        """Outputs in the order (batch, query, head)."""
        first = query[..., : self.nope] @ matrix[:, : self.nope].to(query.dtype)
        q = torch.cat([first, query[..., self.nope :].to(first.dtype)], -1)
        y = self.run(q, latents.to(q.dtype), None, indices, self.rank, self.scaling)
        return (y @ matrix[:, self.nope :].to(y.dtype).mT).transpose(1, 2)


def _run(
    q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, value_dim: int | None, scale: float
) -> Any:
    from liger_multi import ops

    return ops.sparse_attention(q, k, v, indices, value_dim=value_dim, scale=scale)


def register() -> None:
    """Let transformers find the attention function under its name; others do not ask for it."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
