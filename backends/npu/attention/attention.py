"""Attention by npu_fusion_attention_v3 within its limits, else the reference on the device.

Its gradient takes a row's maximum and sum of exponentials, and uses exp(s - max) / sum. The lse and
1 in their place give the same, so that any backward follows any forward. A mask of 1 hides a key.
Causal attention needs a mask of 2048 x 2048 elements, whatever the lengths.
"""

from typing import Any

import torch
from torch import Tensor

from liger_multi.backends.npu.common.limits import fused_attention
from liger_multi.reference.attention import attention as reference

COPIES = 8  # copies of each statistic in the operator's layout


def _mask_options(q: Tensor, causal: bool) -> dict[str, Any]:
    """The mask and its meaning: causal from the last query and key, or none."""
    if not causal:
        return {}
    mask = torch.ones(2048, 2048, dtype=torch.bool, device=q.device).triu(1)
    return {"atten_mask": mask, "sparse_mode": 3}


def _tokens(*tensors: Tensor) -> list[Tensor]:
    """Tokens before heads, as models' projections leave them."""
    return [x.transpose(1, 2).contiguous() for x in tensors]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    ranges: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """The result, and the lse from the operator's two statistics."""
    if fused_attention(q, k, v, sinks, ranges, causal, softcap) is not None:
        return reference.forward(q, k, v, sinks, ranges, causal, scale, softcap)
    y, top, total, *_ = torch.ops.npu.npu_fusion_attention_v3(
        *_tokens(q, k, v), q.shape[1], "BSND", scale=scale, **_mask_options(q, causal)
    )
    return y.transpose(1, 2), top[..., 0] + total[..., 0].log()


def backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    ranges: Tensor | None,
    y: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    softcap: float,
    needs_q: bool,
    needs_k: bool,
    needs_v: bool,
    needs_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operator makes all three gradients; empty tensors if not needed."""
    if fused_attention(q, k, v, sinks, ranges, causal, softcap) is not None or dy.dtype != q.dtype:
        return reference.backward(
            dy,
            q,
            k,
            v,
            sinks,
            ranges,
            y,
            lse,
            causal=causal,
            scale=scale,
            softcap=softcap,
            needs_q=needs_q,
            needs_k=needs_k,
            needs_v=needs_v,
            needs_sinks=needs_sinks,
        )
    top = lse.unsqueeze(-1).expand(*lse.shape, COPIES).contiguous()
    q_tokens, k_tokens, values, up, out = _tokens(q, k, v, dy, y)
    gradients = torch.ops.npu.npu_fusion_attention_grad_v3(
        q_tokens,
        k_tokens,
        values,
        up,
        q.shape[1],
        "BSND",
        softmax_max=top,
        softmax_sum=torch.ones_like(top),
        attention_in=out,
        scale_value=scale,
        **_mask_options(q, causal),
    )
    dq, dk, dv = (
        x.transpose(1, 2) if is_needed else x.new_empty(0)
        for x, is_needed in zip(gradients[:3], (needs_q, needs_k, needs_v), strict=True)
    )
    return dq, dk, dv, q.new_empty(0)
