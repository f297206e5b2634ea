"""Memory of training steps: what a call held, where a step's memory goes, what a step will need."""

from __future__ import annotations

from liger_multi.memory.breakdown import Profile, compare, profile
from liger_multi.memory.choosing import adapt, choose, choose_within, layer_stats
from liger_multi.memory.estimation import Estimate, estimate
from liger_multi.memory.measure import format_bytes, measure, peak_memory
from liger_multi.memory.offload import compress_activations, offload_activations
from liger_multi.memory.planning import Settings, Space, TrainingPlan, apply, load, plan
from liger_multi.memory.recompute import POLICIES, Policy, apply_recompute, decoder_layers
from liger_multi.memory.setup import TrainingSetup

__all__ = [
    "POLICIES",
    "Estimate",
    "Policy",
    "Profile",
    "Settings",
    "Space",
    "TrainingPlan",
    "TrainingSetup",
    "adapt",
    "apply",
    "apply_recompute",
    "choose",
    "choose_within",
    "compare",
    "compress_activations",
    "decoder_layers",
    "estimate",
    "format_bytes",
    "layer_stats",
    "load",
    "measure",
    "offload_activations",
    "peak_memory",
    "plan",
    "profile",
]
