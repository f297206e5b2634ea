"""Documents of a row, and tokens before others: a NaN, inf or large number reaches none of them.

Every operator of hybrid models x backend x tensor x number, compared in bits with the same call of
ordinary numbers. Triton kernels of the recurrences keep documents apart, and nothing else: where a
call is of one document, they multiply by the zeros between tokens, which stops no NaN
(docs/hybrids.md, limits).
"""

import functools
import importlib
import math

import pytest
import test_ops
import torch

from liger_multi.dispatch.config import use
from liger_multi.dispatch.registry import module
from liger_multi.reference.linear_attention import selective_scan
from liger_multi.testing import samples
from tests import harness

MANY = 1 if harness.interpreted() else 5  # a chunk is 16 tokens of interpreted kernels, and 64
LENGTHS = (10 * MANY, 17 * MANY, 13 * MANY)  # several in a chunk, and several chunks
TOKENS, WHERE = sum(LENGTHS), 12 * MANY  # the token of the second document that is changed
SIZE = 8
OTHERS = torch.tensor([True, False, True]).repeat_interleave(torch.tensor(LENGTHS))
NUMBERS = {"NaN": math.nan, "inf": math.inf, "-inf": -math.inf, "1e30": 1e30, "1e12": 1e12}


def normal(*shape):
    return torch.randn(1, TOKENS, *shape)


def delta(*gates):
    tensors = {"q": normal(1, SIZE), "k": 0.3 * normal(1, SIZE), "v": normal(2, SIZE)}
    tensors |= {"g": -0.3 * normal(2, *gates).abs(), "beta": normal(2).sigmoid()}
    return {**tensors, "initial_state": torch.randn(1, 2, SIZE, SIZE)}


def heads():
    rows = {"x": normal(2, SIZE), "dt": normal(2), "B": normal(1, SIZE), "C": normal(1, SIZE)}
    of_heads = {"A": -torch.rand(2), "D": torch.randn(2), "dt_bias": torch.randn(2)}
    state = torch.randn(1, 2, SIZE, SIZE)
    return {**rows, **of_heads, "z": normal(2, SIZE), "initial_state": state}


def channels():
    rows = {"u": normal(SIZE), "delta": normal(SIZE), "B": normal(4), "C": normal(4)}
    vectors = {"D": torch.randn(SIZE), "delta_bias": torch.randn(SIZE)}
    tensors = {**rows, **vectors, "A": -torch.rand(SIZE, 4), "z": normal(SIZE)}
    return {**tensors, "initial_state": torch.randn(1, SIZE, 4)}


MULTIPLYING = ("gated_delta_rule", "kimi_delta_attention", "ssd_scan")
NORMED = {"qk_l2norm": True}
CASES = {
    "gated_delta_rule": ("gated_delta_rule", delta, {}),
    "gated_delta_rule-normed": ("gated_delta_rule", delta, NORMED),
    "kimi_delta_attention": ("kimi_delta_attention", lambda: delta(SIZE), {}),
    "kimi_delta_attention-normed": ("kimi_delta_attention", lambda: delta(SIZE), NORMED),
    "ssd_scan": ("ssd_scan", heads, {"dt_softplus": True}),
    "selective_scan": ("selective_scan", channels, {"delta_softplus": True}),
    "causal_conv1d": (
        "causal_conv1d",
        lambda: {"x": normal(SIZE), "weight": torch.randn(SIZE, 4)},
        {"activation": "silu"},
    ),
    "gated_short_conv": (
        "gated_short_conv",
        lambda: {"x": normal(3 * SIZE), "weight": torch.randn(SIZE, 3)},
        {},
    ),
}


def tensors_of(name):
    torch.manual_seed(0)
    return CASES[name][1]()


def with_tokens(tensors):
    return [n for n, x in tensors.items() if x.shape[:2] == (1, TOKENS)]


def pytest_generate_tests(metafunc):
    if "backend" not in metafunc.fixturenames:
        return
    params = []
    for name, (op, *_) in CASES.items():
        for backend in test_ops.backends_of(metafunc.config):
            if module(backend, op) is None:
                continue
            for tensor in (*with_tokens(tensors_of(name)), "dy"):
                for number in NUMBERS:
                    case, label = (name, backend, tensor), f"{name}-{backend}-{tensor}-{number}"
                    params.append(pytest.param(*case, NUMBERS[number], id=label))
    metafunc.parametrize(["name", "backend", "tensor", "number"], params)


def ran(name, backend, device, tensors, dy, packed=True):
    """The result and the last state, and gradients of what has tokens and of the first state."""
    op, _, options = CASES[name]
    leaves = {n: x.to(device).requires_grad_() for n, x in tensors.items()}
    extra = {}
    if packed:
        ids = torch.tensor([3, 7, 3], dtype=torch.int32)  # equal ids apart are two documents
        ids = ids.repeat_interleave(torch.tensor(LENGTHS))[None]
        extra["documents" if "delta" in op else "seq_idx"] = ids.to(device)
    names = [n for n in tensors if n in (*with_tokens(tensors), "initial_state")]
    if "initial_state" in tensors:
        extra["output_final_state"] = True
    with use(**{op: test_ops.bound(op, backend)}):
        output = samples.call(op, **leaves, **options, **extra)
        y, *last = output if isinstance(output, tuple) else (output,)
        ups = [dy.to(y), *(torch.ones_like(state) for state in last)]
        gradients = torch.autograd.grad([y, *last], [leaves[n] for n in names], ups)
    results = {"y": y.detach(), **dict(zip(names, gradients, strict=True))}
    return results | dict(zip(["last"], [state.detach() for state in last], strict=False))


@functools.cache
def usual_of(name, backend, device):
    """Tensors, a gradient and what an ordinary call of them gives."""
    tensors = tensors_of(name)
    dy = torch.randn(*tensors.get("v", tensors.get("x", tensors.get("u"))).shape)
    if name == "gated_short_conv":
        dy = dy[..., :SIZE]
    return tensors, dy, ran(name, backend, device, tensors, dy)


def changed(tensor, number):
    """One element of a token, in a copy."""
    tensor = tensor.clone()
    tensor[0, WHERE].view(-1)[0] = number
    return tensor


def test_other_documents_and_earlier_tokens_keep_their_bits(
    request, monkeypatch, name, backend, tensor, number
):
    monkeypatch.setattr(selective_scan, "SPAN", 8)  # documents of several spans, and two in one
    device = test_ops.place(request, backend)
    tensors, dy, usual = usual_of(name, backend, device)
    if tensor == "dy":
        actual = ran(name, backend, device, tensors, changed(dy, number))
    else:
        other = {**tensors, tensor: changed(tensors[tensor], number)}
        actual = ran(name, backend, device, other, dy)
        if math.isnan(number):
            assert not actual["y"][:, ~OTHERS].isfinite().all(), "it is gone"
        pairs = [(usual["y"], actual["y"])]
        if backend != "triton" or CASES[name][0] not in MULTIPLYING:
            alone = [ran(name, backend, device, x, dy, packed=False) for x in (tensors, other)]
            pairs.append((alone[0]["y"], alone[1]["y"]))
        for a, b in pairs:
            assert torch.equal(a[:, :WHERE], b[:, :WHERE]), "tokens before it see it"
    whole = {"initial_state": slice(None), "last": slice(None)}  # of the first and last document
    kept = {n: whole.get(n, OTHERS) for n in usual}
    apart = [
        n for n, part in kept.items() if not torch.equal(usual[n][:, part], actual[n][:, part])
    ]
    assert not apart


@pytest.mark.skipif(not harness.interpreted(), reason="kernels on a CPU are interpreted")
@pytest.mark.parametrize("name", ["gated_delta_rule", "kimi_delta_attention", "ssd_scan"])
def test_kernels_run_again_for_heads_with_something_not_finite(monkeypatch, name):
    tensors, dy, _ = usual_of(name, "triton", torch.device("cpu"))
    runs = []
    rule = "ssd_scan" if name == "ssd_scan" else "gated_delta_rule"
    there = importlib.import_module(f"liger_multi.backends.triton.linear_attention.{rule}")
    real = there.flags_of
    monkeypatch.setattr(there, "flags_of", lambda x: runs.append(real(x)) or runs[-1])
    ran(name, "triton", torch.device("cpu"), tensors, dy)
    assert [flags.tolist() for flags in runs] == [[0, 0], [0, 0]]
    del runs[:]
    tensor = "x" if name == "ssd_scan" else "v"
    rows = tensors[tensor].clone()
    rows[0, WHERE, 1] = math.nan
    ran(name, "triton", torch.device("cpu"), {**tensors, tensor: rows}, dy)
    assert runs[0].tolist() == [0, 1]
