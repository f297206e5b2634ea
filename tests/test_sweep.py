"""A sample of the sweep over all registered models; whole with the slow tests."""
# ruff: noqa: E402  (what needs transformers is imported after the skip)

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging import version

transformers = pytest.importorskip("transformers")

from sweep.pairs import registered
from sweep.run import Outcome, difference

from ci import docs_coverage

KEPT = json.loads(docs_coverage.RESULTS.read_text(encoding="utf-8"))
OUTCOMES = {(o["type"], o["cls"]): o for o in KEPT["pairs"]}
PAIRS = registered()
TESTS = Path(__file__).parent
SAME = version.parse(transformers.__version__) == version.parse(KEPT["transformers"])

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="every pair runs in a fork")


def check(outcomes):
    """Equal to stock; with the library of the kept result, by the same operators as there."""
    wrong = [f"{o.type}/{o.cls}: {o.why}" for o in outcomes if o.status == "different"]
    assert not wrong
    ran = [o for o in outcomes if o.status == "equal"]
    for outcome in ran if SAME else ():
        kept = OUTCOMES[outcome.type, outcome.cls]
        if kept["status"] == "equal":  # it may have lacked what is installed here
            assert outcome.calls == kept["calls"], outcome.type
    return ran


def swept(folder, *arguments):
    """In a process of its own, whose forks know nothing of what other tests started."""
    file = folder / "outcomes.json"
    command = [sys.executable, str(TESTS / "sweep"), "--json", str(file), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent, check=False)
    assert file.exists(), done.stdout + done.stderr
    return [Outcome(**o) for o in json.loads(file.read_text())["pairs"]]


@pytest.mark.parametrize("every", [9, 27])
def test_a_sample_of_all_models_is_equal_to_stock(tmp_path, every):
    ran = check(swept(tmp_path, "--first", "3", "--every", str(every)))
    assert len(ran) > 0.85 * len(PAIRS[3::every])


@pytest.mark.slow
def test_all_models_are_equal_to_stock(tmp_path):
    assert len(check(swept(tmp_path))) > 0.85 * len(PAIRS)


def test_what_the_kept_result_promises():
    pairs = KEPT["pairs"]
    assert sum(o["status"] == "equal" for o in pairs) >= 330
    assert not [o["cls"] for o in pairs if o["status"] == "different"]
    together = {o["type"] for o in pairs if docs_coverage.covers(o) >= {"norms", "mlp", "head"}}
    assert len(together) >= 155
    rotary = {o["type"] for o in pairs if "rotary" in docs_coverage.covers(o)}
    assert len(rotary) >= 155


WRONG = """
import sys
sys.path[:0] = [{tests!r}, {root!r}]
from liger_multi.patching import norms
from liger_multi.reference import rms_norm
from sweep.pairs import Pair
from sweep.run import sweep

right = rms_norm._scaled
rms_norm._scaled = lambda *args: right(*args) * 1.001
# the probe would refuse it
norms._agrees = lambda m, settings, size: settings.kind.op == "rms_norm"
norms._settled = lambda m, settings, size: settings
(outcome,) = sweep([Pair("causal", "llama", "LlamaForCausalLM")])
print(outcome.status, outcome.why)
"""


def test_a_wrong_operator_is_seen():
    """The comparison fails where an operator computes something else."""
    code = WRONG.format(tests=str(TESTS), root=str(TESTS.parent))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("different"), done.stdout + done.stderr
    assert "stock" in done.stdout or "bound" in done.stdout


def test_differences_are_relative_to_each_gradient():
    wanted = {"loss": torch.tensor(2.0), "a": torch.ones(3), "b": torch.ones(3) * 1e-3}
    assert difference(wanted, wanted) == ""
    for name, by in (("a", 1.001), ("b", 1.1), ("loss", 1.0001)):
        assert difference(wanted, {**wanted, name: wanted[name] * by})
    assert "other parameters" in difference(wanted, {"loss": wanted["loss"], "a": wanted["a"]})
    assert difference(wanted, {**wanted, "a": torch.full((3,), torch.nan)})


def test_what_other_generations_promise():
    rows = json.loads(docs_coverage.GENERATIONS.read_text(encoding="utf-8"))
    assert {r["transformers"] for r in rows} == {"5.0.0", "5.17.0"}
    assert all(r["different"] == 0 for r in rows)
    assert all(r["equal"] > 0.9 * (r["equal"] + r["not built"]) for r in rows)


def test_the_page_is_made_of_the_kept_result():
    page = docs_coverage.page()
    assert Path(docs_coverage.ROOT, "docs", "coverage.md").read_text(encoding="utf-8") == page
