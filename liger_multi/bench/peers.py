"""Peers of every operator by name: eager PyTorch, its fused kernels, and other packages.

A peer takes the operator's tensors and those of its options that it supports, by name. Where a
sample sets an option that a peer does not have, the provider is skipped with that reason.

Eager forms that differ from the formula in fp64 stand here, each with its reason. They are timed as
the provider ``torch``. Of every other operator, the ``formula`` of its contract is timed itself.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi import ops
from liger_multi._torch_private import grouped_mm
from liger_multi.ops._formulas import Rows, jsd_rows, kl_rows, rows_of_heads, tvd_rows
from liger_multi.ops.attention import Window, of_all_heads
from liger_multi.testing.checks import FORMULAS, Formula

# --- eager forms ---


def _cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """PyTorch divides by zero where every target is ignored; the formula gives 0."""
    wide = logits.float()
    return F.cross_entropy(
        wide,
        target,
        None if weight is None else weight.float(),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """The same."""
    logits = F.linear(hidden, weight, bias).float()
    return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)


def _token_log_prob(
    logits: Tensor, target: Tensor, *, outputs: tuple[str, ...] = ("log_prob",)
) -> Any:
    """Trainers look for no ignored targets; the formula does."""
    log_p = torch.log_softmax(logits.float(), -1)
    log_prob = log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return (log_prob, -(log_p.exp() * log_p).sum(-1)) if "entropy" in outputs else log_prob


def _linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    outputs: tuple[str, ...] = ("log_prob",),
) -> Any:
    """The same."""
    log_p = torch.log_softmax((hidden @ weight.mT).float() / temperature, -1)
    log_prob = log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return (log_prob, -(log_p.exp() * log_p).sum(-1)) if "entropy" in outputs else log_prob


def _selective(logits: Tensor, index: Tensor, *, temperature: float = 1.0) -> Tensor:
    """The same."""
    log_p = torch.log_softmax(logits.float() / temperature, -1)
    classes = index if index.ndim == logits.ndim else index.unsqueeze(-1)
    return log_p.gather(-1, classes).view(index.shape)


def _sparsemax(x: Tensor) -> Tensor:
    """ReLU passes a gradient to an entry at the threshold; the formula does not."""
    z = x.float()
    fallen = z.sort(-1, descending=True).values
    count = torch.arange(1, z.shape[-1] + 1, device=z.device)
    total = fallen.cumsum(-1) - 1
    k = (fallen * count > total).sum(-1, keepdim=True)
    return F.relu(z - total.gather(-1, k - 1) / k).to(x.dtype)


def _of_heads(rows_of: Rows) -> Formula:
    """PyTorch does not clamp the count of targets; the formula gives 0 where all are ignored."""

    def call(
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        target: Tensor,
    ) -> Tensor:
        rows = rows_of_heads(rows_of, hidden, weight, teacher_hidden, teacher_weight)
        valid = target != -100
        return torch.where(valid, rows, 0).sum() / valid.sum()

    return call


def _neighborhood(
    q: Tensor, k: Tensor, v: Tensor, kernel_size: int = 7, dilation: int = 1
) -> Tensor:
    """Masked scores of L x L; the formula gathers the few keys and keeps fp64 small."""
    position = torch.arange(q.shape[2], device=q.device)
    distance = position[:, None] - position
    visible = (distance.abs() <= kernel_size // 2 * dilation) & (distance % dilation == 0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def _grouped_moe(
    x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, index: Tensor, routing: Tensor
) -> Tensor:
    """Grouped GEMMs between gathered rows, as Hugging Face; the formula is dense."""
    experts, top_k = gate_up_weight.shape[0], index.shape[-1]
    flat = index.view(-1)
    ids, order = torch.sort(flat)
    expert_ids = torch.arange(experts, device=x.device, dtype=ids.dtype)
    offsets = torch.searchsorted(ids, expert_ids, right=True, out_int32=True)
    gate, up = grouped_mm(x[order // top_k], gate_up_weight.mT, offs=offsets).chunk(2, -1)
    rows = grouped_mm(F.silu(gate) * up, down_weight.mT, offs=offsets)
    rows = rows * routing.view(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(flat.shape[0], device=x.device)
    return rows[inverse].view(*index.shape, -1).sum(-2).to(x.dtype)


def _grouped_lora_moe(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    index: Tensor,
    routing: Tensor,
    gate_up_a: Tensor,
    gate_up_b: Tensor,
    down_a: Tensor,
    down_b: Tensor,
    *,
    gate_up_scale: float = 1.0,
    down_scale: float = 1.0,
) -> Tensor:
    """As PEFT's ``target_parameters``: adapters added to all weights, then grouped GEMMs."""
    gate_up = gate_up_weight + (gate_up_scale * (gate_up_b @ gate_up_a)).to(gate_up_weight.dtype)
    down = down_weight + (down_scale * (down_b @ down_a)).to(down_weight.dtype)
    return _grouped_moe(x, gate_up, down, index, routing)


EAGER: dict[str, Formula] = {
    # all heads at once; the formula takes one at a time where scores are many
    "attention": of_all_heads,
    "cross_entropy": _cross_entropy,
    "cross_entropy_inplace": _cross_entropy,
    "fused_linear_cross_entropy": _linear_cross_entropy,
    "fused_linear_jsd": _of_heads(jsd_rows(0.5)),
    "fused_linear_kl_div": _of_heads(kl_rows),
    "fused_linear_log_prob": _linear_log_prob,
    "fused_linear_tvd": _of_heads(tvd_rows),
    "fused_moe": _grouped_moe,
    "lora_moe": _grouped_lora_moe,
    "neighborhood_attention": _neighborhood,
    "selective_log_softmax": _selective,
    "sparsemax": _sparsemax,
    "token_log_prob": _token_log_prob,
}


# --- attention: each fused kernel of PyTorch, and FlexAttention ---


def _sides(window: Window, causal: bool) -> tuple[int, int]:
    left, right = (window - 1, window - 1) if isinstance(window, int) else window or (-1, -1)
    return left, 0 if causal else right


def _fused(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _sdpa_of(kernel: str) -> Formula:
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

    def visible(b: Any, h: Any, i: Tensor, j: Tensor) -> Tensor:
        is_visible = (j >= i - left if left >= 0 else j >= 0) & (
            j <= i + right if right >= 0 else j >= 0
        )
        if window is not None and global_tokens:
            is_visible = is_visible | (j < global_tokens) | (i < global_tokens)
        return is_visible & (j <= i) if causal else is_visible

    module = importlib.import_module("torch.nn.attention.flex_attention")
    return module.create_block_mask(visible, None, None, queries, keys, device=device)


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
        q,
        k,
        v,
        score_mod=None if softcap is None else capped,
        block_mask=mask if masked else None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_lse=True,
    )
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


ATTENTION_PEERS: dict[str, dict[str, Formula]] = {
    "attention": {
        "aten": _fused,
        "cudnn": _sdpa_of("CUDNN_ATTENTION"),
        "flash": _sdpa_of("FLASH_ATTENTION"),
        "efficient": _sdpa_of("EFFICIENT_ATTENTION"),
        "flex": _flex,
    },
    "neighborhood_attention": {"flex": _neighborhood_flex},
}


# --- peers ---


def _token_log_prob_aten(
    logits: Tensor, target: Tensor, *, outputs: tuple[str, ...] = ("log_prob",)
) -> Any:
    log_prob = -F.cross_entropy(logits, target, reduction="none")
    return (
        (log_prob, torch.special.entr(logits.softmax(-1)).sum(-1)) if len(outputs) > 1 else log_prob
    )


def _linear_log_prob_aten(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    outputs: tuple[str, ...] = ("log_prob",),
) -> Any:
    z = hidden @ weight.mT / temperature
    log_prob = -F.cross_entropy(z, target, reduction="none")
    return (
        (log_prob, torch.special.entr(z.softmax(-1)).sum(-1)) if "entropy" in outputs else log_prob
    )


def _selective_aten(logits: Tensor, index: Tensor, *, temperature: float = 1.0) -> Tensor:
    z = logits.float() / temperature
    classes = index if index.ndim == logits.ndim else index.unsqueeze(-1)
    return (z.gather(-1, classes) - z.logsumexp(-1, keepdim=True)).view(index.shape)


def _kl_aten(
    student: Tensor, teacher: Tensor, *, form: str = "log_prob", teacher_form: str = "log_prob"
) -> Tensor:
    log_q = student.log_softmax(-1) if form == "logits" else student
    log_p = teacher.log_softmax(-1) if teacher_form == "logits" else teacher
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


@functools.cache
def _experts_module(implementation: str, experts: int, hidden: int, inner: int) -> Any:
    """Stacked experts of transformers, without weights."""
    transformers = importlib.import_module("transformers")
    module = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = transformers.Qwen3MoeConfig(
        num_experts=experts, hidden_size=hidden, moe_intermediate_size=inner
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        return module.Qwen3MoeExperts(config)


def _transformers_moe(implementation: str) -> Formula:
    """The experts of transformers by one of its implementations."""

    def call(
        x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, index: Tensor, routing: Tensor
    ) -> Tensor:
        experts, hidden, inner = down_weight.shape
        module = _experts_module(implementation, experts, hidden, inner)
        weights = {"gate_up_proj": gate_up_weight, "down_proj": down_weight}
        return torch.func.functional_call(module, weights, (x, index, routing))  # type: ignore[no-any-return]

    return call


# Peers of recurrences: transformers computes in chunks, where formulas go token by token.


def _modeling(model: str, name: str) -> Any:
    """A function of a modeling file of transformers."""
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    return getattr(module, name)


def missing(op: str) -> str | None:
    """The function of a recurrence that the installed transformers lacks, or None."""
    if op not in _SCANNED_BY:
        return None
    model, name = _SCANNED_BY[op]
    try:
        _modeling(model, name)
    except (ImportError, AttributeError):
        return f"{model}.{name}"
    return None


def _delta_rule(op: str, fla: str) -> dict[str, Formula]:
    """A delta rule of fla-core, and that of transformers, which wants as many key heads."""

    def of_transformers(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, qk_l2norm: bool = False
    ) -> Tensor:
        group = v.shape[2] // q.shape[2]
        q, k = (x if group == 1 else x.repeat_interleave(group, 2) for x in (q, k))
        function = _modeling(*_SCANNED_BY[op])
        return function(q, k, v, g, beta, use_qk_l2norm_in_kernel=qk_l2norm)[0]  # type: ignore[no-any-return]

    return {
        "fla": lambda q, k, v, g, beta, *, qk_l2norm=False: _function_of("fla.ops", fla)(
            q, k, v, g, beta, use_qk_l2norm_in_kernel=qk_l2norm
        )[0],
        "transformers": of_transformers,
    }


_SCANNED_BY = {
    "gated_delta_rule": ("qwen3_next", "torch_chunk_gated_delta_rule"),
    "kimi_delta_attention": ("kimi_linear", "chunk_kimi_delta_attention"),
    "selective_scan": ("mamba", "mamba_selective_scan"),
    "ssd_scan": ("mamba2", "mamba2_chunk_scan"),
}
"""Modeling files and their functions."""


def _function_of(package: str, name: str) -> Any:
    """A function of another package, by its module and name."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(f"{package}.{module}"), function)


class _QuackLayerNorm(torch.autograd.Function):
    """Join its separate forward and backward kernels; weights are cast to fp32, as they expect."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """The result, with what backward reads kept."""
        wide = weight.float()
        call = _function_of("quack", "rmsnorm:layernorm_fwd")
        y, rstd, mean = call(x, wide, bias.float(), eps, return_rstd=True, return_mean=True)
        ctx.save_for_backward(x, wide, rstd, mean)
        ctx.dtypes = weight.dtype, bias.dtype
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Gradients of x, weight and bias."""
        x, wide, rstd, mean = ctx.saved_tensors
        dx, dweight, dbias = _function_of("quack", "rmsnorm:layernorm_bwd")(x, wide, dy, rstd, mean)
        return dx, dweight.to(ctx.dtypes[0]), dbias.to(ctx.dtypes[1]), None


def _quack_linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    call = _function_of("quack", "linear_cross_entropy:chunked_linear_cross_entropy")
    # 0.6.5 refuses GEMMs with as many rows as columns, which its 4096 rows make of 4096 channels
    rows = {"chunk_size": 8192} if hidden.shape[-1] == 4096 else {}
    return call(hidden, weight, target, **rows)  # type: ignore[no-any-return]


# --- lower bounds: the GEMMs alone ---


class _Products(torch.autograd.Function):
    """The three GEMMs of a linear loss and nothing else."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        """Logits, kept as if they were their own gradient."""
        logits = hidden @ weight.mT
        ctx.save_for_backward(hidden, weight, logits)
        return logits.new_ones((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, Tensor]:
        """GEMMs with the shapes of both gradients."""
        hidden, weight, logits = ctx.saved_tensors
        return logits @ weight, logits.mT @ hidden


def _apply(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)


def _log_prob_products(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    outputs: tuple[str, ...] = ("log_prob",),
) -> Any:
    log_prob = _apply(_Products, hidden, weight).expand(target.shape)
    return (log_prob,) * len(outputs) if len(outputs) > 1 else log_prob


def _pair_products(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, target: Tensor
) -> Any:
    """The four GEMMs of a divergence of two heads and nothing else."""
    with torch.no_grad():
        _ = teacher_hidden @ teacher_weight.mT  # kept while the student's logits are made
    return _apply(_Products, hidden, weight)


EXPERTS = {
    "transformers-grouped": "grouped_mm",
    "transformers-batched": "batched_mm",
    "transformers-loop": "eager",
}
"""Implementations of experts in transformers, by provider."""
_PAIR_PRODUCTS: dict[str, Formula] = {"products": _pair_products}
_INPLACE = {"cross_entropy": False, "cross_entropy_inplace": True}
_PEERS: dict[str, dict[str, Formula]] = {
    **ATTENTION_PEERS,
    **{
        op: {
            "aten": lambda logits, target, *, ignore_index=-100, reduction="mean": F.cross_entropy(
                logits, target, ignore_index=ignore_index, reduction=reduction
            ),
            "quack": lambda logits, target, inplace=inplace: _function_of(
                "quack", "cross_entropy:cross_entropy"
            )(logits, target, inplace_backward=inplace),
        }
        for op, inplace in _INPLACE.items()
    },
    "causal_conv1d": {
        "fla": lambda x, weight, *, activation=None: _function_of(
            "fla.modules", "causal_conv1d:causal_conv1d"
        )(x, weight, activation=activation)[0]
    },
    "fused_add_rms_norm": {
        "aten": lambda x, residual, weight=None, eps=1e-6: (
            F.rms_norm(total := x + residual, x.shape[-1:], weight, eps),
            total,
        ),
        "quack": lambda x, residual, weight=None, eps=1e-6: _function_of(
            "quack", "rmsnorm:rmsnorm"
        )(x, weight, residual=residual, eps=eps, prenorm=True),
    },
    "fused_linear_cross_entropy": {
        "ours-512MiB": lambda hidden, weight, target: ops.fused_linear_cross_entropy(
            hidden, weight, target, chunk="512MiB"
        ),
        "ours-lean": lambda hidden, weight, target: ops.fused_linear_cross_entropy(
            hidden, weight, target, chunk="lean"
        ),
        "aten": lambda hidden, weight, target, bias=None, *, ignore_index=-100, reduction="mean": (
            F.cross_entropy(
                F.linear(hidden, weight, bias),
                target,
                ignore_index=ignore_index,
                reduction=reduction,
            )
        ),
        "torch-fused": lambda hidden, weight, target: F.linear_cross_entropy(
            hidden, weight, target, options=torch.nn.LinearCrossEntropyOptions()
        ),
        "cce": lambda hidden, weight, target: importlib.import_module(
            "cut_cross_entropy"
        ).linear_cross_entropy(hidden, weight, target),
        "quack": _quack_linear_cross_entropy,
        "products": lambda hidden, weight, target: _apply(_Products, hidden, weight),
    },
    "fused_linear_jsd": _PAIR_PRODUCTS,
    "fused_linear_kl_div": _PAIR_PRODUCTS,
    "fused_linear_log_prob": {"aten": _linear_log_prob_aten, "products": _log_prob_products},
    "fused_linear_tvd": _PAIR_PRODUCTS,
    "fused_moe": {name: _transformers_moe(by) for name, by in EXPERTS.items()},
    "gated_delta_rule": _delta_rule("gated_delta_rule", "gated_delta_rule:chunk_gated_delta_rule"),
    "group_norm": {
        "aten": lambda x, num_groups, weight=None, bias=None, eps=1e-5: F.group_norm(
            x, num_groups, weight, bias, eps
        )
    },
    "kimi_delta_attention": _delta_rule("kimi_delta_attention", "kda:chunk_kda"),
    "kl_div": {"aten": _kl_aten},
    "kl_div_inplace": {"aten": _kl_aten},
    "layer_norm": {
        "aten": lambda x, weight=None, bias=None, eps=1e-5: F.layer_norm(
            x, x.shape[-1:], weight, bias, eps
        ),
        "quack": lambda x, weight, bias, eps=1e-5: _apply(_QuackLayerNorm, x, weight, bias, eps),
    },
    "rms_norm": {
        "aten": lambda x, weight=None, eps=1e-6: F.rms_norm(x, x.shape[-1:], weight, eps),
        "quack": lambda x, weight=None, eps=1e-6, *, offset=0.0: _function_of(
            "quack", "rmsnorm:rmsnorm"
        )(x, weight, eps=eps, weight_offset=offset),
    },
    "selective_log_softmax": {"aten": _selective_aten},
    "selective_scan": {
        "transformers": lambda u, delta, A, B, C, *, D, z, delta_bias, delta_softplus=False: (
            _modeling(*_SCANNED_BY["selective_scan"])(
                *(u.mT, delta.mT, A, B.mT, C.mT),
                D=D,
                z=z.mT,
                delta_bias=delta_bias,
                delta_softplus=delta_softplus,
            ).mT
        )
    },
    "softmax": {"quack": lambda x: _function_of("quack", "softmax:softmax")(x)},
    "ssd_scan": {
        "transformers": lambda x, dt, A, B, C, *, D, dt_bias, dt_softplus=False: _modeling(
            *_SCANNED_BY["ssd_scan"]
        )(x, dt, A, B, C, 256, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus)
    },
    "token_log_prob": {"aten": _token_log_prob_aten},
}
TABLE: dict[str, dict[str, Formula]] = {
    op: {"torch": EAGER.get(op, formula), **_PEERS.get(op, {})} for op, formula in FORMULAS.items()
}
"""Eager PyTorch and peers by operator."""
FLOORS = ("products",)
PACKAGES = {
    "cce": "cut_cross_entropy",
    "fla": "fla",
    "quack": "quack",
    **dict.fromkeys((*EXPERTS, "transformers"), "transformers"),
}
"""Packages that peers import."""
