"""The mapping of the ``kernels`` library: layers that transformers marks, served from here.

    model.set_use_kernels(True, hub.kernel_config())  # or of from_pretrained

Nothing is downloaded: a layer of the mapping is a class of this module. What a module computes is
found by the probes of :mod:`liger_multi.patching`, once for an instance; where it is none of the
kinds that the operator knows, its own forward runs. Losses and most MLPs have no mark in
transformers: :func:`liger_multi.patch` reaches them, and these layers too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from inspect import Parameter, Signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_multi.patching import mixers, mlp, norms, swap
from liger_multi.patching.experts import fused as fused_experts
from liger_multi.patching.experts.find import (
    NAME as EXPERTS,
    experts_kind,
    looks_like_experts,
    register_experts,
)
from liger_multi.patching.mlp import mlp_kind, mlp_names
from liger_multi.patching.norms import looks_like_norm, norm_settings
from liger_multi.patching.options import Options
from liger_multi.patching.rotary import Rotary, recognized, served_function

DEVICES = ("cpu", "cuda", "mps", "npu", "rocm", "xpu")
_KEY = "_liger_multi_hub"
_ABSENT = object()
_DEFAULT = Options()


def _norm(module: nn.Module) -> norms.NormSettings | None:
    likely = looks_like_norm(module)
    settings = norm_settings(module, likely) if likely else None
    return settings if isinstance(settings, norms.NormSettings) else None


def _mlp(module: nn.Module) -> mlp.MlpSettings | None:
    candidates, _ = mlp_names(module)
    formula = mlp_kind(module, candidates) if candidates else None
    return formula if isinstance(formula, mlp.MlpSettings) else None


def _rotary(module: nn.Module) -> Any:
    stock = functools.partial(type(module).forward, module)
    is_rotary = isinstance(recognized(stock), Rotary)
    return served_function("apply_rotary_pos_emb", stock, _DEFAULT) if is_rotary else None


def _experts(module: Any) -> bool:
    inner = getattr(module, "experts", None)
    formula = experts_kind(inner) if isinstance(inner, nn.Module) else None
    if not isinstance(formula, fused_experts.ExpertsKind) or inner is None:
        return False
    settings = fused_experts.ExpertsSettings(formula, _DEFAULT)
    swap.apply(
        inner, swap.Swap("fused_moe", swap.stock_class(inner), fused_experts.FusedExperts, settings)
    )
    return True


def _cached_verdict(module: nn.Module, probe: Any) -> Any:
    """What a probe says of an instance; a compiler that comes first sees the original forward."""
    result = getattr(module, _KEY, _ABSENT)
    if result is _ABSENT:
        if torch.compiler.is_compiling():
            return None
        own_forward = vars(module).pop("forward", None)  # a probe asks the forward of the class
        try:
            result = probe(module)
        finally:
            if own_forward is not None:
                vars(module)["forward"] = own_forward
        setattr(module, _KEY, result)
    return result


# Layers as the kernels library wants them: no constructor, no members, and a forward that becomes
# the one of the module that it stands for.


class _Layer(nn.Module):
    can_torch_compile = True
    has_backward = True


def _normed(module: nn.Module, x: Tensor, *gate: Tensor | None) -> Tensor:
    """The operator, or what the class of a norm does by itself."""
    settings, gate_tensor = _cached_verdict(module, _norm), gate[0] if gate else None
    operands = norms.operands(module, x, gate_tensor, settings) if settings else None
    if operands is None:
        return type(module).forward(module, x, *gate)  # type: ignore[no-any-return]
    return norms.apply_norm(module, x, gate_tensor, operands, settings)


class RMSNorm(_Layer):
    """Every norm that is marked by this name, each with its own places of rounding."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return _normed(self, hidden_states)


class RMSNormGated(_Layer):
    """Norms of linear attention and state space layers, with the gate behind or before them."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return _normed(self, hidden_states, gate)


class GatedMLP(_Layer):
    """Gated MLPs; transformers marks none, ``kernels.replace_kernel_forward_from_hub`` does."""

    def forward(self, x: Tensor) -> Tensor:
        settings = _cached_verdict(self, _mlp)
        if settings is None or not mlp.serves(self, settings):
            return type(self).forward(self, x)
        return mlp.apply_mlp(self, x, settings)


class RotaryPosEmb(_Layer):
    """Rotary functions; the marked form of one is a module that all models of a file share."""

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        rotate = _cached_verdict(self, _rotary)
        if rotate is None:
            rotated: Any = type(self).forward(self, q, k, cos, sin, unsqueeze_dim)
        else:
            rotated = rotate(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return rotated[0], rotated[1]


class MoeMLP(_Layer):
    """Router and experts: the experts are those of the operator from the first call on."""

    def forward(self, hidden_states: Tensor) -> Any:
        _cached_verdict(self, _experts)
        return type(self).forward(self, hidden_states)


class GeluTanh(_Layer):
    """The tanh form of GELU in one pass."""

    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(input, approximate="tanh")


class QuickGELU(_Layer):
    """``x sigmoid(1.702 x)`` in one pass and a product."""

    def forward(self, input: Tensor) -> Tensor:
        return F.silu(1.702 * input) / 1.702


# Functions that mix tokens, by their marks: what the functions are called in modeling files, and
# the names of their parameters (optional ones with =), which the library compares.
_DELTA_RULE = (
    "query key value g beta chunk_size= initial_state= output_final_state= "
    "use_qk_l2norm_in_kernel= **kwargs"
)
_CONVOLUTION = "hidden_states weight bias= activation= **kwargs"
_OF_HEADS = (
    "hidden_states dt A B C chunk_size D= dt_bias= initial_states= dt_softplus= dt_limit= "
    "return_final_states= **kwargs"
)
_OF_CHANNELS = (
    "hidden_states dt A B C D= z= delta_bias= delta_softplus= return_last_state= use_mambapy= "
    "use_associative_scan= **kwargs"
)
MIXING = {
    "causal_conv1d_fn": ("causal_conv1d_fn", _CONVOLUTION),
    "chunk_gated_delta_rule": ("torch_chunk_gated_delta_rule", _DELTA_RULE),
    "chunk_kda": ("chunk_kimi_delta_attention", _DELTA_RULE),
    "mamba_chunk_scan_combined": ("mamba2_chunk_scan", _OF_HEADS),
    "selective_scan_fn": ("mamba_selective_scan", _OF_CHANNELS),
}


def _mixing(name: str, function: Any) -> Any:
    """The operator in place of a marked function, or None where it computes something else."""
    return mixers.serving(MIXING[name][0], functools.partial(type(function).forward, function))


def _layer_of(name: str) -> type[nn.Module]:
    """The layer of a function: its forward has the function's parameters."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The operator, or what the function does by itself."""
        function = _cached_verdict(self, functools.partial(_mixing, name))
        return (function or functools.partial(type(self).forward, self))(*args, **kwargs)

    parameters = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)]
    for parameter_text in MIXING[name][1].split():
        kind = (
            Parameter.VAR_KEYWORD
            if parameter_text.startswith("**")
            else Parameter.POSITIONAL_OR_KEYWORD
        )
        default = None if parameter_text.endswith("=") else Parameter.empty
        parameters.append(Parameter(parameter_text.strip("*="), kind, default=default))
    forward.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return type(name, (_Layer,), {"forward": forward, "__doc__": f"``{MIXING[name][0]}``."})


LAYERS: dict[str, type[nn.Module]] = {
    "RMSNorm": RMSNorm,
    "RMSNormZeroCentered": RMSNorm,
    "RMSNormGated": RMSNormGated,
    "rotary_pos_emb": RotaryPosEmb,
    "SwiGLUMLP": GatedMLP,
    "GeGLUMLP": GatedMLP,
    "MegaBlocksMoeMLP": MoeMLP,
    "NewGELU": GeluTanh,
    "FastGELU": GeluTanh,
    "GeluTanh": GeluTanh,
    "QuickGELU": QuickGELU,
    **{name: _layer_of(name) for name in MIXING},
}
"""Names under which transformers marks layers, and what serves them."""


class Layer:
    """What the kernels library takes for a repository: it loads a class, from here.

    Args:
        layer_name: A name of :data:`LAYERS`.
    """

    def __init__(self, layer_name: str) -> None:
        self.layer_name = layer_name

    def load(self) -> type[nn.Module]:
        return LAYERS[self.layer_name]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layer) and self.layer_name == other.layer_name

    def __hash__(self) -> int:
        return hash((Layer, self.layer_name))

    def __repr__(self) -> str:
        return f"liger_multi {self.layer_name}"


def mapping(
    devices: Iterable[str] = DEVICES, layers: Iterable[str] = tuple(LAYERS)
) -> dict[str, dict[str, dict[Any, Any]]]:
    """A mapping for ``kernels.register_kernel_mapping`` and ``kernels.use_kernel_mapping``.

    It serves training and inference, compiled or not. ``use_kernels=True`` without a configuration
    registers transformers' own mapping over it: use :func:`kernel_config` there.

    Args:
        devices: Types of devices, as the kernels library calls them.
        layers: Names of :data:`LAYERS`.

    Raises:
        ImportError: The kernels library is not installed.
        ValueError: A layer that is not served.
    """
    from kernels import Mode

    names = tuple(layers)
    unknown_names = [name for name in names if name not in LAYERS]
    if unknown_names:
        raise ValueError(f"no layer {', '.join(unknown_names)}; there are {', '.join(LAYERS)}")
    modes = (Mode.TRAINING | Mode.TORCH_COMPILE, Mode.INFERENCE | Mode.TORCH_COMPILE)
    device_names = tuple(devices)
    return {
        name: {device: {mode: Layer(name) for mode in modes} for device in device_names}
        for name in names
    }


def kernel_config(*, inherit_mapping: bool = False, **options: Any) -> Any:
    """A ``KernelConfig`` of transformers for ``set_use_kernels`` and ``from_pretrained``.

    Experts of the model run as one operator too, through ``experts_implementation``.

    Args:
        inherit_mapping: Whether layers that are not served here may come from the hub.
        options: As for :func:`mapping`.

    Raises:
        ImportError: The kernels library, or a transformers with ``KernelConfig``, is missing.
    """
    from transformers import KernelConfig

    mappings = mapping(**options)

    class Config(KernelConfig):  # type: ignore[misc]
        def create_compatible_mapping(self, model: Any, compile: bool = False) -> None:
            # ours is what strings would become; set this late, since loading expects strings
            self.kernel_mapping = mappings
            register_experts()
            if hasattr(model, "set_experts_implementation") and any(
                looks_like_experts(m) for m in model.modules()
            ):
                model.set_experts_implementation(EXPERTS)
            settle(model)

    config = Config({})
    config.inherit_mapping = inherit_mapping
    return config


def settle(model: nn.Module) -> None:
    """Ask the probes of all marked modules now, for a model that is compiled before its first call.

    :func:`kernel_config` does this by itself.
    """
    probes = {RMSNorm: _norm, RMSNormGated: _norm, GatedMLP: _mlp}
    for module in model.modules():
        layer = LAYERS.get(getattr(module, "kernel_layer_name", ""))
        if layer in probes:
            _cached_verdict(module, probes[layer])
        for function in vars(module).get("_kernel_funcs", {}).values():
            name = getattr(function, "kernel_layer_name", "")
            if name in MIXING:
                _cached_verdict(function, functools.partial(_mixing, name))
            elif LAYERS.get(name) is RotaryPosEmb:
                _cached_verdict(function, _rotary)
