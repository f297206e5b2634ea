"""What commands check before they work: devices, numbers, places to write to."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from liger_multi.dispatch.registry import device_of, usable_device
from liger_multi.dtypes import short_name
from liger_multi.errors import (
    ConfigurationError,
    LigerMultiError,
    first_line,
    shown,
    shown_path,
    summary,
)

OVERWRITE = "--overwrite"


class Help(argparse.HelpFormatter):
    """Help that ends with the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help
        default = action.default
        if not text or action.required or "(default:" in text or not action.option_strings:
            return text
        if default is None or default is False or default == argparse.SUPPRESS:
            return text
        shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else default
        return f"{text} (default: {str(shown).replace('%', '%%')})"


class Parser(argparse.ArgumentParser):
    """A parser of a command and its actions, with defaults in its help."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"formatter_class": Help, **options})


def dtype(text: str) -> str:
    """The short name of a dtype, of whatever names people have for it."""
    return str(short_name(text.lower()))


def path(text: str) -> Path:
    """A path as an argument; an empty one would mean the current folder."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"must be a path, got {shown(text)}")
    return Path(text)


def seconds(text: str) -> float:
    """A time limit as an argument."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"must be from 0.1 to 86400 seconds, got {shown(text)}")
    return value


def name(text: str) -> str:
    """A name of a person or thing as an argument."""
    if not text.isprintable() or len(text) > 100 or not any(c.isalnum() for c in text):
        raise argparse.ArgumentTypeError(f"must be a name of up to 100 letters, got {shown(text)}")
    return text


def _number(text: str, least: int, most: int) -> int:
    try:
        value = int(text)
    except ValueError:  # no number, or one of thousands of digits
        value = least - 1
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(
            f"must be an integer from {least} to {most}, got {shown(text)}"
        )
    return value


# Arguments that are numbers: a seed, as NumPy takes it, processes and steps.
seed = functools.partial(_number, least=0, most=2**32 - 1)
processes = functools.partial(_number, least=1, most=256)
steps = functools.partial(_number, least=1, most=2**31 - 1)


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """Declare the option that allows :func:`folder` and :func:`file` to meet existing files."""
    parser.add_argument(OVERWRITE, action="store_true", help="replace files that exist already")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Declare the option for one JSON document on standard output and nothing else there."""
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON")


def write_json(data: Any) -> None:
    """What a command found, on standard output."""
    sys.stdout.write(json.dumps(data, indent=1, default=str) + "\n")


def device(command: str, name: str | None) -> torch.device:
    """The device that a command runs on.

    Raises:
        LigerMultiError: It is unknown, absent or does not work.
    """
    try:
        return usable_device(name)
    except ConfigurationError as error:
        raise LigerMultiError(f"{command} cannot use --device {name}: {error}") from error


def known_device(name: str) -> torch.device:
    """The device of an option, whether or not it works here.

    Raises:
        LigerMultiError: It is unknown, or has an index that this machine lacks.
    """
    try:
        return device_of(name)
    except ConfigurationError as error:
        raise LigerMultiError(f"--device {name}: {error}") from error


def folder(option: str, place: Path, names: Sequence[str] = (), overwrite: bool = False) -> None:
    """Make sure that files can be written into a folder, which is there or can be made.

    Args:
        option: That named it.
        place: The folder; only its last part may be missing.
        names: Files that will be written.
        overwrite: Whether they may exist.

    Raises:
        LigerMultiError: The folder cannot be used, or holds one of the files.
    """
    if place.exists() and not place.is_dir():
        raise LigerMultiError(f"{option} {shown_path(place)} is not a folder")
    parent = place if place.is_dir() else place.parent
    if not parent.is_dir():
        raise LigerMultiError(
            f"{option} {shown_path(place)} cannot be made: there is no folder {shown_path(parent)}"
        )
    _writable(option, parent)
    _absent([place / name for name in names], overwrite)


def file(option: str, place: Path, suffix: str, overwrite: bool = False) -> None:
    """Make sure that a file can be written.

    Raises:
        LigerMultiError: It has another suffix, cannot be written or exists.
    """
    if place.suffix.lower() != suffix:
        raise LigerMultiError(f"{option} must end with {suffix}, got {shown_path(place)}")
    if place.is_dir() or not place.parent.is_dir():
        said = "is a folder" if place.is_dir() else "cannot be written: there is no such folder"
        raise LigerMultiError(f"{option} {shown_path(place)} {said}")
    _writable(option, place.parent)
    _absent([place], overwrite)


def _writable(option: str, place: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise LigerMultiError(
            f"{option} cannot write into {shown_path(place)}: {error.strerror or error}"
        ) from error


def _absent(files: Sequence[Path], overwrite: bool) -> None:
    missing = [str(one) for one in files if os.path.lexists(one)]
    if missing and not overwrite:
        raise LigerMultiError(
            f"{', '.join(missing)} would be overwritten; "
            f"allow it with {OVERWRITE}, or name another place"
        )


@contextlib.contextmanager
def simulated(command: str, model: str) -> Iterator[None]:
    """One line for whatever a configuration from outside makes transformers raise."""
    try:
        yield
    except LigerMultiError:
        raise
    except ValueError as error:
        raise LigerMultiError(f"{command}: {first_line(error)}") from error
    except Exception as error:
        raise LigerMultiError(
            f"{command}: the model of {shown_path(model)} cannot be simulated: {summary(error)}"
        ) from error
