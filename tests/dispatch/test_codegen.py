"""The generated call path of every operator has the results of the slow path."""

import contextlib

import pytest
import torch

import liger_multi
from liger_multi.dispatch import autograd
from liger_multi.dispatch.op import OPS
from liger_multi.dispatch.registry import operators
from liger_multi.testing import samples
from liger_multi.testing.checks import grads, outputs

GENERATED = ("run", "run_configured", "function", "apply")


def fail(*args):
    raise AssertionError("a plain call takes the slow path")


@pytest.fixture
def owners(op):
    """An operator, its forward and its backward, whose code the test replaces."""
    parts = (OPS[op], *OPS[op].primitives)
    before = [dict(vars(part)) for part in parts]
    yield parts
    for part, attributes in zip(parts, before, strict=True):
        vars(part).clear()
        vars(part).update(attributes)


def forget(parts):
    """Drop generated code; the next call writes it again."""
    for part in parts:
        for name in GENERATED:
            vars(part).pop(name, None)


def run(op, sample, tensors):
    """The operator, in the configuration in force."""
    args = dict(tensors)
    if sample.options.get("inplace"):  # what is overwritten must come from an operation
        args[OPS[op].inplace] = args[OPS[op].inplace] * 1
    return outputs(samples.call(op, **args, **sample.options))


def results(op, sample, device, **choice):
    """Every output and gradient; ``choice`` configures forward, but not backward."""
    tensors = sample.make(device, torch.float32)
    with liger_multi.use(**choice) if choice else contextlib.nullcontext():
        smooth, other = run(op, sample, tensors)
    values = {**other, **{n: y.detach().clone() for n, y in smooth.items()}}
    with torch.no_grad():
        alone, _ = run(op, sample, sample.make(device, torch.float32))
    values |= {f"{n} without autograd": y for n, y in alone.items()}
    upstream = {n: torch.linspace(-1, 1, y.numel()).to(y).view_as(y) for n, y in smooth.items()}
    gradients = grads(smooth, tensors, upstream)
    return values | {f"gradient of {n}": g for n, g in gradients.items()}


@pytest.mark.parametrize("op", operators())
def test_generated_code_equals_slow_path(op, owners, device, monkeypatch):
    contract, *directions = owners
    sample = next(s for s in samples.of(op) if s.size == "small")
    results(op, sample, device)  # the first call on a device chooses backends, on the slow path
    with monkeypatch.context() as patch:
        forget(owners)
        for part in owners:
            patch.setattr(part, "slow_path", fail)
        patch.setattr(autograd, "backward_slow_path", fail)
        generated = results(op, sample, device)
    forget(owners)
    contract.run = contract.slow_path
    for prim in directions:
        prim.run = prim.slow_path
        prim.run_configured = lambda _, *args, prim=prim: prim.slow_path(*args)
    slow = results(op, sample, device, default="auto")  # of another configuration than backward
    assert generated.keys() == slow.keys()
    for name, y in generated.items():
        assert (y is None) == (slow[name] is None), name
        assert y is None or torch.equal(y.nan_to_num(), slow[name].nan_to_num()), name
