"""Lazy logits are a tensor to everybody: the values and gradients of real ones, however used."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from liger_multi import ops
from liger_multi.patching import patch, real_logits
from liger_multi.patching.head import reductions, storage
from liger_multi.patching.head.deferred import Guard
from liger_multi.patching.head.loss import SWAPS
from liger_multi.patching.head.protocol import LazyLogits
from tests.comparing import assert_same_gradients, difference, gradients
from tests.models import VOCABULARY, FusedCalls, Widest, assert_same_training, batch, pair

IDS = batch()["input_ids"]


@pytest.fixture
def models():
    stock, ours = pair("llama", patching={})
    return stock, ours


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(reductions, "CHUNK_BYTES", 4 * VOCABULARY * 3)  # three rows


def lazy(model):
    logits = model(input_ids=IDS).logits
    assert isinstance(logits, LazyLogits)
    return logits


def _entropy(rows):
    log_p = F.log_softmax(rows, dim=-1)
    return -(torch.exp(log_p) * log_p).sum(-1)


def _metric(rows):
    with torch.no_grad():
        return _entropy(rows)


VIEWS = {
    "all but last": lambda z: z[..., :-1, :],
    "one row": lambda z: z[0],
    "one position": lambda z: z[:, -1],
    "with full slices": lambda z: z[:, 2:5, :],
    "mask": lambda z: z[torch.arange(11).expand(2, 11) > 4],
    "index tensors": lambda z: z[torch.tensor([1, 0]), torch.tensor([3, 4])],
    "new axis": lambda z: z[:, None],
    "view": lambda z: z.view(-1, VOCABULARY),
    "reshape": lambda z: z.reshape(11, 2, -1),
    "flatten": lambda z: z.flatten(0, 1),
    "split": lambda z: z.split(4, dim=1)[1],
    "chunk": lambda z: torch.chunk(z, 2)[1],
    "unbind": lambda z: z.unbind(1)[3],
    "iterate": lambda z: list(z)[1],
    "unsqueeze": lambda z: z.unsqueeze(0),
    "squeeze": lambda z: z[:1].squeeze(0),
    "narrow": lambda z: z.narrow(1, 2, 3),
    "select": lambda z: z.select(1, 2),
    "index_select": lambda z: z.index_select(1, torch.tensor([2, 5])),
    "float and contiguous": lambda z: z[:, 1:].float().contiguous(),
    "scale": lambda z: 2 * z / 3.0,
    "softcap": lambda z: torch.tanh(z / 30.0) * 30.0,
    "bf16": lambda z: z.to(torch.bfloat16),
    "clone": lambda z: z.clone(),
    "in place": lambda z: z.clone().mul_(0.5),
    "log_softmax": lambda z: F.log_softmax(z, dim=-1),
    "softmax": lambda z: z.softmax(-1),
    "add": lambda z: 1 + z - 3,
    "two of them": lambda z: z * z + z,
    "exp of minus": lambda z: (-z).exp().log(),
    "transpose rows": lambda z: z.transpose(0, 1),
}
REAL = {
    "vocabulary slice": lambda z: z[..., :7],
    "vocabulary index": lambda z: z[0, 1, 2],
    "ellipsis index": lambda z: z[..., 3],
    "trailing new axis": lambda z: z[..., None],
    "paired index": lambda z: z[torch.tensor([0, 1]), torch.tensor([0, 1]), torch.tensor([5, 6])],
    "transpose": lambda z: z.transpose(1, 2),
    "reshape across": lambda z: z.reshape(-1),
    "log_softmax of rows": lambda z: z.log_softmax(1),
    "flat argmax": lambda z: z.argmax(),
    "sum": lambda z: z.sum(),
    "add a tensor": lambda z: z + torch.ones(VOCABULARY),
    "two of other rows": lambda z: z[:, 1:] * z[:, :-1],
    "cat": lambda z: torch.cat([z, z]),
    "max of two": lambda z: torch.max(z, z * 0.5),
    "numpy's axis": lambda z: z.float(memory_format=torch.preserve_format).amax(axis=-1),
    "einsum": lambda z: torch.einsum("btv,btv->bt", z, z),
    "assign": lambda z: _assigned(z),
}
CHUNKED = {
    "argmax": lambda z: z.argmax(-1),
    "entropy": lambda z: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1),
    "entropy by logsumexp": lambda z: z.logsumexp(-1) - (z.softmax(-1) * z).sum(dim=2),
    "entropy of flat rows": lambda z: _entropy(z.float().view(-1, VOCABULARY)),
    "mean": lambda z: z.mean(-1, keepdim=True),
    "argmax of a slice": lambda z: z[..., :-1, :].contiguous().argmax(dim=-1),
    "keepdim": lambda z: torch.argmax(z, 2, True),
    "max": lambda z: z.max(-1).values,
    "max indices": lambda z: z.max(dim=-1)[1],
    "amax": lambda z: z.amax(-1),
    "logsumexp": lambda z: torch.logsumexp(z, dim=-1),
    "topk": lambda z: z.topk(5).values,
    "topk indices": lambda z: torch.topk(z, 5, dim=-1).indices,
    "gather": lambda z: z.gather(-1, IDS[..., None]),
    "log probabilities": lambda z: (
        F.log_softmax(z.float(), dim=-1).gather(-1, IDS[..., None]).squeeze(-1)
    ),
    "selective": lambda z: torch.gather(z, -1, IDS[..., None]).squeeze(-1) - torch.logsumexp(z, -1),
    "soft-capped": lambda z: (torch.tanh(z / 3) * 3).logsumexp(-1),
}


def _assigned(z):
    z = z.clone()
    z[..., 5:9] = -1.0
    return z


@pytest.mark.parametrize("name", [*VIEWS, *REAL, *CHUNKED])
def test_same_values_and_gradients(models, small_chunks, name):
    function = {**VIEWS, **REAL, **CHUNKED}[name]
    stock, ours = models
    expected, got = function(stock(input_ids=IDS).logits), function(lazy(ours))
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    if SWAPS:
        assert isinstance(got, LazyLogits) == (name in VIEWS)
    values = real_logits(got)
    tolerance = (
        {"rtol": 0, "atol": 0.05}
        if expected.dtype == torch.bfloat16
        else {"rtol": 1e-4, "atol": 1e-5}
    )
    torch.testing.assert_close(values, expected, **tolerance)
    assert values.requires_grad == expected.requires_grad
    if not expected.requires_grad:
        return
    upstream = torch.linspace(-1, 1, expected.numel()).view(expected.shape).to(expected.dtype)
    expected.backward(upstream)
    got.backward(upstream)
    low = expected.dtype == torch.bfloat16
    said = difference(
        gradients(ours), gradients(stock), 2e-2 if low else 2e-5, expected.dtype if low else None
    )
    assert not said, said


@pytest.mark.parametrize("name", CHUNKED)
def test_reductions_hold_a_chunk_only(small_chunks, name):
    _, ours = pair("llama")
    patch(ours, fused_linear_cross_entropy={"chunk": 3})  # of what one fused call serves
    logits = lazy(ours)
    with Widest() as widest:
        result = CHUNKED[name](logits)
        if result.requires_grad:
            result.sum().backward()
    assert widest.rows == 3
    assert isinstance(logits, LazyLogits)


ONE_CALL = {
    "tokens": lambda z: z.log_softmax(-1).gather(-1, IDS[..., None]),
    "logits": lambda z: z.gather(-1, IDS[..., None]),
    "selective": lambda z: z.gather(-1, IDS[..., None]).squeeze(-1) - torch.logsumexp(z, -1),
    "selective by rows": lambda z: (
        (z := z.float()).gather(-1, IDS[..., None]).squeeze(-1)
        - torch.stack([torch.logsumexp(row, dim=-1) for row in z])
    ),
    "tokens and entropy": lambda z: (
        z.log_softmax(-1).gather(-1, IDS[..., None]).squeeze(-1) * _entropy(z)
    )[:, 1:],
    "tokens, and entropy as a metric": lambda z: (
        z.log_softmax(-1).gather(-1, IDS[..., None]).squeeze(-1) * _metric(z)
    ),
    "entropy, then tokens": lambda z: (
        _entropy(z) * z.log_softmax(-1).gather(-1, IDS[..., None]).squeeze(-1) + _entropy(z)
    ),
    "soft-capped, cooler: normalizer, then tokens": lambda z: (
        (z := ((z / 3).tanh() * 3).float() / 0.7).logsumexp(-1) ** 2
        + z.log_softmax(-1).gather(-1, IDS[..., None]).squeeze(-1)
    ),
    "tokens, cooler": lambda z: (z.float() / 0.7).log_softmax(-1).gather(-1, IDS[..., None]),
    "tokens of some rows": lambda z: F.log_softmax(z[:, 1:], -1).gather(2, IDS[:, :-1, None]),
    "tokens, soft-capped and cooler": lambda z: (
        (((z / 3).tanh() * 3).float() / 0.7).log_softmax(-1).gather(-1, IDS[..., None])
    ),
    "normalizer": lambda z: z.logsumexp((-1,)),
    "normalizer, soft-capped": lambda z: ((z / 3).tanh() * 3).logsumexp(-1, keepdim=True),
    "entropy": lambda z: -(z.log_softmax(-1) * z.softmax(-1)).sum(-1),
    "entropy of exponentials": lambda z: _entropy(z / 2).unsqueeze(-1),
    "entropy of factors": lambda z: (-z.softmax(-1) * z.log_softmax(-1)).sum(-1, dtype=torch.float),
    "cost of tokens": lambda z: (-z.log_softmax(-1)).gather(-1, IDS[..., None]),
}
IN_CHUNKS = {
    "two tokens": lambda z: z.log_softmax(-1).gather(-1, torch.stack((IDS, IDS + 1), -1) % 50),
    "probabilities": lambda z: z.softmax(-1).gather(-1, IDS[..., None]),
    "cross terms": lambda z: ((z / 2).softmax(-1) * z.log_softmax(-1)).sum(-1),
    "squared": lambda z: (z.log_softmax(-1) * z.log_softmax(-1)).sum(-1),
    "in fp64": lambda z: z.double().log_softmax(-1).gather(-1, IDS[..., None]).float(),
    "turned over after a softcap": lambda z: (((z / 3).tanh() * 3) * -2).logsumexp(-1),
    "of exponentials": lambda z: z.exp().logsumexp(-1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*ONE_CALL, *IN_CHUNKS])
def test_token_losses_use_one_fused_call(name, dtype, monkeypatch):
    """And no more than that is; the values and gradients are PyTorch's either way."""
    calls, own = [], ops.fused_linear_log_prob
    monkeypatch.setattr(
        ops, "fused_linear_log_prob", lambda *a, **k: calls.append(k["outputs"]) or own(*a, **k)
    )
    stock, ours = pair("llama", dtype=dtype)
    exact = copy.deepcopy(stock).double()
    patch(ours)
    function, results = (ONE_CALL | IN_CHUNKS)[name], []
    for model in (exact, stock, ours):
        output = function(model(input_ids=IDS).logits)
        output.double().pow(2).sum().backward()
        grads = [p.grad.double() for p in model.parameters() if p.grad is not None]
        results.append([output.detach().double(), *grads])
    assert output.dtype == function(stock(input_ids=IDS).logits).dtype
    assert len(calls) == (name in ONE_CALL)
    errors = [
        torch.stack(
            [(a - b).norm() / (b.norm() + 1e-30) for a, b in zip(result, results[0], strict=True)]
        ).norm()
        for result in results[1:]
    ]
    assert errors[1] <= 1.2 * errors[0] + 1e-5, errors


def test_several_losses_of_the_same_logits(models):
    """Under no_grad nothing is kept, and a second loss of the same logits gets its own gradient."""
    stock, ours = models
    with torch.no_grad():
        held = ours(input_ids=IDS).logits.log_softmax(-1).gather(-1, IDS[..., None])
    assert not held.requires_grad
    for model in models:
        logits = model(input_ids=IDS).logits
        tokens = logits.log_softmax(-1).gather(-1, IDS[..., None]).squeeze(-1)
        tokens.mean().backward(retain_graph=True)
        logits.logsumexp(-1).mean().backward()
    assert_same_gradients(gradients(ours), gradients(stock))


def test_entropies_before_tokens_without_gradients(models, monkeypatch):
    """One call, which keeps its logits for the tokens; a later loss has gradients of its own."""
    calls, own = [], ops.fused_linear_log_prob
    monkeypatch.setattr(
        ops, "fused_linear_log_prob", lambda *a, **k: calls.append(0) or own(*a, **k)
    )
    found = []
    for model in models:
        logits = model(input_ids=IDS).logits
        with torch.no_grad():
            found.append([_entropy(logits), logits.log_softmax(-1).gather(-1, IDS[..., None])])
        assert not any(x.requires_grad for x in found[-1])
        logits.log_softmax(-1).gather(-1, IDS[..., None]).sum().backward()
    assert len(calls) == 2
    torch.testing.assert_close(found[1], found[0], rtol=2e-5, atol=2e-5)
    assert_same_gradients(gradients(models[1]), gradients(models[0]))


SECOND = {
    "without a graph": lambda z: (_metric(z), _entropy(z))[1],
    "another temperature": lambda z: z.logsumexp(-1) + (z / 2).logsumexp(-1),
    "other rows": lambda z: z[:, 3:].logsumexp(-1).sum() + z.flip(0).logsumexp(-1),
    "tokens of two kinds after an entropy": lambda z: (
        _entropy(z) * z.log_softmax(-1).gather(-1, IDS[..., None]).squeeze(-1)
        + z.log_softmax(-1).gather(-1, IDS.flip(0)[..., None]).squeeze(-1) ** 2
    ),
    "tokens after a backward pass": lambda z: (
        _entropy(z).sum().backward(retain_graph=True),
        z.log_softmax(-1).gather(-1, IDS[..., None]),
    )[1],
    "checkpointed": lambda z: checkpoint(
        lambda z: z.logsumexp(-1) + _entropy(z) * z.logsumexp(-1), z, use_reentrant=False
    ),
}


@pytest.mark.parametrize("second", SECOND)
def test_unknown_results_are_computed(models, second):
    """The first call found it without a graph, at another temperature, or of other rows."""
    assert_same_training(*models, lambda m: SECOND[second](m(input_ids=IDS).logits).sum())


COMPARED = {
    "logits": lambda z: z,
    "float": lambda z: z.float(),
    "temperature": lambda z: z / 0.7,
    "log_softmax": lambda z: z.log_softmax(-1),
    "shifted": lambda z: z[:, :-1],
    "rows": lambda z: z[1:3].flatten(0, 1),
    "selected": lambda z: z[:, torch.arange(40) % 3 > 0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["gather", "topk", "amax"])
@pytest.mark.parametrize(
    ("form", "twice"), [*((form, False) for form in COMPARED), ("float", True), ("shifted", True)]
)
def test_values_before_materialization_equal_logits(form, twice, reduction, dtype, monkeypatch):
    """Ranks of tokens and filters by the k-th largest compare values that differ by rounding."""
    monkeypatch.setattr(reductions, "CHUNK_BYTES", 4 * VOCABULARY * 7)
    head = patched_head(24, VOCABULARY).to(dtype)
    hidden = torch.randn(4, 40, 24, dtype=dtype)
    make, grads = COMPARED[form], []
    for real in (False, True):
        logits = head(hidden)
        z = make(real_logits(logits) if real else logits)
        ids = torch.arange(z.shape[-2]).expand(z.shape[:-1]).unsqueeze(-1)
        arguments = {"gather": (-1, ids), "topk": (3,), "amax": (-1, True)}[reduction]
        value = getattr(z, reduction)(*arguments)
        value = value.values[..., -1:] if reduction == "topk" else value
        again = make(logits) if twice else z
        assert (again == value).any(-1).all()
        (again.exp().sum() + value.sum()).backward()
        grads.append(head.weight.grad.clone())
        head.zero_grad()
    limit = 4 * torch.finfo(dtype).eps * float(grads[1].abs().max())
    torch.testing.assert_close(*grads, rtol=0, atol=limit)


@pytest.mark.parametrize("form", COMPARED)
def test_values_of_one_element_are_equal(form):
    z = COMPARED[form](patched_head(24, VOCABULARY)(torch.randn(4, 40, 24)))
    values, ids = z.topk(2, -1)
    assert torch.equal(z.gather(-1, ids[..., :1]), values[..., :1])
    assert torch.equal(z.max(-1, keepdim=True).values, values[..., :1])
    z = COMPARED[form](patched_head(24, VOCABULARY)(torch.randn(4, 40, 24)))
    token = z.gather(-1, z.argmax(-1, keepdim=True))
    assert torch.equal(token, z.amax(-1, keepdim=True))
    assert isinstance(z, LazyLogits)


def test_an_index_of_no_class_raises_as_stock(models):
    for model in models:
        logits = model(input_ids=IDS).logits
        with pytest.raises(RuntimeError, match="out of bounds"):
            logits.log_softmax(-1).gather(-1, IDS[..., None] + VOCABULARY)


WRITES = {
    "without gradients": lambda z: _zeroed(z.logsumexp(-1)),
    "to what is detached": lambda z: z.logsumexp(-1).detach().zero_(),
    "of one row": lambda z: (z.logsumexp(-1), _zeroed(z[0].logsumexp(-1))),
    "with gradients": lambda z: (z.logsumexp(-1) * 1).zero_(),
    "to an entropy": lambda z: _zeroed(_entropy(z)),
    "to tokens": lambda z: _zeroed(z.gather(-1, IDS[..., None])),
    "by a hook": lambda z: z.logsumexp(-1).register_hook(lambda grad: grad * 0),
}


def _zeroed(output):
    with torch.no_grad():
        return output.zero_()


@pytest.mark.parametrize("name", WRITES)
def test_writing_to_a_result_changes_no_other(models, name):
    actual = []
    for i, model in enumerate(models):
        logits = model(input_ids=IDS).logits
        if i:  # PyTorch's own results are apart from each other
            WRITES[name](logits)
        results = (logits.logsumexp(-1), _entropy(logits))
        sum(r.mean() for r in results).backward()
        actual.append(torch.stack(results).detach())
    torch.testing.assert_close(actual[1], actual[0], rtol=2e-5, atol=2e-5)
    assert_same_gradients(gradients(models[1]), gradients(models[0]))


def test_cached_statistics_follow_the_weights(models):
    logits = lazy(models[1])
    logits.logsumexp(-1)
    with torch.no_grad():
        models[1].lm_head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified in place"):
        logits.logsumexp(-1)


def test_reductions_accumulate_the_weight_gradient_in_fp32(small_chunks):
    stock, ours = pair("llama", dtype=torch.bfloat16, patching={})
    exact = copy.deepcopy(stock).double()
    errors = []
    for model in (stock, ours):
        model(input_ids=IDS).logits.logsumexp(-1).sum().backward()
        reference = exact.lm_head.weight.grad
        if reference is None:
            exact(input_ids=IDS).logits.logsumexp(-1).sum().backward()
            reference = exact.lm_head.weight.grad
        errors.append((model.lm_head.weight.grad.double() - reference).norm() / reference.norm())
    assert errors[1] <= 1.1 * errors[0]


def test_a_loss_behind_its_head_enters_no_contexts(models, monkeypatch):
    """Contexts of PyTorch took longer than the checks of a call; others bring what has changed."""
    _, patched = models
    entered, restored = [], Guard._restored
    monkeypatch.setattr(Guard, "_restored", lambda g, on: entered.append(on) or restored(g, on))
    labels = torch.randint(VOCABULARY, (2, 8))
    F.cross_entropy(lazy(patched).flatten(0, 1)[:16], labels.flatten())
    assert entered == []
    logits = lazy(patched).flatten(0, 1)[:16]
    expected = F.cross_entropy(real_logits(lazy(patched)).flatten(0, 1)[:16], labels.flatten())
    entered.clear()
    with torch.autocast("cpu", torch.bfloat16):  # the head ran outside
        actual = F.cross_entropy(logits, labels.flatten())
    assert entered == [True]
    torch.testing.assert_close(actual, expected)


def test_metadata_needs_no_values(models):
    logits = lazy(models[1])
    with Widest() as widest:
        assert (logits.shape, logits.size(-1)) == ((2, 11, VOCABULARY), VOCABULARY)
        sizes = (logits.ndim, logits.dim(), len(logits), logits.numel())
        assert sizes == (3, 3, 2, 22 * VOCABULARY)
        assert (logits.dtype, logits.device.type) == (torch.float32, "cpu")
        assert (logits.requires_grad, logits.is_leaf) == (True, False)
        assert logits.grad_fn is not None
        assert all((logits.is_floating_point(), torch.is_tensor(logits), logits in {logits}))
        assert isinstance(logits, torch.Tensor)
    assert widest.rows == 0


def test_hooks_and_retained_gradients_see_the_logits(models):
    results = []
    for model in models:
        logits = model(input_ids=IDS).logits
        observed = []
        logits.register_hook(observed.append)
        logits.retain_grad()
        F.cross_entropy(logits.view(-1, VOCABULARY), IDS.view(-1)).backward()
        results.append((observed[0], logits.grad))
    assert_same_gradients(results[1], results[0])


class Sink(torch.autograd.Function):
    """Passes tensors through as DistributedDataParallel does with the outputs of a model."""

    @staticmethod
    def forward(ctx, copies, *tensors):
        ctx.set_materialize_grads(False)
        return tuple(t.clone() if copies else t for t in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        return (None, *gradients)


@pytest.mark.parametrize("copies", [True, False])
def test_an_autograd_function_of_somebody_else(models, copies, monkeypatch):
    fused = FusedCalls(monkeypatch)

    def from_logits(model):
        (logits,) = Sink.apply(copies, model(input_ids=IDS).logits)
        return logits.softmax(-1).pow(2).sum()

    def from_loss(model):
        out = model(input_ids=IDS, labels=IDS)
        loss, _ = Sink.apply(copies, out.loss, out.logits)
        return loss

    assert_same_training(*models, from_logits)
    assert_same_training(*models, from_loss)
    assert fused.count == 1


class Square(torch.autograd.Function):
    """Consumes a tensor below the function protocol and gives its gradient back."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


@pytest.mark.parametrize("swaps", [False, SWAPS])
@pytest.mark.parametrize("write", [Tensor.addcmul_, Tensor.addcdiv_, Tensor.add_])
def test_real_logits_are_written_with_lazy_ones(models, swaps, write, monkeypatch):
    """What in-place dropout returned is real, and the logits beside it are those of before."""
    monkeypatch.setattr(storage, "SWAPS", swaps)

    def written(model):
        z = model(input_ids=IDS, labels=IDS).logits
        z.sigmoid_()
        actual = F.dropout(z, 0.0, inplace=True)
        with torch.no_grad():
            write(actual, *[z] * (1 if write is Tensor.add_ else 2))
        return z

    stock, ours = models
    torch.testing.assert_close(real_logits(written(ours)), written(stock), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("swaps", [False, SWAPS])
def test_logits_in_custom_autograd_function(models, swaps, monkeypatch):
    """Also where lazy logits stay what they are, as before PyTorch 2.11."""
    monkeypatch.setattr(storage, "SWAPS", swaps)
    assert_same_training(*models, lambda m: Square.apply(m(input_ids=IDS).logits).sum())
    assert_same_training(
        *models, lambda m: Square.apply(m(input_ids=IDS).logits[:, 1:] * 0.5).sum()
    )


@pytest.mark.parametrize("options", [{"fused": True}, {"fused": False, "foreach": None}, {}])
def test_touching_after_the_weights_changed_raises(models, options):
    ours = models[1]
    out = ours(input_ids=IDS, labels=IDS)
    kept = real_logits(ours(input_ids=IDS).logits)
    sliced = out.logits[:, 2:]
    out.loss.backward()
    torch.optim.AdamW(ours.parameters(), lr=0.1, **options).step()
    for touch in (
        lambda: (out.logits + 1).relu(),
        lambda: sliced.argmax(-1),
        lambda: F.cross_entropy(out.logits[0], IDS[0]),
    ):
        with pytest.raises(RuntimeError, match="head's weights have been modified in place"):
            touch()
    assert kept.sum().isfinite()


def test_a_model_moves_after_a_step_with_swapped_parameters(models):
    """``Module.to`` swaps DTensors, such as those of FSDP2, and refuses weak references."""
    ours = models[1]
    ours(input_ids=IDS, labels=IDS).loss.backward()
    torch.optim.Adam(ours.parameters()).step()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        ours.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert ours(input_ids=IDS).logits.dtype == torch.float64


WRITES_TO_HIDDEN = {
    "in place": lambda hidden: hidden.detach().add_(1),
    ".data": lambda hidden: hidden.data.add_(1),
    "a row of .data": lambda hidden: hidden.data[0, 0].zero_(),
    ".data replaced": lambda hidden: setattr(hidden, "data", hidden.data * 2),
    "NumPy": lambda hidden: np.add(hidden.detach().numpy(), 1, out=hidden.detach().numpy()),
    "DLPack": lambda hidden: torch.from_dlpack(hidden.detach()).add_(1),
}


RESULTS_OF_LOGITS = {
    "loss": lambda logits: F.cross_entropy(logits.flatten(0, 1), torch.arange(6)),
    "log-probabilities": lambda logits: (
        logits.log_softmax(-1).gather(-1, torch.arange(6).view(2, 3, 1)).sum()
    ),
    "entropy": lambda logits: -(logits.softmax(-1) * logits.log_softmax(-1)).sum(),
    "largest": lambda logits: logits.amax(-1).sum(),
    "logits": lambda logits: (logits * torch.arange(13)).sum(),
}


@pytest.mark.parametrize(
    ("write", "result", "transposed"),
    [
        *(
            (write, "loss", transposed)
            for write in WRITES_TO_HIDDEN
            for transposed in (False, True)
        ),
        *((".data", result, False) for result in RESULTS_OF_LOGITS if result != "loss"),
    ],
)
def test_writes_to_hidden_states_after_the_head_change_nothing(write, result, transposed):
    """Logits are those of the moment of the head's call, whoever counts the writes."""
    write, result = WRITES_TO_HIDDEN[write], RESULTS_OF_LOGITS[result]
    head = patched_head(bias=True)
    start = torch.randn(2, 3, 8, requires_grad=True)
    expected = result(F.linear(start, head.weight, head.bias))
    leaves = (start, head.weight, head.bias)
    wanted_grads = torch.autograd.grad(expected, leaves)
    hidden = (start.transpose(0, 1) * 1).transpose(0, 1) if transposed else start * 1
    logits = head(hidden)
    write(hidden)
    got = result(logits)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad(got, leaves), wanted_grads)


@pytest.mark.parametrize(
    "write", [WRITES_TO_HIDDEN["in place"], WRITES_TO_HIDDEN[".data"]], ids=["in place", ".data"]
)
def test_writes_to_hidden_states_in_a_graph(write):
    head = patched_head()
    start = torch.randn(2, 3, 8, requires_grad=True)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(x):
        hidden = x * 1
        logits = head(hidden)
        write(hidden)
        return F.cross_entropy(logits.flatten(0, 1), torch.arange(6))

    expected = F.cross_entropy(F.linear(start, head.weight).flatten(0, 1), torch.arange(6))
    torch.testing.assert_close(loss(start), expected)


class Toy(nn.Module):
    """The least that has an output embedding."""

    def __init__(self, head):
        super().__init__()
        self.head = head

    def get_output_embeddings(self):
        return self.head


def patched_head(width=8, classes=13, bias=False, **options):
    head = nn.Linear(width, classes, bias=bias)
    patch(Toy(head), rms_norm=False, swiglu=False, **options)
    return head


@pytest.mark.parametrize(
    "call",
    [
        lambda z, t: F.cross_entropy(z.view(-1, 13), F.one_hot(t, 13).float()),  # probabilities
        lambda z, t: F.cross_entropy(
            z.view(5, 3, 13).transpose(1, 2), t.view(5, 3)
        ),  # classes in the middle
        lambda z, t: F.cross_entropy(
            z.view(-1, 13), t, reduce=True, size_average=False
        ),  # deprecated arguments
        lambda z, t: F.nll_loss(F.log_softmax(z.view(-1, 13), -1), t),
        lambda z, t: F.cross_entropy(input=z.view(-1, 13), target=t),
        lambda z, t: nn.CrossEntropyLoss()(z.view(-1, 13), t),
        lambda z, t: F.cross_entropy(
            (z.bfloat16() * 3).view(-1, 13), t
        ).float(),  # rounded before the loss
    ],
    ids=["probabilities", "middle axis", "deprecated", "nll_loss", "keywords", "module", "rounded"],
)
@pytest.mark.filterwarnings("ignore:size_average and reduce args")
def test_other_ways_to_call_the_loss(call):
    head, stock = patched_head(), nn.Linear(8, 13, bias=False)
    stock.load_state_dict(head.state_dict())
    hidden, targets = torch.randn(5, 3, 8), torch.randint(0, 13, (15,))
    assert_same_training(stock, head, lambda m: call(m(hidden), targets), rtol=1e-4)


def test_wrong_targets_raise_as_stock():
    head = patched_head()
    with pytest.raises(IndexError):
        F.cross_entropy(head(torch.randn(4, 3, 8)).view(-1, 13), torch.full((12,), 13))
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(head(torch.randn(4, 3, 8)).view(-1, 13), torch.zeros(5, dtype=torch.long))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        head(torch.randn(4, 3, 7))


def test_numpy_pickle_deepcopy_and_printing(models):
    logits = lazy(models[1])
    detached = logits.detach()
    expected = real_logits(logits).detach()
    assert np.allclose(detached.numpy(), expected.numpy())
    assert np.asarray(detached).shape == (2, 11, VOCABULARY)
    assert torch.equal(pickle.loads(pickle.dumps(detached)), expected)
    assert torch.equal(copy.deepcopy(detached), expected)
    assert repr(logits).startswith("tensor(")
    assert detached.tolist() == expected.tolist()
    assert isinstance(detached.cpu().numpy().argmax(-1), np.ndarray)


def test_printing_large_logits_computes_nothing():
    logits = patched_head(width=4, classes=70_000)(torch.randn(2, 3, 4))
    assert repr(logits) == "LazyLogits(shape=(2, 3, 70000), dtype=torch.float32, not computed)"
    assert isinstance(logits, LazyLogits)


def test_whole_logits_above_the_budget_warn_once_a_line():
    head = patched_head(fused_linear_cross_entropy={"materialize_bytes": 100})
    hidden = torch.randn(2, 3, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            head(hidden).relu()
        head(hidden).argmax(-1)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert "needs the whole logits (2, 3, 13)" in str(caught[0].message)


def test_detached_logits_and_metrics_under_no_grad(models):
    stock, ours = models
    expected, logits = stock(input_ids=IDS).logits, lazy(ours)
    detached = logits.detach()
    assert not detached.requires_grad
    assert not F.cross_entropy(detached[0], IDS[0]).requires_grad
    with torch.no_grad():
        torch.testing.assert_close(logits.argmax(-1), expected.argmax(-1))
        assert not (logits * 1.0).sum().requires_grad
    assert (logits * 1.0).sum().requires_grad  # what was computed under no_grad kept its history


def test_a_foreign_hook_on_the_head_gets_real_logits(models, monkeypatch):
    fused = FusedCalls(monkeypatch)
    stock, ours = models
    for model in models:
        model.lm_head.register_forward_hook(lambda module, args, output: output * 0.5)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        assert_same_training(stock, ours, lambda m: m(input_ids=IDS, labels=IDS).loss)
    assert fused.count == 0


def test_data_parallel_replicas_return_the_loss_without_logits(monkeypatch):
    from torch.nn.parallel import scatter_gather

    stock, ours = pair("llama", patching={})

    def replica(model):
        replicated = model._replicate_for_data_parallel()
        for name, child in model.named_children():
            replicated._modules[name] = replica(child)
        for name, parameter in model._parameters.items():
            object.__setattr__(replicated, name, parameter)
        return replicated

    class Gather:
        apply = staticmethod(lambda device, dim, *tensors: torch.stack(tensors))

    monkeypatch.setattr(scatter_gather, "Gather", Gather)
    halves = [{k: v[i : i + 1] for k, v in batch().items()} for i in range(2)]
    outs = [replica(ours)(**half, use_cache=False) for half in halves]
    with pytest.warns(UserWarning, match=r"nn\.DataParallel"):
        gathered = scatter_gather.gather(outs, "cpu")
    assert gathered.loss.shape == (2,)
    with pytest.raises(RuntimeError, match="without logits"):
        gathered.logits.argmax(-1)
    gathered.loss.mean().backward()
    (sum(stock(**half).loss for half in halves) / 2).backward()
    assert_same_gradients(gradients(ours), gradients(stock))
    # inside a replica the logits are there
    logits = replica(ours)(input_ids=IDS).logits
    torch.testing.assert_close(
        logits.softmax(-1), stock(input_ids=IDS).logits.softmax(-1), rtol=1e-4, atol=1e-6
    )


def test_functorch_and_fake_tensors_get_ordinary_logits():
    from torch._subclasses.fake_tensor import FakeTensorMode

    head = patched_head()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert not isinstance(head(torch.empty(2, 3, 8)), LazyLogits)
    hidden = torch.randn(2, 3, 8)
    gradient = torch.func.grad(lambda h: head(h).pow(2).sum())(hidden)
    torch.testing.assert_close(gradient, 2 * (hidden @ head.weight.t()) @ head.weight)


def test_logits_without_batch_axis_are_lazy():
    head = patched_head()
    assert isinstance(head(torch.randn(5, 8)), LazyLogits)
    assert type(head(torch.randn(8))) is torch.Tensor
