"""Record what operators, modules and gradients compute while a model runs.

Operators are recorded in :meth:`~liger_multi.dispatch.torch_ops.Primitive.call`, which every eager
call and every opaque operator of a compiled graph passes, and modules in ``nn.Module._call_impl``:
a forward hook would change what is recorded, since patched modules call their layers one by one
where somebody watches them. Both are replaced only within :meth:`Recorder.recording`.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_multi._torch_private import WithoutAutocast, is_any_autocast_enabled, replace_module_call
from liger_multi.dispatch.config import current
from liger_multi.dispatch.resolve import Dispatch, mode_of
from liger_multi.dispatch.torch_ops import Primitive
from liger_multi.testing.bisection.digest import Digest, Pair, digest, is_lazy, on_host, readable

OPERATOR, MODULE, GRADIENT, OUTPUT = "operator", "module", "gradient", "output"
DATA, WEIGHT, LOSS, PARAMETER = "data", "weight", "loss", "parameter gradient"
FORWARD, BACKWARD, RECOMPUTE = "forward", "backward", "recompute"
# Prefixes of torch.compile, DDP, FSDP and PEFT in the paths of modules and parameters.
_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")
_OUTER = re.compile(r"^(module\.|base_model\.model\.(?=\w+\.|\w+$))")


class Key(NamedTuple):
    """Which record of a run; ``number`` counts those of the same name."""

    kind: str
    name: str
    direction: str
    number: int


@dataclass
class Taken:
    """What is kept of one tensor.

    Attributes:
        shape: Of it.
        dtype: Of it.
        axis: The axis of sequences that its parts were cut along.
        whole: The digest of the tensor; None where it cannot be read.
        parts: Digests per sequence.
        pairs: The same before they are fetched from the device.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    axis: int = 0
    whole: Digest | None = None
    parts: list[Digest] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)


@dataclass
class Record:
    """One call of an operator or module, or one tensor that has no call.

    Attributes:
        key: Which one.
        where: The module that runs an operator, or whose output has a gradient.
        inputs: Tensors that it gets.
        outputs: Tensors that it makes.
        arguments: Its other arguments, as text.
        prim: The operator and direction.
        backend: That ran it.
        mode: The setting of the deterministic switch.
    """

    key: Key
    where: str = ""
    inputs: dict[str, Taken] = field(default_factory=dict)
    outputs: dict[str, Taken] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    prim: Primitive | None = None
    backend: str = ""
    mode: str = ""


def path_of(name: str) -> str:
    """A path of a module or parameter without the prefixes of wrappers."""
    name = _WRAPPERS.sub("", name).removeprefix(".")
    while _OUTER.match(name):
        name = _OUTER.sub("", name)
    return name


def tensors_in(value: Any, name: str = "") -> dict[str, Tensor]:
    """Tensors in nested mappings, lists and tuples by their place, such as ``x`` or ``x.0``."""
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, Mapping):
        items = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(i), each) for i, each in enumerate(value)]
    else:
        return {}
    tensors: dict[str, Tensor] = {}
    for key, each in items:
        tensors |= tensors_in(each, f"{name}.{key}" if name else key)
    return tensors


_one_at_a_time = threading.Lock()


class Recorder:
    """See the module's docstring.

    Args:
        rows: Sequences in the batch; 0 takes no digests per sequence.
        keep: The record whose tensors are copied.
        names: Paths of the modules to record, by their identity.

    Attributes:
        records: In the order in which they ended.
        kept: Copied tensors: ``("inputs" or "outputs", name)`` to values.
        phase: Of the run: forward or backward.
    """

    def __init__(
        self, rows: int = 0, keep: Key | None = None, names: Mapping[int, str] | None = None
    ) -> None:
        self.rows, self.keep, self.names = rows, keep, names or {}
        self.records: list[Record] = []
        self.kept: dict[tuple[str, str], Tensor] = {}
        self.phase = FORWARD
        self.paused = False
        self._numbers: Counter[tuple[str, str, str]] = Counter()
        self._stack: list[str] = []
        self._handles: list[Any] = []

    # --- records ---

    def begin(self, record_type: str, name: str, direction: str) -> Record:
        """A record that is not among the others yet."""
        named = (record_type, name, direction)
        self._numbers[named] += 1
        where = self._stack[-1] if self._stack and record_type == OPERATOR else ""
        return Record(Key(*named, self._numbers[named]), where)

    def add(
        self,
        record_type: str,
        name: str,
        direction: str,
        tensors: Mapping[str, Tensor],
        where: str = "",
    ) -> None:
        """Record tensors that are the output of no recorded call."""
        record = self.begin(record_type, name, direction)
        record.where = where
        record.outputs = self.take(record, "outputs", tensors)
        self.records.append(record)

    def take(self, record: Record, side: str, tensors: Mapping[str, Tensor]) -> dict[str, Taken]:
        """Digests of tensors, and copies where the record is the one to keep."""
        records = {}
        with torch.no_grad(), _without_autocast():
            for name, tensor in tensors.items():
                axis = 0
                if record.prim is not None:
                    axis = record.prim.op.bitwise.axis(name) or 0
                records[name] = taken = Taken(tuple(tensor.shape), tensor.dtype, axis)
                plain = readable(tensor)
                if plain is None:
                    continue
                taken.pairs = [digest(plain), *self._parts(plain, axis)]
                if record.key == self.keep:
                    self.kept[side, name] = plain.clone()
        return records

    def _parts(self, tensor: Tensor, axis: int) -> list[Pair]:
        if not self.rows or tensor.ndim <= axis or tensor.shape[axis] % self.rows:
            return []
        return [digest(part) for part in tensor.chunk(self.rows, axis)] if tensor.numel() else []

    # --- while a model runs ---

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record what runs inside, in every thread.

        Raises:
            RuntimeError: Another recording is in progress.
        """
        if not _one_at_a_time.acquire(blocking=False):
            raise RuntimeError("another bisect records in this process; run one at a time")
        call: Any = Primitive.call
        recorder = self
        module_call: Any = None

        def recorded(prim: Primitive, *args: Any) -> Any:
            if recorder.paused:
                return call(prim, *args)
            if is_any_autocast_enabled():
                with WithoutAutocast():
                    return recorded(prim, *args)
            return recorder._operator(call, prim, args)

        def recorded_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = recorder.names.get(id(module))
            if name is None or recorder.paused:
                return module_call(module, *args, **kwargs)
            return recorder._module(module_call, module, name, args, kwargs)

        primitive: Any = Primitive
        primitive.call = recorded
        if self.names:
            module_call = replace_module_call(recorded_module)
        try:
            yield self
        finally:
            primitive.call = call
            if self.names:
                replace_module_call(module_call)
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            _one_at_a_time.release()

    def _operator(self, call: Any, prim: Primitive, args: tuple[Any, ...]) -> Any:
        again = prim.direction == FORWARD and self.phase == BACKWARD
        direction = RECOMPUTE if again else prim.direction
        record = self.begin(OPERATOR, prim.op.name, direction)
        record.prim, record.mode = prim, mode_of(current())
        record.backend = backend_of(prim, args)
        inputs = dict(zip(prim.params, args, strict=False))
        record.inputs = self.take(record, "inputs", tensors_in(inputs))
        record.arguments = {
            name: str(value) for name, value in inputs.items() if not tensors_in(value)
        }
        result = call(prim, *args)
        results = (result,) if isinstance(result, Tensor) else result or ()
        outputs = tensors_in(dict(zip(prim.returns, results, strict=False)))
        outputs |= {f"{name} (written)": inputs[name] for name in prim.mutates}
        record.outputs = self.take(record, "outputs", outputs)
        self.records.append(record)
        return result

    def _module(
        self, call: Any, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        direction = RECOMPUTE if self.phase == BACKWARD else FORWARD
        record = self.begin(MODULE, name, direction)
        record.inputs = self.take(record, "inputs", tensors_in([*args]) | tensors_in(kwargs))
        self._stack.append(name)
        try:
            result = call(module, *args, **kwargs)
        finally:
            self._stack.pop()
        outputs = tensors_in(result)
        record.outputs = self.take(record, "outputs", outputs)
        self.records.append(record)
        for place, tensor in outputs.items():
            if tensor.requires_grad and torch.is_grad_enabled() and not is_lazy(tensor):
                self._watch(name, place, tensor)
        return result

    def _watch(self, module: str, place: str, tensor: Tensor) -> None:
        name = f"{module}.{place}" if place else module

        def arrived(grad: Tensor) -> None:
            if not self.paused:
                self.add(GRADIENT, name, BACKWARD, {"": grad}, module)

        self._handles.append(tensor.register_hook(arrived))

    def fetch(self) -> None:
        """Get all digests from the device."""
        every = [
            taken
            for record in self.records
            for side in (record.inputs, record.outputs)
            for taken in side.values()
        ]
        digest_by_pair = on_host(pair for taken in every for pair in taken.pairs)
        for taken in every:
            digests = [digest_by_pair[id(pair)] for pair in taken.pairs]
            if digests:
                taken.whole, taken.parts = digests[0], digests[1:]
        for taken in every:
            taken.pairs.clear()


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    if not is_any_autocast_enabled():
        yield
        return
    with WithoutAutocast():
        yield


def backend_of(prim: Primitive, args: tuple[Any, ...]) -> str:
    """The backend that runs a call, or nothing where none accepts it."""
    config, tensor = current(), args[prim.anchor]
    mode = mode_of(config)
    key = (prim, tensor.device, tensor.dtype, mode)
    plan = config.plans.get(key)
    if plan is None:
        plan = config.plans[key] = Dispatch(prim, config, tensor.device, tensor.dtype, mode)
    for candidate in plan.usable:
        if candidate.supports is None or candidate.supports(args) is None:
            return str(candidate.name)
    return ""
