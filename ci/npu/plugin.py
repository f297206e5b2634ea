"""pytest on the simulated NPU: ``python -m pytest -p ci.npu.plugin --backend npu``.

Every test runs under the simulated device, and Triton kernels through the Ascend lowering on the
CPU; with ``ASCEND_GRID=reversed``, the programs of every launch run in the other order.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ci.npu import execute
from ci.npu.simulate import Device


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """One test, its fixtures included."""
    with Device(), execute.launches():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """What tests make as they are collected."""
    with Device():
        return (yield)
