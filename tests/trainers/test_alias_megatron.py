"""``liger_kernel.megatron``; `make test-trainers NAME=megatron-core` trains with it."""

import copy
import importlib.util
import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from liger_multi.compat import liger_kernel as alias

RMS = SimpleNamespace(normalization="RMSNorm", sequence_parallel=True)
LAYER = SimpleNamespace(normalization="LayerNorm")


@pytest.fixture
def names():
    """The module ``liger_kernel.megatron``."""
    alias.install(force=True)
    yield importlib.import_module("liger_kernel.megatron")
    alias.uninstall()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("centered", [False, True])
def test_megatron_norm_matches_torch(names, centered, dtype):
    norm = names.LigerMegatronRMSNorm(RMS, 8, eps=1e-3, zero_centered_gamma=centered).to(dtype)
    assert norm.weight.sequence_parallel is True
    assert norm.weight.eq(0.0 if centered else 1.0).all()
    with torch.no_grad():
        norm.weight.add_(torch.linspace(-0.5, 0.5, 8).to(dtype))
    x = torch.randn(5, 3, 8).to(dtype).requires_grad_()
    wide, weight = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    expected = F.rms_norm(wide, (8,), weight + centered, 1e-3)
    up = torch.randn(5, 3, 8)
    expected.backward(up.double())
    y = norm(x)
    y.backward(up.to(dtype))
    assert y.dtype == dtype
    near = {"rtol": 2e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for ours, exact in ((y, expected), (x.grad, wide.grad), (norm.weight.grad, weight.grad)):
        torch.testing.assert_close(ours.double(), exact, **near)


def test_megatron_norm_copies_and_state(names):
    norm = names.LigerMegatronRMSNorm(RMS, (8,))
    assert [*norm.state_dict()] == ["weight"]
    for again in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert again.load_state_dict(norm.state_dict())
        assert torch.equal(again(torch.ones(2, 8)), norm(torch.ones(2, 8)))
    assert names.LigerMegatronRMSNorm(SimpleNamespace(), 8).weight.sequence_parallel is False
    assert names.LigerMegatronRMSNorm(
        SimpleNamespace(layernorm_zero_centered_gamma=True), 8
    ).zero_centered_gamma
    with pytest.raises(ValueError, match=r"must be 'RMSNorm', got 'LayerNorm'"):
        names.LigerMegatronRMSNorm(LAYER, 8)


def test_megatron_swiglu_fallback(names):
    x = torch.randn(4, 2, 12, requires_grad=True)
    gate, up = x.chunk(2, -1)
    mlp = names.LigerMegatronSwiGLU(lambda *args: args)
    torch.testing.assert_close(mlp(x), F.silu(gate) * up)
    torch.testing.assert_close(mlp(x[0]), (F.silu(gate) * up)[0])
    bias = torch.ones(12)
    assert mlp(x, bias) == (x, bias, False, False)
    assert mlp(x, None, False, True) == (x, None, False, True)
    alone = names.LigerMegatronSwiGLU()
    with pytest.raises(RuntimeError, match="fp8_input_store is not served"):
        alone(x, fp8_input_store=True)
    with pytest.raises(ValueError, match=r"got \(12,\)"):
        alone(x[0, 0])


def test_megatron_cross_entropy_defaults(names):
    loss = names.LigerMegatronCrossEntropy(label_smoothing=0.1)
    shown = "label_smoothing_formula='megatron', label_smoothing_mode='partition')"
    assert repr(loss).endswith(shown)
    logits, target = torch.randn(3, 2, 11), torch.randint(11, (3, 2))
    expected = F.cross_entropy(
        logits.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=0.1 * 11 / 10
    )
    torch.testing.assert_close(loss(logits, target).flatten(), expected)
    with pytest.raises(ValueError, match="reduction 'mean'"):
        names.LigerMegatronCrossEntropy(reduction="mean")


# --- what is put into Megatron-Core's places ---


def module(monkeypatch, name, **names):
    """A module of a Megatron-Core that has these names."""
    module = ModuleType(f"megatron.core.{name}" if name else "megatron.core")
    module.__path__ = []
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


class Norm:
    """As Megatron-Core's: a class whose call makes a norm of PyTorch."""

    def __new__(cls, config, hidden_size, eps=1e-5, **_):
        return torch.nn.LayerNorm(hidden_size, eps)


class Provider:
    """A specification with Megatron-Core's norms."""

    def layer_norm(self, rms_norm=False, for_qk=False):
        return ("its own", rms_norm, for_qk)


class Function(torch.autograd.Function):
    """The fused activation, with a mark."""

    @staticmethod
    def forward(ctx, input, fp8_input_store, cpu_offload_input):
        return input * 0


@pytest.fixture
def megatron(monkeypatch):
    """Modules with the places of Megatron-Core, and one that has them under names of its own."""
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    module(monkeypatch, "")
    for package in ("transformer", "models", "fusions", "tensor_parallel"):
        module(monkeypatch, package)

    def fused(vocab_parallel_logits, target, tp_group):
        return "fused"

    def plain(vocab_parallel_logits, target, label_smoothing=0.0):
        return "plain"

    module(monkeypatch, "transformer.torch_norm", WrappedTorchNorm=Norm)
    module(monkeypatch, "models.backends", LocalSpecProvider=type("Local", (Provider,), {}))
    module(monkeypatch, "fusions.fused_cross_entropy", fused_vocab_parallel_cross_entropy=fused)
    module(monkeypatch, "fusions.fused_bias_swiglu", SwiGLUFunction=Function)
    module(monkeypatch, "tensor_parallel.cross_entropy", vocab_parallel_cross_entropy=plain)
    module(monkeypatch, "parallel_state", get_tensor_model_parallel_group=lambda: None)
    return module(monkeypatch, "user", LNImpl=Norm, loss=plain, fast=fused, act=Function)


def test_megatron_names_replaced_and_restored(names, megatron):
    before = dict(vars(megatron))
    local = sys.modules["megatron.core.models.backends"].LocalSpecProvider
    own = local.layer_norm
    names.apply_liger_kernel_to_megatron(rms_norm=True, cross_entropy=True, swiglu=True)
    once = dict(vars(megatron))
    names.apply_liger_kernel_to_megatron(rms_norm=True, cross_entropy=True, swiglu=True)
    assert vars(megatron) == once

    assert isinstance(megatron.LNImpl(RMS, 8), names.LigerMegatronRMSNorm)
    assert isinstance(megatron.LNImpl(LAYER, 8, eps=0.5), torch.nn.LayerNorm)
    assert local().layer_norm(rms_norm=True) is names.LigerMegatronRMSNorm
    assert local().layer_norm(for_qk=True) == ("its own", False, True)

    logits, target = torch.randn(3, 2, 11), torch.randint(11, (3, 2))
    flat = logits.flatten(0, 1), target.flatten()
    for module, share in (
        (megatron.fast(logits, target, None), 0.0),
        (megatron.loss(logits, target), 0.0),
        (megatron.loss(logits, target, 0.1), 0.1 * 11 / 10),
    ):
        expected = F.cross_entropy(*flat, reduction="none", label_smoothing=share)
        torch.testing.assert_close(module.flatten(), expected)

    x = torch.randn(4, 12)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(megatron.act.apply(x, False, False), F.silu(gate) * up)
    assert megatron.act.apply(x, True, False).eq(0).all()

    late = ModuleType("megatron.core.late")  # a module that is imported after the call
    late.norm = sys.modules["megatron.core.transformer.torch_norm"].WrappedTorchNorm
    sys.modules[late.__name__] = late
    alias.uninstall()
    del sys.modules[late.__name__]
    assert late.norm is Norm
    assert {**vars(megatron)} == before
    assert local.layer_norm is own


def test_megatron_replaces_only_requested(names, megatron):
    before = dict(vars(megatron))
    names.apply_liger_kernel_to_megatron()
    assert {name for name in before if vars(megatron)[name] is not before[name]} == {"LNImpl"}


@pytest.mark.skipif(importlib.util.find_spec("megatron"), reason="Megatron-Core is installed")
@pytest.mark.parametrize("part", ["rms_norm", "cross_entropy", "swiglu"])
def test_missing_megatron_error(names, part):
    asked = {"rms_norm": False, part: True}
    with pytest.raises(ImportError, match=r"pip install megatron-core"):
        names.apply_liger_kernel_to_megatron(**asked)
    names.apply_liger_kernel_to_megatron(rms_norm=False)


def test_missing_megatron_attribute_error(names, megatron, monkeypatch):
    monkeypatch.delattr(sys.modules["megatron.core.fusions.fused_bias_swiglu"], "SwiGLUFunction")
    with pytest.raises(ImportError, match=r"no megatron\.core\.fusions\.fused_bias_swiglu\.SwiGLU"):
        names.apply_liger_kernel_to_megatron(rms_norm=False, swiglu=True)
