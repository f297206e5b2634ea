"""Time and memory of the examples with ``--tiny``: ``python -m benchmarks.examples --store``.

Each example runs once as a user starts it, downloads nothing and has a folder of its own. Seconds
are those of the wall clock and those of the processor, the time of imports included; memory is what
the largest of its processes held. The load of the machine before the run stands beside them: what
else runs makes the first of these numbers larger.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import store
from liger_multi.bench import report

FOLDER = store.ROOT / "examples"


def names() -> list[str]:
    """The scripts among the files, by their names without the suffix."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem[0] != "_")


def measured(name: str) -> dict[str, Any]:
    """The row of one example.

    Raises:
        SystemExit: It failed; what it printed is shown.
    """
    load = os.getloadavg()[0]
    paths = [str(store.ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--tiny"]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as said:
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=said)
        _, status, used = os.wait4(process.pid, 0)  # of the process and of those that it started
        seconds = time.perf_counter() - start
        if status:
            said.seek(0)
            raise SystemExit(f"{name} failed:\n{said.read()}")
    return {
        "example": name,
        "seconds": round(seconds, 2),
        "processor_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_bytes": used.ru_maxrss * 1024,
        "load": round(load, 1),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the examples one after the other and keep what they took."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.examples", description=main.__doc__)
    parser.add_argument("examples", nargs="*", default=names(), help="names; all by default")
    store.add_options(parser)
    options = parser.parse_args(arguments)
    head = {"date": store.now(), "commit": options.commit, "versions": report.versions()}
    device = {**report.device_facts(torch.device("cpu")), "cores": os.cpu_count()}
    rows = []
    for name in options.examples:
        rows.append(measured(name))
        print(rows[-1])
    for path in store.keep({"kind": "examples", **head, "device": device, "rows": rows}, options):
        print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
