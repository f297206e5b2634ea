"""Frozen weights of few bits: counted at their stored size, and dequantized for each product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _Product(torch.autograd.Function):
    """What a product with a stored weight allocates, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        ctx.shape = rows, x.shape[-1]
        weight = x.new_empty(rows, x.shape[-1])
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy @ dy.new_empty(ctx.shape), None


class Stored(nn.Module):
    """Stands in for a linear layer whose weight has few bits.

    Args:
        layer: What it stands for; its stored tensors are kept as they are.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        for i, tensor in enumerate([*layer.parameters(), *layer.buffers()]):
            self.register_buffer(f"stored_{i}", tensor.detach())

    def forward(self, x: Tensor) -> Tensor:
        """A tensor of the right shape."""
        run: Any = _Product.apply
        made: Tensor = run(x, self.out_features)
        return made


def stored_bits(module: Any) -> bool:
    """Whether a module is a linear layer whose weight stands in fewer than 16 bits."""
    if not all(isinstance(getattr(module, n, None), int) for n in ("in_features", "out_features")):
        return False
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.requires_grad:
        return False
    whole: int = module.in_features * module.out_features
    return weight.element_size() < 2 or weight.numel() < whole


def stand_in(model: nn.Module) -> int:
    """Put replicas where weights are stored in few bits; the bytes of them all."""
    total = 0
    for path, module in list(model.named_modules()):
        if stored_bits(module):
            parent, _, name = path.rpartition(".")
            made = Stored(module)
            setattr(model.get_submodule(parent), name, made)
            total += sum(b.nbytes for b in made.buffers())
    return total
