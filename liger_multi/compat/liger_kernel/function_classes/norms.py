"""Norms and DyT."""

from __future__ import annotations

from torch import Tensor

from liger_multi import ops
from liger_multi.compat.liger_kernel import functional
from liger_multi.compat.liger_kernel.function_classes.making import function_class


@function_class
def LigerRMSNormFunction(
    X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str | int = "llama",
    in_place: bool = True, row_mode: bool | None = None,
) -> Tensor:  # fmt: skip
    """:func:`liger_multi.ops.rms_norm`."""
    return functional.liger_rms_norm(X, W, eps, offset, casting_mode)


@function_class
def LigerFusedAddRMSNormFunction(
    X: Tensor, R: Tensor, W: Tensor, eps: float, offset: float = 0.0,
    casting_mode: str | int = "llama", in_place: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`liger_multi.ops.fused_add_rms_norm`."""
    y, total = functional.liger_fused_add_rms_norm(X, R, W, eps, offset, casting_mode)
    return y, total


@function_class
def LigerModulatedRMSNormFunction(
    X: Tensor, W: Tensor | None, scale: Tensor, shift: Tensor | None, eps: float,
    offset: float = 0.0, casting_mode: str | int = "llama", in_place: bool = True,
) -> Tensor:  # fmt: skip
    """:func:`liger_multi.ops.modulated_rms_norm`; the result has the dtype of X."""
    return functional.liger_modulated_rms_norm(X, W, scale, shift, eps, offset, casting_mode)


@function_class
def LigerLayerNormFunction(X: Tensor, W: Tensor, B: Tensor | None, eps: float) -> Tensor:
    """:func:`liger_multi.ops.layer_norm`."""
    return ops.layer_norm(X, W, B, eps)


@function_class
def LigerGroupNormFunction(
    X: Tensor, affine_scaling_weight: Tensor, affine_shifting_bias: Tensor, num_channels: int,
    num_groups: int, eps: float,
) -> Tensor:  # fmt: skip
    """:func:`liger_multi.ops.group_norm`."""
    return ops.group_norm(X, num_groups, affine_scaling_weight, affine_shifting_bias, eps)


@function_class
def LigerPolyNormFunction(
    X: Tensor, W: Tensor, B: Tensor, eps: float = 1e-6, in_place: bool = True
) -> Tensor:
    """:func:`liger_multi.ops.poly_norm`; the bias has no axis."""
    return functional.liger_poly_norm(X, W, B, eps)


@function_class
def LigerDyTFunction(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """:func:`liger_multi.ops.dyt`."""
    return ops.dyt(x, alpha, gamma, beta)
