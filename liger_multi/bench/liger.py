"""How the benchmark calls the operators of Liger-Kernel, by ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from liger_multi.bench import (
    divergences,
    formulas_attention,
    formulas_experts,
    formulas_norms,
    formulas_rope,
)
from liger_multi.bench.formulas import Formula

LIGER_MODULE = "liger_kernel.transformers.functional"


def _liger_mlp(swiglu: Formula) -> Formula:
    def mlp(x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
        product = swiglu(F.linear(x, gate_weight), F.linear(x, up_weight))
        return F.linear(product, down_weight)

    return mlp


def _liger_log_prob(nll: Formula) -> Formula:
    """Their loss of a token is our log-probability with another sign."""

    def call(
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        *,
        temperature: float = 1.0,
        outputs: tuple[str, ...] = ("log_prob",),
    ) -> Any:
        found = nll(hidden, weight, target, temperature, -100, 1, "entropy" in outputs)
        return (-found[0], *found[1:]) if isinstance(found, tuple) else -found

    return call


# Names in LIGER_MODULE, or of another module and what stands in it, and how to call them with our
# arguments.
LIGER: dict[str, tuple[str, Callable[[Formula], Formula]]] = {
    **formulas_attention.LIGER,
    **formulas_experts.LIGER,
    **formulas_norms.LIGER,
    **formulas_rope.LIGER,
    "rms_norm": (
        "liger_rms_norm",
        lambda f: (
            lambda x, weight, eps=1e-6, *, offset=0.0, casting="llama": f(
                x, weight, eps, offset, casting
            )
        ),
    ),
    "fused_add_rms_norm": (
        "liger_fused_add_rms_norm",
        lambda f: (
            lambda x, residual, weight, eps=1e-6, *, offset=0.0, casting="llama": f(
                x, residual, weight, eps, offset, casting
            )
        ),
    ),
    "layer_norm": (
        "liger_layer_norm",
        lambda f: lambda x, weight, bias, eps=1e-5: f(x, weight, bias, eps),
    ),
    "swiglu": ("liger_swiglu", lambda f: lambda gate, up: f(gate, up)),
    "swiglu_packed": (
        "liger_kernel.ops:LigerFusedGateUpSiLUMulFunction.apply",
        lambda f: lambda gate_up: f(gate_up),
    ),
    "gated_mlp": ("liger_swiglu", _liger_mlp),
    "geglu": ("liger_geglu", lambda f: lambda gate, up: f(gate, up)),
    "relu_squared": (
        "liger_kernel.ops:LigerReLUSquaredFunction.apply",
        lambda f: lambda x: f(x),
    ),
    "rope": (
        "liger_kernel.transformers.rope:liger_rotary_pos_emb",
        lambda f: lambda q, k, cos, sin: f(q, k, cos, sin),
    ),
    "cross_entropy": ("liger_cross_entropy", lambda f: lambda logits, target: f(logits, target)),
    "cross_entropy_inplace": (
        "liger_cross_entropy",
        lambda f: lambda logits, target: f(logits, target),
    ),
    "fused_linear_cross_entropy": (
        "liger_fused_linear_cross_entropy",
        lambda f: lambda hidden, weight, target, bias=None: f(hidden, weight, target, bias),
    ),
    "fused_linear_log_prob": (
        "liger_kernel.ops:LigerFusedLinearScaledCrossEntropyFunction.apply",
        _liger_log_prob,
    ),
    "softmax": ("liger_softmax", lambda f: lambda x: f(x)),
    "multi_token_attention": (
        "liger_multi_token_attention",
        lambda f: lambda scores, weight, padding=0: f(scores, weight, None, 1, padding),
    ),
    "sparsemax": ("liger_sparsemax", lambda f: lambda x: f(x, -1)),
    "embedding": (
        "liger_kernel.ops.experimental.embedding:LigerEmbeddingFunction.apply",
        lambda f: lambda index, weight: f(weight, index),
    ),
    **divergences.LIGER,
}
