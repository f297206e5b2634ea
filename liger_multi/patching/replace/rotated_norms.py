"""Norms of queries and keys and their rotation as one operator (QK-norm and RoPE).

A norm is called where the queries are made, and the rotation later, by another name. So the forward
of an attention module is copied once more (:mod:`liger_multi.patching.replace.redirect`): in this
copy the norms pass their input on, and what stands for the rotary function has both modules with
the angles, and calls the norms with these.

Projections with adapters may be computed together in the same module, around the copy.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from liger_multi.arguments import cache_parameter, has_cache
from liger_multi.patching.options import Options
from liger_multi.patching.recognize.rotary import Rotary, recognized
from liger_multi.patching.recognize.signature import (
    code_holds,
    globally_hooked,
    holds,
    is_watched,
)
from liger_multi.patching.replace import redirect
from liger_multi.patching.replace.adapters import SharedInput, in_one
from liger_multi.patching.replace.norms import FusedNorm, NormSettings, Rotation, apply_rotated
from liger_multi.patching.replace.rotary import rotary_calls
from liger_multi.patching.replace.swap import Patched, Swap, swapped

NORMS = (
    ("q_norm", "k_norm"),
    ("q_layernorm", "k_layernorm"),
    ("query_layernorm", "key_layernorm"),
    ("qk_norm", "qk_norm"),
)
"""Names of the norms of queries and of keys."""
ANGLES = "position_embeddings"
"""The argument that has cos and sin."""
WIDEST = 8192
"""Channels of a norm of all heads that kernels keep in registers."""
_BARE = {name: f"_liger_multi_bare_{name}" for names in NORMS for name in names}


def names_of(module: nn.Module) -> tuple[str, str] | None:
    """The names of a module's norms of queries and keys, if it has both."""
    return next((names for names in NORMS if set(names) <= module._modules.keys()), None)


@dataclass(frozen=True)
class RotatedNormsSettings:
    """The options of the patch, and the names of both norms."""

    options: Options
    norms: tuple[str, str]


class Angles(NamedTuple):
    """What stands for cos in the copy: cos itself, the norms to use before, options, settings."""

    cos: Tensor
    norms: tuple[Any, Any]
    options: Options
    settings: tuple[NormSettings, NormSettings]


class Copy(NamedTuple):
    """The copy of a forward.

    Attributes:
        run: The copy.
        made_from: The forward of the class, as it was copied.
        holds: Whether the rotary function is what it was.
        caches_get_cos: Whether it gives cos to a cache, which wants the tensor.
        updated: The argument of a cache that it updates and does nothing else with, or None.
    """

    run: FunctionType
    made_from: FunctionType
    holds: Callable[[], bool]
    caches_get_cos: bool
    updated: str | None


class CosForCache:
    """Stands for a cache in the copy, and hands the cache cos itself.

    Models of transformers 5.0 make a cache in training too, and hand it cos and sin.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """The method of the cache."""
        args = tuple(_with_cos(value) for value in args)
        return self._cache.update(*args, **{n: _with_cos(v) for n, v in kwargs.items()})


def _with_cos(value: Any) -> Any:
    """An argument with cos in the place of what stands for it."""
    if not isinstance(value, dict):
        return value
    return {n: v.cos if isinstance(v, Angles) else v for n, v in value.items()}


class RotatedNorms(Patched):
    """An attention module whose queries and keys are normalized and rotated in one go."""

    _liger_multi_rotated: ClassVar[Copy | None]
    _liger_multi_below: ClassVar[tuple[Any, Any]]

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Make the copy with the class."""
        super().__init_subclass__(**keywords)
        if "_liger_multi_swap" in vars(cls):
            swap: Swap = vars(cls)["_liger_multi_swap"]
            names = cast(RotatedNormsSettings, swap.around_settings).norms
            cls._liger_multi_rotated = copied(cast(Any, swap.stock), names)
            cls._liger_multi_below = swap, vars(cls)["_liger_multi_inner"]
            for name in _BARE.values():
                setattr(cls, name, _bare)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The copy, where norms and angles are what the probe saw."""
        kind = type(self)
        if not issubclass(kind, RotatedNorms):
            return cast(Any, kind).forward(self, *args, **kwargs)
        return _rotated(self, kind, args, kwargs)


class SharedRotatedNorms(SharedInput, RotatedNorms):
    """The same, with projections that are computed together."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As of the first, around that of the second."""
        kind = type(self)
        if not issubclass(kind, SharedRotatedNorms):
            return cast(Any, kind).forward(self, *args, **kwargs)
        return in_one(self, functools.partial(_rotated, self, kind, args, kwargs), args, kwargs)


AROUND: dict[type[Patched] | None, type[Patched]] = {
    None: RotatedNorms,
    RotatedNorms: RotatedNorms,
    SharedInput: SharedRotatedNorms,
    SharedRotatedNorms: SharedRotatedNorms,
}
"""What stands around an attention module, by what stood there."""
APART: dict[type[Patched] | None, type[Patched] | None] = {
    RotatedNorms: None,
    SharedRotatedNorms: SharedInput,
}
"""What stands there without the norms."""


def _rotated(
    module: Any, kind: type[RotatedNorms], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The copy of the forward, or the rotary functions and norms one after the other."""
    swap, inner = kind._liger_multi_below  # compilers read no dict of a class
    found, settings = kind._liger_multi_rotated, cast(RotatedNormsSettings, swap.around_settings)
    given, names = kwargs.get(ANGLES), settings.norms
    known = found is not None and _copy_holds(found, swap.stock) and _norms_hold(module, names)
    if found is None or not known or not _angles_fit(module, args, kwargs, given):
        return inner.forward(module, *args, **kwargs)
    handed = kwargs
    if found.caches_get_cos and has_cache(args, kwargs):
        cache = kwargs.get(found.updated) if found.updated else None
        if cache is None:
            return inner.forward(module, *args, **kwargs)
        handed = {**kwargs, cast(str, found.updated): CosForCache(cache)}
    norms = (module._modules[names[0]], module._modules[names[1]])
    first, second = norm_of(norms[0]), norm_of(norms[1])
    if first is None or second is None:  # another thread has just given a class back
        return inner.forward(module, *args, **kwargs)
    cos, sin = cast(Any, given)
    angles = (Angles(cos, norms, settings.options, (first, second)), sin)
    run = functools.partial(found.run, module, *args, **{**handed, ANGLES: angles})
    if torch.compiler.is_compiling():
        return run()
    try:
        return run()
    except AttributeError as error:
        if not any(name in str(error) for name in (_BARE[n] for n in names)):
            raise
        # another thread gave the class back before the copy came to a norm
        return inner.forward(module, *args, **kwargs)


def _bare(self: Any, x: Tensor) -> Tensor:
    """A norm that comes later."""
    return x


@functools.lru_cache(maxsize=256)
def copied(stock: Any, norms: tuple[str, str]) -> Copy | None:
    """The copy of a forward, or None where it is not of that form."""
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
    if not plain or rotary.single or not set(norms) <= redirect.names(function):
        return None
    targets: dict[str, FunctionType] = {name: _served(name, rotary, called)}
    for norm in norms:

        def passed(x: Tensor) -> Tensor:
            return x

        passed.__name__ = _BARE[norm]  # an attribute of the class has this name
        targets[norm] = cast(FunctionType, passed)
    made, holds = redirect.redirected(function, targets), redirect.still(function, name)
    cache = cache_parameter(function)
    only = cache is not None and redirect.only_calls(function, cache, "update")
    hands_cos = "cache_kwargs" in redirect.variables(function)
    return Copy(made, function, holds, hands_cos, cache if only else None)


def _served(name: str, rotary: Rotary, stock: Any) -> FunctionType:
    """What stands for a rotary function in the copy."""
    casting, default, axes = rotary.kind.casting, rotary.unsqueeze_dim, rotary.axes

    def served(q: Tensor, k: Tensor, cos: Any, sin: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
        axis = axes[q.ndim, cos.cos.ndim, named.get("unsqueeze_dim", default), True]
        if type(q).__name__ == "DTensor" or type(k).__name__ == "DTensor":
            q, k = (_normalized(norm, x, axis) for norm, x in zip(cos.norms, (q, k), strict=True))
            return cast("tuple[Tensor, Tensor]", stock(q, k, cos.cos, sin, **named))
        first, second = (
            Rotation(cos.cos, sin, axis, casting, cos.options, of) for of in cos.settings
        )
        return _turned(cos.norms[0], q, first), _turned(cos.norms[1], k, second)

    served.__name__ = f"_liger_multi_normed_{name}"
    return cast(FunctionType, served)


def _turned(norm: Any, x: Tensor, by: Rotation) -> Tensor:
    """A norm with its rotation, also where another thread has just given its class back."""
    y = norm(x, rotation=by) if isinstance(norm, FusedNorm) else apply_rotated(norm, x, by)
    return cast(Tensor, y)


def _normalized(norm: Any, x: Tensor, axis: int) -> Tensor:
    """The norm alone, of heads or of all heads of a token."""
    if norm.weight.shape[0] == x.shape[-1]:
        return cast(Tensor, norm(x))
    rows = norm(x.movedim(axis, 2).flatten(2))
    return cast(Tensor, rows.unflatten(2, (-1, x.shape[-1])).movedim(2, axis))


def _copy_holds(copy: Copy, stock: Any) -> bool:
    """Whether the class has the forward that was copied, and that its rotary function."""
    return getattr(stock, "forward", None) is copy.made_from and copy.holds()


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


def _norms_hold(module: nn.Module, names: tuple[str, str]) -> bool:
    """Whether both norms are patched as they were, and nobody looks on."""
    if globally_hooked():
        return False
    return all(norm is not None and _norm_holds(norm) for norm in map(module._modules.get, names))


def _norm_holds(norm: nn.Module) -> bool:
    kind = type(norm)  # once: another thread may give the class back
    settings = norm_of(norm)
    if settings is None or is_watched(norm) or not issubclass(kind, FusedNorm):
        return False
    return code_holds(kind) and holds(norm, settings.signature)


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
    weight = norm._parameters.get("weight") if usual and norm is not None else None
    usual = usual and (weight is None or weight.numel() <= WIDEST)
    return settings if usual and casting in ("llama", "olmo", "gemma") else None
