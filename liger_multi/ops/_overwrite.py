"""What ``inplace=True`` asks of a tensor: rows that an operator may overwrite."""

from torch import Tensor

from liger_multi import checks


def writable_rows(op: str, name: str, x: Tensor) -> Tensor:
    """A view ``(rows, V)`` of the caller's tensor; ValueError where there is none to write to."""
    if x.is_leaf:
        raise ValueError(
            f"{op}: inplace=True overwrites the {name} by their gradient, so they must come from "
            f"an operation, got a leaf: {checks.describe(x)}"
        )
    if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
        raise ValueError(
            f"{op}: inplace=True needs {name} whose elements are stored once each, got strides "
            f"{x.stride()}"
        )
    try:
        return x.view(x.shape[:-1].numel(), x.shape[-1])
    except RuntimeError:
        raise ValueError(
            f"{op}: inplace=True needs {name} that can be viewed as (rows, V), got strides "
            f"{x.stride()}"
        ) from None
