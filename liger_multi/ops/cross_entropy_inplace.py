"""Contract behind ``cross_entropy(..., inplace=True)``: the gradient replaces the logits."""

from typing import Any, Optional

from torch import Tensor

from liger_multi.dispatch.op import Op
from liger_multi.ops._overwrite import writable_rows
from liger_multi.ops.cross_entropy import RETURNS, shapes
from liger_multi.ops.cross_entropy import SAMPLES as FUNCTIONAL
from liger_multi.testing.samples import Sample

op = Op("cross_entropy_inplace", inplace="logits")


@op.forward(returns=RETURNS, constants=RETURNS.removeprefix("loss "))
def forward(
    logits: Tensor,
    target: Tensor,
    weight: Optional[Tensor],
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    softcap: Optional[float],
    reduction: str,
    validate: bool,
    outputs: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Shape rule."""
    return shapes(logits, logits.shape[0], reduction, outputs)  # type: ignore[return-value]


@op.backward(returns="")
def backward(dloss: Tensor, logits: Tensor) -> None:
    """Shape rule: ``logits`` holds the gradient and is scaled where it stands."""


def overwrite(logits: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Run the operator on a view of the caller's logits."""
    rows = writable_rows("cross_entropy", "logits", logits)
    results: tuple[Tensor, ...] = op(rows, *args)
    return results


SAMPLES = tuple(
    Sample(s.name, s.tensors, {**s.options, "inplace": True}, s.size)
    for s in FUNCTIONAL
    if s.name not in ("no-rows",)
)
