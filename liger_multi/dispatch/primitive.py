"""Forward or backward of an operator as a ``torch.library`` operator, with a fast path."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.library import Library, infer_schema

from liger_multi.dispatch.config import current
from liger_multi.dispatch.config_file import AUTO
from liger_multi.dispatch.double_backward import only_whole
from liger_multi.dispatch.registry import REFERENCE, module
from liger_multi.dispatch.resolution import resolve

if TYPE_CHECKING:
    from liger_multi.dispatch.op import Op

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

    def call(self, *args: Any) -> Any:
        """Run the chosen backend's function on the device of the tensors, dtypes as they are."""
        if torch._C._is_any_autocast_enabled():
            with torch._C._DisableAutocast():
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
        with whole(), torch._C._DisableAutocast():
            return getattr(reference, self.direction)(*args)

    def __call__(self, *args: Any) -> Any:
        """Call directly for plain tensors, through ``torch.ops`` where somebody looks on."""
        if torch.compiler.is_compiling():
            return self.overload(*args)
        if torch._C._autograd._profiler_enabled() or torch._C._is_tracing():
            return self.overload(*args)
        if torch._C._len_torch_dispatch_stack() and not _inline.get():
            return self.overload(*args)
        for i in self.places:
            a = args[i]
            if a is not None and (type(a) not in _PLAIN or a.is_meta):
                return self.overload(*args)
        return self.call(*args)


_PLAIN = (Tensor, torch.nn.Parameter)


@functools.cache
def _module_of_several(device: torch.device) -> Any:
    """The module of a type of device of which this machine has several, else None."""
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device.type)
    return module if module.device_count() > 1 else None


def constant_in_graphs(function: Function) -> Function:
    """Let the compiler call ``function`` while it traces and keep the result.

    The mark that ``torch.compiler.assume_constant_result`` sets; calling that would import the
    whole compiler, and Triton with it, at import.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_graphs
def automatic(op: str) -> bool:
    """Whether nobody pinned the operator to a backend: its reference may then be traced."""
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
