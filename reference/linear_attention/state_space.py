"""What state space models have around their scans: step sizes, the skip by D, the gate z."""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor


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
        dsteps = dsteps.masked_fill((steps < self.low) | (steps > self.high), 0)
        return dsteps * torch.sigmoid(raw) if self.softplus else dsteps


def gated(y: Tensor, z: Optional[Tensor]) -> Tensor:
    """``y silu(z)``, or y without a gate."""
    return y if z is None else y * F.silu(z)


def gate_gradient(dy: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Gradient of z, where y is before the gate."""
    p = torch.sigmoid(z)
    return dy * y * p * (1 + z * (1 - p))
