"""Hybrid models with padding anywhere in a row: patched equals unpatched, by every way to call one.

Mixers of an unpatched model see a hidden token in their own way: it is 0 for them, and a state
decays over it. So the unpatched model is what counts, for hidden tokens as well.
"""

# ruff: noqa: E402  (what needs transformers is imported after the skip)
import copy
import functools

import pytest
import torch

transformers = pytest.importorskip("transformers")

import liger_multi
from liger_multi.arguments import cache_parameter
from liger_multi.patching.packing.samples import sample_ids, several, visible_tokens
from tests.comparing import assert_same_gradients, gradients
from tests.models import continued
from tests.sweep import cases

TYPES = (
    *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "glm5_next", "granitemoehybrid"),
    *("inkling_text", "inkling2", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "mamba"),
    *("mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text"),
    *("qwen3_next", "qwen4_exp_text", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"),
    "zaya",
)
"""Types with a recurrence or a convolution over tokens."""
FAST = ("qwen3_5_text", "bamba", "granitemoehybrid", "jamba", "lfm2", "mamba2")
LAYERS = {
    "granitemoehybrid": ["linear_attention", "full_attention"],
    **dict.fromkeys(("zamba", "zamba2"), ["linear_attention", "hybrid"] * 2),
}
ROWS, TOKENS = 3, 14
# zamba2 alone rounds more: unpatched, it is 5e-5 off in fp32
LIMITS = {"zamba2": 2e-3, "xlstm": 2e-3}


@functools.lru_cache(maxsize=len(TYPES))
def _pair(model_type):
    heads = ("ForCausalLM", "LMHeadModel")
    pairs = {p.type: p for p in cases.registered() if p.cls.endswith(heads)}
    if model_type not in pairs:
        return None
    config = cases.configuration(pairs[model_type])
    if model_type in LAYERS:  # which caches of this transformers know
        config.layer_types = LAYERS[model_type]
    unpatched = getattr(transformers, pairs[model_type].cls)(config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in unpatched.named_parameters():
            if parameter.ndim > 1 or "norm" not in name:
                parameter.normal_(std=0.5 if parameter.ndim < 2 else 0.2)
    patched = copy.deepcopy(unpatched)
    liger_multi.patch(patched)
    return unpatched.eval(), patched.eval()


def pair(model_type):
    models = _pair(model_type)
    if models is None:
        pytest.skip(f"this transformers has no {model_type}")
    for model in models:
        model.eval().zero_grad()
    return models


def holes(seed, rows=ROWS, tokens=TOKENS):
    """Ids, and a mask that hides tokens anywhere: in front, at the end and within, of some rows."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, 60, (rows, tokens), generator=generator)
    mask = (torch.rand(rows, tokens, generator=generator) > 0.3).long()
    mask[0] = 1
    mask[-1, : tokens // 3] = 0
    mask[:, -1] = 1
    return ids, mask


def positions_of(form, mask):
    """Positions as generation makes them, those of all tokens, or none."""
    if form == "visible":
        return {"position_ids": (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)}
    if form == "all":
        return {"position_ids": torch.arange(mask.shape[1]).expand(len(mask), -1)}
    return {}


def by_unpatched(run, model):
    """What the unpatched model gives; skips where it cannot run this way."""
    try:
        return run(model)
    except Exception as error:  # of any kind: what it cannot do, nobody has to
        pytest.skip(f"unpatched it does not run: {type(error).__name__}: {error}"[:200])


def assert_close(model_type, got, expected):
    limit = LIMITS.get(model_type, 2e-4) * max(1.0, float(expected.abs().nan_to_num().max()))
    torch.testing.assert_close(got, expected, rtol=0, atol=limit, equal_nan=True)


def each(function):
    """Fast types always, all types in slow runs."""
    marked = [t if t in FAST else pytest.param(t, marks=pytest.mark.slow) for t in TYPES]
    return pytest.mark.parametrize("model_type", marked)(function)


@each
@pytest.mark.parametrize("form", ["visible", "all", "none"])
def test_forward_and_backward(model_type, form):
    unpatched, patched = pair(model_type)

    def run(model, seed, mode):
        ids, mask = holes(seed)
        labels = ids.masked_fill(mask == 0, -100)
        model.train(mode).zero_grad()
        output = model(
            input_ids=ids,
            attention_mask=mask,
            labels=labels,
            use_cache=False,
            **positions_of(form, mask),
        )
        output.loss.backward()
        return output.logits.detach(), gradients(model)

    for seed, mode in ((0, False), (1, True)):
        expected = by_unpatched(lambda m: run(m, seed, mode), unpatched)  # noqa: B023
        got = run(patched, seed, mode)
        assert_close(model_type, got[0], expected[0])
        assert_same_gradients(got[1], expected[1], rtol=LIMITS.get(model_type, 1e-3))


@each
def test_one_row(model_type):
    """Until transformers 5.17, mixers did not mask in a batch of one row."""
    unpatched, patched = pair(model_type)
    ids, mask = (part[1:2] for part in holes(2))

    def run(model):
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits.detach()

    expected = by_unpatched(run, unpatched)
    assert_close(model_type, run(patched), expected)


WAYS = {
    "static": {"cache_implementation": "static"},
    "chunked": {"prefill_chunk_size": 5},
    "dynamic": {},
    "offloaded": {"cache_implementation": "offloaded"},
    "assisted": {"prompt_lookup_num_tokens": 2},
    "sampled": {"num_return_sequences": 2, "num_beams": 2},
}


SLOW_WAYS = [pytest.param(way, marks=pytest.mark.slow) for way in list(WAYS)[2:]]


@each
@pytest.mark.parametrize("way", ["static", "chunked", *SLOW_WAYS])
def test_generate(model_type, way):
    unpatched, patched = pair(model_type)
    rows = 1 if way == "assisted" else ROWS
    for seed in (3, 4):
        ids, mask = holes(seed)
        inputs = {"attention_mask": mask[-rows:], "max_new_tokens": 4, "do_sample": False}

        def run(model, ids=ids, inputs=inputs):
            torch.manual_seed(0)
            return model.generate(
                ids[-rows:],
                **inputs,
                **WAYS[way],
                use_cache=True,
                output_logits=True,
                return_dict_in_generate=True,
            )

        expected, got = by_unpatched(run, unpatched), run(patched)
        assert torch.equal(got.sequences, expected.sequences)
        for a, b in zip(got.logits or (), expected.logits or (), strict=True):
            assert_close(model_type, a, b)


@each
@pytest.mark.parametrize("form", ["visible", pytest.param("none", marks=pytest.mark.slow)])
def test_later_turns_with_a_cache(model_type, form):
    """Padding in every turn: a mask is longer than the tokens of a later one."""
    unpatched, patched = pair(model_type)

    @torch.no_grad()
    def run(model):
        masks, cache, outputs = torch.zeros(ROWS, 0, dtype=torch.long), {}, []
        for seed in (5, 6, 7):
            ids, mask = holes(seed)
            masks = torch.cat([masks, mask], 1)
            hints = {n: p[:, -TOKENS:] for n, p in positions_of(form, masks).items()}
            output = model(input_ids=ids, attention_mask=masks, use_cache=True, **hints, **cache)
            cache = continued(model, output)
            outputs.append(output.logits.detach())
        return torch.cat(outputs, 1)

    expected = by_unpatched(run, unpatched)
    assert_close(model_type, run(patched), expected)


@pytest.mark.parametrize("form", ["tokens", "kinds of layers"])
@pytest.mark.parametrize("model_type", ["granitemoehybrid", "qwen3_5_text"])
def test_compiled(model_type, form):
    """As compiled generation calls a model: with a static cache, and masks by kinds of layers.

    Nobody waits for the device within a graph, so what it asserts has to hold for padding.
    """
    from transformers.masking_utils import create_masks_for_generate

    unpatched, patched = pair(model_type)
    ids, mask = holes(8)
    inputs = positions_of("visible", mask)
    torch._dynamo.reset()
    compiled = torch.compile(patched, backend="eager", dynamic=False)

    @torch.no_grad()
    def run(model):
        cache = transformers.StaticCache(config=unpatched.config, max_cache_len=20)
        masks = mask
        if form != "tokens":
            embeds = unpatched.get_input_embeddings()(ids)
            taken = {cache_parameter(create_masks_for_generate): cache, **inputs}
            masks = create_masks_for_generate(unpatched.config, embeds, mask, **taken)
        name = cache_parameter(type(unpatched).forward)
        return model(input_ids=ids, attention_mask=masks, **inputs, **{name: cache}).logits

    expected = by_unpatched(run, unpatched)
    assert_close(model_type, run(compiled), expected)


# --- which tokens are visible, and which sample they belong to ---

HIDDEN = torch.tensor([[0, 1, 1, 0, 0, 1], [1, 1, 1, 1, 0, 0]])


def keys(mask, before=0, after=0):
    """A mask ``(B, 1, T, S)`` as transformers makes it: causal, without hidden keys."""
    batch, tokens = mask.shape
    whole = torch.cat([torch.ones(batch, before), mask, torch.zeros(batch, after)], 1).bool()
    causal = torch.ones(tokens, before + tokens + after, dtype=torch.bool).tril(before)
    return whole[:, None, None] & causal


MASKS = {
    "of tokens": HIDDEN,
    "with a cache": torch.cat([1 - HIDDEN, HIDDEN], 1),
    "bool": HIDDEN.bool(),
    "of keys": keys(HIDDEN),
    "of keys, with a cache": keys(HIDDEN, 4),
    "of keys, in a static cache": keys(HIDDEN, 2, 5),
    "to be added": torch.zeros(2, 1, 6, 6).masked_fill(~keys(HIDDEN), torch.finfo().min),
    "by kinds of layers": {"full_attention": keys(HIDDEN, 2, 5), "linear_attention": None},
    "both": {"full_attention": None, "linear_attention": HIDDEN},
}


@pytest.mark.parametrize("form", MASKS)
def test_hidden_tokens_of_a_mask(form):
    assert torch.equal(visible_tokens(MASKS[form], 6), HIDDEN.bool())


@pytest.mark.parametrize("before", [0, 3])
def test_hidden_tokens_of_other_masks(before):
    """Of our attention, which has ranges, and of flex attention, which has a function."""
    from liger_multi.patching.attention.interface import KeyMask, one_range

    observed = keys(HIDDEN, before)
    ranges = one_range(torch.where(observed.any(-1, keepdim=True), observed, False)[:, 0])[0]
    if not before:  # a row of two runs has four numbers
        ranges = torch.cat([torch.zeros_like(ranges), ranges], -1)
    shape = tuple(observed.shape)
    tails = HIDDEN[1:]  # one run of keys a query, which ranges can say
    mask = KeyMask((1, *shape[1:]), ranges=ranges[1:].int())
    assert torch.equal(visible_tokens(mask, 6), tails.bool())
    assert torch.equal(visible_tokens(KeyMask(shape, dense=observed), 6), HIDDEN.bool())
    assert visible_tokens(KeyMask(shape, causal=True), 6) is None

    class BlockMask:
        kv_num_blocks, seq_lengths = torch.zeros(2, 1, 1), (6, 6 + before)

        @staticmethod
        def mask_mod(batch, head, query, key):
            return observed[batch, 0, query, key]

    assert torch.equal(visible_tokens(BlockMask(), 6), HIDDEN.bool())


@pytest.mark.parametrize(
    ("positions", "mask", "ids", "many"),
    [
        # one sample: padding in front, at the end, within; positions that count it or do not
        ([1, 1, 0, 1, 2, 3], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0], False),
        ([0, 1, 2, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0], False),
        ([0, 1, 1, 1, 2, 3], [1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0], False),
        ([0, 1, 2, 3, 4, 5], [1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0], False),
        # two samples, beside each other and with padding between them
        ([0, 1, 2, 0, 1, 2], [1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1], True),
        ([0, 1, 0, 0, 1, 2], [1, 1, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1], True),
        ([1, 1, 0, 0, 1, 2], [0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1], True),
        ([0, 1, 7, 8, 9, 9], [1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1], False),
        ([0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], False),
    ],
)
def test_positions_tell_samples_apart_among_visible_tokens(positions, mask, ids, many):
    rows = torch.zeros(1, 6)
    inputs = {"position_ids": torch.tensor([positions]), "attention_mask": torch.tensor([mask])}
    assert sample_ids({"input_ids": rows, **inputs}).tolist() == [ids]
    assert several({"input_ids": rows, **inputs}) is many
    axes = inputs["position_ids"].expand(3, -1, -1)  # of images
    actual = sample_ids({"input_ids": rows, **inputs, "position_ids": axes})
    assert actual.tolist() == [ids if 7 not in positions else [0] * 6]


def test_ids_of_hidden_tokens_are_not_read():
    mask = torch.tensor([[0, 1, 0, 1, 1, 0]])
    inputs = {"seq_idx": torch.tensor([[5, 3, 9, 3, 4, 0]]), "attention_mask": mask}
    assert sample_ids({"input_ids": torch.zeros(1, 6), **inputs}).tolist() == [[0, 0, 0, 0, 1, 1]]
