"""Grouped GEMMs of sorted rows; only gradients of fp32 weights read the groups' sizes back.

torch_npu's grouped GEMMs give no gradient, and no error either. So they are called inside forward
and backward of our own.
"""

from itertools import pairwise

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import row_blocks
from liger_multi.reference.experts.fused_moe import bounds_of


def product(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """The rows of group e times ``weight[e]``, (K, N) in either order of memory.

    npu_grouped_matmul requires that its groups hold all rows: those of no group get some numbers.
    """
    ends = offsets[1:].long()
    ends[-1:].fill_(rows.shape[0])
    made: list[Tensor] = torch.ops.npu.npu_grouped_matmul(
        [rows], [weight], group_list=ends, split_item=3, group_type=0
    )
    return made[0]


def weight_gradient(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """``left.T @ right`` of the rows of every group.

    npu_grouped_matmul is not documented to sum over a group's rows. npu_grouped_matmul_add_ does,
    in fp32 and for fp16 and bf16. For fp32 there is one GEMM per group, whose bounds the host must
    know.
    """
    made = left.new_zeros(offsets.shape[0] - 1, left.shape[1], right.shape[1], dtype=torch.float32)
    if left.dtype == torch.float32:
        for e, (start, stop) in enumerate(pairwise(bounds_of(offsets, left.shape[0]))):
            if start < stop:
                made[e] = left[start:stop].mT @ right[start:stop]
        return made
    torch.ops.npu.npu_grouped_matmul_add_(made, left, right, offsets[1:].long())
    return made.to(left.dtype)


def add_bias_(rows: Tensor, bias: Tensor, ids: Tensor) -> None:
    """Add to every row the bias of its group; to those of no group, zeros."""
    bias = torch.nn.functional.pad(bias, (0, 0, 0, 1))
    for block in row_blocks(rows.shape[0], rows.shape[1] * rows.element_size()):
        rows[block] += bias.index_select(0, ids[block])


def dot_with_bias(rows: Tensor, bias: Tensor, ids: Tensor) -> Tensor:
    """The dot product of every row and the bias of its group, in fp32."""
    bias, found = torch.nn.functional.pad(bias, (0, 0, 0, 1)), []
    for block in row_blocks(rows.shape[0], 12 * rows.shape[1]):
        found.append((rows[block].float() * bias.index_select(0, ids[block]).float()).sum(1))
    return torch.cat(found)


def sums(rows: Tensor, ids: Tensor, groups: int, weight: Tensor | None = None) -> Tensor:
    """The (weighted) sum of the rows of every group: a GEMM with zeros and ones in fp32."""
    every = torch.arange(groups, device=ids.device).unsqueeze(1)
    total = rows.new_zeros(groups, rows.shape[1], dtype=torch.float32)
    for block in row_blocks(rows.shape[0], 4 * (rows.shape[1] + 2 * groups)):
        mine = (ids[block] == every).float()
        mine = mine if weight is None else mine * weight[block]
        total.addmm_(mine, rows[block].float())
    return total.to(rows.dtype)
