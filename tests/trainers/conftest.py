"""What tests of the names of Liger-Kernel share."""

import importlib.util

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
