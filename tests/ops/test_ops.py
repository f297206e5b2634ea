"""Every operator x backend x sample x dtype against fp64: one body for all of them."""

import functools

import forms
import oracles
import pytest
import torch

import harness
import liger_multi
from liger_multi import ops, samples
from liger_multi.dispatch.op import OPS
from liger_multi.dispatch.registry import module, operators, unavailable
from liger_multi.tolerance import excess

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTERPRETED_IN_MINUTES = {
    ("neighborhood_attention", "long"),
    ("gated_rms_norm", "past-65536-columns-after"),
}
# kernels that round to float16, or take as many terms of a sum as it needs
HALF_BY_ITSELF = (
    "hyper_connections", "rope_complex", "rope_multimodal", "rope_positions", "rope_sorted",
)  # fmt: skip
# kernels with a flag that two options set together
BY_TWO_OPTIONS = ("cross_entropy", "cross_entropy_inplace")
TILES_OF_ROWS = (
    "rms_norm", "fused_add_rms_norm", "layer_norm", "swiglu", "geglu", "attention_residuals",
)  # fmt: skip


def backends_of(config):
    """Backends with kernels of their own among those under test; vendors share Triton's."""
    found = [
        n for n in harness.selected_backends(config) if n == "reference" or not harness.refusal(n)
    ]
    shared = ["triton"] * any(n in ("cuda", "rocm") for n in found)
    found = [n for n in found if n not in ("cuda", "rocm")] + shared
    return [n for n in dict.fromkeys(found) if not (harness.interpreted() and n == "reference")]


def pytest_generate_tests(metafunc):
    if "op" not in metafunc.fixturenames:
        return
    keep = [n for n in ("op", "backend", "sample", "dtype") if n in metafunc.fixturenames]
    once = metafunc.function is test_forward_and_backward
    given = []
    for op in operators():
        for backend in backends_of(metafunc.config):
            for sample in samples.of(op):
                if module(backend, op) is None or not APPLIES[metafunc.function](
                    op, backend, sample
                ):
                    continue
                for dtype in dtypes(backend, sample) if "dtype" in keep else DTYPES[:1]:
                    name = f"{op}-{backend}-{sample.name}" + f"-{str(dtype)[6:]}" * (
                        "dtype" in keep
                    )
                    slow = seldom(op, sample, dtype, once)
                    case = (op, backend, sample, dtype)[: len(keep)]
                    given.append(pytest.param(*case, id=name, marks=[pytest.mark.slow] * slow))
    metafunc.parametrize(keep, given)


def dtypes(backend, sample):
    """Dtypes that a sample is tested in."""
    if sample.size == "thin":
        return DTYPES[:1]
    return DTYPES + ((torch.float64,) if backend == "reference" else ())


def seldom(op, sample, dtype, once):
    """Whether a test is slow: interpreted kernels meet code that another test reaches.

    Every sample runs in float32. What adds to the kernels that are launched runs in bfloat16 and in
    other tests as well, and the first sample of every operator in float16, whose code is that of
    bfloat16 but for ``HALF_BY_ITSELF``.
    """
    if not harness.interpreted():
        return False
    if (op, sample.name) in INTERPRETED_IN_MINUTES:
        return True
    if once and dtype == torch.float32:
        return False
    as_bf16 = dtype == torch.float16 and op not in HALF_BY_ITSELF and not forms.first(op, sample)
    if op in BY_TWO_OPTIONS:
        return as_bf16 or forms.repeats(op, sample)
    return as_bf16 or not forms.launches(op, sample)


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
        written = OPS[op].inplace
        arguments[written] = arguments[written] * 1
    with liger_multi.use(**backends):
        return getattr(ops, name)(**arguments, **options)


def outputs(result):
    """What a call returned by name: outputs that have gradients, and the others."""
    if isinstance(result, torch.Tensor):
        return {"result": result}, {}
    if isinstance(result[1], dict):  # an oracle's loss and what it reports beside
        return {"result": result[0]}, result[1]
    names = getattr(result, "_fields", None) or [f"output{i}" for i in range(len(result))]
    pairs = {n: t for n, t in zip(names, result, strict=True) if t is not None}
    if "loss" in pairs:  # of a loss, nothing else is differentiable
        return {"result": pairs.pop("loss")}, pairs
    smooth = {n: t for n, t in pairs.items() if t.is_floating_point()}
    return smooth, {n: t for n, t in pairs.items() if n not in smooth}


def grads(result, tensors, upstream, again=False):
    """Gradients of the outputs for one upstream gradient each; None leaves an output unused."""
    wanted = {n: t for n, t in tensors.items() if t.requires_grad}
    used = [n for n, up in upstream.items() if up is not None and result[n].requires_grad]
    if not wanted or not used:
        return {}
    ups = [upstream[n].to(result[n]) for n in used]
    found = torch.autograd.grad(
        [result[n] for n in used],
        list(wanted.values()),
        ups,
        retain_graph=again,
        allow_unused=True,
    )
    return dict(zip(wanted, found, strict=True))


@functools.lru_cache(maxsize=8)
def exact(op, name, dtype, device):
    """Outputs in fp64 from the same (rounded) inputs, gradients, and the upstream gradients."""
    sample = next(s for s in samples.of(op) if s.name == name)
    tensors = sample.make(device, dtype)
    wide = {
        n: t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for n, t in tensors.items()
    }
    result, extra = outputs(getattr(oracles, op)(**wide, **sample.options))
    generator = torch.Generator().manual_seed(1)
    upstream = {
        n: torch.randn(t.shape, generator=generator, dtype=torch.float64).to(device)
        for n, t in result.items()
    }

    def gradients(used):
        ups = {n: upstream[n] if n in used else None for n in upstream}
        return grads(result, wanted, ups, again=len(result) > 1)

    wanted, used = wide, functools.lru_cache(maxsize=4)(gradients)
    if len(result) == 1:  # frees the graph
        right = gradients(tuple(result))
        return {n: t.detach() for n, t in result.items()}, extra, lambda _: right, upstream
    return result, extra, used, upstream


def coarser(a, b):
    """The dtype with fewer digits: a float32 weight of float64 rows has a float32 gradient."""
    return max(a, b, key=lambda kind: torch.finfo(kind).eps)


def gradient_errors(found, right, tensors, dtype):
    """Excess over the tolerance of every gradient; the absent one of an unused input is zero."""
    errors = {}
    for name, grad in found.items():
        if grad is None:
            assert right.get(name) is None or not right[name].any(), f"no gradient of {name}"
            continue
        assert grad.dtype == tensors[name].dtype
        wanted = torch.zeros_like(grad) if right.get(name) is None else right[name]
        errors[f"d{name}"] = excess(grad, wanted, coarser(dtype, grad.dtype))
    return errors


def check(op, backend, sample, dtype, device, directions):
    tensors = sample.make(device, dtype)
    before = {n: t.detach().clone() for n, t in tensors.items()}
    right, extra, right_grads, upstream = exact(op, sample.name, dtype, device)
    result, beside = outputs(call(op, tensors, sample.options, **directions))
    assert set(result) == set(right)
    assert set(extra) <= set(beside)
    errors = {
        n: excess(t.detach(), right[n].detach(), coarser(dtype, t.dtype)) for n, t in result.items()
    }
    for name, value in extra.items():
        got = beside[name]
        assert not got.requires_grad
        errors[name] = (
            float((got != value).sum())
            if not value.is_floating_point()
            else excess(got, value, dtype)
        )
    every = right_grads(tuple(result))
    errors |= gradient_errors(grads(result, tensors, upstream), every, tensors, dtype)
    assert max(errors.values()) <= 1, errors
    for name, tensor in tensors.items():
        assert torch.equal(tensor.detach(), before[name]), f"{name} of the caller was written"


def bound(op, backend):
    """How a test binds a backend: one that may refuse a call has the floor behind it."""
    return [backend, "reference"] if hasattr(module(backend, op), "supports") else backend


def test_forward_and_backward(request, op, backend, sample, dtype):
    check(op, backend, sample, dtype, place(request, backend), {op: bound(op, backend)})


def test_one_output_at_a_time(request, op, backend, sample):
    """An output that nobody uses has no upstream gradient; the others' are right without it."""
    device = place(request, backend)
    right, _, right_grads, upstream = exact(op, sample.name, torch.float32, device)
    if len(right) == 1:
        pytest.skip("the other outputs are not asked for")
    for name in right:
        tensors = sample.make(device, torch.float32)
        bind = {op: bound(op, backend)}
        result, _ = outputs(call(op, tensors, sample.options, **bind))
        found = grads(result, tensors, {name: upstream[name]})
        errors = gradient_errors(found, right_grads((name,)), tensors, torch.float32)
        assert max(errors.values(), default=0) <= 1, (name, errors)


def test_mixed_halves(request, op, backend, sample):
    """Backward of one backend after forward of the other, both ways: residuals are semantic."""
    device = place(request, backend)
    for first, second in ((backend, "reference"), ("reference", backend)):
        tensors = sample.make(device, torch.float32)
        right, _, right_grads, upstream = exact(op, sample.name, torch.float32, device)
        with liger_multi.use(**{op: first}):
            result, _ = outputs(call(op, tensors, sample.options))
        # forward recorded its own configuration; put the other direction's in its place
        node = next(iter(result.values())).grad_fn
        while node is not None and not hasattr(node, "configuration"):
            node = node.next_functions[0][0]
        if node is not None:
            node.configuration = node.configuration.scoped({op: second})
        found = grads(result, tensors, upstream)
        errors = gradient_errors(found, right_grads(tuple(result)), tensors, torch.float32)
        errors |= {
            n: excess(t.detach(), right[n].detach(), torch.float32) for n, t in result.items()
        }
        assert max(errors.values()) <= 1, (first, second, errors)


def runs(op, backend, sample):
    """Whether a sample is small enough where it runs."""
    many = sample.name == "past-65535-rows"
    # one program a row: 65 537 of them are minutes in an interpreter without grids
    few = not (harness.interpreted() and many) or op in TILES_OF_ROWS
    return sample.size != "bench" and few


def has_several(op, backend, sample):
    """Whether an operator has more outputs with gradients than one; many rows add nothing."""
    forward = OPS[op]
    visible = {*forward.fwd.returns} - {*forward.residuals, *forward.constants}
    return sample.size == "small" and len(visible) > 1 and "loss" not in visible


def mixes(op, backend, sample):
    """Whether there is another forward or backward; many rows add nothing."""
    return sample.size == "small" and backend != "reference"


APPLIES = {
    test_forward_and_backward: runs,
    test_one_output_at_a_time: has_several,
    test_mixed_halves: mixes,
}


def test_every_kernel_is_tested(request):
    """Whatever a backend implements has samples that reach it."""
    for op in operators():
        assert any(s.size == "small" for s in samples.of(op)), op
        assert any(s.size == "bench" for s in samples.of(op)), op
        assert len({s.name for s in samples.of(op)}) == len(samples.of(op)), (
            f"{op}: sample names repeat"
        )
    assert unavailable("reference") is None
