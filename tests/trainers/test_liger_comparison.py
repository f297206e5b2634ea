"""How results of liger-kernel and this library are compared; `python -m ci.liger` runs them."""

import pytest
import torch

from ci.liger import compare, kernel_cases, precision
from ci.liger.compare import difference, differences, explained, fitting
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
    real = {"version": "0", "groups": {"norms": {"a": {"error": ["InterpreterError"]}, "b": {}}}}
    page = text(real, {"norms: b": {"y": "off"}}, {REASONS[0]: ["norms: b"]})
    assert "| norms | 2 | 0 | 1 | 1 |" in page
    assert f"| `norms: b` | 1 | {REASONS[0].why} |" in page


def test_inputs_of_sixteen_bits_are_those_of_what_they_are_compared_with():
    drawn = []
    for computed in (torch.bfloat16, torch.float32):
        with precision.using(torch.bfloat16, computed):
            drawn.append(kernel_cases.Inputs().leaf(4, 5).detach())
    assert drawn[0].dtype == torch.bfloat16
    assert torch.equal(drawn[0].float(), drawn[1])
    assert kernel_cases.Inputs().leaf(4, 5).detach().ne(drawn[1]).any()
