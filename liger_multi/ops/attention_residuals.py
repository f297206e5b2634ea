"""Contract of ``attention_residuals``."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._formulas import statistics_dtype
from liger_multi.ops._work import Options, Shapes, Work
from liger_multi.testing.samples import Sample, Tensor as T

op = Op(
    "attention_residuals", family="residuals", bitwise=bitwise(PER_ROW, "blocks:1 y p:1 rstd:1", 1)
)


@op.forward(returns="y", residuals="p rstd")
def forward(
    blocks: Tensor, query: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.float64 if blocks.dtype == torch.float64 else torch.float32
    numbers = [blocks.new_empty(blocks.shape[:-1], dtype=wide) for _ in range(2)]
    return blocks.new_empty(blocks.shape[1:]), numbers[0], numbers[1]


op.backward(
    reads="dy blocks query weight p rstd",
    returns="dblocks dquery dweight",
    shapes={"weight": lambda weight, query: query.new_empty(0) if weight is None else weight},
)


def attention_residuals(
    blocks: Tensor | Sequence[Tensor],
    query: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Mix the outputs of earlier blocks, each token by attention over depth.

    Math:
        With ``n_i = v_i / sqrt(mean(v_i^2) + eps)`` of block i, ``s_i = sum(query * weight *
        n_i)`` and ``p = softmax(s)`` over the blocks: ``y = sum_i p_i v_i``.

    Shapes:
        blocks ``(N, ..., D)`` with any strides and any N of at least 1, or N tensors ``(..., D)``;
        query and weight ``(D,)``; y ``(..., D)``, contiguous.

    Dtypes:
        In: any floating dtype. Inside: fp32 (fp64 for fp64). Out: that of blocks.

    Memory:
        Kept for backward: blocks, and 8 bytes a block and token. A list is stacked first.

    Raises:
        TypeError: An argument is not a floating-point tensor.
        ValueError: Shapes that do not fit together, no block, mixed devices.

    Source:
        Kimi Team 2026, Attention Residuals (arXiv:2603.15031).
    """
    name = "attention_residuals"
    if not isinstance(blocks, Tensor):
        blocks = _stacked(name, blocks)
    checks.floating(name, blocks=blocks, query=query, weight=weight, optional=("weight",))
    if blocks.ndim < 2 or blocks.shape[0] < 1:
        checks.refuse(name, "blocks must have shape (N, ..., D), N at least 1", blocks)
    checks.vector(name, "query", query, blocks.shape[-1], "last axis of blocks")
    checks.vector(name, "weight", weight, blocks.shape[-1], "last axis of blocks")
    result: Tensor = op(blocks, query, weight, checks.number(name, "eps", eps, 0.0))
    return result


def formula(
    blocks: Tensor | Sequence[Tensor],
    query: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """A mixture of the outputs of all blocks, by a query to their norms."""
    stacked = blocks if isinstance(blocks, Tensor) else torch.stack([*blocks])
    normed = F.rms_norm(stacked, stacked.shape[-1:], weight, eps)
    scores = (normed * query).sum(-1, dtype=statistics_dtype(stacked))
    p = torch.softmax(scores, 0).to(stacked.dtype)
    return torch.einsum("n...,n...d->...d", p, stacked)


def work(shapes: Shapes, size: int, options: Options) -> Work:
    count, block_bytes = shapes["blocks"][0], math.prod(shapes["blocks"]) * size
    # blocks read, y written; dy and blocks read, their gradients written
    return Work(block_bytes * (1 + 1 / count), block_bytes * (3 + 2 / count))


def _stacked(name: str, blocks: object) -> Tensor:
    if not isinstance(blocks, Sequence) or isinstance(blocks, str):
        raise TypeError(
            f"{name}: blocks must be a tensor or a sequence of tensors, got "
            f"{checks.describe(blocks)}"
        )
    if not blocks:
        raise ValueError(f"{name}: blocks: at least one block is needed, got none")
    checks.floating(name, **{f"blocks[{i}]": block for i, block in enumerate(blocks)})
    checks.same_shape(name, **{f"blocks[{i}]": block for i, block in enumerate(blocks)})
    return torch.stack(tuple(blocks))


def _case(shape: tuple[int, ...], layout: str = "contiguous") -> dict[str, T]:
    size = (shape[-1],)
    return {
        "blocks": T(shape, layout=layout),
        "query": T(size, scale=size[0] ** -0.5),  # scores of about 1, at any width
        "weight": T(size, scale=1.0),
    }


SAMPLES = (
    Sample("blocks", _case((4, 2, 5, 16))),
    Sample("tiny", _case((3, 2, 4))),
    Sample("two-blocks", _case((2, 3, 5))),
    Sample("without-weight", {n: t for n, t in _case((5, 3, 6)).items() if n != "weight"}),
    Sample("odd-width", _case((3, 4, 7)), {"eps": 1e-3}),
    Sample("no-tokens-axis", _case((6, 9))),
    Sample("forty-blocks", _case((40, 3, 8))),
    Sample("no-rows", _case((3, 0, 8))),
    Sample("sliced", _case((3, 4, 8), layout="sliced")),
    Sample("swapped", _case((3, 4, 2, 8), layout="swapped")),
    Sample("frozen-blocks", {**_case((3, 4, 8)), "blocks": T((3, 4, 8), grad=False)}),
    Sample("frozen-query", {**_case((3, 4, 8)), "query": T((8,), grad=False, scale=0.3)}),
    Sample("more-tokens-than-programs", _case((3, 131, 600))),
    Sample("several-steps", _case((5, 2, 8200)), path="wide"),
    Sample("past-65535-rows", _case((2, 65537, 2)), size="thin"),
    Sample("8x8192x4096", _case((8, 1, 8192, 4096)), size="bench"),
    Sample("32x4096x2048", _case((32, 1, 4096, 2048)), size="bench"),
)
COMPILE_SAMPLES = (Sample("16x2048x16384", _case((16, 1, 2048, 16384))),)
