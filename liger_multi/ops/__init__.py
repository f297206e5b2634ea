"""The operators; each module is the contract of one."""

from liger_multi.ops import (  # noqa: F401  register the operators behind inplace=True
    cross_entropy_inplace as _cross_entropy_inplace,
)
from liger_multi.ops import jsd_inplace as _jsd_inplace  # noqa: F401
from liger_multi.ops import kl_div_inplace as _kl_div_inplace  # noqa: F401
from liger_multi.ops import tvd_inplace as _tvd_inplace  # noqa: F401
from liger_multi.ops.attention import attention
from liger_multi.ops.attention_residuals import attention_residuals
from liger_multi.ops.cross_entropy import CrossEntropyOutput, cross_entropy
from liger_multi.ops.dyt import dyt
from liger_multi.ops.embedding import embedding
from liger_multi.ops.fused_add_rms_norm import FusedAddRMSNormOutput, fused_add_rms_norm
from liger_multi.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_multi.ops.fused_linear_jsd import fused_linear_jsd
from liger_multi.ops.fused_linear_kl_div import fused_linear_kl_div
from liger_multi.ops.fused_linear_log_prob import LogProbOutput, fused_linear_log_prob
from liger_multi.ops.fused_linear_tvd import fused_linear_tvd
from liger_multi.ops.fused_moe import fused_moe
from liger_multi.ops.fused_scaled_add_rms_norm import fused_scaled_add_rms_norm
from liger_multi.ops.gated_mlp import gated_mlp
from liger_multi.ops.gated_rms_norm import gated_rms_norm
from liger_multi.ops.geglu import geglu
from liger_multi.ops.geglu_packed import geglu_packed
from liger_multi.ops.group_norm import group_norm
from liger_multi.ops.hyper_connections import hyper_connections
from liger_multi.ops.hyper_connections_post import hyper_connections_post
from liger_multi.ops.hyper_connections_pre import hyper_connections_pre
from liger_multi.ops.jsd import jsd
from liger_multi.ops.kl_div import kl_div
from liger_multi.ops.layer_norm import layer_norm
from liger_multi.ops.lora_mlp import lora_mlp
from liger_multi.ops.lora_qkv import LoraQKVOutput, lora_qkv
from liger_multi.ops.lora_update import lora_update
from liger_multi.ops.modulated_rms_norm import modulated_rms_norm
from liger_multi.ops.multi_token_attention import multi_token_attention
from liger_multi.ops.neighborhood_attention import neighborhood_attention
from liger_multi.ops.poly_norm import poly_norm
from liger_multi.ops.relu_squared import relu_squared
from liger_multi.ops.rms_norm import rms_norm
from liger_multi.ops.rope import rope
from liger_multi.ops.rope_complex import rope_complex
from liger_multi.ops.rope_multimodal import rope_multimodal
from liger_multi.ops.rope_positions import rope_positions
from liger_multi.ops.rope_sorted import rope_sorted
from liger_multi.ops.selective_log_softmax import selective_log_softmax
from liger_multi.ops.softmax import softmax
from liger_multi.ops.sparsemax import sparsemax
from liger_multi.ops.swiglu import swiglu
from liger_multi.ops.swiglu_clamped import swiglu_clamped
from liger_multi.ops.swiglu_clamped_packed import swiglu_clamped_packed
from liger_multi.ops.swiglu_packed import swiglu_packed
from liger_multi.ops.token_log_prob import token_log_prob
from liger_multi.ops.tvd import tvd

__all__ = [
    "CrossEntropyOutput",
    "FusedAddRMSNormOutput",
    "LogProbOutput",
    "LoraQKVOutput",
    "attention",
    "attention_residuals",
    "cross_entropy",
    "dyt",
    "embedding",
    "fused_add_rms_norm",
    "fused_linear_cross_entropy",
    "fused_linear_jsd",
    "fused_linear_kl_div",
    "fused_linear_log_prob",
    "fused_linear_tvd",
    "fused_moe",
    "fused_scaled_add_rms_norm",
    "gated_mlp",
    "gated_rms_norm",
    "geglu",
    "geglu_packed",
    "group_norm",
    "hyper_connections",
    "hyper_connections_post",
    "hyper_connections_pre",
    "jsd",
    "kl_div",
    "layer_norm",
    "lora_mlp",
    "lora_qkv",
    "lora_update",
    "modulated_rms_norm",
    "multi_token_attention",
    "neighborhood_attention",
    "poly_norm",
    "relu_squared",
    "rms_norm",
    "rope",
    "rope_complex",
    "rope_multimodal",
    "rope_positions",
    "rope_sorted",
    "selective_log_softmax",
    "softmax",
    "sparsemax",
    "swiglu",
    "swiglu_clamped",
    "swiglu_clamped_packed",
    "swiglu_packed",
    "token_log_prob",
    "tvd",
]
