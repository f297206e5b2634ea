"""Record what operators, modules and gradients compute while a model runs.

Operators are recorded in :meth:`~liger_multi.dispatch.torch_ops.Primitive.call`, which every eager
call and every opaque operator of a compiled graph passes, and modules in ``nn.Module._call_impl``:
a forward hook would change what is recorded, since patched modules call their layers one by one
where somebody watches them. Both are replaced only within :meth:`Recorder.recording`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_multi._torch_private import (
    WithoutAutocast,
    fake_tensor,
    is_any_autocast_enabled,
    is_wrapper_subclass,
    replace_module_call,
)
from liger_multi.dispatch.config import current
from liger_multi.dispatch.resolve import Dispatch, mode_of
from liger_multi.dispatch.torch_ops import Primitive
from liger_multi.grouping import grouped

# --- a hash of the bits of a tensor, its statistics, and how far two tensors are apart ---

# The hash is the sum of all elements, as integers, times odd weights of their place in a block
# and of their block, modulo 2^64: one changed element always changes it, and so do exchanged
# elements. Strides do not count. Nothing here waits for the device: numbers stay on it until
# :func:`on_host` fetches all at once.
#
# The difference of two tensors is estimated without keeping either. Both are reduced to a few
# sums of elements with random signs, and these sums differ as much as the tensors do (count
# sketch: Charikar, Chen, Farach-Colton, "Finding frequent items in data streams", 2002).

BLOCK = 2**18  # elements: 2 MiB of weights, which stay in a cache
TOGETHER = 16  # blocks at a time on an accelerator: 32 MiB of products
SUMS = 16  # with random signs; the estimated difference is right to about a fifth
_MODULUS = 2**64
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LAZY = "liger_multi.patching.head.storage"

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Digest:
    """A digest of the bits of a tensor.

    Attributes:
        hash: A 64-bit hash.
        largest: The largest magnitude; NaN where there is one.
        norm: The root of the sum of squares.
        sketch: Sums with random signs.
    """

    hash: int
    largest: float
    norm: float
    sketch: tuple[float, ...]


# --- tensors that can be read ---


def is_lazy(value: object) -> bool:
    """Whether a value is logits that were not computed; reading their shape computes nothing."""
    lazy_module: Any = sys.modules.get(_LAZY)
    return lazy_module is not None and bool(lazy_module.is_lazy(value))


def computed(value: Any) -> Any:
    """Compute lazy logits, which stay lazy for everybody else; return other values unchanged."""
    if not is_lazy(value):
        return value
    with torch.no_grad():
        return value._slot.deferred.detached().compute()


def readable(value: Tensor) -> Tensor | None:
    """The plain tensor that holds the bits (of a DTensor, this process's part), or None."""
    if is_lazy(value) or isinstance(value, fake_tensor() or ()):
        return None
    if torch.nn.parameter.is_lazy(value) or value.is_meta or value.is_quantized or value.is_nested:
        return None
    if hasattr(value, "to_local"):
        value = value.to_local()
    if is_wrapper_subclass(value):
        return None
    plain = value.detach().as_subclass(Tensor)
    return plain if plain.layout is torch.strided else plain.to_dense()


# --- the digest ---


def _signed(value: int) -> int:
    """Reinterpret 64 bits as a signed integer, the only kind that PyTorch has."""
    value %= _MODULUS
    return value - _MODULUS if value >= _MODULUS // 2 else value


@functools.lru_cache(maxsize=8)
def _wide(device: torch.device) -> torch.dtype:
    """The dtype of sums: float64, or float32 where a device lacks it."""
    try:
        torch.ones(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


@functools.lru_cache(maxsize=8)
def _weights(device: torch.device) -> Pair:
    """Odd hash weights of the positions in a block, and of blocks."""
    with torch.inference_mode(False):
        bits = torch.arange(1, BLOCK + 1, device=device) * _signed(_GOLDEN)
        factors = []
        for factor in (_FIRST, _SECOND):  # after SplitMix64 (Steele, Lea, Flood, 2014)
            bits = (bits ^ (bits >> 30)) * _signed(factor)
            factors.append((bits ^ (bits >> 31)) | 1)
        return factors[1], factors[0]


@functools.lru_cache(maxsize=16)
def _signs(device: torch.device, dtype: torch.dtype) -> Pair:
    """Random signs of the positions in a block, and of blocks."""
    with torch.inference_mode(False):
        position_weights, block_weights = ((w >> 40) & 1 for w in _weights(device))
        return (2 * position_weights - 1).to(dtype), (2 * block_weights - 1).to(_wide(device))


def _flat(tensor: Tensor) -> Pair:
    """The bits and the values of a tensor, each flattened to one row."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.resolve_neg().reshape(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    castable = flat.dtype.is_floating_point and not str(flat.dtype).startswith("torch.float4")
    return bits, flat if castable else bits


def digest(tensor: Tensor) -> Pair:
    """The hash and the statistics of a plain tensor, on its device.

    Returns:
        An int64 tensor without axes, and a row of the largest magnitude, the norm and the sums.
    """
    device = tensor.device
    (weights, of_blocks), wide = _weights(device), _wide(device)
    bits, values = _flat(tensor)
    total, sums = weights.new_zeros(()), torch.zeros(SUMS, dtype=wide, device=device)
    if not bits.numel():
        return total, torch.cat([sums[:2], sums])
    if values.dtype not in _EXACT:
        values = values.to(torch.float32 if values.dtype.is_floating_point else wide)
    signs, block_signs = _signs(device, values.dtype)
    step, first = (1 if device.type == "cpu" else TOGETHER) * BLOCK, 0
    for start in range(0, bits.numel(), step):
        stop = min(start + step, bits.numel())
        full_end = start + (stop - start) // BLOCK * BLOCK
        for begin, end in ((start, full_end), (full_end, stop)):
            if begin == end:
                continue
            count = -(-(end - begin) // BLOCK)  # blocks; the last of a tensor is shorter
            b, x = bits[begin:end].view(count, -1), values[begin:end].view(count, -1)
            blocks = slice(first, first + count)
            total = total + ((b * weights[: b.shape[1]]).sum(1) * of_blocks[blocks]).sum()
            x = x * signs[: x.shape[1]]  # exact
            if x.shape[1] % SUMS:
                x = torch.nn.functional.pad(x, (0, -x.shape[1] % SUMS))
            parts = x.view(count, SUMS, -1).sum(2, dtype=wide)
            sums = sums + (parts * block_signs[blocks, None]).sum(0)
            first += count
    norms = [
        torch.linalg.vector_norm(
            values, order, dtype=torch.promote_types(values.dtype, torch.float32)
        )
        for order in (math.inf, 2)
    ]
    return total, torch.cat([torch.stack(norms).to(wide), sums])


_EXACT = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def on_host(pairs: Iterable[Pair]) -> dict[int, Digest]:
    """The digests of pairs by their identity, fetched with one copy per device."""
    digests = {}
    for device_pairs in grouped((pair[0].device, pair) for pair in pairs).values():
        hashes = torch.stack([pair[0] for pair in device_pairs]).tolist()
        rows = torch.stack([pair[1] for pair in device_pairs]).tolist()
        for pair, bits, row in zip(device_pairs, hashes, rows, strict=True):
            digests[id(pair)] = Digest(bits % _MODULUS, row[0], row[1], tuple(row[2:]))
    return digests


def relative(a_digests: Sequence[Digest], b_digests: Sequence[Digest]) -> float:
    """Estimated norm of the difference of two tensors in parts, relative to the first's norm."""
    if [d.hash for d in a_digests] == [d.hash for d in b_digests]:
        return 0.0
    squared_distance = sum(
        (x - y) ** 2
        for a, b in zip(a_digests, b_digests, strict=True)
        for x, y in zip(a.sketch, b.sketch, strict=True)
    )
    size = sum(a.norm**2 for a in a_digests)
    if not (math.isfinite(squared_distance) and math.isfinite(size)):
        return math.inf
    return math.sqrt(squared_distance / size) if size else math.inf


# --- how far two tensors are apart ---


@dataclass(frozen=True)
class Distance:
    """How two tensors of one shape and dtype differ.

    Attributes:
        name: Name of the tensor.
        dtype: Dtype of both.
        ulps: The largest distance of two elements in units in the last place of their dtype; 0
            where only signs of zeros differ, infinite where one is NaN. Of integers, the
            difference.
        largest: The largest absolute difference of finite elements.
        elements: Number of elements that differ in a bit.
        of_elements: Number of elements.
        rows: Number of rows (all axes but the last, elements of one axis) with such an element.
        of_rows: Number of rows.
    """

    name: str
    dtype: str
    ulps: float
    largest: float
    elements: int
    of_elements: int
    rows: int
    of_rows: int


def _ordered(bits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Sign and number of values between zero and each element."""
    if not dtype.is_floating_point:
        return torch.ones_like(bits, dtype=torch.bool), bits
    width = 8 * dtype.itemsize
    magnitude = bits & ((1 << (width - 1)) - 1)
    return (bits >> (width - 1)) & 1 == 0, magnitude


def distance(name: str, expected: Tensor, actual: Tensor) -> Distance:
    """Compare two plain tensors of one shape and dtype; copies them to the host."""
    expected, actual = expected.detach().cpu(), actual.detach().cpu()
    shape = expected.shape
    (bits, values), (bits2, values2) = _flat(expected), _flat(actual)
    dtype = values.dtype if values is not bits else torch.int64
    differs = bits != bits2
    (plus, size), (plus2, size2) = (_ordered(b.to(torch.int64), dtype) for b in (bits, bits2))
    ulps = torch.where(plus == plus2, (size - size2).abs().double(), size.double() + size2.double())
    x, y = values.double(), values2.double()
    ulps = ulps.masked_fill(differs & (x.isnan() | y.isnan()), math.inf)
    differences = (x - y).abs()[differs & x.isfinite() & y.isfinite()]
    per_row = expected.is_complex() + 1
    width = (shape[-1] if len(shape) > 1 else 1) * per_row
    rows = differs.reshape(-1, width).any(1) if differs.numel() else differs
    return Distance(
        name=name,
        dtype=str(expected.dtype).removeprefix("torch."),
        ulps=float(ulps[differs].max()) if differs.any() else 0.0,
        largest=float(differences.max()) if differences.numel() else 0.0,
        elements=int(differs.sum()),
        of_elements=differs.numel(),
        rows=int(rows.sum()),
        of_rows=rows.numel(),
    )


OPERATOR, MODULE, GRADIENT, OUTPUT = "operator", "module", "gradient", "output"
DATA, WEIGHT, LOSS, PARAMETER = "data", "weight", "loss", "parameter gradient"
FORWARD, BACKWARD, RECOMPUTE = "forward", "backward", "recompute"
# Prefixes of torch.compile, DDP, FSDP and PEFT in the paths of modules and parameters.
_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")
_OUTER = re.compile(r"^(module\.|base_model\.model\.(?=\w+\.|\w+$))")


class Key(NamedTuple):
    """Identifies a record of a run; ``number`` counts those of the same name."""

    kind: str
    name: str
    direction: str
    number: int


@dataclass
class Taken:
    """The record of one tensor.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        axis: The axis of sequences that its parts were cut along.
        whole: The digest of the tensor; None where it cannot be read.
        parts: Digests per sequence.
        pairs: The digests before they are fetched from the device.
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
        key: Its key.
        where: The module that runs an operator, or whose output has a gradient.
        inputs: Its input tensors.
        outputs: Its output tensors.
        arguments: Its other arguments, as text.
        prim: The operator and direction.
        backend: The backend that ran it.
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
    """The path of a module or parameter without the prefixes of wrappers."""
    name = _WRAPPERS.sub("", name).removeprefix(".")
    while _OUTER.match(name):
        name = _OUTER.sub("", name)
    return name


def tensors_in(value: Any, name: str = "") -> dict[str, Tensor]:
    """Tensors in nested mappings, lists and tuples by their place, such as ``x`` or ``x.0``."""
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(i), item) for i, item in enumerate(value)]
    else:
        return {}
    tensors: dict[str, Tensor] = {}
    for key, item in items:
        tensors |= tensors_in(item, f"{name}.{key}" if name else key)
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
        phase: Phase of the run: forward or backward.
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
        """Begin a record, which is not in the list yet."""
        call = (record_type, name, direction)
        self._numbers[call] += 1
        module = self._stack[-1] if self._stack and record_type == OPERATOR else ""
        return Record(Key(*call, self._numbers[call]), module)

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
                records[name] = entry = Taken(tuple(tensor.shape), tensor.dtype, axis)
                plain = readable(tensor)
                if plain is None:
                    continue
                entry.pairs = [digest(plain), *self._parts(plain, axis)]
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
        is_recompute = prim.direction == FORWARD and self.phase == BACKWARD
        direction = RECOMPUTE if is_recompute else prim.direction
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
        for output_name, tensor in outputs.items():
            if tensor.requires_grad and torch.is_grad_enabled() and not is_lazy(tensor):
                self._watch(name, output_name, tensor)
        return result

    def _watch(self, module: str, output_name: str, tensor: Tensor) -> None:
        name = f"{module}.{output_name}" if output_name else module

        def arrived(grad: Tensor) -> None:
            if not self.paused:
                self.add(GRADIENT, name, BACKWARD, {"": grad}, module)

        self._handles.append(tensor.register_hook(arrived))

    def fetch(self) -> None:
        """Get all digests from the device."""
        entries = [
            entry
            for record in self.records
            for side in (record.inputs, record.outputs)
            for entry in side.values()
        ]
        digest_by_pair = on_host(pair for entry in entries for pair in entry.pairs)
        for entry in entries:
            digests = [digest_by_pair[id(pair)] for pair in entry.pairs]
            if digests:
                entry.whole, entry.parts = digests[0], digests[1:]
        for entry in entries:
            entry.pairs.clear()


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    if not is_any_autocast_enabled():
        yield
        return
    with WithoutAutocast():
        yield


def backend_of(prim: Primitive, args: tuple[Any, ...]) -> str:
    """The backend that runs a call; empty where none accepts it."""
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
