"""Modules with the constructors of PyTorch and Hugging Face; the operators have the maths."""

from liger_multi.nn.losses import (
    CrossEntropyLoss,
    FusedLinearCrossEntropyLoss,
    FusedLinearLogProb,
)
from liger_multi.nn.mlp import GEGLUMLP, PackedSwiGLUMLP, SwiGLUMLP
from liger_multi.nn.norms import FusedAddRMSNorm, GemmaRMSNorm, LayerNorm, RMSNorm

__all__ = [
    "GEGLUMLP",
    "CrossEntropyLoss",
    "FusedAddRMSNorm",
    "FusedLinearCrossEntropyLoss",
    "FusedLinearLogProb",
    "GemmaRMSNorm",
    "LayerNorm",
    "PackedSwiGLUMLP",
    "RMSNorm",
    "SwiGLUMLP",
]
