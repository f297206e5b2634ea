"""What type checkers and ``help`` see: the snippets of README, the examples, the public names."""

import importlib
import importlib.util
import inspect
import json
import pydoc
import shutil
import subprocess
import sys

import pytest

import liger_multi
from tests.tools.test_docs import ROOT, blocks

ROOMS = (
    "liger_multi",
    "liger_multi.ops",
    "liger_multi.losses",
    "liger_multi.memory",
    "liger_multi.nn",
)

# the types that the package promises to both checkers
PROMISED = """
import torch
from typing_extensions import assert_type

from liger_multi import losses, memory, ops
from liger_multi.patching import PatchReport


def promised(x: torch.Tensor, names: tuple[str, ...]) -> None:
    assert_type(ops.cross_entropy(x, x), torch.Tensor)
    assert_type(ops.cross_entropy_with_outputs(x, x, outputs=names), ops.CrossEntropyOutput)
    assert_type(ops.fused_linear_cross_entropy(x, x, x), torch.Tensor)
    assert_type(
        ops.fused_linear_cross_entropy_with_outputs(x, x, x, outputs=("lse", "entropy")),
        ops.CrossEntropyOutput,
    )
    assert_type(ops.rms_norm(x, x), torch.Tensor)
    assert_type(ops.rms_norm_quantized(x, x), ops.QuantizedOutput)
    assert_type(ops.ssd_scan_with_state(x, x, x, x, x), tuple[torch.Tensor, torch.Tensor])
    assert_type(ops.linear_float8_with_codes(x, x), ops.LinearFloat8Output)
    assert_type(losses.dpo_loss(x, x)[0], torch.Tensor)
    assert_type(liger_multi.memory.format_bytes(1), str)
    assert_type(liger_multi.patch("llama"), PatchReport)
    assert_type(liger_multi.unpatch("llama"), PatchReport)
    assert_type(TrainerCallback().report, PatchReport | None)
    with liger_multi.use(rms_norm="reference"), liger_multi.patched("llama") as report:
        assert_type(report, PatchReport)
    assert_type(liger_multi.explain("rms_norm").chosen("rms_norm"), str | None)
    assert_type(memory.estimate("llama-3-8b", 1, 128).peak_bytes, int)
    ops.cross_entropy(x, x, reductoin="sum")  # type: ignore[call-arg]  # pyright: ignore
"""

# of packages without types, or with some, names are Any, as for the package itself
SKIPPED = "accelerate datasets deepspeed peft tokenizers transformers trl"
CONFIGURATION = f"""\
[mypy]
strict = True
python_version = 3.10
untyped_calls_exclude = torch
[mypy-{",".join(f"{name}.*" for name in SKIPPED.split())}]
follow_imports = skip
ignore_missing_imports = True
[mypy-liger_multi.*]
follow_imports = silent
"""


@pytest.fixture
def code(tmp_path):
    """A folder with the examples, and one block of README after the other as a module."""
    matches = blocks(ROOT / "README.md", "python")
    assert len(matches) >= 3
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "readme.py").write_text("\n".join([*matches, PROMISED]), encoding="utf-8")
    for path in (ROOT / "examples").glob("*.py"):
        shutil.copy(path, folder)
    return folder


def checked(*command):
    """What a checker said, which finds the package of this checkout."""
    return subprocess.run(
        [sys.executable, "-m", *map(str, command)], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.slow
def test_mypy_strict(code, tmp_path):
    configuration = tmp_path / "mypy.ini"
    configuration.write_text(CONFIGURATION, encoding="utf-8")
    options = ("--config-file", configuration, "--cache-dir", tmp_path / "cache")
    done = checked("mypy", *options, *code.glob("*.py"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_pyright(code):
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed: pip install 'pyright[nodejs]'")
    settings = {
        "extraPaths": [str(ROOT)],
        "reportMissingImports": "warning",  # DeepSpeed is not among what tests install
        "reportPrivateImportUsage": "none",  # TRL exports its trainers in a way that it cannot see
    }
    (code / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    done = checked("pyright", "--pythonpath", sys.executable, "--project", code, "--outputjson")
    text = json.loads(done.stdout)
    errors = [d for d in text["generalDiagnostics"] if d["severity"] == "error"]
    assert not errors, json.dumps(errors, indent=1)
    assert text["summary"]["filesAnalyzed"] == len(list(code.glob("*.py")))


FUNCTIONS = {
    f"{room}.{name}": getattr(importlib.import_module(room), name)
    for room in ROOMS
    for name in importlib.import_module(room).__all__
    if inspect.isfunction(getattr(importlib.import_module(room), name))
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_help_shows_signature_and_docstring(function):
    """The function's own, and not those of a wrapper."""
    shown = pydoc.plain(pydoc.render_doc(function))
    signature, summary = inspect.signature(function), inspect.getdoc(function).splitlines()[0]
    # Python 3.13 and newer give long signatures a line per argument
    first = " ".join(" ".join(shown.splitlines()[2:]).partition(summary)[0].split())
    parameters = list(signature.parameters.values())
    assert first.startswith(f"{function.__name__}(")
    assert first.endswith(f" -> {inspect.formatannotation(signature.return_annotation)}")
    assert [p.name for p in parameters] != ["args", "kwargs"]
    assert all(p.name in first for p in parameters)
    assert len(summary) > 20
    assert summary in shown


def test_help_of_the_package_shows_its_version():
    shown = pydoc.plain(pydoc.render_doc(liger_multi))
    assert all(line in shown for line in inspect.getdoc(liger_multi).splitlines())
    assert f"VERSION\n    {liger_multi.__version__}\n" in shown
