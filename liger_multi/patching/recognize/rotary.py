"""Rotary functions: recognize them by their numbers, and call ``rope`` instead.

A function belongs to a modeling file and is called by its attention modules. :class:`FusedRotary`
gives single instances of these another class, whose methods call our function; how, and why the
modeling file's own function stays, is told in :mod:`liger_multi.patching.replace.redirect`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from liger_multi.dispatch.primitive import constant_in_graphs
from liger_multi.patching.lazy_logits.loss import run_bound
from liger_multi.patching.options import Options
from liger_multi.patching.recognize import conflicts
from liger_multi.patching.recognize.kinds import (
    ROTARY_ARGUMENTS,
    ROTARY_COMPLEX,
    ROTARY_FORMS,
    ROTARY_KINDS,
    ROTARY_NAME,
    ROTARY_OPTIONS,
    ROTARY_SINGLE,
    RotaryForm,
    RotaryKind,
)
from liger_multi.patching.recognize.probe import probe_context, random
from liger_multi.patching.replace import redirect
from liger_multi.patching.replace.swap import Patched, Swap

Key: TypeAlias = "tuple[int, int, int | None, bool]"
"""Axes of q and of cos, the ``unsqueeze_dim`` in force if there is one, and whether cos is as wide
as q."""
_DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
)


@dataclass(frozen=True)
class Rotary:
    """What the probe found out about a function.

    Attributes:
        kind: How it computes.
        options: The names of its arguments after q, k, cos and sin.
        unsqueeze_dim: The default of that argument, None where there is none.
        axes: The axis of the heads by form of a call; other forms are left to the function.
        single: Whether it turns one tensor, so that q and k come in calls of their own.
    """

    kind: RotaryKind
    options: tuple[str, ...]
    unsqueeze_dim: int | None
    axes: dict[Key, int]
    single: bool = False


class FusedRotary(Patched):
    """A module whose calls of rotary functions go to the operator."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Make the methods with the class: it is made wherever something patches or unpickles."""
        super().__init_subclass__(**keywords)
        if "_liger_multi_swap" in vars(cls):
            renew(cls)


def renew(kind: type) -> None:
    """Make the methods of a class of ours from those that its stock class has now."""
    kind = next(k for k in kind.__mro__ if FusedRotary in k.__bases__)
    swap: Swap = vars(kind)["_liger_multi_swap"]
    found: dict[str, tuple[FunctionType, dict[str, Any]]] = {}
    for method, function, name, called in rotary_calls(swap.stock):
        if isinstance(_usable(function, name, called), Rotary):
            found.setdefault(method, (function, {}))[1][name] = called
    if found == vars(kind).get("_liger_multi_methods"):
        return
    for method in vars(kind).get("_liger_multi_methods", {}):
        delattr(kind, method)
    for method, (function, used) in found.items():
        options = cast(Options, swap.settings)
        targets = {
            name: redirect.while_current(function, name, _served(name, f, options))
            for name, f in used.items()
        }
        around = functools.partial(_while_it_holds, stock=swap.stock, name=method)
        setattr(kind, method, redirect.redirected(function, targets, around))
    kind._liger_multi_methods = found  # type: ignore[attr-defined]


def _while_it_holds(copy: FunctionType, stock: type, name: str) -> FunctionType:
    """A method that is the copy, as long as the stock class has what it was copied from.

    It may be called, by somebody who holds it, when the module has its stock class again.
    """

    @functools.wraps(copy)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, FusedRotary) and _method_holds(type(self), name):
            return copy(self, *args, **kwargs)
        return getattr(stock, name)(self, *args, **kwargs)

    return cast(FunctionType, method)


@constant_in_graphs
def _method_holds(kind: Any, name: str) -> bool:
    copied_from, _ = kind._liger_multi_methods[name]
    return getattr(kind._liger_multi_swap.stock, name, None) is copied_from


def rotary_calls(kind: type) -> list[tuple[str, FunctionType, str, Any]]:
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


def _served(name: str, stock: Callable[..., Any], options: Options) -> FunctionType:
    """The function that stands for ``stock`` in the methods of patched modules."""
    found = cast(Rotary, recognized(stock))
    if found.kind.angles == "complex":
        return _served_complex(name, stock, found.axes[_COMPLEX], options)
    kind, arguments, default, axes = found.kind, found.options, found.unsqueeze_dim, found.axes

    needed = ROTARY_SINGLE if found.single else ROTARY_ARGUMENTS

    def apply_rotary(*args: Any, **named: Any) -> Any:
        given = dict(named)
        try:
            (q, *ks, cos, sin), rest = (
                [*args[: len(needed)], *[given.pop(name) for name in needed[len(args) :]]],
                args[len(needed) :],
            )
        except KeyError:
            return stock(*args, **named)
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
        turned = run_bound(options, ("rope",), _apply, kind, q, k, cos, sin, axis)
        return turned[0] if found.single else turned

    return _named(apply_rotary, name, options)


def _named(made: Any, name: str, options: Options) -> FunctionType:
    suffix = "".join(f"_{value}" for value in options.shown().values())
    made.__name__ = f"_liger_multi_{name}{suffix}"
    return cast(FunctionType, made)


def _served_complex(
    name: str, stock: Callable[..., Any], axis: int, options: Options
) -> FunctionType:
    def apply_rotary(*args: Any, **named: Any) -> Any:
        if named or not all(type(x) is Tensor for x in args) or len(args) != 3:
            return stock(*args, **named)
        q, k, freqs = args
        fits = q.ndim == 4 and freqs.ndim == 3 and freqs.is_complex() and not freqs.requires_grad
        if not fits or 2 * freqs.shape[-1] != q.shape[-1] or freqs.shape[0] not in (1, q.shape[0]):
            return stock(*args)
        return run_bound(options, ("rope_complex",), _apply_complex, q, k, freqs, axis)

    return _named(apply_rotary, name, options)


def _apply_complex(q: Tensor, k: Tensor, freqs: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    from liger_multi.ops import rope_complex

    return rope_complex(q, k, freqs, unsqueeze_dim=axis)


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
        and (q.ndim == 3 or cos.shape[0] in (1, q.shape[0]))
    )


def _apply(
    kind: RotaryKind, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, axis: int
) -> tuple[Tensor, Tensor]:
    from liger_multi.ops import rope

    rotary = None
    if kind.angles == "pair":
        rotary = 2 * cos.shape[-1]
    elif kind.angles == "first half":
        rotary = cos.shape[-1]
        cos, sin = cos[..., : rotary // 2], sin[..., : rotary // 2]
    if kind.backwards:
        sin = -sin
    if kind.sorted:
        q, k = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
    return rope(
        q,
        k,
        cos,
        sin,
        style=kind.style,
        unsqueeze_dim=axis,
        rotary_dim=rotary,
        casting=kind.casting,
    )


_known: dict[Any, Rotary | str] = {}


def recognized(function: Callable[..., Any]) -> Rotary | str:
    """What a function computes, or the reason why it stays."""
    if "forward" in getattr(function, "__dict__", {}):  # a layer of the kernels hub
        return f"a hub kernel serves {_name(function)}"
    theirs = conflicts.owner(function)
    if theirs:
        return f"{theirs} put its {_name(function)} into the modeling file"
    try:
        found = _known.get(function)
    except TypeError:  # cannot be hashed
        return _measure(function)
    if found is None:
        found = _known[function] = _measure(function)
    return found


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _measure(function: Callable[..., Any]) -> Rotary | str:
    """Compare a function with every kind, in all forms of a call that it takes."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):
        return f"{_name(function)} does not say what its arguments are"
    names = tuple(p.name for p in parameters)
    if names == ROTARY_COMPLEX:
        return _measure_complex(called)
    single = names[:3] == ROTARY_SINGLE
    if single:
        turn = called

        def called(q: Tensor, k: Tensor, *angles: Any, **more: Any) -> Any:
            return turn(q, *angles, **more), turn(k, *angles, **more)

        names = (*ROTARY_ARGUMENTS, *names[3:])
    options = names[len(ROTARY_ARGUMENTS) :]
    if names[: len(ROTARY_ARGUMENTS)] != ROTARY_ARGUMENTS or not set(options) <= set(
        ROTARY_OPTIONS
    ):
        return f"{_name(function)} takes ({', '.join(names)}), not (q, k, cos, sin)"
    default = next((p.default for p in parameters if p.name == "unsqueeze_dim"), None)
    wanted: dict[RotaryForm, list[_Result]] = {}
    error: Exception | None = None
    with probe_context():
        for form in ROTARY_FORMS:
            extra = {} if default is None else {"unsqueeze_dim": form.unsqueeze_dim}
            stock = functools.partial(called, **extra)
            try:
                wanted[form] = [_run(stock, form, dtypes) for dtypes in _DTYPES]
            except Exception as raised:  # a form that it does not take
                error = error or raised
        if not wanted:
            return f"{_name(function)} failed on a replica: {type(error).__name__}: {error}"
        for kind in ROTARY_KINDS:
            if all(_agrees(kind, form, results) for form, results in wanted.items()):
                failed = {
                    (_key(f, default), f.unsqueeze_dim) for f in ROTARY_FORMS if f not in wanted
                }
                axes = {(_key(f, default), f.unsqueeze_dim) for f in wanted} - failed
                return Rotary(kind, options, default, dict(axes), single)
    return f"{_name(function)} is no rotation of q and k that is known"


_COMPLEX: Key = (4, 3, None, False)


def _measure_complex(function: Callable[..., Any]) -> Rotary | str:
    """Compare a function that multiplies by complex numbers, for either place of the heads."""
    error: Exception | None = None
    with probe_context() as generator:
        angles = random(generator, 2, 5, 4)
        freqs = torch.polar(torch.ones_like(angles), angles)
        for axis, q, k in ((2, (2, 5, 3, 8), (2, 5, 7, 8)), (1, (2, 3, 5, 8), (2, 7, 5, 8))):
            for dtype in (torch.float32, torch.bfloat16):
                given = [random(generator, *s, dtype=dtype).requires_grad_() for s in (q, k)]
                try:
                    stock = function(*given, freqs)
                except Exception as raised:  # heads stand elsewhere
                    error = error or raised
                    break
                ours = _apply_complex(given[0], given[1], freqs, axis)
                upstream = [random(generator, *s, dtype=dtype) for s in (q, k)]
                wanted = (*stock, *torch.autograd.grad(stock, given, upstream))
                got = (*ours, *torch.autograd.grad(ours, given, upstream))
                rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (2**-6, 2**-5)
                if any(
                    a.dtype != b.dtype
                    or a.shape != b.shape
                    or not torch.allclose(a, b, rtol=rtol, atol=atol)
                    for a, b in zip(wanted, got, strict=True)
                ):
                    break
            else:
                return Rotary(RotaryKind("complex", angles="complex"), (), None, {_COMPLEX: axis})
    if error is not None:
        return f"{_name(function)} failed on a replica: {type(error).__name__}: {error}"
    return f"{_name(function)} is no rotation of q and k that is known"


def _key(form: RotaryForm, default: int | None) -> Key:
    axis = None if default is None else form.unsqueeze_dim
    return len(form.q), len(form.angles), axis, form.angles[-1] == form.q[-1]


_Result: TypeAlias = "tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]"
"""The rotated q and k, and the gradients by q and k."""


def _run(
    function: Callable[..., Any], form: RotaryForm, dtypes: tuple[torch.dtype, torch.dtype]
) -> _Result:
    generator = torch.Generator(device="cpu").manual_seed(7)
    q, k = (random(generator, *s, dtype=dtypes[0]).requires_grad_() for s in (form.q, form.k))
    cos, sin = (random(generator, *form.angles).cos().to(dtypes[1]) for _ in range(2))
    out = function(q, k, cos, sin)
    upstream = [random(generator, *o.shape, dtype=o.dtype) for o in out]
    return (out[0], out[1]), torch.autograd.grad(out, (q, k), upstream)


def _agrees(kind: RotaryKind, form: RotaryForm, results: list[_Result]) -> bool:
    """Whether shapes and dtypes are equal and numbers close; bf16 is rounded at other places."""
    ours = functools.partial(_apply, kind, axis=form.unsqueeze_dim)
    for dtypes, (out, grads) in zip(_DTYPES, results, strict=True):
        try:
            our_out, our_grads = _run(ours, form, dtypes)
        except ValueError:  # the kind does not exist in this form
            return False
        rtol, atol = (2**-6, 2**-5) if torch.bfloat16 in dtypes else (1e-5, 1e-5)
        for a, b in zip((*our_out, *our_grads), (*out, *grads), strict=True):
            same = a.dtype == b.dtype and a.shape == b.shape
            if not same or not torch.allclose(a, b, rtol=rtol, atol=atol):
                return False
    return True
