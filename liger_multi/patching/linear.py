"""Plain linear layers: under ``deterministic="rows"`` they call the operator, else PyTorch's.

A vendor's library chooses a GEMM by the number of rows, so that a row's result depends on the batch
that it stands in. The mode in force is asked at every call; in a compiled graph, once. Modules that
hand a weight of their own to ``F.linear``, as routers of experts do, are served as well; those that
multiply with it in another way are named in the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from liger_multi import ops
from liger_multi.dispatch.resolve import by_rows, inside_operator
from liger_multi.parameters import is_computed, stored
from liger_multi.patching.evidence import redirect
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

FORWARDS = {
    ("torch.nn.modules.linear", "Linear.forward"): False,
    ("transformers.pytorch_utils", "Conv1D.forward"): True,
}
"""The forwards that the operator stands for, and whether their weights lie the other way round."""


def _where(module_class: type[nn.Module]) -> tuple[str, str]:
    own = module_class.forward
    return own.__module__, getattr(own, "__qualname__", "")


def looks_like_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer of any kind, but not one with an adapter around it."""
    module_class, attributes = unpatched_class(module), vars(module)
    if issubclass(module_class, nn.Linear) or _where(module_class) in FORWARDS:
        return True
    of_sizes = isinstance(attributes.get("in_features"), int)
    of_sizes &= isinstance(attributes.get("out_features"), int)
    return of_sizes and "base_layer" not in attributes["_modules"]


def _weight(layer: nn.Module) -> Any:
    return stored(layer)


def _is_parametrized(layer: nn.Module) -> bool:
    return "parametrizations" in layer._modules


def _has_properties(layer: nn.Module) -> bool:
    return any(hasattr(type(layer), n) and is_computed(layer, n) for n in ("weight", "bias"))


_REFUSALS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        _is_parametrized,
        (
            "its parameters are computed (torch.nn.utils.parametrize), by a class that must stay "
            "on top of a patch: patch first"
        ),
    ),
    (_has_properties, "its class {kind} computes its weight whenever that is read"),
    (
        lambda layer: _where(unpatched_class(layer)) not in FORWARDS,
        "it has a forward of its own ({kind})",
    ),
    (
        lambda layer: unpatched_class(layer) is nn.modules.linear.NonDynamicallyQuantizableLinear,
        "nn.MultiheadAttention multiplies with its weight itself",
    ),
    (lambda layer: not isinstance(_weight(layer), Tensor), "it has no weight"),
    (
        lambda layer: _weight(layer).itemsize < 2 or not _weight(layer).is_floating_point(),
        "its weight is stored as {dtype}, which only its own call can turn into numbers",
    ),
    (
        lambda layer: type(_weight(layer)).__module__.startswith("torchao."),
        "its weight is a {weight}, whose products are its own",
    ),
)
"""Why a linear layer stays as it is: the first that holds, with its reason."""


def linear_refusal(layer: nn.Module) -> str | None:
    """Why a linear layer cannot call the operator, or None."""
    reason = next((text for holds, text in _REFUSALS if holds(layer)), None)
    if reason is None:
        return None
    weight = _weight(layer)
    return reason.format(
        kind=unpatched_class(layer).__name__,
        weight=type(weight).__name__,
        dtype=getattr(weight, "dtype", None),
    )


class LinearByRows(Patched):
    """A linear layer whose rows are independent where the configuration asks for it."""

    weight: Tensor
    bias: Tensor | None
    _liger_multi_transposed: ClassVar[bool]

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Say of the class what is asked at every call, and that PyTorch's own is a plain layer."""
        super().__init_subclass__(**keywords)
        swap = vars(cls).get("_liger_multi_swap")
        if swap is not None:
            cls._liger_multi_transposed = FORWARDS.get(_where(swap.stock), False)
            if swap.stock is nn.Linear:
                cls._liger_multi_plain = cls  # type: ignore[attr-defined]

    def forward(self, input: Tensor) -> Tensor:
        """The operator where rows must be independent, or the layer's own forward."""
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
    """Within a block, ``F.linear`` is the operator; not inside of operators."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        run = _called if func is F.linear and not inside_operator() else func
        return run(*args, **(kwargs or {}))


def _called(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The operator, with the names of ``F.linear``."""
    return ops.linear(input, weight, bias)


class CallsLinear(Patched):
    """A module whose forward hands weights of its own to ``F.linear``."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of its class, with the operator where rows must be independent."""
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
"""What a forward loads by name where it multiplies with weights."""


def _gemms(module: nn.Module) -> set[str]:
    """Which of them a module with weights of its own loads."""
    axes = max((w.ndim for w in module._parameters.values() if w is not None), default=0)
    module_class = unpatched_class(module)
    if axes < 2 or module_class.__module__.startswith("torch."):
        return set()
    functions = redirect.methods(module_class).values()
    gemms = {name for f in functions for name in redirect.names(f)} & set(GEMMS)
    # transformers chooses the GEMMs of weights that are stacked, whatever the forward says
    return gemms | {"stacked weights"} if gemms and axes > 2 else gemms


def _find_calls(path: str, module: nn.Module, options: Options | None) -> Iterator[Change]:
    """A module that is no linear layer, where it multiplies with weights of its own."""
    gemms = _gemms(module)
    if not gemms or (isinstance(module, Patched) and not isinstance(module, CallsLinear)):
        return
    others = ", ".join(sorted(gemms - {"linear"}))
    itself = f"it multiplies with its weights itself ({others})" if others else None
    reason = conflict_of(module) or itself
    yield from _changes_of(path, module, options, reason, CallsLinear, "linear in its forward")


def _changes_of(
    path: str,
    module: nn.Module,
    options: Options | None,
    reason: str | None,
    patched_class: type[Patched],
    runs: str,
) -> Iterator[Change]:
    if isinstance(module, patched_class) and (reason or options is None):
        yield Restore(path, module)
    if options is not None and reason:
        yield Skipped(path, "linear", reason)
    elif options is not None:
        swap = Swap("linear", stock_class(module), patched_class, options)
        yield Replace(path, module, swap, runs, options.shown())


def find_linear(model: nn.Module, request: Request) -> Iterator[Change]:
    """Linear layers that nothing else serves, the last of all."""
    options = request.get("linear")
    for path, module in model.named_modules():
        swap = swapped(module)
        if options is not None and swap is not None and swap.op in MIXER_OPS:
            yield Skipped(path, "linear", DECODED, strict=False)
        if not looks_like_linear(module):
            yield from _find_calls(path, module, options)
            continue
        if not isinstance(module, Patched) or isinstance(module, LinearByRows):
            reason = None if options is None else conflict_of(module) or linear_refusal(module)
            yield from _changes_of(path, module, options, reason, LinearByRows, "linear")
