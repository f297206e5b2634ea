"""A simple model of how long a step takes, from published figures of cards.

The time of a device is that of its GEMMs, at a share of the card's rate, plus that of the bytes
that everything else moves, at a share of its bandwidth. It is at least what the host needs to
launch it all, which dominates steps of few tokens. Gradients and shards travel while GEMMs run, so
the longer of both counts; the device waits for all-reduces of tensor parallelism and for pipelines
that fill. Offloaded activations cross to the host and back while GEMMs run. Only ratios of these
times mean something.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from liger_multi.dispatch.config import parse_memory
from liger_multi.errors import unknown

if TYPE_CHECKING:
    from liger_multi.memory.planning.traces import Work

# --- cards ---

GB, TERA, GIGA = 10**9, 1e12, 1e9


@dataclass(frozen=True)
class Card:
    """What a vendor publishes about one device.

    Attributes:
        name: Product name.
        memory: Memory [bytes].
        products16: FLOP/s of dense 16-bit GEMMs that accumulate in fp32.
        products32: FLOP/s of fp32 GEMMs without reduced precision.
        products8: FLOP/s of FP8 GEMMs; 0 where there are none.
        bandwidth: Bytes per second of its memory.
        link: Bytes per second to the other cards of its host, in one direction.
        host: Bytes per second to the host, in one direction.
        bf16: Whether bfloat16 GEMMs run at the 16-bit rate; otherwise float16 does.
        source: Where the figures are published.
        guessed: Whether the rates are another card's.
    """

    name: str
    memory: int
    products16: float
    products32: float
    bandwidth: float
    link: float
    host: float
    source: str
    bf16: bool = True
    guessed: bool = False
    products8: float = 0.0


def _card(
    name: str,
    memory: float,
    gemms: tuple[float, ...],
    bandwidth: float,
    link: float,
    host: float,
    source: str,
    bf16: bool = True,
) -> Card:
    """A card from GB, TFLOPS in 16, 32 and 8 bits (0: none), and three bandwidths in GB/s."""
    flops = (gemms[0] * TERA, gemms[1] * TERA)
    rates = (bandwidth * GIGA, link * GIGA, host * GIGA)
    float8 = gemms[2] * TERA if len(gemms) > 2 else 0.0
    return Card(name, round(memory * GB), *flops, *rates, source, bf16, products8=float8)


# PCIe x16 moves 16, 32 or 64 GB/s each way in its generations 3, 4 and 5.
CARDS = {
    "b200": _card("NVIDIA B200", 180, (2250, 75, 4500), 7700, 900, 64, "NVIDIA DGX B200 datasheet"),
    "h200": _card("NVIDIA H200", 141, (989, 67, 1979), 4800, 450, 64, "NVIDIA H200 datasheet"),
    "h100": _card("NVIDIA H100 SXM", 80, (989, 67, 1979), 3350, 450, 64, "NVIDIA H100 datasheet"),
    "a100-80gb": _card("NVIDIA A100 80GB", 80, (312, 19.5), 2039, 300, 32, "NVIDIA A100 datasheet"),
    "a100-40gb": _card("NVIDIA A100 40GB", 40, (312, 19.5), 1555, 300, 32, "NVIDIA A100 datasheet"),
    "l40s": _card("NVIDIA L40S", 48, (362, 91.6, 733), 864, 32, 32, "NVIDIA L40S datasheet"),
    "l4": _card("NVIDIA L4", 24, (121, 30.3, 242), 300, 32, 32, "NVIDIA L4 datasheet"),
    "a10": _card("NVIDIA A10", 24, (125, 31.2), 600, 32, 32, "NVIDIA A10 datasheet"),
    "rtx5090": _card(
        "GeForce RTX 5090", 32, (209.5, 104.8, 419), 1792, 64, 64, "NVIDIA RTX Blackwell whitepaper"
    ),
    "rtx4090": _card(
        "GeForce RTX 4090", 24, (165.2, 82.6, 330.3), 1008, 32, 32, "NVIDIA Ada whitepaper"
    ),
    "rtx3090": _card(
        "GeForce RTX 3090", 24, (71, 35.6), 936, 32, 32, "NVIDIA Ampere GA102 whitepaper"
    ),
    "v100": _card(
        "NVIDIA V100 SXM2", 32, (125, 15.7), 900, 150, 16, "NVIDIA V100 datasheet", False
    ),
    "t4": _card("NVIDIA T4", 16, (65, 8.1), 320, 16, 16, "NVIDIA T4 datasheet", False),
    "mi325x": _card(
        "AMD Instinct MI325X", 256, (1307.4, 163.4, 2614.9), 6000, 448, 64, "AMD MI325X datasheet"
    ),
    "mi300x": _card(
        "AMD Instinct MI300X", 192, (1307.4, 163.4, 2614.9), 5300, 448, 64, "AMD MI300X datasheet"
    ),
    "mi250x": _card("AMD Instinct MI250X", 128, (383, 47.9), 3277, 400, 32, "AMD MI250X datasheet"),
}


def card_of(spec: str | int | Card) -> tuple[Card, int]:
    """A card and the bytes of it that may be used.

    Args:
        spec: A name of :data:`CARDS`, both as ``"h200:24GiB"``, a :class:`Card`, or a size such as
            ``"24GiB"`` or ``"24GB"``, which gets the rates of the known card whose memory is
            nearest.

    Raises:
        ValueError: Neither a card nor a size.
    """
    if isinstance(spec, Card):
        return spec, spec.memory
    if isinstance(spec, str):
        name, colon, part = spec.partition(":")
        key = name.strip().lower().replace(" ", "")
        if key in CARDS:
            card = CARDS[key]
            return card, parse_memory(part, "memory") if colon else card.memory
        if not key[:1].isdigit():
            raise ValueError(f"{unknown('card', spec, CARDS)}; or a size such as '24GiB' or '24GB'")
    size = parse_memory(spec, "memory")
    nearest = min(CARDS.values(), key=lambda c: (abs(math.log(c.memory / size)), c.bandwidth))
    values = (nearest.products16, nearest.products32, nearest.bandwidth, nearest.link, nearest.host)
    properties = (nearest.source, nearest.bf16, True, nearest.products8)
    return Card(nearest.name, size, *values, *properties), size


# --- the host ---

DEFAULT_HOST_MEMORY = 128 * 2**30  # bytes for a device, where this machine has no devices
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def host_bytes(value: str | int | None) -> int:
    """Bytes of the host's memory for each device.

    Args:
        value: A size such as ``"128GiB"``. None: the share of each device of this machine, or
            128 GiB where it has none.

    Raises:
        ConfigurationError: It is no size.
    """
    if value is not None:
        return parse_memory(value, "host memory")
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return _machine_memory() // devices if devices else DEFAULT_HOST_MEMORY


def _machine_memory() -> int:
    """Bytes of this machine, or of the container that it runs in."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        sizes.append(int(CONTAINER_LIMIT.read_text(encoding="ascii")))
    return min(sizes)


# --- time ---

PRODUCTS, STREAM, LINK = 0.65, 0.8, 0.7  # reached shares of published rates
PRODUCTS8 = 0.59  # FP8 GEMMs of a Llama-3-8B layer took 0.56 of the time of bf16 (H100, 2026-11)
# Seconds of a host for an operator, Python's and autograd's parts included: unpatched steps of few
# tokens took 25 to 39 us (H200 machine, torch 2.11, 2026-11-22).
LAUNCH = 30e-6
# Launches that one direction of our operators counts as, and a tensor that goes to the host and
# back: with these, predicted times of patched steps of few tokens are those measured.
OWN, PARKED = 8, 5
# GEMMs of backward per GEMM of forward, by operator; adapters need none for frozen weights.
EXPERTS = {"fused_moe": 3, "lora_moe": 2}
HOST_MEMORY = 50e9  # bytes per second of an optimizer that runs on the host


@dataclass(frozen=True)
class Traffic:
    """Bytes of one device in one step that go elsewhere.

    Attributes:
        overlapped: Sent to other cards while it computes.
        waited: Sent to other cards while it waits.
        host: Activations sent to the host and back.
        states: Optimizer states read and written in the host's memory or on its disk.
        gradients: Gradients sent to the host, and weights sent back.
    """

    overlapped: float = 0.0
    waited: float = 0.0
    host: float = 0.0
    states: float = 0.0
    gradients: float = 0.0


def compute_seconds(work: Work, card: Card) -> float:
    """Time of one pass over ``work``."""
    rates = {1: PRODUCTS8 * card.products8, 2: PRODUCTS * card.products16}
    wide = PRODUCTS * card.products32
    products = sum(count / (rates.get(size) or wide) for size, count in work.flops.items())
    return max(products + work.moved / (STREAM * card.bandwidth), work.launches * LAUNCH)


def step_seconds(
    work: Work,
    optimizer_bytes: float,
    traffic: Traffic,
    card: Card,
    accumulation: int = 1,
    stages: int = 1,
) -> float:
    """Time of one optimizer step on one device.

    Args:
        work: Work of one micro-batch on one stage.
        optimizer_bytes: Bytes that the optimizer reads and writes on the device.
        traffic: Bytes sent during the whole step.
        card: The card that it runs on.
        accumulation: Number of micro-batches.
        stages: Number of pipeline stages.
    """
    compute = compute_seconds(work, card) * (accumulation + stages - 1)
    link = LINK * card.link
    hidden = max(compute, traffic.overlapped / link, traffic.host / (LINK * card.host))
    update = optimizer_bytes / (STREAM * card.bandwidth)
    offloading = traffic.states / HOST_MEMORY + traffic.gradients / (LINK * card.host)
    return hidden + traffic.waited / link + update + offloading
