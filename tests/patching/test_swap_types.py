"""Code that looks up the exact class of a module finds that of the unpatched one."""

from __future__ import annotations

import copy
import operator
import pickle
import warnings
from abc import ABCMeta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import liger_multi
from tests.models import batch, build

quantization = pytest.importorskip("torch.ao.quantization")


def quantized(model: nn.Module, kinds: Any = None) -> Any:
    """The model with linear layers in INT8."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return quantization.quantize_dynamic(model, kinds or {nn.Linear}, dtype=torch.qint8)


def classes(model: nn.Module) -> dict[str, str]:
    """Class of every module, with its own module."""
    return {name: f"{type(m).__module__}.{type(m).__name__}" for name, m in model.named_modules()}


@pytest.mark.parametrize(
    "options",
    [{}, {"linear": True}, {"linear_float8": {"smallest": 1}}, {"cross_entropy": True}],
    ids=str,
)
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_quantize_dynamic(architecture: str, options: dict[str, Any]) -> None:
    stock = build(architecture, tied=False).eval()
    ours = copy.deepcopy(stock)
    liger_multi.patch(ours, **options)
    expected, got = quantized(stock), quantized(ours)
    assert classes(got) == classes(expected)
    assert "quantized" in type(got.lm_head).__module__
    with torch.no_grad():
        torch.testing.assert_close(got(**batch()).loss, expected(**batch()).loss)
        torch.testing.assert_close(got(**batch()).logits * 1.0, expected(**batch()).logits)


def test_a_mapping_of_the_caller() -> None:
    model = build(tied=False)
    norm = type(model.model.norm)
    liger_multi.patch(model)
    for module, model_type in ((model.lm_head, nn.Linear), (model.model.norm, norm)):
        ours: type = type(module)
        assert ours is not model_type
        assert {model_type: 1}[ours] == {ours: 1}[model_type] == 1
        assert ours in [model_type]
        assert ours in {model_type}
        assert operator.eq(ours, model_type)
        assert operator.eq(model_type, ours)
        assert not operator.ne(ours, model_type)


def test_patched_classes_are_not_each_other() -> None:
    first, second = build(tied=False), build(tied=False)
    liger_multi.patch(first)
    liger_multi.patch(second, fused_linear_cross_entropy={"chunk": 7})
    assert operator.ne(type(first.lm_head), type(second.lm_head))
    assert operator.ne(type(first.lm_head), type(first.model.norm))
    on_top = type("OnTop", (type(first.lm_head),), {})
    assert on_top not in (nn.Linear, type(first.lm_head))


class Abstract(nn.Module, metaclass=ABCMeta):
    """A norm whose class has a metaclass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(32)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * n.to(x.dtype)


def test_a_class_with_a_metaclass() -> None:
    model = nn.Sequential(Abstract())
    assert liger_multi.patch(model, fused_linear_cross_entropy=False).entries
    assert operator.eq(type(model[0]), Abstract)
    assert isinstance(type(model[0]), ABCMeta)
    again = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(again(torch.ones(2, 32)), model(torch.ones(2, 32)))
    liger_multi.unpatch(model)
    assert type(model[0]) is Abstract
