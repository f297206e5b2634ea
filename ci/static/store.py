"""What was read of launches, kept on disk: one file of JSON lines in ``.cache/static``.

A launch is known by the source of its kernel, all that the compiler was told, and the code that
reads. Lines are written as they come, so a run that was stopped goes on where it was, and one after
a change reads what the change touched.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton.runtime.jit import JITFunction

from ci.sources import text_of
from ci.static import StaticCase

CACHE = Path(__file__).parent.parent.parent / ".cache" / "static"


class Store(dict[str, Any]):
    """What was read, by key; :meth:`keep` writes it down too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                key, facts = json.loads(line)
            except ValueError:  # somebody was stopped while writing
                continue
            self[key] = facts

    def keep(self, key: str, facts: Any) -> None:
        """Add what was read of one launch."""
        self[key] = facts
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # a line break first: half a line of somebody who was stopped spoils no other
        with self.path.open("ab", buffering=0) as file:
            file.write(f"\n{json.dumps([key, facts])}".encode())


@functools.cache
def store(name: str) -> Store:
    """The store with a name."""
    return Store(CACHE / f"{name}.jsonl")


@functools.cache
def _version(*readers: ModuleType) -> str:
    """The compiler, and the code that reads what it made."""
    sources = (Path(str(module.__file__)).read_text(encoding="utf-8") for module in readers)
    trees = [ast.dump(ast.parse(source)) for source in sources]
    return f"{triton.__version__} {hashlib.sha256(repr(trees).encode()).hexdigest()}"


def formulas(case: StaticCase) -> tuple[str, ...]:
    """The sources of jitted functions among the constants of a launch."""
    constants = case.constants.values()
    return tuple(text_of(value) for value in constants if isinstance(value, JITFunction))


def key_of(case: StaticCase, readers: tuple[ModuleType, ...], *more: object) -> str:
    """The key of a launch: what is read depends on nothing else.

    Args:
        case: The launch.
        readers: Modules that read it.
        more: What else it depends on, such as the target.
    """
    parts = (_version(*readers), text_of(case.kernel), *formulas(case), case.identity, *more)
    return hashlib.sha256(repr(parts).encode()).hexdigest()
