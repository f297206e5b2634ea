"""Codes that norms and activations hand to layers in FP8, and MLPs of such layers."""

import pytest
import torch
from torch import nn

import liger_multi
from liger_multi import ops
from liger_multi.dispatch.op import OPS
from liger_multi.errors import PatchError
from liger_multi.patching import patch, unpatch
from liger_multi.patching.float8.weight import Float8Weight
from tests.comparing import Operations, saved, storage_bytes
from tests.models import adapters
from tests.patching.test_float8_linear import (
    ALL,
    FROZEN,
    LAYERS,
    apart,
    checkpointed,
    equal,
    ids,
    model,
    recorded,
    step,
)


def roundings(calls):
    """How many layers, or MLPs of them, rounded their input, of how many."""
    actual = [
        args[OPS[name].fwd.params.index("codes")] is None
        for name in ("linear_float8", "gated_mlp_float8")
        for args in calls.get(name, [])
    ]
    return sum(actual), len(actual)


CODED = ("rms_norm_quantized", "swiglu_quantized", "linear_float8", "gated_mlp_float8")
IN_LAYERS = {"swiglu": {"whole": False}}


@pytest.mark.parametrize("options", [ALL, FROZEN], ids=["trained", "frozen"])
def test_norms_and_activations_write_codes(options):
    """From the second step on; of the layers of a block only o_proj rounds, and no bit differs."""
    llama = model(torch.bfloat16, frozen=options is FROZEN)
    patch(llama, linear_float8=options, **IN_LAYERS)
    with recorded(*CODED) as calls:
        first = step(llama)
    assert not calls["rms_norm_quantized"]
    assert not calls["swiglu_quantized"]
    assert roundings(calls) == (8, 14)
    for _ in range(2):
        with recorded(*CODED) as calls:
            assert equal(step(llama), first)
        assert len(calls["rms_norm_quantized"]) == 4
        assert len(calls["swiglu_quantized"]) == 2
        assert roundings(calls) == (2, 14)


# --- a whole MLP of layers in FP8 ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [ALL, FROZEN], ids=["trained", "frozen"])
def test_a_whole_mlp_has_the_bits_of_its_layers(options, dtype):
    """Also where the norm before it hands out codes, from the second step on."""
    frozen = options is FROZEN
    llama, layers = model(dtype, frozen), model(dtype, frozen)
    report = patch(llama, linear_float8=options)
    assert {e.replaced_by for e in report.entries if e.op == "swiglu"} == {"gated_mlp_float8[silu]"}
    patch(layers, linear_float8=options, **IN_LAYERS)
    for rounding in (True, False):
        with recorded(*CODED) as calls:
            actual = step(llama)
        assert equal(actual, step(layers))
        assert roundings(calls) == ((6, 10) if rounding else (2, 10))
        assert not calls["swiglu_quantized"]


def kept_bytes(llama):
    """Bytes that a step keeps for backward, each storage once, but for parameters."""
    loss, tensors = saved(lambda: llama(input_ids=ids(), labels=ids()).loss, but=llama.parameters())
    loss.backward()
    return storage_bytes(tensors)


def test_a_whole_mlp_keeps_one_activation_less():
    results = []
    for how in ({}, IN_LAYERS):
        llama = model(torch.bfloat16)
        patch(llama, linear_float8=ALL, **how)
        results.append(kept_bytes(llama))
    inner = ids().numel() * llama.config.intermediate_size * 2
    assert results[1] - results[0] == llama.config.num_hidden_layers * inner


@pytest.mark.parametrize("case", ["trained", "adapters"])
def test_the_last_gemm_of_an_mlp_is_not_computed_again(case):
    """Nor is the product before it; bits are those of a model that keeps all."""
    make, float8 = (adapted, FROZEN) if case == "adapters" else (model, ALL)
    llama, reference = make(torch.bfloat16, float8=float8), make(torch.bfloat16, float8=float8)
    checkpointed(llama, False)
    names = ("linear_float8", "lora_qkv", "swiglu_quantized", "gated_mlp_float8", "lora_mlp")
    with recorded(*names) as calls:
        actual = step(llama)
    assert equal(actual, step(reference))
    # of a layer twice: q, k and v, o, gate and up; once: the product and down
    layers, fused = llama.config.num_hidden_layers, case == "adapters"
    expected = (2, 2 + 2 + 1, 1, 0, 0) if fused else (2 * 6 + 1, 0, 1, 0, 0)
    assert [len(calls[n]) for n in names] == [count * layers for count in expected]


def test_a_whole_mlp_accumulates_and_takes_a_second_backward():
    llama, layers = model(torch.bfloat16, float8=ALL), model(torch.bfloat16)
    patch(layers, linear_float8=ALL, **IN_LAYERS)
    for each in (llama, layers):
        for _ in range(2):
            loss = each(input_ids=ids(), labels=ids()).loss
            loss.backward(retain_graph=True)
        loss.backward()
    pairs = zip(llama.parameters(), layers.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


def test_a_whole_mlp_compiled_equals_eager():
    llama = model(float8=ALL)
    mlp = llama.model.layers[0].mlp
    torch._dynamo.reset()
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (6, 9):
        x = torch.randn(2, rows, llama.config.hidden_size, requires_grad=True)
        inputs = [x, *mlp.parameters()]
        actual = [[y, *torch.autograd.grad(y.sum(), inputs)] for y in (compiled(x), mlp(x))]
        assert all(torch.equal(a, b) for a, b in zip(*actual, strict=True))


@pytest.mark.parametrize("what", ["a hook", "a small layer", "a backend"])
def test_an_mlp_of_other_layers_runs_them(what):
    """A hook is called, a layer in 16 bits multiplies in them, and a named backend serves all."""
    llama, expected = model(), model()
    for each, how in ((llama, {}), (expected, IN_LAYERS)):
        eight = dict(ALL, **({"backend": "reference"} if what == "a backend" else {}))
        patch(each, linear_float8=eight, **how)
        for layer in each.model.layers:
            if what == "a hook":
                layer.mlp.up_proj.register_forward_hook(lambda m, a, y: 2 * y)
            elif what == "a small layer":
                unpatch(layer.mlp.up_proj)
    with recorded(*CODED) as calls:
        actual = step(llama)
    assert not calls["gated_mlp_float8"]
    assert equal(actual, step(expected))


def test_models_without_such_layers_hand_out_nothing():
    llama, other = model(float8=ALL), model(patching={})
    for _ in range(2):
        step(llama)
    with recorded(*CODED) as calls:
        for _ in range(2):
            step(other)
    assert not any(calls.values())
    patch(llama)  # layers as they were: the first call finds its codes unread, and is the last
    with recorded(*CODED) as calls:
        step(llama)
    assert len(calls["rms_norm_quantized"]) == 4
    with recorded(*CODED) as calls:
        step(llama)
    assert not any(calls.values())


class Block(nn.Module):
    """A norm and a layer, with whatever is done between them."""

    def __init__(self, norm, between=lambda h: h):
        super().__init__()
        torch.manual_seed(3)
        self.norm, self.layer, self.between = norm, nn.Linear(32, 48), between

    def forward(self, x):
        return self.layer(self.between(self.norm(x)))


def learned(block, x):
    """The block once its norm hands out codes."""
    patch(block, linear_float8=ALL)
    between, block.between = block.between, lambda h: h
    block(x)
    block.between = between
    return block


NORMS = {"rms_norm": nn.RMSNorm, "layer_norm": nn.LayerNorm}


@pytest.mark.parametrize("name", NORMS)
def test_other_norms_do_it_too(name):
    block = learned(Block(NORMS[name](32, eps=1e-5)), torch.randn(4, 32))
    x = torch.randn(4, 32, requires_grad=True)
    with recorded(f"{name}_quantized", "linear_float8") as calls:
        y = block(x)
    assert len(calls[f"{name}_quantized"]) == 1
    assert roundings(calls) == (0, 1)
    expected = ops.linear_float8(block.norm(x), block.layer.weight, block.layer.bias)
    assert torch.equal(y, expected)
    assert torch.equal(*(torch.autograd.grad(one.sum(), x)[0] for one in (y, expected)))


BETWEEN = {
    "written to": lambda h: h.mul_(-3.0),
    "a view written to": lambda h: (h[:2].zero_(), h)[1],
    "another tensor": lambda h: h * -3.0,
    "detached": lambda h: h.detach(),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_other_result_is_rounded(what):
    block = learned(Block(nn.RMSNorm(32, eps=1e-5), BETWEEN[what]), torch.randn(4, 32))
    x = torch.randn(4, 32)
    with torch.no_grad(), recorded("rms_norm_quantized", "linear_float8") as calls:
        y = block(x)
        expected = nn.functional.rms_norm(x, (32,), block.norm.weight, 1e-5)
        expected = ops.linear_float8(BETWEEN[what](expected), block.layer.weight, block.layer.bias)
    assert len(calls["rms_norm_quantized"]) == 1
    assert roundings(calls)[0] == 2
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("where", ["norm", "layer", "all modules"])
def test_hooks_writing_past_the_version_counter(where):
    """No version counts what a hook writes through ``.data``, so codes are not handed past it."""
    block, x = learned(Block(nn.RMSNorm(32, eps=1e-5)), torch.randn(4, 32)), torch.randn(4, 32)

    def after(module, args, y):
        if module is block.norm:
            y.data.mul_(-3.0)

    def before(module, args):
        args[0].data.mul_(-3.0)

    if where == "norm":
        hook = block.norm.register_forward_hook(after)
    elif where == "layer":
        hook = block.layer.register_forward_pre_hook(before)
    else:
        hook = nn.modules.module.register_module_forward_hook(after)
    with torch.no_grad():
        y = block(x)
        hook.remove()
        expected = -3.0 * nn.functional.rms_norm(x, (32,), block.norm.weight, 1e-5)
        expected = ops.linear_float8(expected, block.layer.weight, block.layer.bias)
    torch.testing.assert_close(y, expected)


def test_autocast_decides_whether_codes_fit():
    """A layer rounds what autocast makes of a result: of the same dtype, that is the result."""
    block = Block(nn.RMSNorm(32, eps=1e-5))
    learned(block, torch.randn(4, 32))
    x = torch.randn(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            with recorded("linear_float8") as calls:
                y = block(x)
            assert roundings(calls) == (1, 1)
        expected = ops.linear_float8(block.norm(x), block.layer.weight, block.layer.bias)
    assert torch.equal(y, expected)
    block.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        block(x.bfloat16())
        with recorded("linear_float8") as calls:
            block(x.bfloat16())
    assert roundings(calls) == (0, 1)


def test_a_pinned_backend_runs_its_own_norm():
    block, x = learned(Block(nn.RMSNorm(32, eps=1e-5)), torch.randn(4, 32)), torch.randn(4, 32)
    with recorded("rms_norm_quantized", "linear_float8") as calls:
        with liger_multi.use(rms_norm="reference"):
            block(x)
        assert not calls["rms_norm_quantized"]
    assert roundings(calls) == (1, 1)


def test_dispatch_modes_see_the_calls_of_the_first_step():
    """Selective checkpointing looks operations up by name when it computes again."""
    block, x = learned(Block(nn.RMSNorm(32, eps=1e-5)), torch.randn(4, 32)), torch.randn(4, 32)
    with recorded("rms_norm_quantized") as calls, Operations():
        block(x)
    assert not calls["rms_norm_quantized"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_after_codes_are_handed_out(reentrant):
    """Also where forward has plain norms and the recomputation has codes."""
    llama = model(float8=ALL)
    expected = step(llama)
    assert equal(step(llama), expected)
    other = model()
    other.load_state_dict(llama.state_dict())
    patch(other, linear_float8=ALL)
    checkpointed(other, reentrant)
    assert all(equal(step(other), expected) for _ in range(2))


# --- adapters ---


def adapted(dtype=torch.float32, float8=None, **settings):
    llama = adapters(model(dtype), LAYERS, seed=1, std=0.05, **settings)
    if float8 is not None:
        patch(llama, linear_float8=float8)
    return llama


# Adapters on layers in FP8.


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
        llama = adapted(torch.bfloat16, float8=options)
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


def test_small_layers_of_fused_adapters_stay_in_16_bits():
    llama = adapted(float8={**FROZEN, "smallest": 32 * 32})
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


def test_compiled_fused_adapters_equal_eager():
    llama = adapted(float8=FROZEN)
    mlp = llama.base_model.model.model.layers[0].mlp
    x = torch.randn(5, 32, requires_grad=True)
    eager = mlp(x)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(mlp, fullgraph=True, backend="aot_eager")(x), eager)


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
    assert wrapped.merge_and_unload()(input_ids=ids(), labels=ids()).loss < losses[0]
