"""Norms of queries and keys that are computed with their rotation: QK-norm and RoPE."""
# ruff: noqa: E402  (what needs transformers is imported after the skip)

import copy

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from liger_multi import ops, use
from liger_multi.errors import PatchError
from liger_multi.patching import patch, unpatch
from liger_multi.patching import rotated_norms as rotated
from tests.models import (
    adapters,
    assert_same_training,
    assert_unpatched,
    batch,
    build,
    patched_copy,
)
from tests.sweep.run import executed

KINDS = ("qwen3", "gemma3_text", "olmo2")
KEY = "rms_norm_rope"
every = pytest.mark.parametrize("model_type", KINDS)


def pair(model_type="qwen3", **options):
    """A model and a patched one, of which norms are not ones."""
    stock = build(model_type)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            if "_norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    ours = copy.deepcopy(stock)
    return stock, ours, patch(ours, **options)


def loss_of(model):
    return model(**batch()).loss


def calls_of(stock, ours, run=loss_of):
    """The calls of operators in a step that equals the unpatched one."""
    with executed(ours) as record:
        assert_same_training(stock, ours, run)
    return record.calls


def attentions(model):
    return [m for n, m in model.named_modules() if n.endswith("self_attn")]


@every
def test_numbers_are_those_of_both_operators(model_type):
    """The reference rounds where both do, so in bf16 every bit of the logits is equal."""
    stock, ours, _ = pair(model_type)
    apart = patched_copy(stock, **{KEY: False})
    for model in (ours, apart):
        model.bfloat16().eval()
    with torch.no_grad():
        actual, expected = (m(input_ids=batch()["input_ids"]).logits for m in (ours, apart))
    assert torch.equal(actual, expected)


@every
def test_the_classes_come_back(model_type):
    stock, ours, _ = pair(model_type)
    patched = [type(m) for m in attentions(ours)]
    patch(ours, **{KEY: False})
    apart = [type(m) for m in attentions(ours)]
    assert all(a is not b for a, b in zip(patched, apart, strict=True))
    assert not calls_of(stock, ours)[KEY]
    report = patch(ours)
    assert [type(m) for m in attentions(ours)] == patched
    again = patch(ours)
    assert {e.status for e in again.entries if e.op == KEY} == {"already patched"}
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
        calls = calls_of(stock, ours)
        assert (calls[KEY], calls["lora_qkv"], calls["rope"]) == (4, 2, 0)
    assert {e.status for e in report.entries if e.op == KEY} == {"already patched"}
    for options, counts in (({KEY: False}, (0, 2)), ({"lora": False}, (4, 0))):
        patch(ours)
        patch(ours, **options)
        calls = calls_of(stock, ours)
        assert (calls[KEY], calls["lora_qkv"]) == counts
    unpatch(ours)
    assert [type(m) for m in attentions(ours)] == kinds


def test_other_names_of_the_norms():
    stock = transformers.Lfm2ForCausalLM(
        transformers.Lfm2Config(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=223,
            layer_types=["full_attention"],
            pad_token_id=0,
        )
    )
    ours = copy.deepcopy(stock)
    assert patch(ours).count(KEY) == 1
    assert calls_of(stock, ours)[KEY] == 2


def _in_rows(model):
    with use(deterministic="rows"):
        return loss_of(model)


def _packed(model):
    ids = batch()["input_ids"][:1]
    positions = torch.cat([torch.arange(5), torch.arange(ids.shape[1] - 5)])[None]
    return model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss


@every
@pytest.mark.parametrize("run", [_in_rows, _packed])
@pytest.mark.parametrize("frozen", [False, True])
def test_in_other_surroundings(model_type, run, frozen):
    stock, ours, _ = pair(model_type)
    for model in (stock, ours):
        for attention in attentions(model) if frozen else ():
            attention.q_norm.requires_grad_(False)
            attention.k_norm.requires_grad_(False)
    calls = calls_of(stock, ours, run)
    assert calls[KEY] >= 2 * len(attentions(ours))  # a packed row is tried in short ones
    assert not calls["rope"]


def test_sharded_queries_are_left_to_the_model(one_process):
    """Queries that are DTensors: the norm and the rotary function of the model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module
    from torch.distributed.tensor.experimental import implicit_replication

    stock, ours, _ = pair("olmo2")
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
    stock, ours, _ = pair()
    for attention in (*attentions(stock), *attentions(ours)):
        CHANGES[change](attention)
    assert not calls_of(stock, ours)[KEY]


@pytest.mark.parametrize(
    ("name", "other"),
    [("apply_rotary_pos_emb", lambda q, k, *rest: (q, k)), ("rotate_half", lambda x: 2 * x)],
)
def test_rotary_functions_replaced_later(name, other, monkeypatch):
    stock, ours, _ = pair()
    monkeypatch.setattr(modeling_qwen3, name, other)
    assert not calls_of(stock, ours)[KEY]


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
    stock, ours, _ = pair()
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
    assert {s.reason for s in report.skipped if s.op == KEY} == {
        "only a part of its channels turns"
    }
    assert not report.count(KEY)


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
    stock, ours, report = pair("qwen3", **{op: "reference"})
    assert not report.count(KEY)
    assert not calls_of(stock, ours)[KEY]
    assert patch(ours, **{op: "reference", KEY: True}).count(KEY)
    assert not patch(ours, **{op: False}).count(KEY)


def test_a_backend_named_for_the_key_serves_it():
    """More than what is configured, here one that a CPU does not have."""
    _, named, _ = pair("qwen3", **{KEY: "reference", "rms_norm": "reference"})
    _, unnamed, _ = pair("qwen3")
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
    tried = []
    measured = rotated._refusal
    monkeypatch.setattr(
        rotated, "_refusal", lambda *inputs: tried.append(inputs) or measured(*inputs)
    )
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
