"""Distillation: a student's tokens against a teacher's distributions, and against labels.

    loss = soft_weight mean_i D(p[i], q[i]) + hard_weight mean_i -log q'[i, t[i]]

with the teacher's ``p`` and the student's ``q`` at a temperature, and ``q'`` without it. Tokens
whose target is ignored are ignored in both terms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi import checks, ops
from liger_multi.losses.one_pass import Columns, curved, tiled_sum, token_sum
from liger_multi.losses.sequence import sequence_loss
from liger_multi.losses.shared import (
    ABOVE_0,
    AT_LEAST_0,
    SHARE,
    Options,
    counting_mask,
    divisor,
    masked_mean,
)
from liger_multi.losses.sources import IGNORED, Head, Logits, Source, as_source, tokens
from liger_multi.ops import LogProbOutput
from liger_multi.ops._divergence_head import VOCABULARIES


@dataclass(frozen=True)
class TopK:
    """What a teacher says of its likeliest tokens.

    Args:
        ids: Their ids ``(..., K)``; negative ones stand for nothing.
        log_prob: Their log-probabilities ``(..., K)`` at the temperature of the loss; where the
            rest is renormalized away, logits divided by it serve as well.
    """

    ids: Tensor
    log_prob: Tensor

    def __post_init__(self) -> None:
        """Check the types of both."""
        checks.ids("TopK", "ids", self.ids)
        checks.floating("TopK", log_prob=self.log_prob)


Teacher: TypeAlias = Head | Logits | TopK | Tensor


class DistillationMetrics(NamedTuple):
    """What trainers log: means over tokens without gradients; None where there is no such thing."""

    soft: Tensor
    hard: Tensor | None
    tokens: Tensor
    entropy: Tensor | None = None
    token_accuracy: Tensor | None = None


class Divergence(NamedTuple):
    """The operator of two heads, that of rows (or a formula), what they take, and the source."""

    fused: str | None
    rows: str | Callable[..., Tensor]
    keywords: Callable[[Any], dict[str, Any]]
    source: str

    @property
    def of_rows(self) -> Callable[..., Tensor]:
        """What compares two rows."""
        return self.rows if callable(self.rows) else getattr(ops, self.rows)


def cosine(student: Tensor, teacher: Tensor) -> Tensor:
    """``1 - cos`` of rows of logits."""
    return 1 - F.cosine_similarity(student, teacher, dim=-1)


def _jsd(share: float | None) -> Callable[[Any], dict[str, Any]]:
    return lambda o: {"beta": o.beta if share is None else share}


DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": Divergence(
        "fused_linear_jsd", "jsd", _jsd(0.0), "KL(p, q), Hinton et al., arXiv:1503.02531"
    ),
    "reverse_kl": Divergence(
        "fused_linear_jsd", "jsd", _jsd(1.0), "KL(q, p), MiniLLM, arXiv:2306.08543"
    ),
    "jsd": Divergence(
        "fused_linear_jsd",
        "jsd",
        _jsd(None),
        "beta KL(p, m) + (1 - beta) KL(q, m), GKD, arXiv:2306.13649 eq. 1",
    ),
    "tvd": Divergence("fused_linear_tvd", "tvd", lambda o: {}, "sum |p - q| / 2, arXiv:2307.15190"),
    "cosine": Divergence(None, cosine, lambda o: {}, "1 - cos of logits, PKD, arXiv:1908.09355"),
}
RESTS = ("renormalize", "bucket")
FEW = ("forward_kl", "reverse_kl", "jsd", "tvd")


@dataclass(frozen=True, kw_only=True)
class DistillationOptions(Options):
    """Options of :func:`distillation_loss`.

    Args:
        divergence: One of the divergences.
        beta: Share of the teacher in jsd's mixture.
        temperature: Logits of both are divided by it, on top of the sources' own.
        square_temperature: Multiply the soft term by ``temperature^2``, which keeps gradients at
            the size that they have without one.
        soft_weight: Factor of the divergence.
        hard_weight: Factor of the labels' negative log-likelihood.
        vocabulary: Where the vocabularies differ in size, ``common`` compares the distributions
            over the first classes that both have; ``equal`` raises.
        rest: What becomes of the probability outside of a top-k teacher's tokens: ``renormalize``
            (both are distributions over those tokens) or ``bucket`` (one more class).
        metrics: Further metrics, which cost one more pass over the student's logits: entropy,
            token_accuracy.
    """

    divergence: str = "jsd"
    beta: float = 0.5
    temperature: float = 1.0
    square_temperature: bool = False
    soft_weight: float = 1.0
    hard_weight: float = 0.0
    vocabulary: str = "equal"
    rest: str = "renormalize"
    metrics: tuple[str, ...] = ()

    METRICS = ("entropy", "token_accuracy")
    WORDS = (("divergence", DIVERGENCES), ("vocabulary", VOCABULARIES), ("rest", RESTS))
    RANGES = (
        ("beta", SHARE),
        ("temperature", ABOVE_0),
        ("soft_weight", AT_LEAST_0),
        ("hard_weight", AT_LEAST_0),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.serves("beta", 0.5, self.divergence == "jsd", self.divergence)
        self.serves("square_temperature", False, self.divergence != "cosine", "cosine")
        if not self.soft_weight and not self.hard_weight:
            raise ValueError(f"{self.title()}: soft_weight and hard_weight are both 0")


def distillation_loss(
    student: Source,
    teacher: Teacher,
    target: Tensor,
    *,
    num_items: Tensor | float | None = None,
    processes: int = 1,
    group: Any = None,
    ignore_index: int = IGNORED,
    **options: Any,
) -> tuple[Tensor, DistillationMetrics]:
    """The loss of a student that learns from a teacher.

    Args:
        student: The trained model's tokens: a head or logits.
        teacher: The frozen model's: a head, of any width, or logits or :class:`TopK`. It gets no
            gradient.
        target: Ids ``(..., T)``, already shifted; the hard term's labels, and which tokens count.
        num_items: Tokens of all ranks and micro-batches of a step, which both means divide by;
            without it they are counted here: this batch, over the ranks of group.
        processes: Ranks whose gradients are averaged, with num_items.
        group: Ranks to count tokens over, by one collective, without num_items.
        ignore_index: Targets that cost nothing.
        options: As :class:`DistillationOptions`.
    """
    o = DistillationOptions.of(**options)
    typed_source = as_source("Distillation", student, target, "student")
    if not isinstance(typed_source, (Head, Logits)):
        raise TypeError("Distillation: the student must be a losses.Head or logits, got numbers")
    mask = counting_mask("Distillation", target, ignore_index)
    count = divisor("Distillation", mask, num_items, processes, group)
    total = (
        _soft(typed_source, teacher, target, ignore_index, o)
        if o.soft_weight
        else count.new_zeros(())
    )
    soft = total / count * (o.temperature**2 if o.square_temperature else 1.0)
    loss, hard = o.soft_weight * soft, None
    if o.hard_weight:
        hard, _ = sequence_loss(typed_source, target, num_items=count, ignore_index=ignore_index)
        loss = loss + o.hard_weight * hard
    entropy = accuracy = None
    if o.metrics:
        names = {"entropy": "entropy", "token_accuracy": "argmax"}
        requested = tuple(names[m] for m in o.metrics)
        with torch.no_grad():
            statistics = tokens(typed_source, target, requested, ignore_index=ignore_index)
        entropy = None if statistics.entropy is None else masked_mean(statistics.entropy, mask)
        if statistics.argmax is not None:
            accuracy = masked_mean((statistics.argmax == target).float(), mask)
    hard_loss = None if hard is None else hard.detach()
    return loss, DistillationMetrics(soft.detach(), hard_loss, mask.sum(), entropy, accuracy)


def _soft(
    student: Head | Logits,
    teacher: Teacher,
    target: Tensor,
    ignore_index: int,
    o: DistillationOptions,
) -> Tensor:
    """The divergence, summed over the tokens that count."""
    warm = replace(student, temperature=student.temperature * o.temperature)
    if isinstance(teacher, TopK):
        return _of_listed_classes(warm, teacher, target, ignore_index, o)
    teacher_source = as_source("Distillation", teacher, target, "teacher")
    if not isinstance(teacher_source, (Head, Logits)):
        raise TypeError("Distillation: the teacher must be a losses.Head, logits or losses.TopK")
    teacher_source = replace(teacher_source, temperature=teacher_source.temperature * o.temperature)
    if isinstance(warm, Logits):
        return _loss_of_logits(warm, teacher_source, target, ignore_index, o)
    plain = DIVERGENCES[o.divergence].fused is not None and _share_temperature(warm, teacher_source)
    options = (teacher_source, plain, target, ignore_index, o)
    return warm.run(lambda *student: _of_head(warm, student, *options))  # type: ignore[no-any-return]


def _share_temperature(student: Head, teacher: Head | Logits) -> bool:
    """Whether one temperature serves both heads, as the operators have it."""
    scales = {s.logit_scale / s.temperature for s in (student, teacher)}
    caps = (student.softcap, teacher.softcap)
    same_temperature = caps == (None, None) and len(scales) == 1 and min(scales) > 0
    return isinstance(teacher, Head) and same_temperature


def _of_head(
    student: Head,
    student_tensors: tuple[Any, ...],
    teacher: Head | Logits,
    plain: bool,
    target: Tensor,
    ignore_index: int,
    o: DistillationOptions,
) -> Tensor:
    """The sum of divergences of a student's head from a teacher's head or logits."""
    hidden, weight, bias = student_tensors
    divergence = DIVERGENCES[o.divergence]
    if isinstance(teacher, Logits):
        flat = teacher.logits.detach().reshape(target.numel(), -1)
        _same_size(weight.shape[0], flat.shape[-1], o)
        return _tiles(
            student, student_tensors, lambda i: curved(flat[i], teacher), target, ignore_index, o
        )

    def run(t_hidden: Tensor, t_weight: Tensor, t_bias: Tensor | None) -> Tensor:
        if plain and divergence.fused is not None:
            return getattr(ops, divergence.fused)(  # type: ignore[no-any-return]
                hidden,
                weight,
                t_hidden.detach(),
                t_weight.detach(),
                target,
                bias,
                t_bias,
                temperature=student.temperature / student.logit_scale,
                vocabulary=o.vocabulary,
                ignore_index=ignore_index,
                reduction="sum",
                chunk=student.chunk,
                accumulate=student.accumulate,
                compact=student.compact,
                **divergence.keywords(o),
            )
        _same_size(weight.shape[0], t_weight.shape[0], o)
        rows = t_hidden.detach().reshape(target.numel(), -1)

        def logits(i: Tensor) -> Tensor:
            with torch.no_grad():
                return curved(F.linear(rows[i].to(t_weight.dtype), t_weight, t_bias), teacher)

        return _tiles(student, student_tensors, logits, target, ignore_index, o)

    return teacher.run(run)  # type: ignore[no-any-return]


def _tiles(
    student: Head,
    student_tensors: tuple[Any, ...],
    teacher: Callable[[Any], Tensor],
    target: Tensor,
    ignore_index: int,
    o: DistillationOptions,
) -> Tensor:
    share = torch.ones(target.shape, dtype=torch.float32, device=target.device)
    return tiled_sum(student, student_tensors, teacher, target, share, _rows(o), ignore_index)


def _rows(o: DistillationOptions) -> Callable[[Tensor, Tensor], Tensor]:
    """A divergence of rows of logits at no temperature."""
    divergence = DIVERGENCES[o.divergence]

    def rows(student: Tensor, teacher: Tensor) -> Tensor:
        classes = min(student.shape[-1], teacher.shape[-1])
        student, teacher = student[..., :classes], teacher[..., :classes]
        if callable(divergence.rows):
            return divergence.of_rows(student, teacher)
        return divergence.of_rows(
            student,
            teacher,
            form="logits",
            teacher_form="logits",
            reduction="none",
            **divergence.keywords(o),
        )

    return rows


def _same_size(student: int, teacher: int, o: DistillationOptions) -> None:
    if student != teacher and o.vocabulary == "equal":
        raise ValueError(
            f"Distillation: the student has {student} classes and the teacher {teacher}; where the "
            f"first {min(student, teacher)} are the same tokens, vocabulary='common' compares "
            "the distributions over those"
        )


def _loss_of_logits(
    student: Logits,
    teacher: Head | Logits,
    target: Tensor,
    ignore_index: int,
    o: DistillationOptions,
) -> Tensor:
    if isinstance(teacher, Head):
        raise TypeError(
            "Distillation: the student's logits exist and the teacher's do not; give both as "
            "losses.Head, or the teacher's logits too"
        )
    _same_size(student.logits.shape[-1], teacher.logits.shape[-1], o)
    student_logits, teacher_logits = (
        curved(student.logits, student),
        curved(teacher.logits.detach(), teacher),
    )
    valid = target != ignore_index
    return torch.where(valid, _rows(o)(student_logits, teacher_logits), 0).sum()


# --- a teacher's likeliest tokens ---


def _of_listed_classes(
    student: Head | Logits,
    teacher: TopK,
    target: Tensor,
    ignore_index: int,
    o: DistillationOptions,
) -> Tensor:
    """The sum of divergences over the classes that a top-k teacher lists."""
    ids, log_p = teacher.ids, teacher.log_prob.detach()
    if ids.shape != log_p.shape or ids.shape[:-1] != target.shape:
        raise ValueError(
            f"Distillation: ids and log_prob of a top-k teacher must have shape "
            f"{(*target.shape, 'K')}, got {checks.describe(ids)} and {checks.describe(log_p)}"
        )
    if o.divergence not in FEW:
        raise ValueError(f"Distillation: {o.divergence} of a top-k teacher is not defined")
    columns = {"ids": ids, "teacher": log_p}
    passes = "one" if isinstance(student, Head) else "two"
    loss, _ = token_sum(
        student,
        target,
        _few_formula(o),
        columns,
        ("lse",),
        passes=passes,
        ignore_index=ignore_index,
        name="Distillation",
    )
    return loss


def _few_formula(o: DistillationOptions) -> Callable[[LogProbOutput, Columns], Tensor]:
    """The divergence of listed classes: renormalized, or with one class for all others."""
    divergence = DIVERGENCES[o.divergence]

    def formula(log_prob_output: LogProbOutput, c: Columns) -> Tensor:
        is_listed = (c["ids"] >= 0) & ~c["teacher"].isneginf()
        sides = [torch.where(is_listed, x.float(), -torch.inf) for x in (c["picked"], c["teacher"])]
        has_classes = is_listed.any(-1)
        # a row of nothing has no distribution; it costs nothing
        sides = [torch.where(has_classes.unsqueeze(-1), x, 0.0) for x in sides]
        if o.rest == "bucket":
            q, p = (torch.cat((x, _remainder(x)), -1) for x in sides)
        else:
            q, p = (x - torch.logsumexp(x, -1, keepdim=True) for x in sides)
        divergences = divergence.of_rows(
            q,
            p.detach(),
            form="log_prob",
            teacher_form="log_prob",
            reduction="none",
            **divergence.keywords(o),
        )
        return torch.where(has_classes, divergences, 0)

    return formula


def _remainder(log_p: Tensor) -> Tensor:
    """The logarithm of the probability that is left."""
    return torch.log(-torch.expm1(torch.logsumexp(log_p, -1, keepdim=True).clamp(max=-1e-7)))
