"""Contract of ``swiglu_clamped_packed``."""

from typing import Any

from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._activations import check_even_width, packed, packed_work
from liger_multi.ops._samples import HALVES, usual
from liger_multi.ops.swiglu_clamped import CLOSE, PLAIN, formula as swiglu_clamped_formula, numbers
from liger_multi.testing.samples import Sample, Tensor as T

op = Op(
    "swiglu_clamped_packed",
    family="activations",
    compile="trace",
    rowwise=True,
    bitwise=bitwise(PER_ROW, "gate_up y", 1),
)


@op.forward(returns="y")
def forward(
    gate_up: Tensor, limit: float, alpha: float, up_offset: float, interleaved: bool
) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


op.backward(reads="dy gate_up limit alpha up_offset interleaved", returns="dgate_up")


def swiglu_clamped_packed(
    gate_up: Tensor,
    *,
    limit: float = 7.0,
    alpha: float = 1.702,
    up_offset: float = 1.0,
    interleaved: bool = True,
) -> Tensor:
    """Gated activation of a packed projection with clamped values, without copying its parts.

    Math:
        As ``swiglu_clamped``, with ``gate, up = gate_up[..., ::2], gate_up[..., 1::2]``, or the
        halves of the last axis where ``interleaved`` is False.

    Shapes:
        gate_up ``(..., 2 F)`` with any strides; y ``(..., F)``, contiguous.

    Dtypes:
        In and out: any floating dtype. Inside: fp32 (fp64 for fp64).

    Memory:
        Kept for backward: gate_up; the activation is computed again.

    Raises:
        TypeError: gate_up is not a floating-point tensor, an option no number, or interleaved
            neither True nor False.
        ValueError: Its last axis is odd, limit is not positive.

    Source:
        Shazeer 2020 (arXiv:2002.05202); transformers ``GptOssExperts``.
    """
    check_even_width("swiglu_clamped_packed", gate_up)
    if not isinstance(interleaved, bool):
        checks.boolean("swiglu_clamped_packed", "interleaved", interleaved)
    clamps = numbers("swiglu_clamped_packed", limit, alpha, up_offset)
    result: Tensor = op(gate_up, *clamps, interleaved)
    return result


def formula(
    gate_up: Tensor,
    *,
    limit: float = 7.0,
    alpha: float = 1.702,
    up_offset: float = 1.0,
    interleaved: bool = True,
) -> Tensor:
    """The same of every second column, or of the two halves of the last axis."""
    pair = (gate_up[..., ::2], gate_up[..., 1::2]) if interleaved else gate_up.chunk(2, dim=-1)
    return swiglu_clamped_formula(*pair, limit=limit, alpha=alpha, up_offset=up_offset)


work = packed_work


FAR: dict[str, Any] = {"one-row": {}, "no-rows": {}, "past-65535-rows": {}}
IN_HALVES = {"interleaved": False}
SAMPLES = (
    Sample("rows", packed(3, 5, 96), CLOSE),
    *usual(packed, HALVES, CLOSE, but=FAR),
    Sample("halves", packed(3, 5, 96), CLOSE | IN_HALVES),
    Sample("silu-halves", packed(4, 64), PLAIN | IN_HALVES),
    Sample("two-columns", {"gate_up": T((9, 2))}, CLOSE),
    Sample("row-gaps-halves", packed(2, 3, 64, layout="rows"), CLOSE | IN_HALVES),
    Sample("past-65536-columns", packed(2, 131200), size="thin"),
    Sample("32768x2880", packed(32768, 5760), size="bench"),
    Sample("32768x2880 halves", packed(32768, 5760), IN_HALVES, size="bench"),
)
