"""``liger-multi estimate`` and ``plan``: what training a model needs, and ways that fit.

The estimate is of each device; a plan is the fastest way that fits, with ready files for it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from liger_multi.cli import checking
from liger_multi.dispatch.config import parse_bytes
from liger_multi.errors import LigerMultiError, PlanError
from liger_multi.memory import estimate
from liger_multi.memory.breakdown import estimate_page
from liger_multi.memory.planning import CARDS, Space, TrainingPlan, plan
from liger_multi.memory.planning.result import NAMES, PRECISIONS, plan_page
from liger_multi.memory.setup import DTYPES, OPTIMIZERS, TrainingSetup
from liger_multi.memory.sizes import SIZES, config_of

# --- estimate ---


def add_estimate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``liger-multi estimate``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"a config.json or other JSON file of one, a folder of one, or {', '.join(SIZES)}",
    )
    parser.add_argument("--batch", type=int, default=1, help="sequences of a device and step")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of each")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of the weights")
    parser.add_argument("--optimizer", default="adamw", choices=OPTIMIZERS)
    parser.add_argument("--zero-stage", type=int, default=0, choices=(0, 1, 2, 3))
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 over all devices")
    parser.add_argument("--world", type=int, default=1, help="devices that shards are spread over")
    parser.add_argument("--offload", choices=("cpu", "nvme"), help="optimizer states stand there")
    parser.add_argument("--offload-parameters", action="store_true", help="parameters too")
    parser.add_argument("--checkpointing", action="store_true", help="keep inputs of layers only")
    parser.add_argument("--patched", action="store_true", help="with the operators of this library")
    parser.add_argument("--attention", default="sdpa", help="sdpa, flash_attention_2 or eager")
    parser.add_argument("--device", default="cuda", help="device type to predict (default: cuda)")
    parser.add_argument("--capacity", help="memory of a device, such as 80GiB")
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON")


def run_estimate(arguments: argparse.Namespace) -> int:
    """Print an estimate; 1 when a device of the given capacity is too small for it."""
    if importlib.util.find_spec("transformers") is None:
        raise LigerMultiError(
            "estimate needs transformers, which cannot be imported here; "
            'install with: pip install "liger-multi[transformers]"'
        )
    given = {f.name: getattr(arguments, f.name) for f in fields(TrainingSetup)}
    if given["capacity"] is not None:
        given["capacity"] = parse_bytes(given["capacity"], "--capacity")
    with checking.simulated("estimate", arguments.model):
        config = config_of(arguments.model, arguments.sequence)
        made = estimate(config, arguments.batch, arguments.sequence, TrainingSetup(**given))
    fits = given["capacity"] is None or made.peak_bytes <= given["capacity"]
    if arguments.json:
        data = {name: value for name, value in made.as_data().items() if name != "profile"}
        sys.stdout.write(json.dumps({**data, "fits": fits}, indent=1) + "\n")
        return int(not fits)
    page = estimate_page(made)
    if not fits:
        page.add("Too large", [("problem", f"a device has {arguments.capacity}")])
    page.show()
    return int(not fits)


# --- plan ---


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
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


def run_plan(arguments: argparse.Namespace) -> int:
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
