"""Contract of ``neighborhood_attention``."""

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._work import Options, Shapes, Work
from liger_multi.ops.attention import gradients_of_heads, work as attention_work
from liger_multi.testing.samples import Sample, Tensor as T

op = Op("neighborhood_attention", family="attention", bitwise=bitwise(PER_ROW, "q k v y lse"))


@op.forward(returns="y", residuals="lse")
def forward(
    q: Tensor, k: Tensor, v: Tensor, reach: int, dilation: int, scale: float
) -> tuple[Tensor, Tensor]:
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
    y = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    return y, q.new_empty(q.shape[:3], dtype=statistics)


op.backward(
    reads="dy q k v y lse reach dilation scale", returns="dq dk dv", shapes=gradients_of_heads
)


def neighborhood_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel_size: int = 7,
    dilation: int = 1,
    scale: float | None = None,
) -> Tensor:
    """Attention of every token to its neighbors on a line, in work of length x kernel size.

    Math:
        Token i sees the tokens ``i + d j`` for ``|j| <= kernel_size // 2`` with dilation d; those
        past the ends are left out. ``y = softmax(scale q k') v`` over them.

    Shapes:
        q ``(B, H, L, D)``, k ``(B, G, L, D)``, v ``(B, G, L, E)`` with any strides, H a multiple of
        G; y ``(B, H, L, E)``, in memory ``(B, L, H, E)``.

    Dtypes:
        In: one floating dtype. Inside: fp32 (fp64 for fp64). Out: that of q.

    Memory:
        Kept for backward: q, k, v, y and 4 bytes a query and head. A dilation above 1 orders
        copies of q, k and v anew, one after the other.

    Raises:
        TypeError: An argument is not a floating-point tensor, or dtypes differ.
        ValueError: Shapes that do not fit together, an even kernel size, a dilation below 1.

    Source:
        Hassani et al. 2022 (arXiv:2204.07143), Hassani and Shi 2022 (arXiv:2209.15001).
    """
    name = "neighborhood_attention"
    checks.floating(name, q=q, k=k, v=v)
    for argument, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or x.shape[0] != q.shape[0] or x.shape[2] != q.shape[2]:
            checks.refuse(
                name, f"{argument} must have shape (B, heads, L, D) beside q {tuple(q.shape)}", x
            )
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: q is {q.dtype}, got {argument} as {checks.describe(x)}")
    if k.shape[3] != q.shape[3] or v.shape[1] != k.shape[1] or q.shape[1] % max(1, k.shape[1]):
        checks.refuse(
            name,
            "heads of q must be a multiple of those of k and v, and q as wide as k",
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}",
        )
    size = checks.integer(name, "kernel_size", kernel_size)
    if size < 1 or size % 2 == 0:
        raise ValueError(f"{name}: kernel_size must be odd and at least 1, got {kernel_size}")
    steps = checks.integer(name, "dilation", dilation)
    if steps < 1:
        raise ValueError(f"{name}: dilation must be at least 1, got {dilation}")
    factor = q.shape[3] ** -0.5 if scale is None else checks.number(name, "scale", scale)
    result: Tensor = op(q, k, v, size // 2, steps, factor)
    return result


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel_size: int = 7,
    dilation: int = 1,
    scale: float | None = None,
) -> Tensor:
    """Attention to the ``kernel_size`` positions around each query, ``dilation`` apart."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    position = torch.arange(q.shape[2], device=q.device)
    steps = (torch.arange(kernel_size, device=q.device) - kernel_size // 2) * dilation
    neighbors = position[:, None] + steps
    in_row = (neighbors >= 0) & (neighbors < q.shape[2])
    neighbors = neighbors.clamp(0, max(0, q.shape[2] - 1))
    s = torch.einsum("bhld,bhlnd->bhln", q, k[:, :, neighbors])
    s = s * (q.shape[-1] ** -0.5 if scale is None else scale)
    p = torch.softmax(s.masked_fill(~in_row, -torch.inf), -1)
    return torch.einsum("bhln,bhlnd->bhld", p, v[:, :, neighbors])


def work(shapes: Shapes, size: int, options: Options) -> Work:
    reach = options.get("kernel_size", 7) // 2  # a dilation leaves out as many as it reaches
    return attention_work(shapes, size, {"window": (reach, reach)})


def _case(
    shape: tuple[int, int, int, int], groups: int = 0, value: int = 0, layout: str = "contiguous"
) -> dict[str, T]:
    batch, heads, length, size = shape
    return {
        "q": T(shape, layout=layout),
        "k": T((batch, groups or heads, length, size), layout=layout),
        "v": T((batch, groups or heads, length, value or size), layout=layout),
    }


SAMPLES = (
    Sample("seven", _case((2, 2, 19, 8))),
    Sample("tiny", _case((1, 2, 7, 3)), {"kernel_size": 3}),
    Sample("tiny-dilated", _case((1, 2, 7, 3)), {"kernel_size": 3, "dilation": 2}),
    Sample("tiny-scale", _case((1, 1, 6, 4)), {"kernel_size": 5, "scale": 0.3}),
    Sample("tiny-groups", _case((1, 4, 5, 3), 2), {"kernel_size": 3}),
    Sample("pairs", _case((1, 1, 2, 4)), {"kernel_size": 9}),
    Sample("wider-than-the-line", _case((1, 2, 5, 4)), {"kernel_size": 31}),
    Sample("dilated", _case((1, 4, 37, 8), 2), {"kernel_size": 5, "dilation": 3}),
    Sample("dilated-to-the-ends", _case((1, 2, 5, 8)), {"kernel_size": 5, "dilation": 3}),
    Sample("other-value-size", _case((1, 2, 11, 8), value=5), {"kernel_size": 5}),
    Sample("swapped", _case((2, 2, 16, 8), layout="swapped"), {"kernel_size": 5}),
    Sample("no-rows", _case((0, 2, 6, 4))),
    Sample("frozen-q", {**_case((1, 2, 9, 4)), "q": T((1, 2, 9, 4), grad=False)}),
    Sample("long", _case((1, 1, 70001, 2)), {"kernel_size": 3}, size="thin"),
    Sample(
        "2x8192x64", _case((2, 12, 8192, 64), layout="swapped"), {"kernel_size": 63}, size="bench"
    ),
    Sample(
        "1x65536x64-dilated",
        _case((1, 12, 65536, 64), layout="swapped"),
        {"kernel_size": 63, "dilation": 4},
        size="bench",
    ),
)
