"""Losses of patched models, lazy logits and their options; every architecture is in the matrix.

Heads of tensor parallel models are equal to one process, and by the losses of their shards.
"""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

from liger_multi.patching import patch, real_logits, unpatch
from liger_multi.patching.head.protocol import LazyLogits
from tests.comparing import assert_same_gradients, gradients
from tests.models import (
    KINDS,
    VOCABULARY,
    FusedCalls,
    Widest,
    assert_same_training,
    batch,
    build,
    pair,
)


@pytest.fixture
def fused(monkeypatch):
    return FusedCalls(monkeypatch)


@pytest.fixture(params=KINDS)
def model_type(request):
    return request.param


def loss_of(**inputs):
    return lambda model: model(**inputs).loss


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
@pytest.mark.parametrize("tied", [False, True])
def test_tied_and_untied_heads(model_type, tied, device, fused):
    stock, ours = pair(model_type, device, tied=tied)
    patch(ours, strict=True)
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied
    assert_same_training(stock, ours, loss_of(**batch(device=device)))
    assert fused.count == 1


def test_autocast_is_remembered_outside_of_it(device):
    stock, ours = pair("llama", device)
    patch(ours)
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
    stock, ours = pair("llama", device, torch.float16)
    patch(ours)
    inputs = batch(device=device)
    scale = 2.0**12
    assert_same_training(stock, ours, lambda m: m(**inputs).loss * scale, rtol=1e-2)
    assert fused.count == 1
    assert all(p.grad.isfinite().all() for p in ours.parameters())
    assert ours.lm_head.weight.grad.abs().max() > 1  # the scale arrived


def test_grad_scaler_takes_the_step(device):
    ours = build("llama").to(device)
    patch(ours)
    before = ours.lm_head.weight.detach().clone()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
    with torch.autocast(device.type, dtype=torch.float16):
        loss = ours(**batch(device=device)).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**10  # no infinity was found
    assert not torch.equal(before, ours.lm_head.weight)


def test_custom_loss_on_logits(device, fused):
    stock, ours = pair("llama", device)
    patch(ours)
    inputs = batch(device=device)

    def run(model):
        logits = model(input_ids=inputs["input_ids"]).logits
        loss = F.cross_entropy(logits[:, 0], inputs["labels"][:, 5])
        return logits.softmax(-1).pow(2).mean() + loss

    assert_same_training(stock, ours, run)
    assert fused.count == 1


def test_a_loss_of_real_logits_is_not_fused(device, fused):
    stock, ours = pair("llama", device)
    patch(ours)
    inputs = batch(device=device)

    def run(model):
        logits = model(input_ids=inputs["input_ids"]).logits
        likely = logits.softmax(-1).pow(2).mean()
        return likely + F.cross_entropy(logits[:, 0], inputs["labels"][:, 5])

    assert_same_training(stock, ours, run)
    assert fused.count == 0


def test_sampling_with_the_same_seed(device):
    stock, ours = pair("llama", device)
    patch(ours)
    ids = batch(device=device)["input_ids"][:, :5]
    results = []
    for model in (stock, ours):
        torch.manual_seed(7)
        results.append(
            model.eval().generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=True
            )
        )
    assert torch.equal(*results)


@pytest.mark.parametrize("how", ["pickle", "torch.save", "deepcopy"])
def test_copies_are_patched_and_equal(how, fused):
    stock, ours = pair("qwen3")
    patch(ours)
    if how == "pickle":
        copied = pickle.loads(pickle.dumps(ours))
    elif how == "deepcopy":
        copied = copy.deepcopy(ours)
    else:
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    assert [type(m) for m in copied.modules()] == [type(m) for m in ours.modules()]
    assert_same_training(stock, copied, loss_of(**batch()))
    assert fused.count == 1
    unpatch(copied)
    assert [type(m) for m in copied.modules()] == [type(m) for m in stock.modules()]


def test_no_vocabulary_wide_tensor_of_all_rows(model_type):
    ours = build(model_type)
    patch(ours, fused_linear_cross_entropy={"chunk": 4})
    inputs = batch(rows=4, length=12)
    with Widest() as widest:
        loss = ours(**inputs).loss
        loss.backward()
    assert widest.rows == 4
    unpatch(ours)
    with Widest() as widest:
        ours(**inputs).loss.backward()
    assert widest.rows == 4 * 12


def test_chunks_do_not_show_in_the_result():
    stock = build("llama")
    inputs = batch(rows=3, length=9)
    results = []
    for chunk in (1, 7, 256):
        ours = copy.deepcopy(stock)
        patch(ours, fused_linear_cross_entropy={"chunk": chunk})
        assert_same_training(stock, ours, loss_of(**inputs))
        results.append(gradients(ours))
    for other in results[1:]:
        assert_same_gradients(other, results[0])


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
        loss = ours(**inputs).loss
        loss.backward()
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
    stock, ours = pair("llama")
    patch(ours, fused_linear_cross_entropy={"chunk": 4})
    inputs = batch(rows=4)
    with torch.no_grad(), Widest() as widest:
        out = ours.eval()(**inputs)
        assert not out.loss.requires_grad
    assert widest.rows == 4
    weight = tuple(ours.lm_head.weight.shape)
    assert weight not in widest.shapes
    with torch.no_grad():
        expected = stock.eval()(**inputs)
        torch.testing.assert_close(out.loss, expected.loss)
        torch.testing.assert_close(real_logits(out.logits), expected.logits, rtol=1e-5, atol=1e-5)
    assert not out.logits.requires_grad


def test_inference_mode_gives_ordinary_logits():
    stock, ours = pair("llama")
    patch(ours)
    with torch.inference_mode():
        expected, got = (m(**batch()) for m in (stock, ours))
        assert type(got.logits) is torch.Tensor
        torch.testing.assert_close(got.loss, expected.loss)


def test_z_loss_is_added_where_gradients_are():
    stock, ours = pair("llama")
    patch(ours, fused_linear_cross_entropy={"z_loss": 0.01, "chunk": 4})
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
    ours = build("llama")
    patch(ours, fused_linear_cross_entropy={"z_loss": 0.01})
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
    plain = F.cross_entropy(real_logits(logits).detach().clone(), labels)
    assert fused > plain + 0.01


def test_softcap_and_scale_are_part_of_the_fused_loss(fused):
    stock, ours = pair("llama")
    patch(ours)
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


def test_accumulation_over_uneven_batches_equals_one_batch():
    stock, ours = pair("llama")
    patch(ours)
    inputs = batch(rows=4)
    inputs["labels"][0, :8] = -100
    inputs["labels"][3, :5] = -100
    items = (inputs["labels"][:, 1:] != -100).sum()
    stock(**inputs, num_items_in_batch=items).loss.backward()
    for part in (slice(0, 1), slice(1, 4)):
        ours(**{k: v[part] for k, v in inputs.items()}, num_items_in_batch=items).loss.backward()
    assert_same_gradients(gradients(ours), gradients(stock))


def test_real_logits_with_our_cross_entropy(model_type, fused, monkeypatch):
    from liger_multi import ops

    calls = []
    stock_op = ops.cross_entropy
    monkeypatch.setattr(
        ops, "cross_entropy", lambda *a, **k: (calls.append(k), stock_op(*a, **k))[1]
    )
    stock, ours = pair(model_type)
    patch(ours, fused_linear_cross_entropy=False, cross_entropy=True)
    assert_same_training(stock, ours, loss_of(**batch()))
    assert (len(calls), fused.count) == (1, 0)
    out = ours(**batch())
    assert not isinstance(out.logits, LazyLogits)
    assert out.logits.data_ptr()
    assert type(out.logits.softmax(-1)) is torch.Tensor


def test_both_losses_fuse_where_they_can(fused, monkeypatch):
    from liger_multi import ops

    calls = []
    stock_op = ops.cross_entropy
    monkeypatch.setattr(
        ops, "cross_entropy", lambda *a, **k: (calls.append(k), stock_op(*a, **k))[1]
    )
    stock, ours = pair("llama")
    patch(ours, cross_entropy=True)
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
    ours = build("llama")
    patch(
        ours,
        rms_norm="reference",
        swiglu={"backend": "reference"},
        fused_linear_cross_entropy="reference",
    )
    from liger_multi import ops

    for name in ("rms_norm", "gated_mlp", "fused_linear_cross_entropy"):
        stock_op = getattr(ops, name)

        def spied(*args, name=name, stock_op=stock_op, **kwargs):
            observed.append((name, current().choice(name, "cuda")))
            return stock_op(*args, **kwargs)

        monkeypatch.setattr(ops, name, spied)
    ours(**batch()).loss.backward()
    assert {name for name, _ in observed} == {"rms_norm", "gated_mlp", "fused_linear_cross_entropy"}
    assert all("reference" in str(choice) for _, choice in observed)
    assert "reference" not in str(current().choice("rms_norm", "cuda"))
