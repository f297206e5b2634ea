"""Plugins, with modules in place of their trainers; `make test-trainers` runs some in them."""

import importlib
import sys
from dataclasses import dataclass, fields
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from liger_multi.compat import liger_kernel as alias
from liger_multi.compat.liger_kernel import models
from liger_multi.errors import PatchError
from liger_multi.patching import shards
from tests.models import build, patched_ops


@pytest.fixture
def imported(monkeypatch):
    """A plugin, imported with modules in place of its trainer's."""

    def import_with(name, **modules):
        for path, names in modules.items():
            parts = path.split("__")
            for end in range(1, len(parts) + 1):
                dotted = ".".join(parts[:end])
                if dotted not in sys.modules:
                    monkeypatch.setitem(sys.modules, dotted, ModuleType(dotted))
            vars(sys.modules[dotted]).update(names)
        full = f"liger_multi.integrations.{name}"
        monkeypatch.delitem(sys.modules, full, raising=False)
        module = importlib.import_module(full)
        monkeypatch.delitem(sys.modules, full)
        return module

    return import_with


# --- axolotl ---


@pytest.fixture
def axolotl(imported):
    return imported(
        "axolotl",
        axolotl__integrations__base={"BasePlugin": object},
        pydantic={"BaseModel": object},
    )


def test_axolotl_patches_by_its_key(axolotl):
    plugin, model = axolotl.LigerMultiPlugin(), build()
    plugin.post_model_build({"liger_multi": None, "lora_mlp_kernel": True}, model)
    assert patched_ops(model) == {}
    plugin.post_model_build({"liger_multi": {"swiglu": False}, "liger_rope": None}, model)
    assert {"rms_norm", "fused_linear_cross_entropy"} <= {*patched_ops(model)}
    assert "swiglu" not in patched_ops(model)
    module, _, name = plugin.get_input_args().rpartition(".")
    assert (module, name) == (axolotl.__name__, "LigerMultiArgs")


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"liger_rms_norm": True}, "liger_rms_norm: True"),
        ({"lora_mlp_kernel": True}, "lora_mlp_kernel: true"),
        ({"cut_cross_entropy": True}, "cut_cross_entropy: true"),
    ],
)
def test_axolotl_refuses_two_ways_to_replace_a_module(axolotl, keys, text):
    plugin, model = axolotl.LigerMultiPlugin(), build()
    with pytest.raises(PatchError, match=text):
        plugin.post_model_build({"liger_multi": True, **keys}, model)
    options = {"swiglu": False, "lora": False, "fused_linear_cross_entropy": False}
    if "liger_rms_norm" not in keys:  # what another key replaces is left out
        plugin.post_model_build({"liger_multi": options, **keys}, model)
        assert "rms_norm" in patched_ops(model)


# --- ms-swift ---


def test_ms_swift_finds_the_callback_and_its_options(imported, monkeypatch):
    known = {}
    module = imported("ms_swift", swift__callbacks={"callbacks_map": known})
    monkeypatch.setenv(module.VARIABLE, '{"rope": false}')
    model = build()
    callback = known["liger_multi"](SimpleNamespace(), "the trainer")
    callback.on_init_end(SimpleNamespace(use_liger_kernel=False), None, None, model=model)
    assert "rms_norm" in patched_ops(model)
    assert callback.report.count("rope") == 0
    assert callback.trainer == "the trainer"
    for wrong in ("rope", "[1]"):
        monkeypatch.setenv(module.VARIABLE, wrong)
        with pytest.raises(PatchError, match="must be a JSON object of operators, got"):
            known["liger_multi"](None, None)


# --- LLaMA-Factory ---


@pytest.fixture
def uninstalled():
    yield
    alias.uninstall()


def test_llamafactory_starts_with_the_names_served(imported, uninstalled):
    calls = []
    entry = {"run_exp": lambda: calls.append(alias.installed())}
    imported("llamafactory", llamafactory__train__tuner=entry).main()
    assert calls == [True]


# --- verl ---


def test_verl_serves_the_names_when_it_imports_the_module(imported, uninstalled, monkeypatch):
    monkeypatch.setattr(shards, "cutters", [])
    monkeypatch.setattr(models, "after_patch", None)
    imported("verl")
    assert alias.installed()


# --- torchtitan ---


def configured(base, **names):
    """A class of torchtitan's kind: made of its ``Config``, which has the fields."""

    @dataclass(kw_only=True)
    class Config:
        loss_fn: object = None

    return type(base.__name__, (base,), {"Config": Config, **names})


def derive(source, target, **changes):
    return target(**{f.name: getattr(source, f.name) for f in fields(source)} | changes)


def override(*, target, exact=False, description):
    def decorate(factory):
        factory.claims = (target, exact)
        return factory

    return decorate


@pytest.fixture
def torchtitan(imported):
    class Wrapper:
        def __init__(self, config):
            self.lm_head = None

    wrapper, entropy = configured(Wrapper), configured(object)
    rotary = configured(object)
    return imported(
        "torchtitan",
        torchtitan__components__loss={"ChunkedLossWrapper": wrapper, "CrossEntropyLoss": entropy},
        torchtitan__config={"derive": derive, "override": override},
        torchtitan__models__common={"RMSNorm": configured(nn.RMSNorm)},
        torchtitan__models__common__feed_forward={"FeedForward": configured(nn.Module)},
        torchtitan__models__common__rope={
            "RoPE": rotary,
            "ComplexRoPE": configured(rotary),
            "CosSinRoPE": configured(rotary),
        },
    )


def test_torchtitan_norms_and_mlps_compute_the_same(torchtitan):
    x = torch.randn(2, 3, 8)
    norm = torchtitan.FusedRMSNorm(8, eps=1e-3)
    nn.init.normal_(norm.weight)
    torch.testing.assert_close(norm(x), nn.RMSNorm.forward(norm, x))
    mlp = torchtitan.FusedFeedForward()
    mlp.w1, mlp.w2, mlp.w3 = nn.Linear(8, 6), nn.Linear(6, 8), nn.Linear(8, 6)
    torch.testing.assert_close(mlp(x), mlp.w2(nn.functional.silu(mlp.w1(x)) * mlp.w3(x)))


def test_torchtitan_rotates_the_same(torchtitan):
    q, k, angles = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 1, 8), torch.randn(1, 3, 1, 4)
    turn = torch.polar(torch.ones_like(angles), angles)
    for x, y in zip((q, k), torchtitan.FusedComplexRoPE.apply_rotary_emb(q, k, turn), strict=True):
        pairs = torch.view_as_complex(x.unflatten(-1, (4, 2))) * turn
        torch.testing.assert_close(y, torch.view_as_real(pairs).flatten(-2))
    full = torch.cat([angles, angles], -1)
    cache = torch.cat([full.cos(), full.sin()], -1)
    for x, y in zip((q, k), torchtitan.FusedCosSinRoPE.apply_rotary_emb(q, k, cache), strict=True):
        turned = torch.cat([-x[..., 4:], x[..., :4]], -1)
        torch.testing.assert_close(y, x * full.cos() + turned * full.sin())


def test_torchtitan_loss_is_that_of_the_head_within_its_hooks(torchtitan):
    wrapper = sys.modules["torchtitan.components.loss"].ChunkedLossWrapper
    loss = torchtitan.FusedLoss(torchtitan.FusedLoss.Config(chunk=2))
    head = loss.lm_head = nn.Linear(4, 7)
    calls = []
    head.register_forward_hook(lambda *_: calls.append("called"))
    hidden, labels = torch.randn(2, 5, 4, requires_grad=True), torch.randint(7, (2, 5))
    labels[0, 1] = -100
    expected = nn.functional.cross_entropy(
        nn.functional.linear(hidden, head.weight, head.bias).flatten(0, 1),
        labels.flatten(),
        reduction="sum",
    )
    actual, metrics = loss(hidden, labels)
    assert (metrics, calls) == ({}, ["called"])
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(loss(hidden, labels, torch.tensor(9.0))[0], expected / 9)
    (ours,), (stock,) = (torch.autograd.grad(one, head.weight) for one in (actual, expected))
    torch.testing.assert_close(ours, stock)
    assert head(hidden).shape == (2, 5, 7), "the head is a head again"
    head.out_features = 14
    with pytest.raises(PatchError, match="the whole vocabulary of 14 classes"):
        loss(hidden, labels)
    assert issubclass(torchtitan.FusedLoss, wrapper)


def test_torchtitan_overrides_keep_the_configuration(torchtitan):
    losses = sys.modules["torchtitan.components.loss"]
    config = losses.ChunkedLossWrapper.Config(loss_fn=losses.CrossEntropyLoss.Config())
    built = torchtitan.loss(config, chunk=3)
    assert (built.chunk, built.loss_fn) == (3, config.loss_fn)
    with pytest.raises(PatchError, match="computes CrossEntropyLoss; got"):
        torchtitan.loss(losses.ChunkedLossWrapper.Config(loss_fn=object()))
    for base, ours in torchtitan._ROTARY.items():
        assert type(torchtitan.rope(base())) is ours
    other = torchtitan.RoPE.Config()
    assert torchtitan.rope(other) is other
    assert type(torchtitan.rms_norm(torchtitan.RMSNorm.Config())) is torchtitan.FusedRMSNorm.Config
    built = torchtitan.swiglu(torchtitan.FeedForward.Config())
    assert type(built) is torchtitan.FusedFeedForward.Config
    for factory in (torchtitan.rms_norm, torchtitan.swiglu, torchtitan.loss):
        assert factory.claims[1], "subclasses compute something else"
