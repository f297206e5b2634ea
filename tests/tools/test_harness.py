"""The suite's own machinery: poison, expected failures, backends, parts, ranks, any processor.

The bounds of comparisons follow from what fp32 resolves.
"""

import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from ci import portable, suite as parts
from liger_multi.testing.checks import poison_value
from tests import harness, processes
from tests.comparing import ULPS, assert_same_gradients, difference

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


def test_compiled_functions_see_poisoned_memory():
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


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("npu", "--backend npu: cannot run on this machine: needs torch_npu"),
        ("referense", "did you mean 'reference'?"),
    ],
)
def test_backend_that_cannot_run(suite, backend, said):
    run = suite("--backend", backend)
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    assert said in run.stderr.str()


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


@pytest.mark.parametrize("count", [1, 3, 50])
def test_every_test_is_in_one_part(count):
    items = [SimpleNamespace(nodeid=f"tests/test_a.py::test_many[{n}]") for n in range(20)]
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


# --- parts ---


@pytest.fixture
def commands(monkeypatch):
    """The calls of pytest that a command line of the suite makes, which runs none of them."""

    def called(*arguments, refusal=None):
        calls = []

        def run(words, **options):
            if "pytest" in words:
                calls.append(" ".join(words[words.index("pytest") :]))
            return SimpleNamespace(returncode=0)

        monkeypatch.setattr(parts, "subprocess", SimpleNamespace(run=run))
        monkeypatch.setattr(parts.environment, "refusal", lambda: refusal)
        monkeypatch.setattr(Path, "touch", lambda path: None)
        assert parts.main(arguments) == 0
        return calls

    return called


def test_every_run_of_the_suite_takes_its_part(commands):
    calls = commands("--slow", "--part", "2/3")
    # native, interpreted, compiled, Ascend in three ways, DeepSpeed and bitsandbytes
    assert len(calls) == 7
    assert all("--part 2/3" in call for call in calls)


def test_make_test_runs_every_twelfth_sample_on_ascend(commands):
    ascend = [call for call in commands() if "ci.npu.simulate" in call]
    assert len(ascend) == 3
    assert all("--share 12" in call for call in ascend)
    assert all("--share 1" in call for call in commands("--backend", "ascend"))


def test_slow_tests_run_only_if_asked_for(commands):
    assert all("-m not slow" in call for call in commands())
    assert not any("not slow" in c for c in commands("--slow") if "ci.npu.simulate" not in c)
    assert commands("--backend", "cuda") == [
        "pytest -q -m not slow -n 2 --dist worksteal --backend cuda"
    ]


def test_a_run_that_fails_is_named(monkeypatch, capsys):
    failing = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=1))
    monkeypatch.setattr(parts, "subprocess", failing)
    assert parts.main(["--backend", "cuda"]) == 1
    assert "failed: cuda" in capsys.readouterr().out


def test_the_workflow_runs_every_part():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    job = yaml.load(text, yaml.BaseLoader)["jobs"]["cpu"]
    listed, alone = re.findall(r"'\[([\d, ]+)\]'", job["strategy"]["matrix"]["part"])
    count = re.search(r"format\('\{0\}/(\d+)', matrix\.part\)", job["env"]["PART"])[1]
    assert [int(n) for n in listed.split(",")] == list(range(1, int(count) + 1))
    assert alone == "0", "all of `make test`"
    assert f"of {count}'" in job["name"]


# --- ranks ---

KINDS = [
    pytest.param(
        True, marks=pytest.mark.skipif(harness.accelerator() is not None, reason="no fork")
    ),
    False,
]


def ended(folder, body, patience, forked):
    script = folder / "script.py"
    script.write_text(textwrap.dedent(body))
    (one,) = processes.run(script, folder, [["given"]], {"NAMED": "too"}, patience, forked)
    return one


HELD = """
    import os, sys
    class Held:
        def __del__(self):
            print("taken apart")
    held = Held()
    print(sys.argv[1], os.environ["NAMED"])
    """
"""A group of gloo that DistributedDataParallel holds last may wait for ever when it is freed."""


@pytest.mark.parametrize("forked", KINDS)
@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (HELD, 0, "^given too\n$"),
        ("assert 1 == 2", 1, "AssertionError"),
        ("raise SystemExit(0)", 1, "SystemExit"),
    ],
)
def test_end_of_a_rank(tmp_path, forked, body, code, said):
    """It frees nothing, and says why it failed."""
    ended_code, text = ended(tmp_path, body, harness.PATIENCE, forked)
    assert ended_code == code
    assert re.search(said, text)


# --- other processors ---

EPS = torch.finfo(torch.float32).eps


def gradients(scale=1.0):
    """Of a model whose keys' bias has none but rounding."""
    generator = torch.Generator().manual_seed(0)
    matches = {
        name: scale * torch.randn(5, 7, generator=generator) * size
        for name, size in (("head", 1.0), ("value", 0.1), ("norm", 1e-3))
    }
    return {**matches, "key.bias": scale * 1e-8 * torch.randn(7, generator=generator)}


# --- the bound of a gradient ---


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e9])
def test_canceling_gradient_has_the_resolution_of_the_model(scale):
    """It was compared with its own largest entry and 1e-9, and failed on other CPUs."""
    expected = gradients(scale)
    other = {**expected, "key.bias": -expected["key.bias"]}
    assert difference(other, expected) == ""
    assert difference({"key.bias": other["key.bias"]}, {"key.bias": expected["key.bias"]})
    off = 2 * ULPS * EPS * expected["head"].abs().max()
    assert difference({**expected, "key.bias": expected["key.bias"] + off}, expected)


@pytest.mark.parametrize(("name", "by"), [("head", 1e-4), ("value", 1e-4), ("norm", 2e-3)])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e9])
def test_comparison_finds_wrong_gradients_at_every_scale(scale, name, by):
    expected = gradients(scale)
    other = {**expected, name: expected[name] * (1 + by)}
    assert difference(other, expected).startswith(f"{name}: ")
    assert difference({n: g for n, g in expected.items() if n != name}, expected)
    assert difference({**expected, name: expected[name].double()}, expected)
    assert difference({**expected, name: expected[name] * float("nan")}, expected)


def test_a_model_without_gradients_proves_nothing():
    with pytest.raises(AssertionError):
        assert_same_gradients([None], [None])


# --- `make test-portable` ---


@pytest.mark.slow
def test_a_row_is_a_run_of_the_suite_under_its_settings(tmp_path):
    pytest.importorskip("pytest_randomly")
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    suite = tmp_path / "test_settings.py"
    suite.write_text(
        "import os, torch\n"
        "def test_threads(): assert torch.get_num_threads() == 2\n"
        "def test_aten(): assert torch.backends.cpu.get_cpu_capability() == 'DEFAULT'\n"
        "def test_mkl(): assert os.environ['MKL_ENABLE_INSTRUCTIONS'] == 'SSE4_2'\n"
    )
    result = portable.run(portable.Setting("default", "SSE4_2", "SSE41", 2, 1), [str(suite)])
    assert result.counts == {"passed": 3}


# --- flakes ---
