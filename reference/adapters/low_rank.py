"""Products with the thin matrices of LoRA adapters, as exact as in fp32.

A base in bf16 with adapters in fp32 multiplies as exactly as in fp32, as PEFT does. Where a device
writes products of bf16 in fp32, a thin matrix is taken as the sum of three in bf16 (8 bits of its
24 each): their products with bf16 numbers are exact, so a wide matrix is read as it is, once.
Elsewhere the wide one is converted, some rows at a time. The scale meets sums, never a rounded
factor.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import has_out_dtype, row_blocks
from liger_multi.reference.common.strict import addmm, has_own_gemm, matmul, multiply, product
from liger_multi.reference.float8.rows import PLAIN, Quantizer

# Products of parts, first and second; the other three are below fp32's last bit.
TERMS = ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0))
LEFT, RIGHT = (tuple(term[side] for term in TERMS) for side in (0, 1))
PARTS = (0, 1, 2)


def split(x: Tensor, order: Sequence[int], axis: int) -> Tensor:
    """Three bf16 parts whose sum is ``x``, in ``order``; each is the rounded rest of the others."""
    parts = []
    for _ in PARTS:
        parts.append(x.to(torch.bfloat16))
        x = x - parts[-1]
    return torch.cat([parts[part] for part in order], axis)


class LowRank:
    """The GEMMs of forward and backward.

    Args:
        split: How a backend makes the parts of a thin matrix.
        quantizer: How a backend rounds rows to FP8, for wide weights in FP8.
    """

    def __init__(
        self,
        split: Callable[[Tensor, Sequence[int], int], Tensor] = split,
        quantizer: Quantizer = PLAIN,
    ) -> None:
        self._split, self.quantizer = split, quantizer

    def narrow(self, wide: Tensor, factor: Tensor) -> Tensor:
        """``wide @ factor``, (rows, r), in the dtype of ``factor``."""
        if wide.dtype == factor.dtype:
            return matmul(wide, factor)
        if _splits(wide, factor):
            multiplied = product if has_own_gemm() else _product
            out = multiplied(wide, self._split(factor, PARTS, 1)).view(-1, 3, factor.shape[1])
            return out[:, 0] + out[:, 1] + out[:, 2] if has_own_gemm() else out.sum(1)
        out = wide.new_empty(wide.shape[0], factor.shape[1], dtype=factor.dtype)
        for block in _blocks(wide, factor.dtype):
            multiply(wide[block].to(factor.dtype), factor, None, out[block])
        return out

    def add_(self, rows: Tensor, projected: Tensor, factor: Tensor, scale: float) -> Tensor:
        """``rows += scale projected @ factor``, rounded once."""
        if rows.dtype == projected.dtype:
            return addmm(rows, projected, factor, scale, in_place=True)
        if _splits(rows, projected):
            return addmm(rows, *self._terms(projected, factor), scale, in_place=True)
        for block in _blocks(rows, projected.dtype):
            rows[block] = addmm(rows[block].to(projected.dtype), projected[block], factor, scale)
        return rows

    def added(self, rows: Tensor, projected: Tensor, factor: Tensor, scale: float) -> Tensor:
        """``rows + scale projected @ factor``, rounded once."""
        if rows.dtype == projected.dtype:
            return addmm(rows, projected, factor, scale)
        if _splits(rows, projected):
            return addmm(rows, *self._terms(projected, factor), scale)
        return self.add_(
            rows.clone(memory_format=torch.contiguous_format), projected, factor, scale
        )

    def widened(
        self, projected: Tensor, factor: Tensor, scale: float, dtype: torch.dtype
    ) -> Tensor:
        """``scale projected @ factor`` in a given dtype."""
        if dtype == projected.dtype and has_own_gemm():
            return product(projected, factor).mul_(scale).to(dtype)
        out = projected.new_empty(projected.shape[0], factor.shape[1], dtype=dtype)
        if dtype == projected.dtype:
            return out.addmm_(projected, factor, beta=0, alpha=scale)
        if _splits(out, projected):
            if has_own_gemm():
                return out.copy_(product(*self._terms(projected, factor)).mul_(scale))
            return out.addmm_(*self._terms(projected, factor), beta=0, alpha=scale)
        for block in _blocks(out, projected.dtype):
            out[block] = matmul(projected[block], factor).mul_(scale)
        return out

    def gradient(self, left: Tensor, right: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """``scale left' @ right``, the gradient of a thin matrix, in its dtype."""
        if left.dtype == right.dtype == dtype:
            out = left.new_empty(left.shape[1], right.shape[1])
            return out.addmm_(left.t(), right, beta=0, alpha=scale)
        return self.sums(left, right, dtype).mul_(scale)

    def narrow_and_gradient(
        self,
        dy: Tensor,
        factor: Tensor,
        low: Tensor,
        scale: float,
        needs_narrow: bool = True,
        needs_gradient: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """``dy @ factor`` and the gradient of ``factor``, ``scale dy' @ low``; empty if not needed.

        Both read dy, which a backend may do once.
        """
        narrow, gradient = dy.new_empty(0), factor.new_empty(0)
        if needs_narrow:
            narrow = self.narrow(dy, factor)
        if needs_gradient:
            gradient = self.gradient(dy, low, scale, factor.dtype)
        return narrow, gradient

    def sums(self, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
        """``left' @ right`` in a given dtype."""
        if left.dtype == right.dtype == dtype:
            return left.t() @ right
        if _splits(left, right):
            parts = _product(left.t(), self._split(right, PARTS, 1))
            return parts.view(-1, 3, right.shape[1]).sum(1)
        if _splits(right, left):
            parts = _product(self._split(left, PARTS, 1).t(), right)
            return parts.view(3, -1, right.shape[1]).sum(0)
        total = left.new_zeros(left.shape[1], right.shape[1], dtype=dtype)
        wider = left if left.shape[1] > right.shape[1] else right
        for block in _blocks(wider, dtype):
            total.addmm_(left[block].to(dtype).t(), right[block].to(dtype))
        return total

    def _terms(self, projected: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """Two in bf16 whose product is that of two in fp32."""
        return self._split(projected, LEFT, 1), self._split(factor, RIGHT, 0)


def _splits(wide: Tensor, factor: Tensor) -> bool:
    splits = wide.dtype == torch.bfloat16 and factor.dtype == torch.float32
    return splits and wide.numel() > 0 and has_out_dtype(wide.device.type, torch.bfloat16)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32)


def _blocks(wide: Tensor, dtype: torch.dtype) -> list[slice]:
    return list(row_blocks(wide.shape[0], wide.shape[1] * dtype.itemsize))
