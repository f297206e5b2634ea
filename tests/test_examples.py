"""The examples run as they stand, on a CPU, and say how to run them on a GPU."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
NEEDS = {"grpo_trl": ("trl", "datasets", "accelerate"), "sft_trainer": ("accelerate",)}
MINE = ("custom_model", "grpo_trl", "plain_loop", "sft_trainer")


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
    sys.modules.pop("_tiny", None)


@pytest.mark.parametrize("name", ["custom_model", "plain_loop", "sft_trainer"])
def test_the_loss_falls(run, name, capsys):
    losses = run(name)
    assert losses[-1] < losses[0]
    if name != "custom_model":
        assert "fused_linear_cross_entropy" in capsys.readouterr().out


def test_grpo(run, capsys):
    assert len(run("grpo_trl")) == 2
    assert "rms_norm" in capsys.readouterr().out


@pytest.mark.parametrize("name", MINE)
def test_each_says_its_command(name):
    text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text()))
    assert re.search(rf"CPU.*\n\n    python examples/{name}\.py\n", text)
    assert re.search(rf"GPU.*\n\n    python examples/{name}\.py --\w+", text)
