"""The demo: once as a program in its quick form, its parts and its verdict in process."""

import io
import json
import os
import random
import re
import struct
from pathlib import Path

import pytest
import torch

from liger_multi.cli.main import main
from liger_multi.demo import command
from liger_multi.memory.measure import Peak
from tests import harness

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from liger_multi.demo import display, training
from liger_multi.demo.training import Run

MODELS = ("qwen2", "llama")


@pytest.fixture(
    scope="module",
    params=[MODELS[1:], pytest.param(MODELS, marks=pytest.mark.slow)],
    ids=["one model", "all models"],
)
def demo(tmp_path_factory, request):
    """Output folder and finished process of one quick demo."""
    folder = tmp_path_factory.mktemp("demo")
    words = ["demo", "--quick", "--device", "cpu", "--output", folder, "--models", *request.param]
    environment = {"COLUMNS": "100", "HF_HUB_OFFLINE": "0", "TRITON_INTERPRET": ""}
    return folder, harness.python("-m", "liger_multi", *words, code=None, **environment)


@pytest.fixture(scope="module")
def numbers(demo):
    folder, done = demo
    assert (folder / "demo.json").exists(), done.stdout + done.stderr
    data = json.loads((folder / "demo.json").read_text())
    assert set(data["models"]) <= set(MODELS)
    return data


@pytest.mark.slow
def test_the_demo_succeeds(demo):
    _, done = demo
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same curves, less memory" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_curves_are_equal(numbers):
    for runs in numbers["models"].values():
        stock, patched = (runs[name]["losses"] for name in ("unpatched", "patched"))
        assert len(stock) == len(patched) == 4
        assert max(abs(a - b) for a, b in zip(stock, patched, strict=True)) <= 1e-4
        assert stock[0] > stock[-1] > 0, "it learns"


def test_memory_drops(numbers):
    for runs in numbers["models"].values():
        stock, patched = (runs[name] for name in ("unpatched", "patched"))
        peaks = [max(filter(None, run["peak_bytes"])) for run in (stock, patched)]
        assert peaks[1] < 0.75 * peaks[0]
        assert stock["widest_bytes"] == 4 * 192 * 32768 * 4, "all logits"
        assert patched["widest_bytes"] < stock["widest_bytes"]


def test_timed_steps_are_not_metered(numbers):
    run = numbers["models"]["llama"]["patched"]
    assert [b is None for b in run["peak_bytes"]] == [False, False, False, True]
    assert run["tokens_per_second"] == pytest.approx(4 * 192 / run["seconds"][-1])


@pytest.mark.slow
def test_every_step_is_shown(demo, numbers):
    _, done = demo
    for model in numbers["models"]:
        for index, loss in enumerate(numbers["models"][model]["patched"]["losses"]):
            rows = [line.split() for line in done.stdout.splitlines() if f"{loss:.6f}" in line]
            assert any(row[0] == str(index + 1) for row in rows)


@pytest.mark.slow
def test_fewer_merges_than_asked_are_admitted(demo):
    _, done = demo
    assert "the text yields no more" in done.stdout


def test_the_picture(demo, numbers):
    folder, _ = demo
    content = (folder / "demo.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert width > 600 * len(numbers["models"])
    assert height > 1000
    assert len(content) > 20_000, "curves, not a blank sheet"


def run(losses, peak):
    record = Run(timed=1, tokens=10, losses=losses, seconds=[1.0] * len(losses))
    record.peaks = [Peak(torch.device("cpu"), "live tensors", peak_bytes=peak) for _ in losses]
    return record


@pytest.mark.parametrize(
    ("losses", "peak", "text"),
    [
        ([5.0, 4.0], 50, []),
        ([5.0, 4.00009], 50, []),
        ([5.0, 4.0002], 50, ["m: the curves part at step 2: unpatched 4.000000, patched 4.000200"]),
        ([float("nan"), 4.0], 50, ["m: the curves part at step 1"]),
        ([5.0, 4.0], 100, ["m: peak memory did not drop: unpatched 100 B, patched 100 B"]),
        ([6.0, 4.0], 101, ["m: the curves part at step 1", "m: peak memory did not drop"]),
    ],
)
def test_verdict(losses, peak, text):
    lines = command.judge("m", run([5.0, 4.0], 100), run(losses, peak), bound=1e-4)
    assert len(lines) == len(text)
    assert all(a.startswith(b) for a, b in zip(lines, text, strict=True))


@pytest.mark.slow
def test_a_patch_that_does_nothing_fails(monkeypatch, tmp_path, capsys):
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    monkeypatch.setattr("liger_multi.patch", lambda model: "nothing [done]", raising=False)
    argv = [
        "demo",
        "--quick",
        "--models",
        "llama",
        "--steps",
        "1",
        "--device",
        "cpu",
        "--output",
        str(tmp_path),
    ]
    state = random.getstate()
    assert main(argv) == 1
    random.setstate(state)
    text = capsys.readouterr().out
    assert "nothing [done]" in text
    assert "peak memory did not drop" in text
    assert json.loads((tmp_path / "demo.json").read_text())["problems"]


@pytest.mark.parametrize("device", ["gpu", "cuda:77"])
def test_a_device_that_is_absent(capsys, device):
    assert main(["demo", "--device", device]) == 2
    assert f"cannot use --device {device}: " in capsys.readouterr().err


def test_corpus_of_the_standard_library():
    text = training.read(200_000)
    assert text.characters == 200_000
    assert Path(text.root, "argparse.py").exists()
    assert "def " in text.texts[0] + text.texts[1]


def test_corpus_skips_tests_and_empty_files(tmp_path):
    for name, content in {
        "a.py": "x = 1\n",
        "b.py": "\n",
        "test/c.py": "y = 2\n",
        "sub/d.py": "z = 3\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert training.read(1000, tmp_path).texts == ("x = 1\n", "z = 3\n")
    with pytest.raises(FileNotFoundError, match="no Python sources below"):
        training.read(1000, tmp_path / "none")


def test_blocks_hold_the_text_and_follow_the_seed(tmp_path):
    text = training.Corpus(tmp_path, ("def f(x):\n    return x\n" * 40, "class A:\n    'é'\n" * 40))
    tokenizer = training.learn_tokenizer(text, 300)
    data = training.blocks(text, tokenizer, 3, 20, seed=0)
    assert len(data) == 3
    item = data[1]
    assert item["input_ids"].shape == (20,)
    assert torch.equal(item["input_ids"], item["labels"])
    words = tokenizer.decode(data.tokens.flatten().tolist())
    assert any(whole.startswith(words) for whole in text.texts)
    starts = {training.blocks(text, tokenizer, 1, 5, seed=s).tokens[0, 0].item() for s in range(8)}
    assert len(starts) == 2, "either file comes first"
    with pytest.raises(ValueError, match="tokens, 999 blocks of 20 need 19980"):
        training.blocks(text, tokenizer, 999, 20, seed=0)


def test_tables_fit_a_narrow_terminal_and_name_their_columns():
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    device = torch.device("cpu")
    peaks = [Peak(device, "live tensors", peak_bytes=2**40 - 1, widest_bytes=2**30), None]
    runs = [Run(1, 64, [10.123456, 9.5], [1.0, 1.0], list(peaks)) for _ in range(2)]
    shown = display.Display(console)
    console.print(display.HEADER)
    for count in (1, 2):
        some = Run(1, 64, runs[1].losses[:count], [1.0] * count, peaks[:count])
        console.print(display._row(runs[0], some, 1e-4))
    shown.summary("qwen2", *runs)
    lines = out.getvalue().splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines)
    assert "\N{HORIZONTAL ELLIPSIS}" not in out.getvalue()
    names = re.split(r"\s{2,}", lines[0].strip())
    assert len(names) == len(set(names)) == 6
    assert len(re.split(r"\s{2,}", lines[1].strip())) == 6
    assert "not metered" in lines[2]
