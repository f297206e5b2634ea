"""Activations with an operator of their own, rows of probabilities, and tables of embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_multi import checks, ops
from liger_multi.nn._shared import changed, fits, size

# --- activations ---


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
        bias: Whether there is a bias in addition to the weight.
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
        """The width and the options that differ from the defaults."""
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


# --- probabilities and embeddings ---


class Softmax(nn.Module):
    """Softmax along an axis.

    Like:
        ``torch.nn.Softmax``; the axis is the last one without another.

    Operator:
        softmax

    Args:
        dim: The axis.
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = checks.integer(type(self).__name__, "dim", dim)

    def forward(self, input: Tensor) -> Tensor:
        """Probabilities."""
        return ops.softmax(input, self.dim)

    def extra_repr(self) -> str:
        """What was chosen."""
        return changed(self)


class Sparsemax(nn.Module):
    """Projection on the simplex along an axis: probabilities with exact zeros.

    Like:
        ``torch.nn.Softmax``; the axis is the last one without another.

    Operator:
        sparsemax

    Args:
        dim: The axis.
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = checks.integer(type(self).__name__, "dim", dim)

    def forward(self, input: Tensor) -> Tensor:
        """Probabilities."""
        return ops.sparsemax(input, self.dim)

    def extra_repr(self) -> str:
        """What was chosen."""
        return changed(self)


class Embedding(nn.Embedding):
    """A table of embeddings, whose gradient is summed in a fixed order.

    Like:
        ``torch.nn.Embedding``, of which it is a subclass, and with ``scale`` the scaled embedding
        of Gemma 3; ``max_norm``, ``scale_grad_by_freq`` and ``sparse`` are refused.

    Operator:
        embedding

    Args:
        num_embeddings: Rows of the table.
        embedding_dim: Columns of the table.
        padding_idx: The row that gets no gradient.
        scale: Factor of what is looked up, rounded to the dtype of the table.
        validate: Raise for ids out of range on a device too (a sync).
        device: Of the parameter.
        dtype: Of the parameter.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        scale: float = 1.0,
        validate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **others: Any,
    ) -> None:
        name = type(self).__name__
        args = {n: v for n, v in others.items() if v is not None and v is not False}
        args.pop("norm_type", None)  # norm_type has no meaning without max_norm
        if args:
            raise ValueError(f"{name} does not support {', '.join(args)}; use torch.nn.Embedding")
        rows = size(name, "num_embeddings", num_embeddings)
        columns = size(name, "embedding_dim", embedding_dim)
        if padding_idx is not None:
            padding_idx = checks.integer(name, "padding_idx", padding_idx)
            if not -rows <= padding_idx < rows:
                raise ValueError(
                    f"{name}: padding_idx must name one of {rows} rows, got {padding_idx}"
                )
        super().__init__(rows, columns, padding_idx, device=device, dtype=dtype)
        self.scale = checks.number(name, "scale", scale)
        self.validate = checks.boolean(name, "validate", validate)

    def forward(self, input: Tensor) -> Tensor:
        """Look up the rows of ids."""
        return ops.embedding(
            input, self.weight, self.padding_idx, scale=self.scale, validate=self.validate
        )

    def extra_repr(self) -> str:
        """Sizes, and the options that differ from the defaults."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {changed(self)}".rstrip(", ")
