"""RMSNorm instances: recognise by numbers, bit for bit in bf16, and run ``rms_norm`` instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_multi.patching.kinds import EPS_NAMES, NORM_KINDS, WEIGHT_NAMES, NormKind
from liger_multi.patching.loss import run_bound
from liger_multi.patching.options import Options
from liger_multi.patching.probe import laboratory, random, scalars, shell
from liger_multi.patching.swap import Patched, stock_class


@dataclass(frozen=True)
class NormSettings:
    """How an instance computes, and the names of its attributes."""

    kind: NormKind
    weight: str | None
    eps: str
    options: Options


class FusedNorm(Patched):
    """An RMSNorm that calls the operator."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``rms_norm`` with the instance's weight and eps."""
        settings = cast(NormSettings, type(self)._liger_multi_swap.settings)
        if type(hidden_states).__name__ == "DTensor":
            return cast(Tensor, super().forward(hidden_states))
        return cast(
            Tensor,
            run_bound(settings.options, ("rms_norm",), _apply, self, hidden_states, settings),
        )


def _apply(module: Any, x: Tensor, settings: NormSettings) -> Tensor:
    from liger_multi.ops import rms_norm

    weight = None if settings.weight is None else getattr(module, settings.weight)
    kind = settings.kind
    return rms_norm(
        x, weight, getattr(module, settings.eps), offset=kind.offset, casting=kind.casting
    )


def looks_like_norm(module: nn.Module) -> bool:
    """Whether to ask the probe: no children, an eps, one vector or "Norm" in the class's name."""
    names = [name for name, p in module._parameters.items() if p is not None]
    return (
        not module._modules
        and not module._buffers
        and (
            (len(names) == 1 and names[0] in WEIGHT_NAMES)
            or (not names and "Norm" in type(module).__name__)
        )
        and any(hasattr(module, name) for name in EPS_NAMES)
        and not isinstance(module, (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase))
    )


_known: dict[Any, NormSettings | str] = {}


def norm_settings(module: nn.Module, options: Options) -> NormSettings | str:
    """The settings for an instance, or the reason why it stays as it is."""
    found = _probe(module, options)
    return (
        found
        if isinstance(found, str)
        else NormSettings(found.kind, found.weight, found.eps, options)
    )


def _probe(module: nn.Module, options: Options) -> NormSettings | str:
    shapes = tuple(
        (n, tuple(p.shape), str(p.dtype)) for n, p in module._parameters.items() if p is not None
    )
    kind = stock_class(module)
    key = (kind, kind.forward, shapes, scalars(module))
    try:
        known = _known.get(key)
    except TypeError:  # an attribute that cannot be hashed
        return _measure(module, options)
    if known is None:
        known = _known[key] = _measure(module, options)
    return known


def _measure(module: nn.Module, options: Options) -> NormSettings | str:
    eps = next(name for name in EPS_NAMES if hasattr(module, name))
    if not isinstance(getattr(module, eps), float):
        return f"its {eps} is {getattr(module, eps)!r}, not a number"
    weight = next((name for name, p in module._parameters.items() if p is not None), None)
    size = 64
    if weight is not None:
        vector = module._parameters[weight]
        if vector is None or vector.ndim != 1 or vector.numel() == 0:
            return "its weight is not a vector with elements (is it partitioned?)"
        size = vector.numel()
    try:
        for kind in NORM_KINDS:
            if _agrees(module, NormSettings(kind, weight, eps, options), size):
                return NormSettings(kind, weight, eps, options)
    except Exception as error:  # somebody's forward: failing, it is no module of this kind
        return f"its forward failed on a stand-in: {type(error).__name__}: {error}"
    return f"{stock_class(module).__name__} is no RMSNorm that is known, bit for bit in bf16"


def _agrees(module: nn.Module, settings: NormSettings, size: int) -> bool:
    """Whether forward is equal in bits and dtype, and the gradients in fp32 within rounding."""
    rows = max(4, 4096 // size)
    with laboratory() as generator:
        weight = random(generator, size)
        x = random(generator, rows, size) * random(generator, rows, 1).exp()
        for of_x, of_weight in (
            (torch.bfloat16,) * 2,
            (torch.bfloat16, torch.float32),
            (torch.float32,) * 2,
        ):
            standin = shell(module)
            if settings.weight is not None:
                standin._parameters[settings.weight] = nn.Parameter(weight.to(of_weight))
            inputs = [x.to(of_x).requires_grad_() for _ in range(2)]
            stock = cast(Tensor, standin.forward(inputs[0]))
            ours = _apply(standin, inputs[1], settings)
            if (
                stock.dtype != ours.dtype
                or stock.shape != ours.shape
                or not torch.equal(stock, ours)
            ):
                return False
        leaves = [p for p in standin._parameters.values() if p is not None]
        upstream = random(generator, *stock.shape)
        wanted = torch.autograd.grad(stock, [inputs[0], *leaves], upstream)
        got = torch.autograd.grad(ours, [inputs[1], *leaves], upstream)
        return all(
            torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(got, wanted, strict=True)
        )
