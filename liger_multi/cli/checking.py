"""Checks of commands before they start: devices, numbers, output paths."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
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
        text_of_default = (
            " ".join(map(str, default)) if isinstance(default, list | tuple) else default
        )
        return f"{text} (default: {str(text_of_default).replace('%', '%%')})"


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


def _integer_between(text: str, smallest: int, largest: int) -> int:
    try:
        value = int(text)
    except ValueError:  # not a number, or one with thousands of digits
        value = smallest - 1
    if not smallest <= value <= largest:
        raise argparse.ArgumentTypeError(
            f"must be an integer from {smallest} to {largest}, got {shown(text)}"
        )
    return value


def seed(text: str) -> int:
    """A seed as an argument, as NumPy takes it."""
    return _integer_between(text, 0, 2**32 - 1)


def processes(text: str) -> int:
    """A number of processes as an argument."""
    return _integer_between(text, 1, 256)


def steps(text: str) -> int:
    """A number of steps as an argument."""
    return _integer_between(text, 1, 2**31 - 1)


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """Declare the option that allows :func:`folder` and :func:`file` to meet existing files."""
    parser.add_argument(OVERWRITE, action="store_true", help="replace files that exist already")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Declare the option for one JSON document on standard output and nothing else there."""
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON")


_document: ContextVar[Any] = ContextVar("liger_multi_document", default=None)


@contextlib.contextmanager
def only_json(arguments: argparse.Namespace) -> Iterator[None]:
    """With ``--json``, what backends and libraries print goes to standard error."""
    if not getattr(arguments, "json", False):
        yield
        return
    token = _document.set(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
        _document.get().flush()
    finally:
        _document.reset(token)


def write_json(data: Any) -> None:
    """Write a command's result to standard output as JSON."""
    out = _document.get() or sys.stdout
    out.write(json.dumps(data, indent=1, default=str) + "\n")


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


def folder(option: str, path: Path, names: Sequence[str] = (), overwrite: bool = False) -> None:
    """Make sure that files can be written into a folder, which is there or can be made.

    Args:
        option: That named it.
        path: The folder; only its last part may be missing.
        names: Files that will be written.
        overwrite: Whether they may exist.

    Raises:
        LigerMultiError: The folder cannot be used, or holds one of the files.
    """
    if path.exists() and not path.is_dir():
        raise LigerMultiError(f"{option} {shown_path(path)} is not a folder")
    parent = path if path.is_dir() else path.parent
    if not parent.is_dir():
        raise LigerMultiError(
            f"{option} {shown_path(path)} cannot be made: there is no folder {shown_path(parent)}"
        )
    _writable(option, parent)
    _refuse_existing([path / name for name in names], overwrite)


def file(option: str, path: Path, suffix: str, overwrite: bool = False) -> None:
    """Make sure that a file can be written.

    Raises:
        LigerMultiError: It has another suffix, cannot be written or exists.
    """
    if path.suffix.lower() != suffix:
        raise LigerMultiError(f"{option} must end with {suffix}, got {shown_path(path)}")
    if path.is_dir() or not path.parent.is_dir():
        problem = "is a folder" if path.is_dir() else "cannot be written: there is no such folder"
        raise LigerMultiError(f"{option} {shown_path(path)} {problem}")
    _writable(option, path.parent)
    _refuse_existing([path], overwrite)


def _writable(option: str, directory: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise LigerMultiError(
            f"{option} cannot write into {shown_path(directory)}: {error.strerror or error}"
        ) from error


def _refuse_existing(files: Sequence[Path], overwrite: bool) -> None:
    missing = [str(path) for path in files if os.path.lexists(path)]
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
