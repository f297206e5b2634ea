"""Contract of ``rope_complex``."""

from typing import Any

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops import _rotary
from liger_multi.ops._formulas import Pair, wide
from liger_multi.ops._rotary import rope_work
from liger_multi.testing.samples import Sample, Tensor as T

op = Op(
    "rope_complex",
    family="rope",
    bitwise=bitwise(PER_ROW, "q k q_out k_out freqs", reference="exact"),
)


@op.forward(returns="q_out k_out")
def forward(
    q: Tensor,
    k: Tensor,
    freqs: Tensor,
    head_axis: int,
    rotary_dim: int,
    q_order: str,
    k_order: str,
) -> tuple[Tensor, Tensor]:
    """Shape rule; ``freqs`` has real and imaginary parts on its last axis."""
    from liger_multi.reference.rope.rope import dense

    return dense(q, q_order, q.dtype), dense(k, k_order, k.dtype)


op.backward(
    reads="dq_out dk_out freqs head_axis rotary_dim q_order k_order q_dtype k_dtype",
    returns="dq dk",
    shapes=_rotary.gradients,
)


def rope_complex(
    q: Tensor, k: Tensor, freqs: Tensor, *, unsqueeze_dim: int = 2
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding by complex numbers, one for each pair of neighboring channels.

    Math:
        ``(x[2 i] + j x[2 i + 1]) * freqs[i]`` in fp32, for every head, on the first R channels;
        the others pass through. Backward multiplies by the conjugate. freqs need not have the
        modulus one.

    Shapes:
        q ``(B, S, Hq, D)`` and k ``(B, S, Hk, D)`` for ``unsqueeze_dim=2``, ``(B, H, S, D)`` for 1,
        or ``(S, H, D)`` with 1; any strides. freqs ``(S, R / 2)``, ``(1, S, R / 2)`` or ``(B, S, R
        / 2)``: every sequence may have its own; or real, with the two parts on one more axis of 2.
        Outputs keep the order of axes that their inputs have in memory.

    Dtypes:
        In: q and k any floating dtypes, freqs complex or floating. Inside: fp32 (fp64 for fp64).
        Out: those of q and k.

    Memory:
        Kept for backward: freqs. Inputs are not written.

    Raises:
        TypeError: An argument is neither a floating-point nor, for freqs, a complex tensor, or
            unsqueeze_dim no integer.
        ValueError: Shapes or devices that do not fit, or freqs that require a gradient.

    Source:
        Su et al. 2021 (arXiv:2104.09864); transformers ``apply_rotary_emb`` of llama4 and
        deepseek_v2, ``vision_apply_rotary_emb`` of llama4.
    """
    name = "rope_complex"
    if isinstance(freqs, Tensor) and freqs.is_complex():
        freqs = torch.view_as_real(freqs)
    checks.floating(name, q=q, k=k, freqs=freqs)
    heads = _rotary.checked(name, q, k, unsqueeze_dim, freqs=freqs)
    if freqs.ndim < 3 or freqs.shape[-1] != 2:
        checks.refuse(name, "freqs must be complex, or have the two parts on its last axis", freqs)
    parts = freqs[..., 0]
    _rotary.check_angles(name, q, parts, parts, heads)
    rotary = _rotary.rotary_width(name, q, parts, 2 * parts.shape[-1])
    return _rotary.run(op, q, k, (freqs,), (heads, rotary), "cohere")


def formula(q: Tensor, k: Tensor, freqs: Tensor, *, unsqueeze_dim: int = 2) -> Pair:
    """Neighboring channels as complex numbers, times ``freqs``; other channels stay."""
    numbers = torch.view_as_complex(wide(freqs).contiguous()).unsqueeze(unsqueeze_dim - q.ndim)
    width = 2 * numbers.shape[-1]

    def rotated(x: Tensor) -> Tensor:
        if width < x.shape[-1]:
            return torch.cat((rotated(x[..., :width]), x[..., width:]), dim=-1)
        pairs = torch.view_as_complex(wide(x).unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * numbers).flatten(-2).type_as(x)

    return rotated(q), rotated(k)


work = rope_work


def _case(angles: tuple[int, ...], *sizes: Any, dtype: Any = None, **options: Any) -> Any:
    tensors = _rotary.queries_and_keys(*sizes, **options)
    return {**tensors, "freqs": T((*angles, 2), dtype=dtype, grad=False)}


INSIDE, OUTSIDE = {"axis": 2}, {"unsqueeze_dim": 1}
SAMPLES = (
    Sample("llama4", _case((2, 3, 4), 2, (4, 2), 3, 8, dtype=torch.float32, **INSIDE)),
    Sample("deepseek-v2", _case((2, 3, 4), 2, (4, 1), 3, 8, dtype=torch.float32), OUTSIDE),
    Sample("one-for-all", _case((1, 3, 4), 2, (4, 2), 3, 8, **INSIDE)),
    Sample("without-batch", _case((3, 4), 2, (4, 2), 3, 8, **INSIDE)),
    Sample("three-axes", _case((5, 4), 0, (3, 3), 5, 8), OUTSIDE),
    Sample("partial", _case((2, 3, 3), 2, (2, 1), 3, 16, **INSIDE)),
    Sample("odd-heads", _case((1, 6, 20), 1, (7, 5), 6, 40, **INSIDE)),
    Sample("one-token", _case((3, 1, 32), 3, (4, 2), 1, 64, **INSIDE)),
    Sample("no-tokens", _case((2, 0, 4), 2, (2, 1), 0, 8, **INSIDE)),
    Sample("same-dtype", _case((2, 3, 4), 2, (4, 2), 3, 8, **INSIDE)),
    Sample("swapped", _case((2, 5, 4), 2, (4, 2), 5, 8, layout="swapped"), OUTSIDE),
    Sample("sliced", _case((2, 3, 4), 2, (2, 1), 3, 8, layout="sliced", **INSIDE)),
    Sample("expanded", _case((3, 3, 4), 3, (2, 1), 3, 8, layout="expanded", **INSIDE)),
    Sample(
        "frozen-k",
        {**_case((2, 3, 4), 2, (4, 2), 3, 8, **INSIDE), "k": T((2, 3, 2, 8), grad=False)},
    ),
    Sample("past-65535-rows", _case((65537, 2), 1, (2, 1), 65537, 4, **INSIDE), size="thin"),
    Sample(
        "4x2048 40/8x128",
        _case((4, 2048, 64), 4, (40, 8), 2048, 128, dtype=torch.float32, **INSIDE),
        size="bench",
    ),
)
