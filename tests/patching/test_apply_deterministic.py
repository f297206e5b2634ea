"""Training under ``deterministic=True``: a repeated run has equal losses and parameters."""

import os

import pytest
import torch

import liger_multi
from liger_multi.dispatch.torch_ops import Primitive
from liger_multi.testing.training import STEPS, batches, digest, train, train_twice
from tests import models

KINDS = ("llama", "qwen3_moe")


def maker(model_type, checkpointing, device="cpu"):
    """Builds a patched model, the same every time."""

    def make():
        model = models.build(model_type).to(device)
        liger_multi.patch(model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    return make


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("model_type", KINDS)
def test_a_repeated_run_has_equal_bits(model_type, checkpointing, device):
    first, second = train_twice(
        maker(model_type, checkpointing, device), lambda: batches(models.VOCABULARY, device)
    )
    assert first == second
    assert first.last < first.first, f"nothing was learnt in {STEPS} steps"


@pytest.mark.parametrize("model_type", KINDS)
def test_nondeterministic_operator_is_reported(model_type, monkeypatch):
    """The last bit of some elements of a norm, at random in every call."""
    maker(model_type, False)()  # recognizes the norms, which probes of such a norm would not
    original, generator = Primitive.call, torch.Generator()

    def drifting(prim, *args):
        output = original(prim, *args)
        if (prim.op.name, prim.direction) != ("rms_norm", "forward"):
            return output
        y, rstd = output
        generator.manual_seed(int.from_bytes(os.urandom(6), "little"))
        flips = torch.rand(y.shape, generator=generator) < 0.1
        return torch.where(flips, y * (1 + torch.finfo(y.dtype).eps), y), rstd

    monkeypatch.setattr(Primitive, "call", drifting)
    first, second = train_twice(
        maker(model_type, False), lambda: batches(models.VOCABULARY, "cpu", steps=3)
    )
    assert first.parameters != second.parameters


def test_a_digest_sees_one_bit_and_the_order():
    x, y = torch.ones(3), torch.tensor([1.0, 1.0, 1.0 + torch.finfo(torch.float32).eps])
    assert digest([x, y]) == digest([x.clone(), y.clone()])
    assert digest([x, y]) != digest([y, x])
    assert digest([x]) != digest([y])
    assert digest([torch.zeros(1)]) != digest([-torch.zeros(1)])


def test_batches_are_the_same_in_every_run():
    first, second = (list(batches(50, "cpu", steps=4)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_weights_change_the_digest():
    plain = models.build("llama")
    other = models.build("llama", seed=1)
    digests = [train(model, batches(models.VOCABULARY, "cpu", steps=2)) for model in (plain, other)]
    assert digests[0].parameters != digests[1].parameters
