"""Let Hugging Face models run this library's operators: ``patch``, ``unpatch``, ``patched``.

Importing this imports no transformers; ``docs/recognition.md`` says how it works.
"""

from liger_multi.patching.apply import patch, patched, unpatch
from liger_multi.patching.lazy_logits.traced import real_logits
from liger_multi.patching.recognize.kinds import MlpKind, MlpNames, NormKind
from liger_multi.patching.recognize.registered import Replacement, register, unregister
from liger_multi.patching.replace.attention import register_attention, unregister_attention
from liger_multi.patching.replace.experts_interface import register_experts, unregister_experts
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
