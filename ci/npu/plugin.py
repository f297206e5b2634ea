"""pytest on the simulated NPU: ``python -m pytest -p ci.npu.plugin --backend npu``.

Every test runs under the simulated device, and Triton kernels through the Ascend lowering on the
CPU; with ``ASCEND_GRID=reversed``, the programs of every launch run in the other order, and with
``TRITON_INTERPRET=1`` kernels are interpreted. ``--share 1/8`` takes every eighth test of a file of
samples, ``--slow-npu`` every form of every kernel through the vendor's compiler.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from ci.npu import execute
from ci.npu.simulate import Device

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = Device()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    parser.addoption("--slow-npu", action="store_true", help="every form of every kernel")
    parser.addoption("--share", default="1/1", metavar="K/N", help="each Nth sample, from the Kth")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a share of the tests over samples; of every operator some, whatever the share."""
    first, every = map(int, config.getoption("--share").split("/"))
    if every == 1:
        return
    seen: dict[tuple[str, ...], int] = {}
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        names = getattr(getattr(item, "callspec", None), "params", {})
        if "sample" not in names:
            kept.append(item)
            continue
        where = (item.name.partition("[")[0], str(names["op"]), str(names["backend"]))
        seen[where] = seen.get(where, 0) + 1
        (kept if seen[where] % every == first % every else dropped).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


@pytest.fixture
def simulated() -> Device:
    """The device under the test, which counts what runs."""
    return DEVICE


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """One test, its fixtures included."""
    with DEVICE, contextlib.nullcontext() if INTERPRETED else execute.launches():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """What tests make as they are collected."""
    with DEVICE:
        return (yield)
