"""Adapters on layers in FP8."""

import pytest
import torch

from liger_multi.dispatch.op import OPS
from liger_multi.errors import PatchError
from liger_multi.patching import patch, unpatch
from liger_multi.patching.float8.weight import Float8Weight
from tests.patching.test_float8_linear import ALL, apart, equal, ids, model, recorded, step
from tests.patching.test_float8_mlp import adapted, roundings

FROZEN = {"smallest": 0, "frozen": True}
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def test_adapters_on_a_frozen_base():
    """The loss equals that on a base that is rounded at every use, layer by layer.

    Gradients of x are sums of several layers in another order, and almost always round alike.
    """
    llama, other = adapted(), adapted()
    report = patch(llama, linear_float8=FROZEN)
    assert report.count("linear_float8") == report.count("lora") == 14
    assert not any("lora_A" in e.path or "lora_B" in e.path for e in report.entries)
    patch(other, linear_float8=ALL)
    actual, expected = step(llama), step(other)
    assert actual[0] == expected[0]
    assert apart(actual[1], expected[1]) < 1e-5


def test_fused_adapters_are_as_exact_as_layers():
    """In bf16, other roundings of 16 bits lead to other codes; errors are as large."""
    _, exact = step(adapted())
    results = []
    for options in (FROZEN, ALL):
        llama = adapted(torch.bfloat16)
        patch(llama, linear_float8=options)
        loss, gradients = step(llama)
        wrong = sum((g.float() - exact[n]).square().sum() for n, g in gradients.items())
        results.append((loss, wrong.sqrt().item()))
    (fused_loss, fused), (loss, layers) = results
    assert fused_loss == loss
    assert fused < 1.1 * layers


FUSED = ("lora_qkv", "lora_mlp", "linear_float8", "rms_norm_quantized")


def argument_of(calls, name):
    """Whether calls of an operator were given codes of their input."""
    place = OPS[name].fwd.params.index("codes")
    return [args[place] is not None for args in calls[name]]


def test_fused_adapters_take_weights_and_codes_in_float8():
    llama = adapted()
    report = patch(llama, linear_float8=FROZEN)
    assert any(e.replaced_by == "lora_mlp[silu]" for e in report.entries)
    with recorded(*FUSED) as calls:
        first = step(llama)
    assert argument_of(calls, "lora_qkv") == argument_of(calls, "lora_mlp") == [False, False]
    assert len(calls["linear_float8"]) == 2  # o_proj
    with recorded(*FUSED) as calls:
        assert equal(step(llama), first)
    assert argument_of(calls, "lora_qkv") == argument_of(calls, "lora_mlp") == [True, True]
    assert len(calls["rms_norm_quantized"]) == 4


def test_adapters_on_some_layers_of_a_frozen_base():
    """q and v are fused; k runs over codes as a layer, and the MLP as a whole."""
    peft = pytest.importorskip("peft")
    results = []
    for options in (FROZEN, ALL):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        llama = peft.get_peft_model(model(), config)
        patch(llama, linear_float8=options)
        step(llama)
        with recorded(*FUSED, "gated_mlp_float8") as calls:
            results.append(step(llama))
        if options is FROZEN:
            assert argument_of(calls, "lora_qkv") == [True, True]
            assert roundings(calls) == (2, 6)  # of k, o and the MLP, o
    assert results[0][0] == results[1][0]
    assert apart(results[0][1], results[1][1]) < 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_fused_adapters_under_checkpointing(reentrant):
    llama = adapted()
    patch(llama, linear_float8=FROZEN)
    llama.enable_input_require_grads()
    expected = step(llama)
    llama.gradient_checkpointing_enable({"use_reentrant": reentrant})
    llama.train()
    for _ in range(2):
        actual = step(llama)
        assert actual[0] == expected[0]
        assert apart(actual[1], expected[1]) < 1e-5


def test_small_layers_of_fused_adapters_stay_in_16_bits():
    llama = adapted()
    patch(llama, linear_float8={**FROZEN, "smallest": 32 * 32})
    layers = llama.base_model.model.model.layers[0].self_attn
    kept = [
        isinstance(layers.get_submodule(n).base_layer.weight, Float8Weight)
        for n in ("q_proj", "k_proj", "v_proj")
    ]
    assert kept == [True, False, False]
    with recorded(*FUSED) as calls:
        step(llama)
    place = OPS["lora_qkv"].fwd.params.index("q_weight_scale")
    every = [[t is not None for t in args[place : place + 3]] for args in calls["lora_qkv"]]
    assert every == [[True, False, False]] * 2


def test_hooks_on_a_base_in_float8_are_called():
    llama = adapted()
    patch(llama, linear_float8=FROZEN)
    base = llama.base_model.model.model.layers[0].mlp.gate_proj.base_layer
    observed = []
    base.register_forward_hook(lambda m, args, y: observed.append(y.shape))
    step(llama)
    assert len(observed) == 1


def test_compiled_fused_adapters_equal_eager():
    llama = adapted()
    patch(llama, linear_float8=FROZEN)
    mlp = llama.base_model.model.model.layers[0].mlp
    x = torch.randn(5, 32, requires_grad=True)
    eager = mlp(x)
    torch._dynamo.reset()
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), eager)


def test_adapters_added_saved_and_merged(tmp_path):
    peft = pytest.importorskip("peft")
    llama = model()
    for p in llama.parameters():
        p.requires_grad_(False)
    patch(llama, linear_float8=FROZEN)
    wrapped = peft.get_peft_model(llama, peft.LoraConfig(r=4, target_modules=list(LAYERS)))
    patch(wrapped, linear_float8=FROZEN)
    assert patch(wrapped, linear_float8=FROZEN).count("lora") == 14
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        losses.append(step(wrapped)[0])
        optimizer.step()
    assert losses[-1] < losses[0]
    wrapped.save_pretrained(tmp_path)
    with pytest.raises(PatchError, match="unpatch the model first"):
        wrapped.merge_adapter()
    unpatch(wrapped)
    merged = wrapped.merge_and_unload()
    assert merged(input_ids=ids(), labels=ids()).loss < losses[0]
