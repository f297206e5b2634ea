"""Which implementation of experts a model selects: the operator stands for those that it equals."""

# ruff: noqa: E402  (what needs transformers is imported after the skip)
import copy

import pytest
import torch
from packaging.version import parse

transformers = pytest.importorskip("transformers")
moe = pytest.importorskip("transformers.integrations.moe")
if parse(transformers.__version__) < parse("5.7"):
    pytest.skip("models of this transformers take no names but its own", allow_module_level=True)

import liger_multi
from tests.comparing import assert_same_gradients, gradients
from tests.models import Calls, build

NAME = "experts_of_a_user"


@pytest.fixture
def registered():
    """A function of a user that computes something else, and its calls."""
    calls = []

    def doubled(self, hidden_states, top_k_index, top_k_weights):
        calls.append(hidden_states.shape)
        own = moe.grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return 2 * own

    moe.ExpertsInterface.register(NAME, doubled)
    yield calls
    del moe.ExpertsInterface._global_mapping[NAME]


def pair():
    unpatched = build("mixtral")
    with torch.no_grad():
        for parameter in unpatched.parameters():
            parameter.normal_(std=0.2)
    return unpatched, copy.deepcopy(unpatched)


def trained(model):
    ids = torch.randint(3, 200, (2, 9), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), gradients(model)


def assert_equal_training(model, unpatched):
    got, expected = trained(model), trained(unpatched)
    torch.testing.assert_close(got[0], expected[0])
    assert_same_gradients(got[1], expected[1], rtol=1e-4)


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
    assert_equal_training(model, unpatched)
    assert len(registered) == 4, "each of two layers, of both models"


def test_each_call_looks(registered, monkeypatch):
    unpatched, model = pair()
    liger_multi.patch(model)
    calls = Calls(monkeypatch)
    for name, by_us in (("grouped_mm", True), (NAME, False), ("batched_mm", True), ("eager", True)):
        for one in (unpatched, model):
            one.set_experts_implementation(name)
        before = calls["fused_moe"]
        assert_equal_training(model, unpatched)
        assert (calls["fused_moe"] > before) is by_us
    mapping = moe.ExpertsInterface._global_mapping
    monkeypatch.setitem(mapping, "batched_mm", mapping[NAME])  # which now means something else
    for one in (unpatched, model):
        one.set_experts_implementation("batched_mm")
    assert_equal_training(model, unpatched)


def test_unregistered_name_raises_as_unpatched():
    unpatched, model = pair()
    liger_multi.patch(model)
    for one in (unpatched, model):
        one.config._experts_implementation_internal = "nobody"
        with pytest.raises(KeyError, match="nobody"):
            trained(one)


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
