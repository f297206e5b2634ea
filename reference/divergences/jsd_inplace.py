"""As jsd, over the student: its rows are overwritten by their gradient."""

from liger_multi.reference.divergences.given_rows import ReferenceRows, overwriting, scale_

forward, backward = overwriting("jsd", ReferenceRows), scale_
