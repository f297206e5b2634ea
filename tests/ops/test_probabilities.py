"""embedding and the probabilities of rows: order, padding, long runs, ties, bad ids."""

import pytest
import torch
import torch.nn.functional as F

import liger_multi
from liger_multi import nn, ops
from liger_multi.reference.embedding import embedding as reference
from liger_multi.testing.tolerance import excess
from tests import harness

LOW = [torch.float32, torch.bfloat16, torch.float16]
NAMES = ("embedding", "softmax", "sparsemax", "selective_log_softmax")


kernels = harness.interpreted_kernels(*NAMES)


def gradient(index, weight, dy, **options):
    weight = weight.detach().requires_grad_()
    return torch.autograd.grad(ops.embedding(index, weight, **options), weight, dy)[0]


# --- embedding ---


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("scale", [1.0, 7.0**0.5])
def test_reference_embedding_is_bit_exact_to_transformers(dtype, scale):
    module = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    stock = module.Gemma3TextScaledWordEmbedding(11, 16, 0, embed_scale=scale).to(dtype)
    ids = torch.randint(11, (3, 5))
    ours = nn.Embedding(11, 16, 0, scale=scale, dtype=dtype)
    ours.load_state_dict(stock.state_dict())
    assert torch.equal(ours(ids), stock(ids))


@pytest.mark.parametrize("dtype", LOW)
def test_sums_are_rounded_once(device, dtype):
    """A token that stands everywhere: adding one by one in bf16 would stop at 256."""
    index = torch.zeros(2000, dtype=torch.int64, device=device)
    weight = torch.randn(3, 8, device=device, dtype=dtype)
    grad = gradient(index, weight, torch.ones(2000, 8, device=device, dtype=dtype))
    assert (grad[0] == torch.tensor(2000.0, dtype=dtype)).all()
    assert (grad[1:] == 0).all()


@pytest.mark.parametrize("runs", [[1000], [1, 62, 64, 65, 128, 700], [63, 1, 200, 3, 130, 257]])
def test_runs_of_one_id_of_every_length(device, runs):
    """Heads, whole windows and tails of runs, in any place of the sorted ids."""
    index = torch.cat([torch.full((n,), 2 * v) for v, n in enumerate(runs)])
    index = index[torch.randperm(len(index))].to(device)
    weight, dy = torch.randn(2 * len(runs), 20, device=device), torch.randn(len(index), 20)
    right = torch.zeros(2 * len(runs), 20, dtype=torch.float64)
    right.index_add_(0, index.cpu(), dy.double())
    assert excess(gradient(index, weight, dy.to(device)).cpu(), right, torch.float32) <= 1


@pytest.fixture
def several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_the_same_bits_every_time(device, several_threads):
    index = torch.randint(7, (3000,), device=device)
    weight, dy = torch.randn(7, 33, device=device), torch.randn(3000, 33, device=device)
    first = gradient(index, weight, dy)
    assert all(torch.equal(first, gradient(index, weight, dy)) for _ in range(20))


def test_ids_that_reach_no_row(device, monkeypatch):
    weight = torch.randn(5, 8, device=device)
    index = torch.tensor([0, 5, -1, 4, 2**40], device=device)
    with pytest.raises(IndexError, match="index 5 at row 1 is out of range"):
        ops.embedding(index, weight, validate=True)
    if device.type == "cpu":
        with pytest.raises(IndexError, match="index 5 at row 1 is out of range"):
            ops.embedding(index, weight)
        if not harness.interpreted():
            return
        from liger_multi.backends.triton.embedding import embedding

        monkeypatch.setattr(embedding, "check_targets", lambda *_: None)
    y = ops.embedding(index, weight)
    assert y.isnan().all(-1).tolist() == [False, True, True, False, True]
    actual = gradient(index, weight, torch.ones(5, 8, device=device))
    assert actual[:, 0].tolist() == [1.0, 0.0, 0.0, 0.0, 1.0]


def test_the_modules_refuse_what_the_operator_has_not():
    for option in ({"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}):
        with pytest.raises(ValueError, match=f"does not support {next(iter(option))}"):
            nn.Embedding(4, 8, **option)
    assert reference.rounded(7.0**0.5, torch.bfloat16) == 2.640625


def test_past_two_to_the_31_elements(device):
    """Offsets into the table and into the result need 64 bits."""
    harness.needs_memory(device, 24)
    classes, width = 2**31 // 4096 + 100, 4096
    weight = torch.zeros(classes, width, device=device, dtype=torch.bfloat16)
    weight[-1] = torch.arange(width, device=device) % 100
    index = torch.full((2**31 // 4096 + 100,), classes - 1, device=device)
    index[0] = 0
    assert torch.equal(ops.embedding(index, weight)[-1], weight[-1])
    grad = gradient(index[:3], weight, torch.ones(3, width, device=device, dtype=torch.bfloat16))
    assert (grad[-1] == 2).all()
    assert float(grad.sum(dtype=torch.float32)) == 3 * width


# --- probabilities of rows ---


@pytest.mark.parametrize("dtype", LOW)
def test_reference_softmax_is_bit_exact_to_torch(dtype):
    x = torch.randn(5, 40).to(dtype)
    with liger_multi.use(softmax="reference"):
        y = ops.softmax(x)
    assert torch.equal(y, F.softmax(x, -1))
    assert torch.equal(y, F.softmax(x, -1, dtype=torch.float32).to(dtype))


@pytest.mark.parametrize("cols", [50, 40000])
def test_softmax_of_extremes(device, cols):
    """A maximum far from the first columns, and masked classes."""
    x = torch.randn(3, cols, device=device)
    x[0, -1], x[1, : cols // 2], x[2, ::2] = 1e4, float("-inf"), float("-inf")
    assert excess(ops.softmax(x), torch.softmax(x.double(), -1), torch.float32) <= 1


@pytest.mark.parametrize("cols", [50, 40000])
def test_sparsemax_of_extremes(device, cols):
    """One winner, equal values, and values far below: a projection on the simplex each time."""
    x = torch.randn(4, cols, device=device)
    x[0, 7], x[1], x[2, ::2] = 1e4, 3.0, float("-inf")
    x[3] = -torch.arange(cols, device=device) * 1e-3
    x.requires_grad_()
    y = ops.sparsemax(x)
    torch.testing.assert_close(y.sum(-1), torch.ones(4, device=device), rtol=1e-4, atol=0)
    assert (y[0] > 0).sum() == 1
    torch.testing.assert_close(y[1], torch.full_like(y[1], 1 / cols), rtol=1e-2, atol=0)
    assert (y[2, ::2] == 0).all()
    (dx,) = torch.autograd.grad(y, x, torch.randn(4, cols, device=device))
    assert ((dx != 0) <= (y > 0)).all()
    torch.testing.assert_close(dx.sum(-1), torch.zeros(4, device=device), rtol=0, atol=1e-2)


def test_sparsemax_leaves_out_what_is_at_the_threshold(device):
    """Such an element's y is 0; a gradient that passed there would be that of another support."""
    x = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.25, -0.125], [0.0, -0.25, -0.25]], device=device)
    x.requires_grad_()
    y = ops.sparsemax(x)
    (dx,) = torch.autograd.grad(y, x, torch.tensor([1.0, 2.0, 4.0], device=device).expand(3, 3))
    assert y.tolist() == [[1, 0, 0], [0.625, 0.375, 0], [0.5, 0.25, 0.25]]
    right = torch.tensor([[0, 0, 0], [-0.5, 0.5, 0], [-4 / 3, -1 / 3, 5 / 3]], device=device)
    torch.testing.assert_close(dx, right)


def test_selective_log_softmax_is_that_of_trainers(device):
    logits, index = torch.randn(2, 5, 40, device=device), torch.randint(40, (2, 5), device=device)
    right = torch.log_softmax(logits, -1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(ops.selective_log_softmax(logits, index), right)
    low = ops.selective_log_softmax(logits.bfloat16(), index)
    assert low.dtype == torch.float32
    exact = torch.log_softmax(logits.bfloat16().double(), -1)
    exact = exact.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    assert excess(low, exact, torch.float32) <= 1


def test_selective_log_softmax_of_ids_that_reach_no_class(device, monkeypatch):
    logits = torch.randn(3, 8, device=device, requires_grad=True)
    index = torch.tensor([[0, 8], [-100, 3], [-2, 2**40]], device=device)
    with pytest.raises(IndexError, match="index 8 at row 0 is out of range"):
        ops.selective_log_softmax(logits, index, validate=True)
    if device.type == "cpu":
        from liger_multi.reference.cross_entropy import selective_log_softmax as reference

        monkeypatch.setattr(reference, "check_targets", lambda *_: None)
        if harness.interpreted():
            from liger_multi.backends.triton.cross_entropy import selective_log_softmax

            monkeypatch.setattr(selective_log_softmax, "check_targets", lambda *_: None)
    actual = ops.selective_log_softmax(logits, index)
    assert actual.isnan().tolist() == [[False, True], [False, False], [True, True]]
    assert actual[1, 0] == 0
    up = torch.tensor([[1.0, float("nan")], [float("inf"), 1.0], [1.0, 1.0]], device=device)
    (grad,) = torch.autograd.grad(actual, logits, up)
    assert (grad[2] == 0).all()
    wide = logits.detach().double().requires_grad_()
    log_p = torch.log_softmax(wide, -1)
    (right,) = torch.autograd.grad(log_p[0, 0] + log_p[1, 3], wide)
    assert excess(grad, right, torch.float32) <= 1


# --- bad input ---

X, W = torch.randn(4, 8), torch.randn(9, 8)
IDS = torch.tensor([0, 1, 2, 3])
BAD = [
    (lambda: ops.embedding(IDS.float(), W), TypeError, "index must be a tensor of integer"),
    (lambda: ops.embedding([0], W), TypeError, "got list"),
    (lambda: ops.embedding(IDS, W[0]), ValueError, r"weight must have shape \(V, H\)"),
    (lambda: ops.embedding(IDS, W, 9), ValueError, "one of the 9 rows of weight, got 9"),
    (lambda: ops.embedding(IDS, W, scale="2"), TypeError, "scale must be a number"),
    (lambda: ops.embedding(IDS + 8, W), IndexError, "index 9 at row 1"),
    (lambda: ops.softmax(X, 2), ValueError, "dim must name an axis of x, got 2"),
    (lambda: ops.softmax(X.long()), TypeError, "x must be a floating-point tensor"),
    (lambda: ops.sparsemax(X[:, :0]), ValueError, "axis -1 of x has no elements"),
    (lambda: ops.softmax(torch.tensor(1.0)), ValueError, "dim must name an axis"),
    (lambda: ops.selective_log_softmax(X, IDS[:3]), ValueError, r"index must have shape \(4,\)"),
    (lambda: ops.selective_log_softmax(X, IDS * 4), IndexError, "index 8 at row 2"),
    (lambda: ops.selective_log_softmax(X, IDS, temperature=0), ValueError, "must be above 0"),
]


test_bad_input_is_named = harness.refuses(BAD)
