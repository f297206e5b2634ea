"""The functions of ``liger_kernel.transformers.functional``, with Liger's argument order.

``in_place`` and ``row_mode`` change nothing here: gradients are never written over a caller's
tensors, and kernels choose their own rows. ``accum_dtype=None`` is fp32.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from liger_multi import checks, losses, ops
from liger_multi.compat.liger_kernel.signatures import (
    NAMES,
    ArgumentError,
    CrossEntropyOutput,
    TargetError,
    adapter,
)
from liger_multi.nn.vocab_parallel import vocab_parallel_fused_linear_log_prob

__all__ = ["CrossEntropyOutput"]

_CASTINGS = {
    "llama": "llama",
    0: "llama",
    "gemma": "gemma",
    1: "gemma",
    "none": "llama",
    -1: "llama",
}


def casting_of(name: str, mode: str | int) -> str:
    """Our name of a casting mode; statistics of ``none`` are fp32 here too."""
    if mode not in _CASTINGS:
        raise ValueError(
            f"{name}: casting_mode must be 'llama' (0), 'gemma' (1) or 'none' (-1), got {mode!r}"
        )
    return _CASTINGS[mode]


def output_names(*flags: bool) -> tuple[str, ...]:
    """Names of the outputs that Liger's flags ask for: z-loss, token accuracy, predictions."""
    return tuple(name for name, flag in zip(NAMES[1:], flags, strict=True) if flag)


def retired(name: str, size_average: Any, reduce: Any, usual: Any) -> None:
    """Warn of the arguments that PyTorch has retired; they change nothing."""
    if size_average is not usual or reduce is not usual:
        warnings.warn(
            f"{name}: size_average={size_average!r} and reduce={reduce!r} change nothing; use "
            "reduction",
            DeprecationWarning,
            stacklevel=3,
        )


def in_dtype(result: Any, dtype: torch.dtype, *names: str) -> Any:
    """A loss, or Liger's outputs of it; those that are named have the dtype of the inputs."""
    if isinstance(result, Tensor):
        return result.to(dtype) if "loss" in names else result
    outputs = {name: getattr(result, name) for name in NAMES}
    cast = {k: v.to(dtype) for k, v in outputs.items() if k in names and v is not None}
    return CrossEntropyOutput(**{**outputs, **cast})


def wide(x: Tensor) -> Tensor:
    """In fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# --- losses ---


def _captured(x: Tensor) -> bool:
    from liger_multi.reference.common.chunking import capturing

    return capturing(x.device)


def _given_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options without ``outputs`` that name nothing, which an operator of a loss does not take."""
    return {k: v for k, v in options.items() if k != "outputs" or v}


def cross_entropy(logits: Tensor, target: Tensor, weight: Tensor | None, **options: Any) -> Any:
    """:func:`liger_multi.ops.cross_entropy`; losses have the dtype of the logits.

    Raises:
        TargetError: A target outside of the vocabulary; looking costs a sync on a device, as it
            does in Liger-Kernel. Not in a graph, compiled or captured, which cannot wait.
    """
    waits = not torch.compiler.is_compiling() and not _captured(logits)
    try:
        run: Any = ops.cross_entropy
        if options.get("outputs"):
            run = ops.cross_entropy_with_outputs
        loss = run(logits, target, weight, validate=waits, **_given_options(options))
    except IndexError as error:
        raise TargetError(f"Target is out of bounds: {error}") from error
    return in_dtype(loss, logits.dtype, "loss", "z_loss")


def liger_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    *,
    inplace: bool = False,
) -> Tensor | CrossEntropyOutput:
    """:func:`cross_entropy`; the logits stay what they are, unless ``inplace`` gives them up."""
    retired("liger_cross_entropy", size_average, reduce, None)
    return cross_entropy(  # type: ignore[no-any-return]
        input,
        target,
        weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=lse_square_scale,
        softcap=softcap,
        reduction=reduction,
        inplace=inplace,
        outputs=output_names(return_z_loss, return_token_accuracy, return_predicted_tokens),
    )


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
) -> Tensor | CrossEntropyOutput:
    """:func:`liger_multi.ops.fused_linear_cross_entropy`; z_loss has the dtype of the input.

    With token scaling every token's loss is multiplied by its probability, which gets no gradient.
    """
    options: dict[str, Any] = {
        "class_weight": ce_weight,
        "ignore_index": ignore_index,
        "softcap": softcap,
        "label_smoothing": label_smoothing,
        "z_loss": lse_square_scale,
        "reduction": reduction,
        "accumulate": torch.float32 if accum_dtype is None else accum_dtype,
        "outputs": output_names(return_z_loss, return_token_accuracy, return_predicted_tokens),
    }
    unsupported = (label_smoothing, lse_square_scale, options["outputs"], reduction == "none")
    if not use_token_scaling:
        run: Any = ops.fused_linear_cross_entropy
        if options["outputs"]:
            run = ops.fused_linear_cross_entropy_with_outputs
        loss = run(input, weight, target, bias, **_given_options(options))
    elif ce_weight is not None or any(unsupported):
        loss = _scaled_by_token(input, weight, target, bias, **options)
    else:
        head = losses.Head(input, weight, bias, softcap=softcap, accumulate=options["accumulate"])
        loss, _ = losses.sequence_loss(
            head,
            target,
            loss_type="dft",
            ignore_index=ignore_index,
            reduction={"mean": "token"}.get(reduction, reduction),
        )
    return in_dtype(loss, input.dtype, "z_loss")  # type: ignore[no-any-return]


def _scaled_by_token(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *,
    reduction: str,
    outputs: tuple[str, ...],
    **options: Any,
) -> Any:
    """Losses of tokens times their probabilities, with everything that the fused loss has."""
    ignored, class_weight = options["ignore_index"], options["class_weight"]
    is_counted = target != ignored
    with torch.no_grad():
        likely = ops.fused_linear_log_prob(
            input,
            weight,
            target,
            bias,
            softcap=options["softcap"],
            ignore_index=ignored,
            outputs=("log_prob",),
        )
        assert likely.log_prob is not None
        scale = torch.where(is_counted, likely.log_prob.exp(), 0)
        of_target = (
            is_counted if class_weight is None else class_weight[target * is_counted] * is_counted
        )
    out = ops.fused_linear_cross_entropy_with_outputs(
        input,
        weight,
        target,
        bias,
        reduction="none",
        outputs=tuple({"z_loss", *outputs}),
        **options,
    )

    def reduced(values: Tensor, shares: Tensor) -> Tensor:
        if reduction == "none":
            return values * scale
        total = (values * scale).sum()
        return total / shares.sum().clamp_min(1e-12) if reduction == "mean" else total

    assert out.z_loss is not None
    z_loss = reduced(out.z_loss, is_counted)
    loss = reduced(out.loss - out.z_loss, of_target) + z_loss
    if not outputs:
        return loss
    return out._replace(loss=loss, z_loss=z_loss if "z_loss" in outputs else None)


def liger_fused_linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    shift_labels: Tensor | None = None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:
    """:func:`liger_multi.ops.fused_linear_jsd`; the teacher gets no gradient."""
    return ops.fused_linear_jsd(
        student_input,
        student_weight,
        teacher_input.detach(),
        teacher_weight.detach(),
        shift_labels,
        beta=jsd_beta,
        temperature=temperature,
        ignore_index=ignore_index,
        accumulate=torch.float32 if accum_dtype is None else accum_dtype,
    )


def liger_jsd(
    input: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
) -> Tensor:
    """:func:`liger_multi.ops.jsd` of log-probabilities, in their dtype; none for the teacher."""
    loss = ops.jsd(input, target.detach(), shift_labels, beta=beta, ignore_index=ignore_index)
    return loss.to(input.dtype)


def liger_kl_div(
    input: Tensor,
    target: Tensor,
    size_average: Any = True,
    reduce: Any = True,
    reduction: str = "mean",
    log_target: bool = False,
    eps: float = 1e-10,
) -> Tensor:
    """:func:`liger_multi.ops.kl_div`; ``mean`` divides by all elements, as in PyTorch.

    Probabilities of 0 cost 0 exactly, so that ``eps`` has nothing to clamp. ``none``, a number an
    element in fp32, is PyTorch's. The teacher gets no gradient.
    """
    retired("liger_kl_div", size_average, reduce, True)
    target = target.detach()
    if reduction == "none":
        return F.kl_div(wide(input), wide(target), reduction="none", log_target=log_target)
    checks.one_of("liger_kl_div", "reduction", reduction, ("none", "sum", "mean", "batchmean"))
    loss = ops.kl_div(
        input,
        target,
        teacher_form="log_prob" if log_target else "prob",
        reduction="sum" if reduction == "sum" else "mean",
    )
    return loss / input.shape[-1] if reduction == "mean" else loss


_REDUCTIONS = ("batchmean", "mean", "sum")


def _mask_targets(
    rows: torch.Size, shift_labels: Tensor | None, ignore_index: int, x: Tensor
) -> Tensor:
    """Targets of which only ``ignore_index`` means something."""
    class_index = int(ignore_index == 0)  # some class that is not ignored
    if shift_labels is None:
        return torch.full(rows, class_index, device=x.device)
    return torch.where(shift_labels == ignore_index, ignore_index, class_index)


def liger_fused_linear_kl_div(
    student_input: Tensor,
    student_weight: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    temperature: float = 1.0,
    eps: float = 1e-10,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:
    """KL divergence of a head's tokens from given distributions ``target`` ``(tokens, classes)``.

    ``batchmean`` divides by the tokens that count, ``mean`` by their elements.
    """
    if reduction not in _REDUCTIONS:
        raise ArgumentError(f"reduction must be one of {_REDUCTIONS}. Got: {reduction}")
    accumulate = torch.float32 if accum_dtype is None else accum_dtype
    head = losses.Head(
        student_input, student_weight, temperature=temperature, accumulate=accumulate
    )
    loss, _ = losses.distillation_loss(
        head,
        losses.Logits(target.detach().clamp_min(eps).log()),
        _mask_targets(target.shape[:-1], shift_labels, ignore_index, student_input),
        num_items=1.0 if reduction == "sum" else None,
        divergence="forward_kl",
        ignore_index=ignore_index,
    )
    return loss / target.shape[-1] if reduction == "mean" else loss


def scaled_outputs(output: ops.LogProbOutput, *extra: Tensor) -> Any:
    """Costs, entropies where asked for, and what comes behind; one of them alone is no tuple."""
    assert output.log_prob is not None
    columns = [-output.log_prob, *(() if output.entropy is None else (output.entropy,)), *extra]
    return columns[0] if len(columns) == 1 else tuple(columns)


def liger_fused_linear_scaled_cross_entropy_tp(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    tp_group: Any,
    temperature: float = 1.0,
    ignore_index: int = -100,
    tiles_per_reduce: int = 1,
    return_entropy: bool = False,
) -> Any:
    """What every token costs, of a head whose classes are split evenly over a group's processes."""
    output = vocab_parallel_fused_linear_log_prob(
        input,
        weight,
        target,
        tp_group,
        vocabulary=weight.shape[0] * dist.get_world_size(tp_group),
        temperature=temperature,
        ignore_index=ignore_index,
        outputs=("log_prob", "entropy") if return_entropy else ("log_prob",),
    )
    return scaled_outputs(output)


def liger_tvd(
    input: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:
    """:func:`liger_multi.ops.tvd` of probabilities; ``none`` is a number an element, in fp32.

    The teacher gets no gradient.
    """
    target = target.detach()
    checks.one_of("liger_tvd", "reduction", reduction, ("none", "sum", "mean", "batchmean"))
    if reduction == "none":
        elements = 0.5 * (wide(input) - wide(target)).abs()
        if shift_labels is None:
            return elements
        return torch.where((shift_labels != ignore_index).unsqueeze(-1), elements, 0)
    mean = "sum" if reduction == "sum" else "mean"
    loss = ops.tvd(input, target, shift_labels, ignore_index=ignore_index, reduction=mean)
    return loss / input.shape[-1] if reduction == "mean" else loss


def fused_selective_log_softmax(
    logits: Tensor, input_ids: Tensor, temperature: float = 0.9, mask: Tensor | None = None
) -> Tensor:
    """Log-probabilities ``(B, L)`` of tokens, without gradients, of ``L + 1`` logits.

    The last logit is not read. Of longer ids and masks the last ``L`` count.
    """
    length = logits.shape[1] - 1
    if not 0 <= length <= input_ids.shape[1]:
        raise ValueError(
            f"fused_selective_log_softmax: logits {tuple(logits.shape)} are those of L tokens and "
            f"one more, input_ids {tuple(input_ids.shape)} have fewer than L"
        )
    logits, ids = logits[:, :-1], input_ids[:, input_ids.shape[1] - length :]
    if mask is not None:
        ids = ids.masked_fill(mask[:, mask.shape[1] - length :] == 0, -100)
    with torch.no_grad():
        output = ops.token_log_prob(logits, ids, temperature=temperature, outputs=("log_prob",))
    assert output.log_prob is not None
    return output.log_prob


# --- operators as they are, whose arguments have other names and another order ---

liger_layer_norm = adapter(ops.layer_norm, "X:x W:weight B:bias eps")
liger_group_norm = adapter(
    ops.group_norm,
    "X:x affine_scaling_weight:weight affine_shifting_bias:bias num_channels num_groups eps",
)
liger_dyt = adapter(ops.dyt, "x alpha gamma:weight beta:bias")
liger_softmax = adapter(ops.softmax, "x")
liger_sparsemax = adapter(ops.sparsemax, "input:x dim")
liger_relu_squared = adapter(ops.relu_squared, "x")
liger_attn_res = adapter(ops.attention_residuals, "V:blocks w_query:query w_norm:weight eps")
liger_fused_neighborhood_attention = adapter(
    ops.neighborhood_attention, "query:q key:k value:v kernel_size dilation scale"
)
liger_mhc_pre = adapter(ops.hyper_connections_pre, "x h_pre:pre")
liger_mhc_post_res = adapter(ops.hyper_connections_post, "x f_out:out h_post:post h_res:mix")


# --- norms and activations: results have the dtype of the first input, whatever the weights' ---


def _with_dtype(rotated: tuple[Tensor, Tensor], q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return rotated[0].to(q.dtype), rotated[1].to(k.dtype)


def liger_rms_norm(
    X: Tensor,
    W: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str | int = "llama",
    in_place: bool = True,
    row_mode: bool | None = None,
) -> Tensor:
    """:func:`liger_multi.ops.rms_norm`."""
    casting = casting_of("rms_norm", casting_mode)
    return ops.rms_norm(X, W, eps, offset=offset, casting=casting).to(X.dtype)


def liger_fused_add_rms_norm(
    X: Tensor,
    R: Tensor,
    W: Tensor,
    eps: float,
    offset: float = 0.0,
    casting_mode: str | int = "llama",
    in_place: bool = True,
) -> ops.FusedAddRMSNormOutput:
    """:func:`liger_multi.ops.fused_add_rms_norm`."""
    casting = casting_of("fused_add_rms_norm", casting_mode)
    out = ops.fused_add_rms_norm(X, R, W, eps, offset=offset, casting=casting)
    return type(out)(*_with_dtype(out, X, X))


def liger_modulated_rms_norm(
    X: Tensor,
    W: Tensor | None,
    scale: Tensor,
    shift: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str | int = "llama",
    in_place: bool = True,
) -> Tensor:
    """:func:`liger_multi.ops.modulated_rms_norm`; the result has the dtype of X."""
    casting = casting_of("modulated_rms_norm", casting_mode)
    out = ops.modulated_rms_norm(X, scale, shift, W, eps, offset=offset, casting=casting)
    return out.to(X.dtype)


def liger_poly_norm(
    X: Tensor, W: Tensor, B: Tensor, eps: float = 1e-6, in_place: bool = True
) -> Tensor:
    """:func:`liger_multi.ops.poly_norm`."""
    return ops.poly_norm(X, W, B.reshape(1), eps).to(X.dtype)


def liger_swiglu(
    a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> Tensor:
    """:func:`liger_multi.ops.swiglu`."""
    out = ops.swiglu(a, b, gate_multiplier=gate_multiplier, down_multiplier=down_multiplier)
    return out.to(a.dtype)


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    """:func:`liger_multi.ops.geglu`, the tanh form."""
    return ops.geglu(a, b, approximate="tanh").to(a.dtype)


# --- rotary embeddings: new tensors come back, and q and k stay what they are ---


def liger_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Any = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`liger_multi.ops.rope`; of an odd number of channels, the last one passes through.

    ``position_ids`` is not read, as in Liger-Kernel. Angles get no gradient.
    """
    cos, sin = cos.detach(), sin.detach()
    width = min(cos.shape[-1], q.shape[-1])
    if rotary_dim is None and (width % 2 or cos.shape[-1] > width):
        rotary_dim = width // 2 * 2  # angles are those of the first pairs
        cos, sin = cos[..., : width // 2], sin[..., : width // 2]
    rotated = (
        (q, k)
        if rotary_dim == 0
        else ops.rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, rotary_dim=rotary_dim)
    )
    return _with_dtype(rotated, q, k)


liger_rope = liger_rotary_pos_emb


def liger_rotary_pos_emb_vision(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """:func:`liger_multi.ops.rope` of ``(S, H, D)`` in fp32, rounded at the end."""
    return _with_dtype(
        ops.rope(q.float(), k.float(), cos.float(), sin.float(), unsqueeze_dim=-2), q, k
    )


def liger_multimodal_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Any, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """:func:`liger_multi.ops.rope_multimodal`, sections one after another."""
    sections, angles = list(mrope_section), (cos.detach(), sin.detach())
    return _with_dtype(
        ops.rope_multimodal(q, k, *angles, sections, unsqueeze_dim=unsqueeze_dim), q, k
    )


liger_qwen2vl_mrope = liger_multimodal_rotary_pos_emb


def liger_llama4_text_rotary_pos_emb(
    xq: Tensor, xk: Tensor, freqs_cis: Tensor
) -> tuple[Tensor, Tensor]:
    """:func:`liger_multi.ops.rope_complex`."""
    return _with_dtype(ops.rope_complex(xq, xk, freqs_cis.detach()), xq, xk)


def liger_llama4_vision_rotary_pos_emb(
    query: Tensor, key: Tensor, freqs_ci: Tensor
) -> tuple[Tensor, Tensor]:
    """:func:`liger_multi.ops.rope_complex` of images, whose angles may have an axis of heads."""
    angles = freqs_ci.squeeze(-2) if freqs_ci.ndim == 3 else freqs_ci
    return _with_dtype(ops.rope_complex(query, key, angles), query, key)


def apply_liger_llama4_rope_full(modeling_module: Any) -> None:
    """Put both functions in the place of those of a modeling file, for all of its models.

    Nothing takes this back. ``liger_multi.patch`` changes one model.
    """
    modeling_module.apply_rotary_emb = liger_llama4_text_rotary_pos_emb
    modeling_module.vision_apply_rotary_emb = liger_llama4_vision_rotary_pos_emb


def liger_rotary_pos_emb_gpt_oss(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """:func:`liger_multi.ops.rope`, an angle a pair."""
    return _with_dtype(ops.rope(q, k, cos, sin, rotary_dim=2 * cos.shape[-1]), q, k)


# --- blocks: attention and residual streams ---


def _single(size: Any) -> Any:
    """One number for two equal ones."""
    return size[0] if isinstance(size, (tuple, list)) and len({*size}) == 1 else size


def liger_multi_token_attention(
    scores: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    sparse: bool = False,
) -> Tensor:
    """:func:`liger_multi.ops.multi_token_attention`."""
    return ops.multi_token_attention(
        scores,
        weight,
        bias,
        stride=_single(stride),
        padding=_single(padding),
        dilation=_single(dilation),
        groups=groups,
        sparse=sparse,
    )


def liger_mhc_coeffs(
    x: Tensor,
    phi: Tensor,
    b: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    allow_fp32: bool = False,
    tmax: int = 20,
    rms_eps: float = 1e-6,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`liger_multi.ops.hyper_connections`, with an eps of its own for the first output."""
    if x.dtype == torch.float32 and not allow_fp32:
        raise AssertionError(
            "LigerMHCCoeffsFunction: x must be float16 or bfloat16, got float32; "
            "allow_fp32=True takes it"
        )
    scale = torch.stack([a.reshape(()) for a in (alpha_pre, alpha_post, alpha_res)])
    pre, post, mix = ops.hyper_connections(
        x,
        phi.mT,
        b,
        scale,
        iterations=tmax,
        rms_eps=rms_eps,
        eps=sinkhorn_eps,
        post_scale=post_mult,
    )
    return pre + (pre_eps - sinkhorn_eps), post, mix


def liger_mhc_apply(
    x: Tensor,
    f_out: Tensor,
    h_pre: Tensor,
    h_post: Tensor,
    h_res: Tensor,
    *,
    return_x_in: bool = False,
) -> Any:
    """The streams after a layer's result, and with ``return_x_in`` the layer's input too."""
    out = liger_mhc_post_res(x, f_out, h_post, h_res)
    return (out, liger_mhc_pre(x, h_pre)) if return_x_in else out


def liger_mhc_forward(
    x: Tensor,
    layer: Callable[[Tensor], Tensor],
    phi: Tensor,
    b: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    *,
    allow_fp32: bool = False,
    tmax: int = 20,
    rms_eps: float = 1e-6,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
    return_coeffs: bool = False,
) -> Any:
    """Coefficients, the layer on the mixed streams, and the streams after it."""
    coefficients = liger_mhc_coeffs(
        x,
        phi,
        b,
        alpha_pre,
        alpha_post,
        alpha_res,
        allow_fp32=allow_fp32,
        tmax=tmax,
        rms_eps=rms_eps,
        pre_eps=pre_eps,
        sinkhorn_eps=sinkhorn_eps,
        post_mult=post_mult,
    )
    h_pre, h_post, h_res = coefficients
    out = liger_mhc_post_res(x, layer(liger_mhc_pre(x, h_pre)), h_post, h_res)
    return (out, coefficients) if return_coeffs else out
