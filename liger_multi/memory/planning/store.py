"""Results of simulations of an architecture, kept in a file between plans.

One JSON file per architecture, in the folder that ``LIGER_MULTI_CACHE`` names, else in the user's
cache folder. A file counts only for the very sources, packages and configuration that it was
written with, and only if its checksum is right; otherwise it is ignored. It is replaced as a whole,
so that a reader never sees half of one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from liger_multi.dispatch.config import current

VARIABLE = "LIGER_MULTI_CACHE"
FORM = 1  # of a file
MOST_BYTES = 2**25  # of a file; what this process did not ask for leaves first

Entry = TypeVar("Entry")


def folder() -> Path:
    """The folder of the cache files."""
    path = os.environ.get(VARIABLE)
    if path:
        return Path(path)
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache"), "liger_multi")


def digest(data: Any) -> str:
    """Hash plain data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()


# --- what a simulation depends on, besides the architecture ---


def environment() -> dict[str, str]:
    """Versions of everything that runs, the sources of this library and its configuration."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": digest(sorted(_packages())),
        "sources": sources(Path(__file__).parents[2]),
        "configuration": digest([layer.key for layer in current().layers]),
    }


def _packages() -> Iterator[str]:
    """Names and versions of what is installed, as the folders of their metadata are called."""
    for directory in sys.path:
        with contextlib.suppress(OSError), os.scandir(directory) as entries:
            yield from (e.name for e in entries if e.name.endswith((".dist-info", ".egg-info")))


@functools.cache
def sources(package: Path) -> str:
    """A name for the code and launch tables in a folder, and in those that it links to."""
    hasher = hashlib.sha256()
    for directory, folders, names in os.walk(package, followlinks=True):
        folders.sort()
        for name in sorted(names):
            if name.endswith((".py", ".yaml")):
                hasher.update(name.encode())
                hasher.update(Path(directory, name).read_bytes())
    return hasher.hexdigest()


# --- a file ---


class Store:
    """Entries by section and name; with a path, those of earlier processes are among them.

    Args:
        path: The file; None keeps nothing.
        key: Hash of what entries depend on; a file with another key is replaced.
    """

    def __init__(self, path: Path | None = None, key: Mapping[str, Any] | None = None) -> None:
        self._path, self._key = path, digest(key)
        self._entries: dict[str, dict[str, Any]] = self._load() if path is not None else {}
        self._used: dict[str, dict[str, Any]] = {}
        self._changed = False

    @classmethod
    def of(cls, identity: Any) -> Store:
        """The store of an architecture.

        Args:
            identity: Plain data that two architectures share only if they are one.
        """
        name = f"{digest(identity)[:32]}.json"
        return cls(folder() / "plans" / name, {"identity": identity, **environment()})

    def read(self, section: str, name: str, decode: Callable[[Any], Entry]) -> Entry | None:
        """An entry, or None if there is none that can be decoded."""
        data = self._entries.get(section, {}).get(name)
        if data is None:
            return None
        try:
            entry = decode(data)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return None
        self._used.setdefault(section, {})[name] = data
        return entry

    def names(self, section: str) -> list[str]:
        """The names of all entries of a section."""
        return list(self._entries.get(section, ()))

    def write(self, section: str, name: str, data: Any) -> None:
        """Set an entry; :meth:`save` keeps it."""
        entries = self._entries.setdefault(section, {})
        self._changed = self._changed or entries.get(name) != data
        entries[name] = self._used.setdefault(section, {})[name] = data

    def entries(self) -> dict[str, dict[str, Any]]:
        """All entries by section and name, as plain data."""
        return self._entries

    def add(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        """Set entries of another store of the same architecture."""
        for section, new_entries in entries.items():
            for name, data in new_entries.items():
                self.write(section, name, data)

    def save(self) -> None:
        """Write the file if there is anything new; nothing happens where that is not allowed."""
        if self._path is None or not self._changed:
            return
        stored = self._load()  # with what another process wrote meanwhile
        for section, entries in self._entries.items():
            stored.setdefault(section, {}).update(entries)
        text = json.dumps(stored)
        if len(text) > MOST_BYTES:
            text = json.dumps(self._used)
        with contextlib.suppress(OSError):
            self._replace(text)
            self._changed = False

    def _replace(self, text: str) -> None:
        assert self._path is not None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self._path.parent, suffix=".part")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(f"{self._head(text)}\n{text}")
            os.replace(name, self._path)
        except BaseException:
            os.unlink(name)
            raise

    def _head(self, text: str) -> str:
        return f"{FORM} {self._key} {hashlib.sha256(text.encode()).hexdigest()}"

    def _load(self) -> dict[str, dict[str, Any]]:
        assert self._path is not None
        try:
            head, _, text = self._path.read_text(encoding="utf-8").partition("\n")
            if head == self._head(text):
                return json.loads(text)  # type: ignore[no-any-return]
        except (OSError, ValueError):
            pass
        return {}
