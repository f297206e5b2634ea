"""Logits that are not computed, for where a tensor subclass cannot go.

That is inside ``torch.compile`` and in the replicas of ``nn.DataParallel``: a plain object with
PyTorch's function protocol, which the compiler traces through.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi.patching import rows
from liger_multi.patching.loss import CrossEntropyCall, fused, on_real
from liger_multi.patching.protocol import GRADIENT_BY_LOGITS, warn_once
from liger_multi.patching.recipe import Recipe
from liger_multi.patching.steps import RECORDED

# what others want to hold as a tensor, which these logits cannot be
_READ = {Tensor.softmax, torch.softmax, F.softmax, Tensor.exp, torch.exp}


class TracedLogits:
    """Logits of a recipe; attributes that are not here are those of the real logits."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.cached: Tensor | None = None

    def real(self) -> Tensor:
        """The real logits, computed at most once."""
        if self.cached is None:
            self.cached = self.recipe.compute()
        return self.cached

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record or fuse, else compute."""
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            call = CrossEntropyCall(*args, **kwargs)
            if isinstance(call.input, TracedLogits):
                loss = fused(call.input.recipe, call)
                options = call.input.recipe.settings.on_real
                if loss is None and options is not None:
                    loss = on_real(call.input.real(), options, call)
                if loss is not None:
                    return loss
        elif func is torch.autograd.grad and any(
            isinstance(x, TracedLogits) and x.cached is None for x in args[1]
        ):
            raise RuntimeError(GRADIENT_BY_LOGITS)
        elif func in RECORDED and func not in _READ and args and isinstance(args[0], TracedLogits):
            step = RECORDED[func](args[0].recipe, *args[1:], **kwargs)
            if step is not None:
                return args[0]._derived(step)
        return func(*[_real(a) for a in args], **{k: _real(v) for k, v in kwargs.items()})

    def _derived(self, recipe: Recipe) -> TracedLogits:
        return type(self)(recipe)

    def _step(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        step = RECORDED[func](self.recipe, *args, **kwargs)
        return func(self.real(), *args, **kwargs) if step is None else self._derived(step)

    def _rows(self, hidden: Any) -> Any:
        return None if hidden is None else self._derived(self.recipe.rows(hidden))

    @property
    def shape(self) -> torch.Size:
        """Shape of the logits."""
        return self.recipe.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the logits."""
        return self.recipe.dtype

    @property
    def device(self) -> torch.device:
        """Device of the logits."""
        return self.recipe.hidden.device

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.recipe.hidden.ndim

    def size(self, dim: int | None = None) -> Any:
        """Shape, or the length of one axis."""
        if dim is None:
            return self.shape
        last = dim in (-1, self.ndim - 1)
        return self.recipe.vocabulary if last else self.recipe.hidden.shape[dim]

    def dim(self) -> int:
        """Number of axes."""
        return self.recipe.hidden.ndim

    def float(self) -> Any:
        """As fp32."""
        return self._step(Tensor.float)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Another dtype, or another device."""
        return self._step(Tensor.to, *args, **kwargs)

    def contiguous(self) -> Any:
        """These logits."""
        return self

    def __mul__(self, other: Any) -> Any:
        return self._step(Tensor.mul, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._step(Tensor.div, other)

    def tanh(self) -> Any:
        """Elementwise tanh."""
        return self._step(Tensor.tanh)

    def view(self, *sizes: Any) -> Any:
        """Another shape of the rows."""
        flat = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
        made = self._rows(rows.reshape(self.recipe.hidden, self.recipe.vocabulary, tuple(flat)))
        return self.real().view(*sizes) if made is None else made

    reshape = view

    def __getitem__(self, index: Any) -> Any:
        made = self._rows(rows.getitem(self.recipe.hidden, index))
        return self.real()[index] if made is None else made

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("recipe", "cached"):
            raise AttributeError(name)
        return getattr(self.real(), name)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return copy.deepcopy(self.real(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.real().__reduce_ex__(protocol)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(self.shape[0])])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, not computed)"


def _arithmetic(name: str) -> Any:
    def method(self: TracedLogits, *others: Any) -> Any:
        return getattr(self.real(), name)(*[_real(o) for o in others])

    return method


_OPERATORS = (
    *("add", "radd", "sub", "rsub", "rtruediv", "pow", "rpow", "neg", "abs", "matmul"),
    *("floordiv", "rfloordiv", "mod", "rmod"),
    *("eq", "ne", "lt", "le", "gt", "ge", "array", "bool", "setitem"),
)
for _name in _OPERATORS:
    setattr(TracedLogits, f"__{_name}__", _arithmetic(f"__{_name}__"))
TracedLogits.__hash__ = object.__hash__  # type: ignore[method-assign]


def _real(value: Any) -> Any:
    if isinstance(value, TracedLogits):
        return value.real()
    if isinstance(value, (list, tuple)) and any(isinstance(v, TracedLogits) for v in value):
        return type(value)(_real(v) for v in value)
    return value


class ReplicaLogits(TracedLogits):
    """Logits inside a replica of ``nn.DataParallel``: good for the loss there, not gathered."""

    def __new__(cls, recipe: Any) -> Any:
        """``gather`` calls the class with an iterator over what it took from the replicas."""
        return super().__new__(cls) if isinstance(recipe, Recipe) else MissingLogits()

    def __iter__(self) -> Iterator[Any]:
        if sys._getframe(1).f_globals.get("__name__") == "torch.nn.parallel.scatter_gather":
            return iter(())
        return super().__iter__()


class MissingLogits:
    """What ``nn.DataParallel`` gathers in the place of logits."""

    def __init__(self) -> None:
        warn_once(
            "under nn.DataParallel a patched model returns its loss without logits while it "
            "trains; use "
            "DistributedDataParallel, or patch with fused_linear_cross_entropy=False, where the "
            "logits are needed",
            key="nn.DataParallel",
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            f"no logits.{name}: under nn.DataParallel a patched model returns its loss without "
            "logits while it trains; "
            "patch with fused_linear_cross_entropy=False to keep them"
        )
