"""Which implementation of experts a model selects: the operator stands for those that it equals.

transformers' interface maps names to functions, and a configuration names one of them, which may
change at any time. So each call looks. A function that somebody registered runs itself, whatever it
computes: it may count, drop or log. So do those that need packages of their own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

from liger_multi._torch_private import constant_in_graphs
from liger_multi.checks import autocast, autocast_dtype
from liger_multi.patching.swap import unpatched_class

EAGER, BATCHED, GROUPED = "eager", "batched_mm_experts_forward", "grouped_mm_experts_forward"
"""The loop of a modeling file, and the functions of transformers that compute the same."""
_HOME = "transformers.integrations.moe"


def selected(module: Any) -> str | None:
    """The implementation that a call runs unpatched, if the operator stands for it; else None."""
    module_class = unpatched_class(module)
    if not _asks_an_interface(module_class):
        return EAGER
    config = vars(module).get("config")
    return _known(module_class, getattr(config, "_experts_implementation", None))


def computes_in_weight_dtype(module: Any, device_type: str) -> bool:
    """Whether autocast does not reach the GEMMs: grouped ones take the dtype of the weights."""
    return autocast_dtype(device_type) is not None and selected(module) == GROUPED


def autocast_of(module: Any, device_type: str) -> contextlib.AbstractContextManager[Any]:
    """No autocast where the selected implementation has none."""
    if computes_in_weight_dtype(module, device_type):
        return autocast(device_type, None)
    return contextlib.nullcontext()


@constant_in_graphs
def _asks_an_interface(module_class: type) -> bool:
    return _interface(getattr(module_class, "forward", None)) is not None


@constant_in_graphs
def _known(module_class: type, name: str | None) -> str | None:
    interface: Any = _interface(module_class.forward)  # type: ignore[attr-defined]
    function = interface.get(name)
    if function is None:
        return EAGER if name in (None, EAGER) else None
    home, own = getattr(function, "__module__", ""), getattr(function, "__name__", "")
    if home.startswith("liger_multi."):
        return EAGER  # the operator by its registered name
    return own if home == _HOME and own in (BATCHED, GROUPED) else None


@functools.lru_cache(maxsize=256)
def _interface(forward: Callable[..., Any] | None) -> Any:
    """The mapping of names that a forward asks: a variable of its decorator, or a global one."""
    code = getattr(forward, "__code__", None)
    if code is None or "_experts_implementation" not in code.co_names:
        return None
    variables = inspect.getclosurevars(forward)  # type: ignore[arg-type]
    places = (*variables.nonlocals.values(), *variables.globals.values())
    return next((place for place in places if _maps_names(place)), None)


def _maps_names(place: Any) -> bool:
    """Whether something is the mapping; in transformers 5.0 it is a dictionary."""
    named = isinstance(place, dict) and "grouped_mm" in place
    return named or hasattr(type(place), "_global_mapping")
