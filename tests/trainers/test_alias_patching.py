"""Models patched by the names of Liger-Kernel, as its README, its pages and trainers do it."""

import importlib.metadata
import inspect
import types

import pytest
import torch
from packaging.version import parse
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaConfig, GemmaMLP, GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

from liger_multi import unpatch
from liger_multi.compat import liger_kernel as alias
from liger_multi.compat.liger_kernel.models import MODELS
from liger_multi.errors import PatchError
from tests.models import (
    ARCHITECTURES,
    FusedCalls,
    arguments,
    build,
    pair,
    patched_ops,
    rows as data_of,
    tokenizer,
    trainer,
    with_words,
)
from tests.sweep import cases

OPS = {"fused_linear_cross_entropy": 1, "rms_norm": 5, "rope": 2, "swiglu": 2}
IDS = torch.randint(1, 60, (2, 12), generator=torch.Generator().manual_seed(0))


def without(*ops):
    return {op: n for op, n in OPS.items() if op not in ops}


def trained(model):
    loss = model.train()(input_ids=IDS, labels=IDS).loss
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return loss.detach(), torch.stack([g.norm() for g in grads]).norm()


# --- apply_liger_kernel_to_* ---


def test_apply_signatures_show_flags(liger):
    """LLaMA-Factory and axolotl read them from there."""
    flags = inspect.signature(liger.apply_liger_kernel_to_llama).parameters
    assert " ".join(flags) == "rope cross_entropy fused_linear_cross_entropy rms_norm swiglu model"
    assert flags["fused_linear_cross_entropy"].default is True
    assert flags["cross_entropy"].default is False
    assert "geglu" in inspect.signature(liger.apply_liger_kernel_to_gemma2).parameters
    types_ = liger.monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    assert types_["llama"] is liger.apply_liger_kernel_to_llama
    assert len(types_) == 53


def test_model_types_exist_in_transformers():
    """Where a function names several, one at least."""
    if parse(importlib.metadata.version("transformers")) < parse("5.23"):
        pytest.skip("some types are newer than this transformers")
    assert [name for name, (types_, _) in MODELS.items() if not {*types_} & {*CONFIG_MAPPING}] == []


LOSS = "fused_linear_cross_entropy"


@pytest.mark.parametrize(
    ("args", "flags", "expected"),
    [
        ((), {}, OPS),
        ((), {"rope": False, "swiglu": None}, without("rope", "swiglu")),
        ((), {"cross_entropy": True, LOSS: False}, {**without(LOSS), "cross_entropy": 1}),
        ((), {"rms_norm": "reference", LOSS: {"chunk": 3}}, OPS),
        ((False, False, True, False), {}, without("rope", "rms_norm")),
    ],
)
def test_flags_select_patches(liger, args, flags, expected):
    model = build()
    report = liger.apply_liger_kernel_to_llama(*args, model=model, **flags)
    assert patched_ops(model) == expected
    assert not any(s.strict for s in report.skipped)
    options = {e.op: e.options for e in report.entries}
    if "rms_norm" in flags:
        assert options["rms_norm"] == {"backend": "reference"}
        assert options[LOSS] == {"chunk": 3}


def flags_of(liger, name):
    function = getattr(liger, f"apply_liger_kernel_to_{name}")
    return function, [n for n in inspect.signature(function).parameters if n != "model"]


def takes_every_flag(liger, name, make):
    """Patch what ``make`` builds, as a model and as a type, by every flag; what is then patched."""
    function, flags = flags_of(liger, name)
    every = {flag: flag != "cross_entropy" for flag in flags}
    model, none = make(), make()
    function(model=model, **every)
    patched = patched_ops(model)
    function(model=none, **dict.fromkeys(flags, False))
    assert patched_ops(none) == {}
    function(**every)
    try:
        assert patched_ops(make()) == patched
        function(**dict.fromkeys(flags, False))
        assert patched_ops(make()) == {}
    finally:
        alias.uninstall()
        alias.install()
    assert patched_ops(make()) == {}
    return model, patched


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3", "mixtral"])
def test_apply_flags_on_model_and_type(liger, family):
    model, patched = takes_every_flag(liger, family, lambda: build(family))
    assert patched["rms_norm"] == ARCHITECTURES[family].counts["rms_norm"]
    torch.testing.assert_close(trained(model), trained(build(family)), rtol=1e-4, atol=1e-5)
    function, flags = flags_of(liger, family)
    for flag in flags:  # each alone, by its name, as LLaMA-Factory asks for it
        alone = build(family)
        function(model=alone, **{f: f == flag for f in flags})
        assert {*patched_ops(alone)} <= {flag, "fused_moe" if flag == "swiglu" else flag}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_flags_of_every_function(liger, name):
    """Numbers of every type are compared by tests.sweep; here flags and what they patch."""
    known = [t for t in MODELS[name][0] if t in CONFIG_MAPPING]
    if not known:
        pytest.skip(f"this transformers has no {', '.join(MODELS[name][0])}")

    def of_type():
        registered = next((p for p in cases.registered() if p.type == known[0]), None)
        if registered is not None:
            return cases.build(registered)
        return AutoModel.from_config(cases.shrink(CONFIG_MAPPING[known[0]]()))

    assert takes_every_flag(liger, name, of_type)[1]


def test_class_level_call_patches_later_models(liger, tmp_path):
    before = build()
    before.save_pretrained(tmp_path)
    liger.apply_liger_kernel_to_llama(swiglu=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert patched_ops(loaded) == without("swiglu")
    assert patched_ops(before) == patched_ops(build("qwen2")) == {}
    torch.testing.assert_close(trained(loaded), trained(before), rtol=1e-5, atol=1e-6)
    unpatch("llama")
    assert patched_ops(build()) == {}
    liger.apply_liger_kernel_to_llama()
    alias.uninstall()
    assert patched_ops(build()) == {}
    assert patched_ops(loaded) == without("swiglu")


@pytest.mark.parametrize("level", ["instance", "class"])
def test_unknown_option_error(liger, level):
    model = build() if level == "instance" else None
    with pytest.raises(PatchError, match=r"'swigl'; did you mean 'swiglu'"):
        liger.apply_liger_kernel_to_llama(model=model, swigl=True)
    with pytest.raises(PatchError, match=r"'chunks'.*did you mean 'chunk'"):
        liger.apply_liger_kernel_to_llama(model=model, fused_linear_cross_entropy={"chunks": 2})
    assert patched_ops(model or build()) == {}


def test_replaced_functional_loss_raises(liger):
    """axolotl's token scaling does this; no patched model would call it."""
    liger.functional.liger_fused_linear_cross_entropy = lambda *args, **kwargs: None
    model = build()
    with pytest.raises(PatchError, match="liger_fused_linear_cross_entropy was replaced"):
        liger.apply_liger_kernel_to_llama(model=model)
    assert patched_ops(model) == {}
    liger.apply_liger_kernel_to_llama(model=model, fused_linear_cross_entropy=False)
    assert patched_ops(model) == without("fused_linear_cross_entropy")


def test_auto_model(liger):
    assert issubclass(liger.AutoLigerKernelForCausalLM, AutoModelForCausalLM)
    model = liger.AutoLigerKernelForCausalLM.from_config(build().config, swiglu=False)
    assert patched_ops(model) == without("swiglu")


def test_auto_model_calls_registered_function(liger, monkeypatch, tmp_path):
    """Before the model is built, with the keywords that it names, as Liger-Kernel does."""
    calls, model = [], build()
    model.save_pretrained(tmp_path)

    def register(rope=True, mine=1):
        calls.append((rope, mine))

    monkeypatch.setitem(liger.MODEL_TYPE_TO_APPLY_LIGER_FN, "llama", register)
    auto = liger.AutoLigerKernelForCausalLM
    for built in (
        auto.from_config(model.config, rope=False, mine=2),
        auto.from_pretrained(tmp_path, rope=False, dtype=torch.float32),
        auto.from_pretrained(tmp_path, config=model.config, mine=3),
    ):
        assert patched_ops(built) == {}
    assert calls == [(False, 2), (False, 1), (True, 3)]


def test_registered_apply_function(liger, caplog, monkeypatch):
    calls, model = [], build()
    with monkeypatch.context() as patch:
        own = {"llama": lambda **kwargs: calls.append(kwargs)}
        patch.setitem(liger.MODEL_TYPE_TO_APPLY_LIGER_FN, "llama", own["llama"])
        liger._apply_liger_kernel("llama", rope=False)
        liger._apply_liger_kernel_to_instance(model, swiglu=False)
    assert calls == [{"rope": False}, {"model": model, "swiglu": False}]
    assert patched_ops(model) == {}
    liger._apply_liger_kernel_to_instance(model, swiglu=False)
    assert patched_ops(model) == without("swiglu")
    with caplog.at_level("INFO"):
        liger._apply_liger_kernel("nobody_has_this")
    assert "nobody_has_this" in caplog.text


def test_patch_module_helpers(liger):
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    norm, layer = GemmaRMSNorm(8, eps=0.1), nn.LayerNorm(8, eps=0.1)
    swiglu, geglu = LlamaMLP(LlamaConfig(**sizes)), GemmaMLP(GemmaConfig(**sizes))
    modules = (norm, layer, swiglu, geglu)
    expected = [module(x) for module in modules]
    helpers = liger.monkey_patch
    helpers._patch_rms_norm_module(norm, offset=1.0, casting_mode="gemma")
    helpers._patch_layer_norm_module(layer)
    helpers._patch_swiglu_module(swiglu, liger.LigerSwiGLUMLP)
    helpers._patch_geglu_module(geglu)
    for module, right in zip(modules, expected):
        assert "forward" in vars(module)
        torch.testing.assert_close(module(x), right)
    assert (norm.offset, norm.variance_epsilon, norm.casting_mode) == (1.0, 0.1, "gemma")


# --- a forward that a script puts in the model's place ---


@pytest.fixture
def lce_forward(installed):
    return importlib.import_module("liger_kernel.transformers.model.llama").lce_forward


@pytest.mark.parametrize("where", ["class", "instance"])
def test_assigned_lce_forward(lce_forward, monkeypatch, where):
    model, stock = build(), trained(build())
    if where == "class":
        monkeypatch.setattr(type(model), "forward", lce_forward)
    else:
        model.forward = types.MethodType(lce_forward, model)
    torch.testing.assert_close(trained(model), stock, rtol=1e-5, atol=1e-6)
    assert patched_ops(model) == {"fused_linear_cross_entropy": 1}
    with torch.no_grad():
        out = model(input_ids=IDS, labels=IDS, skip_logits=True)
    assert out.logits.shape == (*IDS.shape, model.config.vocab_size)


@pytest.mark.slow
def test_assigned_forward_compiles_after_first_call(lce_forward):
    model, expected = build(), build()(input_ids=IDS, labels=IDS).loss
    model.forward = types.MethodType(lce_forward, model)
    model(input_ids=IDS, labels=IDS)
    actual = torch.compile(model, backend="eager", fullgraph=True)(input_ids=IDS, labels=IDS).loss
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    actual.backward()


def test_lce_forward_unknown_class_error(lce_forward):
    with pytest.raises(TypeError, match="the forward of Linear is not known"):
        lce_forward(nn.Linear(2, 2))


# --- trainers ---


def curve(model, place, **options):
    trained = trainer(model, place, max_steps=2, **options)
    first = trained.evaluate()["eval_loss"]
    trained.train()
    steps = [entry["loss"] for entry in trained.state.log_history if "loss" in entry]
    return [first, *steps, trained.evaluate()["eval_loss"]]


@pytest.mark.slow
def test_trainer_use_liger_kernel(installed, tmp_path, monkeypatch):
    fused = FusedCalls(monkeypatch)
    stock, ours = pair()
    expected = curve(stock, tmp_path)
    assert fused.count == 0
    config = {"fused_linear_cross_entropy": {"chunk": 5}, "rope": False}
    got = curve(ours, tmp_path, use_liger_kernel=True, liger_kernel_config=config)
    assert got == pytest.approx(expected, rel=1e-5)
    assert {call["chunk"] for call in fused.keywords} == {5}
    assert patched_ops(ours) == without("rope")
    with pytest.raises(PatchError, match="'rms_nrom'"):
        curve(build(), tmp_path, use_liger_kernel=True, liger_kernel_config={"rms_nrom": True})


@pytest.mark.slow
def test_liger_orpo_trainer(liger, tmp_path, monkeypatch):
    orpo = pytest.importorskip("trl.experimental.orpo")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    ours_class, words, curves = liger.trainer.LigerORPOTrainer, tokenizer(), []
    assert issubclass(ours_class, orpo.ORPOTrainer)
    for trainer_class in (orpo.ORPOTrainer, ours_class):
        config = orpo.ORPOConfig(**arguments(tmp_path, max_steps=3), beta=0.1, max_length=32)
        model = with_words(words)
        own = trainer_class(
            model=model, args=config, processing_class=words, train_dataset=data_of("pair")
        )
        own.train()
        curves.append([r["loss"] for r in own.state.log_history if "loss" in r])
    assert patched_ops(model)["rms_norm"] == 5
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


def test_orpo_trainer_needs_trl(monkeypatch):
    from liger_multi.compat.liger_kernel import models

    models._trainer.cache_clear()
    monkeypatch.setattr(models, "TRL_HOMES", ("nowhere",))
    with pytest.raises(ImportError, match="needs the ORPOTrainer of TRL"):
        models.LigerORPOTrainer  # noqa: B018
