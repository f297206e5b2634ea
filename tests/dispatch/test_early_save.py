"""Operators that keep what backward reads before they compute the rest, under checkpointing."""

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from liger_multi import ops
from liger_multi.dispatch.early_save import EarlySave
from liger_multi.errors import DoubleBackwardError


def mlp(trained=True):
    torch.manual_seed(0)
    return [
        (torch.randn(a, b) * b**-0.5).requires_grad_(trained)
        for a, b in ((48, 32),) * 2 + ((32, 48),)
    ]


def lora():
    torch.manual_seed(1)
    shapes = ((4, 32), (48, 4)) * 2 + ((4, 48), (32, 4))
    return [(torch.randn(s) * 0.2).requires_grad_() for s in shapes]


WEIGHTS, FROZEN, THIN = mlp(), mlp(False), lora()
LORAS = [ops.LoRA(a, b) for a, b in zip(THIN[::2], THIN[1::2], strict=True)]
CALLS = {
    "gated_mlp_float8": (lambda x: ops.gated_mlp_float8(x, *WEIGHTS), WEIGHTS),
    "lora_mlp": (lambda x: ops.lora_mlp(x, *FROZEN, *LORAS), THIN),
}
every_call = pytest.mark.parametrize("name", CALLS)


def inputs(grad=True):
    torch.manual_seed(2)
    return torch.randn(2, 5, 32).requires_grad_(grad)


def counted(monkeypatch):
    """How often each of the two functions of an operator ran."""
    counts = {"first": 0, "rest": 0}
    call = EarlySave.__call__

    def spy(early, *args):
        if not hasattr(early, "counts"):
            rest = early._rest

            def again(*args):
                counts["rest"] += 1
                return rest(*args)

            monkeypatch.setattr(early, "_rest", again)
            monkeypatch.setattr(early, "counts", True, raising=False)
        counts["first"] += 1
        return call(early, *args)

    monkeypatch.setattr(EarlySave, "__call__", spy)
    return counts


AFTER = {"nothing": lambda y: y, "what adds": lambda y: y + 1, "what reads": torch.sin}


@every_call
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("grad", [True, False], ids=["x", "weights alone"])
def test_early_save_gradients_under_checkpointing(name, after, grad, monkeypatch):
    """The rest runs again only where its result is read."""
    call, weights = CALLS[name]
    run = lambda x: AFTER[after](call(x))  # noqa: E731
    x = inputs(grad)
    leaves = [x, *weights] if grad else weights
    expected = run(x)
    exact = torch.autograd.grad(expected.square().sum(), leaves)
    counts = counted(monkeypatch)
    y = checkpoint(run, x, use_reentrant=False)
    assert torch.equal(y, expected)
    gradients = torch.autograd.grad(y.square().sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(gradients, exact, strict=True))
    assert counts == {"first": 2, "rest": 2 if after == "what reads" else 1}


@every_call
def test_a_second_backward_and_no_early_stop(name):
    call, weights = CALLS[name]
    x = inputs()
    exact = torch.autograd.grad(call(x).sum(), weights)
    y = checkpoint(call, x, use_reentrant=False)
    for _ in range(2):
        gradients = torch.autograd.grad(y.sum(), weights, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(gradients, exact, strict=True))
    with set_checkpoint_early_stop(False):
        y = checkpoint(call, x, use_reentrant=False)
    gradients = torch.autograd.grad(y.sum(), weights)
    assert all(torch.equal(a, b) for a, b in zip(gradients, exact, strict=True))


@every_call
def test_double_backward_raises(name):
    call, _ = CALLS[name]
    x = inputs()
    y = checkpoint(call, x, use_reentrant=False)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(DoubleBackwardError):
        dx.sum().backward()


@every_call
def test_nobody_asks_for_gradients(name):
    call, _ = CALLS[name]
    x = inputs(False)
    with torch.no_grad():
        expected = call(x)
        assert torch.equal(checkpoint(call, x, use_reentrant=False), expected)


@every_call
def test_early_save_handover_per_thread(name):
    call, weights = CALLS[name]
    xs = [torch.randn(3 + i, 32) for i in range(4)]
    exact = [torch.autograd.grad(call(x).sum(), weights) for x in xs]
    wrong = []

    def run(x, expected):
        for _ in range(5):
            y = checkpoint(call, x, use_reentrant=False)
            gradients = torch.autograd.grad(y.sum(), weights)
            if not all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True)):
                wrong.append(x.shape)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(xs, exact, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
