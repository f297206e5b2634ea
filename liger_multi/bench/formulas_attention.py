"""Attention by plain formulas, by each fused kernel of PyTorch alone, and by FlexAttention."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Formula = Callable[..., Any]
Window = int | tuple[int, int] | None


def _sides(window: Window, causal: bool) -> tuple[int, int]:
    left, right = (window - 1, window - 1) if isinstance(window, int) else window or (-1, -1)
    return left, 0 if causal else right


def _seen(q: Tensor, k: Tensor, causal: bool, window: Window, global_tokens: int) -> Tensor:
    i = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)[:, None]
    j = torch.arange(k.shape[2], device=q.device)
    left, right = _sides(window, causal)
    seen = ((j >= i - left) | (left < 0)) & ((j <= i + right) | (right < 0))
    if window is not None:
        seen = seen | (j < global_tokens) | (i < global_tokens)
    return seen & (j <= i) if causal else seen


def _attention(
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
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if softcap is None else torch.tanh(s / softcap) * softcap
    s = s.masked_fill(~_seen(q, k, causal, window, global_tokens), torch.finfo(s.dtype).min)
    if sinks is not None:
        s = torch.cat([s, sinks[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    return torch.softmax(s, -1, dtype=torch.float32)[..., : k.shape[2]].to(v.dtype) @ v


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


def _neighbors(q: Tensor, k: Tensor, v: Tensor, kernel_size: int = 7, dilation: int = 1) -> Tensor:
    """Masked scores of L x L."""
    place = torch.arange(q.shape[2], device=q.device)
    apart = place[:, None] - place
    seen = (apart.abs() <= kernel_size // 2 * dilation) & (apart % dilation == 0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def _neighbors_flex(
    q: Tensor, k: Tensor, v: Tensor, kernel_size: int = 7, dilation: int = 1
) -> Tensor:
    if dilation != 1:
        raise NotImplementedError("without dilation")
    return _flex(q, k, v, window=(kernel_size // 2, kernel_size // 2))


def _residuals(blocks: Tensor, query: Tensor, weight: Tensor) -> Tensor:
    normed = F.rms_norm(blocks, blocks.shape[-1:], weight, 1e-6)
    p = torch.softmax((normed * query).sum(-1, dtype=torch.float32), 0)
    return torch.einsum("nbt,nbtd->btd", p.to(blocks.dtype), blocks)


def _multi_token(scores: Tensor, weight: Tensor, padding: int = 0) -> Tensor:
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    p = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
    return F.conv2d(p, weight, padding=padding).tril()


TABLE: dict[str, dict[str, Formula]] = {
    "attention": {
        "torch": _attention,
        "aten": _fused,
        "cudnn": _by("CUDNN_ATTENTION"),
        "flash": _by("FLASH_ATTENTION"),
        "efficient": _by("EFFICIENT_ATTENTION"),
        "flex": _flex,
    },
    "attention_residuals": {"torch": _residuals},
    "multi_token_attention": {"torch": _multi_token},
    "neighborhood_attention": {"torch": _neighbors, "flex": _neighbors_flex},
}
LIGER: dict[str, tuple[str, Callable[[Formula], Formula]]] = {
    "attention_residuals": (
        "liger_attn_res",
        lambda f: lambda blocks, query, weight, eps=1e-6: f(blocks, query, weight, eps),
    ),
}
