"""Start torchtitan on a CPU: ``python -m tests.trainers.runs.torchtitan_cpu`` and its arguments.

torchtitan asks PyTorch for its accelerator and takes CUDA where there is none. Here PyTorch names
the CPU, with what ``torch.cuda`` has and ``torch.cpu`` lacks, and gets two functions that
torchtitan 0.3 needs on it. :func:`attention` is an override of torchtitan: FlexAttention has no
backward on a CPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch._utils
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import create_mask

from tests.trainers.runs.setting import ALONE, accelerator


def sum_only(unit: FSDPModule, factor: float) -> None:
    """``FSDPModule.set_gradient_divide_factor`` by sums, the only reduction that gloo has."""
    unit.set_force_sum_reduction_for_comms(True)
    _divide(unit, factor)


_divide = FSDPModule.set_gradient_divide_factor
_module = accelerator(current_device=lambda: 0)
for owner, name, value in (
    (torch._utils, "_get_available_device_type", lambda: "cpu"),
    (torch._utils, "_get_device_module", lambda _: _module),
    (torch.distributed, "set_timeout", lambda *_: None),  # newer than PyTorch 2.13
    (FSDPModule, "set_gradient_divide_factor", sum_only),
):
    setattr(owner, name, value)

from torchtitan.config import derive, override  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402


class MaskedAttention(FlexAttention):  # type: ignore[misc]
    """``FlexAttention`` of torchtitan, with a dense mask of the same elements."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):  # type: ignore[misc]
        """Its configuration."""

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_: Any,
    ) -> Tensor:
        """Attend within documents; the names of tensors are those of torchtitan's shardings."""
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        sizes = (q.shape[0], 1, q.shape[2], k.shape[2])
        out = torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=create_mask(attention_masks.mask_mod, *sizes, device="cpu"),
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return out.transpose(1, 2)


@override(  # type: ignore[untyped-decorator]
    target=FlexAttention.Config, exact=True, description="attention on a CPU"
)
def attention(cfg: Any) -> Any:
    """Attention with a backward on a CPU."""
    return derive(cfg, MaskedAttention.Config)


if __name__ == "__main__":
    for variable, alone in ALONE.items():
        os.environ.setdefault(variable, alone)
    from torchtitan.train import main

    main()
