"""``attn_implementation="liger_multi"`` equals eager: loss, gradients, padding, packing, caches."""

import copy
import gc
import weakref

import pytest
import torch

from liger_multi import ops
from liger_multi.errors import ConfigurationError
from liger_multi.patching import register_attention, unregister_attention
from liger_multi.patching.attention import interface as attention
from tests.comparing import assert_same_gradients

transformers = pytest.importorskip("transformers")

KINDS = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 3},
    "gemma2": {"sliding_window": 3, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gpt_oss": {
        "sliding_window": 3,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": None,
    },
}
CLASSES = {"llama": "Llama", "qwen3": "Qwen3", "mistral": "Mistral", "gemma2": "Gemma2"}
IDS = torch.arange(2 * 13).reshape(2, 13).mul(37).remainder(61)


@pytest.fixture(autouse=True)
def registered():
    register_attention()
    yield
    unregister_attention()


def pair(model_type, dtype=torch.float32, **config):
    """An eager model and one with our attention, of the same weights."""
    name = CLASSES.get(model_type, "GptOss")
    configuration = getattr(transformers, f"{name}Config")(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        **{"attention_dropout": 0.0, **KINDS[model_type], **config},
    )
    configuration._attn_implementation = "eager"
    torch.manual_seed(0)
    eager = getattr(transformers, f"{name}ForCausalLM")(configuration).to(dtype)
    with torch.no_grad():  # scores far from 0, and sinks that matter
        for parameter_name, parameter in eager.named_parameters():
            if parameter_name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(8)
            if parameter_name.endswith("sinks"):
                parameter.normal_()
    other = copy.deepcopy(eager)
    other.set_attn_implementation("liger_multi")
    return eager, other


def padded(mask):
    """A padded batch: labels ignore padding, whose queries see no key here and all in eager."""
    before = torch.cat([mask[:, :1], mask[:, :-1]], 1)
    labels = IDS.masked_fill((mask == 0) | (before == 0), -100)
    return {"input_ids": IDS, "attention_mask": mask, "labels": labels}


def calls(monkeypatch):
    observed = []

    def spy(*args, **kwargs):
        observed.append(kwargs.get("ranges"))
        return ops.attention(*args, **kwargs)

    monkeypatch.setattr(attention, "attention", spy)
    return observed


def same(eager, other, **batch):
    """Losses and all gradients are equal; those of the model with our attention."""
    results = []
    for model in (eager, other):
        model.zero_grad()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        results.append((loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}))
    (expected, grads), (loss, got) = results
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert_same_gradients(got, grads)
    return expected


@pytest.mark.parametrize("model_type", KINDS)
def test_training_equals_eager(model_type, monkeypatch):
    eager, other = pair(model_type)
    observed = calls(monkeypatch)
    same(eager, other, input_ids=IDS, labels=IDS)
    assert len(observed) == 2


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model_type", KINDS)
def test_padded_batches_equal_eager(model_type, side, monkeypatch):
    eager, other = pair(model_type)
    observed = calls(monkeypatch)
    mask = torch.ones_like(IDS)
    mask[1, :4] = 0
    mask = mask if side == "left" else mask.flip(-1)
    same(eager, other, **padded(mask))
    assert all(ranges is not None and ranges.shape[-1] == 2 for ranges in observed)


# gpt_oss of transformers hands no positions to its masks: its packed sequences see each other
@pytest.mark.parametrize(
    "model_type", [model_type for model_type in KINDS if model_type != "gpt_oss"]
)
def test_packed_sequences_equal_eager(model_type, monkeypatch):
    eager, other = pair(model_type)
    observed = calls(monkeypatch)
    places = torch.tensor([[*range(4), *range(6), *range(3)], [*range(9), *range(1), *range(3)]])
    loss = same(eager, other, input_ids=IDS, position_ids=places, labels=IDS)
    assert all(ranges.shape == (2, 13, 2) for ranges in observed)
    whole = eager(input_ids=IDS, labels=IDS).loss
    assert (whole - loss).abs() > 1e-4  # the packing mattered


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("model_type", KINDS)
def test_generation_equals_eager(model_type, cache):
    eager, other = (model.eval() for model in pair(model_type))
    mask = torch.ones_like(IDS)
    mask[1, :5] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    expected, got = (m.generate(IDS, attention_mask=mask, **options) for m in (eager, other))
    assert torch.equal(expected.sequences, got.sequences)
    torch.testing.assert_close(
        torch.stack(got.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4
    )


def test_a_hole_in_the_padding_becomes_two_ranges(monkeypatch):
    eager, other = pair("llama")
    observed = calls(monkeypatch)
    mask = torch.ones_like(IDS)
    mask[0, 5:8] = 0
    same(eager, other, **padded(mask))
    assert all(ranges.shape == (2, 13, 4) for ranges in observed)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss"])
def test_any_other_mask_stays_dense_and_equal(model_type, monkeypatch, caplog):
    monkeypatch.setattr(attention, "_said", set())
    eager, other = pair(model_type, sliding_window=64)
    observed = calls(monkeypatch)
    mask = torch.ones_like(IDS)
    mask[0, [2, 3, 6, 9]] = 0
    with caplog.at_level("WARNING", logger="liger_multi"):
        same(eager, other, **padded(mask))
    assert not observed
    said = [r.message for r in caplog.records if "stays dense" in r.message]
    assert len(said) == 1
    assert "(2, 1, 13, 13)" in said[0]


def test_masks_in_parts_are_the_same(monkeypatch):
    eager, other = pair("mistral")
    monkeypatch.setattr(attention, "ELEMENTS", 2 * 13 * 3)
    mask = torch.ones_like(IDS)
    mask[1, :4] = 0
    same(eager, other, **padded(mask))


def test_plain_causal_training_has_no_mask(monkeypatch):
    _, other = pair("llama")
    observed = calls(monkeypatch)
    other(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS)
    assert observed == [None, None]


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss"])
def test_gradient_checkpointing_equals_eager(model_type):
    eager, other = pair(model_type)
    other.gradient_checkpointing_enable({"use_reentrant": False})
    other.train()
    mask = torch.ones_like(IDS)
    mask[1, :4] = 0
    same(eager, other, **padded(mask))


def test_dropout_and_unknown_changes_of_scores_are_refused():
    _, other = pair("llama", attention_dropout=0.1)
    with pytest.raises(ValueError, match=r"no dropout of probabilities, got 0\.1"):
        other.train()(input_ids=IDS)
    other.eval()(input_ids=IDS)
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="does not support position_bias"):
        attention.forward(torch.nn.Module(), q, q, q, None, position_bias=q)


def test_registration_leaves_nothing_when_undone():
    from transformers import AttentionInterface, AttentionMaskInterface

    unregister_attention()
    before = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    register_attention()
    register_attention()
    unregister_attention()
    assert before == (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)
    AttentionInterface.register("liger_multi", test_registration_leaves_nothing_when_undone)
    try:
        with pytest.raises(ConfigurationError, match="another 'liger_multi'"):
            register_attention()
        unregister_attention()  # what is not ours stays
        assert "liger_multi" in AttentionInterface._global_mapping
    finally:
        del AttentionInterface._global_mapping["liger_multi"]


def test_a_model_is_freed(monkeypatch):
    _, other = pair("llama")
    other(input_ids=IDS, labels=IDS).loss.backward()
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None


def test_a_patched_model_too():
    import liger_multi

    eager, other = pair("llama")
    with liger_multi.patched(other):
        same(eager, other, input_ids=IDS, labels=IDS)


@pytest.mark.slow
def test_graph_checks_causal_mask_once_per_pass(monkeypatch):
    """Else it could not take the kernels of plain causal masks that an eager model takes."""
    from liger_multi.reference.attention import attention as kernels

    met, old = [], kernels.seen_keys

    def spy(q, k, ranges, *others):
        met.append(ranges)
        return old(q, k, ranges, *others)

    monkeypatch.setattr(kernels, "seen_keys", spy)
    eager, other = pair("llama")
    torch._dynamo.reset()
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for pads in (0, 4):
        met.clear()
        mask = torch.ones_like(IDS)
        mask[1, :pads] = 0
        batch = {**padded(mask), "use_cache": False}
        loss = compiled(**batch).loss
        loss.backward()
        torch.testing.assert_close(loss, eager(**batch).loss, rtol=1e-5, atol=1e-6)
        assert len(met) == 4, "two layers, forward and backward"
        assert all(ranges is met[0] for ranges in met)
        assert getattr(met[0], kernels.MARK) is (pads == 0)


def test_one_graph_with_padding():
    eager, other = pair("mistral")
    torch._dynamo.reset()
    mask = torch.ones_like(IDS)
    mask[1, :4] = 0
    batch = {**padded(mask), "use_cache": False}
    expected = eager(**batch).loss
    loss = torch.compile(other, backend="aot_eager", fullgraph=True)(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
