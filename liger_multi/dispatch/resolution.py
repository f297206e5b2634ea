"""The choice of a backend per (operator, direction, device, dtype), resolved once and cached."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.library import infer_schema

from liger_multi.dispatch.config import Configuration, current
from liger_multi.dispatch.config_file import AUTO, Choice
from liger_multi.dispatch.registry import REFERENCE, backends, chain, module, serving, unavailable
from liger_multi.errors import BackendUnavailableError, ContractError, unknown

if TYPE_CHECKING:
    from liger_multi.dispatch.primitive import Primitive

logger = logging.getLogger("liger_multi")


@dataclass(frozen=True)
class Candidate:
    """One backend considered for one direction: the function to call, or the reason against it."""

    name: str
    call: Callable[..., Any] | None
    reason: str | None
    supports: Callable[..., str | None] | None = None


@functools.cache
def _half(name: str, prim: Primitive) -> tuple[Callable[..., Any] | None, str | None]:
    found = module(name, prim.op.name)
    if found is None:
        return None, f"has no {prim.op.name}"
    call = getattr(found, prim.direction, None)
    if call is None:
        return None, f"has no {prim.direction} of {prim.op.name}"
    schema = infer_schema(call, mutates_args=prim.mutates)
    if schema != prim.schema:
        raise ContractError(
            f"{call.__module__}.{call.__qualname__} has the schema {schema}, its contract is "
            f"{prim.schema}"
        )
    return call, None


def _per_call(found: Any, prim: Primitive) -> Callable[..., str | None] | None:
    supports = getattr(found, "supports", None)
    if supports is None:
        return None
    wanted = inspect.signature(supports).parameters
    known = {*prim.op.fwd.params, *prim.op.bwd.params, "direction"}
    wrong = next((name for name in wanted if name not in known), None)
    if wrong is not None:  # it would never be asked
        what = f"argument of {supports.__module__}.{supports.__qualname__}"
        raise ContractError(unknown(what, wrong, sorted(known)))
    if not set(wanted) <= {*prim.params, "direction"}:
        return None  # it speaks of arguments that only the other direction has
    index = {name: prim.params.index(name) for name in wanted if name != "direction"}
    direction = {"direction": prim.direction} if "direction" in wanted else {}
    return lambda args: supports(**{n: args[i] for n, i in index.items()}, **direction)


def candidate(name: str, prim: Primitive, device: torch.device, dtype: torch.dtype) -> Candidate:
    """Weigh one backend for one direction on tensors of a device and dtype."""
    record = backends()[name]
    refusal = unavailable(name) or record.supports(device, dtype)
    if refusal is None and record.device_type not in (None, device.type):
        refusal = f"serves {record.device_type} tensors, not {device.type}"
    if refusal is not None:
        return Candidate(name, None, refusal)
    call, refusal = _half(name, prim)
    found = module(name, prim.op.name)
    static = getattr(found, "supports_static", None)
    if refusal is None and static is not None:
        refusal = static(device, dtype)
    if refusal is not None:
        return Candidate(name, None, refusal)
    return Candidate(name, call, None, _per_call(found, prim))


def candidates(
    prim: Primitive, config: Configuration, device: torch.device, dtype: torch.dtype
) -> list[Candidate]:
    """Every backend that the configuration lets try this direction, in order."""
    choice = config.choice(prim.op.name, device.type)
    names: list[str] = []
    if choice.order == AUTO:
        names = [name for record in serving(device.type) for name in chain(record.name)] + [
            REFERENCE
        ]
    else:
        names = [name for first in choice.order for name in chain(first)]
    return [candidate(name, prim, device, dtype) for name in dict.fromkeys(names)]


class Dispatch:
    """The candidates for one direction in order; the first unconditional one is called at once."""

    def __init__(
        self, prim: Primitive, config: Configuration, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.prim, self.device, self.dtype = prim, device, dtype
        self.choice: Choice = config.choice(prim.op.name, device.type)
        self.candidates = candidates(prim, config, device, dtype)
        self.usable = [c for c in self.candidates if c.call is not None]
        self.said: set[str] = set()
        self.direct = (
            self.usable[0].call if self.usable and self.usable[0].supports is None else None
        )
        if self.direct is not None:
            self._say(
                self.usable[0].name, [f"{c.name} {c.reason}" for c in self.candidates if c.reason]
            )

    def function(self, args: tuple[Any, ...]) -> Callable[..., Any]:
        """The function for these arguments, or an error that lists every refusal."""
        if self.direct is not None:
            return self.direct
        refused: list[str] = []
        for item in self.usable:
            reason = item.supports(args) if item.supports is not None else None
            if reason is None:
                assert item.call is not None
                self._say(item.name, refused)
                return item.call
            refused.append(f"{item.name} {reason}")
        refused += [f"{c.name} {c.reason}" for c in self.candidates if c.reason]
        raise BackendUnavailableError(
            f"{self.prim.op.name} {self.prim.direction} on {self.device.type} ({self.dtype}), "
            f"pinned to {list(self.choice.order)} by {self.choice.source}: {'; '.join(refused)}"
        )

    def _say(self, name: str, refused: list[str]) -> None:
        """Tell, once, that an accelerator's own backend was passed over for the reference."""
        text = "; ".join(refused)
        if name == REFERENCE and refused and not self.choice.pinned and text not in self.said:
            self.said.add(text)
            logger.warning(
                "%s %s uses the reference on %s: %s",
                self.prim.op.name,
                self.prim.direction,
                self.device,
                text,
            )


def resolve(prim: Primitive, args: tuple[Any, ...]) -> Callable[..., Any]:
    """The function that runs this direction for these arguments, by a cached look-up."""
    tensor = args[prim.anchor]
    config = current()
    key = (prim, tensor.device, tensor.dtype)
    plan = config.plans.get(key)
    if plan is None:
        plan = config.plans[key] = Dispatch(prim, config, tensor.device, tensor.dtype)
    return plan.direct or plan.function(args)
