"""``liger-multi memory-demo``: where the memory of one step goes, stock and patched."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

from liger_multi.cli import checking
from liger_multi.demo.command import MODELS, make_plan
from liger_multi.errors import LigerMultiError
from liger_multi.memory import Comparison, Profile, compare, format_bytes, profile
from liger_multi.memory.tables import comparison_page, profile_page
from liger_multi.page import Page

FILES = ("memory.png", "stock.json", "patched.json")
NEEDED = ("transformers", "matplotlib")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``liger-multi memory-demo``."""
    parser.add_argument("--model", default="qwen2", choices=MODELS, help="Hugging Face model type")
    parser.add_argument(
        "--seed", type=checking.seed, default=0, help="seed of weights and data (default: 0)"
    )
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


def run(arguments: argparse.Namespace) -> int:
    """Profile a step stock and patched; 0 when the patched one has the lower peak, else 1."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise LigerMultiError(
            f"memory-demo needs {', '.join(missing)}, which cannot be imported here; "
            'install with: pip install "liger-multi[transformers,cli]"'
        )
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    device = checking.device("memory-demo", arguments.device)
    checking.folder("--output", arguments.output, FILES, arguments.overwrite)
    both = compare(*(_profile(arguments, device, patched) for patched in (False, True)))
    _show(both, arguments.output)
    return 0 if both.saved_bytes > 0 else 1


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
    ids = torch.randint(
        scale.vocabulary, (scale.batch, scale.sequence), generator=generator
    ).to(device)  # fmt: skip

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    title = f"{arguments.model} {'patched' if patched else 'stock'}"
    made = profile(step, model=model, optimizer=optimizer, title=title)
    gc.collect()
    return made


def _show(both: Comparison, folder: Path) -> None:
    page = Page()
    for made in (both.first, both.second):
        page.sections += profile_page(made).sections
    page.sections += comparison_page(both).sections
    folder.mkdir(exist_ok=True)
    both.draw(folder / "memory.png")
    for name, made in (("stock", both.first), ("patched", both.second)):
        made.save(folder / f"{name}.json")
    first, second = both.first.peak_bytes, both.second.peak_bytes
    drop = f"{format_bytes(first)} -> {format_bytes(second)}, {second / first:.2f} of stock"
    page.add("Written", [("timelines", folder / "memory.png"), ("peak", drop)])  # type: ignore[list-item]
    page.show()
