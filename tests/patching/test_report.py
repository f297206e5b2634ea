"""The report of a patch: data, and a table."""

# ruff: noqa: E402  (what needs transformers is imported after the skip)
import re

import pytest
from torch import nn

transformers = pytest.importorskip("transformers")


from liger_multi.patching import patch
from tests.models import build
from tests.patching.test_norms_find import Holder


def test_report_is_data_and_a_table():
    model = build()
    report = patch(model, fused_linear_cross_entropy={"chunk": 8})
    head = report.entries[-1]
    assert (head.path, head.stock, head.options) == ("lm_head", "Linear", {"chunk": 8})
    text = str(report)
    assert "4 x LlamaRMSNorm" not in text
    assert re.search(r"2 x LlamaRMSNorm +rms_norm\[llama\]", text)
    assert re.search(r"2 x LlamaAttention +rope\[half\]", text)
    assert re.search(r"packing +1 x LlamaForCausalLM +a check that samples", text)
    assert "model.layers.*.mlp" in text
    assert "fused_linear_cross_entropy (chunk=8)" in text
    skipped = patch(Holder(nn.Linear(2, 2)))
    assert "has no output embedding" in str(skipped)


def test_report_in_rich():
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=200, file=open("/dev/null", "w"), record=True)  # noqa: SIM115
    console.print(patch(build()))
    console.print(patch(Holder(nn.Linear(2, 2))))
    text = console.export_text()
    assert "rms_norm[llama]" in text
    assert "has no output embedding" in text
