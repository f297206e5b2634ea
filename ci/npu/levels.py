"""How far every operator got on Ascend: by which path, and up to which level of docs/ascend.md.

A reference on the device reaches level 3, which is as far as there is anything to check; levels 4
and 5 are about kernels. tests/kernels/test_npu.py wants what stands here,
tests/kernels/test_vendors.py a row for every operator. For the first two levels there is one
call of every operator of torch_npu that the backend uses.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, NamedTuple

import torch

from liger_multi.dispatch.registry import packages

# --- levels ---

REFERENCE, SIMULATED, COMPILED = "reference", 3, 5


class Row(NamedTuple):
    """Path and level of an operator."""

    path: str
    level: int


KERNEL = Row("kernel", COMPILED)
BOTH = Row("torch_npu and kernel", COMPILED)
FUSED = Row("torch_npu and reference", SIMULATED)
HEAD = Row("products and kernel", COMPILED)
IN_TURN = Row("rms_norm, then rope", SIMULATED)
BATCHED = Row("batched matmuls", SIMULATED)
PLAIN = Row(REFERENCE, SIMULATED)

ROWS: dict[str, Row] = {
    "attention": FUSED,
    "attention_residuals": PLAIN,
    "causal_conv1d": KERNEL,
    "cross_entropy": KERNEL,
    "cross_entropy_inplace": KERNEL,
    "dyt": KERNEL,
    "embedding": PLAIN,
    "fused_add_rms_norm": BOTH,
    "fused_add_rms_norm_quantized": PLAIN,
    "fused_linear_cross_entropy": HEAD,
    "fused_linear_jsd": HEAD,
    "fused_linear_kl_div": HEAD,
    "fused_linear_log_prob": HEAD,
    "fused_linear_tvd": HEAD,
    "fused_moe": FUSED,
    "fused_scaled_add_rms_norm": PLAIN,
    "gated_delta_rule": BATCHED,
    "gated_mlp": PLAIN,
    "gated_mlp_float8": PLAIN,
    "gated_rms_norm": PLAIN,
    "gated_short_conv": KERNEL,
    "geglu": KERNEL,
    "geglu_packed": BOTH,
    "geglu_quantized": PLAIN,
    "group_norm": PLAIN,
    "hyper_connections": PLAIN,
    "hyper_connections_post": PLAIN,
    "hyper_connections_pre": PLAIN,
    "indexer_scores": PLAIN,
    "indexer_topk": PLAIN,
    "jsd": KERNEL,
    "jsd_inplace": KERNEL,
    "kimi_delta_attention": BATCHED,
    "kl_div": KERNEL,
    "kl_div_inplace": KERNEL,
    "layer_norm": PLAIN,
    "layer_norm_quantized": PLAIN,
    "linear": PLAIN,
    "linear_float8": PLAIN,
    "lora_mlp": PLAIN,
    "lora_moe": PLAIN,
    "lora_qkv": PLAIN,
    "lora_update": PLAIN,
    "modulated_rms_norm": PLAIN,
    "multi_token_attention": PLAIN,
    "neighborhood_attention": PLAIN,
    "poly_norm": PLAIN,
    "relu_squared": PLAIN,
    "rms_norm": BOTH,
    "rms_norm_quantized": PLAIN,
    "rms_norm_rope": IN_TURN,
    "rope": BOTH,
    "rope_complex": PLAIN,
    "rope_multimodal": PLAIN,
    "rope_positions": PLAIN,
    "rope_sorted": PLAIN,
    "selective_log_softmax": PLAIN,
    "selective_scan": KERNEL,
    "softmax": PLAIN,
    "sparse_attention": PLAIN,
    "sparsemax": PLAIN,
    "ssd_scan": BATCHED,
    "swiglu": KERNEL,
    "swiglu_clamped": PLAIN,
    "swiglu_clamped_packed": PLAIN,
    "swiglu_packed": BOTH,
    "swiglu_quantized": PLAIN,
    "token_log_prob": KERNEL,
    "tvd": KERNEL,
    "tvd_inplace": KERNEL,
}


# --- calls ---


def _t(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def _ids(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


ANGLES = (1, 1, 5, 64)
# arguments by operator, and the shapes of what it returns
CALLS: dict[str, tuple[tuple[Any, ...], list[tuple[int, ...]]]] = {
    "npu_rms_norm": ((_t(2, 5, 64), _t(64), 1e-6), [(2, 5, 64), (2, 5, 1)]),
    "npu_rms_norm_backward": (
        (_t(2, 5, 64), _t(2, 5, 64), _t(64), _t(2, 5, 1).float()), [(2, 5, 64), (64,)],
    ),
    "npu_add_rms_norm": (
        (_t(2, 5, 64), _t(2, 5, 64), _t(64), 1e-6), [(2, 5, 64), (2, 5, 1), (2, 5, 64)],
    ),
    "npu_swiglu": ((_t(3, 128), -1), [(3, 64)]),
    "npu_swiglu_backward": ((_t(3, 64), _t(3, 128), -1), [(3, 128)]),
    "npu_geglu": ((_t(3, 128), -1, 1, True), [(3, 64), (3, 64)]),
    "npu_rotary_mul": ((_t(2, 4, 5, 64), _t(*ANGLES), _t(*ANGLES), "half"), [(2, 4, 5, 64)]),
    "npu_fusion_attention_v3": (
        (_t(2, 5, 4, 64), _t(2, 5, 2, 64), _t(2, 5, 2, 64), 4, "BSND"),
        [(2, 5, 4, 64), (2, 4, 5, 8), (2, 4, 5, 8), (0,), (1,), (1,)],
    ),
    "npu_fusion_attention_grad_v3": (
        (*(_t(2, 5, n, 64) for n in (4, 2, 2, 4)), 4, "BSND"),
        [(2, 5, 4, 64), (2, 5, 2, 64), (2, 5, 2, 64), (0,), ()],
    ),
    "npu_moe_token_permute": ((_t(5, 64), _ids(5, 2)), [(10, 64), (10,)]),
    "npu_moe_token_unpermute": ((_t(10, 64), _ids(10).int(), _t(5, 2)), [(5, 64)]),
    "npu_grouped_matmul": (([_t(10, 64)], [_t(3, 64, 32)]), [(10, 32)]),
    "npu_grouped_matmul_add_": (
        (_t(3, 64, 32).float(), _t(10, 64), _t(10, 32), _ids(3)), [(3, 64, 32)],
    ),
}  # fmt: skip
# what is given by name
OPTIONS: dict[str, dict[str, Any]] = {
    "npu_grouped_matmul": {"group_list": _ids(3), "split_item": 3, "group_type": 0},
}


def folder() -> Path:
    """Where the backend stands."""
    module = __import__(packages()["npu"], fromlist=["BACKEND"])
    return Path(module.__file__ or "").parent


def used() -> set[str]:
    """Names of torch_npu's operators in the backend's sources."""
    found = set()
    for file in folder().rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.ops.npu":
                found.add(node.attr)
    return found
