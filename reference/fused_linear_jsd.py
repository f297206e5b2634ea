"""The divergence of Jensen and Shannon of two linear heads, without all their logits."""

from liger_multi.reference.divergence_halves import ReferenceRows
from liger_multi.reference.fused_linear_divergence import halves

forward, backward = halves("jsd", ReferenceRows)
