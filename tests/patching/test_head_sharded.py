"""Heads whose vocabulary is sharded over processes: losses equal one process."""

import pytest

pytest.importorskip("transformers")

from tests import harness

# --- tensor parallel models ---

CASES = """
import copy, os, sys, torch, torch.distributed as dist, transformers
import torch.nn.functional as F
from tests import models
rank, meeting = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import liger_multi
from liger_multi.nn import vocab_parallel
from liger_multi.patching import real_logits

mesh = init_device_mesh("cpu", (2,))
fused = []
stock_loss = vocab_parallel.vocab_parallel_fused_linear_cross_entropy


def spy(*args, **kwargs):
    fused.append(kwargs)
    return stock_loss(*args, **kwargs)


vocab_parallel.vocab_parallel_fused_linear_cross_entropy = spy


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def same(one, other, loss, wanted):
    torch.testing.assert_close(whole(loss), wanted, rtol=2e-5, atol=1e-6)
    wanted.backward()
    loss.backward()
    models.assert_same_gradients(models.gradients(other), models.gradients(one))
    for m in (one, other):
        m.zero_grad()


def colwise(model, **layouts):
    return parallelize_module(model, mesh, {"lm_head": ColwiseParallel(**layouts)})


def with_hugging_face_s_plan(kind):
    one = models.build(kind, vocab_size=224)
    folder = f"{meeting}-{kind}"
    one.save_pretrained(folder)  # by the first process
    dist.barrier()
    split = type(one).from_pretrained(folder, tp_plan="auto").train()
    report = liger_multi.patch(split)
    assert report.count("fused_linear_cross_entropy") == 1, report
    sharded = hasattr(split.lm_head.weight, "to_local")  # transformers 5.0 leaves it whole
    assert sharded or transformers.__version__.startswith("5.0.")
    if sharded:
        assert split.lm_head.weight.to_local().shape[0] == 112
    batch = models.batch()
    fused.clear()
    same(one, split, split(**batch).loss, one(**batch).loss)
    assert len(fused) == sharded
    # evaluation; what else is read comes from the stock call; unpatched logits as well
    with torch.no_grad():
        got = split(**batch)
        wanted = one(**batch)
        torch.testing.assert_close(got.loss, wanted.loss)
        assert len(fused) == 2 * sharded
        torch.testing.assert_close(got.logits.argmax(-1), wanted.logits.argmax(-1))
    out = split(**batch)
    assert out.logits.shape == wanted.logits.shape
    liger_multi.unpatch(split)
    torch.testing.assert_close(real_logits(out.logits), wanted.logits, rtol=1e-4, atol=1e-4)
    assert type(split.lm_head) is torch.nn.Linear
    same(one, split, split(**batch).loss, one(**batch).loss)


PLANS
for layouts in (
    {"output_layouts": Replicate()},
    {"output_layouts": Shard(-1), "use_local_output": False},
):
    one = models.build()
    split = colwise(copy.deepcopy(one), **layouts)
    assert liger_multi.patch(split).count("fused_linear_cross_entropy") == 1
    batch = models.batch()
    ids, labels = batch["input_ids"], batch["labels"].view(-1)
    fused.clear()
    same(one, split, split(**batch).loss, one(**batch).loss)
    losses = []
    for model in (split, one):
        z = model(input_ids=ids).logits.float().view(-1, models.VOCABULARY)
        losses.append(F.cross_entropy(z * 0.5, labels, label_smoothing=0.1, reduction="sum"))
    same(one, split, *losses)
    losses = []
    for model in (split, one):
        z = model(input_ids=ids).logits.float().view(-1, models.VOCABULARY)
        losses.append(F.cross_entropy(5 * torch.tanh(0.5 * z / 5), labels))
    same(one, split, *losses)
    assert len(fused) == 3
    logits = split(input_ids=ids).logits
    assert isinstance(real_logits(logits), DTensor) == (not layouts.get("use_local_output", True))
    torch.testing.assert_close(
        whole(real_logits(logits)), one(input_ids=ids).logits, rtol=1e-4, atol=1e-4
    )
    if "use_local_output" not in layouts:  # classes of other costs: real logits
        costs = torch.rand(models.VOCABULARY) + 0.5
        losses = [
            F.cross_entropy(m(input_ids=ids).logits.view(-1, models.VOCABULARY), labels, costs)
            for m in (split, one)
        ]
        same(one, split, *losses)
    assert len(fused) == 3

# left alone, with the reason
split = colwise(models.build())
(left,) = [s for s in liger_multi.patch(split).skipped if "cross_entropy" in s.op]
assert "this process's part of the logits" in left.reason, left
assert type(split.lm_head) is torch.nn.Linear
split = colwise(models.build(), input_layouts=Shard(1), output_layouts=Replicate())
(left,) = [s for s in liger_multi.patch(split).skipped if "cross_entropy" in s.op]
assert "not all processes have all rows" in left.reason, left
split = colwise(models.build(), output_layouts=Replicate())
split.lm_head.register_forward_hook(lambda module, args, output: output)
(left,) = [s for s in liger_multi.patch(split).skipped if "cross_entropy" in s.op]
assert "in a way that is not known" in left.reason, left
dist.destroy_process_group()
print("done")
"""


def run(folder, plans):
    body = CASES
    harness.in_two_processes(folder, body.replace("PLANS", plans))


@pytest.mark.slow
def test_losses_of_sharded_heads_equal_one_process(tmp_path):
    run(tmp_path, 'with_hugging_face_s_plan("llama")')


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gemma2", "qwen3", "granite"])
def test_more_models_with_their_own_plans(tmp_path, model_type):
    run(tmp_path, f'with_hugging_face_s_plan("{model_type}")')
