"""Rows in FP8: scales, codes, the layer that multiplies with them, and what hands codes out."""

import importlib
import math

import pytest
import torch

import liger_multi
from liger_multi import ops
from liger_multi.ops._formulas import rounded as formula_rows
from liger_multi.ops.linear_float8 import row_scales
from liger_multi.reference.float8.rows import CODES, PLAIN, Float8Rows, dequantized, product
from tests import harness

OCP, FNUZ = CODES
MOST = {OCP: 448.0, FNUZ: 240.0}


def rows(x, columns=None, format=OCP):
    return PLAIN.rows(x, columns, format)


@pytest.mark.parametrize("format", CODES, ids=str)
@pytest.mark.parametrize("power", [-90, -30, 0, 17, 100])
def test_a_scale_is_the_least_power_of_two_that_fits(format, power):
    """At, just below and just above what fits, where a quotient or a logarithm could round."""
    edge = torch.tensor(MOST[format] * 2.0**power)
    around = [torch.nextafter(edge, edge * 0), edge, torch.nextafter(edge, edge * 2)]
    scale = rows(torch.stack(around)[:, None], None, format).scale
    assert scale.tolist() == [2.0**power, 2.0**power, 2.0 ** (power + 1)]


def test_the_formula_rounds_no_scale_down():
    """A logarithm in bf16 did, and what is above 448 has a code of NaN."""
    x = torch.tensor([[466.0 * 2**20, 1.0], [448.0, -2.0]], dtype=torch.bfloat16)
    codes, scale = formula_rows(x)
    assert codes.dtype == scale.dtype == torch.bfloat16
    assert scale.flatten().tolist() == [2.0**21, 1.0]
    assert codes.isfinite().all()


@pytest.mark.parametrize("format", CODES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_codes_are_the_nearest_numbers(format, dtype):
    x = torch.randn(64, 96, dtype=torch.float64).to(dtype) * torch.logspace(-4, 3, 64)[:, None]
    x = x.to(dtype)
    output = rows(x, None, format)
    assert (torch.frexp(output.scale).mantissa == 0.5).all()
    exact, got = x.double(), dequantized(output, torch.float64)
    place = 2.0 ** torch.floor(torch.log2((exact / output.scale[:, None]).abs().clamp_min(2.0**-6)))
    assert ((got - exact).abs() <= place * output.scale[:, None] * 2.0**-4).all()
    assert (got.abs().amax(1) <= MOST[format] * output.scale).all()


def test_rows_of_zeros_and_tiny_rows_have_an_inverse():
    output = rows(torch.tensor([[0.0, -0.0], [1e-38, 0.0], [2.0**-100, 0.0]]))
    assert output.scale.isfinite().all()
    assert (output.scale > 0).all()
    assert not dequantized(output, torch.float32)[0].any()
    assert dequantized(output, torch.float32)[2, 0] == 2.0**-100


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_reaches_its_row_alone(bad):
    x, w = torch.randn(4, 32), torch.randn(16, 32)
    right = ops.linear_float8(x, w)
    x[1, 3] = bad
    y = ops.linear_float8(x, w)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2, 3]], right[[0, 2, 3]])


def test_a_weight_that_is_not_finite_reaches_its_output_alone():
    x, w = torch.randn(4, 32, requires_grad=True), torch.randn(16, 32)
    w[5, 0] = math.inf
    y = ops.linear_float8(x, w)
    assert y[:, 5].isnan().all()
    assert y[:, :5].isfinite().all()
    assert y[:, 6:].isfinite().all()


def test_rows_do_not_depend_on_each_other():
    x, w = torch.randn(9, 64), torch.randn(32, 64)
    left = rows(x)
    for i in range(9):
        alone = rows(x[i : i + 1])
        assert torch.equal(alone.codes.view(torch.uint8)[0], left.codes.view(torch.uint8)[i])
        assert alone.scale[0] == left.scale[i]
    assert ops.linear_float8(x, w).shape == (9, 32)


def test_the_input_gradient_is_that_of_the_rounded_weight():
    """Of dy without rounding error (powers of two), dx is exact with the weight of forward."""
    x, w = torch.randn(5, 32, requires_grad=True), torch.randn(16, 32) * 3
    dy = torch.zeros(5, 16)
    for i in range(5):
        dy[i, 2 * i] = 2.0**i
    ops.linear_float8(x, w).backward(dy)
    used = dequantized(rows(w), torch.float32)
    assert torch.equal(x.grad, dy @ used)


def test_the_gradient_of_the_weight_is_not_rounded():
    x, w = torch.randn(8, 32), torch.randn(16, 32, requires_grad=True)
    dy = torch.randn(8, 16)
    ops.linear_float8(x, w).backward(dy)
    assert torch.equal(w.grad, dy.t() @ x)


def test_rounded_input_of_one_layer_serves_the_next():
    x, w = torch.randn(2, 5, 32, dtype=torch.bfloat16), torch.randn(16, 32, dtype=torch.bfloat16)
    y, quantized = ops.linear_float8_with_codes(x, w)
    assert (quantized.codes.shape, quantized.scale.shape) == (x.shape, x.shape[:-1])
    again, same = ops.linear_float8_with_codes(x, w, quantized=quantized)
    assert torch.equal(y, again)
    assert same is quantized
    other = quantized._replace(scale=quantized.scale * 2)
    assert torch.equal(ops.linear_float8(x, w, quantized=other), 2 * y)


def test_codes_of_a_weight_equal_the_weight():
    x, w = torch.randn(6, 32, requires_grad=True), torch.randn(16, 32)
    codes, scale = rows(w)
    dy = torch.randn(6, 16)
    y, frozen = ops.linear_float8(x, w), ops.linear_float8(x, codes, weight_scale=scale)
    assert torch.equal(y, frozen)
    assert torch.equal(*(torch.autograd.grad(one, x, dy)[0] for one in (y, frozen)))


def test_autocast_sets_the_dtype_and_the_weight_keeps_its_own():
    x, w = torch.randn(6, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.linear_float8(x, w)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == w.grad.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(y, ops.linear_float8(x.bfloat16(), w))


def test_a_product_of_two_formats_is_dequantized():
    """A weight that was rounded on a card of another vendor."""
    a, b = torch.randn(4, 16), torch.randn(8, 16)
    left, right = rows(a), rows(b, None, FNUZ)
    wide = [dequantized(one, torch.float32) for one in (left, right)]
    assert torch.equal(product(left, right, torch.float32), wide[0] @ wide[1].t())


def test_float16_does_not_overflow_by_its_scales():
    output = rows(torch.full((2, 16), 2.0**-90), None)
    assert output.scale.max() < 2.0**-90
    assert dequantized(Float8Rows(output.codes, output.scale), torch.float16).isfinite().all()


BAD = {
    "codes without scales": (
        lambda x, w: ops.linear_float8(x, rows(w).codes),
        TypeError,
        "weight_scale beside codes",
    ),
    "scales without codes": (
        lambda x, w: ops.linear_float8(x, w, weight_scale=rows(w).scale),
        TypeError,
        "codes",
    ),
    "scales of another dtype": (
        lambda x, w: ops.linear_float8(x, rows(w).codes, weight_scale=rows(w).scale.double()),
        TypeError,
        "must be float32, got a tensor of shape",
    ),
    "scales that require gradients": (
        lambda x, w: ops.linear_float8(
            x, rows(w).codes, weight_scale=rows(w).scale.requires_grad_()
        ),
        ValueError,
        "frozen",
    ),
    "codes of another shape": (
        lambda x, w: ops.linear_float8(x, w, quantized=ops.Float8Rows(*rows(x[:2]))),
        ValueError,
        "quantized must",
    ),
    "codes that are a pair": (
        lambda x, w: ops.linear_float8(x, w, quantized=tuple(rows(x))),
        TypeError,
        "Float8Rows",
    ),
    "another width": (lambda x, w: ops.linear_float8(x[:, :5], w), ValueError, "must be K = 32"),
}


test_bad_input_is_refused_by_name = harness.refuses(
    BAD, lambda run: run(torch.randn(4, 32), torch.randn(16, 32))
)


def test_outliers_of_aligned_gate_and_up_weights():
    """What trillions of tokens do to SwiGLU: few channels are 1e4 times the others.

    With a scale per row, the result keeps its precision where one scale per tensor of an earlier
    step would overflow, and rows without an outlier keep all of theirs.
    """
    x = torch.randn(64, 128)
    gate = torch.randn(256, 128) * 128**-0.5
    gate[:3] = 30 * x[:3] / x[:3].norm(dim=1, keepdim=True)  # three rows meet their own channel
    inner = torch.nn.functional.silu(x @ gate.t()) * (x @ gate.t())
    assert inner[:3].abs().amax() > 1e4 * inner.abs().median()
    down = torch.randn(128, 256, requires_grad=True) * 256**-0.5
    inner.requires_grad_(True)
    y, exact = ops.linear_float8(inner, down), inner @ down.t()
    error = (y - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < 0.06
    dy = torch.randn_like(y)
    dx, right = (torch.autograd.grad(one, inner, dy, retain_graph=True)[0] for one in (y, exact))
    assert (dx - right).norm() / right.norm() < 0.06


# --- a gated MLP ---

ACTS = {
    "silu": ops.swiglu,
    "gelu": lambda gate, up: ops.geglu(gate, up, approximate="none"),
    "gelu_tanh": ops.geglu,
}


def mlp_case(dtype=torch.float32, trained=("x", "gate", "up", "down"), rows=(3, 5)):
    """x, the three weights and biases; those of ``trained`` have gradients."""
    shapes = {"gate": (96, 64), "up": (96, 64), "down": (48, 96)}
    x = torch.randn(*rows, 64, dtype=dtype).requires_grad_("x" in trained)
    outputs = [
        torch.randn(*shape, dtype=dtype).mul_(shape[-1] ** -0.5).requires_grad_(name in trained)
        for name, shape in (*shapes.items(), *((n, s[:1]) for n, s in shapes.items()))
    ]
    return x, outputs[:3], outputs[3:]


def mlp(x, weights, biases, activation="silu", **how):
    named = dict(zip(("gate_bias", "up_bias", "down_bias"), biases, strict=True))
    return ops.gated_mlp_float8(x, *weights, **named, activation=activation, **how)


def mlp_in_layers(x, weights, biases, activation="silu"):
    gate, up = (ops.linear_float8(x, w, b) for w, b in zip(weights[:2], biases[:2], strict=True))
    return ops.linear_float8(ACTS[activation](gate, up), weights[2], biases[2])


@pytest.mark.parametrize(
    "trained",
    [("x", "gate", "up", "down"), ("x",), ("gate",), ("down",), ("up", "x"), ("x", "down")],
    ids=" ".join,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTS)
def test_a_gated_mlp_has_the_bits_of_its_layers(activation, dtype, trained):
    x, weights, biases = mlp_case(dtype, trained)
    inputs = [t for t in (x, *weights, *biases) if t.requires_grad]
    one, other = mlp(x, weights, biases, activation), mlp_in_layers(x, weights, biases, activation)
    dy = torch.randn_like(one)
    assert torch.equal(one, other)
    actual, right = (torch.autograd.grad(y, inputs, dy) for y in (one, other))
    assert all(torch.equal(a, b) for a, b in zip(actual, right, strict=True))


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "codes"])
@pytest.mark.parametrize("activation", ACTS)
def test_checkpointing_of_a_gated_mlp_gives_its_bits(activation, frozen):
    x, weights, biases = mlp_case(torch.bfloat16)
    expected, how = [x, *weights, *biases], {}
    if frozen:
        names = [f"{n}_weight_scale" for n in ("gate", "up", "down")]
        weights, scales = zip(*(rows(w.detach()) for w in weights), strict=True)
        expected, how = [x, *biases], dict(zip(names, scales, strict=True))
    right = mlp(x, weights, biases, activation, **how)
    dy = torch.randn_like(right)

    def run(x):
        return mlp(x, weights, biases, activation, **how)

    actual = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
    actual += 0  # the result may be written to
    one, other = ([y, *torch.autograd.grad(y, expected, dy)] for y in (actual, right))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_scales_of_a_weight_are_those_of_its_rows(dtype):
    w = torch.randn(7, 40).to(dtype)
    w[1], w[2, 3], w[3, 4], w[4, 5] = 0, torch.nan, -torch.inf, -torch.nan
    assert torch.equal(row_scales(w).view(torch.int32), rows(w).scale.view(torch.int32))
    assert torch.equal(row_scales(w[:, :0]), rows(w[:, :0]).scale)


def test_codes_of_the_weights_and_the_input_of_a_gated_mlp():
    x, weights, biases = mlp_case(trained=("x",))
    right = mlp(x, weights, biases)
    codes, scales = zip(*map(rows, weights), strict=True)
    named = dict(zip((f"{n}_weight_scale" for n in ("gate", "up", "down")), scales, strict=True))
    _, quantized = ops.linear_float8_with_codes(x, weights[0])
    frozen = mlp(x, codes, biases, quantized=quantized, **named)
    assert torch.equal(frozen, right)
    dy = torch.randn_like(right)
    assert torch.equal(*(torch.autograd.grad(y, x, dy)[0] for y in (right, frozen)))


def test_a_gated_mlp_under_autocast_rounds_weights_as_they_are():
    """Of x, both layers' gradients are added before they are cast; else no bit differs."""
    x, weights, biases = mlp_case()
    inputs = [x, *weights, *biases]
    with torch.autocast("cpu", torch.bfloat16):
        actual = mlp(x, weights, biases), mlp_in_layers(x, weights, biases)
    assert actual[0].dtype == torch.bfloat16
    assert torch.equal(*actual)
    one, other = (torch.autograd.grad(y, inputs, torch.ones_like(y)) for y in actual)
    assert all(g.dtype == torch.float32 for g in one)
    assert all(torch.equal(a, b) for a, b in zip(one[1:], other[1:], strict=True))
    torch.testing.assert_close(one[0], other[0], rtol=2**-7, atol=2**-7)


BAD_MLP = {
    "an activation": (lambda x, w, b: mlp(x, w, b, "relu"), ValueError, "relu"),
    "codes without scales": (
        lambda x, w, b: mlp(x, [rows(w[0]).codes, *w[1:]], b),
        TypeError,
        "gate_weight_scale beside codes",
    ),
    "two dtypes": (
        lambda x, w, b: mlp(x, [w[0].double(), *w[1:]], b),
        TypeError,
        "gate_weight float64",
    ),
    "widths": (
        lambda x, w, b: mlp(x, [*w[:2], w[2][:, :5]], b),
        ValueError,
        "down_weight must have shape",
    ),
    "a bias of another layer": (
        lambda x, w, b: mlp(x, w, [b[2], *b[1:]]),
        ValueError,
        r"gate_bias must have shape \(96,\)",
    ),
    "rows of another input": (
        lambda x, w, b: mlp(x, w, b, quantized=ops.Float8Rows(*rows(x[0]))),
        ValueError,
        "quantized must hold",
    ),
}


test_bad_input_of_a_gated_mlp_is_refused_by_name = harness.refuses(
    BAD_MLP, lambda run: run(*mlp_case())
)


def test_an_mlp_without_rows_has_empty_and_zero_gradients():
    x, weights, biases = mlp_case(rows=(0,))
    y = mlp(x, weights, biases)
    assert y.shape == (0, 48)
    gradients = torch.autograd.grad(y, [x, *weights, *biases], torch.ones_like(y))
    assert gradients[0].shape == x.shape
    assert not any(g.any() for g in gradients)


# --- codes of norms and gated activations ---

W = torch.linspace(-2, 2, 32)
ARGUMENTS = {
    "rms_norm": lambda x, w: (x, w),
    "fused_add_rms_norm": lambda x, w: (x, x, w),
    "layer_norm": lambda x, w: (x, w, w),
    "swiglu": lambda x, w: (x, 300 * x),
    "geglu": lambda x, w: (x, 300 * x),
}
"""Arguments of an operator, of x and a weight."""


def plain_of(name, x):
    return getattr(ops, name)(*ARGUMENTS[name](x, W.to(x.dtype)))


def coded_of(name, x, **options):
    return getattr(ops, f"{name}_quantized")(*ARGUMENTS[name](x, W.to(x.dtype)), **options)


every_coded = pytest.mark.parametrize("name", ARGUMENTS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@pytest.fixture(params=CODES, ids=str)
def format(request, monkeypatch):
    """Either format as that of the device."""
    names = ["reference.float8.rows"] + ["backends.triton.float8.rows"] * harness.interpreted()
    for name in names:
        module = importlib.import_module(f"liger_multi.{name}")
        monkeypatch.setattr(module, "format_of", lambda device: request.param)
    return request.param


def kernels():
    """Interpreted kernels where they are under test, else what the device has."""
    names = [name for one in ARGUMENTS for name in (one, f"{one}_quantized")]
    return liger_multi.use(**dict.fromkeys(names, "triton") if harness.interpreted() else {})


@every_coded
@every_dtype
def test_codes_are_those_of_the_rounded_result(name, dtype, format):
    """Zero rows, rows of one outlier, rows of tiny numbers, and rows that are not finite."""
    x = torch.randn(7, 32) * torch.tensor([1, 0, 1e-4, 30, 1, 1, 1])[:, None]
    x[3, 5], x[4, 1], x[5, 2] = 900.0, math.inf, math.nan
    with kernels():
        output = coded_of(name, x.to(dtype))
        plain = plain_of(name, x.to(dtype))
    y = getattr(plain, "y", plain)
    assert torch.equal(output.y.view(torch.uint8), y.view(torch.uint8))
    right = rows(y, None, format)
    assert output.quantized.codes.dtype == format
    assert torch.equal(output.quantized.codes.view(torch.uint8), right.codes.view(torch.uint8))
    assert torch.equal(output.quantized.scale.nan_to_num(-1), right.scale.nan_to_num(-1))
    assert not output.quantized.codes.requires_grad
    assert output.quantized.scale.isnan().tolist()[4:6] == [True, True]


@every_coded
def test_codes_alone_are_the_same_codes(name):
    x = torch.randn(3, 4, 32, dtype=torch.bfloat16)
    with kernels():
        both, alone = coded_of(name, x), coded_of(name, x, outputs=("quantized",))
    assert alone.y is None
    assert torch.equal(*(m.quantized.codes.view(torch.uint8) for m in (both, alone)))
    assert torch.equal(both.quantized.scale, alone.quantized.scale)
    if name == "fused_add_rms_norm":
        assert torch.equal(both.new_residual, alone.new_residual)


@every_coded
def test_gradients_are_those_of_the_plain_call(name):
    x = torch.randn(3, 32, requires_grad=True)
    actual = []
    for run in (plain_of, coded_of):
        output = run(name, x)
        y = getattr(output, "y", output)
        actual.append(torch.autograd.grad(y, x, torch.ones_like(y))[0])
    assert torch.equal(*actual)


def test_a_layer_takes_the_codes_of_a_norm():
    x, w = torch.randn(5, 32, dtype=torch.bfloat16), torch.randn(16, 32, dtype=torch.bfloat16)
    output = ops.rms_norm_quantized(x)
    layer = ops.linear_float8(output.y, w, quantized=output.quantized)
    assert torch.equal(layer, ops.linear_float8(ops.rms_norm(x), w))


WRONG = {
    "another format": ({"quantize": "float8_e5m2"}, ValueError, "float8_e5m2"),
    "no codes": ({"outputs": ("y",)}, ValueError, "must name 'quantized'"),
    "unknown output": ({"outputs": ("z",)}, ValueError, "'z'"),
    "not a tuple": ({"outputs": "y"}, TypeError, "tuple of names"),
    "codes with a gradient": ({"outputs": ("quantized",)}, ValueError, "have no gradient"),
}


@every_coded
@pytest.mark.parametrize("case", WRONG)
def test_wrong_requests_are_refused_by_name(name, case):
    how, error, text = WRONG[case]
    with pytest.raises(error, match=f"{name}.*{text}"):
        coded_of(name, torch.randn(2, 32, requires_grad=True), **how)
