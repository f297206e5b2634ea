"""What `make test` leaves to `make test-full` in the interpreter meets no kernel that it misses."""

import pytest
import test_ops
import torch

from liger_multi.dispatch.registry import module, operators
from liger_multi.testing import samples
from liger_multi.testing.checks import DTYPES, call, grads, outputs
from tests import harness

pytestmark = pytest.mark.skipif(not harness.interpreted(), reason="counts interpreted launches")


def launches(op, sample, dtype, seen):
    """Kernels with one of their flags each, as a call and its backward launch them."""
    seen.clear()
    tensors = sample.make("cpu", dtype)
    result, _ = outputs(call(op, tensors, sample.options, **{op: test_ops.bound(op, "triton")}))
    grads(result, tensors, {n: torch.ones_like(t) for n, t in result.items()})
    kind = "half" if dtype.itemsize == 2 else "single"  # bfloat16 stands for float16
    # without a tensor a kernel is the same in every dtype
    return {launch if launch[-1] is None else (*launch, kind) for launch in seen}


@pytest.fixture
def seen(monkeypatch):
    """What is launched, without running it."""
    from triton.runtime import interpreter

    found = []

    def note(grid, *args, **kwargs):
        name = grid.fn.__name__
        flags = [
            (n, v)
            for n, v in zip(grid.arg_names, args, strict=False)
            if v is None or isinstance(v, (bool, str))
        ]
        found.extend([(name,), *((name, *flag) for flag in flags)])

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", note)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("op", operators())
def test_first_samples_of_a_form_reach_every_kernel_flag_and_dtype(op, seen):
    if module("triton", op) is None:
        pytest.skip("no kernels")
    every, kept = set(), set()
    for sample in samples.of(op):
        if sample.size == "small":
            for dtype in DTYPES:
                found = launches(op, sample, dtype, seen)
                every |= found
                if not test_ops.seldom(op, sample, dtype, once=True):
                    kept |= found
    assert every == kept, "give the sample that launches it a Sample.path"
