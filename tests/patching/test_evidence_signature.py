"""What changes after a patch is followed, or makes the module's own forward run."""

# ruff: noqa: E402  (what needs transformers is imported after the skip)
import copy
import functools
import random
import re
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as hooks_of_all

transformers = pytest.importorskip("transformers")


from transformers.models.llama import modeling_llama

from liger_multi import ops
from liger_multi.patching import patch, rotary
from liger_multi.patching.evidence.probe import probe_context
from liger_multi.patching.experts import find as find_experts
from liger_multi.patching.mlp import find as find_mlps
from liger_multi.patching.mlp import fused as mlp
from liger_multi.patching.norms import find as find_norms
from tests.models import Calls, assert_same_training, batch, build, pair

ALONE = {"fused_linear_cross_entropy": False}


class Holder(nn.Module):
    """A model of one module and no output embedding."""

    def __init__(self, module):
        super().__init__()
        self.inner = module


class Mlp(nn.Module):
    """A gated MLP, whose subclasses have something more."""

    def __init__(self, act=None):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(12, 16), nn.Linear(12, 16)
        self.down_proj = nn.Linear(16, 12)
        self.act_fn = nn.SiLU() if act is None else act

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Norm(nn.Module):
    """An RMSNorm, whose subclasses have something more."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(12) + 0.5), 1e-6

    def forward(self, x):
        r = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x.float() * r).to(x.dtype)


def patched_pair(module):
    """A module, a patched copy of it, and the patched modules and reasons of the report."""
    ours = copy.deepcopy(module)
    report = patch(Holder(ours), **ALONE)
    entries = [e.replaced_by for e in report.entries]
    return module, ours, entries, [s.reason for s in report.skipped if s.path == "inner"]


def equal(stock, ours, *arguments, seed=3):
    """Outputs, gradients and random numbers of two modules."""
    results = []
    for module in (stock, ours):
        torch.manual_seed(seed)
        random.seed(seed)
        module.zero_grad()
        x = torch.linspace(-2, 2, 72).view(2, 3, 12).requires_grad_()
        y = module(x * 1, *arguments)
        y.square().sum().backward()
        grads = {n: p.grad for n, p in module.named_parameters()}
        results.append({"y": y.detach(), "x": x.grad, **grads, "random": torch.get_rng_state()})
    assert results[0].keys() == results[1].keys()
    for name, expected in results[0].items():
        got = results[1][name]
        assert (expected is None) == (got is None), name
        if expected is not None:
            torch.testing.assert_close(
                got, expected, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


def in_both_modes(stock, ours):
    for training in (True, False):
        equal(stock.train(training), ours.train(training))


# --- what changes after the patch ---


class Tuned(Mlp):
    """Attributes of every kind that do nothing yet."""

    of_class = 1.0

    def __init__(self):
        super().__init__()
        self.scale, self.limit, self.loud, self.extra = 1.0, None, False, None
        self.register_module("later", None)
        self.power, self.config = 1, types.SimpleNamespace(factor=1.0)

    def gate(self, x):
        return self.act_fn(x)

    def forward(self, x):
        h = self.gate(self.gate_proj(x)) * self.up_proj(x) * self.scale * self.of_class
        if self.limit is not None:
            h = h.clamp(-self.limit, self.limit)
        if self.loud:
            h = h * 3
        if self.extra is not None:
            h = self.extra(h)
        if self.later is not None:
            h = self.later(h)
        h = h * getattr(self, "unheard", 1.0) * self.config.factor
        return self.down_proj(h) ** self.power


CHANGES = {
    "scale": lambda m: setattr(m, "scale", 0.5),
    "scale by a tensor": lambda m: setattr(m, "scale", torch.tensor(2.0)),
    "limit": lambda m: setattr(m, "limit", 0.1),
    "flag": lambda m: setattr(m, "loud", True),
    "configuration": lambda m: setattr(m.config, "factor", 0.5),
    "another configuration": lambda m: setattr(m, "config", types.SimpleNamespace(factor=2.0)),
    "integer": lambda m: setattr(m, "power", 2),
    "attribute of the class": lambda m: setattr(m, "of_class", 0.5),
    "attribute that was missing": lambda m: setattr(m, "unheard", 0.5),
    "layer for None": lambda m: setattr(m, "extra", nn.Tanh()),
    "layer for a registered None": lambda m: setattr(m, "later", nn.Tanh()),
    "method of the instance": lambda m: setattr(m, "gate", torch.tanh),
    "activation": lambda m: setattr(m, "act_fn", nn.Tanh()),
    "activation by a function": lambda m: (delattr(m, "act_fn"), setattr(m, "act_fn", F.relu)),
    "activation's forward": lambda m: setattr(m.act_fn, "forward", torch.tanh),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_attributes_are_seen(change):
    stock, ours, entries, _ = patched_pair(Tuned())
    assert entries == ["gated_mlp[silu]"]
    in_both_modes(stock, ours)
    before = ours(torch.ones(1, 12))
    for module in (stock, ours):
        CHANGES[change](module)
    in_both_modes(stock, ours)
    assert not torch.allclose(ours(torch.ones(1, 12)), before)


class Alpha(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.alpha, self.function = 1.0, function

    def forward(self, x):
        return self.function(self.alpha * x)


@pytest.mark.parametrize(
    ("act", "change"),
    [
        (Alpha(F.silu), lambda m: setattr(m.act_fn, "alpha", 1.7)),
        (Alpha(F.silu), lambda m: setattr(m.act_fn, "function", F.relu)),
        (nn.GELU("tanh"), lambda m: setattr(m.act_fn, "approximate", "none")),
        (functools.partial(F.gelu, approximate="tanh"), lambda m: setattr(m, "act_fn", F.gelu)),
        (
            functools.partial(F.gelu, approximate="tanh"),
            lambda m: m.act_fn.keywords.update(approximate="none"),
        ),
        (transformers.activations.GELUActivation(), lambda m: setattr(m.act_fn, "act", F.relu)),
        (
            transformers.activations.GELUActivation(use_gelu_python=True),
            lambda m: setattr(m.act_fn, "act", F.relu),
        ),
    ],
    ids=["alpha", "function", "approximate", "partial", "keywords", "held", "held method"],
)
def test_changes_of_an_activation_are_seen(act, change):
    stock, ours, entries, _ = patched_pair(Mlp(act))
    assert entries[0].startswith("gated_mlp[")
    assert mlp.serves(ours, type(ours)._liger_multi_swap.settings)
    in_both_modes(stock, ours)
    for module in (stock, ours):
        change(module)
    assert not mlp.serves(ours, type(ours)._liger_multi_swap.settings)
    in_both_modes(stock, ours)


def test_equal_modules_share_a_signature():
    """Activations hold partials and bound methods of their own each."""
    for act in ("gelu_pytorch_tanh", "gelu_python", "silu"):
        model = nn.ModuleList([Mlp(transformers.activations.ACT2FN[act]) for _ in range(3)])
        patch(model, **ALONE)
        assert len({type(m) for m in model}) == 1
        for module in model:
            assert mlp.serves(module, type(module)._liger_multi_swap.settings)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "eps", 1e-1),
        lambda m: setattr(m, "eps", torch.tensor(0.5)),
        lambda m: setattr(m, "weight", nn.Parameter(torch.full((12,), 0.1))),
        lambda m: setattr(m, "weight", nn.Parameter(torch.full((1,), 0.1))),
        lambda m: nn.utils.parametrize.register_parametrization(m, "weight", nn.Tanh()),
        lambda m: m.weight.data.mul_(3),
    ],
    ids=["eps", "tensor", "weight", "broadcast weight", "parametrized weight", "data"],
)
def test_changed_norms(change):
    stock, ours, entries, _ = patched_pair(Norm())
    assert entries == ["rms_norm[llama]"]
    for module in (stock, ours):
        change(module)
    in_both_modes(stock, ours)


class Biased(Norm):
    def __init__(self):
        super().__init__()
        self.register_parameter("bias", None)

    def forward(self, x):
        return super().forward(x) if self.bias is None else super().forward(x) + self.bias


def test_a_parameter_for_none():
    stock, ours, entries, _ = patched_pair(Biased())
    assert entries == ["rms_norm[llama]"]
    for module in (stock, ours):
        module.bias = nn.Parameter(torch.ones(12))
    in_both_modes(stock, ours)


def test_bf16_layers_before_a_wide_one_raise_as_they_do():
    """The input of the last layer took the dtype of its weight, for every MLP as in T5."""
    stock, ours, _, _ = patched_pair(Mlp().bfloat16())
    x = torch.randn(3, 12, dtype=torch.bfloat16)
    for module in (stock, ours):
        module.down_proj.float()
        with pytest.raises(RuntimeError, match="dtype"):
            module(x)


def test_the_last_layers_weight_is_computed_once():
    """spectral_norm takes a step of its iteration whenever somebody asks for the weight."""
    stock, ours, _, _ = patched_pair(Mlp())
    for module in (stock, ours):
        torch.manual_seed(0)
        nn.utils.parametrizations.spectral_norm(module.down_proj)
    for _ in range(3):
        in_both_modes(stock, ours)
    expected, got = (dict(m.named_buffers()) for m in (stock, ours))
    assert expected.keys() == got.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


# --- hooks ---


def doubled(module, args, output):
    return output * 2


def shrunk(module, grads, upstream):
    return (grads[0] * 0.25,)


HOOKS = {
    "forward": lambda m: m.register_forward_hook(doubled),
    "with_kwargs": lambda m: m.register_forward_hook(
        lambda mod, args, kwargs, out: out * 2, with_kwargs=True
    ),
    "always_call": lambda m: m.register_forward_hook(doubled, always_call=True),
    "pre": lambda m: m.register_forward_pre_hook(lambda mod, args: (args[0] + 1,)),
    "backward": lambda m: m.register_full_backward_hook(shrunk),
    "backward_pre": lambda m: m.register_full_backward_pre_hook(lambda mod, up: (up[0] * 3,)),
}


@pytest.mark.parametrize("layer", ["act_fn", "gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_on_callees_of_an_mlp(hook, layer):
    stock, ours, _, _ = patched_pair(Mlp())
    handles = [HOOKS[hook](getattr(m, layer)) for m in (stock, ours)]
    in_both_modes(stock, ours)
    for handle in handles:
        handle.remove()
    in_both_modes(stock, ours)


@pytest.mark.parametrize("module_class", ["llama", "gemma", "phi3", "mixtral"])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_on_activations_of_models(module_class, hook):
    stock, ours = pair(module_class)
    patch(ours, **ALONE)
    for model in (stock, ours):
        actual = [m for m in model.modules() if type(m).__module__.endswith("activations")]
        assert actual
        for module in actual:
            HOOKS[hook](module)
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)


@pytest.mark.parametrize("library", ["deepspeed.runtime.zero", "torch.distributed.fsdp", "mine"])
def test_hooks_of_libraries_on_activations(library, monkeypatch):
    """DeepSpeed's ZeRO-3 hooks every module, which is no reason to keep more for backward."""
    calls = Calls(monkeypatch)
    stock, ours, _, _ = patched_pair(Mlp())

    def hook(module, args, output):
        return None

    hook.__module__ = library
    ours.act_fn.register_forward_hook(functools.partial(hook))
    calls.clear()
    equal(stock, ours)
    assert calls["gated_mlp"] == (library != "mine")


GLOBAL_HOOKS = {
    "forward": lambda called: hooks_of_all.register_module_forward_hook(
        lambda module, args, out: called.append(type(module).__name__)
    ),
    "pre": lambda called: hooks_of_all.register_module_forward_pre_hook(
        lambda module, args: called.append(type(module).__name__)
    ),
    "backward": lambda called: hooks_of_all.register_module_full_backward_hook(
        lambda module, grads, up: called.append(type(module).__name__)
    ),
}


@pytest.mark.filterwarnings("ignore:.*backward hook.*:UserWarning")
@pytest.mark.parametrize("module_class", ["llama", "mixtral"])
@pytest.mark.parametrize("hook", GLOBAL_HOOKS)
def test_global_hooks_see_unpatched_calls(module_class, hook):
    stock, ours = pair(module_class)
    patch(ours, **ALONE)
    observed = []
    handle = GLOBAL_HOOKS[hook](observed)
    try:
        counts = []
        for model in (stock, ours):
            observed.clear()
            model(**batch()).loss.backward()
            counts.append(sorted(observed))
    finally:
        handle.remove()
    assert counts[0] == counts[1]


@pytest.mark.parametrize("owner", [nn.Linear, nn.Module, nn.SiLU])
def test_replaced_calls_of_pytorchs_classes(owner, monkeypatch):
    stock, ours, _, _ = patched_pair(Mlp())
    plain = owner.__call__
    observed = []

    def counted(self, *args, **kwargs):
        observed.append(type(self).__name__)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(owner, "__call__", counted)
    equal(stock, ours)
    assert sorted(observed[: len(observed) // 2]) == sorted(observed[len(observed) // 2 :])
    assert observed


def test_a_replaced_forward_of_linear_layers(monkeypatch):
    stock, ours, _, _ = patched_pair(Mlp())
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: F.linear(x, self.weight) * 2)
    in_both_modes(stock, ours)


@pytest.mark.parametrize("layer", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("how", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrized_layers(layer, how):
    stock, ours, _, _ = patched_pair(Mlp())
    for module in (stock, ours):
        torch.manual_seed(0)
        getattr(nn.utils.parametrizations, how)(getattr(module, layer))
    in_both_modes(stock, ours)


# --- monkeypatches of classes ---


def twice(function):
    return lambda self, *args, **kwargs: function(self, *args, **kwargs) * 2


def test_a_replaced_forward_of_an_mlps_class(monkeypatch):
    stock, ours = pair()
    patch(ours)
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", twice(modeling_llama.LlamaMLP.forward))
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)


def test_a_replaced_forward_of_a_norms_class(monkeypatch):
    stock, ours = pair()
    patch(ours)
    module_class = modeling_llama.LlamaRMSNorm
    monkeypatch.setattr(module_class, "forward", twice(module_class.forward))
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)
    calls = []
    monkeypatch.setattr(ops, "rms_norm", lambda *a, **k: calls.append(a))
    ours.model.norm(torch.ones(2, 32))
    assert calls == []


def test_a_replaced_forward_of_an_activations_class(monkeypatch):
    stock, ours = pair("gemma")
    patch(ours)
    monkeypatch.setattr(transformers.activations.GELUTanh, "forward", lambda self, x: torch.tanh(x))
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)


def test_a_replaced_helper_of_a_norms_class(monkeypatch):
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    stock, ours = pair("gemma")
    patch(ours)
    monkeypatch.setattr(GemmaRMSNorm, "_norm", lambda self, x: x * 0.5)
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)


def test_a_replaced_forward_of_an_attentions_class(monkeypatch):
    stock, ours = pair()
    patch(ours)
    module_class, plain = modeling_llama.LlamaAttention, modeling_llama.LlamaAttention.forward

    def louder(self, *args, **kwargs):
        out, weights = plain(self, *args, **kwargs)
        return out * 2, weights

    monkeypatch.setattr(module_class, "forward", louder)
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)


def test_a_replaced_rotary_function_of_a_modeling_file(monkeypatch):
    calls = Calls(monkeypatch)
    stock, ours = pair()
    patch(ours)
    plain = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(
        modeling_llama, "apply_rotary_pos_emb", lambda q, k, *a, **kw: plain(q * 2, k, *a, **kw)
    )
    calls.clear()
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)
    assert calls["rope"] == 0
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", plain)
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)
    assert calls["rope"] == 2


def test_an_equal_forward_is_served_after_another_patch(monkeypatch):
    calls = Calls(monkeypatch)
    model = build()
    patch(model)
    plain = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: plain(self, x))
    calls.clear()
    model(**batch())
    assert calls["gated_mlp"] == 0
    patch(model)
    calls.clear()
    model(**batch())
    assert calls["gated_mlp"] == 2


# What a forward does in another mode, and under other surroundings of the patch.


# --- what a forward does in another mode, and besides ---


class DroppedByHand(Mlp):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.3, self.training)


class LouderInTraining(Mlp):
    def forward(self, x):
        return super().forward(x) * (1.5 if self.training else 1.0)


class Noisy(Mlp):
    def forward(self, x):
        noise = 0.0 if not self.training else random.random() * 0.0
        return super().forward(x) + noise


class GradientScaled(Mlp):
    def forward(self, x):
        x = x * 0.25 + x.detach() * 0.75
        return super().forward(x)


class Detached(Mlp):
    def forward(self, x):
        gate = self.act_fn(self.gate_proj(x)).detach()
        return self.down_proj(gate * self.up_proj(x))


class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy / 2


class OwnFunction(Mlp):
    def forward(self, x):
        return HalfGradient.apply(super().forward(x))


class Counting(Mlp):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Masked(Mlp):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(12))

    def forward(self, x):
        return super().forward(x) * self.mask


class MaskedInTraining(Masked):
    def forward(self, x):
        return Mlp.forward(self, x) * (self.mask if self.training else 1.0)


class Listed(Mlp):
    def __init__(self):
        super().__init__()
        self.scales = [1.0]

    def forward(self, x):
        return super().forward(x) * self.scales[0]


class Nested(Mlp):
    def __init__(self):
        super().__init__()
        self.config = types.SimpleNamespace(inner=types.SimpleNamespace(scale=1.0))

    def forward(self, x):
        return super().forward(x) * self.config.inner.scale


class ByWeights(Mlp):
    def forward(self, x):
        gate = self.act_fn(self.gate_proj(x))
        return self.down_proj(gate * F.linear(x, self.up_proj.weight, self.up_proj.bias))


class NarrowInside(Mlp):
    def forward(self, x):
        return super().forward(x).float()


class Halved(Mlp):
    def forward(self, x):
        y = super().forward(x)
        return y.half() if x.dtype == torch.bfloat16 else y


class ByRank(Mlp):
    def forward(self, x):
        return super().forward(x) * (1.5 if x.ndim == 2 else 1.0)


class WithoutGradients(Mlp):
    def forward(self, x):
        return super().forward(x) * (1.0 if torch.is_grad_enabled() else 1.5)


class WithoutGradientsInTraining(Mlp):
    def forward(self, x):
        quiet = self.training and not torch.is_grad_enabled()
        return super().forward(x) * (1.5 if quiet else 1.0)


class Frozen(Mlp):
    def forward(self, x):
        up = F.linear(x, self.up_proj.weight.detach(), self.up_proj.bias)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * up)


class Overwriting(Mlp):
    def forward(self, x):
        return super().forward(x.mul_(1.0))


@pytest.mark.parametrize(
    ("module_class", "reason"),
    [
        (DroppedByHand, "it draws random numbers in training"),
        (LouderInTraining, "its output differs in training"),
        (Noisy, "it draws random numbers in training"),
        (GradientScaled, "its gradient differs in evaluation"),
        (Detached, "its gradient differs in evaluation"),
        (OwnFunction, "its gradient differs"),
        (Counting, "its forward sets its calls"),
        (Masked, "its forward reads its buffer mask"),
        (MaskedInTraining, "its forward reads its buffer mask"),
        (Listed, r"its forward reads its scales \(list\)"),
        (Nested, r"its forward reads its config \(SimpleNamespace\)"),
        (ByWeights, "it does not call its layers"),
        (NarrowInside, "its output differs under autocast"),
        (Halved, "its output differs in bf16"),
        (ByRank, "its output differs for 2 axes"),
        (WithoutGradients, "computes neither"),
        (WithoutGradientsInTraining, "its output differs in training without gradients"),
        (Frozen, "it stops a gradient"),
        (Overwriting, "it writes to its input"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_mlps_with_extra_behavior_are_left_alone(module_class, reason, training):
    module = module_class().train(training)
    stock, ours, entries, reasons = patched_pair(module)
    assert entries == []
    assert type(ours) is module_class
    (said,) = reasons
    assert re.search(reason, said), said
    in_both_modes(stock, ours)


class NormDropped(Norm):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.3, self.training)


class NormOfTraining(Norm):
    def forward(self, x):
        return super().forward(x) * (1.5 if self.training else 1.0)


class NormKeeping(Norm):
    def forward(self, x):
        self.last = x.detach()
        return super().forward(x)


class NormGradientScaled(Norm):
    def forward(self, x):
        return super().forward(x * 0.25 + x.detach() * 0.75)


@pytest.mark.parametrize(
    "module_class", [NormDropped, NormOfTraining, NormKeeping, NormGradientScaled]
)
@pytest.mark.parametrize("training", [True, False])
def test_norms_with_extra_behavior_are_left_alone(module_class, training):
    stock, ours, entries, reasons = patched_pair(module_class().train(training))
    assert entries == []
    assert len(reasons) == 1
    in_both_modes(stock, ours)


class Dropping(Mlp):
    def __init__(self, inner):
        super().__init__()
        self.dropout, self.inner = nn.Dropout(0.4), inner

    def forward(self, x):
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        if self.inner:
            return self.down_proj(self.dropout(h))
        return self.dropout(self.down_proj(h))


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_dropout_layers_are_served_and_stay(inner, training):
    stock, ours, entries, _ = patched_pair(Dropping(inner).train(training))
    assert entries == ["gated_mlp[silu]"]
    in_both_modes(stock, ours)
    for module in (stock, ours):
        module.dropout.register_forward_hook(lambda mod, args, out: out * 2)
    in_both_modes(stock, ours)


# --- surroundings of the patch ---


def probes_forgotten():
    for known in (
        find_experts._known_experts,
        *(m._known for m in (find_mlps, find_norms, rotary)),
    ):
        known.clear()


def wide():
    torch.set_default_dtype(torch.float64)


def strict():
    torch.use_deterministic_algorithms(True)


META = torch.device("meta")
SURROUNDINGS = {
    "fp64 by default": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "bf16 by default": (
        lambda: torch.set_default_dtype(torch.bfloat16),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
    "meta by default": (lambda: META.__enter__(), lambda: META.__exit__(None, None, None)),
    "no gradients": (
        lambda: torch.set_grad_enabled(False),
        lambda: torch.set_grad_enabled(True),
    ),
    "narrow products": (
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
}


@pytest.mark.parametrize("module_class", ["llama", "mixtral"])
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_global_state_does_not_change_the_report(surroundings, module_class):
    """Under a default dtype of fp64, the first patch of a process left every MLP alone."""
    models = [build(module_class) for _ in range(3)]
    probes_forgotten()
    expected = str(patch(models[0]))
    probes_forgotten()
    enter, leave = SURROUNDINGS[surroundings]
    random.seed(0)
    before = (torch.get_rng_state(), random.getstate())
    enter()
    try:
        dtype, deterministic = (
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
        )
        report = patch(models[1])
        assert torch.get_default_dtype() == dtype
        assert torch.are_deterministic_algorithms_enabled() == deterministic
    finally:
        leave()
    assert str(report) == expected
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert str(patch(models[2])) == expected


def test_a_probes_surroundings_are_always_the_same():
    wide()
    strict()
    try:
        with META, torch.no_grad(), torch.autocast("cpu"), probe_context():
            output = torch.ones(2)
            assert (output.dtype, output.device.type) == (torch.float32, "cpu")
            assert not torch.are_deterministic_algorithms_enabled()
            assert not torch.is_autocast_enabled("cpu")
            assert torch.is_grad_enabled()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
