"""What ``inplace=True`` asks of a tensor: rows that an operator may overwrite."""

from torch import Tensor
from torch.nn import Parameter

from liger_multi import checks

_PLAIN = (Tensor, Parameter)


def writable_rows(op: str, name: str, x: Tensor) -> Tensor:
    """A view ``(rows, V)`` of the caller's tensor; ValueError where there is none to write to."""
    if x.is_leaf:
        checks.refuse(op, f"inplace=True overwrites the {name} by their gradient, so they must "
                      "come from an operation", f"a leaf: {checks.describe(x)}")  # fmt: skip
    if x._is_view() and x._base is not None and x._base.is_leaf and x._base.requires_grad:
        raise ValueError(
            f"{op}: a view of a leaf Variable that requires grad is being used in an in-place "
            f"operation: inplace=True would overwrite {checks.describe(x._base)} by the gradient "
            f"of the {name}, a view of it"
        )
    if _overlaps_itself(x):
        checks.refuse(op, f"inplace=True needs {name} whose elements are stored once each",
                      f"strides {x.stride()}")  # fmt: skip
    try:
        return x.view(x.shape[:-1].numel(), x.shape[-1])
    except RuntimeError:
        raise ValueError(
            f"{op}: inplace=True needs {name} that can be viewed as (rows, V), got strides "
            f"{x.stride()}"
        ) from None


def _overlaps_itself(x: Tensor) -> bool:
    """Whether elements may share memory: an axis steps within what the finer axes span."""
    span = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= span:
                return True
            span += stride * (size - 1)
    return False


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether the bytes between the first and the last element of both tensors overlap."""
    if a.device != b.device or not a.numel() or not b.numel():
        return False
    if not (type(a) in _PLAIN and type(b) in _PLAIN):  # fake tensors have no addresses
        return a is b
    (start, stop), (first, last) = _bytes_of(a), _bytes_of(b)
    return start < last and first < stop


def _bytes_of(x: Tensor) -> tuple[int, int]:
    last = sum(stride * (size - 1) for stride, size in zip(x.stride(), x.shape, strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
