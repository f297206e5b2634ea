"""Defects that users of other libraries reported, where no other file holds them already.

``ci/regressions.py`` lists every case with its threads, its tests and what makes them fail.
"""

import pytest
import torch
import torch.nn.functional as F

import liger_multi
from liger_multi import ops
from liger_multi.testing.tolerance import excess
from tests import harness, models


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
    stock, ours = models.pair()
    liger_multi.patch(ours, strict=True)
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
    torch._dynamo.reset()
    _, ours = models.pair(num_hidden_layers=1)
    liger_multi.patch(ours)
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
    right = F.cross_entropy(hidden.double() @ wide.t(), target, reduction="sum")
    assert excess(loss.detach(), right.detach(), torch.float32) <= 1
    assert excess(got, torch.autograd.grad(right, wide)[0], torch.float32) <= 1


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
