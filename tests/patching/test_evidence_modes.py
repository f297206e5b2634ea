"""What a forward does in another mode, and under other surroundings of the patch."""

# ruff: noqa: E402  (what needs transformers is imported after the skip)
import random
import re
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

transformers = pytest.importorskip("transformers")


from liger_multi.patching import patch, rotary
from liger_multi.patching.evidence.probe import probe_context
from liger_multi.patching.experts import find as find_experts
from liger_multi.patching.mlp import find as find_mlps
from liger_multi.patching.norms import find as find_norms
from tests.models import build
from tests.patching.test_evidence_signature import Mlp, Norm, in_both_modes, patched_pair

# --- what a forward does in another mode, and besides ---


class DroppedByHand(Mlp):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.3, self.training)


class LouderInTraining(Mlp):
    def forward(self, x):
        return super().forward(x) * (1.5 if self.training else 1.0)


class Noisy(Mlp):
    def forward(self, x):
        noise = 0.0 if not self.training else random.random() * 0.0
        return super().forward(x) + noise


class GradientScaled(Mlp):
    def forward(self, x):
        x = x * 0.25 + x.detach() * 0.75
        return super().forward(x)


class Detached(Mlp):
    def forward(self, x):
        gate = self.act_fn(self.gate_proj(x)).detach()
        return self.down_proj(gate * self.up_proj(x))


class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy / 2


class OwnFunction(Mlp):
    def forward(self, x):
        return HalfGradient.apply(super().forward(x))


class Counting(Mlp):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Masked(Mlp):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(12))

    def forward(self, x):
        return super().forward(x) * self.mask


class MaskedInTraining(Masked):
    def forward(self, x):
        return Mlp.forward(self, x) * (self.mask if self.training else 1.0)


class Listed(Mlp):
    def __init__(self):
        super().__init__()
        self.scales = [1.0]

    def forward(self, x):
        return super().forward(x) * self.scales[0]


class Nested(Mlp):
    def __init__(self):
        super().__init__()
        self.config = types.SimpleNamespace(inner=types.SimpleNamespace(scale=1.0))

    def forward(self, x):
        return super().forward(x) * self.config.inner.scale


class ByWeights(Mlp):
    def forward(self, x):
        gate = self.act_fn(self.gate_proj(x))
        return self.down_proj(gate * F.linear(x, self.up_proj.weight, self.up_proj.bias))


class NarrowInside(Mlp):
    def forward(self, x):
        return super().forward(x).float()


class Halved(Mlp):
    def forward(self, x):
        y = super().forward(x)
        return y.half() if x.dtype == torch.bfloat16 else y


class ByRank(Mlp):
    def forward(self, x):
        return super().forward(x) * (1.5 if x.ndim == 2 else 1.0)


class WithoutGradients(Mlp):
    def forward(self, x):
        return super().forward(x) * (1.0 if torch.is_grad_enabled() else 1.5)


class WithoutGradientsInTraining(Mlp):
    def forward(self, x):
        quiet = self.training and not torch.is_grad_enabled()
        return super().forward(x) * (1.5 if quiet else 1.0)


class Frozen(Mlp):
    def forward(self, x):
        up = F.linear(x, self.up_proj.weight.detach(), self.up_proj.bias)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * up)


class Overwriting(Mlp):
    def forward(self, x):
        return super().forward(x.mul_(1.0))


@pytest.mark.parametrize(
    ("module_class", "reason"),
    [
        (DroppedByHand, "it draws random numbers in training"),
        (LouderInTraining, "its output differs in training"),
        (Noisy, "it draws random numbers in training"),
        (GradientScaled, "its gradient differs in evaluation"),
        (Detached, "its gradient differs in evaluation"),
        (OwnFunction, "its gradient differs"),
        (Counting, "its forward sets its calls"),
        (Masked, "its forward reads its buffer mask"),
        (MaskedInTraining, "its forward reads its buffer mask"),
        (Listed, r"its forward reads its scales \(list\)"),
        (Nested, r"its forward reads its config \(SimpleNamespace\)"),
        (ByWeights, "it does not call its layers"),
        (NarrowInside, "its output differs under autocast"),
        (Halved, "its output differs in bf16"),
        (ByRank, "its output differs for 2 axes"),
        (WithoutGradients, "computes neither"),
        (WithoutGradientsInTraining, "its output differs in training without gradients"),
        (Frozen, "it stops a gradient"),
        (Overwriting, "it writes to its input"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_mlps_with_extra_behavior_are_left_alone(module_class, reason, training):
    module = module_class().train(training)
    stock, ours, entries, reasons = patched_pair(module)
    assert entries == []
    assert type(ours) is module_class
    (said,) = reasons
    assert re.search(reason, said), said
    in_both_modes(stock, ours)


class NormDropped(Norm):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.3, self.training)


class NormOfTraining(Norm):
    def forward(self, x):
        return super().forward(x) * (1.5 if self.training else 1.0)


class NormKeeping(Norm):
    def forward(self, x):
        self.last = x.detach()
        return super().forward(x)


class NormGradientScaled(Norm):
    def forward(self, x):
        return super().forward(x * 0.25 + x.detach() * 0.75)


@pytest.mark.parametrize(
    "module_class", [NormDropped, NormOfTraining, NormKeeping, NormGradientScaled]
)
@pytest.mark.parametrize("training", [True, False])
def test_norms_with_extra_behavior_are_left_alone(module_class, training):
    stock, ours, entries, reasons = patched_pair(module_class().train(training))
    assert entries == []
    assert len(reasons) == 1
    in_both_modes(stock, ours)


class Dropping(Mlp):
    def __init__(self, inner):
        super().__init__()
        self.dropout, self.inner = nn.Dropout(0.4), inner

    def forward(self, x):
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        if self.inner:
            return self.down_proj(self.dropout(h))
        return self.dropout(self.down_proj(h))


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_dropout_layers_are_served_and_stay(inner, training):
    stock, ours, entries, _ = patched_pair(Dropping(inner).train(training))
    assert entries == ["gated_mlp[silu]"]
    in_both_modes(stock, ours)
    for module in (stock, ours):
        module.dropout.register_forward_hook(lambda mod, args, out: out * 2)
    in_both_modes(stock, ours)


# --- surroundings of the patch ---


def probes_forgotten():
    for known in (
        find_experts._known_experts,
        *(m._known for m in (find_mlps, find_norms, rotary)),
    ):
        known.clear()


def wide():
    torch.set_default_dtype(torch.float64)


def strict():
    torch.use_deterministic_algorithms(True)


META = torch.device("meta")
SURROUNDINGS = {
    "fp64 by default": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "bf16 by default": (
        lambda: torch.set_default_dtype(torch.bfloat16),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
    "meta by default": (lambda: META.__enter__(), lambda: META.__exit__(None, None, None)),
    "no gradients": (
        lambda: torch.set_grad_enabled(False),
        lambda: torch.set_grad_enabled(True),
    ),
    "narrow products": (
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
}


@pytest.mark.parametrize("module_class", ["llama", "mixtral"])
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_global_state_does_not_change_the_report(surroundings, module_class):
    """Under a default dtype of fp64, the first patch of a process left every MLP alone."""
    models = [build(module_class) for _ in range(3)]
    probes_forgotten()
    expected = str(patch(models[0]))
    probes_forgotten()
    enter, leave = SURROUNDINGS[surroundings]
    random.seed(0)
    before = (torch.get_rng_state(), random.getstate())
    enter()
    try:
        dtype, deterministic = (
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
        )
        report = patch(models[1])
        assert torch.get_default_dtype() == dtype
        assert torch.are_deterministic_algorithms_enabled() == deterministic
    finally:
        leave()
    assert str(report) == expected
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert str(patch(models[2])) == expected


def test_a_probes_surroundings_are_always_the_same():
    wide()
    strict()
    try:
        with META, torch.no_grad(), torch.autocast("cpu"), probe_context():
            output = torch.ones(2)
            assert (output.dtype, output.device.type) == (torch.float32, "cpu")
            assert not torch.are_deterministic_algorithms_enabled()
            assert not torch.is_autocast_enabled("cpu")
            assert torch.is_grad_enabled()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
