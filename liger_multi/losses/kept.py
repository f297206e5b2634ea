"""Log-probabilities whose logits stay until backward, where a byte budget allows it.

Losses of pairs and of sequences know what arrives at a token only when all tokens are known, so
without logits they look at the vocabulary twice. Where the logits of all rows fit into a budget,
they are kept and overwritten by their gradient: three products of the head, not four.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_multi.dispatch.config_file import parse_bytes
from liger_multi.dispatch.double_backward import first_derivatives_only
from liger_multi.losses.row_kernels import on_device, row_kernels
from liger_multi.ops import LogProbOutput
from liger_multi.ops.fused_linear_log_prob import OUTPUTS

LEAST_SHARE = 8  # an eighth of the rows, or it is not worth a chunk of its own


def kept_tokens(
    tensors: tuple[Tensor | None, ...], args: tuple[Any, ...], target: Tensor, keep: int | str
) -> LogProbOutput | None:
    """Statistics of tokens with gradients; None where too few of their logits can be kept."""
    from liger_multi.reference.common.chunking import is_whole, whole_steps

    hidden, weight, size = args[0], args[1], (args[10] or args[0].dtype).itemsize
    rows, width = hidden.shape
    if keep == "auto":
        fit = rows if is_whole(rows, width, weight.shape[0], size, args[7], args[8]) else 0
    else:
        limit = parse_bytes(keep, "keep of Head") if isinstance(keep, str) else keep
        fit = min(rows, whole_steps(limit // max(1, weight.shape[0] * size)))
    if fit * LEAST_SHARE < rows:
        return None
    kernels = row_kernels(tensors, args)
    if kernels is None:
        return None
    apply: Any = _Kept.apply
    found = apply(hidden, weight, args[3], kernels, args, fit)
    asked = args[-1].split(",")
    return LogProbOutput(
        **{n: x.view(target.shape) for n, x in zip(OUTPUTS, found, strict=True) if n in asked}
    )


class _Kept(torch.autograd.Function):
    """A first chunk whose logits stay, and the others."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kernels: Any,
        args: Any,
        fit: int,
    ) -> tuple[Tensor, ...]:
        from liger_multi.reference.cross_entropy.reduction import check_targets
        from liger_multi.reference.cross_entropy.rows import RowStats

        ctx.kernels, ctx.rest, ctx.fit, ctx.kept = kernels, args[4:], fit, None
        target, outputs = args[2], args[-1]
        check_targets(target, weight.shape[0], args[4], args[12])
        with torch._C._DisableAutocast(), on_device(hidden):
            chunks = _chunks(args, fit)
            rows = RowStats.empty(
                target.numel(), chunks.spec, outputs, chunks.buffer,
                ignored=chunks.index is not None, loss=False,
            )  # fmt: skip
            ctx.kept = chunks.first()
            for _, where, _, t, raw in chunks.over(ctx.kept):
                rows.put(where, kernels.statistics(raw, t, None, chunks.spec, outputs))
        ctx.save_for_backward(*args[:4], rows.entropy, rows.lse)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(rows.argmax)
        return rows.log_prob, rows.entropy, rows.lse, rows.argmax

    @staticmethod
    @first_derivatives_only("losses (with logits that are kept)")
    def backward(ctx: Any, saved: tuple[Any, ...], *grads: Tensor | None) -> tuple[Any, ...]:
        from liger_multi.reference.cross_entropy.fused_linear import Accumulator
        from liger_multi.reference.cross_entropy.rows import upstream_of, within_range

        if all(g is None for g in grads[:3]):
            return (None,) * 6
        *tensors, entropy, lse = saved
        hidden, weight, target, bias = tensors
        kept, ctx.kept = ctx.kept, None  # a second backward multiplies again
        with torch._C._DisableAutocast(), on_device(hidden):
            chunks = _chunks((*tensors, *ctx.rest), ctx.fit)
            ready = kept is not None
            kept = chunks.first() if kept is None else kept
            chunks.widen(kept)
            into = Accumulator(chunks, hidden, weight, ctx.rest[5], ctx.needs_input_grad[:3])
            arrived = upstream_of(
                *grads[:3], entropies=entropy, target=target, vocabulary=weight.shape[0],
                objective=chunks.spec,
            )  # fmt: skip
            upstream, factor = within_range(arrived, chunks.spec, chunks.kind)
            for place, where, h, t, raw in chunks.over(kept, ready):
                ctx.kernels.log_prob_gradient_(
                    raw, t, lse[where].contiguous(), chunks.spec, upstream.at(where)
                )
                into.add(place, where, h, raw)
            kinds = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
            scale = ctx.kernels.scale
            made = [scale(g, factor, k) for g, k in zip(into.gradients, kinds, strict=True)]
        found = [g if need else None for g, need in zip(made, ctx.needs_input_grad, strict=False)]
        return (*found, None, None, None)


def _chunks(args: tuple[Any, ...], fit: int) -> Any:
    """Chunks of which the first has the rows that fit."""
    from liger_multi.reference.common.chunking import row_blocks
    from liger_multi.reference.cross_entropy.fused_linear import Chunks, ChunkSpec
    from liger_multi.reference.cross_entropy.rows import Objective

    class Kept(Chunks):
        spec = Objective(args[4], 0.0, 0.0, args[5], args[6])

        def first(self) -> Tensor:
            """Room for the logits that stay; where these are all, the buffer itself."""
            if self.buffer.shape[0] == self.rows:
                return self.buffer
            return self.buffer.new_empty(min(fit, self.rows), self.weight.shape[0])

        def widen(self, kept: Tensor) -> None:
            """The others take the place of the first chunk, once that is done with."""
            if kept.shape[0] > self.buffer.shape[0]:
                self.buffer, self.step = kept, kept.shape[0]

        def over(self, kept: Tensor, ready: bool = False) -> Any:
            edge = kept.shape[0]
            if edge:
                yield self.at(slice(0, edge), kept, ready)
            for part in row_blocks(self.rows - edge, 1, self.step):
                place = slice(edge + part.start, edge + part.stop)
                yield self.at(place, self.buffer[: part.stop - part.start])

    hidden, weight, target, bias = args[:4]
    chunk, budget = args[7:9] if fit < target.numel() else (max(1, target.numel()), 0)
    plan = ChunkSpec(chunk, budget, args[10], args[11])
    return Kept(hidden, weight, target, bias, Kept.spec, plan)
