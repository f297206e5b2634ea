"""The releases that the whole suite has run with, oldest and newest.

``liger-multi doctor`` names versions outside of them. The oldest are those of
``ci/constraints/oldest.txt``, and none is older than what is pinned. Raise a newest one when the
suite has passed with it (CONTRIBUTING.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

TESTED: Mapping[str, tuple[str, str]] = {
    "python": ("3.10", "3.14"),
    "torch": ("2.9.1", "2.15.0"),
    "triton": ("3.5.1", "3.9.0"),
    "transformers": ("5.0.0", "5.24.0"),
    "accelerate": ("1.15.0", "1.15.0"),
    "peft": ("0.21.2", "0.21.2"),
    "trl": ("1.16.0", "1.16.0"),
}


def untested(versions: Mapping[str, str]) -> list[str]:
    """A sentence for each version that is older or newer than what was tested.

    Patch releases of the oldest and the newest count as tested.

    Args:
        versions: Versions by package; what does not begin with two numbers is passed by.
    """
    sentences = []
    for name, (oldest, newest) in TESTED.items():
        minor = _minor(versions.get(name, ""))
        if minor is None:
            continue
        shown = versions[name].split()[0]
        tested = oldest if oldest == newest else f"{oldest} to {newest}"
        for word, outside in (
            ("older", minor < (_minor(oldest) or minor)),
            ("newer", minor > (_minor(newest) or minor)),
        ):
            if outside:
                sentences.append(f"{name} {shown} is {word} than what was tested ({tested})")
    return sentences


def _minor(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None
