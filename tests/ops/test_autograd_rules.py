"""Rules of autograd that every operator keeps: one derivative, tied arguments, in-place writes."""

import ast
import copy
import functools
import importlib
import itertools
import re
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import liger_multi
from liger_multi import errors, losses, ops
from liger_multi.dispatch.early_save import EarlySave
from liger_multi.dispatch.registry import operators
from liger_multi.errors import DoubleBackwardError
from liger_multi.losses.sources import tokens
from liger_multi.testing import FORMULAS, samples
from liger_multi.testing.checks import outputs
from tests import harness

WIDE = torch.float64
SMALL = [
    (op, s)
    for op in operators()
    for s in samples.of(op)
    if s.size == "small" and not s.options.get("inplace") and not harness.repeats_a_form(op, s)
]


def forms_of(all_of_them):
    """Samples, of which those that add nothing to the graph are slow, or left out."""
    for op, s in SMALL:
        slow = not harness.adds_to_a_graph(op, s)
        if all_of_them or not slow:
            yield pytest.param(op, s, marks=[pytest.mark.slow] if slow else [], id=f"{op}-{s.name}")


every_form = pytest.mark.parametrize(("op", "sample"), list(forms_of(True)))
main_forms = pytest.mark.parametrize(("op", "sample"), list(forms_of(False)))


def wide(sample):
    """Arguments in fp64, those that samples fix at fp32 included, but not codes and scales."""
    inputs = sample.make("cpu", WIDE)
    return {
        n: t.detach().to(WIDE).requires_grad_(t.requires_grad)
        if t.is_floating_point() and t.itemsize > 1 and not re.search("_scale$|^scales|^scale_", n)
        else t
        for n, t in inputs.items()
    }


def made_of(op, sample, function, *, leaves):
    """The sum of all outputs, and the tensors that need gradients as the function gets them."""
    inputs = wide(sample)
    if not leaves:  # what autograd finds through the function of another operation only
        inputs = {n: t * 1 if t.requires_grad else t for n, t in inputs.items()}
    result, _ = outputs(function(**inputs, **sample.options))
    total = sum(t.sum() for t in result.values() if t.requires_grad)
    return total, {n: t for n, t in inputs.items() if t.requires_grad}


def penalty_on(total, x):
    """The sum, and a penalty on its gradient by one tensor."""
    (gradient,) = torch.autograd.grad(total, x, create_graph=True, allow_unused=True)
    return total if gradient is None else total + gradient.pow(2).sum()


def derivative(value, x):
    (actual,) = torch.autograd.grad(value, x, allow_unused=True, retain_graph=True)
    return torch.zeros_like(x) if actual is None else actual


@every_form
@pytest.mark.parametrize(
    "leaves",
    [pytest.param(True, id="leaves", marks=pytest.mark.slow), pytest.param(False, id="results")],
)
def test_second_derivative(op, sample, leaves):
    """By any input and whatever the upstream gradient comes from, no number is silently wrong."""
    total, leaves_of = made_of(op, sample, functools.partial(samples.call, op), leaves=leaves)
    if not leaves_of or not isinstance(total, torch.Tensor):
        pytest.skip("nothing is differentiable")
    exact, right = made_of(op, sample, FORMULAS[op], leaves=leaves)
    for of in leaves_of:
        penalized = penalty_on(total, leaves_of[of])
        for by in leaves_of:
            try:
                actual = derivative(penalized, leaves_of[by])
            except errors.DoubleBackwardError:
                continue
            # the gradient does not depend on this input
            want = derivative(penalty_on(exact, right[of]), right[by])
            torch.testing.assert_close(actual, want)


@main_forms
def test_a_gradient_raises_by_its_upstream_gradient(op, sample):
    """``once_differentiable`` of PyTorch is silent where the tensors are named."""
    inputs = sample.make("cpu", WIDE)
    result, _ = outputs(samples.call(op, **inputs, **sample.options))
    smooth = [t for t in result.values() if t.requires_grad]
    leaves = [t for t in inputs.values() if t.requires_grad]
    if not smooth or not leaves:
        pytest.skip("nothing is differentiable")
    ups = [torch.ones_like(t, requires_grad=True) for t in smooth]
    gradients = torch.autograd.grad(smooth, leaves, ups, create_graph=True, allow_unused=True)
    total = sum(g.sum() for g in gradients if g is not None)
    for up in ups:
        with pytest.raises(errors.DoubleBackwardError, match=op):
            torch.autograd.grad(total, up, retain_graph=True, allow_unused=True)


@main_forms
def test_a_second_backward(op, sample):
    """The graph may be kept, and ``create_graph`` alone changes no bit."""
    total, inputs = made_of(op, sample, functools.partial(samples.call, op), leaves=True)
    if not inputs or not isinstance(total, torch.Tensor):
        pytest.skip("nothing is differentiable")
    actual = [
        torch.autograd.grad(total * 2.5, inputs.values(), allow_unused=True, **graph)
        for graph in ({"retain_graph": True}, {"create_graph": True})
    ]
    torch.testing.assert_close(*actual, rtol=0, atol=0)
    for gradient in actual[1]:
        if gradient is not None and 0 not in gradient.stride():
            gradient.mul_(2)  # not a view that nobody may write to


# --- functions that call operators ---


def head_loss(run):
    """A scalar, its hidden states and its weight."""
    hidden = torch.randn(6, 16, requires_grad=True)
    weight = torch.randn(11, 16, requires_grad=True)
    return run(hidden * 1, weight, torch.randint(11, (6,))), (hidden, weight)


def one_pass(h, w, t):
    return losses.sequence_loss(losses.Head(h[None], w), t[None])[0]


def kept_logits(h, w, t):
    return tokens(losses.Head(h, w, keep="64MiB"), t).log_prob.sum()


def tiled(h, w, t):
    layer = nn.Linear(16, 11, bias=False)
    layer.weight = nn.Parameter(w.detach())
    return liger_multi.nn.TiledMLP(nn.Sequential(nn.Tanh(), layer), 3)(h).sum() + w.sum()


FUNCTIONS = {
    "fused_linear_cross_entropy": ops.fused_linear_cross_entropy,
    "fused_linear_log_prob": lambda h, w, t: ops.fused_linear_log_prob(h, w, t).log_prob.sum(),
    "cross_entropy": lambda h, w, t: ops.cross_entropy(h @ w.t(), t),
    "cross_entropy, in place": lambda h, w, t: ops.cross_entropy(h @ w.t(), t, inplace=True),
    "one pass": one_pass,
    "kept logits": kept_logits,
    "TiledMLP": tiled,
}


@pytest.mark.parametrize("run", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_penalty_on_the_gradient_of_a_loss_raises(run):
    """The loss as it is, whose upstream gradient is a constant one."""
    loss, (hidden, weight) = head_loss(run)
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(errors.DoubleBackwardError, match="first derivatives only"):
        (loss + gradient.pow(2).sum()).backward(retain_graph=True)
    with pytest.raises(errors.DoubleBackwardError, match="first derivatives only"):
        torch.autograd.grad(loss + gradient.pow(2).sum(), weight if run is not tiled else hidden)


@pytest.mark.parametrize(
    "use",
    [
        lambda out: out.loss,
        lambda out: out.logits.logsumexp(-1).sum(),
        lambda out: out.logits.pow(2).mean(),
    ],
    ids=["loss", "reduction", "logits"],
)
def test_penalties_on_patched_models_raise_or_are_right(use):
    models = pytest.importorskip("tests.models")
    stock = models.build("llama", num_hidden_layers=1, attn_implementation="eager")
    ours = copy.deepcopy(stock)
    liger_multi.patch(ours, rms_norm=False, swiglu=False, rope=False)
    actual = []
    for model in (stock, ours):
        embedded = model.model.embed_tokens(models.batch()["input_ids"]).detach().requires_grad_()
        labels = models.batch()["labels"]
        try:
            value = use(model(inputs_embeds=embedded, labels=labels))
            (gradient,) = torch.autograd.grad(value, embedded, create_graph=True)
            (value + gradient.pow(2).sum()).backward()
        except errors.DoubleBackwardError:
            return
        actual.append(model.lm_head.weight.grad)
    torch.testing.assert_close(*actual, rtol=1e-4, atol=1e-6)


def test_sums_over_processes_raise(tmp_path):
    import torch.distributed as dist

    from liger_multi.nn import vocab_parallel

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        for function in (vocab_parallel._sum, vocab_parallel._shared):
            x = torch.randn(3, requires_grad=True)
            (gradient,) = torch.autograd.grad(function(x, None).pow(2).sum(), x, create_graph=True)
            with pytest.raises(errors.DoubleBackwardError, match="vocab_parallel"):
                torch.autograd.grad(gradient.sum(), x)
    finally:
        dist.destroy_process_group()


def test_no_function_of_autograd_is_left_out():
    """Every new ``autograd.Function`` has to decide what its second derivative is."""
    package = Path(liger_multi.__file__).parent
    left = set()
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            bases = [ast.unparse(b) for b in getattr(node, "bases", [])]
            if any(b.endswith("autograd.Function") for b in bases):
                text = ast.unparse(node)
                if "@first_derivatives_only(" not in text:
                    left.add(f"{path.relative_to(package).as_posix()}:{node.name}")
    inert = {  # nothing is computed in them, or nobody trains with them
        "bench/peers.py:_QuackLayerNorm",
        "bench/peers.py:_Products",
        "bench/measure.py:Identity",
        "compat/liger_kernel/preference.py:_Sealed",
        "memory/planning/shapes.py:_Product",
        "memory/simulation.py:_Attention",
        "ops/linear_float8.py:_LinearFloat8",
    }
    # these mark their gradients themselves, or return those that they get
    differentiable = {
        "compat/liger_kernel/bases.py:_EagerGradients",
        "dispatch/early_save.py:_Result",
        "patching/float8/weight.py:_Master",
        "patching/head/reductions.py:_Connected",
        "patching/head/storage.py:_Connect",
        "patching/head/storage.py:_Through",
        "patching/shards.py:_Exchange",
        "patching/shards.py:_Gather",
        "patching/shards.py:_Keys",
        "patching/shards.py:_Sum",
    }
    assert left == inert | differentiable | {"dispatch/autograd.py:_Raises"}


# --- one tensor in several arguments ---

REPORTED = ("attention", "fused_add_rms_norm", "gated_mlp", "gated_rms_norm", "rope", "swiglu")


def tied_results(op, sample, a, b, run):
    """Outputs and gradients where one tensor is both arguments."""
    inputs = wide(sample)
    inputs[b] = inputs[a]
    result, _ = outputs(run(**inputs, **sample.options))
    total = sum((t * torch.linspace(0.5, 1.5, t.numel()).view_as(t)).sum() for t in result.values())
    leaves = {id(t): t for t in inputs.values() if t.requires_grad}
    return [*result.values(), *torch.autograd.grad(total, leaves.values(), allow_unused=True)]


def tied_arguments(op):
    """Pairs of arguments that may be one tensor, each with the results of the operator."""
    visited = set()
    for sample in samples.of(op):
        if sample.size != "small" or sample.options.get("inplace"):
            continue
        smooth = [(n, t) for n, t in sample.tensors.items() if t.grad and not t.classes]
        for (a, x), (b, y) in itertools.combinations(smooth, 2):
            if (a, b) in visited or len(x.shape) != len(y.shape):
                continue
            try:
                actual = tied_results(op, sample, a, b, functools.partial(samples.call, op))
            except (IndexError, TypeError, ValueError):  # of other sizes than this argument needs
                continue
            visited.add((a, b))
            yield sample, a, b, actual


@pytest.mark.parametrize("op", [n for n in operators() if n == samples.public(n)])
def test_one_tensor_in_two_arguments(op):
    pairs = list(tied_arguments(op))
    assert pairs or op not in REPORTED
    for sample, a, b, results in pairs:
        right = tied_results(op, sample, a, b, FORMULAS[op])
        torch.testing.assert_close([*results], [*right], rtol=1e-6, atol=1e-8)


# --- what inplace=True overwrites ---

LABELS = torch.tensor([1, 5, 0, 7])


def overwriting(x):
    return ops.cross_entropy(x, LABELS, inplace=True)


def diverging(divergence):
    form = {"form": "logits", "teacher_form": "logits", "inplace": True}
    return lambda x: divergence(x, torch.randn(4, 8), **form)


in_place = pytest.mark.parametrize(
    "loss",
    [overwriting, *(diverging(f) for f in (ops.kl_div, ops.jsd, ops.tvd))],
    ids=["cross_entropy", "kl_div", "jsd", "tvd"],
)


class Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy


@in_place
@pytest.mark.parametrize(
    "view",
    [
        lambda p: p.view(4, 8),
        lambda p: p[:32].view(4, 8),
        lambda p: p.view(2, 16).view(4, 8),
        lambda p: Passed.apply(p).view(4, 8),
        lambda p: p.detach().requires_grad_().view(4, 8),
        lambda p: p.as_strided((4, 8), (8, 1)),
    ],
    ids=["view", "slice", "views", "function", "alias", "strides"],
)
def test_a_view_of_a_parameter_is_not_overwritten(loss, view):
    parameter = torch.randn(32, requires_grad=True)
    before = parameter.detach().clone()
    with pytest.raises(ValueError, match="a view of a leaf Variable that requires grad"):
        loss(view(parameter))
    assert torch.equal(parameter, before)


@in_place
def test_a_view_made_without_grad_is_not_overwritten(loss):
    for x in (torch.randn(32, requires_grad=True), torch.randn(32, requires_grad=True) * 1):
        before = x.detach().clone()
        with torch.no_grad():
            view = x.view(4, 8)
        with pytest.raises(ValueError, match="got a leaf"):
            loss(view.requires_grad_())
        assert torch.equal(x, before)


@in_place
@pytest.mark.parametrize(
    "shared",
    [
        lambda x: x[:1, :8].expand(4, 8),
        lambda x: x.flatten()[:12].as_strided((4, 8), (1, 1)),
        lambda x: x.flatten()[:11].unfold(0, 8, 1),
        lambda x: x.flatten()[:20].unfold(0, 8, 4),
    ],
    ids=["expanded", "strides", "windows", "half-windows"],
)
def test_elements_that_share_memory_are_refused(loss, shared):
    x = torch.randn(4, 16, requires_grad=True) * 1
    with pytest.raises(ValueError, match="stored once each"):
        loss(shared(x))


@in_place
@pytest.mark.parametrize(
    "part", [lambda x: x[:, ::2], lambda x: x[:, 8:], lambda x: x.view(8, 8)[::2]]
)
def test_elements_that_stand_apart_are_overwritten(loss, part):
    h = torch.randn(4, 16, requires_grad=True)
    actual = []
    for copied in (True, False):
        torch.manual_seed(0)
        x = part(h * 1)
        (gradient,) = torch.autograd.grad(loss(x.clone() if copied else x), h)
        actual.append(gradient)
    torch.testing.assert_close(*actual)


@in_place
@pytest.mark.parametrize(
    "reader",
    [
        lambda x: x.pow(2).sum(),
        lambda x: x.view(2, 16).exp().pow(2).sum() + x.view(2, 16).pow(2).sum(),
        lambda x: ops.softmax(x).sum() + ops.swiglu(x, x).sum(),
    ],
    ids=["tensor", "view", "operator"],
)
def test_whoever_saved_what_was_overwritten_raises(loss, reader):
    """A second backward of the loss, too."""
    x = torch.randn(4, 8, requires_grad=True) * 1
    other = reader(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss(x) + other).backward()
    value = loss(torch.randn(4, 8, requires_grad=True) * 1)
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


@in_place
def test_tensors_of_inference_mode_are_not_overwritten(loss):
    with torch.inference_mode():
        x = torch.randn(4, 8)
    before = x.clone()
    loss(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("op", ["kl_div", "jsd", "tvd"])
def test_teacher_in_memory_of_student_is_not_overwritten(op):
    """The permission is not used: kernels read rows of the teacher while others are written."""
    both = torch.randn(7, 40, requires_grad=True) * 1
    before = both.detach().clone()
    form = {"form": "logits", "teacher_form": "logits"}
    getattr(ops, op)(both[:6], both.detach()[1:], **form, inplace=True)
    assert torch.equal(both, before)
    apart = torch.randn(12, 40, requires_grad=True) * 1  # one batch of both, without an overlap
    before = apart.detach().clone()
    getattr(ops, op)(apart[:6], apart.detach()[6:], **form, inplace=True)
    assert not torch.equal(apart[:6], before[:6])
    assert torch.equal(apart[6:], before[6:])


def test_gradient_of_empty_input_with_unused_output():
    """None stands for an input that no upstream gradient reaches, and not for one without rows."""
    x, residual = (torch.randn(0, 3, 8, requires_grad=True) for _ in range(2))
    weight = torch.randn(8, requires_grad=True)
    for out in ops.fused_add_rms_norm(x, residual, weight):
        grads = torch.autograd.grad(out.sum(), (x, residual), retain_graph=True)
        assert [g.shape for g in grads] == [x.shape, x.shape]


# --- what backward reads is kept before the rest is computed ---


def mlp(trained=True):
    torch.manual_seed(0)
    return [
        (torch.randn(a, b) * b**-0.5).requires_grad_(trained)
        for a, b in ((48, 32),) * 2 + ((32, 48),)
    ]


def lora():
    torch.manual_seed(1)
    shapes = ((4, 32), (48, 4)) * 2 + ((4, 48), (32, 4))
    return [(torch.randn(s) * 0.2).requires_grad_() for s in shapes]


WEIGHTS, FROZEN, THIN = mlp(), mlp(False), lora()
LORAS = [ops.LoRA(a, b) for a, b in zip(THIN[::2], THIN[1::2], strict=True)]
CALLS = {
    "gated_mlp_float8": (lambda x: ops.gated_mlp_float8(x, *WEIGHTS), WEIGHTS),
    "lora_mlp": (lambda x: ops.lora_mlp(x, *FROZEN, *LORAS), THIN),
}
every_call = pytest.mark.parametrize("name", CALLS)


def inputs(grad=True):
    torch.manual_seed(2)
    return torch.randn(2, 5, 32).requires_grad_(grad)


def counted(monkeypatch):
    """How often each of the two functions of an operator ran."""
    counts = {"first": 0, "rest": 0}
    call = EarlySave.__call__

    def spy(early, *args):
        if not hasattr(early, "counts"):
            rest = early._finish

            def again(*args):
                counts["rest"] += 1
                return rest(*args)

            monkeypatch.setattr(early, "_finish", again)
            monkeypatch.setattr(early, "counts", True, raising=False)
        counts["first"] += 1
        return call(early, *args)

    monkeypatch.setattr(EarlySave, "__call__", spy)
    return counts


AFTER = {"nothing": lambda y: y, "what adds": lambda y: y + 1, "what reads": torch.sin}


@every_call
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("grad", [True, False], ids=["x", "weights alone"])
def test_early_save_gradients_under_checkpointing(name, after, grad, monkeypatch):
    """The rest runs again only where its result is read."""
    call, weights = CALLS[name]
    run = lambda x: AFTER[after](call(x))  # noqa: E731
    x = inputs(grad)
    leaves = [x, *weights] if grad else weights
    expected = run(x)
    exact = torch.autograd.grad(expected.square().sum(), leaves)
    counts = counted(monkeypatch)
    y = checkpoint(run, x, use_reentrant=False)
    assert torch.equal(y, expected)
    gradients = torch.autograd.grad(y.square().sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(gradients, exact, strict=True))
    assert counts == {"first": 2, "rest": 2 if after == "what reads" else 1}


@every_call
def test_a_second_backward_and_no_early_stop(name):
    call, weights = CALLS[name]
    x = inputs()
    exact = torch.autograd.grad(call(x).sum(), weights)
    y = checkpoint(call, x, use_reentrant=False)
    for _ in range(2):
        gradients = torch.autograd.grad(y.sum(), weights, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(gradients, exact, strict=True))
    with set_checkpoint_early_stop(False):
        y = checkpoint(call, x, use_reentrant=False)
    gradients = torch.autograd.grad(y.sum(), weights)
    assert all(torch.equal(a, b) for a, b in zip(gradients, exact, strict=True))


@every_call
def test_double_backward_raises(name):
    call, _ = CALLS[name]
    x = inputs()
    y = checkpoint(call, x, use_reentrant=False)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(DoubleBackwardError):
        dx.sum().backward()


@every_call
def test_nobody_asks_for_gradients(name):
    call, _ = CALLS[name]
    x = inputs(False)
    with torch.no_grad():
        expected = call(x)
        assert torch.equal(checkpoint(call, x, use_reentrant=False), expected)


@every_call
def test_early_save_handover_per_thread(name, monkeypatch):
    """Two threads are between the two functions of an operator at once."""
    call, _ = CALLS[name]
    xs = [torch.randn(3 + i, 32) for i in range(2)]
    expected = [call(x) for x in xs]
    early, both = importlib.import_module(f"liger_multi.ops.{name}")._early, threading.Barrier(2)
    first = early._function.apply
    together = types.SimpleNamespace(apply=lambda *args: (first(*args), both.wait(30))[0])
    monkeypatch.setattr(early, "_function", together)
    with ThreadPoolExecutor(2) as pool:
        actual = pool.map(lambda x: checkpoint(call, x, use_reentrant=False), xs)
        assert all(map(torch.equal, actual, expected))
