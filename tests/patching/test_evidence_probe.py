"""Probes meet zeros, tiny and huge numbers and constant rows: what treats them apart is left."""

from __future__ import annotations

import copy
import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import liger_multi
from liger_multi import losses
from liger_multi.patching.rotary import recognized
from tests.comparing import assert_same_gradients, gradients
from tests.models import batch, build

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


# Modules with computed weights: none is computed more often than without a patch.


COUNTS: Counter[str] = Counter()


class Scaled(nn.Module):
    """A parametrization that counts its evaluations."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, weight: Tensor) -> Tensor:
        COUNTS[self.name] += 1
        return weight * 1.01


class Same(Scaled):
    """One that returns the parameter itself, as noise does in evaluation."""

    def forward(self, weight: Tensor) -> Tensor:
        COUNTS[self.name] += 1
        return weight


def parametrize_all(model: nn.Module, by: type[Scaled] = Scaled) -> nn.Module:
    """Parametrize every parameter of a model but those of embeddings."""
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Embedding):
            continue
        for name in [n for n, p in module._parameters.items() if p is not None]:
            parametrize.register_parametrization(module, name, by(f"{path}.{name}"))
    return model


def parametrize_head(model: Any, by: type[Scaled] = Scaled) -> Any:
    """Parametrize the output embedding only."""
    parametrize.register_parametrization(model.lm_head, "weight", by("lm_head.weight"))
    return model


def counted(run: Any) -> tuple[Any, Counter[str]]:
    """The result of a call, and how often each weight was computed."""
    COUNTS.clear()
    result = run()
    return result, Counter(COUNTS)


def step(model: Any, inputs: Any) -> Tensor:
    """Forward and backward."""
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("first", ["parametrized", "patched"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mixtral", "gpt_oss"])
def test_every_weight_is_computed_once(architecture: str, first: str) -> None:
    stock = parametrize_all(build(architecture, tied=False))
    ours, inputs = build(architecture, tied=False), batch()
    if first == "parametrized":
        parametrize_all(ours)
        _, in_patch = counted(lambda: liger_multi.patch(ours))
        assert not in_patch
    else:
        liger_multi.patch(ours)
        parametrize_all(ours)
    expected, times = counted(lambda: step(stock, inputs))
    actual, ours_times = counted(lambda: step(ours, inputs))
    assert ours_times.keys() == times.keys()
    more = {name: n for name, n in ours_times.items() if n > times[name]}
    assert not more  # grouped GEMMs of transformers 5.0 read the size of a weight beside its value
    torch.testing.assert_close(actual, expected)
    assert_same_gradients(gradients(ours), gradients(stock))


def _loss_on_logits(model: Any, inputs: Any) -> Tensor:
    logits = model(input_ids=inputs["input_ids"]).logits
    loss = torch.logsumexp(logits, -1).sum() + logits.argmax(-1).sum() + logits.sum()
    loss.backward()
    return loss.detach()


def _evaluated(model: Any, inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs).loss


def _generated(model: Any, inputs: Any) -> Tensor:
    return model.generate(inputs["input_ids"][:, :4], max_new_tokens=3, do_sample=False)


def _log_probs(model: Any, inputs: Any) -> Tensor:
    hidden = model.model(input_ids=inputs["input_ids"]).last_hidden_state
    with torch.no_grad():
        return losses.tokens(losses.Head(hidden, model.lm_head), inputs["labels"]).log_prob


def _dtype_of_autocast(model: Any, inputs: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return step(model, inputs)


def _frozen(model: Any, inputs: Any) -> Tensor:
    model.lm_head.parametrizations.weight.original.requires_grad_(False)
    return step(model, inputs)


@pytest.mark.parametrize("by", [Scaled, Same])
@pytest.mark.parametrize(
    "run",
    [step, _loss_on_logits, _evaluated, _generated, _dtype_of_autocast, _frozen],
)
@pytest.mark.parametrize(
    "options", [{}, {"cross_entropy": True}, {"fused_linear_cross_entropy": False}], ids=str
)
def test_head_in_other_calls(run: Any, by: type[Scaled], options: dict[str, Any]) -> None:
    stock, inputs = parametrize_head(build(tied=False), by), batch()
    ours = copy.deepcopy(stock)
    liger_multi.patch(ours, **options)
    expected, times = counted(lambda: run(stock, inputs))
    actual, ours_times = counted(lambda: run(ours, inputs))
    assert ours_times == times
    rtol = 1e-2 if run is _dtype_of_autocast else 1e-5
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("patched", [True, False])
def test_losses_of_a_parametrized_head(patched: bool) -> None:
    model, inputs = parametrize_head(build(tied=False)), batch()
    if patched:
        liger_multi.patch(model)
    _, times = counted(lambda: _log_probs(model, inputs))
    assert times["lm_head.weight"] == 1


@pytest.mark.parametrize("patched_first", [True, False])
def test_spectral_norm_trains_as_without_a_patch(patched_first: bool) -> None:
    """Its power iteration makes one step for each evaluation in training."""
    stock, ours = build(tied=False), build(tied=False)
    torch.manual_seed(3)
    parametrizations.spectral_norm(stock.lm_head)
    if patched_first:
        liger_multi.patch(ours)
    torch.manual_seed(3)
    parametrizations.spectral_norm(ours.lm_head)
    if not patched_first:
        liger_multi.patch(ours)
    inputs = batch()
    for model in (stock, ours):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            step(model, inputs)
            optimizer.step()
    for name, buffer in stock.lm_head.named_buffers():
        torch.testing.assert_close(buffer, dict(ours.lm_head.named_buffers())[name])
    with torch.no_grad():
        torch.testing.assert_close(ours(**inputs).loss, stock(**inputs).loss)


@pytest.mark.parametrize("by", [Scaled, Same])
def test_logits_after_a_step(by: type[Scaled]) -> None:
    """A computed weight is the forward's; where it is the parameter itself, the step is noticed."""
    model, inputs = parametrize_head(build(tied=False), by), batch()
    expected = model(**inputs).logits.detach().clone()
    liger_multi.patch(model)
    outputs = model(**inputs)
    outputs.loss.backward()
    torch.optim.SGD(model.parameters(), 0.1, fused=True).step()
    if by is Same:
        with pytest.raises(RuntimeError, match="modified in place"):
            outputs.logits.sum()
    else:
        torch.testing.assert_close(outputs.logits.detach() * 1.0, expected, rtol=1e-5, atol=1e-5)


class Doubled(nn.Linear):
    """A head whose weight is a property."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        COUNTS["lm_head.weight"] += 1
        return self.start * 2


def double(head: nn.Linear) -> None:
    """Give a head that property."""
    weight = head.weight
    del head.weight
    head.start = nn.Parameter(weight.detach() / 2)
    head.__class__ = Doubled


def test_weight_as_property() -> None:
    stock, inputs = build(tied=False), batch()
    double(stock.lm_head)
    ours = copy.deepcopy(stock)
    report, in_patch = counted(lambda: liger_multi.patch(ours, linear=True, linear_float8=True))
    assert not in_patch
    assert "fused_linear_cross_entropy" in {entry.op for entry in report.entries}
    expected, times = counted(lambda: step(stock, inputs))
    actual, ours_times = counted(lambda: step(ours, inputs))
    assert ours_times == times == {"lm_head.weight": 1}
    torch.testing.assert_close(actual, expected)
    assert_same_gradients(gradients(ours), gradients(stock))


@pytest.mark.slow
def test_compiled() -> None:
    stock, inputs = parametrize_head(build(tied=False)), batch()
    ours = copy.deepcopy(stock)
    liger_multi.patch(ours)
    expected = step(stock, inputs)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step(compiled, inputs), expected)
    assert_same_gradients(gradients(ours), gradients(stock))


@pytest.mark.parametrize("options", [{"linear": True}, {"linear_float8": {"smallest": 1}}], ids=str)
def test_linear_layers(options: dict[str, Any]) -> None:
    stock, inputs = parametrize_all(build(tied=False)), batch()
    for first in ("parametrized", "patched"):
        ours = build(tied=False)
        if first == "parametrized":
            parametrize_all(ours)
            _, in_patch = counted(lambda ours=ours: liger_multi.patch(ours, **options))
            assert not in_patch
        else:
            liger_multi.patch(ours, **options)
            parametrize_all(ours)
        _, times = counted(lambda: step(stock, inputs))
        with liger_multi.use(deterministic="rows"):
            _, ours_times = counted(lambda ours=ours: step(ours, inputs))
        assert ours_times == times
