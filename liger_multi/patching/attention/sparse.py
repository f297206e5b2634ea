"""Sparse attention with an indexer (DSA): attention over lists of keys in place of dense masks.

transformers computes the scores of all keys for every head of the indexer, and makes a dense mask
of the selected ones. Two behaviors take their place; both let the module's own forward run.

:class:`SparseAttention` hands the forward a mask of ranges (:class:`RangeMask`), keeps keys as the
latents that they are made of, and names an attention function of ours. :class:`SparseIndexer` hands
the forward keys whose products are not computed (:class:`IndexKeys`): the forward goes on to write
down which scores it wants, and the operator selects from them. Any other operation on these
objects raises; each class is tried before it is
patched.
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
from liger_multi._torch_private import EnableTorchFunction, say
from liger_multi.arguments import by_name, cache_parameter, caches
from liger_multi.errors import ConfigurationError, PatchError
from liger_multi.patching.attention import interface as attention
from liger_multi.patching.evidence import redirect
from liger_multi.patching.evidence.probe import probe_context, random, scalars
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
        return None if mask.ranges is None or mask.ranges.shape[2] > 2 else RangeMask(mask.ranges)
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
        return IndexKeys(all_keys, self.select)


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
    if value is not key:
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
    return ops.sparse_attention(q, k, v, indices, value_dim=value_dim, scale=scale)


def register() -> None:
    """Let transformers find the attention function under its name; others do not ask for it."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


# --- which layers: found by what they call, and tried before a patch ---

# A class of indexers or of attention modules is built once more, tiny and on the CPU, by its own
# constructor. What it computes patched is compared with what it computes unpatched.

INDEXER_NAMES = {"update_indexer", "topk", "relu", "matmul", "masked_fill"}
"""What the forward of an indexer loads by name."""
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
"""A tiny layer, by the names of a configuration; with many heads, no two scores are 0."""
TOKENS = 9


def behavior_of(module: nn.Module) -> type[Patched] | None:
    """The behavior that fits a module; None where it is no layer of sparse attention."""
    module_class = unpatched_class(module)
    method = redirect.methods(module_class).get("forward")
    if method is None:
        return None
    names = redirect.names(method)
    if names >= INDEXER_NAMES:
        return SparseIndexer
    sparse = names >= ATTENTION_NAMES and hasattr(module_class, "expand_kv")
    # a layer without an indexer takes the selection of one before it, or is dense
    takes_indices = "prev_topk_indices" in inspect.signature(module_class.forward).parameters
    lists = takes_indices or getattr(module, "indexer", None) is not None
    return SparseAttention if sparse and lists else None


def selects_otherwise(module: nn.Module) -> str | None:
    """Why a module is left that has an indexer but is no layer of sparse attention."""
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
    alike = tuple(pair for pair in scalars(module) if pair[0] != "layer_idx")
    alike = (*alike, ("indexer", getattr(module, "indexer", None) is None))
    layer = _Layer(config, cast(int, module.layer_idx), alike)
    return _differs(cast(Any, module_class), cast(Any, behavior), layer)


@dataclass(frozen=True)
class _Layer:
    """A layer of a configuration; one of those whose attributes are alike is tried."""

    config: Any = field(compare=False)
    index: int = field(compare=False)
    alike: tuple[tuple[str, Any], ...]

    def tiny(self) -> Any:
        """A small configuration that has as many layers."""
        config = copy.deepcopy(self.config)
        layers = getattr(config, "per_layer_config", None)
        for part in (config,) if layers is None else (config, layers[self.index]):
            for name, size in SIZES.items():
                # some configurations refuse to say what differs between layers
                with contextlib.suppress(Exception):
                    if getattr(part, name) is not None:
                        _put(part, name, size)
        _put(config, "_attn_implementation", "sdpa")
        return config


def _put(config: Any, name: str, value: Any) -> None:
    """Set an attribute of a copy, also of one whose class lets nobody write."""
    try:
        setattr(config, name, value)
    except Exception:  # of any code
        name = getattr(config, "attribute_map", {}).get(name, name)
        internal = f"{name}_internal"
        vars(config)[internal if internal in vars(config) else name] = value


@functools.lru_cache(maxsize=256)
def _differs(module_class: type[nn.Module], behavior: type[Patched], layer: _Layer) -> str | None:
    """Whether a class computes something else than the operators; None where they agree."""
    if EnableTorchFunction is None:
        say("EnableTorchFunction")
        return "this PyTorch cannot try it"
    try:
        # the recorders of an indexer's scores are called as PyTorch calls other classes' objects
        with probe_context() as generator, EnableTorchFunction():
            stock = cast(Any, module_class)(layer.tiny(), layer.index).to(torch.float32)
            for parameter in stock.parameters():
                parameter.data = random(generator, *parameter.shape) * 0.5
            same = _TRIALS[behavior](stock, _swapped(stock, behavior), generator)
    except Exception as error:  # of any code
        return f"{module_class.__name__} cannot be tried: {type(error).__name__}: {error}"
    return (
        None
        if same
        else f"{module_class.__name__} computes something else than {behavior.__name__}"
    )


def _swapped(stock: nn.Module, behavior: type[Patched]) -> nn.Module:
    """A patched copy, with its indexer."""
    replica = copy.deepcopy(stock)
    for module in list(replica.modules()):
        mixin = behavior_of(module)
        if mixin is not None:
            apply(module, Swap("sparse_attention", type(module), mixin, Options()))
    if not isinstance(replica, behavior):
        raise PatchError(f"{type(stock).__name__} is no layer of this kind")
    return replica


def _inputs(stock: nn.Module, generator: torch.Generator) -> dict[str, Any]:
    """What the forward names, of all that such forwards take; two samples are packed."""
    sizes = {name: int(size) for name, size in SIZES.items()}
    rope, rank = sizes["qk_rope_head_dim"], sizes["kv_lora_rank"]
    angles = random(generator, 1, TOKENS, rope // 2).repeat(1, 1, 2)
    visible = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device="cpu").tril()
    visible[6:, :4] = False
    place = torch.arange(TOKENS, device="cpu")
    lists = (place[:, None] - torch.arange(3, device="cpu")).clamp(min=0)
    latents = {
        name: (random(generator, 1, 1, TOKENS, rank), random(generator, 1, 1, TOKENS, turned))
        for name, turned in (("rope", rope), ("nope", 0))
    }
    inputs = {
        "hidden_states": random(generator, 1, TOKENS, sizes["hidden_size"]),
        "q_resid": random(generator, 1, TOKENS, sizes["q_lora_rank"]),
        "position_embeddings": (angles.cos(), angles.sin()),
        "attention_mask": visible[None, None],
        "position_ids": place[None],
        "prev_topk_indices": lists[None].int(),
        "shared_kv_states": latents,
    }
    return {n: v for n, v in inputs.items() if n in inspect.signature(stock.forward).parameters}


def _selects(stock: Any, ours: Any, generator: torch.Generator) -> bool:
    """Whether both select the same keys among the visible ones."""
    inputs = _inputs(stock, generator)
    mask = inputs.pop("attention_mask")
    theirs = _as_mask(stock(attention_mask=mask[:, 0], **inputs)) & mask[:, 0]
    selected = ours(attention_mask=range_mask(mask, TOKENS), **inputs)
    return bool((_as_mask(selected) == theirs).all())


def _as_mask(indices: Tensor) -> Tensor:
    mask = torch.zeros(*indices.shape[:2], TOKENS + 1, dtype=torch.bool, device="cpu")
    return mask.scatter(-1, indices.long() % (TOKENS + 1), True)[..., :TOKENS]


def _attends(stock: Any, ours: Any, generator: torch.Generator) -> bool:
    """Whether outputs and all gradients agree."""
    inputs, upstream, results = _inputs(stock, generator), None, []
    for module in (stock.eval(), ours.eval()):
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


def find_sparse_attention(model: nn.Module, request: Request) -> Iterator[Change]:
    """Layers whose indexer selects keys; their rotations and adapters are served beneath."""
    options, served = request.get(SPARSE), set()
    for path, module in model.named_modules():
        behavior = behavior_of(module)
        if behavior is None:
            reason = None if options is None else selects_otherwise(module)
            if reason is not None:
                yield Skipped(path, SPARSE, reason)
            continue
        # an indexer comes after its attention module, without which it has nothing to select for
        requested = options is not None and (behavior is SparseAttention or id(module) in served)
        reason = _sparse_refusal(module, behavior) if requested else None
        if reason is not None:
            yield Skipped(path, SPARSE, reason)
        if not requested or reason is not None:
            yield from _without_sparse(path, module)
            continue
        served.add(id(getattr(module, "indexer", None)))
        beneath = _beneath(module)
        swap = Swap(SPARSE, unpatched_class(module), behavior, options)
        if beneath is not None:
            swap = replace(beneath, around=behavior, around_settings=options)
        yield Replace(path, module, swap, _SPARSE[behavior], options.shown(), op=SPARSE)


def _sparse_refusal(module: nn.Module, behavior: type[Patched]) -> str | None:
    """Why a layer is left as it is, or None; an attention module speaks for its indexer."""
    register()
    reason = conflict_of(module) or refusal(module, behavior)
    indexer = getattr(module, "indexer", None)
    if reason is None and isinstance(indexer, nn.Module):
        reason = conflict_of(indexer) or refusal(indexer, SparseIndexer)
    return reason


def _without_sparse(path: str, module: nn.Module) -> Iterator[Change]:
    beneath = _beneath(module)
    if isinstance(module, (SparseAttention, SparseIndexer)):
        if beneath is None:
            yield Restore(path, module)
        else:
            yield Replace(path, module, beneath)


_SPARSE: dict[type[Patched], str] = {
    SparseAttention: "sparse_attention",
    SparseIndexer: "indexer_topk",
}


def _beneath(module: nn.Module) -> Swap | None:
    """The swap of a module without that of sparse attention."""
    current = swapped(module)
    if current is None or current.behavior in _SPARSE:
        return None
    return (
        replace(current, around=None, around_settings=None)
        if current.around in _SPARSE
        else current
    )
