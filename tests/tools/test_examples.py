"""The examples run as they stand, on a CPU, and say how to run them on a GPU."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
NEEDS = {"grpo_trl": ("trl", "datasets", "accelerate"), "sft_trainer": ("accelerate",)}
EVERY = sorted(p.stem for p in FOLDER.glob("*.py") if "__main__" in p.read_text())


@pytest.fixture
def run(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))

    def found(name):
        for package in ("transformers", *NEEDS.get(name, ())):
            pytest.importorskip(package)
        spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.main([])

    yield found
    sys.modules.pop("_common", None)


@pytest.mark.parametrize("name", ["custom_model", "plain_loop", "sft_trainer"])
def test_the_loss_falls(run, name, capsys):
    losses = run(name)
    assert losses[-1] < losses[0]
    if name != "custom_model":
        assert "fused_linear_cross_entropy" in capsys.readouterr().out


def test_grpo(run, capsys):
    assert len(run("grpo_trl")) == 2
    assert "rms_norm" in capsys.readouterr().out


@pytest.mark.parametrize("name", EVERY)
def test_each_says_its_commands(name):
    """One for a CPU and one for GPUs, with arguments that it takes."""
    source = (FOLDER / f"{name}.py").read_text()
    text = ast.get_docstring(ast.parse(source))
    said = re.findall(rf"(.*)\n\n +(.*examples/{name}\.py.*(?:\n +--.*)*)", text)
    assert len(said) == 2
    (tiny, cpu), (real, gpu) = said
    assert "CPU" in tiny
    assert "GPU" in real
    assert cpu.endswith(f"examples/{name}.py")
    options = re.findall(r" (--[\w-]+)", gpu.partition(f"{name}.py")[2])
    assert options
    assert [o for o in options if f'"{o}"' not in source] == []


def test_every_example_is_run():
    """By name, here or among those of adapters and of several ranks."""
    here, run = Path(__file__).parents[1], set()
    for more in ("", "_parallel"):
        (path,) = here.rglob(f"test_examples{more}.py")
        text = path.read_text()
        for given in re.findall(r"(?:run|losses|parametrize)\(([^)]*)\)", text):
            run |= set(re.findall(r'"(\w+)"', given))
    assert len(EVERY) >= 7
    assert set(EVERY) <= run
