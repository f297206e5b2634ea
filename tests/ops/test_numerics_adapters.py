"""Adapters: what the operators say about arguments that do not fit, and parts of thin matrices.

The parts that a kernel makes are those of the reference, bit by bit.
"""

import pytest
import torch

from liger_multi.ops import lora_mlp, lora_qkv, lora_update
from liger_multi.reference.adapters import low_rank as low_rank_reference
from tests import harness

# --- bad input ---


x, base = torch.randn(4, 8), torch.randn(4, 6)
a, b, w, u = torch.randn(2, 8), torch.randn(6, 2), torch.randn(6, 8), torch.randn(8, 6)
half, trained = torch.bfloat16, torch.randn(6, 8, requires_grad=True)
BAD = [
    (
        lambda: lora_update(base[:3], x, a, b),
        ValueError,
        r"leading axes, got \(4, 8\) and \(3, 6\)",
    ),
    (lambda: lora_update(base, x, a[:, :5], b), ValueError, r"a must have shape \(r, 8\)"),
    (lambda: lora_update(base, x, a, b[:5]), ValueError, r"b must have shape \(6, 2\)"),
    (lambda: lora_update(base, x, a.to(half), b.to(half)), TypeError, "must not be narrower"),
    (lambda: lora_update(base.to(half), x, a, b), TypeError, "one dtype is needed"),
    (lambda: lora_mlp(x, w, w, u, a), ValueError, "gate_a needs gate_b beside it, got None"),
    (
        lambda: lora_mlp(x, w, trained, u),
        ValueError,
        "up_weight that requires a gradient; call gat",
    ),
    (lambda: lora_qkv(x), ValueError, "at least one of q_weight, k_weight and v_weight"),
    (lambda: lora_qkv(x, w, k_a=a, k_b=b), ValueError, "k_a needs k_weight beside it, got None"),
    (lambda: lora_qkv(x, w, v_bias=a[0]), ValueError, "v_bias needs v_weight beside it, got None"),
    (lambda: lora_qkv(x, w, q_b=b), ValueError, "q_b needs q_a beside it, got None"),
    (lambda: lora_qkv(x, w[:, :5]), ValueError, r"q_weight must have shape \(F, H\) .* \(6, 5\)"),
    (
        lambda: lora_qkv(x, w, q_bias=a[0]),
        ValueError,
        r"q_bias must have shape \(6,\), the rows of",
    ),
    (lambda: lora_qkv(x, w, q_a=a, q_b=b[:5]), ValueError, r"q_b must have shape \(6, 2\)"),
    (
        lambda: lora_qkv(x, w, trained),
        ValueError,
        "k_weight that requires a gradient; call the lay",
    ),
    (lambda: lora_qkv(x, w, w.to(half)), TypeError, "one dtype .* k_weight bfloat16"),
    (
        lambda: lora_qkv(x, w, w, None, a, b, a.double(), b.double()),
        TypeError,
        "one dtype is needed .* k_a float64",
    ),
    (lambda: lora_qkv(x.long(), w), TypeError, "x must be a floating-point tensor"),
]


@pytest.mark.parametrize(("run", "kind", "message"), BAD, ids=range(len(BAD)))
def test_bad_input_is_named(run, kind, message):
    with pytest.raises(kind, match=message):
        run()


def test_trained_layers_are_taken_where_nobody_asks_for_gradients():
    with torch.no_grad():
        found = lora_qkv(x, trained, None, w)
    assert torch.equal(found.q, x @ trained.detach().T)
    assert found.k is None
    assert torch.equal(found.v, x @ w.T)


def test_layers_that_autocast_meets():
    """Any dtypes come in, and all products are in that of autocast."""
    kinds = [t.detach().clone().requires_grad_() for t in (x, a.to(half), b.double().float())]
    with torch.autocast("cpu", half):
        found = lora_qkv(kinds[0], w.to(half), None, w, kinds[1], kinds[2], q_scale=2.0)
    assert (found.q.dtype, found.v.dtype) == (half, half)
    wanted = torch.nn.functional.linear(x.to(half), w.to(half))
    low = x.to(half) @ a.to(half).T
    assert torch.equal(found.v, wanted)
    assert torch.equal(found.q, wanted.addmm(low, b.to(half).T, alpha=2.0))
    (found.q.sum() + found.v.sum()).backward()
    assert [t.grad.dtype for t in kinds] == [t.dtype for t in kinds]


# --- parts of thin matrices ---


@pytest.fixture
def split(device):
    if device.type == "cpu" and not harness.interpreted():
        pytest.skip("kernels run on a GPU or interpreted")
    pytest.importorskip("triton")
    from liger_multi.backends.triton.adapters import low_rank

    return low_rank.split


@pytest.mark.parametrize(
    "order", [low_rank_reference.PARTS, low_rank_reference.LEFT, low_rank_reference.RIGHT]
)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("layout", ["rows", "columns", "gaps", "part"])
@pytest.mark.parametrize("shape", [(70, 16), (16, 1100), (5, 7), (1, 3), (3, 1), (0, 4)])
def test_parts_are_those_of_the_reference(split, device, order, axis, layout, shape):
    torch.manual_seed(0)
    wide = torch.randn(shape[0] * 2, shape[1] * 2, device=device) * 1e3
    x = {
        "rows": wide[: shape[0], : shape[1]].contiguous(),
        "columns": wide[: shape[0], : shape[1]].t().contiguous().t(),
        "gaps": wide[::2, ::2],
        "part": wide[: shape[0], shape[1] :],
    }[layout]
    made = split(x, order, axis)
    assert torch.equal(made, low_rank_reference.split(x, order, axis))
    parts = made.chunk(len(order), axis)
    if order == low_rank_reference.PARTS:
        assert torch.equal(sum(part.double() for part in parts), x.double())
