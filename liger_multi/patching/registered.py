"""What users add to the knowledge about models: kinds, names and rows of their own."""

from __future__ import annotations

from typing import Any

from liger_multi.patching.kinds import NORM_KINDS, NormKind

_norms: list[NormKind] = []
_probes: dict[str, Any] = {}


def probes() -> dict[str, Any]:
    """The registered probes by patch key."""
    return dict(_probes)


def norm_kinds() -> tuple[NormKind, ...]:
    """The known kinds of norms."""
    return (*NORM_KINDS, *_norms)


def generation() -> int:
    """A number that changes when something is added, for caches of what probes found."""
    return len(_norms)
