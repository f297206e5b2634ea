"""Modules with the constructors of PyTorch and Hugging Face; the operators have the maths."""

from liger_multi.nn.activations import DyT, PolyNorm, ReLUSquared
from liger_multi.nn.experts import Experts, HyperConnection
from liger_multi.nn.group_norms import GatedRMSNorm, GroupNorm, ModulatedRMSNorm
from liger_multi.nn.losses import CrossEntropyLoss
from liger_multi.nn.mlp import GEGLUMLP, ClampedSwiGLUMLP, PackedSwiGLUMLP, SwiGLUMLP
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
from liger_multi.nn.operator_losses import (
    FusedLinearCrossEntropyLoss,
    FusedLinearJSDLoss,
    FusedLinearKLDivLoss,
    FusedLinearLogProb,
    FusedLinearTVDLoss,
    JSDLoss,
    KLDivLoss,
    TVDLoss,
)
from liger_multi.nn.probabilities import Embedding, Softmax, Sparsemax
from liger_multi.nn.tiled import TiledMLP

__all__ = [
    "GEGLUMLP",
    "CPOLoss",
    "ClampedSwiGLUMLP",
    "CrossEntropyLoss",
    "DPOLoss",
    "DistillationLoss",
    "DyT",
    "Embedding",
    "Experts",
    "FusedAddRMSNorm",
    "FusedLinearCrossEntropyLoss",
    "FusedLinearJSDLoss",
    "FusedLinearKLDivLoss",
    "FusedLinearLogProb",
    "FusedLinearTVDLoss",
    "GatedRMSNorm",
    "GemmaRMSNorm",
    "GroupNorm",
    "HyperConnection",
    "JSDLoss",
    "KLDivLoss",
    "KTOLoss",
    "LayerNorm",
    "MTPLoss",
    "ModulatedRMSNorm",
    "ORPOLoss",
    "PackedSwiGLUMLP",
    "PolicyLoss",
    "PolyNorm",
    "RMSNorm",
    "ReLUSquared",
    "SequenceLoss",
    "SimPOLoss",
    "Softmax",
    "Sparsemax",
    "SwiGLUMLP",
    "TVDLoss",
    "TiledMLP",
]
