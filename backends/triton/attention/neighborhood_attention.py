"""Attention to neighbors on a line: the kernels of attention, which skip blocks of other keys."""

from liger_multi.backends.triton.attention import attention
from liger_multi.backends.triton.attention.attention import supports
from liger_multi.reference.attention.neighborhood_attention import implement_neighborhood_attention

__all__ = ["backward", "forward", "supports"]

forward, backward = implement_neighborhood_attention(attention)
