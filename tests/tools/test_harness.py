"""The suite's own machinery: poison, expected failures, warnings as errors, choice of backends."""

import os
import re
import warnings
from pathlib import Path

import pytest
import torch

from liger_multi.testing.suite.plugin import poison_value
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
    made = make(torch.ones(3, 5, dtype=dtype))
    assert made.shape == (3, 5)
    assert made.dtype is dtype
    if dtype.is_floating_point:
        assert made.isnan().all()
    else:
        assert (made == poison_value(dtype)).all()


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


def test_a_kernel_that_forgets_elements_is_caught():
    def forgets(x):
        y = torch.empty_like(x)
        y.view(-1)[:-1] = x.view(-1)[:-1]
        return y

    x = torch.ones(4, 4)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(forgets(x), x)


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
    for name in ("conftest.py", "thinned.yaml"):
        (pytester.path / name).write_text((ROOT / "tests" / name).read_text())
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


def test_a_warning_raised_here_is_an_error():
    with pytest.raises(UserWarning, match="planted"):
        warnings.warn("planted", stacklevel=1)


def test_every_file_of_expected_failures_belongs_to_a_backend():
    from liger_multi.dispatch.registry import backends

    for backend, entries in harness.read_xfails(ROOT / "tests" / "xfails").items():
        assert backend in backends()
        assert entries


def test_the_hub_is_offline():
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_seeded(generator):
    assert torch.equal(torch.rand(3), torch.rand(3, generator=generator))


# --- thinned tests ---

THINNED = harness.read_thinned(ROOT / "tests" / "thinned.yaml")


def test_thinned_tests_exist():
    for file, test in THINNED:
        (path,) = (ROOT / "tests").rglob(file)
        name = r"test_\w+" if test == "*" else test
        assert re.search(rf"^def {name}\(", path.read_text(encoding="utf-8"), re.M), (file, test)


def test_of_thinned_tests_something_stays(request):
    """Of those that this run collected whole; of a share, nothing may be left of a small test."""
    narrowed = {Path(arg.partition("::")[0]).name for arg in request.config.args if "::" in arg}
    marked = not request.config.getoption("markexpr").startswith("not slow")
    kept = {(i.path.name, getattr(i, "originalname", i.name)) for i in request.session.items}
    files = {file for file, _ in kept} - narrowed
    if marked or request.config.getoption("keyword") or request.config.getoption("--part"):
        pytest.skip("a part of the suite is not all that stays")
    lists = {n for n, keep in THINNED.items() if keep and not isinstance(keep, str)}
    whole = {n for n in lists if n[0] in files and (n[0], "*") not in THINNED}
    gone = whole - kept
    assert not gone


class Item:
    """Of pytest, as far as thinning asks it."""

    def __init__(self, name, **parameters):
        self.path, self.originalname, self.name = Path("tests/test_a.py"), name, name
        if parameters:
            self.callspec = type("Spec", (), parameters)


def test_what_is_thinned_is_slow_but_for_what_stays():
    thinned = {("test_a.py", "test_one"): ["x", "y-*"], ("test_a.py", "test_gone"): []}
    found = [
        harness.left_as(item, thinned)
        for item in (
            Item("test_one", id="x"), Item("test_one", id="y-2"), Item("test_one", id="z"),
            Item("test_gone"), Item("test_other", id="z"),
        )
    ]  # fmt: skip
    assert found == [None, None, "slow", "slow", None]


def test_a_share_stays_the_same_and_the_rest_is_sampled():
    """The same third in every process, and every sample is in it or marked."""
    items = [Item("test_one", id=f"softmax-{n}-float32") for n in range(300)]
    found = [harness.left_as(item, {("test_a.py", "test_one"): "1/3"}) for item in items]
    assert set(found) == {None, "sampled"}
    assert 70 < found.count(None) < 130
    whole = [harness.left_as(item, {("test_a.py", "test_one"): "3/3"}) for item in items]
    assert set(whole) == {None}


def test_what_is_not_named_to_stay_is_sampled():
    thinned = {("test_a.py", "test_one"): {"stay": ["x", "y-*"]}, ("test_a.py", "*"): "0/1"}
    items = [Item("test_one", id=name) for name in ("x", "y-2", "z")]
    assert [harness.left_as(i, thinned) for i in items] == [None, None, "sampled"]


def test_the_share_of_a_file_is_of_tests_without_an_entry():
    thinned = {
        ("test_a.py", "*"): "1/3",
        ("test_a.py", "test_1"): "1/1",
        ("test_a.py", "test_2"): [],
    }
    found = [harness.left_as(Item(f"test_{n}"), thinned) for n in range(300)]
    assert found[1:3] == [None, "slow"]
    assert set(found[3:]) == {None, "sampled"}
    assert 70 < found[3:].count(None) < 130
