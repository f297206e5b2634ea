"""DTensor inputs: row-wise operators run on local rows, others are refused with the reason."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from liger_multi.dispatch.op import Op
    from liger_multi.dispatch.torch_ops import Primitive


def replicated(op: Op) -> tuple[str, ...]:
    """Names of the tensors without rows, which must be replicated."""
    tensors = (op.fwd.params[i] for i in op.fwd.tensor_indices)
    return tuple(name for name in tensors if name not in op.bitwise.batched)


def prepare(op: Op, args: tuple[Any, ...]) -> None:
    """Refuse placements that the operator cannot run on, and register the others once.

    Raises:
        NotImplementedError: The operator has no row-wise form, or its last axis is sharded.
    """
    from torch.distributed.tensor import DTensor, Shard

    if not op.rowwise:
        raise NotImplementedError(
            f"liger_multi.{op.name} does not take DTensors; pass local or full tensors (FSDP's "
            f"forward hooks do, where the "
            "loss is reached through the head's own call)"
        )
    for name, arg in zip(op.fwd.params, args, strict=False):
        if not isinstance(arg, DTensor):
            continue
        for placement in arg.placements:
            if isinstance(placement, Shard) and (
                name in replicated(op) or placement.dim % arg.ndim == arg.ndim - 1
            ):
                raise NotImplementedError(
                    f"liger_multi.{op.name}: {name} is sharded on axis {placement.dim} of "
                    f"{arg.ndim}, which every rank needs "
                    "whole; redistribute it to Replicate() or shard another axis"
                )
    _register(op)


@functools.cache
def _register(op: Op) -> None:
    for prim in op.primitives:
        _register_direction(op, prim)


def _register_direction(op: Op, prim: Primitive) -> None:
    """Accept replicas, or rows sharded on a leading axis with partial sums of shared gradients."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    with_rows = {*op.bitwise.batched, *(f"d{name}" for name in op.bitwise.batched)}

    def strategy(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        specs = dict(zip(prim.params, args, strict=False))
        axes = next(
            len(spec.tensor_meta.shape)
            for name, spec in specs.items()
            if name in with_rows and hasattr(spec, "tensor_meta")
        )
        accepted = []
        for axis in (None, *range(axes - 1)):
            row = Replicate() if axis is None else Shard(axis)
            shared = Replicate() if axis is None else Partial()
            outs = [row if name in with_rows else shared for name in prim.returns]
            ins = [
                None
                if not hasattr(spec, "tensor_meta")
                else row
                if name in with_rows
                else Replicate()
                for name, spec in specs.items()
            ]
            accepted.append((outs, ins))
        return accepted

    register_sharding(prim.overload)(strategy)
