"""Serve the import names of Liger-Kernel in verl: ``VERL_USE_EXTERNAL_MODULES=...`` of this module.

verl imports the module in each of its processes; ``model.external_lib`` does so too.
``model.use_liger`` then patches with these operators, and ``impl_backend: liger`` of fused kernels
calls them for log-probabilities and entropies.

With ``ulysses_sequence_parallel_size`` above 1, verl pads rows and cuts them, and its engines tell
the group of ranks by ``verl.utils.ulysses``. A model with our attention asks there in every call.
"""

import sys
from typing import Any

from torch import nn

from liger_multi.compat import liger_kernel
from liger_multi.compat.liger_kernel import models
from liger_multi.distributed import shard_sequence
from liger_multi.patching import register_attention, shards
from liger_multi.patching.attention.interface import NAME


def ulysses_group() -> Any:
    """The ranks over which verl has cut the rows of this call; None for whole rows."""
    ulysses: Any = sys.modules.get("verl.utils.ulysses")
    if ulysses is None or ulysses.get_ulysses_sequence_parallel_world_size() == 1:
        return None
    return ulysses.get_ulysses_sequence_parallel_group()


def _cut_by_verl() -> str | None:
    if ulysses_group() is None:
        return None
    return (
        "verl's ulysses_sequence_parallel_size cuts rows over ranks: set model.use_liger=true, "
        "which shards models that have our attention"
    )


def _follow(model: nn.Module) -> None:
    """Let a patched model with our attention take shares of rows where verl cuts them."""
    if getattr(getattr(model, "config", None), "_attn_implementation", None) == NAME:
        shard_sequence(model, ulysses_group, shares=True)


register_attention()
liger_kernel.install(force=True)
shards.cutters.append(_cut_by_verl)
models.after_patch = _follow
