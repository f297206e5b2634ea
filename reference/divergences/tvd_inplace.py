"""Total variation distance of rows whose gradient overwrites the student."""

from liger_multi.reference.divergences.divergence import ReferenceRows, overwriting, scale_

forward, backward = overwriting("tvd", ReferenceRows), scale_
