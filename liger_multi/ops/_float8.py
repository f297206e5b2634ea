"""Operators that also return FP8 codes of their result: declaration, checks and samples.

The functions that return codes, such as ``rms_norm_quantized``, call an operator of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.op import Op
from liger_multi.ops._formulas import rounded
from liger_multi.ops._samples import bench, frozen
from liger_multi.ops.linear_float8 import Float8Rows, typed
from liger_multi.testing.samples import Sample, Tensor as T

QUANTIZE = ("float8_e4m3",)
OUTPUTS = ("y", "quantized")


class QuantizedOutput(NamedTuple):
    """A result and its rows in FP8, as ``linear_float8`` rounds them.

    Attributes:
        y: The result; None where ``outputs`` does not name it.
        quantized: Codes and scales of its rows, for ``linear_float8(..., quantized=)``; without a
            gradient.
    """

    y: Tensor | None
    quantized: Float8Rows


def with_codes(plain: Op, **backward: Any) -> Op:
    """The operator that also rounds the first output of ``plain``.

    Its forward takes whether that output is needed too (else it is empty), and returns codes and
    scales after the visible outputs of ``plain``. Its backward is that of ``plain``.

    Args:
        plain: The operator, declared.
        backward: How its backward was declared.
    """
    batched = {**plain.bitwise.batched, "codes": 0, "codes_scale": 0}
    op = Op(
        f"{plain.name}_quantized",
        family=plain.family,
        rowwise=plain.rowwise,
        bitwise=replace(plain.bitwise, batched=batched),
    )
    visible, outputs = (*plain.visible, "codes", "codes_scale"), len(plain.fwd.returns) + 2
    fake = _shapes(plain.fwd.fake, plain.fwd.signature, len(plain.visible), outputs)
    op.forward(returns=" ".join(visible), residuals=" ".join(plain.residuals))(fake)
    op.backward(**backward)
    return op


def _shapes(
    plain: Callable[..., Any], signature: inspect.Signature, visible: int, returns: int
) -> Callable[..., Any]:
    """The shape rule: that of ``plain``, with codes (as bytes) and scales."""

    def fake(*args: Any, **kwargs: Any) -> Any:
        inputs = shape_signature.bind(*args, **kwargs).arguments
        writes_y = inputs.pop("writes_y")
        outs = plain(**inputs)
        y, *other_outputs = (outs,) if isinstance(outs, Tensor) else outs
        codes = y.new_empty(y.shape, dtype=torch.uint8)
        scale = y.new_empty(y.shape[:-1], dtype=torch.float32)
        first = y if writes_y else y.new_empty(0)
        return first, *other_outputs[: visible - 1], codes, scale, *other_outputs[visible - 1 :]

    last = inspect.Parameter("writes_y", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=bool)
    shape_signature = inspect.Signature(
        [*signature.parameters.values(), last],
        return_annotation=tuple[tuple(Tensor for _ in range(returns))],  # type: ignore[misc]
    )
    fake.__signature__ = shape_signature  # type: ignore[attr-defined]
    return fake


def quantized(
    op: Op, quantize: object, outputs: object, *args: Any
) -> tuple[Tensor | None, list[Tensor], Float8Rows]:
    """Call an operator of :func:`with_codes`: y if needed, the outputs after it, and its codes."""
    name = op.name.removesuffix("_quantized")
    checks.one_of(name, "quantize", quantize, QUANTIZE)
    requested = checks.names(name, outputs, OUTPUTS).split(",")
    if "quantized" not in requested:
        checks.refuse(name, "outputs must name 'quantized'", outputs)
    wants_y = "y" in requested
    differentiable = [t for t in args if isinstance(t, Tensor) and t.requires_grad]
    if differentiable and not wants_y and torch.is_grad_enabled():
        checks.refuse(
            name,
            "codes have no gradient: outputs must name 'y' too where an input requires one",
            f"{outputs!r} and {checks.describe(differentiable[0])} that requires a gradient",
        )
    y, *other_outputs, codes, scale = op(*args, wants_y)
    return y if wants_y else None, other_outputs, typed(codes, scale)


def quantized_output(op: Op, quantize: object, outputs: object, *args: Any) -> QuantizedOutput:
    """Call an operator of :func:`with_codes` that has one output."""
    y, _, rows = quantized(op, quantize, outputs, *args)
    return QuantizedOutput(y, rows)


def coded_samples(
    build: Callable[..., dict[str, T]],
    shapes: Mapping[str, Sequence[int]],
    sizes: str,
    options: Mapping[str, Mapping[str, Any]] = {},
) -> tuple[Sample, ...]:
    """Samples of an operator with codes: shapes by name, options for some of them, real sizes."""
    quantize = {"quantize": QUANTIZE[0]}
    samples = [
        Sample(
            name,
            build(*shape, layout="sliced" if name == "sliced" else "contiguous"),
            {**options.get(name, {}), **quantize},
            path=name if name.startswith("wide") else "",
        )
        for name, shape in shapes.items()
    ]
    tensors = build(3, 5, 48)
    codes_alone = Sample(
        "codes-alone", frozen(tensors, *tensors), {**quantize, "outputs": ("quantized",)}, "thin"
    )
    return (*samples, codes_alone, *bench(build, sizes, quantize))


SHAPES = {
    "rows": (2, 3, 24),
    "odd-width": (4, 37),
    "one-axis": (31,),
    "one-row": (1, 200),
    "no-rows": (0, 16),
    "no-columns": (3, 0),
    "sliced": (4, 24),
    "wide": (2, 16500),
    "wide-norm": (2, 8200),
}


def coded(y: Tensor, outputs: tuple[str, ...]) -> tuple[Tensor | None, Float8Rows]:
    """A result if it is needed, and its rows in FP8."""
    codes, scale = rounded(y.detach())
    rows = Float8Rows(codes.to(torch.float8_e4m3fn), scale.squeeze(-1).float())
    return y if "y" in outputs else None, rows


def with_optional_codes(
    y: Tensor, quantize: str | None, outputs: tuple[str, ...]
) -> Tensor | QuantizedOutput:
    """A result, or with ``quantize`` also its rows in FP8."""
    return y if quantize is None else QuantizedOutput(*coded(y, outputs))
