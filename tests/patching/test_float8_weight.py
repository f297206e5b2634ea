"""Frozen weights of patched models that are kept as codes in FP8."""

import copy
import io
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from liger_multi.errors import PatchError
from liger_multi.patching import patch, unpatch
from liger_multi.patching.float8.weight import Float8Weight
from liger_multi.reference.float8.rows import PLAIN, dequantized
from tests.patching.test_float8_linear import ALL, equal, ids, linears, model, step

FROZEN = {"smallest": 0, "frozen": True}
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def rounded(weight):
    return dequantized(PLAIN.rows(weight.detach(), None, torch.float8_e4m3fn), weight.dtype)


# --- frozen weights as codes ---


def test_a_frozen_model_multiplies_with_its_codes():
    """Equal, to the bit, to the model whose weights are rounded at every use."""
    llama, other = model(frozen=True), model(frozen=True)
    patch(llama, linear_float8=FROZEN)
    patch(other, linear_float8=ALL)
    assert equal(step(llama), step(other))


@pytest.mark.parametrize("originals", [True, False])
def test_memory_is_codes_and_scales(originals):
    llama = model(torch.bfloat16, frozen=True)
    alive = [weakref.ref(m.weight) for m in linears(llama)]
    patch(llama, linear_float8={**FROZEN, "originals": originals})
    assert not any(ref() is not None for ref in alive)
    for layer in linears(llama):
        weight = layer.weight
        assert weight.codes.dtype == torch.float8_e4m3fn
        assert weight.codes.shape == weight.shape
        assert weight.scale.shape == weight.shape[:1]
        assert (weight.original is not None) == originals
        assert isinstance(weight, nn.Parameter)
        assert weight.dtype == torch.bfloat16


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor of at least 16 bits that an operation makes."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        llama = func(*args, **(kwargs or {}))
        for t in llama if isinstance(llama, (tuple, list)) else (llama,):
            if isinstance(t, torch.Tensor) and t.itemsize > 1:
                self.most = max(self.most, t.numel() * t.itemsize)
        return llama


def test_checkpoints_hold_the_original_weights_and_load():
    llama = model(torch.bfloat16, frozen=True)
    state = copy.deepcopy(llama.state_dict())
    patch(llama, linear_float8=FROZEN)
    during = llama.state_dict()
    assert all(type(t) is torch.Tensor and torch.equal(t, state[n]) for n, t in during.items())
    other = model(torch.bfloat16, frozen=True)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    patch(llama, linear_float8=FROZEN)
    llama.load_state_dict(other.state_dict())
    assert all(isinstance(m.weight, Float8Weight) for m in linears(llama))
    patch(other, linear_float8=FROZEN)
    assert equal(step(llama), step(other))
    unpatch(llama)
    assert all(torch.equal(t, 1.5 * state[n]) for n, t in llama.state_dict().items())


def test_unpatch_without_originals():
    llama = model(torch.bfloat16, frozen=True)
    expected = [rounded(m.weight) for m in linears(llama)]
    patch(llama, linear_float8={**FROZEN, "originals": False})
    unpatch(llama)
    assert all(torch.equal(m.weight, w) for m, w in zip(linears(llama), expected, strict=True))


def test_copies_and_pickles_are_models_of_their_own():
    llama = model(frozen=True)
    state = copy.deepcopy(llama.state_dict())
    patch(llama, linear_float8=FROZEN)
    before = step(llama)
    copied = copy.deepcopy(llama)
    file = io.BytesIO()
    torch.save(llama, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    unpatch(llama)
    for other in (copied, loaded):
        assert equal(step(other), before)
        unpatch(other)
        assert all(torch.equal(t, state[n]) for n, t in other.state_dict().items())


def test_another_device_dtype_or_reader():
    llama = model(torch.bfloat16, frozen=True)
    patch(llama, linear_float8=FROZEN)
    layer = linears(llama)[0]
    assert torch.equal(layer.weight + 0, layer.weight.dequantized())
    assert torch.equal(layer.weight.detach()[2], layer.weight.dequantized()[2])
    x = torch.randn(4, layer.in_features, dtype=torch.bfloat16)
    by_hand = torch.nn.functional.linear(x, layer.weight)
    assert torch.equal(by_hand, torch.nn.functional.linear(x, layer.weight.dequantized()))
    llama.float()
    assert isinstance(layer.weight, Float8Weight)
    assert layer.weight.dtype == torch.float32
    llama.to("meta")
    assert layer.weight.codes.is_meta


WRITES = {
    "data": lambda w: w.data.add_(1),
    "no_grad": lambda w: torch.no_grad()(w.mul_)(2),
    "a view": lambda w: torch.no_grad()(w.zero_)(),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_refused_and_name_the_way_out(name):
    llama = model(frozen=True)
    patch(llama, linear_float8=FROZEN)
    before = step(llama)
    with pytest.raises(PatchError, match="unpatch the model first"):
        WRITES[name](linears(llama)[0].weight)
    assert equal(step(llama), before)


@pytest.mark.parametrize("frozen", [True, False])
def test_inference_mode_and_generation(frozen):
    llama = model(frozen=frozen)
    patch(llama, linear_float8=FROZEN if frozen else ALL)
    with torch.inference_mode():
        inside = llama(input_ids=ids()).logits + 0
    with torch.no_grad():
        assert torch.equal(inside, llama(input_ids=ids()).logits + 0)
    assert llama.generate(ids()[:, :4], max_new_tokens=3, pad_token_id=0).shape == (2, 7)


def test_shared_weights_stay_shared():
    pair = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    pair[1].weight = pair[0].weight
    pair.requires_grad_(False)
    report = patch(pair, linear_float8=FROZEN)
    assert [s.reason for s in report.skipped if s.op == "linear_float8"] == [
        "its weight is that of another layer too, which would lose it"
    ] * 2
    unpatch(pair)
    assert pair[0].weight is pair[1].weight


def test_replaced_weight_is_quantized_again():
    llama = model(frozen=True)
    patch(llama, linear_float8=FROZEN)
    llama.load_state_dict(model(frozen=True).state_dict(), assign=True)
    llama.requires_grad_(False)
    assert not any(isinstance(m.weight, Float8Weight) for m in linears(llama))
    patch(llama, linear_float8=FROZEN)
    assert all(isinstance(m.weight, Float8Weight) for m in linears(llama))


def test_codes_cannot_be_trained():
    llama = model(frozen=True)
    patch(llama, linear_float8=FROZEN)
    linears(llama)[0].weight.requires_grad_(True)
    with pytest.raises(PatchError, match="cannot be trained"):
        step(llama)


def test_trained_weights_are_skipped():
    llama = model(frozen=True)
    linears(llama)[0].weight.requires_grad_(True)
    report = patch(llama, linear_float8=FROZEN)
    (path,) = [s.path for s in report.skipped if "requires a gradient" in s.reason]
    assert path.endswith("q_proj")
    assert report.count("linear_float8") == 13


def test_a_step_dequantizes_no_frozen_weight(monkeypatch):
    """Codes go into GEMMs as they are; the CPU has none, so another function takes its place."""
    llama = model(frozen=True, hidden_size=64, intermediate_size=256, vocab_size=31)
    patch(llama, linear_float8=FROZEN)
    shapes = []

    def recorded(a, b, dtype, fast=False):
        shapes.append((a.codes.dtype, b.codes.dtype))
        return a.scale.new_zeros(len(a.scale), len(b.scale), dtype=dtype)

    from liger_multi.reference.float8 import frozen

    monkeypatch.setattr(frozen, "product", recorded)
    with Largest() as mode:
        step(llama, ids(1, 4) % 31)
    assert {type_name for pair in shapes for type_name in pair} == {torch.float8_e4m3fn}
    assert len(shapes) == 2 * 14
    assert mode.most < 64 * 256 * 2
