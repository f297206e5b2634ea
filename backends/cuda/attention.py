"""Attention on NVIDIA: PyTorch's fused kernels for plain and causal masks, Triton for all others.

cuDNN's and Flash's kernels take and keep the contract's own residual, the logarithm of the sums:
with a sink in it their backward is exact, because the gradient of a score is ``p (dp - sum(dy y))``
whatever else adds to the sum. The tables :data:`ROUTES` and :data:`ORDERED` choose between them, by
measurements.
"""

from typing import Any

import torch
from torch import Tensor

from liger_multi._torch_private import (
    HAS_ATTENTION,
    cudnn_attention,
    cudnn_attention_backward,
    flash_attention,
    flash_attention_backward,
)
from liger_multi.backends.triton.attention import attention as kernels, blocks
from liger_multi.dispatch.bitwise import bitwise, promise
from liger_multi.reference.attention.attention import blocks_of, unless_causal
from liger_multi.reference.common.strict import ordered_attention, strict

__all__ = ["BITWISE", "ORDERED", "ROUTES", "backward", "forward", "route", "supports"]

_CUDNN = "cuDNN does not promise that its backward adds in one order"
_ORDERS = "PyTorch's fused kernels split the work by sizes and the card"
BITWISE = bitwise(
    promise("repeat recompute", because={"rows": _ORDERS, "cards": _ORDERS}),
    "q k v ranges y lse",
    backward=promise(
        "recompute",
        deterministic="repeat",
        because={"repeat": _CUDNN, "rows": _ORDERS, "cards": _ORDERS},
    ),
)

# (major compute capability, widest head): kernels in order; the first that takes the call is used
ROUTES: dict[tuple[int, int], tuple[str, ...]] = {
    (8, 128): ("flash",),
    (8, 256): ("flash",),
    (9, 128): ("cudnn", "flash"),
    (9, 256): ("flash",),
    (10, 128): ("cudnn", "flash"),
    (10, 256): ("flash",),
}
# the same for a backward that has to repeat: cuDNN's does not, and on Hopper Flash's takes longer
# than Triton's when it adds in one order
ORDERED: dict[tuple[int, int], tuple[str, ...]] = {
    key: () if key == (9, 128) else tuple(name for name in names if name != "cudnn")
    for key, names in ROUTES.items()
}
_forced: list[str] = []  # set by benchmarks that compare the routes


def route(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor | None,
    causal: bool,
    softcap: float,
    backward: bool = False,
) -> str:
    """Which implementation runs a call: cudnn, flash or triton."""
    if _forced:
        return _forced[-1]
    ranges, causal = unless_causal(ranges, causal)
    square = q.shape[2] == k.shape[2] or not causal
    plain = ranges is None and softcap == 0.0 and square and q.shape[3] == v.shape[3]
    if not plain or q.shape[3] % 8 or q.dtype not in (torch.bfloat16, torch.float16):
        return "triton"
    if not (q.numel() and k.numel()) or q.shape[2] == k.shape[2] == 1:  # cuDNN refuses one token
        return "triton"
    major = torch.cuda.get_device_capability(q.device)[0]
    routes = ORDERED if backward and strict() else ROUTES
    for name in routes.get((major, 128 if q.shape[3] <= 128 else 256), ()):
        if HAS_ATTENTION[name] and (name != "cudnn" or torch.backends.cuda.cudnn_sdp_enabled()):
            return name
    return "triton"


def supports(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor | None, causal: bool, softcap: float
) -> str | None:
    """Why a call is refused, or None: PyTorch's kernels take wider heads than Triton's."""
    if max(q.shape[3], v.shape[3]) <= 256 and route(q, k, v, ranges, causal, softcap) != "triton":
        return None
    return kernels.supports(q, v)


RECURRING = 64
"""Multiples of so many tokens: sizes that recur. cuDNN makes a plan for every other size."""


def _recurs(q: Tensor, k: Tensor) -> bool:
    return q.shape[2] % RECURRING == 0 and k.shape[2] % RECURRING == 0


def _forward_block(q: Tensor, k: Tensor, *operands: Any) -> tuple[Tensor, Tensor]:
    """Forward of one block of a tree; Triton's kernels for sizes that may not recur."""
    return (forward if _recurs(q, k) else kernels.forward)(q, k, *operands)


def _backward_block(dy: Tensor, q: Tensor, k: Tensor, *operands: Any) -> Any:
    return (backward if _recurs(q, k) else kernels.backward)(dy, q, k, *operands)


def _with_sinks(y: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rescale y and lse for the sinks, each of which takes ``sigmoid(sink - lse)`` of its row."""
    if sinks is None:
        return y, lse
    sink = sinks.float()[None, :, None]
    y.mul_(torch.sigmoid(lse - sink).unsqueeze(-1))
    return y, torch.logaddexp(lse, sink)


def _ordered(x: Tensor) -> Tensor:
    """A copy whose memory has the contract's order, (B, L, H, D)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _dense(x: Tensor) -> Tensor:
    """``x`` with adjacent channels and rows that do not overlap; copied only where needed."""
    return x if x.stride(3) == 1 and 0 not in x.stride()[:3] else x.contiguous()


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    ranges: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Output and lse of FlashAttention or cuDNN, corrected for sinks; or those of Triton."""
    parts = None if len(q) != 1 else blocks_of(ranges)
    if parts is not None:
        return blocks.forward(_forward_block, q, k, v, sinks, parts, scale, softcap)
    library = route(q, k, v, ranges, causal, softcap)
    ranges, causal = unless_causal(ranges, causal)
    if library == "triton":
        return kernels.forward(q, k, v, sinks, ranges, causal, scale, softcap)
    q, k, v = _dense(q), _dense(k), _dense(v)
    if library == "cudnn":
        outputs: Any = cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    else:
        outputs = flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    y, lse = _with_sinks(outputs[0], outputs[1].reshape(q.shape[:3]), sinks)
    return _ordered(y), lse.contiguous()


def backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    ranges: Tensor | None,
    y: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    softcap: float,
    needs_q: bool,
    needs_k: bool,
    needs_v: bool,
    needs_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Backward of FlashAttention or cuDNN, from the lse that includes the sinks; or Triton's."""
    parts = None if len(q) != 1 else blocks_of(ranges)
    if parts is not None:
        return blocks.backward(
            _backward_block,
            dy,
            q,
            k,
            v,
            sinks,
            blocks=parts,
            y=y,
            lse=lse,
            options=(scale, softcap),
            needs=(needs_q, needs_k, needs_v, needs_sinks),
        )
    library = route(q, k, v, ranges, causal, softcap, backward=True)
    ranges, causal = unless_causal(ranges, causal)
    if library == "triton":
        return kernels.backward(
            dy,
            q,
            k,
            v,
            sinks,
            ranges,
            y,
            lse,
            causal=causal,
            scale=scale,
            softcap=softcap,
            needs_q=needs_q,
            needs_k=needs_k,
            needs_v=needs_v,
            needs_sinks=needs_sinks,
        )
    dense = (_dense(dy), _dense(q), _dense(k), _dense(v), _dense(y), lse.contiguous())
    gradients = (
        _cudnn(*dense, causal, scale) if library == "cudnn" else _flash(*dense, causal, scale)
    )
    grads = [
        _ordered(x) if is_needed else q.new_empty(0)
        for x, is_needed in zip(gradients, (needs_q, needs_k, needs_v), strict=True)
    ]
    dsinks = q.new_empty(0)
    if sinks is not None and needs_sinks:
        inner = torch.einsum("bhld,bhld->bhl", dy.float(), y.float())
        share = torch.exp(sinks.float()[None, :, None] - lse)
        dsinks = -(share * inner).sum((0, 2)).to(sinks.dtype)
    return grads[0], grads[1], grads[2], dsinks


def _cudnn(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool, scale: float
) -> Any:
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # unread: there is no dropout
    none: Any = None
    return cudnn_attention_backward(
        dy,
        q,
        k,
        v,
        y,
        lse.unsqueeze(-1),
        seed,
        seed,
        none,
        none,
        none,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        scale=scale,
    )


def _flash(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool, scale: float
) -> Any:
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    none: Any = None
    with ordered_attention():
        return flash_attention_backward(
            dy,
            q,
            k,
            v,
            y,
            lse,
            none,
            none,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            state,
            state[:0],
            scale=scale,
        )
