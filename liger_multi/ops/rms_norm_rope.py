"""Contract of ``rms_norm_rope``."""

import math
from typing import Any

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._formulas import rms_normalized, weighted, wide
from liger_multi.ops._rotary import check_angles, head_axis, order
from liger_multi.ops._samples import each_frozen
from liger_multi.ops._work import Options, Shapes, Work
from liger_multi.ops.rms_norm import CASTINGS, numbers
from liger_multi.ops.rope import formula as rope_formula
from liger_multi.testing.samples import Sample, Tensor as T

ROPE_CASTINGS = ("llama", "cohere")
op = Op("rms_norm_rope", family="rope", bitwise=bitwise(PER_ROW, "x y rstd cos sin"))


def gradients(**kwargs: Any) -> tuple[Tensor, ...]:
    """Shape rule of backward; empty where a gradient is not needed."""
    from liger_multi.reference.rope.rope import dense

    x, weight = kwargs["x"], kwargs["weight"]
    return (
        dense(x, kwargs["x_order"], x.dtype) if kwargs["needs_x"] else x.new_empty(0),
        weight.new_empty(weight.shape) if kwargs["needs_weight"] else weight.new_empty(0),
    )


@op.forward(returns="y", residuals="rstd")
def forward(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    offset: float,
    casting: str,
    rope_casting: str,
    head_axis: int,
    x_order: str,
) -> tuple[Tensor, Tensor]:
    """Shape rule; the order names the axes from the outermost in memory to the innermost."""
    from liger_multi.reference.rope.rms_norm_rope import output_dtype, statistics_shape
    from liger_multi.reference.rope.rope import dense

    dtype = output_dtype(x, weight, cos, sin, casting, rope_casting)
    acc_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = statistics_shape(x, weight, head_axis)
    return dense(x, x_order, dtype), x.new_empty(rows, dtype=acc_dtype)


op.backward(
    reads="dy x weight cos sin rstd offset casting rope_casting head_axis x_order",
    returns="dx dweight",
    shapes=gradients,
    values_for={"weight": "x"},
)


def rms_norm_rope(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    *,
    unsqueeze_dim: int = 1,
    offset: float = 0.0,
    casting: str = "llama",
    rope_casting: str = "llama",
) -> Tensor:
    """Root-mean-square norm of queries or keys, and their rotary position embedding.

    Math:
        ``n = x / sqrt(mean(x^2) + eps)``, ``u = (offset + weight) * n``, and
        ``y = u * cos + rotate_half(u) * sin``, which maps the pair of channels ``(i, i + D / 2)``
        from ``(a, b)`` to ``(-b, a)``. The mean is that of a head where weight has D elements, and
        that of all heads of a token where it has H * D. With ``g = dy * cos - rotate_half(dy *
        sin)`` and ``v = g * (offset + weight)``, backward is ``dx = (v - n * mean(v * n)) / sqrt(
        mean(x^2) + eps)``, ``dweight`` the sum of ``g * n``.

    Shapes:
        x ``(B, H, S, D)`` for ``unsqueeze_dim=1``, ``(B, S, H, D)`` for 2, or ``(S, H, D)`` with 1;
        any strides. weight
        ``(D,)`` or ``(H * D,)``. cos and sin ``(S, D)``, ``(1, S, D)`` or ``(B, S, D)``. y has the
        shape of x; it is dense and keeps the order of axes that x has in memory, as dx does.

    Dtypes:
        In: any floating dtypes. Inside: fp32 (fp64 for fp64). ``casting`` says where the norm
        rounds, as in ``rms_norm``, and ``rope_casting`` what the rotation returns, as in ``rope``.
        The reference rounds where both do; kernels round u to the dtype of the norm, and y.

    Memory: Kept for backward: x, weight, cos, sin and 4 bytes a head, or a token (``rstd``). The
        output of the norm and its gradient are never written to memory.

    Raises:
        TypeError: An argument is not a floating-point tensor, or unsqueeze_dim no integer.
        ValueError: Shapes or devices that do not fit, an odd D, an unknown casting, or cos or sin
            that require a gradient (none is computed for them).

    Source:
        Zhang and Sennrich 2019 (arXiv:1910.07467), Su et al. 2021 (arXiv:2104.09864), Dehghani et
        al. 2023 (arXiv:2302.05442); transformers ``Qwen3Attention``, ``Gemma3Attention`` (a head),
        ``Olmo2Attention`` (a token).
    """
    name = "rms_norm_rope"
    checks.floating(name, x=x, weight=weight, cos=cos, sin=sin)
    if x.ndim not in (3, 4):
        checks.refuse(name, "x must have shape (B, H, S, D), (B, S, H, D) or (S, H, D)", x)
    checks.one_of(name, "casting", casting, CASTINGS)
    checks.one_of(name, "rope_casting", rope_casting, ROPE_CASTINGS)
    heads = head_axis(name, x, unsqueeze_dim)
    check_angles(name, x, cos, sin, heads)
    width = x.shape[-1]
    if cos.shape[-1] != width or width % 2:
        checks.refuse(name, f"cos and sin must be as wide as x, and that even ({width})", cos)
    checks.constant(name, "cos", cos)
    checks.constant(name, "sin", sin)
    if weight.ndim != 1 or weight.shape[0] not in (width, x.shape[heads] * width):
        expected = f"({width},), or ({x.shape[heads] * width},) for a norm of all heads"
        checks.refuse(name, f"weight must have shape {expected}", weight)
    if x.ndim == 3:
        options: Any = {"offset": offset, "casting": casting, "rope_casting": rope_casting}
        return rms_norm_rope(x[None], weight, cos, sin, eps, unsqueeze_dim=2, **options)[0]
    attributes = (*numbers(name, eps, offset), casting, rope_casting, heads, order(x))
    dtypes = {t.dtype for t in (x, weight, cos, sin)}
    if torch.float64 in dtypes and len(dtypes) > 1:
        # half of a call in fp64 would be computed in fp32, by the dtype that backends are chosen by
        from liger_multi.reference.rope.rms_norm_rope import output_dtype

        dtype = output_dtype(x, weight, cos, sin, casting, rope_casting)
        wide: Tensor = op(*[t.double() for t in (x, weight, cos, sin)], *attributes)
        return wide.to(dtype)
    result: Tensor = op(x, weight, cos, sin, *attributes)
    return result


def formula(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    *,
    unsqueeze_dim: int = 1,
    offset: float = 0.0,
    casting: str = "llama",
    rope_casting: str = "llama",
) -> Tensor:
    """The rotation of the norm of every head, or of every token where weight is as wide."""
    rows, last = x, x.ndim - 2
    if weight.shape[0] != x.shape[-1]:
        rows = x.movedim(unsqueeze_dim, last).flatten(last)
    u = weighted(rms_normalized(wide(rows), eps).to(x.dtype), weight, offset)
    if weight.shape[0] != x.shape[-1]:
        u = u.unflatten(last, (x.shape[unsqueeze_dim], -1)).movedim(last, unsqueeze_dim)
    return rope_formula(u, u, cos, sin, unsqueeze_dim=unsqueeze_dim)[0]


# q, k, cos and sin read, q and k written, twice
def work(shapes: Shapes, size: int, options: Options) -> Work:
    tensor_bytes, angles = (math.prod(shapes[name]) * size for name in ("x", "cos"))
    # x and angles read, y written; dy, x and angles read, dx written
    return Work(2 * tensor_bytes + 2 * angles, 5 * tensor_bytes + 4 * angles)


def _case(
    batch: int,
    heads: int,
    tokens: int,
    width: int,
    *,
    angles: tuple[int, ...] = (1,),
    axis: int = 1,
    joined_weight: bool = False,
    layout: str = "contiguous",
    angle_dtype: Any = None,
    **weight: Any,
) -> dict[str, T]:
    shape: tuple[int, ...] = (batch, heads, tokens, width)
    if axis == 2:
        shape = (batch, tokens, heads, width)
    if not batch:
        shape = (tokens, heads, width)
    angle = T((*angles, tokens, width), dtype=angle_dtype, grad=False)
    return {
        "x": T(shape, layout=layout),
        "weight": T((heads * width if joined_weight else width,), **weight),
        "cos": angle,
        "sin": angle,
    }


GEMMA, INSIDE = {"casting": "gemma", "offset": 1.0}, {"unsqueeze_dim": 2}
SAMPLES = (
    Sample("heads", _case(2, 4, 3, 8)),
    Sample("tokens", _case(2, 4, 3, 8, joined_weight=True)),
    Sample("heads-inside", _case(2, 4, 3, 16, axis=2), INSIDE),
    Sample(
        "tokens-inside",
        _case(2, 3, 5, 16, axis=2, joined_weight=True),
        INSIDE | {"casting": "olmo"},
    ),
    Sample("swapped", _case(2, 4, 5, 16, layout="swapped")),
    Sample("swapped-tokens", _case(2, 4, 5, 16, layout="swapped", joined_weight=True)),
    Sample("gemma", _case(2, 3, 5, 24, scale=0.2), GEMMA),
    Sample("olmo", _case(2, 3, 5, 40), {"casting": "olmo"}),
    Sample("llama-offset", _case(1, 2, 5, 12), {"offset": 1.0}),
    Sample("llama-fp32-weight", _case(2, 2, 7, 32, dtype=torch.float32), {"eps": 1e-5}),
    Sample("fp32-angles", _case(2, 2, 3, 8, angle_dtype=torch.float32)),
    Sample(
        "fp32-angles-cohere",
        _case(2, 2, 3, 8, angle_dtype=torch.float32),
        {"rope_casting": "cohere"},
    ),
    Sample("angles-of-a-batch", _case(3, 2, 4, 8, angles=(3,))),
    Sample("angles-of-two-axes", _case(2, 3, 4, 8, angles=())),
    Sample("odd-heads", _case(1, 7, 6, 40)),
    Sample("odd-heads-tokens", _case(1, 7, 6, 40, joined_weight=True)),
    Sample("one-head", _case(2, 1, 9, 16)),
    Sample("one-token", _case(3, 4, 1, 64)),
    Sample("two-channels", _case(2, 2, 3, 2), {"eps": 0.5}),
    Sample("no-tokens", _case(2, 2, 0, 8)),
    Sample("no-heads", _case(2, 0, 3, 8)),
    Sample("many-tokens", _case(2, 2, 131, 16, axis=2), INSIDE),
    Sample("sliced", _case(2, 2, 3, 8, layout="sliced")),
    Sample("transposed", _case(2, 2, 4, 8, layout="transposed")),
    Sample("row-gaps", _case(2, 2, 3, 16, layout="rows")),
    Sample("expanded", _case(3, 2, 3, 8, layout="expanded")),
    Sample("without-a-batch", _case(0, 3, 5, 16, angles=())),
    Sample("without-a-batch-tokens", _case(0, 3, 5, 16, angles=(), joined_weight=True), GEMMA),
    *each_frozen(_case(2, 2, 3, 8), "x weight"),
    Sample("tokens-frozen-weight", _case(2, 2, 3, 8, joined_weight=True, grad=False), GEMMA),
    Sample("past-65535-rows", _case(1, 2, 65537, 4), size="thin"),
    Sample("8x2048 32x128", _case(8, 32, 2048, 128, layout="swapped"), size="bench"),
    Sample("8x2048 8x128", _case(8, 8, 2048, 128, layout="swapped"), size="bench"),
    Sample(
        "4x2048 32x128 tokens",
        _case(4, 32, 2048, 128, layout="swapped", joined_weight=True),
        size="bench",
    ),
)
COMPILE_SAMPLES = (
    Sample(
        "4x2048 8x256 gemma",
        _case(4, 8, 2048, 256, layout="swapped"),
        {"casting": "gemma", "offset": 1.0},
    ),
    Sample(
        "4x2048 64x128 olmo",
        _case(4, 64, 2048, 128, layout="swapped", joined_weight=True),
        {"casting": "olmo"},
    ),
)
