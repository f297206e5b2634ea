"""Shared prefixes in TRL: the calls that score a trainer's answers compute every prompt once.

The trainers of TRL give a model a fused head, and score answers by calls of the model with
``fused_lm_head=True`` and labels: one call for the rows of a micro-batch. :func:`share_prefixes`
puts a function around that forward, which computes the same output from the trees of the rows.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from liger_multi import trees
from liger_multi.errors import PatchError
from liger_multi.patching import patch, real_logits, register_attention
from liger_multi.patching.attention.interface import NAME

MARK = "_liger_multi_scored"
"""Attribute of the function that shares prefixes, with the forward that it stands around."""
_SERVED = {"input_ids", "attention_mask", "labels", "output_router_logits", "use_cache"}
_CLOSURE = {"temperature", "outputs", "cast_lm_head_to_fp32"}
"""What TRL's forward reads of the options of its head."""
ROWS = 256
"""Tokens whose logits exist at a time, for what is logged of them."""
_STATISTICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "log_sum_sq_probs": lambda logits, _: (2 * logits.log_softmax(-1)).logsumexp(-1),
    "mean_logits": lambda logits, _: logits.mean(-1),
    "is_top1": lambda logits, targets: (logits.argmax(-1) == targets).float(),
}
"""Numbers of every predicted token, from its logits ``(tokens, classes)`` in fp32."""


def share_prefixes(model: nn.Module, *, shortest: int = 16) -> None:
    """Let TRL's scoring calls of a patched model compute each prompt once.

    Log-probabilities, entropies and the other outputs are those of the rows by themselves, within
    rounding. Calls with images, and rows that share nothing, run as before. Attention of the model
    is set to ours, which keeps branches apart.

    Args:
        model: The model of a ``GRPOTrainer``, ``RLOOTrainer`` or ``DPOTrainer``, patched, perhaps
            with adapters of PEFT.
        shortest: How many tokens answers have in common at least that are shared as well.

    Raises:
        PatchError: TRL gave the model no fused head, or one that computes in fp32.
        ValueError: The model cannot use our attention.
    """
    module, scored, options, autocasts = _scored(model)
    if options["cast_lm_head_to_fp32"]:
        raise PatchError("share_prefixes: cast_lm_head_to_fp32=True is not served, got it from TRL")
    register_attention()
    if module.config._attn_implementation != NAME:
        module.set_attn_implementation(NAME)

    @functools.wraps(scored)
    def forward(*args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not args and fused_lm_head and _is_served(kwargs):
            batch = _batch(kwargs, shortest)
            if batch.tree.tokens < int(kwargs["attention_mask"].sum()):
                with contextlib.ExitStack() as stack:
                    for autocast in autocasts:
                        stack.enter_context(autocast)
                    return _output(module, batch, kwargs, options)
        return scored(*args, fused_lm_head=fused_lm_head, **kwargs)

    setattr(forward, MARK, scored)
    vars(module)["forward"] = forward


def unshare_prefixes(model: nn.Module) -> None:
    """Take back what :func:`share_prefixes` did, but for the attention."""
    for module in model.modules():
        scored = getattr(vars(module).get("forward"), MARK, None)
        if scored is not None:
            vars(module)["forward"] = scored


def _scored(
    model: nn.Module,
) -> tuple[Any, Callable[..., Any], Mapping[str, Any], list[torch.autocast]]:
    """The module that TRL gave a fused head, its forward, the head's options, and autocasts.

    accelerate puts functions around the forward of a model that trains in mixed precision.
    """
    for module, forward in _forwards(model):
        autocasts: list[torch.autocast] = []
        for function in _wrapped(forward):
            variables = inspect.getclosurevars(function).nonlocals
            if variables.keys() >= _CLOSURE:
                return module, forward, variables, autocasts
            autocasts += [v for v in variables.values() if isinstance(v, torch.autocast)]
    raise PatchError(
        f"share_prefixes: TRL gave {type(model).__name__} no fused head; pass the model of a "
        "GRPOTrainer, RLOOTrainer or DPOTrainer of TRL 1.16, after the trainer was made"
    )


def _forwards(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    for module in model.modules():
        forward = vars(module).get("forward")
        if forward is not None:
            yield module, getattr(forward, MARK, forward)


def _wrapped(forward: Any) -> Iterator[Any]:
    """The functions that a forward consists of, the outermost first."""
    while forward is not None:
        forward = getattr(forward, "__func__", forward)
        if inspect.isfunction(forward):
            yield forward
        forward = getattr(forward, "__wrapped__", None)


def _is_served(kwargs: Mapping[str, Any]) -> bool:
    names = {name for name, value in kwargs.items() if value is not None}
    tensors = [kwargs.get(n) for n in ("input_ids", "attention_mask", "labels")]
    alike = all(isinstance(x, Tensor) and x.ndim == 2 for x in tensors)
    return names <= _SERVED and alike and len(kwargs["input_ids"]) > 1


def _batch(kwargs: Mapping[str, Any], shortest: int) -> trees.Batch:
    """The rows as trees: a prompt is what stands before a row's first label."""
    mask = kwargs["attention_mask"] != 0
    answered = (kwargs["labels"] != -100).cumsum(1) > 0
    lengths = (mask & ~answered).sum(1)
    return trees.from_batch(
        kwargs["input_ids"], mask, prompt_lengths=lengths.tolist(), shortest=shortest
    )


def _output(
    module: Any, batch: trees.Batch, kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> Any:
    """What TRL's forward returns."""
    from trl.trainer.utils import FusedCausalLMOutput

    names, text = set(options["outputs"]), module.config.get_text_config()
    default = getattr(text, "output_router_logits", False)
    routed = bool(kwargs.get("output_router_logits", default))
    arguments: dict[str, Any] = {"output_router_logits": True} if routed else {}
    scores = trees.scores(
        functools.partial(type(module).forward, module),
        batch,
        temperature=options["temperature"],
        entropy="entropy" in names,
        **arguments,
    )
    labels = kwargs["labels"][:, 1:]
    mask = labels != -100

    def placed(values: Tensor) -> Tensor:
        return batch.to_rows(values)[:, 1:].masked_fill(~mask, 0)

    statistics = _statistics(scores.output.logits, batch, options["temperature"], names)
    others = {name: placed(values) for name, values in statistics.items()}
    if "is_top1" in others:
        others["is_top1"] = others["is_top1"].bool()
    log_probs = placed(scores.log_probs)
    aux_loss = scores.output.aux_loss if routed else None
    loss = -log_probs.sum() / mask.sum().clamp(min=1)
    if aux_loss is not None:
        loss = loss + getattr(text, "router_aux_loss_coef", 0.0) * aux_loss
    return FusedCausalLMOutput(
        loss=loss,
        log_probs=log_probs,
        entropy=None if scores.entropy is None else placed(scores.entropy),
        label_mask=mask,
        aux_loss=aux_loss,
        **others,
    )


def _statistics(
    logits: Any, batch: trees.Batch, temperature: float, names: set[str]
) -> dict[str, Tensor]:
    """What TRL logs of the logits that predict a token, in chunks of these tokens."""
    chunks: list[list[Tensor]] = []
    requested = [name for name in _STATISTICS if name in names]
    for sources, targets in zip(batch.sources.split(ROWS), batch.targets.split(ROWS), strict=True):
        if requested:
            with torch.no_grad():
                part = (real_logits(logits[:, sources]).detach()[0] / temperature).float()
                chunks.append([_STATISTICS[name](part, targets) for name in requested])
    return {n: torch.cat(parts) for n, parts in zip(requested, zip(*chunks, strict=True))}


class SharedPrefixes:
    """A mixin for trainers of TRL: policy and reference model compute each prompt once.

        class Trainer(SharedPrefixes, GRPOTrainer): ...

    Both models are patched. With the callback's ``shared_prefixes=True`` only the policy shares.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the trainer, then patch its models."""
        super().__init__(*args, **kwargs)
        trainer: Any = self
        for model in (trainer.model, getattr(trainer, "ref_model", None)):
            if model is not None:
                module, scored, *_ = _scored(model)
                vars(module).pop("forward")  # a module with a forward of its own is not patched
                patch(model)
                vars(module)["forward"] = scored
                share_prefixes(model)
