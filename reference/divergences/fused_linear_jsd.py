"""The divergence of Jensen and Shannon of two linear heads, without all their logits."""

from liger_multi.reference.divergences.fused_linear_divergence import halves
from liger_multi.reference.divergences.given_rows import ReferenceRows

forward, backward = halves("jsd", ReferenceRows)
