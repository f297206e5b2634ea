"""Losses on log-probabilities of tokens: preferences, policies, distillation, sequences."""

from liger_multi.losses.distillation import (
    DistillationMetrics,
    DistillationOptions,
    Teacher,
    TopK,
    distillation_loss,
)
from liger_multi.losses.one_pass import token_sum
from liger_multi.losses.policy import PolicyMetrics, PolicyOptions, policy_loss
from liger_multi.losses.preference import (
    CPOOptions,
    DPOOptions,
    KTOMetrics,
    KTOOptions,
    PreferenceMetrics,
    cpo_loss,
    dpo_loss,
    kto_divergence,
    kto_loss,
)
from liger_multi.losses.sequence import (
    MTPMetrics,
    SequenceMetrics,
    SequenceOptions,
    mtp_loss,
    sequence_loss,
)
from liger_multi.losses.shared import segments_of
from liger_multi.losses.sources import Head, Logits, Source, tokens

__all__ = [
    "CPOOptions",
    "DPOOptions",
    "DistillationMetrics",
    "DistillationOptions",
    "Head",
    "KTOMetrics",
    "KTOOptions",
    "Logits",
    "MTPMetrics",
    "PolicyMetrics",
    "PolicyOptions",
    "PreferenceMetrics",
    "SequenceMetrics",
    "SequenceOptions",
    "Source",
    "Teacher",
    "TopK",
    "cpo_loss",
    "distillation_loss",
    "dpo_loss",
    "kto_divergence",
    "kto_loss",
    "mtp_loss",
    "policy_loss",
    "segments_of",
    "sequence_loss",
    "token_sum",
    "tokens",
]
