"""Whole blocks of a layer: MLPs, experts, attention, residual streams, the embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_multi import ops
from liger_multi.compat.liger_kernel.function_classes.making import function_class
from liger_multi.nn import TiledMLP

# --- MLPs and experts ---


@function_class
def LigerMLPFunction(
    input: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor,
    gate_multiplier: float = 1.0, down_multiplier: float = 1.0,
) -> Tensor:  # fmt: skip
    """:func:`liger_multi.ops.gated_mlp`; with multipliers, linear layers around the activation."""
    if gate_multiplier == 1.0 and down_multiplier == 1.0:
        return ops.gated_mlp(input, gate_weight, up_weight, down_weight)
    inner = ops.swiglu(
        F.linear(input, gate_weight), F.linear(input, up_weight),
        gate_multiplier=gate_multiplier, down_multiplier=down_multiplier,
    )  # fmt: skip
    return F.linear(inner, down_weight)


class _Call(nn.Module):
    """A function of a module and a piece of its input, as the module that TiledMLP runs."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor], module: nn.Module) -> None:
        super().__init__()
        self.call, self.module = call, module
        self.training = module.training

    def forward(self, x: Tensor) -> Tensor:
        """One piece."""
        return self.call(self.module, x)


def apply_tiled_mlp(
    fn: Callable[[nn.Module, Tensor], Tensor], mlp_module: nn.Module, x: Tensor,
    num_shards: int | None = None, compute_params: Sequence[nn.Parameter] | None = None,
) -> Tensor:  # fmt: skip
    """:class:`liger_multi.nn.TiledMLP` of ``fn(mlp_module, x)``.

    ``compute_params`` is not read: every parameter of the module that takes part gets its gradient.
    """
    return TiledMLP(_Call(fn, mlp_module), num_shards)(x)  # type: ignore[no-any-return]


@function_class
def LigerTiledMLPFunction(
    fn: Callable[[nn.Module, Tensor], Tensor], mlp_module: nn.Module, x: Tensor, shards: int,
    compute_params: Sequence[nn.Parameter] | None = None,
) -> Tensor:  # fmt: skip
    """:func:`apply_tiled_mlp` in a given number of pieces."""
    return apply_tiled_mlp(fn, mlp_module, x, shards, compute_params)


@function_class
def LigerFusedMoEFunction(
    x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """:func:`liger_multi.ops.fused_moe`."""
    return ops.fused_moe(x, gate_up_proj, down_proj, top_k_index, top_k_weights)


# --- residual streams ---


@function_class
def LigerMHCCoeffsFunction(
    x: Tensor, phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor,
    allow_fp32: bool, tmax: int, rms_eps: float, pre_eps: float, sinkhorn_eps: float,
    post_mult: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """:func:`liger_multi.ops.hyper_connections`, with an eps of its own for the first output."""
    if x.dtype == torch.float32 and not allow_fp32:
        raise AssertionError(
            "LigerMHCCoeffsFunction: x must be float16 or bfloat16, got float32; "
            "allow_fp32=True takes it"
        )
    scale = torch.stack([a.reshape(()) for a in (alpha_pre, alpha_post, alpha_res)])
    pre, post, mix = ops.hyper_connections(
        x, phi.mT, b, scale, iterations=tmax, rms_eps=rms_eps, eps=sinkhorn_eps,
        post_scale=post_mult,
    )  # fmt: skip
    return pre + (pre_eps - sinkhorn_eps), post, mix


@function_class
def LigerMHCPreFunction(x: Tensor, h_pre: Tensor) -> Tensor:
    """:func:`liger_multi.ops.hyper_connections_pre`."""
    return ops.hyper_connections_pre(x, h_pre)


@function_class
def LigerMHCPostResFunction(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """:func:`liger_multi.ops.hyper_connections_post`."""
    return ops.hyper_connections_post(x, f_out, h_post, h_res)


@function_class
def LigerAttnResFunction(V_stacked: Tensor, w_query: Tensor, w_norm: Tensor, eps: float) -> Tensor:
    """:func:`liger_multi.ops.attention_residuals`."""
    return ops.attention_residuals(V_stacked, w_query, w_norm, eps)


# --- attention and the embedding ---


def _single(size: Any) -> Any:
    """One number for two equal ones."""
    return size[0] if isinstance(size, (tuple, list)) and len({*size}) == 1 else size


@function_class
def LigerMultiTokenAttentionFunction(
    scores: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """:func:`liger_multi.ops.multi_token_attention`."""
    return ops.multi_token_attention(
        scores, weight, bias, stride=_single(stride), padding=_single(padding),
        dilation=_single(dilation), groups=groups, sparse=sparse,
    )  # fmt: skip


@function_class
def LigerFusedNeighborhoodAttentionFunction(
    query: Tensor, key: Tensor, value: Tensor, kernel_size: int = 7, dilation: int = 1,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """:func:`liger_multi.ops.neighborhood_attention`."""
    return ops.neighborhood_attention(query, key, value, kernel_size, dilation, scale)


@function_class
def LigerEmbeddingFunction(embeddings: Tensor, indices: Tensor) -> Tensor:
    """:func:`liger_multi.ops.embedding`."""
    return ops.embedding(indices, embeddings)
