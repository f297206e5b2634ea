"""LoRA on stacks of experts: patched models train as PEFT's do, and nothing has a stack's size."""
# ruff: noqa: E402  (what needs transformers is imported after the skip)

import copy
import importlib
import sys
import types
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

peft = pytest.importorskip("peft")
pytest.importorskip("peft.tuners.lora.layer", reason="a PEFT with target_parameters")

from liger_multi import ops
from liger_multi.dispatch.op import inline_ops
from liger_multi.patching import patch, unpatch
from liger_multi.patching.evidence.facts import ModelFacts
from liger_multi.patching.experts import lora as expert_lora, quantized as quantized_experts
from tests import models
from tests.comparing import gradients, recorded, saved
from tests.models import (
    adapters,
    assert_as_exact,
    assert_same_training,
    batch,
    build,
    filled,
    loss_of,
    patched_copy,
    patched_ops,
    transformers,
)

STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
EXPERTS, HIDDEN, INNER = 4, 32, 16


def nemotron():
    """Experts without a gate."""
    settings = transformers.NemotronHConfig(
        vocab_size=223,
        hidden_size=HIDDEN,
        layers_block_type=["attention", "moe"],
        n_routed_experts=EXPERTS,
        moe_intermediate_size=INNER,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_shared_expert_intermediate_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.NemotronHForCausalLM(settings)


OWN = {"deepseek_v3": models.deepseek, "nemotron_h": nemotron}
FIRST = {"nemotron_h": ("mixer.experts.up_proj", "mixer.experts.down_proj")}


def adapted_model(model_type="qwen3_moe", dtype=torch.float32):
    return (OWN[model_type]() if model_type in OWN else build(model_type)).to(dtype)


def adapted(model, target_parameters=STACKS, **config):
    """The model with adapters on its experts, whose factors differ from expert to expert."""
    config = {"r": 3, "target_parameters": list(target_parameters)} | config
    return adapters(model, config.pop("target_modules", []), **config)


def pair(model_type="qwen3_moe", dtype=torch.float32, patched=False, **config):
    """Two equal models with adapters, of which the second one may be patched."""
    stock = adapted(adapted_model(model_type, dtype), **config)
    return stock, patched_copy(stock, strict=True) if patched else copy.deepcopy(stock)


calls = models.counting("lora_moe", "fused_moe")


def assert_trained_alike(stock, ours, calls, count):
    """Both train alike, with this number of calls of lora_moe and none of fused_moe."""
    calls.clear()
    assert_same_training(stock, ours)
    assert calls == Counter(lora_moe=count)


def assert_left_to_peft(stock, ours, calls):
    """Both train alike, without a call of lora_moe."""
    calls.clear()
    assert_same_training(stock, ours)
    assert not calls["lora_moe"]


def wrappers(model):
    return [m for _, m in expert_lora.outermost_wrappers(ModelFacts(model))]


# --- equal ---

LAYERS = {"qwen3_moe": 1, "mixtral": 2, "gpt_oss": 2, "deepseek_v3": 1, "nemotron_h": 1}
ACTIVATIONS = {"gpt_oss": "swiglu_clamped", "nemotron_h": "relu_squared"}


@pytest.mark.parametrize("model_type", LAYERS)
def test_a_step_is_peft_s(model_type, calls):
    stock, ours = pair(model_type, target_parameters=FIRST.get(model_type, STACKS))
    actual = [e.replaced_by for e in patch(ours, strict=True).entries if e.op == "lora"]
    assert actual == [f"lora_moe[{ACTIVATIONS.get(model_type, 'silu')}]"] * LAYERS[model_type]
    assert_trained_alike(stock, ours, calls, LAYERS[model_type])
    grads = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    assert len(grads) == 4 * LAYERS[model_type]
    assert all("lora_" in name and grad.any() for name, grad in grads.items())
    unpatch(ours)
    assert not patched_ops(ours)
    assert_trained_alike(stock, ours, calls, 0)


CONFIGS = {
    "gate_up alone": {"target_parameters": STACKS[:1]},
    "down alone": {"target_parameters": STACKS[1:]},
    "a rank each": {"rank_pattern": {STACKS[1]: 5}, "alpha_pattern": {STACKS[0]: 3}},
    "rank-stabilized": {"use_rslora": True},
    "attention and dense layers": {"target_modules": ["q_proj", "v_proj", "gate_proj", "up_proj"]},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_forms_of_plain_lora(name, calls):
    assert_trained_alike(*pair(patched=True, **CONFIGS[name]), calls, 1)


@pytest.mark.parametrize("active", [["default"], ["other"], ["default", "other"]])
def test_one_of_two_adapters_and_both(active, calls):
    stock = adapted(adapted_model())
    torch.manual_seed(5)
    settings = peft.LoraConfig(r=2, target_modules=[], target_parameters=list(STACKS))
    stock.add_adapter("other", settings)
    filled(stock).base_model.set_adapter(active)
    assert_trained_alike(stock, patched_copy(stock, strict=True), calls, 1)


def test_patched_before_and_after_the_adapters(calls):
    stock = adapted(adapted_model())
    ours = adapted(patched_copy(adapted_model(), strict=True))
    assert_left_to_peft(stock, ours, calls)  # PEFT's forward, until the next patch
    patch(ours, strict=True)
    assert_trained_alike(stock, ours, calls, 1)


def test_adapters_are_pefts_without_lora_or_experts(calls):
    stock, ours = pair()
    for options in ({"lora": False}, {"fused_moe": False}):
        patch(ours)
        assert not patch(ours, **options).count("lora")
        assert_left_to_peft(stock, ours, calls)


# --- what PEFT's models can do ---


def test_disabled_merged_and_unloaded(calls):
    stock, ours = pair(patched=True)
    calls.clear()
    with torch.no_grad():
        expected = stock(**batch()).loss
        with stock.disable_adapter(), ours.disable_adapter():
            bare = stock(**batch()).loss
            torch.testing.assert_close(ours(**batch()).loss, bare)
        assert calls == {"fused_moe": 1}
        assert abs(bare - expected) > 1e-4
        ours.merge_adapter()
        torch.testing.assert_close(ours(**batch()).loss, expected)
        assert calls["lora_moe"] == 0
        ours.unmerge_adapter()
        torch.testing.assert_close(ours(**batch()).loss, expected)
        assert calls["lora_moe"] == 1
        torch.testing.assert_close(ours.merge_and_unload()(**batch()).loss, expected)
    assert calls["lora_moe"] == 1


def test_evaluation_and_generation(calls):
    stock, ours = pair(patched=True)
    ids = batch()["input_ids"]
    for model in (stock.eval(), ours.eval()):
        model.generation_config.pad_token_id = 0
        # with it, transformers 5.17 raises: one token's routers meet the mask of all tokens
        model.config.output_router_logits = False
    expected = stock.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    calls.clear()
    assert torch.equal(ours.generate(input_ids=ids, max_new_tokens=4, do_sample=False), expected)
    assert calls == {"lora_moe": 4}


def test_saved_and_loaded(tmp_path):
    stock, ours = pair(patched=True)
    optimizer = torch.optim.SGD([p for p in ours.parameters() if p.requires_grad], 0.1)
    loss_of(ours).backward()
    optimizer.step()
    ours.save_pretrained(tmp_path)
    assert ours.state_dict().keys() == stock.state_dict().keys()
    again = peft.PeftModel.from_pretrained(adapted_model(), tmp_path)
    with torch.no_grad():
        loss = loss_of(ours)
        torch.testing.assert_close(loss_of(again), loss)
        torch.testing.assert_close(loss_of(copy.deepcopy(ours)), loss)
        assert abs(loss_of(stock) - loss) > 1e-4


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing(reentrant, calls):
    stock, ours = pair(patched=True)
    for model in (stock, ours):
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_trained_alike(stock, ours, calls, 2)


def test_compiled_as_one_graph(calls):
    stock, ours = pair(patched=True)
    layer = ours.base_model.model.model.layers[1].mlp
    other = stock.base_model.model.model.layers[1].mlp
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 5, HIDDEN)
    results = []
    for run, owner in ((other, other), (compiled, layer)):
        y = run(x)
        y = y[0] if isinstance(y, tuple) else y
        thin = [p for p in owner.parameters() if p.requires_grad]
        results.append([y, *torch.autograd.grad(y.square().sum(), thin)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


# --- low precision ---


@pytest.mark.parametrize("thin", [torch.float32, torch.bfloat16])
def test_bf16_experts(thin, calls):
    wide = adapted(adapted_model())
    stock = copy.deepcopy(wide)
    for name, parameter in stock.named_parameters():
        parameter.data = parameter.data.to(thin if "lora_" in name else torch.bfloat16)
    ours = patched_copy(stock, strict=True)
    calls.clear()
    assert_as_exact(stock, ours, wide, loss_of, loss_of)
    assert calls == {"lora_moe": 1}


def test_under_autocast(calls):
    stock, ours = pair(patched=True)
    wide = copy.deepcopy(stock)

    def rounded(model):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model)

    calls.clear()
    assert_as_exact(stock, ours, wide, rounded, loss_of)
    assert calls == {"lora_moe": 1}


# --- memory ---


class Stacks(TorchDispatchMode):
    """Tensors as large as the smaller stack, or larger, that are in no memory of these."""

    def __init__(self, base):
        super().__init__()
        self.known = {p.untyped_storage().data_ptr() for p in base}
        self.least = min(p.numel() for p in base)
        self.allocations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            large = isinstance(t, torch.Tensor) and t.numel() >= self.least
            if large and t.untyped_storage().data_ptr() not in self.known:
                self.allocations.append((str(func), tuple(t.shape)))
        return result


def allocated(layer, base, width):
    """Tensors of a stack's size that a step of a layer puts into memory."""
    x, mode = torch.randn(1, 6, width, requires_grad=True), Stacks(base)
    with inline_ops(), mode:
        y = layer(x)
        (y[0] if isinstance(y, tuple) else y).sum().backward()
    assert x.grad.any()
    return mode.allocations


def stacks_in_a_step(model):
    layer = model.base_model.model.model.layers[0].mlp
    base = [p for n, p in layer.named_parameters() if n.endswith(("gate_up_proj", "down_proj"))]
    assert len(base) == 2
    return allocated(layer, base, 64)


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_no_tensor_has_the_size_of_a_stack(model_type):
    sizes = {"num_local_experts": 8, "hidden_size": 64, "intermediate_size": 40}
    stock = adapted(build(model_type, **sizes))
    assert stacks_in_a_step(patched_copy(stock, strict=True)) == []
    assert len(stacks_in_a_step(stock)) > 4


# --- left to PEFT ---


LEFT = {
    "are trained as well": lambda experts: experts.down_proj.requires_grad_(),
    "something stands around": lambda experts: experts.register_forward_hook(
        lambda module, args, output: output * 1.5
    ),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("reason", LEFT)
def test_other_adapters_run_peft_forward(reason, when, calls):
    """Before a patch, with the reason in its report, and after it."""
    stock, ours = pair(patched=when == "after")
    for model in (stock, ours):
        LEFT[reason](wrappers(model)[0].base_layer.base_layer)
    if when == "before":
        assert [s.reason for s in patch(ours).skipped if s.op == "lora" and reason in s.reason]
    assert_left_to_peft(stock, ours, calls)


def test_another_layout_is_left_to_peft():
    from peft.tuners.lora.layer import ParamWrapper

    class Turned(ParamWrapper):
        def get_delta_weight(self, adapter_name):
            return super().get_delta_weight(adapter_name).flip(0)

    assert expert_lora._measured(ParamWrapper, True) == ""
    assert "lays its factors out in another way" in expert_lora._measured(Turned, True)
    assert "failed on a small copy" in expert_lora._measured(nn.Linear, False)


def test_transposed_experts_of_peft_are_left():
    """Llama 4 keeps inputs before outputs, and has no flag that says so."""
    settings = transformers.Llama4TextConfig(
        vocab_size=223,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        intermediate_size_mlp=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=EXPERTS,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(settings)
    names = [n for n, _ in model.named_parameters() if n.endswith("experts.gate_up_proj")]
    stock = adapted(model, target_parameters=names)
    ours = copy.deepcopy(stock)
    report = patch(ours)
    assert [s.reason for s in report.skipped if s.op == "lora"] == [
        "PEFT reads the layout of its experts in another way"
    ]
    assert_same_training(stock, ours)


def test_a_wrapped_parameter_of_another_module_is_no_concern():
    stock, model = pair("mixtral", target_parameters=["mlp.gate.weight"])
    assert not patch(model, strict=True).count("lora")
    assert_same_training(stock, model)


# --- stacks of experts in 4 bits ---

SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_local_experts": 5}
WEIGHTS = ("gate_up_proj", "down_proj")


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
    setattr(module, name, nn.Parameter((numbers[:, :1] << 4) | numbers[:, 1:], requires_grad=False))
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


def experts_modules(model):
    return [m for _, m in model.named_modules() if type(m).__name__.endswith("Experts")]


def quantized(model_type, quantize, nested=False, adapters=True):
    """A model of weights in 4 bits, and one of the same weights in full."""
    stock = build(model_type, **SIZES)
    stock = adapted(stock) if adapters else stock.requires_grad_(False)
    ours = copy.deepcopy(stock)
    for wide, narrow in zip(experts_modules(stock), experts_modules(ours), strict=True):
        for name in WEIGHTS:
            quantize(narrow, name, compress_statistics=nested)
            getattr(wide, name).data = getattr(narrow, name).detach().clone()
    if not adapters:
        for model in (stock, ours):
            model.model.embed_tokens.weight.requires_grad_()
    return stock, ours


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
    stock, ours = quantized(model_type, quantize, nested, adapters)
    report = patch(ours, strict=True)
    assert report.count("fused_moe") == 2
    assert report.count("lora") == 2 * adapters
    for _ in range(2):  # PEFT's own second forward fails on them
        groups.clear()
        assert_same_training(stock, ours, loss_of, rtol=1e-4)
        assert groups == [2, 2, 1] * 4  # two layers, forward and backward
    unpatch(ours)
    assert not patched_ops(ours)


def test_evaluation_and_disabled_adapters(quantize, groups):
    stock, ours = quantized("mixtral", quantize)
    patch(ours, strict=True)
    groups.clear()
    with torch.no_grad():
        torch.testing.assert_close(loss_of(ours), loss_of(stock), rtol=1e-4, atol=0)
        assert groups == [2, 2, 1] * 2
        with stock.disable_adapter(), ours.disable_adapter():
            torch.testing.assert_close(loss_of(ours), loss_of(stock), rtol=1e-4, atol=0)
        assert groups == [2, 2, 1] * 4


def test_quantized_under_checkpointing(quantize):
    stock, ours = quantized("mixtral", quantize)
    for model in (stock, ours):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    patch(ours, strict=True)
    assert_same_training(stock, ours, loss_of, rtol=1e-4)


@pytest.mark.parametrize(("implementation", "casts"), [("batched_mm", True), ("grouped_mm", False)])
def test_backward_runs_under_the_autocast_of_forward(quantize, monkeypatch, implementation, casts):
    """Autocast reaches the GEMMs of some implementations of experts, not the grouped ones."""

    def modes(*_, **__):
        return torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()

    observed = recorded(monkeypatch, ops, "lora_moe", modes)
    pair = quantized("mixtral", quantize)
    for model in pair:
        model.set_experts_implementation(implementation)
    patch(pair[1], strict=True)
    for model in pair:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model)
        loss.backward()
    assert observed == [(casts, False)] * 6 + [(casts, True)] * 6
    expected, actual = map(gradients, pair)
    assert expected.keys() == actual.keys()
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() < 0.05 * gradient.norm(), name


def test_tensors_saved_for_backward(quantize):
    """Inputs and factors, nothing of a group."""
    _, ours = quantized("mixtral", quantize)
    patch(ours, strict=True)
    experts = ours.base_model.model.model.layers[0].mlp.experts
    x = torch.randn(40, 128, requires_grad=True)
    index = torch.stack([torch.randperm(5)[:2] for _ in range(40)])
    _, kept = saved(lambda: experts(x, index, torch.rand(40, 2)))
    thin = sum(p.numel() for n, p in experts.named_parameters() if "lora_" in n)
    assert sum(t.numel() for t in kept) == x.numel() + 2 * index.numel() + thin


def test_no_dequantized_tensor_has_the_size_of_a_stack(quantize):
    _, ours = quantized("mixtral", quantize)
    patch(ours, strict=True)
    layer = ours.base_model.model.model.layers[0].mlp
    allocations = allocated(layer, [torch.empty(5, 128, 128)], 128)
    assert [shape for _, shape in allocations if shape[-1] != 1 and len(shape) == 3] == []


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
