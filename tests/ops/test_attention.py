"""Attention beyond the common suite: masks, sizes of memory, PyTorch's own kernels.

Then the kernels of attention over depth, and attention over lists of keys with its indexers:
extremes, packing, lists that name wrong keys, the loss of an indexer, and dense attention.
"""

import dataclasses
import itertools

import pytest
import torch

import liger_multi
from liger_multi import ops
from liger_multi.dispatch import launch
from liger_multi.ops.attention import from_lengths, key_ranges
from liger_multi.reference.attention import (
    attention as reference,
    indexer_scores,
    indexer_topk,
    sparse_attention,
)
from liger_multi.reference.attention.sparse_attention import SumsByKey, add_rows_
from liger_multi.reference.common import strict
from liger_multi.reference.residuals import attention_residuals as depth_reference
from liger_multi.testing import FORMULAS
from liger_multi.testing.tolerance import excess
from tests import harness
from tests.comparing import Operations, recorded


def heads(length=12, batch=1, count=2, size=8, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, count, length, size)
    return [torch.randn(shape, generator=generator, **options) for _ in range(3)]


def test_a_lengths_table_is_documents():
    q, k, v = heads(11)
    table = torch.tensor([0, 4, 4, 9], dtype=torch.int32)  # an empty document, and padding
    ids = torch.tensor([[0] * 4 + [2] * 5 + [-1] * 2])
    assert torch.equal(from_lengths(table, 11), ids)
    packed = ops.attention(q, k, v, causal=True, cu_seqlens=table)
    assert torch.equal(packed, ops.attention(q, k, v, causal=True, documents=ids))
    assert not packed[:, :, 9:].any()
    for part in (slice(0, 4), slice(4, 9)):
        alone = ops.attention(*(x[:, :, part] for x in (q, k, v)), causal=True)
        torch.testing.assert_close(packed[:, :, part], alone)


def test_ranges_say_all_that_options_say():
    q, k, v = heads(20)
    options = {"causal": False, "window": (3, 2), "global_tokens": 2}
    ranges = key_ranges(
        20, 20, q.device, causal=False, left=3, right=2, global_tokens=2, documents=None
    )
    assert ranges.shape == (1, 20, 4)
    assert torch.equal(ops.attention(q, k, v, ranges=ranges), ops.attention(q, k, v, **options))
    first, last, other, end = ranges.unbind(-1)
    assert ((last <= other) | (end <= first) | (other == end)).all()  # disjoint


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 7), (33, 64), (150, 65)])
@pytest.mark.parametrize("sets", [1, 2])
def test_spans_hold_the_blocks_that_see_a_tile(queries, keys, sets):
    device = harness.place_of("triton")
    from liger_multi.backends.triton.attention.attention import tile_bounds

    generator = torch.Generator().manual_seed(keys)
    shape = (3, queries, 2 * sets)
    ranges = torch.randint(-2, keys + 3, shape, generator=generator, dtype=torch.int32)
    ranges[1:] = torch.tensor([0, keys] * sets)  # all see all
    ranges[2, 20:21] = 0  # but for one
    bounds, place = tile_bounds(ranges.to(device), keys, 16, 32).cpu(), torch.arange(keys)
    for which in range(sets):
        low, high = ranges[..., 2 * which : 2 * which + 2, None].unbind(2)
        visible = (place >= low) & (place < high)
        assert visible.any()
        for batch, tile in itertools.product(range(3), range(len(bounds[0, 0, 0]))):
            here = [part[:, tile * 32 :][:, :32] for part in visible[batch].split(16)]
            first, last, whole, end = bounds[batch, which, :, tile].tolist()
            some = [i for i, part in enumerate(here) if part.any()]
            assert not some or first <= some[0] < some[-1] + 1 <= last
            assert all(part.all() for part in here[whole:end])
            if batch == 1:
                assert (first, last, whole, end) == (0, len(here), 0, len(here))


def _slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


DEEP = [(33, [(21, [(17, []), (9, []), (40, [])]), (5, [(8, [])] * 2)])]
TREES = {  # roots with their branches, tokens of the row, least pairs of a block; calls and rest
    "ragged": ([(40, [(20, []), (33, []), (7, []), (1, [])])], 101, 300, 0.0, 3, True),
    "batches": _slow([(40, [(20, [])] * 3), (30, [(9, [])] * 2)], 160, 1, 0.0, 6, False),
    "deep": _slow(DEEP, 141, 100, 2.0, 6, True),
}


@pytest.mark.parametrize(
    ("roots", "tokens", "least", "softcap", "count", "has_rest"), TREES.values(), ids=TREES
)
def test_ranges_that_are_blocks(roots, tokens, least, softcap, count, has_rest, monkeypatch):
    """Calls without ranges and their sum are what the ranges say."""
    device = harness.place_of("triton")
    from liger_multi.backends.triton.attention import attention as kernels, blocks
    from liger_multi.patching.packing import tree as plan
    from liger_multi.patching.packing.tree import tree_of_roots

    monkeypatch.setattr(plan, "LEAST_PAIRS", least)
    tree, _ = tree_of_roots(roots, tokens)
    ranges = plan.causal_ranges(tree, device)
    parts = reference.blocks_of(ranges)
    assert (len(parts.calls), parts.rest is not None) == (count, has_rest)
    q, dy = (x.to(device) for x in heads(tokens, count=4)[:2])
    k, v = (x.to(device) for x in heads(tokens, seed=1)[:2])
    sinks, options = torch.randn(4, device=device), (0.3, softcap)
    y, lse = blocks.forward(kernels.forward, q, k, v, sinks, parts, *options)
    right = reference.forward(q, k, v, sinks, ranges, False, *options)
    torch.testing.assert_close((y, lse), right, rtol=1e-5, atol=1e-6)
    for needs in ((True,) * 4, (False, True, True, False)):
        saved = {"y": y, "lse": lse, "options": options, "needs": needs}
        grads = blocks.backward(kernels.backward, dy, q, k, v, sinks, parts, **saved)
        exact = reference.backward(dy, q, k, v, sinks, ranges, y, lse, False, *options, *needs)
        torch.testing.assert_close(grads, exact, rtol=1e-4, atol=1e-5)
    with strict.in_mode("rows", None):
        assert reference.blocks_of(ranges) is None
    assert reference.blocks_of(reference.looked_at(ranges, tokens)) == parts
    # rounded twice, as a part and as a sum, whatever the depth
    assert (parts.depth > 2) == has_rest
    half = [x.bfloat16() for x in (q, k, v, dy)]
    y, lse = blocks.forward(kernels.forward, *half[:3], None, parts, *options)
    needs = (True, True, True, False)
    grads = blocks.backward(
        kernels.backward, half[3], *half[:3], None, parts, y, lse, options, needs
    )
    q, k, v, dy = (x.float() for x in half)
    right, lse = reference.forward(q, k, v, None, ranges, False, *options)
    exact = reference.backward(dy, q, k, v, None, ranges, right, lse, False, *options, *needs)
    for actual, expected in zip((y, *grads[:3]), (right, *exact[:3]), strict=True):
        assert actual.dtype == torch.bfloat16
        assert (actual - expected).abs().max() < 2**-7 * expected.abs().max()


@pytest.mark.parametrize("parts", [1, 3])
def test_programs_share_a_long_walk(parts, monkeypatch):
    device = harness.place_of("triton")
    from liger_multi.backends.triton.attention import attention as kernels

    config = kernels.AttentionConfig(16, 16, 1, 4, parts)
    monkeypatch.setattr(kernels, "launch_config", lambda *_, **__: config)
    launched = recorded(monkeypatch, kernels, "launch", lambda kernel, *args: kernel)
    q, dy = (x.to(device) for x in heads(100, count=2)[:2])
    k, v = (x.to(device) for x in heads(100, count=1, seed=1)[:2])
    ranges = key_ranges(
        100, 100, q.device, causal=False, left=9, right=9, global_tokens=3, documents=None
    )
    masks = (None, ranges, False, 0.3, 0.0)
    y, lse = reference.forward(q, k, v, *masks)
    right = reference.backward(dy, q, k, v, *masks[:2], y, lse, *masks[2:], *[True] * 4)
    actual = kernels.backward(dy, q, k, v, *masks[:2], y, lse, *masks[2:], *[True] * 4)
    assert (kernels._attention_parts_kernel in launched) == (parts > 1)
    torch.testing.assert_close([*actual[:3]], [*right[:3]], rtol=1e-5, atol=1e-6)


def many_ranges(length, count, seed=0):
    """Disjoint ranges of earlier keys, some of them empty, and a query that sees nothing."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.arange(1, length + 1)[:, None]
    cuts = (torch.rand(length, 2 * count, generator=generator) * places).floor().sort(-1).values
    cuts[length // 2] = 0
    return cuts.to(torch.int32)[None]


def test_compiled_for_any_number_of_ranges():
    """One graph serves trees of several depths."""

    def masked(q, k, v, ranges):
        return ops.attention(q, k, v, ranges=ranges)

    compiled = torch.compile(masked, backend="eager", dynamic=True, fullgraph=True)
    q, k, v = heads(12, count=2)
    for count in (2, 1, 3):
        ranges = many_ranges(12, count)
        torch.testing.assert_close(compiled(q, k, v, ranges), masked(q, k, v, ranges))


@pytest.mark.parametrize("count", [1, 3, 4, 7])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_many_ranges(backend, softcap, count):
    """Kernels take two at a time, and add up the parts."""
    device = harness.place_of(backend)
    dtype = torch.float64 if backend == "reference" else torch.float32
    leaves = [*heads(45, dtype=dtype), torch.randn(2, dtype=dtype)]
    leaves = [x.to(device).requires_grad_() for x in leaves]
    q, k, v, sinks = leaves
    ranges = many_ranges(45, count).to(device)
    with liger_multi.use(attention=backend):
        y = ops.attention(q, k, v, ranges=ranges, sinks=sinks, softcap=softcap, scale=0.4)
    s = 0.4 * q @ k.mT
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    place = torch.arange(45, device=device)
    bounds = ranges[0].view(45, count, 2)
    visible = ((place >= bounds[..., :1]) & (place < bounds[..., 1:])).any(1)
    s = torch.cat(
        [s.masked_fill(~visible, -torch.inf), sinks.view(1, 2, 1, 1).expand(1, 2, 45, 1)], -1
    )
    right = s.softmax(-1)[..., :-1] @ v
    tolerance = 1e-10 if backend == "reference" else 1e-5
    torch.testing.assert_close(y, right, rtol=tolerance, atol=tolerance)
    upstream = torch.randn_like(y)
    actual, expected = (torch.autograd.grad(x, leaves, upstream) for x in (y, right))
    torch.testing.assert_close([*actual], [*expected], rtol=10 * tolerance, atol=10 * tolerance)


def test_blocks_do_not_change_the_result(monkeypatch):
    q, k, v = (x.requires_grad_() for x in heads(50))
    sinks = torch.randn(2, requires_grad=True)
    options = {"causal": True, "window": 17, "softcap": 3.0, "sinks": sinks}
    actual = []
    for step in (16, 1024):
        monkeypatch.setattr(reference, "block_size", lambda *_, step=step: step)
        y = ops.attention(q, k, v, **options)
        up = torch.linspace(-1, 1, y.numel()).view(y.shape)
        actual.append((y, *torch.autograd.grad(y, (q, k, v, sinks), up)))
    torch.testing.assert_close(*actual, rtol=1e-5, atol=1e-6)


def test_no_array_is_of_length_squared(monkeypatch):
    blocks = recorded(monkeypatch, reference, "scores")
    q, k, v = (x.requires_grad_() for x in heads(4096, count=1, size=4))
    for window, most in ((None, 16), (64, 8)):  # blocks a half
        blocks.clear()
        with Operations() as operations:
            ops.attention(q, k, v, causal=True, window=window).sum().backward()
        assert max(x.numel() for x in operations.tensors()) <= 1024 * 1024
        assert len(blocks) <= 2 * most


def test_pytorchs_backward_from_a_sum_with_sinks_is_exact():
    """The property that routes to cuDNN and Flash rest on, shown with PyTorch's kernel for CPUs."""
    from liger_multi.backends.cuda.attention import _with_sinks

    q, k, v = heads(23)
    sinks, dy = torch.randn(2), torch.randn(1, 2, 23, 8)
    y, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    y, lse = _with_sinks(y, lse, sinks)
    right_y, right_lse = reference.forward(q, k, v, sinks, None, True, 8**-0.5, 0.0)
    torch.testing.assert_close(y, right_y)
    torch.testing.assert_close(lse, right_lse)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    actual = backward(dy, q, k, v, y, lse, 0.0, True)
    needs = dict.fromkeys(("needs_q", "needs_k", "needs_v", "needs_sinks"), True)
    right = reference.backward(
        dy, q, k, v, sinks, None, y, lse, causal=True, scale=8**-0.5, softcap=0.0, **needs
    )
    for got, exact in zip(actual, right, strict=False):
        assert excess(got, exact, torch.float32) <= 1


def test_routes_take_what_they_can(monkeypatch):
    from liger_multi.backends.cuda import attention as routes

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    q, k, v = heads(16, dtype=torch.bfloat16)
    odd = [x[..., :6] for x in (q, k, v)]
    ranges = torch.zeros(1, 16, 2, dtype=torch.int32)
    assert routes.route(q, k, v, None, True, 0.0) == "cudnn"
    wide = [x.repeat(1, 1, 1, 32) for x in (q, k, v)]
    assert routes.route(*wide, None, True, 0.0) == "flash"
    with strict.in_mode("deterministic", None):  # backward repeats, forward always does
        assert routes.route(q, k, v, None, True, 0.0) == "cudnn"
        assert routes.route(q, k, v, None, True, 0.0, backward=True) == "triton"
        assert routes.route(*wide, None, True, 0.0, backward=True) == "flash"
    ends = torch.arange(1, 17, dtype=torch.int32)
    marked = reference.looked_at(torch.stack([torch.zeros_like(ends), ends], -1)[None], 16)
    assert routes.route(q, k, v, marked, False, 0.0) == "cudnn"
    assert routes.route(q[:, :, :5], k, v, None, False, 0.0) == "cudnn"
    for call in (
        (q, k, v, ranges, False, 0.0),
        (q, k, v, None, True, 30.0),
        (q[:, :, :5], k, v, None, True, 0.0),
        (q, k, v[..., :8].repeat(1, 1, 1, 2), None, True, 0.0),
        (*odd, None, True, 0.0),
        (q.float(), k.float(), v.float(), None, True, 0.0),
        (q[:, :, :1], k[:, :, :1], v[:, :, :1], None, True, 0.0),  # cuDNN: "s_q = s_kv = 1"
    ):
        assert routes.route(*call) == "triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert routes.route(q, k, v, None, True, 0.0) == "triton"


def test_blocks_of_sizes_that_do_not_recur_run_on_our_kernels(monkeypatch):
    """cuDNN makes a plan for every size, and those of trees may be new in every batch."""
    pytest.importorskip("triton")
    from liger_multi.backends.cuda import attention as routes

    for module, name in itertools.product((routes, routes.kernels), ("forward", "backward")):
        monkeypatch.setattr(module, name, lambda *_, by=module: by)
    q, _, k = heads(128)
    for tokens, by in ((128, routes), (127, routes.kernels)):
        assert routes._forward_block(q[:, :, :tokens], k) is by
        assert routes._backward_block(q, q, k[:, :, :tokens]) is by


def test_a_mark_stands_for_causal_and_is_of_no_other_mask(monkeypatch):
    from liger_multi.reference.attention.attention import looked_at, unless_causal

    ends = torch.arange(1, 17, dtype=torch.int32)
    causal = torch.stack([torch.zeros_like(ends), ends], -1)[None]
    marked = looked_at(causal, 16)
    torch.testing.assert_close(marked, causal)
    assert unless_causal(marked, False) == (None, True)
    assert unless_causal(causal, False) == (causal, False)
    late, few, window = causal.clone(), causal[:, 4:], causal.clone()
    late[0, -1, 1] = 15
    window[0, 9, 0] = 1
    for other in (late, few, window, torch.cat([causal, causal], -1)):
        assert unless_causal(looked_at(other, 16), False)[0] is not None
    torch.library.opcheck(torch.ops.liger_multi.looked_at_ranges.default, (causal, 16))
    monkeypatch.setattr(reference, "_on_main_stream", lambda device: False)  # of a recording
    assert unless_causal(marked, False) == (marked, False)
    assert not hasattr(looked_at(causal, 16), reference.MARK)


Q, K, V = heads(6)
WRONG = [
    ((Q, K[..., :4], V), {}, ValueError, r"shapes \(B, G, S, 8\)"),
    ((Q, K.double(), V), {}, TypeError, "got k as a tensor"),
    ((Q[0], K, V), {}, ValueError, "q must have four axes"),
    ((Q[:, :1], K, V), {}, ValueError, "multiple of heads of k"),
    ((Q, K, V), {"sinks": torch.ones(3)}, ValueError, r"sinks must have shape \(2,\)"),
    ((Q, K, V), {"window": 0}, ValueError, "window must be at least 1 token, got 0"),
    ((Q, K, V), {"window": (1, 2, 3)}, ValueError, r"window must be \(left, right\)"),
    ((Q, K, V), {"global_tokens": -1}, ValueError, "global_tokens must be at least 0"),
    ((Q, K, V), {"softcap": 0.0}, ValueError, "softcap must be above 0"),
    ((Q, K, V), {"documents": torch.ones(6)}, TypeError, "documents must be a tensor of integer"),
    ((Q, K, V), {"documents": torch.ones(1, 5).long()}, ValueError, r"shape \(1, 6\)"),
    ((Q, K[:, :, :3], V[:, :, :3]), {"documents": torch.ones(1, 3).long()}, ValueError, "6 quer"),
    ((Q, K, V), {"ranges": torch.ones(1, 6, 2)}, ValueError, "ranges must be int32"),
    (
        (Q, K, V),
        {"ranges": torch.ones(1, 6, 2).int(), "causal": True},
        ValueError,
        "in place of all other masks",
    ),
    (
        (Q.repeat(2, 1, 1, 1), K.repeat(2, 1, 1, 1), V.repeat(2, 1, 1, 1)),
        {"cu_seqlens": torch.tensor([0, 6])},
        ValueError,
        "batch of one",
    ),
]


ONE, BLOCKS = torch.ones(1, 1, 3, 3), torch.ones(2, 3, 5)
WRONG_OTHERS = [
    ("neighborhood_attention", (Q, K, V, 4), {}, "kernel_size must be odd and at least 1, got 4"),
    ("neighborhood_attention", (Q, K, V, 3, 0), {}, "dilation must be at least 1"),
    ("neighborhood_attention", (Q, K[:, :, :4], V), {}, r"k must have shape \(B, heads, L, D\)"),
    ("attention_residuals", ([], torch.ones(4)), {}, "at least one block is needed"),
    ("attention_residuals", (BLOCKS, torch.ones(4)), {}, r"query must have shape \(5,\)"),
    ("multi_token_attention", (ONE[..., :2, :2], ONE), {}, "smaller than the kernel"),
    ("multi_token_attention", (ONE, ONE), {"stride": 0}, "stride must be at least 1"),
]


def test_a_list_of_blocks_is_stacked():
    blocks = [torch.randn(2, 3, 4, requires_grad=True) for _ in range(40)]
    query, weight = torch.randn(4), torch.rand(4)
    y = ops.attention_residuals(blocks, query, weight)
    assert torch.equal(y, ops.attention_residuals(torch.stack(blocks), query, weight))
    assert all(g.any() for g in torch.autograd.grad(y.sum(), blocks))


# --- attention over depth ---

DEPTH_KINDS = [(1, 9, 40), (40, 5, 600), (5, 6, 8200)]


def depth_inputs(shape, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = shape[-1]
    inputs = [torch.randn(s, generator=generator) for s in (shape, size, size, shape[1:])]
    inputs[1] /= size**0.5
    return [x.to(device) for x in inputs]


def kernels():
    device = harness.place_of("triton")
    from liger_multi.backends.triton.residuals import attention_residuals as attn_res

    return attn_res, device


def few_cores(device):
    """A device on which a program has several tokens."""
    return launch.simulate(dataclasses.replace(launch.device_info(torch.device(device)), cores=1))


def depth_exact(blocks, query, weight, dy=None, needs=(True, True, True)):
    """What forward gives in fp64, or backward."""
    blocks, query, weight = (None if x is None else x.double() for x in (blocks, query, weight))
    output = depth_reference.forward(blocks, query, weight, 1e-6)
    if dy is not None:
        output = depth_reference.backward(dy.double(), blocks, query, weight, *output[1:], *needs)
    return [x.float() for x in output]


def depth_near(actual, right):
    torch.testing.assert_close([*actual], [*right], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", DEPTH_KINDS)
@pytest.mark.parametrize("groups", [1, 8])
def test_programs_have_several_tokens(shape, groups, monkeypatch):
    attn_res, device = kernels()
    monkeypatch.setattr(attn_res, "_near_blocks", lambda group, v: min(group, groups))
    tensors = depth_inputs(shape, device)
    with few_cores(device):
        y, *kept = attn_res.forward(*tensors[:3], 1e-6)
        args = (tensors[3], *tensors[:3], *kept, True, True, True)
        once, again = attn_res.backward(*args), attn_res.backward(*args)
    depth_near((y, *kept), depth_exact(*tensors[:3]))
    depth_near(once, depth_exact(*tensors))
    assert all(torch.equal(*pair) for pair in zip(once, again, strict=True))


@pytest.mark.parametrize("shape", DEPTH_KINDS[1:])
@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True)]
)
def test_what_nobody_needs_is_empty(shape, needs):
    attn_res, device = kernels()
    *inputs, dy = depth_inputs(shape, device)
    _, *kept = attn_res.forward(*inputs, 1e-6)
    got = attn_res.backward(dy, *inputs, *kept, *needs)
    assert [x.numel() > 0 for x in got] == list(needs)
    depth_near(got, depth_exact(*inputs, dy, needs))


@pytest.mark.parametrize("first", range(5))
def test_scores_far_apart(first):
    """Where the largest score comes first, last or between; exponentials stay in fp32."""
    attn_res, device = kernels()
    blocks, query, _, _ = depth_inputs((5, 3, 64), device)
    blocks[first] = 100 * query
    query *= 200  # that block's score is 200 |query| sqrt(64)
    y, p, rstd = attn_res.forward(blocks, query, None, 1e-6)
    depth_near((y, p, rstd), depth_exact(blocks, query, None))
    assert (p[first] == 1).all()


# --- attention over lists of keys, and indexers ---


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
    assert not torch.allclose(ops.sparse_attention(**once, **LATENT), right[0], atol=1e-3)


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
    actual = ops.indexer_topk(**inputs, topk=4, cu_seqlens=torch.tensor(ends, dtype=torch.int32))
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
        return ops.indexer_scores(**leaves, indices=indices).masked_fill(indices < 0, 0)

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

Q4, K2, V2 = torch.ones(1, 4, 3, 8), torch.ones(1, 2, 5, 8), torch.ones(1, 2, 5, 6)
LISTS = torch.zeros(1, 3, 2, dtype=torch.int64)
WRONG_LISTS = {
    "axes": ((Q4[0], K2, V2, LISTS), {}, ValueError, "q must have four axes"),
    "heads": ((Q4[:, :3], K2, V2, LISTS), {}, ValueError, "multiple of G"),
    "values": (
        (Q4, K2, V2[:, :, :4], LISTS),
        {},
        ValueError,
        r"v must have shape \(1, 2, 5, 'E'\)",
    ),
    "both": ((Q4, K2, V2, LISTS), {"value_dim": 4}, ValueError, "either v or value_dim"),
    "neither": ((Q4, K2, None, LISTS), {}, ValueError, "either v or value_dim"),
    "value": (
        (Q4, K2, None, LISTS),
        {"value_dim": 9},
        ValueError,
        r"value_dim must be in \[1, 8\]",
    ),
    "lists": (
        (Q4, K2, V2, LISTS[:, :2]),
        {},
        ValueError,
        r"indices must have shape \(1, 3, K\)",
    ),
    "groups": (
        (Q4, K2, V2, LISTS[:, None].repeat(1, 3, 1, 1)),
        {},
        ValueError,
        "indices must have",
    ),
    "floats": (
        (Q4, K2, V2, LISTS.float()),
        {},
        TypeError,
        "indices must be a tensor of int64",
    ),
    "dtypes": ((Q4, K2, V2.double(), LISTS), {}, TypeError, "q is torch.float32, got v"),
    "scale": ((Q4, K2, V2, LISTS), {"scale": "1"}, TypeError, "scale must be a number"),
}


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


EVERY_WRONG = [
    *(("attention", *case) for case in WRONG),
    *((*call, ValueError, text) for *call, text in WRONG_OTHERS),
    *(("sparse_attention", *case) for case in WRONG_LISTS.values()),
    *(("indexer_topk", *case) for case in WRONG_INDEXERS.values()),
]


@pytest.mark.parametrize(("op", "inputs", "options", "error", "message"), EVERY_WRONG)
def test_wrong_arguments(op, inputs, options, error, message):
    with pytest.raises(error, match=message):
        getattr(ops, op)(*inputs, **options)
