"""Linear layers in FP8, and cached FP8 codes of inputs and weights.

:class:`Float8Linear` takes an input in 16 or 32 bits and calls ``ops.linear_float8``, which rounds
input and weight to FP8 codes with one scale per row. Three caches avoid repeated rounding:

* Codes of trained weights are cached until an optimizer steps (:func:`cached_rows`, optional).
* Layers that share an input, such as q, k and v, run one after another. The codes of the last
  input of a thread are cached for the next layer (:func:`codes_of`).
* A norm or gated activation can write the codes of its output (:func:`handed_out`). A module does
  so from the call after one in which a layer rounded its output, until no layer uses the codes.

Cached codes have the same bits as new ones, so results do not depend on them. Compiled graphs do
not use caches of inputs.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast
from weakref import ref

import torch
from torch import Tensor, nn

from liger_multi import ops
from liger_multi._torch_private import dispatch_mode_count
from liger_multi.checks import autocast_dtype
from liger_multi.dispatch.resolve import automatic
from liger_multi.errors import PatchError
from liger_multi.modules.parameters import is_computed
from liger_multi.ops.linear_float8 import (
    Float8Rows,
    linear_float8,
    linear_float8_with_codes,
    op,
    rounded_rows,
)
from liger_multi.patching.evidence.signature import (
    PLAIN,
    code_holds,
    globally_hooked,
    is_watched,
    is_watched_by_users,
)
from liger_multi.patching.float8.weight import (
    Float8Weight,
    GatheredWeight,
    TrainedShard,
    float8_weight,
    freeze,
    gather_codes,
    has_run,
    is_sharded,
    local,
    saved,
    thaw,
)
from liger_multi.patching.four_bits import four_bit_weight
from liger_multi.patching.linear import linear_refusal
from liger_multi.patching.options import Float8Options, run_bound
from liger_multi.patching.swap import Patched, original

# --- FP8 codes of trained weights, cached until an optimizer has stepped ---

# Codes are reused by the micro-batches of a step and by checkpointing, while a weight has the same
# storage, shape and version. Optimizers in C++ may not count versions, so any optimizer step drops
# all codes. Only weights of a PyTorch optimizer that has stepped have a cache, since nothing would
# tell of other changes.
#
# Writes through ``.data`` change no version either. So a checksum of every row is taken when a
# weight is rounded, and again before the next optimizer step. A write may be undone before that, as
# in methods that evaluate gradients at other points; so each use checks some rows. A difference is
# an error: gradients were computed with codes of other weights. On a device, the comparison is read
# later, without a wait, before the next rounding or step, or after some uses. Passes without
# gradients, such as an evaluation with other weights, do not use the cache.


@dataclass(frozen=True)
class _CachedCodes:
    """Codes of a weight.

    Attributes:
        key: Address, shape, strides, dtype and version of the weight.
        rows: Codes and scales.
        sums: Checksums of all rows.
        some: The sum of the checksums of every :data:`EVERY`-th row.
    """

    key: tuple[Any, ...]
    rows: Any
    sums: Tensor
    some: Tensor


@dataclass
class _Weight:
    """A weight of an optimizer; the reference keeps its ``id`` from being reused.

    Attributes:
        weight: The tensor.
        cached: Its codes since the last optimizer step.
        uses: Checksums of some rows when cached and at a use, not compared yet.
    """

    weight: Tensor
    cached: _CachedCodes | None = None
    uses: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass
class _Followed:
    """The weights of an optimizer that has stepped; an attribute of the optimizer.

    Attributes:
        weights: Weights by ``id``; weak references would prevent PyTorch from swapping tensors.
        answers: Results of comparisons on the host, and the events after which they are valid.
    """

    weights: dict[int, _Weight] = field(default_factory=dict)
    answers: list[tuple[Tensor, Any]] = field(default_factory=list)


_stepped: list[ref[Any]] = []  # optimizers; readers copy the list, since threads append to it
_NAME = "_liger_multi_followed"
EVERY = 32
USES = 8
"""Uses of codes after which checksums are compared."""


def _key(weight: Tensor) -> tuple[Any, ...]:
    return weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, weight._version


def _ordered(weight: Tensor) -> bool:
    """Whether new work runs after earlier work on the device of a weight.

    Not while a graph is captured, or on another stream.
    """
    from liger_multi.reference.common.chunking import capturing

    device = weight.device
    if device.type == "cpu":
        return True
    module: Any = torch.get_device_module(device)
    usual: bool = module.current_stream(device) == module.default_stream(device)
    return usual and not capturing(device)


def cached_rows(weight: Tensor) -> Any:
    """Cached codes and scales of a weight; None before the first optimizer step."""
    record = next((f for f in _optimizer_records() if id(weight) in f.weights), None)
    if record is None or not _ordered(weight):
        return None
    entry, key = record.weights[id(weight)], _key(weight)
    cached = entry.cached
    if cached is None or cached.key != key:
        _check_answers(record)
        with torch.no_grad():
            sums = bit_sums(weight)
            cached = entry.cached = _CachedCodes(
                key, rounded_rows(weight), sums, sums[::EVERY].sum()
            )
    else:
        entry.uses.append((cached.some, bit_sums(weight.detach()[::EVERY]).sum()))
        if len(entry.uses) == USES:
            _check_answers(record)
            _compare(record, {weight.device: _compared(entry)})
    return cached.rows


_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def bit_sums(weight: Tensor) -> Tensor:
    """A checksum of each row: the integer sum of its bits as words."""
    rows, width = weight.detach().contiguous(), weight.shape[1] * weight.itemsize
    word_dtype = next(word_dtype for word_dtype in _WORDS if width % word_dtype.itemsize == 0)
    return rows.view(torch.uint8).view(word_dtype).sum(1, dtype=torch.int64)


# --- steps of optimizers ---


@functools.cache
def follow_optimizers() -> None:
    """Watch the steps of all optimizers."""
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _optimizer_records() -> list[_Followed]:
    return [
        getattr(optimizer, _NAME)
        for reference in list(_stepped)
        if (optimizer := reference()) is not None
    ]


def _before_step(optimizer: Any, *_: Any) -> None:
    """Compare checksums of all weights with cached codes."""
    record = getattr(optimizer, _NAME, None)
    if record is None:
        return
    _check_answers(record)
    by_device: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for entry in record.weights.values():
            answers = by_device.setdefault(entry.weight.device, [])
            answers += _compared(entry)
            cached = entry.cached
            if cached is not None and cached.key == _key(entry.weight):
                answers.append((bit_sums(entry.weight) == cached.sums).all())
    _compare(record, by_device)


def _compared(entry: _Weight) -> list[Tensor]:
    """Comparisons of checksums at each use."""
    answers = [at_write == at_use for at_write, at_use in entry.uses]
    entry.uses.clear()
    return answers


def _compare(record: _Followed, by_device: Mapping[torch.device, list[Tensor]]) -> None:
    """Start comparisons by device; those on a CPU are read at once."""
    record.answers += [
        _on_host(torch.stack(s).all(), device) for device, s in by_device.items() if s
    ]
    if all(event is None for _, event in record.answers):
        _check_answers(record)


def _after_step(optimizer: Any, *_: Any) -> None:
    """Drop the codes of all optimizers, which may share memory of weights."""
    record = getattr(optimizer, _NAME, None)
    if record is None:
        record = _Followed()
        setattr(optimizer, _NAME, record)
        _stepped.append(ref(optimizer, _stepped.remove))
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    record.weights = {id(p): _Weight(p) for p in weights}
    for each_record in _optimizer_records():
        _drop_codes(each_record)


def _drop_codes(record: _Followed) -> None:
    for entry in list(record.weights.values()):
        entry.cached = None


def _on_host(result: Tensor, device: torch.device) -> tuple[Tensor, Any]:
    """A result with an asynchronous copy to the host, and the event after that."""
    if device.type == "cpu":
        return result, None
    module = torch.get_device_module(device)
    copied = torch.empty((), dtype=result.dtype, pin_memory=True)
    copied.copy_(result, non_blocking=True)
    event = module.Event()
    event.record(module.current_stream(device))
    return copied, event


def _check_answers(record: _Followed) -> None:
    for _, event in record.answers:
        if event is not None:
            event.synchronize()  # recorded a step or several uses ago
    agree = all(result.item() for result, _ in record.answers)
    record.answers.clear()
    if not agree:
        _drop_codes(record)
        for entry in record.weights.values():
            entry.uses.clear()  # one error for all of them
        raise PatchError(
            "a weight was written through .data, or by code that counts no version, after its "
            "codes were made: gradients were computed with codes of old weights; leave cache=True "
            "of linear_float8 out of the patch"
        )


# --- codes of the last input ---


class _Use:
    """Whether a layer used the last codes of a module."""

    taken = True


class _Last(threading.local):
    """The last input with codes in this thread: a reference, its version, the codes, their use."""

    x: weakref.ref[Tensor] | None = None
    version = 0
    dtype: torch.dtype | None = None
    rows: Any = None
    use: _Use | None = None


_last = _Last()


def _drop(dead: weakref.ref[Tensor]) -> None:
    if _last.x is dead:
        _last.x = _last.rows = _last.use = None


def codes_of(x: Tensor) -> Any:
    """Codes of a tensor if it was the last input of this thread; else None.

    Tensors of inference mode have no version, so they are never cached.
    """
    is_last = not x.is_inference() and _last.x is not None and _last.x() is x
    state = (x._version, autocast_dtype(x.device.type)) if is_last else None
    if state != (_last.version, _last.dtype):
        return None
    if _last.use is not None:
        _last.use.taken = True
    return _last.rows


def remember(x: Tensor, rows: Any, use: _Use | None = None) -> None:
    """Cache the codes of a tensor until another one is rounded, or the tensor is freed."""
    _last.x, _last.version = weakref.ref(x, _drop), x._version
    _last.dtype, _last.rows, _last.use = autocast_dtype(x.device.type), rows, use


# --- codes that norms and activations write ---

CODED = ("rms_norm", "layer_norm", "swiglu", "geglu")
"""Operators with a variant that also writes codes of its output."""


class _Output(threading.local):
    """The last output of such an operator in this thread, and its module."""

    y: weakref.ref[Tensor] | None = None
    version = 0
    module: weakref.ref[nn.Module] | None = None


_output = _Output()
_uses: weakref.WeakKeyDictionary[nn.Module, _Use] = weakref.WeakKeyDictionary()
_process = {"rounds": False}  # also set by layers that were copied or loaded


def hands_out(op: str) -> bool:
    """Whether an operator may write codes: layers of this process round their inputs."""
    return not torch.compiler.is_compiling() and _process["rounds"] and op in CODED


def handed_out(module: nn.Module, op: str, call: functools.partial[Any]) -> Tensor:
    """The output of an operator for a module, with codes if a layer rounded its last output.

    Without codes if a backend is pinned, which may not support them; under dispatch modes, some of
    which compare a recomputation with forward; and if the module has hooks, which may write to the
    output through ``.data``.
    """
    if torch.is_inference_mode_enabled() or dispatch_mode_count():
        return cast(Tensor, call())
    if is_hooked(module):
        _uses.pop(module, None)
        return cast(Tensor, call())
    use = _uses.get(module)
    if use is not None and use.taken and automatic(op):
        use.taken = False
        y, rows = getattr(ops, f"{op}_quantized")(*call.args, **call.keywords)
        if autocast_dtype(y.device.type) in (None, y.dtype):
            remember(y, rows, use)
        return cast(Tensor, y)
    _uses.pop(module, None)
    output = cast(Tensor, call())
    _output.y, _output.version = weakref.ref(output), output._version
    _output.module = weakref.ref(module)
    return output


def _ask(x: Tensor) -> None:
    """Let the module with this output write codes from its next call on."""
    _process["rounds"] = True
    is_output = _output.y is not None and _output.y() is x and x._version == _output.version
    module = _output.module() if is_output and _output.module is not None else None
    if module is not None and autocast_dtype(x.device.type) in (None, x.dtype):
        _uses[module] = _Use()


# --- layers ---


@dataclass(frozen=True)
class Float8Settings:
    """What a layer does.

    Attributes:
        options: What the patch call asked for.
        stored: Whether its frozen weight is kept in FP8.
    """

    options: Float8Options
    stored: bool


class Float8Linear(Patched):
    """A linear layer whose output and input gradient are FP8 GEMMs."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """The operator, or the layer's own forward for other calls than a plain tensor's."""
        module_class = type(self)
        if not issubclass(module_class, Float8Linear):
            return cast(Tensor, module_class.forward(self, input))
        layer = cast(Any, self)
        if not code_holds(module_class) or _computes(layer) or not _served(layer, input):
            return cast(Tensor, original(module_class)(self, input))
        options = cast(Float8Settings, module_class._liger_multi_swap.settings).options
        return cast(Tensor, run_bound(options, ("linear_float8",), _apply, layer, input))

    @staticmethod
    def on_enter(module: nn.Module, settings: Any) -> None:
        """Keep the weight in FP8 where that was asked for."""
        _process["rounds"] = True
        if settings.options.cache:
            follow_optimizers()
        if not settings.stored:
            thaw(module)
        elif not is_sharded(module._parameters.get("weight")):
            freeze(module, settings.options.originals)

    @staticmethod
    def on_leave(module: nn.Module) -> None:
        """Restore the weight."""
        thaw(module)

    @staticmethod
    def fixed(module: nn.Module) -> str | None:
        """FSDP2 cannot change back how it gathers a weight."""
        weight = module._parameters.get("weight")
        coded = is_sharded(weight) and isinstance(local(weight), (Float8Weight, TrainedShard))
        return "FSDP2 gathers its weight in FP8" if coded else None

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Save the original weight, or the dequantized one if there is none."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        weight = float8_weight(self)
        name = f"{prefix}weight"
        if weight is not None:
            destination[name] = weight.restored()
        elif is_sharded(destination.get(name)):
            destination[name] = saved(destination[name])


class GatheringFloat8Linear(Float8Linear):
    """A layer whose trained weight FSDP2 gathers in FP8."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Prepare a sharded weight when FSDP2 assigns it."""
        if name == "weight" and is_sharded(value):
            gather_codes(value)
        super().__setattr__(name, value)

    @staticmethod
    def on_enter(module: nn.Module, settings: Any) -> None:
        """Prepare a weight that is sharded already."""
        Float8Linear.on_enter(module, settings)
        weight = module._parameters.get("weight")
        if is_sharded(weight):
            gather_codes(weight)


def _computes(layer: nn.Module) -> bool:
    """Whether weight or bias were parametrized after the patch."""
    return is_computed(layer) or is_computed(layer, "bias")


def _served(layer: Any, x: Tensor) -> bool:
    weight = layer.weight
    if type(x) not in PLAIN or not x.is_floating_point():
        return False
    if isinstance(weight, Float8Weight):
        if weight.requires_grad and not isinstance(weight, GatheredWeight):
            raise PatchError(
                "the weight of this layer is kept in FP8 and cannot be trained, got "
                f"requires_grad=True on {weight!r}; unpatch the model first"
            )
    elif type(weight) not in PLAIN:
        return False
    return autocast_dtype(x.device.type) is not None or _same_dtype_as(layer, x)


def _same_dtype_as(layer: Any, x: Tensor) -> bool:
    """Whether PyTorch's own layer accepts a call."""
    weight, bias = layer.weight, layer.bias
    fits = x.ndim > 0 and x.shape[-1] == weight.shape[1] and x.dtype == weight.dtype
    return fits and x.device == weight.device and (bias is None or bias.dtype == x.dtype)


def is_hooked(module: nn.Module) -> bool:
    """Whether hooks run between a module's call and its forward."""
    return is_watched_by_users(module) or globally_hooked()


def _apply(layer: Any, x: Tensor) -> Tensor:
    weight, scale, codes = wide_parts(layer)
    operands: Any = {"weight_scale": scale, "weight_codes": codes}
    if torch.compiler.is_compiling():
        return linear_float8(x, weight, layer.bias, **operands)
    shared = None if is_hooked(layer) else codes_of(x)
    if shared is None:
        _ask(x)
    if autocast_dtype(x.device.type) is not None:
        y, rows = linear_float8_with_codes(x, weight, layer.bias, **operands, quantized=shared)
    else:  # _served and the patch have checked the arguments
        y, *quantized = op(x, weight, layer.bias, scale, *(shared or (None, None)), codes)
        rows = Float8Rows(*quantized)
    if shared is None and not x.is_inference():
        remember(x, rows)
    return y


# --- layers of operators that take several of them ---


def _cached_codes(layer: Any, weight: Tensor) -> tuple[Tensor, Tensor] | tuple[()]:
    """Cached scales and codes of a trained weight, or ()."""
    module_class = type(layer)
    settings: Any = (
        module_class._liger_multi_swap.settings if issubclass(module_class, Float8Linear) else None
    )
    if settings is None or not settings.options.cache or torch.compiler.is_compiling():
        return ()
    rows = cached_rows(weight) if weight.requires_grad and torch.is_grad_enabled() else None
    return () if rows is None else (rows.scale, rows.codes)


def bare_float8(layer: nn.Module | None) -> bool:
    """Whether a layer is plain FP8: no hooks, no named backend, unchanged code."""
    module_class = type(layer)
    if layer is None or not issubclass(module_class, Float8Linear):
        return False
    options = cast(Float8Settings, module_class._liger_multi_swap.settings).options
    if options.backend is not None or not code_holds(module_class) or is_watched(layer):
        return False
    if _computes(layer):
        return False
    weight, bias = layer.weight, layer.bias  # maybe tensors in place of parameters
    frozen = float8_weight(layer) is not None and not weight.requires_grad
    plain = type(weight) in PLAIN or frozen or isinstance(weight, GatheredWeight)
    return plain and (bias is None or type(bias) in PLAIN)


def bare_frozen_float8(layer: nn.Module | None) -> bool:
    """The same for a layer with a frozen weight in FP8."""
    if layer is None or not bare_float8(layer):
        return False
    return float8_weight(layer) is not None and not layer.weight.requires_grad


class Wide(NamedTuple):
    """The weight of a layer for operators: values or codes, scales, and codes of values."""

    weight: Tensor
    scale: Tensor | None = None
    codes: Tensor | None = None


def wide_parts(layer: Any, dtype: torch.dtype | None = None) -> Wide:
    """The weight of a layer for operators.

    Args:
        layer: The layer.
        dtype: The dtype of the input, which some weights in 4 bits take.
    """
    quantized = four_bit_weight(layer, dtype)
    if quantized is not None:
        return Wide(quantized)
    weight = layer.weight
    if not isinstance(weight, Float8Weight):
        return Wide(weight, *_cached_codes(layer, weight))
    if isinstance(weight, GatheredWeight) and weight.requires_grad:
        return Wide(weight.master(), weight.scale, weight.codes)
    return Wide(weight.codes, weight.scale)


def wide_dtype(layer: Any, dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype of a layer's weight for operators, with an input of ``dtype``."""
    quantized = four_bit_weight(layer, dtype)
    return cast(torch.dtype, layer.weight.dtype if quantized is None else quantized.dtype)


def shared_codes(x: Tensor) -> Any:
    """Codes of an input if its module has written them; else the module does so from now on."""
    if torch.compiler.is_compiling():
        return None
    codes = codes_of(x)
    if codes is None:
        _ask(x)
    return codes


# --- which layers ---


def float8_refusal(
    layer: nn.Module, options: Float8Options, unit: nn.Module | None = None
) -> str | None:
    """Why a linear layer is not patched, or None; ``unit`` is its unit of FSDP2."""
    from liger_multi.reference.float8.rows import format_of, unsupported

    reason = linear_refusal(layer)
    if reason is not None:
        return reason
    weight = cast(Tensor, layer._parameters.get("weight"))
    if unit is not None and is_sharded(weight):
        plain = type(local(weight)) is Tensor
        if plain and options.frozen:
            return "FSDP2 has sharded its weight in 16 bits or more: patch before sharding"
        if plain and options.gather and has_run(unit):
            return "FSDP2 has gathered its weight before: patch before the first step"
    elif weight is None or (type(weight) not in PLAIN and not isinstance(weight, Float8Weight)):
        return f"its weight is a {type(weight).__name__}"
    if weight.numel() < options.smallest:
        return (
            f"it is small: {tuple(weight.shape)} has {weight.numel():,} elements, "
            f"fewer than smallest={options.smallest:,}"
        )
    if options.frozen and weight.requires_grad:
        return "its weight requires a gradient, and frozen=True was asked for"
    device = weight.device
    if device.type in ("cpu", "meta"):
        return None
    reason = unsupported(device, format_of(device), *weight.shape)
    return None if options.frozen else reason
