"""What the divergences share: shape rules, checks and samples."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from liger_multi import checks
from liger_multi.dispatch.op import OPS, Op
from liger_multi.dispatch.resolve import may_overwrite
from liger_multi.ops.cross_entropy import writable_rows
from liger_multi.testing.samples import Sample, Tensor as T

FORMS = ("log_prob", "prob", "logits")
REDUCTIONS = ("mean", "sum", "none")
_PLAIN = (Tensor, Parameter)


def statistics(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """An empty tensor for numbers of rows, on the device of ``x``."""
    return x.new_empty(shape, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def declare(op: Op) -> None:
    """Forward and backward of a divergence of given rows."""

    def forward(
        student: Tensor,
        teacher: Tensor,
        target: Tensor | None,
        beta: float,
        form: str,
        teacher_form: str,
        scale: float,
        ignore_index: int,
        reduction: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        rows, raw = student.shape[0], form == "logits"
        return (
            statistics(student, (rows,) if reduction == "none" else ()),
            statistics(student, (rows if raw else 0,)),
            statistics(student, (rows if raw else 0,)),
            statistics(student, (rows if teacher_form == "logits" else 0,)),
            statistics(student, (rows if teacher_form == "logits" else 0,)),
            statistics(student, (rows if raw else 0,)),
        )

    residuals = "lse lse_low teacher_lse teacher_lse_low slope"
    op.forward(returns="loss", residuals=residuals)(forward)
    op.backward(
        reads=f"dloss student teacher target {residuals} beta form teacher_form scale "
        "ignore_index reduction",
        returns="dstudent",
    )


def declare_inplace(op: Op) -> None:
    """Forward and backward of a divergence whose gradient replaces the student."""

    def forward(
        student: Tensor,
        teacher: Tensor,
        target: Tensor | None,
        beta: float,
        form: str,
        teacher_form: str,
        scale: float,
        ignore_index: int,
        reduction: str,
    ) -> Tensor:
        return statistics(student, (student.shape[0],) if reduction == "none" else ())

    op.forward(returns="loss")(forward)
    op.backward(reads="dloss student", returns="")


def run(
    op: Op,
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None,
    beta: float,
    form: str,
    teacher_form: str | None,
    temperature: float,
    ignore_index: int,
    reduction: str,
    inplace: bool,
) -> Tensor:
    """Check the arguments of a divergence of given rows, and call it."""
    name = op.name
    checks.floating(name, student=student, teacher=teacher)
    checks.same_shape(name, student=student, teacher=teacher)
    checks.constant(name, "teacher", teacher)
    if student.ndim == 0 or student.shape[-1] == 0:
        checks.refuse(name, "student must have shape (..., V) with V >= 1", student)
    if target is not None:
        checks.targets(name, target, student.shape[:-1], student)
    checks.one_of(name, "reduction", reduction, REDUCTIONS)
    checks.one_of(name, "form", form, FORMS)
    teacher_form = form if teacher_form is None else teacher_form
    checks.one_of(name, "teacher_form", teacher_form, FORMS)
    cool = checks.number(name, "temperature", temperature, 0.0, above=True)
    if cool != 1.0 and "logits" not in (form, teacher_form):
        raise ValueError(
            f"{name}: temperature = {temperature!r} divides logits, and there are none "
            f"(form {form!r}, teacher_form {teacher_form!r})"
        )
    rows, row_shape = student.shape[:-1].numel(), student.shape[:-1]
    overwrite = checks.boolean(name, "inplace", inplace) and student.requires_grad
    overwrite = overwrite and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    overwrite = overwrite and may_overwrite(OPS[f"{name}_inplace"], student)
    if overwrite and not share_memory(student, teacher):  # rows of the teacher are read meanwhile
        op, args = OPS[f"{name}_inplace"], writable_rows(name, "student's rows", student)
    else:
        args = student.reshape(rows, student.shape[-1])
    output: Tensor = op(
        args,
        teacher.reshape(rows, student.shape[-1]),
        None if target is None else target.reshape(-1).to(torch.int64),
        beta=beta,
        form=form,
        teacher_form=teacher_form,
        scale=1 / cool,
        ignore_index=checks.integer(name, "ignore_index", ignore_index),
        reduction=reduction,
    )
    return output.view(row_shape) if reduction == "none" else output


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether the bytes between the first and the last element of both tensors overlap."""
    if a.device != b.device or not a.numel() or not b.numel():
        return False
    if not (type(a) in _PLAIN and type(b) in _PLAIN):  # fake tensors have no addresses
        return a is b
    (start, stop), (first, last) = _bytes_of(a), _bytes_of(b)
    return start < last and first < stop


def _bytes_of(x: Tensor) -> tuple[int, int]:
    last = sum(stride * (size - 1) for stride, size in zip(x.stride(), x.shape, strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


# --- samples ---


def pair(
    rows: int,
    classes: int,
    *,
    marked: float | None = None,
    layout: str = "contiguous",
    scale: float = 1.5,
) -> dict[str, T]:
    """Tensors of a sample; ``marked`` is the share of ignored rows."""
    tensors = {
        "student": T((rows, classes), scale=scale, layout=layout),
        "teacher": T((rows, classes), scale=scale, layout=layout, grad=False),
    }
    return tensors | ({} if marked is None else {"target": T((rows,), classes=9, ignored=marked)})


def samples_of(**options: Any) -> tuple[Sample, ...]:
    """The samples that every divergence has, each with ``options``."""
    logits = {**options, "form": "logits", "teacher_form": "logits"}
    logs = {**options, "form": "log_prob", "teacher_form": "log_prob"}
    prob = T((6, 40), positive=True)
    fixed = T((6, 40), positive=True, grad=False)
    return (
        Sample("mean", pair(7, 50), logits),
        Sample("sum", pair(7, 50), {**logits, "reduction": "sum"}),
        Sample("none", pair(7, 50, marked=0.3), {**logits, "reduction": "none"}),
        Sample("quarter-ignored", pair(8, 33, marked=0.25), logits),
        Sample("all-ignored", pair(4, 33, marked=1.0), logits),
        Sample("cold", pair(5, 40), {**logits, "temperature": 0.5}),
        Sample("hot", pair(5, 40, marked=0.2), {**logits, "temperature": 3.0}),
        Sample("log-prob", pair(6, 40), logs),
        Sample("log-prob-none", pair(6, 40, marked=0.3), {**logs, "reduction": "none"}),
        Sample(
            "prob",
            {"student": prob, "teacher": fixed, "target": T((6,), classes=9, ignored=0.2)},
            {**options, "form": "prob", "teacher_form": "prob"},
        ),
        Sample(
            "log-prob-and-prob",
            {"student": T((6, 40)), "teacher": fixed},
            {**options, "form": "log_prob", "teacher_form": "prob"},
        ),
        Sample(
            "logits-and-prob",
            # of few classes, so that some of the student's outweigh the teacher's
            {"student": T((12, 2), scale=6.0), "teacher": T((12, 2), positive=True, grad=False)},
            {**options, "form": "logits", "teacher_form": "prob", "temperature": 2.0},
        ),
        Sample(
            "prob-and-logits",
            {"student": prob, "teacher": T((6, 40), grad=False)},
            {**options, "form": "prob", "teacher_form": "logits", "reduction": "sum"},
        ),
        Sample("large-logits", pair(6, 40, scale=3.0), logits),
        Sample("one-class", pair(5, 1), logits),
        Sample("one-row", pair(1, 129), logits),
        Sample("no-rows", pair(0, 12), logits),
        Sample("sliced", pair(5, 24, layout="sliced"), logits),
        Sample("row-gaps", pair(5, 64, layout="rows"), logits),
        Sample(
            "three-axes",
            {
                "student": T((2, 3, 20)),
                "teacher": T((2, 3, 20), grad=False),
                "target": T((2, 3), classes=9, ignored=0.3),
            },
            {**logits, "reduction": "none"},
        ),
        Sample("odd-vocabulary", pair(2, 32777), logits, size="thin"),
        Sample("large-vocabulary", pair(2, 262144), logits, size="thin"),
        Sample("large-vocabulary-log-prob", pair(2, 262144, scale=0.1), logs, size="thin"),
        Sample("past-65535-rows", pair(65537, 2), {**logits, "reduction": "none"}, size="thin"),
        Sample("8192x32000", pair(8192, 32000), logs, size="bench"),
        Sample("8192x128256", pair(8192, 128256), logs, size="bench"),
        Sample("logits-8192x32000", pair(8192, 32000), logits, size="bench"),
        Sample("logits-4096x128256", pair(4096, 128256), logits, size="bench"),
    )


_INPLACE = (
    "mean",
    "sum",
    "none",
    "quarter-ignored",
    "all-ignored",
    "cold",
    "log-prob",
    "log-prob-none",
    "prob",
    "logits-and-prob",
    "one-row",
    "sliced",
    "row-gaps",
    "three-axes",
    "large-vocabulary",
    "large-vocabulary-log-prob",
)


def inplace_samples_of(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """Those of the functional form that reach what is different about overwriting."""
    return tuple(
        Sample(s.name, s.tensors, {**s.options, "inplace": True}, s.size)
        for s in samples
        if s.name in _INPLACE or s.size == "bench" or s.name.startswith("beta-")
    )


def compile_samples_of(classes: int, *options: dict[str, Any]) -> tuple[Sample, ...]:
    """Real sizes with options that no benchmark has."""
    return tuple(
        Sample(
            f"4096x{classes} " + " ".join(map(str, sample_options.values())),
            pair(4096, classes),
            sample_options,
        )
        for sample_options in options
    )
