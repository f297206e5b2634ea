"""What ran in a block: modules whose forward returned, and the operators that each of them called.

Patched modules run their own forward where somebody hooks them or replaces ``nn.Module.__call__``.
So the record is taken one level below that, and of operators where all of them are dispatched. It
costs nothing outside of a block.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from liger_multi._torch_private import Losses, module_call, replace_module_call
from liger_multi.dispatch.op import Op
from liger_multi.patching.options import ROTATED


@dataclass
class Executed:
    """What the modules of a model did in a block.

    Attributes:
        ran: Paths of the modules whose forward returned.
        called: Operators by the path of the module whose forward called them; calls in the forward
            of a submodule are those of the submodule, and None stands for calls outside of all.
        paths: The model's modules by identity.
        losses: Paths of modules that are a loss, and compute that of a head elsewhere.
    """

    ran: set[str] = field(default_factory=set)
    called: dict[str | None, Counter[str]] = field(default_factory=dict)
    paths: Mapping[int, str] = field(default_factory=dict, repr=False)
    losses: tuple[str, ...] = ()

    @property
    def calls(self) -> Counter[str]:
        """Calls by operator."""
        return sum(self.called.values(), Counter())

    def calls_of(self, path: str | None) -> Counter[str]:
        """Calls by operator that a module made itself."""
        return self.called.get(path, Counter())

    def _count(self, op: str, inside: list[int]) -> None:
        known = (self.paths[module] for module in reversed(inside) if module in self.paths)
        self.called.setdefault(next(known, None), Counter())[op] += 1


@contextlib.contextmanager
def executed(model: nn.Module) -> Iterator[Executed]:
    """Record what the modules of a model do in the block, in all threads and without a hook.

    Blocks may overlap. What was compiled runs without its modules and is not seen.
    """
    named = list(model.named_modules())
    losses = tuple(path for path, module in named if isinstance(module, Losses))
    current = Executed(paths={id(module): path for path, module in named}, losses=losses)
    with _lock:
        _records.append(current)
        if len(_records) == 1:
            _install(_call, _dispatch)
    try:
        yield current
    finally:
        with _lock:
            _records[:] = [record for record in _records if record is not current]
            if not _records:
                _install(*_ORIGINAL)


def _install(call: Any, dispatch: Any) -> None:
    replace_module_call(call)
    Op.__call__ = dispatch  # type: ignore[method-assign]


_ORIGINAL: Any = (module_call, Op.__call__)
_lock, _records = threading.Lock(), list[Executed]()


class _Inside(threading.local):
    """The modules whose forwards run in a thread, by identity, the innermost last."""

    def __init__(self) -> None:
        self.modules: list[int] = []


_inside = _Inside()


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return _ORIGINAL[0](module, *args, **kwargs)
    _inside.modules.append(id(module))
    try:
        result = _ORIGINAL[0](module, *args, **kwargs)
    finally:
        _inside.modules.pop()
    for record in tuple(_records):
        if id(module) in record.paths:
            record.ran.add(record.paths[id(module)])
    return result


def _dispatch(op: Op, *args: Any) -> Any:
    if not torch.compiler.is_compiling():
        for record in tuple(_records):
            record._count(op.name, _inside.modules)
    return _ORIGINAL[1](op, *args)


# --- what patched modules called ---


def serves(op: str, path: str, record: Executed) -> bool:
    """Whether a module that was patched for an operator called it in a block."""
    if op in _HEADS:  # the loss may be computed around the head, or after the model
        return any(record.calls_of(at)[op] for at in (None, *_with_outer(path), *record.losses))
    if op == "lora":
        return bool(record.calls_of(path)) or _together(path, record)
    if op in ("rope", ROTATED) and _with_norms(path, record):
        return True
    # an attention module rotates, and may call other operators
    return any(name.startswith("rope") == (op == "rope") for name in record.calls_of(path))


def _with_norms(path: str, record: Executed) -> bool:
    """Whether the norms within an attention module called the operator that rotates as well."""
    return any(
        ROTATED in calls for at, calls in record.called.items() if (at or "").startswith(f"{path}.")
    )


_HEADS = ("fused_linear_cross_entropy", "cross_entropy")


def _with_outer(path: str) -> list[str]:
    """A path and those of the modules around it, the model's own last."""
    parts = path.split(".") if path else []
    return [".".join(parts[:n]) for n in range(len(parts), -1, -1)]


def _together(path: str, record: Executed) -> bool:
    """Whether an adapter was computed with those of an MLP, or with its neighbors'.

    The MLP, or the first of the neighbors, called for all; an adapter that ran PEFT's forward
    called its own factors.
    """
    around = path.rpartition(".")[0]
    if any(one.startswith(f"{path}.lora_") for one in record.ran):
        return False
    neighbors = (
        calls for at, calls in record.called.items() if at and at.rpartition(".")[0] == around
    )
    return record.calls_of(around)["lora_mlp"] > 0 or any(calls["lora_qkv"] for calls in neighbors)
