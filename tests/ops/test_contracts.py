"""What every contract promises: schemas, shape rules, compilers, fake tensors, gradients, docs."""

import inspect
from unittest import mock

import pytest
import torch

import liger_multi
from liger_multi import ops
from liger_multi.dispatch.op import OPS
from liger_multi.dispatch.registry import backends, module, operators
from liger_multi.dispatch.torch_ops import Primitive
from liger_multi.testing import samples
from liger_multi.testing.checks import call, grads, outputs
from liger_multi.testing.tolerance import excess
from tests import harness
from tests.comparing import saved

SECTIONS = ("Math:", "Shapes:", "Dtypes:", "Memory:", "Raises:", "Source:")
IDS = [(op, s) for op in operators() for s in samples.of(op) if s.size == "small"]
every_small_sample = pytest.mark.parametrize(
    ("op", "sample"), IDS, ids=[f"{o}-{s.name}" for o, s in IDS]
)

# of samples that reach the same code the first is enough
every_form = pytest.mark.parametrize(
    ("op", "sample"),
    [
        pytest.param(
            o, s, id=f"{o}-{s.name}", marks=[pytest.mark.slow] * harness.repeats_a_form(o, s)
        )
        for o, s in IDS
    ],
)


def recorded(op, sample, device):
    """Arguments of forward and backward as a real call makes them."""
    calls, original = [], Primitive.call

    def spy(self, *args):
        if self in OPS[op].primitives:
            calls.append((self, args))
        return original(self, *args)

    # of the class, at which written-out calls look
    with mock.patch.object(Primitive, "call", spy):
        tensors = sample.make(device, torch.float32)
        result, _ = outputs(call(op, tensors, sample.options))
        grads(result, tensors, {n: torch.ones_like(t) for n, t in result.items()})
    assert calls
    return calls


@every_form
def test_opcheck(device, op, sample):
    """Schema, fake and dispatch of forward and backward as PyTorch's own checker sees them."""
    for prim, args in recorded(op, sample, device):
        args = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
        if any(isinstance(a, torch.Tensor) and a.numel() == 0 and a.ndim > 1 for a in args):
            continue  # opcheck compares storages, and empty ones are all alike
        coded = any(isinstance(a, torch.Tensor) and "float8" in str(a.dtype) for a in args)
        schema = () if coded else ("test_schema",)  # which multiplies what it compares
        torch.library.opcheck(
            prim.overload,
            args,
            test_utils=(*schema, "test_autograd_registration", "test_faketensor"),
        )


@pytest.mark.parametrize("op", operators())
def test_outputs_may_be_written_to(device, op):
    """As those of PyTorch's layers: clip_qkv of OLMo clamps in place what its projections gave."""
    sample = next(s for s in samples.of(op) if s.size == "small")
    result, _ = outputs(call(op, sample.make(device, torch.float32), sample.options))
    for y in result.values():
        expected = y.detach() * 2
        assert torch.equal(y.mul_(2).detach(), expected)


KEPT = {
    "causal_conv1d": None,
    "gated_short_conv": None,
    "rope": ("cos", "sin"),
    "rope_complex": ("freqs",),
    "embedding": ("index",),
}
"""What backward reads of the first sample's tensors; convolutions are computed again of all."""


@pytest.mark.parametrize("op", KEPT)
def test_only_what_backward_reads_is_kept(device, op):
    sample = samples.of(op)[0]
    tensors = sample.make(device, torch.float32)
    _, kept = saved(lambda: samples.call(op, **tensors, **sample.options))
    assert {t.data_ptr() for t in kept} == {tensors[n].data_ptr() for n in KEPT[op] or tensors}


@every_small_sample
def test_shape_rules_equal_what_runs(device, op, sample):
    for prim, args in recorded(op, sample, device):
        with torch.no_grad():
            real, shapes = prim.call(*args), prim.fake(*args)
        pairs = zip(
            *((x,) if isinstance(x, torch.Tensor) else x or () for x in (real, shapes)), strict=True
        )
        for name, (got, rule) in zip(prim.returns, pairs, strict=False):
            assert (got.shape, got.dtype) == (rule.shape, rule.dtype), (prim.direction, name)
            strides = [
                [step for step, size in zip(t.stride(), t.shape, strict=True) if size > 1]
                for t in (got, rule)
            ]
            assert strides[0] == strides[1] or not got.numel(), (prim.direction, name)


STEPPED = ("linear_float8", "gated_mlp_float8", "dequantize")
"""Operators that round their inputs or results: steps, whose numeric derivative is 0."""


@pytest.mark.parametrize("op", [op for op in operators() if op not in STEPPED])
@pytest.mark.parametrize(
    "fast", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["along a line", "every entry"]
)
def test_gradcheck_of_the_reference(op, fast):
    """Analytic against numeric gradients in fp64, over all small samples with few elements."""
    checked = 0
    for sample in (s for s in samples.of(op) if s.size == "small"):
        tensors = sample.make("cpu", torch.float64)
        floats = {n: t for n, t in tensors.items() if t.requires_grad}
        fixed = any(t.dtype == torch.float32 for t in tensors.values())
        if any(spec.whole and spec.grad for spec in sample.tensors.values()):
            continue  # they may lie on the bound of a clamp, where the slope jumps
        if fixed or not floats or not 0 < sum(t.numel() for t in floats.values()) < 700:
            continue
        if sample.options.get("inplace") or any(0 in t.stride() for t in floats.values()):
            continue  # numeric differentiation writes to its own copies of the inputs

        def run(*values, floats=floats, tensors=tensors, sample=sample):
            result = call(op, {**tensors, **dict(zip(floats, values, strict=True))}, sample.options)
            return tuple(outputs(result)[0].values())

        assert torch.autograd.gradcheck(run, tuple(floats.values()), fast_mode=fast)
        checked += 1
    assert checked >= 5 or OPS[op].inplace


ALL_OPTIONS = ("cross_entropy", "fused_linear_cross_entropy")


def compiled():
    """The first sample of every operator is not slow; of losses, the first of every option."""
    visited = set()
    for op, sample in IDS:
        new = harness.adds_to_a_graph(op, sample) if op in ALL_OPTIONS else op not in visited
        marks = [] if new else [pytest.mark.slow]
        yield pytest.param(op, sample, marks=marks, id=f"{op}-{sample.name}")
        visited.add(op)


@pytest.mark.parametrize(("op", "sample"), list(compiled()))
def test_compiled_equals_eager(device, op, sample):
    """One graph, and the same loss and gradients; ignored targets included."""
    if sample.options.get("inplace"):
        pytest.skip("the permission is not used under a compiler; its functional form is compiled")
    torch._dynamo.reset()
    run_sample = samples.function(op, sample.options)
    compiled = torch.compile(
        lambda **t: run_sample(**t),
        fullgraph=True,
        backend="aot_eager",
    )
    results = []
    for run in (run_sample, compiled):
        tensors = sample.make(device, torch.float32)
        result, _ = outputs(run(**tensors))
        ones = {n: torch.ones_like(t) for n, t in result.items()}
        results.append((*result.values(), *grads(result, tensors, ones).values()))
    for eager, graph in zip(*results, strict=True):
        if device.type == "cpu":  # the same functions run both times
            torch.testing.assert_close(graph, eager, rtol=1e-5, atol=1e-6)
        else:  # a traced operator is the reference, and the other a kernel
            assert excess(graph.detach(), eager.detach(), torch.float32) <= 1


def of_logits(op):
    return lambda x, w, t: op((x @ w.t()), t)


def of_teacher(op):
    return lambda x, w, t: op(x, w, x.detach() * 0.9, w.detach(), t, chunk=4)


LOSSES = {
    "cross_entropy": of_logits(ops.cross_entropy),
    "fused_linear_cross_entropy": ops.fused_linear_cross_entropy,
    "fused_linear_kl_div": of_teacher(ops.fused_linear_kl_div),
    "fused_linear_jsd": of_teacher(ops.fused_linear_jsd),
    "fused_linear_tvd": of_teacher(ops.fused_linear_tvd),
}


@pytest.mark.parametrize("ignored", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("op", LOSSES)
def test_compiled_equals_eager_with_ignored_targets(device, op, ignored):
    target = torch.arange(8, device=device)
    target = target.masked_fill(target < 8 * ignored, -100)
    compiled = torch.compile(LOSSES[op], fullgraph=True, backend="aot_eager")
    results = []
    for run in (LOSSES[op], compiled):
        torch.manual_seed(0)
        x, w = (torch.randn(n, 16, device=device, requires_grad=True) for n in (8, 30))
        loss = run(x, w, target)
        loss.backward()
        assert (ignored == 1.0) == (loss.item() == 0.0)
        results.append((loss, x.grad, w.grad))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@every_form
def test_fake_tensors_see_named_operators(op, sample):
    from torch._subclasses import FakeTensorMode

    mode = FakeTensorMode()
    tensors = {n: mode.from_tensor(t) for n, t in sample.make("cpu", torch.bfloat16).items()}
    with mode, liger_multi.use(**{op: "reference"}):
        result, _ = outputs(call(op, tensors, sample.options))
        actual = grads(result, tensors, {n: torch.ones_like(t) for n, t in result.items()})
    for name, grad in actual.items():
        assert (grad.shape, grad.dtype) == (tensors[name].shape, tensors[name].dtype)


@pytest.mark.parametrize(
    "op", [n for n in operators() if n == samples.public(n) and n in ops.__all__]
)
def test_docstrings_have_every_section(op):
    text = inspect.getdoc(getattr(ops, op))
    assert [s for s in SECTIONS if s not in text] == []
    assert text.index("Math:") < text.index("Source:")


@pytest.mark.parametrize("op", operators())
def test_every_backend_implements_the_schema(op):
    from liger_multi.dispatch.resolve import _implementation

    assert module("reference", op) is not None
    for backend in backends():
        if module(backend, op) is not None:
            for prim in OPS[op].primitives:
                _implementation(backend, prim)  # raises where schema and contract differ
