"""A linear layer is the reference's: GEMMs of PyTorch, or of independent rows (common/gemm.py)."""

from liger_multi.reference.activations import linear

forward, backward = linear.forward, linear.backward
