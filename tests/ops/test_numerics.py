"""Numbers that are easily wrong: chunks, dtypes, scalers, options, sizes, bad input.

Adapters: what their operators say about arguments that do not fit; parts of thin matrices by a
kernel are those of the reference, bit by bit.
"""

import dataclasses
import itertools
import types

import pytest
import torch
import torch.nn.functional as F

import liger_multi
from liger_multi import ops
from liger_multi.dispatch import launch, torch_ops
from liger_multi.dispatch.backend import DeviceInfo
from liger_multi.dispatch.op import OPS
from liger_multi.ops import LoRA, lora_mlp, lora_moe, lora_qkv, lora_update
from liger_multi.reference.adapters import low_rank as low_rank_reference
from liger_multi.reference.common.chunking import add_product_, chunk_rows
from liger_multi.reference.cross_entropy import (
    fused_linear,
    fused_linear_log_prob as log_probs,
    reduction,
    rows as rows_of,
)
from liger_multi.testing import FORMULAS
from liger_multi.testing.tolerance import excess
from tests import harness
from tests.comparing import Operations, assert_within


def head(rows=300, width=32, classes=101, dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    x, w = torch.randn(rows, width), torch.randn(classes, width) * 0.2
    t = torch.randint(classes, (rows,)).masked_fill(torch.rand(rows) < 0.2, -100)
    return (
        x.to(device, dtype).requires_grad_(),
        w.to(device, dtype).requires_grad_(),
        t.to(device),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_result_depends_on_the_chunk(device, dtype, reduction):
    """In bf16 too: the gradient of the weight is summed in fp32 and rounded once.

    A product of other rows may sum in another order, and round a logit to its other neighbor: a
    loss, the difference of a logsumexp and a logit, moves by two such steps at most.
    """
    results = []
    for chunk in (1, 7, 256, 300):
        x, w, t = head(dtype=dtype, device=device)
        loss = ops.fused_linear_cross_entropy(x, w, t, chunk=chunk, reduction=reduction)
        results.append((loss.detach(), *torch.autograd.grad(loss.sum(), (x, w))))
    logits = x.detach().double() @ w.detach().double().T
    steps = 2 * torch.finfo(dtype).eps * logits.abs().amax(-1)
    for other in results[:-1]:
        if dtype is torch.float32:
            assert excess(other[0], results[-1][0], dtype) <= 1
        else:
            apart = (other[0] - results[-1][0]).abs()
            assert (apart <= (steps.mean() if reduction == "mean" else steps)).all()
        assert_within(other[1:], results[-1][1:], dtype=dtype, bound=0.5)


def test_low_precision_accumulation_is_what_the_default_avoids(device):
    """The opt-in really rounds a chunk at a time, so the test above can fail."""
    x, w, t = head(1200, dtype=torch.bfloat16, device=device)
    exact = torch.autograd.grad(ops.fused_linear_cross_entropy(x.double(), w.double(), t), w)[0]
    errors = []
    for accumulate in (torch.float32, torch.bfloat16):
        loss = ops.fused_linear_cross_entropy(x, w, t, chunk=4, accumulate=accumulate)
        errors.append((torch.autograd.grad(loss, w)[0] - exact).abs().max())
    assert errors[0] < errors[1] / 3


def test_fp16_with_a_grad_scaler(device):
    """1 / rows underflows fp16 unless it is applied after the products."""
    scale, (x, w, t) = 2.0**12, head(4096, 16, 300, torch.float16, device)
    ours = torch.autograd.grad(ops.fused_linear_cross_entropy(x, w, t, chunk=512) * scale, (x, w))
    wide = [v.detach().double().requires_grad_() for v in (x, w)]
    right = torch.autograd.grad(FORMULAS["fused_linear_cross_entropy"](*wide, t) * scale, wide)
    for a, b in zip(ours, right, strict=True):
        assert a.isfinite().all()
        assert excess(a, b, torch.float16) <= 1


PRODUCT = list(
    itertools.product([None, 4.0], [False, True], [0.0, 0.1], [0.0, 1e-2], [False, True])
)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("softcap", "bias", "smoothing", "z_loss", "weighted"), PRODUCT)
def test_every_combination_of_options(
    device, softcap, bias, smoothing, z_loss, weighted, reduction
):
    """Softcap x bias x label smoothing x z-loss x class weights."""
    x, w, t = head(24, 12, 37, device=device)
    b = torch.randn(37, device=device, requires_grad=True) if bias else None
    c = torch.rand(37, device=device) + 0.5 if weighted else None
    options = {
        "class_weight": c,
        "softcap": softcap,
        "label_smoothing": smoothing,
        "z_loss": z_loss,
        "reduction": reduction,
    }
    loss = ops.fused_linear_cross_entropy(x, w, t, b, chunk=7, **options)
    leaves = [v for v in (x, w, b) if v is not None]
    upstream = torch.randn(loss.shape, device=device)
    ours = torch.autograd.grad(loss, leaves, upstream)
    wide = [v.detach().double().requires_grad_() for v in leaves]
    options["class_weight"] = None if c is None else c.double()
    right = FORMULAS["fused_linear_cross_entropy"](wide[0], wide[1], t, *wide[2:], **options)
    assert excess(loss.detach(), right.detach(), torch.float32) <= 1
    assert_within(ours, torch.autograd.grad(right, wide, upstream.double()), dtype=torch.float32)


def test_masked_vocabulary(device):
    """Columns at -inf have no probability and no gradient."""
    z = torch.randn(5, 12, device=device)
    z[:, 3] = float("-inf")
    z = z.requires_grad_()
    t = torch.tensor([0, 1, 2, 4, 11], device=device)
    out = ops.cross_entropy_with_outputs(z, t, outputs=("entropy", "predicted_tokens"))
    torch.testing.assert_close(out.loss, F.cross_entropy(z, t))
    assert out.entropy.isfinite().all()
    (grad,) = torch.autograd.grad(out.loss, z)
    assert grad.isfinite().all()
    assert (grad[:, 3] == 0).all()


def test_first_maximum_wins(device):
    z = torch.zeros(3, 70, device=device)
    z[:, 5] = z[:, 41] = 2.0
    out = ops.cross_entropy_with_outputs(
        z, torch.tensor([5, 41, 0], device=device), outputs=("predicted_tokens", "token_accuracy")
    )
    assert out.predicted_tokens.tolist() == [5, 5, 5]
    assert out.token_accuracy.item() == pytest.approx(1 / 3)


# --- the classes it stands for ---


# --- memory ---


def of_teacher(op):
    return lambda x, w, t, **options: op(x, w, x.detach() * 0.9, w.detach(), t, **options)


HEADS = {
    "fused_linear_cross_entropy": ops.fused_linear_cross_entropy,
    "fused_linear_log_prob": lambda *head, **options: sum(
        ops.fused_linear_log_prob(*head, **options)[:2]
    ).sum(),
    "fused_linear_kl_div": of_teacher(ops.fused_linear_kl_div),
    "fused_linear_jsd": of_teacher(ops.fused_linear_jsd),
    "fused_linear_tvd": of_teacher(ops.fused_linear_tvd),
}


@pytest.mark.parametrize("op", HEADS)
def test_logits_of_all_rows_never_exist(op):
    x, w, t = head(400, 16, 1001)
    with Operations() as operations:
        HEADS[op](x, w, t, chunk=32).backward()
    sizes = [y.numel() for y in operations.tensors() if y.shape[-1:] == (1001,)]
    assert 0 < max(sizes) <= 32 * 1001


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("op", HEADS)
def test_the_host_waits_for_nothing(device, op, compact, monkeypatch):
    """Without compaction nothing is read back, forward or backward; with it, counts of rows."""
    monkeypatch.setattr(fused_linear, "THIN", 0)  # so few rows are not counted on a device
    for module in (reduction, log_probs):
        monkeypatch.setattr(module, "check_targets", lambda *_: None)  # a CPU looks at once
    monkeypatch.setattr(rows_of, "known_zero", lambda _: False)  # likewise
    x, w, t = head(40, device=device)
    # a mode watches this thread only, and a device's backward has its own
    with Operations() as operations, torch.autograd.set_multithreading_enabled(False):
        torch.autograd.grad(HEADS[op](x, w, t, chunk=16, compact=compact), (x, w))
    counts = 2 if op == "fused_linear_log_prob" else 1
    assert len(operations.reads()) == counts * compact, operations.reads()


def test_the_chunk_comes_from_a_budget():
    like = torch.empty(0, 64, dtype=torch.bfloat16)
    assert chunk_rows(5000, like, 32000, 7, 0) == 7
    assert chunk_rows(128, like, 32000, 0, 0) == 128, "no more than the accumulator would cost"
    assert chunk_rows(129, like, 32000, 0, 0) == 65, "never rows x vocabulary beyond that"
    assert chunk_rows(1500, like, 32000, 0, 0) == 1024
    assert chunk_rows(900, like, 32000, 0, 0) == 512
    assert chunk_rows(400, like, 32000, 0, 0) == 200
    assert chunk_rows(50000, like, 32000, 0, 0) * 64000 <= 2**26, "a CPU takes 64 MiB"
    assert chunk_rows(5000, like, 32000, 0, 512 * 64000) == 512
    assert chunk_rows(5000, like, 32000, 0, 64000 * 9) == 9, "a small budget holds"
    assert chunk_rows(100, like, 32000, 0, 10**9) == 100, "a given budget that holds all is used"


def test_budget_by_argument_and_configuration(monkeypatch):
    observed = []
    original = fused_linear.chunk_rows
    monkeypatch.setattr(
        fused_linear,
        "chunk_rows",
        lambda *a, **k: observed.append(original(*a, **k)) or observed[-1],
    )
    x, w, t = head(300, 32, 101)
    t = t.clamp(min=0)
    ops.fused_linear_cross_entropy(x, w, t, chunk="20KiB")
    liger_multi.configure({"chunk_bytes": 101 * 4 * 11})
    ops.fused_linear_cross_entropy(x, w, t)
    ops.fused_linear_cross_entropy(x, w, t, chunk=5)
    assert observed == [50, 11, 5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_blocked_product_is_an_fp32_product(device, dtype):
    a, b = (
        torch.randn(40, 64, device=device).to(dtype),
        torch.randn(64, 24, device=device).to(dtype),
    )
    total = torch.full((40, 24), float("nan"), device=device)
    add_product_(total, a, b, first=True)
    add_product_(total, a, b, first=False)
    assert excess(total, 2 * (a.double() @ b.double()), torch.float32) <= 1


# --- sizes ---

VOCABULARY, MANY = 128000, 2**31 // 128000 + 8
LOGITS = {"form": "logits", "teacher_form": "logits", "reduction": "none"}


@pytest.mark.parametrize("op", ["softmax", "sparsemax", "selective_log_softmax", "jsd"])
def test_rows_past_two_to_the_31_elements(device, op):
    """Offsets of rows need 64 bits: the last rows' results are those of the rows alone."""
    harness.needs_memory(device, 24)
    x = torch.randn(MANY, VOCABULARY, device=device, dtype=torch.bfloat16)
    others = {"jsd": torch.randn_like, "selective_log_softmax": lambda x: x[:, 0].abs().long()}
    rest, options = [make(x) for n, make in others.items() if n == op], {"jsd": LOGITS}.get(op, {})
    harness.assert_last_rows_are_theirs_alone(
        lambda z: getattr(ops, op)(z, *(r[-len(z) :] for r in rest), **options), x
    )


def test_blocks_past_two_to_the_31_elements(device):
    """Offsets of blocks and of tokens need 64 bits."""
    harness.needs_memory(device, 24)
    blocks = torch.randn(3, 2**31 // 3 // 2048 + 9, 2048, device=device, dtype=torch.bfloat16)
    query = torch.randn(2048, device=device, dtype=torch.bfloat16) / 2048**0.5
    harness.assert_last_rows_are_theirs_alone(
        lambda x: ops.attention_residuals(x, query), blocks, axis=1
    )


# --- devices ---


def test_operators_run_on_the_device_of_their_tensors(monkeypatch):
    entered = []

    class Guard:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append(self.index)

        def __exit__(self, *_):
            pass

    module = types.SimpleNamespace(current_device=lambda: 0, device=Guard, device_count=lambda: 2)
    monkeypatch.setattr(torch_ops, "_module_of_several", torch_ops._module_of_several.__wrapped__)
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: module)
    monkeypatch.setattr(torch_ops, "resolve", lambda prim, args: lambda *a: None)
    prim = OPS["rms_norm"].fwd
    for place in ("cuda:1", "npu:1", "xpu:0", "cpu"):
        device_type, _, index = place.partition(":")
        device = types.SimpleNamespace(type=device_type, index=int(index) if index else None)
        prim.call(types.SimpleNamespace(device=device), None, 1e-6, 0.0, "llama")
    assert entered == [1, 1]


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "sm90"])
def test_no_launch_exceeds_the_threads_of_a_device(arch):
    """32 warps of 64 lanes are 2048 threads, which no card has."""
    config = dataclasses.make_dataclass("Config", [("num_warps", int)], frozen=True)
    wave, cpu = 32 if arch in ("gfx1100", "gfx1201", "sm90") else 64, torch.device("cpu")
    with launch.simulate(DeviceInfo("rocm", arch, wave, 1024, 65536, 100)):
        k = launch.launch_config("nothing.forward", lambda info, rows: config(32), cpu, rows=1)
    assert k.num_warps * wave <= 1024


def test_nothing_is_read_back_under_capture(monkeypatch):
    x, w, t = head(40, 16, 30)
    right = ops.fused_linear_cross_entropy(x, w, t)
    monkeypatch.setattr(fused_linear, "capturing", lambda device: True)
    monkeypatch.setattr(torch.Tensor, "nonzero", lambda self: pytest.fail("read back"))
    monkeypatch.setattr(torch.Tensor, "item", lambda self: pytest.fail("read back"))
    assert excess(ops.fused_linear_cross_entropy(x, w, t).detach(), right.detach(), x.dtype) <= 1


@pytest.mark.parametrize("compact", [True, False])
def test_graphs_of_a_stream_replay_with_new_data(device, compact):
    """Nothing is read back while a graph is captured; replays see other targets, ignored too."""
    if device.type != "cuda":
        pytest.skip("needs a device whose streams can be captured")

    def step(x, w, t, g):
        hidden = ops.swiglu(ops.rms_norm(x, g), x)
        loss = ops.fused_linear_cross_entropy(hidden, w, t, chunk=16, compact=compact)
        return loss, *torch.autograd.grad(loss, (x, w, g))

    x, w, t = head(64, 32, 101, device=device)
    g = torch.ones(32, device=device, requires_grad=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(x, w, t, g)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x, w, t, g)
    for ignored in (0, 40):
        new = torch.randint(101, (64,), device=device)
        new[:ignored] = -100
        t.copy_(new)
        graph.replay()
        assert_within(captured, step(x, w, t, g), dtype=torch.float32)


# --- bad input ---

x, w, t = torch.randn(4, 8), torch.randn(9, 8), torch.tensor([0, 1, 2, -100])
learned = torch.rand(8, requires_grad=True)
BAD = [
    (
        lambda: ops.rms_norm(x.long()),
        TypeError,
        r"x must be a floating-point tensor, got a tensor of shape \(4, 8\), int64, on cpu",
    ),
    (lambda: ops.rms_norm([1.0]), TypeError, "got list"),
    (lambda: ops.rms_norm(torch.tensor(1.0)), ValueError, "at least one axis"),
    (
        lambda: ops.rms_norm(x, torch.ones(7)),
        ValueError,
        r"weight must have shape \(8,\).*got a tensor of shape \(7,\)",
    ),
    (lambda: ops.rms_norm(x, casting="lama"), ValueError, "did you mean 'llama'"),
    (
        lambda: ops.rms_norm(x, torch.ones(8, device="meta")),
        ValueError,
        "one device, got weight on meta",
    ),
    (lambda: ops.swiglu(x, x[:2]), ValueError, r"same shape, got \(4, 8\) and \(2, 8\)"),
    (lambda: ops.swiglu_packed(torch.randn(2, 5)), ValueError, "must be even"),
    (lambda: ops.geglu(x, x[:2]), ValueError, r"geglu: .* got \(4, 8\) and \(2, 8\)"),
    (lambda: ops.geglu(x, x, "erf"), ValueError, "unknown approximate 'erf'"),
    (lambda: ops.geglu(x, None), TypeError, "up must be a floating-point tensor, got NoneType"),
    (lambda: ops.geglu_packed(x[:, :5]), ValueError, "geglu_packed: .* must be even"),
    (lambda: ops.geglu_packed(x, approximate="fast"), ValueError, "unknown approximate 'fast'"),
    (lambda: ops.cross_entropy(x, t[:2]), ValueError, r"target must have shape \(4,\)"),
    (lambda: ops.cross_entropy(x, t.float()), TypeError, "integer class ids"),
    (
        lambda: ops.cross_entropy(x, torch.tensor([0, 8, 1, 1])),
        IndexError,
        "target 8 at row 1 is out of range: expected 0 <= target < 8",
    ),
    (lambda: ops.cross_entropy(x, torch.tensor([0, -1, 1, 1])), IndexError, "target -1 at row 1"),
    (lambda: ops.cross_entropy(x, t, reduction="avg"), ValueError, "unknown reduction 'avg'"),
    (
        lambda: ops.cross_entropy(x, t, label_smoothing=1.5),
        ValueError,
        r"label_smoothing must be in \[0, 1\], got 1.5",
    ),
    (
        lambda: ops.cross_entropy(x, t, z_loss="a"),
        TypeError,
        "z_loss must be a number, got str 'a'",
    ),
    (lambda: ops.cross_entropy(x, t, softcap=0.0), ValueError, "softcap must be above 0, got 0.0"),
    (
        lambda: ops.cross_entropy_with_outputs(x, t, outputs=("entrpy",)),
        ValueError,
        "did you mean 'entropy'",
    ),
    (lambda: ops.cross_entropy_with_outputs(x, t, outputs="entropy"), TypeError, "tuple of names"),
    (lambda: ops.cross_entropy(x, t, torch.ones(3)), ValueError, r"weight must have shape \(8,\)"),
    (
        lambda: ops.fused_linear_cross_entropy(x, w[:, :5], t),
        ValueError,
        "last axis of hidden must be H = 5",
    ),
    (
        lambda: ops.fused_linear_cross_entropy(x, w[0], t),
        ValueError,
        r"weight must have shape \(V, H\)",
    ),
    (lambda: ops.fused_linear_cross_entropy(x, w[:0], t), ValueError, "ZeRO-3 shard"),
    (
        lambda: ops.fused_linear_cross_entropy(x, w.bfloat16(), t),
        TypeError,
        "one dtype outside of autocast, got float32, bfloat16",
    ),
    (
        lambda: ops.fused_linear_cross_entropy(x, w, t, chunk=0),
        ValueError,
        "chunk must be 'auto', 'lean', a positive number",
    ),
    (lambda: ops.fused_linear_cross_entropy(x, w, t, chunk="big"), ValueError, "got 'big'"),
    (
        lambda: ops.fused_linear_cross_entropy(x, w, t, torch.ones(3)),
        ValueError,
        r"bias must have shape \(9,\)",
    ),
    (lambda: ops.fused_linear_cross_entropy(x, w, t + 200), IndexError, "target 200 at row 0"),
    *(
        (
            lambda to=to: ops.fused_linear_cross_entropy(x, w, t, accumulate=to),
            (TypeError, ValueError),
            "accumulate must be",
        )
        for to in (torch.int32, None, "float32")
    ),
    *(
        (lambda n=n: ops.cross_entropy(x, t, ignore_index=n), TypeError, "ignore_index must be an")
        for n in (0.5, None, "a")
    ),
    (lambda: ops.cross_entropy(x, t, learned), (RuntimeError, ValueError), "weight"),
    (
        lambda: ops.fused_linear_cross_entropy(x, w[:8], t, class_weight=learned),
        (RuntimeError, ValueError),
        "weight",
    ),
    (lambda: ops.token_log_prob(x, t[:2]), ValueError, r"target must have shape \(4,\)"),
    (lambda: ops.token_log_prob(x.long(), t), TypeError, "token_log_prob: logits must be"),
    (lambda: ops.token_log_prob(x[0, 0], t), ValueError, r"logits must have shape \(\.\.\., V\)"),
    (lambda: ops.token_log_prob(x, t, temperature=0.0), ValueError, "temperature must be above 0"),
    (lambda: ops.token_log_prob(x, t, outputs=()), ValueError, "at least one of"),
    (lambda: ops.token_log_prob(x, t + 8), IndexError, "target 8 at row 0"),
]


def test_targets_out_of_range_on_a_device(device):
    """Never foreign memory: that row's loss is NaN and its gradient zero; ``validate`` raises."""
    if device.type == "cpu":
        pytest.skip("a CPU raises at once; test_bad_input_is_named")
    z, far = (
        torch.randn(4, 8, device=device, requires_grad=True),
        torch.tensor([0, 8, -7, 3], device=device),
    )
    loss = ops.cross_entropy(z, far, reduction="none")
    assert loss.isnan().tolist() == [False, True, True, False]
    (grad,) = torch.autograd.grad(loss[[0, 3]].sum(), z)
    assert (grad[1:3] == 0).all()
    with pytest.raises(IndexError, match="target 8 at row 1"):
        ops.cross_entropy(z, far, validate=True)
    h, v = (
        torch.randn(4, 16, device=device, requires_grad=True),
        torch.randn(8, 16, device=device, requires_grad=True),
    )
    losses = ops.fused_linear_cross_entropy(h, v, far, reduction="none")
    assert losses.isnan().tolist() == [False, True, True, False]


# --- adapters ---


# --- bad input ---


UP = LoRA(torch.randn(3, 2, 8), torch.randn(3, 8, 2))
DOWN = LoRA(torch.randn(3, 2, 4), torch.randn(3, 8, 2))


def mixture(**change):
    """Three experts of 8 and 4, each with adapters of rank 2, and what a case changes."""
    inputs = {
        "x": torch.randn(4, 8),
        "gate_up_weight": torch.randn(3, 8, 8),
        "down_weight": torch.randn(3, 8, 4),
        "index": torch.zeros(4, 2, dtype=torch.int64),
        "routing": torch.ones(4, 2),
        "gate_up_lora": UP,
        "down_lora": DOWN,
    }
    return lora_moe(**inputs | change)


base = torch.randn(4, 6)
low_a, low_b, narrow, up = (
    torch.randn(2, 8),
    torch.randn(6, 2),
    torch.randn(6, 8),
    torch.randn(8, 6),
)
half, trained = torch.bfloat16, torch.randn(6, 8, requires_grad=True)
BAD += [
    (
        lambda: lora_update(base[:3], x, low_a, low_b),
        ValueError,
        r"leading axes, got \(4, 8\) and \(3, 6\)",
    ),
    (lambda: lora_update(base, x, low_a[:, :5], low_b), ValueError, r"a must have shape \(r, 8\)"),
    (lambda: lora_update(base, x, low_a, low_b[:5]), ValueError, r"b must have shape \(6, 2\)"),
    (
        lambda: lora_update(base, x, low_a.to(half), low_b.to(half)),
        TypeError,
        "must not be narrower",
    ),
    (lambda: lora_update(base.to(half), x, low_a, low_b), TypeError, "one dtype is needed"),
    (
        lambda: lora_mlp(x, narrow, narrow, up, LoRA(low_a, None)),
        TypeError,
        "gate_lora.b must be a floating-point tensor, got NoneType None",
    ),
    (
        lambda: lora_mlp(x, narrow, narrow, up, down_lora=(low_a,)),
        TypeError,
        r"lora_mlp: down_lora must be LoRA\(a, b, scale\), got a tuple of 1",
    ),
    (
        lambda: lora_mlp(x, narrow, narrow, up, low_a, low_b),
        TypeError,
        r"gate_lora must be LoRA\(a, b, scale\), got a tensor of shape \(2, 8\)",
    ),
    (
        lambda: lora_mlp(x, narrow, trained, up),
        ValueError,
        "up_weight that requires a gradient; call gat",
    ),
    *(
        (lambda change=change: mixture(**change), error, text)
        for change, error, text in (
            ({"gate_up_lora": LoRA(UP.a, None)}, TypeError, "gate_up_lora.b .*, got NoneType None"),
            (
                {"down_lora": LoRA(torch.randn(6, 4), DOWN.b)},
                ValueError,
                r"down_lora.a must have shape \(3, r, 4\)",
            ),
            (
                {"gate_up_lora": LoRA(torch.randn(2, 2, 8), UP.b)},
                ValueError,
                r"gate_up_lora.a must have shape \(3, r, 8",
            ),
            (
                {"down_lora": LoRA(DOWN.a, torch.randn(3, 8, 3))},
                ValueError,
                r"down_lora.b must have shape \(3, 8, 2\)",
            ),
            ({"x": torch.randn(4, 6)}, ValueError, r"lora_moe: the last axis of x must be H = 8"),
            ({"gate_up_lora": (*UP[:2], "2")}, TypeError, "gate_up_lora.scale"),
            ({"gate_up_lora": (UP.a, UP.b.double())}, TypeError, "one dtype is needed"),
            (
                {"down_weight": torch.randn(3, 8, 4, requires_grad=True)},
                ValueError,
                "a down_weight that requires a gradient; call fused_moe of their sums",
            ),
        )
    ),
    (lambda: lora_qkv(x), ValueError, "at least one of q_weight, k_weight and v_weight"),
    (
        lambda: lora_qkv(x, narrow, k_lora=(low_a, low_b)),
        ValueError,
        "k_lora needs k_weight beside it, got None",
    ),
    (
        lambda: lora_qkv(x, narrow, v_bias=low_a[0]),
        ValueError,
        "v_bias needs v_weight beside it, got None",
    ),
    (lambda: lora_qkv(x, narrow, q_lora=(None, low_b)), TypeError, "q_lora.a must be a .* None"),
    (
        lambda: lora_qkv(x, narrow[:, :5]),
        ValueError,
        r"q_weight must have shape \(F, H\) .* \(6, 5\)",
    ),
    (
        lambda: lora_qkv(x, narrow, q_bias=low_a[0]),
        ValueError,
        r"q_bias must have shape \(6,\), the rows of",
    ),
    (
        lambda: lora_qkv(x, narrow, q_lora=(low_a, low_b[:5])),
        ValueError,
        r"q_lora.b must have shape \(6, 2\)",
    ),
    (
        lambda: lora_qkv(x, narrow, trained),
        ValueError,
        "k_weight that requires a gradient; call the lay",
    ),
    (lambda: lora_qkv(x, narrow, narrow.to(half)), TypeError, "one dtype .* k_weight bfloat16"),
    (
        lambda: lora_qkv(x, narrow, narrow, None, (low_a, low_b), (low_a.double(), low_b.double())),
        TypeError,
        "one dtype is needed .* k_lora.a float64",
    ),
    (lambda: lora_qkv(x.long(), narrow), TypeError, "x must be a floating-point tensor"),
]


test_bad_input_is_named = harness.refuses(BAD)


def test_trained_layers_without_gradients():
    with torch.no_grad():
        actual = lora_qkv(x, trained, None, narrow)
    assert torch.equal(actual.q, x @ trained.detach().T)
    assert actual.k is None
    assert torch.equal(actual.v, x @ narrow.T)


def test_layers_that_autocast_meets():
    """Any dtypes come in, and all products are in that of autocast."""
    leaves = [
        t.detach().clone().requires_grad_() for t in (x, low_a.to(half), low_b.double().float())
    ]
    with torch.autocast("cpu", half):
        actual = lora_qkv(leaves[0], narrow.to(half), None, narrow, LoRA(leaves[1], leaves[2], 2.0))
    assert (actual.q.dtype, actual.v.dtype) == (half, half)
    expected = torch.nn.functional.linear(x.to(half), narrow.to(half))
    low = x.to(half) @ low_a.to(half).T
    assert torch.equal(actual.v, expected)
    assert torch.equal(actual.q, expected.addmm(low, low_b.to(half).T, alpha=2.0))
    (actual.q.sum() + actual.v.sum()).backward()
    assert [t.grad.dtype for t in leaves] == [t.dtype for t in leaves]


# --- parts of thin matrices ---


@pytest.fixture
def split(device):
    if device.type == "cpu" and not harness.interpreted():
        pytest.skip("kernels run on a GPU or interpreted")
    pytest.importorskip("triton")
    from liger_multi.backends.triton.adapters.low_rank import split

    return split


@pytest.mark.parametrize(
    "order", [low_rank_reference.PARTS, low_rank_reference.LEFT, low_rank_reference.RIGHT]
)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("layout", ["rows", "columns", "gaps", "part"])
@pytest.mark.parametrize("shape", [(70, 16), (16, 1100), (5, 7), (1, 3), (3, 1), (0, 4)])
def test_parts_are_those_of_the_reference(split, device, order, axis, layout, shape):
    wide = torch.randn(shape[0] * 2, shape[1] * 2, device=device) * 1e3
    x = {
        "rows": wide[: shape[0], : shape[1]].contiguous(),
        "columns": wide[: shape[0], : shape[1]].t().contiguous().t(),
        "gaps": wide[::2, ::2],
        "part": wide[: shape[0], shape[1] :],
    }[layout]
    joined = split(x, order, axis)
    assert torch.equal(joined, low_rank_reference.split(x, order, axis))
    parts = joined.chunk(len(order), axis)
    if order == low_rank_reference.PARTS:
        assert torch.equal(sum(part.double() for part in parts), x.double())


# --- losses of logits far from 0, and of tokens that are nearly certain ---

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
    "fused_linear_jsd",
)


kernels = harness.interpreted_kernels(*NAMES)


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


def compared(name, z, target, device):
    """Ours, PyTorch's and exact gradients, after the losses were compared."""
    loss, grad = (x.cpu() for x in gradients(LOSSES[name], z.to(device), target.to(device)))
    each = EACH if loss.ndim else torch.ones(ROWS)
    torchs, exact = gradients(torch_cross_entropy, z.float(), target, each), right(z, target, each)
    if not loss.ndim:
        torchs, exact = ((a.sum(), b) for a, b in (torchs, exact))
    check(loss, torchs[0], exact[0], "loss")
    return grad, torchs[1], exact[1]


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("name", LOSSES)
def test_offset_and_gap(name, offset, device):
    z, target = make(offset)
    grad, torchs, exact = compared(name, z, target, device)
    check(grad, torchs, exact, "gradient")
    own, peers, true = (g[range(ROWS), target] for g in (grad, torchs, exact))
    check(own, peers, true, "gradient of the target")
    assert (own != 0).all()
    assert (grad.double().sum(-1).abs() <= 1e-6 * exact.abs().amax(-1)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", LOSSES)
def test_gap_in_16_bits(name, dtype, device):
    """The loss has the digits of fp32; every entry of a gradient is off by a unit of its own."""
    z, target = make(0.0, dtype)
    grad, torchs, exact = compared(name, z, target, device)
    limits = torch.finfo(dtype)
    unit = limits.eps * exact.abs() + limits.smallest_normal * limits.eps
    peer = (torchs.to(dtype).double() - exact).abs()
    assert ((grad.double() - exact).abs() <= torch.maximum(unit, peer)).all()


@pytest.mark.parametrize("gap", [15.0, 10.0, 5.0])
def test_entropy_where_another_class_is_nearly_certain(gap, device):
    """The target lies far below the maximum, from which the sums have to start."""
    z, target = torch.randn(ROWS, CLASSES), torch.randint(CLASSES, (ROWS,))
    z[range(ROWS), (target + 1) % CLASSES] = z.amax(-1) + gap

    def run(function, dtype, device="cpu"):
        x = z.to(device, dtype, copy=True).requires_grad_()
        entropy = function(x, target.to(device), outputs=("entropy",)).entropy
        return entropy.detach().cpu(), torch.autograd.grad(entropy.sum(), x)[0].cpu()

    ours, formula = run(ops.token_log_prob, torch.float32, device), FORMULAS["token_log_prob"]
    torchs, exact = run(formula, torch.float32), run(formula, torch.float64)
    for a, b, c in zip(ours, torchs, exact, strict=True):  # sums of about 1 are rounded
        assert (a.double() - c).abs().max() <= 2 * (b.double() - c).abs().max() + 4 * 2.0**-24


@pytest.mark.parametrize("name", ["token_log_prob", "cross_entropy"])
def test_gradient_near_the_softcap(name, device):
    """Derivatives of 1e-5 of the cap, which are the difference of two numbers near 1."""
    z, target = 30.0 + torch.rand(ROWS, CLASSES), torch.randint(CLASSES, (ROWS,))

    def run(function, dtype, device="cpu"):
        x = z.to(device, dtype, copy=True).requires_grad_()
        loss = function(x, target.to(device), softcap=5.0)
        loss = loss if isinstance(loss, torch.Tensor) else loss.log_prob
        return torch.autograd.grad(loss.sum(), x)[0].cpu()

    ours, exact = run(getattr(ops, name), torch.float32, device), run(FORMULAS[name], torch.float64)
    torchs = run(FORMULAS[name], torch.float32)
    check(ours, torchs, exact, "gradient")


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


OF_FORM = {
    "logits": torch.clone,
    "log_prob": lambda x: x.log_softmax(-1),
    "prob": lambda x: x.softmax(-1),
}
PEAKED = [
    *[("jsd", form, {"beta": beta}) for form in OF_FORM for beta in (0.1, 0.5, 0.9)],
    *[("fused_linear_jsd", "logits", {"beta": beta}) for beta in (0.1, 0.5)],
]


@pytest.mark.parametrize("gap", [5.0, 10.0, 15.0, 20.0])
@pytest.mark.parametrize(("name", "form", "options"), PEAKED)
def test_divergences_of_a_peak(name, form, options, gap, device):
    """Student and teacher nearly agree on one class, whose rounding would hide all others."""
    rows, places, of_form = range(ROWS), torch.randint(CLASSES, (ROWS,)), OF_FORM[form]
    pair = torch.randn(ROWS, CLASSES).expand(2, -1, -1).clone()
    pair[1] += (0.5 + torch.rand(ROWS, CLASSES)) * torch.randn(ROWS, CLASSES).sign()
    pair[:, rows, places] = pair.amax(-1) + gap

    def run(function, dtype, device="cpu"):
        student, teacher = (of_form(x).to(device, dtype, copy=True) for x in pair)
        student.requires_grad_()
        if name.startswith("fused"):
            eye = torch.eye(ROWS, dtype=dtype, device=device)
            loss = function(eye, student.T, eye, teacher.T, reduction="none", **options)
        else:
            loss = function(
                student, teacher, form=form, teacher_form=form, reduction="none", **options
            )
        (grad,) = torch.autograd.grad((loss * EACH.to(loss)).sum(), student)
        return loss.detach().cpu(), grad.cpu()

    ours, formula = run(getattr(ops, name), torch.float32, device), FORMULAS[name]
    torchs, exact = run(formula, torch.float32), run(formula, torch.float64)
    for a, b, c, what in zip(ours, torchs, exact, ("loss", "gradient"), strict=True):
        check(a, b, c, what, 16 * UNITS)  # logarithms of -10 to -25 are rounded before they differ
