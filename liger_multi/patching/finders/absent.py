"""Operators that found nothing in a model."""

from __future__ import annotations

from torch import nn

from liger_multi.patching.finders.layers import TOLD
from liger_multi.patching.options import ROTATED, Request
from liger_multi.patching.recognize.kinds import MIXER_OPS, MLP_OPS, NORM_OPS, SPARSE
from liger_multi.patching.report import PatchReport, Skipped

_ALONE = (
    ("fused_moe",),
    ("rope",),
    ("lora",),
    ("linear",),
    ("linear_float8",),
    (SPARSE,),
    (ROTATED,),
)
"""Operators that are a family each."""


def find_absent(report: PatchReport, request: Request, model: nn.Module) -> None:
    """Name the operators that found nothing; one kind of MLP is enough where none was named."""
    names = {type(m).__name__ for m in model.modules()}
    experts = sorted(name for name in names if name.endswith("Experts"))
    experts = [] if report.count("fused_moe") else experts
    seen = {e.op for e in report.entries if e.status != "restored"}
    seen |= {s.op for s in report.skipped}
    if experts and "fused_moe" in request.enabled and not seen & {"fused_moe", *MLP_OPS}:
        seen.add("fused_moe")
        reason = f"{', '.join(experts)} does not use the experts interface of transformers"
        strict = "fused_moe" in request.named
        report.skipped.append(Skipped("", "fused_moe", reason, strict=strict))
    for family in (NORM_OPS, MLP_OPS, MIXER_OPS, *_ALONE):
        wanted = [op for op in family if op in request.enabled]
        missing = [op for op in wanted if op not in seen]
        for op in missing:
            named = op in request.named
            # most models have no experts, which is nothing to report
            if named or (len(missing) == len(wanted) and op in TOLD):
                reason = "the model has no module of this kind"
                if family is MLP_OPS and experts:
                    reason += f" (its experts, {', '.join(experts)}, are not patched)"
                report.skipped.append(Skipped("", op, reason, strict=named))
