"""The options and hooks of ``python -m liger_multi.testing``, which runs the suite on a backend.

Expected failures are a text file with one test id and its reason per line::

    # id                                              reason
    test_forward_and_backward[softmax-toy-*-bfloat16]  # rounds twice, https://example.org/1

``*`` in an id stands for any text. A test that passes unexpectedly fails, so that its line goes.

Uninitialized memory holds NaN (:mod:`liger_multi.testing.checks`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from liger_multi.dispatch.registry import backends
from liger_multi.errors import unknown
from liger_multi.testing.checks import device_of, poison_empty, refusal

# --- expected failures ---


@dataclass(frozen=True)
class Expected:
    """One line: the tests it means, and why they fail."""

    test: str
    reason: str

    def matches(self, item: pytest.Item) -> bool:
        """Whether a test has this id; the path of its file may be left out."""
        pattern = ".*".join(map(re.escape, self.test.split("*")))
        return re.fullmatch(f"(.*::)?{pattern}", item.nodeid) is not None


def read_expected(file: Path) -> list[Expected]:
    """The lines of a file.

    Raises:
        pytest.UsageError: The file cannot be read, or a line gives no reason.
    """
    failures = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise pytest.UsageError(f"expected failures cannot be read: {error}") from error
    for line_number, line in enumerate(lines, 1):
        test, _, reason = (part.strip() for part in line.partition("#"))
        if test and not reason:
            raise pytest.UsageError(
                f"{file.name}:{line_number}: an expected failure needs a reason, as in "
                f"'test id  # reason'; got {line!r}"
            )
        if test:
            failures.append(Expected(test, reason))
    return failures


def mark_expected(items: Sequence[pytest.Item], entries: Iterable[Expected]) -> list[Expected]:
    """Mark every test that an entry means; returns the entries that mean none."""
    unused = []
    for entry in entries:
        matching = [item for item in items if entry.matches(item)]
        for item in matching:
            item.add_marker(pytest.mark.xfail(reason=entry.reason, strict=True))
        unused += [] if matching else [entry]
    return unused


# --- pytest ---

UNUSED = pytest.StashKey[list[Expected]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    group = parser.getgroup("liger_multi")
    group.addoption("--backend", metavar="NAME", help="the backend to test")
    group.addoption("--device", metavar="DEVICE", help="default: that of the backend's record")
    group.addoption(
        "--expected-failures",
        type=Path,
        metavar="FILE",
        help="test ids that are known to fail, one per line with '# reason'",
    )


def device_under_test(config: pytest.Config) -> torch.device:
    """The device under test.

    Raises:
        pytest.UsageError: The backend is unknown or cannot run here.
    """
    backend = config.getoption("--backend")
    if backend is None:
        raise pytest.UsageError(f"--backend NAME is needed, one of {', '.join(sorted(backends()))}")
    if backend not in backends():
        raise pytest.UsageError("--backend: " + unknown("backend", backend, backends()))
    requested = config.getoption("--device")
    if requested is not None:
        return torch.device(requested)
    reason, device = refusal(backend), device_of(backend)
    if reason is not None or device is None:
        raise pytest.UsageError(f"--backend {backend}: cannot run on this machine: {reason}")
    return device


def pytest_configure(config: pytest.Config) -> None:
    """Refuse wrong options before anything is collected, and poison uninitialized memory."""
    device_under_test(config)
    poison_empty()
    # PyTorch lets NVIDIA's convolutions round fp32 to TF32 unless it is told not to.
    torch.backends.cudnn.allow_tf32 = False


def pytest_report_header(config: pytest.Config) -> str:
    """What is tested, on which versions."""
    backend = config.getoption("--backend")
    device = device_under_test(config)
    return f"backend under test: {backend}; device: {device}; torch {torch.__version__}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark expected failures."""
    file = config.getoption("--expected-failures")
    config.stash[UNUSED] = mark_expected(items, read_expected(file)) if file else []


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Lines of the file that mean no test of this run."""
    unused = config.stash.get(UNUSED, [])
    return [f"expected failure that means no test: {entry.test}" for entry in unused]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device under test."""
    return device_under_test(request.config)
