"""A plan as a page of tables."""

from __future__ import annotations

from liger_multi.memory.measure import format_bytes
from liger_multi.memory.planning.result import TrainingPlan
from liger_multi.memory.planning.settings import Candidate
from liger_multi.page import Page

ROWS = 16


def row_of(candidate: Candidate) -> tuple[str, ...]:
    """A candidate's line: what, how much at once, peak, time."""
    s = candidate.settings
    passes = f"{s.micro_batch} x {s.accumulation}" + (f" x {s.data}" if s.data > 1 else "")
    speed = f"{candidate.relative:.2f}" if candidate.fits else "-"
    fits = "yes" if candidate.fits else "no"
    chunk = f"{s.chunk:,}" if s.patched and s.chunk else "-"
    return str(s), passes, chunk, format_bytes(candidate.peak_bytes), fits, speed


HEADER = ("way", "batch", "loss rows", "peak", "fits", "time")


def plan_page(plan: TrainingPlan, rows: int = ROWS) -> Page:
    """The best, the others, the limits and notes."""
    page = Page()
    best = plan.best if plan.best.fits else plan.nearest
    facts = [
        ("model", f"{plan.model}, {plan.layers} layers"),
        ("devices", f"{plan.devices} x {format_bytes(plan.memory_bytes)}, rates of {plan.card}"),
        ("may be used", format_bytes(plan.budget_bytes)),
        ("best" if best.fits else "nearest", str(best.settings)),
        ("peak", format_bytes(best.peak_bytes)),
        ("batch", f"{best.settings.sequences} x {best.settings.sequence:,} tokens a step"),
    ]
    if best.host_bytes:
        facts.append(("on the host, for a device", format_bytes(best.host_bytes)))
    if plan.largest_batch:
        facts.append(("largest micro-batch", f"{plan.largest_batch} (any way: {plan.most_batch})"))
        longest = f"{plan.longest_sequence:,} (any way: {plan.most_sequence:,})"
        facts.append(("longest sequence", longest))
    page.add("TrainingPlan" if best.fits else "Nothing fits", facts)
    shown = plan.candidates[:rows]
    if best not in shown:
        shown = [*shown, best]
    page.add("Ways, the fastest that fits first", list(map(row_of, shown)), HEADER)
    left = len(plan.candidates) - len(shown)
    names = [*plan.notes, *([f"{left} more ways were weighed"] if left > 0 else [])]
    page.add("Notes", [(f"{i}.", note) for i, note in enumerate(names, 1)])
    return page
