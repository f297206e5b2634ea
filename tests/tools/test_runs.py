"""How the suite runs: in parts, in processes of several ranks, and on any CPU.

Every test is in one part, and files stay whole. The bounds of comparisons follow from what fp32
resolves.
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

from ci import portable, results
from tests import harness, processes
from tests.comparing import ULPS, assert_same_gradients, difference

# --- parts ---

ROOT = Path(__file__).parents[2]
NAMES = [f"tests/test_{f}.py::test_{i}" for f in "abcdefg" for i in range(ord(f) - 90)] + [
    f"tests/ops/test_ops.py::test_{kind}[{op}-reference-{i}]"
    for kind in ("both", "mixed")
    for op in ("rms_norm", "softmax", "swiglu")
    for i in range(5)
]


class Config:
    """Of pytest, as far as parts ask it."""

    def __init__(self, part="", markexpr="not slow", randomly=False):
        self.options = {"--part": part, "markexpr": markexpr}
        self.dropped = []
        self.hook = SimpleNamespace(pytest_deselected=lambda items: self.dropped.extend(items))
        self.pluginmanager = SimpleNamespace(hasplugin=lambda name: randomly)

    def getoption(self, name):
        return self.options[name]


def selected(names, **options):
    config, items = Config(**options), [SimpleNamespace(nodeid=n) for n in names]
    harness.select(config, items)
    assert len(items) + len(config.dropped) == len(names)
    return [item.nodeid for item in items]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 50])
@pytest.mark.parametrize("markexpr", ["not slow", "slow"])
def test_every_test_is_in_one_part_and_files_are_whole(count, markexpr, monkeypatch):
    known = {"native not slow": {"test_g.py": 90.0, "test_ops.py[softmax]": 30.0, "test_old.py": 9}}
    monkeypatch.setattr(harness, "recorded", lambda: known)
    found = [selected(NAMES, part=f"{i}/{count}", markexpr=markexpr) for i in range(1, count + 1)]
    assert sorted(name for names in found for name in names) == sorted(NAMES)
    units = [{harness.unit(name) for name in names} for names in found]
    assert sum(map(len, units)) == len(set().union(*units))


def test_parts_are_balanced_by_time():
    seconds = {"a": 50, "b": 30, "c": 21, "d": 20, "e": 10, "f": 9}
    found = harness.shares(seconds, 3)
    totals = [sum(s for n, s in seconds.items() if found[n] == part) for part in (1, 2, 3)]
    assert totals == [50, 49, 41]


def test_the_longest_comes_first_unless_the_order_is_random(monkeypatch):
    monkeypatch.setattr(harness, "recorded", lambda: {"native not slow": {"test_b.py": 90.0}})
    assert harness.unit(selected(NAMES)[0]) == "test_b.py"
    assert selected(NAMES, randomly=True) == NAMES


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "1/", "-1/2"])
def test_a_part_that_is_none_is_refused(text):
    with pytest.raises(pytest.UsageError, match=f"--part {text}: expected i/n"):
        harness.parse_part(text)


def test_the_longest_test_of_a_file_goes_to_several_workers():
    long = "tests/kernels/test_npu.py::test_kernels_compile_as_listed"
    found = [harness.unit(f"{long}[{name}]") for name in ("fp32-a2", "bf16-a2", "fp32-a5")]
    assert found[0] == found[2] != found[1]
    assert harness.unit("tests/kernels/test_npu.py::test_a_block[fp32]") == "test_npu.py"


def test_what_an_operator_compiles_for_16_bits_goes_to_several_workers():
    name = "tests/ops/test_ops.py::test_forward_and_backward[rms_norm-triton-wide-{}]"
    found = [harness.unit(name.format(dtype)) for dtype in ("float32", "bfloat16", "float16")]
    assert found == [f"test_ops.py[rms_norm{of}]" for of in ("", "-bfloat16", "-float16")]


def test_times_are_recorded_by_unit(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "SECONDS", tmp_path / "seconds.json")
    monkeypatch.setattr(harness, "interpreted", lambda: False)
    for seconds in (2.0, 3.0):  # another run of the same replaces it
        recorder = harness.Recorder(Config())
        for name in ("tests/test_a.py::test_1", "tests/test_a.py::test_2", "tests/test_b.py::test"):
            duration = seconds if "test_a" in name else 0.1
            recorder.pytest_runtest_logreport(SimpleNamespace(nodeid=name, duration=duration))
        recorder.pytest_sessionfinish()
    assert harness.recorded() == {"native not slow": {"test_a.py": 6.0}}


def test_recorded_files_exist():
    units = {unit for run in harness.recorded().values() for unit in run}
    files = {unit.partition("[")[0] for unit in units}
    gone = sorted(files - {path.name for path in (ROOT / "tests").rglob("test_*.py")})
    assert not gone, "make seconds"


def test_every_run_of_the_suite_takes_its_part(tmp_path):
    """Of the arguments that an interpreter is called with, which does nothing else."""
    log, python = tmp_path / "calls", tmp_path / "npu" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/bash\necho "$@" >> {log}\n')
    python.chmod(0o755)
    # nothing of a `make` that runs this test: it exports what it was called with
    given = {"PATH": os.environ["PATH"]}
    subprocess.run(
        ["make", "test-full", "NO_VENV=1", "PART=2/3", f"PYTHON={python}"]
        + [f"NPU_VENV={tmp_path / 'npu'}"],
        cwd=ROOT, env=given, capture_output=True, text=True, check=True,
    )  # fmt: skip
    runs = re.findall(r".*-m pytest .*", log.read_text())
    # fast and slow: native, interpreted; compiled, adapters, and what an NPU has
    assert len(runs) >= 8, runs
    assert all("--part 2/3" in run for run in runs), runs


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
    made = torch.Generator().manual_seed(0)
    found = {
        name: scale * torch.randn(5, 7, generator=made) * size
        for name, size in (("head", 1.0), ("value", 0.1), ("norm", 1e-3))
    }
    return {**found, "key.bias": scale * 1e-8 * torch.randn(7, generator=made)}


# --- the bound of a gradient ---


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e9])
def test_a_gradient_that_cancels_has_the_resolution_of_the_model(scale):
    """It was compared with its own largest entry and 1e-9, and failed on other CPUs."""
    wanted = gradients(scale)
    other = {**wanted, "key.bias": -wanted["key.bias"]}
    assert difference(other, wanted) == ""
    assert difference({"key.bias": other["key.bias"]}, {"key.bias": wanted["key.bias"]})
    off = 2 * ULPS * EPS * wanted["head"].abs().max()
    assert difference({**wanted, "key.bias": wanted["key.bias"] + off}, wanted)


@pytest.mark.parametrize(("name", "by"), [("head", 1e-4), ("value", 1e-4), ("norm", 2e-3)])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e9])
def test_a_wrong_gradient_is_seen_at_every_scale(scale, name, by):
    wanted = gradients(scale)
    other = {**wanted, name: wanted[name] * (1 + by)}
    assert difference(other, wanted).startswith(f"{name}: ")
    assert difference({n: g for n, g in wanted.items() if n != name}, wanted)
    assert difference({**wanted, name: wanted[name].double()}, wanted)
    assert difference({**wanted, name: wanted[name] * float("nan")}, wanted)


def test_a_model_without_gradients_proves_nothing():
    with pytest.raises(AssertionError):
        assert_same_gradients([None], [None])


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

FLAGS = {"sse4_1", "sse4_2", "avx2", "avx512f", "avx512bw"}


def test_the_rows_have_every_value():
    def values(name):
        return {getattr(setting, name) for setting in portable.SETTINGS}

    assert len(portable.SETTINGS) == 6
    assert values("aten") == {"default", "avx2", "avx512"}
    assert values("mkl") == {"SSE4_2", "AVX2", "AVX512"}
    assert values("onednn") == {"SSE41", "AVX2", "AVX512_CORE"}
    assert values("threads") == {1, 2, 4}
    assert len(values("seed")) == 3
    pairs = {(s.aten, s.mkl) for s in portable.SETTINGS}
    assert len(pairs) == 6, "no two rows are one"


def test_what_a_processor_lacks_is_named(tmp_path):
    old = FLAGS - {"avx512f", "avx512bw"}
    refused = [setting.refusal(old) for setting in portable.SETTINGS]
    assert refused[1] is None
    assert refused[2] == "this processor has no avx512bw, avx512f"
    assert not any(setting.refusal(FLAGS) for setting in portable.SETTINGS)
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\nflags\t\t: fpu avx2 sse4_1\n")
    assert portable.flags(file) <= {"fpu", "avx2", "sse4_1"}
    assert portable.flags(tmp_path / "none") == set()


def test_one_result_has_every_row(tmp_path, monkeypatch, capsys):
    ran = []

    def run(setting, arguments):
        ran.append((setting.seed, arguments))
        red = setting.aten == "avx2"
        counts = {"passed": 5, **({"failed": 1} if red else {})}
        return results.Result(
            "native", [], {}, {}, "abc", "2026", counts, 1.0, failures=["a::b"] * red
        )

    monkeypatch.setattr(portable, "flags", lambda: FLAGS - {"avx512f"})
    monkeypatch.setattr(portable, "run", run)
    assert portable.main([str(tmp_path / "portable.json"), "--rows", "1,2,3", "-k", "x"]) == 1
    assert ran == [(1, ["-k", "x"]), (2, ["-k", "x"])]
    (found,) = results.read(tmp_path)
    assert found.part == "portable"
    assert found.counts == {"passed": 10, "failed": 1}
    assert found.failures == [f"a::b ({portable.SETTINGS[1].name})"]
    assert list(found.settings.values()) == [
        "5 passed", "**5 passed, 1 failed**", "not run: this processor has no avx512f",
    ]  # fmt: skip
    assert "not run: this processor has no avx512f" in capsys.readouterr().out
    assert portable.main([str(tmp_path / "portable.json"), "--rows", "1"]) == 0
    assert portable.main([str(tmp_path / "portable.json"), "--rows", "3"]) == 1, "nothing ran"


def test_a_row_is_a_run_of_the_suite_under_its_settings(tmp_path):
    pytest.importorskip("pytest_randomly")
    for name in ("conftest.py", "thinned.yaml"):
        (tmp_path / name).write_text((ROOT / "tests" / name).read_text())
    suite = tmp_path / "test_settings.py"
    suite.write_text(
        "import os, torch\n"
        "def test_threads(): assert torch.get_num_threads() == 2\n"
        "def test_aten(): assert torch.backends.cpu.get_cpu_capability() == 'DEFAULT'\n"
        "def test_mkl(): assert os.environ['MKL_ENABLE_INSTRUCTIONS'] == 'SSE4_2'\n"
    )
    setting = portable.Setting("default", "SSE4_2", "SSE41", 2, 1)
    found = portable.run(setting, [str(suite)])
    assert found.counts == {"passed": 3}


# --- flakes ---

TESTS = Path(__file__).parents[1]


def test_no_test_chooses_a_port_and_releases_it():
    """Somebody else could take it before the ranks of the test do: they meet in a file."""
    for path in [*TESTS.rglob("*.py"), *TESTS.parent.glob("examples/*.py")]:
        text = path.read_text(encoding="utf-8")
        if path.name == Path(__file__).name:
            continue
        assert not re.search(r"getsockname|tcp://|MASTER_PORT|free_port", text), path.name


def test_no_test_ends_a_process_that_is_only_slow():
    """The demo was given five minutes, and took more beside other work."""
    for path in TESTS.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        found = re.findall(r"timeout=(\w[\w.]*)|\.join\((\d[\d.]*)\)", text)
        assert all(limit.endswith("PATIENCE") for limit, _ in found if limit), path.name
        assert not any(limit for _, limit in found), path.name
