"""What is easily wrong in norms: the classes they stand for, statistics, sums, what is kept."""

import pytest
import torch
import torch.nn.functional as F

import liger_multi
from liger_multi import ops
from liger_multi.backends.triton.norms.row_config import backward_config
from liger_multi.dispatch.launch import DeviceInfo
from liger_multi.testing import FORMULAS
from liger_multi.testing.tolerance import excess
from tests import harness

HALF, WIDE = torch.bfloat16, torch.float32


@pytest.fixture(params=["reference", "triton"])
def place(request):
    """The device of a backend, which the norms are bound to."""
    reason = harness.refusal(request.param)
    if reason is not None:
        pytest.skip(reason)
    bound = dict.fromkeys(("rms_norm", "fused_add_rms_norm", "layer_norm"), request.param)
    with liger_multi.use(**bound):
        yield harness.device_of(request.param)


# --- the classes they stand for ---


@pytest.mark.parametrize(
    "dtypes", [(HALF, HALF, HALF), (HALF, HALF, WIDE), (HALF, WIDE, HALF), (WIDE, WIDE, WIDE)]
)
@pytest.mark.parametrize("kind", ["llama", "olmo2", "gemma"])
def test_the_norm_of_a_sum_is_bit_exact_to_transformers(kind, dtypes):
    module = pytest.importorskip(f"transformers.models.{kind}.modeling_{kind}")
    stock = {"llama": "LlamaRMSNorm", "olmo2": "Olmo2RMSNorm", "gemma": "GemmaRMSNorm"}[kind]
    norm = getattr(module, stock)(96, eps=1e-5).to(dtypes[2])
    torch.nn.init.normal_(norm.weight)
    options = {
        "llama": {},
        "olmo2": {"casting": "olmo"},
        "gemma": {"casting": "gemma", "offset": 1.0},
    }[kind]
    x, residual = (torch.randn(7, 5, 96).to(d) for d in dtypes[:2])
    ours = ops.fused_add_rms_norm(x, residual, norm.weight, 1e-5, **options)
    total = x + residual
    for got, right in ((ours.new_residual, total), (ours.y, norm(total))):
        assert got.dtype == right.dtype
        assert torch.equal(got, right)


@pytest.mark.parametrize("affine", ["both", "weight", "bias", "none"])
@pytest.mark.parametrize("cols", [1, 40, 257])
@pytest.mark.parametrize(
    "dtypes", [(HALF, HALF), (HALF, WIDE), (torch.float16, torch.float16), (WIDE, WIDE)]
)
def test_layer_norm_is_bit_exact_to_torch(dtypes, cols, affine):
    x = (3 * torch.randn(11, cols) + 1).to(dtypes[0])
    weight = torch.randn(cols).to(dtypes[1]) if affine in ("both", "weight") else None
    bias = torch.randn(cols).to(dtypes[1]) if affine in ("both", "bias") else None
    ours, right = (
        ops.layer_norm(x, weight, bias, 1e-5),
        F.layer_norm(x, (cols,), weight, bias, 1e-5),
    )
    assert ours.dtype == right.dtype
    assert torch.equal(ours, right)


# --- statistics ---


def against_fp64(op, tensors, options=None):
    """Errors of the result and of every gradient, in tolerances."""
    options = options or {}
    dtype = tensors["x"].dtype
    leaves = {n: t.requires_grad_() for n, t in tensors.items()}
    result = getattr(ops, op)(**leaves, **options)
    wide = {n: t.detach().double().requires_grad_() for n, t in leaves.items()}
    right = FORMULAS[op](**wide, **options)
    up = torch.randn(result.shape, dtype=torch.float64).to(result)
    found = torch.autograd.grad(result, list(leaves.values()), up)
    exact = torch.autograd.grad(right, list(wide.values()), up.double())
    pairs = zip((result.detach(), *found), (right.detach(), *exact), strict=True)
    return [excess(got, true, dtype) for got, true in pairs]


def test_statistics_of_bf16_rows_are_fp32(place):
    """A mean of 100 in bf16 is off by a quarter, and dweight by as much of every dy."""
    x = (torch.randn(64, 48) + 100).to(place, HALF)
    weight, bias = (torch.randn(48).to(place, HALF) for _ in range(2))
    assert max(against_fp64("layer_norm", {"x": x, "weight": weight, "bias": bias})) <= 1


@pytest.mark.parametrize("cols", [300, 17000])
def test_a_large_mean_leaves_the_variance_alone(place, cols):
    """The mean of squares less the square of the mean would have no digit left here."""
    x = torch.randn(3, cols, dtype=torch.float64)
    wide = FORMULAS["layer_norm"](x + 3000)
    ours = ops.layer_norm((x + 3000).to(place, WIDE)).cpu().double()
    # what rounding x to fp32 moves it by, and the mean
    torch.testing.assert_close(ours, wide, rtol=0, atol=4 * 3000 * 2**-24)


# --- sums ---


def test_gradients_of_a_sum_are_added_before_they_are_rounded(place):
    tensors = [torch.randn(40, 64).to(place, HALF).requires_grad_() for _ in range(2)]
    weight = torch.randn(64).to(place, HALF)
    out = ops.fused_add_rms_norm(*tensors, weight)
    ups = [torch.randn(40, 64).to(place, HALF) for _ in out]
    (got,) = torch.autograd.grad(tuple(out), tensors[:1], ups)
    # the sum is rounded before it is normalized: exact gradients are those at what was stored
    s = out.new_residual.detach().double().requires_grad_()
    norm = FORMULAS["rms_norm"](s, weight.double())
    (right,) = torch.autograd.grad((norm, s), s, [u.double() for u in ups])
    half_a_step = 2**-8 * right.abs()
    assert ((got.double() - right).abs() <= half_a_step * 1.001 + 1e-5).all()


def test_both_terms_share_one_gradient():
    x, residual = (torch.randn(6, 8, requires_grad=True) for _ in range(2))
    out = ops.fused_add_rms_norm(x, residual)
    one, other = torch.autograd.grad(out.y.square().sum() + out.new_residual.sum(), (x, residual))
    assert torch.equal(one, other)


# --- what is kept ---


def kept_bytes(call):
    """The result of a call, and the storages that autograd keeps for it with their bytes."""
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        return call(), storages


def test_a_sum_is_kept_once_and_its_terms_are_not():
    x, residual = (torch.randn(32, 64, dtype=HALF, requires_grad=True) for _ in range(2))
    weight = torch.randn(64, dtype=HALF, requires_grad=True)
    out, kept = kept_bytes(lambda: ops.fused_add_rms_norm(x, residual, weight))
    assert out.new_residual.untyped_storage().data_ptr() in kept
    assert not {t.untyped_storage().data_ptr() for t in (x, residual, out.y)} & set(kept)
    assert sum(kept.values()) == 2 * 32 * 64 + 2 * 64 + 4 * 32


def test_layer_norm_keeps_8_bytes_a_row():
    x = torch.randn(32, 64, dtype=HALF, requires_grad=True)
    weight, bias = (torch.randn(64, dtype=HALF, requires_grad=True) for _ in range(2))
    _, kept = kept_bytes(lambda: ops.layer_norm(x, weight, bias))
    assert sum(kept.values()) == 2 * 32 * 64 + 2 * 64 + 8 * 32


@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
def test_frozen_parameters_have_no_partial_sums(monkeypatch, frozen):
    reason, place = harness.refusal("triton"), harness.device_of("triton")
    if reason is not None:
        pytest.skip(reason)
    from liger_multi.backends.triton.norms import layer_norm

    sets, original = [], layer_norm.sum_all_partials
    monkeypatch.setattr(
        layer_norm, "sum_all_partials", lambda p, *d: sets.append(p.shape[0]) or original(p, *d)
    )
    x = torch.randn(6, 16, device=place, requires_grad=True)
    weight, bias = (
        torch.randn(16, device=place, requires_grad=frozen not in (name, "both"))
        for name in ("weight", "bias")
    )
    with liger_multi.use(layer_norm="triton"):
        ops.layer_norm(x, weight, bias).sum().backward()
    assert sets == ([] if frozen == "both" else [1])


def test_rows_far_apart_are_copied_where_a_tile_of_them_would_span_2_gib():
    """Kernels tell the compiler that it does not: see assume_rows."""
    from liger_multi.backends.triton.common.rows import as_rows

    def stride(rows, cols, step, dtype):
        far = torch.empty_strided((rows, cols), (step, 1), dtype=dtype, device="meta")
        return as_rows(far).stride(0)

    assert stride(64, 128, 2**24, torch.bfloat16) == 128  # 64 rows a tile, 2 bytes: 2 GiB
    assert stride(64, 128, 2**24 - 1, torch.bfloat16) == 2**24 - 1
    assert stride(64, 128, 2**24 - 1, torch.float32) == 128
    assert stride(64, 8192, 2**40, torch.float32) == 2**40  # a row a tile
    assert stride(1, 128, 2**40, torch.float32) == 128


def test_rows_longer_than_kernels_take_for_granted_are_refused():
    from liger_multi.backends.triton.activations import gated
    from liger_multi.backends.triton.common.rows import LONGEST_ROW
    from liger_multi.backends.triton.cross_entropy import cross_entropy
    from liger_multi.backends.triton.cross_entropy.operators import scale_config
    from liger_multi.backends.triton.norms import row_config

    info = DeviceInfo("any", "any", 32, 1024, 100_000, 100)
    for cols in (LONGEST_ROW.value, LONGEST_ROW.value + 1):
        calls = [
            lambda cols=cols: row_config.forward_config(info, 4, cols),
            lambda cols=cols: row_config.backward_config(info, 4, cols, 4),
            lambda cols=cols: cross_entropy.row_config(info, 4, cols, 1),
            lambda cols=cols: scale_config(info, 4, cols),
            lambda cols=cols: gated.tile_config(info, 4, cols),
        ]
        for call in calls:
            if cols == LONGEST_ROW.value:
                call()
            else:
                with pytest.raises(ValueError, match=f"got {cols}"):
                    call()


@pytest.mark.parametrize("sums", [1, 2])
@pytest.mark.parametrize("cols", [8, 512, 1024, 4096, 8192])
def test_more_column_sums_do_not_need_more_memory_on_the_chip(cols, sums):
    info = DeviceInfo("any", "any", 32, 1024, 100_000, 100)
    k = backward_config(info, 10**6, cols, 4, sums)
    assert k.block >= cols
    assert k.stages == 1 or k.stages * k.rows * k.block * 4 * sums <= 100_000
    assert k.rows * k.block // (k.num_warps * 32) * sums <= 32, "elements a thread, of every sum"


# --- bad input ---

x = torch.randn(4, 8)
BAD = [
    (
        lambda: ops.fused_add_rms_norm(x, x[:2]),
        ValueError,
        r"x and residual.*\(4, 8\) and \(2, 8\)",
    ),
    (lambda: ops.fused_add_rms_norm(x, None), TypeError, "residual must be a floating-point"),
    (lambda: ops.fused_add_rms_norm(x, x.long()), TypeError, "residual must be.*int64"),
    (lambda: ops.fused_add_rms_norm(x[0, 0], x[0, 0]), ValueError, "at least one axis"),
    (lambda: ops.fused_add_rms_norm(x, x, torch.ones(7)), ValueError, r"weight.*shape \(8,\)"),
    (lambda: ops.fused_add_rms_norm(x, x, casting="gema"), ValueError, "did you mean 'gemma'"),
    (lambda: ops.fused_add_rms_norm(x, x.to("meta")), ValueError, "got residual on meta"),
    (lambda: ops.swiglu(x, None), TypeError, "up must be a floating-point tensor, got NoneType"),
    (lambda: ops.layer_norm(x.int()), TypeError, "x must be a floating-point tensor"),
    (lambda: ops.layer_norm(x[0, 0]), ValueError, "at least one axis"),
    (lambda: ops.layer_norm(x, torch.ones(7)), ValueError, r"weight must have shape \(8,\)"),
    (lambda: ops.layer_norm(x, None, torch.ones(8, 1)), ValueError, r"bias must have shape \(8,\)"),
    (lambda: ops.layer_norm(x, bias=torch.ones(8).to("meta")), ValueError, "got bias on meta"),
]


@pytest.mark.parametrize(("run", "kind", "message"), BAD, ids=range(len(BAD)))
def test_bad_input_is_named(run, kind, message):
    with pytest.raises(kind, match=message):
        run()
