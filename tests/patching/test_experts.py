"""Experts: which stacks are recognized, and what changes them after the patch."""

# ruff: noqa: E402  (what needs transformers is imported after the skip)

import copy

import pytest
import torch
import torch.nn.functional as F
from packaging import version
from torch import nn

transformers = pytest.importorskip("transformers")

from transformers.integrations import moe

from liger_multi.errors import ConfigurationError
from liger_multi.patching import patch, register_experts, unpatch, unregister_experts
from liger_multi.patching.experts.find import experts_kind
from tests.comparing import assert_same_gradients
from tests.models import (
    HEADLESS,
    Calls,
    Holder,
    assert_same_compiled,
    assert_same_training,
    batch,
    build,
    deepseek,
    experts_of,
    loss_of,
    pair,
    patched_copy,
    redrawn,
)
from tests.patching.test_evidence_signature import ALONE, HOOKS, patched_pair
from tests.patching.test_mlp import Odd
from tests.patching.test_norms import (
    calls_of,
    equal,
    modeling,
    patched_module,
    patched_twin,
    weighted,
)


class OfRoutes(nn.Module):
    """Experts of given routes, whose other inputs have gradients."""

    def __init__(self, experts, *index):
        super().__init__()
        self.experts, self.index = experts, index

    def forward(self, x, routing):
        return self.experts(x, *self.index, routing)


def shared_experts(**config):
    config = transformers.InklingTextConfig(
        hidden_size=16, moe_intermediate_size=12, n_shared_experts=3, **config
    )
    return weighted(modeling("inkling").InklingSharedExperts(config))


def test_shared_experts():
    pytest.importorskip("transformers.models.inkling")
    module = shared_experts()
    stock = patched_twin(module, "gated_mlp[silu]")
    with calls_of("gated_mlp") as calls:
        for shape in ((2, 5), (10,)):
            equal(OfRoutes(stock), OfRoutes(module), torch.randn(*shape, 16), torch.rand(*shape, 3))
        assert len(calls) == 6
        with torch.autocast("cpu", torch.bfloat16):  # the original's dtypes
            equal(OfRoutes(stock), OfRoutes(module), torch.randn(4, 16), torch.rand(4, 3))
        with pytest.raises(RuntimeError):
            module(torch.randn(10, 16), torch.rand(10, 2))
        assert len(calls) == 6
    unpatch(Holder(module))
    assert type(module) is type(stock)


def muse_spark_experts():
    config = transformers.MuseSparkConfig().text_config
    config.hidden_size = config.moe_hidden_size = 16
    config.moe_intermediate_size, config.num_local_experts = 12, 4
    return weighted(modeling("muse_spark").MuseSparkExperts(config))


def test_experts_with_final_norm():
    """The norm acts on every expert's output, before that is weighted and summed."""
    pytest.importorskip("transformers.models.muse_spark")
    module, index = muse_spark_experts(), torch.randint(4, (10, 2))
    stock = copy.deepcopy(module)
    assert patched_module(module) == (["fused_moe[silu, norm]", "rms_norm[scaled before it]"], [])
    ours, theirs = OfRoutes(module, index), OfRoutes(stock, index)
    with calls_of("fused_moe") as calls, calls_of("rms_norm") as normed:
        equal(theirs, ours, torch.randn(10, 16), torch.rand(10, 2))
        assert (len(calls), len(normed)) == (1, 1)
        for own in (stock, module):  # a hook on the norm acts
            own.post_expert_norm.register_forward_hook(lambda m, inputs, y: 2 * y)
        equal(theirs, ours, torch.randn(10, 16), torch.rand(10, 2))
        assert len(calls) == 2
    for experts in (stock, module):
        assert experts(torch.randn(0, 16), index[:0], torch.rand(0, 2)).shape == (0, 16)


def test_experts_without_a_gate():
    """Their activation is one of ours itself, which is no reason to leave the experts."""
    if not hasattr(transformers, "NemotronHConfig"):
        pytest.skip("this transformers has no nemotron_h")
    config = transformers.NemotronHConfig(
        hidden_size=16, n_routed_experts=4, moe_intermediate_size=12, num_experts_per_tok=2
    )
    module = weighted(modeling("nemotron_h").NemotronHExperts(config))
    stock = patched_twin(module, "fused_moe[relu_squared]", "relu_squared")
    index = torch.randint(4, (10, 2))
    assert {e.status for e in patch(Holder(module), **HEADLESS).entries} == {"already patched"}

    inputs = torch.randn(10, 16), torch.rand(10, 2)
    for change in (None, nn.SiLU()):
        if change is not None:  # no longer what was probed
            stock.act_fn = module.act_fn = change
        with calls_of("fused_moe") as calls:
            equal(OfRoutes(stock, index), OfRoutes(module, index), *inputs)
        assert len(calls) == (change is None)


def test_experts_of_modules_are_named_once():
    """Where none of their layers is served: a list of gated MLPs is."""

    class OwnExperts(nn.ModuleList):
        def forward(self, x):
            return sum(expert(x) for expert in self)

    for inner, is_named in ((nn.Linear(16, 16), True), (Odd(nn.SiLU()), False)):
        report = patch(Holder(OwnExperts([inner])), **HEADLESS)
        actual = [(s.reason, s.strict) for s in report.skipped if s.op == "fused_moe"]
        said = "OwnExperts does not use the experts interface of transformers"
        assert actual == [(said, False)] * is_named


def test_experts_of_equal_blocks_of_rows():
    """As many rows for every expert, whose results have no weights."""
    config = transformers.Llama4TextConfig(
        hidden_size=16, intermediate_size=12, num_local_experts=4, num_hidden_layers=1
    )
    module = weighted(modeling("llama4").Llama4TextExperts(config))
    stock = patched_twin(module, "fused_moe[silu]")
    with calls_of("fused_moe") as calls:
        equal(stock, module, torch.randn(20, 16))
        assert len(calls) == 1
        with torch.autocast("cpu", torch.bfloat16):  # the original's dtype
            assert module(torch.randn(20, 16)).dtype == stock(torch.randn(20, 16)).dtype
        with pytest.raises(RuntimeError):
            module(torch.randn(21, 16))
        assert len(calls) == 1


def test_identity_experts():
    config = transformers.LongcatFlashConfig(
        hidden_size=16, expert_ffn_hidden_size=12, n_routed_experts=4, zero_expert_num=2
    )
    module = weighted(modeling("longcat_flash").LongcatFlashExperts(config))
    stock = patched_twin(module, "fused_moe[silu]")
    index = torch.randint(6, (10, 3))
    assert (index >= 4).any()
    with calls_of("fused_moe") as calls:
        inputs = torch.randn(10, 16), torch.rand(10, 3)
        equal(OfRoutes(stock, index), OfRoutes(module, index), *inputs)
    assert len(calls) == 1


# --- experts ---


EXPERTS = {
    "activation": ("mixtral", lambda m: setattr(m, "act_fn", nn.Tanh())),
    "alpha": ("gpt_oss", lambda m: setattr(m, "alpha", 0.5)),
    "limit": ("gpt_oss", lambda m: setattr(m, "limit", 0.2)),
    "gate": ("mixtral", lambda m: setattr(m, "_apply_gate", lambda x: x.chunk(2, -1)[1])),
    "hook": ("mixtral", lambda m: HOOKS["forward"](m.act_fn)),
}


def with_our_experts(model_type, way, request):
    """A stock model and one with our experts, by a patch or by the interface of transformers."""
    stock, ours = pair(model_type)
    if way == "patch":
        assert patch(ours).count("fused_moe") == 2
    else:
        request.getfixturevalue("interface")
        stock.set_experts_implementation("grouped_mm")
        ours.set_experts_implementation("liger_multi")
    assert_same_training(stock, ours)  # the first call of the interface probes the class
    return stock, ours


@pytest.mark.parametrize("way", ["patch", "interface"])
@pytest.mark.parametrize("change", EXPERTS)
def test_changed_experts(change, way, request):
    model_type, act = EXPERTS[change]
    stock, ours = with_our_experts(model_type, way, request)
    for module in (*experts_of(stock), *experts_of(ours)):
        act(module)
    assert_same_training(stock, ours)


@pytest.mark.parametrize("way", ["patch", "interface"])
def test_a_replaced_gate_of_an_experts_class(way, monkeypatch, request):
    stock, ours = with_our_experts("mixtral", way, request)
    monkeypatch.setattr(
        type(experts_of(stock)[0]), "_apply_gate", lambda self, x: x.chunk(2, -1)[1]
    )
    assert_same_training(stock, ours)


def test_interface_layers_with_other_limits(interface):
    """Both run the operator, each with its own number."""
    _, ours = pair("gpt_oss")
    experts_of(ours)[1].limit = 0.2
    ours.set_experts_implementation("liger_multi")
    ours(**batch())  # probes both
    with calls_of("fused_moe") as calls:
        ours(**batch())
    assert len(calls) == 2


class Experts(nn.Module):
    """As transformers' experts, with a factor at the end of its loop."""

    def __init__(self, factor):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 20, 12) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(3, 12, 10) * 0.3)
        self.factor, self.count = factor, 3

    def _apply_gate(self, x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    def forward(self, x, index, routing):
        y = torch.zeros_like(x)
        for e in range(self.count):
            row, slot = torch.where(index == e)
            h = self._apply_gate(F.linear(x[row], self.gate_up_proj[e]))
            h = F.linear(h, self.down_proj[e]) * routing[row, slot, None]
            y = y.index_add(0, row, h * self.factor)
        return y


def test_experts_are_more_than_their_gate():
    stock, ours, entries, reasons = patched_pair(Experts(0.5))
    assert entries == []
    assert "Experts is more than its gate and products: its output differs" in reasons[0]
    stock, ours, entries, _ = patched_pair(Experts(1.0))
    assert entries == ["fused_moe[silu]"]
    x, index, routing = torch.randn(5, 12), torch.tensor([[0, 2]] * 5), torch.rand(5, 2)
    for factor in (1.0, 0.5):
        stock.factor = ours.factor = factor
        torch.testing.assert_close(ours(x, index, routing), stock(x, index, routing))


class ParallelExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 12, 12))

    def forward(self, x):
        return torch.einsum("td,edh->teh", x, self.weight).sum(1)


def test_experts_with_code_of_their_own_are_named():
    _, ours, entries, reasons = patched_pair(ParallelExperts())
    assert entries == []
    assert reasons == ["ParallelExperts does not use the experts interface of transformers"]
    assert type(ours) is ParallelExperts
    off = patch(Holder(ours), **{**ALONE, "fused_moe": False})
    assert "fused_moe" not in {s.op for s in off.skipped}


@pytest.fixture
def interface():
    if version.parse(transformers.__version__) < version.parse("5.7"):
        pytest.skip("models of transformers < 5.7 take no names of experts but its own")
    register_experts()
    yield
    unregister_experts()


def test_the_interface_compiles_after_a_call(interface):
    stock, ours = pair("mixtral", num_hidden_layers=1)
    ours.set_experts_implementation("liger_multi")
    inputs = batch() | {"use_cache": False}
    ours(**inputs)
    assert_same_compiled(stock, ours, inputs, backend="eager")


def test_the_routing_before_the_index():
    """What came first was taken for the index."""
    stock, ours = pair("mixtral", num_hidden_layers=1, patching={})
    x, index, routing = torch.randn(5, 32), torch.tensor([[0, 2]] * 5), torch.rand(5, 2)
    actual = [experts_of(m)[0](x, top_k_weights=routing, top_k_index=index) for m in (stock, ours)]
    torch.testing.assert_close(actual[1], actual[0])


# ``experts_implementation="liger_multi"``: loss and gradients are those of the unpatched model.


# --- experts ---

ROUTED = ("mixtral", "qwen3_moe", "gpt_oss")


def needs_names():
    if version.parse(transformers.__version__) < version.parse("5.7"):
        pytest.skip("models of this transformers take no names of experts but its own")


@pytest.mark.parametrize("model_type", [*ROUTED, "deepseek_v3"])
@pytest.mark.parametrize("way", ["patch", "interface"])
def test_the_loss_and_every_gradient_are_those_of_stock(model_type, way, monkeypatch):
    stock = deepseek() if model_type == "deepseek_v3" else build(model_type)
    ours, calls = copy.deepcopy(stock), Calls(monkeypatch)
    if way == "interface":
        needs_names()
        register_experts()
        ours.set_experts_implementation("liger_multi")
    else:
        report = patch(ours)
        assert report.count("fused_moe") == len(experts_of(stock))
        assert not [s for s in report.skipped if s.op == "fused_moe"]
    experts_kind(experts_of(ours)[0])  # the interface asks at its first call
    calls.clear()
    assert_same_training(stock, ours)
    assert calls["fused_moe"] == len(experts_of(stock)), "the operator served the step"
    if way == "patch":
        unpatch(ours)
        assert [type(m) for m in experts_of(ours)] == [type(m) for m in experts_of(stock)]
    else:
        unregister_experts()
        assert "liger_multi" not in moe.ALL_EXPERTS_FUNCTIONS


def eager_experts(model_type, dtype=torch.float32):
    """A layer of experts that runs transformers' loop, and a patched copy."""
    layer = experts_of(build(model_type).to(dtype))[0]
    layer.config._experts_implementation = "eager"
    return layer, patched_copy(layer)


def test_a_routing_of_another_shape_is_for_the_stock_loop():
    """transformers 5.0 hands phimoe's experts that of all experts, which was an error."""
    layer, patched = eager_experts("mixtral")
    x, index, routing = torch.randn(5, 32), torch.rand(5, 4).argsort(-1)[:, :2], torch.rand(5, 4)
    torch.testing.assert_close(patched(x, index, routing), layer(x, index, routing))


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_experts_a_token_are_the_eager_loop(model_type, dtype):
    """Of two terms the order of the sum is free, so a layer says what the loop says."""
    layer, patched = eager_experts(model_type, dtype)
    x = torch.randn(12, layer.down_proj.shape[1 if model_type == "mixtral" else 2])
    index, routing = torch.rand(12, 4).argsort(-1)[:, :2], torch.rand(12, 2).to(dtype)
    expected, y = layer(x.to(dtype), index, routing), patched(x.to(dtype), index, routing)
    # the loop rounds every term to the dtype of the sum, ours only the sum
    by = {torch.float32: (1e-6, 1e-6), torch.bfloat16: (2**-7, 2**-8 * expected.abs().max().item())}
    torch.testing.assert_close(y, expected, rtol=by[dtype][0], atol=by[dtype][1])


def test_sentinels_of_expert_parallelism_add_nothing():
    """As transformers' grouped GEMMs have it: ids from num_experts on are somebody else's.

    Spelled out here too: those of 5.0 returned 2e34 for them with PyTorch 2.9.
    """
    layer, ours = eager_experts("mixtral")
    layer.config._experts_implementation, layer._is_expert_parallel = "grouped_mm", True

    def spelled_out(x, index, routing):
        y = torch.zeros_like(x)
        for expert, both in enumerate(layer.gate_up_proj):
            gate, up = (x @ both.mT).chunk(2, -1)
            inside = (layer.act_fn(gate) * up) @ layer.down_proj[expert].mT
            y = y + (routing * (index == expert)).sum(-1, keepdim=True) * inside
        return y

    x = torch.randn(9, layer.down_proj.shape[1], requires_grad=True)
    index, routing = torch.randint(5, (9, 2)), torch.rand(9, 2, requires_grad=True)
    assert (index == 4).any()
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
    assert actual.activation == "swiglu_clamped"
    assert all((actual.interleaved, actual.transposed, actual.bias))
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
        return 2 * moe.grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)

    moe.ExpertsInterface.register(NAME, doubled)
    yield calls
    del moe.ExpertsInterface._global_mapping[NAME]


def mixtrals(patched=True):
    """An unpatched model whose experts matter, and an equal one."""
    needs_names()
    unpatched = redrawn(build("mixtral"))
    return unpatched, patched_copy(unpatched) if patched else copy.deepcopy(unpatched)


@pytest.mark.parametrize("before", [True, False])
def test_a_function_of_a_user_runs_itself(before, registered):
    unpatched, model = mixtrals(patched=not before)
    for one in (unpatched, model):
        one.set_experts_implementation(NAME)
    if before:
        assert f"experts_implementation='{NAME}' runs itself" in str(patch(model))
    registered.clear()
    assert_same_training(unpatched, model)
    assert len(registered) == 4, "each of two layers, of both models"


def test_each_call_looks(registered, monkeypatch):
    unpatched, model = mixtrals()
    calls = Calls(monkeypatch)
    for name, by_us in (("grouped_mm", True), (NAME, False), ("batched_mm", True), ("eager", True)):
        for one in (unpatched, model):
            one.set_experts_implementation(name)
        before = calls["fused_moe"]
        assert_same_training(unpatched, model)
        assert (calls["fused_moe"] > before) is by_us
    mapping = moe.ExpertsInterface._global_mapping
    monkeypatch.setitem(mapping, "batched_mm", mapping[NAME])  # which now means something else
    for one in (unpatched, model):
        one.set_experts_implementation("batched_mm")
    assert_same_training(unpatched, model)


def test_unregistered_name_raises_as_unpatched():
    for one in mixtrals():
        one.config._experts_implementation_internal = "nobody"
        with pytest.raises(KeyError, match="nobody"):
            loss_of(one)


@pytest.mark.slow
def test_a_compiled_model_follows(registered):
    unpatched, model = mixtrals()
    compiled = torch.compile(model, backend="eager")
    ids = torch.randint(3, 200, (2, 9))
    for name in ("eager", NAME, "grouped_mm"):
        for one in (unpatched, model):
            one.set_experts_implementation(name)
        with torch.no_grad():
            results = [run(input_ids=ids).logits for run in (compiled, unpatched)]
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["grouped_mm", "batched_mm", "eager"])
def test_autocast_of_fp32_stacks(name):
    """grouped_mm takes the dtype of the weights; the others have matmuls, which autocast knows."""
    results = []
    for one in mixtrals():
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
