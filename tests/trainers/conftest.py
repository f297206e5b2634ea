"""What tests of the names of Liger-Kernel share."""

import importlib.util
import sys

import pytest

from liger_multi.compat import liger_kernel as alias


@pytest.fixture
def installed():
    """Our names in place of the package, for one test."""
    if importlib.util.find_spec("liger_kernel"):
        pytest.skip("the real package is installed")
    alias.install()
    yield
    alias.uninstall()


@pytest.fixture
def liger(installed):
    """``liger_kernel.transformers`` as it is served."""
    home = "liger_kernel.transformers"
    for name in ("functional", "monkey_patch", "trainer"):
        importlib.import_module(f"{home}.{name}")
    return sys.modules[home]
