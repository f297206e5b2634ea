"""What the divergences of two linear heads share: shape rules, checks and samples."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.op import Op
from liger_multi.ops import _head as head
from liger_multi.ops._divergence import REDUCTIONS, statistics
from liger_multi.ops._formulas import Rows, reduced_rows, rows_of_heads
from liger_multi.ops._work import Options, Shapes, Work
from liger_multi.testing.samples import Sample, Tensor as T

VOCABULARIES = ("equal", "common")
GRADIENTS = "hidden_gradient weight_gradient bias_gradient denominator"
CONSUMED = (
    "hidden",
    "weight",
    "teacher_hidden",
    "teacher_weight",
    "target",
    "bias",
    "teacher_bias",
)


def declare(op: Op) -> None:
    """Forward and backward of a divergence of two heads."""

    def forward(
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        target: Tensor | None,
        bias: Tensor | None,
        teacher_bias: Tensor | None,
        beta: float,
        scale: float,
        ignore_index: int,
        reduction: str,
        chunk: int,
        budget: int,
        accumulate: torch.dtype,
        compute_dtype: torch.dtype | None,
        compact: bool,
        needs_hidden: bool,
        needs_weight: bool,
        needs_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Shape rule; the residual gradients are as large as the real ones, or empty."""
        from liger_multi.reference.common.chunking import fits_one_chunk, weight_gradient_dtype
        from liger_multi.reference.divergences.fused_linear_divergence import student_budget

        keeps_gradients, (rows, width) = reduction != "none", hidden.shape
        dtype = compute_dtype or hidden.dtype
        statistics_like = hidden.new_empty(0, dtype=dtype)
        limit = student_budget(budget)
        one_chunk = fits_one_chunk(rows, width, weight.shape[0], dtype.itemsize, chunk, limit)
        total = weight_gradient_dtype(dtype, weight.dtype, accumulate, one_chunk)
        return (
            statistics(statistics_like, () if keeps_gradients else (rows,)),
            hidden.new_empty(
                hidden.shape if keeps_gradients and needs_hidden else (0,), dtype=dtype
            ),
            weight.new_empty(
                weight.shape if keeps_gradients and needs_weight else (0,), dtype=total
            ),
            statistics(
                statistics_like, (weight.shape[0] if keeps_gradients and needs_bias else 0,)
            ),
            statistics(statistics_like, ()),
        )

    op.forward(returns="loss", residuals=GRADIENTS)(forward)
    op.backward(
        reads=f"dloss {' '.join(f'{name}?' for name in CONSUMED)} {GRADIENTS} beta scale "
        "ignore_index reduction chunk budget accumulate compute_dtype compact needs_hidden "
        "needs_weight needs_bias hidden_dtype weight_dtype bias_dtype",
        returns="dhidden dweight dbias",
        not_saved=lambda reduction: () if reduction == "none" else CONSUMED,
        shapes=head.gradients,
    )


def run(
    op: Op,
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None,
    bias: Tensor | None,
    teacher_bias: Tensor | None,
    *,
    beta: float,
    temperature: float,
    square_temperature: bool,
    vocabulary: str,
    ignore_index: int,
    reduction: str,
    chunk: int | str,
    accumulate: torch.dtype,
    compact: bool,
) -> Tensor:
    """Check the arguments of a divergence of two heads, and call it."""
    name = op.name
    checks.floating(
        name,
        hidden=hidden,
        weight=weight,
        teacher_hidden=teacher_hidden,
        teacher_weight=teacher_weight,
        bias=bias,
        teacher_bias=teacher_bias,
        optional=("bias", "teacher_bias"),
    )
    head.accumulator(name, accumulate)
    head.shapes_fit(name, hidden, weight)
    row_shape = hidden.shape[:-1]
    head.shapes_fit(f"{name}, of the teacher", teacher_hidden, teacher_weight)
    if teacher_hidden.shape[:-1] != row_shape:
        checks.refuse(
            name, f"teacher_hidden must have the rows of hidden, {tuple(row_shape)}", teacher_hidden
        )
    checks.vector(name, "bias", bias, weight.shape[0], "number of classes")
    checks.vector(name, "teacher_bias", teacher_bias, teacher_weight.shape[0], "teacher's classes")
    if target is not None:
        checks.targets(name, target, row_shape, hidden)
    checks.one_of(name, "reduction", reduction, REDUCTIONS)
    cool = checks.number(name, "temperature", temperature, 0.0, above=True)
    squared = checks.boolean(name, "square_temperature", square_temperature)
    dtype = head.compute_dtype(name, hidden, weight, bias)
    head.compute_dtype(f"{name}, of the teacher", teacher_hidden, teacher_weight, teacher_bias)
    _, accumulate = head.lean_chunks(chunk, accumulate, hidden, weight, dtype)
    classes = _classes(name, weight.shape[0], teacher_weight.shape[0], vocabulary)
    # a slice of all classes would cost a copy of the gradient
    if classes < weight.shape[0]:
        weight, bias = weight[:classes], None if bias is None else bias[:classes]
    output: Tensor = op(
        hidden.reshape(row_shape.numel(), hidden.shape[-1]),
        weight,
        teacher_hidden.detach().reshape(row_shape.numel(), teacher_hidden.shape[-1]),
        teacher_weight.detach()[:classes],
        None if target is None else target.reshape(-1).to(torch.int64),
        bias,
        None if teacher_bias is None else teacher_bias.detach()[:classes],
        beta,
        1 / cool,
        checks.integer(name, "ignore_index", ignore_index),
        reduction,
        *head.rows_and_budget(name, chunk),
        accumulate,
        dtype,
        checks.boolean(name, "compact", compact),
    )
    output = output.view(row_shape) if reduction == "none" else output
    return output * cool**2 if squared else output


def formula_of(
    public: Callable[..., Tensor], rows_of: Callable[[float], Rows]
) -> Callable[..., Any]:
    """The formula of a divergence of two heads, by that of one row; ``beta`` chooses among them."""

    def formula(
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        target: Tensor | None = None,
        bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        *,
        beta: float = 0.5,
        temperature: float = 1.0,
        square_temperature: bool = False,
        ignore_index: int = -100,
        reduction: str = "mean",
        **_chunks: Any,
    ) -> Tensor:
        """The divergence from all logits at once."""
        states = (hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias)
        rows = rows_of_heads(rows_of(beta), *states, temperature=temperature)
        loss = reduced_rows(rows, target, ignore_index, reduction)
        return loss * temperature**2 if square_temperature else loss

    formula.accepts = public  # type: ignore[attr-defined]
    return formula


def _classes(name: str, student: int, teacher: int, vocabulary: str) -> int:
    checks.one_of(name, "vocabulary", vocabulary, VOCABULARIES)
    if student != teacher and vocabulary == "equal":
        raise ValueError(
            f"{name}: weight has {student} classes and teacher_weight {teacher}; where the first "
            f"{min(student, teacher)} of both are the same tokens, vocabulary='common' compares "
            "the distributions over those"
        )
    return min(student, teacher)


# --- samples ---


def heads(
    rows: int,
    width: int,
    teacher_width: int,
    classes: int,
    *,
    marked: float | None = None,
    bias: bool = False,
    frozen: tuple[str, ...] = (),
    teacher_classes: int = 0,
    spread: float = 1.0,
) -> dict[str, T]:
    """Tensors of a sample; ``spread`` scales the logits of both heads."""
    teacher_vocabulary = teacher_classes or classes

    def make(name: str, *shape: int, scale: float = 1.0) -> T:
        return T(shape, scale=scale, grad=name not in frozen and "teacher" not in name)

    tensors = {
        "hidden": make("hidden", rows, width),
        "weight": make("weight", classes, width, scale=1.2 * spread / width**0.5),
        "teacher_hidden": make("teacher_hidden", rows, teacher_width),
        "teacher_weight": make(
            "teacher_weight",
            teacher_vocabulary,
            teacher_width,
            scale=2 * spread / teacher_width**0.5,
        ),
    }
    tensors |= {} if marked is None else {"target": T((rows,), classes=classes, ignored=marked)}
    if bias:
        tensors |= {
            "bias": make("bias", classes, scale=0.3),
            "teacher_bias": make("teacher_bias", teacher_vocabulary, scale=0.3),
        }
    return tensors


def _bench_heads(*sizes: int) -> dict[str, T]:
    """Tensors of a real shape: among 100,000 wider logits, bf16 would cost a tolerance."""
    return heads(*sizes, marked=0.0, spread=0.5)


def samples_of(**options: Any) -> tuple[Sample, ...]:
    """The samples that every divergence of two heads has, each with ``options``."""
    four = {**options, "chunk": 4}
    rows = {**four, "reduction": "none"}
    return (
        Sample("mean", heads(10, 16, 24, 50), options, path="a mean"),
        Sample("chunk-1", heads(5, 16, 16, 50), {**options, "chunk": 1}),
        Sample("chunk-7", heads(16, 16, 8, 50, marked=0.25), {**options, "chunk": 7}),
        Sample("sum", heads(10, 16, 24, 50), {**four, "reduction": "sum"}),
        Sample("none", heads(10, 16, 24, 50, marked=0.3), rows),
        Sample("none-every-row", heads(6, 16, 24, 50), rows),
        Sample("not-compact", heads(10, 16, 24, 50, marked=0.3), {**four, "compact": False}),
        Sample("all-ignored", heads(6, 16, 24, 50, marked=1.0), options),
        Sample(
            "all-ignored-not-compact",
            heads(6, 16, 24, 50, marked=1.0),
            {**options, "compact": False},
        ),
        Sample("bias", heads(10, 16, 24, 50, bias=True), four),
        Sample("bias-none", heads(10, 16, 24, 50, bias=True), rows),
        Sample("cold", heads(8, 16, 24, 50), {**options, "temperature": 0.7}),
        Sample(
            "hot-squared",
            heads(8, 16, 24, 50, marked=0.2),
            {**four, "temperature": 2.5, "square_temperature": True},
        ),
        Sample(
            "hot-squared-none",
            heads(8, 16, 24, 50),
            {**rows, "temperature": 2.5, "square_temperature": True},
        ),
        Sample(
            "larger-teacher",
            heads(8, 16, 24, 50, teacher_classes=61, bias=True),
            {**four, "vocabulary": "common"},
        ),
        Sample(
            "larger-student",
            heads(7, 16, 24, 50, teacher_classes=43, bias=True),
            {**four, "vocabulary": "common"},
        ),
        Sample("frozen-weight", heads(10, 16, 24, 50, bias=True, frozen=("weight",)), four),
        Sample("frozen-hidden", heads(10, 16, 24, 50, bias=True, frozen=("hidden",)), four),
        Sample("only-bias", heads(10, 16, 24, 50, bias=True, frozen=("hidden", "weight")), four),
        Sample(
            "frozen", heads(4, 16, 24, 50, bias=True, frozen=("hidden", "weight", "bias")), options
        ),
        Sample(
            "three-axes",
            {
                **heads(6, 8, 8, 20),
                "hidden": T((2, 3, 8)),
                "teacher_hidden": T((2, 3, 8), grad=False),
                "target": T((2, 3), classes=9, ignored=0.3),
            },
            rows,
        ),
        Sample(
            "transposed-weights",
            {
                **heads(6, 16, 24, 30),
                "weight": T((30, 16), scale=0.3, layout="transposed"),
                "teacher_weight": T((30, 24), scale=0.3, layout="transposed", grad=False),
            },
            options,
        ),
        Sample(
            "sliced-hidden",
            {
                **heads(6, 16, 24, 30),
                "hidden": T((6, 16), layout="sliced"),
                "teacher_hidden": T((6, 24), layout="sliced", grad=False),
            },
            options,
        ),
        Sample("one-row", heads(1, 16, 24, 33), options),
        Sample("no-rows", heads(0, 16, 24, 33), options),
        Sample("odd-vocabulary", heads(3, 8, 8, 32777), {**options, "chunk": 2}, size="thin"),
        Sample("past-65535-rows", heads(65537, 2, 2, 3), {**options, "chunk": 65537}, size="thin"),
        Sample("8192x4096x128256", _bench_heads(8192, 4096, 4096, 128256), options, size="bench"),
        Sample("8192x2048x151936", _bench_heads(8192, 2048, 4096, 151936), options, size="bench"),
    )


def heads_work(shapes: Shapes, size: int, options: Options) -> Work:
    rows, width = math.prod(shapes["hidden"][:-1]), shapes["hidden"][-1]
    teacher_width, classes = shapes["teacher_hidden"][-1], shapes["weight"][0]
    student_bytes, teacher_bytes = (
        (rows + classes) * width * size,
        (rows + classes) * teacher_width * size,
    )
    product, teacher = (2.0 * rows * classes * w for w in (width, teacher_width))
    return Work(
        student_bytes + teacher_bytes,
        2 * student_bytes + teacher_bytes,
        product + teacher,
        3 * product + teacher,
    )
