"""What a run of the suite leaves, and that what the repository keeps of them can be read."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._inductor  # inner sessions forget what they import first, and it aborts twice

from ci import results
from ci.docs import status as docs_status
from liger_multi.cli import doctor  # noqa: F401, inner sessions forget what they import first
from liger_multi.dispatch.registry import backends

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]
SUITE = """
import pytest

def test_passes(): pass

@pytest.mark.skip
def test_skipped(): pass

@pytest.mark.xfail(strict=True)
def test_expected(): assert False

def test_fails(): assert False
"""


@pytest.fixture
def run(pytester):
    """Run a small suite under this suite's hooks; the result that it left."""

    def run(text, *args):
        for name in ("conftest.py", "thinned.yaml"):
            (pytester.path / name).write_text((ROOT / "tests" / name).read_text())
        (pytester.path / "test_suite.py").write_text(text)
        file = pytester.path / "out" / "native.json"
        plugins = ("cacheprovider", "xdist", "randomly")
        options = (*(f"-pno:{name}" for name in plugins), "--results", str(file))
        pytester.runpytest_inprocess(*options, *args)
        (found,) = results.read(file.parent)
        return found

    return run


def test_a_run_leaves_its_counts_and_where_it_ran(run):
    found = run(SUITE)
    assert found.counts == {"passed": 1, "failed": 1, "skipped": 1, "xfailed": 1}
    assert not found.green
    assert found.failures == ["test_suite.py::test_fails"]
    assert found.part == "native"
    assert "reference" in found.backends
    assert found.device["device"] == "cpu"
    assert found.versions["torch"] == torch.__version__
    assert found.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found.date.endswith("+00:00")
    assert found.commit
    assert found.seconds > 0


def test_failures_are_named_as_they_happen_and_half_a_run_is_no_result(run, pytester):
    stopped = (
        "import pytest\ndef test_fails(): assert False\ndef test_stops(): pytest.exit('time')\n"
    )
    with pytest.raises(ValueError, match="not enough values"):
        run(stopped)
    named = (pytester.path / "out" / "native.failed").read_text()
    assert named == "test_suite.py::test_fails (call)\n"


def test_a_run_without_failures_is_green_and_an_empty_one_is_not(run):
    assert run(SUITE, "-k", "not fails").green
    assert not run(SUITE, "-k", "skipped").green


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "cuda.json").write_text(json.dumps({"passed": 3}))
    with pytest.raises(ValueError, match=r"cuda\.json is not the result of a suite"):
        results.read(tmp_path)


def test_results_are_sorted_by_date(tmp_path):
    for day in ("2026-01-02", "2026-03-01", "2026-02-01"):
        one = results.Result("cpu", [], {}, {}, "abc", day, {"passed": 1}, 1.0)
        (tmp_path / f"{day}.json").write_text(json.dumps(vars(one)))
    assert [r.date[5:7] for r in results.read(tmp_path)] == ["03", "02", "01"]


def test_kept_results_name_backends_that_exist():
    assert results.kept()
    for found in results.kept():
        assert set(found.backends) <= set(backends()), found
        assert set(found.counts) <= set(results.OUTCOMES), found
        assert {"torch", "python"} <= set(found.versions), found


def run_on(device, part, failed=0, date="2026-05-01"):
    counts = {"passed": 7, **({"failed": failed} if failed else {})}
    facts = {"device": device, "name": f"a {part} machine"}
    backends = [part, "reference"] if part != "native" else ["reference"]
    versions = {"torch": "2.13.0", "python": "3.12.1", "triton": "3.9.0"}
    return results.Result(
        part, backends, facts, versions, "abcdef0", date, counts, 1.0,
        failures=["test_a", "test_b"][:failed],
    )  # fmt: skip


def row(name, kept, monkeypatch):
    monkeypatch.setattr(results, "kept", lambda: sorted(kept, key=lambda r: r.date, reverse=True))
    lines = [line for line in docs_status.page().splitlines() if line.startswith(f"| {name} ")]
    return lines[0]


def test_a_backend_that_nobody_ran_says_so(monkeypatch):
    kept = [run_on("cpu", "native"), run_on("npu:0", "npu")]
    for name in ("cuda", "rocm", "triton"):
        assert docs_status.NOT_RUN in row(name, kept, monkeypatch)
    assert "a npu machine, PyTorch 2.13.0: 7 passed (2026-05-01)" in row("npu", kept, monkeypatch)
    assert docs_status.NOT_RUN not in row("reference", kept, monkeypatch)


def test_a_shared_layer_is_run_by_its_heirs(monkeypatch):
    said = row("triton", [run_on("cuda:0", "rocm")], monkeypatch)
    assert "by rocm: a rocm machine" in said
    # interpreted kernels are no run on a device
    kept = [run_on("cpu", "triton")]
    assert docs_status.NOT_RUN in row("triton", kept, monkeypatch)


def test_the_newest_run_counts_and_a_red_one_is_said(monkeypatch):
    kept = [run_on("cuda:0", "cuda", failed=2, date="2026-06-01"), run_on("cuda:0", "cuda")]
    said = row("cuda", kept, monkeypatch)
    assert "7 passed, 2 failed (2026-06-01) **failing**" in said
    assert "before it, at abcdef0, a cuda machine, PyTorch 2.13.0: 7 passed (2026-05-01)" in said
    page = docs_status.page()
    assert "\n## What failed\n\n- cuda, 2026-06-01, abcdef0: `test_a`, `test_b`.\n" in page


def test_a_red_run_that_does_not_say_what_failed_is_refused(monkeypatch):
    kept = [replace(run_on("cuda:0", "cuda", failed=2), failures=())]
    with pytest.raises(ValueError, match="the run of cuda on 2026-05-01 does not say what failed"):
        row("cuda", kept, monkeypatch)


def test_a_red_compilation_claims_nothing(monkeypatch):
    assert "compiled for gfx90a" in row("rocm", [run_on("cpu", "cross-compiled")], monkeypatch)
    kept = [run_on("cpu", "cross-compiled", failed=1)]
    assert "compiled" not in row("rocm", kept, monkeypatch)
    old = {**kept[0].versions, "triton": "3.6.0"}  # whose code nobody judges
    kept = [replace(run_on("cpu", "cross-compiled"), versions=old)]
    assert "compiled" not in row("rocm", kept, monkeypatch)


def test_architectures_are_those_that_are_compiled_for():
    pytest.importorskip("triton")
    from ci.static import TARGETS

    said = [a for vendor in docs_status.CODE_GENERATORS for a in docs_status.architectures(vendor)]
    assert said == list(TARGETS)


def test_the_commit_may_come_from_outside(monkeypatch):
    monkeypatch.setenv("COMMIT", "0123abc")
    assert results.commit() == "0123abc"
