"""Say which backend each operator would use, and why the others would not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_multi.dispatch.config import current
from liger_multi.dispatch.op import OPS
from liger_multi.dispatch.registry import REFERENCE, backends, device_of, operators
from liger_multi.dispatch.resolve import Candidate, candidate, candidates
from liger_multi.errors import ConfigurationError, shown, unknown


@dataclass(frozen=True)
class Row:
    """One backend, considered for the forward or the backward of an operator."""

    op: str
    direction: str
    device: str
    backend: str
    chosen: bool
    reason: str | None
    source: str


@dataclass(frozen=True)
class Explanation:
    """All rows, printable as a table."""

    rows: tuple[Row, ...]

    def chosen(self, op: str, direction: str = "forward", device: str | None = None) -> str | None:
        """The backend chosen for one direction; None where nothing can run."""
        for row in self.rows:
            if (
                row.op == op
                and row.direction == direction
                and row.chosen
                and device in (None, row.device)
            ):
                return row.backend
        return None

    def __str__(self) -> str:
        head = ("operator", "direction", "device", "backend", "", "because")
        lines = [head] + [
            (
                r.op,
                r.direction,
                r.device,
                r.backend,
                "chosen" if r.chosen else "-",
                r.reason or r.source,
            )
            for r in self.rows
        ]
        widths = [max(len(line[i]) for line in lines) for i in range(5)]
        return "\n".join(
            "  ".join(part.ljust(width) for part, width in zip(line, widths, strict=False))
            + "  "
            + line[5]
            for line in lines
        )


def _devices() -> list[torch.device]:
    """The CPU and every accelerator that torch sees: one machine may hold different ones."""
    devices = [torch.device("cpu")]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        count = torch.accelerator.device_count()
        devices += [torch.device(accelerator.type, index) for index in range(count)]
    return devices


def _missing_device(device: torch.device) -> str | None:
    """Why no tensor can be on a device of this type here, or None."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    accelerator_type = None if accelerator is None else accelerator.type
    if device.type in ("cpu", "meta", accelerator_type):
        return None
    return f"this machine has no {device.type} device that PyTorch sees"


def _weigh(op: str, direction: str, device: torch.device, dtype: torch.dtype) -> list[Row]:
    """A row for every backend: whether it is chosen, and the reason for or against it."""
    prim: Any = OPS[op].fwd if direction == "forward" else OPS[op].bwd
    config = current()
    choice = config.choice(op, device, dtype)
    chain = candidates(prim, config, device, dtype)
    unlisted = [
        candidate(n, prim, device, dtype) for n in backends() if n not in {c.name for c in chain}
    ]
    missing_device = _missing_device(device)
    rows, winner = [], next((c for c in chain if c.reason is None and not missing_device), None)
    for item in [*chain, *unlisted]:
        rows.append(
            Row(
                op,
                direction,
                str(device),
                item.name,
                item is winner,
                item.reason or missing_device or _reason(item, winner, chain),
                choice.source,
            )
        )
    return rows


def _reason(item: Candidate, winner: Candidate | None, chain: list[Candidate]) -> str | None:
    if item is winner:
        return "may refuse single calls" if item.supports is not None else None
    return (
        f"stands behind {winner.name}"
        if winner is not None and item in chain
        else "not named by the configuration"
    )


def passed_over(op: str, tensors: Mapping[str, Tensor]) -> str | None:
    """Why forward falls back to the reference although the device has a kernel.

    Args:
        op: Operator's name.
        tensors: Its tensors by name, as far as their shapes decide; the first one has the device
            and dtype.

    Returns:
        What the first kernel says; None where a kernel runs, or the device has none.
    """
    prim: Any = OPS[op].fwd
    tensor, args = next(iter(tensors.values())), tuple(tensors.get(name) for name in prim.params)
    refused = None
    for item in candidates(prim, current(), tensor.device, tensor.dtype):
        if item.call is None:
            continue
        if item.name == REFERENCE:
            return refused
        reason = item.supports(args) if item.supports is not None else None
        if reason is None:
            return None
        refused = refused or f"{item.name} {reason}"
    return None


def explain(
    op: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Explanation:
    """Weigh every backend for an operator (or all) on a device (or all that torch sees).

    Args:
        op: Operator's name; None for all.
        device: Device or its type; None for the CPU and every accelerator.
        dtype: Dtype of the tensors; None stands for float32 on a CPU and bfloat16 elsewhere.

    Raises:
        ConfigurationError: Unknown operator or device, or an index that this machine lacks.
        TypeError: ``device`` or ``dtype`` is of another type.
    """
    if op is not None and op not in operators():
        raise ConfigurationError(unknown("operator", op, operators(), "liger-multi explain"))
    if device is not None and not isinstance(device, str | torch.device):
        raise TypeError(f"device must be a torch.device or its name, got {shown(device)}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {shown(dtype)}")
    devices = _devices() if device is None else [device_of(str(device))]
    rows: list[Row] = []
    for target in devices:
        tensor_dtype = dtype or (torch.float32 if target.type == "cpu" else torch.bfloat16)
        for name in operators() if op is None else (op,):
            for direction in ("forward", "backward"):
                rows += _weigh(name, direction, target, tensor_dtype)
    return Explanation(tuple(rows))
