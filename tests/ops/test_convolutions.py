"""Causal convolutions: packed rows, the initial state, both layouts, and peers."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import liger_multi
from liger_multi import ops
from liger_multi.testing.samples import Sample, Tensor as Drawn
from tests import harness

LENGTHS = (1, 2, 63, 64, 65, 1, 0, 0, 1, 4096, 3)
FEW = (1, 1, 1, 2, 0, 5, 17, 64, 1)  # interpreted kernels take their time
WIDTHS = (2, 3, 4, 7)


@pytest.fixture(autouse=True)
def kernels_where_they_are_interpreted():
    """They are asked for by name on a CPU."""
    order = ["triton", "reference"] if harness.interpreted() else "auto"
    with liger_multi.use(causal_conv1d=order, gated_short_conv=order):
        yield


def convolve(x, weight, bias, **options):
    return ops.causal_conv1d(x, weight, bias, activation="silu", **options)


def short(x, weight, bias, **options):
    return ops.gated_short_conv(x, weight, bias, **options)


both = pytest.mark.parametrize(("run", "parts"), [(convolve, 1), (short, 3)])


def lengths():
    return FEW if harness.interpreted() else LENGTHS


def drawn(device, *shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [t.to(device, dtype).requires_grad_() for t in tensors]


def boundaries(counts, device, dtype=torch.int32):
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=dtype, device=device)


def seq_idx(counts, device, ids=None):
    ids = range(len(counts)) if ids is None else ids
    indices = [n for n, count in zip(ids, counts, strict=True) for _ in range(count)]
    return torch.tensor([indices], dtype=torch.int32, device=device)


# --- packed rows ---


@both
def test_ids_and_boundaries_say_the_same(device, run, parts):
    """Ids only say where they change: they may come again, be negative, or fall."""
    counts = (3, 1, 1, 2, 9, 4)
    x, weight, bias = drawn(device, (1, sum(counts), 4 * parts), (4, 3), (4,))
    right = run(x, weight, bias, cu_seqlens=boundaries(counts, device, torch.int64))
    for ids in ((0, 1, 0, 1, 0, 1), (7, -1, 7, -1, -2, 7)):
        assert torch.equal(run(x, weight, bias, seq_idx=seq_idx(counts, device, ids)), right)
        wide = seq_idx(counts, device, ids).long()
        assert torch.equal(run(x, weight, bias, seq_idx=wide), right)


@both
def test_what_stands_past_the_last_boundary_is_a_sequence(device, run, parts):
    counts = (4, 2, 5)
    x, weight, bias = drawn(device, (1, 11, 4 * parts), (4, 3), (4,))
    right = run(x, weight, bias, cu_seqlens=boundaries(counts, device))
    assert torch.equal(run(x, weight, bias, cu_seqlens=boundaries(counts[:2], device)), right)


# --- the initial state, layouts ---


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("first", [1, 2, 30])
def test_a_row_in_two_calls_is_one_call(device, width, first):
    """The initial state is the tokens before; its gradient is theirs."""
    x, weight, bias = drawn(device, (2, first + 12, 6), (6, width), (6,))
    padded = F.pad(x, (0, 0, width - 1, 0))
    early, late = x[:, :first], x[:, first:]
    state = padded[:, first : first + width - 1]
    parts = [convolve(early, weight, bias), convolve(late, weight, bias, initial_state=state)]
    right = convolve(x, weight, bias)
    torch.testing.assert_close(torch.cat(parts, 1), right)
    upstream = torch.linspace(-1, 1, right.numel(), device=device).view_as(right)
    actual = torch.autograd.grad(torch.cat(parts, 1), (x, weight, bias), upstream)
    expected = torch.autograd.grad(right, (x, weight, bias), upstream)
    torch.testing.assert_close([*actual], [*expected], rtol=1e-4, atol=1e-4)


def test_only_the_initial_state_may_need_a_gradient(device):
    x, weight, state = drawn(device, (2, 9, 4), (4, 4), (2, 3, 4))
    y = ops.causal_conv1d(x.detach(), weight.detach(), initial_state=state)
    (actual,) = torch.autograd.grad(y.sum(), state)
    w = weight.detach().flip(1)  # by distance
    expected = torch.stack([w[:, 3], w[:, 2:].sum(1), w[:, 1:].sum(1)])
    torch.testing.assert_close(actual, expected.expand(2, 3, 4))


def test_the_initial_state_is_of_the_first_sequence(device):
    counts = (2, 3, 6)
    x, weight, state = drawn(device, (1, 11, 4), (4, 4), (1, 3, 4))
    y = ops.causal_conv1d(x, weight, initial_state=state, cu_seqlens=boundaries(counts, device))
    first = ops.causal_conv1d(x[:, :2], weight, initial_state=state)
    rest = ops.causal_conv1d(x[:, 2:], weight, cu_seqlens=boundaries(counts[1:], device))
    torch.testing.assert_close(y, torch.cat([first, rest], 1))


# --- peers ---


# --- arguments, compilers ---


def test_wide_filters_go_to_the_reference(device):
    """Kernels keep a vector a tap in registers, and refuse more than eight."""
    sample = Sample("width-11", {"x": Drawn((1, 20, 4)), "weight": Drawn((4, 11), scale=0.3)}, {})
    tensors = sample.make(device, torch.float32)
    y = ops.causal_conv1d(**tensors)
    right = F.conv1d(F.pad(tensors["x"].mT, (10, 0)), tensors["weight"][:, None], groups=4).mT
    torch.testing.assert_close(y, right)


def test_packing_waits_for_nothing(device):
    """cu_seqlens and ids are read on the device: a meta tensor has no values to wait for."""
    x, weight = torch.empty(1, 30, 8, device="meta"), torch.empty(8, 4, device="meta")
    starts = torch.empty(5, dtype=torch.int32, device="meta")
    with liger_multi.use(causal_conv1d="reference"):
        assert ops.causal_conv1d(x, weight, cu_seqlens=starts).shape == x.shape


@both
def test_compiled_with_lengths_that_vary(device, run, parts):
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for counts in ((3, 9, 1), (20, 1, 0, 16)):
        x, weight, bias = drawn(device, (1, sum(counts), 4 * parts), (4, 3), (4,))
        starts = boundaries(counts, device)
        results = []
        for function in (run, compiled):
            y = function(x, weight, bias, cu_seqlens=starts)
            results.append((y, *torch.autograd.grad(y.square().sum(), (x, weight, bias))))
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


X, W = torch.ones(2, 5, 3), torch.ones(3, 4)
WRONG = (
    (lambda: ops.causal_conv1d(X[0], W), ValueError, "x must have three axes"),
    (lambda: ops.causal_conv1d(X, W.mT), ValueError, r"weight must have shape \(3, W\)"),
    (lambda: ops.causal_conv1d(X, W, W[0]), ValueError, r"bias must have shape \(3,\)"),
    (lambda: ops.causal_conv1d(X, W, activation="gelu"), ValueError, "activation 'gelu'"),
    (lambda: ops.causal_conv1d(X, W, channel_axis=0), ValueError, "channel_axis must be 1 or the"),
    (lambda: ops.causal_conv1d(X, W, channel_axis=1), ValueError, r"weight must have shape \(5, "),
    (lambda: ops.causal_conv1d(X.int(), W), TypeError, "x must be a floating-point tensor"),
    (lambda: ops.causal_conv1d(X, W, initial_state=X), ValueError, r"must have shape \(2, 3, 3\)"),
    (
        lambda: ops.causal_conv1d(X, W, seq_idx=torch.zeros(5, dtype=torch.int32)),
        ValueError,
        r"seq_idx must have shape \(2, 5\)",
    ),
    (
        lambda: ops.causal_conv1d(X, W, seq_idx=torch.zeros(2, 5)),
        TypeError,
        "seq_idx must be a tensor of int64 or int32",
    ),
    (
        lambda: ops.causal_conv1d(X, W, cu_seqlens=torch.tensor([0, 5])),
        ValueError,
        "for a batch of one row",
    ),
    (lambda: ops.gated_short_conv(torch.ones(2, 5, 8), W), ValueError, r"shape \(B, T, 3 C\)"),
    (lambda: ops.gated_short_conv(torch.ones(2, 5, 12), W), ValueError, r"have shape \(4, W\)"),
)


test_wrong_arguments = harness.refuses(WRONG)
