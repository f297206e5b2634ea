"""The scripts in ``examples``: what they show, how to start them, and what they took."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from benchmarks import store
from benchmarks.tables import table

COMMAND = re.compile(r"^ {4}(\S.*)", re.M)


def script(name: str) -> tuple[str, str, str]:
    """What a script shows, and its commands for a CPU and for GPUs, from its first lines."""
    source = (store.ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    doc = ast.get_docstring(ast.parse(source)) or ""
    tiny, gpu = (" ".join(command.split()) for command in COMMAND.findall(doc))
    return doc.partition("\n")[0], tiny, gpu


def examples() -> list[str]:
    """A table of the scripts with what they took, and one of their commands for GPUs."""
    newest = {row["example"]: (run, row) for run, row in store.rows("examples")}
    lines, commands = [], []
    for name, (_, row) in sorted(newest.items()):
        shows, tiny, gpu = script(name)
        numbers = (row["seconds"], row["processor_seconds"], row["peak_bytes"] / 2**20)
        lines.append((f"[`{tiny}`]({name}.py)", shows, *(f"{n:.0f}" for n in numbers)))
        commands.append(f"    {gpu}")
    runs = [run for run, _ in newest.values()]
    loads = sorted(row["load"] for _, row in newest.values())
    run = max(runs, key=store.moment)
    said = f"Measured on {run['device']['cores']} CPU cores, torch {run['versions']['torch']}, "
    said += f"{run['date'][:10]}, other work beside (load average before each: {loads[0]} to "
    said += f"{loads[-1]}), which lengthens the first time and not the second:"
    gpus = "On GPUs; these commands have not been run on one:"
    heads = ("on a CPU", "shows", "time, s", "CPU time, s", "peak, MiB")
    return [said, "", *table(heads, lines), "", gpus, "", *commands]


TABLES: dict[str, Callable[[], list[str]]] = {
    "examples": examples,
}
