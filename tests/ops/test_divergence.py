"""Divergences of students and teachers: ties, masks, chunks, vocabularies, memory, the host."""

import pytest
import torch

from liger_multi import ops
from liger_multi.testing import FORMULAS
from liger_multi.testing.tolerance import excess
from tests import harness
from tests.comparing import Operations, assert_equal, assert_within

NAMES = ("kl_div", "jsd", "tvd")
INPLACE = tuple(f"{name}_inplace" for name in NAMES)
LOW = [torch.float32, torch.bfloat16, torch.float16]
LOGITS = {"form": "logits", "teacher_form": "logits"}
every = pytest.mark.parametrize("name", NAMES)


kernels = harness.interpreted_kernels(*NAMES, *INPLACE, "fused_linear_*")


def heads(rows=40, classes=61, dtype=torch.float32, device="cpu", ignored=0.2, teacher_classes=0):
    """Hidden states and weights of student and teacher, and marks of ignored rows."""
    x, w = torch.randn(rows, 16), torch.randn(classes, 16) * 0.3
    y, v = torch.randn(rows, 24), torch.randn(teacher_classes or classes, 24) * 0.3
    t = torch.zeros(rows, dtype=torch.int64).masked_fill(torch.rand(rows) < ignored, -100)
    x, w, y, v = (a.to(device, dtype) for a in (x, w, y, v))
    return x.requires_grad_(), w.requires_grad_(), y, v, t.to(device)


def fused(name, *args, **options):
    return getattr(ops, f"fused_linear_{name}")(*args, **options)


def exact(name, x, w, y, v, t, **options):
    """Loss and gradients in fp64 from full logits."""
    xw, ww = (a.detach().double().requires_grad_() for a in (x, w))
    actual = FORMULAS[f"fused_linear_{name}"](xw, ww, y.double(), v.double(), t, **options)
    return actual.detach(), torch.autograd.grad(actual.sum(), (xw, ww))


# --- rows ---


@pytest.mark.parametrize("form", ["prob", "log_prob", "logits"])
def test_total_variation_at_ties(device, form):
    """Where both are equal, nothing pulls in either direction: 0, as of abs, and not -1/2."""
    x = torch.rand(4, 30, device=device).softmax(-1)
    x = (x if form == "prob" else x.log()).requires_grad_()
    y = x.detach().clone()
    (grad,) = torch.autograd.grad(ops.tvd(x, y, form=form), x)
    assert (grad == 0).all()
    y[:, 3] = y[:, 3] * 0.5 if form == "prob" else y[:, 3] - 1.0
    (grad,) = torch.autograd.grad(ops.tvd(x, y, form=form, reduction="sum"), x)
    assert (grad[:, 3] > 0).all()
    others = grad[:, [i for i in range(30) if i != 3]]
    if form != "logits":  # whose normalizer moves with every class
        assert (others == 0).all()


@every
@pytest.mark.parametrize("form", ["log_prob", "logits"])
def test_nothing_leaks_from_ignored_rows(name, form, device):
    x, y = torch.randn(4, 30, device=device), torch.randn(4, 30, device=device)
    t = torch.tensor([0, -100, 1, -100], device=device)
    results = []
    for junk in (0.0, float("nan"), float("inf")):
        a, b = x.clone(), y.clone()
        a[1], b[3] = junk, junk
        a.requires_grad_()
        loss = getattr(ops, name)(a, b, t, form=form, teacher_form=form, reduction="none")
        assert (loss[t == -100] == 0).all()
        up = torch.tensor([1.0, junk, 2.0, junk], device=device)
        results.append((loss.detach(), torch.autograd.grad(loss, a, up)[0]))
        assert (results[-1][1][t == -100] == 0).all()
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@every
def test_classes_without_probability(name, device):
    """Masked in both at -inf: the result is that without them, and no 0 * inf."""
    x, y = torch.randn(2, 5, 30, device=device).unbind(0)
    kept = torch.arange(30, device=device) % 3 != 1
    a, b = (z.masked_fill(~kept, float("-inf")) for z in (x, y))
    a.requires_grad_()
    loss = getattr(ops, name)(a, b, **LOGITS)
    few = x[:, kept].requires_grad_()
    right = getattr(ops, name)(few, y[:, kept], **LOGITS)
    torch.testing.assert_close(loss, right)
    grads = torch.autograd.grad(loss, a)[0], torch.autograd.grad(right, few)[0]
    assert (grads[0][:, ~kept] == 0).all()
    torch.testing.assert_close(grads[0][:, kept], grads[1])


@every
@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_logits_far_apart(name, beta, device):
    """Neither sums that overflow, nor probabilities that vanish, make a NaN."""
    own = {"beta": beta} if name == "jsd" else {}
    x = torch.randn(6, 70, device=device) * 1e4
    y = x.roll(1, 0).contiguous()
    x.requires_grad_()
    loss = getattr(ops, name)(x, y, **LOGITS, **own)
    (grad,) = torch.autograd.grad(loss, x)
    assert loss.isfinite()
    assert grad.isfinite().all()
    if name == "tvd":
        assert loss.item() == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["kl_div", "jsd"])
def test_a_maximum_far_from_the_first_columns(name, device):
    """The anchor of a pass is the first step's maximum; a later one lies e^100 above it."""
    x, y = torch.randn(2, 2, 9000, device=device).unbind(0)
    x[:, 8500], y[:, 8600] = 100.0, 130.0
    x[1, :4200] = float("-inf")
    y[1, :4200] = float("-inf")
    wide = x.double().requires_grad_()
    x.requires_grad_()
    own = {"form": "logits", "teacher_form": "logits"}
    loss, right = getattr(ops, name)(x, y, **own), getattr(ops, name)(wide, y.double(), **own)
    assert excess(loss.detach(), right.detach(), torch.float32) <= 1
    grads = torch.autograd.grad(loss, x)[0], torch.autograd.grad(right, wide)[0]
    assert grads[0].isfinite().all()
    if name == "kl_div":  # jsd has no gradient where both are certain
        assert excess(*grads, torch.float32) <= 1


# --- heads ---


@every
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_result_depends_on_the_chunk(name, device, dtype, reduction):
    """In bf16 too: the gradient of the weight is summed in fp32 and rounded once.

    A device's product of a single row sums in another order than one of many, and rounds some
    logits to the other side.
    """
    results, rows = [], 12 if harness.interpreted() else 300
    of_losses = torch.float32 if device.type == "cpu" else dtype
    x, w, y, v, t = heads(rows, dtype=dtype, device=device)
    for chunk in (1, 7, 256, rows):
        loss = fused(name, x, w, y, v, t, chunk=chunk, reduction=reduction)
        results.append((loss.detach(), *torch.autograd.grad(loss.sum(), (x, w))))
    for other in results[:-1]:
        assert excess(other[0], results[-1][0], of_losses) <= 1
        assert_within(other[1:], results[-1][1:], dtype=dtype, bound=0.5)


@every
def test_a_mean_over_all_rows_costs_one_division_a_direction(name):
    """Their number is known on the host; zero rows have the loss 0.

    The tensors are on the CPU, where backward stays in the thread that records operations.
    """
    calls = {}
    for reduction in ("sum", "mean"):
        x = torch.randn(6, 30).log_softmax(-1).requires_grad_()
        y = torch.randn(6, 30).log_softmax(-1)
        with Operations() as operations:
            loss = getattr(ops, name)(x, y, form="log_prob", reduction=reduction)
            torch.autograd.grad(loss, x)
        calls[reduction] = operations.names()
    assert sorted(calls["mean"]) == sorted([*calls["sum"], "div", "div"])
    empty = torch.empty(0, 30, requires_grad=True)
    loss = getattr(ops, name)(empty, empty.detach(), form="log_prob")
    assert loss == 0
    assert torch.autograd.grad(loss, empty)[0].shape == (0, 30)


@every
def test_the_teacher_is_a_constant(name, device):
    """Its head needs no detach; logits of a teacher that require a gradient are refused."""
    x, w, y, v, t = heads(device=device)
    v.requires_grad_()
    assert torch.autograd.grad(fused(name, x, w, y, v, t), (x, v), allow_unused=True)[1] is None
    with pytest.raises(ValueError, match=r"pass teacher\.detach\(\)"):
        getattr(ops, name)(x @ w.mT, y @ v.mT, **LOGITS)


@every
def test_vocabularies_of_two_sizes(name, device):
    """An error, or a comparison of what both have: never logits of 0 in place of the missing."""
    x, w, y, v, t = heads(device=device, teacher_classes=70)
    with pytest.raises(ValueError, match="61 classes and teacher_weight 70"):
        fused(name, x, w, y, v, t)
    actual = fused(name, x, w, y, v, t, vocabulary="common")
    assert torch.equal(actual, fused(name, x, w, y, v[:61], t))
    (grad,) = torch.autograd.grad(
        fused(name, y, v.requires_grad_(), x, w, t, vocabulary="common"), v
    )
    assert (grad[61:] == 0).all()
    assert (grad[:61] != 0).any()


@pytest.mark.parametrize("scale", [1.0, 2.0**14])
@every
def test_fp16_with_a_grad_scaler(name, device, scale):
    x, w, y, v, t = heads(512 if not harness.interpreted() else 48, 300, torch.float16, device)
    ours = torch.autograd.grad(fused(name, x, w, y, v, t, chunk=128) * scale, (x, w))
    right = exact(name, x, w, y, v, t)[1]
    if scale == 1.0:  # gradients below what fp16 can hold
        ours, right = (torch.stack([g.abs().max() for g in each]) for each in (ours, right))
        assert (ours.float() <= 2 * right).all()
        return
    for a, b in zip(ours, right, strict=True):
        assert a.isfinite().all()
        if name != "tvd":  # where a logit's rounding may turn a sign
            assert excess(a, b * scale, torch.float16) <= 1


def test_autocast(device):
    x, w, y, v, t = heads(device=device)
    low = [a.detach().bfloat16().requires_grad_(a.requires_grad) for a in (x, w, y, v)]
    right = ops.fused_linear_jsd(*low, t, chunk=16)
    with torch.autocast(device.type, torch.bfloat16):
        loss = ops.fused_linear_jsd(x, w, low[2], v, t, chunk=16)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, right)
    grads = torch.autograd.grad(loss, (x, w)), torch.autograd.grad(right, low[:2])
    assert all(a.dtype == torch.float32 for a in grads[0])
    assert_equal((a.bfloat16() for a in grads[0]), grads[1])


# --- memory and the host ---


def test_a_budget_is_for_both_logits():
    x, w, y, v, _ = heads(4000, 501, ignored=0.0)
    with Operations() as operations:
        ops.fused_linear_jsd(x.detach(), w.detach(), y, v, chunk="5MiB")
    buffers = operations.tensors(torch.ops.aten.new_empty, torch.ops.aten.empty)
    sizes = [t.nbytes for t in buffers if t.shape[-1:] == (501,)]
    assert len(sizes) >= 2
    assert 4 * 2**20 < sum(sizes[:2]) <= 5 * 2**20


# --- bad input ---

X, Y = torch.randn(4, 8), torch.randn(4, 8)
W = torch.randn(9, 8)
BAD = [
    (lambda: ops.jsd(X, Y[:2]), ValueError, r"same shape, got \(4, 8\) and \(2, 8\)"),
    (lambda: ops.jsd(X, Y, beta=1.5), ValueError, r"beta must be in \[0, 1\], got 1.5"),
    (lambda: ops.jsd(X, Y, form="logit"), ValueError, "did you mean 'logits'"),
    (lambda: ops.jsd(X, Y, temperature=2.0), ValueError, "divides logits, and there are none"),
    (lambda: ops.jsd(X, Y, torch.zeros(3)), TypeError, "integer class ids"),
    (lambda: ops.kl_div(X, Y, reduction="batchmean"), ValueError, "unknown reduction 'batchmean'"),
    (lambda: ops.tvd(X[:, :0], Y[:, :0]), ValueError, "V >= 1"),
    (lambda: ops.tvd(X.long(), Y), TypeError, "student must be a floating-point tensor"),
    (lambda: fused("jsd", X, W, Y, W[:, :5]), ValueError, "of the teacher: the last axis of hid"),
    (lambda: fused("jsd", [1.0], W, Y, W), TypeError, "hidden must be a floating-point tensor"),
    (lambda: fused("jsd", X, W, Y[:3], W), ValueError, "must have the rows of hidden"),
    (lambda: fused("jsd", X, W, Y, W[:0]), ValueError, "ZeRO-3 shard"),
    (lambda: fused("jsd", X, W, Y, W.bfloat16()), TypeError, "of the teacher: hidden, weight and"),
    (lambda: fused("jsd", X, W, Y, W, temperature=0.0), ValueError, "temperature must be above 0"),
    (lambda: fused("jsd", X, W, Y, W, bias=torch.ones(3)), ValueError, r"bias must have shape"),
    (lambda: fused("tvd", X, W, Y, W, vocabulary="comon"), ValueError, "did you mean 'common'"),
    (lambda: fused("kl_div", X, W, Y, W, chunk=0), ValueError, "chunk must be 'auto'"),
]


test_bad_input_is_named = harness.refuses(BAD)
