"""Packed rows: a model that mixes their samples is found by a trial, at the first such call."""

import copy
import functools
import itertools
import pickle
import random
import re
import sys
import threading
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from packaging import version
from torch import nn

from liger_multi.errors import PackingError, PatchError
from liger_multi.patching import patch, register_attention, unpatch
from liger_multi.patching.packing import checked as checked_packing, trial as trials
from liger_multi.patching.packing.checked import CheckedModel
from tests.comparing import assert_same_gradients, gradients
from tests.models import adapters, build, patched_copy, redrawn, scaled_to_width, transformers
from tests.sweep import cases
from tests.sweep.packing import results

LENGTHS = (11, 6, 9)
TOKENS = sum(LENGTHS)
APART = {"use_cache": False}


def positions(lengths=LENGTHS):
    return torch.cat([torch.arange(n) for n in lengths])[None]


def tokens(rows=1, length=TOKENS, seed=1):
    return torch.randint(3, 223, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def counted(monkeypatch):
    observed, trial = [], trials.trial

    def counting(*arguments):
        observed.append(trial(*arguments))
        return observed[-1]

    monkeypatch.setattr(checked_packing, "trial", counting)
    return observed


def patched(model_type="llama", **config):
    return patched_copy(redrawn(build(model_type, **config)))


def train(model, ids=None, **arguments):
    """The loss of a packed row, of samples that begin as ``position_ids`` say."""
    ids = tokens() if ids is None else ids
    return model(input_ids=ids, **{"position_ids": positions(), "labels": ids, **arguments}).loss


def forward(model, **arguments):
    return model(**{"input_ids": tokens(), "position_ids": positions(), **arguments}).logits


def registered(name):
    return cases.build(next(p for p in cases.registered() if p.cls == name))


# --- what is said of rows whose samples see each other ---

MASK = {"attention_mask": torch.ones(1, TOKENS, dtype=torch.long)}


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ({}, "use_cache=False"),
        ({"use_cache": True}, "use_cache=False"),
        ({"use_cache": True, "cache_position": torch.arange(TOKENS)}, "use_cache=False"),
        ({**MASK, **APART}, "no attention_mask"),
        (MASK, "use_cache=False and no attention_mask"),
    ],
    ids=["default", "cache", "places in a cache", "mask", "both"],
)
def test_leaks_raise_with_remedy(arguments, remedy):
    model = patched()
    with pytest.raises(PackingError, match=re.escape(f"With {remedy} they are kept apart")):
        train(model, **arguments)
    assert train(model, **APART) > 0


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "phi3", "qwen3_moe"])
def test_accepted_rows_equal_their_samples(model_type):
    model, ids = patched(model_type), tokens()
    apart, expected = results(model, [{"input_ids": x} for x in torch.split(ids, LENGTHS, 1)])
    together, actual = results(model, [{"input_ids": ids, "position_ids": positions()}])
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-4)
    assert_same_gradients(actual, expected, rtol=1e-4)


def test_routers_with_noise_in_training():
    """The noise of a row is not that of its samples by themselves, which is no leak."""
    model = patched("mixtral", router_jitter_noise=0.2).train()
    assert train(model, **APART) > 0
    with pytest.raises(PackingError, match=r"With use_cache=False they are kept apart"):
        train(model, use_cache=True)


class Counting(nn.Module):
    """A layer whose output follows the number of its calls."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x) + 0.1 * self.calls


def test_a_model_with_a_state_of_its_own_cannot_be_tried(recwarn):
    model = patched("mistral")  # of each class, it is said once
    model.model.layers[0].mlp = counting = Counting(model.model.layers[0].mlp)
    assert train(model, **APART) > 0
    assert counting.calls == 1
    assert "another one in a second run" in str(recwarn.list[-1].message)


def test_masks_without_positions():
    layers = {"layer_types": ["full_attention"] * 2, "output_router_logits": False}
    model = patched("gpt_oss", **layers)
    with pytest.raises(PackingError, match=re.escape("an attention_mask of shape (B, 1, T, T)")):
        train(model, **APART)
    mask = trials.Row(TOKENS, LENGTHS[0], torch.device("cpu"), (0,)).mask(torch.float32)
    assert forward(model, attention_mask=mask, **APART).any()


@pytest.mark.slow
def test_model_without_remedy():
    """A mask of one's own has no windows, so that it does not help either."""
    model = patched("gpt_oss", sliding_window=4, output_router_logits=False)
    with pytest.raises(PackingError, match="Nothing that was tried keeps them apart"):
        forward(model, **APART)


@pytest.mark.skipif(not hasattr(transformers, "SmolVLMConfig"), reason="no SmolVLM")
def test_as_many_patches_of_an_image_as_tokens():
    """The samples of a row say nothing of the patches, although there are as many."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    text = {"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 100, "pad_token_id": 0}
    vision = {"num_hidden_layers": 1, "image_size": 16, "patch_size": 4}
    config = transformers.SmolVLMConfig(
        text_config=sizes | text, vision_config=sizes | vision, scale_factor=2, image_token_id=99
    )
    model = transformers.SmolVLMForConditionalGeneration(config).eval()
    ours = patched_copy(model)
    register_attention()
    ours.set_attn_implementation("liger_multi")
    ids = torch.cat([torch.full((1, 4), 99), tokens(length=12) % 99], 1)
    inputs = {"pixel_values": torch.randn(1, 1, 3, 16, 16), "position_ids": positions((8, 8))}
    with torch.no_grad():
        actual, expected = (m(input_ids=ids, **inputs, **APART).logits for m in (ours, model))
    torch.testing.assert_close(actual, expected)


def test_encoders_see_samples_after_and_before():
    config = transformers.BertConfig(
        vocab_size=223,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    with pytest.raises(PackingError, match="BertForMaskedLM got rows of several samples"):
        forward(patched_copy(transformers.BertForMaskedLM(config)))


class Chunked(nn.Module):
    """Sums what a token sees: those before it in its sample and its chunk."""

    def __init__(self, of_rows):
        super().__init__()
        self.config = transformers.LlamaConfig(vocab_size=50, attention_chunk_size=8192)
        self.embed, self.of_rows = nn.Embedding(50, 4), of_rows

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, position_ids=None, use_cache=None, return_dict=None):
        place = torch.arange(input_ids.shape[1])[None]
        position_ids = place if position_ids is None else position_ids
        sample = (position_ids == 0).cumsum(-1)
        chunk = (place if self.of_rows else position_ids) // self.config.attention_chunk_size
        visible = (sample[..., None] == sample[:, None]) & (chunk[..., None] == chunk[:, None])
        weights = visible.tril().to(self.embed.weight.dtype)
        return types.SimpleNamespace(last_hidden_state=weights @ self.embed(input_ids))


@pytest.mark.parametrize("of_rows", [True, False])
def test_chunks_of_a_row_are_not_those_of_its_samples(of_rows):
    """Also where they are longer than the row of a trial."""
    model, ids = Chunked(of_rows), tokens() % 50
    inputs = {"input_ids": ids, "position_ids": positions(), **APART}
    actual = trials.trial(model, model.forward, inputs, ids)
    assert not actual.untried
    assert (actual.change > 0.01, actual.remedy) == (of_rows, ())
    assert model.config.attention_chunk_size == 8192


def test_axes_of_positions():
    model = patched_copy(redrawn(registered("Qwen2VLForConditionalGeneration")))
    ids, place = tokens().clamp(10, 60), positions()
    for inputs in (place, place.expand(3, -1, -1), place.expand(3, -1, -1) + 1):
        with pytest.raises(PackingError, match=re.escape("position_ids of shape (4, B, T)")):
            train(model, ids, position_ids=inputs, **APART)
    assert train(model, ids, position_ids=place.expand(4, -1, -1), **APART) > 0


NUMBERED = torch.repeat_interleave(torch.tensor([1, 2, 0]), torch.tensor([9, TOKENS - 13, 4]))[None]


def test_masks_numbering_samples(counted):
    """Every number but 0 is 1 to transformers; patches of FlashAttention alone read them."""
    model = patched()
    with pytest.warns(UserWarning, match="an attention_mask that numbers samples"):
        forward(model, attention_mask=NUMBERED, position_ids=None, **APART)
    assert not counted, "ranks may differ in what masks have, so that nothing is tried"
    with pytest.raises(PackingError, match="no attention_mask"):
        forward(model, attention_mask=NUMBERED, **APART)
    assert forward(model, **APART).any()


def test_model_reading_mask_numbers(monkeypatch):
    """As patches of FlashAttention do: the mask of a trial has numbers, too."""

    def read(*args, attention_mask, **kwargs):
        embeds = kwargs["inputs_embeds" if "inputs_embeds" in kwargs else "input_embeds"]  # 5.0
        mask = torch.ones(embeds.shape[:2]) if attention_mask is None else attention_mask
        return (mask[:, :, None] == mask[:, None])[:, None].tril()

    monkeypatch.setattr("transformers.models.llama.modeling_llama.create_causal_mask", read)
    model = patched()
    logits = forward(model, attention_mask=NUMBERED, **APART)
    first = {"input_ids": tokens(), "attention_mask": NUMBERED, "position_ids": positions()}
    alone = forward(model, **{name: value[:, :9] for name, value in first.items()})
    torch.testing.assert_close(logits[:, :9], alone)


@pytest.mark.parametrize(
    "mask",
    [torch.ones(2, TOKENS), torch.ones(2, TOKENS).long(), torch.tensor([[2] + [1] * (TOKENS - 1)])],
    ids=["fp32", "ones", "global attention"],
)
def test_masks_without_numbers(mask, counted):
    model, ids = patched(), tokens(len(mask))
    assert model(input_ids=ids, attention_mask=mask, **APART).logits.any()
    assert not counted


def test_embeddings_in_place_of_ids():
    model = patched()
    rows = model.get_input_embeddings()(tokens())
    with pytest.raises(PackingError, match="use_cache=False"):
        model(inputs_embeds=rows, position_ids=positions())
    assert model(inputs_embeds=rows, position_ids=positions(), **APART).logits.any()


def test_layers_of_attention_in_a_hybrid():
    """Its mixers keep samples apart, and its attention sees all of a cache."""

    model = redrawn(registered("Qwen3NextForCausalLM"))
    if getattr(sys.modules[type(model).__module__], "causal_conv1d_fn", None) is None:
        pytest.skip("mixers of this transformers call no function that an operator stands for")
    model.config.use_cache = True
    assert {e.path for e in patch(model).entries if e.op == "packing"} == {"", "model"}
    ids = tokens().clamp(10, 60)
    with pytest.raises(PackingError, match="use_cache=False"):
        forward(model, input_ids=ids)
    assert forward(model, input_ids=ids, **APART).any()


# --- calls of one sample per row ---

FIRST = torch.ones(2, TOKENS, dtype=torch.long)
FIRST[0, :5] = 0  # padding on the left
LEFT = (FIRST.cumsum(1) - 1).masked_fill(FIRST == 0, 1)
RIGHT = torch.arange(TOKENS).expand(2, -1).clone()
RIGHT[0, -4:] = 0
JUMP = torch.cat([torch.arange(9), torch.arange(40, 40 + TOKENS - 9)]).expand(2, -1)


@pytest.mark.parametrize(
    "arguments",
    [
        {"position_ids": torch.arange(TOKENS)[None]},
        {"position_ids": torch.arange(7, 7 + TOKENS)[None]},
        {"position_ids": LEFT, "attention_mask": FIRST},
        {"position_ids": RIGHT},
        {"position_ids": JUMP},
    ],
    ids=["plain", "late", "left", "right", "jump"],
)
def test_one_sample_per_row_never_raises(arguments, counted):
    assert train(patched(), tokens(2), **arguments) > 0
    assert counted[0].change > 0.01, "this form would mix samples"


def test_generation_is_not_tried(counted):
    model = patched().eval()
    model.generate(tokens(2, 9), max_new_tokens=3, do_sample=False)
    model(input_ids=tokens(1, 1), position_ids=torch.tensor([[4]]), use_cache=True)
    model(input_ids=tokens())
    assert not counted


def test_a_form_is_tried_once(counted):
    model = patched()
    for _ in range(3):
        train(model, **APART)
    assert len(counted) == 1
    forward(model.eval(), **APART)
    assert len(counted) == 2
    forward(copy.deepcopy(model), **APART)
    assert len(counted) == 3


def test_a_short_row_first():
    model = patched()
    short = {"input_ids": tokens(1, 6), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}
    for row in (short, {}):
        with pytest.raises(PackingError):
            forward(model, **row)


def test_cache_switched_off_and_on():
    model = patched()
    model.config.use_cache = True
    model.gradient_checkpointing_enable()  # training without a cache
    forward(model).sum().backward()
    model.gradient_checkpointing_disable()
    with pytest.raises(PackingError, match="use_cache=False"):
        forward(model)


def test_patch_forgets_trials(counted):
    model = patched()
    for options in ({}, {}, {"rope": False}):
        if options:
            patch(model, **options)
        forward(model, **APART)
    assert len(counted) == 2


def test_forward_replaced_on_the_class(monkeypatch):
    model = patched()
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", lambda self, **inputs: "theirs")
    assert model(input_ids=tokens()) == "theirs"


def test_compiled_layers_are_not_compiled_for_a_trial(counted):
    model, graphs = patched(), []

    def backend(graph, example):
        graphs.append(len(example))
        return graph.forward

    for layer in model.model.layers:
        layer.compile(backend=backend)
    batch = {"input_ids": tokens(), "labels": tokens(), **APART}
    model(**batch)
    n_graphs = len(graphs)
    model(**batch, position_ids=torch.arange(TOKENS)[None])
    assert len(counted) == 1
    assert len(graphs) == n_graphs > 0


# --- a model and its process are left as they were ---


def test_trials_of_two_threads_leave_the_process_as_it_was():
    """The second one begins while the first one runs, and ends after it."""
    stance = torch._dynamo.eval_frame._stance
    models = [patched(), patched()]
    torch.manual_seed(3)
    states = torch.get_rng_state(), random.getstate(), list(warnings.filters)
    begun, ended = threading.Event(), threading.Event()

    def first():
        with trials.undisturbed(models[0]):
            torch.rand(1)
            assert begun.wait(60)
        ended.set()

    def second():
        with trials.undisturbed(models[1]):
            begun.set()
            assert ended.wait(60)
            assert torch._dynamo.eval_frame._stance.stance == "force_eager"

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(first)
        pool.submit(second).result()
        one.result()
    assert torch._dynamo.eval_frame._stance == stance
    assert torch.equal(states[0], torch.get_rng_state())
    assert (random.getstate(), list(warnings.filters)) == states[1:]


def test_threads_try_a_model_once(counted):
    model, together = patched(), threading.Barrier(3)

    def run():
        together.wait(60)
        forward(model, **APART)

    with ThreadPoolExecutor(3) as pool:
        for call in [pool.submit(run) for _ in range(3)]:
            call.result()
    assert len(counted) == 1


def test_nothing_changes_but_the_verdict():
    model = patched(attention_dropout=0.3)
    model.register_buffer("counter", torch.zeros(2))
    calls = []

    def hook(module, arguments, output):
        calls.append(output.shape)
        model.counter += 1
        model.last = output.shape

    model.model.layers[0].mlp.register_forward_hook(hook)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    attributes = set(vars(model.model))
    with torch.no_grad():
        rows = model.get_input_embeddings().weight.clone()
    trials.trial(
        model,
        type(model).forward.__get__(model),
        {"input_ids": tokens(), "position_ids": positions()},
        tokens(),
    )
    assert not calls
    assert not model.counter.any()
    assert not hasattr(model, "last")
    assert set(vars(model.model)) == attributes
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert torch.equal(torch.get_rng_state(), states[2])
    assert torch.equal(model.get_input_embeddings().weight, rows)
    forward(model, **APART)
    assert calls == [(1, TOKENS, 32)]


class Meter:
    def __init__(self):
        self.rows, self.parts = [], {"total": 0}

    def add(self, rows):
        self.rows.append(rows)
        self.parts["total"] += 1
        self.last = rows


class Metered(nn.Module):
    """A layer that writes to objects of its user: of a class, and of libraries."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.meters = [Meter(), Meter()]
        self.named, self.steps = types.SimpleNamespace(calls=0), itertools.count()
        self.histogram, self.dice = np.zeros(3), random.Random(0)
        self.noise = torch.Generator().manual_seed(0)

    def forward(self, x):
        for meter in self.meters:
            meter.add(x.shape[1])
        self.named.calls += 1
        self.histogram += 1
        next(self.steps)
        self.dice.random()
        return self.inner(x) + 1e-9 * torch.rand((), generator=self.noise)


def test_a_trial_writes_to_no_object_of_the_user():
    model, inputs = patched(), {"input_ids": tokens(), "position_ids": positions(), **APART}
    model.model.layers[0].mlp = layer = Metered(model.model.layers[0].mlp)
    other = Metered(copy.deepcopy(layer.inner))
    with torch.no_grad():
        model(**inputs)
        other(torch.zeros(1, TOKENS, 32))  # what one call does
    for mine, expected in ((layer, other), (layer.meters[0], other.meters[1])):
        assert all(
            str(value) == str(vars(expected)[name])
            for name, value in vars(mine).items()
            if isinstance(value, (list, dict, int, types.SimpleNamespace, itertools.count))
            and name not in ("meters", "_modules")
        )
    assert layer.histogram.tolist() == [1, 1, 1]
    assert layer.dice.getstate() == other.dice.getstate()
    assert torch.equal(layer.noise.get_state(), other.noise.get_state())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_step_equals_unchecked(dropout):
    models = [build(attention_dropout=dropout, patching={"packing": on}) for on in (True, False)]
    losses = []
    for model in models:
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(train(model, **APART))
        losses[-1].backward()
    assert torch.equal(*losses)
    actual, expected = map(gradients, models)
    assert len(actual) > 10
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_untried_call_warns_once(recwarn):
    model = patched()

    def refuses(module, arguments, keywords):
        if keywords["position_ids"].shape[1] != TOKENS or arguments:
            raise RuntimeError("rows of other lengths")

    refuses.__module__ = "accelerate.hooks"  # part of how the model runs
    model.model.register_forward_pre_hook(refuses, with_kwargs=True)
    for _ in range(2):
        forward(model)
    (warning,) = [w for w in recwarn if "could not be tried" in str(w.message)]
    assert "RuntimeError: rows of other lengths" in str(warning.message)


# --- options, other ways to call, copies ---


def test_it_can_be_turned_off():
    model = patched()
    report = patch(model, packing=False)
    assert [(e.op, e.status) for e in report.entries if e.op == "packing"] == [
        ("packing", "restored")
    ]
    assert type(model) is transformers.LlamaForCausalLM
    forward(model)
    with pytest.raises(PatchError, match="packing must be True or False, got str 'triton'"):
        patch(model, packing="triton")


def test_class_of_a_checked_model_and_its_copies():
    model = patched()
    assert isinstance(model, CheckedModel)
    assert isinstance(model, transformers.LlamaForCausalLM)
    bound = model.forward
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(PackingError):
            forward(other)
    unpatch(model)
    assert type(model) is transformers.LlamaForCausalLM
    assert torch.equal(forward(bound), forward(model))


@pytest.mark.parametrize("first", [True, False], ids=["patch-first", "adapter-first"])
def test_with_adapters(first):
    model = adapters(build(patching={} if first else None), target_modules="all-linear")
    if not first:
        patch(model)
    with pytest.raises(PackingError, match="LlamaForCausalLM got rows"):
        train(model)
    train(model, **APART).backward()


def test_a_model_within_a_module():
    class Reward(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = build().model
            self.score = nn.Linear(32, 1)

        def forward(self, **kwargs):
            return self.score(self.model(**kwargs).last_hidden_state)

    with pytest.raises(PackingError, match="LlamaModel got rows"):
        patched_copy(Reward())(input_ids=tokens(), position_ids=positions())


@pytest.mark.slow
def test_a_compiled_model_is_one_graph(counted):
    train(torch.compile(patched(), backend="eager", fullgraph=True), **APART).backward()
    assert not counted


def test_in_16_bits_experts_are_no_leak():
    model = patched("qwen3_moe").to(torch.bfloat16)
    train(model, **APART).backward()
    with pytest.raises(PackingError):
        train(model)


def test_attention_of_this_library_keeps_samples_apart():
    model = patched()
    register_attention()
    model.set_attn_implementation("liger_multi")
    # with a cache transformers does not ask positions, and our masks do
    assert torch.equal(forward(model), forward(model, **APART))


# --- collators that people use ---

MODELS = (
    "BambaForCausalLM",
    "Gemma3ForCausalLM",
    "Lfm2ForCausalLM",
    "LlamaForCausalLM",
    "MixtralForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3NextForCausalLM",
)
KEPT = version.parse("5.23")
"""From here on, all hybrids hand ids of samples to their mixers."""
if version.parse(transformers.__version__) < KEPT:
    MODELS = ("Gemma3ForCausalLM", "LlamaForCausalLM", "MixtralForCausalLM", "Qwen3ForCausalLM")
OPTIONS = ("return_position_ids", "return_seq_idx", "return_flash_attn_kwargs")
FORMS = {
    "+".join(n.removeprefix("return_") for n, on in zip(OPTIONS, chosen, strict=True) if on): dict(
        zip(OPTIONS, chosen, strict=True)
    )
    for chosen in itertools.product((True, False), repeat=3)
    if any(chosen)
}


@functools.cache
def _model(name):
    model = scaled_to_width(registered(name))
    model.config.use_cache = True
    return model


def patched_model(name, **ops):
    return patched_copy(_model(name), **ops)


def samples():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(10, 130, (n,), generator=generator).tolist() for n in LENGTHS]


def flattened(**options):
    collator = transformers.DataCollatorWithFlattening(**options)
    return collator([{"input_ids": ids, "labels": ids} for ids in samples()])


COUNT = sum(LENGTHS) - len(LENGTHS)
"""Targets: those of all tokens but the first ones."""


@functools.cache
def alone(name):
    """The loss and gradients of the samples one by one, summed."""
    model, total = patched_model(name), 0.0
    for ids in samples():
        inputs = torch.tensor([ids])
        loss = model(
            input_ids=inputs, labels=inputs, use_cache=False, num_items_in_batch=COUNT
        ).loss
        loss.backward()
        total += loss.item()
    return total, gradients(model)


def assert_apart(model, name, batch):
    model.zero_grad()
    loss = model(**batch, num_items_in_batch=COUNT).loss
    loss.backward()
    expected, grads = alone(name)
    assert loss.item() == pytest.approx(expected, rel=2e-5)
    assert_same_gradients(gradients(model), grads, rtol=1e-4)


def _lengths(batch):
    ends = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    ids = [torch.full((n,), i) for i, n in enumerate(LENGTHS)]
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(LENGTHS),
        "max_length_k": max(LENGTHS),
        "seq_idx": torch.cat(ids)[None].int(),
    }


REMEDIES = {
    "use_cache=False": lambda batch: {**batch, "use_cache": False},
    "no attention_mask": lambda batch: {k: v for k, v in batch.items() if k != "attention_mask"},
    "position_ids of shape (B, T) that begin again with every sample": lambda batch: {
        **batch,
        "position_ids": positions(),
    },
    "cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k and seq_idx": lambda batch: {
        **batch,
        **_lengths(batch),
    },
}


def trained(model, name, batch):
    """Train on a batch, as the error of its first call says where there is one."""
    try:
        assert_apart(model, name, batch)
        return []
    except PackingError as error:
        (way,) = re.findall(r"With (.*) they are kept apart", str(error))
    remedies = [text for text in REMEDIES if text in way]
    assert len(remedies) > 0, way
    for text in remedies:
        batch = REMEDIES[text](batch)
    assert_apart(model, name, batch)
    return remedies


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_the_collator_of_transformers(name, form):
    """Positions suffice, in hybrids as well; without them the error asks for them."""
    batch = flattened(**FORMS[form])
    assert batch["labels"].ne(-100).sum() == COUNT
    batch.pop("attention_mask", None)
    remedies = trained(patched_model(name), name, {**batch, "use_cache": False})
    place = "position_ids of shape (B, T) that begin again with every sample"
    assert remedies == ([] if FORMS[form]["return_position_ids"] else [place])


@pytest.mark.parametrize("name", MODELS)
def test_leaking_samples_are_detected(name):
    batch = flattened(return_position_ids=False, return_seq_idx=True)
    batch.pop("attention_mask", None)
    with pytest.raises(AssertionError):
        assert_apart(patched_model(name, packing=False), name, {**batch, "use_cache": False})


@pytest.mark.parametrize("name", MODELS)
def test_manual_loop_with_cache(name):
    remedies = trained(patched_model(name), name, flattened(return_position_ids=True))
    assert remedies == ["use_cache=False"]


@pytest.mark.parametrize("name", MODELS)
def test_the_collator_of_trl(name):
    trl = pytest.importorskip("trl.trainer.sft_trainer")
    collator = trl.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    batch = collator([{"input_ids": ids} for ids in samples()])
    assert trained(patched_model(name), name, {**batch, "use_cache": False}) == []
