"""What the demo shows while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

from liger_multi.memory.measure import format_bytes

if TYPE_CHECKING:
    from liger_multi.demo.corpus import Corpus
    from liger_multi.demo.training import DemoConfig, Run

HEADER = (
    f"{'step':>5}  {'stock loss':>10}  {'patched':>10}  {'difference':>10}  "
    f"{'stock memory':>12}  {'patched':>11}"
)


class Display:
    """A console with the demo's few kinds of output."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)

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
                title="liger_multi demo: the unmodified Hugging Face Trainer, stock and patched",
            )
        )

    def model(self, kind: str, model: Any) -> None:
        """Name a model before its runs."""
        config = model.config
        count = sum(p.numel() for p in model.parameters())
        tied = "tied head" if config.tie_word_embeddings else "untied head"
        self.console.rule(Text(kind, style="bold"))
        self.console.print(
            f"{type(model).__name__}, {count / 1e6:.1f} M parameters, {tied}, "
            f"vocabulary {config.vocab_size:,}, hidden {config.hidden_size}, "
            f"{config.num_hidden_layers} layers"
        )

    def report(self, report: Any) -> None:
        """What the patch call says it did."""
        rich = hasattr(report, "__rich__") or hasattr(report, "__rich_console__")
        self.console.print(report if rich else Text(str(report)))

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

    def summary(self, kind: str, stock: Run, patched: Run) -> None:
        """Memory and throughput of a pair of runs."""
        table = Table(title=f"{kind}: stock and patched", title_justify="left")
        table.add_column("")
        for name in ("stock", "patched", "ratio"):
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
        for kind, (stock, patched) in pairs.items():
            gap = max(abs(b - a) for a, b in zip(stock.losses, patched.losses, strict=True))
            drop = f"{format_bytes(stock.peak_bytes)} -> {format_bytes(patched.peak_bytes)}"
            lines.append(f"{kind}: losses differ by at most {gap:.1e}, peak memory {drop}")
        lines += ["", *problems, f"picture: {picture}", f"took {seconds:.0f} s"]
        color = "red" if problems else "green"
        self.console.print(Panel(Text("\n".join(lines)), title=verdict, border_style=color))


def _row(stock: Run, run: Run, bound: float) -> Text:
    index = len(run.losses) - 1
    a, b = stock.losses[index], run.losses[index]
    row = Text(f"{index + 1:>5}  {a:>10.6f}  {b:>10.6f}  ")
    row.append(f"{b - a:>+10.1e}", style="green" if abs(b - a) <= bound else "bold red")
    for peak, width in ((stock.peaks[index], 12), (run.peaks[index], 11)):
        row.append(f"  {'not metered' if peak is None else format_bytes(peak.peak_bytes):>{width}}")
    return row
