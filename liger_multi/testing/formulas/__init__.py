"""One plain PyTorch formula per operator, with the signature of the public function.

Parts of adapters are arguments of their own, as in samples.

A formula is differentiable and rounds nothing in fp64: there it is the reference of the suite. In
16-bit dtypes it casts where Hugging Face casts: there it is what the benchmarks time as ``torch``.
A function with the name of an operator in one of the families is its formula; a contract may state
it instead, as ``formula``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from liger_multi.dispatch.registry import operators
from liger_multi.testing.formulas import attention, linear_attention, losses, mlp, norms, sparse
from liger_multi.testing.samples import public

Formula = Callable[..., Any]
_FAMILIES = (attention, linear_attention, losses, mlp, norms, sparse)


def find(op: str) -> Formula | None:
    """The formula of an operator: from its contract, or from a family by its name."""
    name = public(op)
    stated: Formula | None = getattr(
        importlib.import_module(f"liger_multi.ops.{name}"), "formula", None
    )
    return stated or next((getattr(f, name) for f in _FAMILIES if hasattr(f, name)), None)


FORMULAS: dict[str, Formula] = {op: f for op in operators() if (f := find(op)) is not None}
"""Formulas by operator; forms that an option chooses have the formula of the public function."""
