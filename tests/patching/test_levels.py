"""Recurrences and convolutions over a row of trees, in fp64: every path as if it were alone."""

import pytest
import torch

from liger_multi import ops
from liger_multi.patching.mixers import STILL, PerToken, scan, windowed
from liger_multi.patching.packing.tree import planted

TREES = {
    "a path": [(9, [])],
    "flat": [(7, [(5, []), (1, []), (5, [])])],
    "ragged": [(9, [(3, [(20, []), (1, [(2, []), (70, [])])]), (1, []), (6, [])]), (2, [(3, [])])],
    "one token": [(1, [(1, [(1, []), (1, [])]), (1, [])])],
}


def draw(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def state_of(function, with_state):
    """A call of an operator from a state, as :func:`scan` makes it."""

    def run(rows, state, output_state):
        if output_state:
            return with_state(*rows, initial_state=state)
        return function(*rows, initial_state=state), None

    return run


def delta_rule(count):
    inputs = [draw(1, count, 2, 8, seed=n) for n in range(3)]
    gates = [-draw(1, count, 2, seed=3).abs(), draw(1, count, 2, seed=4).sigmoid()]
    options = {"qk_l2norm": True}

    def call(name):
        return lambda *rows, **kwargs: getattr(ops, name)(*rows, **kwargs, **options)

    run = state_of(call("gated_delta_rule"), call("gated_delta_rule_with_state"))
    return [*inputs, *gates], [0.0] * 5, run


def heads_scan(count, limits=(0.0, float("inf"))):
    x, dt = draw(1, count, 4, 6, seed=0), draw(1, count, 4, seed=1)
    b, c = draw(1, count, 2, 8, seed=2), draw(1, count, 2, 8, seed=3)
    options = {"dt_bias": draw(4, seed=4), "dt_softplus": True, "dt_limit": limits}
    a = -draw(4, seed=5).abs()

    def call(name):
        return lambda x, dt, b, c, **kwargs: getattr(ops, name)(x, dt, a, b, c, **kwargs, **options)

    run = state_of(call("ssd_scan"), call("ssd_scan_with_state"))
    return [x, dt, b, c], [0.0, STILL, 0.0, 0.0], run


def limited_scan(count):
    return heads_scan(count, (0.1, 2.0))


def channels_scan(count):
    u, dt = draw(1, count, 6, seed=0), draw(1, count, 6, seed=1)
    b, c = draw(1, count, 4, seed=2), draw(1, count, 4, seed=3)
    a, bias = -draw(6, 4, seed=4).abs(), draw(6, seed=5)

    def call(name):
        def run(u, dt, b, c, **kwargs):
            options = {"delta_bias": bias, "delta_softplus": True}
            return getattr(ops, name)(u, dt, a, b, c, **kwargs, **options)

        return run

    run = state_of(call("selective_scan"), call("selective_scan_with_state"))
    return [u, dt, b, c], [0.0, STILL, 0.0, 0.0], run


def assert_paths(tree, leaves, together, alone):
    """Results and gradients along every path, each segment counted once."""
    expected = torch.zeros_like(together)
    parts = []
    for segment, length in enumerate(tree.lengths):
        parts.append(alone(torch.tensor(tree.path(segment)))[:, -length:])
    expected = torch.cat([*parts, alone(torch.arange(tree.tokens - tree.padding, tree.tokens))], 1)
    torch.testing.assert_close(together, expected, rtol=1e-10, atol=1e-10)
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(together, leaves, upstream),
        torch.autograd.grad(expected, leaves, upstream),
        rtol=1e-9,
        atol=1e-10,
    )


@pytest.mark.parametrize("roots", TREES.values(), ids=TREES)
@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("recurrence", [delta_rule, heads_scan, limited_scan, channels_scan])
def test_recurrences(recurrence, roots, padding):
    count = planted(roots)[0].tokens + padding
    tree, _ = planted(roots, count)
    inputs, fillings, run = recurrence(count)
    tokens = [PerToken(x, filling) for x, filling in zip(inputs, fillings, strict=True)]
    together = scan(tree, tokens, run, equal=recurrence is limited_scan)
    leaves = [x for x in inputs if x.is_leaf]
    assert_paths(
        tree, leaves, together, lambda path: run([x[:, path] for x in inputs], None, False)[0]
    )


@pytest.mark.parametrize("roots", TREES.values(), ids=TREES)
@pytest.mark.parametrize("width", [1, 2, 4])
def test_convolutions(roots, width):
    count = planted(roots)[0].tokens + 3
    tree, _ = planted(roots, count)
    x, weight = draw(1, count, 5, seed=0), draw(5, width, seed=1)

    def convolve(rows, ids=None):
        return ops.causal_conv1d(rows, weight, activation="silu", seq_idx=ids)

    together = windowed(tree, x, width - 1, convolve)
    assert_paths(tree, [x, weight], together, lambda path: convolve(x[:, path]))


def test_ranges_of_a_tree():
    tree, _ = planted(TREES["ragged"])
    place = torch.arange(tree.longest)
    window = torch.stack([(place - 4).clamp(min=0), place + 1], -1)
    ranges, positions = tree.ranges(window)[0], tree.positions(place.device)[0]
    for segment, start in enumerate(tree.starts):
        path = tree.path(segment)
        for own in range(start, start + tree.lengths[segment]):
            visible = {k for a, b in ranges[own].view(-1, 2).tolist() for k in range(a, b)}
            at = path.index(own)
            assert positions[own] == at
            assert visible == set(path[max(0, at - 4) : at + 1])
