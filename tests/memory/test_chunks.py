"""What runs in chunks: fused losses over rows, and TiledMLP over tokens.

Fused losses hold one buffer of logits, survive running out of memory, and follow free memory.
TiledMLP has the results of the whole MLP and one gradient per parameter, and takes little memory.
"""

import copy
import gc
import warnings

import pytest
import torch
from torch.overrides import TorchFunctionMode

from liger_multi import nn, ops
from liger_multi.memory import measure
from liger_multi.ops import _head
from liger_multi.reference.common import chunking, retry
from liger_multi.testing.tolerance import excess
from tests import harness

# --- fused losses ---


ROWS, HIDDEN, VOCABULARY = 60, 4, 97


def inputs(rows=ROWS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype).requires_grad_()
    target = torch.randint(VOCABULARY, (rows,), generator=generator)
    return hidden, weight, target


class Full(TorchFunctionMode):
    """A device that refuses tensors of more than some rows of logits, a number of times."""

    def __init__(self, rows, times=1000):
        super().__init__()
        self.rows, self.times, self.refused, self.widest = rows, times, 0, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.new_empty and result.ndim == 2 and result.shape[1] == VOCABULARY:
            if result.shape[0] > self.rows and self.refused < self.times:
                self.refused += 1
                raise torch.OutOfMemoryError("no memory for the logits")
            self.widest = max(self.widest, result.shape[0])
        return result


@pytest.fixture
def unsaid():
    retry._warned.clear()
    yield
    retry._warned.clear()


def call(name, hidden, weight, target):
    if name == "fused_linear_cross_entropy":
        return ops.fused_linear_cross_entropy(hidden, weight, target, chunk=40)
    if name == "none":
        losses = ops.fused_linear_cross_entropy(hidden, weight, target, chunk=40, reduction="none")
        return (losses * torch.arange(1.0, ROWS + 1)).sum()
    return ops.fused_linear_log_prob(hidden, weight, target, chunk=40).log_prob.sum()


@pytest.mark.usefixtures("unsaid")
@pytest.mark.parametrize("name", ["fused_linear_cross_entropy", "none", "fused_linear_log_prob"])
def test_out_of_memory_retries_with_quarter_chunk(name):
    plain_args = inputs()
    plain = call(name, *plain_args)
    plain.backward()
    args = inputs()
    before = [t.detach().clone() for t in args]
    full = Full(10)
    with pytest.warns(RuntimeWarning, match=r"out of memory with 40 rows.*with 10 instead"), full:
        loss = call(name, *args)
    assert (full.refused, full.widest) == (1, 10)
    with full:
        loss.backward()
    torch.testing.assert_close(loss, plain)
    exact = [t.detach().double().requires_grad_() for t in plain_args[:2]]
    call(name, *exact, plain_args[2]).backward()
    for a, b in zip(args[:2], exact, strict=True):
        assert excess(a.grad, b.grad, torch.float32) <= 1
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True)), "left alone"


@pytest.mark.usefixtures("unsaid")
def test_out_of_memory_warns_once():
    with warnings.catch_warnings(record=True) as caught, Full(10) as full:
        warnings.simplefilter("always")
        for _ in range(3):
            call("fused_linear_cross_entropy", *inputs())
    assert full.refused == 3
    assert len([w for w in caught if "out of memory" in str(w.message)]) == 1


@pytest.mark.usefixtures("unsaid")
def test_second_out_of_memory_propagates():
    args = inputs()
    before = [t.detach().clone() for t in args]
    with (
        Full(9) as full,
        pytest.warns(RuntimeWarning, match="out of memory"),
        pytest.raises(torch.OutOfMemoryError, match="no memory for the logits"),
    ):
        call("fused_linear_cross_entropy", *args)
    assert full.refused == 2
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))
    loss = call("fused_linear_cross_entropy", *args)  # nothing remembers the failure
    torch.testing.assert_close(loss, call("fused_linear_cross_entropy", *inputs()))


@pytest.mark.usefixtures("unsaid")
def test_single_chunk_is_not_retried():
    hidden, weight, target = inputs(rows=4)
    with Full(2) as full, pytest.raises(torch.OutOfMemoryError):
        ops.fused_linear_cross_entropy(hidden, weight, target)
    assert full.refused == 1


@pytest.mark.usefixtures("unsaid")
def test_retry_frees_buffers_of_first_attempt():
    hidden, weight, target = inputs()
    peaks = []
    for rows in (10, 1000):
        with measure("cpu", known=[hidden, weight, target]) as peak, Full(rows):
            gc.collect()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call("fused_linear_cross_entropy", hidden, weight, target)
        peaks.append(peak.peak_bytes)
    logits = VOCABULARY * 4
    # ten rows, and the reference's temporaries of them, are alive alone
    assert peaks[0] < peaks[1] - 20 * logits


@pytest.mark.usefixtures("unsaid")
def test_memory_over_chunks_and_steps():
    hidden, weight, target = inputs()
    peaks, ends = [], []
    for _ in range(4):
        with measure("cpu", known=[hidden, weight, target]) as peak:
            ops.fused_linear_cross_entropy(hidden, weight, target, chunk=8).backward()
            hidden.grad = weight.grad = None
        peaks.append(peak.peak_bytes)
        ends.append(peak.end_bytes)
    assert len(set(peaks)) == 1
    assert ends == [sum(t.nbytes for t in (hidden, weight, target))] * 4


@pytest.mark.usefixtures("unsaid")
def test_results_independent_of_chunk_budget(monkeypatch):
    monkeypatch.setattr(chunking, "MIN_ROWS", 1)
    results, widths = [], []
    for rows in (1, 5, 16, 1000):
        hidden, weight, target = inputs()
        free = rows * VOCABULARY * 4 * chunking.FREE_SHARE
        with Full(10**9) as watch:
            token = chunking.assumed_free.set(free)
            try:
                loss = ops.fused_linear_cross_entropy(hidden, weight, target)
            finally:
                chunking.assumed_free.reset(token)
        loss.backward()
        widths.append(watch.widest)
        results.append((loss.detach(), hidden.grad, weight.grad))
    assert widths == [1, 4, 16, 32], "powers of two, two chunks at least"
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def trained(hidden, weight, target, **options):
    loss = ops.fused_linear_cross_entropy(hidden, weight, target, **options)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.usefixtures("unsaid")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lean_bounds_rows_and_sums_in_the_dtype_of_the_weight(monkeypatch, dtype):
    size, sums = dtype.itemsize, torch.float32 if dtype == torch.float16 else dtype
    monkeypatch.setattr(_head, "LEAN_BYTES", 17 * (VOCABULARY + HIDDEN) * size)  # 16 rows
    hidden, weight, target = inputs(dtype=dtype)
    target[::5] = -100  # rows that are gathered
    with Full(16) as full:
        lean = trained(hidden, weight, target, chunk="lean")
    assert (full.refused, full.widest) == (0, 16)
    right = trained(hidden, weight, target, chunk=16, accumulate=sums)
    assert all(map(torch.equal, lean, right))
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    exact = trained(*wide, target)
    assert all(excess(a, b, dtype) <= 1 for a, b in zip(lean, exact, strict=True))
    # the other losses on a head take it too
    tokens = ops.fused_linear_log_prob(hidden, weight, target, chunk="lean")
    near = ops.fused_linear_log_prob(hidden, weight, target, chunk=16)
    assert torch.equal(tokens.log_prob, near.log_prob)
    teacher = (hidden.detach() * 2, weight.detach())
    assert ops.fused_linear_jsd(hidden, weight, *teacher, target, chunk="lean") > 0


# --- TiledMLP ---


WIDTH, INNER = 8, 24


def mlp(dtype=torch.float32, dropout=0.0):
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, INNER),
        torch.nn.SiLU(),
        torch.nn.Dropout(dropout),
        torch.nn.Linear(INNER, WIDTH, bias=False),
    ).to(dtype)


def run(module, x, upstream):
    """Output, gradients of the parameters, and that of x."""
    module.zero_grad()
    x = x.detach().requires_grad_(x.requires_grad)
    y = module(x)
    y.backward(upstream)
    return [y.detach(), *[p.grad for p in module.parameters()], x.grad]


@pytest.mark.parametrize("shape", [(13, WIDTH), (2, 13, WIDTH), (2, 2, 5, WIDTH)])
@pytest.mark.parametrize("tiles", [2, 3, 5, 13, 100])
@pytest.mark.parametrize("needs_x", [True, False])
def test_tiled_mlp_results(tiles, needs_x, shape):
    """Also without a gradient of x, where parameters got none in other libraries."""
    full = mlp()
    x, upstream = torch.randn(shape).requires_grad_(needs_x), torch.randn(shape)
    expected = run(full, x, upstream)
    actual = run(nn.TiledMLP(full, tiles), x, upstream)
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert excess(a, b.double(), torch.float32) <= 1


@pytest.mark.parametrize("tiles", [1, 2, 7])
def test_hooks_of_parameters_fire_once_a_step(tiles):
    """They used to fire once per tile, and a reducer of DDP or FSDP counts them."""
    module, fired = nn.TiledMLP(mlp(), tiles), []
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda grad, name=name: fired.append(name))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    module(torch.randn(7, WIDTH)).sum().backward()
    names = [n for n, _ in module.named_parameters()]
    assert sorted(fired) == sorted(names * 2)


def test_tiled_mlp_gradients_in_low_precision():
    """Sums over tiles are in fp32: in bf16, a sum of 256 equal terms stops growing."""
    module = mlp(torch.bfloat16)
    x = torch.randn(512, WIDTH).abs().to(torch.bfloat16)
    exact = run(copy.deepcopy(module).double(), x.double(), torch.ones_like(x.double()))
    for tiles in (2, 512):
        actual = run(nn.TiledMLP(module, tiles), x, torch.ones_like(x))
        for a, b in zip(actual[1:4], exact[1:4], strict=True):
            assert excess(a, b, torch.bfloat16) <= 1, tiles


def test_tiled_mlp_calls_the_module():
    """Hooks that gather weights, and adapters, depend on that call."""
    module, lengths = mlp(), []
    module.register_forward_pre_hook(lambda m, args: lengths.append(args[0].shape[-2]))
    x = torch.randn(2, 7, WIDTH, requires_grad=True)
    nn.TiledMLP(module, 3)(x).sum().backward()
    assert lengths == [3, 3, 1] * 2


def test_tiled_mlp_inner_tensor_sizes():
    sizes, x = [], torch.randn(64, WIDTH, requires_grad=True)
    module = mlp()
    module[1].register_forward_hook(lambda m, args, out: sizes.append(out.shape[0]))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.untyped_storage().nbytes()) or t, lambda t: t
    ):
        y = nn.TiledMLP(module, 8)(x)
        y.sum().backward()
    assert set(sizes) == {8}
    assert max(saved) <= 64 * WIDTH * 4, "nothing as wide as the inner layer of all tokens"


def test_dropout_draws_the_same_numbers_twice():
    module = nn.TiledMLP(mlp(dropout=0.5), 4)
    x = torch.randn(32, WIDTH, requires_grad=True)
    torch.manual_seed(3)
    y = module(x)
    state = torch.get_rng_state()
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(torch.get_rng_state(), state), "backward leaves the generator alone"
    torch.manual_seed(3)
    again = x.detach().requires_grad_()
    parts = [module.mlp(part) for part in again.split(8)]
    assert torch.equal(torch.cat(parts), y)
    torch.testing.assert_close(torch.autograd.grad(torch.cat(parts).sum(), again)[0], dx)


def test_autocast_of_forward_holds_in_backward():
    module, dtypes = mlp(), []
    module[1].register_forward_hook(lambda m, args, out: dtypes.append(out.dtype))
    x = torch.randn(12, WIDTH, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, y = module(x), nn.TiledMLP(module, 3)(x)
    assert y.dtype == expected.dtype == torch.bfloat16
    expected_gradients = torch.autograd.grad(
        expected, [x, *module.parameters()], torch.ones_like(expected)
    )
    gradients = torch.autograd.grad(y, [x, *module.parameters()], torch.ones_like(y))
    assert dtypes == [torch.bfloat16] * 7, "once whole, and three pieces twice"
    for a, b in zip(gradients, expected_gradients, strict=True):
        assert excess(a, b.double(), torch.bfloat16) <= 1


def test_frozen_and_unused_parameters_have_no_gradient():
    module = mlp()
    module[0].weight.requires_grad_(False)
    module.register_parameter("unused", torch.nn.Parameter(torch.ones(2)))
    nn.TiledMLP(module, 3)(torch.randn(7, WIDTH)).sum().backward()
    grads = {n: p.grad is not None for n, p in module.named_parameters()}
    assert grads == {"unused": False, "0.weight": False, "0.bias": True, "3.weight": True}


def test_without_gradients_nothing_is_kept():
    module, x = nn.TiledMLP(mlp(), 3), torch.randn(7, WIDTH)
    with torch.no_grad():
        y = module(x)
    assert not y.requires_grad
    torch.testing.assert_close(y, module.mlp(x))


def test_weight_changed_between_forward_and_backward():
    module = nn.TiledMLP(mlp(), 3)
    loss = module(torch.randn(7, WIDTH)).sum()
    with torch.no_grad():
        module.mlp[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_tokens():
    x = torch.randn(2, 0, WIDTH, requires_grad=True)
    y = nn.TiledMLP(mlp(), 3)(x)
    assert y.shape == x.shape
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.shape == x.shape


def test_one_graph_under_the_compiler():
    module, x = nn.TiledMLP(mlp(), 4), torch.randn(9, WIDTH)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.slow
def test_data_parallel_processes_count_every_gradient_once(tmp_path):
    body = """
        import sys, torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        from liger_multi import nn
        rank, meeting = int(sys.argv[1]), sys.argv[2]
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
        torch.manual_seed(0)
        mlp = torch.nn.Sequential(torch.nn.Linear(8, 24), torch.nn.SiLU(), torch.nn.Linear(24, 8))
        x = torch.randn(2, 10, 8)
        mlp(x).square().mean().backward()
        wanted = [p.grad.clone() for p in mlp.parameters()]
        mlp.zero_grad()
        model = DistributedDataParallel(nn.TiledMLP(mlp, 3))
        model(x[rank]).square().mean().backward()
        from tests.comparing import assert_same_gradients
        assert_same_gradients([p.grad for p in mlp.parameters()], wanted)
        print("done")
        dist.destroy_process_group()
        """
    harness.in_two_processes(tmp_path, body)


BAD = [
    (lambda: nn.TiledMLP(3), TypeError, "mlp must be a module, got int 3"),
    (lambda: nn.TiledMLP(mlp(), 0), ValueError, "tiles must be at least 1, got 0"),
    (lambda: nn.TiledMLP(mlp())(torch.ones(8)), ValueError, r"shape \(\.\.\., S, H\)"),
    (
        lambda: nn.TiledMLP(torch.nn.Flatten(0), 2)(torch.ones(4, 8)),
        TypeError,
        r"one tensor with the leading axes of its input, got a tensor of shape \(16,\)",
    ),
]


test_bad_arguments_are_named = harness.refuses(BAD)
