"""The divergences: of given rows, in place of the student's rows, and of two linear heads.

A backend implements all of them by its row kernels and :func:`implement`.
"""

from collections.abc import Callable

from torch import Tensor

from liger_multi.reference.common.implementation import Implementation
from liger_multi.reference.cross_entropy.fused_linear import scale_to
from liger_multi.reference.divergences import divergence, fused_linear_divergence
from liger_multi.reference.divergences.divergence import DivergenceKernels

KINDS = ("kl_div", "jsd", "tvd")


def implement(
    kernels_of: Callable[[str], DivergenceKernels],
    scale_: Callable[..., None] = divergence.scale_,
    scale: Callable[..., Tensor] = scale_to,
) -> dict[str, Implementation]:
    """Every divergence by its operator's name.

    Args:
        kernels_of: From a kind, one of :data:`KINDS`, to row kernels.
        scale_: The backward in place: scales the gradient that is in ``student`` by ``dloss``.
        scale: Scales a gradient of a head, and rounds it once.
    """
    found = {}
    for kind in KINDS:
        kernels = kernels_of(kind)
        found[kind] = Implementation(*divergence.forward_and_backward(kind, kernels))
        found[f"{kind}_inplace"] = Implementation(divergence.overwriting(kind, kernels), scale_)
        fused = fused_linear_divergence.forward_and_backward(kind, kernels, scale)
        found[f"fused_linear_{kind}"] = Implementation(*fused)
    return found


OPERATORS = implement(lambda kind: divergence.ReferenceRows)
