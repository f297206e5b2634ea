"""Contract of ``jsd``; behind ``inplace=True`` the gradient replaces the student."""

from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._divergence import (
    compile_samples_of,
    declare,
    declare_inplace,
    inplace_samples_of,
    pair,
    run,
    samples_of,
)
from liger_multi.ops._formulas import jsd_rows, log_probabilities, reduced_rows
from liger_multi.ops._work import elementwise
from liger_multi.testing.samples import Sample

op = Op(
    "jsd",
    family="divergences",
    bitwise=bitwise(
        PER_ROW,
        "student teacher target loss lse lse_low teacher_lse teacher_lse_low slope",
        reference="forward",
    ),
)
declare(op)
inplace_op = Op(
    "jsd_inplace",
    family="divergences",
    inplace="student",
    bitwise=bitwise(PER_ROW, "student teacher target loss"),
)
declare_inplace(inplace_op)


def jsd(
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    beta: float = 0.5,
    form: str = "log_prob",
    teacher_form: str | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    inplace: bool = False,
) -> Tensor:
    """Jensen-Shannon divergence of a student and a teacher, a number per row.

    Math:
        With q the student's and p the teacher's probabilities of a row and
        ``m = beta p + (1 - beta) q``:
        ``sum_j beta p[j] (log p[j] - log m[j]) + (1 - beta) q[j] (log q[j] - log m[j])``.
        At the ends, where that is 0, it is a KL divergence: ``beta = 0`` of
        the student from the teacher, ``sum_j p[j] (log p[j] - log q[j])``, and ``beta = 1`` of
        the teacher from the student.
        ``form`` and ``teacher_form`` say what ``student`` and ``teacher`` are: ``log_prob``,
        ``prob``, or ``logits`` with ``q = softmax(student / temperature)``. ``teacher_form``
        is ``form`` where it is not given. ``mean``
        divides by the number of rows that count, not of elements; without any it is 0. Rows where
        ``target`` is ``ignore_index`` cost nothing and get no gradient, whatever stands in them.

    Shapes:
        student and teacher ``(..., V)`` with any strides, target ``(...)`` of ids, of which only
        ``ignore_index`` matters; loss scalar, or ``(...)`` for ``none``: a number per row, never
        one a class.

    Dtypes:
        In: any floating dtypes. Inside and loss: fp32 (fp64 for fp64). Gradient: that of student.

    Memory:
        Kept for backward: student and teacher; of logits 8 bytes per row for each
        ``lse``, in two numbers, and 4 for ``slope``. Nothing of rows x V but the gradient. The
        teacher is a constant.
        ``inplace=True`` permits writing the gradient over the student's rows, which must then have
        no other reader: one pass over both, nothing kept, no second tensor. The permission is not
        used under ``torch.compile``, nor where the teacher shares memory with the student.

    Raises:
        TypeError: Wrong kinds of arguments.
        ValueError: Shapes, devices or options that do not fit; a temperature without logits; a
        teacher that wants a gradient; ``inplace`` on a leaf or a view of one,
        or on elements that share memory.

    Source:
        Generalized knowledge distillation: Agarwal et al. 2023 (arXiv:2306.13649).
    """
    share = checks.number(op.name, "beta", beta, 0.0, 1.0)
    return run(
        op,
        student,
        teacher,
        target,
        beta=share,
        form=form,
        teacher_form=teacher_form,
        temperature=temperature,
        ignore_index=ignore_index,
        reduction=reduction,
        inplace=inplace,
    )


def formula(
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    beta: float = 0.5,
    form: str = "log_prob",
    teacher_form: str | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    inplace: bool = False,
) -> Tensor:
    """Generalized Jensen-Shannon divergence."""
    log_q = log_probabilities(student, form, temperature)
    log_p = log_probabilities(teacher, teacher_form or form, temperature)
    return reduced_rows(jsd_rows(beta)(log_q, log_p), target, ignore_index, reduction)


work = elementwise(2, 5)


# student and teacher read; the gradient written, which one pass can do
inplace_work = elementwise(2, 3)


_LOGITS = {"form": "logits"}
SAMPLES = (
    *samples_of(),
    *[
        Sample(f"beta-{beta}{'-' if form else ''}{form}", pair(6, 40, marked=0.2), options)
        for beta in (0.0, 0.1, 0.9, 1.0)
        for form, options in (
            ("", {**_LOGITS, "beta": beta}),
            ("log-prob", {"beta": beta, "reduction": "none"}),
        )
    ],
    Sample("beta-0.0-large", pair(2, 32777), {**_LOGITS, "beta": 0.0}, size="thin"),
    Sample("beta-1.0-large", pair(2, 32777), {**_LOGITS, "beta": 1.0}, size="thin"),
)
INPLACE_SAMPLES = inplace_samples_of(SAMPLES)
COMPILE_SAMPLES = compile_samples_of(
    128256,
    {"form": "logits", "teacher_form": "logits", "beta": 0.9},
    {"form": "log_prob", "teacher_form": "log_prob", "beta": 0.9},
)
