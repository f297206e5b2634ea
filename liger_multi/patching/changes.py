"""Swap the class of a module or give it back, with a line in the report."""

from __future__ import annotations

from torch import nn

from liger_multi.patching.report import Entry, PatchReport, Skipped
from liger_multi.patching.swap import Patched, Swap, apply, buried, restore


def apply_swap(
    report: PatchReport,
    path: str,
    module: nn.Module,
    swap: Swap,
    by: str,
    options: dict[str, object],
) -> None:
    """Swap, or say why not; a module that was wrapped after an equal patch counts as patched."""
    status = "already patched"
    if isinstance(module, Patched) and buried(module):
        below = type(module)._liger_multi_swap
        if (below.op, below.settings) != (swap.op, swap.settings):
            name = type(module).__name__
            reason = f"its class is now {name}, on top of an earlier patch; options are fixed"
            report.skipped.append(Skipped(path, swap.op, reason))
            return
        swap = below
    else:
        status = apply(module, swap)
    report.entries.append(Entry(path, swap.op, swap.stock.__name__, by, dict(options), status))


def restore_class(report: PatchReport, path: str, module: nn.Module) -> None:
    """Give the class back that a module had, if it has one of ours."""
    found = restore(module)
    if found and found.behavior.reported:
        report.entries.append(
            Entry(path, found.op, found.stock.__name__, found.stock.__name__, {}, "restored")
        )
