"""Activations that wait for backward in the host's memory, copied beside the computation."""

from __future__ import annotations

from torch import nn


class Offload:
    """What :func:`offload_activations` did; a context manager that takes it back at its end."""

    offloaded_bytes: int
    kept_bytes: int

    def remove(self) -> None:
        """Let the model keep its activations on the device again."""
        raise NotImplementedError


def offload_activations(
    model: nn.Module, *, min_bytes: int = 2**20, in_flight_bytes: int = 2**30
) -> Offload:
    """Copy what layers keep for backward to the host, and back in time.

    Args:
        model: As of ``apply_recompute``; both go together (the kept inputs are offloaded then).
        min_bytes: Tensors smaller than this stay; so do parameters.
        in_flight_bytes: Of device memory for tensors on their way, in either direction.
    """
    raise NotImplementedError
