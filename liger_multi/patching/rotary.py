"""Rotary functions of modeling files, and modules that call ``ops.rope`` instead.

:func:`find_rotary` yields a patch for every module that calls a rotary function.
:func:`recognized` runs such a function on small tensors, and compares it with
:data:`ROTARY_KINDS`. A patched module (:class:`FusedRotary`) has copies of the methods that call
it. These call a function with the same signature, which runs the operator for all forms of a call
that were probed, and the original function for others.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from liger_multi import ops
from liger_multi.patching.evidence import redirect
from liger_multi.patching.evidence.facts import ModelFacts
from liger_multi.patching.evidence.probe import probe_context, random, rows_agree, unusual
from liger_multi.patching.evidence.reached import Outcomes, Reached
from liger_multi.patching.options import Options, Request, run_bound
from liger_multi.patching.report import Skipped
from liger_multi.patching.swap import (
    Call,
    Calling,
    Change,
    Patched,
    Replace,
    Restore,
    Swap,
    conflict_of,
    library_of,
    renew,
    swapped,
    unpatched_class,
    with_name_and_options,
)


@dataclass(frozen=True)
class RotaryKind:
    """How one rotary function computes, in terms of the operator ``rope``.

    Attributes:
        name: In the report.
        style: Which channels make a pair, as in ``rope``.
        casting: Dtype inside and out, as in ``rope``.
        angles: Values in cos and sin: one per "channel", one per "pair", or one per pair in the
            "first half"; "complex" for a tensor with one complex number per pair.
        backwards: Whether the direction is reversed.
        sorted: Whether inputs are interleaved and outputs half-split.
    """

    name: str
    style: str = "half"
    casting: str = "llama"
    angles: str = "channel"
    backwards: bool = False
    sorted: bool = False


ROTARY_KINDS = (
    RotaryKind("half"),
    RotaryKind("half, cast back", casting="cohere"),
    RotaryKind("half, an angle a pair", angles="pair"),
    RotaryKind("interleaved", style="interleaved"),
    RotaryKind("interleaved, cast back", style="interleaved", casting="cohere"),
    RotaryKind("interleaved, angles in the first half", style="interleaved", angles="first half"),
    RotaryKind("interleaved, an angle a pair", style="interleaved", angles="pair"),
    RotaryKind(
        "interleaved, angles in the first half, cast back",
        style="interleaved",
        casting="cohere",
        angles="first half",
    ),
    RotaryKind("pairs to halves", sorted=True),
    RotaryKind("pairs to halves, angles in the first half", angles="first half", sorted=True),
    RotaryKind("pairs to halves, cast back", casting="cohere", sorted=True),
    RotaryKind("half, backwards", backwards=True),
    RotaryKind("half, cast back, backwards", casting="cohere", backwards=True),
)
"""Tried in this order."""

ROTARY_NAME = re.compile(r"apply_.*rotary")
ROTARY_ARGUMENTS = ("q", "k", "cos", "sin")
ROTARY_SINGLE = (("x", "cos", "sin"), ("tensor", "sin", "cos"))
ROTARY_COMPLEX = ("xq", "xk", "freqs_cis")
"""Arguments of functions of one tensor, and of functions with complex angles."""
ROTARY_OPTIONS = ("position_ids", "unsqueeze_dim")
"""Further arguments; the original function runs calls with position ids."""


@dataclass(frozen=True)
class RotaryForm:
    """One form of a call as shapes; the numbers of heads of q and k differ.

    Attributes:
        q: Shape of the queries.
        k: Shape of the keys.
        angles: Shape of cos and sin.
        unsqueeze_dim: The argument of this name, for functions that have it.
        heads: The axis of the heads; None if it is ``unsqueeze_dim``.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    angles: tuple[int, ...]
    unsqueeze_dim: int = 1
    heads: int | None = None

    @property
    def axis(self) -> int:
        """The axis of the heads."""
        return self.unsqueeze_dim if self.heads is None else self.heads


ROTARY_FORMS = (
    RotaryForm((2, 4, 5, 8), (2, 3, 5, 8), (2, 5, 8)),
    RotaryForm((2, 4, 5, 8), (2, 3, 5, 8), (1, 5, 8)),
    RotaryForm((2, 4, 5, 8), (2, 3, 5, 8), (2, 5, 4)),
    RotaryForm((2, 5, 4, 8), (2, 5, 3, 8), (2, 5, 8), 2),
    RotaryForm((2, 5, 4, 8), (2, 5, 3, 8), (2, 5, 4), 2),
    RotaryForm((5, 4, 8), (5, 3, 8), (5, 8)),
    RotaryForm((5, 4, 8), (5, 3, 8), (5, 4)),
    # positions that all rows of a batch share
    RotaryForm((2, 4, 5, 8), (2, 3, 5, 8), (5, 8), 0, heads=1),
    RotaryForm((2, 5, 4, 8), (2, 5, 3, 8), (5, 8), 1, heads=2),
)

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
    """The result of probing a rotary function.

    Attributes:
        spec: How it computes.
        options: The names of its arguments after q, k, cos and sin.
        unsqueeze_dim: The default of that argument; None if there is none.
        axes: The axis of the heads by form of a call; the original function runs other forms.
        arguments: The names of its first arguments.
    """

    spec: RotaryKind
    options: tuple[str, ...]
    unsqueeze_dim: int | None
    axes: dict[Key, int]
    arguments: tuple[str, ...] = ROTARY_ARGUMENTS

    @property
    def single(self) -> bool:
        """Whether it rotates one tensor, and is called for q and for k."""
        return self.arguments in ROTARY_SINGLE

    @property
    def sin_first(self) -> bool:
        """Whether sin comes before cos."""
        return self.arguments[-1] == "cos"


def apply_rotary(
    spec: RotaryKind, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, axis: int
) -> tuple[Tensor, Tensor]:
    """Rotate as ``spec`` says, with heads on ``axis``."""
    rotary = None
    if spec.angles == "pair":
        rotary = 2 * cos.shape[-1]
    elif spec.angles == "first half":
        rotary = cos.shape[-1]
        cos, sin = cos[..., : rotary // 2], sin[..., : rotary // 2]
    if spec.backwards:
        sin = -sin
    if spec.sorted:
        q, k = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
    return ops.rope(
        q,
        k,
        cos,
        sin,
        style=spec.style,
        unsqueeze_dim=axis,
        rotary_dim=rotary,
        casting=spec.casting,
    )


_verdicts: dict[Any, Rotary | str] = {}


def recognized(function: Callable[..., Any]) -> Rotary | str:
    """The formula of a function, or the reason why it is not replaced."""
    if "forward" in getattr(function, "__dict__", {}):  # a layer of the kernels hub
        return f"a hub kernel serves {_name(function)}"
    library = library_of(function)
    if library:
        return f"{library} put its {_name(function)} into the modeling file"
    code = Reached([getattr(function, "forward", function)])
    if code.refusal:
        return f"{_name(function)}: {code.refusal}"
    try:
        verdict = _verdicts.get((function, code.places))
    except TypeError:  # cannot be hashed
        return _measure_all_branches(function, code)
    if verdict is None:
        verdict = _verdicts[function, code.places] = _measure_all_branches(function, code)
    return verdict


def _measure_all_branches(function: Callable[..., Any], code: Reached) -> Rotary | str:
    """The same as :func:`_measure`, or the reason that a branch had one outcome only."""
    outcomes = Outcomes(code.functions)
    with outcomes.watched():
        verdict = _measure(function)
    one_sided = outcomes.one_sided(argument_count=0) if isinstance(verdict, Rotary) else None
    return f"{_name(function)}: {one_sided}" if one_sided else verdict


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _measure(function: Callable[..., Any]) -> Rotary | str:
    """Compare a function with all formulas, in all forms of a call that it accepts."""
    rotate = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = list(inspect.signature(rotate).parameters.values())
    except (TypeError, ValueError):
        return f"{_name(function)} does not say what its arguments are"
    names = tuple(p.name for p in parameters)
    if names == ROTARY_COMPLEX:
        return _measure_complex(rotate)
    arguments = names[:3] if names[:3] in ROTARY_SINGLE else ROTARY_ARGUMENTS
    if arguments in ROTARY_SINGLE:
        single = rotate

        def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Any:
            angles = (sin, cos) if arguments[-1] == "cos" else (cos, sin)
            return single(q, *angles, **options), single(k, *angles, **options)

        names = (*ROTARY_ARGUMENTS, *names[3:])
    options = names[len(ROTARY_ARGUMENTS) :]
    if names[: len(ROTARY_ARGUMENTS)] != ROTARY_ARGUMENTS or not set(options) <= set(
        ROTARY_OPTIONS
    ):
        return f"{_name(function)} takes ({', '.join(names)}), not (q, k, cos, sin)"
    default = next((p.default for p in parameters if p.name == "unsqueeze_dim"), None)
    results_by_form: dict[RotaryForm, list[_Result]] = {}
    error: Exception | None = None
    with probe_context():
        for form in ROTARY_FORMS:
            extra = {} if default is None else {"unsqueeze_dim": form.unsqueeze_dim}
            stock = functools.partial(rotate, **extra)
            try:
                results_by_form[form] = [_run(stock, form, dtypes) for dtypes in _DTYPES]
            except Exception as raised:  # of a form that it does not accept
                error = error or raised
        if not results_by_form:
            return f"{_name(function)} failed on a replica: {type(error).__name__}: {error}"
        for spec in ROTARY_KINDS:
            if all(_agrees(spec, form, results) for form, results in results_by_form.items()):
                difference = _at_extremes(rotate, spec, next(iter(results_by_form)), default)
                if difference:
                    return f"{_name(function)} is more than a rotation: {difference}"
                failed = {
                    (_key(f, default), f.axis) for f in ROTARY_FORMS if f not in results_by_form
                }
                axes = {(_key(f, default), f.axis) for f in results_by_form} - failed
                return Rotary(spec, options, default, dict(axes), arguments)
    return f"{_name(function)} is no rotation of q and k that is known"


COMPLEX: Key = (4, 3, None, False)


def _measure_complex(function: Callable[..., Any]) -> Rotary | str:
    """Compare a function with complex angles, for both axes of the heads."""
    error: Exception | None = None
    with probe_context() as generator:
        angles = random(generator, 2, 5, 4)
        freqs = torch.polar(torch.ones_like(angles), angles)
        for axis, q, k in ((2, (2, 5, 3, 8), (2, 5, 7, 8)), (1, (2, 3, 5, 8), (2, 7, 5, 8))):
            for dtype in (torch.float32, torch.bfloat16):
                inputs = [random(generator, *s, dtype=dtype).requires_grad_() for s in (q, k)]
                try:
                    stock = function(*inputs, freqs)
                except Exception as raised:  # heads are on the other axis
                    error = error or raised
                    break
                outputs = ops.rope_complex(inputs[0], inputs[1], freqs, unsqueeze_dim=axis)
                upstream = [random(generator, *s, dtype=dtype) for s in (q, k)]
                expected = (*stock, *torch.autograd.grad(stock, inputs, upstream))
                actual = (*outputs, *torch.autograd.grad(outputs, inputs, upstream))
                rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (2**-6, 2**-5)
                if any(
                    a.dtype != b.dtype
                    or a.shape != b.shape
                    or not torch.allclose(a, b, rtol=rtol, atol=atol)
                    for a, b in zip(expected, actual, strict=True)
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
    rotate: Callable[..., Any], spec: RotaryKind, form: RotaryForm, default: int | None
) -> str | None:
    """How a function differs for zeros, tiny and huge numbers; or None."""
    generator = torch.Generator(device="cpu").manual_seed(8)
    q, k = (random(generator, *s) for s in (form.q, form.k))
    cos, sin = (random(generator, *form.angles).cos() for _ in range(2))
    extra = {} if default is None else {"unsqueeze_dim": form.unsqueeze_dim}
    pairs = zip(unusual(q, POWERS, generator), unusual(k, POWERS, generator), strict=True)
    for queries, keys in pairs:
        expected = rotate(queries, keys, cos, sin, **extra)
        actual = apply_rotary(spec, queries, keys, cos, sin, form.axis)
        if not all(rows_agree(a, b) for a, b in zip(expected, actual, strict=True)):
            return "its output differs for numbers that are equal, zero, tiny, large or not finite"
    return None


def _agrees(spec: RotaryKind, form: RotaryForm, results: list[_Result]) -> bool:
    """Whether shapes and dtypes are equal and values close; bf16 may be rounded elsewhere."""
    formula = functools.partial(apply_rotary, spec, axis=form.axis)
    for dtypes, (out, grads) in zip(_DTYPES, results, strict=True):
        try:
            our_out, our_grads = _run(formula, form, dtypes)
        except ValueError:  # the formula has no such form
            return False
        rtol, atol = (2**-6, 2**-5) if torch.bfloat16 in dtypes else (1e-5, 1e-5)
        for a, b in zip((*our_out, *our_grads), (*out, *grads), strict=True):
            same_form = a.dtype == b.dtype and a.shape == b.shape
            if not same_form or not torch.allclose(a, b, rtol=rtol, atol=atol):
                return False
    return True


class FusedRotary(Calling):
    """A module that calls the operator in place of rotary functions."""

    @staticmethod
    def find_calls(stock: type) -> list[Call]:
        """The calls of rotary functions that are replaced."""
        return [c for c in rotary_calls(stock) if isinstance(_usable(*c[1:]), Rotary)]

    @staticmethod
    def served(name: str, target: Any, settings: Any) -> FunctionType:
        """The function that replaces a rotary function."""
        return served_function(name, target, cast(Options, settings))


def rotary_calls(module_class: type) -> list[Call]:
    """Calls of a class to functions with the name of a rotary function, for :func:`recognized`."""
    return [
        (method, function, name, target)
        for method, function in redirect.methods(module_class).items()
        for name, target in redirect.calls(
            function, lambda n, f: bool(ROTARY_NAME.match(n)) and callable(f)
        ).items()
    ]


def rotary_kinds(module_class: type) -> tuple[list[str], list[str]]:
    """Names of the formulas of rotary functions that a class calls, and reasons against others."""
    verdicts = [_usable(*call) for _, *call in rotary_calls(module_class)]
    kinds = {f.spec.name for f in verdicts if isinstance(f, Rotary)}
    return sorted(kinds), sorted({f for f in verdicts if isinstance(f, str)})


def _usable(function: FunctionType, name: str, target: Any) -> Rotary | str:
    return redirect.refusal(function, name) or recognized(target)


def served_function(name: str, stock: Callable[..., Any], options: Options) -> FunctionType:
    """The function that replaces ``stock`` in methods of patched modules."""
    rotary = cast(Rotary, recognized(stock))
    if rotary.spec.angles == "complex":
        return _served_complex(name, stock, rotary.axes[COMPLEX], options)
    spec, arguments, default, axes = rotary.spec, rotary.options, rotary.unsqueeze_dim, rotary.axes

    names = rotary.arguments

    def served(*args: Any, **kwargs: Any) -> Any:
        by_keyword = dict(kwargs)
        try:
            (q, *ks, cos, sin), others = (
                [*args[: len(names)], *[by_keyword.pop(name) for name in names[len(args) :]]],
                args[len(names) :],
            )
        except KeyError:
            return stock(*args, **kwargs)
        if rotary.sin_first:
            cos, sin = sin, cos
        if not set(by_keyword) <= set(arguments):
            return stock(*args, **kwargs)
        for index, value in enumerate(others):
            by_keyword[arguments[index]] = value
        axis = axes.get(
            (
                q.ndim,
                cos.ndim,
                by_keyword.get("unsqueeze_dim", default),
                cos.shape[-1] == q.shape[-1],
            )
        )
        if axis is None or by_keyword.get("position_ids") is not None:
            return stock(*args, **kwargs)
        k = ks[0] if ks else q.narrow(axis, 0, 0)  # no heads: q and k are separate calls
        if not _fits(q, k, cos, sin, axis):
            return stock(*args, **kwargs)
        rotated = run_bound(options, ("rope",), apply_rotary, spec, q, k, cos, sin, axis)
        return rotated[0] if rotary.single else rotated

    return with_name_and_options(served, name, options)


def _served_complex(
    name: str, stock: Callable[..., Any], axis: int, options: Options
) -> FunctionType:
    def served(*args: Any, **kwargs: Any) -> Any:
        if kwargs or not all(type(x) is Tensor for x in args) or len(args) != 3:
            return stock(*args, **kwargs)
        q, k, freqs = args
        fits = q.ndim == 4 and freqs.ndim == 3 and freqs.is_complex() and not freqs.requires_grad
        if not fits or 2 * freqs.shape[-1] != q.shape[-1] or freqs.shape[0] not in (1, q.shape[0]):
            return stock(*args)
        rotate = functools.partial(ops.rope_complex, unsqueeze_dim=axis)
        return run_bound(options, ("rope_complex",), rotate, q, k, freqs)

    return with_name_and_options(served, name, options)


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads: int) -> bool:
    """Whether shapes are those of the probe, without broadcasting."""
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


def find_rotary(model: ModelFacts, request: Request) -> Iterator[Change]:
    """Modules that call a rotary function."""
    options = request.get("rope")
    calling = (
        [] if options is None else model.of_class(lambda facts: rotary_calls(facts.module_class))
    )
    calling_ids = {id(module) for _, module in calling}
    for path, module in model.instances(FusedRotary):
        if id(module) not in calling_ids:
            yield Restore(path, module)
    for path, module in calling:
        overridden, stock = conflict_of(module), unpatched_class(module)
        kinds, reasons = ([], [overridden]) if overridden else rotary_kinds(stock)
        yield from (Skipped(path, "rope", reason) for reason in reasons)
        if kinds:
            swap = Swap("rope", stock, FusedRotary, options, *_shared_input_of(module))
            yield Replace(path, module, swap, f"rope[{'; '.join(kinds)}]", options.shown())
            renew(type(module))


def _shared_input_of(module: nn.Module) -> tuple[type[Patched] | None, Hashable]:
    """The behavior around the rotary functions of a module, which other parts manage."""
    current = swapped(module)
    if current is None:
        return None, None
    if current.behavior is FusedRotary:
        return current.around, current.around_settings
    return current.behavior, current.settings
