"""Output embeddings: which modules are one, and which of them stay as they are."""

# ruff: noqa: E402  (what needs transformers is imported after the skip)
import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

transformers = pytest.importorskip("transformers")


from liger_multi.patching import patch, unpatch
from tests.models import assert_same_training, batch, build, pair


@pytest.mark.parametrize("reason", ["hooked", "replaced", "embedding", "adapter"])
def test_unfit_heads_stay(reason):
    model = build()
    head = model.lm_head
    if reason == "hooked":
        head._is_hooked = True  # transformers' mark on the modules of a tensor parallel model
        head.register_forward_hook(lambda module, args, output: output)
    elif reason == "replaced":
        head.forward = functools.partial(nn.Linear.forward, head)
    elif reason == "embedding":
        model.lm_head = nn.Sequential(nn.Linear(32, 223))
    else:
        head.base_layer = nn.Linear(2, 2)
    module_class = type(model.lm_head)
    report = patch(model)
    assert type(model.lm_head) is module_class
    words = {
        "hooked": "tensor parallel, but its weight is no DTensor",
        "replaced": "somebody else",
        "embedding": "Sequential, not a plain",
        "adapter": "adapter",
    }
    assert words[reason] in report.skipped[0].reason
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
    report = patch(ours)
    assert "not a plain linear layer" in str(report)
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)


def test_heads_in_eight_bits_say_so():
    model = build("llama", tied=False)
    weight = model.lm_head.weight.detach().to(torch.float8_e4m3fn)
    model.lm_head.weight = nn.Parameter(weight, requires_grad=False)
    report = patch(model)
    assert "is stored as torch.float8_e4m3fn" in str(report)
    assert type(model.lm_head) is nn.Linear


@pytest.mark.parametrize("tied", [False, True])
def test_a_resized_vocabulary_keeps_the_fused_head(tied):
    stock, ours = pair(tied=tied)
    patch(ours, fused_linear_cross_entropy={"chunk": 5})
    for model in (stock, ours):
        torch.manual_seed(0)
        model.resize_token_embeddings(240, mean_resizing=False)
    stock.load_state_dict(ours.state_dict())
    assert type(stock.lm_head) is nn.Linear
    assert ours.lm_head._liger_multi_swap.settings.fused.chunk == 5
    assert_same_training(stock, ours, lambda m: m(**batch()).loss)
    unpatch(ours)
    assert type(ours.lm_head) is nn.Linear
