"""Defects found by use, or by users of other libraries: each test failed before its fix.

Of reported ones those are here that no other file holds already. Of those found by use, the last
run the row-wise operators on DTensors in two real processes.
"""

import pytest
import torch
import torch.nn.functional as F

import liger_multi
from liger_multi import ops
from liger_multi.patching import real_logits
from liger_multi.testing.tolerance import excess
from tests import harness, models

# --- found by use ---

V = models.VOCABULARY


def next_token_loss(logits, ids, **options):
    return F.cross_entropy(logits[:, :-1].reshape(-1, V), ids[:, 1:].reshape(-1), **options)


# --- patched models: logits that are computed later ---


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("how", ["block", "unpatch"])
def test_logits_outlive_the_patch(how, compiled):
    """Reading them after ``patched`` or ``unpatch`` passed our argument to the stock layer."""
    stock, ours = models.pair(num_hidden_layers=1)
    ids = models.batch()["input_ids"]
    run = torch.compile(ours, backend="eager") if compiled else ours
    if how == "block":
        with liger_multi.patched(ours):
            logits = run(input_ids=ids).logits
    else:
        liger_multi.patch(ours)
        logits = run(input_ids=ids).logits
        liger_multi.unpatch(ours)
    assert type(ours.lm_head) is torch.nn.Linear
    right = stock(input_ids=ids).logits
    loss, expected = next_token_loss(logits, ids), next_token_loss(right, ids)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    models.assert_same_gradients(models.gradients(ours), models.gradients(stock))
    with torch.no_grad():
        torch.testing.assert_close(logits + 0, right, rtol=1e-4, atol=1e-4)


def test_functional_call_logits_are_those_of_the_given_weights():
    """The loss, and its gradient, were silently those of the module's own weights."""
    stock, ours = models.pair(patching={})
    ids = models.batch()["input_ids"]
    losses, gradients = [], []
    for model in (stock, ours):
        weights = {n: (p.detach() * 1.1).requires_grad_() for n, p in model.named_parameters()}
        logits = torch.func.functional_call(model, weights, kwargs={"input_ids": ids}).logits
        losses.append(next_token_loss(logits, ids))
        gradients.append(torch.autograd.grad(losses[-1], weights["lm_head.weight"]))
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-5, atol=0)
    models.assert_same_gradients(gradients[1], gradients[0])


@pytest.mark.parametrize("how", ["parameter", "data"])
def test_logits_of_replaced_weights_are_the_old_ones_or_raise(how):
    stock, ours = models.pair(patching={})
    ids = models.batch()["input_ids"]
    expected, logits = stock(input_ids=ids).logits, ours(input_ids=ids).logits
    if how == "parameter":
        ours.lm_head.weight = torch.nn.Parameter(ours.lm_head.weight.detach() * 2)
    else:
        ours.lm_head.weight.data = ours.lm_head.weight.data * 2
    try:
        got = real_logits(logits + 0)
    except RuntimeError as error:
        assert "modified" in str(error) or "replaced" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_logits_of_a_compiled_model():
    """Arithmetic on them, and under autocast the dtype of that."""
    stock, ours = models.pair(patching={})
    inputs = models.graph_batch(labels=False)
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    expected = stock(**inputs).logits
    for act in (abs, lambda z: 2**z, lambda z: z // 2, lambda z: z % 2):
        torch.testing.assert_close(
            act(compiled(**inputs).logits) * 0, act(expected) * 0, rtol=0, atol=0
        )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = compiled(**inputs).logits
    assert logits.dtype == (logits + 0).dtype == torch.bfloat16


def test_real_logits_with_our_loss_can_be_formatted():
    _, ours = models.pair(patching={"fused_linear_cross_entropy": False, "cross_entropy": True})
    logits = ours(input_ids=models.batch()["input_ids"]).logits
    assert f"{logits[0, 0, 0]:.3f}" == f"{logits[0, 0, 0].item():.3f}"


# --- operators ---


def test_fp16_weight_gradient_of_one_chunk_does_not_overflow(device):
    """A sum over rows reached 81920 in fp16 before it was divided by the rows."""
    hidden = torch.full((2048, 1024), 40.0, device=device).half()
    weight = torch.zeros(16, 1024, device=device).half().requires_grad_()
    target = torch.zeros(2048, dtype=torch.int64, device=device)
    (got,) = torch.autograd.grad(ops.fused_linear_cross_entropy(hidden, weight, target), weight)
    wide = weight.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(F.cross_entropy(hidden.double() @ wide.t(), target), wide)
    assert excess(got, expected, torch.float16) <= 1


def test_smoothed_and_weighted_loss_under_autocast_stays_fp32():
    """Eager references run under the caller's autocast, which took ``z @ w`` to bf16."""
    z, w = torch.randn(8, 300) + 60, torch.rand(300) + 0.5
    t = torch.randint(300, (8,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = ops.cross_entropy(z, t, w, label_smoothing=0.5)
    expected = F.cross_entropy(z.double(), t, w.double(), label_smoothing=0.5)
    assert excess(got, expected, torch.float32) <= 1


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_backward_called_under_autocast(reduction):
    """The caller's autocast took one product of the reference to bf16, which raised."""
    h, w = (torch.randn(n, 8, requires_grad=True) for n in (6, 11))
    target = torch.tensor([0, 1, -100, 3, 4, 5])
    loss = ops.fused_linear_cross_entropy(h, w, target, reduction=reduction, chunk=2).sum()
    expected = torch.autograd.grad(loss, (h, w), retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.autograd.grad(loss, (h, w))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# --- configuration ---


def test_a_section_of_a_device_binds_compiled_swiglu_too():
    """Tracing asked only for choices of any device, and ran what was bound elsewhere."""
    liger_multi.configure({"devices": {"cpu": {"ops": {"swiglu": "cuda"}}}})
    x = torch.randn(2, 4)
    with pytest.raises(Exception, match="cuda"):
        ops.swiglu(x, x + 1)
    with pytest.raises(Exception, match="cuda"):
        torch.compile(ops.swiglu, backend="eager", fullgraph=True)(x, x + 1)


def test_auto_in_words_is_auto():
    """``default: auto`` in a file turned the traced form of swiglu off."""
    from liger_multi.dispatch.resolve import automatic

    assert automatic("swiglu")
    liger_multi.configure({"default": "auto", "ops": {"swiglu": "auto"}})
    assert automatic("swiglu")


# --- DTensors ---

DTENSORS = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.tensor import (
    DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
)
from liger_multi import ops
from liger_multi.patching import real_logits

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
x, up, w, dy = torch.randn(4, 5, 8), torch.randn(4, 5, 8), torch.randn(8), torch.randn(4, 5, 8)

def leaf(t, place):
    return distribute_tensor(t, mesh, [place]).requires_grad_()

def plain(t):
    return t.clone().requires_grad_()

def same(parts, whole):
    for part, full in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.full_tensor(), full, rtol=1e-5, atol=1e-5)

def compare(op, tensors, places, row, out_like):
    ours, stock = [leaf(t, p) for t, p in zip(tensors, places)], [plain(t) for t in tensors]
    y, right = op(*ours), op(*stock)
    assert isinstance(y, DTensor) and y.placements == (row,), (y, row)
    upstream = dy[..., : right.shape[-1]].contiguous()
    same([y], [right])
    grads = torch.autograd.grad(y, ours, distribute_tensor(upstream, mesh, [row]))
    same(grads, torch.autograd.grad(right, stock, upstream))
    return y, grads

for row in (Shard(0), Shard(1), Replicate()):
    y, (dx, dw) = compare(ops.rms_norm, (x, w), (row, Replicate()), row, x)
    assert dx.placements == (row,)
    assert dw.placements == (Replicate() if row == Replicate() else Partial(),)
    if row != Replicate():  # rows stay where they are: nobody gathers
        assert y.to_local().numel() < x.numel()
    compare(ops.rms_norm, (x,), (row,), row, x)
    compare(ops.layer_norm, (x, w, w + 1), (row, Replicate(), Replicate()), row, x)
    for pick in (lambda out: out.y, lambda out: out.new_residual, sum):
        both = lambda *tensors: pick(ops.fused_add_rms_norm(*tensors))
        compare(both, (x, up, w), (row, row, Replicate()), row, x)
    compare(ops.swiglu, (x, up), (row, row), row, x)
    compare(ops.swiglu_packed, (x,), (row,), row, x)
    compare(ops.geglu, (x, up), (row, row), row, x)
    compare(ops.geglu_packed, (x,), (row,), row, x)
    compare(ops.softmax, (x,), (row,), row, x)
    compare(ops.sparsemax, (x,), (row,), row, x)

uneven = torch.randn(3, 8)
same([ops.rms_norm(leaf(uneven, Shard(0)), leaf(w, Replicate()))], [ops.rms_norm(uneven, w)])
sums = DTensor.from_local(x / 2, mesh, [Partial()])
same([ops.rms_norm(sums), ops.swiglu(sums, sums)], [ops.rms_norm(x), ops.swiglu(x, x)])

REFUSED = (
    (ops.rms_norm, (leaf(x, Shard(2)),), "x is sharded on axis 2 of 3"),
    (ops.rms_norm, (leaf(x, Shard(-1)),), "x is sharded on axis"),
    (ops.rms_norm, (leaf(x, Shard(0)), leaf(w, Shard(0))), "weight is sharded on axis 0 of 1"),
    (ops.layer_norm, (leaf(x, Shard(2)),), "x is sharded on axis 2 of 3"),
    (ops.fused_add_rms_norm, (leaf(x, Shard(0)), leaf(up, Shard(2))), "residual is sharded on"),
    (ops.swiglu, (leaf(x, Shard(2)), leaf(up, Shard(2))), "gate is sharded on axis 2 of 3"),
    (ops.swiglu_packed, (leaf(x, Shard(2)),), "gate_up is sharded on axis 2 of 3"),
    (ops.geglu, (leaf(x, Shard(2)), leaf(up, Shard(2))), "gate is sharded on axis 2 of 3"),
    (ops.softmax, (leaf(x, Shard(2)),), "x is sharded on axis 2 of 3"),
    (ops.rope, (leaf(x, Shard(1)), leaf(up, Shard(1)), x[:, 0], x[:, 0]), "does not take DTensors"),
    (ops.cross_entropy, (leaf(x, Shard(0)), torch.zeros(4, 5).long()), "does not take DTensors"),
)
for op, tensors, message in REFUSED:
    try:
        op(*tensors)
    except NotImplementedError as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"{op.__name__} took {message}")
dist.destroy_process_group()
print("done")
"""


def test_dtensors_in_two_processes(tmp_path):
    """Rows sharded on any leading axis run locally and right; a sharded last axis is refused."""
    harness.in_two_processes(tmp_path, DTENSORS)


# --- reported by users of other libraries ---


def partition(head, library="deepspeed.runtime.zero"):
    """As ZeRO-3 and FSDP do: hooks gather the weight for a call of its module and free it after."""
    full = head.weight.data

    def gather(module, args):
        module.weight.data = full

    def free(module, args, output):
        module.weight.data = full.new_empty(0)

    gather.__module__ = free.__module__ = library
    head.register_forward_pre_hook(gather)
    head.register_forward_hook(free)
    free(head, None, None)
    return full


@pytest.mark.parametrize("library", ["deepspeed.runtime.zero", "torch.distributed.fsdp"])
@pytest.mark.parametrize("labels", [True, False])
def test_a_partitioned_head_is_gathered_for_the_loss(labels, library):
    """The loss reached for ``lm_head.weight``, which has no elements outside of the head's call."""
    stock, ours = models.pair(patching={"strict": True})
    partition(ours.lm_head, library)
    batch = models.batch()
    ids, losses, gradients = batch["input_ids"], [], []
    for model in (stock, ours):
        if labels:
            loss = model(**batch).loss
        else:
            logits = model(input_ids=ids).logits
            loss = F.cross_entropy(logits.view(-1, models.VOCABULARY), ids.view(-1))
        losses.append(loss)
        gradients.append(torch.autograd.grad(loss, model.model.norm.weight))
    torch.testing.assert_close(losses[1], losses[0])
    models.assert_same_gradients(gradients[1], gradients[0])


@pytest.mark.parametrize("run", ["labels", "logits", "evaluation", "compiled"])
def test_a_head_without_elements_is_named(run):
    """Nobody gathers: not a ZeroDivisionError or a size mismatch, but what to do."""
    _, ours = models.pair(num_hidden_layers=1, patching={})
    ours.lm_head.weight = torch.nn.Parameter(torch.empty(0))
    batch = models.batch()
    if run == "logits":
        del batch["labels"]
    model = torch.compile(ours, backend="eager") if run == "compiled" else ours
    with (
        torch.set_grad_enabled(run != "evaluation"),
        pytest.raises(RuntimeError, match=r"no elements, shape \(0,\): DeepSpeed ZeRO-3 has"),
    ):
        model(**batch).loss  # noqa: B018


@pytest.mark.parametrize(("rows", "vocabulary"), [(3, 262144), (65537, 5)])
def test_many_rows_and_classes_in_the_fused_loss(rows, vocabulary, device):
    """Grids end at 65 535 and blocks at 65 536; rows and vocabularies do not."""
    hidden = torch.randn(rows, 4).to(device)
    weight = torch.randn(vocabulary, 4).to(device).requires_grad_()
    target = torch.randint(vocabulary, (rows,))
    target[-1] = vocabulary - 1
    target = target.to(device)
    # one product of all rows: chunks are another test's
    loss = ops.fused_linear_cross_entropy(hidden, weight, target, reduction="sum", chunk=rows)
    # of the weight alone: a thin fp32 product over 262 144 classes is not that exact in PyTorch
    (got,) = torch.autograd.grad(loss, weight)
    wide = weight.detach().double().requires_grad_()
    expected = F.cross_entropy(hidden.double() @ wide.t(), target, reduction="sum")
    assert excess(loss.detach(), expected.detach(), torch.float32) <= 1
    assert excess(got, torch.autograd.grad(expected, wide)[0], torch.float32) <= 1


SEQUENCE_PARALLEL = """
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from transformers.models.llama.modeling_llama import LlamaRMSNorm
import liger_multi

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
x, weight, dy = torch.randn(2, 6, 8), torch.randn(8), torch.randn(2, 6, 8)

def norm(patched):
    made = nn.Sequential(LlamaRMSNorm(8))
    made[0].weight.data.copy_(weight)
    if patched:
        assert liger_multi.patch(made).count("rms_norm") == 1
    return made

stock, right = norm(False), x.clone().requires_grad_()
stock(right).backward(dy)

# the sequence is sharded: every rank has its own rows, and the weight's gradient is their sum
ours = parallelize_module(norm(True), mesh, {"0": SequenceParallel()})
part = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
y = ours(part)
assert y.placements == (Shard(1),), y.placements
assert y.to_local().shape == (2, 3, 8), "nobody gathers rows"
y.backward(distribute_tensor(dy, mesh, [Shard(1)]))
torch.testing.assert_close(part.grad.full_tensor(), right.grad)
torch.testing.assert_close(ours[0].weight.grad.full_tensor(), stock[0].weight.grad)

# the hidden axis is sharded: the mean of a part is not the mean of the row
local = distribute_tensor(x, mesh, [Shard(2)]).to_local()

def alone(patched):
    made = norm(patched)
    made[0].weight = nn.Parameter(distribute_tensor(weight, mesh, [Replicate()]))
    return made

def outcome(module, x):
    return module(x).full_tensor()

for axis in (2, -1):
    wide = DTensor.from_local(local, mesh, [Shard(axis)], run_check=False)
    torch.testing.assert_close(outcome(alone(True), wide), outcome(alone(False), wide))
    torch.testing.assert_close(ours(wide).full_tensor(), stock(x).detach())
    try:
        liger_multi.ops.rms_norm(wide, alone(True)[0].weight)
    except NotImplementedError as error:
        assert "rms_norm: x is sharded on axis" in str(error), error
        assert "redistribute it to Replicate()" in str(error), error
    else:
        raise AssertionError(f"took a hidden axis sharded by Shard({axis})")
dist.destroy_process_group()
print("done")
"""


def test_sequence_parallel_norms_in_two_processes(tmp_path):
    """Rows stay on their rank; a sharded hidden axis is right in a model, and no operator's."""
    harness.in_two_processes(tmp_path, SEQUENCE_PARALLEL)
