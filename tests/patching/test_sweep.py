"""A sample of the sweep over all registered models; whole with the slow tests."""
# ruff: noqa: E402  (what needs transformers is imported after the skip)

import json
import os
import re
from pathlib import Path

import pytest
import torch
from packaging import version

transformers = pytest.importorskip("transformers")

from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from liger_multi.patching import patch, register_attention, unregister_attention
from liger_multi.patching.packing import checked as checked_packing
from tests import harness
from tests.sweep import attention, packing, page as coverage
from tests.sweep.cases import as_lines, registered
from tests.sweep.run import Outcome, counts, executed

KEPT = json.loads(coverage.RESULTS.read_text(encoding="utf-8"))
OUTCOMES = {(o["type"], o["cls"]): o for o in KEPT["pairs"]}
PAIRS = registered()
ROOT = Path(__file__).parents[2]
SAME = version.parse(transformers.__version__) == version.parse(KEPT["transformers"])

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="every pair runs in a fork")


def check(outcomes):
    """Equal to stock; with the library of the kept result, by the same operators as there."""
    assert not [f"{o.type}/{o.cls}: {o.why}" for o in outcomes if o.status == "different"]
    ran = [o for o in outcomes if o.status == "equal"]
    for outcome in ran if SAME else ():
        kept = OUTCOMES[outcome.type, outcome.cls]
        if kept["status"] == "equal":  # it may have lacked what is installed here
            assert outcome.calls == kept["calls"], outcome.type
            assert outcome.served == kept.get("served", outcome.served), outcome.type
    return ran


def swept(folder, *arguments):
    """In a process of its own, whose forks know nothing of what other tests started."""
    file = folder / "outcomes.json"
    done = harness.python("-m", "tests.sweep", "--json", file, *arguments, code=None)
    assert file.exists(), done.stdout + done.stderr
    return [Outcome(**o) for o in json.loads(file.read_text())["pairs"]]


@pytest.mark.slow
@pytest.mark.parametrize("every", [9, 27])
def test_a_sample_of_all_models_is_equal_to_stock(tmp_path, every):
    ran = check(swept(tmp_path, "--first", "3", "--every", str(every)))
    assert len(ran) > 0.85 * len(PAIRS[3::every])


@pytest.mark.slow
def test_all_models_are_equal_to_stock(tmp_path):
    assert len(check(swept(tmp_path))) > 0.85 * len(PAIRS)


def test_stored_result():
    pairs = KEPT["pairs"]
    assert sum(o["status"] == "equal" for o in pairs) >= 330
    assert not [o["cls"] for o in pairs if o["status"] == "different"]
    assert len({o["type"] for o in pairs if coverage.covers(o) >= {"norms", "mlp", "head"}}) >= 155
    assert len({o["type"] for o in pairs if "rotary" in coverage.covers(o)}) >= 155


def test_kept_outcomes_were_measured():
    equal = [o for o in KEPT["pairs"] if o["status"] == "equal"]
    assert all(map(coverage.measured, equal))
    assert sum(len(o["inputs"]) > 1 or o["inputs"] == ["audio"] for o in equal) >= 110
    assert {o["type"] for o in equal if o["text_only"]} == coverage.TEXT_ONLY.keys()
    for one in equal:
        for op, n in one["modules"].items():
            ran, served = (one[k].get(op, 0) for k in ("ran", "served"))
            assert served <= ran <= n, one["type"]
            assert sum(s[-1] for s in one["stock"] if s[0] == op) == ran - served
            assert sum(part["modules"].get(op, 0) for part in one["idle"]) == n - ran


# --- what ran ---


class Norms(nn.Module):
    """One norm that runs, and one that does not unless asked."""

    def __init__(self, module_class):
        super().__init__()
        self.used, self.unused = module_class(16), module_class(16)

    def forward(self, x, both=False):
        return self.unused(self.used(x)) if both else self.used(x)


def executed_in(model, *inputs, **options):
    report = patch(model)
    with executed(model) as actual:
        model(*inputs, **options)
    return counts(report, model, actual, {})


def test_idle_module_is_not_counted():
    actual = executed_in(Norms(LlamaRMSNorm), torch.randn(3, 16))
    assert (actual["modules"], actual["ran"], actual["served"]) == tuple(
        {"rms_norm": n} for n in (2, 1, 1)
    )
    (part,) = actual["idle"]
    assert (part["path"], part["modules"]) == ("unused", {"rms_norm": 1})
    actual = executed_in(Norms(LlamaRMSNorm), torch.randn(3, 16), both=True)
    assert (actual["served"], actual["idle"]) == ({"rms_norm": 2}, [])


def test_fallback_is_not_counted():
    """LayerNorm of two dtypes is left to PyTorch."""
    actual = executed_in(Norms(nn.LayerNorm), torch.randn(3, 16, dtype=torch.bfloat16), both=True)
    assert (actual["modules"], actual["ran"]) == ({"layer_norm": 2}, {"layer_norm": 2})
    assert actual["served"] == {}
    assert actual["stock"] == [["layer_norm", name, "LayerNorm", 1] for name in ("used", "unused")]


def test_operator_counts_for_its_caller():
    """Attention without positions calls no rotary function; its layers' norms do call theirs."""
    model = Norms(LlamaRMSNorm)
    model.used = nn.Sequential(model.used)
    report = patch(model)
    with executed(model) as actual:
        model(torch.randn(3, 16))
    assert actual.called == {"used.0": {"rms_norm": 1}}
    assert {"", "used", "used.0"} == actual.ran
    assert counts(report, model, actual, {})["served"] == {"rms_norm": 1}


def test_the_record_ends_with_its_block():
    model = Norms(LlamaRMSNorm)
    with pytest.raises(RuntimeError), executed(model) as actual:
        model(torch.randn(3, 15))
    model(torch.randn(3, 16))
    assert actual.ran == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "modalities", "dead"),
    [
        ("llava/LlavaForConditionalGeneration", ["image"], 2),
        pytest.param(
            "qwen2_vl/Qwen2VLForConditionalGeneration",
            ["image", "video"],
            0,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "whisper/WhisperForConditionalGeneration", ["audio"], 1, marks=pytest.mark.slow
        ),
    ],
)
def test_towers_with_inputs_run_and_learn(tmp_path, name, modalities, dead):
    """Without gradient: norms behind the last layer that is read, and fixed positions."""
    (outcome,) = swept(tmp_path, name)
    assert (outcome.status, outcome.text_only, outcome.idle) == ("equal", False, [])
    assert [modality for modality in outcome.inputs if modality != "text"] == modalities
    assert outcome.served == outcome.ran == outcome.modules
    alive, every = outcome.gradients
    assert every - alive == dead
    assert f"equal with {' and '.join(modalities)} | {alive} of {every} |" in coverage._row(
        vars(outcome)
    )


WRONG = """
from unittest import mock

from liger_multi.patching import norms
from liger_multi.reference.norms import rms_norm
from tests.sweep.cases import Pair
from tests.sweep.run import sweep

right = rms_norm._scaled
planted = [
    mock.patch.object(rms_norm, "_scaled", lambda *args: right(*args) * 1.001),
    # the probe would refuse it
    mock.patch.object(norms, "_agrees", lambda m, settings, row: settings.spec.op == "rms_norm"),
    mock.patch.object(norms, "_with_signature", lambda m, settings, row: settings),
]
for patch in planted:
    patch.start()  # raises where the name is gone
(outcome,) = sweep([Pair("causal", "llama", "LlamaForCausalLM")])
print(outcome.status, outcome.why)
"""


@pytest.mark.slow
def test_sweep_finds_a_wrong_operator():
    """The comparison fails where an operator computes something else."""
    done = harness.python("-c", WRONG)
    assert done.stdout.startswith("different"), done.stdout + done.stderr
    assert "stock" in done.stdout or "bound" in done.stdout


def test_results_of_other_generations():
    rows = json.loads(coverage.ELSEWHERE.read_text(encoding="utf-8"))["generations"]
    assert {r["transformers"] for r in rows} == {"5.0.0", "5.17.0"}
    assert all(r["different"] == 0 for r in rows)
    assert all(r["equal"] > 0.9 * (r["equal"] + r["not built"]) for r in rows)
    packing = next(r["packing"] for r in rows if r["transformers"] == "5.0.0")
    assert packing.keys() == {"positions", *coverage.BESIDE}
    for actual in packing.values():
        assert actual.get("wrong", 0) == 0
        assert actual["apart"] >= 90


def test_page_equals_stored_result():
    rows = [line for line in coverage.page().splitlines() if line.startswith("| ")]
    for pair in KEPT["pairs"]:
        assert any(line.startswith(f"| {pair['type']} | {pair['cls']} |") for line in rows), pair


def test_few_types_have_refused_norms_mlps_or_experts():
    """Each with its reason; the page of coverage lists them."""
    parts = {"rms_norm", "layer_norm", "gated_rms_norm", "swiglu", "geglu", "fused_moe"}
    absent = "the model has no module of this kind"
    refused = {
        pair["type"]
        for pair in KEPT["pairs"]
        for op in parts & pair["skipped"].keys()
        if any(not reason.startswith(absent) for reason in pair["skipped"][op])
    }
    assert len(refused) <= 7, sorted(refused)
    page = coverage.page()
    assert all(re.search(rf"^\| .*\b{name}\b.* \|$", page, re.MULTILINE) for name in refused)


def test_the_kept_result_is_one_pair_a_line():
    written = coverage.RESULTS.read_text(encoding="utf-8")
    assert written == as_lines(KEPT)
    assert len(written.splitlines()) == len(KEPT["pairs"]) + 2


@pytest.mark.skipif(not SAME, reason="another transformers than that of the kept result")
@pytest.mark.parametrize("model_type", ["llama", "qwen2_vl", "opt", "jamba"])
def test_packed_rows_of_types_equal_the_page(model_type):
    file = coverage.RESULTS.with_name("packing.json")
    kept = json.loads(file.read_text(encoding="utf-8"))["pairs"]
    (expected,) = [one for one in kept if one["type"] == model_type and one["kind"] != "masked"]
    pair = next(p for p in PAIRS if (p.type, p.cls) == (model_type, expected["cls"]))
    actual = packing.judge(pair)
    assert (actual.status, actual.why) == (expected["status"], expected["why"])
    assert actual.beside == expected["beside"]
    assert actual.beside.keys() == coverage.BESIDE.keys()


def test_attention_of_models_without_text_is_judged():
    register_attention()
    try:
        pair = next(p for p in PAIRS if p.cls == "WhisperForConditionalGeneration")
        actual = attention.judge(pair)
    finally:
        unregister_attention()
    assert (actual.status, actual.why, actual.causal) == ("served", "", True)


def test_packed_rows_are_apart_or_refused():
    """With positions alone, and with ids of samples or their lengths beside them."""
    file = coverage.RESULTS.with_name("packing.json")
    kept = json.loads(file.read_text(encoding="utf-8"))["pairs"]
    for one in kept:
        statuses = [one["status"], *(status for status, _ in one["beside"].values())]
        assert "wrong" not in statuses, one
        assert (one["status"] in ("no positions", "not built")) == (one["beside"] == {}), one
    assert sum(one["status"] == "apart" for one in kept) >= 190


def test_accepted_leak_is_detected(monkeypatch):
    monkeypatch.setattr(checked_packing, "check", lambda *arguments: None)
    actual = packing.judge(next(p for p in PAIRS if p.cls == "OPTForCausalLM"))
    assert actual.status == "wrong"
    assert actual.why.startswith("logits differ")
