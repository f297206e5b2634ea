"""Total variation distance of two linear heads, chunk by chunk."""

from liger_multi.reference.divergences.divergence import ReferenceRows
from liger_multi.reference.divergences.fused_linear_divergence import forward_and_backward

forward, backward = forward_and_backward("tvd", ReferenceRows)
