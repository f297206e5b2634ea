"""Tokens decoded with a cache have the bits of the whole sequence under ``deterministic="rows"``.

Every ratio of probabilities, those of a training step over those of the roll-out, is exactly 1.
``F.linear`` depends on the number of rows here, as GEMMs of a vendor's library do.
"""

import pytest
import torch
import torch.nn.functional as F
import transformers

import liger_multi
from liger_multi import ops
from liger_multi.patching import patch, register_attention, unpatch
from liger_multi.patching.linear import CallsLinear
from tests.decoding import MODELS, all_ones, log_prob, model, prompt, roll_out, train
from tests.models import VOCABULARY, build
from tests.patching.test_linear import library  # noqa: F401
from tests.patching.test_mixers import by_package

pytestmark = pytest.mark.usefixtures("library", "by_rows")


@pytest.fixture
def by_rows():
    with liger_multi.use(deterministic="rows"):
        yield


@pytest.mark.parametrize(("dtype", "greedy"), [(torch.float32, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("model_type", MODELS)
def test_ratios_are_exactly_one(model_type, dtype, greedy):
    policy = model(model_type, dtype)
    ids, old = roll_out(policy, prompt(7), 200, greedy=greedy)
    assert all_ones(train(policy, ids, 200), old)


@pytest.mark.parametrize("chunk", [1, 16])
@pytest.mark.parametrize("model_type", MODELS)
def test_prompts_in_chunks_and_a_cache_that_goes_on(model_type, chunk):
    policy = model(model_type)
    cache = transformers.DynamicCache(config=policy.config)
    first, old = roll_out(policy, prompt(37), 20, chunk=chunk, cache=cache)
    # the last token of the first turn is not in the cache yet
    turn = torch.cat([first[:, -1:], prompt(9, seed=2)], 1)
    second, later = roll_out(policy, turn, 20, chunk=chunk, cache=cache)
    ids = torch.cat([first[:, :-1], second], 1)
    new = train(policy, ids, ids.shape[1] - 37)
    assert all_ones(new[:, :20], old)
    assert all_ones(new[:, -20:], later)


@pytest.mark.parametrize("model_type", MODELS)
def test_static_cache(model_type):
    policy = model(model_type)
    cache = transformers.StaticCache(config=policy.config, max_cache_len=96)
    ids, old = roll_out(policy, prompt(9), 60, cache=cache)
    assert all_ones(train(policy, ids, 60), old)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODELS)
def test_left_padding(model_type):
    """Prompts of three lengths are decoded together, trained together, and scored alone."""
    policy, lengths = model(model_type), [5, 12, 9]
    ids = prompt(12, 3)
    mask = (torch.arange(12) >= 12 - torch.tensor(lengths)[:, None]).long()
    rows, old = roll_out(policy, ids, 20, mask=mask, greedy=False)
    mask = F.pad(mask, (0, 19), value=1)
    places = (mask.cumsum(-1) - 1).clamp_min(0)
    assert all_ones(train(policy, rows, 20, attention_mask=mask, position_ids=places), old)
    for row, length, log_probs in zip(rows, lengths, old, strict=True):
        assert all_ones(train(policy, row[None, 12 - length :], 20), log_probs[None])


def test_generate():
    policy = model("llama")
    result = policy.generate(
        prompt(7),
        attention_mask=torch.ones(1, 7, dtype=torch.long),
        max_new_tokens=40,
        do_sample=True,
        output_logits=True,
        return_dict_in_generate=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    logits = torch.stack(result.logits, 1).to(policy.dtype)
    old = log_prob(logits, result.sequences[:, 7:]).view(1, -1)
    assert all_ones(train(policy, result.sequences, 40), old)


def test_routers_are_served_and_restored():
    policy = model("mixtral")
    routers = [m for m in policy.modules() if isinstance(m, CallsLinear)]
    assert len(routers) == 2
    x = torch.randn(5, 32)
    alone = torch.cat([routers[0](row[None])[0] for row in x])
    assert torch.equal(routers[0](x)[0], alone)
    with liger_multi.use(deterministic=False):
        assert not torch.equal(routers[0](x)[0], torch.cat([routers[0](r[None])[0] for r in x]))
    unpatch(policy)
    assert not any(isinstance(m, CallsLinear) for m in policy.modules())


def test_the_report_names_what_multiplies_by_itself():
    register_attention()
    report = patch(build("mixtral").eval(), fused_moe=False)
    paths = [s.path for s in report.skipped if s.op == "linear"]
    assert paths == [f"model.layers.{i}.mlp.experts" for i in (0, 1)], report


def test_the_report_names_layers_with_a_state():
    config = transformers.Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=1,
        num_hidden_layers=2,
    )
    policy = transformers.Mamba2ForCausalLM(config).eval()
    if by_package(policy):
        pytest.skip("mixers of this transformers call no function that an operator stands for")
    skipped = [s for s in patch(policy).skipped if s.op == "linear"]
    assert [s.path for s in skipped] == [f"backbone.layers.{i}.mixer" for i in (0, 1)]
    assert all("state" in s.reason and not s.strict for s in skipped)


def test_log_probs_of_the_fused_head(monkeypatch):
    """It has a GEMM of its own, which is PyTorch's here."""
    monkeypatch.undo()
    policy = model("llama", torch.bfloat16)
    ids, old = roll_out(policy, prompt(7), 30)
    hidden = policy.model(ids[:, :-1], use_cache=False).last_hidden_state[:, -30:].flatten(0, 1)
    new = ops.fused_linear_log_prob(hidden, policy.lm_head.weight, ids[:, -30:].flatten()).log_prob
    assert all_ones(new, old.flatten())
