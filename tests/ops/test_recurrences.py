"""Delta rules and scans beyond the common suite: extremes, packing, transformers' own functions.

Every operator is compared with its recurrence in fp64, token by token.
"""

import functools
import inspect
import itertools
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F

from liger_multi import ops
from liger_multi.dispatch import launch
from liger_multi.dispatch.backend import DeviceInfo
from liger_multi.reference.linear_attention import (
    chunks,
    kimi_delta_attention as reference,
    selective_scan,
    ssd_scan,
)
from liger_multi.testing import FORMULAS, samples
from tests.comparing import Operations

FINAL, NORMED = {"output_final_state": True}, {"qk_l2norm": True}
PARAMETERS = {"A", "D", "dt_bias", "delta_bias"}
"""Tensors without an axis of tokens, beside the initial state."""


def normal(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


def delta(length, batch=1, heads=1, group=1, size=8, value=6, channels=False, state=True, seed=0):
    """Tensors of a delta rule, with a gate per head or for every channel."""
    draw, many = normal(seed), heads * group
    q, k = (draw(batch, length, heads, size) for _ in range(2))
    v = draw(batch, length, many, value)
    g = -draw(batch, length, many, *[size] * channels).abs()
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": draw(batch, length, many).sigmoid()}
    return tensors | ({"initial_state": draw(batch, many, size, value)} if state else {})


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


@dataclass(frozen=True)
class Case:
    """An operator with what its tests need.

    Attributes:
        op: Its name.
        make: Draws its tensors in fp64.
        options: Of its calls.
        groups: Sizes of tensors with several heads of values per head of keys.
        bounds: Allowed errors in fp64 and fp32, relative to the largest entry.
    """

    op: str
    make: object
    options: dict = field(default_factory=dict)
    groups: dict = field(default_factory=dict)
    bounds: tuple = (1e-10, 1e-4)

    def run(self, **tensors):
        return samples.call(self.op, **tensors)

    def recurrence(self, **tensors):
        return FORMULAS[self.op](**tensors)

    def near(self, actual, right, dtype=torch.float64):
        bound = self.bounds[dtype != torch.float64]
        for got, expected in zip(actual, right, strict=True):
            assert got.isfinite().all()
            error = (got.double() - expected).abs().max() / expected.abs().max().clamp(min=1.0)
            assert error < bound

    def near_recurrence(self, tensors, **options):
        """In fp64 and fp32, outputs and gradients are those of the recurrence."""
        options = {**self.options, **FINAL, **options}
        right = trained(self.recurrence, tensors, **options)
        for dtype in (torch.float64, torch.float32):
            narrow = {n: t.to(dtype) for n, t in tensors.items()}
            self.near(trained(self.run, narrow, **options), right, dtype)


GROUPS = {"heads": 2, "group": 2}
CASES = {
    "gated_delta_rule": Case("gated_delta_rule", delta, NORMED, GROUPS),
    "kimi_delta_attention": Case(
        "kimi_delta_attention",
        functools.partial(delta, channels=True),
        NORMED,
        GROUPS,
        (1e-12, 1e-5),
    ),
    "ssd_scan": Case("ssd_scan", heads, {"dt_softplus": True}),
    "selective_scan": Case("selective_scan", channels, {"delta_softplus": True}),
}
every = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
KIMI, SSD = CASES["kimi_delta_attention"], CASES["ssd_scan"]


def trained(run, tensors, seed=1, **options):
    """Outputs and gradients of a call, for upstream gradients drawn in fp64."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in tensors.items()}
    outs = run(**leaves, **options)
    outs, draw = outs if isinstance(outs, tuple) else (outs,), normal(seed)
    gradients = torch.autograd.grad(outs, [*leaves.values()], [draw(*y.shape).to(y) for y in outs])
    return (*[y.detach() for y in outs], *gradients)


def decays(tensors):
    """The tensor that says how fast states decay: gates, or sizes of steps."""
    return next(tensors[n] for n in ("g", "dt", "delta") if n in tensors)


def rows(tensors, part):
    """The same tokens of all tensors that have tokens."""
    whole = {*PARAMETERS, "initial_state"}
    return {n: t if n in whole else t[:, part] for n, t in tensors.items()}


def boundaries(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


# --- extremes ---


def filled(name, value, part=slice(None)):
    return lambda tensors: tensors[name][:, part].fill_(value)


def steps(value, part=slice(None)):
    return lambda tensors: decays(tensors)[:, part].fill_(value)


def every_other_channel(value):
    def change(tensors):
        tensors["g"][..., ::2] = value
        tensors["g"][..., 1::2] = 0.0

    return change


OF_RULES = {
    "gates of 0": filled("g", 0.0),
    "gates of -50": filled("g", -50.0),
    "gates of -1000": filled("g", -1e3),
    "one gate of -1000": filled("g", -1e3, 70),
    "beta 0": filled("beta", 0.0),
    "beta 1": filled("beta", 1.0),
    "beta 2": filled("beta", 2.0),
    "zero keys": filled("k", 0.0),
    "zero queries": filled("q", 0.0),
    "repeated keys": lambda tensors: tensors["k"].copy_(
        tensors["k"][:, :1].expand_as(tensors["k"])
    ),
}
OF_KIMI = {
    "gates of -1e-6": filled("g", -1e-6),
    "gates of -5": filled("g", -5.0),
    "gates of -infinity": filled("g", -torch.inf),
    "every other channel 0, others -5": every_other_channel(-5.0),
    "every other channel 0, others -1000": every_other_channel(-1e3),
}
OF_SCANS = {
    "no decay": lambda tensors: tensors["A"].zero_(),
    "decays of 16": lambda tensors: tensors["A"].fill_(-16.0),
    "decays of 1000": lambda tensors: tensors["A"].fill_(-1e3),
    "steps of almost 0": steps(-40.0),
    "steps of 50": steps(50.0),
    "one step of 1000": steps(1e3, 70),
    "B of 0": filled("B", 0.0),
    "C of 0": filled("C", 0.0),
    "gates of -200": filled("z", -200.0),
    "gates of 200": filled("z", 200.0),
}
EXTREMES = [
    pytest.param(case, change, id=f"{op}-{name}")
    for op, case in CASES.items()
    for name, change in (
        OF_SCANS if "scan" in op else OF_RULES | (OF_KIMI if case is KIMI else {})
    ).items()
]


@pytest.mark.parametrize(("case", "change"), EXTREMES)
def test_extremes_equal_the_recurrence(case, change):
    tensors = case.make(130, **({"group": 2} if case.groups else {}))
    change(tensors)
    case.near_recurrence(tensors)


SIZES = {1: (7, 5), 2: (60, 6), 3: (9, 24), 4: (16, 100)}
"""Keys and values of a head, by heads of a group."""


@every
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200])
def test_lengths(case, length):
    """And a large initial state."""
    group = 1 + length % 4
    size, value = SIZES[group]
    sizes = {"group": group, "size": size, "value": value} if case.groups else {}
    tensors = case.make(length, batch=2, **sizes)
    case.near_recurrence(tensors)
    tensors["initial_state"] *= 100
    right = trained(case.recurrence, tensors, **case.options, **FINAL)
    case.near(trained(case.run, tensors, **case.options, **FINAL), right)


@pytest.mark.slow
@pytest.mark.parametrize("size", [96, 100, 192, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_wide_heads(size, group):
    KIMI.near_recurrence(KIMI.make(129, heads=2, group=group, size=size, value=256 - size // 2))


@every
@pytest.mark.parametrize("length", [8192, pytest.param(32768, marks=pytest.mark.slow)])
def test_long_sequences(case, length):
    """The recurrence runs in fp64 without autograd; fp32 is compared with fp64."""
    tensors = case.make(length, **({"size": 16, "value": 16} if case.groups else {}))
    if case.groups:
        tensors["g"] *= 0.1
    else:  # errors are those of sums over the tokens that a state remembers
        decays(tensors).sub_(3)
        tensors["A"] -= 0.1
    options = {**case.options, **FINAL}
    with torch.no_grad():
        case.near(case.run(**tensors, **options), case.recurrence(**tensors, **options))
    wide = trained(case.run, tensors, **options)
    narrow = trained(case.run, {n: t.float() for n, t in tensors.items()}, **options)
    for got, expected in zip(narrow, wide, strict=True):
        assert ((got - expected).norm() / expected.norm()) < 1e-5


def test_strong_gates_take_no_digits_from_others():
    """Where one gate of each 16 is -90, fp32 is as exact as without."""
    tensors = {n: t.float().double() for n, t in KIMI.make(200, size=16, value=16).items()}
    tensors["g"] *= 1e-3
    tensors["g"][:, 5::16] = -90.0
    right = trained(KIMI.recurrence, tensors, **FINAL, **NORMED)
    narrow = {n: t.float() for n, t in tensors.items()}
    for got, expected in zip(trained(KIMI.run, narrow, **FINAL, **NORMED), right, strict=True):
        assert (got - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize(
    ("case", "sizes", "strength", "share"),
    [
        pytest.param(KIMI, {"size": 16, "value": 16}, 16.0, 1e-6, id="kimi_delta_attention"),
        pytest.param(SSD, {}, 0.01, 2e-6, id="ssd_scan-weak"),
        pytest.param(SSD, {}, 16.0, 2e-6, id="ssd_scan-strong"),
    ],
)
def test_the_gradient_of_a_decay_rate(case, sizes, strength, share):
    """A sum over tokens, of which differences of sums lose digits in fp32."""
    tensors = {n: t.float().double() for n, t in case.make(200, **sizes).items()}
    tensors["A" if case is SSD else "g"] *= strength
    rates = []
    for dtype in (torch.float64, torch.float32):
        actual = trained(
            case.run, {n: t.to(dtype) for n, t in tensors.items()}, **case.options, **FINAL
        )
        gradients = dict(zip(tensors, actual[2:], strict=True))
        rate = gradients["A"] if case is SSD else gradients["g"].double() * tensors["g"]
        rates.append(rate if case is SSD else rate.sum((0, 1, 3)))
    assert (rates[1] - rates[0]).abs().max() < share * rates[0].abs().max()


def test_limits_of_steps():
    """Outside of the limits a step has no gradient."""
    tensors = {n: t.requires_grad_() for n, t in heads(40).items()}
    y = ops.ssd_scan(**tensors, dt_softplus=True, dt_limit=(0.5, 1.0))
    (actual,) = torch.autograd.grad(y.sum(), tensors["dt"])
    size = F.softplus(tensors["dt"] + tensors["dt_bias"])
    assert torch.equal(actual == 0, (size < 0.5) | (size > 1.0))


# --- packing ---

LENGTHS = [
    (1, 2, 63, 1, 64, 65, 3),
    (1,) * 130,
    (0, 5, 0, 0, 9, 0),
    (64, 64),
    (200,),
    (33, 31, 1, 63, 17),
    pytest.param((4096, 1, 63, 4096), marks=pytest.mark.slow),
]


@every
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: "-".join(map(str, lengths[:8])))
def test_packed_equals_separate(case, lengths):
    tensors = case.make(sum(lengths), state=False, **case.groups)
    actual = trained(case.run, tensors, cu_seqlens=boundaries(lengths), **case.options)
    up, parts = normal(1)(*actual[0].shape), []
    for start, end in itertools.pairwise(boundaries(lengths).tolist()):
        if start < end:
            leaves = rows(tensors, slice(start, end))
            leaves = {n: t.clone().requires_grad_() for n, t in leaves.items()}
            y = case.run(**leaves, **case.options)
            grads = torch.autograd.grad(y, [*leaves.values()], up[:, start:end])
            parts.append((y.detach(), *grads))
            if "g" in tensors:  # the first gates decay nothing
                assert actual[4][:, start].abs().max() < 1e-12
    for name, got, each in zip(["y", *tensors], actual, zip(*parts, strict=True), strict=True):
        right = sum(each) if name in PARAMETERS else torch.cat(each, 1)
        torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-9)


@every
def test_strong_decays_of_one_document_beside_weak_ones(case):
    """The sums of decays of two documents in a chunk differ by more than an exponential holds."""
    tensors = {n: t.float() for n, t in case.make(100, state=False).items()}
    if "A" in tensors:
        tensors["A"].fill_(-1.0)
        decays(tensors).fill_(0.1)
    decays(tensors)[:, :17] = 40.0 if "A" in tensors else -40.0
    ids = torch.arange(3, dtype=torch.int32).repeat_interleave(torch.tensor([17, 13, 70]))[None]
    options = {**case.options, "seq_idx" if "A" in tensors else "documents": ids}
    wide = trained(case.run, {n: t.double() for n, t in tensors.items()}, **options)
    case.near(trained(case.run, tensors, **options), wide, torch.float32)


@pytest.mark.parametrize("op", ["gated_delta_rule", "kimi_delta_attention"])
def test_documents_are_runs_of_ids(op):
    """Equal ids apart are different documents; every row of a batch has its own.

    What follows the last document of a table is one more.
    """
    case = CASES[op]
    tensors = case.make(150, batch=2, state=False)
    ids = torch.tensor([[4] * 70 + [9] * 20 + [4] * 60, [1] * 33 + [-1] * 2 + [0] * 115])
    actual = case.run(**tensors, documents=ids)
    case.near([actual], [case.recurrence(**tensors, documents=ids)])
    first = {n: t[:1] for n, t in tensors.items()}
    for table in ([0, 70, 90, 150], [0, 70, 90]):
        assert torch.equal(actual[:1], case.run(**first, cu_seqlens=torch.tensor(table)))


def test_the_initial_state_is_of_the_first_document():
    """Its gradient too; the final state is of the last."""
    tensors = KIMI.make(90)
    for cut in (1, 40, 64):
        KIMI.near_recurrence(tensors, cu_seqlens=boundaries((cut, 90 - cut)))


# --- order, memory ---


@every
def test_two_calls_that_hand_over_the_state_are_one(case):
    tensors, options = case.make(170, **case.groups), {**case.options, **FINAL}

    def parts(**leaves):
        y, state = case.run(**rows(leaves, slice(77)), **options)
        later = {**rows(leaves, slice(77, None)), "initial_state": state}
        more, state = case.run(**later, **options)
        return torch.cat([y, more], 1), state

    case.near(trained(parts, tensors), trained(case.run, tensors, **options))


@every
@pytest.mark.parametrize("packed", [False, True])
def test_spans_and_blocks_change_nothing(case, packed, monkeypatch):
    """Blocks of one head or channel, and the shortest spans, with boundaries of documents."""
    tensors, options = case.make(1100, batch=2, **case.groups), {**case.options, **FINAL}
    if packed:
        ids = torch.arange(1100, dtype=torch.int32)[None] // torch.tensor([[300], [512]])
        options["documents" if case.groups else "seq_idx"] = ids.int()
    whole = trained(case.run, tensors, **options)
    for module in (chunks, selective_scan, ssd_scan):
        monkeypatch.setattr(module, "BLOCK_BYTES", 1)
    case.near(trained(case.run, tensors, **options), whole)


def test_states_kept_for_backward(monkeypatch):
    """They are the last states of shorter sequences; one span keeps none."""
    monkeypatch.setattr(selective_scan, "SPAN", 8)
    tensors = channels(20, batch=2)
    how = {"first": None, "delta_softplus": True, "output_final_state": True}

    def run(tokens):
        return selective_scan.forward(**rows(tensors, slice(tokens)), **how)

    states = run(20)[2]
    assert states.shape == (2, 3, 4, 6)
    assert run(8)[2].numel() == 0
    right = [tensors["initial_state"], run(8)[1], run(16)[1]]
    CASES["selective_scan"].near([states[:, span].mT for span in range(3)], right)


def test_nothing_has_the_size_of_pairs_times_channels():
    """Pairs of a chunk's tokens for every channel would be 64 times the gates."""
    sizes = {"heads": 2, "size": 64, "value": 64, "state": False}
    tensors = {n: t.float() for n, t in KIMI.make(512, **sizes).items()}
    arguments = (*tensors.values(), None, None, 0.125, True)
    with torch.no_grad(), Operations() as operations:
        y, _ = reference.forward(*arguments, False)
        reference.backward(y, None, *arguments, *[True] * 5, False)
    largest = max(t.untyped_storage().nbytes() // t.itemsize for t in operations.tensors())
    assert largest <= 2 * tensors["g"].numel()


# --- the same as others ---


@pytest.mark.parametrize("group", [1, 2])
def test_a_gate_of_all_channels_is_the_gated_delta_rule(group):
    tensors = delta(200, heads=2, group=group)

    def broadcast(g, **rest):
        return KIMI.run(g=g.unsqueeze(-1).expand(*g.shape, 8), **rest, **FINAL, **NORMED)

    right = trained(ops.gated_delta_rule_with_state, tensors, **NORMED)
    KIMI.near(trained(broadcast, tensors), right)


def of_transformers(model_type, name):
    """A function of a modeling file without its decorators."""
    modeling = pytest.importorskip(f"transformers.models.{model_type}.modeling_{model_type}")
    if not hasattr(modeling, name):
        pytest.skip("this transformers has no function for it")
    return inspect.unwrap(getattr(modeling, name))


def stock_rule(model_type, name):
    """A delta rule of transformers; some versions pass it repeated heads."""

    def call(q, k, v, qk_l2norm=False, **options):
        q, k = (x.repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q, k))
        options["use_qk_l2norm_in_kernel"] = qk_l2norm
        y, state = of_transformers(model_type, name)(q, k, v, **options)
        return (y, state) if options.get("output_final_state") else y

    return call


def stock_heads(z, initial_state, output_final_state, **tensors):
    """mamba2_chunk_scan; the gate is the caller's, and step sizes of fp64 lose nothing."""
    tensors = {"hidden_states" if n == "x" else n: t for n, t in tensors.items()}
    stock = of_transformers("mamba2", "mamba2_chunk_scan")
    names = inspect.signature(stock).parameters
    first = {} if "hidden_states" in names else {"x": tensors.pop("hidden_states")}
    options = {"chunk_size": 16, "initial_states": initial_state, "return_final_states": True}
    y, state = stock(**first, **tensors, **options)
    return y * F.silu(z), state


def stock_channels(u, delta, A, B, C, z, output_final_state, **tensors):
    stock = of_transformers("mamba", "mamba_selective_scan")
    y, state = stock(u.mT, delta.mT, A, B.mT, C.mT, z=z.mT, return_last_state=True, **tensors)
    return y.mT, state


STOCK = {
    "gated_delta_rule": stock_rule("qwen3_next", "torch_chunk_gated_delta_rule"),
    "kimi_delta_attention": stock_rule("kimi_linear", "chunk_kimi_delta_attention"),
    "ssd_scan": stock_heads,
    "selective_scan": stock_channels,
}


@every
@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
def test_equals_transformers(case, length):
    sizes = {**GROUPS, "size": 16} if case.groups else {"state": case is SSD, "batch": 2}
    tensors = {n: t.float() for n, t in case.make(length, **sizes).items()}
    options = {**case.options, **FINAL}
    right = trained(STOCK[case.op], tensors, **options)
    for got, expected in zip(trained(case.run, tensors, **options), right, strict=True):
        atol = case.bounds[1] * float(expected.abs().max())
        torch.testing.assert_close(got, expected, rtol=case.bounds[1], atol=atol)


def stock_scan(x, **rest):
    """transformers' fp32 results, rounded to bf16."""
    stock = of_transformers("mamba2", "mamba2_chunk_scan")
    return stock(hidden_states=x, **rest, chunk_size=64).bfloat16()


@pytest.mark.parametrize("op", ["gated_delta_rule", "kimi_delta_attention", "ssd_scan"])
def test_bf16_is_as_exact_as_transformers(op):
    case, sizes = CASES[op], {} if op == "ssd_scan" else {"size": 32, "value": 32, **GROUPS}
    tensors = {n: t.bfloat16() for n, t in case.make(300, state=False, **sizes).items() if n != "z"}
    tensors |= {n: t.float() for n, t in tensors.items() if n == "g"}
    wide = {n: t.double() for n, t in tensors.items()}
    other = stock_scan if op == "ssd_scan" else STOCK[op]
    runs = ((case.run, tensors), (other, tensors), (case.recurrence, wide))
    results = [trained(run, inputs, **case.options) for run, inputs in runs]
    for name, ours, theirs, expected in zip(["y", *tensors], *results, strict=True):
        if name not in PARAMETERS:  # of four numbers, errors are those of their last rounding
            errors = [(x - expected).norm() / expected.norm() for x in (ours, theirs)]
            assert errors[0] < 1.05 * errors[1] + 1e-4 * bool(case.groups)


# --- bad input, and what kernels refuse ---

Q, G = torch.ones(1, 4, 2, 8), torch.zeros(1, 4, 2)
N, T, A = torch.ones(1, 4, 1, 3), torch.ones(1, 4, 2), -torch.ones(2)
E, TABLE = torch.ones(1, 4, 3), torch.tensor([0, 4])
RULE, SCAN = "gated_delta_rule", "ssd_scan"
TWO = ((Q.expand(2, 4, 2, 8),) * 3 + (G.expand(2, 4, 2),) * 2, {"cu_seqlens": TABLE})
WRONG = [
    (RULE, (Q[0], Q, Q, G, G), {}, ValueError, "q must have four axes"),
    (RULE, (Q, Q.double(), Q, G, G), {}, TypeError, "q is torch.float32, got k"),
    (RULE, (Q, Q, Q, G.int(), G), {}, TypeError, "g must be a floating-point tensor"),
    (RULE, (Q, Q, Q[:, :, :1], G, G), {}, ValueError, "HV a multiple"),
    (RULE, (Q, Q[..., :4], Q, G, G), {}, ValueError, "q and k must have the same shape"),
    (RULE, (Q, Q, Q, G[:, :3], G), {}, ValueError, r"g must have shape \(1, 4, 2\)"),
    (RULE, (Q, Q, Q, G, G), {"initial_state": Q[:, :2]}, ValueError, "initial_state must have"),
    (RULE, (Q, Q, Q, G, G), {"scale": "1"}, TypeError, "scale"),
    (RULE, (Q, Q, Q, G, G), {"qk_l2norm": 1}, TypeError, "qk_l2norm must be True or False"),
    (RULE, *TWO, ValueError, "for a batch of one"),
    (
        RULE,
        (Q, Q, Q, G, G),
        {"cu_seqlens": TABLE, "documents": G[..., 0].int()},
        ValueError,
        "in place of documents",
    ),
    (RULE, (Q, Q, Q, G, G), {"cu_seqlens": torch.ones(2)}, TypeError, "int64 or int32"),
    (KIMI.op, (Q, Q, Q, G, G), {}, ValueError, r"g must have shape \(1, 4, 2, 8\)"),
    (KIMI.op, (Q, Q, Q[..., :4], Q[..., :4], G), {}, ValueError, "g must have shape"),
    (KIMI.op, (Q, Q, Q, Q, Q), {}, ValueError, r"beta must have shape \(1, 4, 2\)"),
    (KIMI.op, (Q[0], Q, Q, Q, G), {}, ValueError, "kimi_delta_attention: q must have four"),
    (KIMI.op, (Q, Q.double(), Q, Q, G), {}, TypeError, "kimi_delta_attention: q is torch.float32"),
    (
        KIMI.op,
        (Q, Q, Q, Q, G),
        {"documents": torch.ones(1, 3).int()},
        ValueError,
        "kimi_delta_attention: documents",
    ),
    (SCAN, (Q[0], T, A, N, N), {}, ValueError, "x must have four axes"),
    (SCAN, (Q, T, A, *[N.expand(1, 4, 3, 3)] * 2), {}, ValueError, "multiple"),
    (SCAN, (Q, T, A, N, N[..., :2]), {}, ValueError, "B and C must have the same shape"),
    (SCAN, (Q, T[:, :3], A, N, N), {}, ValueError, r"dt must have shape \(1, 4, 2\)"),
    (SCAN, (Q, T, A, N, N), {"D": torch.ones(3)}, ValueError, "D must have shape"),
    (SCAN, (Q, T, A, N, N), {"initial_state": Q}, ValueError, "initial_state must have shape"),
    (SCAN, (Q, T, A, N, N), {"dt_limit": 1.0}, TypeError, "dt_limit must be two numbers"),
    (SCAN, (Q, T, A, N, N), {"dt_limit": (2.0, 1.0)}, ValueError, r"dt_limit\[1\]"),
    (SCAN, (Q, T, A, N, N), {"chunk": 0}, ValueError, "chunk must be at least 1"),
    (SCAN, (Q, T, A, N, N), {"dt_softplus": 1}, TypeError, "dt_softplus must be True or False"),
    (SCAN, (Q, T.int(), A, N, N), {}, TypeError, "dt must be a floating-point tensor"),
    ("selective_scan", (T[0], T, E[0, :2], E, E), {}, ValueError, "u must have three axes"),
    ("selective_scan", (T, T, E[0], E, E), {}, ValueError, r"A must have shape \(2, N\)"),
    ("selective_scan", (T, T, E[0, :2], E[:, :3], E), {}, ValueError, r"B must have shape \(1, 4"),
    ("selective_scan", (T, T, E[0, :2], E, E), {"z": E}, ValueError, r"z must have shape \(1, 4"),
]


@pytest.mark.parametrize(("op", "arguments", "options", "error", "text"), WRONG)
def test_wrong_arguments(op, arguments, options, error, text):
    with pytest.raises(error, match=text):
        getattr(ops, op)(*arguments, **options)


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
