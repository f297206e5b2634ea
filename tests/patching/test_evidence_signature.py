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


from transformers.models.gemma import modeling_gemma
from transformers.models.llama import modeling_llama

from liger_multi import ops
from liger_multi.patching import mlp, patch
from liger_multi.patching.evidence.probe import probe_context
from tests.comparing import recorded
from tests.models import Calls, Holder, Mlp, Norm, assert_same_training, batch, build, pair, variant
from tests.patching.test_apply import forget_probes

ALONE = {"fused_linear_cross_entropy": False}


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
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


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
def test_changed_attributes_take_effect(change):
    assert_followed(Tuned(), "gated_mlp[silu]", CHANGES[change])


def assert_followed(module, shown, change):
    """A module and its patched copy are equal before and after a change, which acts."""
    stock, ours, entries, _ = patched_pair(module)
    assert entries == [shown]
    in_both_modes(stock, ours)
    before = ours(torch.ones(1, 12))
    for module in (stock, ours):
        change(module)
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


def with_bias(self, x):
    return Norm.forward(self, x) if self.bias is None else Norm.forward(self, x) + self.bias


NORM_CHANGES = {
    "eps": lambda m: setattr(m, "eps", 1e-1),
    "tensor": lambda m: setattr(m, "eps", torch.tensor(0.5)),
    "weight": lambda m: setattr(m, "weight", nn.Parameter(torch.full((12,), 0.1))),
    "broadcast weight": lambda m: setattr(m, "weight", nn.Parameter(torch.full((1,), 0.1))),
    "parametrized weight": lambda m: nn.utils.parametrize.register_parametrization(
        m, "weight", nn.Tanh()
    ),
    "data": lambda m: m.weight.data.mul_(3),
    "parameter for None": lambda m: setattr(m, "bias", nn.Parameter(torch.ones(12))),
}


@pytest.mark.parametrize("change", NORM_CHANGES)
def test_changed_norms(change):
    module = variant(Norm, with_bias)
    module.register_parameter("bias", None)
    assert_followed(module, "rms_norm[llama]", NORM_CHANGES[change])


def test_bf16_layers_before_a_wide_one_raise_as_they_do():
    """The input of the last layer took the dtype of its weight, for every MLP as in T5."""
    stock, ours, _, _ = patched_pair(Mlp().bfloat16())
    x = torch.randn(3, 12, dtype=torch.bfloat16)
    for module in (stock, ours):
        module.down_proj.float()
        with pytest.raises(RuntimeError, match="dtype"):
            module(x)


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
    stock, ours = pair(module_class, patching=ALONE)
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
    observed = recorded(monkeypatch, owner, "__call__", lambda self, *_, **__: type(self).__name__)
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


def scaled(function, position=None):
    """A function whose result, or one part of it, is twice as large."""

    def twice(self, *args, **kwargs):
        result = function(self, *args, **kwargs)
        return result * 2 if position is None else (result[0] * 2, *result[1:])

    return twice


REPLACED = {
    "mlp": ("llama", modeling_llama.LlamaMLP, "forward", scaled),
    "norm": ("llama", modeling_llama.LlamaRMSNorm, "forward", scaled),
    "attention": ("llama", modeling_llama.LlamaAttention, "forward", lambda f: scaled(f, 0)),
    "activation": (
        "gemma",
        transformers.activations.GELUTanh,
        "forward",
        lambda f: lambda self, x: torch.tanh(x),
    ),
    "helper of a norm": (
        "gemma",
        modeling_gemma.GemmaRMSNorm,
        "_norm",
        lambda f: lambda self, x: x * 0.5,
    ),
}


@pytest.mark.parametrize("part", REPLACED)
def test_replaced_methods_of_classes(part, monkeypatch):
    architecture, owner, name, other = REPLACED[part]
    stock, ours = pair(architecture, patching={})
    monkeypatch.setattr(owner, name, other(getattr(owner, name)))
    assert_same_training(stock, ours)
    if part == "norm":
        monkeypatch.setattr(ops, "rms_norm", lambda *a, **k: pytest.fail("the operator ran"))
        ours.model.norm(torch.ones(2, 32))


def test_an_equal_forward_is_served_after_another_patch(monkeypatch):
    calls = Calls(monkeypatch)
    model = build(patching={})
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


class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy / 2


def counting(m, x):
    m.calls += 1
    return Mlp.forward(m, x)


def halved(m, x):
    y = Mlp.forward(m, x)
    return y.half() if x.dtype == torch.bfloat16 else y


def keeping(m, x):
    m.last = x.detach()
    return Norm.forward(m, x)


ONES = torch.ones(12)
IN_TRAINING = "it draws random numbers in training"
OTHERS = {
    "dropout": (Mlp, lambda m, x: F.dropout(Mlp.forward(m, x), 0.3, m.training), IN_TRAINING),
    "louder in training": (
        Mlp,
        lambda m, x: Mlp.forward(m, x) * (1.5 if m.training else 1.0),
        "its output differs in training",
    ),
    "noise": (
        Mlp,
        lambda m, x: Mlp.forward(m, x) + (random.random() * 0.0 if m.training else 0.0),
        IN_TRAINING,
    ),
    "scaled gradient": (
        Mlp,
        lambda m, x: Mlp.forward(m, x * 0.25 + x.detach() * 0.75),
        "its gradient differs in evaluation",
    ),
    "detached gate": (
        Mlp,
        lambda m, x: m.down_proj(m.act_fn(m.gate_proj(x)).detach() * m.up_proj(x)),
        "its gradient differs in evaluation",
    ),
    "function of autograd": (
        Mlp,
        lambda m, x: HalfGradient.apply(Mlp.forward(m, x)),
        "its gradient differs",
    ),
    "counter": (Mlp, counting, "its forward sets its calls", {"calls": 0}),
    "mask": (
        Mlp,
        lambda m, x: Mlp.forward(m, x) * m.mask,
        "its forward reads its buffer mask",
        {"mask": ONES},
    ),
    "mask in training": (
        Mlp,
        lambda m, x: Mlp.forward(m, x) * (m.mask if m.training else 1.0),
        "its forward reads its buffer mask",
        {"mask": ONES},
    ),
    "list": (
        Mlp,
        lambda m, x: Mlp.forward(m, x) * m.scales[0],
        r"its forward reads its scales \(list\)",
        {"scales": [1.0]},
    ),
    "configuration": (
        Mlp,
        lambda m, x: Mlp.forward(m, x) * m.config.inner.scale,
        r"its forward reads its config \(SimpleNamespace\)",
        {"config": types.SimpleNamespace(inner=types.SimpleNamespace(scale=1.0))},
    ),
    "weights": (
        Mlp,
        lambda m, x: m.down_proj(
            m.act_fn(m.gate_proj(x)) * F.linear(x, m.up_proj.weight, m.up_proj.bias)
        ),
        "it does not call its layers",
    ),
    "wide result": (
        Mlp,
        lambda m, x: Mlp.forward(m, x).float(),
        "its output differs under autocast",
    ),
    "fp16 for bf16": (Mlp, halved, "its output differs in bf16"),
    "rank": (
        Mlp,
        lambda m, x: Mlp.forward(m, x) * (1.5 if x.ndim == 2 else 1.0),
        "its output differs for 2 axes",
    ),
    "without gradients": (
        Mlp,
        lambda m, x: Mlp.forward(m, x) * (1.0 if torch.is_grad_enabled() else 1.5),
        "computes neither",
    ),
    "without gradients in training": (
        Mlp,
        lambda m, x: (
            Mlp.forward(m, x) * (1.5 if m.training and not torch.is_grad_enabled() else 1.0)
        ),
        "its output differs in training without gradients",
    ),
    "frozen weight": (
        Mlp,
        lambda m, x: m.down_proj(
            m.act_fn(m.gate_proj(x)) * F.linear(x, m.up_proj.weight.detach(), m.up_proj.bias)
        ),
        "it stops a gradient",
    ),
    "in place": (Mlp, lambda m, x: Mlp.forward(m, x.mul_(1.0)), "it writes to its input"),
    "norm with dropout": (
        Norm,
        lambda m, x: F.dropout(Norm.forward(m, x), 0.3, m.training),
        IN_TRAINING,
    ),
    "norm louder in training": (
        Norm,
        lambda m, x: Norm.forward(m, x) * (1.5 if m.training else 1.0),
        "its output differs in training",
    ),
    "norm that keeps its input": (Norm, keeping, "its forward sets its last"),
    "norm with a scaled gradient": (
        Norm,
        lambda m, x: Norm.forward(m, x * 0.25 + x.detach() * 0.75),
        "",
    ),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", OTHERS)
def test_modules_with_extra_behavior_are_left_alone(name, training):
    base, forward, reason, *attributes = OTHERS[name]
    module = variant(base, forward, **dict(*attributes)).train(training)
    stock, ours, entries, reasons = patched_pair(module)
    assert entries == []
    assert type(ours) is type(module)
    (said,) = reasons
    assert re.search(reason, said), said
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
    forget_probes()
    expected = str(patch(models[0]))
    forget_probes()
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
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
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
