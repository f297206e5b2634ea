"""What a run of the suite leaves: one JSON file, which the page on verification is made of.

``make test BACKEND=cuda RESULTS=build/results`` writes ``cuda.json`` there (and ``cuda.xml`` in the
form of JUnit). Without a backend there are three files: ``native``, ``interpreted`` and
``cross-compiled``. ``python -m ci.results FOLDER`` prints them as a table; ``--keep NAME`` merges
them into ``benchmarks/results/suites.json``, which has the newest result of every part. A part
that the machine cannot run leaves its reason (:mod:`ci.suite`), which the table then says.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "benchmarks" / "results" / "suites.json"
OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


@dataclass(frozen=True)
class Result:
    """One run of the suite.

    Attributes:
        part: Name of the file: a backend, or the part of the suite that ran.
        backends: Backends that were under test.
        device: Where the tensors stood: name, architecture and what else is known.
        versions: Of Python, this library, PyTorch and what it works with.
        commit: What was tested; ``+`` after it stands for uncommitted changes.
        date: When it ended, in UTC.
        counts: Tests by outcome.
        seconds: From the first test to the last.
        note: Anything a reader must know, in a sentence.
        failures: Tests that failed.
        settings: Outcome by setting, of a run under several (:mod:`ci.portable`); of those that
            the machine does not have, the reason.
    """

    part: str
    backends: Sequence[str]
    device: Mapping[str, str]
    versions: Mapping[str, str]
    commit: str
    date: str
    counts: Mapping[str, int]
    seconds: float
    note: str = ""
    failures: Sequence[str] = ()
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def ran(self) -> bool:
        """Whether there was a run: one that could not be leaves its reason in ``note``."""
        return bool(self.counts)

    @property
    def green(self) -> bool:
        """Whether something passed and nothing failed."""
        bad = ("failed", "error", "xpassed")
        return self.counts.get("passed", 0) > 0 and not any(self.counts.get(n) for n in bad)


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version such as ``3.7.1+gitabc``, to compare by."""
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0]))


def commit(*paths: str) -> str:
    """The commit of this checkout, or of ``COMMIT`` where it came without git.

    ``+`` after it stands for changes outside of ``benchmarks`` and of ``paths``.
    """
    if os.environ.get("COMMIT"):
        return os.environ["COMMIT"]
    try:
        head = _git("rev-parse", "HEAD")
        but = [f":!{path}" for path in ("benchmarks", *paths)]
        return head + ("+" if _git("status", "--porcelain", "--", ".", *but) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout.strip()


def device_facts(device: Any) -> dict[str, str]:
    """Name, architecture and memory of a device, as ``liger-multi doctor`` says them."""
    from liger_multi.cli import doctor

    known = {entry["device"]: entry for entry in doctor.devices(doctor.Probes())}
    index = 0 if device.index is None else device.index
    place = str(device) if device.type == "cpu" else f"{device.type}:{index}"
    return {k: str(v) for k, v in known.get(place, {"device": place}).items()}


def write(
    path: Path,
    backends: Sequence[str],
    device: Any,
    counts: Mapping[str, int],
    seconds: float,
    note: str = "",
    failures: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
) -> None:
    """Write the result of the session that ends."""
    from liger_multi.cli import doctor

    now = datetime.datetime.now(datetime.timezone.utc)
    versions = {k: v for k, v in doctor.versions().items() if v != "not installed"}
    versions["python"] = platform.python_version()
    result = Result(
        path.stem,
        backends=list(backends),
        device=device_facts(device),
        versions=versions,
        commit=commit(),
        date=now.isoformat(timespec="seconds"),
        counts={name: counts[name] for name in OUTCOMES if counts.get(name)},
        seconds=round(seconds, 3),
        note=note,
        failures=list(failures),
        settings=settings or {},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")


def read(folder: Path) -> list[Result]:
    """Every result that runs left below a folder, the newest first.

    Raises:
        ValueError: A file is not a result; it is named.
    """
    results = []
    for path in sorted(folder.rglob("*.json")):
        try:
            results.append(Result(**json.loads(path.read_text(encoding="utf-8"))))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is not the result of a suite: {error}") from error
    return newest_first(results)


def newest_first(results: Iterable[Result]) -> list[Result]:
    """Results by their dates."""
    return sorted(results, key=lambda result: result.date, reverse=True)


# --- results that the repository keeps ---


def kept(path: Path = KEPT) -> list[Result]:
    """Every result that the repository keeps, the newest first."""
    return newest_first(one for results in suites(path).values() for one in results)


def suites(path: Path) -> dict[str, list[Result]]:
    """The results of a file by the name of their suite."""
    try:
        data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return {name: [Result(**one) for one in results] for name, results in data.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no file of suite results: {error!r}") from error


def newest(results: Iterable[Result]) -> list[Result]:
    """The newest result of every part, and the newest green one behind a red one."""
    chosen: list[Result] = []
    parts: dict[str, bool] = {}
    for one in newest_first(results):
        if one.part not in parts or (one.green and not parts[one.part]):
            chosen.append(one)
            parts[one.part] = one.green
    return chosen


def keep(name: str, results: Iterable[Result], path: Path = KEPT) -> None:
    """Merge results into those of a suite, a line each; what did not run is left out."""
    known = suites(path)
    known[name] = newest([*(one for one in results if one.ran), *known.get(name, [])])
    blocks = []
    for suite, ours in sorted(known.items()):
        lines = ",\n".join(f"  {json.dumps(asdict(one), ensure_ascii=False)}" for one in ours)
        blocks.append(f" {json.dumps(suite)}: [\n{lines}\n ]")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")


def table(results: Sequence[Result]) -> str:
    """Results as a table in Markdown."""
    rows = ["| suite | device | PyTorch | outcome | date | commit |", "|---|---|---|---|---|---|"]
    for one in results:
        counts = ", ".join(f"{n} {name}" for name, n in one.counts.items())
        counts = counts or one.note or "nothing ran"
        outcome = counts if one.green else f"**{counts}**"
        known = filter(None, (one.device.get("name"), one.device.get("arch")))
        device = " ".join(dict.fromkeys(["simulated"] * ("simulated" in one.part) + [*known]))
        cells = (one.part, device, one.versions["torch"], outcome, one.date[:10], one.commit[:7])
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> int:
    """Print results, or keep them; 1 where there is no result."""
    parser = argparse.ArgumentParser(description="Results of the suite.")
    parser.add_argument("path", type=Path, nargs="?", help="folder, or file; default: the kept")
    parser.add_argument("--keep", metavar="NAME", help="merge into benchmarks/results by this name")
    options = parser.parse_args()
    if options.keep and options.path is None:
        parser.error("--keep wants a folder")
    results = kept() if options.path is None else read(options.path)
    print(table(results) if results else f"no results below {options.path or KEPT}")
    if results and options.keep:
        keep(options.keep, results)
        print(f"merged into {KEPT}")
    return 0 if results else 1


if __name__ == "__main__":
    raise SystemExit(main())
