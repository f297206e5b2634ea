"""Activations with an operator of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from liger_multi import checks, ops
from liger_multi.nn._shared import changed, fits, size


class ReLUSquared(nn.Module):
    """Squared rectifier.

    Like:
        transformers ``ReLUSquaredActivation``.

    Operator:
        relu_squared

    Args:
        None.
    """

    def __init__(self) -> None:
        super().__init__()

    def forward(self, input: Tensor) -> Tensor:
        """Rectify and square."""
        return ops.relu_squared(input)


class DyT(nn.Module):
    """Dynamic tanh, which stands where a norm would.

    Like:
        ``DynamicTanh`` of arXiv:2503.10622.

    Operator:
        dyt

    Args:
        hidden_size: Width of the last axis.
        init_alpha: What the factor inside of tanh starts at.
        bias: Whether there is a bias beside the weight.
        device: Of the parameters.
        dtype: Of the parameters.
    """

    bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        init_alpha: float = 0.5,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = size("DyT", "hidden_size", hidden_size)
        self.init_alpha = checks.number("DyT", "init_alpha", init_alpha)
        self.alpha = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.weight = nn.Parameter(torch.empty(self.hidden_size, device=device, dtype=dtype))
        term = (
            nn.Parameter(torch.empty_like(self.weight))
            if checks.boolean("DyT", "bias", bias)
            else None
        )
        self.register_parameter("bias", term)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make it a plain tanh of a multiple of its input."""
        nn.init.constant_(self.alpha, self.init_alpha)
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Apply dynamic tanh, channel by channel."""
        fits(self, input, self.hidden_size)
        return ops.dyt(input, self.alpha, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Width and what else was chosen."""
        others = [part for part in (changed(self),) if part]
        return ", ".join([f"{self.hidden_size}", *others])


class PolyNorm(nn.Module):
    """Sum of the root-mean-square norms of three powers.

    Like:
        ``PolyNorm`` of arXiv:2411.03884.

    Operator:
        poly_norm

    Args:
        eps: Added to the means of squares.
        device: Of the parameters.
        dtype: Of the parameters.
    """

    def __init__(
        self,
        eps: float = 1e-6,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = checks.number("PolyNorm", "eps", eps, 0.0)
        self.weight = nn.Parameter(torch.empty(3, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A third of each power."""
        nn.init.constant_(self.weight, 1 / 3)
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Activate the last axis."""
        return ops.poly_norm(input, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """The number that was chosen."""
        return f"eps={self.eps}"
