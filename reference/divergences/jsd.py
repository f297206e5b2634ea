"""The Jensen-Shannon divergence of given rows, computed again in backward."""

from liger_multi.reference.divergences.given_rows import ReferenceRows, forward_and_backward

forward, backward = forward_and_backward("jsd", ReferenceRows)
