"""fused_linear_log_prob in the losses that use it: policies, masks, chunks, memory."""

import itertools
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import liger_multi
from liger_multi import ops
from liger_multi.dispatch.op import inline_ops
from liger_multi.reference.cross_entropy import fused_linear_log_prob as loop, rows as rows_of
from liger_multi.reference.cross_entropy.token_log_prob import implement_token_log_prob
from liger_multi.testing import FORMULAS
from liger_multi.testing.tolerance import excess
from tests import harness
from tests.comparing import Operations, saved, storage_bytes

log_prob = ops.fused_linear_log_prob
contract = sys.modules[log_prob.__module__]
NAMES = ("log_prob", "entropy", "lse")
LOW = [torch.float32, torch.bfloat16, torch.float16]


kernels = harness.interpreted_kernels("fused_linear_log_prob")


def head(rows=40, width=16, classes=61, dtype=torch.float32, device="cpu", ignored=0.2):
    x, w = torch.randn(rows, width), torch.randn(classes, width) * 0.3
    b, t = torch.randn(classes) * 0.3, torch.randint(classes, (rows,))
    t = t.masked_fill(torch.rand(rows) < ignored, -100)
    x, w, b = (v.to(device, dtype).requires_grad_() for v in (x, w, b))
    return x, w, t.to(device), b


def wide(*tensors):
    return [v.detach().double().requires_grad_() for v in tensors]


def compare(ours, right, dtype, limit=1.0):
    for a, b in zip(ours, right, strict=True):
        assert a.isfinite().all()
        assert excess(a, b.detach(), dtype) <= limit


# --- outputs ---

SUBSETS = [s for n in (1, 2, 3, 4) for s in itertools.combinations((*NAMES, "argmax"), n)]


@pytest.mark.parametrize("outputs", SUBSETS, ids="-".join)
def test_every_subset_of_outputs_and_upstream_gradients(device, outputs):
    """What is not asked for is None; each set of used outputs has its own right gradient."""
    x, w, t, b = head(12, device=device)
    xw, ww, bw = wide(x, w, b)
    exact = FORMULAS["fused_linear_log_prob"](xw, ww, t, bw)
    out = log_prob(x, w, t, b, chunk=5, outputs=outputs)
    assert {n for n in out._fields if getattr(out, n) is not None} == set(outputs)
    smooth = [n for n in NAMES if n in outputs]
    for used in (s for n in range(1, len(smooth) + 1) for s in itertools.combinations(smooth, n)):
        ups = [torch.randn(12, device=device) for _ in used]
        ours = torch.autograd.grad(
            [getattr(out, n) for n in used], (x, w, b), ups, retain_graph=True
        )
        right = torch.autograd.grad(
            [getattr(exact, n) for n in used],
            (xw, ww, bw),
            [u.double() for u in ups],
            retain_graph=True,
        )
        compare(ours, right, x.dtype)
    if "argmax" in outputs:
        assert not out.argmax.requires_grad
        assert torch.equal(out.argmax, exact.argmax)


def test_the_first_maximum_wins(device):
    x, w = torch.eye(4, device=device), torch.zeros(90, 4, device=device)
    w[13], w[70] = 3.0, 3.0
    t = torch.zeros(4, dtype=torch.int64, device=device)
    assert log_prob(x, w, t).argmax.tolist() == [13] * 4


def test_as_exact_as_the_formulas_of_trainers():
    """As exact as fp32 code on materialized logits: z[t] - logsumexp, log_softmax, -sum p log p.

    Of the same logits: two matrix products of equal operands need not round alike, so these are
    of eighths, which fp32 adds exactly in any order.
    """
    if harness.interpreted():
        pytest.skip("of the reference")
    x, w, t, b = head(ignored=0.0)
    x, w, b = ((8 * v.detach()).round() / 8 for v in (x, w, b))
    z, out = torch.nn.functional.linear(x, w, b) / 0.5, log_prob(x, w, t, b, temperature=0.5)

    def trainers(z):
        log_p = torch.log_softmax(z, -1)
        of_token = log_p.gather(-1, t[:, None])[:, 0]
        return of_token, -(log_p.exp() * log_p).sum(-1), torch.logsumexp(z, -1)

    for name, peer, exact in zip(NAMES, trainers(z), trainers(z.double()), strict=True):
        ours = (getattr(out, name) - exact).abs()
        unit = torch.finfo(torch.float32).eps * exact.abs()
        assert (ours <= torch.maximum((peer - exact).abs().max(), unit)).all(), name


# --- chunks, dtypes ---


@pytest.mark.parametrize("dtype", LOW)
def test_no_result_depends_on_the_chunk(device, dtype):
    """In bf16 too: the gradient of the weight is summed in fp32 and rounded once."""
    results, rows = [], 12 if harness.interpreted() else 300
    ups = torch.randn(3, rows, device=device)
    for chunk in (1, 7, 256, rows):
        torch.manual_seed(0)
        x, w, t, b = head(rows, 32, 101, dtype, device)
        out = log_prob(x, w, t, b, chunk=chunk, temperature=0.9)
        total = sum((getattr(out, n) * u).sum() for n, u in zip(NAMES, ups, strict=True))
        values = [getattr(out, n).detach() for n in NAMES]
        results.append((values, torch.autograd.grad(total, (x, w, b))))
    for values, grads in results[:-1]:
        compare(values, results[-1][0], torch.float32)
        compare(grads, [g.double() for g in results[-1][1]], dtype, 0.5)


@pytest.mark.parametrize("upstream", [2.0**-24, 2.0**-10, 2.0**18])
def test_gradients_of_fp16_logits_stay_in_range(device, upstream):
    """A mean over many rows or a loss scale must not push the gradients of logits out of fp16."""
    x, w, t, b = head(256, 16, 3000, torch.float16, device)
    w.data.mul_(0.1)
    b.data.mul_(0.1)
    if upstream != 2.0**-10:  # parameters in fp32, whose gradients hold what fp16 cannot
        x, w, b = (v.detach().float().requires_grad_() for v in (x, w, b))
    xw, ww, bw = wide(x, w, b)
    with torch.autocast(device.type, torch.float16, enabled=x.dtype == torch.float32):
        out = log_prob(x, w, t, b, chunk=64)
    exact = FORMULAS["fused_linear_log_prob"](xw, ww, t, bw)
    totals = [((o.log_prob + o.entropy) * upstream).sum() for o in (out, exact)]
    ours = torch.autograd.grad(totals[0], (x, w, b))
    compare(ours, torch.autograd.grad(totals[1], (xw, ww, bw)), torch.float16)


def test_autocast(device):
    """Products have its dtype, statistics fp32, gradients that of the inputs."""
    x, w, t, b = head(device=device)
    low = [v.detach().bfloat16().requires_grad_() for v in (x, w, b)]
    right = log_prob(low[0], low[1], t, low[2], chunk=16)
    with torch.autocast(device.type, torch.bfloat16):
        out = log_prob(x, w, t, b, chunk=16)
        mixed = log_prob(low[0], w, t, b, chunk=16)
    for name in NAMES:
        assert getattr(out, name).dtype == torch.float32
        assert torch.equal(getattr(out, name), getattr(right, name))
        assert torch.equal(getattr(out, name), getattr(mixed, name))
    ours = torch.autograd.grad(out.log_prob.sum() + out.entropy.sum(), (x, w, b))
    assert {g.dtype for g in ours} == {torch.float32}
    again = torch.autograd.grad(right.log_prob.sum() + right.entropy.sum(), low)
    for a, e in zip(ours, again, strict=True):
        assert torch.equal(a.bfloat16(), e)


# --- rows and classes that are out ---


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("dtype", LOW)
def test_nothing_leaks_from_ignored_rows(device, dtype, compact):
    """Whatever a loss makes of them, NaN from 0 * inf too: their gradient goes nowhere."""
    x, w, t, b = head(dtype=dtype, device=device)
    valid = t != -100
    results = []
    for junk in (0.0, float("nan"), float("inf")):
        out = log_prob(x, w, t, b, chunk=16, compact=compact)
        assert all((getattr(out, n)[~valid] == 0).all() for n in NAMES)
        assert (out.argmax[~valid] == -1).all()
        up = torch.where(valid, 1.0, junk)
        total = [getattr(out, n) for n in NAMES]
        results.append(torch.autograd.grad(total, (x, w, b), [up, 0.5 * up, 0.1 * up]))
        assert (results[-1][0][~valid] == 0).all()
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_masked_vocabulary(device):
    """Classes at -inf: the results are those of the vocabulary without them."""
    x, w, t, b = head(device=device)
    kept = torch.arange(61, device=device) % 3 != 1
    t = torch.where(t == -100, t, t // 3 * 3)  # none of the masked
    masked = b.detach().masked_fill(~kept, float("-inf")).requires_grad_()
    position = (kept.cumsum(0) - 1)[t.clamp(min=0)].masked_fill(t == -100, -100)
    few_w, few_b = wide(w[kept], b[kept])
    (xw,) = wide(x)
    out = log_prob(x, w, t, masked, chunk=16)
    exact = FORMULAS["fused_linear_log_prob"](xw, few_w, position, few_b)
    compare([getattr(out, n).detach() for n in NAMES], [getattr(exact, n) for n in NAMES], x.dtype)
    totals = [o.log_prob.sum() + 2 * o.entropy.sum() - o.lse.sum() for o in (out, exact)]
    dx, dw, db = torch.autograd.grad(totals[0], (x, w, masked))
    assert (dw[~kept] == 0).all()
    assert (db[~kept] == 0).all()
    compare((dx, dw[kept], db[kept]), torch.autograd.grad(totals[1], (xw, few_w, few_b)), x.dtype)


def test_a_masked_target(device):
    """Its log-probability is -inf; what the rest of the row has is right."""
    x, w, t, b = head(3, device=device, ignored=0.0)
    b.data[t[1]] = float("-inf")
    t[0] = t[2] = (t[1] + 1) % 61
    out = log_prob(x, w, t, b)
    assert out.log_prob.isneginf().tolist() == [False, True, False]
    assert out.entropy.isfinite().all()
    grads = torch.autograd.grad(out.entropy.sum() + out.lse.sum(), (x, w, b))
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("size", [30.0, 3000.0])
def test_certain_rows(device, size):
    """Logits far apart: an entropy near 0 is no negative number of digits lost, nor NaN."""
    x, w, t, b = head(device=device)
    x.data.mul_(size)
    xw, ww, bw = wide(x, w, b)
    out, exact = log_prob(x, w, t, b), FORMULAS["fused_linear_log_prob"](xw, ww, t, bw)
    assert (out.entropy - exact.entropy).abs().max() < 1e-3
    assert excess(out.lse.detach(), exact.lse.detach(), torch.float32) <= 1
    grads = torch.autograd.grad(out.entropy.sum() + out.log_prob.sum(), (x, w, b))
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("compact", [True, False])
def test_targets_that_reach_no_class(device, compact, monkeypatch):
    """On a device they are not looked at first: NaN for that row, no gradient, no foreign read."""
    x, w, t, b = head(6, device=device, ignored=0.0)
    t[1], t[4], t[5] = 61, -7, 2**40
    if device.type == "cpu":
        with pytest.raises(IndexError, match="target 61 at row 1 is out of range"):
            log_prob(x, w, t, b)
        monkeypatch.setattr(loop, "check_targets", lambda *_: None)
    else:
        with pytest.raises(IndexError, match="target 61 at row 1 is out of range"):
            log_prob(x, w, t, b, validate=True)
    out = log_prob(x, w, t, b, compact=compact, chunk=4)
    assert out.log_prob.isnan().tolist() == [False, True, False, False, True, True]
    totals = sum(getattr(out, n).sum() for n in NAMES)
    dx, dw, db = torch.autograd.grad(totals, (x, w, b))
    assert (dx[[1, 4, 5]] == 0).all()
    xw, ww, bw = wide(x, w, b)
    fine = t.clone()
    fine[[1, 4, 5]] = -100
    exact = FORMULAS["fused_linear_log_prob"](xw, ww, fine, bw)
    right = torch.autograd.grad(sum(getattr(exact, n).sum() for n in NAMES), (xw, ww, bw))
    compare((dx, dw, db), right, x.dtype)


# --- memory, the host, compilation ---


@pytest.mark.parametrize("needs", ["hidden", "weight", "bias"])
def test_frozen_inputs_cost_nothing(needs):
    """No room for the gradient of an input that needs none."""
    x, w, t, b = head(96, 24, 501, ignored=0.0)
    leaves = {"hidden": x, "weight": w, "bias": b}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name == needs)
    with Operations() as operations:
        total = log_prob(x, w, t, b, chunk=8, outputs=("log_prob",)).log_prob.sum()
        (actual,) = torch.autograd.grad(total, (leaves[needs],))
    buffers = operations.tensors(torch.ops.aten.empty, torch.ops.aten.zeros)
    shapes = {tuple(buffer.shape) for buffer in buffers}
    assert ((96, 24) in shapes) == (needs == "hidden")
    assert ((501, 24) in shapes) == (needs == "weight")
    xw, ww, bw = wide(x, w, b)
    wider = dict(zip(leaves, (xw, ww, bw), strict=True))[needs]
    exact = FORMULAS["fused_linear_log_prob"](xw, ww, t, bw).log_prob.sum()
    compare((actual,), torch.autograd.grad(exact, (wider,)), x.dtype)


def test_outputs_that_nobody_asked_for_cost_nothing():
    if harness.interpreted():
        pytest.skip("of the reference")
    x, w, t, b = head()
    for outputs in (("log_prob",), ("log_prob", "entropy", "argmax")):
        with Operations() as operations:
            log_prob(x, w, t, b, outputs=outputs)
        assert ("mul_" in operations.names()) == ("entropy" in outputs)
        assert ("argmax" in operations.names()) == ("argmax" in outputs)


@pytest.mark.parametrize("apart", [False, True], ids=["adjacent columns", "columns apart"])
def test_gradient_of_logits_is_written_without_a_copy(apart):
    """A copy that the kernel writes over costs two more passes than the gradient itself."""
    observed = []

    class Kernels(loop.ReferenceRows):
        @staticmethod
        def log_prob_gradient_(raw, target, lse, objective, upstream, out=None):
            observed.append((raw.data_ptr(), out.data_ptr()))
            loop.ReferenceRows.log_prob_gradient_(raw, target, lse, objective, upstream, out)

    logits = torch.randn(33, 5).mT if apart else torch.randn(5, 33)
    target, (forward, backward) = torch.arange(5), implement_token_log_prob(Kernels())
    _, entropy, lse, _, lse_low = forward(logits, target, -100, None, 1.0, False, "log_prob")
    before = logits.clone()
    saved = {"entropy": entropy, "lse": lse, "lse_low": lse_low}
    options = {"ignore_index": -100, "softcap": None, "logit_scale": 1.0}
    dlogits = backward(torch.ones(5), None, None, logits, target, **saved, **options)
    right = torch.nn.functional.one_hot(target, 33) - torch.softmax(before, -1)
    torch.testing.assert_close(dlogits, right)
    assert torch.equal(logits, before)
    ((raw, out),) = observed
    assert out == dlogits.data_ptr() != raw
    assert (raw == logits.data_ptr()) is not apart


@pytest.mark.parametrize("outputs", ["eager", "zeros", "compiled"])
def test_entropy_that_nobody_uses_has_no_gradient_to_compute(outputs, monkeypatch):
    """Compilers replace a gradient that does not arrive by zeros."""
    if harness.interpreted():
        pytest.skip("a device's zeros are not looked at")
    arrived, gradient_ = [], rows_of.gradient_

    def spy(raw, target, lse, objective, upstream):
        arrived.append(upstream.entropy)
        gradient_(raw, target, lse, objective, upstream)

    monkeypatch.setattr(loop, "gradient_", spy)
    x, w, t, b = head()

    def both(x, w, b):
        out = log_prob(x, w, t, b)
        return out.log_prob, out.entropy

    run = torch.compile(both, backend="aot_eager") if outputs == "compiled" else both
    own, entropy = run(x, w, b)
    if outputs == "zeros":
        torch.autograd.backward((own.sum(), entropy), (None, torch.zeros_like(entropy)))
    else:
        own.sum().backward()
    assert arrived
    assert all(each is None for each in arrived)
    again = [v.detach().requires_grad_() for v in (x, w, b)]
    log_prob(*again[:2], t, again[2], outputs=("log_prob",)).log_prob.sum().backward()
    assert all(torch.equal(a.grad, v.grad) for a, v in zip(again, (x, w, b), strict=True))


def test_another_temperature_compiles_nothing():
    """Launches differ in run-time numbers alone, so a schedule of temperatures has one kernel."""
    pytest.importorskip("triton")
    if harness.interpreted():
        pytest.skip("interpreted kernels cannot be compiled")
    from ci.static import TARGETS, static_cases
    from liger_multi.backends.triton.cross_entropy.rows import TritonLogProbRows
    from liger_multi.reference.cross_entropy.rows import Objective, Upstream

    row = torch.empty(8, device="meta")
    raw = torch.empty(8, 512, device="meta")
    target = torch.empty(8, dtype=torch.int64, device="meta")

    def launch(spec):
        TritonLogProbRows.statistics(raw, target, None, spec, "entropy")
        TritonLogProbRows.log_prob_gradient_(raw, target, row, spec, Upstream(row, row, row))

    goals = [Objective(-100, 0.0, 0.0, cap, scale) for cap, scale in ((30.0, 2.0), (15.0, 0.5))]
    first, second = (
        static_cases(TARGETS["sm90"].info, {"": lambda spec=spec: launch(spec)}) for spec in goals
    )
    assert len(first) == 2
    for a, b in zip(first, second, strict=True):
        assert (a.kernel, a.signature, a.constants) == (b.kernel, b.signature, b.constants)


# --- bad input ---

x, w, t = torch.randn(4, 8), torch.randn(9, 8), torch.tensor([0, 1, 2, -100])
BAD = [
    (lambda: log_prob(x, w, t, temperature=0.0), ValueError, "temperature must be above 0, got 0"),
    (lambda: log_prob(x, w, t, temperature="1"), TypeError, "temperature must be a number"),
    (lambda: log_prob(x, w, t, softcap=-1.0), ValueError, "softcap must be above 0, got -1.0"),
    (lambda: log_prob(x, w, t, outputs=()), ValueError, "outputs must name at least one of log"),
    (lambda: log_prob(x, w, t, outputs=("entrpy",)), ValueError, "did you mean 'entropy'"),
    (lambda: log_prob(x, w, t, outputs="entropy"), TypeError, "tuple of names"),
    (lambda: log_prob(x, w, t[:3]), ValueError, r"target must have shape \(4,\)"),
    (lambda: log_prob(x, w, t.float()), TypeError, "integer class ids"),
    (lambda: log_prob(x, w, t + 100), IndexError, "target 100 at row 0 is out of range"),
    (lambda: log_prob(x, w[:, :5], t), ValueError, "last axis of hidden must be H = 5"),
    (lambda: log_prob(x, w[:0], t), ValueError, "ZeRO-3 shard"),
    (lambda: log_prob(x, w, t, torch.ones(3)), ValueError, r"bias must have shape \(9,\)"),
    (lambda: log_prob(x, w.bfloat16(), t), TypeError, "one dtype outside of autocast"),
    (lambda: log_prob(x, w, t, chunk=0), ValueError, "chunk must be 'auto', 'lean', a positive"),
    (lambda: log_prob(x, w, t, accumulate=torch.int8), TypeError, "accumulate must be a floating"),
]


test_bad_input_is_named = harness.refuses(BAD)


def test_rows_without_upstream_gradient_have_zero_gradients(device):
    """A clipped ratio has coefficient 0: the row adds nothing, not 0 * NaN."""
    raw = torch.full((2, 8), float("nan"), device=device)
    zero = torch.zeros(2, device=device)
    target = torch.zeros(2, dtype=torch.int64, device=device)
    spec = rows_of.Objective(-100, 0.0, 0.0, None)
    rows_of.gradient_(
        raw, target, rows_of.LogSumExp(zero, zero), spec, rows_of.Upstream(zero, zero, zero)
    )
    assert (raw == 0).all()


# --- logits that are kept ---


def gradients_of(device, ignored, dtype, times=1, **options):
    """Gradients of all three numbers, of every backward pass through one graph."""
    torch.manual_seed(3)
    x, w, t, b = head(dtype=dtype, device=device, ignored=ignored)
    arguments = contract.prepared(x, w, t, b, softcap=3.0, chunk=40, **options)
    out = contract.as_output(contract.op(*arguments), t, arguments[-1])
    loss = (out.log_prob * 2 - out.entropy + out.lse.square()).sum()
    again = [True] * (times - 1) + [False]
    return [torch.autograd.grad(loss, (x, w, b), retain_graph=retain) for retain in again]


@pytest.mark.parametrize("mode", [False, True, "rows"])
@pytest.mark.parametrize("ignored", [0.0, 0.3])
@pytest.mark.parametrize("dtype", LOW)
def test_logits_that_are_kept_change_no_bit(device, dtype, ignored, mode):
    """Nor does a second backward, before which the first one leaves the logits alone."""
    with liger_multi.use(deterministic=mode):
        (once,), (again,) = (gradients_of(device, ignored, dtype, keep=k) for k in (True, False))
        retained = gradients_of(device, ignored, dtype, times=3)
    for gradients in (again, *retained):
        assert all(torch.equal(a, b) for a, b in zip(once, gradients, strict=True))


@pytest.mark.parametrize(("chunk", "gemms"), [("auto", 3), (40, 3), (39, 4)])
def test_logits_of_one_chunk_are_computed_once(chunk, gemms):
    x, w, t, b = head(width=40, ignored=0.0)  # where auto takes 40 rows at once
    with inline_ops(), FlopCounterMode(display=False) as flops:
        torch.autograd.grad(log_prob(x, w, t, b, chunk=chunk).log_prob.sum(), (x, w, b))
    assert flops.get_total_flops() == gemms * 2 * 40 * 40 * 61


@pytest.mark.parametrize(("chunk", "rows"), [(40, 40), (39, 0)])
def test_logits_are_kept_for_gradients_only(device, chunk, rows):
    x, w, t, b = head(device=device, ignored=0.25)
    for needed in (True, False):
        with torch.set_grad_enabled(needed):
            _, tensors = saved(lambda: log_prob(x, w, t, b, chunk=chunk), but=(x, w, t, b))
        assert storage_bytes(tensors) == (3 * 4 * 40 + rows * 61 * 4) * needed
