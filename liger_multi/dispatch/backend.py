"""What a vendor's folder declares about itself: one :class:`Backend` record, named ``BACKEND``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class DeviceInfo:
    """The limits of one device that launch formulas need.

    Attributes:
        backend: Name of the backend whose launch tables apply.
        arch: Architecture key; the launch table is ``backends/<backend>/launch/<arch>.yaml``.
        warp_size: Threads that run in lock step (32 or 64).
        max_threads: Threads a program may have.
        shared_bytes: On-chip memory of one program, in bytes.
        cores: Multiprocessors, compute units or vector cores of the architecture's full card, so
            that all cards of an architecture add in the same order.
        table: Architecture whose launch table applies, where there is none of its own.
    """

    backend: str
    arch: str
    warp_size: int
    max_threads: int
    shared_bytes: int
    cores: int
    table: str = ""


@dataclass(frozen=True)
class Backend:
    """One backend: where it runs, what it inherits, and why it may refuse.

    Attributes:
        name: The folder's name and the word used in configurations.
        device_type: ``tensor.device.type`` it serves by default; None for a shared layer.
        parents: Backends whose operators it inherits, in order.
        probe: Why the backend is unavailable in this process, or None. Called lazily, once.
        supports: Why tensors of this device and dtype are refused, or None. Called once a plan.
        device_info: Limits of a device; None where launch numbers mean nothing.
        describe: Facts for ``liger-multi doctor``.
        not_bitwise: Properties of bits that its operators do not have, with the reason
            (:mod:`liger_multi.dispatch.bitwise`).
        aliases: What else people call the devices that it serves, for messages.
        gemm_by_rows: Returns ``out = a @ b (+ bias)`` with independent rows, called as ``(a, b,
            bias, out)``; None where there is none.
    """

    name: str
    device_type: str | None = None
    parents: tuple[str, ...] = ()
    probe: Callable[[], str | None] = lambda: None
    supports: Callable[[torch.device, torch.dtype], str | None] = lambda device, dtype: None
    device_info: Callable[[torch.device], DeviceInfo] | None = None
    describe: Callable[[], dict[str, str]] = dict
    not_bitwise: Mapping[str, str] = field(default_factory=dict)
    gemm_by_rows: Callable[[], Callable[..., Any]] | None = None
    aliases: tuple[str, ...] = ()
