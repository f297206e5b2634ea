"""Layers of sparse attention with an indexer: found by what they call, and tried before a patch.

A class of indexers or of attention modules is built once more, tiny and on the CPU, by its own
constructor. What it computes patched is compared with what it computes unpatched.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_multi._torch_private import EnableTorchFunction, say
from liger_multi.errors import PatchError
from liger_multi.patching.attention.sparse import SparseAttention, SparseIndexer, range_mask
from liger_multi.patching.attention.sparse import register as register_sparse
from liger_multi.patching.changes import Change, Replace, Restore
from liger_multi.patching.evidence import redirect
from liger_multi.patching.evidence.probe import probe_context, random, scalars
from liger_multi.patching.options import SPARSE, Options, Request
from liger_multi.patching.report import Skipped
from liger_multi.patching.swap import Patched, Swap, apply, conflict_of, swapped, unpatched_class

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
    register_sparse()
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
