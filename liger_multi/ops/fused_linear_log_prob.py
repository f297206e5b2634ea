"""Contract of ``fused_linear_log_prob``."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import BY_OUR_GEMM, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops import _head as head
from liger_multi.ops._head import case, head_work, strided
from liger_multi.ops._samples import frozen
from liger_multi.testing.samples import Sample, Tensor as T

OUTPUTS = ("log_prob", "entropy", "lse", "argmax")
op = Op(
    "fused_linear_log_prob",
    family="cross_entropy",
    bitwise=bitwise(
        BY_OUR_GEMM, "hidden target log_prob entropy lse argmax lse_low", cached="keep logits"
    ),
    opens=True,
)


class LogProbOutput(NamedTuple):
    """Statistics of every row (None where not asked for); all but ``argmax`` have gradients."""

    log_prob: Tensor | None = None
    entropy: Tensor | None = None
    lse: Tensor | None = None
    argmax: Tensor | None = None


@op.forward(returns=" ".join((*OUTPUTS, "lse_low")), residuals="logits")
def forward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    chunk: int,
    budget: int,
    accumulate: torch.dtype,
    compute_dtype: torch.dtype | None,
    compact: bool,
    validate: bool,
    keep: bool,
    outputs: str,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Shape rule; ``lse`` and ``lse_low``, its second part, are kept for backward in any case.

    With ``keep``, the logits are as well, where one chunk holds them and a gradient is needed.
    """
    from liger_multi.reference.common.chunking import fits_one_chunk
    from liger_multi.reference.cross_entropy.float8 import logits_dtype

    dtype = logits_dtype(compute_dtype, hidden.dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows, requested = target.numel(), outputs.split(",")
    classes, width = weight.shape
    keeps_logits = keep and (needs_hidden or needs_weight or needs_bias)
    keeps_logits = keeps_logits and fits_one_chunk(
        rows, width, classes, dtype.itemsize, chunk, budget
    )
    return (
        hidden.new_empty(rows if "log_prob" in requested else 0, dtype=wide),
        hidden.new_empty(rows if "entropy" in requested else 0, dtype=wide),
        hidden.new_empty(rows, dtype=wide),
        hidden.new_empty(rows if "argmax" in requested else 0, dtype=torch.int64),
        hidden.new_empty(rows, dtype=wide),
        hidden.new_empty(rows if keeps_logits else 0, classes, dtype=dtype),
    )


op.backward(
    reads="dlog_prob dentropy dlse hidden weight target bias entropy lse lse_low logits "
    "ignore_index softcap logit_scale chunk budget accumulate compute_dtype compact",
    returns="dhidden dweight dbias",
    shapes={"bias": lambda bias, weight: weight.new_empty(0) if bias is None else bias},
)


def fused_linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    chunk: int | str = "auto",
    accumulate: torch.dtype = torch.float32,
    compact: bool = True,
    validate: bool = False,
    outputs: tuple[str, ...] = OUTPUTS,
) -> LogProbOutput:
    """Log-probabilities of tokens under ``hidden @ weight.T + bias``, and the rows' entropy.

    Losses of preferences, policies and distillation are plain PyTorch on its outputs, which have
    one number per row; the logits of all rows never exist at once.

    Math:
        With ``z = softcap * tanh(logit_scale * logits / softcap) / temperature`` (without softcap
        ``logit_scale * logits / temperature``) and ``p = softmax(z)``: ``lse = logsumexp(z)``,
        ``log_prob = z[t] - lse``, ``entropy = -sum_j p[j] log p[j]``, ``argmax`` the first largest
        ``z``. Gradients by ``z[j]``: ``[j = t] - p[j]`` of log_prob, ``p[j]`` of lse,
        ``-p[j] (log p[j] + entropy)`` of entropy; 0 where ``p[j]`` is. Rows with an ignored target
        are dropped before the GEMMs (on a device of more than 512 rows): 0, ``argmax`` -1, no
        gradient.

    Shapes:
        hidden ``(..., H)``, weight ``(V, H)``, bias ``(V,)``, target ``(...)``; every output
        ``(...)``. ``outputs`` names those to compute, the others are None.

    Dtypes:
        In: hidden, weight and bias of one floating dtype, or any under autocast, which then sets
        the dtype of the GEMMs. Inside: GEMMs in that dtype (logits and gradient of hidden in
        FP8 where ``head_gemms`` of the configuration asks for them), statistics fp32 (fp64
        for fp64). Out: fp32 (fp64 for fp64), argmax int64. Gradients of logits in fp16 are scaled
        into its range first. The gradient of weight accumulates in ``accumulate`` and is rounded
        once.

    Memory:
        A chunk of logits, as in :func:`fused_linear_cross_entropy`. Kept for backward: hidden,
        weight, 8 bytes per row for lse in two numbers, and 4 for entropy. Where one chunk holds all
        rows, it is kept as well, and backward writes its gradient over it; a second one, of a graph
        that is retained, has a copy. With a smaller ``chunk``, and in a compiled graph unless
        ``compact=False``, backward computes the logits once more instead.

    Raises:
        TypeError: Wrong kinds of arguments, or dtypes that differ without autocast.
        ValueError: Shapes, devices or options that do not fit; a weight without elements (a ZeRO-3
        shard). IndexError: A target outside of ``[0, V)``: always on a CPU, on a device with
        ``validate=True`` (a sync); without, such a row's log_prob is NaN and it gets no gradient.

    Source:
        ``log_softmax`` and ``gather`` of the logits, as in the policy gradient losses of PPO
        (arXiv:1707.06347) and DPO (arXiv:2305.18290); chunking: Wijmans et al. 2024
        (arXiv:2411.09009).
    """
    arguments = prepared(
        hidden,
        weight,
        target,
        bias,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        ignore_index=ignore_index,
        chunk=chunk,
        accumulate=accumulate,
        compact=compact,
        validate=validate,
        outputs=outputs,
    )
    return as_output(op(*arguments), target, arguments[-1])


def formula_of_logits(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    validate: bool = False,
    outputs: tuple[str, ...] = LogProbOutput._fields,
) -> LogProbOutput:
    """Log-probability of each target, and statistics of its row."""
    z = logits * logit_scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    valid, log_p = target != ignore_index, torch.log_softmax(z, -1)
    reports = {
        "log_prob": log_p.gather(-1, torch.where(valid, target, 0).unsqueeze(-1)).squeeze(-1),
        "entropy": torch.special.entr(log_p.exp()).sum(-1),
        "lse": torch.logsumexp(z, -1),
    }
    reports = {name: torch.where(valid, x, 0) for name, x in reports.items()}
    reports["argmax"] = torch.where(valid, z.argmax(-1), -1)
    return LogProbOutput(**{name: reports[name] for name in outputs})


def formula(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    chunk: int | str = "auto",
    accumulate: torch.dtype = torch.float32,
    compact: bool = True,
    validate: bool = False,
    outputs: tuple[str, ...] = LogProbOutput._fields,
) -> LogProbOutput:
    """The same of ``hidden @ weight.T + bias``."""
    return formula_of_logits(
        F.linear(hidden, weight, bias),
        target,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        ignore_index=ignore_index,
        outputs=outputs,
    )


# three GEMMs; with several chunks, backward computes the logits again, a fourth
work = head_work


def as_output(results: tuple[Tensor, ...], target: Tensor, outputs: str) -> LogProbOutput:
    """Those outputs of the operator that were asked for, in the shape of the targets."""
    requested, by_name = outputs.split(","), zip(OUTPUTS, results[: len(OUTPUTS)], strict=True)
    return LogProbOutput(**{n: x.view(target.shape) for n, x in by_name if n in requested})


def prepared(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    chunk: int | str = "auto",
    accumulate: torch.dtype = torch.float32,
    compact: bool = True,
    validate: bool = False,
    outputs: tuple[str, ...] = OUTPUTS,
    keep: bool = True,
) -> tuple[Any, ...]:
    """The checked arguments of the operator; without ``keep``, it keeps no logits."""
    name = "fused_linear_log_prob"
    checks.floating(name, hidden=hidden, weight=weight, bias=bias, optional=("bias",))
    head.accumulator(name, accumulate)
    head.shapes_fit(name, hidden, weight)
    checks.targets(name, target, hidden.shape[:-1], hidden)
    checks.vector(name, "bias", bias, weight.shape[0], "number of classes")
    requested = checks.names(name, outputs, OUTPUTS)
    if not requested:
        raise ValueError(f"{name}: outputs must name at least one of {', '.join(OUTPUTS)}, got ()")
    cool = checks.number(name, "temperature", temperature, 0.0, above=True)
    cap = None if softcap is None else checks.number(name, "softcap", softcap, 0.0, above=True)
    scale = checks.number(name, "logit_scale", logit_scale)
    compute = head.compute_dtype(name, hidden, weight, bias)
    chunk, accumulate = head.lean_chunks(chunk, accumulate, hidden, weight, compute)
    return (
        hidden.reshape(target.numel(), hidden.shape[-1]),
        weight,
        target.reshape(-1).to(torch.int64),
        bias,
        # cap tanh(scale x / cap) / T = (cap / T) tanh((scale / T) x / (cap / T))
        checks.integer(name, "ignore_index", ignore_index),
        None if cap is None else cap / cool,
        scale / cool,
        *head.rows_and_budget(name, chunk),
        accumulate,
        compute,
        checks.boolean(name, "compact", compact),
        checks.boolean(name, "validate", validate),
        # a compiled graph may be captured in parts, in which other rows are dropped
        keep and not (compact and torch.compiler.is_compiling()),
        requested,
    )


_EVERY = {"temperature": 0.7, "softcap": 2.0, "logit_scale": 1.5, "chunk": 4}
SAMPLES = (
    Sample("all", case(10, 16, 50)),
    Sample("log-prob", case(10, 16, 50), {"outputs": ("log_prob",)}),
    Sample("entropy", case(10, 16, 50), {"outputs": ("entropy",), "chunk": 4}),
    Sample("lse", case(10, 16, 50, ignored=0.3), {"outputs": ("lse",)}),
    Sample("log-prob-lse", case(10, 16, 50), {"outputs": ("log_prob", "lse"), "chunk": 3}),
    Sample("argmax", case(6, 16, 50, ignored=0.3), {"outputs": ("lse", "argmax")}),
    Sample("chunk-1", case(5, 16, 50), {"chunk": 1}),
    Sample("chunk-7", case(16, 16, 50, ignored=0.25), {"chunk": 7}),
    Sample("cold", case(8, 16, 50), {"temperature": 0.5}),
    Sample("hot-softcap", case(8, 16, 50, size=2.0), {"temperature": 2.5, "softcap": 1.5}),
    Sample("logit-scale", case(8, 16, 50), {"logit_scale": 0.25}),
    Sample("everything", case(11, 24, 61, ignored=0.3, bias=True), _EVERY),
    Sample(
        "everything-not-compact",
        case(11, 24, 61, ignored=0.3, bias=True),
        {**_EVERY, "compact": False},
    ),
    Sample("all-ignored", case(6, 16, 50, ignored=1.0)),
    Sample("all-ignored-not-compact", case(6, 16, 50, ignored=1.0), {"compact": False}),
    Sample("frozen-weight", frozen(case(10, 16, 50, bias=True), "weight"), {"chunk": 4}),
    Sample("frozen-hidden", frozen(case(10, 16, 50, bias=True), "hidden"), {"chunk": 4}),
    Sample("only-bias", frozen(case(10, 16, 50, bias=True), "hidden", "weight"), {"chunk": 4}),
    Sample("only-hidden", frozen(case(10, 16, 50, bias=True), "weight", "bias")),
    Sample("frozen", frozen(case(4, 16, 50, bias=True), "hidden", "weight", "bias")),
    Sample(
        "three-axes",
        {"hidden": T((2, 3, 8)), "weight": T((20, 8)), "target": T((2, 3), classes=20)},
    ),
    *strided(0.3),
    Sample("one-class", case(5, 8, 1)),
    Sample("one-row", case(1, 16, 33)),
    Sample("no-rows", case(0, 16, 33)),
    Sample("odd-vocabulary", case(3, 8, 32777), {"chunk": 2}, size="thin"),
    # hidden's gradient would test how a CPU's GEMM adds 262144 numbers in fp32
    Sample("large-vocabulary", frozen(case(2, 4, 262144), "hidden"), size="thin"),
    Sample("past-65535-rows", case(65537, 2, 3), {"chunk": 65537}, size="thin"),
    Sample("8192x4096x128256", case(8192, 4096, 128256), {"outputs": ("log_prob",)}, size="bench"),
    Sample(
        "4096x2048x151936",
        case(4096, 2048, 151936),
        {"outputs": ("log_prob", "entropy"), "temperature": 0.9},
        size="bench",
    ),
)
COMPILE_SAMPLES = (
    Sample(
        "4096x2048x262144 everything",
        case(4096, 2048, 262144, bias=True),
        {**_EVERY, "chunk": "auto"},
    ),
)
