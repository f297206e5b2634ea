"""``liger_kernel.ops`` and ``liger_kernel.functional``: the same work under other signatures.

The classes have ``apply``, which takes arguments by position. The functions of
``liger_kernel.functional`` also take the implementation of the operator.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from liger_multi import checks, configure, ops, use
from liger_multi.compat.liger_kernel import functional
from liger_multi.compat.liger_kernel.signatures import (
    ArgumentError,
    adapter,
    function_class,
    unpack_cross_entropy_result,
)
from liger_multi.dispatch import registry
from liger_multi.dispatch.launch import device_info
from liger_multi.nn import TiledMLP
from liger_multi.nn.vocab_parallel import vocab_parallel_cross_entropy
from liger_multi.ops.fused_linear_log_prob import as_output, op as of_head, prepared

# --- which implementation runs, by Liger-Kernel's names ---

# Precedence is Liger's: the argument ``impl``, ``LIGER_KERNEL_IMPL_<OP>``, ``LIGER_KERNEL_IMPL``,
# :func:`set_impl`. Triton's names stand for what ``auto`` takes here, ``pytorch`` for the
# reference. What Liger-Kernel has and this library has not falls back with a warning, or raises
# with ``LIGER_KERNEL_STRICT=1``. :func:`liger_multi.configure` has finer choices.

BACKENDS = {"nvidia-triton": ("cuda", "rocm"), "ascend-triton": ("npu",), "pytorch": ("reference",)}
"""Name of an implementation to our backends; ``pytorch`` is there on every device."""
ABSENT = ("nvidia-cutile", "nvidia-cutedsl")
_LANGUAGES = {name.partition("-")[2]: name for name in ("nvidia-triton", *ABSENT)}
OPERATORS = (
    "rms_norm",
    "layer_norm",
    "fused_add_rms_norm",
    "jsd",
    "kl_div",
    "softmax",
    "swiglu",
    "geglu",
    "rope",
    "cross_entropy",
    "fused_linear_cross_entropy",
    "fused_linear_jsd",
)
"""Those of ``liger_kernel.functional``; each is an operator of ours by the same name."""

VARIABLES = ("LIGER_KERNEL_IMPL_{}", "LIGER_KERNEL_BACKEND_{}", "LIGER_KERNEL_IMPL")
STRICT = "LIGER_KERNEL_STRICT"


class ImplNotAvailableError(RuntimeError):
    """The implementation that was asked for cannot run."""


class NoImplAvailableError(RuntimeError):
    """There is no such operator. Of those that there are, the reference always can run."""


class LigerImplFallbackWarning(UserWarning):
    """Another implementation runs than the one that was asked for."""


BackendNotAvailableError = ImplNotAvailableError
NoBackendAvailableError = NoImplAvailableError
LigerBackendFallbackWarning = LigerImplFallbackWarning


@dataclass
class Capability:
    """What an implementation needs."""

    min_cc: tuple[int, int] | None = None
    max_cc: tuple[int, int] | None = None
    modules: list[str] = field(default_factory=list)
    requires_cuda: bool = False
    predicate: Callable[..., bool] | None = None

    def is_satisfied(self, device: Any = None) -> bool:
        """Whether it is all there now; nothing is kept."""
        return self.reason_if_unsatisfied(device) is None

    def reason_if_unsatisfied(self, device: Any = None) -> str | None:
        """What is missing; None where nothing is."""
        for name in self.modules:
            try:
                importlib.import_module(name)
            except Exception as error:  # a library of a missing driver raises what it likes
                return f"module {name!r} is not importable: {error}"
        if self.requires_cuda or self.min_cc or self.max_cc:
            if not torch.cuda.is_available():
                return "no CUDA device is available"
            arch = device_info(torch.device("cuda" if device is None else device)).arch
            lowest, highest = (cc and f"sm{cc[0]}{cc[1]}" for cc in (self.min_cc, self.max_cc))
            capability = int(arch[2:]) if arch.startswith("sm") else -1  # another vendor's has none
            if (lowest and capability < int(lowest[2:])) or (
                highest and not 0 <= capability <= int(highest[2:])
            ):
                return f"device {arch} is not in {lowest or ''}..{highest or ''}"
        try:
            satisfied = self.predicate is None or self.predicate()
        except Exception as error:
            return f"the predicate raised {error!r}"
        return None if satisfied else "the predicate is False"


PYTORCH_FALLBACK = Capability()


@dataclass
class OpImpl:
    """One implementation of an operator; the function of ``liger_kernel.functional`` runs it."""

    op_name: str
    impl_name: str
    capability: Capability = field(default_factory=Capability)
    forward: Callable[..., Any] | None = None
    autograd_function: Any = None
    modes: tuple[str, ...] = ()
    default_mode: str | None = None
    preference_rank: int = 100
    tolerances: dict[Any, Any] = field(default_factory=dict)
    notes: str = ""

    @property
    def backend(self) -> str:
        """The name of the implementation."""
        return self.impl_name

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run it; ``autograd_function`` goes before ``forward``, and takes no keywords."""
        name = f"OpImpl({self.op_name!r}, {self.impl_name!r})"
        if self.autograd_function is not None:
            if {*kwargs} - {"mode"}:
                raise TypeError(
                    f"{name} is an autograd_function registration, which takes arguments by "
                    f"position, got {sorted(kwargs)}"
                )
            return self.autograd_function.apply(*args)
        if self.forward is None:
            raise RuntimeError(f"{name} has no callable")
        return self.forward(*args, **kwargs)


# --- what there is ---


def all_registered_ops() -> tuple[str, ...]:
    """The operators."""
    return OPERATORS


def all_impls(op_name: str) -> list[str]:
    """Implementations of an operator, on any device."""
    return [*BACKENDS] if op_name in OPERATORS else []


def available_impls(op_name: str, device: Any = None) -> list[str]:
    """Those that can run on a device, the preferred one first; None: the accelerator or the CPU."""
    if device is None:
        impls = (
            torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        )
        device = impls or "cpu"
    serving = {b.name for b in registry.serving(torch.device(device).type)} | {"reference"}
    available = {name for name in serving if registry.unavailable(name) is None}
    return [name for name in all_impls(op_name) if available & {*BACKENDS[name]}]


def list_registered(op_name: str) -> list[OpImpl]:
    """Implementations of an operator."""
    return [_impl(op_name, name) for name in all_impls(op_name)]


def get_registered(op_name: str, backend: str) -> OpImpl | None:
    """One implementation of an operator; None where it has none of that name."""
    return _impl(op_name, backend) if backend in all_impls(op_name) else None


def _impl(op_name: str, name: str) -> OpImpl:
    rank = [*BACKENDS].index(name)
    return OpImpl(
        op_name,
        name,
        forward=partial(FUNCTIONS[op_name], impl=name),
        modes=("default",),
        default_mode="default",
        preference_rank=rank,
    )


def clear_available_cache() -> None:
    """Nothing is kept."""


def get_discovery_failures() -> dict[str, str]:
    """Why backends cannot run on this machine."""
    reasons = {name: registry.unavailable(name) for name in registry.backends()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        """Refused.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"{name}: an implementation of one's own is a backend here; docs/extending.md says how "
            "one is added"
        )

    return refuse


register_impl = register_op = _refused("register_impl")
declare_op_locations = _refused("declare_op_locations")


# --- what was chosen ---

_chosen: str | None = None


def _full(name: Any) -> str | None:
    """A name with its device; None where nothing is said."""
    return _LANGUAGES.get(str(name), str(name)) if name else None


def set_impl(name: str | None) -> None:
    """Choose an implementation for this process; None takes the choice back.

    ``pytorch`` configures the reference as the backend of every operator.
    """
    global _chosen
    previous, _chosen = _chosen, _full(name)
    if _chosen == "pytorch":
        configure({"default": "reference"})
    elif previous == "pytorch":
        configure(None)


def get_impl() -> str | None:
    """The implementation that :func:`set_impl` chose last, with its device."""
    return _chosen


def read_variables() -> None:
    """Take over ``LIGER_KERNEL_IMPL``, which patched models follow too."""
    impl = _full(os.environ.get(VARIABLES[-1]))
    if impl == "pytorch":
        set_impl(impl)
    elif impl is not None and impl not in BACKENDS:
        emit_fallback_warning("every operator", impl, "auto", "liger_multi has no such backend")


def emit_fallback_warning(op_name: str, requested: str, actual: str, reason: str) -> None:
    """Say that another implementation runs; under ``LIGER_KERNEL_STRICT=1`` raise instead."""
    message = f"{op_name}: {requested!r} is not available ({reason})"
    if os.environ.get(STRICT) == "1":
        raise ImplNotAvailableError(f"{message}; {actual!r} would run")
    warnings.warn(f"{message}; {actual!r} runs", LigerImplFallbackWarning, stacklevel=2)


def resolve_impl(op_name: str, requested: str | None = None, device: Any = None) -> OpImpl:
    """The implementation that runs.

    Raises:
        NoImplAvailableError: An unknown operator.
        ImplNotAvailableError: An unknown implementation; under ``LIGER_KERNEL_STRICT=1`` also one
            that cannot run on the device.
    """
    variables = (os.environ.get(v.format(op_name.upper())) for v in VARIABLES)
    name = _full(next(filter(None, (requested, *variables, _chosen)), None))
    all_names, available = all_impls(op_name), available_impls(op_name, device)
    if not all_names and name is None:
        raise NoImplAvailableError(
            f"No implementation available for op {op_name!r}. Operators: {', '.join(OPERATORS)}"
        )
    if not all_names or (name is not None and name not in (*all_names, *ABSENT)):
        raise ImplNotAvailableError(
            f"No {name!r} implementation registered for op {op_name!r}. Registered: "
            f"{all_names or '<none>'}."
        )
    if name is None or name in available:
        return _impl(op_name, name or available[0])
    reason = "liger_multi has no such backend" if name in ABSENT else "not on this device"
    emit_fallback_warning(op_name, name, available[0], reason)
    return _impl(op_name, available[0])


@contextlib.contextmanager
def scope(op_name: str, requested: str | None, mode: str | None, device: Any) -> Iterator[None]:
    """The implementation that was chosen for a call."""
    if mode not in (None, "default"):
        raise ValueError(f"{op_name}: mode must be 'default', got {mode!r}")
    impl_name = resolve_impl(op_name, requested, device).impl_name
    if impl_name == "pytorch":
        with use(default="reference"):
            yield
    elif requested and _chosen == "pytorch":
        with use(default="auto"):
            yield
    else:
        yield


set_backend, get_backend = set_impl, get_impl
available_backends, all_backends, resolve_backend = available_impls, all_impls, resolve_impl


# --- losses that are functions here alone ---


def _replaceable(logits: Tensor) -> bool:
    """Whether logits may be overwritten by their gradient: they come from an operation."""
    base = logits._base
    of_leaf = base is not None and base.is_leaf and base.requires_grad
    return not logits.is_leaf and not of_leaf and logits.is_contiguous()


def _cross_entropies(*, inplace: bool = False, **options: Any) -> Any:
    """:func:`liger_multi.ops.cross_entropy`; four results, None where not asked for."""
    inplace = inplace and _replaceable(options["input"])
    return unpack_cross_entropy_result(functional.liger_cross_entropy(**options, inplace=inplace))


def _replacing_cross_entropies(**options: Any) -> Any:
    """The same, which may overwrite logits that an operation made by their gradient."""
    return _cross_entropies(inplace=True, **options)


def _fused_cross_entropies(**options: Any) -> Any:
    """:func:`liger_multi.ops.fused_linear_cross_entropy`; four results, as above."""
    return unpack_cross_entropy_result(functional.liger_fused_linear_cross_entropy(**options))


FORMULAS = {"pytorch": "torch", "megatron": "megatron"}
MODES = {"global": "vocabulary", "partition": "part"}


def validate_formula_and_mode(label_smoothing_formula: str, label_smoothing_mode: str) -> None:
    """Both are known.

    Raises:
        ValueError: One is not.
    """
    name = "LigerVocabParallelCEFunction"
    checks.one_of(name, "label_smoothing_formula", label_smoothing_formula, FORMULAS)
    checks.one_of(name, "label_smoothing_mode", label_smoothing_mode, MODES)


def vocab_parallel(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    tp_group: Any,
    ignore_index: int,
    label_smoothing: float,
    label_smoothing_formula: str,
    label_smoothing_mode: str,
) -> Tensor:
    """The loss of every token in fp32, of logits whose classes are split over processes.

    A target outside of the vocabulary costs nothing: Megatron-Core has such targets, such as -1,
    where its loss mask is 0.
    """
    validate_formula_and_mode(label_smoothing_formula, label_smoothing_mode)
    if vocab_parallel_logits.ndim != 3:
        raise ValueError(
            "vocab_parallel_logits must be 3-D (sequence, batch, classes), got "
            f"{tuple(vocab_parallel_logits.shape)}"
        )
    smoothing = FORMULAS[label_smoothing_formula]
    local = vocab_parallel_logits.shape[-1]
    size = 1 if tp_group is None else dist.get_world_size(tp_group)
    target = torch.where((target >= 0) & (target < local * size), target, ignore_index)
    if size == 1:
        share = label_smoothing * (local / max(1, local - 1) if smoothing == "megatron" else 1.0)
        return ops.cross_entropy(
            vocab_parallel_logits,
            target,
            ignore_index=ignore_index,
            label_smoothing=share,
            reduction="none",
        )
    return vocab_parallel_cross_entropy(
        vocab_parallel_logits,
        target,
        tp_group,
        vocabulary=local * size,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        smoothing=smoothing,
        smoothed=MODES[label_smoothing_mode],
        reduction="none",
    )


def cross_entropy_and_distance(
    student_logits: Tensor, teacher_logits: Tensor, target: Tensor, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Cross entropy and total variation distance of every token, in fp32."""
    if student_logits.ndim != 2:
        raise ArgumentError(
            "student_logits and teacher_logits must be 2D (rows, classes), got "
            f"{tuple(student_logits.shape)}"
        )
    cross = ops.cross_entropy(student_logits, target, ignore_index=ignore_index, reduction="none")
    distance = ops.tvd(
        student_logits,
        teacher_logits.detach(),
        target,
        form="logits",
        ignore_index=ignore_index,
        reduction="none",
    )
    return cross, distance


def _selected_ids(ids: Tensor, weight: Tensor) -> Tensor:
    name = "LigerFusedLinearScaledCrossEntropyFunction"
    if ids.ndim != 1 or ids.is_floating_point():
        checks.refuse(name, "selected_token_ids must be integers of shape (K,)", ids)
    if torch.compiler.is_compiling() or ids.device.type != "cpu":
        return ids  # reading them would break the graph, or wait for the device
    if bool(((ids < 0) | (ids >= weight.shape[0])).any()):
        raise ValueError(
            f"{name}: selected_token_ids must lie in [0, {weight.shape[0]}), got {ids.tolist()}"
        )
    return ids


def _scaled_cross_entropy(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature: float = 1.0,
    ignore_index: int = -100,
    m_tiles_per_cluster: int = 1,
    return_entropy: bool = False,
    selected_token_ids: Tensor | None = None,
) -> Any:
    """:func:`liger_multi.ops.fused_linear_log_prob`: what every token costs, in fp32.

    With ``return_entropy`` a tuple that has the rows' entropy second. With ``selected_token_ids``
    ``(K,)`` its last entry is the log-probabilities ``(tokens, K)`` of these classes. Rows that are
    ignored are 0 in all of them.
    """
    outputs = ("log_prob", *(("entropy",) if return_entropy else ()))
    options: dict[str, Any] = {
        "temperature": temperature,
        "ignore_index": ignore_index,
        "outputs": outputs,
    }
    if selected_token_ids is None:
        output = ops.fused_linear_log_prob(_input, weight, target, **options)
        return functional.scaled_outputs(output)
    token_ids = _selected_ids(selected_token_ids, weight)
    arguments = prepared(_input, weight, target, None, **options)
    results = of_head(*arguments)
    output = as_output(results, target, arguments[-1])
    lse, lse_low = (results[i].view(*target.shape, 1) for i in (2, 4))
    logits = F.linear(_input, weight[token_ids]).to(lse.dtype) / temperature
    valid = (target != ignore_index).unsqueeze(-1)
    return functional.scaled_outputs(output, torch.where(valid, logits - lse - lse_low, 0))


# --- MLPs, experts and the embedding ---


def mlp(
    input: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
) -> Tensor:
    """:func:`liger_multi.ops.gated_mlp`; with multipliers, linear layers around the activation."""
    if gate_multiplier == 1.0 and down_multiplier == 1.0:
        return ops.gated_mlp(input, gate_weight, up_weight, down_weight)
    inner = ops.swiglu(
        F.linear(input, gate_weight),
        F.linear(input, up_weight),
        gate_multiplier=gate_multiplier,
        down_multiplier=down_multiplier,
    )
    return F.linear(inner, down_weight)


class _Call(nn.Module):
    """A function of a module and a piece of its input, as the module that TiledMLP runs."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor], module: nn.Module) -> None:
        super().__init__()
        self.call, self.module = call, module
        self.training = module.training

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.module, x)


def apply_tiled_mlp(
    fn: Callable[[nn.Module, Tensor], Tensor],
    mlp_module: nn.Module,
    x: Tensor,
    num_shards: int | None = None,
    compute_params: Sequence[nn.Parameter] | None = None,
) -> Tensor:
    """:class:`liger_multi.nn.TiledMLP` of ``fn(mlp_module, x)``.

    ``compute_params`` is not read: every parameter of the module that takes part gets its gradient.
    """
    return TiledMLP(_Call(fn, mlp_module), num_shards)(x)  # type: ignore[no-any-return]


def _packed(y: Tensor, in_place: bool = False) -> Tensor:
    """:func:`liger_multi.ops.swiglu_packed`."""
    return ops.swiglu_packed(y)


# --- the classes of liger_kernel.ops ---

OF_LOGITS = (
    "weight ignore_index lse_square_scale label_smoothing reduction softcap return_z_loss "
    "return_token_accuracy return_predicted_tokens"
)
OF_HEAD = (
    "ce_weight ignore_index lse_square_scale label_smoothing reduction softcap return_z_loss "
    "accum_dtype use_token_scaling return_token_accuracy return_predicted_tokens"
)
_OF_HEAD = f"_input:input weight target bias {OF_HEAD}"
_OF_JSD = "_input:input target shift_labels beta ignore_index"
_OF_HEADS = (
    "student_input student_weight teacher_input teacher_weight shift_labels jsd_beta ignore_index "
    "temperature"
)
_OF_KL = "y_pred:input y_true:target reduction log_target eps"

f = functional
_logits, _head = f.liger_cross_entropy, f.liger_fused_linear_cross_entropy
CLASSES: dict[str, Callable[..., Any]] = {
    "RMSNorm": f.liger_rms_norm,
    "FusedAddRMSNorm": adapter(
        f.liger_fused_add_rms_norm, "X R W eps offset casting_mode in_place", in_place=False
    ),
    "ModulatedRMSNorm": f.liger_modulated_rms_norm,
    "LayerNorm": f.liger_layer_norm,
    "GroupNorm": f.liger_group_norm,
    "PolyNorm": f.liger_poly_norm,
    "DyT": f.liger_dyt,
    "SiLUMul": f.liger_swiglu,
    "FusedGateUpSiLUMul": _packed,
    "GELUMul": f.liger_geglu,
    "ReLUSquared": adapter(ops.relu_squared, "X:x"),
    "Softmax": adapter(ops.softmax, "input_:x"),
    "Sparsemax": adapter(ops.sparsemax, "x dim"),
    "Rope": f.liger_rope,
    "Qwen2VLMRope": f.liger_qwen2vl_mrope,
    "Llama4Rope": adapter(f.liger_llama4_text_rotary_pos_emb, "q:xq k:xk freqs_cis BLOCK_SIZE"),
    "CrossEntropy": adapter(
        _replacing_cross_entropies, f"_input:input target {OF_LOGITS}", _logits
    ),
    "JSD": adapter(f.liger_jsd, f"{_OF_JSD} jsd_impl jsd_mode"),
    "KLDivLoss": adapter(f.liger_kl_div, _OF_KL, reduction="batchmean"),
    "TVDLoss": adapter(
        f.liger_tvd, "p:input q:target shift_labels reduction ignore_index", reduction="batchmean"
    ),
    "FusedCETVD": cross_entropy_and_distance,
    "VocabParallelCE": vocab_parallel,
    "FusedLinearCrossEntropy": adapter(
        _fused_cross_entropies, f"{_OF_HEAD} ce_impl ce_mode chunk_mem_const", _head
    ),
    "FusedLinearJSD": adapter(
        f.liger_fused_linear_jsd, f"{_OF_HEADS} accum_dtype jsd_impl jsd_mode"
    ),
    "FusedLinearKLDiv": f.liger_fused_linear_kl_div,
    "FusedLinearScaledCrossEntropy": _scaled_cross_entropy,
    "FusedLinearScaledCrossEntropyTP": adapter(
        f.liger_fused_linear_scaled_cross_entropy_tp,
        "_input:input weight target tp_group temperature ignore_index tiles_per_reduce "
        "return_entropy",
    ),
    "MLP": mlp,
    "TiledMLP": adapter(apply_tiled_mlp, "fn mlp_module x shards:num_shards compute_params"),
    "FusedMoE": adapter(
        ops.fused_moe,
        "x gate_up_proj:gate_up_weight down_proj:down_weight top_k_index:index "
        "top_k_weights:routing",
    ),
    "MHCCoeffs": f.liger_mhc_coeffs,
    "MHCPre": f.liger_mhc_pre,
    "MHCPostRes": f.liger_mhc_post_res,
    "AttnRes": adapter(ops.attention_residuals, "V_stacked:blocks w_query:query w_norm:weight eps"),
    "MultiTokenAttention": f.liger_multi_token_attention,
    "FusedNeighborhoodAttention": f.liger_fused_neighborhood_attention,
    "Embedding": adapter(ops.embedding, "embeddings:weight indices:index"),
}
"""Name without ``Liger`` and ``Function`` to what ``apply`` is."""
globals().update(
    {
        f"Liger{name}Function": function_class(f"Liger{name}Function", call)
        for name, call in CLASSES.items()
    }
)


# --- liger_kernel.functional ---


def chosen(op_name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function with the implementation that its caller, the environment or set_impl chose."""

    def run(
        *args: Any,
        impl: str | None = None,
        mode: str | None = None,
        backend: str | None = None,
        **kwargs: Any,
    ) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        device = tensors[0].device if tensors else None
        with scope(op_name, impl or backend, mode, device):
            return call(*args, **kwargs)

    run_parameters = inspect.signature(run).parameters
    choice = [run_parameters[name] for name in ("impl", "mode", "backend")]
    all_parameters = [*inspect.signature(call).parameters.values(), *choice]
    run.__name__ = run.__qualname__ = op_name
    run.__signature__ = inspect.Signature(all_parameters)  # type: ignore[attr-defined]
    run.__doc__ = call.__doc__
    return run


_CALLS: dict[str, Callable[..., Any]] = {
    "rms_norm": adapter(
        f.liger_rms_norm,
        "x:X weight:W eps offset casting_mode in_place row_mode",
        eps=1e-6,
        in_place=False,
    ),
    "layer_norm": adapter(ops.layer_norm, "x weight bias eps", eps=1e-6),
    "fused_add_rms_norm": adapter(
        f.liger_fused_add_rms_norm,
        "X R W eps offset casting_mode in_place",
        eps=1e-6,
        in_place=False,
    ),
    "jsd": adapter(f.liger_jsd, _OF_JSD),
    "kl_div": adapter(f.liger_kl_div, _OF_KL, reduction="batchmean"),
    "softmax": f.liger_softmax,
    "swiglu": f.liger_swiglu,
    "geglu": f.liger_geglu,
    "rope": adapter(f.liger_rope, "q k cos sin position_ids unsqueeze_dim"),
    "cross_entropy": adapter(_cross_entropies, f"input target {OF_LOGITS}", _logits),
    "fused_linear_cross_entropy": adapter(_fused_cross_entropies, _OF_HEAD, _head),
    "fused_linear_jsd": adapter(f.liger_fused_linear_jsd, _OF_HEADS),
}
FUNCTIONS = {name: chosen(name, call) for name, call in _CALLS.items()}
"""By the name of the operator."""
globals().update(FUNCTIONS)


def dispatch(
    op_name: str, *args: Any, impl: str | None = None, backend: str | None = None, **kwargs: Any
) -> Any:
    """Call an operator by its name.

    Raises:
        NoImplAvailableError: An unknown operator.
        ImplNotAvailableError: An unknown implementation.
    """
    if op_name not in FUNCTIONS:
        resolve_impl(op_name, impl or backend)  # which raises
    return FUNCTIONS[op_name](*args, impl=impl, backend=backend, **kwargs)
