"""What a step executed: which modules ran, and which operators each of them called."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass
class Executed:
    """What ran in a block.

    Attributes:
        ran: Paths of the modules whose forward returned.
        called: Operators by the path of the module whose forward called them; calls in the forward
            of a submodule are those of the submodule, and None stands for calls outside of all.
    """

    ran: set[str] = field(default_factory=set)
    called: dict[str | None, Counter[str]] = field(default_factory=dict)

    @property
    def calls(self) -> Counter[str]:
        """Calls by operator."""
        return sum(self.called.values(), Counter())


@contextlib.contextmanager
def executed(model: nn.Module) -> Iterator[Executed]:
    """Record what the modules of a model do in the block, without a hook on any of them.

    Patched modules fall back where somebody hooks them or replaces ``nn.Module.__call__``. So the
    record is taken one level below that, and of operators where all of them are dispatched.
    """
    from liger_multi.dispatch.op import Op

    paths = {id(module): path for path, module in model.named_modules()}
    found, inside = Executed(), list[str | None]()
    forward, dispatch = nn.Module._call_impl, Op.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = paths.get(id(module))
        inside.append(path)
        try:
            result = forward(module, *args, **kwargs)
        finally:
            inside.pop()
        if path is not None:
            found.ran.add(path)
        return result

    def count(op: Op, *args: Any) -> Any:
        where = inside[-1] if inside else None
        found.called.setdefault(where, Counter())[op.name] += 1
        return dispatch(op, *args)

    nn.Module._call_impl, Op.__call__ = call, count  # type: ignore[method-assign]
    try:
        yield found
    finally:
        nn.Module._call_impl, Op.__call__ = forward, dispatch  # type: ignore[method-assign]


def counts(report: Any, model: nn.Module, seen: Executed, batch: dict[str, Any]) -> dict[str, Any]:
    """What became of the patched modules of a report, as fields of an outcome."""
    parts = idle(report, model, seen, batch)
    ran, served, stock = Counter[str](), Counter[str](), Counter[tuple[str, str, str]]()
    for entry in report.entries:
        if entry.path in seen.ran:
            ran[entry.op] += 1
            if seen.called.get(entry.path):
                served[entry.op] += 1
            else:
                stock[entry.op, _starred(entry.path), entry.stock] += 1
    return {
        "modules": dict(Counter(e.op for e in report.entries)),
        "ran": dict(ran),
        "served": dict(served),
        "stock": [[*where, n] for where, n in stock.items()],
        "idle": parts,
        "text_only": text_only(parts, model, batch),
    }


def text_only(parts: list[dict[str, Any]], model: Any, batch: dict[str, Any]) -> bool:
    """Whether a step had text alone, and the model takes more: it has a tower, or is listed so."""
    from transformers.models.auto import modeling_auto

    listed = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values()
    more = type(model).__name__ in listed and lacking(model, batch)
    return not _real(batch) and (bool(more) or any(part["tower"] for part in parts))


def idle(
    report: Any, model: nn.Module, seen: Executed, batch: dict[str, Any]
) -> list[dict[str, Any]]:
    """The outermost modules of which nothing ran, if they are models or have patched modules.

    Of each its path, class, patched modules by operator, whether it is or has a model of its own (a
    tower), and the kinds of inputs that it takes and the batch has none of.
    """
    modules = dict(model.named_modules())
    alive = {above for path in seen.ran for above in (path, *_above(path))}
    towers = {path for path, m in modules.items() if hasattr(m, "input_modalities")} - alive
    patched = {e.path: e.op for e in report.entries if e.path not in seen.ran}
    found: dict[str, dict[str, Any]] = {}
    for path in modules:
        if path not in towers and path not in patched:
            continue
        top = next((p for p in reversed(_above(path)) if p not in alive), path)
        shown = _starred(top)
        cls = type(modules[top]).__name__
        one = {"path": shown, "class": cls, "modules": {}, "tower": False, "lacks": []}
        one = found.setdefault(shown, one)
        if path in towers:
            one["tower"] = True
            one["lacks"] = sorted({*one["lacks"], *lacking(modules[path], batch)})
        if path in patched:
            one["modules"][patched[path]] = one["modules"].get(patched[path], 0) + 1
    return list(found.values())


def _above(path: str) -> list[str]:
    """Paths of the modules around one, the nearest first; the model itself is the last."""
    parts = path.split(".") if path else []
    return [".".join(parts[:n]) for n in reversed(range(len(parts)))]


def lacking(model: Any, batch: dict[str, Any]) -> set[str]:
    """The kinds of inputs that a model takes beside text, where a batch can have none of them."""
    modalities = getattr(model, "input_modalities", "text")
    kinds = {modalities} if isinstance(modalities, str) else set(modalities)
    return set() if _real(batch) else kinds - {"text"}


def _real(batch: dict[str, Any]) -> bool:
    """Whether a batch has numbers that are no integers: pictures and sound, in some form."""
    return any(isinstance(x, Tensor) and x.is_floating_point() for x in batch.values())


def _starred(path: str) -> str:
    """The path with layer numbers starred, so that equal layers fall together."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path) or "(model)"
