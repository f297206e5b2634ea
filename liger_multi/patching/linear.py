"""Plain linear layers, which call ``ops.linear`` under ``deterministic="rows"``.

A vendor's library chooses a GEMM by the number of rows, so the result of a row depends on its
batch. :func:`find_linear` yields a patch for every layer that no other part has patched. A patched
layer (:class:`LinearByRows`) reads the mode at every call; a compiled graph reads it once. Modules
that pass a weight of their own to ``F.linear``, such as routers of experts, are patched too
(:class:`CallsLinear`). The report names modules that multiply in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from liger_multi import ops
from liger_multi.dispatch.resolve import by_rows, inside_operator
from liger_multi.modules.parameters import is_computed, stored
from liger_multi.patching.evidence import redirect
from liger_multi.patching.evidence.facts import LINEAR_FORWARDS, ModelFacts, home_of
from liger_multi.patching.evidence.signature import code_holds
from liger_multi.patching.options import MIXER_OPS, Options, Request, run_bound
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
    unpatched_class,
)

_REFUSALS: tuple[tuple[Callable[[Any, Any], bool], str], ...] = (
    (
        lambda layer, weight: "parametrizations" in layer._modules,
        (
            "its parameters are computed (torch.nn.utils.parametrize), by a class that must stay "
            "on top of a patch: patch first"
        ),
    ),
    (
        lambda layer, weight: any(
            hasattr(type(layer), name) and is_computed(layer, name) for name in ("weight", "bias")
        ),
        "its class {module_class} computes its weight whenever that is read",
    ),
    (
        lambda layer, weight: home_of(unpatched_class(layer)) not in LINEAR_FORWARDS,
        "it has a forward of its own ({module_class})",
    ),
    (
        lambda layer, weight: (
            unpatched_class(layer) is nn.modules.linear.NonDynamicallyQuantizableLinear
        ),
        "nn.MultiheadAttention multiplies with its weight itself",
    ),
    (lambda layer, weight: weight is None, "it has no weight"),
    (
        lambda layer, weight: weight.itemsize < 2 or not weight.is_floating_point(),
        "its weight is stored as {dtype}, which only its own call can turn into numbers",
    ),
    (
        lambda layer, weight: type(weight).__module__.startswith("torchao."),
        "its weight is a {weight_class}, whose products are its own",
    ),
)
"""Conditions on a layer and its stored weight, and why a layer that meets one keeps its forward."""


def linear_refusal(layer: nn.Module) -> str | None:
    """Why a linear layer cannot call the operator: the first of the conditions; None if it can."""
    weight = stored(layer)
    names = {
        "module_class": unpatched_class(layer).__name__,
        "weight_class": type(weight).__name__,
        "dtype": getattr(weight, "dtype", None),
    }
    return next(
        (reason.format(**names) for applies, reason in _REFUSALS if applies(layer, weight)), None
    )


class LinearByRows(Patched):
    """A linear layer whose rows are independent under ``deterministic="rows"``."""

    weight: Tensor
    bias: Tensor | None
    _liger_multi_transposed: ClassVar[bool]

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Set what every call reads of the class, and mark patched ``nn.Linear`` as plain."""
        super().__init_subclass__(**keywords)
        swap = vars(cls).get("_liger_multi_swap")
        if swap is not None:
            cls._liger_multi_transposed = LINEAR_FORWARDS.get(home_of(swap.stock), False)
            if swap.stock is nn.Linear:
                cls._liger_multi_plain = cls  # type: ignore[attr-defined]

    def forward(self, input: Tensor) -> Tensor:
        """The operator under ``deterministic="rows"``, or the original forward."""
        module_class = type(self)
        if not issubclass(module_class, LinearByRows):
            return cast(Tensor, module_class.forward(self, input))
        if not (by_rows() and code_holds(module_class)):
            return cast(Tensor, original(module_class)(self, input))
        options = cast(Options, module_class._liger_multi_swap.settings)
        return cast(Tensor, run_bound(options, ("linear",), _apply, self, input, module_class))


def _apply(layer: Any, x: Tensor, module_class: type[LinearByRows]) -> Tensor:
    weight = layer.weight
    return ops.linear(x, weight.t() if module_class._liger_multi_transposed else weight, layer.bias)


class _LinearCalls(TorchFunctionMode):
    """Replace ``F.linear`` by the operator within a block, but not inside of operators."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        run = _linear_by_operator if func is F.linear and not inside_operator() else func
        return run(*args, **(kwargs or {}))


def _linear_by_operator(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The operator with the signature of ``F.linear``."""
    return ops.linear(input, weight, bias)


class CallsLinear(Patched):
    """A module whose forward passes weights of its own to ``F.linear``."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward, with the operator under ``deterministic="rows"``."""
        module_class = type(self)
        if not issubclass(module_class, CallsLinear):
            return module_class.forward(self, *args, **kwargs)
        if not by_rows():
            return original(module_class)(self, *args, **kwargs)
        options = cast(Options, module_class._liger_multi_swap.settings)
        return run_bound(options, ("linear",), _with_operator, self, module_class, args, kwargs)


def _with_operator(
    module: Any, module_class: type[CallsLinear], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    with _LinearCalls():
        return original(module_class)(module, *args, **kwargs)


DECODED = (
    "what it decodes from a state may have other bits than in the whole sequence, which another "
    "kernel computes"
)
GEMMS = ("addmm", "baddbmm", "bmm", "einsum", "grouped_mm", "linear", "matmul", "mm")
"""Names that a forward loads if it multiplies with weights."""


def _gemms(module: nn.Module) -> set[str]:
    """Names of :data:`GEMMS` that the methods of a module with its own weights load."""
    axes = max((w.ndim for w in module._parameters.values() if w is not None), default=0)
    module_class = unpatched_class(module)
    if axes < 2 or module_class.__module__.startswith("torch."):
        return set()
    functions = redirect.methods(module_class).values()
    gemms = {name for f in functions for name in redirect.names(f)} & set(GEMMS)
    # transformers chooses the GEMMs of stacked weights itself
    return gemms | {"stacked weights"} if gemms and axes > 2 else gemms


def _find_calls(path: str, module: nn.Module, options: Options) -> Iterator[Change]:
    """The change for a module that is no linear layer, but multiplies with its own weights."""
    gemms = _gemms(module)
    if not gemms or (isinstance(module, Patched) and not isinstance(module, CallsLinear)):
        return
    other_gemms = ", ".join(sorted(gemms - {"linear"}))
    itself = f"it multiplies with its weights itself ({other_gemms})" if other_gemms else None
    reason = conflict_of(module) or itself
    yield from _changes_of(path, module, options, reason, CallsLinear, "linear in its forward")


def _changes_of(
    path: str,
    module: nn.Module,
    options: Options,
    reason: str | None,
    patched_class: type[Patched],
    runs: str,
) -> Iterator[Change]:
    if reason:
        if isinstance(module, patched_class):
            yield Restore(path, module)
        yield Skipped(path, "linear", reason)
    else:
        swap = Swap("linear", stock_class(module), patched_class, options)
        yield Replace(path, module, swap, runs, options.shown())


def find_linear(model: ModelFacts, request: Request) -> Iterator[Change]:
    """Linear layers that no other part has patched."""
    options = request.get("linear")
    if options is None:
        yield from (Restore(*entry) for entry in model.instances(LinearByRows, CallsLinear))
        return
    linears = {id(module) for _, module in model.linears}
    for path, module in model.modules:
        swap = swapped(module)
        if swap is not None and swap.op in MIXER_OPS:
            yield Skipped(path, "linear", DECODED, strict=False)
        if id(module) not in linears:
            yield from _find_calls(path, module, options)
        elif not isinstance(module, Patched) or isinstance(module, LinearByRows):
            reason = conflict_of(module) or linear_refusal(module)
            yield from _changes_of(path, module, options, reason, LinearByRows, "linear")
