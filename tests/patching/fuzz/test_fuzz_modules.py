"""Random modules: patched equals unpatched, or is left alone (``tests/patching/fuzz/fuzz_modules.py``)."""

import sys

import pytest

pytest.importorskip("peft")

import fuzz_modules


def found(seed, modules):
    summary = fuzz_modules.run(seed, modules)
    shown = [f"{failure}\n{fuzz_modules.shrunk(case)}" for case, failure in summary.failures[:3]]
    assert not summary.failures, "\n\n".join([f"{len(summary.failures)} failures", *shown])
    return summary.counts


def test_fifty_modules():
    counts = found(0, 50)
    assert counts["patched"] > 15
    assert counts["served"] > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1000, 2000, 3000])
def test_five_hundred_modules(seed):
    counts = found(seed, 500)
    for kind in fuzz_modules.FORMS:
        assert counts[f"patched {kind}"] > 15
    assert counts["served"] > 1000


def test_a_case_is_drawn_again_from_its_seed():
    assert fuzz_modules.generate(7) == fuzz_modules.generate(7)
    assert len({fuzz_modules.generate(seed).source for seed in range(40)}) > 30


def test_a_fault_is_found_shrunk_and_printed(monkeypatch):
    """A fuzzer that cannot fail holds nothing: here nobody looks at the signature."""
    from liger_multi.patching.replace import mlp

    monkeypatch.setattr(mlp, "holds", lambda module, signature: True)
    failures = fuzz_modules.run(0, 60).failures
    assert failures
    case = fuzz_modules.shrunk(failures[0][0])
    assert case.kind == "mlp"
    assert len(case.actions) == 1
    assert case.actions[0] in str(case)
    assert "class Generated(nn.Module):" in str(case)


def test_the_command_repeats_one_case(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fuzz_modules.py", "--seed", "3", "--shrink"])
    assert fuzz_modules.main() == 0
    printed = capsys.readouterr().out
    assert fuzz_modules.generate(3).source in printed
    assert "0 failures" in printed
