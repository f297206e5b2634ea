"""Sums over tokens whose loss depends on the token's own statistics: one pass over the vocabulary.

There are two ways to compute such a sum. With two passes, :func:`fused_linear_log_prob` gives
statistics that any formula may use, and computes the logits once more in backward: four products of
a head, 8 M H V operations. With one pass, a chunk's statistics give at once what every row's
gradient is multiplied by, its logits are overwritten by their gradient while they are there, and
backward only scales: three products, 6 M H V operations, at the price of keeping the gradients of
hidden states and weight (in the accumulator's dtype) until backward.

The formula is the same function in both. It runs on the numbers of a chunk's rows under autograd,
which costs a few small launches a chunk.

Losses of rows of logits that no statistics of rows can tell go a block of rows at a time: a chunk
of the student's logits becomes its own gradient, as in one pass, by autograd through a function of
logits on blocks of a few rows. So any function of rows is a loss of a head that never holds
rows x vocabulary; its temporaries are a block's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi._torch_private import WithoutAutocast
from liger_multi.dispatch.autograd import first_derivatives_only
from liger_multi.losses.sources import (
    IGNORED,
    Head,
    Logits,
    Source,
    as_source,
    detached,
    on_device,
    row_kernels,
    tokens,
)
from liger_multi.ops import LogProbOutput
from liger_multi.ops.fused_linear_log_prob import OUTPUTS, prepared

Columns = Mapping[str, Tensor]
Formula = Callable[[LogProbOutput, Columns], Tensor]
"""The loss of every token, weighted, from its statistics and its entries of named columns."""

ChunkPass = Callable[[tuple[bool, ...]], tuple[Tensor, tuple[Tensor, ...], Any]]
"""From what needs gradients to the sum, statistics of rows, and the gradients of the sum."""

PASSES = ("auto", "one", "two")


def token_sum(
    source: Source,
    target: Tensor,
    formula: Formula,
    columns: Columns,
    outputs: tuple[str, ...] = ("log_prob",),
    *,
    passes: str = "auto",
    ignore_index: int = IGNORED,
    name: str = "token_sum",
    role: str = "source",
) -> tuple[Tensor, LogProbOutput]:
    """The sum of a formula over tokens, and the tokens' statistics without gradients.

    Args:
        source: The policy.
        target: Token ids ``(...)``; ignored tokens cost nothing.
        formula: Acts on every token by itself; one pass calls it with a chunk of rows at a time.
        columns: Constants of every token, of the target's shape, or with one axis more. With a
            column ``ids`` of classes, the formula finds their log-probabilities as ``picked``.
        outputs: Statistics that the formula reads or that the caller wants.
        passes: One, two, or auto: one where the source is a head and something needs a gradient.
        ignore_index: Targets that cost nothing.
        name: Who asks, for messages.
        role: What the source is there, for messages.
    """
    checks.one_of(name, "passes", passes, PASSES)
    for key, column in columns.items():
        checks.constant(name, key, column)
    typed_source = as_source(name, source, target, role)
    if passes == "one" and not isinstance(typed_source, Head):
        raise ValueError(f"{name}: one pass needs a losses.Head, got {type(typed_source).__name__}")
    if isinstance(typed_source, Head) and passes != "two":
        result: Any = typed_source.run(
            lambda hidden, weight, bias: _fused(
                typed_source,
                (hidden, weight, bias),
                target,
                formula,
                columns,
                outputs,
                ignore_index,
                passes,
            )
        )
        if result is not None:
            return result[0], LogProbOutput(*result[1:])
    requested = tuple(dict.fromkeys((*outputs, "log_prob", "lse"))) if "ids" in columns else outputs
    output = tokens(typed_source, target, requested, ignore_index=ignore_index, name=name)
    if "ids" in columns:
        columns = {
            **columns,
            "picked": _log_probs_of_classes(name, typed_source, target, output, columns["ids"]),
        }
    return _masked(formula(output, columns), target, ignore_index).sum(), detached(output)


def _log_probs_of_classes(
    name: str, source: Any, target: Tensor, log_prob_output: LogProbOutput, ids: Tensor
) -> Tensor:
    """Log-probabilities of a few classes.

    What rounding left out of lse is what the target's log-probability has and its logit less lse
    has not.
    """
    if not isinstance(source, Logits):
        raise ValueError(
            f"{name}: classes are picked from given logits, or from a losses.Head in one pass, "
            f"got {type(source).__name__}"
        )
    assert log_prob_output.lse is not None
    assert log_prob_output.log_prob is not None
    lse = log_prob_output.lse.unsqueeze(-1)
    with torch.no_grad():
        log_prob = curved(source.logits.gather(-1, target.clamp(min=0).unsqueeze(-1)), source)
        lse_low = (log_prob - lse) - log_prob_output.log_prob.unsqueeze(-1)
        lse_low = torch.where(lse_low.isfinite(), lse_low, 0)
    return curved(source.logits.gather(-1, ids.clamp(min=0)), source) - lse - lse_low


def _masked(values: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    # a NaN of a token that could not be scored is dropped too
    return torch.where(target != ignore_index, values, 0)


def _fused(
    head: Head,
    tensors: tuple[Tensor, Tensor, Tensor | None],
    target: Tensor,
    formula: Formula,
    columns: Columns,
    outputs: tuple[str, ...],
    ignore_index: int,
    passes: str,
) -> tuple[Any, ...] | None:
    """The sum in one pass; None if two passes are used."""
    hidden, weight, bias = tensors
    args = prepared(
        hidden, weight, target, bias, ignore_index=ignore_index, outputs=outputs, **head.options()
    )
    grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    # the range of float16 does not hold sums whose upstream gradient is not known yet
    narrow = (args[10] or hidden.dtype) == torch.float16
    requested = (grad or passes == "one") and not narrow
    kernels = row_kernels(tensors, args) if requested else None
    if kernels is None:
        if passes == "one":
            reason = "float16" if narrow else "these tensors, or the backend that they resolve to"
            raise ValueError(f"one pass is not available for {reason}; use passes='auto'")
        return None
    flat = {key: _flat(key, column, target) for key, column in columns.items()}
    output = in_one_pass(
        args[0],
        args[1],
        args[3],
        kernels.scale,
        lambda needs: chunk_pass(kernels, args, formula, flat, needs),
    )
    shaped = [x.view(target.shape) if x.numel() == target.numel() else None for x in output[1:]]
    by_name = dict(zip(OUTPUTS, shaped, strict=True))
    return (output[0], *[by_name[n] if n in outputs else None for n in OUTPUTS])


def _flat(key: str, column: Tensor, target: Tensor) -> Tensor:
    shape = target.shape
    if column.shape[: target.ndim] != shape or column.ndim > target.ndim + 1:
        raise ValueError(
            f"the column {key} must have the shape {tuple(shape)} of the targets (and one axis "
            f"more, if any), got {checks.describe(column)}"
        )
    return column.reshape(target.numel(), *column.shape[target.ndim :])


def in_one_pass(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: Any, one_pass: ChunkPass
) -> tuple[Tensor, ...]:
    """Loss and statistics of a pass that also computes the gradients."""
    apply: Any = _OnePass.apply
    return apply(hidden, weight, bias, scale, one_pass)  # type: ignore[no-any-return]


class _OnePass(torch.autograd.Function):
    """Loss and gradients of all chunks; backward scales by the upstream gradient of the sum."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: Any,
        one_pass: ChunkPass,
    ) -> tuple[Tensor, ...]:
        with WithoutAutocast(), on_device(hidden):
            loss, rows, gradients = one_pass(ctx.needs_input_grad[:3])
        ctx.scale = scale
        ctx.save_for_backward(*gradients, loss)  # the output brings an edge to every input
        ctx.dtypes = [x.dtype if x is not None else None for x in (hidden, weight, bias)]
        ctx.mark_non_differentiable(*rows)
        ctx.set_materialize_grads(False)
        return loss, *rows

    @staticmethod
    @first_derivatives_only("losses (in one pass)")
    def backward(
        ctx: Any, saved: tuple[Tensor, ...], dloss: Tensor | None, *unused_grads: Any
    ) -> tuple[Tensor | None, ...]:
        if dloss is None:
            return (None,) * 5
        gradients: list[Tensor | None] = [None] * 5
        with on_device(dloss):
            for i, gradient in enumerate(saved[:-1]):
                if ctx.needs_input_grad[i]:
                    gradients[i] = ctx.scale(gradient, dloss, ctx.dtypes[i])
        return tuple(gradients)


def chunk_pass(
    kernels: Any, args: tuple[Any, ...], formula: Formula, columns: Columns, needs: tuple[bool, ...]
) -> tuple[Tensor, tuple[Tensor, ...], Any]:
    """Go through the chunks once: the sum, the rows' statistics, and the gradients of the sum."""
    from liger_multi.reference.common.chunking import statistics_dtype
    from liger_multi.reference.cross_entropy.fused_linear import (
        Accumulator,
        Chunks,
        ChunkSpec,
        Collected,
    )
    from liger_multi.reference.cross_entropy.reduction import check_targets
    from liger_multi.reference.cross_entropy.rows import Objective, upstream_of

    (
        hidden,
        weight,
        target,
        bias,
        ignore_index,
        softcap,
        scale,
        chunk,
        budget,
        accumulate,
        dtype,
        compact,
        validate,
        _,
        outputs,
    ) = args
    check_targets(target, weight.shape[0], ignore_index, validate)
    spec = Objective(ignore_index, 0.0, 0.0, softcap, scale)
    chunks = Chunks(hidden, weight, target, bias, spec, ChunkSpec(chunk, budget, dtype, compact))
    collected = Collected(chunks, spec, outputs, loss=False)
    accumulator = Accumulator(chunks, hidden, weight, accumulate, needs)
    total = target.new_zeros((), dtype=statistics_dtype(chunks.dtype))
    for chunk_slice, rows_of_chunk, h, t, raw in chunks:
        statistics = kernels.statistics(raw, t, None, spec, outputs)
        collected.put(rows_of_chunk, statistics)
        part = {key: column[rows_of_chunk] for key, column in columns.items()}
        picked = picked_logits(raw, part["ids"], spec) if "ids" in part else None
        value, slopes, dpicked = _slopes(formula, statistics, part, t, ignore_index, picked)
        total += value
        if any(needs):
            upstream = upstream_of(
                *slopes,
                entropies=statistics.entropy,
                target=t,
                vocabulary=weight.shape[0],
                objective=spec,
            )
            kernels.log_prob_gradient_(
                raw, t, statistics.normalizer, spec, upstream.at(slice(None))
            )
            if dpicked is not None and picked is not None:
                if spec.softcap is not None:
                    dpicked = dpicked * (1 - (picked / spec.softcap).square())
                dpicked = (dpicked * spec.logit_scale).to(raw.dtype)
                raw.scatter_add_(1, part["ids"].clamp(min=0), dpicked)
            accumulator.add(chunk_slice, rows_of_chunk, h, raw)
    rows = collected.rows
    return total, (rows.log_prob, rows.entropy, rows.lse, rows.argmax), accumulator.gradients


def picked_logits(raw: Tensor, ids: Tensor, spec: Any) -> Tensor:
    """Logits of a few classes of every row, as the objective makes them; negative ids pick any."""
    from liger_multi.reference.cross_entropy.rows import scaled

    return scaled(raw.gather(1, ids.clamp(min=0)), spec)


def _slopes(
    formula: Formula,
    statistics: Any,
    columns: Columns,
    target: Tensor,
    ignore_index: int,
    picked: Tensor | None,
) -> tuple[Tensor, list[Tensor | None], Tensor | None]:
    """The sum over a chunk; its derivatives by log_prob, entropy, lse, and the logits picked."""
    with torch.enable_grad():
        leaves = [
            x.detach().requires_grad_() if x.numel() == target.numel() else None
            for x in (statistics.log_prob, statistics.entropy, statistics.lse)
        ]
        log_prob, entropy, lse = leaves
        log_prob_output = LogProbOutput(
            log_prob, entropy, lse, statistics.argmax if statistics.argmax.numel() else None
        )
        if picked is not None:
            assert lse is not None
            picked = picked.detach().requires_grad_()
            leaves.append(picked)
            columns = {
                **columns,
                "picked": (picked - lse.unsqueeze(1)) - statistics.lse_low.unsqueeze(1),
            }
        value = _masked(formula(log_prob_output, columns), target, ignore_index).sum()
        required = [x for x in leaves if x is not None]
        if not value.requires_grad:  # a formula whose coefficients are all constants
            return value, [torch.zeros_like(required[0]), None, None], None
        gradients = iter(torch.autograd.grad(value, required, allow_unused=True))
        slopes = [None if x is None else next(gradients) for x in leaves]
    if all(slope is None for slope in slopes[:3]):
        slopes[0] = torch.zeros_like(statistics.lse)
    return value.detach(), slopes[:3], slopes[3] if picked is not None else None


# --- a block of rows at a time ---

RowLoss = Callable[[Tensor, Tensor], Tensor]
"""Losses of rows from the student's and the teacher's logits in fp32, both curved."""


def curved(raw: Tensor, source: Any) -> Tensor:
    """Logits in fp32 under the scale, softcap and temperature of a source."""
    z = raw.to(torch.float64 if raw.dtype == torch.float64 else torch.float32)
    z = z * source.logit_scale if source.logit_scale != 1.0 else z
    z = z if source.softcap is None else source.softcap * torch.tanh(z / source.softcap)
    return z if source.temperature == 1.0 else z / source.temperature


def tiled_sum(
    head: Head,
    tensors: tuple[Tensor, Tensor, Tensor | None],
    teacher: Callable[[Any], Tensor],
    target: Tensor,
    row_weights: Tensor,
    function: RowLoss,
    ignore_index: int,
) -> Tensor:
    """The sum of a function of rows, weighted.

    Args:
        head: Scale, softcap and memory plan of the student.
        tensors: Its hidden states, weight and bias.
        teacher: From numbers of rows to the teacher's logits of those, curved.
        target: Ids ``(...)``; ignored rows are dropped.
        row_weights: Weights of rows, of the target's shape.
        function: The loss of a row.
        ignore_index: Targets that cost nothing.
    """
    hidden, weight, bias = tensors
    args = prepared(
        hidden, weight, target, bias, ignore_index=ignore_index, outputs=("lse",), **head.options()
    )
    flat = row_weights.reshape(-1)

    def one_pass(needs: tuple[bool, ...]) -> tuple[Tensor, tuple[Tensor, ...], Any]:
        return _pass_over_tiles(head, args, teacher, flat, function, needs)

    kernels = row_kernels(tensors, args)
    if kernels is None:
        return _by_autograd(head, args, teacher, flat, function)
    return in_one_pass(args[0], args[1], args[3], kernels.scale, one_pass)[0]


LOGITS_AT_ONCE = 2**28
"""Numbers of logits that exist at a time where autograd makes the gradients."""


def _by_autograd(
    head: Head,
    args: tuple[Any, ...],
    teacher: Callable[[Any], Tensor],
    row_weights: Tensor,
    function: RowLoss,
) -> Tensor:
    """The loss by autograd, for compiled graphs, deterministic modes and tensors of subclasses.

    Logits beyond :data:`LOGITS_AT_ONCE` are computed again in backward, a block of rows at a time.
    """
    from torch.utils.checkpoint import checkpoint

    from liger_multi.dispatch.config import current, using_configuration
    from liger_multi.ops.linear import linear_of_mode

    hidden, weight, target, bias, ignore_index = args[:5]

    def block(x: Tensor, w: Tensor, b: Tensor | None, rows: Tensor) -> Tensor:
        with checks.autocast(x.device.type, None):
            return function(curved(linear_of_mode(x, w, b), head), teacher(rows))

    compiling = torch.compiler.is_compiling()
    configuration = None if compiling else current()

    def once_more(*args: Any) -> Tensor:
        assert configuration is not None
        with using_configuration(configuration):  # backward may run under another one
            return block(*args)

    count, indices = len(target), torch.arange(len(target), device=target.device)
    step = count
    if not compiling:
        step = max(1, LOGITS_AT_ONCE // weight.shape[0])
    parts = []
    for start in range(0, count, max(1, step)):
        inputs = (hidden[start : start + step], weight, bias, indices[start : start + step])
        recompute = step < count and torch.is_grad_enabled()
        parts.append(
            checkpoint(once_more, *inputs, use_reentrant=False) if recompute else block(*inputs)
        )
    part = row_weights * (target != ignore_index)
    values = torch.cat(parts) if parts else row_weights.new_zeros(0)
    return (torch.where(part != 0, values, 0) * part).sum()  # type: ignore[no-any-return]


def _pass_over_tiles(
    head: Head,
    args: tuple[Any, ...],
    teacher: Callable[[Any], Tensor],
    row_weights: Tensor,
    function: RowLoss,
    needs: tuple[bool, ...],
) -> tuple[Tensor, tuple[Tensor, ...], Any]:
    """The weighted sum of a loss over blocks of rows, and the gradients that are needed."""
    from liger_multi.reference.common.chunking import row_blocks
    from liger_multi.reference.cross_entropy.fused_linear import Accumulator, Chunks, ChunkSpec
    from liger_multi.reference.cross_entropy.rows import Objective

    hidden, weight, target, bias, ignore_index = args[:5]
    chunk, budget, accumulate, dtype, compact = args[7:12]
    spec = Objective(ignore_index, 0.0, 0.0, None)
    chunks = Chunks(hidden, weight, target, bias, spec, ChunkSpec(chunk, budget, dtype, compact))
    accumulator = Accumulator(chunks, hidden, weight, accumulate, needs)
    total = row_weights.new_zeros(())
    for chunk_slice, rows_of_chunk, h, t, raw in chunks:
        rows = torch.arange(len(target), device=target.device)[rows_of_chunk]
        for block in row_blocks(raw.shape[0], raw.shape[1] * 16):
            part = row_weights[rows_of_chunk][block] * (t[block] != ignore_index)
            with torch.set_grad_enabled(any(needs)):
                leaf = raw[block].detach().requires_grad_(any(needs))
                values = function(curved(leaf, head), teacher(rows[block]))
                value = (torch.where(part != 0, values, 0) * part).sum()
                if any(needs):
                    raw[block] = torch.autograd.grad(value, leaf)[0]
            total += value.detach()
        if any(needs):
            accumulator.add(chunk_slice, rows_of_chunk, h, raw)
    return total, (), accumulator.gradients


def mean_logits(source: Source, target: Tensor, ignore_index: int, name: str) -> Tensor:
    """The mean of every token's logits, without gradients; 0 where the target is ignored."""
    typed_source = as_source(name, source, target)
    if isinstance(typed_source, LogProbOutput):
        raise ValueError(f"{name}: the mean of logits needs a losses.Head or logits, got neither")
    valid = target != ignore_index
    with torch.no_grad():
        if isinstance(typed_source, Logits):
            return torch.where(valid, curved(typed_source.logits, typed_source).mean(-1), 0)
        head = typed_source

        def run(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if head.softcap is None:  # linear, so one product with the mean of the classes
                mean = hidden.float() @ weight.mean(0, dtype=torch.float32)
                mean = mean if bias is None else mean + bias.float().mean()
                return torch.where(valid, mean * (head.logit_scale / head.temperature), 0)
            return _mean_rows(head, (hidden, weight, bias), target, ignore_index)

        return head.run(run)  # type: ignore[no-any-return]


def _mean_rows(
    head: Head, tensors: tuple[Tensor, Tensor, Tensor | None], target: Tensor, ignore_index: int
) -> Tensor:
    from liger_multi.reference.cross_entropy.fused_linear import Chunks, ChunkSpec
    from liger_multi.reference.cross_entropy.rows import Objective

    hidden, weight, bias = tensors
    args = prepared(
        hidden, weight, target, bias, ignore_index=ignore_index, outputs=("lse",), **head.options()
    )
    spec = Objective(ignore_index, 0.0, 0.0, None)
    chunk_spec = ChunkSpec(args[7], args[8], args[10], args[11])
    out = torch.zeros(target.numel(), dtype=torch.float32, device=target.device)
    with WithoutAutocast():
        for _, rows_of_chunk, _, _, raw in Chunks(
            args[0], args[1], args[2], args[3], spec, chunk_spec
        ):
            out[rows_of_chunk] = curved(raw, head).mean(-1).float()
    return torch.where(target != ignore_index, out.view(target.shape), 0)
