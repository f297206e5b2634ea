"""Operators that also hand out the rows of their result in FP8, made of those that do not."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_multi.reference.float8.rows import PLAIN, Quantizer, rows_of


def coded(y: Tensor, writes_y: bool, quantizer: Quantizer = PLAIN) -> tuple[Tensor, Tensor, Tensor]:
    """A result, empty where it is not needed, its codes as bytes, and their scales."""
    rows = rows_of(y, None, quantizer)
    codes = rows.codes.view(torch.uint8).view(y.shape)
    return y if writes_y else y.new_empty(0), codes, rows.scale.view(y.shape[:-1])


def with_codes(plain: Any, visible: int = 1) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward that rounds the first output of ``plain`` too, and the backward of ``plain``.

    Args:
        plain: The operator's module, or another object with its forward and backward.
        visible: The number of visible outputs of ``plain``, which codes and scales follow.
    """
    signature = inspect.signature(plain.forward, eval_str=True)
    results = signature.return_annotation
    count = 1 if results is Tensor else len(results.__args__)

    def forward(*args: Any) -> tuple[Tensor, ...]:
        *inputs, writes_y = args
        outs = plain.forward(*inputs)
        y, *other_outputs = (outs,) if isinstance(outs, Tensor) else outs
        first, codes, scale = coded(y, writes_y)
        return first, *other_outputs[: visible - 1], codes, scale, *other_outputs[visible - 1 :]

    last = inspect.Parameter("writes_y", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=bool)
    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*signature.parameters.values(), last],
        return_annotation=tuple[tuple(Tensor for _ in range(count + 2))],  # type: ignore[misc]
    )
    return forward, plain.backward
