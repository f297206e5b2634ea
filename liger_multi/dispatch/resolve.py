"""The choice of a backend for one direction of an operator: who may run it, and who does.

:func:`candidates` weighs the backends that the configuration names, for a device and a dtype.
:class:`Dispatch` holds them for calls. :func:`resolve` looks it up, once per operator, direction,
device, dtype and setting of ``deterministic``; a configuration keeps its own.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.library import infer_schema

from liger_multi._torch_private import constant_in_graphs
from liger_multi.dispatch import bitwise, launch
from liger_multi.dispatch.config import AUTO, Choice, Configuration, current, deterministic_setting
from liger_multi.dispatch.registry import REFERENCE, backends, chain, module, serving, unavailable
from liger_multi.errors import BackendUnavailableError, ContractError, unknown

if TYPE_CHECKING:
    from liger_multi.dispatch.op import Op
    from liger_multi.dispatch.torch_ops import Primitive

logger = logging.getLogger("liger_multi")


@dataclass(frozen=True)
class Candidate:
    """One backend considered for one direction: the function to call, or the reason against it."""

    name: str
    call: Callable[..., Any] | None
    reason: str | None
    supports: Callable[..., str | None] | None = None


@functools.cache
def _implementation(name: str, prim: Primitive) -> tuple[Callable[..., Any] | None, str | None]:
    implementation = module(name, prim.op.name)
    if implementation is None:
        return None, f"has no {prim.op.name}"
    call = getattr(implementation, prim.direction, None)
    if call is None:
        return None, f"has no {prim.direction} of {prim.op.name}"
    schema = infer_schema(call, mutates_args=prim.mutates)
    if schema != prim.schema:
        raise ContractError(
            f"{call.__module__}.{call.__qualname__} has the schema {schema}, its contract is "
            f"{prim.schema}"
        )
    return call, None


def _per_call(implementation: Any, prim: Primitive) -> Callable[..., str | None] | None:
    """The ``supports`` of a module, over the arguments of a direction as a tuple."""
    supports = getattr(implementation, "supports", None)
    if supports is None:
        return None
    names = inspect.signature(supports).parameters
    param_names = {*prim.op.fwd.params, *prim.op.bwd.params, "direction"}
    unknown_name = next((name for name in names if name not in param_names), None)
    if unknown_name is not None:  # it would never be called
        noun = f"argument of {supports.__module__}.{supports.__qualname__}"
        raise ContractError(unknown(noun, unknown_name, sorted(param_names)))
    if not set(names) <= {*prim.params, "direction"}:
        return None  # it takes arguments that only the other direction has
    index = {name: prim.params.index(name) for name in names if name != "direction"}
    direction = {"direction": prim.direction} if "direction" in names else {}
    return lambda args: supports(**{n: args[i] for n, i in index.items()}, **direction)


def candidate(
    name: str, prim: Primitive, device: torch.device, dtype: torch.dtype, mode: str = ""
) -> Candidate:
    """Weigh one backend for one direction on tensors of a device and dtype."""
    record = backends()[name]
    refusal = unavailable(name) or record.supports(device, dtype)
    if refusal is None and record.device_type not in (None, device.type):
        refusal = f"serves {record.device_type} tensors, not {device.type}"
    if refusal is not None:
        return Candidate(name, None, refusal)
    call, refusal = _implementation(name, prim)
    implementation = module(name, prim.op.name)
    static = getattr(implementation, "supports_static", None)
    if refusal is None and static is not None:
        refusal = static(device, dtype)
    if refusal is None and mode:
        refusal = bitwise.refusal(name, prim, mode)
    if refusal is not None:
        return Candidate(name, None, refusal)
    if mode:
        call = _strictly(name, prim, call, mode)
    return Candidate(name, call, None, _per_call(implementation, prim))


def _strictly(name: str, prim: Primitive, call: Any, mode: str) -> Callable[..., Any]:
    """The function under a setting of the switch.

    Under "rows", the reference runs row by row, and kernels get aligned tensors: otherwise the bits
    of a row would depend on its address.
    """
    strict = importlib.import_module("liger_multi.reference.common.strict")
    record = backends()[name]
    gemm = record.gemm_by_rows() if mode == "rows" and record.gemm_by_rows else None
    if mode == "rows":
        by_row = bitwise.goes_row_by_row(name, prim)
        wrapper: Any = bitwise.row_by_row if by_row else bitwise.aligned
        call = functools.partial(wrapper, prim, call)

    def run(*args: Any) -> Any:
        token = launch.any_rows.set(mode == "rows")
        try:
            with strict.in_mode(mode, gemm):
                return call(*args)
        finally:
            launch.any_rows.reset(token)

    return run


def mode_of(config: Configuration) -> str:
    """The setting of the switch in force."""
    mode = config.deterministic
    return bitwise.follows_torch() if mode is None else mode


def candidates(
    prim: Primitive,
    config: Configuration,
    device: torch.device,
    dtype: torch.dtype,
    mode: str | None = None,
) -> list[Candidate]:
    """Every backend that the configuration lets try this direction, in order."""
    choice = config.choice(prim.op.name, device, dtype)
    order: Iterable[str] = choice.order
    if choice.order == AUTO:
        order = [*(record.name for record in serving(device.type)), REFERENCE]
    names = [name for first in order for name in chain(first)]
    mode = mode_of(config) if mode is None else mode
    return [candidate(name, prim, device, dtype, mode) for name in dict.fromkeys(names)]


_ADVICE = {
    "": "",
    "deterministic": "; leave the operator out of the patch, or run it in use(deterministic=False)",
    "rows": "; leave the operator out of the patch, or run it in use(deterministic=True)",
}


class Dispatch:
    """The candidates for one direction in order; the first unconditional one is called at once."""

    def __init__(
        self,
        prim: Primitive,
        config: Configuration,
        device: torch.device,
        dtype: torch.dtype,
        mode: str,
    ) -> None:
        self.prim, self.device, self.dtype = prim, device, dtype
        self.choice: Choice = config.choice(prim.op.name, device, dtype)
        self.mode, self.candidates = mode, candidates(prim, config, device, dtype, mode)
        self.usable = [c for c in self.candidates if c.call is not None]
        self.logged: set[str] = set()
        self.direct = (
            self.usable[0].call if self.usable and self.usable[0].supports is None else None
        )
        if self.direct is not None:
            self._log(
                self.usable[0].name, [f"{c.name} {c.reason}" for c in self.candidates if c.reason]
            )

    def function(self, args: tuple[Any, ...]) -> Callable[..., Any]:
        """The function for these arguments, or an error that lists every refusal."""
        call = self.chosen(args).call
        assert call is not None
        return call

    def chosen(self, args: tuple[Any, ...]) -> Candidate:
        """The candidate that runs these arguments, or an error that lists every refusal."""
        refused: list[str] = []
        for item in self.usable:
            reason = item.supports(args) if item.supports is not None else None
            if reason is None:
                self._log(item.name, refused)
                return item
            refused.append(f"{item.name} {reason}")
        refused += [f"{c.name} {c.reason}" for c in self.candidates if c.reason]
        raise BackendUnavailableError(
            f"{self.prim.op.name} {self.prim.direction} on {self.device.type} ({self.dtype}), "
            f"pinned to {list(self.choice.order)} by {self.choice.source}: {'; '.join(refused)}"
            f"{_ADVICE[self.mode]}"
        )

    def _log(self, name: str, refused: list[str]) -> None:
        """Log once that an accelerator's backend was skipped in favor of the reference."""
        text = "; ".join(refused)
        if name == REFERENCE and refused and not self.choice.pinned and text not in self.logged:
            self.logged.add(text)
            logger.warning(
                "%s %s uses the reference on %s: %s",
                self.prim.op.name,
                self.prim.direction,
                self.device,
                text,
            )


def plan_for(prim: Primitive, tensor: Tensor) -> Dispatch:
    """The candidates for a direction on tensors like this one, by a cached look-up."""
    config = current()
    mode = mode_of(config)
    key = (prim, tensor.device, tensor.dtype, mode)
    plan: Dispatch | None = config.plans.get(key)
    if plan is None:
        plan = config.plans[key] = Dispatch(prim, config, tensor.device, tensor.dtype, mode)
    return plan


def resolve(prim: Primitive, args: tuple[Any, ...]) -> Callable[..., Any]:
    """The function that runs this direction for these arguments."""
    plan = plan_for(prim, args[prim.anchor])
    return plan.direct or plan.function(args)


def may_overwrite(op: Op, tensor: Tensor) -> bool:
    """Whether a permission to write in place is used.

    It is not where independent rows are asked for and no backend has them in place.
    """
    return mode_of(current()) != "rows" or bool(plan_for(op.fwd, tensor).usable)


# --- the setting of "deterministic" in force ---


@constant_in_graphs
def _read_configuration() -> None:
    """Read the file that the environment names before its settings are needed."""
    current()


def mode_in_force() -> str:
    """The setting of the switch here and now; graphs are compiled again where it is another one."""
    if not torch.compiler.is_compiling():
        return mode_of(current())
    _read_configuration()
    mode = deterministic_setting()
    if mode is not None:
        return mode
    return "deterministic" if torch.are_deterministic_algorithms_enabled() else ""


def by_rows() -> bool:
    """Whether rows must not depend on each other here and now."""
    return mode_in_force() == "rows"


def inside_operator() -> bool:
    """Whether a function of a backend runs here and now, under a setting of the switch.

    Graphs do not ask: what they trace of an operator is not within a block of a caller.
    """
    if torch.compiler.is_compiling():
        return False
    return bool(importlib.import_module("liger_multi.reference.common.strict").strict())


@constant_in_graphs
def automatic(op: str) -> bool:
    """Whether its reference may be traced, because no backend is pinned."""
    for layer in current().layers:
        quarantined = layer.quarantine.ops if layer.quarantine else {}
        for section in {"", *layer.ops, *layer.default, *quarantined}:
            choices = (layer.choice(op, (section, "")), layer.kept_from(op, (section,)))
            if any(choice is not None and choice.order != AUTO for choice in choices):
                return False
    return True
