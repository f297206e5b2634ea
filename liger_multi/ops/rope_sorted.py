"""Contract of ``rope_sorted``."""

from typing import Any

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops import _rotary
from liger_multi.ops._formulas import Pair
from liger_multi.ops._rotary import rope_work
from liger_multi.testing.samples import Sample, Tensor as T

op = Op(
    "rope_sorted",
    family="rope",
    bitwise=bitwise(PER_ROW, "q k q_out k_out cos sin", reference="exact"),
)


@op.forward(returns="q_out k_out")
def forward(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    head_axis: int,
    rotary_dim: int,
    casting: str,
    q_order: str,
    k_order: str,
) -> tuple[Tensor, Tensor]:
    from liger_multi.reference.rope.rope import dense, output_dtype

    return (
        dense(q, q_order, output_dtype(q, cos, sin, casting)),
        dense(k, k_order, output_dtype(k, cos, sin, casting)),
    )


op.backward(
    reads="dq_out dk_out cos sin head_axis rotary_dim casting q_order k_order q_dtype k_dtype",
    returns="dq dk",
    shapes=_rotary.gradients,
)


def rope_sorted(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
    casting: str = "llama",
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of interleaved pairs with half-split output, in one pass.

    Math:
        Pair i of the input is ``(a, b) = (x[2 i], x[2 i + 1])``; then ``out[i] = a * cos[i] - b *
        sin[i]`` and ``out[i + R / 2] = b * cos[i + R / 2] + a * sin[i + R / 2]``. Channels from R
        on pass through. Backward is the transposed matrix.

    Shapes:
        As ``rope``. cos and sin with one value a channel of the output, or one a pair where
        ``rotary_dim`` is twice their width.

    Dtypes:
        As ``rope``: in any floating dtypes; inside fp32 (fp64 for fp64); out by ``casting``.

    Memory:
        Kept for backward: cos and sin. Inputs are not written, nothing is copied to be sorted
        (kernels).

    Raises:
        TypeError: An argument is not a floating-point tensor, or no integer.
        ValueError: Shapes or devices that do not fit, an unknown casting, cos or sin that require
            a gradient.

    Source:
        DeepSeek-AI 2024 (arXiv:2412.19437); transformers ``apply_rotary_pos_emb_interleave`` of
        deepseek_v3.
    """
    name = "rope_sorted"
    checks.floating(name, q=q, k=k, cos=cos, sin=sin)
    heads = _rotary.checked(name, q, k, unsqueeze_dim, cos=cos, sin=sin)
    checks.one_of(name, "casting", casting, _rotary.CASTINGS)
    _rotary.check_angles(name, q, cos, sin, heads)
    rotary = _rotary.rotary_width(name, q, cos, rotary_dim)
    return _rotary.run(op, q, k, (cos, sin), (heads, rotary, casting), casting)


def formula(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
    casting: str = "llama",
) -> Pair:
    """RoPE with interleaved input and half-split output (DeepSeek layout)."""
    width = rotary_dim or cos.shape[-1]
    per_channel = cos.shape[-1] == width  # a value for each channel of the output
    cos, sin = cos.unsqueeze(unsqueeze_dim - q.ndim), sin.unsqueeze(unsqueeze_dim - q.ndim)
    cosines, sines = (t.chunk(2, dim=-1) if per_channel else (t, t) for t in (cos, sin))

    def rotated(x: Tensor) -> Tensor:
        if width < x.shape[-1]:
            return torch.cat((rotated(x[..., :width]), x[..., width:]), dim=-1)
        a, b = x[..., ::2], x[..., 1::2]
        first, second = a * cosines[0] - b * sines[0], b * cosines[1] + a * sines[1]
        return torch.cat((first, second), dim=-1)

    return rotated(q), rotated(k)


work = rope_work


def _case(angles: tuple[int, ...], *sizes: Any, **options: Any) -> dict[str, T]:
    tensors = _rotary.queries_and_keys(*sizes, **options)
    return {**tensors, "cos": T(angles, grad=False), "sin": T(angles, grad=False)}


PAIRS = {"rotary_dim": 8}
SAMPLES = (
    Sample("deepseek-v3", _case((2, 3, 4), 2, (4, 1), 3, 8), PAIRS),
    Sample("one-value-a-channel", _case((2, 3, 8), 2, (4, 2), 3, 8)),
    Sample("heads-inside", _case((2, 3, 4), 2, (4, 2), 3, 8, axis=2), PAIRS | {"unsqueeze_dim": 2}),
    Sample("one-for-all", _case((1, 3, 8), 2, (4, 2), 3, 8)),
    Sample("without-batch", _case((3, 8), 2, (4, 2), 3, 8)),
    Sample("three-axes", _case((5, 8), 0, (3, 3), 5, 8)),
    Sample("partial", _case((2, 3, 6), 2, (2, 1), 3, 16)),
    Sample("partial-pairs", _case((2, 3, 4), 2, (2, 1), 3, 20), PAIRS),
    Sample("odd-heads", _case((1, 6, 40), 1, (7, 5), 6, 40)),
    Sample("no-tokens", _case((2, 0, 8), 2, (2, 1), 0, 8)),
    Sample("many-tokens", _case((1, 67, 16), 2, (2, 1), 67, 16)),
    Sample("cohere", _case((2, 3, 8), 2, (4, 1), 3, 8), {"casting": "cohere"}),
    Sample(
        "fp32-angles",
        {
            **_case((1, 3, 8), 2, (4, 1), 3, 8),
            "cos": T((1, 3, 8), dtype=torch.float32, grad=False),
            "sin": T((1, 3, 8), dtype=torch.float32, grad=False),
        },
    ),
    Sample("swapped", _case((2, 5, 8), 2, (4, 2), 5, 8, layout="swapped")),
    Sample("sliced", _case((2, 3, 8), 2, (2, 1), 3, 8, layout="sliced")),
    Sample("expanded", _case((3, 3, 8), 3, (2, 1), 3, 8, layout="expanded")),
    Sample("frozen-q", {**_case((2, 3, 8), 2, (4, 2), 3, 8), "q": T((2, 4, 3, 8), grad=False)}),
    Sample("past-65535-rows", _case((65537, 4), 1, (2, 1), 65537, 4), size="thin"),
    Sample(
        "4x2048 128/1x64",
        _case((1, 2048, 32), 4, (128, 1), 2048, 64, layout="swapped"),
        {"rotary_dim": 64},
        size="bench",
    ),
)
