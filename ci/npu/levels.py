"""How far every operator got on Ascend: by which path, and up to which level of docs/ascend.md.

A reference on the device reaches level 3, which is as far as there is anything to check; levels 4
and 5 are about kernels. tests/kernels/test_npu.py wants what stands here,
tests/kernels/test_npu_limits.py a row for every operator.
"""

from __future__ import annotations

from typing import NamedTuple

REFERENCE, SIMULATED, COMPILED = "reference", 3, 5


class Row(NamedTuple):
    """Path and level of an operator."""

    path: str
    level: int


KERNEL = Row("kernel", COMPILED)
BOTH = Row("torch_npu and kernel", COMPILED)
FUSED = Row("torch_npu and reference", SIMULATED)
HEAD = Row("products and kernel", COMPILED)
PLAIN = Row(REFERENCE, SIMULATED)

ROWS: dict[str, Row] = {
    "attention": FUSED,
    "attention_residuals": PLAIN,
    "cross_entropy": KERNEL,
    "cross_entropy_inplace": KERNEL,
    "dyt": KERNEL,
    "embedding": PLAIN,
    "fused_add_rms_norm": BOTH,
    "fused_linear_cross_entropy": HEAD,
    "fused_linear_jsd": HEAD,
    "fused_linear_kl_div": HEAD,
    "fused_linear_log_prob": HEAD,
    "fused_linear_tvd": HEAD,
    "fused_moe": FUSED,
    "fused_scaled_add_rms_norm": PLAIN,
    "gated_mlp": PLAIN,
    "gated_rms_norm": PLAIN,
    "geglu": KERNEL,
    "geglu_packed": BOTH,
    "group_norm": PLAIN,
    "hyper_connections": PLAIN,
    "hyper_connections_post": PLAIN,
    "hyper_connections_pre": PLAIN,
    "jsd": KERNEL,
    "jsd_inplace": KERNEL,
    "kl_div": KERNEL,
    "kl_div_inplace": KERNEL,
    "layer_norm": PLAIN,
    "lora_mlp": PLAIN,
    "lora_qkv": PLAIN,
    "lora_update": PLAIN,
    "modulated_rms_norm": PLAIN,
    "multi_token_attention": PLAIN,
    "neighborhood_attention": PLAIN,
    "poly_norm": PLAIN,
    "relu_squared": PLAIN,
    "rms_norm": BOTH,
    "rope": BOTH,
    "rope_complex": PLAIN,
    "rope_multimodal": PLAIN,
    "rope_positions": PLAIN,
    "rope_sorted": PLAIN,
    "selective_log_softmax": PLAIN,
    "softmax": PLAIN,
    "sparsemax": PLAIN,
    "swiglu": KERNEL,
    "swiglu_clamped": PLAIN,
    "swiglu_clamped_packed": PLAIN,
    "swiglu_packed": BOTH,
    "token_log_prob": KERNEL,
    "tvd": KERNEL,
    "tvd_inplace": KERNEL,
}
