"""Scans of Mamba beyond the common suite: extremes, packing, transformers' own."""

import functools
import inspect
import itertools

import pytest
import torch
from test_gated_delta_rule import near, trained

from liger_multi import ops
from liger_multi.testing import FORMULAS, samples

FINAL = {"output_final_state": True}


def normal(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


def heads(length, batch=1, groups=2, state=True, seed=0):
    """Tensors of ssd_scan: 4 heads of 6, states of 8."""
    draw = normal(seed)
    tensors = {
        "x": draw(batch, length, 4, 6),
        "dt": draw(batch, length, 4),
        "A": -draw(4).abs(),
        "B": draw(batch, length, groups, 8),
        "C": draw(batch, length, groups, 8),
        "D": draw(4),
        "z": draw(batch, length, 4, 6),
        "dt_bias": draw(4),
    }
    return tensors | ({"initial_state": draw(batch, 4, 6, 8)} if state else {})


def channels(length, batch=1, state=True, seed=0):
    """Tensors of selective_scan: 6 channels, states of 4."""
    draw = normal(seed)
    tensors = {
        "u": draw(batch, length, 6),
        "delta": draw(batch, length, 6),
        "A": -draw(6, 4).abs(),
        "B": draw(batch, length, 4),
        "C": draw(batch, length, 4),
        "D": draw(6),
        "z": draw(batch, length, 6),
        "delta_bias": draw(6),
    }
    return tensors | ({"initial_state": draw(batch, 6, 4)} if state else {})


SCANS = {
    "ssd_scan": (heads, {"dt_softplus": True}),
    "selective_scan": (channels, {"delta_softplus": True}),
}
PARAMETERS = {"A", "D", "dt_bias", "delta_bias"}
OPERATORS = pytest.mark.parametrize("op", SCANS)


def scan(op):
    """The operator, its formula, what makes its tensors, and its options."""
    build, options = SCANS[op]
    return functools.partial(samples.call, op), FORMULAS[op], build, options


def steps(tensors):
    return tensors["dt" if "dt" in tensors else "delta"]


# --- extremes, against the recurrence ---


def of_steps(value):
    def change(tensors):
        steps(tensors).fill_(value)

    return change


def of(name, value):
    def change(tensors):
        tensors[name].fill_(value)

    return change


def one_gap(tensors):
    steps(tensors)[:, 70] = 1e3


EXTREMES = {
    "no decay": of("A", 0.0),
    "decays of 16": of("A", -16.0),
    "decays of 1000": of("A", -1e3),
    "steps of almost 0": of_steps(-40.0),
    "steps of 50": of_steps(50.0),
    "one step of 1000": one_gap,
    "B of 0": of("B", 0.0),
    "C of 0": of("C", 0.0),
    "gates of -200": of("z", -200.0),
    "gates of 200": of("z", 200.0),
}


@OPERATORS
@pytest.mark.parametrize("change", EXTREMES.values(), ids=EXTREMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_extremes_equal_the_recurrence(op, change, dtype):
    run, formula, build, options = scan(op)
    tensors = build(130)
    change(tensors)
    right = trained(formula, tensors, **options, **FINAL)
    narrow = {n: t.to(dtype) for n, t in tensors.items()}
    actual = trained(run, narrow, **options, **FINAL)
    for got, expected in zip(actual, right, strict=True):
        assert got.isfinite().all()
        error = (got.double() - expected).abs().max() / expected.abs().max().clamp(min=1.0)
        assert error < (1e-10 if dtype == torch.float64 else 1e-4)


@OPERATORS
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200])
def test_lengths(op, length):
    run, formula, build, options = scan(op)
    tensors = build(length, batch=2)
    near(trained(run, tensors, **options, **FINAL), trained(formula, tensors, **options, **FINAL))


@OPERATORS
def test_a_large_initial_state(op):
    run, formula, build, options = scan(op)
    tensors = build(200)
    tensors["initial_state"] *= 100
    near(trained(run, tensors, **options, **FINAL), trained(formula, tensors, **options, **FINAL))


@pytest.mark.parametrize("strength", [0.01, 16.0])
def test_the_gradient_of_a_decay_rate(strength):
    """A sum over tokens, of which differences of sums lose digits in fp32."""
    tensors = {n: t.float().double() for n, t in heads(300).items()}
    tensors["A"] *= strength
    rates = [
        trained(ops.ssd_scan, {n: t.to(dtype) for n, t in tensors.items()}, dt_softplus=True)[3]
        for dtype in (torch.float64, torch.float32)
    ]
    assert (rates[1] - rates[0]).abs().max() < 2e-6 * rates[0].abs().max()


@OPERATORS
@pytest.mark.parametrize("length", [8192, pytest.param(32768, marks=pytest.mark.slow)])
def test_long_sequences(op, length):
    run, formula, build, options = scan(op)
    tensors = build(length)
    steps(tensors).sub_(3)
    tensors["A"] -= 0.1  # errors are those of sums over the tokens that a state remembers
    with torch.no_grad():
        right = formula(**tensors, **options, **FINAL)
        near(run(**tensors, **options, **FINAL), right)
    wide = trained(run, tensors, **options, **FINAL)
    narrow = trained(run, {n: t.float() for n, t in tensors.items()}, **options, **FINAL)
    for got, expected in zip(narrow, wide, strict=True):
        assert ((got - expected).norm() / expected.norm()) < 1e-5


def test_limits_of_steps():
    """Outside of the limits a step has no gradient."""
    tensors = {n: t.requires_grad_() for n, t in heads(40).items()}
    y = ops.ssd_scan(**tensors, dt_softplus=True, dt_limit=(0.5, 1.0))
    (actual,) = torch.autograd.grad(y.sum(), tensors["dt"])
    size = torch.nn.functional.softplus(tensors["dt"] + tensors["dt_bias"])
    assert torch.equal(actual == 0, (size < 0.5) | (size > 1.0))


# --- packing ---

LENGTHS = (1, 2, 63, 1, 64, 65, 3)


@OPERATORS
@pytest.mark.parametrize(
    "lengths",
    [
        LENGTHS,
        (1, 1, 1),
        (0, 5, 0, 0, 9, 0),
        (64, 64),
        (200,),
        (4, 60, 64, 1),
        pytest.param((4096, 1, 63, 4096), marks=pytest.mark.slow),
    ],
)
def test_packed_equals_separate(op, lengths):
    run, _, build, options = scan(op)
    tensors = build(sum(lengths), state=False)
    ends = list(itertools.accumulate(lengths))
    table = torch.tensor([0, *ends], dtype=torch.int32)
    actual = trained(run, tensors, cu_seqlens=table, **options)
    up = normal_like(actual[0])
    sums = {n: torch.zeros_like(t) for n, t in tensors.items() if n in PARAMETERS}
    for start, end in zip([0, *ends], ends, strict=False):
        if start == end:
            continue
        leaves = {
            n: (t if n in PARAMETERS else t[:, start:end]).clone().requires_grad_()
            for n, t in tensors.items()
        }
        y = run(**leaves, **options)
        alone = torch.autograd.grad(y, list(leaves.values()), up[:, start:end])
        torch.testing.assert_close(actual[0][:, start:end], y, rtol=1e-9, atol=1e-10)
        for name, got, expected in zip(tensors, actual[1:], alone, strict=True):
            if name in PARAMETERS:
                sums[name] += expected
            else:
                torch.testing.assert_close(got[:, start:end], expected, rtol=1e-9, atol=1e-10)
    for name, got in zip(tensors, actual[1:], strict=True):
        if name in PARAMETERS:
            torch.testing.assert_close(got, sums[name], rtol=1e-9, atol=1e-9)


@OPERATORS
def test_strong_decays_of_one_sequence_beside_weak_ones(op):
    """The sums of decays of two sequences in a chunk differ by more than an exponential holds."""
    run, _, build, options = scan(op)
    tensors = {n: t.float() for n, t in build(100, state=False).items()}
    tensors["A"] = torch.full_like(tensors["A"], -1.0)
    name = "dt" if "dt" in tensors else "delta"
    tensors[name] = torch.full_like(tensors[name], 0.1)
    tensors[name][:, :17] = 40.0
    ids = torch.arange(3, dtype=torch.int32).repeat_interleave(torch.tensor([17, 13, 70]))[None]
    actual = trained(run, tensors, seq_idx=ids, **options)
    wide = {n: t.double() for n, t in tensors.items()}
    near(actual, trained(run, wide, seq_idx=ids, **options), torch.float32)


def normal_like(y):
    """The upstream gradient that ``trained`` draws for a single output."""
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@OPERATORS
def test_two_calls_that_hand_over_the_state_are_one(op):
    run, _, build, options = scan(op)
    tensors = build(170)

    def parts(initial_state, **rest):
        before, after = (
            {n: t if n in PARAMETERS else t[:, part] for n, t in rest.items()}
            for part in (slice(0, 77), slice(77, None))
        )
        y, state = run(**before, initial_state=initial_state, **options, **FINAL)
        more, state = run(**after, initial_state=state, **options, **FINAL)
        return torch.cat([y, more], 1), state

    near(trained(parts, tensors), trained(run, tensors, **options, **FINAL))


# --- transformers, and what callers may rely on ---


def stock_heads(x, dt, A, B, C, *, initial_state, D, dt_bias, z, dt_softplus, **final):
    """mamba2_chunk_scan; the gate is the caller's, and step sizes of fp64 lose nothing."""
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    if not hasattr(modeling, "mamba2_chunk_scan"):
        pytest.skip("this transformers has no function for it")
    y, state = inspect.unwrap(modeling.mamba2_chunk_scan)(
        x,
        dt,
        A,
        B,
        C,
        chunk_size=16,
        D=D,
        dt_bias=dt_bias,
        initial_states=initial_state,
        dt_softplus=dt_softplus,
        return_final_states=True,
    )
    return y * torch.nn.functional.silu(z), state


def stock_channels(u, delta, A, B, C, *, D, z, delta_bias, delta_softplus, **final):
    modeling = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    if not hasattr(modeling, "mamba_selective_scan"):
        pytest.skip("this transformers has no function for it")
    y, state = inspect.unwrap(modeling.mamba_selective_scan)(
        u.mT,
        delta.mT,
        A,
        B.mT,
        C.mT,
        D=D,
        z=z.mT,
        delta_bias=delta_bias,
        delta_softplus=delta_softplus,
        return_last_state=True,
    )
    return y.mT, state


@pytest.mark.parametrize("length", [1, 15, 16, 65])
@OPERATORS
def test_equals_transformers(op, length):
    run, _, build, options = scan(op)
    stock = {"ssd_scan": stock_heads, "selective_scan": stock_channels}[op]
    tensors = build(length, batch=2, state=op == "ssd_scan")
    tensors = {n: t.float() for n, t in tensors.items()}
    right = trained(stock, tensors, **options, **FINAL)
    for got, expected in zip(trained(run, tensors, **options, **FINAL), right, strict=True):
        torch.testing.assert_close(
            got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
        )


def test_bf16_is_as_exact_as_transformers():
    """Compared with transformers' fp32 results, rounded to bf16."""
    tensors = {n: t for n, t in heads(300).items() if n not in ("z", "initial_state")}
    tensors = {n: t.bfloat16() for n, t in tensors.items()}
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    if not hasattr(modeling, "mamba2_chunk_scan"):
        pytest.skip("this transformers has no function for it")
    stock = inspect.unwrap(modeling.mamba2_chunk_scan)

    def other(**kwargs):
        return stock(**{names.get(n, n): t for n, t in kwargs.items()}, chunk_size=64).bfloat16()

    names, soft = {"x": "hidden_states"}, {"dt_softplus": True}
    wide = {n: t.double() for n, t in tensors.items()}
    right = trained(FORMULAS["ssd_scan"], wide, **soft)
    ours, theirs = (trained(f, tensors, **soft) for f in (ops.ssd_scan, other))
    for name, a, b, expected in zip(["y", *tensors], ours, theirs, right, strict=True):
        if name not in PARAMETERS:  # of four numbers, errors are those of their last rounding
            errors = [(x - expected).norm() / expected.norm() for x in (a, b)]
            assert errors[0] < 1.05 * errors[1]


@OPERATORS
def test_spans_and_blocks_change_nothing(op, monkeypatch):
    """Blocks of one head or channel, and the shortest spans."""
    from liger_multi.reference.linear_attention import selective_scan, ssd_scan

    run, _, build, options = scan(op)
    tensors = build(600, batch=2)
    whole = trained(run, tensors, **options, **FINAL)
    for module in (selective_scan, ssd_scan):
        monkeypatch.setattr(module, "BLOCK_BYTES", 1)
    near(trained(run, tensors, **options, **FINAL), whole)


def test_states_kept_for_backward(monkeypatch):
    """They are the last states of shorter sequences; one span keeps none."""
    from liger_multi.reference.linear_attention import selective_scan

    monkeypatch.setattr(selective_scan, "SPAN", 8)
    tensors = channels(20, batch=2)
    rows = ("u", "delta", "B", "C", "z")

    def run(tokens):
        inputs = {n: t[:, :tokens] if n in rows else t for n, t in tensors.items()}
        return selective_scan.forward(
            **inputs, first=None, delta_softplus=True, output_final_state=True
        )

    _, _, states = run(20)
    assert states.shape == (2, 3, 4, 6)
    assert run(8)[2].numel() == 0
    near([states[:, 0].mT], [tensors["initial_state"]])
    for span in (1, 2):
        near([states[:, span].mT], [run(8 * span)[1]])


X, N = torch.ones(1, 4, 2, 8), torch.ones(1, 4, 1, 3)
T, A = torch.ones(1, 4, 2), -torch.ones(2)
WRONG = {
    "axes": ((X[0], T, A, N, N), {}, ValueError, "x must have four axes"),
    "groups": ((X, T, A, N.expand(1, 4, 3, 3), N.expand(1, 4, 3, 3)), {}, ValueError, "multiple"),
    "pairs": ((X, T, A, N, N[..., :2]), {}, ValueError, "B and C must have the same shape"),
    "steps": ((X, T[:, :3], A, N, N), {}, ValueError, r"dt must have shape \(1, 4, 2\)"),
    "skip": ((X, T, A, N, N), {"D": torch.ones(3)}, ValueError, "D must have shape"),
    "state": ((X, T, A, N, N), {"initial_state": X}, ValueError, "initial_state must have shape"),
    "limit": ((X, T, A, N, N), {"dt_limit": 1.0}, TypeError, "dt_limit must be two numbers"),
    "empty": ((X, T, A, N, N), {"dt_limit": (2.0, 1.0)}, ValueError, r"dt_limit\[1\]"),
    "chunk": ((X, T, A, N, N), {"chunk": 0}, ValueError, "chunk must be at least 1"),
    "flag": ((X, T, A, N, N), {"dt_softplus": 1}, TypeError, "dt_softplus must be True or False"),
    "integers": ((X, T.int(), A, N, N), {}, TypeError, "dt must be a floating-point tensor"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    arguments, options, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        ops.ssd_scan(*arguments, **options)


U, E = torch.ones(1, 4, 2), torch.ones(1, 4, 3)
WRONG_CHANNELS = {
    "axes": ((U[0], U, E[0, :2], E, E), {}, ValueError, "u must have three axes"),
    "decays": ((U, U, E[0], E, E), {}, ValueError, r"A must have shape \(2, N\)"),
    "pairs": ((U, U, E[0, :2], E[:, :3], E), {}, ValueError, r"B must have shape \(1, 4, 3\)"),
    "gate": ((U, U, E[0, :2], E, E), {"z": E}, ValueError, r"z must have shape \(1, 4, 2\)"),
}


@pytest.mark.parametrize("name", WRONG_CHANNELS)
def test_wrong_arguments_of_channels(name):
    arguments, options, error, text = WRONG_CHANNELS[name]
    with pytest.raises(error, match=text):
        ops.selective_scan(*arguments, **options)


@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100"])
def test_kernels_take_heads_in_pieces_whose_states_fit_on_chip(arch, monkeypatch):
    """Falcon-H1-34B has heads of 128 and states of 256."""
    pytest.importorskip("triton")
    from ci.static import TARGETS
    from liger_multi.backends.triton.linear_attention import ssd_scan as kernels

    monkeypatch.setattr(kernels, "INTERPRETED", False)
    monkeypatch.setattr(kernels, "device_info", lambda device: TARGETS[arch].info)

    def refusal(value, size):
        x, states = torch.empty(1, 8, 2, value), torch.empty(1, 8, 1, size)
        return kernels.supports(*(t.bfloat16() for t in (x, states, states)))

    assert refusal(128, 128) is None
    assert refusal(192, 128) is None, "in two pieces of each head"
    assert "if V is a multiple of 2, got 129 and 128" in refusal(129, 128)
    if arch != "sm80":
        assert refusal(64, 256) is None
        assert refusal(128, 256) is None
        assert "got 136 and 256 (in 4 pieces of each head)" in refusal(136, 256)
