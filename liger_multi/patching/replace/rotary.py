"""Rotary functions: attention modules of a patched model call ``rope`` in their place.

A function belongs to a modeling file and is called by its attention modules. :class:`FusedRotary`
gives single instances of these another class, whose methods call our function
(:mod:`liger_multi.patching.replace.calling`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

from torch import Tensor

from liger_multi.patching.lazy_logits.loss import run_bound
from liger_multi.patching.options import Options
from liger_multi.patching.recognize.kinds import ROTARY_NAME
from liger_multi.patching.recognize.rotary import (
    COMPLEX,
    Rotary,
    apply_complex_rotary,
    apply_rotary,
    recognized,
)
from liger_multi.patching.replace import redirect
from liger_multi.patching.replace.calling import Call, Calling, named


class FusedRotary(Calling):
    """A module whose calls of rotary functions go to the operator."""

    @staticmethod
    def found(stock: type) -> list[Call]:
        """The calls of rotary functions that are served."""
        return [c for c in rotary_calls(stock) if isinstance(_usable(*c[1:]), Rotary)]

    @staticmethod
    def served(name: str, called: Any, settings: Any) -> FunctionType:
        """The function that stands for a rotary function."""
        return served_function(name, called, cast(Options, settings))


def rotary_calls(kind: type) -> list[Call]:
    """What a class calls that is named like a rotary function: (method, its function, name, what).

    Whether it is one, :func:`recognized` tells.
    """
    return [
        (method, function, name, called)
        for method, function in redirect.methods(kind).items()
        for name, called in redirect.calls(
            function, lambda n, f: bool(ROTARY_NAME.match(n)) and callable(f)
        ).items()
    ]


def rotary_kinds(kind: type) -> tuple[list[str], list[str]]:
    """The kinds of the rotary functions that a class calls, and why others stay as they are."""
    found = [_usable(*call) for _, *call in rotary_calls(kind)]
    kinds = {f.kind.name for f in found if isinstance(f, Rotary)}
    return sorted(kinds), sorted({f for f in found if isinstance(f, str)})


def _usable(function: FunctionType, name: str, called: Any) -> Rotary | str:
    return redirect.refusal(function, name) or recognized(called)


def served_function(name: str, stock: Callable[..., Any], options: Options) -> FunctionType:
    """The function that stands for ``stock`` in the methods of patched modules."""
    found = cast(Rotary, recognized(stock))
    if found.kind.angles == "complex":
        return _served_complex(name, stock, found.axes[COMPLEX], options)
    kind, arguments, default, axes = found.kind, found.options, found.unsqueeze_dim, found.axes

    needed = found.arguments

    def served(*args: Any, **named: Any) -> Any:
        given = dict(named)
        try:
            (q, *ks, cos, sin), rest = (
                [*args[: len(needed)], *[given.pop(name) for name in needed[len(args) :]]],
                args[len(needed) :],
            )
        except KeyError:
            return stock(*args, **named)
        if found.sin_first:
            cos, sin = sin, cos
        if not set(given) <= set(arguments):
            return stock(*args, **named)
        for at, value in enumerate(rest):
            given[arguments[at]] = value
        axis = axes.get(
            (q.ndim, cos.ndim, given.get("unsqueeze_dim", default), cos.shape[-1] == q.shape[-1])
        )
        if axis is None or given.get("position_ids") is not None:
            return stock(*args, **named)
        k = ks[0] if ks else q.narrow(axis, 0, 0)  # no heads: one call of the operator for each
        if not _fits(q, k, cos, sin, axis):
            return stock(*args, **named)
        turned = run_bound(options, ("rope",), apply_rotary, kind, q, k, cos, sin, axis)
        return turned[0] if found.single else turned

    return named(served, name, options)


def _served_complex(
    name: str, stock: Callable[..., Any], axis: int, options: Options
) -> FunctionType:
    def served(*args: Any, **named: Any) -> Any:
        if named or not all(type(x) is Tensor for x in args) or len(args) != 3:
            return stock(*args, **named)
        q, k, freqs = args
        fits = q.ndim == 4 and freqs.ndim == 3 and freqs.is_complex() and not freqs.requires_grad
        if not fits or 2 * freqs.shape[-1] != q.shape[-1] or freqs.shape[0] not in (1, q.shape[0]):
            return stock(*args)
        return run_bound(options, ("rope_complex",), apply_complex_rotary, q, k, freqs, axis)

    return named(served, name, options)


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads: int) -> bool:
    """Whether shapes are those of the probe, without what the function would broadcast."""
    tokens = 3 - heads if q.ndim == 4 else 0
    return (
        type(q).__name__ != "DTensor"
        and not (cos.requires_grad or sin.requires_grad)
        and cos.shape == sin.shape
        and k.ndim == q.ndim
        and (k.shape[0], k.shape[-1]) == (q.shape[0], q.shape[-1])
        and cos.shape[-2] == q.shape[tokens] == k.shape[tokens]
        and (cos.ndim == 2 or cos.shape[0] in (1, q.shape[0]))
    )
