"""Forwards of ``liger_kernel.transformers.model``, which people assign to classes and to models.

There is one for all: the model's own forward, after its head has been patched. Importing the file
of a model notes the forwards of its classes, since assigning one takes the class's own away.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from liger_multi import patching
from liger_multi._torch_private import outside_of_graphs
from liger_multi.compat.liger_kernel.losses import LigerForCausalLMLoss
from liger_multi.compat.liger_kernel.model_forward import answer, dress, names_of
from liger_multi.compat.liger_kernel.outputs import (
    CrossEntropyOutput,
    unpack_cross_entropy_result,
)
from liger_multi.losses import Head
from liger_multi.patching.options import BUILT_IN
from liger_multi.patching.swap import swapped

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
        kinds = [x for x in namespace.values() if isinstance(x, type) and x.__module__ == name]
        for model_class in kinds:
            own = vars(model_class).get("forward", lce_forward)
            if own is not lce_forward:
                _stock.setdefault(model_class, own)


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
    asked = any(x is not None for x in metrics)
    return CrossEntropyOutput(value, *metrics) if asked else value


def functions(path: str, names: str) -> dict[str, Callable[..., Any]]:
    """The forwards of a file, by their names."""
    file = path.rpartition(".")[2]
    remember((file, f"{file}_dense", f"{file}_moe"))
    of_head = {"lce_maybe_trainable_lm_head": lce_maybe_trainable_lm_head}
    return {name: of_head.get(name, lce_forward) for name in names.split()}
