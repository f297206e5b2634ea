"""The alias against the real liger-kernel: ``python -m ci.liger FOLDER``.

FOLDER is where the real package is installed by itself::

    pip install --target FOLDER --no-deps liger-kernel==0.8.5

Both packages run :mod:`ci.liger.cases` and :mod:`ci.liger.kernel_cases`, each in a process of its
own on the CPU, and what they return is compared. The real package's kernels are interpreted, which
takes some minutes. ``docs/liger-differences.md`` is written with the result; with ``--check`` an
unexplained difference, or an explanation of none, is an error and nothing is written. With
``--device cuda`` both run their kernels there, and what differs without a reason is printed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ci.liger.interpreted import VARIABLE

PAGE = Path(__file__).parents[2] / "docs" / "liger-differences.md"
Run = dict[str, Any]


def run(folder: Path | None, device: str = "cpu") -> Run:
    """What the cases return with the package in a folder, or with the alias."""
    places = [str(folder)] if folder else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*places, os.getcwd()])}
    with tempfile.TemporaryDirectory() as made:
        file = Path(made) / "result.pt"
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "ci.liger.runs",
            str(file),
            "--device",
            device,
        ]
        command += [] if folder else ["--alias"]
        if folder and device == "cpu":
            environment[VARIABLE] = "1"
        subprocess.run(command, check=True, env=environment)
        found: Run = torch.load(file, weights_only=True)
        return found
