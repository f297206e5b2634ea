"""Draw loss, difference and memory over the steps into one picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from liger_multi.demo.training import DemoConfig, Run

STOCK, PATCHED, INK, GRID = "#c2571a", "#0b6e69", "#22272e", "#e3e6ea"
MIB = 2**20
STYLE: dict[str, Any] = {
    "font.size": 10,
    "axes.edgecolor": "#9aa3ad",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "text.color": INK,
    "xtick.color": "#57606a",
    "ytick.color": "#57606a",
    "legend.frameon": False,
}


def draw(pairs: Mapping[str, tuple[Run, Run]], plan: DemoConfig, title: str, path: Path) -> None:
    """Write a PNG with one column a model: loss, difference of the losses, peak memory."""
    subtitle = (
        "unmodified Hugging Face Trainer, same seed and batches, "
        f"{plan.scale.tokens:,} tokens a step, vocabulary {plan.scale.vocabulary:,}, {plan.where}"
    )
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1.5 + 5.2 * len(pairs), 9.2), dpi=140, layout="constrained")
        axes = figure.subplots(
            3, len(pairs), squeeze=False, sharex="col", height_ratios=(3, 1.6, 2.6)
        )
        for column, (name, (stock, patched)) in enumerate(pairs.items()):
            _loss(axes[0, column], name, stock, patched)
            _difference(axes[1, column], stock, patched, plan.bound)
            _memory(axes[2, column], stock, patched)
            axes[2, column].set_xlabel("training step")
            axes[2, column].xaxis.set_major_locator(MaxNLocator(integer=True))
        for row, label in enumerate(
            ("training loss", "|patched - stock|", "peak memory of the step [MiB]")
        ):
            axes[row, 0].set_ylabel(label)
        figure.suptitle(f"{title}\n", x=0.012, ha="left", fontsize=15, fontweight="bold")
        figure.text(0.012, 0.962, subtitle, ha="left", va="top", fontsize=9, color="#57606a")
        figure.align_ylabels(axes[:, 0])
        figure.savefig(path)


def _loss(axis: Any, name: str, stock: Run, patched: Run) -> None:
    axis.set_title(name, loc="left", fontweight="bold", fontsize=11)
    axis.plot(
        _steps(stock.losses),
        stock.losses,
        color=STOCK,
        lw=6,
        alpha=0.35,
        label="stock",
        solid_capstyle="round",
    )
    axis.plot(
        _steps(patched.losses),
        patched.losses,
        color=PATCHED,
        lw=1.6,
        marker="o",
        ms=3.5,
        label="patched",
    )
    axis.legend(loc="upper right")


def _difference(axis: Any, stock: Run, patched: Run, bound: float) -> None:
    floor = bound * 1e-5
    gaps = [abs(p - s) for s, p in zip(stock.losses, patched.losses, strict=True)]
    apart = [(i, gap) for i, gap in zip(_steps(gaps), gaps, strict=True) if gap]
    equal = [i for i, gap in zip(_steps(gaps), gaps, strict=True) if not gap]
    axis.set_yscale("log")
    dots: dict[str, Any] = {"color": INK, "lw": 0, "marker": "o", "ms": 3.5, "clip_on": False}
    if apart:
        steps, heights = zip(*apart, strict=True)
        axis.vlines(steps, floor, heights, color=INK, lw=1, alpha=0.35)
        axis.plot(steps, heights, **dots)
    if equal:
        axis.plot(equal, [floor] * len(equal), **dots, mfc="white", label="equal to the last bit")
        axis.legend(loc="upper right", bbox_to_anchor=(1, 0.8), fontsize=9, handletextpad=0.2)
    axis.axhline(bound, color="#b3261e", lw=1.2, ls=(0, (4, 3)))
    axis.annotate(
        f"bound {bound:g}",
        (1, bound),
        xytext=(0, -4),
        textcoords="offset points",
        va="top",
        color="#b3261e",
        fontsize=9,
    )
    axis.set_ylim(floor, max(bound, *gaps) * 4)


def _memory(axis: Any, stock: Run, patched: Run) -> None:
    for run, color, label in ((stock, STOCK, "stock"), (patched, PATCHED, "patched")):
        points = [(i + 1, p.peak_bytes / MIB) for i, p in enumerate(run.peaks) if p is not None]
        steps, sizes = zip(*points, strict=True)
        axis.fill_between(steps, sizes, step="mid", color=color, alpha=0.16, lw=0)
        axis.step(steps, sizes, where="mid", color=color, lw=2)
        top = max(sizes)
        axis.annotate(
            f"{label}  {top:,.0f} MiB",
            (steps[-1], sizes[-1]),
            xytext=(0, 5),
            textcoords="offset points",
            ha="right",
            color=color,
            fontweight="bold",
        )
    axis.set_ylim(0, max(stock.peak_bytes, patched.peak_bytes) / MIB * 1.18)
    unmeasured = [i + 1 for i, p in enumerate(stock.peaks) if p is None]
    if unmeasured:
        middle = (unmeasured[0] + unmeasured[-1]) / 2
        axis.axvspan(unmeasured[0] - 0.5, unmeasured[-1] + 0.5, color=GRID, alpha=0.6, lw=0)
        axis.text(
            middle,
            0.5,
            "timed,\nnot metered",
            rotation=90,
            ha="center",
            va="center",
            fontsize=8.5,
            color="#57606a",
            transform=axis.get_xaxis_transform(),
        )


def _steps(values: list[float]) -> range:
    return range(1, len(values) + 1)
