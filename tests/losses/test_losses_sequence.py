"""Losses of given sequences: TRL's SFT, DFT, packed rows, weights, ranks, several heads."""

import pytest
import torch
import torch.nn.functional as F

from liger_multi import losses
from liger_multi.losses import shared
from liger_multi.testing.tolerance import excess
from tests import trl_eager

HALF, WIDE = torch.bfloat16, torch.float32


def head(rows=4, length=9, width=16, classes=53, dtype=WIDE, empty=True):
    torch.manual_seed(0)
    leaves = [torch.randn(rows, length, width), torch.randn(classes, width) * 0.4,
              torch.randn(classes) * 0.3]  # fmt: skip
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


def both(ours, theirs, leaves, dtype=WIDE, wide=None):
    a, e = torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, wide or leaves)
    assert excess(ours.detach(), theirs.detach(), WIDE if dtype == WIDE else dtype) <= 1
    for x, y in zip(a, e, strict=True):
        assert excess(x, y, dtype) <= 1


def trl_sft(leaves, target, kind, num_items):
    trl = pytest.importorskip("trl")
    padded = F.pad(leaves[0], (0, 0, 0, 1))
    model = trl_eager.Toy(padded, *leaves[1:])
    labels = F.pad(target, (1, 0), value=-100)
    stub = trl_eager.trainer(model, compute_loss_func=None, label_smoother=None)
    stub.args = type("Args", (), {"loss_type": kind, "average_tokens_across_devices": True})
    stub.get_tp_size = lambda: 1
    stub.accelerator.parallelism_config = None
    inputs = {"labels": labels, "attention_mask": torch.ones_like(labels)}
    loss = trl.SFTTrainer.compute_loss(stub, model, inputs, num_items_in_batch=num_items)
    return loss, trl_eager.logged(stub)


@pytest.mark.parametrize("num_items", [None, 31])
@pytest.mark.parametrize("chunk", [1, 7, 256, "auto"])
@pytest.mark.parametrize("dtype", [WIDE, HALF])
@pytest.mark.parametrize("kind", ["nll", "dft"])
def test_sft_is_trl(kind, dtype, chunk, num_items):
    leaves, target = head(dtype=dtype)
    wide = [x.detach().float().requires_grad_() for x in leaves]
    theirs, log = trl_sft(wide, target, kind, num_items)
    ours, metrics = losses.sequence_loss(
        losses.Head(*leaves, chunk=chunk), target, loss_type=kind, num_items=num_items,
        metrics=("entropy", "token_accuracy"),
    )  # fmt: skip
    both(ours, theirs, leaves, dtype, wide)
    near = {"rel": 1e-5} if dtype == WIDE else {"rel": 2**-6}
    assert metrics.entropy.item() == pytest.approx(log["entropy"], **near)
    if dtype == WIDE:
        assert metrics.token_accuracy.item() == pytest.approx(log["mean_token_accuracy"])


@pytest.mark.parametrize("kind", ["nll", "dft"])
def test_nothing_to_learn_is_zero_and_connected(kind):
    leaves, target = head()
    target[:] = -100
    theirs, _ = trl_sft(leaves, target, kind, None)
    ours, _ = losses.sequence_loss(losses.Head(*leaves), target, loss_type=kind)
    both(ours, theirs, leaves)
    assert ours == 0


@pytest.mark.parametrize("passes", ["one", "two"])
def test_z_loss_and_entropy(passes):
    """-log p + z lse^2 - e H, meaned over tokens."""
    leaves, target = head()
    ours, metrics = losses.sequence_loss(
        losses.Head(*leaves, chunk=5), target, z_loss=1e-2, entropy_weight=0.3, passes=passes,
        metrics=("z_loss",),
    )  # fmt: skip
    own, lse, entropy = exact(leaves, target)
    count = (target >= 0).sum()
    both(ours, (-own + 1e-2 * lse**2 - 0.3 * entropy).sum() / count, leaves)
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
        right = loss.sum() / (w * mask).sum()
    elif reduction == "sum":
        right = loss.sum()
    else:
        right = (loss.sum(-1)[:-1] / mask.sum(-1)[:-1]).mean()  # the last row has no token
    both(ours, right, leaves)


def test_packed_rows_are_the_same_as_padded_ones():
    """Three sequences in one row, or one a row: the same mean over sequences."""
    leaves, target = head(3, 6, empty=False)
    alone, _ = losses.sequence_loss(losses.Head(*leaves), target, reduction="sequence")
    packed = [leaves[0].reshape(1, 18, -1), *leaves[1:]]
    positions = torch.arange(6).repeat(3)[None]
    together, _ = losses.sequence_loss(
        losses.Head(*packed), target.reshape(1, 18), segments=losses.segments_of(positions),
        reduction="sequence",
    )  # fmt: skip
    both(together, alone, leaves)
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
    both(sum(parts), whole, leaves)


def test_several_heads_predict_further_ahead():
    """L_0 + weight / D sum L_k, and nobody looks past the end of a packed sequence."""
    leaves, target = head(2, 8, empty=False)
    torch.manual_seed(1)
    more = [torch.randn(2, 8, 16).requires_grad_() for _ in range(2)]
    segments = torch.tensor([[0] * 5 + [1] * 3, [0] * 8])
    sources = [losses.Head(h, *leaves[1:], chunk=3) for h in (leaves[0], *more)]
    ours, metrics = losses.mtp_loss(sources, target, ahead_weight=0.6, segments=segments)
    right, seen = 0.0, []
    for k, hidden in enumerate((leaves[0], *more)):
        total, count = 0.0, 0
        own = torch.log_softmax(F.linear(hidden, *leaves[1:]), -1)
        for i in range(2):
            for t in range(8 - k):
                if segments[i, t] == segments[i, t + k] and target[i, t + k] >= 0:
                    total, count = total - own[i, t, target[i, t + k]], count + 1
        seen.append(total / count)
        right = right + seen[-1] * (1.0 if k == 0 else 0.3)
    both(ours, right, [*leaves, *more])
    for a, b in zip((metrics.first.nll, *metrics.ahead), seen, strict=True):
        torch.testing.assert_close(a, b.detach())


def test_heads_further_ahead_than_the_row_is_long():
    leaves, target = head(1, 2, empty=False)
    sources = [losses.Head(*leaves)] * 4
    ours, _ = losses.mtp_loss(sources, target)
    assert ours.isfinite()


def test_segment_weights_sum_to_one_with_random_numbers():
    torch.manual_seed(0)
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
