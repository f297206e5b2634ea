"""The row kernels of the backend that serves a loss, and the device that they run on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_multi.dispatch.resolution import resolve
from liger_multi.ops.fused_linear_log_prob import op


def row_kernels(tensors: tuple[Tensor | None, ...], args: tuple[Any, ...]) -> Any:
    """The row kernels of the backend that serves these tensors; None where operators must."""
    if torch.compiler.is_compiling() or any(
        x is not None and (type(x) not in (Tensor, torch.nn.Parameter) or x.is_meta)
        for x in tensors
    ):
        return None
    return getattr(resolve(op.fwd, args), "kernels", None)


def on_device(x: Tensor) -> Any:
    """The device of ``x`` as the current one, where its kind has several."""
    import contextlib

    if x.device.type in ("cpu", "meta"):
        return contextlib.nullcontext()
    return torch.get_device_module(x.device.type).device(x.device.index)
