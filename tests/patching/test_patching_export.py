"""Programs made of patched models: ``torch.export``, ``torch.jit.trace``, ``torch.fx``."""

import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import liger_multi
from liger_multi import ops
from tests.comparing import assert_same_gradients, gradients
from tests.models import VOCABULARY, pair

# the tracer warns of every comparison of shapes, in transformers and here
pytestmark = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")

GRAD = pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
FIRST = {"rows": 2, "length": 9}
OTHER = {"rows": 4, "length": 33}


def ids(rows, length):
    """Token ids without padding."""
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
    stock, ours = pair(**config)
    liger_multi.patch(ours)
    return Returns(stock.eval(), what), Returns(ours.eval(), what)


def exported(module, strict=False, dynamic=True):
    """A program that takes other numbers of rows and of tokens."""
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} if dynamic else None
    shapes = {"tokens": sizes} if dynamic else None
    return torch.export.export(module, (ids(**FIRST),), strict=strict, dynamic_shapes=shapes)


def assert_same(found, wanted, grad):
    """The same output for other shapes, and with gradients those of every parameter."""
    tokens = ids(**OTHER)
    results = [program(tokens) for program in (found, wanted)]
    torch.testing.assert_close(results[0], results[1], rtol=2e-5, atol=2e-5)
    assert results[0].requires_grad == results[1].requires_grad == grad
    if grad:
        for program, result in zip((found, wanted), results, strict=True):
            program.zero_grad()
            (result.square().mean() if result.ndim else result).backward()
        assert_same_gradients(gradients(found), gradients(wanted))


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
def test_an_exported_program_is_that_of_stock(what, grad, strict):
    """Outputs and gradients, for other sizes; the program holds the operators."""
    stock, ours = both(what)
    with torch.set_grad_enabled(grad):
        program = exported(ours, strict)
        assert any("liger_multi" in str(node.target) for node in program.graph.nodes)
        assert_same(program.module(), stock, grad)


def test_an_exported_program_is_saved_and_loaded():
    """As any other."""
    stock, ours = both("loss")
    file = io.BytesIO()
    torch.export.save(exported(ours), file)
    file.seek(0)
    assert_same(torch.export.load(file).module(), stock, grad=True)


@WHAT
def test_a_decomposed_program_runs_with_gradients_enabled(what):
    """Its operators are forwards, on parameters that require grad. A backward pass raises."""
    stock, ours = both(what)
    program = exported(ours, dynamic=False).run_decompositions().module()
    tokens = ids(**FIRST)
    result, wanted = program(tokens), stock(tokens)
    torch.testing.assert_close(result, wanted, rtol=2e-5, atol=2e-5)
    with pytest.raises(RuntimeError, match="before run_decompositions"):
        result.sum().backward()


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_a_half_has_no_gradient(half):
    """What ``torch.ops`` offers is not differentiated by its inside, which may be anything."""
    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    y = ops.rms_norm(x, weight)  # its node keeps what it saved while somebody holds it
    rstd = next(t for t in y.grad_fn.saved_tensors if t.shape[-1:] != (8,))
    schema = getattr(torch.ops.liger_multi, f"rms_norm_{half}").default._schema
    known = {"x": x, "dy": torch.ones_like(x), "weight": weight, "rstd": rstd, "eps": 1e-6}
    known |= {"casting": "llama", "offset": 0.0}
    known |= {a.name: True for a in schema.arguments if str(a.type) == "bool"}
    outs = getattr(torch.ops.liger_multi, f"rms_norm_{half}")(
        *[known[a.name] for a in schema.arguments]
    )
    assert outs[0].requires_grad
    with pytest.raises(RuntimeError, match=f"rms_norm_{half} has no gradient"):
        outs[0].sum().backward()


@WHAT
@GRAD
def test_a_traced_model_is_stock_for_other_sizes(what, grad):
    """``torch.jit.trace`` records operators, so its own check passes and the file can be saved."""
    stock, ours = both(what)
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(ours, (ids(**FIRST),))
        assert "PythonOp" not in str(traced.inlined_graph)
        file = io.BytesIO()
        torch.jit.save(traced, file)
        file.seek(0)
        assert_same(torch.jit.load(file), stock, grad)


@pytest.mark.parametrize("kind", ["gemma2", "glm4", "mixtral", "gpt_oss"])
def test_traced_models_of_other_types(kind):
    """Soft caps, packed layers, experts."""
    stock, ours = pair(kind)
    liger_multi.patch(ours)
    module = Returns(ours.eval(), "logits")
    tokens = ids(**FIRST)
    with torch.no_grad():
        traced = torch.jit.trace(module, (tokens,), check_trace=False)
        wanted = Returns(stock.eval(), "logits")(tokens)
        torch.testing.assert_close(traced(tokens), wanted, rtol=1e-4, atol=1e-4)


@GRAD
def test_a_trace_holds_operators_and_not_what_a_backend_does(grad):
    """A kernel is invisible to the tracer, which would record the buffer that it fills."""

    def function(x, weight):
        return ops.rms_norm(x, weight)

    def and_gradient(x, weight):
        y = function(x, weight)
        return torch.autograd.grad(y.square().sum(), (x, weight))

    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    with torch.set_grad_enabled(grad):
        graph = torch.jit.trace(function, (x, weight), check_trace=False).graph
    kinds = [node.kind() for node in graph.nodes()]
    assert "liger_multi::rms_norm" in kinds
    assert not {kind for kind in kinds if "empty" in kind or "rsqrt" in kind}
    if grad:
        graph = torch.jit.trace(and_gradient, (x, weight), check_trace=False).graph
        assert "liger_multi::rms_norm_backward" in [node.kind() for node in graph.nodes()]


def test_symbolic_tracing_runs_the_forwards_of_stock():
    """``torch.fx`` traces with proxies, which no operator takes."""
    stock, ours = both("logits")
    x = torch.randn(2, 5, 32)
    for path in ("layers.0.mlp", "layers.1.input_layernorm", "norm"):
        traced = torch.fx.symbolic_trace(nn.Sequential(ours.model.model.get_submodule(path)))
        torch.testing.assert_close(traced(x), stock.model.model.get_submodule(path)(x))
    for module in (stock, ours):
        with pytest.raises(torch.fx.proxy.TraceError):
            torch.fx.symbolic_trace(module)
