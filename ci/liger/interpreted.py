"""The kernels of the real liger-kernel on a CPU, by Triton's interpreter.

``TRITON_INTERPRET=1`` has to be set before Triton is imported. Three things are missing then: a
Python float reaches a kernel as it is, where a compiler makes it fp32; functions of libdevice
exist for GPUs only; and the autotuner wants a driver to measure with.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import numpy

PACKAGE = "liger_kernel.ops"
VARIABLE = "TRITON_INTERPRET"


def _floats() -> None:
    """Let a float be the fp32 that a compiled kernel gets."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    language: Any = importlib.import_module("triton.language")
    convert: Callable[[Any], Any] = interpreter._implicit_cvt

    def converted(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        handle = interpreter.TensorHandle(numpy.array([value], numpy.float32), language.float32)
        return language.tensor(handle, language.float32)

    interpreter._implicit_cvt = converted


def first_configuration() -> None:
    """Let the autotuner take the first of its configurations, also on a device, for the time."""
    autotuner: Any = importlib.import_module("triton.runtime.autotuner")
    prune: Callable[..., Any] = autotuner.Autotuner.prune_configs
    autotuner.Autotuner.prune_configs = lambda self, kwargs: prune(self, kwargs)[:1]


def _libdevice() -> None:
    """Put functions of Triton in the place of those of a GPU's library."""
    language: Any = importlib.import_module("triton.language")
    placed = {
        "rsqrt": lambda x: language.rsqrt(x),
        "tanh": lambda x: 2 * language.sigmoid(2 * x) - 1,
    }
    for name, module in [*sys.modules.items()]:
        if name.startswith(PACKAGE):
            for function, ours in placed.items():
                if hasattr(module, function):
                    setattr(module, function, ours)


def prepare() -> None:
    """Import the operators of liger-kernel and make them run here."""
    home = importlib.import_module(PACKAGE)
    for found in pkgutil.iter_modules(home.__path__, f"{PACKAGE}."):
        if not found.ispkg and "cut" not in found.name:
            importlib.import_module(found.name)
    _floats()
    _libdevice()
