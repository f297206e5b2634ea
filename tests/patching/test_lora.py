"""LoRA of PEFT: patched models train as stock ones do, and keep less."""

# ruff: noqa: E402  (what needs transformers is imported after the skip)

import copy
import functools
import gc
import pickle
import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

peft = pytest.importorskip("peft")

from liger_multi import ops, patch, unpatch
from liger_multi.patching.head.protocol import LazyLogits
from liger_multi.patching.lora import SharedInput, active_group
from liger_multi.patching.swap import swapped
from liger_multi.reference.adapters import low_rank
from tests.comparing import assert_same_gradients, gradients, recorded, saved, storage_bytes
from tests.models import (
    Widest,
    adapters,
    assert_as_exact,
    assert_same_compiled,
    assert_same_training,
    batch,
    build,
    counting,
    filled,
    loss_of,
    pair,
    patched_copy,
    patched_ops,
    variant,
)

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
STRICT = {"strict": True}


def lora(model, targets=(*ATTENTION, *MLP), **config):
    return adapters(model, targets, **config)


calls = counting("lora_mlp", "lora_qkv", "lora_update", "swiglu")


def adapted(patching=None, **config):
    """A stock model and an equal one, both with adapters; patched with options where given."""
    options = {k: config.pop(k) for k in ("dtype", "num_hidden_layers") if k in config}
    stock = lora(pair("llama", **options)[0], **config)
    return stock, copy.deepcopy(stock) if patching is None else patched_copy(stock, **patching)


def seeded(model):
    """The loss of a batch, with the same random numbers each time."""
    torch.manual_seed(7)
    return loss_of(model)


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
    assert_same_training(stock, ours)
    expected = {"lora_mlp": 2} | (
        {} if order == "patch first" else {"lora_qkv": 2, "lora_update": 2}
    )
    assert calls == expected
    unpatch(ours)
    assert not patched_ops(ours)


def trained_layer(model):
    model.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight.requires_grad_()


def with_another(model):
    torch.manual_seed(5)
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    filled(model).base_model.set_adapter(["default", "other"])


def hooked(model):
    layer = model.base_model.model.model.layers[0]
    for inner in (layer.self_attn.q_proj.lora_A["default"], layer.mlp.up_proj):
        inner.register_forward_hook(lambda module, args, y: 2 * y)


def nothing(model):
    """As it is made."""


PLAIN = {"lora_mlp": 1, "lora_qkv": 1, "lora_update": 1}
FORMS = {
    "gate and down": ({"targets": ["gate_proj", "down_proj"]}, nothing, {"lora_mlp": 1}),
    "rank-stabilized": ({"use_rslora": True}, nothing, PLAIN),
    "a rank each": ({"rank_pattern": {"up_proj": 2, "q_proj": 7}}, nothing, PLAIN),
    "gelu": ({"targets": MLP}, nothing, {"lora_mlp": 1}),
    "a trained base layer": ({}, trained_layer, {"swiglu": 1, "lora_qkv": 1, "lora_update": 4}),
    "hooks after the patch": ({}, nothing, {"swiglu": 1, "lora_qkv": 1, "lora_update": 4}),
    # k and v together, the others and the MLP's layers by themselves
    "two, added in turn": ({}, with_another, {"swiglu": 1, "lora_qkv": 1, "lora_update": 7}),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_plain_lora(name, calls):
    config, change, expected = FORMS[name]
    options = {"hidden_act": "gelu"} if name == "gelu" else {}
    stock = lora(build("llama", num_hidden_layers=1, **options), **config)
    change(stock)
    ours = patched_copy(stock, strict=True)
    for model in (stock, ours) if name == "hooks after the patch" else ():
        hooked(model)
    calls.clear()
    assert_same_training(stock, ours)
    assert calls == expected


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
    reasons = [s.reason for s in patch(ours).skipped if s.op == "lora"]
    assert len(reasons) == 7
    assert all(reason in r for r in reasons)
    calls.clear()  # of trials
    assert_same_training(stock, ours, seeded)
    assert calls == {"swiglu": 1}


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
            return loss_of(model)

    assert_as_exact(stock, ours, exact, run, loss_of)
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
    assert_same_training(stock, ours)
    assert calls == operators


def test_checkpointing_computes_no_product_of_the_mlp_again(calls):
    stock, ours = adapted(STRICT)
    for model in (stock, ours):
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    calls.clear()  # of probes
    assert_same_training(stock, ours)
    assert calls["swiglu"] == 2  # once a layer


@pytest.mark.slow
def test_compiled_whole():
    assert_same_compiled(*adapted(STRICT, num_hidden_layers=1), batch())


def test_copies_and_saved_adapters(tmp_path):
    stock, ours = adapted(STRICT, num_hidden_layers=1)
    ours.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(build("llama", num_hidden_layers=1), tmp_path)
    with torch.no_grad():
        for model in (copy.deepcopy(ours), again, ours.merge_and_unload()):
            torch.testing.assert_close(loss_of(model), loss_of(stock))


def test_tensors_saved_for_backward():
    """bf16 layers and fp32 adapters: the MLP keeps gate and up, other layers x @ a'."""
    stock = lora(build("llama", num_hidden_layers=1).bfloat16())
    assert next(p for n, p in stock.named_parameters() if "lora_A" in n).dtype == torch.float32
    ours = patched_copy(stock, strict=True)
    x = torch.randn(3, 40, 32, dtype=torch.bfloat16, requires_grad=True) * 1
    rows, hidden, inner, rank = 120, 32, 48, 4
    wide, narrow = ours.base_model.model.model.layers[0], stock.base_model.model.model.layers[0]

    def kept(layer):
        return storage_bytes(saved(lambda: layer(x), but=[x, *layer.parameters()])[1])

    assert kept(wide.mlp) == 2 * rows * inner * 2
    assert kept(wide.self_attn.q_proj) == rows * rank * 4
    # PEFT: gate, up and the activation, x and the product in fp32, what x @ a' gave
    copies = 2 * rows * hidden * 4 + rows * inner * 4 + 3 * rows * rank * 4
    assert kept(narrow.mlp) == 3 * rows * inner * 2 + copies
    assert kept(narrow.self_attn.q_proj) == rows * (hidden + rank) * 4


# --- the head ---


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
    assert_same_training(stock, ours)
    assert ours.base_model.model.lm_head.lora_A["default"].weight.grad.abs().max() > 0
    for model, rows in ((stock, 22), (ours, 4)):
        with Widest() as widest:
            loss_of(model).backward()
        assert widest.rows == rows
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
    loss = ours(**{**inputs, "labels": torch.full_like(inputs["labels"], -100)}).loss
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
    exact, ours = copy.deepcopy(stock).float(), patched_copy(stock, strict=True)
    calls.clear()  # probes call operators too, the first time that a class is met
    assert_as_exact(stock, ours, exact, loss_of, loss_of)
    assert calls == {"lora_mlp": 2, "lora_qkv": 2, "lora_update": 2}
    assert split["product"] > 50


# Calls of LoRA layers in every form that PEFT has, on patched and unpatched models alike.


# --- calls in every form ---


EVERYWHERE = (*ATTENTION, *MLP, "lm_head")
INPUTS = {name: torch.cat([t, t.flip(1)]) for name, t in batch().items()}
"""Four rows, so that a batch can mix three adapters."""
MIXED = ["default", "other", "__base__", "default"]


def two_adapters(first=None, second=None, patch_first=False):
    """A stock model and a patched one with two adapters each, in eval mode."""
    models = []
    for when in ("never", "before" if patch_first else "after"):
        model = build("llama", num_hidden_layers=1, patching={} if when == "before" else None)
        model = lora(model, EVERYWHERE, task_type="CAUSAL_LM", **(first or {}))
        torch.manual_seed(5)
        options = {"r": 2, "target_modules": ["q_proj", "up_proj", "lm_head"], **(second or {})}
        model.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", **options))
        if when == "after":
            patch(model)
        models.append(filled(model).eval())
    return models


def assert_same_outputs(stock, ours, grad=False, inputs=INPUTS, **call):
    with torch.set_grad_enabled(grad):
        expected, got = (m(**inputs, **call) for m in (stock, ours))
    torch.testing.assert_close(got.loss, expected.loss, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(got.logits + 0.0, expected.logits, atol=5e-6, rtol=1e-5)
    if grad:
        for m, out in ((stock, expected), (ours, got)):
            m.zero_grad()
            out.loss.backward()
        assert_same_gradients(gradients(ours), gradients(stock), 1e-4)


NAMES = {
    "mixed": MIXED,
    "one": ["other"] * 4,
    "base": ["__base__"] * 4,
    "none": None,
}


@pytest.mark.parametrize("patch_first", [False, True])
@pytest.mark.parametrize("names", NAMES)
def test_a_batch_of_several_adapters(names, patch_first):
    stock, ours = two_adapters(patch_first=patch_first)
    assert_same_outputs(stock, ours, adapter_names=NAMES[names])
    assert_same_outputs(stock, ours, grad=True)  # nothing of it is left for the next call


KINDS_OF_ADAPTERS = {
    "dora on top": ({}, {"use_dora": True}),
    "dora": ({"use_dora": True}, {}),
    "rank-stabilized": ({"use_rslora": True}, {"use_rslora": True}),
    "dropout": ({"lora_dropout": 0.5}, {}),
    "biases": ({"lora_bias": True}, {}),
    "activated": ({"alora_invocation_tokens": [3, 4]}, {}),
    "both activated": ({"alora_invocation_tokens": [3]}, {"alora_invocation_tokens": [5, 6]}),
}


@pytest.mark.parametrize("model_type", KINDS_OF_ADAPTERS)
def test_other_kinds_of_adapters_in_one_batch(model_type):
    stock, ours = two_adapters(*KINDS_OF_ADAPTERS[model_type])
    if "dora" not in model_type:  # PEFT refuses
        assert_same_outputs(stock, ours, adapter_names=MIXED)
    for name in ("default", "other"):
        for model in (stock, ours):
            model.set_adapter(name)
        assert_same_outputs(stock, ours, grad=True)


def test_keywords_of_adapters_reach_pefts_forward():
    """Whatever PEFT hands to a layer beside its input is PEFT's to interpret."""
    stock, ours = two_adapters()
    offsets = [None, 3, None, 5]
    assert_same_outputs(stock, ours, alora_offsets=offsets)
    hidden = torch.randn(4, 3, 32)
    for path in ("lm_head", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"):
        layers = [m.base_model.model.get_submodule(path) for m in (stock, ours)]
        for call in ({"adapter_names": MIXED}, {"alora_offsets": offsets}):
            assert torch.equal(*(layer(hidden, **call) for layer in layers))
        torch.testing.assert_close(*(layer(x=hidden) for layer in layers))
        messages = []
        for layer in layers:
            with pytest.raises(TypeError) as raised:
                layer(hidden, nosuch=1)
            messages.append(str(raised.value))
        assert messages[0] == messages[1]


def test_generation_with_an_adapter_per_row():
    options = {"max_new_tokens": 4, "do_sample": False, "adapter_names": MIXED}
    ids = INPUTS["input_ids"][:, :5]
    assert torch.equal(*(m.generate(input_ids=ids, **options) for m in two_adapters()))


def test_whole_heads_of_several_adapters():
    models = []
    for ours in (False, True):
        model = lora(build("llama", num_hidden_layers=1), ["q_proj"], modules_to_save=["lm_head"])
        model.add_adapter(
            "other", peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
        )
        torch.manual_seed(9)
        with torch.no_grad():
            for copied in model.base_model.model.lm_head.modules_to_save.values():
                copied.weight.add_(torch.randn_like(copied.weight), alpha=0.1)
        if ours:
            patch(model)
        models.append(filled(model).eval())
    assert_same_outputs(*models, adapter_names=MIXED)
    assert_same_outputs(*models, grad=True)


def _one_more(model):
    torch.manual_seed(4)
    model.add_adapter("third", peft.LoraConfig(r=3, target_modules=["k_proj", "v_proj", "lm_head"]))
    filled(model).set_adapter("third")


def _off_and_on(model):
    with model.disable_adapter():
        model(**INPUTS)


CHANGES = {
    "merged": lambda m: m.merge_adapter(),
    "merged and back": lambda m: (m.merge_adapter(), m.unmerge_adapter()),
    "switched": lambda m: m.set_adapter("other"),
    "both": lambda m: m.base_model.set_adapter(["default", "other"]),
    "off": lambda m: m.base_model.disable_adapter_layers(),
    "off and on": _off_and_on,
    "one more": _one_more,
    "one less": lambda m: (m.delete_adapter("default"), m.set_adapter("other")),
    "scaled": lambda m: [x.scale_layer(0.5) for x in m.modules() if hasattr(x, "scale_layer")],
    "combined": lambda m: (
        m.add_weighted_adapter(["default", "other"], [0.7, 0.3], "sum", combination_type="cat"),
        m.set_adapter("sum"),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_adapters_changed_after_the_patch(change):
    stock, ours = two_adapters()
    for model in (stock, ours):
        CHANGES[change](model)
    grad = change not in ("off", "merged")
    assert_same_outputs(stock, ours, grad=grad)
    if change != "merged":
        names = [n for n in MIXED if n in (*stock.peft_config, "__base__")]
        inputs = {n: t[: len(names)] for n, t in INPUTS.items()}
        assert_same_outputs(stock, ours, inputs=inputs, adapter_names=names)
    patch(ours)
    assert_same_outputs(stock, ours, grad=grad)


@pytest.mark.parametrize("end", ["merge_and_unload", "unload"])
def test_adapters_removed_from_a_patched_model(end):
    stock, ours = (getattr(m, end)().requires_grad_() for m in two_adapters())
    assert_same_outputs(stock, ours, grad=True)
    patch(ours)
    assert_same_outputs(stock, ours, grad=True)
    assert isinstance(ours(**INPUTS).logits, LazyLogits)


# --- logits that are computed later ---


def _unpatched(model):
    if hasattr(type(model.base_model.model.lm_head), "_liger_multi_swap"):
        patch(model, fused_linear_cross_entropy=False)
        patch(model, fused_linear_cross_entropy=False)


LATER = {
    "disabled": lambda m: m.base_model.disable_adapter_layers(),
    "switched": CHANGES["switched"],
    "added": CHANGES["both"],
    "deleted": lambda m: m.delete_adapter("default"),
    "rescaled": lambda m: m.base_model.model.lm_head.scale_layer(3.0),
    "unpatched": _unpatched,
}


READERS = {
    "logits": lambda z: z.clone().tolist(),
    "loss": lambda z: F.cross_entropy(z.flatten(0, -2), INPUTS["input_ids"].flatten()).tolist(),
    "row": lambda z: z[:, -1].tolist(),
}


@pytest.mark.parametrize("change", LATER)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("reader", READERS)
def test_logits_are_those_of_the_adapters_of_their_forward(change, grad, reader):
    results = []
    for model in two_adapters():
        with torch.set_grad_enabled(grad):
            logits = model(input_ids=INPUTS["input_ids"]).logits
            LATER[change](model)
            results.append(torch.tensor(READERS[reader](logits)))
    torch.testing.assert_close(results[1], results[0])


def test_logits_after_a_change_of_adapters():
    results = []
    for model in two_adapters(second={"target_modules": ["q_proj"]}):
        model.set_adapter("other")
        logits = model(input_ids=INPUTS["input_ids"]).logits
        model.set_adapter("default")  # whose head has an adapter
        results.append(logits.clone().tolist())
    torch.testing.assert_close(torch.tensor(results[1]), torch.tensor(results[0]))


def test_logits_cannot_be_computed_after_a_merge():
    """PEFT writes merged weights through .data, which no version counter sees."""
    ours = two_adapters()[1]
    out = ours(**INPUTS)
    ours.merge_adapter()
    with pytest.raises(RuntimeError, match="adapters have been merged"):
        out.logits.sum()


def test_keyword_of_a_plain_head():
    stock, ours = pair("llama", num_hidden_layers=1, patching={})
    hidden = torch.randn(2, 3, 32)
    torch.testing.assert_close(ours.lm_head(input=hidden) + 0.0, stock.lm_head(input=hidden))


def test_non_numeric_scale_is_left_to_peft():
    stock, ours = two_adapters()
    for model in (stock, ours):
        for module in model.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling["default"] = torch.tensor(1.5)
    assert_same_outputs(stock, ours, grad=True)


# --- shared inputs ---


PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class Attention(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.q_proj = nn.Linear(16, 24, bias=bias)
        self.k_proj = nn.Linear(16, 12, bias=bias)
        self.v_proj = nn.Linear(16, 12, bias=bias)

    def forward(self, x, other=None, mask=None):
        return mixed(*(getattr(self, name)(x) for name in PROJECTIONS))


def mixed(q, k, v):
    return torch.tanh(q) * torch.cat([k.sigmoid(), v.sin()], -1)


def _written(m, x):
    """Outputs are written to, as with the clip_qkv of OLMo, and layers are called again."""
    q, k, v = (getattr(m, name)(x).clamp_(-0.5, 0.5) for name in PROJECTIONS)
    return q * m.q_proj(x).tanh() * torch.cat([k, m.k_proj(x).tanh() + v], -1)


def _changed(m, x):
    """Between two calls, the input becomes another."""
    q, k = m.q_proj(x), m.k_proj(x)
    x += 1
    return q * torch.cat([k, m.v_proj(x)], -1)


def _elsewhere(m, x):
    """Some calls record gradients and others do not."""
    with torch.no_grad():
        q = m.q_proj(x)
    return q * torch.cat([m.k_proj(x), m.v_proj(x)], -1)


def _fails(m, x):
    m.q_proj(x)
    raise ValueError("as it must")


FORWARDS = {
    "plain": Attention.forward,
    "keys of a half": lambda m, x: mixed(m.q_proj(x), m.k_proj(x / 2), m.v_proj(x)),
    "no keys": lambda m, x: m.q_proj(x) * torch.cat([x[..., :12], m.v_proj(x).sin()], -1),
    "written": _written,
    "elsewhere": _elsewhere,
    "keys of another": lambda m, x, y: mixed(m.q_proj(x), m.k_proj(y), m.v_proj(y)),
    "changed": _changed,
    "fails": _fails,
}


def adapted_attention(forward="plain", targets=PROJECTIONS, dtype=torch.float32, **config):
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), **config)
    module = Attention() if forward == "plain" else variant(Attention, FORWARDS[forward])
    stock = peft.inject_adapter_in_model(settings, module)
    for name, parameter in stock.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" not in name:
            parameter.data = parameter.data.to(dtype)
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    ours = copy.deepcopy(stock)
    assert {e.replaced_by for e in patch(ours).entries if e.op == "lora"} == {"lora_qkv"}
    assert isinstance(ours, SharedInput)
    return stock, ours


@pytest.fixture
def layers_of_calls(monkeypatch):
    """The layers that every call of the operator had."""
    letters = lambda x, **kwargs: "".join(n[0] for n in kwargs if n.endswith("_weight"))  # noqa: E731
    return recorded(monkeypatch, ops, "lora_qkv", letters)


def results(module, *inputs, run=None, **options):
    """Output and gradients by name; of parameters that nothing reached, None."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    module.zero_grad()
    y = (run or module)(*(x * 1 for x in inputs), **options)
    y.square().sum().backward()
    actual = {n: p.grad for n, p in module.named_parameters()}
    return {"y": y.detach()} | {f"d{i}": x.grad for i, x in enumerate(inputs)} | actual


def assert_same(stock, ours, *inputs, runs=(None, None), **options):
    """Outputs and gradients are equal, of the modules or of these runs of them."""
    expected, got = (
        results(m, *inputs, run=run, **options) for m, run in zip((stock, ours), runs, strict=True)
    )
    torch.testing.assert_close(got.pop("y"), expected.pop("y"), rtol=1e-5, atol=1e-5)
    assert_same_gradients(got, expected)


def inputs_of_attention(count=1):
    torch.manual_seed(1)
    return [torch.randn(2, 5, 16) for _ in range(count)]


@pytest.mark.parametrize("forward", [*FORWARDS][:5])
def test_modules_using_their_layers(forward, layers_of_calls):
    stock, ours = adapted_attention(forward)
    for _ in range(2):
        assert_same(stock, ours, *inputs_of_attention())
    assert layers_of_calls == 2 * ["qkv"]
    assert active_group.get() is None


def test_input_changed_between_calls(layers_of_calls):
    stock, ours = adapted_attention("changed")
    with torch.no_grad():
        torch.testing.assert_close(ours(inputs_of_attention()[0]), stock(inputs_of_attention()[0]))
    assert layers_of_calls == ["qkv"]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        results(ours, *inputs_of_attention())


def test_two_inputs_are_left_to_the_layers(layers_of_calls):
    stock, ours = adapted_attention("keys of another")
    assert_same(stock, ours, *inputs_of_attention(2))
    assert layers_of_calls == []
    x = inputs_of_attention()[0]  # the same tensor twice is one input
    assert_same(stock, ours, x, runs=[lambda x, m=m: m(x, x) for m in (stock, ours)])
    assert layers_of_calls == ["qkv"]


def test_a_mask_is_no_second_input(layers_of_calls):
    stock, ours = adapted_attention()
    assert_same(stock, ours, *inputs_of_attention(), mask=torch.zeros(2, 1, 5, 16))
    assert layers_of_calls == ["qkv"]


FORMS_OF_ATTENTION = {
    "some": ({"targets": ["q_proj", "v_proj"]}, "qk"),
    "ranks": ({"rank_pattern": {"k_proj": 2}}, "qkv"),
    "scales": ({"alpha_pattern": {"k_proj": 1}}, "qkv"),
    "bf16 and fp32": ({"dtype": torch.bfloat16}, "qkv"),
}


@pytest.mark.parametrize("form", FORMS_OF_ATTENTION)
def test_forms_of_adapters(form, layers_of_calls):
    config, layers = FORMS_OF_ATTENTION[form]
    stock, ours = adapted_attention(**config)
    x = inputs_of_attention()[0].to(config.get("dtype", torch.float32))
    if x.dtype == torch.float32:
        assert_same(stock, ours, x)
    else:
        exact = copy.deepcopy(stock).double()
        by_hand, expected, got = (
            results(m, x.to(next(m.parameters()).dtype)) for m in (exact, stock, ours)
        )
        for name, value in by_hand.items():
            if value is not None:
                near, far = ((r[name].double() - value).norm() for r in (got, expected))
                assert near <= 1.1 * far + 1e-5 * value.norm(), name
    assert layers_of_calls == [layers]


def test_layers_with_more_than_an_adapter(layers_of_calls):
    stock, ours = adapted_attention()
    observed = []
    for module in (stock, ours):
        module.k_proj.register_forward_hook(lambda *args: observed.append(1))
    assert_same(stock, ours, *inputs_of_attention())
    assert (layers_of_calls, len(observed)) == (
        ["qk"],
        2,
    )  # two of them, in the operator's first places
    for module in (stock, ours):
        module.q_proj.base_layer.weight.requires_grad_()
    assert_same(stock, ours, *inputs_of_attention())
    assert layers_of_calls == ["qk"]  # one is not worth it
    for module in (stock, ours):
        module.q_proj.base_layer.weight.requires_grad_(False)
        module.q_proj.merge()
    assert_same(stock, ours, *inputs_of_attention())
    assert layers_of_calls == ["qk"]


def test_a_dropout_and_another_rule_are_pefts(layers_of_calls):
    for config in ({"lora_dropout": 0.5}, {"use_dora": True}):
        torch.manual_seed(0)
        settings = peft.LoraConfig(r=2, target_modules=list(PROJECTIONS), **config)
        stock = peft.inject_adapter_in_model(settings, Attention())
        ours = patched_copy(stock)
        assert type(ours) is Attention

        def run(module, x):
            torch.manual_seed(2)
            return module(x)

        x = inputs_of_attention()[0]
        expected, got = (results(m, x, run=lambda x, m=m: run(m, x)) for m in (stock, ours))
        assert torch.equal(expected["y"], got["y"])
    stock, ours = adapted_attention(lora_dropout=0.0)
    for module in (stock, ours):  # it acts in training only, and is asked at every call
        module.q_proj.lora_dropout["default"] = nn.Dropout(0.5)
        module.eval()
    assert_same(stock, ours, *inputs_of_attention())
    ours.train()(*inputs_of_attention())
    assert layers_of_calls == ["qkv", "qk"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_shared_inputs(reentrant, layers_of_calls):
    stock, ours = adapted_attention()
    runs = [lambda x, m=m: checkpoint(m, x, use_reentrant=reentrant) * 1 for m in (stock, ours)]
    assert_same(stock, ours, *inputs_of_attention(), runs=runs)
    assert layers_of_calls == ["qkv", "qkv"]


def test_without_gradients(layers_of_calls):
    stock, ours = adapted_attention()
    x = inputs_of_attention()[0]
    with torch.no_grad():
        torch.testing.assert_close(ours(x), stock(x))
    assert layers_of_calls == ["qkv"]
    with torch.inference_mode():  # tensors without versions
        torch.testing.assert_close(ours(x * 1), stock(x * 1))
    assert layers_of_calls == ["qkv"]


def test_hooks_of_parameters_fire_once():
    ours, fired = adapted_attention()[1], []
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    results(ours, *inputs_of_attention())
    assert sorted(fired) == sorted(n for n, p in ours.named_parameters() if p.requires_grad)


def test_gradients_have_memory_of_their_own():
    actual = [
        g for g in results(adapted_attention()[1], *inputs_of_attention()).values() if g is not None
    ]
    assert len({g.untyped_storage().data_ptr() for g in actual}) == len(actual)


@pytest.mark.parametrize("forward", ["no keys", "fails"])
def test_nothing_outlives_the_call(forward, monkeypatch):
    ours, held, stock = adapted_attention(forward)[1], [], ops.lora_qkv

    def noted(x, **kwargs):
        output = stock(x, **kwargs)
        held.extend(map(weakref.ref, output))
        return output

    monkeypatch.setattr(ops, "lora_qkv", noted)
    x, error = inputs_of_attention()[0].requires_grad_() * 1, None
    gc.disable()
    try:
        y = ours(x)
    except ValueError as raised:
        error = raised  # and with it, frames
    finally:
        gc.enable()
    assert (error is None) == (forward == "no keys")
    assert len(held) == 3
    assert held[1]() is None  # the keys, which nobody came for
    assert active_group.get() is None
    if error is None:
        del y


def test_shared_inputs_save_ranks_for_backward():
    """The input once and 3 r numbers a row, where PEFT keeps three copies of it."""
    stock, ours = adapted_attention(dtype=torch.bfloat16)
    rows, width, rank = 7, 16, 4
    after = 2 * rows * 24 * 2 + 2 * rows * 12 * 2  # of tanh, cat, sigmoid and sin
    runs = functools.partial(Attention.forward, stock), ours
    sizes = 3 * rows * (width + rank) * 4, 3 * rows * rank * 4
    for run, module, size in zip(runs, (stock, ours), sizes, strict=True):
        x = torch.randn(rows, width, dtype=torch.bfloat16, requires_grad=True) * 1
        _, kept = saved(functools.partial(run, x), but=[x, *module.parameters()])
        assert storage_bytes(kept) == size + after


def test_copies_pickles_and_states(layers_of_calls):
    stock, ours = adapted_attention()
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert vars(ours).keys() == vars(stock).keys()
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert swapped(twin) == swapped(ours)
        assert_same(stock, twin, *inputs_of_attention())
    assert layers_of_calls == ["qkv", "qkv"]
    loaded = adapted_attention()[1]
    loaded.load_state_dict(stock.state_dict())
    assert_same(stock, loaded, *inputs_of_attention())


def test_patching_again_and_back(layers_of_calls):
    ours = adapted_attention()[1]
    assert {e.status for e in patch(ours).entries} == {"already patched"}
    assert {e.op for e in patch(ours, lora=False).entries} == {"lora"}
    assert type(ours) is Attention
    patch(ours)
    unpatch(ours)
    assert not patched_ops(ours)


def test_a_named_backend(layers_of_calls):
    stock = adapted_attention()[0]
    ours = copy.deepcopy(stock)
    report = patch(ours, lora="reference")
    assert [e.options for e in report.entries] == 3 * [{"backend": "reference"}]
    assert_same(stock, ours, *inputs_of_attention())
    assert layers_of_calls == ["qkv"]


def test_a_compiled_module_has_its_layers(layers_of_calls):
    stock, ours = adapted_attention()
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*inputs_of_attention()), stock(*inputs_of_attention()))
    assert layers_of_calls == []
