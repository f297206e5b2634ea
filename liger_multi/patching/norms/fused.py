"""Norms, and activations that are one operator: a patched instance calls it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from liger_multi import ops
from liger_multi.checks import autocast_dtype
from liger_multi.patching.evidence.signature import Signature, code_holds, holds
from liger_multi.patching.float8.linear import handed_out, hands_out
from liger_multi.patching.norms.kinds import NormKind
from liger_multi.patching.options import ROTATED, Options, run_bound
from liger_multi.patching.swap import Patched, original


@dataclass(frozen=True)
class NormSettings:
    """How an instance computes, and the names of its attributes.

    Attributes:
        kind: What it computes.
        tensors: Name of the parameter by argument of the operator, None where there is none.
        eps: Name of the attribute; None where the operator takes none.
        group: Name of the attribute that tells the groups, or the heads that are joined, and
            whether it counts them.
        options: What the patch call asked for.
        signature: What must not have changed since the probe, or the original forward runs.
        copied: Dtypes of input and weight for which the original computes with a copy of its
            weight (as 1 + weight is), so that it may be written before backward.
    """

    kind: NormKind
    tensors: tuple[tuple[str, str | None], ...]
    eps: str | None
    group: tuple[str, bool] | None
    options: Options
    signature: Signature = field(default_factory=Signature)
    copied: tuple[tuple[torch.dtype, torch.dtype], ...] = ()

    @property
    def shown(self) -> str:
        """What the report says that runs now."""
        bare = all(name is None for _, name in self.tensors) and self.kind.op != "relu_squared"
        name = "no weight" if bare else self.kind.name
        return self.kind.op if name == "plain" else f"{self.kind.op}[{name}]"


class FusedNorm(Patched):
    """A norm that calls the operator."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The operator with the instance's parameters; what was not probed runs the original."""
        kind = type(self)
        if "rotation" in kwargs:  # of an attention module of ours, which has looked at the norm
            return apply_rotated(self, args[0], kwargs["rotation"])
        if not issubclass(kind, FusedNorm):
            return cast(Tensor, kind.forward(self, *args, **kwargs))
        settings: NormSettings = kind._liger_multi_swap.settings  # type: ignore[assignment]
        gate = kwargs.get("gate", args[1] if len(args) == 2 else None)
        form = len(args) + len(kwargs) == (1 if gate is None else 2) and len(args) > 0
        known = form and code_holds(kind)
        given = operands(self, args[0], gate, settings) if known else None
        if given is None:
            return cast(Tensor, original(kind)(self, *args, **kwargs))
        bound = (self, args[0], gate, given, settings)
        return run_bound(settings.options, (settings.kind.op,), apply_norm, *bound)  # type: ignore[no-any-return]


class Rotation(NamedTuple):
    """The rotation of queries or keys: angles, the axis of the heads, its casting, options.

    And the settings of the norm, whose class may be another one when it runs.
    """

    cos: Tensor
    sin: Tensor
    axis: int
    casting: str
    options: Options
    settings: NormSettings


def apply_rotated(module: Any, x: Tensor, rotation: Rotation) -> Tensor:
    """The norm of queries or keys, and their rotation, with heads on an axis."""
    return run_bound(rotation.options, (ROTATED,), _rotated, module, x, rotation)  # type: ignore[no-any-return]


def _rotated(module: Any, x: Tensor, rotation: Rotation) -> Tensor:
    cos, sin, axis, casting, _, settings = rotation
    weight, eps = getattr(module, settings.tensors[0][1] or ""), getattr(module, settings.eps or "")
    options = dict(settings.kind.options)
    weight = _kept(weight, settings, x)
    return ops.rms_norm_rope(
        x, weight, cos, sin, eps, unsqueeze_dim=axis, rope_casting=casting, **options
    )


def operands(module: nn.Module, x: Any, gate: Any, settings: NormSettings) -> list[Any] | None:
    """The tensors of the operator, or None for a call that is left to the module."""
    kind = settings.kind
    if not holds(module, settings.signature):
        return None
    if (gate is not None) != kind.gated or not isinstance(x, Tensor):  # torch.fx has proxies
        return None
    if type(x).__name__ == "DTensor":
        return None
    held, given = module.__dict__["_parameters"], []
    for _, name in settings.tensors:
        # replicas and parametrized modules have it elsewhere
        found = None if name is None else held.get(name)
        given.append(found if name is None or found is not None else getattr(module, name))
        if name is not None and given[-1] is None:
            return None
    first = given[0] if given else None
    if kind.ndim and x.ndim != kind.ndim:
        return None
    if first is not None and kind.of_channels and not _fits(first, x, kind):
        return None  # the original may broadcast it
    if kind.joined and settings.group and x.shape[-2] != getattr(module, settings.group[0]):
        return None
    if kind.one_dtype:
        # torch's layer_norm chooses the dtype of its result under autocast
        outside = kind.op != "layer_norm" or autocast_dtype(x.device.type) is None
        if not outside or (first is not None and first.dtype != x.dtype):
            return None
    return given


def _kept(weight: Any, settings: NormSettings, *inputs: Tensor | None) -> Any:
    """The weight that backward reads: a copy where the original makes one."""
    if not settings.copied or weight is None or torch.compiler.is_compiling():
        return weight
    x = inputs[0]
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    if wanted and x is not None and (x.dtype, weight.dtype) in settings.copied:
        return weight.clone()
    return weight


def _fits(weight: Tensor, x: Tensor, kind: NormKind) -> bool:
    """Whether a weight has a value for every channel, or for every channel of some last axes."""
    if kind.joined:
        return weight.ndim == 1 and weight.shape[0] == x.shape[-2] * x.shape[-1]
    if kind.weight == "after":
        return weight.shape == x.shape[-weight.ndim :]
    return x.ndim > 0 and weight.shape == (x.shape[kind.axis],)


def apply_norm(
    module: Any, x: Tensor, gate: Tensor | None, given: list[Any], settings: NormSettings
) -> Tensor:
    """Run the operator on the tensors of :func:`operands`."""
    kind = settings.kind
    if kind.plus and given[0] is not None:
        given = [given[0] + kind.plus, *given[1:]]
    elif given and kind.weight == "inside":
        given = [_kept(given[0], settings, x, gate), *given[1:]]
    if kind.weight == "before":
        scaled = x * given[0]
        return _run(module, scaled.to(x.dtype), None, [None], settings)
    if kind.weight == "after":
        y = _run(module, x, gate, [None] * len(given), settings)
        return _weighted(y.flatten(-2) if kind.joined else y, *given)
    if kind.axis == -1:  # turning nothing would cost the host some microseconds
        return _run(module, x, gate, given, settings)
    return _run(module, x.movedim(kind.axis, -1), gate, given, settings).movedim(-1, kind.axis)


def _weighted(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _run(
    module: Any, x: Tensor, gate: Tensor | None, given: list[Any], settings: NormSettings
) -> Tensor:
    """The operator on channels that are last."""
    kind, options = settings.kind, dict(settings.kind.options)
    if settings.group is not None and not kind.joined:
        name, counts = settings.group
        value = getattr(module, name)
        options["group_size"] = x.shape[-1] // value if counts else value
    eps = [] if settings.eps is None else [getattr(module, settings.eps)]
    first = [x, gate] if kind.op == "gated_rms_norm" else [x]
    operator = getattr(ops, kind.op)
    if kind.weight == "inside" and kind.axis == -1 and hands_out(kind.op):
        call = functools.partial(operator, *first, *given, *eps, **options)
        return handed_out(module, kind.op, call)
    return operator(*first, *given, *eps, **options)  # type: ignore[no-any-return]
