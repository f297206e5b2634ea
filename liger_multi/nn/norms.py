"""Norms, activations with an operator of their own, rows of probabilities, and embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from liger_multi import checks, ops
from liger_multi.nn._shared import changed, fits, size
from liger_multi.ops.gated_rms_norm import ACTIVATIONS
from liger_multi.ops.rms_norm import CASTINGS

# --- over the last axis ---


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight.

    Like:
        transformers ``LlamaRMSNorm``; ``casting="olmo"`` is ``Olmo2RMSNorm``.

    Operator:
        rms_norm

    Args:
        hidden_size: Width of the last axis.
        eps: Added to the mean of squares; the attribute is ``variance_epsilon``.
        offset: Added to the weight, which then starts at ``1 - offset``.
        casting: Where the rounding to the dtype of the input happens: llama, olmo or gemma.
        elementwise_affine: Whether there is a weight.
        device: Of the weight.
        dtype: Of the weight.
    """

    weight: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        casting: str = "llama",
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        checks.one_of(name, "casting", casting, CASTINGS)
        self.hidden_size = size(name, "hidden_size", hidden_size)
        self.variance_epsilon = checks.number(name, "eps", eps, 0.0)
        self.offset = checks.number(name, "offset", offset)
        self.casting = casting
        self.elementwise_affine = checks.boolean(name, "elementwise_affine", elementwise_affine)
        weight = torch.empty(self.hidden_size, device=device, dtype=dtype)
        self.register_parameter("weight", nn.Parameter(weight) if elementwise_affine else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight so that it has no effect."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize the last axis."""
        fits(self, hidden_states, self.hidden_size)
        return ops.rms_norm(
            hidden_states,
            self.weight,
            self.variance_epsilon,
            offset=self.offset,
            casting=self.casting,
        )

    def extra_repr(self) -> str:
        """Shape and eps as Hugging Face writes them, and what else was chosen."""
        changed_options = [part for part in (changed(self),) if part]
        return ", ".join([f"({self.hidden_size},), eps={self.variance_epsilon}", *changed_options])


class GemmaRMSNorm(RMSNorm):
    """Root-mean-square norm in fp32 that multiplies by ``1 + weight``.

    Like:
        transformers ``GemmaRMSNorm``, ``Gemma2RMSNorm``, ``Gemma3RMSNorm``.

    Operator:
        rms_norm

    Args:
        dim: Width of the last axis.
        eps: Added to the mean of squares.
        device: Of the weight.
        dtype: Of the weight.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dim = size(type(self).__name__, "dim", dim)
        super().__init__(dim, eps, offset=1.0, casting="gemma", device=device, dtype=dtype)

    @property
    def eps(self) -> float:
        """The name that Hugging Face gives to ``variance_epsilon`` here."""
        return self.variance_epsilon

    @eps.setter
    def eps(self, value: float) -> None:
        self.variance_epsilon = value

    def extra_repr(self) -> str:
        """Shape and eps as Hugging Face writes them."""
        return f"({self.hidden_size},), eps={self.eps}"


class FusedAddRMSNorm(RMSNorm):
    """Sum with the residual stream and its root-mean-square norm in one pass.

    Like:
        ``residual = residual + x`` and ``LlamaRMSNorm`` of it, between the blocks of a decoder.

    Operator:
        fused_add_rms_norm

    Args:
        As :class:`RMSNorm`.
    """

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, residual: Tensor
    ) -> ops.FusedAddRMSNormOutput:
        """The norm of the sum, and the sum: ``(y, new_residual)``."""
        fits(self, hidden_states, self.hidden_size)
        return ops.fused_add_rms_norm(
            hidden_states,
            residual,
            self.weight,
            self.variance_epsilon,
            offset=self.offset,
            casting=self.casting,
        )


class LayerNorm(nn.LayerNorm):
    """Layer norm over the last axis.

    Like:
        ``torch.nn.LayerNorm``, of which it is a subclass.

    Operator:
        layer_norm

    Args:
        normalized_shape: Width of the last axis, or a sequence with this one number.
        eps: Added to the variance.
        elementwise_affine: Whether there are a weight and a bias.
        bias: Whether there is a bias in addition to the weight.
        device: Of the parameters.
        dtype: Of the parameters.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        name = type(self).__name__
        shape = [normalized_shape] if hasattr(normalized_shape, "__index__") else normalized_shape
        if isinstance(shape, str) or not isinstance(shape, Sequence):
            raise TypeError(
                f"{name}: normalized_shape must be an integer or a sequence of one, got "
                f"{checks.describe(normalized_shape)}"
            )
        if len(shape) != 1:
            raise ValueError(
                f"{name}: normalizes the last axis only, got normalized_shape {tuple(shape)}; "
                "flatten those axes, or use torch.nn.LayerNorm"
            )
        width = size(name, "normalized_shape", shape[0])
        eps = checks.number(name, "eps", eps, 0.0)
        checks.boolean(name, "elementwise_affine", elementwise_affine)
        checks.boolean(name, "bias", bias)
        super().__init__(width, eps, elementwise_affine, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the last axis."""
        fits(self, input, self.normalized_shape[0])
        return ops.layer_norm(input, self.weight, self.bias, self.eps)


# --- of groups of channels, and with a gate or a condition ---


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
        bias: Whether there is a bias in addition to the weight.
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
        """Set the parameters so that they have no effect."""
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
            hidden_size,
            eps,
            offset=offset,
            casting=casting,
            elementwise_affine=elementwise_affine,
            device=device,
            dtype=dtype,
        )
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


# --- activations ---


class ReLUSquared(nn.Module):
    """Squared rectifier.

    Like:
        transformers ``ReLUSquaredActivation``.

    Operator:
        relu_squared

    Args:
        None.
    """

    def __init__(self) -> None:
        super().__init__()

    def forward(self, input: Tensor) -> Tensor:
        """Rectify and square."""
        return ops.relu_squared(input)


class DyT(nn.Module):
    """Dynamic tanh, which stands where a norm would.

    Like:
        ``DynamicTanh`` of arXiv:2503.10622.

    Operator:
        dyt

    Args:
        hidden_size: Width of the last axis.
        init_alpha: What the factor inside of tanh starts at.
        bias: Whether there is a bias in addition to the weight.
        device: Of the parameters.
        dtype: Of the parameters.
    """

    bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        init_alpha: float = 0.5,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = size("DyT", "hidden_size", hidden_size)
        self.init_alpha = checks.number("DyT", "init_alpha", init_alpha)
        self.alpha = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.weight = nn.Parameter(torch.empty(self.hidden_size, device=device, dtype=dtype))
        term = (
            nn.Parameter(torch.empty_like(self.weight))
            if checks.boolean("DyT", "bias", bias)
            else None
        )
        self.register_parameter("bias", term)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make it a plain tanh of a multiple of its input."""
        nn.init.constant_(self.alpha, self.init_alpha)
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Apply dynamic tanh, channel by channel."""
        fits(self, input, self.hidden_size)
        return ops.dyt(input, self.alpha, self.weight, self.bias)

    def extra_repr(self) -> str:
        """The width and the options that differ from the defaults."""
        changed_options = [part for part in (changed(self),) if part]
        return ", ".join([f"{self.hidden_size}", *changed_options])


class PolyNorm(nn.Module):
    """Sum of the root-mean-square norms of three powers.

    Like:
        ``PolyNorm`` of arXiv:2411.03884.

    Operator:
        poly_norm

    Args:
        eps: Added to the means of squares.
        device: Of the parameters.
        dtype: Of the parameters.
    """

    def __init__(
        self,
        eps: float = 1e-6,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = checks.number("PolyNorm", "eps", eps, 0.0)
        self.weight = nn.Parameter(torch.empty(3, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A third of each power."""
        nn.init.constant_(self.weight, 1 / 3)
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Activate the last axis."""
        return ops.poly_norm(input, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """The number that was chosen."""
        return f"eps={self.eps}"


# --- probabilities and embeddings ---


class Softmax(nn.Module):
    """Softmax along an axis.

    Like:
        ``torch.nn.Softmax``; the axis is the last one without another.

    Operator:
        softmax

    Args:
        dim: The axis.
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = checks.integer(type(self).__name__, "dim", dim)

    def forward(self, input: Tensor) -> Tensor:
        """Probabilities."""
        return ops.softmax(input, self.dim)

    extra_repr = changed


class Sparsemax(nn.Module):
    """Projection on the simplex along an axis: probabilities with exact zeros.

    Like:
        ``torch.nn.Softmax``; the axis is the last one without another.

    Operator:
        sparsemax

    Args:
        dim: The axis.
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = checks.integer(type(self).__name__, "dim", dim)

    def forward(self, input: Tensor) -> Tensor:
        """Probabilities."""
        return ops.sparsemax(input, self.dim)

    extra_repr = changed


class Embedding(nn.Embedding):
    """A table of embeddings, whose gradient is summed in a fixed order.

    Like:
        ``torch.nn.Embedding``, of which it is a subclass, and with ``scale`` the scaled embedding
        of Gemma 3; ``max_norm``, ``scale_grad_by_freq`` and ``sparse`` are refused.

    Operator:
        embedding

    Args:
        num_embeddings: Rows of the table.
        embedding_dim: Columns of the table.
        padding_idx: The row that gets no gradient.
        scale: Factor of what is looked up, rounded to the dtype of the table.
        validate: Raise for ids out of range on a device too (a sync).
        device: Of the parameter.
        dtype: Of the parameter.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        scale: float = 1.0,
        validate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **unsupported: Any,
    ) -> None:
        name = type(self).__name__
        args = {n: v for n, v in unsupported.items() if v is not None and v is not False}
        args.pop("norm_type", None)  # norm_type has no meaning without max_norm
        if args:
            raise ValueError(f"{name} does not support {', '.join(args)}; use torch.nn.Embedding")
        rows = size(name, "num_embeddings", num_embeddings)
        columns = size(name, "embedding_dim", embedding_dim)
        if padding_idx is not None:
            padding_idx = checks.integer(name, "padding_idx", padding_idx)
            if not -rows <= padding_idx < rows:
                raise ValueError(
                    f"{name}: padding_idx must name one of {rows} rows, got {padding_idx}"
                )
        super().__init__(rows, columns, padding_idx, device=device, dtype=dtype)
        self.scale = checks.number(name, "scale", scale)
        self.validate = checks.boolean(name, "validate", validate)

    def forward(self, input: Tensor) -> Tensor:
        """The rows of some ids."""
        return ops.embedding(
            input, self.weight, self.padding_idx, scale=self.scale, validate=self.validate
        )

    def extra_repr(self) -> str:
        """Sizes, and the options that differ from the defaults."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {changed(self)}".rstrip(", ")
