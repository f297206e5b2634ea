"""Adapters of layers as arguments."""

from typing import NamedTuple

from torch import Tensor

from liger_multi import checks


class LoRA(NamedTuple):
    """An adapter of a linear layer of x, which adds ``scale (x @ a.T) @ b.T`` to its output."""

    a: Tensor
    b: Tensor
    scale: float = 1.0


def adapters(op: str, **layers: LoRA | None) -> dict[str, LoRA | None]:
    """Adapters by layer, of arguments such as ``gate_lora``; a plain tuple is one as well.

    Raises:
        TypeError: An adapter is no tuple of two or three, or its scale no number.
        ValueError: A scale is not finite.
    """
    return {layer: _adapter(op, layer, value) for layer, value in layers.items()}


def _adapter(op: str, layer: str, value: LoRA | None) -> LoRA | None:
    if value is None:
        return None
    if not isinstance(value, tuple) or len(value) not in (2, 3):
        members = f"a tuple of {len(value)}" if isinstance(value, tuple) else checks.describe(value)
        raise TypeError(f"{op}: {layer}_lora must be LoRA(a, b, scale), got {members}")
    a, b, scale = value if len(value) == 3 else (*value, 1.0)
    return LoRA(a, b, checks.number(op, f"{layer}_lora.scale", scale))


def factors(layers: dict[str, LoRA | None]) -> dict[str, Tensor]:
    """The tensors of adapters by the names that messages have, such as ``gate_lora.a``."""
    tensors = {}
    for layer, adapter in layers.items():
        if adapter is not None:
            tensors[f"{layer}_lora.a"], tensors[f"{layer}_lora.b"] = adapter.a, adapter.b
    return tensors


def scales(layers: dict[str, LoRA | None]) -> list[float]:
    """The scale of each layer's adapter, 1 for a layer without one."""
    return [1.0 if adapter is None else adapter.scale for adapter in layers.values()]
