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
        spec: What it computes.
        tensors: Name of the parameter by argument of the operator, None where there is none.
        eps: Name of the attribute; None where the operator takes none.
        group: Name of the attribute that tells the groups, or the heads that are joined, and
            whether it counts them.
        options: What the patch call asked for.
        signature: What must not have changed since the probe, or the original forward runs.
        copied: Dtypes of input and weight for which the original computes with a copy of its
            weight (as 1 + weight is), so that it may be written before backward.
    """

    spec: NormKind
    tensors: tuple[tuple[str, str | None], ...]
    eps: str | None
    group: tuple[str, bool] | None
    options: Options
    signature: Signature = field(default_factory=Signature)
    copied: tuple[tuple[torch.dtype, torch.dtype], ...] = ()

    @property
    def shown(self) -> str:
        """What the report says that runs now."""
        bare = all(name is None for _, name in self.tensors) and self.spec.op != "relu_squared"
        name = "no weight" if bare else self.spec.name
        return self.spec.op if name == "plain" else f"{self.spec.op}[{name}]"


class FusedNorm(Patched):
    """A norm that calls the operator."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The operator with the instance's parameters; what was not probed runs the original."""
        module_class = type(self)
        if "rotation" in kwargs:  # of an attention module of ours, which has looked at the norm
            return apply_rotated(self, args[0], kwargs["rotation"])
        if not issubclass(module_class, FusedNorm):
            return cast(Tensor, module_class.forward(self, *args, **kwargs))
        settings: NormSettings = module_class._liger_multi_swap.settings  # type: ignore[assignment]
        gate = kwargs.get("gate", args[1] if len(args) == 2 else None)
        form = len(args) + len(kwargs) == (1 if gate is None else 2) and len(args) > 0
        known = form and code_holds(module_class)
        tensors = operands(self, args[0], gate, settings) if known else None
        if tensors is None:
            return cast(Tensor, original(module_class)(self, *args, **kwargs))
        bound = (self, args[0], gate, tensors, settings)
        return run_bound(settings.options, (settings.spec.op,), apply_norm, *bound)  # type: ignore[no-any-return]


class Rotation(NamedTuple):
    """The rotation of queries or keys: angles, the axis of the heads, its casting, options.

    It holds the settings of the norm too, whose class may have changed when it runs.
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
    options = dict(settings.spec.options)
    weight = _kept(weight, settings, x)
    return ops.rms_norm_rope(
        x, weight, cos, sin, eps, unsqueeze_dim=axis, rope_casting=casting, **options
    )


def operands(module: nn.Module, x: Any, gate: Any, settings: NormSettings) -> list[Any] | None:
    """The tensors of the operator, or None for a call that is left to the module."""
    spec = settings.spec
    if not holds(module, settings.signature):
        return None
    if (gate is not None) != spec.gated or not isinstance(x, Tensor):  # torch.fx has proxies
        return None
    if type(x).__name__ == "DTensor":
        return None
    parameters, tensors = module.__dict__["_parameters"], []
    for _, name in settings.tensors:
        # replicas and parametrized modules have it elsewhere
        tensor = None if name is None else parameters.get(name)
        tensors.append(tensor if name is None or tensor is not None else getattr(module, name))
        if name is not None and tensors[-1] is None:
            return None
    first = tensors[0] if tensors else None
    if spec.ndim and x.ndim != spec.ndim:
        return None
    if first is not None and spec.of_channels and not _fits(first, x, spec):
        return None  # the original may broadcast it
    if spec.joined and settings.group and x.shape[-2] != getattr(module, settings.group[0]):
        return None
    if spec.one_dtype:
        # torch's layer_norm chooses the dtype of its result under autocast
        outside = spec.op != "layer_norm" or autocast_dtype(x.device.type) is None
        if not outside or (first is not None and first.dtype != x.dtype):
            return None
    return tensors


def _kept(weight: Any, settings: NormSettings, *inputs: Tensor | None) -> Any:
    """The weight that backward reads: a copy where the original makes one."""
    if not settings.copied or weight is None or torch.compiler.is_compiling():
        return weight
    x = inputs[0]
    differentiable = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in inputs
    )
    if differentiable and x is not None and (x.dtype, weight.dtype) in settings.copied:
        return weight.clone()
    return weight


def _fits(weight: Tensor, x: Tensor, spec: NormKind) -> bool:
    """Whether a weight has a value for every channel, or for every channel of some last axes."""
    if spec.joined:
        return weight.ndim == 1 and weight.shape[0] == x.shape[-2] * x.shape[-1]
    if spec.weight == "after":
        return weight.shape == x.shape[-weight.ndim :]
    return x.ndim > 0 and weight.shape == (x.shape[spec.axis],)


def apply_norm(
    module: Any, x: Tensor, gate: Tensor | None, tensors: list[Any], settings: NormSettings
) -> Tensor:
    """Run the operator on the tensors of :func:`operands`."""
    spec = settings.spec
    if spec.plus and tensors[0] is not None:
        tensors = [tensors[0] + spec.plus, *tensors[1:]]
    elif tensors and spec.weight == "inside":
        tensors = [_kept(tensors[0], settings, x, gate), *tensors[1:]]
    if spec.weight == "before":
        scaled = x * tensors[0]
        return _run(module, scaled.to(x.dtype), None, [None], settings)
    if spec.weight == "after":
        y = _run(module, x, gate, [None] * len(tensors), settings)
        return _weighted(y.flatten(-2) if spec.joined else y, *tensors)
    if spec.axis == -1:  # turning nothing would cost the host some microseconds
        return _run(module, x, gate, tensors, settings)
    return _run(module, x.movedim(spec.axis, -1), gate, tensors, settings).movedim(-1, spec.axis)


def _weighted(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _run(
    module: Any, x: Tensor, gate: Tensor | None, tensors: list[Any], settings: NormSettings
) -> Tensor:
    """The operator on channels that are last."""
    spec, options = settings.spec, dict(settings.spec.options)
    if settings.group is not None and not spec.joined:
        name, counts = settings.group
        value = getattr(module, name)
        options["group_size"] = x.shape[-1] // value if counts else value
    eps = [] if settings.eps is None else [getattr(module, settings.eps)]
    first = [x, gate] if spec.op == "gated_rms_norm" else [x]
    operator = getattr(ops, spec.op)
    if spec.weight == "inside" and spec.axis == -1 and hands_out(spec.op):
        call = functools.partial(operator, *first, *tensors, *eps, **options)
        return handed_out(module, spec.op, call)
    return operator(*first, *tensors, *eps, **options)  # type: ignore[no-any-return]
