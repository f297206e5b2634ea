"""Where the log-probabilities of tokens come from: a head, given logits, or earlier numbers.

Every loss takes its policy, reference, student or teacher in one of these forms:

* :class:`Head`: hidden states and the head behind them, never rows x vocabulary in memory;
* :class:`Logits`, or a tensor with one axis more than the targets: given logits;
* :class:`~liger_multi.ops.LogProbOutput`, or a tensor of the targets' shape: log-probabilities that
  somebody has computed already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from liger_multi import checks, ops
from liger_multi.dispatch.config_file import parse_bytes
from liger_multi.losses.heads import through
from liger_multi.losses.options import check_kinds, kinds_of
from liger_multi.losses.reductions import counted
from liger_multi.ops import LogProbOutput
from liger_multi.ops._head import accumulator, rows_and_budget
from liger_multi.ops.fused_linear_log_prob import prepared

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
        chunk: Rows of logits at a time, a byte budget such as "512MiB", or auto.
        accumulate: Dtype in which the gradient of the weight is summed.
        compact: Drop ignored rows before the product.
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
        """Check what no operator is going to check, or what is read before."""
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
            return through(self.weight, self.hidden, function)
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
        """Check what no operator is going to check, or what is read before."""
        # lazy logits know their dtype, and are not to be computed here
        if not isinstance(self.logits, Tensor) or not self.logits.dtype.is_floating_point:
            raise TypeError(
                "Logits: logits must be a floating-point tensor, got "
                f"{checks.describe(self.logits)}"
            )
        _check(self)


_KINDS = {kind: kinds_of(kind.__annotations__) for kind in (Head, Logits)}


def _check(source: Head | Logits) -> None:
    title = type(source).__name__
    check_kinds(title, _KINDS[type(source)], source)
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
        own = source.log_prob
        if not isinstance(own, Tensor) or own.shape != target.shape:
            raise ValueError(
                f"{name}: log-probabilities of {role} must have the shape {tuple(target.shape)} "
                f"of the targets (logits one axis more), got {checks.describe(own)}"
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
    found = lazy() if callable(lazy) else None
    if found is None:
        return source
    if found["softcap"] is None:  # the source's scale and cap come after the model's own
        scale = found["logit_scale"] * source.logit_scale
        found |= {"softcap": source.softcap, "logit_scale": scale}
    elif source.softcap is not None or source.logit_scale != 1.0:
        return source
    return Head(**found, temperature=source.temperature, validate=source.validate)


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
    found = as_source(name, source, target, role)
    checks.names(name, outputs, LogProbOutput._fields)
    if isinstance(found, LogProbOutput):
        return _given(name, found, counted(name, target, ignore_index), outputs)
    if isinstance(found, Logits):
        options = {k: v for k, v in vars(found).items() if k != "logits"}
        return ops.token_log_prob(
            found.logits, target, ignore_index=ignore_index, outputs=outputs, **options
        )

    def run(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> LogProbOutput:
        if found.keep and torch.is_grad_enabled():
            from liger_multi.losses.kept import kept_tokens

            args = prepared(
                hidden, weight, target, bias, ignore_index=ignore_index, outputs=outputs,
                **found.options(),
            )  # fmt: skip
            made = kept_tokens((hidden, weight, bias), args, target, found.keep)
            if made is not None:
                return made
        return ops.fused_linear_log_prob(
            hidden, weight, target, bias, ignore_index=ignore_index, outputs=outputs,
            **found.options(),
        )  # fmt: skip

    result: LogProbOutput = found.run(run)
    return result


def detached(made: LogProbOutput) -> LogProbOutput:
    """The same numbers without gradients."""

    def cut(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.detach()

    return LogProbOutput(cut(made.log_prob), cut(made.entropy), cut(made.lse), cut(made.argmax))


def _given(
    name: str, found: LogProbOutput, valid: Tensor, outputs: tuple[str, ...]
) -> LogProbOutput:
    missing = [key for key in outputs if getattr(found, key) is None]
    if missing:
        raise ValueError(
            f"{name}: needs {', '.join(missing)} of every token, which the given log-probabilities "
            "do not bring; give a losses.Head, logits, or an ops.LogProbOutput that has them"
        )
    fill = LogProbOutput(0.0, 0.0, 0.0, -1)  # type: ignore[arg-type]
    made = {key: torch.where(valid, getattr(found, key), getattr(fill, key)) for key in outputs}
    return LogProbOutput(**made)


def log_square_sum(
    source: Source, target: Tensor, *, ignore_index: int = IGNORED, name: str = "tokens"
) -> Tensor:
    """``log sum_j p[j]^2`` of every token, without a gradient.

    It is ``logsumexp(2 z) - 2 logsumexp(z)``: another look at half the temperature.
    """
    found = as_source(name, source, target)
    if isinstance(found, LogProbOutput):
        raise ValueError(
            f"{name}: weights by the sum of squared probabilities need a losses.Head or logits, "
            "got log-probabilities"
        )
    with torch.no_grad():
        sharp = replace(found, temperature=found.temperature / 2)
        once, twice = (
            tokens(s, target, ("lse",), ignore_index=ignore_index, name=name).lse
            for s in (found, sharp)
        )
        assert once is not None
        assert twice is not None
        return twice - 2 * once
