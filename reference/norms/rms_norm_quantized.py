"""RMSNorm whose rows leave in FP8 too: rms_norm, and the codes of its result."""

from liger_multi.reference.float8.quantized import with_codes
from liger_multi.reference.norms import rms_norm

forward, backward = with_codes(rms_norm)
