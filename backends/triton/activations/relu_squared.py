"""Squared ReLU, y = max(x, 0)^2 (arXiv:2109.08668).

A NaN stays NaN: only what is below zero becomes zero.
"""

import triton
import triton.language as tl

from liger_multi.backends.triton.activations.pointwise import pointwise


@triton.jit
def _value(x):
    """max(x, 0)^2."""
    x = tl.where(x < 0.0, 0.0, x)
    return x * x


@triton.jit
def _slope(x):
    """2 max(x, 0)."""
    return tl.where(x < 0.0, 0.0, x) * 2.0


forward, backward = pointwise("relu_squared", _value, _slope)
