"""A frozen weight that is kept in FP8: codes of its rows, and one scale per row.

To everybody else it is a weight of the dtype that it had: an operation that knows nothing of codes
gets the dequantized numbers, for as long as it runs. So adapters, ``state_dict`` and whatever else
reads it see what training multiplies with. What writes to it raises, but for ``copy_``, with which
checkpoints are loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from liger_multi.errors import PatchError

aten = torch.ops.aten


class Float8Weight(Tensor):
    """``codes * scale`` with the shape and dtype of the weight that it was made of.

    Attributes:
        codes: ``(N, K)``, E4M3.
        scale: ``(N,)``, fp32, powers of two.
        original: The weight that it was made of, on the CPU, or None where it was dropped.
    """

    codes: Tensor
    scale: Tensor
    original: Tensor | None

    @staticmethod
    def __new__(
        cls: type[Float8Weight],
        codes: Tensor,
        scale: Tensor,
        dtype: torch.dtype,
        original: Tensor | None = None,
    ) -> Float8Weight:
        """A weight of a dtype, of codes and scales."""
        made: Float8Weight = Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=dtype, device=codes.device, requires_grad=False
        )
        made.codes, made.scale, made.original = codes, scale, original
        return made

    @classmethod
    def of(cls, weight: Tensor, keep: bool) -> Float8Weight:
        """The weight in FP8; ``keep``: with a copy of itself on the CPU."""
        kept = keep and not weight.is_meta
        original = weight.detach().to("cpu", copy=True) if kept else None
        return cls(*_quantized(weight), weight.dtype, original)

    def dequantized(self) -> Tensor:
        """What is multiplied with, in the dtype of the weight."""
        from liger_multi.reference.float8.rows import Float8Rows, dequantized

        return dequantized(Float8Rows(self.codes, self.scale), self.dtype)

    def restored(self) -> Tensor:
        """The weight that it was made of, or what it holds where that was dropped."""
        if self.original is None:
            return self.dequantized()
        return self.original.to(self.device, self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Its shape; the numbers would have to be dequantized."""
        return f"Float8Weight({tuple(self.shape)}, {self.dtype}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """For compilers: the tensors inside, and the rest."""
        return ["codes", "scale"], (self.dtype,)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], rest: Any, outer_size: Any, outer_stride: Any
    ) -> Float8Weight:
        """The opposite."""
        return cls(inner["codes"], inner["scale"], *rest)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Operations that keep codes, loading, and everything else on dequantized numbers."""
        kwargs = kwargs or {}
        kept = _KEPT.get(func)
        if kept is not None and isinstance(args[0], Float8Weight):
            return kept(*args, **kwargs)
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


def _like(weight: Float8Weight, change: Callable[[Tensor], Tensor]) -> Float8Weight:
    return Float8Weight(change(weight.codes), change(weight.scale), weight.dtype, weight.original)


def _detach(weight: Float8Weight) -> Float8Weight:
    return _like(weight, Tensor.detach)


def _clone(weight: Float8Weight, *, memory_format: Any = None) -> Float8Weight:
    return _like(weight, Tensor.clone)


def _to(
    weight: Float8Weight, *, dtype: torch.dtype | None = None, device: Any = None,
    layout: Any = None, pin_memory: Any = None, non_blocking: bool = False,
    memory_format: Any = None,
) -> Float8Weight:  # fmt: skip
    """Another device moves codes; another dtype is the one that operations see."""
    made = _like(weight, lambda t: t.to(device=device, non_blocking=non_blocking, copy=True))
    return Float8Weight(made.codes, made.scale, dtype or weight.dtype, weight.original)


def _copy(weight: Float8Weight, source: Tensor, non_blocking: bool = False) -> Float8Weight:
    """Load numbers: they are quantized, and are the original from here on."""
    if isinstance(source, Float8Weight):
        codes, scale, original = source.codes, source.scale, source.original
    else:
        codes, scale = _quantized(source.to(weight.device))
        original = source.detach().to("cpu", weight.dtype, copy=True)
    weight.codes.copy_(codes)
    weight.scale.copy_(scale)
    weight.original = None if weight.original is None else original
    return weight


_KEPT: dict[Any, Callable[..., Float8Weight]] = {
    aten.detach.default: _detach,
    aten.alias.default: _detach,
    aten.clone.default: _clone,
    aten._to_copy.default: _to,
    aten.copy_.default: _copy,
}


def held(layer: nn.Module) -> Float8Weight | None:
    """The weight of a layer, where it is kept in FP8."""
    weight = layer._parameters.get("weight")
    return weight if isinstance(weight, Float8Weight) else None


def freeze(layer: nn.Module, keep: bool) -> None:
    """Keep the weight of a layer in FP8."""
    weight = layer._parameters["weight"]
    if weight is not None and not isinstance(weight, Float8Weight):
        made = Float8Weight.of(weight, keep)
        layer._parameters["weight"] = nn.Parameter(made, requires_grad=False)


def thaw(layer: nn.Module) -> None:
    """Give a layer the weight that it had."""
    weight = held(layer)
    if weight is not None:
        layer._parameters["weight"] = nn.Parameter(weight.restored(), requires_grad=False)
