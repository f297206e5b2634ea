"""Rows of logits: objective, statistics, gradients, and what a backend's row kernels do with them.

With ``z = cap * tanh(scale * raw / cap)``, ``p = softmax(z)``, ``lse = logsumexp(z)`` and
``log p = z - lse``, the cross entropy of a row is::

    ce = (1 - eps) w[t] (lse - z[t]) + eps / V * sum_j w[j] (lse - z[j])
    zl = z_loss_weight * lse^2

and the log-probability of a token, the entropy and lse have the gradients::

    d log_prob / dz[j] = [j = t] - p[j]
    d entropy  / dz[j] = -p[j] (log p[j] + entropy)
    d lse      / dz[j] = p[j]

Two differences would lose their digits. ``z - lse`` does where all logits have a common offset, so
``lse`` is kept in two numbers, :class:`LogSumExp`. ``p[t] - 1`` does where the target is nearly
certain: its gradient is ``expm1(log p[t])``, and the sum of exponentials is taken without that of
the maximum, whose 1 would swallow the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import row_blocks, statistics_dtype
from liger_multi.reference.cross_entropy.float8 import Rounding

# --- what a backend supplies ---


@dataclass(frozen=True)
class Objective:
    """How a row of raw logits becomes a loss."""

    ignore_index: int
    label_smoothing: float
    z_loss_weight: float
    softcap: float | None
    logit_scale: float = 1.0


def needs_argmax(outputs: str) -> bool:
    """Whether one of the comma-joined outputs is made from the place of a row's maximum."""
    return not {"argmax", "predicted_tokens", "token_accuracy"}.isdisjoint(outputs.split(","))


class LogSumExp(NamedTuple):
    """The log-sum-exp of every row, as the sum of two numbers of its dtype.

    ``high`` is the sum rounded, and ``low`` what rounding left out: without it, logits near 1e6
    would have probabilities that are 3 % off in fp32. Whatever a backend starts from (a maximum, or
    the target's logit) does not show in the two.
    """

    high: Tensor
    low: Tensor

    @staticmethod
    def of(shift: Tensor, log_sum: Tensor) -> LogSumExp:
        """``shift + log_sum`` in two numbers; ``error`` is the exact rounding error of ``high``."""
        high = shift + log_sum
        added = high - shift
        error = (shift - (high - added)) + (log_sum - added)
        return LogSumExp(high, torch.where(high.isfinite(), error, 0))

    def at(self, rows: Tensor | slice) -> LogSumExp:
        """The statistics of some rows."""
        return LogSumExp(self.high[rows].contiguous(), self.low[rows].contiguous())

    def below(self, z: Tensor) -> Tensor:
        """Log-probabilities of logits whose first axis is the rows."""
        shape = (-1,) + (1,) * (z.ndim - 1)
        return (z - self.high.view(shape)).sub_(self.low.view(shape))


class RowStats(NamedTuple):
    """Statistics of every row; ignored rows are 0 (-1 in ``argmax``). Unwanted ones are empty."""

    ce: Tensor
    zl: Tensor
    lse: Tensor
    lse_low: Tensor
    log_prob: Tensor
    entropy: Tensor
    argmax: Tensor

    @staticmethod
    def empty(
        rows: int,
        objective: Objective,
        outputs: str,
        tensor: Tensor,
        *,
        ignored: bool = False,
        loss: bool = True,
    ) -> RowStats:
        """Buffers on ``tensor``'s device for what loss and ``outputs`` need of ``rows`` rows."""
        requested, acc_dtype = outputs.split(","), statistics_dtype(tensor.dtype)
        zl = "z_loss" in requested or objective.z_loss_weight != 0
        needs = (loss, zl, True, True, "log_prob" in requested, "entropy" in requested)
        parts = [tensor.new_empty(rows if is_needed else 0, dtype=acc_dtype) for is_needed in needs]
        argmax_rows = rows if outputs and needs_argmax(outputs) else 0
        stats = RowStats._make((*parts, tensor.new_empty(argmax_rows, dtype=torch.int64)))
        if ignored:
            for part in filter(Tensor.numel, stats):
                part.fill_(-1 if part.dtype == torch.int64 else 0)
        return stats

    @property
    def normalizer(self) -> LogSumExp:
        """What backward subtracts from logits."""
        return LogSumExp(self.lse, self.lse_low)

    def put(self, rows: slice | Tensor, block: RowStats) -> None:
        """Write the statistics of a block of rows."""
        for buffer, part in zip(self, block, strict=True):
            if buffer.numel():
                buffer[rows] = part


class RowKernels(Protocol):
    """What a backend's row kernels do with a chunk of raw logits, and how it rounds to 8 bits."""

    rounding: Rounding

    def statistics(
        self, raw: Tensor, target: Tensor, weight: Tensor | None, objective: Objective, outputs: str
    ) -> RowStats:
        """Statistics of every row; ``raw`` is left alone."""

    def statistics_and_gradient_(
        self,
        raw: Tensor,
        target: Tensor,
        weight: Tensor | None,
        objective: Objective,
        scales: Tensor | None,
        outputs: str,
    ) -> RowStats:
        """Statistics; ``raw`` becomes the gradient of ``ce * scales[0] + zl * scales[1]``.

        Without scales, of ``ce + zl``.
        """

    def gradient_(
        self,
        raw: Tensor,
        target: Tensor,
        weight: Tensor | None,
        lse: LogSumExp,
        objective: Objective,
        dloss: Tensor,
    ) -> None:
        """Overwrite ``raw`` by its gradient; ``dloss`` has one value a row."""

    def results(
        self,
        rows: RowStats,
        target: Tensor,
        weight: Tensor | None,
        objective: Objective,
        reduction: str,
        outputs: str,
    ) -> tuple[Tensor, ...]:
        """The outputs of the contract from the statistics of all rows, and the divisors."""

    def scale(
        self,
        gradient: Tensor,
        factor: Tensor | None,
        dtype: torch.dtype,
        denominators: Tensor | None = None,
        overwrite: bool = False,
    ) -> Tensor:
        """A gradient times a factor of one element (None: one), rounded once to ``dtype``.

        With ``denominators`` the factor is divided by the second one, and 0 where that is 0. With
        ``overwrite`` the result may be written over the gradient.
        """


# --- cross entropy ---


def scaled(raw: Tensor, objective: Objective) -> Tensor:
    """Raw logits in the statistics dtype, scaled and capped."""
    z = raw.to(statistics_dtype(raw.dtype))
    if objective.logit_scale != 1.0:
        z = z * objective.logit_scale
    return z if objective.softcap is None else objective.softcap * torch.tanh(z / objective.softcap)


def _slope(raw: Tensor, objective: Objective) -> Tensor:
    """Derivative of the softcap; 1 - (z / cap)^2 has no digits near the cap."""
    x = raw.to(statistics_dtype(raw.dtype)) * (objective.logit_scale / (objective.softcap or 1.0))
    e = torch.exp(x.abs().mul_(-2))
    return 4 * e / (1 + e).square()


class _Sums(NamedTuple):
    """What the exponentials of a block of logits add up to, relative to the rows' maxima."""

    below: Tensor  # z less the maximum
    exponentials: Tensor  # of the former, but 0 at the maximum
    log_sum: Tensor
    lse: LogSumExp


def _sums(z: Tensor) -> _Sums:
    """The maximum's own 1 is added last, by log1p: beside it the others may be too small to add."""
    top, argmax = z.max(-1, keepdim=True)
    shifted = z - top
    exponentials = torch.exp(shifted).scatter_(1, argmax, 0)
    log_sum, top = torch.log1p(exponentials.sum(-1)), top.squeeze(1)
    high_part, low_part = LogSumExp.of(top, log_sum)
    return _Sums(
        shifted,
        exponentials,
        log_sum,
        LogSumExp(torch.where(top.isinf(), top, high_part), low_part),
    )


def log_sum_exp(z: Tensor) -> LogSumExp:
    """The log-sum-exp of rows of logits."""
    return _sums(z).lse


def _block_statistics(
    z: Tensor, target: Tensor, weight: Tensor | None, objective: Objective, outputs: str
) -> RowStats:
    valid = target != objective.ignore_index
    in_vocabulary = valid & (target >= 0) & (target < z.shape[-1])
    label = torch.where(in_vocabulary, target, 0).unsqueeze(1)
    shifted, exponentials, log_sum, lse = _sums(z)
    log_prob = lse.below(z.gather(1, label)).squeeze(1)
    w = None if weight is None else weight.to(z.dtype)
    ce = -log_prob if w is None else -log_prob * w[label.squeeze(1)]
    if objective.label_smoothing:
        eps, v = objective.label_smoothing, z.shape[-1]
        # sum w (lse - z), of what is relative to the maximum
        spread = v * log_sum - shifted.sum(-1) if w is None else w.sum() * log_sum - shifted @ w
        ce = (1 - eps) * ce + eps / v * spread
    zl = objective.z_loss_weight * lse.high.square()
    poison = torch.where(valid & ~in_vocabulary, float("nan"), 0.0)  # a target that is no class
    rows = [torch.where(valid, x, 0) for x in (ce + poison, zl, *lse, log_prob + poison)]
    requested = outputs.split(",")
    entropy = argmax = z.new_empty(0)
    if needs_argmax(outputs):
        argmax = torch.where(valid, (z == z.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1), -1)
    if "entropy" in requested:
        # -sum p log p of p = exp(below - log_sum), where terms of one sign are added
        weighted = torch.where(exponentials == 0, 0, shifted.mul_(exponentials)).sum(-1)
        entropy = torch.where(valid, log_sum - weighted / log_sum.exp(), 0)
    return RowStats._make((*rows, entropy, argmax))


def statistics(
    raw: Tensor, target: Tensor, weight: Tensor | None, objective: Objective, outputs: str
) -> RowStats:
    """Statistics of rows of raw logits, in blocks."""
    rows = RowStats.empty(raw.shape[0], objective, outputs, raw)
    for block in row_blocks(raw.shape[0], raw.shape[1] * 8):
        z = scaled(raw[block], objective)
        rows.put(block, _block_statistics(z, target[block], weight, objective, outputs))
    return rows


def pair(scales: Tensor | None, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of ``ce`` and ``zl``; without scales, two ones beside ``tensor``."""
    if scales is not None:
        return scales[0], scales[1]
    unit = tensor.new_ones(())
    return unit, unit


def gradient_into(
    out: Tensor,
    raw: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: LogSumExp,
    objective: Objective,
    scales: tuple[Tensor, Tensor],
) -> None:
    """Write the gradient of ``ce * scales[0] + zl * scales[1]`` by ``raw``; ``out`` may be ``raw``.

    Scales are scalars or one value a row. Ignored rows and rows with an impossible target get zero.
    """
    vocabulary, eps = raw.shape[-1], objective.label_smoothing
    for block in row_blocks(raw.shape[0], vocabulary * 8):
        z, t, log_sum = scaled(raw[block], objective), target[block], lse.at(block)
        ce, zl = [s if s.ndim == 0 else s[block].unsqueeze(1) for s in scales]
        valid = (t != objective.ignore_index) & (t >= 0) & (t < vocabulary)
        label = torch.where(valid, t, 0).unsqueeze(1)
        w = None if weight is None else weight.to(z.dtype)
        target_factor = ce * (1 - eps) * (z.new_ones(label.shape) if w is None else w[label])
        total = eps / vocabulary * (vocabulary if w is None else w.sum())
        grad_lse = ce * total + zl * (2 * objective.z_loss_weight) * log_sum.high.unsqueeze(1)
        log_p = log_sum.below(z.gather(1, label))
        of_target = grad_lse * torch.exp(log_p) + target_factor * torch.expm1(log_p)
        dz = (
            log_sum.below(z)
            .exp_()
            .mul_(target_factor + grad_lse)
            .scatter_(1, label, of_target.to(z.dtype))
        )
        if eps:
            dz -= ce * (eps / vocabulary) * (1 if w is None else w)
        if objective.softcap is not None:
            dz *= _slope(raw[block], objective)
        out[block] = torch.where(valid.unsqueeze(1), dz * objective.logit_scale, 0).to(out.dtype)


# --- log-probability, entropy and lse ---


class Upstream(NamedTuple):
    """Upstream gradients of rows.

    The gradient of ``z[j]`` is ``p[j] (grad_lse - entropy log p[j]) + grad_target ([j = t] -
    p[j])``: what arrives at log-probabilities is kept apart from ``grad_lse``, since ``1 - p[t]``
    would lose its digits in a sum with anything else. All are 0 for rows that get no gradient;
    ``entropy`` is None if it is not used.
    """

    grad_target: Tensor
    grad_lse: Tensor
    entropy: Tensor | None

    def at(self, rows: Tensor | slice) -> Upstream:
        """The gradients of a chunk's rows."""
        parts = (None if part is None else part[rows].contiguous() for part in self)
        return Upstream._make(parts)


def known_zero(gradient: Tensor) -> bool:
    """Whether a gradient is zero, as far as that can be told without waiting for a device."""
    return gradient.device.type == "cpu" and not gradient.any()


def upstream_of(
    log_prob: Tensor | None,
    entropy: Tensor | None,
    lse: Tensor | None,
    *,
    entropies: Tensor,
    target: Tensor,
    vocabulary: int,
    objective: Objective,
) -> Upstream:
    """From the gradients of the outputs; those of unused outputs are None or empty.

    A compiler passes zeros for an unused output. An entropy's are looked at where that needs no
    wait, since the terms of its gradient take a third of the time of all others.
    """
    valid = (target != objective.ignore_index) & (target >= 0) & (target < vocabulary)

    def or_none(d: Tensor | None) -> Tensor | None:
        # whatever arrives at a row without a valid target, NaN too, goes nowhere
        return torch.where(valid, d, 0) if d is not None and d.numel() else None

    if entropy is not None and known_zero(entropy):
        entropy = None
    grad_target, dentropy, grad_lse = or_none(log_prob), or_none(entropy), or_none(lse)
    zero = next(d for d in (grad_target, dentropy, grad_lse, target) if d is not None).new_zeros(())
    grad_target = zero.expand(target.shape) if grad_target is None else grad_target
    grad_lse = torch.zeros_like(grad_target) if grad_lse is None else grad_lse
    if dentropy is not None:
        grad_lse = grad_lse - dentropy * torch.where(valid, entropies, 0)
    return Upstream(grad_target, grad_lse, dentropy)


def within_range(
    upstream: Upstream, objective: Objective, dtype: torch.dtype
) -> tuple[Upstream, Tensor | None]:
    """Scale upstream gradients so that gradients of float16 logits neither vanish nor overflow.

    Returns also by what the sums over those gradients must be multiplied: a power of two, one
    element, never read by the host; None in dtypes whose range is wide.
    """
    if dtype != torch.float16 or not upstream.grad_target.numel():
        return upstream, None
    largest = torch.stack([part.abs().amax() for part in upstream if part is not None]).amax()
    largest = (largest * abs(objective.logit_scale)).clamp(min=2.0**-100)
    factor = torch.exp2(torch.log2(largest).floor() - 4)  # the largest becomes 16 to 32
    return Upstream._make(None if part is None else part / factor for part in upstream), factor


def gradient_(
    raw: Tensor, target: Tensor, lse: LogSumExp, objective: Objective, upstream: Upstream
) -> None:
    """Overwrite raw logits by their gradient."""
    vocabulary = raw.shape[-1]
    for block in row_blocks(raw.shape[0], vocabulary * 8):
        grad_target, grad_lse, entropy = (
            None if part is None else part.unsqueeze(1) for part in upstream.at(block)
        )
        assert grad_target is not None
        assert grad_lse is not None
        z, t = scaled(raw[block], objective), target[block]
        log_p = lse.at(block).below(z)
        label = torch.where((t >= 0) & (t < vocabulary), t, 0).unsqueeze(1)
        target_log_p = log_p.gather(1, label)
        p, p_own, factor, factor_own = torch.exp(log_p), torch.exp(target_log_p), grad_lse, grad_lse
        has_gradient = (grad_target != 0) | (grad_lse != 0)
        if entropy is not None:
            # a class without probability adds nothing, though its logarithm is infinite
            factor = factor - entropy * torch.where(p == 0, 0, log_p)
            factor_own = factor_own - entropy * torch.where(p_own == 0, 0, target_log_p)
            has_gradient |= entropy != 0
        of_target = p_own * factor_own - grad_target * torch.expm1(target_log_p)
        dz = p.mul_(factor - grad_target).scatter_(1, label, of_target.to(p.dtype))
        if objective.softcap is not None:
            dz *= _slope(raw[block], objective)
        raw[block] = torch.where(has_gradient, dz * objective.logit_scale, 0).to(raw.dtype)
