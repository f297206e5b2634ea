"""Why a call does not fit a fused operator of torch_npu, by that operator's documentation; or None.

Nothing here reads from the device. torch_npu's own meta functions check names and counts alone.
"""

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def packed_gates(x: Tensor) -> str | None:
    """Limits of npu_swiglu and npu_geglu."""
    if x.dtype not in FLOATS or x.dim() > 8 or not x.numel():
        return f"takes 1 to 8 axes of fp32, fp16 or bf16, got {x.dtype} {tuple(x.shape)}"
    return None


def norm(x: Tensor, weight: Tensor | None, offset: float) -> str | None:
    """Limits of npu_rms_norm and its variants; ``offset + w`` must be exact in w's dtype."""
    if weight is None or weight.dtype != x.dtype:
        return "takes a weight of the dtype of x"
    if x.dtype not in FLOATS or not 2 <= x.dim() <= 8 or not x.numel():
        return f"takes 2 to 8 axes of fp32, fp16 or bf16, got {x.dtype} {tuple(x.shape)}"
    if offset and x.dtype != torch.float32:
        return f"{offset} + weight would be rounded to {x.dtype}"
    return None


def rotation(
    x: Tensor, cos: Tensor, sin: Tensor, style: str, rotary_dim: int, order: str
) -> str | None:
    """Limits of npu_rotary_mul on x with four axes in the order of memory."""
    if x.dim() != 4 or order not in ("0123", "0213") or not x.numel():
        return "takes 4 axes in the order BNSD or BSND"
    if not (x.dtype == cos.dtype == sin.dtype and x.dtype in FLOATS):
        return "takes x, cos and sin of one dtype"
    width = x.shape[-1]
    if rotary_dim != width or cos.shape[-1] != width or width >= 896:
        return "takes all channels, at most 894"
    if width * x.element_size() % 32:
        return f"is slow where {width} channels are no multiple of 32 bytes"
    if x.shape[0] >= 1000 or min(x.shape[1:3]) >= 1000:
        return "takes fewer than 1000 sequences and heads"
    if style == "interleaved" and (cos.shape[0] != 1 or x.shape[0] * min(x.shape[1:3]) >= 1000):
        return "takes interleaved pairs with angles that all sequences share"
    return None


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    ranges: Tensor | None,
    causal: bool,
    softcap: float,
) -> str | None:
    """Limits of npu_fusion_attention_v3 and its gradient."""
    if sinks is not None or ranges is not None or softcap != 0.0:
        return "takes no sinks, no softcap, and of masks the causal one"
    if not (q.dtype == k.dtype == v.dtype and q.dtype in FLOATS):
        return "takes q, k and v of one dtype: fp32, fp16 or bf16"
    if not (v.shape[3] <= q.shape[3] <= 768 and q.shape[1] <= 256):
        return "takes 256 heads of 768 elements, and values that are no wider"
    if not (q.numel() and k.numel() and v.numel()) or max(q.shape[2], k.shape[2]) > 2**20:
        return "takes 1 to 1048576 tokens"
    if causal and q.shape[2] > k.shape[2]:
        return "takes no query that sees no key"
    return None


def experts(
    x: Tensor, index: Tensor, gate_up: Tensor | None, down: Tensor, wide: int, table: str
) -> str | None:
    """Limits of npu_moe_token_permute and its inverse, npu_grouped_matmul and its _add_ form."""
    weights = [w for w in (gate_up, down) if w is not None]
    if table != "a2":
        return "the page of npu_grouped_matmul names the chips of Atlas A2 alone"
    if x.dtype not in FLOATS or any(w.dtype != x.dtype for w in weights):
        return "takes tokens and weights of one dtype: fp32, fp16 or bf16"
    if not (x.numel() and index.numel() and wide):
        return "takes tokens that have experts, and experts that have columns"
    if index.shape[1] > 512 or index.numel() >= 16777215:
        return (
            f"takes 512 experts a token and 16777214 token-expert pairs, got {tuple(index.shape)}"
        )
    if down.shape[0] > 1024:
        return f"takes 1024 groups, got {down.shape[0]}"
    if max(x.shape[1], wide) >= 65536:
        return f"takes rows of 65535 elements, got {x.shape[1]} and {wide}"
    if not all(w.is_contiguous() or w.mT.is_contiguous() for w in weights):
        return "takes weights that are contiguous, perhaps with their last axes exchanged"
    return None
