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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from liger_multi._torch_private import outside_of_graphs
from liger_multi.errors import PackingError, PatchError
from liger_multi.modules.arguments import by_name, fills_cache, has_cache, parameters_of
from liger_multi.modules.forward_wrapper import ForwardWrapper, is_compiled
from liger_multi.patching import register_attention, shards
from liger_multi.patching.attention.interface import NAME
from liger_multi.patching.head.protocol import lazy_logits
from liger_multi.patching.head.storage import is_lazy, real_tensor
from liger_multi.patching.mixers import FusedMixer, mixer_calls, unserved
from liger_multi.patching.packing.hybrids import PackedModel
from liger_multi.patching.packing.samples import has_samples, rows_of, sample_ids
from liger_multi.patching.packing.tree import Tree, offered, running, spread_over
from liger_multi.patching.swap import unpatched_class

__all__ = ["shard_sequence", "unshard_sequence"]

IGNORED = -100
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on the longest position of a call."""
TRIAL_TOKENS = 61  # a prime: no number of ranks divides it, so that padding is tried, too
UNDIVIDED = "ranks do not divide"  # of a message that says what to do
TAKES_ROWS = "_liger_multi_takes_rows"
"""Attribute of a forward: a function that says of arguments whether it takes whole rows."""
COARSE, FINE = 5e-2, 1e-3  # differences that rounding explains, in 16 bits and in more


@dataclass
class _Sharded:
    """A model whose rows are spread, and what ends that."""

    ranks_of_call: Callable[[], shards.Ranks | None]
    shares: bool  # whether callers bring shares of rows
    packed: bool = True  # whether one process keeps samples apart, or that is not known
    tokens: int = 0  # of a row of the running call
    targets: int = 0
    as_tuple: bool = False  # whether the running call returns a tuple
    left: bool = False  # whether its forward takes whole rows
    handles: list[Any] = field(default_factory=list)

    @property
    def ranks(self) -> shards.Ranks | None:
        """Over which the rows of this call are spread; None where they are whole."""
        return None if shards.is_suspended() else self.ranks_of_call()


def _sharded(model: nn.Module) -> _Sharded | None:
    """What is known of a sharded model, which its hooks have: copies of a model have copies."""
    hooks: list[Any] = list(model._forward_pre_hooks.values())
    states = (h.args[0] for h in hooks if getattr(h, "func", None) is _before_model)
    return next(states, None)


def shard_sequence(
    model: nn.Module, mesh: Any = None, *, check: bool = True, shares: bool = False
) -> nn.Module:
    """Spread the tokens of every row over ranks; the model is called with whole rows, as before.

    Every rank passes the same ``input_ids`` or ``inputs_embeds``, ``labels``, ``position_ids`` and
    ``attention_mask``, of whole rows, packed or not, or a batch of shared prefixes. Lengths that
    ranks do not divide are padded inside.

    Math:
        ``loss = sum over ranks of (sum of the losses of its tokens) / (targets of all rows)``, on
        every rank the same number. Gradients of weights that are averaged over the ranks, as DDP
        and FSDP2 do, are those of one process.

    Shapes:
        Hidden states and what hooks see are ``(B, T / P, ...)``, of the rank's tokens: the
        ``rank``-th of P equal parts of the row. So are logits of a call with labels in training.
        All others are ``(B, T, V)``: a loss that is made of them outside of the model, averaged as
        that of the model, has the gradient of one process.

    Memory:
        Activations of T / P tokens. A mixer has its inputs and result twice for the time of its
        call. Ranges of masks and ids of samples are of all tokens, 8 to 20 bytes each. Logits of
        whole rows are lazy: the last hidden states of T tokens, where the head is patched.

    Args:
        model: A patched model for causal language modeling with
            ``attn_implementation="liger_multi"``, or one in a wrapper of PEFT. Wrap with PEFT
            before, with FSDP2 or DDP before or after.
        mesh: A device mesh of one dimension (``mesh["sp"]``) or a process group; None for all
            processes. Or a function that says the group of a call; None: rows are whole.
        check: Compare a short packed row with the same row in one process now, in four forward
            passes of ``TRIAL_TOKENS`` tokens. Models on the meta device are not compared, nor are
            those of a function.
        shares: The caller cuts rows itself, as verl does: it brings the rank's share of
            ``input_ids`` and ``position_ids``, of rows that ranks divide, and has logits of them.
            Labels are refused.

    Returns:
        The model.

    Raises:
        PatchError: The model is not patched, is sharded already, has attention or mixers that are
            not served, or computes something else when it is sharded.
        ValueError: Ranks do not divide the heads of a mixer.

    Source:
        All-to-all over heads: Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.
    """
    if _sharded(model) is not None:
        raise PatchError(f"shard_sequence: {type(model).__name__} is sharded; unshard_sequence it")
    fixed = None if _is_function(mesh) else _ranks(mesh)
    ranks_of_call = (lambda: fixed) if fixed else functools.partial(_ranks_of_call, mesh)
    base = _base(model)
    mixers = _mixers(base)
    sharded = _Sharded(ranks_of_call, shares)
    pre_hook, post_hook = (
        functools.partial(hook, sharded) for hook in (_before_model, _after_model)
    )
    sharded.handles = [
        model.register_forward_pre_hook(pre_hook, with_kwargs=True),
        model.register_forward_hook(post_hook, with_kwargs=True),
        ForwardWrapper(base, functools.partial(_run_base, sharded, base)),
        *(ForwardWrapper(mixer, functools.partial(_run_mixer, sharded)) for mixer in mixers),
    ]
    torch.compiler.reset()  # no graph knows of ranks
    if check and fixed and not shares and not any(p.is_meta for p in model.parameters()):
        try:
            sharded.packed = _compare(model, fixed)
        except BaseException:
            unshard_sequence(model)
            raise
    return model


def _is_function(mesh: Any) -> bool:
    return callable(mesh) and not hasattr(mesh, "get_group")


def _ranks(mesh: Any) -> shards.Ranks:
    if isinstance(mesh, shards.Ranks):
        return mesh
    group = mesh.get_group() if hasattr(mesh, "get_group") else mesh
    group = dist.group.WORLD if group is None else group
    return shards.Ranks(group, dist.get_world_size(group), dist.get_rank(group))


def _ranks_of_call(group_of_call: Callable[[], Any]) -> shards.Ranks | None:
    group = group_of_call()
    return None if group is None else _ranks(group)


def shard_on_meta(
    model: nn.Module, size: int, sent: Callable[[int], None] | None = None
) -> nn.Module:
    """A model on the meta device as it is on the first of some ranks, for estimates of memory.

    Args:
        model: Patched.
        size: How many ranks there are.
        sent: Called with the bytes of every exchange, of which a rank keeps ``1 / size``.
    """
    register_attention()
    cast(Any, model).set_attn_implementation(NAME)
    return shard_sequence(model, shards.Ranks(sent, size, 0), check=False)


def unshard_sequence(model: nn.Module) -> nn.Module:
    """Undo :func:`shard_sequence`; a model that is not sharded stays as it is."""
    sharded = _sharded(model)
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
    rope_sections = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]
    unable = {k.get("rope_type") for k in rope_sections} & set(LENGTH_DEPENDENT)
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
    """The model's arguments with the targets of this rank; None if they stay as they are."""
    ranks = sharded.ranks
    if ranks is None:
        return None
    forwards = (vars(module).get("forward") for module in model.modules())
    sharded.left = any(f(args, kwargs) for g in forwards if (f := getattr(g, TAKES_ROWS, None)))
    if sharded.left:
        return None
    _refuse_compiled()
    arguments = by_name(_forward(model), args, kwargs)
    _refuse_generation(model, arguments)
    rows = rows_of(arguments)
    if rows is None:
        raise ValueError("shard_sequence: the model was called without input_ids or inputs_embeds")
    sharded.tokens = rows.shape[1]
    return_dict = arguments.get("return_dict")
    if return_dict is None:
        return_dict = getattr(getattr(model, "config", None), "return_dict", True)
    sharded.as_tuple = not (return_dict or sharded.shares)
    changed_args = {"return_dict": True} if sharded.as_tuple else {}  # whose parts have names
    changed_args |= _targets_of_rank(sharded, arguments, rows, ranks)
    names = parameters_of(_forward(model))
    args = tuple(
        changed_args.pop(name) if name in changed_args else value
        for name, value in zip(names, args, strict=False)
    )
    return args, {**kwargs, **changed_args}


outside_of_graphs(_before_model, "rows are spread eagerly")


def _targets_of_rank(
    sharded: _Sharded, arguments: Mapping[str, Any], rows: Tensor, ranks: shards.Ranks
) -> dict[str, Any]:
    """The arguments of a loss of the rank's tokens; none without labels."""
    labels: Any = arguments.get("labels")
    targets: Any = arguments.get("shift_labels")
    if labels is not None and sharded.shares:
        raise ValueError(
            "shard_sequence(shares=True): a share has no label for its last token; make the loss "
            "of the logits and of labels that are shifted before they are cut"
        )
    is_tree = offered(rows.shape[1], rows.shape[0]) is not None  # which has no labels
    if sharded.shares or is_tree or (labels is None and targets is None):
        return {}
    sharded.targets = rows.shape[1] - (targets is None)  # the first token is no target
    if targets is None:
        if labels.shape != rows.shape[:2]:
            raise ValueError(
                f"shard_sequence: labels must be of every token, {tuple(rows.shape[:2])}, got "
                f"{tuple(labels.shape)}"
            )
        targets = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    count, padding = arguments.get("num_items_in_batch"), -rows.shape[1] % ranks.size
    share = ranks.share(F.pad(targets, (0, padding), value=IGNORED), 1).contiguous()
    if count is None:
        count = (targets != IGNORED).sum().clamp(min=1)
    return {"labels": share, "shift_labels": share, "num_items_in_batch": count}


def _refuse_compiled() -> None:
    """A graph would keep the masks of the rows with which it was made."""
    if is_compiled():
        raise RuntimeError(
            "shard_sequence works on eager models: compile its layers (model.model.layers[i]."
            "compile()), whose mixers stay eager, or unshard_sequence(model) before"
        )


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
    ranks = sharded.ranks
    if ranks is None or sharded.shares or sharded.left:
        return None
    labeled = by_name(_forward(model), args, kwargs).get("shift_labels") is not None
    tree = offered(sharded.tokens, 1)
    needs_gather = not (tree.by_rank if tree is not None else labeled and model.training)
    if needs_gather and isinstance(getattr(output, "logits", None), Tensor):
        output["logits"] = _whole_rows(output.logits, sharded.tokens, ranks)
    loss, balance = (getattr(output, name, None) for name in ("loss", "aux_loss"))
    if isinstance(getattr(output, "label_mask", None), Tensor):
        _gather_targets(sharded.targets, ranks, output)
    if isinstance(balance, Tensor) and tree is None:
        output["aux_loss"] = shards.shared_input(balance, ranks)
    if isinstance(loss, Tensor):
        if isinstance(balance, Tensor):
            scale: Any = getattr(model, "router_aux_loss_coef", None)
            scale = getattr(model.config, "router_aux_loss_coef", 0.0) if scale is None else scale
            surplus = scale * balance.detach() * (1 - 1 / ranks.size)
            loss = loss - surplus.to(loss.device)
        output["loss"] = shards.total(loss, ranks)
    return output.to_tuple() if sharded.as_tuple else output


def _whole_rows(logits: Tensor, tokens: int, ranks: shards.Ranks) -> Tensor:
    """Logits of all tokens on every rank; lazy ones stay so, and hidden states are gathered."""
    if logits.shape[1:2] != (-(-tokens // ranks.size),):
        raise ValueError(
            f"shard_sequence: logits must be of every token of a rank's share, got shape "
            f"{tuple(logits.shape)} for rows of {tokens} tokens"
        )
    if not is_lazy(logits):
        return shards.gather(real_tensor(logits), ranks, ranks.size)[:, :tokens]
    deferred: Any = cast(Any, logits)._slot.deferred
    hidden = shards.gather(deferred.hidden, ranks, ranks.size)[:, :tokens]
    return lazy_logits(deferred.rows(hidden))


def _gather_targets(targets: int, ranks: shards.Ranks, output: Any) -> None:
    """Whole rows of what TRL's head says of every target, of which its trainers make a loss."""
    shape = output["label_mask"].shape
    for name, value in list(output.items()):
        if isinstance(value, Tensor) and value.shape == shape:
            output[name] = shards.gather(value, ranks, ranks.size)[:, :targets]


# --- a call of its layers: tokens, positions, masks ---


def _run_base(
    sharded: _Sharded, base: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """The forward of the base model on this rank's tokens."""
    ranks = sharded.ranks
    if ranks is None:
        return forward(*args, **kwargs)
    _refuse_compiled()
    arguments = by_name(_forward(base), args, kwargs)
    _refuse_generation(base, arguments)
    rows = rows_of(arguments)
    assert rows is not None
    if offered(rows.shape[1], rows.shape[0]) is not None:
        raise PackingError(
            f"shard_sequence: {unpatched_class(base).__name__} was called with shared prefixes by "
            "itself; call the patched model with its head"
        )
    tree = running(rows.shape[1], rows.shape[0])
    if tree is None and not sharded.packed and has_samples(arguments):
        raise PackingError(
            f"shard_sequence: {unpatched_class(base).__name__} takes no packed rows in one process "
            "either: pass one sample per row"
        )
    if sharded.shares:
        row, arguments = _given_share(base, arguments, ranks)
    else:
        row, arguments = _share(base, arguments, ranks, tree)
    if tree is not None:
        spread_over(ranks)
    with shards.in_force(row):
        output = forward(**arguments)
    routed = getattr(output, "router_logits", None)
    if isinstance(routed, tuple):
        output["router_logits"] = tuple(_all_tokens(x, row, ranks) for x in routed)
    return output


def _share(
    base: nn.Module, arguments: dict[str, Any], ranks: shards.Ranks, tree: Tree | None = None
) -> tuple[shards.Row, dict[str, Any]]:
    """What arguments say of whole rows, and the arguments of this rank's share."""
    names = parameters_of(_forward(base))
    rows = rows_of(arguments)
    assert rows is not None
    length = rows.shape[1]
    padding = -length % ranks.size
    mask, positions = (cast(Any, arguments.get(n)) for n in ("attention_mask", "position_ids"))
    mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
    ids = None if tree is not None else sample_ids(arguments)
    plain = isinstance(positions, Tensor) and positions.ndim == 2
    row = shards.Row(
        length + padding,
        (length + padding) // ranks.size,
        padding,
        None if mask is None else F.pad(mask, (0, padding)).bool(),
        _continued(positions, padding) if plain else None,
        None if ids is None or mask is not None else _padded_ids(ids, padding),
        None if tree is None else tree.padded(length + padding),
        ranks,
    )
    shared_args = {**arguments, **_features_of_share(arguments, ranks, padding)}
    for name in ("input_ids", "inputs_embeds"):
        if shared_args.get(name) is not None:
            # the last token again: some models divide by the size of a padding token's embedding
            spare = shared_args[name][:, -1:].expand(-1, padding, *shared_args[name].shape[2:])
            shared_args[name] = ranks.share(torch.cat([shared_args[name], spare], 1), 1)
    if "position_ids" in names:
        if positions is None:
            positions_of_rank = _positions(base, arguments, padding)
        else:
            positions_of_rank = _continued(positions, padding)
        shared_args["position_ids"] = ranks.share(positions_of_rank, -1)
    if mask is not None:
        shared_args["attention_mask"] = ranks.share(F.pad(mask, (0, padding)), 1)
    elif plain and arguments.get("attention_mask") is None:
        # positions of a share must not look to transformers like those of a packed row
        shared_args["attention_mask"] = rows.new_ones(rows.shape[0], row.share, dtype=torch.bool)
    if isinstance(base, PackedModel) or "seq_idx" in shared_args:
        seq_idx = None if ids is None else _padded_ids(ids, padding).expand(rows.shape[0], -1)
        if row.tree is not None and not row.tree.is_path:  # nothing comes after one path's padding
            seq_idx = row.tree.ids(rows.device)
        shared_args = {**shared_args, "seq_idx": seq_idx} if seq_idx is not None else shared_args
    if "use_cache" in names or "use_cache" in shared_args:
        shared_args["use_cache"] = False
    return row, shared_args


def _features_of_share(
    arguments: dict[str, Any], ranks: shards.Ranks, padding: int
) -> dict[str, Any]:
    """Features of images that layers add to some tokens (Qwen3-VL): those of this rank's tokens."""
    visual: Any = arguments.get("visual_pos_masks")
    features: Any = arguments.get("deepstack_visual_embeds")
    if visual is None or features is None:
        return {}
    numbers = visual.flatten().cumsum(0).view(visual.shape) - 1
    visual, numbers = (ranks.share(F.pad(x, (0, padding)), 1) for x in (visual, numbers))
    local_features = [x[numbers[visual]] for x in features]
    return {"visual_pos_masks": visual, "deepstack_visual_embeds": local_features}


def _positions(base: nn.Module, arguments: dict[str, Any], padding: int) -> Tensor:
    """Positions of whole rows where the caller has none; RoBERTa counts tokens without padding."""
    rows = rows_of(arguments)
    assert rows is not None
    positions = torch.arange(rows.shape[1] + padding, device=rows.device)[None]
    name = "create_position_ids_from_input_ids"
    numbering: Any = next((m for m in base.modules() if hasattr(m, name)), None)
    if numbering is None:
        return positions
    first: int = numbering.padding_idx + 1
    if rows.ndim > 2:  # embeddings
        return positions + first
    spare = rows[:, -1:].expand(-1, padding)
    return cast(Tensor, getattr(numbering, name)(torch.cat([rows, spare], 1), first - 1))


def _given_share(
    base: nn.Module, arguments: dict[str, Any], ranks: shards.Ranks
) -> tuple[shards.Row, dict[str, Any]]:
    """The same where the arguments are of the rank's share already."""
    rows, positions = rows_of(arguments), cast(Any, arguments.get("position_ids"))
    assert rows is not None
    shape = None if positions is None else tuple(positions.shape)
    if shape is None or len(shape) != 2 or shape[1] != rows.shape[1]:
        raise ValueError(
            "shard_sequence(shares=True) takes position_ids (B, T / P), of which it tells samples "
            f"apart, got {shape} for {rows.shape[1]} tokens of this rank"
        )
    if arguments.get("attention_mask") is not None:
        raise ValueError(
            "shard_sequence(shares=True) takes rows without padding: no attention_mask"
        )
    all_positions = shards.gather(positions, ranks)
    tokens = all_positions.shape[1]
    expanded = rows[:, :1].expand(-1, tokens, *rows.shape[2:])  # for its shape
    row, shared_args = _share(
        base, {**arguments, "input_ids": expanded, "position_ids": all_positions}, ranks
    )
    caller_tokens = {name: arguments.get(name) for name in ("input_ids", "inputs_embeds")}
    return replace(row, ranks=None), {
        **shared_args,
        **{n: x for n, x in caller_tokens.items() if n in shared_args},
        "position_ids": positions,
    }


def _continued(positions: Tensor, padding: int) -> Tensor:
    """Positions of padding: a sample of its own."""
    if not padding:
        return positions
    spare = torch.arange(padding, device=positions.device, dtype=positions.dtype)
    return torch.cat([positions, spare.expand(*positions.shape[:-1], -1)], -1)


def _padded_ids(ids: Tensor, padding: int) -> Tensor:
    return torch.cat([ids, (ids[:, -1:] + 1).expand(-1, padding)], 1) if padding else ids


def _all_tokens(routed: Tensor, row: shards.Row, ranks: shards.Ranks) -> Tensor:
    """The logits of a router for the tokens of whole rows, as a loss of balance takes them."""
    rows = routed.reshape(-1, row.share, routed.shape[-1])
    return shards.gather(rows, ranks)[:, : row.length].flatten(0, 1)


# --- a call of a mixer ---


def _run_mixer(sharded: _Sharded, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    ranks = sharded.ranks
    if ranks is None:
        return forward(*args, **kwargs)
    if is_compiled():  # the layer around it
        forward = torch.compiler.disable(forward)
    with shards.in_force(ranks):
        return forward(*args, **kwargs)


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


def _compare(model: Any, ranks: shards.Ranks) -> bool:
    """Run a row and a packed one in one process and over ranks; every rank does both.

    Returns:
        Whether the model takes packed rows in one process.
    """
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
                    reference = model(**call, **arguments)
            except Exception as error:
                if arguments and isinstance(error, PackingError | ValueError):
                    return False
                raise PatchError(
                    f"shard_sequence: {unpatched_class(model).__name__} cannot be tried on a row "
                    f"of {TRIAL_TOKENS} tokens in one process: {type(error).__name__}: {error}"
                ) from error
            part, failure = None, None
            try:
                part = model(**call, **arguments)
            except Exception as error:
                if UNDIVIDED in str(error):
                    raise
                failure = error
        worst = torch.full((), torch.inf, device=ids.device)
        if part is not None:
            worst = _difference(part, reference, ranks)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=ranks.group)  # all ranks fail, or none
        if failure is not None or worst.isinf():
            reason = f"{type(failure).__name__}: {failure}" if failure else "another rank says why"
            raise PatchError(
                f"shard_sequence: {unpatched_class(model).__name__} cannot run on rows that are "
                f"spread over {ranks.size} ranks: {reason}"
            ) from failure
        limit = COARSE if any(p.dtype.itemsize < 4 for p in model.parameters()) else FINE
        if not float(worst) < limit:
            raise PatchError(
                f"shard_sequence: {unpatched_class(model).__name__} computes something else when "
                f"its rows are spread over {ranks.size} ranks (a relative difference of "
                f"{float(worst):.1e}{', packed' if arguments else ''}): something in it mixes "
                "tokens that is not known"
            )
    return True


def _difference(part: Any, reference: Any, ranks: shards.Ranks) -> Tensor:
    """The larger relative difference of logits or hidden states, and of losses."""
    expected, actual = _result(reference), _result(part)
    if expected.shape[:2] != (1, TRIAL_TOKENS):
        raise PatchError(
            f"shard_sequence: the model has no output of every token, got {tuple(expected.shape)} "
            f"for a row of {TRIAL_TOKENS}"
        )
    if actual.shape[1] != TRIAL_TOKENS:  # hidden states; logits are of whole rows
        actual = shards.gather(actual, ranks)[:, :TRIAL_TOKENS]
    difference: Tensor = (actual - expected).norm() / expected.norm()
    losses: list[Any] = [getattr(output, "loss", None) for output in (part, reference)]
    if all(isinstance(loss, Tensor) for loss in losses):
        by_loss = (losses[0] - losses[1]).abs() / losses[1].abs()
        difference = torch.maximum(difference, by_loss.float().to(difference.device))
    return difference.detach().clone()


def _result(output: Any) -> Tensor:
    """Logits or hidden states of every token, as numbers."""
    value = getattr(output, "logits", getattr(output, "last_hidden_state", None))
    if value is None:
        raise PatchError(
            f"shard_sequence: {type(output).__name__} has neither logits nor hidden states"
        )
    return torch.as_tensor(value[:, :]).float()
