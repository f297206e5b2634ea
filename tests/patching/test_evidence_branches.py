"""Branches of a forward: what it does for inputs that no probe brought."""
# ruff: noqa: E402  (what needs transformers is imported after the skip)

import pytest
import torch
import torch.utils.checkpoint

transformers = pytest.importorskip("transformers")

from transformers.models.llama import modeling_llama

from liger_multi.patching import patch
from liger_multi.patching.evidence import branches
from liger_multi.patching.evidence.branches import Outcomes
from tests.models import build
from tests.patching.test_evidence_reached import Mlp, Norm, is_served, of, reasons, report_of

# --- other inputs ---


class Long(Mlp):
    def forward(self, x):
        y = super().forward(x)
        return y * 0.5 if x.shape[1] > 1000 else y


class Narrow(Mlp):
    def forward(self, x):
        y = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        if y.dtype == torch.float16:
            y = y.clamp(-0.1, 0.1)
        return self.down_proj(y)


class OnDevice(Norm):
    def forward(self, x):
        if x.is_cuda:
            return x
        return super().forward(x)


class OnOtherDevice(Norm):
    def forward(self, x):
        if x.device.type == "cuda":
            return x
        return super().forward(x)


class OnAnApple(Norm):
    def forward(self, x):
        if x.device.type == "mps":
            return x
        return super().forward(x)


class OnThisDevice(Norm):
    def forward(self, x):
        if x.device.type != "mps":
            return super().forward(x)
        return x


class Overflowing(Mlp):
    def forward(self, x):
        y = super().forward(x)
        if torch.isinf(y).any() and self.training:
            y = y.clamp(-1, 1)
        return y


def by_length(y):
    return y * 2 if len(y) > 1000 else y


@pytest.mark.parametrize(
    "make", [Long, Narrow, OnDevice, OnOtherDevice, Overflowing, lambda: of(by_length)]
)
def test_untaken_branches(make):
    report = report_of(make())
    assert not is_served(report)
    assert "a branch that depends on its input" in reasons(report)


def test_a_branch_of_a_rotary_function(monkeypatch):
    own = modeling_llama.apply_rotary_pos_emb

    def longer(q, k, cos, sin, unsqueeze_dim=1):
        if q.shape[-2] > 4096:
            q = q * 2
        return own(q, k, cos, sin, unsqueeze_dim)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", longer)
    report = patch(build("llama"))
    assert not report.count("rope")
    assert "a branch that depends on its input" in reasons(report)


class Checking(Mlp):
    def forward(self, x):
        if x.shape[-1] != 12 and x.shape[-1] != 24:
            raise ValueError(f"12 channels, got {x.shape}")
        return super().forward(x)


class Optional(Mlp):
    def __init__(self):
        super().__init__()
        self.extra, self.flag = None, False

    def forward(self, x, scale=None):
        y = super().forward(x)
        if scale is not None:
            y = y * scale
        if self.extra is not None and self.flag:
            y = y + self.extra
        return y


class NamingDevice(Norm):
    """As transformers 5.17 names the device of which it switches autocast off."""

    def forward(self, x):
        name = x.device.type if x.device.type != "mps" else "cpu"
        with torch.autocast(name, enabled=False):
            return super().forward(x)


@pytest.mark.parametrize("make", [Checking, Optional, Mlp, Norm, NamingDevice, OnAnApple])
def test_branches_without_effect(make, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    branches._jumps.cache_clear()
    assert is_served(report_of(make()))


def test_branch_on_an_available_device(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    branches._jumps.cache_clear()
    report = report_of(OnThisDevice())
    branches._jumps.cache_clear()
    assert not is_served(report)
    assert "a branch that depends on its input" in reasons(report)


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y.clamp(-1e7, 1e7),
        torch.nan_to_num,
        lambda y: torch.where(y.abs() > 1e7, 0.0, y),
    ],
)
@pytest.mark.parametrize("base", [Mlp, Norm])
def test_distant_bounds(change, base):
    report = report_of(of(change, base))
    if base is Norm and change is not torch.nan_to_num:
        return  # what a norm returns is never that large
    assert not is_served(report)
    assert "large or not finite" in reasons(report)


# --- conditions, by what compilers of several versions make of them ---


class State:
    """What stands for a module."""

    flag, extra, size = False, None, 3


def _by_length(self, x):
    return x * 2 if x > 1000 else x


def _either_raises(self, x):
    if x != 1 and x != 2:
        return x
    raise ValueError


def _of_the_module(self, x):
    if self.flag and self.extra is not None:
        x = x + 1
    return x


def _asks_for_none(self, x):
    return 0 if x is None else x


def _or(self, x):
    return x if (x > 3 or self.flag) else 0


def _and(self, x):
    if x == 1 and x != self.size and self.size != 8:
        x = x + 1
    return x


def _in_a_comprehension(self, x):
    return [i for i in range(3) if x > 5]


def _of_a_choice(self, x):
    return 1 if (x if self.flag is None else 5) > 3 else 2


@pytest.mark.parametrize(
    ("function", "inputs", "one_sided"),
    [
        (_by_length, [1], True),
        (_by_length, [1, 2000], False),
        (_either_raises, [5], False),
        (_of_the_module, [1], False),
        (_asks_for_none, [2], False),
        (_or, [4], True),
        (_or, [4, 1], False),
        (_and, [1, 3], True),
        (_in_a_comprehension, [1], True),
        (_of_a_choice, [1], True),
    ],
)
def test_one_sided_conditions(function, inputs, one_sided):
    outcomes = Outcomes([function])
    with outcomes.watched():
        for x in inputs:
            function(State(), x)
    assert bool(outcomes.one_sided(argument_count=1)) == one_sided
