"""The divergence of Jensen and Shannon of given rows, computed again in backward."""

from liger_multi.reference.divergences.given_rows import ReferenceRows, halves

forward, backward = halves("jsd", ReferenceRows)
