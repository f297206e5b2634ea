"""Losses of given sequences: TRL's SFT, DFT, packed rows, weights, ranks, several heads.

Distillation: TRL's own implementations, formulas of the papers, few tokens, two heads.
"""

import pytest
import torch
import torch.nn.functional as F

import liger_multi
from liger_multi import losses
from liger_multi.losses import one_pass, shared
from tests import comparing
from tests.comparing import assert_equal, assert_same_loss, assert_within

# --- given sequences ---

HALF, WIDE = torch.bfloat16, torch.float32


def head(rows=4, length=9, width=16, classes=53, dtype=WIDE, empty=True):
    torch.manual_seed(0)
    leaves = [
        torch.randn(rows, length, width),
        torch.randn(classes, width) * 0.4,
        torch.randn(classes) * 0.3,
    ]
    target = torch.randint(classes, (rows, length))
    target[torch.rand(target.shape) < 0.3] = -100
    if empty:
        target[-1] = -100
    return [x.to(dtype).requires_grad_() for x in leaves], target


def exact(leaves, target):
    """Log-probabilities, normalizers and entropies in PyTorch."""
    z = F.linear(*leaves).float()
    log_p = torch.log_softmax(z, -1)
    own = log_p.gather(-1, target.clamp(min=0)[..., None])[..., 0] * (target >= 0)
    return own, z.logsumexp(-1) * (target >= 0), -(log_p.exp() * log_p).sum(-1) * (target >= 0)


def trl_sft(leaves, target, divergence, num_items):
    comparing.require_trl()
    import trl

    model = comparing.Toy(F.pad(leaves[0], (0, 0, 0, 1)), *leaves[1:])
    labels = F.pad(target, (1, 0), value=-100)
    stub = comparing.trainer(model, compute_loss_func=None, label_smoother=None)
    stub.args = type("Args", (), {"loss_type": divergence, "average_tokens_across_devices": True})
    stub.get_tp_size = lambda: 1
    stub.accelerator.parallelism_config = None
    inputs = {"labels": labels, "attention_mask": torch.ones_like(labels)}
    loss = trl.SFTTrainer.compute_loss(stub, model, inputs, num_items_in_batch=num_items)
    return loss, comparing.logged(stub)


@pytest.mark.parametrize("num_items", [None, 31])
@pytest.mark.parametrize("chunk", [1, 7, 256, "auto"])
@pytest.mark.parametrize("dtype", [WIDE, HALF])
@pytest.mark.parametrize("divergence", ["nll", "dft"])
def test_sft_is_trl(divergence, dtype, chunk, num_items):
    leaves, target = head(dtype=dtype)
    wide = [x.detach().float().requires_grad_() for x in leaves]
    expected, log = trl_sft(wide, target, divergence, num_items)
    ours, metrics = losses.sequence_loss(
        losses.Head(*leaves, chunk=chunk),
        target,
        loss_type=divergence,
        num_items=num_items,
        metrics=("entropy", "token_accuracy"),
    )
    assert_same_loss(ours, expected, leaves, dtype, wide)
    near = {"rel": 1e-5} if dtype == WIDE else {"rel": 2**-6}
    assert metrics.entropy.item() == pytest.approx(log["entropy"], **near)
    if dtype == WIDE:
        assert metrics.token_accuracy.item() == pytest.approx(log["mean_token_accuracy"])


@pytest.mark.parametrize("divergence", ["nll", "dft"])
def test_nothing_to_learn_is_zero_and_connected(divergence):
    leaves, target = head()
    target[:] = -100
    expected, _ = trl_sft(leaves, target, divergence, None)
    ours, _ = losses.sequence_loss(losses.Head(*leaves), target, loss_type=divergence)
    assert_same_loss(ours, expected, leaves)
    assert ours == 0


@pytest.mark.parametrize("passes", ["one", "two"])
def test_z_loss_and_entropy(passes):
    """-log p + z lse^2 - e H, meaned over tokens."""
    leaves, target = head()
    ours, metrics = losses.sequence_loss(
        losses.Head(*leaves, chunk=5),
        target,
        z_loss=1e-2,
        entropy_weight=0.3,
        passes=passes,
        metrics=("z_loss",),
    )
    own, lse, entropy = exact(leaves, target)
    count = (target >= 0).sum()
    assert_same_loss(ours, (-own + 1e-2 * lse**2 - 0.3 * entropy).sum() / count, leaves)
    assert metrics.z_loss.item() == pytest.approx((lse**2).sum().item() / count.item(), rel=1e-5)


@pytest.mark.parametrize("reduction", ["token", "sequence", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_reductions(reduction, weighted):
    leaves, target = head()
    weight = torch.rand(target.shape) if weighted else None
    ours, _ = losses.sequence_loss(
        losses.Head(*leaves, chunk=5), target, weight, reduction=reduction
    )
    mask, w = target >= 0, torch.ones(target.shape) if weight is None else weight
    loss = -exact(leaves, target)[0] * w
    if reduction == "token":
        expected = loss.sum() / (w * mask).sum()
    elif reduction == "sum":
        expected = loss.sum()
    else:
        expected = (loss.sum(-1)[:-1] / mask.sum(-1)[:-1]).mean()  # the last row has no token
    assert_same_loss(ours, expected, leaves)


def test_packed_rows_are_the_same_as_padded_ones():
    """Three sequences in one row, or one a row: the same mean over sequences."""
    leaves, target = head(3, 6, empty=False)
    alone, _ = losses.sequence_loss(losses.Head(*leaves), target, reduction="sequence")
    packed = [leaves[0].reshape(1, 18, -1), *leaves[1:]]
    positions = torch.arange(6).repeat(3)[None]
    together, _ = losses.sequence_loss(
        losses.Head(*packed),
        target.reshape(1, 18),
        segments=losses.segments_of(positions),
        reduction="sequence",
    )
    assert_same_loss(together, alone, leaves)
    plain, _ = losses.sequence_loss(
        losses.Head(*packed), target.reshape(1, 18), reduction="sequence"
    )
    assert not torch.isclose(plain, alone)


def test_accumulated_micro_batches_are_one_batch():
    """With the step's number of tokens every micro-batch weighs what it has."""
    leaves, target = head(6, 7)
    whole, _ = losses.sequence_loss(losses.Head(*leaves), target)
    count = (target >= 0).sum()
    parts = [
        losses.sequence_loss(losses.Head(leaves[0][i], *leaves[1:]), target[i], num_items=count)[0]
        for i in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    assert_same_loss(sum(parts), whole, leaves)


def test_several_heads_predict_further_ahead():
    """L_0 + weight / D sum L_k, and nobody looks past the end of a packed sequence."""
    leaves, target = head(2, 8, empty=False)
    torch.manual_seed(1)
    more = [torch.randn(2, 8, 16).requires_grad_() for _ in range(2)]
    segments = torch.tensor([[0] * 5 + [1] * 3, [0] * 8])
    sources = [losses.Head(h, *leaves[1:], chunk=3) for h in (leaves[0], *more)]
    ours, metrics = losses.mtp_loss(sources, target, ahead_weight=0.6, segments=segments)
    expected, nlls = 0.0, []
    for k, hidden in enumerate((leaves[0], *more)):
        total, count = 0.0, 0
        own = torch.log_softmax(F.linear(hidden, *leaves[1:]), -1)
        for i in range(2):
            for t in range(8 - k):
                if segments[i, t] == segments[i, t + k] and target[i, t + k] >= 0:
                    total, count = total - own[i, t, target[i, t + k]], count + 1
        nlls.append(total / count)
        expected = expected + nlls[-1] * (1.0 if k == 0 else 0.3)
    assert_same_loss(ours, expected, [*leaves, *more])
    torch.testing.assert_close([*(metrics.first.nll, *metrics.ahead)], [b.detach() for b in nlls])


def test_heads_further_ahead_than_the_row_is_long():
    leaves, target = head(1, 2, empty=False)
    sources = [losses.Head(*leaves)] * 4
    ours, _ = losses.mtp_loss(sources, target)
    assert ours.isfinite()


def test_segment_weights_sum_to_one_with_random_numbers():
    mask, segments = torch.rand(5, 40) < 0.6, torch.randint(-3, 4, (5, 40))
    weights = shared.segment_weights(mask, segments)
    values, means = torch.randn(5, 40), []
    for i in range(5):
        for s in segments[i].unique():
            here = mask[i] & (segments[i] == s)
            if here.any():
                means.append(values[i][here].mean())
    torch.testing.assert_close((weights * values).sum(), torch.stack(means).mean())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"loss_type": "dtf"}, "dft"),
        ({"reduction": "mean"}, "token"),
        ({"z_loss": -1.0}, "at least 0"),
        ({"segments": torch.zeros(4, 9)}, "segments serve"),
        ({"reduction": "sum", "num_items": 3}, "num_items serves"),
        ({"token_weight": torch.ones(4)}, "token_weight must have shape"),
        ({"token_weight": torch.ones(4, 9, requires_grad=True)}, "detach"),
        ({"metrics": ("accuracy",)}, "token_accuracy"),
    ],
)
def test_what_does_not_fit_is_an_error(call, message):
    leaves, target = head()
    with pytest.raises(ValueError, match=message):
        losses.sequence_loss(losses.Head(*leaves), target, **call)
    with pytest.raises(TypeError, match="z_loss"):
        losses.sequence_loss(losses.Head(*leaves), target, zloss=1.0)


# --- distillation ---


class Pair:
    """A student, a wider teacher, and targets of which some are ignored."""

    def __init__(self, rows=4, length=7, classes=53, dtype=WIDE, other=None):
        torch.manual_seed(0)
        tensors = [
            torch.randn(rows, length, 16),
            torch.randn(classes, 16) * 0.4,
            torch.randn(classes) * 0.3,
        ]
        width, count = 24, other or classes
        self.teacher = [
            x.to(dtype)
            for x in (
                torch.randn(rows, length, width),
                torch.randn(count, width) * 0.4,
                torch.randn(count) * 0.3,
            )
        ]
        self.leaves = [x.to(dtype).requires_grad_() for x in tensors]
        self.target = torch.randint(min(classes, count), (rows, length))
        self.target[torch.rand(rows, length) < 0.3] = -100
        self.target[-1] = -100
        self.mask = self.target >= 0

    def wide(self):
        return [x.detach().float().requires_grad_() for x in self.leaves]

    def sources(self, chunk="auto", from_logits=False, **options):
        if from_logits:
            return F.linear(*self.leaves), F.linear(*self.teacher)
        return (
            losses.Head(*self.leaves, chunk=chunk, **options),
            losses.Head(*self.teacher, **options),
        )


def trl_gkd(pair, leaves=None, teacher=None, **options):
    module = pytest.importorskip("trl.experimental.gkd")
    student, other = F.linear(*(leaves or pair.leaves)), F.linear(*(teacher or pair.teacher))
    return module.GKDTrainer.generalized_jsd_loss(student, other, pair.target, **options)


BETAS = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.3}


@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("divergence", BETAS)
def test_distillation_is_trl(divergence, temperature, from_logits):
    pair = Pair()
    expected = trl_gkd(pair, beta=BETAS[divergence], temperature=temperature)
    options = {"beta": 0.3} if divergence == "jsd" else {}
    ours, metrics = losses.distillation_loss(
        *pair.sources(5, from_logits),
        pair.target,
        divergence=divergence,
        temperature=temperature,
        **options,
    )
    assert_same_loss(ours, expected, pair.leaves)
    assert metrics.soft.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 256, "auto"])
@pytest.mark.parametrize("dtype", [WIDE, HALF])
@pytest.mark.parametrize("divergence", ["forward_kl", "jsd", "tvd", "cosine"])
def test_no_chunk_and_no_dtype_moves_the_loss(divergence, dtype, chunk):
    pair = Pair(dtype=dtype)
    wide, teacher = pair.wide(), [x.float() for x in pair.teacher]
    z, t = F.linear(*wide), F.linear(*teacher)
    if divergence == "tvd":  # a sign that a rounded logit turns is no error of the loss
        z, t = (x + (x.to(dtype).float() - x).detach() for x in (z, t))
    p, q = t.softmax(-1), z.softmax(-1)
    rows = {
        "tvd": lambda: 0.5 * (p - q).abs().sum(-1),
        "cosine": lambda: 1 - (z * t).sum(-1) / (z.norm(dim=-1) * t.norm(dim=-1)),
    }
    if divergence in rows:
        expected = (rows[divergence]() * pair.mask).sum() / pair.mask.sum()
    else:
        expected = trl_gkd(pair, wide, teacher, beta=0.0 if divergence == "forward_kl" else 0.5)
    ours, _ = losses.distillation_loss(*pair.sources(chunk), pair.target, divergence=divergence)
    assert_same_loss(ours, expected, pair.leaves, dtype, wide)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("unlike", [False, True])
def test_scales_softcaps_and_temperatures_of_each_head(divergence, unlike):
    """TRL's loss of two heads; with a softcap or two scales, rows go the longer way."""
    module = pytest.importorskip("trl.trainer.distillation_trainer")
    pair = Pair()
    own = {"logit_scale": 0.6, "softcap": 2.0 if unlike else None}
    other = {"logit_scale": 1.5 if unlike else 0.6, "softcap": None}
    expected, entropy, count = module._chunked_divergence_loss(
        pair.leaves[0],
        pair.teacher[0],
        pair.leaves[1],
        pair.teacher[1],
        pair.mask,
        BETAS[divergence],
        student_lm_head_bias=pair.leaves[2],
        teacher_lm_head_bias=pair.teacher[2],
        student_logit_scale=0.6,
        teacher_logit_scale=other["logit_scale"],
        student_final_logit_softcapping=own["softcap"],
        temperature=1.3,
    )
    ours, metrics = losses.distillation_loss(
        losses.Head(*pair.leaves, chunk=5, **own),
        losses.Head(*pair.teacher, **other),
        pair.target,
        divergence=divergence,
        temperature=1.3,
        metrics=("entropy", "token_accuracy"),
        **({"beta": 0.3} if divergence == "jsd" else {}),
    )
    assert_same_loss(ours, expected, pair.leaves)
    assert metrics.tokens == count
    warm, _ = losses.distillation_loss(
        losses.Head(*pair.leaves, temperature=1.3, **own),
        losses.Head(*pair.teacher, **other),
        pair.target,
        soft_weight=1.0,
        metrics=("entropy",),
    )
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
        student,
        teacher,
        pair.target,
        temperature=2.0,
        square_temperature=True,
        soft_weight=0.7,
        hard_weight=0.4,
        num_items=40,
    )
    soft = trl_gkd(pair, beta=0.5, temperature=2.0, num_items_in_batch=40) * 4
    hard = (
        F.cross_entropy(
            F.linear(*pair.leaves).flatten(0, 1), pair.target.flatten(), reduction="sum"
        )
        / 40
    )
    assert_same_loss(ours, 0.7 * soft + 0.4 * hard, pair.leaves)
    assert metrics.hard.item() == pytest.approx(hard.item(), rel=1e-5)
    assert metrics.soft.item() == pytest.approx(soft.item(), rel=1e-5)


@pytest.mark.parametrize("divergence", ["jsd", "cosine"])
def test_a_head_learns_from_given_logits(divergence):
    pair = Pair()
    student, teacher = pair.sources()
    results = [
        losses.distillation_loss(student, other, pair.target, divergence=divergence)[0]
        for other in (teacher, F.linear(*pair.teacher))
    ]
    assert_same_loss(*results, pair.leaves)


@pytest.mark.parametrize("classes", [(53, 61), (61, 53)])
@pytest.mark.parametrize("divergence", ["jsd", "cosine"])
@pytest.mark.parametrize("from_logits", [False, True])
def test_vocabularies_of_two_sizes(divergence, classes, from_logits):
    pair = Pair(classes=classes[0], other=classes[1])
    with pytest.raises(ValueError, match="common"):
        losses.distillation_loss(
            *pair.sources(from_logits=from_logits), pair.target, divergence=divergence
        )
    ours, _ = losses.distillation_loss(
        *pair.sources(from_logits=from_logits),
        pair.target,
        divergence=divergence,
        vocabulary="common",
    )
    small = Pair(classes=classes[0], other=classes[1])
    cut = [small.teacher[0], *[x[:53] for x in small.teacher[1:]]]
    mine = [small.leaves[0], *[x[:53] for x in small.leaves[1:]]]
    expected, _ = losses.distillation_loss(
        losses.Head(*mine), losses.Head(*cut), pair.target, divergence=divergence
    )
    a, e = torch.autograd.grad(ours, pair.leaves), torch.autograd.grad(expected, small.leaves)
    assert_within((ours, *a), (expected, *e), dtype=WIDE)


def test_ignored_tokens_are_ignored_in_every_term():
    """Whatever stands in their rows; and nothing but them is a loss of zero, connected."""
    for divergence in ("jsd", "tvd", "cosine"):
        pair, spoiled = Pair(), Pair()
        with torch.no_grad():
            for x in (spoiled.leaves[0], spoiled.teacher[0]):
                x[~pair.mask] = float("nan")
        results = [
            losses.distillation_loss(
                *p.sources(), p.target, divergence=divergence, hard_weight=0.3
            )[0]
            for p in (pair, spoiled)
        ]
        assert torch.equal(*results)
        grads = [
            torch.autograd.grad(x, p.leaves[1:])
            for x, p in zip(results, (pair, spoiled), strict=True)
        ]
        assert_equal(*grads)
        pair.target[:] = -100
        ours, _ = losses.distillation_loss(
            *pair.sources(), pair.target, divergence=divergence, hard_weight=0.3
        )
        assert ours == 0
        assert all((g == 0).all() for g in torch.autograd.grad(ours, pair.leaves))


# --- a teacher's likeliest tokens ---


def few(pair, k=5, padded=True):
    values, ids = F.log_softmax(F.linear(*[x.float() for x in pair.teacher]), -1).topk(k)
    if padded:
        ids[0, :, -2:], values[0, :, -2:] = -1, -torch.inf
    return losses.TopK(ids, values)


@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize("rest", ["renormalize", "bucket"])
@pytest.mark.parametrize("divergence", BETAS)
def test_few_tokens_are_trl(divergence, rest, from_logits):
    module = pytest.importorskip("trl.experimental.async_distillation.async_distillation_trainer")
    pair = Pair()
    top = few(pair)
    options = {"logit_scale": 0.7, "softcap": 4.0}
    flat = pair.mask.reshape(-1)
    ids, values = (x.reshape(-1, 5)[flat] for x in (top.ids, top.log_prob))
    expected = (
        module._jsd_loss_chunk(
            pair.leaves[0].reshape(-1, 16)[flat],
            *pair.leaves[1:],
            0.7,
            4.0,
            ids,
            values,
            ids >= 0,
            BETAS[divergence],
            1.3,
            rest == "bucket",
            None,
            1,
        )[0]
        / flat.sum()
    )
    student = losses.Head(*pair.leaves, chunk=5, **options)
    if from_logits:
        student = losses.Logits(F.linear(*pair.leaves), **options)
    ours, _ = losses.distillation_loss(
        student,
        top,
        pair.target,
        divergence=divergence,
        temperature=1.3,
        rest=rest,
        **({"beta": 0.3} if divergence == "jsd" else {}),
    )
    assert_same_loss(ours, expected, pair.leaves)


@pytest.mark.parametrize("chunk", [1, 7, 256])
@pytest.mark.parametrize("dtype", [WIDE, HALF])
def test_all_tokens_are_the_whole_distribution(chunk, dtype):
    """With k = V nothing is left over."""
    pair = Pair(classes=20, dtype=dtype)
    wide, teacher = pair.wide(), [x.float() for x in pair.teacher]
    expected = trl_gkd(pair, wide, teacher, beta=0.0)
    ours, _ = losses.distillation_loss(
        pair.sources(chunk)[0], few(pair, 20, False), pair.target, divergence="forward_kl"
    )
    assert_same_loss(ours, expected, pair.leaves, dtype, wide)


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


@pytest.mark.parametrize("at_once", [2**28, 20], ids=["whole", "blocks"])
@pytest.mark.parametrize("mode", [True, "rows", "torch", "compiled"], ids=str)
def test_the_cosine_in_modes_and_graphs(mode, at_once, monkeypatch):
    """It has no operator of its own, and raised where kernels of rows cannot run."""
    monkeypatch.setattr(one_pass, "LOGITS_AT_ONCE", at_once)
    pair = Pair()

    def loss():
        return losses.distillation_loss(*pair.sources(), pair.target, divergence="cosine")[0]

    expected = loss()
    wanted_grads = torch.autograd.grad(expected, pair.leaves)
    if mode == "compiled":
        got = torch.compile(loss, backend="eager")()
    elif mode == "torch":
        torch.use_deterministic_algorithms(True)
        try:
            got = loss()
        finally:
            torch.use_deterministic_algorithms(False)
    else:
        with liger_multi.use(deterministic=mode):
            got = loss()
    torch.testing.assert_close(got, expected)
    grads = torch.autograd.grad(got, pair.leaves)
    torch.testing.assert_close(grads, wanted_grads, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("forms", "options", "error", "message"),
    [
        (lambda s, t, p: (losses.tokens(s, p.target), t), {}, TypeError, "numbers"),
        (lambda s, t, p: (F.linear(*p.leaves), t), {}, TypeError, "do not"),
        (lambda s, t, p: (s, losses.tokens(t, p.target)), {}, TypeError, "teacher must be"),
        (lambda s, t, p: (s, losses.TopK(p.target, p.target.float())), {}, ValueError, "K"),
        (
            lambda s, t, p: (s, few(p)),
            {"divergence": "cosine"},
            ValueError,
            "of a top-k teacher is not defined",
        ),
        (lambda s, t, p: (s, t), {"temperatur": 2.0}, TypeError, "temperature"),
    ],
)
def test_forms_that_do_not_fit_are_errors(forms, options, error, message):
    pair = Pair()
    with pytest.raises(error, match=message):
        losses.distillation_loss(*forms(*pair.sources(), pair), pair.target, **options)
