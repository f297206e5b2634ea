"""Forward or backward of an operator as a ``torch.library`` operator, with a fast path.

The choice of a backend per (operator, direction, device, dtype) is resolved once and cached.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.library import Library, infer_schema

from liger_multi._torch_private import (
    WithoutAutocast,
    constant_in_graphs,
    dispatch_mode_count,
    is_any_autocast_enabled,
    is_tracing,
    profiler_enabled,
)
from liger_multi.dispatch import bitwise, flat, launch
from liger_multi.dispatch.config import AUTO, Choice, Configuration, current, stated
from liger_multi.dispatch.double_backward import only_whole
from liger_multi.dispatch.registry import REFERENCE, backends, chain, module, serving, unavailable
from liger_multi.errors import BackendUnavailableError, ContractError, unknown

if TYPE_CHECKING:
    from liger_multi.dispatch.op import Op

# --- the choice of a backend ---

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
    found = module(name, prim.op.name)
    static = getattr(found, "supports_static", None)
    if refusal is None and static is not None:
        refusal = static(device, dtype)
    if refusal is None and mode:
        refusal = bitwise.refusal(name, prim, mode)
    if refusal is not None:
        return Candidate(name, None, refusal)
    if mode:
        call = _strictly(name, prim, call, mode)
    return Candidate(name, call, None, _per_call(found, prim))


def _strictly(name: str, prim: Primitive, call: Any, mode: str) -> Callable[..., Any]:
    """The function under a setting of the switch.

    Under "rows", the reference goes row by row, and kernels get starts that they can load from by
    vectors: a row's bits would follow its address otherwise.
    """
    strict = importlib.import_module("liger_multi.reference.common.strict")
    record = backends()[name]
    gemm = record.gemm_by_rows() if mode == "rows" and record.gemm_by_rows else None
    if mode == "rows":
        whole: Any = bitwise.row_by_row if bitwise.goes_row_by_row(name, prim) else bitwise.aligned
        call = functools.partial(whole, prim, call)

    def run(*args: Any) -> Any:
        token = launch.any_rows.set(mode == "rows")
        try:
            with strict.within(mode, gemm):
                return call(*args)
        finally:
            launch.any_rows.reset(token)

    return run


def mode_of(config: Configuration) -> str:
    """The setting of the switch in force."""
    stated = config.deterministic
    return bitwise.follows_torch() if stated is None else stated


def candidates(
    prim: Primitive, config: Configuration, device: torch.device, dtype: torch.dtype,
    mode: str | None = None,
) -> list[Candidate]:  # fmt: skip
    """Every backend that the configuration lets try this direction, in order."""
    choice = config.choice(prim.op.name, device.type)
    names: list[str] = []
    if choice.order == AUTO:
        names = [name for record in serving(device.type) for name in chain(record.name)] + [
            REFERENCE
        ]
    else:
        names = [name for first in choice.order for name in chain(first)]
    mode = mode_of(config) if mode is None else mode
    return [candidate(name, prim, device, dtype, mode) for name in dict.fromkeys(names)]


_WANTED = {
    "": "",
    "deterministic": "; leave the operator out of the patch, or run it in use(deterministic=False)",
    "rows": "; leave the operator out of the patch, or run it in use(deterministic=True)",
}


class Dispatch:
    """The candidates for one direction in order; the first unconditional one is called at once."""

    def __init__(
        self, prim: Primitive, config: Configuration, device: torch.device, dtype: torch.dtype,
        mode: str,
    ) -> None:  # fmt: skip
        self.prim, self.device, self.dtype = prim, device, dtype
        self.choice: Choice = config.choice(prim.op.name, device.type)
        self.mode, self.candidates = mode, candidates(prim, config, device, dtype, mode)
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
        found = self.chosen(args).call
        assert found is not None
        return found

    def chosen(self, args: tuple[Any, ...]) -> Candidate:
        """The candidate that runs these arguments, or an error that lists every refusal."""
        refused: list[str] = []
        for item in self.usable:
            reason = item.supports(args) if item.supports is not None else None
            if reason is None:
                self._say(item.name, refused)
                return item
            refused.append(f"{item.name} {reason}")
        refused += [f"{c.name} {c.reason}" for c in self.candidates if c.reason]
        raise BackendUnavailableError(
            f"{self.prim.op.name} {self.prim.direction} on {self.device.type} ({self.dtype}), "
            f"pinned to {list(self.choice.order)} by {self.choice.source}: {'; '.join(refused)}"
            f"{_WANTED[self.mode]}"
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


def plan_for(prim: Primitive, tensor: Tensor) -> Dispatch:
    """The candidates for a direction on tensors like this one, by a cached look-up."""
    config = current()
    mode = config.deterministic
    if mode is None:
        mode = bitwise.follows_torch()
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


# --- the operator of torch.library ---

LIBRARY = Library("liger_multi", "DEF")
Function = TypeVar("Function", bound=Callable[..., Any])
_inline: ContextVar[bool] = ContextVar("liger_multi_inline", default=False)


@contextlib.contextmanager
def inline_ops() -> Iterator[None]:
    """Let dispatch modes see the tensors inside operators instead of one opaque call each."""
    token = _inline.set(True)
    try:
        yield
    finally:
        _inline.reset(token)


class Primitive:
    """Forward or backward of an operator: a schema, a shape rule, a look-up of the function."""

    def __init__(
        self,
        op: Op,
        direction: str,
        fake: Callable[..., Any],
        returns: str,
        mutates: Sequence[str] = (),
    ) -> None:
        self.op, self.direction, self.fake, self.returns = (
            op,
            direction,
            fake,
            tuple(returns.split()),
        )
        self.signature = signature = inspect.signature(fake, eval_str=True)
        self.params = tuple(signature.parameters)
        self.mutates = tuple(mutates)
        self.schema = infer_schema(fake, mutates_args=self.mutates)
        kinds = [str(p.annotation) for p in signature.parameters.values()]
        self.tensors = tuple("Tensor" in kind for kind in kinds)
        self.places = tuple(i for i, tensor in enumerate(self.tensors) if tensor)
        self.anchor = next(
            i
            for i, k in enumerate(kinds)
            if "Tensor" in k and "Optional" not in k and "None" not in k
        )
        name = f"{op.name}_{direction}"
        LIBRARY.define(name + self.schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, self.outside, "CompositeExplicitAutograd")
        LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")  # as outside() has it
        torch.library.register_fake(f"liger_multi::{name}", fake, lib=LIBRARY)
        self.overload = getattr(torch.ops.liger_multi, name).default

    @functools.cached_property
    def run(self) -> Callable[..., Any]:
        """The call of what is usual, written out; the other calls are :meth:`__call__`'s."""
        return self._written(flat.primitive_source(self), "of a backend")

    @functools.cached_property
    def run_in(self) -> Callable[..., Any]:
        """The same for a caller that knows the configuration in force: its first argument."""
        return self._written(flat.primitive_source(self, configured=True), "in a configuration")

    def _written(self, source: str, title: str) -> Callable[..., Any]:
        names = {
            "prim": self, "general": self.__call__, "Primitive": Primitive, "call": _CALL,
            "module_of_several": _module_of_several,
        }  # fmt: skip
        return flat.compiled(source, f"{self.op.name} {self.direction} {title}", names)

    def call(self, *args: Any) -> Any:
        """Run the chosen backend's function on the device of the tensors, dtypes as they are."""
        if is_any_autocast_enabled():
            with WithoutAutocast():
                return Primitive.call(self, *args)
        device = args[self.anchor].device
        module = _module_of_several(device)
        if module is None or module.current_device() == device.index:
            return resolve(self, args)(*args)
        with module.device(device.index):
            return resolve(self, args)(*args)

    def outside(self, *args: Any) -> Any:
        """The same for callers of ``torch.ops``: autograd does not look into the function.

        Neither has a gradient of its own. Exported programs call them after
        ``run_decompositions``, on parameters that require grad.
        """
        if not torch.is_grad_enabled():
            return self.call(*args)
        with torch.no_grad():
            found = self.call(*args)
        if found is None:  # it writes to its arguments
            return None
        outs = (found,) if isinstance(found, Tensor) else found
        marked = only_whole(self.op.name, self.direction, outs, [args[i] for i in self.places])
        return marked[0] if isinstance(found, Tensor) else marked

    def trace(self, *args: Any) -> Any:
        """Run the reference, for a compiler to look into; dtypes as they are."""
        reference = module(REFERENCE, self.op.name)
        whole = importlib.import_module("liger_multi.reference.common.chunking").one_piece
        with whole(), WithoutAutocast():
            return getattr(reference, self.direction)(*args)

    def __call__(self, *args: Any) -> Any:
        """Call directly for plain tensors, through ``torch.ops`` where somebody looks on."""
        if torch.compiler.is_compiling():
            return self.overload(*args)
        if profiler_enabled() or is_tracing():
            return self.overload(*args)
        if dispatch_mode_count() and not _inline.get():
            return self.overload(*args)
        for i in self.places:
            a = args[i]
            # kernels read memory, and not the bit of a negated view (the imaginary part of a
            # conjugate); PyTorch's dispatcher resolves it
            if a is not None and (type(a) not in flat.PLAIN or a.is_meta or a.is_neg()):
                return self.overload(*args)
        return self.call(*args)


_CALL = Primitive.call  # which those replace who record calls


@functools.cache
def _module_of_several(device: torch.device) -> Any:
    """The module of a type of device of which this machine has several, else None."""
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device.type)
    return module if module.device_count() > 1 else None


@constant_in_graphs
def _read_configuration() -> None:
    """A file that the environment names is read before its settings are asked for."""
    current()


def mode_in_force() -> str:
    """The setting of the switch here and now; graphs are compiled again where it is another one."""
    if not torch.compiler.is_compiling():
        return mode_of(current())
    _read_configuration()
    said = stated()
    if said is not None:
        return said
    return "deterministic" if torch.are_deterministic_algorithms_enabled() else ""


def by_rows() -> bool:
    """Whether rows must not depend on each other here and now."""
    return mode_in_force() == "rows"


@constant_in_graphs
def automatic(op: str) -> bool:
    """Whether its reference may be traced: nobody pinned a backend."""
    for layer in current().layers:
        for device in {"", *layer.ops, *layer.default}:
            choice = layer.choice(op, device)
            if choice is not None and choice.order != AUTO:
                return False
    return True


@constant_in_graphs
def sources() -> str:
    """A hash of the code that expands operators in graphs.

    It is part of every graph. PyTorch keeps compiled graphs on disk, and would otherwise serve
    those of another version, as it knows operators by name only.
    """
    return _hash_of_sources()


@functools.cache
def _hash_of_sources() -> str:
    package = Path(__file__).parent.parent
    reference = importlib.import_module("liger_multi.reference").__path__[0]
    folders = (package / "dispatch", package / "ops", Path(reference))
    files = [*package.glob("*.py"), *(file for f in folders for file in f.rglob("*.py"))]
    joined = b"".join(file.read_bytes() for file in sorted(files))
    return hashlib.sha256(joined).hexdigest()[:16]
