"""Logits are lazy only while nobody holds real ones: writes, views and hooks by every route."""

import functools
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from liger_multi.patching import patch, real_logits
from liger_multi.patching.head.loss import SWAPS
from liger_multi.patching.head.protocol import LazyLogits
from liger_multi.patching.head.steps import is_view
from liger_multi.patching.head.traced import ReplicaLogits
from tests.models import VOCABULARY, assert_same_training, batch, pair, patched_copy
from tests.sweep.cases import build, inputs, registered

IDS = batch()["input_ids"]

swapped = pytest.mark.skipif(not SWAPS, reason="lazy logits stay lazy before PyTorch 2.11")
WRITES = {
    "setitem": lambda z: z.__setitem__((..., slice(50)), -1e9),
    "masked_fill_": lambda z: z.masked_fill_(torch.arange(VOCABULARY) < 50, -3.0),
    "div_": lambda z: z.div_(2),
    "clamp_": lambda z: z.clamp_(-0.1, 0.1),
    "copy_": lambda z: z.copy_(z.detach() * torch.linspace(0, 1, VOCABULARY)),
    "slice of the vocabulary": lambda z: z[..., :50].fill_(-3),
    "select": lambda z: z.select(-1, 3).fill_(9.0),
    "narrow": lambda z: z.narrow(-1, 0, 9).zero_(),
    "flat view": lambda z: z.view(-1).mul_(3),
    "view of rows": lambda z: z.view(-1, VOCABULARY).mul_(3),
    "squeeze": lambda z: z.squeeze().mul_(2),
    "mT": lambda z: z.mT.mul_(2),
    "data": lambda z: z.data.mul_(2),
    "relu": lambda z: F.relu(z, inplace=True),
    "hardtanh": lambda z: F.hardtanh(z, inplace=True),
    "foreach": lambda z: torch._foreach_mul_([z], 2),
    "numpy": lambda z: np.multiply(z.detach().numpy(), 2, out=z.detach().numpy()),
    "real_logits": lambda z: real_logits(z).mul_(2),
    "overload": lambda z: torch.ops.aten.mul_.Tensor(z, torch.tensor(2.0)),
    "imul": lambda z: z.__imul__(2),
    "detached": lambda z: z.detach().mul_(2),
    "contiguous": lambda z: z.contiguous().mul_(2),
    "hook": lambda z: z.register_hook(lambda g: g * 2),
}


def loss_of(logits):
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), IDS.reshape(-1))


@pytest.fixture
def models():
    stock, ours = pair("llama", num_hidden_layers=1)  # compiled often; the head is in question
    patch(ours)
    return stock, ours


def logits_of(model):
    return model(input_ids=IDS).logits


def reader(models, compiled):
    """From a model to its logits, of which the patched one may be compiled."""
    inner = torch.compile(models[1], backend="eager") if compiled else models[1]
    return lambda model: logits_of(inner if model is models[1] else model)


def assert_same_use(models, use, compiled=False):
    """A loss of the logits, and all gradients, are those of the unpatched model."""
    read = reader(models, compiled)
    assert_same_training(*models, lambda model: use(read(model)))


eager_and_compiled = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


@pytest.mark.parametrize("name", ["setitem", "masked_fill_", "div_", "view of rows", "data"])
def test_writes_inside_of_a_compiled_step(models, name):
    def run(model):
        z = logits_of(model)
        WRITES[name](z)
        return loss_of(z)

    compiled = torch.compile(run, backend="eager")
    assert_same_training(*models, lambda m: (compiled if m is models[1] else run)(m))


READS = {
    "cross entropy": loss_of,
    "rows": lambda z: z[:, :-1],
    "method of its own": lambda z: (z.norm() + 2**z).sum(),
    "attributes": lambda z: z.sum() * z.ndim if z.requires_grad else z,
    "transpose": lambda z: z.mT @ z,
    "norm and hook": lambda z: (z.register_hook(lambda g: 3 * g), z.square())[1],
    "loop": lambda z: sum(row.square().sum() for row in z),
}


def _augmented(operation):
    """A function that assigns with an operator."""
    space = {}
    exec(f"def function(z):\n    z {operation}= 2\n    return z", space)
    return space["function"]


def _returned(write):
    def function(z):
        write(z)
        return z

    return function


GIVEN = {
    **READS,
    **{f"{operation}=": _augmented(operation) for operation in ("+", "-", "*", "/", "%", "**")},
    **{name: _returned(write) for name, write in WRITES.items() if name != "numpy"},
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_compiled_function_takes_the_logits_of_an_eager_model(models, name):
    """It breaks its graph where it uses them, and Dynamo warns of nothing."""
    if name in ("mT", "data") and not SWAPS:
        pytest.skip("before PyTorch 2.11 a guard reads it of logits that stay lazy, which raises")
    compiled = torch.compile(GIVEN[name], backend="eager")

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo")
        assert_same_use(models, lambda z: compiled(z).square().mean())


SAME = {
    "float": lambda z: z.float(),
    "to": lambda z: z.to(torch.float32),
    "type_as": lambda z: z.type_as(torch.ones(1)),
    "contiguous": lambda z: z.contiguous(),
}


@eager_and_compiled
@pytest.mark.parametrize("name", SAME)
def test_no_op_returns_its_input(models, name, compiled):
    """With its history, under ``no_grad`` as well."""

    def use(z):
        with torch.no_grad():
            same = SAME[name](z)
        assert same is z or (name, compiled) == ("type_as", True)  # which reads them
        return loss_of(same)

    assert_same_use(models, use, compiled)


CHECKPOINTED = {
    "read": lambda z: z.sin().mean(),
    "loss": loss_of,
    "log_softmax": lambda z: F.log_softmax(z, -1)[..., 0].mean(),
    "saved": lambda z: (z * z.exp()).sum(-1).mean(),
}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_a_checkpointed_function_may_read_logits(models, name, parts):
    """What they need for backward is saved as by the head, outside of the checkpoint."""

    def use(z):
        pieces = [z] if parts == 1 or name == "loss" else z.split(1)
        return sum(checkpoint(CHECKPOINTED[name], p, use_reentrant=False) for p in pieces)

    assert_same_use(models, use)


@pytest.mark.slow
@eager_and_compiled
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_weights_frozen_after_the_forward_pass(models, name, trained, compiled):
    """The head has the gradient that it has where its forward pass was the whole computation."""
    read = reader(models, compiled)

    def run(model):
        weight = model.lm_head.weight.requires_grad_(trained)
        z = read(model)
        weight.requires_grad_(not trained)
        loss = CHECKPOINTED[name](z)
        assert weight.requires_grad is not trained
        return loss

    assert_same_training(*models, run)


def _of_half_the_input(forward):
    return lambda hidden: forward(hidden / 2) * 3


def _without_a_class(forward):
    def masked(hidden):
        logits = forward(hidden)
        logits[..., 0] = -1e4
        return logits

    return masked


@eager_and_compiled
@pytest.mark.parametrize("around", [_of_half_the_input, _without_a_class])
def test_wrapped_forward_of_the_head(models, around, compiled):
    """After the patch; what is computed later does not pass by it a second time."""
    for model in models:
        model.lm_head.forward = around(model.lm_head.forward)
    read = reader(models, compiled)
    for use in (loss_of, lambda z: loss_of(z) + z.logsumexp(-1).mean() + z.sin().mean()):
        assert_same_training(*models, lambda model, use=use: use(read(model)))


def test_accelerate_hook_changes_inputs_and_outputs(models):
    """It stands around the forward, and has acted once when the loss is computed."""
    hooks = pytest.importorskip("accelerate.hooks")

    class Scaled(hooks.ModelHook):
        def pre_forward(self, module, hidden):
            return (hidden / 2,), {}

        def post_forward(self, module, output):
            return output + 1

    for model in models:
        hooks.add_hook_to_module(model.lm_head, Scaled())
    for use in (loss_of, lambda z: z.sin().mean()):
        assert_same_use(models, use)


class OwnProduct(torch.Tensor):
    """A weight that multiplies in its own way, as those of quantized layers do."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result if function is not F.linear else 2 * result.as_subclass(torch.Tensor)


@pytest.mark.parametrize("grad", [False, True])
def test_weight_with_custom_matmul(models, grad):
    """It came after the patch: torchao quantizes a layer by another weight."""
    for model in models:
        weight = model.lm_head.weight.detach().as_subclass(OwnProduct)
        model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    with torch.set_grad_enabled(grad):
        losses = [model(input_ids=IDS, labels=IDS).loss for model in models]
        logits = [logits_of(model) for model in models]
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(logits[1], logits[0])
    assert type(logits[1]) is torch.Tensor


def test_attributes_set_on_logits_are_kept(models):
    """A tensor that becomes real keeps what somebody wrote on it."""
    for read in (lambda z: z.sin(), lambda z: z.mul_(2), lambda z: real_logits(z)):
        z = logits_of(models[1])
        z.note = "mine"
        read(z)
        assert z.note == "mine"


@pytest.mark.parametrize("name", ["setitem", "masked_fill_", "div_", "flat view", "data", "hook"])
def test_replicas_of_data_parallel_see_writes_as_well(models, name):
    """Their logits are the objects of compiled models."""
    models[1].lm_head._is_replica = True

    def run(model):
        z = logits_of(model)
        assert isinstance(z, ReplicaLogits) == (model is models[1])
        WRITES[name](z)
        return loss_of(z)

    assert_same_training(*models, run)


def swept(name, dtype=torch.float32):
    """A tiny pair of this type, stock and patched, with a batch."""
    pair = next(p for p in registered() if p.name == name)
    stock = build(pair).to(dtype).eval()
    ours = patched_copy(stock)
    arguments = {
        k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in inputs(pair, stock).items()
    }
    return stock, ours, arguments


@pytest.mark.slow
def test_compiled_model_masking_its_logits():
    """Chameleon writes to the logits of image tokens in its forward."""
    stock, ours, inputs = swept("chameleon/ChameleonForConditionalGeneration")
    for model in (ours, torch.compile(ours, backend="eager")):
        loss, expected = model(**inputs).loss, stock(**inputs).loss
        torch.testing.assert_close(loss, expected, rtol=2e-5, atol=0)


@pytest.mark.parametrize(
    "name",
    [
        "bert/BertForMaskedLM",
        "t5/T5ForConditionalGeneration",
        "whisper/WhisperForCausalLM",
    ],
)
def test_loss_of_logits_without_upcast(name):
    """Its dtype is that of the model."""
    stock, ours, inputs = swept(name, torch.bfloat16)
    expected, got = stock(**inputs).loss, ours(**inputs).loss
    assert got.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def _rows_with_gaps(z):
    y = z[..., :-1, :].contiguous()
    y.mul_(2)
    return y.pow(2).mean() + loss_of(z)


def _two_views(z):
    a, b = z[:, 1:], z[:, :-1]
    a[..., 3:9] = 5.0
    return b.pow(2).mean() + loss_of(z)


def _made_before_the_write(z):
    view, copied = z[:, :-1], z * 2
    view[..., :9] = 3.0
    return loss_of(z) + loss_of(copied) + view.pow(2).mean()


def _overwritten_index(z):
    mask = torch.arange(11).expand(2, 11) > 4
    with torch.no_grad():
        rows = z[mask]
        mask = mask.fill_(False) if mask.is_contiguous() else mask
    return rows.pow(2).mean() + loss_of(z)


def _without_gradients(z):
    with torch.no_grad():
        scaled, view = z * 2, z[:, :]
    return loss_of(z) + loss_of(scaled) + loss_of(view)


def _hook_after_a_copy(z):
    scaled = z * 2
    z.register_hook(lambda g: g * 3)
    return loss_of(scaled)


PROGRAMS = {
    f.__name__.strip("_"): f
    for f in (
        _rows_with_gaps,
        _two_views,
        _made_before_the_write,
        _overwritten_index,
        _without_gradients,
        _hook_after_a_copy,
    )
}


@eager_and_compiled
@pytest.mark.parametrize("name", PROGRAMS)
def test_views_and_copies_are_those_of_real_logits(models, name, compiled):
    if compiled and name == "hook_after_a_copy":
        pytest.skip("a copy of logits of a compiled model is computed before the hook")
    assert_same_use(models, PROGRAMS[name], compiled)


def test_a_view_of_rows_with_gaps_is_refused_as_stock_does(models):
    for model in models:
        z = logits_of(model)[:, :-1]
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            z.view(-1, VOCABULARY)
        assert not z.is_contiguous()
        assert z.stride() == (11 * VOCABULARY, VOCABULARY, 1)


class Scale(torch.autograd.Function):
    """Scales gradients; ``how`` tells what forward returns."""

    @staticmethod
    def forward(ctx, x, how):
        return how(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.1, None


HOW = {
    "clone": lambda x: x.clone(),
    "times one": lambda x: x * 1.0,
    "view_as": lambda x: x.view_as(x),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_the_backward_of_somebody_elses_function_runs(how, tied):
    stock, ours = pair("llama", tied=tied, patching={})
    assert_same_training(stock, ours, lambda m: loss_of(Scale.apply(logits_of(m), HOW[how])))


class Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x * x).mean()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad / x.numel()


@swapped
def test_a_function_gets_logits_as_they_are_when_it_is_called(models):
    def use(z):
        z[..., :9].mul_(2)
        return Save.apply(z) + loss_of(z)

    assert_same_use(models, use)
    for model in models:
        z = logits_of(model)
        loss = Save.apply(z)
        z.mul_(2)
        with pytest.raises(RuntimeError, match="modified"):
            loss.backward()


@pytest.mark.slow
def test_a_function_refuses_the_object_of_a_compiled_model(models):
    with pytest.raises(RuntimeError, match="are no tensor"):
        Save.apply(logits_of(torch.compile(models[1], backend="eager")))
    assert_same_use(models, lambda z: Save.apply(real_logits(z)), compiled=True)

    def step(model):
        return loss_of(Scale.apply(logits_of(model), HOW["times one"]))

    with pytest.raises(RuntimeError, match="are no tensor"):
        torch.compile(step, backend="eager")(models[1])


class InputsApart(torch.autograd.Function):
    """Any number of arguments, and no context in forward."""

    @staticmethod
    def forward(*tensors):
        return tensors[0] * 2.0

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Wrapped(torch.autograd.Function):
    """The forward that PyTorch calls is another function's, which calls this one."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x):
        return x * 2.0

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.mark.parametrize("function", [InputsApart, Wrapped])
def test_every_form_of_function_refuses_compiled_logits(models, function):
    z = logits_of(torch.compile(models[1], backend="eager"))
    with pytest.raises(RuntimeError, match="are no tensor"):
        function.apply(z)
    with torch.no_grad():
        assert not (z * 2.0).requires_grad  # the same operation elsewhere


@pytest.mark.parametrize("name", ["register_hook", "retain_grad"])
@pytest.mark.parametrize("read", [False, True])
def test_a_hook_after_the_loss_is_refused(models, name, read):
    z = logits_of(models[1])
    loss = loss_of(z)
    if read:
        real_logits(z)
    put = functools.partial(z.register_hook, print) if name == "register_hook" else z.retain_grad
    with pytest.raises(RuntimeError, match=f"{name} puts a hook on logits"):
        put()
    with pytest.raises(RuntimeError, match="gradient by logits"):
        torch.autograd.grad(loss, z, allow_unused=True)


def test_cpp_sees_no_missing_storage(models):
    with torch.no_grad():
        logits = logits_of(models[0])
        for entry in (torch.utils.dlpack.to_dlpack, lambda z: z.as_subclass(torch.Tensor)):
            z = logits_of(models[1])
            with pytest.raises(RuntimeError):
                entry(z)
        for entry in (
            torch.from_dlpack,
            np.asarray,
            lambda z: z.share_memory_(),
            lambda z: torch.frombuffer(z.numpy(), dtype=torch.float32).view(logits.shape),
        ):
            got = torch.as_tensor(entry(logits_of(models[1])))
            torch.testing.assert_close(got, logits, rtol=1e-5, atol=1e-5)
        assert logits_of(models[1]).data_ptr()


@swapped
def test_real_logits_are_the_same_object_and_plain(models):
    z = logits_of(models[1])
    held = {"logits": z, "row": z[0]}
    assert type(z) is LazyLogits
    assert real_logits(z) is z
    assert type(z) is torch.Tensor
    assert type(held["row"]) is torch.Tensor
    assert held["row"]._base is z


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"cross_entropy": True}])
def test_a_loss_has_the_dtype_of_stock(dtype, autocast, options):
    stock, ours = pair("llama", dtype=dtype, patching=options)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        for widen in (False, True):
            losses = [loss_of(z.float() if widen else z) for z in map(logits_of, (stock, ours))]
            assert losses[1].dtype == losses[0].dtype
        expected, got = (loss_of(z.mul(1.0).clone()) for z in map(logits_of, (stock, ours)))
        assert got.dtype == expected.dtype


def test_autocast_of_the_reading_changes_nothing(models):
    stock, ours = models
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, got = logits_of(stock), logits_of(ours)
        logits, got = logits.log_softmax(-1), got.log_softmax(-1)
    assert got.dtype == logits.dtype
    assert real_logits(got).dtype == logits.dtype
    torch.testing.assert_close(got, logits, rtol=0.05, atol=0.05)
    assert logits_of(ours).bfloat16().sum(-1).dtype == torch.bfloat16


def test_inference_mode_reads_logits_of_outside(models):
    expected, got = map(logits_of, models)
    with torch.inference_mode():
        assert torch.allclose(got.softmax(-1), expected.softmax(-1), atol=1e-5)
        assert torch.allclose(got[:, 1:].mean(-1), expected[:, 1:].mean(-1), atol=1e-5)
        entropies = [torch.distributions.Categorical(logits=z).entropy() for z in (got, expected)]
        assert torch.allclose(*entropies, atol=1e-5)
    assert_same_use(models, loss_of)


def test_reshape_views_agree_with_pytorch():
    draw = torch.Generator().manual_seed(0)

    def integer(low, high):
        return int(torch.randint(low, high + 1, (), generator=draw))

    observed = {True: 0, False: 0}
    for _ in range(2000):
        axes = integer(1, 4)
        x = torch.empty([(1, 1, 2, 3, 4, 6)[integer(0, 5)] for _ in range(axes)])
        for _ in range(integer(0, 2)):
            at = integer(0, axes - 1)
            x = x.narrow(at, 0, integer(1, x.shape[at]))
            if integer(0, 2):
                x = x.transpose(integer(0, axes - 1), integer(0, axes - 1))
        left, sizes = x.numel(), []
        while left > 1 and integer(0, 4):
            sizes.append(next(d for d in range(integer(1, left), left + 1) if left % d == 0))
            left //= sizes[-1]
        sizes.append(left)
        try:
            x.view(sizes)
            expected = True
        except RuntimeError:
            expected = False
        assert is_view(x, sizes) == expected, (x.shape, x.stride(), sizes)
        observed[expected] += 1
    assert min(observed.values()) > 100


@pytest.mark.slow
def test_products_in_a_graph_keep_the_order_of_factors(models):
    """Dynamo exchanges those of ``logits @ w``: it runs outside of the graph, or raises."""
    stock, ours = models
    expected, left = torch.randn(VOCABULARY, 3), torch.randn(IDS.shape[0], 3, IDS.shape[1])
    with pytest.raises(Exception, match="which factor of @"):
        torch.compile(lambda: logits_of(ours) @ expected, backend="eager", fullgraph=True)()
    for one in (lambda z: torch.matmul(z, expected), lambda z: z @ expected, lambda z: left @ z):
        whole = torch.compile(lambda one=one: one(logits_of(ours)), backend="eager")
        torch.testing.assert_close(whole(), one(logits_of(stock)))


@eager_and_compiled
def test_a_view_without_gradients_requires_grad_by_its_base(compiled, models):
    z = reader(models, compiled)(models[1])
    with torch.no_grad():
        rows = z[:, 1:]
        hits = rows.argmax(-1)
    assert hits.shape == rows.shape[:2]
    assert rows.requires_grad
    assert rows.is_leaf
    assert F.cross_entropy(rows.flatten(0, 1), IDS[:, 1:].flatten()).requires_grad
    assert not z.detach().requires_grad


def test_function_result_keeps_its_history(models):
    y = Scale.apply(logits_of(models[1]), HOW["clone"])
    with torch.no_grad():
        y.mul_(3)
    assert y.requires_grad
    assert y.grad_fn is not None
