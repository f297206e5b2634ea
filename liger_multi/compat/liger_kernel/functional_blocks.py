"""Functions of ``liger_kernel.transformers.functional`` over the autograd classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_multi.compat.liger_kernel.function_classes import blocks, heads


def liger_fused_linear_kl_div(
    student_input: Tensor, student_weight: Tensor, target: Tensor,
    shift_labels: Tensor | None = None, reduction: str = "batchmean", ignore_index: int = -100,
    temperature: float = 1.0, eps: float = 1e-10, accum_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """KL divergence of a head's tokens from given distributions."""
    return heads.LigerFusedLinearKLDivFunction.apply(
        student_input, student_weight, target, shift_labels, reduction, ignore_index, temperature,
        eps, accum_dtype,
    )  # fmt: skip


def liger_fused_linear_scaled_cross_entropy_tp(
    input: Tensor, weight: Tensor, target: Tensor, tp_group: Any, temperature: float = 1.0,
    ignore_index: int = -100, tiles_per_reduce: int = 1, return_entropy: bool = False,
) -> Any:  # fmt: skip
    """What every token costs, of a head that is split over the processes of a group."""
    return heads.LigerFusedLinearScaledCrossEntropyTPFunction.apply(
        input, weight, target, tp_group, temperature, ignore_index, tiles_per_reduce,
        return_entropy,
    )  # fmt: skip


def liger_attn_res(V: Tensor, w_query: Tensor, w_norm: Tensor, eps: float = 1e-6) -> Any:
    """:func:`liger_multi.ops.attention_residuals`."""
    return blocks.LigerAttnResFunction.apply(V, w_query, w_norm, eps)


def liger_multi_token_attention(
    scores: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, padding: int = 0,
    dilation: int = 1, groups: int = 1, sparse: bool = False,
) -> Any:  # fmt: skip
    """:func:`liger_multi.ops.multi_token_attention`."""
    return blocks.LigerMultiTokenAttentionFunction.apply(
        scores, weight, bias, stride, padding, dilation, groups, sparse
    )


def liger_fused_neighborhood_attention(
    query: Tensor, key: Tensor, value: Tensor, kernel_size: int = 7, dilation: int = 1,
    scale: float | None = None,
) -> Any:  # fmt: skip
    """:func:`liger_multi.ops.neighborhood_attention`."""
    return blocks.LigerFusedNeighborhoodAttentionFunction.apply(
        query, key, value, kernel_size, dilation, scale
    )


def liger_mhc_coeffs(
    x: Tensor, phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor, *,
    allow_fp32: bool = False, tmax: int = 20, rms_eps: float = 1e-6, pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6, post_mult: float = 2.0,
) -> Any:  # fmt: skip
    """:func:`liger_multi.ops.hyper_connections`."""
    return blocks.LigerMHCCoeffsFunction.apply(
        x, phi, b, alpha_pre, alpha_post, alpha_res, allow_fp32, tmax, rms_eps, pre_eps,
        sinkhorn_eps, post_mult,
    )  # fmt: skip


def liger_mhc_pre(x: Tensor, h_pre: Tensor) -> Any:
    """:func:`liger_multi.ops.hyper_connections_pre`."""
    return blocks.LigerMHCPreFunction.apply(x, h_pre)


def liger_mhc_post_res(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Any:
    """:func:`liger_multi.ops.hyper_connections_post`."""
    return blocks.LigerMHCPostResFunction.apply(x, f_out, h_post, h_res)


def liger_mhc_apply(
    x: Tensor, f_out: Tensor, h_pre: Tensor, h_post: Tensor, h_res: Tensor, *,
    return_x_in: bool = False,
) -> Any:  # fmt: skip
    """The streams after a layer's result, and with ``return_x_in`` the layer's input too."""
    found = liger_mhc_post_res(x, f_out, h_post, h_res)
    return (found, liger_mhc_pre(x, h_pre)) if return_x_in else found


def liger_mhc_forward(
    x: Tensor, layer: Callable[[Tensor], Tensor], phi: Tensor, b: Tensor, alpha_pre: Tensor,
    alpha_post: Tensor, alpha_res: Tensor, *, allow_fp32: bool = False, tmax: int = 20,
    rms_eps: float = 1e-6, pre_eps: float = 0.0, sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0, return_coeffs: bool = False,
) -> Any:  # fmt: skip
    """Coefficients, the layer on the mixed streams, and the streams after it."""
    coefficients = liger_mhc_coeffs(
        x, phi, b, alpha_pre, alpha_post, alpha_res, allow_fp32=allow_fp32, tmax=tmax,
        rms_eps=rms_eps, pre_eps=pre_eps, sinkhorn_eps=sinkhorn_eps, post_mult=post_mult,
    )  # fmt: skip
    h_pre, h_post, h_res = coefficients
    f_out = layer(liger_mhc_pre(x, h_pre))
    found = liger_mhc_post_res(x, f_out, h_post, h_res)
    return (found, coefficients) if return_coeffs else found
