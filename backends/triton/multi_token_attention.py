"""Composed of PyTorch's operations, block by block of rows, as the reference is."""

from liger_multi.reference.multi_token_attention import backward, forward

__all__ = ["backward", "forward"]
