"""``experts_implementation="liger_multi"``: loss and gradients are those of the unpatched model."""

# ruff: noqa: E402  (what needs transformers is imported after the skip)
import copy

import pytest
import torch
from packaging import version

transformers = pytest.importorskip("transformers")

from transformers.integrations import moe

import liger_multi
from liger_multi.errors import ConfigurationError
from liger_multi.patching import patch, register_experts, unpatch, unregister_experts
from liger_multi.patching.experts.find import experts_kind
from tests.comparing import assert_same_gradients
from tests.models import Calls, assert_same_training, batch, build, patched_copy
from tests.patching.test_apply_models import experts_of

# --- experts ---

ROUTED = ("mixtral", "qwen3_moe", "gpt_oss")


def deepseek():
    config = transformers.DeepseekV3Config(
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=64,
        n_routed_experts=8,
        num_local_experts=8,
        num_experts_per_tok=3,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    )
    torch.manual_seed(0)
    return transformers.DeepseekV3ForCausalLM(config)


def model(model_type):
    return deepseek() if model_type == "deepseek_v3" else build(model_type)


def needs_names():
    if version.parse(transformers.__version__) < version.parse("5.7"):
        pytest.skip("models of this transformers take no names of experts but its own")


def numbers(rows=6):
    generator = torch.Generator().manual_seed(4)
    return {"input_ids": torch.randint(64, (2, rows), generator=generator)}


@pytest.mark.parametrize("model_type", [*ROUTED, "deepseek_v3"])
@pytest.mark.parametrize("way", ["patch", "interface"])
def test_the_loss_and_every_gradient_are_those_of_stock(model_type, way, monkeypatch):
    stock = model(model_type).float()
    ours = copy.deepcopy(stock)
    calls, public = [], liger_multi.ops.fused_moe
    monkeypatch.setattr(
        liger_multi.ops, "fused_moe", lambda *a, **k: (calls.append(1), public(*a, **k))[1]
    )
    if way == "interface":
        needs_names()
    if way == "patch":
        report = patch(ours)
        assert report.count("fused_moe") == len(experts_of(stock))
        assert not [s for s in report.skipped if s.op == "fused_moe"]
    else:
        register_experts()
        ours.set_experts_implementation("liger_multi")
    data = batch(length=6) if model_type != "deepseek_v3" else numbers()
    data["labels"] = data["input_ids"]
    experts_kind(experts_of(ours)[0])  # the interface asks at its first call
    calls.clear()
    assert_same_training(stock, ours, lambda m: m(**data).loss)
    assert len(calls) == len(experts_of(stock)), "the operator served the step"
    if way == "patch":
        unpatch(ours)
        assert [type(m) for m in experts_of(ours)] == [type(m) for m in experts_of(stock)]
    else:
        unregister_experts()
        assert "liger_multi" not in moe.ALL_EXPERTS_FUNCTIONS


def test_a_routing_of_another_shape_is_for_the_stock_loop():
    """transformers 5.0 hands phimoe's experts that of all experts, which was an error."""
    layer = experts_of(build("mixtral"))[0]
    layer.config._experts_implementation = "eager"
    patched = patched_copy(layer)
    x, index = torch.randn(5, 32), torch.rand(5, 4).argsort(-1)[:, :2]
    routing = torch.rand(5, 4)
    torch.testing.assert_close(patched(x, index, routing), layer(x, index, routing))


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_experts_a_token_are_the_eager_loop(model_type, dtype):
    """Of two terms the order of the sum is free, so a layer says what the loop says."""
    layer = experts_of(build(model_type).to(dtype))[0]
    layer.config._experts_implementation = "eager"
    patched = patched_copy(layer)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(
        12, layer.down_proj.shape[1 if model_type == "mixtral" else 2], generator=generator
    )
    index = torch.rand(12, 4, generator=generator).argsort(-1)[:, :2]
    routing = torch.rand(12, 2, generator=generator).to(dtype)
    expected, y = layer(x.to(dtype), index, routing), patched(x.to(dtype), index, routing)
    # the loop rounds every term to the dtype of the sum, ours only the sum
    by = {torch.float32: (1e-6, 1e-6), torch.bfloat16: (2**-7, 2**-8 * expected.abs().max().item())}
    torch.testing.assert_close(y, expected, rtol=by[dtype][0], atol=by[dtype][1])


def test_sentinels_of_expert_parallelism_add_nothing():
    """As transformers' grouped GEMMs have it: ids from num_experts on are somebody else's.

    Spelled out here too: those of 5.0 returned 2e34 for them with PyTorch 2.9.
    """
    layer = experts_of(build("mixtral"))[0]
    ours = copy.deepcopy(layer)
    patch(ours)
    layer.config._experts_implementation, layer._is_expert_parallel = "grouped_mm", True

    def spelled_out(x, index, routing):
        y = torch.zeros_like(x)
        for expert, both in enumerate(layer.gate_up_proj):
            gate, up = (x @ both.mT).chunk(2, -1)
            inside = (layer.act_fn(gate) * up) @ layer.down_proj[expert].mT
            y = y + (routing * (index == expert)).sum(-1, keepdim=True) * inside
        return y

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, layer.down_proj.shape[1], generator=generator, requires_grad=True)
    index = torch.randint(5, (9, 2), generator=generator)
    assert (index == 4).any()
    routing = torch.rand(9, 2, generator=generator).requires_grad_()
    runs = [(spelled_out, layer), (ours, ours)]
    if version.parse(transformers.__version__) >= version.parse("5.17"):
        runs.append((layer, layer))
    results = []
    for run, each in runs:
        y = run(x, index, routing)
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, routing, each.down_proj])))
    for other in results[1:]:
        torch.testing.assert_close(other[0], results[0][0], rtol=1e-4, atol=1e-6)
        assert_same_gradients(other[1:], results[0][1:])


def test_a_gate_of_another_kind_stays_stock(monkeypatch):
    built = build("mixtral")
    module_class = type(experts_of(built)[0])
    monkeypatch.setattr(module_class, "_apply_gate", lambda self, x: x.chunk(2, -1)[0].tanh())
    report = patch(built)
    assert not report.count("fused_moe")
    assert {s.reason for s in report.skipped if s.op == "fused_moe"} == {
        "the gate of MixtralExperts is none that fused_moe has"
    }
    needs_names()
    register_experts()
    try:
        built.set_experts_implementation("liger_multi")
        assert torch.isfinite(built(**batch(length=6)).loss)
    finally:
        unregister_experts()


def test_gate_of_gpt_oss():
    actual = experts_kind(experts_of(build("gpt_oss"))[0])
    assert (actual.activation, actual.interleaved, actual.transposed, actual.bias) == (
        "swiglu_clamped",
        True,
        True,
        True,
    )
    assert dict(actual.clamps) == {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0}


def test_transformers_without_names_is_refused(monkeypatch):
    """5.0 raised when a model asked for the name, with a list of its own."""
    monkeypatch.setattr("transformers.__version__", "5.6.2")  # whatever module stands for it now
    with pytest.raises(ConfigurationError, match=r"needs transformers >= 5\.7, this is 5\.6\.2"):
        register_experts()
    assert "liger_multi" not in moe.ExpertsInterface._global_mapping


def test_taken_name_is_refused():
    needs_names()
    moe.ExpertsInterface.register("taken", print)
    try:
        with pytest.raises(ConfigurationError, match="another 'taken'"):
            register_experts("taken")
    finally:
        del moe.ExpertsInterface._global_mapping["taken"]


# --- implementations that a model selects ---

NAME = "experts_of_a_user"


@pytest.fixture
def registered():
    """A function of a user that computes something else, and its calls."""
    needs_names()
    calls = []

    def doubled(self, hidden_states, top_k_index, top_k_weights):
        calls.append(hidden_states.shape)
        own = moe.grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return 2 * own

    moe.ExpertsInterface.register(NAME, doubled)
    yield calls
    del moe.ExpertsInterface._global_mapping[NAME]


def pair():
    needs_names()
    unpatched = build("mixtral")
    with torch.no_grad():
        for parameter in unpatched.parameters():
            parameter.normal_(std=0.2)
    return unpatched, copy.deepcopy(unpatched)


def loss_of(model):
    ids = torch.randint(3, 200, (2, 9), generator=torch.Generator().manual_seed(0))
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize("before", [True, False])
def test_a_function_of_a_user_runs_itself(before, registered):
    unpatched, model = pair()
    for one in (unpatched, model):
        if one is model and not before:
            liger_multi.patch(one)
        one.set_experts_implementation(NAME)
    if before:
        said = str(liger_multi.patch(model))
        assert f"experts_implementation='{NAME}' runs itself" in said
    registered.clear()
    assert_same_training(unpatched, model, loss_of)
    assert len(registered) == 4, "each of two layers, of both models"


def test_each_call_looks(registered, monkeypatch):
    unpatched, model = pair()
    liger_multi.patch(model)
    calls = Calls(monkeypatch)
    for name, by_us in (("grouped_mm", True), (NAME, False), ("batched_mm", True), ("eager", True)):
        for one in (unpatched, model):
            one.set_experts_implementation(name)
        before = calls["fused_moe"]
        assert_same_training(unpatched, model, loss_of)
        assert (calls["fused_moe"] > before) is by_us
    mapping = moe.ExpertsInterface._global_mapping
    monkeypatch.setitem(mapping, "batched_mm", mapping[NAME])  # which now means something else
    for one in (unpatched, model):
        one.set_experts_implementation("batched_mm")
    assert_same_training(unpatched, model, loss_of)


def test_unregistered_name_raises_as_unpatched():
    unpatched, model = pair()
    liger_multi.patch(model)
    for one in (unpatched, model):
        one.config._experts_implementation_internal = "nobody"
        with pytest.raises(KeyError, match="nobody"):
            loss_of(one)


@pytest.mark.slow
def test_a_compiled_model_follows(registered):
    unpatched, model = pair()
    liger_multi.patch(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    ids = torch.randint(3, 200, (2, 9))
    for name in ("eager", NAME, "grouped_mm"):
        for one in (unpatched, model):
            one.set_experts_implementation(name)
        with torch.no_grad():
            got, expected = compiled(input_ids=ids).logits, unpatched(input_ids=ids).logits
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["grouped_mm", "batched_mm", "eager"])
def test_autocast_of_fp32_stacks(name):
    """grouped_mm takes the dtype of the weights; the others have matmuls, which autocast knows."""
    unpatched, model = pair()
    liger_multi.patch(model)
    results = []
    for one in (unpatched, model):
        one.set_experts_implementation(name)
        experts = next(m for m in one.modules() if hasattr(m, "_apply_gate"))
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(7, 32, generator=generator, requires_grad=True)
        index = torch.randint(0, 4, (7, 2), generator=generator)
        weights = torch.rand(7, 2, generator=generator, requires_grad=True)
        exact = experts(x, index, weights)
        with torch.autocast("cpu", torch.bfloat16):
            y = experts(x, index, weights)
        y.sum().backward()
        grads = {n: p.grad for n, p in experts.named_parameters()}
        results.append((exact, y, grads | {"x": x.grad, "w": weights.grad}))
    (exact, expected, theirs), (_, got, ours) = results
    rounded = float((expected - exact).detach().abs().max() / exact.detach().abs().max())
    limit = 1e-6 if name == "grouped_mm" else 8e-3
    assert rounded < 1e-6 if name == "grouped_mm" else rounded > 1e-4
    assert got.dtype == expected.dtype
    scale = float(exact.detach().abs().max())
    torch.testing.assert_close(got, expected, rtol=0, atol=limit * scale)
    for n, grad in theirs.items():
        torch.testing.assert_close(ours[n], grad, rtol=0, atol=2 * limit * float(grad.abs().max()))
