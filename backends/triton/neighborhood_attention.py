"""Attention to neighbours on a line: the kernels of attention, whose tiles skip all other keys."""

from liger_multi.backends.triton import attention
from liger_multi.backends.triton.attention import supports
from liger_multi.reference.neighborhood_attention import halves

__all__ = ["backward", "forward", "supports"]

forward, backward = halves(attention)
