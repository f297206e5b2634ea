"""``liger_kernel.ops`` and ``liger_kernel.functional``: the same work under other signatures.

The classes have ``apply``, which takes arguments by position. The functions of
``liger_kernel.functional`` also take the implementation of the operator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from liger_multi import checks, ops
from liger_multi.compat.liger_kernel import choosing, functional
from liger_multi.compat.liger_kernel.outputs import unpack_cross_entropy_result
from liger_multi.compat.liger_kernel.signatures import adapter, function_class
from liger_multi.nn import TiledMLP
from liger_multi.nn.vocab_parallel import vocab_parallel_cross_entropy
from liger_multi.ops.fused_linear_log_prob import named, prepared
from liger_multi.ops.fused_linear_log_prob import op as of_head

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
    """The loss of every token in fp32, of logits whose classes are split over processes."""
    validate_formula_and_mode(label_smoothing_formula, label_smoothing_mode)
    smoothing = FORMULAS[label_smoothing_formula]
    local = vocab_parallel_logits.shape[-1]
    if tp_group is None or dist.get_world_size(tp_group) == 1:
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
        vocabulary=local * dist.get_world_size(tp_group),
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
    few = None if selected_token_ids is None else _selected_ids(selected_token_ids, weight)
    arguments = prepared(
        _input,
        weight,
        target,
        None,
        temperature=temperature,
        ignore_index=ignore_index,
        outputs=("log_prob", *(("entropy",) if return_entropy else ())),
    )
    results = of_head(*arguments)
    output = named(results, target, arguments[-1])
    if few is None:
        return functional.scaled_outputs(output)
    lse, low = (results[i].view(*target.shape, 1) for i in (2, 4))
    logits = F.linear(_input, weight[few]).to(lse.dtype) / temperature
    valid = (target != ignore_index).unsqueeze(-1)
    return functional.scaled_outputs(output, torch.where(valid, logits - lse - low, 0))


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
        with choosing.scope(op_name, impl or backend, mode, device):
            return call(*args, **kwargs)

    own = inspect.signature(run).parameters
    choice = [own[name] for name in ("impl", "mode", "backend")]
    every = [*inspect.signature(call).parameters.values(), *choice]
    run.__name__ = run.__qualname__ = op_name
    run.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
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
        choosing.resolve_impl(op_name, impl or backend)  # which raises
    return FUNCTIONS[op_name](*args, impl=impl, backend=backend, **kwargs)
