"""The operators; each module is the contract of one."""

from liger_multi.ops import cross_entropy_inplace as _  # noqa: F401  registers the operator behind inplace=True
from liger_multi.ops.cross_entropy import CrossEntropyOutput, cross_entropy
from liger_multi.ops.fused_add_rms_norm import FusedAddRMSNormOutput, fused_add_rms_norm
from liger_multi.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_multi.ops.fused_linear_log_prob import LogProbOutput, fused_linear_log_prob
from liger_multi.ops.gated_mlp import gated_mlp
from liger_multi.ops.geglu import geglu
from liger_multi.ops.geglu_packed import geglu_packed
from liger_multi.ops.layer_norm import layer_norm
from liger_multi.ops.rms_norm import rms_norm
from liger_multi.ops.rope import rope
from liger_multi.ops.swiglu import swiglu
from liger_multi.ops.swiglu_packed import swiglu_packed

__all__ = [
    "CrossEntropyOutput",
    "FusedAddRMSNormOutput",
    "LogProbOutput",
    "cross_entropy",
    "fused_add_rms_norm",
    "fused_linear_cross_entropy",
    "fused_linear_log_prob",
    "gated_mlp",
    "geglu",
    "geglu_packed",
    "layer_norm",
    "rms_norm",
    "rope",
    "swiglu",
    "swiglu_packed",
]
