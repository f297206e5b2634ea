"""Memory of training steps: what a call really held at its peak."""

from __future__ import annotations

from liger_multi.memory.measure import Peak, format_bytes, measure, peak_memory

__all__ = ["Peak", "format_bytes", "measure", "peak_memory"]
