"""Calls of LoRA layers in every form that PEFT has, on patched and unpatched models alike."""
# ruff: noqa: E402  (what needs transformers is imported after the skip)

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

from test_adapters import ATTENTION, MLP, filled, lora

from liger_multi.patching import patch
from liger_multi.patching.lazy_logits.lazy_tensor import LazyLogits
from tests.models import batch, build

EVERYWHERE = (*ATTENTION, *MLP, "lm_head")
INPUTS = {name: torch.cat([t, t.flip(1)]) for name, t in batch().items()}
"""Four rows, so that a batch can mix three adapters."""
MIXED = ["default", "other", "__base__", "default"]


def two_adapters(first=None, second=None, patch_first=False):
    """A stock model and a patched one with two adapters each, in eval mode."""
    models = []
    for ours in (False, True):
        model = build("llama", num_hidden_layers=1)
        if ours and patch_first:
            patch(model)
        model = lora(model, EVERYWHERE, task_type="CAUSAL_LM", **(first or {}))
        torch.manual_seed(5)
        options = {"r": 2, "target_modules": ["q_proj", "up_proj", "lm_head"], **(second or {})}
        options["task_type"] = "CAUSAL_LM"
        model.add_adapter("other", peft.LoraConfig(**options))
        if ours and not patch_first:
            patch(model)
        models.append(filled_again(model).eval())
    return models


def filled_again(model):
    torch.manual_seed(9)
    return filled(model)


def assert_equal(stock, ours, grad=False, inputs=INPUTS, **call):
    """Losses and logits of two models, and their gradients."""
    with torch.set_grad_enabled(grad):
        wanted, got = (m(**inputs, **call) for m in (stock, ours))
    torch.testing.assert_close(got.loss, wanted.loss, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(got.logits + 0.0, wanted.logits, atol=5e-6, rtol=1e-5)
    if grad:
        for m, out in ((stock, wanted), (ours, got)):
            m.zero_grad()
            out.loss.backward()
        grads = {n: p.grad for n, p in stock.named_parameters() if p.grad is not None}
        assert {n for n, p in ours.named_parameters() if p.grad is not None} == set(grads)
        for name, p in ours.named_parameters():
            if name in grads:
                torch.testing.assert_close(p.grad, grads[name], atol=5e-6, rtol=1e-4)


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
    assert_equal(stock, ours, adapter_names=NAMES[names])
    assert_equal(stock, ours, grad=True)  # nothing of it is left for the next call


KINDS = {
    "dora on top": ({}, {"use_dora": True}),
    "dora": ({"use_dora": True}, {}),
    "rank-stabilized": ({"use_rslora": True}, {"use_rslora": True}),
    "dropout": ({"lora_dropout": 0.5}, {}),
    "biases": ({"lora_bias": True}, {}),
    "activated": ({"alora_invocation_tokens": [3, 4]}, {}),
    "both activated": ({"alora_invocation_tokens": [3]}, {"alora_invocation_tokens": [5, 6]}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_adapters_in_one_batch(kind):
    stock, ours = two_adapters(*KINDS[kind])
    if "dora" not in kind:  # PEFT refuses
        assert_equal(stock, ours, adapter_names=MIXED)
    for name in ("default", "other"):
        for model in (stock, ours):
            model.set_adapter(name)
        assert_equal(stock, ours, grad=True)


def test_keywords_of_adapters_reach_pefts_forward():
    """Whatever PEFT hands to a layer beside its input is PEFT's to interpret."""
    stock, ours = two_adapters()
    offsets = [None, 3, None, 5]
    assert_equal(stock, ours, alora_offsets=offsets)
    hidden = torch.randn(4, 3, 32)
    for path in ("lm_head", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"):
        layers = [m.base_model.model.get_submodule(path) for m in (stock, ours)]
        for call in ({"adapter_names": MIXED}, {"alora_offsets": offsets}):
            wanted, got = (layer(hidden, **call) for layer in layers)
            assert torch.equal(got, wanted)
        wanted, got = (layer(x=hidden) for layer in layers)
        torch.testing.assert_close(got, wanted)
        messages = []
        for layer in layers:
            with pytest.raises(TypeError) as raised:
                layer(hidden, nosuch=1)
            messages.append(str(raised.value))
        assert messages[0] == messages[1]


def test_generation_with_an_adapter_per_row():
    stock, ours = two_adapters()
    ids = INPUTS["input_ids"][:, :5]
    options = {"max_new_tokens": 4, "do_sample": False, "adapter_names": MIXED}
    wanted, got = (m.generate(input_ids=ids, **options) for m in (stock, ours))
    assert torch.equal(got, wanted)


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
        models.append(filled_again(model).eval())
    assert_equal(*models, adapter_names=MIXED)
    assert_equal(*models, grad=True)


def _merge(model):
    model.merge_adapter()


def _merge_and_back(model):
    model.merge_adapter()
    model.unmerge_adapter()


def _switch(model):
    model.set_adapter("other")


def _both(model):
    model.base_model.set_adapter(["default", "other"])


def _off(model):
    model.base_model.disable_adapter_layers()


def _off_and_on(model):
    with model.disable_adapter():
        model(**INPUTS)


def _one_more(model):
    torch.manual_seed(4)
    model.add_adapter("third", peft.LoraConfig(r=3, target_modules=["k_proj", "v_proj", "lm_head"]))
    filled_again(model).set_adapter("third")


def _one_less(model):
    model.delete_adapter("default")
    model.set_adapter("other")


def _scaled(model):
    for module in model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(0.5)


def _combined(model):
    model.add_weighted_adapter(["default", "other"], [0.7, 0.3], "sum", combination_type="cat")
    model.set_adapter("sum")


CHANGES = [_merge, _merge_and_back, _switch, _both, _off, _off_and_on, _one_more, _one_less]
CHANGES += [_scaled, _combined]


@pytest.mark.parametrize("change", CHANGES)
def test_adapters_that_change_after_the_patch(change):
    stock, ours = two_adapters()
    for model in (stock, ours):
        change(model)
    assert_equal(stock, ours, grad=change not in (_off, _merge))
    if change is not _merge:
        names = [n for n in MIXED if n in (*stock.peft_config, "__base__")]
        assert_equal(
            stock, ours, inputs={n: t[: len(names)] for n, t in INPUTS.items()}, adapter_names=names
        )
    patch(ours)
    assert_equal(stock, ours, grad=change not in (_off, _merge))


@pytest.mark.parametrize("end", ["merge_and_unload", "unload"])
def test_adapters_that_leave_a_patched_model(end):
    stock, ours = (getattr(m, end)().requires_grad_() for m in two_adapters())
    assert_equal(stock, ours, grad=True)
    patch(ours)
    assert_equal(stock, ours, grad=True)
    assert isinstance(ours(**INPUTS).logits, LazyLogits)


def test_copies_have_the_same_adapters():
    stock, ours = two_adapters()
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_equal(stock, copied, adapter_names=MIXED)


# --- logits that are computed later ---


def _disabled(model, read):
    with model.disable_adapter():
        return read()


def _switched(model, read):
    model.set_adapter("other")
    return read()


def _added(model, read):
    model.base_model.set_adapter(["default", "other"])
    return read()


def _deleted(model, read):
    model.delete_adapter("default")
    return read()


def _rescaled(model, read):
    model.base_model.model.lm_head.scale_layer(3.0)
    return read()


def _unpatched(model, read):
    if hasattr(type(model.base_model.model.lm_head), "_liger_multi_swap"):
        patch(model, fused_linear_cross_entropy=False)
        patch(model, fused_linear_cross_entropy=False)
    return read()


LATER = [_disabled, _switched, _added, _deleted, _rescaled, _unpatched]


@pytest.mark.parametrize("change", LATER)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("reader", ["logits", "loss", "row"])
def test_logits_are_those_of_the_adapters_of_their_forward(change, grad, reader):
    target = INPUTS["input_ids"].flatten()
    readers = {
        "logits": lambda z: z.clone().tolist(),
        "loss": lambda z: F.cross_entropy(z.flatten(0, -2), target).tolist(),
        "row": lambda z: z[:, -1].tolist(),
    }
    found = []
    for model in two_adapters():
        with torch.set_grad_enabled(grad):
            logits = model(input_ids=INPUTS["input_ids"]).logits
            found.append(change(model, lambda logits=logits: readers[reader](logits)))
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]))


def test_logits_of_a_head_without_its_adapters_stay_without():
    found = []
    for model in two_adapters(second={"target_modules": ["q_proj"]}):
        model.set_adapter("other")
        logits = model(input_ids=INPUTS["input_ids"]).logits
        model.set_adapter("default")  # whose head has an adapter
        found.append(logits.clone().tolist())
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]))


def test_logits_cannot_be_computed_after_a_merge():
    """PEFT writes merged weights through .data, which no version counter sees."""
    ours = two_adapters()[1]
    out = ours(**INPUTS)
    ours.merge_adapter()
    with pytest.raises(RuntimeError, match="adapters have been merged"):
        out.logits.sum()


def test_keyword_of_a_plain_head():
    stock, ours = build("llama", num_hidden_layers=1), build("llama", num_hidden_layers=1)
    patch(ours)
    hidden = torch.randn(2, 3, 32)
    torch.testing.assert_close(ours.lm_head(input=hidden) + 0.0, stock.lm_head(input=hidden))


def test_a_scale_that_is_no_number_is_pefts():
    stock, ours = two_adapters()
    for model in (stock, ours):
        for module in model.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling["default"] = torch.tensor(1.5)
    assert_equal(stock, ours, grad=True)
