"""Another thread ends or changes a patch while a forward runs, at every line of the patching code.

A trace function stands for the other thread: threads switch between any two lines.
"""
# ruff: noqa: E402  (what needs transformers is imported after the skip)

import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

import liger_multi.patching
from liger_multi.patching import patch, unpatch
from liger_multi.patching.swap import swapped
from tests.models import ARCHITECTURES, batch, build

FOLDER = liger_multi.patching.__path__[0]
OTHER = {"rms_norm": False, "swiglu": False, "rope": False, "fused_linear_cross_entropy": False}
KINDS = ("llama", "gemma2", "qwen3_moe")


def adapted():
    peft = pytest.importorskip("peft")
    layers = ["q_proj", "k_proj", "v_proj", "up_proj", "lm_head"]
    model = peft.get_peft_model(
        build("llama", num_hidden_layers=1), peft.LoraConfig(r=2, target_modules=layers)
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def build_case(model_type):
    torch.manual_seed(0)
    if model_type == "adapters":
        return adapted()
    return build(model_type, num_hidden_layers=ARCHITECTURES[model_type].fewest_layers)


def results(model):
    model.zero_grad()
    outputs = model(**batch())
    outputs.loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": outputs.loss.detach(), "logits": (outputs.logits * 1.0).detach(), **grads}


class Meanwhile:
    """Calls ``action`` when a line of the patching code is first reached; counts the lines."""

    def __init__(self, line=None, action=lambda: None):
        self.line, self.action, self.lines = line, action, {}

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        here = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and here not in self.lines:
            self.lines[here] = True
            if here == self.line:
                self.action()
        return self

    def run(self, model):
        before = sys.gettrace()
        sys.settrace(self)
        try:
            return results(model)
        finally:
            sys.settrace(before)


def cases():
    """Model and options of the other patch, None for its end; the first of them is quick."""
    for model_type in (*KINDS, "adapters"):
        for other, name in ((None, "ended"), (OTHER, "changed")):
            quick = model_type == "llama" and other is None
            marks = () if quick else pytest.mark.slow
            yield pytest.param(model_type, other, id=f"{model_type}-{name}", marks=marks)


@pytest.mark.parametrize(("model_type", "other"), cases())
def test_at_every_line(model_type, other):
    model = build_case(model_type)
    expected = results(model)

    def act():
        unpatch(model) if other is None else patch(model, **other)

    patch(model)
    meanwhile = Meanwhile()
    meanwhile.run(model)
    assert len(meanwhile.lines) > 100
    for line in meanwhile.lines:
        patch(model)
        actual = Meanwhile(line, act).run(model)
        torch.testing.assert_close(
            actual, expected, rtol=1e-4, atol=1e-5, msg=lambda m, line=line: f"{line}: {m}"
        )
    unpatch(model)
    assert all(swapped(m) is None for m in model.modules())
