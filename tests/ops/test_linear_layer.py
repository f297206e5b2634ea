"""The linear layer: PyTorch's own by default, to the bit, and with independent rows on request."""

import pytest
import torch
import torch.nn.functional as F

import liger_multi
from liger_multi import ops

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = [(37, 64), (3, 17, 64), (1, 64), (64,), (2, 3, 5, 64), (1500, 64), (0, 64)]


def layer(shape, dtype, bias):
    generator = torch.Generator().manual_seed(0)
    sizes = [shape, (96, shape[-1]), *([(96,)] if bias else [])]
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in sizes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_it_equals_pytorch_to_the_bit(dtype, shape, bias):
    inputs = layer(shape, dtype, bias)
    right, actual = F.linear(*inputs), ops.linear(*inputs)
    assert torch.equal(actual, right)
    dy = torch.randn(right.shape).to(dtype)
    for a, b in zip(
        torch.autograd.grad(actual, inputs, dy), torch.autograd.grad(right, inputs, dy), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("inputs", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", [False, "rows"])
def test_autocast_has_the_dtype_of_pytorch(inputs, mode):
    x, weight, bias = layer((4, 64), inputs, True)
    with torch.autocast("cpu", torch.bfloat16), liger_multi.use(deterministic=mode):
        right, actual = F.linear(x, weight, bias), ops.linear(x, weight, bias)
    assert actual.dtype == right.dtype
    torch.testing.assert_close(actual, right)
    grads = torch.autograd.grad(actual.sum(), (x, weight, bias))
    assert [g.dtype for g in grads] == [inputs] * 3


def test_two_dtypes_raise_as_they_do_in_pytorch():
    x, weight, bias = layer((4, 64), torch.float32, True)
    for wrong in ((x.bfloat16(), weight, bias), (x, weight.bfloat16(), bias)):
        with pytest.raises(RuntimeError):
            F.linear(*wrong)
        with pytest.raises(TypeError, match="one dtype is needed"):
            ops.linear(*wrong)


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"x": torch.ones(2, 3, dtype=torch.int64)}, TypeError, "x must be a floating-point"),
        ({"x": torch.ones(2, 4)}, ValueError, "the last axis of x must be K = 3"),
        ({"x": torch.ones(())}, ValueError, "the last axis of x must be K = 3"),
        ({"weight": torch.ones(3)}, ValueError, r"weight must have shape \(N, K\)"),
        ({"bias": torch.ones(1)}, ValueError, r"bias must have shape \(5,\)"),
        ({"weight": torch.ones(5, 3, device="meta")}, ValueError, "one device"),
    ],
)
def test_wrong_arguments(wrong, error, text):
    inputs = {"x": torch.ones(2, 3), "weight": torch.ones(5, 3), "bias": torch.ones(5)}
    with pytest.raises(error, match=text):
        ops.linear(**{**inputs, **wrong})


def test_only_what_a_gradient_needs_is_kept():
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    x, weight, bias = layer((4, 64), torch.float32, True)
    for inputs in (
        (x, weight, bias),
        (x.detach(), weight, bias),
        (x, weight.detach(), bias),
        (x.detach(), weight.detach(), bias),
    ):
        kept.clear()
        with hooks:
            y = ops.linear(*inputs)
        shapes = sorted(tuple(t.shape) for t in kept if t.numel())
        expected = [tuple(x.shape)] * inputs[1].requires_grad
        expected += [tuple(weight.shape)] * inputs[0].requires_grad
        assert shapes == sorted(expected)
        assert len(torch.autograd.grad(y.sum(), [t for t in inputs if t.requires_grad])) > 0


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_rows_are_independent_on_request(dtype):
    """Also of the batch's form, and of what stands in the other rows."""
    x, weight, bias = layer((4, 9, 64), dtype, True)
    dy = torch.randn(4, 9, 96).to(dtype)
    with liger_multi.use(deterministic="rows"):
        y = ops.linear(x, weight, bias)
        (dx,) = torch.autograd.grad(y, x, dy)
        for part in (slice(0, 1), slice(1, 3), slice(3, 4)):
            alone = x[part].detach().requires_grad_()
            output = ops.linear(alone, weight, bias)
            assert torch.equal(output, y[part])
            assert torch.equal(torch.autograd.grad(output, alone, dy[part])[0], dx[part])
        assert torch.equal(ops.linear(x.flatten(0, 1), weight, bias), y.flatten(0, 1))
        assert torch.equal(ops.linear(x[2, 3], weight, bias), y[2, 3])


def test_a_compiled_layer_is_pytorchs_gemm():
    """No call that the compiler cannot look into, unless rows must be independent."""
    x, weight, bias = layer((4, 64), torch.float32, True)

    def graph(mode):
        torch._dynamo.reset()
        graphs = []

        def backend(module, _):
            graphs.append(str(module.graph))
            return module

        from torch._dynamo.backends.common import aot_autograd

        compiled = torch.compile(
            ops.linear, backend=aot_autograd(fw_compiler=backend), fullgraph=True
        )
        with liger_multi.use(deterministic=mode):
            y = compiled(x, weight, bias)
        torch.testing.assert_close(y, F.linear(x, weight, bias))
        return graphs[0]

    assert "liger_multi" not in graph(False)
    assert "addmm" in graph(False)
    assert "liger_multi.linear_forward" in graph("rows")
