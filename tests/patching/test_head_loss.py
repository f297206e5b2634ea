"""Losses of patched models, lazy logits and their options; every architecture is in the matrix.

Heads of tensor parallel models are equal to one process, and by the losses of their shards.
"""

import copy
import functools
import inspect
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

transformers = pytest.importorskip("transformers")


from liger_multi import ops
from liger_multi.patching import patch, patched, real_logits, unpatch
from liger_multi.patching.head import loss as heads_of_losses
from liger_multi.patching.head.protocol import LazyLogits
from tests import harness
from tests.comparing import recorded
from tests.models import (
    KINDS,
    VOCABULARY,
    Widest,
    assert_same_training,
    batch,
    build,
    pair,
)


@pytest.fixture(params=KINDS)
def model_type(request):
    return request.param


def loss_of(**inputs):
    return lambda model: model(**inputs).loss


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
@pytest.mark.parametrize("tied", [False, True])
def test_tied_and_untied_heads(model_type, tied, device, fused):
    stock, ours = pair(model_type, device, tied=tied, patching={"strict": True})
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied
    assert_same_training(stock, ours, loss_of(**batch(device=device)))
    assert fused.count == 1


def test_autocast_is_remembered_outside_of_it(device):
    stock, ours = pair("llama", device, patching={})
    ids = batch(device=device)["input_ids"]
    logits = []
    for model in (stock, ours):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            out = model(input_ids=ids)
        logits.append(real_logits(out.logits))
    assert logits[1].dtype == torch.bfloat16
    torch.testing.assert_close(
        logits[1], logits[0], rtol=0, atol=0 if device.type == "cpu" else 0.1
    )


def test_fp16_with_a_loss_scale(device, fused):
    stock, ours = pair("llama", device, torch.float16, patching={})
    inputs = batch(device=device)
    scale = 2.0**12
    assert_same_training(stock, ours, lambda m: m(**inputs).loss * scale, rtol=1e-2)
    assert fused.count == 1
    assert all(p.grad.isfinite().all() for p in ours.parameters())
    assert ours.lm_head.weight.grad.abs().max() > 1  # the scale arrived


@pytest.mark.parametrize("read_first", [False, True])
def test_custom_loss_on_logits(read_first, device, fused):
    """Logits that were read are real, and a loss of them is PyTorch's."""
    stock, ours = pair("llama", device, patching={})
    inputs = batch(device=device)

    def run(model):
        logits = model(input_ids=inputs["input_ids"]).logits
        likely = logits.softmax(-1).pow(2).mean() if read_first else 0.0
        loss = F.cross_entropy(logits[:, 0], inputs["labels"][:, 5])
        return loss + (likely if read_first else logits.softmax(-1).pow(2).mean())

    assert_same_training(stock, ours, run)
    assert fused.count == (not read_first)


def test_no_vocabulary_wide_tensor_of_all_rows(model_type):
    ours = build(model_type, patching={"fused_linear_cross_entropy": {"chunk": 4}})
    inputs = batch(rows=4, length=12)
    with Widest() as widest:
        ours(**inputs).loss.backward()
    assert widest.rows == 4
    unpatch(ours)
    with Widest() as widest:
        ours(**inputs).loss.backward()
    assert widest.rows == 4 * 12


def test_all_targets_ignored_is_zero_and_connected(device):
    ours = build("llama").to(device)
    patch(ours)
    inputs = batch(device=device)
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    loss = ours(**inputs).loss
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in ours.parameters())


def test_frozen_head_allocates_no_weight_gradient():
    stock, ours = pair("llama")
    for model in (stock, ours):
        model.lm_head.weight.requires_grad_(False)
        model.model.embed_tokens.weight.requires_grad_(False)  # of the same shape
    patch(ours, fused_linear_cross_entropy={"chunk": 4})
    inputs = batch()
    shape = tuple(ours.lm_head.weight.shape)
    with Widest() as widest:
        ours(**inputs).loss.backward()
    assert shape not in widest.shapes
    assert ours.lm_head.weight.grad is None
    assert_same_training(stock, ours, loss_of(**inputs))


def test_head_alone_is_trained():
    stock, ours = pair("llama")
    for model in (stock, ours):
        model.model.requires_grad_(False)
    patch(ours)
    assert_same_training(stock, ours, loss_of(**batch()))


def test_evaluation_allocates_no_gradients_and_no_logits():
    stock, ours = pair("llama", patching={"fused_linear_cross_entropy": {"chunk": 4}})
    inputs = batch(rows=4)
    with torch.no_grad(), Widest() as widest:
        out = ours.eval()(**inputs)
        assert not out.loss.requires_grad
    assert widest.rows == 4
    assert tuple(ours.lm_head.weight.shape) not in widest.shapes
    with torch.no_grad():
        expected = stock.eval()(**inputs)
        torch.testing.assert_close(out.loss, expected.loss)
        torch.testing.assert_close(real_logits(out.logits), expected.logits, rtol=1e-5, atol=1e-5)
    assert not out.logits.requires_grad


def test_inference_mode_gives_ordinary_logits():
    stock, ours = pair("llama", patching={})
    with torch.inference_mode():
        expected, got = (m(**batch()) for m in (stock, ours))
        assert type(got.logits) is torch.Tensor
        torch.testing.assert_close(got.loss, expected.loss)


def test_z_loss_is_added_where_gradients_are():
    stock, ours = pair(
        "llama", patching={"fused_linear_cross_entropy": {"z_loss": 0.01, "chunk": 4}}
    )
    inputs = batch()

    def with_z_loss(model):
        out = model(**inputs)
        if model is ours:
            return out.loss
        lse = out.logits[:, :-1].logsumexp(-1)
        return out.loss + 0.01 * lse[inputs["labels"][:, 1:] != -100].pow(2).mean()

    assert_same_training(stock, ours, with_z_loss)
    with torch.no_grad():
        torch.testing.assert_close(ours(**inputs).loss, stock(**inputs).loss)


def test_z_loss_survives_real_logits():
    ours = build("llama", patching={"fused_linear_cross_entropy": {"z_loss": 0.01}})
    inputs = batch()
    labels = inputs["labels"].view(-1)
    logits = ours(input_ids=inputs["input_ids"]).logits.view(-1, VOCABULARY)
    fused = F.cross_entropy(logits, labels)
    for real in (
        real_logits(logits) + 0.0,
        logits * torch.tensor(1.0),
        real_logits(logits).float(),
    ):
        torch.testing.assert_close(F.cross_entropy(real, labels), fused)
    assert fused > F.cross_entropy(real_logits(logits).detach().clone(), labels) + 0.01


def test_softcap_and_scale_are_part_of_the_fused_loss(fused):
    stock, ours = pair("llama", patching={})
    inputs = batch()

    def run(model):
        logits = model(input_ids=inputs["input_ids"]).logits * 0.5
        logits = torch.tanh(logits / 5.0) * 5.0
        return F.cross_entropy(
            logits.float().view(-1, VOCABULARY), inputs["labels"].view(-1), label_smoothing=0.1
        )

    assert_same_training(stock, ours, run)
    assert fused.keywords[0]["softcap"] == 5.0
    assert fused.keywords[0]["logit_scale"] == 0.5


def test_real_logits_with_our_cross_entropy(model_type, fused, monkeypatch):
    calls = recorded(monkeypatch, ops, "cross_entropy")
    stock, ours = pair(
        model_type, patching={"fused_linear_cross_entropy": False, "cross_entropy": True}
    )
    assert_same_training(stock, ours, loss_of(**batch()))
    assert (len(calls), fused.count) == (1, 0)
    out = ours(**batch())
    assert not isinstance(out.logits, LazyLogits)
    assert type(out.logits.softmax(-1)) is torch.Tensor


def test_both_losses_fuse_where_they_can(fused, monkeypatch):
    calls = recorded(monkeypatch, ops, "cross_entropy")
    stock, ours = pair("llama", patching={"cross_entropy": True})
    inputs = batch()
    assert_same_training(stock, ours, loss_of(**inputs))
    assert (len(calls), fused.count) == (0, 1)

    def scaled_by_a_tensor(model):
        logits = model(input_ids=inputs["input_ids"]).logits * torch.tensor(0.5)
        return F.cross_entropy(logits.view(-1, VOCABULARY), inputs["labels"].view(-1))

    assert_same_training(stock, ours, scaled_by_a_tensor)
    assert (len(calls), fused.count) == (1, 1)


def test_a_backend_binds_the_calls_of_the_instance(monkeypatch):
    from liger_multi.dispatch import config

    observed = []
    current = config.current
    ours = build(
        "llama",
        patching={
            "rms_norm": "reference",
            "swiglu": {"backend": "reference"},
            "fused_linear_cross_entropy": "reference",
        },
    )
    for name in ("rms_norm", "gated_mlp", "fused_linear_cross_entropy"):
        stock_op = getattr(ops, name)

        def spied(*args, name=name, stock_op=stock_op, **kwargs):
            observed.append((name, current().choice_in(name, ("cuda", ""))))
            return stock_op(*args, **kwargs)

        monkeypatch.setattr(ops, name, spied)
    ours(**batch()).loss.backward()
    assert {name for name, _ in observed} == {"rms_norm", "gated_mlp", "fused_linear_cross_entropy"}
    assert all("reference" in str(choice) for _, choice in observed)
    assert "reference" not in str(current().choice_in("rms_norm", ("cuda", "")))


# Output embeddings: which modules are one, and which of them stay as they are.


# ruff: noqa: E402  (what needs transformers is imported after the skip)


def hooked(model):
    model.lm_head._is_hooked = True  # transformers' mark on modules of a tensor parallel model
    model.lm_head.register_forward_hook(lambda module, args, output: output)


def replaced(model):
    model.lm_head.forward = functools.partial(nn.Linear.forward, model.lm_head)


UNFIT = {
    "tensor parallel, but its weight is no DTensor": hooked,
    "other code": replaced,
    "Sequential, not a plain": lambda m: setattr(m, "lm_head", nn.Sequential(nn.Linear(32, 223))),
    "adapter": lambda m: setattr(m.lm_head, "base_layer", nn.Linear(2, 2)),
}


@pytest.mark.parametrize("reason", UNFIT)
def test_unsupported_heads_are_skipped(reason):
    model = build()
    UNFIT[reason](model)
    module_class = type(model.lm_head)
    report = patch(model)
    assert type(model.lm_head) is module_class
    assert reason in report.skipped[0].reason
    assert model(**batch()).loss is not None


class Talker(nn.Module):
    """A model with a head of its own, and another model with one in it."""

    def __init__(self, inner=None, head="lm_head"):
        super().__init__()
        self.name = head
        setattr(self, head, nn.Linear(8, 30, bias=False))
        self.inner = inner

    def get_output_embeddings(self):
        return getattr(self, self.name)


def test_output_embeddings_of_inner_models_are_named():
    model = Talker(Talker(head="codec_head"))
    report = patch(model, strict=True)
    (skipped,) = [s for s in report.skipped if s.op == "fused_linear_cross_entropy"]
    assert skipped.path == "inner.codec_head"
    assert "liger_multi.patch(model.inner) patches it" in skipped.reason
    assert [e.path for e in report.entries] == ["lm_head"]
    assert [e.path for e in patch(model.inner).entries] == ["codec_head"]
    assert "fused_linear_cross_entropy" not in {s.op for s in patch(model).skipped}


def test_tied_embeddings_are_not_reported():
    inner = Talker()
    model = Talker(inner)
    inner.lm_head = model.lm_head
    assert "fused_linear_cross_entropy" not in {s.op for s in patch(model).skipped}


# --- heads ---


class Quantized(nn.Linear):
    """As bitsandbytes has them: a linear layer with a forward of its own."""

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


def test_quantized_heads_keep_their_own_call():
    stock = build("llama", tied=False)
    head = Quantized(32, stock.lm_head.out_features, bias=False)
    head.weight = nn.Parameter((stock.lm_head.weight * 8).to(torch.int8), requires_grad=False)
    stock.lm_head = head
    ours = copy.deepcopy(stock)
    assert "not a plain linear layer" in str(patch(ours))
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)


def test_report_of_heads_in_8_bits():
    model = build("llama", tied=False)
    weight = model.lm_head.weight.detach().to(torch.float8_e4m3fn)
    model.lm_head.weight = nn.Parameter(weight, requires_grad=False)
    assert "is stored as torch.float8_e4m3fn" in str(patch(model))
    assert type(model.lm_head) is nn.Linear


@pytest.mark.parametrize("tied", [False, True])
def test_a_resized_vocabulary_keeps_the_fused_head(tied):
    stock, ours = pair(tied=tied, patching={"fused_linear_cross_entropy": {"chunk": 5}})
    for model in (stock, ours):
        torch.manual_seed(0)
        model.resize_token_embeddings(240, mean_resizing=False)
    stock.load_state_dict(ours.state_dict())
    assert type(stock.lm_head) is nn.Linear
    assert ours.lm_head._liger_multi_swap.settings.fused.chunk == 5
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)
    unpatch(ours)
    assert type(ours.lm_head) is nn.Linear


# --- PyTorch's loss of hidden states and a weight ---

linear_loss = pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="this PyTorch has no linear_cross_entropy"
)


def of_weight(model, options=None, detached=False, **how):
    """The loss of a training loop that never calls the head."""
    data = batch()
    hidden = model.model(input_ids=data["input_ids"]).last_hidden_state
    rows, target = hidden[:, :-1].flatten(0, 1), data["labels"][:, 1:].flatten()
    target = target.masked_fill(target == -100, how.get("ignore_index", -100))
    weight = model.lm_head.weight
    return F.linear_cross_entropy(
        rows, weight.detach() if detached else weight, target, options=options, **how
    )


@linear_loss
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"reduction": "sum"},
        {"label_smoothing": 0.1},
        {"weight": torch.arange(1.0, VOCABULARY + 1)},
        {"ignore_index": -100},
        {"ignore_index": 7},
        {"chunks": True, "ignore_index": 7},
    ],
    ids=lambda how: "-".join(how) or "plain",
)
@pytest.mark.parametrize("tied", [False, True])
def test_linear_cross_entropy_of_the_heads_weight(fused, how, tied):
    stock, ours = pair(tied=tied, patching={"fused_linear_cross_entropy": {"chunk": 5}})
    if how.pop("chunks", False):
        how["options"] = nn.LinearCrossEntropyOptions()
    assert_same_training(stock, ours, lambda m: of_weight(m, **how))
    by_us = how.get("ignore_index") != 7 or "options" in how
    assert fused.count == by_us
    if by_us:
        assert fused.keywords[0]["chunk"] == 5


@linear_loss
def test_linear_cross_entropy_of_copies_and_others(fused):
    stock, ours = pair(patching={})
    of_weight(stock)
    of_weight(ours, detached=True)  # another tensor
    assert fused.count == 0
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_same_training(stock, copied, of_weight)
    assert fused.count == 2
    with torch.no_grad():
        torch.testing.assert_close(of_weight(ours), of_weight(stock))
        assert fused.count == 3
    losses = [of_weight(m, reduction="none") for m in (stock, ours)]
    torch.testing.assert_close(*losses)
    with torch.autocast("cpu", torch.bfloat16):
        assert of_weight(ours).dtype == of_weight(stock).dtype == torch.float32
    unpatch(ours)
    fused.count = 0
    of_weight(ours)
    patch(ours, fused_linear_cross_entropy=False)
    of_weight(ours)
    assert fused.count == 0


@linear_loss
def test_linear_cross_entropy_is_pytorchs_without_patched_heads(monkeypatch):
    """Its function comes back with the last head; one that somebody put around ours stays."""
    stock = inspect.unwrap(F.linear_cross_entropy)
    monkeypatch.setattr(F, "linear_cross_entropy", stock)
    monkeypatch.setattr(heads_of_losses, "_heads", weakref.WeakSet())
    models = [build(patching={}), build(patching={})]
    ours = F.linear_cross_entropy
    assert ours is not stock
    with pytest.raises(TypeError, match=r"linear_cross_entropy.* 'bogus'"):
        of_weight(models[0], bogus=1)
    unpatch(models[0])
    assert F.linear_cross_entropy is ours
    unpatch(models[1])
    assert F.linear_cross_entropy is stock
    with patched(models[0]):
        theirs = functools.wraps(F.linear_cross_entropy)(lambda *a, **k: None)
        monkeypatch.setattr(F, "linear_cross_entropy", theirs)
    assert F.linear_cross_entropy is theirs


@linear_loss
def test_linear_cross_entropy_under_compile(fused):
    stock, ours = pair(patching={})
    h, t = torch.randn(12, stock.config.hidden_size), torch.arange(12)
    weight = ours.lm_head.weight
    compiled = torch.compile(
        lambda h, w: F.linear_cross_entropy(h, w, t), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(h, weight), F.linear_cross_entropy(h, weight.detach(), t))
    assert fused.count == 0, "a graph keeps PyTorch's function"


class OwnLoss(nn.Module):
    """A model whose head is within PyTorch's loss module."""

    def __init__(self, **options):
        super().__init__()
        self.body, self.loss = nn.Linear(6, 8), nn.LinearCrossEntropyLoss(8, 11, **options)

    def forward(self, x, target):
        return self.loss(self.body(x), target)


@linear_loss
@pytest.mark.parametrize("options", [{}, {"bias": True, "label_smoothing": 0.1}, {"deep": True}])
def test_the_head_in_a_loss_module(fused, options):
    deep = options.pop("deep", False)
    stock = OwnLoss(**options, out_features=(3,) if deep else ())
    ours = copy.deepcopy(stock)
    assert "loss.linear" in str(patch(ours))
    target = torch.randint(11, (5, 3) if deep else (5,))
    assert_same_training(stock, ours, lambda m: m(torch.ones(5, 6) * torch.arange(6), target))
    assert fused.count == (not deep)
    unpatch(ours)
    assert type(ours.loss.linear) is nn.Linear


@linear_loss
def test_linear_cross_entropy_by_pytorchs_own_backend():
    stock, ours = pair(patching={"fused_linear_cross_entropy": {"backend": "pytorch"}})
    assert_same_training(stock, ours, of_weight)


# Heads whose vocabulary is sharded over processes: losses equal one process.


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


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3", "granite"])
def test_losses_of_sharded_heads_equal_one_process(tmp_path, model_type):
    plan = f'with_hugging_face_s_plan("{model_type}")'
    harness.in_two_processes(tmp_path, CASES.replace("PLANS", plan))
