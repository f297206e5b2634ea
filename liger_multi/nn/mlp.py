"""MLPs: gated ones, those of experts, and those that run a piece of the sequence at a time.

Gated MLPs, experts and hyper-connections are built from the configuration of a Hugging Face model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from liger_multi import checks, ops
from liger_multi.dispatch.autograd import first_derivatives_only
from liger_multi.errors import unknown
from liger_multi.nn._shared import size

# --- gated MLPs ---

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
        """Multiplier of the gate before its activation."""
        return float(getattr(self.config, "mlp_multipliers", (1.0, 1.0))[0])

    def forward(self, x: Tensor) -> Tensor:
        """The MLP."""
        gate_multiplier, down_multiplier = (
            self.gate_multiplier,
            getattr(self.config, "mlp_multipliers", (1.0, 1.0))[1],
        )
        product = ops.swiglu(self.gate_proj(x), self.up_proj(x), gate_multiplier=gate_multiplier)
        result: Tensor = self.down_proj(product)
        return result if down_multiplier == 1.0 else result * down_multiplier


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
        return self.down_proj(product)  # type: ignore[no-any-return]


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
        return self.down_proj(product)  # type: ignore[no-any-return]


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
        return self.down_proj(ops.swiglu_packed(self.gate_up_proj(hidden_states)))  # type: ignore[no-any-return]


# --- experts and hyper-connections ---

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
        factory: Any = {"device": device, "dtype": dtype}
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden, **factory))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner, **factory))

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
        outs, factory = count * (count + 2), {"device": device, "dtype": dtype}
        self.fn = nn.Parameter(torch.empty((outs, count * hidden), **factory))  # type: ignore[arg-type]
        self.base = nn.Parameter(torch.empty((outs,), **factory))  # type: ignore[arg-type]
        self.scale = nn.Parameter(torch.empty((3,), **factory))  # type: ignore[arg-type]

    def forward(self, hidden_streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Coefficients post and mix, and the input of the block."""
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


# --- a piece of the sequence at a time ---


class _Surroundings:
    """State that a second run of a module needs to repeat the first: autocast, random numbers."""

    def __init__(self, x: Tensor, random: bool) -> None:
        device_type = x.device.type
        self.device_type, self.random = device_type, random
        self.autocast_dtype = checks.autocast_dtype(device_type)
        if random:
            self.state = torch.get_rng_state()
            self.devices, self.states = get_device_states(x)

    def __enter__(self) -> None:
        self.cast = checks.autocast(self.device_type, self.autocast_dtype)
        self.cast.__enter__()
        if self.random:
            accelerator = "cuda" if self.device_type == "cpu" else self.device_type
            self.fork = torch.random.fork_rng(self.devices, device_type=accelerator)
            self.fork.__enter__()
            torch.set_rng_state(self.state)
            if self.devices:
                set_device_states(self.devices, self.states, device_type=self.device_type)

    def __exit__(self, *error: Any) -> None:
        if self.random:
            self.fork.__exit__(*error)
        self.cast.__exit__(*error)


@contextlib.contextmanager
def _quiet(parameters: list[Tensor]) -> Iterator[None]:
    """Suppress parameter hooks while gradients of pieces are accumulated."""
    hooks = [p._backward_hooks for p in parameters]
    try:
        for p in parameters:
            p._backward_hooks = None
        yield
    finally:
        for p, saved_hooks in zip(parameters, hooks, strict=True):
            p._backward_hooks = saved_hooks


def _tile_bounds(length: int, tiles: int) -> Iterator[tuple[int, int]]:
    """Start and length of each piece, the last one perhaps shorter."""
    step = max(1, -(-length // tiles))
    for start in range(0, max(length, 1), step):
        yield start, min(step, length - start)


def _forward(module: nn.Module, x: Tensor, tiles: int) -> Tensor:
    out: Tensor | None = None
    for start, length in _tile_bounds(x.shape[-2], tiles):
        y = module(x.narrow(-2, start, length))
        if not isinstance(y, Tensor) or y.shape[:-1] != (*x.shape[:-2], length):
            raise TypeError(
                "TiledMLP: the MLP must return one tensor with the leading axes of its input, got "
                f"{checks.describe(y)} for {checks.describe(x.narrow(-2, start, length))}"
            )
        if out is None:
            out = y.new_empty((*x.shape[:-1], y.shape[-1]))
        out.narrow(-2, start, length).copy_(y)
    assert out is not None
    return out


class _Tiled(torch.autograd.Function):
    """All parameters are inputs: each gets one gradient a call, also where x needs none."""

    @staticmethod
    def forward(
        ctx: Any, module: nn.Module, tiles: int, random: bool, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        """Run the module piece by piece; nothing inside of it is kept."""
        ctx.module, ctx.tiles = module, tiles
        ctx.around = _Surroundings(x, random)
        ctx.save_for_backward(x, *parameters)
        return _forward(module, x, tiles)

    @staticmethod
    @first_derivatives_only("nn.TiledMLP")
    def backward(ctx: Any, saved: tuple[Tensor, ...], dy: Tensor) -> Any:
        """Run each piece again, and through it backwards; sums over pieces are in fp32."""
        x, *parameters = saved
        needs_x, requested = ctx.needs_input_grad[3], [p for p in parameters if p.requires_grad]
        dx = torch.empty_like(x) if needs_x else None
        sums: list[Tensor | None] = [None] * len(requested)
        with ctx.around, torch.enable_grad(), _quiet(requested):
            for start, length in _tile_bounds(x.shape[-2], ctx.tiles):
                piece = x.narrow(-2, start, length).detach().requires_grad_(needs_x)
                y, upstream = ctx.module(piece), dy.narrow(-2, start, length)
                leaves = [*([piece] if needs_x else []), *requested]
                gradients = list(torch.autograd.grad(y, leaves, upstream, allow_unused=True))
                if dx is not None:
                    dx.narrow(-2, start, length).copy_(_grad_or_zeros(gradients.pop(0), piece))
                for i, grad in enumerate(gradients):
                    sums[i] = _added(sums[i], grad)
        grads = iter(sums)
        parameter_grads = [next(grads) if p.requires_grad else None for p in parameters]
        parameter_grads = [
            None if g is None else g.to(p.dtype)
            for g, p in zip(parameter_grads, parameters, strict=True)
        ]
        return (None, None, None, dx, *parameter_grads)


def _grad_or_zeros(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad


def _added(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return total
    if total is None:
        return grad.to(torch.promote_types(grad.dtype, torch.float32))
    return total.add_(grad)


class TiledMLP(nn.Module):
    """Any MLP, run a piece of the sequence at a time, so that its inner tensors are small.

    Like:
        The sequence-tiled MLP of arXiv:2506.13996.

    Operator:
        that of the MLP

    Args:
        mlp: A module from ``(..., S, H)`` to a tensor with the same leading axes, each token by
            itself. It is called as it is, so that hooks and adapters of it work; its parameters
            get one gradient a call, the sum of the pieces in fp32.
        tiles: In how many pieces the sequence is run; S / H rounded up by default.
        preserve_rng_state: Whether a second run, in backward, draws the random numbers of the
            first (dropout).
    """

    def __init__(
        self, mlp: nn.Module, tiles: int | None = None, *, preserve_rng_state: bool = True
    ) -> None:
        super().__init__()
        if not isinstance(mlp, nn.Module):
            raise TypeError(f"TiledMLP: mlp must be a module, got {checks.describe(mlp)}")
        self.mlp = mlp
        self.preserve_rng_state = checks.boolean(
            "TiledMLP", "preserve_rng_state", preserve_rng_state
        )
        self.tiles = None if tiles is None else size("TiledMLP", "tiles", tiles)

    def forward(self, x: Tensor) -> Tensor:
        """The MLP of every token; in one piece under a compiler, which plans memory itself."""
        if not isinstance(x, Tensor) or x.ndim < 2:
            raise ValueError(f"TiledMLP: x must have shape (..., S, H), got {checks.describe(x)}")
        tiles = self.tiles or max(1, -(-x.shape[-2] // max(x.shape[-1], 1)))
        if torch.compiler.is_compiling() or tiles == 1:
            result: Tensor = self.mlp(x)
            return result
        parameters = list(self.mlp.parameters())
        if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *parameters)):
            random = self.preserve_rng_state and self.mlp.training
            run: Any = _Tiled.apply
            result = run(self.mlp, tiles, random, x, *parameters)
        else:
            result = _forward(self.mlp, x, tiles)
        return result

    def extra_repr(self) -> str:
        """The number of pieces."""
        return f"tiles={self.tiles or 'S / H'}"
