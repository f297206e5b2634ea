"""Norms: which instances are one of the known kinds, and that they compute the same."""

# ruff: noqa: E402  (what needs transformers is imported after the skip)
import contextlib
import copy
import inspect

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from liger_multi import ops
from liger_multi.errors import PatchError
from liger_multi.patching import patch, unpatch
from tests.comparing import assert_same_gradients, gradients
from tests.patching.test_apply import HEADLESS


class Holder(nn.Module):
    """A model of one module and no output embedding."""

    def __init__(self, module):
        super().__init__()
        self.inner = module


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
    ("norm", "case"),
    [
        (LlamaRMSNorm(48), "llama"),
        (Olmo(48), "olmo"),
        (GemmaNorm(48), "gemma"),
        (WeightlessNorm(), "no weight"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_recognized_bit_for_bit(norm, case, dtype):
    norm = copy.deepcopy(norm).to(dtype)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    stock = copy.deepcopy(norm)
    report = patch(Holder(norm), fused_linear_cross_entropy=False, swiglu=False, strict=True)
    assert report.entries[0].replaced_by == f"rms_norm[{case}]"
    x = torch.randn(7, 48, dtype=dtype)
    assert torch.equal(norm(x), stock(x))


@pytest.mark.parametrize("case", [CentredNorm, ForgetfulNorm, NeedyNorm])
def test_other_norms_are_left_alone(case):
    norm = case(48)
    report = patch(Holder(norm), fused_linear_cross_entropy=False, swiglu=False)
    assert type(norm) is case
    assert report.count("rms_norm") == 0
    assert (
        case.__name__ in report.skipped[0].reason
        or "failed on a replica" in report.skipped[0].reason
    )


def test_probe_runs_for_each_distinct_instance():
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


class OneModule(nn.Module):
    """A model of one module."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def patched_module(module, **ops):
    report = patch(OneModule(module), **HEADLESS, **ops)
    absent = "the model has no module of this kind"
    reasons = [s.reason for s in report.skipped if not s.reason.startswith(absent)]
    return [e.replaced_by for e in report.entries], reasons


def equal(stock, ours, *inputs, rtol=1e-5):
    """Outputs and gradients, also of inputs and parameters."""
    outputs, results = [], []
    for module in (stock, ours):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = module(*leaves)
        parameters = list(module.parameters())
        upstream = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
        outputs.append(out)
        results.append(torch.autograd.grad(out, [*leaves, *parameters], upstream))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=rtol, atol=rtol)
    assert_same_gradients(results[1], results[0], rtol)


@contextlib.contextmanager
def calls_of(name):
    """The calls of an operator."""
    observed, op = [], getattr(ops, name)
    with pytest.MonkeyPatch.context() as patch_:
        patch_.setattr(ops, name, lambda *a, **k: (observed.append(1), op(*a, **k))[1])
        yield observed


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
    unpatch(OneModule(module))
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
def test_other_rounding_agrees_bit_for_bit(name):
    make, case = OF_ONE_TYPE[name]
    module = weighted(make())
    stock = copy.deepcopy(module)
    op = "gated_rms_norm" if name == "groups" else "rms_norm"
    assert patched_module(module) == ([f"{op}[{case}]"], [])
    equal(stock, module, torch.randn(2, 5, 48))
    x = torch.randn(64, 48).bfloat16()
    assert torch.equal(module.bfloat16()(x), stock.bfloat16()(x))


ROUNDED_FIRST = {
    "deberta": (lambda: modeling("deberta").DebertaLayerNorm(48), (2, 5, 48)),
    "a weight by head": (lambda: modeling("chameleon").ChameleonLayerNorm((4, 48)), (2, 5, 4, 48)),
}


@pytest.mark.parametrize("name", ROUNDED_FIRST)
def test_layer_norms_rounding_before_the_weight(name):
    make, shape = ROUNDED_FIRST[name]
    module = weighted(make())
    stock = copy.deepcopy(module)
    assert patched_module(module) == (["layer_norm[rounded before the weight]"], [])
    equal(stock, module, torch.randn(shape) + 0.3)
    with calls_of("layer_norm") as calls:
        x = torch.randn(shape).bfloat16()
        assert (module.bfloat16()(x) == stock.bfloat16()(x)).double().mean() > 0.95
    assert calls


@pytest.mark.parametrize("bias", [False, True])
def test_layer_norms_joining_heads(bias):
    norm = getattr(modeling("xlstm"), "xLSTMMultiHeadLayerNorm", None)
    if norm is None:
        pytest.skip("this transformers has it from a library of its own")
    module = weighted(norm(3, 16, use_bias=bias))
    stock = copy.deepcopy(module)
    assert patched_module(module) == (["layer_norm[heads joined]"], [])
    equal(stock, module, torch.randn(2, 5, 3, 16) + 0.3)
    with calls_of("layer_norm") as calls:
        x = torch.randn(2, 7, 3, 16).bfloat16()
        assert (module.bfloat16()(x) == stock.bfloat16()(x)).double().mean() > 0.95
        assert len(calls) == 1
        with pytest.raises(ValueError, match="head"):  # as the original does
            module(torch.randn(2, 7, 4, 12).bfloat16())
        assert len(calls) == 1


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


def test_norms_of_the_last_axis_keep_it():
    module = weighted(modeling("sam").SamLayerNorm(48, data_format="channels_last"))
    stock = copy.deepcopy(module)
    assert patched_module(module) == (["layer_norm"], [])
    equal(stock, module, torch.randn(2, 48, 5, 48))


def grouped(case, size):
    """Older transformers have no groups in these."""
    options = inspect.signature(case).parameters
    return case(48, **({"group_size": size} if "group_size" in options else {}))


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


def test_norm_output_may_be_written():
    module, x = nn.LayerNorm(48), torch.randn(2, 5, 48)
    stock = copy.deepcopy(module)
    patched_module(module)

    def scaled(norm):
        out = norm(x)
        out *= torch.arange(5.0)[:, None]
        return out

    expected, got = scaled(stock), scaled(module)
    torch.testing.assert_close(got, expected)
    expected.sum().backward()
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


@pytest.mark.parametrize("case", [Snake, Mixed])
def test_parameters_called_alpha_make_no_dyt(case):
    module = case()
    patch(OneModule(module), strict=True, **HEADLESS)
    assert patched_module(module) == ([], [])
    assert type(module) is case


def test_missing_dyt_is_reported():
    with pytest.raises(PatchError, match=r"dyt .*the model has no module of this kind"):
        patch(OneModule(Snake()), strict=True, dyt=True, **HEADLESS)
