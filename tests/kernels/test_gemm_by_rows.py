"""The GEMM that stands for the library's under ``deterministic="rows"``, on a GPU or interpreted.

Its rows are those of the formula in fp64, and the same bits in whatever batch they stand.
"""

import pytest
import torch

import liger_multi
from liger_multi import ops
from tests import harness

pytest.importorskip("triton")
if (DEVICE := harness.device_of("triton")) is None:
    pytest.skip("kernels on a CPU need TRITON_INTERPRET=1", allow_module_level=True)

from liger_multi.backends.triton.common import gemm
from liger_multi.backends.triton.common.gemm import gemm_by_rows
from tests.comparing import assert_equal

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
def test_what_is_not_finite_stays_in_its_row(dtype):
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
    near = gemm._near

    def small(x, rows, cols, most):
        observed.append(near(x, rows, cols, 64 * 20))
        return observed[-1]

    monkeypatch.setattr(gemm, "_near", small)
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
