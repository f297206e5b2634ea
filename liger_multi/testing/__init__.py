"""What the suite, the benchmarks and an out-of-tree backend share to test operators.

``samples`` are the inputs, ``tolerance`` says how far a result may stand from fp64, and
``FORMULAS`` is the reference in fp64 of every operator. ``check_operator`` compares a backend with
them; ``python -m liger_multi.testing --backend NAME`` does so with pytest. ``bisect`` finds the
first operator that differs between two runs. Nothing is imported before it is asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from liger_multi.errors import loading

if TYPE_CHECKING:
    from liger_multi.testing import samples, tolerance
    from liger_multi.testing.bisection.compare import Bisection, bisect
    from liger_multi.testing.checks import FORMULAS, check_operator
    from liger_multi.testing.samples import Sample
    from liger_multi.testing.tolerance import TOLERANCES, excess

__all__ = [
    "FORMULAS",
    "TOLERANCES",
    "Bisection",
    "Sample",
    "bisect",
    "check_operator",
    "excess",
    "samples",
    "tolerance",
]

_HOMES = {
    "FORMULAS": "checks",
    "TOLERANCES": "tolerance",
    "Bisection": "bisection.compare",
    "Sample": "samples",
    "bisect": "bisection.compare",
    "check_operator": "checks",
    "excess": "tolerance",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for; contracts need the samples only."""
    if name in ("samples", "tolerance"):
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with loading(f"{__name__}.{name}"):
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
