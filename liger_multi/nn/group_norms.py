"""Norms of groups of channels, and those with a gate or a condition."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from liger_multi import checks, ops
from liger_multi.nn._shared import fits, size
from liger_multi.nn.norms import RMSNorm
from liger_multi.ops.gated_rms_norm import ACTIVATIONS


class GroupNorm(nn.GroupNorm):
    """Norm of groups of channels.

    Like:
        ``torch.nn.GroupNorm``, of which it is a subclass.

    Operator:
        group_norm

    Args:
        num_groups: Groups that the channels are divided into.
        num_channels: Size of axis 1.
        eps: Added to the variance.
        affine: Whether there are a weight and a bias.
        device: Of the parameters.
        dtype: Of the parameters.
        bias: Whether there is a bias beside the weight.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        groups = size("GroupNorm", "num_groups", num_groups)
        channels = size("GroupNorm", "num_channels", num_channels)
        eps = checks.number("GroupNorm", "eps", eps, 0.0)
        checks.boolean("GroupNorm", "affine", affine)
        checks.boolean("GroupNorm", "bias", bias)
        super().__init__(groups, channels, eps, affine, device, dtype)
        if not bias:
            self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        """Make the norm one without effect of its parameters."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize groups of axis 1."""
        if not isinstance(input, Tensor) or input.ndim < 2 or input.shape[1] != self.num_channels:
            raise ValueError(
                f"GroupNorm: axis 1 of the input must be {self.num_channels}, got "
                f"{checks.describe(input)}"
            )
        return ops.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class GatedRMSNorm(RMSNorm):
    """Root-mean-square norm of groups of channels, times an activated gate after or before it.

    Like:
        transformers ``Qwen3NextRMSNormGated``; ``norm_before_gate=False`` with a group size is
        ``MambaRMSNormGated``, ``casting="olmo"`` is ``FalconH1RMSNormGated`` and, with a sigmoid,
        ``KimiLinearRMSNormGated``.

    Operator:
        gated_rms_norm

    Args:
        hidden_size: Width of the last axis.
        eps: Added to the mean of squares; the attribute is ``variance_epsilon``.
        group_size: Neighboring channels that are normalized together; all by default.
        norm_before_gate: Whether the gate multiplies the norm, or its input.
        activation: Of the gate: silu or sigmoid.
        offset: Added to the weight, which then starts at ``1 - offset``.
        casting: Where the rounding to the dtype of the input happens: llama, olmo or gemma.
        elementwise_affine: Whether there is a weight.
        device: Of the weight.
        dtype: Of the weight.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        activation: str = "silu",
        offset: float = 0.0,
        casting: str = "llama",
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        name = type(self).__name__
        checks.one_of(name, "activation", activation, ACTIVATIONS)
        super().__init__(
            hidden_size, eps, offset=offset, casting=casting,
            elementwise_affine=elementwise_affine, device=device, dtype=dtype,
        )  # fmt: skip
        self.group_size = None if group_size is None else size(name, "group_size", group_size)
        if self.group_size is not None and self.hidden_size % self.group_size:
            raise ValueError(
                f"{name}: group_size must divide {self.hidden_size}, got {self.group_size}"
            )
        self.norm_before_gate = checks.boolean(name, "norm_before_gate", norm_before_gate)
        self.activation = activation

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalize the groups, and gate them."""
        fits(self, hidden_states, self.hidden_size)
        return ops.gated_rms_norm(
            hidden_states,
            gate,
            self.weight,
            self.variance_epsilon,
            group_size=self.group_size,
            norm_before_gate=self.norm_before_gate,
            activation=self.activation,
            offset=self.offset,
            casting=self.casting,
        )


class ModulatedRMSNorm(RMSNorm):
    """Root-mean-square norm modulated by a condition (AdaLN): ``norm(x) * (1 + scale) + shift``.

    Like:
        The adaptive norm of diffusion transformers, with ``LlamaRMSNorm``.

    Operator:
        modulated_rms_norm

    Args:
        As :class:`RMSNorm`.
    """

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, scale: Tensor, shift: Tensor | None = None
    ) -> Tensor:
        """Normalize the last axis, and modulate it."""
        fits(self, hidden_states, self.hidden_size)
        return ops.modulated_rms_norm(
            hidden_states,
            scale,
            shift,
            self.weight,
            self.variance_epsilon,
            offset=self.offset,
            casting=self.casting,
        )
