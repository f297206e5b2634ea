"""The plain PyTorch formula of every operator, as its contract states it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from liger_multi.dispatch.registry import operators
from liger_multi.testing.samples import declared

Formula = Callable[..., Any]

FORMULAS: dict[str, Formula] = {op: declared(op, "formula") for op in operators()}
"""Formulas by operator; forms that an option chooses have the formula of the public function."""
