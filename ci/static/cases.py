"""The calls whose launches :mod:`ci.static` compiles: each way through each launcher, real sizes.

Tensors are on the meta device, so sizes cost nothing. A meta-test demands that every kernel of
``backends/triton`` is launched by at least one of these.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_multi.backends.triton.activations import (
    gated,
    gated_rows,
    geglu,
    geglu_packed,
    relu_squared,
    swiglu,
    swiglu_clamped,
    swiglu_clamped_packed,
    swiglu_packed,
)
from liger_multi.backends.triton.activations.gated_mlp import TritonActivation
from liger_multi.backends.triton.adapters.low_rank import split
from liger_multi.backends.triton.attention import (
    attention,
    indexer_scores,
    indexer_topk,
    multi_token_attention,
    sparse_attention,
)
from liger_multi.backends.triton.common.float8 import FORMATS
from liger_multi.backends.triton.common.gemm import gemm_by_rows
from liger_multi.backends.triton.cross_entropy import (
    cross_entropy,
    cross_entropy_inplace,
    float8,
    selective_log_softmax,
    softmax,
    sparsemax,
)
from liger_multi.backends.triton.cross_entropy.rows import TritonLogProbRows, scale
from liger_multi.backends.triton.divergences.pairs import KINDS, TritonPairs
from liger_multi.backends.triton.embedding import embedding
from liger_multi.backends.triton.experts import fused_moe, grouped, lora_moe
from liger_multi.backends.triton.float8.rows import CodeRoom, TritonQuantizer
from liger_multi.backends.triton.linear_attention import (
    causal_conv1d,
    gated_delta_rule,
    gated_short_conv,
    kimi_delta_attention,
    selective_scan,
    ssd_scan,
)
from liger_multi.backends.triton.norms import (
    dyt,
    fused_add_rms_norm,
    fused_scaled_add_rms_norm,
    gated_rms_norm,
    group_norm,
    layer_norm,
    modulated_rms_norm,
    poly_norm,
    rms_norm,
)
from liger_multi.backends.triton.residuals import (
    attention_residuals,
    hyper_connections,
    hyper_connections_post,
    hyper_connections_pre,
)
from liger_multi.backends.triton.rope import (
    rms_norm_rope,
    rope,
    rope_complex,
    rope_multimodal,
    rope_positions,
    rope_sorted,
)
from liger_multi.reference.cross_entropy.rows import LogSumExp, Objective, RowStats, Upstream
from liger_multi.reference.divergences.divergence import DivergenceSpec

BF16, FP32 = torch.bfloat16, torch.float32
OUTPUTS = "z_loss,token_accuracy,predicted_tokens,log_prob,entropy,lse"


def _meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rms_norm(rows: int, cols: int, dtype: torch.dtype = BF16, casting: str = "llama") -> None:
    x, weight = _meta(rows, cols, dtype=dtype), _meta(cols, dtype=dtype)
    offset = float(casting == "gemma")
    y, rstd = rms_norm.forward(x, weight, 1e-6, offset, casting)
    rms_norm.backward(y, x, weight, rstd, offset, casting, True, True)


def _attention(
    heads: int, groups: int, size: int, ranges: int = 0, softcap: float = 0.0, sinks: bool = False
) -> None:
    q = _meta(2, 8192, heads, size).transpose(1, 2)
    k = _meta(2, 8192, groups, size).transpose(1, 2)
    v = _meta(2, 8192, groups, size).transpose(1, 2)
    bounds = _meta(2, 8192, ranges, dtype=torch.int32) if ranges else None
    extra = (_meta(heads) if sinks else None, bounds)
    if attention.supports(q, v) is not None:
        return
    y, lse = attention.forward(q, k, v, *extra, not ranges, 0.125, softcap)
    needs = (True, True, True, sinks)
    attention.backward(y, q, k, v, *extra, y, lse, not ranges, 0.125, softcap, *needs)


def _sparse_attention(
    heads: int, groups: int, dim: int, value: int, dtype: torch.dtype = BF16, latent: bool = False
) -> None:
    """A chunk of queries; latents are keys whose leading channels are the value."""
    q = _meta(1, 128, heads, dim, dtype=dtype).transpose(1, 2)
    k = _meta(1, 8192, groups, dim, dtype=dtype).transpose(1, 2)
    v = None if latent else _meta(1, 8192, groups, value, dtype=dtype).transpose(1, 2)
    lists = _meta(1, 1, 128, 2048, dtype=torch.int32)
    if sparse_attention.supports(q, v, value) is not None:
        return
    y, _, lse = sparse_attention.forward(q, k, v, lists, value, 0.1, True)
    sparse_attention.backward(y, q, k, v, lists, y, lse, value, 0.1, True, True, not latent)


def _indexer(heads: int, dim: int, dtype: torch.dtype = BF16, ranges: bool = False) -> None:
    q, k = _meta(1, 128, heads, dim, dtype=dtype), _meta(1, 8192, dim, dtype=dtype)
    w, lists = _meta(1, 128, heads, dtype=FP32), _meta(1, 128, 2048, dtype=torch.int32)
    if indexer_topk.supports(q, k) is not None:
        return
    seen = _meta(1, 128, 2, dtype=torch.int32) if ranges else None
    indexer_topk.forward(q, k, w, seen, 2048, not ranges, 0.1)
    scores = indexer_scores.forward(q, k, w, lists, 0.1)
    indexer_scores.backward(scores, q, k, w, lists, 0.1, True, True, True)


def _attention_residuals(count: int, rows: int, cols: int, dtype: torch.dtype = BF16) -> None:
    blocks, weight = _meta(count, rows, cols, dtype=dtype), _meta(cols, dtype=dtype)
    y, p, rstd = attention_residuals.forward(blocks, weight, weight, 1e-6)
    attention_residuals.backward(y, blocks, weight, weight, p, rstd, True, True, True)


def _causal_conv1d(
    channels: int, width: int, dtype: torch.dtype = BF16, everything: bool = False
) -> None:
    x, weight, bias = (_meta(*s, dtype=dtype) for s in ((2, 8192, channels), (channels, width), ()))
    state = _meta(2, width - 1, channels, dtype=dtype) if everything else None
    ids = _meta(2, 8192, dtype=torch.int32) if everything else None
    given = (weight, bias.expand(channels) if everything else None, state, ids, "silu")
    causal_conv1d.backward(causal_conv1d.forward(x, *given), x, *given, True, True, True, True)


def _gated_short_conv(
    channels: int, width: int, dtype: torch.dtype = BF16, packed: bool = False
) -> None:
    x, weight = (_meta(*s, dtype=dtype) for s in ((2, 8192, 3 * channels), (channels, width)))
    given = (weight, None, _meta(2, 8192, dtype=torch.int32) if packed else None)
    gated_short_conv.backward(gated_short_conv.forward(x, *given), x, *given, True, True, True)


def _delta_rule(
    dim: int, value: int, dtype: torch.dtype = BF16, everything: bool = False, group: int = 2,
    rule: Any = gated_delta_rule,
) -> None:  # fmt: skip
    """Value heads of a group for a key head; with documents and states, and without norms."""
    q = _meta(2, 8192, 8 // group, dim, dtype=dtype)
    gates = () if rule is gated_delta_rule else (dim,)
    v, g = _meta(2, 8192, 8, value, dtype=dtype), _meta(2, 8192, 8, *gates, dtype=FP32)
    beta = _meta(2, 8192, 8, dtype=dtype)
    state = _meta(2, 8, dim, value, dtype=FP32) if everything else None
    first = _meta(2, 8192, dtype=torch.int32) if everything else None
    if rule.supports(q, v) is not None:
        return
    given = (q, q, v, g, beta, state, first, 0.1, not everything)
    y, final = rule.forward(*given, everything)
    last = final if everything else None
    rule.backward(y, last, *given, *[True] * 6)


def _ssd_scan(
    groups: int, value: int, states: int, dtype: torch.dtype = BF16, everything: bool = False
) -> None:
    """Sixteen heads; with documents, states, skip and gate, or without."""
    x, b = _meta(2, 8192, 16, value, dtype=dtype), _meta(2, 8192, groups, states, dtype=dtype)
    dt, a = _meta(2, 8192, 16, dtype=FP32), _meta(16, dtype=FP32)
    state = _meta(2, 16, value, states, dtype=FP32) if everything else None
    first = _meta(2, 8192, dtype=torch.int32) if everything else None
    if ssd_scan.supports(x, b, b) is not None:
        return
    skip, z, bias = (a, x, a) if everything else (a, None, a)
    given = (x, dt, a, b, b, skip, z, bias, state, first, True, 0.0, math.inf, 256)
    y, final = ssd_scan.forward(*given, everything)
    ssd_scan.backward(y, final if everything else None, *given, *[True] * 9)


def _selective_scan(
    channels: int, states: int, dtype: torch.dtype = BF16, gated: bool = True,
    everything: bool = False, frozen: bool = False,
) -> None:  # fmt: skip
    """With skip, bias and gate, or without; with documents and states, or without; A frozen."""
    u, b = _meta(2, 8192, channels, dtype=dtype), _meta(2, 8192, states, dtype=dtype)
    a, vector = _meta(channels, states, dtype=FP32), _meta(channels, dtype=FP32)
    state = _meta(2, channels, states, dtype=FP32) if everything else None
    first = _meta(2, 8192, dtype=torch.int32) if everything else None
    skip, z, bias = (vector, u, vector) if gated else (None, None, None)
    given = (u, u, a, b, b, skip, z, bias, state, first)
    y, final, kept = selective_scan.forward(*given, True, everything)
    needs = [True, True, not frozen, *[True] * 6]
    selective_scan.backward(y, final if everything else None, *given, kept, True, *needs)


def _selective_scan_teams(channels: int, states: int, gated: bool = True) -> None:
    """Forward by teams, which launch tables choose, on every target."""
    u, b = _meta(2, 8192, channels, dtype=BF16), _meta(2, 8192, states, dtype=BF16)
    a, vector = _meta(channels, states, dtype=FP32), _meta(channels, dtype=FP32)
    skip, z = (vector, u) if gated else (None, None)
    call = selective_scan._call(u, u, a, b, b, skip, z, skip, None, None, True)
    chosen = dataclasses.replace(call.config("team"), team=selective_scan.TEAM)
    selective_scan._by_teams(call, chosen, u, False)


def _fused_add(rows: int, cols: int, dtype: torch.dtype = BF16, casting: str = "llama") -> None:
    x, weight = _meta(rows, cols, dtype=dtype), _meta(cols, dtype=dtype)
    offset = float(casting == "gemma")
    y, s, rstd = fused_add_rms_norm.forward(x, x, weight, 1e-6, offset, casting)
    fused_add_rms_norm.backward(s, y, s, weight, rstd, offset, casting, True, True, True)


def _layer_norm(rows: int, cols: int, dtype: torch.dtype = BF16) -> None:
    x, weight = _meta(rows, cols, dtype=dtype), _meta(cols, dtype=dtype)
    y, mean, rstd = layer_norm.forward(x, weight, weight, 1e-5)
    layer_norm.backward(y, x, weight, mean, rstd, dtype, True, True, True)


def _dyt(rows: int, cols: int, dtype: torch.dtype = BF16) -> None:
    x, weight, alpha = (_meta(*s, dtype=dtype) for s in ((rows, cols), (cols,), (1,)))
    y = dyt.forward(x, alpha, weight, weight)
    dyt.backward(y, x, alpha, weight, dtype, True, True, True, True)


def _scaled_add(rows: int, cols: int, dtype: torch.dtype = BF16) -> None:
    x, weight = _meta(rows, cols, dtype=dtype), _meta(cols, dtype=dtype)
    how = (0.0, "llama", 0.22, 1.0)
    y, s, rstd = fused_scaled_add_rms_norm.forward(x, x, weight, 1e-6, *how)
    kinds: Any = (dtype, dtype, True, True, True)
    fused_scaled_add_rms_norm.backward(s, y, s, weight, rstd, *how, *kinds)


def _gated_norm(
    rows: int, cols: int, size: int, *, first: bool = False, dtype: torch.dtype = BF16,
    casting: str = "llama",
) -> None:  # fmt: skip
    x, weight = _meta(rows, cols, dtype=dtype), _meta(cols, dtype=dtype)
    how = (float(casting == "gemma"), casting, size, not first)
    y, rstd = gated_rms_norm.forward(x, x, weight, 1e-6, *how, "silu")
    gated_rms_norm.backward(y, x, x, weight, rstd, *how, "silu", True, True, True)


def _modulated_norm(shape: tuple[int, ...], by: tuple[int, ...], dtype: torch.dtype) -> None:
    x, scale, weight = (_meta(*s, dtype=dtype) for s in (shape, by, shape[-1:]))
    y, rstd = modulated_rms_norm.forward(x, scale, scale, weight, 1e-6, 0.0, "llama")
    rest = (rstd, 0.0, "llama", True, True, True, True)
    modulated_rms_norm.backward(y, x, scale, dtype, weight, *rest)


def _poly_norm(rows: int, cols: int, dtype: torch.dtype = BF16) -> None:
    x, weight, bias = (_meta(*s, dtype=dtype) for s in ((rows, cols), (3,), (1,)))
    y, rstd = poly_norm.forward(x, weight, bias, 1e-6)
    poly_norm.backward(y, x, weight, rstd, dtype, True, True, True)


def _group_norm(shape: tuple[int, ...], groups: int, dtype: torch.dtype = BF16) -> None:
    x, weight = _meta(*shape, dtype=dtype), _meta(shape[1], dtype=dtype)
    y, mean, rstd = group_norm.forward(x, groups, weight, weight, 1e-5)
    group_norm.backward(y, x, groups, weight, mean, rstd, dtype, True, True, True)


def _swiglu(dtype: torch.dtype) -> None:
    gate = _meta(8192, 14336, dtype=dtype)
    for by in ((1.0, 1.0), (0.5, 2.0)):
        swiglu.backward(swiglu.forward(gate, gate, *by), gate, gate, *by, True, True)


def _swiglu_packed() -> None:
    gate_up = _meta(8192, 2 * 11008)
    swiglu_packed.backward(swiglu_packed.forward(gate_up, 1.0, 1.0), gate_up, 1.0, 1.0)


def _clamped(dtype: torch.dtype) -> None:
    gate, by = _meta(32768, 2880, dtype=dtype), (7.0, 1.702, 1.0)
    y = swiglu_clamped.forward(gate, gate, *by)
    swiglu_clamped.backward(y, gate, gate, *by, True, True)


def _clamped_packed(interleaved: bool) -> None:
    gate_up, by = _meta(32768, 5760), (7.0, 1.702, 1.0)
    y = swiglu_clamped_packed.forward(gate_up, *by, interleaved)
    swiglu_clamped_packed.backward(y, gate_up, *by, interleaved)


def _relu_squared(dtype: torch.dtype) -> None:
    x = _meta(8192, 16384, dtype=dtype)
    relu_squared.backward(relu_squared.forward(x), x)


def _gated_mlp(activation: str, dtype: torch.dtype) -> None:
    gate = _meta(8192, 14336, dtype=dtype)
    TritonActivation.product(gate, gate, activation)
    TritonActivation.gradients(gate, gate, gate, activation)


def _gemm(
    rows: int, cols: int, inner: int, dtype: torch.dtype = BF16, *, bias: bool = False,
    gradient: bool = False,
) -> None:  # fmt: skip
    """A layer's forward, whose weight lies the other way round, or the gradient of its input."""
    a, out = _meta(rows, inner, dtype=dtype), _meta(rows, cols, dtype=dtype)
    b = _meta(inner, cols, dtype=dtype) if gradient else _meta(cols, inner, dtype=dtype).t()
    gemm_by_rows(a, b, _meta(cols, dtype=dtype) if bias else None, out)


def _fused_moe(
    tokens: int, top_k: int, experts: int, hidden: int, inner: int, dtype: torch.dtype = BF16, *,
    gpt_oss: bool = False, library: bool = False, gate: bool = True,
) -> None:  # fmt: skip
    x, index = _meta(tokens, hidden, dtype=dtype), _meta(tokens, top_k, dtype=torch.int64)
    routing = _meta(tokens, top_k, dtype=dtype)
    first, second = (experts, 2 * inner, hidden), (experts, hidden, inner)
    how: Any = ("silu", 7.0, 1.702, 1.0, False, False)
    biases: list[Any] = [None, None]
    if not gate:
        first, how = (experts, inner, hidden), ("relu_squared", *how[1:])
    if gpt_oss:
        first, second = (experts, hidden, 2 * inner), (experts, inner, hidden)
        how = ("swiglu_clamped", 7.0, 1.702, 1.0, True, True)
        biases = [_meta(experts, n, dtype=dtype) for n in (2 * inner, hidden)]
    up, down = _meta(*first, dtype=dtype), _meta(*second, dtype=dtype)
    needs: Any = (True,) * 6
    with grouped.products_by(library):
        rest: Any = (*biases, *how, dtype, *needs)
        y, *kept = fused_moe.forward(x, up, down, index, routing, *rest)
        rest = (*kept, *how, *needs)
        fused_moe.backward(y, x, up, down, index, routing, biases[1], *rest)


def _lora_moe(
    tokens: int, top_k: int, experts: int, hidden: int, inner: int, rank: int,
    thin: torch.dtype = BF16, dtype: torch.dtype = BF16,
) -> None:  # fmt: skip
    x, index = _meta(tokens, hidden, dtype=dtype), _meta(tokens, top_k, dtype=torch.int64)
    routing = _meta(tokens, top_k, dtype=dtype)
    first, second = (experts, 2 * inner, hidden), (experts, hidden, inner)
    factors = [
        _meta(*shape, dtype=thin)
        for out, into in (first[1:], second[1:])
        for shape in ((experts, rank, into), (experts, out, rank))
    ]
    up, down = _meta(*first, dtype=dtype), _meta(*second, dtype=dtype)
    how: Any = (2.0, 0.5, "silu", 7.0, 1.702, 1.0, False, False)
    needs: Any = (True,) * 6
    rest: Any = (*factors, None, None, *how, dtype, *needs)
    y, *kept = lora_moe.forward(x, up, down, index, routing, *rest)
    rest = (*factors, None, *kept, *how, *needs)
    lora_moe.backward(y, x, up, down, index, routing, *rest)


def _hyper(rows: int, streams: int, cols: int, dtype: torch.dtype = BF16) -> None:
    x, out = _meta(rows, streams, cols, dtype=dtype), _meta(rows, cols, dtype=dtype)
    pre, mix = _meta(rows, streams, dtype=FP32), _meta(rows, streams, streams, dtype=FP32)
    z = _meta(rows, streams * (streams + 2), dtype=FP32)
    parts, how = hyper_connections.TritonParts, (streams, 20, 1e-6, 2.0)
    bias, scale, rstd = z[0], _meta(3, dtype=FP32), _meta(rows, dtype=FP32)
    grads = parts.values(z, bias, scale, how)
    parts.gradient(z, bias, scale, rstd, cols, grads, how, (True, True))
    weight = _meta(streams * (streams + 2), streams * cols, dtype=FP32)
    rows_of = x.flatten(1)
    parts.mixes(rows_of, weight, 1e-6)
    parts.mixes_gradients(rows_of, weight, z, z[:, :1], True, True)
    hyper_connections_pre.forward(x, pre)
    hyper_connections_pre.backward(out, x, pre, True, True)
    y = hyper_connections_post.forward(x, out, pre, mix)
    hyper_connections_post.backward(y, x, out, pre, mix, True, True, True, True)


def _geglu(approximate: str, dtype: torch.dtype) -> None:
    gate = _meta(8192, 14336, dtype=dtype)
    y = geglu.forward(gate, gate, approximate)
    geglu.backward(y, gate, gate, approximate, True, True)


def _geglu_packed(approximate: str) -> None:
    gate_up = _meta(8192, 2 * 11008)
    geglu_packed.backward(geglu_packed.forward(gate_up, approximate), gate_up, approximate)


def _rope(
    heads: tuple[int, int],
    width: int,
    style: str,
    *,
    rotary: int = 0,
    angles: int = 0,
    dtype: torch.dtype = BF16,
    angle: torch.dtype = BF16,
) -> None:
    q, k = (_meta(4, 2048, h, width, dtype=dtype).transpose(1, 2) for h in heads)
    rotary = rotary or width
    cos = _meta(1, 2048, angles or rotary, dtype=angle)
    how = (style, 1, rotary, "cohere", "0213", "0213")
    dq, dk = rope.forward(q, k, cos, cos, *how)
    rope.backward(dq, dk, cos, cos, *how, dtype, dtype, True, True)


def _rms_norm_rope(
    heads: int, width: int, casting: str, whole: bool, *, dtype: torch.dtype = BF16
) -> None:
    x = _meta(4, 2048, heads, width, dtype=dtype).transpose(1, 2)
    weight = _meta(heads * width if whole else width, dtype=dtype)
    cos, offset = _meta(1, 2048, width, dtype=dtype), float(casting == "gemma")
    how = (offset, casting, "llama", 1, "0213")
    dy, rstd = rms_norm_rope.forward(x, weight, cos, cos, 1e-6, *how)
    rms_norm_rope.backward(dy, x, weight, cos, cos, rstd, *how, True, True)


def _rope_kinds(
    kind: str, heads: tuple[int, int], width: int, *, style: str = "half", chunked: bool = True,
    dtype: torch.dtype = BF16, angle: torch.dtype = BF16,
) -> None:  # fmt: skip
    q, k = (_meta(4, 2048, h, width, dtype=dtype).transpose(1, 2) for h in heads)
    orders, pairs = ("0213", "0213"), width // 2
    sections = f"{pairs - 2 * (3 * pairs // 8)},{3 * pairs // 8},{3 * pairs // 8}"
    grids, angles = _meta(3, 4, 2048, width, dtype=angle), _meta(4, 2048, pairs, dtype=angle)
    complexes = _meta(4, 2048, pairs, 2, dtype=FP32)
    ids, freqs = _meta(3, 4, 2048, dtype=torch.int64), _meta(pairs, dtype=FP32)
    # by kind: the operator, the tensors of its angles (backward has them in reverse), its options
    table: dict[str, tuple[Any, tuple[Tensor, ...], tuple[Any, ...]]] = {
        "multimodal": (
            rope_multimodal, (grids, grids),
            (sections, chunked, style, 1, width, "cohere"),
        ),
        "complex": (rope_complex, (complexes,), (1, width)),
        "sorted": (rope_sorted, (angles, angles), (1, width, "cohere")),
        "positions": (
            rope_positions, (ids, freqs), (1.0, sections, chunked, style, 1, "llama"),
        ),
    }  # fmt: skip
    operator, tensors, options = table[kind]
    made = operator.forward(q, k, *tensors, *options, *orders)
    operator.backward(*made, *reversed(tensors), *options, *orders, dtype, dtype, True, True)


def _rope_calls() -> dict[str, Callable[[], None]]:
    part = functools.partial
    found: dict[str, Callable[[], None]] = {}
    for kind in ("multimodal", "complex", "sorted", "positions"):
        for heads, width in (((32, 8), 128), ((28, 4), 128), ((128, 1), 64)):
            label = f"rope_{kind} {heads[0]}/{heads[1]}x{width}"
            found[label] = part(_rope_kinds, kind, heads, width)
        found[f"rope_{kind} 28/4x128 fp32"] = part(
            _rope_kinds, kind, (28, 4), 128, dtype=FP32, angle=FP32
        )
    for kind in ("multimodal", "positions"):
        for style in ("half", "interleaved"):
            found[f"rope_{kind} {style} mixed sections"] = part(
                _rope_kinds, kind, (32, 8), 128, style=style, chunked=False
            )
    return found


def _cross_entropy(
    cols: int, dtype: torch.dtype, *, full: bool = False, softcap: float | None = None
) -> None:
    logits, target = _meta(4096, cols, dtype=dtype), _meta(4096, dtype=torch.int64)
    weight = _meta(cols, dtype=FP32) if full else None
    extras: tuple[float, float, Any] = (0.1, 1e-4, 30.0) if full else (0.0, 0.0, softcap)
    outs = cross_entropy.forward(
        logits, target, weight, -100, *extras, "mean", False, OUTPUTS if full else ""
    )
    cross_entropy.backward(outs[0], logits, target, weight, *outs[6:], -100, *extras, "mean")


def _loss_and_gradient(cols: int, *, full: bool = False) -> None:
    logits, target = _meta(2048, cols), _meta(2048, dtype=torch.int64)
    options = Objective(-100, *((0.1, 1e-4, 30.0, 0.5) if full else (0.0, 0.0, None)))
    weight = _meta(cols) if full else None
    rows = RowStats.empty(2048, options, OUTPUTS if full else "", logits)
    cross_entropy.loss_and_gradient_(logits, target, weight, options, rows, _meta(2, dtype=FP32))


def _scale(dtype: torch.dtype) -> None:
    scale(_meta(128256, 4096, dtype=dtype), _meta(dtype=FP32), BF16)


def _inplace(cols: int) -> None:
    cross_entropy_inplace.backward(_meta(dtype=FP32), _meta(4096, cols))


def _log_prob(cols: int, dtype: torch.dtype, *, full: bool = False) -> None:
    raw, target = _meta(2048, cols, dtype=dtype), _meta(2048, dtype=torch.int64)
    row = _meta(2048, dtype=FP32)
    spec = Objective(-100, 0.0, 0.0, 30.0 if full else None, 0.7 if full else 1.0)
    rows_of = TritonLogProbRows
    rows_of.statistics(raw, target, None, spec, "log_prob,entropy,lse,argmax" if full else "")
    upstream = Upstream(row, row, row if full else None)
    rows_of.log_prob_gradient_(raw, target, LogSumExp(row, row), spec, upstream)


def _softmax(rows: int, cols: int, dtype: torch.dtype = BF16) -> None:
    x = _meta(rows, cols, dtype=dtype)
    softmax.backward(softmax.forward(x), x)
    if cols < 512:  # one row a program is too narrow for 64 lanes of 16 bytes
        return
    sparsemax.backward(sparsemax.forward(x), x)


def _multi_token(heads: int, size: int, dtype: torch.dtype = BF16, sparse: bool = False) -> None:
    scores, weight = (
        _meta(1, heads, size, size, dtype=dtype),
        _meta(heads, heads, 3, 3, dtype=dtype),
    )
    shape = (1, 1, 1, 1, sparse)  # stride, padding, dilation, groups
    y, p = multi_token_attention.forward(scores, weight, None, *shape)
    multi_token_attention.backward(y, weight, None, p, *shape, True, True, False)
    if heads % 8 == 0 and dtype.itemsize == 2:  # where a launch table may say so
        k = multi_token_attention.TransposeConfig(4096 // heads, 4)
        for to_last in (True, False):
            multi_token_attention._transpose(p, k, to_last)


def _float8(rows: int, cols: int, dtype: torch.dtype) -> None:
    kinds = float8.TritonRounding()
    kinds.rounded(_meta(rows, cols), dtype)
    kinds.both_ways(_meta(cols, rows), dtype)


def _float8_rows(rows: int, cols: int, format: torch.dtype, dtype: torch.dtype = BF16) -> None:
    kinds, columns = TritonQuantizer(), _meta(cols, dtype=FP32)
    x = _meta(rows, cols, dtype=dtype)
    made = kinds.rows(x, None, format)
    kinds.rows(x, columns, format)
    kinds.across(x, made.scale, format)
    kinds.across(made.codes, None, format)


def _room(rows: int, cols: int, format: torch.dtype) -> CodeRoom:
    """Room for codes of a format, which the device decides on where kernels run."""
    scale, bias = _meta(rows, dtype=FP32), FORMATS[format][1]
    return CodeRoom(_meta(rows, cols, dtype=torch.uint8), scale, bias)


def _coded(rows: int, cols: int, format: torch.dtype, dtype: torch.dtype = BF16) -> None:
    """Norms and gated activations that write codes beside their result, or alone."""
    x, weight = _meta(rows, cols, dtype=dtype), _meta(cols, dtype=dtype)
    room = _room(rows, cols, format)
    for each in (room, room._replace(writes=False)):
        rms_norm.normalize("rms_norm", x, None, weight, 1e-6, 0.0, "llama", each)
        rms_norm.normalize("fused_add_rms_norm", x, x, weight, 1e-6, 0.0, "llama", each)
        layer_norm.normalize(x, weight, weight, 1e-5, each)
        for activation in ("silu", "gelu", "gelu_tanh"):
            gated_rows.forward("swiglu", activation, x, x, gated.NONE, each)
        gated_rows.forward("swiglu", "silu", x, x, (0.5, 2.0), each)


def _coded_gradients(rows: int, cols: int, format: torch.dtype, dtype: torch.dtype = BF16) -> None:
    """Gradients of gated activations that leave in FP8, beside those in 16 bits or alone."""
    x, columns = _meta(rows, cols, dtype=dtype), _meta(cols, dtype=FP32)
    room, given = _room(rows, cols, format), (x, x, x, gated.NONE)
    both = (room, room), (columns, columns)
    for activation in ("silu", "gelu", "gelu_tanh"):
        how = ("swiglu", activation, *given)
        gated_rows.backward(*how, *both, (True, True), True)
        gated_rows.backward(*how, *both, (False, False), False)
    gated_rows.backward(*how, (room, None), (columns, None), (False, True), False)


def _split(rows: int, cols: int, axis: int, beside: int = 1) -> None:
    x = _meta(rows, cols * beside, dtype=FP32)[:, :cols]
    split(x, (0, 1, 2) if axis else (0, 1, 0, 1, 2, 0), axis)


def _selective(cols: int, choices: int, scale: float, dtype: torch.dtype = BF16) -> None:
    logits, index = _meta(4096, cols, dtype=dtype), _meta(4096, choices, dtype=torch.int64)
    found, lse, low = selective_log_softmax.forward(logits, index, scale, -100, False)
    selective_log_softmax.backward(found, logits, index, lse, low, scale, -100)


def _embedding(rows: int, classes: int, cols: int, dtype: torch.dtype, scale: float) -> None:
    weight, index = _meta(classes, cols, dtype=dtype), _meta(rows, dtype=torch.int64)
    y = embedding.forward(weight, index, classes, 3, scale, False)
    embedding.backward(y, index, classes, 3, scale)


def _divergence(
    kind: str, cols: int, dtype: torch.dtype, form: str, teacher_form: str, beta: float = 0.5
) -> None:
    student, teacher = _meta(4096, cols, dtype=dtype), _meta(4096, cols, dtype=dtype)
    target, factor = _meta(4096, dtype=torch.int64), _meta(dtype=FP32)
    name = {"jensen": "jsd", "tvd": "tvd"}.get(kind, "kl_div")  # whose launch numbers it takes
    spec, kernels = (
        DivergenceSpec(kind, beta, form, teacher_form, 0.5),
        TritonPairs(name),
    )
    rows = kernels.statistics(student, teacher, target, spec)
    kernels.gradient_into(
        _meta(4096, cols, dtype=dtype), student, teacher, None, rows, spec, factor
    )
    kernels.loss_and_gradient_(student, teacher, target, spec, factor)


def _norm_calls() -> dict[str, Callable[[], None]]:
    """Those of the norms beside the three plain ones."""
    part = functools.partial
    found: dict[str, Callable[[], None]] = {}
    for rows, cols, dtype in (
        (65536, 256, BF16), (8192, 4096, BF16), (8192, 4096, FP32), (4096, 8192, BF16),
        (2048, 16384, BF16), (1024, 65536, BF16),
    ):  # fmt: skip
        shape = f"{rows}x{cols} {_name(dtype)}"
        found[f"dyt {shape}"] = part(_dyt, rows, cols, dtype)
        found[f"fused_scaled_add_rms_norm {shape}"] = part(_scaled_add, rows, cols, dtype)
        found[f"poly_norm {shape}"] = part(_poly_norm, rows, cols, dtype)
        for first in (False, True):
            label = f"gated_rms_norm {shape} {'after' if first else 'before'} the gate"
            found[label] = part(_gated_norm, rows, cols, cols, first=first, dtype=dtype)
        label = f"modulated_rms_norm {shape}"
        found[label] = part(_modulated_norm, (8, rows // 8, cols), (8, cols), dtype)
        if cols > 256:  # one row a tile: too little for 16 bytes a lane
            by = (rows, cols)
            found[f"{label} every row"] = part(_modulated_norm, by, by, dtype)
    found["gated_rms_norm 262144x128"] = part(_gated_norm, 262144, 128, 128)
    found["gated_rms_norm 8192x8192 groups"] = part(_gated_norm, 8192, 8192, 1024, first=True)
    found["gated_rms_norm gemma groups"] = part(_gated_norm, 8192, 4096, 512, casting="gemma")
    for *image, groups in ((8, 512, 64, 64, 32), (8, 1024, 16, 16, 32), (128, 2048, 512, 128)):
        for dtype in (BF16, FP32):
            label = f"group_norm {'x'.join(map(str, image))} {_name(dtype)}"
            found[label] = part(_group_norm, tuple(image), groups, dtype)
    return found


class Launches(NamedTuple):
    """Calls of one launcher: one per row of arguments, which the label shows."""

    label: str
    launch: Callable[..., None]
    rows: Sequence[tuple[Any, ...]] = ((),)
    options: Mapping[str, Any] = MappingProxyType({})

    def calls(self) -> dict[str, Callable[[], None]]:
        """By label."""
        return {
            self.label.format(*[_name(a) if isinstance(a, torch.dtype) else a for a in row]):
            functools.partial(self.launch, *row, **self.options)
            for row in self.rows
        }  # fmt: skip


BOTH = ((BF16,), (FP32,))
GPT_OSS = (8192, 4, 32, 2880, 2880)
NORMS = (
    Launches("rms_norm {}x{} {}", _rms_norm, (
        (262144, 128, BF16), (8192, 4096, BF16), (8192, 4096, FP32), (4096, 8192, BF16),
        (2048, 16384, BF16), (1024, 65536, BF16),
    )),
    Launches("rms_norm gemma {}x{}", _rms_norm, ((16384, 2048, BF16, "gemma"),)),
    Launches("fused_add_rms_norm {}x{} {}", _fused_add, (
        (65536, 256, BF16), (8192, 4096, BF16), (8192, 4096, FP32), (4096, 8192, BF16),
        (2048, 16384, BF16), (1024, 65536, BF16),
    )),
    Launches("fused_add_rms_norm gemma {}x{}", _fused_add, ((16384, 2048, BF16, "gemma"),)),
    Launches("layer_norm {}x{} {}", _layer_norm, (
        (65536, 256, BF16), (32768, 1024, BF16), (8192, 4096, BF16), (8192, 4096, FP32),
        (4096, 8192, BF16), (2048, 16384, BF16), (1024, 65536, BF16),
    )),
)  # fmt: skip
LAYERS = (
    *(
        launches
        for dtype in (BF16, FP32)
        for launches in (
            Launches("swiglu 8192x14336 {}", _swiglu, ((dtype,),)),
            Launches(
                "gated_mlp {} 8192x14336 {}",
                _gated_mlp,
                [(activation, dtype) for activation in ("silu", "gelu", "gelu_tanh")],
            ),
            Launches("swiglu_clamped 32768x2880 {}", _clamped, ((dtype,),)),
            Launches("relu_squared 8192x16384 {}", _relu_squared, ((dtype,),)),
        )
    ),
    Launches("gemm_by_rows {}x{}x{} {}", _gemm, (
        (8192, 4096, 4096, BF16), (8192, 4096, 4096, FP32),
    )),
    Launches("gemm_by_rows {}x{}x{} {} bias", _gemm, (
        (8192, 896, 896, BF16), (8192, 896, 896, FP32),
    ), {"bias": True}),
    Launches("gemm_by_rows {}x{}x{} {} gradient", _gemm, (
        (8192, 4096, 128256, BF16), (8192, 4096, 4096, FP32),
    ), {"gradient": True}),
    Launches(
        "fused_moe {0}x{3} {4} of {2}",
        _fused_moe,
        ((8192, 8, 128, 2048, 768), (512, 8, 128, 2048, 768)),
    ),
    Launches("fused_moe {0}x{3} {4} of {2} fp32", _fused_moe, ((8192, 2, 8, 4096, 14336, FP32),)),
    Launches("fused_moe {0}x{3} {4} of {2}", _fused_moe, (GPT_OSS,), {"gpt_oss": True}),
    Launches(
        "fused_moe {0}x{3} {4} of {2}, PyTorch's products",
        _fused_moe,
        (GPT_OSS,),
        {"gpt_oss": True, "library": True},
    ),
    Launches(
        "fused_moe {0}x{3} {4} of {2} no gate",
        _fused_moe,
        ((8192, 6, 128, 2688, 1856),),
        {"gate": False},
    ),
    Launches("lora_moe {0}x{3} {4} of {2} r{5} {6}", _lora_moe, (
        (8192, 8, 128, 2048, 768, 16, BF16), (8192, 8, 128, 2048, 768, 16, FP32),
        (8192, 2, 8, 4096, 14336, 64, BF16), (8192, 8, 128, 2048, 768, 16, FP32, FP32),
    )),
    Launches("hyper_connections {}x{}x{} {}", _hyper, [
        (*shape, dtype)
        for shape in ((8192, 4, 4096), (8192, 2, 2048), (2048, 8, 7168)) for dtype in (BF16, FP32)
    ]),
    Launches("attention_residuals {}x{}x{} {}", _attention_residuals, (
        (8, 65536, 256, BF16), (32, 4096, 2048, BF16), (8, 8192, 4096, FP32), (8, 8192, 4096, BF16),
        (8, 8192, 8192, BF16), (8, 8192, 8192, FP32), (16, 2048, 16384, BF16),
        (16, 2048, 16384, FP32),
    )),
    Launches("causal_conv1d 2x8192x{} W{} {}", _causal_conv1d, (
        (8192, 4, BF16), (8192, 4, FP32), (4096, 7, BF16),
    )),
    Launches("causal_conv1d 2x8192x{} W{} {} everything", _causal_conv1d, (
        (8192, 4, BF16), (2048, 8, FP32),
    ), {"everything": True}),
    Launches("gated_short_conv 2x8192x{} W{} {}", _gated_short_conv, (
        (2048, 3, BF16), (2048, 3, FP32),
    )),
    Launches("gated_short_conv 2x8192x{} W{} {} packed", _gated_short_conv, (
        (2048, 3, BF16), (2048, 7, BF16),
    ), {"packed": True}),
    Launches("gated_delta_rule {}x{} {}", _delta_rule, (
        (128, 128, BF16), (32, 32, BF16), (96, 192, BF16), (64, 64, BF16),
    )),
    Launches("gated_delta_rule {}x{} everything", _delta_rule, ((32, 32), (128, 128)),
             {"everything": True}),
    Launches("ssd_scan {} groups {}x{} {}", _ssd_scan, (
        (1, 64, 128, BF16), (1, 64, 256, BF16), (8, 64, 64, BF16), (16, 32, 128, BF16),
        (4, 64, 64, FP32), (2, 64, 32, BF16), (2, 128, 128, BF16),
    )),
    Launches("ssd_scan {} groups {}x{} everything", _ssd_scan, ((1, 64, 128),),
             {"everything": True}),
    Launches("selective_scan 2x8192x{} N{} {}", _selective_scan, (
        (8192, 16, BF16), (8192, 16, FP32), (4096, 64, BF16), (1024, 256, BF16),
    )),
    Launches("selective_scan 2x8192x{} N{} {} plain", _selective_scan, (
        (8192, 16, BF16), (4096, 16, BF16),
    ), {"gated": False}),
    Launches("selective_scan 2x8192x{} N{} {} everything", _selective_scan, (
        (8192, 16, BF16), (2048, 4, FP32), (1024, 256, BF16),
    ), {"everything": True}),
    Launches("selective_scan 2x8192x{} N{} {} frozen", _selective_scan, ((2048, 4, FP32),),
             {"everything": True, "frozen": True}),
    Launches("selective_scan 2x8192x{} N{} teams", _selective_scan_teams, ((8192, 16),)),
    Launches("selective_scan 2x8192x{} N{} teams plain", _selective_scan_teams, ((8192, 16),),
             {"gated": False}),
    Launches("kimi_delta_attention {}x{} {}", _delta_rule, (
        (128, 128, BF16), (32, 32, BF16), (96, 192, BF16), (64, 64, BF16),
    ), {"rule": kimi_delta_attention, "group": 1}),
    Launches("kimi_delta_attention {}x{} everything", _delta_rule, ((32, 32), (128, 128)),
             {"rule": kimi_delta_attention, "everything": True}),
    Launches("swiglu_packed 8192x11008", _swiglu_packed),
    Launches("swiglu_clamped_packed 32768x2880 interleaved", _clamped_packed, ((True,),)),
    Launches("swiglu_clamped_packed 32768x2880 halves", _clamped_packed, ((False,),)),
    *(
        launches
        for form in ("tanh", "none")
        for launches in (
            Launches("geglu {} 8192x14336 {}", _geglu, ((form, BF16), (form, FP32))),
            Launches("geglu_packed {} 8192x11008", _geglu_packed, ((form,),)),
        )
    ),
)  # fmt: skip
EVERYTHING = {"ranges": 4, "softcap": 50.0, "sinks": True}
ATTENTION = (
    *(
        launches
        for style in ("half", "interleaved")
        for launches in (
            Launches("rope {2} 32/8x128", _rope, (((32, 8), 128, style),)),
            Launches(
                "rope {2} 28/4x128 fp32",
                _rope,
                (((28, 4), 128, style),),
                {"dtype": FP32, "angle": FP32},
            ),
            Launches(
                "rope {2} 14/2x64 fp32 angles", _rope, (((14, 2), 64, style),), {"angle": FP32}
            ),
            Launches("rope {2} 32/2x128 half", _rope, (((32, 2), 128, style),), {"rotary": 64}),
            Launches("rope {2} 64/8x64 a pair", _rope, (((64, 8), 64, style),), {"angles": 32}),
            Launches("rope {2} 16/16x80", _rope, (((16, 16), 80, style),)),
        )
    ),
    Launches("rms_norm_rope {}x{} {}", _rms_norm_rope, (
        (32, 128, "llama", False), (8, 128, "llama", False), (8, 256, "gemma", False),
    )),
    Launches("rms_norm_rope {}x{} tokens", _rms_norm_rope, (
        (32, 128, "olmo", True), (64, 128, "olmo", True),
    )),
    Launches("rms_norm_rope {}x{} fp32", _rms_norm_rope, (
        (28, 128, "llama", False), (32, 128, "olmo", True),
    ), {"dtype": FP32}),
    # the suite compiles the middle one: the most options at the widest head that a target takes
    Launches("attention causal 64", _attention, ((32, 8, 64),)),
    Launches("attention everything 64", _attention, ((8, 8, 64),), EVERYTHING),
    Launches("attention ranges 64", _attention, ((32, 8, 64),), {"ranges": 2}),
    Launches("attention everything 128", _attention, ((8, 8, 128),), EVERYTHING),
    Launches("attention causal 128", _attention, ((32, 8, 128),)),
    Launches("attention ranges 128", _attention, ((32, 8, 128),), {"ranges": 2}),
    Launches("sparse_attention latent {0}x{2} {4}", _sparse_attention, (
        (128, 1, 576, 512, BF16), (16, 1, 576, 512, BF16), (128, 1, 576, 512, FP32),
        (32, 1, 320, 256, BF16),
    ), {"latent": True}),
    Launches("sparse_attention {0}/{1}x{2} {4}", _sparse_attention, (
        (32, 2, 128, 128, BF16), (16, 16, 192, 128, BF16), (32, 2, 128, 128, FP32),
        (8, 2, 64, 64, BF16),
    )),
    Launches("indexer {}x{} {}", _indexer, (
        (64, 128, BF16), (16, 128, BF16), (64, 128, FP32), (8, 32, BF16),
    )),
    Launches("indexer {}x{} ranges", _indexer, ((64, 128),), {"ranges": True}),
)  # fmt: skip
LOSSES = (
    Launches("cross_entropy {} {}", _cross_entropy, (
        (32000, BF16), (128256, BF16), (128256, FP32),
    )),
    Launches("cross_entropy {} every option", _cross_entropy, ((128256, BF16),), {"full": True}),
    Launches("cross_entropy {} softcap", _cross_entropy, ((128256, BF16),), {"softcap": 30.0}),
    Launches("cross_entropy_inplace {}", _inplace, ((128256,),)),
    Launches("loss_and_gradient_ {}", _loss_and_gradient, ((128256,),)),
    Launches("loss_and_gradient_ {} every option", _loss_and_gradient, (
        (262144,),
    ), {"full": True}),
    Launches("scale {}", _scale, BOTH),
    Launches("parts 8192x16", _split, ((8192, 16, 1, 1),)),
    Launches("parts 8192x48", _split, ((8192, 16, 1, 3),)),
    Launches("parts 16x4096", _split, ((16, 4096, 0, 1),)),
    Launches("8 bits {}x{} {}", _float8, [(4096, 128256, dtype) for dtype in FORMATS]),
    Launches("float8 rows {}x{} {}", _float8_rows, [
        (8192, cols, format)
        for format in (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
        for cols in (4096, 14336, 28672)
    ]),
    Launches("codes {}x{} {}", _coded, [
        (8192, cols, format)
        for format in (torch.float8_e4m3fn, torch.float8_e4m3fnuz) for cols in (4096, 8192, 14336)
    ]),
    Launches("codes of gradients {}x{} {}", _coded_gradients, [
        (8192, cols, format)
        for format in (torch.float8_e4m3fn, torch.float8_e4m3fnuz) for cols in (4096, 8192, 14336)
    ]),
    Launches("codes {}x{} {} {}", _coded, ((8192, 4096, torch.float8_e4m3fn, FP32),)),
    Launches("float8 rows {}x{} {} {}", _float8_rows, ((8192, 4096, torch.float8_e4m3fn, FP32),)),
    Launches("log_prob {} {}", _log_prob, ((128256, BF16), (151936, BF16), (32000, FP32))),
    Launches("softmax {}x{} {}", _softmax, (
        (65536, 256, BF16), (8192, 4096, BF16), (8192, 4096, FP32), (4096, 16384, BF16),
        (4096, 32768, BF16), (2048, 131072, FP32),
    )),
    Launches("multi_token_attention {}x{} {}", _multi_token, (
        (16, 2048, BF16), (8, 4096, BF16), (16, 2048, FP32), (2, 16384, BF16), (1, 65536, BF16),
    )),
    Launches("multi_token_attention {}x{} sparse", _multi_token, ((16, 2048),), {"sparse": True}),
    Launches("selective_log_softmax {}", _selective, ((128256, 1, 1.0),)),
    Launches("selective_log_softmax {} of {}", _selective, ((151936, 16, 0.5, FP32),)),
    Launches("embedding {2} {3}", _embedding, [
        (8192, 128256, cols, dtype, 1.0)
        for cols, dtype in ((128, BF16), (2048, BF16), (4096, BF16), (8192, FP32))
    ]),
    Launches("embedding {2} scaled", _embedding, ((8192, 256000, 2304, BF16, 48.0),)),
    *(
        launches
        for kind in KINDS
        for launches in (
            Launches(
                "divergence {} {} {}",
                _divergence,
                [(kind, 128256, dtype, "logits", "logits") for dtype in (BF16, FP32)],
            ),
            Launches(
                "divergence {} log_prob",
                _divergence,
                ((kind, 128256, FP32, "log_prob", "log_prob"),),
            ),
        )
    ),
    Launches(
        "divergence {0} {5} {3}",
        _divergence,
        [("jensen", 128256, BF16, form, form, 0.9) for form in ("logits", "log_prob")],
    ),
    Launches("divergence {0} {4}", _divergence, (("forward", 128256, FP32, "log_prob", "prob"),)),
    Launches("divergence {0} {4}", _divergence, (("tvd", 32000, BF16, "prob", "prob"),)),
    Launches("log_prob {} every option", _log_prob, ((262144, BF16),), {"full": True}),
)  # fmt: skip


def calls() -> dict[str, Callable[[], None]]:
    """Labelled calls of the operators' launchers."""
    found: dict[str, Callable[[], None]] = {}
    for launches in NORMS:
        found |= launches.calls()
    found |= _norm_calls()
    for launches in (*LAYERS, *ATTENTION):
        found |= launches.calls()
    found |= _rope_calls()
    for launches in LOSSES:
        found |= launches.calls()
    return found
