"""Kernels beyond the common suite, on a GPU or interpreted.

multi_token_attention: tiles, strides, what is not read. Grouped GEMM: PyTorch's and ours say the
same, over groups of several tiles and of none. Rounding to 8 bits: bit by bit what PyTorch's casts
give. The selective scan: several blocks of channels, and sequences that begin at the edges of
chunks. Sums over rows: the same bits on every card of an architecture. Sparse attention: queries in
several parts, lists that name wrong keys. The GEMM of ``deterministic="rows"``: the same bits of a
row in whatever batch it stands.
"""

import itertools
import types
from dataclasses import replace

import pytest
import torch

import liger_multi
from liger_multi import ops
from liger_multi.dispatch import launch
from liger_multi.dispatch.launch import DeviceInfo
from liger_multi.dispatch.registry import backends
from liger_multi.reference.attention import multi_token_attention
from liger_multi.testing import FORMULAS, samples
from liger_multi.testing.bitwise import same_bits
from liger_multi.testing.checks import call, grads, outputs
from liger_multi.testing.tolerance import excess
from tests import harness

pytest.importorskip("triton")
if (DEVICE := harness.device_of("triton")) is None:
    pytest.skip("kernels on a CPU need TRITON_INTERPRET=1", allow_module_level=True)

from liger_multi.backends.triton.activations import gated_rows
from liger_multi.backends.triton.attention import (
    indexer_kernels,
    indexer_topk,
    multi_token_attention as kernels,
    pairs_of_lists,
    sparse_attention,
)
from liger_multi.backends.triton.common import gemm
from liger_multi.backends.triton.common.float8 import FORMATS as CODE_FORMATS
from liger_multi.backends.triton.common.gemm import gemm_by_rows
from liger_multi.backends.triton.common.launching import launch as launch_kernel
from liger_multi.backends.triton.common.rows import sum_rows
from liger_multi.backends.triton.cross_entropy import cross_entropy as row_kernels
from liger_multi.backends.triton.cross_entropy.float8 import TritonRounding
from liger_multi.backends.triton.cross_entropy.rows import TritonRows
from liger_multi.backends.triton.cross_entropy.softmax import TileConfig
from liger_multi.backends.triton.experts import fused_moe, grouped, lora_moe, pairs
from liger_multi.backends.triton.experts.pairs import Groups, RowOperand
from liger_multi.backends.triton.float8.rows import CodeBuffers
from liger_multi.backends.triton.linear_attention import selective_scan, ssd_scan
from liger_multi.reference.attention.indexer_topk import selected
from liger_multi.reference.common.float8 import FORMATS
from liger_multi.reference.common.strict import in_mode
from liger_multi.reference.cross_entropy.float8 import PLAIN
from liger_multi.reference.cross_entropy.rows import Objective
from liger_multi.reference.experts.fused_moe import sorted_pairs
from liger_multi.reference.float8 import rows as float8_rows
from liger_multi.reference.linear_attention import selective_scan as scan_reference
from tests.comparing import assert_equal, recorded

# --- multi_token_attention ---

NEEDS = (True, True, False)
SHAPES = [(1, 1, 37, 37), (1, 2, 21, 53), (1, 1, 40, 19)]


def shape(stride=1, padding=1, dilation=1, sparse=False):
    return stride, padding, dilation, 1, sparse


def pair_inputs(sizes, seed=0, out=2, size=3):
    generator = torch.Generator().manual_seed(seed)
    scores = 3.0 * torch.randn(sizes, generator=generator)
    weight = torch.randn(out, sizes[1], size, size, generator=generator)
    return scores.to(DEVICE), weight.to(DEVICE)


def compare(scores, weight, options, dy=None):
    """Forward and backward with the reference's on the same inputs."""
    y, p = kernels.forward(scores, weight, None, *options)
    right_y, right_p = multi_token_attention.forward(scores, weight, None, *options)
    torch.testing.assert_close(p, right_p, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(y, right_y, rtol=1e-5, atol=1e-5)
    assert not y.triu(1).any()
    assert not p.triu(1).any()
    if dy is None:
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    inputs = dy.clone()
    actual = kernels.backward(dy, weight, None, p, *options, *NEEDS)
    right = multi_token_attention.backward(dy, weight, None, p, *options, *NEEDS)
    assert torch.equal(dy, inputs)
    assert not actual[0].triu(1).any()
    torch.testing.assert_close([*actual], [*right], rtol=1e-5, atol=1e-5)


@pytest.fixture
def same_convolutions():
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


@pytest.fixture(params=["formula", "steps", "tiles", "turned"])
def tiles(request, monkeypatch):
    """As launched, rows of more than a step, tiles of several rows, and heads on the last axis."""
    if request.param != "formula":
        tile = TileConfig(1, 16, 1) if request.param == "steps" else TileConfig(4, 128, 1)
        transpose = kernels.TransposeConfig(16 if request.param == "turned" else 0, 1)
        others = {"zero": kernels.ZeroConfig(16, 1), "transpose": transpose}
        monkeypatch.setattr(
            kernels, "launch_config", lambda name, *_, **__: others.get(name.split(".")[1], tile)
        )


@pytest.mark.usefixtures("same_convolutions")
@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("sparse", [False, True])
def test_equals_the_reference(tiles, sizes, sparse):
    compare(*pair_inputs(sizes), shape(sparse=sparse))


@pytest.mark.usefixtures("same_convolutions")
def test_heads_that_are_no_power_of_two(tiles):
    compare(*pair_inputs((2, 3, 18, 21), out=5), shape())


@pytest.mark.usefixtures("same_convolutions")
@pytest.mark.parametrize("tiles", ["turned"], indirect=True)
def test_heads_far_apart_are_turned_another_way(tiles, monkeypatch):
    monkeypatch.setattr(kernels, "FAR", 64)
    monkeypatch.delattr(kernels, "_multi_token_turn_kernel")
    compare(*pair_inputs((2, 3, 18, 21), out=5), shape())


@pytest.mark.usefixtures("same_convolutions")
def test_the_triangle_is_of_what_the_convolution_makes(tiles):
    for options in (shape(2, 0), shape(1, 2, 2), shape(3, 3)):
        compare(*pair_inputs((1, 1, 23, 30)), options)


@pytest.mark.usefixtures("same_convolutions")
def test_scores_of_any_strides(tiles):
    scores, weight = pair_inputs((2, 2, 4, 33))
    wide = torch.full((2, 4, 2, 48), torch.nan, device=DEVICE)
    by_heads = wide.transpose(1, 2)[..., 3:36].copy_(scores)
    by_columns = scores.mT.contiguous().mT
    same = scores[:1, :1].expand(2, 2, 4, 33)
    for view in (by_heads, by_columns, same):
        compare(view, weight, shape())


@pytest.mark.usefixtures("same_convolutions")
def test_nothing_past_the_diagonal_is_used(tiles):
    scores, weight = pair_inputs((1, 1, 19, 19))
    past = torch.ones(19, 19, dtype=torch.bool, device=DEVICE).triu(1)
    filled = scores.masked_fill(past, torch.nan)
    y, p = kernels.forward(scores, weight, None, *shape())
    again, _ = kernels.forward(filled, weight, None, *shape())
    assert torch.equal(y, again)
    dy = torch.randn_like(y)
    actual = kernels.backward(dy, weight, None, p, *shape(), *NEEDS)
    others = kernels.backward(dy.masked_fill(past, torch.nan), weight, None, p, *shape(), *NEEDS)
    assert all(torch.equal(a, b) for a, b in zip(actual, others, strict=True))


@pytest.mark.usefixtures("same_convolutions")
def test_an_upstream_gradient_that_is_one_number(tiles):
    sizes = (1, 2, 18, 18)
    compare(*pair_inputs(sizes), shape(), torch.ones((), device=DEVICE).expand(sizes))


@pytest.mark.usefixtures("same_convolutions")
@pytest.mark.parametrize("hidden", [float("-inf"), torch.finfo(torch.float32).min])
def test_rows_that_see_only_hidden_scores_have_no_probabilities(tiles, hidden):
    """As those before the first token of a sequence that is padded on the left."""
    scores, weight = pair_inputs((1, 2, 20, 20))
    scores[..., :7] = hidden
    compare(scores, weight, shape())


@pytest.mark.usefixtures("same_convolutions")
def test_nan_does_not_reach_other_rows(tiles):
    scores, weight = pair_inputs((1, 1, 20, 20))
    scores[0, 0, 9, 4] = torch.nan
    _, p = kernels.forward(scores, weight, None, *shape())
    assert p.isnan().nonzero().tolist() == [[0, 0, 9, col] for col in range(10)]


@pytest.mark.usefixtures("same_convolutions")
def test_doubles_are_refused():
    assert "float64" in kernels.supports(torch.ones(1, 1, 3, 3, dtype=torch.float64))
    assert kernels.supports(torch.ones(1, 1, 3, 3)) is None


# --- an indexer ---


@pytest.mark.parametrize("bad", ["q", "k", "w"])
def test_an_indexer_keeps_what_is_no_number(bad):
    """Scores and gradients are NaN where the reference has them: a maximum with 0 would drop it."""
    shapes = {"q": (1, 9, 4, 6), "k": (1, 9, 6), "w": (1, 9, 4)}
    inputs = {n: torch.randn(shape, device=DEVICE) for n, shape in shapes.items()}
    inputs[bad][0, 5] = torch.nan
    indices = torch.arange(9, dtype=torch.int32, device=DEVICE).expand(1, 9, 9)

    def run(name):
        leaves = {n: t.clone().requires_grad_() for n, t in inputs.items()}
        with liger_multi.use(indexer_scores=name, indexer_topk=name):
            scores = ops.indexer_scores(**leaves, indices=indices)
            chosen = ops.indexer_topk(**inputs, topk=3, causal=False)
        scores.backward(torch.ones_like(scores))
        return scores, chosen.scores, *(t.grad for t in leaves.values())

    right = run("reference")
    assert all(scores.isnan().any() for scores in right[:2])
    torch.testing.assert_close([*run("triton")], [*right], equal_nan=True)


# --- grouped GEMM ---


def groups_of(sizes, per=2, spare=0):
    """Groups of these many rows, from a shuffled order of their pairs."""
    rows = sum(sizes)
    offsets = torch.tensor([0, *torch.tensor(sizes).cumsum(0)], dtype=torch.int32, device=DEVICE)
    generator = torch.Generator().manual_seed(3)
    order = torch.randperm(rows + spare, generator=generator).to(DEVICE, torch.int32)
    return Groups(offsets, order, per)


@pytest.mark.parametrize(
    ("tokens", "per", "experts"), [(40, 2, 3), (300, 4, 130), (128, 1, 127), (1, 1, 1), (0, 2, 3)]
)
def test_slots_are_sorted_stably(tokens, per, experts):
    """Chunks and steps of experts that divide and do not, ids of no expert, experts of no pair."""
    generator = torch.Generator().manual_seed(tokens)
    index = torch.randint(-2, experts + 3, (tokens, per), generator=generator)
    index[index == experts // 2] = 0
    order, inverse, offsets = pairs.sorted_pairs(index.to(DEVICE), experts)
    _, right, starts = sorted_pairs(index, experts)
    assert order.cpu().tolist() == right.tolist()
    assert offsets.cpu().tolist() == starts.tolist()
    assert torch.equal(inverse[order.long()].cpu(), torch.arange(tokens * per).int())
    assert torch.equal(pairs.inverse_of(order), inverse)


def weight_gradients_are_exact(dy, x, gather, groups, scratch=None):
    """Of every group, and turned."""
    gradient, turned = (
        grouped.weight_gradient(
            "test", RowOperand(dy), RowOperand(x, gather), groups, t, scratch=scratch
        )
        for t in (False, True)
    )
    written = x[groups.order.long() // 2] if gather else x
    for e, (start, stop) in enumerate(itertools.pairwise(groups.offsets.tolist())):
        right = dy[start:stop].double().T @ written[start:stop].double()
        assert excess(gradient[e], right, torch.bfloat16) <= 1
        assert torch.equal(turned[e], gradient[e].T)


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("gather", [False, True])
def test_products_of_uneven_groups(library, gather):
    groups = groups_of((37, 0, 1, 16, 0), spare=4)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16)

    x = draw(groups.rows // 2 if gather else groups.rows, 24)
    weight, other = draw(5, 40, 24), draw(groups.rows, 40)
    written = x[groups.order.long() // 2] if gather else x
    with grouped.products_by(library):
        output = grouped.product("test", RowOperand(x, gather), weight, groups)
        weight_gradients_are_exact(other, x, gather, groups)
    for e, (start, stop) in enumerate(((0, 37), (37, 37), (37, 38), (38, 54), (54, 54))):
        right = written[start:stop].double() @ weight[e].double().T
        assert excess(output[start:stop], right, torch.bfloat16) <= 1


@pytest.mark.parametrize("share", [0.0, 0.5, 0.72, 1.0])
@pytest.mark.parametrize("sizes", [(37, 0, 1, 16, 0), (0, 5, 5, 0, 40, 3), (60,), (0, 0, 9)])
def test_rows_of_some_groups_are_gathered_to_scratch_for_the_library(sizes, share, monkeypatch):
    monkeypatch.setattr(grouped, "WRITTEN_BYTES", 0)
    monkeypatch.setattr(grouped, "SCRATCH_SHARE", 0)
    groups = groups_of(sizes, spare=6 - sum(sizes) % 2)
    generator = torch.Generator().manual_seed(0)
    x, other = (
        torch.randn(rows, cols, generator=generator).to(DEVICE, torch.bfloat16)
        for rows, cols in ((groups.rows // 2, 24), (groups.rows, 40))
    )
    scratch = torch.empty(int(groups.rows * share) * 24, dtype=torch.bfloat16, device=DEVICE)
    with grouped.products_by(True):
        weight_gradients_are_exact(other, x, True, groups, scratch)


@pytest.mark.parametrize("step", ["whole", "pieces"])
@pytest.mark.parametrize(
    ("op", "name", "frozen"),
    [
        ("fused_moe", "gpt-oss", False),
        ("fused_moe", "sentinels", False),
        ("fused_moe", "unused-experts", False),
        ("fused_moe", "wider", False),
        ("fused_moe", "wider", True),
        ("lora_moe", "wider-rank-40", True),
    ],
)
def test_the_library_s_products_serve_the_operator(op, name, frozen, step, monkeypatch):
    """The composition that launch tables may choose, on rows that were gathered before."""
    if step == "pieces":
        for module, name_of_limit in (
            (fused_moe, "PAIRS_BYTES"),
            (fused_moe, "TRAINED_PAIRS_BYTES"),
            (lora_moe, "PAIRS_BYTES"),
            (grouped, "WRITTEN_BYTES"),
        ):
            monkeypatch.setattr(module, name_of_limit, 1)
        monkeypatch.setattr(grouped, "SCRATCH_SHARE", 0)
        monkeypatch.setattr(fused_moe, "LEAST_COLS", 16)
    sample = next(s for s in samples.of(op) if s.name == name)
    tensors = sample.make(DEVICE, torch.bfloat16)
    for weight in ("gate_up_weight", "down_weight"):
        tensors[weight].requires_grad_(not frozen)
    exact = {
        n: t.detach().double().requires_grad_() if t.is_floating_point() else t
        for n, t in tensors.items()
    }
    floats = [n for n, t in tensors.items() if t.is_floating_point() and t.requires_grad]
    products = []
    stock = grouped.grouped_mm
    with pytest.MonkeyPatch.context() as patch, grouped.products_by(True):
        patch.setattr(
            grouped, "grouped_mm", lambda *a, **k: (products.append(1), stock(*a, **k))[1]
        )
        with liger_multi.use(**{op: "triton"}):
            y = samples.call(op, **tensors, **sample.options)
            args = (y, [tensors[n] for n in floats], torch.ones_like(y))
            retained = torch.autograd.grad(*args, retain_graph=True)
            actual = torch.autograd.grad(*args)
    assert same_bits(retained, actual)  # the second one writes over what forward kept
    right = FORMULAS[op](**exact, **sample.options)
    expected = torch.autograd.grad(right, [exact[n] for n in floats], torch.ones_like(right))
    assert products, "the library was not asked"
    assert excess(y.detach(), right.detach(), torch.bfloat16) <= 1
    errors = {
        n: excess(got, exact_one, torch.bfloat16)
        for n, got, exact_one in zip(floats, actual, expected, strict=True)
    }
    assert max(errors.values()) <= 1, errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["rows", "odd-widths", "wider-rank-40", "only-down"])
def test_fp32_adapters_on_16_bit_experts(name, dtype):
    """Parts of the factors beside rows of 16 bits, and factors' gradients in fp32."""
    sample = next(s for s in samples.of("lora_moe") if s.name == name)
    tensors = sample.make(DEVICE, dtype)
    thin = [n for n in tensors if n.endswith(("_a", "_b"))]
    for n in thin:
        tensors[n] = tensors[n].detach().float().requires_grad_()
    actual = {}
    for backend in ("triton", "reference"):
        with liger_multi.use(lora_moe=backend):
            y = samples.call("lora_moe", **tensors, **sample.options)
            leaves = [tensors["x"], tensors["routing"], *(tensors[n] for n in thin)]
            actual[backend] = [y, *torch.autograd.grad(y, leaves, torch.ones_like(y))]
    for got, right in zip(actual["triton"], actual["reference"], strict=True):
        assert got.dtype == right.dtype
        assert excess(got.detach(), right.detach(), dtype) <= 1


@pytest.mark.parametrize("parts", [False, True])
def test_an_update_of_uneven_groups(parts):
    """In place, rounded once, with the six products of two fp32 matrices' parts or without."""
    groups = groups_of((37, 0, 1, 16, 0), spare=4)
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if parts else torch.float32
    rows = torch.randn(groups.rows, 24, generator=generator).to(DEVICE, dtype)
    low = torch.randn(groups.rows, 18, generator=generator).to(DEVICE)
    w = torch.randn(5, 24, 18, generator=generator).to(DEVICE)
    before = rows.clone()
    lora_moe.add_(rows, low, w, 0.5, groups)
    for e, (start, stop) in enumerate(((0, 37), (37, 37), (37, 38), (38, 54), (54, 54))):
        right = before[start:stop].double() + 0.5 * low[start:stop].double() @ w[e].double().T
        if parts:  # the nearest, but for ties that fp32 sums break otherwise
            assert (rows[start:stop] == right.bfloat16()).double().mean() > 0.99 or start == stop
        else:
            torch.testing.assert_close(rows[start:stop], right.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(rows[54:], before[54:])


# --- rounding to 8 bits ---

ROUNDING = TritonRounding()


def same_codes(actual, expected):
    codes = [rounded.data.view(torch.uint8).cpu() for rounded in (actual, expected)]
    return torch.equal(*codes) and torch.equal(actual.scale.cpu(), expected.scale.cpu())


KINDS = [code_dtype for pair in FORMATS for code_dtype in pair]


@pytest.mark.parametrize("code_dtype", KINDS, ids=str)
def test_every_value_of_16_bits(code_dtype):
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        x = every.view(dtype)
        limit = torch.finfo(torch.float16).max  # and what is scaled to nothing by 2**127
        x = x[x.isfinite() & (x.float().abs() <= limit)]
        x = x[: x.numel() // 32 * 32].reshape(-1, 32).to(DEVICE)
        assert same_codes(ROUNDING.rounded(x, code_dtype), PLAIN.rounded(x, code_dtype))
    near = x[x.float().abs() <= torch.finfo(code_dtype).max].float().reshape(1, -1)
    assert same_codes(ROUNDING.rounded(near, code_dtype), PLAIN.rounded(near, code_dtype)), (
        "nearly no scale"
    )


@pytest.mark.parametrize("dtype", [pair[0] for pair in FORMATS], ids=str)
@pytest.mark.parametrize("shape", [(70, 48), (1, 3000), (200, 16), (64, 128)])
def test_both_layouts(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).bfloat16().to(DEVICE)
    for operand in (x, x.t()):
        for actual, expected in zip(
            ROUNDING.both_ways(operand, dtype), PLAIN.both_ways(operand, dtype), strict=True
        ):
            assert actual.data.is_contiguous()
            assert same_codes(actual, expected)


def test_nothing_zeros_and_what_is_no_number():
    for x in (torch.zeros(0, 16), torch.zeros(3, 16)):
        x = x.to(DEVICE)
        assert same_codes(ROUNDING.rounded(x), PLAIN.rounded(x))
        assert same_codes(ROUNDING.both_ways(x)[1], PLAIN.both_ways(x)[1])
    x = torch.ones(4, 16)
    x[1, 2] = float("nan")
    for dtype in KINDS:
        output = ROUNDING.rounded(x.to(DEVICE), dtype)
        assert output.data.float().isnan().nonzero().tolist() == [[1, 2]]


# --- cards: sums over rows, of weights' gradients, on parts of a card ---

T = samples.Tensor
TALL = (T((150, 512)), T((512,)))
CARDS = {
    "rms_norm": dict(zip(("x", "weight"), TALL, strict=True)),
    "fused_add_rms_norm": {"x": TALL[0], "residual": TALL[0], "weight": TALL[1]},
    "layer_norm": {"x": TALL[0], "weight": TALL[1], "bias": TALL[1]},
    "gated_rms_norm": {"x": TALL[0], "gate": TALL[0], "weight": TALL[1]},
    "modulated_rms_norm": {"x": TALL[0], "scale": T((1, 512)), "weight": TALL[1]},
    "poly_norm": {"x": TALL[0], "weight": T((3,)), "bias": T((1,))},
    "dyt": {"x": TALL[0], "alpha": T((1,)), "weight": TALL[1], "bias": TALL[1]},
    "attention_residuals": {"blocks": T((2, 40, 512)), "query": TALL[1]},
    "hyper_connections": {
        "x": T((1200, 4, 64), torch.bfloat16),
        "bias": T((24,)),
        "scale": T((3,)),
        "weight": T((24, 256), torch.bfloat16, 0.06),
    },
    "causal_conv1d": {"x": T((2, 64, 16)), "weight": T((16, 4)), "bias": T((16,))},
    "gated_short_conv": {"x": T((2, 64, 48)), "weight": T((16, 3)), "bias": T((16,))},
}
FEW = {"hyper_connections": {"iterations": 1}}


def card(monkeypatch, vendor, cores):
    """What launch formulas read of a card with this number of cores."""
    facts = types.SimpleNamespace(
        major=9,
        minor=0,
        gcnArchName="gfx942",
        warp_size=64,
        multi_processor_count=cores,
        shared_memory_per_block=65536,
        shared_memory_per_block_optin=232448,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    return backends()[vendor].device_info(torch.device("cuda", 0))


def bits(op, info):
    """The results of an operator and its gradients, launched as on a card."""
    tensors = samples.Sample("cards", CARDS[op]).make(DEVICE, torch.float32)
    with launch.simulate(info):
        result, _ = outputs(call(op, tensors, FEW.get(op, {}), **{op: "triton"}))
        ones = {name: torch.ones_like(t) for name, t in result.items()}
        return [*result.values(), *grads(result, tensors, ones).values()]


@pytest.mark.skipif(not harness.interpreted(), reason="simulates cards")
@pytest.mark.parametrize("vendor", ["cuda", "rocm"])
@pytest.mark.parametrize("op", CARDS)
def test_parts_of_a_card_give_its_bits(monkeypatch, op, vendor):
    """Programs that share a sum over rows follow the architecture, not the cores that are there.

    With as many programs as cores the bits would differ, so that the check can fail.
    """
    whole = card(monkeypatch, vendor, 304)
    expected = bits(op, whole)
    assert same_bits(bits(op, card(monkeypatch, vendor, 2)), expected)
    assert not same_bits(bits(op, replace(whole, cores=2)), expected)


@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (1024, 5), (1025, 1), (2500, 40)])
def test_sums_over_rows_of_any_number(shape):
    """Whole numbers have exact sums, whatever the order; strides are any."""
    x = torch.arange(shape[0] * shape[1], dtype=torch.float32).remainder(13).view(shape[::-1])
    assert torch.equal(sum_rows(x.to(DEVICE).t(), torch.float32), x.sum(1).to(DEVICE))


# --- ssd_scan ---


@pytest.mark.parametrize("by_column", [False, True])
def test_heads_in_pieces(monkeypatch, by_column):
    """Pieces share step sizes, A, bias and B; each has its columns of x, z, states and D."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE)

    rows, pairs, state = (2, 19, 3, 8), (2, 19, 1, 8), (2, 3, 8, 8)
    skips = normal(3, 8) if by_column else normal(3)
    first = torch.where(torch.arange(19) < 5, 0, 5).int().expand(2, -1).to(DEVICE)
    inputs = (
        normal(*rows),
        normal(*rows[:3]).bfloat16(),
        -normal(3).exp(),
        normal(*pairs),
        normal(*pairs),
        skips,
        normal(*rows),
        normal(3),
        normal(*state),
        first,
    )
    options = (True, 0.0, float("inf"), 16)
    upstream = normal(*rows), normal(*state)

    def run():
        results = ssd_scan.forward(*inputs, *options, True)
        return *results, *ssd_scan.backward(*upstream, *inputs, *options, *[True] * 9)

    whole = run()
    monkeypatch.setattr(ssd_scan, "MOST", 16)
    for got, expected in zip(run(), whole, strict=True):
        assert got.dtype == expected.dtype
        rtol = 1e-2 if got.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(got, expected, rtol=rtol, atol=1e-5)


# --- selective_scan ---


def scanned(length, states, upstream=True, state=True, packed=True, cols=37):
    """All results of forward and backward, of the kernels and of the reference in fp64.

    37 channels are several blocks, of which the last one is short.
    """
    generator = torch.Generator().manual_seed(length)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE)

    rows, pairs = (normal(2, length, cols) for _ in range(3)), (2, length, states)
    u, delta, z = rows
    A, before = -normal(cols, states).exp(), normal(2, cols, states)
    inputs = (u, delta, A, normal(*pairs), normal(*pairs), normal(cols), z, normal(cols), before)
    inputs = inputs if state else (*inputs[:-1], None)
    place = torch.arange(length, dtype=torch.int32)
    first = torch.stack([place // 8 * 8, torch.where(place < 5, 0, 5).int()]).to(DEVICE)
    first = first if packed else None
    dy = normal(2, length, cols) if upstream else None
    dstate = normal(2, cols, states)

    def run(module, dtype):
        wide = [None if t is None else t.to(dtype) for t in inputs]
        y, last, states = module.forward(*wide, first, True, True)
        grads = (None if dy is None else dy.to(dtype), dstate.to(dtype))
        return y, last, states, *module.backward(*grads, *wide, first, states, True, *[True] * 9)

    kernels_twice = [run(selective_scan, torch.float32) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*kernels_twice, strict=True))
    return kernels_twice[0], run(scan_reference, torch.float64)


def assert_scans_as_the_reference(length, states, **kwargs):
    for got, exact in zip(*scanned(length, states, **kwargs), strict=True):
        assert got.shape == exact.shape
        scale = float(exact.abs().max()) if exact.numel() else 0.0
        torch.testing.assert_close(got.double(), exact.double(), rtol=1e-5, atol=2e-5 * scale)


def launched(monkeypatch, span=8, **launches):
    """Have short spans, and numbers of launches by the names of the scan's kernels."""

    def tabled(name, formula, device, **shape):
        config = launch.launch_config(name, formula, device, **shape)
        return replace(config, **launches.get(name.split(".")[1], {}))

    monkeypatch.setattr(scan_reference, "SPAN", span)
    monkeypatch.setattr(selective_scan, "launch_config", tabled)


@pytest.mark.parametrize(
    ("length", "states", "upstream"), [(17, 16, True), (8, 3, True), (7, 40, True), (9, 16, False)]
)
def test_scans_of_several_blocks_and_chunks(length, states, upstream):
    """Also a gradient of the last state alone."""
    assert_scans_as_the_reference(length, states, upstream=upstream)


@pytest.mark.parametrize(
    ("length", "states", "kwargs"),
    [
        (20, 16, {}),
        (13, 3, {"state": False, "packed": False}),
        (15, 40, {"upstream": False}),
        (72, 4, {"cols": 64}),
    ],
)
def test_scans_whose_tokens_several_programs_share(monkeypatch, length, states, kwargs):
    """Sequences begin within spans, at their first tokens, and nowhere.

    Where the sequence fills its last span and block, the kernels are others.
    """

    monkeypatch.setattr(scan_reference, "SPAN", 8)
    monkeypatch.setattr(selective_scan, "PROGRAMS", 0)  # backward has a sequence at a time
    assert_scans_as_the_reference(length, states, **kwargs)


STEPS = {"step": 4, "ahead": 3}
LAUNCHES = {
    "hopper": (19, 16, {"forward": STEPS, "backward": {**STEPS, "parts": 1}}, {}),
    "teams": (19, 16, {"team": {"team": 4, "block": 8, "count": 2}}, {}),
    "short teams": (
        7,
        12,
        {"team": {"team": 8, "block": 4, "count": 1}},
        {"state": False, "packed": False},
    ),
    "full teams": (24, 8, {"team": {"team": 2, "block": 16, "count": 1}}, {"cols": 32}),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_scans_by_other_launches(monkeypatch, name):
    """Four tokens a step in one part; whole sequences by teams, with short steps and blocks."""
    length, states, launches, kwargs = LAUNCHES[name]
    launched(monkeypatch, **launches)
    assert_scans_as_the_reference(length, states, **kwargs)


@pytest.mark.parametrize("tensor", range(5))
def test_teams_keep_what_is_not_finite_within_its_sequence(monkeypatch, tensor):
    """NaN in u, delta, B, C and the first state, of the second sequence or of the first."""
    launched(monkeypatch, team={"team": 4, "block": 8, "count": 1})
    rows = [torch.randn(1, 19, 8, device=DEVICE) for _ in range(2)]
    pairs = [torch.randn(1, 19, 16, device=DEVICE) for _ in range(2)]
    A, state = -torch.rand(8, 16, device=DEVICE), torch.randn(1, 8, 16, device=DEVICE)
    first = (torch.arange(19, device=DEVICE) // 6 * 6)[None].int()

    def run(u, delta, B, C, state):
        absent = dict.fromkeys(("D", "z", "delta_bias"))
        options = {"first": first, "delta_softplus": True, "output_final_state": True}
        return selective_scan.forward(u, delta, A, B, C, initial_state=state, **absent, **options)

    inputs = [*rows, *pairs, state]
    usual = run(*inputs)
    inputs[tensor] = inputs[tensor].clone()
    inputs[tensor][0, 7 if tensor < 4 else 0, 0] = float("nan")
    y, final, before = run(*inputs)
    changed = slice(6, 12) if tensor < 4 else slice(0, 6)
    apart = (y != usual[0]).flatten(2).any(2)[0]
    assert apart[changed].any()
    apart[changed] = False
    assert not apart.any()
    assert torch.equal(final, usual[1])
    assert torch.equal(before[:, 2], usual[2][:, 2])


def test_teams_are_for_sequences_that_fill_a_card():
    """By the launch table of Hopper, and not where rows must have the bits of fewer rows."""

    def team(rows, cols, length=8192, states=16):
        shape = {"rows": rows, "length": length, "channels": rows * cols, "states": states}
        formula, device = selective_scan.team_config, torch.device("meta")
        return launch.launch_config("selective_scan.team", formula, device, **shape).team

    with launch.simulate(DeviceInfo("cuda", "sm90", 32, 1024, 232448, 132)):
        assert [team(2, 8192), team(4, 4096), team(3, 8192)] == [4, 4, 4]
        assert [team(1, 8192), team(5, 4096), team(2, 8192, 256), team(2, 8192, 256, 8)] == [0] * 4
        token = launch.any_rows.set(True)
        try:
            assert team(2, 8192) == 0
        finally:
            launch.any_rows.reset(token)


@pytest.mark.parametrize(
    ("span", "launches", "text"),
    [
        (8, {"team": {"team": 4, "block": 8, "count": 3}}, "a step of 12 tokens must divide 8"),
        (6, {}, "a chunk of 1 x 4 tokens must divide 6"),
    ],
)
def test_scans_that_do_not_divide_a_span_raise(monkeypatch, span, launches, text):
    launched(monkeypatch, span, **launches)
    with pytest.raises(ValueError, match=text):
        scanned(17, 16)


@pytest.mark.parametrize("op", ["selective_scan", "ssd_scan"])
def test_results_of_scans_share_no_memory(op):
    """Gradients of several tensors are parts of one sum, and each is given away alone."""
    sample = next(s for s in samples.of(op) if s.name == "everything")
    tensors = sample.make(DEVICE, torch.float32)
    result, _ = outputs(call(op, tensors, sample.options, **{op: "triton"}))
    gradients = grads(result, tensors, {n: torch.ones_like(t) for n, t in result.items()})
    every = [*result.values(), *gradients.values()]
    assert len({t.untyped_storage().data_ptr() for t in every}) == len(every)
    assert all(t.is_contiguous() for t in every)


def test_scans_of_too_many_states_are_refused():
    wide = torch.empty(1, 4, 257)
    assert selective_scan.supports(wide[..., :256]) is None
    assert "up to 256 states of a channel (registers), got 257" in selective_scan.supports(wide)


# --- rows of logits, of which some columns stay in registers ---


@pytest.mark.parametrize("kept", [0, 256, 512])
@pytest.mark.parametrize("cols", [5, 128, 700, 1024, 1301])
def test_columns_that_are_kept_change_no_result(monkeypatch, kept, cols):
    """Also where the anchor is no good, and for a scale that turns the order of the classes."""

    def with_kept(name, formula, device, **shape):
        config = launch.launch_config(name, formula, device, **shape)
        return (
            replace(config, block=128, kept=4 * kept) if name == "cross_entropy.forward" else config
        )

    monkeypatch.setattr(row_kernels, "launch_config", with_kept)
    generator = torch.Generator().manual_seed(0)
    for scale, size in ((1.0, 1.0), (0.5, 300.0), (-0.7, 300.0)):
        raw = (torch.randn(4, cols, generator=generator) * size).to(DEVICE)
        target = torch.randint(cols, (4,), generator=generator).to(DEVICE)
        target[1] = -100
        exact = raw.double().requires_grad_()
        loss = torch.nn.functional.cross_entropy(exact * scale, target, reduction="none")
        loss.sum().backward()
        objective = Objective(-100, 0.0, 0.0, None, scale)
        rows = TritonRows.statistics_and_gradient_(raw, target, None, objective, None, "loss")
        torch.testing.assert_close(rows.ce.double(), loss.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(raw.double(), exact.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", [None, True, "rows"])
def test_launches_with_and_without_gradient_are_equal(monkeypatch, mode):
    """A log-probability that no gradient was asked of is that of a training step."""
    asked = recorded(
        monkeypatch, row_kernels, "launch_config", lambda *_, **shape: shape.get("gradient")
    )
    raw, target = torch.randn(4, 300, device=DEVICE), torch.arange(4, device=DEVICE)
    objective = Objective(-100, 0.0, 0.0, None)
    with in_mode("" if mode is None else "rows" if mode == "rows" else "deterministic", None):
        TritonRows.statistics(raw, target, None, objective, "loss")
        TritonRows.statistics_and_gradient_(raw, target, None, objective, None, "loss")
    assert asked == [0, 1 if mode is None else 0]


# --- gradients of gated activations as codes ---

CODES = float8_rows.CODES
NONE = (None, None)


def gated_case(rows, cols, dtype, by=NONE):
    """dy, gate and up, which are strided halves, numbers of columns, and plain gradients."""
    torch.manual_seed(0)
    gate, up = torch.randn(rows, 2 * cols, device=DEVICE).to(dtype).chunk(2, -1)
    dy = torch.randn(rows, cols, device=DEVICE).to(dtype)
    columns = torch.randn(2, cols, device=DEVICE).mul_(3).round_().exp2_()
    how = {"gate_multiplier": by[0] or 1.0, "down_multiplier": by[1] or 1.0}
    leaves = [t.detach().clone().requires_grad_() for t in (gate, up)]
    with liger_multi.use(swiglu="triton"):
        right = torch.autograd.grad(ops.swiglu(*leaves, **how), leaves, dy)
    return dy, gate, up, tuple(columns), right


def coded_backward(dy, gate, up, columns, needs, product, format, by=NONE):
    """Gradients, codes of those with columns, and what stands in dy."""

    def code_buffers(x):
        codes = torch.empty(x.shape, dtype=torch.uint8, device=DEVICE)
        scale = torch.empty(x.shape[0], device=DEVICE)
        return CodeBuffers(codes, scale, CODE_FORMATS[format][1], False)

    dy = dy.clone()
    buffers = tuple(None if c is None else code_buffers(gate) for c in columns)
    options = {"columns": columns, "needs_output": needs, "product": product}
    output = gated_rows.backward("swiglu", "silu", dy, gate, up, by, buffers, **options)
    return output, [None if b is None else b.rows_of(format) for b in buffers], dy


def same_rows(actual, right):
    return torch.equal(actual.scale, right.scale) and torch.equal(
        actual.codes.view(torch.uint8), right.codes.view(torch.uint8)
    )


@pytest.mark.parametrize("format", CODES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "cols"), [(3, 37), (2, 2500)])
def test_codes_of_gradients_are_those_of_the_rounded_gradients(rows, cols, dtype, format):
    """Rows take one step or two; codes come with gradients and a product, or in their place."""
    dy, gate, up, columns, right = gated_case(rows, cols, dtype)
    for by in (NONE, (0.5, 2.0)) if cols == 37 else (NONE,):
        dy, gate, up, columns, right = gated_case(rows, cols, dtype, by)
        both, codes, product = coded_backward(dy, gate, up, columns, (True, True), True, format, by)
        assert all(torch.equal(a, b) for a, b in zip(both, right, strict=True))
        for coded, grad, column in zip(codes, both, columns, strict=True):
            assert same_rows(coded, float8_rows.PLAIN.rows(grad, column, format))
        if by == NONE:
            with liger_multi.use(swiglu="triton"):
                assert torch.equal(product, ops.swiglu(gate, up))
        none, alone, kept = coded_backward(dy, gate, up, columns, (False, False), False, format, by)
        assert not any(t.numel() for t in none)
        assert torch.equal(kept, dy)
        assert all(same_rows(a, b) for a, b in zip(alone, codes, strict=True))


@pytest.mark.parametrize("first", [True, False])
def test_codes_of_one_gradient_and_the_other_itself(first):
    dy, gate, up, columns, right = gated_case(4, 48, torch.bfloat16)
    some = (columns[0], None) if first else (None, columns[1])
    needs = (not first, first)
    output, codes, _ = coded_backward(dy, gate, up, some, needs, False, CODES[0])
    at = 0 if first else 1
    assert torch.equal(output[1 - at], right[1 - at])
    assert output[at].numel() == 0
    assert codes[1 - at] is None
    assert same_rows(codes[at], float8_rows.PLAIN.rows(right[at], columns[at], CODES[0]))


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_gradient_makes_one_row_nan(bad):
    dy, gate, up, columns, _ = gated_case(4, 2100, torch.bfloat16)
    dy[1, 2077] = bad
    _, codes, _ = coded_backward(dy, gate, up, columns, (False, False), False, CODES[0])
    for coded in codes:
        assert coded.scale.isnan().tolist() == [False, True, False, False]
        assert coded.codes.float().isnan().all(1).tolist() == [False, True, False, False]


def test_gradients_of_no_rows_and_of_zeros():
    dy, gate, up, columns, _ = gated_case(0, 48, torch.bfloat16)
    _, codes, _ = coded_backward(dy, gate, up, columns, (True, True), True, CODES[0])
    assert all(coded.codes.shape == (0, 48) for coded in codes)
    dy, gate, up, columns, _ = gated_case(2, 48, torch.bfloat16)
    _, codes, _ = coded_backward(0 * dy, gate, up, columns, (False, False), False, CODES[0])
    for coded in codes:
        assert not coded.codes.float().any()
        assert torch.isfinite(1 / coded.scale).all()


# --- launches that are looked up ---


def test_rope_launches_follow_strides_and_options():
    """A launch that is cached for one call must not serve another."""
    near = torch.randn(2, 4, 4, 16, device=DEVICE)
    far = torch.randn(2, 4, 4, 32, device=DEVICE)[..., ::2]
    angle = torch.randn(2, 1, 4, 16, device=DEVICE)
    tables = {"row": angle[:1, 0], "sequence": angle[:, 0], "far": angle.mT.contiguous().mT[:, 0]}
    for q, cos, axis, style, dtype in itertools.product(
        (near, far, near.transpose(1, 2)),
        tables.values(),
        (1, 2),
        ("half", "interleaved"),
        (torch.float32, torch.bfloat16),
    ):
        both = [x.detach().requires_grad_() for x in (q, q[:, :, :2] if axis == 2 else q)]
        inputs = (*both, cos.to(dtype), cos.to(dtype).flip(0))
        launches = []
        for backend in ("triton", "reference"):
            with liger_multi.use(rope=backend):
                output = ops.rope(*inputs, unsqueeze_dim=axis, style=style)
                launches.append((*output, *torch.autograd.grad([y.sum() for y in output], both)))
        torch.testing.assert_close(*launches)


# --- sparse attention: queries in several parts, lists that name wrong keys, strange scores ---


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


def test_a_key_of_many_pairs_is_summed_in_runs():
    """In one sum of fp32, each of these parts would be lost beside the first."""
    parts = torch.ones(600, 1, 1, 1, device=DEVICE)
    parts[0] = 2**24
    total = torch.zeros(1, 1, device=DEVICE)
    lists = torch.zeros(600, 1, 1, dtype=torch.int32, device=DEVICE)
    pairs_of_lists.add_up(total, parts, lists, 1)
    assert total >= 2**24 + 256


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
    launch_kernel(
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


# --- the GEMM of deterministic="rows": the formula's rows, with the same bits in every batch ---


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (1, 2, 17, 64, 65, 300)
SIZES = [(64, 128), (128, 64), (70, 130), (33, 5), (1, 1)]  # K and N
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def product(a, b, bias=None, out=None):
    out = a.new_empty(a.shape[0], b.shape[1]) if out is None else out
    gemm_by_rows(a, b, bias, out)
    return out


def near(actual, a, b, bias=None):
    """Sums of K terms in fp32, in another order than PyTorch's, and one rounding."""
    right = a.double() @ b.double()
    terms = a.double().abs() @ b.double().abs()
    if bias is not None:
        right, terms = right + bias.double(), terms + bias.double().abs()
    ulp = torch.finfo(actual.dtype).eps
    allowed = ulp * right.abs() + a.shape[1] * torch.finfo(torch.float32).eps * terms + 1e-7
    assert actual.isfinite().all()
    assert ((actual.double() - right).abs() <= allowed).all()


@by_dtype
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_it_is_the_product(dtype, rows, with_bias):
    for inner, cols in SIZES:
        a = random(rows, inner, dtype=dtype)
        weight = random(cols, inner, dtype=dtype, seed=1)
        bias = random(cols, dtype=dtype, seed=2) if with_bias else None
        near(product(a, weight.t(), bias), a, weight.t(), bias)


@by_dtype
def test_a_row_is_the_same_in_every_batch(dtype):
    for inner, cols in ((70, 130), (96, 64), (513, 40)):
        a, bias = random(300, inner, dtype=dtype), random(cols, dtype=dtype, seed=2)
        b = random(cols, inner, dtype=dtype, seed=1).t()
        whole = product(a, b, bias)
        for size in (1, 2, 17, 64, 65, 257):
            for start in range(0, 300, size if size > 2 else 53):
                part = a[start : start + size]
                for inputs in (part, part.clone()):
                    assert torch.equal(product(inputs, b, bias), whole[start : start + size])
        order = torch.randperm(300, generator=torch.Generator().manual_seed(3)).to(DEVICE)
        assert torch.equal(product(a[order], b, bias), whole[order])


@pytest.mark.filterwarnings("ignore:invalid value")  # of NumPy, in the interpreter
@by_dtype
def test_non_finite_values_do_not_reach_other_rows(dtype):
    a, b = random(70, 40, dtype=dtype), random(40, 24, dtype=dtype, seed=1)
    whole = product(a, b)
    a[3], a[69] = float("nan"), float("inf")
    others = [row for row in range(70) if row not in (3, 69)]
    output = product(a, b)
    assert torch.equal(output[others], whole[others])
    assert output[3].isnan().all()


STRIDED = {
    "columns of a": lambda a, b: (torch.cat([a, a], 1)[:, : a.shape[1]], b),
    "every second column of a": lambda a, b: (a.repeat_interleave(2, 1)[:, ::2], b),
    "a transposed": lambda a, b: (a.t().contiguous().t(), b),
    "one row of a for all": lambda a, b: (a[:1].expand(a.shape), b),
    "b transposed": lambda a, b: (a, b.t().contiguous().t()),
    "every third row of b": lambda a, b: (a, b.repeat_interleave(3, 0)[::3]),
    "unaligned": lambda a, b: (torch.cat([a[:, :1], a], 1)[:, 1:], b),
}


@by_dtype
@pytest.mark.parametrize("form", STRIDED)
def test_strides(dtype, form):
    inputs = random(67, 40, dtype=dtype), random(40, 70, dtype=dtype, seed=1)
    a, b = STRIDED[form](*inputs)
    assert torch.equal(product(a, b), product(a.contiguous(), b.contiguous()))
    near(product(a, b), a, b)


@by_dtype
def test_outputs_with_gaps(dtype):
    a, b = random(9, 20, dtype=dtype), random(20, 12, dtype=dtype, seed=1)
    right = product(a, b)
    wide = torch.full((9, 30), 7.0, dtype=dtype, device=DEVICE)
    product(a, b, out=wide[:, 4:16])
    assert torch.equal(wide[:, 4:16], right)
    assert (wide[:, :4] == 7).all()
    assert (wide[:, 16:] == 7).all()
    turned = torch.empty(12, 9, dtype=dtype, device=DEVICE).t()
    assert torch.equal(product(a, b, out=turned), right)
    assert torch.equal(product(a, b, out=torch.empty(9, 12, device=DEVICE)).to(dtype), right)


@by_dtype
def test_nothing_to_add(dtype):
    bias = random(7, dtype=dtype)
    a, b = random(5, 0, dtype=dtype), random(0, 7, dtype=dtype)
    assert not product(a, b).any()
    assert torch.equal(product(a, b, bias), bias.expand(5, 7))
    assert product(random(0, 4, dtype=dtype), random(4, 7, dtype=dtype)).shape == (0, 7)
    assert product(random(3, 4, dtype=dtype), random(4, 0, dtype=dtype)).shape == (3, 0)


def test_fp32_is_no_tf32():
    """TF32 drops what is below 2^-11; PyTorch's own setting may not change that."""
    torch.backends.cuda.matmul.allow_tf32, before = True, torch.backends.cuda.matmul.allow_tf32
    try:
        a = torch.full((16, 16), 1.0 + 2.0**-20, device=DEVICE)
        assert torch.equal(product(a, torch.eye(16, device=DEVICE)), a)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float64, torch.float64),
        (torch.int8, torch.int8),
        (torch.float8_e4m3fn, torch.float8_e4m3fn),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_other_dtypes_are_refused(dtypes):
    a, b = (torch.ones(2, 2, device=DEVICE).to(dtype) for dtype in dtypes)
    with pytest.raises(TypeError, match="takes a and b of one dtype"):
        gemm_by_rows(a, b, None, torch.empty(2, 2, device=DEVICE))


def test_tiles_end_within_2_gib(monkeypatch):
    """What lies too far apart is copied; the bound is made small here."""
    a, b = random(5, 20), random(20, 6, seed=1)
    right, observed = product(a, b), []
    near = gemm._near_tiles

    def small(x, rows, cols, most):
        observed.append(near(x, rows, cols, 64 * 20))
        return observed[-1]

    monkeypatch.setattr(gemm, "_near_tiles", small)
    far = random(5, 50)[:, ::2][:, :20].copy_(a)
    assert torch.equal(product(far, b), right)
    assert observed[0].is_contiguous()
    assert not far.is_contiguous()
    wide = torch.empty(1, device=DEVICE).expand(1, 2**25)
    with pytest.raises(ValueError, match="no K or N as long as"):
        product(wide, wide.t())


# --- by the operator ---


@by_dtype
def test_a_layer_has_independent_rows(dtype):
    """Forward and the gradient of x, and the gradient of the weight is the library's."""
    x, weight = random(3, 7, 48, dtype=dtype), random(40, 48, dtype=dtype, seed=1)
    bias, dy = random(40, dtype=dtype, seed=2), random(3, 7, 40, dtype=dtype, seed=3)

    def run(where):
        leaves = [t.clone().requires_grad_() for t in (x[where], weight, bias)]
        y = ops.linear(*leaves)
        return y.detach(), *torch.autograd.grad(y, leaves, dy[where])

    with liger_multi.use(linear="triton", deterministic="rows"):
        whole = run(slice(None))
        for i in range(3):
            alone = run(slice(i, i + 1))
            assert torch.equal(alone[0][0], whole[0][i])
            assert torch.equal(alone[1][0], whole[1][i])
        one = ops.linear(x[1, 4], weight, bias)
    assert torch.equal(one, whole[0][1, 4])
    near(whole[0].flatten(0, 1), x.flatten(0, 1), weight.t(), bias)
    near(whole[1].flatten(0, 1), dy.flatten(0, 1), weight)
    with liger_multi.use(linear="triton"):
        assert_equal(run(slice(None))[2:], whole[2:])


def test_fp64_keeps_the_promise_by_the_reference():
    x, weight = random(6, 9).double(), random(5, 9, seed=1).double()
    with liger_multi.use(deterministic="rows"):
        whole = ops.linear(x, weight)
        for i in range(6):
            assert torch.equal(ops.linear(x[i : i + 1], weight)[0], whole[i])
