"""``torch.compile``: sizes that vary, one tensor in two arguments, second derivatives.

Marks of the compiler are set without importing it.
"""

import dataclasses
import itertools
from dataclasses import replace

import pytest
import torch
import torch.fx.experimental._config
from test_autograd_rules import REPORTED, tied_arguments, tied_results

from liger_multi import errors, ops
from liger_multi._torch_private import constant_in_graphs
from liger_multi.dispatch.registry import operators
from liger_multi.testing import samples
from liger_multi.testing.checks import grads, outputs
from tests import harness, models

# equal sizes of different axes are no reason for another graph
different_axes = torch.fx.experimental._config.patch(use_duck_shape=False)
PUBLIC = [n for n in operators() if n == samples.public(n)]


class Counted:
    """The compiler ``aot_eager``, and how many graphs it got."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, example_inputs):
        from torch._dynamo.backends.debugging import aot_eager

        self.count += 1
        return aot_eager(graph, example_inputs)


# --- sizes that vary ---


def longer(sample, names, size, more):
    """The sample in which every axis of one size is longer, in the named tensors."""
    tensors = {
        n: dataclasses.replace(t, shape=tuple(s + more * (s == size) for s in t.shape))
        if n in names
        else t
        for n, t in sample.tensors.items()
    }
    return dataclasses.replace(sample, tensors=tensors)


def accepted(op, sample):
    """Whether the operator takes tensors of these sizes."""
    try:
        samples.call(op, **sample.make("cpu", torch.float32), **sample.options)
    except (IndexError, TypeError, ValueError, RuntimeError):
        return False
    return True


def lengths(op, sample):
    """The sample in two lengths, both of which the operator takes; None where it takes none."""
    first = next(iter(sample.tensors.values()))
    every = list(sample.tensors)
    for names, size in itertools.product((every, every[:1]), first.shape[:-1] or first.shape):
        samples = [longer(sample, names, size, more) for more in (23, 30)]
        if size > 1 and all(accepted(op, s) for s in samples):
            return samples
    return None


def trained(op, sample, run):
    tensors = sample.make("cpu", torch.float32)
    result, _ = outputs(run(**tensors))
    ones = {n: torch.ones_like(t) for n, t in result.items()}
    return (*result.values(), *grads(result, tensors, ones).values())


@different_axes
def same_in_every_length(op, sample):
    """Whether there is more than one; a single graph serves all."""
    cases = lengths(op, sample)
    if cases is None:
        return False

    bound = samples.function(op, sample.options)

    def run(**tensors):
        return bound(**tensors)

    torch._dynamo.reset()
    graphs = Counted()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=graphs)
    counts = []
    for length in cases:
        eager, graph = (trained(op, length, f) for f in (run, compiled))
        torch.testing.assert_close([*graph], [*eager], rtol=1e-5, atol=1e-6)
        counts.append(graphs.count)
    assert counts[0] == counts[1]  # Dynamo may have begun the first graph twice
    return True


def forms_of(op):
    return [s for s in samples.of(op) if s.size == "small" and harness.adds_to_a_graph(op, s)]


OFTEN = (
    "attention",
    "cross_entropy",
    "embedding",
    "fused_linear_cross_entropy",
    "fused_moe",
    "gated_mlp",
    "hyper_connections",
    "layer_norm",
    "lora_update",
    "rms_norm",
    "rope_multimodal",
    "softmax",
    "swiglu",
)


@pytest.mark.parametrize("op", OFTEN)
def test_operators_with_sizes_that_vary(op):
    """The first sample of several lengths."""
    assert any(same_in_every_length(op, s) for s in forms_of(op))


@pytest.mark.slow
@pytest.mark.parametrize("op", PUBLIC)
def test_every_form_with_sizes_that_vary(op):
    assert sum(same_in_every_length(op, s) for s in forms_of(op)) >= 1


def test_an_embedding_of_a_table_that_grows():
    """Dynamo lost the symbolic number of classes, which forward keeps for backward."""
    compiled = torch.compile(ops.embedding, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows, classes in ((5, 30), (7, 41)):
        index, weight = torch.randint(classes, (rows,)), torch.randn(classes, 8).requires_grad_()
        compiled(index, weight).pow(2).sum().backward()
        got, weight.grad = weight.grad, None
        ops.embedding(index, weight).pow(2).sum().backward()
        torch.testing.assert_close(got, weight.grad)


# --- one tensor in two arguments ---


@pytest.mark.parametrize(
    "op", [pytest.param(n, marks=[] if n in REPORTED else [pytest.mark.slow]) for n in PUBLIC]
)
def test_one_tensor_in_two_arguments_of_a_graph(op):
    for sample, a, b, eager in tied_arguments(op):
        torch._dynamo.reset()
        run = samples.function(op, sample.options)
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        graph = tied_results(op, replace(sample, options={}), a, b, compiled)
        torch.testing.assert_close([*graph], [*eager], rtol=1e-9, atol=1e-11)


# --- forward and backward in different modes ---


@pytest.mark.slow
def test_backward_does_not_depend_on_how_forward_ran():
    """Every pair of an eager or a compiled forward with an eager or a compiled backward."""
    from torch._dynamo import compiled_autograd

    def run(x):
        return ops.gated_mlp(ops.rms_norm(ops.swiglu(x, x)), *weights).sum()

    weights = [torch.randn(8, 8) for _ in range(3)]
    actual = []
    for forward in (
        run,
        torch.compile(run, backend="aot_eager"),
        torch.compile(run, backend="eager"),
    ):
        for compiled in (False, True):
            x = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
            loss = forward(x)
            if compiled:
                with compiled_autograd._enable(torch.compile(backend="eager")):
                    loss.backward()
            else:
                loss.backward()
            actual.append(x.grad)
    for gradient in actual[1:]:
        torch.testing.assert_close(gradient, actual[0])


def test_a_backward_inside_of_a_compiled_function():
    """It runs eagerly, in frames that the compiler looks at after the break."""

    def run(x):
        y = ops.swiglu(x * 1, x * 2)
        torch._dynamo.graph_break()
        loss = ops.rms_norm(y).pow(3).sum()
        loss.backward()
        return loss

    actual = []
    for function in (run, torch.compile(run, backend="aot_eager")):
        x = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
        actual.append((function(x).detach(), x.grad))
    torch.testing.assert_close(actual[1], actual[0])


def second_derivative(loss, leaves):
    (gradient, *_) = torch.autograd.grad(loss, leaves, create_graph=True)
    (loss + gradient.pow(2).sum()).backward()


def aot_raises_for(function, *tensors):
    """Whether AOTAutograd of this PyTorch refuses to differentiate its own gradients."""
    try:
        second_derivative(torch.compile(function, backend="aot_eager")(*tensors), tensors[:1])
    except RuntimeError:
        return True
    return False


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("op", ["swiglu", "cross_entropy", "fused_linear_cross_entropy"])
def test_second_derivatives_raise_in_graphs(op, backend):
    if backend == "aot_eager" and op != "swiglu":
        logits, target = torch.randn(4, 8, requires_grad=True), torch.arange(4)
        if not aot_raises_for(torch.nn.functional.cross_entropy, logits, target):
            pytest.skip("AOTAutograd of this PyTorch drops it for its own cross entropy as well")
    sample = next(s for s in samples.of(op) if s.size == "small")
    tensors = sample.make("cpu", torch.float32)
    leaves = [t for t in tensors.values() if t.requires_grad]
    compiled = torch.compile(getattr(ops, op), fullgraph=True, backend=backend)
    loss = compiled(**tensors, **sample.options).sum()
    ours = backend == "eager"
    error = errors.DoubleBackwardError if ours else RuntimeError
    text = "first derivatives only" if ours else "does not currently support double backward"
    with pytest.raises(error, match=text):
        second_derivative(loss, leaves)


def test_transforms_in_graphs_raise():
    compiled = torch.compile(
        lambda x: torch.func.grad(lambda y: ops.rms_norm(y).sum())(x), backend="aot_eager"
    )
    with pytest.raises(Exception, match="does not support functorch transforms"):
        compiled(torch.randn(3, 8))


def test_graphs_carry_a_hash_of_what_expands_operators():
    """PyTorch keeps graphs on disk by the names of operators, over versions of this library."""
    observed = []

    def keep(graph, example_inputs):
        observed.extend(n for n in graph.graph.nodes if "liger_multi" in str(n.target))
        return graph.forward

    torch.compile(ops.rms_norm, backend=keep, fullgraph=True)(torch.randn(3, 8).requires_grad_())
    from liger_multi.dispatch.torch_ops import source_hash

    (node,) = observed
    assert node.args[-1] == source_hash()
    assert len(source_hash()) == 16


# --- models ---


def dynamic_models():
    models = pytest.importorskip("tests.models")
    for model_type in models.KINDS:
        slow = model_type != "llama"
        yield pytest.param(model_type, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", list(dynamic_models()))
def test_models_with_sizes_that_vary(model_type):
    """Two layers: a second MLP met the sizes that the first one had left behind."""
    from packaging import version

    config = {}
    known = models.ARCHITECTURES[model_type]
    if version.parse(models.transformers.__version__) < version.parse("5.18") and (
        "output_router_logits" in known.config
    ):
        config["experts_implementation"] = "batched_mm"
    stock, ours = models.pair(model_type, **config, patching={"strict": True})
    ours(**models.graph_batch())  # transformers hooks routers at the first call
    graphs, counts = Counted(), []
    run = torch.compile(ours, fullgraph=True, dynamic=True, backend=graphs)
    for length in (9, 11):
        inputs = models.graph_batch(length=length)

        def loss(model, inputs=inputs):
            return (run if model is ours else model)(**inputs).loss

        models.assert_same_training(stock, ours, loss)
        counts.append(graphs.count)
    assert counts[0] == counts[1]


def test_a_patched_mlp_with_sizes_that_vary():
    models = pytest.importorskip("tests.models")
    stock, ours = models.pair("llama", num_hidden_layers=1, patching={})
    stock, ours = (m.model.layers[0].mlp for m in (stock, ours))
    run = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (5, 9):
        x = torch.randn(2, length, 32)

        def loss(module, x=x):
            return (run if module is ours else module)(x).pow(2).mean()

        models.assert_same_training(stock, ours, loss)


# --- marks ---


def test_the_mark_is_the_compilers_own():
    def ours():
        return 1

    def theirs():
        return 1

    assert vars(constant_in_graphs(ours)) == vars(torch.compiler.assume_constant_result(theirs))
