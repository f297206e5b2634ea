"""Forward or backward of an operator as a ``torch.library`` operator, with a fast path."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from liger_multi.dispatch import codegen
from liger_multi.dispatch.autograd import only_whole
from liger_multi.dispatch.registry import REFERENCE, module
from liger_multi.dispatch.resolve import resolve
from liger_multi.dispatch.stored import has_stored, with_numbers

if TYPE_CHECKING:
    from liger_multi.dispatch.op import Op

LIBRARY = Library("liger_multi", "DEF")
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
    """Forward or backward of an operator: a schema, a shape rule, and how it is called.

    Args:
        op: The operator.
        direction: ``forward`` or ``backward``.
        fake: The shape rule, whose signature is the schema.
        returns: Names of the outputs.
        mutates: Names of the arguments that it writes to.

    Attributes:
        params: Names of the arguments.
        tensor_indices: Which of them may be tensors.
        anchor: Index of the first tensor that is never None: its device and dtype choose a backend.
        overload: The ``torch.library`` operator.
    """

    def __init__(
        self,
        op: Op,
        direction: str,
        fake: Callable[..., Any],
        returns: tuple[str, ...],
        mutates: tuple[str, ...] = (),
    ) -> None:
        self.op, self.direction, self.fake = op, direction, fake
        self.returns, self.mutates = returns, mutates
        self.signature = inspect.signature(fake, eval_str=True)
        self.params = tuple(self.signature.parameters)
        self.schema = infer_schema(fake, mutates_args=mutates)
        types = [str(p.annotation) for p in self.signature.parameters.values()]
        self.tensor_indices = tuple(i for i, t in enumerate(types) if "Tensor" in t)
        optional = ("Optional", "None")
        self.anchor = next(
            i for i in self.tensor_indices if not any(word in types[i] for word in optional)
        )
        name = f"{op.name}_{direction}"
        LIBRARY.define(name + self.schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, self.from_torch_ops, "CompositeExplicitAutograd")
        LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"liger_multi::{name}", fake, lib=LIBRARY)
        self.overload = getattr(torch.ops.liger_multi, name).default

    @functools.cached_property
    def run(self) -> Callable[..., Any]:
        """:meth:`slow_path` for plain eager tensors, written out."""
        return self._written(codegen.primitive_source(self), "of a backend")

    @functools.cached_property
    def run_configured(self) -> Callable[..., Any]:
        """As :attr:`run`, for callers that pass the configuration before the arguments."""
        source = codegen.primitive_source(self, configured=True)
        return self._written(source, "in a configuration")

    def _written(self, source: str, title: str) -> Callable[..., Any]:
        names = {
            "prim": self,
            "slow_path": self.slow_path,
            "Primitive": Primitive,
            "call": _CALL,
            "module_of_several": _module_of_several,
        }
        return codegen.compiled(source, f"{self.op.name} {self.direction} {title}", names)

    def slow_path(self, *args: Any) -> Any:
        """Call directly for plain tensors; compilers and dispatch modes see ``torch.ops``."""
        if torch.compiler.is_compiling():
            return self.overload(*args)
        if profiler_enabled() or is_tracing():
            return self.overload(*args)
        if dispatch_mode_count() and not _inline.get():
            return self.overload(*args)
        if has_stored(args):
            return self.call(*args) if self.op.opens else self(*with_numbers(args))
        for i in self.tensor_indices:
            a = args[i]
            # Kernels read memory, and not the bit of a negated view (the imaginary part of a
            # conjugate); PyTorch's dispatcher resolves it.
            if a is not None and (type(a) not in codegen.PLAIN or a.is_meta or a.is_neg()):
                return self.overload(*args)
        return self.call(*args)

    __call__ = slow_path

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

    def from_torch_ops(self, *args: Any) -> Any:
        """Run :meth:`call` for callers of ``torch.ops``: autograd does not look into the function.

        Neither direction has a gradient of its own. Exported programs call them after
        ``run_decompositions``, on parameters that require grad.
        """
        if not torch.is_grad_enabled():
            return self.call(*args)
        with torch.no_grad():
            result = self.call(*args)
        if result is None:  # this operator writes to its arguments
            return None
        outs = (result,) if isinstance(result, Tensor) else result
        tensors = [args[i] for i in self.tensor_indices]
        marked = only_whole(self.op.name, self.direction, outs, tensors)
        return marked[0] if isinstance(result, Tensor) else marked

    def trace(self, *args: Any) -> Any:
        """Run the reference, for a compiler to look into; dtypes as they are."""
        reference = module(REFERENCE, self.op.name)
        chunking = importlib.import_module("liger_multi.reference.common.chunking")
        with chunking.one_piece(), WithoutAutocast():
            return getattr(reference, self.direction)(*args)


_CALL = Primitive.call  # tools that record calls replace the attribute of the class


@functools.cache
def _module_of_several(device: torch.device) -> Any:
    """The ``torch.<device type>`` module if the machine has several such devices, else None."""
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device.type)
    return module if module.device_count() > 1 else None


@constant_in_graphs
def source_hash() -> str:
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
