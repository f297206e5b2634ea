"""Stacks of experts in 4 bits: equal to their dequantized weights, of which few exist at a time.

By bitsandbytes where it is installed, and otherwise by its interface written here.
"""
# ruff: noqa: E402  (what needs transformers is imported after the skip)

import copy
import importlib
import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

from liger_multi import ops
from liger_multi.dispatch.op import inline_ops
from liger_multi.patching import patch, unpatch
from liger_multi.patching.experts import quantized as quantized_experts
from tests.models import assert_same_training, batch, build
from tests.patching.test_experts_lora import Stacks, adapted

SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_local_experts": 5}
STACKS = ("gate_up_proj", "down_proj")


# --- the interface of bitsandbytes ---


@dataclass
class QuantState:
    absmax: torch.Tensor
    shape: Any = None
    code: Any = None
    blocksize: int = 64
    quant_type: str = "nf4"
    dtype: Any = None
    offset: Any = None
    state2: Any = None

    @property
    def nested(self):
        return self.state2 is not None


def dequantize_blockwise(numbers, state):
    wide = state.absmax.repeat_interleave(state.blocksize)[: numbers.numel()]
    return state.code[numbers.long()] * wide


def dequantize_4bit(packed, state):
    flat = packed.view(-1)
    numbers = torch.stack([flat >> 4, flat & 15], 1).view(-1).long()
    absmax = state.absmax
    if state.nested:
        absmax = dequantize_blockwise(absmax, state.state2) + state.offset
    wide = absmax.repeat_interleave(state.blocksize)
    return (state.code[numbers] * wide).view(state.shape).to(state.dtype)


class Bnb4bitParametrization(nn.Module):
    def __init__(self, quant_state):
        super().__init__()
        self.quant_state = quant_state

    def forward(self, packed):
        return dequantize_4bit(packed, self.quant_state)


Bnb4bitParametrization.__module__ = "bitsandbytes.nn.parametrize"


def replace_parameter_4bit(module, name, compress_statistics=False):
    whole = getattr(module, name).detach()
    rows, code = whole.float().view(-1, 64), torch.linspace(-1, 1, 16)
    absmax = rows.abs().amax(1)
    numbers = ((rows / absmax[:, None] + 1) * 7.5).round().to(torch.uint8).view(-1, 2)
    state = QuantState(absmax, whole.shape, code, dtype=whole.dtype)
    if compress_statistics:
        state.offset, levels = absmax.mean(), torch.linspace(-1, 1, 256)
        rest = absmax - state.offset
        most = rest.abs().max()
        state.absmax = ((rest / most + 1) * 127.5).round().to(torch.uint8)
        scale = most.expand(-(-rest.numel() // 256)).clone()
        state.state2 = QuantState(scale, code=levels, blocksize=256)
    packed = nn.Parameter((numbers[:, :1] << 4) | numbers[:, 1:], requires_grad=False)
    setattr(module, name, packed)
    parametrize.register_parametrization(module, name, Bnb4bitParametrization(state), unsafe=True)


@pytest.fixture(autouse=True)
def quantize(monkeypatch):
    """What puts a parameter into 4 bits; groups of two experts."""
    monkeypatch.setattr(quantized_experts, "GROUP_BYTES", 2 * 3 * 128 * 128 * 4)
    try:
        return importlib.import_module("bitsandbytes.nn.parametrize").replace_parameter_4bit
    except ImportError:
        theirs = types.ModuleType("bitsandbytes.functional")
        vars(theirs).update(
            QuantState=QuantState,
            dequantize_4bit=dequantize_4bit,
            dequantize_blockwise=dequantize_blockwise,
        )
        monkeypatch.setitem(sys.modules, theirs.__name__, theirs)
        return replace_parameter_4bit


def experts_of(model):
    return [m for _, m in model.named_modules() if type(m).__name__.endswith("Experts")]


def pair(model_type, quantize, nested=False, adapters=True):
    """A model of weights in 4 bits, and one of the same weights in full."""
    stock = build(model_type, **SIZES)
    stock = adapted(stock) if adapters else stock.requires_grad_(False)
    ours = copy.deepcopy(stock)
    for wide, narrow in zip(experts_of(stock), experts_of(ours), strict=True):
        for name in STACKS:
            quantize(narrow, name, compress_statistics=nested)
            getattr(wide, name).data = getattr(narrow, name).detach().clone()
    if not adapters:
        for model in (stock, ours):
            model.model.embed_tokens.weight.requires_grad_()
    return stock, ours


def loss_of(model):
    return model(**batch()).loss


@pytest.fixture
def groups(monkeypatch):
    """How many experts each call of an operator had."""
    observed = []
    for name in ("lora_moe", "fused_moe"):
        stock = getattr(ops, name)

        def counted(x, weight, *args, stock=stock, **options):
            observed.append(weight.shape[0])
            return stock(x, weight, *args, **options)

        monkeypatch.setattr(ops, name, counted)
    return observed


# --- equal ---


@pytest.mark.parametrize("adapters", [True, False])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_step_equals_dequantized_weights(model_type, nested, adapters, quantize, groups):
    stock, ours = pair(model_type, quantize, nested, adapters)
    report = patch(ours, strict=True)
    assert report.count("fused_moe") == 2
    assert report.count("lora") == 2 * adapters
    for _ in range(2):  # PEFT's own second forward fails on them
        groups.clear()
        assert_same_training(stock, ours, loss_of, rtol=1e-4)
        assert groups == [2, 2, 1] * 4  # two layers, forward and backward
    unpatch(ours)
    assert not any(hasattr(type(m), "_liger_multi_swap") for m in ours.modules())


def test_evaluation_and_disabled_adapters(quantize, groups):
    stock, ours = pair("mixtral", quantize)
    patch(ours, strict=True)
    groups.clear()
    with torch.no_grad():
        torch.testing.assert_close(loss_of(ours), loss_of(stock), rtol=1e-4, atol=0)
        assert groups == [2, 2, 1] * 2
        with stock.disable_adapter(), ours.disable_adapter():
            torch.testing.assert_close(loss_of(ours), loss_of(stock), rtol=1e-4, atol=0)
        assert groups == [2, 2, 1] * 4


def test_under_checkpointing(quantize):
    stock, ours = pair("mixtral", quantize)
    for model in (stock, ours):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    patch(ours, strict=True)
    assert_same_training(stock, ours, loss_of, rtol=1e-4)


@pytest.mark.parametrize(("implementation", "casts"), [("batched_mm", True), ("grouped_mm", False)])
def test_backward_runs_under_the_autocast_of_forward(quantize, monkeypatch, implementation, casts):
    """Autocast reaches the GEMMs of some implementations of experts, not the grouped ones."""
    observed, stock = [], ops.lora_moe

    def noted(x, *args, **options):
        observed.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return stock(x, *args, **options)

    monkeypatch.setattr(ops, "lora_moe", noted)
    full, ours = pair("mixtral", quantize)
    for model in (full, ours):
        model.set_experts_implementation(implementation)
    patch(ours, strict=True)
    results = []
    for model in (full, ours):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model)
        loss.backward()
        results.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert observed == [(casts, False)] * 6 + [(casts, True)] * 6
    assert results[0].keys() == results[1].keys()
    for name, expected in results[0].items():
        assert (results[1][name] - expected).norm() < 0.05 * expected.norm(), name


def test_tensors_saved_for_backward(quantize):
    """Inputs and factors, nothing of a group."""
    _, ours = pair("mixtral", quantize)
    patch(ours, strict=True)
    experts = ours.base_model.model.model.layers[0].mlp.experts
    x = torch.randn(40, 128, requires_grad=True)
    index = torch.stack([torch.randperm(5)[:2] for _ in range(40)])
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        experts(x, index, torch.rand(40, 2))
    thin = sum(p.numel() for n, p in experts.named_parameters() if "lora_" in n)
    assert sum(t.numel() for t in kept) == x.numel() + 2 * index.numel() + thin


def test_no_dequantized_tensor_has_the_size_of_a_stack(quantize):
    _, ours = pair("mixtral", quantize)
    patch(ours, strict=True)
    layer = ours.base_model.model.model.layers[0].mlp
    mode = Stacks([torch.empty(5, 128, 128)])
    x = torch.randn(1, 6, 128, requires_grad=True)
    with inline_ops(), mode:
        y = layer(x)
        (y[0] if isinstance(y, tuple) else y).sum().backward()
    assert x.grad.any()
    assert [shape for _, shape in mode.allocations if shape[-1] != 1 and len(shape) == 3] == []


def test_blocks_across_experts_are_dequantized_whole(quantize):
    """An expert that ends within a block."""
    module = nn.Module()
    module.register_parameter("down_proj", nn.Parameter(torch.randn(4, 8, 12)))
    quantize(module, "down_proj")
    assert quantized_experts.stack_of(module, "down_proj") is None
    assert quantized_experts.stacked(module, "down_proj").shape == (4, 8, 12)


def test_slices_are_those_of_the_whole(quantize):
    for nested in (False, True):
        module = nn.Module()
        module.register_parameter("down_proj", nn.Parameter(torch.randn(6, 128, 128)))
        quantize(module, "down_proj", compress_statistics=nested)
        stack, whole = quantized_experts.stack_of(module, "down_proj"), module.down_proj
        assert (stack.shape, stack.dtype) == (whole.shape, whole.dtype)
        for some in (slice(0, 1), slice(2, 5), slice(5, 6), slice(0, 6)):
            torch.testing.assert_close(stack[some], whole[some])
