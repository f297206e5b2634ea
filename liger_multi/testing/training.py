"""Training runs that are compared bit by bit: many steps of a small model, and a digest of them.

A digest covers the loss of every step and all parameters after the last one, so that two runs
have equal digests only if every one of these bits is equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_multi.dispatch.config import use

STEPS = 100
Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Trained:
    """What is left of a training run.

    Attributes:
        first: Loss of the first step.
        last: Loss of the last step.
        losses: Digest of all losses.
        parameters: Digest of all parameters.
    """

    first: float
    last: float
    losses: str
    parameters: str


def digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of the bytes of tensors with their shapes and dtypes, shortened."""
    sha256 = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        sha256.update(f"{tuple(plain.shape)} {plain.dtype}".encode())
        sha256.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()[:16]


def batches(
    vocabulary: int, device: torch.device | str, steps: int = STEPS, rows: int = 2, length: int = 16
) -> Iterator[Batch]:
    """Random tokens, the same in every run: five batches in turn, of which a model can learn.

    Lengths and numbers of ignored labels vary.
    """
    for step in range(steps):
        generator = torch.Generator().manual_seed(step % 5)
        size = length - step % 5
        ids = torch.randint(3, vocabulary, (rows, size), generator=generator)
        labels = ids.clone()
        labels[0, : 1 + step % 3] = -100
        yield {"input_ids": ids.to(device), "labels": labels.to(device)}


def train(model: nn.Module, batches: Iterable[Batch], lr: float = 1e-3) -> Trained:
    """Train a model that returns its loss with AdamW; on a device, no step waits for it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    fused = parameters[0].device.type == "cuda"
    optimizer = torch.optim.AdamW(parameters, lr=lr, fused=fused)
    losses: list[Tensor] = []
    for batch in batches:
        output: Any = model(**batch)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(output.loss.detach().clone())
    return Trained(losses[0].item(), losses[-1].item(), digest(losses), digest(parameters))


def train_twice(
    make: Callable[[], nn.Module],
    batches: Callable[[], Iterable[Batch]],
    deterministic: bool | str = True,
) -> tuple[Trained, Trained]:
    """Two runs of equal models on equal batches under a setting of the switch.

    Args:
        make: Builds the model, with the same weights every time.
        batches: The batches of one run.
        deterministic: As :func:`liger_multi.use` takes it.
    """
    runs = []
    with use(deterministic=deterministic):
        for _ in range(2):
            model = make()
            device = next(model.parameters()).device
            # the second run meets other addresses, and memory with other contents
            blocks = [torch.full((1000 * n,), float("nan"), device=device) for n in range(1, 9)]
            del blocks[::2]
            runs.append(train(model, batches()))
    return runs[0], runs[1]
