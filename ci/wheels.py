"""Wheels of other packages, read without importing anything of them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def downloaded(package: str) -> Iterator[Path]:
    """The wheel of a requirement such as ``name==1.0``, while the block runs."""
    with tempfile.TemporaryDirectory() as folder:
        fetch = ["download", "--quiet", "--no-deps", "--only-binary=:all:"]
        fetch += ["--python-version", "3.12", "-d", folder]  # which every package has a wheel for
        subprocess.run([sys.executable, "-m", "pip", *fetch, package], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        yield wheel
