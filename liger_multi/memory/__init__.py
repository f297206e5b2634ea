"""Memory of training steps: what a call held, where a step's memory goes, what a step will need."""

from __future__ import annotations

from liger_multi.memory.breakdown import Comparison, Holder, Profile
from liger_multi.memory.estimation import Estimate, estimate
from liger_multi.memory.measure import Peak, format_bytes, measure, peak_memory
from liger_multi.memory.profiling import compare, profile

__all__ = [
    "Comparison",
    "Estimate",
    "Holder",
    "Peak",
    "Profile",
    "compare",
    "estimate",
    "format_bytes",
    "measure",
    "peak_memory",
    "profile",
]
