"""What user code does to logits: the statements that programs of ``fuzz_logits.py`` are made of.

A statement is a line of Python with placeholders, which the generator fills with names of values
that fit. The helpers below are what statements may call beside PyTorch. They read nothing of their
tensors but shape and dtype, and draw from arithmetic instead of generators, so that compilers
can trace them.

Placeholders: ``new`` a fresh name; ``z`` floating point with the vocabulary as its last axis,
``z2`` and ``z3`` the same with that many axes, ``w`` another one of the shape of the first; ``x``
any floating-point tensor; ``h`` one that may get a hook (PyTorch crashes where it is a view of what
was written); ``g`` a floating-point tensor that requires grad, ``l`` the
same without axes; ``positive`` and ``small`` a ``z`` that log and exp may have; ``row`` an axis
before the vocabulary; ``n`` a factor, ``k`` a small integer, ``c`` a class; ``ce``, ``cep`` and
``nll`` further arguments of losses.
"""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from liger_multi.patching import real_logits

V = 61  # a prime, so that no other axis is mistaken for the vocabulary


def _count(n: int, like: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.arange(n, dtype=dtype, device=like.device)


def numbers(z: Any, k: int, *shape: int) -> torch.Tensor:
    """Numbers of [-1, 1] in the shape (that of ``z`` by default) and dtype of ``z``."""
    shape = shape or tuple(z.shape)
    flat = torch.sin(_count(math.prod(shape), z, torch.float64) * (k + 0.7) + k)
    return flat.reshape(shape).to(z.dtype)


def picked(z: Any, k: int) -> torch.Tensor:
    """A class for every row of logits."""
    rows = tuple(z.shape[:-1])
    return ((_count(math.prod(rows), z) * (2 * k + 7) + k) % V).reshape(rows)


def targets(z: Any, k: int) -> torch.Tensor:
    """The same with some rows ignored, never all."""
    ids = picked(z, k)
    return torch.where(_count(ids.numel(), z).reshape(ids.shape) % 5 == 3, -100, ids)


def probabilities(z: Any, k: int) -> torch.Tensor:
    """Probabilities of the classes for every row."""
    return torch.softmax(3 * numbers(z, k), -1)


def class_weights(z: Any, k: int) -> torch.Tensor:
    """A positive weight for every class."""
    return numbers(z, k, V).abs() + 0.5


def row_mask(z: Any, k: int) -> torch.Tensor:
    """Some of the rows, never none."""
    rows = tuple(z.shape[:-1])
    return ((_count(math.prod(rows), z) * (k + 3)) % 4 != 1).reshape(rows)


def cell_mask(z: Any, k: int) -> torch.Tensor:
    """Some of the entries."""
    return ((_count(math.prod(z.shape), z) * (k + 3)) % 7 == 1).reshape(tuple(z.shape))


def index(z: Any) -> torch.Tensor:
    """Positions on the first axis, one of them twice."""
    return torch.tensor([0, z.shape[0] - 1, 0], device=z.device)


def dropout(z: Any, k: int, inplace: bool = False) -> torch.Tensor:
    """Dropout whose mask depends on ``k`` alone."""
    torch.manual_seed(k)
    return F.dropout(z, 0.4, training=True, inplace=inplace)


def checkpointed(function: Any, z: Any, reentrant: bool = False) -> Any:
    """``function(z)``, which backward computes again."""
    return torch.utils.checkpoint.checkpoint(function, z, use_reentrant=reentrant)


class ScaleByView(torch.autograd.Function):
    """Scales the gradient and returns a view."""

    @staticmethod
    def forward(ctx: Any, x: Any, by: float) -> Any:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * ctx.by, None


class ScaleByClone(ScaleByView):
    """Scales the gradient and returns a copy."""

    @staticmethod
    def forward(ctx: Any, x: Any, by: float) -> Any:
        ctx.by = by
        return x.clone()


class ScaleByOne(ScaleByView):
    """Scales the gradient and returns a product."""

    @staticmethod
    def forward(ctx: Any, x: Any, by: float) -> Any:
        ctx.by = by
        return x * 1.0


class Squares(torch.autograd.Function):
    """Sums of squares over the last axis, from a saved input."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return (x * x).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grad.unsqueeze(-1)


class HalveInPlace(torch.autograd.Function):
    """Writes to its input and says so."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        x.mul_(0.5)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 0.5


PRELUDE: dict[str, Any] = {
    "copy": copy,
    "pickle": pickle,
    "np": np,
    "torch": torch,
    "F": F,
    "nn": nn,
    "real_logits": real_logits,
    "V": V,
    "KEEP": {"retain_graph": True, "allow_unused": True},
    "numbers": numbers,
    "picked": picked,
    "targets": targets,
    "probabilities": probabilities,
    "class_weights": class_weights,
    "row_mask": row_mask,
    "cell_mask": cell_mask,
    "index": index,
    "dropout": dropout,
    "checkpointed": checkpointed,
    "ScaleByView": ScaleByView,
    "ScaleByClone": ScaleByClone,
    "ScaleByOne": ScaleByOne,
    "Squares": Squares,
    "HalveInPlace": HalveInPlace,
}
"""What programs find beside ``model``, ``ids``, ``other_ids``, ``one`` and ``labels``."""


@dataclass(frozen=True)
class Family:
    """Statements of one kind.

    Attributes:
        weight: How often they are drawn, relative to other families.
        statements: With placeholders.
        graph: Whether they may stand in a function that is compiled with the model.
    """

    weight: float
    statements: tuple[str, ...]
    graph: bool = True


FORWARDS = (
    *["z = model(ids).logits"] * 6,
    *["out = model(ids, labels=labels)\nz = out.logits"] * 4,
    "out = model(ids)\nz = out.logits",
    "z = model(ids, logits_to_keep=3).logits",
    "z = model(ids, return_dict=False)[0]",
    "z = model(one).logits",
    "z = model(one).logits\nv0 = z[0]",
    "with torch.no_grad():\n    z = model(ids).logits",
    "with torch.no_grad():\n    out = model(ids, labels=labels)\nz = out.logits",
)
"""How a program begins."""
EAGER_FORWARDS = (
    "z = model(ids).logits\ny = model(other_ids).logits",
    "out = model(ids, labels=labels)\nz = out.logits\nv0 = out.loss",
    "with torch.autocast('cpu', dtype=torch.bfloat16):\n    z = model(ids).logits",
    (
        "with torch.autocast('cpu', dtype=torch.bfloat16):\n"
        "    out = model(ids, labels=labels)\nz = out.logits"
    ),
    "with torch.inference_mode():\n    z = model(ids).logits",
    "model.eval()\nz = model(ids).logits",
    "model.model.requires_grad_(False)\nz = model(ids).logits",
    "model.lm_head.weight.requires_grad_(False)\nz = model(ids).logits",
    "model.requires_grad_(False)\nz = model(ids).logits",
)
"""Further ones, which the compiler would trace once more each."""

CONTEXTS = (
    *["with torch.no_grad():"] * 4,
    *["with torch.enable_grad():"] * 2,
    *["with torch.autocast('cpu', dtype=torch.bfloat16):"] * 2,
    "with torch.inference_mode():",
)
"""What may stand around a statement."""

CE = (
    *[""] * 6,
    *(", reduction='sum'", ", reduction='none'", ", ignore_index=3", ", label_smoothing=0.1"),
    *(", weight=class_weights({z}, 2)", ", weight=class_weights({z}, 1), label_smoothing=0.2"),
    *(", reduction='none', label_smoothing=0.1", ", weight=class_weights({z}, 3), reduction='sum'"),
)
CEP = ("", ", reduction='sum'", ", label_smoothing=0.1", ", weight=class_weights({z}, 2)")
NLL = (
    "",
    "",
    ", reduction='sum'",
    ", reduction='none'",
    ", ignore_index=3",
    ", weight=class_weights({z}, 2)",
)

VIEWS = (
    *("{new} = {z}[:, :-1]", "{new} = {z}[..., :-1, :]", "{new} = {z3}[:, 1:, :]"),
    *("{new} = {z}[0]", "{new} = {z3}[:, -1]", "{new} = {z}[None]", "{new} = {z}[:, None]"),
    *("{new} = {z}[...]", "{new} = {z}[:1]", "{new} = {z}[::2]", "{new} = {z}[:]"),
    *("{new} = {z}[row_mask({z}, {k})]", "{new} = {z}[index({z})]", "{new} = {z}[[0]]"),
    *("{new} = {z}.view(-1, V)", "{new} = {z}.reshape(-1, V)", "{new} = {z}.flatten(0, -2)"),
    *("{new} = {z}.view({z}.shape)", "{new} = {z}.view_as({z})", "{new} = {z}.reshape(-1)"),
    *("{new} = {z}.view(-1)", "{new} = torch.ravel({z})", "{new} = {z}.flatten()"),
    *("{new} = {z}.split(1, dim={row})[0]", "{new} = {z}.chunk(2, dim={row})[-1]"),
    *("{new} = {z}.unbind({row})[0]", "{new} = list({z})[-1]", "{new} = {z}.narrow({row}, 0, 1)"),
    *("{new} = {z}.select({row}, -1)", "{new} = {z3}.transpose(0, 1)", "{new} = {z}.squeeze()"),
    *("{new} = {z}.squeeze(0)", "{new} = {z}.unsqueeze(0)", "{new} = {z}.unsqueeze(-2)"),
    *("{new} = {z2}.t()", "{new} = {z}.mT", "{new} = {z}.transpose(-1, -2)"),
    *("{new} = {z3}.permute(1, 0, 2)", "{new} = {z}.index_select({row}, index({z})[1:2] * 0)"),
    *(
        "{new} = {z}.expand(2, *{z}.shape)",
        "{new} = {z}.swapaxes(0, -2)",
        "{new} = {z}.movedim(0, -2)",
    ),
    *("{new} = {z}[..., : V // 2]", "{new} = {z}[..., {c}]", "{new} = {z}.narrow(-1, {c}, 1)"),
    *("{new} = {z}.select(-1, {c})", "{new} = {z}[..., None]", "{new} = {z}.diagonal()"),
    *("{new}, _ = {z}.split([V // 2, V - V // 2], dim=-1)", "{new} = {z}.unfold(-1, 3, 2)"),
    *("{new} = torch.take_along_dim({z}, picked({z}, {k})[..., None], -1)", "{new} = {z}.H"),
)
COPIES = (
    *("{new} = {z}.contiguous()", "{new} = {z}[..., :-1, :].contiguous()", "{new} = {z}.clone()"),
    *("{new} = {z}.detach()", "{new} = {z}.detach().clone()", "{new} = {z}.float()"),
    *("{new} = {z}.to(torch.float32)", "{new} = {z}.to({z}.dtype)", "{new} = {z}.double()"),
    *("{new} = {z}.to('cpu')", "{new} = {z}.type_as({x})", "{new} = {z}.bfloat16()"),
    *("{new} = {z}.to(torch.bfloat16)", "{new} = {z}.to({z}, copy=True)", "{new} = {z}.half()"),
    *("{new} = {z}.type(torch.float32)", "{new} = torch.clone({z})", "{new} = torch.detach({z})"),
    *("{new} = {z}.to({x})", "{new} = {z}.to(dtype=torch.float64)", "{new} = {z}"),
)
ARITHMETIC = (
    *("{new} = {z} * {n}", "{new} = {n} * {z}", "{new} = {z} / {n}", "{new} = {z} + {n}"),
    *("{new} = {z} - {n}", "{new} = {n} - {z}", "{new} = -{z}", "{new} = {z}.mul({n})"),
    *("{new} = torch.div({z}, {n})", "{new} = {z}.add({n})", "{new} = {z}.sub({n}, alpha=2)"),
    *("{new} = {z} + {w}", "{new} = {z} * {w}", "{new} = {z} - {w}", "{new} = torch.add({z}, {w})"),
    *("{new} = {z} * numbers({z}, {k})", "{new} = {z} + numbers({z}, {k}, V)"),
    *("{new} = 5 * torch.tanh({z} / 5)", "{new} = torch.tanh({z} / 3.0) * 3.0"),
    *("{new} = {z} / torch.tensor(2.0)", "{new} = {z} * row_mask({z}, {k})[..., None]"),
    *("{new} = {z}.softmax(-1)", "{new} = F.log_softmax({z}, dim=-1)", "{new} = {small}.exp()"),
    *("{new} = torch.softmax({z}, -1, dtype=torch.float32)", "{new} = {positive}.log()"),
    *("{new} = {z}.log_softmax(-1)", "{new} = {z}.abs()", "{new} = {z} ** 2", "{new} = {z}.pow(2)"),
    *("{new} = {z}.clamp(-1, 1)", "{new} = {z}.masked_fill(cell_mask({z}, {k}), -1e4)"),
    *("{new} = {z}.masked_fill(cell_mask({z}, {k}), float('-inf'))", "{new} = torch.relu({z})"),
    *("{new} = torch.where(cell_mask({z}, {k}), {z}, -1.0)", "{new} = {z}.cumsum(-1)"),
    *(
        "{new} = torch.cat([{z}, {w}])",
        "{new} = torch.stack([{z}, {w}])",
        "{new} = torch.sigmoid({z})",
    ),
    *("{new} = {z} - {z}.max(-1, keepdim=True).values", "{new} = {z}.flip(-1)"),
    *("{new} = {z} - {z}.logsumexp(-1, keepdim=True)", "{new} = {z}.roll(1, 0)"),
    *("{new} = torch.lerp({z}, {w}, 0.3)", "{new} = torch.maximum({z}, {w})"),
    *("{new} = {z} @ numbers({z}, {k}, V, 3)", "{new} = torch.einsum('...v,...v->...', {z}, {z})"),
    *(
        "{new} = F.normalize({z}, dim=-1)",
        "{new} = {z} // 1",
        "{new} = {z} > 0",
        "{new} = {z} == {w}",
    ),
)
REDUCTIONS = (
    *("{new} = {z}.argmax(-1)", "{new} = {z}.argmax(dim=-1, keepdim=True)", "{new} = {z}.argmax()"),
    *(
        "{new} = {z}.max(-1).values",
        "{new} = {z}.max(-1)",
        "{new} = {z}.max()",
        "{new} = {z}.amax(-1)",
    ),
    *("{new} = {z}.topk(3).values", "{new} = {z}.topk(2, dim=-1)", "{new} = {z}.logsumexp(-1)"),
    *(
        "{new} = torch.logsumexp({z}, dim=-1, keepdim=True)",
        "{new} = {z}.sum()",
        "{new} = {z}.sum(-1)",
    ),
    *(
        "{new} = {z}.mean()",
        "{new} = {z}.mean(-1)",
        "{new} = {z}.mean(0)",
        "{new} = {z}.sum(dim=(0, -1))",
    ),
    *(
        "{new} = {z}.gather(-1, picked({z}, {k})[..., None])",
        "{new} = {z}.std(-1)",
        "{new} = {z}.norm()",
    ),
    *("{new} = torch.sum({z}, -1, dtype=torch.float32)", "{new} = {z}.min(-1).values"),
    *("{new} = -({z}.softmax(-1) * {z}.log_softmax(-1)).sum(-1)", "{new} = {z}.var(-1)"),
    *("{new} = {z}.logsumexp(-1) - ({z}.softmax(-1) * {z}).sum(-1)", "{new} = {z}.sort(-1).values"),
    *("{new} = {z}.log_softmax(-1).gather(-1, picked({z}, {k})[..., None]).squeeze(-1)",),
    *(
        "{new} = (({z} - {w}) ** 2).mean(-1)",
        "{new} = {z}.isfinite().all()",
        "{new} = {z}.amin((0, -1))",
    ),
    *(
        "{new} = {x}.sum()",
        "{new} = {x}.mean()",
        "{new} = {x} * {n}",
        "{new} = {z}.argsort(-1)[..., :3]",
    ),
)
LOSSES = (
    *["{new} = F.cross_entropy({z}.reshape(-1, V), targets({z}, {k}).reshape(-1){ce})"] * 5,
    *["{new} = F.cross_entropy({z}.view(-1, V), targets({z}, {k}).view(-1){ce})"] * 3,
    *["{new} = F.cross_entropy({z}.float().view(-1, V), targets({z}, {k}).view(-1){ce})"] * 2,
    *["{new} = F.cross_entropy({z2}, targets({z2}, {k}){ce})"] * 5,
    *["{new} = F.cross_entropy({z}.flatten(0, -2), targets({z}, {k}).flatten(){ce})"] * 2,
    "{new} = F.cross_entropy({z3}.transpose(1, 2), targets({z3}, {k}){ce})",
    *["{new} = F.cross_entropy({z3}[:, :-1].reshape(-1, V), targets({z3}, {k})[:, 1:].reshape(-1))"]
    * 2,
    (
        "{new} = F.cross_entropy({z3}[..., :-1, :].contiguous().view(-1, V), "
        "targets({z3}, {k})[..., 1:].contiguous().view(-1))"
    ),
    *["{new} = model.loss_function(logits={z3}, labels=targets({z3}, {k}), vocab_size=V)"] * 2,
    "{new} = F.cross_entropy({z2}, probabilities({z2}, {k}){cep})",
    "{new} = F.cross_entropy({z2}, {z2}.detach().softmax(-1))",
    "{new} = nn.CrossEntropyLoss(label_smoothing=0.1)({z2}, targets({z2}, {k}))",
    "{new} = F.nll_loss(F.log_softmax({z2}, dim=-1), targets({z2}, {k}){nll})",
    "{new} = F.nll_loss({z2}, targets({z2}, {k}){nll})",
    "{new} = F.kl_div({z}.log_softmax(-1), probabilities({z}, {k}), reduction='batchmean')",
    "{new} = F.kl_div({z}.log_softmax(-1), {w}.detach().log_softmax(-1), log_target=True)",
    "{new} = F.mse_loss({z}, {w}.detach() * {n})",
    "{new} = F.binary_cross_entropy_with_logits({z}, probabilities({z}, {k}))",
    (
        "{new} = -({z}.log_softmax(-1).gather(-1, picked({z}, {k})[..., None]).squeeze(-1)"
        " * row_mask({z}, {k})).mean()"
    ),
    "{new} = {z}.logsumexp(-1).pow(2).mean()",
    "{new} = F.multi_margin_loss({z2}, picked({z2}, {k}))",
)
EAGER_LOSSES = (
    "{new} = torch.distributions.Categorical(logits={z}).entropy().mean()",
    "{new} = -torch.distributions.Categorical(logits={z}).log_prob(picked({z}, {k})).mean()",
    "{new} = checkpointed(lambda x: F.cross_entropy(x, targets(x, {k})), {z2})",
    "{new} = checkpointed(lambda x: F.cross_entropy(x, targets(x, {k})), {z2}, True)",
    "{new} = checkpointed(lambda x: x.float().logsumexp(-1).mean(), {z})",
)
WRITES = (
    *("{z}[..., : V // 2] = {n}", "{z}[..., V // 2 :] = -1e4", "{z}[..., {c}] = float('-inf')"),
    *(
        "{z}[0] = {n}",
        "{z}[cell_mask({z}, {k})] = {n}",
        "{z}[:, 0] = {z}[:, -1]",
        "{z}[...] = {w} * 0.5",
    ),
    *("{z}.masked_fill_(cell_mask({z}, {k}), -1e4)", "{z} += {n}", "{z} *= {n}", "{z} /= {n}"),
    *(
        "{z}.mul_({n})",
        "{z}.div_({n})",
        "{z}.add_({n})",
        "{z}.sub_({z}.detach().amax(-1, keepdim=True))",
    ),
    *(
        "{z}.clamp_(-1, 1)",
        "{z}.clamp_(max=0.5)",
        "{z}.copy_({w} * {n})",
        "{z}.copy_(numbers({z}, {k}))",
    ),
    *(
        "{z}.tanh_()",
        "{z}.zero_()",
        "{z}.fill_({n})",
        "{z}.relu_()",
        "{z}.sigmoid_()",
        "{z}.neg_()",
    ),
    *(
        "{z}.add_({w})",
        "{z}.mul_(numbers({z}, {k}))",
        "{z}.lerp_({w}, 0.5)",
        "{z}.addcmul_({w}, {w})",
    ),
    *("{z}.index_fill_(-1, index({z}), {n})", "{z}.scatter_(-1, picked({z}, {k})[..., None], {n})"),
    *("{z}.scatter_add_(-1, picked({z}, {k})[..., None], numbers({z}, {k}))", "{z}.nan_to_num_()"),
    *("{z}[..., : V // 2].fill_({n})", "{z}[..., :-1, :].mul_({n})", "{z}[0].zero_()"),
    *("{z}.select(-1, {c}).fill_({n})", "{z}.narrow(-1, {c}, 1).zero_()", "{z}.view(-1).mul_({n})"),
    *(
        "{z}.squeeze().mul_({n})",
        "{z}.mT.mul_({n})",
        "{z}.data.mul_({n})",
        "{z}.detach().mul_({n})",
    ),
    *(
        "{z}.flatten()[:5] = {n}",
        "{z}.reshape(-1, V)[:, {c}] = {n}",
        "{z}.unbind({row})[0].mul_({n})",
    ),
    *("{z}.transpose(0, -2).mul_({n})", "{z}.contiguous().mul_({n})", "{z}.float().mul_({n})"),
    *("{z}.to({z}.dtype).mul_({n})", "{z}.view_as({z}).mul_({n})", "{z}.unsqueeze(0).add_({n})"),
    *("F.relu({z}, inplace=True)", "F.hardtanh({z}, inplace=True)", "nn.ReLU(inplace=True)({z})"),
    *("{new} = F.leaky_relu({z}, 0.1, inplace=True)", "{new} = F.relu({z}, inplace=True)"),
    *(
        "torch._foreach_mul_([{z}], {n})",
        "torch._foreach_add_([{z}, {w}], {n})",
        "torch.relu_({z})",
    ),
    *("real_logits({z}).mul_({n})", "real_logits({z})[..., {c}] = {n}", "torch.exp_({small})"),
    *(
        "torch.div({z}, {n}, out={z})",
        "torch.mul({z}, {n}, out={z})",
        "{x}.mul_({n})",
        "{x}.add_({n})",
    ),
    *("torch.ops.aten.mul_.Scalar({z}, {n})", "torch.ops.aten.mul_({z}, {n})", "{x}.zero_()"),
    *(
        "torch.ops.aten.mul_.Tensor({z}, numbers({z}, {k}))",
        "torch.ops.aten.fill_.Scalar({z}, {n})",
    ),
    *(
        "{new} = {z}.mul_({n})",
        "{new} = {z}.masked_fill_(cell_mask({z}, {k}), {n})",
        "{x}.clamp_(-1, 1)",
    ),
    *(
        "{new} = HalveInPlace.apply({z})",
        "torch.nn.init.constant_({z}, {n})",
        "{x}.copy_({x} * {n})",
    ),
)
EAGER_WRITES = (
    *(
        "{z}.detach().numpy()[..., {c}] = {n}",
        "np.multiply({z}.detach().numpy(), {n}, out={z}.detach().numpy())",
    ),
    *(
        "{z}.numpy()[..., : V // 2] = {n}",
        "np.asarray({z}.detach())[...] *= 0.5",
        "dropout({z}, {k}, inplace=True)",
    ),
    *(
        "{new} = dropout({z}, {k}, inplace=True)",
        "{z}.data = {z}.data * {n}",
        "{z}.data[..., {c}] = {n}",
    ),
    *("{z}.detach_()", "{z}.requires_grad_()", "{z}.requires_grad_(False)", "{z}.unsqueeze_(0)"),
    *("{z}.squeeze_()", "{z}.transpose_(0, -2)", "{z}.set_({w}.detach() * {n})"),
    *("out.logits /= {n}", "out.logits[..., {c}] = {n}", "out.logits = out.logits.float() * {n}"),
    *("torch.from_numpy({z}.detach().numpy()).mul_({n})", "torch.as_tensor({z}).mul_({n})"),
    *("{z}.as_subclass(torch.Tensor).mul_({n})", "torch.as_strided({z}, (3,), (1,)).fill_({n})"),
    *("{z}.detach().untyped_storage().fill_(0)", "torch.from_dlpack({z}.detach()).mul_({n})"),
)
READS = (
    *(
        "{new} = {z}.detach().cpu()",
        "{new} = {z}.tolist()",
        "{new} = {z}.detach().float().numpy().copy()",
    ),
    *("{new} = {z}.detach().numpy()", "{new} = {z}.numpy()", "{new} = np.asarray({z}.detach())"),
    *(
        "{new} = copy.deepcopy({z})",
        "{new} = copy.deepcopy({z}.detach())",
        "{new} = copy.copy({z})",
    ),
    *(
        "{new} = pickle.loads(pickle.dumps({z}.detach()))",
        "{new} = pickle.loads(pickle.dumps({z}))",
    ),
    *(
        "{new} = float({z}.flatten()[0])",
        "{new} = {z}[..., 0].flatten()[0].item()",
        "{new} = {z}.data",
    ),
    *(
        "{new} = {z}.stride()",
        "{new} = {z}.is_contiguous()",
        "{new} = {z}.requires_grad",
        "{new} = {z}.is_leaf",
    ),
    *(
        "{new} = torch.equal({z}, {w})",
        "{new} = {z} is {w}",
        "{new} = {z}.data_ptr() == {w}.data_ptr()",
    ),
    *(
        "{new} = len(str({z})) > 0",
        "{new} = torch.as_tensor({z})",
        "{new} = {z}.as_subclass(torch.Tensor)",
    ),
    *(
        "{new} = {z}.untyped_storage().nbytes()",
        "{new} = torch.zeros_like({z})",
        "{new} = {z}.new_ones(2)",
    ),
    *(
        "{new} = real_logits({z})",
        "{new} = out.logits",
        "{new} = out['logits']",
        "{new} = out.loss",
    ),
    *(
        "{new} = torch.is_tensor({z})",
        "{new} = {z}.storage_offset()",
        "{new} = {z}.grad_fn is None",
    ),
    *(
        "{new} = torch.from_dlpack({z}.detach())",
        "{new} = {z}.shape, {z}.dtype, {z}.numel(), len({z})",
    ),
    *(
        "{new} = torch.allclose({z}, {w})",
        "{new} = bool(({z} > 0).any())",
        "del {z}",
        "{new} = {z}[0, ..., 0].tolist()",
    ),
)
GRADIENTS = (
    *["{l}.backward(retain_graph=True)"] * 3,
    "{l}.backward()",
    "({g}).float().sum().backward(retain_graph=True)",
    "{z}.backward(numbers({z}, {k}), retain_graph=True)",
    "torch.autograd.backward([{g}, {z}], [numbers({g}, 1), numbers({z}, {k})], retain_graph=True)",
    *["{new} = torch.autograd.grad({l}, {z}, **KEEP)"] * 2,
    "{new} = torch.autograd.grad({l}, list(model.parameters()), **KEEP)",
    "{new} = torch.autograd.grad({g}.float().sum(), model.lm_head.weight, **KEEP)",
    "({new},) = torch.autograd.grad({l}, model.lm_head.weight, create_graph=True)",
    "{h}.retain_grad()",
    "{h}.retain_grad()\n{l}.backward(retain_graph=True)\n{new} = {h}.grad",
    "{new} = {z}.grad",
)
HOOKS = (
    *("{h}.register_hook(lambda g: g * {n})", "{h}.register_hook(lambda g: None)"),
    *(
        "{new} = []\n{h}.register_hook({new}.append)",
        "{new} = {h}.register_hook(torch.neg)\n{new}.remove()",
    ),
    *("{h}.register_hook(lambda g: g * {n})", "{new} = ScaleByView.apply({z}, {n})"),
    *("{new} = ScaleByClone.apply({z}, {n})", "{new} = ScaleByOne.apply({z}, {n})"),
    *("{new} = Squares.apply({z})", "z = ScaleByView.apply(z, {n})", "{new} = Squares.apply({x})"),
)
WEIGHTS = (
    *("with torch.no_grad():\n    model.lm_head.weight.mul_(1.25)",),
    *["torch.optim.SGD(model.parameters(), lr=0.5).step()"] * 2,
    *("model.zero_grad()",),
)
CALLS = (
    "{new} = model(ids).logits",
    "{new} = model(other_ids).logits",
    "{new} = model(ids, labels=labels).loss",
)

FAMILIES: dict[str, Family] = {
    "views": Family(20, VIEWS),
    "copies": Family(10, COPIES),
    "arithmetic": Family(10, ARITHMETIC),
    "reductions": Family(10, REDUCTIONS),
    "losses": Family(16, LOSSES),
    "eager losses": Family(2, EAGER_LOSSES, graph=False),
    "writes": Family(14, WRITES),
    "eager writes": Family(4, EAGER_WRITES, graph=False),
    "reads": Family(6, READS, graph=False),
    "gradients": Family(5, GRADIENTS, graph=False),
    "hooks": Family(5, HOOKS, graph=False),
    "weights": Family(0.7, WEIGHTS, graph=False),
    "calls": Family(1.5, CALLS, graph=False),
}
