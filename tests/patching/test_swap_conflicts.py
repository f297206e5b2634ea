"""Patches of other libraries are reported and left alone."""

# ruff: noqa: E402  (what needs transformers is imported after the skip)
import types

import pytest
import torch.nn.functional as F

transformers = pytest.importorskip("transformers")

from transformers.models.llama.modeling_llama import LlamaMLP

from liger_multi.errors import PatchError
from liger_multi.patching import (
    patch,
)
from tests.models import build
from tests.patching.test_norms_find import modeling

# --- patches of others ---


def foreign(function, library="liger_kernel.transformers.rms_norm"):
    copied = types.FunctionType(function.__code__, globals(), function.__name__)
    copied.__module__ = library
    return copied


def test_forwards_of_other_libraries_are_told_apart(monkeypatch):
    stock = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", foreign(stock))
    report = patch(build("llama"))
    assert {s.reason for s in report.skipped if s.op == "swiglu"} == {"Liger serves it (LlamaMLP)"}
    assert report.count("swiglu") == 0
    assert report.count("fused_linear_cross_entropy") == 1


def test_a_loss_in_a_foreign_forward_is_left(monkeypatch):
    model_class = transformers.LlamaForCausalLM
    monkeypatch.setattr(model_class, "forward", foreign(lambda self: None, "liger_kernel.x"))
    report = patch(build("llama"))
    (skip,) = [s for s in report.skipped if s.op == "fused_linear_cross_entropy"]
    assert skip.reason == "Liger replaced the forward of LlamaForCausalLM, with the loss in it"
    with pytest.raises(PatchError, match="Liger"):
        patch(build("llama"), strict=True)


def test_a_foreign_loss_function_is_left(monkeypatch):
    monkeypatch.setattr(F, "cross_entropy", foreign(lambda: None, "unsloth_zoo.losses"))
    report = patch(build("llama"))
    assert "Unsloth replaced torch.nn.functional.cross_entropy" in str(report)
    assert report.count("fused_linear_cross_entropy") == 0


def test_a_trainers_head_is_left():
    model = build("llama")
    model.forward = types.MethodType(foreign(lambda self: None, "trl.trainer.utils"), model)
    assert "TRL replaced the forward of LlamaForCausalLM" in str(patch(model))


def test_a_foreign_rotary_function_is_left(monkeypatch):
    module = modeling("llama")
    monkeypatch.setattr(module, "apply_rotary_pos_emb", foreign(module.apply_rotary_pos_emb))
    report = patch(build("llama"))
    assert report.count("rope") == 0
    assert "Liger put its apply_rotary_pos_emb into the modeling file" in str(report)
