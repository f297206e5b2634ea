"""Grouped products: PyTorch's and ours say the same, over groups of several tiles and of none."""

import pytest
import torch

import liger_multi
from liger_multi import ops
from liger_multi.testing import FORMULAS, samples
from liger_multi.testing.tolerance import excess
from tests import harness

pytest.importorskip("triton", reason="needs Triton")
if not harness.interpreted() and harness.accelerator() is None:
    pytest.skip("kernels need a device or TRITON_INTERPRET=1", allow_module_level=True)

from liger_multi.backends.triton.experts import grouped, pairs
from liger_multi.backends.triton.experts.pairs import Groups, RowOperand
from liger_multi.reference.experts.fused_moe import sorted_pairs

DEVICE = torch.device("cpu") if harness.interpreted() else harness.accelerator()


def groups_of(sizes, per=2, spare=0):
    """Groups of these many rows, from a shuffled order of their pairs."""
    rows = sum(sizes)
    offsets = torch.tensor([0, *torch.tensor(sizes).cumsum(0)], dtype=torch.int32, device=DEVICE)
    generator = torch.Generator().manual_seed(3)
    order = torch.randperm(rows + spare, generator=generator).to(DEVICE, torch.int32)
    return Groups(offsets, order, per)


@pytest.mark.parametrize(
    ("tokens", "per", "experts"), [(40, 2, 3), (300, 4, 130), (128, 1, 127), (1, 1, 1), (0, 2, 3)]
)
def test_slots_are_sorted_stably(tokens, per, experts):
    """Chunks and steps of experts that divide and do not, ids of no expert, experts of no pair."""
    generator = torch.Generator().manual_seed(tokens)
    index = torch.randint(-2, experts + 3, (tokens, per), generator=generator)
    index[index == experts // 2] = 0
    order, inverse, offsets = pairs.sorted_pairs(index.to(DEVICE), experts)
    _, right, starts = sorted_pairs(index, experts)
    assert order.cpu().tolist() == right.tolist()
    assert offsets.cpu().tolist() == starts.tolist()
    assert torch.equal(inverse[order.long()].cpu(), torch.arange(tokens * per).int())
    assert torch.equal(pairs.inverse_of(order), inverse)


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("gather", [False, True])
def test_products_of_uneven_groups(library, gather):
    groups = groups_of((37, 0, 1, 16, 0), spare=4)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16)

    x = draw(groups.rows // 2 if gather else groups.rows, 24)
    weight, other = draw(5, 40, 24), draw(groups.rows, 40)
    written = x[groups.order.long() // 2] if gather else x
    with grouped.products_by(library):
        made = grouped.product("test", RowOperand(x, gather), weight, groups)
        sides = (RowOperand(other), RowOperand(x, gather))
        gradient = grouped.weight_gradient("test", *sides, groups, False)
        turned = grouped.weight_gradient("test", *sides, groups, True)
    for e, (start, stop) in enumerate(((0, 37), (37, 37), (37, 38), (38, 54), (54, 54))):
        rows = written[start:stop].double()
        right = rows @ weight[e].double().T
        assert excess(made[start:stop], right, torch.bfloat16) <= 1
        right = other[start:stop].double().T @ rows
        assert excess(gradient[e], right, torch.bfloat16) <= 1
        assert torch.equal(turned[e], gradient[e].T)


@pytest.mark.parametrize("name", ["gpt-oss", "sentinels", "unused-experts", "wider"])
def test_the_library_s_products_serve_the_operator(name):
    """The composition that launch tables may choose, on rows that were gathered before."""
    sample = next(s for s in samples.of("fused_moe") if s.name == name)
    tensors = sample.make(DEVICE, torch.bfloat16)
    exact = {
        n: t.detach().double().requires_grad_() if t.is_floating_point() else t
        for n, t in tensors.items()
    }
    floats = [n for n, t in tensors.items() if t.is_floating_point()]
    seen = []
    stock = torch._grouped_mm
    with pytest.MonkeyPatch.context() as patch, grouped.products_by(True):
        patch.setattr(torch, "_grouped_mm", lambda *a, **k: (seen.append(1), stock(*a, **k))[1])
        with liger_multi.use(fused_moe="triton"):
            y = ops.fused_moe(**tensors, **sample.options)
            found = torch.autograd.grad(y, [tensors[n] for n in floats], torch.ones_like(y))
    right = FORMULAS["fused_moe"](**exact, **sample.options)
    wanted = torch.autograd.grad(right, [exact[n] for n in floats], torch.ones_like(right))
    assert seen, "the library was not asked"
    assert excess(y.detach(), right.detach(), torch.bfloat16) <= 1
    errors = {
        n: excess(got, exact_one, torch.bfloat16)
        for n, got, exact_one in zip(floats, found, wanted, strict=True)
    }
    assert max(errors.values()) <= 1, errors
