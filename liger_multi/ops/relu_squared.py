"""Contract of ``relu_squared``."""

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi.ops._activations import pointwise, pointwise_samples, run_pointwise
from liger_multi.ops._work import elementwise

# traced as swiglu, whose traced form was measured; this one's was not
op = pointwise("relu_squared", family="activations")


def relu_squared(x: Tensor) -> Tensor:
    """Squared rectifier: ``relu(x) ** 2``.

    Math:
        ``y = max(x, 0)^2``; backward ``dx = 2 max(x, 0) dy``, rounded once.

    Shapes:
        x ``(..., F)`` with any strides; y the same, contiguous.

    Dtypes:
        In and out: any floating dtype. Inside: fp32 (fp64 for fp64).

    Memory:
        Kept for backward: x.

    Raises:
        TypeError: x is not a floating-point tensor.
        ValueError: x has no axis.

    Source:
        So et al. 2021 (arXiv:2109.08668); transformers ``ReLUSquaredActivation``.
    """
    return run_pointwise(op, x)


def formula(x: Tensor) -> Tensor:
    """``relu(x)^2``."""
    return torch.square(F.relu(x))


# x read, y written; dy and x read, dx written
work = elementwise(2, 5)


SAMPLES = pointwise_samples("8192x16384 8192x24576")
