"""What users add to the knowledge about models: kinds, names and rows of their own."""

from __future__ import annotations

from typing import Any

from liger_multi.patching.kinds import MLP_KINDS, MLP_NAMES, NORM_KINDS, MlpKind, MlpNames, NormKind

_norms: list[NormKind] = []
_mlps: list[MlpNames] = []
_gates: list[MlpKind] = []
_probes: dict[str, Any] = {}


def probes() -> dict[str, Any]:
    """The registered probes by patch key."""
    return dict(_probes)


def norm_kinds() -> tuple[NormKind, ...]:
    """The known kinds of norms."""
    return (*NORM_KINDS, *_norms)


def mlp_names() -> tuple[MlpNames, ...]:
    """The known names of the layers of gated MLPs."""
    return (*MLP_NAMES, *_mlps)


def mlp_kinds() -> tuple[MlpKind, ...]:
    """The known gated activations."""
    return (*MLP_KINDS, *_gates)


def generation() -> int:
    """A number that changes when something is added, for caches of what probes found."""
    return len(_norms) + len(_mlps) + len(_gates)
