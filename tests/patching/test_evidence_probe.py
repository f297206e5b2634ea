"""Probes meet zeros, tiny and huge numbers and constant rows: what treats them apart is left."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import liger_multi
from liger_multi.patching.rotary import recognized

SIZE = 32


class Plain(nn.Module):
    """A norm of the llama kind, with a hook before and after it."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(size) + 0.5), 1e-6

    def before(self, x: Tensor) -> Tensor:
        return x

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        return y

    def forward(self, x: Tensor) -> Tensor:
        wide = self.before(x).float()
        n = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.after(x, self.weight * n.to(x.dtype))


class ZeroRows(Plain):
    def after(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.where((x == 0).all(-1, keepdim=True), torch.ones_like(y), y)


class ZeroRowsWithoutGradient(Plain):
    def before(self, x: Tensor) -> Tensor:
        return torch.where((x == 0).all(-1, keepdim=True), torch.zeros_like(x), x)


class TinyInputs(Plain):
    def before(self, x: Tensor) -> Tensor:
        return x.masked_fill(x.abs() < 1e-5, 0)


class TiniestInputs(Plain):
    def before(self, x: Tensor) -> Tensor:
        return x.masked_fill(x.abs() < 1e-20, 0)


class TinyRows(Plain):
    def after(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.where(x.abs().amax(-1, keepdim=True) < 1e-12, torch.zeros_like(y), y)


class TinyOutputs(Plain):
    def after(self, x: Tensor, y: Tensor) -> Tensor:
        return F.hardshrink(y, 1e-7)


class HugeInputs(Plain):
    def before(self, x: Tensor) -> Tensor:
        return x.clamp(-1e10, 1e10)


class ConstantRows(Plain):
    def after(self, x: Tensor, y: Tensor) -> Tensor:
        flat = x.amax(-1, keepdim=True) == x.amin(-1, keepdim=True)
        return torch.where(flat, torch.zeros_like(y), y)


class Infinite(Plain):
    def before(self, x: Tensor) -> Tensor:
        return torch.nan_to_num(x, neginf=-1.0)


class PlainLayerNorm(Plain):
    """The same around PyTorch's layer norm."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        self.bias = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(self.before(x), x.shape[-1:], self.weight, self.bias, self.eps)
        return self.after(x, y)


class LayerNormOfConstants(PlainLayerNorm):
    after = ConstantRows.after


class LayerNormOfTinyRows(PlainLayerNorm):
    def before(self, x: Tensor) -> Tensor:
        return torch.where(x.abs().amax(-1, keepdim=True) < 1e-10, torch.zeros_like(x), x)


class LayerNormOfZeros(PlainLayerNorm):
    after = ZeroRows.after


class Gated(nn.Module):
    """A gated norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(SIZE) + 0.5), 1e-6

    def closed(self, gate: Tensor) -> Tensor:
        return gate

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        x = hidden_states.float()
        n = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        y = self.weight * n.to(hidden_states.dtype)
        return (y * F.silu(self.closed(gate).float())).to(hidden_states.dtype)


class GatedUnlessTiny(Gated):
    def closed(self, gate: Tensor) -> Tensor:
        return gate.masked_fill(gate.abs() < 1e-6, 1.0)


def replaced(module: nn.Module) -> set[str]:
    """The operators of a patch."""
    report = liger_multi.patch(nn.Sequential(module), fused_linear_cross_entropy=False)
    return {entry.op for entry in report.entries}


@pytest.mark.parametrize("module_class", [Plain, PlainLayerNorm, Gated])
def test_plain_norms_are_replaced(module_class: Any) -> None:
    assert replaced(module_class())


@pytest.mark.parametrize("size", [5, 24, 63, 1000])
@pytest.mark.parametrize("eps", [1e-12, 1e-5])
def test_norms_of_any_width_are_replaced(size: int, eps: float) -> None:
    assert replaced(nn.LayerNorm(size, eps=eps))
    assert replaced(nn.RMSNorm(size, eps=eps))


@pytest.mark.parametrize(
    "module_class",
    [
        *(ZeroRows, ZeroRowsWithoutGradient, TinyInputs, TiniestInputs, TinyRows, TinyOutputs),
        *(HugeInputs, ConstantRows, Infinite, GatedUnlessTiny),
        *(LayerNormOfConstants, LayerNormOfTinyRows, LayerNormOfZeros),
    ],
)
def test_norms_with_a_way_of_their_own_are_left(module_class: Any) -> None:
    assert not replaced(module_class())


class Mlp(nn.Module):
    """A gated MLP with a hook at its gate and at its end."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(16, 48, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(48, 16, bias=bias)

    def inner(self, gate: Tensor) -> Tensor:
        return gate

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        return y

    def forward(self, x: Tensor) -> Tensor:
        gate = F.silu(self.inner(self.gate_proj(x)))
        return self.after(x, self.down_proj(gate * self.up_proj(x)))


class MlpOfZeros(Mlp):
    def after(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.where((x == 0).all(-1, keepdim=True), torch.ones_like(y), y)


class MlpOfTinyGates(Mlp):
    def inner(self, gate: Tensor) -> Tensor:
        return gate.masked_fill(gate.abs() < 1e-7, 0)


class MlpOfTinyOutputs(Mlp):
    def after(self, x: Tensor, y: Tensor) -> Tensor:
        return y.masked_fill(y.abs() < 1e-9, 0)


@pytest.mark.parametrize("bias", [False, True])
def test_a_plain_mlp_is_replaced(bias: bool) -> None:
    assert replaced(Mlp(bias))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("module_class", [MlpOfZeros, MlpOfTinyGates, MlpOfTinyOutputs])
def test_mlps_with_a_way_of_their_own_are_left(module_class: Any, bias: bool) -> None:
    assert not replaced(module_class(bias))


def _half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + _half(q) * sin, k * cos + _half(k) * sin


def rotated_unless_tiny(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> Any:
    a, b = rotated(q, k, cos, sin, unsqueeze_dim)
    return a, b.masked_fill(b.abs() < 1e-7, 0)


def rotated_unless_huge(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> Any:
    a, b = rotated(q, k, cos, sin, unsqueeze_dim)
    return a.clamp(-1e4, 1e4), b


def test_rotary_functions() -> None:
    assert not isinstance(recognized(rotated), str)
    assert isinstance(recognized(rotated_unless_tiny), str)
    assert isinstance(recognized(rotated_unless_huge), str)


def test_experts() -> None:
    from tests.models import build

    model = build("mixtral")
    assert any(e.op == "fused_moe" for e in liger_multi.patch(model).entries)
    liger_multi.unpatch(model)
    experts = type(model.model.layers[0].mlp.experts)

    class Cut(experts):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Tensor, *routes: Any) -> Tensor:
            y = super().forward(hidden_states, *routes)
            return y.masked_fill(y.abs() < 1e-8, 0)

    class OfZeros(experts):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Tensor, *routes: Any) -> Tensor:
            y = super().forward(hidden_states, *routes)
            zero = (hidden_states == 0).all(-1, keepdim=True)
            return torch.where(zero, torch.full_like(y, math.pi), y)

    for module_class in (Cut, OfZeros):
        for layer in model.model.layers:
            layer.mlp.experts.__class__ = module_class
        assert not any(e.op == "fused_moe" for e in liger_multi.patch(model).entries)
        liger_multi.unpatch(model)
