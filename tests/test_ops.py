"""Every operator x backend x sample x dtype against fp64: one body for all of them."""

import functools

import oracles
import pytest
import torch

import harness
import liger_multi
from liger_multi import ops, samples
from liger_multi.registry import module, operators, unavailable
from liger_multi.tolerance import excess

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def pytest_generate_tests(metafunc):
    names = metafunc.fixturenames
    if "op" not in names:
        return
    found = [
        n
        for n in harness.selected_backends(metafunc.config)
        if n == "reference" or harness.refusal(n) is None
    ]
    found = [n for n in found if n not in ("cuda", "rocm")] + ["triton"] * any(
        n in ("cuda", "rocm") for n in found
    )
    cases = []
    for op in operators():
        for backend in dict.fromkeys(found):
            if module(backend, op) is None or (harness.interpreted() and backend == "reference"):
                continue
            for sample in samples.of(op):
                if sample.size == "bench":
                    continue
                thin = sample.size == "thin"
                kinds = (
                    DTYPES[:1]
                    if thin
                    else DTYPES + ((torch.float64,) if backend == "reference" else ())
                )
                for dtype in kinds if "dtype" in names else (torch.float32,):
                    cases.append((op, backend, sample, dtype))
    keep = ["op", "backend", "sample"] + (["dtype"] if "dtype" in names else [])
    ids = [
        f"{o}-{b}-{s.name}" + (f"-{str(d)[6:]}" if "dtype" in names else "") for o, b, s, d in cases
    ]
    metafunc.parametrize(keep, [c[: len(keep)] for c in cases], ids=ids)


def place(request, backend):
    """Where the tensors stand: the session's device for the reference too."""
    if backend == "reference":
        return harness.selected_device(request.config)
    return harness.device_of(backend)


def call(op, tensors, options, **backends):
    """Run the public operator; in-place logits come from an operation, as they must."""
    name = op.removesuffix("_inplace")
    arguments = dict(tensors)
    if options.get("inplace"):
        arguments["logits"] = arguments["logits"] * 1
    with liger_multi.use(**backends):
        return getattr(ops, name)(**arguments, **options)


def grads(result, tensors, upstream):
    wanted = {n: t for n, t in tensors.items() if t.requires_grad}
    if not wanted:
        return {}
    found = torch.autograd.grad(
        result, list(wanted.values()), upstream.to(result), allow_unused=True
    )
    return dict(zip(wanted, found, strict=True))


@functools.lru_cache(maxsize=8)
def exact(op, name, dtype, device):
    """Outputs and gradients in fp64 from the same (rounded) inputs, and the upstream gradient."""
    sample = next(s for s in samples.of(op) if s.name == name)
    tensors = sample.make(device, dtype)
    wide = {
        n: t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for n, t in tensors.items()
    }
    result = getattr(oracles, op)(**wide, **sample.options)
    result, extra = result if isinstance(result, tuple) else (result, {})
    upstream = torch.randn(
        result.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).to(device)
    return result.detach(), extra, grads(result, wide, upstream), upstream


def coarser(a, b):
    """The dtype with fewer digits: a float32 weight of float64 rows has a float32 gradient."""
    return max(a, b, key=lambda kind: torch.finfo(kind).eps)


def check(op, backend, sample, dtype, device, halves):
    tensors = sample.make(device, dtype)
    before = {n: t.detach().clone() for n, t in tensors.items()}
    right, extra, right_grads, upstream = exact(op, sample.name, dtype, device)
    result = call(op, tensors, sample.options, **halves)
    loss = getattr(result, "loss", result)
    errors = {"result": excess(loss.detach(), right, coarser(dtype, loss.dtype))}
    for name, value in extra.items():
        got = getattr(result, name)
        assert not got.requires_grad
        errors[name] = (
            float((got != value).sum())
            if not value.is_floating_point()
            else excess(got, value, dtype)
        )
    for name, grad in grads(loss, tensors, upstream).items():
        assert grad.dtype == tensors[name].dtype
        errors[f"d{name}"] = excess(grad, right_grads[name], coarser(dtype, grad.dtype))
    assert max(errors.values()) <= 1, errors
    for name, tensor in tensors.items():
        assert torch.equal(tensor.detach(), before[name]), f"{name} of the caller was written"
    return loss


def test_forward_and_backward(request, op, backend, sample, dtype):
    many = sample.name == "past-65535-rows"
    if harness.interpreted() and many and op not in ("rms_norm", "swiglu"):
        pytest.skip("one program a row: 65 537 of them are minutes in an interpreter without grids")
    # a backend that may refuse a call is tested with the floor behind it, others are bound alone
    order = [backend, "reference"] if hasattr(module(backend, op), "supports") else backend
    loss = check(op, backend, sample, dtype, place(request, backend), {op: order})
    assert loss.is_contiguous()


def test_mixed_halves(request, op, backend, sample):
    """Backward of one backend after forward of the other, both ways: residuals are semantic."""
    if backend == "reference":
        pytest.skip("the reference mixes with others in their rows")
    if sample.size == "thin":
        pytest.skip("many rows add nothing to mixing")
    device = place(request, backend)
    for first, second in ((backend, "reference"), ("reference", backend)):
        tensors = sample.make(device, torch.float32)
        right, _, right_grads, upstream = exact(op, sample.name, torch.float32, device)
        with liger_multi.use(**{op: first}):
            result = call(op, tensors, sample.options)
        loss = getattr(result, "loss", result)
        # forward recorded its own configuration; put the other half's in its place
        node = loss.grad_fn
        while node is not None and not hasattr(node, "configuration"):
            node = node.next_functions[0][0]
        if loss.requires_grad:
            node.configuration = node.configuration.scoped({op: second})
        for name, grad in grads(loss, tensors, upstream).items():
            assert excess(grad, right_grads[name], torch.float32) <= 1, (first, second, name)
        assert excess(loss.detach(), right, torch.float32) <= 1


def test_every_kernel_is_tested(request):
    """Whatever a backend implements has samples that reach it."""
    for op in operators():
        assert any(s.size == "small" for s in samples.of(op)), op
        assert any(s.size == "bench" for s in samples.of(op)), op
        assert len({s.name for s in samples.of(op)}) == len(samples.of(op)), (
            f"{op}: sample names repeat"
        )
    assert unavailable("reference") is None
