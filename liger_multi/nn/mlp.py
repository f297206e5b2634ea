"""Gated MLPs, built from the configuration of a Hugging Face model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_multi import checks, ops
from liger_multi.errors import unknown
from liger_multi.nn._shared import size

SILU = {"silu": "silu", "swish": "silu"}
GELU = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}


class _GatedMLP(nn.Module):
    """The layers that a configuration asks for; the operator stands in ``forward``."""

    ACTIVATIONS = SILU
    PACKED = False

    def __init__(
        self,
        config: Any,
        intermediate_size: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        for attribute in ("hidden_size", "intermediate_size"):
            if not hasattr(config, attribute):
                raise TypeError(
                    f"{name}: config must be the configuration of a model, with a hidden_size and "
                    f"an intermediate_size, got {checks.describe(config)}"
                )
        act = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
        if act not in self.ACTIVATIONS:
            raise ValueError(f"{name}: {unknown('activation', str(act), self.ACTIVATIONS)}")
        self.config, self.activation = config, self.ACTIVATIONS[act]
        wide = config.intermediate_size if intermediate_size is None else intermediate_size
        self.hidden_size = hidden = size(name, "hidden_size", config.hidden_size)
        self.intermediate_size = wide = size(name, "intermediate_size", wide)

        def linear(inner: int, outer: int) -> nn.Linear:
            bias = bool(getattr(config, "mlp_bias", False))
            return nn.Linear(inner, outer, bias=bias, device=device, dtype=dtype)

        if self.PACKED:
            self.gate_up_proj = linear(hidden, 2 * wide)
        else:
            self.gate_proj, self.up_proj = linear(hidden, wide), linear(hidden, wide)
        self.down_proj = linear(wide, hidden)


class SwiGLUMLP(_GatedMLP):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``, its activation and product as one operator.

    Like:
        transformers ``LlamaMLP``, ``MistralMLP``, ``Qwen2MLP``, ``Qwen3MLP``, ``FalconH1MLP``.

    Operator:
        swiglu

    Args:
        config: Configuration of a model: ``hidden_size``, ``intermediate_size``, ``hidden_act``
            (silu or swish) and, if it has them, ``mlp_bias`` and ``mlp_multipliers``, of the gate
            and of what comes out.
        intermediate_size: In place of that of the configuration.
        device: Of the parameters.
        dtype: Of the parameters.
    """

    @property
    def gate_multiplier(self) -> float:
        """By what the gate is multiplied before its activation."""
        return float(getattr(self.config, "mlp_multipliers", (1.0, 1.0))[0])

    def forward(self, x: Tensor) -> Tensor:
        """The MLP."""
        by, after = self.gate_multiplier, getattr(self.config, "mlp_multipliers", (1.0, 1.0))[1]
        product = ops.swiglu(self.gate_proj(x), self.up_proj(x), gate_multiplier=by)
        result: Tensor = self.down_proj(product)
        return result if after == 1.0 else result * after


class ClampedSwiGLUMLP(_GatedMLP):
    """A SwiGLU MLP whose gate and up are clamped first.

    Like:
        transformers ``DeepseekV4MLP``.

    Operator:
        swiglu_clamped

    Args:
        config: Configuration of a model: as for :class:`SwiGLUMLP`, and ``swiglu_limit``.
        intermediate_size: In place of that of the configuration.
        device: Of the parameters.
        dtype: Of the parameters.
    """

    @property
    def limit(self) -> float:
        """Largest gate, and largest size of up."""
        return float(self.config.swiglu_limit)

    def forward(self, x: Tensor) -> Tensor:
        """The MLP."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        product = ops.swiglu_clamped(gate, up, limit=self.limit, alpha=1.0, up_offset=0.0)
        result: Tensor = self.down_proj(product)
        return result


class GEGLUMLP(_GatedMLP):
    """``down_proj(gelu(gate_proj(x)) * up_proj(x))``, its activation and product as one operator.

    Like:
        transformers ``GemmaMLP``, ``Gemma2MLP``, ``Gemma3MLP``.

    Operator:
        geglu

    Args:
        config: Configuration of a model: ``hidden_size``, ``intermediate_size``,
            ``hidden_activation`` or ``hidden_act`` (gelu_pytorch_tanh or gelu_new for the tanh
            form, gelu for the exact one) and, if it has one, ``mlp_bias``.
        intermediate_size: In place of that of the configuration.
        device: Of the parameters.
        dtype: Of the parameters.
    """

    ACTIVATIONS = GELU

    def forward(self, x: Tensor) -> Tensor:
        """The MLP."""
        product = ops.geglu(self.gate_proj(x), self.up_proj(x), approximate=self.activation)
        result: Tensor = self.down_proj(product)
        return result


class PackedSwiGLUMLP(_GatedMLP):
    """A SwiGLU MLP whose gate and up are the halves of one layer's output.

    Like:
        transformers ``Phi3MLP``.

    Operator:
        swiglu_packed

    Args:
        As :class:`SwiGLUMLP`.
    """

    PACKED = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The MLP."""
        result: Tensor = self.down_proj(ops.swiglu_packed(self.gate_up_proj(hidden_states)))
        return result
