"""What the forward of a model takes and returns that is patched by the names of Liger-Kernel."""

import copy
import importlib
import inspect
import io
import pickle
from types import MethodType

import pytest
import torch
import torch.nn.functional as F

from liger_multi import unpatch
from liger_multi.compat import liger_kernel as alias
from liger_multi.errors import PatchError
from tests.comparing import assert_same_gradients, gradients
from tests.models import patched_ops

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
IDS = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(1))
LABELS = IDS.clone()
LABELS[0, :3] = LABELS[1, 7] = -100
LABELS[0, 4], LABELS[1, 2] = 34, 35  # the likeliest tokens of build(), so that some are right
WEIGHT = torch.rand(50, generator=torch.Generator().manual_seed(2)) + 0.5


@pytest.fixture(autouse=True)
def installed():
    alias.install(force=True)
    yield
    alias.uninstall()


def served(path=""):
    return importlib.import_module(f"liger_kernel.transformers{path}")


def build(family="Llama", **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **more)
    return getattr(transformers, f"{family}ForCausalLM")(config).train()


def patched(family="Llama", **more):
    model = build(family, **more)
    served()._apply_liger_kernel_to_instance(model=model)
    return model


def of_type(family="Llama", **more):
    """A model of a type that was patched before."""
    served().apply_liger_kernel_to_llama()
    try:
        return build(family, **more)
    finally:
        unpatch("llama")


def assigned(family="Llama", **more):
    """A model with the forward of ``liger_kernel.transformers.model``."""
    model = build(family, **more)
    model.forward = MethodType(served(".model.llama").lce_forward, model)
    return model


def formula(logits, target, **o):
    """The loss by PyTorch, of logits ``(B, T, V)`` and targets that are shifted."""
    z, t = logits.double().flatten(0, 1), target.flatten()
    cap = o.get("final_logit_softcapping")
    z = z if cap is None else cap * torch.tanh(z / cap)
    weight = o.get("ce_weight")
    each = F.cross_entropy(
        z,
        t,
        weight=None if weight is None else weight.double(),
        reduction="none",
        label_smoothing=o.get("label_smoothing", 0.0),
    )
    kept = t != -100
    of_target = kept.double() if weight is None else weight.double()[t * kept] * kept
    scale = 1.0
    if o.get("use_token_scaling"):
        scale = z.softmax(-1).gather(-1, (t * kept).unsqueeze(-1)).squeeze(-1).detach()
    items = o.get("num_items_in_batch")
    squares = o.get("lse_square_scale", 0.0) * z.logsumexp(-1).square() * kept
    loss, squares = (each * scale).sum(), (squares * scale).sum()
    if items is None:
        return loss / of_target.sum() + squares / kept.sum()
    return (loss + squares) / items


def shifted(labels):
    return F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()


def assert_formula(loss, logits, **options):
    """The loss is that of the formula, of logits for the labels."""
    expected = formula(logits, shifted(LABELS), **options)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)


OPTIONS = [
    {"label_smoothing": 0.1},
    {"lse_square_scale": 0.01},
    {"use_token_scaling": True},
    {"use_token_scaling": True, "num_items_in_batch": torch.tensor(7)},
    {"ce_weight": WEIGHT},
    {"final_logit_softcapping": 0.5},
    {"accum_dtype": torch.float32},
    {"label_smoothing": 0.1, "lse_square_scale": 0.01, "num_items_in_batch": 7},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o))
@pytest.mark.parametrize("patch", [patched, of_type, assigned])
def test_forward_options_reach_fused_loss(patch, options):
    stock, model = build(), patch()
    model(IDS, labels=LABELS)  # which readies a forward that was assigned
    expected = formula(stock(IDS).logits, shifted(LABELS), **options)
    expected.backward()
    actual = model(IDS, labels=LABELS, **options)
    actual.loss.backward()
    torch.testing.assert_close(actual.loss.double(), expected, rtol=1e-5, atol=1e-6)
    assert_same_gradients(gradients(model), gradients(stock), rtol=1e-4)


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Granite", "Cohere"])
def test_model_scale_and_softcap_with_options(family):
    more = {"logits_scaling": 3.0} if family == "Granite" else {}
    loss = patched(family, **more)(IDS, labels=LABELS, label_smoothing=0.2).loss
    assert_formula(loss, build(family, **more)(IDS).logits, label_smoothing=0.2)


@pytest.mark.parametrize("patch", [patched, of_type, assigned])
def test_the_loss_function_keeps_its_signature(patch):
    """Trainers read there whether the loss divides by a number of items that they hand over."""
    model = patch()
    model(IDS, labels=LABELS)
    signature = inspect.signature(model.loss_function)
    assert signature == inspect.signature(build().loss_function)
    assert "num_items_in_batch" in signature.parameters


@pytest.mark.parametrize("patch", [patched, assigned])
def test_requested_outputs_of_forward(patch):
    model = patch()
    plain = model(IDS, labels=LABELS)
    assert type(plain) is served(".model.output_classes").LigerCausalLMOutputWithPast
    assert plain.token_accuracy is None
    assert "token_accuracy" not in plain
    asked = model(IDS, labels=LABELS, return_token_accuracy=True, return_predicted_tokens=True)
    torch.testing.assert_close(asked.loss, plain.loss)
    logits, target = build()(IDS).logits, shifted(LABELS)
    kept, best = target != -100, logits.argmax(-1)
    assert asked.token_accuracy == ((best == target) & kept).sum() / kept.sum() > 0
    assert torch.equal(asked.predicted_tokens, torch.where(kept, best, -1).flatten())
    again = pickle.loads(pickle.dumps(asked))
    assert (type(again), again.token_accuracy) == (type(asked), asked.token_accuracy)
    loss, *_, accuracy = model(IDS, labels=LABELS, return_token_accuracy=True, return_dict=False)
    assert (loss, accuracy) == (asked.loss, asked.token_accuracy)


def test_moe_output_class_and_aux_loss():
    more = {"num_local_experts": 4, "output_router_logits": True}
    stock, model = build("Mixtral", **more), patched("Mixtral", **more)
    right, actual = stock(IDS, labels=LABELS), model(IDS, labels=LABELS, label_smoothing=0.1)
    assert type(actual) is served(".model.output_classes").LigerMoeCausalLMOutputWithPast
    torch.testing.assert_close(actual.aux_loss, right.aux_loss)
    own = actual.loss - stock.router_aux_loss_coef * right.aux_loss
    assert_formula(own, right.logits, label_smoothing=0.1)


@pytest.mark.parametrize("training", [True, False])
def test_shift_labels_without_labels(training):
    model, stock = patched().train(training), build().train(training)
    right = stock(IDS, labels=LABELS).loss
    for arguments in (
        {"shift_labels": shifted(LABELS)},
        {"shift_labels": shifted(LABELS), "labels": LABELS},
    ):
        torch.testing.assert_close(model(IDS, **arguments).loss, right)
        asked = model(IDS, label_smoothing=0.1, skip_logits=True, **arguments).loss
        assert_formula(asked, stock(IDS).logits, label_smoothing=0.1)


def test_options_apply_in_training_or_skip_logits():
    model = patched().eval()
    plain = model(IDS, labels=LABELS)
    actual = model(IDS, labels=LABELS, label_smoothing=0.1, return_token_accuracy=True)
    assert torch.equal(actual.loss, plain.loss)
    assert actual.token_accuracy is None
    assert model(IDS, labels=LABELS, label_smoothing=0.1, skip_logits=True).loss != plain.loss
    left = model.train()(IDS, labels=LABELS, label_smoothing=0.1, skip_logits=False)
    assert torch.equal(left.loss, plain.loss)
    with pytest.raises(ValueError, match="skip_logits is True, but labels"):
        model(IDS, skip_logits=True)
    assert model(IDS).loss is None
    off = model(IDS, labels=LABELS, return_token_accuracy=False, ce_weight=None)
    assert (off.token_accuracy, off.loss) == (None, plain.loss)


@pytest.mark.parametrize("why", ["hook", "adapter"])
def test_options_with_materialized_logits(why):
    model = patched()
    if why == "hook":
        model.lm_head.register_forward_hook(lambda *_: None)
    else:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["lm_head"]))
    options = {"label_smoothing": 0.1, "ce_weight": WEIGHT}
    actual = model(input_ids=IDS, labels=LABELS, return_token_accuracy=True, **options)
    assert_formula(actual.loss, build()(IDS).logits, **options)
    assert actual.token_accuracy is not None
    with pytest.raises(NotImplementedError, match="loss_type='dft'"):
        model(input_ids=IDS, labels=LABELS, use_token_scaling=True)


def test_unreachable_loss_options_raise():
    model = patched()
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.float().mean() * 0 + 7
    assert model(IDS, labels=LABELS).loss == 7  # a user's own

    class Alone(transformers.LlamaForCausalLM):
        def forward(self, input_ids, labels=None, **kwargs):
            logits = super().forward(input_ids, **kwargs).logits
            return transformers.modeling_outputs.CausalLMOutputWithPast(logits.mean(), logits)

    alone = Alone(transformers.LlamaConfig(**SIZES)).train()
    served()._apply_liger_kernel_to_instance(model=alone)
    assert alone(IDS, labels=LABELS).loss is not None
    assert alone(IDS, labels=LABELS, return_token_accuracy=True).token_accuracy is None
    with pytest.raises(NotImplementedError, match="Alone computes its loss itself, and label_smo"):
        alone(IDS, labels=LABELS, label_smoothing=0.1)


def test_patched_model_copies_and_unpatches():
    model = patched()
    expected = model(IDS, labels=LABELS, label_smoothing=0.1).loss
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    copies = (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(saved, weights_only=False),
    )
    for other in copies:
        assert torch.equal(other(IDS, labels=LABELS, label_smoothing=0.1).loss, expected)
    assert inspect.signature(model.forward) == inspect.signature(build().forward)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.generate(IDS, max_new_tokens=2, do_sample=False).shape == (2, 11)
    unpatch(model)
    assert not patched_ops(model)
    assert type(model) is transformers.LlamaForCausalLM
    assert type(model(IDS)) is transformers.modeling_outputs.CausalLMOutputWithPast


def test_unfused_model_keeps_its_class():
    model = build()
    served().apply_liger_kernel_to_llama(model=model, fused_linear_cross_entropy=False)
    assert type(model) is transformers.LlamaForCausalLM
    other = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES))
    served().apply_liger_kernel_to_llama(model=other)
    assert type(other) is transformers.LlamaForSequenceClassification
    with pytest.raises(PatchError, match="unknown kernel option"):
        served().apply_liger_kernel_to_llama(model=model, fused_loss=True)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_options_with_checkpointing_and_compile(checkpointing):
    model = patched()
    if checkpointing:
        model.gradient_checkpointing_enable()
    right = model(IDS, labels=LABELS, label_smoothing=0.1, use_cache=False)
    right.loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=not checkpointing)
    for length in (9, 5):
        options = {"labels": LABELS[:, :length], "label_smoothing": 0.1, "use_cache": False}
        actual = compiled(IDS[:, :length], return_token_accuracy=True, **options)
        assert actual.token_accuracy is not None
        if length == 9:
            actual.loss.backward()
            torch.testing.assert_close(actual.loss, right.loss)
            torch.testing.assert_close(
                [p.grad for p in model.parameters()], [*expected], rtol=1e-5, atol=1e-6
            )


@pytest.mark.parametrize("patch", [build, patched])
def test_lce_maybe_trainable_lm_head(patch):
    loss_of = served(".model.llama").lce_maybe_trainable_lm_head
    model, hidden = patch(), torch.randn(2, 9, 32, requires_grad=True)
    loss = loss_of(model, hidden, 32, LABELS, None, label_smoothing=0.1)
    assert_formula(loss, hidden @ build().lm_head.weight.T, label_smoothing=0.1)
    loss.backward()
    assert hidden.grad.abs().sum() > 0
    asked = loss_of(model, hidden, 32, None, shifted(LABELS), return_token_accuracy=True)
    assert asked.token_accuracy is not None
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    adapted = peft.get_peft_model(model, config).base_model.model
    with torch.no_grad():
        adapted.lm_head.modules_to_save["default"].weight.mul_(2)
    loss = loss_of(adapted, hidden, 32, LABELS, None)
    assert_formula(loss, hidden @ (2 * build().lm_head.weight).T)
