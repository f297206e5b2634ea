"""Contract of ``fused_linear_cross_entropy``."""

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import BY_GEMM, BY_OUR_GEMM, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops import _head as head
from liger_multi.ops._head import case, head_work, strided
from liger_multi.ops._samples import frozen
from liger_multi.ops.cross_entropy import (
    EVERYTHING,
    OUTPUTS,
    RETURNS,
    CrossEntropyOutput,
    as_output,
    formula as cross_entropy_formula,
    loss_of,
    options,
    shapes,
)
from liger_multi.testing.samples import Sample, Tensor as T

op = Op(
    "fused_linear_cross_entropy",
    family="cross_entropy",
    bitwise=bitwise(
        BY_OUR_GEMM,
        "hidden target loss z_loss token_accuracy predicted_tokens log_prob entropy lse lse_low",
        backward=BY_GEMM,
    ),
    opens=True,
)


@op.forward(
    returns=RETURNS,
    residuals="lse_low hidden_gradient weight_gradient bias_gradient denominators",
)
def forward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    softcap: float | None,
    reduction: str,
    logit_scale: float,
    chunk: int,
    budget: int,
    accumulate: torch.dtype,
    compute_dtype: torch.dtype | None,
    compact: bool,
    validate: bool,
    outputs: str,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:
    """Shape rule; the residual gradients are as large as the real ones, or empty."""
    from liger_multi.reference.common.chunking import fits_one_chunk, weight_gradient_dtype
    from liger_multi.reference.cross_entropy.float8 import logits_dtype

    empties = shapes(hidden, hidden.shape[0], reduction, outputs)
    keeps_gradients = reduction != "none"
    dtype = logits_dtype(compute_dtype, hidden.dtype)
    rows, width = hidden.shape
    one_chunk = fits_one_chunk(rows, width, weight.shape[0], dtype.itemsize, chunk, budget)
    total = weight_gradient_dtype(dtype, weight.dtype, accumulate, one_chunk)
    residuals = (
        empties[0].new_empty(0 if keeps_gradients else rows),
        hidden.new_empty(hidden.shape if keeps_gradients and needs_hidden else (0,), dtype=dtype),
        weight.new_empty(weight.shape if keeps_gradients and needs_weight else (0,), dtype=total),
        empties[0].new_empty(weight.shape[0] if keeps_gradients and needs_bias else 0),
        empties[0].new_empty(2),
    )
    return (*empties, *residuals)  # type: ignore[return-value]


op.backward(
    reads="dloss hidden? weight? target bias class_weight lse lse_low hidden_gradient "
    "weight_gradient bias_gradient denominators ignore_index label_smoothing z_loss_weight softcap "
    "reduction logit_scale chunk budget accumulate compute_dtype compact needs_hidden needs_weight "
    "needs_bias hidden_dtype weight_dtype bias_dtype",
    returns="dhidden dweight dbias",
    not_saved=lambda reduction: (
        () if reduction == "none" else ("hidden", "weight", "bias", "class_weight")
    ),
    shapes=head.gradients,
)


@checks.cached_check
def _options(
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    outputs: tuple[str, ...],
    logit_scale: float,
    accumulate: torch.dtype,
    ignore_index: int,
    compact: bool,
    validate: bool,
) -> tuple[float, float, float | None, str, float, int]:
    """What is not a tensor, checked: smoothing, z-loss, softcap, outputs, scale, ignored index."""
    name = op.name
    head.accumulator(name, accumulate)
    checked = options(name, label_smoothing, z_loss, softcap, reduction, outputs)
    checks.boolean(name, "compact", compact)
    checks.boolean(name, "validate", validate)
    scale = checks.number(name, "logit_scale", logit_scale)
    return *checked, scale, checks.integer(name, "ignore_index", ignore_index)


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    logit_scale: float = 1.0,
    chunk: int | str = "auto",
    accumulate: torch.dtype = torch.float32,
    compact: bool = True,
    validate: bool = False,
) -> Tensor:
    """Cross entropy of ``hidden @ weight.T + bias`` without holding the logits of all rows.

    Math:
        As :func:`cross_entropy` of ``softcap * tanh(logit_scale * logits / softcap)``. Rows are
        processed in chunks; results depend on their size by rounding only. Rows with an ignored
        target are dropped before the GEMMs; on a device, if there are more than 512 rows: the
        GEMMs of fewer take no longer than their weight takes to be read.

    Shapes:
        hidden ``(..., H)``, weight ``(V, H)``, bias ``(V,)``, target ``(...)``, class_weight
        ``(V,)``; loss scalar, or ``(...)`` for ``none``.

    Dtypes:
        In: hidden, weight and bias of one floating dtype, or any under autocast, which then sets
        the dtype of the GEMMs. Inside: GEMMs in that dtype (logits and gradient of hidden in
        FP8 where ``head_gemms`` of the configuration asks for them), statistics and loss
        fp32 (fp64 for fp64). The gradient of weight accumulates in ``accumulate`` and is rounded
        once to the dtype of weight; with ``chunk="lean"`` it accumulates in the dtype of weight
        (fp32 for fp16) and is rounded once a chunk.

    Memory:
        A chunk of logits: ``chunk`` rows, a byte budget such as ``"512MiB"``, or ``"auto"``: all
        rows where their logits cost no more than the accumulator, else ``chunk_bytes`` of the
        configuration or an eighth of the free memory, at most 1.25 GiB. Kept for backward: the
        gradients of what needs one (accumulator: 4 V H bytes); for ``none`` hidden, weight and 8
        bytes per row, and the logits are computed again. ``"lean"``: 128 MiB beyond inputs and
        gradients for a weight in bf16 or fp32 outside of autocast, at least one row; a graph that
        is retained, or FP8, takes more.

    Raises:
        TypeError: Wrong kinds of arguments, or dtypes that differ without autocast.
        ValueError: Shapes, devices or options that do not fit; a weight without elements (a ZeRO-3
        shard). IndexError: A target outside of ``[0, V)``: always on a CPU, on a device with
        ``validate=True`` (a sync).

    Source:
        As :func:`cross_entropy`; chunking and gradients in the forward pass: Hsu et al. 2024
        (arXiv:2410.10989), Wijmans et al. 2024 (arXiv:2411.09009).
    """
    results, _ = _results(
        hidden,
        weight,
        target,
        bias,
        class_weight=class_weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        reduction=reduction,
        logit_scale=logit_scale,
        chunk=chunk,
        accumulate=accumulate,
        compact=compact,
        validate=validate,
        outputs=(),
    )
    return loss_of(results, target.shape, reduction)


def fused_linear_cross_entropy_with_outputs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    logit_scale: float = 1.0,
    chunk: int | str = "auto",
    accumulate: torch.dtype = torch.float32,
    compact: bool = True,
    validate: bool = False,
    outputs: tuple[str, ...] = OUTPUTS,
) -> CrossEntropyOutput:
    """:func:`fused_linear_cross_entropy`, and the statistics that ``outputs`` names.

    They are those of :func:`cross_entropy_with_outputs`.
    """
    results, names = _results(
        hidden,
        weight,
        target,
        bias,
        class_weight=class_weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        reduction=reduction,
        logit_scale=logit_scale,
        chunk=chunk,
        accumulate=accumulate,
        compact=compact,
        validate=validate,
        outputs=outputs,
    )
    return as_output(results, target.shape, reduction, names)


def _results(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    logit_scale: float,
    chunk: int | str,
    accumulate: torch.dtype,
    compact: bool,
    validate: bool,
    outputs: tuple[str, ...],
) -> tuple[tuple[Tensor, ...], str]:
    """Check the arguments and call the operator: its results, and the names of the outputs."""
    name = op.name
    checks.floating(
        name,
        hidden=hidden,
        weight=weight,
        bias=bias,
        class_weight=class_weight,
        optional=("bias", "class_weight"),
    )
    smoothing, z, cap, names, scale, ignored = _options(
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        reduction=reduction,
        outputs=outputs,
        logit_scale=logit_scale,
        accumulate=accumulate,
        ignore_index=ignore_index,
        compact=compact,
        validate=validate,
    )
    head.shapes_fit(name, hidden, weight)
    checks.targets(name, target, hidden.shape[:-1], hidden)
    checks.vector(name, "bias", bias, weight.shape[0], "number of classes")
    checks.vector(name, "class_weight", class_weight, weight.shape[0], "number of classes")
    checks.constant(name, "class_weight", class_weight)
    compute = head.compute_dtype(name, hidden, weight, bias)
    chunk, accumulate = head.lean_chunks(chunk, accumulate, hidden, weight, compute)
    rows_chunk, budget = head.rows_and_budget(name, chunk)
    if target.ndim != 1:  # a view costs the host a tensor and a node of the graph
        hidden, target = hidden.reshape(target.numel(), hidden.shape[-1]), target.reshape(-1)
    results = op(
        hidden,
        weight,
        target.to(torch.int64),
        bias,
        class_weight,
        ignore_index=ignored,
        label_smoothing=smoothing,
        z_loss_weight=z,
        softcap=cap,
        reduction=reduction,
        logit_scale=scale,
        chunk=rows_chunk,
        budget=budget,
        accumulate=accumulate,
        compute_dtype=compute,
        compact=compact,
        validate=validate,
        outputs=names,
    )
    return results, names


def formula(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    logit_scale: float = 1.0,
    chunk: int | str = "auto",
    accumulate: torch.dtype = torch.float32,
    compact: bool = True,
    validate: bool = False,
    outputs: tuple[str, ...] = (),
) -> Tensor | CrossEntropyOutput:
    """Cross entropy of ``logit_scale * (hidden @ weight.T + bias)``."""
    return cross_entropy_formula(
        F.linear(hidden, weight, bias) * logit_scale,
        target,
        class_weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        reduction=reduction,
        outputs=outputs,
    )


work = head_work


WHOLE = case(48, 32, 64) | {
    "hidden": T((48, 32), integers=True),
    "weight": T((64, 32), integers=True),
}
"""Numbers that 8 bits hold."""
_ALL = {**EVERYTHING, "logit_scale": 0.7, "chunk": 4}
SAMPLES = (
    Sample("mean", case(10, 16, 50)),
    Sample("chunk-1", case(5, 16, 50), {"chunk": 1}),
    Sample("chunk-7", case(16, 16, 50, ignored=0.25), {"chunk": 7}),
    Sample("sum", case(10, 16, 50), {"reduction": "sum", "chunk": 4}),
    Sample("none", case(10, 16, 50, ignored=0.3), {"reduction": "none", "chunk": 4}),
    Sample("not-compact", case(10, 16, 50, ignored=0.3), {"compact": False, "chunk": 4}),
    Sample("all-ignored", case(6, 16, 50, ignored=1.0), {"outputs": OUTPUTS}),
    Sample(
        "all-ignored-not-compact",
        case(6, 16, 50, ignored=1.0),
        {"outputs": OUTPUTS, "compact": False},
    ),
    Sample("bias", case(10, 16, 50, bias=True), {"chunk": 4}),
    Sample("bias-none", case(10, 16, 50, bias=True), {"chunk": 4, "reduction": "none"}),
    Sample("logit-scale", case(8, 16, 50), {"logit_scale": 0.25}),
    Sample("everything-mean", case(11, 24, 61, ignored=0.3, bias=True, weighted=True), _ALL),
    Sample(
        "everything-sum",
        case(11, 24, 61, ignored=0.3, bias=True, weighted=True),
        {**_ALL, "reduction": "sum"},
    ),
    Sample(
        "everything-none",
        case(11, 24, 61, ignored=0.3, bias=True, weighted=True),
        {**_ALL, "reduction": "none"},
        path="a sum of weights",
    ),
    Sample("frozen-weight", frozen(case(10, 16, 50, bias=True), "weight"), {"chunk": 4}),
    Sample("frozen-hidden", frozen(case(10, 16, 50, bias=True), "hidden"), {"chunk": 4}),
    Sample(
        "frozen-all-but-bias", frozen(case(10, 16, 50, bias=True), "hidden", "weight"), {"chunk": 4}
    ),
    Sample(
        "three-axes",
        {"hidden": T((2, 3, 8)), "weight": T((20, 8)), "target": T((2, 3), classes=20)},
        {"outputs": OUTPUTS},
    ),
    *strided(1.0),
    Sample("whole-numbers", WHOLE),
    Sample("one-row", case(1, 16, 33)),
    Sample("no-rows", case(0, 16, 33), {"outputs": OUTPUTS}),
    Sample("odd-vocabulary", case(3, 8, 32777), {"chunk": 2}, size="thin"),
    Sample("past-65535-rows", case(65537, 2, 3), {"chunk": 65537}, size="thin"),
    Sample("8192x4096x128256", case(8192, 4096, 128256), size="bench"),
    Sample("16384x2048x151936", case(16384, 2048, 151936), size="bench"),
    Sample("32768x4096x32000", case(32768, 4096, 32000), size="bench"),
    Sample("4096x8192x128256", case(4096, 8192, 128256), size="bench"),
)
