"""``liger-multi estimate`` and ``plan``: what training a model needs, and ways that fit.

The estimate is of each device; a plan is the fastest way that fits, with ready files for it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from liger_multi.cli import checking
from liger_multi.dispatch.config import parse_memory
from liger_multi.dtypes import long_name, short_name
from liger_multi.errors import PlanError, require_packages
from liger_multi.memory import estimate
from liger_multi.memory.offload import FORMATS as FORMATS_OF_ACTIVATIONS
from liger_multi.memory.planning import CARDS, Space, TrainingPlan, plan
from liger_multi.memory.planning.cost import DEFAULT_HOST_MEMORY
from liger_multi.memory.planning.result import NAMES, PRECISIONS
from liger_multi.memory.setup import DTYPES, OPTIMIZERS, TrainingSetup
from liger_multi.memory.sizes import SIZES, Source, beyond, positions_of
from liger_multi.ops.dequantize import FORMATS

MODEL = (
    "a config.json or other JSON file of one, a folder of one, a name on the Hugging Face hub, or "
    + ", ".join(SIZES)
)


def _add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights",
        choices=FORMATS,
        help="a frozen base in 4 bits, with LoRA on its linear layers and experts; mxfp4: experts "
        "only, where the model has some (default: weights in full, trained)",
    )
    parser.add_argument("--rank", type=int, default=16, help="of LoRA, with --weights")


# --- estimate ---


def add_estimate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``liger-multi estimate``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=MODEL,
    )
    _add_weights(parser)
    parser.add_argument("--batch", type=int, default=1, help="sequences of a device and step")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of each")
    names = [short_name(name) for name in DTYPES]
    parser.add_argument(
        "--dtype", type=checking.dtype, default="bf16", choices=names, help="of the weights"
    )
    parser.add_argument(
        "--optimizer", default="adamw", choices=OPTIMIZERS, help="whose states count"
    )
    parser.add_argument(
        "--zero-stage", type=int, default=0, choices=(0, 1, 2, 3), help="stage of ZeRO"
    )
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 over all devices")
    parser.add_argument("--world", type=int, default=1, help="devices that shards are spread over")
    parser.add_argument(
        "--offload",
        choices=("cpu", "nvme"),
        help="optimizer states stand there (default: on the device)",
    )
    parser.add_argument("--offload-parameters", action="store_true", help="parameters too")
    parser.add_argument(
        "--ranks", type=int, default=1, help="devices that share the tokens of every sequence"
    )
    parser.add_argument("--checkpointing", action="store_true", help="keep inputs of layers only")
    parser.add_argument(
        "--offload-activations", action="store_true", help="what layers keep waits on the host"
    )
    parser.add_argument(
        "--compress",
        choices=FORMATS_OF_ACTIVATIONS,
        help="what layers pass on waits in a byte (default: as it is)",
    )
    parser.add_argument("--patched", action="store_true", help="with the operators of this library")
    parser.add_argument("--attention", default="sdpa", help="sdpa, flash_attention_2 or eager")
    parser.add_argument("--device", default="cuda", help="device type to predict")
    parser.add_argument(
        "--capacity",
        metavar="SIZE",
        help="memory of a device, such as 80GiB or 80GB (default: no limit)",
    )
    checking.add_json(parser)


def run_estimate(arguments: argparse.Namespace) -> int:
    """Print an estimate; 1 when a device of the given capacity is too small for it."""
    require_packages("estimate", ["transformers"], "transformers")
    setup = {f.name: getattr(arguments, f.name) for f in fields(TrainingSetup)}
    if setup["capacity"] is not None:
        setup["capacity"] = parse_memory(setup["capacity"], "--capacity")
    setup["dtype"] = long_name(setup["dtype"])
    with checking.simulated("estimate", arguments.model), progress("estimate") as said:
        said(f"reading {arguments.model}")
        with _without_collections():
            source = Source(arguments.model, arguments.weights, arguments.rank)()
            config = getattr(source, "config", source)
            said(f"simulating {arguments.batch} x {arguments.sequence} tokens")
            result = estimate(source, arguments.batch, arguments.sequence, TrainingSetup(**setup))
    fits = setup["capacity"] is None or result.peak_bytes <= setup["capacity"]
    note = beyond(positions_of(config), arguments.sequence)
    if arguments.json:
        data = {name: value for name, value in result.as_data().items() if name != "profile"}
        checking.write_json({**data, "fits": fits, "notes": [note] if note else []})
        return int(not fits)
    page = result.page()
    if not fits:
        page.add("Too large", [("problem", f"a device has {arguments.capacity}")])
    if note:
        page.add("Notes", [("1.", note)])
    page.show()
    return int(not fits)


# --- plan ---


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``liger-multi plan``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=MODEL,
    )
    names = ", ".join(CARDS)
    parser.add_argument(
        "--gpu",
        required=True,
        metavar="SIZE",
        help=f"24GiB (or 24GB, of 10**9 bytes each), or one of {names}, or h200:24GiB",
    )
    _add_weights(parser)
    parser.add_argument("--gpus", type=int, default=1, help="devices of one host")
    parser.add_argument("--seq", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument(
        "--host-memory",
        metavar="SIZE",
        help="memory of the host for each device, such as 128GiB (default: what this machine has "
        f"for each of its devices, or {DEFAULT_HOST_MEMORY // 2**30}GiB where it has none)",
    )
    parser.add_argument(
        "--batch",
        type=int,
        help="sequences of a step over all devices (default: what is fastest for each way)",
    )
    parser.add_argument(
        "--precision",
        action="append",
        type=checking.dtype,
        choices=PRECISIONS,
        help="may be given more than once (default: what the card is fast in, and fp32)",
    )
    parser.add_argument(
        "--optimizer", default="adamw", choices=OPTIMIZERS, help="whose states count"
    )
    parser.add_argument("--device", default="cuda", help="device type to predict")
    parser.add_argument(
        "--headroom", type=float, default=0.06, help="share of either memory that stays free"
    )
    parser.add_argument("--data-parallel", action="store_true", help="no TP or PP")
    parser.add_argument("--no-limits", action="store_true", help="skip longest sequence and batch")
    parser.add_argument(
        "--no-cache", action="store_true", help="simulate anew, and keep nothing for later plans"
    )
    parser.add_argument("--compression", action="store_true", help="ask DeepSpeed for ZeRO++")
    parser.add_argument(
        "--write",
        type=checking.path,
        metavar="DIR",
        help="write files for the best way (default: write nothing)",
    )
    parser.add_argument(
        "--picture",
        type=checking.path,
        metavar="PNG",
        help="draw memory by part (default: draw nothing)",
    )
    checking.add_overwrite(parser)
    checking.add_json(parser)


def run_plan(arguments: argparse.Namespace) -> int:
    """Print a plan; 1 when nothing fits."""
    picture = ["matplotlib"] if arguments.picture else []
    require_packages(
        "plan", ["transformers", *picture], "transformers,cli" if picture else "transformers"
    )
    if arguments.write:
        checking.folder("--write", arguments.write, NAMES, arguments.overwrite)
    if arguments.picture:
        checking.file("--picture", arguments.picture, ".png", arguments.overwrite)
    if arguments.host_memory is not None:
        arguments.host_memory = parse_memory(arguments.host_memory, "--host-memory")
    code = 0
    try:
        with checking.simulated("plan", arguments.model), progress("plan") as said:
            said(f"reading {arguments.model}")
            with _without_collections():
                result = _plan(arguments, said)
    except PlanError as error:
        sys.stderr.write(f"liger-multi: {error}\n")
        result, code = error.plan, 1
    if arguments.json:
        checking.write_json(result.as_data())
    else:
        result.page().show()
    if arguments.picture:
        result.draw(arguments.picture)
    if arguments.write and not code:
        for path in result.write(arguments.write):
            sys.stderr.write(f"wrote {path}\n")
    return code


def _plan(arguments: argparse.Namespace, said: Callable[[str], None]) -> TrainingPlan:
    space = Space(layouts=((1, 1),)) if arguments.data_parallel else None
    if space is not None and arguments.precision:
        space = replace(space, precisions=tuple(arguments.precision))
    return plan(
        Source(arguments.model, arguments.weights, arguments.rank),
        arguments.gpu,
        arguments.gpus,
        arguments.batch,
        arguments.seq,
        optimizer=arguments.optimizer,
        precision=arguments.precision,
        device=arguments.device,
        host_memory=arguments.host_memory,
        headroom=arguments.headroom,
        space=space,
        limits=not arguments.no_limits,
        compression=arguments.compression,
        said=said,
        cache=not arguments.no_cache,
        processes=2,
    )


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Run without garbage collection, which scans all of PyTorch and transformers.

    It takes a fifth of the time, and a simulation leaves little to collect.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


# --- progress ---

EVERY = 2.0  # seconds between two lines in a log


@contextlib.contextmanager
def progress(command: str) -> Iterator[Callable[[str], None]]:
    """What is done now, on error output: a line that moves on a terminal, a few lines in a log."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield _log(command)
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TimeElapsedColumn())
    description = TextColumn("{task.description}", markup=False)
    options: dict[str, Any] = {"console": Console(stderr=True), "transient": True}
    # no thread, which a copy of this process would not have
    with Progress(*columns, description, auto_refresh=False, **options) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda text: bar.update(task, description=text, refresh=True)


def _log(command: str) -> Callable[[str], None]:
    """Write the first message at once, later ones at most once per interval."""
    begin = time.monotonic()
    due = begin

    def said(text: str) -> None:
        nonlocal due
        time_now = time.monotonic()
        if time_now >= due:
            sys.stderr.write(f"{command}: {time_now - begin:.0f} s: {text}\n")
            sys.stderr.flush()
            due = time_now + EVERY

    return said
