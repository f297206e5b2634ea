"""Attention beyond the common suite: masks, sizes of memory, PyTorch's own kernels.

The last part is about the kernels of attention over depth.
"""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F

import liger_multi
from liger_multi import ops
from liger_multi.dispatch import launch
from liger_multi.ops.attention import from_lengths, key_ranges
from liger_multi.reference.attention import attention as reference
from liger_multi.reference.common import strict
from liger_multi.reference.residuals import attention_residuals as depth_reference
from liger_multi.testing.tolerance import excess
from tests import harness


def heads(length=12, batch=1, count=2, size=8, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, count, length, size)
    return [torch.randn(shape, generator=generator, **options) for _ in range(3)]


@pytest.mark.parametrize("causal", [False, True])
def test_equals_pytorchs_attention(causal):
    q, k, v = heads(37)
    ours = ops.attention(q, k, v, causal=causal)
    right = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-6)


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
    pytest.importorskip("triton")
    from liger_multi.backends.triton.attention.attention import tile_bounds

    if (device := harness.device_of("triton")) is None:
        pytest.skip("kernels on a CPU need TRITON_INTERPRET=1")
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


@pytest.mark.parametrize("parts", [1, 3])
def test_programs_share_a_long_walk(parts, monkeypatch):
    pytest.importorskip("triton")
    from liger_multi.backends.triton.attention import attention as kernels
    from liger_multi.backends.triton.attention.attention import AttentionConfig

    if (device := harness.device_of("triton")) is None:
        pytest.skip("kernels on a CPU need TRITON_INTERPRET=1")
    config = AttentionConfig(16, 16, 1, 4, parts)
    monkeypatch.setattr(kernels, "launch_config", lambda *_, **__: config)
    launched, real = [], kernels.launch
    monkeypatch.setattr(
        kernels, "launch", lambda kernel, *args: (launched.append(kernel), real(kernel, *args))
    )
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
    for got, exact in zip(actual[:3], right[:3], strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-6)


def many_ranges(length, count, seed=0):
    """Disjoint ranges of earlier keys, some of them empty, and a query that sees nothing."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.arange(1, length + 1)[:, None]
    cuts = (torch.rand(length, 2 * count, generator=generator) * places).floor().sort(-1).values
    cuts[length // 2] = 0
    return cuts.to(torch.int32)[None]


@pytest.mark.parametrize("count", [1, 3, 4, 7])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_many_ranges(backend, softcap, count):
    """Kernels take two at a time, and add up the parts."""
    device = "cpu" if backend == "reference" else harness.device_of(backend)
    if device is None:
        pytest.skip("kernels on a CPU need TRITON_INTERPRET=1")
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
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=10 * tolerance, atol=10 * tolerance)


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
    for a, b in zip(*actual, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_no_array_is_of_length_squared(monkeypatch):
    largest = []
    real = reference.scores

    def spy(*args):
        output = real(*args)
        largest.append(output.numel())
        return output

    monkeypatch.setattr(reference, "scores", spy)
    q, k, v = (x.requires_grad_() for x in heads(4096, count=1, size=4))
    for window, most in ((None, 16), (64, 8)):  # blocks a half
        largest.clear()
        ops.attention(q, k, v, causal=True, window=window).sum().backward()
        assert max(largest) <= 1024 * 1024
        assert len(largest) <= 2 * most


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
    right = reference.backward(
        dy, q, k, v, sinks, None, y, lse, True, 8**-0.5, 0.0, True, True, True, True
    )
    for got, exact in zip(actual, right, strict=False):
        assert excess(got, exact, torch.float32) <= 1


def test_routes_take_what_they_can(monkeypatch):
    from liger_multi.backends.cuda import attention as routes
    from liger_multi.reference.attention.attention import looked_at

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    q, k, v = heads(16, dtype=torch.bfloat16)
    odd = [x[..., :6] for x in (q, k, v)]
    ranges = torch.zeros(1, 16, 2, dtype=torch.int32)
    assert routes.route(q, k, v, None, True, 0.0) == "cudnn"
    wide = [x.repeat(1, 1, 1, 32) for x in (q, k, v)]
    assert routes.route(*wide, None, True, 0.0) == "flash"
    with strict.within("deterministic", None):  # backward repeats, forward always does
        assert routes.route(q, k, v, None, True, 0.0) == "cudnn"
        assert routes.route(q, k, v, None, True, 0.0, backward=True) == "triton"
        assert routes.route(*wide, None, True, 0.0, backward=True) == "flash"
    ends = torch.arange(1, 17, dtype=torch.int32)
    marked = looked_at(torch.stack([torch.zeros_like(ends), ends], -1)[None], 16)
    assert routes.route(q, k, v, marked, False, 0.0) == "cudnn"
    assert routes.route(q[:, :, :5], k, v, None, False, 0.0) == "cudnn"
    for call in (
        (q, k, v, ranges, False, 0.0),
        (q, k, v, None, True, 30.0),
        (q[:, :, :5], k, v, None, True, 0.0),
        (q, k, v[..., :8].repeat(1, 1, 1, 2), None, True, 0.0),
        (*odd, None, True, 0.0),
        (q.float(), k.float(), v.float(), None, True, 0.0),
    ):
        assert routes.route(*call) == "triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert routes.route(q, k, v, None, True, 0.0) == "triton"


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


@pytest.mark.parametrize(("tensors", "options", "error", "message"), WRONG)
def test_wrong_arguments(tensors, options, error, message):
    with pytest.raises(error, match=message):
        ops.attention(*tensors, **options)


def test_wrong_arguments_of_the_others():
    with pytest.raises(ValueError, match="kernel_size must be odd and at least 1, got 4"):
        ops.neighborhood_attention(Q, K, V, 4)
    with pytest.raises(ValueError, match="dilation must be at least 1"):
        ops.neighborhood_attention(Q, K, V, 3, 0)
    with pytest.raises(ValueError, match=r"k must have shape \(B, heads, L, D\)"):
        ops.neighborhood_attention(Q, K[:, :, :4], V)
    with pytest.raises(ValueError, match="at least one block is needed"):
        ops.attention_residuals([], torch.ones(4))
    with pytest.raises(ValueError, match=r"query must have shape \(5,\)"):
        ops.attention_residuals(torch.ones(2, 3, 5), torch.ones(4))
    with pytest.raises(ValueError, match="smaller than the kernel"):
        ops.multi_token_attention(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 3, 3))
    with pytest.raises(ValueError, match="stride must be at least 1"):
        ops.multi_token_attention(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3), stride=0)


def test_a_list_of_blocks_is_stacked():
    blocks = [torch.randn(2, 3, 4, requires_grad=True) for _ in range(40)]
    query, weight = torch.randn(4), torch.rand(4)
    y = ops.attention_residuals(blocks, query, weight)
    assert torch.equal(y, ops.attention_residuals(torch.stack(blocks), query, weight))
    assert all(g.any() for g in torch.autograd.grad(y.sum(), blocks))


# --- attention over depth ---

DEPTH_KINDS = [(1, 9, 40), (40, 5, 600), (5, 6, 8200)]


def depth_given(shape, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = shape[-1]
    inputs = [torch.randn(s, generator=generator) for s in (shape, size, size, shape[1:])]
    inputs[1] /= size**0.5
    return [x.to(device) for x in inputs]


def kernels():
    pytest.importorskip("triton")
    from liger_multi.backends.triton.residuals import attention_residuals as attn_res

    if (device := harness.device_of("triton")) is None:
        pytest.skip("kernels on a CPU need TRITON_INTERPRET=1")
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
    for got, expected in zip(actual, right, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", DEPTH_KINDS)
@pytest.mark.parametrize("groups", [1, 8])
def test_programs_have_several_tokens(shape, groups, monkeypatch):
    attn_res, device = kernels()
    monkeypatch.setattr(attn_res, "_near", lambda group, v: min(group, groups))
    tensors = depth_given(shape, device)
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
    *given_, dy = depth_given(shape, device)
    _, *kept = attn_res.forward(*given_, 1e-6)
    got = attn_res.backward(dy, *given_, *kept, *needs)
    assert [x.numel() > 0 for x in got] == list(needs)
    depth_near(got, depth_exact(*given_, dy, needs))


@pytest.mark.parametrize("first", range(5))
def test_scores_far_apart(first):
    """Where the largest score comes first, last or between; exponentials stay in fp32."""
    attn_res, device = kernels()
    blocks, query, _, _ = depth_given((5, 3, 64), device)
    blocks[first] = 100 * query
    query *= 200  # that block's score is 200 |query| sqrt(64)
    y, p, rstd = attn_res.forward(blocks, query, None, 1e-6)
    depth_near((y, p, rstd), depth_exact(blocks, query, None))
    assert (p[first] == 1).all()


def test_past_two_to_the_31_elements(device):
    """Offsets of blocks and of tokens need 64 bits; the last tokens' results are theirs alone."""
    if device.type == "cpu":
        pytest.skip("needs a device with room for 2^31 elements, three times")
    if torch.get_device_module(device.type).mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free memory")
    rows, size = 2**31 // 3 // 2048 + 9, 2048
    blocks = torch.randn(3, rows, size, device=device, dtype=torch.bfloat16).requires_grad_()
    query = torch.randn(size, device=device, dtype=torch.bfloat16) / size**0.5
    last = blocks.detach()[:, -3:].clone().requires_grad_()
    y, right = (ops.attention_residuals(x, query) for x in (blocks, last))
    assert torch.equal(y[-3:], right)
    up = torch.zeros_like(y)
    up[-3:] = torch.randn_like(right)
    got = torch.autograd.grad(y, blocks, up)[0]
    assert torch.equal(got[:, -3:], torch.autograd.grad(right, last, up[-3:])[0])
    assert not got[:, :-3].any()
