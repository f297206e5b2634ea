"""``liger-multi plan``: the fastest way to train a model that fits, and ready files for it."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from liger_multi.cli import checking
from liger_multi.errors import LigerMultiError, PlanError
from liger_multi.memory.planning import CARDS, Space, TrainingPlan, plan
from liger_multi.memory.planning.files import NAMES
from liger_multi.memory.planning.page import plan_page
from liger_multi.memory.planning.settings import PRECISIONS
from liger_multi.memory.setup import OPTIMIZERS
from liger_multi.memory.sizes import SIZES, config_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``liger-multi plan``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"a config.json or other JSON file of one, a folder of one, or {', '.join(SIZES)}",
    )
    names = ", ".join(CARDS)
    parser.add_argument(
        "--gpu", required=True, metavar="SIZE", help=f"24GiB, or one of {names}, or h200:24GiB"
    )
    parser.add_argument("--gpus", type=int, default=1, help="devices of one host")
    parser.add_argument("--seq", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, help="sequences of a step over all devices")
    parser.add_argument(
        "--precision", action="append", choices=PRECISIONS, help="may be given more than once"
    )
    parser.add_argument("--optimizer", default="adamw", choices=OPTIMIZERS)
    parser.add_argument("--device", default="cuda", help="device type to predict (default: cuda)")
    parser.add_argument("--headroom", type=float, default=0.06, help="share that stays free")
    parser.add_argument("--data-parallel", action="store_true", help="no TP or PP")
    parser.add_argument("--no-limits", action="store_true", help="skip longest sequence and batch")
    parser.add_argument("--compression", action="store_true", help="ask DeepSpeed for ZeRO++")
    parser.add_argument(
        "--write", type=checking.path, metavar="DIR", help="write files for the best way"
    )
    parser.add_argument("--picture", type=checking.path, metavar="PNG", help="draw memory by part")
    checking.add_overwrite(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print a plan; 1 when nothing fits."""
    needed = ["transformers", *(["matplotlib"] if arguments.picture else [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise LigerMultiError(
            f"plan needs {', '.join(missing)}, which cannot be imported here; "
            'install with: pip install "liger-multi[transformers,cli]"'
        )
    if arguments.write:
        checking.folder("--write", arguments.write, NAMES, arguments.overwrite)
    if arguments.picture:
        checking.file("--picture", arguments.picture, ".png", arguments.overwrite)
    code = 0
    try:
        with checking.simulated("plan", arguments.model), _progress() as said:
            made = _plan(arguments, said)
    except PlanError as error:
        sys.stderr.write(f"liger-multi: {error}\n")
        made, code = error.plan, 1
    if arguments.json:
        sys.stdout.write(json.dumps(made.as_data(), indent=1) + "\n")
    else:
        plan_page(made).show()
    if arguments.picture:
        made.draw(arguments.picture)
    if arguments.write and not code:
        for path in made.write(arguments.write):
            sys.stderr.write(f"wrote {path}\n")
    return code


def _plan(arguments: argparse.Namespace, said: Callable[[str], None]) -> TrainingPlan:
    space = Space(layouts=((1, 1),)) if arguments.data_parallel else None
    if space is not None and arguments.precision:
        space = replace(space, precisions=tuple(arguments.precision))
    return plan(
        config_of(arguments.model, arguments.seq),
        arguments.gpu,
        arguments.gpus,
        arguments.batch,
        arguments.seq,
        optimizer=arguments.optimizer,
        precision=arguments.precision,
        device=arguments.device,
        headroom=arguments.headroom,
        space=space,
        limits=not arguments.no_limits,
        compression=arguments.compression,
        said=said,
    )


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What is simulated now, on a terminal's error output."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.completed:.0f}"))
    words = TextColumn("simulated; {task.description}")
    with Progress(*columns, words, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda text: bar.update(task, description=text, advance=1)
