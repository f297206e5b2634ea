"""Blocks of ``liger_kernel.transformers``: MLPs, attention, residual streams, the embedding."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from liger_multi import nn as ours
from liger_multi import ops
from liger_multi.compat.liger_kernel import functional

# --- attention and the embedding ---


def _pair(value: Any) -> Any:
    return tuple(value) if hasattr(value, "__iter__") else (value, value)


class LigerMultiTokenAttention(nn.Module):
    """:func:`liger_multi.ops.multi_token_attention`, with the parameters of a convolution."""

    bias: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.stride = _pair(kernel_size), _pair(stride)
        self.padding, self.dilation = _pair(padding), _pair(dilation)
        self.groups, self.sparse = groups, sparse
        start = nn.Conv2d(in_channels, out_channels, self.kernel_size, groups=groups, bias=bias)
        self.weight = start.weight
        self.register_parameter("bias", dict(start.named_parameters()).get("bias"))

    def forward(self, scores: Tensor) -> Tensor:
        """Normalize scores of attention and convolve them."""
        return functional.liger_multi_token_attention(
            scores,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            self.sparse,
        )


class LigerFusedNeighborhoodAttentionConfig:
    """Arguments of the layer below."""

    def __init__(
        self,
        hidden_size: int = 768,
        num_heads: int = 12,
        kernel_size: int = 7,
        dilation: int = 1,
        bias: bool = True,
        dropout: float = 0.0,
        layer_norm_eps: float = 1e-5,
        scale: float | None = None,
    ) -> None:
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.kernel_size, self.dilation, self.bias = kernel_size, dilation, bias
        self.dropout, self.layer_norm_eps, self.scale = dropout, layer_norm_eps, scale


class LigerFusedNeighborhoodAttention(nn.Module):
    """:func:`liger_multi.ops.neighborhood_attention` with its projections."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        kernel_size: int = 7,
        dilation: int = 1,
        bias: bool = True,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(
                f"hidden_size ({hidden_size}) must be divisible by num_heads ({num_heads})"
            )
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size ({kernel_size}) must be odd")
        if dilation < 1:
            raise ValueError(f"dilation ({dilation}) must be positive")
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.head_dim = hidden_size // num_heads
        self.kernel_size, self.dilation = kernel_size, dilation
        self.scale = 1 / math.sqrt(self.head_dim) if scale is None else scale
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(hidden_size, hidden_size, bias=bias) for _ in names
        )
        self.dropout_p = dropout
        self.dropout = nn.Dropout(dropout) if dropout else None

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Attend to the neighbors of every token."""
        if attention_mask is not None:
            raise NotImplementedError(
                "LigerFusedNeighborhoodAttention: attention_mask is not served, got "
                f"{tuple(attention_mask.shape)}; a token sees its neighborhood"
            )
        heads = (*hidden_states.shape[:-1], self.num_heads, self.head_dim)
        q, k, v = (
            layer(hidden_states).view(heads).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        context = ops.neighborhood_attention(q, k, v, self.kernel_size, self.dilation, self.scale)
        joined = context.transpose(1, 2).reshape(hidden_states.shape)
        if self.dropout is not None:
            joined = self.dropout(joined)
        result: Tensor = self.out_proj(joined)
        return result


class LigerFusedNeighborhoodAttentionLayer(nn.Module):
    """The attention with a norm before it and the residual around it."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        kernel_size: int = 7,
        dilation: int = 1,
        bias: bool = True,
        dropout: float = 0.0,
        layer_norm_eps: float = 1e-5,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.attention = LigerFusedNeighborhoodAttention(
            hidden_size, num_heads, kernel_size, dilation, bias, dropout, scale
        )
        self.layer_norm = nn.LayerNorm(hidden_size, eps=layer_norm_eps)
        self.dropout = nn.Dropout(dropout) if dropout else None

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The layer."""
        context = self.attention(self.layer_norm(hidden_states), attention_mask)
        if self.dropout is not None:
            context = self.dropout(context)
        result: Tensor = hidden_states + context
        return result


class LigerEmbedding(ours.Embedding):
    """:class:`liger_multi.nn.Embedding`."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx)

    def forward(self, indices: Tensor) -> Tensor:
        """The rows of the indices."""
        return super().forward(indices)


# --- residual streams ---


class LigerMHC(nn.Module):
    """A layer between residual streams: :func:`functional.liger_mhc_forward`."""

    def __init__(
        self,
        layer: nn.Module,
        *,
        hc: int,
        c: int,
        tmax: int = 20,
        rms_eps: float = 1e-6,
        pre_eps: float = 0.0,
        sinkhorn_eps: float = 1e-6,
        post_mult: float = 2.0,
        phi_dtype: torch.dtype = torch.float16,
        allow_fp32: bool = False,
    ) -> None:
        super().__init__()
        if hc > 16:
            warnings.warn(f"hc={hc} is large: coefficients grow with its square", stacklevel=2)
        self.layer, self.hc, self.c, self.tmax = layer, hc, c, tmax
        self.rms_eps, self.pre_eps, self.sinkhorn_eps = rms_eps, pre_eps, sinkhorn_eps
        self.post_mult, self.allow_fp32 = post_mult, allow_fp32
        many = hc * hc + 2 * hc
        self.phi = nn.Parameter((torch.randn(hc * c, many) * 0.02).to(phi_dtype))
        self.b = nn.Parameter(torch.zeros(many))
        self.alpha_pre, self.alpha_post, self.alpha_res = (
            nn.Parameter(torch.ones(())) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The streams after the layer."""
        out: Tensor = functional.liger_mhc_forward(
            x,
            self.layer,
            self.phi,
            self.b,
            self.alpha_pre,
            self.alpha_post,
            self.alpha_res,
            allow_fp32=self.allow_fp32,
            tmax=self.tmax,
            rms_eps=self.rms_eps,
            pre_eps=self.pre_eps,
            sinkhorn_eps=self.sinkhorn_eps,
            post_mult=self.post_mult,
        )
        return out
