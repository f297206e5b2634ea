"""Plugins, with modules in place of their trainers; `make test-trainers` runs some in them."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

from liger_multi.compat import liger_kernel as alias
from liger_multi.errors import PatchError
from liger_multi.patching.replace.swap import Patched, swapped
from tests.models import build


@pytest.fixture
def imported(monkeypatch):
    """A plugin, imported with modules in place of its trainer's."""

    def made(name, **modules):
        for path, names in modules.items():
            parts = path.split("__")
            for end in range(1, len(parts) + 1):
                dotted = ".".join(parts[:end])
                if dotted not in sys.modules:
                    monkeypatch.setitem(sys.modules, dotted, ModuleType(dotted))
            vars(sys.modules[dotted]).update(names)
        full = f"liger_multi.integrations.{name}"
        monkeypatch.delitem(sys.modules, full, raising=False)
        found = importlib.import_module(full)
        monkeypatch.delitem(sys.modules, full)
        return found

    return made


def ops_of(model):
    return {swapped(m).op for m in model.modules() if isinstance(m, Patched)}


# --- axolotl ---


@pytest.fixture
def axolotl(imported):
    return imported("axolotl", axolotl__integrations__base={"BasePlugin": object},
                    pydantic={"BaseModel": object})  # fmt: skip


def test_axolotl_patches_by_its_key(axolotl):
    plugin, model = axolotl.LigerMultiPlugin(), build()
    plugin.post_model_build({"liger_multi": None, "lora_mlp_kernel": True}, model)
    assert ops_of(model) == set()
    plugin.post_model_build({"liger_multi": {"swiglu": False}, "liger_rope": None}, model)
    assert {"rms_norm", "fused_linear_cross_entropy"} <= ops_of(model)
    assert "swiglu" not in ops_of(model)
    module, _, name = plugin.get_input_args().rpartition(".")
    assert (module, name) == (axolotl.__name__, "LigerMultiArgs")


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        ({"liger_rms_norm": True}, "liger_rms_norm: True"),
        ({"lora_mlp_kernel": True}, "lora_mlp_kernel: true"),
        ({"cut_cross_entropy": True}, "cut_cross_entropy: true"),
    ],
)
def test_axolotl_refuses_two_ways_to_replace_a_module(axolotl, beside, said):
    with pytest.raises(PatchError, match=said):
        axolotl.LigerMultiPlugin().post_model_build({"liger_multi": True, **beside}, build())


def test_axolotl_leaves_out_what_another_key_replaces(axolotl):
    model = build()
    options = {"swiglu": False, "lora": False, "fused_linear_cross_entropy": False}
    beside = {"lora_mlp_kernel": True, "lora_qkv_kernel": True, "cut_cross_entropy": True}
    axolotl.LigerMultiPlugin().post_model_build({"liger_multi": options, **beside}, model)
    assert "rms_norm" in ops_of(model)


# --- ms-swift ---


def test_ms_swift_finds_the_callback_and_its_options(imported, monkeypatch):
    known = {}
    module = imported("ms_swift", swift__callbacks={"callbacks_map": known})
    monkeypatch.setenv(module.VARIABLE, '{"rope": false}')
    model = build()
    callback = known["liger_multi"](SimpleNamespace(), "the trainer")
    callback.on_init_end(SimpleNamespace(use_liger_kernel=False), None, None, model=model)
    assert "rms_norm" in ops_of(model)
    assert callback.report.count("rope") == 0
    assert callback.trainer == "the trainer"
    for wrong in ("rope", "[1]"):
        monkeypatch.setenv(module.VARIABLE, wrong)
        with pytest.raises(PatchError, match="must be a JSON object of operators, got"):
            known["liger_multi"](None, None)


# --- LLaMA-Factory ---


def test_llamafactory_starts_with_the_names_served(imported):
    seen = []
    entry = {"run_exp": lambda: seen.append(alias.installed())}
    module = imported("llamafactory", llamafactory__train__tuner=entry)
    try:
        module.main()
    finally:
        alias.uninstall()
    assert seen == [True]
