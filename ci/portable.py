"""The native suite under the settings of other processors: ``python -m ci.portable OUT.json``.

Which instructions a sum is made of and how many threads share it decide in which order it rounds.
Each row of :data:`SETTINGS` is one run of the suite, in another order of tests; together the rows
have every value. One result is left, with the outcome of each row (:mod:`ci.results`); a row that
this processor cannot run is named in it with the reason. Further arguments go to pytest.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ci import results

# what a processor has to have for a value, as Linux names it; others run anywhere
NEEDS = {
    "avx2": "avx2",
    "AVX2": "avx2",
    "avx512": "avx512f",
    "AVX512": "avx512f",
    "AVX512_CORE": "avx512bw",
    "SSE4_2": "sse4_2",
    "SSE41": "sse4_1",
}


@dataclass(frozen=True)
class Setting:
    """One run.

    Attributes:
        aten: ``ATEN_CPU_CAPABILITY``, of PyTorch's own loops.
        mkl: ``MKL_ENABLE_INSTRUCTIONS``, of matrix products.
        onednn: ``ONEDNN_MAX_CPU_ISA``, of products in low precision.
        threads: Of OpenMP and MKL.
        seed: Of the order of tests.
    """

    aten: str
    mkl: str
    onednn: str
    threads: int
    seed: int

    @property
    def name(self) -> str:
        """How results call it."""
        sets = f"ATen {self.aten}, MKL {self.mkl}, oneDNN {self.onednn}"
        return f"{sets}, {self.threads} threads, order {self.seed}"

    @property
    def environment(self) -> dict[str, str]:
        """What the run finds in its environment."""
        return {
            "ATEN_CPU_CAPABILITY": self.aten,
            "MKL_ENABLE_INSTRUCTIONS": self.mkl,
            "ONEDNN_MAX_CPU_ISA": self.onednn,
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_NUM_THREADS": str(self.threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def refusal(self, flags: set[str]) -> str | None:
        """Why a processor with these flags cannot run it, or None."""
        capabilities = {
            NEEDS[value] for value in (self.aten, self.mkl, self.onednn) if value in NEEDS
        }
        missing = sorted(capabilities - flags)
        return f"this processor has no {', '.join(missing)}" if missing else None


SETTINGS = (
    Setting("default", "SSE4_2", "SSE41", 1, 1),
    Setting("avx2", "AVX2", "AVX2", 2, 2),
    Setting("avx512", "AVX512", "AVX512_CORE", 4, 3),
    Setting("default", "AVX512", "AVX2", 4, 2),
    Setting("avx2", "SSE4_2", "AVX512_CORE", 1, 3),
    Setting("avx512", "AVX2", "SSE41", 2, 1),
)


def flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """What this processor has, as Linux says it; empty elsewhere."""
    if not cpuinfo.exists() or platform.machine() not in ("x86_64", "AMD64"):
        return set()
    lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    return set(next((x.partition(":")[2] for x in lines if x.startswith("flags")), "").split())


def run(setting: Setting, arguments: Sequence[str]) -> results.Result | None:
    """One run of the suite; None if it left no result."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "native.json"
        order = ["-p", "randomly", f"--randomly-seed={setting.seed}", "--randomly-dont-reset-seed"]
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *order]
            + ["--ignore=tests/kernels/test_static.py", "--results", str(file), *arguments],
            env={**os.environ, **setting.environment},
            cwd=results.ROOT,
            check=False,
        )
        return results.read(Path(folder))[0] if file.exists() else None


def outcome(one: results.Result | None) -> str:
    """A run in a few words."""
    if one is None:
        return "**stopped without a result**"
    counts = ", ".join(f"{n} {name}" for name, n in one.counts.items()) or "nothing ran"
    return counts if one.green else f"**{counts}**"


def table(
    settings: Sequence[Setting], path: Path, arguments: Sequence[str], note: str = ""
) -> bool:
    """Run every setting and write the result; whether all that ran is green."""
    import torch

    counts: Counter[str] = Counter()
    said: dict[str, str] = {}
    failures: list[str] = []
    started, green = time.monotonic(), True
    for setting in settings:
        reason = setting.refusal(flags())
        print(f"== {setting.name}" + (f": not run: {reason}" if reason else ""), flush=True)
        if reason:
            said[setting.name] = f"not run: {reason}"
        else:
            one = run(setting, arguments)
            said[setting.name] = outcome(one)
            green = green and one is not None and one.green
            counts.update(one.counts if one else {"error": 1})
            failed = one.failures if one else ["pytest"]
            failures += [f"{name} ({setting.name})" for name in failed]
        # after every row: what is cut off has left the rows before it
        seconds, device = time.monotonic() - started, torch.device("cpu")
        results.write(path, ["reference"], device, counts, seconds, note, failures, said)
    print("\n".join(f"{name}: {what}" for name, what in said.items()), f"\nwrote {path}", sep="")
    return green and bool(counts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line; 1 if a run fails, or none can run."""
    parser = argparse.ArgumentParser(description="The native suite under settings of processors.")
    parser.add_argument("path", type=Path, help="where the result goes")
    parser.add_argument("--rows", default="", help="only these rows, e.g. 1,4")
    parser.add_argument("--note", default="", help="what a reader of the result must know")
    options, rest = parser.parse_known_args(arguments)
    rows = [int(n) for n in options.rows.split(",") if n] or range(1, len(SETTINGS) + 1)
    return int(not table([SETTINGS[n - 1] for n in rows], options.path, rest, options.note))


if __name__ == "__main__":
    raise SystemExit(main())
