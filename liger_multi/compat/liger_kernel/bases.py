"""The base classes of ``liger_kernel.chunked_loss``, for losses that somebody writes on them.

A subclass has a static loss and a classmethod ``forward(cls, ctx, ...)`` that calls
``super().forward(cls=cls, ctx=ctx, ...)``. Gradients are made in forward and scaled in backward,
whose result is the gradient of every leading argument of the base's ``forward``. Losses of pairs,
of single answers and of policies get log-probabilities (:func:`liger_multi.losses.tokens`);
losses of distillation get blocks of rows of logits, whose number of rows this library chooses.
Logits of all rows are never held, and ``chunk_forward``, which would return them, is not there.

``compiled`` is taken and changes nothing, and so does ``chunk_size`` of the losses: the loss of a
token, once it is known, is a handful of numbers, and logits are chunked by bytes whatever the
batch. The base classes call the loss of a subclass with chunks of log-probabilities of that size.
The preference losses return ``(loss, (chosen log-probabilities, rejected ones, mean of the chosen
logits, mean of the rejected ones, NLL of the chosen, ...))``; what is
returned with the loss has no gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from liger_multi import losses, ops
from liger_multi.compat.liger_kernel.functional import wide
from liger_multi.compat.liger_kernel.signatures import ArgumentError
from liger_multi.dispatch.autograd import not_differentiable
from liger_multi.losses.one_pass import curved, mean_logits, tiled_sum
from liger_multi.losses.preference import pair_tokens, sequences
from liger_multi.losses.shared import divisor

Tensors = tuple[Tensor, Tensor, Tensor | None]
Made = tuple[Tensor, tuple[Tensor, ...]]


class _EagerGradients(torch.autograd.Function):
    """A loss whose gradients are made in forward."""

    OPTIONAL = 0
    """Arguments between the weight and the bias, which have no gradient."""
    AFTER = 0
    """Arguments after the bias for which backward returns None."""

    @staticmethod
    def run(
        ctx: Any, tensors: Tensors, loss: Callable[[Tensor, Tensor, Tensor | None], Made]
    ) -> Made:
        """Loss of detached tensors and what is returned with it; gradients stay with ``ctx``."""
        with torch.enable_grad():
            leaves = [
                None if x is None else x.detach().requires_grad_(x.requires_grad) for x in tensors
            ]
            value, metrics = loss(*leaves)  # type: ignore[arg-type]
        differentiable = [x for x in leaves if x is not None and x.requires_grad]
        gradients: Iterator[Tensor | None] = iter(())
        if differentiable and value.requires_grad:
            gradients = iter(torch.autograd.grad(value, differentiable, allow_unused=True))
        requires_grad = [x is not None and x.requires_grad for x in leaves]
        leaf_gradients = [next(gradients, None) if need else None for need in requires_grad]
        ctx.save_for_backward(*leaf_gradients)
        ctx.tensors = tensors  # not saved: they may be written to, as gradients are made
        return value.detach(), tuple(x.detach() for x in metrics)

    @classmethod
    def backward(cls, ctx: Any, *grad_output: Any) -> tuple[Tensor | None, ...]:
        """Gradients of hidden states, weight and bias, scaled; None for what lies between."""
        upstream: Any = grad_output[0]
        while isinstance(upstream, (tuple, list)):  # subclasses pass all of theirs as one argument
            upstream = upstream[0]
        gradients = ctx.saved_tensors
        scaled = [None if g is None else g * upstream for g in gradients]
        origins = (upstream, *gradients, *ctx.tensors)
        hidden, weight, bias = not_differentiable(cls.__name__, scaled, origins)
        return hidden, weight, *[None] * cls.OPTIONAL, bias, *[None] * cls.AFTER


def _chunks(count: int, size: int) -> list[slice]:
    """Bounds of chunks of ``size``; what does not divide is spread over them."""
    parts = torch.arange(count).chunk(max(1, count // size))
    return [slice(int(part[0]), int(part[-1]) + 1) for part in parts if len(part)]


class _Total:
    """The sum of the losses of chunks; beside it scalars are added and vectors joined."""

    def __init__(self) -> None:
        self.loss: Any = 0.0
        self.metrics: list[list[Tensor]] = []

    def add(self, value: Any) -> None:
        """What the loss of a chunk returned: a number, or one with others after it."""
        loss, *metrics = value if isinstance(value, (tuple, list)) else (value,)
        self.loss = self.loss + loss
        self.metrics.append([torch.as_tensor(x) for x in metrics])

    def aux(self) -> tuple[Tensor, ...]:
        """The numbers that are returned with the loss."""
        columns = zip(*self.metrics, strict=True)
        return tuple(torch.cat(x) if x[0].ndim else torch.stack(x).sum(0) for x in columns)


def _answers(
    head: losses.Head, target: Tensor, ignore_index: int, average: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens and of sequences."""
    log_prob = losses.tokens(head, target, ignore_index=ignore_index).log_prob
    assert log_prob is not None
    return log_prob, sequences(log_prob, target != ignore_index, None, average)


def reference_answers(
    name: str,
    use: bool,
    tensors: tuple[Any, Any, Any],
    target: Tensor,
    ignore_index: int,
    average: bool,
) -> Tensor | None:
    """Log-probabilities of sequences under the reference; None where it is not used."""
    if not use:
        return None
    if tensors[0] is None or tensors[1] is None:
        raise ArgumentError(f"{name}: use_ref_model needs ref_input and ref_weight, got None")
    with torch.no_grad():
        return _answers(losses.Head(*tensors), target, ignore_index, average)[1]


def every_logit(head: losses.Head, target: Tensor) -> Tensor:
    """The mean of the logits of every sequence, padding included, without gradients.

    It is in fp32 at least, also under autocast.
    """
    name = "the mean of all logits"
    return wide(mean_logits(head, torch.zeros_like(target), -100, name).mean(-1))


class LigerFusedLinearPreferenceBase(_EagerGradients):
    """A loss of pairs: the first half of the batch is chosen, the second rejected."""

    OPTIONAL = 1

    @staticmethod
    def preference_loss_fn(*args: Any, **kwargs: Any) -> Any:
        """``(chosen, rejected, full_target, beta=, ...)`` to the loss over the number of pairs."""
        raise NotImplementedError("preference_loss_fn: a subclass has to write it")

    @staticmethod
    def forward(
        cls: Any,
        ctx: Any,
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        chunk_size: int = 1,
        ignore_index: int = -100,
        alpha: float = 1.0,
        beta: float = 0.1,
        compute_nll_loss: bool = True,
        nll_target: Tensor | None = None,
        compiled: bool = True,
        use_ref_model: bool = False,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        average_log_prob: bool = True,
        **loss_kwargs: Any,
    ) -> Made:
        """Loss; log-probabilities, means of logits, NLL, and what else the subclass returns."""
        if target.shape[0] % 2:
            raise ArgumentError(
                f"{cls.__name__}: target must have an even number of rows, chosen before rejected, "
                f"got {target.shape[0]}"
            )
        labels = chosen_labels(cls.__name__, nll_target, target)
        reference = reference_answers(
            cls.__name__,
            use_ref_model,
            (ref_input, ref_weight, ref_bias),
            target,
            ignore_index,
            average_log_prob,
        )

        def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Made:
            head = losses.Head(hidden, weight, bias)
            _, sums, nll = pair_answers(head, target, labels, ignore_index, average_log_prob)
            nll = nll if compute_nll_loss else torch.zeros_like(nll)
            (chosen, rejected), total = sums.chunk(2), _Total()
            for part in _chunks(len(chosen), chunk_size):
                kwargs = dict(loss_kwargs)
                if reference is not None:
                    names = ("ref_chosen_logps", "ref_rejected_logps")
                    kwargs |= dict(zip(names, (b[part] for b in reference.chunk(2)), strict=True))
                total.add(
                    cls.preference_loss_fn(
                        chosen[part], rejected[part], target, beta=beta, **kwargs
                    )
                )
            means = [x.mean() for x in every_logit(head, target).chunk(2)]
            return alpha * nll + total.loss, (chosen, rejected, *means, nll, *total.aux())

        return cls.run(ctx, (_input, weight, bias), loss)  # type: ignore[no-any-return]


def pair_answers(
    head: losses.Head, target: Tensor, nll_target: Tensor | None, ignore_index: int, average: bool
) -> tuple[ops.LogProbOutput, Tensor, Tensor]:
    """Statistics of tokens, log-probabilities of sequences, and the chosen answers' mean NLL."""
    statistics, nll = pair_tokens(
        "LigerFusedLinear*Loss", head, target, nll_target, (), ignore_index
    )
    mask = target != ignore_index
    assert statistics.log_prob is not None
    return (
        statistics,
        sequences(torch.where(mask, statistics.log_prob, 0), mask, None, average),
        nll,
    )


def chosen_labels(name: str, nll_target: Tensor | None, target: Tensor) -> Tensor | None:
    """The chosen answers' rows of labels that were given for all answers, or for those alone."""
    if nll_target is None:
        return None
    count = target.shape[0] // 2
    if nll_target.shape[0] not in (count, 2 * count) or nll_target.shape[1:] != target.shape[1:]:
        raise ArgumentError(
            f"{name}: nll_target must have the shape {tuple(target.shape)} of target, or half of "
            f"its rows, got {tuple(nll_target.shape)}"
        )
    return nll_target[:count]


class LigerFusedLinearUnpairedPreferenceBase(_EagerGradients):
    """A loss of single answers that somebody liked or did not."""

    OPTIONAL = 2

    @staticmethod
    def preference_loss_fn(*args: Any, **kwargs: Any) -> Any:
        """``(log_probs, labels, full_target, ref_log_prob_chunk=, ...)`` to the loss."""
        raise NotImplementedError("preference_loss_fn: a subclass has to write it")

    @staticmethod
    def forward(
        cls: Any,
        ctx: Any,
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        preference_labels: Tensor,
        bias: Tensor | None = None,
        chunk_size: int = 1,
        ignore_index: int = -100,
        compiled: bool = True,
        use_ref_model: bool = False,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        average_log_prob: bool = False,
        **loss_kwargs: Any,
    ) -> Made:
        """Loss; sums of log-probabilities and logits over liked and other answers, and the rest."""
        reference = reference_answers(
            cls.__name__,
            use_ref_model,
            (ref_input, ref_weight, ref_bias),
            target,
            ignore_index,
            average_log_prob,
        )
        liked = preference_labels.bool()

        def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Made:
            head, total = losses.Head(hidden, weight, bias), _Total()
            _, sums = _answers(head, target, ignore_index, average_log_prob)
            for part in _chunks(len(sums), chunk_size):
                kwargs = {} if reference is None else {"ref_log_prob_chunk": reference[part]}
                total.add(
                    cls.preference_loss_fn(
                        sums[part], preference_labels[part], target, **kwargs, **loss_kwargs
                    )
                )
            logits = every_logit(head, target) * (target.shape[1] * weight.shape[0])
            return total.loss, (*by_side(liked, sums, logits), *total.aux())

        return cls.run(ctx, (_input, weight, bias), loss)  # type: ignore[no-any-return]


def by_side(liked: Tensor, *numbers: Tensor) -> tuple[Tensor, ...]:
    """Sums of numbers of answers, over those that somebody liked and over the others."""
    return tuple(torch.where(side, x, 0).sum() for x in numbers for side in (liked, ~liked))


class LigerFusedLinearPPOBase(_EagerGradients):
    """A loss of sampled answers."""

    OPTIONAL, AFTER = 3, 21

    @staticmethod
    def ppo_loss_fn(*args: Any, **kwargs: Any) -> Any:
        """``per_token_logps``, masks, advantages and options by name to the loss and metrics."""
        raise NotImplementedError("ppo_loss_fn: a subclass has to write it")

    @staticmethod
    def _compute_dapo_normalizer(
        attention_mask: Tensor, num_items_in_batch: Tensor | float | None = None
    ) -> Tensor:
        """Tokens of a step: the mean over ranks, at least one."""
        return divisor("DAPO", attention_mask, num_items_in_batch, *ranks())

    @staticmethod
    def forward(
        cls: Any,
        ctx: Any,
        _input: Tensor,
        weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        beta: float = 0.04,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        temperature: float = 1.0,
        compiled: bool = True,
        use_ref_model: bool = False,
        chunk_size: int = 1,
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        vllm_is_ratio: Tensor | None = None,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        num_items_in_batch: Tensor | float | None = None,
    ) -> Made:
        """Loss, and the metrics of the subclass."""
        options = {
            "full_attention_mask": attention_mask,
            "epsilon_low": epsilon_low,
            "epsilon_high": epsilon_high,
            "beta": beta,
            "loss_type": loss_type,
            "max_completion_length": max_completion_length,
            "importance_sampling_level": importance_sampling_level,
            "sapo_temperature_pos": sapo_temperature_pos,
            "sapo_temperature_neg": sapo_temperature_neg,
            "delta": delta,
            "use_bias_correction_kl": use_bias_correction_kl,
            "vespo_k_pos": vespo_k_pos,
            "vespo_lambda_pos": vespo_lambda_pos,
            "vespo_k_neg": vespo_k_neg,
            "vespo_lambda_neg": vespo_lambda_neg,
            "num_items_in_batch": num_items_in_batch,
        }
        check_policy(
            cls.__name__,
            loss_type,
            max_completion_length,
            use_ref_model,
            (ref_per_token_logps, ref_input),
        )
        ids = selected_token_ids
        if use_ref_model and ref_per_token_logps is None:
            assert ref_input is not None
            assert ref_weight is not None
            with torch.no_grad():
                ref_per_token_logps = LigerFusedLinearPPOBase.chunk_forward(
                    ref_input, ref_weight, ids, ref_bias, temperature
                )
        columns = {
            "attention_mask": attention_mask,
            "advantages": advantages,
            "ref_per_token_logps": ref_per_token_logps,
            "old_per_token_logps": old_per_token_logps,
            "vllm_is_ratio": sampler_ratios(cls.__name__, vllm_is_ratio, ids),
        }

        def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Made:
            total = _Total()
            log_probs = LigerFusedLinearPPOBase.chunk_forward(
                hidden, weight, ids, bias, temperature
            )
            for part in _chunks(len(log_probs), chunk_size):
                kwargs = {k: None if x is None else x[part] for k, x in columns.items()}
                value, metrics = cls.ppo_loss_fn(
                    per_token_logps=log_probs[part], **kwargs, **options
                )
                total.add((value, *metrics))
            return total.loss, total.aux()

        return cls.run(ctx, (_input, weight, bias), loss)  # type: ignore[no-any-return]

    @staticmethod
    def chunk_forward(
        input_chunk: Tensor,
        weight: Tensor,
        selected_token_ids: Tensor,
        bias: Tensor | None = None,
        temperature: float = 1.0,
    ) -> Tensor:
        """Log-probabilities of tokens in fp32; logits are never there as a whole."""
        head = losses.Head(input_chunk, weight, bias, temperature=temperature)
        log_prob = losses.tokens(head, selected_token_ids).log_prob
        assert log_prob is not None
        return log_prob


def ranks() -> tuple[int, Any]:
    """How many processes train together, and their group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1, None
    return dist.get_world_size(), dist.group.WORLD


def check_policy(
    name: str, loss_type: str, length: int | None, use_reference: bool, reference: tuple[Any, Any]
) -> None:
    """Check that a policy loss has the inputs that it needs."""
    if use_reference and all(columns is None for columns in reference):
        raise ArgumentError(
            f"{name}: If use_ref_model is True, ref_per_token_logps or ref_input must be provided"
        )
    if use_reference and all(columns is not None for columns in reference):
        warnings.warn(
            f"{name}: Both ref_per_token_logps and ref_input are provided. Using "
            "ref_per_token_logps.",
            stacklevel=3,
        )
    if loss_type == "dr_grpo" and length is None:
        raise ArgumentError(
            f"{name}: max_completion_length must be provided for loss_type 'dr_grpo'"
        )


def sampler_ratios(name: str, ratios: Tensor | None, ids: Tensor) -> Tensor | None:
    """Ratios to the sampler's policy with two axes."""
    if ratios is None:
        return None
    ratios = ratios.unsqueeze(1) if ratios.ndim == 1 else ratios
    rows, length = ids.shape
    if tuple(ratios.shape) not in ((rows, 1), (rows, length)):
        raise ArgumentError(
            f"{name}: vllm_is_ratio shape must be ({rows}, 1) or ({rows}, {length}), got "
            f"{tuple(ratios.shape)}"
        )
    return ratios


class LigerFusedLinearDistillationBase(_EagerGradients):
    """A loss of a student's and a teacher's logits, added to the cross entropy of labels."""

    OPTIONAL = 3

    @staticmethod
    def distillation_loss_fn(
        student_logits: Tensor,
        teacher_logits: Tensor,
        target: Tensor | None = None,
        ignore_index: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The sum of the losses of rows of logits, which the temperature has divided."""
        raise NotImplementedError("distillation_loss_fn: a subclass has to write it")

    @staticmethod
    def forward(
        cls: Any,
        ctx: Any,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        target: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        chunk_size: int = 1024,
        ignore_index: int = -100,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float | None = 0.5,
        compute_ce_loss: bool = True,
        temperature: float = 1.0,
        compiled: bool = True,
        return_soft_hard_loss: bool = False,
        **loss_kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """The loss, and where asked for its soft and its hard term."""
        if not temperature:
            raise ArgumentError(f"{cls.__name__}: Temperature cannot be 0.")
        labels = target.reshape(-1)
        count = (labels != ignore_index).sum().clamp(min=1)
        kwargs = {"ignore_index": ignore_index, "beta": beta, **loss_kwargs}

        def rows(student: Tensor, teacher: Any) -> Tensor:
            logits, ids = teacher
            classes = min(student.shape[-1], logits.shape[-1])
            total = cls.distillation_loss_fn(
                student[..., :classes], logits[..., :classes], target=ids, **kwargs
            )
            return F.pad(total.reshape(1), (0, len(ids) - 1))  # a sum over rows is a row's

        def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Made:
            head = losses.Head(hidden.reshape(len(labels), -1), weight, bias)
            teacher = losses.Head(
                teacher_input.reshape(len(labels), -1),
                teacher_weight,
                teacher_bias,
                temperature=temperature,
            )
            soft = _soft(head, teacher, labels, rows) / count
            hard = torch.zeros_like(soft)
            if compute_ce_loss:
                hard = (
                    ops.fused_linear_cross_entropy(
                        head.hidden,
                        weight,
                        labels,
                        bias,
                        ignore_index=ignore_index,
                        reduction="sum",
                    )
                    / count
                )
            return weight_hard_loss * hard + weight_soft_loss * soft, (soft, hard)

        total, terms = cls.run(ctx, (student_input, student_weight, student_bias), loss)
        ctx.mark_non_differentiable(*terms)
        return (total, *terms) if return_soft_hard_loss else total


def _soft(
    student: losses.Head,
    teacher: losses.Head,
    labels: Tensor,
    rows: Callable[[Tensor, Any], Tensor],
) -> Tensor:
    """The sum over all rows, ignored ones too: which count is what the loss says."""
    warm = losses.Head(
        student.hidden, student.weight, student.bias, temperature=teacher.temperature
    )

    def teacher_rows(i: Tensor) -> Any:
        weight: Any = teacher.weight
        with torch.no_grad():
            raw = F.linear(teacher.hidden[i].to(weight.dtype), weight, teacher.bias)
            return curved(raw, teacher), labels[i]

    all_rows = torch.zeros_like(labels)
    share = torch.ones(labels.shape, dtype=torch.float32, device=labels.device)
    tensors: Any = (student.hidden, student.weight, student.bias)
    return tiled_sum(warm, tensors, teacher_rows, all_rows, share, rows, -100)
