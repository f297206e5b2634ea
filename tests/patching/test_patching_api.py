"""patch, unpatch, patched, the report: what is recognized, refused, and that all comes back."""
# ruff: noqa: E402  (what needs transformers is imported after the skip)

import contextlib
import copy
import functools
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

transformers = pytest.importorskip("transformers")

from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaRMSNorm,
)

import liger_multi
from liger_multi.errors import ConfigurationError, PatchError
from liger_multi.patching import PatchReport, patch, patched, unpatch
from tests.comparing import assert_same_gradients, gradients
from tests.models import ARCHITECTURES, KINDS, assert_same_training, batch, build


def state(model):
    """Everything of every module that a patch might touch."""
    return [(type(m), {k: id(v) for k, v in vars(m).items()}) for m in model.modules()]


class Holder(nn.Module):
    """A model of one module and no output embedding."""

    def __init__(self, module):
        super().__init__()
        self.inner = module


@pytest.mark.parametrize("kind", KINDS)
def test_unpatch_brings_the_very_same_back(kind):
    model = build(kind)
    before = state(model)
    keys = list(model.state_dict())
    patch(model)
    assert list(model.state_dict()) == keys
    assert [attributes for _, attributes in state(model)] == [
        attributes for _, attributes in before
    ]
    assert [type(m).__name__ for m in model.modules()] == [kind.__name__ for kind, _ in before]
    assert isinstance(model.lm_head, nn.Linear)
    report = unpatch(model)
    assert {e.status for e in report.entries} == {"restored"}
    assert state(model) == before
    assert unpatch(model).entries == []


def test_public_names_of_the_package():
    assert liger_multi.patch is patch
    assert liger_multi.unpatch is unpatch
    assert liger_multi.patched is patched


def test_patching_twice_is_harmless():
    model = build()
    first, classes = patch(model), [type(m) for m in model.modules()]
    second = patch(model)
    assert {e.status for e in first.entries} == {"patched"}
    assert {e.status for e in second.entries} == {"already patched"}
    assert [type(m) for m in model.modules()] == classes


def test_changed_options_take_effect():
    model = build()
    patch(model)
    report = patch(
        model, rms_norm=False, swiglu="reference", fused_linear_cross_entropy={"chunk": 3}
    )
    status = {(e.op, e.status) for e in report.entries}
    assert status == {
        ("rms_norm", "restored"),
        ("swiglu", "options changed"),
        ("rope", "already patched"),
        ("packing", "already patched"),
        ("fused_linear_cross_entropy", "options changed"),
    }
    assert type(model.model.norm) is LlamaRMSNorm
    assert type(model.model.layers[0].mlp)._liger_multi_swap.settings.options.backend == "reference"
    patch(model, fused_linear_cross_entropy=False)
    assert type(model.lm_head) is nn.Linear


def test_patched_blocks_nest_and_survive_exceptions():
    model = build()
    before = state(model)
    with patched(model) as report:
        assert isinstance(report, PatchReport)
        outer = state(model)
        with (
            contextlib.suppress(ZeroDivisionError),
            patched(model, rms_norm=False, fused_linear_cross_entropy={"chunk": 2}),
        ):
            assert type(model.model.norm) is LlamaRMSNorm
            raise ZeroDivisionError
        assert state(model) == outer
    assert state(model) == before


def test_strict_raises_and_leaves_the_model_as_it_was():
    model = build()
    model.model.norm.forward = functools.partial(LlamaRMSNorm.forward, model.model.norm)
    before = state(model)
    with pytest.raises(PatchError, match="somebody else replaced its forward"):
        patch(model, strict=True)
    assert state(model) == before
    report = patch(model)
    assert [(s.path, s.op) for s in report.skipped] == [("model.norm", "rms_norm")]
    assert report.count("rms_norm") == 4


def test_report_is_data_and_a_table():
    model = build()
    report = patch(model, fused_linear_cross_entropy={"chunk": 8})
    head = report.entries[-1]
    assert (head.path, head.stock, head.options) == ("lm_head", "Linear", {"chunk": 8})
    text = str(report)
    assert "4 x LlamaRMSNorm" not in text
    assert re.search(r"2 x LlamaRMSNorm +rms_norm\[llama\]", text)
    assert re.search(r"2 x LlamaAttention +rope\[half\]", text)
    assert re.search(r"packing +1 x LlamaForCausalLM +a check that samples", text)
    assert "model.layers.*.mlp" in text
    assert "fused_linear_cross_entropy (chunk=8)" in text
    skipped = patch(Holder(nn.Linear(2, 2)))
    assert "has no output embedding" in str(skipped)


def test_report_in_rich():
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=200, file=open("/dev/null", "w"), record=True)  # noqa: SIM115
    console.print(patch(build()))
    console.print(patch(Holder(nn.Linear(2, 2))))
    text = console.export_text()
    assert "rms_norm[llama]" in text
    assert "has no output embedding" in text


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ({"rmsnorm": True}, "unknown patch key 'rmsnorm'; did you mean 'rms_norm'"),
        ({"fused_linear_cross_entropy": {"chunks": 3}}, "did you mean 'chunk'"),
        ({"rms_norm": {"eps": 3}}, "unknown option of rms_norm 'eps'"),
        (
            {"swiglu": 3},
            "swiglu must be True, False, a backend's name or a mapping of options, got 3",
        ),
        ({"fused_linear_cross_entropy": {"chunk": 0}}, "chunk must be .* got 0"),
        (
            {"fused_linear_cross_entropy": {"z_loss": -1.0}},
            "z_loss must be a number >= 0, got -1.0",
        ),
        ({"fused_linear_cross_entropy": {"accumulate": torch.int32}}, "accumulate must be"),
        ({"cross_entropy": {"validate": "yes"}}, "validate must be True or False"),
        ({"geglu": {"whole": 1}}, "geglu: whole must be True or False, got 1"),
        ({"swiglu_clamped": {"whole": True}}, "unknown option of swiglu_clamped 'whole'"),
    ],
)
def test_bad_options(ops, message):
    model = build()
    before = state(model)
    with pytest.raises(PatchError, match=message):
        patch(model, **ops)
    assert state(model) == before


def test_bad_backend_and_model():
    with pytest.raises(ConfigurationError, match="referenc"):
        patch(build(), rms_norm="referenc")
    with pytest.raises(PatchError, match="unknown model type 'lama'; did you mean 'llama'"):
        patch("lama")
    with pytest.raises(PatchError, match="model type 'llama' is not patched"):
        unpatch("llama")
    for call in (patch, unpatch):
        with pytest.raises(TypeError, match="expected a model"):
            call(3)
    with pytest.raises(TypeError, match="expected a model"), patched(None):
        pass


def test_model_type_patches_what_is_built_later(tmp_path):
    post_init = transformers.PreTrainedModel.post_init
    build("llama").save_pretrained(tmp_path)
    report = patch("llama", rms_norm=False)
    try:
        assert "llama" in str(report)
        ours = build("llama")
        assert type(ours.lm_head) is not nn.Linear
        assert type(ours.model.norm) is LlamaRMSNorm
        assert type(build("qwen2").lm_head) is nn.Linear
        patch("llama", swiglu=False)
        loaded = LlamaForCausalLM.from_pretrained(tmp_path)
        assert type(loaded.lm_head) is not nn.Linear
        assert type(loaded.model.norm) is not LlamaRMSNorm
        assert type(loaded.model.layers[0].mlp) is LlamaMLP
    finally:
        unpatch("llama")
    assert transformers.PreTrainedModel.post_init is post_init
    stock = build("llama")
    assert type(stock.lm_head) is nn.Linear
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)
    unpatch(ours)
    assert type(ours.lm_head) is nn.Linear


@pytest.mark.parametrize("kind", KINDS)
def test_every_model_type_is_patched_as_its_instances_are(kind):
    known = ARCHITECTURES[kind]
    stock = build(kind)
    report = patch(kind, strict=True)
    assert {e.op for e in report.entries} == {
        *("rms_norm", "layer_norm", "gated_rms_norm", "poly_norm", "dyt", "relu_squared"),
        *("swiglu", "geglu", "swiglu_clamped", "fused_moe", "rope", "lora"),
        *(
            "causal_conv1d",
            "gated_delta_rule",
            "gated_short_conv",
            "kimi_delta_attention",
            "selective_scan",
            "ssd_scan",
            "sparse_attention",
        ),
        "fused_linear_cross_entropy",
        "packing",
        "rms_norm_rope",
    }
    try:
        ours = build(kind)
    finally:
        unpatch(kind)
    assert ours.config.model_type == kind
    again = patch(ours, strict=True)
    assert {op: again.count(op) for op in known.every} == known.every
    assert {e.status for e in again.entries} == {"already patched"}
    assert [type(m) for m in build(kind).modules()] == [type(m) for m in stock.modules()]
    unpatch(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in stock.modules()]


def test_strict_model_types_raise_in_the_constructor(monkeypatch):
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: self.down_proj(self.up_proj(x)))
    with patched("llama", strict=True), pytest.raises(PatchError, match="LlamaMLP"):
        build("llama")
    with patched("llama"), pytest.warns(UserWarning, match="LlamaMLP computes neither"):
        assert type(build("llama").lm_head) is not nn.Linear
    with patched("llama", swiglu=False, geglu=False, strict=True):
        transformers.LlamaModel(build("llama").config)  # a model that has no head, by design


def test_strict_asks_for_what_was_named():
    """A default finds what there is; a name that finds nothing is a mistake."""
    report = patch(build("mixtral"), strict=True)
    assert {s.op for s in report.skipped} == {"swiglu", "geglu"}
    assert "are not patched" not in str(report)
    report = patch(build("mixtral"), strict=True, fused_moe=False)
    assert "no module of this kind (its experts, MixtralExperts, are not patched)" in str(report)
    assert not patch(build("llama"), strict=True).skipped
    for kind, op in (("mixtral", "swiglu"), ("llama", "geglu"), ("gemma", "swiglu")):
        with pytest.raises(PatchError, match=f"{op}.*no module of this kind"):
            patch(build(kind), strict=True, **{op: True})


def test_a_forward_of_its_own_class_is_nobodys_replacement():
    """What transformers 5.0 leaves behind when it has captured outputs; it kept a patch alive."""
    stock, ours = build(), build()
    for model in (stock, ours):
        for module in model.modules():
            module.forward = module.forward
    report = patch(ours, strict=True)
    assert report.count("rope") == 2
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)
    for module in ours.modules():
        module.forward = module.forward
    unpatch(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in stock.modules()]
    for module in ours.modules():
        held = vars(module).get("forward")
        assert held is None or held.__func__ is type(module).forward


def test_model_type_as_a_block():
    post_init = transformers.PreTrainedModel.post_init
    with patched("qwen3"):
        with patched("qwen3", fused_linear_cross_entropy=False), patched("llama"):
            assert type(build("qwen3").lm_head) is nn.Linear
            assert type(build("llama").lm_head) is not nn.Linear
        assert type(build("qwen3").lm_head) is not nn.Linear
        assert type(build("llama").lm_head) is nn.Linear
    assert transformers.PreTrainedModel.post_init is post_init


def test_models_built_on_meta_are_recognized():
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=99,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=1,
                num_attention_heads=2,
            )
        )
    patch(model, strict=True)
    model.to_empty(device="cpu")
    assert type(model.lm_head) is not nn.Linear


def test_models_of_fake_tensors_are_recognized_and_remembered_rightly():
    """Probes compared fake numbers, which raised, and remembered that as a refusal."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from liger_multi.patching import rotary
    from liger_multi.patching.mlp import find as find_mlps
    from liger_multi.patching.norms import find as find_norms

    for memory in (find_norms._known, find_mlps._known, rotary._known):
        memory.clear()
    with FakeTensorMode():
        patch(build("gemma"), strict=True)
    patch(build("gemma"), strict=True)


def test_probes_leave_the_random_state_and_the_module_alone():
    from liger_multi.patching import rotary
    from liger_multi.patching.mlp import find as find_mlps
    from liger_multi.patching.norms import find as find_norms

    for memory in (find_norms._known, find_mlps._known, rotary._known):
        memory.clear()
    model = build("qwen3")
    calls = []
    for module in model.modules():
        module.register_forward_hook(lambda *args: calls.append(args))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with torch.no_grad():
        patch(model, strict=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert calls == []


class Olmo(LlamaRMSNorm):
    """Scales before it rounds."""

    def forward(self, x):
        n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight * n).to(x.dtype)


class GemmaNorm(LlamaRMSNorm):
    """Weight around zero."""

    def forward(self, x):
        n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (n * (1.0 + self.weight.float())).to(x.dtype)


class WeightlessNorm(nn.Module):
    """No weight at all."""

    eps = 1e-5

    def forward(self, x):
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(
            x.dtype
        )


class CentredNorm(LlamaRMSNorm):
    """Looks like an RMSNorm and is none."""

    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class ForgetfulNorm(LlamaRMSNorm):
    """Equal in forward, without gradient of its weight."""

    def forward(self, x):
        n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight.detach() * n.to(x.dtype)


class NeedyNorm(LlamaRMSNorm):
    """Another signature."""

    def forward(self, x, gate):
        return super().forward(x) * gate


@pytest.mark.parametrize(
    ("norm", "kind"),
    [
        (LlamaRMSNorm(48), "llama"),
        (Olmo(48), "olmo"),
        (GemmaNorm(48), "gemma"),
        (WeightlessNorm(), "no weight"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_recognized_bit_for_bit(norm, kind, dtype):
    norm = copy.deepcopy(norm).to(dtype)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    stock = copy.deepcopy(norm)
    report = patch(Holder(norm), fused_linear_cross_entropy=False, swiglu=False, strict=True)
    assert report.entries[0].replaced_by == f"rms_norm[{kind}]"
    x = torch.randn(7, 48, dtype=dtype)
    assert torch.equal(norm(x), stock(x))


@pytest.mark.parametrize("kind", [CentredNorm, ForgetfulNorm, NeedyNorm])
def test_other_norms_are_left_alone(kind):
    norm = kind(48)
    report = patch(Holder(norm), fused_linear_cross_entropy=False, swiglu=False)
    assert type(norm) is kind
    assert report.count("rms_norm") == 0
    assert (
        kind.__name__ in report.skipped[0].reason
        or "failed on a replica" in report.skipped[0].reason
    )


def test_the_probe_is_asked_for_every_instance_that_differs():
    class OptionalNorm(LlamaRMSNorm):
        def __init__(self, weighted):
            super().__init__(16)
            self.weight = nn.Parameter(torch.rand(16)) if weighted else None

        def forward(self, x):
            n = x.float() * torch.rsqrt(
                x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon
            )
            return n.to(x.dtype) if self.weight is None else self.weight * n.to(x.dtype)

    model = nn.ModuleList([OptionalNorm(False), OptionalNorm(True)])
    report = patch(model, fused_linear_cross_entropy=False, swiglu=False, strict=True)
    assert [e.replaced_by for e in report.entries] == ["rms_norm[no weight]", "rms_norm[llama]"]
    model[1](torch.randn(2, 16)).sum().backward()
    assert model[1].weight.grad is not None


class Gated(nn.Module):
    """A gated MLP under the names of the arguments."""

    def __init__(self, act="silu", bias=False, dropout=0.0, swapped=False, inner=40):
        super().__init__()
        self.gate_proj, self.up_proj = (
            nn.Linear(24, inner, bias=bias),
            nn.Linear(24, inner, bias=bias),
        )
        self.down_proj = nn.Linear(inner, 24, bias=bias)
        self.act_fn = ACT2FN[act]
        self.swapped = swapped
        if dropout:
            self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        gate, up = (up, gate) if self.swapped else (gate, up)
        return self.down_proj(self.act_fn(gate) * up)


class Packed(nn.Module):
    """Gate and up in one layer, split by an attribute."""

    def __init__(self, act="silu"):
        super().__init__()
        self.size = 56
        self.gate_up_proj, self.down_proj = (
            nn.Linear(24, 112, bias=False),
            nn.Linear(56, 24, bias=False),
        )
        self.activation_fn = ACT2FN[act]

    def forward(self, x):
        gate, up = self.gate_up_proj(x).split(self.size, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))


class Attention(nn.Module):
    """Three linear layers of fitting shapes that are no MLP."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(24, 24, bias=False) for _ in range(3)
        )

    def forward(self, x):
        scores = (self.gate_proj(x) @ self.up_proj(x).transpose(-1, -2)).softmax(-1)
        return self.down_proj(scores @ x)


@pytest.mark.parametrize(
    ("mlp", "by"),
    [
        (Gated(), "gated_mlp[silu]"),
        (Gated(bias=True), "gated_mlp[silu]"),
        (Gated(inner=24), "gated_mlp[silu]"),
        (Packed(), "swiglu_packed"),
        (Gated("gelu_pytorch_tanh"), "gated_mlp[gelu_tanh]"),
        (Gated("gelu", bias=True), "gated_mlp[gelu]"),
        (Packed("gelu_pytorch_tanh"), "geglu_packed[tanh]"),
        (Packed("gelu"), "geglu_packed[none]"),
    ],
    ids=["plain", "bias", "square", "packed", "tanh", "exact", "packed tanh", "packed exact"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_mlps_are_recognized(mlp, by, dtype):
    stock = copy.deepcopy(mlp).to(dtype)
    ours = copy.deepcopy(stock)
    report = patch(Holder(ours), fused_linear_cross_entropy=False, rms_norm=False, strict=True)
    assert [entry.replaced_by for entry in report.entries] == [by]
    x = torch.randn(5, 24, dtype=dtype)
    assert torch.equal(ours(x), stock(x))
    assert_same_training(
        stock,
        ours,
        lambda m: m(x).float().square().sum(),
        rtol=1e-5 if dtype == torch.float32 else 2e-2,
    )


@pytest.mark.parametrize(
    "mlp",
    [Gated("quick_gelu"), Gated("relu"), Gated(swapped=True), Attention(), Gated(dropout=0.1)],
    ids=["quick gelu", "relu", "gate and up swapped", "attention", "dropout"],
)
def test_other_mlps_are_left_alone(mlp):
    kind = type(mlp)
    report = patch(Holder(mlp), fused_linear_cross_entropy=False, rms_norm=False)
    assert type(mlp) is kind
    assert report.count("swiglu") == report.count("geglu") == 0
    assert report.skipped


@pytest.mark.parametrize(("on", "off"), [("swiglu", "geglu"), ("geglu", "swiglu")])
def test_kinds_of_mlps_are_chosen_by_their_own_keys(on, off):
    model = nn.ModuleList([Gated("silu"), Gated("gelu"), Packed("silu"), Packed("gelu")])
    options = {"fused_linear_cross_entropy": False, "rms_norm": False, "rope": False}
    report = patch(model, **options, strict=True)
    assert (report.count("swiglu"), report.count("geglu")) == (2, 2)
    report = patch(model, **options, **{off: False}, strict=True)
    assert (report.count(on), report.count(off)) == (2, 0)
    assert [type(m) for m in model if "_liger_multi_swap" not in vars(type(m))] == [Gated, Packed]


def test_the_same_function_in_more_roundings_is_recognized_as_well():
    mlp = Gated("gelu_new")
    stock = copy.deepcopy(mlp)
    report = patch(Holder(mlp), fused_linear_cross_entropy=False, rms_norm=False, strict=True)
    assert [entry.replaced_by for entry in report.entries] == ["gated_mlp[gelu_tanh]"]
    x = torch.randn(5, 24)
    assert_same_training(stock, mlp, lambda m: m(x).square().sum(), rtol=1e-5)


def test_a_class_whose_forward_was_replaced_is_probed_again(monkeypatch):
    assert patch(build()).count("swiglu") == 2
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: self.down_proj(self.gate_proj(x)))
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: self.weight * x)
    report = patch(build())
    assert report.count("swiglu") == report.count("rms_norm") == 0
    assert {s.op for s in report.skipped} == {"swiglu", "rms_norm"}


def test_activations_that_differ_in_a_function_are_told_apart():
    """The probe's memory knew an activation by its class and plain attributes."""

    class Call(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def forward(self, x):
            return self.function(x)

    model = nn.ModuleList([Gated(), Gated()])
    model[0].act_fn, model[1].act_fn = Call(F.silu), Call(F.gelu)
    report = patch(model, fused_linear_cross_entropy=False, rms_norm=False)
    assert [e.replaced_by for e in report.entries] == ["gated_mlp[silu]", "gated_mlp[gelu]"]


def test_probes_run_once_for_equal_layers(monkeypatch):
    """The activations of gemma hold a ``functools.partial`` of their own each."""
    from liger_multi import ops
    from liger_multi.patching.mlp import find as find_mlps

    find_mlps._known.clear()
    calls = []
    stock = ops.gated_mlp
    monkeypatch.setattr(ops, "gated_mlp", lambda *a, **k: (calls.append(k), stock(*a, **k))[1])
    patch(build("gemma", num_hidden_layers=1))
    one = [k["activation"] for k in calls]
    assert list(dict.fromkeys(one)) == ["silu", "gelu_tanh"]
    find_mlps._known.clear()
    calls.clear()
    patch(build("gemma", num_hidden_layers=3))
    assert [k["activation"] for k in calls] == one


def test_a_gated_mlp_keeps_its_input_gate_and_up():
    """Linear layers around an activation keep their product for backward, too."""
    mlp = Gated()
    stock, x = copy.deepcopy(mlp), torch.randn(7, 24, requires_grad=True)
    patch(Holder(mlp), fused_linear_cross_entropy=False, rms_norm=False)
    kept = {}
    for name, module in (("stock", stock), ("ours", mlp)):
        seen = {}
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t, seen=seen: seen.setdefault(t.data_ptr(), t), lambda t: t
        )
        weights = {p.data_ptr() for p in module.parameters()}
        with hooks:
            y = module(x)
        kept[name] = sorted(tuple(t.shape) for at, t in seen.items() if at not in weights)
        y.sum().backward()
    inner = mlp.gate_proj.out_features
    assert kept["ours"] == sorted([(7, 24), (7, inner), (7, inner)])
    assert kept["stock"].count((7, inner)) == 4  # the activation's output and the product as well


@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh", "gelu"])
def test_an_mlp_in_steps_is_the_whole_one(act, monkeypatch):
    from liger_multi import ops

    calls = []
    for op in (ops.gated_mlp, ops.swiglu, ops.geglu):
        spy = lambda *a, _op=op, **k: (calls.append(_op.__name__), _op(*a, **k))[1]  # noqa: E731
        monkeypatch.setattr(ops, op.__name__, spy)
    stock, found = Gated(act, bias=True), {}
    for whole in (True, False):
        ours = copy.deepcopy(stock)
        options = {"swiglu": {"whole": whole}, "geglu": {"whole": whole}}
        report = patch(Holder(ours), fused_linear_cross_entropy=False, rms_norm=False, **options)
        calls.clear()
        x = torch.linspace(-3, 3, 120).view(5, 24).requires_grad_()
        y = ours(x)
        y.square().sum().backward()
        found[whole] = (y, {"x": x.grad} | gradients(ours))
        step = "swiglu" if act == "silu" else "geglu"
        assert calls == ["gated_mlp" if whole else step]
        assert report.entries[0].replaced_by.startswith(calls[0])
        assert report.entries[0].options == ({} if whole else {"whole": False})
    assert torch.equal(found[True][0], found[False][0])
    assert_same_gradients(found[True][1], found[False][1])


def test_mlp_runs_hooks_and_replacements_of_its_layers():
    model = build()
    patch(model)
    seen = []
    mlp = model.model.layers[0].mlp
    mlp.up_proj.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    mlp.down_proj = nn.Sequential(mlp.down_proj, nn.Identity())
    model(**batch()).loss.backward()
    assert seen == [(2, 11, 48)]


@pytest.mark.parametrize("reason", ["hooked", "replaced", "embedding", "adapter"])
def test_heads_that_stay(reason):
    model = build()
    head = model.lm_head
    if reason == "hooked":
        head._is_hooked = True  # transformers' mark on the modules of a tensor parallel model
        head.register_forward_hook(lambda module, args, output: output)
    elif reason == "replaced":
        head.forward = functools.partial(nn.Linear.forward, head)
    elif reason == "embedding":
        model.lm_head = nn.Sequential(nn.Linear(32, 223))
    else:
        head.base_layer = nn.Linear(2, 2)
    kind = type(model.lm_head)
    report = patch(model)
    assert type(model.lm_head) is kind
    words = {
        "hooked": "tensor parallel, but its weight is no DTensor",
        "replaced": "somebody else",
        "embedding": "Sequential, not a plain",
        "adapter": "adapter",
    }
    assert words[reason] in report.skipped[0].reason
    assert model(**batch()).loss is not None


def test_unpatch_refuses_where_the_class_is_no_longer_ours():
    model = build()
    patch(model)
    before = state(model)
    norm = model.model.norm
    ours = type(norm)
    norm.__class__ = type("FSDPLlamaRMSNorm", (ours,), {})
    for action in (unpatch, lambda m: patched(m).__enter__()):
        if action is unpatch:
            with pytest.raises(PatchError, match=r"'model\.norm'.*FSDPLlamaRMSNorm"):
                action(model)
        else:
            assert patch(model).count("rms_norm") == 5  # an equal patch below the wrapper counts
    assert "on top of an earlier patch" in patch(model, rms_norm="reference").skipped[0].reason
    patch(model)
    norm.__class__ = ours
    assert state(model) == before
    unpatch(model)
    with pytest.raises(PatchError, match="swapped again"), patched(model):
        norm.__class__ = type("FSDPLlamaRMSNorm", (type(norm),), {})


def test_import_pulls_neither_transformers_nor_rich():
    code = (
        "import sys, liger_multi\n"
        "before = set(sys.modules)\n"
        "import liger_multi.patching\n"
        "from torch import nn\n"
        "str(liger_multi.patch(nn.Sequential(nn.Linear(2, 2))))\n"
        "heavy = {'transformers', 'rich', 'peft', 'accelerate'} & set(sys.modules)\n"
        "heavy |= {'triton', 'torch._dynamo'} & (set(sys.modules) - before)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
