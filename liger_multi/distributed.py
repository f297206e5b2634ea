"""Sequence parallel: the tokens of a row are spread over ranks, for every mixer.

:func:`shard_sequence` turns a patched model into one that every rank calls with whole rows. Each
rank computes with its share of the tokens from the embedding to the loss. Only what mixes tokens
(attention, recurrences, convolutions) sees whole rows, of some heads or channels, by all-to-all
(:mod:`liger_multi.patching.shards`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from liger_multi.arguments import by_name, fills_cache, has_cache, parameters_of
from liger_multi.errors import PackingError, PatchError
from liger_multi.patching import shards
from liger_multi.patching.attention.interface import NAME
from liger_multi.patching.mixers import FusedMixer, mixer_calls, unserved
from liger_multi.patching.packing.hybrids import PackedModel
from liger_multi.patching.packing.samples import rows_of, sample_ids
from liger_multi.patching.packing.tree import offered
from liger_multi.patching.swap import unpatched_class

__all__ = ["shard_sequence", "unshard_sequence"]

IGNORED = -100
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on the longest position of a call."""
TRIAL_TOKENS = 61  # a prime: no number of ranks divides it, so that padding is tried, too
UNDIVIDED = "ranks do not divide"  # of a message that says what to do
COARSE, FINE = 5e-2, 1e-3  # differences that rounding explains, in 16 bits and in more


@dataclass
class _Sharded:
    """A model whose rows are spread, and what ends that."""

    ranks: shards.Ranks
    targets: int = 0  # of a row of the running call
    handles: list[Any] = field(default_factory=list)
    ends: list[Callable[[], None]] = field(default_factory=list)  # of calls that run


_sharded: weakref.WeakKeyDictionary[nn.Module, _Sharded] = weakref.WeakKeyDictionary()


def shard_sequence(model: nn.Module, mesh: Any = None, *, check: bool = True) -> nn.Module:
    """Spread the tokens of every row over ranks; the model is called with whole rows, as before.

    Every rank passes the same ``input_ids`` or ``inputs_embeds``, ``labels``, ``position_ids`` and
    ``attention_mask``, of whole rows, packed or not. Lengths that ranks do not divide are padded
    inside.

    Math:
        ``loss = sum over ranks of (sum of the losses of its tokens) / (targets of all rows)``, on
        every rank the same number. Gradients of weights that are averaged over the ranks, as DDP
        and FSDP2 do, are those of one process.

    Shapes:
        Logits, hidden states and what hooks see are ``(B, T / P, ...)``, of the rank's tokens: the
        ``rank``-th of P equal parts of the row.

    Memory:
        Activations of T / P tokens. A mixer has its inputs and result twice for the time of its
        call. Ranges of masks and ids of samples are of all tokens, 8 to 20 bytes each.

    Args:
        model: A patched model for causal language modeling with
            ``attn_implementation="liger_multi"``, or one in a wrapper of PEFT. Wrap with PEFT
            before, with FSDP2 or DDP before or after.
        mesh: A device mesh of one dimension (``mesh["sp"]``) or a process group; None for all
            processes.
        check: Compare a short packed row with the same row in one process now, in four forward
            passes of ``TRIAL_TOKENS`` tokens. Models on the meta device are not compared.

    Returns:
        The model.

    Raises:
        PatchError: The model is not patched, is sharded already, has attention or mixers that are
            not served, or computes something else when it is sharded.
        ValueError: Ranks do not divide the heads of a mixer.

    Source:
        All-to-all over heads: Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.
    """
    if model in _sharded:
        raise PatchError(f"shard_sequence: {type(model).__name__} is sharded; unshard_sequence it")
    group = mesh.get_group() if hasattr(mesh, "get_group") else mesh
    group = dist.group.WORLD if group is None else group
    ranks = shards.Ranks(group, dist.get_world_size(group), dist.get_rank(group))
    base = _base(model)
    mixers = _mixers(base)
    sharded = _Sharded(ranks)
    hooks: list[tuple[nn.Module, Any, Any]] = [
        (model, _before_model, _after_model),
        (base, _before_base, _after_base),
        *((mixer, _before_mixer, _after_mixer) for mixer in mixers),
    ]
    for module, before, after in hooks:
        before, after = (functools.partial(hook, sharded) for hook in (before, after))
        sharded.handles += [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True, always_call=True),
        ]
    _sharded[model] = sharded
    torch.compiler.reset()  # no graph knows of ranks
    if check and not any(p.is_meta for p in model.parameters()):
        try:
            _compare(model, ranks)
        except BaseException:
            unshard_sequence(model)
            raise
    return model


def unshard_sequence(model: nn.Module) -> nn.Module:
    """Undo :func:`shard_sequence`; a model that is not sharded stays as it is."""
    sharded = _sharded.pop(model, None)
    for handle in sharded.handles if sharded else ():
        handle.remove()
    return model


# --- which modules ---


def _base(model: nn.Module) -> nn.Module:
    """The innermost model that takes embeddings and holds the layers."""
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise PatchError(f"shard_sequence: {type(model).__name__} has an encoder and a decoder")
    candidates = [
        module
        for module in model.modules()
        if hasattr(module, "config")
        and "inputs_embeds" in parameters_of(unpatched_class(module).forward)
        and callable(getattr(module, "get_input_embeddings", None))
        and isinstance(getattr(module, "embed_tokens", None) or _embedding(module), nn.Module)
    ]
    inner = [m for m in candidates if not any(c in set(m.modules()) - {m} for c in candidates)]
    if len(inner) != 1:
        names = ", ".join(type(m).__name__ for m in inner) or "none"
        raise PatchError(
            f"shard_sequence needs one model of transformers with layers and an embedding, got "
            f"{names} in {type(model).__name__}"
        )
    base = inner[0]
    rope = getattr(base.config, "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]
    unable = {k.get("rope_type") for k in kinds} & set(LENGTH_DEPENDENT)
    if unable:
        raise PatchError(
            f"shard_sequence: rotary embeddings of type {unable.pop()!r} depend on the length "
            "of a row, of which a rank has a part"
        )
    return base


def _embedding(module: Any) -> Any:
    with contextlib.suppress(AttributeError, NotImplementedError):
        return module.get_input_embeddings()
    return None


def _mixers(base: nn.Module) -> list[nn.Module]:
    """The modules of a model that mix tokens, all of which are served."""
    mixers, attention = [], False
    for module in list(base.modules())[1:]:
        module_class = unpatched_class(module)
        asks, mixes = _asks_attention(cast(Any, module_class)), bool(mixer_calls(module_class))
        if mixes:
            lacking = unserved(module_class)
            if lacking or not isinstance(module, FusedMixer):
                raise PatchError(
                    f"shard_sequence: {module_class.__name__} calls "
                    f"{', '.join(lacking) or 'functions'} over all tokens, which no operator "
                    "serves; call liger_multi.patch(model) before, with all operators of mixers"
                )
        attention |= asks
        if asks or mixes:
            mixers.append(module)
    if not mixers:
        raise PatchError(
            f"shard_sequence: nothing in {type(base).__name__} is known to mix tokens; patch it, "
            "and use attention that calls transformers' AttentionInterface"
        )
    implementation = getattr(base.config, "_attn_implementation", None)
    if attention and implementation != NAME:
        raise PatchError(
            f"shard_sequence needs attn_implementation={NAME!r}, got {implementation!r}: call "
            "liger_multi.patching.register_attention() and "
            f"model.set_attn_implementation({NAME!r})"
        )
    return mixers


@functools.lru_cache(maxsize=1024)
def _asks_attention(module_class: type) -> bool:
    """Whether a method of a class calls transformers' attention interface."""
    from transformers import AttentionInterface, PreTrainedModel

    functions = [
        inspect.unwrap(value)
        for base in module_class.__mro__
        if base not in PreTrainedModel.__mro__
        for value in vars(base).values()
        if inspect.isfunction(value)
    ]
    return any(
        isinstance(function.__globals__.get(name), AttentionInterface)
        for function in functions
        for name in function.__code__.co_names
    )


# --- a call of the model: labels and loss ---


def _before_model(sharded: _Sharded, model: nn.Module, args: Any, kwargs: Any) -> Any:
    if shards.is_suspended():
        return None
    arguments = by_name(_forward(model), args, kwargs)
    _refuse_generation(model, arguments)
    rows = rows_of(arguments)
    if rows is None:
        raise ValueError("shard_sequence: the model was called without input_ids or inputs_embeds")
    if offered(rows.shape[1], rows.shape[0]) is not None:
        raise ValueError("shard_sequence: rows of shared prefixes are not spread over ranks")
    padding = -rows.shape[1] % sharded.ranks.size
    labels: Any = arguments.get("labels")
    targets: Any = arguments.get("shift_labels")
    if labels is None and targets is None:
        return None
    sharded.targets = rows.shape[1] - (targets is None)  # the first token is no target
    if targets is None:
        if labels.shape != rows.shape[:2]:
            raise ValueError(
                f"shard_sequence: labels must be of every token, {tuple(rows.shape[:2])}, got "
                f"{tuple(labels.shape)}"
            )
        targets = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    count = arguments.get("num_items_in_batch")
    share = sharded.ranks.share(F.pad(targets, (0, padding), value=IGNORED), 1).contiguous()
    new = {
        "labels": share,
        "shift_labels": share,
        "num_items_in_batch": (targets != IGNORED).sum().clamp(min=1) if count is None else count,
    }
    names = parameters_of(_forward(model))
    args = tuple(
        new.pop(name) if name in new else value for name, value in zip(names, args, strict=False)
    )
    return args, {**kwargs, **new}


def _forward(model: nn.Module) -> Any:
    return unpatched_class(model).forward


def _refuse_generation(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    keep = arguments.get("logits_to_keep")
    if has_cache((), arguments) or fills_cache(arguments) or arguments.get("use_cache"):
        reason = "it has no cache, which would hold a part of every row"
    elif isinstance(keep, Tensor) or keep:
        reason = f"logits are of the rank's tokens, so logits_to_keep={keep!r} has no meaning"
    else:
        return
    raise ValueError(
        f"{unpatched_class(model).__name__} is sharded over the sequence and cannot generate: "
        f"{reason}; call unshard_sequence(model) before"
    )


def _after_model(sharded: _Sharded, model: Any, args: Any, kwargs: Any, output: Any) -> Any:
    if shards.is_suspended() or output is None:  # the call has failed
        return None
    if isinstance(output, tuple):
        has_loss = isinstance(output[0], Tensor) and output[0].ndim == 0
        return (shards.total(output[0], sharded.ranks), *output[1:]) if has_loss else None
    loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        return None
    balance = getattr(output, "aux_loss", None)
    if isinstance(getattr(output, "label_mask", None), Tensor):
        _gather_targets(sharded, output)
    if isinstance(balance, Tensor):  # every rank has all of it
        scale: Any = getattr(model, "router_aux_loss_coef", None)
        scale = getattr(model.config, "router_aux_loss_coef", 0.0) if scale is None else scale
        once = scale * balance.detach() * (1 - 1 / sharded.ranks.size)
        loss = loss - once.to(loss.device)
    output["loss"] = shards.total(loss, sharded.ranks)
    return output


def _gather_targets(sharded: _Sharded, output: Any) -> None:
    """Whole rows of what TRL's head says of every target, of which its trainers make a loss."""
    ranks, shape = sharded.ranks, output["label_mask"].shape
    for name, value in list(output.items()):
        if isinstance(value, Tensor) and value.shape == shape:
            output[name] = shards.gather(value, ranks, ranks.size)[:, : sharded.targets]
    if isinstance(
        balance := output.get("aux_loss"), Tensor
    ):  # its gradient is of this rank's share
        output["aux_loss"] = ranks.size * balance - (ranks.size - 1) * balance.detach()


# --- a call of its layers: tokens, positions, masks ---


def _before_base(sharded: _Sharded, base: nn.Module, args: Any, kwargs: Any) -> Any:
    if shards.is_suspended():
        return None
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "shard_sequence works on eager models; unshard_sequence(model) before it is compiled"
        )
    forward = _forward(base)
    names = parameters_of(forward)
    arguments = by_name(forward, args, kwargs)
    _refuse_generation(base, arguments)
    rows = rows_of(arguments)
    assert rows is not None
    length, ranks = rows.shape[1], sharded.ranks
    padding = -length % ranks.size
    mask, positions = (cast(Any, arguments.get(n)) for n in ("attention_mask", "position_ids"))
    mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
    ids = sample_ids(arguments)
    plain = isinstance(positions, Tensor) and positions.ndim == 2
    row = shards.Row(
        length + padding,
        (length + padding) // ranks.size,
        padding,
        None if mask is None else F.pad(mask, (0, padding)).bool(),
        _continued(positions, padding) if plain else None,
        None if ids is None or mask is not None else _padded_ids(ids, padding),
    )
    new = dict(arguments)
    for name in ("input_ids", "inputs_embeds"):
        if new.get(name) is not None:
            # the last token again: some models divide by the size of a padding token's embedding
            spare = new[name][:, -1:].expand(-1, padding, *new[name].shape[2:])
            new[name] = ranks.share(torch.cat([new[name], spare], 1), 1)
    if "position_ids" in names:
        places = torch.arange(row.tokens, device=rows.device)[None]
        places = places if positions is None else _continued(positions, padding)
        new["position_ids"] = ranks.share(places, -1)
    if mask is not None:
        new["attention_mask"] = ranks.share(F.pad(mask, (0, padding)), 1)
    elif plain and arguments.get("attention_mask") is None:
        # positions of a share must not look to transformers like those of a packed row
        new["attention_mask"] = rows.new_ones(rows.shape[0], row.share, dtype=torch.bool)
    if isinstance(base, PackedModel) or "seq_idx" in new:
        seq_idx = None if ids is None else _padded_ids(ids, padding).expand(rows.shape[0], -1)
        new = {**new, "seq_idx": seq_idx} if seq_idx is not None else new
    if "use_cache" in names or "use_cache" in new:
        new["use_cache"] = False
    sharded.ends.append(shards.enter(row))
    return (), new


def _continued(positions: Tensor, padding: int) -> Tensor:
    """Positions of padding: a sample of its own."""
    if not padding:
        return positions
    spare = torch.arange(padding, device=positions.device, dtype=positions.dtype)
    return torch.cat([positions, spare.expand(*positions.shape[:-1], -1)], -1)


def _padded_ids(ids: Tensor, padding: int) -> Tensor:
    return torch.cat([ids, (ids[:, -1:] + 1).expand(-1, padding)], 1) if padding else ids


def _after_base(sharded: _Sharded, base: Any, args: Any, kwargs: Any, output: Any) -> Any:
    row = shards.row()
    if shards.is_suspended() or row is None:
        return None
    sharded.ends.pop()()
    routed = getattr(output, "router_logits", None)
    if not isinstance(routed, tuple):
        return None
    output["router_logits"] = tuple(_all_tokens(x, row, sharded.ranks) for x in routed)
    return output


def _all_tokens(routed: Tensor, row: shards.Row, ranks: shards.Ranks) -> Tensor:
    """The logits of a router for the tokens of whole rows, as a loss of balance takes them."""
    rows = routed.reshape(-1, row.share, routed.shape[-1])
    return shards.gather(rows, ranks)[:, : row.tokens - row.padding].flatten(0, 1)


# --- a call of a mixer ---


def _before_mixer(sharded: _Sharded, mixer: nn.Module, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        raise RuntimeError("shard_sequence works on eager models: a layer of it is compiled")
    if not shards.is_suspended():
        sharded.ends.append(shards.enter(sharded.ranks))


def _after_mixer(sharded: _Sharded, mixer: Any, args: Any, kwargs: Any, output: Any) -> None:
    if not shards.is_suspended() and shards.ranks() is not None:
        sharded.ends.pop()()


# --- is it the same? ---


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, was in training.items():
            module.training = was


def _compare(model: Any, ranks: shards.Ranks) -> None:
    """Run a packed row in one process and over ranks; every rank does both."""
    embedding = _embedding(model)
    ids = torch.arange(TRIAL_TOKENS, device=next(model.parameters()).device)[None]
    first = TRIAL_TOKENS * 5 // 8 + 1  # 39 of 61: at no border of shares
    positions = torch.where(ids < first, ids, ids - first)
    sizes = [getattr(embedding, "num_embeddings", None)]  # may have more entries than the head
    sizes += [getattr(model.config.get_text_config(), "vocab_size", None), 512]
    ids = (7 * ids * ids + 3 * ids) % min(size for size in sizes if size)
    call = {"input_ids": ids, "use_cache": False}
    if "labels" in parameters_of(_forward(model)):
        call["labels"] = ids
    for arguments in ({}, {"position_ids": positions}):
        with _evaluating(model):
            try:
                with shards.suspended():
                    whole = model(**call, **arguments)
            except (PackingError, ValueError):
                if not arguments:
                    raise
                continue  # the model takes no packed rows, spread or not
            try:
                part = model(**call, **arguments)
            except Exception as error:
                if UNDIVIDED in str(error):
                    raise
                raise PatchError(
                    f"shard_sequence: {unpatched_class(model).__name__} cannot run on rows that "
                    f"are spread over {ranks.size} ranks: {type(error).__name__}: {error}"
                ) from error
        worst = _difference(part, whole, ranks)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=ranks.group)
        limit = COARSE if any(p.dtype.itemsize < 4 for p in model.parameters()) else FINE
        if not float(worst) < limit:
            raise PatchError(
                f"shard_sequence: {unpatched_class(model).__name__} computes something else when "
                f"its rows are spread over {ranks.size} ranks (a relative difference of "
                f"{float(worst):.1e}{', packed' if arguments else ''}): something in it mixes "
                "tokens that is not known"
            )


def _difference(part: Any, whole: Any, ranks: shards.Ranks) -> Tensor:
    """The larger relative difference of logits or hidden states, and of losses."""
    expected, actual = _result(whole), _result(part)
    norm = expected.norm()
    expected = ranks.share(F.pad(expected, (0, 0, 0, -TRIAL_TOKENS % ranks.size)), 1)
    real = min(expected.shape[1], max(0, TRIAL_TOKENS - ranks.rank * expected.shape[1]))
    difference: Tensor = (actual - expected)[:, :real].norm() / norm
    losses: list[Any] = [getattr(output, "loss", None) for output in (part, whole)]
    if all(isinstance(loss, Tensor) for loss in losses):
        by_loss = (losses[0] - losses[1]).abs() / losses[1].abs()
        difference = torch.maximum(difference, by_loss.float().to(difference.device))
    return difference.detach().clone()


def _result(output: Any) -> Tensor:
    """Logits or hidden states of every token, as numbers."""
    value = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return torch.as_tensor(value[:, :]).float()
