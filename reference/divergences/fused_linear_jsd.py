"""The Jensen-Shannon divergence of two linear heads, without all their logits."""

from liger_multi.reference.divergences.fused_linear_divergence import forward_and_backward
from liger_multi.reference.divergences.given_rows import ReferenceRows

forward, backward = forward_and_backward("jsd", ReferenceRows)
