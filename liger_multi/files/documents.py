"""YAML and JSON files that people write, read strictly and written whole; what JSON may hold.

What a file may hold is the part of YAML that configurations need: mappings with text as keys,
lists, text, decimal numbers, ``true``, ``false`` and ``null``, and merge keys (``<<: *base``).
Everything else is a :class:`ConfigurationError` that names the file and the line: a key given
twice, tags, several documents, and files that are too large, nested too deep or made large by
aliases. ``on``, ``off``, ``yes``, ``no`` and dates are text.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from liger_multi.errors import ConfigurationError, shown, shown_path

MERGE = "<<"
MOST_BYTES = 2**20
MOST_NODES = 10_000  # values of a YAML file, those of aliases counted each time
MOST_DEPTH = 32
MOST_DIGITS = 40
JSON_BYTES = 2**26  # a model's configuration may name a hundred thousand classes

# numbers by the rules of YAML 1.1, as PyYAML writes, and of 1.2 alike
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+][0-9]+)?")
_CONSTANTS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_FILE_TYPES = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


def read_yaml(path: str | os.PathLike[str], what: str) -> Any:
    """The content of a YAML file; None for an empty one.

    Args:
        path: Of the file.
        what: What the file is to its reader, such as ``the configuration``.

    Raises:
        ConfigurationError: It cannot be read, or is not what this module takes for YAML.
    """
    return yaml_of(_text_of(path, what, "YAML", MOST_BYTES), os.fspath(path))


def yaml_of(text: str, name: str) -> Any:
    """The content of a YAML text; None for an empty one.

    Args:
        text: What the file holds.
        name: Of the file, for messages.

    Raises:
        ConfigurationError: It is not what this module takes for YAML.
    """
    import yaml

    try:
        return _Builder(text).document()
    except yaml.MarkedYAMLError as error:
        message = ", ".join(part for part in (error.problem, error.context) if part)
        mark = error.problem_mark or error.context_mark
        position = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = f"{position}{message}"
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        problem = f"line {line}: it holds the character {chr(error.character)!a}"
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # of characters beyond Unicode
        problem = f"{type(error).__name__}: {error}"
    raise ConfigurationError(f"{shown_path(name)} is not YAML: {problem}")


def read_json(path: str | os.PathLike[str], what: str) -> Any:
    """The content of a JSON file.

    Raises:
        ConfigurationError: It cannot be read, or is not JSON.
    """
    text = _text_of(path, what, "JSON", JSON_BYTES)
    try:
        return json.loads(text)
    except RecursionError:
        problem = "it is nested too deep"
    except ValueError as error:  # wrong syntax, or an integer of thousands of digits
        problem = str(error)
    raise ConfigurationError(f"{shown_path(path)} is not JSON: {problem}")


def plain(value: Any) -> Any:
    """Numbers that JSON has no word for, as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def _nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _text_of(path: str | os.PathLike[str], what: str, form: str, limit: int) -> str:
    """The text of a regular file; a pipe without a writer is refused, not waited for."""
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(name, str):
        raise ConfigurationError(
            f"{what} must be named by text or a path, got {type(path).__name__} {shown(path)}"
        )
    try:
        with open(os.path.expanduser(name), "rb", opener=_nonblocking) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                file_type = next((text for test, text in _FILE_TYPES if test(mode)), "a device")
                raise OSError(f"it is {file_type}, not a file")
            data = file.read(limit + 1)
    except (OSError, ValueError) as error:  # a ValueError of NUL or surrogates in the name
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"cannot read {what} {shown_path(name)}: {reason}") from error
    if len(data) > limit:
        raise ConfigurationError(
            f"cannot read {what} {shown_path(name)}: it is larger than {limit // 2**20} MiB"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{shown_path(name)} is not {form}: its text is not UTF-8, byte {error.start} is "
            f"0x{data[error.start]:02x}"
        ) from error


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, or leave it as it is: a new file takes its place, but not that of a device.

    Raises:
        OSError: It must not be written to, or the disk is full.
    """
    target = path.resolve()
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    part = target.with_name(f".{target.name}.part")
    try:
        part.write_bytes(data)
        if target.exists():
            part.chmod(target.stat().st_mode & 0o777)
        os.replace(part, target)
    except OSError as error:
        part.unlink(missing_ok=True)
        if error.errno != errno.EBUSY:  # a file that is mounted by itself stays where it is
            raise
        target.write_bytes(data)


class _Builder:
    """Values from the events of PyYAML's parser, which runs in constant stack."""

    def __init__(self, text: str) -> None:
        import yaml

        self._yaml = yaml
        self._events: Iterator[Any] = yaml.parse(text, Loader=yaml.BaseLoader)
        self._nodes = 0
        self._anchors: dict[str, tuple[Any, int]] = {}

    def document(self) -> Any:
        """The only document."""
        next(self._events)
        if isinstance(next(self._events), self._yaml.StreamEndEvent):
            return None
        value = self._value(next(self._events), 0)
        next(self._events)
        next_event = next(self._events)
        if not isinstance(next_event, self._yaml.StreamEndEvent):
            self._refuse(next_event, "a second document begins, one is wanted")
        return value

    def _refuse(self, event: Any, problem: str) -> None:
        raise self._yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)

    def _count(self, event: Any, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > MOST_NODES:
            self._refuse(event, f"more than {MOST_NODES} values, those of aliases counted")

    def _value(self, event: Any, depth: int) -> Any:
        if isinstance(event, self._yaml.AliasEvent):
            anchor = str(event.anchor)
            if anchor not in self._anchors:
                self._refuse(event, f"the alias {shown(anchor)} has no anchor before it")
            value, nodes = self._anchors[anchor]
            self._count(event, nodes)
            return value
        self._count(event, 1)
        begin = self._nodes
        if depth >= MOST_DEPTH:
            self._refuse(event, f"nested deeper than {MOST_DEPTH} levels")
        if event.tag is not None:
            self._refuse(event, f"the tag {shown(event.tag)} is not supported")
        if isinstance(event, self._yaml.ScalarEvent):
            value = self._scalar(event)
        elif isinstance(event, self._yaml.SequenceStartEvent):
            value = self._sequence(depth)
        else:
            value = self._mapping(depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = (value, 1 + self._nodes - begin)
        return value

    def _sequence(self, depth: int) -> list[Any]:
        items = []
        while not isinstance(event := next(self._events), self._yaml.SequenceEndEvent):
            items.append(self._value(event, depth + 1))
        return items

    def _mapping(self, depth: int) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        lines: dict[str, int] = {}
        while not isinstance(event := next(self._events), self._yaml.MappingEndEvent):
            key = self._value(event, depth + 1)
            if not isinstance(key, str):
                self._refuse(event, f"a key must be text, got {shown(key)}; quote it")
            if key in lines:
                problem = f"the key {shown(key)} is given twice, first on line {lines[key]}"
                self._refuse(event, problem)
            lines[key] = event.start_mark.line + 1
            value_event = next(self._events)
            entries[key] = self._value(value_event, depth + 1)
            if key == MERGE and event.implicit[0]:
                merged = self._merged(entries.pop(key), value_event)
        return {**merged, **entries}

    def _merged(self, value: Any, event: Any) -> dict[str, Any]:
        """The keys of the mappings of a merge key; of two mappings the first one counts."""
        mappings = value if isinstance(value, list) else [value]
        if not mappings or not all(isinstance(mapping, dict) for mapping in mappings):
            self._refuse(event, f"the merge key << takes mappings, got {shown(value)}")
        entries: dict[str, Any] = {}
        for mapping in mappings:
            entries = {**mapping, **entries}
        return entries

    def _scalar(self, event: Any) -> Any:
        """Text, or what a plain scalar stands for; ``0x10``, ``010`` and ``1:30`` are text."""
        text: str = event.value
        if not event.implicit[0]:
            return text
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if _INTEGER.fullmatch(text):
            if len(text) > MOST_DIGITS:
                self._refuse(event, f"a number of {len(text)} digits")
            return int(text)
        if _FLOAT.fullmatch(text):
            if len(text) > MOST_DIGITS or not math.isfinite(float(text)):
                self._refuse(event, f"the number {shown(text)} is out of range")
            return float(text)
        return text
