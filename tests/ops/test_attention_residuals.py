"""Kernels of attention over depth beside what the common suite asks."""

import dataclasses

import pytest
import torch

from liger_multi import ops
from liger_multi.dispatch import launch
from liger_multi.reference.residuals import attention_residuals as reference
from tests import harness

KINDS = [(1, 9, 40), (40, 5, 600), (5, 6, 8200)]


def given(shape, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = shape[-1]
    made = [torch.randn(s, generator=generator) for s in (shape, size, size, shape[1:])]
    made[1] /= size**0.5
    return [x.to(device) for x in made]


def kernels():
    pytest.importorskip("triton")
    from liger_multi.backends.triton.residuals import attention_residuals as found

    if (device := harness.device_of("triton")) is None:
        pytest.skip("kernels on a CPU need TRITON_INTERPRET=1")
    return found, device


def few_cores(device):
    """A device on which a program has several tokens."""
    return launch.simulate(dataclasses.replace(launch.device_info(torch.device(device)), cores=1))


def exact(blocks, query, weight, dy=None, needs=(True, True, True)):
    """What forward gives in fp64, or backward."""
    blocks, query, weight = (None if x is None else x.double() for x in (blocks, query, weight))
    made = reference.forward(blocks, query, weight, 1e-6)
    if dy is not None:
        made = reference.backward(dy.double(), blocks, query, weight, *made[1:], *needs)
    return [x.float() for x in made]


def near(found, right):
    for got, wanted in zip(found, right, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", KINDS)
@pytest.mark.parametrize("groups", [1, 8])
def test_programs_have_several_tokens(shape, groups, monkeypatch):
    found, device = kernels()
    monkeypatch.setattr(found, "_near", lambda group, v: min(group, groups))
    tensors = given(shape, device)
    with few_cores(device):
        y, *kept = found.forward(*tensors[:3], 1e-6)
        args = (tensors[3], *tensors[:3], *kept, True, True, True)
        once, again = found.backward(*args), found.backward(*args)
    near((y, *kept), exact(*tensors[:3]))
    near(once, exact(*tensors))
    assert all(torch.equal(*pair) for pair in zip(once, again, strict=True))


@pytest.mark.parametrize("shape", KINDS[1:])
@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True)]
)
def test_what_nobody_needs_is_empty(shape, needs):
    found, device = kernels()
    *given_, dy = given(shape, device)
    _, *kept = found.forward(*given_, 1e-6)
    got = found.backward(dy, *given_, *kept, *needs)
    assert [x.numel() > 0 for x in got] == list(needs)
    near(got, exact(*given_, dy, needs))


@pytest.mark.parametrize("first", range(5))
def test_scores_far_apart(first):
    """Where the largest score comes first, last or between; exponentials stay in fp32."""
    found, device = kernels()
    blocks, query, _, _ = given((5, 3, 64), device)
    blocks[first] = 100 * query
    query *= 200  # that block's score is 200 |query| sqrt(64)
    y, p, rstd = found.forward(blocks, query, None, 1e-6)
    near((y, p, rstd), exact(blocks, query, None))
    assert (p[first] == 1).all()


def test_past_two_to_the_31_elements(device):
    """Offsets of blocks and of tokens need 64 bits; the last tokens' results are theirs alone."""
    if device.type == "cpu":
        pytest.skip("needs a device with room for 2^31 elements, three times")
    if torch.get_device_module(device.type).mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free memory")
    rows, size = 2**31 // 3 // 2048 + 9, 2048
    blocks = torch.randn(3, rows, size, device=device, dtype=torch.bfloat16).requires_grad_()
    query = torch.randn(size, device=device, dtype=torch.bfloat16) / size**0.5
    last = blocks.detach()[:, -3:].clone().requires_grad_()
    y, right = (ops.attention_residuals(x, query) for x in (blocks, last))
    assert torch.equal(y[-3:], right)
    up = torch.zeros_like(y)
    up[-3:] = torch.randn_like(right)
    got = torch.autograd.grad(y, blocks, up)[0]
    assert torch.equal(got[:, -3:], torch.autograd.grad(right, last, up[-3:])[0])
    assert not got[:, :-3].any()
