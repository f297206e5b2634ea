"""A missing private symbol of PyTorch switches something off and breaks nothing.

One process imports PyTorch and transformers and forks for every symbol of the table; the child sees
a PyTorch without it, imports the library, patches a model and trains it.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from liger_multi import _torch_private

pytest.importorskip("transformers")

TABLE = sorted({path for symbol in _torch_private.SYMBOLS for path in symbol.paths})
EVERY = "all of them"
DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
SERVER = Path(__file__).with_name("without_symbol.py")


@pytest.fixture(scope="module")
def without():
    """A function that trains a model without a symbol: its traceback, if it failed, and its log."""
    command = [sys.executable, str(SERVER), *TABLE]
    path = os.pathsep.join(
        [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # without a device, whose threads of autograd no fork could take along
        env={**os.environ, "PYTHONPATH": path, **dict.fromkeys(DEVICES, "")},
    ) as server:

        def ask(path):
            server.stdin.write(f"{path}\n")
            server.stdin.flush()
            return json.loads(server.stdout.readline())

        with contextlib.closing(server.stdin):
            yield ask


@pytest.mark.parametrize("path", [EVERY, *TABLE])
def test_a_model_trains_without_a_symbol(without, path):
    error, _ = without(path)
    assert not error, error


def test_missing_symbol_logged_once(without):
    lost = {symbol.paths[0]: symbol.lost for symbol in _torch_private.SYMBOLS}
    for path in ("torch._C._len_torch_dispatch_stack", "torch.Tensor._make_wrapper_subclass"):
        _, log = without(path)
        assert sum(path in line and lost[path] in line for line in log) == 1
    assert without("torch._C._is_any_autocast_enabled")[1] == []  # replaced by public means


def test_symbol_rows_are_complete():
    for symbol in _torch_private.SYMBOLS:
        assert symbol.serves
        assert re.fullmatch(r"2\.\d+ to 2\.\d+", symbol.versions)
        assert re.search(r"\._|^torch\._C\.", symbol.paths[0])


def test_symbols_of_this_pytorch():
    """A release within the versions of a row has its symbol."""
    import torch

    release = tuple(map(int, torch.__version__.split(".")[:2]))
    for symbol in _torch_private.SYMBOLS:
        first, last = (tuple(map(int, v.split("."))) for v in symbol.versions.split(" to "))
        if first <= release <= last:
            assert not symbol.absent, symbol
