"""Thin GEMMs of adapters against fp64, over shapes that do not divide tiles, and their choice."""

import pytest
import torch

from liger_multi.dispatch import launch
from liger_multi.dispatch.launch import DeviceInfo
from liger_multi.reference.adapters.low_rank import LowRank
from liger_multi.reference.common.strict import in_mode
from tests import harness

pytest.importorskip("triton")
if (DEVICE := harness.device_of("triton")) is None:
    pytest.skip("kernels on a CPU need TRITON_INTERPRET=1", allow_module_level=True)

from liger_multi.backends.triton.adapters import thin_gemm
from liger_multi.backends.triton.adapters.low_rank import THIN
from liger_multi.backends.triton.common.gemm import gemm_by_rows

PAIRS = [pytest.param(pair, id=" and ".join(str(d)[6:] for d in pair)) for pair in thin_gemm.PAIRS]
SIZES = [(1, 16), (70, 40), (130, 300), (257, 129)]
RANKS = [1, 3, 16]
SCALE = 0.37
HOPPER = DeviceInfo("cuda", "sm90", 32, 1024, 232448, 132)


def random(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def tensors(rows, cols, rank, pair, seed=0):
    """A wide matrix, low and a factor of (cols, r)."""
    wide, thin = pair
    shapes = ((rows, cols), wide), ((rows, rank), thin), ((cols, rank), thin)
    return [random(*shape, dtype=d, seed=seed + i) for i, (shape, d) in enumerate(shapes)]


def assert_rounded_once(actual, a, b, dtype, base=None, scale=1.0):
    """``base + scale a @ b``, up to half a unit in the last place and the errors of fp32 sums."""
    expected = scale * a.double() @ b.double() + (0 if base is None else base.double())
    size = scale * a.double().abs() @ b.double().abs()
    size = size if base is None else size + base.double().abs()
    assert actual.dtype == dtype
    info = torch.finfo(dtype)
    unit = expected.abs().clamp(min=info.smallest_normal) * info.eps  # subnormal numbers have one
    assert ((actual.double() - expected).abs() <= unit / 2 + 2**-21 * size).all()


@pytest.fixture
def calls(monkeypatch):
    """The kernels that are launched."""
    names = []
    real = thin_gemm.launch
    monkeypatch.setattr(
        thin_gemm,
        "launch",
        lambda kernel, *args: (names.append(kernel.__name__), real(kernel, *args)),
    )
    return names


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_widen(size, rank, pair, calls):
    base, low, factor = tensors(*size, rank, pair)
    product = (low, factor.t(), pair[0])
    assert_rounded_once(THIN.added(base, low, factor.t(), SCALE), *product, base, SCALE)
    in_place = base.clone()
    assert THIN.add_(in_place, low, factor.t(), SCALE) is in_place
    assert_rounded_once(in_place, *product, base, SCALE)
    rows = factor.t().contiguous()  # as the first factor of an adapter stands in memory
    assert torch.equal(THIN.add_(base.clone(), low, rows, SCALE), in_place)
    out = torch.empty_like(base)
    assert thin_gemm.widen(None, low, factor.t(), SCALE, out) is out
    assert_rounded_once(out, *product, None, SCALE)
    assert calls == ["_widen_kernel"] * 4
    assert torch.equal(THIN.widened(low, factor.t(), SCALE, pair[0]), out) or pair[0] != pair[1]
    assert len(calls) == 4 + (pair[0] == pair[1])  # of fp32 factors, the library's


@pytest.mark.parametrize("rank", [17, 64, 100, 128])
def test_widen_with_more_terms_than_a_tile_has(rank, calls):
    base, low, factor = tensors(70, 140, rank, (torch.bfloat16, torch.bfloat16))
    actual = THIN.added(base, low, factor.t(), SCALE)
    assert_rounded_once(actual, low, factor.t(), torch.bfloat16, base, SCALE)
    assert calls == ["_widen_kernel"]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_narrow_and_sums(size, rank, pair, calls):
    wide, low, factor = tensors(*size, rank, pair)
    narrow, sums = THIN.narrow_and_gradient(wide, factor, low, SCALE)
    assert calls == ["_narrow_sums_kernel"]
    assert_rounded_once(narrow, wide, factor, pair[1])
    assert_rounded_once(sums, wide.t(), low, pair[1], scale=SCALE)
    again = THIN.narrow_and_gradient(wide, factor, low, SCALE)
    assert torch.equal(narrow, again[0])
    assert torch.equal(sums, again[1])


@pytest.mark.parametrize("pair", PAIRS)
def test_narrow_and_sums_over_several_parts(pair):
    """Programs that share the rows, the last with fewer, and several tiles of columns."""
    wide, low, factor = tensors(333, 70, 5, pair)
    config = {"block_n": 32, "block_k": 16, "parts": 4}
    with launch.forced({"thin_gemm.narrow_sums": config}):
        narrow, sums = THIN.narrow_and_gradient(wide, factor, low, SCALE)
    assert_rounded_once(narrow, wide, factor, pair[1])
    assert_rounded_once(sums, wide.t(), low, pair[1], scale=SCALE)


def test_rows_that_are_parts_of_wider_ones(calls):
    wide = random(40, 300, dtype=torch.bfloat16)[3:37, 8:136]
    low = random(34, 24, dtype=torch.bfloat16, seed=1)[:, 5:13]
    factor = random(128, 16, dtype=torch.bfloat16, seed=2)[:, ::2]
    narrow, sums = THIN.narrow_and_gradient(wide, factor, low, SCALE)
    assert_rounded_once(narrow, wide, factor, torch.bfloat16)
    assert_rounded_once(sums, wide.t(), low, torch.bfloat16, scale=SCALE)
    actual = THIN.added(wide, low, factor.t(), SCALE)
    assert_rounded_once(actual, low, factor.t(), torch.bfloat16, wide, SCALE)
    assert actual.is_contiguous()
    row = wide[:1].expand(34, 128)
    actual = THIN.added(row, low, factor.t(), SCALE)
    assert_rounded_once(actual, low, factor.t(), torch.bfloat16, row, SCALE)
    assert calls == ["_narrow_sums_kernel", "_widen_kernel", "_widen_kernel"]


@pytest.mark.parametrize(
    ("pair", "rank", "widens", "fuses"),
    [
        ((torch.bfloat16, torch.bfloat16), 16, True, True),
        ((torch.bfloat16, torch.bfloat16), 17, True, False),
        ((torch.bfloat16, torch.bfloat16), 129, False, False),
        ((torch.bfloat16, torch.float32), 16, True, True),
        ((torch.bfloat16, torch.float32), 17, False, False),
        ((torch.float16, torch.float32), 4, False, False),
        ((torch.float32, torch.float32), 4, False, False),
        ((torch.float64, torch.float64), 4, False, False),
    ],
)
def test_what_the_library_multiplies(pair, rank, widens, fuses, calls):
    wide, low, factor = tensors(33, 48, rank, pair)
    THIN.added(wide, low, factor.t(), SCALE)
    assert calls == ["_widen_kernel"] * widens
    calls.clear()
    narrow, sums = THIN.narrow_and_gradient(wide, factor, low, SCALE)
    assert calls == ["_narrow_sums_kernel"] * fuses
    assert (narrow.shape, sums.shape) == (low.shape, factor.shape)
    assert (narrow.dtype, sums.dtype) == (pair[1], pair[1])


def test_columns_that_are_apart_are_the_librarys(calls):
    wide, low, factor = tensors(32, 64, 4, (torch.bfloat16, torch.bfloat16))
    apart = wide.repeat_interleave(2, 1)[:, ::2]
    expected = LowRank().narrow_and_gradient(wide, factor, low, SCALE)
    for wide_matrix in (apart, wide.t().contiguous().t()):
        actual = THIN.narrow_and_gradient(wide_matrix, factor, low, SCALE)
        assert all(map(torch.allclose, actual, expected))
    assert not calls


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_what_is_not_needed_is_empty(needs, calls):
    wide, low, factor = tensors(20, 32, 4, (torch.bfloat16, torch.bfloat16))
    results = THIN.narrow_and_gradient(wide, factor, low, SCALE, *needs)
    assert [t.numel() > 0 for t in results] == list(needs)
    assert not calls


def test_rows_that_must_not_depend_on_others_have_a_gemm_of_their_own(calls):
    wide, low, factor = tensors(20, 32, 4, (torch.bfloat16, torch.bfloat16))
    with in_mode("rows", gemm_by_rows):
        THIN.added(wide, low, factor.t(), SCALE)
        THIN.narrow_and_gradient(wide, factor, low, SCALE)
    assert not calls
    with in_mode("deterministic", None):
        THIN.narrow_and_gradient(wide, factor, low, SCALE)
    assert calls == ["_narrow_sums_kernel"]


def test_launches_of_hopper():
    """What was fastest on an H200."""
    widen = [
        thin_gemm.widen_config(HOPPER, 8192, 4096, rank, base)
        for rank, base in ((16, 1), (16, 0), (64, 1))
    ]
    assert [(k.block_m, k.block_n, k.num_warps) for k in widen] == [
        (32, 128, 4),
        (64, 128, 4),
        (64, 128, 4),
    ]
    assert thin_gemm.narrow_sums_config(HOPPER, 8192, 4096, 16, 2) == thin_gemm.NarrowSumsConfig(
        block_n=256, block_k=128, stages=3, parts=8, num_warps=8
    )
    assert thin_gemm.narrow_sums_config(HOPPER, 8192, 4096, 16, 4) == thin_gemm.NarrowSumsConfig(
        block_n=128, block_k=64, stages=4, parts=8, num_warps=4
    )
