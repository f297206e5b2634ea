"""The losses of ``liger_kernel.chunked_loss``: those of :mod:`liger_multi.losses`.

``compiled`` is taken and changes nothing, and so does ``chunk_size`` of the losses: the loss of a
token, once it is known, is a handful of numbers, and logits are chunked by bytes whatever the
batch. The base classes call the loss of a subclass with chunks of log-probabilities of that size.
The preference losses return ``(loss, (chosen log-probabilities, rejected ones, mean of the chosen
logits, mean of the rejected ones, NLL of the chosen, ...))``; what stands beside the loss has no
gradient.
"""

from liger_multi.compat.liger_kernel.chunked.bases import (
    LigerFusedLinearDistillationBase,
    LigerFusedLinearPPOBase,
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearUnpairedPreferenceBase,
)
from liger_multi.compat.liger_kernel.chunked.distillation import (
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearJSDLoss,
)
from liger_multi.compat.liger_kernel.chunked.functions import (
    LigerFusedLinearCosineSimilarityFunction,
    LigerFusedLinearCPOFunction,
    LigerFusedLinearDPOFunction,
    LigerFusedLinearGRPOFunction,
    LigerFusedLinearJSDFunction,
    LigerFusedLinearKTOFunction,
    LigerFusedLinearORPOFunction,
    LigerFusedLinearSimPOFunction,
    liger_fused_linear_cosine,
    liger_fused_linear_cpo,
    liger_fused_linear_dpo,
    liger_fused_linear_grpo,
    liger_fused_linear_jsd,
    liger_fused_linear_kto,
    liger_fused_linear_orpo,
    liger_fused_linear_simpo,
)
from liger_multi.compat.liger_kernel.chunked.policy import (
    LigerFusedLinearGRPOLoss,
    clip_coef_fn,
    get_gamma_weights,
    k3_loss_fn,
    sapo_loss_fn,
)
from liger_multi.compat.liger_kernel.chunked.preference import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)

__all__ = [
    "LigerFusedLinearCPOFunction",
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearCosineSimilarityFunction",
    "LigerFusedLinearCosineSimilarityLoss",
    "LigerFusedLinearDPOFunction",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearDistillationBase",
    "LigerFusedLinearGRPOFunction",
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearJSDFunction",
    "LigerFusedLinearJSDLoss",
    "LigerFusedLinearKTOFunction",
    "LigerFusedLinearKTOLoss",
    "LigerFusedLinearORPOFunction",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearPPOBase",
    "LigerFusedLinearPreferenceBase",
    "LigerFusedLinearSimPOFunction",
    "LigerFusedLinearSimPOLoss",
    "LigerFusedLinearUnpairedPreferenceBase",
    "clip_coef_fn",
    "get_gamma_weights",
    "k3_loss_fn",
    "liger_fused_linear_cosine",
    "liger_fused_linear_cpo",
    "liger_fused_linear_dpo",
    "liger_fused_linear_grpo",
    "liger_fused_linear_jsd",
    "liger_fused_linear_kto",
    "liger_fused_linear_orpo",
    "liger_fused_linear_simpo",
    "sapo_loss_fn",
]
