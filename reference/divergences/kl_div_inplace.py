"""KL divergence of rows whose gradient overwrites the student."""

from liger_multi.reference.divergences.divergence import ReferenceRows, overwriting, scale_

forward, backward = overwriting("kl_div", ReferenceRows), scale_
