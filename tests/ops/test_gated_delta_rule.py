"""The gated delta rule beyond the common suite: extremes, packing, transformers' own."""

import functools
import inspect
import itertools

import pytest
import torch

from liger_multi import ops
from liger_multi.dispatch import launch
from liger_multi.dispatch.backend import DeviceInfo
from liger_multi.testing import FORMULAS, samples
from liger_multi.testing.tolerance import excess

NAMES = ("q", "k", "v", "g", "beta", "initial_state")
FINAL, NORMED = {"output_final_state": True}, {"qk_l2norm": True}
rule = functools.partial(samples.call, "gated_delta_rule")


def make_inputs(
    length,
    batch=1,
    heads=1,
    group=1,
    size=8,
    value=6,
    seed=0,
    state=True,
    channels=False,
    **options,
):
    """Random tensors, with a gate for every channel if asked to."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    many = heads * group
    tensors = [normal(batch, length, heads, size) for _ in range(2)]
    gates = (batch, length, many, size) if channels else (batch, length, many)
    tensors += [normal(batch, length, many, value), -normal(*gates).abs()]
    tensors += [torch.sigmoid(normal(batch, length, many))]
    tensors += [normal(batch, many, size, value)] if state else []
    tensors = [x.to(**options) for x in tensors]
    return dict(zip(NAMES, tensors, strict=False))


def trained(run, tensors, seed=1, **options):
    """Outputs and gradients of a call."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in tensors.items()}
    actual = run(**leaves, **options)
    outs = actual if isinstance(actual, tuple) else (actual,)
    generator = torch.Generator().manual_seed(seed)
    ups = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in outs]
    return (*[y.detach() for y in outs], *torch.autograd.grad(outs, list(leaves.values()), ups))


def near(actual, right, dtype=torch.float64):
    assert len(actual) == len(right)
    for got, expected in zip(actual, right, strict=True):
        assert excess(got, expected, dtype) <= 1


# --- extremes, against the recurrence ---


def filled(name, value):
    def change(tensors):
        tensors[name].fill_(value)

    return change


def repeated(tensors):
    tensors["k"][:] = tensors["k"][:, :1]


def one_gap(tensors):
    tensors["g"][:, 70] = -1e3


EXTREMES = {
    "gates of 0": filled("g", 0.0),
    "gates of -50": filled("g", -50.0),
    "gates of -1000": filled("g", -1e3),
    "one gate of -1000": one_gap,
    "beta 0": filled("beta", 0.0),
    "beta 1": filled("beta", 1.0),
    "beta 2": filled("beta", 2.0),
    "zero keys": filled("k", 0.0),
    "zero queries": filled("q", 0.0),
    "repeated keys": repeated,
}


@pytest.mark.parametrize("change", EXTREMES.values(), ids=EXTREMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_extremes_equal_the_recurrence(change, dtype):
    tensors = make_inputs(130, group=2)
    change(tensors)
    right = trained(FORMULAS["gated_delta_rule"], tensors, **FINAL, **NORMED)
    narrow = {n: t.to(dtype) for n, t in tensors.items()}
    actual = trained(rule, narrow, **FINAL, **NORMED)
    for got, expected in zip(actual, right, strict=True):
        assert got.isfinite().all()
        error = (got.double() - expected).abs().max() / expected.abs().max().clamp(min=1.0)
        assert error < (1e-10 if dtype == torch.float64 else 1e-4)


def test_a_large_initial_state():
    tensors = make_inputs(200)
    tensors["initial_state"] *= 100
    right = trained(FORMULAS["gated_delta_rule"], tensors, **FINAL, **NORMED)
    near(trained(rule, tensors, **FINAL, **NORMED), right)


@pytest.mark.parametrize("length", [8192, pytest.param(32768, marks=pytest.mark.slow)])
def test_long_sequences(length):
    """The recurrence runs in fp64 without autograd; fp32 is compared with fp64."""
    tensors = make_inputs(length, size=16, value=16)
    tensors["g"] *= 0.1
    with torch.no_grad():
        right = FORMULAS["gated_delta_rule"](**tensors, **FINAL, **NORMED)
        near(rule(**tensors, **FINAL, **NORMED), right)
    wide = trained(rule, tensors, **FINAL, **NORMED)
    narrow = {n: t.float() for n, t in tensors.items()}
    for got, expected in zip(trained(rule, narrow, **FINAL, **NORMED), wide, strict=True):
        assert ((got - expected).norm() / expected.norm()) < 1e-5


# --- packing ---

LENGTHS = (1, 2, 63, 1, 64, 65, 3)


def packed_equals_separate(lengths, sizes):
    total = sum(lengths)
    tensors = make_inputs(total, state=False, **sizes)
    ends = list(itertools.accumulate(lengths))
    table = torch.tensor([0, *ends], dtype=torch.int32)
    actual = trained(ops.gated_delta_rule, tensors, cu_seqlens=table, **NORMED)
    generator = torch.Generator().manual_seed(1)
    up = torch.randn(actual[0].shape, generator=generator, dtype=torch.float64)
    for start, end in zip([0, *ends], ends, strict=False):
        if start == end:
            continue
        leaves = {n: t[:, start:end].clone().requires_grad_() for n, t in tensors.items()}
        y = ops.gated_delta_rule(**leaves, **NORMED)
        alone = (y, *torch.autograd.grad(y, list(leaves.values()), up[:, start:end]))
        for got, expected in zip(actual, alone, strict=True):
            torch.testing.assert_close(got[:, start:end], expected, rtol=1e-9, atol=1e-10)
        assert actual[4][:, start].abs().max() < 1e-12  # the first gate decays nothing


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
def test_packed_equals_separate(lengths):
    packed_equals_separate(lengths, {"heads": 2, "group": 2})


@pytest.mark.parametrize("op", ["gated_delta_rule", "kimi_delta_attention"])
def test_strong_gates_of_one_document_beside_weak_ones(op):
    """The sums of gates of two documents in a chunk differ by more than an exponential holds."""
    lengths, tensors = (17, 13, 70), make_inputs(100, state=False)
    tensors = {n: t.float() for n, t in tensors.items()}
    tensors["g"][:, :17] = -40.0
    if op == "kimi_delta_attention":
        tensors["g"] = tensors["g"].unsqueeze(-1).expand(*tensors["g"].shape, tensors["k"].shape[3])
    ids = torch.arange(3, dtype=torch.int32).repeat_interleave(torch.tensor(lengths))[None]
    actual = trained(getattr(ops, op), tensors, documents=ids, **NORMED)
    wide = {n: t.double() for n, t in tensors.items()}
    near(actual, trained(getattr(ops, op), wide, documents=ids, **NORMED), torch.float32)


def test_documents_are_runs_of_ids():
    """Equal ids apart are different documents; with the table of lengths it is the same."""
    tensors = make_inputs(150, state=False)
    ids = torch.tensor([[4] * 70 + [9] * 20 + [4] * 60])
    table = torch.tensor([0, 70, 90, 150])
    actual = ops.gated_delta_rule(**tensors, documents=ids)
    assert torch.equal(actual, ops.gated_delta_rule(**tensors, cu_seqlens=table))
    alone = ops.gated_delta_rule(**{n: t[:, 90:] for n, t in tensors.items()})
    torch.testing.assert_close(actual[:, 90:], alone)


def test_what_follows_the_last_document_is_one_more():
    tensors = make_inputs(40, state=False)
    actual = ops.gated_delta_rule(**tensors, cu_seqlens=torch.tensor([0, 25]))
    alone = ops.gated_delta_rule(**{n: t[:, 25:] for n, t in tensors.items()})
    torch.testing.assert_close(actual[:, 25:], alone)


def test_two_calls_that_hand_over_the_state_are_one():
    tensors = make_inputs(170, group=3)

    def parts(initial_state, **rest):
        y, state = rule(
            **{n: t[:, :77] for n, t in rest.items()}, initial_state=initial_state, **FINAL
        )
        more, state = rule(**{n: t[:, 77:] for n, t in rest.items()}, initial_state=state, **FINAL)
        return torch.cat([y, more], 1), state

    near(trained(parts, tensors), trained(rule, tensors, **FINAL))


# --- transformers, and what callers may rely on ---


def fallback(q, k, v, **options):
    """The function of transformers; some versions pass it repeated heads."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    run = inspect.unwrap(modeling.torch_chunk_gated_delta_rule)
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    options["use_qk_l2norm_in_kernel"] = options.pop("qk_l2norm", False)
    y, state = run(q, k, v, **options)
    return (y, state) if options.get("output_final_state") else y


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_equals_transformers(length):
    tensors = make_inputs(length, heads=2, group=2, size=16, dtype=torch.float32)
    right = trained(fallback, tensors, **FINAL, **NORMED)
    for got, expected in zip(trained(rule, tensors, **FINAL, **NORMED), right, strict=True):
        torch.testing.assert_close(
            got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
        )


def test_bf16_is_as_exact_as_transformers():
    tensors = make_inputs(300, heads=2, group=2, size=32, value=32, state=False)
    tensors = {n: t.bfloat16() for n, t in tensors.items()}
    tensors["g"] = tensors["g"].float()
    wide = {n: t.double() for n, t in tensors.items()}
    right = trained(FORMULAS["gated_delta_rule"], wide, **NORMED)
    ours, other = (trained(f, tensors, **NORMED) for f in (ops.gated_delta_rule, fallback))
    for a, b, expected in zip(ours, other, right, strict=True):
        errors = [(x - expected).norm() / expected.norm() for x in (a, b)]
        assert errors[0] < 1.05 * errors[1] + 1e-4


def test_spans_and_blocks_change_nothing(monkeypatch):
    """Blocks of one head and sequence, and spans of 8 chunks."""
    from liger_multi.reference.linear_attention import chunks

    tensors = make_inputs(1100, batch=2, heads=2, group=2)
    whole = trained(rule, tensors, **FINAL, **NORMED)
    monkeypatch.setattr(chunks, "BLOCK_BYTES", 1)
    near(trained(rule, tensors, **FINAL, **NORMED), whole)


Q = torch.ones(1, 4, 2, 8)
G = torch.zeros(1, 4, 2)
WRONG = {
    "four axes": ((Q[0], Q, Q, G, G), {}, ValueError, "q must have four axes"),
    "dtypes": ((Q, Q.double(), Q, G, G), {}, TypeError, "q is torch.float32, got k"),
    "integers": ((Q, Q, Q, G.int(), G), {}, TypeError, "g must be a floating-point tensor"),
    "heads": ((Q, Q, Q[:, :, :1], G, G), {}, ValueError, "HV a multiple"),
    "keys": ((Q, Q[..., :4], Q, G, G), {}, ValueError, "q and k must have the same shape"),
    "gates": ((Q, Q, Q, G[:, :3], G), {}, ValueError, r"g must have shape \(1, 4, 2\)"),
    "state": ((Q, Q, Q, G, G), {"initial_state": Q[:, :2]}, ValueError, "initial_state must have"),
    "scale": ((Q, Q, Q, G, G), {"scale": "1"}, TypeError, "scale"),
    "flag": ((Q, Q, Q, G, G), {"qk_l2norm": 1}, TypeError, "qk_l2norm must be True or False"),
    "batch": (
        (Q.expand(2, 4, 2, 8),) * 3 + (G.expand(2, 4, 2),) * 2,
        {"cu_seqlens": torch.tensor([0, 4])},
        ValueError,
        "for a batch of one",
    ),
    "both": (
        (Q, Q, Q, G, G),
        {"cu_seqlens": torch.tensor([0, 4]), "documents": G[..., 0].int()},
        ValueError,
        "in place of documents",
    ),
    "table": ((Q, Q, Q, G, G), {"cu_seqlens": torch.ones(2)}, TypeError, "int64 or int32"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    arguments, options, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        ops.gated_delta_rule(*arguments, **options)


def test_keys_too_wide_for_kernels_are_refused(monkeypatch):
    pytest.importorskip("triton")
    from liger_multi.backends.triton.linear_attention import gated_delta_rule as kernels

    monkeypatch.setattr(kernels, "INTERPRETED", False)  # it takes narrower ones, for time
    large = DeviceInfo("cuda", "large", 32, 1024, 232448, 132)
    keys = torch.empty(1, 4, 1, 192, device="meta", dtype=torch.bfloat16)
    with launch.simulate(large):
        assert "bfloat16 keys of up to 128 elements on large" in kernels.supports(keys, keys)
        assert kernels.supports(keys[..., :128], keys) is None
        assert "float32 keys of up to 64" in kernels.supports(keys[..., :128].float(), keys)


def test_sizes_that_a_compiler_gets_wrong_are_refused(monkeypatch):
    """Kimi's rule on Hopper, in 16 bits: keys and values of two sizes, or of 72 elements."""
    pytest.importorskip("triton")
    from liger_multi.backends.triton.linear_attention import kimi_delta_attention as kernels

    monkeypatch.setattr(kernels, "INTERPRETED", False)
    monkeypatch.setattr(kernels.delta_rule, "INTERPRETED", False)
    rows = torch.empty(1, 4, 1, 128, device="meta", dtype=torch.bfloat16)
    with launch.simulate(DeviceInfo("cuda", "sm90", 32, 1024, 232448, 132)):
        for keys, values in ((128, 64), (32, 64), (96, 72), (72, 72)):
            said = kernels.supports(rows[..., :keys], rows[..., :values])
            assert "keys and values of one size, a multiple of 16" in said
            assert f"got {keys} and {values}" in said
        assert kernels.supports(rows, rows) is None
        assert kernels.supports(rows[..., :64].float(), rows[..., :32].float()) is None
