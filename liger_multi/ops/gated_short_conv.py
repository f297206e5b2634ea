"""Contract of ``gated_short_conv``."""

import math

from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import BY_PIECES, PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._formulas import convolved, sequence_runs
from liger_multi.ops._samples import each_frozen
from liger_multi.ops._work import Options, Shapes, Work
from liger_multi.ops.causal_conv1d import check_filter, segments_of
from liger_multi.testing.samples import Sample, Tensor as T

op = Op(
    "gated_short_conv",
    family="linear_attention",
    bitwise=bitwise(PER_ROW, "x segments y", backward=BY_PIECES),
)


@op.forward(returns="y")
def forward(x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:2], x.shape[2] // 3))


op.backward(reads="dy x weight bias segments", returns="dx dweight dbias")


def gated_short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """Short convolution of LFM2, gated before and after, from one packed projection.

    Math:
        ``b, c, v = x[..., :C], x[..., C : 2 * C], x[..., 2 * C :]``; ``y = c * (causal convolution
        of b * v)``. The convolution, ``seq_idx`` and ``cu_seqlens`` are those of
        ``causal_conv1d``.

    Shapes:
        x ``(B, T, 3 C)`` with any strides; channels that are not adjacent in memory are copied
        first. weight ``(C, W)``, bias ``(C,)``, seq_idx ``(B, T)``, cu_seqlens ``(N + 1,)`` for B =
        1; y ``(B, T, C)``, contiguous.

    Dtypes:
        In: any floating dtypes, ids int32 or int64. Inside: fp32 (fp64 for fp64), ``b * v`` too.
        Out: that of x.

    Memory:
        Kept for backward: x, the ids of packed sequences, weight and bias. Neither ``b * v`` nor
        the convolution is written to memory, and the three gradients are written as one.

    Raises:
        TypeError: An argument has not the dtype that it must have.
        ValueError: Shapes that do not fit together, a last axis that is no multiple of 3,
            cu_seqlens of several rows or with seq_idx, mixed devices.

    Source:
        LFM2 Technical Report (arXiv:2511.23404); transformers ``Lfm2ShortConv`` between its
        projections.
    """
    name = "gated_short_conv"
    checks.floating(name, x=x, weight=weight, bias=bias, optional=("bias",))
    if x.ndim != 3 or x.shape[2] % 3:
        checks.refuse(name, "x must have shape (B, T, 3 C): two gates and values", x)
    check_filter(name, weight, bias, x.shape[2] // 3)
    result: Tensor = op(x, weight, bias, segments_of(name, x, cu_seqlens, seq_idx))
    return result


def formula(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """What transformers' ``Lfm2ShortConv`` computes between its projections."""
    b, c, v = x.mT.chunk(3, dim=-2)
    runs = sequence_runs(seq_idx, cu_seqlens, x.shape[1])
    return (c * convolved(b * v, weight, bias, None, runs)).mT.contiguous()


def work(shapes: Shapes, size: int, options: Options) -> Work:
    tensor_bytes = math.prod(shapes["x"]) * size / 3
    # two gates and values read, y written; dy and these read, three gradients written
    return Work(4 * tensor_bytes, 11 * tensor_bytes)


def _case(
    batch: int,
    length: int,
    channels: int,
    width: int = 3,
    *,
    bias: bool = False,
    ids: int = 0,
    layout: str = "contiguous",
) -> dict[str, T]:
    tensors = {
        "x": T((batch, length, 3 * channels), layout=layout),
        "weight": T((channels, width), scale=width**-0.5),
    }
    if bias:
        tensors["bias"] = T((channels,))
    if ids:
        tensors["seq_idx"] = T((batch, length), classes=ids, grad=False)
    return tensors


EVERYTHING = _case(2, 37, 8, bias=True, ids=2)
SAMPLES = (
    Sample("lfm2", _case(2, 19, 8)),
    Sample("everything", EVERYTHING),
    Sample("tiny", _case(1, 7, 3, 2, bias=True)),
    Sample("shorter-than-the-filter", _case(2, 2, 5, 7)),
    Sample("one-token", _case(3, 1, 8, ids=2)),
    Sample("width-1", _case(1, 5, 4, 1)),
    Sample("lfm3", _case(2, 21, 6, 7, ids=2)),
    Sample("odd-channels", _case(1, 33, 37, ids=4)),
    Sample("no-tokens", _case(2, 0, 8)),
    Sample("no-rows", _case(0, 5, 8)),
    Sample("sliced", _case(2, 19, 8, layout="sliced")),
    Sample("row-gaps", _case(2, 19, 8, layout="rows")),
    *each_frozen(EVERYTHING, "x weight bias"),
    Sample("several-programs", _case(2, 90, 520, ids=20)),
    Sample("past-65535-rows", _case(1, 65537, 2), size="thin"),
    Sample("2x8192x2048", _case(2, 8192, 2048), size="bench"),
    Sample("2x8192x2048 packed", _case(2, 8192, 2048, ids=2), size="bench"),
)
COMPILE_SAMPLES = (Sample("2x8192x2048 width 7", _case(2, 8192, 2048, 7, ids=2)),)
