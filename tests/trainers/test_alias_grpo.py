"""``GrpoLossFunction`` and ``triton_grpo_loss``: numbers of tokens, and the loss of a batch."""

import pytest
import torch

from liger_multi import losses
from liger_multi.compat.liger_kernel.grpo import GrpoLossFunction, triton_grpo_loss

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


def clipped_gain(z, x, delta=None):
    """Losses, divergences and clipping of tokens, of DAPO with beta 0.1."""
    own = (z[:, :-1] / T).log_softmax(-1)
    own = own.gather(-1, x["completion_ids"].unsqueeze(-1)).squeeze(-1)
    a, ratio = x["advantages"].unsqueeze(1), (own - x["old_logp"]).exp()
    gap = x["ref_logp"] - own
    kl = gap.exp() - gap - 1
    outer = ratio if delta is None else ratio.clamp(max=delta)
    loss = -torch.min(outer * a, ratio.clamp(0.8, 1.3) * a) + 0.1 * kl
    clipped = ((ratio < 0.8) & (a < 0)) | ((ratio > 1.3) & (a > 0))
    return [(v * x["completion_mask"]).float() for v in (loss, kl, clipped)]


@pytest.mark.parametrize("delta", [None, 1.1])
def test_grpo_token_losses_match_formula(inputs, delta):
    inputs["logits"].retain_grad()
    expected = clipped_gain(inputs["logits"], inputs, delta)
    actual = triton_grpo_loss(**inputs, beta=0.1, eps_high=0.3, delta=delta)
    for x, y in zip(actual, expected):
        torch.testing.assert_close(x, y.detach(), rtol=1e-5, atol=1e-6, check_dtype=False)
    weights = torch.randn(3, 5)
    ends = [torch.autograd.grad((x * weights).sum(), inputs["logits"]) for x in (actual[0],)]
    right = torch.autograd.grad((expected[0] * weights).sum(), inputs["logits"])
    torch.testing.assert_close(ends[0], right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss_type", TYPES)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_grpo_batch_loss_matches_policy_loss(inputs, loss_type, beta):
    o = options(loss_type)
    loss, metrics = triton_grpo_loss(**inputs, beta=beta, reduce=True, **o)
    named = {"epsilon_high": o["eps_high"], "max_length": o.get("max_completion_length")}
    reads = losses.policy.POLICY[loss_type].reads
    expected, expected_metrics = losses.policy_loss(
        losses.Logits(inputs["logits"][:, :-1] / T),
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
    torch.testing.assert_close(loss, expected, check_dtype=False, rtol=1e-5, atol=1e-6)
    assert len(metrics) == (2 if beta else 1)
    if beta:
        torch.testing.assert_close(
            metrics[0], expected_metrics.kl, check_dtype=False, rtol=1e-5, atol=1e-6
        )
    actual, right = (torch.autograd.grad(x, inputs["logits"])[0] for x in (loss, expected))
    torch.testing.assert_close(actual, right, rtol=1e-4, atol=1e-6)
    assert actual[:, -1].count_nonzero() == 0, "the last logit is not read"


def test_grpo_leaves_logits_and_retains_graph(inputs):
    before = inputs["logits"].detach().clone()
    loss, _ = triton_grpo_loss(**inputs, inplace=True, reduce=True)
    first, second = (
        torch.autograd.grad(loss, inputs["logits"], retain_graph=True)[0] for _ in range(2)
    )
    assert torch.equal(inputs["logits"].detach(), before)
    assert torch.equal(first, second)


def test_grpo_gradient_dtype(inputs):
    inputs["logits"] = inputs["logits"].detach().to(torch.bfloat16).requires_grad_()
    loss, kl, clipped = triton_grpo_loss(**inputs)
    assert {loss.dtype, kl.dtype, clipped.dtype} == {torch.float32}
    loss.sum().backward()
    assert inputs["logits"].grad.dtype == torch.bfloat16


def test_grpo_empty_completions(inputs):
    inputs["completion_mask"] = torch.zeros(3, 5)
    loss, metrics = triton_grpo_loss(**inputs, reduce=True)
    assert (loss.item(), metrics[0].item(), metrics[1].item()) == (0, 0, 0)
    loss.backward()
    assert inputs["logits"].grad.count_nonzero() == 0


def test_grpo_argument_errors(inputs):
    positional = [
        inputs["logits"],
        inputs["old_logp"],
        None,
        inputs["completion_ids"],
        inputs["advantages"],
        inputs["completion_mask"],
        T,
    ]
    with pytest.raises(AssertionError, match="must be provided"):
        GrpoLossFunction.apply(*positional, 0.1, 0.2, 0.2, False)
    with pytest.raises(ValueError, match="Unknown loss_type: nothing"):
        GrpoLossFunction.apply(*positional, 0.0, 0.2, 0.2, False, "nothing")
    with pytest.raises(ValueError, match="max_completion_length"):
        GrpoLossFunction.apply(*positional, 0.0, 0.2, 0.2, False, "dr_grpo")
    positional[0] = inputs["logits"][:, :-1]
    with pytest.raises(ValueError, match=r"\(3, 5, 20\) and \(3, 5\)"):
        GrpoLossFunction.apply(*positional, 0.0, 0.2, 0.2, False)
