"""Serve the import names of Liger-Kernel in verl: ``VERL_USE_EXTERNAL_MODULES=...`` of this module.

verl imports the module in each of its processes; ``model.external_lib`` does so too.
``model.use_liger`` then patches with these operators, and ``impl_backend: liger`` of fused kernels
calls them for log-probabilities and entropies.
"""

from liger_multi.compat import liger_kernel

liger_kernel.install(force=True)
