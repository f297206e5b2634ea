"""What an operator has to do at least: bytes moved and operations, by the shapes of its inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

Shapes = Mapping[str, Sequence[int]]
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Work:
    """The least that any implementation must do, forward alone and with backward."""

    forward_bytes: float
    both_bytes: float
    forward_operations: float = 0.0
    both_operations: float = 0.0


Estimate = Callable[[Shapes, int, Options], Work]
"""Work from the shapes of the inputs by name, the bytes of an element, and the options."""


def elementwise(forward: int, total: int) -> Estimate:
    """Work in passes over the first tensor: each input is read once, each output written once."""

    def work(shapes: Shapes, size: int, options: Options) -> Work:
        elements = math.prod(next(iter(shapes.values())))
        return Work(elements * forward * size, elements * total * size)

    return work


def with_code_bytes(plain: Estimate) -> Estimate:
    """Work of an operator whose forward also writes a code of one byte per element."""

    def work(shapes: Shapes, size: int, options: Options) -> Work:
        codes, base = math.prod(next(iter(shapes.values()))), plain(shapes, size, options)
        return replace(
            base,
            forward_bytes=base.forward_bytes + codes,
            both_bytes=base.both_bytes + codes,
        )

    return work


def streamwise(forward: int, total: int, single_stream: tuple[int, int]) -> Estimate:
    """Passes over the streams, and over what has one stream."""

    def work(shapes: Shapes, size: int, options: Options) -> Work:
        all_bytes = math.prod(shapes["x"]) * size
        stream_bytes = all_bytes / shapes["x"][-2]
        return Work(
            forward * all_bytes + single_stream[0] * stream_bytes,
            total * all_bytes + single_stream[1] * stream_bytes,
        )

    return work


def visible_pairs(length: int, keys: int, options: Options) -> float:
    """Queries times the keys that each sees."""
    window, causal = options.get("window"), options.get("causal", False)
    left, right = (window - 1,) * 2 if isinstance(window, int) else window or (-1, -1)
    right = 0 if causal else right
    positions = torch.arange(keys - length, keys)
    first = 0 if left < 0 or window is None else (positions - left).clamp(min=0)
    end = keys if right < 0 else (positions + right + 1).clamp(max=keys)
    return float((end - first + torch.zeros_like(positions)).sum())
