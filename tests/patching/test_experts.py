"""Experts: which stacks are recognized, and what changes them after the patch."""

# ruff: noqa: E402  (what needs transformers is imported after the skip)
import copy

import pytest
import torch
import torch.nn.functional as F
from packaging import version
from torch import nn

transformers = pytest.importorskip("transformers")


from liger_multi.patching import patch, register_experts, unpatch, unregister_experts
from tests.models import Holder, assert_same_training, batch, pair
from tests.patching.test_apply import HEADLESS
from tests.patching.test_evidence_signature import ALONE, HOOKS, patched_pair
from tests.patching.test_mlp import Odd
from tests.patching.test_norms_find import (
    calls_of,
    equal,
    modeling,
    patched_module,
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
    stock = copy.deepcopy(module)
    assert patched_module(module)[0] == ["gated_mlp[silu]"]
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
    for name, value in {
        "hidden_size": 16,
        "moe_hidden_size": 16,
        "moe_intermediate_size": 12,
        "num_local_experts": 4,
    }.items():
        setattr(config, name, value)
    return weighted(modeling("muse_spark").MuseSparkExperts(config))


def test_experts_with_final_norm():
    """The norm acts on every expert's output, before that is weighted and summed."""
    pytest.importorskip("transformers.models.muse_spark")
    module, index = muse_spark_experts(), torch.randint(4, (10, 2))
    stock = copy.deepcopy(module)
    shown = ["fused_moe[silu, norm]", "rms_norm[scaled before it]"]
    assert patched_module(module) == (shown, [])
    ours, theirs = OfRoutes(module, index), OfRoutes(stock, index)
    with calls_of("fused_moe") as calls, calls_of("rms_norm") as normed:
        equal(theirs, ours, torch.randn(10, 16), torch.rand(10, 2))
        assert (len(calls), len(normed)) == (1, 1)
        for own in (stock, module):  # a hook on the norm acts
            own.post_expert_norm.register_forward_hook(lambda m, inputs, y: 2 * y)
        equal(theirs, ours, torch.randn(10, 16), torch.rand(10, 2))
        assert len(calls) == 2
    actual = [
        m(torch.randn(0, 16), torch.rand(0, 2))
        for m in (OfRoutes(stock, index[:0]), OfRoutes(module, index[:0]))
    ]
    assert actual[0].shape == actual[1].shape == (0, 16)


def test_experts_without_a_gate():
    """Their activation is one of ours itself, which is no reason to leave the experts."""
    if not hasattr(transformers, "NemotronHConfig"):
        pytest.skip("this transformers has no nemotron_h")
    config = transformers.NemotronHConfig(
        hidden_size=16, n_routed_experts=4, moe_intermediate_size=12, num_experts_per_tok=2
    )
    module = weighted(modeling("nemotron_h").NemotronHExperts(config))
    stock = copy.deepcopy(module)
    index = torch.randint(4, (10, 2))
    assert patched_module(module)[0] == ["fused_moe[relu_squared]", "relu_squared"]
    report = patch(Holder(module), **HEADLESS)
    assert {e.status for e in report.entries} == {"already patched"}

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
    stock = copy.deepcopy(module)
    assert patched_module(module)[0] == ["fused_moe[silu]"]
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
    stock = copy.deepcopy(module)
    assert patched_module(module)[0] == ["fused_moe[silu]"]
    index = torch.randint(6, (10, 3))
    assert (index >= 4).any()
    with calls_of("fused_moe") as calls:
        ours, theirs = OfRoutes(module, index), OfRoutes(stock, index)
        equal(theirs, ours, torch.randn(10, 16), torch.rand(10, 3))
    assert len(calls) == 1


# --- experts ---


def experts_of(model):
    return [m for m in model.modules() if hasattr(m, "_apply_gate")]


EXPERTS = {
    "activation": ("mixtral", lambda m: setattr(m, "act_fn", nn.Tanh())),
    "alpha": ("gpt_oss", lambda m: setattr(m, "alpha", 0.5)),
    "limit": ("gpt_oss", lambda m: setattr(m, "limit", 0.2)),
    "gate": ("mixtral", lambda m: setattr(m, "_apply_gate", lambda x: x.chunk(2, -1)[1])),
}


@pytest.mark.parametrize("change", EXPERTS)
def test_changed_experts(change):
    model_type, act = EXPERTS[change]
    stock, ours = pair(model_type)
    assert patch(ours).count("fused_moe") == 2
    for model in (stock, ours):
        for module in experts_of(model):
            act(module)
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)


def test_a_replaced_gate_of_an_experts_class(monkeypatch):
    stock, ours = pair("mixtral", patching={})
    module_class = type(experts_of(stock)[0])
    monkeypatch.setattr(module_class, "_apply_gate", lambda self, x: x.chunk(2, -1)[1])
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)


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
    """Experts that are served by no interface."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 12, 12))

    def forward(self, x):
        return torch.einsum("td,edh->teh", x, self.weight).sum(1)


def test_experts_with_code_of_their_own_are_named():
    _, ours, entries, reasons = patched_pair(ParallelExperts())
    assert entries == []
    said = "ParallelExperts does not use the experts interface of transformers"
    assert reasons == [said]
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


@pytest.mark.parametrize("change", [*EXPERTS, "hook"])
def test_changed_experts_of_the_interface(change, interface):
    model_type, act = EXPERTS.get(change, ("mixtral", lambda m: HOOKS["forward"](m.act_fn)))
    stock, ours = pair(model_type)
    stock.set_experts_implementation("grouped_mm")
    ours.set_experts_implementation("liger_multi")
    for _ in range(2):
        assert_same_training(stock, ours, lambda m: m(**batch()).loss)
    for model in (stock, ours):
        for module in experts_of(model):
            act(module)
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)


def test_the_interface_compiles_after_a_call(interface):
    stock, ours = pair("mixtral", num_hidden_layers=1)
    ours.set_experts_implementation("liger_multi")
    inputs = batch() | {"use_cache": False}
    ours(**inputs)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    assert_same_training(stock, ours, lambda m: (compiled if m is ours else m)(**inputs).loss)
    torch._dynamo.reset()


def test_the_routing_before_the_index():
    """What came first was taken for the index."""
    stock, ours = pair("mixtral", num_hidden_layers=1, patching={})
    x, index, routing = torch.randn(5, 32), torch.tensor([[0, 2]] * 5), torch.rand(5, 2)
    actual = [experts_of(m)[0](x, top_k_weights=routing, top_k_index=index) for m in (stock, ours)]
    torch.testing.assert_close(actual[1], actual[0])
