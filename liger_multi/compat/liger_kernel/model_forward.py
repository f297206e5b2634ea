"""What a model's forward takes and returns once it is patched by the names of Liger-Kernel.

Liger-Kernel's forwards hand what they are given to the loss: ``label_smoothing``,
``use_token_scaling``, ``return_token_accuracy`` and the like. Here the forward stays the model's
own. It hands keywords to ``loss_function``, and that is where they are read.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_multi import ops, patching
from liger_multi._torch_private import outside_of_graphs
from liger_multi.compat.liger_kernel import functional
from liger_multi.compat.liger_kernel.functional import casting_of, liger_rms_norm
from liger_multi.compat.liger_kernel.modules import (
    LigerForCausalLMLoss,
    LigerFusedLinearCrossEntropyLoss,
)
from liger_multi.compat.liger_kernel.signatures import (
    CrossEntropyOutput,
    extended,
    make_loaded,
    unpack_cross_entropy_result,
)
from liger_multi.losses import Head
from liger_multi.patching.head.protocol import LazyLogits
from liger_multi.patching.head.traced import TracedLogits, real_logits
from liger_multi.patching.options import BUILT_IN
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
    requested = sorted(k for k in OPTIONS & {*kwargs} if not _is_off(kwargs[k]))
    if not requested or not (model.training if skip is None else skip):
        return extended(stock(*args, **kwargs))
    outputs: dict[str, Any] = {}
    output = stock(*args, **kwargs, **{_FOUND: outputs})
    dropped = [] if outputs else [name for name in requested if not name.startswith("return_")]
    if dropped:  # what is only returned is None then
        raise NotImplementedError(
            f"{type(model).__name__} computes its loss itself, and {', '.join(dropped)} did not "
            "reach it; compute the loss of outputs.logits with liger_multi.losses"
        )
    return extended(output, **{name: outputs.get(name) for name in _BESIDE})


def _is_off(option: Any) -> bool:
    return option is None or option is False


def loss(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A model's own loss function, or, where options of Liger-Kernel are given, the fused loss."""
    outputs = kwargs.pop(_FOUND, None)
    if outputs is None:
        return stock(*args, **kwargs)
    options = {name: kwargs[name] for name in OPTIONS & {*kwargs}}
    arguments = {**dict(zip(("logits", "labels", "vocab_size"), args)), **kwargs}
    cap = options.pop(_CAP, None)
    target, ignored = arguments.get("shift_labels"), arguments.get("ignore_index", -100)
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
    scale, own_cap = head.pop("logit_scale"), head.pop("softcap")
    options = {"accum_dtype": head["accumulate"], **options, "softcap": own_cap or cap}

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
        super().__init_subclass__(**keywords)
        if "_liger_multi_swap" in vars(cls):
            model_class: Any = cls
            model_class.forward, model_class.loss_function = _forward(cls), _loss_function(cls)


def _forward(cls: Any) -> Callable[..., Any]:
    swap: Swap = vars(cls)["_liger_multi_swap"]
    inner_class: Any = vars(cls)["_liger_multi_inner"]  # its forward may be replaced at any time

    first_forward = inner_class.forward
    names = names_of(first_forward)  # no compiler traces a signature

    @functools.wraps(swap.stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner_forward = inner_class.forward
        order = names if inner_forward is first_forward else names_of(inner_forward)
        return answer(self, functools.partial(inner_forward, self), args, kwargs, order)

    return forward


def _loss_function(cls: Any) -> property:
    """The model's own loss, which is asked where no option is given."""
    function: Any = inspect.getattr_static(vars(cls)["_liger_multi_inner"], "loss_function")
    getter: Any = getattr(function, "fget", None)

    def get(self: Any) -> Callable[..., Any]:
        own = getter(self) if getter else functools.partial(function, self)
        bound = functools.partial(loss, own)
        if not torch.compiler.is_compiling():  # trainers read there whether it takes a count
            bound.__wrapped__ = own  # type: ignore[attr-defined]
        return bound

    return property(get, getattr(function, "fset", None))


def dress(model: nn.Module) -> None:
    """Let a model with a patched head take the options of Liger-Kernel's forwards."""
    from transformers import PreTrainedModel

    outer: Any = model
    base = outer.get_base_model() if hasattr(model, "get_base_model") else outer
    if not isinstance(base, PreTrainedModel) or base.get_output_embeddings() is None:
        return
    make_loaded()
    current = swapped(base)
    if current is None:
        apply(base, Swap(_OP, type(base), LigerModel, None))
    elif current.around is None and current.behavior is not LigerModel:
        apply(base, replace(current, around=LigerModel))


# --- forwards that people assign to classes and to models: the model's own, head patched ---

_READY = "_liger_multi_forward_ready"

_HEADS = ("fused_linear_cross_entropy", "cross_entropy")
_HEAD_ALONE = {op: op == _HEADS[0] for op in BUILT_IN}
_stock: dict[type, Callable[..., Any]] = {}
"""Class of transformers to its own forward."""


def remember(folders: Iterable[str]) -> None:
    """Note the forwards of the classes in modeling files that this transformers has."""
    for folder in folders:
        name = f"transformers.models.{folder}.modeling_{folder}"
        try:
            namespace = vars(importlib.import_module(name))
        except ModuleNotFoundError:
            continue
        model_classes = [
            x for x in namespace.values() if isinstance(x, type) and x.__module__ == name
        ]
        for model_class in model_classes:
            forward = vars(model_class).get("forward", lce_forward)
            if forward is not lce_forward:
                _stock.setdefault(model_class, forward)


def _make_ready(model: Any) -> None:
    """Patch the head, where it is not patched, and note that this was done."""
    swaps = (swapped(module) for module in model.modules())
    if not any(swap is not None and swap.op in _HEADS for swap in swaps):
        patching.patch(model, **_HEAD_ALONE)
    dress(model)
    setattr(model, _READY, True)


# A graph breaks at the first call of a model, and at no other.
outside_of_graphs(_make_ready, "lce_forward patches the head of a model at its first call")


def lce_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The model's own forward, whose head is patched at the first call.

    Its keywords are those of :func:`model_forward.answer`. Logits are computed if they are read.

    Raises:
        TypeError: A class whose file of ``liger_kernel.transformers.model`` was not imported.
    """
    stock = next(
        (_stock[model_class] for model_class in type(self).__mro__ if model_class in _stock), None
    )
    if stock is None:
        raise TypeError(
            f"lce_forward: the forward of {type(self).__qualname__} is not known; import the file "
            "of its model from liger_kernel.transformers.model before it is assigned"
        )
    if not getattr(self, _READY, False):
        _make_ready(self)
    names = names_of(stock) if args else ()
    return answer(self, functools.partial(stock, self), args, kwargs, names)


def lce_maybe_trainable_lm_head(
    self: Any,
    hidden_states: Tensor,
    hidden_size: int,
    labels: Tensor | None,
    shift_labels: Tensor | None,
    **loss_kwargs: Any,
) -> Any:
    """The fused loss of a model's head, which may have an adapter or be sharded by FSDP."""

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
        return unpack_cross_entropy_result(
            LigerForCausalLMLoss(
                hidden, weight, labels, hidden_size, shift_labels=shift_labels, **loss_kwargs
            )
        )

    value, *metrics = Head(hidden_states, self.lm_head).run(loss)
    has_metrics = any(x is not None for x in metrics)
    return CrossEntropyOutput(value, *metrics) if has_metrics else value


def functions(path: str, names: str) -> dict[str, Callable[..., Any]]:
    """The forwards of a file, by their names."""
    file = path.rpartition(".")[2]
    remember((file, f"{file}_dense", f"{file}_moe"))
    of_head = {"lce_maybe_trainable_lm_head": lce_maybe_trainable_lm_head}
    return {name: of_head.get(name, lce_forward) for name in names.split()}


# --- one module becomes ours in place: for functions that people register for their own types ---


def _bind_method_to_module(module: nn.Module, method_name: str, new_method: Callable) -> None:  # type: ignore[type-arg]
    """Give one module a method of its own."""
    vars(module)[method_name] = new_method.__get__(module, type(module))


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The module, or the copies that an adapter's wrapper has of it."""
    copies = getattr(module, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):
        yield from copies.values()
        yield module.original_module  # type: ignore[misc]
    else:
        yield module


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    return liger_rms_norm(
        hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode
    )


def _layer_norm(self: Any, hidden_states: Tensor) -> Tensor:
    return ops.layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)


def _eps_of(module: Any, usual: float) -> float:
    names = ("variance_epsilon", "eps")
    eps = next((getattr(module, name) for name in names if getattr(module, name, None)), usual)
    return float(eps)


def _patch_rms_norm_module(
    module: nn.Module,
    offset: float = 0.0,
    eps: float = 1e-6,
    casting_mode: str | int = "llama",
    in_place: bool = True,
    row_mode: bool | None = None,
) -> None:
    """Let a norm with a weight run :func:`liger_multi.ops.rms_norm`; its own eps has precedence."""
    for part in _parts(module):
        norm: Any = part
        norm.offset, norm.casting_mode = offset, casting_mode
        norm.casting = casting_of("rms_norm", casting_mode)
        norm.variance_epsilon, norm.in_place, norm.row_mode = _eps_of(part, eps), in_place, row_mode
        _bind_method_to_module(part, "forward", _rms_norm)


def _patch_layer_norm_module(module: nn.Module, eps: float = 1e-6) -> None:
    """Let a layer norm run :func:`liger_multi.ops.layer_norm`; its own eps has precedence."""
    for part in _parts(module):
        norm: Any = part
        norm.variance_epsilon = _eps_of(part, eps)
        _bind_method_to_module(part, "forward", _layer_norm)


def _patch_swiglu_module(module: nn.Module, liger_module: type[nn.Module]) -> None:
    """Let an MLP run the forward of one of the MLPs of ``liger_kernel.transformers``."""
    for name, value in inspect.getmembers(liger_module, lambda x: isinstance(x, property)):
        if not hasattr(module, name):  # what forward reads of the configuration
            setattr(module, name, value.fget(module))
    _bind_method_to_module(module, "forward", liger_module.forward)


def _gelu_mlp(self: Any, x: Tensor) -> Tensor:
    inner = ops.geglu(self.gate_proj(x), self.up_proj(x), approximate="tanh")
    return self.down_proj(inner)  # type: ignore[no-any-return]


def _patch_geglu_module(module: nn.Module) -> None:
    """Let an MLP with gate_proj, up_proj and down_proj run :func:`liger_multi.ops.geglu`."""
    _bind_method_to_module(module, "forward", _gelu_mlp)
