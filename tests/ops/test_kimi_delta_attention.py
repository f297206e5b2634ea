"""Kimi delta attention beyond the common suite: extremes, packing, transformers' own."""

import functools
import inspect
import itertools

import pytest
import test_gated_delta_rule as per_head
import torch
from test_gated_delta_rule import EXTREMES, FINAL, NORMED, near, trained
from torch.utils._python_dispatch import TorchDispatchMode

from liger_multi import ops
from liger_multi.testing import FORMULAS, samples

make_inputs = functools.partial(per_head.make_inputs, channels=True)
run = functools.partial(samples.call, "kimi_delta_attention")
recurrence = FORMULAS["kimi_delta_attention"]


def errors(actual, right):
    """Norms of differences, relative to what is right."""
    assert len(actual) == len(right)
    return [float((x - y).norm() / y.norm().clamp(min=1e-30)) for x, y in zip(actual, right)]


# --- the recurrence ---

SIZES = {1: (7, 5), 2: (60, 6), 3: (9, 24), 4: (16, 100)}  # of keys and values, by heads of a group


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200])
def test_lengths(length):
    group = 1 + length % 4
    size, value = SIZES[group]
    tensors = make_inputs(length, batch=2, group=group, size=size, value=value)
    right = trained(recurrence, tensors, **FINAL, **NORMED)
    for dtype, bound in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
        narrow = {n: t.to(dtype) for n, t in tensors.items()}
        assert max(errors(trained(run, narrow, **FINAL, **NORMED), right)) < bound


@pytest.mark.slow
@pytest.mark.parametrize("size", [96, 100, 192, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_wide_heads(size, group):
    tensors = make_inputs(129, heads=2, group=group, size=size, value=256 - size // 2)
    right = trained(recurrence, tensors, **FINAL, **NORMED)
    assert max(errors(trained(run, tensors, **FINAL, **NORMED), right)) < 1e-13
    narrow = {n: t.float() for n, t in tensors.items()}
    assert max(errors(trained(run, narrow, **FINAL, **NORMED), right)) < 1e-5


def some_channels(value):
    def change(tensors):
        tensors["g"][..., ::2] = value
        tensors["g"][..., 1::2] = 0.0

    return change


MORE = {
    "gates of -1e-6": per_head.filled("g", -1e-6),
    "gates of -5": per_head.filled("g", -5.0),
    "gates of -infinity": per_head.filled("g", -torch.inf),
    "every other channel 0, others -5": some_channels(-5.0),
    "every other channel 0, others -1000": some_channels(-1e3),
}


@pytest.mark.parametrize("change", [*EXTREMES.values(), *MORE.values()], ids=[*EXTREMES, *MORE])
def test_extremes_equal_the_recurrence(change):
    tensors = make_inputs(130, group=2)
    change(tensors)
    right = trained(recurrence, tensors, **FINAL, **NORMED)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        narrow = {n: t.to(dtype) for n, t in tensors.items()}
        for got, expected in zip(trained(run, narrow, **FINAL, **NORMED), right, strict=True):
            assert got.isfinite().all()
            error = (got.double() - expected).abs().max() / expected.abs().max().clamp(min=1.0)
            assert error < bound


def test_strong_gates_take_no_digits_from_others():
    """Where one gate of each 16 is -90, fp32 is as exact as without."""
    tensors = {n: t.float().double() for n, t in make_inputs(200, size=16, value=16).items()}
    tensors["g"] *= 1e-3
    tensors["g"][:, 5::16] = -90.0
    right = trained(recurrence, tensors, **FINAL, **NORMED)
    narrow = {n: t.float() for n, t in tensors.items()}
    assert max(errors(trained(run, narrow, **FINAL, **NORMED), right)) < 1e-6


def test_the_gradient_of_a_decay_rate():
    """A sum over tokens, which differences of sums lose in fp32: gates of -16 softplus(a)."""
    tensors = make_inputs(200, size=16, value=16)
    tensors["g"] *= 16
    rates = []
    for dtype in (torch.float64, torch.float32):
        actual = trained(run, {n: t.to(dtype) for n, t in tensors.items()}, **FINAL, **NORMED)
        rates.append((actual[5].double() * tensors["g"]).sum((0, 1, 3)))
    assert (rates[1] - rates[0]).abs().max() < 1e-6 * rates[0].abs().max()


def test_a_large_initial_state():
    tensors = make_inputs(200)
    tensors["initial_state"] *= 100
    right = trained(recurrence, tensors, **FINAL, **NORMED)
    assert max(errors(trained(run, tensors, **FINAL, **NORMED), right)) < 1e-13


@pytest.mark.parametrize("which", [0, 1])
def test_the_gradient_of_one_output(which):
    """Of y or of the final state alone."""

    def one(operator, **leaves):
        return operator(**leaves, **FINAL, **NORMED)[which]

    tensors = make_inputs(130)
    if which:
        tensors["g"] *= 0.1
    leaves = [{n: t.clone().requires_grad_() for n, t in tensors.items()} for _ in range(2)]
    ours, right = (one(f, **x) for f, x in zip((run, recurrence), leaves))
    up = torch.randn_like(right)
    actual = torch.autograd.grad(ours, list(leaves[0].values()), up, allow_unused=True)
    expected = torch.autograd.grad(right, list(leaves[1].values()), up, allow_unused=True)
    for name, a, b in zip(tensors, actual, expected):
        if which and name == "q":
            assert b is None
            assert not a.any()
        else:
            assert (a - b).norm() < 1e-13 * b.norm()


@pytest.mark.parametrize("length", [4096, pytest.param(32768, marks=pytest.mark.slow)])
def test_long_sequences(length):
    """The recurrence in fp64 without autograd; fp32 against fp64."""
    tensors = make_inputs(length, size=16, value=16)
    tensors["g"] *= 0.1
    with torch.no_grad():
        near(run(**tensors, **FINAL, **NORMED), recurrence(**tensors, **FINAL, **NORMED))
    wide = trained(run, tensors, **FINAL, **NORMED)
    narrow = {n: t.float() for n, t in tensors.items()}
    assert max(errors(trained(run, narrow, **FINAL, **NORMED), wide)) < 1e-5


# --- packing ---


def packed_equals_separate(lengths, sizes, **options):
    tensors = make_inputs(sum(lengths), state=False, **sizes)
    ends = list(itertools.accumulate(lengths))
    actual = trained(run, tensors, **options)
    generator = torch.Generator().manual_seed(1)
    up = torch.randn(actual[0].shape, generator=generator, dtype=torch.float64)
    for start, end in zip([0, *ends], ends, strict=False):
        if start == end:
            continue
        leaves = {n: t[:, start:end].clone().requires_grad_() for n, t in tensors.items()}
        y = run(**leaves, **NORMED)
        alone = (y, *torch.autograd.grad(y, list(leaves.values()), up[:, start:end]))
        for got, expected in zip(actual, alone, strict=True):
            torch.testing.assert_close(got[:, start:end], expected, rtol=1e-10, atol=1e-12)
        assert not actual[4][:, start].any()  # the first gates decay nothing


@pytest.mark.parametrize(
    "lengths",
    [
        per_head.LENGTHS,
        (1, 1, 1),
        (1,) * 130,
        (0, 5, 0, 0, 9, 0),
        (64, 64),
        (200,),
        (4, 60, 64, 1),
        (33, 31, 1, 63, 17),
        pytest.param((4096, 1, 63, 4096), marks=pytest.mark.slow),
    ],
    ids=lambda lengths: "-".join(map(str, lengths[:8])),
)
def test_packed_equals_separate(lengths):
    table = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    packed_equals_separate(lengths, {"heads": 2, "group": 2}, cu_seqlens=table, **NORMED)


def test_documents_are_runs_of_ids():
    """Equal ids apart are different documents; every row of a batch has its own."""
    tensors = make_inputs(150, batch=2, state=False)
    ids = torch.tensor([[4] * 70 + [9] * 20 + [4] * 60, [1] * 33 + [-1] * 2 + [0] * 115])
    actual = run(**tensors, documents=ids)
    right = recurrence(**tensors, documents=ids)
    torch.testing.assert_close(actual, right, rtol=1e-12, atol=1e-12)
    table = torch.tensor([0, 70, 90, 150])
    first = run(**{n: t[:1] for n, t in tensors.items()}, cu_seqlens=table)
    assert torch.equal(actual[:1], first)


def test_the_initial_state_is_of_the_first_document():
    """Its gradient too; the final state is of the last."""
    tensors = make_inputs(90)
    for cut in (1, 40, 64):
        table = torch.tensor([0, cut, 90])
        actual = trained(run, tensors, cu_seqlens=table, **FINAL)
        right = trained(recurrence, tensors, cu_seqlens=table, **FINAL)
        assert max(errors(actual, right)) < 1e-13


def test_what_follows_the_last_document_is_one_more():
    tensors = make_inputs(40, state=False)
    actual = trained(run, tensors, cu_seqlens=torch.tensor([0, 25]))
    right = trained(run, tensors, cu_seqlens=torch.tensor([0, 25, 40]))
    assert all(torch.equal(a, b) for a, b in zip(actual, right, strict=True))


# --- order ---


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("after", [0, 31, 32, 100])
def test_later_tokens_change_nothing(name, after):
    tensors = make_inputs(150, dtype=torch.float32)
    other = {n: t.clone() for n, t in tensors.items()}
    other[name][:, after + 1 :] *= 31.0
    a, b = (run(**x, **NORMED) for x in (tensors, other))
    assert torch.equal(a[:, : after + 1], b[:, : after + 1])
    assert not torch.equal(a, b)


def test_two_calls_that_hand_over_the_state_are_one():
    tensors = make_inputs(170, group=3)

    def parts(initial_state, **rest):
        y, state = run(
            **{n: t[:, :77] for n, t in rest.items()}, initial_state=initial_state, **FINAL
        )
        more, state = run(**{n: t[:, 77:] for n, t in rest.items()}, initial_state=state, **FINAL)
        return torch.cat([y, more], 1), state

    assert max(errors(trained(parts, tensors), trained(run, tensors, **FINAL))) < 1e-13


def test_spans_and_blocks_change_nothing(monkeypatch):
    """Blocks of one head and sequence, and spans of 8 chunks, with boundaries of documents."""
    from liger_multi.reference.linear_attention import chunks

    tensors = make_inputs(1100, batch=2, heads=2, group=2)
    ids = torch.arange(1100)[None] // torch.tensor([[300], [512]])
    for documents in (None, ids):
        options = {"documents": documents, **FINAL, **NORMED}
        with monkeypatch.context() as patch:
            whole = trained(run, tensors, **options)
            patch.setattr(chunks, "BLOCK_BYTES", 1)
            assert max(errors(trained(run, tensors, **options), whole)) < 1e-13


# --- the same as others ---


@pytest.mark.parametrize("group", [1, 2])
def test_a_gate_of_all_channels_is_the_gated_delta_rule(group):
    tensors = per_head.make_inputs(200, heads=2, group=group)

    def broadcast(g, **rest):
        return run(g=g.unsqueeze(-1).expand(*g.shape, 8), **rest, **FINAL, **NORMED)

    right = trained(ops.gated_delta_rule_with_state, tensors, **NORMED)
    assert max(errors(trained(broadcast, tensors), right)) < 1e-13


def fallback(q, k, v, **options):
    """The function of transformers, which is passed repeated heads."""
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    body = inspect.unwrap(modeling.chunk_kimi_delta_attention)
    q, k = (x.repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q, k))
    options["use_qk_l2norm_in_kernel"] = options.pop("qk_l2norm", False)
    y, state = body(q, k, v, **options)
    return (y, state) if options.get("output_final_state") else y


@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
def test_equals_transformers(length):
    tensors = make_inputs(length, heads=2, group=2, size=16, dtype=torch.float32)
    right = trained(fallback, tensors, **FINAL, **NORMED)
    assert max(errors(trained(run, tensors, **FINAL, **NORMED), right)) < 1e-5


def test_bf16_is_as_exact_as_transformers():
    tensors = make_inputs(150, heads=2, group=2, size=32, value=32, state=False)
    tensors = {n: t.bfloat16() for n, t in tensors.items()}
    tensors["g"] = tensors["g"].float()
    right = trained(recurrence, {n: t.double() for n, t in tensors.items()}, **NORMED)
    ours, other = (errors(trained(f, tensors, **NORMED), right) for f in (run, fallback))
    assert all(a < 1.05 * b + 1e-4 for a, b in zip(ours, other, strict=True))


# --- what callers may rely on ---


def test_views_of_one_buffer():
    """q, k and v of one projection, gates of a transposed one, an expanded gradient."""
    tensors = make_inputs(70, heads=2, size=8, value=8, dtype=torch.float32)
    buffer = torch.cat([tensors[n].flatten(2) for n in "qkv"], -1)
    views = [x.unflatten(-1, (2, 8)) for x in buffer.split(16, -1)]
    gates = tensors["g"].permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    strided = {**tensors, **dict(zip("qkv", views)), "g": gates}
    actual = []
    for given_tensors in (tensors, strided):
        leaves = [t.detach().requires_grad_() for t in given_tensors.values()]
        y = run(*leaves[:5], initial_state=leaves[5])
        up = torch.full((1, 70, 1, 1), 0.5).expand_as(y)
        up = up.contiguous() if given_tensors is tensors else up
        actual.append((y, *torch.autograd.grad(y, leaves, up)))
    assert all(torch.equal(a, b) for a, b in zip(*actual, strict=True))


def test_compiles_to_one_graph():
    tensors = make_inputs(70, group=2, state=False, dtype=torch.float32)
    table = torch.tensor([0, 30, 70])

    def packed(**leaves):
        return ops.kimi_delta_attention(**leaves, cu_seqlens=table, **NORMED) * 2

    actual = trained(torch.compile(packed, fullgraph=True, backend="aot_eager"), tensors)
    right = trained(packed, tensors)
    assert all(torch.equal(a, b) for a, b in zip(actual, right, strict=True))


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that is allocated."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor):
            self.numbers = max(self.numbers, output.untyped_storage().nbytes() // output.itemsize)
        return output


def test_nothing_has_the_size_of_pairs_times_channels():
    """Pairs of a chunk's tokens for every channel would be 64 times the gates."""
    from liger_multi.reference.linear_attention import kimi_delta_attention as reference

    tensors = make_inputs(512, heads=2, size=64, value=64, state=False, dtype=torch.float32)
    arguments = (*tensors.values(), None, None, 0.125, True)
    with torch.no_grad(), Largest() as largest:
        y, _ = reference.forward(*arguments, False)
        reference.backward(y, None, *arguments, *[True] * 5, False)
    assert largest.numbers <= 2 * tensors["g"].numel()


Q = torch.ones(1, 4, 2, 8)
B = torch.zeros(1, 4, 2)
WRONG = {
    "a gate per head": ((Q, Q, Q, B, B), {}, ValueError, r"g must have shape \(1, 4, 2, 8\)"),
    "channels of v": ((Q, Q, Q[..., :4], Q[..., :4], B), {}, ValueError, "g must have shape"),
    "beta": ((Q, Q, Q, Q, Q), {}, ValueError, r"beta must have shape \(1, 4, 2\)"),
    "four axes": ((Q[0], Q, Q, Q, B), {}, ValueError, "kimi_delta_attention: q must have four"),
    "dtypes": ((Q, Q.double(), Q, Q, B), {}, TypeError, "kimi_delta_attention: q is torch.float32"),
    "state": ((Q, Q, Q, Q, B), {"initial_state": Q}, ValueError, "initial_state must have"),
    "batch": (
        (Q.expand(2, 4, 2, 8),) * 4 + (B.expand(2, 4, 2),),
        {"cu_seqlens": torch.tensor([0, 4])},
        ValueError,
        "kimi_delta_attention: cu_seqlens",
    ),
    "table": ((Q, Q, Q, Q, B), {"cu_seqlens": torch.ones(2)}, TypeError, "int64 or int32"),
    "documents": (
        (Q, Q, Q, Q, B),
        {"documents": torch.ones(1, 3).int()},
        ValueError,
        "kimi_delta_attention: documents",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    arguments, options, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        run(*arguments, **options)
