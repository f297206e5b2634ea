"""Contract of ``multi_token_attention``."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import BY_OUR_GEMM, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._work import Options, Shapes, Work
from liger_multi.ops.sparsemax import formula as sparsemax_formula
from liger_multi.testing.samples import Sample, Tensor as T

op = Op("multi_token_attention", family="attention", bitwise=bitwise(BY_OUR_GEMM, "scores y p"))


def _length(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


@op.forward(returns="y", residuals="p")
def forward(
    scores: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    padding: int,
    dilation: int,
    groups: int,
    sparse: bool,
) -> tuple[Tensor, Tensor]:
    sizes = [_length(scores.shape[i], weight.shape[i], stride, padding, dilation) for i in (2, 3)]
    y = scores.new_empty(scores.shape[0], weight.shape[0], *sizes)
    return y, scores.new_empty(scores.shape)


op.backward(
    reads="dy weight bias p stride padding dilation groups sparse",
    returns="dscores dweight dbias",
    shapes={"scores": "p"},
)


def multi_token_attention(
    scores: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
    sparse: bool = False,
) -> Tensor:
    """Causal probabilities of given scores, convolved over queries, keys and heads.

    Math:
        ``p = softmax(scores)`` over the keys up to the query (``sparse``: sparsemax), 0 past it;
        ``y = conv2d(p, weight, bias)``, 0 above its diagonal.

    Shapes:
        scores ``(B, C, L, S)`` with any strides, weight ``(C_out, C / groups, K, M)``, bias
        ``(C_out,)``; y ``(B, C_out, L', S')``, the sizes of ``conv2d``, contiguous.

    Dtypes:
        In: one floating dtype. Inside: fp32 for probabilities (fp64 for fp64), rounded to the
        dtype of scores for the convolution, which is PyTorch's: on NVIDIA it takes TF32 for fp32
        unless ``torch.backends.cudnn.allow_tf32`` is False. Out: that of scores.

    Memory:
        Kept for backward: the probabilities, of the scores' size. No mask of that size, and rows
        go by blocks, so any length that the scores themselves leave room for.

    Raises:
        TypeError: An argument is not a floating-point tensor, or dtypes differ.
        ValueError: Shapes that do not fit together, mixed devices, sizes below 1.

    Source:
        Golovneva et al. 2025 (arXiv:2504.00927).
    """
    name = "multi_token_attention"
    checks.floating(name, scores=scores, weight=weight, bias=bias, optional=("bias",))
    if scores.ndim != 4 or weight.ndim != 4:
        checks.refuse(
            name,
            "scores and weight must have four axes",
            f"{checks.describe(scores)} and {checks.describe(weight)}",
        )
    for argument, x in (("weight", weight), ("bias", bias)):
        if x is not None and x.dtype != scores.dtype:
            raise TypeError(
                f"{name}: scores are {scores.dtype}, got {argument} {checks.describe(x)}"
            )
    pairs = {"stride": (stride, 1), "padding": (padding, 0), "dilation": (dilation, 1)}
    sizes = []
    for argument, (value, smallest) in {**pairs, "groups": (groups, 1)}.items():
        sizes.append(checks.integer(name, argument, value))
        if sizes[-1] < smallest:
            raise ValueError(f"{name}: {argument} must be at least {smallest}, got {value}")
    stride, padding, dilation, groups = sizes
    if (
        min(weight.shape[2:]) < 1
        or weight.shape[1] * groups != scores.shape[1]
        or weight.shape[0] % groups
    ):
        checks.refuse(
            name,
            f"weight must have shape (C_out, {scores.shape[1]} / groups, K, M), "
            f"C_out a multiple of groups {groups}, K and M at least 1",
            f"{tuple(weight.shape)}",
        )
    checks.vector(name, "bias", bias, weight.shape[0], "first axis of weight")
    is_sparse = checks.boolean(name, "sparse", sparse)
    for axis in (2, 3):
        if _length(scores.shape[axis], weight.shape[axis], 1, padding, dilation) < 1:
            raise ValueError(
                f"{name}: the padded scores {tuple(scores.shape)} are smaller than the kernel "
                f"{tuple(weight.shape)}"
            )
    result: Tensor = op(scores, weight, bias, stride, padding, dilation, groups, is_sparse)
    return result


def formula(
    scores: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
    sparse: bool = False,
) -> Tensor:
    """A convolution over causal probabilities, of which the causal part stays."""
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    if sparse:
        p = sparsemax_formula(scores.masked_fill(hidden, -1e30)).masked_fill(hidden, 0)
    else:
        p = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
    return F.conv2d(p, weight, bias, stride, padding, dilation, groups).tril()


def work(shapes: Shapes, size: int, options: Options) -> Work:
    *_, heads, rows, cols = shapes["scores"]
    scores = math.prod(shapes["scores"])
    flops = scores * sum(min(row + 1, cols) for row in range(rows)) / (rows * cols)
    wide = shapes["weight"][0] / heads  # what y has to scores, where the convolution keeps sizes
    product = 2.0 * flops * wide * math.prod(shapes["weight"][1:])
    # seen scores read, probabilities and y written with their zeros; what is seen of dy and the
    # probabilities read, dscores written; no product past the diagonal
    forward = (flops + scores * (1 + wide)) * size
    total_bytes = forward + (flops * (1 + wide) + scores) * size
    return Work(forward, total_bytes, product, 3 * product)


def _case(
    scores: tuple[int, int, int, int],
    out: int,
    size: int,
    groups: int = 1,
    layout: str = "contiguous",
) -> dict[str, T]:
    inner = scores[1] // groups
    scale = (inner * size * size) ** -0.5
    return {
        "scores": T(scores, layout=layout),
        "weight": T((out, inner, size, size), scale=scale),
    }


SAMPLES = (
    Sample("same-size", _case((2, 2, 9, 9), 3, 3), {"padding": 1}),
    Sample("tiny", _case((1, 2, 5, 5), 2, 3), {"padding": 1}),
    Sample("tiny-sparse", _case((1, 2, 4, 4), 2, 3), {"padding": 1, "sparse": True}, path="sparse"),
    Sample("bias", {**_case((1, 2, 6, 6), 3, 1), "bias": T((3,))}),
    Sample("no-padding", _case((1, 1, 7, 7), 2, 3)),
    Sample("dilated", _case((1, 2, 8, 8), 2, 3), {"padding": 2, "dilation": 2}),
    Sample("grouped", _case((1, 4, 6, 6), 4, 3, 2), {"padding": 1, "groups": 2}),
    Sample("strided", _case((1, 2, 9, 9), 2, 3), {"padding": 1, "stride": 2}),
    Sample("sparse", _case((2, 2, 12, 12), 2, 3), {"padding": 1, "sparse": True}),
    Sample("no-rows", _case((0, 2, 5, 5), 2, 3), {"padding": 1}),
    Sample("one-token", {**_case((2, 1, 1, 1), 1, 1), "bias": T((1,))}),
    Sample("transposed", _case((1, 2, 6, 6), 2, 3, layout="transposed"), {"padding": 1}),
    Sample(
        "frozen-weight",
        {**_case((1, 2, 5, 5), 2, 3), "weight": T((2, 2, 3, 3), grad=False, scale=0.3)},
        {"padding": 1},
    ),
    Sample("sixteen-heads", _case((1, 16, 9, 9), 16, 3), {"padding": 1}, path="turned"),
    Sample("past-32768-columns", _case((1, 1, 2, 40000), 1, 1), size="thin", path="wide rows"),
    Sample(
        "past-1024-tokens",
        {**_case((1, 1, 1100, 1100), 1, 3), "weight": T((1, 1, 3, 3), grad=False)},
        {"padding": 1},
        size="thin",
    ),
    Sample("1x16x2048", _case((1, 16, 2048, 2048), 16, 3), {"padding": 1}, size="bench"),
    Sample("1x8x4096", _case((1, 8, 4096, 4096), 8, 3), {"padding": 1}, size="bench"),
)
COMPILE_SAMPLES = (
    Sample("1x2x16384", _case((1, 2, 16384, 16384), 2, 3), {"padding": 1}),
    Sample("1x1x65536", _case((1, 1, 65536, 65536), 1, 3), {"padding": 1}),
    Sample("1x16x2048 sparse", _case((1, 16, 2048, 2048), 16, 3), {"padding": 1, "sparse": True}),
)
