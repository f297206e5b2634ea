"""The output embedding, whose loss is fused; it stays so when a vocabulary is resized."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn

from liger_multi.parameters import stored
from liger_multi.patching.changes import Change, Replace, Restore
from liger_multi.patching.head.module import (
    LazyAdaptedHead,
    LazyHead,
    ShardedHead,
    adapted_head_refusal,
    is_sharded,
    sharded_refusal,
)
from liger_multi.patching.linear import LinearByRows
from liger_multi.patching.lora.fused import FusedLora
from liger_multi.patching.options import Request
from liger_multi.patching.report import Skipped
from liger_multi.patching.swap import (
    Swap,
    apply,
    buried,
    has_own_forward,
    loss_conflict,
    stock_class,
    swapped,
)


def with_heads(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model that may have an output embedding."""
    for module in model.modules():
        if callable(getattr(module, "get_output_embeddings", None)):
            yield module


def find_heads(model: nn.Module) -> tuple[list[tuple[str, nn.Module]], str]:
    """The output embeddings of a model with their paths, or the reason why there is none.

    Linear layers in PyTorch's loss modules are output embeddings too.
    """
    outputs = (_output_embedding(module) for module in with_heads(model))
    head = next((each for each in outputs if each is not None), None)
    paths = {id(m): path for path, m in model.named_modules()}
    heads = [] if head is None else [(paths.get(id(h), ""), h) for h in _inside(head)]
    for path, loss in model.named_modules():
        within = _LOSS_MODULE is not None and isinstance(loss, _LOSS_MODULE)
        if within and all(h is not loss.linear for _, h in heads):
            heads.append((f"{path}.linear".strip("."), loss.linear))
    missing = "the model has no output embedding (get_output_embeddings gives none)"
    return heads, "" if heads else missing


def inner_heads(model: nn.Module, heads: list[nn.Module]) -> Iterator[tuple[str, str]]:
    """Linear output embeddings of models within a model, which are not ``heads`` and not patched.

    Of each its path, and that of the model that it belongs to.
    """
    paths = {id(m): path for path, m in model.named_modules()}
    known = {id(part) for head in heads for part in head.modules()}
    for owner in with_heads(model):
        head = _output_embedding(owner)
        is_inner = id(head) not in known and isinstance(head, nn.Linear) and id(head) in paths
        if is_inner and not isinstance(head, LazyHead) and owner is not model:
            known.add(id(head))
            yield paths[id(head)], paths[id(owner)]


def _output_embedding(owner: nn.Module) -> nn.Module | None:
    """What a model says is its output embedding."""
    try:
        head = cast(Any, owner).get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return head if isinstance(head, nn.Module) else None


def _inside(head: nn.Module) -> list[nn.Module]:
    """A head itself, or the copies and the original in a wrapper of ``modules_to_save``."""
    copies = getattr(head, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):
        original = getattr(head, "original_module", None)
        return [*copies.values(), *([original] if isinstance(original, nn.Module) else [])]
    return [head]


def _is_plain(head: nn.Module) -> bool:
    """Whether a layer is a linear one with PyTorch's forward, as far as a class on top shows."""
    return isinstance(head, nn.Linear) and (
        buried(head) or stock_class(head).forward is nn.Linear.forward
    )


_REFUSALS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda head: not isinstance(head, nn.Linear) and _holds_codes(head),
        (
            "the output embedding is a {kind} with quantized storage ({dtype}); its "
            "logits come from its own call"
        ),
    ),
    (
        lambda head: not _is_plain(head),
        "the output embedding is a {kind}, not a plain linear layer",
    ),
    (
        lambda head: _holds_codes(head),
        (
            "the weight of the output embedding is stored as {dtype}, "
            "which only its own call can turn into numbers"
        ),
    ),
    (
        lambda head: type(stored(head)).__module__.startswith("torchao."),
        "the weight of the output embedding is a {weight}, whose products are its own",
    ),
)
"""Why a head that is nobody else's has no lazy logits: the first that holds, with its reason."""


def head_refusal(head: nn.Module, owners: Iterable[nn.Module] = ()) -> str | None:
    """Why a module cannot be a lazy head, or None; ``owners`` are the modules around it."""
    class_name = type(head).__name__
    if hasattr(head, "base_layer"):
        if "forward" in vars(head) and not has_own_forward(head):
            return f"somebody else replaced the forward of this {class_name}"
        return adapted_head_refusal(head)
    parallel = is_sharded(head, owners)
    if parallel and (reason := sharded_refusal(head)):
        return reason
    if "forward" in vars(head) and not has_own_forward(head) and not parallel:
        return f"somebody else replaced the forward of this {class_name}"
    reason = next((text for holds, text in _REFUSALS if holds(head)), None)
    if reason is None:
        return None
    weight = type(stored(head)).__name__
    return reason.format(kind=class_name, dtype=_dtype(head), weight=weight)


def _holds_codes(head: nn.Module) -> bool:
    """Whether a weight is integers or FP8."""
    dtype = _dtype(head)
    return dtype is not None and (dtype.itemsize < 2 or not dtype.is_floating_point)


def _dtype(head: nn.Module) -> torch.dtype | None:
    """The dtype of a weight that is not computed."""
    weight = stored(head)
    return None if weight is None else weight.dtype


def behavior(head: nn.Module, owners: Iterable[nn.Module] = ()) -> type[LazyHead]:
    """The class of lazy heads that fits a module which is not refused."""
    if hasattr(head, "base_layer"):
        return LazyAdaptedHead
    return ShardedHead if is_sharded(head, owners) else LazyHead


_LOSSES = ("fused_linear_cross_entropy", "cross_entropy")


def find_loss_head(model: nn.Module, request: Request) -> Iterator[Change]:
    """The output embedding."""
    settings = request.head
    heads, missing = find_heads(model)
    if settings is None:
        for path, module in heads:
            if not isinstance(module, LinearByRows):
                yield Restore(path, module)
        return
    op = _LOSSES[0] if settings.fused else _LOSSES[1]
    if missing:
        yield Skipped("", op, missing, strict=request.whole)
    theirs = next((why for m in with_heads(model) if (why := loss_conflict(m))), None)
    for path, module in heads:
        if settings.fused and hasattr(module, "base_layer"):
            yield from _unwrapped(path, module)
        if isinstance(module, FusedLora) and not head_refusal(module):  # it is more than that
            yield Restore(path, module, instead_of="lora")
        around = [m for p, m in model.named_modules() if not p or path.startswith(f"{p}.")]
        refusal = theirs or head_refusal(module, around)
        if refusal:
            for name, inner in module.named_modules():  # patched before an adapter came on top
                if not isinstance(inner, (FusedLora, LinearByRows)):
                    yield Restore(f"{path}.{name}".strip("."), inner)
            yield Skipped(path, op, refusal)
            continue
        swap = Swap(op, stock_class(module), behavior(module, around), settings)
        yield Replace(path, module, swap, op, settings.shown)
        follow()
    for path, owner in inner_heads(model, [head for _, head in heads]):
        call = f"liger_multi.patch(model.{owner})"
        reason = f"it is the output embedding of a model within the model: {call} patches it"
        yield Skipped(path, op, reason, strict=False)


def _unwrapped(path: str, module: nn.Module) -> Iterator[Change]:
    """A head that was patched before an adapter came on top of it is its plain base again."""
    for name, inner in module.named_modules():
        if isinstance(inner, LazyHead) and inner is not module:
            yield Restore(f"{path}.{name}", inner)


_LOSS_MODULE: Any = getattr(nn, "LinearCrossEntropyLoss", None)  # since PyTorch 2.13
_MARK = "_liger_multi_resizes"


def follow() -> None:
    """Wrap ``PreTrainedModel.resize_token_embeddings``, once; models without a patch see no change.

    A method of the class, since nothing is written into models: copies would hold the original's.
    """
    library = sys.modules.get("transformers.modeling_utils")
    model_class = getattr(library, "PreTrainedModel", None)
    if model_class is None or hasattr(model_class.resize_token_embeddings, _MARK):
        return
    stock = model_class.resize_token_embeddings

    @functools.wraps(stock)
    def resize_token_embeddings(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = [swapped(head) for _, head in find_heads(self)[0] if isinstance(head, LazyHead)]
        result = stock(self, *args, **kwargs)
        for _, head in find_heads(self)[0] if any(before) else ():
            swap = before[0]
            if swap is None or stock_class(head) is not swap.stock or head_refusal(head):
                continue
            if behavior(head) is swap.behavior:
                apply(head, swap)
        return result

    setattr(resize_token_embeddings, _MARK, True)
    model_class.resize_token_embeddings = resize_token_embeddings
