"""How gradients of two equal models are compared: one bound, which follows from their dtype."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

ULPS = 8
"""Rounding of a gradient, in units in the last place of its summands; see :func:`difference`."""

Gradients = Mapping[str, "torch.Tensor | None"] | Iterable["torch.Tensor | None"]


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Gradients by name; parameters without one are left out."""
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def largest(tensor: torch.Tensor) -> float:
    """The largest finite magnitude; 0 for an empty tensor."""
    finite = tensor.detach().double().nan_to_num(0.0, 0.0, 0.0)
    return float(finite.abs().max()) if finite.numel() else 0.0


def resolution(wanted: Iterable[torch.Tensor], eps: float) -> float:
    """What rounding alone may change in any entry of the gradients of one model."""
    return ULPS * eps * max((largest(gradient) for gradient in wanted), default=0.0)


def difference(
    got: Gradients, wanted: Gradients, rtol: float = 2e-5, dtype: torch.dtype | None = None
) -> str:
    """Which gradient of a model is another one than rounding explains, or nothing.

    ``|got - wanted| <= rtol * max|wanted| + ULPS * eps * max|wanted of all parameters|``

    Both terms are needed. The first holds a gradient against its own largest entry: fp32 sums in
    another order differ by 1e-6 of it, eight units in the last place (14 architectures, three
    instruction sets, 2026-11-22). A gradient that is zero in exact arithmetic has no size of its
    own: the keys' bias, or the queries of a first position, get a sum whose summands cancel. Every
    summand is as large as the gradients of the other parameters, and is rounded like them, so what
    remains is 1e-6 of *their* largest entry, with any sign. That is the second term: no backward
    pass in this dtype tells a smaller number from zero, and it scales with the model. ``eps`` is
    that of the dtype of the gradients. The largest remainder seen is 0.8 units.

    Args:
        got: Gradients by name, or in order; None for a parameter that nothing reached.
        wanted: Those of the reference, of the same parameters and dtypes.
        rtol: Allowed difference by the gradient's own largest entry.
        dtype: What the models compute in, where the gradients are wider than that.

    Returns:
        The parameter, its difference and its bound; empty if all are equal.
    """
    found, right = _named(got), _named(wanted)
    if found.keys() != right.keys():
        return f"gradients of other parameters: {sorted(found.keys() ^ right.keys())[:3]}"
    dtypes = {gradient.dtype for gradient in right.values()} | ({dtype} if dtype else set())
    eps = max((torch.finfo(each).eps for each in dtypes), default=0.0)
    floor = resolution(right.values(), eps)
    for name, gradient in right.items():
        ours = found[name]
        if (ours.dtype, ours.shape) != (gradient.dtype, gradient.shape):
            return (
                f"{name}: {ours.dtype} {tuple(ours.shape)}, "
                f"wanted {gradient.dtype} {tuple(gradient.shape)}"
            )
        bound = rtol * largest(gradient) + floor
        off = (ours.detach().double() - gradient.detach().double().to(ours.device)).abs()
        if not (off <= bound).all():
            return f"{name}: {float(off.max()):.3g} > {bound:.3g}, {floor:.3g} of it is rounding"
    return ""


def assert_same_gradients(got: Gradients, wanted: Gradients, rtol: float = 2e-5) -> None:
    """Every gradient of a model is that of the reference, as :func:`difference` has it."""
    assert any(gradient is not None for gradient in _named(wanted).values())
    assert not (said := difference(got, wanted, rtol)), said


def _named(found: Gradients) -> dict[str, torch.Tensor]:
    if not isinstance(found, Mapping):
        found = {str(i): gradient for i, gradient in enumerate(found)}
    return {
        name: gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        for name, gradient in found.items()
        if gradient is not None
    }
