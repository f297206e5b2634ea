"""``liger_kernel.functional``: operators whose implementation an argument chooses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_multi.compat.liger_kernel import choosing, functional, losses
from liger_multi.compat.liger_kernel.function_classes.losses import CrossEntropies
from liger_multi.ops import FusedAddRMSNormOutput

FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""By the name of the operator."""


def chosen(call: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function with the implementation that its caller, the environment or set_impl chose."""
    op_name = call.__name__

    @functools.wraps(call)
    def run(
        *args: Any, impl: str | None = None, mode: str | None = None, backend: str | None = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        device = tensors[0].device if tensors else None
        with choosing.scope(op_name, impl or backend, mode, device):
            return call(*args, **kwargs)

    FUNCTIONS[op_name] = run
    return run


def dispatch(
    op_name: str, *args: Any, impl: str | None = None, backend: str | None = None, **kwargs: Any
) -> Any:
    """Call an operator by its name.

    Raises:
        NoImplAvailableError: An unknown operator.
        ImplNotAvailableError: An unknown implementation.
    """
    if op_name not in FUNCTIONS:
        choosing.resolve_impl(op_name, impl or backend)  # which raises
    return FUNCTIONS[op_name](*args, impl=impl, backend=backend, **kwargs)


# --- losses ---


@chosen
def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100,
    lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, return_z_loss: bool = False, return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False, *, impl: str | None = None, mode: str | None = None,
    backend: str | None = None,
) -> CrossEntropies:  # fmt: skip
    """:func:`liger_multi.ops.cross_entropy`; four results, None where not asked for."""
    return losses.unpack_cross_entropy_result(
        functional.liger_cross_entropy(
            input, target, weight, None, ignore_index, None, reduction, label_smoothing,
            lse_square_scale, softcap, return_z_loss, return_token_accuracy,
            return_predicted_tokens,
        )
    )  # fmt: skip


@chosen
def fused_linear_cross_entropy(
    _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
    ce_weight: Tensor | None = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
    return_z_loss: bool = False, accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False, *, impl: str | None = None, mode: str | None = None,
    backend: str | None = None,
) -> CrossEntropies:  # fmt: skip
    """:func:`liger_multi.ops.fused_linear_cross_entropy`; four results, as above."""
    return losses.unpack_cross_entropy_result(
        functional.liger_fused_linear_cross_entropy(
            _input, weight, target, bias, ce_weight, ignore_index, lse_square_scale,
            label_smoothing, reduction, softcap, return_z_loss, accum_dtype, use_token_scaling,
            return_token_accuracy, return_predicted_tokens,
        )
    )  # fmt: skip


@chosen
def fused_linear_jsd(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
    shift_labels: Tensor | None = None, jsd_beta: float = 0.5, ignore_index: int = -100,
    temperature: float = 1.0, *, impl: str | None = None, mode: str | None = None,
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """:func:`liger_multi.ops.fused_linear_jsd`."""
    return functional.liger_fused_linear_jsd(
        student_input, student_weight, teacher_input, teacher_weight, shift_labels, jsd_beta,
        ignore_index, temperature,
    )  # fmt: skip


@chosen
def jsd(
    _input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5,
    ignore_index: int = -100, *, impl: str | None = None, mode: str | None = None,
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """:func:`liger_multi.ops.jsd`."""
    return functional.liger_jsd(_input, target, shift_labels, beta, ignore_index)


@chosen
def kl_div(
    y_pred: Tensor, y_true: Tensor, reduction: str = "batchmean", log_target: bool = False,
    eps: float = 1e-10, *, impl: str | None = None, mode: str | None = None,
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """:func:`liger_multi.ops.kl_div`."""
    return functional.liger_kl_div(
        y_pred, y_true, reduction=reduction, log_target=log_target, eps=eps
    )


# --- norms, activations, rotary embeddings ---


@chosen
def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, *, offset: float = 0.0,
    casting_mode: str | int = "llama", in_place: bool = False, row_mode: bool | None = None,
    impl: str | None = None, mode: str | None = None, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """:func:`liger_multi.ops.rms_norm`."""
    return functional.liger_rms_norm(x, weight, eps, offset, casting_mode)


@chosen
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6, *,
    impl: str | None = None, mode: str | None = None, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """:func:`liger_multi.ops.layer_norm`."""
    return functional.liger_layer_norm(x, weight, bias, eps)


@chosen
def fused_add_rms_norm(
    X: Tensor, R: Tensor, W: Tensor, eps: float = 1e-6, offset: float = 0.0,
    casting_mode: str | int = "llama", in_place: bool = False, *, impl: str | None = None,
    mode: str | None = None, backend: str | None = None,
) -> FusedAddRMSNormOutput:  # fmt: skip
    """:func:`liger_multi.ops.fused_add_rms_norm`."""
    return functional.liger_fused_add_rms_norm(X, R, W, eps, offset, casting_mode)


@chosen
def softmax(
    x: Tensor, *, impl: str | None = None, mode: str | None = None, backend: str | None = None
) -> Tensor:
    """:func:`liger_multi.ops.softmax`."""
    return functional.liger_softmax(x)


@chosen
def swiglu(
    a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0, *,
    impl: str | None = None, mode: str | None = None, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """:func:`liger_multi.ops.swiglu`."""
    return functional.liger_swiglu(a, b, gate_multiplier, down_multiplier)


@chosen
def geglu(
    a: Tensor, b: Tensor, *, impl: str | None = None, mode: str | None = None,
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """:func:`liger_multi.ops.geglu`."""
    return functional.liger_geglu(a, b)


@chosen
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None,
    unsqueeze_dim: int = 1, *, impl: str | None = None, mode: str | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`liger_multi.ops.rope`."""
    return functional.liger_rope(q, k, cos, sin, position_ids, unsqueeze_dim)
