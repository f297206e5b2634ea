"""Rows of probabilities, and tables of embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_multi import checks, ops
from liger_multi.nn._shared import changed, size


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
        given = {n: v for n, v in others.items() if v is not None and v is not False}
        given.pop("norm_type", None)  # without max_norm it says nothing
        if given:
            raise ValueError(f"{name} does not support {', '.join(given)}; use torch.nn.Embedding")
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
        """The rows of some ids."""
        return ops.embedding(
            input, self.weight, self.padding_idx, scale=self.scale, validate=self.validate
        )

    def extra_repr(self) -> str:
        """Sizes, and what was chosen."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {changed(self)}".rstrip(", ")
