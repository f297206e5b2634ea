"""The divergence of Kullback and Leibler of given rows, computed again in backward."""

from liger_multi.reference.divergences.given_rows import ReferenceRows, halves

forward, backward = halves("kl_div", ReferenceRows)
