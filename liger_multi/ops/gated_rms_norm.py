"""Contract of ``gated_rms_norm``."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._formulas import rms_normalized, weighted, wide
from liger_multi.ops._samples import ROWS, bench, each_frozen, frozen, usual
from liger_multi.ops._work import Options, Shapes, Work
from liger_multi.ops.rms_norm import CASTINGS, EPS, GEMMA, numbers
from liger_multi.testing.samples import Sample, Tensor as T

ACTIVATIONS = ("silu", "sigmoid")
op = Op(
    "gated_rms_norm",
    family="norms",
    rowwise=True,
    bitwise=bitwise(PER_ROW, "x gate y rstd", 1),
)


@op.forward(returns="y", residuals="rstd")
def forward(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
    group_size: int,
    norm_first: bool,
    activation: str,
) -> tuple[Tensor, Tensor]:
    wide = weight is not None and casting == "llama" and (gate is None or not norm_first)
    dtype = torch.promote_types(x.dtype, weight.dtype) if weight is not None and wide else x.dtype
    acc_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    groups = x.shape[-1] // group_size
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((*x.shape[:-1], groups), dtype=acc_dtype)


op.backward(
    reads="dy x gate weight rstd offset casting group_size norm_first activation",
    returns="dx dgate dweight",
    values_for={"weight": "x gate"},
)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "silu",
    offset: float = 0.0,
    casting: str = "llama",
) -> Tensor:
    """Root-mean-square norm of groups of channels, times an activated gate after or before it.

    Math:
        ``n(u) = u / sqrt(mean(u^2) + eps)``, the mean over each group of ``group_size`` neighbors
        (all of the last axis by default), ``w = offset + weight``, and ``act`` silu or sigmoid.
        ``norm_before_gate``: ``y = w * n(x) * act(gate)``; else ``y = w * n(x * act(gate))``.
        Without a gate, ``y = w * n(x)``. ``casting`` says where ``n`` is rounded, as in
        ``rms_norm``; with ``llama`` so is ``w * n`` before a gate.

    Shapes:
        x and gate ``(..., H)`` with any strides, weight ``(H,)`` or None; y ``(..., H)``,
        contiguous.

    Dtypes:
        In: any floating dtypes. Inside: fp32 (fp64 for fp64), the gate too. Out: that of x; with
        ``llama`` and nothing after the weight the promotion of x and weight, as the Hugging Face
        class returns.

    Memory:
        Kept for backward: x, gate, weight and 4 bytes a group (``rstd``).

    Raises:
        TypeError: An argument is not a floating-point tensor, or group_size no integer.
        ValueError: Shapes that do not fit, a group_size that does not divide the last axis, mixed
            devices, unknown casting or activation.

    Source:
        Dao and Gu 2024 (arXiv:2405.21060); transformers ``MambaRMSNormGated``,
        ``FalconH1RMSNormGated``, ``Qwen3NextRMSNormGated``, ``KimiLinearRMSNormGated`` and, in
        groups without a gate, ``Qwen4ExpTextRMSNorm``.
    """
    name = "gated_rms_norm"
    checks.floating(name, x=x, gate=gate, weight=weight, optional=("gate", "weight"))
    if x.ndim == 0:
        raise ValueError(f"{name}: x must have at least one axis, got {checks.describe(x)}")
    if gate is not None:
        checks.same_shape(name, x=x, gate=gate)
    width = x.shape[-1]
    checks.vector(name, "weight", weight, width, "last axis of x")
    checks.one_of(name, "casting", casting, CASTINGS)
    checks.one_of(name, "activation", activation, ACTIVATIONS)
    size = width if group_size is None else checks.integer(name, "group_size", group_size)
    if group_size is not None and (size < 1 or width % size):
        checks.refuse(name, f"group_size must divide {width}, the last axis of x", f"{group_size}")
    gate_last = checks.boolean(name, "norm_before_gate", norm_before_gate)
    options = (*numbers(name, eps, offset), casting, max(size, 1), gate_last, activation)
    result: Tensor = op(x, gate, weight, *options)
    return result


def formula(
    x: Tensor,
    gate: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "silu",
    offset: float = 0.0,
    casting: str = "llama",
) -> Tensor:
    """RMSNorm of groups of columns, times an activation of the gate before or after it."""
    u, act = wide(x), None
    if gate is not None:
        act = torch.sigmoid(wide(gate)) if activation == "sigmoid" else F.silu(wide(gate))
    if act is not None and not norm_before_gate:
        u = u * act
    groups = u.unflatten(-1, (-1, group_size or max(x.shape[-1], 1)))
    y = weighted(rms_normalized(groups, eps).flatten(-2).to(x.dtype), weight, offset)
    return (y * act).to(x.dtype) if act is not None and norm_before_gate else y


def work(shapes: Shapes, size: int, options: Options) -> Work:
    # x (and a gate) read, y written; dy and those read, their gradients written
    inputs = 2 if "gate" in shapes else 1
    tensor_bytes = math.prod(shapes["x"]) * size
    return Work((inputs + 1) * tensor_bytes, (inputs + 1 + 2 * inputs + 1) * tensor_bytes)


def _case(*shape: int, dtype: torch.dtype | None = None, **options: Any) -> dict[str, T]:
    tensors = T(shape, **options)
    return {"x": tensors, "gate": tensors, "weight": T((shape[-1],), dtype=dtype)}


AFTER, GROUPED = {"norm_before_gate": False}, {"group_size": 16}
SAMPLES = (
    Sample("qwen3-next", _case(2, 5, 64)),
    *usual(
        _case,
        ROWS,
        but=EPS
        | {
            "one-axis": {"group_size": 12},
            "no-rows": GROUPED,
            "sliced": GROUPED,
            "transposed": AFTER,
            "row-gaps": AFTER | GROUPED,
            "many-tiny-rows": {"group_size": 4},
        },
    ),
    Sample("mamba2", _case(2, 5, 64), AFTER),
    Sample("mamba2-groups", _case(3, 4, 64), AFTER | GROUPED),
    Sample("falcon-h1", _case(3, 4, 64), GROUPED | {"casting": "olmo"}),
    Sample("falcon-h1-after", _case(6, 48), AFTER | GROUPED | {"casting": "olmo"}),
    Sample("kimi", _case(6, 72), {"casting": "olmo", "activation": "sigmoid"}),
    Sample("sigmoid-after", _case(6, 72), AFTER | {"activation": "sigmoid"}),
    Sample("gemma-groups", _case(6, 96), GROUPED | GEMMA),
    Sample("fp32-weight", _case(7, 96, dtype=torch.float32), {"eps": 1e-5}),
    Sample("fp32-weight-after", _case(7, 96, dtype=torch.float32), AFTER),
    Sample("gateless", {"x": T((4, 96)), "weight": T((96,))}, {"group_size": 24}),
    Sample("weightless", {"x": T((4, 40)), "gate": T((4, 40))}),
    Sample("plain", {"x": T((4, 40))}, {"group_size": 5}),
    Sample("fp32-gate", {**_case(4, 40), "gate": T((4, 40), dtype=torch.float32)}),
    Sample("odd-groups", _case(5, 111), {"group_size": 37}),
    Sample("groups-of-one", _case(3, 6), {"group_size": 1, "eps": 0.5}),
    *each_frozen(_case(6, 64), "weight x"),
    *each_frozen(_case(6, 64), "gate", AFTER),
    Sample("frozen-both", frozen(_case(6, 64), "x", "gate"), AFTER),
    Sample("past-65536-columns-after", _case(2, 65600), AFTER, size="thin"),
    *bench(_case, "262144x128"),
    Sample("8192x4096 after", _case(8192, 4096), AFTER, size="bench"),
    Sample("8192x8192 after, 8 groups", _case(8192, 8192), AFTER | {"group_size": 1024}, "bench"),
    Sample(
        "8192x4096 gateless",
        {"x": T((8192, 4096)), "weight": T((4096,))},
        {"group_size": 1024},
        "bench",
    ),
)
COMPILE_SAMPLES = (
    *bench(_case, "2048x16384 1024x65536"),
    Sample("1024x65536 after", _case(1024, 65536), AFTER),
)
