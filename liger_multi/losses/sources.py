"""Where the log-probabilities of tokens come from: a head, given logits, or earlier numbers.

Every loss takes its policy, reference, student or teacher in one of these forms:

* :class:`Head`: hidden states and the head behind them, never rows x vocabulary in memory;
* :class:`Logits`, or a tensor with one axis more than the targets: given logits;
* :class:`~liger_multi.ops.LogProbOutput`, or a tensor of the targets' shape: log-probabilities that
  exist already.

The weight of a head is reached through the head's own call: hooks of FSDP and ZeRO-3 gather a
sharded weight when the module that owns it is called, and free it again after the call and after
its backward. So a loss that takes a module runs inside of that call. A LoRA adapter on the head is
computed exactly, as columns beside the weight:

    h W^T + s dropout(h) A^T B^T = [h, s dropout(h) A^T] [W, B]^T

Where a byte budget allows it, the logits of log-probabilities stay until backward. Losses of pairs
and of sequences know what arrives at a token only when all tokens are known, so without kept logits
they need two passes over the vocabulary. Where the logits of all rows fit into a budget, they are
kept and overwritten by their gradient: three products of the head, not four.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from liger_multi import checks, ops
from liger_multi._torch_private import WithoutAutocast
from liger_multi.dispatch.autograd import first_derivatives_only
from liger_multi.dispatch.config import parse_bytes
from liger_multi.dispatch.resolve import resolve
from liger_multi.losses.shared import check_types, counting_mask, field_types
from liger_multi.modules.parameters import Job, dtype_of, stored
from liger_multi.ops import LogProbOutput
from liger_multi.ops._head import accumulator, rows_and_budget
from liger_multi.ops.fused_linear_log_prob import OUTPUTS, as_output, op, prepared

# --- the weight of a head, through the head's own call ---

Loss = Callable[[Tensor, Tensor, Tensor | None], Any]


def call_head(head: nn.Module, hidden: Tensor, loss: Loss) -> Any:
    """``loss(hidden, weight, bias)`` in a call of ``head``.

    Raises:
        TypeError: A head that is not linear, with the reason why it is none.
    """
    copies = getattr(head, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):  # a wrapper around copies that train whole
        disabled = getattr(head, "_disable_adapters", False)
        active = [n for n in getattr(head, "active_adapters", ()) if n in copies]
        chosen = head.original_module if disabled or not active else copies[active[0]]
        return call_head(chosen, hidden, loss)  # type: ignore[arg-type]
    if hasattr(head, "base_layer"):
        return _adapted(head, hidden, loss)
    reason = _refusal(head)
    if reason is not None:
        raise TypeError(f"the weight of this head cannot be used by itself: {reason}")
    if hasattr(head, "stock_forward"):  # the head of a patched model takes jobs
        try:
            return head(hidden, Job(lambda own, h: loss(h, own.weight, own.bias)))
        except TypeError:
            if hasattr(head, "stock_forward"):
                raise
            # another thread took the patch away in between, and no other layer takes jobs
    return _called_in_forward(head, hidden, lambda h: loss(h, head.weight, head.bias))  # type: ignore[arg-type]


def _called_in_forward(head: nn.Module, hidden: Tensor, body: Callable[[Tensor], Any]) -> Any:
    """Call ``head`` with another forward, so that its hooks run around ``body``."""
    head.forward = body
    try:
        return head(hidden)
    finally:
        del head.forward


_REFUSALS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (lambda head: "forward" in vars(head), "other code replaced the forward of this {kind}"),
    (lambda head: not isinstance(head, nn.Linear), "it is a {kind}, not a linear layer"),
    (
        lambda head: (
            type(head).forward is not nn.Linear.forward
            and not hasattr(head, "stock_forward")
            and not hasattr(head, "_liger_multi_plain")  # patched, and a linear layer all the same
        ),
        "{kind} has a forward of its own",
    ),
    (
        lambda head: (weight := stored(head)) is not None and not weight.is_floating_point(),
        "its weight is quantized ({head.weight.dtype})",
    ),
)
"""Why the weight of a head cannot be used by itself: the first that holds, with its reason."""


def _refusal(head: nn.Module) -> str | None:
    reason = next((text for applies, text in _REFUSALS if applies(head)), None)
    return reason and reason.format(kind=type(head).__name__, head=head)


def _adapted(head: Any, hidden: Tensor, loss: Loss) -> Any:
    """The loss through a head with LoRA, whose factors widen hidden states and weight."""
    module_class = type(head).__name__
    if "forward" in vars(head):
        raise TypeError(f"other code replaced the forward of this adapter ({module_class})")
    if getattr(head, "disable_adapters", False) and getattr(head, "merged", False):
        raise TypeError(
            f"the adapter {module_class} is disabled but merged into the weight; unmerge it"
        )
    if getattr(head, "disable_adapters", False) or getattr(head, "merged", False):
        return _called_in_forward(head, hidden, lambda h: call_head(head.base_layer, h, loss))
    names = [n for n in head.active_adapters if n in getattr(head, "lora_A", {})]
    variants = getattr(head, "lora_variant", {})
    strange = [n for n in names if n in variants] or not isinstance(
        getattr(head, "lora_A", None), nn.ModuleDict
    )
    if strange or any(n not in names for n in head.active_adapters):
        raise TypeError(
            f"the adapter on the head ({module_class}) is no plain LoRA, so its logits are not a "
            "product of hidden states and a weight; give the loss real logits, or keep the head "
            "out of target_modules"
        )
    for name in names:
        if getattr(head.lora_B[name], "bias", None) is not None:
            raise TypeError(f"the adapter {name!r} on the head has a bias; give real logits")

    def body(h: Tensor) -> Any:
        parts = []
        for name in names:
            a = head.lora_A[name]
            low_rank = a(head.lora_dropout[name](h.to(dtype_of(a)))) * head.scaling[name]
            parts.append((low_rank.to(h.dtype), head.lora_B[name].weight))

        def with_adapter(h: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
            wide = torch.cat((h, *[low for low, _ in parts]), -1)
            joined_weight = torch.cat((weight, *[up.to(weight.dtype) for _, up in parts]), 1)
            return loss(wide, joined_weight, bias)

        return call_head(head.base_layer, h, with_adapter if parts else loss)

    return _called_in_forward(head, hidden, body)


# --- row kernels ---


def row_kernels(tensors: tuple[Tensor | None, ...], args: tuple[Any, ...]) -> Any:
    """The row kernels of the backend that serves these tensors; None where operators must."""
    if torch.compiler.is_compiling() or any(
        x is not None and (type(x) not in (Tensor, torch.nn.Parameter) or x.is_meta)
        for x in tensors
    ):
        return None
    return getattr(resolve(op.fwd, args), "kernels", None)


def on_device(x: Tensor) -> Any:
    """The device of ``x`` as the current one, where its kind has several."""
    import contextlib

    if x.device.type in ("cpu", "meta"):
        return contextlib.nullcontext()
    return torch.get_device_module(x.device.type).device(x.device.index)


# --- logits that stay until backward ---

LEAST_SHARE = 8  # an eighth of the rows, or it is not worth a chunk of its own


def kept_tokens(
    tensors: tuple[Tensor | None, ...], args: tuple[Any, ...], target: Tensor, keep: int | str
) -> LogProbOutput | None:
    """Statistics of tokens with gradients; None where too few of their logits can be kept."""
    from liger_multi.reference.common.chunking import whole_steps

    hidden, weight, size = args[0], args[1], (args[10] or args[0].dtype).itemsize
    rows, limit = hidden.shape[0], parse_bytes(keep, "keep of Head")
    fit = min(rows, whole_steps(limit // max(1, weight.shape[0] * size)))
    if fit * LEAST_SHARE < rows:
        return None
    kernels = row_kernels(tensors, args)
    if kernels is None:
        return None
    apply: Any = _Kept.apply
    output = apply(hidden, weight, args[3], kernels, args, fit)
    requested = args[-1].split(",")
    return LogProbOutput(
        **{n: x.view(target.shape) for n, x in zip(OUTPUTS, output, strict=True) if n in requested}
    )


class _Kept(torch.autograd.Function):
    """A chunk whose logits are kept, and the others, whose logits are computed twice."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kernels: Any,
        args: Any,
        fit: int,
    ) -> tuple[Tensor, ...]:
        from liger_multi.reference.cross_entropy.fused_linear import Collected
        from liger_multi.reference.cross_entropy.reduction import check_targets

        ctx.kernels, ctx.rest, ctx.fit, ctx.kept = kernels, args[4:], fit, None
        target, outputs = args[2], args[-1]
        check_targets(target, weight.shape[0], args[4], args[12])
        with WithoutAutocast(), on_device(hidden):
            chunks = _chunks(args, fit)
            collected = Collected(chunks, chunks.spec, outputs, loss=False)
            ctx.kept = chunks.first()
            for _, rows_of_chunk, _, t, raw in chunks.over(ctx.kept):
                collected.put(rows_of_chunk, kernels.statistics(raw, t, None, chunks.spec, outputs))
            rows = collected.rows
        ctx.save_for_backward(*args[:4], rows.entropy, *rows.normalizer)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(rows.argmax)
        return rows.log_prob, rows.entropy, rows.lse, rows.argmax

    @staticmethod
    @first_derivatives_only("losses (with logits that are kept)")
    def backward(ctx: Any, saved: tuple[Any, ...], *grads: Tensor | None) -> tuple[Any, ...]:
        from liger_multi.reference.cross_entropy.fused_linear import Accumulator
        from liger_multi.reference.cross_entropy.rows import LogSumExp, upstream_of, within_range

        if all(g is None for g in grads[:3]):
            return (None,) * 6
        *tensors, entropy, lse, lse_low = saved
        normalizer = LogSumExp(lse, lse_low)
        hidden, weight, target, bias = tensors
        logits, ctx.kept = ctx.kept, None  # a second backward would scale again
        with WithoutAutocast(), on_device(hidden):
            chunks = _chunks((*tensors, *ctx.rest), ctx.fit)
            is_kept = logits is not None
            logits = chunks.first() if logits is None else logits
            chunks.widen(logits)
            gradient_sums = Accumulator(
                chunks, hidden, weight, ctx.rest[5], ctx.needs_input_grad[:3]
            )
            arrived = upstream_of(
                *grads[:3],
                entropies=entropy,
                target=target,
                vocabulary=weight.shape[0],
                objective=chunks.spec,
            )
            upstream, factor = within_range(arrived, chunks.spec, chunks.dtype)
            for chunk_slice, rows_of_chunk, h, t, raw in chunks.over(logits, is_kept):
                ctx.kernels.log_prob_gradient_(
                    raw, t, normalizer.at(rows_of_chunk), chunks.spec, upstream.at(rows_of_chunk)
                )
                gradient_sums.add(chunk_slice, rows_of_chunk, h, raw)
            dtypes = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
            scale = ctx.kernels.scale
            scaled = [
                scale(g, factor, k) for g, k in zip(gradient_sums.gradients, dtypes, strict=True)
            ]
        gradients = [
            g if need else None for g, need in zip(scaled, ctx.needs_input_grad, strict=False)
        ]
        return (*gradients, None, None, None)


def _chunks(args: tuple[Any, ...], fit: int) -> Any:
    """Chunks of which the first has the rows that fit."""
    from liger_multi.reference.common.chunking import row_blocks
    from liger_multi.reference.cross_entropy.fused_linear import Chunks, ChunkSpec
    from liger_multi.reference.cross_entropy.rows import Objective

    class Kept(Chunks):
        spec = Objective(args[4], 0.0, 0.0, args[5], args[6])

        def first(self) -> Tensor:
            """Room for the logits that stay; where these are all, the buffer itself."""
            if self.buffer.shape[0] == self.rows:
                return self.buffer
            return self.buffer.new_empty(min(fit, self.rows), self.weight.shape[0])

        def widen(self, first_logits: Tensor) -> None:
            """Let the other chunks use the buffer of the first chunk once that is finished."""
            if first_logits.shape[0] > self.buffer.shape[0]:
                self.buffer, self.step = first_logits, first_logits.shape[0]

        def over(self, first_logits: Tensor, is_kept: bool = False) -> Any:
            edge = first_logits.shape[0]
            if edge:
                yield self.at(slice(0, edge), first_logits, is_kept)
            for part in row_blocks(self.rows - edge, 1, self.step):
                block = slice(edge + part.start, edge + part.stop)
                yield self.at(block, self.buffer[: part.stop - part.start])

    hidden, weight, target, bias = args[:4]
    chunk, budget = args[7:9] if fit < target.numel() else (max(1, target.numel()), 0)
    chunk_spec = ChunkSpec(chunk, budget, args[10], args[11])
    return Kept(hidden, weight, target, bias, Kept.spec, chunk_spec)


# --- heads, logits, numbers ---

IGNORED = -100


@dataclass(frozen=True)
class Head:
    """Hidden states and the linear head that makes logits of them.

    Args:
        hidden: Hidden states ``(..., H)``, of the positions that predict the targets.
        weight: The head's weight ``(V, H)``; or the head itself, whose own call then gathers its
            weight (FSDP, ZeRO-3) and whose LoRA adapter is computed; or a function that calls
            another one with hidden states, weight and bias.
        bias: The head's bias; with a module its own is taken.
        temperature: Logits are divided by it, after the softcap.
        softcap: Logits become ``softcap * tanh(logits / softcap)``.
        logit_scale: Factor of the logits, before the softcap.
        chunk: Rows of logits at a time, a byte budget such as "512MiB", auto, or lean: 128 MiB,
            and the gradient of the weight is summed in the dtype of the weight.
        accumulate: Dtype in which the gradient of the weight is summed.
        compact: Drop ignored rows before the product; on a device, of more than 512 rows.
        validate: Raise for targets out of range on a device too (a sync).
        keep: Bytes of logits, or a budget such as "2GiB", that may stay from forward to backward:
            losses of pairs and sequences compute these once, not twice (those of the first rows
            where not all fit; chunks of the others stand beside them). ``auto``: all of them where
            backward would hold them at once anyway, because they cost no more than an fp32
            gradient of the weight.
    """

    hidden: Tensor
    weight: Tensor | nn.Module | Callable[[Tensor, Callable[..., Any]], Any]
    bias: Tensor | None = None
    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    chunk: int | str = "auto"
    accumulate: torch.dtype = torch.float32
    compact: bool = True
    validate: bool = False
    keep: int | str = "auto"

    def __post_init__(self) -> None:
        """Check options that operators do not check, or that are read before the operator runs."""
        checks.floating("Head", hidden=self.hidden, bias=self.bias, optional=("bias",))
        weight: Any = self.weight
        if isinstance(weight, Tensor) or not callable(weight):
            checks.floating("Head", weight=weight)
        _check(self)
        rows_and_budget("Head", self.chunk)
        accumulator("Head", self.accumulate)
        if isinstance(self.keep, str):
            if self.keep != "auto":
                parse_bytes(self.keep, "keep of Head")
        elif checks.integer("Head", "keep", self.keep) < 0:
            raise ValueError(f"Head: keep must be at least 0 bytes, got {self.keep!r}")

    def options(self) -> dict[str, Any]:
        """What the operator takes by name."""
        return {
            "temperature": self.temperature,
            "softcap": self.softcap,
            "logit_scale": self.logit_scale,
            "chunk": self.chunk,
            "accumulate": self.accumulate,
            "compact": self.compact,
            "validate": self.validate,
        }

    def run(self, function: Callable[[Tensor, Tensor, Tensor | None], Any]) -> Any:
        """``function(hidden, weight, bias)`` with the weight that belongs to the call."""
        if not isinstance(self.weight, (nn.Module, Tensor)):
            return self.weight(self.hidden, function)
        if isinstance(self.weight, nn.Module):
            if self.bias is not None:
                raise ValueError("Head: a module brings its own bias, got a bias beside it")
            return call_head(self.weight, self.hidden, function)
        return function(self.hidden, self.weight, self.bias)


@dataclass(frozen=True)
class Logits:
    """Logits that exist already.

    Args:
        logits: ``(..., V)``, of the positions that predict the targets.
        temperature: Logits are divided by it, after the softcap.
        softcap: Logits become ``softcap * tanh(logits / softcap)``.
        logit_scale: Factor of the logits, before the softcap.
        validate: Raise for targets out of range on a device too (a sync).
    """

    logits: Tensor
    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    validate: bool = False

    def __post_init__(self) -> None:
        """Check options that operators do not check, or that are read before the operator runs."""
        # lazy logits know their dtype, and are not to be computed here
        if not isinstance(self.logits, Tensor) or not self.logits.dtype.is_floating_point:
            raise TypeError(
                "Logits: logits must be a floating-point tensor, got "
                f"{checks.describe(self.logits)}"
            )
        _check(self)


_FIELD_TYPES = {
    source_class: field_types(source_class.__annotations__) for source_class in (Head, Logits)
}


def _check(source: Head | Logits) -> None:
    title = type(source).__name__
    check_types(title, _FIELD_TYPES[type(source)], source)
    checks.number(title, "temperature", source.temperature, 0.0, above=True)
    if source.softcap is not None:
        checks.number(title, "softcap", source.softcap, 0.0, above=True)


Source: TypeAlias = Head | Logits | LogProbOutput | Tensor


def as_source(
    name: str, source: Source, target: Tensor, role: str = "source"
) -> Head | Logits | LogProbOutput:
    """A source in one of the three forms; tensors are told apart by their number of axes."""
    checks.ids(name, "target", target)
    if isinstance(source, Tensor):
        if source.ndim == target.ndim + 1:
            source = Logits(source)
        else:
            source = LogProbOutput(source)
    if isinstance(source, LogProbOutput):
        log_prob = source.log_prob
        if not isinstance(log_prob, Tensor) or log_prob.shape != target.shape:
            raise ValueError(
                f"{name}: log-probabilities of {role} must have the shape {tuple(target.shape)} "
                f"of the targets (logits one axis more), got {checks.describe(log_prob)}"
            )
        return source
    if not isinstance(source, (Head, Logits)):
        raise TypeError(
            f"{name}: {role} must be a losses.Head, losses.Logits, ops.LogProbOutput or a tensor, "
            f"got {checks.describe(source)}"
        )
    return source if isinstance(source, Head) else _from_lazy(source)


def _from_lazy(source: Logits) -> Head | Logits:
    """The head behind the lazy logits of a patched model, if these are such."""
    lazy = getattr(source.logits, "as_head", None)
    recipe_options = lazy() if callable(lazy) else None
    if recipe_options is None:
        return source
    if recipe_options["softcap"] is None:  # the source's scale and cap come after the model's own
        scale = recipe_options["logit_scale"] * source.logit_scale
        recipe_options |= {"softcap": source.softcap, "logit_scale": scale}
    elif source.softcap is not None or source.logit_scale != 1.0:
        return source
    return Head(**recipe_options, temperature=source.temperature, validate=source.validate)


def tokens(
    source: Source,
    target: Tensor,
    outputs: tuple[str, ...] = ("log_prob",),
    *,
    ignore_index: int = IGNORED,
    name: str = "tokens",
    role: str = "source",
) -> LogProbOutput:
    """Statistics of every token under a source; zeros where the target is ignored.

    Args:
        source: Where they come from.
        target: Token ids ``(...)``.
        outputs: Names of the statistics.
        ignore_index: Targets that cost nothing.
        name: Who asks, for messages.
        role: What the source is there, for messages.
    """
    typed_source = as_source(name, source, target, role)
    checks.names(name, outputs, LogProbOutput._fields)
    if isinstance(typed_source, LogProbOutput):
        return _existing_statistics(
            name, typed_source, counting_mask(name, target, ignore_index), outputs
        )
    if isinstance(typed_source, Logits):
        options = {k: v for k, v in vars(typed_source).items() if k != "logits"}
        return ops.token_log_prob(
            typed_source.logits, target, ignore_index=ignore_index, outputs=outputs, **options
        )

    def run(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> LogProbOutput:
        keep, tensors = typed_source.keep, (hidden, weight, target, bias)
        options = {"ignore_index": ignore_index, "outputs": outputs, **typed_source.options()}
        if keep == "auto":  # the operator does this itself
            return ops.fused_linear_log_prob(*tensors, **options)
        args, output = prepared(*tensors, keep=False, **options), None
        if keep and torch.is_grad_enabled():
            output = kept_tokens((hidden, weight, bias), args, target, keep)
        return as_output(op(*args), target, args[-1]) if output is None else output

    return typed_source.run(run)  # type: ignore[no-any-return]


def detached(log_prob_output: LogProbOutput) -> LogProbOutput:
    """The statistics without their autograd history."""

    def cut(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.detach()

    return LogProbOutput(
        cut(log_prob_output.log_prob),
        cut(log_prob_output.entropy),
        cut(log_prob_output.lse),
        cut(log_prob_output.argmax),
    )


def _existing_statistics(
    name: str, log_prob_output: LogProbOutput, valid: Tensor, outputs: tuple[str, ...]
) -> LogProbOutput:
    missing = [key for key in outputs if getattr(log_prob_output, key) is None]
    if missing:
        raise ValueError(
            f"{name}: needs {', '.join(missing)} of every token, which the given log-probabilities "
            "do not bring; give a losses.Head, logits, or an ops.LogProbOutput that has them"
        )
    fill = LogProbOutput(0.0, 0.0, 0.0, -1)  # type: ignore[arg-type]
    tensors = {
        key: torch.where(valid, getattr(log_prob_output, key), getattr(fill, key))
        for key in outputs
    }
    return LogProbOutput(**tensors)


def log_square_sum(
    source: Source, target: Tensor, *, ignore_index: int = IGNORED, name: str = "tokens"
) -> Tensor:
    """``log sum_j p[j]^2`` of every token, without a gradient.

    It is ``logsumexp(2 z) - 2 logsumexp(z)``, one more pass at half the temperature: twice a
    token's log-probability less its log-probability there, which have more digits than both
    normalizers.
    """
    typed_source = as_source(name, source, target)
    if isinstance(typed_source, LogProbOutput):
        raise ValueError(
            f"{name}: weights by the sum of squared probabilities need a losses.Head or logits, "
            "got log-probabilities"
        )
    with torch.no_grad():
        sharp = replace(typed_source, temperature=typed_source.temperature / 2)
        first, squared = (
            tokens(s, target, ("log_prob", "lse"), ignore_index=ignore_index, name=name)
            for s in (typed_source, sharp)
        )
        assert first.log_prob is not None
        assert squared.log_prob is not None
        assert first.lse is not None
        assert squared.lse is not None
        square = 2 * first.log_prob - squared.log_prob
        return torch.where(square.isfinite(), square, squared.lse - 2 * first.lse)
