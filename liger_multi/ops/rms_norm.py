"""Contract of ``rms_norm``."""

from typing import Optional

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.op import Op
from liger_multi.testing.samples import Sample
from liger_multi.testing.samples import Tensor as T

CASTINGS = ("llama", "olmo", "gemma")
op = Op("rms_norm", rows=("x", "dy", "rstd"), replicated=("weight",))


def _statistics(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@op.forward(returns="y rstd", residuals="rstd")
def forward(
    x: Tensor, weight: Optional[Tensor], eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    """Shape rule."""
    wide = weight is not None and casting == "llama"
    dtype = torch.promote_types(x.dtype, weight.dtype) if weight is not None and wide else x.dtype
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1], dtype=_statistics(x))


@op.backward(returns="dx dweight")
def backward(
    dy: Tensor,
    x: Tensor,
    weight: Optional[Tensor],
    rstd: Tensor,
    offset: float,
    casting: str,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Shape rule."""
    dweight = (
        x.new_empty(0) if weight is None or not needs_weight else weight.new_empty(weight.shape)
    )
    return x.new_empty(x.shape if needs_x else (0,)), dweight


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
) -> Tensor:
    """Root-mean-square normalization over the last axis.

    Math:
        ``n = x / sqrt(mean(x^2) + eps)``, ``y = (offset + weight) * n``. ``casting`` says where
        ``n`` is rounded: ``llama`` ``w * n.to(x)``, ``olmo`` ``(w * n).to(x)``, ``gemma``
        everything in fp32 (with ``offset=1.0``).

    Shapes:
        x ``(..., H)`` with any strides, weight ``(H,)`` or None; y ``(..., H)``, contiguous.

    Dtypes:
        In: any floating dtype. Inside: fp32 (fp64 for fp64). Out: that of x; with ``llama`` the
        promotion of x and weight, as the Hugging Face class returns.

    Memory:
        Kept for backward: x, weight and 4 bytes a row (``rstd``).

    Raises:
        TypeError: An argument is not a floating-point tensor.
        ValueError: The width of weight differs from that of x, mixed devices, unknown casting.

    Source:
        Zhang and Sennrich 2019 (arXiv:1910.07467); transformers ``LlamaRMSNorm``, ``Olmo2RMSNorm``,
        ``GemmaRMSNorm``.
    """
    checks.floating("rms_norm", x=x, weight=weight, optional=("weight",))
    shape = x.shape
    if not shape:
        raise ValueError(f"rms_norm: x must have at least one axis, got {checks.describe(x)}")
    checks.vector("rms_norm", "weight", weight, shape[-1], "last axis of x")
    checks.one_of("rms_norm", "casting", casting, CASTINGS)
    result: Tensor = op(x, weight, *numbers("rms_norm", eps, offset), casting)
    return result


def numbers(name: str, eps: float, offset: float) -> tuple[float, float]:
    """Both numbers of a norm, checked."""
    return (
        checks.number(name, "eps", eps, 0.0),
        checks.number(name, "offset", offset),
    )


SAMPLES = (
    Sample("llama", {"x": T((2, 5, 64)), "weight": T((64,))}),
    Sample(
        "llama-fp32-weight",
        {"x": T((7, 96)), "weight": T((96,), dtype=torch.float32)},
        {"eps": 1e-5},
    ),
    Sample("olmo", {"x": T((3, 3, 40)), "weight": T((40,))}, {"casting": "olmo"}),
    Sample(
        "gemma",
        {"x": T((6, 72)), "weight": T((72,), scale=0.2)},
        {"casting": "gemma", "offset": 1.0},
    ),
    Sample("llama-offset", {"x": T((6, 33)), "weight": T((33,))}, {"offset": 1.0}),
    Sample("weightless", {"x": T((4, 128))}),
    Sample("one-row", {"x": T((1, 257)), "weight": T((257,))}),
    Sample("one-axis", {"x": T((48,)), "weight": T((48,))}),
    Sample("one-column", {"x": T((9, 1)), "weight": T((1,))}, {"eps": 0.5}),
    Sample("no-rows", {"x": T((0, 64)), "weight": T((64,))}),
    Sample("sliced", {"x": T((6, 32), layout="sliced"), "weight": T((32,), layout="sliced")}),
    Sample("transposed", {"x": T((2, 16, 24), layout="transposed"), "weight": T((24,))}),
    Sample("row-gaps", {"x": T((3, 4, 64), layout="rows"), "weight": T((64,))}),
    Sample("expanded", {"x": T((5, 64), layout="expanded"), "weight": T((64,))}),
    Sample("frozen-weight", {"x": T((6, 64)), "weight": T((64,), grad=False)}),
    Sample("frozen-x", {"x": T((6, 64), grad=False), "weight": T((64,))}),
    Sample("many-tiny-rows", {"x": T((1100, 8)), "weight": T((8,))}),
    Sample("past-65535-rows", {"x": T((65537, 2)), "weight": T((2,))}, size="thin"),
    Sample("past-65536-columns", {"x": T((2, 65600)), "weight": T((65600,))}, size="thin"),
    Sample("8192x4096", {"x": T((8192, 4096)), "weight": T((4096,))}, size="bench"),
    Sample("16384x2048", {"x": T((16384, 2048)), "weight": T((2048,))}, size="bench"),
    Sample("4096x8192", {"x": T((4096, 8192)), "weight": T((8192,))}, size="bench"),
    Sample("32768x1536", {"x": T((32768, 1536)), "weight": T((1536,))}, size="bench"),
    Sample("262144x128", {"x": T((262144, 128)), "weight": T((128,))}, size="bench"),
)
