"""Modules with the constructors of PyTorch and Hugging Face; the operators have the maths."""

from liger_multi.nn.divergence_heads import (
    FusedLinearJSDLoss,
    FusedLinearKLDivLoss,
    FusedLinearTVDLoss,
)
from liger_multi.nn.divergences import JSDLoss, KLDivLoss, TVDLoss
from liger_multi.nn.losses import (
    CrossEntropyLoss,
    FusedLinearCrossEntropyLoss,
    FusedLinearLogProb,
)
from liger_multi.nn.mlp import GEGLUMLP, PackedSwiGLUMLP, SwiGLUMLP
from liger_multi.nn.norms import FusedAddRMSNorm, GemmaRMSNorm, LayerNorm, RMSNorm
from liger_multi.nn.objectives import (
    CPOLoss,
    DistillationLoss,
    DPOLoss,
    KTOLoss,
    MTPLoss,
    ORPOLoss,
    PolicyLoss,
    SequenceLoss,
    SimPOLoss,
)
from liger_multi.nn.probabilities import Embedding, Softmax, Sparsemax

__all__ = [
    "GEGLUMLP",
    "CPOLoss",
    "CrossEntropyLoss",
    "DPOLoss",
    "DistillationLoss",
    "Embedding",
    "FusedAddRMSNorm",
    "FusedLinearCrossEntropyLoss",
    "FusedLinearJSDLoss",
    "FusedLinearKLDivLoss",
    "FusedLinearLogProb",
    "FusedLinearTVDLoss",
    "GemmaRMSNorm",
    "JSDLoss",
    "KLDivLoss",
    "KTOLoss",
    "LayerNorm",
    "MTPLoss",
    "ORPOLoss",
    "PackedSwiGLUMLP",
    "PolicyLoss",
    "RMSNorm",
    "SequenceLoss",
    "SimPOLoss",
    "Softmax",
    "Sparsemax",
    "SwiGLUMLP",
    "TVDLoss",
]
