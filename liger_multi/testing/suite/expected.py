"""Expected failures: a text file with one test id and its reason per line.

::

    # id                                              reason
    test_forward_and_backward[softmax-toy-*-bfloat16]  # rounds twice, https://example.org/1

``*`` in an id stands for any text. A test that passes unexpectedly fails, so that its line goes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Expected:
    """One line: the tests it means, and why they fail."""

    test: str
    reason: str

    def matches(self, item: pytest.Item) -> bool:
        """Whether a test has this id; the path of its file may be left out."""
        pattern = ".*".join(map(re.escape, self.test.split("*")))
        return re.fullmatch(f"(.*::)?{pattern}", item.nodeid) is not None


def read(file: Path) -> list[Expected]:
    """The lines of a file.

    Raises:
        pytest.UsageError: The file cannot be read, or a line gives no reason.
    """
    found = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise pytest.UsageError(f"expected failures cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        test, _, reason = (part.strip() for part in line.partition("#"))
        if test and not reason:
            raise pytest.UsageError(
                f"{file.name}:{number}: an expected failure needs a reason, as in "
                f"'test id  # reason'; got {line!r}"
            )
        if test:
            found.append(Expected(test, reason))
    return found


def mark(items: Sequence[pytest.Item], entries: Iterable[Expected]) -> list[Expected]:
    """Mark every test that an entry means; returns the entries that mean none."""
    unused = []
    for entry in entries:
        meant = [item for item in items if entry.matches(item)]
        for item in meant:
            item.add_marker(pytest.mark.xfail(reason=entry.reason, strict=True))
        unused += [] if meant else [entry]
    return unused
