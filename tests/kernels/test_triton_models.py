"""Whole models through the kernels: two pairs of the sweep, interpreted."""

import os

import pytest

from liger_multi.dispatch.config import use
from tests import harness

pytest.importorskip("transformers")
pytest.importorskip("triton")

from tests.sweep.pairs import Pair
from tests.sweep.run import sweep

PAIRS = (
    Pair("causal", "llama", "LlamaForCausalLM"),
    Pair("masked", "bert", "BertForMaskedLM"),
)


@pytest.mark.skipif(not harness.interpreted(), reason="kernels of CPU tensors need the interpreter")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="every pair runs in a fork")
def test_models_are_equal_to_stock_through_the_kernels():
    with use(default="triton"):
        found = list(sweep(list(PAIRS)))
    assert [(o.status, o.why) for o in found] == [("equal", "")] * len(PAIRS)
    assert found[0].calls.keys() >= {"rms_norm", "gated_mlp", "rope", "fused_linear_cross_entropy"}
    assert "layer_norm" in found[1].calls
    assert all(o.served == o.modules for o in found)
