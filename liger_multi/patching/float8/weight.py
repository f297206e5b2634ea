"""Tensor subclasses for weights in FP8: frozen weights, and trained weights under FSDP2.

A :class:`Float8Weight` holds FP8 codes and one scale per row, and has the dtype of the original
weight. Operations that do not know codes get dequantized values. So adapters, ``state_dict`` and
other readers see the values that GEMMs use. Writes raise, except ``copy_``, which loads
checkpoints.

A slice of rows is a :class:`Float8Weight` too, so FSDP2 shards the codes. It gathers them by its
two extension methods, also for trained weights (:class:`TrainedShard`, :class:`GatheredWeight`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from liger_multi._torch_private import (
    DisableTorchDispatch,
    log_missing,
    make_subclass,
    make_wrapper_subclass,
    no_torch_function,
    pin_memory,
    to_copy,
)
from liger_multi.dispatch.stored import FrozenTensor, same_strides
from liger_multi.errors import PatchError
from liger_multi.ops.linear_float8 import rounded_rows

aten = torch.ops.aten
Outputs = tuple[Tensor, ...]


class Float8Weight(FrozenTensor):
    """``codes * scale`` with the shape and dtype of the original weight.

    Attributes:
        codes: ``(N, K)``, or flat, E4M3.
        scale: ``(N,)``, fp32, powers of two.
        original: The original weight on the CPU, or None.
        all_rows: Number of rows of the unsharded weight.
    """

    codes: Tensor
    scale: Tensor
    original: Tensor | None
    all_rows: int

    @staticmethod
    def __new__(
        cls: type[Float8Weight],
        codes: Tensor,
        scale: Tensor,
        dtype: torch.dtype,
        original: Tensor | None = None,
        all_rows: int | None = None,
    ) -> Float8Weight:
        """A weight from codes and scales, of all rows or of some of ``all_rows`` rows."""
        weight: Float8Weight = make_wrapper_subclass(
            cls, codes.shape, dtype=dtype, device=codes.device, requires_grad=False
        )
        weight.codes, weight.scale, weight.original = codes, scale, original
        weight.all_rows = len(scale) if all_rows is None else all_rows
        return weight

    @classmethod
    def of(cls, weight: Tensor, keep: bool) -> Float8Weight:
        """A weight in FP8, with a copy of the original on the CPU if ``keep``."""
        device = "meta" if weight.is_meta else "cpu"
        original = weight.detach().to(device, copy=True) if keep else None
        return cls(*_quantized(weight), weight.dtype, original)

    def dequantized(self) -> Tensor:
        """The values in the dtype of the weight."""
        from liger_multi.reference.float8.rows import Float8Rows, dequantized

        width = self.codes.numel() // max(1, len(self.scale))
        rows = Float8Rows(self.codes.reshape(len(self.scale), width), self.scale)
        return dequantized(rows, self.dtype).view(self.shape)

    def restored(self) -> Tensor:
        """The original weight, or the dequantized one if there is none."""
        if self.original is None or (self.original.is_meta and not self.is_meta):
            return self.dequantized()
        return self.original.to(self.device, self.dtype)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[Outputs, torch.dtype]:
        """The tensors of this rank that FSDP2 gathers."""
        return to_gather(self.codes, self.scale, self.all_rows, mesh)

    def fsdp_post_all_gather(
        self, gathered: Outputs, format: torch.dtype, dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Float8Weight, list[Tensor]] | None:
        """The weight of a layer, of what all ranks gave; once, for FSDP2 refills it in place."""
        if out is not None:
            return None
        return gathered_weight(Float8Weight, gathered, self.all_rows, format, dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape, dtype and device, without values."""
        return f"Float8Weight({tuple(self.shape)}, {self.dtype}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """The inner tensors and other attributes, for compilers."""
        return ["codes", "scale"], (self.dtype, None, self.all_rows)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], metadata: Any, outer_size: Any, outer_stride: Any
    ) -> Float8Weight:
        """A weight from both."""
        return cls(inner["codes"], inner["scale"], *metadata)

    def write_error(self, action: object) -> PatchError:
        """The error of an operation that writes to the weight."""
        return PatchError(
            f"{action} writes to a frozen weight that is kept in FP8, a tensor of shape "
            f"{tuple(self.shape)}; unpatch the model first, which gives the weight back"
        )


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    from liger_multi.reference.float8.rows import PLAIN, format_of

    return PLAIN.rows(weight.detach(), None, format_of(weight.device))


def _rebuilt(
    weight: Float8Weight, codes: Tensor, scale: Tensor, original: Tensor | None
) -> Float8Weight:
    return type(weight)(codes, scale, weight.dtype, original, weight.all_rows)


def _with_tensors(weight: Float8Weight, change: Callable[[Tensor], Tensor]) -> Float8Weight:
    return _rebuilt(weight, change(weight.codes), change(weight.scale), weight.original)


def _detach(weight: Float8Weight) -> Float8Weight:
    return _with_tensors(weight, Tensor.detach)


def _convert(
    weight: Float8Weight,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    layout: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Float8Weight:
    """Codes on another device, or another dtype of the dequantized values."""
    result = _with_tensors(
        weight, lambda t: t.to(device=device, non_blocking=non_blocking, copy=True)
    )
    as_dtype, original = dtype or weight.dtype, weight.original
    original = None if original is None else original.to(as_dtype, copy=True)
    return type(weight)(result.codes, result.scale, as_dtype, original, weight.all_rows)


def _copy(weight: Float8Weight, source: Tensor, non_blocking: bool = False) -> Float8Weight | None:
    """Load values: they are quantized, and become the original."""
    if weight.ndim != 2:
        return None
    if isinstance(source, Float8Weight):
        codes, scale, original = source.codes, source.scale, source.original
        if original is None and weight.original is not None:
            original = source.dequantized()
    else:
        codes, scale = _quantized(source.to(weight.device))
        original = source.detach()
    weight.codes.copy_(codes)
    weight.scale.copy_(scale)
    if weight.original is not None and original is not None:
        weight.original.copy_(original)
    return weight


# --- FSDP2 ---


def _padded(rows: Tensor, count: int) -> Tensor:
    """Rows, padded to the number of rows of all ranks; padding is never read."""
    missing = count - len(rows)
    if not missing:
        return rows.contiguous()
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])


def to_gather(
    codes: Tensor, scale: Tensor, all_rows: int, mesh: Any
) -> tuple[Outputs, torch.dtype]:
    """Codes and scales of this rank, padded to equal rows on all ranks, and the format of codes.

    For a single rank, of which FSDP2 copies only the first tensor, both are in one tensor.
    """
    rows = codes.view(torch.uint8)
    if mesh.size() == 1:
        return (torch.cat([scale.view(torch.uint8), rows.reshape(-1)]),), codes.dtype
    count = -(-all_rows // mesh.size())
    return (_padded(rows, count).view(codes.dtype), _padded(scale, count)), codes.dtype


def gathered_weight(
    weight_class: type[Float8Weight],
    gathered: Outputs,
    all_rows: int,
    format: torch.dtype,
    dtype: torch.dtype,
) -> tuple[Float8Weight, list[Tensor]]:
    """The weight as a view of gathered tensors, and no other tensors for FSDP2 to free."""
    if len(gathered) == 1:
        scale, rows = gathered[0].split([4 * all_rows, gathered[0].numel() - 4 * all_rows])
        scale, codes = scale.view(torch.float32), rows.view(format).view(all_rows, -1)
    else:
        codes, scale = (t[:all_rows] for t in gathered)
    return weight_class(codes, scale, dtype), []


def _rows(weight: Float8Weight, start: int, stop: int) -> Float8Weight:
    original = None if weight.original is None else weight.original[start:stop]
    return _rebuilt(weight, weight.codes[start:stop], weight.scale[start:stop], original)


def _split(weight: Float8Weight, size: int, dim: int = 0) -> list[Float8Weight] | None:
    starts = range(0, max(1, len(weight.scale)), max(1, size))
    if dim or weight.ndim != 2:
        return None
    return [_rows(weight, start, start + size) for start in starts]


def _slice(
    weight: Float8Weight,
    dim: int = 0,
    start: int | None = None,
    stop: int | None = None,
    step: int = 1,
) -> Float8Weight | None:
    if dim or step != 1 or weight.ndim != 2:
        return None
    first, last, _ = slice(start, stop).indices(len(weight.scale))
    return _rows(weight, first, last)


def _zeros(weight: Float8Weight, size: Sequence[int], **options: Any) -> Float8Weight | None:
    """Rows of zeros, into which FSDP2 copies a shard."""
    has_options = any(value is not None for name, value in options.items() if name != "pin_memory")
    if has_options or len(size) != 2 or list(size[1:]) != list(weight.shape[1:]):
        return None
    original = None if weight.original is None else weight.original.new_zeros(size)
    codes = weight.codes.view(torch.uint8).new_zeros(size).view(weight.codes.dtype)
    return _rebuilt(weight, codes, weight.scale.new_ones(size[0]), original)


def _empty(weight: Float8Weight, *, device: Any = None, **_: Any) -> Float8Weight:
    """An uninitialized weight on another device, for models from the meta device."""
    emptied = _with_tensors(weight, lambda t: torch.empty_like(t, device=device))
    if emptied.original is not None and not emptied.is_meta:
        emptied.original = torch.empty_like(emptied.original, device="cpu")
    return emptied


def _view(weight: Float8Weight, size: Sequence[int]) -> Float8Weight | None:
    """The same shape, or a flat one."""
    size = list(size)
    if size == list(weight.shape):
        return _detach(weight)
    flat = size in ([-1], [math.prod(weight.shape)])
    return _rebuilt(weight, weight.codes.view(-1), weight.scale, None) if flat else None


Float8Weight.handlers = {
    aten.detach.default: _detach,
    aten.alias.default: _detach,
    aten.clone.default: lambda weight, memory_format=None: _convert(weight),
    to_copy: _convert,
    aten.copy_.default: _copy,
    aten.split.Tensor: _split,
    aten.slice.Tensor: _slice,
    aten.new_zeros.default: _zeros,
    aten.empty_like.default: _empty,
    aten.view.default: _view,
    aten.as_strided.default: same_strides,
    pin_memory: lambda weight, device=None: _with_tensors(weight, Tensor.pin_memory),
    aten.is_pinned.default: lambda weight, device=None: weight.codes.is_pinned(),
}


def float8_weight(layer: nn.Module) -> Float8Weight | None:
    """The weight of a layer if it is in FP8, else None."""
    weight = layer._parameters.get("weight")
    return weight if isinstance(weight, Float8Weight) else None


def freeze(layer: nn.Module, keep: bool) -> None:
    """Replace the weight of a layer by one in FP8."""
    weight = layer._parameters["weight"]
    if make_wrapper_subclass is None:
        log_missing("make_wrapper_subclass")
    elif weight is not None and not isinstance(weight, Float8Weight):
        codes = Float8Weight.of(weight, keep)
        layer._parameters["weight"] = nn.Parameter(codes, requires_grad=False)


def thaw(layer: nn.Module) -> None:
    """Restore the original weight of a layer."""
    weight = float8_weight(layer)
    if weight is not None:
        layer._parameters["weight"] = nn.Parameter(weight.restored(), requires_grad=False)


# --- trained weights under FSDP2 ---

# Each row has its own scale, and FSDP2 shards rows. So the codes of a shard equal those rows of the
# codes of the whole weight, and gathered codes equal those of one process.
#
# FSDP2 calls methods of the local tensor of a sharded parameter to gather it and to create the
# gathered parameter. Shards of a frozen weight are codes. A trained weight is sharded in its own
# dtype, for the optimizer, and each shard is rounded when it is gathered.


class GatheredWeight(Float8Weight):
    """The gathered codes of a trained weight; its gradient has the dtype of the weight.

    Operations that do not know codes get the rounded weight.
    """

    def master(self) -> Tensor:
        """A placeholder with the shape, dtype and gradient of the weight.

        Operators take it together with the codes, and do not read its values.
        """
        master: Tensor = _Master.apply(self)  # type: ignore[no-untyped-call]
        return master


class _Master(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: GatheredWeight) -> Tensor:
        return weight.scale.new_empty((), dtype=weight.dtype).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        return upstream[0]


class TrainedShard(Tensor):
    """A shard of a trained weight, in its dtype and storage, which is gathered in FP8.

    It is a plain tensor for operations and checkpoints.

    Attributes:
        all_rows: Number of rows of the unsharded weight.
    """

    all_rows: int

    @staticmethod
    def __new__(cls: type[TrainedShard], rows: Tensor, all_rows: int) -> TrainedShard:
        """The same rows with this class."""
        shard: TrainedShard = make_subclass(cls, rows)
        shard.all_rows = all_rows
        return shard

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Operations of plain tensors; results of :data:`_KEPT_SHARDED` keep the class."""
        with DisableTorchDispatch():
            output = func(*args, **(kwargs or {}))
        if func not in _KEPT_SHARDED or not isinstance(args[0], TrainedShard):
            return output
        return cls(output, args[0].all_rows)

    def plain(self) -> Tensor:
        """The same memory as a plain tensor."""
        with DisableTorchDispatch():
            return self.detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain tensor."""
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainedShard:
        """Another shard."""
        copied = memo[id(self)] = TrainedShard(self.plain().clone(), self.all_rows)
        return copied

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[Outputs, torch.dtype]:
        """The codes of this rank's rows, rounded now."""
        rows = rounded_rows(self.plain())
        return to_gather(rows.codes, rows.scale, self.all_rows, mesh)

    def fsdp_post_all_gather(
        self, gathered: Outputs, format: torch.dtype, dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Float8Weight, list[Tensor]] | None:
        """The weight of a layer, of what all ranks gave; once, for FSDP2 refills it in place."""
        if out is not None:
            return None
        return gathered_weight(GatheredWeight, gathered, self.all_rows, format, dtype)


_KEPT_SHARDED = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    to_copy,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.empty_like.default,
    pin_memory,
}
"""Operations whose result is a shard too."""

# --- sharded parameters ---


def is_sharded(weight: Any) -> bool:
    """Whether a parameter may be sharded by FSDP2: by rows, over one axis of ranks."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(weight, module.DTensor):
        return False
    shard, replicate = module.Shard(0), module.Replicate()
    return tuple(weight.placements) in ((shard,), (replicate, shard))


def local(weight: Any) -> Any:
    """The local tensor of a sharded parameter."""
    return weight._local_tensor


def with_local(weight: Any, part: Tensor) -> Tensor:
    """A sharded tensor with another local tensor."""
    module: Any = sys.modules["torch.distributed.tensor"]
    return module.DTensor.from_local(  # type: ignore[no-any-return]
        part,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


def gather_codes(weight: Any) -> None:
    """Let FSDP2 gather a sharded parameter in FP8."""
    part = local(weight)
    if make_subclass is None or DisableTorchDispatch is None:
        log_missing("make_subclass", "DisableTorchDispatch")
    elif type(part) is Tensor:
        weight._local_tensor = TrainedShard(part, weight.shape[0])


def saved(weight: Any) -> Any:
    """A sharded parameter for checkpoints: values in its dtype, as plain tensors."""
    part = local(weight)
    if isinstance(part, TrainedShard):
        return with_local(weight.detach(), part.plain())
    return (
        with_local(weight.detach(), part.restored()) if isinstance(part, Float8Weight) else weight
    )


def units(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that FSDP2 shards as units, by path."""
    return {path: m for path, m in model.named_modules() if hasattr(m, "_get_fsdp_state")}


def unit_of(path: str, units: Mapping[str, nn.Module]) -> nn.Module | None:
    """The innermost unit that contains a module."""
    enclosing = [unit for unit in units if not unit or f"{path}.".startswith(f"{unit}.")]
    return units[max(enclosing, key=len)] if enclosing else None


def has_run(unit: Any) -> bool:
    """Whether FSDP2 has gathered a unit, after which it cannot gather in another way."""
    return getattr(unit._get_fsdp_state(), "_is_root", None) is not None
