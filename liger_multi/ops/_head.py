"""Shared by the fused linear operators: checks, chunk sizes, dtypes and samples."""

import math
from typing import Any

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi._torch_private import constant_in_graphs
from liger_multi.dispatch.config import current, parse_bytes
from liger_multi.ops._work import Options, Shapes, Work
from liger_multi.testing.samples import Sample, Tensor as T

IN_8_BITS = ("fused_linear_cross_entropy", "fused_linear_log_prob")  # which offer it
# gradients are in the dtype of the first, where they are in FP8 at all
_DTYPES = {"float8": torch.float8_e5m2, "float8_logits": torch.float8_e4m3fn}


def accumulator(name: str, accumulate: object) -> None:
    """A dtype in which gradients of weights are summed."""
    if not isinstance(accumulate, torch.dtype) or accumulate not in checks.ACCUMULATE:
        raise TypeError(
            f"{name}: accumulate must be a floating torch.dtype, one of "
            f"{', '.join(map(str, checks.ACCUMULATE))}, got {checks.describe(accumulate)}"
        )


def shapes_fit(name: str, hidden: Tensor, weight: Tensor) -> None:
    """Hidden states and weight can be multiplied."""
    if weight.numel() == 0:
        raise ValueError(
            f"{name}: weight has no elements, shape {tuple(weight.shape)}: it looks like a "
            f"ZeRO-3 shard that was not gathered; "
            "call the loss through the head's own forward, or gather the weight first"
        )
    if weight.ndim != 2:
        raise ValueError(f"{name}: weight must have shape (V, H), got {checks.describe(weight)}")
    if hidden.ndim == 0 or hidden.shape[-1] != weight.shape[1]:
        checks.refuse(
            name,
            f"the last axis of hidden must be H = {weight.shape[1]} of weight "
            f"{tuple(weight.shape)}",
            hidden,
        )


@constant_in_graphs
def _in_8_bits() -> torch.dtype | None:
    return _DTYPES.get(current().head_gemms)


def compute_dtype(
    name: str, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> torch.dtype | None:
    """The dtype of the GEMMs: autocast's, which does not reach into operators; else all must agree.

    The FP8 formats that a configuration asks for take the place of both.
    """
    device_type = hidden.device.type
    if name in IN_8_BITS and hidden.dtype != torch.float64:
        narrow = _in_8_bits()
        if narrow is not None:
            return narrow
    autocast = checks.autocast_dtype(device_type)
    if autocast is not None and hidden.dtype != torch.float64:
        return autocast
    if hidden.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        dtypes = [
            str(x.dtype).removeprefix("torch.") for x in (hidden, weight, bias) if x is not None
        ]
        raise TypeError(
            f"{name}: hidden, weight and bias must have one dtype outside of autocast, got "
            f"{', '.join(dtypes)}"
        )
    return None


@constant_in_graphs
def _configured_budget() -> int:
    return current().chunk_bytes


LEAN_BYTES = 2**27  # of a chunk's logits and gathered hidden states under chunk="lean"


def lean_chunks(
    chunk: int | str,
    accumulate: torch.dtype,
    hidden: Tensor,
    weight: Tensor,
    compute: torch.dtype | None,
) -> tuple[int | str, torch.dtype]:
    """Translate ``chunk="lean"`` into rows and an accumulation dtype; others pass unchanged.

    A sum over rows leaves the range of float16, so that a weight of this dtype keeps its sums in
    float32.
    """
    if not isinstance(chunk, str) or chunk != "lean":
        return chunk, accumulate
    from liger_multi.reference.cross_entropy.float8 import logits_dtype

    sums = torch.float32 if weight.dtype == torch.float16 else weight.dtype
    size = logits_dtype(compute, hidden.dtype).itemsize
    rows = LEAN_BYTES // ((weight.shape[0] + weight.shape[1]) * size)
    return max(1, rows if rows < 8 else rows // 8 * 8), sums


def rows_and_budget(name: str, chunk: int | str) -> tuple[int, int]:
    """Rows (0: from the budget) and the byte budget (0: from the free memory)."""
    if isinstance(chunk, str):
        budgets = {"lean": lambda: LEAN_BYTES, "auto": _configured_budget}
        return 0, budgets.get(chunk, lambda: parse_bytes(chunk, f"chunk of {name}"))()
    if isinstance(chunk, bool) or not isinstance(chunk, int) or not 1 <= chunk < 2**63:
        checks.refuse(
            name,
            "chunk must be 'auto', 'lean', a positive number of rows or a byte budget such as "
            "'512MiB'",
            chunk,
        )
    return chunk, 0


def gradients(**kwargs: Any) -> tuple[Tensor, ...]:
    """Shape rule of the gradients of a head, whether its tensors or their gradients were kept."""
    h, w, classes = (kwargs[f"{n}_gradient"] for n in ("hidden", "weight", "bias"))
    if kwargs["hidden"] is not None and kwargs["weight"] is not None:
        h, w, classes = kwargs["hidden"], kwargs["weight"], kwargs["weight"]
    sizes = {"hidden": (h, h.shape), "weight": (w, w.shape), "bias": (w, classes.shape[:1])}
    dtypes = {n: kwargs[f"{n}_dtype"] or kwargs["weight_dtype"] for n in sizes}
    return tuple(
        x.new_empty(size if kwargs[f"needs_{n}"] else (0,), dtype=dtypes[n])
        for n, (x, size) in sizes.items()
    )


def case(
    rows: int,
    width: int,
    classes: int,
    *,
    ignored: float = 0.0,
    bias: bool = False,
    weighted: bool = False,
    size: float = 0.6,
) -> dict[str, T]:
    """Tensors of a sample."""
    tensors = {
        "hidden": T((rows, width)),
        "weight": T((classes, width), scale=size / width**0.5 * 2),
        "target": T((rows,), classes=classes, ignored=ignored),
    }
    tensors |= {"bias": T((classes,), scale=0.3)} if bias else {}
    return tensors | (
        {"class_weight": T((classes,), positive=True, grad=False)} if weighted else {}
    )


def strided(scale: float) -> list[Sample]:
    """Samples of a weight and of hidden states with other strides."""
    tensors = case(6, 16, 24) | {"weight": T((24, 16), scale=scale)}
    weight = {"weight": T((24, 16), scale=scale, layout="transposed")}
    return [
        Sample("transposed-weight", tensors | weight),
        Sample("sliced-hidden", tensors | {"hidden": T((6, 16), layout="sliced")}),
    ]


def head_work(shapes: Shapes, size: int, options: Options) -> Work:
    rows, width = math.prod(shapes["hidden"][:-1]), shapes["hidden"][-1]
    classes = shapes["weight"][0]
    read_bytes, product = (rows + classes) * width * size, 2.0 * rows * width * classes
    # forward: one product, inputs read; backward: two more, gradients written
    return Work(read_bytes, 2 * read_bytes, product, 3 * product)
