"""How the suite runs: in parts, in processes of several ranks, and on any CPU.

The bounds of comparisons follow from what fp32 resolves.
"""

import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from ci import portable, suite
from tests import harness, processes
from tests.comparing import ULPS, assert_same_gradients, difference

ROOT = Path(__file__).parents[2]

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

        monkeypatch.setattr(suite, "subprocess", SimpleNamespace(run=run))
        monkeypatch.setattr(suite.environment, "refusal", lambda: refusal)
        monkeypatch.setattr(Path, "touch", lambda path: None)
        assert suite.main(arguments) == 0
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
    monkeypatch.setattr(suite, "subprocess", failing)
    assert suite.main(["--backend", "cuda"]) == 1
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


@pytest.mark.parametrize("forked", KINDS)
def test_nothing_of_a_rank_is_taken_apart(tmp_path, forked):
    """A group of gloo that DistributedDataParallel holds last may wait for ever in doing so."""
    body = """
        import os, sys
        class Held:
            def __del__(self):
                print("taken apart")
        held = Held()
        print(sys.argv[1], os.environ["NAMED"])
        """
    assert ended(tmp_path, body, harness.PATIENCE, forked) == (0, "given too\n")


@pytest.mark.parametrize("forked", KINDS)
@pytest.mark.parametrize(
    ("body", "said"), [("assert 1 == 2", "AssertionError"), ("raise SystemExit(0)", "SystemExit")]
)
def test_a_rank_that_fails_says_why(tmp_path, forked, body, said):
    code, text = ended(tmp_path, body, harness.PATIENCE, forked)
    assert code == 1
    assert said in text


@pytest.mark.parametrize("forked", KINDS)
def test_a_rank_that_hangs_says_where(tmp_path, forked):
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(
        textwrap.dedent("""
            import time
            def here():
                print("begun", flush=True)
                time.sleep(600)
            here()
            """)
    )
    process = processes.Process(script, [], {}, log, forked)
    while not (log.exists() and "begun" in log.read_text()):
        time.sleep(0.1)
    code, text = process.end(0)
    assert code is None
    assert "in here" in text
    assert "no answer in time" in text


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
def test_a_wrong_gradient_is_seen_at_every_scale(scale, name, by):
    expected = gradients(scale)
    other = {**expected, name: expected[name] * (1 + by)}
    assert difference(other, expected).startswith(f"{name}: ")
    assert difference({n: g for n, g in expected.items() if n != name}, expected)
    assert difference({**expected, name: expected[name].double()}, expected)
    assert difference({**expected, name: expected[name] * float("nan")}, expected)


def test_a_model_without_gradients_proves_nothing():
    with pytest.raises(AssertionError):
        assert_same_gradients([None], [None])


@pytest.mark.slow
def test_gradients_that_cancel_pass_without_vector_instructions():
    """Attention of a first position gives its queries no gradient, in exact arithmetic."""
    pytest.importorskip("transformers")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "tests/patching/test_head_loss.py",
            "-k",
            "custom_loss_on",
        ],
        cwd=ROOT,
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


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
    setting = portable.Setting("default", "SSE4_2", "SSE41", 2, 1)
    result = portable.run(setting, [str(suite)])
    assert result.counts == {"passed": 3}


# --- flakes ---

TESTS = Path(__file__).parents[1]
SUITES = [
    path
    for path in TESTS.rglob("*.py")
    # real trainers run in environments of their own, outside of the suite
    if path != Path(__file__) and TESTS / "trainers" / "runs" not in path.parents
]


def test_no_test_chooses_a_port_and_releases_it():
    """Somebody else could take it before the ranks of the test do: they meet in a file."""
    for path in [*SUITES, *TESTS.parent.glob("examples/*.py")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"getsockname|tcp://|MASTER_PORT|free_port", text), path.name


def test_no_test_ends_a_process_that_is_only_slow():
    """The demo was given five minutes, and took more beside other work."""
    for path in SUITES:
        text = path.read_text(encoding="utf-8")
        limits = re.findall(r"timeout=(\w[\w.]*)|\.join\((\d[\d.]*)\)", text)
        assert all(limit.endswith("PATIENCE") for limit, _ in limits if limit), path.name
        assert not any(limit for _, limit in limits), path.name
