"""PyTorch's own linear_cross_entropy behind the operator, where a configuration names it."""

import pytest
import torch
import torch.nn.functional as F

import liger_multi
from liger_multi.errors import BackendUnavailableError
from liger_multi.ops import fused_linear_cross_entropy

here = pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="this PyTorch has no linear_cross_entropy"
)


def leaves(dtype):
    torch.manual_seed(0)
    h, w, b = torch.randn(96, 32), torch.randn(401, 32), torch.randn(401)
    return [t.to(dtype).requires_grad_() for t in (h, w, b)]


def run(backend, tensors, target, **options):
    h, w, b = tensors
    with liger_multi.use(fused_linear_cross_entropy=backend):
        loss = fused_linear_cross_entropy(h, w, target, bias=b, **options)
        return loss, *torch.autograd.grad(3 * loss, [t for t in tensors if t.requires_grad])


@here
@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "sum"}, {"class_weight": torch.rand(401)}, {"chunk": 16}],
    ids=lambda o: next(iter(o), "plain"),
)
@pytest.mark.parametrize("ignored", [0, 48, 96])
def test_equals_the_reference(options, ignored, monkeypatch):
    target, tensors = torch.randint(401, (96,)), leaves(torch.float32)
    target[:ignored] = -100
    right = run("reference", tensors, target, **options)
    called = []
    theirs = F.linear_cross_entropy
    monkeypatch.setattr(
        F, "linear_cross_entropy", lambda *a, **k: called.append(1) or theirs(*a, **k)
    )
    for got, wanted in zip(run("pytorch", tensors, target, **options), right, strict=True):
        torch.testing.assert_close(got, wanted)
    assert called


@here
def test_gradients_in_16_bits_are_summed_in_32():
    target, tensors = torch.randint(401, (96,)), leaves(torch.bfloat16)
    tensors[2].requires_grad_(False)
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    right = run("reference", exact, target)
    got = run("pytorch", tensors, target)
    assert [t.dtype for t in got] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert (got[0].double() - right[0]).abs() < 2**-8 * right[0]
    for gradient, wanted in zip(got[1:], right[1:], strict=True):
        assert (gradient.double() - wanted).norm() < 2**-8 * wanted.norm()


REFUSED = [
    ({"softcap": 30.0}, "no softcap"),
    ({"z_loss": 0.1}, "no z_loss_weight"),
    ({"reduction": "none"}, "no reduction='none'"),
    ({"label_smoothing": 0.1}, "no label_smoothing in chunks"),
    ({"logit_scale": 2.0}, "no logit_scale"),
]


@here
@pytest.mark.parametrize(("options", "said"), REFUSED, ids=[r[1] for r in REFUSED])
def test_what_it_has_not_is_refused(options, said):
    target = torch.randint(401, (96,))
    with pytest.raises(BackendUnavailableError, match=said):
        run("pytorch", leaves(torch.float32), target, **options)


def test_older_versions_say_so(monkeypatch):
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    with pytest.raises(BackendUnavailableError, match=r"has no torch\.nn\.functional\.linear"):
        run("pytorch", leaves(torch.float32), torch.randint(401, (96,)))


def test_no_device_chooses_it():
    target, tensors = torch.randint(401, (96,)), leaves(torch.float32)
    right = run("auto", tensors, target)
    assert all(map(torch.equal, right, run("reference", tensors, target)))
