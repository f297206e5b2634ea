"""Rotary functions: what a function of a modeling file computes, found by running it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from liger_multi import ops
from liger_multi.patching.recognize import conflicts
from liger_multi.patching.recognize.branches import Outcomes
from liger_multi.patching.recognize.kinds import (
    ROTARY_ARGUMENTS,
    ROTARY_COMPLEX,
    ROTARY_FORMS,
    ROTARY_KINDS,
    ROTARY_OPTIONS,
    ROTARY_SINGLE,
    RotaryForm,
    RotaryKind,
)
from liger_multi.patching.recognize.probe import alike, probe_context, random, unusual
from liger_multi.patching.recognize.reached import Reached

Key: TypeAlias = "tuple[int, int, int | None, bool]"
"""Axes of q and of cos, the ``unsqueeze_dim`` in force if there is one, and whether cos is as wide
as q."""
POWERS = (-38, -20, -6, -3, 3, 6, 20)
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
        arguments: The names of its first arguments.
    """

    kind: RotaryKind
    options: tuple[str, ...]
    unsqueeze_dim: int | None
    axes: dict[Key, int]
    arguments: tuple[str, ...] = ROTARY_ARGUMENTS

    @property
    def single(self) -> bool:
        """Whether it turns one tensor, so that q and k come in calls of their own."""
        return self.arguments in ROTARY_SINGLE

    @property
    def sin_first(self) -> bool:
        """Whether sin comes before cos."""
        return self.arguments[-1] == "cos"


def apply_complex_rotary(q: Tensor, k: Tensor, freqs: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Rotate by complex numbers, with heads on ``axis``."""
    return ops.rope_complex(q, k, freqs, unsqueeze_dim=axis)


def apply_rotary(
    kind: RotaryKind, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, axis: int
) -> tuple[Tensor, Tensor]:
    """Rotate as ``kind`` does, with heads on ``axis``."""
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
    return ops.rope(
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
    code = Reached([getattr(function, "forward", function)])
    if code.refusal:
        return f"{_name(function)}: {code.refusal}"
    try:
        found = _known.get((function, code.places))
    except TypeError:  # cannot be hashed
        return _followed(function, code)
    if found is None:
        found = _known[function, code.places] = _followed(function, code)
    return found


def _followed(function: Callable[..., Any], code: Reached) -> Rotary | str:
    """As :func:`_measure`, but for a function with branches that no form of a call took."""
    taken = Outcomes(code.functions)
    with taken.watched():
        found = _measure(function)
    where = taken.one_sided(given=0) if isinstance(found, Rotary) else None
    return f"{_name(function)}: {where}" if where else found


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
    arguments = names[:3] if names[:3] in ROTARY_SINGLE else ROTARY_ARGUMENTS
    if arguments in ROTARY_SINGLE:
        turn = called

        def called(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **more: Any) -> Any:
            angles = (sin, cos) if arguments[-1] == "cos" else (cos, sin)
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
                found = _at_extremes(called, kind, next(iter(wanted)), default)
                if found:
                    return f"{_name(function)} is more than a rotation: {found}"
                failed = {(_key(f, default), f.axis) for f in ROTARY_FORMS if f not in wanted}
                axes = {(_key(f, default), f.axis) for f in wanted} - failed
                return Rotary(kind, options, default, dict(axes), arguments)
    return f"{_name(function)} is no rotation of q and k that is known"


COMPLEX: Key = (4, 3, None, False)


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
                ours = apply_complex_rotary(given[0], given[1], freqs, axis)
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
                return Rotary(RotaryKind("complex", angles="complex"), (), None, {COMPLEX: axis})
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


def _at_extremes(
    called: Callable[..., Any], kind: RotaryKind, form: RotaryForm, default: int | None
) -> str | None:
    """What a function does with zeros, tiny and huge numbers that the rotation does not."""
    generator = torch.Generator(device="cpu").manual_seed(8)
    q, k = (random(generator, *s) for s in (form.q, form.k))
    cos, sin = (random(generator, *form.angles).cos() for _ in range(2))
    extra = {} if default is None else {"unsqueeze_dim": form.unsqueeze_dim}
    several = zip(unusual(q, POWERS, generator), unusual(k, POWERS, generator), strict=True)
    for queries, keys in several:
        wanted = called(queries, keys, cos, sin, **extra)
        got = apply_rotary(kind, queries, keys, cos, sin, form.axis)
        if not all(alike(a, b) for a, b in zip(wanted, got, strict=True)):
            return "its output differs for numbers that are equal, zero, tiny, large or not finite"
    return None


def _agrees(kind: RotaryKind, form: RotaryForm, results: list[_Result]) -> bool:
    """Whether shapes and dtypes are equal and numbers close; bf16 is rounded at other places."""
    ours = functools.partial(apply_rotary, kind, axis=form.axis)
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
