"""The command line: doctor, explain, config; in process, and once as a program."""

import argparse
import dataclasses
import importlib.util
import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch

import liger_multi
from liger_multi import _torch_private
from liger_multi._version import __version__
from liger_multi.cli import doctor
from liger_multi.cli.main import _parser, main
from liger_multi.dispatch import registry
from liger_multi.dispatch.config import configure, current, load, scope
from liger_multi.dtypes import long_name, short_name
from liger_multi.errors import BackendUnavailableError, ConfigurationError, PatchError
from liger_multi.files.page import Page, _table
from tests import harness


@pytest.fixture
def fresh_configuration(monkeypatch):
    """Read the environment again, before and after."""
    monkeypatch.delenv("LIGER_MULTI_CONFIG", raising=False)
    liger_multi.configure(None)
    yield monkeypatch
    monkeypatch.undo()
    liger_multi.configure(None)


def test_doctor_prints_versions_devices_and_operators(capsys, fresh_configuration):
    code = main(["doctor", "--verbose"])
    text = capsys.readouterr().out
    facts = doctor.collect()
    assert code == any(f["kind"] == "problem" for f in facts["findings"])
    for word in (__version__, torch.__version__, "Devices that PyTorch sees", "Operators on cpu"):
        assert word in text
    assert all(op in text for op in registry.operators())
    assert all(name in text for name in registry.backends())
    assert "LIGER_MULTI_CONFIG is not set" in text


def test_doctor_is_short_and_begins_with_the_answer(capsys, fresh_configuration):
    main(["doctor"])
    text = capsys.readouterr().out
    assert text.startswith("Findings\n")
    assert len(text.splitlines()) <= 40


def test_operators_of_another_backend_are_named_in_short(fresh_configuration):
    facts = doctor.collect()
    for row in facts["operators"]:
        if row["op"] == "rms_norm":
            row["chosen"] = row["backend"] == "triton"
    (section,) = [s for s in doctor.page(facts).sections if s.title == "Operators"]
    count = len(registry.operators())
    assert section.rows[:2] == [["cpu", "reference", str(count - 1)], ["", "triton", "rms_norm"]]


def test_doctor_agrees_with_explain(fresh_configuration):
    facts = doctor.collect()
    chosen = {
        (r["op"], r["direction"], r["device"]): r["backend"]
        for r in facts["operators"]
        if r["chosen"]
    }
    for op in registry.operators():
        for direction in ("forward", "backward"):
            assert chosen[op, direction, "cpu"] == liger_multi.explain(op, "cpu").chosen(
                op, direction
            )
    assert all(row["chosen"] or row["reason"] for row in facts["operators"]), (
        "a refusal has a reason"
    )


def test_doctor_names_versions_that_nobody_tested(monkeypatch, fresh_configuration):
    monkeypatch.setattr(doctor, "versions", lambda: {"torch": "2.99.0"})
    findings = doctor.collect()["findings"]
    (text,) = [f["text"] for f in findings if f["kind"] == "note" and "newer than" in f["text"]]
    assert text.startswith("torch 2.99.0 is newer than what was tested (2.9.1 to ")


def test_doctor_names_what_a_missing_symbol_switches_off(monkeypatch, fresh_configuration):
    symbol = _torch_private.Symbol(
        ("torch._C._gone",), "profiles", "profiles are empty", absent=True
    )
    monkeypatch.setattr(_torch_private, "SYMBOLS", [symbol])
    notes = [f["text"] for f in doctor.collect()["findings"] if f["kind"] == "note"]
    assert str(symbol) in notes
    assert "torch._C._gone (for profiles): profiles are empty" in str(symbol)


def test_doctor_sees_that_patching_cannot_be_imported(monkeypatch, fresh_configuration):
    monkeypatch.setitem(sys.modules, "liger_multi.patching", None)
    problems = [f["text"] for f in doctor.collect()["findings"] if f["kind"] == "problem"]
    assert any(text.startswith("patching: ") for text in problems)


def test_doctor_json(capsys, fresh_configuration, monkeypatch):
    own = doctor.collect
    monkeypatch.setattr(doctor, "collect", lambda: print("by a backend") or own())
    main(["doctor", "--json"])
    said = capsys.readouterr()
    facts = json.loads(said.out)
    assert "by a backend" in said.err
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["devices"][0]["device"] == "cpu"
    assert facts["backends"]["reference"]["state"] == "available"
    assert facts["configuration"][-1]["default"] == "auto"
    assert {"op", "direction", "device", "backend", "chosen", "reason"} <= set(
        facts["operators"][0]
    )


def test_doctor_says_where_the_configuration_comes_from(capsys, fresh_configuration, tmp_path):
    path = tmp_path / "choice.yaml"
    path.write_text(
        "ops: {rms_norm: reference}\nchunk_bytes: 2MiB\ndevices: {cpu: {default: reference}}\n"
    )
    fresh_configuration.setenv("LIGER_MULTI_CONFIG", str(path))
    liger_multi.configure({"ops": {"swiglu": ["reference"]}})
    main(["doctor"])
    text = capsys.readouterr().out
    assert f"{path} (named by LIGER_MULTI_CONFIG)" in text
    assert "rms_norm: reference" in text
    assert "default on cpu: reference" in text
    assert "chunk_bytes: 2.0 MiB" in text
    assert (
        text.index("configure()")
        < text.index("named by LIGER_MULTI_CONFIG")
        < text.index("built in")
    )


def test_doctor_survives_a_broken_configuration(capsys, fresh_configuration, tmp_path):
    fresh_configuration.setenv("LIGER_MULTI_CONFIG", str(tmp_path / "absent.yaml"))
    fresh_configuration.setattr("liger_multi.dispatch.config._base", None)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "absent.yaml" in text
    assert torch.__version__ in text


@pytest.mark.parametrize("name", ["versions", "_explained", "configuration", "_cpu", "findings"])
def test_doctor_survives_a_broken_probe(capsys, monkeypatch, name):
    def broken(*args):
        raise OSError("the disk is on fire\nand more")

    monkeypatch.setattr(doctor, name, broken)
    assert main(["doctor"]) == 1
    assert "OSError: the disk is on fire" in capsys.readouterr().out


def test_doctor_survives_a_backend_that_breaks(monkeypatch):
    def broken():
        raise ImportError("libfoo.so.1: cannot open shared object file")

    probes = doctor.Probes()
    monkeypatch.setattr(
        registry, "unavailable", lambda name: broken() if name == "triton" else None
    )
    facts = doctor.backends(probes)
    assert facts["triton"]["state"] == "its probe failed"
    assert "libfoo.so.1" in probes.failures["probe of triton"]
    assert facts["reference"]["state"] == "available"


def problems(rows=()):
    return [f["text"] for f in doctor.findings(rows) if f["kind"] == "problem"]


@pytest.mark.parametrize(
    ("built_for", "said"),
    [
        (None, "is built for CPUs only"),
        (torch.device("cuda"), "sees no device: driver absent or too old"),
    ],
)
def test_doctor_names_hardware_that_torch_cannot_use(monkeypatch, built_for, said):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: built_for
    )
    monkeypatch.setattr(
        doctor.glob, "glob", lambda pattern: ["/dev/nvidia0"] if "nvidia" in pattern else []
    )
    monkeypatch.setattr(
        doctor.shutil, "which", lambda tool: f"/bin/{tool}" if tool == "nvidia-smi" else None
    )
    (text,) = problems()
    assert text.startswith("there are signs of an NVIDIA GPU (/dev/nvidia0, nvidia-smi), but ")
    assert said in text


def test_doctor_finds_nothing_where_torch_uses_the_hardware(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(doctor.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    monkeypatch.setattr(doctor, "_triton_driver", lambda: None)
    assert problems() == []


def test_doctor_notes_the_interpreter_and_the_missing_driver(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET=1" in doctor.findings([])[-1]["text"]
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(doctor, "_triton_driver", lambda: "0 active drivers")
    assert "has no driver here: 0 active drivers" in doctor.findings([])[-1]["text"]


def test_doctor_names_an_operator_that_nothing_runs():
    row = {"op": "swiglu", "direction": "backward", "device": "cpu", "chosen": False}
    assert "no backend may run swiglu backward on cpu: see --verbose" in problems([row])


@pytest.fixture
def two_devices(monkeypatch):
    """A machine with two accelerators that no backend here can use."""
    if torch.accelerator.is_available():
        pytest.skip("its own accelerator would answer for them")
    place = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: place)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


def test_explain_shows_every_candidate_on_every_device(capsys, two_devices):
    assert main(["explain", "rms_norm"]) == 0
    cpu, both = capsys.readouterr().out.split("\n\n")
    assert cpu.startswith("Operators on cpu\n")
    assert both.startswith("Operators on cuda:0, cuda:1\n")
    for text in (cpu, both):
        for name in registry.backends():
            (line,) = [line for line in text.splitlines() if f"  {name} " in line]
            assert ("chosen" in line) == (name == "reference")
            because = line.split("chosen" if name == "reference" else "  -  ")[1]
            assert because.strip(), "chosen or refused, because"


def test_devices_that_differ_have_tables_of_their_own(capsys, two_devices, monkeypatch):
    def supports(device, dtype):
        return "it is the older one" if device.index == 0 else None

    only_one = dataclasses.replace(registry.backends()["reference"], supports=supports)
    monkeypatch.setitem(registry.backends(), "reference", only_one)
    assert main(["explain", "rms_norm"]) == 1
    text = capsys.readouterr().out
    assert text.index("Operators on cuda:0\n") < text.index("it is the older one")
    assert text.index("it is the older one") < text.index("Operators on cuda:1\n")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has a device")
def test_explain_says_what_fails_where_no_tensor_can_be(capsys):
    """On a laptop it said that the reference was chosen, by default, on a CUDA device."""
    assert main(["explain", "rms_norm", "--device", "cuda"]) == 1
    text = capsys.readouterr().out
    assert "chosen" not in text
    assert text.splitlines()[-1].strip().startswith("this call fails")
    assert "no cuda device" in text
    assert "not named by the configuration" not in text


def test_explain_fails_where_nothing_may_run(capsys, monkeypatch, fresh_configuration):
    liger_multi.configure({"ops": {"rms_norm": "triton"}})
    assert main(["explain", "rms_norm", "--device", "cpu"]) == 1
    assert "this call fails" in capsys.readouterr().out.splitlines()[-1]
    assert main(["explain", "swiglu", "--device", "cpu"]) == 0
    assert main(["explain", "rms_norm", "--device", "cpu", "--json"]) == 1


def test_explain_a_dtype_as_json(capsys):
    assert main(["explain", "swiglu", "--device", "cpu", "--dtype", "float64", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["op"] for row in rows} == {"swiglu"}
    assert {row["direction"] for row in rows} == {"forward", "backward"}
    explanation = liger_multi.explain("swiglu", "cpu", torch.float64)
    assert [row["reason"] for row in rows] == [row.reason for row in explanation.rows]


@pytest.mark.parametrize(
    "argv",
    [
        ["--version"],
        [],
        ["doktor"],
        ["config"],
        ["config", "check"],
        ["config", "chek", "a.yaml"],
        ["explain", "rms_norm", "swiglu"],
        ["explain", "rms_norm", "--dtype", "bf61"],
        ["demo", "--steps", "0"],
        ["demo", "--models", "gpt1"],
    ],
)
def test_version_and_wrong_commands(capsys, argv):
    with pytest.raises(SystemExit) as error:
        main(argv)
    captured, known = capsys.readouterr(), argv == ["--version"]
    assert error.value.code == (0 if known else 2)
    assert captured.out == f"liger-multi {__version__}\n" * known
    assert known or "usage: liger-multi" in captured.err


@pytest.mark.parametrize(
    "command", [[], ["doctor"], ["explain"], ["bench"], ["config"], ["config", "check"], ["demo"]]
)
def test_help_says_what_a_command_does(capsys, command):
    with pytest.raises(SystemExit) as error:
        main([*command, "--help"])
    assert error.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: {' '.join(['liger-multi', *command])}")
    assert len(text.split("\n\n")[1].split()) >= 4, "a sentence follows the usage"
    for line in text.splitlines():
        if line.startswith("  --") and " " not in line.strip():
            pytest.fail(f"{line.strip()} says nothing")


def test_interrupted(capsys, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(liger_multi, "explain", interrupt)
    assert main(["explain"]) == 130
    assert capsys.readouterr().err == "liger-multi: interrupted\n"


def page():
    result = Page()
    result.add("Things", [["one", "chosen", "[b]"], ["three", "-"]], ("name", "", "because"))
    result.add("Empty", [])
    return result


def test_a_page_without_rich(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    page().show()
    assert (
        capsys.readouterr().out
        == "Things\n  name           because\n  one    chosen  [b]\n  three  -\n"
    )


def test_a_page_with_rich():
    console = pytest.importorskip("rich.console").Console(width=60, record=True, file=io.StringIO())
    console.print(_table(page().sections[0]))
    text = console.export_text()
    assert "[b]" in text, "square brackets are text, not markup"
    assert next(line.split()[0] for line in text.splitlines() if line.strip()) == "Things"


# --- every command: JSON, absent packages, short messages ---


def commands(parser, before=()):
    """The words of every command that runs something."""
    nested = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not nested:
        yield " ".join(before)
    for action in nested:
        for name, one in action.choices.items():
            yield from commands(one, (*before, name))


QUICK = ["--quick", "--device", "cpu", "--output", "{tmp}/made"]
ARGUMENTS = {
    "doctor": [],
    "explain": ["swiglu", "--device", "cpu"],
    "bench": ["--quick", "--device", "cpu", "--ops", "swiglu", "--providers", "ours"],
    "bisect": ["tiny-llama", "--device", "cpu", "--b", "rms_norm=reference"],
    "config check": ["{tmp}/good.yaml"],
    "demo": [*QUICK, "--models", "qwen2", "--steps", "1"],
    "memory-demo": QUICK,
    "estimate": ["{tmp}"],
    "verify": ["--quick", "--device", "cpu", "--backend", "reference", "--ops", "swiglu"],
    "plan": ["{tmp}", "--gpu", "24GiB", "--data-parallel", "--precision", "bf16", "--no-limits"],
}


@pytest.fixture
def a_model(tmp_path):
    """A folder with a configuration of a small model and one of ours."""
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 512,
                "max_position_embeddings": 4096,
            }
        )
    )
    (tmp_path / "good.yaml").write_text("ops: {rms_norm: reference}\n")
    return tmp_path


def filled(command, place):
    return [*command.split(), *(part.format(tmp=place) for part in ARGUMENTS[command])]


LONG = {"bench", "demo", "memory-demo", "verify"}  # commands that measure or train


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.slow] * (command in LONG))
        for command in commands(_parser())
    ],
)
def test_every_command_writes_one_json_document(capsys, a_model, command):
    for name in {"bench": ["rich"], "demo": ["accelerate", "rich", "matplotlib"]}.get(command, []):
        pytest.importorskip(name)
    assert main([*filled(command, a_model), "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)


NEEDED = {
    "bench": {"rich": "cli"},
    "bisect": {"transformers": "transformers"},
    "demo": dict.fromkeys(("transformers", "accelerate", "rich", "matplotlib"), "transformers,cli"),
    "memory-demo": dict.fromkeys(("transformers", "matplotlib"), "transformers,cli"),
    "estimate": {"transformers": "transformers"},
    "plan": {"transformers": "transformers"},
}


@pytest.mark.parametrize(
    ("command", "package", "extras"),
    [(c, package, extras) for c, some in NEEDED.items() for package, extras in some.items()],
)
def test_an_absent_package_has_its_install_line(
    capsys, monkeypatch, a_model, command, package, extras
):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a)
    )
    assert main(filled(command, a_model)) == 2
    text = capsys.readouterr().err.splitlines()[-1]
    assert text.startswith(f"liger-multi: error: {command} needs {package}, which")
    assert text.endswith(f'pip install "liger-multi[{extras}]"')


BLOCKED = """
import sys
for name in {names!r}:
    sys.modules[name] = None
from liger_multi.cli.main import main
raise SystemExit(main({argv!r}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", list(ARGUMENTS))
def test_no_command_breaks_without_extras(a_model, command):
    names = ("transformers", "accelerate", "peft", "trl", "rich", "matplotlib", "tokenizers")
    code = BLOCKED.format(names=names, argv=filled(command, a_model))
    done = harness.python("-c", code, code=None)
    assert "Traceback" not in done.stderr
    if command in NEEDED:
        assert done.returncode == 2
        assert 'install with: pip install "liger-multi[' in done.stderr
    else:
        assert done.returncode in (0, 1)
        assert done.stdout


BENCH, QUICKLY = ("bench", "--quick", "--device", "cpu", "--seconds", "0.05"), ("bench", "--quick")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["explain", "rmsnorm"], "did you mean 'rms_norm'"),
        (["explain", "qqqqqqqq"], ""),
        (["explain", "rms_norm", "--device", "gpu"], "--device gpu: "),
        (["verify", "--ops", "rmsnorm"], "did you mean 'rms_norm'"),
        ([*BENCH, "--ops", "rmsnorm"], "unknown operator 'rmsnorm'; did you mean 'rms_norm'"),
        ([*BENCH, "--ops", ","], ""),
        ([*BENCH, "--samples", "8192x4095"], "sample '8192x4095'; did you mean '8192x4096'"),
        ([*BENCH, "--providers", "ours,torhc"], "unknown provider 'torhc'; did you mean 'torch'"),
        ([*BENCH, "--providers", ","], "--providers names nobody"),
        ([*BENCH, "--dtype", "bf61"], "unknown dtype 'bf61'; did you mean 'bf16'"),
        ([*QUICKLY, "--device", "cpu", "--seconds", "0"], "--seconds must be positive, got 0"),
        ([*QUICKLY, "--device", "gpu"], "--device gpu: "),
        (["plan", "{tmp}", "--gpu", "h300"], "did you mean 'h200'"),
        (["plan", "{tmp}/typo", "--gpu", "h200"], ""),
        (["config", "check", "{tmp}/ops.yaml"], "did you mean 'rms_norm'"),
        (["config", "check", "{tmp}/absent.yaml"], "cannot read the configuration"),
        (["config", "check", "{tmp}/bad.yaml"], "did you mean 'ops'"),
        (["config", "check", "{tmp}/torn.yaml"], "is not YAML"),
        (["estimate", "{tmp}/other.json"], "did you mean 'llama'"),
    ],
)
def test_wrong_values(capsys, a_model, argv, text):
    """One line, which lists few names."""
    (a_model / "ops.yaml").write_text("ops: {rmsnorm: reference}\n")
    (a_model / "bad.yaml").write_text("op: {rms_norm: reference}\n")
    (a_model / "torn.yaml").write_text("ops: {rms_norm: [\n")
    (a_model / "other.json").write_text('{"model_type": "lama"}')
    assert main([part.format(tmp=a_model) for part in argv]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert "Traceback" not in captured.err
    line = captured.err.splitlines()[-1]
    assert line.startswith("liger-multi: error: ")
    assert text in line
    assert line.count(",") <= 10
    assert len(line) - len(str(a_model)) < 500


# --- names on the hub ---


@pytest.fixture
def hub(a_model, monkeypatch):
    """A cache of the hub's client with one model, and no network."""
    from huggingface_hub import constants

    place, commit = a_model / "hub" / "models--acme--tiny", "0" * 40
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)
    (place / "snapshots" / commit).mkdir(parents=True)
    (a_model / "config.json").rename(place / "snapshots" / commit / "config.json")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(a_model / "hub"))
    return monkeypatch


def test_a_name_on_the_hub_is_found_in_the_cache(capsys, hub):
    hub.setattr("liger_multi.memory.sizes._reach", lambda name: pytest.fail("the cache has it"))
    assert main(["estimate", "acme/tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["title"].startswith("llama 1 x 2048")


@pytest.mark.parametrize(
    ("offline", "said"),
    [("1", "unset HF_HUB_OFFLINE to download it"), ("", "(Name or service not known)")],
)
def test_a_name_that_cannot_be_loaded_says_what_to_do(capsys, hub, offline, said):
    def nobody(name):
        raise OSError("Name or service not known")

    hub.setattr("liger_multi.memory.sizes._reach", nobody)
    hub.setenv("HF_HUB_OFFLINE", offline)
    hub.delenv("TRANSFORMERS_OFFLINE", raising=False)
    assert main(["plan", "acme/absent", "--gpu", "24GiB"]) == 2
    text = capsys.readouterr().err
    for part in ("'acme/absent'", said, "config.json", "HF_HOME"):
        assert part in text


# --- progress and terminals ---


def test_a_log_shows_progress(capsys, a_model):
    assert main(filled("estimate", a_model)) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith(f"estimate: 0 s: reading {a_model}\n")
    assert "reading" not in captured.out


@pytest.mark.parametrize("command", ["doctor", "estimate"])
def test_an_ascii_terminal(a_model, command):
    asked = {"PYTHONIOENCODING": "ascii", "COLUMNS": "40", "NO_COLOR": "1"}
    done = harness.python("-m", "liger_multi", *filled(command, a_model), code=None, **asked)
    assert done.returncode in (0, 1), done.stderr
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [["explain", "rms_norm"], ["explain", "nothing"]])
def test_streams_that_are_closed(monkeypatch, arguments):
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    assert main(arguments) == (2 if "nothing" in arguments else 0)


def test_a_sequence_beyond_the_positions_has_a_note(capsys, a_model):
    assert main(["estimate", str(a_model), "--sequence", "5000"]) == 0
    assert "4,096 positions" in capsys.readouterr().out


@pytest.mark.slow
def test_a_process_that_imports_the_program_does_not_run_it():
    """As a process does that a command spawned; the command would run once more in it."""
    code = "import liger_multi.__main__; print('still here')"
    assert harness.python("-c", code).stdout == "still here\n"


# --- help and messages ---


ROOT = Path(__file__).parents[2]


def options(parser=None, words="liger-multi"):
    """Every option of every command."""
    parser = parser or _parser()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield from options(command, f"{words} {name}")
        elif action.option_strings and action.nargs != 0:
            yield words, parser, action


def test_help_names_every_default():
    for words, parser, action in options():
        text = parser._get_formatter()._get_help_string(action)
        assert text, f"{words} {action.option_strings[0]} says nothing"
        if not action.required:
            assert "(default: " in text, f"{words} {action.option_strings[0]}: {text}"
            assert text.count("default") == 1
            if action.default not in (None, False, "") and not isinstance(action.default, list):
                assert f"(default: {action.default})" in text


# --- names of dtypes and devices ---


@pytest.mark.parametrize(
    ("long", "short"),
    [
        ("bfloat16", "bf16"),
        ("float16", "fp16"),
        ("float32", "fp32"),
        ("bfloat16-mixed", "bf16-mixed"),
    ],
)
def test_both_names_of_a_dtype(long, short):
    assert long_name(short) == long_name(long) == long
    assert short_name(short) == short_name(long) == short
    assert long_name("nosuch") == short_name("nosuch") == "nosuch"
    assert long_name(None) is None


def test_every_command_takes_both_names_of_a_dtype():
    asked = [(p, a) for _, p, a in options() if a.option_strings[0] in ("--dtype", "--precision")]
    assert len(asked) >= 4
    for parser, action in asked:
        for name in ("bf16", "bfloat16", "BF16", "fp32", "float32", "torch.bfloat16"):
            value = parser._get_value(action, name)
            assert value == short_name(name.lower())
            parser._check_value(action, value)


def test_estimates_take_both_names_of_a_dtype():
    from liger_multi.memory.setup import TrainingSetup

    assert TrainingSetup(dtype="bf16") == TrainingSetup(dtype="bfloat16")
    assert TrainingSetup(dtype="bf16-mixed").dtype == "bfloat16-mixed"


@pytest.mark.parametrize(
    ("name", "meant"),
    [("gpu", "'cuda'"), ("nvidia", "'cuda'"), ("rocm", "'cuda'"), ("ascend", "'npu'")],
)
def test_what_people_call_a_device(name, meant):
    with pytest.raises(ConfigurationError, match=f"unknown .*{name}.*did you mean {meant}"):
        liger_multi.explain("rms_norm", device=name)
    with pytest.raises(ConfigurationError, match=f"did you mean {meant}"):
        configure({"devices": {name: {"default": "auto"}}})


# --- patch and unpatch ---


def small():
    pytest.importorskip("transformers")
    from tests.models import build

    return build("llama", num_hidden_layers=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rms_norm": "tritn"},
        {"rms_norm": {"backend": "tritn"}},
        {"lora": "tritn"},
        {"fused_linear_cross_entropy": "tritn"},
    ],
    ids=str,
)
def test_errors_of_patch_speak_of_patch(wrong):
    with pytest.raises(ConfigurationError, match=r"in patch\(\) 'tritn'; did you mean") as error:
        liger_multi.patch(small(), **wrong)
    assert "use()" not in str(error.value)


@pytest.mark.parametrize("op", ["rms_norm", "swiglu", "fused_linear_cross_entropy", "rope"])
def test_a_backend_that_a_patch_named_is_its_own(op, monkeypatch):
    """Where it cannot run, also within a block of `use` that names others."""
    model, ids = small(), torch.ones(1, 4, dtype=torch.long)
    liger_multi.patch(model, **{op: "npu"})
    with pytest.raises(BackendUnavailableError, match=r"pinned to \['npu'\] by patch\(\)"):
        model(input_ids=ids, labels=ids).loss.item()
    with (
        liger_multi.use(softmax="reference"),
        pytest.raises(BackendUnavailableError, match=r"by patch\(\)"),
    ):
        model(input_ids=ids, labels=ids).loss.item()


def test_who_named_a_scope_survives_configure():
    with scope({"rms_norm": "reference"}, "patch()"), liger_multi.use(swiglu="reference"):
        configure({"default": "auto"})
        assert current().choice_in("rms_norm", ("cpu", "")).source == "patch()"
        assert current().choice_in("swiglu", ("cpu", "")).source == "use()"
        assert current().choice_in("rope", ("cpu", "")).source == "configure()"


def test_the_report_of_unpatch_names_it():
    rich = pytest.importorskip("rich.console")
    model = small()
    assert str(liger_multi.patch(model)).startswith("patch LlamaForCausalLM\n")
    assert str(liger_multi.unpatch(model)).startswith("unpatch LlamaForCausalLM\n")
    out = io.StringIO()
    rich.Console(file=out, width=200).print(liger_multi.unpatch(model))
    assert out.getvalue().startswith("unpatch LlamaForCausalLM")
    assert str(liger_multi.unpatch(model)) == "unpatch LlamaForCausalLM\n  nothing restored"
    liger_multi.patch("llama")
    assert str(liger_multi.unpatch("llama")).startswith("unpatch models of type llama\n")


@pytest.mark.parametrize(
    "call", [liger_multi.patch, lambda name: liger_multi.patched(name).__enter__()]
)
@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B", "./model", "{folder}"])
def test_a_name_on_the_hub_is_no_model(tmp_path, call, name):
    with pytest.raises(PatchError, match=r"load it first, patch\(AutoModelForCausalLM.from_pre"):
        call(name.format(folder=tmp_path))


def test_a_report_fits_a_narrow_terminal():
    rich = pytest.importorskip("rich.console")
    out = io.StringIO()
    console = rich.Console(file=out, width=80, force_terminal=True, color_system=None)
    console.print(liger_multi.patch(small()))
    text = out.getvalue()
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    joined = "".join(text.split())
    for whole in ("fused_linear_cr", "post_attention_"):
        assert whole in joined


# --- files ---


def test_merge_keys(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(
        "devices:\n"
        "  cuda: &gpu\n"
        "    default: auto\n"
        "    ops: &ops {swiglu: reference, rms_norm: triton}\n"
        "  npu:\n"
        "    <<: *gpu\n"
        "    ops: {<<: [{geglu: reference}, *ops], rms_norm: reference}\n"
        "  xpu: {<<: *gpu}\n"
    )
    layer = load(path)
    assert dict(layer.ops["xpu"]) == dict(layer.ops["cuda"])
    assert dict(layer.ops["npu"]) == {
        "geglu": ("reference",),
        "swiglu": ("reference",),
        "rms_norm": ("reference",),
    }
    assert layer.default["npu"] == ("auto",)


@pytest.mark.parametrize("nothing", ["~", "null", ""])
def test_a_key_without_a_value_says_nothing(tmp_path, nothing):
    path = tmp_path / "a.yaml"
    path.write_text(f"default: {nothing}\nops:\n  rms_norm: {nothing}\n  swiglu: reference\n")
    layer = load(path)
    assert layer.choice("rms_norm", ("cpu", "")) is None
    assert layer.choice("swiglu", ("cpu", "")).order == ("reference",)
    path.write_text(f"default: reference\nops: {{rms_norm: {nothing}}}\n")
    assert load(path).choice("rms_norm", ("cpu", "")).order == ("reference",)


def test_a_file_in_the_home_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.yaml").write_text("ops: {rms_norm: reference}\n")
    assert main(["config", "check", "~/a.yaml"]) == 0
    configure("~/a.yaml")
    assert current().choice_in("rms_norm", ("cpu", "")).order == ("reference",)
    monkeypatch.setenv("LIGER_MULTI_CONFIG", "~/a.yaml")
    configure(None)
    assert current().choice_in("rms_norm", ("cpu", "")).order == ("reference",)


def test_config_check_names_what_this_machine_cannot_run(tmp_path, capsys):
    path = tmp_path / "a.yaml"
    path.write_text("ops: {rms_norm: npu}\ndevices: {npu: {ops: {swiglu: npu}}}\n")
    before = current()
    assert main(["config", "check", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{path}: fine\n")
    assert "no backend may run rms_norm forward and backward on cpu" in " ".join(text.split())
    assert "swiglu" not in text
    assert current() is before


@pytest.mark.parametrize("page", ["README.md", "docs/configuration.md"])
def test_configurations_of_pages_run_on_a_cpu(tmp_path, capsys, page):
    text = (ROOT / page).read_text(encoding="utf-8")
    path = tmp_path / "a.yaml"
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    model, ids = small(), torch.ones(1, 4, dtype=torch.long)
    liger_multi.patch(model)
    for block in blocks:
        path.write_text(block)
        assert main(["config", "check", str(path)]) == 0
        assert capsys.readouterr().out == f"{path}: fine\n"
        configure(path)
        model(input_ids=ids, labels=ids).loss.backward()
