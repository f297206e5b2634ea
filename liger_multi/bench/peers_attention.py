"""Attention by each fused kernel of PyTorch alone, and by FlexAttention."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi.testing.formulas import Formula
from liger_multi.testing.formulas.attention import Window


def _sides(window: Window, causal: bool) -> tuple[int, int]:
    left, right = (window - 1, window - 1) if isinstance(window, int) else window or (-1, -1)
    return left, 0 if causal else right


def _fused(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _by(kernel: str) -> Formula:
    """PyTorch's attention by one of its kernels, or an error."""

    def formula(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
    ) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if kernel == "EFFICIENT_ATTENTION":  # it has no groups of heads
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        with sdpa_kernel(getattr(SDPBackend, kernel)):
            return _fused(q, k, v, causal=causal, scale=scale)

    return formula


@functools.cache
def _flex_attention() -> Any:
    module = importlib.import_module("torch.nn.attention.flex_attention")
    return torch.compile(module.flex_attention, dynamic=False)


@functools.cache
def _block_mask(
    queries: int, keys: int, device: torch.device, causal: bool, window: Window, global_tokens: int
) -> Any:
    left, right = _sides(window, causal)

    def seen(b: Any, h: Any, i: Tensor, j: Tensor) -> Tensor:
        inside = (j >= i - left if left >= 0 else j >= 0) & (
            j <= i + right if right >= 0 else j >= 0
        )
        if window is not None and global_tokens:
            inside = inside | (j < global_tokens) | (i < global_tokens)
        return inside & (j <= i) if causal else inside

    module = importlib.import_module("torch.nn.attention.flex_attention")
    return module.create_block_mask(seen, None, None, queries, keys, device=device)


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    global_tokens: int = 0,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compiled, because uncompiled it makes scores of L x S; sinks through the normalizer."""
    if q.device.type == "cpu":
        raise NotImplementedError("FlexAttention has no backward on a CPU")
    if q.shape[2] != k.shape[2]:
        raise NotImplementedError("for as many queries as keys")

    def capped(score: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    masked = causal or window is not None
    mask = _block_mask(q.shape[2], k.shape[2], q.device, causal, window, global_tokens)
    y, lse = _flex_attention()(
        q, k, v, score_mod=None if softcap is None else capped,
        block_mask=mask if masked else None, scale=scale, enable_gqa=q.shape[1] != k.shape[1],
        return_lse=True,
    )  # fmt: skip
    if sinks is None:
        return y  # type: ignore[no-any-return]
    share = torch.sigmoid(lse - sinks.float()[None, :, None])
    return y * share.unsqueeze(-1).to(y.dtype)  # type: ignore[no-any-return]


def _neighborhood_flex(
    q: Tensor, k: Tensor, v: Tensor, kernel_size: int = 7, dilation: int = 1
) -> Tensor:
    if dilation != 1:
        raise NotImplementedError("without dilation")
    return _flex(q, k, v, window=(kernel_size // 2, kernel_size // 2))


PEERS: dict[str, dict[str, Formula]] = {
    "attention": {
        "aten": _fused,
        "cudnn": _by("CUDNN_ATTENTION"),
        "flash": _by("FLASH_ATTENTION"),
        "efficient": _by("EFFICIENT_ATTENTION"),
        "flex": _flex,
    },
    "neighborhood_attention": {"flex": _neighborhood_flex},
}
