"""The divergence of Kullback and Leibler of two linear heads, without holding all their logits."""

from liger_multi.reference.divergences.fused_linear_divergence import halves
from liger_multi.reference.divergences.given_rows import ReferenceRows

forward, backward = halves("kl_div", ReferenceRows)
