"""What the demo shows: a display while it runs, and a picture of loss, difference and memory."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from liger_multi.files.pictures import ALARM, GRID, INK, OURS, PAPER, SOFT, STOCK, figure
from liger_multi.memory.measure import format_bytes

if TYPE_CHECKING:
    from liger_multi.demo.training import Corpus, DemoConfig, Run

# --- on the screen ---

COLUMNS = ("step", "loss unpatched", "loss patched", "difference", "peak unpatched", "peak patched")
"""Of a step's row; each is as wide as its name, so that all fit into 80 characters."""
HEADER = "  ".join(COLUMNS)


class Display:
    """A console with the demo's few kinds of output."""

    def __init__(self, console: Console | None = None, stderr: bool = False) -> None:
        self.console = console or Console(highlight=False, stderr=stderr)

    @contextlib.contextmanager
    def busy(self, text: str) -> Iterator[None]:
        """A spinner around something that takes seconds."""
        with self.console.status(text):
            yield

    def opening(self, corpus: Corpus, learned: int, plan: DemoConfig) -> None:
        """What is about to happen."""
        scale = plan.scale
        if plan.on_cpu:
            memory = f"largest sum of live tensor bytes, in each of the first {scale.steps} steps"
            speed = f"of {plan.timed} further steps without the meter"
        else:
            memory = "the allocator's peak in each step; widest tensor: of the first step"
            speed = f"of the last {plan.timed} steps"
        grid = Table.grid(padding=(0, 2))
        entries = f"{learned:,} entries learned from it"
        if learned < scale.vocabulary:
            entries += (
                f" (the text yields no more; the model's vocabulary stays {scale.vocabulary:,})"
            )
        for name, value in (
            ("text", f"{corpus.characters / 1e6:.1f} M characters of {corpus.root}"),
            ("tokenizer", f"byte-level BPE, {entries}"),
            ("a step", f"{scale.batch} x {scale.sequence} tokens, {plan.where}"),
            ("memory", memory),
            ("tokens/s", speed),
            ("must hold", f"losses within {plan.bound:g} in every step, and less peak memory"),
        ):
            grid.add_row(Text(name, style="bold"), Text(value))
        self.console.print(
            Panel(
                grid,
                title="liger_multi demo: the Hugging Face Trainer, unpatched and patched",
            )
        )

    def model(self, model_type: str, model: Any) -> None:
        """Name a model before its runs."""
        config = model.config
        count = sum(p.numel() for p in model.parameters())
        tied = "tied head" if config.tie_word_embeddings else "untied head"
        self.console.rule(Text(model_type, style="bold"))
        self.console.print(
            f"{type(model).__name__}, {count / 1e6:.1f} M parameters, {tied}, "
            f"vocabulary {config.vocab_size:,}, hidden {config.hidden_size}, "
            f"{config.num_hidden_layers} layers"
        )

    def report(self, report: Any) -> None:
        """What the patch call says it did."""
        rich = hasattr(report, "__rich__") or hasattr(report, "__rich_console__")
        if rich and self.console.is_terminal:
            self.console.print(report)
        else:  # a log has no width: lines would be broken at 80 columns for nobody
            self.console.print(Text(str(report)), soft_wrap=True)

    @contextlib.contextmanager
    def progress(
        self, text: str, plan: DemoConfig, stock: Run | None = None
    ) -> Iterator[Callable[[Run], None]]:
        """A bar that moves with the steps; with ``stock`` also a row a step that compares."""
        bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            console=self.console,
        )
        if stock is not None:
            self.console.print(Text(HEADER, style="bold"))
        with bar:
            task = bar.add_task(text, total=plan.total, loss="-")

            def advance(run: Run) -> None:
                if stock is not None:
                    bar.console.print(_row(stock, run, plan.bound))
                elif not bar.console.is_terminal:
                    # A log shows no moving bar, and minutes of silence look like a hang.
                    count = f"{len(run.losses)}/{plan.total}"
                    bar.console.print(Text(f"  {text} {count:>7}  loss {run.losses[-1]:.6f}"))
                bar.update(task, advance=1, loss=f"{run.losses[-1]:.4f}")

            yield advance

    def summary(self, model_type: str, stock: Run, patched: Run) -> None:
        """Memory and throughput of a pair of runs."""
        table = Table(title=f"{model_type}: unpatched and patched", title_justify="left")
        table.add_column("measured", overflow="fold")
        for name in ("baseline", "patched", "ratio"):
            table.add_column(name, justify="right")
        peaks = stock.peak_bytes, patched.peak_bytes
        table.add_row(
            "peak memory of a step", *map(format_bytes, peaks), f"{peaks[1] / peaks[0]:.2f}"
        )
        wide = stock.widest, patched.widest
        sizes = [p.widest_bytes or 0 for p in wide]
        ratio = f"{sizes[1] / max(sizes[0], 1):.2f}"
        table.add_row("largest vocabulary-wide tensor", *map(format_bytes, sizes), ratio)
        table.add_row(
            "  its shape", *(" x ".join(map(str, p.widest_shape or ())) for p in wide), ""
        )
        speed = stock.tokens_per_second, patched.tokens_per_second
        table.add_row("tokens/s", *(f"{s:,.0f}" for s in speed), f"{speed[1] / speed[0]:.2f}")
        self.console.print(table)

    def closing(
        self,
        pairs: Mapping[str, tuple[Run, Run]],
        problems: list[str],
        verdict: str,
        picture: Path,
        seconds: float,
    ) -> None:
        """The verdict."""
        lines = []
        for model_type, (stock, patched) in pairs.items():
            gap = max(abs(b - a) for a, b in zip(stock.losses, patched.losses, strict=True))
            drop = f"{format_bytes(stock.peak_bytes)} -> {format_bytes(patched.peak_bytes)}"
            lines.append(f"{model_type}: losses differ by at most {gap:.1e}, peak memory {drop}")
        lines += ["", *problems, f"picture: {picture}", f"took {seconds:.0f} s"]
        color = "red" if problems else "green"
        self.console.print(Panel(Text("\n".join(lines)), title=verdict, border_style=color))


def _row(stock: Run, run: Run, bound: float) -> Text:
    index = len(run.losses) - 1
    a, b = stock.losses[index], run.losses[index]
    step, loss, patched, difference, memory, patched_memory = map(len, COLUMNS)
    row = Text(f"{index + 1:>{step}}  {a:>{loss}.6f}  {b:>{patched}.6f}  ")
    style = "green" if abs(b - a) <= bound else "bold red"
    row.append(f"{b - a:>+{difference}.1e}", style=style)
    for peak, width in ((stock.peaks[index], memory), (run.peaks[index], patched_memory)):
        row.append(f"  {'not metered' if peak is None else format_bytes(peak.peak_bytes):>{width}}")
    return row


# --- the picture ---

MIB = 2**20


def draw(pairs: Mapping[str, tuple[Run, Run]], plan: DemoConfig, title: str, path: Path) -> None:
    """Write a PNG with one column a model: loss, difference of the losses, peak memory."""
    subtitle = (
        "unmodified Hugging Face Trainer, same seed and batches, "
        f"{plan.scale.tokens:,} tokens a step, vocabulary {plan.scale.vocabulary:,}, {plan.where}"
    )
    width = 1.4 + 4.3 * len(pairs)
    subtitle_text = textwrap.fill(subtitle, int(13 * width))
    with figure(path, width, 7.8) as drawing:
        axes = drawing.subplots(
            3, len(pairs), squeeze=False, sharex="col", height_ratios=(3, 1.6, 2.6)
        )
        for column, (name, (stock, patched)) in enumerate(pairs.items()):
            _loss(axes[0, column], name, stock, patched)
            _difference(axes[1, column], stock, patched, plan.bound)
            _memory(axes[2, column], stock, patched)
            axes[2, column].set_xlabel("training step")
            axes[2, column].xaxis.set_major_locator(MaxNLocator(integer=True))
        for row, label in enumerate(("training loss", "difference", "peak memory [MiB]")):
            axes[row, 0].set_ylabel(label)
        drawing.suptitle(
            title + "\n" * (1 + subtitle_text.count("\n")),
            x=0.012,
            ha="left",
            fontsize=14,
            fontweight="bold",
        )
        drawing.text(0.012, 0.957, subtitle_text, ha="left", va="top", fontsize=8.5, color=SOFT)
        drawing.align_ylabels(axes[:, 0])


def _loss(axis: Any, name: str, stock: Run, patched: Run) -> None:
    axis.set_title(name)
    axis.plot(
        _steps(stock.losses),
        stock.losses,
        color=STOCK,
        lw=6,
        alpha=0.6,
        label="unpatched",
        solid_capstyle="round",
    )
    axis.plot(
        _steps(patched.losses),
        patched.losses,
        color=OURS,
        lw=1.6,
        marker="o",
        ms=3.5,
        label="patched",
    )
    axis.legend(loc="upper right")


def _difference(axis: Any, stock: Run, patched: Run, bound: float) -> None:
    floor = bound * 1e-5
    gaps = [abs(p - s) for s, p in zip(stock.losses, patched.losses, strict=True)]
    nonzero = [(i, gap) for i, gap in zip(_steps(gaps), gaps, strict=True) if gap]
    equal = [i for i, gap in zip(_steps(gaps), gaps, strict=True) if not gap]
    axis.set_yscale("log")
    dots: dict[str, Any] = {"color": INK, "lw": 0, "marker": "o", "ms": 3.5, "clip_on": False}
    if nonzero:
        steps, heights = zip(*nonzero, strict=True)
        axis.vlines(steps, floor, heights, color=INK, lw=1, alpha=0.35)
        axis.plot(steps, heights, **dots)
    if equal:
        axis.plot(equal, [floor] * len(equal), **dots, mfc=PAPER, label="equal to the last bit")
        axis.legend(loc="upper right", bbox_to_anchor=(1, 0.8), fontsize=9, handletextpad=0.2)
    axis.axhline(bound, color=ALARM, lw=1.2, ls=(0, (4, 3)))
    axis.annotate(
        f"bound {bound:g}",
        (1, bound),
        xytext=(0, -4),
        textcoords="offset points",
        va="top",
        color=ALARM,
        fontsize=9,
    )
    axis.set_ylim(floor, max(bound, *gaps) * 4)


def _memory(axis: Any, stock: Run, patched: Run) -> None:
    for run, color, label in ((stock, SOFT, "unpatched"), (patched, OURS, "patched")):
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
            color=SOFT,
            transform=axis.get_xaxis_transform(),
        )


def _steps(values: list[float]) -> range:
    return range(1, len(values) + 1)
