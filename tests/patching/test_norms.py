"""Norms: which instances are one of the known kinds, and that they compute the same."""

# ruff: noqa: E402  (what needs transformers is imported after the skip)

import contextlib
import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

import liger_multi
from liger_multi import ops, use
from liger_multi.errors import PatchError
from liger_multi.patching import patch, rotated_norms as rotated, unpatch
from tests.comparing import assert_same_gradients, recorded
from tests.models import (
    HEADLESS,
    Holder,
    adapters,
    assert_same_training,
    assert_unpatched,
    batch,
    build,
    loss_of,
    patched_copy,
    variant,
)
from tests.sweep.run import executed


def normalized(m, x):
    return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + m.variance_epsilon)


class Llama(LlamaRMSNorm):
    """One of 48 columns."""

    def __init__(self):
        super().__init__(48)


def other_axis(m, x):
    """A norm of the last axis of matrices, and of another one of images."""
    axis = 1 if x.ndim == 4 else -1
    n = x.float() * torch.rsqrt(x.float().pow(2).mean(axis, keepdim=True) + m.variance_epsilon)
    return m.weight * n.to(x.dtype)


OTHERS = {
    "centered": lambda m, x: Llama.forward(m, x - x.mean(-1, keepdim=True)),
    "no gradient of the weight": lambda m, x: m.weight.detach() * normalized(m, x).to(x.dtype),
    "another signature": lambda m, x, gate: Llama.forward(m, x) * gate,
    "other axes": other_axis,
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_norms_are_left_alone(case):
    norm = variant(Llama, OTHERS[case])
    module_class = type(norm)
    shown, skipped = patched_module(norm)
    assert shown == []
    assert type(norm) is module_class
    assert "OtherLlama" in skipped[0] or "failed on a replica" in skipped[0]


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


def patched_module(module, **ops):
    report = patch(Holder(module), **HEADLESS, **ops)
    absent = "the model has no module of this kind"
    reasons = [s.reason for s in report.skipped if not s.reason.startswith(absent)]
    return [e.replaced_by for e in report.entries], reasons


def equal(stock, ours, *inputs, rtol=1e-5):
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
    with pytest.MonkeyPatch.context() as patches:
        yield recorded(patches, ops, name)


def modeling(name):
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")


def weighted(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.5)
    return module


def patched_twin(module, *shown):
    """An equal module; this one is patched, and the report calls its operators so."""
    stock = copy.deepcopy(module)
    assert patched_module(module) == ([*shown], [])
    return stock


def of(name, class_name, *arguments, **options):
    return lambda: getattr(modeling(name), class_name)(*arguments, **options)


FIRST = "layer_norm[rounded before the weight]"
ROW, BITS, NEAR = (2, 5, 48), "every bit of bf16", "most bits of bf16"
NORMS = {
    "llama": (Llama, "rms_norm[llama]", ROW, BITS),
    "olmo": (
        lambda: variant(Llama, lambda m, x: (m.weight * normalized(m, x)).to(x.dtype)),
        "rms_norm[olmo]",
        ROW,
        BITS,
    ),
    "gemma": (
        lambda: variant(
            Llama, lambda m, x: (normalized(m, x) * (1.0 + m.weight.float())).to(x.dtype)
        ),
        "rms_norm[gemma]",
        ROW,
        BITS,
    ),
    "torch": (lambda: nn.LayerNorm(48), "layer_norm", ROW),
    "no bias": (lambda: nn.LayerNorm(48, bias=False), "layer_norm", ROW),
    "no weight": (
        lambda: nn.LayerNorm(48, elementwise_affine=False),
        "layer_norm[no weight]",
        ROW,
    ),
    "cohere": (of("cohere", "CohereLayerNorm", 48), "layer_norm", ROW),
    "1 + weight": (of("nemotron", "NemotronLayerNorm1P", 48), "layer_norm[1 + weight]", ROW),
    "t5": (of("t5", "T5LayerNorm", 48), "rms_norm[llama]", ROW),
    "squared": (lambda: ACT2FN["relu2"], "relu_squared", ROW),
    "factor": (
        of("deepseek_v4", "DeepseekV4UnweightedRMSNorm"),
        "rms_norm[no weight]",
        ROW,
        BITS,
    ),
    "groups": (
        of("qwen4_exp", "Qwen4ExpTextRMSNorm", 48, group_size=16),
        "gated_rms_norm[gemma, groups]",
        ROW,
        BITS,
    ),
    "rounded 1 + weight": (
        of("muse_spark", "MuseSparkTextCenteredRMSNorm", 48),
        "rms_norm[gemma, rounded 1 + weight]",
        ROW,
        BITS,
    ),
    "scaled before it": (
        of("muse_spark", "MuseSparkTextInputScaledRMSNorm", 48),
        "rms_norm[scaled before it]",
        ROW,
        BITS,
    ),
    "deberta": (of("deberta", "DebertaLayerNorm", 48), FIRST, ROW, NEAR),
    "a weight by head": (
        of("chameleon", "ChameleonLayerNorm", (4, 48)),
        FIRST,
        (2, 5, 4, 48),
        NEAR,
    ),
    "images": (
        of("sam", "SamLayerNorm", 48, data_format="channels_first"),
        "layer_norm[channels second]",
        (2, 48, 5, 3),
    ),
    "images, channels last": (
        of("sam", "SamLayerNorm", 48, data_format="channels_last"),
        "layer_norm",
        (2, 48, 5, 48),
    ),
    "text": (
        of("squeezebert", "SqueezeBertLayerNorm", 48),
        "layer_norm[channels second]",
        (2, 48, 7),
    ),
}
"""By name: what makes the norm, how the report calls it, a shape, and the precision in bf16."""


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_every_kind(name):
    make, shown, shape, *precision = NORMS[name]
    module = weighted(make())
    stock, x = copy.deepcopy(module), torch.randn(shape) + 0.3
    assert patched_module(module) == ([shown], [])
    assert type(module) is not type(stock)
    assert isinstance(module, type(stock))
    equal(stock, module, x)
    assert module(x).stride() == stock(x).stride()
    if "second" in shown:
        with pytest.raises((RuntimeError, ValueError, IndexError)):  # as the original does
            module(torch.randn(2, 3, 4, 5, 48))
    if precision:
        x = x.bfloat16()
        with calls_of(shown.partition("[")[0]) as calls:
            same = (module.bfloat16()(x) == stock.bfloat16()(x)).double().mean()
        assert calls
        assert same > 0.95 if precision == [NEAR] else same == 1
    unpatch(Holder(module))
    assert type(module) is type(stock)


@pytest.mark.parametrize("bias", [False, True])
def test_layer_norms_joining_heads(bias):
    norm = getattr(modeling("xlstm"), "xLSTMMultiHeadLayerNorm", None)
    if norm is None:
        pytest.skip("this transformers has it from a library of its own")
    module = weighted(norm(3, 16, use_bias=bias))
    stock = patched_twin(module, "layer_norm[heads joined]")
    equal(stock, module, torch.randn(2, 5, 3, 16) + 0.3)
    with calls_of("layer_norm") as calls:
        x = torch.randn(2, 7, 3, 16).bfloat16()
        assert (module.bfloat16()(x) == stock.bfloat16()(x)).double().mean() > 0.95
        assert len(calls) == 1
        with pytest.raises(ValueError, match="head"):  # as the original does
            module(torch.randn(2, 7, 4, 12).bfloat16())
        assert len(calls) == 1


def test_a_row_s_factor_is_no_norm():
    assert patched_module(modeling("hy_v4").HYV4UnweightedRMSNorm()) == ([], [])


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
    module, x = nn.LayerNorm(48), torch.randn(3, 48, dtype=torch.bfloat16)
    stock = patched_twin(module, "layer_norm")
    for enabled in (True, False):  # weights in fp32
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert module(x).dtype == stock(x).dtype


def test_norm_output_may_be_written():
    module, x = nn.LayerNorm(48), torch.randn(2, 5, 48)

    def scaled(norm):
        return norm(x).mul_(torch.arange(5.0)[:, None]).sum()

    assert_same_training(patched_twin(module, "layer_norm"), module, scaled)


class Snake(nn.Module):
    """The activation of a vocoder, whose parameters are called as those of a DyT."""

    def __init__(self):
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return x + torch.sin(x * self.alpha.exp()).pow(2) / self.beta.exp()


def test_parameters_called_alpha_make_no_dyt():
    module = Snake()
    patch(Holder(module), strict=True, **HEADLESS)
    assert patched_module(module) == ([], [])
    assert type(module) is Snake
    with pytest.raises(PatchError, match=r"dyt .*the model has no module of this kind"):
        patch(Holder(module), strict=True, dyt=True, **HEADLESS)


# --- weights that are written between forward and backward ---

SIZE = 16


def _class(name: str) -> Any:
    module, _, class_name = name.rpartition(".")
    return getattr(pytest.importorskip(f"transformers.models.{module}"), class_name)


WRITTEN: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: _class("llama.modeling_llama.LlamaRMSNorm")(SIZE),
    "gemma": lambda: _class("gemma.modeling_gemma.GemmaRMSNorm")(SIZE),
    "olmo2": lambda: _class("olmo2.modeling_olmo2.Olmo2RMSNorm")(SIZE),
    "t5": lambda: _class("t5.modeling_t5.T5LayerNorm")(SIZE),
    "cohere": lambda: _class("cohere.modeling_cohere.CohereLayerNorm")(SIZE),
    "qwen3_next": lambda: _class("qwen3_next.modeling_qwen3_next.Qwen3NextRMSNormGated")(SIZE),
    "RMSNorm": lambda: nn.RMSNorm(SIZE, eps=1e-6),
    "LayerNorm": lambda: nn.LayerNorm(SIZE),
}


def outcome(norm: nn.Module, inputs: list[Tensor]) -> list[Tensor] | None:
    """The gradients after a write to the weight; None where PyTorch refuses them."""
    operands = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    y = norm(*operands)
    with torch.no_grad():
        norm.weight.mul_(3).add_(1)  # type: ignore[operator, union-attr]
    leaves = [t for t in (*operands, *norm.parameters()) if t.requires_grad]
    upstream = torch.arange(y.numel(), dtype=y.dtype).view_as(y) / 30
    try:
        return list(torch.autograd.grad(y, leaves, upstream, allow_unused=True))
    except RuntimeError:
        return None


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_allowed_as_unpatched(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    for trains_x, trains_weight in ((True, True), (True, False), (False, True)):
        stock = WRITTEN[name]().to(dtype)
        for p in stock.parameters():
            p.requires_grad_(trains_weight)
        model = nn.Sequential(copy.deepcopy(stock))
        assert liger_multi.patch(model, fused_linear_cross_entropy=False).entries
        inputs = [torch.randn(3, SIZE, generator=generator).to(dtype).requires_grad_(trains_x)]
        if name == "qwen3_next":
            inputs.append(torch.randn(3, SIZE, generator=generator).to(dtype))
        expected, got = outcome(stock, inputs), outcome(model[0], inputs)
        if expected is not None:
            assert got is not None, (trains_x, trains_weight)
            rtol = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(got, expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
    ("architecture", "written"),
    [
        ("gemma", "norm"),
        ("gemma3_text", "norm"),  # of queries and keys with their rotation, too
        ("llama", "layers.0.input_layernorm"),  # whose input needs no gradient
        ("qwen3", "layers.0.input_layernorm"),
    ],
)
def test_norms_in_a_model(architecture: str, written: str) -> None:
    stock = build(architecture)
    for name, p in stock.named_parameters():
        p.requires_grad_(written in name)
    ours = patched_copy(stock)
    grads = []
    for model in (stock, ours):
        loss = model(**batch()).loss
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p.mul_(2)
        loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert grads[0]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)


def test_weights_are_read_only_for_needed_gradients() -> None:
    x = torch.randn(4, SIZE)
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "rms_norm": lambda w: ops.rms_norm(x, w),
        "gated_rms_norm": lambda w: ops.gated_rms_norm(x, x, w),
        "poly_norm": lambda w: ops.poly_norm(x, w[:3] * 1, torch.zeros(1)),
        "dyt": lambda w: ops.dyt(x, torch.ones(1), w, None),
    }
    for name, run in calls.items():
        weight = torch.rand(SIZE, requires_grad=True)
        expected = torch.autograd.grad(run(weight).sum(), weight)
        y = run(weight)
        with torch.no_grad():
            weight.mul_(5)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), weight), expected, msg=name)
    weight = torch.rand(SIZE, requires_grad=True)
    y = ops.rms_norm(x.requires_grad_(), weight)
    with torch.no_grad():
        weight.mul_(5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# Norms of queries and keys that are computed with their rotation: QK-norm and RoPE.


ROTATED = ("qwen3", "gemma3_text", "olmo2")

KEY = "rms_norm_rope"

every_rotated = pytest.mark.parametrize("model_type", ROTATED)


def rotated_pair(model_type="qwen3", **options):
    """A model and a patched one, of which norms are not ones."""
    stock = build(model_type)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            if "_norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    ours = copy.deepcopy(stock)
    return stock, ours, patch(ours, **options)


def calls_in_a_step(stock, ours, run=loss_of):
    """The calls of operators in a step that equals the unpatched one."""
    with executed(ours) as record:
        assert_same_training(stock, ours, run)
    return record.calls


def attentions(model):
    return [m for n, m in model.named_modules() if n.endswith("self_attn")]


@every_rotated
def test_numbers_are_those_of_both_operators(model_type):
    """The reference rounds where both do, so in bf16 every bit of the logits is equal."""
    stock, ours, _ = rotated_pair(model_type)
    apart = patched_copy(stock, **{KEY: False})
    for model in (ours, apart):
        model.bfloat16().eval()
    with torch.no_grad():
        actual, expected = (m(input_ids=batch()["input_ids"]).logits for m in (ours, apart))
    assert torch.equal(actual, expected)


@every_rotated
def test_unpatch_restores_norm_classes(model_type):
    stock, ours, _ = rotated_pair(model_type)
    patched = [type(m) for m in attentions(ours)]
    patch(ours, **{KEY: False})
    apart = [type(m) for m in attentions(ours)]
    assert all(a is not b for a, b in zip(patched, apart, strict=True))
    assert not calls_in_a_step(stock, ours)[KEY]
    report = patch(ours)
    assert [type(m) for m in attentions(ours)] == patched
    assert {e.status for e in patch(ours).entries if e.op == KEY} == {"already patched"}
    assert {e.status for e in report.entries if e.op == KEY} == {"options changed"}
    assert_unpatched(ours, stock)


@pytest.mark.parametrize("first", ["patch", "adapters"])
def test_adapters_on_the_projections(first):
    """Queries and keys come from one call for both projections, and go into this operator."""
    targets, model = ("q_proj", "k_proj", "v_proj"), build("qwen3")
    stock = adapters(build("qwen3"), targets)
    if first == "patch":
        patch(model)
    ours = adapters(model, targets)
    kinds = [type(m) for m in attentions(stock)]
    for _ in range(2):
        report = patch(ours)
        assert report.count(KEY) == 2
        calls = calls_in_a_step(stock, ours)
        assert (calls[KEY], calls["lora_qkv"], calls["rope"]) == (4, 2, 0)
    assert {e.status for e in report.entries if e.op == KEY} == {"already patched"}
    for options, counts in (({KEY: False}, (0, 2)), ({"lora": False}, (4, 0))):
        patch(ours)
        patch(ours, **options)
        calls = calls_in_a_step(stock, ours)
        assert (calls[KEY], calls["lora_qkv"]) == counts
    unpatch(ours)
    assert [type(m) for m in attentions(ours)] == kinds


def test_other_names_of_the_norms():
    config = transformers.Lfm2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=223,
        layer_types=["full_attention"],
        pad_token_id=0,
    )
    stock = transformers.Lfm2ForCausalLM(config)
    assert calls_in_a_step(stock, patched_copy(stock))[KEY] == 2


def _in_rows(model):
    with use(deterministic="rows"):
        return loss_of(model)


def _packed(model):
    ids = batch()["input_ids"][:1]
    positions = torch.cat([torch.arange(5), torch.arange(ids.shape[1] - 5)])[None]
    return model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss


@every_rotated
@pytest.mark.parametrize("run", [_in_rows, _packed])
@pytest.mark.parametrize("frozen", [False, True])
def test_in_other_surroundings(model_type, run, frozen):
    stock, ours, _ = rotated_pair(model_type)
    for model in (stock, ours):
        for attention in attentions(model) if frozen else ():
            attention.q_norm.requires_grad_(False)
            attention.k_norm.requires_grad_(False)
    calls = calls_in_a_step(stock, ours, run)
    assert calls[KEY] >= 2 * len(attentions(ours))  # a packed row is tried in short ones
    assert not calls["rope"]


def test_sharded_queries_are_left_to_the_model(one_process):
    """Queries that are DTensors: the norm and the rotary function of the model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module
    from torch.distributed.tensor.experimental import implicit_replication

    stock, ours, _ = rotated_pair("olmo2")
    mesh = init_device_mesh("cpu", (1,))
    for model in (stock, ours):
        model.set_attn_implementation("eager")  # that of the CPU has no rule for shards
        distribute_module(model.model.layers[0].self_attn, mesh)
    ids = batch()["input_ids"]
    with implicit_replication(), executed(ours) as record:  # no head: PyTorch 2.9 slices no shards
        expected, got = (model.model(input_ids=ids).last_hidden_state for model in (stock, ours))
    torch.testing.assert_close(got, expected)
    assert not record.calls[KEY]


# --- what runs both operators, or the model's own ---


CHANGES = {
    "hook": lambda m: m.q_norm.register_forward_hook(lambda module, inputs, y: 2 * y),
    "eps": lambda m: setattr(m.k_norm, "variance_epsilon", 0.1),
    "norm": lambda m: setattr(m, "q_norm", nn.Identity()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_norm_is_called_where_the_model_calls_it(change):
    stock, ours, _ = rotated_pair()
    for attention in (*attentions(stock), *attentions(ours)):
        CHANGES[change](attention)
    assert not calls_in_a_step(stock, ours)[KEY]


@pytest.mark.parametrize(
    ("name", "other"),
    [("apply_rotary_pos_emb", lambda q, k, *rest: (q, k)), ("rotate_half", lambda x: 2 * x)],
)
def test_rotary_functions_replaced_later(name, other, monkeypatch):
    stock, ours, _ = rotated_pair()
    monkeypatch.setattr(modeling_qwen3, name, other)
    assert not calls_in_a_step(stock, ours)[KEY]


@pytest.mark.parametrize("updated", [True, False])
def test_a_cache_gets_the_angles_themselves(updated):
    """Older forwards hand cos and sin to the cache, in training too."""

    class Older(modeling_qwen3.Qwen3Attention):
        def forward(
            self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
        ):
            shape = (*hidden_states.shape[:-1], -1, self.head_dim)
            q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
            k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
            v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
            cos, sin = position_embeddings
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            if past_key_values is not None:
                cache_kwargs = {"sin": sin, "cos": cos}
                k, v = past_key_values.update(k, v, 0, cache_kwargs)
            y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            return self.o_proj(y.transpose(1, 2).flatten(2)), None

    class Other(Older):
        """A forward that does more with its cache than to update it."""

        def forward(
            self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
        ):
            shape = (*hidden_states.shape[:-1], -1, self.head_dim)
            q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
            k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
            v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
            cos, sin = position_embeddings
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            if past_key_values is not None:
                cache_kwargs = {"sin": sin, "cos": cos}
                past_key_values.cache_kwargs.append(cache_kwargs)
            y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            return self.o_proj(y.transpose(1, 2).flatten(2)), None

    class Cache:
        cache_kwargs = []

        def update(self, k, v, layer, cache_kwargs):
            self.cache_kwargs.append(cache_kwargs)
            return k, v

    model = build("qwen3")
    attention = attentions(model)[0]
    attention.__class__ = Older if updated else Other
    patch(model)
    x = torch.randn(2, 5, model.config.hidden_size)
    angles = (torch.randn(1, 5, attention.head_dim), torch.randn(1, 5, attention.head_dim))
    for cache, calls in ((None, 2), (Cache(), 2 if updated else 0)):
        with executed(model) as record:
            attention(x, position_embeddings=angles, attention_mask=None, past_key_values=cache)
        assert record.calls[KEY] == calls
    assert Cache.cache_kwargs[0]["cos"] is angles[0]


def test_angles_of_a_part_of_the_channels():
    """Refused where a configuration says so, and left to the model where only a call does."""
    stock, ours, _ = rotated_pair()
    rotate = type(stock.model.rotary_emb).forward

    def narrow(self, *args, **kwargs):
        return tuple(angle[..., :-1] for angle in rotate(self, *args, **kwargs))

    for model in (stock, ours):
        model.model.rotary_emb.forward = narrow.__get__(model.model.rotary_emb)
        with pytest.raises(RuntimeError, match="size"):
            loss_of(model)
    other = build("qwen3")
    other.config.rope_parameters["partial_rotary_factor"] = 0.5
    report = patch(other, **{KEY: True})
    reasons = {s.reason for s in report.skipped if s.op == KEY}
    assert (reasons, report.count(KEY)) == ({"only a part of its channels turns"}, 0)


def scaled_queries(self, hidden_states, position_embeddings, attention_mask, **kwargs):
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q = 2 * self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
    k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
    v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return self.o_proj(y.transpose(1, 2).flatten(2)), None


def test_code_between_norm_and_rotation():
    """The forward of a replica is compared, so scaled queries are no form of the operator."""
    model = build("qwen3")
    for attention in attentions(model):
        attention.__class__ = type("Scaled", (type(attention),), {"forward": scaled_queries})
    assert not patch(model, **{KEY: True}).count(KEY)


# --- by default ---


def test_default_without_match_is_silent():
    """Both operators run apart there, which is what a model without the key has."""
    other = build("qwen3")
    other.config.rope_parameters["partial_rotary_factor"] = 0.5
    for model in (build("llama"), other):
        report = patch(model, strict=True)
        assert not report.count(KEY)
        assert not [s for s in report.skipped if s.op == KEY]
        with pytest.raises(PatchError, match=r"no module of this kind|a part of its channels"):
            patch(model, strict=True, **{KEY: True})


@pytest.mark.parametrize("op", ["rms_norm", "rope"])
def test_a_backend_named_for_one_of_both_operators_is_binding(op):
    stock, ours, report = rotated_pair("qwen3", **{op: "reference"})
    assert not report.count(KEY)
    assert not calls_in_a_step(stock, ours)[KEY]
    assert patch(ours, **{op: "reference", KEY: True}).count(KEY)
    assert not patch(ours, **{op: False}).count(KEY)


def test_a_backend_named_for_the_key_serves_it():
    """More than what is configured, here one that a CPU does not have."""
    _, named, _ = rotated_pair("qwen3", **{KEY: "reference", "rms_norm": "reference"})
    _, unnamed, _ = rotated_pair("qwen3")
    with use(**{KEY: "triton"}):
        loss_of(named)
        with pytest.raises(RuntimeError, match="triton"):
            loss_of(unnamed)


def test_norms_too_wide_for_the_kernel():
    """A norm of all heads is one row."""
    for heads, together in ((64, True), (80, False)):
        config = transformers.Olmo2Config(
            hidden_size=128 * heads,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=heads,
            vocab_size=8,
            pad_token_id=0,
        )
        with torch.device("meta"):
            model = transformers.Olmo2ForCausalLM(config)
        assert patch(model).count(KEY) == together


def test_equal_layers_are_tried_once(monkeypatch):
    """Their numbers differ, which no forward reads before it has a cache."""
    tried = recorded(monkeypatch, rotated, "_refusal")
    model = build("qwen3", num_hidden_layers=4)
    assert patch(model).count(KEY) == 4
    assert len(tried) == 1
    attentions(model)[2].scaling = 0.5
    patch(model)
    assert len(tried) == 3


@pytest.mark.parametrize("whole", [False, True])
def test_bad_input(whole):
    x, angle = torch.randn(2, 4, 3, 8), torch.randn(3, 8)
    weight = torch.ones(32 if whole else 8)
    good = {"x": x, "weight": weight, "cos": angle, "sin": angle}
    for name, value, said in (
        ("x", x[0], "shape"),
        ("weight", torch.ones(9), r"\(8,\), or \(32,\)"),
        ("cos", angle[:, :4], "same shape|as wide"),
        ("x", x.long(), "floating-point"),
    ):
        with pytest.raises((ValueError, TypeError), match=said):
            ops.rms_norm_rope(**{**good, name: value})
    with pytest.raises(ValueError, match="casting"):
        ops.rms_norm_rope(**good, casting="factor")
    with pytest.raises(ValueError, match="gradient"):
        ops.rms_norm_rope(x, weight, angle.clone().requires_grad_(), angle)
