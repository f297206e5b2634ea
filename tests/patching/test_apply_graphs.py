"""Patched models in graphs: compiled, exported and traced programs are those of stock models."""

# ruff: noqa: E402  (what needs transformers is imported after the skip)

import functools
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

transformers = pytest.importorskip("transformers")

from liger_multi import ops
from liger_multi.patching import real_logits
from tests.models import (
    VOCABULARY,
    Graphs,
    assert_same_compiled,
    assert_same_training,
    build,
    graph_batch,
    pair,
    patched_copy,
)

# --- compilers ---


@pytest.mark.slow
def test_the_stock_graph_holds_all_logits():
    """What the matrix counts in graphs of patched models is there to be counted."""
    graphs = Graphs()
    stock = build("llama", num_hidden_layers=1)
    torch.compile(stock, fullgraph=True, backend=graphs)(**graph_batch(rows=4)).loss.backward()
    assert (graphs.count, graphs.rows) == (1, 44)


def bert():
    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=48,
        vocab_size=VOCABULARY,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(config)


def test_a_loss_object_in_the_graph():
    """Dynamo makes a call of its own of ``nn.CrossEntropyLoss()``, which takes tensors only."""
    graphs, stock = Graphs(), bert()
    assert_same_compiled(stock, patched_copy(stock), backend=graphs)
    assert graphs.count == 1
    assert any("layer_norm" in name for name in graphs.targets)


@pytest.mark.slow
def test_a_loss_object_of_the_caller_in_the_graph():
    stock, ours = pair("llama", num_hidden_layers=1, patching={})
    inputs = graph_batch(labels=False)

    def step(model):
        logits = model(**inputs).logits.view(-1, VOCABULARY)
        return nn.CrossEntropyLoss()(logits, inputs["input_ids"].flatten())

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same_training(stock, ours, lambda m: (compiled if m is ours else step)(m))


def own_loss(logits, ids):
    logits = torch.tanh(logits / 5.0) * 5.0
    loss = F.cross_entropy(logits[:, :-1].float().reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))
    return loss + 0.01 * logits.logsumexp(-1).pow(2).mean()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # which Dynamo hides later
@pytest.mark.parametrize(
    "options", [{}, {"fused_linear_cross_entropy": False, "cross_entropy": True}], ids=str
)
@pytest.mark.parametrize("alone", [False, True], ids=["with the model", "of eager logits"])
def test_own_losses_in_a_graph(options, alone):
    stock, ours = pair("llama", num_hidden_layers=1, patching=options)
    inputs = graph_batch(labels=False)

    def step(model, loss=own_loss):
        return loss(model(**inputs).logits, inputs["input_ids"])

    if alone:
        in_graph = functools.partial(step, loss=torch.compile(own_loss, backend="aot_eager"))
    else:
        in_graph = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same_training(stock, ours, lambda m: (in_graph if m is ours else step)(m))


def test_loss_object_keeps_patch_options():
    """A z-loss belongs to our loss, which the compiler's own call would silently replace."""
    ours = patched_copy(bert(), fused_linear_cross_entropy={"z_loss": 0.1})
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(ours, fullgraph=True, backend="eager")(**graph_batch())


@pytest.mark.slow
@pytest.mark.parametrize("grad", [True, False])
def test_compiled_model_returns_usable_logits(grad):
    stock, ours = pair("llama", num_hidden_layers=1, patching={})
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(grad):
        expected, got = stock(**graph_batch()), compiled(**graph_batch())
    torch.testing.assert_close(got.loss, expected.loss)
    expected, got = expected.logits, got.logits
    assert (got.shape, got.dtype, got.ndim) == (expected.shape, expected.dtype, expected.ndim)
    for read in (
        real_logits,
        lambda z: torch.softmax(z, -1),
        lambda z: z[:, 1:].sum(),
        lambda z: z.argmax(-1),
        lambda z: (z + 1) > 1,
    ):
        torch.testing.assert_close(read(got), read(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused_optimizer", [False, True])
def test_compiled_logits_are_stale_after_a_step_and_only_then(fused_optimizer):
    ours = pair("llama", num_hidden_layers=1, patching={})[1]
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    optimizer = torch.optim.Adam(ours.parameters(), fused=fused_optimizer)
    for _ in range(2):
        out, unread = compiled(**graph_batch()), compiled(**graph_batch())
        out.loss.backward()
        assert (out.logits + 0).isfinite().all()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified in place"):
            unread.logits[:, 1:] + 0


def test_compiled_logits_pickle_without_a_gradient():
    ours = pair("llama", num_hidden_layers=1, patching={})[1]
    out = torch.compile(ours, fullgraph=True, backend="eager")(**graph_batch())
    with pytest.raises(RuntimeError, match="real_logits"):
        torch.autograd.grad(out.loss, out.logits, allow_unused=True)
    assert torch.equal(pickle.loads(pickle.dumps(out.logits)), real_logits(out.logits))


@pytest.mark.slow
def test_a_bound_backend_breaks_the_graph_and_is_right():
    stock, ours = pair("llama", num_hidden_layers=1, patching={"rms_norm": "reference"})
    assert_same_compiled(stock, ours, fullgraph=False)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"use liger_multi\.configure|_run_scoped"):
        torch.compile(ours, fullgraph=True, backend="aot_eager")(**graph_batch())


# --- exported programs ---


# the tracer warns of every comparison of shapes, in transformers and here
TRACED = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")

GRAD = pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
FIRST = {"rows": 2, "length": 9}
OTHER = {"rows": 4, "length": 33}


def ids(rows, length):
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)


class Returns(nn.Module):
    """A model of token ids that returns one tensor."""

    def __init__(self, model, what):
        super().__init__()
        self.model, self.what = model, what

    def forward(self, tokens):
        """Logits, transformers' loss, or a loss of the caller."""
        if self.what == "loss":
            return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        logits = self.model(input_ids=tokens, use_cache=False).logits
        if self.what == "logits":
            return logits
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


WHAT = pytest.mark.parametrize("what", ["logits", "loss", "own loss"])


def both(what, **config):
    """A stock model and a patched one, as modules of one tensor."""
    stock, ours = pair(**{"num_hidden_layers": 1, **config}, patching={})
    return Returns(stock.eval(), what), Returns(ours.eval(), what)


def exported(module, strict=False, dynamic=True):
    """A program that takes other numbers of rows and of tokens."""
    sizes = {"tokens": dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)} if dynamic else None
    return torch.export.export(module, (ids(**FIRST),), strict=strict, dynamic_shapes=sizes)


def assert_same(actual, expected, grad, tokens=None):
    """The same output for other shapes, and with gradients those of every parameter."""
    tokens = ids(**OTHER) if tokens is None else tokens
    results = [program(tokens) for program in (actual, expected)]
    torch.testing.assert_close(results[0], results[1], rtol=2e-5, atol=2e-5)
    assert results[0].requires_grad == results[1].requires_grad == grad
    if grad:
        assert_same_training(expected, actual, lambda program: program(tokens).square().mean())


@TRACED
@pytest.mark.parametrize(
    ("what", "grad", "strict"),
    [
        ("logits", True, False),
        ("logits", False, True),
        ("loss", True, True),
        ("loss", False, False),
        ("own loss", True, False),
    ],
)
def test_exported_program_equals_unpatched(what, grad, strict):
    """Outputs and gradients, for other sizes; the program holds the operators."""
    stock, ours = both(what)
    with torch.set_grad_enabled(grad):
        program = exported(ours, strict)
        assert any("liger_multi" in str(node.target) for node in program.graph.nodes)
        assert_same(program.module(), stock, grad)


def reloaded(save, load, program):
    """The program after it was in a file."""
    file = io.BytesIO()
    save(program, file)
    file.seek(0)
    return load(file)


@TRACED
def test_an_exported_program_is_saved_and_loaded():
    stock, ours = both("loss")
    program = reloaded(torch.export.save, torch.export.load, exported(ours))
    assert_same(program.module(), stock, grad=True)


@TRACED
@WHAT
def test_a_decomposed_program_runs_with_gradients_enabled(what):
    """Its operators are forwards, on parameters that require grad. A backward pass raises."""
    stock, ours = both(what)
    program = exported(ours, dynamic=False).run_decompositions().module()
    tokens = ids(**FIRST)
    result, expected = program(tokens), stock(tokens)
    torch.testing.assert_close(result, expected, rtol=2e-5, atol=2e-5)
    with pytest.raises(RuntimeError, match="before run_decompositions"):
        result.sum().backward()


@TRACED
@pytest.mark.parametrize("half", ["forward", "backward"])
def test_a_half_has_no_gradient(half):
    """What ``torch.ops`` offers is not differentiated by its inside, which may be anything."""
    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    y = ops.rms_norm(x, weight)  # its node keeps what it saved while somebody holds it
    rstd = next(t for t in y.grad_fn.saved_tensors if t.shape[-1:] != (8,))
    function = getattr(torch.ops.liger_multi, f"rms_norm_{half}")
    schema = function.default._schema
    known = {"x": x, "dy": torch.ones_like(x), "weight": weight, "rstd": rstd, "eps": 1e-6}
    known |= {"casting": "llama", "offset": 0.0}
    known |= {a.name: True for a in schema.arguments if str(a.type) == "bool"}
    outs = function(*[known[a.name] for a in schema.arguments])
    assert outs[0].requires_grad
    with pytest.raises(RuntimeError, match=f"rms_norm_{half} has no gradient"):
        outs[0].sum().backward()


@TRACED
@WHAT
@GRAD
def test_a_traced_model_is_stock_for_other_sizes(what, grad):
    """``torch.jit.trace`` records operators, so its own check passes and the file can be saved."""
    stock, ours = both(what)
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(ours, (ids(**FIRST),))
        assert "PythonOp" not in str(traced.inlined_graph)
        assert_same(reloaded(torch.jit.save, torch.jit.load, traced), stock, grad)


@TRACED
@pytest.mark.parametrize("model_type", ["gemma2", "glm4", "mixtral", "gpt_oss"])
def test_traced_models_of_other_types(model_type):
    """Soft caps, packed layers, experts."""
    stock, ours = (Returns(m.eval(), "logits") for m in pair(model_type, patching={}))
    tokens = ids(**FIRST)
    with torch.no_grad():
        traced = torch.jit.trace(ours, (tokens,), check_trace=False)
        torch.testing.assert_close(traced(tokens), stock(tokens), rtol=1e-4, atol=1e-4)


@TRACED
@GRAD
def test_trace_has_operators_not_backend_calls(grad):
    """A kernel is invisible to the tracer, which would record the buffer that it fills."""

    def function(x, weight):
        return ops.rms_norm(x, weight)

    def and_gradient(x, weight):
        return torch.autograd.grad(function(x, weight).square().sum(), (x, weight))

    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    with torch.set_grad_enabled(grad):
        graph = torch.jit.trace(function, (x, weight), check_trace=False).graph
    kinds = [node.kind() for node in graph.nodes()]
    assert "liger_multi::rms_norm" in kinds
    assert not {node_kind for node_kind in kinds if "empty" in node_kind or "rsqrt" in node_kind}
    if grad:
        graph = torch.jit.trace(and_gradient, (x, weight), check_trace=False).graph
        assert "liger_multi::rms_norm_backward" in [node.kind() for node in graph.nodes()]


@TRACED
def test_symbolic_tracing_runs_the_forwards_of_stock():
    """``torch.fx`` traces with proxies, which no operator takes."""
    stock, ours = both("logits", num_hidden_layers=2)
    x = torch.randn(2, 5, 32)
    for path in ("layers.0.mlp", "layers.1.input_layernorm", "norm"):
        traced = torch.fx.symbolic_trace(nn.Sequential(ours.model.model.get_submodule(path)))
        torch.testing.assert_close(traced(x), stock.model.model.get_submodule(path)(x))
    for module in (stock, ours):
        with pytest.raises(torch.fx.proxy.TraceError):
            torch.fx.symbolic_trace(module)
