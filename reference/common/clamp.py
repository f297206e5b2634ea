"""The gradient of a clamp at its bounds, which PyTorch has changed.

Up to 2.13, a value that equals a bound passes its gradient on; from 2.14 on it does not (observed
with 2.13.0, 2.14.1 and 2.15.0). Operators follow the PyTorch that runs, as unpatched layers do.
"""

import torch
from torch import Tensor

PASSES_AT_BOUND: bool = torch.__version__ < "2.14"


def blocks_gradient(x: Tensor, bound: float) -> Tensor:
    """Where a clamp to at most ``bound`` passes no gradient; a NaN passes it."""
    return x > bound if PASSES_AT_BOUND else x >= bound
