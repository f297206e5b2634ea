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
    made, other = adapted(), adapted()
    report = patch(made, linear_float8=FROZEN)
    assert report.count("linear_float8") == report.count("lora") == 14
    assert not any("lora_A" in e.path or "lora_B" in e.path for e in report.entries)
    patch(other, linear_float8=ALL)
    found, right = step(made), step(other)
    assert found[0] == right[0]
    assert apart(found[1], right[1]) < 1e-5


def test_fused_adapters_are_as_exact_as_layers():
    """In bf16, other roundings of 16 bits lead to other codes; errors are as large."""
    _, exact = step(adapted())
    found = []
    for options in (FROZEN, ALL):
        made = adapted(torch.bfloat16)
        patch(made, linear_float8=options)
        loss, gradients = step(made)
        wrong = sum((g.float() - exact[n]).square().sum() for n, g in gradients.items())
        found.append((loss, wrong.sqrt().item()))
    (fused_loss, fused), (loss, layers) = found
    assert fused_loss == loss
    assert fused < 1.1 * layers


FUSED = ("lora_qkv", "lora_mlp", "linear_float8", "rms_norm_quantized")


def given(seen, name):
    """Whether calls of an operator were given codes of their input."""
    place = OPS[name].fwd.params.index("codes")
    return [args[place] is not None for args in seen[name]]


def test_fused_adapters_take_weights_and_codes_in_float8():
    made = adapted()
    report = patch(made, linear_float8=FROZEN)
    assert any(e.replaced_by == "lora_mlp[silu]" for e in report.entries)
    with recorded(*FUSED) as seen:
        first = step(made)
    assert given(seen, "lora_qkv") == given(seen, "lora_mlp") == [False, False]
    assert len(seen["linear_float8"]) == 2  # o_proj
    with recorded(*FUSED) as seen:
        assert equal(step(made), first)
    assert given(seen, "lora_qkv") == given(seen, "lora_mlp") == [True, True]
    assert len(seen["rms_norm_quantized"]) == 4


def test_adapters_on_some_layers_of_a_frozen_base():
    """q and v are fused; k runs over codes as a layer, and the MLP as a whole."""
    peft = pytest.importorskip("peft")
    found = []
    for options in (FROZEN, ALL):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        made = peft.get_peft_model(model(), config)
        patch(made, linear_float8=options)
        step(made)
        with recorded(*FUSED, "gated_mlp_float8") as seen:
            found.append(step(made))
        if options is FROZEN:
            assert given(seen, "lora_qkv") == [True, True]
            assert roundings(seen) == (2, 6)  # of k, o and the MLP, o
    assert found[0][0] == found[1][0]
    assert apart(found[0][1], found[1][1]) < 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_fused_adapters_under_checkpointing(reentrant):
    made = adapted()
    patch(made, linear_float8=FROZEN)
    made.enable_input_require_grads()
    right = step(made)
    made.gradient_checkpointing_enable({"use_reentrant": reentrant})
    made.train()
    for _ in range(2):
        found = step(made)
        assert found[0] == right[0]
        assert apart(found[1], right[1]) < 1e-5


def test_small_layers_of_fused_adapters_stay_in_16_bits():
    made = adapted()
    patch(made, linear_float8={**FROZEN, "smallest": 32 * 32})
    layers = made.base_model.model.model.layers[0].self_attn
    kept = [isinstance(layers.get_submodule(n).base_layer.weight, Float8Weight)
            for n in ("q_proj", "k_proj", "v_proj")]  # fmt: skip
    assert kept == [True, False, False]
    with recorded(*FUSED) as seen:
        step(made)
    place = OPS["lora_qkv"].fwd.params.index("q_weight_scale")
    every = [[t is not None for t in args[place : place + 3]] for args in seen["lora_qkv"]]
    assert every == [[True, False, False]] * 2


def test_hooks_on_a_base_in_float8_are_called():
    made = adapted()
    patch(made, linear_float8=FROZEN)
    base = made.base_model.model.model.layers[0].mlp.gate_proj.base_layer
    seen = []
    base.register_forward_hook(lambda m, args, y: seen.append(y.shape))
    step(made)
    assert len(seen) == 1


def test_compiled_fused_adapters_equal_eager():
    made = adapted()
    patch(made, linear_float8=FROZEN)
    mlp = made.base_model.model.model.layers[0].mlp
    x = torch.randn(5, 32, requires_grad=True)
    eager = mlp(x)
    torch._dynamo.reset()
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), eager)


def test_adapters_added_saved_and_merged(tmp_path):
    peft = pytest.importorskip("peft")
    made = model()
    for p in made.parameters():
        p.requires_grad_(False)
    patch(made, linear_float8=FROZEN)
    wrapped = peft.get_peft_model(made, peft.LoraConfig(r=4, target_modules=list(LAYERS)))
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
