"""The committed results: ``benchmarks/results/<card>.json``, the newest row of every measurement.

A file has *runs*: when, where and of which commit rows were measured, and the rows. Of older runs
only those rows stay that no later run measured again, beside the implementations that they are
compared with, and these (:class:`Kind`). Runs are ordered by kind and by the date that they carry.

Every command in this folder has ``--store``, which merges what it measured into the file of the
card, and ``--out FILE``, which writes the run alone. ``python -m benchmarks.store FILE...`` merges
such files, for a card whose results were copied from another machine. With ``--notes NAME --device
CARD`` a file is what a command printed, and its lines are kept, for figures of pages.

``python -m benchmarks.store compare OLD.json NEW.json`` holds one benchmark against another. Times
are compared as shares of what the device reached in the same run (its copy bandwidth and its
GEMM), because two runs see different clocks. It fails where one of our rows is slower,
takes more memory or is less exact than before, beyond the noise that both runs saw in themselves.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ci import results
from liger_multi.files.documents import write_whole
from liger_multi.grouping import grouped

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ESTIMATED = {"name": "estimates"}  # the device of what no device measured
HEAD = ("kind", "name", "date", "commit", "device", "versions")  # of a run, in this order
Run = dict[str, Any]


class Kind(NamedTuple):
    """What makes two rows of one kind the same measurement.

    Attributes:
        names: Fields of a row, or of its run, that say what was measured; without any, a newer run
            replaces all rows of the older one.
        who: The field that says which implementation was measured, if there are several.
        bases: Implementations that stay beside every row which was measured in their run.
        whole: A field without which a row is a part of a measurement and replaces no older row.
    """

    names: tuple[str, ...]
    who: str = ""
    bases: tuple[str, ...] = ()
    whole: str = ""


KINDS = {
    "operators": Kind(("op", "sample", "dtype"), "provider", ("ours", "products")),
    "models": Kind(("run", "limit_gb"), "variant", ("ours", "stock")),
    "step-parts": Kind(("run", "limit_gb"), "variant", ("ours", "stock")),
    "several-cards": Kind(("run", "cards"), "variant", ("ours", "stock")),
    "losses": Kind(("case", "shape"), "provider", ("ours", "products")),
    "float8": Kind(("shape",)),
    "linear-float8": Kind(("part", "name", "shape"), "variant", ("bf16",)),
    "float8-convergence": Kind(()),
    "lora": Kind(("tokens", "rank", "part", "form"), "variant", ("ours", "stock")),
    "four-bits": Kind(("work",), "side"),
    "shared-prefixes": Kind(("model", "shape"), "variant", ("floor", "unshared")),
    "long-context": Kind(("part", "model", "cards", "tokens", "layers"), "variant"),
    "longest-by-cards": Kind(("model", "card", "cards")),
    # a search that nothing stopped goes on where an older one ended
    "longest": Kind(("model", "limit_gb"), "provider", whole="shortest_failed"),
    "memory": Kind(("case",)),
    "memory-reuse": Kind(()),
    "memory-profile": Kind(()),
    "memory-estimates": Kind(()),
    "recompute": Kind(("run", "patched"), "variant"),
    "recompute-estimates": Kind(("run", "patched"), "variant"),
    "plans": Kind(("case",)),
    "plan-example": Kind(()),
    "convergence": Kind(("model", "dtype", "batch", "tokens", "steps"), "seeded"),
    "compressed-activations": Kind(("model", "dtype")),
    "examples": Kind(("example",)),
    "bitwise": Kind(
        ("part", "name", "shape", "direction", "tiny"), "variant", ("default", "library")
    ),
    # lines of a measurement that no page reads by its fields: figures of a page are looked up here
    "notes": Kind(("name",)),
}


def now() -> str:
    """The date of a result that is written now."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def commit() -> str:
    """The commit of this checkout, short; ``+`` after it stands for uncommitted changes."""
    return re.sub(r"^([0-9a-f]{7})[0-9a-f]{33}", r"\1", results.commit())


def moment(run: Mapping[str, Any], where: object = "a run") -> datetime.datetime:
    """When a run was taken.

    Raises:
        ValueError: It does not say so, or only the day, by which runs of one day have no order.
    """
    try:
        date = datetime.datetime.fromisoformat(str(run["date"]))
    except (KeyError, ValueError):
        raise ValueError(f"{where} has the date {run.get('date')!r}, wanted ISO 8601") from None
    if date.tzinfo is None:
        raise ValueError(f"{where} has the date {run['date']!r}, wanted one with time and zone")
    return date


def device(run: Mapping[str, Any]) -> str:
    """Name of the device of a run."""
    return str(run["device"]["name"])


def short(run: Mapping[str, Any]) -> str:
    """The same without vendor and memory, for columns: ``H200``."""
    return re.sub(r"^(NVIDIA|AMD Instinct|AMD) ", "", device(run)).split()[0]


def card(run: Mapping[str, Any]) -> str:
    """The name of the file that a run belongs to; all processors share one."""
    name = re.sub(r"[^a-z0-9]+", "-", device(run).lower()).strip("-")
    return "cpu" if re.match(r"cpu\b", name) else name


def path_of(run: Mapping[str, Any], folder: Path | None = None) -> Path:
    """The file that a run belongs to."""
    return (folder or RESULTS) / f"{card(run)}.json"


# --- reading ---


def load(path: Path) -> list[Run]:
    """The runs of a file.

    Raises:
        ValueError: It is no file of results, or a run lacks its date.
    """
    state = path.stat()
    return _loaded(path, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=16)
def _loaded(path: Path, *_: int) -> list[Run]:
    """A file as it was at some moment; nobody writes into what this returns."""
    try:
        runs: list[Run] = json.loads(path.read_text(encoding="utf-8"))["runs"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no file of results: {error!r}") from error
    for run in runs:
        if run.get("kind") not in KINDS:
            raise ValueError(f"{path} has a run of kind {run.get('kind')!r}; known: {list(KINDS)}")
        moment(run, path)
    return runs


def read(run_type: str, folder: Path | None = None) -> list[Run]:
    """The runs of one kind in all files, the oldest first."""
    paths = [p for p in sorted((folder or RESULTS).glob("*.json")) if p != results.KEPT]
    runs = [run for path in paths for run in load(path) if run["kind"] == run_type]
    return sorted(runs, key=moment)


def newest_of(run_type: str, path: Path) -> Run:
    """The newest run of a kind in a file.

    Raises:
        ValueError: It has none.
    """
    runs = [run for run in load(path) if run["kind"] == run_type]
    if not runs:
        raise ValueError(f"{path} has no run of kind {run_type!r}")
    return max(runs, key=moment)


def rows(run_type: str, folder: Path | None = None) -> list[tuple[Run, dict[str, Any]]]:
    """Every row of a kind with its run, the oldest first."""
    return [(run, row) for run in read(run_type, folder) for row in run["rows"]]


# --- merging ---


def measurement(run: Run, row: Any) -> tuple[str, str]:
    """What a row measured, and of whom, as text to compare by."""
    measurement = KINDS[run["kind"]]
    fields = {**run, **row} if isinstance(row, Mapping) else run
    if run["kind"] == "convergence":
        fields["seeded"] = any(name.startswith("bug") for name in row["curves"])
    names = [fields.get(name) for name in measurement.names]
    return json.dumps([device(run), *names], sort_keys=True), str(fields.get(measurement.who, ""))


def newest(runs: Iterable[Run]) -> list[Run]:
    """The same runs with the newest row of every measurement and of every comparison with a base.

    Args:
        runs: Of one kind.
    """
    visited: set[tuple[str, ...]] = set()
    kept = []
    ordered = sorted(runs, key=moment)
    for run in reversed(ordered):
        table = KINDS[run["kind"]]
        marked = [(*measurement(run, row), row) for row in run["rows"]]
        present = {(what, who) for what, who, _ in marked if who in table.bases}
        groups, rows, done = set(), [], set()
        for what, who, row in marked:
            covered = {(what, who), *((what, who, base) for at, base in present if at == what)}
            if covered - visited:
                groups.add(what)
                rows.append(id(row))
            if not table.whole or row.get(table.whole) is not None:
                done |= covered
        visited |= done
        own = [
            row
            for what, who, row in marked
            if id(row) in rows or (what in groups and who in table.bases)
        ]
        if own:
            kept.append({**run, "rows": own})
    return kept[::-1]


def merge(old: Iterable[Run], new: Iterable[Run]) -> list[Run]:
    """Runs of a file after further ones; a run of the same date is the same run, written again."""
    added = list(new)
    again = {(run["kind"], run["date"], run.get("name")) for run in added}
    kept = [run for run in old if (run["kind"], run["date"], run.get("name")) not in again]
    by_kind = grouped((run["kind"], run) for run in (*kept, *added))
    return [run for run_type in KINDS for run in newest(by_kind.get(run_type, []))]


# --- writing ---


def text(runs: Sequence[Run]) -> str:
    """A file of results, one row a line."""
    parts = []
    for run in runs:
        fields = [name for name in HEAD if name in run]
        fields += [name for name in run if name not in (*HEAD, "rows")]
        head = _line({name: run[name] for name in fields})[:-1]
        lines = ",\n".join(f"  {_line(row)}" for row in run["rows"])
        parts.append(f' {head}, "rows": [\n{lines}\n ]}}')
    return '{"runs": [\n' + ",\n".join(parts) + "\n]}\n"


def _line(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False)


def add(runs: Iterable[Run], folder: Path | None = None) -> list[Path]:
    """Merge runs into the files of their cards; returns the files.

    Raises:
        ValueError: A run has no date, no device or an unknown kind.
    """
    new_runs = list(runs)
    for run in new_runs:
        if run.get("kind") not in KINDS:
            raise ValueError(f"a run of kind {run.get('kind')!r}; known: {', '.join(KINDS)}")
        moment(run)
    by_path = grouped((path_of(run, folder), run) for run in new_runs)
    for path, new in by_path.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text(merge(load(path) if path.exists() else [], new)).encode())
    return list(by_path)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where a command leaves what it measured."""
    parser.add_argument("--store", action="store_true", help="merge into benchmarks/results")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write what was measured alone")
    parser.add_argument("--commit", default=commit(), help="of what is measured")


def head(run_type: str, options: argparse.Namespace, device: torch.device) -> Run:
    """What stands above the rows of a run: its type, date, commit, device and versions."""
    from liger_multi.bench import report

    facts = {"device": report.device_facts(device), "versions": report.versions()}
    return {"kind": run_type, "date": now(), "commit": options.commit, **facts}


def keep(measured: Run | Sequence[Run], options: argparse.Namespace) -> list[Path]:
    """Write runs as the options say; a run may be written again while it grows."""
    runs = [measured] if isinstance(measured, dict) else list(measured)
    written = add(runs) if options.store else []
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(options.out, text(runs).encode())
        written.append(options.out)
    return written


def run_command(
    commands: Mapping[str, Callable[[Sequence[str]], int]], arguments: Sequence[str] | None
) -> int:
    """Run the command that the first argument names, or the default command."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    name = argv.pop(0) if argv and argv[0] in commands else ""
    if name not in commands:
        raise SystemExit(f"the first argument is one of {', '.join(commands)}; --help after it")
    return commands[name](argv)


def taken(path: Path) -> list[Run]:
    """The runs of a file that ``--out`` wrote, or ``liger-multi bench --output``."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if "ceilings" in data and "rows" in data:
        return [{"kind": "operators", **data}]
    return load(path)


def notes(path: Path, name: str, device_name: str, commit: str) -> Run:
    """What a command printed, as a run."""
    lines = [line.rstrip() for line in path.read_text(encoding="utf-8").splitlines()]
    head = {"kind": "notes", "name": name, "date": now(), "commit": commit}
    return {**head, "device": {"name": device_name}, "rows": [line for line in lines if line]}


def merge_files(arguments: Sequence[str]) -> int:
    """Merge files into ``benchmarks/results``."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.store", description=merge_files.__doc__
    )
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--notes", metavar="NAME", help="keep the lines of one text by this name")
    parser.add_argument("--device", metavar="CARD", help="whose notes they are")
    parser.add_argument("--commit", default=commit(), help="of what the notes measured")
    options = parser.parse_args(arguments)
    if options.notes and (len(options.files) != 1 or not options.device):
        parser.error("--notes wants one file, and --device")
    try:
        if options.notes:
            runs = [notes(options.files[0], options.notes, options.device, options.commit)]
        else:
            runs = [run for file in options.files for run in taken(file)]
        paths = add(runs, options.into)
    except (OSError, ValueError) as wrong:
        parser.error(str(wrong))
    for path in paths:
        print(f"merged into {path}")
    return 0


# --- numbers of pages ---

QUOTED_DEVICE = "NVIDIA H200"
DEVICES = {None: QUOTED_DEVICE, "h100": "NVIDIA H100 80GB HBM3"}
UNITS: dict[str, tuple[str, Callable[[float], str]]] = {
    "GiB": ("peak_bytes", lambda x: f"{x / 2**30:.1f}"),
    "tokens": ("tokens_per_second", lambda x: f"{x / 1000:.1f}k"),
    "ms": ("both_ms", lambda x: f"{x:#.3g}".rstrip(".")),
    "longest": ("longest", lambda x: f"{x:,.0f}"),
    "too-long": ("shortest_failed", lambda x: f"{x:,.0f}"),
}


def shape(row: Mapping[str, Any]) -> str:
    """The shape of a loss's row in one word."""
    return "x".join(str(n) for n in row["shape"].values())


# --- one benchmark against another ---

MARGIN = 0.05  # of a time, beside the spreads of both runs: clocks differ from run to run
MEMORY_MARGIN = 2**20
Row = Mapping[str, Any]
Key = tuple[str, str, str, str]


def timed_rows(file: Path, provider: str) -> tuple[Mapping[str, Any], dict[Key, Row]]:
    """The head of the newest run of a file, and one provider's newest rows that have a time."""
    runs = [run for run in taken(file) if run["kind"] == "operators"]
    if not runs:
        raise ValueError(f"{file} has no run of benchmarks.ops")
    timed = {}
    for run in runs:
        for row in run["rows"]:
            # rows of old tables have a time alone
            if row["provider"] == provider and row.get("both_ms") and "error" in row:
                divisors = json.dumps(row.get("divisors") or {}, sort_keys=True)
                timed[row["op"], row["sample"], run["dtype"], divisors] = row
    return runs[-1], timed


def spread(row: Row) -> float:
    """Half the distance of the quartiles as a share of the time."""
    return float(row.get("both_spread_ms") or 0.0) / float(row["both_ms"])


def slowdown(old: Row, new: Row) -> float:
    """How much longer the new one takes, by the peak of its own run where that is known."""
    before, after = (row.get("percent_of_peak", {}).get("both") for row in (old, new))
    if before and after:
        return float(before) / float(after)
    return float(new["both_ms"]) / float(old["both_ms"])


def findings(old: Mapping[Key, Row], new: Mapping[Key, Row]) -> Iterator[tuple[bool, str]]:
    """Whether it fails and what is to be said, for each row that both have."""
    for key in old.keys() & new.keys():
        before, after = old[key], new[key]
        name = f"{key[0]} {key[1]}"
        ratio, limit = slowdown(before, after), 1 + MARGIN + 2 * (spread(before) + spread(after))
        yield ratio > limit, f"{name}: time x {ratio:.3f} (limit {limit:.3f})"
        grown = after["extra_bytes"] - before["extra_bytes"]
        yield (
            grown > MEMORY_MARGIN + 0.01 * abs(before["extra_bytes"]),
            f"{name}: extra memory {grown / 2**20:+.1f} MiB",
        )
        worse = after["error"]["tolerances"]
        yield worse > 1, f"{name}: error {worse:.2f} of the tolerance"


def compare(old_file: Path, new_file: Path, provider: str, across: bool) -> tuple[bool, list[str]]:
    """Whether anything regressed, and the lines to show."""
    (old_head, old), (new_head, new) = (
        timed_rows(old_file, provider),
        timed_rows(new_file, provider),
    )
    names = [head["device"]["name"] for head in (old_head, new_head)]
    if names[0] != names[1] and not across:
        raise ValueError(f"devices differ: {names[0]!r} and {names[1]!r}; --across compares anyway")
    if not old.keys() & new.keys():
        raise ValueError(f"the files share no row of {provider!r}")
    pairs = sorted(findings(old, new), key=lambda pair: (not pair[0], pair[1]))
    lines = [f"{'WORSE' if bad else 'ok   '}  {text}" for bad, text in pairs]
    lines += [f"gone   {k[0]} {k[1]}" for k in sorted(old.keys() - new.keys())]
    lines += [f"new    {k[0]} {k[1]}" for k in sorted(new.keys() - old.keys())]
    return any(bad for bad, _ in pairs), lines


def compare_files(arguments: Sequence[str]) -> int:
    """Print what changed; 1 where something got worse.

    A file is what ``--out`` of :mod:`benchmarks.ops` or ``liger-multi bench --output`` wrote,
    or a card's results, such as ``benchmarks/results/nvidia-h200.json``.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.store compare", description=compare_files.__doc__
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--provider", default="ours")
    parser.add_argument("--across", action="store_true", help="compare different devices, too")
    options = parser.parse_args(arguments)
    try:
        worse, lines = compare(options.old, options.new, options.provider, options.across)
    except (OSError, ValueError, KeyError) as wrong:
        parser.error(f"{type(wrong).__name__}: {wrong}")
    sys.stdout.write("\n".join(lines) + "\n")
    return int(worse)


def main(arguments: Sequence[str] | None = None) -> int:
    """Merge files, or compare two."""
    return run_command({"": merge_files, "compare": compare_files}, arguments)


if __name__ == "__main__":
    sys.exit(main())
