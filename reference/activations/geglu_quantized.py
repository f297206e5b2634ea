"""GEGLU whose rows leave in FP8 too: geglu, and the codes of its result."""

from liger_multi.reference.activations import geglu
from liger_multi.reference.float8.quantized import with_codes

forward, backward = with_codes(geglu)
