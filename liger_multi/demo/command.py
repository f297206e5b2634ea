"""The commands of the demo: train unpatched and patched, and show where the memory of a step goes.

``liger-multi demo`` shows both while they run and judges the result; ``liger-multi memory-demo``
profiles one step of each.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from liger_multi.cli import checking
from liger_multi.errors import LigerMultiError, require_packages
from liger_multi.files.page import Page
from liger_multi.memory import Profile, compare, profile
from liger_multi.memory.breakdown import Comparison
from liger_multi.memory.measure import format_bytes

if TYPE_CHECKING:
    from liger_multi.demo.display import Display
    from liger_multi.demo.training import DemoConfig, Run

# --- demo ---

MODELS = ("qwen2", "llama", "qwen3", "mistral")
FILES = ("demo.png", "demo.json")
NEEDED = ("transformers", "accelerate", "tokenizers", "rich", "matplotlib")
# Both runs do the same arithmetic in another order. In float32 one loss near 10 carries a rounding
# error of about 1e-6, which some tens of optimizer steps amplify. In bfloat16 the first ten steps
# agree within 4e-4, then two trajectories drift: on an H200 (2026-11) a run differs from a
# repetition of itself, as kernels add in varying order, by 1.4e-3 after 25 steps, 1.3e-2 after 50.
BOUNDS = {"float32": 1e-4, "bfloat16": 2e-2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``liger-multi demo``."""
    parser.add_argument(
        "--models",
        nargs="+",
        default=["qwen2", "llama"],
        choices=MODELS,
        help="Hugging Face model types",
    )
    parser.add_argument(
        "--steps",
        type=checking.steps,
        help="training steps with the memory meter on (default: 6 on a CPU, else 20; 3 with "
        "--quick)",
    )
    parser.add_argument("--seed", type=checking.seed, default=0, help="seed of weights and data")
    parser.add_argument(
        "--output",
        type=checking.path,
        default=Path("demo-output"),
        help="folder of the picture and the numbers",
    )
    checking.add_overwrite(parser)
    parser.add_argument(
        "--device", help="cpu, or a device type of torch (default: the accelerator, else the CPU)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="toy sizes: seconds instead of minutes"
    )
    checking.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; 0 when the curves are equal and memory dropped, else 1."""
    require_packages("demo", NEEDED, "transformers,cli")
    # Random weights and local text: nothing may reach for the network, whatever is set outside.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    from liger_multi.demo.display import Display

    device = checking.device("demo", arguments.device)
    checking.folder("--output", arguments.output, FILES, arguments.overwrite)
    # with --json the numbers alone go to standard output
    display = Display(stderr=arguments.json)
    with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
        numbers = _demo(arguments, device, display)
    if arguments.json:
        checking.write_json(numbers)
    return 1 if numbers["problems"] else 0


def make_plan(arguments: argparse.Namespace, device: torch.device) -> DemoConfig:
    """Sizes that show the effect within minutes on ``device``."""
    from liger_multi.demo.training import DemoConfig, Scale

    if arguments.quick:
        sizes, timed = (64, 160, 2, 4, 2, 192, 4, 3, 1_000_000), 1
    elif device.type == "cpu":
        sizes, timed = (256, 704, 4, 4, 2, 192, 8, 6, 9_000_000), 2
    else:
        sizes, timed = (1024, 2816, 8, 16, 8, 1024, 8, 20, 9_000_000), 5
    scale = Scale(32768, *sizes)
    scale = replace(scale, steps=arguments.steps or scale.steps)
    bound = BOUNDS["float32" if device.type == "cpu" else "bfloat16"]
    return DemoConfig(scale, timed, arguments.seed, device, bound)


def _demo(arguments: argparse.Namespace, device: torch.device, display: Display) -> dict[str, Any]:
    """Train all pairs, write the files, and return the numbers."""
    from transformers.utils import logging

    from liger_multi import patch
    from liger_multi.demo import training
    from liger_multi.demo.display import draw

    logging.set_verbosity_error()
    begin = time.perf_counter()
    plan = make_plan(arguments, device)
    scale = plan.scale
    count = plan.total * scale.batch
    try:
        with display.busy("learning a tokenizer from the standard library"):
            text = training.read(scale.corpus_characters)
            tokenizer = training.learn_tokenizer(text, scale.vocabulary)
            data = training.blocks(text, tokenizer, count, scale.sequence, plan.seed)
    except (FileNotFoundError, ValueError) as error:  # no sources, or more steps than they give
        raise LigerMultiError(f"demo with {plan.total} steps: {error}") from error
    display.opening(text, tokenizer.get_vocab_size(), plan)
    model_types = dict.fromkeys(arguments.models)
    pairs = {
        model_type: _pair(model_type, data, plan, patch, display) for model_type in model_types
    }
    problems = [
        line
        for model_type, pair in pairs.items()
        for line in judge(model_type, *pair, bound=plan.bound)
    ]
    verdict = "FAILED, see the output" if problems else "same curves, less memory"
    arguments.output.mkdir(exist_ok=True)
    picture = arguments.output / "demo.png"
    draw(pairs, plan, f"liger_multi: {verdict}", picture)
    numbers: dict[str, Any] = {
        "where": plan.where,
        "bound": plan.bound,
        "problems": problems,
        "models": {
            k: {"unpatched": as_data(a), "patched": as_data(b)} for k, (a, b) in pairs.items()
        },
    }
    (arguments.output / "demo.json").write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    display.closing(pairs, problems, verdict, picture, time.perf_counter() - begin)
    return numbers


def _pair(
    model_type: str, data: Any, plan: DemoConfig, patch: Callable[[Any], Any], display: Display
) -> tuple[Run, Run]:
    """Train one model unpatched, then patched, from the same weights on the same batches."""
    from liger_multi.demo import training

    model = training.build(model_type, plan.scale, plan.seed)
    display.model(model_type, model)
    with display.progress(f"{model_type} unpatched", plan) as advance:
        stock = training.train(model, data, plan, advance)
    # The first model must be gone before the second one's memory is measured.
    del model
    gc.collect()
    model = training.build(model_type, plan.scale, plan.seed)
    display.report(patch(model))
    with display.progress(f"{model_type} patched", plan, stock) as advance:
        patched = training.train(model, data, plan, advance)
    display.summary(model_type, stock, patched)
    return stock, patched


def judge(model_type: str, stock: Run, patched: Run, bound: float) -> list[str]:
    """What is wrong with a pair of runs, in words; empty when nothing is."""
    problems = []
    gaps = [abs(b - a) for a, b in zip(stock.losses, patched.losses, strict=True)]
    # "not within" instead of "beyond": a NaN must fail too
    violations = [i for i, gap in enumerate(gaps) if not gap <= bound]
    if violations:
        i = violations[0]
        problems.append(
            f"{model_type}: the curves part at step {i + 1}: unpatched {stock.losses[i]:.6f}, "
            f"patched {patched.losses[i]:.6f}, difference {gaps[i]:.1e}, bound {bound:g}"
        )
    if patched.peak_bytes >= stock.peak_bytes:
        problems.append(
            f"{model_type}: peak memory did not drop: unpatched {format_bytes(stock.peak_bytes)}, "
            f"patched {format_bytes(patched.peak_bytes)}"
        )
    return problems


def as_data(run: Run) -> dict[str, Any]:
    """A run as plain data."""
    widest = run.widest
    return {
        "losses": run.losses,
        "seconds": run.seconds,
        "peak_bytes": [None if p is None else p.peak_bytes for p in run.peaks],
        "widest_bytes": widest.widest_bytes,
        "widest_shape": widest.widest_shape,
        "tokens_per_second": run.tokens_per_second,
    }


# --- memory-demo ---

MEMORY_FILES = ("memory.png", "unpatched.json", "patched.json")
MEMORY_NEEDED = ("transformers", "matplotlib")


def add_memory_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``liger-multi memory-demo``."""
    parser.add_argument("--model", default="qwen2", choices=MODELS, help="Hugging Face model type")
    parser.add_argument("--seed", type=checking.seed, default=0, help="seed of weights and data")
    parser.add_argument(
        "--output",
        type=checking.path,
        default=Path("memory-demo-output"),
        help="folder of the picture and the numbers",
    )
    checking.add_overwrite(parser)
    parser.add_argument(
        "--device", help="cpu, or a device type of torch (default: the accelerator, else the CPU)"
    )
    parser.add_argument("--quick", action="store_true", help="toy sizes")
    checking.add_json(parser)


def run_memory(arguments: argparse.Namespace) -> int:
    """Profile a step unpatched and patched; 0 when the patched one has the lower peak, else 1."""
    require_packages("memory-demo", MEMORY_NEEDED, "transformers,cli")
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    device = checking.device("memory-demo", arguments.device)
    checking.folder("--output", arguments.output, MEMORY_FILES, arguments.overwrite)
    comparison = compare(*(_profile(arguments, device, patched) for patched in (False, True)))
    _keep_memory(comparison, arguments.output)
    if arguments.json:
        memory = {"unpatched": comparison.first.as_data(), "patched": comparison.second.as_data()}
        checking.write_json({**memory, "saved_bytes": comparison.saved_bytes})
    else:
        _show_memory(comparison, arguments.output)
    return 0 if comparison.saved_bytes > 0 else 1


def _profile(arguments: argparse.Namespace, device: torch.device, patched: bool) -> Profile:
    """One step of the demo's model on random tokens."""
    from liger_multi import patch
    from liger_multi.demo import training

    arguments.steps = None
    plan = make_plan(arguments, device)
    scale = plan.scale
    model: Any = training.build(arguments.model, scale, arguments.seed).to(device)
    model.train()
    if not plan.on_cpu:
        model.to(torch.bfloat16)
    if patched:
        patch(model)
    optimizer = torch.optim.AdamW(model.parameters())
    generator = torch.Generator().manual_seed(arguments.seed)
    ids = torch.randint(scale.vocabulary, (scale.batch, scale.sequence), generator=generator).to(
        device
    )

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    title = f"{arguments.model} {'patched' if patched else 'unpatched'}"
    measured = profile(step, model=model, optimizer=optimizer, title=title)
    gc.collect()
    return measured


def _keep_memory(comparison: Comparison, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    comparison.draw(folder / "memory.png")
    for name, measured in (("unpatched", comparison.first), ("patched", comparison.second)):
        measured.save(folder / f"{name}.json")


def _show_memory(comparison: Comparison, folder: Path) -> None:
    page = Page()
    for measured in (comparison.first, comparison.second):
        page.sections += measured.page().sections
    page.sections += comparison.page().sections
    first, second = comparison.first.peak_bytes, comparison.second.peak_bytes
    drop = f"{format_bytes(first)} -> {format_bytes(second)}, {second / first:.2f} of unpatched"
    page.add("Written", [("timelines", folder / "memory.png"), ("peak", drop)])  # type: ignore[list-item]
    page.show()
