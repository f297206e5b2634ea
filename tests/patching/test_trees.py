"""Shared prefixes: a branch is what it is in a batch without sharing, or the model is refused."""

# ruff: noqa: E402  (what needs transformers is imported after the skip)
import contextlib

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from packaging.version import Version

import liger_multi
from liger_multi import trees
from liger_multi.errors import PackingError
from liger_multi.patching import patch, register_attention
from liger_multi.patching.attention import interface
from liger_multi.patching.packing.tree import Tree
from tests.comparing import assert_same_gradients, gradients
from tests.models import build, redrawn
from tests.sweep import cases
from tests.sweep.run import liven
from tests.sweep.trees import judge


@pytest.fixture(scope="module", autouse=True)
def attention():
    register_attention()


def tokens(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 200, (count,), generator=generator).tolist()


FLAT = [(tokens(13, 1), [tokens(7, 2), tokens(1, 3), tokens(5, 4)])]
PAIR = [(tokens(9, 1), [tokens(3, 2), tokens(8, 3)]), (tokens(6, 5), [tokens(2, 6)])]
NESTED = [
    (
        tokens(8, 1),
        [
            (tokens(3, 2), [tokens(5, 3), (tokens(1, 4), [tokens(2, 5), tokens(4, 6)])]),
            tokens(1, 7),
            (tokens(4, 8), [tokens(6, 9), tokens(1, 10)]),
        ],
    )
]
older_refuse = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"),
    reason="what older transformers do not serve is refused, for reasons of their own",
)
GROUPS = {"flat": FLAT, "two trees": PAIR, "nested": NESTED, "both": NESTED + PAIR}


def served(model_type="llama", **config):
    """A patched model whose tokens depend on each other visibly."""
    model = redrawn(build(model_type, **config))
    model.set_attn_implementation("liger_multi")
    patch(model)
    return model


def unshared(model, batch, **arguments):
    """Log-probabilities as :func:`trees.log_probs` has them, from padded rows, and the output."""
    ids, mask = batch.unshared()
    output = model(input_ids=ids, attention_mask=mask, use_cache=False, **arguments)
    log_p = output.logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    rows = iter(range(len(ids)))
    row_of, waiting = {}, []
    for number, node in enumerate(batch.nodes):
        waiting.append(number)
        if node.leaf:
            row = next(rows)
            row_of.update(dict.fromkeys(waiting, row))
            waiting.clear()
    answer = [[] for _ in range(batch.nodes[-1].root + 1)]
    for number, (node, is_root) in enumerate(batch._nodes()):
        if is_root:
            continue
        if not node.length:
            answer[node.root].append(log_p[0, :0])
            continue
        start = int(batch.inputs["position_ids"][0, node.start])
        part = slice(max(0, start - 1), start + node.length - 1)
        answer[node.root].append(log_p[row_of[number], part])
    return answer, output


def weights_like(values):
    """Another weight for every element."""
    return torch.randn(values.shape, generator=torch.Generator().manual_seed(3))


def loss_of(log_probs):
    """A sum in which every token has another weight."""
    flat = torch.cat([part for each in log_probs for part in each])
    return (flat * weights_like(flat)).sum()


def assert_equal_to_unshared(model, batch, rtol=5e-4, **arguments):
    """Log-probabilities, the loss of routers and all gradients."""
    expected, output = unshared(model, batch, **arguments)
    aux = getattr(output, "aux_loss", None)
    loss = loss_of(expected)
    (loss if aux is None else loss + 0.7 * aux).backward()
    right = {name: grad.clone() for name, grad in gradients(model).items()}
    model.zero_grad()
    scores = trees.scores(model, batch, **arguments)
    ours = batch.split(scores.log_probs)
    total = loss_of(ours)
    if aux is not None:
        torch.testing.assert_close(scores.output.aux_loss, aux, rtol=2e-5, atol=1e-6)
        total = total + 0.7 * scores.output.aux_loss
    total.backward()
    assert [[len(p) for p in each] for each in ours] == [
        [len(p) for p in each] for each in expected
    ]
    for each, others in zip(ours, expected, strict=True):
        for part, other in zip(each, others, strict=True):
            assert (part.dtype, part.ndim) == (torch.float32, 1)
            torch.testing.assert_close(part, other, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(
        total, loss if aux is None else loss + 0.7 * aux, rtol=2e-5, atol=2e-5
    )
    assert_same_gradients(gradients(model), right, rtol=rtol)
    model.zero_grad()


# --- equal to an unshared batch ---


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss", "qwen3_moe", "mixtral"])
def test_equal_to_unshared(model_type, groups):
    """Softcap, sinks, windows shorter than the prefix, and losses of routers among them."""
    assert_equal_to_unshared(served(model_type), trees.pack(groups))


@pytest.mark.parametrize("groups", [FLAT, NESTED], ids=["flat", "nested"])
def test_windows_shorter_than_the_prefix(groups):
    model = served("mistral", sliding_window=3)
    assert_equal_to_unshared(model, trees.pack(groups))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    model = served("gemma2").train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert_equal_to_unshared(model, trees.pack(NESTED))


def tiny(model_type, head):
    """A patched tiny model of a type, and its pair of configuration and class."""
    pairs = {p.type: p for p in cases.registered() if p.cls.endswith(head)}
    if model_type not in pairs:
        pytest.skip(f"this transformers has no {model_type}")
    model = cases.build(pairs[model_type])
    liven(model)
    model.set_attn_implementation("liger_multi")
    patch(model)
    return model, pairs[model_type]


def hybrid(model_type):
    """A tiny hybrid, patched."""
    return tiny(model_type, "ForCausalLM")[0].train()


@older_refuse
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "again", "reentrant"])
@pytest.mark.parametrize("model_type", ["qwen3_next", "bamba", "lfm2"])
def test_hybrids(model_type, reentrant):
    """Layers that run again in backward, outside of the block, follow the tree too."""
    model = hybrid(model_type)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    groups = [(tokens(9, 1), [(tokens(3, 2), [tokens(2, 3), tokens(5, 4)]), tokens(1, 5)])]
    assert_equal_to_unshared(model, trees.pack(below(groups), pad_to=16))


def below(groups, most=60):
    """The same trees with ids that a tiny model has."""

    def ids(answer):
        if isinstance(answer, tuple):
            return ids(answer[0]), [ids(part) for part in answer[1]]
        return [token % most for token in answer]

    return [ids(group) for group in groups]


def test_padding():
    batch = trees.pack(NESTED + PAIR, pad_to=50)
    assert batch.inputs["input_ids"].shape == (1, 100)
    assert int(batch.inputs["attention_mask"].sum()) == 100 - batch.tree.padding < 100
    assert_equal_to_unshared(served("qwen3_moe"), batch)


def test_adapters():
    peft = pytest.importorskip("peft")
    model = build("llama")
    model.set_attn_implementation("liger_multi")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.normal_(std=0.3)
    patch(model)
    assert_equal_to_unshared(model, trees.pack(FLAT))


EDGES = {
    "empty prompt": [([], [tokens(5, 1), tokens(3, 2)])],
    "empty answer": [(tokens(6, 1), [[], tokens(3, 2)])],
    "empty between": [(tokens(6, 1), [([], [tokens(3, 2), tokens(2, 3)]), tokens(1, 4)])],
    "one branch": [(tokens(6, 1), [tokens(5, 2)])],
    "equal branches": [(tokens(6, 1), [tokens(5, 2), tokens(5, 2)])],
    "no answers": [(tokens(6, 1), []), (tokens(3, 2), [tokens(2, 3)])],
    "chain": [(tokens(6, 1), [(tokens(3, 2), [([], [(tokens(2, 3), [tokens(1, 4)])])])])],
    "chain below": [(tokens(6, 1), [(tokens(3, 2), [tokens(2, 3)]), (tokens(2, 4), [[]])])],
    "ends within": [(tokens(6, 1), [(tokens(3, 2), [[], tokens(2, 3)])])],
    "tensors": [(torch.tensor(tokens(6, 1)), [torch.tensor(tokens(2, 2)).short(), tokens(2, 3)])],
    "arrays": [(np.array(tokens(6, 1)), [[*np.array(tokens(2, 2))], np.array([3], np.uint8)])],
}


@pytest.mark.parametrize("groups", EDGES.values(), ids=EDGES)
def test_edges(groups):
    assert_equal_to_unshared(served(), trees.pack(groups))


PATHS = {"one answer": [tokens(5, 2)], "turns": [(tokens(5, 2), [(tokens(1, 3), [tokens(4, 4)])])]}


@pytest.mark.parametrize("pad_to", [None, 16], ids=["", "padded"])
@pytest.mark.parametrize("answers", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("window", [None, 4])
def test_one_path_is_a_plain_row(answers, pad_to, window, monkeypatch):
    """Without ranges where the mask is causal; with those of a plain row where it is not."""
    masks = []
    real = interface.attention
    monkeypatch.setattr(interface, "attention", lambda *a, **k: (masks.append(k), real(*a, **k))[1])
    model = served("mistral", sliding_window=window)
    batch = trees.pack([(tokens(6, 1), answers)], pad_to=pad_to)
    assert batch.tree.is_path
    trees.scores(model, batch)
    windowed = window is not None
    assert masks[-1]["causal"] != windowed
    assert (masks[-1]["ranges"] is not None) == windowed
    assert_equal_to_unshared(model, batch)


@older_refuse
def test_one_path_has_no_ids_of_samples(monkeypatch):
    """The mixers of a hybrid compute it in one call, as a plain row."""
    model, groups = hybrid("qwen3_next"), below([(tokens(9, 1), [(tokens(3, 2), [tokens(2, 3)])])])
    batch = trees.pack(groups)
    trees.scores(model, batch)  # after a trial, which has branches
    monkeypatch.setattr(Tree, "scans", None)
    monkeypatch.setattr(Tree, "window", None)
    assert_equal_to_unshared(model, batch)


def test_ranges_are_made_once_for_a_batch(monkeypatch):
    """For all layers and calls, also if the first call was in inference mode."""
    made = []
    real = Tree.ranges
    monkeypatch.setattr(Tree, "ranges", lambda *a: (made.append(a[0]), real(*a))[1])
    model, batch = served("qwen3_moe"), trees.pack(FLAT)
    with torch.inference_mode():
        trees.scores(model, batch)
    assert_equal_to_unshared(model, batch)
    assert sum(tree is batch.tree for tree in made) == 1


def test_many_branches():
    groups = [(tokens(5, 1), [tokens(1 + n % 3, n) for n in range(1024)])]
    model, batch = served(), trees.pack(groups)
    parts = trees.log_probs(model, batch)
    expected, _ = unshared(model, batch)
    torch.testing.assert_close(torch.cat(parts[0]), torch.cat(expected[0]), rtol=2e-5, atol=2e-5)


def test_entropy_and_temperature():
    model, batch = served(), trees.pack(NESTED)
    log_probs, entropies = trees.log_probs(model, batch, temperature=0.7, entropy=True)
    ids, mask = batch.unshared()
    log_p = (model(input_ids=ids, attention_mask=mask).logits / 0.7).float().log_softmax(-1)
    first = log_p[0, 7:10]  # the first branch, after 8 tokens
    torch.testing.assert_close(log_probs[0][0], first.gather(-1, ids[0, 8:11, None])[:, 0])
    torch.testing.assert_close(entropies[0][0], -(first.exp() * first).sum(-1))


# --- prompts with pixels ---


@older_refuse
@pytest.mark.parametrize("model_type", ["llava", "internvl", "gemma3", "idefics3"])
def test_prompts_with_pixels(model_type):
    """Images stand in the prompt, once for all branches."""
    model, inputs, batch = with_pixels(model_type)
    with trees.shared(batch):
        logits = model(**batch.inputs, **inputs).logits[0]
    for segment in range(1, len(batch.tree.lengths)):
        path = batch.tree.path(segment)
        ids = batch.inputs["input_ids"][:, path]
        alone = model(input_ids=ids, use_cache=False, **inputs).logits[0]
        torch.testing.assert_close(logits[path], alone, rtol=1e-4, atol=1e-4)
    others = {n: -v if v.is_floating_point() else v for n, v in inputs.items()}
    with trees.shared(batch):
        assert not torch.allclose(model(**batch.inputs, **others).logits[0], logits, rtol=1e-2)


def test_positions_of_images_are_asked_for():
    model, inputs, batch = with_pixels("qwen2_vl")
    match = r"pass position_ids \(3 or 4, 1, 35\)"
    with trees.shared(batch), pytest.raises(PackingError, match=match):
        model(**batch.inputs, **inputs)


@older_refuse
@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_positions_of_images(model_type):
    """The prompt's are those of the model; branches go on after the last one on every axis."""
    model, inputs, batch = with_pixels(model_type)
    ids, prompt = batch.inputs["input_ids"], batch.tree.lengths[0]
    kinds, grid = (ids == model.config.image_token_id).int(), inputs["image_grid_thw"]
    own, _ = model.model.get_rope_index(ids[:, :prompt], kinds[:, :prompt], image_grid_thw=grid)
    later = own.amax() + 1 + batch.inputs["position_ids"][:, prompt:] - prompt
    positions = torch.cat([own, later.expand(3, -1, -1)], -1)
    with trees.shared(batch):
        logits = model(**{**batch.inputs, "position_ids": positions}, **inputs).logits[0]
    assert not torch.equal(own, batch.inputs["position_ids"][:, :prompt].expand_as(own))
    for segment in range(1, len(batch.tree.lengths)):
        path = batch.tree.path(segment)
        rows = {"input_ids": ids[:, path], "mm_token_type_ids": kinds[:, path], "use_cache": False}
        alone = model(**rows, **inputs).logits[0]
        torch.testing.assert_close(logits[path], alone, rtol=1e-4, atol=1e-4)


def with_pixels(model_type):
    """A tiny model, what it takes beside tokens, and a tree whose prompt has images."""
    model, pair = tiny(model_type, "ForConditionalGeneration")
    whole = cases.inputs(pair, model)
    ids = whole["input_ids"]
    inputs = {n: v[: len(v) // len(ids)] for n, v in whole.items() if "pixel" in n or "grid" in n}
    answers = [[10 + token % 50 for token in tokens(count, count)] for count in (4, 1, 6)]
    return model, inputs, trees.pack([(ids[0].tolist(), answers)])


# --- branches do not see each other ---


def test_rows_do_not_depend_on_siblings():
    """Under ``deterministic="rows"``: the same branch beside others, longer ones and none."""
    answer, others = tokens(6, 2), [tokens(11, 3), tokens(1, 4)]
    with liger_multi.use(deterministic="rows"), torch.no_grad():
        model = served("gemma2")
        bits = [
            trees.log_probs(model, trees.pack([(tokens(9, 1), answers)]))[0][at]
            for answers, at in (([answer], 0), ([answer, *others], 0), ([*others, answer], 2))
        ]
    assert torch.equal(bits[0], bits[1])
    assert torch.equal(bits[0], bits[2])


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_no_other_branch_moves_by_a_bit(model_type):
    assert_no_other_branch_moves(served(model_type))


def assert_no_other_branch_moves(model, device="cpu"):
    """When a token of one is another one."""
    batch = trees.pack(NESTED + PAIR, device=device)
    with torch.no_grad(), trees.shared(batch):
        plain = model(**batch.inputs).logits[0]
        for segment in range(len(batch.tree.lengths)):
            start = batch.tree.starts[segment]
            ids = batch.inputs["input_ids"].clone()
            ids[0, start] += 1
            moved = model(**{**batch.inputs, "input_ids": ids}).logits[0]
            below = batch.tree.below(segment)
            numbers = batch.tree.segments(ids.device)
            inside = torch.isin(numbers, torch.tensor(below, device=device))
            assert torch.equal(moved[~inside], plain[~inside])
            assert not torch.equal(moved[inside], plain[inside])


def of_row(states):
    """The last token sees the first one, whatever path it is on."""
    return torch.cat([states[:, :-1], states[:, -1:] + states[:, :1]], 1)


LEAKS = {
    "the token before": lambda h: h + 0.5 * torch.nn.functional.pad(h, (0, 0, 1, -1)),
    "five tokens before": lambda h: h + 0.5 * torch.nn.functional.pad(h, (0, 0, 5, -5)),
    "a sum": lambda h: h + 0.02 * h.cumsum(1),
    "the end of a row": of_row,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("leak", [None, *LEAKS.values()], ids=["none", *LEAKS])
def test_a_class_that_lets_tokens_see_others_is_refused(leak, dtype):
    """Also in 16 bits, and where few tokens of a branch are concerned."""

    class Leaking(transformers.LlamaModel):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            states = output.last_hidden_state
            output.last_hidden_state = leak(states) if leak else states
            return output

    model = build().to(dtype)
    redrawn(model).model.__class__ = Leaking
    model.set_attn_implementation("liger_multi")
    patch(model)
    match = "the output of a branch differs"
    refused = pytest.raises(PackingError, match=match) if leak else contextlib.nullcontext()
    with refused:
        trees.scores(model, trees.pack(NESTED))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_routers_in_16_bits_are_served(model_type):
    trees.scores(served(model_type).bfloat16(), trees.pack(NESTED))


# --- from rows ---


def padded(rows, side="right"):
    longest = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest)
    for number, row in enumerate(rows):
        at = slice(0, len(row)) if side == "right" else slice(longest - len(row), longest)
        ids[number, at], mask[number, at] = torch.tensor(row), 1
    return ids, mask.long()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("prompts", [True, False], ids=["prompts", "common"])
def test_from_batch(side, prompts):
    one, other, middle = tokens(9, 1), tokens(7, 2), tokens(4, 3)
    rows = [
        one + middle + tokens(3, 4),
        other + tokens(5, 5),
        one + middle + tokens(2, 6),
        one + tokens(6, 7),
        one + middle,
        other + tokens(5, 5),
    ]
    ids, mask = padded(rows, side)
    lengths = [9, 7, 9, 9, 9, 7] if prompts else None
    batch = trees.from_batch(ids, mask, prompt_lengths=lengths, shortest=4)
    assert batch.tree.tokens < sum(map(len, rows))
    model = served()
    ours = batch.to_rows(trees.scores(model, batch).log_probs)
    output = model(
        input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)
    )
    log_p = output.logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    predicted = batch.rows[:, 1:] >= 0
    torch.testing.assert_close(ours[:, 1:][predicted], log_p[predicted], rtol=2e-5, atol=2e-5)
    assert torch.equal(ours[batch.rows < 0], torch.zeros(int((batch.rows < 0).sum())))
    expected = sum(len(r) for r in rows) - (9 * 4 + 7 * 2 if prompts else 9 * 4 + 12 * 2)
    assert int(predicted.sum()) == expected


def test_batches_of_limited_size():
    batches = trees.pack(PAIR * 3, max_tokens=45)
    assert [b.tree.tokens for b in batches] == [28, 28, 28]
    assert sum(len(b.split(b.sources)) for b in batches) == 6
    with pytest.raises(ValueError, match="tree 0 has 20 tokens, max_tokens is 19"):
        trees.pack(PAIR, max_tokens=19)


# --- compiled ---


@pytest.mark.slow
def test_compiled_layers():
    """Of trees whose sizes and depths differ, which makes symbols of them."""
    model = served()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    for groups in (NESTED, FLAT, PAIR):
        assert_equal_to_unshared(model, trees.pack(groups))


@pytest.mark.parametrize("whole", [True, False], ids=["model", "backbone"])
def test_compiled_models_are_refused(whole):
    """A graph that was made without a tree would not follow one."""
    model, batch = served(), trees.pack(FLAT)
    trees.scores(model, batch)
    compiled = torch.compile(model, backend="eager") if whole else model
    if not whole:
        model.model.compile(backend="eager")
    match = "no patched model was called" if whole else "compile its layers, not the model"
    with pytest.raises(PackingError, match=match):
        trees.scores(compiled, batch)


# --- refused ---


@older_refuse
@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("bloom", "its attention is eager"),
        ("bert", "a token sees no later ones"),
        ("mamba", "nothing keeps branches apart in MambaMixer, mamba_selective_scan"),
        ("recurrent_gemma", "does not serve shared prefixes: the output of a branch differs"),
    ],
)
def test_types_that_are_refused(model_type, why):
    pair = next(p for p in cases.registered() if p.type == model_type and p.kind == "causal")
    verdict = judge(pair)
    assert verdict.status == "refused"
    assert why in verdict.why


def test_attention_of_others_is_refused():
    model = build()
    patch(model)
    batch = trees.pack(FLAT)
    with pytest.raises(PackingError, match=r"its attention is sdpa: .*set_attn_implementation"):
        trees.log_probs(model, batch)


def test_generation_is_refused():
    model, batch = served(), trees.pack(FLAT)
    with trees.shared(batch), pytest.raises(PackingError, match="as generation does"):
        model.generate(**batch.inputs, max_new_tokens=2)


def test_models_that_are_not_patched_are_refused():
    model, batch = build(), trees.pack(FLAT)
    model.set_attn_implementation("liger_multi")
    with pytest.raises(PackingError, match="no patched model was called with 26 tokens"):
        trees.log_probs(model, batch)


def test_more_positions_than_a_model_has():
    batch = trees.pack([(tokens(60, 1), [tokens(5, 2)])])
    with pytest.raises(PackingError, match=r"has 64 positions .* longest path .* has 65 tokens"):
        trees.log_probs(served(), batch)


def test_paths_of_too_many_segments():
    answer = tokens(1, 0)
    for n in range(17):
        answer = (tokens(1, n), [tokens(1, n), answer])
    with pytest.raises(ValueError, match="16 segments that lie apart in the row, got 18"):
        trees.pack([answer])


def deep(levels):
    """A branch within a branch, and so on."""
    answer = [1]
    for _ in range(levels):
        answer = ([1], [answer])
    return answer


@pytest.mark.parametrize(
    ("groups", "error", "match"),
    [
        ([], ValueError, "at least one tree"),
        ([([], [])], ValueError, "at least one token"),
        ([(["a"], [])], TypeError, "a prompt must be ids"),
        ([([1], [(2, 3, 4)])], TypeError, "a tuple of ids and a list of answers"),
        ([(torch.ones(2), [])], TypeError, "ids of one axis"),
        ([(torch.ones(2) + 0j, [])], TypeError, "ids of one axis"),
        ([([1, True], [])], TypeError, "a prompt must be ids"),
        ([([1], [[2, -100]])], ValueError, "an answer to a prompt has the id -100"),
        ([deep(300)], ValueError, "nested in more than 256 levels"),
        ([("text", [])], TypeError, "a list or a tensor"),
    ],
)
def test_wrong_trees(groups, error, match):
    with pytest.raises(error, match=match):
        trees.pack(groups)


ROWS = torch.tensor([tokens(6, 1)] * 2)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"ids": ROWS.float()}, TypeError, "ids must be integers"),
        ({"ids": ROWS - 300}, ValueError, "a row has the id -"),
        ({"prompt_lengths": [1]}, ValueError, r"within the rows' \[6, 6\], got \[1\]"),
        ({"prompt_lengths": [1, 7]}, ValueError, r"got \[1, 7\]"),
        ({"prompt_lengths": 3}, TypeError, "prompt_lengths must be integers"),
        ({"prompt_lengths": [1.5, 1]}, TypeError, "prompt_lengths must be integers"),
        ({"prompt_lengths": [1, 1], "shortest": 0}, ValueError, "shortest must be at least 1"),
        ({"depth": 0}, ValueError, "depth must be at least 1, got 0"),
    ],
)
def test_wrong_rows(arguments, error, match):
    with pytest.raises(error, match=match):
        trees.from_batch(**{"ids": ROWS, "mask": torch.ones(2, 6), **arguments})


def test_numbers_of_other_tokens():
    batch = trees.from_batch(ROWS, torch.ones(2, 6), shortest=2)
    for method in (batch.split, batch.to_rows):
        with pytest.raises(ValueError, match=r"of the 0 predicted tokens, got .*\(3,\)"):
            method(torch.ones(3))


def test_arguments_that_do_not_fit_a_tree():
    model, batch = served(), trees.pack(FLAT)
    with pytest.raises(PackingError, match="got logits_to_keep beside shared prefixes"):
        trees.scores(model, batch, logits_to_keep=1)
    with trees.shared(batch), pytest.raises(PackingError, match="a mask of its own"):
        model(**{**batch.inputs, "attention_mask": torch.ones(1, 1, 26, 26)})


def test_log_probs_without_a_predicted_token_have_gradients():
    batch = trees.from_batch(ROWS, torch.ones(2, 6), prompt_lengths=[6, 6])
    model = served()
    batch.to_rows(trees.scores(model, batch).log_probs).sum().backward()
    assert not any(grad.any() for grad in gradients(model).values())
