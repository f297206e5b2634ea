"""Chunked losses and GRPO by the names of Liger-Kernel, against formulas on whole logits."""

import pytest
import torch
import torch.nn.functional as F

from liger_multi import ops
from liger_multi.compat.liger_kernel import bases, functional, modules, policy, preference
from liger_multi.compat.liger_kernel.op_functions import LigerCrossEntropyFunction
from liger_multi.errors import DoubleBackwardError
from liger_multi.losses import Logits, policy_loss
from liger_multi.losses.policy import POLICY
from tests.comparing import Operations, recorded


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)

    def sample(*shape, grad=False):
        return torch.randn(*shape, generator=generator).requires_grad_(grad)

    return sample


# --- against the formulas on log-probabilities of whole logits ---


class Batch:
    """Hidden states, heads and targets, with the log-probabilities that belong to them."""

    def __init__(self, draw, rows=4):
        self.hidden, self.weight = draw(rows, 5, 8, grad=True), draw(11, 8, grad=True)
        self.bias = draw(11)
        self.ref_hidden, self.ref_weight = draw(rows, 5, 8), draw(11, 8)
        self.target = torch.randint(11, (rows, 5), generator=torch.Generator().manual_seed(1))
        self.target[:, 0] = -100
        self.target[1, 3:] = -100
        self.mask = self.target != -100
        self.logits = self.hidden @ self.weight.T + self.bias
        self.own = self.each(self.logits)
        self.ref = self.each(self.ref_hidden @ self.ref_weight.T)
        self.nll = -self.own[: rows // 2].sum() / self.mask[: rows // 2].sum()

    def each(self, logits, temperature=1.0):
        ids = self.target.clamp(min=0).unsqueeze(-1)
        return (logits / temperature).log_softmax(-1).gather(-1, ids).squeeze(-1) * self.mask

    def same(self, got, expected):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        inputs = (self.hidden, self.weight)
        torch.testing.assert_close(
            torch.autograd.grad(got, inputs, retain_graph=True),
            torch.autograd.grad(expected, inputs, retain_graph=True),
            rtol=1e-4,
            atol=1e-6,
        )


@pytest.fixture
def pairs(draw):
    return Batch(draw)


def policy_of(b, terms=(), **options):
    return policy.LigerFusedLinearGRPOLoss(**options)(
        b.hidden,
        b.weight,
        b.target.clamp(min=0),
        b.mask.long(),
        torch.tensor([1.0, -0.5, 0.3, -1.0]),
        b.bias,
        **dict(terms),
    )


# --- what Liger-Kernel does otherwise than this library's own losses ---


def test_dpo_sigmoid_ignores_label_smoothing(pairs):
    b = pairs
    got, _ = preference.LigerFusedLinearDPOLoss(beta=0.3, label_smoothing=0.2, use_ref_model=False)(
        b.weight, b.hidden, b.target, b.bias
    )
    chosen, rejected = b.own.sum(-1).chunk(2)
    b.same(got, -F.logsigmoid(0.3 * (chosen - rejected)).mean())


DPO = preference.LigerFusedLinearDPOLoss


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (DPO, {"loss_type": "nothing"}, "^Unsupported loss_type: nothing"),
        (DPO, {"loss_type": "exo_pair"}, "^label_smoothing must be > 0 for loss_type='exo_pair'"),
        (DPO, {"loss_type": "robust", "label_smoothing": 0.5}, r"lie in \[0.0, 0.5\) .*'robust'"),
        (modules.LigerCrossEntropyLoss, {"label_smoothing": 2.0}, "label_smoothing"),
        (modules.LigerFusedLinearCrossEntropyLoss, {"reduction": "x"}, "reduction"),
        (modules.LigerCrossEntropyLoss, {"softcap": -1.0}, "softcap"),
        (modules.LigerFusedLinearJSD, {"temperature": 0.0}, "temperature"),
    ],
)
@pytest.mark.parametrize("error", [ValueError, AssertionError])
def test_option_errors_when_constructed(loss, options, message, error):
    with pytest.raises(error, match=message):
        loss(**options)


def test_preference_metrics_are_detached(pairs):
    b = pairs
    for options, nll in (({"compute_nll_loss": False}, b.nll * 0), ({}, b.nll)):
        _, aux = preference.LigerFusedLinearCPOLoss(**options)(b.weight, b.hidden, b.target, b.bias)
        assert not any(x.requires_grad for x in aux)
        torch.testing.assert_close(aux[4], nll.detach())


def test_orpo_nll_target(pairs):
    """The NLL is of those labels, rewards and log-odds of the targets, also where both count."""
    b, labels = pairs, (pairs.target + 3) % 11
    labels[:, -1] = -100

    def means(of):
        own = b.logits.log_softmax(-1).gather(-1, of.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return own * (of != -100), of != -100

    own, counts = means(labels)
    nll = -own[:2].sum() / counts[:2].sum()
    own, counts = means(b.target)
    sequences = own.sum(1) / counts.sum(1)
    odds = sequences - torch.log1p(-sequences.exp())
    ratio = F.logsigmoid(odds[:2] - odds[2:])
    expected = nll - 0.1 * ratio.mean()
    for rows in (labels, labels[:2]):
        loss, aux = preference.LigerFusedLinearORPOLoss()(
            b.weight, b.hidden, b.target, b.bias, rows
        )
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(aux[4], nll.detach())
        torch.testing.assert_close(aux[7], ratio.mean().detach())
        torch.testing.assert_close(aux[8], (odds[:2] - odds[2:]).mean().detach())
        leaves = (b.hidden, b.weight)
        torch.testing.assert_close(
            torch.autograd.grad(loss, leaves),
            torch.autograd.grad(expected, leaves, retain_graph=True),
        )


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "cispo", "sapo"])
def test_functional_grpo_positional_arguments(pairs, loss_type):
    """Temperatures of SAPO stand before that of the logits; other losses do not read them."""
    b = pairs
    ids, mask, advantages = b.target.clamp(min=0), b.mask.float(), torch.tensor([1.0, -2, 0.5, -1])
    before, after = (b.hidden, b.weight, ids, mask, advantages, b.bias, b.ref, b.own.detach()), ()
    first = (*before, None, None, None, 0.04, 0.2, 0.2, loss_type, 10, "token")
    for pos, neg, temperature in ((1.0, False, True), (-1.0, 0.5, 2.0), (1.0, 1.05, 0.7)):
        after = (pos, neg, temperature, False, True, 1)
        if loss_type == "sapo" and min(pos, neg) <= 0:
            with pytest.raises(ValueError, match="sapo_temperature must be > 0"):
                preference.liger_fused_linear_grpo(*first, *after)
            continue
        module = policy.LigerFusedLinearGRPOLoss(
            loss_type=loss_type, max_completion_length=10, temperature=float(temperature)
        )
        got, expected = preference.liger_fused_linear_grpo(*first, *after), module(*before)
        torch.testing.assert_close(got, expected)
    with pytest.raises(ValueError, match="sapo_temperature_neg must be positive"):
        policy.LigerFusedLinearGRPOLoss(sapo_temperature_neg=0.0)


@pytest.mark.parametrize("loss_type", ["cispo", "sapo", "vespo"])
def test_token_losses_reject_sequence_level(pairs, loss_type):
    b, ids = pairs, pairs.target.clamp(min=0)
    advantages, mask = torch.randn(4), b.mask.float()
    words = "Sequence-level importance sampling is not supported|requires importance_sampling_leve"
    with pytest.raises(ValueError, match=words):
        policy.triton_grpo_loss(
            torch.randn(4, 6, 11),
            b.own.detach(),
            None,
            ids,
            advantages,
            mask,
            beta=0.0,
            importance_sampling_level="sequence",
            loss_type=loss_type,
            reduce=True,
        )
    loss = policy.LigerFusedLinearGRPOLoss(
        beta=0.0, loss_type=loss_type, use_ref_model=False, importance_sampling_level="sequence"
    )
    with pytest.raises(ValueError, match=words):
        loss(b.hidden, b.weight, ids, mask, advantages)


def test_cross_entropy_target_out_of_bounds(monkeypatch):
    """They raise on every device, as Liger-Kernel's assertion does, which people catch."""
    logits, target = torch.randn(4, 11, requires_grad=True), torch.tensor([1, -100, 11, 3])
    calls = (
        modules.LigerCrossEntropyLoss(),
        functional.liger_cross_entropy,
        lambda x, t: LigerCrossEntropyFunction.apply(x, t, None),
    )
    for call in calls:
        for error in (AssertionError, IndexError):
            with pytest.raises(error, match="out of bounds"):
                call(logits, target)
    asked = recorded(monkeypatch, ops, "cross_entropy", lambda *_, validate, **__: validate)
    functional.liger_cross_entropy(logits, target.clamp(max=10))
    assert asked == [True]  # what a device asks for its sync


@pytest.mark.parametrize("terms", [{}, {"ref_per_token_logps": 3.0}])
def test_grpo_without_reference(pairs, terms):
    b = pairs
    terms = {k: torch.full(b.target.shape, v) for k, v in terms.items()}
    plain, _ = policy_of(b, beta=0.0, use_ref_model=False)
    got, (kl, _) = policy_of(b, terms, beta=0.5, use_ref_model=False)
    b.same(got, plain)
    assert kl == 0
    with pytest.raises(ValueError, match="ref_per_token_logps or ref_input must be provided"):
        policy_of(b, beta=0.5)


def test_grpo_log_probabilities_before_reference_states(pairs):
    b, both = pairs, {"ref_input": pairs.ref_hidden, "ref_weight": pairs.ref_weight}
    expected, _ = policy_of(b, {"ref_per_token_logps": b.ref + 0.3}, beta=0.5)
    with pytest.warns(UserWarning, match="Using ref_per_token_logps"):
        got, _ = policy_of(b, {"ref_per_token_logps": b.ref + 0.3, **both}, beta=0.5)
    b.same(got, expected)


def test_policy_base_chunk_forward(pairs):
    b, ids = pairs, pairs.target.clamp(min=0)
    got = bases.LigerFusedLinearPPOBase.chunk_forward(b.hidden, b.weight, ids, b.bias, 0.7)
    b.same((got * b.mask).sum(), b.each(b.logits, 0.7).sum())


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"])
def test_reduce_grpo_loss(draw, loss_type):
    loss, mask = draw(3, 5), torch.tensor([[1, 1, 0, 1, 1], [1, 0, 0, 0, 0], [1, 1, 1, 1, 0]])
    loss[0, 2] = torch.nan  # what does not count is not read
    total, counts = torch.where(mask == 1, loss, 0).sum(-1), mask.sum(-1)
    expected = {
        "grpo": (total / counts).mean(),
        "bnpo": total.sum() / counts.sum(),
        "dapo": total.sum() / counts.sum(),
        "dr_grpo": total.sum() / 15,  # of the length of the rows where none is told
        "luspo": total.mean(),  # of numbers of tokens, as in TRL: the sum of an answer
    }
    torch.testing.assert_close(
        policy._reduce_grpo_loss(loss, mask, loss_type, None), expected[loss_type]
    )


def test_vespo_sequence_ratio_counts_once(draw):
    log_ratio, mask = draw(3, 4) / 4, torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [1, 1, 0, 0]])
    advantages, ratio = torch.tensor([1.0, -1.0, 0.0]), torch.tensor([[0.5], [2.0], [1.5]])
    w = ((log_ratio * mask).sum(-1, keepdim=True)).exp() * ratio
    k, rate = torch.tensor([[2.0], [3.0], [2.0]]), torch.tensor([[3.0], [2.0], [3.0]])
    got = policy.get_gamma_weights(advantages, log_ratio, mask, ratio)
    torch.testing.assert_close(got, w**k * (rate * (1 - w)).exp())


# --- losses of one's own, on the base classes ---


def test_custom_preference_loss(pairs):
    base = bases.LigerFusedLinearPreferenceBase

    class Own(base):
        @staticmethod
        def preference_loss_fn(chosen, rejected, target, beta=0.1, gamma=0.0):
            gap = (chosen - rejected - gamma).square()
            return beta * gap.sum() / (target.shape[0] // 2), gap.mean(), chosen

        @classmethod
        def forward(cls, ctx, x, w, t, bias):
            return super().forward(
                cls=cls,
                ctx=ctx,
                _input=x,
                weight=w,
                target=t,
                bias=bias,
                beta=0.3,
                gamma=0.2,
                alpha=0.5,
                average_log_prob=False,
            )

        @staticmethod
        def backward(ctx, *grad_output):
            return base.backward(ctx, grad_output)[:4]

    b = pairs
    got, aux = Own.apply(b.hidden, b.weight, b.target, b.bias)
    chosen, rejected = b.own.sum(-1).chunk(2)
    gap = (chosen - rejected - 0.2).square()
    b.same(2 * got, 2 * (0.3 * gap.mean() + 0.5 * b.nll))
    torch.testing.assert_close(aux[5], gap.sum().detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(aux[6], chosen.detach())


def test_custom_distillation_loss_bounds_memory():
    base = bases.LigerFusedLinearDistillationBase

    class Own(base):
        @staticmethod
        def distillation_loss_fn(student, teacher, target=None, ignore_index=None, beta=0.5):
            gap = (student.softmax(-1) - teacher.softmax(-1)).square().sum(-1)
            return gap[target != ignore_index].sum()

        @classmethod
        def forward(cls, ctx, x, w, tx, tw, t):
            return super().forward(
                cls=cls,
                ctx=ctx,
                student_input=x,
                student_weight=w,
                teacher_input=tx,
                teacher_weight=tw,
                target=t,
                temperature=2.0,
                return_soft_hard_loss=True,
            )

        @staticmethod
        def backward(ctx, *grad_output):
            return base.backward(ctx, *grad_output)[:5]

    rows, classes = 2048, 2048
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 8, generator=g).requires_grad_()
    w = torch.randn(classes, 8, generator=g).requires_grad_()
    tx, tw = torch.randn(rows, 4, generator=g), torch.randn(classes, 4, generator=g)
    t = torch.randint(classes, (rows,), generator=g)
    t[::3] = -100
    with Operations() as operations:
        got, soft, hard = Own.apply(x, w, tx, tw, t)
        gradients = torch.autograd.grad(got, (x, w))
    assert max(t.numel() for t in operations.tensors()) <= rows * classes // 2
    z, y, valid = x @ w.T, tx @ tw.T, t != -100
    gap = ((z / 2).softmax(-1) - (y / 2).softmax(-1)).square().sum(-1)[valid].mean()
    label = F.cross_entropy(z, t)
    torch.testing.assert_close((soft, hard), (gap.detach(), label.detach()))
    expected = torch.autograd.grad(0.5 * gap + 0.5 * label, (x, w))
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)


def test_subclass_of_sealed_function_raises():
    with pytest.raises(TypeError, match="derive from LigerFusedLinearPreferenceBase"):

        class Own(preference.LigerFusedLinearDPOFunction):
            @staticmethod
            def preference_loss_fn(*args):
                return 0.0


def test_functional_simpo_argument_order(pairs):
    b = pairs
    got, _ = preference.liger_fused_linear_simpo(b.hidden, b.weight, b.target, b.bias, -100, 2.0)
    expected, _ = preference.LigerFusedLinearSimPOLoss(beta=2.0, compute_nll_loss=False)(
        b.weight, b.hidden, b.target, b.bias
    )
    b.same(got, expected)


def test_base_class_double_backward_raises():
    """They are made in forward: a second derivative would silently lack most of itself."""

    hidden = torch.randn(4, 5, 8, requires_grad=True)
    weight = torch.randn(11, 8, requires_grad=True)
    target = torch.randint(0, 11, (4, 5))
    loss = preference.LigerFusedLinearORPOFunction.apply(hidden, weight, target)[0]
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(DoubleBackwardError):
        torch.autograd.grad(gradient.square().sum(), weight)


# --- GrpoLossFunction and triton_grpo_loss: numbers of tokens, and the loss of a batch ---

TYPES = ("grpo", "bnpo", "dapo", "dr_grpo", "luspo", "cispo", "sapo", "vespo")
T = 0.8


@pytest.fixture
def inputs():
    g = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    ids, mask = torch.randint(20, (3, 5), generator=g), torch.ones(3, 5)
    mask[0, 4:] = mask[1, 2:] = 0
    logits = draw(3, 6, 20)
    own = (logits[:, :-1] / T).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return {
        "logits": logits.requires_grad_(),
        "old_logp": own.detach() + 0.4 * draw(3, 5),
        "ref_logp": own.detach() + 0.4 * draw(3, 5),
        "completion_ids": ids,
        "advantages": torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64),
        "completion_mask": mask,
        "temperature": T,
    }


def options(loss_type):
    o = {"loss_type": loss_type, "eps_high": 1.2 if loss_type == "cispo" else 0.3}
    return o | ({"max_completion_length": 7} if loss_type == "dr_grpo" else {})


@pytest.mark.parametrize("loss_type", TYPES)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_grpo_batch_loss_matches_policy_loss(inputs, loss_type, beta):
    o = options(loss_type)
    loss, metrics = policy.triton_grpo_loss(**inputs, beta=beta, reduce=True, **o)
    named = {"epsilon_high": o["eps_high"], "max_length": o.get("max_completion_length")}
    reads = POLICY[loss_type].reads
    expected, expected_metrics = policy_loss(
        Logits(inputs["logits"][:, :-1] / T),
        inputs["completion_ids"],
        inputs["advantages"],
        old=inputs["old_logp"],
        reference=inputs["ref_logp"] if beta else None,
        token_mask=inputs["completion_mask"],
        loss_type=loss_type,
        beta=beta,
        level=None if loss_type == "vespo" else "token",
        **{k: v for k, v in named.items() if k in reads},
    )
    near = {"check_dtype": False, "rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(loss, expected, **near)
    assert len(metrics) == (2 if beta else 1)
    if beta:
        torch.testing.assert_close(metrics[0], expected_metrics.kl, **near)
    actual, right = (torch.autograd.grad(x, inputs["logits"])[0] for x in (loss, expected))
    torch.testing.assert_close(actual, right, rtol=1e-4, atol=1e-6)
    assert actual[:, -1].count_nonzero() == 0, "the last logit is not read"


def test_grpo_leaves_logits_and_retains_graph(inputs):
    before = inputs["logits"].detach().clone()
    loss, (_kl, _clipped) = policy.triton_grpo_loss(**inputs, inplace=True, reduce=True)
    first, second = (
        torch.autograd.grad(loss, inputs["logits"], retain_graph=True)[0] for _ in range(2)
    )
    assert torch.equal(inputs["logits"].detach(), before)
    assert torch.equal(first, second)


def test_grpo_gradient_dtype(inputs):
    inputs["logits"] = inputs["logits"].detach().to(torch.bfloat16).requires_grad_()
    loss, kl, clipped = policy.triton_grpo_loss(**inputs)
    assert {loss.dtype, kl.dtype, clipped.dtype} == {torch.float32}
    loss.sum().backward()
    assert inputs["logits"].grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("beta", "loss_type", "logits", "error", "message"),
    [
        (0.1, (), slice(None), AssertionError, "must be provided"),
        (0.0, ("nothing",), slice(None), ValueError, "Unknown loss_type: nothing"),
        (0.0, ("dr_grpo",), slice(None), ValueError, "max_completion_length"),
        (0.0, (), slice(-1), ValueError, r"\(3, 5, 20\) and \(3, 5\)"),
    ],
)
def test_grpo_argument_errors(inputs, beta, loss_type, logits, error, message):
    names = ("completion_ids", "advantages", "completion_mask", "temperature")
    before = inputs["logits"][:, logits], inputs["old_logp"], None, *(inputs[n] for n in names)
    with pytest.raises(error, match=message):
        policy.GrpoLossFunction.apply(*before, beta, 0.2, 0.2, False, *loss_type)
