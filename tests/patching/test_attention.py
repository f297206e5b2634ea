"""``attn_implementation="liger_multi"`` equals eager attention or refuses, and sees no future."""

# ruff: noqa: E402  (what needs transformers is imported after the skip)

import copy
import gc
import inspect
import json
import os
import pickle
import weakref
from pathlib import Path

import pytest
import torch
from packaging import version
from torch import nn

transformers = pytest.importorskip("transformers")

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils

import liger_multi
from liger_multi.errors import ConfigurationError, PatchError
from liger_multi.patching import register_attention, unregister_attention
from liger_multi.patching.attention import (
    interface as attention,
    sparse,
    support as attention_support,
)
from liger_multi.patching.attention.interface import KeyMask, MaskReadError, mask
from tests import harness
from tests.comparing import assert_same_gradients, gradients, recorded
from tests.models import (
    Calls,
    adapters,
    assert_same_compiled,
    assert_same_training,
    build,
    continued,
    patched_copy,
)
from tests.sweep import cases
from tests.sweep.attention import OURS, REFUSAL, Verdict, counted, judge
from tests.sweep.cases import _small, registered

PAIRS = registered()
LATEST = version.parse(transformers.__version__) >= version.parse("5.23")
"""Others have models that call the interface and models that do not; each is equal or refused."""
ROOT = Path(__file__).parents[2]
IDS = torch.arange(2 * 11).reshape(2, 11).mul(37).remainder(199).add(5)
PADDED = torch.ones_like(IDS)
PADDED[0, :4] = 0


@pytest.fixture(autouse=True)
def registration():
    register_attention()
    yield
    unregister_attention()


# --- every model type ---

SERVED = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "paligemma": "PaliGemmaForConditionalGeneration",
    "gpt2": "GPT2LMHeadModel",
    "codegen": "CodeGenForCausalLM",
    "gptj": "GPTJForCausalLM",
    "bart": "BartForConditionalGeneration",
    "bigbird_pegasus": "BigBirdPegasusForCausalLM",
    "nllb-moe": "NllbMoeForConditionalGeneration",
    "pegasus_x": "PegasusXForConditionalGeneration",
    "encoder-decoder": "EncoderDecoderModel",
    "bert": "BertForMaskedLM",
    "modernbert": "ModernBertForMaskedLM",
    "chameleon": "ChameleonForConditionalGeneration",
}
REFUSED = {
    "bloom": "BloomForCausalLM",
    "xglm": "XGLMForCausalLM",
    "gpt_neo": "GPTNeoForCausalLM",
    "falcon": "FalconForCausalLM",
    "mpt": "MptForCausalLM",
    "roformer": "RoFormerForCausalLM",
    "deberta": "DebertaForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "bigbird_pegasus": "BigBirdPegasusForConditionalGeneration",
    "t5gemma2": "T5Gemma2ForConditionalGeneration",
    "deepseek_v32": "DeepseekV32ForCausalLM",
}


def verdict(model_type, cls):
    actual = [p for p in PAIRS if (p.type, p.cls) == (model_type, cls)]
    if not actual:
        pytest.skip(f"this transformers has no {model_type}")
    return judge(actual[0])


@pytest.mark.parametrize(
    ("model_type", "cls", "status"),
    [
        *((*served, "served") for served in SERVED.items()),
        *((*refused, "refused") for refused in REFUSED.items()),
    ],
)
def test_models_equal_eager_or_are_refused(model_type, cls, status):
    """Models with attention of their own are refused."""
    actual = verdict(model_type, cls)
    assert actual.status in ((status,) if LATEST else ("served", "refused")), actual.why
    if actual.status == "refused":
        assert "'eager'" in actual.why
    elif LATEST:
        assert actual.causal == (actual.kind != "masked")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="every pair runs in a fork")
def test_all_model_types_equal_eager_or_are_refused(tmp_path):
    file = tmp_path / "verdicts.json"
    done = harness.python("-m", "tests.sweep", "--attention", "--json", file, code=None)
    assert file.exists(), done.stdout + done.stderr
    actual = [Verdict(**fields) for fields in json.loads(file.read_text())]
    assert not [f"{v.type}/{v.cls}: {v.why}" for v in actual if v.status == "wrong"]
    served = [v for v in actual if v.status == "served"]
    assert len(served) > 0.7 * len(actual)
    assert sum(v.causal for v in served) > 0.55 * len(actual)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        ("RecurrentGemma", {"lru_width": 32, "attention_window_size": 4, "head_dim": 8}),
        (
            "GraniteMoeHybrid",
            {
                "layer_types": ["attention"] * 3,
                "shared_intermediate_size": 48,
                "num_local_experts": 0,
                "num_experts_per_tok": 0,
                "mamba_n_heads": 8,
                "mamba_n_groups": 1,
                "mamba_d_head": 8,
            },
        ),
    ],
)
def test_layers_outside_the_sweep(cls, options):
    config = getattr(transformers, f"{cls}Config")(**{**TINY, "num_hidden_layers": 3, **options})
    model_class = getattr(transformers, f"{cls}ForCausalLM")
    eager = model_class._from_config(config, attn_implementation="eager")
    other = copy.deepcopy(eager.eval())
    other.set_attn_implementation(OURS)
    if other.config._attn_implementation != OURS:
        pytest.skip(f"{cls} of this transformers takes no other attention")
    for padded in (torch.ones_like(IDS), PADDED):
        with counted() as calls:
            actual, expected = (m(IDS, attention_mask=padded).logits for m in (other, eager))
        visible = padded.bool()
        torch.testing.assert_close(actual[visible], expected[visible], rtol=1e-4, atol=1e-5)
        assert calls


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("case", ["llama", "mistral", "gemma2", "gemma3_text", "gpt_oss"])
def test_a_prompt_in_pieces_through_a_cache_equals_eager(case, padding):
    eager = build(case, sliding_window=4, attn_implementation="eager").eval()
    eager.config.output_router_logits = False  # their loss wants masks of one length
    other = copy.deepcopy(eager)
    other.set_attn_implementation(OURS)
    mask, results = PADDED if padding else torch.ones_like(IDS), []
    for model in (eager, other):
        cache, parts = {}, []
        for start, end in ((0, 6), (6, 9), (9, 10), (10, 11)):
            output = model(IDS[:, start:end], attention_mask=mask[:, :end], use_cache=True, **cache)
            cache = continued(model, output)
            parts.append(output.logits)
        results.append(torch.cat(parts, 1)[mask.bool()])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


# --- who may ask ---


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        ("Bloom", "BloomForCausalLM: it has attention of its own"),
        ("Git", "GitForCausalLM: it picks attention classes from a table of its own, GIT_SELF_ATT"),
    ],
)
def test_refusal_names_class_and_missing_part(cls, reason):
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2} if cls == "Git" else {"n_layer": 1}
    config = getattr(transformers, f"{cls}Config")(hidden_size=32, n_head=2, **sizes)
    config._attn_implementation = OURS
    with pytest.raises(ValueError, match=reason) as error:
        getattr(transformers, f"{cls}ForCausalLM")(config)
    assert REFUSAL in str(error.value)
    assert "use 'sdpa' where the model supports it, or 'eager'" in str(error.value)


def test_another_name_and_parts_of_a_model():
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **TINY}, vision_config={**VISION}, image_token_index=3
    )
    config._attn_implementation = {"text_config": OURS, "vision_config": "eager"}
    model = transformers.LlavaForConditionalGeneration(config)
    actual = {m.config.model_type: m.config._attn_implementation for m in parts(model)}
    assert (actual["llama"], actual["clip_vision_model"]) == (OURS, "eager")
    register_attention("other")
    try:
        model.set_attn_implementation("other")
        assert {m.config._attn_implementation for m in parts(model)} == {"other"}
        with pytest.raises(ValueError, match="attn_implementation='other' cannot serve Bloom"):
            transformers.BloomModel._from_config(
                transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=2),
                attn_implementation="other",
            )
    finally:
        unregister_attention("other")


def test_a_refused_part_can_stay_eager():
    config = transformers.EncoderDecoderConfig(
        encoder=_small("bert").to_dict(),
        decoder=_small("xglm", is_decoder=True, add_cross_attention=True).to_dict(),
    )
    config._attn_implementation = OURS
    with pytest.raises(ValueError, match="cannot serve XGLMForCausalLM"):
        transformers.EncoderDecoderModel(config)
    config._attn_implementation = {"encoder": OURS, "decoder": "eager"}
    model = transformers.EncoderDecoderModel(config).eval()
    assert model.encoder.config._attn_implementation == OURS
    actual = model(input_ids=IDS, decoder_input_ids=IDS).logits
    model.encoder.set_attn_implementation("eager")
    expected = model(input_ids=IDS, decoder_input_ids=IDS).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


TINY = {
    "vocab_size": 211,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
    "projection_dim": 32,
}


def parts(model):
    return [m for m in model.modules() if isinstance(m, PreTrainedModel)]


def eager_attention_forward(
    module, query, key, value, attention_mask, scaling, dropout, alibi_slopes=None, **kwargs
):
    """An eager attention of ReLU, not softmax, with keyword arguments of its own."""
    p = torch.relu(query @ key.mT * scaling)
    assert kwargs.get("indices") is None
    if attention_mask is not None:
        p = p.masked_fill(attention_mask < 0, 0)
    return (p @ value).transpose(1, 2), p


class ReluAttention(nn.Module):
    def forward(self, q, k, v, attention_mask=None):
        attention = ALL_ATTENTION_FUNCTIONS.get("eager", eager_attention_forward)
        return attention(self, q, k, v, attention_mask, 1.0, 0.0)


ALL_ATTENTION_FUNCTIONS = AttentionInterface()


class ReluModel(PreTrainedModel):
    """A model of somebody else, which calls the interface beside an eager attention of its own."""

    config_class = transformers.LlamaConfig
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.attention = ReluAttention()


def test_eager_attention_without_softmax_is_refused():
    config = transformers.LlamaConfig(**TINY)
    ReluModel._from_config(config, attn_implementation="sdpa")
    with pytest.raises(ValueError, match="ReluModel: its eager_attention_forward computes some"):
        ReluModel._from_config(config, attn_implementation=OURS)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_check_holds_while_a_model_is_loaded(device):
    """Models are loaded on the meta device and in the dtype of the checkpoint."""
    attention_support._other_than_softmax.cache_clear()
    config = transformers.LlamaConfig(**TINY)
    with torch.device(device), torch.autocast("cpu"):
        transformers.LlamaForCausalLM._from_config(
            config, attn_implementation=OURS, dtype=torch.bfloat16
        )


def test_the_check_of_transformers_comes_back():
    unregister_attention()
    stock = PreTrainedModel.get_correct_attn_implementation
    assert not attention_support._original
    register_attention()
    register_attention("other")
    register_attention()
    unregister_attention()
    assert PreTrainedModel.get_correct_attn_implementation is not stock
    unregister_attention("other")
    assert PreTrainedModel.get_correct_attn_implementation is stock


# --- masks that only our attention reads ---


def key_mask(causal=True, **options):
    direction = "causal" if causal else "bidirectional"
    options["mask_function"] = getattr(masking_utils, f"{direction}_mask_function")
    if "cache_position" in inspect.signature(masking_utils.sdpa_mask).parameters:  # an older one
        options["cache_position"] = torch.arange(5)
    else:
        options |= {"q_length": 5, "device": torch.device("cpu")}
    return mask(2, 5, **options)


MASKS = {
    "causal": {},
    "all": {"causal": False, "allow_is_bidirectional_skip": True},
    "ranges": {"attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()},
    "dense": {"attention_mask": torch.tensor([[1, 0, 1, 0, 1], [1, 1, 1, 1, 1]]).bool()},
}
SCORES = torch.zeros(2, 4, 5, 5)
READERS = {
    "add": lambda m: SCORES + m,
    "radd": lambda m: m + SCORES,
    "iadd": lambda m: SCORES.clone().add_(m),
    "item": lambda m: m[:, :, :, :5],
    "assign": lambda m: m.__setitem__(0, 0),
    "where": lambda m: torch.where(m, SCORES, -1.0),
    "masked_fill": lambda m: SCORES.masked_fill(m, 0.0),
    "cat": lambda m: torch.cat([m, SCORES], -1),
    "invert": lambda m: ~m,
    "equal": lambda m: m == 0,
    "truth": lambda m: bool(m),
    "dtype": lambda m: m.dtype,
    "method": lambda m: m.expand(2, 4, 5, 5),
    "iterate": lambda m: list(m),
    "sdpa": lambda m: nn.functional.scaled_dot_product_attention(
        SCORES, SCORES, SCORES, attn_mask=m
    ),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("case", MASKS)
def test_a_mask_raises_for_everybody_else(case, reader):
    with pytest.raises(MaskReadError, match=r"must only hand it to transformers' AttentionInt"):
        READERS[reader](key_mask(**MASKS[case]))


@pytest.mark.parametrize("case", MASKS)
def test_a_mask_is_complete(case):
    """It is never None, moves, and survives copies and pickling."""
    actual = key_mask(**MASKS[case])
    assert isinstance(actual, KeyMask)
    assert (actual.shape, actual.plain) == ((2, 1, 5, 5), case in ("causal", "all"))
    for other in (actual.to("cpu"), copy.deepcopy(actual), pickle.loads(pickle.dumps(actual))):
        assert repr(other) == repr(actual)
        for name in ("ranges", "dense"):
            before, after = getattr(actual, name), getattr(other, name)
            assert (before is None and after is None) or torch.equal(before, after)
    q, v = torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4)
    expected = torch.ones(2, 1, 5, 5).tril(5 if case == "all" else 0).bool()
    if "attention_mask" in MASKS[case]:
        expected = expected & MASKS[case]["attention_mask"][:, None, None]
    reference = (
        torch.softmax((q @ q.mT / 2).masked_fill(~expected, -torch.inf), -1) @ v
    ).nan_to_num()
    y = attention.forward(nn.Module(), q, q, v, actual)[0].transpose(1, 2)
    torch.testing.assert_close((y * expected.any(-1)[..., None]), reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("reader", ["add", "item", "where", "dtype", "sdpa"])
def test_compiled_model_reading_the_mask_raises(reader, fullgraph):
    class Reader(nn.Module):
        def forward(self, scores):
            return READERS[reader](key_mask()), scores

    with pytest.raises(Exception, match="reads the attention mask itself"):
        torch.compile(Reader(), backend="eager", fullgraph=fullgraph)(SCORES)


@pytest.mark.slow
def test_compiled_step_takes_earlier_mask():
    from torch._dynamo.testing import CompileCounter

    eager = build("llama").eval()
    other = copy.deepcopy(eager)
    other.set_attn_implementation(OURS)
    steps = CompileCounter()
    other.forward = torch.compile(other.forward, backend=steps, fullgraph=True)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"cache_implementation": "static", "disable_compile": True}
    expected, got = (m.generate(IDS, attention_mask=PADDED, **options) for m in (eager, other))
    assert torch.equal(expected, got)
    assert steps.frame_count <= 2, "prefill and decoding"


@pytest.mark.slow
def test_a_compiled_model_with_checkpoints_and_padding():
    other = build("llama")
    other.set_attn_implementation(OURS)
    labels = IDS.masked_fill(PADDED == 0, -100)
    labels[0, 4] = -100
    batch = {"input_ids": IDS, "attention_mask": PADDED, "labels": labels, "use_cache": False}
    expected = other(**batch).loss
    other.gradient_checkpointing_enable({"use_reentrant": False})
    loss = torch.compile(other, backend="aot_eager")(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


# --- what our attention is given ---


class Causal(nn.Module):
    is_causal = True


Q, SHORT = torch.randn(2, 2, 5, 4), torch.randn(2, 2, 3, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"position_bias": SCORES}, "does not support position_bias"),
        ({"alibi_slopes": SCORES[0, 0, 0]}, "does not support alibi_slopes"),
        ({"indices": IDS}, "does not support indices"),
        ({"score_mod": max}, "does not support score_mod"),
        ({"attention_mask": IDS}, r"broadcasts to \(2, 2, 5, 5\), got .*int64"),
        ({"attention_mask": torch.ones(2, 5)}, r"broadcasts to \(2, 2, 5, 5\)"),
        ({"attention_mask": torch.ones(2, 1, 5, 5).long()}, "of bool or floating dtype"),
        ({"attention_mask": torch.ones(2, 1, 5, 2).int()}, "of bool or floating dtype"),
        ({"attention_mask": torch.ones(2, 1, 5, 9)}, r"broadcasts to \(2, 2, 5, 5\)"),
        ({"attention_mask": torch.ones(3, 1, 5, 5).bool()}, r"broadcasts to \(2, 2, 5, 5\)"),
        ({"attention_mask": KeyMask((2, 1, 3, 5))}, "for 5 queries and 5 keys"),
        ({"attention_mask": KeyMask((3, 1, 5, 5))}, "batch 2"),
        ({"attention_mask": None, "sliding_window": 3}, "needs a mask for a window of 3 in 5 keys"),
        ({"attention_mask": None, "query": SHORT}, "needs a mask for 3 queries of 5 keys, got Non"),
        ({"attention_mask": None, "module": nn.Module()}, "is_causal as argument or attribute"),
        (
            {"attention_mask": KeyMask((2, 1, 5, 5), causal=True), "is_causal": False},
            "contradicts its mask",
        ),
        ({"attention_mask": KeyMask((2, 1, 5, 5)), "is_causal": True}, "contradicts its mask"),
        (
            {
                "attention_mask": KeyMask((2, 1, 5, 5), causal=True),
                "cu_seq_lens_q": torch.tensor([0, 2, 5]),
            },
            "cu_seq_lens_q of 2 sequences",
        ),
    ],
)
def test_ambiguous_masks_are_refused(arguments, message):
    usual = {"module": Causal(), "query": Q, "key": Q, "value": Q, "attention_mask": None}
    attention.forward(**usual)
    with pytest.raises(ValueError, match=message) as error:
        attention.forward(**{**usual, **arguments})
    assert REFUSAL in str(error.value)


@pytest.mark.parametrize("form", ["bool", "float", "one head", "all heads"])
def test_dense_masks_of_others_are_taken(form):
    visible = torch.rand(2, 2 if form == "all heads" else 1, 5, 5) > 0.4
    visible[..., 0] = True
    inputs = (
        visible if form != "float" else torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    )
    y = attention.forward(Causal(), Q, Q, Q, inputs)[0].transpose(1, 2)
    expected = nn.functional.scaled_dot_product_attention(Q, Q, Q, attn_mask=visible)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [*attention.HARMLESS, "token_type_ids"])
def test_keywords_unread_by_eager_change_nothing(name):
    inputs = {name: 2 if name == "sliding_window" else True}
    if name.startswith("cu_seq_lens"):
        inputs[name] = torch.tensor([0, 5])
    with_it, without = (
        attention.forward(Causal(), Q, Q, Q, key_mask(), **more)[0] for more in (inputs, {})
    )
    assert torch.equal(with_it, without)


def test_a_layer_without_eager_takes_known_keywords_only():
    layer = nn.Module()
    attention.forward(layer, Q, Q, Q, key_mask(), use_cache=True)
    with pytest.raises(ValueError, match="does not support token_type_ids, asked by Module"):
        attention.forward(layer, Q, Q, Q, key_mask(), token_type_ids=IDS)


def test_token_types_reach_a_compiled_model():
    """Tokenizers hand them to models that do not know them."""
    other = build("llama").eval()
    other.set_attn_implementation(OURS)
    batch = {"input_ids": IDS, "use_cache": False}
    expected = other(**batch).logits
    compiled = torch.compile(other, backend="eager", fullgraph=True)
    actual = compiled(**batch, token_type_ids=torch.zeros_like(IDS)).logits
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("is_causal", "attribute", "causal"),
    [(None, True, True), (None, False, False), (False, True, False), (True, False, True)],
)
def test_without_a_mask_the_layer_says_whether_it_is_causal(is_causal, attribute, causal):
    module = Causal()
    module.is_causal = attribute
    y = attention.forward(module, Q, Q, Q, None, is_causal=is_causal)[0].transpose(1, 2)
    expected = nn.functional.scaled_dot_product_attention(Q, Q, Q, is_causal=causal)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)


# ``attn_implementation="liger_multi"`` equals eager: loss, gradients, padding, packing, caches.


KINDS = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 3},
    "gemma2": {"sliding_window": 3, "attn_logit_softcapping": 2.0},
    "gpt_oss": {"sliding_window": 3, "output_router_logits": False},
}
TOKENS = torch.arange(2 * 13).reshape(2, 13).mul(37).remainder(61)


def pair(model_type, dtype=torch.float32, **config):
    config = {"attention_dropout": 0.0, **KINDS[model_type], **config}
    eager = build(model_type, tied=False, attn_implementation="eager", **config).to(dtype)
    with torch.no_grad():  # scores far from 0, and sinks that matter
        for name, parameter in eager.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(3)
            if name.endswith("sinks"):
                parameter.normal_()
    other = copy.deepcopy(eager)
    other.set_attn_implementation("liger_multi")
    return eager, other


def holes(row, places):
    mask = torch.ones_like(TOKENS)
    mask[row, places] = 0
    return mask


LEFT = holes(1, slice(4))


def padded(mask):
    """A padded batch: labels ignore padding, whose queries see no key here and all in eager."""
    before = torch.cat([mask[:, :1], mask[:, :-1]], 1)
    labels = TOKENS.masked_fill((mask == 0) | (before == 0), -100)
    return {"input_ids": TOKENS, "attention_mask": mask, "labels": labels}


@pytest.fixture
def calls(monkeypatch):
    return recorded(monkeypatch, attention, "attention")


PACKED = torch.tensor([[*range(4), *range(6), *range(3)], [*range(9), *range(1), *range(3)]])
PLAIN = {"input_ids": TOKENS, "labels": TOKENS}
BATCHES = {
    "plain": (PLAIN, (None, 2)),
    "ones": ({**PLAIN, "attention_mask": torch.ones_like(TOKENS)}, (None,)),
    "left": (padded(LEFT), (2,)),
    "right": (padded(LEFT.flip(-1)), (2,)),
    "packed": ({**PLAIN, "position_ids": PACKED}, (2,)),
    "hole": (padded(holes(0, slice(5, 8))), (4,)),
}
"""By name what a model gets, and numbers of ranges that a query may have."""


def same(eager, other, **batch):
    """Losses and all gradients are equal; the loss of the model with eager attention."""
    return assert_same_training(eager, other, lambda m: m(**batch, use_cache=False).loss)[0]


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        *((kind, name) for kind in KINDS for name in ("plain", "left", "right")),
        # gpt_oss hands no positions to its masks: its packed sequences see each other
        *((kind, "packed") for kind in KINDS if kind != "gpt_oss"),
        ("llama", "ones"),
        ("llama", "hole"),
    ],
)
def test_training_equals_eager(model_type, name, calls):
    eager, other = pair(model_type)
    batch, widths = BATCHES[name]
    loss = same(eager, other, **batch)
    observed = [options["ranges"] for _, options in calls]
    assert len(observed) == 2
    assert {None if ranges is None else ranges.shape[-1] for ranges in observed} <= {*widths}
    if name == "packed":
        assert (eager(**PLAIN).loss - loss).abs() > 1e-4, "the packing mattered"


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_packed_rows_of_a_model_whose_masks_get_no_positions(compiled):
    """The patched model keeps samples apart where eager gpt_oss does not."""
    eager, other = pair("gpt_oss")
    liger_multi.patch(other)
    run = other
    if compiled:
        run = torch.compile(other, backend="aot_eager", fullgraph=True, dynamic=True)
    length = 6
    positions = torch.cat([torch.arange(length), torch.arange(13 - length)])[None]
    labels = TOKENS.clone()
    labels[:, length] = -100
    batch = {"labels": labels, "use_cache": False}
    loss = run(input_ids=TOKENS, position_ids=positions, **batch).loss
    loss.backward()
    sums = [
        eager(input_ids=part, labels=part, use_cache=False).loss * part[:, 1:].numel()
        for part in (TOKENS[:, :length], TOKENS[:, length:])
    ]
    expected = sum(sums) / (labels[:, 1:] != -100).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert_same_gradients(gradients(other), gradients(eager))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("model_type", KINDS)
def test_generation_equals_eager(model_type, cache):
    eager, other = (model.eval() for model in pair(model_type))
    mask = holes(1, slice(5))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    expected, got = (m.generate(TOKENS, attention_mask=mask, **options) for m in (eager, other))
    assert torch.equal(expected.sequences, got.sequences)
    torch.testing.assert_close(
        torch.stack(got.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss"])
def test_any_other_mask_stays_dense_and_equal(model_type, monkeypatch, caplog, calls):
    monkeypatch.setattr(attention, "_warned", set())
    eager, other = pair(model_type, sliding_window=64)
    with caplog.at_level("WARNING", logger="liger_multi"):
        same(eager, other, **padded(holes(0, [2, 3, 6, 9])))
    assert not calls
    said = [r.message for r in caplog.records if "stays dense" in r.message]
    assert len(said) == 1
    assert "(2, 1, 13, 13)" in said[0]


def test_masks_in_parts_are_the_same(monkeypatch):
    eager, other = pair("mistral")
    monkeypatch.setattr(attention, "ELEMENTS", 2 * 13 * 3)
    same(eager, other, **padded(LEFT))


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss"])
def test_gradient_checkpointing_equals_eager(model_type):
    eager, other = pair(model_type)
    other.gradient_checkpointing_enable({"use_reentrant": False})
    other.train()
    same(eager, other, **padded(LEFT))


def test_dropout_is_refused():
    _, other = pair("llama", attention_dropout=0.1)
    with pytest.raises(ValueError, match=r"no dropout of probabilities, got 0\.1"):
        other.train()(input_ids=TOKENS)
    other.eval()(input_ids=TOKENS)
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="does not support position_bias"):
        attention.forward(torch.nn.Module(), q, q, q, None, position_bias=q)


def test_registration_leaves_nothing_when_undone():
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


def test_a_model_that_was_patched_is_freed():
    eager, other = pair("llama")
    with liger_multi.patched(other):
        same(eager, other, **PLAIN)
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_graph_checks_causal_mask_once_per_pass(monkeypatch):
    """Else it could not take the kernels of plain causal masks that an eager model takes."""
    from liger_multi.reference.attention import attention as kernels

    met = recorded(monkeypatch, kernels, "visible_keys")
    eager, other = pair("llama")
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for pads in (0, 4):
        met.clear()
        batch = {**padded(holes(1, slice(pads))), "use_cache": False}
        loss = compiled(**batch).loss
        loss.backward()
        torch.testing.assert_close(loss, eager(**batch).loss, rtol=1e-5, atol=1e-6)
        assert len(met) == 4, "two layers, forward and backward"
        first = met[0][0][2]
        assert all(arguments[2] is first for arguments, _ in met)
        assert getattr(first, kernels.MARK) is (pads == 0)


@pytest.mark.slow
def test_one_graph_with_padding():
    assert_same_compiled(*pair("mistral"), {**padded(LEFT), "use_cache": False})


# Layers whose indexer selects keys: patched and unpatched are equal, and single calls fall
# back.


FAST, SLOW = ("deepseek_v32", "glm_moe_dsa"), ("axk2", "dots3_note", "mistral_large4")
TYPES = (*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW))
CALLED = {"sparse_attention", "indexer_topk"}
SITUATIONS = [pytest.param(n, marks=pytest.mark.slow) for n in ("padded", "packed", "liger_multi")]
LENGTHS = (19, 1, 28)
SPARSE_TOKENS = sum(LENGTHS)
KEPT_KEYS = 5
"""Keys that an indexer selects, of up to 48."""


def built(model_type="deepseek_v32", **attributes):
    pair = cases.of_type(model_type, "")
    config = cases.configuration(pair)
    for part in cases._within(config):
        if hasattr(part, "index_topk"):
            part.index_topk, part.index_n_heads = KEPT_KEYS, 24
            for name, value in attributes.items():
                setattr(part, name, value)
    torch.manual_seed(0)
    model = getattr(transformers, pair.cls)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.train()


def batch(model, rows=2):
    ids = torch.randint(10, 60, (rows, SPARSE_TOKENS), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    if hasattr(model.config, "vision_config"):
        inputs["mm_token_type_ids"] = torch.zeros_like(ids)
    return inputs


def step(model, inputs):
    model.zero_grad()
    torch.manual_seed(0)
    loss = model(**inputs).loss
    loss.backward()
    return gradients(model) | {"loss": loss.detach()}


@pytest.fixture
def equal(monkeypatch):
    """Whether loss and gradients of two models agree; gives the operators that were called."""

    def compared(stock, model, inputs):
        expected = step(stock, inputs)
        with monkeypatch.context() as patches:
            calls = Calls(patches)
            actual = step(model, inputs)
        assert_same_gradients(actual, expected)
        return CALLED & set(calls)

    return compared


@pytest.mark.parametrize("model_type", [*FAST, *SLOW])
@pytest.mark.parametrize("situation", ["plain", *SITUATIONS])
def test_equals_the_unpatched_model(model_type, situation, equal):
    stock = built(model_type)
    model, inputs = copy.deepcopy(stock), batch(stock)
    report = liger_multi.patch(model)
    indexers = [name for name, _ in model.named_modules() if name.endswith(".indexer")]
    assert report.count("sparse_attention") == 2 * len(indexers) > 0
    if situation == "padded":
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][0, :9] = 0
        inputs["labels"] = inputs["labels"].masked_fill(inputs["attention_mask"] == 0, -100)
        inputs["labels"][0, 9] = -100
    if situation == "packed":
        inputs["position_ids"] = torch.cat([torch.arange(n) for n in LENGTHS]).expand(2, -1)
    if situation == "liger_multi":
        model.set_attn_implementation("liger_multi")
    assert equal(stock, model, inputs) == CALLED


@pytest.mark.parametrize("model_type", TYPES)
def test_samples_of_a_row_are_apart(model_type):
    model = built(model_type)
    liger_multi.patch(model)
    model.eval()
    inputs = batch(model, rows=1)
    inputs.pop("labels")
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    with torch.no_grad():
        packed = model(**inputs, position_ids=positions).logits[0, -LENGTHS[-1] :]
        last = {n: t[:, -LENGTHS[-1] :] if torch.is_tensor(t) else t for n, t in inputs.items()}
        torch.testing.assert_close(packed, model(**last).logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("model_type", TYPES)
def test_generates_the_same_tokens(model_type, cache, monkeypatch):
    stock = built(model_type).eval()
    model = patched_copy(stock)
    prompt = batch(stock)["input_ids"][:, :20]
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    options |= {"eos_token_id": None, "disable_compile": True}
    expected = stock.generate(prompt, **options)
    calls = Calls(monkeypatch)
    assert torch.equal(model.generate(prompt, **options), expected)
    assert set(calls) >= CALLED


def test_unpatch_is_exact():
    model = built()
    before = {n: (type(m), dict(vars(m))) for n, m in model.named_modules()}
    for ops in ({}, {"rope": False}, {"sparse_attention": False}, {}):
        liger_multi.patch(model, **ops)
    liger_multi.unpatch(model)
    for name, module in model.named_modules():
        module_class, attributes = before[name]
        assert type(module) is module_class
        assert vars(module).keys() == attributes.keys()


@pytest.mark.parametrize(
    "ops", [{}, {"rope": False}, {"rope": False, "rms_norm": False}], ids=["all", "rope", "alone"]
)
def test_it_can_be_turned_on_and_off(ops):
    """Beside other operators and alone; rotations stay patched where it goes."""
    model = built()
    first = {type(m) for m in model.modules()}
    liger_multi.patch(model, **ops, sparse_attention=False)
    off = {n: type(m) for n, m in model.named_modules()}
    liger_multi.patch(model, **ops)
    assert isinstance(model.model.layers[0].self_attn, sparse.SparseAttention)
    again = liger_multi.patch(model, **ops)
    assert {e.status for e in again.entries if e.op == "sparse_attention"} == {"already patched"}
    liger_multi.patch(model, **ops, sparse_attention=False)
    assert {n: type(m) for n, m in model.named_modules()} == off
    liger_multi.unpatch(model)
    assert {type(m) for m in model.modules()} == first


def test_copies_and_pickles_are_patched(equal):
    stock = built()
    model, inputs = patched_copy(stock), batch(stock)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert equal(stock, copied, inputs) == CALLED


def test_checkpointing_and_autocast(equal):
    stock = built()
    model, inputs = patched_copy(stock), batch(stock)
    for one in (stock, model):
        one.gradient_checkpointing_enable({"use_reentrant": False})
    assert equal(stock, model, inputs) == CALLED
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**inputs).loss
    loss.backward()
    assert loss.isfinite()


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_of_a_long_sequence_some_queries_are_absorbed_at_a_time(reentrant, equal, monkeypatch):
    stock = built()
    if reentrant is not None:
        stock.gradient_checkpointing_enable({"use_reentrant": reentrant})
        stock.enable_input_require_grads()
    model, inputs = patched_copy(stock), batch(stock)
    observed = recorded(monkeypatch, sparse, "_run", lambda q, *_: q.shape[2])
    assert equal(stock, model, inputs) == CALLED
    whole = list(observed)
    config = stock.config
    each = config.qk_rope_head_dim + 2 * config.kv_lora_rank
    rows, width = inputs["input_ids"].shape[0] * config.num_attention_heads, 4
    monkeypatch.setattr(sparse, "ABSORBED_BYTES", 20 * each * rows * width)
    observed.clear()
    assert equal(stock, model, inputs) == CALLED
    assert set(whole) == {SPARSE_TOKENS}
    assert set(observed) == {20, SPARSE_TOKENS % 20}
    with torch.no_grad():
        actual = model.eval()(**inputs).loss
    torch.testing.assert_close(actual, stock.eval()(**inputs).loss)


def test_adapters_on_latent_expansion(equal):
    """It runs by itself then: its weight alone no longer says what it computes."""
    stock = adapters(built(), ["kv_b_proj", "o_proj"])
    assert equal(stock, patched_copy(stock), batch(stock)) == CALLED


def test_the_backend_can_be_named():
    model = built()
    liger_multi.patch(model, sparse_attention="reference")
    assert model(**batch(model)).loss.isfinite()
    with pytest.raises(PatchError, match="sparse_attention must be True, False"):
        liger_multi.patch(model, sparse_attention=3)


@pytest.mark.parametrize("reason", ["eager", "dropout", "holes"])
def test_other_calls_are_left_to_the_module(reason, equal):
    """The operators are not called, and results are equal."""
    stock = built()
    model, inputs = patched_copy(stock), batch(stock)
    for one in (stock, model):
        if reason == "eager":
            one.set_attn_implementation("eager")
        for layer in one.model.layers if reason == "dropout" else ():
            layer.self_attn.attention_dropout = 1e-9  # its random numbers are drawn, in any case
    if reason == "holes":
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][0, 20:25] = 0
    assert not equal(stock, model, inputs)


@pytest.mark.slow
def test_compiled_graphs_run_the_module():
    stock = built().eval()
    model, inputs = patched_copy(stock, fused_linear_cross_entropy=False), batch(stock)
    with torch.no_grad():
        actual = torch.compile(model, backend="eager")(**inputs).loss
        torch.testing.assert_close(actual, stock(**inputs).loss)


def test_sinks_are_refused():
    report = liger_multi.patch(built("hy_v4"))
    reasons = {s.reason for s in report.skipped if s.op == "sparse_attention"}
    assert reasons == {"HYV4Attention has attention sinks, which sparse_attention does not know"}
    assert not report.count("sparse_attention")


@pytest.mark.parametrize("model_type", ["deepseek_v4", "qwen4_exp", "minimax_m3_vl", "glm5_next"])
def test_other_ways_to_select_are_said(model_type):
    pair = cases.of_type(model_type, "")
    config = cases.configuration(pair)
    for part in cases._within(config):
        if model_type == "minimax_m3_vl" and hasattr(part, "layer_types"):
            part.layer_types = ["full_attention", "minimax_m3_sparse"]
    model = getattr(transformers, pair.cls)(config)
    report = liger_multi.patch(model)
    owners = {n.rpartition(".")[0] for n, _ in model.named_modules() if n.endswith(".indexer")}
    said = {s.path: s.reason for s in report.skipped if s.op == "sparse_attention"}
    assert owners
    assert {p for p in owners if p in said} == owners
    assert not report.count("sparse_attention")
    report = liger_multi.patch(model, sparse_attention=False)
    assert not [s for s in report.skipped if s.op == "sparse_attention"]


def indexer_of(base, change):
    """An indexer of another class, with its own way to score."""

    class Other(base):
        def forward(
            self,
            hidden_states,
            q_resid,
            position_embeddings,
            attention_mask,
            position_ids,
            past_key_values=None,
        ):
            q = self.wq_b(q_resid).unflatten(-1, (self.n_heads, -1))
            k = self.wk(hidden_states)
            if past_key_values is not None:
                k = past_key_values.update_indexer(k, self.layer_idx)
            else:
                k = change.get("alone", lambda x: x)(k)
            keys = k.transpose(-1, -2).float().unsqueeze(1)
            scores = torch.relu(torch.matmul(q.float(), keys))
            weights = self.weights_proj(hidden_states).unsqueeze(-2)
            scores = change.get("scores", lambda x: x)(torch.matmul(weights, scores).squeeze(-2))
            scores = scores.masked_fill(~attention_mask, float("-inf"))
            count = min(self.index_topk, scores.shape[-1])
            return scores.topk(count, dim=-1).indices.to(torch.int32)

    return Other


CHANGES_OF_INDEXERS = {
    "nothing": ({}, None),
    "keys": ({"alone": lambda k: -k}, "Other computes something else than SparseIndexer"),
    "scores": ({"scores": lambda s: -s}, "Other cannot be tried: TypeError: bad operand type"),
}


@pytest.mark.parametrize("name", CHANGES_OF_INDEXERS)
def test_classes_are_recognized_by_numbers(name):
    change, reason = CHANGES_OF_INDEXERS[name]
    model = built()
    for layer in model.model.layers:
        layer.self_attn.indexer.__class__ = indexer_of(type(layer.self_attn.indexer), change)
    report = liger_multi.patch(model)
    said = [s.reason for s in report.skipped if s.op == "sparse_attention"]
    if reason is None:
        assert not said
        assert report.count("sparse_attention") == 4
    else:
        assert len(said) == 2
        assert all(reason in text for text in said)
        assert not report.count("sparse_attention")


# --- what stands for masks and scores of a forward ---


def test_recorders_refuse_unknown_operations():
    keys = sparse.IndexKeys(torch.ones(1, 5, 4), lambda *args: None)
    queries, weights = torch.ones(1, 3, 2, 4), torch.ones(1, 3, 1, 2)
    scores = torch.matmul(queries, keys.transpose(-1, -2).float().unsqueeze(1))
    sums = torch.matmul(weights, torch.nn.functional.relu(scores)).squeeze(-2)
    assert sums.shape == (1, 3, 5)
    mask = sparse.RangeMask(torch.zeros(1, 3, 2, dtype=torch.int32))
    for operation, message in (
        (lambda: torch.matmul(queries, keys), "matmul of keys after nothing"),
        (lambda: scores * -1, r"scores \* int -1"),
        (lambda: torch.matmul(weights, scores), "matmul of scores"),
        (lambda: torch.softmax(scores, -1), "softmax"),
        (lambda: scores.sum(), r"\.sum"),
        (lambda: sums.topk(2), "without a mask"),
        (lambda: sums.masked_fill(~mask, 0.0), r"masked_fill\(.*, 0.0\)"),
        (lambda: mask[1], r"mask\[1\]"),
        (
            lambda: sparse.attend(torch.nn.Identity(), None, None, None, None, 1.0),
            "serves sparse layers of patched models alone",
        ),
    ):
        with pytest.raises(ConfigurationError, match=message):
            operation()


def test_without_a_patch_the_masks_of_our_attention_still_raise():
    model = built()
    model.set_attn_implementation("liger_multi")
    with pytest.raises(MaskReadError):
        model(**batch(model))
