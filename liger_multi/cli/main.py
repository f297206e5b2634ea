"""Parse the command line and run one command."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import torch

from liger_multi.bench import command as bench
from liger_multi.cli import bisect, checking, doctor, plan, verify
from liger_multi.demo import command as demo
from liger_multi.dtypes import long_name
from liger_multi.errors import LigerMultiError
from liger_multi.files.page import Page

DTYPES = ("fp64", "fp32", "bf16", "fp16")
Declare = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``liger-multi`` with ``argv`` and return its exit code.

    0 is fine, 1 is a finding (a failed demo, a wrong result, bits that differ, a problem named by
    the doctor), 2 is
    wrong input or output that could not be written, 141 is a reader of the output who left.
    """
    with _any_text("stdout"), _any_text("stderr"):
        return _run(_parser().parse_args(argv))


def program() -> None:
    """:func:`main` as a process of its own.

    It ends without taking PyTorch and transformers apart, which lasts longer than a short command.
    """
    code = main()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _run(arguments: argparse.Namespace) -> int:
    try:
        with checking.only_json(arguments):
            code: int = arguments.run(arguments)
        sys.stdout.flush()
    except LigerMultiError as error:
        sys.stderr.write(f"liger-multi: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("liger-multi: interrupted\n")
        return 130
    except OSError as error:  # what was checked before may have changed, or a disk is full
        _drop_output()
        if isinstance(error, BrokenPipeError):
            return 141
        sys.stderr.write(f"liger-multi: error: {error}\n")
        return 2
    return code


@contextlib.contextmanager
def _any_text(name: str) -> Iterator[None]:
    """Let a stream escape what its encoding has no bytes for, such as names of files."""
    stream = getattr(sys, name)
    if stream is None:  # closed before the start, as services do
        setattr(sys, name, io.StringIO())
    if not isinstance(stream, io.TextIOWrapper):
        yield
        return
    errors = stream.errors
    stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            stream.reconfigure(errors=errors)


def _drop_output() -> None:
    """Keep Python from failing once more at exit with what is left of standard output."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    from liger_multi._version import __version__

    parser = checking.Parser(prog="liger-multi", description="One patch call, any accelerator.")
    parser.add_argument("--version", action="version", version=f"liger-multi {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (text, declare, run) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        declare(command)
        if run is not None:
            command.set_defaults(run=run)
    return parser


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    checking.add_json(parser)
    parser.add_argument(
        "--verbose", action="store_true", help="every candidate of every operator, and why"
    )


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", nargs="?", metavar="OP", help="name of an operator (default: all)")
    parser.add_argument(
        "--device", help="a device or device type (default: the CPU and every accelerator)"
    )
    parser.add_argument(
        "--dtype",
        type=checking.dtype,
        choices=DTYPES,
        help="dtype of the tensors (default: fp32 on a CPU, else bf16)",
    )
    checking.add_json(parser)


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    text = "check a configuration file without using it"
    action = actions.add_parser("check", help=text, description=text)
    action.add_argument("file", metavar="FILE", type=checking.path)
    checking.add_json(action)
    action.set_defaults(run=_check)


def _explain(arguments: argparse.Namespace) -> int:
    import liger_multi

    dtype = getattr(torch, long_name(arguments.dtype)) if arguments.dtype else None
    device = None if arguments.device is None else checking.known_device(arguments.device)
    explanation = liger_multi.explain(arguments.op, device, dtype)
    rows = [asdict(row) for row in explanation.rows]
    fails = doctor.failing(rows)
    if arguments.json:
        checking.write_json(rows)
    else:
        page = Page()
        doctor.operators(page, rows)
        page.add("Result", [["this call fails", text] for text in fails])
        page.show()
    return 1 if fails else 0


def _check(arguments: argparse.Namespace) -> int:
    from liger_multi.dispatch.config import Configuration, load, using_configuration
    from liger_multi.dispatch.explain import explain

    with using_configuration(Configuration((load(arguments.file),))):
        fails = doctor.failing([asdict(row) for row in explain().rows])
    if arguments.json:
        checking.write_json({"file": str(arguments.file), "fine": True, "fails_here": fails})
        return 0
    sys.stdout.write(f"{arguments.file}: fine\n")
    page = Page()
    page.add("On this machine, with this file", [["this call fails", text] for text in fails])
    if fails:
        page.show()
    return 0


COMMANDS: dict[str, tuple[str, Declare, Run | None]] = {
    "doctor": (
        "versions, devices, configuration, and which backend each operator uses",
        _doctor_arguments,
        doctor.run,
    ),
    "explain": (
        "say which backend an operator would use, and why not the others",
        _explain_arguments,
        _explain,
    ),
    "verify": (
        "which operators are right on this machine, and a quarantine of those that are not",
        verify.add_arguments,
        verify.run,
    ),
    "bench": (
        "time, memory and error of the operators on this machine, beside plain PyTorch",
        bench.add_command,
        bench.run,
    ),
    "bisect": (
        "the first operator that differs between two configurations, and by how many ulps",
        bisect.add_arguments,
        bisect.run,
    ),
    "config": ("work with configuration files", _config_arguments, None),
    "demo": (
        "train small Hugging Face models unpatched and patched, and compare loss, memory and speed",
        demo.add_arguments,
        demo.run,
    ),
    "memory-demo": (
        "where the memory of one training step goes, unpatched and patched",
        demo.add_memory_arguments,
        demo.run_memory,
    ),
    "estimate": (
        "how much memory training a model will need on each device",
        plan.add_estimate_arguments,
        plan.run_estimate,
    ),
    "plan": (
        "the fastest way to train a model that fits, and ready files for it",
        plan.add_plan_arguments,
        plan.run_plan,
    ),
}
"""Every command: what it does, what declares its arguments, and what runs it."""
