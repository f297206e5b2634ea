"""Cross entropy that overwrites the logits by their gradient: no second tensor of their size."""

from liger_multi.reference.cross_entropy import objective
from liger_multi.reference.cross_entropy.cross_entropy import overwriting, scale_

forward, backward = overwriting(objective), scale_
