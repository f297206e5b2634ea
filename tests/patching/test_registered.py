"""What users add to the knowledge about models: probes, names and kinds."""

# ruff: noqa: E402  (what needs transformers is imported after the skip)
import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

transformers = pytest.importorskip("transformers")


from liger_multi import patching
from liger_multi.errors import PatchError
from liger_multi.patching import MlpNames, NormKind, Replacement, patch, register, unregister
from tests.patching.test_norms_find import equal, patched_module

# --- what users add ---


class Ours(nn.Module):
    """A module that no probe of the library knows."""

    def __init__(self):
        super().__init__()
        self.scale = 3.0

    def forward(self, x):
        return x * self.scale


def twice(module, stock, x):
    return stock(x) + 0 * x


def probe(module):
    if not isinstance(module, Ours):
        return None
    return Replacement(twice, "twice") if module.scale == 3.0 else "its scale is another"


@pytest.fixture
def registered():
    added = []

    def add(item, name=None):
        register(item, name)
        added.append(name or item)

    yield add
    for item in added:
        unregister(item)


def test_a_probe_of_a_user(registered):
    registered(probe, "twice")
    model = nn.Sequential(Ours(), Ours(), nn.LayerNorm(4))
    model[1].scale = 2.0
    report = patch(model, fused_linear_cross_entropy=False)
    assert [(e.op, e.path, e.replaced_by) for e in report.entries if e.op == "twice"] == [
        ("twice", "0", "twice")
    ]
    assert [(s.path, s.reason) for s in report.skipped if s.op == "twice"] == [
        ("1", "its scale is another")
    ]
    assert torch.equal(model[0](torch.ones(4)), torch.full((4,), 3.0))
    for twin in (copy.deepcopy(model[0]), pickle.loads(pickle.dumps(model[0]))):
        assert type(twin) is type(model[0])
    patch(model, twice=False, fused_linear_cross_entropy=False)
    assert type(model[0]) is Ours


def test_names_of_a_user(registered):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.p, self.q, self.r = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.r(F.relu(self.p(x)) * self.q(x))

    module = Attention()
    assert not any("Attention computes" in reason for reason in patched_module(module)[1])
    registered(MlpNames("p", "q", "r"))
    assert any("Attention computes neither" in reason for reason in patched_module(module)[1])


class Doubled(nn.Module):
    """An RMSNorm that adds two to its weight."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(24)), 1e-6

    def forward(self, x):
        n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (n * (2.0 + self.weight.float())).to(x.dtype)


def test_a_kind_of_a_user(registered):
    module = Doubled()
    assert "Doubled is no RMSNorm" in patched_module(module)[1][0]
    registered(NormKind("two more", options=(("casting", "gemma"), ("offset", 2.0))))
    stock = copy.deepcopy(module)
    assert patched_module(module)[0] == ["rms_norm[two more]"]
    equal(stock, module, torch.randn(3, 24))


def test_the_example_of_the_page_runs():
    page = Path(__file__).parents[2] / "docs" / "recognition.md"
    section = page.read_text(encoding="utf-8").split("## Custom modules")[1].partition("\n## ")[0]
    actual = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    assert len(actual) == 2
    namespace = {"__name__": "page"}
    for block in actual:
        exec(compile(block, "recognition.md", "exec"), namespace)


def test_invalid_registrations():
    for item, name in ((probe, None), (probe, "rms_norm"), (3, "three")):
        with pytest.raises(PatchError):
            register(item, name)
    with pytest.raises(PatchError, match="not registered"):
        unregister("nobody")
    assert "twice" not in patching.registered.probes()
