"""``liger-multi bench``: what the operators cost on this machine, compared with plain PyTorch."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

import torch

from liger_multi.cli import checking
from liger_multi.dispatch.registry import usable_device
from liger_multi.errors import ConfigurationError, LigerMultiError, check_name, require_packages

if TYPE_CHECKING:
    from liger_multi.bench.runner import BenchConfig

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PROVIDERS = "ours,torch"
QUICK_SHRINK = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what every runner of the benchmark understands."""
    parser.add_argument("--ops", default="*", metavar="GLOB", help="operators (comma-joined)")
    parser.add_argument("--samples", default="*", metavar="GLOB", help="samples (comma-joined)")
    parser.add_argument(
        "--providers",
        metavar="LIST",
        help="whom to time: ours, any backend, torch, aten, compile, liger, ... (default: "
        f"{PROVIDERS} of liger-multi, else all)",
    )
    parser.add_argument("--device", default="auto", help="auto: the accelerator, or the CPU")
    parser.add_argument(
        "--dtype",
        type=checking.dtype,
        metavar="|".join(DTYPES),
        help="of the inputs (default: fp32 on a CPU, else bf16)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help="timing of one sample, all providers (default: 5, or 0.2 with --quick)",
    )
    parser.add_argument("--quick", action="store_true", help="few rounds; tiny shapes on a CPU")


def add_command(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``liger-multi bench``."""
    add_arguments(parser)
    parser.add_argument(
        "--output",
        type=checking.path,
        metavar="FOLDER",
        help="write the result as JSON, and charts, under names that are not taken (default: "
        "write nothing)",
    )
    checking.add_json(parser)


def plan(
    options: argparse.Namespace, whom: str | None = None, dtype: str | None = None
) -> BenchConfig:
    """What a command line asks for.

    Args:
        options: Parsed arguments of :func:`add_arguments`.
        whom: Providers where none are named; all that are known by default.
        dtype: The dtype where none is named; by default that of models on the device.

    Raises:
        ValueError: An unknown name (the message ends with the nearest), or no such device.
    """
    from liger_multi.bench import providers
    from liger_multi.bench.cases import CPU_BYTES, CPU_OPERATIONS, cases
    from liger_multi.bench.runner import BenchConfig

    try:
        device = usable_device(None if options.device == "auto" else options.device)
    except ConfigurationError as error:
        raise ConfigurationError(f"--device {options.device}: {error}") from error
    usual = dtype or ("fp32" if device.type == "cpu" else "bf16")
    name = usual if options.dtype is None else options.dtype
    check_name(ValueError, "dtype", name, DTYPES)
    if options.seconds is not None and not (options.seconds > 0 and math.isfinite(options.seconds)):
        raise ValueError(f"--seconds must be positive, got {options.seconds:g}")
    text = whom if options.providers is None else options.providers
    provider_names = providers.default() if text is None else _names(text, providers.known_names())
    shrink = QUICK_SHRINK if options.quick else 1
    limits = (CPU_BYTES / shrink, CPU_OPERATIONS / shrink) if device.type == "cpu" else None
    selected = cases(options.ops, options.samples, DTYPES[name], limits)
    if not selected:
        raise ValueError(f"no sample of {options.ops!r} is named {options.samples!r}")
    seconds = options.seconds or (0.2 if options.quick else 5.0)
    return BenchConfig(selected, provider_names, device, DTYPES[name], seconds, options.quick)


def _names(text: str, allowed: list[str]) -> list[str]:
    names = [n.strip() for n in text.split(",") if n.strip()]
    for name in names:
        check_name(ValueError, "provider", name, allowed)
    if not names:
        raise ValueError(f"--providers names nobody; such as: {', '.join(allowed[:5])}")
    return list(dict.fromkeys(names))


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and, if asked, save; 1 when an operator was wrong or failed.

    Raises:
        LigerMultiError: A name that is not known, or a package that is missing.
    """
    require_packages("bench", ["rich", *(["matplotlib"] if arguments.output else [])], "cli")
    from rich.console import Console

    from liger_multi.bench import report
    from liger_multi.bench.runner import run_plan

    try:
        config = plan(arguments, PROVIDERS)
    except ValueError as error:
        raise LigerMultiError(str(error)) from error
    if arguments.output:
        checking.folder("--output", arguments.output)
    console = Console(stderr=arguments.json)
    if not console.is_terminal:
        console = Console(width=150, stderr=arguments.json)
    result = run_plan(config, console)
    if arguments.json:
        checking.write_json(result)
    else:
        report.show(console, result)
    for path in report.save(result, arguments.output) if arguments.output else ():
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
    return failed(result["rows"])


def failed(rows: list[dict[str, object]]) -> int:
    """The exit code: 1 when a call of ours was wrong or failed."""
    statuses = [row["status"] for row in rows if row["provider"] == "ours"]
    return int(any(status in ("wrong", "failed") for status in statuses))
