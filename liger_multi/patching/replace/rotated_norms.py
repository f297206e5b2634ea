"""Norms of queries and keys and their rotation as one operator (QK-norm and RoPE).

A norm is called where the queries are made, and the rotation later, by another name. So the forward
of an attention module is copied once more (:mod:`liger_multi.patching.replace.redirect`): in this
copy the norms pass their input on, and what stands for the rotary function has both modules with
the angles, and calls the norms with these.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, cast

from torch import Tensor, nn

from liger_multi.dispatch.primitive import constant_in_graphs
from liger_multi.patching.options import Options
from liger_multi.patching.recognize.rotary import Rotary, recognized
from liger_multi.patching.recognize.signature import (
    code_holds,
    globally_hooked,
    holds,
    is_watched,
)
from liger_multi.patching.replace import redirect
from liger_multi.patching.replace.norms import FusedNorm, NormSettings
from liger_multi.patching.replace.rotary import rotary_calls
from liger_multi.patching.replace.swap import Patched, Swap, swapped

NORMS = ("q_norm", "k_norm")
"""Names of the norms of queries and of keys."""
ANGLES = "position_embeddings"
"""The argument that has cos and sin."""
_BARE = {name: f"_liger_multi_bare_{name}" for name in NORMS}


@dataclass(frozen=True)
class RotatedNormsSettings:
    """The options of the patch."""

    options: Options


class Angles(NamedTuple):
    """What stands for cos in the copy: cos itself, and the norms that it is to be used after."""

    cos: Tensor
    norms: tuple[Any, Any]


class RotatedNorms(Patched):
    """An attention module whose queries and keys are normalized and rotated in one go."""

    _liger_multi_rotated: ClassVar[tuple[FunctionType, FunctionType, Any] | None]

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Make the copy with the class."""
        super().__init_subclass__(**keywords)
        if "_liger_multi_swap" in vars(cls):
            cls._liger_multi_rotated = copied(vars(cls)["_liger_multi_swap"].stock)
            for name in _BARE.values():
                setattr(cls, name, _bare)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The copy, where norms and angles are what the probe saw."""
        kind = type(self)
        if not issubclass(kind, RotatedNorms):
            return cast(Any, kind).forward(self, *args, **kwargs)
        below: Any = next(k for k in kind.__mro__ if "_liger_multi_swap" in vars(k))
        below = vars(below)["_liger_multi_inner"]
        found = kind._liger_multi_rotated
        given = kwargs.get(ANGLES)
        known = found is not None and _copy_holds(kind) and _norms_hold(self)
        if found is None or not known or not _angles_fit(self, args, kwargs, given):
            return below.forward(self, *args, **kwargs)
        norms = (self._modules[NORMS[0]], self._modules[NORMS[1]])
        cos, sin = cast(Any, given)
        return found[0](self, *args, **{**kwargs, ANGLES: (Angles(cos, norms), sin)})


def _bare(self: Any, x: Tensor) -> Tensor:
    """A norm that comes later."""
    return x


@functools.lru_cache(maxsize=256)
def copied(stock: Any) -> tuple[FunctionType, FunctionType, Any] | None:
    """The copy of a forward, what it was made from, and its rotary function; None without one."""
    calls = rotary_calls(stock)
    if len(calls) != 1 or calls[0][0] != "forward":
        return None
    _, function, name, called = calls[0]
    rotary = recognized(called)
    takes = inspect.signature(function).parameters
    if redirect.refusal(function, name) or not isinstance(rotary, Rotary) or ANGLES not in takes:
        return None
    kind = rotary.kind
    plain = (
        kind.style == "half" and kind.angles == "channel" and not (kind.backwards or kind.sorted)
    )
    if not plain or rotary.single or not set(NORMS) <= redirect.names(function):
        return None
    targets: dict[str, FunctionType] = {name: _served(name, rotary)}
    for norm, bare in _BARE.items():

        def passed(x: Tensor) -> Tensor:
            return x

        passed.__name__ = bare  # an attribute of the class has this name
        targets[norm] = cast(FunctionType, passed)
    return redirect.redirected(function, targets), function, called


def _served(name: str, rotary: Rotary) -> FunctionType:
    """What stands for a rotary function in the copy."""
    casting, default, axes = rotary.kind.casting, rotary.unsqueeze_dim, rotary.axes

    def served(q: Tensor, k: Tensor, cos: Any, sin: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
        axis = axes[q.ndim, cos.cos.ndim, named.get("unsqueeze_dim", default), True]
        rotation = (cos.cos, sin, axis, casting)
        first, second = cos.norms
        return first(q, rotation=rotation), second(k, rotation=rotation)

    served.__name__ = f"_liger_multi_normed_{name}"
    return cast(FunctionType, served)


@constant_in_graphs
def _copy_holds(kind: Any) -> bool:
    """Whether the class has the forward that was copied, and that its rotary function."""
    _, function, called = kind._liger_multi_rotated
    stock = kind._liger_multi_swap.stock
    calls = rotary_calls(stock)
    return getattr(stock, "forward", None) is function and [c[3] for c in calls] == [called]


def _angles_fit(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> bool:
    """Whether hidden states and angles have the forms of the probe, and all channels turn."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(hidden, Tensor) or hidden.ndim != 3 or type(given) is not tuple:
        return False
    return len(given) == 2 and all(
        isinstance(angle, Tensor)
        and angle.ndim == 3
        and not angle.requires_grad
        and angle.shape[0] in (1, hidden.shape[0])
        and angle.shape[1] == hidden.shape[1]
        and angle.shape[2] == module.head_dim
        for angle in given
    )


def _norms_hold(module: nn.Module) -> bool:
    """Whether both norms are patched as they were, and nobody looks on."""
    if globally_hooked():
        return False
    return all(norm is not None and _norm_holds(norm) for norm in map(module._modules.get, NORMS))


def _norm_holds(norm: nn.Module) -> bool:
    settings = norm_of(norm)
    if settings is None or is_watched(norm) or not code_holds(type(norm)):
        return False
    return holds(norm, settings.signature)


def norm_of(norm: nn.Module | None) -> NormSettings | None:
    """The settings of a patched norm that the operator has, or None."""
    swap: Swap | None = None if norm is None else swapped(norm)
    if swap is None or swap.behavior is not FusedNorm:
        return None
    settings = cast(NormSettings, swap.settings)
    kind = settings.kind
    known = kind.op == "rms_norm" and kind.weight == "inside" and not kind.plus and kind.axis == -1
    casting = dict(kind.options).get("casting")
    weighted = [name for _, name in settings.tensors] == ["weight"]
    usual = known and weighted and settings.eps is not None
    return settings if usual and casting in ("llama", "olmo", "gemma") else None
