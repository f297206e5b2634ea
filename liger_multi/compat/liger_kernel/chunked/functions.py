"""The losses as ``LigerFusedLinear*Function.apply`` and ``liger_fused_linear_*``.

``apply`` calls the module of the loss, whose gradients are those of :mod:`liger_multi.losses`.
Hidden states come before the weight in all of them. A loss of one's own derives from a base class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from liger_multi.compat.liger_kernel.chunked import bases, policy, preference

_HOOKS = ("forward", "preference_loss_fn", "ppo_loss_fn", "distillation_loss_fn")


class _Sealed(torch.autograd.Function):
    """A loss whose ``apply`` would not call what a subclass writes."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = cls.__module__ == __name__
        written = [name for name in _HOOKS if name in vars(cls)]
        if written and not known:
            base = next(b for b in cls.__mro__ if b.__name__.endswith("Base"))
            raise TypeError(
                f"{cls.__name__}: {', '.join(written)} of {cls.__bases__[0].__name__} would not be "
                f"called; derive from {base.__name__}"
            )


def _applied(loss: Any, names: str, **defaults: Any) -> Callable[..., Any]:
    """A function whose arguments are options of a loss and what it is called with.

    Args:
        loss: The class of the module.
        names: In the order of ``apply``; ``weight`` is the module's ``lin_weight``.
        defaults: Defaults that are not the module's.
    """
    call = inspect.signature(loss.forward).parameters
    renamed = {"weight": "lin_weight"} if "lin_weight" in call else {}
    order, of = tuple(names.split()), inspect.Parameter
    usual = {
        n: loss.defaults[n] if n in loss.defaults else call[renamed.get(n, n)].default
        for n in order
    } | defaults
    needed = max((i for i, n in enumerate(order) if usual[n] is of.empty), default=-1)

    def apply(*args: Any, **kwargs: Any) -> Any:
        """The loss, and what the module returns with it."""
        if len(args) > len(order) or not {*kwargs} <= {*order}:
            raise TypeError(f"apply takes {', '.join(order)}")
        arguments = {**defaults, **dict(zip(order, args)), **kwargs}
        module = loss(**{n: v for n, v in arguments.items() if n in loss.defaults})
        return module(
            **{renamed.get(n, n): v for n, v in arguments.items() if n not in loss.defaults}
        )

    shown = [
        of(n, of.POSITIONAL_OR_KEYWORD, default=of.empty if i <= needed else usual[n])
        for i, n in enumerate(order)
    ]
    apply.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return apply


_PAIRS = "_input weight target bias"
_REFERENCE = "ref_input ref_weight ref_bias"
_TEACHER = (
    "student_input student_weight teacher_input teacher_weight true_labels student_bias "
    "teacher_bias weight_hard_loss weight_soft_loss beta ignore_index temperature compiled "
    "chunk_size return_soft_hard_loss"
)
liger_fused_linear_dpo = _applied(
    preference.LigerFusedLinearDPOLoss,
    f"{_PAIRS} {_REFERENCE} ignore_index beta compute_nll_loss compiled use_ref_model "
    "average_log_prob chunk_size loss_type label_smoothing discopop_tau alpha",
)
liger_fused_linear_cpo = _applied(
    preference.LigerFusedLinearCPOLoss,
    f"{_PAIRS} ignore_index beta alpha label_smoothing compute_nll_loss compiled "
    "average_log_prob chunk_size",
)
liger_fused_linear_simpo = _applied(
    preference.LigerFusedLinearSimPOLoss,
    f"{_PAIRS} ignore_index beta alpha label_smoothing compute_nll_loss compiled gamma chunk_size",
    compute_nll_loss=False,
)
liger_fused_linear_orpo = _applied(
    preference.LigerFusedLinearORPOLoss,
    f"{_PAIRS} ignore_index beta compute_nll_loss nll_target compiled chunk_size",
)
liger_fused_linear_kto = _applied(
    preference.LigerFusedLinearKTOLoss,
    f"_input weight target preference_labels bias {_REFERENCE} kl ignore_index beta compiled "
    "use_ref_model average_log_prob chunk_size",
    preference_labels=inspect.Parameter.empty,
    use_ref_model=True,
)
liger_fused_linear_grpo = _applied(
    policy.FunctionalGRPOLoss,
    "_input weight selected_token_ids attention_mask advantages bias ref_per_token_logps "
    f"old_per_token_logps {_REFERENCE} beta epsilon_low epsilon_high loss_type "
    "max_completion_length importance_sampling_level sapo_temperature_pos sapo_temperature_neg "
    "temperature compiled use_ref_model chunk_size vllm_is_ratio delta use_bias_correction_kl "
    "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg num_items_in_batch",
)
liger_fused_linear_jsd = _applied(preference.LigerFusedLinearJSDLoss, _TEACHER)
liger_fused_linear_cosine = _applied(preference.LigerFusedLinearCosineSimilarityLoss, _TEACHER)


_PAIR_BASE = bases.LigerFusedLinearPreferenceBase
_TEACHER_BASE = bases.LigerFusedLinearDistillationBase
_FUNCTIONS: dict[str, tuple[Callable[..., Any], type[torch.autograd.Function]]] = {
    "DPO": (liger_fused_linear_dpo, _PAIR_BASE),
    "CPO": (liger_fused_linear_cpo, _PAIR_BASE),
    "SimPO": (liger_fused_linear_simpo, _PAIR_BASE),
    "ORPO": (liger_fused_linear_orpo, _PAIR_BASE),
    "KTO": (liger_fused_linear_kto, bases.LigerFusedLinearUnpairedPreferenceBase),
    "GRPO": (liger_fused_linear_grpo, bases.LigerFusedLinearPPOBase),
    "JSD": (liger_fused_linear_jsd, _TEACHER_BASE),
    "CosineSimilarity": (liger_fused_linear_cosine, _TEACHER_BASE),
}
"""Name without ``LigerFusedLinear`` and ``Function`` to what ``apply`` is, and the base class."""
for _name, (_apply, _base) in _FUNCTIONS.items():
    _members = {
        "apply": staticmethod(_apply),
        "__doc__": f":class:`LigerFusedLinear{_name}Loss`.",
        "__module__": __name__,
    }
    _class = f"LigerFusedLinear{_name}Function"
    globals()[_class] = type(_class, (_Sealed, _base), _members)
