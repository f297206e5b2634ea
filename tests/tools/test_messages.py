"""What commands, errors and reports say: units, names of dtypes and devices, defaults, hints."""

import argparse
import io
import re
from pathlib import Path

import pytest
import torch

import liger_multi
from liger_multi.cli.main import _parser, main
from liger_multi.dispatch.config import configure, current, load
from liger_multi.dtypes import long_name, short_name
from liger_multi.errors import BackendUnavailableError, ConfigurationError, PatchError

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
    from liger_multi.dispatch.config import scope

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


@pytest.mark.parametrize("call", [liger_multi.patch, lambda name: enter(liger_multi.patched(name))])
@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B", "./model", "{folder}"])
def test_a_name_on_the_hub_is_no_model(tmp_path, call, name):
    with pytest.raises(PatchError, match=r"load it first, patch\(AutoModelForCausalLM.from_pre"):
        call(name.format(folder=tmp_path))


def enter(block):
    with block:
        pass


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


@pytest.mark.parametrize("value", ["reference", "[reference]", "~", "[]", "[{a: 1}, 2]"])
def test_a_merge_of_no_mapping(tmp_path, value):
    path = tmp_path / "a.yaml"
    path.write_text(f"ops:\n  <<: {value}\n")
    with pytest.raises(ConfigurationError, match=r"line 2.*the merge key << takes mappings"):
        load(path)


def test_a_quoted_key_merges_nothing(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("ops: {'<<': {rms_norm: reference}}\n")
    with pytest.raises(ConfigurationError, match="unknown operator"):
        load(path)


@pytest.mark.parametrize("nothing", ["~", "null", ""])
def test_a_key_without_a_value_says_nothing(tmp_path, nothing):
    path = tmp_path / "a.yaml"
    path.write_text(f"default: {nothing}\nops:\n  rms_norm: {nothing}\n  swiglu: reference\n")
    layer = load(path)
    assert layer.choice("rms_norm", ("cpu", "")) is None
    assert layer.choice("swiglu", ("cpu", "")).order == ("reference",)
    path.write_text(f"default: reference\nops: {{rms_norm: {nothing}}}\n")
    assert load(path).choice("rms_norm", ("cpu", "")).order == ("reference",)


def test_a_scope_says_something():
    for wrong in (None, 1):
        with pytest.raises(ConfigurationError), liger_multi.use(rms_norm=wrong):
            pass


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
