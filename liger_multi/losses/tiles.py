"""Losses of rows of logits that no statistics of rows can tell: a block of rows at a time.

A chunk of the student's logits becomes its own gradient, as in :mod:`one_pass`, by autograd through
a function of logits on blocks of a few rows. So any function of rows is a loss of a head that never
holds rows x vocabulary; its temporaries are a block's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_multi.losses.one_pass import in_one_pass
from liger_multi.losses.row_kernels import row_kernels
from liger_multi.losses.sources import Head, Logits, Source, as_source
from liger_multi.ops import LogProbOutput
from liger_multi.ops.fused_linear_log_prob import prepared

RowLoss = Callable[[Tensor, Tensor], Tensor]
"""Losses of rows from the student's and the teacher's logits in fp32, both curved."""


def curved(raw: Tensor, source: Any) -> Tensor:
    """Logits in fp32 under the scale, softcap and temperature of a source."""
    z = raw.to(torch.float64 if raw.dtype == torch.float64 else torch.float32)
    z = z * source.logit_scale if source.logit_scale != 1.0 else z
    z = z if source.softcap is None else source.softcap * torch.tanh(z / source.softcap)
    return z if source.temperature == 1.0 else z / source.temperature


def tiled_sum(
    head: Head, tensors: tuple[Tensor, Tensor, Tensor | None], teacher: Callable[[Any], Tensor],
    target: Tensor, share: Tensor, function: RowLoss, ignore_index: int,
) -> Tensor:  # fmt: skip
    """The sum of a function of rows, weighted.

    Args:
        head: Scale, softcap and memory plan of the student.
        tensors: Its hidden states, weight and bias.
        teacher: From numbers of rows to the teacher's logits of those, curved.
        target: Ids ``(...)``; ignored rows are dropped.
        share: Weights of rows, of the target's shape.
        function: The loss of a row.
        ignore_index: Targets that cost nothing.
    """
    hidden, weight, bias = tensors
    args = prepared(
        hidden, weight, target, bias, ignore_index=ignore_index, outputs=("lse",), **head.options()
    )
    flat = share.reshape(-1)

    def one_pass(needs: tuple[bool, ...]) -> tuple[Tensor, tuple[Tensor, ...], Any]:
        return _pass_over_tiles(head, args, teacher, flat, function, needs)

    kernels = row_kernels(tensors, args)
    if kernels is None:
        raise ValueError(
            "a loss of rows of logits without an operator of its own (a softcap, two scales, or "
            "cosine) is not available under a compiler, nor for tensors that are no plain ones"
        )
    return in_one_pass(args[0], args[1], args[3], kernels.scale, one_pass)[0]


def _pass_over_tiles(
    head: Head, args: tuple[Any, ...], teacher: Callable[[Any], Tensor], share: Tensor,
    function: RowLoss, needs: tuple[bool, ...],
) -> tuple[Tensor, tuple[Tensor, ...], Any]:  # fmt: skip
    from liger_multi.reference.common.chunking import row_blocks
    from liger_multi.reference.cross_entropy.fused_linear import Accumulator, Chunks, ChunkSpec
    from liger_multi.reference.cross_entropy.rows import Objective

    hidden, weight, target, bias, ignore_index = args[:5]
    chunk, budget, accumulate, kind, compact = args[7:12]
    spec = Objective(ignore_index, 0.0, 0.0, None)
    chunks = Chunks(hidden, weight, target, bias, spec, ChunkSpec(chunk, budget, kind, compact))
    into = Accumulator(chunks, hidden, weight, accumulate, needs)
    total = share.new_zeros(())
    for place, where, h, t, raw in chunks:
        rows = torch.arange(len(target), device=target.device)[where]
        for block in row_blocks(raw.shape[0], raw.shape[1] * 16):
            part = share[where][block] * (t[block] != ignore_index)
            with torch.set_grad_enabled(any(needs)):
                leaf = raw[block].detach().requires_grad_(any(needs))
                each = function(curved(leaf, head), teacher(rows[block]))
                value = (torch.where(part != 0, each, 0) * part).sum()
                if any(needs):
                    raw[block] = torch.autograd.grad(value, leaf)[0]
            total += value.detach()
        if any(needs):
            into.add(place, where, h, raw)
    return total, (), into.gradients


def mean_logits(source: Source, target: Tensor, ignore_index: int, name: str) -> Tensor:
    """The mean of every token's logits, without gradients; 0 where the target is ignored."""
    found = as_source(name, source, target)
    if isinstance(found, LogProbOutput):
        raise ValueError(f"{name}: the mean of logits needs a losses.Head or logits, got neither")
    valid = target != ignore_index
    with torch.no_grad():
        if isinstance(found, Logits):
            return torch.where(valid, curved(found.logits, found).mean(-1), 0)
        head = found

        def run(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if head.softcap is None:  # linear, so one product with the mean of the classes
                mean = hidden.float() @ weight.mean(0, dtype=torch.float32)
                mean = mean if bias is None else mean + bias.float().mean()
                return torch.where(valid, mean * (head.logit_scale / head.temperature), 0)
            return _mean_rows(head, (hidden, weight, bias), target, ignore_index)

        made: Tensor = head.run(run)
        return made


def _mean_rows(
    head: Head, tensors: tuple[Tensor, Tensor, Tensor | None], target: Tensor, ignore_index: int
) -> Tensor:
    from liger_multi.reference.cross_entropy.fused_linear import Chunks, ChunkSpec
    from liger_multi.reference.cross_entropy.rows import Objective

    hidden, weight, bias = tensors
    args = prepared(
        hidden, weight, target, bias, ignore_index=ignore_index, outputs=("lse",), **head.options()
    )
    spec = Objective(ignore_index, 0.0, 0.0, None)
    plan = ChunkSpec(args[7], args[8], args[10], args[11])
    found = torch.zeros(target.numel(), dtype=torch.float32, device=target.device)
    with torch._C._DisableAutocast():
        for _, where, _, _, raw in Chunks(args[0], args[1], args[2], args[3], spec, plan):
            found[where] = curved(raw, head).mean(-1).float()
    return torch.where(target != ignore_index, found.view(target.shape), 0)
