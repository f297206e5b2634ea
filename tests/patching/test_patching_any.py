"""Any model: what the probes recognize beside Llama, and what users teach them."""
# ruff: noqa: E402  (what needs transformers is imported after the skip)

import contextlib
import copy
import inspect
import pickle
import re
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

transformers = pytest.importorskip("transformers")

from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaMLP

from liger_multi import ops, patching
from liger_multi.errors import PatchError
from liger_multi.patching import (
    MlpNames,
    NormKind,
    Replacement,
    patch,
    register,
    unpatch,
    unregister,
)
from tests.comparing import assert_same_gradients, gradients
from tests.models import assert_same_training, batch, build, pair

HEADLESS = {"fused_linear_cross_entropy": False}


class Holder(nn.Module):
    """A model of one module."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def patched_module(module, **ops):
    report = patch(Holder(module), **HEADLESS, **ops)
    absent = "the model has no module of this kind"
    reasons = [s.reason for s in report.skipped if not s.reason.startswith(absent)]
    return [e.replaced_by for e in report.entries], reasons


def equal(stock, ours, *inputs, rtol=1e-5):
    """Outputs and gradients, also of inputs and parameters."""
    outputs, found = [], []
    for module in (stock, ours):
        given = [x.clone().requires_grad_() for x in inputs]
        out = module(*given)
        parameters = list(module.parameters())
        upstream = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
        outputs.append(out)
        found.append(torch.autograd.grad(out, [*given, *parameters], upstream))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=rtol, atol=rtol)
    assert_same_gradients(found[1], found[0], rtol)


@contextlib.contextmanager
def calls_of(name):
    """The calls of an operator."""
    seen, op = [], getattr(ops, name)
    with pytest.MonkeyPatch.context() as patch_:
        patch_.setattr(ops, name, lambda *a, **k: (seen.append(1), op(*a, **k))[1])
        yield seen


def modeling(name):
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")


def weighted(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.5)
    return module


NORMS = {
    "torch": lambda: (nn.LayerNorm(48), "layer_norm"),
    "no bias": lambda: (nn.LayerNorm(48, bias=False), "layer_norm"),
    "no weight": lambda: (nn.LayerNorm(48, elementwise_affine=False), "layer_norm[no weight]"),
    "cohere": lambda: (modeling("cohere").CohereLayerNorm(48), "layer_norm"),
    "1 + weight": lambda: (
        modeling("nemotron").NemotronLayerNorm1P(48),
        "layer_norm[1 + weight]",
    ),
    "t5": lambda: (modeling("t5").T5LayerNorm(48), "rms_norm[llama]"),
    "squared": lambda: (ACT2FN["relu2"], "relu_squared"),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_every_kind(name):
    module, shown = NORMS[name]()
    stock = copy.deepcopy(weighted(module))
    assert patched_module(module) == ([shown], [])
    assert type(module) is not type(stock)
    assert isinstance(module, type(stock))
    equal(stock, module, torch.randn(2, 5, 48) + 0.3)
    unpatch(Holder(module))
    assert type(module) is type(stock)


OF_ONE_TYPE = {
    "factor": (lambda: modeling("deepseek_v4").DeepseekV4UnweightedRMSNorm(), "no weight"),
    "groups": (
        lambda: modeling("qwen4_exp").Qwen4ExpTextRMSNorm(48, group_size=16),
        "gemma, groups",
    ),
    "rounded 1 + weight": (
        lambda: modeling("muse_spark").MuseSparkTextCenteredRMSNorm(48),
        "gemma, rounded 1 + weight",
    ),
    "scaled before it": (
        lambda: modeling("muse_spark").MuseSparkTextInputScaledRMSNorm(48),
        "scaled before it",
    ),
}


@pytest.mark.parametrize("name", OF_ONE_TYPE)
def test_norms_that_round_elsewhere_agree_bit_for_bit(name):
    make, kind = OF_ONE_TYPE[name]
    module = weighted(make())
    stock = copy.deepcopy(module)
    op = "gated_rms_norm" if name == "groups" else "rms_norm"
    assert patched_module(module) == ([f"{op}[{kind}]"], [])
    equal(stock, module, torch.randn(2, 5, 48))
    x = torch.randn(64, 48).bfloat16()
    assert torch.equal(module.bfloat16()(x), stock.bfloat16()(x))


ROUNDED_FIRST = {
    "deberta": (lambda: modeling("deberta").DebertaLayerNorm(48), (2, 5, 48)),
    "a weight by head": (lambda: modeling("chameleon").ChameleonLayerNorm((4, 48)), (2, 5, 4, 48)),
}


@pytest.mark.parametrize("name", ROUNDED_FIRST)
def test_layer_norms_that_round_before_their_weight(name):
    make, shape = ROUNDED_FIRST[name]
    module = weighted(make())
    stock = copy.deepcopy(module)
    assert patched_module(module) == (["layer_norm[rounded before the weight]"], [])
    equal(stock, module, torch.randn(shape) + 0.3)
    with calls_of("layer_norm") as seen:
        x = torch.randn(shape).bfloat16()
        assert (module.bfloat16()(x) == stock.bfloat16()(x)).double().mean() > 0.95
    assert seen


@pytest.mark.parametrize("bias", [False, True])
def test_layer_norms_of_heads_that_they_join(bias):
    norm = getattr(modeling("xlstm"), "xLSTMMultiHeadLayerNorm", None)
    if norm is None:
        pytest.skip("this transformers has it from a library of its own")
    module = weighted(norm(3, 16, use_bias=bias))
    stock = copy.deepcopy(module)
    assert patched_module(module) == (["layer_norm[heads joined]"], [])
    equal(stock, module, torch.randn(2, 5, 3, 16) + 0.3)
    with calls_of("layer_norm") as seen:
        x = torch.randn(2, 7, 3, 16).bfloat16()
        assert (module.bfloat16()(x) == stock.bfloat16()(x)).double().mean() > 0.95
        assert len(seen) == 1
        with pytest.raises(ValueError, match="head"):  # as the original does
            module(torch.randn(2, 7, 4, 12).bfloat16())
        assert len(seen) == 1


def test_a_row_s_factor_is_no_norm():
    module = modeling("hy_v4").HYV4UnweightedRMSNorm()
    assert patched_module(module) == ([], [])


CHANNELS_SECOND = {
    "images": (lambda: modeling("sam").SamLayerNorm(48, data_format="channels_first"), (5, 3)),
    "text": (lambda: modeling("squeezebert").SqueezeBertLayerNorm(48), (7,)),
}


@pytest.mark.parametrize("name", CHANNELS_SECOND)
def test_channels_on_the_second_axis(name):
    make, rest = CHANNELS_SECOND[name]
    module, x = weighted(make()), torch.randn(2, 48, *rest) + 0.3
    stock = copy.deepcopy(module)
    assert patched_module(module) == (["layer_norm[channels second]"], [])
    equal(stock, module, x)
    assert module(x).stride() == stock(x).stride()
    with pytest.raises((RuntimeError, ValueError, IndexError)):  # as the original does
        module(torch.randn(2, 3, 4, 5, 48))


def test_norms_of_the_last_axis_keep_it_where_the_class_knows_both():
    module = weighted(modeling("sam").SamLayerNorm(48, data_format="channels_last"))
    stock = copy.deepcopy(module)
    assert patched_module(module) == (["layer_norm"], [])
    equal(stock, module, torch.randn(2, 48, 5, 48))


def grouped(kind, size):
    """Older transformers have no groups in these."""
    options = inspect.signature(kind).parameters
    return kind(48, **({"group_size": size} if "group_size" in options else {}))


GATED = {
    "mamba2": lambda m: grouped(m.MambaRMSNormGated, 48),
    "bamba": lambda m: grouped(m.BambaRMSNormGated, 16),
    "qwen3_next": lambda m: m.Qwen3NextRMSNormGated(48),
    "falcon_h1": lambda m: m.FalconH1RMSNormGated(48, n_groups=3, norm_before_gate=False),
}


@pytest.mark.parametrize("name", GATED)
def test_gated_norms(name):
    module = weighted(GATED[name](modeling(name)))
    stock = copy.deepcopy(module)
    shown, skipped = patched_module(module)
    one = torch.randn(2, 1, 48)
    if stock(one, one).ndim == 2:  # Falcon H1 of older transformers loses an axis of one token
        assert (shown, len(skipped)) == ([], 1)
        return
    assert len(shown) == 1
    assert shown[0].startswith("gated_rms_norm[")
    assert not any("replica" in reason for reason in skipped)
    equal(stock, module, torch.randn(2, 5, 48), torch.randn(2, 5, 48))


def test_a_gated_norm_without_its_gate_runs_stock():
    module = weighted(grouped(modeling("bamba").BambaRMSNormGated, 16))
    stock = copy.deepcopy(module)
    patched_module(module)
    equal(stock, module, torch.randn(2, 5, 48))


def test_layer_norm_keeps_torchs_dtypes():
    module = nn.LayerNorm(48)
    stock = copy.deepcopy(module)
    patched_module(module)
    x = torch.randn(3, 48, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x).dtype == stock(x).dtype
    assert module(x).dtype == stock(x).dtype  # weights in fp32


def test_what_norms_return_may_be_written_to():
    module, x = nn.LayerNorm(48), torch.randn(2, 5, 48)
    stock = copy.deepcopy(module)
    patched_module(module)

    def scaled(norm):
        out = norm(x)
        out *= torch.arange(5.0)[:, None]
        return out

    wanted, got = scaled(stock), scaled(module)
    torch.testing.assert_close(got, wanted)
    wanted.sum().backward()
    got.sum().backward()
    assert_same_gradients(gradients(module), gradients(stock))


class OtherAxis(nn.Module):
    """A norm of the last axis of matrices, and of another one of images."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

    def forward(self, x):
        axis = 1 if x.ndim == 4 else -1
        n = x.float() * torch.rsqrt(x.float().pow(2).mean(axis, keepdim=True) + self.eps)
        return self.weight * n.to(x.dtype)


def test_norms_of_other_axes_are_left_alone():
    shown, skipped = patched_module(OtherAxis())
    assert not shown
    assert "OtherAxis is no RMSNorm" in skipped[0]


class Odd(nn.Module):
    """A gated MLP whose names nobody knows."""

    def __init__(self, act, inner_drop=0.0, outer_drop=0.0, packed=False):
        super().__init__()
        self.a = nn.Linear(16, 64 if packed else 32)
        self.b = None if packed else nn.Linear(16, 32)
        self.c = nn.Linear(32, 16)
        self.act, self.inner, self.outer = act, nn.Dropout(inner_drop), nn.Dropout(outer_drop)

    def forward(self, x):
        gate, up = self.a(x).chunk(2, -1) if self.b is None else (self.b(x), self.a(x))
        return self.outer(self.c(self.inner(self.act(gate) * up)))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU(), nn.GELU("tanh")], ids=str)
def test_gated_mlps_by_structure(act, packed):
    module = Odd(act, packed=packed)
    stock = copy.deepcopy(module)
    shown, _ = patched_module(module)
    assert len(shown) == 1
    equal(stock, module, torch.randn(2, 5, 16))


class Clamped(nn.Module):
    """SwiGLU of clamped inputs with a limit of its own, and no slope."""

    def __init__(self, limit):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(16, 32), nn.Linear(16, 32)
        self.down_proj, self.swiglu_limit = nn.Linear(32, 16), limit

    def forward(self, x):
        up = self.up_proj(x).clamp(-self.swiglu_limit, self.swiglu_limit)
        return self.down_proj(F.silu(self.gate_proj(x).clamp(max=self.swiglu_limit)) * up)


def test_a_clamped_mlp_without_a_slope():
    module = weighted(Clamped(0.7))
    stock = copy.deepcopy(module)
    assert patched_module(module)[0] == ["swiglu_clamped"]
    equal(stock, module, 3 * torch.randn(2, 5, 16))
    stock.swiglu_limit = module.swiglu_limit = 0.3  # no longer what was probed
    equal(stock, module, 3 * torch.randn(2, 5, 16))


def test_an_mlp_of_a_sparse_gate():
    """A share of every row of the gate is cut to zero before the activation."""
    config = transformers.Gemma3nTextConfig(
        hidden_size=16, intermediate_size=[96] * 2, num_hidden_layers=2,
        activation_sparsity_pattern=[0.9, 0.0],
    )  # fmt: skip
    for at, shown in enumerate(("geglu[tanh, sparse]", "gated_mlp[gelu_tanh]")):
        module = weighted(modeling("gemma3n").Gemma3nTextMLP(config, at))
        stock = copy.deepcopy(module)
        assert patched_module(module) == ([shown], [])
        equal(stock, module, torch.randn(2, 5, 16), rtol=2e-5)
        with torch.autocast("cpu", torch.bfloat16):
            equal(stock, module, torch.randn(2, 5, 16), rtol=1e-1)
        with calls_of("geglu") as seen:
            stock.activation_sparsity = module.activation_sparsity = 0.5  # no longer what it was
            equal(stock, module, torch.randn(2, 5, 16), rtol=2e-5)
        assert not seen


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


def test_experts_that_all_tokens_go_to():
    pytest.importorskip("transformers.models.inkling")
    module = shared_experts()
    stock = copy.deepcopy(module)
    assert patched_module(module)[0] == ["gated_mlp[silu]"]
    with calls_of("gated_mlp") as seen:
        for shape in ((2, 5), (10,)):
            equal(OfRoutes(stock), OfRoutes(module), torch.randn(*shape, 16), torch.rand(*shape, 3))
        assert len(seen) == 6
        with torch.autocast("cpu", torch.bfloat16):  # the original's dtypes
            equal(OfRoutes(stock), OfRoutes(module), torch.randn(4, 16), torch.rand(4, 3))
        with pytest.raises(RuntimeError):
            module(torch.randn(10, 16), torch.rand(10, 2))
        assert len(seen) == 6
    unpatch(Holder(module))
    assert type(module) is type(stock)


def muse_spark_experts():
    config = transformers.MuseSparkConfig().text_config
    for name, value in {
        "hidden_size": 16, "moe_hidden_size": 16, "moe_intermediate_size": 12,
        "num_local_experts": 4,
    }.items():  # fmt: skip
        setattr(config, name, value)
    return weighted(modeling("muse_spark").MuseSparkExperts(config))


def test_experts_that_end_in_a_norm():
    """Of every expert's output, so before it is weighted and summed."""
    pytest.importorskip("transformers.models.muse_spark")
    module, index = muse_spark_experts(), torch.randint(4, (10, 2))
    stock = copy.deepcopy(module)
    shown = ["fused_moe[silu, norm]", "rms_norm[scaled before it]"]
    assert patched_module(module) == (shown, [])
    ours, theirs = OfRoutes(module, index), OfRoutes(stock, index)
    with calls_of("fused_moe") as seen, calls_of("rms_norm") as normed:
        equal(theirs, ours, torch.randn(10, 16), torch.rand(10, 2))
        assert (len(seen), len(normed)) == (1, 1)
        for own in (stock, module):  # a hook on the norm acts
            own.post_expert_norm.register_forward_hook(lambda m, given, y: 2 * y)
        equal(theirs, ours, torch.randn(10, 16), torch.rand(10, 2))
        assert len(seen) == 2
    found = [m(torch.randn(0, 16), torch.rand(0, 2)) for m in (
        OfRoutes(stock, index[:0]), OfRoutes(module, index[:0])
    )]  # fmt: skip
    assert found[0].shape == found[1].shape == (0, 16)


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

    def experts(own):
        return type("Called", (), {
            "__call__": lambda self, x, routing: own(x, index, routing),
            "parameters": lambda self: own.parameters(),
        })()  # fmt: skip

    given = torch.randn(10, 16), torch.rand(10, 2)
    for change in (None, nn.SiLU()):
        if change is not None:  # no longer what was probed
            stock.act_fn = module.act_fn = change
        with calls_of("fused_moe") as seen:
            equal(experts(stock), experts(module), *given)
        assert len(seen) == (change is None)


def test_experts_of_modules_are_named_once():
    """Where none of their layers is served: a list of gated MLPs is."""

    class OwnExperts(nn.ModuleList):
        def forward(self, x):
            return sum(expert(x) for expert in self)

    for inner, told in ((nn.Linear(16, 16), True), (Odd(nn.SiLU()), False)):
        report = patch(Holder(OwnExperts([inner])), **HEADLESS)
        found = [(s.reason, s.strict) for s in report.skipped if s.op == "fused_moe"]
        said = "OwnExperts does not use the experts interface of transformers"
        assert found == [(said, False)] * told


def test_experts_of_equal_blocks_of_rows():
    """As many rows for every expert, whose results have no weights."""
    config = transformers.Llama4TextConfig(
        hidden_size=16, intermediate_size=12, num_local_experts=4, num_hidden_layers=1
    )
    module = weighted(modeling("llama4").Llama4TextExperts(config))
    stock = copy.deepcopy(module)
    assert patched_module(module)[0] == ["fused_moe[silu]"]
    with calls_of("fused_moe") as seen:
        equal(stock, module, torch.randn(20, 16))
        assert len(seen) == 1
        with torch.autocast("cpu", torch.bfloat16):  # the original's dtype
            assert module(torch.randn(20, 16)).dtype == stock(torch.randn(20, 16)).dtype
        with pytest.raises(RuntimeError):
            module(torch.randn(21, 16))
        assert len(seen) == 1


def test_experts_that_are_the_identity():
    config = transformers.LongcatFlashConfig(
        hidden_size=16, expert_ffn_hidden_size=12, n_routed_experts=4, zero_expert_num=2
    )
    module = weighted(modeling("longcat_flash").LongcatFlashExperts(config))
    stock = copy.deepcopy(module)
    assert patched_module(module)[0] == ["fused_moe[silu]"]
    index = torch.randint(6, (10, 3))
    assert (index >= 4).any()
    x, routing = torch.randn(10, 16), torch.rand(10, 3)
    found = []
    with calls_of("fused_moe") as seen:
        for own in (stock, module):
            given = [t.clone().requires_grad_() for t in (x, routing)]
            y = own(given[0], index, given[1])
            loss = (y * torch.linspace(-1, 1, 16)).sum()
            found.append([y.detach(), *torch.autograd.grad(loss, [*given, *own.parameters()])])
    assert len(seen) == 1
    assert_same_gradients(found[1], found[0], 1e-5)


def test_dropouts_stay_where_they_are():
    module = Odd(nn.SiLU(), inner_drop=0.5, outer_drop=0.25)
    stock = copy.deepcopy(module)
    assert patched_module(module)[0] == ["gated_mlp[silu]"]
    x = torch.randn(64, 16)
    found = []
    for mlp in (stock.train(), module.train()):
        torch.manual_seed(3)
        found.append(mlp(x))
    torch.testing.assert_close(found[1], found[0])
    assert (found[0] == 0).double().mean() > 0.1
    equal(stock.eval(), module.eval(), x)


def test_three_layers_that_are_no_mlp_are_left_without_a_word():
    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

        def forward(self, x):
            return self.c(self.a(x) + self.b(x))

    module = Three()
    shown, skipped = patched_module(module)
    assert not shown
    assert all("Three" not in reason for reason in skipped)
    assert type(module) is Three


class Snake(nn.Module):
    """The activation of a vocoder, whose parameters are called as those of a DyT."""

    def __init__(self):
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return x + torch.sin(x * self.alpha.exp()).pow(2) / self.beta.exp()


class Mixed(nn.Module):
    """Takes more than an input."""

    def __init__(self):
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(1))

    def forward(self, x, value):
        return x - self.alpha * value


@pytest.mark.parametrize("kind", [Snake, Mixed])
def test_parameters_called_alpha_make_no_dyt(kind):
    module = kind()
    patch(Holder(module), strict=True, **HEADLESS)
    assert patched_module(module) == ([], [])
    assert type(module) is kind


def test_a_dyt_that_was_asked_for_and_is_not_there_is_named():
    with pytest.raises(PatchError, match=r"dyt .*the model has no module of this kind"):
        patch(Holder(Snake()), strict=True, dyt=True, **HEADLESS)


class Talker(nn.Module):
    """A model with a head of its own, and another model with one in it."""

    def __init__(self, inner=None, head="lm_head"):
        super().__init__()
        self.name = head
        setattr(self, head, nn.Linear(8, 30, bias=False))
        self.inner = inner

    def get_output_embeddings(self):
        return getattr(self, self.name)


def test_output_embeddings_of_inner_models_are_named():
    model = Talker(Talker(head="codec_head"))
    report = patch(model, strict=True)
    (skipped,) = [s for s in report.skipped if s.op == "fused_linear_cross_entropy"]
    assert skipped.path == "inner.codec_head"
    assert "liger_multi.patch(model.inner) patches it" in skipped.reason
    assert [e.path for e in report.entries] == ["lm_head"]
    assert [e.path for e in patch(model.inner).entries] == ["codec_head"]
    assert "fused_linear_cross_entropy" not in {s.op for s in patch(model).skipped}


def test_embeddings_of_inner_models_that_share_the_head_are_not_named():
    inner = Talker()
    model = Talker(inner)
    inner.lm_head = model.lm_head
    assert "fused_linear_cross_entropy" not in {s.op for s in patch(model).skipped}


def test_transformers_of_diffusers():
    diffusers = pytest.importorskip("diffusers")
    sizes = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32}
    torch.manual_seed(0)
    stock = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, axes_dims_rope=[4, 4, 8],
        pooled_projection_dim=32, **sizes
    )  # fmt: skip
    ours = copy.deepcopy(stock)
    report = patch(ours, **HEADLESS)
    assert report.count("layer_norm") == report.count("rms_norm") == 6
    inputs = {
        "hidden_states": torch.randn(1, 4, 4),
        "encoder_hidden_states": torch.randn(1, 3, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([1.0]),
        "img_ids": torch.zeros(4, 3),
        "txt_ids": torch.zeros(3, 3),
    }
    assert_same_training(stock, ours, lambda m: m(**inputs).sample.pow(2).sum())


def test_encoders_of_sentence_transformers():
    library = pytest.importorskip("sentence_transformers")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        vocab_size=99, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.auto_model = transformers.BertModel(config)

        def forward(self, features):
            out = self.auto_model(input_ids=features["input_ids"]).last_hidden_state
            return {**features, "sentence_embedding": out.mean(1)}

    torch.manual_seed(0)
    stock = library.SentenceTransformer(modules=[Encoder()], device="cpu")
    ours = copy.deepcopy(stock)
    assert patch(ours, **HEADLESS).count("layer_norm") == 5

    def loss(model):
        made = model({"input_ids": torch.arange(12).view(2, 6)})["sentence_embedding"]
        return made.pow(3).sum()

    assert_same_training(stock, ours, loss)


@pytest.mark.parametrize("kind", ["stock", "gated"])
def test_transformers_of_timm(kind):
    timm = pytest.importorskip("timm", exc_type=ImportError)
    more = {"mlp_layer": timm.layers.SwiGLU, "norm_layer": timm.layers.RmsNorm}
    torch.manual_seed(0)
    stock = timm.models.VisionTransformer(
        img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5,
        **(more if kind == "gated" else {}),
    )  # fmt: skip
    ours = copy.deepcopy(stock)
    report = patch(ours, **HEADLESS)
    assert report.count("layer_norm") + report.count("rms_norm") == 5
    assert report.count("geglu") == (2 if kind == "gated" else 0)  # it says SwiGLU, and takes GELU
    pixels = torch.randn(2, 3, 16, 16)
    assert_same_training(stock, ours, lambda m: m(pixels).pow(2).sum())


# --- patches of others ---


def foreign(function, library="liger_kernel.transformers.rms_norm"):
    made = types.FunctionType(function.__code__, globals(), function.__name__)
    made.__module__ = library
    return made


def test_forwards_of_other_libraries_are_told_apart(monkeypatch):
    stock = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", foreign(stock))
    report = patch(build("llama"))
    assert {s.reason for s in report.skipped if s.op == "swiglu"} == {"Liger serves it (LlamaMLP)"}
    assert report.count("swiglu") == 0
    assert report.count("fused_linear_cross_entropy") == 1


def test_a_loss_in_a_foreign_forward_is_left(monkeypatch):
    kind = transformers.LlamaForCausalLM
    monkeypatch.setattr(kind, "forward", foreign(lambda self: None, "liger_kernel.x"))
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


# --- heads ---


class Quantized(nn.Linear):
    """As bitsandbytes has them: a linear layer with a forward of its own."""

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


def test_quantized_heads_keep_their_own_call():
    stock = build("llama", tied=False)
    head = Quantized(32, stock.lm_head.out_features, bias=False)
    head.weight = nn.Parameter((stock.lm_head.weight * 8).to(torch.int8), requires_grad=False)
    stock.lm_head = head
    ours = copy.deepcopy(stock)
    report = patch(ours)
    assert "not a plain linear layer" in str(report)
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)


def test_heads_in_eight_bits_say_so():
    model = build("llama", tied=False)
    weight = model.lm_head.weight.detach().to(torch.float8_e4m3fn)
    model.lm_head.weight = nn.Parameter(weight, requires_grad=False)
    report = patch(model)
    assert "is stored as torch.float8_e4m3fn" in str(report)
    assert type(model.lm_head) is nn.Linear


@pytest.mark.parametrize("tied", [False, True])
def test_a_resized_vocabulary_keeps_the_fused_head(tied):
    stock, ours = pair(tied=tied)
    patch(ours, fused_linear_cross_entropy={"chunk": 5})
    for model in (stock, ours):
        torch.manual_seed(0)
        model.resize_token_embeddings(240, mean_resizing=False)
    stock.load_state_dict(ours.state_dict())
    assert type(stock.lm_head) is nn.Linear
    assert ours.lm_head._liger_multi_swap.settings.fused.chunk == 5
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)
    unpatch(ours)
    assert type(ours.lm_head) is nn.Linear


# --- what users add ---


class Ours(nn.Module):
    """A module that no probe of the library knows."""

    def __init__(self):
        super().__init__()
        self.scale = 3.0

    def forward(self, x):
        return x * self.scale


def twice(module, stock, x):
    return stock(x) + 0 * x


def probe(module):
    if not isinstance(module, Ours):
        return None
    return Replacement(twice, "twice") if module.scale == 3.0 else "its scale is another"


@pytest.fixture
def registered():
    added = []

    def add(item, name=None):
        register(item, name)
        added.append(name or item)

    yield add
    for item in added:
        unregister(item)


def test_a_probe_of_a_user(registered):
    registered(probe, "twice")
    model = nn.Sequential(Ours(), Ours(), nn.LayerNorm(4))
    model[1].scale = 2.0
    report = patch(model, fused_linear_cross_entropy=False)
    assert [(e.op, e.path, e.replaced_by) for e in report.entries if e.op == "twice"] == [
        ("twice", "0", "twice")
    ]
    assert [(s.path, s.reason) for s in report.skipped if s.op == "twice"] == [
        ("1", "its scale is another")
    ]
    assert torch.equal(model[0](torch.ones(4)), torch.full((4,), 3.0))
    for twin in (copy.deepcopy(model[0]), pickle.loads(pickle.dumps(model[0]))):
        assert type(twin) is type(model[0])
    patch(model, twice=False, fused_linear_cross_entropy=False)
    assert type(model[0]) is Ours


def test_names_of_a_user(registered):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.p, self.q, self.r = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.r(F.relu(self.p(x)) * self.q(x))

    module = Attention()
    assert not any("Attention computes" in reason for reason in patched_module(module)[1])
    registered(MlpNames("p", "q", "r"))
    assert any("Attention computes neither" in reason for reason in patched_module(module)[1])


class Doubled(nn.Module):
    """An RMSNorm that adds two to its weight."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(24)), 1e-6

    def forward(self, x):
        n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (n * (2.0 + self.weight.float())).to(x.dtype)


def test_a_kind_of_a_user(registered):
    module = Doubled()
    assert "Doubled is no RMSNorm" in patched_module(module)[1][0]
    registered(NormKind("two more", options=(("casting", "gemma"), ("offset", 2.0))))
    stock = copy.deepcopy(module)
    assert patched_module(module)[0] == ["rms_norm[two more]"]
    equal(stock, module, torch.randn(3, 24))


def test_the_example_of_the_page_runs():
    page = Path(__file__).parents[2] / "docs" / "recognition.md"
    section = page.read_text(encoding="utf-8").split("## Custom modules")[1].partition("\n## ")[0]
    found = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    assert len(found) == 2
    namespace = {"__name__": "page"}
    for block in found:
        exec(compile(block, "recognition.md", "exec"), namespace)


def test_registrations_that_cannot_be():
    for item, name in ((probe, None), (probe, "rms_norm"), (3, "three")):
        with pytest.raises(PatchError):
            register(item, name)
    with pytest.raises(PatchError, match="not registered"):
        unregister("nobody")
    assert "twice" not in patching.registered.probes()
