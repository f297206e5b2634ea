"""Layers whose indexer selects keys: patched and unpatched are equal, and single calls fall back.

Indexers have many heads here: with few, keys whose products are all below 0 have equal scores, of
which torch.topk takes any and the operator the first.
"""

import copy
import pickle

import pytest
import torch

import liger_multi
from tests.comparing import assert_same_gradients, gradients, recorded

transformers = pytest.importorskip("transformers")
from liger_multi.errors import ConfigurationError, PatchError  # noqa: E402
from liger_multi.patching import register_attention, unregister_attention  # noqa: E402
from liger_multi.patching.attention import sparse  # noqa: E402
from liger_multi.patching.attention.interface import MaskReadError  # noqa: E402
from tests.models import Calls, patched_copy  # noqa: E402
from tests.sweep import cases  # noqa: E402

FAST, SLOW = ("deepseek_v32", "glm_moe_dsa"), ("axk2", "dots3_note", "mistral_large4")
TYPES = (*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW))
CALLED = {"sparse_attention", "indexer_topk"}
SITUATIONS = [pytest.param(n, marks=pytest.mark.slow) for n in ("padded", "packed", "liger_multi")]
LENGTHS = (19, 1, 28)
TOKENS = sum(LENGTHS)
KEPT = 5
"""Keys that an indexer selects, of up to 48."""


def built(model_type="deepseek_v32", **attributes):
    """A tiny model in which a selection matters."""
    pairs = {p.type: p for p in cases.registered()}
    if model_type not in pairs:
        pytest.skip(f"this transformers has no {model_type}")
    config = cases.configuration(pairs[model_type])
    for part in cases._within(config):
        if hasattr(part, "index_topk"):
            part.index_topk, part.index_n_heads = KEPT, 24
            for name, value in attributes.items():
                setattr(part, name, value)
    torch.manual_seed(0)
    model = getattr(transformers, pairs[model_type].cls)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.train()


def batch(model, rows=2):
    ids = torch.randint(10, 60, (rows, TOKENS), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    if hasattr(model.config, "vision_config"):
        inputs["mm_token_type_ids"] = torch.zeros_like(ids)
    return inputs


def step(model, inputs):
    """All gradients after one step, and the loss."""
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
        register_attention()
        model.set_attn_implementation("liger_multi")
    try:
        assert equal(stock, model, inputs) == CALLED
    finally:
        unregister_attention()


@pytest.mark.parametrize("model_type", TYPES)
def test_samples_of_a_row_are_apart(model_type):
    """Logits of a sample are those of the sample alone."""
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
    assert set(whole) == {TOKENS}
    assert set(observed) == {20, TOKENS % 20}
    with torch.no_grad():
        actual = model.eval()(**inputs).loss
    torch.testing.assert_close(actual, stock.eval()(**inputs).loss)


def test_adapters_on_latent_expansion(equal):
    """It runs by itself then: its weight alone no longer says what it computes."""
    peft = pytest.importorskip("peft")
    stock = built()
    config = peft.LoraConfig(target_modules=["kv_b_proj", "o_proj"], init_lora_weights=False)
    torch.manual_seed(2)
    stock = peft.get_peft_model(stock, config)
    assert equal(stock, patched_copy(stock), batch(stock)) == CALLED


def test_the_backend_can_be_named():
    model = built()
    liger_multi.patch(model, sparse_attention="reference")
    assert model(**batch(model)).loss.isfinite()
    with pytest.raises(PatchError, match="sparse_attention must be True, False"):
        liger_multi.patch(model, sparse_attention=3)


class Alone:
    """Calls that are left to the module: the operators are not called, and results are equal."""

    @staticmethod
    def eager(model):
        model.set_attn_implementation("eager")

    @staticmethod
    def dropout(model):
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 1e-9  # its random numbers are drawn, in any case

    @staticmethod
    def holes(model):
        """Nothing to change: the mask has holes."""


@pytest.mark.parametrize("reason", ["eager", "dropout", "holes"])
def test_other_calls_are_left_to_the_module(reason, equal):
    stock = built()
    model, inputs = patched_copy(stock), batch(stock)
    for one in (stock, model):
        getattr(Alone, reason)(one)
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
    actual = [p for p in cases.registered() if p.type == model_type]
    if not actual:
        pytest.skip(f"this transformers has no {model_type}")
    config = cases.configuration(actual[0])
    for part in cases._within(config):
        if model_type == "minimax_m3_vl" and hasattr(part, "layer_types"):
            part.layer_types = ["full_attention", "minimax_m3_sparse"]
    model = getattr(transformers, actual[0].cls)(config)
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


CHANGES = {
    "nothing": ({}, None),
    "keys": ({"alone": lambda k: -k}, "Other computes something else than SparseIndexer"),
    "scores": ({"scores": lambda s: -s}, "Other cannot be tried: TypeError: bad operand type"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_classes_are_recognized_by_numbers(name):
    change, reason = CHANGES[name]
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
    queries = torch.ones(1, 3, 2, 4)
    with pytest.raises(ConfigurationError, match="matmul of keys after nothing"):
        torch.matmul(queries, keys)
    scores = torch.matmul(queries, keys.transpose(-1, -2).float().unsqueeze(1))
    with pytest.raises(ConfigurationError, match=r"scores \* int -1"):
        scores * -1
    with pytest.raises(ConfigurationError, match="matmul of scores"):
        torch.matmul(torch.ones(1, 3, 1, 2), scores)
    with pytest.raises(ConfigurationError, match="softmax"):
        torch.softmax(scores, -1)
    with pytest.raises(ConfigurationError, match=r"\.sum"):
        scores.sum()
    sums = torch.matmul(torch.ones(1, 3, 1, 2), torch.nn.functional.relu(scores)).squeeze(-2)
    assert sums.shape == (1, 3, 5)
    with pytest.raises(ConfigurationError, match="without a mask"):
        sums.topk(2)
    mask = sparse.RangeMask(torch.zeros(1, 3, 2, dtype=torch.int32))
    with pytest.raises(ConfigurationError, match=r"masked_fill\(.*, 0.0\)"):
        sums.masked_fill(~mask, 0.0)
    with pytest.raises(ConfigurationError, match=r"mask\[1\]"):
        mask[1]


def test_the_attention_function_serves_patched_modules_alone():
    with pytest.raises(ConfigurationError, match="serves sparse layers of patched models alone"):
        sparse.attend(torch.nn.Identity(), None, None, None, None, 1.0)


def test_without_a_patch_the_masks_of_our_attention_still_raise():
    model = built()
    register_attention()
    try:
        model.set_attn_implementation("liger_multi")
        with pytest.raises(MaskReadError):
            model(**batch(model))
    finally:
        unregister_attention()
