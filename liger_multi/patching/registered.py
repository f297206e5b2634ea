"""Extensions by users: further formulas and names as data, and probes as functions.

:func:`register` adds them, :func:`unregister` removes them. :func:`find_registered` calls the
probes for modules that nothing else has patched.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, TypeAlias, TypeVar, cast

from torch import nn

from liger_multi.errors import PatchError
from liger_multi.patching.evidence.facts import ModelFacts
from liger_multi.patching.evidence.signature import code_holds
from liger_multi.patching.kinds import MLP_KINDS, MLP_NAMES, NORM_KINDS, MlpKind, MlpNames, NormKind
from liger_multi.patching.linear import LinearByRows
from liger_multi.patching.options import BUILT_IN, Options, Request
from liger_multi.patching.report import Skipped
from liger_multi.patching.swap import (
    Change,
    Patched,
    Replace,
    Restore,
    Swap,
    conflict_of,
    original,
    stock_class,
    swapped,
)

Row: TypeAlias = NormKind | MlpNames | MlpKind


@dataclass(frozen=True)
class Replacement:
    """The new forward of a module, which a probe returns.

    Attributes:
        forward: Called with the module, its original forward and the arguments of the call. Models
            can be pickled if it is a global function, not a lambda.
        shown: Its name in the report.
        settings: Anything hashable that distinguishes replacements by one function.
    """

    forward: Callable[..., Any]
    shown: str
    settings: Hashable = None
    options: Options = field(default_factory=Options)


Probe: TypeAlias = Callable[[nn.Module], "Replacement | str | None"]
AnyRow = TypeVar("AnyRow", NormKind, MlpNames, MlpKind)
_BUILT_IN_ROWS: tuple[Row, ...] = (*NORM_KINDS, *MLP_NAMES, *MLP_KINDS)
_rows: list[Row] = []
_probes: dict[str, Probe] = {}
_changes = 0


class Replaced(Patched):
    """A module that runs the replacement of a registered probe."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The replacement, or the original forward if that has changed."""
        module_class = type(self)
        if not issubclass(module_class, Replaced):
            return module_class.forward(self, *args, **kwargs)
        stock = original(module_class)
        if not code_holds(module_class):
            return stock(self, *args, **kwargs)
        replacement = cast(Replacement, module_class._liger_multi_swap.settings)
        return replacement.forward(self, MethodType(stock, self), *args, **kwargs)


def register(item: Row | Probe, name: str | None = None) -> None:
    """Add a formula, names of layers, or a probe with a patch key to ``patch``.

    Args:
        item: A ``NormKind``, ``MlpNames`` or ``MlpKind`` for the existing probes, or a probe: a
            function from a module to a :class:`Replacement`, to a reason against the module (for
            the report), or to None for other modules. It is called for every module that nothing
            else has patched, and must not change the module.
        name: Patch key of a probe, which is on by default; no name of an operator.

    Raises:
        PatchError: The key is taken or missing, or ``item`` has another type.
    """
    global _changes
    if isinstance(item, (NormKind, MlpNames, MlpKind)):
        if item not in _rows:
            _rows.append(item)
    elif not callable(item):
        raise PatchError(
            "expected a NormKind, MlpNames, MlpKind or a probe (a function of a module), got "
            f"{type(item).__name__}: {item!r:.80}"
        )
    elif not name or name in BUILT_IN or _probes.get(name, item) is not item:
        problem = f"{name!r} is taken" if name else "a probe needs a name"
        raise PatchError(f"{problem}; patch keys now: {', '.join([*BUILT_IN, *_probes])}")
    else:
        _probes[name] = item
    _changes += 1


def unregister(item: Row | str) -> None:
    """Remove an item, or the probe of a name; patched models stay patched.

    Raises:
        PatchError: It is not registered.
    """
    global _changes
    if isinstance(item, str) and item in _probes:
        del _probes[item]
    elif item in _rows:
        _rows.remove(item)
    else:
        raise PatchError(f"{item!r:.80} is not registered; probes: {', '.join(_probes) or 'none'}")
    _changes += 1


def probes() -> dict[str, Probe]:
    """The registered probes by patch key."""
    return dict(_probes)


def rows_of(row_class: type[AnyRow]) -> tuple[AnyRow, ...]:
    """All rows of a class: those of :mod:`.kinds`, and registered ones."""
    return tuple(row for row in (*_BUILT_IN_ROWS, *_rows) if isinstance(row, row_class))


def generation() -> int:
    """A number that changes with every change, for the keys of caches."""
    return _changes


def find_registered(model: ModelFacts, request: Request) -> Iterator[Change]:
    """Modules that users' probes replace, of those that nothing else has patched."""
    for path, module in model.modules if _probes else model.instances(Replaced):
        swap = swapped(module)
        if swap is not None and swap.behavior is LinearByRows:
            swap = None  # the last part, whose patches give way
        if swap is None or swap.behavior is Replaced:
            yield from _by_probes(path, module, request, swap is not None)


def _by_probes(path: str, module: nn.Module, request: Request, replaced: bool) -> Iterator[Change]:
    """The change by the first probe that accepts a module; ``replaced``: it has one already."""
    for name, probe in probes().items():
        options = request.get(name)
        verdict = None if options is None or conflict_of(module) else probe(module)
        if isinstance(verdict, Replacement):
            settings = replace(verdict, options=options)
            swap = Swap(name, stock_class(module), Replaced, settings)
            yield Replace(path, module, swap, verdict.shown, options.shown())
            return
        if isinstance(verdict, str):
            yield Skipped(path, name, verdict)
    if replaced:
        yield Restore(path, module)
