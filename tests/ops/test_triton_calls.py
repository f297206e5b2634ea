"""Kernels as operators and models call them, interpreted.

What `make test` leaves to `make test-full` in the interpreter meets no kernel that it misses.
Kernels write through pointers, which autograd does not see: its version counter is told. Whole
models: two pairs of the sweep.
"""

import os

import pytest
import test_ops
import torch

import liger_multi
from liger_multi import ops
from liger_multi.dispatch.config import use
from liger_multi.dispatch.registry import module, operators
from liger_multi.testing import samples
from liger_multi.testing.checks import DTYPES, call, grads, outputs
from tests import harness

# --- samples ---


def launches(op, sample, dtype, launched):
    """Kernels with one of their flags each, as a call and its backward launch them."""
    launched.clear()
    tensors = sample.make("cpu", dtype)
    result, _ = outputs(call(op, tensors, sample.options, **{op: test_ops.bound(op, "triton")}))
    grads(result, tensors, {n: torch.ones_like(t) for n, t in result.items()})
    precision = "half" if dtype.itemsize == 2 else "single"  # bfloat16 stands for float16
    # without a tensor a kernel is the same in every dtype
    return {launch if launch[-1] is None else (*launch, precision) for launch in launched}


@pytest.fixture
def launched(monkeypatch):
    """The launches of kernels, recorded instead of run."""
    from triton.runtime import interpreter

    calls = []

    def note(grid, *args, **kwargs):
        name = grid.fn.__name__
        flags = [
            (n, v)
            for n, v in zip(grid.arg_names, args, strict=False)
            if v is None or isinstance(v, (bool, str))
        ]
        calls.extend([(name,), *((name, *flag) for flag in flags)])

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", note)
    return calls


@pytest.mark.slow
@pytest.mark.skipif(not harness.interpreted(), reason="counts interpreted launches")
@pytest.mark.parametrize("op", operators())
def test_first_samples_reach_every_kernel_flag_and_dtype(op, launched):
    if module("triton", op) is None:
        pytest.skip("no kernels")
    every, kept = set(), set()
    for sample in samples.of(op):
        if sample.size == "small":
            for dtype in DTYPES:
                reached = launches(op, sample, dtype, launched)
                every |= reached
                if not test_ops.seldom(op, "triton", sample, dtype, once=True, bits=False):
                    kept |= reached
    assert every == kept, "give the sample that launches it a Sample.path"


# --- tensors that are overwritten ---


def implementing(config):
    """Backends under test that overwrite logits themselves."""
    backends = [b for b in harness.selected_backends(config) if module(b, "cross_entropy_inplace")]
    return [b for b in backends if not (harness.interpreted() and b == "reference")] or ["triton"]


def loss_of(backend, logits, target):
    with liger_multi.use(cross_entropy_inplace=backend):
        return ops.cross_entropy(logits, target, inplace=True)


def test_what_was_overwritten_raises_for_whoever_saved_it(request, device):
    for backend in implementing(request.config):
        x, t = torch.randn(6, 16, device=device), torch.arange(6, device=device)
        x.requires_grad_()
        p = torch.softmax(x, -1)
        other = p.square().sum()
        loss_of(backend, p, t)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            other.backward()
        loss = loss_of(backend, x * 1, t)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("size", [0, 5])
def test_a_scaled_gradient_is_never_its_input(device, size):
    """Also an empty one: an operator may not return what it was handed."""
    from liger_multi.backends.triton.cross_entropy.rows import scale

    if device.type == "cpu" and not harness.interpreted():
        pytest.skip("kernels run on a device or interpreted")
    gradient = torch.ones(size, device=device)
    scaled = scale(gradient, torch.full((), 2.0, device=device), torch.float32)
    assert scaled is not gradient
    assert scaled.tolist() == [2.0] * size


# --- whole models ---

PAIRS = (("causal", "llama", "LlamaForCausalLM"), ("masked", "bert", "BertForMaskedLM"))


@pytest.mark.skipif(not harness.interpreted(), reason="kernels of CPU tensors need the interpreter")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="every pair runs in a fork")
def test_models_are_equal_to_stock_through_the_kernels():
    pytest.importorskip("transformers")
    pytest.importorskip("triton")
    from tests.sweep.cases import Pair
    from tests.sweep.run import sweep

    with use(default="triton"):
        reports = list(sweep([Pair(*names) for names in PAIRS]))
    assert [(o.status, o.why) for o in reports] == [("equal", "")] * len(PAIRS)
    assert reports[0].calls.keys() >= {
        "rms_norm",
        "gated_mlp",
        "rope",
        "fused_linear_cross_entropy",
    }
    assert "layer_norm" in reports[1].calls
    assert all(o.served == o.modules for o in reports)
