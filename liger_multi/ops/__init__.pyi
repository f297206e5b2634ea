# written by `python -m ci.stubs`

from typing import Literal, overload

import torch
from typing_extensions import Unpack

from liger_multi.ops._float8 import QuantizedOutput as QuantizedOutput
from liger_multi.ops.attention import attention as attention
from liger_multi.ops.attention_residuals import attention_residuals as attention_residuals
from liger_multi.ops.causal_conv1d import causal_conv1d as causal_conv1d
from liger_multi.ops.cross_entropy import CrossEntropyOutput as CrossEntropyOutput
from liger_multi.ops.dyt import dyt as dyt
from liger_multi.ops.embedding import embedding as embedding
from liger_multi.ops.fused_add_rms_norm import FusedAddRMSNormOutput as FusedAddRMSNormOutput
from liger_multi.ops.fused_add_rms_norm import (
    QuantizedAddRMSNormOutput as QuantizedAddRMSNormOutput,
)
from liger_multi.ops.fused_linear_jsd import fused_linear_jsd as fused_linear_jsd
from liger_multi.ops.fused_linear_kl_div import fused_linear_kl_div as fused_linear_kl_div
from liger_multi.ops.fused_linear_log_prob import LogProbOutput as LogProbOutput
from liger_multi.ops.fused_linear_log_prob import fused_linear_log_prob as fused_linear_log_prob
from liger_multi.ops.fused_linear_tvd import fused_linear_tvd as fused_linear_tvd
from liger_multi.ops.fused_moe import fused_moe as fused_moe
from liger_multi.ops.fused_scaled_add_rms_norm import (
    fused_scaled_add_rms_norm as fused_scaled_add_rms_norm,
)
from liger_multi.ops.gated_mlp import gated_mlp as gated_mlp
from liger_multi.ops.gated_mlp_float8 import gated_mlp_float8 as gated_mlp_float8
from liger_multi.ops.gated_rms_norm import gated_rms_norm as gated_rms_norm
from liger_multi.ops.gated_short_conv import gated_short_conv as gated_short_conv
from liger_multi.ops.geglu_packed import geglu_packed as geglu_packed
from liger_multi.ops.group_norm import group_norm as group_norm
from liger_multi.ops.hyper_connections import hyper_connections as hyper_connections
from liger_multi.ops.hyper_connections_post import hyper_connections_post as hyper_connections_post
from liger_multi.ops.hyper_connections_pre import hyper_connections_pre as hyper_connections_pre
from liger_multi.ops.indexer_scores import indexer_scores as indexer_scores
from liger_multi.ops.indexer_topk import IndexerTopkOutput as IndexerTopkOutput
from liger_multi.ops.indexer_topk import indexer_topk as indexer_topk
from liger_multi.ops.jsd import jsd as jsd
from liger_multi.ops.kl_div import kl_div as kl_div
from liger_multi.ops.linear import linear as linear
from liger_multi.ops.linear_float8 import Float8Rows as Float8Rows
from liger_multi.ops.linear_float8 import LinearFloat8Output as LinearFloat8Output
from liger_multi.ops.lora_mlp import lora_mlp as lora_mlp
from liger_multi.ops.lora_moe import lora_moe as lora_moe
from liger_multi.ops.lora_qkv import LoraQKVOutput as LoraQKVOutput
from liger_multi.ops.lora_qkv import lora_qkv as lora_qkv
from liger_multi.ops.lora_update import lora_update as lora_update
from liger_multi.ops.modulated_rms_norm import modulated_rms_norm as modulated_rms_norm
from liger_multi.ops.multi_token_attention import multi_token_attention as multi_token_attention
from liger_multi.ops.neighborhood_attention import neighborhood_attention as neighborhood_attention
from liger_multi.ops.poly_norm import poly_norm as poly_norm
from liger_multi.ops.relu_squared import relu_squared as relu_squared
from liger_multi.ops.rms_norm_rope import rms_norm_rope as rms_norm_rope
from liger_multi.ops.rope import rope as rope
from liger_multi.ops.rope_complex import rope_complex as rope_complex
from liger_multi.ops.rope_multimodal import rope_multimodal as rope_multimodal
from liger_multi.ops.rope_positions import rope_positions as rope_positions
from liger_multi.ops.rope_sorted import rope_sorted as rope_sorted
from liger_multi.ops.selective_log_softmax import selective_log_softmax as selective_log_softmax
from liger_multi.ops.softmax import softmax as softmax
from liger_multi.ops.sparse_attention import SparseAttentionOutput as SparseAttentionOutput
from liger_multi.ops.sparsemax import sparsemax as sparsemax
from liger_multi.ops.swiglu_clamped import swiglu_clamped as swiglu_clamped
from liger_multi.ops.swiglu_clamped_packed import swiglu_clamped_packed as swiglu_clamped_packed
from liger_multi.ops.swiglu_packed import swiglu_packed as swiglu_packed
from liger_multi.ops.token_log_prob import token_log_prob as token_log_prob
from liger_multi.ops.tvd import tvd as tvd

__all__ = [
    "CrossEntropyOutput",
    "Float8Rows",
    "FusedAddRMSNormOutput",
    "IndexerTopkOutput",
    "LinearFloat8Output",
    "LogProbOutput",
    "LoraQKVOutput",
    "QuantizedAddRMSNormOutput",
    "QuantizedOutput",
    "SparseAttentionOutput",
    "attention",
    "attention_residuals",
    "causal_conv1d",
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
    "gated_delta_rule",
    "gated_mlp",
    "gated_mlp_float8",
    "gated_rms_norm",
    "gated_short_conv",
    "geglu",
    "geglu_packed",
    "group_norm",
    "hyper_connections",
    "hyper_connections_post",
    "hyper_connections_pre",
    "indexer_scores",
    "indexer_topk",
    "jsd",
    "kimi_delta_attention",
    "kl_div",
    "layer_norm",
    "linear",
    "linear_float8",
    "lora_mlp",
    "lora_moe",
    "lora_qkv",
    "lora_update",
    "modulated_rms_norm",
    "multi_token_attention",
    "neighborhood_attention",
    "poly_norm",
    "relu_squared",
    "rms_norm",
    "rms_norm_rope",
    "rope",
    "rope_complex",
    "rope_multimodal",
    "rope_positions",
    "rope_sorted",
    "selective_log_softmax",
    "selective_scan",
    "softmax",
    "sparse_attention",
    "sparsemax",
    "ssd_scan",
    "swiglu",
    "swiglu_clamped",
    "swiglu_clamped_packed",
    "swiglu_packed",
    "token_log_prob",
    "tvd",
]

@overload
def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = ...,
    *,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    softcap: float | None = ...,
    reduction: str = ...,
    inplace: bool = ...,
    validate: bool = ...,
    outputs: tuple[()] = ...,
) -> torch.Tensor: ...
@overload
def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = ...,
    *,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    softcap: float | None = ...,
    reduction: str = ...,
    inplace: bool = ...,
    validate: bool = ...,
    outputs: tuple[str, Unpack[tuple[str, ...]]],
) -> CrossEntropyOutput: ...
@overload
def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = ...,
    *,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    softcap: float | None = ...,
    reduction: str = ...,
    inplace: bool = ...,
    validate: bool = ...,
    outputs: tuple[str, ...],
) -> torch.Tensor | CrossEntropyOutput: ...
@overload
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = ...,
    eps: float = ...,
    *,
    offset: float = ...,
    casting: str = ...,
    outputs: tuple[str, ...] = ...,
    quantize: None = ...,
) -> FusedAddRMSNormOutput: ...
@overload
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = ...,
    eps: float = ...,
    *,
    offset: float = ...,
    casting: str = ...,
    outputs: tuple[str, ...] = ...,
    quantize: str,
) -> QuantizedAddRMSNormOutput: ...
@overload
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = ...,
    eps: float = ...,
    *,
    offset: float = ...,
    casting: str = ...,
    outputs: tuple[str, ...] = ...,
    quantize: str | None,
) -> FusedAddRMSNormOutput | QuantizedAddRMSNormOutput: ...
@overload
def fused_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = ...,
    *,
    class_weight: torch.Tensor | None = ...,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    softcap: float | None = ...,
    reduction: str = ...,
    logit_scale: float = ...,
    chunk: int | str = ...,
    accumulate: torch.dtype = ...,
    compact: bool = ...,
    validate: bool = ...,
    outputs: tuple[()] = ...,
) -> torch.Tensor: ...
@overload
def fused_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = ...,
    *,
    class_weight: torch.Tensor | None = ...,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    softcap: float | None = ...,
    reduction: str = ...,
    logit_scale: float = ...,
    chunk: int | str = ...,
    accumulate: torch.dtype = ...,
    compact: bool = ...,
    validate: bool = ...,
    outputs: tuple[str, Unpack[tuple[str, ...]]],
) -> CrossEntropyOutput: ...
@overload
def fused_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = ...,
    *,
    class_weight: torch.Tensor | None = ...,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    softcap: float | None = ...,
    reduction: str = ...,
    logit_scale: float = ...,
    chunk: int | str = ...,
    accumulate: torch.dtype = ...,
    compact: bool = ...,
    validate: bool = ...,
    outputs: tuple[str, ...],
) -> torch.Tensor | CrossEntropyOutput: ...
@overload
def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = ...,
    initial_state: torch.Tensor | None = ...,
    qk_l2norm: bool = ...,
    cu_seqlens: torch.Tensor | None = ...,
    documents: torch.Tensor | None = ...,
    output_final_state: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = ...,
    initial_state: torch.Tensor | None = ...,
    qk_l2norm: bool = ...,
    cu_seqlens: torch.Tensor | None = ...,
    documents: torch.Tensor | None = ...,
    output_final_state: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = ...,
    initial_state: torch.Tensor | None = ...,
    qk_l2norm: bool = ...,
    cu_seqlens: torch.Tensor | None = ...,
    documents: torch.Tensor | None = ...,
    output_final_state: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@overload
def geglu(
    gate: torch.Tensor,
    up: torch.Tensor,
    approximate: str = ...,
    *,
    outputs: tuple[str, ...] = ...,
    quantize: None = ...,
) -> torch.Tensor: ...
@overload
def geglu(
    gate: torch.Tensor,
    up: torch.Tensor,
    approximate: str = ...,
    *,
    outputs: tuple[str, ...] = ...,
    quantize: str,
) -> QuantizedOutput: ...
@overload
def geglu(
    gate: torch.Tensor,
    up: torch.Tensor,
    approximate: str = ...,
    *,
    outputs: tuple[str, ...] = ...,
    quantize: str | None,
) -> torch.Tensor | QuantizedOutput: ...
@overload
def kimi_delta_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = ...,
    initial_state: torch.Tensor | None = ...,
    qk_l2norm: bool = ...,
    cu_seqlens: torch.Tensor | None = ...,
    documents: torch.Tensor | None = ...,
    output_final_state: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def kimi_delta_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = ...,
    initial_state: torch.Tensor | None = ...,
    qk_l2norm: bool = ...,
    cu_seqlens: torch.Tensor | None = ...,
    documents: torch.Tensor | None = ...,
    output_final_state: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def kimi_delta_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = ...,
    initial_state: torch.Tensor | None = ...,
    qk_l2norm: bool = ...,
    cu_seqlens: torch.Tensor | None = ...,
    documents: torch.Tensor | None = ...,
    output_final_state: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@overload
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = ...,
    bias: torch.Tensor | None = ...,
    eps: float = ...,
    *,
    outputs: tuple[str, ...] = ...,
    quantize: None = ...,
) -> torch.Tensor: ...
@overload
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = ...,
    bias: torch.Tensor | None = ...,
    eps: float = ...,
    *,
    outputs: tuple[str, ...] = ...,
    quantize: str,
) -> QuantizedOutput: ...
@overload
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = ...,
    bias: torch.Tensor | None = ...,
    eps: float = ...,
    *,
    outputs: tuple[str, ...] = ...,
    quantize: str | None,
) -> torch.Tensor | QuantizedOutput: ...
@overload
def linear_float8(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = ...,
    *,
    weight_scale: torch.Tensor | None = ...,
    weight_codes: torch.Tensor | None = ...,
    quantized: Float8Rows | None = ...,
    return_quantized: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def linear_float8(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = ...,
    *,
    weight_scale: torch.Tensor | None = ...,
    weight_codes: torch.Tensor | None = ...,
    quantized: Float8Rows | None = ...,
    return_quantized: Literal[True],
) -> LinearFloat8Output: ...
@overload
def linear_float8(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = ...,
    *,
    weight_scale: torch.Tensor | None = ...,
    weight_codes: torch.Tensor | None = ...,
    quantized: Float8Rows | None = ...,
    return_quantized: bool,
) -> torch.Tensor | LinearFloat8Output: ...
@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = ...,
    eps: float = ...,
    *,
    offset: float = ...,
    casting: str = ...,
    outputs: tuple[str, ...] = ...,
    quantize: None = ...,
) -> torch.Tensor: ...
@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = ...,
    eps: float = ...,
    *,
    offset: float = ...,
    casting: str = ...,
    outputs: tuple[str, ...] = ...,
    quantize: str,
) -> QuantizedOutput: ...
@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = ...,
    eps: float = ...,
    *,
    offset: float = ...,
    casting: str = ...,
    outputs: tuple[str, ...] = ...,
    quantize: str | None,
) -> torch.Tensor | QuantizedOutput: ...
@overload
def selective_scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = ...,
    z: torch.Tensor | None = ...,
    delta_bias: torch.Tensor | None = ...,
    delta_softplus: bool = ...,
    initial_state: torch.Tensor | None = ...,
    cu_seqlens: torch.Tensor | None = ...,
    seq_idx: torch.Tensor | None = ...,
    output_final_state: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def selective_scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = ...,
    z: torch.Tensor | None = ...,
    delta_bias: torch.Tensor | None = ...,
    delta_softplus: bool = ...,
    initial_state: torch.Tensor | None = ...,
    cu_seqlens: torch.Tensor | None = ...,
    seq_idx: torch.Tensor | None = ...,
    output_final_state: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def selective_scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = ...,
    z: torch.Tensor | None = ...,
    delta_bias: torch.Tensor | None = ...,
    delta_softplus: bool = ...,
    initial_state: torch.Tensor | None = ...,
    cu_seqlens: torch.Tensor | None = ...,
    seq_idx: torch.Tensor | None = ...,
    output_final_state: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@overload
def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    indices: torch.Tensor,
    *,
    value_dim: int | None = ...,
    scale: float | None = ...,
    output_weights: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    indices: torch.Tensor,
    *,
    value_dim: int | None = ...,
    scale: float | None = ...,
    output_weights: Literal[True],
) -> SparseAttentionOutput: ...
@overload
def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    indices: torch.Tensor,
    *,
    value_dim: int | None = ...,
    scale: float | None = ...,
    output_weights: bool,
) -> torch.Tensor | SparseAttentionOutput: ...
@overload
def ssd_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = ...,
    z: torch.Tensor | None = ...,
    dt_bias: torch.Tensor | None = ...,
    dt_softplus: bool = ...,
    dt_limit: tuple[float, float] = ...,
    initial_state: torch.Tensor | None = ...,
    cu_seqlens: torch.Tensor | None = ...,
    seq_idx: torch.Tensor | None = ...,
    chunk: int = ...,
    output_final_state: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def ssd_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = ...,
    z: torch.Tensor | None = ...,
    dt_bias: torch.Tensor | None = ...,
    dt_softplus: bool = ...,
    dt_limit: tuple[float, float] = ...,
    initial_state: torch.Tensor | None = ...,
    cu_seqlens: torch.Tensor | None = ...,
    seq_idx: torch.Tensor | None = ...,
    chunk: int = ...,
    output_final_state: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def ssd_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = ...,
    z: torch.Tensor | None = ...,
    dt_bias: torch.Tensor | None = ...,
    dt_softplus: bool = ...,
    dt_limit: tuple[float, float] = ...,
    initial_state: torch.Tensor | None = ...,
    cu_seqlens: torch.Tensor | None = ...,
    seq_idx: torch.Tensor | None = ...,
    chunk: int = ...,
    output_final_state: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@overload
def swiglu(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    gate_multiplier: float = ...,
    down_multiplier: float = ...,
    outputs: tuple[str, ...] = ...,
    quantize: None = ...,
) -> torch.Tensor: ...
@overload
def swiglu(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    gate_multiplier: float = ...,
    down_multiplier: float = ...,
    outputs: tuple[str, ...] = ...,
    quantize: str,
) -> QuantizedOutput: ...
@overload
def swiglu(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    gate_multiplier: float = ...,
    down_multiplier: float = ...,
    outputs: tuple[str, ...] = ...,
    quantize: str | None,
) -> torch.Tensor | QuantizedOutput: ...
