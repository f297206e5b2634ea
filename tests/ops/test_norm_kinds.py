"""The kinds of norms and activations: the classes they stand for, statistics, sums, bad input."""

import inspect

import pytest
import torch
import torch.nn.functional as F

import liger_multi
from liger_multi import ops
from liger_multi.testing import FORMULAS
from liger_multi.testing.tolerance import excess
from tests import harness

HALF, WIDE = torch.bfloat16, torch.float32
KINDS = (
    "gated_rms_norm", "group_norm", "poly_norm", "modulated_rms_norm", "dyt", "relu_squared",
    "swiglu_clamped", "swiglu_clamped_packed",
)  # fmt: skip
DTYPES = pytest.mark.parametrize("dtypes", [(HALF, HALF), (HALF, WIDE), (WIDE, WIDE)])


@pytest.fixture(params=["reference", "triton"])
def place(request):
    """The device of a backend, which the operators are bound to."""
    reason = harness.refusal(request.param)
    if reason is not None:
        pytest.skip(reason)
    with liger_multi.use(**dict.fromkeys(KINDS, request.param)):
        yield harness.device_of(request.param)


def stock(family, name, *arguments, **options):
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    if not hasattr(module, name):
        pytest.skip(f"this transformers has no {name}")
    if not set(options) <= set(inspect.signature(getattr(module, name)).parameters):
        pytest.skip(f"{name} of this transformers takes no {', '.join(options)}")
    made = getattr(module, name)(*arguments, **options)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def equal(got, right):
    assert got.dtype == right.dtype
    assert torch.equal(got, right)


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
    "falcon-h1": (
        ("falcon_h1", "FalconH1RMSNormGated", 24, 1e-6, 3),
        {"casting": "olmo", "group_size": 8},
    ),
    "falcon-h1-after": (
        ("falcon_h1", "FalconH1RMSNormGated", 24, 1e-6, 3, False),
        AFTER | {"casting": "olmo", "group_size": 8},
    ),
}  # fmt: skip


@DTYPES
@pytest.mark.parametrize("kind", GATED)
def test_gated_norms_are_bit_exact_to_transformers(kind, dtypes):
    named, options = GATED[kind]
    # FalconH1's is told the number of groups
    size = {n: v for n, v in options.items() if n == "group_size" and "falcon" not in kind}
    norm = stock(*named, **size).to(dtypes[1])
    x, gate = (torch.randn(2, 5, 24).to(dtypes[0]) for _ in range(2))
    equal(ops.gated_rms_norm(x, gate, norm.weight, 1e-6, **options), norm(x, gate))


@DTYPES
def test_a_gated_norm_without_its_gate(dtypes):
    norm = stock("mamba2", "MambaRMSNormGated", 24, group_size=8).to(dtypes[1])
    x = torch.randn(2, 5, 24).to(dtypes[0])
    equal(ops.gated_rms_norm(x, None, norm.weight, 1e-6, group_size=8), norm(x))


@DTYPES
def test_norms_of_groups_are_bit_exact_to_transformers(dtypes):
    norm = stock("qwen4_exp", "Qwen4ExpTextRMSNorm", 24, group_size=8).to(dtypes[1])
    x = torch.randn(2, 5, 24).to(dtypes[0])
    options = {"group_size": 8, "offset": 1.0, "casting": "gemma"}
    equal(ops.gated_rms_norm(x, None, norm.weight, 1e-6, **options), norm(x))


@DTYPES
def test_the_centered_norm_is_bit_exact_to_transformers(dtypes):
    """One is added in the dtype of the weight, and the product is fp32."""
    norm = stock("muse_spark", "MuseSparkTextCenteredRMSNorm", 24).to(dtypes[1])
    x = torch.randn(2, 5, 24).to(dtypes[0])
    ours = ops.rms_norm(x, norm.weight, norm.eps, offset=1.0, casting="olmo")
    equal(ours, norm(x))


@DTYPES
def test_a_scaled_sum_is_what_granite_computes(dtypes):
    norm = stock("granite", "GraniteRMSNorm", 24).to(dtypes[1])
    x, residual = (torch.randn(2, 5, 24).to(dtypes[0]) for _ in range(2))
    ours = ops.fused_scaled_add_rms_norm(x, residual, norm.weight, x_scale=0.22)
    total = residual + x * 0.22
    equal(ours.new_residual, total)
    equal(ours.y, norm(total))


@DTYPES
@pytest.mark.parametrize("shape", [(3, 12, 5, 7), (2, 8), (2, 64, 100), (2, 16, 16, 16)])
@pytest.mark.parametrize("affine", ["both", "weight", "bias"])
def test_group_norm_is_bit_exact_to_torch(dtypes, shape, affine):
    x = (2 * torch.randn(shape) + 1).to(dtypes[0])
    weight = torch.randn(shape[1]).to(dtypes[1]) if affine != "bias" else None
    bias = torch.randn(shape[1]).to(dtypes[1]) if affine != "weight" else None
    if dtypes[0] != WIDE and affine == "bias":
        weight = torch.ones(shape[1]).to(dtypes[1])  # without one, torch keeps bf16 statistics
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
    rows = ops.modulated_rms_norm(x.view(10, 24), scale, shift, norm.weight)
    equal(rows, right.view(10, 24))


@pytest.mark.parametrize("dtype", [HALF, torch.float16, WIDE])
def test_activations_are_bit_exact_to_transformers(dtype):
    from transformers.activations import ACT2FN

    x = (3 * torch.randn(4, 5, 48)).to(dtype)
    equal(ops.relu_squared(x), ACT2FN["relu2"](x))
    gate, up = x.chunk(2, -1)
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
    (got,), (wanted,) = (torch.autograd.grad(y, x, upstream) for y in (ours, right))
    assert excess(got, wanted.double(), dtype) <= 1


# --- statistics and sums ---


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


@pytest.mark.parametrize("shape", [(2, 4, 50), (1, 2, 9000)])
def test_a_large_mean_leaves_the_variance_of_a_group_alone(place, shape):
    """The mean of squares less the square of the mean would have no digit left."""
    x = torch.randn(shape, dtype=torch.float64)
    wide = FORMULAS["group_norm"](x + 3000, 2)
    ours = ops.group_norm((x + 3000).to(place, WIDE), 2).cpu().double()
    torch.testing.assert_close(ours, wide, rtol=0, atol=4 * 3000 * 2**-24)


def test_statistics_of_bf16_groups_are_fp32(place):
    """A mean of 100 in bf16 is off by a quarter, and dweight by as much of every dy."""
    x = (torch.randn(16, 6, 40) + 100).to(place, HALF)
    weight, bias = (torch.randn(6).to(place, HALF) for _ in range(2))
    tensors = {"x": x, "weight": weight, "bias": bias}
    assert max(against_fp64("group_norm", tensors, {"num_groups": 2})) <= 1


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


REPEATED = {
    "dyt": lambda: {"alpha": torch.randn(1), "weight": torch.randn(32), "bias": torch.randn(32)},
    "gated_rms_norm": lambda: {"gate": torch.randn(600, 32), "weight": torch.randn(32)},
    "modulated_rms_norm": lambda: {"scale": torch.randn(2, 32), "shift": torch.randn(2, 32)},
    "poly_norm": lambda: {"weight": torch.randn(3), "bias": torch.randn(1)},
    "group_norm": lambda: {"weight": torch.randn(32), "bias": torch.randn(32)},
}


@pytest.mark.parametrize("op", REPEATED)
def test_gradients_of_parameters_are_the_same_every_time(place, op):
    """Sums over rows are made of partial ones in a fixed order, never by atomic additions."""
    options = {"num_groups": 4} if op == "group_norm" else {}
    tensors = {"x": torch.randn(600, 32), **REPEATED[op]()}
    tensors = {n: t.to(place, HALF).requires_grad_() for n, t in tensors.items()}
    upstream = torch.randn(600, 32).to(place, HALF)
    runs = []
    for _ in range(2):
        y = getattr(ops, op)(**tensors, **options)
        runs.append(torch.autograd.grad(y, list(tensors.values()), upstream))
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("limit", [1.0, 7.0])
def test_a_clamp_that_holds_passes_nothing_and_its_edge_passes_all(place, limit):
    gate = torch.tensor([-20.0, limit - 0.5, limit, limit + 0.5, 30.0]).to(place).requires_grad_()
    up = torch.tensor([-30.0, -limit, 0.5, limit, 30.0]).to(place).requires_grad_()
    y = ops.swiglu_clamped(gate, up, limit=limit, alpha=0.1, up_offset=2.5)
    dgate, dup = torch.autograd.grad(y.sum(), (gate, up))
    assert (dgate == 0).tolist() == [False, False, False, True, True]
    assert (dup == 0).tolist() == [True, False, False, False, True]


def test_what_is_no_number_stays_none(place):
    """A minimum or maximum would lose it."""
    x = torch.full((4, 8), float("nan")).to(place)
    assert ops.relu_squared(x).isnan().all()
    assert ops.swiglu_clamped(x, torch.ones_like(x)).isnan().all()
    assert ops.swiglu_clamped(torch.ones_like(x), x).isnan().all()
    assert ops.swiglu_clamped_packed(x).isnan().all()


@pytest.mark.parametrize("op", ["gated_rms_norm", "poly_norm", "modulated_rms_norm"])
def test_upstream_gradients_are_not_written(place, op):
    """They were overwritten by default, which a residual that shares them notices."""
    x = torch.randn(6, 16).to(place).requires_grad_()
    extra = {
        "gated_rms_norm": (torch.randn(6, 16).to(place),),
        "poly_norm": (torch.randn(3).to(place),),
        "modulated_rms_norm": (torch.randn(16).to(place),),
    }
    upstream = torch.randn(6, 16).to(place)
    before = upstream.clone()
    torch.autograd.grad(getattr(ops, op)(x, *extra[op]), x, upstream)
    assert torch.equal(upstream, before)


def test_a_length_compiles_nothing(monkeypatch):
    """Rows of a modulation, and multipliers, are run-time numbers of the kernels."""
    reason, device = harness.refusal("triton"), harness.device_of("triton")
    if reason is not None:
        pytest.skip(reason)
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
            scale = torch.randn(2, 16, device=device)
            ops.modulated_rms_norm(x, scale).sum().backward()
            ops.swiglu(x, x, gate_multiplier=by).sum().backward()
    half = len(constants) // 2
    assert constants[:half] == constants[half:]


# --- bad input ---

x, w = torch.randn(4, 8), torch.ones(8)
BAD = [
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


@pytest.mark.parametrize(("run", "kind", "message"), BAD, ids=range(len(BAD)))
def test_bad_input_is_named(run, kind, message):
    with pytest.raises(kind, match=message):
        run()
