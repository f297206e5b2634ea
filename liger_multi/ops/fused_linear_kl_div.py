"""Contract of ``fused_linear_kl_div``."""

import torch
from torch import Tensor

from liger_multi.dispatch.bitwise import BY_GEMM, BY_OUR_GEMM, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._divergence_head import declare, formula_of, heads_work, run, samples_of
from liger_multi.ops._formulas import kl_rows

op = Op(
    "fused_linear_kl_div",
    family="divergences",
    bitwise=bitwise(BY_OUR_GEMM, "hidden teacher_hidden target loss", backward=BY_GEMM),
    opens=True,
)
declare(op)


def fused_linear_kl_div(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    square_temperature: bool = False,
    vocabulary: str = "equal",
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk: int | str = "auto",
    accumulate: torch.dtype = torch.float32,
    compact: bool = True,
) -> Tensor:
    """KL divergence of two linear heads, without all their logits.

    Math:
        A row costs ``sum_j p[j] (log p[j] - log q[j])``
        with the teacher's probabilities ``p = softmax(teacher_logits / temperature)`` and the
        student's ``q = softmax(logits / temperature)``, ``logits = hidden @ weight.T + bias``.
        ``square_temperature`` multiplies by ``temperature^2``, which keeps gradients at the size
        that they have without one. ``mean`` divides by the number of rows that count; without any
        it is 0. Rows where ``target`` (labels, shifted as the caller's loss wants them) is
        ``ignore_index`` are dropped before the GEMMs (on a device of more than 512 rows).
        The teacher is a constant: no gradient
        reaches it. Where the vocabularies differ in size, ``vocabulary="common"`` compares the
        distributions over the first classes that both have, renormalized (the others are masked
        in both); ``"equal"``, the default, raises.

    Shapes:
        hidden ``(..., H)``, weight ``(V, H)``, bias ``(V,)``; teacher_hidden ``(..., H')``,
        teacher_weight ``(V', H')``, teacher_bias ``(V',)``; target ``(...)`` of ids, of which only
        ``ignore_index`` matters. Loss scalar, or ``(...)`` for ``none``.

    Dtypes:
        In: hidden, weight and bias of one floating dtype, the teacher's of one (perhaps another),
        or any under autocast, which then sets the dtype of the GEMMs. Inside: GEMMs in that
        dtype, statistics and loss fp32 (fp64 for fp64). The gradient of weight accumulates in
        ``accumulate`` and is rounded once to the dtype of weight.

    Memory:
        A chunk of the student's logits, as in :func:`fused_linear_cross_entropy` (a budget is for
        both), and beside it an eighth of its rows of the teacher's, 256 at least. Kept for
        backward: the gradients of what needs one; for ``none`` the inputs, and the logits are
        computed again. With ``chunk="1GiB"`` and ``accumulate`` the dtype of the weight, nothing
        beyond 1 GiB and the gradients.

    Raises:
        TypeError: Wrong kinds of arguments, or dtypes that differ without autocast.
        ValueError: Shapes, devices, vocabularies or options that do not fit; a weight without
        elements (a ZeRO-3 shard).

    Source:
        Hinton et al. 2015 (arXiv:1503.02531); chunking as in :func:`fused_linear_cross_entropy`.
    """
    return run(
        op,
        hidden,
        weight,
        teacher_hidden,
        teacher_weight,
        target,
        bias,
        teacher_bias,
        beta=0.0,
        temperature=temperature,
        square_temperature=square_temperature,
        vocabulary=vocabulary,
        ignore_index=ignore_index,
        reduction=reduction,
        chunk=chunk,
        accumulate=accumulate,
        compact=compact,
    )


formula = formula_of(fused_linear_kl_div, lambda _beta: kl_rows)
work = heads_work  # both logits, and two GEMMs for the gradients of the student
SAMPLES = samples_of()
