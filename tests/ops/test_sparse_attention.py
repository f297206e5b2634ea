"""Attention over lists of keys, and indexers, beyond the common suite.

Extremes, packing, lists that name wrong keys, the loss of an indexer, and dense attention.
"""

import itertools

import pytest
import torch

from liger_multi import ops
from liger_multi.reference.attention.sparse_attention import SumsByKey, add_rows_
from liger_multi.testing import FORMULAS
from liger_multi.testing.tolerance import excess


def normal(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


def gradients(run, leaves, **options):
    """The output and the gradients of its leaves, for one upstream gradient."""
    leaves = {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in leaves.items()}
    y = run(**leaves, **options)
    up = normal(1)(*y.shape).to(y.dtype)
    inputs = [t for t in leaves.values() if t.requires_grad]
    return y, *torch.autograd.grad(y, inputs, up)


def near(actual, right, dtype=torch.float64):
    bound = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for got, expected in zip(actual, right, strict=True):
        assert got.shape == expected.shape
        error = (got.double() - expected).abs().max() if expected.numel() else torch.zeros(())
        scale = expected.abs().max().clamp(min=1.0) if expected.numel() else 1.0
        assert error <= bound * scale


def latents(length=20, listed=7, keys=0, heads=3, seed=0):
    draw, keys = normal(seed), keys or length
    generator = torch.Generator().manual_seed(seed)
    return {
        "q": draw(1, heads, length, 12),
        "k": draw(1, 1, keys, 12),
        "indices": torch.randint(-1, keys, (1, length, listed), generator=generator),
    }


LATENT = {"v": None, "value_dim": 8}

# --- attention ---


@pytest.mark.parametrize("together", [64, 4096, 70000])
@pytest.mark.parametrize("keys", [3, 4096])
def test_sums_of_a_key_that_every_query_lists(device, keys, together):
    """One fp32 addition after another is off by 0.7 tolerances after so many terms."""
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(keys, (1, 65537, 2), generator=generator)
    places[..., 0] = 0  # as the first token of many models
    inside = torch.rand(places.shape, generator=generator) < 0.9
    rows = torch.rand(1, 65537, 2, 4, generator=generator)
    exact = torch.zeros(1, keys, 4, dtype=torch.float64)
    add_rows_(exact, places, inside, rows.double())
    places, inside, rows = places.to(device), inside.to(device), rows.to(device)
    sums = SumsByKey(exact.shape, rows, 2, 65537)
    for start in range(0, 65537, together):
        some = slice(start, start + together)
        sums.add(places[:, some], inside[:, some], rows[:, some])
    assert excess(sums.result().cpu(), exact, torch.float32) < 0.2


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_duplicates_count_and_absent_ones_do_not(dtype, index_dtype):
    inputs = latents()
    inputs["indices"] = torch.tensor([3, 3, -1, 0, -1, 3, 9]).expand(1, 20, 7)
    narrow = {n: t.to(dtype) for n, t in inputs.items()} | {
        "indices": inputs["indices"].to(index_dtype)
    }
    wide = {n: t.to(dtype).double() for n, t in inputs.items()} | {"indices": inputs["indices"]}
    right = gradients(FORMULAS["sparse_attention"], wide, **LATENT)
    near(gradients(ops.sparse_attention, narrow, **LATENT), right, dtype)
    once = {**inputs, "indices": torch.tensor([3, 0, 9]).expand(1, 20, 3)}
    y = ops.sparse_attention(**once, **LATENT)
    assert not torch.allclose(y, right[0], atol=1e-3)


def test_the_order_of_a_list_does_not_matter():
    inputs = latents()
    turned = {**inputs, "indices": inputs["indices"].flip(-1)}
    near(*(gradients(ops.sparse_attention, x, **LATENT) for x in (inputs, turned)))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 65])
@pytest.mark.parametrize("listed", [1, 16, 33])
def test_lengths(length, listed):
    inputs = latents(length, listed)
    right = gradients(FORMULAS["sparse_attention"], inputs, **LATENT)
    near(gradients(ops.sparse_attention, inputs, **LATENT), right)


def test_all_keys_listed_is_dense_attention():
    """The causal list of every query, against the dense operator, with values of their own."""
    draw, length = normal(), 33
    inputs = {"q": draw(2, 4, length, 6), "k": draw(2, 2, length, 6), "v": draw(2, 2, length, 5)}
    place = torch.arange(length)
    lists = torch.where(place[:, None] >= place, place, -1).expand(2, -1, -1)
    actual = gradients(ops.sparse_attention, {**inputs, "indices": lists})
    near(actual, gradients(ops.attention, inputs, causal=True))


def test_large_scores_do_not_overflow():
    inputs = latents()
    inputs["q"] *= 300
    inputs["indices"][:, :5] = -1
    narrow = {n: t.float() if t.is_floating_point() else t for n, t in inputs.items()}
    wide = {n: t.double() if t.is_floating_point() else t for n, t in narrow.items()}
    actual = gradients(ops.sparse_attention, narrow, **LATENT)
    assert all(x.isfinite().all() for x in actual)
    assert not actual[0][:, :, :5].any()
    right = FORMULAS["sparse_attention"](**wide, **LATENT)
    near(actual[:1], (right,), torch.float32)


def test_weights_are_the_probabilities_of_listed_keys():
    inputs = latents()
    inputs["indices"][0, :3, 0] = -1
    y, weights = ops.sparse_attention_with_weights(**inputs, **LATENT)
    assert torch.equal(y, ops.sparse_attention(**inputs, **LATENT))
    assert weights.shape == inputs["indices"].shape
    assert not weights.requires_grad
    assert not weights[inputs["indices"] < 0].any()
    listed = (inputs["indices"] >= 0).any(-1)
    torch.testing.assert_close(weights.sum(-1), listed.double())


def test_wrong_indices_are_named():
    inputs = latents()
    inputs["indices"][0, 3, 2] = 20
    with pytest.raises(ValueError, match="below the number of keys, 20, or -1, got 20"):
        ops.sparse_attention(**inputs, **LATENT)
    scores = (normal()(1, 20, 2, 4), normal()(1, 20, 4), normal()(1, 20, 2), inputs["indices"])
    with pytest.raises(ValueError, match="below the number of keys, 20, or -1, got 20"):
        ops.indexer_scores(*scores)


def test_blocks_of_one_query_change_nothing(monkeypatch):
    from liger_multi.reference.attention import indexer_scores, indexer_topk, sparse_attention

    inputs, index = latents(), indexed(30)
    run = [
        lambda: gradients(ops.sparse_attention, inputs, **LATENT),
        lambda: gradients(best_scores, index, topk=5),
    ]
    whole = [f() for f in run]
    for module in (indexer_scores, indexer_topk, sparse_attention):
        blocks = module.row_blocks
        monkeypatch.setattr(
            module, "row_blocks", lambda n, size, limit=0, of=blocks: of(n, size, 1)
        )
    for f, right in zip(run, whole, strict=True):
        near(f(), right)


# --- the indexer ---


def indexed(length=20, keys=0, heads=4, seed=0):
    draw = normal(seed)
    return {
        "q": draw(1, length, heads, 6),
        "k": draw(1, keys or length, 6),
        "w": draw(1, length, heads),
    }


def best_scores(q, k, w, topk, **options):
    """Scores alone, with zeros where absent."""
    scores = ops.indexer_topk(q, k, w, topk, **options).scores
    return scores.masked_fill(scores == -torch.inf, 0)


@pytest.mark.parametrize(
    "lengths", [(1, 2, 13, 1, 4), (1, 1, 1), (0, 5, 0, 0, 9, 0), (16, 16), (40,)]
)
def test_packed_equals_separate(lengths):
    inputs, ends = indexed(sum(lengths)), [0, *itertools.accumulate(lengths)]
    table = torch.tensor(ends, dtype=torch.int32)
    actual = ops.indexer_topk(**inputs, topk=4, cu_seqlens=table)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    assert torch.equal(actual.indices, ops.indexer_topk(**inputs, topk=4, documents=documents)[0])
    for start, end in itertools.pairwise(ends):
        if start == end:
            continue
        part = {n: t[:, start:end] for n, t in inputs.items()}
        indices, scores = ops.indexer_topk(**part, topk=4)
        wide = actual.indices[:, start:end]
        assert torch.equal(
            wide[..., : indices.shape[-1]], torch.where(indices < 0, -1, indices + start)
        )
        assert (wide[..., indices.shape[-1] :] == -1).all()
        torch.testing.assert_close(actual.scores[:, start:end, : indices.shape[-1]], scores)


def test_equal_scores_select_the_first_keys():
    inputs = indexed(12)
    inputs["w"] = torch.zeros_like(inputs["w"])
    indices, scores = ops.indexer_topk(**inputs, topk=3, causal=False)
    assert torch.equal(indices, torch.arange(3, dtype=torch.int32).expand(1, 12, 3))
    assert not scores.any()


def test_ranges_and_other_masks_agree():
    inputs, place = indexed(15), torch.arange(15, dtype=torch.int32)
    ranges = torch.stack([place * 0, place + 1], -1)[None]
    causal = ops.indexer_topk(**inputs, topk=4)
    actual = ops.indexer_topk(**inputs, topk=4, ranges=ranges)
    assert all(torch.equal(a, b) for a, b in zip(causal, actual, strict=True))
    none = ops.indexer_topk(**inputs, topk=4, ranges=ranges * 0)
    assert (none.indices == -1).all()
    assert (none.scores == -torch.inf).all()


def test_nan_is_selected_and_not_lost():
    inputs = indexed(9)
    inputs["k"][0, 5] = torch.nan
    indices, scores = ops.indexer_topk(**inputs, topk=2, causal=False)
    assert (indices == 5).any(-1).all()
    assert scores.isnan().any(-1).all()


def test_scores_of_the_selection_are_those_of_its_indices():
    inputs = indexed(40)
    right = gradients(best_scores, inputs, topk=6)
    indices = ops.indexer_topk(**inputs, topk=6).indices

    def listed(**leaves):
        scores = ops.indexer_scores(**leaves, indices=indices)
        return scores.masked_fill(indices < 0, 0)

    near(gradients(listed, inputs), right)


def test_the_loss_of_an_indexer():
    """kl_div of scores and weights, against the dense formula, with gradients of the indexer."""
    inputs, index = latents(24), indexed(24)

    def loss(**leaves):
        indices, scores = ops.indexer_topk(**leaves, topk=5)
        weights = ops.sparse_attention_with_weights(
            inputs["q"], inputs["k"], None, indices, value_dim=8
        ).weights
        return ops.kl_div(scores, weights, form="logits", reduction="none")

    def dense(q, k, w):
        indices, scores = FORMULAS["indexer_topk"](q, k, w, 5)
        s = (inputs["q"] @ inputs["k"].mT) * 12**-0.5
        listed = torch.zeros(1, 24, 25, dtype=torch.bool).scatter(-1, indices.long() % 25, True)
        p = torch.softmax(s.masked_fill(~listed[:, None, :, :24], -torch.inf), -1).mean(1)
        p = torch.cat([p, p.new_zeros(1, 24, 1)], -1).gather(-1, indices.long() % 25)
        logs = torch.log_softmax(scores, -1)
        return torch.where(p > 0, p * (p.clamp(min=1e-300).log() - logs), 0).sum(-1)

    near(gradients(loss, index), gradients(dense, index))


# --- arguments ---

Q, K, V = torch.ones(1, 4, 3, 8), torch.ones(1, 2, 5, 8), torch.ones(1, 2, 5, 6)
LISTS = torch.zeros(1, 3, 2, dtype=torch.int64)
WRONG = {
    "axes": ((Q[0], K, V, LISTS), {}, ValueError, "q must have four axes"),
    "heads": ((Q[:, :3], K, V, LISTS), {}, ValueError, "multiple of G"),
    "values": ((Q, K, V[:, :, :4], LISTS), {}, ValueError, r"v must have shape \(1, 2, 5, 'E'\)"),
    "both": ((Q, K, V, LISTS), {"value_dim": 4}, ValueError, "either v or value_dim"),
    "neither": ((Q, K, None, LISTS), {}, ValueError, "either v or value_dim"),
    "value": ((Q, K, None, LISTS), {"value_dim": 9}, ValueError, r"value_dim must be in \[1, 8\]"),
    "lists": ((Q, K, V, LISTS[:, :2]), {}, ValueError, r"indices must have shape \(1, 3, K\)"),
    "groups": ((Q, K, V, LISTS[:, None].repeat(1, 3, 1, 1)), {}, ValueError, "indices must have"),
    "floats": ((Q, K, V, LISTS.float()), {}, TypeError, "indices must be a tensor of int64"),
    "dtypes": ((Q, K, V.double(), LISTS), {}, TypeError, "q is torch.float32, got v"),
    "scale": ((Q, K, V, LISTS), {"scale": "1"}, TypeError, "scale must be a number"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    args, options, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        ops.sparse_attention(*args, **options)


HEADS, KEYS, W = torch.ones(1, 3, 2, 4), torch.ones(1, 5, 4), torch.ones(1, 3, 2)
RANGES = torch.zeros(1, 3, 2, dtype=torch.int32)
IDS = RANGES[..., 0]
WRONG_INDEXERS = {
    "axes": ((HEADS[0], KEYS, W, 2), {}, ValueError, "q must have four axes"),
    "keys": ((HEADS, KEYS[:, :, :3], W, 2), {}, ValueError, r"k must have shape \(1, S, 4\)"),
    "weights": ((HEADS, KEYS, W[:, :2], 2), {}, ValueError, r"w must have shape \(1, 3, 2\)"),
    "dtypes": ((HEADS, KEYS.double(), W, 2), {}, TypeError, "q is torch.float32, got k"),
    "topk": ((HEADS, KEYS, W, 0), {}, ValueError, "topk must be at least 1, got 0"),
    "number": ((HEADS, KEYS, W, 1.5), {}, TypeError, "topk must be an integer"),
    "causal": ((HEADS, KEYS, W, 2), {"causal": 1}, TypeError, "causal must be True or False"),
    "ranges": ((HEADS, KEYS, W, 2), {"ranges": RANGES.long()}, ValueError, "ranges must be int32"),
    "kind": ((HEADS, KEYS, W, 2), {"ranges": [0, 1]}, TypeError, "ranges must be a tensor"),
    "both": ((HEADS, KEYS, W, 2), {"ranges": RANGES, "documents": IDS}, ValueError, "got both"),
    "documents": ((HEADS, KEYS, W, 2), {"documents": IDS}, ValueError, "documents must have"),
    "lengths": ((HEADS, KEYS, W, 2), {"cu_seqlens": RANGES}, ValueError, "cu_seqlens has one axis"),
}


@pytest.mark.parametrize("name", WRONG_INDEXERS)
def test_wrong_arguments_of_indexers(name):
    args, options, error, text = WRONG_INDEXERS[name]
    with pytest.raises(error, match=text):
        ops.indexer_topk(*args, **options)
