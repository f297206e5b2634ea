"""Contract of ``rope_multimodal``."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops import _rotary
from liger_multi.ops._formulas import Pair, angles_of_sections
from liger_multi.ops._rotary import rope_work
from liger_multi.ops._work import Options, Shapes, Work
from liger_multi.ops.rope import formula as rope_formula
from liger_multi.testing.samples import Sample, Tensor as T

# traced as rope, whose choice was not measured either
op = Op(
    "rope_multimodal",
    family="rope",
    bitwise=bitwise(PER_ROW, "q:-4 k:-4 q_out:-4 k_out:-4 cos:-3 sin:-3", reference="exact"),
)


@op.forward(returns="q_out k_out")
def forward(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    sections: str,
    chunked: bool,
    style: str,
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
    reads="dq_out dk_out cos sin sections chunked style head_axis rotary_dim casting q_order "
    "k_order q_dtype k_dtype",
    returns="dq dk",
    shapes=_rotary.gradients,
)


def rope_multimodal(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    sections: Sequence[int],
    *,
    arrangement: str = "chunked",
    style: str = "half",
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
    casting: str = "llama",
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding by several grids of positions (M-RoPE): time, height and width.

    Math:
        ``rope`` with angles that are taken from grid ``g(p)`` for pair p. ``chunked``: the first
        ``sections[0]`` pairs belong to grid 0, the next to grid 1, and so on (Qwen2-VL).
        ``interleaved``: ``g(p) = p % G`` while ``p < G * sections[g]``, and 0 then (Qwen3-VL).

    Shapes:
        q and k as in ``rope``. cos and sin ``(G, S, R)``, ``(G, 1, S, R)`` or ``(G, B, S, R)``
        with one value a channel, or one a pair where ``rotary_dim`` is twice their width;
        ``sections`` two or three numbers of pairs, R / 2 together.

    Dtypes:
        As ``rope``: in any floating dtypes; inside fp32 (fp64 for fp64); out by ``casting``.

    Memory:
        Kept for backward: cos and sin as they came. Inputs are not written, the merged angles
        never stand in memory (kernels).

    Raises:
        TypeError: An argument is not a floating-point tensor, or no integer.
        ValueError: Shapes, sections or devices that do not fit, an unknown arrangement, style or
            casting, cos or sin that require a gradient.

    Source:
        Wang et al. 2024 (arXiv:2409.12191); transformers ``apply_multimodal_rotary_pos_emb`` and
        ``Qwen3VLTextRotaryEmbedding``.
    """
    name = "rope_multimodal"
    checks.floating(name, q=q, k=k, cos=cos, sin=sin)
    heads = _rotary.checked(name, q, k, unsqueeze_dim, cos=cos, sin=sin)
    checks.one_of(name, "arrangement", arrangement, _rotary.ARRANGEMENTS)
    checks.one_of(name, "style", style, _rotary.STYLES)
    checks.one_of(name, "casting", casting, _rotary.CASTINGS)
    rotary = _rotary.rotary_width(name, q, cos, rotary_dim)
    sections_text, count = _rotary.sections_word(name, sections, rotary // 2)
    if cos.ndim not in (3, 4) or cos.shape[0] != count:
        checks.refuse(
            name,
            f"cos and sin must have {count} grids, one a section, on their first "
            "axis of three or four",
            cos,
        )
    checks.same_shape(name, cos=cos, sin=sin)
    _rotary.check_angles(name, q, cos[0], sin[0], heads)
    cos, sin = (t if t.ndim == 4 else t.unsqueeze(1) for t in (cos, sin))
    attributes = (sections_text, arrangement == "chunked", style, heads, rotary, casting)
    return _rotary.run(op, q, k, (cos, sin), attributes, casting)


def formula(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    sections: Sequence[int],
    *,
    arrangement: str = "chunked",
    style: str = "half",
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
    casting: str = "llama",
) -> Pair:
    """RoPE whose pairs take their angles from different grids (time, height, width)."""
    cos, sin = (angles_of_sections(t, sections, arrangement, style) for t in (cos, sin))
    return rope_formula(
        q, k, cos, sin, style=style, unsqueeze_dim=unsqueeze_dim, rotary_dim=rotary_dim
    )


# of three grids, each pair needs the angles of one
def work(shapes: Shapes, size: int, options: Options) -> Work:
    return rope_work({**shapes, "cos": shapes["cos"][1:], "sin": shapes["sin"][1:]}, size, options)


def _case(grids: int, angles: tuple[int, ...], *sizes: Any, **options: Any) -> dict[str, T]:
    tensors = _rotary.queries_and_keys(*sizes, **options)
    shape = (grids, *angles)
    return {**tensors, "cos": T(shape, grad=False), "sin": T(shape, grad=False)}


THREE: dict[str, Any] = {"sections": (1, 2, 1)}
MIXED = THREE | {"arrangement": "interleaved"}
SAMPLES = (
    Sample("qwen2-vl", _case(3, (2, 3, 8), 2, (4, 2), 3, 8), THREE),
    Sample(
        "qwen3-vl",
        _case(3, (2, 3, 16), 2, (4, 2), 3, 16),
        {"sections": (4, 2, 2), "arrangement": "interleaved"},
    ),
    Sample("uneven-interleaved", _case(3, (1, 3, 8), 2, (2, 1), 3, 8), MIXED),
    Sample(
        "glm4v",
        _case(3, (2, 3, 4), 2, (4, 2), 3, 8),
        THREE | {"style": "interleaved", "rotary_dim": 8},
    ),
    Sample(
        "interleaved-pairs", _case(3, (2, 3, 8), 2, (4, 2), 3, 8), THREE | {"style": "interleaved"}
    ),
    Sample("one-value-a-pair", _case(3, (2, 5, 4), 2, (2, 1), 5, 8), THREE | {"rotary_dim": 8}),
    Sample(
        "heads-inside", _case(3, (2, 3, 8), 2, (4, 2), 3, 8, axis=2), THREE | {"unsqueeze_dim": 2}
    ),
    Sample("angles-without-batch", _case(3, (3, 8), 2, (2, 2), 3, 8), THREE),
    Sample("three-axes", _case(3, (5, 8), 0, (2, 2), 5, 8), MIXED),
    Sample("two-grids", _case(2, (4, 8), 0, (2, 2), 4, 8), {"sections": (2, 2)}),
    Sample("empty-section", _case(3, (1, 4, 8), 2, (2, 2), 4, 8), {"sections": (0, 3, 1)}),
    Sample("partial", _case(3, (2, 3, 8), 2, (2, 1), 3, 20), THREE),
    Sample("odd-heads", _case(3, (1, 6, 40), 1, (7, 5), 6, 40), {"sections": (4, 8, 8)}),
    Sample("swapped", _case(3, (2, 5, 8), 2, (4, 2), 5, 8, layout="swapped"), THREE),
    Sample("sliced", _case(3, (2, 3, 8), 2, (2, 1), 3, 8, layout="sliced"), MIXED),
    Sample("no-tokens", _case(3, (2, 0, 8), 2, (2, 1), 0, 8), THREE),
    Sample(
        "fp32-angles",
        {
            **_case(3, (1, 3, 8), 2, (2, 1), 3, 8),
            "cos": T((3, 1, 3, 8), dtype=torch.float32, grad=False),
            "sin": T((3, 1, 3, 8), dtype=torch.float32, grad=False),
        },
        THREE | {"casting": "cohere"},
    ),
    Sample(
        "frozen-q",
        {**_case(3, (1, 3, 8), 2, (2, 1), 3, 8), "q": T((2, 2, 3, 8), grad=False)},
        THREE,
    ),
    Sample(
        "past-65535-rows",
        _case(3, (65537, 4), 1, (2, 1), 65537, 4),
        {"sections": (1, 1, 0)},
        "thin",
    ),
    Sample(
        "4x2048 28/4x128",
        _case(3, (1, 2048, 128), 4, (28, 4), 2048, 128, layout="swapped"),
        {"sections": (16, 24, 24)},
        "bench",
    ),
    Sample(
        "4x2048 32/8x128 interleaved",
        _case(3, (1, 2048, 128), 4, (32, 8), 2048, 128, layout="swapped"),
        {"sections": (24, 20, 20), "arrangement": "interleaved"},
        "bench",
    ),
)
