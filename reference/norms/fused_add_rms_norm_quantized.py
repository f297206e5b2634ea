"""Sum and RMSNorm whose rows leave in FP8 too: fused_add_rms_norm, and codes of its result."""

from liger_multi.reference.float8.quantized import with_codes
from liger_multi.reference.norms import fused_add_rms_norm

forward, backward = with_codes(fused_add_rms_norm, visible=2)
