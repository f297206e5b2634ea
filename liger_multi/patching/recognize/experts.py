"""Experts: which instances compute a gated mixture that the operator serves.

transformers keeps the weights of all experts in two tensors, states their layout by flags, and asks
``_apply_gate`` for what is computed between the GEMMs. That method of a replica is compared with
the formulas of the operator, and then its whole forward, so models that nobody listed are served.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from liger_multi.patching.recognize.compare import MODES, Watch, disagreement, set_mode
from liger_multi.patching.recognize.probe import probe_context, random, scalars, skeleton
from liger_multi.patching.recognize.signature import (
    Signature,
    code_of,
    signature_of,
)
from liger_multi.patching.replace.experts import BIASES, WEIGHTS, ExpertsKind, apply_experts
from liger_multi.patching.replace.swap import unpatched_class


def looks_like_experts(module: nn.Module) -> bool:
    """Whether transformers' interface serves the experts of a module."""
    return hasattr(module, "_apply_gate") and any(name in module._parameters for name in WEIGHTS)


_known: dict[Any, ExpertsKind | str] = {}


def experts_kind(module: nn.Module) -> ExpertsKind | str:
    """The kind of an instance, or the reason why it stays as it is."""
    for flag, wanted, reason in (
        ("has_gate", True, "its experts have no gate"),
        ("has_post_expert_norm", False, "its experts end in a norm"),
    ):
        if getattr(module, flag, wanted) is not wanted:
            return reason
    kind = unpatched_class(module)
    signature = _signature(module, kind, ())
    if isinstance(signature, str):
        return signature
    code = code_of(kind, signature)
    shapes = tuple((n, tuple(p.shape)) for n, p in module._parameters.items() if p is not None)
    key = (kind, code, signature, shapes, scalars(module))
    found = _known.get(key)
    if found is None:
        found = _known[key] = _measure(module)
    return found


_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")


def _signature(module: nn.Module, kind: type[nn.Module], seen: Collection[str]) -> Signature | str:
    """Of gate, forward and flags, without the configuration: see :class:`_Eager`."""
    flags = [name for name in _FLAGS if name in vars(module)]
    taken = ("config", *WEIGHTS, *BIASES)
    return signature_of(module, kind, taken, [*flags, *seen], ("forward", "_apply_gate"))


def _measure(module: nn.Module) -> ExpertsKind | str:
    """Compare the gate of a replica with every formula, and the forward with the operator."""
    own, watch = unpatched_class(module), Watch()
    try:
        with probe_context() as generator:
            replica, inputs = _replica(module, generator)
            x = (random(generator, 6, 48) * 4).requires_grad_()
            with watch.over(replica):
                for training, grad in MODES:
                    set_mode(replica, training)
                    with torch.set_grad_enabled(grad):
                        replica.forward(*inputs)
                stock = replica._apply_gate(x)
            if watch.written:
                return f"its forward sets its {', '.join(sorted(watch.written))}"
            if getattr(replica, "config", _Eager(None)).read:
                return "its forward reads its configuration, which may change later"
            kind = next((k for k in _candidates(module) if _same_gate(stock, x, k)), None)
            if kind is None:
                return f"the gate of {own.__name__} is none that fused_moe has"
            found = _disagreement(replica, inputs, kind, generator)
            if found:
                return f"{own.__name__} is more than its gate and products: {found}"
    except Exception as error:  # somebody's forward: any failure means that it is not one of ours
        return f"its forward failed on a replica: {type(error).__name__}: {error}"
    signature = _signature(module, own, watch.read)
    return signature if isinstance(signature, str) else replace(kind, signature=signature)


def _same_gate(stock: Tensor, x: Tensor, kind: ExpertsKind) -> bool:
    y = _gate(x, kind)
    if y.shape != stock.shape or not _near(y, stock):
        return False
    (slope,) = torch.autograd.grad(stock.sum(), x, retain_graph=True)
    (ours,) = torch.autograd.grad(y.sum(), x)
    return _near(ours, slope)


class _Eager:
    """A configuration that asks for the loop over experts of the modeling file.

    The interface reads the name of an implementation, all of which compute the same; what else is
    read is noted.
    """

    _experts_implementation = "eager"

    def __init__(self, config: Any) -> None:
        self.config, self.read = config, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.config, name)


def _replica(module: nn.Module, generator: torch.Generator) -> tuple[Any, list[Tensor]]:
    """A small copy, and hidden states, indices and weights of experts."""
    held = {n: p for n, p in module._parameters.items() if p is not None}
    shapes = {n: getattr(p, "ds_shape", p.shape) for n, p in held.items()}  # partitioned by ZeRO-3
    experts, *axes = shapes[WEIGHTS[0]]
    hidden, wide = axes if getattr(module, "is_transposed", False) else reversed(axes)
    sizes = {wide // 2: 6, wide: 12}
    sizes.setdefault(hidden, 8)
    sizes.setdefault(experts, 4)
    replica: Any = skeleton(module, sizes)
    for name, whole in shapes.items():
        small = random(generator, *(sizes[n] for n in whole)) * 0.5
        replica._parameters[name] = nn.Parameter(small)
    for name, part in module._modules.items():
        replica._modules[name] = None if part is None else skeleton(part)
    if "config" in vars(replica):
        replica.__dict__["config"] = _Eager(replica.config)
    scores = random(generator, 7, sizes[experts])
    routing, index = scores.softmax(-1).topk(min(2, sizes[experts]), -1)
    return replica, [random(generator, 7, sizes[hidden]), index, routing]


def _disagreement(
    replica: Any, inputs: list[Tensor], kind: ExpertsKind, generator: torch.Generator
) -> str | None:
    def stock(*given: Tensor) -> Any:
        return replica.forward(*given)

    def ours(*given: Tensor) -> Tensor:
        return apply_experts(replica, kind, *given)

    def close(a: Tensor, b: Tensor) -> bool:
        return torch.allclose(a, b, rtol=1e-4, atol=1e-5)

    return disagreement(replica, stock, ours, inputs, close, generator)


def _near(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def _gate(x: Tensor, kind: ExpertsKind) -> Tensor:
    from liger_multi.reference.experts.fused_moe import product

    if kind.activation == "swiglu_clamped":
        numbers = dict(kind.clamps)
        by = tuple(numbers[name] for name in ("limit", "alpha", "up_offset"))
        return product(x, (kind.activation, *by, kind.interleaved))
    return product(x, (kind.activation, 7.0, 1.0, 0.0, kind.interleaved))


def _candidates(module: nn.Module) -> list[ExpertsKind]:
    bias = all(getattr(module, name, None) is not None for name in BIASES)
    transposed = bool(getattr(module, "is_transposed", False))
    orders = (False, True)
    found = [
        ExpertsKind(activation, order, transposed, bias)
        for activation in ("silu", "gelu_tanh", "gelu")
        for order in orders
    ]
    given = dict(scalars(module))
    numbers = {n: v for n, v in given.items() if isinstance(v, (int, float)) and v is not True}
    limits = {float(v) for n, v in numbers.items() if "limit" in n and v > 0}
    alphas = {float(v) for n, v in numbers.items() if "alpha" in n} | {1.0, 1.702}
    for limit in sorted(limits):
        for alpha in sorted(alphas):
            for offset in (0.0, 1.0):
                clamps = (("limit", limit), ("alpha", alpha), ("up_offset", offset))
                found += [
                    ExpertsKind("swiglu_clamped", o, transposed, bias, clamps) for o in orders
                ]
    return found
