"""Parts of the suite: every test is in one of them, and files stay whole."""

import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests import parts

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
    parts.select(config, items)
    assert len(items) + len(config.dropped) == len(names)
    return [item.nodeid for item in items]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 50])
@pytest.mark.parametrize("markexpr", ["not slow", "slow"])
def test_every_test_is_in_one_part_and_files_are_whole(count, markexpr, monkeypatch):
    known = {"native not slow": {"test_g.py": 90.0, "test_ops.py[softmax]": 30.0, "test_old.py": 9}}
    monkeypatch.setattr(parts, "recorded", lambda: known)
    found = [selected(NAMES, part=f"{i}/{count}", markexpr=markexpr) for i in range(1, count + 1)]
    assert sorted(name for names in found for name in names) == sorted(NAMES)
    units = [{parts.unit(name) for name in names} for names in found]
    assert sum(map(len, units)) == len(set().union(*units))


def test_parts_are_balanced_by_time():
    seconds = {"a": 50, "b": 30, "c": 21, "d": 20, "e": 10, "f": 9}
    found = parts.shares(seconds, 3)
    totals = [sum(s for n, s in seconds.items() if found[n] == part) for part in (1, 2, 3)]
    assert totals == [50, 49, 41]


def test_the_longest_comes_first_unless_the_order_is_random(monkeypatch):
    monkeypatch.setattr(parts, "recorded", lambda: {"native not slow": {"test_b.py": 90.0}})
    assert parts.unit(selected(NAMES)[0]) == "test_b.py"
    assert selected(NAMES, randomly=True) == NAMES


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "1/", "-1/2"])
def test_a_part_that_is_none_is_refused(text):
    with pytest.raises(pytest.UsageError, match=f"--part {text}: expected i/n"):
        parts.parse(text)


def test_the_longest_test_of_a_file_goes_to_several_workers():
    long = "tests/kernels/test_npu.py::test_kernels_compile_as_listed"
    found = [parts.unit(f"{long}[{name}]") for name in ("fp32-a2", "bf16-a2", "fp32-a5")]
    assert found[0] == found[2] != found[1]
    assert parts.unit("tests/kernels/test_npu.py::test_a_block[fp32]") == "test_npu.py"


def test_times_are_recorded_by_unit(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "SECONDS", tmp_path / "seconds.json")
    monkeypatch.setattr(parts.harness, "interpreted", lambda: False)
    for seconds in (2.0, 3.0):  # another run of the same replaces it
        recorder = parts.Recorder(Config())
        for name in ("tests/test_a.py::test_1", "tests/test_a.py::test_2", "tests/test_b.py::test"):
            duration = seconds if "test_a" in name else 0.1
            recorder.pytest_runtest_logreport(SimpleNamespace(nodeid=name, duration=duration))
        recorder.pytest_sessionfinish()
    assert parts.recorded() == {"native not slow": {"test_a.py": 6.0}}


def test_recorded_files_exist():
    units = {unit for run in parts.recorded().values() for unit in run}
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
