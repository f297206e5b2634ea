"""Captured and compiled forwards before and after a patch; patches of other libraries."""

# ruff: noqa: E402  (what needs transformers is imported after the skip)
import copy
import functools
import pickle
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

transformers = pytest.importorskip("transformers")

from transformers.models.llama.modeling_llama import LlamaMLP

from liger_multi.errors import PatchError
from liger_multi.patching import patch, patched, unpatch
from tests.models import Calls, Graphs, assert_same_training, batch, build, pair
from tests.patching.test_evidence_signature import ALONE, Holder, Tuned, doubled, patched_pair
from tests.patching.test_norms_find import modeling

# --- captured forwards ---


def wrapped(module):
    """As accelerate's hooks: the old forward stays with the module, another one calls it."""
    module._old_forward = module.forward
    module.forward = functools.update_wrapper(functools.partial(_called, module), module.forward)


def _called(module, *args, **kwargs):
    return module._old_forward(*args, **kwargs)


KINDS_OF_MODULES = {
    "mlp": lambda model: model.model.layers[0].mlp,
    "norm": lambda model: model.model.norm,
    "attention": lambda model: model.model.layers[0].self_attn,
    "experts": lambda model: model.model.layers[0].mlp.experts,
}


@pytest.mark.parametrize("part", KINDS_OF_MODULES)
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("how", ["unpatch", "patched"])
def test_a_captured_forward_works_after_the_patch(part, copied, how, monkeypatch):
    calls = Calls(monkeypatch)
    stock, ours = pair("mixtral" if part == "experts" else "llama")

    def capture():
        wrapped(KINDS_OF_MODULES[part](ours))

    if how == "unpatch":
        patch(ours)
        capture()
        unpatch(ours)
    else:
        with patched(ours):
            capture()
    model = copy.deepcopy(ours) if copied else ours
    calls.clear()
    assert_same_training(stock, model, lambda m: m(**batch()).loss)
    assert not calls
    module = KINDS_OF_MODULES[part](model)
    module.forward = module._old_forward  # as accelerate removes its hooks
    del module._old_forward
    assert not [s for s in patch(model).skipped if "somebody else" in s.reason]
    calls.clear()
    assert_same_training(stock, model, lambda m: m(**batch()).loss)
    assert calls


def test_a_captured_forward_is_pickled():
    stock, ours = pair()
    patch(ours)
    mlp_of = ours.model.layers[0].mlp
    mlp_of._old_forward = mlp_of.forward
    twin = pickle.loads(pickle.dumps(ours))
    unpatch(twin)
    module = twin.model.layers[0].mlp
    assert module._old_forward.__self__ is module
    x = torch.randn(2, 32)
    torch.testing.assert_close(module._old_forward(x), stock.model.layers[0].mlp(x))


def test_accelerates_hooks_before_and_after_unpatching():
    accelerate = pytest.importorskip("accelerate")
    stock, ours = pair()
    patch(ours, **ALONE)
    accelerate.cpu_offload(ours, execution_device=torch.device("cpu"))
    with torch.no_grad():
        expected = stock(**batch()).loss
        torch.testing.assert_close(ours(**batch()).loss, expected)
        unpatch(ours)
        torch.testing.assert_close(ours(**batch()).loss, expected)


def test_a_compiled_forward_after_unpatching():
    stock, ours = pair(num_hidden_layers=1)
    patch(ours)
    module = ours.model.layers[0].mlp
    module.forward = torch.compile(module.forward, backend="eager", fullgraph=True)
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)
    unpatch(ours)
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)
    torch._dynamo.reset()


def test_a_captured_forward_of_a_probe_of_a_user():
    from liger_multi.patching import Replacement, register, unregister

    module = nn.Tanh()
    register(lambda m: Replacement(_twice, "twice") if type(m) is nn.Tanh else None, "twice")
    try:
        patch(Holder(module), **ALONE)
        held = module.forward
        assert torch.equal(held(torch.ones(1)), torch.ones(1).tanh() * 2)
        unpatch(Holder(module))
        assert torch.equal(held(torch.ones(1)), torch.ones(1).tanh())
    finally:
        unregister("twice")


def _twice(module, stock, x):
    return stock(x) * 2


def test_captured_forwards_of_adapters():
    peft = pytest.importorskip("peft")
    stock = build()
    names = ["q_proj", "k_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False)
    stock = peft.get_peft_model(stock, config)
    ours = copy.deepcopy(stock)
    assert patch(ours, **ALONE).count("lora") == 8
    for module in ours.modules():
        if hasattr(module, "lora_A") or type(module).__name__ == "LlamaAttention":
            wrapped(module)
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)
    unpatch(ours)
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)


# --- compiled ---


def test_compiled_graphs_keep_compiled_code():
    stock, ours = pair(num_hidden_layers=1)
    patch(ours)
    graphs = Graphs()
    for model in (stock, ours):
        model.model.layers[0].mlp.act_fn.register_forward_hook(doubled)
    compiled = torch.compile(ours, fullgraph=True, backend=graphs)
    inputs = batch() | {"use_cache": False}
    assert_same_training(stock, ours, lambda m: (compiled if m is ours else m)(**inputs).loss)
    assert "ops/gated_mlp.py" not in graphs.traces
    assert "ops/rms_norm.py" in graphs.traces
    torch._dynamo.reset()


def test_a_changed_attribute_compiles_again():
    stock, ours, entries, _ = patched_pair(Tuned())
    assert entries == ["gated_mlp[silu]"]
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    x = torch.randn(3, 12)
    torch.testing.assert_close(compiled(x), stock(x))
    stock.scale = ours.scale = 0.5
    torch.testing.assert_close(compiled(x), stock(x))
    torch._dynamo.reset()


# --- patches of other libraries ---


def foreign(function, library="liger_kernel.transformers.rms_norm"):
    copied = types.FunctionType(function.__code__, globals(), function.__name__)
    copied.__module__ = library
    return copied


def test_forwards_of_other_libraries_are_left(monkeypatch):
    stock = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", foreign(stock))
    report = patch(build("llama"))
    assert {s.reason for s in report.skipped if s.op == "swiglu"} == {"Liger serves it (LlamaMLP)"}
    assert report.count("swiglu") == 0
    assert report.count("fused_linear_cross_entropy") == 1


def test_a_loss_in_a_foreign_forward_is_left(monkeypatch):
    model_class = transformers.LlamaForCausalLM
    monkeypatch.setattr(model_class, "forward", foreign(lambda self: None, "liger_kernel.x"))
    report = patch(build("llama"))
    (skip,) = [s for s in report.skipped if s.op == "fused_linear_cross_entropy"]
    assert skip.reason == "Liger replaced the forward of LlamaForCausalLM, with the loss in it"
    with pytest.raises(PatchError, match="Liger"):
        patch(build("llama"), strict=True)


def test_a_foreign_loss_function_is_left(monkeypatch):
    monkeypatch.setattr(F, "cross_entropy", foreign(lambda: None, "unsloth_zoo.losses"))
    report = patch(build("llama"))
    assert "Unsloth replaced torch.nn.functional.cross_entropy" in str(report)
    assert report.count("fused_linear_cross_entropy") == 0


def test_a_trainers_head_is_left():
    model = build("llama")
    model.forward = types.MethodType(foreign(lambda self: None, "trl.trainer.utils"), model)
    assert "TRL replaced the forward of LlamaForCausalLM" in str(patch(model))


def test_a_foreign_rotary_function_is_left(monkeypatch):
    module = modeling("llama")
    monkeypatch.setattr(module, "apply_rotary_pos_emb", foreign(module.apply_rotary_pos_emb))
    report = patch(build("llama"))
    assert report.count("rope") == 0
    assert "Liger put its apply_rotary_pos_emb into the modeling file" in str(report)
