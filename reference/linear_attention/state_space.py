"""What state space models have around their scans: step sizes, the gate z, sums of gradients."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi.reference.common.clamp import blocks_gradient

Nine = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class StepSizes(NamedTuple):
    """``clamp(softplus(raw + bias), low, high)``, without the softplus if not asked for."""

    softplus: bool
    low: float = -torch.inf
    high: float = torch.inf

    def unclamped(self, raw: Tensor) -> Tensor:
        """Step sizes before they are clamped."""
        return F.softplus(raw) if self.softplus else raw

    def of(self, raw: Tensor) -> Tensor:
        """Step sizes, where the bias is in ``raw``."""
        return self.unclamped(raw).clamp(self.low, self.high)

    def gradient(self, dsteps: Tensor, raw: Tensor) -> Tensor:
        """Gradient of ``raw``."""
        steps = self.unclamped(raw)
        clamped = blocks_gradient(steps, self.high) | blocks_gradient(-steps, -self.low)
        dsteps = dsteps.masked_fill(clamped, 0)
        return dsteps * torch.sigmoid(raw) if self.softplus else dsteps


def gated(y: Tensor, z: Tensor | None) -> Tensor:
    """``y silu(z)``, or y without a gate."""
    return y if z is None else y * F.silu(z)


def gate_gradient(dy: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Gradient of z, where y is before the gate."""
    p = torch.sigmoid(z)
    return dy * y * p * (1 + z * (1 - p))


class Gradients:
    """Gradients that are filled in parts, by the names of their tensors.

    Args:
        inputs: The tensors of the call; the first is the one that is scanned.
        needs: Whether the tensors need gradients, in the order of the results.
        rows: Names of those whose parts are written once. The others are sums, in the wide dtype.
    """

    def __init__(self, inputs: Any, needs: dict[str, bool], rows: str) -> None:
        self.inputs, self.needs = inputs, needs
        self.buffers: dict[str, Tensor] = {}
        for name, is_needed in needs.items():
            x = getattr(inputs, name)
            if is_needed and x is not None:
                self.buffers[name] = (
                    x.new_empty(x.shape)
                    if name in rows.split()
                    else x.new_zeros(x.shape, dtype=inputs.acc_dtype)
                )

    def put(self, name: str, index: Any, part: Tensor) -> None:
        """Write a part."""
        if name in self.buffers:
            self.buffers[name][index] = part.to(self.buffers[name].dtype)

    def add(self, name: str, index: Any, part: Tensor) -> None:
        """Add to a sum."""
        if name in self.buffers:
            self.buffers[name][index] += part

    def any(self, *names: str) -> bool:
        """Whether one of them is needed."""
        return not self.buffers.keys().isdisjoint(names)

    def results(self) -> Any:
        """A tuple of all of them in the dtypes of their tensors, empty if not needed."""
        results = []
        for name in self.needs:
            x = getattr(self.inputs, name)
            empty = (self.inputs[0] if x is None else x).new_empty(0)
            results.append(self.buffers[name].to(x.dtype) if name in self.buffers else empty)
        return tuple(results)
