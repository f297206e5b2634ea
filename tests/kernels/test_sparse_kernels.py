"""Kernels of sparse attention beyond the common suite, on a GPU or interpreted.

Queries in several parts, lists that name wrong keys, the selection among equal and strange scores.
"""

import pytest
import torch

import liger_multi
from liger_multi import ops
from liger_multi.reference.attention.indexer_topk import selected
from tests import harness

pytest.importorskip("triton")
if (DEVICE := harness.device_of("triton")) is None:
    pytest.skip("kernels on a CPU need TRITON_INTERPRET=1", allow_module_level=True)

from liger_multi.backends.triton.attention import (
    indexer_kernels,
    indexer_topk,
    pairs_of_lists,
    sparse_attention,
)
from liger_multi.backends.triton.common.launching import launch

GENERATOR = torch.Generator()


@pytest.fixture(autouse=True)
def by_triton():
    GENERATOR.manual_seed(0)
    with liger_multi.use(**dict.fromkeys(NAMES, "triton")):
        yield


NAMES = ("sparse_attention", "indexer_scores", "indexer_topk")


def normal(*shape):
    return torch.randn(*shape, generator=GENERATOR).to(DEVICE).requires_grad_()


def lists(*shape, keys):
    return torch.randint(-1, keys, shape, generator=GENERATOR).to(DEVICE)


def all_gradients(leaves, result):
    up = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return torch.autograd.grad(result, leaves, up)


def test_queries_in_several_parts_have_the_same_gradients(monkeypatch):
    """Parts of one query at a time, of three, and of all."""
    q, k, v = normal(2, 4, 7, 16), normal(2, 2, 9, 16), normal(2, 2, 9, 8)
    where = lists(2, 7, 5, keys=9)
    i, j, w = normal(2, 7, 3, 16), normal(2, 9, 16), normal(2, 7, 3)
    actual = []
    for size in (1, 3 * 5 * (4 * 2 * 24 + 2 * 4 * 4), 2**30):
        monkeypatch.setattr(pairs_of_lists, "PARTS_BYTES", size)
        gradients = all_gradients((q, k, v), ops.sparse_attention(q, k, v, where))
        scores = ops.indexer_scores(i, j, w, where).masked_fill(where < 0, 0)
        actual.append((*gradients, *all_gradients((i, j, w), scores)))
    for other in actual[:2]:
        torch.testing.assert_close([*other], [*actual[2]], rtol=1e-5, atol=1e-6)


def test_scores_in_several_parts_select_the_same_keys(monkeypatch):
    i, j, w = normal(2, 150, 3, 16), normal(2, 150, 16), normal(2, 150, 3)
    whole = ops.indexer_topk(i, j, w, 9)
    monkeypatch.setattr(indexer_topk, "SCORES_BYTES", 1)
    assert all(torch.equal(*pair) for pair in zip(ops.indexer_topk(i, j, w, 9), whole, strict=True))


def test_a_key_that_does_not_exist_gives_nan():
    """In the output of that query alone, without a read of foreign memory."""
    q, k = normal(1, 2, 6, 16), normal(1, 1, 5, 16)
    where = lists(1, 6, 4, keys=5).clamp(min=0)
    right = ops.sparse_attention(q, k, None, where, value_dim=8)
    where[0, 2, 1] = 5
    y = ops.sparse_attention(q, k, None, where, value_dim=8)
    assert y[:, :, 2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(y[:, :, others], right[:, :, others])
    (dq,) = torch.autograd.grad(y.sum(), q)
    assert dq[:, :, 2].isnan().all()
    assert dq[:, :, others].isfinite().all()
    scores = ops.indexer_scores(normal(1, 6, 2, 16), normal(1, 5, 16), normal(1, 6, 2), where)
    assert torch.equal(scores.isnan(), where == 5)


def test_few_heads_and_many_take_other_tiles(monkeypatch):
    """Tiles of 16 and of 64 heads, and several blocks of heads."""
    q, k = normal(1, 70, 3, 24), normal(1, 1, 6, 24)
    where = lists(1, 3, 20, keys=6)

    def run():
        y, weights = ops.sparse_attention_with_weights(q, k, None, where, value_dim=16)
        return y, weights, *all_gradients((q, k), y)

    right = run()
    wide = sparse_attention.SparseConfig(64, 32, 1, 4)
    keys = sparse_attention.KeysConfig(64, 16, 32, 1, 4)

    def other(name, *args, **shape):
        return keys if name.endswith(".keys") else wide

    monkeypatch.setattr(sparse_attention, "launch_config", other)
    torch.testing.assert_close([*run()], [*right], rtol=1e-5, atol=1e-6)


STRANGE = {
    "equal": lambda s: s.round(),
    "zeros": lambda s: s * 0,
    "both zeros": lambda s: torch.where(s > 0, 0.0, -0.0),
    "infinite": lambda s: torch.where(s > 1.5, torch.inf, s),
    "nan": lambda s: torch.where(s > 1.5, torch.nan, s),
    "small": lambda s: s * 1e-40,
    "close": lambda s: 1 + s * 2**-22,
}


@pytest.mark.parametrize("change", STRANGE.values(), ids=STRANGE)
@pytest.mark.parametrize("count", [1, 40, 300])
def test_the_selection(change, count):
    """Rows whose ranges begin and end anywhere, over several tiles of 128."""
    padded = change(torch.randn(9, 384, generator=GENERATOR)).to(DEVICE)
    scores = padded[:, :300]
    low = torch.tensor([0, 0, 1, 127, 128, 129, 5, 299, 300])
    high = torch.tensor([300, 1, 300, 255, 300, 260, 5, 300, 300])
    ranges = torch.stack([low, high], -1).to(DEVICE, torch.int32)
    indices = torch.empty(9, count, dtype=torch.int32, device=DEVICE)
    actual = torch.empty(9, count, device=DEVICE)
    launch(
        indexer_kernels._indexer_select_kernel,
        9,
        (padded, ranges, indices, actual, 384, 0, 9, 300, count),
        (False, 128),
        4,
    )
    place = torch.arange(300, device=DEVICE)
    visible = (place >= ranges[:, :1]) & (place < ranges[:, 1:])
    assert torch.equal(indices, selected(scores, visible, count))
    values = scores.gather(1, indices.clamp(min=0).long()).masked_fill(indices < 0, -torch.inf)
    torch.testing.assert_close(actual, values, rtol=0, atol=0, equal_nan=True)
