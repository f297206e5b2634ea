"""How results of liger-kernel and this library are compared; `python -m ci.liger` runs them."""

import functools
import subprocess
import sys

import pytest
import torch

import ci.liger as comparison
from ci.liger import __main__ as command
from ci.liger import compare, kernel_cases, precision, runs
from ci.liger.compare import counts, difference, differences, explained, fitting
from ci.liger.page import text
from ci.liger.reasons import REASONS, Reason

X = torch.tensor([1.0, 2.0, 3.0])


def test_equal_results_agree_and_each_other_kind_is_told():
    assert difference({"loss": X}, {"loss": X + 1e-7}) == {}
    assert difference({"loss": X}, {"loss": X + 0.01}) == {"loss": "off by 0.01"}
    assert "torch.float16" in difference({"loss": X}, {"loss": X.half()})["loss"]
    assert "(3,)" in difference({"loss": X}, {"loss": X[:2]})["loss"]
    assert difference({"kind": "tuple"}, {"kind": "list"}) == {"kind": "tuple there, list here"}
    assert difference({"loss": X}, {"aux": X}) == {"results": "['loss'] and ['aux']"}
    assert difference({"loss": None}, {"loss": X})


def test_errors_agree_by_their_classes():
    theirs = {"error": ["AssertionError", "Exception"], "message": "a"}
    ours = {"error": ["ArgumentError", "ValueError", "AssertionError"], "message": "b"}
    assert difference(theirs, ours) == {}
    assert difference(ours, theirs) == {"error": "ArgumentError there, AssertionError here"}
    assert difference(theirs, {"loss": X}) == {"error": "AssertionError there, a result here"}


@pytest.mark.parametrize(("ours", "agrees"), [(0.02, True), (0.04, False)])
def test_sixteen_bits_may_not_be_further_from_fp32(ours, agrees):
    exact = {"y": X}
    found = difference({"y": X + 0.02}, {"y": X + ours}, exact, rounding=1e-3)
    assert (found == {}) == agrees


def test_a_single_number_is_compared_with_the_errors_of_its_group():
    def runs(shift):
        return {"loss": torch.tensor(1.0 + shift)}

    real = {
        "groups": {"pairs, bf16": {"a": runs(0.0), "b": runs(0.02)}},
        "exact": {"pairs, bf16": {"a": runs(0.0), "b": runs(0.0)}},
    }
    near = {"groups": {"pairs, bf16": {"a": runs(0.03), "b": runs(0.0)}}}
    far = {"groups": {"pairs, bf16": {"a": runs(0.05), "b": runs(0.0)}}}
    assert differences(real, near) == {}
    assert [*differences(real, far)] == ["pairs, bf16: a"]


def test_what_liger_kernel_cannot_run_is_not_compared():
    real = {"groups": {"norms": {"a": {"error": ["InterpreterError"]}}}, "exact": {}}
    assert differences(real, {"groups": {"norms": {"a": {"y": X}}}}) == {}


def test_a_reason_covers_its_cases_and_its_keys_alone(monkeypatch):
    reason = Reason(r"^norms: a", r"output \d", "because")
    monkeypatch.setattr(compare, "REASONS", (reason, Reason("^never", ".", "idle")))
    assert fitting("norms: a", {"output 0": "off"}) is reason
    assert fitting("norms: a", {"output 0": "off", "gradient 0": "off"}) is None
    assert fitting("norms: b", {"output 0": "off"}) is None
    by, unknown, idle = explained({"norms: a": {"output 0": "off"}, "norms: b": {"y": "off"}})
    assert by[reason] == ["norms: a"]
    assert unknown == ["norms: b: {'y': 'off'}"]
    assert [r.cases for r in idle] == ["^never"]


def test_reasons_are_different_and_the_page_shows_them():
    assert len({r.why for r in REASONS}) == len(REASONS)
    real = {"groups": {"norms": {"a": {"error": ["InterpreterError"]}, "dyt": {}, "late": {}}}}
    cut = {"groups": {"norms": {"a": {}, "dyt": {}}}}
    found = {"norms: dyt": {"error": "off"}}
    reason = fitting("norms: dyt", found["norms: dyt"])
    page = text("0", counts(real, cut, found), found, {})
    assert "| norms | 2 | 0 | 1 | 1 |" in page
    assert f"| `norms: dyt` | 1 | {reason.why} |" in page
    assert "## On a device" not in page


def test_the_page_shows_of_a_device_what_no_cpu_shows():
    of_cpu = {"norms: dyt": {"error": "off"}}
    more = {"policies: grpo delta=1.1": {"aux 1": "off"}}
    ran = {"commit": "0123456789", "date": "2000-01-01", "whole": False, "cases": [1, 0, 1, 0]}
    kept = {"groups": {"policies": ran}, "versions": {"torch": "1"}, "differences": of_cpu | more}
    here, there = text("0", {}, of_cpu, {"Some card": kept}).split("## On a device")
    assert "Some card, torch 1; commits 0123456 (2000-01-01). Not all cases ran." in there
    assert "| policies | 1 | 0 | 1 | 0 |" in there
    assert "`policies: grpo delta=1.1` | 1 |" in there
    assert "norms: dyt" in here
    assert "norms: dyt" not in there


def test_groups_that_ran_again_take_the_place_of_the_older():
    old = {"groups": {"norms": 1, "pairs": 1}, "differences": {"norms: a": "x", "pairs: a": "y"}}
    now = command.merged(old, {"pairs": 2}, {"pairs: b": "z"})
    assert now["groups"] == {"norms": 1, "pairs": 2}
    assert now["differences"] == {"norms: a": "x", "pairs: b": "z"}


def test_processes_share_the_cases():
    cases = [(f"case {i}", functools.partial(dict, i=i)) for i in range(7)]
    parts = [runs.Part(first, 3).ran(lambda: iter(cases)) for first in range(3)]
    assert sorted(name for part in parts for name in part) == [name for name, _ in cases]
    assert [*map(len, parts)] == [3, 2, 2]


def test_a_run_that_was_cut_keeps_what_it_reached(tmp_path, monkeypatch):
    """A process that hangs after its first group, and one that fails."""

    def started(file, folder, device, part, only):
        runs.save({"version": "0", "groups": {"a": {"x": {}}}, "exact": {}}, file)
        code = "import time; time.sleep(600)" if folder else "raise SystemExit(1)"
        return subprocess.Popen([sys.executable, "-S", "-c", code]), file

    monkeypatch.setattr(comparison, "_started", started)
    real, alias, whole = comparison.both(tmp_path, "cuda", 1, seconds=1)
    assert not whole
    assert real["groups"] == alias["groups"] == {"a": {"x": {}}}


def test_inputs_of_sixteen_bits_are_those_of_what_they_are_compared_with():
    drawn = []
    for computed in (torch.bfloat16, torch.float32):
        with precision.using(torch.bfloat16, computed):
            drawn.append(kernel_cases.Inputs().leaf(4, 5).detach())
    assert drawn[0].dtype == torch.bfloat16
    assert torch.equal(drawn[0].float(), drawn[1])
    assert kernel_cases.Inputs().leaf(4, 5).detach().ne(drawn[1]).any()
