"""How long a step takes, told simply.

Time of a device: products at a share of the card's rate, and the bytes that everything else moves
at a share of its bandwidth, one after the other; at least what a host needs to launch it all, which
rules steps of few tokens.
Gradients and shards travel while products run, so the longer of both counts; sums within layers of
tensor parallelism do not, nor do pipelines that fill. Offloaded activations cross to the host and
back while products run. Only ratios of these times mean something.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from liger_multi.memory.planning.cards import Card
    from liger_multi.memory.planning.traces import Work

PRODUCTS, STREAM, LINK = 0.65, 0.8, 0.7  # reached shares of published rates
# Seconds of a host for an operator, Python's and autograd's parts included: stock steps of few
# tokens took 25 to 39 us (H200 machine, torch 2.11, 2026-11-22).
LAUNCH = 30e-6
# Operators that a half of one of ours is told as, and a tensor that goes to the host and back:
# patched steps of few tokens last as long as with these.
OWN, PARKED = 8, 5
HOST_MEMORY = 50e9  # bytes a second of an optimizer that runs on the host


@dataclass(frozen=True)
class Traffic:
    """Bytes of one device in one step that go elsewhere.

    Attributes:
        overlapped: To other cards while it computes.
        waited: To other cards while it waits.
        host: Activations to the host and back.
        states: Optimizer states that the host's memory or disk moves.
        gradients: To the host and weights back.
    """

    overlapped: float = 0.0
    waited: float = 0.0
    host: float = 0.0
    states: float = 0.0
    gradients: float = 0.0


def compute_seconds(work: Work, card: Card) -> float:
    """Of one pass over ``work``."""
    rates = {size: card.products32 if size >= 4 else card.products16 for size in work.flops}
    products = sum(count / (PRODUCTS * rates[size]) for size, count in work.flops.items())
    return max(products + work.moved / (STREAM * card.bandwidth), work.launches * LAUNCH)


def step_seconds(
    work: Work,
    optimizer_bytes: float,
    traffic: Traffic,
    card: Card,
    accumulation: int = 1,
    stages: int = 1,
) -> float:
    """Of one optimizer step on one device.

    Args:
        work: Of one micro-batch on one stage.
        optimizer_bytes: That the optimizer reads and writes on the device.
        traffic: Of the whole step.
        card: Where it runs.
        accumulation: Micro-batches.
        stages: Of a pipeline.
    """
    compute = compute_seconds(work, card) * (accumulation + stages - 1)
    link = LINK * card.link
    hidden = max(compute, traffic.overlapped / link, traffic.host / (LINK * card.host))
    update = optimizer_bytes / (STREAM * card.bandwidth)
    away = traffic.states / HOST_MEMORY + traffic.gradients / (LINK * card.host)
    return hidden + traffic.waited / link + update + away
