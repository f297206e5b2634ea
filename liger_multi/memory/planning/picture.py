"""Memory of candidates by part, as a PNG."""

from __future__ import annotations

from pathlib import Path

from liger_multi.memory.measure import format_bytes
from liger_multi.memory.picture import COLORS, GRID, INK
from liger_multi.memory.planning.result import TrainingPlan
from liger_multi.memory.planning.settings import Candidate


def draw(plan: TrainingPlan, path: Path, most: int = 12) -> None:
    """One bar a candidate: what is there at its peak, the budget as a line."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    chosen = plan.candidates[:most]
    parts = list(dict.fromkeys(name for one in chosen for name in one.parts))
    parts = [name for name in parts if any(one.parts.get(name) for one in chosen)]
    unit, name = (2**30, "GiB") if plan.budget_bytes >= 2**30 else (2**20, "MiB")
    with matplotlib.rc_context({"font.size": 9, "text.color": INK, "axes.labelcolor": INK}):
        figure = Figure(figsize=(10, 1.6 + 0.42 * len(chosen)), dpi=140, layout="constrained")
        FigureCanvasAgg(figure)
        axis = figure.subplots()
        places = list(range(len(chosen)))[::-1]
        left = [0.0] * len(chosen)
        for i, part in enumerate(parts):
            widths = [one.parts.get(part, 0) / unit for one in chosen]
            color = (*COLORS, "#7d8790")[i % (len(COLORS) + 1)]
            axis.barh(places, widths, left=left, color=color, label=part, height=0.7)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for place, total, one in zip(places, left, chosen, strict=True):
            speed = f"  {one.relative:.2f}" if one.fits else "  does not fit"
            axis.annotate(speed, (total, place), va="center")
        axis.axvline(plan.budget_bytes / unit, color=INK, lw=0.9, ls=(0, (3, 3)))
        axis.set_yticks(places, [_name(one) for one in chosen])
        axis.set_xlim(0, 1.15 * max(*left, plan.budget_bytes / unit))
        axis.set_xlabel(f"{name} at the peak; time a token beside the bars; dashed: the budget")
        for spine in ("top", "right"):
            axis.spines[spine].set_visible(False)
        axis.set_axisbelow(True)
        axis.grid(axis="x", color=GRID)
        size = format_bytes(plan.memory_bytes)
        axis.set_title(f"{plan.model}, {plan.devices} x {size}", loc="left", fontweight="bold")
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path)


def _name(one: Candidate) -> str:
    settings = one.settings
    text = f"{settings}, {settings.micro_batch} x {settings.accumulation}"
    return text if len(text) <= 60 else f"{text[:57]}..."
