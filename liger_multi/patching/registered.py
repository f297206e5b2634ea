"""What users add to the knowledge about models: rows of data, and probes of their own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, TypeAlias, cast

from torch import nn

from liger_multi.errors import PatchError
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
    """What a probe says that a module should run.

    Attributes:
        forward: Called with the module, its original forward and the arguments of the call. A
            function of a module, not a lambda, where models are pickled.
        shown: What the report calls it.
        settings: Anything hashable that distinguishes replacements by one function.
    """

    forward: Callable[..., Any]
    shown: str
    settings: Hashable = None
    options: Options = field(default_factory=Options)


Probe: TypeAlias = Callable[[nn.Module], "Replacement | str | None"]
_rows: list[Row] = []
_probes: dict[str, Probe] = {}
_changes = 0


class Replaced(Patched):
    """A module that runs what a registered probe found for it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The replacement, with the original forward; that alone where somebody replaced it."""
        module_class = type(self)
        if not issubclass(module_class, Replaced):
            return module_class.forward(self, *args, **kwargs)
        stock = original(module_class)
        if not code_holds(module_class):
            return stock(self, *args, **kwargs)
        replacement = cast(Replacement, module_class._liger_multi_swap.settings)
        return replacement.forward(self, MethodType(stock, self), *args, **kwargs)


def register(item: Row | Probe, name: str | None = None) -> None:
    """Teach ``patch`` something: a row of data, or a probe under a patch key of its own.

    Args:
        item: A ``NormKind``, ``MlpNames`` or ``MlpKind``, which the probes then try as well; or a
            function from a module to a :class:`Replacement`, to the reason why it is left (which
            the report shows), or to None for modules that do not concern it. It is asked for every
            module that nothing else has patched and must not change it.
        name: Patch key of a probe, on by default. An operator of this library cannot be named so.

    Raises:
        PatchError: The key is taken or missing, or ``item`` is none of these.
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
        taken = f"{name!r} is taken" if name else "a probe needs a name"
        raise PatchError(f"{taken}; patch keys now: {', '.join([*BUILT_IN, *_probes])}")
    else:
        _probes[name] = item
    _changes += 1


def unregister(item: Row | str) -> None:
    """Forget a row, or the probe of a name; models that are patched stay so.

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


def norm_kinds() -> tuple[NormKind, ...]:
    """The known kinds of norms."""
    return (*NORM_KINDS, *(row for row in _rows if isinstance(row, NormKind)))


def mlp_names() -> tuple[MlpNames, ...]:
    """The known names of the layers of gated MLPs."""
    return (*MLP_NAMES, *(row for row in _rows if isinstance(row, MlpNames)))


def mlp_kinds() -> tuple[MlpKind, ...]:
    """The known gated activations."""
    return (*MLP_KINDS, *(row for row in _rows if isinstance(row, MlpKind)))


def generation() -> int:
    """A number that changes when something is added, for caches of what probes found."""
    return _changes


def find_registered(model: nn.Module, request: Request) -> Iterator[Change]:
    """What users' probes say; modules that an operator serves are not asked."""
    for path, module in model.named_modules():
        swap = swapped(module)
        if swap is not None and swap.behavior is LinearByRows:
            swap = None  # which serves what is left in the end
        if swap is None or swap.behavior is Replaced:
            yield from _by_probes(path, module, request, swap is not None)


def _by_probes(path: str, module: nn.Module, request: Request, replaced: bool) -> Iterator[Change]:
    """What the first probe says that knows a module; ``replaced``: whether one did before."""
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
