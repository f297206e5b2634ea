"""Compare stock and patched models of every registered type: ``python -m tests.sweep --help``."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

os.environ["HF_HUB_OFFLINE"] = "1"

RESULTS = Path(__file__).with_name("results.json")
ELSEWHERE = RESULTS.with_name("elsewhere.json")
JUDGED = {
    "attention": "attn_implementation='liger_multi'",
    "packing": "rows of several samples",
    "trees": "shared prefixes",
    "shards": "rows over two ranks",
}
"""What may be judged in place of a training step, each by a module of this folder."""
FLAG, NUMBER = {"action": "store_true"}, {"type": int, "metavar": "N"}
OPTIONS: dict[str, dict[str, Any]] = {
    **{f"--{what}": {**FLAG, "help": f"judge {text} instead"} for what, text in JUDGED.items()},
    "--backend": {"help": "backend that serves the operators, e.g. cuda or triton"},
    "--device": {"help": "device of the models; that of the backend by default"},
    "--every": {**NUMBER, "default": 1, "help": "every Nth pair"},
    "--first": {**NUMBER, "default": 0, "help": "begin with the Nth"},
    "--json": {"type": Path, "metavar": "FILE", "help": "write the outcomes there"},
    "--jobs": {"type": int, "default": 1, "help": "processes at a time"},
    "--quiet": {**FLAG, "help": "only pairs that are not equal"},
    "--write": {**FLAG, "help": "keep the results"},
    "--generation": {**FLAG, "help": "keep counts as those of this transformers"},
}


def main() -> int:
    """Run, print one line a pair, and keep the results when asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of type/Class; all pairs by default")
    for name, settings in OPTIONS.items():
        parser.add_argument(name, **settings)
    options = parser.parse_args()

    import transformers

    from liger_multi.dispatch.config import configure
    from tests.sweep.cases import registered
    from tests.sweep.run import FLOOR, GRADIENT, LOSS, sweep

    transformers.logging.set_verbosity_error()
    device = options.device or "cpu"
    if options.backend:
        from liger_multi.dispatch.registry import backends

        configure({"default": options.backend})
        # the forks open the device: a driver that is started here would not outlive them
        device = options.device or backends()[options.backend].device_type or "cpu"
    pairs = [
        p for p in registered() if not options.names or any(n in p.name for n in options.names)
    ][options.first :: options.every]
    for what in JUDGED:
        if getattr(options, what):
            file = ELSEWHERE if options.generation and what == "packing" else options.json
            kept = RESULTS.with_name(f"{what}.json")
            file = kept if options.write and what != "attention" else file
            return judged(what, pairs, options.jobs, file)
    started, outcomes = time.monotonic(), []
    for outcome in sweep(pairs, options.jobs, str(device)):
        outcomes.append(outcome)
        if outcome.status != "equal" or not options.quiet:
            print(
                f"{outcome.status:10} {outcome.kind:10} {outcome.type}/{outcome.cls} "
                f"{outcome.seconds:.1f} s {outcome.calls} {outcome.why}",
                flush=True,
            )
    seconds = time.monotonic() - started
    counts = Counter(o.status for o in outcomes)
    print(f"{len(outcomes)} pairs in {seconds:.0f} s: {dict(counts)}")
    result = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "backend": options.backend or "reference",
        "device": named(str(device)),
        "bounds": {"loss": LOSS, "gradient": GRADIENT, "floor": FLOOR},
        "pairs": [vars(o) for o in outcomes],
    }
    if options.json:
        options.json.write_text(json.dumps(result))
    if options.generation:
        others = [
            {k: o[k] for k in ("type", "cls", "status", "why")}
            for o in result["pairs"]
            if o["status"] != "equal"
        ]
        keep_generation({"torch": torch.__version__, **dict(counts), "others": others})
    if options.write:
        keep(result, [(p.kind, p.type, p.cls) for p in registered()])
    return int(counts["different"] > 0)


def judged(what: str, pairs: list[Any], jobs: int, file: Path | None) -> int:
    """One line per pair: on our attention, packed rows, shared prefixes or rows over ranks."""
    from tests.sweep.run import forked

    judging = importlib.import_module(f"tests.sweep.{what}")
    outcomes = []
    for pair, seconds, fields in forked(pairs, judging.work, jobs):
        why = f"the process ended after {seconds:.0f} s without a result"
        status = "wrong" if what == "attention" else "not built"
        verdict = judging.Verdict(**fields or {**vars(pair), "status": status, "why": why})
        outcomes.append(verdict)
        print(f"{verdict.status:10} {pair.name} {verdict.why}", flush=True)
    print(dict(Counter(v.status for v in outcomes)))
    if file == RESULTS.with_name(f"{what}.json"):
        import transformers

        lines = ",\n".join(json.dumps(vars(v)) for v in outcomes)
        head = json.dumps({"transformers": transformers.__version__})[:-1]
        file.write_text(f'{head}, "pairs": [\n{lines}\n]}}\n')
    elif file == ELSEWHERE:
        keep_generation({"packing": of_packing(outcomes)})
    elif file:
        file.write_text(json.dumps([vars(v) for v in outcomes]))
    return int(any(v.status == "wrong" for v in outcomes))


def of_packing(outcomes: list[Any]) -> dict[str, dict[str, int]]:
    """How many pairs have each status, by what rows are given beside positions."""
    others = {name for verdict in outcomes for name in verdict.beside}
    counts = {"positions": Counter(v.status for v in outcomes)}
    for name in sorted(others):
        counts[name] = Counter(v.beside[name][0] for v in outcomes if name in v.beside)
    return {name: dict(sorted(count.items())) for name, count in counts.items()}


def keep_generation(fields: dict[str, Any]) -> None:
    """Write fields of the row of the installed transformers, beside the rows of others."""
    import transformers

    kept = json.loads(ELSEWHERE.read_text())
    rows = {row["transformers"]: row for row in kept["generations"]}
    version, today = transformers.__version__, {"date": time.strftime("%Y-%m-%d")}
    whole = {"equal": 0, "different": 0, "not built": 0} if "others" in fields else {}
    rows[version] = {**rows.get(version, {"transformers": version}), **whole, **fields, **today}
    kept["generations"] = [rows[v] for v in sorted(rows, key=lambda v: [*map(int, v.split("."))])]
    ELSEWHERE.write_text(elsewhere_lines(kept))


def elsewhere_lines(kept: dict[str, Any]) -> str:
    """Runs elsewhere as JSON, a pair a line."""

    def rows(part: str, inner: str) -> str:
        lines = []
        for row in kept[part]:
            head = json.dumps({k: v for k, v in row.items() if k != inner})[:-1]
            pairs = ",\n".join(f"  {json.dumps(one)}" for one in row[inner])
            lines.append(f'{head}, "{inner}": [\n{pairs}\n]}}')
        return f'"{part}": [\n' + ",\n".join(lines) + "]"

    return f"{{{rows('generations', 'others')},\n{rows('devices', 'pairs')}}}\n"


def named(device: str) -> str:
    """What ran the models, for a reader."""
    if device == "cpu":
        return "CPU"

    return str(torch.get_device_module(torch.device(device)).get_device_name())


def keep(result: dict[str, Any], known: list[tuple[str, str, str]]) -> None:
    """Write the result that the page is made of.

    Known pairs that were not asked for stay, and so do those that another machine has run and this
    one lacks a library for.
    """
    outcomes = {
        (o["kind"], o["type"], o["cls"]): o for o in json.loads(RESULTS.read_text())["pairs"]
    }
    for one in result["pairs"]:
        pair = one["kind"], one["type"], one["cls"]
        if pair not in outcomes or not one["why"].startswith(
            ("ImportError", "ModuleNotFoundError")
        ):
            outcomes[pair] = {k: v for k, v in one.items() if k != "seconds"}
    from tests.sweep.cases import as_lines

    pairs = [outcomes[pair] for pair in known if pair in outcomes]
    RESULTS.write_text(as_lines({**result, "pairs": pairs}))


if __name__ == "__main__":
    raise SystemExit(main())
