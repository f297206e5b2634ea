"""The modules of ``liger_kernel.transformers``, with Liger's constructors and parameter names.

``in_place`` and ``row_mode`` are taken and change nothing, as in :mod:`functional`.
"""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_multi import nn as ours, ops
from liger_multi.compat.liger_kernel import functional, op_functions
from liger_multi.compat.liger_kernel.functional import casting_of
from liger_multi.compat.liger_kernel.signatures import (
    ArgumentError,
    CrossEntropyOutput,
    adapter,
    parameters,
)

# --- losses, with Liger's constructors and argument order ---


def defaults_of(names: str, function: Callable[..., Any], **defaults: Any) -> dict[str, Any]:
    """Options by name, with the defaults of a function."""
    return {name: p.default for name, p in parameters(names, function, **defaults).items()}


class Options(nn.Module):
    """Stores the options of a function.

    ``defaults`` has them in the order of Liger-Kernel's constructor; ``check`` is called with it.
    """

    defaults: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        of = inspect.Parameter
        options = [of(n, of.POSITIONAL_OR_KEYWORD, default=v) for n, v in cls.defaults.items()]
        cls.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        if len(args) > len(self.defaults) or not {*kwargs} <= {*self.defaults}:
            raise TypeError(f"{type(self).__name__} takes {', '.join(self.defaults)}")
        arguments = {**self.defaults, **dict(zip(self.defaults, args)), **kwargs}
        for name, value in arguments.items():
            setattr(self, name, value)
        self.check()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Read an option as an attribute."""

    def check(self) -> None:
        """Check that the options are in range."""

    @property
    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.defaults}

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in self.options.items())


# --- functions whose options a module keeps ---

REDUCTIONS = ("mean", "sum", "none")


def _check_cross_entropy(o: Options) -> None:
    if not 0.0 <= o.label_smoothing <= 1.0:
        raise ArgumentError(
            f"label_smoothing must be between 0.0 and 1.0. Got: {o.label_smoothing}"
        )
    if o.reduction not in REDUCTIONS:
        raise ArgumentError(f"reduction must be one of {REDUCTIONS}. Got: {o.reduction}")
    if o.softcap is not None and o.softcap <= 0:
        raise ArgumentError(f"softcap must be greater than 0.0 or None. Got: {o.softcap}")


def _check_temperature(o: Options) -> None:
    if not o.temperature:
        raise ArgumentError("temperature cannot be 0.")


def _module(
    name: str,
    function: Callable[..., Any],
    arguments: str,
    options: str,
    check: Callable[[Options], None] = lambda o: None,
    **defaults: Any,
) -> type[Any]:
    """Make a module class: constructed with the options of a function, called with its tensors."""
    call = adapter(function, f"{arguments} {options}")

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs, **self.options)

    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    shown_parameters = [self_parameter, *parameters(arguments, function).values()]
    forward.__signature__ = inspect.Signature(shown_parameters)  # type: ignore[attr-defined]
    members = {
        "defaults": defaults_of(options, function, **defaults),
        "check": check,
        "forward": forward,
        "__doc__": function.__doc__,
        "__module__": __name__,
    }
    return type(name, (Options,), members)


_f, _heads = functional, "student_input student_weight teacher_input teacher_weight shift_labels"
LigerCrossEntropyLoss = _module(
    "LigerCrossEntropyLoss",
    _f.liger_cross_entropy,
    "_input:input target",
    op_functions.OF_LOGITS,
    _check_cross_entropy,
)
LigerFusedLinearCrossEntropyLoss = _module(
    "LigerFusedLinearCrossEntropyLoss",
    _f.liger_fused_linear_cross_entropy,
    "lin_weight:weight _input:input target bias",
    op_functions.OF_HEAD,
    _check_cross_entropy,
)
LigerFusedLinearJSD = _module(
    "LigerFusedLinearJSD",
    _f.liger_fused_linear_jsd,
    _heads,
    "jsd_beta ignore_index temperature accum_dtype",
    _check_temperature,
)
LigerFusedLinearKLDivLoss = _module(
    "LigerFusedLinearKLDivLoss",
    _f.liger_fused_linear_kl_div,
    "student_input student_weight target shift_labels",
    "reduction ignore_index temperature eps accum_dtype",
    _check_temperature,
)
LigerJSD = _module(
    "LigerJSD", _f.liger_jsd, "log_q:input log_p:target shift_labels", "beta ignore_index"
)
LigerTVDLoss = _module(
    "LigerTVDLoss",
    _f.liger_tvd,
    "p:input q:target shift_labels",
    "reduction ignore_index",
    reduction="batchmean",
)
LigerFusedCETVDLoss = _module(
    "LigerFusedCETVDLoss",
    op_functions.cross_entropy_and_distance,
    "student_logits teacher_logits target",
    "ignore_index",
)


class LigerKLDIVLoss(nn.KLDivLoss):
    """:func:`liger_multi.ops.kl_div`."""

    def __init__(self, eps: float = 1e-10, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eps = eps

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        return functional.liger_kl_div(
            y_pred, y_true, reduction=self.reduction, log_target=self.log_target, eps=self.eps
        )


class LigerVocabParallelCrossEntropy(Options):
    """The loss of every token, with the classes of the logits split over processes."""

    defaults: ClassVar[dict[str, Any]] = {
        "ignore_index": -100,
        "label_smoothing": 0.0,
        "reduction": "none",
        "label_smoothing_formula": "pytorch",
        "label_smoothing_mode": "global",
    }

    def check(self) -> None:
        if self.reduction != "none":
            raise ArgumentError(
                f"{type(self).__name__}: reduction must be 'none', got {self.reduction!r}"
            )
        op_functions.validate_formula_and_mode(
            self.label_smoothing_formula, self.label_smoothing_mode
        )
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ArgumentError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}.")

    def forward(
        self, vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any = None
    ) -> Tensor:
        return op_functions.vocab_parallel(
            vocab_parallel_logits,
            target,
            tp_group,
            self.ignore_index,
            self.label_smoothing,
            self.label_smoothing_formula,
            self.label_smoothing_mode,
        )


def fixed_fused_linear_cross_entropy(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    target: Tensor,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    final_logit_softcapping: float | None = None,
    accum_dtype: torch.dtype | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **kwargs: Any,
) -> Tensor | CrossEntropyOutput:
    """The fused loss of rows and targets, divided by the number of items where it is an argument.

    Keywords that a model passes on and the fused loss does not have are dropped.
    """
    names = LigerFusedLinearCrossEntropyLoss().options
    options = {k: v for k, v in kwargs.items() if k in names and k != "reduction"}
    public = sys.modules.get("liger_kernel.transformers.functional", functional)
    output: Any = public.liger_fused_linear_cross_entropy(  # where trainers put their own
        hidden_states,
        lm_head_weight,
        target,
        reduction="mean" if num_items_in_batch is None else "sum",
        ignore_index=ignore_index,
        softcap=final_logit_softcapping,
        accum_dtype=accum_dtype,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        **options,
    )
    if num_items_in_batch is None:
        return output  # type: ignore[no-any-return]
    if isinstance(output, CrossEntropyOutput):
        return replace(output, loss=output.loss / num_items_in_batch)
    return output / num_items_in_batch  # type: ignore[no-any-return]


def LigerForCausalLMLoss(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor | None,
    hidden_size: int,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    final_logit_softcapping: float | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **kwargs: Any,
) -> Tensor | CrossEntropyOutput:
    """The loss of a causal model from its last hidden states; labels are shifted here."""
    if shift_labels is None:
        if labels is None:
            raise ValueError("LigerForCausalLMLoss: needs labels or shift_labels, got neither")
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return fixed_fused_linear_cross_entropy(
        hidden_states.reshape(-1, hidden_size),
        lm_head_weight,
        shift_labels.reshape(-1).to(hidden_states.device),
        num_items_in_batch,
        ignore_index,
        final_logit_softcapping,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        **kwargs,
    )


_INITS = {"ones": torch.ones, "zeros": torch.zeros}


def _filled(name: str, init_fn: str, size: int) -> Tensor:
    if init_fn not in _INITS:
        raise ArgumentError(f"{name}: init_fn must be 'ones' or 'zeros', got {init_fn!r}")
    return _INITS[init_fn](size)


class LigerRMSNorm(ours.RMSNorm):
    """:class:`liger_multi.nn.RMSNorm`."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str | int = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        name = type(self).__name__
        casting = casting_of(name, casting_mode)
        super().__init__(
            hidden_size, eps, offset=offset, casting=casting, elementwise_affine=elementwise_affine
        )
        if self.weight is not None:
            self.weight.data.copy_(_filled(name, init_fn, hidden_size))
        self.casting_mode, self.in_place, self.row_mode = casting_mode, in_place, row_mode

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states).to(hidden_states.dtype)


_RMS = "self hidden_size eps offset casting_mode init_fn in_place row_mode"
_OF_GEMMA: dict[str, Any] = {"offset": 1.0, "casting_mode": "gemma", "init_fn": "zeros"}


class LigerRMSNormForGemma(LigerRMSNorm):
    """Gemma's RMSNorm: computed in fp32, scaled by one plus the weight."""

    __init__ = adapter(LigerRMSNorm.__init__, _RMS, **_OF_GEMMA)


class LigerRMSNormForGemma2(LigerRMSNormForGemma):
    """As :class:`LigerRMSNormForGemma`."""

    __init__ = adapter(LigerRMSNorm.__init__, _RMS, **_OF_GEMMA, in_place=False)


class LigerRMSNormForQwen3Next(LigerRMSNormForGemma2):
    """As :class:`LigerRMSNormForGemma`."""


class LigerRMSNormForMuseGlimmerTextCentered(LigerRMSNormForGemma2):
    """As :class:`LigerRMSNormForGemma`: scaled by one plus the weight."""


class LigerRMSNormForGemma3(LigerRMSNormForGemma):
    """As :class:`LigerRMSNormForGemma`, with the arguments of ``Gemma3RMSNorm``."""

    __init__ = adapter(
        LigerRMSNorm.__init__,
        _RMS.replace("hidden_size", "dim:hidden_size"),
        **_OF_GEMMA,
        in_place=False,
    )


class LigerRMSNormForGemma4(LigerRMSNorm):
    """Gemma 4's RMSNorm: computed in fp32, with or without a weight."""

    __init__ = adapter(
        LigerRMSNorm.__init__,
        "self dim:hidden_size eps offset casting_mode init_fn in_place "
        "with_scale:elementwise_affine",
        casting_mode="gemma",
        in_place=False,
    )

    @property
    def with_scale(self) -> bool:
        return self.weight is not None


class LigerRMSNormForMuseGlimmer(LigerRMSNormForGemma4):
    """As :class:`LigerRMSNormForGemma4`; without a weight it takes no width."""

    def __init__(self, dim: int | None = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(dim or 1, *args, **kwargs)
        if self.with_scale and dim is None:
            raise TypeError("LigerRMSNormForMuseGlimmer: dim must be an integer, got None")

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize the last axis; without a weight, of any width."""
        return functional.liger_rms_norm(
            hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )


class LigerRMSNormForOlmo2(LigerRMSNorm):
    """As :class:`LigerRMSNorm`, with the casts of Llama."""

    __init__ = adapter(LigerRMSNorm.__init__, _RMS, in_place=False)


class LigerRMSNormForGlm4(LigerRMSNormForOlmo2):
    """As :class:`LigerRMSNorm`, with the casts of Llama."""


class LigerFusedAddRMSNorm(ours.FusedAddRMSNorm):
    """:class:`liger_multi.nn.FusedAddRMSNorm`."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str | int = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
    ) -> None:
        name = type(self).__name__
        super().__init__(hidden_size, eps, offset=offset, casting=casting_of(name, casting_mode))
        assert self.weight is not None
        self.weight.data.copy_(_filled(name, init_fn, hidden_size))
        self.casting_mode, self.in_place = casting_mode, in_place

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, residual: Tensor
    ) -> ops.FusedAddRMSNormOutput:
        return functional.liger_fused_add_rms_norm(
            hidden_states,
            residual,
            self.weight,  # type: ignore[arg-type]
            self.variance_epsilon,
            self.offset,
            self.casting_mode,
        )


class LigerModulatedRMSNorm(LigerRMSNorm):
    """:func:`liger_multi.ops.modulated_rms_norm`."""

    __init__ = adapter(LigerRMSNorm.__init__, _RMS.replace("row_mode", "elementwise_affine"))

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, scale: Tensor, shift: Tensor | None = None
    ) -> Tensor:
        return functional.liger_modulated_rms_norm(
            hidden_states,
            self.weight,
            scale,
            shift,
            self.variance_epsilon,
            self.offset,
            self.casting_mode,
        )


class LigerLayerNorm(ours.LayerNorm):
    """:class:`liger_multi.nn.LayerNorm`; the bias is there in any case and starts at zero.

    ``impl``, ``mode`` and ``backend`` are not read; :func:`liger_multi.configure` chooses backends.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        bias: bool = False,
        init_fn: str = "ones",
        impl: str | None = None,
        mode: str | None = None,
        backend: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(hidden_size, eps, **kwargs)
        self.hidden_size, self.variance_epsilon = hidden_size, eps
        self.impl, self.mode = impl if backend is None else backend, mode
        if self.weight is not None:
            self.weight.data.copy_(_filled("LigerLayerNorm", init_fn, hidden_size))

    forward = adapter(ours.LayerNorm.forward, "self hidden_states:input")


class LigerGroupNorm(nn.Module):
    """:func:`liger_multi.ops.group_norm`; channels before groups, and a bias in any case."""

    def __init__(
        self,
        num_channels: int,
        num_groups: int,
        eps: float = 1e-6,
        bias: bool = False,
        init_fn: str = "ones",
    ) -> None:
        super().__init__()
        if num_channels % num_groups:
            raise ArgumentError(
                f"LigerGroupNorm: num_channels must be divisible by num_groups, got {num_channels} "
                f"and {num_groups}"
            )
        self.num_channels, self.num_groups, self.variance_epsilon = num_channels, num_groups, eps
        self.weight = nn.Parameter(_filled("LigerGroupNorm", init_fn, num_channels))
        self.bias = nn.Parameter(torch.zeros(num_channels))

    def forward(self, hidden_states: Tensor) -> Tensor:
        groups, eps = self.num_groups, self.variance_epsilon
        return ops.group_norm(hidden_states, groups, self.weight, self.bias, eps)


class LigerPolyNorm(ours.PolyNorm):
    """:class:`liger_multi.nn.PolyNorm`, whose bias is a scalar and starts at one."""

    def __init__(self, eps: float = 1e-6, in_place: bool = True) -> None:
        super().__init__(eps)
        self.bias = nn.Parameter(torch.ones(()))
        self.variance_epsilon, self.in_place = eps, in_place

    def forward(self, hidden_states: Tensor) -> Tensor:
        return functional.liger_poly_norm(hidden_states, self.weight, self.bias, self.eps)


class LigerDyT(nn.Module):
    """:func:`liger_multi.ops.dyt`."""

    beta: Tensor | None

    def __init__(self, hidden_size: int, beta: bool = True, init_alpha: float = 0.5) -> None:
        super().__init__()
        self.hidden_size, self.init_alpha = hidden_size, init_alpha
        self.alpha = nn.Parameter(torch.full((1,), init_alpha))
        self.gamma = nn.Parameter(torch.ones(hidden_size))
        self.register_parameter("beta", nn.Parameter(torch.zeros(hidden_size)) if beta else None)

    def forward(self, x: Tensor) -> Tensor:
        return ops.dyt(x, self.alpha, self.gamma, self.beta)


class LigerSoftmax(nn.Module):
    """:func:`liger_multi.ops.softmax` of the last axis."""

    forward = adapter(ops.softmax, "self x")


class LigerSparsemax(nn.Module):
    """:func:`liger_multi.ops.sparsemax`."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return ops.sparsemax(x, self.dim)


class LigerReLUSquared(ours.ReLUSquared):
    """:class:`liger_multi.nn.ReLUSquared`."""

    forward = adapter(ours.ReLUSquared.forward, "self x:input")


# --- MLPs ---


class LigerSwiGLUMLP(ours.SwiGLUMLP):
    """:class:`liger_multi.nn.SwiGLUMLP`."""


class LigerFalconH1SwiGLUMLP(ours.SwiGLUMLP):
    """:class:`liger_multi.nn.SwiGLUMLP`, whose multipliers stand in the configuration."""


class LigerQwen3MoeSwiGLUMLP(ours.SwiGLUMLP):
    """:class:`liger_multi.nn.SwiGLUMLP`."""


class LigerHunyuanV1SwiGLUMLP(ours.SwiGLUMLP):
    """:class:`liger_multi.nn.SwiGLUMLP`."""

    def __init__(
        self, config: Any, layer_idx: int | None = None, is_shared_mlp: bool = False
    ) -> None:
        wide = config.intermediate_size
        if is_shared_mlp:
            shared = config.num_shared_expert
            wide *= shared if isinstance(shared, int) else shared[layer_idx or 0]
        super().__init__(config, wide)
        self.layer_idx = layer_idx


class LigerPhi3SwiGLUMLP(ours.PackedSwiGLUMLP):
    """:class:`liger_multi.nn.PackedSwiGLUMLP`."""

    forward = adapter(ours.PackedSwiGLUMLP.forward, "self x:hidden_states")


def _checked_activation(config: Any) -> None:
    if config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"Activation function {config.hidden_act} not supported.")


class LigerBlockSparseTop2MLP(nn.Module):
    """A SwiGLU expert whose layers are w1 (gate), w3 (up) and w2 (down)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        _checked_activation(config)
        hidden, wide = config.hidden_size, config.intermediate_size
        self.ffn_dim, self.hidden_dim = wide, hidden
        self.w1 = nn.Linear(hidden, wide, bias=False)
        self.w2 = nn.Linear(wide, hidden, bias=False)
        self.w3 = nn.Linear(hidden, wide, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(ops.swiglu(self.w1(x), self.w3(x)))  # type: ignore[no-any-return]


class LigerSwiGLUMLPForMuseGlimmer(nn.Module):
    """A SwiGLU MLP for configurations that name no activation."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        hidden, wide = config.hidden_size, config.intermediate_size
        self.hidden_size, self.intermediate_size = hidden, wide
        self.gate_proj = nn.Linear(hidden, wide, bias=False)
        self.up_proj = nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]


class LigerMLP(LigerSwiGLUMLPForMuseGlimmer):
    """:func:`liger_multi.ops.gated_mlp` with SiLU."""

    multipliers = (1.0, 1.0)

    def __init__(self, config: Any) -> None:
        _checked_activation(config)
        super().__init__(config)

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)
        return op_functions.mlp(x, *weights, *self.multipliers)


class LigerFalconH1MLP(LigerMLP):
    """As :class:`LigerMLP`, with the multipliers of the configuration."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.multipliers = tuple(config.mlp_multipliers)
        self.gate_multiplier, self.down_multiplier = self.multipliers


class LigerGEGLUMLP(ours.GEGLUMLP):
    """:class:`liger_multi.nn.GEGLUMLP`; the form of gelu is what the configuration says."""


class LigerGEGLUMLPForGemma4(ours.GEGLUMLP):
    """:class:`liger_multi.nn.GEGLUMLP`, twice as wide in layers that share keys and values."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        shared = getattr(config, "num_kv_shared_layers", 0) or 0
        double = getattr(config, "use_double_wide_mlp", False) and layer_idx is not None
        twice = double and shared and layer_idx >= config.num_hidden_layers - shared
        super().__init__(config, config.intermediate_size * (2 if twice else 1))


class LigerExperts(ours.Experts):
    """:class:`liger_multi.nn.Experts`."""


class _Tiled(ours.TiledMLP):
    def __init__(self, mlp: nn.Module, config: Any, num_shards: int | None) -> None:
        super().__init__(mlp, num_shards)
        self.config, self.num_shards = config, num_shards
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        for name, layer in mlp.named_children():  # parameters as Liger's tiled MLPs name them
            setattr(self, name, layer)
        del self._modules["mlp"]
        object.__setattr__(self, "mlp", mlp)


class LigerTiledSwiGLUMLP(_Tiled):
    """:class:`liger_multi.nn.TiledMLP` of a SwiGLU MLP."""

    def __init__(self, config: Any, num_shards: int | None = None) -> None:
        super().__init__(ours.SwiGLUMLP(config), config, num_shards)


class LigerTiledGEGLUMLP(_Tiled):
    """:class:`liger_multi.nn.TiledMLP` of a GEGLU MLP."""

    def __init__(self, config: Any, num_shards: int | None = None) -> None:
        super().__init__(ours.GEGLUMLP(config), config, num_shards)


# --- attention and the embedding ---


def _pair(value: Any) -> Any:
    return tuple(value) if hasattr(value, "__iter__") else (value, value)


class LigerMultiTokenAttention(nn.Module):
    """:func:`liger_multi.ops.multi_token_attention`, with the parameters of a convolution."""

    bias: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.stride = _pair(kernel_size), _pair(stride)
        self.padding, self.dilation = _pair(padding), _pair(dilation)
        self.groups, self.sparse = groups, sparse
        shape = (out_channels, in_channels // groups, *self.kernel_size)
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight as a convolution's; a bias of zeros."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, scores: Tensor) -> Tensor:
        return functional.liger_multi_token_attention(
            scores,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            self.sparse,
        )


class LigerFusedNeighborhoodAttentionConfig:
    """Configuration of :class:`LigerFusedNeighborhoodAttentionLayer`."""

    def __init__(
        self,
        hidden_size: int = 768,
        num_heads: int = 12,
        kernel_size: int = 7,
        dilation: int = 1,
        bias: bool = True,
        dropout: float = 0.0,
        layer_norm_eps: float = 1e-5,
        scale: float | None = None,
    ) -> None:
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.kernel_size, self.dilation, self.bias = kernel_size, dilation, bias
        self.dropout, self.layer_norm_eps, self.scale = dropout, layer_norm_eps, scale

    def to_dict(self) -> dict[str, Any]:
        """The options by name."""
        return dict(vars(self))


class LigerFusedNeighborhoodAttention(nn.Module):
    """:func:`liger_multi.ops.neighborhood_attention` with its projections."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        kernel_size: int = 7,
        dilation: int = 1,
        bias: bool = True,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(
                f"hidden_size ({hidden_size}) must be divisible by num_heads ({num_heads})"
            )
        if kernel_size < 1:
            raise ValueError(f"kernel_size ({kernel_size}) must be positive")
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size ({kernel_size}) must be odd")
        if dilation < 1:
            raise ValueError(f"dilation ({dilation}) must be positive")
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.head_dim = hidden_size // num_heads
        self.kernel_size, self.dilation = kernel_size, dilation
        self.scale = 1 / math.sqrt(self.head_dim) if scale is None else scale
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(hidden_size, hidden_size, bias=bias) for _ in names
        )
        self.dropout_p = dropout
        self.dropout = nn.Dropout(dropout) if dropout else None

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is not None:
            raise NotImplementedError(
                "LigerFusedNeighborhoodAttention: Attention mask is not yet supported, got "
                f"{tuple(attention_mask.shape)}; a token sees its neighborhood"
            )
        heads = (*hidden_states.shape[:-1], self.num_heads, self.head_dim)
        q, k, v = (
            layer(hidden_states).view(heads).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        context = ops.neighborhood_attention(q, k, v, self.kernel_size, self.dilation, self.scale)
        merged = context.transpose(1, 2).reshape(hidden_states.shape)
        if self.dropout is not None:
            merged = self.dropout(merged)
        return self.out_proj(merged)  # type: ignore[no-any-return]


class LigerFusedNeighborhoodAttentionLayer(nn.Module):
    """The attention with a norm before it and the residual around it."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        kernel_size: int = 7,
        dilation: int = 1,
        bias: bool = True,
        dropout: float = 0.0,
        layer_norm_eps: float = 1e-5,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.attention = LigerFusedNeighborhoodAttention(
            hidden_size, num_heads, kernel_size, dilation, bias, dropout, scale
        )
        self.layer_norm = nn.LayerNorm(hidden_size, eps=layer_norm_eps)
        self.dropout = nn.Dropout(dropout) if dropout else None

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        context = self.attention(self.layer_norm(hidden_states), attention_mask)
        if self.dropout is not None:
            context = self.dropout(context)
        return hidden_states + context  # type: ignore[no-any-return]


class LigerEmbedding(ours.Embedding):
    """:class:`liger_multi.nn.Embedding`."""

    __init__ = adapter(ours.Embedding.__init__, "self num_embeddings embedding_dim padding_idx")
    forward = adapter(ours.Embedding.forward, "self indices:input")


# --- residual streams ---


class LigerMHC(nn.Module):
    """A layer between residual streams: :func:`functional.liger_mhc_forward`."""

    def __init__(
        self,
        layer: nn.Module,
        *,
        hc: int,
        c: int,
        tmax: int = 20,
        rms_eps: float = 1e-6,
        pre_eps: float = 0.0,
        sinkhorn_eps: float = 1e-6,
        post_mult: float = 2.0,
        phi_dtype: torch.dtype = torch.float16,
        allow_fp32: bool = False,
    ) -> None:
        super().__init__()
        if hc > 16:
            warnings.warn(f"hc={hc} is large: coefficients grow with its square", stacklevel=2)
        self.layer, self.hc, self.c, self.tmax = layer, hc, c, tmax
        self.rms_eps, self.pre_eps, self.sinkhorn_eps = rms_eps, pre_eps, sinkhorn_eps
        self.post_mult, self.allow_fp32 = post_mult, allow_fp32
        outputs = hc * hc + 2 * hc
        self.phi = nn.Parameter((torch.randn(hc * c, outputs) * 0.02).to(phi_dtype))
        self.b = nn.Parameter(torch.zeros(outputs))
        self.alpha_pre, self.alpha_post, self.alpha_res = (
            nn.Parameter(torch.ones(())) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.liger_mhc_forward(  # type: ignore[no-any-return]
            x,
            self.layer,
            self.phi,
            self.b,
            self.alpha_pre,
            self.alpha_post,
            self.alpha_res,
            allow_fp32=self.allow_fp32,
            tmax=self.tmax,
            rms_eps=self.rms_eps,
            pre_eps=self.pre_eps,
            sinkhorn_eps=self.sinkhorn_eps,
            post_mult=self.post_mult,
        )
