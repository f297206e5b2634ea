"""Losses of a vocabulary that is split over the processes of a group.

Every process has the logits, or the rows of the head's weight, of one contiguous part of the
classes, and all have the same targets (and hidden states). Only a few fp32 numbers per row are
communicated, never logits; all results are the same on every process of the group, and so is the
gradient of the hidden states.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.autograd import first_derivatives_only
from liger_multi.ops.fused_linear_log_prob import (
    LogProbOutput,
    op as of_head,
    prepared as prepared_head,
)
from liger_multi.ops.token_log_prob import op as of_logits, prepared as prepared_logits

SMOOTHINGS = ("torch", "megatron")
SMOOTHED = ("vocabulary", "part")
REDUCTIONS = ("mean", "sum", "none")


# --- between processes ---


class _Sum(torch.autograd.Function):
    """Sum over the group; the upstream gradient is the same on all processes already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @first_derivatives_only("nn.vocab_parallel_cross_entropy")
    def backward(ctx: Any, saved: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _Shared(torch.autograd.Function):
    """A tensor that all processes hold and each uses for its part: gradients are summed in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @first_derivatives_only("nn.vocab_parallel_cross_entropy")
    def backward(ctx: Any, saved: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, None]:
        total = dy.to(torch.promote_types(dy.dtype, torch.float32), copy=True)
        dist.all_reduce(total, group=ctx.group)
        return total.to(dy.dtype), None


def _sum(x: Tensor, group: Any) -> Tensor:
    output: Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return output


def _shared(x: Tensor, group: Any) -> Tensor:
    output: Tensor = _Shared.apply(x, group)  # type: ignore[no-untyped-call]
    return output


class _Joined(torch.autograd.Function):
    """Statistics over all classes from those of every process's part.

    Of the parts' normalizers the largest leaves its own 1 out of the sum, and differences are taken
    before anything is rounded: as within a part, an offset of all logits and a nearly certain
    target keep their digits, and the part with that target gets its gradient times ``1 - share``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        log_prob: Tensor,
        entropy: Tensor | None,
        lse: Tensor,
        lse_low: Tensor,
        is_local: Tensor,
        group: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        from liger_multi.reference.cross_entropy.rows import LogSumExp

        local_lse = torch.stack((lse, lse_low))
        rank_lses = [torch.empty_like(local_lse) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rank_lses, local_lse, group=group)
        high, low = torch.stack(rank_lses, 1)
        top, top_rank = high.max(0, keepdim=True)
        top_low = low.gather(0, top_rank)
        shifted = (high - top) + (low - top_low)
        log_sum = torch.exp(shifted).scatter_(0, top_rank, 0).sum(0).log1p_()
        share = shifted[dist.get_rank(group)] - log_sum  # a logarithm
        total = torch.where(is_local, log_prob + share, 0)
        dist.all_reduce(total, group=group)
        mixed = None
        if entropy is not None:  # of a mixture: that of the parts, and of which part
            mixed = torch.where(share == -math.inf, 0, share.exp() * (entropy - share))
            dist.all_reduce(mixed, group=group)
        joined = LogSumExp.of(top[0], top_low[0] + log_sum)
        ctx.save_for_backward(share, is_local, entropy, mixed)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(joined.low)
        return total, mixed, *joined

    @staticmethod
    @first_derivatives_only("nn.vocab_parallel_cross_entropy")
    def backward(
        ctx: Any,
        saved: tuple[Tensor, ...],
        dlog_prob: Tensor | None,
        dentropy: Tensor | None,
        dlse: Tensor | None,
        dlow: None,
    ) -> tuple[Tensor | None, ...]:
        """All processes have the same upstream gradients, so nothing is communicated."""
        share, is_local, entropy, mixed = saved
        part, out = share.exp(), torch.zeros_like(share)
        of_log_prob = of_entropy = None
        if dlog_prob is not None:
            of_log_prob = torch.where(is_local, dlog_prob, 0)
            out = out - dlog_prob * torch.where(is_local, torch.expm1(share), part)
        if dlse is not None:
            out = out + dlse * part
        if dentropy is not None:
            of_entropy = dentropy * part
            out = out + of_entropy * ((entropy - share) - mixed)
        return of_log_prob, of_entropy, torch.where(share == -math.inf, 0, out), None, None, None


# --- parts of a vocabulary ---


def vocab_range(vocabulary: int, group: Any = None) -> tuple[int, int]:
    """First and one past the last class of this process, as ``torch.chunk`` and DTensor split."""
    size = -(-vocabulary // dist.get_world_size(group))
    rank = dist.get_rank(group)
    return min(vocabulary, rank * size), min(vocabulary, (rank + 1) * size)


class _Part:
    """The classes of this process, and which rows have their target here."""

    def __init__(
        self,
        name: str,
        local: int,
        target: Tensor,
        vocabulary: int,
        start: int | None,
        group: Any,
        ignore_index: int,
    ) -> None:
        first, last = vocab_range(checks.integer(name, "vocabulary", vocabulary), group)
        if start is None and last - first != local:
            raise ValueError(
                f"{name}: process {dist.get_rank(group)} of {dist.get_world_size(group)} has the "
                f"classes {first} to {last} of {vocabulary}, got {local} of them; pass start= for "
                "another split"
            )
        first = first if start is None else checks.integer(name, "start", start)
        self.valid = target != checks.integer(name, "ignore_index", ignore_index)
        self.wrong = self.valid & ((target < 0) | (target >= vocabulary))
        if target.device.type == "cpu" and bool(self.wrong.any()):
            statistics = int(target[self.wrong][0])
            raise IndexError(f"{name}: target {statistics} is outside of [0, {vocabulary})")
        local_target = target - first
        self.is_local = self.valid & (local_target >= 0) & (local_target < local)
        # of rows whose target is elsewhere, only the normalizer is used
        self.target = torch.where(
            self.valid, torch.where(self.is_local, local_target, 0), ignore_index
        )


class _RowStatistics(NamedTuple):
    """Statistics of rows over the classes of this process."""

    log_prob: Tensor
    entropy: Tensor | None
    lse: Tensor
    lse_low: Tensor

    @staticmethod
    def of(results: tuple[Tensor, ...], rows: torch.Size) -> _RowStatistics:
        """Statistics from the outputs of an operator."""
        log_prob, entropy, lse, _, low = results
        mixed = entropy.view(rows) if entropy.numel() == lse.numel() else None
        return _RowStatistics(log_prob.view(rows), mixed, lse.view(rows), low.view(rows))

    @staticmethod
    def absent(rows: torch.Size, *unused: Tensor) -> _RowStatistics:
        """What a process with no class at all contributes, connected to its inputs."""
        wide = torch.promote_types(unused[0].dtype, torch.float32)
        nothing = sum(x.to(wide).sum() for x in unused) * torch.zeros(rows, dtype=wide).to(
            unused[0]
        )
        nothing = nothing.to(wide)
        return _RowStatistics(nothing, nothing, nothing - math.inf, torch.zeros_like(nothing))


def _joined_rows(
    part: _Part, statistics: _RowStatistics, entropies: bool, group: Any
) -> _RowStatistics:
    """The target's log-probability, the entropy and the normalizer over all classes."""
    apply: Any = _Joined.apply
    lse = torch.where(part.valid, statistics.lse, 0)
    entropy = statistics.entropy if entropies else None
    low = torch.where(part.valid, statistics.lse_low, 0)
    return _RowStatistics(*apply(statistics.log_prob, entropy, lse, low, part.is_local, group))


def _loss(
    part: _Part,
    log_prob: Tensor,
    spread: Tensor | None,
    vocabulary: int,
    label_smoothing: float,
    smoothing: str,
    reduction: str,
) -> Tensor:
    """The loss, with ``spread`` the mean over classes of what each costs."""
    loss = -log_prob
    if spread is not None:
        share = label_smoothing
        if smoothing == "megatron":
            share = label_smoothing * vocabulary / max(1, vocabulary - 1)
        loss = (1 - share) * loss + share * spread
    loss = torch.where(part.valid, torch.where(part.wrong, math.nan, loss), 0)
    if reduction == "none":
        return loss
    total = loss.sum()
    return total if reduction == "sum" else total / part.valid.sum().clamp(min=1)


def _options(
    name: str,
    target: Tensor,
    rows: torch.Size,
    logits_like: Tensor,
    label_smoothing: float,
    smoothing: str,
    reduction: str,
) -> None:
    checks.targets(name, target, rows, logits_like)
    checks.number(name, "label_smoothing", label_smoothing, 0.0, 1.0)
    checks.one_of(name, "smoothing", smoothing, SMOOTHINGS)
    checks.one_of(name, "reduction", reduction, REDUCTIONS)


# --- losses ---


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: Any = None,
    *,
    vocabulary: int,
    start: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing: str = "torch",
    smoothed: str = "vocabulary",
    softcap: float | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy of logits ``(..., V_local)``, the classes of this process.

    Args:
        logits: This process's columns.
        target: Ids of the whole vocabulary, the same on all processes.
        group: The processes that share the vocabulary; None for all.
        vocabulary: Classes of all processes together.
        start: First class of this process; None for the split of ``torch.chunk``.
        ignore_index: Rows with this target cost nothing.
        label_smoothing: Share of the uniform distribution over the whole vocabulary.
        smoothing: ``megatron`` takes ``label_smoothing * V / (V - 1)`` as that share.
        smoothed: ``part`` takes the uniform distribution over the classes of this process, and
            their number as ``V``, as Megatron-Core does: every process then has another loss.
        softcap: Logits become ``softcap * tanh(logits / softcap)``.
        reduction: mean (over valid rows), sum or none.

    Returns:
        The loss in fp32, the same on all processes; its gradient is that of this process's logits.
    """
    name = "vocab_parallel_cross_entropy"
    checks.floating(name, logits=logits)
    checks.one_of(name, "smoothed", smoothed, SMOOTHED)
    _options(name, target, logits.shape[:-1], logits, label_smoothing, smoothing, reduction)
    part = _Part(name, logits.shape[-1], target, vocabulary, start, group, ignore_index)
    if logits.shape[-1]:
        arguments = prepared_logits(
            logits,
            part.target,
            softcap=softcap,
            ignore_index=ignore_index,
            outputs=("log_prob", "lse"),
        )
        statistics = _RowStatistics.of(of_logits(*arguments), target.shape)
    else:
        statistics = _RowStatistics.absent(target.shape, logits)
    total = _joined_rows(part, statistics, False, group)
    spread, per_part = None, smoothed == "part"
    classes = max(1, logits.shape[-1]) if per_part else vocabulary
    if label_smoothing:
        wide = logits.to(total.lse.dtype)
        wide = wide if softcap is None else softcap * torch.tanh(wide / softcap)
        # relative to the normalizer before they are summed, so that no large numbers cancel
        base = total.lse.detach()
        sums = (wide - base.unsqueeze(-1)).sum(-1)
        spread = (
            total.lse - base + total.lse_low - (sums if per_part else _sum(sums, group)) / classes
        )
    return _loss(part, total.log_prob, spread, classes, label_smoothing, smoothing, reduction)


def vocab_parallel_fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    group: Any = None,
    *,
    vocabulary: int,
    bias: Tensor | None = None,
    start: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing: str = "torch",
    logit_scale: float = 1.0,
    softcap: float | None = None,
    reduction: str = "mean",
    reduce_hidden: bool = True,
    chunk: int | str = "auto",
) -> Tensor:
    """Cross entropy of ``hidden @ weight.T + bias`` whose logits never exist as a whole.

    The arguments are those of :func:`vocab_parallel_cross_entropy`; weight ``(V_local, H)`` and
    bias ``(V_local,)`` are this process's, hidden ``(..., H)`` is the same on all. The gradient of
    hidden is summed over the group in fp32; with ``reduce_hidden=False`` each process gets its
    part, for a caller that scatters the sum. ``logit_scale`` multiplies the logits, before the
    softcap. Label smoothing has no softcap beside it.
    """
    name = "vocab_parallel_fused_linear_cross_entropy"
    checks.floating(name, hidden=hidden, weight=weight, bias=bias, optional=("bias",))
    _options(name, target, hidden.shape[:-1], hidden, label_smoothing, smoothing, reduction)
    if label_smoothing and softcap is not None:
        raise ValueError(f"{name}: label_smoothing has no softcap beside it, got {softcap!r}")
    part, shared, statistics = _linear(
        name,
        hidden,
        weight,
        bias,
        target,
        group,
        vocabulary=vocabulary,
        start=start,
        ignore_index=ignore_index,
        reduce_hidden=reduce_hidden,
        outputs=("log_prob", "lse"),
        softcap=softcap,
        logit_scale=logit_scale,
        chunk=chunk,
    )
    total = _joined_rows(part, statistics, False, group)
    spread = None
    if label_smoothing:  # the sum of a row's logits is one product with the sum of the classes
        wide = total.lse.dtype
        sums = shared.to(wide) @ weight.to(wide).sum(0)
        sums = sums if bias is None else sums + bias.to(wide).sum()
        spread = total.lse - _sum(sums, group) * logit_scale / vocabulary
    return _loss(part, total.log_prob, spread, vocabulary, label_smoothing, smoothing, reduction)


def vocab_parallel_fused_linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    group: Any = None,
    *,
    vocabulary: int,
    bias: Tensor | None = None,
    start: int | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    reduce_hidden: bool = True,
    chunk: int | str = "auto",
    outputs: tuple[str, ...] = ("log_prob", "entropy", "lse"),
) -> LogProbOutput:
    """Log-probabilities of tokens, the rows' entropy and normalizer, over all processes' classes.

    As :func:`liger_multi.ops.fused_linear_log_prob`, for losses of policies and preferences; the
    other arguments are those of :func:`vocab_parallel_fused_linear_cross_entropy`.
    """
    name = "vocab_parallel_fused_linear_log_prob"
    checks.floating(name, hidden=hidden, weight=weight, bias=bias, optional=("bias",))
    checks.targets(name, target, hidden.shape[:-1], hidden)
    requested = checks.names(name, outputs, ("log_prob", "entropy", "lse")).split(",")
    names = ("log_prob", "entropy", "lse") if "entropy" in requested else ("log_prob", "lse")
    part, _, statistics = _linear(
        name,
        hidden,
        weight,
        bias,
        target,
        group,
        vocabulary=vocabulary,
        start=start,
        ignore_index=ignore_index,
        reduce_hidden=reduce_hidden,
        outputs=names,
        softcap=softcap,
        chunk=chunk,
        temperature=temperature,
    )
    total = _joined_rows(part, statistics, "entropy" in requested, group)
    zero = torch.zeros((), dtype=total.lse.dtype, device=total.lse.device)
    output = total._asdict() | {"log_prob": torch.where(part.wrong, math.nan, total.log_prob)}
    return LogProbOutput(**{n: torch.where(part.valid, output[n], zero) for n in requested})


def _linear(
    name: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    group: Any,
    vocabulary: int,
    start: int | None,
    ignore_index: int,
    reduce_hidden: bool,
    outputs: tuple[str, ...],
    **options: Any,
) -> tuple[_Part, Tensor, _RowStatistics]:
    """This process's part, the hidden states as it uses them, and what its classes say."""
    part = _Part(name, weight.shape[0], target, vocabulary, start, group, ignore_index)
    shared = _shared(hidden, group) if reduce_hidden else hidden
    if weight.shape[0]:
        arguments = prepared_head(
            shared, weight, part.target, bias, ignore_index=ignore_index, outputs=outputs, **options
        )
        statistics = _RowStatistics.of(of_head(*arguments), target.shape)
    else:
        statistics = _RowStatistics.absent(
            target.shape, shared, weight, *([] if bias is None else [bias])
        )
    return part, shared, statistics
