"""Fused losses hold one buffer of logits, survive running out of memory, and follow free memory."""

import gc
import warnings

import pytest
import torch
from torch.overrides import TorchFunctionMode

from liger_multi import ops
from liger_multi.memory import measure
from liger_multi.reference.common import chunking, retry
from liger_multi.testing.tolerance import excess

ROWS, WIDTH, VOCABULARY = 60, 4, 97


def inputs(rows=ROWS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype).requires_grad_()
    target = torch.randint(VOCABULARY, (rows,), generator=generator)
    return hidden, weight, target


class Full(TorchFunctionMode):
    """A device on which tensors of more than some rows of logits do not fit, some times."""

    def __init__(self, rows, times=1000):
        super().__init__()
        self.rows, self.times, self.refused, self.widest = rows, times, 0, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func is torch.Tensor.new_empty and made.ndim == 2 and made.shape[1] == VOCABULARY:
            if made.shape[0] > self.rows and self.refused < self.times:
                self.refused += 1
                raise torch.OutOfMemoryError("no memory for the logits")
            self.widest = max(self.widest, made.shape[0])
        return made


@pytest.fixture(autouse=True)
def unsaid():
    retry._said.clear()
    yield
    retry._said.clear()


def call(name, hidden, weight, target):
    if name == "fused_linear_cross_entropy":
        return ops.fused_linear_cross_entropy(hidden, weight, target, chunk=40)
    if name == "none":
        losses = ops.fused_linear_cross_entropy(hidden, weight, target, chunk=40, reduction="none")
        return (losses * torch.arange(1.0, ROWS + 1)).sum()
    return ops.fused_linear_log_prob(hidden, weight, target, chunk=40).log_prob.sum()


@pytest.mark.parametrize("name", ["fused_linear_cross_entropy", "none", "fused_linear_log_prob"])
def test_out_of_memory_is_tried_again_with_a_quarter(name):
    wanted = inputs()
    plain = call(name, *wanted)
    plain.backward()
    found = inputs()
    before = [t.detach().clone() for t in found]
    full = Full(10)
    with pytest.warns(RuntimeWarning, match=r"out of memory with 40 rows.*with 10 instead"), full:
        loss = call(name, *found)
    assert (full.refused, full.widest) == (1, 10)
    with full:
        loss.backward()
    torch.testing.assert_close(loss, plain)
    exact = [t.detach().double().requires_grad_() for t in wanted[:2]]
    call(name, *exact, wanted[2]).backward()
    for a, b in zip(found[:2], exact, strict=True):
        assert excess(a.grad, b.grad, torch.float32) <= 1
    assert all(torch.equal(a, b) for a, b in zip(found, before, strict=True)), "left alone"


def test_it_says_so_once():
    with warnings.catch_warnings(record=True) as seen, Full(10) as full:
        warnings.simplefilter("always")
        for _ in range(3):
            call("fused_linear_cross_entropy", *inputs())
    assert full.refused == 3
    assert len([w for w in seen if "out of memory" in str(w.message)]) == 1


def test_a_second_failure_is_the_callers():
    found = inputs()
    before = [t.detach().clone() for t in found]
    with (
        Full(9) as full,
        pytest.warns(RuntimeWarning, match="out of memory"),
        pytest.raises(torch.OutOfMemoryError, match="no memory for the logits"),
    ):
        call("fused_linear_cross_entropy", *found)
    assert full.refused == 2
    assert all(torch.equal(a, b) for a, b in zip(found, before, strict=True))
    loss = call("fused_linear_cross_entropy", *found)  # nothing remembers the failure
    torch.testing.assert_close(loss, call("fused_linear_cross_entropy", *inputs()))


def test_a_single_chunk_is_not_tried_again():
    hidden, weight, target = inputs(rows=4)
    with Full(2) as full, pytest.raises(torch.OutOfMemoryError):
        ops.fused_linear_cross_entropy(hidden, weight, target)
    assert full.refused == 1


def test_the_buffers_of_the_first_attempt_are_gone_in_the_second():
    hidden, weight, target = inputs()
    peaks = []
    for rows in (10, 1000):
        with measure("cpu", known=[hidden, weight, target]) as peak, Full(rows):
            gc.collect()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call("fused_linear_cross_entropy", hidden, weight, target)
        peaks.append(peak.peak_bytes)
    logits = VOCABULARY * 4
    # its own ten rows, and what the reference makes of them, stand alone
    assert peaks[0] < peaks[1] - 20 * logits


def test_no_growth_over_chunks_and_steps():
    hidden, weight, target = inputs()
    peaks, ends = [], []
    for _ in range(4):
        with measure("cpu", known=[hidden, weight, target]) as peak:
            ops.fused_linear_cross_entropy(hidden, weight, target, chunk=8).backward()
            hidden.grad = weight.grad = None
        peaks.append(peak.peak_bytes)
        ends.append(peak.end_bytes)
    assert len(set(peaks)) == 1
    assert ends == [sum(t.nbytes for t in (hidden, weight, target))] * 4


def test_chunks_share_one_buffer():
    peaks = []
    for rows in (16, 48):
        hidden, weight, target = inputs(rows)
        with measure("cpu", known=[hidden, weight, target]) as peak:
            ops.fused_linear_cross_entropy(hidden.detach(), weight.detach(), target, chunk=8)
        peaks.append(peak.added_bytes)
    # numbers of rows grow, logits do not
    assert peaks[1] - peaks[0] < 32 * 8 * 8 < 8 * VOCABULARY * 4


def test_the_budget_follows_free_memory_and_no_result_does(monkeypatch):
    monkeypatch.setattr(chunking, "MIN_ROWS", 1)
    results, seen = [], []
    for rows in (1, 5, 16, 1000):
        hidden, weight, target = inputs()
        free = rows * VOCABULARY * 4 * chunking.FREE_SHARE
        with Full(10**9) as watch:
            token = chunking.assumed_free.set(free)
            try:
                loss = ops.fused_linear_cross_entropy(hidden, weight, target)
            finally:
                chunking.assumed_free.reset(token)
        loss.backward()
        seen.append(watch.widest)
        results.append((loss.detach(), hidden.grad, weight.grad))
    assert seen == [1, 4, 16, 32], "powers of two, two chunks at least"
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
