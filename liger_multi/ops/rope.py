"""Contract of ``rope``."""

from typing import Any

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._formulas import Pair, per_channel
from liger_multi.ops._rotary import (
    check_angles,
    check_queries_and_keys,
    gradients,
    head_axis,
    order,
    queries_and_keys,
    rope_work,
    rotary_width,
)
from liger_multi.ops._samples import each_frozen
from liger_multi.testing.samples import Sample, Tensor as T

STYLES = ("half", "interleaved")
CASTINGS = ("llama", "cohere")
# traced, so that it fuses with its neighbors; unlike swiglu's, this choice was not measured
op = Op(
    "rope", family="rope", bitwise=bitwise(PER_ROW, "q k q_out k_out cos sin", reference="exact")
)


@op.forward(returns="q_out k_out")
def forward(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    style: str,
    head_axis: int,
    rotary_dim: int,
    casting: str,
    q_order: str,
    k_order: str,
) -> tuple[Tensor, Tensor]:
    """Shape rule; an order names the axes from the outermost in memory to the innermost."""
    from liger_multi.reference.rope.rope import dense, output_dtype

    return (
        dense(q, q_order, output_dtype(q, cos, sin, casting)),
        dense(k, k_order, output_dtype(k, cos, sin, casting)),
    )


op.backward(
    reads="dq_out dk_out cos sin style head_axis rotary_dim casting q_order k_order q_dtype "
    "k_dtype",
    returns="dq dk",
    shapes=gradients,
)


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    style: str = "half",
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
    casting: str = "llama",
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of queries and keys.

    Math: ``out = x * cos + rotate_half(x) * sin`` on the first R channels, the others pass through.
        ``rotate_half`` maps a pair of channels ``(a, b)`` to ``(-b, a)``: pairs are ``(i, i + R /
        2)`` for ``half`` and ``(2 i, 2 i + 1)`` for ``interleaved``. The two channels of a pair may
        have different values of cos and sin. Backward is the transposed matrix: ``dx = dout * cos -
        rotate_half(dout * sin)``. A negated sin rotates the other way.

    Shapes:
        q ``(B, Hq, S, D)`` and k ``(B, Hk, S, D)`` for ``unsqueeze_dim=1``, ``(B, S, H, D)`` for 2,
        or ``(S, H, D)``; any strides. cos and sin ``(S, R)``, ``(1, S, R)`` or ``(B, S, R)``, with
        one value a channel, or one value a pair where ``rotary_dim`` is twice their width. Outputs
        and gradients are dense and keep the order of axes that their inputs have in memory (last
        axis innermost).

    Dtypes:
        In: any floating dtypes. Inside: fp32 (fp64 for fp64). Out, by ``casting``: ``llama`` the
        promotion of x, cos and sin, as most Hugging Face functions return; ``cohere`` the dtype
        of x whatever that of cos, for those that compute in fp32 and cast back. The reference
        rounds every product where these functions do, kernels round once.

    Memory:
        Kept for backward: cos and sin. Inputs are not written.

    Raises:
        TypeError: An argument is not a floating-point tensor, or unsqueeze_dim or rotary_dim no
            integer.
        ValueError: Shapes or devices that do not fit, an unknown style or casting, or cos or sin
            that require a gradient (none is computed for them).

    Source:
        Su et al. 2021 (arXiv:2104.09864); transformers ``apply_rotary_pos_emb`` of llama, phi3,
        glm, cohere and gpt_oss, ``apply_rotary_pos_emb_vision`` of qwen2_vl.
    """
    checks.floating("rope", q=q, k=k, cos=cos, sin=sin)
    checks.one_of("rope", "style", style, STYLES)
    checks.one_of("rope", "casting", casting, CASTINGS)
    heads = head_axis("rope", q, unsqueeze_dim)
    check_queries_and_keys("rope", q, k, heads)
    check_angles("rope", q, cos, sin, heads)
    rotary = rotary_width("rope", q, cos, rotary_dim)
    checks.constant("rope", "cos", cos)
    checks.constant("rope", "sin", sin)
    input_dtypes = {x.dtype for x in (q, k, cos, sin)}
    attributes = (style, heads, rotary, casting, order(q), order(k))
    if torch.float64 in input_dtypes and len(input_dtypes) > 1:
        # half of a call in fp64 would be computed in fp32, by the dtype that backends are chosen by
        wide = op(*[x.double() for x in (q, k, cos, sin)], *attributes)
        angle = torch.promote_types(cos.dtype, sin.dtype)
        dtypes = [torch.promote_types(x.dtype, angle) for x in (q, k)]
        dtypes = dtypes if casting == "llama" else [q.dtype, k.dtype]
        return wide[0].to(dtypes[0]), wide[1].to(dtypes[1])
    result: tuple[Tensor, Tensor] = op(q, k, cos, sin, *attributes)
    return result


def _rotated(x: Tensor, style: str) -> Tensor:
    """Each pair (a, b) becomes (-b, a)."""
    if style == "half":
        a, b = x.chunk(2, dim=-1)
        return torch.cat((-b, a), dim=-1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def formula(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    style: str = "half",
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
    casting: str = "llama",
) -> Pair:
    """``x * cos + rotate(x) * sin`` of the first ``rotary_dim`` channels."""
    width = rotary_dim or cos.shape[-1]
    if cos.shape[-1] != width:  # one value per pair
        cos, sin = per_channel(cos, style), per_channel(sin, style)
    cos, sin = cos.unsqueeze(unsqueeze_dim - q.ndim), sin.unsqueeze(unsqueeze_dim - q.ndim)

    def rotated(x: Tensor) -> Tensor:
        if width < x.shape[-1]:
            return torch.cat((rotated(x[..., :width]), x[..., width:]), dim=-1)
        return x * cos + _rotated(x, style) * sin

    return rotated(q), rotated(k)


work = rope_work


def _case(
    *sizes: Any, rotary: int = 0, angles: tuple[int, ...] = (1,), dtype: Any = None, **options: Any
) -> dict[str, T]:
    _, _, tokens, width = sizes
    angle = T((*angles, tokens, rotary or width), dtype=dtype, grad=False)
    return {**queries_and_keys(*sizes, **options), "cos": angle, "sin": angle}


PAIRS, INTERLEAVED = {"rotary_dim": 8}, {"style": "interleaved"}
SAMPLES = (
    Sample("half", _case(2, (4, 2), 3, 8)),
    Sample("interleaved", _case(2, (4, 2), 3, 8), INTERLEAVED),
    Sample("heads-inside", _case(2, (4, 2), 3, 8, axis=2), {"unsqueeze_dim": 2}),
    Sample("swapped", _case(2, (4, 2), 5, 16, layout="swapped")),
    Sample("swapped-interleaved", _case(2, (4, 2), 5, 16, layout="swapped"), INTERLEAVED),
    Sample("angles-of-a-batch", _case(3, (2, 1), 4, 8, angles=(3,))),
    Sample("angles-of-two-axes", _case(2, (3, 3), 4, 8, angles=())),
    Sample("three-axes", _case(0, (3, 3), 5, 8, angles=())),
    Sample("three-axes-interleaved", _case(0, (3, 3), 5, 8, angles=()), INTERLEAVED),
    Sample("partial", _case(2, (2, 1), 3, 16, rotary=6)),
    Sample("partial-interleaved", _case(2, (2, 1), 3, 16, rotary=6), INTERLEAVED),
    Sample("one-value-a-pair", _case(2, (4, 1), 3, 8, rotary=4), PAIRS),
    Sample("one-value-a-pair-interleaved", _case(2, (4, 1), 3, 8, rotary=4), PAIRS | INTERLEAVED),
    Sample("one-value-a-pair-partial", _case(1, (2, 2), 3, 20, rotary=4), PAIRS),
    Sample("odd-heads", _case(1, (7, 5), 6, 40)),
    Sample("odd-heads-interleaved", _case(1, (7, 5), 6, 40), INTERLEAVED),
    Sample("one-token", _case(3, (4, 2), 1, 64)),
    Sample("two-channels", _case(2, (2, 1), 3, 2)),
    Sample("no-tokens", _case(2, (2, 1), 0, 8)),
    Sample("many-tokens", _case(2, (2, 1), 67, 16, axis=2), {"unsqueeze_dim": 2}),
    Sample("sliced", _case(2, (2, 1), 3, 8, layout="sliced")),
    Sample("transposed", _case(2, (2, 1), 4, 8, layout="transposed")),
    Sample("row-gaps", _case(2, (2, 1), 3, 16, layout="rows")),
    Sample("expanded", _case(3, (2, 1), 3, 8, layout="expanded")),
    Sample("fp32-angles", _case(2, (2, 1), 3, 8, dtype=torch.float32)),
    Sample(
        "fp32-angles-cohere", _case(2, (2, 1), 3, 8, dtype=torch.float32), {"casting": "cohere"}
    ),
    *each_frozen(_case(2, (2, 1), 3, 8), "q k"),
    Sample("past-65535-rows", _case(1, (2, 1), 65537, 4), size="thin"),
    Sample("8x2048 32/8x128", _case(8, (32, 8), 2048, 128, layout="swapped"), size="bench"),
    Sample("8x1024 32/8x128", _case(8, (32, 8), 1024, 128, layout="swapped"), size="bench"),
    Sample("8x1024 14/2x64", _case(8, (14, 2), 1024, 64, layout="swapped"), size="bench"),
    Sample(
        "8x1024 32/8x128 interleaved",
        _case(8, (32, 8), 1024, 128, layout="swapped"),
        INTERLEAVED,
        size="bench",
    ),
)
COMPILE_SAMPLES = (
    Sample("4x2048 16/16x80", _case(4, (16, 16), 2048, 80, layout="swapped")),
    Sample(
        "4x2048 32/2x128 of 64",
        _case(4, (32, 2), 2048, 128, rotary=64, layout="swapped"),
        {"rotary_dim": 64},
    ),
    *[
        Sample(
            f"2x2048 8/1x512 {options.get('style', 'half')} fp32 angles",
            _case(2, (8, 1), 2048, 512, layout="swapped", dtype=torch.float32),
            options,
        )
        for options in ({}, INTERLEAVED)
    ],
)
