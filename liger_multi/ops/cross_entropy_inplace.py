"""Contract behind ``cross_entropy(..., inplace=True)``: the gradient replaces the logits."""

from typing import Optional

from torch import Tensor

from liger_multi.dispatch.op import Op
from liger_multi.ops.cross_entropy import RETURNS, shapes
from liger_multi.ops.cross_entropy import SAMPLES as FUNCTIONAL
from liger_multi.testing.samples import Sample

op = Op("cross_entropy_inplace", family="cross_entropy", inplace="logits")


@op.forward(returns=RETURNS, non_differentiable=RETURNS.removeprefix("loss "))
def forward(
    logits: Tensor, target: Tensor, weight: Optional[Tensor], ignore_index: int,
    label_smoothing: float, z_loss_weight: float, softcap: Optional[float], reduction: str,
    validate: bool, outputs: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Shape rule."""
    return shapes(logits, logits.shape[0], reduction, outputs)  # type: ignore[return-value]


op.backward(reads="dloss logits", returns="")


SAMPLES = tuple(
    Sample(s.name, s.tensors, {**s.options, "inplace": True}, s.size)
    for s in FUNCTIONAL
    if s.name not in ("no-rows",)
)
