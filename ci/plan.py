"""Which devices a run of the workflow tests on: ``python -m ci.plan``, for ``.github/workflows``.

Reads what started the run from the environment and prints ``devices=[...]``, a JSON list of one
entry for each backend. Only backends whose runner the repository names in its variable ``RUNNERS``
(``["cuda", "npu"]``) are planned: a job for a label that no runner has would wait for a day.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping

DEVICES = ("cuda", "rocm", "npu")
LABEL = "test on "  # a pull request's label, such as `test on cuda`


def jobs(event: str, action: str, label: str, choice: str) -> list[str]:
    """Backends that an event asks for, whether or not there is a runner."""
    if event == "schedule":
        return list(DEVICES)
    if event == "workflow_dispatch":
        return [name for name in DEVICES if choice in ("all", name)]
    if event == "pull_request" and action == "labeled":
        return [name for name in DEVICES if label == LABEL + name]
    return []


def plan(environment: Mapping[str, str]) -> list[dict[str, object]]:
    """Entries of the job matrix.

    Raises:
        ValueError: ``RUNNERS`` is not a list of backends.
    """
    text = environment.get("RUNNERS") or "[]"
    try:
        runners = json.loads(text)
    except ValueError:
        runners = None
    if not isinstance(runners, list) or not set(runners) <= set(DEVICES):
        raise ValueError(f"RUNNERS must be a JSON list of {', '.join(DEVICES)}, got {text}")
    # Code of a fork never runs on somebody's machine: a maintainer pushes it to a branch first.
    if environment.get("FORK") == "true":
        return []
    values = [environment.get(name, "") for name in ("EVENT", "ACTION", "LABEL", "CHOICE")]
    return [
        {"backend": name, "labels": ["self-hosted", "linux", name]}
        for name in jobs(*values)
        if name in runners
    ]


def main() -> int:
    """Print one line for ``GITHUB_OUTPUT``."""
    try:
        print(f"devices={json.dumps(plan(os.environ))}")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
