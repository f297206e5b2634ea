"""Bring ``ci/constraints/pinned.txt`` up to date: ``python -m ci.pins`` of the newest environment.

``make pins`` builds that environment, without constraints, and runs this in it. The names in the
file stay; each gets the version that is installed.
"""

from __future__ import annotations

import importlib.metadata
import re

from ci.venv import PINNED, installed

PIN = re.compile(r"^([\w.-]+)==(\S+)$", re.MULTILINE)


def updated(text: str) -> str:
    """The file's text with the installed versions; what is not installed stays as it is."""

    def current(match: re.Match[str]) -> str:
        name = match[1]
        return f"{name}=={importlib.metadata.version(name)}" if installed(name) else match[0]

    return PIN.sub(current, text)


def main() -> int:
    """Write the file and print what changed."""
    old = PINNED.read_text(encoding="utf-8")
    new = updated(old)
    PINNED.write_text(new, encoding="utf-8")
    before, after = dict(PIN.findall(old)), dict(PIN.findall(new))
    for name, version in after.items():
        if before[name] != version:
            print(f"{name} {before[name]} -> {version}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
