"""One rank of a vocabulary that is split over processes, compared with one process.

``test_heads.py`` starts it with the rank, a file to meet at, the number of ranks and their device.
"""

import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from liger_multi.nn.vocab_parallel import (
    vocab_parallel_cross_entropy,
    vocab_parallel_fused_linear_cross_entropy,
    vocab_parallel_fused_linear_log_prob,
    vocab_range,
)
from liger_multi.testing.tolerance import excess

ROWS, HIDDEN = 7, 6
OPTIONS = [  # label smoothing, its style, reduction, softcap
    (0.0, "torch", "mean", None),
    (0.2, "torch", "sum", None),
    (0.2, "megatron", "mean", None),
    (0.0, "torch", "none", 5.0),
    (0.1, "megatron", "none", 5.0),
]


def full_loss(z, target, smoothing, style, reduction, cap):
    classes = z.shape[1]
    z = z if cap is None else cap * torch.tanh(z / cap)
    share = smoothing * classes / (classes - 1) if style == "megatron" else smoothing
    return F.cross_entropy(z, target, label_smoothing=share, reduction=reduction)


def near(actual, expected, dtype):
    assert excess(actual.detach(), expected.detach(), dtype) <= 1, (actual, expected)


def near_part(actual, full, part, dtype, dim=0):
    """A part rounds as the full gradient: what cancels has the size of its largest entry."""
    among = full.detach().clone()
    among.movedim(dim, 0)[part] = actual.detach().to(full).movedim(dim, 0)
    near(among, full, dtype)


def same_everywhere(x):
    every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(every, x.contiguous())
    assert all(torch.equal(e, x) for e in every)


def seeded(seed):
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def inputs(classes, dtype, scale=1.0):
    g = seeded(classes)
    target = torch.randint(classes, (ROWS,), generator=g)
    target[2] = -100
    hidden, weight, bias = (
        torch.randn(s, generator=g, dtype=torch.float64).to(dtype) * scale
        for s in ((ROWS, HIDDEN), (classes, HIDDEN), (classes,))
    )
    return hidden, weight, bias, target, slice(*vocab_range(classes))


def leaves(*tensors):
    return [x.clone().requires_grad_() for x in tensors]


def check_losses(classes, dtype):
    """The loss of logits and of hidden states, with every option."""
    hidden, weight, bias, target, part = inputs(classes, dtype)
    logits = hidden @ weight.T + bias
    for smoothing, style, reduction, cap in OPTIONS:
        formula = target, smoothing, style, reduction, cap
        options = {"label_smoothing": smoothing, "smoothing": style, "reduction": reduction}
        options |= {"vocabulary": classes, "softcap": cap}
        (full,), (own,) = leaves(logits.double()), leaves(logits[:, part])
        expected = full_loss(full, *formula)
        up = torch.randn(expected.shape, dtype=torch.float64)
        loss = vocab_parallel_cross_entropy(own, target, **options)
        torch.autograd.backward((expected, loss), (up, up.to(loss)))
        same_everywhere(loss.detach())
        near(loss, expected, dtype)
        near_part(own.grad, full.grad, part, dtype, dim=1)

        if smoothing and cap is not None:
            continue
        exact = leaves(hidden.double(), weight.double(), bias.double())
        expected = full_loss(exact[0] @ exact[1].T + exact[2], *formula)
        x, w, b = ours = leaves(hidden, weight[part], bias[part])
        loss = vocab_parallel_fused_linear_cross_entropy(x, w, target, bias=b, **options)
        torch.autograd.backward((expected, loss), (up, up.to(loss)))
        near(loss, expected, dtype)
        same_everywhere(x.grad)
        near(x.grad, exact[0].grad, dtype)
        for own, full in zip(ours[1:], exact[1:]):
            near_part(own.grad, full.grad, part, dtype)


def check_log_probs(classes, dtype):
    """Log-probabilities, entropies and normalizers, alone and together."""
    hidden, weight, _, target, part = inputs(classes, dtype)
    for outputs in (("log_prob",), ("entropy",), ("log_prob", "entropy", "lse")):
        exact, ours = leaves(hidden.double(), weight.double()), leaves(hidden, weight[part])
        z = exact[0] @ exact[1].T / 0.7
        log_p, valid = torch.log_softmax(z, -1), target != -100
        expected = {
            "log_prob": log_p.gather(1, target.clamp(min=0)[:, None])[:, 0],
            "entropy": -(log_p.exp() * log_p).sum(-1),
            "lse": z.logsumexp(-1),
        }
        ups = {n: torch.randn(ROWS, dtype=torch.float64) for n in outputs}
        output = vocab_parallel_fused_linear_log_prob(
            *ours, target, vocabulary=classes, temperature=0.7, outputs=outputs
        )
        sum((expected[n] * valid * ups[n]).sum() for n in outputs).backward()
        sum((getattr(output, n) * ups[n].to(dtype)).sum() for n in outputs).backward()
        for n in outputs:
            near(getattr(output, n), expected[n] * valid, dtype)
            same_everywhere(getattr(output, n).detach())
        assert all((getattr(output, n) is None) == (n not in outputs) for n in expected)
        near(ours[0].grad, exact[0].grad, dtype)
        near_part(ours[1].grad, exact[1].grad, part, dtype)


def check_bf16():
    """A sum that overflows fp16, and statistics of bf16 rows, are fp32."""
    hidden, weight, _, target, part = inputs(12, torch.bfloat16, 20.0)
    reduced, summed = leaves(hidden, hidden)
    for leaf, reduce in ((reduced, True), (summed, False)):
        loss = vocab_parallel_fused_linear_cross_entropy(
            leaf, weight[part], target, vocabulary=12, reduce_hidden=reduce
        )
        assert loss.dtype == torch.float32
        expected = F.cross_entropy((hidden @ weight.T).float(), target)
        torch.testing.assert_close(loss, expected, rtol=2e-3, atol=1e-3)
        loss.backward()
    total = summed.grad.float()
    dist.all_reduce(total)
    torch.testing.assert_close(reduced.grad, total.bfloat16())


def check_certain_targets(offset):
    """Logits with an offset, and targets that are nearly certain."""
    g, part = seeded(3), slice(*vocab_range(12))
    z, t = torch.randn(8, 12, generator=g), torch.arange(8)
    z[:4].scatter_add_(1, t[:4, None], torch.tensor([10.0, 20.0, 20.0, 40.0])[:, None])
    z[4] = 20.0 * F.one_hot(t[4], 12)
    z += offset
    below = z.double() - z.double().gather(1, t[:, None])
    rest = below.exp().scatter(1, t[:, None], 0).sum(-1, keepdim=True)
    log_p, each = below - rest.log1p(), {"rtol": 3e-6, "atol": 0.0}
    plain = (below.exp() / (1 + rest)).scatter(1, t[:, None], -rest / (1 + rest))
    for run in ("logits", "smoothed", "head"):
        (own,) = leaves(z[:, part])
        if run == "head":
            output = vocab_parallel_fused_linear_log_prob(torch.eye(8), own.T, t, vocabulary=12)
            loss, entropy = -output.log_prob, -(log_p.exp() * log_p).sum(-1)
            torch.testing.assert_close(output.entropy.detach().double(), entropy, **each)
        else:
            smoothing = 0.1 * (run == "smoothed")
            loss = vocab_parallel_cross_entropy(
                own, t, vocabulary=12, reduction="none", label_smoothing=smoothing
            )
        expected, grads = rest.log1p()[:, 0], plain
        if run == "smoothed":
            expected = 0.9 * expected - 0.1 * log_p.mean(-1)
            grads = 0.9 * grads + 0.1 * (plain + F.one_hot(t, 12) - 1 / 12)
        torch.testing.assert_close(loss.detach().double(), expected, **each)
        loss.sum().backward()
        scale = grads.abs().amax(-1, keepdim=True)
        assert ((own.grad - grads[:, part]).abs() <= 3e-6 * scale).all(), (offset, run)


def check_edges(rank, count, device_type):
    """Another split, every row ignored, wrong targets and an unknown first class."""
    edges = [0, 9, 10, 12] if count == 3 else [0, 9, 12]
    z, target = (
        torch.randn(ROWS, 12, generator=seeded(5)),
        inputs(12, torch.float32)[3].clamp(min=0),
    )
    (leaf,), own = leaves(z[:, slice(*vocab_range(12))]), z[:, edges[rank] : edges[rank + 1]]
    loss = vocab_parallel_cross_entropy(own, target, vocabulary=12, start=edges[rank])
    near(loss, F.cross_entropy(z, target), torch.float32)
    loss = vocab_parallel_cross_entropy(leaf, torch.full_like(target, -100), vocabulary=12)
    loss.backward()
    assert loss.item() == 0
    assert not leaf.grad.any()
    for wrong in (12, -7) if device_type == "cpu" else ():  # elsewhere it would wait for the device
        with pytest.raises(IndexError, match=rf"target {wrong} is outside of \[0, 12\)"):
            vocab_parallel_cross_entropy(leaf, target * 0 + wrong, vocabulary=12)
    with pytest.raises(ValueError, match=r"(?=.*pass start=).*got 12 of them"):
        vocab_parallel_cross_entropy(z, target, vocabulary=12)


def main(rank, meeting, count, device_type):
    device = torch.device(device_type, rank if device_type != "cpu" else None)
    if device_type != "cpu":
        torch.get_device_module(device).set_device(device)
    torch.set_default_device(device)
    group = dist.get_default_backend_for_device(device)
    dist.init_process_group(group, init_method=f"file://{meeting}", rank=rank, world_size=count)
    assert dist.get_backend() == {"cpu": "gloo", "cuda": "nccl"}.get(device_type, group)
    torch.manual_seed(0)
    for classes, dtype in ((4, torch.float32), (11, torch.float64), (12, torch.float32)):
        check_losses(classes, dtype)
        check_log_probs(classes, dtype)
    check_bf16()
    for offset in (0.0, 1e6, -1e6):
        check_certain_targets(offset)
    check_edges(rank, count, device_type)
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
