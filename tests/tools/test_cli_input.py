"""Every option of every command takes any value: it is refused in one line, or has its meaning."""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import liger_multi
from liger_multi.bench import report
from liger_multi.cli.main import _parser, main
from liger_multi.dispatch.registry import device_type
from liger_multi.errors import ConfigurationError
from liger_multi.memory import Profile, estimate
from liger_multi.memory.sizes import config_of
from tests.harness import PATIENCE
from tests.refusals import Loud, at_most, outcome

ROOT = Path(__file__).parents[2]

# --- commands ---


class Worked(BaseException):
    """A command has begun its work."""


@pytest.fixture
def tiny(tmp_path):
    """A folder with a configuration, to be asked about."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "model"
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    config.save_pretrained(folder)
    return folder


WORKING = (
    "bench.runner.run_plan",
    "cli.verify.verify",
    "demo.command._demo",
    "demo.command._profile",
    "memory.estimation.Simulation",
    "memory.planning.search.Shapes",
)
"""What commands begin their work with."""


@pytest.fixture
def idle(monkeypatch, tmp_path):
    """Commands say that they would work now; the current folder is an empty one."""
    pytest.importorskip("rich")

    def work(*_, **__):
        raise Worked

    for name in WORKING:
        monkeypatch.setattr(f"liger_multi.{name}", work)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def tree(folder):
    """Everything below a folder."""
    return {p: p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def called(argv, capsys):
    """The exit code (None: it began to work) and what was said; errors are of one form."""
    try:
        with at_most(60):
            code = main(argv)
    except Worked:
        code = None
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    if code == 2:
        assert not captured.out
        line = captured.err.splitlines()[-1]
        assert re.match(r"liger-multi( [\w-]+)*: error: .", line), captured.err
        assert len(captured.err) < 12_000
    return code, captured.err


def commands():
    """Every command's words and its options that take a value."""
    cases, queue = [], [((), _parser())]
    while queue:
        words, parser = queue.pop()
        choices = [a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        queue += [((*words, name), sub) for each in choices for name, sub in each.items()]
        if not choices:
            taking = [a for a in parser._actions if a.nargs != 0 and a.dest != "help"]
            cases += [(words, (a.option_strings or [""])[0], a.type) for a in taking]
    return cases


NEEDED = {("plan",): ["{model}", "--gpu", "24GiB"], ("estimate",): ["{model}"]}
JUNK = ("", "a\0b", "nosuch", "-1", "0", "nan", "inf", "1e999", "9" * 5000, "\ud800", "[]", "1.5")


def _shown(value):
    if isinstance(value, tuple):
        return " ".join(value)
    return getattr(
        getattr(value, "func", value), "__name__", str(value)
    )  # the same in every process


@pytest.mark.parametrize(("words", "option", "option_type"), commands(), ids=_shown)
def test_any_value_of_any_option(words, option, option_type, tiny, idle, capsys):
    """A value is refused with code 2 before any work, or taken; nothing is written."""
    before = tree(idle.parent)
    for value in JUNK:
        needed = [part.format(model=tiny) for part in NEEDED.get(words, [])]
        if not option and needed:
            needed[0] = value
            value_args = []
        else:
            value_args = [f"{option}={value}"] if option else [value]
        code, output = called([*words, *needed, *value_args], capsys)
        assert code in (None, 0, 1, 2)
        path = getattr(option_type, "__name__", "") == "path"
        if value in ("", "a\0b", "\ud800", "[]", "9" * 5000) and not path:
            assert code == 2, f"{words} {option} took {value!r}"
            assert output
    assert tree(idle.parent) == before


@pytest.mark.parametrize("command", ["bench", "demo", "memory-demo", "plan --write"])
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("absent/folder", "there is no folder 'absent'"),
        ("taken", "is not a folder"),
        ("taken/folder", "there is no folder 'taken'"),
        ("/proc/nosuch", "cannot write into '/proc'"),
        ("/proc/self", "cannot write into '/proc/self'"),
    ],
)
def test_a_folder_that_cannot_be_written(command, place, message, tiny, idle, capsys):
    (idle / "taken").write_text("mine")
    before = tree(idle)
    words = {"plan --write": ["plan", str(tiny), "--gpu", "24GiB", "--write", place]}
    argv = words.get(command, [command, "--output", place])
    code, error = called(argv, capsys)
    assert code == 2
    assert message in error
    assert argv[-2] in error
    assert tree(idle) == before


@pytest.mark.parametrize("command", ["bench", "demo", "memory-demo", "plan --write"])
def test_a_new_folder_beside_others_is_taken(command, tiny, idle, capsys):
    words = {"plan --write": ["plan", str(tiny), "--gpu", "24GiB", "--write", "new"]}
    assert called(words.get(command, [command, "--output", "new"]), capsys)[0] is None
    assert not (idle / "new").exists(), "it is made when there is something to write"


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["demo", "--output", "."], "demo.json"),
        (["demo"], "demo-output/demo.png"),
        (["memory-demo", "--output", "."], "unpatched.json"),
        (["plan", "{model}", "--gpu", "24GiB", "--write", "."], "accelerate.yaml"),
        (["plan", "{model}", "--gpu", "24GiB", "--picture", "a.png"], "a.png"),
    ],
)
def test_what_exists_is_not_overwritten_unasked(argv, name, tiny, idle, capsys):
    (idle / name).parent.mkdir(exist_ok=True)
    (idle / name).write_text("mine")
    argv = [part.format(model=tiny) for part in argv]
    code, error = called(argv, capsys)
    assert code == 2
    assert f"{name} would be overwritten; allow it with --overwrite" in error
    assert called([*argv, "--overwrite"], capsys)[0] is None
    assert (idle / name).read_text() == "mine"


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("plan", "must end with .png"),
        ("plan.jpeg", "must end with .png"),
        ("absent/plan.png", "there is no such folder"),
        ("folder.png", "is a folder"),
        ("/proc/plan.png", "cannot write into '/proc'"),
    ],
)
def test_a_picture_that_cannot_be_written(place, message, tiny, idle, capsys):
    (idle / "folder.png").mkdir()
    code, error = called(["plan", str(tiny), "--gpu", "24GiB", "--picture", place], capsys)
    assert code == 2
    assert message in error


def test_a_benchmark_takes_names_that_are_free(tmp_path):
    result = {
        "device": {"name": "X 1"},
        "date": "2026-01-02T",
        "rows": [{"op": "a", "sample": "s"}],
    }
    result["rows"][0] |= {"provider": "ours", "status": "failed"}
    (tmp_path / "x-1-2026-01-02-a.png").write_text("mine")
    (path,) = report.save(result, tmp_path)
    assert path.name == "x-1-2026-01-02-2.json"


@pytest.mark.parametrize("device", ["nosuch", "cdua", "cuda:300", "cuda:", "CUDA", "cuda:-1", ""])
@pytest.mark.parametrize("command", ["explain", "bench", "demo", "memory-demo", "estimate", "plan"])
def test_a_device_that_nobody_knows(command, device, tiny, idle, capsys):
    needed = [part.format(model=tiny) for part in NEEDED.get((command,), [])]
    code, error = called([command, *needed, f"--device={device}"], capsys)
    assert code == 2
    if device == "cdua":
        assert "unknown device type 'cdua'; did you mean 'cuda'" in error


def test_devices_that_the_library_knows():
    assert [device_type(name) for name in ("cpu", "cuda", "npu", "xpu")]
    for name in (None, 5, "cuda:0", torch.device("cpu"), Loud()):
        assert not outcome(device_type, name)
    with pytest.raises(ConfigurationError, match="unknown device type 'nosuch'"):
        estimate(None, 1, 1, device="nosuch")
    with pytest.raises(TypeError, match=r"must be a torch[.]device or its name, got 5"):
        liger_multi.explain("rms_norm", 5)
    with pytest.raises(TypeError, match=r"must be a torch[.]dtype, got 'float32'"):
        liger_multi.explain("rms_norm", "cpu", "float32")


# --- models of a file ---


def test_named_model_file_is_read(tiny, capsys):
    other = json.loads((tiny / "config.json").read_text()) | {"num_hidden_layers": 5}
    for name in ("other.json", "noend", ".hidden", "a b.json"):
        (tiny / name).write_text(json.dumps(other))
        assert config_of(tiny / name).num_hidden_layers == 5
    assert config_of(tiny).num_hidden_layers == 2
    assert config_of(f"{tiny}/").num_hidden_layers == 2
    assert config_of(tiny / "config.json").num_hidden_layers == 2
    sizes = []
    for name in ("config.json", "other.json"):
        assert main(["estimate", str(tiny / name), "--sequence", "8", "--json"]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["parameters"])
    assert sizes[0] < sizes[1]
    argv = [
        "--gpu",
        "24GiB",
        "--seq",
        "8",
        "--batch",
        "1",
        "--no-limits",
        "--data-parallel",
        "--precision",
        "fp32",
        "--json",
    ]
    assert main(["plan", str(tiny / "other.json"), *argv]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == 5


BROKEN = {
    "torn": ("{", "is not JSON"),
    "empty": ("", "is not JSON"),
    "a list": ("[1, 2]", r"must hold a mapping, the configuration of a model, got list \[1, 2\]"),
    "null": ("null", "got NoneType None"),
    "a number": ("1", "got int 1"),
    "nested": ("[" * 10**5, "is not JSON: it is nested too deep"),
    "digits": ('{"a": ' + "9" * 5000 + "}", "is not JSON"),
    "no type": ('{"hidden_size": 8}', r"has no model_type.* its keys are \['hidden_size'\]"),
    "a wrong type": (
        '{"model_type": "lama"}',
        "unknown model_type in .* 'lama'; did you mean 'llama'",
    ),
    "another type": ('{"model_type": 5}', "unknown model_type in .* 5"),
    "a type of no text": ('{"model_type": "vit"}', "has no causal language model for a ViTConfig"),
    "wrong sizes": ('{"model_type": "llama", "num_attention_heads": 0}', "."),
    "a wrong kind": ('{"model_type": "llama", "hidden_size": "many"}', "."),
    "negative": ('{"model_type": "llama", "hidden_size": -8}', "."),
    "no layers": ('{"model_type": "llama", "num_hidden_layers": 0, "vocab_size": 0}', "."),
    "a map of code": ('{"model_type": "llama", "auto_map": null, "hidden_size": []}', "."),
    "an unknown own": (
        '{"model_type": "mine", "auto_map": {"AutoConfig": "a.B"}}',
        r"the code of its own that it names \(auto_map\) is not run",
    ),
}


@pytest.mark.parametrize("command", ["estimate", "plan"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_no_model(command, name, tmp_path, capsys):
    pytest.importorskip("transformers")
    content, message = BROKEN[name]
    path = tmp_path / "other.json"
    path.write_text(content)
    argv = {
        "estimate": ["estimate", str(path), "--sequence", "8"],
        "plan": ["plan", str(path), "--gpu", "24GiB", "--seq", "8"],
    }
    code, error = called(argv[command], capsys)
    assert code == 2
    assert re.search(message, error)
    assert len(error) < 1500, "hundreds of names help nobody"


@pytest.mark.parametrize("command", ["estimate", "plan"])
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("", "unknown model ''"),
        ("empty", "has no config.json"),
        ("pipe", "it is a pipe, not a file"),
        ("folder", "Is a directory"),
        ("nowhere", "unknown model"),
        ("x" * 5000, "unknown model"),
        ("latin.json", "is not JSON: its text is not UTF-8"),
    ],
)
def test_a_place_that_holds_no_model(command, place, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder" / "config.json").mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    code, error = called(
        [command, place, *(["--gpu", "24GiB"] if command == "plan" else [])], capsys
    )
    assert code == 2
    assert message in error


@pytest.mark.parametrize("command", ["estimate", "plan"])
@pytest.mark.parametrize("model_type", ["llama", "vit", "mine"])
def test_code_of_configuration_never_runs(command, model_type, tmp_path, monkeypatch, capsys):
    from transformers import dynamic_module_utils
    from transformers.models.auto import auto_factory, configuration_auto

    def never(*_, **__):
        raise AssertionError("code of a folder, or a question about it")

    for module in (dynamic_module_utils, auto_factory, configuration_auto):
        monkeypatch.setattr(module, "get_class_from_dynamic_module", never)
    monkeypatch.setattr("builtins.input", never)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    own = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    sizes = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    content = {"model_type": model_type, "auto_map": own, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(content))
    planned = "--gpu 24GiB --seq 8 --batch 1 --no-limits --data-parallel --precision fp32"
    options = {"estimate": ["--sequence", "8"], "plan": planned.split()}
    code, _ = called([command, str(tmp_path), *options[command]], capsys)
    assert code == (0 if model_type == "llama" else 2)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"title": 1}', '{"holders": 5, "saved": 1}'])
def test_a_file_that_is_no_profile(content, tmp_path):
    (tmp_path / "a.json").write_text(content)
    assert not outcome(Profile.load, tmp_path / "a.json")


@pytest.mark.parametrize(
    "options",
    [{"batch": True}, {"sequence": 2**40}, {"world": "2"}, {"capacity": "80GiB"}, {"dtype": []}],
)
def test_wrong_options_of_an_estimate(options, tiny):
    with pytest.raises(ValueError, match=r"must be a positive integer, got|unknown dtype \[\]"):
        estimate(config_of(tiny), **{"batch": 1, "sequence": 8, **options})


# --- programs ---


def program(*argv, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LIGER_MULTI_CONFIG": ""}
    environment |= options.pop("environment", {})
    command = [sys.executable, "-m", "liger_multi", *argv]
    return subprocess.run(
        command, env=environment, stderr=subprocess.PIPE, timeout=PATIENCE, check=False, **options
    )


def test_a_broken_file_of_the_environment(tmp_path):
    (tmp_path / "a.yaml").write_text("ops: {}\nops: {}\n")
    environment = {"LIGER_MULTI_CONFIG": str(tmp_path / "a.yaml")}
    done = program("explain", "rms_norm", environment=environment, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (2, b"")
    output = done.stderr.decode()
    assert output.startswith("liger-multi: error: ")
    assert output.count("\n") == 1
    assert output.endswith("(named by LIGER_MULTI_CONFIG)\n")


@pytest.mark.slow
def test_output_that_cannot_be_written():
    with open("/dev/full", "wb") as full:
        done = program("explain", "rms_norm", stdout=full)
    assert done.returncode == 2
    assert done.stderr.decode().startswith("liger-multi: error: [Errno 28] No space left")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.slow
def test_a_reader_who_leaves():
    reading, writing = os.pipe()
    os.close(reading)
    done = program("explain", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.slow
def test_names_that_the_output_cannot_spell(tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff.yaml"
    with open(path, "wb") as file:
        file.write(b"default: auto\n")
    done = program("config", "check", path, stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b"\\udcff.yaml: fine\n")
