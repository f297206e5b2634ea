"""Weights of norms that are written between forward and backward, patched and not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import liger_multi
from liger_multi import ops
from tests.models import batch, build

transformers = pytest.importorskip("transformers")

SIZE = 16


def _class(name: str) -> Any:
    module, _, class_name = name.rpartition(".")
    return getattr(pytest.importorskip(f"transformers.models.{module}"), class_name)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: _class("llama.modeling_llama.LlamaRMSNorm")(SIZE),
    "gemma": lambda: _class("gemma.modeling_gemma.GemmaRMSNorm")(SIZE),
    "olmo2": lambda: _class("olmo2.modeling_olmo2.Olmo2RMSNorm")(SIZE),
    "t5": lambda: _class("t5.modeling_t5.T5LayerNorm")(SIZE),
    "cohere": lambda: _class("cohere.modeling_cohere.CohereLayerNorm")(SIZE),
    "qwen3_next": lambda: _class("qwen3_next.modeling_qwen3_next.Qwen3NextRMSNormGated")(SIZE),
    "RMSNorm": lambda: nn.RMSNorm(SIZE, eps=1e-6),
    "LayerNorm": lambda: nn.LayerNorm(SIZE),
}


def outcome(norm: nn.Module, inputs: list[Tensor]) -> list[Tensor] | None:
    """The gradients after a write to the weight; None where PyTorch refuses them."""
    operands = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    y = norm(*operands)
    with torch.no_grad():
        norm.weight.mul_(3).add_(1)  # type: ignore[operator, union-attr]
    leaves = [t for t in (*operands, *norm.parameters()) if t.requires_grad]
    upstream = torch.arange(y.numel(), dtype=y.dtype).view_as(y) / 30
    try:
        return list(torch.autograd.grad(y, leaves, upstream, allow_unused=True))
    except RuntimeError:
        return None


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_allowed_as_unpatched(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    for trains_x, trains_weight in ((True, True), (True, False), (False, True)):
        stock = NORMS[name]().to(dtype)
        for p in stock.parameters():
            p.requires_grad_(trains_weight)
        model = nn.Sequential(copy.deepcopy(stock))
        report = liger_multi.patch(model, fused_linear_cross_entropy=False)
        assert report.entries
        inputs = [torch.randn(3, SIZE, generator=generator).to(dtype).requires_grad_(trains_x)]
        if name == "qwen3_next":
            inputs.append(torch.randn(3, SIZE, generator=generator).to(dtype))
        expected, got = outcome(stock, inputs), outcome(model[0], inputs)
        if expected is not None:
            assert got is not None, (trains_x, trains_weight)
            rtol = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(got, expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
    ("architecture", "written"),
    [
        ("gemma", "norm"),
        ("gemma3_text", "norm"),  # of queries and keys with their rotation, too
        ("llama", "layers.0.input_layernorm"),  # whose input needs no gradient
        ("qwen3", "layers.0.input_layernorm"),
    ],
)
def test_norms_in_a_model(architecture: str, written: str) -> None:
    stock = build(architecture)
    for name, p in stock.named_parameters():
        p.requires_grad_(written in name)
    ours = copy.deepcopy(stock)
    liger_multi.patch(ours)
    grads = []
    for model in (stock, ours):
        loss = model(**batch()).loss
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p.mul_(2)
        loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert grads[0]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)


def test_weights_are_read_only_for_needed_gradients() -> None:
    x = torch.randn(4, SIZE)
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "rms_norm": lambda w: ops.rms_norm(x, w),
        "gated_rms_norm": lambda w: ops.gated_rms_norm(x, x, w),
        "poly_norm": lambda w: ops.poly_norm(x, w[:3] * 1, torch.zeros(1)),
        "dyt": lambda w: ops.dyt(x, torch.ones(1), w, None),
    }
    for name, run in calls.items():
        weight = torch.rand(SIZE, requires_grad=True)
        expected = torch.autograd.grad(run(weight).sum(), weight)
        y = run(weight)
        with torch.no_grad():
            weight.mul_(5)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), weight), expected, msg=name)
    weight = torch.rand(SIZE, requires_grad=True)
    y = ops.rms_norm(x.requires_grad_(), weight)
    with torch.no_grad():
        weight.mul_(5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
