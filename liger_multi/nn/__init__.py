"""Modules with the constructors of PyTorch and Hugging Face; the operators have the maths."""

from liger_multi.nn.divergences import (
    FusedLinearJSDLoss,
    FusedLinearKLDivLoss,
    FusedLinearTVDLoss,
    JSDLoss,
    KLDivLoss,
    TVDLoss,
)
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
    "FusedLinearJSDLoss",
    "FusedLinearKLDivLoss",
    "FusedLinearLogProb",
    "FusedLinearTVDLoss",
    "GemmaRMSNorm",
    "JSDLoss",
    "KLDivLoss",
    "LayerNorm",
    "PackedSwiGLUMLP",
    "RMSNorm",
    "SwiGLUMLP",
    "TVDLoss",
]
