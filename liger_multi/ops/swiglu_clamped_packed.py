"""Contract of ``swiglu_clamped_packed``."""

from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.op import Op
from liger_multi.ops.swiglu_clamped import CLOSE, PLAIN, numbers
from liger_multi.ops.swiglu_packed import even
from liger_multi.testing.samples import Sample
from liger_multi.testing.samples import Tensor as T

op = Op("swiglu_clamped_packed", compile="trace", rows=("gate_up", "dy"))


@op.forward(returns="y")
def forward(
    gate_up: Tensor, limit: float, alpha: float, up_offset: float, interleaved: bool
) -> Tensor:
    """Shape rule."""
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@op.backward(returns="dgate_up")
def backward(
    dy: Tensor, gate_up: Tensor, limit: float, alpha: float, up_offset: float, interleaved: bool
) -> Tensor:
    """Shape rule."""
    return gate_up.new_empty(gate_up.shape)


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
    even("swiglu_clamped_packed", gate_up)
    if not isinstance(interleaved, bool):
        raise TypeError(
            "swiglu_clamped_packed: interleaved must be True or False, got "
            f"{checks.describe(interleaved)}"
        )
    by = numbers("swiglu_clamped_packed", limit, alpha, up_offset)
    result: Tensor = op(gate_up, *by, interleaved)
    return result


HALVES = {"interleaved": False}
SAMPLES = (
    Sample("rows", {"gate_up": T((3, 5, 96))}, CLOSE),
    Sample("halves", {"gate_up": T((3, 5, 96))}, CLOSE | HALVES),
    Sample("silu-halves", {"gate_up": T((4, 64))}, PLAIN | HALVES),
    Sample("odd-half", {"gate_up": T((4, 74))}, CLOSE),
    Sample("one-row", {"gate_up": T((1, 400))}),
    Sample("one-axis", {"gate_up": T((62,))}, CLOSE),
    Sample("two-columns", {"gate_up": T((9, 2))}, CLOSE),
    Sample("no-rows", {"gate_up": T((0, 16))}),
    Sample("sliced", {"gate_up": T((4, 48), layout="sliced")}, CLOSE),
    Sample("transposed", {"gate_up": T((2, 8, 12), layout="transposed")}, CLOSE),
    Sample("row-gaps", {"gate_up": T((2, 3, 64), layout="rows")}, CLOSE),
    Sample("row-gaps-halves", {"gate_up": T((2, 3, 64), layout="rows")}, CLOSE | HALVES),
    Sample("past-65535-rows", {"gate_up": T((65537, 4))}, size="thin"),
    Sample("past-65536-columns", {"gate_up": T((2, 131200))}, size="thin"),
    Sample("32768x2880", {"gate_up": T((32768, 5760))}, size="bench"),
    Sample("32768x2880 halves", {"gate_up": T((32768, 5760))}, HALVES, size="bench"),
)
