"""The calls whose launches :mod:`ci.static` compiles: each way through each launcher, real sizes.

Tensors are on the meta device, so sizes cost nothing. A meta-test demands that every kernel of
``backends/triton`` is launched by at least one of these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_multi.backends.triton import (
    cross_entropy,
    cross_entropy_inplace,
    divergence,
    embedding,
    fused_add_rms_norm,
    fused_linear_log_prob,
    gated_mlp,
    geglu,
    geglu_packed,
    layer_norm,
    rms_norm,
    rope,
    scaling,
    selective_log_softmax,
    softmax,
    sparsemax,
    swiglu,
    swiglu_packed,
)
from liger_multi.reference.divergence_rows import Goal
from liger_multi.reference.log_prob import Upstream
from liger_multi.reference.rows import Objective, Rows

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


def _fused_add(rows: int, cols: int, dtype: torch.dtype = BF16, casting: str = "llama") -> None:
    x, weight = _meta(rows, cols, dtype=dtype), _meta(cols, dtype=dtype)
    offset = float(casting == "gemma")
    y, s, rstd = fused_add_rms_norm.forward(x, x, weight, 1e-6, offset, casting)
    fused_add_rms_norm.backward(s, y, s, weight, rstd, offset, casting, True, True, True)


def _layer_norm(rows: int, cols: int, dtype: torch.dtype = BF16) -> None:
    x, weight = _meta(rows, cols, dtype=dtype), _meta(cols, dtype=dtype)
    y, mean, rstd = layer_norm.forward(x, weight, weight, 1e-5)
    layer_norm.backward(y, x, weight, mean, rstd, dtype, True, True, True)


def _swiglu(dtype: torch.dtype) -> None:
    gate = _meta(8192, 14336, dtype=dtype)
    swiglu.backward(swiglu.forward(gate, gate), gate, gate, True, True)


def _swiglu_packed() -> None:
    gate_up = _meta(8192, 2 * 11008)
    swiglu_packed.backward(swiglu_packed.forward(gate_up), gate_up)


def _gated_mlp(activation: str, dtype: torch.dtype) -> None:
    gate = _meta(8192, 14336, dtype=dtype)
    gated_mlp.TritonActivation.product(gate, gate, activation)
    gated_mlp.TritonActivation.gradients(gate, gate, gate, activation)


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


def _cross_entropy(
    cols: int, dtype: torch.dtype, *, full: bool = False, softcap: float | None = None
) -> None:
    logits, target = _meta(4096, cols, dtype=dtype), _meta(4096, dtype=torch.int64)
    weight = _meta(cols, dtype=FP32) if full else None
    extras: tuple[float, float, Any] = (0.1, 1e-4, 30.0) if full else (0.0, 0.0, softcap)
    outs = cross_entropy.forward(
        logits, target, weight, -100, *extras, "mean", False, OUTPUTS if full else ""
    )
    cross_entropy.backward(outs[0], logits, target, weight, outs[6], outs[7], -100, *extras, "mean")


def _loss_and_gradient(cols: int, *, full: bool = False) -> None:
    logits, target = _meta(2048, cols), _meta(2048, dtype=torch.int64)
    options = Objective(-100, *((0.1, 1e-4, 30.0, 0.5) if full else (0.0, 0.0, None)))
    weight = _meta(cols) if full else None
    rows = Rows.room(2048, options, OUTPUTS if full else "", logits)
    cross_entropy.loss_and_gradient_(logits, target, weight, options, rows, _meta(2, dtype=FP32))


def _scale(dtype: torch.dtype) -> None:
    scaling.scale(_meta(128256, 4096, dtype=dtype), _meta(dtype=FP32), BF16)


def _inplace(cols: int) -> None:
    cross_entropy_inplace.backward(_meta(dtype=FP32), _meta(4096, cols))


def _log_prob(cols: int, dtype: torch.dtype, *, full: bool = False) -> None:
    raw, target = _meta(2048, cols, dtype=dtype), _meta(2048, dtype=torch.int64)
    row = _meta(2048, dtype=FP32)
    goal = Objective(-100, 0.0, 0.0, 30.0 if full else None, 0.7 if full else 1.0)
    rows_of = fused_linear_log_prob.TritonLogProbRows
    rows_of.statistics(raw, target, None, goal, "log_prob,entropy,lse,argmax" if full else "")
    upstream = Upstream(row, row, row if full else None)
    rows_of.log_prob_gradient_(raw, target, row, goal, upstream)


def _softmax(rows: int, cols: int, dtype: torch.dtype = BF16) -> None:
    x = _meta(rows, cols, dtype=dtype)
    softmax.backward(softmax.forward(x), x)
    sparsemax.backward(sparsemax.forward(x), x)


def _selective(cols: int, choices: int, scale: float, dtype: torch.dtype = BF16) -> None:
    logits, index = _meta(4096, cols, dtype=dtype), _meta(4096, choices, dtype=torch.int64)
    found, lse = selective_log_softmax.forward(logits, index, scale, -100, False)
    selective_log_softmax.backward(found, logits, index, lse, scale, -100)


def _embedding(rows: int, classes: int, cols: int, dtype: torch.dtype, scale: float) -> None:
    weight, index = _meta(classes, cols, dtype=dtype), _meta(rows, dtype=torch.int64)
    y = embedding.forward(weight, index, classes, 3, scale, False)
    embedding.backward(y, index, classes, 3, scale)


def _divergence(kind: str, cols: int, dtype: torch.dtype, form: str, teacher_form: str) -> None:
    student, teacher = _meta(4096, cols, dtype=dtype), _meta(4096, cols, dtype=dtype)
    target, factor = _meta(4096, dtype=torch.int64), _meta(dtype=FP32)
    goal, kernels = Goal(kind, 0.5, form, teacher_form, 0.5), divergence.TritonPairs("jsd")
    rows = kernels.statistics(student, teacher, target, goal)
    kernels.gradient_into(
        _meta(4096, cols, dtype=dtype), student, teacher, None, rows, goal, factor
    )
    kernels.loss_and_gradient_(student, teacher, target, goal, factor)


def calls() -> dict[str, Callable[[], None]]:
    """Labelled calls of the operators' launchers."""
    part = functools.partial
    found: dict[str, Callable[[], None]] = {
        f"rms_norm {rows}x{cols} {_name(dtype)}": part(_rms_norm, rows, cols, dtype)
        for rows, cols, dtype in (
            (262144, 128, BF16), (8192, 4096, BF16), (8192, 4096, FP32),
            (4096, 8192, BF16), (2048, 16384, BF16), (1024, 65536, BF16),
        )
    }  # fmt: skip
    found["rms_norm gemma 16384x2048"] = part(_rms_norm, 16384, 2048, BF16, "gemma")
    for rows, cols, dtype in (
        (65536, 256, BF16), (8192, 4096, BF16), (8192, 4096, FP32), (4096, 8192, BF16),
        (2048, 16384, BF16), (1024, 65536, BF16),
    ):  # fmt: skip
        label = f"fused_add_rms_norm {rows}x{cols} {_name(dtype)}"
        found[label] = part(_fused_add, rows, cols, dtype)
    found["fused_add_rms_norm gemma 16384x2048"] = part(_fused_add, 16384, 2048, BF16, "gemma")
    for rows, cols, dtype in (
        (65536, 256, BF16), (32768, 1024, BF16), (8192, 4096, BF16), (8192, 4096, FP32),
        (4096, 8192, BF16), (2048, 16384, BF16), (1024, 65536, BF16),
    ):  # fmt: skip
        label = f"layer_norm {rows}x{cols} {_name(dtype)}"
        found[label] = part(_layer_norm, rows, cols, dtype)
    for dtype in (BF16, FP32):
        found[f"swiglu 8192x14336 {_name(dtype)}"] = part(_swiglu, dtype)
        for activation in ("silu", "gelu", "gelu_tanh"):
            label = f"gated_mlp {activation} 8192x14336 {_name(dtype)}"
            found[label] = part(_gated_mlp, activation, dtype)
    found["swiglu_packed 8192x11008"] = _swiglu_packed
    for approximate in ("tanh", "none"):
        for dtype in (BF16, FP32):
            label = f"geglu {approximate} 8192x14336 {_name(dtype)}"
            found[label] = part(_geglu, approximate, dtype)
        found[f"geglu_packed {approximate} 8192x11008"] = part(_geglu_packed, approximate)
    for style in ("half", "interleaved"):
        found[f"rope {style} 32/8x128"] = part(_rope, (32, 8), 128, style)
        found[f"rope {style} 28/4x128 fp32"] = part(
            _rope, (28, 4), 128, style, dtype=FP32, angle=FP32
        )
        found[f"rope {style} 14/2x64 fp32 angles"] = part(_rope, (14, 2), 64, style, angle=FP32)
        found[f"rope {style} 32/2x128 half"] = part(_rope, (32, 2), 128, style, rotary=64)
        found[f"rope {style} 64/8x64 a pair"] = part(_rope, (64, 8), 64, style, angles=32)
        found[f"rope {style} 16/16x80"] = part(_rope, (16, 16), 80, style)
    for cols, dtype in ((32000, BF16), (128256, BF16), (128256, FP32)):
        found[f"cross_entropy {cols} {_name(dtype)}"] = part(_cross_entropy, cols, dtype)
    found["cross_entropy 128256 every option"] = part(_cross_entropy, 128256, BF16, full=True)
    found["cross_entropy 128256 softcap"] = part(_cross_entropy, 128256, BF16, softcap=30.0)
    found["cross_entropy_inplace 128256"] = part(_inplace, 128256)
    found["loss_and_gradient_ 128256"] = part(_loss_and_gradient, 128256)
    found["loss_and_gradient_ 262144 every option"] = part(_loss_and_gradient, 262144, full=True)
    for dtype in (BF16, FP32):
        found[f"scale {_name(dtype)}"] = part(_scale, dtype)
    for cols, dtype in ((128256, BF16), (151936, BF16), (32000, FP32)):
        found[f"log_prob {cols} {_name(dtype)}"] = part(_log_prob, cols, dtype)
    for rows, cols, dtype in (
        (65536, 256, BF16), (8192, 4096, BF16), (8192, 4096, FP32), (4096, 16384, BF16),
        (4096, 32768, BF16), (2048, 131072, FP32),
    ):  # fmt: skip
        found[f"softmax {rows}x{cols} {_name(dtype)}"] = part(_softmax, rows, cols, dtype)
    found["selective_log_softmax 128256"] = part(_selective, 128256, 1, 1.0)
    found["selective_log_softmax 151936 of 16"] = part(_selective, 151936, 16, 0.5, FP32)
    for cols, dtype in ((128, BF16), (2048, BF16), (4096, BF16), (8192, FP32)):
        label = f"embedding {cols} {_name(dtype)}"
        found[label] = part(_embedding, 8192, 128256, cols, dtype, 1.0)
    found["embedding 2304 scaled"] = part(_embedding, 8192, 256000, 2304, BF16, 48.0)
    for kind in divergence.KINDS:
        for dtype in (BF16, FP32):
            label = f"divergence {kind} 128256 {_name(dtype)}"
            found[label] = part(_divergence, kind, 128256, dtype, "logits", "logits")
        found[f"divergence {kind} log_prob"] = part(
            _divergence, kind, 128256, FP32, "log_prob", "log_prob"
        )
    found["divergence forward prob"] = part(
        _divergence, "forward", 128256, FP32, "log_prob", "prob"
    )
    found["divergence tvd prob"] = part(_divergence, "tvd", 32000, BF16, "prob", "prob")
    found["log_prob 262144 every option"] = part(_log_prob, 262144, BF16, full=True)
    return found
