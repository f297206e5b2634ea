"""Weights that FSDP2 shards, and gathers in FP8: one byte per element and four per row.

A row has one scale, of its own elements, and FSDP2 shards rows. So the codes of a shard are those
rows of the codes of the whole weight, and ranks gather the very codes that one process would make.

FSDP2 asks the local tensor of a sharded parameter for what it gathers, and has the tensor make the
gathered parameter. A frozen weight holds codes, so its shards do. A trained weight is sharded in
its own dtype, where the optimizer changes it, and a shard is rounded whenever it is gathered.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from liger_multi._torch_private import (
    DisableTorchDispatch,
    make_subclass,
    no_torch_function,
    pin_memory,
    say,
    to_copy,
)
from liger_multi.patching.float8.weight import Float8Weight, Outputs, gathered_weight, to_gather

aten = torch.ops.aten

# --- trained weights ---


class GatheredWeight(Float8Weight):
    """The codes of a trained weight that FSDP2 gathered; its gradient has the dtype of the weight.

    To operations that know nothing of codes it is the rounded weight.
    """

    def master(self) -> Tensor:
        """A tensor that nobody reads, of the shape and dtype of the weight and with its gradient.

        Operators take it together with the codes.
        """
        master: Tensor = _Master.apply(self)  # type: ignore[no-untyped-call]
        return master


class _Master(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: GatheredWeight) -> Tensor:
        return weight.scale.new_empty((), dtype=weight.dtype).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        return upstream[0]


class TrainedShard(Tensor):
    """Rows of a trained weight, in its dtype and storage, which are gathered in FP8.

    Operations see a plain tensor, and so does what saves it.

    Attributes:
        whole: Rows of the weight that these are rows of.
    """

    whole: int

    @staticmethod
    def __new__(cls: type[TrainedShard], rows: Tensor, whole: int) -> TrainedShard:
        """The rows, under a class of which FSDP2 asks for codes."""
        shard: TrainedShard = make_subclass(cls, rows)
        shard.whole = whole
        return shard

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Operations of plain tensors; what FSDP2 makes another shard of stays one."""
        with DisableTorchDispatch():
            output = func(*args, **(kwargs or {}))
        if func not in _KEPT or not isinstance(args[0], TrainedShard):
            return output
        return cls(output, args[0].whole)

    def plain(self) -> Tensor:
        """The same numbers in the same place, as a plain tensor."""
        with DisableTorchDispatch():
            return self.detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files hold plain tensors."""
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainedShard:
        """Another shard."""
        copied = memo[id(self)] = TrainedShard(self.plain().clone(), self.whole)
        return copied

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[Outputs, torch.dtype]:
        """What every rank gives: codes of its rows, made now."""
        from liger_multi.ops.linear_float8 import rounded_rows

        rows = rounded_rows(self.plain())
        return to_gather(rows.codes, rows.scale, self.whole, mesh)

    def fsdp_post_all_gather(
        self, gathered: Outputs, format: torch.dtype, dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Float8Weight, list[Tensor]] | None:
        """The weight of a layer, of what all ranks gave; once, for FSDP2 refills it in place."""
        if out is not None:
            return None
        return gathered_weight(GatheredWeight, gathered, self.whole, format, dtype)


_KEPT = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    to_copy,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.empty_like.default,
    pin_memory,
}
"""Operations whose result takes the place of a shard."""

# --- sharded parameters ---


def is_sharded(weight: Any) -> bool:
    """Whether a parameter is one that FSDP2 may have sharded: its rows, over one axis of ranks."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(weight, module.DTensor):
        return False
    shard, replicate = module.Shard(0), module.Replicate()
    return tuple(weight.placements) in ((shard,), (replicate, shard))


def local(weight: Any) -> Any:
    """The part of a sharded parameter that this rank has."""
    return weight._local_tensor


def with_local(weight: Any, part: Tensor) -> Tensor:
    """The same sharded tensor of another local part."""
    module: Any = sys.modules["torch.distributed.tensor"]
    tensor: Tensor = module.DTensor.from_local(
        part,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
    return tensor


def gather_codes(weight: Any) -> None:
    """Have FSDP2 gather a sharded parameter in FP8."""
    part = local(weight)
    if make_subclass is None or DisableTorchDispatch is None:
        say("make_subclass", "DisableTorchDispatch")
    elif type(part) is Tensor:
        weight._local_tensor = TrainedShard(part, weight.shape[0])


def saved(weight: Any) -> Any:
    """A sharded parameter as checkpoints hold it: numbers in its dtype, of a plain class."""
    part = local(weight)
    if isinstance(part, TrainedShard):
        return with_local(weight.detach(), part.plain())
    return (
        with_local(weight.detach(), part.restored()) if isinstance(part, Float8Weight) else weight
    )


def units(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that FSDP2 shards as one, by path; what belongs to several is of the last."""
    return {path: m for path, m in model.named_modules() if hasattr(m, "_get_fsdp_state")}


def unit_of(path: str, units: Mapping[str, nn.Module]) -> nn.Module | None:
    """The innermost unit that a module is part of."""
    around = [unit for unit in units if not unit or f"{path}.".startswith(f"{unit}.")]
    return units[max(around, key=len)] if around else None


def has_run(unit: Any) -> bool:
    """Whether FSDP2 has gathered the parameters of a unit; how it does is fixed from then on."""
    return getattr(unit._get_fsdp_state(), "_is_root", None) is not None
