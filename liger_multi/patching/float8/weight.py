"""A frozen weight that is kept in FP8: codes of its rows, and one scale per row.

To everybody else it is a weight of the dtype that it had: an operation that knows nothing of codes
gets the dequantized numbers, for as long as it runs. So adapters, ``state_dict`` and whatever else
reads it see what training multiplies with. What writes to it raises, but for ``copy_``, with which
checkpoints are loaded.

Parts of its rows are weights in FP8 too. So FSDP2 shards codes, and gathers them by the two methods
that it looks for (:class:`TrainedShard`).
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
    make_subclass,
    make_wrapper_subclass,
    no_torch_function,
    pin_memory,
    say,
    to_copy,
    tree_map_only,
)
from liger_multi.errors import PatchError
from liger_multi.ops.linear_float8 import rounded_rows

aten = torch.ops.aten
Outputs = tuple[Tensor, ...]


class Float8Weight(Tensor):
    """``codes * scale`` with the shape and dtype of the weight that it was made of.

    Attributes:
        codes: ``(N, K)``, or flat, E4M3.
        scale: ``(N,)``, fp32, powers of two.
        original: The weight that it was made of, on the CPU, or None where it was dropped.
        whole: Rows of the weight that these are rows of.
    """

    codes: Tensor
    scale: Tensor
    original: Tensor | None
    whole: int

    @staticmethod
    def __new__(
        cls: type[Float8Weight],
        codes: Tensor,
        scale: Tensor,
        dtype: torch.dtype,
        original: Tensor | None = None,
        whole: int | None = None,
    ) -> Float8Weight:
        """A weight of a dtype, of codes and scales; ``whole``: if they are some of its rows."""
        weight: Float8Weight = make_wrapper_subclass(
            cls, codes.shape, dtype=dtype, device=codes.device, requires_grad=False
        )
        weight.codes, weight.scale, weight.original = codes, scale, original
        weight.whole = len(scale) if whole is None else whole
        return weight

    @classmethod
    def of(cls, weight: Tensor, keep: bool) -> Float8Weight:
        """The weight in FP8; ``keep``: with a copy of itself on the CPU."""
        place = "meta" if weight.is_meta else "cpu"
        original = weight.detach().to(place, copy=True) if keep else None
        return cls(*_quantized(weight), weight.dtype, original)

    def dequantized(self) -> Tensor:
        """What is multiplied with, in the dtype of the weight."""
        from liger_multi.reference.float8.rows import Float8Rows, dequantized

        width = self.codes.numel() // max(1, len(self.scale))
        rows = Float8Rows(self.codes.reshape(len(self.scale), width), self.scale)
        return dequantized(rows, self.dtype).view(self.shape)

    def restored(self) -> Tensor:
        """The weight that it was made of, or what it holds where that was dropped."""
        if self.original is None or (self.original.is_meta and not self.is_meta):
            return self.dequantized()
        return self.original.to(self.device, self.dtype)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[Outputs, torch.dtype]:
        """What every rank gives to FSDP2."""
        return to_gather(self.codes, self.scale, self.whole, mesh)

    def fsdp_post_all_gather(
        self, gathered: Outputs, format: torch.dtype, dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Float8Weight, list[Tensor]] | None:
        """The weight of a layer, of what all ranks gave; once, for FSDP2 refills it in place."""
        if out is not None:
            return None
        return gathered_weight(Float8Weight, gathered, self.whole, format, dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Its shape; the numbers would have to be dequantized."""
        return f"Float8Weight({tuple(self.shape)}, {self.dtype}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """For compilers: the tensors inside, and the rest."""
        return ["codes", "scale"], (self.dtype, None, self.whole)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], rest: Any, outer_size: Any, outer_stride: Any
    ) -> Float8Weight:
        """The opposite."""
        return cls(inner["codes"], inner["scale"], *rest)

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Operations that keep codes, loading, and everything else on dequantized numbers."""
        kwargs = kwargs or {}
        handler = _KEPT.get(func)
        if handler is not None and isinstance(args[0], Float8Weight):
            output = handler(*args, **kwargs)
            if output is not None:
                return output
        schema = func._schema.arguments
        for argument, value in zip(schema, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, Float8Weight):
                raise PatchError(
                    f"{func} writes to a frozen weight that is kept in FP8, a tensor of shape "
                    f"{tuple(value.shape)}; unpatch the model first, which gives the weight back"
                )
        args, kwargs = tree_map_only(Float8Weight, Float8Weight.dequantized, (args, kwargs))
        return func(*args, **kwargs)


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    from liger_multi.reference.float8.rows import PLAIN, format_of

    return PLAIN.rows(weight.detach(), None, format_of(weight.device))


def _rebuilt(
    weight: Float8Weight, codes: Tensor, scale: Tensor, original: Tensor | None
) -> Float8Weight:
    return type(weight)(codes, scale, weight.dtype, original, weight.whole)


def _like(weight: Float8Weight, change: Callable[[Tensor], Tensor]) -> Float8Weight:
    return _rebuilt(weight, change(weight.codes), change(weight.scale), weight.original)


def _detach(weight: Float8Weight) -> Float8Weight:
    return _like(weight, Tensor.detach)


def _clone(weight: Float8Weight, *, memory_format: Any = None) -> Float8Weight:
    return _to(weight)


def _to(
    weight: Float8Weight,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    layout: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Float8Weight:
    """Another device moves codes; another dtype is the one that operations see."""
    moved = _like(weight, lambda t: t.to(device=device, non_blocking=non_blocking, copy=True))
    as_dtype, original = dtype or weight.dtype, weight.original
    original = None if original is None else original.to(as_dtype, copy=True)
    return type(weight)(moved.codes, moved.scale, as_dtype, original, weight.whole)


def _copy(weight: Float8Weight, source: Tensor, non_blocking: bool = False) -> Float8Weight | None:
    """Load numbers: they are quantized, and are the original from here on."""
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
    """Rows, and as many more as every rank gathers; the numbers of those are never read."""
    missing = count - len(rows)
    if not missing:
        return rows.contiguous()
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])


def to_gather(codes: Tensor, scale: Tensor, whole: int, mesh: Any) -> tuple[Outputs, torch.dtype]:
    """Codes and scales of this rank, of as many rows as every rank has, and the format of codes.

    A single rank copies only the first of several tensors, so both are in one.
    """
    rows = codes.view(torch.uint8)
    if mesh.size() == 1:
        return (torch.cat([scale.view(torch.uint8), rows.reshape(-1)]),), codes.dtype
    count = -(-whole // mesh.size())
    return (_padded(rows, count).view(codes.dtype), _padded(scale, count)), codes.dtype


def gathered_weight(
    weight_class: type[Float8Weight],
    gathered: Outputs,
    whole: int,
    format: torch.dtype,
    dtype: torch.dtype,
) -> tuple[Float8Weight, list[Tensor]]:
    """The weight over the tensors that FSDP2 gathers into, and no others for it to free."""
    if len(gathered) == 1:
        scale, rows = gathered[0].split([4 * whole, gathered[0].numel() - 4 * whole])
        scale, codes = scale.view(torch.float32), rows.view(format).view(whole, -1)
    else:
        codes, scale = (t[:whole] for t in gathered)
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
    """Rows of zeros, which FSDP2 copies a shard into."""
    has_options = any(value is not None for name, value in options.items() if name != "pin_memory")
    if has_options or len(size) != 2 or list(size[1:]) != list(weight.shape[1:]):
        return None
    original = None if weight.original is None else weight.original.new_zeros(size)
    codes = weight.codes.view(torch.uint8).new_zeros(size).view(weight.codes.dtype)
    return _rebuilt(weight, codes, weight.scale.new_ones(size[0]), original)


def _empty(weight: Float8Weight, *, device: Any = None, **_: Any) -> Float8Weight:
    """The same without numbers: of a model on the meta device, on the one where it goes."""
    emptied = _like(weight, lambda t: torch.empty_like(t, device=device))
    if emptied.original is not None and not emptied.is_meta:
        emptied.original = torch.empty_like(emptied.original, device="cpu")
    return emptied


def _view(weight: Float8Weight, size: Sequence[int]) -> Float8Weight | None:
    """Flat, or as it was."""
    size = list(size)
    if size == list(weight.shape):
        return _detach(weight)
    flat = size in ([-1], [math.prod(weight.shape)])
    return _rebuilt(weight, weight.codes.view(-1), weight.scale, None) if flat else None


def _strided(
    weight: Float8Weight, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Float8Weight | None:
    alike = list(size) == list(weight.shape) and list(stride) == list(weight.stride())
    return _detach(weight) if alike and not offset else None


_KEPT: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _detach,
    aten.alias.default: _detach,
    aten.clone.default: _clone,
    to_copy: _to,
    aten.copy_.default: _copy,
    aten.split.Tensor: _split,
    aten.slice.Tensor: _slice,
    aten.new_zeros.default: _zeros,
    aten.empty_like.default: _empty,
    aten.view.default: _view,
    aten.as_strided.default: _strided,
    pin_memory: lambda weight, device=None: _like(weight, Tensor.pin_memory),
    aten.is_pinned.default: lambda weight, device=None: weight.codes.is_pinned(),
}
"""Operations that have a weight in FP8, but where they return None."""


def held(layer: nn.Module) -> Float8Weight | None:
    """The weight of a layer, where it is kept in FP8."""
    weight = layer._parameters.get("weight")
    return weight if isinstance(weight, Float8Weight) else None


def freeze(layer: nn.Module, keep: bool) -> None:
    """Keep the weight of a layer in FP8."""
    weight = layer._parameters["weight"]
    if make_wrapper_subclass is None:
        say("make_wrapper_subclass")
    elif weight is not None and not isinstance(weight, Float8Weight):
        codes = Float8Weight.of(weight, keep)
        layer._parameters["weight"] = nn.Parameter(codes, requires_grad=False)


def thaw(layer: nn.Module) -> None:
    """Give a layer the weight that it had."""
    weight = held(layer)
    if weight is not None:
        layer._parameters["weight"] = nn.Parameter(weight.restored(), requires_grad=False)


# --- weights that FSDP2 shards, and gathers in FP8 ---

# A row has one scale, of its own elements, and FSDP2 shards rows. So the codes of a shard are
# those rows of the codes of the whole weight, and ranks gather the very codes that one process
# would make.
#
# FSDP2 asks the local tensor of a sharded parameter for what it gathers, and has the tensor make
# the gathered parameter. A frozen weight holds codes, so its shards do. A trained weight is
# sharded in its own dtype, where the optimizer changes it, and a shard is rounded whenever it is
# gathered.

# --- trained weights ---


class GatheredWeight(Float8Weight):
    """The codes of a trained weight that FSDP2 gathered; its gradient has the dtype of the weight.

    To operations that know nothing of codes it is the rounded weight.
    """

    def master(self) -> Tensor:
        """A tensor that nobody reads, of the shape and dtype of the weight and with its gradient.

        Operators take it together with the codes.
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
    """Rows of a trained weight, in its dtype and storage, which are gathered in FP8.

    Operations see a plain tensor, and so does what saves it.

    Attributes:
        whole: Rows of the weight that these are rows of.
    """

    whole: int

    @staticmethod
    def __new__(cls: type[TrainedShard], rows: Tensor, whole: int) -> TrainedShard:
        """The rows, under a class of which FSDP2 asks for codes."""
        shard: TrainedShard = make_subclass(cls, rows)
        shard.whole = whole
        return shard

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Operations of plain tensors; what FSDP2 makes another shard of stays one."""
        with DisableTorchDispatch():
            output = func(*args, **(kwargs or {}))
        if func not in _KEPT_SHARDED or not isinstance(args[0], TrainedShard):
            return output
        return cls(output, args[0].whole)

    def plain(self) -> Tensor:
        """The same numbers in the same place, as a plain tensor."""
        with DisableTorchDispatch():
            return self.detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files hold plain tensors."""
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainedShard:
        """Another shard."""
        copied = memo[id(self)] = TrainedShard(self.plain().clone(), self.whole)
        return copied

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[Outputs, torch.dtype]:
        """What every rank gives: codes of its rows, made now."""
        rows = rounded_rows(self.plain())
        return to_gather(rows.codes, rows.scale, self.whole, mesh)

    def fsdp_post_all_gather(
        self, gathered: Outputs, format: torch.dtype, dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Float8Weight, list[Tensor]] | None:
        """The weight of a layer, of what all ranks gave; once, for FSDP2 refills it in place."""
        if out is not None:
            return None
        return gathered_weight(GatheredWeight, gathered, self.whole, format, dtype)


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
"""Operations whose result takes the place of a shard."""

# --- sharded parameters ---


def is_sharded(weight: Any) -> bool:
    """Whether a parameter is one that FSDP2 may have sharded: its rows, over one axis of ranks."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(weight, module.DTensor):
        return False
    shard, replicate = module.Shard(0), module.Replicate()
    return tuple(weight.placements) in ((shard,), (replicate, shard))


def local(weight: Any) -> Any:
    """The part of a sharded parameter that this rank has."""
    return weight._local_tensor


def with_local(weight: Any, part: Tensor) -> Tensor:
    """The same sharded tensor of another local part."""
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
    """Have FSDP2 gather a sharded parameter in FP8."""
    part = local(weight)
    if make_subclass is None or DisableTorchDispatch is None:
        say("make_subclass", "DisableTorchDispatch")
    elif type(part) is Tensor:
        weight._local_tensor = TrainedShard(part, weight.shape[0])


def saved(weight: Any) -> Any:
    """A sharded parameter as checkpoints hold it: numbers in its dtype, of a plain class."""
    part = local(weight)
    if isinstance(part, TrainedShard):
        return with_local(weight.detach(), part.plain())
    return (
        with_local(weight.detach(), part.restored()) if isinstance(part, Float8Weight) else weight
    )


def units(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that FSDP2 shards as one, by path; what belongs to several is of the last."""
    return {path: m for path, m in model.named_modules() if hasattr(m, "_get_fsdp_state")}


def unit_of(path: str, units: Mapping[str, nn.Module]) -> nn.Module | None:
    """The innermost unit that a module is part of."""
    around = [unit for unit in units if not unit or f"{path}.".startswith(f"{unit}.")]
    return units[max(around, key=len)] if around else None


def has_run(unit: Any) -> bool:
    """Whether FSDP2 has gathered the parameters of a unit; how it does is fixed from then on."""
    return getattr(unit._get_fsdp_state(), "_is_root", None) is not None
