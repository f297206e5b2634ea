"""The guide for a new operator: three files and one line, taken from its page and run."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
PART = GUIDE.partition("## An elementwise operator")[2].partition("\n## ")[0]
EXPORTS = "liger_multi/ops/__init__.py"


def told():
    """The files of the guide with their text, and the line."""
    files = re.findall(r"^\*\*[^`]*`([\w/]+\.py)`\*\*.*?^```python\n(.*?)^```", PART, re.M | re.S)
    line = re.search(rf"`{EXPORTS}`:\n+```python\n(.*?)```", PART, re.S)[1]
    return dict(files), line


@pytest.fixture
def extended(tmp_path):
    """A copy of the package and its suite, with the operator."""
    for folder in ("liger_multi", "backends", "reference", "tests"):
        ignored = shutil.ignore_patterns(
            "__pycache__", "sweep", *["backends", "reference"] * (folder == "liger_multi")
        )
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for folder in ("backends", "reference"):
        (tmp_path / "liger_multi" / folder).symlink_to(tmp_path / folder)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    files, line = told()
    for name, text in files.items():
        assert not (tmp_path / name).exists(), f"{name} is no new file"
        (tmp_path / name).write_text(text, encoding="utf-8")
    exports = tmp_path / EXPORTS
    first, mark, rest = exports.read_text(encoding="utf-8").partition(
        "from liger_multi.ops.softmax "
    )
    exports.write_text(first + line + mark + rest, encoding="utf-8")
    return tmp_path


def test_an_operator_is_three_files_and_one_line():
    files, line = told()
    assert [name.rpartition("/")[0] for name in files] == [
        "liger_multi/ops", "reference/activations", "backends/triton/activations",
    ]  # fmt: skip
    assert line.count("\n") == 1


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_the_suite_runs_the_operator_of_the_guide(extended, backend):
    """Against fp64 on a backend, and what every contract promises."""
    if backend == "triton":
        pytest.importorskip("triton")
    files = ["tests/ops/test_ops.py"] + ["tests/ops/test_contracts.py"] * (backend == "reference")
    kernels = {"TRITON_INTERPRET": "1"} if backend == "triton" else {}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow",
         "-k", "sine and not cosine", "--backend", backend, *files],
        cwd=extended, env={**os.environ, **kernels, "PYTHONPATH": str(extended)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 14, done.stdout[-500:]
