"""DeepSeek sparse attention (DSA): each query attends to the keys that an indexer selects.

transformers computes indexer scores of all keys and turns the selected keys into a dense mask. A
patched model calls ``ops.indexer_topk``, and ``ops.sparse_attention`` with the indices.

Both behaviors run the module's own forward with other arguments:

* :class:`SparseAttention` passes a mask of ranges (:class:`RangeMask`), leaves keys and values as
  latents, and selects the attention function :func:`attend`.
* :class:`SparseIndexer` passes keys that only record operations (:class:`IndexKeys`). From the
  recorded scores, :meth:`KeyScores.topk` calls the operator.

Any other operation on these objects raises. :func:`find_sparse_attention` tries every class on a
tiny replica before it patches a layer.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from liger_multi import checks, ops
from liger_multi._torch_private import EnableTorchFunction, log_missing
from liger_multi.errors import ConfigurationError, PatchError
from liger_multi.modules.arguments import by_name, cache_parameter, caches
from liger_multi.patching import shards
from liger_multi.patching.attention import interface as attention
from liger_multi.patching.evidence import redirect
from liger_multi.patching.evidence.facts import ModelFacts
from liger_multi.patching.evidence.probe import Overridden, probe_context, random, scalars
from liger_multi.patching.options import SPARSE, Options, Request, run_bound
from liger_multi.patching.report import Skipped
from liger_multi.patching.swap import (
    Change,
    Patched,
    Replace,
    Restore,
    Swap,
    apply,
    conflict_of,
    swapped,
    unpatched_class,
)

OPS = ("sparse_attention", "indexer_topk")
NAME = "liger_multi_sparse"
"""The attention implementation that modules of :class:`SparseAttention` name while they run."""
ABSORBED_BYTES = 2**31
"""Largest absorbed queries and outputs in bytes; longer sequences are computed in parts, which
backward computes again."""
SERVED = ("sdpa", attention.NAME)
"""Attention implementations whose sparse layers are patched; eager would return weights."""
_serving: ContextVar[nn.Module | None] = ContextVar("liger_multi_sparse", default=None)


def settings_of(module_class: Any) -> Options:
    """The options of a patched class, whether sparse attention is its behavior or ``around`` it."""
    swap: Swap = module_class._liger_multi_swap
    return cast(Options, swap.settings if swap.around is None else swap.around_settings)


# --- masks ---


class RangeMask:
    """The mask of a layer as a range of keys per query, ``(B or 1, L, 2)`` int32.

    A forward may index its axis of heads, read its dtype, and negate it.
    """

    dtype = torch.bool

    def __init__(self, ranges: Tensor) -> None:
        self.ranges = ranges

    def __getitem__(self, index: Any) -> RangeMask:
        full_slice = slice(None)
        if index in ((full_slice, 0), (full_slice, 0, full_slice, full_slice)):
            return self
        raise _unknown(f"mask[{index}]")

    def __invert__(self) -> RangeMask:
        return self


def _unknown(access: str) -> ConfigurationError:
    return ConfigurationError(
        f"sparse_attention: the module's forward does something else: {access}"
    )


class _LastMask(NamedTuple):
    """The last mask that was converted, with the result: all layers of a model get one mask."""

    mask: weakref.ref[Tensor]
    version: int
    ranges: RangeMask | None


_last: ContextVar[_LastMask | None] = ContextVar("liger_multi_sparse_mask", default=None)


def range_mask(mask: object, queries: int) -> RangeMask | None:
    """A mask as one range per query; None if it has gaps or another form."""
    if isinstance(mask, attention.KeyMask):
        if mask.ranges is None or mask.ranges.shape[2] > 2:
            return None
        ranks = shards.ranks()
        return RangeMask(mask.ranges if ranks is None else ranks.share(mask.ranges, 1))
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
    """Takes the place of a tensor and records the operations that it defines; others raise."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", str(function))
        owner = next(a for a in args if isinstance(a, _Recorder))
        return owner.operation(name, args, kwargs or {})

    def operation(self, name: str, args: Any, kwargs: Any) -> Any:
        """The result of a function of PyTorch."""
        raise _unknown(name)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _unknown(f".{name}")


class IndexCache:
    """A wrapper of a layer's cache that returns keys as :class:`IndexKeys`."""

    def __init__(self, cache: Any, select: Callable[..., Tensor]) -> None:
        self.cache, self.select = cache, select

    def update_indexer(self, keys: Tensor, *args: Any, **kwargs: Any) -> IndexKeys:
        """All keys, after the new ones were added to the cache."""
        all_keys = keys if self.cache is None else self.cache.update_indexer(keys, *args, **kwargs)
        return IndexKeys(shards.keys_of_row(all_keys, 1), self.select)


class IndexKeys(_Recorder):
    """Keys ``(B, S, D)`` of an indexer, which a forward multiplies as ``(B, 1, D, S)`` in fp32."""

    def __init__(self, keys: Tensor, select: Callable[..., Tensor], recorded: str = "") -> None:
        self.keys, self.select, self.recorded = keys, select, recorded

    def _next(self, step: str) -> IndexKeys:
        return IndexKeys(self.keys, self.select, f"{self.recorded} {step}".strip())

    def transpose(self, a: int, b: int) -> IndexKeys:
        """Two axes exchanged."""
        return self._next(f"transpose{min(a, b)}{max(a, b)}")

    def float(self) -> IndexKeys:
        """In fp32."""
        return self._next("float")

    def unsqueeze(self, axis: int) -> IndexKeys:
        """A new axis, for heads."""
        return self._next(f"unsqueeze{axis}")

    def operation(self, name: str, args: Any, kwargs: Any) -> Any:
        """Queries @ keys."""
        if name != "matmul" or self.recorded != "transpose-2-1 float unsqueeze1" or kwargs:
            raise _unknown(f"{name} of keys after {self.recorded or 'nothing'}")
        return HeadScores(args[0], self, 1.0, False)


class HeadScores(_Recorder):
    """Scores ``(B, L, H, S)`` per head: queries @ keys times a factor, or ``relu`` of that."""

    def __init__(self, queries: Tensor, keys: IndexKeys, scale: float, positive: bool) -> None:
        self.queries, self.of, self.scale, self.positive = queries, keys, scale, positive

    def __mul__(self, factor: Any) -> HeadScores:
        if not isinstance(factor, (int, float)) or factor <= 0:
            raise _unknown(f"scores * {checks.describe(factor)}")
        return HeadScores(self.queries, self.of, self.scale * factor, self.positive)

    __rmul__ = __mul__

    def operation(self, name: str, args: Any, kwargs: Any) -> Any:
        """``relu``, or the weighted sum over heads."""
        if name == "relu" and not self.positive:
            return HeadScores(self.queries, self.of, self.scale, True)
        if name == "matmul" and self.positive and args[0].shape[-2] == 1:
            return KeyScores(self, args[0].squeeze(-2), False, None)
        raise _unknown(f"{name} of scores")


class KeyScores(_Recorder):
    """Scores ``(B, L, S)`` of keys, summed over heads, with a mask."""

    def __init__(
        self, heads: HeadScores, weights: Tensor, squeezed: bool, mask: RangeMask | None
    ) -> None:
        self.heads, self.weights, self.squeezed, self.mask = heads, weights, squeezed, mask

    @property
    def shape(self) -> torch.Size:
        """``(B, L, S)``."""
        return torch.Size((*self.weights.shape[:2], self.heads.of.keys.shape[1]))

    def squeeze(self, axis: int) -> KeyScores:
        """Without the axis of size 1."""
        if axis != -2 or self.squeezed:
            raise _unknown(f"squeeze({axis})")
        return KeyScores(self.heads, self.weights, True, self.mask)

    def masked_fill(self, hidden: Any, value: float) -> KeyScores:
        """Hidden keys get -inf."""
        if not isinstance(hidden, RangeMask) or value != -torch.inf or not self.squeezed:
            raise _unknown(f"masked_fill({checks.describe(hidden)}, {value})")
        return KeyScores(self.heads, self.weights, True, hidden)

    def topk(self, count: int, dim: int = -1) -> SimpleNamespace:
        """The indices of the selected keys, by the operator."""
        if dim != -1 or self.mask is None:
            raise _unknown(f"topk({count}, {dim}) without a mask")
        indexer = self.heads.of
        queries = self.heads.queries.to(indexer.keys.dtype)  # the forward cast both to fp32
        indices = indexer.select(
            queries, indexer.keys, self.weights, self.mask.ranges, count, self.heads.scale
        )
        return SimpleNamespace(indices=indices)


class SparseIndexer(Patched):
    """An indexer that selects keys by the operator if its mask is a :class:`RangeMask`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward, with keys that record operations."""
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
        index_caches = caches(arguments)  # also under older names of the argument
        cache = next(iter(index_caches.values()), None)
        arguments = {n: value for n, value in arguments.items() if n not in index_caches}
        arguments[name] = IndexCache(cache, functools.partial(_select, settings_of(module_class)))
        return inner(self, **arguments)


def _select(
    options: Options, q: Tensor, k: Tensor, w: Tensor, ranges: Tensor, count: int, scale: float
) -> Tensor:
    def run(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        return ops.indexer_topk(q, k, w, count, ranges=ranges, scale=scale).indices

    return cast(Tensor, run_bound(options, ("indexer_topk",), run, q, k, w))


# --- the attention module ---


class SparseAttention(Patched):
    """Multi-head latent attention over the keys that its indexer or an earlier layer's selects."""

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """The latents themselves, as keys and values of one head.

        They are expanded if the layer that does it has adapters, hooks or a quantized weight.
        """
        if _serving.get() is not self or not _plain(self.kv_b_proj):
            return cast("tuple[Tensor, Tensor]", super().expand_kv(kv_nope, k_rot))  # type: ignore[misc]
        latents = torch.cat([kv_nope, k_rot.to(kv_nope.dtype)], -1)
        return latents, latents

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward with a mask of ranges; without one in graphs and for other calls."""
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
    """A shallow copy of a module, for one call, whose configuration selects :func:`attend`.

    The module itself keeps its configuration, which other threads and compiled graphs read.
    """
    copied = object.__new__(type(module))
    config = Overridden(module.config, _attn_implementation=NAME)
    vars(copied).update(vars(module), config=config)
    return copied


def _served(
    module: Any, module_class: type[Any], args: Any, kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """The arguments of a call with a mask of ranges; None for calls that are not supported."""
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
    """Whether a layer is a plain matrix, which queries and outputs can be multiplied with."""
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
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function of :class:`SparseAttention`.

    For keys that are latents, the expanding matrix is applied to queries and outputs instead.

    Raises:
        ConfigurationError: Another module called it.
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
    bytes_per_query = (query.shape[3] - absorbed.nope + 2 * rank) * query[:, :, :1, 0].numel()
    step = max(1, ABSORBED_BYTES // max(1, bytes_per_query * query.element_size()))
    if step >= query.shape[2]:
        return absorbed(query, key, matrix, indices), None
    # gradients of keys and matrix are summed over the parts, in fp32
    wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in (key, matrix)]
    outputs = []
    for chunk in zip(query.split(step, 2), indices.split(step, 1), strict=True):
        operands = (chunk[0], *wide, chunk[1])
        checkpoint_options: Any = {"use_reentrant": False, "preserve_rng_state": False}
        grads = torch.is_grad_enabled()
        outputs.append(
            checkpoint(absorbed, *operands, **checkpoint_options) if grads else absorbed(*operands)
        )
    return torch.cat(outputs, 1), None


class _Absorbed(NamedTuple):
    """Attention over latents; the expanding matrix is applied to queries and outputs."""

    run: Callable[..., Tensor]
    nope: int
    rank: int
    scaling: float

    def __call__(self, query: Tensor, latents: Tensor, matrix: Tensor, indices: Tensor) -> Tensor:
        """Outputs ``(batch, query, head, channel)``."""
        first = query[..., : self.nope] @ matrix[:, : self.nope].to(query.dtype)
        q = torch.cat([first, query[..., self.nope :].to(first.dtype)], -1)
        y = self.run(q, latents.to(q.dtype), None, indices, self.rank, self.scaling)
        return (y @ matrix[:, self.nope :].to(y.dtype).mT).transpose(1, 2)


def _run(
    q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, value_dim: int | None, scale: float
) -> Any:
    return ops.sparse_attention(q, k, v, indices, value_dim=value_dim, scale=scale)


def register() -> None:
    """Register :func:`attend` with transformers, under a name that only patched layers select."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


# --- which layers: recognized by what their forward loads, and tried before a patch ---

# The constructor of an indexer or attention class builds a tiny layer on the CPU. Its results with
# and without the patch are compared.

INDEXER_NAMES = {"update_indexer", "topk", "relu", "matmul", "masked_fill"}
"""Names that the forward of an indexer loads."""
ATTENTION_NAMES = {"expand_kv", "indexer", "_attn_implementation", "get_interface"}
SIZES = {
    "hidden_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 12,
    "head_dim": 8,
    "index_n_heads": 24,
    "index_head_dim": 16,
    "index_topk": 3,
    "attention_dropout": 0.0,
}
"""Sizes of a tiny layer, by names of a configuration; many heads, so that no score is 0."""
TOKENS = 9


def _selects_keys(names: frozenset[str]) -> bool:
    """Whether a forward with these names may be that of an indexer, or of a layer with one."""
    return names >= INDEXER_NAMES or names >= ATTENTION_NAMES


def behavior_of(module: nn.Module) -> type[Patched] | None:
    """The behavior for a module; None if it is no layer of sparse attention."""
    module_class = unpatched_class(module)
    method = redirect.methods(module_class).get("forward")
    if method is None:
        return None
    names = redirect.names(method)
    if not _selects_keys(names):
        return None
    if names >= INDEXER_NAMES:
        return SparseIndexer
    # a layer without an indexer uses the indices of an earlier one, or is dense
    takes_indices = "prev_topk_indices" in inspect.signature(module_class.forward).parameters
    lists = takes_indices or getattr(module, "indexer", None) is not None
    return SparseAttention if lists and hasattr(module_class, "expand_kv") else None


def selects_otherwise(module: nn.Module) -> str | None:
    """Why a module with an indexer is no layer of sparse attention; None for other modules."""
    indexer = module._modules.get("indexer")
    if indexer is None:
        return None
    module_class = unpatched_class(indexer)
    if not any(
        "topk" in redirect.names(method) for method in redirect.methods(module_class).values()
    ):
        return None
    return (
        f"{module_class.__name__} selects pools, blocks or compressed entries of keys, and "
        "sparse_attention takes lists of single keys"
    )


def refusal(module: nn.Module, behavior: type[Patched]) -> str | None:
    """Why a layer is left as it is, or None."""
    module_class, config = unpatched_class(module), vars(module).get("config")
    if getattr(module, "sinks", None) is not None:
        return f"{module_class.__name__} has attention sinks, which sparse_attention does not know"
    if config is None or not hasattr(module, "layer_idx"):
        return f"{module_class.__name__} keeps no configuration to build a tiny one from"
    attributes = tuple(pair for pair in scalars(module) if pair[0] != "layer_idx")
    attributes = (*attributes, ("indexer", getattr(module, "indexer", None) is None))
    layer = _Layer(config, cast(int, module.layer_idx), attributes)
    return _differs(cast(Any, module_class), cast(Any, behavior), layer)


@dataclass(frozen=True)
class _Layer:
    """A layer of a configuration; of layers with equal attributes, one is tried."""

    config: Any = field(compare=False)
    index: int = field(compare=False)
    alike: tuple[tuple[str, Any], ...]

    def tiny(self) -> Any:
        """A configuration with tiny sizes and as many layers."""
        config = copy.deepcopy(self.config)
        layers = getattr(config, "per_layer_config", None)
        for part in (config,) if layers is None else (config, layers[self.index]):
            for name, size in SIZES.items():
                # some configurations raise for values that differ between layers
                with contextlib.suppress(Exception):
                    if getattr(part, name) is not None:
                        _set_where_present(part, name, size)
        _set_where_present(config, "_attn_implementation", "sdpa")
        return config


def _set_where_present(config: Any, name: str, value: Any) -> None:
    """Set an attribute of a copied configuration, also if its class forbids that."""
    try:
        setattr(config, name, value)
    except Exception:  # of any code
        name = getattr(config, "attribute_map", {}).get(name, name)
        internal = f"{name}_internal"
        vars(config)[internal if internal in vars(config) else name] = value


@functools.lru_cache(maxsize=256)
def _differs(module_class: type[nn.Module], behavior: type[Patched], layer: _Layer) -> str | None:
    """Why a class does not compute what the operators do, or None."""
    if EnableTorchFunction is None:
        log_missing("EnableTorchFunction")
        return "this PyTorch cannot try it"
    try:
        # recorders of scores are called through __torch_function__
        with probe_context() as generator, EnableTorchFunction():
            stock = cast(Any, module_class)(layer.tiny(), layer.index).to(torch.float32)
            for parameter in stock.parameters():
                parameter.data = random(generator, *parameter.shape) * 0.5
            agrees = _TRIALS[behavior](stock, _swapped(stock, behavior), generator)
    except Exception as error:  # of any code
        return f"{module_class.__name__} cannot be tried: {type(error).__name__}: {error}"
    return (
        None
        if agrees
        else f"{module_class.__name__} computes something else than {behavior.__name__}"
    )


def _swapped(stock: nn.Module, behavior: type[Patched]) -> nn.Module:
    """A copy of a layer, patched with its indexer."""
    replica = copy.deepcopy(stock)
    for module in list(replica.modules()):
        mixin = behavior_of(module)
        if mixin is not None:
            apply(module, Swap("sparse_attention", type(module), mixin, Options()))
    if not isinstance(replica, behavior):
        raise PatchError(f"{type(stock).__name__} is no layer of this kind")
    return replica


def _inputs(stock: nn.Module, generator: torch.Generator) -> dict[str, Any]:
    """Inputs for the arguments that a forward has; the row holds two packed samples."""
    sizes = {name: int(size) for name, size in SIZES.items()}
    rope, rank = sizes["qk_rope_head_dim"], sizes["kv_lora_rank"]
    angles = random(generator, 1, TOKENS, rope // 2).repeat(1, 1, 2)
    visible = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device="cpu").tril()
    visible[6:, :4] = False
    position = torch.arange(TOKENS, device="cpu")
    lists = (position[:, None] - torch.arange(3, device="cpu")).clamp(min=0)
    latents = {
        name: (random(generator, 1, 1, TOKENS, rank), random(generator, 1, 1, TOKENS, rotary_dim))
        for name, rotary_dim in (("rope", rope), ("nope", 0))
    }
    inputs = {
        "hidden_states": random(generator, 1, TOKENS, sizes["hidden_size"]),
        "q_resid": random(generator, 1, TOKENS, sizes["q_lora_rank"]),
        "position_embeddings": (angles.cos(), angles.sin()),
        "attention_mask": visible[None, None],
        "position_ids": position[None],
        "prev_topk_indices": lists[None].int(),
        "shared_kv_states": latents,
    }
    return {n: v for n, v in inputs.items() if n in inspect.signature(stock.forward).parameters}


def _selects(stock: Any, patched: Any, generator: torch.Generator) -> bool:
    """Whether both select the same keys among the visible ones."""
    inputs = _inputs(stock, generator)
    mask = inputs.pop("attention_mask")
    expected = _as_mask(stock(attention_mask=mask[:, 0], **inputs)) & mask[:, 0]
    actual = _as_mask(patched(attention_mask=range_mask(mask, TOKENS), **inputs))
    return bool((actual == expected).all())


def _as_mask(indices: Tensor) -> Tensor:
    mask = torch.zeros(*indices.shape[:2], TOKENS + 1, dtype=torch.bool, device="cpu")
    return mask.scatter(-1, indices.long() % (TOKENS + 1), True)[..., :TOKENS]


def _attends(stock: Any, patched: Any, generator: torch.Generator) -> bool:
    """Whether outputs and all gradients are close."""
    inputs, upstream, results = _inputs(stock, generator), None, []
    for module in (stock.eval(), patched.eval()):
        x = inputs["hidden_states"].clone().requires_grad_()
        y = module(**{**inputs, "hidden_states": x})[0]
        upstream = random(generator, *y.shape) if upstream is None else upstream
        leaves = [x, *(p for n, p in module.named_parameters() if not n.startswith("indexer."))]
        gradients = torch.autograd.grad(y, leaves, upstream, allow_unused=True)
        results.append((y.detach(), *gradients))
    return all(
        (a is None) == (b is None)
        and (a is None or torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(a.abs().max())))
        for a, b in zip(*results, strict=True)
    )


_TRIALS: dict[type[Patched], Any] = {SparseIndexer: _selects, SparseAttention: _attends}


def find_sparse_attention(model: ModelFacts, request: Request) -> Iterator[Change]:
    """Layers whose indexer selects keys; their earlier patches stay beneath."""
    options, served = request.get(SPARSE), set()
    indexing = model.of_class(lambda facts: _selects_keys(facts.forward_names))
    for path, module in model.merged(indexing, model.with_children({"indexer"}, 1)):
        behavior = behavior_of(module)
        if behavior is None:
            reason = None if options is None else selects_otherwise(module)
            if reason is not None:
                yield Skipped(path, SPARSE, reason)
            continue
        # an indexer comes after its attention module, and is patched only with it
        requested = options is not None and (behavior is SparseAttention or id(module) in served)
        reason = _sparse_refusal(module, behavior) if requested else None
        if reason is not None:
            yield Skipped(path, SPARSE, reason)
        if not requested or reason is not None:
            yield from _without_sparse(path, module)
            continue
        served.add(id(getattr(module, "indexer", None)))
        beneath = _inner_swap(module)
        swap = Swap(SPARSE, unpatched_class(module), behavior, options)
        if beneath is not None:
            swap = replace(beneath, around=behavior, around_settings=options)
        yield Replace(path, module, swap, _SPARSE[behavior], options.shown(), op=SPARSE)


def _sparse_refusal(module: nn.Module, behavior: type[Patched]) -> str | None:
    """Why an attention module or its indexer stays as it is, or None."""
    register()
    reason = conflict_of(module) or refusal(module, behavior)
    indexer = getattr(module, "indexer", None)
    if reason is None and isinstance(indexer, nn.Module):
        reason = conflict_of(indexer) or refusal(indexer, SparseIndexer)
    return reason


def _without_sparse(path: str, module: nn.Module) -> Iterator[Change]:
    beneath = _inner_swap(module)
    if isinstance(module, (SparseAttention, SparseIndexer)):
        if beneath is None:
            yield Restore(path, module)
        else:
            yield Replace(path, module, beneath)


_SPARSE: dict[type[Patched], str] = {
    SparseAttention: "sparse_attention",
    SparseIndexer: "indexer_topk",
}


def _inner_swap(module: nn.Module) -> Swap | None:
    """The swap of a module without sparse attention, or None."""
    current = swapped(module)
    if current is None or current.behavior in _SPARSE:
        return None
    return (
        replace(current, around=None, around_settings=None)
        if current.around in _SPARSE
        else current
    )
