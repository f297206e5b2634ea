"""Contract of ``hyper_connections_post``."""

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._work import streamwise
from liger_multi.ops.hyper_connections_pre import coefficient, streams
from liger_multi.testing.samples import Sample, Tensor as T

op = Op(
    "hyper_connections_post",
    family="residuals",
    rowwise=True,
    bitwise=bitwise(PER_ROW, "x out post mix y", 2),
)


@op.forward(returns="y")
def forward(x: Tensor, out: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    return x.new_empty(x.shape)


op.backward(reads="dy x out post mix", returns="dx dout dpost dmix")


def hyper_connections_post(x: Tensor, out: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """The residual streams after a block: mixed, and the block's output added to each.

    Math:
        ``y[i] = post[i] out + sum over j of mix[i, j] x[j]``.

    Shapes:
        x ``(..., N, C)``, out ``(..., C)``, post ``(..., N)``, mix ``(..., N, N)``, any strides,
        any N; y ``(..., N, C)``, contiguous.

    Dtypes:
        In: any floating dtypes. Inside: fp32 (fp64 for fp64), rounded once. Out: that of x.

    Memory:
        Kept for backward: the arguments.

    Raises:
        TypeError: An argument is not a floating-point tensor.
        ValueError: Shapes or devices do not fit together.

    Source:
        Xie et al. 2025 (arXiv:2512.24880); the decoder layer of transformers' DeepSeek-V4, which
        takes the transpose of mix.
    """
    checks.floating(op.name, x=x, out=out, post=post, mix=mix)
    streams(op.name, x)
    row_shape = tuple(x.shape[:-2])
    count = x.shape[-2]
    coefficient(op.name, "out", out, (*row_shape, x.shape[-1]))
    coefficient(op.name, "post", post, (*row_shape, count))
    coefficient(op.name, "mix", mix, (*row_shape, count, count))
    result: Tensor = op(x, out, post, mix)
    return result


def formula(x: Tensor, out: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """The streams after a layer: its output to each of them, and the mixed streams."""
    return post.to(x.dtype).unsqueeze(-1) * out.unsqueeze(-2) + mix.to(x.dtype) @ x


# streams and one read, streams written; dy, both read, both gradients written
work = streamwise(2, 5, (1, 3))


def _case(
    *shape: int, dtype: torch.dtype | None = None, layout: str = "contiguous", frozen: str = ""
) -> dict[str, T]:
    *row_shape, count, cols = shape
    shapes = {
        "x": shape,
        "out": (*row_shape, cols),
        "post": (*row_shape, count),
        "mix": (*row_shape, count, count),
    }
    return {
        n: T(
            tuple(s),
            dtype if n in ("post", "mix") else None,
            grad=n not in frozen.split(),
            layout=layout if n in ("x", "mix") else "contiguous",
        )
        for n, s in shapes.items()
    }


SAMPLES = (
    Sample("rows", _case(4, 4, 8)),
    Sample("two-axes", _case(2, 2, 3, 8)),
    Sample("one-stream", _case(3, 1, 8)),
    Sample("three-streams", _case(3, 3, 13)),
    Sample("fp32-coefficients", _case(3, 4, 8, dtype=torch.float32)),
    Sample("no-rows", _case(0, 4, 8)),
    Sample("no-axes", _case(4, 8)),
    Sample("sliced", _case(3, 4, 8, layout="sliced")),
    Sample("transposed", _case(3, 4, 8, layout="transposed")),
    Sample("frozen-x", _case(3, 4, 8, frozen="x")),
    Sample("frozen-coefficients", _case(3, 4, 8, frozen="post mix")),
    Sample("only-mix", _case(3, 4, 8, frozen="x out post")),
    Sample("wide", _case(2, 3, 3001), size="thin"),
    Sample("past-65535-rows", _case(65537, 2, 4), size="thin"),
    Sample("8192x4x4096", _case(8192, 4, 4096, dtype=torch.float32), size="bench"),
)
COMPILE_SAMPLES = (Sample("2048x8x7168", _case(2048, 8, 7168, dtype=torch.float32)),)
