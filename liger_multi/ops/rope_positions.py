"""Contract of ``rope_positions``."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops import _rotary
from liger_multi.ops._formulas import Pair, angles_of_sections, per_channel, wide
from liger_multi.ops._rotary import rope_work
from liger_multi.ops.rope import formula as rope_formula
from liger_multi.testing.samples import Sample, Tensor as T

op = Op(
    "rope_positions",
    family="rope",
    bitwise=bitwise(PER_ROW, "q:-4 k:-4 q_out:-4 k_out:-4 position_ids:-2"),
)


@op.forward(returns="q_out k_out")
def forward(
    q: Tensor,
    k: Tensor,
    position_ids: Tensor,
    inv_freq: Tensor,
    scaling: float,
    sections: str,
    chunked: bool,
    style: str,
    head_axis: int,
    casting: str,
    q_order: str,
    k_order: str,
) -> tuple[Tensor, Tensor]:
    """Shape rule; ``position_ids`` has axes grids, batch (or 1) and tokens."""
    from liger_multi.reference.rope.rope import dense

    acc_dtype = k.dtype if casting == "cohere" else torch.promote_types(k.dtype, q.dtype)
    return dense(q, q_order, q.dtype), dense(k, k_order, acc_dtype)


op.backward(
    reads="dq_out dk_out inv_freq position_ids scaling sections chunked style head_axis casting "
    "q_order k_order q_dtype k_dtype",
    returns="dq dk",
    shapes=_rotary.gradients,
)


def rope_positions(
    q: Tensor,
    k: Tensor,
    position_ids: Tensor,
    inv_freq: Tensor,
    *,
    scaling: float = 1.0,
    sections: Sequence[int] | None = None,
    arrangement: str = "chunked",
    style: str = "half",
    unsqueeze_dim: int = 1,
    casting: str = "llama",
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding from integer positions; cos and sin never stand in memory.

    Math: ``rope`` with one angle a pair, ``cos(position * inv_freq[i]) * scaling`` and the sine.
        With ``sections``, pair i takes its position from one of several grids, as in
        ``rope_multimodal``: time, height and width, or the rows and columns of an image. A negated
        inv_freq rotates the other way.

    Shapes:
        q and k as in ``rope``, inv_freq ``(R / 2,)``. position_ids ``(S,)``, ``(1, S)`` or ``(B,
        S)``; with ``sections`` one axis more in front, ``(G, S)`` to ``(G, B, S)``.

    Dtypes:
        In: q, k and inv_freq any floating dtypes, position_ids int32 or int64. Inside: fp32 (fp64
        for fp64), the product of position and frequency too. ``llama`` rounds cos and sin to the
        dtype of q, as the rotary modules do, ``cohere`` does not. Out: that of q, and of k, which
        with ``llama`` is promoted by that of q.

    Memory:
        Kept for backward: position_ids and inv_freq. Inputs are not written.

    Raises:
        TypeError: An argument has not the dtype that it must have.
        ValueError: Shapes, sections or devices that do not fit, an unknown arrangement, style or
            casting, inv_freq that requires a gradient.

    Source:
        Su et al. 2021 (arXiv:2104.09864); transformers ``LlamaRotaryEmbedding`` and
        ``Qwen2VLRotaryEmbedding`` with ``apply_rotary_pos_emb``.
    """
    name = "rope_positions"
    checks.floating(name, q=q, k=k, inv_freq=inv_freq)
    heads = _rotary.checked(name, q, k, unsqueeze_dim, inv_freq=inv_freq)
    checks.one_of(name, "arrangement", arrangement, _rotary.ARRANGEMENTS)
    checks.one_of(name, "style", style, _rotary.STYLES)
    checks.one_of(name, "casting", casting, _rotary.CASTINGS)
    if inv_freq.ndim != 1 or not 0 < 2 * inv_freq.shape[0] <= q.shape[-1]:
        checks.refuse(
            name,
            f"inv_freq must have one axis with at most {q.shape[-1] // 2} numbers, "
            "one a pair of q's channels",
            inv_freq,
        )
    sections_text, count = "", 1
    if sections is not None:
        sections_text, count = _rotary.sections_word(name, sections, inv_freq.shape[0])
    positions = _positions(name, q, position_ids, heads, count, sections is not None)
    scale = checks.number(name, "scaling", scaling)
    attributes = (scale, sections_text, arrangement == "chunked", style, heads, casting)
    return _rotary.run(op, q, k, (positions, inv_freq), attributes, "cohere")


def formula(
    q: Tensor,
    k: Tensor,
    position_ids: Tensor,
    inv_freq: Tensor,
    *,
    scaling: float = 1.0,
    sections: Sequence[int] | None = None,
    arrangement: str = "chunked",
    style: str = "half",
    unsqueeze_dim: int = 1,
    casting: str = "llama",
) -> Pair:
    """RoPE whose angles are ``position_ids * inv_freq``."""
    frequencies = wide(inv_freq)
    turns = position_ids[..., None].to(frequencies.dtype) * frequencies
    if sections is not None:
        turns = angles_of_sections(turns, sections, arrangement, "half")
    turns = per_channel(turns, style)

    def cast(wave: Tensor) -> Tensor:
        return (wave if scaling == 1.0 else wave * scaling).to(q.dtype)

    cos, sin = cast(turns.cos()), cast(turns.sin())
    return rope_formula(q, k, cos, sin, style=style, unsqueeze_dim=unsqueeze_dim)


work = rope_work


def _positions(name: str, q: Tensor, ids: Tensor, heads: int, count: int, grids: bool) -> Tensor:
    """position_ids with the axes grids, batch (or 1) and tokens."""
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"{name}: position_ids must be an int64 or int32 tensor, got {checks.describe(ids)}"
        )
    if ids.device != q.device:
        checks.refuse(
            name,
            "all tensors must be on one device",
            f"position_ids on {ids.device} and q on {q.device}",
        )
    tokens, batch = _rotary.tokens_of(q, heads), q.shape[0] if q.ndim == 4 else 1
    shaped = ids if grids else ids.unsqueeze(0)
    shaped = shaped.unsqueeze(1) if shaped.ndim == 2 else shaped
    expected = (count, shaped.shape[1] if shaped.ndim == 3 else 0, tokens)
    if tuple(shaped.shape) != expected or shaped.shape[1] not in (1, batch):
        leading = f"{count}, " if grids else ""
        checks.refuse(
            name,
            f"position_ids must have shape ({leading}{tokens},), ({leading}1, {tokens}) "
            f"or ({leading}{batch}, {tokens})",
            ids,
        )
    return shaped


def _case(ids: tuple[int, ...], *sizes: Any, pairs: int, wide: bool = False, **options: Any) -> Any:
    tensors = _rotary.queries_and_keys(*sizes, **options)
    cos_or_sin = T((pairs,), dtype=torch.float32 if wide else None, grad=False, positive=True)
    return {**tensors, "position_ids": T(ids, classes=8, grad=False), "inv_freq": cos_or_sin}


THREE: dict[str, Any] = {"sections": (1, 2, 1)}
SAMPLES = (
    Sample("llama", _case((2, 3), 2, (4, 2), 3, 8, pairs=4, wide=True)),
    Sample("scaled", _case((1, 3), 2, (4, 2), 3, 8, pairs=4), {"scaling": 1.3}),
    Sample("interleaved", _case((2, 3), 2, (4, 2), 3, 8, pairs=4), {"style": "interleaved"}),
    Sample("cohere", _case((2, 3), 2, (4, 2), 3, 8, pairs=4, wide=True), {"casting": "cohere"}),
    Sample("one-axis", _case((3,), 2, (4, 2), 3, 8, pairs=4)),
    Sample("heads-inside", _case((2, 3), 2, (4, 2), 3, 8, pairs=4, axis=2), {"unsqueeze_dim": 2}),
    Sample("qwen2-vl", _case((3, 2, 3), 2, (4, 2), 3, 8, pairs=4, wide=True), THREE),
    Sample(
        "qwen3-vl",
        _case((3, 2, 3), 2, (4, 2), 3, 16, pairs=8),
        {"sections": (4, 2, 2), "arrangement": "interleaved"},
    ),
    Sample("image", _case((2, 6), 0, (3, 3), 6, 8, pairs=4), {"sections": (2, 2)}),
    Sample("three-axes", _case((5,), 0, (3, 3), 5, 8, pairs=4)),
    Sample("partial", _case((2, 3), 2, (2, 1), 3, 20, pairs=4)),
    Sample("odd-heads", _case((1, 6), 1, (7, 5), 6, 40, pairs=20)),
    Sample("low-frequencies", _case((2, 3), 2, (4, 2), 3, 8, pairs=4)),
    Sample("no-tokens", _case((2, 0), 2, (2, 1), 0, 8, pairs=4)),
    Sample("swapped", _case((2, 5), 2, (4, 2), 5, 8, pairs=4, layout="swapped")),
    Sample("sliced", _case((2, 3), 2, (2, 1), 3, 8, pairs=4, layout="sliced")),
    Sample(
        "frozen-q", {**_case((2, 3), 2, (4, 2), 3, 8, pairs=4), "q": T((2, 4, 3, 8), grad=False)}
    ),
    Sample("past-65535-rows", _case((65537,), 1, (2, 1), 65537, 4, pairs=2), size="thin"),
    Sample(
        "8x1024 32/8x128",
        _case((8, 1024), 8, (32, 8), 1024, 128, pairs=64, wide=True, layout="swapped"),
        size="bench",
    ),
)
