"""Tokens a second and peak memory of whole models: ``python -m benchmarks.models``.

Model x size x variant, each in a process of its own (peers patch modules of the whole process), one
after the other: random weights and tokens, fused AdamW, SDPA attention, bf16. The loss of every
variant stands beside its time, so that a fast wrong answer is seen.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import store
from liger_multi.memory.sizes import SIZES

ROOT = Path(__file__).parent.parent

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **SIZES,
    "tiny": (
        "Llama",
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
         "tie_word_embeddings": True},
    ),
}  # fmt: skip
WARM_STEPS = 3


@dataclass(frozen=True)
class Run:
    """One measurement: ``model:batchxtokens[+checkpointing]`` under one variant."""

    model: str
    batch: int
    tokens: int
    checkpointing: bool

    @classmethod
    def parse(cls, text: str) -> Run:
        """From the command line's form."""
        name, _, size = text.partition(":")
        size, _, extra = size.partition("+")
        batch, _, tokens = size.partition("x")
        if name not in MODELS or not (batch.isdigit() and tokens.isdigit()):
            raise ValueError(
                f"a run is MODEL:BATCHxTOKENS[+checkpointing] with a model of "
                f"{', '.join(MODELS)}; got {text!r}"
            )
        if extra not in ("", "checkpointing"):
            raise ValueError(f"only +checkpointing is known, got {text!r}")
        return cls(name, int(batch), int(tokens), bool(extra))

    def __str__(self) -> str:
        extra = "+checkpointing" if self.checkpointing else ""
        return f"{self.model}:{self.batch}x{self.tokens}{extra}"


def _ours(model: Any) -> Any:
    import liger_multi

    liger_multi.patch(model)
    return model


def _liger(model: Any) -> Any:
    peer = importlib.import_module("liger_kernel.transformers")
    peer._apply_liger_kernel_to_instance(model=model)
    return model


def _with_attention(model: Any) -> Any:
    from liger_multi.patching import register_attention

    register_attention()
    model.set_attn_implementation("liger_multi")
    return _ours(model)


def _compiled(then: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda model: torch.compile(then(model))


VARIANTS: dict[str, Callable[[Any], Any]] = {
    "stock": lambda model: model,
    "liger": _liger,
    "ours": _ours,
    "stock+compile": _compiled(lambda model: model),
    "liger+compile": _compiled(_liger),
    "ours+compile": _compiled(_ours),
    "ours+attention": _with_attention,
    "ours+attention+compile": _compiled(_with_attention),
}


def build(run: Run, device: torch.device) -> Any:
    """The model with random weights in bf16, made on its device."""
    import transformers

    family, sizes = MODELS[run.model]
    config = getattr(transformers, f"{family}Config")(
        max_position_embeddings=max(2048, run.tokens), **sizes
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, f"{family}ForCausalLM")._from_config(
            config, dtype=torch.bfloat16
        )
    model.train()
    model.config.use_cache = False
    if run.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def measure(run: Run, variant: str, steps: int, limit_gb: float | None) -> dict[str, Any]:
    """Train some steps in this process; median step time, peak memory and the last loss."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    module = torch.get_device_module(device)
    if limit_gb is not None:
        total = module.get_device_properties(0).total_memory
        module.set_per_process_memory_fraction(limit_gb * 1e9 / total)
    model = VARIANTS[variant](build(run, device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    generator = torch.Generator(device).manual_seed(1)
    vocabulary = MODELS[run.model][1]["vocab_size"]
    times, loss = [], torch.zeros(())
    for step in range(WARM_STEPS + steps):
        ids = torch.randint(vocabulary, (run.batch, run.tokens), generator=generator, device=device)
        if step == WARM_STEPS and device.type != "cpu":
            module.reset_peak_memory_stats()
        torch.accelerator.synchronize() if device.type != "cpu" else None
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.accelerator.synchronize() if device.type != "cpu" else None
        times.append(time.perf_counter() - start)
    kept = times[WARM_STEPS:]
    return {
        "tokens_per_second": run.batch * run.tokens / statistics.median(kept),
        "spread_percent": 100 * (max(kept) - min(kept)) / statistics.median(kept),
        "peak_bytes": module.max_memory_allocated() if device.type != "cpu" else None,
        "loss": loss.item(),
    }


def child(run: Run, variant: str, steps: int, limit_gb: float | None) -> dict[str, Any]:
    """The same in a process of its own; a failure is a row too."""
    command = [sys.executable, "-m", "benchmarks.models", "--child", str(run), variant]
    command += ["--steps", str(steps)]
    command += [] if limit_gb is None else ["--limit-gb", str(limit_gb)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])  # type: ignore[no-any-return]
    memory = "out of memory" in done.stderr or "OutOfMemoryError" in done.stderr
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return {"failure": "out of memory" if memory else last[:200]}


def line(run: Run, variant: str, found: dict[str, Any], stock: dict[str, Any]) -> str:
    """A row of the table."""
    if "failure" in found:
        return f"{run!s:38s} {variant:14s} {found['failure']}"
    speed, base = found["tokens_per_second"], stock.get("tokens_per_second")
    ratio = f"{speed / base:6.3f}" if base else "     -"
    peak = found["peak_bytes"]
    memory = f"{peak / 2**30:8.2f} GiB" if peak else "-"
    return (
        f"{run!s:38s} {variant:14s} {speed:10.0f} tok/s {ratio} x stock  {memory:>12s}  "
        f"loss {found['loss']:.4f}  +-{found['spread_percent'] / 2:.1f} %"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every run under every variant, print a table and keep the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument(
        "runs", nargs="*", default=["tiny:2x32"], help="MODEL:BATCHxTOKENS[+checkpointing]"
    )
    parser.add_argument("--variants", default="stock,liger,ours")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--limit-gb", type=float, help="memory that a process may take, in 1e9 bytes"
    )
    store.add_options(parser)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        run, variant = Run.parse(given.runs[0]), given.runs[1]
        sys.stdout.write(json.dumps(measure(run, variant, given.steps, given.limit_gb)) + "\n")
        return 0
    variants = given.variants.split(",")
    try:
        runs = [Run.parse(text) for text in given.runs]
        unknown = [name for name in variants if name not in VARIANTS]
        if unknown:
            raise ValueError(f"unknown variant {unknown[0]!r}; known: {', '.join(VARIANTS)}")
    except ValueError as wrong:
        parser.error(str(wrong))
    return report(runs, variants, given)


def report(runs: list[Run], variants: list[str], given: argparse.Namespace) -> int:
    """Run everything, with progress on the screen."""
    from rich.console import Console
    from rich.progress import track

    from liger_multi.bench import report as bench_report

    console, rows = Console(), []
    jobs = [(run, variant) for run in runs for variant in variants]
    found: dict[tuple[Run, str], dict[str, Any]] = {}
    for run, variant in track(jobs, "models", console=console):
        found[run, variant] = child(run, variant, given.steps, given.limit_gb)
        text = line(run, variant, found[run, variant], found.get((run, "stock"), {}))
        console.print(text, highlight=False, soft_wrap=True)
        rows.append({"run": str(run), "variant": variant, **found[run, variant]})
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    head = {"kind": "models", "date": store.now(), "commit": given.commit}
    head |= {"device": bench_report.device_facts(device), "versions": bench_report.versions()}
    for file in store.keep({**head, "limit_gb": given.limit_gb, "rows": rows}, given):
        console.print(f"written to {file}")
    return int(any("failure" in row and row["variant"] != "stock" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
