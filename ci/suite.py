"""Run the suite by its parts: ``python -m ci.suite``, which `make test` calls.

On a CPU these are: the native tests, kernels interpreted by Triton, kernels cross-compiled, and the
Ascend levels on a simulated NPU. ``--backend cuda`` is one run on that device. ``--slow`` adds the
slow tests, and DeepSpeed and bitsandbytes in a folder of their own. A part that this machine cannot
run is named with its reason, on the screen and among the results. Other arguments go to pytest.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ci import results
from ci.npu import environment

INTERPRETED = (
    "tests/ops/test_ops.py",
    "tests/ops/test_isolation.py",
    *sorted(path.as_posix() for path in Path("tests").glob("*/test_triton*.py")),
)
COMPILED = "tests/kernels/test_static.py"
ASCEND = ("tests/kernels/test_npu.py", "tests/kernels/test_npu_kernels.py", "tests/ops/test_ops.py")
NO_TESTS = 5
"""The exit status of pytest where further arguments select no test."""
ASCEND_SHARE = 12
"""`make test` runs every twelfth sample on the simulated NPU, `make test-npu` all that are fast."""


@dataclass(frozen=True)
class Run:
    """One call of pytest.

    Attributes:
        name: Of the part, and of its result.
        arguments: What it runs.
        environment: What is added to the environment.
        python: The interpreter, that of this process without one.
        parallel: Whether several processes share it.
        refusal: Why this machine cannot run it.
    """

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable
    parallel: bool = True
    refusal: str | None = None


def ascend(venv: Path, share: int) -> Iterator[Run]:
    """The levels on a simulated NPU, programs in the other order, and kernels interpreted."""
    refusal = environment.refusal()
    if refusal is not None:
        yield Run("npu-simulated", (), refusal=f"the Ascend levels {refusal}")
        return
    stamp = venv / ".stamp"
    built_at = stamp.stat().st_mtime if stamp.exists() else 0.0
    if built_at < Path(environment.__file__).stat().st_mtime:
        subprocess.run([sys.executable, "-m", "ci.npu.environment", str(venv)], check=True)
        stamp.touch()
    python = str(venv / "bin" / "python")
    base = {"LD_LIBRARY_PATH": str(venv / "cann"), "CANN_STUB_DEVICES": "1"}
    plugin = ("-p", "ci.npu.simulate", "--backend", "npu", "--share", str(share))
    again = (*plugin, *ASCEND[1:])
    yield Run("npu-simulated", (*plugin, *ASCEND), base, python)
    yield Run("npu-simulated-reversed", again, {**base, "ASCEND_GRID": "reversed"}, python)
    yield Run("npu-simulated-interpreted", again, {**base, "TRITON_INTERPRET": "1"}, python)


def on_cpu(venv: Path, slow: bool) -> Iterator[Run]:
    """Everything that a machine without a device can run."""
    triton = None if importlib.util.find_spec("triton") else "no Triton on this machine"
    yield Run("native", (f"--ignore={COMPILED}",))
    kernels = ("--backend", "triton", *INTERPRETED)
    yield Run("interpreted", kernels, {"TRITON_INTERPRET": "1"}, refusal=triton)
    # it compiles for all targets in processes of its own
    yield Run("cross-compiled", (COMPILED,), parallel=False, refusal=triton)
    yield from ascend(venv, 1 if slow else ASCEND_SHARE)


def runs(device: str, venv: Path, slow: bool) -> Iterator[Run]:
    """What a call of the command line runs."""
    if device == "ascend":
        yield from ascend(venv, 1)
        return
    on_device = ("--backend", device) if device else ()
    yield from [Run(device, on_device)] if device else on_cpu(venv, slow)
    if slow:
        packages = str(Path(sys.prefix) / "adapters")
        path = os.pathsep.join(filter(None, (packages, os.environ.get("PYTHONPATH"))))
        chosen = (*on_device, "-k", "deepspeed or bitsandbytes")
        yield Run(f"{device}-adapters".lstrip("-"), chosen, {"PYTHONPATH": path})


def command(run: Run, options: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """The call of pytest."""
    words = [run.python, "-W", "ignore"] if run.python != sys.executable else [run.python]
    words += ["-m", "pytest", "-q", *(["--part", options.part] if options.part else [])]
    if run.name.startswith("npu-") or not options.slow:
        words += ["-m", "not slow"]
    if run.parallel and options.workers > 1:
        words += ["-n", str(options.workers), "--dist", "worksteal"]
    if options.results:
        base = options.results / run.name
        words += [f"--results={base}.json", f"--junitxml={base}.xml"]
    return [*words, *run.arguments, *rest]


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run every part; 1 if one fails."""
    parser = argparse.ArgumentParser(description="Run the suite by its parts.")
    parser.add_argument("--backend", default="", help="a device's, or ascend for the levels alone")
    parser.add_argument("--slow", action="store_true", help="with the slow tests")
    parser.add_argument("--part", default="", metavar="i/n", help="the ith of n parts of each run")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--results", type=Path, help="folder of results")
    parser.add_argument("--npu-venv", type=Path, default=Path(".venv-npu"))
    options, rest = parser.parse_known_args(arguments)
    failed = []
    for run in runs(options.backend, options.npu_venv.absolute(), options.slow):
        print(f"== {run.name}" + (f": not run: {run.refusal}" if run.refusal else ""), flush=True)
        if run.refusal is None:
            environment_of = {**os.environ, **run.environment}
            done = subprocess.run(command(run, options, rest), env=environment_of)
            none_selected = done.returncode == NO_TESTS and bool(rest)
            failed += [run.name] * (bool(done.returncode) and not none_selected)
        elif options.results:
            path, note = options.results / f"{run.name}.json", f"not run: {run.refusal}"
            results.write(path, [], torch.device("cpu"), {}, 0.0, note)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
