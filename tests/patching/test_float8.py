"""Linear layers of patched models in FP8: weights as they are, and frozen ones kept as codes."""

import contextlib
import copy
import dataclasses
import gc
import io
import threading
import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import liger_multi
from liger_multi import ops
from liger_multi.dispatch.op import OPS
from liger_multi.dispatch.torch_ops import Primitive
from liger_multi.errors import PatchError
from liger_multi.patching import patch, patched, unpatch
from liger_multi.patching.float8 import linear as float8
from liger_multi.patching.float8.linear import Float8Linear
from liger_multi.patching.float8.shards import GatheredWeight
from liger_multi.patching.float8.weight import Float8Weight
from liger_multi.reference.float8.rows import PLAIN, Float8Rows, dequantized
from tests.models import VOCABULARY, build

ALL = {"smallest": 0}
FROZEN = {"smallest": 0, "frozen": True}
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def model(dtype=torch.float32, frozen=False, **config):
    torch.manual_seed(0)
    made = build("llama", **config).to(dtype).eval()
    if frozen:
        for name, parameter in made.named_parameters():
            parameter.requires_grad_("embed" in name or "norm" in name)
    return made


def ids(sequences=2, length=13):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (sequences, length), generator=generator)


def step(made, tokens=None):
    tokens = ids() if tokens is None else tokens
    made.zero_grad(set_to_none=True)
    loss = made(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.item(), {
        n: p.grad.clone() for n, p in made.named_parameters() if p.grad is not None
    }


def equal(a, b):
    return a[0] == b[0] and a[1].keys() == b[1].keys() and all(
        torch.equal(g, b[1][n]) for n, g in a[1].items()
    )  # fmt: skip


def linears(made):
    return [m for n, m in made.named_modules() if n.rpartition(".")[2] in LAYERS]


def rounded(weight):
    return dequantized(PLAIN.rows(weight.detach(), None, torch.float8_e4m3fn), weight.dtype)


# --- weights as they are ---


def test_layers_multiply_in_float8_and_unpatch_is_exact():
    made = model()
    before, state = step(made), copy.deepcopy(made.state_dict())
    report = patch(made, linear_float8=ALL)
    assert report.count("linear_float8") == len(linears(made)) == 14
    assert all(isinstance(m, Float8Linear) for m in linears(made))
    assert not isinstance(made.lm_head, Float8Linear)
    during = step(made)
    assert during[0] != before[0]
    assert abs(during[0] - before[0]) < 0.05 * before[0]
    for name, gradient in before[1].items():
        like = torch.cosine_similarity(gradient.flatten(), during[1][name].flatten(), 0)
        assert like > 0.98, name
    assert all(torch.equal(made.state_dict()[n], t) for n, t in state.items())
    unpatch(made)
    assert equal(step(made), before)


def test_every_layer_gives_what_the_operator_gives():
    layer = nn.Linear(32, 48)
    holder = nn.Sequential(layer)
    x = torch.randn(3, 5, 32, requires_grad=True)
    patch(holder, linear_float8=ALL)
    y = holder(x)
    assert torch.equal(y, ops.linear_float8(x, layer.weight, layer.bias))


def test_off_by_default_and_off_again():
    made = model()
    assert patch(made).count("linear_float8") == 0
    patch(made, linear_float8=ALL)
    report = patch(made)
    assert not any(isinstance(m, Float8Linear) for m in made.modules())
    assert sum(e.op == "linear_float8" and e.status == "restored" for e in report.entries) == 14


def test_small_layers_and_heads_stay_and_the_report_says_why():
    report = patch(model(), linear_float8=True)
    reasons = {s.path: s.reason for s in report.skipped if s.op == "linear_float8"}
    assert len(reasons) == 15
    assert "it is small" in reasons["model.layers.0.self_attn.q_proj"]
    assert "smallest=4,194,305" in reasons["model.layers.0.self_attn.q_proj"]
    assert "output embedding" in reasons["lm_head"]
    patch(model(), strict=True, linear_float8=True)  # being small is no failure


def test_layers_that_compute_something_else_stay():
    class Doubled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    holder = nn.Sequential(Doubled(32, 48), nn.MultiheadAttention(32, 4))
    report = patch(holder, linear_float8=ALL)
    reasons = {s.path: s.reason for s in report.skipped if s.op == "linear_float8"}
    assert "forward of its own" in reasons["0"]
    assert "nn.MultiheadAttention" in reasons["1.out_proj"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_bits(reentrant):
    made = model()
    patch(made, linear_float8=ALL)
    before = step(made)
    made.gradient_checkpointing_enable({"use_reentrant": reentrant})
    made.enable_input_require_grads()
    made.train()
    assert equal(step(made), before)


def test_weights_written_past_the_version_counter_are_seen():
    """Optimizers in C and ``p.data`` write so; codes of a weight live no longer than a GEMM."""
    made = model()
    patch(made, linear_float8=ALL)
    fresh = model()
    patch(fresh, linear_float8=ALL)
    step(made)
    for a, b in zip(made.parameters(), fresh.parameters(), strict=True):
        version = a._version
        a.data.mul_(1.25)
        b.data.mul_(1.25)
        assert a._version == version
    assert equal(step(made), step(fresh))
    with torch.no_grad():
        first = made(input_ids=ids()).logits.detach().clone()
        for a in made.parameters():
            a.data.mul_(0.5)
        assert not torch.equal(first, made(input_ids=ids()).logits.detach())


CACHED = {**ALL, "cache": True}


def optimizer_of(made, kind=torch.optim.SGD):
    """An optimizer that has stepped, as codes are kept from then on."""
    optimizer = kind(made.parameters(), lr=0.0)
    step(made)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.05
    return optimizer


@contextlib.contextmanager
def weights_rounded():
    """How many weights were rounded apart from their GEMMs, and how many by these."""
    seen, call = {"apart": 0, "within": 0}, Primitive.call

    def spy(prim, *args):
        given = dict(zip(prim.params, args, strict=True))
        for name, t in given.items():
            if "float8" in prim.op.name and prim.direction == "forward" and name.endswith("weight"):
                scale = given.get(f"{name}_scale", ...)
                if scale is None and isinstance(t, torch.Tensor):
                    seen["within" if t.numel() else "apart"] += 1
        return call(prim, *args)

    with mock.patch.object(Primitive, "call", spy):
        yield seen


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_codes_that_are_kept_are_those_of_each_use(kind, checkpointing):
    """Once per step of the optimizer, whatever the number of micro-batches; and the same bits."""
    made, other = model(), model()
    patch(made, linear_float8=CACHED)
    patch(other, linear_float8=ALL)
    for one in (made, other):
        if checkpointing:
            one.gradient_checkpointing_enable({"use_reentrant": False})
            one.enable_input_require_grads()
            one.train()
    optimizers = [optimizer_of(one, kind) for one in (made, other)]
    for _ in range(2):
        with weights_rounded() as seen:
            for _ in range(3):
                assert equal(step(made), step(other))
        assert seen["apart"] == 14
        for optimizer in optimizers:
            optimizer.step()


def test_kept_codes_follow_every_write_that_counts():
    made, other = model(), model()
    patch(made, linear_float8=CACHED)
    patch(other, linear_float8=ALL)
    optimizer = optimizer_of(made)
    writes = (
        lambda m: [p.mul_(1.1) for p in m.parameters()],
        lambda m: m.load_state_dict(copy.deepcopy(model().state_dict())),
        lambda m: [setattr(p, "data", p.data * 1.2) for p in m.parameters()],
        lambda m: m.double(),
    )
    for write in writes:
        step(made)
        with torch.no_grad():
            write(made)
            write(other)
        with weights_rounded() as seen:
            assert equal(step(made), step(other))
        assert seen["apart"] == 14
    optimizer.step()


def test_weights_whose_codes_are_kept_can_be_swapped():
    """``Module.to`` swaps DTensors, such as those of FSDP2, and refuses weak references."""
    made, other = model(), model().double()
    patch(made, linear_float8=CACHED)
    patch(other, linear_float8=ALL)
    optimizer = optimizer_of(made)
    step(made)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        made.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert equal(step(made), step(other))
    optimizer.step()


def test_a_step_of_an_optimizer_that_counts_no_version():
    """As those in C: the hooks of its class tell."""

    class Uncounted(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.data.add_(p.grad, alpha=-self.param_groups[0]["lr"])

    made, other = model(), model()
    patch(made, linear_float8=CACHED)
    patch(other, linear_float8=ALL)
    optimizers = [optimizer_of(one, Uncounted) for one in (made, other)]
    for _ in range(3):
        assert equal(step(made), step(other))
        for optimizer in optimizers:
            optimizer.step()


def test_codes_are_not_kept_where_no_optimizer_steps():
    """A loop that writes to ``p.data`` itself has no hook."""
    made, other = model(), model()
    patch(made, linear_float8=CACHED)
    patch(other, linear_float8=ALL)
    for _ in range(3):
        assert equal(step(made), step(other))
        for p in [*made.parameters(), *other.parameters()]:
            p.data.add_(p.grad, alpha=-0.05)


def test_a_loop_of_ones_own_that_follows_an_optimizer():
    """The optimizer is still there, and does not step any more: uses are counted too."""
    from liger_multi.patching.float8 import kept as float8_kept

    made = model()
    patch(made, linear_float8=CACHED)
    optimizer = optimizer_of(made)
    for _ in range(2 * float8_kept.USES):
        step(made)
    waiting = float8_kept._followed()[-1].weights.values()
    assert max(len(w.uses) for w in waiting) < float8_kept.USES

    def train():
        step(made)
        for p in made.parameters():
            p.data.add_(p.grad, alpha=-0.05)

    with pytest.raises(PatchError, match="leave cache=True of linear_float8 out"):
        repeated(train, 2 * float8_kept.USES)
    step(made)
    optimizer.step()


def repeated(function, times):
    for _ in range(times):
        function()


def test_writes_that_nothing_counts_are_an_error_before_the_step():
    made = model()
    patch(made, linear_float8=CACHED)
    optimizer = optimizer_of(made)
    step(made)
    weight = linears(made)[3].weight
    weight.data[5, 7] += 1e-6 + weight.data[5, 7].abs()
    before = copy.deepcopy(made.state_dict())
    with pytest.raises(PatchError, match="leave cache=True of linear_float8 out"):
        optimizer.step()
    assert all(torch.equal(before[n], t) for n, t in made.state_dict().items())
    patch(made, linear_float8=ALL)
    step(made)
    optimizer.step()


def test_writes_that_nothing_counts_are_an_error_where_they_are_undone():
    """Methods that take a gradient elsewhere write through ``.data``, and back before the step."""
    made = model()
    patch(made, linear_float8=CACHED)
    optimizer = optimizer_of(made)
    step(made)
    own = [p.detach().clone() for p in made.parameters()]
    for p in made.parameters():
        p.data.mul_(1.5)
    step(made)
    for p, value in zip(made.parameters(), own, strict=True):
        p.data.copy_(value)
    with pytest.raises(PatchError, match="leave cache=True of linear_float8 out"):
        optimizer.step()
    step(made)
    optimizer.step()


def test_passes_without_gradients_do_not_read_kept_codes():
    """An evaluation with averaged weights writes them through ``.data``, and back."""
    made, other = model(), model()
    patch(made, linear_float8=CACHED)
    patch(other, linear_float8=ALL)
    optimizer = optimizer_of(made)
    right = step(made)
    own = [p.detach().clone() for p in made.parameters()]
    with torch.no_grad():
        for p, q in zip(made.parameters(), other.parameters(), strict=True):
            p.data.mul_(0.5)
            q.data.copy_(p)
        assert torch.equal(made(input_ids=ids()).logits + 0, other(input_ids=ids()).logits + 0)
        for p, value in zip(made.parameters(), own, strict=True):
            p.data.copy_(value)
    assert equal(step(made), right)
    optimizer.step()


def test_kept_codes_go_with_the_step_and_with_the_model():
    from liger_multi.patching.float8 import kept as float8_kept

    def count():
        return sum(w.kept is not None for f in float8_kept._followed() for w in f.weights.values())

    made = model()
    patch(made, linear_float8=CACHED)
    optimizer = optimizer_of(made)
    assert count() == 0
    step(made)
    assert count() == 14
    optimizer.step()
    assert count() == 0
    step(made)
    alive = weakref.ref(made)
    unpatch(made)
    del made, optimizer
    gc.collect()
    assert count() == 0
    assert alive() is None


def test_an_input_that_was_written_to_is_rounded_again():
    first, second = nn.Linear(32, 48), nn.Linear(32, 48)
    pair = nn.ModuleList([first, second])
    patch(pair, linear_float8=ALL)
    x = torch.randn(4, 32)
    with torch.no_grad():
        first(x)
        x.mul_(-3.0)
        assert torch.equal(second(x), ops.linear_float8(x, second.weight, second.bias))


def test_codes_of_an_input_serve_its_layers_and_go(monkeypatch):
    pair = nn.ModuleList([nn.Linear(32, 48), nn.Linear(32, 48)])
    patch(pair, linear_float8=ALL)
    x = torch.randn(4, 32)
    pair[0](x)
    kept = float8.codes_of(x)
    assert kept is not None
    alive = weakref.ref(kept.codes)
    pair[1](x)
    assert float8.codes_of(x) is kept
    with torch.autocast("cpu", torch.bfloat16):
        assert float8.codes_of(x) is None
    seen = []
    thread = threading.Thread(target=lambda x=x: seen.append(float8.codes_of(x)))
    thread.start()
    thread.join()
    assert seen == [None]
    del x, kept, thread
    assert alive() is None


def test_autocast_and_accumulation():
    made = model()
    patch(made, linear_float8=ALL)
    with torch.autocast("cpu", torch.bfloat16):
        loss = made(input_ids=ids(), labels=ids()).loss
    loss.backward()
    once = {n: p.grad.clone() for n, p in made.named_parameters()}
    assert all(g.dtype == torch.float32 for g in once.values())
    with torch.autocast("cpu", torch.bfloat16):
        made(input_ids=ids(), labels=ids()).loss.backward()
    assert all(torch.equal(p.grad, 2 * once[n]) for n, p in made.named_parameters())


def test_compiled_equals_eager():
    block = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 32))
    patch(block, linear_float8=ALL)
    x = torch.randn(6, 32, requires_grad=True)
    eager = block(x)
    (dx,) = torch.autograd.grad(eager.sum(), x)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (6, 9):
        x = torch.randn(rows, 32, requires_grad=True)
        y, right = compiled(x), block(x)
        torch.testing.assert_close(y, right)
        grads = [torch.autograd.grad(one.sum(), x)[0] for one in (y, right)]
        torch.testing.assert_close(*grads)
    assert dx.shape == (6, 32)


def test_hooks_run_and_see_what_goes_in_and_out():
    holder = nn.Sequential(nn.Linear(32, 48))
    patch(holder, linear_float8=ALL)
    seen = []
    holder[0].register_forward_hook(lambda m, args, y: seen.append((args[0].shape, y.shape)))
    holder(torch.randn(4, 32))
    assert seen == [((4, 32), (4, 48))]


def test_a_block_ends_and_nothing_stays():
    made = model(frozen=True)
    before = step(made)
    weights = [m.weight.detach().clone() for m in linears(made)]
    with patched(made, linear_float8=FROZEN):
        with patched(made, linear_float8=ALL):
            assert not any(isinstance(m.weight, Float8Weight) for m in linears(made))
        assert all(isinstance(m.weight, Float8Weight) for m in linears(made))
    assert all(type(m) is nn.Linear for m in linears(made))
    assert all(
        torch.equal(m.weight, w) and type(m.weight) is nn.Parameter
        for m, w in zip(linears(made), weights, strict=True)
    )
    assert equal(step(made), before)


# --- frozen weights as codes ---


def test_a_frozen_model_multiplies_with_its_codes():
    """Equal, to the bit, to the model whose weights are rounded at every use."""
    made, other = model(frozen=True), model(frozen=True)
    patch(made, linear_float8=FROZEN)
    patch(other, linear_float8=ALL)
    assert equal(step(made), step(other))


@pytest.mark.parametrize("originals", [True, False])
def test_memory_is_codes_and_scales(originals):
    made = model(torch.bfloat16, frozen=True)
    alive = [weakref.ref(m.weight) for m in linears(made)]
    patch(made, linear_float8={**FROZEN, "originals": originals})
    assert not any(ref() is not None for ref in alive)
    for layer in linears(made):
        weight = layer.weight
        assert weight.codes.dtype == torch.float8_e4m3fn
        assert weight.codes.shape == weight.shape
        assert weight.scale.shape == weight.shape[:1]
        assert (weight.original is not None) == originals
        assert isinstance(weight, nn.Parameter)
        assert weight.dtype == torch.bfloat16


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor of at least 16 bits that an operation makes."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for t in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(t, torch.Tensor) and t.itemsize > 1:
                self.most = max(self.most, t.numel() * t.itemsize)
        return made


def test_checkpoints_hold_the_original_weights_and_load():
    made = model(torch.bfloat16, frozen=True)
    state = copy.deepcopy(made.state_dict())
    patch(made, linear_float8=FROZEN)
    during = made.state_dict()
    assert all(type(t) is torch.Tensor and torch.equal(t, state[n]) for n, t in during.items())
    other = model(torch.bfloat16, frozen=True)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    patch(made, linear_float8=FROZEN)
    made.load_state_dict(other.state_dict())
    assert all(isinstance(m.weight, Float8Weight) for m in linears(made))
    patch(other, linear_float8=FROZEN)
    assert equal(step(made), step(other))
    unpatch(made)
    assert all(torch.equal(t, 1.5 * state[n]) for n, t in made.state_dict().items())


def test_without_originals_what_was_kept_comes_back():
    made = model(torch.bfloat16, frozen=True)
    right = [rounded(m.weight) for m in linears(made)]
    patch(made, linear_float8={**FROZEN, "originals": False})
    unpatch(made)
    assert all(torch.equal(m.weight, w) for m, w in zip(linears(made), right, strict=True))


def test_copies_and_pickles_are_models_of_their_own():
    made = model(frozen=True)
    state = copy.deepcopy(made.state_dict())
    patch(made, linear_float8=FROZEN)
    before = step(made)
    copied = copy.deepcopy(made)
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    unpatch(made)
    for other in (copied, loaded):
        assert equal(step(other), before)
        unpatch(other)
        assert all(torch.equal(t, state[n]) for n, t in other.state_dict().items())


def test_another_device_dtype_or_reader():
    made = model(torch.bfloat16, frozen=True)
    patch(made, linear_float8=FROZEN)
    layer = linears(made)[0]
    assert torch.equal(layer.weight + 0, layer.weight.dequantized())
    assert torch.equal(layer.weight.detach()[2], layer.weight.dequantized()[2])
    x = torch.randn(4, layer.in_features, dtype=torch.bfloat16)
    by_hand = torch.nn.functional.linear(x, layer.weight)
    assert torch.equal(by_hand, torch.nn.functional.linear(x, layer.weight.dequantized()))
    made.float()
    assert isinstance(layer.weight, Float8Weight)
    assert layer.weight.dtype == torch.float32
    made.to("meta")
    assert layer.weight.codes.is_meta


WRITES = {
    "data": lambda w: w.data.add_(1),
    "no_grad": lambda w: torch.no_grad()(w.mul_)(2),
    "a view": lambda w: torch.no_grad()(w.zero_)(),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_refused_and_name_the_way_out(name):
    made = model(frozen=True)
    patch(made, linear_float8=FROZEN)
    before = step(made)
    with pytest.raises(PatchError, match="unpatch the model first"):
        WRITES[name](linears(made)[0].weight)
    assert equal(step(made), before)


@pytest.mark.parametrize("frozen", [True, False])
def test_inference_mode_and_generation(frozen):
    made = model(frozen=frozen)
    patch(made, linear_float8=FROZEN if frozen else ALL)
    with torch.inference_mode():
        inside = made(input_ids=ids()).logits + 0
    with torch.no_grad():
        assert torch.equal(inside, made(input_ids=ids()).logits + 0)
    assert made.generate(ids()[:, :4], max_new_tokens=3, pad_token_id=0).shape == (2, 7)


def test_layers_that_share_a_weight_keep_sharing_it():
    pair = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    pair[1].weight = pair[0].weight
    pair.requires_grad_(False)
    report = patch(pair, linear_float8=FROZEN)
    assert [s.reason for s in report.skipped if s.op == "linear_float8"] == [
        "its weight is that of another layer too, which would lose it"
    ] * 2
    unpatch(pair)
    assert pair[0].weight is pair[1].weight


def test_a_weight_that_was_replaced_is_kept_in_float8_again():
    made = model(frozen=True)
    patch(made, linear_float8=FROZEN)
    made.load_state_dict(model(frozen=True).state_dict(), assign=True)
    made.requires_grad_(False)
    assert not any(isinstance(m.weight, Float8Weight) for m in linears(made))
    patch(made, linear_float8=FROZEN)
    assert all(isinstance(m.weight, Float8Weight) for m in linears(made))


def test_codes_cannot_be_trained():
    made = model(frozen=True)
    patch(made, linear_float8=FROZEN)
    linears(made)[0].weight.requires_grad_(True)
    with pytest.raises(PatchError, match="cannot be trained"):
        step(made)


def test_weights_that_are_trained_are_left_with_a_reason():
    made = model(frozen=True)
    linears(made)[0].weight.requires_grad_(True)
    report = patch(made, linear_float8=FROZEN)
    (path,) = [s.path for s in report.skipped if "requires a gradient" in s.reason]
    assert path.endswith("q_proj")
    assert report.count("linear_float8") == 13


def test_no_gradient_of_a_frozen_weight_and_no_dequantized_weight_in_a_step(monkeypatch):
    """Codes go into GEMMs as they are; the CPU has none, so another function takes its place."""
    made = model(frozen=True, hidden_size=64, intermediate_size=256, vocab_size=31)
    patch(made, linear_float8=FROZEN)
    shapes = []

    def recorded(a, b, dtype, fast=False):
        shapes.append((a.codes.dtype, b.codes.dtype))
        return a.scale.new_zeros(len(a.scale), len(b.scale), dtype=dtype)

    from liger_multi.reference.float8 import frozen

    monkeypatch.setattr(frozen, "product", recorded)
    with Largest() as mode:
        step(made, ids(1, 4) % 31)
    assert {kind for pair in shapes for kind in pair} == {torch.float8_e4m3fn}
    assert len(shapes) == 2 * 14
    assert mode.most < 64 * 256 * 2


# --- codes that norms and activations hand out ---


@contextlib.contextmanager
def recorded(*names):
    """Arguments of forward of operators, by name, while the block runs."""
    seen, call = {name: [] for name in names}, Primitive.call

    def spy(prim, *args):
        twice = torch._C._is_any_autocast_enabled()  # it is called again without
        if prim.direction == "forward" and prim.op.name in seen and not twice:
            seen[prim.op.name].append(args)
        return call(prim, *args)

    with mock.patch.object(Primitive, "call", spy):
        yield seen


def roundings(seen):
    """How many layers, or MLPs of them, rounded their input, of how many."""
    found = [
        args[OPS[name].fwd.params.index("codes")] is None
        for name in ("linear_float8", "gated_mlp_float8")
        for args in seen.get(name, [])
    ]
    return sum(found), len(found)


CODED = ("rms_norm_quantized", "swiglu_quantized", "linear_float8", "gated_mlp_float8")
IN_LAYERS = {"swiglu": {"whole": False}}


@pytest.mark.parametrize("options", [ALL, FROZEN], ids=["trained", "frozen"])
def test_norms_and_activations_round_for_the_layers_that_follow(options):
    """From the second step on; of the layers of a block only o_proj rounds, and no bit differs."""
    made = model(torch.bfloat16, frozen=options is FROZEN)
    patch(made, linear_float8=options, **IN_LAYERS)
    with recorded(*CODED) as seen:
        first = step(made)
    assert not seen["rms_norm_quantized"]
    assert not seen["swiglu_quantized"]
    assert roundings(seen) == (8, 14)
    for _ in range(2):
        with recorded(*CODED) as seen:
            assert equal(step(made), first)
        assert len(seen["rms_norm_quantized"]) == 4
        assert len(seen["swiglu_quantized"]) == 2
        assert roundings(seen) == (2, 14)


# --- a whole MLP of layers in FP8 ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [ALL, FROZEN], ids=["trained", "frozen"])
def test_a_whole_mlp_has_the_bits_of_its_layers(options, dtype):
    """Also where the norm before it hands out codes, from the second step on."""
    frozen = options is FROZEN
    made, layers = model(dtype, frozen), model(dtype, frozen)
    report = patch(made, linear_float8=options)
    assert {e.replaced_by for e in report.entries if e.op == "swiglu"} == {"gated_mlp_float8[silu]"}
    patch(layers, linear_float8=options, **IN_LAYERS)
    for rounding in (True, False):
        with recorded(*CODED) as seen:
            found = step(made)
        assert equal(found, step(layers))
        assert roundings(seen) == ((6, 10) if rounding else (2, 10))
        assert not seen["swiglu_quantized"]


def kept_bytes(made):
    """Bytes that a step keeps for backward, each storage once, but for parameters."""
    own = {p.untyped_storage().data_ptr() for p in made.parameters()}
    seen = {}

    def pack(t):
        place = t.untyped_storage()
        if place.data_ptr() not in own:
            seen[place.data_ptr()] = (t, place.nbytes())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = made(input_ids=ids(), labels=ids()).loss
    kept = sum(size for _, size in seen.values())
    loss.backward()
    return kept


def test_a_whole_mlp_keeps_one_activation_less():
    found = []
    for how in ({}, IN_LAYERS):
        made = model(torch.bfloat16)
        patch(made, linear_float8=ALL, **how)
        found.append(kept_bytes(made))
    inner = ids().numel() * made.config.intermediate_size * 2
    assert found[1] - found[0] == made.config.num_hidden_layers * inner


@pytest.mark.parametrize("kind", ["trained", "adapters"])
def test_the_last_gemm_of_an_mlp_is_not_computed_again(kind):
    """Nor is the product before it; bits are those of a model that keeps all."""
    make = adapted if kind == "adapters" else model
    made, right = make(torch.bfloat16), make(torch.bfloat16)
    for each in (made, right):
        patch(each, linear_float8=FROZEN if kind == "adapters" else ALL)
    made.gradient_checkpointing_enable({"use_reentrant": False})
    made.enable_input_require_grads()
    made.train()
    names = ("linear_float8", "lora_qkv", "swiglu_quantized", "gated_mlp_float8", "lora_mlp")
    with recorded(*names) as seen:
        found = step(made)
    assert equal(found, step(right))
    # of a layer twice: q, k and v, o, gate and up; once: the product and down
    layers, fused = made.config.num_hidden_layers, kind == "adapters"
    wanted = (2, 2 + 2 + 1, 1, 0, 0) if fused else (2 * 6 + 1, 0, 1, 0, 0)
    assert [len(seen[n]) for n in names] == [count * layers for count in wanted]


def test_a_whole_mlp_accumulates_and_takes_a_second_backward():
    made, layers = model(torch.bfloat16), model(torch.bfloat16)
    patch(made, linear_float8=ALL)
    patch(layers, linear_float8=ALL, **IN_LAYERS)
    for each in (made, layers):
        for _ in range(2):
            loss = each(input_ids=ids(), labels=ids()).loss
            loss.backward(retain_graph=True)
        loss.backward()
    pairs = zip(made.parameters(), layers.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


def test_a_whole_mlp_compiled_equals_eager():
    made = model()
    patch(made, linear_float8=ALL)
    mlp = made.model.layers[0].mlp
    torch._dynamo.reset()
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (6, 9):
        x = torch.randn(2, rows, made.config.hidden_size, requires_grad=True)
        given = [x, *mlp.parameters()]
        found = [[y, *torch.autograd.grad(y.sum(), given)] for y in (compiled(x), mlp(x))]
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("what", ["a hook", "a small layer", "a backend"])
def test_an_mlp_of_other_layers_runs_them(what):
    """A hook is called, a layer in 16 bits multiplies in them, and a named backend serves all."""
    made, right = model(), model()
    for each, how in ((made, {}), (right, IN_LAYERS)):
        eight = dict(ALL, **({"backend": "reference"} if what == "a backend" else {}))
        patch(each, linear_float8=eight, **how)
        for layer in each.model.layers:
            if what == "a hook":
                layer.mlp.up_proj.register_forward_hook(lambda m, a, y: 2 * y)
            elif what == "a small layer":
                unpatch(layer.mlp.up_proj)
    with recorded(*CODED) as seen:
        found = step(made)
    assert not seen["gated_mlp_float8"]
    assert equal(found, step(right))


def test_models_without_such_layers_hand_out_nothing():
    made, other = model(), model()
    patch(made, linear_float8=ALL)
    patch(other)
    for _ in range(2):
        step(made)
    with recorded(*CODED) as seen:
        for _ in range(2):
            step(other)
    assert not any(seen.values())
    patch(made)  # layers as they were: the first call finds its codes unread, and is the last
    with recorded(*CODED) as seen:
        step(made)
    assert len(seen["rms_norm_quantized"]) == 4
    with recorded(*CODED) as seen:
        step(made)
    assert not any(seen.values())


class Block(nn.Module):
    """A norm and a layer, with whatever is done between them."""

    def __init__(self, norm, between=lambda h: h):
        super().__init__()
        torch.manual_seed(3)
        self.norm, self.layer, self.between = norm, nn.Linear(32, 48), between

    def forward(self, x):
        return self.layer(self.between(self.norm(x)))


def learned(block, x):
    """The block once its norm hands out codes."""
    patch(block, linear_float8=ALL)
    between, block.between = block.between, lambda h: h
    block(x)
    block.between = between
    return block


NORMS = {"rms_norm": nn.RMSNorm, "layer_norm": nn.LayerNorm}


@pytest.mark.parametrize("name", NORMS)
def test_other_norms_do_it_too(name):
    block = learned(Block(NORMS[name](32, eps=1e-5)), torch.randn(4, 32))
    x = torch.randn(4, 32, requires_grad=True)
    with recorded(f"{name}_quantized", "linear_float8") as seen:
        y = block(x)
    assert len(seen[f"{name}_quantized"]) == 1
    assert roundings(seen) == (0, 1)
    right = ops.linear_float8(block.norm(x), block.layer.weight, block.layer.bias)
    assert torch.equal(y, right)
    assert torch.equal(*(torch.autograd.grad(one.sum(), x)[0] for one in (y, right)))


BETWEEN = {
    "written to": lambda h: h.mul_(-3.0),
    "a view written to": lambda h: (h[:2].zero_(), h)[1],
    "another tensor": lambda h: h * -3.0,
    "detached": lambda h: h.detach(),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_a_result_that_is_not_the_one_is_rounded(what):
    block = learned(Block(nn.RMSNorm(32, eps=1e-5), BETWEEN[what]), torch.randn(4, 32))
    x = torch.randn(4, 32)
    with torch.no_grad(), recorded("rms_norm_quantized", "linear_float8") as seen:
        y = block(x)
        right = nn.functional.rms_norm(x, (32,), block.norm.weight, 1e-5)
        right = ops.linear_float8(BETWEEN[what](right), block.layer.weight, block.layer.bias)
    assert len(seen["rms_norm_quantized"]) == 1
    assert roundings(seen)[0] == 2
    torch.testing.assert_close(y, right)


@pytest.mark.parametrize("where", ["norm", "layer", "all modules"])
def test_hooks_that_write_past_the_version_counter(where):
    """What a hook does through ``.data`` no version tells, so codes do not pass by one."""
    block, x = learned(Block(nn.RMSNorm(32, eps=1e-5)), torch.randn(4, 32)), torch.randn(4, 32)

    def after(module, args, y):
        if module is block.norm:
            y.data.mul_(-3.0)

    def before(module, args):
        args[0].data.mul_(-3.0)

    if where == "norm":
        hook = block.norm.register_forward_hook(after)
    elif where == "layer":
        hook = block.layer.register_forward_pre_hook(before)
    else:
        hook = nn.modules.module.register_module_forward_hook(after)
    with torch.no_grad():
        y = block(x)
        hook.remove()
        right = -3.0 * nn.functional.rms_norm(x, (32,), block.norm.weight, 1e-5)
        right = ops.linear_float8(right, block.layer.weight, block.layer.bias)
    torch.testing.assert_close(y, right)


def test_autocast_decides_whether_codes_fit():
    """A layer rounds what autocast makes of a result: of the same dtype, that is the result."""
    block = Block(nn.RMSNorm(32, eps=1e-5))
    learned(block, torch.randn(4, 32))
    x = torch.randn(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            with recorded("linear_float8") as seen:
                y = block(x)
            assert roundings(seen) == (1, 1)
        right = ops.linear_float8(block.norm(x), block.layer.weight, block.layer.bias)
    assert torch.equal(y, right)
    block.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        block(x.bfloat16())
        with recorded("linear_float8") as seen:
            block(x.bfloat16())
    assert roundings(seen) == (0, 1)


def test_a_pinned_backend_runs_its_own_norm():
    block, x = learned(Block(nn.RMSNorm(32, eps=1e-5)), torch.randn(4, 32)), torch.randn(4, 32)
    with recorded("rms_norm_quantized", "linear_float8") as seen:
        with liger_multi.use(rms_norm="reference"):
            block(x)
        assert not seen["rms_norm_quantized"]
    assert roundings(seen) == (1, 1)


def test_dispatch_modes_see_the_calls_of_the_first_step():
    """Selective checkpointing looks operations up by name when it computes again."""
    block, x = learned(Block(nn.RMSNorm(32, eps=1e-5)), torch.randn(4, 32)), torch.randn(4, 32)
    with recorded("rms_norm_quantized") as seen, Largest():
        block(x)
    assert not seen["rms_norm_quantized"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_a_model_that_has_learned(reentrant):
    """Also where forward has plain norms and the recomputation has codes."""
    made = model()
    patch(made, linear_float8=ALL)
    right = step(made)
    assert equal(step(made), right)
    other = model()
    other.load_state_dict(made.state_dict())
    patch(other, linear_float8=ALL)
    other.gradient_checkpointing_enable({"use_reentrant": reentrant})
    other.enable_input_require_grads()
    other.train()
    assert equal(step(other), right)
    assert equal(step(other), right)


def test_threads_that_share_a_model_do_not_share_codes():
    made = model()
    patch(made, linear_float8=ALL)
    every = [ids(2, 5 + i) for i in range(4)]
    with torch.no_grad():
        right = [made(input_ids=one).logits + 0 for one in every]
    wrong = []

    def run(one, want):
        with torch.no_grad():
            for _ in range(5):
                if not torch.equal(made(input_ids=one).logits + 0, want):
                    wrong.append(one.shape)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(every, right, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_compiled_blocks_round_and_equal_those_that_have_learned():
    block, x = learned(Block(nn.RMSNorm(32, eps=1e-5)), torch.randn(4, 32)), torch.randn(4, 32)
    eager = block(x)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), eager)


# --- adapters ---


def adapted(dtype=torch.float32, **settings):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(LAYERS), **settings)
    made = peft.get_peft_model(model(dtype), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return made


def apart(a, b):
    """The largest difference of two gradients, of the norm of one of them."""
    assert a.keys() == b.keys()
    return max(((g - b[n]).norm() / b[n].norm()).item() for n, g in a.items())


def test_adapters_on_a_frozen_base():
    """The loss equals that on a base that is rounded at every use, layer by layer.

    Gradients of x are sums of several layers in another order, and almost always round alike.
    """
    made, other = adapted(), adapted()
    report = patch(made, linear_float8=FROZEN)
    assert report.count("linear_float8") == report.count("lora") == 14
    assert not any("lora_A" in e.path or "lora_B" in e.path for e in report.entries)
    patch(other, linear_float8=ALL)
    found, right = step(made), step(other)
    assert found[0] == right[0]
    assert apart(found[1], right[1]) < 1e-5


def test_fused_adapters_are_as_exact_as_layers():
    """In bf16, other roundings of 16 bits lead to other codes; errors are as large."""
    _, exact = step(adapted())
    found = []
    for options in (FROZEN, ALL):
        made = adapted(torch.bfloat16)
        patch(made, linear_float8=options)
        loss, gradients = step(made)
        wrong = sum((g.float() - exact[n]).square().sum() for n, g in gradients.items())
        found.append((loss, wrong.sqrt().item()))
    (fused_loss, fused), (loss, layers) = found
    assert fused_loss == loss
    assert fused < 1.1 * layers


FUSED = ("lora_qkv", "lora_mlp", "linear_float8", "rms_norm_quantized")


def given(seen, name):
    """Whether calls of an operator were given codes of their input."""
    place = OPS[name].fwd.params.index("codes")
    return [args[place] is not None for args in seen[name]]


def test_fused_adapters_take_weights_in_float8_and_codes_of_norms():
    made = adapted()
    report = patch(made, linear_float8=FROZEN)
    assert any(e.replaced_by == "lora_mlp[silu]" for e in report.entries)
    with recorded(*FUSED) as seen:
        first = step(made)
    assert given(seen, "lora_qkv") == given(seen, "lora_mlp") == [False, False]
    assert len(seen["linear_float8"]) == 2  # o_proj
    with recorded(*FUSED) as seen:
        assert equal(step(made), first)
    assert given(seen, "lora_qkv") == given(seen, "lora_mlp") == [True, True]
    assert len(seen["rms_norm_quantized"]) == 4


def test_adapters_on_some_layers_of_a_frozen_base():
    """q and v are fused; k runs over codes as a layer, and the MLP as a whole."""
    peft = pytest.importorskip("peft")
    found = []
    for options in (FROZEN, ALL):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        made = peft.get_peft_model(model(), config)
        patch(made, linear_float8=options)
        step(made)
        with recorded(*FUSED, "gated_mlp_float8") as seen:
            found.append(step(made))
        if options is FROZEN:
            assert given(seen, "lora_qkv") == [True, True]
            assert roundings(seen) == (2, 6)  # of k, o and the MLP, o
    assert found[0][0] == found[1][0]
    assert apart(found[0][1], found[1][1]) < 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_fused_adapters_under_checkpointing(reentrant):
    made = adapted()
    patch(made, linear_float8=FROZEN)
    made.enable_input_require_grads()
    right = step(made)
    made.gradient_checkpointing_enable({"use_reentrant": reentrant})
    made.train()
    for _ in range(2):
        found = step(made)
        assert found[0] == right[0]
        assert apart(found[1], right[1]) < 1e-5


def test_small_layers_of_fused_adapters_stay_in_16_bits():
    made = adapted()
    patch(made, linear_float8={**FROZEN, "smallest": 32 * 32})
    layers = made.base_model.model.model.layers[0].self_attn
    kept = [isinstance(layers.get_submodule(n).base_layer.weight, Float8Weight)
            for n in ("q_proj", "k_proj", "v_proj")]  # fmt: skip
    assert kept == [True, False, False]
    with recorded(*FUSED) as seen:
        step(made)
    place = OPS["lora_qkv"].fwd.params.index("q_weight_scale")
    every = [[t is not None for t in args[place : place + 3]] for args in seen["lora_qkv"]]
    assert every == [[True, False, False]] * 2


def test_hooks_on_a_base_in_float8_are_called():
    made = adapted()
    patch(made, linear_float8=FROZEN)
    base = made.base_model.model.model.layers[0].mlp.gate_proj.base_layer
    seen = []
    base.register_forward_hook(lambda m, args, y: seen.append(y.shape))
    step(made)
    assert len(seen) == 1


def test_compiled_fused_adapters_equal_eager():
    made = adapted()
    patch(made, linear_float8=FROZEN)
    mlp = made.base_model.model.model.layers[0].mlp
    x = torch.randn(5, 32, requires_grad=True)
    eager = mlp(x)
    torch._dynamo.reset()
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), eager)


def test_adapters_added_saved_and_merged(tmp_path):
    peft = pytest.importorskip("peft")
    made = model()
    for p in made.parameters():
        p.requires_grad_(False)
    patch(made, linear_float8=FROZEN)
    wrapped = peft.get_peft_model(made, peft.LoraConfig(r=4, target_modules=list(LAYERS)))
    patch(wrapped, linear_float8=FROZEN)
    assert patch(wrapped, linear_float8=FROZEN).count("lora") == 14
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        losses.append(step(wrapped)[0])
        optimizer.step()
    assert losses[-1] < losses[0]
    wrapped.save_pretrained(tmp_path)
    with pytest.raises(PatchError, match="unpatch the model first"):
        wrapped.merge_adapter()
    unpatch(wrapped)
    merged = wrapped.merge_and_unload()
    assert merged(input_ids=ids(), labels=ids()).loss < losses[0]


# --- weights that FSDP2 gathered in FP8; what it does with them is tested on two ranks ---


def test_gather_changes_nothing_where_nothing_is_sharded():
    made, other = model(), model()
    before = step(made)
    patch(made, linear_float8={**ALL, "gather": True})
    patch(other, linear_float8=ALL)
    right = step(other)
    for one in (made, copy.deepcopy(made)):
        assert equal(step(one), right)
        linears(one)[0].weight = nn.Parameter(linears(one)[0].weight.detach().clone())
        assert equal(step(one), right)
    patch(made, linear_float8=ALL)
    assert equal(step(made), right)
    unpatch(made)
    assert all(type(m) is nn.Linear for m in linears(made))
    assert equal(step(made), before)


def test_gathered_weights_are_trained_in_eager_and_compiled_code():
    block, plain = (nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 32)) for _ in "ab")
    plain.load_state_dict(block.state_dict())
    for one in (block, plain):
        patch(one, linear_float8=ALL)
    for layer in (block[0], block[2]):
        rows = PLAIN.rows(layer.weight.detach(), None, torch.float8_e4m3fn)
        weight = GatheredWeight(*rows, torch.float32)
        layer._parameters["weight"] = nn.Parameter(weight)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (6, 9):
        x, found = torch.randn(rows, 32), []
        for call, held in ((plain, plain), (block, block), (compiled, block)):
            held.zero_grad()
            given = x.clone().requires_grad_()
            y = call(given)
            y.square().sum().backward()
            found.append([y.detach(), given.grad, *(p.grad.clone() for p in held.parameters())])
        for right, eager, late in zip(*found, strict=True):
            assert torch.equal(eager, right)
            torch.testing.assert_close(late, right)
    by_hand = torch.nn.functional.linear(x, block[0].weight)  # a reader that knows no codes
    assert torch.equal(by_hand, torch.nn.functional.linear(x, block[0].weight.dequantized()))
    by_hand.sum().backward()
    with pytest.raises(PatchError, match="unpatch the model first"), torch.no_grad():
        block[0].weight.mul_(2)


# --- models that torchao has converted ---


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_models_converted_by_torchao_keep_its_layers_and_get_our_norms(scaling):
    ao = pytest.importorskip("torchao.float8")
    config = dataclasses.replace(
        ao.Float8LinearConfig.from_recipe_name(scaling), emulate=True
    )  # on a CPU
    made = model(hidden_size=64, intermediate_size=128)
    ao.convert_to_float8_training(
        made, config=config, module_filter_fn=lambda module, name: name != "lm_head"
    )
    kinds = [type(m) for m in linears(made)]
    assert {kind.__name__ for kind in kinds} == {"Float8Linear"}
    before = step(made)
    report = patch(made, linear_float8=ALL)
    assert (report.count("rms_norm"), report.count("swiglu")) == (5, 2)
    assert report.count("linear_float8") == 0
    reasons = {s.reason for s in report.skipped if s.op == "linear_float8" and s.path != "lm_head"}
    assert reasons == {"it has a forward of its own (Float8Linear)"}
    assert [type(m) for m in linears(made)] == kinds
    with recorded("rms_norm", "swiglu", "rms_norm_quantized") as seen:
        after = step(made)
    assert [len(calls) for calls in seen.values()] == [5, 2, 0]
    assert abs(after[0] - before[0]) < 1e-5 * before[0]
    assert apart(after[1], before[1]) < 1e-2
    unpatch(made)
    assert equal(step(made), before)


# --- options ---


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"frozen": 1}, "frozen must be True or False"),
        ({"smallest": -1}, "smallest must be an integer >= 0"),
        ({"originals": "cpu"}, "originals must be True or False"),
        ({"smalest": 1}, "smallest"),
        ({"gather": 1}, "gather must be True or False"),
        ({"cache": None}, "cache must be True or False"),
    ],
)
def test_bad_options_change_nothing(options, text):
    made = model()
    with pytest.raises(PatchError, match=text):
        liger_multi.patch(made, linear_float8=options)
    assert not any(isinstance(m, Float8Linear) for m in made.modules())
    assert isinstance(Float8Rows(1, 2), tuple)
