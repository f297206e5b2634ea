"""Let Hugging Face models run this library's operators: ``patch``, ``unpatch``, ``patched``.

Importing this imports no transformers; ``docs/recognition.md`` says how it works.

Every kind of layer has a file or folder: ``attention``, ``experts`` (mixtures), ``float8``,
``four_bits`` and ``lora`` (linear layers), ``head`` (the output embedding and its loss), ``mixers``
(convolutions and recurrences), ``mlp``, ``norms`` and ``rotary``. ``evidence`` decides whether a
module computes a known formula: from its code, what that reads, and trials of a replica.
``packing`` keeps packed samples apart.
"""

from liger_multi.patching.apply import patch, patched, unpatch
from liger_multi.patching.attention.interface import register_attention, unregister_attention
from liger_multi.patching.experts.find import register_experts, unregister_experts
from liger_multi.patching.head.traced import real_logits
from liger_multi.patching.kinds import MlpKind, MlpNames, NormKind
from liger_multi.patching.registered import Replacement, register, unregister
from liger_multi.patching.report import Entry, PatchReport, Skipped, Watched

__all__ = [
    "Entry",
    "MlpKind",
    "MlpNames",
    "NormKind",
    "PatchReport",
    "Replacement",
    "Skipped",
    "Watched",
    "patch",
    "patched",
    "real_logits",
    "register",
    "register_attention",
    "register_experts",
    "unpatch",
    "unregister",
    "unregister_attention",
    "unregister_experts",
]
