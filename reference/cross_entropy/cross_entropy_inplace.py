"""Cross entropy whose gradient overwrites the logits: no second tensor of their size."""

from liger_multi.reference.cross_entropy import rows as rows_of
from liger_multi.reference.cross_entropy.cross_entropy import overwriting, scale_

forward, backward = overwriting(rows_of), scale_
