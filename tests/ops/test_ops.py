"""Every operator x backend x sample x dtype against fp64: one body for all of them."""

import pytest
import torch

from liger_multi.dispatch.registry import module, operators, unavailable
from liger_multi.testing import samples
from liger_multi.testing.bitwise import check_promises
from liger_multi.testing.checks import DTYPES, compare, dtypes_of, exact, has_several_outputs
from tests import harness

INTERPRETED_IN_MINUTES = {
    ("neighborhood_attention", "long"),
    ("gated_rms_norm", "past-65536-columns-after"),
}
# kernels that round to float16, or take as many terms of a sum as it needs
HALF_BY_ITSELF = (
    "hyper_connections",
    "rope_complex",
    "rope_multimodal",
    "rope_positions",
    "rope_sorted",
)
# kernels with a flag that two options set together
BY_TWO_OPTIONS = ("cross_entropy", "cross_entropy_inplace")
# promises run a call some twenty times: these are checked by `make test`, the others are slow
BITS_INTERPRETED = ("rms_norm", "swiglu", "softmax", "token_log_prob")
TILES_OF_ROWS = (
    "rms_norm",
    "fused_add_rms_norm",
    "layer_norm",
    "swiglu",
    "geglu",
    "attention_residuals",
)


def backends_of(config):
    """Backends with kernels of their own among those under test; vendors share Triton's."""
    names = [
        n for n in harness.selected_backends(config) if n == "reference" or not harness.refusal(n)
    ]
    shared = ["triton"] * any(n in ("cuda", "rocm") for n in names)
    names = [n for n in names if n not in ("cuda", "rocm")] + shared
    return [n for n in dict.fromkeys(names) if not (harness.interpreted() and n == "reference")]


def pytest_generate_tests(metafunc):
    if "op" not in metafunc.fixturenames:
        return
    keep = [n for n in ("op", "backend", "sample", "dtype") if n in metafunc.fixturenames]
    once = metafunc.function is test_forward_and_backward
    bits = metafunc.function is test_promised_bits
    params = []
    for op in operators():
        for backend in backends_of(metafunc.config):
            for sample in samples.of(op):
                if module(backend, op) is None or not APPLIES[metafunc.function](
                    op, backend, sample
                ):
                    continue
                for dtype in dtypes_of(sample, backend) if "dtype" in keep else DTYPES[:1]:
                    name = f"{op}-{backend}-{sample.name}" + f"-{str(dtype)[6:]}" * (
                        "dtype" in keep
                    )
                    slow = seldom(op, backend, sample, dtype, once, bits)
                    case = (op, backend, sample, dtype)[: len(keep)]
                    params.append(pytest.param(*case, id=name, marks=[pytest.mark.slow] * slow))
    metafunc.parametrize(keep, params)


def seldom(op, backend, sample, dtype, once, bits):
    """Whether a test is slow: interpreted kernels meet code that another test reaches.

    Every sample runs in float32. What adds to the kernels that are launched runs in bfloat16 and in
    other tests as well, and the first sample of every operator in float16, whose code is that of
    bfloat16 but for ``HALF_BY_ITSELF``.
    """
    if bits and (harness.interpreted() or backend == "npu"):
        return op not in BITS_INTERPRETED
    if not harness.interpreted():
        return False
    if (op, sample.name) in INTERPRETED_IN_MINUTES:
        return True
    if once and dtype == torch.float32:
        return False
    as_bf16 = (
        dtype == torch.float16 and op not in HALF_BY_ITSELF and not harness.first_sample(op, sample)
    )
    if op in BY_TWO_OPTIONS:
        return as_bf16 or harness.repeats_a_form(op, sample)
    return as_bf16 or not harness.adds_a_launch(op, sample)


def place(request, backend):
    """Where the tensors stand: the session's device for the reference too."""
    if backend == "reference":
        return harness.selected_device(request.config)
    return harness.device_of(backend)


def bound(op, backend):
    """How a test binds a backend: one that may refuse a call has the floor behind it."""
    return [backend, "reference"] if hasattr(module(backend, op), "supports") else backend


def test_forward_and_backward(request, op, backend, sample, dtype):
    compare(op, sample, dtype, place(request, backend), bound(op, backend))


def test_one_output_at_a_time(request, op, backend, sample):
    """An output that nobody uses has no upstream gradient; the others' are right without it."""
    device = place(request, backend)
    names = tuple(exact(op, sample.name, torch.float32, device).result)
    if len(names) == 1:
        pytest.skip("the other outputs are not asked for")
    for name in names:
        compare(op, sample, torch.float32, device, bound(op, backend), used_outputs=(name,))


def test_mixed_directions(request, op, backend, sample):
    """Backward of one backend after forward of the other, both ways: residuals are semantic."""
    device = place(request, backend)
    compare(op, sample, torch.float32, device, bound(op, backend), "reference")
    compare(op, sample, torch.float32, device, "reference", bound(op, backend))


def test_promised_bits(request, op, backend, sample):
    """What contract and backend promise of bits: twice, recomputed, other rows, other chunks."""
    dtype = torch.bfloat16 if backend != "reference" else torch.float32
    checked = check_promises(op, sample, dtype, place(request, backend), bound(op, backend))
    assert {("forward", "", "repeat"), ("forward", "deterministic", "recompute")} <= checked


def runs(op, backend, sample):
    """Whether a sample is small enough where it runs."""
    many = sample.name == "past-65535-rows" or sample.elements > 2**21
    # one program a row: 65 537 of them are minutes in an interpreter without grids
    few = not (harness.interpreted() and many) or op in TILES_OF_ROWS
    return sample.size != "bench" and few


def has_several(op, backend, sample):
    """Whether an operator has more outputs with gradients than one; many rows add nothing."""
    return sample.size == "small" and has_several_outputs(op)


def mixes(op, backend, sample):
    """Whether there is another forward or backward; many rows add nothing."""
    return sample.size == "small" and backend != "reference"


def promises(op, backend, sample):
    """Samples that add to the kernels that are launched; interpreted, one of an operator."""
    if harness.interpreted() or backend == "npu":
        return sample is first_with_rows(op)
    return harness.adds_a_launch(op, sample) and sample.name != "past-65535-rows"


def first_with_rows(op):
    """The first sample of an operator that has a few rows."""
    return next(s for s in samples.of(op) if s.size == "small" and s.elements > 100)


APPLIES = {
    test_promised_bits: promises,
    test_forward_and_backward: runs,
    test_one_output_at_a_time: has_several,
    test_mixed_directions: mixes,
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
