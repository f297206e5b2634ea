"""Losses of logits that lie far from 0, and of tokens that are nearly certain.

Both cost digits in formulas that are right on paper: ``z - logsumexp(z)`` where all logits have a
common offset, ``p - 1`` where p is nearly 1. The measure is PyTorch in fp32 on the same logits:
errors against fp64 may be no larger than its own, beside a few units in the last place.
"""

import pytest
import torch
import torch.nn.functional as F

import liger_multi
from liger_multi import ops
from liger_multi.testing import FORMULAS
from tests import harness

NAMES = (
    "cross_entropy",
    "cross_entropy_inplace",
    "fused_linear_cross_entropy",
    "fused_linear_log_prob",
    "token_log_prob",
    "selective_log_softmax",
    "kl_div",
    "jsd",
    "tvd",
)


@pytest.fixture(autouse=True)
def kernels(request):
    """Interpreted kernels are pinned by name; elsewhere the device chooses."""
    named = harness.interpreted() and "triton" in harness.selected_backends(request.config)
    with liger_multi.use(**dict.fromkeys(NAMES, "triton") if named else {}):
        yield


CLASSES = 97
OFFSETS = (0.0, 1e4, 1e6, -1e6)
GAPS = (5.0, 10.0, 20.0, 40.0, 80.0)
EACH = torch.tensor([1.0, 0.7, 1.3, 1.0, -2.0, 0.4] * len(GAPS))  # upstream gradients
ROWS = len(EACH)
RATIO = 2.0  # times PyTorch's own error
UNITS = 16  # errors of half a place, 2^-24, are not compared


def make(offset, dtype=torch.float32):
    """Rows whose target is the maximum by a gap, below it by one, ties with it, and ordinary."""
    rows, targets = [], []
    for gap in GAPS:
        z, target = torch.randn(6, CLASSES) * 0.3, torch.tensor([3, 50, CLASSES - 1, 0, 40, 7])
        z[0, 3] += gap
        z[1, 50] += gap
        z[2, 5] += gap  # not the target
        z[3, [0, 9]] = gap  # two maxima
        z[4] = 0.0
        z[4, 40] = gap
        rows.append(z)
        targets.append(target)
    return (torch.cat(rows) + offset).to(dtype), torch.cat(targets)


def of_a_head(run):
    """Of logits as a head with unit vectors as its hidden states has them, without rounding."""

    def call(z, target, **options):
        weight = z.T.contiguous() if z.is_leaf else z.T
        return run(torch.eye(ROWS, dtype=z.dtype, device=z.device), weight, target, **options)

    return call


def token_log_prob(z, target):
    return -ops.token_log_prob(z, target, outputs=("log_prob",)).log_prob


def cross_entropy(**options):
    return lambda z, target: ops.cross_entropy(z, target, **options)


def head_cross_entropy(reduction):
    return of_a_head(
        lambda h, w, t: ops.fused_linear_cross_entropy(h, w, t, reduction=reduction, chunk=4)
    )


def inplace(reduction):
    return lambda z, target: ops.cross_entropy(z * 1.0, target, reduction=reduction, inplace=True)


LOSSES = {
    "cross_entropy none": cross_entropy(reduction="none"),
    "cross_entropy sum": cross_entropy(reduction="sum"),
    "cross_entropy inplace": inplace("sum"),
    "cross_entropy inplace none": inplace("none"),
    "head none": head_cross_entropy("none"),
    "head sum": head_cross_entropy("sum"),
    "head log_prob": of_a_head(
        lambda h, w, t: -ops.fused_linear_log_prob(h, w, t, outputs=("log_prob",), chunk=4).log_prob
    ),
    "token_log_prob": token_log_prob,
    "selective": lambda z, target: -ops.selective_log_softmax(z, target),
    "selective of 3": lambda z, target: (
        -ops.selective_log_softmax(
            z, torch.stack((target, torch.full_like(target, -100), target), -1)
        )[:, 0]
    ),
}


def gradients(run, z, target, each=EACH):
    """Loss per row (or its sum), and the gradient of the logits."""
    z = z.detach().clone().requires_grad_()
    loss = run(z, target)
    each = each.to(loss) if loss.ndim else torch.ones_like(loss)
    (grad,) = torch.autograd.grad((loss * each).sum(), z)
    return loss.detach(), grad


def right(z, target, each):
    """Loss per row and gradient in fp64, where ``p - 1`` would lose its digits at a gap of 40."""
    below = z.double() - z.double().gather(1, target[:, None])
    others = below.exp().scatter(1, target[:, None], 0)
    rest = others.sum(-1, keepdim=True)
    grad = (others / (1 + rest)).scatter(1, target[:, None], -rest / (1 + rest))
    return rest.log1p()[:, 0], grad * each.double()[:, None]


def check(actual, torchs, exact, what, units=UNITS):
    """Relative errors, row by row, against PyTorch's own."""
    scale = exact.abs() if exact.ndim < 2 else exact.abs().amax(-1, keepdim=True)
    ours, peer = ((x.double() - exact).abs() / scale.clamp(min=1e-300) for x in (actual, torchs))
    allowed = torch.clamp(RATIO * peer, min=units * 2.0**-24)
    if exact.ndim == 2:
        allowed = allowed.amax(-1, keepdim=True)
    bad = ~(ours <= allowed)
    assert not bad.any(), (
        f"{what}: {ours[bad].tolist()} for {allowed.expand_as(ours)[bad].tolist()}"
    )


def torch_cross_entropy(z, target):
    return F.cross_entropy(z, target, reduction="none")


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("name", LOSSES)
def test_offset_and_gap(name, offset, device):
    z, target = make(offset)
    loss, grad = (x.cpu() for x in gradients(LOSSES[name], z.to(device), target.to(device)))
    each = EACH if loss.ndim else torch.ones(ROWS)
    torchs, exact = gradients(torch_cross_entropy, z, target, each), right(z, target, each)
    if not loss.ndim:
        torchs, exact = ((a.sum(), b) for a, b in (torchs, exact))
    check(loss, torchs[0], exact[0], "loss")
    check(grad, torchs[1], exact[1], "gradient")
    own, peers, true = (g[range(ROWS), target] for g in (grad, torchs[1], exact[1]))
    check(own, peers, true, "gradient of the target")
    assert (own != 0).all()
    assert (grad.double().sum(-1).abs() <= 1e-6 * exact[1].abs().amax(-1)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", LOSSES)
def test_gap_in_16_bits(name, dtype, device):
    """The loss has the digits of fp32; every entry of a gradient is off by a unit of its own."""
    z, target = make(0.0, dtype)
    loss, grad = (x.cpu() for x in gradients(LOSSES[name], z.to(device), target.to(device)))
    each = EACH if loss.ndim else torch.ones(ROWS)
    torchs, exact = gradients(torch_cross_entropy, z.float(), target, each), right(z, target, each)
    if not loss.ndim:
        torchs, exact = ((a.sum(), b) for a, b in (torchs, exact))
    check(loss, torchs[0], exact[0], "loss")
    limits = torch.finfo(dtype)
    unit = limits.eps * exact[1].abs() + limits.smallest_normal * limits.eps
    peer = (torchs[1].to(dtype).double() - exact[1]).abs()
    assert ((grad.double() - exact[1]).abs() <= torch.maximum(unit, peer)).all()


# --- divergences ---

DIVERGENCES = {
    "kl_div": (ops.kl_div, {}),
    "jsd": (ops.jsd, {}),
    "reverse": (ops.jsd, {"beta": 1.0}),
    "tvd": (ops.tvd, {}),
}


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_of_an_offset(name, offset, device):
    divergence, options = DIVERGENCES[name]
    logits = [torch.randn(ROWS, CLASSES) * 2 + shift for shift in (offset, -offset / 2)]

    def run(function, dtype, device="cpu"):
        student, teacher = (x.to(device, dtype, copy=True) for x in logits)
        student.requires_grad_()
        loss = function(
            student, teacher, form="logits", teacher_form="logits", reduction="none", **options
        )
        (grad,) = torch.autograd.grad((loss * EACH.to(loss)).sum(), student)
        return loss.detach().cpu(), grad.cpu()

    ours = run(divergence, torch.float32, device)
    formula = FORMULAS[divergence.__name__]
    torchs, exact = run(formula, torch.float32), run(formula, torch.float64)
    for a, b, c, what in zip(ours, torchs, exact, ("loss", "gradient"), strict=True):
        check(a, b, c, what, 4 * UNITS)  # differences of sums
