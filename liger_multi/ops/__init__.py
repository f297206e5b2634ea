"""The operators; each module is the contract of one."""

from liger_multi.ops._adapters import LoRA as LoRA
from liger_multi.ops._float8 import QuantizedOutput as QuantizedOutput
from liger_multi.ops._quantized import QuantizedWeight as QuantizedWeight
from liger_multi.ops.attention import attention as attention
from liger_multi.ops.attention_residuals import attention_residuals as attention_residuals
from liger_multi.ops.causal_conv1d import causal_conv1d as causal_conv1d
from liger_multi.ops.cross_entropy import (
    CrossEntropyOutput as CrossEntropyOutput,
    cross_entropy as cross_entropy,
    cross_entropy_with_outputs as cross_entropy_with_outputs,
)
from liger_multi.ops.dequantize import dequantize as dequantize
from liger_multi.ops.dyt import dyt as dyt
from liger_multi.ops.embedding import embedding as embedding
from liger_multi.ops.fused_add_rms_norm import (
    FusedAddRMSNormOutput as FusedAddRMSNormOutput,
    QuantizedAddRMSNormOutput as QuantizedAddRMSNormOutput,
    fused_add_rms_norm as fused_add_rms_norm,
    fused_add_rms_norm_quantized as fused_add_rms_norm_quantized,
)
from liger_multi.ops.fused_linear_cross_entropy import (
    fused_linear_cross_entropy as fused_linear_cross_entropy,
    fused_linear_cross_entropy_with_outputs as fused_linear_cross_entropy_with_outputs,
)
from liger_multi.ops.fused_linear_jsd import fused_linear_jsd as fused_linear_jsd
from liger_multi.ops.fused_linear_kl_div import fused_linear_kl_div as fused_linear_kl_div
from liger_multi.ops.fused_linear_log_prob import (
    LogProbOutput as LogProbOutput,
    fused_linear_log_prob as fused_linear_log_prob,
)
from liger_multi.ops.fused_linear_tvd import fused_linear_tvd as fused_linear_tvd
from liger_multi.ops.fused_moe import fused_moe as fused_moe
from liger_multi.ops.fused_scaled_add_rms_norm import (
    fused_scaled_add_rms_norm as fused_scaled_add_rms_norm,
)
from liger_multi.ops.gated_delta_rule import (
    gated_delta_rule as gated_delta_rule,
    gated_delta_rule_with_state as gated_delta_rule_with_state,
)
from liger_multi.ops.gated_mlp import gated_mlp as gated_mlp
from liger_multi.ops.gated_mlp_float8 import gated_mlp_float8 as gated_mlp_float8
from liger_multi.ops.gated_rms_norm import gated_rms_norm as gated_rms_norm
from liger_multi.ops.gated_short_conv import gated_short_conv as gated_short_conv
from liger_multi.ops.geglu import geglu as geglu, geglu_quantized as geglu_quantized
from liger_multi.ops.geglu_packed import geglu_packed as geglu_packed
from liger_multi.ops.group_norm import group_norm as group_norm
from liger_multi.ops.hyper_connections import hyper_connections as hyper_connections
from liger_multi.ops.hyper_connections_post import hyper_connections_post as hyper_connections_post
from liger_multi.ops.hyper_connections_pre import hyper_connections_pre as hyper_connections_pre
from liger_multi.ops.indexer_scores import indexer_scores as indexer_scores
from liger_multi.ops.indexer_topk import (
    IndexerTopkOutput as IndexerTopkOutput,
    indexer_topk as indexer_topk,
)
from liger_multi.ops.jsd import jsd as jsd
from liger_multi.ops.kimi_delta_attention import (
    kimi_delta_attention as kimi_delta_attention,
    kimi_delta_attention_with_state as kimi_delta_attention_with_state,
)
from liger_multi.ops.kl_div import kl_div as kl_div
from liger_multi.ops.layer_norm import (
    layer_norm as layer_norm,
    layer_norm_quantized as layer_norm_quantized,
)
from liger_multi.ops.linear import linear as linear
from liger_multi.ops.linear_float8 import (
    Float8Rows as Float8Rows,
    LinearFloat8Output as LinearFloat8Output,
    linear_float8 as linear_float8,
    linear_float8_with_codes as linear_float8_with_codes,
)
from liger_multi.ops.lora_mlp import lora_mlp as lora_mlp
from liger_multi.ops.lora_moe import lora_moe as lora_moe
from liger_multi.ops.lora_qkv import LoraQKVOutput as LoraQKVOutput, lora_qkv as lora_qkv
from liger_multi.ops.lora_update import lora_update as lora_update
from liger_multi.ops.modulated_rms_norm import modulated_rms_norm as modulated_rms_norm
from liger_multi.ops.multi_token_attention import multi_token_attention as multi_token_attention
from liger_multi.ops.neighborhood_attention import neighborhood_attention as neighborhood_attention
from liger_multi.ops.poly_norm import poly_norm as poly_norm
from liger_multi.ops.relu_squared import relu_squared as relu_squared
from liger_multi.ops.rms_norm import rms_norm as rms_norm, rms_norm_quantized as rms_norm_quantized
from liger_multi.ops.rms_norm_rope import rms_norm_rope as rms_norm_rope
from liger_multi.ops.rope import rope as rope
from liger_multi.ops.rope_complex import rope_complex as rope_complex
from liger_multi.ops.rope_multimodal import rope_multimodal as rope_multimodal
from liger_multi.ops.rope_positions import rope_positions as rope_positions
from liger_multi.ops.rope_sorted import rope_sorted as rope_sorted
from liger_multi.ops.selective_log_softmax import selective_log_softmax as selective_log_softmax
from liger_multi.ops.selective_scan import (
    selective_scan as selective_scan,
    selective_scan_with_state as selective_scan_with_state,
)
from liger_multi.ops.softmax import softmax as softmax
from liger_multi.ops.sparse_attention import (
    SparseAttentionOutput as SparseAttentionOutput,
    sparse_attention as sparse_attention,
    sparse_attention_with_weights as sparse_attention_with_weights,
)
from liger_multi.ops.sparsemax import sparsemax as sparsemax
from liger_multi.ops.ssd_scan import (
    ssd_scan as ssd_scan,
    ssd_scan_with_state as ssd_scan_with_state,
)
from liger_multi.ops.swiglu import swiglu as swiglu, swiglu_quantized as swiglu_quantized
from liger_multi.ops.swiglu_clamped import swiglu_clamped as swiglu_clamped
from liger_multi.ops.swiglu_clamped_packed import swiglu_clamped_packed as swiglu_clamped_packed
from liger_multi.ops.swiglu_packed import swiglu_packed as swiglu_packed
from liger_multi.ops.token_log_prob import token_log_prob as token_log_prob
from liger_multi.ops.tvd import tvd as tvd

# every name that is imported above
__all__ = sorted(name for name, value in globals().items() if callable(value) and name[0] != "_")
