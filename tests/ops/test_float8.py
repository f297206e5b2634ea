"""Heads whose products run in 8 bits: the maths that a CPU emulates, and where it is asked for."""

import pytest
import torch

import liger_multi
from liger_multi.errors import ConfigurationError
from liger_multi.ops import fused_linear_cross_entropy, fused_linear_jsd, fused_linear_log_prob
from liger_multi.reference.cross_entropy import float8
from liger_multi.reference.cross_entropy.float8 import PLAIN


@pytest.fixture
def in_8_bits():
    liger_multi.configure({"head_gemms": "float8"})
    yield
    liger_multi.configure(None)


def head(rows=48, width=64, classes=400, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(classes, width, generator=generator) / width**0.5
    target = torch.randint(classes, (rows,), generator=generator)
    return hidden, weight.to(dtype).requires_grad_(), target


@pytest.mark.parametrize("dtype", [t for pair in float8.FORMATS for t in pair], ids=str)
@pytest.mark.parametrize("size", [1.0, 1e-6, 3e4])
def test_rounded_to_the_nearest_value(dtype, size):
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(1)) * size
    made = PLAIN.rounded(x, dtype)
    value = made.data.float() * made.scale
    info, eps = torch.finfo(dtype), 2.0 ** (-3 if "e4m3" in str(dtype) else -2)  # torch's is wrong
    assert made.scale.log2() == made.scale.log2().round()
    assert x.abs().max() / made.scale <= info.max < 2 * x.abs().max() / made.scale
    room = (x.abs() * eps / 2).clamp_min(info.smallest_normal * eps / 2 * made.scale)
    assert ((value - x).abs() <= room * 1.0001).all()
    assert not PLAIN.rounded(torch.zeros(2, 3)).data.float().any()


def test_the_maths_of_the_emulation(in_8_bits):
    hidden, weight, target = head()
    loss = fused_linear_cross_entropy(hidden, weight, target, chunk=16)
    loss.backward()

    h, w = (PLAIN.rounded(t.detach()) for t in (hidden, weight))
    w = (w.data.float() * w.scale).requires_grad_()
    total, dhidden, dweight = 0.0, [], 0.0
    for part in range(0, 48, 16):
        rows = hidden.detach()[part : part + 16]
        h = PLAIN.rounded(rows)
        logits = ((h.data.float() * h.scale) @ w.detach().t()).bfloat16().float().requires_grad_()
        one = torch.nn.functional.cross_entropy(logits, target[part : part + 16], reduction="sum")
        (graw,) = torch.autograd.grad(one, logits)
        graw = graw.bfloat16()
        g = PLAIN.rounded(graw, torch.float8_e5m2)
        dhidden.append((g.data.float() * g.scale) @ w.detach())
        dweight = dweight + graw.float().t() @ rows.float()
        total += one.item()
    assert loss.item() == pytest.approx(total / 48, rel=1e-5)
    expected = torch.cat(dhidden) / 48
    torch.testing.assert_close(hidden.grad.float(), expected, rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(weight.grad.float(), dweight / 48, rtol=2**-7, atol=1e-5)


def test_logits_alone():
    """The loss is that of 8 bits; the gradient of hidden states is one of exact products of it."""
    found = {}
    for products in ("exact", "float8", "float8_logits"):
        liger_multi.configure({"head_gemms": products})
        hidden, weight, target = head()
        loss = fused_linear_cross_entropy(hidden, weight, target, chunk=16)
        loss.backward()
        found[products] = [loss.detach(), hidden.grad.float(), weight.grad.float()]
    liger_multi.configure(None)
    both, logits, exact = found["float8"], found["float8_logits"], found["exact"]
    assert torch.equal(logits[0], both[0])
    assert torch.equal(logits[2], both[2])
    assert not torch.equal(logits[0], exact[0])
    far, near = ((made[1] - exact[1]).norm() / exact[1].norm() for made in (both, logits))
    assert 0.001 < near < 0.75 * far, "less is rounded"


def test_the_error_and_that_chunks_do_not_change_it(in_8_bits):
    found = []
    for chunk in (48, 16, 7):
        hidden, weight, target = head()
        fused_linear_cross_entropy(hidden, weight, target, chunk=chunk).backward()
        found.append((hidden.grad.float(), weight.grad.float()))
    liger_multi.configure(None)
    hidden, weight, target = head()
    fused_linear_cross_entropy(hidden, weight, target).backward()
    for mine, exact in zip(found[0], (hidden.grad.float(), weight.grad.float()), strict=True):
        off = (mine - exact).norm() / exact.norm()
        assert 0.001 < off < 0.06, "rounded, and not by more than three bits of mantissa allow"
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            assert (a - b).norm() <= 0.005 * b.norm()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_every_kind_of_head(in_8_bits, reduction):
    hidden, weight, target = head(dtype=torch.float32)
    bias = torch.randn(400, requires_grad=True)
    target[::3] = -100
    loss = fused_linear_cross_entropy(hidden, weight, target, bias, reduction=reduction, chunk=20)
    loss.sum().backward()
    exact = torch.nn.functional.cross_entropy(hidden @ weight.t() + bias, target, reduction="none")
    exact = exact.sum() / (target >= 0).sum() if reduction == "mean" else exact
    torch.testing.assert_close(loss, exact, rtol=0.05, atol=0.2)
    assert all(t.grad.dtype == torch.float32 and t.grad.isfinite().all() for t in (hidden, weight))
    assert not hidden.grad[::3].any()
    made = fused_linear_log_prob(hidden, weight, target, outputs=("log_prob",)).log_prob
    made.sum().backward()
    rows = torch.log_softmax((hidden @ weight.t()).detach(), -1)
    taken = rows.gather(1, target.clamp_min(0)[:, None])[:, 0]
    torch.testing.assert_close(made[target >= 0], taken[target >= 0], rtol=0.05, atol=0.2)


def test_what_does_not_offer_it_is_exact(in_8_bits):
    hidden, weight, _ = head(8, 16, 40, torch.float32)
    args = (hidden, weight, hidden.detach() * 0.9, weight.detach())
    inside = fused_linear_jsd(*args)
    liger_multi.configure(None)
    assert torch.equal(inside, fused_linear_jsd(*args))


class Watched:
    """A rounding that notes what it is asked for."""

    def __init__(self):
        self.asked = []

    def rounded(self, x, dtype=float8.FACTOR):
        self.asked.append((tuple(x.shape), dtype))
        return PLAIN.rounded(x, dtype)

    def both_ways(self, x, dtype=float8.FACTOR):
        self.asked.append((tuple(x.shape), "both"))
        return PLAIN.both_ways(x, dtype)


@pytest.mark.parametrize(
    ("gradients", "wanted", "first"),
    [(True, True, "both"), (True, False, float8.FACTOR), (False, True, float8.FACTOR)],
)
def test_each_factor_is_rounded_once(gradients, wanted, first):
    """The second layout of the weight is made only where it is multiplied, and with the first."""
    seen, weight = Watched(), torch.randn(32, 16)
    made = float8.Head(weight, gradients, wanted, seen)
    out = made.logits(torch.randn(8, 16), None, torch.empty(8, 32))
    if gradients and wanted:
        made.hidden_gradient(out, torch.empty(8, 16))
    rest = [((8, 32), float8.GRADIENT)] * (gradients and wanted)
    assert seen.asked == [((32, 16), first), ((8, 16), float8.FACTOR), *rest]


@pytest.mark.parametrize("known", [*float8.FORMATS, ()], ids=["OCP", "fnuz", "none"])
def test_a_device_is_asked_for_its_formats(known, monkeypatch):
    """CDNA 3 refuses OCP's formats and multiplies its own."""

    def multiplied(a, b, out, fast):
        if a.data.dtype not in known or b.data.dtype not in known:
            raise RuntimeError(f"{a.data.dtype} is not supported on this device")

    monkeypatch.setattr(float8, "_multiply", multiplied)
    asked = float8._asked.__wrapped__(torch.device("cpu"))
    if known:
        assert asked == (known, None)
    else:
        assert asked[0] == float8.FORMATS[0]
        assert "float8_e4m3fn is not supported" in asked[1]
    monkeypatch.setattr(float8, "formats", lambda device: known or float8.FORMATS[0])
    made = float8.Head(torch.randn(32, 16), True, True)
    factor, gradient = known or float8.FORMATS[0]
    assert {made._weight.data.dtype, made._across.data.dtype} == {factor}
    assert made._gradient == gradient


def test_a_device_that_cannot_says_why(monkeypatch):
    weight = torch.zeros(401, 64, device="meta")
    assert float8.unsupported(weight.device, weight) is None
    cuda = torch.device("cuda")
    assert "multiples of 16, got (401, 64)" in float8.unsupported(cuda, weight)
    monkeypatch.setattr(float8, "unsupported", lambda *_: "no such product")
    with pytest.raises(RuntimeError, match="head_gemms in 8 bits: no such product"):
        float8.Head(torch.zeros(16, 16), True, True)


def test_asked_for_by_a_wrong_word():
    with pytest.raises(ConfigurationError, match="float8"):
        liger_multi.configure({"head_gemms": "fp8"})
