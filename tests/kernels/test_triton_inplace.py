"""Kernels write through pointers, which autograd does not see: its version counter is told."""

import pytest
import torch

import liger_multi
from liger_multi import ops
from liger_multi.dispatch.registry import module
from tests import harness


def implementing(config):
    """Backends under test that overwrite logits themselves."""
    found = [b for b in harness.selected_backends(config) if module(b, "cross_entropy_inplace")]
    return [b for b in found if not (harness.interpreted() and b == "reference")] or ["triton"]


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
    from liger_multi.backends.triton.cross_entropy.operators import scale

    if device.type == "cpu" and not harness.interpreted():
        pytest.skip("kernels run on a device or interpreted")
    gradient = torch.ones(size, device=device)
    scaled = scale(gradient, torch.full((), 2.0, device=device), torch.float32)
    assert scaled is not gradient
    assert scaled.tolist() == [2.0] * size
