"""Heads whose logits are not one matrix product of one process.

In 8 bits: the maths that a CPU emulates, and where it is asked for. With a vocabulary split over
processes: the losses and gradients of one process. By PyTorch's own linear_cross_entropy, where a
configuration names it.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import liger_multi
from liger_multi import checks, ops
from liger_multi.errors import BackendUnavailableError, ConfigurationError
from liger_multi.nn import vocab_parallel as nn
from liger_multi.ops import fused_linear_cross_entropy, fused_linear_jsd, fused_linear_log_prob
from liger_multi.reference.common.float8 import GRADIENT
from liger_multi.reference.cross_entropy import (
    float8,
    fused_linear,
    fused_linear_log_prob as loop,
    reduction,
)
from liger_multi.reference.cross_entropy.float8 import PLAIN
from tests import harness
from tests.comparing import Operations

contract = sys.modules["liger_multi.ops.fused_linear_cross_entropy"]  # a function has its name

# --- products in 8 bits ---


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
    output = PLAIN.rounded(x, dtype)
    value = output.data.float() * output.scale
    info, eps = (
        torch.finfo(dtype),
        2.0 ** (-3 if "e4m3" in str(dtype) else -2),
    )  # torch's rounding is wrong
    assert output.scale.log2() == output.scale.log2().round()
    assert x.abs().max() / output.scale <= info.max < 2 * x.abs().max() / output.scale
    room = (x.abs() * eps / 2).clamp_min(info.smallest_normal * eps / 2 * output.scale)
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
    errors = {}
    for products in ("exact", "float8", "float8_logits"):
        liger_multi.configure({"head_gemms": products})
        hidden, weight, target = head()
        loss = fused_linear_cross_entropy(hidden, weight, target, chunk=16)
        loss.backward()
        errors[products] = [loss.detach(), hidden.grad.float(), weight.grad.float()]
    liger_multi.configure(None)
    both, logits, exact = errors["float8"], errors["float8_logits"], errors["exact"]
    assert torch.equal(logits[0], both[0])
    assert torch.equal(logits[2], both[2])
    assert not torch.equal(logits[0], exact[0])
    far, near = ((output[1] - exact[1]).norm() / exact[1].norm() for output in (both, logits))
    assert 0.001 < near < 0.75 * far, "less is rounded"


def test_the_error_and_that_chunks_do_not_change_it(in_8_bits):
    actual = []
    for chunk in (48, 16, 7):
        hidden, weight, target = head()
        fused_linear_cross_entropy(hidden, weight, target, chunk=chunk).backward()
        actual.append((hidden.grad.float(), weight.grad.float()))
    liger_multi.configure(None)
    hidden, weight, target = head()
    fused_linear_cross_entropy(hidden, weight, target).backward()
    for mine, exact in zip(actual[0], (hidden.grad.float(), weight.grad.float()), strict=True):
        off = (mine - exact).norm() / exact.norm()
        assert 0.001 < off < 0.06, "rounded, and not by more than three bits of mantissa allow"
    for other in actual[1:]:
        for a, b in zip(other, actual[0], strict=True):
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
    output = fused_linear_log_prob(hidden, weight, target, outputs=("log_prob",)).log_prob
    output.sum().backward()
    rows = torch.log_softmax((hidden @ weight.t()).detach(), -1)
    taken = rows.gather(1, target.clamp_min(0)[:, None])[:, 0]
    torch.testing.assert_close(output[target >= 0], taken[target >= 0], rtol=0.05, atol=0.2)


def test_what_does_not_offer_it_is_exact(in_8_bits):
    hidden, weight, _ = head(8, 16, 40, torch.float32)
    args = (hidden, weight, hidden.detach() * 0.9, weight.detach())
    inside = fused_linear_jsd(*args)
    liger_multi.configure(None)
    assert torch.equal(inside, fused_linear_jsd(*args))


class Watched:
    """A rounding that records the formats it is asked for."""

    def __init__(self):
        self.asked = []

    def rounded(self, x, dtype=float8.FACTOR):
        self.asked.append((tuple(x.shape), dtype))
        return PLAIN.rounded(x, dtype)

    def both_ways(self, x, dtype=float8.FACTOR):
        self.asked.append((tuple(x.shape), "both"))
        return PLAIN.both_ways(x, dtype)


@pytest.mark.parametrize(
    ("gradients", "needs_grad", "first"),
    [(True, True, "both"), (True, False, float8.FACTOR), (False, True, float8.FACTOR)],
)
def test_each_factor_is_rounded_once(gradients, needs_grad, first):
    """The second layout of the weight is rounded with the first, only where it is multiplied."""
    watched, weight = Watched(), torch.randn(32, 16)
    head = float8.Head(weight, gradients, needs_grad, watched)
    out = head.logits(torch.randn(8, 16), None, torch.empty(8, 32))
    if gradients and needs_grad:
        head.hidden_gradient(out, torch.empty(8, 16))
    rest = [((8, 32), GRADIENT)] * (gradients and needs_grad)
    assert watched.asked == [((32, 16), first), ((8, 16), float8.FACTOR), *rest]


@pytest.mark.parametrize("known", [*float8.FORMATS, ()], ids=["OCP", "fnuz", "none"])
def test_a_device_is_asked_for_its_formats(known, monkeypatch):
    """CDNA 3 refuses OCP's formats and multiplies its own."""

    def multiplied(a, b, out, fast):
        if a.data.dtype not in known or b.data.dtype not in known:
            raise RuntimeError(f"{a.data.dtype} is not supported on this device")

    monkeypatch.setattr(float8, "_multiply", multiplied)
    asked = float8._supported_formats.__wrapped__(torch.device("cpu"))
    if known:
        assert asked == (known, None)
    else:
        assert asked[0] == float8.FORMATS[0]
        assert "float8_e4m3fn is not supported" in asked[1]
    monkeypatch.setattr(float8, "formats", lambda device: known or float8.FORMATS[0])
    head = float8.Head(torch.randn(32, 16), True, True)
    factor, gradient = known or float8.FORMATS[0]
    assert {head._weight.data.dtype, head._across.data.dtype} == {factor}
    assert head._gradient == gradient


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


# --- a vocabulary of several processes ---


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_losses_and_gradients_equal_one_process(tmp_path, count, request):
    """Also where the classes do not divide, and where a process has none (4 classes, 3 of them)."""
    device_type = harness.kind_of_ranks(request.config, count)
    script = Path(__file__).with_name("vocab_parallel_ranks.py")
    harness.in_processes(tmp_path, script, count, device_type)


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_arguments_that_do_not_fit(alone):
    z, t = torch.randn(3, 5), torch.zeros(3, dtype=torch.int64)
    for wrong, message in (
        ({"label_smoothing": 1.5}, r"in \[0, 1\]"),
        ({"smoothing": "global"}, "smoothing"),
        ({"reduction": "batchmean"}, "reduction"),
    ):
        with pytest.raises(ValueError, match=message):
            nn.vocab_parallel_cross_entropy(z, t, vocabulary=5, **wrong)
    with pytest.raises(ValueError, match="one id a row"):
        nn.vocab_parallel_cross_entropy(z, t[:2], vocabulary=5)
    with pytest.raises(ValueError, match="has no softcap beside it"):
        nn.vocab_parallel_fused_linear_cross_entropy(
            z, torch.randn(4, 5), t, vocabulary=4, label_smoothing=0.1, softcap=3.0
        )


def test_no_logits_cross_processes(alone, monkeypatch):
    sent = []
    real = dist.all_reduce

    def spy(x, *args, **kwargs):
        sent.append(tuple(x.shape))
        return real(x, *args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", spy)
    h, w = torch.randn(9, 5, requires_grad=True), torch.randn(40, 5, requires_grad=True)
    nn.vocab_parallel_fused_linear_cross_entropy(
        h, w, torch.arange(9), vocabulary=40, label_smoothing=0.1
    ).backward()
    assert set(sent) == {(9,), (9, 5)}


# --- PyTorch's own operator ---

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
    for got, expected in zip(run("pytorch", tensors, target, **options), right, strict=True):
        torch.testing.assert_close(got, expected)
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
    for gradient, expected in zip(got[1:], right[1:], strict=True):
        assert (gradient.double() - expected).norm() < 2**-8 * expected.norm()


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


# --- the count of valid rows ---


LOSSES = {
    "cross_entropy": fused_linear_cross_entropy,
    "log_prob": lambda *head, **how: fused_linear_log_prob(*head, **how).log_prob.sum(),
    "jsd": lambda hidden, weight, target, **how: fused_linear_jsd(
        hidden, weight, hidden.detach() + 0.1, weight.detach(), target, **how
    ),
}
every_head = pytest.mark.parametrize("op", LOSSES)


def trained(op, hidden, weight, target, **how):
    """A loss and its gradients."""
    loss = LOSSES[op](hidden, weight, target, **how)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


def calls_of(run):
    """Names of PyTorch's operators in order."""
    with Operations() as operations:
        run()
    return operations.names()


@every_head
@pytest.mark.parametrize("chunk", [16, "auto"])
def test_device_is_not_idle_after_the_count_is_read(op, chunk):
    """Once the host has the count, each launch before the product leaves the device idle."""
    hidden, weight, target = head(dtype=torch.float32)
    target[::3] = -100
    calls = calls_of(lambda: LOSSES[op](hidden, weight, target, chunk=chunk))
    assert calls.count("nonzero") == 1
    after = calls[calls.index("nonzero") + 1 :]
    between = after[: next(i for i, n in enumerate(after) if n in ("mm", "addmm"))]
    launches = [n for n in between if n not in ("squeeze", "new_empty", "empty", "slice", "t")]
    poison = launches[:1] == ["fill_"]  # the suite's, of the empty buffer
    assert launches[poison:] == ["index"]  # of the hidden states


class Behind:
    """A device's module and its streams: an event after which a copied number may be read."""

    def __init__(self, busy):
        self.busy, self.log = busy, []

    def query(self):
        return not self.busy

    def current_stream(self, device):
        return self

    def record_event(self):
        self.log.append("recorded")
        return self

    def synchronize(self):
        self.log.append("waited")


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_places_of_a_device_are_those_of_nonzero(share, monkeypatch):
    device = Behind(busy=True)
    monkeypatch.setattr(fused_linear, "has_static_nonzero", lambda device_type: True)
    monkeypatch.setattr(torch, "get_device_module", lambda device_: device)
    kept = torch.rand(97, generator=torch.Generator().manual_seed(0)) < share
    calls = calls_of(lambda: device.log.append(fused_linear.ValidRows(kept)))
    assert "nonzero_static" in calls
    assert not {"nonzero", "_local_scalar_dense"}.intersection(calls)
    places = device.log.pop()
    assert device.log == ["recorded"]
    assert torch.equal(places.get(), kept.nonzero().squeeze(1))
    assert device.log == ["recorded", "waited"]


def test_an_idle_device_is_asked_at_once(monkeypatch):
    """Its host is late already, and a count behind an event takes more calls."""
    device = Behind(busy=False)
    monkeypatch.setattr(fused_linear, "has_static_nonzero", lambda device_type: True)
    monkeypatch.setattr(torch, "get_device_module", lambda device_: device)
    kept = torch.tensor([True, False, True])
    calls = calls_of(lambda: device.log.append(fused_linear.ValidRows(kept).get()))
    assert not {"nonzero_static", "sum"}.intersection(calls)
    assert torch.equal(device.log.pop(), torch.tensor([0, 2]))
    assert not device.log


def test_who_has_places_without_a_wait():
    assert not fused_linear.has_static_nonzero("cpu")
    assert not fused_linear.has_static_nonzero("meta")
    assert not fused_linear.has_static_nonzero("npu")  # unless its package brings a kernel


def test_a_busy_device_goes_on_while_its_valid_rows_are_counted(device):
    if device.type != "cuda":
        pytest.skip("needs a device that says who waits for it")
    hidden, weight, target = (x.detach().to(device) for x in head(rows=640))
    hidden.requires_grad_()
    for ignored in (0, 100, 640):
        target[:ignored] = -100
        fused_linear_cross_entropy(hidden, weight, target).backward()  # compiles
        torch.cuda._sleep(100_000_000)
        torch.cuda.set_sync_debug_mode("error")
        try:
            fused_linear_cross_entropy(hidden, weight, target).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@every_head
def test_few_rows_of_a_device_are_not_counted(op, monkeypatch):
    """The wait for their number would take longer than the products of those that are ignored."""
    hidden, weight, target = head(dtype=torch.float32)
    target[::3] = -100

    right = trained(op, hidden, weight, target)
    monkeypatch.setattr(fused_linear, "has_few_rows", lambda target: True)
    for module in (reduction, loop):
        monkeypatch.setattr(module, "check_targets", lambda *_: None)  # a CPU looks at once
    with torch.autograd.set_multithreading_enabled(False):
        calls = calls_of(lambda: right and trained(op, hidden, weight, target))
    assert not {"nonzero", "_local_scalar_dense", "index_copy_"}.intersection(calls)
    for own, other in zip(trained(op, hidden, weight, target), right, strict=True):
        torch.testing.assert_close(own, other)


def test_which_rows_are_few():
    assert fused_linear.has_few_rows(torch.empty(512, device="meta"))
    assert not fused_linear.has_few_rows(torch.empty(513, device="meta"))
    assert not fused_linear.has_few_rows(torch.empty(1))


# --- checks of options, which are remembered ---


def test_options_are_checked_once(monkeypatch):
    hidden, weight, target = head()
    first = fused_linear_cross_entropy(hidden, weight, target, label_smoothing=0.125)
    monkeypatch.setattr(contract, "options", None)  # the check, which nobody may call again
    again = fused_linear_cross_entropy(hidden, weight, target, label_smoothing=0.125)
    assert torch.equal(first, again)
    with pytest.raises(TypeError):
        fused_linear_cross_entropy(hidden, weight, target, label_smoothing=0.0625)


@pytest.mark.parametrize(
    ("right", "wrong", "error"),
    [
        ({"compact": True}, {"compact": 1}, TypeError),
        ({"ignore_index": 1}, {"ignore_index": True}, TypeError),
        ({"ignore_index": 1}, {"ignore_index": 1.0}, TypeError),
        ({"softcap": 1}, {"softcap": True}, TypeError),
        ({"outputs": ("lse",)}, {"outputs": "lse"}, TypeError),
        ({"outputs": ()}, {"outputs": ([],)}, ValueError),
        ({"z_loss": 0.0}, {"z_loss": float("nan")}, ValueError),
        ({"softcap": 2.0}, {"softcap": torch.tensor(2.0)}, TypeError),
    ],
)
def test_a_remembered_option_is_no_excuse_for_an_equal_one(right, wrong, error):
    hidden, weight, target = head()
    with_outputs = ops.fused_linear_cross_entropy_with_outputs
    function = with_outputs if "outputs" in right else fused_linear_cross_entropy
    for _ in range(2):
        function(hidden, weight, target, **right)
        with pytest.raises(error):
            function(hidden, weight, target, **wrong)


def test_what_a_configuration_says_is_not_remembered(monkeypatch):
    hidden, weight, target = head()
    observed = []
    record = fused_linear.ChunkSpec.__init__

    def noted(self, chunk, budget, compute_dtype, compact):
        observed.append((budget, compute_dtype))
        record(self, chunk, budget, compute_dtype, compact)

    monkeypatch.setattr(fused_linear.ChunkSpec, "__init__", noted)
    try:
        for config in (None, {"chunk_bytes": 4096}, {"head_gemms": "float8"}, None):
            liger_multi.configure(config)
            fused_linear_cross_entropy(hidden, weight, target)
    finally:
        liger_multi.configure(None)
    assert observed == [(0, None), (4096, None), (0, GRADIENT), (0, None)]


def test_the_table_of_options_does_not_grow(monkeypatch):
    monkeypatch.setattr(checks, "_MOST", 3)
    asked = []

    @checks.cached_check
    def check(value):
        asked.append(value)
        return (value,)

    for value in (1, 1, True, 1.0, 2, 1):
        assert type(check(value)[0]) is type(value)
    assert asked == [1, True, 1.0, 2, 1]  # the fourth question empties the table


@every_head
@pytest.mark.parametrize("ignored", [0, 13, 45, 48])
def test_the_first_of_many_chunks_does_not_wait_for_the_count(op, ignored, monkeypatch):
    hidden, weight, target = head(dtype=torch.float32)
    target[torch.randperm(48, generator=torch.Generator().manual_seed(0))[:ignored]] = -100

    right = trained(op, hidden, weight, target, chunk=6)
    device, multiply = Behind(busy=False), fused_linear.linear_into

    def noted(*args):
        device.log.append("multiplied")
        return multiply(*args)

    monkeypatch.setattr(fused_linear, "has_static_nonzero", lambda device_type: True)
    monkeypatch.setattr(fused_linear, "linear_into", noted)
    monkeypatch.setattr(torch, "get_device_module", lambda device_: device)
    with torch.autograd.set_multithreading_enabled(False):
        actual = trained(op, hidden, weight, target, chunk=6)
    assert device.log[:3] == ["recorded", "multiplied", "waited"]
    for own, other in zip(actual, right, strict=True):
        torch.testing.assert_close(own, other)
