"""The alias against the real liger-kernel: ``python -m ci.liger FOLDER``.

FOLDER is where the real package is installed by itself::

    pip install --target FOLDER --no-deps liger-kernel==0.8.5

Both packages run the cases of this folder, each in a process of its
own on the CPU, and what they return is compared. The real package's kernels are interpreted, which
takes some minutes. ``docs/liger-differences.md`` is written with the result; with ``--check`` an
unexplained difference, or an explanation of none, is an error and nothing is written. With
``--device cuda`` both run their kernels there, ``--processes`` at a time share the cases, and what
differs is kept in ``devices.json`` beside this file, which the page is written with.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ci.liger.interpreted import VARIABLE

PAGE = Path(__file__).parents[2] / "docs" / "liger-differences.md"
DEVICES = Path(__file__).with_name("devices.json")
"""What differs on devices, by the device's name."""
Run = dict[str, Any]


def both(
    folder: Path,
    device: str = "cpu",
    processes: int = 1,
    seconds: float | None = None,
    results: Path | None = None,
    only: str = "",
) -> tuple[Run, Run, bool]:
    """What the cases return with the package in a folder and with the alias, and whether all ran.

    Args:
        folder: Where the real package is.
        device: Where the cases run.
        processes: How many share the cases of a package.
        seconds: When processes are ended; of what they did not reach there is no result.
        results: Where they leave their results; nowhere if it is not given.
        only: A pattern for the titles of groups.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as temporary:
        made = results or Path(temporary)
        made.mkdir(parents=True, exist_ok=True)
        started = [
            [
                _started(made / f"{who}{part}.pt", place, device, (part, processes), only)
                for part in range(processes)
            ]
            for who, place in (("real", folder), ("alias", None))
        ]
        whole = [_ended(process, deadline) for pairs in started for process, _ in pairs]
        real, alias = ([file for _, file in pairs if file.exists()] for pairs in started)
        return _joined(real), _joined(alias), all(whole)


def _started(
    file: Path, folder: Path | None, device: str, part: tuple[int, int], only: str
) -> tuple[subprocess.Popen[bytes], Path]:
    """A process that runs a part of the cases, with the package in a folder or with the alias."""
    places = [str(folder)] if folder else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*places, os.getcwd()])}
    command = [sys.executable, "-W", "ignore", "-m", "ci.liger.runs", str(file)]
    command += ["--device", device, "--part", *map(str, part), "--only", only]
    command += [] if folder else ["--alias"]
    if folder and device == "cpu":
        environment[VARIABLE] = "1"
    return subprocess.Popen(command, env=environment), file


def _ended(process: subprocess.Popen[bytes], deadline: float | None) -> bool:
    """Wait for a process or end it; whether it ran to its end."""
    try:
        return not process.wait(deadline and max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False


def _joined(files: list[Path]) -> Run:
    """The results of processes that shared the cases."""
    found: Run = {"version": "", "groups": {}, "exact": {}}
    for file in files:
        part = torch.load(file, weights_only=True)
        found["version"] = part["version"]
        for kind in ("groups", "exact"):
            for title, cases in part[kind].items():
                found[kind].setdefault(title, {}).update(cases)
    return found
