"""A vocabulary split over processes gives the losses and gradients of one process."""

import pytest
import torch
import torch.distributed as dist

from liger_multi.nn import vocab_parallel as nn
from tests import harness

CASES = """
import sys, torch, torch.distributed as dist
import torch.nn.functional as F
from liger_multi.nn.vocab_parallel import (
    vocab_parallel_cross_entropy, vocab_parallel_fused_linear_cross_entropy,
    vocab_parallel_fused_linear_log_prob, vocab_range,
)
from liger_multi.testing.tolerance import excess

rank, meeting, count = int(sys.argv[1]), sys.argv[2], COUNT
device = torch.device("cpu") if KIND == "cpu" else torch.device(KIND, rank)
if KIND != "cpu":
    torch.get_device_module(device).set_device(device)
torch.set_default_device(device)
group = dist.get_default_backend_for_device(device)
dist.init_process_group(group, init_method=f"file://{meeting}", rank=rank, world_size=count)
assert dist.get_backend() == {"cpu": "gloo", "cuda": "nccl"}.get(KIND, group)
torch.manual_seed(0)
ROWS, H = 7, 6


def whole_loss(z, target, smoothing, kind, reduction, cap):
    V = z.shape[1]
    z = z if cap is None else cap * torch.tanh(z / cap)
    share = smoothing * V / (V - 1) if kind == "megatron" else smoothing
    return F.cross_entropy(z, target, label_smoothing=share, reduction=reduction)


def near(got, right, dtype):
    assert excess(got.detach(), right.detach(), dtype) <= 1, (got, right)


def near_part(got, whole, part, dtype, dim=0):
    # a part of a gradient rounds as the whole does: what cancels has the size of its largest entry
    among = whole.detach().clone()
    among.movedim(dim, 0)[part] = got.detach().to(whole).movedim(dim, 0)
    near(among, whole, dtype)


def same_everywhere(x):
    every = [torch.empty_like(x) for _ in range(count)]
    dist.all_gather(every, x.contiguous())
    assert all(torch.equal(e, x) for e in every)


def inputs(V, dtype, scale=1.0):
    g = torch.Generator(device).manual_seed(V)
    target = torch.randint(V, (ROWS,), generator=g)
    target[2] = -100
    hidden, weight, bias = (
        torch.randn(s, generator=g, dtype=torch.float64).to(dtype) * scale
        for s in ((ROWS, H), (V, H), (V,))
    )
    return hidden, weight, bias, target, slice(*vocab_range(V))


OPTIONS = [
    (0.0, "torch", "mean", None), (0.2, "torch", "sum", None), (0.2, "megatron", "mean", None),
    (0.0, "torch", "none", 5.0), (0.1, "megatron", "none", 5.0),
]
for V, dtype in ((4, torch.float32), (11, torch.float64), (12, torch.float32)):
    hidden, weight, bias, target, part = inputs(V, dtype)
    logits = hidden @ weight.T + bias
    for smoothing, kind, reduction, cap in OPTIONS:
        whole = logits.double().clone().requires_grad_()
        right = whole_loss(whole, target, smoothing, kind, reduction, cap)
        up = torch.randn(right.shape, dtype=torch.float64)
        right.backward(up)
        mine = logits[:, part].clone().requires_grad_()
        options = {"label_smoothing": smoothing, "smoothing": kind, "reduction": reduction}
        loss = vocab_parallel_cross_entropy(mine, target, vocabulary=V, softcap=cap, **options)
        loss.backward(up.to(loss))
        same_everywhere(loss.detach())
        near(loss, right, dtype)
        near_part(mine.grad, whole.grad, part, dtype, dim=1)

        if smoothing and cap is not None:
            continue
        wide = [x.double().clone().requires_grad_() for x in (hidden, weight, bias)]
        right = whole_loss(wide[0] @ wide[1].T + wide[2], target, smoothing, kind, reduction, cap)
        right.backward(up)
        ours = [x.clone().requires_grad_() for x in (hidden, weight[part], bias[part])]
        loss = vocab_parallel_fused_linear_cross_entropy(
            ours[0], ours[1], target, vocabulary=V, bias=ours[2], softcap=cap, **options
        )
        loss.backward(up.to(loss))
        near(loss, right, dtype)
        same_everywhere(ours[0].grad)
        near(ours[0].grad, wide[0].grad, dtype)
        for got, exact in zip(ours[1:], wide[1:]):
            near_part(got.grad, exact.grad, part, dtype)

    for outputs in (("log_prob",), ("entropy",), ("log_prob", "entropy", "lse")):
        wide = [x.double().clone().requires_grad_() for x in (hidden, weight)]
        z = wide[0] @ wide[1].T / 0.7
        log_p, valid = torch.log_softmax(z, -1), target != -100
        each = {
            "log_prob": log_p.gather(1, target.clamp(min=0)[:, None])[:, 0],
            "entropy": -(log_p.exp() * log_p).sum(-1), "lse": z.logsumexp(-1),
        }
        ups = {n: torch.randn(ROWS, dtype=torch.float64) for n in outputs}
        sum((each[n] * valid * ups[n]).sum() for n in outputs).backward()
        ours = [x.clone().requires_grad_() for x in (hidden, weight[part])]
        found = vocab_parallel_fused_linear_log_prob(
            *ours, target, vocabulary=V, temperature=0.7, outputs=outputs
        )
        sum((getattr(found, n) * ups[n].to(dtype)).sum() for n in outputs).backward()
        for n in outputs:
            near(getattr(found, n), each[n] * valid, dtype)
            same_everywhere(getattr(found, n).detach())
        assert all((getattr(found, n) is None) == (n not in outputs) for n in each)
        near(ours[0].grad, wide[0].grad, dtype)
        near_part(ours[1].grad, wide[1].grad, part, dtype)

# a sum that overflows fp16, and statistics of bf16 rows, are fp32
hidden, weight, bias, target, part = inputs(12, torch.bfloat16, 20.0)
loss = vocab_parallel_fused_linear_cross_entropy(hidden, weight[part], target, vocabulary=12)
assert loss.dtype == torch.float32
right = F.cross_entropy((hidden @ weight.T).float(), target)
torch.testing.assert_close(loss, right, rtol=2e-3, atol=1e-3)
ours = hidden.clone().requires_grad_()
reduced = [hidden.clone().requires_grad_() for _ in range(2)]
for leaf, whole in zip(reduced, (True, False)):
    vocab_parallel_fused_linear_cross_entropy(
        leaf, weight[part], target, vocabulary=12, reduce_hidden=whole
    ).backward()
total = reduced[1].grad.float()
dist.all_reduce(total)
torch.testing.assert_close(reduced[0].grad, total.bfloat16())

# another split, every row ignored, wrong targets
edges = [0, 9, 10, 12] if count == 3 else [0, 9, 12]
mine = torch.randn(ROWS, 12, generator=torch.Generator(device).manual_seed(5))
target = target.clamp(min=0)
loss = vocab_parallel_cross_entropy(
    mine[:, edges[rank] : edges[rank + 1]], target, vocabulary=12, start=edges[rank]
)
near(loss, F.cross_entropy(mine, target), torch.float32)
leaf = mine[:, part].clone().requires_grad_()
loss = vocab_parallel_cross_entropy(leaf, torch.full_like(target, -100), vocabulary=12)
loss.backward()
assert loss.item() == 0 and not leaf.grad.any()
for wrong in (12, -7) if KIND == "cpu" else ():  # elsewhere asking would wait for the device
    try:
        vocab_parallel_cross_entropy(leaf, target * 0 + wrong, vocabulary=12)
        raise AssertionError("no error")
    except IndexError as error:
        assert f"target {wrong} is outside of [0, 12)" in str(error)
try:
    vocab_parallel_cross_entropy(mine, target, vocabulary=12)
    raise AssertionError("no error")
except ValueError as error:
    assert "pass start=" in str(error) and "got 12 of them" in str(error)
dist.destroy_process_group()
print("done")
"""


@pytest.mark.parametrize("count", [2, 3])
def test_losses_and_gradients_equal_one_process(tmp_path, count, request):
    """Also where the classes do not divide, and where a process has none (4 classes, 3 of them)."""
    kind = harness.kind_of_ranks(request.config, count)
    body = CASES.replace("COUNT", str(count)).replace("KIND", repr(kind))
    harness.in_processes(tmp_path, body, count, kind)


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
