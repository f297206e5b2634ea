"""LoRA of PEFT: patched models train as stock ones do, and keep less."""
# ruff: noqa: E402  (what needs transformers is imported after the skip)

import copy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

from liger_multi import ops
from liger_multi.patching import patch, unpatch
from liger_multi.reference.adapters import low_rank
from tests.comparing import saved, storage_bytes
from tests.models import (
    Widest,
    adapters,
    assert_as_exact,
    assert_same_training,
    batch,
    build,
    filled,
    pair,
    patched_copy,
)

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
STRICT = {"strict": True}


def lora(model, targets=(*ATTENTION, *MLP), **config):
    """A model with adapters whose second factors are not zero."""
    return adapters(model, targets, **config)


@pytest.fixture
def calls(monkeypatch):
    counter = Counter()
    for name in ("lora_mlp", "lora_qkv", "lora_update", "swiglu"):
        own = getattr(ops, name)
        monkeypatch.setattr(
            ops, name, lambda *a, name=name, own=own, **k: (counter.update([name]), own(*a, **k))[1]
        )
    return counter


def adapted(patching=None, **config):
    """A stock model and an equal one, both with adapters; patched with options where given."""
    options = {k: config.pop(k) for k in ("dtype", "num_hidden_layers") if k in config}
    stock = lora(pair("llama", **options)[0], **config)
    return stock, copy.deepcopy(stock) if patching is None else patched_copy(stock, **patching)


def seeded(model):
    """The loss of a batch, with the same random numbers each time."""
    torch.manual_seed(7)
    return model(**batch()).loss


@pytest.mark.parametrize("order", ["adapters first", "patch first", "patched again"])
def test_attention_and_mlp(order, calls):
    stock, ours = pair("llama")
    if order != "adapters first":
        patch(ours, strict=True)
    stock, ours = lora(stock), lora(ours)
    if order != "patch first":
        report = patch(ours, strict=True)
        assert report.count("lora") == 14
        assert {e.replaced_by for e in report.entries if e.op == "swiglu"} == {"lora_mlp[silu]"}
    calls.clear()  # the probes' own
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)
    expected = {"lora_mlp": 2} | (
        {} if order == "patch first" else {"lora_qkv": 2, "lora_update": 2}
    )
    assert calls == expected
    unpatch(ours)
    assert not any(hasattr(type(m), "_liger_multi_swap") for m in ours.modules())


def trained_layer(model):
    model.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight.requires_grad_()


PLAIN = {"lora_mlp": 1, "lora_qkv": 1, "lora_update": 1}
FORMS = {
    "gate and down": ({"targets": ["gate_proj", "down_proj"]}, {"lora_mlp": 1}),
    "rank-stabilized": ({"use_rslora": True}, PLAIN),
    "a rank each": ({"rank_pattern": {"up_proj": 2, "q_proj": 7}}, PLAIN),
    "gelu": ({"targets": MLP}, {"lora_mlp": 1}),
    "a trained base layer": ({}, {"swiglu": 1, "lora_qkv": 1, "lora_update": 4}),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_plain_lora(name, calls):
    config, expected = FORMS[name]
    options = {"hidden_act": "gelu"} if name == "gelu" else {}
    models = pair("llama", num_hidden_layers=1, **options)
    stock, ours = (lora(m, **config) for m in models)
    for model in (stock, ours) if name == "a trained base layer" else ():
        trained_layer(model)
    patch(ours, strict=True)
    calls.clear()
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)
    assert calls == expected


def test_two_active_adapters_are_added_in_turn(calls):
    stock = adapted(num_hidden_layers=1)[0]
    torch.manual_seed(5)
    stock.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    filled(stock)
    stock.base_model.set_adapter(["default", "other"])
    ours = patched_copy(stock, strict=True)
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)
    # k and v together, the others and the MLP's layers by themselves
    assert calls == {"lora_qkv": 1, "lora_update": 7, "swiglu": 1}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "no plain LoRA"),
        ({"lora_dropout": 0.5}, "dropout"),
        ({"lora_bias": True}, "has a bias"),
    ],
    ids=["dora", "dropout", "bias"],
)
def test_other_adapters_run_as_pefts(config, reason, calls):
    stock, ours = adapted(num_hidden_layers=1, **config)
    report = patch(ours)
    reasons = [s.reason for s in report.skipped if s.op == "lora"]
    assert len(reasons) == 7
    assert all(reason in r for r in reasons)
    assert_same_training(stock, ours, seeded)
    assert calls == {"swiglu": 1}


def test_disabled_merged_and_hooked_adapters(calls):
    stock, ours = adapted(STRICT, num_hidden_layers=1)
    inputs = batch()
    with torch.no_grad():
        with stock.disable_adapter(), ours.disable_adapter():
            torch.testing.assert_close(ours(**inputs).loss, stock(**inputs).loss)
        for model in (stock, ours):
            model.merge_adapter()
        torch.testing.assert_close(ours(**inputs).loss, stock(**inputs).loss)
        for model in (stock, ours):
            model.unmerge_adapter()
    assert not calls["lora_update"]
    observed = []
    layer = ours.base_model.model.model.layers[0]
    for inner in (layer.self_attn.q_proj.lora_A["default"], layer.mlp.up_proj):
        inner.register_forward_hook(lambda *args: observed.append(1))
    assert_same_training(stock, ours, lambda m: m(**inputs).loss)
    assert len(observed) == 2
    assert calls == {"swiglu": 3, "lora_qkv": 1, "lora_update": 4}


@pytest.mark.parametrize("form", ["fp32 adapters", "bf16 adapters", "autocast"])
def test_low_precision(form, calls):
    exact = lora(pair("llama")[0])
    stock = copy.deepcopy(exact)
    for name, parameter in stock.named_parameters():
        if "lora" not in name or form == "bf16 adapters":
            parameter.data = parameter.data.bfloat16()
    for wide, low in zip(exact.parameters(), stock.parameters(), strict=True):
        wide.data.copy_(low)
    ours = patched_copy(stock, strict=True)

    def run(model):
        with torch.autocast("cpu", torch.bfloat16, enabled=form == "autocast"):
            return model(**batch()).loss

    assert_as_exact(stock, ours, exact, run, lambda m: m(**batch()).loss)
    assert calls == {"lora_mlp": 2, "lora_qkv": 2, "lora_update": 2}


class Quantized(nn.Linear):
    """A frozen layer in eight bits that becomes numbers when it is called."""

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features, bias=False)
        self.register_buffer("scale", layer.weight.detach().abs().amax(1, keepdim=True) / 127)
        codes = (layer.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(codes, requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


def quantize(model, quantization):
    for layer in model.model.layers:
        for block, names in ((layer.self_attn, ATTENTION), (layer.mlp, MLP)):
            for name in names:
                setattr(block, name, quantization(getattr(block, name)))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def four_bits(layer):
    bnb = pytest.importorskip("bitsandbytes")
    sizes = layer.in_features, layer.out_features
    linear4bit = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.float32)
    linear4bit.load_state_dict({"weight": layer.weight.detach()})
    return linear4bit.to("cpu")


@pytest.mark.parametrize(
    ("quantization", "operators"),
    [
        (Quantized, {"lora_update": 14, "swiglu": 2}),
        (four_bits, {"lora_update": 2, "lora_mlp": 2, "lora_qkv": 2}),
    ],
)
def test_quantized_base_layers(quantization, operators, calls):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    stock = lora(quantize(build("llama", **sizes), quantization))
    ours = copy.deepcopy(stock)
    assert patch(ours, strict=True).count("lora") == 14
    calls.clear()  # a class of layers that is new to this process was tried
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)
    assert calls == operators


def test_checkpointing_computes_no_product_of_the_mlp_again(calls):
    stock, ours = adapted(STRICT)
    for model in (stock, ours):
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    calls.clear()  # of probes
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)
    assert calls["swiglu"] == 2  # once a layer


@pytest.mark.slow
def test_compiled_whole():
    stock, ours = adapted(STRICT, num_hidden_layers=1)
    inputs = batch()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert_same_training(stock, ours, lambda m: (compiled if m is ours else m)(**inputs).loss)


def test_copies_and_saved_adapters(tmp_path):
    stock, ours = adapted(STRICT, num_hidden_layers=1)
    twin = copy.deepcopy(ours)
    ours.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(build("llama", num_hidden_layers=1), tmp_path)
    with torch.no_grad():
        expected = stock(**batch()).loss
        for model in (twin, again, ours.merge_and_unload()):
            torch.testing.assert_close(model(**batch()).loss, expected)


def test_tensors_saved_for_backward():
    """bf16 layers and fp32 adapters: the MLP keeps gate and up, attention's layers nothing."""
    stock = lora(build("llama", num_hidden_layers=1).bfloat16())
    assert next(p for n, p in stock.named_parameters() if "lora_A" in n).dtype == torch.float32
    ours = patched_copy(stock, strict=True)
    x = torch.randn(3, 40, 32, dtype=torch.bfloat16, requires_grad=True) * 1
    rows, hidden, inner, rank = 120, 32, 48, 4
    wide, narrow = ours.base_model.model.model.layers[0], stock.base_model.model.model.layers[0]

    def kept(layer):
        return storage_bytes(saved(lambda: layer(x), but=[x, *layer.parameters()])[1])

    assert kept(wide.mlp) == 2 * rows * inner * 2
    assert kept(wide.self_attn.q_proj) == 0
    # PEFT: gate, up and the activation, x and the product in fp32, what x @ a' gave
    copies = 2 * rows * hidden * 4 + rows * inner * 4 + 3 * rows * rank * 4
    assert kept(narrow.mlp) == 3 * rows * inner * 2 + copies
    assert kept(narrow.self_attn.q_proj) == rows * (hidden + rank) * 4


# --- the head ---


def logits_rows(model, inputs):
    """The most rows of logits that exist at a time in a step."""
    with Widest() as widest:
        model(**inputs).loss.backward()
    return widest.rows


@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_an_adapter_on_the_head_is_part_of_every_chunk(patch_first, frozen):
    stock, ours = pair("llama", num_hidden_layers=1)
    options = {"fused_linear_cross_entropy": {"chunk": 4}}
    if patch_first:
        patch(ours, **options)
    stock, ours = (lora(m, ["q_proj", "lm_head"]) for m in (stock, ours))
    report = patch(ours, strict=True, **options)
    assert {e.op for e in report.entries if e.path.endswith("lm_head")} == {*options}
    if not frozen:
        for model in (stock, ours):
            model.base_model.model.lm_head.base_layer.weight.requires_grad_()
    inputs = batch()
    assert_same_training(stock, ours, lambda m: m(**inputs).loss)
    assert ours.base_model.model.lm_head.lora_A["default"].weight.grad.abs().max() > 0
    assert (logits_rows(stock, inputs), logits_rows(ours, inputs)) == (22, 4)
    report = patch(ours, strict=True, **options)
    assert {e.status for e in report.entries} == {"already patched"}
    unpatch(ours)
    assert type(ours.base_model.model.lm_head).forward is peft.tuners.lora.Linear.forward


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_on_logits_of_an_adapted_head(reduction):
    stock = lora(build("llama", num_hidden_layers=1), ["lm_head"])
    ours = patched_copy(stock, strict=True, fused_linear_cross_entropy={"chunk": 3})
    inputs = batch()
    labels = inputs.pop("labels").flatten()
    by = torch.randn(labels.shape)

    def run(model):
        logits = torch.tanh(model(**inputs).logits.float().view(-1, 223) / 5) * 5
        loss = F.cross_entropy(logits, labels, reduction=reduction, label_smoothing=0.1)
        return (loss * by).sum() if reduction == "none" else loss

    assert_same_training(stock, ours, run)
    assert_same_training(stock, ours, lambda m: m(**inputs).logits.softmax(-1).pow(2).sum())
    with torch.no_grad():
        expected, got = (m(**inputs).logits.argmax(-1) for m in (stock, ours))
    assert torch.equal(got, expected)


def test_an_adapted_head_with_a_changed_adapter():
    ours = lora(build("llama", num_hidden_layers=1), ["lm_head"])
    patch(ours, strict=True)
    inputs = batch()
    ignored = {**inputs, "labels": torch.full_like(inputs["labels"], -100)}
    loss = ours(**ignored).loss
    loss.backward()
    assert loss == 0
    head = ours.base_model.model.lm_head
    assert not head.lora_B["default"].weight.grad.any()
    out = ours(**inputs)
    with torch.no_grad():
        head.lora_B["default"].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"adapters .* modified in place"):
        out.logits.sum()


@pytest.mark.parametrize("config", [{"use_dora": True}, {"lora_dropout": 0.5}])
def test_other_adapters_on_the_head_have_real_logits(config):
    stock = lora(build("llama", num_hidden_layers=1), ["lm_head"], **config)
    ours = copy.deepcopy(stock)
    assert "so that the adapter trains" in patch(ours).skipped[-1].reason
    assert_same_training(stock, ours, seeded)


@pytest.fixture
def split(monkeypatch):
    """Products of bf16 in fp32, as devices have them; the number of them."""
    calls = Counter()

    def product(a, b):
        assert a.dtype == b.dtype == torch.bfloat16
        calls["product"] += 1
        return a.float() @ b.float()

    monkeypatch.setattr(low_rank, "has_out_dtype", lambda device_type, dtype: True)
    monkeypatch.setattr(low_rank, "_product", product)
    return calls


def test_fp32_factors_are_split_without_loss(split):
    wide, rows = torch.randn(40, 96).bfloat16(), torch.randn(40, 64).bfloat16()
    low, thin = torch.randn(40, 5), torch.randn(5, 64) * torch.logspace(-6, 6, 64)
    factor = torch.randn(5, 96)
    dtype, by = torch.float32, low_rank.LowRank()
    exact = (
        (by.narrow(wide, factor.t()), wide.double() @ factor.double().t()),
        (by.gradient(low, wide, 0.3, dtype), 0.3 * low.double().t() @ wide.double()),
        (by.gradient(wide, low, 0.3, dtype), 0.3 * wide.double().t() @ low.double()),
    )
    for got, expected in exact:
        assert got.dtype == dtype
        assert (got - expected).abs().max() < 1e-6 * expected.abs().max()
    assert split["product"] == 3
    product = 0.3 * low.double() @ thin.double()
    size = 0.3 * low.double().abs() @ thin.double().abs()
    widened = by.widened(low, thin, 0.3, torch.bfloat16)
    added = by.add_(rows.clone(), low, thin, 0.3)
    for got, expected in (
        (widened, product),
        (added, rows.double() + product),
        (by.added(rows, low, thin, 0.3), rows.double() + product),
    ):
        # rounded to bf16 once: half a unit in the last place, and fp32's errors
        assert (
            (got.double() - expected).abs() <= 2**-8 * expected.abs() / (1 + 2**-8) + 2e-7 * size
        ).all()


def test_split_factors_train_as_pefts(split, calls):
    stock = lora(pair("llama", dtype=torch.bfloat16)[0])
    for name, parameter in stock.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if "lora" in name else torch.bfloat16)
    exact, ours = copy.deepcopy(stock).float(), copy.deepcopy(stock)
    patch(ours, strict=True)
    calls.clear()  # probes call operators too, the first time that a class is met
    run = lambda m: m(**batch()).loss  # noqa: E731
    assert_as_exact(stock, ours, exact, run, run)
    assert calls == {"lora_mlp": 2, "lora_qkv": 2, "lora_update": 2}
    assert split["product"] > 50
