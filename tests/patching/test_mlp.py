"""Gated MLPs: which instances are one, by names or by structure, and what they keep."""

# ruff: noqa: E402  (what needs transformers is imported after the skip)
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

transformers = pytest.importorskip("transformers")

from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from liger_multi import ops
from liger_multi.patching import mlp as find_mlps, patch
from tests.comparing import assert_same_gradients, gradients, recorded, saved
from tests.models import Calls, Holder, assert_same_training, batch, build, variant
from tests.patching.test_evidence_signature import Alpha
from tests.patching.test_norms import (
    calls_of,
    equal,
    modeling,
    patched_module,
    patched_twin,
    weighted,
)


class Gated(nn.Module):
    def __init__(self, act="silu", bias=False, dropout=0.0, swapped=False, inner=40):
        super().__init__()
        self.gate_proj, self.up_proj = (
            nn.Linear(24, inner, bias=bias),
            nn.Linear(24, inner, bias=bias),
        )
        self.down_proj = nn.Linear(inner, 24, bias=bias)
        self.act_fn = ACT2FN[act]
        self.swapped = swapped
        if dropout:
            self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        gate, up = (up, gate) if self.swapped else (gate, up)
        return self.down_proj(self.act_fn(gate) * up)


class Packed(nn.Module):
    """Gate and up in one layer, split by an attribute."""

    def __init__(self, act="silu"):
        super().__init__()
        self.size = 56
        self.gate_up_proj, self.down_proj = (
            nn.Linear(24, 112, bias=False),
            nn.Linear(56, 24, bias=False),
        )
        self.activation_fn = ACT2FN[act]

    def forward(self, x):
        gate, up = self.gate_up_proj(x).split(self.size, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))


@pytest.mark.parametrize(
    ("mlp", "by"),
    [
        (Gated(), "gated_mlp[silu]"),
        (Gated(bias=True), "gated_mlp[silu]"),
        (Gated(inner=24), "gated_mlp[silu]"),
        (Packed(), "swiglu_packed"),
        (Gated("gelu_pytorch_tanh"), "gated_mlp[gelu_tanh]"),
        (Gated("gelu", bias=True), "gated_mlp[gelu]"),
        (Packed("gelu_pytorch_tanh"), "geglu_packed[tanh]"),
        (Packed("gelu"), "geglu_packed[none]"),
    ],
    ids=["plain", "bias", "square", "packed", "tanh", "exact", "packed tanh", "packed exact"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_mlps_are_recognized(mlp, by, dtype):
    stock = copy.deepcopy(mlp).to(dtype)
    ours = copy.deepcopy(stock)
    report = patch(Holder(ours), fused_linear_cross_entropy=False, rms_norm=False, strict=True)
    assert [entry.replaced_by for entry in report.entries] == [by]
    x = torch.randn(5, 24, dtype=dtype)
    assert torch.equal(ours(x), stock(x))
    assert_same_training(
        stock,
        ours,
        lambda m: m(x).float().square().sum(),
        rtol=1e-5 if dtype == torch.float32 else 2e-2,
    )


def attention(m, x):
    """Three linear layers of fitting shapes that are no MLP."""
    scores = (m.gate_proj(x) @ m.up_proj(x).transpose(-1, -2)).softmax(-1)
    return m.down_proj(scores @ x.repeat(1, 1, 40)[..., :40])


@pytest.mark.parametrize(
    "mlp",
    [
        Gated("quick_gelu"),
        Gated("relu"),
        Gated(swapped=True),
        Gated(dropout=0.1),
        variant(Gated, attention),
        variant(Gated, lambda m, x: m.down_proj(m.gate_proj(x) + m.up_proj(x))),
    ],
    ids=["quick gelu", "relu", "gate and up swapped", "dropout", "attention", "sum"],
)
def test_other_mlps_are_left_alone(mlp):
    module_class = type(mlp)
    report = patch(Holder(mlp), fused_linear_cross_entropy=False, rms_norm=False)
    assert type(mlp) is module_class
    assert report.count("swiglu") == report.count("geglu") == 0
    assert report.skipped


@pytest.mark.parametrize(("on", "off"), [("swiglu", "geglu"), ("geglu", "swiglu")])
def test_kinds_of_mlps_are_chosen_by_their_own_keys(on, off):
    model = nn.ModuleList([Gated("silu"), Gated("gelu"), Packed("silu"), Packed("gelu")])
    options = {"fused_linear_cross_entropy": False, "rms_norm": False, "rope": False}
    report = patch(model, **options, strict=True)
    assert (report.count("swiglu"), report.count("geglu")) == (2, 2)
    report = patch(model, **options, **{off: False}, strict=True)
    assert (report.count(on), report.count(off)) == (2, 0)
    assert [type(m) for m in model if "_liger_multi_swap" not in vars(type(m))] == [Gated, Packed]


def test_replaced_forward_is_probed_again(monkeypatch):
    assert patch(build()).count("swiglu") == 2
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: self.down_proj(self.gate_proj(x)))
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: self.weight * x)
    report = patch(build())
    assert report.count("swiglu") == report.count("rms_norm") == 0
    assert {s.op for s in report.skipped} == {"swiglu", "rms_norm"}


def test_activations_of_different_functions():
    """The probe's memory knew an activation by its class and plain attributes."""
    model = nn.ModuleList([Gated(), Gated()])
    model[0].act_fn, model[1].act_fn = Alpha(F.silu), Alpha(F.gelu)
    report = patch(model, fused_linear_cross_entropy=False, rms_norm=False)
    assert [e.replaced_by for e in report.entries] == ["gated_mlp[silu]", "gated_mlp[gelu]"]


def test_probes_run_once_for_equal_layers(monkeypatch):
    """The activations of gemma hold a ``functools.partial`` of their own each."""
    calls, observed = recorded(monkeypatch, ops, "gated_mlp"), []
    for layers in (1, 3):
        find_mlps._verdicts.clear()
        calls.clear()
        patch(build("gemma", num_hidden_layers=layers))
        observed.append([kwargs["activation"] for _, kwargs in calls])
    assert list(dict.fromkeys(observed[0])) == ["silu", "gelu_tanh"]
    assert observed[1] == observed[0]


def test_a_gated_mlp_keeps_its_input_gate_and_up():
    """Linear layers around an activation keep their product for backward, too."""
    mlp = Gated()
    stock, x = copy.deepcopy(mlp), torch.randn(7, 24, requires_grad=True)
    patch(Holder(mlp), fused_linear_cross_entropy=False, rms_norm=False)
    kept = []
    for module in (stock, mlp):
        y, tensors = saved(lambda module=module: module(x), but=module.parameters())
        kept.append(sorted(tuple(t.shape) for t in tensors))
        y.sum().backward()
    inner = mlp.gate_proj.out_features
    assert kept[1] == sorted([(7, 24), (7, inner), (7, inner)])
    assert kept[0].count((7, inner)) == 4  # the activation's output and the product as well


@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh", "gelu"])
def test_an_mlp_in_steps_is_the_whole_one(act, monkeypatch):
    calls, results = Calls(monkeypatch), []
    stock, step = Gated(act, bias=True), "swiglu" if act == "silu" else "geglu"
    for whole, op in ((True, "gated_mlp"), (False, step)):
        ours = copy.deepcopy(stock)
        options = {"swiglu": {"whole": whole}, "geglu": {"whole": whole}}
        report = patch(Holder(ours), fused_linear_cross_entropy=False, rms_norm=False, **options)
        calls.clear()
        x = torch.linspace(-3, 3, 120).view(5, 24).requires_grad_()
        y = ours(x)
        y.square().sum().backward()
        results.append((y, {"x": x.grad} | gradients(ours)))
        assert calls == {op: 1}
        assert report.entries[0].replaced_by.startswith(op)
        assert report.entries[0].options == ({} if whole else {"whole": False})
    assert torch.equal(results[0][0], results[1][0])
    assert_same_gradients(results[0][1], results[1][1])


def test_mlp_runs_hooks_and_replacements_of_its_layers():
    model = build(patching={})
    observed = []
    mlp = model.model.layers[0].mlp
    mlp.up_proj.register_forward_hook(lambda module, args, output: observed.append(output.shape))
    mlp.down_proj = nn.Sequential(mlp.down_proj, nn.Identity())
    model(**batch()).loss.backward()
    assert observed == [(2, 11, 48)]


class Odd(nn.Module):
    """A gated MLP whose names nobody knows."""

    def __init__(self, act, inner_drop=0.0, outer_drop=0.0, packed=False):
        super().__init__()
        self.a = nn.Linear(16, 64 if packed else 32)
        self.b = None if packed else nn.Linear(16, 32)
        self.c = nn.Linear(32, 16)
        self.act, self.inner, self.outer = act, nn.Dropout(inner_drop), nn.Dropout(outer_drop)

    def forward(self, x):
        gate, up = self.a(x).chunk(2, -1) if self.b is None else (self.b(x), self.a(x))
        return self.outer(self.c(self.inner(self.act(gate) * up)))


BY_STRUCTURE = [
    pytest.param(act, packed, id=f"{act} {packed}")
    for act in (nn.SiLU(), nn.GELU(), nn.GELU("tanh"), ACT2FN["gelu_new"])
    for packed in (False, True)
]


@pytest.mark.parametrize(("act", "packed"), BY_STRUCTURE)
def test_gated_mlps_by_structure(act, packed):
    module = Odd(act, packed=packed)
    stock = copy.deepcopy(module)
    assert len(patched_module(module)[0]) == 1
    equal(stock, module, torch.randn(2, 5, 16))


def clamped(m, x):
    """SwiGLU of clamped inputs with a limit of its own, and no slope."""
    up = m.up_proj(x).clamp(-m.swiglu_limit, m.swiglu_limit)
    return m.down_proj(F.silu(m.gate_proj(x).clamp(max=m.swiglu_limit)) * up)


def test_a_clamped_mlp_without_a_slope():
    module = weighted(variant(Gated, clamped, swiglu_limit=0.7))
    stock = patched_twin(module, "swiglu_clamped")
    equal(stock, module, 3 * torch.randn(2, 5, 24))
    stock.swiglu_limit = module.swiglu_limit = 0.3  # no longer what was probed
    equal(stock, module, 3 * torch.randn(2, 5, 24))


def test_an_mlp_of_a_sparse_gate():
    """A share of every row of the gate is cut to zero before the activation."""
    config = transformers.Gemma3nTextConfig(
        hidden_size=16,
        intermediate_size=[96] * 2,
        num_hidden_layers=2,
        activation_sparsity_pattern=[0.9, 0.0],
    )
    for at, shown in enumerate(("geglu[tanh, sparse]", "gated_mlp[gelu_tanh]")):
        module = weighted(modeling("gemma3n").Gemma3nTextMLP(config, at))
        stock = copy.deepcopy(module)
        assert patched_module(module) == ([shown], [])
        equal(stock, module, torch.randn(2, 5, 16), rtol=2e-5)
        with torch.autocast("cpu", torch.bfloat16):
            equal(stock, module, torch.randn(2, 5, 16), rtol=1e-1)
        with calls_of("geglu") as calls:
            stock.activation_sparsity = module.activation_sparsity = 0.5  # no longer what it was
            equal(stock, module, torch.randn(2, 5, 16), rtol=2e-5)
        assert not calls


def test_mlp_keeps_the_places_of_dropouts():
    module = Odd(nn.SiLU(), inner_drop=0.5, outer_drop=0.25)
    stock = patched_twin(module, "gated_mlp[silu]")
    x = torch.randn(64, 16)
    results = []
    for mlp in (stock.train(), module.train()):
        torch.manual_seed(3)
        results.append(mlp(x))
    torch.testing.assert_close(results[1], results[0])
    assert (results[0] == 0).double().mean() > 0.1
    equal(stock.eval(), module.eval(), x)
