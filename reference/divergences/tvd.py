"""Total variation distance of rows of two distributions."""

from liger_multi.reference.divergences.divergence import ReferenceRows, forward_and_backward

forward, backward = forward_and_backward("tvd", ReferenceRows)
