"""Scripts written for Liger-Kernel run here: what its README, its pages and its examples do."""

import inspect
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from liger_multi.compat import liger_kernel as alias
from liger_multi.compat.liger_kernel.models import MODELS
from tests.models import ARCHITECTURES, build

pytestmark = pytest.mark.usefixtures("installed")


@pytest.fixture
def saved(tmp_path):
    """A small Llama on disk, and the loss and gradient norm that it has unpatched."""
    model = build()
    model.save_pretrained(tmp_path)
    return tmp_path, *trained(model)


IDS = torch.randint(1, 60, (2, 12), generator=torch.Generator().manual_seed(0))


def trained(model):
    """The loss of a model, and the norm of its gradients."""
    model.train()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return loss.detach(), torch.stack([g.norm() for g in grads]).norm()


def counts(model):
    from liger_multi.patching.swap import Patched, swapped

    ops = [swapped(m).op for m in model.modules() if isinstance(m, Patched)]
    return {op: ops.count(op) for op in sorted({*ops} - {"loss options"})}  # the model itself


# --- models ---


@pytest.mark.parametrize(
    ("flags", "off"),
    [
        ({}, set()),
        (
            {
                "rope": True,
                "swiglu": True,
                "cross_entropy": True,
                "fused_linear_cross_entropy": False,
                "rms_norm": False,
            },
            {"rms_norm", "fused_linear_cross_entropy"},
        ),
        ({"fused_linear_cross_entropy": True, "cross_entropy": False}, set()),
    ],
)
def test_apply_before_from_pretrained(saved, flags, off):
    import transformers
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    path, loss, norm = saved
    apply_liger_kernel_to_llama(**flags)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    torch.testing.assert_close(trained(model), (loss, norm), rtol=1e-5, atol=1e-6)
    everything = {"rms_norm", "rope", "swiglu", "fused_linear_cross_entropy"}
    assert everything - {*counts(model)} == off


def applied(name):
    """The function of a name, and its flags."""
    from liger_kernel import transformers as home

    function = getattr(home, f"apply_liger_kernel_to_{name}")
    return function, [n for n in inspect.signature(function).parameters if n != "model"]


def takes_every_flag(name, make):
    """Patch what ``make`` builds, as a model and as a type, by every flag; what is then patched."""
    function, flags = applied(name)
    every = {flag: flag != "cross_entropy" for flag in flags}
    model, none = make(), make()
    function(model=model, **every)
    patched = counts(model)
    function(model=none, **dict.fromkeys(flags, False))
    assert counts(none) == {}
    function(**every)
    try:
        assert counts(make()) == patched
        function(**dict.fromkeys(flags, False))
        assert counts(make()) == {}
    finally:
        alias.uninstall()
        alias.install()
    assert counts(make()) == {}
    return model, patched


FEW = ("llama", "gemma3_text", "phi3", "mixtral")


@pytest.mark.parametrize("family", FEW)
def test_apply_flags_on_model_and_type(family):
    model, patched = takes_every_flag(family, lambda: build(family))
    assert patched["rms_norm"] == ARCHITECTURES[family].counts["rms_norm"]
    torch.testing.assert_close(trained(model), trained(build(family)), rtol=1e-4, atol=1e-5)
    function, flags = applied(family)
    for flag in flags:  # each alone, by its name
        alone = build(family)
        function(model=alone, **{f: f == flag for f in flags})
        assert {*counts(alone)} <= {flag, "fused_moe" if flag == "swiglu" else flag}


def of_type(model_type):
    """A tiny model of a type."""
    from transformers import CONFIG_MAPPING, AutoModel

    from tests.sweep import cases

    pair = next((p for p in cases.registered() if p.type == model_type), None)
    if pair is not None:
        return cases.build(pair)
    return AutoModel.from_config(cases.shrink(CONFIG_MAPPING[model_type]()))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_flags_of_every_function(name):
    """Numbers of every type are compared by tests.sweep; here flags and what they patch."""
    from transformers import CONFIG_MAPPING

    model_types = [t for t in MODELS[name][0] if t in CONFIG_MAPPING]
    if not model_types:
        pytest.skip(f"this transformers has no {', '.join(MODELS[name][0])}")
    _, patched = takes_every_flag(name, lambda: of_type(model_types[0]))
    assert patched


@pytest.mark.parametrize("where", ["class", "instance"])
def test_assigned_lce_forward(monkeypatch, where):
    from liger_kernel.transformers.model.llama import lce_forward

    model, stock = build(), trained(build())
    module_class = type(model)
    if where == "class":
        monkeypatch.setattr(module_class, "forward", lce_forward)
    else:
        model.forward = types.MethodType(lce_forward, model)
    actual = trained(model)
    torch.testing.assert_close(actual, stock, rtol=1e-5, atol=1e-6)
    assert counts(model) == {"fused_linear_cross_entropy": 1}
    with torch.no_grad():
        out = model(input_ids=IDS, labels=IDS, skip_logits=True)
    assert out.logits.shape == (*IDS.shape, model.config.vocab_size)


@pytest.mark.slow
def test_assigned_forward_compiles_after_first_call():
    from liger_kernel.transformers.model.llama import lce_forward

    torch.compiler.reset()
    model, expected = build(), build()(input_ids=IDS, labels=IDS).loss
    model.forward = types.MethodType(lce_forward, model)
    model(input_ids=IDS, labels=IDS)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    actual = compiled(input_ids=IDS, labels=IDS).loss
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    actual.backward()


def test_lce_forward_unknown_class_error():
    from liger_kernel.transformers.model.llama import lce_forward

    with pytest.raises(TypeError, match="the forward of Linear is not known"):
        lce_forward(nn.Linear(2, 2))


# --- losses and functions ---


def test_medusa_heads_loss():
    """As in the example of Medusa: the sum of the losses of several heads on one hidden state."""
    from liger_kernel.transformers.fused_linear_cross_entropy import (
        LigerFusedLinearCrossEntropyLoss,
    )

    torch.manual_seed(0)
    hidden, labels = torch.randn(2, 9, 16, requires_grad=True), torch.randint(30, (2, 9))
    heads = [nn.Linear(16, 30, bias=False) for _ in range(3)]
    lce = LigerFusedLinearCrossEntropyLoss()
    total = expected = 0
    for i, head in enumerate(heads):
        states = hidden[..., : -(1 + i), :].contiguous().view(-1, 16)
        shifted = labels[..., (1 + i) :].contiguous().view(-1)
        total = total + lce(head.weight, states, shifted)
        expected = expected + F.cross_entropy(head(states), shifted)
    leaves = [hidden, *[h.weight for h in heads]]
    gradients, right = torch.autograd.grad(total, leaves), torch.autograd.grad(expected, leaves)
    torch.testing.assert_close((total, *gradients), (expected, *right))


# --- trainers ---


@pytest.mark.slow
def test_liger_orpo_trainer(tmp_path, monkeypatch):
    from liger_kernel.transformers.trainer import LigerORPOTrainer

    orpo = pytest.importorskip("trl.experimental.orpo")
    from tests.trainers.runs import setting

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from datasets import Dataset

    data = Dataset.from_list([setting.FORMATS["pairs"](d) for d in setting.dialogues()])
    losses = {}
    for trainer_class in (orpo.ORPOTrainer, LigerORPOTrainer):
        args = orpo.ORPOConfig(
            output_dir=str(tmp_path),
            beta=0.1,
            max_length=32,
            per_device_train_batch_size=2,
            max_steps=3,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            learning_rate=1e-2,
            logging_steps=1,
            seed=3,
        )
        trainer = trainer_class(
            model=setting.model(0),
            args=args,
            processing_class=setting.tokenizer(),
            train_dataset=data,
        )
        trainer.train()
        losses[trainer_class] = [r["loss"] for r in trainer.state.log_history if "loss" in r]
    stock, ours = losses.values()
    assert issubclass(LigerORPOTrainer, orpo.ORPOTrainer)
    assert counts(trainer.model)["rms_norm"] == 9
    assert ours == pytest.approx(stock, rel=1e-4)


def test_orpo_trainer_needs_trl(monkeypatch):
    from liger_multi.compat.liger_kernel import orpo

    orpo._made.cache_clear()
    monkeypatch.setattr(orpo, "HOMES", ("nowhere",))
    with pytest.raises(ImportError, match="needs the ORPOTrainer of TRL"):
        orpo.LigerORPOTrainer  # noqa: B018
