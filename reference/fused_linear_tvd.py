"""Total variation distance of two linear heads, without holding all their logits."""

from liger_multi.reference.divergence_halves import ReferenceRows
from liger_multi.reference.fused_linear_divergence import halves

forward, backward = halves("tvd", ReferenceRows)
