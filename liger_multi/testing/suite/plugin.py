"""The options and hooks of ``python -m liger_multi.testing``, which runs the suite on a backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from liger_multi.dispatch.registry import backends
from liger_multi.errors import unknown
from liger_multi.testing.devices import device_of, refusal
from liger_multi.testing.poison import poison_empty
from liger_multi.testing.suite import expected

UNUSED = pytest.StashKey[list[expected.Expected]]()


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


def place(config: pytest.Config) -> torch.device:
    """The device under test.

    Raises:
        pytest.UsageError: The backend is unknown or cannot run here.
    """
    backend = config.getoption("--backend")
    if backend is None:
        raise pytest.UsageError(f"--backend NAME is needed, one of {', '.join(sorted(backends()))}")
    if backend not in backends():
        raise pytest.UsageError("--backend: " + unknown("backend", backend, backends()))
    given = config.getoption("--device")
    if given is not None:
        return torch.device(given)
    reason, found = refusal(backend), device_of(backend)
    if reason is not None or found is None:
        raise pytest.UsageError(f"--backend {backend}: cannot run on this machine: {reason}")
    return found


def pytest_configure(config: pytest.Config) -> None:
    """Refuse wrong options before anything is collected, and poison uninitialized memory."""
    place(config)
    poison_empty()
    # PyTorch lets NVIDIA's convolutions round fp32 to TF32 unless it is told not to.
    torch.backends.cudnn.allow_tf32 = False


def pytest_report_header(config: pytest.Config) -> str:
    """What is tested, on which versions."""
    backend = config.getoption("--backend")
    return f"backend under test: {backend}; device: {place(config)}; torch {torch.__version__}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark expected failures."""
    file = config.getoption("--expected-failures")
    config.stash[UNUSED] = expected.mark(items, expected.read(file)) if file else []


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Lines of the file that mean no test of this run."""
    unused = config.stash.get(UNUSED, [])
    return [f"expected failure that means no test: {entry.test}" for entry in unused]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device under test."""
    return place(request.config)
