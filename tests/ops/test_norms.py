"""Norms and activations of every sort, beyond the common suite.

The classes they stand for, statistics, sums, what is kept, bad input.
"""

import inspect

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
from tests.comparing import recorded, saved, storage_bytes

# --- norms ---


HALF, WIDE = torch.bfloat16, torch.float32
KINDS = (
    "rms_norm",
    "fused_add_rms_norm",
    "layer_norm",
    "gated_rms_norm",
    "group_norm",
    "poly_norm",
    "modulated_rms_norm",
    "dyt",
    "relu_squared",
    "swiglu_clamped",
    "swiglu_clamped_packed",
)


def stock(family, name, *arguments, **options):
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    if not hasattr(module, name):
        pytest.skip(f"this transformers has no {name}")
    if not set(options) <= set(inspect.signature(getattr(module, name)).parameters):
        pytest.skip(f"{name} of this transformers takes no {', '.join(options)}")
    layer = getattr(module, name)(*arguments, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def equal(got, right):
    assert got.dtype == right.dtype
    assert torch.equal(got, right)


FAMILIES = {
    "llama": ("LlamaRMSNorm", {}),
    "olmo2": ("Olmo2RMSNorm", {"casting": "olmo"}),
    "gemma": ("GemmaRMSNorm", {"casting": "gemma", "offset": 1.0}),
}


@pytest.fixture(params=["reference", "triton"])
def place(request):
    """The device of a backend, which the norms are bound to."""
    device = harness.place_of(request.param)
    with liger_multi.use(**dict.fromkeys(KINDS, request.param)):
        yield device


# --- the classes they stand for ---


@pytest.mark.parametrize(
    "dtypes", [(HALF, HALF, HALF), (HALF, HALF, WIDE), (HALF, WIDE, HALF), (WIDE, WIDE, WIDE)]
)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_norms_are_bit_exact_to_transformers(model_type, dtypes):
    """Of rows, and of a sum of two."""
    class_name, options = FAMILIES[model_type]
    norm = stock(model_type, class_name, 96, eps=1e-5).to(dtypes[2])
    x, residual = (torch.randn(7, 5, 96).to(d) for d in dtypes[:2])
    ours = ops.fused_add_rms_norm(x, residual, norm.weight, 1e-5, **options)
    total = x + residual
    equal(ours.new_residual, total)
    equal(ours.y, norm(total))
    equal(ops.rms_norm(x, norm.weight, 1e-5, **options), norm(x))


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
    gradients = torch.autograd.grad(result, list(leaves.values()), up)
    exact = torch.autograd.grad(right, list(wide.values()), up.double())
    pairs = zip((result.detach(), *gradients), (right.detach(), *exact), strict=True)
    return [excess(got, true, dtype) for got, true in pairs]


@pytest.mark.parametrize(
    ("op", "shape", "options"),
    [("layer_norm", (64, 48), {}), ("group_norm", (16, 6, 40), {"num_groups": 2})],
)
def test_statistics_of_bf16_rows_are_fp32(place, op, shape, options):
    """A mean of 100 in bf16 is off by a quarter, and so is every term of dweight."""
    x = (torch.randn(shape) + 100).to(place, HALF)
    weight, bias = (torch.randn({64: 48, 16: 6}[shape[0]]).to(place, HALF) for _ in range(2))
    assert max(against_fp64(op, {"x": x, "weight": weight, "bias": bias}, options)) <= 1


@pytest.mark.parametrize(
    ("op", "shape", "options"),
    [
        ("layer_norm", (3, 300), ()),
        ("layer_norm", (3, 17000), ()),
        ("group_norm", (2, 4, 50), (2,)),
        ("group_norm", (1, 2, 9000), (2,)),
    ],
)
def test_a_large_mean_leaves_the_variance_alone(place, op, shape, options):
    """The mean of squares less the square of the mean would have no digit left here."""
    x = torch.randn(shape, dtype=torch.float64) + 3000
    ours = getattr(ops, op)(x.to(place, WIDE), *options).cpu().double()
    # what rounding x to fp32 moves it by, and the mean
    torch.testing.assert_close(ours, FORMULAS[op](x, *options), rtol=0, atol=4 * 3000 * 2**-24)


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


def test_what_norms_keep_for_backward():
    """A sum is kept once and its terms are not; statistics are fp32."""
    x, residual = (torch.randn(32, 64, dtype=HALF, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(64, dtype=HALF, requires_grad=True) for _ in range(2))
    out, kept = saved(lambda: ops.fused_add_rms_norm(x, residual, weight))
    places = {t.untyped_storage().data_ptr() for t in kept}
    assert out.new_residual.untyped_storage().data_ptr() in places
    assert not {t.untyped_storage().data_ptr() for t in (x, residual, out.y)} & places
    assert storage_bytes(kept) == 2 * 32 * 64 + 2 * 64 + 4 * 32
    _, kept = saved(lambda: ops.layer_norm(x, weight, bias))
    assert storage_bytes(kept) == 2 * 32 * 64 + 2 * 64 + 8 * 32


@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
def test_frozen_parameters_have_no_partial_sums(monkeypatch, frozen):
    place = harness.place_of("triton")
    from liger_multi.backends.triton.norms import layer_norm

    sets = recorded(monkeypatch, layer_norm, "sum_all_partials", lambda p, *d: p.shape[0])
    x = torch.randn(6, 16, device=place, requires_grad=True)
    weight, bias = (
        torch.randn(16, device=place, requires_grad=frozen not in (name, "both"))
        for name in ("weight", "bias")
    )
    with liger_multi.use(layer_norm="triton"):
        ops.layer_norm(x, weight, bias).sum().backward()
    assert sets == ([] if frozen == "both" else [1])


def test_rows_of_a_tile_past_2_gib_are_copied():
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
    from liger_multi.backends.triton.cross_entropy.cross_entropy_inplace import scale_config
    from liger_multi.backends.triton.norms import row_config

    info = DeviceInfo("any", "any", 32, 1024, 100_000, 100)
    for call in (
        lambda cols: row_config.forward_config(info, 4, cols),
        lambda cols: row_config.backward_config(info, 4, cols, 4),
        lambda cols: cross_entropy.row_config(info, 4, cols, 1),
        lambda cols: scale_config(info, 4, cols),
        lambda cols: gated.tile_config(info, 4, cols),
    ):
        call(LONGEST_ROW.value)
        with pytest.raises(ValueError, match=f"got {LONGEST_ROW.value + 1}"):
            call(LONGEST_ROW.value + 1)


@pytest.mark.parametrize("sums", [1, 2])
@pytest.mark.parametrize("cols", [8, 512, 1024, 4096, 8192])
def test_more_column_sums_do_not_need_more_memory_on_the_chip(cols, sums):
    k = backward_config(DeviceInfo("any", "any", 32, 1024, 100_000, 100), 10**6, cols, 4, sums)
    assert k.block >= cols
    assert k.stages == 1 or k.stages * k.rows * k.block * 4 * sums <= 100_000
    assert k.rows * k.block // (k.num_warps * 32) * sums <= 32, "elements a thread, of every sum"


# --- bad input of norms ---

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


# --- kinds of norms and activations ---


DTYPES = pytest.mark.parametrize("dtypes", [(HALF, HALF), (HALF, WIDE), (WIDE, WIDE)])


# --- the classes they stand for ---

AFTER = {"norm_before_gate": False}
GATED = {
    "mamba2": (("mamba2", "MambaRMSNormGated", 24), AFTER | {"group_size": 8}),
    "bamba": (("bamba", "BambaRMSNormGated", 24), AFTER | {"group_size": 24}),
    "zamba2": (("zamba2", "Zamba2RMSNormGated", 24), AFTER | {"group_size": 6}),
    "qwen3-next": (("qwen3_next", "Qwen3NextRMSNormGated", 24), {}),
    "kimi": (
        ("kimi_linear", "KimiLinearRMSNormGated", 24),
        {"casting": "olmo", "activation": "sigmoid"},
    ),
    "qwen4": (
        ("qwen4_exp", "Qwen4ExpTextRMSNorm", 24),
        {"group_size": 8, "offset": 1.0, "casting": "gemma"},
    ),
    "falcon-h1": (
        ("falcon_h1", "FalconH1RMSNormGated", 24, 1e-6, 3),
        {"casting": "olmo", "group_size": 8},
    ),
    "falcon-h1-after": (
        ("falcon_h1", "FalconH1RMSNormGated", 24, 1e-6, 3, False),
        AFTER | {"casting": "olmo", "group_size": 8},
    ),
}


@DTYPES
@pytest.mark.parametrize("model_type", GATED)
def test_gated_norms_are_bit_exact_to_transformers(model_type, dtypes):
    """With a gate, and without where the norm takes none."""
    named, options = GATED[model_type]
    # FalconH1's norm takes the number of groups
    size = {n: v for n, v in options.items() if n == "group_size" and "falcon" not in model_type}
    norm = stock(*named, **size).to(dtypes[1])
    x, gate = (torch.randn(2, 5, 24).to(dtypes[0]) for _ in range(2))
    if model_type != "qwen4":
        equal(ops.gated_rms_norm(x, gate, norm.weight, 1e-6, **options), norm(x, gate))
    if model_type in ("qwen4", "mamba2"):
        equal(ops.gated_rms_norm(x, None, norm.weight, 1e-6, **options), norm(x))


@DTYPES
def test_the_centered_norm_is_bit_exact_to_transformers(dtypes):
    """One is added in the dtype of the weight, and the product is fp32."""
    norm = stock("muse_spark", "MuseSparkTextCenteredRMSNorm", 24).to(dtypes[1])
    x = torch.randn(2, 5, 24).to(dtypes[0])
    equal(ops.rms_norm(x, norm.weight, norm.eps, offset=1.0, casting="olmo"), norm(x))


@DTYPES
def test_a_scaled_sum_is_what_granite_computes(dtypes):
    norm = stock("granite", "GraniteRMSNorm", 24).to(dtypes[1])
    x, residual = (torch.randn(2, 5, 24).to(dtypes[0]) for _ in range(2))
    ours = ops.fused_scaled_add_rms_norm(x, residual, norm.weight, x_scale=0.22)
    total = residual + x * 0.22
    equal(ours.new_residual, total)
    equal(ours.y, norm(total))


@DTYPES
@pytest.mark.parametrize("shape", [(11, 40), (11, 257), (3, 12, 5, 7), (2, 8), (2, 16, 16, 16)])
@pytest.mark.parametrize("affine", ["both", "weight", "bias", "none"])
def test_norms_are_bit_exact_to_torch(dtypes, shape, affine):
    """Layer norms of the last axis, and of groups where there are four or more."""
    x = (2 * torch.randn(shape) + 1).to(dtypes[0])

    def drawn(size, name):
        return torch.randn(size).to(dtypes[1]) if affine in ("both", name) else None

    weight, bias = drawn(shape[-1], "weight"), drawn(shape[-1], "bias")
    equal(ops.layer_norm(x, weight, bias, 1e-5), F.layer_norm(x, shape[-1:], weight, bias, 1e-5))
    if shape[1] % 4 == 0 and (dtypes[0] == WIDE or affine in ("both", "weight")):
        # without a weight, torch keeps bf16 statistics
        weight, bias = drawn(shape[1], "weight"), drawn(shape[1], "bias")
        equal(ops.group_norm(x, 4, weight, bias), F.group_norm(x, 4, weight, bias))


@pytest.mark.parametrize("shape", [(7, 24), (2, 5, 24)])
def test_dyt_and_poly_norm_are_the_formulas_of_their_papers(shape):
    x, alpha = torch.randn(shape), torch.tensor([0.7])
    weight, bias, three = torch.randn(24), torch.randn(24), torch.randn(3)
    equal(ops.dyt(x, alpha, weight, bias), torch.tanh(alpha * x) * weight + bias)

    def norm(u):
        return u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + 1e-6)

    right = three[0] * norm(x**3) + three[1] * norm(x**2) + three[2] * norm(x) + bias[:1]
    equal(ops.poly_norm(x, three, bias[:1]), right)


@DTYPES
def test_the_modulated_norm_is_that_of_llama_modulated(dtypes):
    norm = stock("llama", "LlamaRMSNorm", 24).to(dtypes[1])
    x = torch.randn(2, 5, 24).to(dtypes[0])
    scale, shift = (torch.randn(2, 24).to(dtypes[0]) for _ in range(2))
    right = norm(x) * (1 + scale[:, None]) + shift[:, None]
    for by in ((scale, shift), (scale[:, None], shift[:, None])):
        equal(ops.modulated_rms_norm(x, *by, norm.weight), right)
    equal(ops.modulated_rms_norm(x.view(10, 24), scale, shift, norm.weight), right.view(10, 24))


@pytest.mark.parametrize("dtype", [HALF, torch.float16, WIDE])
def test_activations_are_bit_exact_to_transformers(dtype):
    from transformers.activations import ACT2FN

    x = (3 * torch.randn(4, 5, 48)).to(dtype)
    equal(ops.relu_squared(x), ACT2FN["relu2"](x))
    gate, up = x.chunk(2, -1)
    equal(ops.swiglu(gate, up), torch.nn.functional.silu(gate) * up)
    for approximate, name in (("tanh", "gelu_pytorch_tanh"), ("none", "gelu")):
        equal(ops.geglu(gate, up, approximate), ACT2FN[name](gate) * up)
        equal(ops.geglu_packed(x, approximate), ACT2FN[name](gate) * up)
    scaled = up * ACT2FN["silu"](gate * 0.3)
    equal(ops.swiglu(gate, up, gate_multiplier=0.3), scaled)
    equal(ops.swiglu_packed(x, gate_multiplier=0.3, down_multiplier=1.7), scaled * 1.7)
    clamped = ACT2FN["silu"](gate.clamp(max=2.0)) * up.clamp(-2.0, 2.0)
    silu = {"limit": 2.0, "alpha": 1.0, "up_offset": 0.0}
    equal(ops.swiglu_clamped(gate, up, **silu), clamped)
    equal(ops.swiglu_clamped_packed(x, interleaved=False, **silu), clamped)


@pytest.mark.parametrize("dtype", [HALF, WIDE])
def test_the_clamped_activation_is_that_of_gpt_oss(dtype):
    module = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    experts = torch.nn.Module()
    experts.limit, experts.alpha = 7.0, 1.702
    x = (5 * torch.randn(6, 32)).to(dtype).requires_grad_()
    right = module.GptOssExperts._apply_gate(experts, x)
    ours = ops.swiglu_clamped_packed(x)
    equal(ours, right)
    equal(ops.swiglu_clamped(x[..., ::2], x[..., 1::2]), right)
    upstream = torch.randn_like(right)
    (got,), (expected,) = (torch.autograd.grad(y, x, upstream) for y in (ours, right))
    assert excess(got, expected.double(), dtype) <= 1


# --- statistics and sums ---


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_gradients_of_groups_of_any_rank(place, rank):
    """Those of images were written to a buffer of another size."""
    x = torch.randn(2, 6, *(3, 4, 2)[: rank - 2]).to(place)
    tensors = {"x": x, "weight": torch.randn(6).to(place), "bias": torch.randn(6).to(place)}
    assert max(against_fp64("group_norm", tensors, {"num_groups": 1})) <= 1


def test_powers_are_taken_in_fp32(place):
    """In fp16, the cube of 60 is infinite."""
    x = (60 * torch.randn(8, 40)).to(place, torch.float16)
    weight, bias = torch.randn(3).to(place), torch.randn(1).to(place)
    tensors = {"x": x, "weight": weight.to(x.dtype), "bias": bias.to(x.dtype)}
    assert max(against_fp64("poly_norm", tensors)) <= 1


@pytest.mark.parametrize("limit", [1.0, 7.0])
def test_gradient_of_a_clamp_and_at_its_edge(place, limit):
    """At the edge, that of PyTorch's own clamp, which 2.14 changed."""
    edge = torch.tensor([limit], requires_grad=True)
    zero_at_edge = not torch.autograd.grad(edge.clamp(-limit, limit).sum(), edge)[0].any()
    gate = torch.tensor([-20.0, limit - 0.5, limit, limit + 0.5, 30.0]).to(place).requires_grad_()
    up = torch.tensor([-30.0, -limit, 0.5, limit, 30.0]).to(place).requires_grad_()
    y = ops.swiglu_clamped(gate, up, limit=limit, alpha=0.1, up_offset=2.5)
    dgate, dup = torch.autograd.grad(y.sum(), (gate, up))
    assert (dgate == 0).tolist() == [False, False, zero_at_edge, True, True]
    assert (dup == 0).tolist() == [True, zero_at_edge, False, zero_at_edge, True]


def test_what_is_no_number_stays_none(place):
    """A minimum or maximum would lose it."""
    x = torch.full((4, 8), float("nan")).to(place)
    assert ops.relu_squared(x).isnan().all()
    assert ops.swiglu_clamped(x, torch.ones_like(x)).isnan().all()
    assert ops.swiglu_clamped(torch.ones_like(x), x).isnan().all()
    assert ops.swiglu_clamped_packed(x).isnan().all()


def test_a_length_compiles_nothing(monkeypatch):
    """Rows of a modulation, and multipliers, are run-time numbers of the kernels."""
    device = harness.place_of("triton")
    from liger_multi.backends.triton.activations import gated
    from liger_multi.backends.triton.norms import modulated_rms_norm

    constants = []
    for module in (gated, modulated_rms_norm):
        monkeypatch.setattr(
            module, "launch", lambda *a, real=module.launch: constants.append(a[3]) or real(*a)
        )
    with liger_multi.use(modulated_rms_norm="triton", swiglu="triton"):
        for rows, by in ((300, 0.3), (420, 0.4)):
            x = torch.randn(2, rows, 16, device=device, requires_grad=True)
            ops.modulated_rms_norm(x, torch.randn(2, 16, device=device)).sum().backward()
            ops.swiglu(x, x, gate_multiplier=by).sum().backward()
    half = len(constants) // 2
    assert constants[:half] == constants[half:]


# --- bad input ---

w = torch.ones(8)
BAD += [
    (lambda: ops.relu_squared(x.long()), TypeError, "x must be a floating-point tensor"),
    (lambda: ops.relu_squared(x[0, 0]), ValueError, "at least one axis"),
    (lambda: ops.swiglu(x, x, gate_multiplier="1"), TypeError, "gate_multiplier must be a number"),
    (lambda: ops.swiglu_packed(x, down_multiplier=None), TypeError, "down_multiplier must be"),
    (lambda: ops.swiglu_clamped(x, x[:2]), ValueError, r"same shape, got \(4, 8\) and \(2, 8\)"),
    (lambda: ops.swiglu_clamped(x, x, limit=0.0), ValueError, "limit must be above 0, got 0.0"),
    (lambda: ops.swiglu_clamped_packed(x[:, :5]), ValueError, "must be even"),
    (lambda: ops.swiglu_clamped_packed(x, interleaved=1), TypeError, "True or False, got int 1"),
    (lambda: ops.dyt(x, w), ValueError, r"alpha must have shape \(1,\) or \(\), got .*\(8,\)"),
    (lambda: ops.dyt(x, None), TypeError, "alpha must be a floating-point tensor, got None"),
    (lambda: ops.dyt(x, w[:1], w[:7]), ValueError, r"weight must have shape \(8,\)"),
    (lambda: ops.gated_rms_norm(x, x[:2]), ValueError, r"x and gate.*\(4, 8\) and \(2, 8\)"),
    (lambda: ops.gated_rms_norm(x, x, w[:3]), ValueError, r"weight must have shape \(8,\)"),
    (lambda: ops.gated_rms_norm(x, group_size=3), ValueError, "group_size must divide 8.*got 3"),
    (lambda: ops.gated_rms_norm(x, group_size=0), ValueError, "group_size must divide 8.*got 0"),
    (lambda: ops.gated_rms_norm(x, activation="gelu"), ValueError, "unknown activation 'gelu'"),
    (lambda: ops.gated_rms_norm(x, casting="lama"), ValueError, "did you mean 'llama'"),
    (
        lambda: ops.fused_scaled_add_rms_norm(x, x, x_scale="1"),
        TypeError,
        "x_scale must be a number, got str",
    ),
    (lambda: ops.fused_scaled_add_rms_norm(x, x[:2]), ValueError, "x and residual.*same shape"),
    (lambda: ops.group_norm(x[0], 2), ValueError, r"x must have shape \(N, C, \.\.\.\)"),
    (lambda: ops.group_norm(x, 3), ValueError, "num_groups must divide 8.*got 3"),
    (lambda: ops.group_norm(x, 2.0), TypeError, "num_groups must be an integer"),
    (lambda: ops.group_norm(x, 2, w[:4]), ValueError, r"weight must have shape \(8,\), the chann"),
    (lambda: ops.poly_norm(x, w), ValueError, r"weight must have shape \(3,\), the three powers"),
    (lambda: ops.poly_norm(x, w[:3], w), ValueError, r"bias must have shape \(1,\)"),
    (lambda: ops.poly_norm(x, None), TypeError, "weight must be a floating-point tensor, got None"),
    (lambda: ops.modulated_rms_norm(x, None), TypeError, "scale must be a floating-point tensor"),
    (
        lambda: ops.modulated_rms_norm(x, torch.ones(3, 8)),
        ValueError,
        r"some of its first axes, got \(3, 8\) for x of shape \(4, 8\)",
    ),
    (lambda: ops.modulated_rms_norm(x, w, w[None]), ValueError, r"same shape, got \(8,\) and"),
    (lambda: ops.modulated_rms_norm(x, w.to("meta")), ValueError, "got scale on meta"),
]


test_bad_input_is_named = harness.refuses(BAD)


def test_group_norm_of_weights_with_gaps():
    """PyTorch's kernel reads their memory, as its own function makes them contiguous first."""
    x, w, b = torch.randn(2, 8, 5, 6), torch.randn(8, 2), torch.randn(8, 2)
    right = torch.nn.functional.group_norm(x, 4, w[:, 0].contiguous(), b[:, 0].contiguous())
    torch.testing.assert_close(ops.group_norm(x, 4, w[:, 0], b[:, 0]), right)
