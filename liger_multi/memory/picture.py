"""Timelines of memory as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from liger_multi.memory.breakdown import Profile
from liger_multi.memory.measure import format_bytes
from liger_multi.memory.recorder import CATEGORIES

COLORS = ("#3b5b7a", "#8a6fb0", "#6f8fb5", "#0b6e69", "#c2571a", "#d9a441", "#b9c0c7")
INK, GRID = "#22272e", "#e3e6ea"
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def draw(profiles: Sequence[Profile], path: Path) -> None:
    """Stacked bytes by category over a step, one panel a profile, all on one scale."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    top = max(max(map(sum, p.timeline), default=0) for p in profiles)
    unit, name = next(((u, n) for u, n in UNITS if top >= u), (1, "B"))
    with matplotlib.rc_context({"font.size": 10, "text.color": INK, "axes.labelcolor": INK}):
        figure = Figure(figsize=(10, 1.2 + 3.6 * len(profiles)), dpi=140, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(len(profiles), 1, squeeze=False, sharey=True)[:, 0]
        for axis, profile in zip(axes, profiles, strict=True):
            _panel(axis, profile, unit)
            axis.set_ylabel(name)
            axis.set_ylim(0, 1.18 * top / unit)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path)


def _panel(axis: Any, profile: Profile, unit: int) -> None:
    steps = range(len(profile.timeline))
    columns = [[row[i] / unit for row in profile.timeline] for i in range(len(CATEGORIES))]
    axis.stackplot(steps, columns, labels=CATEGORIES, colors=COLORS, lw=0)
    for spine in ("top", "right"):
        axis.spines[spine].set_visible(False)
    axis.set_axisbelow(True)
    axis.grid(axis="y", color=GRID)
    axis.set_xlim(0, max(1, len(profile.timeline) - 1))
    axis.set_xticks([])
    axis.set_xlabel("allocations in order")
    totals = [sum(row) for row in profile.timeline]
    best = max(steps, key=totals.__getitem__)
    axis.plot([best], [totals[best] / unit], marker="o", color=INK, ms=5, clip_on=False)
    axis.set_title(
        f"{profile.title}: peak {format_bytes(profile.peak_bytes)} in {profile.peak_phase}",
        loc="left",
        fontweight="bold",
        fontsize=11,
    )
    for place, name in profile.phases:
        axis.axvline(place, color=INK, lw=0.8, ls=(0, (3, 3)))
        axis.annotate(
            f" {name}", (place, 1), xycoords=("data", "axes fraction"), va="top", fontsize=9
        )
