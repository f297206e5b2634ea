"""Total variation distance of given rows, computed again in backward."""

from liger_multi.reference.divergence_halves import ReferenceRows, halves

forward, backward = halves("tvd", ReferenceRows)
