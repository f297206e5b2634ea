"""Losses whose options and arguments are those of an operator.

Options are checked when the module is made, tensors when it is called.
"""

from torch import nn

from liger_multi.nn._shared import from_operator

ROWS = "The loss of rows of the student against the teacher's."
HEADS = "The loss of the student's head against the teacher's."


@from_operator("kl_div", ROWS, without="inplace")
class KLDivLoss(nn.Module):
    """KL divergence.

    Like:
        ``torch.nn.KLDivLoss``: its ``batchmean`` is ``mean`` here, its ``log_target`` a form.

    Operator:
        kl_div

    Args:
        form: What the student's rows are: log_prob, prob or logits.
        teacher_form: What the teacher's are.
        temperature: Logits are divided by it.
        ignore_index: Rows with this target cost nothing.
        reduction: mean (over rows), sum or none (a number a row).
    """


@from_operator("jsd", ROWS, positional="beta", without="inplace")
class JSDLoss(nn.Module):
    """Jensen-Shannon divergence, of weight ``beta``.

    Like:
        The generalized divergence of knowledge distillation (arXiv:2306.13649).

    Operator:
        jsd

    Args:
        beta: Share of the teacher in the mixture; the ends are one-sided.
        form: What the student's rows are: log_prob, prob or logits.
        teacher_form: What the teacher's are; None: the same.
        temperature: Logits are divided by it.
        ignore_index: Rows with this target cost nothing.
        reduction: mean (over rows), sum or none (a number a row).
    """


@from_operator("tvd", ROWS, without="inplace")
class TVDLoss(nn.Module):
    """Total variation distance.

    Like:
        Half of ``torch.nn.L1Loss`` with sums over classes.

    Operator:
        tvd

    Args:
        form: What the student's rows are: log_prob, prob or logits.
        teacher_form: What the teacher's are; None: the same.
        temperature: Logits are divided by it.
        ignore_index: Rows with this target cost nothing.
        reduction: mean (over rows), sum or none (a number a row).
    """


@from_operator("fused_linear_kl_div", HEADS)
class FusedLinearKLDivLoss(nn.Module):
    """KL divergence of two linear heads.

    Like:
        Two ``torch.nn.Linear`` and a divergence of their softmax; the heads' parameters are
        arguments of the call.

    Operator:
        fused_linear_kl_div

    Args:
        temperature: Logits of both are divided by it.
        square_temperature: Multiply the loss by its square.
        vocabulary: equal, or common to compare the first classes that both have.
        ignore_index: Rows with this target are dropped.
        reduction: mean (over rows), sum or none (a number a row).
        chunk: Rows of logits at a time, a byte budget such as "512MiB", or auto.
        accumulate: Dtype in which the gradient of the weight is summed.
        compact: Drop ignored rows before the products; on a device, of more than 512 rows.
    """


@from_operator("fused_linear_jsd", HEADS, positional="beta")
class FusedLinearJSDLoss(nn.Module):
    """Jensen-Shannon divergence of two linear heads.

    Like:
        Two ``torch.nn.Linear`` and a divergence of their softmax; the heads' parameters are
        arguments of the call.

    Operator:
        fused_linear_jsd

    Args:
        beta: Share of the teacher in the mixture; the ends are one-sided.
        temperature: Logits of both are divided by it.
        square_temperature: Multiply the loss by its square.
        vocabulary: equal, or common to compare the first classes that both have.
        ignore_index: Rows with this target are dropped.
        reduction: mean (over rows), sum or none (a number a row).
        chunk: Rows of logits at a time, a byte budget such as "512MiB", or auto.
        accumulate: Dtype in which the gradient of the weight is summed.
        compact: Drop ignored rows before the products; on a device, of more than 512 rows.
    """


@from_operator("fused_linear_tvd", HEADS)
class FusedLinearTVDLoss(nn.Module):
    """Total variation distance of two linear heads.

    Like:
        Two ``torch.nn.Linear`` and a divergence of their softmax; the heads' parameters are
        arguments of the call.

    Operator:
        fused_linear_tvd

    Args:
        temperature: Logits of both are divided by it.
        square_temperature: Multiply the loss by its square.
        vocabulary: equal, or common to compare the first classes that both have.
        ignore_index: Rows with this target are dropped.
        reduction: mean (over rows), sum or none (a number a row).
        chunk: Rows of logits at a time, a byte budget such as "512MiB", or auto.
        accumulate: Dtype in which the gradient of the weight is summed.
        compact: Drop ignored rows before the products; on a device, of more than 512 rows.
    """


@from_operator(
    "fused_linear_cross_entropy",
    "The loss of ``hidden @ weight.T + bias``.",
    positional="class_weight ignore_index reduction label_smoothing",
)
class FusedLinearCrossEntropyLoss(nn.Module):
    """Cross entropy of a linear head, without holding the logits of all rows.

    Like:
        ``torch.nn.Linear`` and ``torch.nn.CrossEntropyLoss`` behind it; the head's parameters are
        arguments of the call, ``loss(hidden, head.weight, target, head.bias)``.

    Operator:
        fused_linear_cross_entropy

    Args:
        class_weight: One factor a class.
        ignore_index: Targets that cost nothing.
        reduction: mean, sum or none.
        label_smoothing: Share of the target that is spread over all classes.
        z_loss: Factor of ``lse^2``.
        softcap: Logits become ``softcap * tanh(logits / softcap)``.
        logit_scale: Factor of the logits, before the softcap.
        chunk: Rows of logits at a time, a byte budget such as "512MiB", or auto.
        accumulate: Dtype in which the gradient of the weight is summed.
        compact: Drop ignored rows before the product; on a device, of more than 512 rows.
        validate: Raise for targets out of range on a device too (a sync).
        outputs: Names of what to return beside the loss, in a ``CrossEntropyOutput``.
    """


@from_operator(
    "fused_linear_log_prob", "Statistics of ``hidden @ weight.T + bias`` at the targets."
)
class FusedLinearLogProb(nn.Module):
    """Log-probabilities of tokens under a linear head, and the entropy of its rows.

    Like:
        ``log_softmax`` and ``gather`` of the logits of ``torch.nn.Linear``; the head's parameters
        are arguments of the call.

    Operator:
        fused_linear_log_prob

    Args:
        temperature: Logits are divided by it, after the softcap.
        softcap: Logits become ``softcap * tanh(logits / softcap)``.
        logit_scale: Factor of the logits, before the softcap.
        ignore_index: Targets whose rows are dropped.
        chunk: Rows of logits at a time, a byte budget such as "512MiB", or auto.
        accumulate: Dtype in which the gradient of the weight is summed.
        compact: Drop ignored rows before the product; on a device, of more than 512 rows.
        validate: Raise for targets out of range on a device too (a sync).
        outputs: Names of what to compute: log_prob, entropy, lse, argmax.
    """
