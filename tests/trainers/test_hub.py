"""The mapping for the kernels library, with the library itself where it is installed."""

import copy
import importlib

import pytest
import torch

from tests.models import Calls, Graphs, assert_same_compiled, assert_same_training, batch, build

transformers = pytest.importorskip("transformers")
kernels = pytest.importorskip("kernels")

from transformers.integrations import hub_kernels  # noqa: E402

from liger_multi.compat import hub  # noqa: E402
from liger_multi.patching.mixers import SERVED  # noqa: E402

AVAILABLE = hub_kernels.is_kernels_available()
"""Whether transformers accepts this version of the library, and so has marked its layers."""


def test_layers_are_what_the_library_accepts():
    """No constructor, no members, as it checks when it loads one."""
    plain = set(dir(torch.nn.Module)) | {"can_torch_compile", "has_backward"}
    for layer in hub.LAYERS.values():
        assert layer.__init__ is torch.nn.Module.__init__
        assert not {n for n in dir(layer) if not n.startswith("__")} - plain
    assert hub.Layer("RMSNorm") == copy.deepcopy(hub.Layer("RMSNorm"))
    assert len({hub.Layer("RMSNorm"), hub.Layer("RMSNorm"), hub.Layer("QuickGELU")}) == 2


def test_an_unknown_layer_is_refused():
    with pytest.raises(ValueError, match=r"no layer Rmsnorm; there are RMSNorm"):
        hub.mapping(layers=("Rmsnorm",))


def marked(monkeypatch, case, name):
    """The mark that transformers gives, where it does not take this version of the library."""
    monkeypatch.setattr(case, "kernel_layer_name", name, raising=False)
    monkeypatch.setattr(case, "kernel_condition", None, raising=False)


def kernelized(model, **options):
    with kernels.use_kernel_mapping(hub.mapping(**options)):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu")
    hub.settle(model)
    return model


def every(model, suffix):
    return {type(m) for m in model.modules() if type(m).__name__.endswith(suffix)}


@pytest.mark.parametrize("case", ["llama", "olmo2", "gemma"])
def test_norms_and_mlps_train_as_before(monkeypatch, case):
    """Each norm rounds where its class does; an MLP that somebody marked is one operator."""
    stock = build(case)
    for suffix, name in (("RMSNorm", "RMSNorm"), ("MLP", "SwiGLUMLP")):
        for layer in every(stock, suffix):
            marked(monkeypatch, layer, name)
    ours = kernelized(copy.deepcopy(stock))
    calls = Calls(monkeypatch)
    assert_same_training(stock, ours)
    assert calls["rms_norm"] == {"llama": 5, "olmo2": 9, "gemma": 5}[case]
    assert calls["gated_mlp"] == 2
    x = torch.randn(3, 32).bfloat16()
    for a, b in zip(stock.modules(), ours.modules(), strict=True):
        if type(a).__name__.endswith("RMSNorm") and a.weight.shape == (32,):
            assert torch.equal(copy.deepcopy(a).bfloat16()(x), copy.deepcopy(b).bfloat16()(x))


def test_a_module_of_no_known_kind_keeps_its_forward(monkeypatch):
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, hidden_states):
            return hidden_states * self.weight + 3

    marked(monkeypatch, Odd, "RMSNorm")
    stock, x = Odd(), torch.randn(2, 8)
    ours = kernelized(copy.deepcopy(stock))
    assert ours.forward.__func__ is hub.RMSNorm.forward
    assert torch.equal(ours(x), stock(x))


@pytest.mark.parametrize("name", ["NewGELU", "FastGELU", "QuickGELU"])
def test_activations(monkeypatch, name):
    cls = getattr(transformers.activations, f"{name}Activation")
    marked(monkeypatch, cls, name)
    x, ours = torch.linspace(-6, 6, 101).requires_grad_(), kernelized(cls())
    assert ours.forward.__func__ is hub.LAYERS[name].forward
    actual, right = ([y, *torch.autograd.grad(y.sum(), x)] for y in (ours(x), cls()(x)))
    torch.testing.assert_close(actual, right, rtol=1e-5, atol=1e-5)


def _rows(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


_HEADS = (_rows(2, 70, 2, 8), _rows(2, 70, 2, 8) + 1, _rows(2, 70, 2, 6))
_B = (_rows(2, 20, 1, 8), _rows(2, 20, 1, 8) + 1)
FUNCTIONS = {
    "causal_conv1d_fn": ("qwen3_next", (_rows(2, 5, 9), _rows(5, 4)), {"activation": "silu"}),
    "chunk_gated_delta_rule": (
        "qwen3_next",
        (*_HEADS, -_rows(2, 70, 2).abs(), _rows(2, 70, 2).sigmoid()),
        {"use_qk_l2norm_in_kernel": True},
    ),
    "chunk_kda": (
        "kimi_linear",
        (*_HEADS, -_rows(2, 70, 2, 8).abs(), _rows(2, 70, 2).sigmoid()),
        {"use_qk_l2norm_in_kernel": True},
    ),
    "mamba_chunk_scan_combined": (
        "mamba2",
        (_rows(2, 20, 4, 6), _rows(2, 20, 4), -_rows(4).abs(), *_B),
        {"chunk_size": 16},
    ),
    "selective_scan_fn": (
        "mamba",
        (_rows(2, 6, 11), _rows(2, 6, 11), -_rows(6, 4).abs(), *_rows(2, 2, 4, 11)),
        {"delta_softplus": True},
    ),
}


def mixing(name):
    """A function of a modeling file, and the same marked, held by a module and kernelized."""
    place = f"transformers.models.{FUNCTIONS[name][0]}.modeling_{FUNCTIONS[name][0]}"
    function = getattr(importlib.import_module(place), hub.MIXING[name][0], None)
    if function is None:
        pytest.skip("this transformers has no such function")
    return function, held(name, function)


def held(name, function):
    marked = kernels.use_kernel_forward_from_hub(name)(function)

    @kernels.use_kernelized_func(marked)
    class Holder(torch.nn.Module):
        def forward(self, *args, **kwargs):
            return marked(*args, **kwargs)

    return kernelized(Holder(), layers=(name,))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_mix_tokens(monkeypatch, name):
    stock, ours = mixing(name)
    _, tensors, options = FUNCTIONS[name]
    calls = Calls(monkeypatch)

    def trained(function):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = function(*leaves, **options)
        y = out[0] if isinstance(out, tuple) else out
        return [y, *torch.autograd.grad((y * y.detach()).sum(), leaves)]

    torch.testing.assert_close([*trained(ours)], [*trained(stock)], rtol=1e-4, atol=1e-4)
    assert calls[SERVED[hub.MIXING[name][0]]] == 1


def test_hub_leaves_functions_that_compute_something_else():
    def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **kwargs):
        return hidden_states * weight.sum() + 3

    x, weight = _rows(2, 5, 9), _rows(5, 4)
    ours = held("causal_conv1d_fn", causal_conv1d_fn)
    assert torch.equal(ours(x, weight), causal_conv1d_fn(x, weight))


@pytest.mark.slow
def test_compiled_layers_of_a_settled_model(monkeypatch):
    stock = build(num_hidden_layers=1)
    for layer in every(stock, "RMSNorm"):
        marked(monkeypatch, layer, "RMSNorm")
    ours = kernelized(copy.deepcopy(stock))
    graphs = Graphs()
    assert_same_compiled(stock, ours, batch(), backend=graphs)
    assert graphs.count == 1
    assert any("rms_norm" in name for name in graphs.targets)


# --- with transformers' own marks ---

own_marks = pytest.mark.skipif(
    not AVAILABLE, reason="this transformers takes another version of the kernels library"
)


@own_marks
def test_set_use_kernels(monkeypatch):
    """Norms and the rotary function of llama, through transformers' own switch, in both modes."""
    stock = build()
    ours = build().train()
    ours.load_state_dict(stock.state_dict())
    ours.set_use_kernels(True, hub.kernel_config())
    calls = Calls(monkeypatch)
    assert_same_training(stock, ours)
    assert calls["rms_norm"] == 5
    assert calls["rope"] == 4, "the function is one object, so the other model has it too"
    ours.eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(**batch()).logits, stock(**batch()).logits)
    assert calls["rms_norm"] == 10


@own_marks
def test_from_pretrained(monkeypatch, tmp_path):
    stock = build("mixtral")
    stock.save_pretrained(tmp_path)
    ours = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, use_kernels=True, kernel_config=hub.kernel_config()
    )
    calls = Calls(monkeypatch)
    assert_same_training(stock, ours.train(), lambda m: m(**batch()).loss)
    assert (calls["rms_norm"], calls["fused_moe"]) == (5, 2)


@own_marks
def test_router_and_experts(monkeypatch):
    stock = build("gpt_oss")
    ours = kernelized(copy.deepcopy(stock), layers=("MegaBlocksMoeMLP",))
    calls = Calls(monkeypatch)
    assert_same_training(stock, ours)
    assert calls["fused_moe"] == 2
