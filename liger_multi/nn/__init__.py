"""Modules with the constructors of PyTorch and Hugging Face; the operators have the maths."""

from liger_multi.nn.activations import DyT, PolyNorm, ReLUSquared
from liger_multi.nn.group_norms import GatedRMSNorm, GroupNorm, ModulatedRMSNorm
from liger_multi.nn.losses import (
    CrossEntropyLoss,
    FusedLinearCrossEntropyLoss,
    FusedLinearLogProb,
)
from liger_multi.nn.mlp import GEGLUMLP, ClampedSwiGLUMLP, PackedSwiGLUMLP, SwiGLUMLP
from liger_multi.nn.norms import FusedAddRMSNorm, GemmaRMSNorm, LayerNorm, RMSNorm
from liger_multi.nn.tiled import TiledMLP

__all__ = [
    "GEGLUMLP",
    "ClampedSwiGLUMLP",
    "CrossEntropyLoss",
    "DyT",
    "FusedAddRMSNorm",
    "FusedLinearCrossEntropyLoss",
    "FusedLinearLogProb",
    "GatedRMSNorm",
    "GemmaRMSNorm",
    "GroupNorm",
    "LayerNorm",
    "ModulatedRMSNorm",
    "PackedSwiGLUMLP",
    "PolyNorm",
    "RMSNorm",
    "ReLUSquared",
    "SwiGLUMLP",
    "TiledMLP",
]
