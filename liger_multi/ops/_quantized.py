"""A frozen weight in 4 bits: a view on the storage of the library that loaded it.

To all other code it is a weight of 16 bits. Operators dequantize it for as long as a GEMM of theirs
runs; autograd keeps the codes. Any other PyTorch operation sees the dequantized weight.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi._torch_private import (
    log_missing,
    make_wrapper_subclass,
    to_copy,
)
from liger_multi.dispatch.config import current
from liger_multi.dispatch.stored import StoredWeight, assumed_memory, same_strides
from liger_multi.ops._packing import PACKINGS, as_bytes, part_of, shape_of
from liger_multi.ops.dequantize import FORMATS, dequantize

aten = torch.ops.aten
MORE = ("global_scale", "zeros", "scale_levels", "scale_absmax", "scale_offset")
"""Tensors beside codes and scales."""
PIECE_BYTES, PIECE_SHARE = 5 * 2**28, 64
"""Of numbers at a time, where the configuration has no ``chunk_bytes``: at most so many bytes, and
a 64th of the device's memory."""

WRITTEN = (
    "{} writes to a frozen weight in 4 bits, {!r}; dequantize it first "
    "(liger_multi.integrations.dequantize_weights)"
)


class QuantizedWeight(StoredWeight):
    """Codes and scales with the shape and dtype of the weight that they stand for.

    Writes raise. Views of it are views of codes where they are a range of a stack or a transpose,
    and copies of numbers elsewhere: writes to those do not reach the weight.

    Attributes:
        codes: uint8 ``(..., K / 2)``, as ``dequantize`` takes them; int32 where there is a
            ``packing``.
        scales: Of their blocks.
        format: ``nf4``, ``fp4``, ``mxfp4``, ``nvfp4`` or ``int4``.
        group: Elements of a block; None for that of the format.
        divides: Whether the global scale divides.
        more: The other tensors of ``dequantize`` by name.
        transposed: Whether the last two axes are exchanged: the weight is ``(..., K, N)``.
        float8: Whether linear layers and LoRA operators round the numbers to FP8 rows and multiply
            in FP8; grouped GEMMs do not.
        whole: Members of the stack (or rows of the matrix) that these are some of.
        packing: Words of eight codes, which become bytes before they become numbers: ``gptq`` packs
            inputs, ``(K / 8, N)``; ``awq`` outputs, ``(K, N / 8)``, even ones first. None: bytes.
    """

    codes: Tensor
    scales: Tensor
    format: str
    group: int | None
    divides: bool
    more: dict[str, Tensor]
    transposed: bool
    float8: bool
    whole: int
    packing: str | None
    _versions: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def __new__(
        cls: type[QuantizedWeight],
        codes: Tensor,
        scales: Tensor,
        *,
        format: str,
        dtype: torch.dtype = torch.bfloat16,
        group: int | None = None,
        divides: bool = False,
        transposed: bool = False,
        float8: bool = False,
        whole: int | None = None,
        packing: str | None = None,
        **more: Tensor | None,
    ) -> QuantizedWeight:
        """A view on codes and scales; nothing is copied or checked until numbers are needed.

        Raises:
            TypeError: A tensor by a name that ``dequantize`` does not have.
            ValueError: An unknown packing.
            PatchError: This PyTorch has no tensors without storage.
        """
        if packing is not None:
            checks.one_of("QuantizedWeight", "packing", packing, PACKINGS)
        if unknown := more.keys() - set(MORE):
            raise TypeError(f"QuantizedWeight: unknown tensors {sorted(unknown)}, known are {MORE}")
        if make_wrapper_subclass is None:
            log_missing("make_wrapper_subclass")
        shape = list(shape_of(codes, packing))
        if transposed:
            shape[-2:] = shape[:-3:-1]
        weight: QuantizedWeight = make_wrapper_subclass(
            cls, shape, dtype=dtype, device=codes.device, requires_grad=False
        )
        weight.codes, weight.scales, weight.format = codes, scales, format
        weight.group, weight.divides, weight.transposed = group, divides, transposed
        weight.float8, weight.packing = float8, packing
        weight.more = {name: t for name, t in more.items() if t is not None}
        weight.whole = shape_of(codes, packing)[0] if whole is None else whole
        return weight

    @torch.no_grad()
    def dequantized(self) -> Tensor:
        """The dequantized weight, as a new tensor."""
        self._check_versions()
        codes = self.codes if self.packing is None else as_bytes(self.codes, self.packing)
        flat = codes.ndim < self.scales.ndim
        y = dequantize(
            codes.view(*self.scales.shape[:-1], -1) if flat else codes,
            self.scales,
            format=self.format,
            group=self.group,
            divides=self.divides,
            dtype=self.dtype,
            **self.more,
        )
        y = y.mT if self.transposed else y
        return y.reshape(-1) if flat else y

    def pieces(self) -> list[QuantizedWeight]:
        """Parts by rows ``(..., rows, K)`` whose numbers take ``chunk_bytes`` each at most.

        A weight that is smaller, or whose blocks go across rows, is one piece.
        """
        size, rows = self.numel() * self.dtype.itemsize, self.shape[-2]
        count = -(-size // (current().chunk_bytes or _piece_bytes(self.device)))
        group = self.block
        if count < 2 or self.columns % group:
            return [self]
        unit = math.lcm(8, group if self.transposed else 1)
        step = max(1, rows // (count * unit)) * unit
        plain = self._with_own_scales()
        return [plain._rows(start, min(rows, start + step)) for start in range(0, rows, step)]

    @torch.no_grad()
    def numbers_at(self, ids: Tensor) -> Tensor:
        """Rows of a matrix ``(N, K)`` by their places ``(n,)``: only these are dequantized."""
        if self.transposed or self.packing is not None or self.columns % self.block:
            return self.dequantized()[ids]
        plain = self._with_own_scales()
        zeros = {n: t[ids] for n, t in plain.more.items() if n == "zeros"}
        part = plain.changed(codes=plain.codes[ids], scales=plain.scales[ids], **zeros)
        return part.dequantized()

    @property
    def columns(self) -> int:
        """Elements of a row of codes."""
        return int(shape_of(self.codes, self.packing)[-1])

    @property
    def block(self) -> int:
        """Elements of a block."""
        return self.group or FORMATS[self.format].group or self.columns // self.scales.shape[-1]

    @torch.no_grad()
    def _with_own_scales(self) -> QuantizedWeight:
        """The same with scales ``(..., K / group)`` that are not quantized themselves."""
        if not FORMATS[self.format].flat:
            return self
        from liger_multi.reference.quantized.dequantize import opened

        levels, absmax, offset = (self.more.get(n) for n in MORE[2:])
        scales = opened(self.scales, None, levels, absmax, offset, self.format, False)
        return QuantizedWeight(
            self.codes,
            scales.view(*self.codes.shape[:-1], -1),
            format=self.format,
            dtype=self.dtype,
            group=self.group,
            transposed=self.transposed,
        )

    def _rows(self, first: int, last: int) -> QuantizedWeight:
        """Rows of the weight; columns of codes if it is transposed."""
        zeros = {n: t for n, t in self.more.items() if n == "zeros"}
        codes = part_of(self.codes, self.packing, self.transposed, first, last)
        cut = {"scales": self.scales, **zeros}
        if not self.transposed:
            return self.changed(codes=codes, **{n: t[..., first:last, :] for n, t in cut.items()})
        blocks = slice(first // self.block, last // self.block)
        return self.changed(codes=codes, **{n: t[..., blocks] for n, t in cut.items()})

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Codes, scales and the others."""
        return self.codes, self.scales, *self.more.values()

    @property
    def stored_bytes(self) -> int:
        """Memory of codes and scales."""
        return sum(t.numel() * t.itemsize for t in self.tensors)

    def sealed(self) -> QuantizedWeight:
        """The same for one backward pass, which raises once a tensor has been written to."""
        weight = self.changed()
        if not any(t.is_inference() for t in self.tensors):  # those have no version counter
            weight._versions = tuple((id(t), t._version) for t in weight.tensors)
        return weight

    def _check_versions(self) -> None:
        """Raise where codes or scales are not those of forward anymore; copies have their own."""
        versions = zip(self.tensors, self._versions, strict=False)
        if any(id(t) == own and t._version != version for t, (own, version) in versions):
            raise RuntimeError(
                f"codes or scales of {self!r} were modified by an inplace operation after the "
                "forward pass that backward needs them for"
            )

    def changed(self, **values: Any) -> QuantizedWeight:
        """The same with other tensors or another dtype."""
        self._check_versions()
        fields = {
            "codes": self.codes,
            "scales": self.scales,
            "format": self.format,
            "dtype": self.dtype,
            "group": self.group,
            "divides": self.divides,
            "transposed": self.transposed,
            "float8": self.float8,
            "whole": self.whole,
            "packing": self.packing,
            **self.more,
            **values,
        }
        return type(self)(fields.pop("codes"), fields.pop("scales"), **fields)

    def mapped(self, change: Callable[[Tensor], Tensor], **values: Any) -> QuantizedWeight:
        """The same with every tensor changed."""
        tensors = {"codes": self.codes, "scales": self.scales, **self.more}
        return self.changed(**{n: change(t) for n, t in tensors.items()}, **values)

    def __getitem__(self, index: Any) -> Any:
        """A range of a stack, or whatever else, which is of numbers."""
        if isinstance(index, slice) and self.ndim > 2:
            first, last, step = index.indices(self.shape[0])
            part = _range(self, first, last) if step == 1 else None
            if part is not None:
                return part
        return super().__getitem__(index)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """What every rank gives to FSDP2: bytes of all its rows, as many as all others."""
        rows = -(-self.whole // mesh.size())
        parts = [_bytes(t).flatten(1) for t in self._by_size().values()]
        width = sum(p.shape[1] for p in parts)
        # a single rank copies only the first of several tensors
        joined = self.codes.new_zeros(rows, -(-width // 8) * 8)
        joined[: self.codes.shape[0], :width] = torch.cat(parts, 1)
        return (joined,), ()

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], rest: tuple[()], dtype: Any, *, out: Any = None
    ) -> tuple[QuantizedWeight, list[Tensor]] | None:
        """The weight over what all ranks gave; once, for FSDP2 refills it in place."""
        if out is not None:
            return None
        every, first, views = gathered[0][: self.whole], 0, {}
        for name, own in self._by_size().items():
            size = _bytes(own[:0]).flatten(1).shape[1]
            part = every[:, first : first + size].view(own.dtype)
            views[name], first = part.unflatten(1, own.shape[1:]), first + size
        return self.changed(**views), []

    def _by_size(self) -> dict[str, Tensor]:
        """Tensors with a row for every row of the weight, those of wide numbers first."""
        rows = {"codes": self.codes, "scales": self.scales, **self.more}
        rows.pop("global_scale", None)
        return dict(sorted(rows.items(), key=lambda item: -item[1].itemsize))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape and format; the numbers would have to be dequantized."""
        return f"QuantizedWeight({self.format}, {tuple(self.shape)}, {self.dtype}, {self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """The inner tensors and the other attributes, for compilers."""
        rest = {"format": self.format, "dtype": self.dtype, "group": self.group}
        rest |= {"divides": self.divides, "transposed": self.transposed, "float8": self.float8}
        rest |= {"whole": self.whole, "packing": self.packing}
        rest["more"] = tuple(self.more)
        for name, tensor in self.more.items():
            setattr(self, f"_{name}", tensor)
        return ["codes", "scales", *(f"_{name}" for name in self.more)], rest

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], rest: Any, outer_size: Any, outer_stride: Any
    ) -> QuantizedWeight:
        """Rebuild the weight from :meth:`__tensor_flatten__`."""
        options = {**rest, **{n: inner[f"_{n}"] for n in rest["more"]}}
        del options["more"]
        return cls(inner["codes"], inner["scales"], **options)

    def write_error(self, action: object) -> TypeError:
        """The error of an operation that writes to the weight."""
        return TypeError(WRITTEN.format(action, self))

    def _refuse_write(self, *_: Any) -> Any:
        """Raise here: of an operator's TypeError, ``+=`` would make a sum that nobody keeps."""
        raise self.write_error("an assignment")

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __setitem__ = _refuse_write

    @property
    def data(self) -> Tensor:
        """The same codes, detached; numbers cannot be assigned to it, as merging adapters does."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self._refuse_write(value)


@functools.cache
def _memory_of(device: torch.device) -> int:
    """Bytes of a device; 0 for the host's memory."""
    if device.type in ("cpu", "meta"):
        return 0
    module: Any = torch.get_device_module(device.type)
    return int(module.get_device_properties(device).total_memory)


def _piece_bytes(device: torch.device) -> int:
    total = assumed_memory.get() or _memory_of(device)
    return min(PIECE_BYTES, total // PIECE_SHARE) if total else PIECE_BYTES


def _range(weight: QuantizedWeight, first: int, last: int) -> QuantizedWeight | None:
    """Some members of a stack; None where a block belongs to two of them."""
    codes = weight.codes[first:last]
    if weight.scales.ndim == weight.codes.ndim:
        own = {n: weight.more[n][first:last] for n in ("zeros",) if n in weight.more}
        return weight.changed(codes=codes, scales=weight.scales[first:last], **own)
    member = 2 * math.prod(weight.codes.shape[1:])
    group = weight.group or FORMATS[weight.format].group
    if member % group or "scale_levels" in weight.more:
        return None
    blocks = member // group
    scales = weight.scales.reshape(-1)[first * blocks : last * blocks]
    return weight.changed(codes=codes, scales=scales)


def _select(weight: QuantizedWeight, dim: int, index: int) -> QuantizedWeight | None:
    if dim or weight.ndim < 3 or weight.packing:
        return None
    index = int(index) % weight.shape[0]
    part = _range(weight, index, index + 1)
    if part is None:
        return None
    own = {n: part.more[n][0] for n in ("zeros",) if n in part.more}
    scales = part.scales[0] if part.scales.ndim == part.codes.ndim else part.scales
    return part.changed(codes=part.codes[0], scales=scales, **own)


def _transpose(weight: QuantizedWeight, first: int, second: int) -> QuantizedWeight | None:
    axes = {first % weight.ndim, second % weight.ndim}
    last = {weight.ndim - 2, weight.ndim - 1}
    return weight.changed(transposed=not weight.transposed) if axes == last else None


def _t(weight: QuantizedWeight) -> QuantizedWeight | None:
    return _transpose(weight, 0, 1)


def _permute(weight: QuantizedWeight, axes: Any) -> QuantizedWeight | None:
    """``.T`` of a matrix."""
    return _t(weight) if [axis % weight.ndim for axis in axes] == [1, 0] else None


def _detach(weight: QuantizedWeight) -> QuantizedWeight:
    return weight.mapped(Tensor.detach)


def _clone(weight: QuantizedWeight, *, memory_format: Any = None) -> QuantizedWeight:
    return weight.mapped(Tensor.clone)


def _to(
    weight: QuantizedWeight,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    layout: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> QuantizedWeight:
    """Another device moves codes; another dtype is the one that operations see."""
    return weight.mapped(
        lambda t: t.to(device=device, non_blocking=non_blocking), dtype=dtype or weight.dtype
    )


# --- DDP and FSDP2 ---


def _by_members(weight: QuantizedWeight) -> bool:
    """Whether the first axis is that of members with blocks of their own."""
    known = not weight.packing and weight.more.keys() <= {"global_scale", "zeros"}
    own = weight.codes.ndim == weight.scales.ndim > 1
    return known and own and (weight.ndim > 2 or not weight.transposed)


def _opened_scales(weight: QuantizedWeight) -> QuantizedWeight:
    """The same with scales that belong to rows, where blocks end with rows."""
    flat = FORMATS[weight.format].flat and weight.scales.ndim < weight.codes.ndim
    return weight._with_own_scales() if flat and not weight.columns % weight.block else weight


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _slice(
    weight: QuantizedWeight,
    dim: int = 0,
    start: int | None = None,
    stop: int | None = None,
    step: int = 1,
) -> QuantizedWeight | None:
    if dim or step != 1:
        return None
    first, last, _ = slice(start, stop).indices(weight.shape[0])
    weight = _opened_scales(weight)
    if _by_members(weight):
        return _range(weight, first, last)
    matrix = weight.ndim == 2 and not weight.transposed and weight.codes.ndim == 2
    if not matrix or weight.columns % weight.block or (weight.packing and (first % 8 or last % 8)):
        return None
    return weight._rows(first, max(first, last))


def _split(weight: QuantizedWeight, size: int, dim: int = 0) -> list[QuantizedWeight] | None:
    weight = _opened_scales(weight)
    if dim or not _by_members(weight):
        return None
    starts = range(0, max(1, weight.shape[0]), max(1, size))
    return [_range(weight, start, start + size) for start in starts]  # type: ignore[misc]


def _zeros(weight: QuantizedWeight, size: Any, **options: Any) -> QuantizedWeight | None:
    """Members that FSDP2 copies a shard into."""
    named = any(value is not None for name, value in options.items() if name != "pin_memory")
    weight = _opened_scales(weight)
    if named or not _by_members(weight) or list(size[1:]) != list(weight.shape[1:]):
        return None
    room = {}
    for name, own in weight._by_size().items():
        row = _bytes(own[:0])  # not every dtype of scales can be filled
        room[name] = row.new_zeros(size[0], *row.shape[1:]).view(own.dtype)
    return weight.changed(**room)


def _view(weight: QuantizedWeight, size: Any) -> Any:
    """A flat view for FSDP2, or the shape it had; any other view is of the dequantized weight."""
    if list(size) == list(weight.shape):
        return _detach(weight)
    if list(size) in ([-1], [weight.numel()]) and _by_members(weight):
        return weight.changed(codes=weight.codes.reshape(-1))
    return weight.dequantized().reshape(size)


def _copy(weight: QuantizedWeight, source: Tensor, non_blocking: bool = False) -> Any:
    """Copy the codes of another weight, or the numbers it already has (DDP's broadcast)."""
    if isinstance(source, QuantizedWeight):
        target = weight
        if weight.scales.ndim != source.scales.ndim:
            target, source = _opened_scales(weight), _opened_scales(source)
        pairs = list(zip(target.tensors, source.tensors, strict=False))
        kinds = [(w.format, w.block, w.packing, w.divides, *w.more) for w in (weight, source)]
        alike = kinds[0] == kinds[1] and all(
            one.shape == other.shape and one.itemsize == other.itemsize for one, other in pairs
        )
        if not alike:  # such as quantized scales, which have no place for plain ones
            return None
        for one, other in pairs:
            narrow = one.itemsize == 1
            one, other = (t.view(torch.uint8) if narrow else t for t in (one, other))
            one.copy_(other)
        return weight
    same = torch.equal(weight.dequantized(), source.to(weight.dtype))
    return weight if same else None


QuantizedWeight.handlers = {
    aten.detach.default: _detach,
    aten.alias.default: _detach,
    aten.clone.default: _clone,
    to_copy: _to,
    aten.select.int: _select,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.permute.default: _permute,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.new_zeros.default: _zeros,
    aten.view.default: _view,
    aten.as_strided.default: same_strides,
    aten.copy_.default: _copy,
}

# PyTorch loads checkpoints with classes that it was told of only; distributed ones always
torch.serialization.add_safe_globals([QuantizedWeight])
