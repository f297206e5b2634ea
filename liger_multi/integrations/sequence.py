"""Rows over ranks in accelerate, the ``Trainer`` and TRL: a configuration of parallelism."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from liger_multi.distributed import shard_sequence, unshard_sequence
from liger_multi.errors import PatchError
from liger_multi.patching import register_attention, shards
from liger_multi.patching.attention.interface import NAME

MESH = "tp"
"""The name of ranks with the same rows in accelerate's device mesh, with DeepSpeed too."""


class SequenceParallel(ParallelismConfig):
    """Ranks that share rows, for :func:`liger_multi.distributed.shard_sequence`.

    accelerate then brings the same rows to all ranks of a group, and FSDP2 shards states over them.
    To accelerate, the Trainer and TRL these are ranks that compute the same loss of the same batch
    (``tp_size``), as they do: nobody else cuts rows or asks for other attention, and
    ``num_items_in_batch`` and counts of tokens are of whole rows.

    Pass it as ``parallelism_config`` of ``TrainingArguments`` or ``Accelerator``. With
    :class:`liger_multi.integrations.TrainerCallback`, the model is sharded when training begins;
    elsewhere call ``shard_sequence(model, accelerator.torch_device_mesh["tp"])``.

    Args:
        sp_size: How many ranks share rows; or ``cp_size``, which is the same here. Without both,
            those of ``accelerate launch``.
        dp_replicate_size, dp_shard_size: As for ``ParallelismConfig``.

    Raises:
        ValueError: Tensor parallel ranks beside them, or sizes whose product is not the number of
            processes.
    """

    tp_size: int
    cp_size: int
    sp_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tp_size != 1:
            raise ValueError(f"SequenceParallel has no tensor parallel ranks, got {self.tp_size}")
        size = self.cp_size * self.sp_size
        self._sizes |= {"tp": size, "cp": 1, "sp": 1}
        self.tp_size, self.cp_size, self.sp_size = size, 1, 1
        self.cp_handler = self.sp_handler = None

    tp_enabled = property(lambda self: False)
    non_dp_dim_names = property(lambda self: [MESH])
    dp_shard_cp_dim_names = property(
        lambda self: [*(["dp_shard"] if self.dp_shard_enabled else []), MESH]
    )
    dp_cp_dim_names = property(lambda self: [*self.dp_dim_names, MESH])

    def _validate_accelerator(self, accelerator: Any) -> None:
        if self.total_size != accelerator.num_processes:
            raise ValueError(
                f"SequenceParallel: dp_replicate_size {self.dp_replicate_size} x dp_shard_size "
                f"{self.dp_shard_size} x {self.tp_size} ranks with the same rows must be the "
                f"number of processes, {accelerator.num_processes}"
            )


def spread(model: Any, args: Any, shared_prefixes: bool) -> None:
    """Shard the model of a trainer, where its parallelism is ours."""
    state = AcceleratorState._shared_state
    config = state.get("parallelism_config")
    if not isinstance(config, SequenceParallel):
        if config is not None and (config.cp_enabled or config.sp_enabled):
            raise PatchError(
                "ranks of accelerate's ParallelismConfig cut rows before a patched model has them: "
                "pass parallelism_config=liger_multi.integrations.SequenceParallel(sp_size="
                f"{config.cp_size * config.sp_size})"
            )
        return
    for reason in _unserved(args, shared_prefixes):
        raise PatchError(f"SequenceParallel does not serve {reason}")
    register_attention()
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)
    mesh = state["device_mesh"][MESH]
    unspread(model)
    shard_sequence(model, mesh)
    if hasattr(model, "generate"):
        vars(model)["generate"] = _Whole(model.generate, mesh.get_group())


def _unserved(args: Any, shared_prefixes: bool) -> Iterator[str]:
    """What in a trainer's arguments does not work on ranks that share rows."""
    if shared_prefixes:
        yield "shared_prefixes=True: trees are not spread over ranks"
    if getattr(args, "use_vllm", False):
        yield "use_vllm=True: ranks would get answers of their own"
    generations = getattr(args, "num_generations", None) or 1
    if generations == 1:
        return
    uses = (args.steps_per_generation or 1) * args.num_iterations
    if uses > 1:
        yield (
            "steps_per_generation (by default gradient_accumulation_steps) times num_iterations "
            f"above 1, got {uses}: TRL's sampler would draw some prompts again and others never"
        )
    rows = args.per_device_train_batch_size
    if rows % generations:
        yield f"{rows} answers a rank, of {generations} to a prompt: ranks have whole groups"


def unspread(model: nn.Module) -> None:
    """Take back what :func:`spread` did, but for the attention."""
    unshard_sequence(model)
    generate = vars(model).get("generate")
    if isinstance(generate, _Whole):
        model.generate = generate.generate


class _Whole:
    """``generate`` on whole rows, in every rank; all have the answers of the first one.

    Ranks draw with seeds of their own, and are to train on the same answers.
    """

    def __init__(self, generate: Any, group: Any) -> None:
        functools.update_wrapper(self, generate)
        self.generate, self.group = generate, group

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        with shards.suspended():
            tokens = self.generate(*args, **kwargs)
        if not isinstance(tokens, Tensor):
            raise TypeError(f"generate over ranks returns tokens, got {type(tokens).__name__}")
        shape = torch.tensor(tokens.shape, device=tokens.device)
        dist.broadcast(shape, group=self.group, group_src=0)
        result = tokens.resize_(*shape.tolist()) if tokens.shape != tuple(shape) else tokens
        dist.broadcast(result, group=self.group, group_src=0)
        return result
