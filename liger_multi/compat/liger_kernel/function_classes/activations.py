"""Activations, softmaxes and rotary embeddings."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from liger_multi import ops
from liger_multi.compat.liger_kernel import functional
from liger_multi.compat.liger_kernel.function_classes.making import function_class


@function_class
def LigerSiLUMulFunction(
    a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> Tensor:
    """:func:`liger_multi.ops.swiglu`."""
    return functional.liger_swiglu(a, b, gate_multiplier, down_multiplier)


@function_class
def LigerFusedGateUpSiLUMulFunction(y: Tensor, in_place: bool = False) -> Tensor:
    """:func:`liger_multi.ops.swiglu_packed`."""
    return ops.swiglu_packed(y)


@function_class
def LigerGELUMulFunction(a: Tensor, b: Tensor) -> Tensor:
    """:func:`liger_multi.ops.geglu`, the tanh form."""
    return functional.liger_geglu(a, b)


@function_class
def LigerReLUSquaredFunction(X: Tensor) -> Tensor:
    """:func:`liger_multi.ops.relu_squared`."""
    return ops.relu_squared(X)


@function_class
def LigerSoftmaxFunction(input_: Tensor) -> Tensor:
    """:func:`liger_multi.ops.softmax` of the last axis."""
    return ops.softmax(input_)


@function_class
def LigerSparsemaxFunction(x: Tensor, dim: int) -> Tensor:
    """:func:`liger_multi.ops.sparsemax`."""
    return ops.sparsemax(x, dim)


@function_class
def LigerRopeFunction(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None,
    unsqueeze_dim: int = 1, rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`liger_multi.ops.rope`; ``position_ids`` is not read, as in Liger-Kernel."""
    angles = cos.detach(), sin.detach()
    return functional.liger_rope(q, k, *angles, None, unsqueeze_dim, rotary_dim)


@function_class
def LigerQwen2VLMRopeFunction(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Any, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """:func:`liger_multi.ops.rope_multimodal`, sections one after another."""
    angles = cos.detach(), sin.detach()
    return functional.liger_qwen2vl_mrope(q, k, *angles, mrope_section, unsqueeze_dim)


@function_class
def LigerLlama4RopeFunction(
    q: Tensor, k: Tensor, freqs_cis: Tensor, BLOCK_SIZE: int | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`liger_multi.ops.rope_complex`."""
    return functional.liger_llama4_text_rotary_pos_emb(q, k, freqs_cis.detach())
