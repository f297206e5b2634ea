"""Composed of PyTorch's operations: two thin products and an addition, as in the reference."""

from liger_multi.reference.lora_update import backward, forward

__all__ = ["backward", "forward"]
