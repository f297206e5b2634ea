"""The suite's own machinery: poison, expected failures, warnings as errors, choice of backends."""

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from liger_multi.testing.poison import poison_value
from tests import harness

ROOT = Path(__file__).parents[2]
pytest_plugins = ["pytester"]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.empty(3, 5, dtype=x.dtype),
        lambda x: torch.empty((3, 5), dtype=x.dtype, device=x.device),
        lambda x: torch.empty_like(x),
        lambda x: torch.empty_strided((3, 5), (1, 3), dtype=x.dtype),
        lambda x: torch.empty_permuted((3, 5), (1, 0), dtype=x.dtype),
        lambda x: x.new_empty(3, 5),
        lambda x: x.new_empty_strided((3, 5), (5, 1)),
    ],
    ids=[
        "empty",
        "empty_tuple",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
    ],
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]
)
def test_uninitialized_memory_is_poisoned(make, dtype):
    output = make(torch.ones(3, 5, dtype=dtype))
    assert output.shape == (3, 5)
    assert output.dtype is dtype
    if dtype.is_floating_point:
        assert output.isnan().all()
    else:
        assert (output == poison_value(dtype)).all()


def test_poison_keeps_the_arguments_of_empty():
    assert torch.empty(2, requires_grad=True).requires_grad
    assert torch.empty(0, 3).shape == (0, 3)
    assert torch.empty(2, device="meta").is_meta
    with torch.inference_mode():
        assert torch.empty(2).isnan().all()


def test_a_device_context_reaches_poisoned_functions():
    with torch.device("meta"):
        assert torch.empty(3).is_meta
        assert torch.zeros(3).is_meta


def test_poison_is_seen_by_a_compiled_function():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def leaves_one_column(x):
        y = torch.empty_like(x)
        y[:, :-1] = x[:, :-1]
        return y + x.new_empty(1, x.shape[1])

    assert leaves_one_column(torch.ones(2, 3)).isnan().all()


SUITE = """
import pytest

@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sample", ["wide", "thin"])
@pytest.mark.parametrize("backend", ["reference"])
@pytest.mark.parametrize("op", ["rms_norm", "swiglu"])
def test_forward(op, backend, sample, dtype):
    assert not (op == "rms_norm" and sample == "wide" and dtype == "bfloat16")

def test_free():
    pass
"""


@pytest.fixture
def suite(pytester):
    """A small suite of its own under this suite's hooks."""
    (pytester.path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (pytester.path / "test_suite.py").write_text(SUITE)
    (pytester.path / "xfails").mkdir()

    def run(*args, xfails=""):
        (pytester.path / "xfails" / "reference.txt").write_text(xfails)
        return pytester.runpytest_inprocess(
            "-p", "no:cacheprovider", "-p", "no:xdist", "-rA", *args
        )

    return run


ENTRY = "test_forward[%s]  # rounding, https://example.org/1\n"


def outcome(run):
    return {
        k: n
        for k, n in run.parseoutcomes().items()
        if k in ("passed", "failed", "xfailed", "errors")
    }


@pytest.mark.slow
def test_an_expected_failure_is_expected(suite):
    assert outcome(suite()) == {"passed": 8, "failed": 1}
    assert outcome(suite(xfails=ENTRY % "rms_norm-reference-wide-bfloat16")) == {
        "passed": 8,
        "xfailed": 1,
    }
    assert outcome(suite(xfails=ENTRY % "rms_norm-*-w*-bfloat16")) == {"passed": 8, "xfailed": 1}


def test_an_expected_failure_that_passes_fails(suite):
    run = suite(xfails=ENTRY % "rms_norm-*-bfloat16")
    assert outcome(run) == {"passed": 7, "failed": 1, "xfailed": 1}
    assert "XPASS(strict)" in run.stdout.str()


@pytest.mark.parametrize(
    "entry", ["test_forward[*]", "test_forward[*] #", "# a comment\n\ntest_forward"]
)
def test_an_incomplete_entry_is_refused(suite, entry):
    run = suite(xfails=entry)
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    assert "an expected failure needs a reason" in run.stderr.str()


def test_a_backend_that_cannot_run_is_said_plainly(suite):
    run = suite("--backend", "npu")
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    assert "--backend npu: cannot run on this machine: needs torch_npu" in run.stderr.str()


def test_an_unknown_backend_names_the_nearest(suite):
    run = suite("--backend", "referense")
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    assert "did you mean 'reference'?" in run.stderr.str()


WARNS = """
import importlib.util, sys, types, warnings, pytest

def load(name, body):
    module = types.ModuleType(name)
    exec(body, module.__dict__)
    return module

@pytest.mark.parametrize("name", ["liger_multi", "liger_multi.ops.a", "test_a", "tests.test_a"])
def test_ours(name):
    load(name, "import warnings\\ndef f(): warnings.warn('planted')").f()

@pytest.mark.parametrize("name", ["torch.nn", "liger_multitude", "somebody"])
def test_others(name):
    load(name, "import warnings\\ndef f(): warnings.warn('planted')").f()
"""


def test_warnings_of_our_own_modules_are_errors(suite, pytester):
    (pytester.path / "test_suite.py").write_text(WARNS)
    (pytester.path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    run = suite()
    assert outcome(run) == {"passed": 3, "failed": 4}
    assert len(re.findall(r"FAILED test_suite.py::test_ours.*planted", run.stdout.str())) == 4


def test_every_file_of_expected_failures_belongs_to_a_backend():
    from liger_multi.dispatch.registry import backends

    for backend, entries in harness.read_xfails(ROOT / "tests" / "xfails").items():
        assert backend in backends()
        assert entries


# --- what `make test` runs ---


class Item:
    """A test of pytest, as far as the harness reads it."""

    def __init__(self, name, slow=False):
        self.nodeid, self.slow = f"tests/test_a.py::{name}", slow

    def get_closest_marker(self, name):
        return self.slow or None

    def add_marker(self, name):
        assert name == "slow"
        self.slow = True


def test_first_and_every_seventh_case_are_fast():
    many = [Item(f"test_many[{n}]") for n in range(20)]
    few = [Item("test_few[0]"), Item("test_few[1]", slow=True), Item("test_few[2]")]
    cases = Counter()
    for item in (*many, Item("test_alone"), *few):
        harness.mark_slow_case(item, cases)
    assert [n for n, item in enumerate(many) if not item.slow] == [0, 7, 14]
    assert [item.slow for item in few] == [False, True, True]
    assert cases["tests/test_a.py::test_alone"] == 1


@pytest.mark.parametrize("count", [1, 3, 50])
def test_every_test_is_in_one_part(count):
    items = [Item(f"test_many[{n}]") for n in range(20)]
    chosen = []
    for part in range(1, count + 1):
        left, dropped = list(items), []
        hook = SimpleNamespace(
            pytest_deselected=lambda items, dropped=dropped: dropped.extend(items)
        )
        options = SimpleNamespace(getoption=lambda name, p=part: f"{p}/{count}", hook=hook)
        harness.keep_part(options, left)
        assert len(left) + len(dropped) == len(items)
        chosen += left
    assert sorted(i.nodeid for i in chosen) == sorted(i.nodeid for i in items)
