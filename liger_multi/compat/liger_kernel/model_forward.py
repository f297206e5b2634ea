"""What a model's forward takes and returns once it is patched by the names of Liger-Kernel.

Liger-Kernel's forwards hand what they are given to the loss: ``label_smoothing``,
``use_token_scaling``, ``return_token_accuracy`` and the like. Here the forward stays the model's
own. It hands keywords to ``loss_function``, and that is where they are read.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from liger_multi.compat.liger_kernel import functional
from liger_multi.compat.liger_kernel.losses import LigerFusedLinearCrossEntropyLoss
from liger_multi.compat.liger_kernel.output_classes import extended, make_loaded
from liger_multi.compat.liger_kernel.outputs import unpack_cross_entropy_result
from liger_multi.losses import Head
from liger_multi.patching.head.protocol import LazyLogits
from liger_multi.patching.head.traced import TracedLogits, real_logits
from liger_multi.patching.swap import Patched, Swap, apply, swapped

_OP = "loss options"
_CAP = "final_logit_softcapping"
_OF_THE_CALL = ("reduction", "ignore_index", "softcap")
OPTIONS = frozenset({*LigerFusedLinearCrossEntropyLoss().options, _CAP} - {*_OF_THE_CALL})
"""Keywords of a forward that change what is lost or returned."""
_FOUND = "liger_found"
"""Keyword of a forward with the place for what the loss finds beside itself."""
_BESIDE = ("token_accuracy", "predicted_tokens")
_OUTPUTS = ("loss", "z_loss", *_BESIDE)


def names_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a forward's arguments after the model."""
    return tuple(inspect.signature(forward).parameters)[1:]


def answer(
    model: Any,
    stock: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: tuple[str, ...],
) -> Any:
    """Call a model's own forward, with the options of Liger-Kernel's.

    Args:
        model: The model.
        stock: Its forward.
        args: Of the call.
        kwargs: Of the call. ``skip_logits`` is what Liger-Kernel fuses the loss by, in training if
            it is not given; options count there alone. ``shift_labels`` without ``labels`` have a
            loss.
        names: Of the arguments that ``args`` may be.

    Raises:
        ValueError: ``skip_logits`` without labels.
        NotImplementedError: An option that does not reach the loss of this model.
    """
    if _FOUND in kwargs:  # a forward that was assigned to a class, below the one here
        return stock(*args, **kwargs)
    skip = kwargs.pop("skip_logits", None)
    arguments = {**dict(zip(names, args)), **kwargs}
    labels, shifted = arguments.get("labels"), arguments.get("shift_labels")
    if labels is None and shifted is None:
        if skip:
            raise ValueError("skip_logits is True, but labels and shift_labels are None")
        return extended(stock(*args, **kwargs))
    if labels is None:
        args, kwargs = (), {**arguments, "labels": shifted}  # a model asks for them alone
    asked = sorted(k for k in OPTIONS & {*kwargs} if not _off(kwargs[k]))
    if not asked or not (model.training if skip is None else skip):
        return extended(stock(*args, **kwargs))
    outputs: dict[str, Any] = {}
    output = stock(*args, **kwargs, **{_FOUND: outputs})
    lost = [] if outputs else [name for name in asked if not name.startswith("return_")]
    if lost:  # what is only returned is None then
        raise NotImplementedError(
            f"{type(model).__name__} computes its loss itself, and {', '.join(lost)} did not "
            "reach it; compute the loss of outputs.logits with liger_multi.losses"
        )
    return extended(output, **{name: outputs.get(name) for name in _BESIDE})


def _off(option: Any) -> bool:
    return option is None or option is False


def loss(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A model's own loss function, or, where options of Liger-Kernel are given, the fused loss."""
    outputs = kwargs.pop(_FOUND, None)
    if outputs is None:
        return stock(*args, **kwargs)
    options = {name: kwargs[name] for name in OPTIONS & {*kwargs}}
    arguments = {**dict(zip(("logits", "labels", "vocab_size"), args)), **kwargs}
    cap = options.pop(_CAP, None)
    target = arguments.get("shift_labels")
    ignored = arguments.get("ignore_index", -100)
    if target is None:
        target = F.pad(arguments["labels"], (0, 1), value=ignored)[..., 1:]
    items = arguments.get("num_items_in_batch")
    options |= {"ignore_index": ignored, "reduction": "mean" if items is None else "sum"}
    outputs |= _outputs(arguments["logits"], target, cap, options)
    if isinstance(items, Tensor):
        items = items.to(outputs["loss"].device)
    return outputs["loss"] if items is None else outputs["loss"] / items


def _outputs(
    logits: Any, target: Tensor, cap: float | None, options: dict[str, Any]
) -> dict[str, Any]:
    """The loss and what else is asked for, in one pass of the head where the logits are lazy.

    Raises:
        NotImplementedError: Tokens are scaled, and the logits are not lazy.
    """
    lazy = isinstance(logits, (LazyLogits, TracedLogits))
    head = logits.as_head() if lazy else None
    if head is None:
        return _of_logits(real_logits(logits), target, cap, options)
    scale, own = head.pop("logit_scale"), head.pop("softcap")
    options = {"accum_dtype": head["accumulate"], **options, "softcap": own or cap}

    def run(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
        rows = hidden.flatten(0, -2)
        rows = rows if scale == 1.0 else rows * scale
        call = functional.liger_fused_linear_cross_entropy
        outputs = call(rows, weight, target.flatten().to(rows.device), bias, **options)
        return unpack_cross_entropy_result(outputs)

    return dict(zip(_OUTPUTS, Head(**head).run(run), strict=True))


def _of_logits(
    logits: Tensor, target: Tensor, cap: float | None, options: dict[str, Any]
) -> dict[str, Any]:
    if options.pop("use_token_scaling", False):
        raise NotImplementedError(
            "use_token_scaling: the logits of this model are computed (docs/logits.md says when); "
            "use losses.sequence_loss(outputs.logits, ..., loss_type='dft')"
        )
    options = {k: v for k, v in options.items() if k not in ("ce_weight", "accum_dtype")} | {
        "weight": options.get("ce_weight"),
        "softcap": cap,
    }
    rows = logits.flatten(0, -2).float()
    outputs = functional.liger_cross_entropy(rows, target.flatten().to(rows.device), **options)
    return dict(zip(_OUTPUTS, unpack_cross_entropy_result(outputs), strict=True))


class LigerModel(Patched):
    """A model whose forward takes the options of Liger-Kernel's; everything else is its own."""

    loose: ClassVar[bool] = True

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Make the forward with the class."""
        super().__init_subclass__(**keywords)
        if "_liger_multi_swap" in vars(cls):
            model_class: Any = cls
            model_class.forward, model_class.loss_function = _forward(cls), _loss_function(cls)


def _forward(cls: Any) -> Callable[..., Any]:
    swap: Swap = vars(cls)["_liger_multi_swap"]
    below: Any = vars(cls)["_liger_multi_inner"]  # its forward may be replaced at any time

    known, names = below.forward, names_of(below.forward)  # no compiler traces a signature

    @functools.wraps(swap.stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        now = below.forward
        order = names if now is known else names_of(now)
        return answer(self, functools.partial(now, self), args, kwargs, order)

    return forward


def _loss_function(cls: Any) -> property:
    """The model's own loss, which is asked where no option is given."""
    own: Any = inspect.getattr_static(vars(cls)["_liger_multi_inner"], "loss_function")
    read: Any = getattr(own, "fget", None)

    def get(self: Any) -> Callable[..., Any]:
        return functools.partial(loss, read(self) if read else functools.partial(own, self))

    return property(get, getattr(own, "fset", None))


def dress(model: nn.Module) -> None:
    """Let a model with a patched head take the options of Liger-Kernel's forwards."""
    from transformers import PreTrainedModel

    whole: Any = model
    base = whole.get_base_model() if hasattr(model, "get_base_model") else whole
    if not isinstance(base, PreTrainedModel) or base.get_output_embeddings() is None:
        return
    make_loaded()
    held = swapped(base)
    if held is None:
        apply(base, Swap(_OP, type(base), LigerModel, None))
    elif held.around is None and held.behavior is not LigerModel:
        apply(base, replace(held, around=LigerModel))
