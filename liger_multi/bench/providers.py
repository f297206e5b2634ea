"""Providers that the benchmark times: our operator, its backends, plain formulas and peers."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_multi
from liger_multi.bench.cases import Case
from liger_multi.bench.peers import FLOORS, PACKAGES, TABLE, missing
from liger_multi.dispatch.op import OPS
from liger_multi.dispatch.registry import packages
from liger_multi.dispatch.resolve import candidate
from liger_multi.testing import samples
from liger_multi.testing.checks import Formula

# --- Liger-Kernel, by our operators ---

LIGER_MODULE = "liger_kernel.transformers.functional"
CHOICE = "LIGER_KERNEL_IMPL"
"""The variable by which a process chooses among Liger's implementations, before it imports them."""
LIGERS = {"liger": "", "liger-cute": "cutedsl", "liger-hopper": "cutedsl"}
"""Providers of Liger-Kernel, and what the variable says for them."""
ROTARY = "liger_kernel.transformers"


def _liger_mlp(swiglu: Formula) -> Formula:
    def mlp(x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
        return F.linear(swiglu(F.linear(x, gate_weight), F.linear(x, up_weight)), down_weight)

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
        output = nll(hidden, weight, target, temperature, -100, 1, "entropy" in outputs)
        return (-output[0], *output[1:]) if isinstance(output, tuple) else -output

    return call


def _liger_moe(moe: Formula) -> Formula:
    def call(
        x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, index: Tensor, routing: Tensor
    ) -> Tensor:
        return moe(x, gate_up_weight, down_weight, index.to(torch.int32), routing)  # type: ignore[no-any-return]

    return call


# Losses of log-probabilities; tvd takes probabilities.


def _prepared(loss: Formula, prepare: Formula) -> Formula:
    def call(
        student: Tensor, teacher: Tensor, *, form: str = "log_prob", teacher_form: str = "log_prob"
    ) -> Tensor:
        return loss(prepare(student, form), prepare(teacher, teacher_form))  # type: ignore[no-any-return]

    return call


def _log_probs_of(x: Tensor, form: str) -> Tensor:
    return x.log_softmax(-1) if form == "logits" else x


def _probabilities_of(x: Tensor, form: str) -> Tensor:
    return x.softmax(-1) if form == "logits" else x.exp()


# Names in LIGER_MODULE, or of another module and what stands in it, and how to call them with our
# arguments.
LIGER: dict[str, tuple[str, Callable[[Formula], Formula]]] = {
    "attention_residuals": (
        "liger_attn_res",
        lambda f: lambda blocks, query, weight, eps=1e-6: f(blocks, query, weight, eps),
    ),
    "fused_moe": ("liger_kernel.ops:LigerFusedMoEFunction.apply", _liger_moe),
    "hyper_connections": (
        "liger_kernel.ops:LigerMHCCoeffsFunction.apply",
        lambda f: (
            lambda x, weight, bias, scale: f(
                x, weight.mT.contiguous(), bias, *scale[:3], True, 20, 1e-6, 0.0, 1e-6, 2.0
            )
        ),
    ),
    "hyper_connections_pre": (
        "liger_kernel.ops:LigerMHCPreFunction.apply",
        lambda f: lambda x, pre: f(x, pre),
    ),
    "hyper_connections_post": (
        "liger_kernel.ops:LigerMHCPostResFunction.apply",
        lambda f: lambda x, out, post, mix: f(x, out, post, mix),
    ),
    "dyt": (
        "liger_kernel.ops:LigerDyTFunction.apply",
        lambda f: lambda x, alpha, weight, bias=None: f(x, alpha, weight, bias),
    ),
    "poly_norm": (
        "liger_kernel.ops:LigerPolyNormFunction.apply",
        lambda f: lambda x, weight, bias, eps=1e-6: f(x, weight, bias, eps, False),
    ),
    "group_norm": (
        "liger_kernel.ops:LigerGroupNormFunction.apply",
        lambda f: (
            lambda x, num_groups, weight, bias, eps=1e-5: f(
                x, weight, bias, x.shape[1], num_groups, eps
            )
        ),
    ),
    "modulated_rms_norm": (
        "liger_kernel.ops:LigerModulatedRMSNormFunction.apply",
        lambda f: (
            lambda x, scale, shift=None, weight=None, eps=1e-6: f(
                x, weight, scale, shift, eps, 0.0, "llama", False
            )
        ),
    ),
    "rope_multimodal": (
        f"{ROTARY}.qwen2vl_mrope:liger_multimodal_rotary_pos_emb",
        lambda f: lambda q, k, cos, sin, *, sections: f(q, k, cos, sin, list(sections)),
    ),
    "rope_complex": (
        f"{ROTARY}.llama4_rope:liger_llama4_text_rotary_pos_emb",
        lambda f: lambda q, k, freqs: f(q, k, torch.view_as_complex(freqs)),
    ),
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
    "kl_div": (
        "liger_kl_div",
        lambda f: _prepared(
            lambda q, p: f(q, p, reduction="batchmean", log_target=True), _log_probs_of
        ),
    ),
    "jsd": ("liger_jsd", lambda f: _prepared(lambda q, p: f(q, p), _log_probs_of)),
    "tvd": (
        "liger_tvd",
        lambda f: _prepared(lambda q, p: f(q, p, reduction="batchmean"), _probabilities_of),
    ),
    "fused_linear_jsd": (
        "liger_fused_linear_jsd",
        lambda f: (
            lambda hidden, weight, teacher_hidden, teacher_weight, target: f(
                hidden, weight, teacher_hidden, teacher_weight, target
            )
        ),
    ),
}
LIGER |= {f"{name}_inplace": LIGER[name] for name in ("kl_div", "jsd", "tvd")}
# CuTe kernels for Hopper under a name of their own, where that of LIGER is for Blackwell alone.
_HOPPER_LOSS = "fused_linear_cross_entropy_sm90"
HOPPER: dict[str, tuple[str, Callable[[Formula], Formula]]] = {
    "fused_linear_cross_entropy": (
        f"liger_kernel.ops.cutedsl.ops.{_HOPPER_LOSS}:liger_{_HOPPER_LOSS}",
        lambda f: lambda hidden, weight, target: f(hidden, weight, target),
    ),
}


# --- providers ---


@dataclass(frozen=True)
class Provider:
    """One implementation of one operator.

    Attributes:
        name: As in ``--providers``.
        call: Takes the tensors by name, returns the result.
        overwrites: It may write its inputs or the upstream gradient; they are refilled before
            every call.
        floor: A lower bound to compare with, no implementation: its result is not checked.
        scope: In force around every call.
        backend: What a call of our own operator resolves to.
    """

    name: str
    call: Formula
    overwrites: bool = False
    floor: bool = False
    scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    backend: str | None = None


# --- look-up ---


def known_names() -> list[str]:
    """Every name that ``--providers`` takes, in the order of the tables."""
    formulas = dict.fromkeys(name for peers_of_op in TABLE.values() for name in peers_of_op)
    return list(dict.fromkeys(["ours", "reference", *packages(), *formulas, "compile", *LIGERS]))


def default() -> list[str]:
    """What runs when nothing is named: no vendor twice, ``ours`` stands for it."""
    return [n for n in known_names() if n in ("ours", "reference", "triton") or n not in packages()]


def find(name: str, case: Case, device: torch.device, dtype: torch.dtype) -> Provider | str:
    """The provider of a case, or why there is none."""
    if name == "ours" or name in packages():
        return _internal(name, case, device, dtype)
    if name in LIGERS:
        return _liger(name, case, device)
    formula = TABLE.get(case.op, {}).get("torch" if name == "compile" else name)
    if formula is None:
        return "has no such operator"
    if name == "torch-fused" and not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return f"torch {torch.__version__} has no chunked linear_cross_entropy"
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
        return f"{PACKAGES[name]} is not installed"
    if name == "transformers" and (function := missing(case.op)):
        return f"the installed transformers has no {function}"
    if name == "compile":
        torch.compiler.reset()  # shapes compiled for one case must not make the next one dynamic
        formula = _accepting(torch.compile(formula, dynamic=False), formula)
    options = _options(name, case, formula)
    if isinstance(options, str):
        return options
    inplace = bool(case.sample.options.get("inplace")) and name in PACKAGES
    return Provider(name, _with_options(formula, options), overwrites=inplace, floor=name in FLOORS)


def _internal(name: str, case: Case, device: torch.device, dtype: torch.dtype) -> Provider | str:
    public = samples.function(case.op, case.sample.options)
    if name != "ours":
        for direction in OPS[case.op].primitives:
            reason = candidate(name, direction, device, dtype).reason
            if reason is not None:
                return reason
    chosen = liger_multi.explain(case.op, device, dtype).chosen(case.op)

    def call(**arguments: Any) -> Any:
        return public(**arguments)

    return Provider(
        name,
        call,
        overwrites=bool(case.sample.options.get("inplace")),
        scope=contextlib.nullcontext
        if name == "ours"
        else lambda: liger_multi.use(**{case.op: name}),
        backend=chosen if name == "ours" else name,
    )


def _liger(provider: str, case: Case, device: torch.device) -> Provider | str:
    table = HOPPER if provider == "liger-hopper" else LIGER
    if case.op not in table:
        return "has no such operator"
    if device.type == "cpu":
        return "runs on accelerators only"
    required = LIGERS[provider]
    if os.environ.get(CHOICE, "") != required:
        return f"runs in processes with{f' {CHOICE}={required}' if required else f'out {CHOICE}'}"
    name, adapt = table[case.op]
    try:
        module, _, name = name.rpartition(":")
        owner = importlib.import_module(module or LIGER_MODULE)
        function = operator.attrgetter(name)(owner)
    except Exception as failure:  # an import may fail in any way: a missing package, a driver
        return f"{type(failure).__name__}: {failure}"
    formula = adapt(function)
    options = _options(provider, case, formula)
    if isinstance(options, str):
        return options
    return Provider(provider, _with_options(formula, options), overwrites=True)


def _options(name: str, case: Case, formula: Formula) -> dict[str, Any] | str:
    """The sample's options for a formula, or which argument it does not take."""
    options = {k: v for k, v in case.sample.options.items() if k != "inplace"}
    accepted = inspect.signature(getattr(formula, "accepts", formula)).parameters
    for argument in (*case.sample.tensors, *options):
        if argument not in accepted:
            return f"{name} of {case.op} does not take {argument}"
    return options


def _accepting(formula: Formula, accepts: Formula) -> Formula:
    formula.accepts = accepts  # type: ignore[attr-defined]
    return formula


def _with_options(formula: Formula, options: Mapping[str, Any]) -> Formula:
    return lambda **tensors: formula(**tensors, **options)
