"""Experts and hyper-connections, built from the configuration of a Hugging Face model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_multi import checks, ops
from liger_multi.errors import unknown
from liger_multi.nn._shared import size

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def _first(module: str, config: Any, *names: str) -> Any:
    """The first of the attributes that a configuration has."""
    for name in names:
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    raise TypeError(
        f"{module}: config must be the configuration of a model, with {' or '.join(names)}, got "
        f"{checks.describe(config)}"
    )


class Experts(nn.Module):
    """All experts of a layer as one operator; the parameters are not initialized.

    Like:
        transformers ``MixtralExperts``, ``Qwen3MoeExperts``.

    Operator:
        fused_moe

    Args:
        config: Configuration of a model: ``hidden_size``, ``num_experts`` or
            ``num_local_experts`` or ``n_routed_experts``, ``moe_intermediate_size`` or
            ``intermediate_size``, and ``hidden_act`` (silu, swish or a gelu).
        device: Of the parameters.
        dtype: Of the parameters.
    """

    def __init__(
        self,
        config: Any,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        counts = ("num_experts", "num_local_experts", "n_routed_experts")
        sizes = ("moe_intermediate_size", "intermediate_size")
        self.num_experts = count = size(name, "num_experts", _first(name, config, *counts))
        self.intermediate_dim = inner = size(name, sizes[0], _first(name, config, *sizes))
        hidden = _first(name, config, "hidden_size")
        self.hidden_dim = hidden = size(name, "hidden_size", hidden)
        act = _first(name, config, "hidden_activation", "hidden_act")
        if act not in ACTIVATIONS:
            raise ValueError(f"{name}: {unknown('activation', str(act), ACTIVATIONS)}")
        self.config, self.activation = config, ACTIVATIONS[act]
        kind: Any = {"device": device, "dtype": dtype}
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden, **kind))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner, **kind))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of what each token's experts make of it."""
        return ops.fused_moe(
            hidden_states,
            self.gate_up_proj,
            self.down_proj,
            top_k_index,
            top_k_weights,
            activation=self.activation,
        )


class HyperConnection(nn.Module):
    """Residual streams into a block, and out of it; the parameters are not initialized.

    Like:
        transformers ``DeepseekV4HyperConnection``, which has no ``expand``.

    Operator:
        hyper_connections

    Args:
        config: Configuration of a model: ``hc_mult``, ``hc_sinkhorn_iters``, ``hc_eps``,
            ``rms_norm_eps`` and ``hidden_size``.
        device: Of the parameters.
        dtype: Of the parameters.
    """

    def __init__(
        self,
        config: Any,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        count = size(name, "hc_mult", _first(name, config, "hc_mult"))
        hidden = size(name, "hidden_size", _first(name, config, "hidden_size"))
        self.hc_mult = count
        self.hc_sinkhorn_iters = _first(name, config, "hc_sinkhorn_iters")
        self.hc_eps, self.rms_eps = _first(name, config, "hc_eps"), config.rms_norm_eps
        outs, kind = count * (count + 2), {"device": device, "dtype": dtype}
        self.fn = nn.Parameter(torch.empty((outs, count * hidden), **kind))  # type: ignore[arg-type]
        self.base = nn.Parameter(torch.empty((outs,), **kind))  # type: ignore[arg-type]
        self.scale = nn.Parameter(torch.empty((3,), **kind))  # type: ignore[arg-type]

    def forward(self, hidden_streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Coefficients post and mix, and what the block is given."""
        pre, post, mix = ops.hyper_connections(
            hidden_streams,
            self.fn,
            self.base,
            self.scale,
            iterations=self.hc_sinkhorn_iters,
            rms_eps=self.rms_eps,
            eps=self.hc_eps,
        )
        return post, mix, ops.hyper_connections_pre(hidden_streams, pre)

    @staticmethod
    def expand(hidden_streams: Tensor, output: Tensor, post: Tensor, mix: Tensor) -> Tensor:
        """The streams after the block; mix acts transposed, as in DeepSeek-V4."""
        return ops.hyper_connections_post(hidden_streams, output, post, mix.mT)
