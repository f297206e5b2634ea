"""Build the environments of trainers, run them without and with their switch, and compare.

``python -m tests.trainers.runs.driver NAME ... --store`` keeps what came out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from ci.results import commit
from ci.venv import packages_of, torch_arguments
from tests.trainers.runs import RESULTS, ROOT, Run, Trainer, trainers

TOLERANCE = {"rel_tol": 1e-4, "abs_tol": 1e-6}
"""Numbers are compared as the trainer logs them; some round to four digits."""
LOGGED = re.compile(r"^(loss|grad_norm|eval_loss)$")
SECONDS = 900
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node")
QUIET = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_DISABLED": "true",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONWARNINGS": "ignore",
    "USE_CPU": "1",
}

Curve = dict[tuple[int, str], float]


class RunError(RuntimeError):
    """A run that did not end, or whose numbers are not those of the other."""


# --- the environment ---


def environment(folder: Path, trainer: Trainer) -> Path:
    """The interpreter of a trainer's environment, which is made where the table changed."""
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == trainer.contents:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    pinned = folder / "torch.txt"
    pinned.write_text(f"{trainer.torch}\n", encoding="utf-8")
    subprocess.run([*pip, *torch_arguments(trainer.torch, "")], check=True)
    subprocess.run([*pip, "-c", str(pinned), "PyYAML", *trainer.install], check=True)
    if trainer.without_dependencies:
        alone = ["--no-deps", "--ignore-requires-python", *trainer.without_dependencies]
        subprocess.run([*pip, *alone], check=True)
    if trainer.removed:
        subprocess.run([*pip[:-1], "uninstall", "--yes", *trainer.removed], check=True)
    for name in trainer.empty:
        (packages_of(folder) / f"{name}.py").touch()
    stamp.write_text(trainer.contents, encoding="utf-8")
    return python


def versions(python: Path, trainer: Trainer) -> dict[str, str]:
    """What is installed of the packages that decide."""
    text = [*trainer.install, *trainer.without_dependencies]
    names = {re.split(r"[=<>\[ ]", one)[0] for one in text} & KNOWN_PACKAGES
    names |= {"torch", "transformers"}
    done = subprocess.run(
        [str(python), "-c", VERSIONS, *sorted(names)], check=True, capture_output=True, text=True
    )
    versions: dict[str, str] = json.loads(done.stdout)
    return {"python": platform.python_version(), **versions}


VERSIONS = """
import importlib.metadata as m, json, sys
print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))
"""
KNOWN_PACKAGES = frozenset(
    [
        "trl",
        "peft",
        "accelerate",
        "datasets",
        "llamafactory",
        "ms-swift",
        "axolotl",
        "torchtitan",
        "verl",
        "megatron-core",
    ]
)


# --- one run ---


def filled(options: Mapping[str, Any], places: Mapping[str, Path]) -> dict[str, Any]:
    """Options with the folders in them."""

    def value(option: Any) -> Any:
        if isinstance(option, str):
            return option.format(**places)
        if isinstance(option, list):
            return [value(one) for one in option]
        return {k: value(v) for k, v in option.items()} if isinstance(option, dict) else option

    return {name: value(option) for name, option in options.items()}


def flags(options: Mapping[str, Any]) -> Iterator[str]:
    """Options as ``--name value``."""
    for name, value in options.items():
        yield f"--{name}"
        yield from map(str, value) if isinstance(value, list) else [str(value)]


def assignments(options: Mapping[str, Any]) -> Iterator[str]:
    """Options as ``name=value``."""
    yield from (f"{name}={value}" for name, value in options.items())


ON_COMMAND_LINE = {"flags": flags, "assignments": assignments}


class Bench:
    """Runs of one trainer, in a folder of their own."""

    def __init__(self, python: Path, trainer: Trainer, folder: Path) -> None:
        self.python, self.trainer, self.folder = python, trainer, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.environment = {**os.environ, **QUIET, **trainer.environment, "PYTHONPATH": str(ROOT)}
        self._started(["tests.trainers.runs.setting", str(folder)], folder / "setting.log")

    def _started(self, command: list[str], log: Path) -> None:
        full = [str(self.python), "-m", *command]
        with log.open("w", encoding="utf-8") as out:
            done = subprocess.run(
                full,
                cwd=self.folder,
                env=self.environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=SECONDS,
                check=False,
            )
        if done.returncode:
            last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
            raise RunError("\n".join([f"{' '.join(command)} ({log}):", *last]))

    def run(self, name: str, run: Run, switched: bool) -> tuple[Curve, dict[str, int]]:
        """Numbers that the trainer logged, and calls of operators."""
        out = self.place(name, switched)
        shutil.rmtree(out, ignore_errors=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        places = {name: self.folder / name for name in ("model", "words", "teacher", "data")}
        places |= {"out": out, "code": Path(__file__).parent, "package": ROOT / "liger_multi"}
        places["before"] = self.place(run.resumes, False) if run.resumes else out
        every = {**self.trainer.options, **run.options}
        if switched:
            every |= run.switch or self.trainer.switch
        calls = out.with_suffix(".calls.json")
        command = ["tests.trainers.runs.launch", str(calls) if switched else "-", run.module]
        command += [*run.arguments, *self._options(filled(every, places), out)]
        if run.processes > 1:
            command = [*TORCHRUN, str(run.processes), "-m", *command]
        self._started(command, out.with_suffix(".log"))
        row = self.curve(name, switched)
        return row, json.loads(calls.read_text(encoding="utf-8")) if switched else {}

    def curve(self, name: str, switched: bool) -> Curve:
        """What a run logged."""
        out = self.place(name, switched)
        if not self.trainer.printed:
            return curve(out)
        return printed(out.with_suffix(".log"), self.trainer.printed)

    def _options(self, options: dict[str, Any], out: Path) -> list[str]:
        written = ON_COMMAND_LINE.get(self.trainer.written)
        if written:
            return [*written(options)]
        file = out.with_suffix(".yaml")
        file.write_text(yaml.safe_dump(options), encoding="utf-8")
        return [str(file)]

    def place(self, name: str, switched: bool) -> Path:
        """The folder of a run."""
        return self.folder / "runs" / re.sub(r"\W+", "-", name) / ("with" if switched else "stock")


def curve(out: Path) -> Curve:
    """What a trainer of transformers logged: the state beside the last checkpoint below a folder.

    Raises:
        RunError: There is none.
    """
    states = [json.loads(p.read_text(encoding="utf-8")) for p in out.rglob("trainer_state.json")]
    if not states:
        raise RunError(f"no trainer_state.json below {out}")
    history = max(states, key=lambda state: len(state["log_history"]))["log_history"]
    return {(row["step"], name): row[name] for row in history for name in row if LOGGED.match(name)}


def printed(log: Path, pattern: str) -> Curve:
    """What a trainer printed, where the pattern is found in a line.

    Raises:
        RunError: It is found nowhere.
    """
    rows = [one.groupdict() for one in re.finditer(pattern, log.read_text(encoding="utf-8"))]
    if not rows:
        raise RunError(f"no {pattern} in {log}")
    return {
        (int(row["step"]), name): float(row[name])
        for row in rows
        for name in row
        if name != "step" and row[name] is not None  # a group that some lines lack
    }


def continued(stock: Curve, ours: Curve) -> Curve:
    """What a resumed run, which prints the steps after its checkpoint, is compared with.

    Raises:
        RunError: It started at the first step.
    """
    first = min(step for step, _ in ours)
    if first == min(step for step, _ in stock):
        raise RunError(f"resumed at step {first}, which is the first")
    return {at: value for at, value in stock.items() if at[0] >= first}


# --- the comparison ---


def difference(stock: Curve, ours: Curve) -> float:
    """The largest difference, relative where a number is larger than 1.

    Raises:
        RunError: Other numbers were logged, they differ, or nothing was learned.
    """
    if stock.keys() != ours.keys():
        raise RunError(f"logged {sorted(stock)} without the switch, {sorted(ours)} with it")
    if len(set(stock.values())) < 3:
        raise RunError(f"nothing to compare: {stock}")
    wrong = [
        f"step {step}, {name}: {stock[step, name]} and {ours[step, name]}"
        for step, name in stock
        if not math.isclose(stock[step, name], ours[step, name], **TOLERANCE)
    ]
    if wrong:
        raise RunError("without and with the switch: " + "; ".join(wrong))
    return max(abs(a - ours[k]) / max(abs(a), 1.0) for k, a in stock.items())


def compared(bench: Bench, name: str, run: Run) -> dict[str, Any]:
    """Run without and with the switch; what is kept of it.

    Raises:
        RunError: The numbers differ, or an operator of the table was not called.
    """
    stock = bench.curve(run.resumes, False) if run.resumes else bench.run(name, run, False)[0]
    ours, calls = bench.run(name, run, True)
    if run.resumes and bench.trainer.printed:
        stock = continued(stock, ours)
    missing = sorted({*run.calls} - {*calls})
    if missing:
        raise RunError(f"{', '.join(missing)} never called; called were {', '.join(sorted(calls))}")
    losses = [value for (_, quantity), value in sorted(stock.items()) if quantity == "loss"]
    return {
        "steps": max(step for step, _ in stock),
        "logged": sorted({quantity for _, quantity in stock}),
        "first": losses[0],
        "last": losses[-1],
        "difference": difference(stock, ours),
        "calls": dict(sorted(calls.items())),
    }


# --- the command ---


def provenance() -> dict[str, str]:
    """Of a run: its day, and the commit; ``+`` after that stands for other changes than results."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {"date": now.date().isoformat(), "commit": commit("tests/trainers/runs/results.json")}


def ran(
    name: str, trainer: Trainer, folder: Path, only: list[str], head: dict[str, str]
) -> tuple[dict[str, Any], int]:
    """Run a trainer; what is kept, and how many runs failed."""
    python = environment(folder / "environment", trainer)
    bench = Bench(python, trainer, folder)
    kept, failures = {}, 0
    for title, run in trainer.runs.items():
        if only and title not in only:
            continue
        try:
            kept[title] = {**head, **compared(bench, title, run)}
            print(f"{name}, {title}: {kept[title]}", flush=True)
        except RunError as error:
            failures += 1
            print(f"{name}, {title}: FAILED\n{error}", flush=True)
    return {"versions": versions(python, trainer), "runs": kept}, failures


def store(name: str, trainer: Trainer, kept: dict[str, Any]) -> None:
    """Keep runs; those of the table that did not run now stay as they are."""
    every = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    runs = {**every.get(name, {}).get("runs", {}), **kept["runs"]}
    kept = {**kept, "runs": {title: runs[title] for title in trainer.runs if title in runs}}
    RESULTS.write_text(json.dumps({**every, name: kept}, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Run, and with ``--store`` keep; 1 where a run failed."""
    table = trainers()
    parser = argparse.ArgumentParser(
        prog="python -m tests.trainers.runs.driver", description=main.__doc__
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(table)}")
    parser.add_argument("--only", action="append", default=[], metavar="RUN")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "trainers")
    parser.add_argument("--store", action="store_true", help=f"keep in {RESULTS.name}")
    options = parser.parse_args()
    unknown = sorted({*options.names} - {*table})
    if unknown:
        parser.error(f"no trainer {', '.join(unknown)}; there are {', '.join(table)}")
    head = provenance()
    if options.store and head["commit"].endswith("+"):
        parser.error(f"--store keeps the commit that ran; there are changes on {head['commit']}")
    failed = 0
    for name in options.names or [n for n, trainer in table.items() if trainer.runs]:
        kept, failures = ran(name, table[name], options.folder.resolve() / name, options.only, head)
        failed += failures
        if options.store and not failures:
            store(name, table[name], kept)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
