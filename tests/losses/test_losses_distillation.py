"""Distillation: TRL's own implementations, formulas of the papers, few tokens, two heads."""

import pytest
import torch
import torch.nn.functional as F

from liger_multi import losses
from liger_multi.testing.tolerance import excess

HALF, WIDE = torch.bfloat16, torch.float32


class Pair:
    """A student, a wider teacher, and targets of which some are ignored."""

    def __init__(self, rows=4, length=7, classes=53, dtype=WIDE, other=None):
        torch.manual_seed(0)
        made = [torch.randn(rows, length, 16), torch.randn(classes, 16) * 0.4,
                torch.randn(classes) * 0.3]  # fmt: skip
        width, count = 24, other or classes
        self.teacher = [x.to(dtype) for x in (
            torch.randn(rows, length, width), torch.randn(count, width) * 0.4,
            torch.randn(count) * 0.3)]  # fmt: skip
        self.leaves = [x.to(dtype).requires_grad_() for x in made]
        self.target = torch.randint(min(classes, count), (rows, length))
        self.target[torch.rand(rows, length) < 0.3] = -100
        self.target[-1] = -100
        self.mask = self.target >= 0

    def wide(self):
        return [x.detach().float().requires_grad_() for x in self.leaves]

    def sources(self, chunk="auto", given=False, **options):
        if given:
            return F.linear(*self.leaves), F.linear(*self.teacher)
        return (losses.Head(*self.leaves, chunk=chunk, **options),
                losses.Head(*self.teacher, **options))  # fmt: skip


def both(ours, theirs, leaves, dtype=WIDE, wide=None):
    a, e = torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, wide or leaves)
    assert excess(ours.detach(), theirs.detach(), WIDE if dtype == WIDE else dtype) <= 1
    for x, y in zip(a, e, strict=True):
        assert excess(x, y, dtype) <= 1


def trl_gkd(pair, leaves=None, teacher=None, **options):
    module = pytest.importorskip("trl.experimental.gkd")
    student, other = F.linear(*(leaves or pair.leaves)), F.linear(*(teacher or pair.teacher))
    return module.GKDTrainer.generalized_jsd_loss(student, other, pair.target, **options)


BETAS = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.3}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("kind", BETAS)
def test_distillation_is_trl(kind, temperature, given):
    pair = Pair()
    theirs = trl_gkd(pair, beta=BETAS[kind], temperature=temperature)
    options = {"beta": 0.3} if kind == "jsd" else {}
    ours, metrics = losses.distillation_loss(
        *pair.sources(5, given), pair.target, divergence=kind, temperature=temperature, **options
    )
    both(ours, theirs, pair.leaves)
    assert metrics.soft.item() == pytest.approx(theirs.item(), rel=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 256, "auto"])
@pytest.mark.parametrize("dtype", [WIDE, HALF])
@pytest.mark.parametrize("kind", ["forward_kl", "jsd", "tvd", "cosine"])
def test_no_chunk_and_no_dtype_moves_the_loss(kind, dtype, chunk):
    pair = Pair(dtype=dtype)
    wide, teacher = pair.wide(), [x.float() for x in pair.teacher]
    z, t = F.linear(*wide), F.linear(*teacher)
    if kind == "tvd":  # a sign that a rounded logit turns is no error of the loss
        z, t = (x + (x.to(dtype).float() - x).detach() for x in (z, t))
    p, q = t.softmax(-1), z.softmax(-1)
    rows = {
        "tvd": lambda: 0.5 * (p - q).abs().sum(-1),
        "cosine": lambda: 1 - (z * t).sum(-1) / (z.norm(dim=-1) * t.norm(dim=-1)),
    }
    if kind in rows:
        theirs = (rows[kind]() * pair.mask).sum() / pair.mask.sum()
    else:
        theirs = trl_gkd(pair, wide, teacher, beta=0.0 if kind == "forward_kl" else 0.5)
    ours, _ = losses.distillation_loss(*pair.sources(chunk), pair.target, divergence=kind)
    both(ours, theirs, pair.leaves, dtype, wide)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("unlike", [False, True])
def test_scales_softcaps_and_temperatures_of_each_head(kind, unlike):
    """TRL's loss of two heads; with a softcap or two scales, rows go the longer way."""
    module = pytest.importorskip("trl.trainer.distillation_trainer")
    pair = Pair()
    own = {"logit_scale": 0.6, "softcap": 2.0 if unlike else None}
    other = {"logit_scale": 1.5 if unlike else 0.6, "softcap": None}
    theirs, entropy, count = module._chunked_divergence_loss(
        pair.leaves[0], pair.teacher[0], pair.leaves[1], pair.teacher[1], pair.mask, BETAS[kind],
        student_lm_head_bias=pair.leaves[2], teacher_lm_head_bias=pair.teacher[2],
        student_logit_scale=0.6, teacher_logit_scale=other["logit_scale"],
        student_final_logit_softcapping=own["softcap"], temperature=1.3,
    )  # fmt: skip
    ours, metrics = losses.distillation_loss(
        losses.Head(*pair.leaves, chunk=5, **own), losses.Head(*pair.teacher, **other),
        pair.target, divergence=kind, temperature=1.3, metrics=("entropy", "token_accuracy"),
        **({"beta": 0.3} if kind == "jsd" else {}),
    )  # fmt: skip
    both(ours, theirs, pair.leaves)
    assert metrics.tokens == count
    warm, _ = losses.distillation_loss(
        losses.Head(*pair.leaves, temperature=1.3, **own), losses.Head(*pair.teacher, **other),
        pair.target, soft_weight=1.0, metrics=("entropy",),
    )  # fmt: skip
    again = losses.tokens(
        losses.Head(*pair.leaves, temperature=1.3, **own), pair.target, ("entropy",)
    )
    assert again.entropy.sum().item() == pytest.approx(entropy.item(), rel=1e-5)
    assert warm.isfinite()


def test_hard_and_soft_terms_over_the_step():
    """soft T^2 D + hard CE, divided by the step's tokens."""
    pair = Pair()
    student, teacher = pair.sources(5)
    ours, metrics = losses.distillation_loss(
        student, teacher, pair.target, temperature=2.0, square_temperature=True, soft_weight=0.7,
        hard_weight=0.4, num_items=40,
    )  # fmt: skip
    soft = trl_gkd(pair, beta=0.5, temperature=2.0, num_items_in_batch=40) * 4
    hard = F.cross_entropy(
        F.linear(*pair.leaves).flatten(0, 1), pair.target.flatten(), reduction="sum"
    ) / 40  # fmt: skip
    both(ours, 0.7 * soft + 0.4 * hard, pair.leaves)
    assert metrics.hard.item() == pytest.approx(hard.item(), rel=1e-5)
    assert metrics.soft.item() == pytest.approx(soft.item(), rel=1e-5)


@pytest.mark.parametrize("kind", ["jsd", "cosine"])
def test_a_head_learns_from_given_logits(kind):
    pair = Pair()
    student, teacher = pair.sources()
    found = [
        losses.distillation_loss(student, other, pair.target, divergence=kind)[0]
        for other in (teacher, F.linear(*pair.teacher))
    ]
    both(*found, pair.leaves)


@pytest.mark.parametrize("classes", [(53, 61), (61, 53)])
@pytest.mark.parametrize("kind", ["jsd", "cosine"])
@pytest.mark.parametrize("given", [False, True])
def test_vocabularies_of_two_sizes(kind, classes, given):
    pair = Pair(classes=classes[0], other=classes[1])
    with pytest.raises(ValueError, match="common"):
        losses.distillation_loss(*pair.sources(given=given), pair.target, divergence=kind)
    ours, _ = losses.distillation_loss(
        *pair.sources(given=given), pair.target, divergence=kind, vocabulary="common"
    )
    small = Pair(classes=classes[0], other=classes[1])
    cut = [small.teacher[0], *[x[:53] for x in small.teacher[1:]]]
    mine = [small.leaves[0], *[x[:53] for x in small.leaves[1:]]]
    theirs, _ = losses.distillation_loss(
        losses.Head(*mine), losses.Head(*cut), pair.target, divergence=kind
    )
    a, e = torch.autograd.grad(ours, pair.leaves), torch.autograd.grad(theirs, small.leaves)
    for x, y in zip((ours, *a), (theirs, *e), strict=True):
        assert excess(x.detach(), y.detach(), WIDE) <= 1


def test_ignored_tokens_are_ignored_in_every_term():
    """Whatever stands in their rows; and nothing but them is a loss of zero, connected."""
    for kind in ("jsd", "tvd", "cosine"):
        pair, spoiled = Pair(), Pair()
        with torch.no_grad():
            for x in (spoiled.leaves[0], spoiled.teacher[0]):
                x[~pair.mask] = float("nan")
        found = [
            losses.distillation_loss(*p.sources(), p.target, divergence=kind, hard_weight=0.3)[0]
            for p in (pair, spoiled)
        ]
        assert torch.equal(*found)
        grads = [torch.autograd.grad(x, p.leaves[1:])
                 for x, p in zip(found, (pair, spoiled), strict=True)]  # fmt: skip
        for x, y in zip(*grads, strict=True):
            assert torch.equal(x, y)
        pair.target[:] = -100
        ours, _ = losses.distillation_loss(
            *pair.sources(), pair.target, divergence=kind, hard_weight=0.3
        )
        assert ours == 0
        assert all((g == 0).all() for g in torch.autograd.grad(ours, pair.leaves))


# --- a teacher's likeliest tokens ---


def few(pair, k=5, padded=True):
    log_p = F.log_softmax(F.linear(*[x.float() for x in pair.teacher]), -1)
    values, ids = log_p.topk(k)
    if padded:
        ids[0, :, -2:], values[0, :, -2:] = -1, -torch.inf
    return losses.TopK(ids, values)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("rest", ["renormalize", "bucket"])
@pytest.mark.parametrize("kind", BETAS)
def test_few_tokens_are_trl(kind, rest, given):
    module = pytest.importorskip("trl.experimental.async_distillation.async_distillation_trainer")
    pair = Pair()
    top = few(pair)
    options = {"logit_scale": 0.7, "softcap": 4.0}
    flat = pair.mask.reshape(-1)
    ids, values = (x.reshape(-1, 5)[flat] for x in (top.ids, top.log_prob))
    theirs = module._jsd_loss_chunk(
        pair.leaves[0].reshape(-1, 16)[flat], *pair.leaves[1:], 0.7, 4.0, ids, values, ids >= 0,
        BETAS[kind], 1.3, rest == "bucket", None, 1,
    )[0] / flat.sum()  # fmt: skip
    student = losses.Head(*pair.leaves, chunk=5, **options)
    if given:
        student = losses.Logits(F.linear(*pair.leaves), **options)
    ours, _ = losses.distillation_loss(
        student, top, pair.target, divergence=kind, temperature=1.3, rest=rest,
        **({"beta": 0.3} if kind == "jsd" else {}),
    )  # fmt: skip
    both(ours, theirs, pair.leaves)


@pytest.mark.parametrize("chunk", [1, 7, 256])
@pytest.mark.parametrize("dtype", [WIDE, HALF])
def test_all_tokens_are_the_whole_distribution(chunk, dtype):
    """With k = V nothing is left over."""
    pair = Pair(classes=20, dtype=dtype)
    wide, teacher = pair.wide(), [x.float() for x in pair.teacher]
    theirs = trl_gkd(pair, wide, teacher, beta=0.0)
    ours, _ = losses.distillation_loss(
        pair.sources(chunk)[0], few(pair, 20, False), pair.target, divergence="forward_kl"
    )
    both(ours, theirs, pair.leaves, dtype, wide)


def test_a_token_without_any_teacher_costs_nothing():
    pair = Pair()
    top = few(pair, padded=False)
    top.ids[1] = -1
    for rest in ("renormalize", "bucket"):
        ours, _ = losses.distillation_loss(pair.sources()[0], top, pair.target, rest=rest)
        grads = torch.autograd.grad(ours, pair.leaves)
        assert all(g.isfinite().all() for g in grads)
        assert (grads[0][1] == 0).all()
        assert (grads[0][0] != 0).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"divergence": "jensen"}, "jsd"),
        ({"divergence": "tvd", "beta": 0.2}, "no meaning"),
        ({"divergence": "cosine", "square_temperature": True}, "no meaning"),
        ({"soft_weight": 0.0}, "both 0"),
        ({"temperature": 0.0}, "above 0"),
        ({"rest": "drop"}, "bucket"),
    ],
)
def test_options_that_do_not_fit_are_errors(options, message):
    pair = Pair()
    with pytest.raises(ValueError, match=message):
        losses.distillation_loss(*pair.sources(), pair.target, **options)


def test_forms_that_do_not_fit_are_errors():
    pair = Pair()
    student, teacher = pair.sources()
    with pytest.raises(TypeError, match="numbers"):
        losses.distillation_loss(losses.tokens(student, pair.target), teacher, pair.target)
    with pytest.raises(TypeError, match="do not"):
        losses.distillation_loss(F.linear(*pair.leaves), teacher, pair.target)
    with pytest.raises(TypeError, match="teacher must be"):
        losses.distillation_loss(student, losses.tokens(teacher, pair.target), pair.target)
    with pytest.raises(ValueError, match="of a top-k teacher is not defined"):
        losses.distillation_loss(student, few(pair), pair.target, divergence="cosine")
    with pytest.raises(ValueError, match="K"):
        losses.distillation_loss(
            student, losses.TopK(pair.target, pair.target.float()), pair.target
        )
    with pytest.raises(TypeError, match="temperature"):
        losses.distillation_loss(student, teacher, pair.target, temperatur=2.0)
