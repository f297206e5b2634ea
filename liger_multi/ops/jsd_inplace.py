"""Contract behind ``jsd(..., inplace=True)``: the gradient replaces the student."""

from liger_multi.dispatch.op import Op
from liger_multi.ops._divergence import declare_inplace, inplace_samples_of
from liger_multi.ops.jsd import SAMPLES as FUNCTIONAL

op = Op("jsd_inplace", inplace="student")
declare_inplace(op)
SAMPLES = inplace_samples_of(FUNCTIONAL)
