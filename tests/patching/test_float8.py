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

import liger_multi
from liger_multi import ops
from liger_multi.dispatch.op import OPS
from liger_multi.dispatch.torch_ops import Primitive
from liger_multi.errors import PatchError
from liger_multi.patching import patch, patched, unpatch
from liger_multi.patching.float8 import linear as float8
from liger_multi.patching.float8.linear import Float8Linear
from liger_multi.patching.float8.weight import Float8Weight, GatheredWeight
from liger_multi.reference.float8 import frozen as frozen_rows
from liger_multi.reference.float8.rows import PLAIN, dequantized
from tests.comparing import Operations, assert_equal, gradients, saved, storage_bytes
from tests.models import VOCABULARY, adapters, build

ALL = {"smallest": 0}
FROZEN = {"smallest": 0, "frozen": True}
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def model(dtype=torch.float32, frozen=False, float8=None, **config):
    """A Llama, perhaps of frozen products, whose linear layers are patched with these options."""
    torch.manual_seed(0)
    llama = build("llama", **config).to(dtype).eval()
    if frozen:
        for name, parameter in llama.named_parameters():
            parameter.requires_grad_("embed" in name or "norm" in name)
    if float8 is not None:
        patch(llama, linear_float8=float8)
    return llama


def checkpointed(llama, reentrant):
    """The model in training, whose layers run again in backward."""
    llama.gradient_checkpointing_enable({"use_reentrant": reentrant})
    llama.enable_input_require_grads()
    return llama.train()


def ids(sequences=2, length=13):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (sequences, length), generator=generator)


def step(llama, tokens=None):
    tokens = ids() if tokens is None else tokens
    llama.zero_grad(set_to_none=True)
    loss = llama(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.item(), {n: g.clone() for n, g in gradients(llama).items()}


def equal(a, b):
    """Whether losses and gradients have the same bits."""
    return (
        a[0] == b[0]
        and a[1].keys() == b[1].keys()
        and all(map(torch.equal, a[1].values(), b[1].values()))
    )


def linears(llama):
    return [m for n, m in llama.named_modules() if n.rpartition(".")[2] in LAYERS]


def cached_and_fresh():
    """A model that keeps codes of weights from one use to the next, and one that does not."""
    return model(float8=CACHED), model(float8=ALL)


def cached():
    """A model that keeps codes, after a step of its optimizer and one of its own."""
    llama, _ = cached_and_fresh()
    optimizer = optimizer_of(llama)
    step(llama)
    return llama, optimizer


# --- weights as they are ---


def test_layers_multiply_in_float8_and_unpatch_is_exact():
    llama = model()
    assert patch(llama).count("linear_float8") == 0
    unpatch(llama)
    before, state = step(llama), copy.deepcopy(llama.state_dict())
    report = patch(llama, linear_float8=ALL)
    assert report.count("linear_float8") == len(linears(llama)) == 14
    assert all(isinstance(m, Float8Linear) for m in linears(llama))
    assert not isinstance(llama.lm_head, Float8Linear)
    during = step(llama)
    assert during[0] != before[0]
    assert abs(during[0] - before[0]) < 0.05 * before[0]
    for name, gradient in before[1].items():
        like = torch.cosine_similarity(gradient.flatten(), during[1][name].flatten(), 0)
        assert like > 0.98, name
    assert all(torch.equal(llama.state_dict()[n], t) for n, t in state.items())
    report = patch(llama)
    assert sum(e.op == "linear_float8" and e.status == "restored" for e in report.entries) == 14
    assert not any(isinstance(m, Float8Linear) for m in llama.modules())
    unpatch(llama)
    assert equal(step(llama), before)


def refusals(model, **options):
    """Reasons of layers that stay in 16 bits, by path."""
    report = patch(model, linear_float8=options or True)
    return {s.path: s.reason for s in report.skipped if s.op == "linear_float8"}


def test_small_layers_and_heads_stay_and_the_report_says_why():
    reasons = refusals(model())
    assert len(reasons) == 15
    assert "it is small" in reasons["model.layers.0.self_attn.q_proj"]
    assert "smallest=4,194,305" in reasons["model.layers.0.self_attn.q_proj"]
    assert "output embedding" in reasons["lm_head"]
    patch(model(), strict=True, linear_float8=True)  # being small is no failure


def test_other_layers_stay():
    class Doubled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    reasons = refusals(nn.Sequential(Doubled(32, 48), nn.MultiheadAttention(32, 4)), **ALL)
    assert "forward of its own" in reasons["0"]
    assert "nn.MultiheadAttention" in reasons["1.out_proj"]


def test_weights_written_past_the_version_counter_are_seen():
    """Optimizers in C and ``p.data`` write so; codes of a weight live no longer than a GEMM."""
    llama, fresh = model(float8=ALL), model(float8=ALL)
    step(llama)
    for a, b in zip(llama.parameters(), fresh.parameters(), strict=True):
        version = a._version
        a.data.mul_(1.25)
        b.data.mul_(1.25)
        assert a._version == version
    assert equal(step(llama), step(fresh))
    with torch.no_grad():
        first = llama(input_ids=ids()).logits.detach().clone()
        for a in llama.parameters():
            a.data.mul_(0.5)
        assert not torch.equal(first, llama(input_ids=ids()).logits.detach())


CACHED = {**ALL, "cache": True}


def optimizer_of(llama, optimizer_class=torch.optim.SGD):
    """An optimizer that has stepped, as codes are kept from then on."""
    optimizer = optimizer_class(llama.parameters(), lr=0.0)
    step(llama)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.05
    return optimizer


@contextlib.contextmanager
def weights_rounded():
    """How many weights were rounded apart from their GEMMs, and how many by these."""
    observed, call = {"apart": 0, "within": 0}, Primitive.call

    def spy(prim, *args):
        inputs = dict(zip(prim.params, args, strict=True))
        for name, t in inputs.items():
            coded = name.endswith("weight") and inputs.get(f"{name}_scale", ...) is None
            if coded and "float8" in prim.op.name and prim.direction == "forward":
                observed["within" if t.numel() else "apart"] += isinstance(t, torch.Tensor)
        return call(prim, *args)

    with mock.patch.object(Primitive, "call", spy):
        yield observed


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("case", [torch.optim.SGD, torch.optim.AdamW])
def test_cached_codes_equal_fresh_ones(case, checkpointing):
    """Once per step of the optimizer, whatever the number of micro-batches; and the same bits."""
    llama, other = cached_and_fresh()
    for one in (llama, other) if checkpointing else ():
        checkpointed(one, False)
    optimizers = [optimizer_of(one, case) for one in (llama, other)]
    for _ in range(2):
        with weights_rounded() as observed:
            for _ in range(3):
                assert equal(step(llama), step(other))
        assert observed["apart"] == 14
        for optimizer in optimizers:
            optimizer.step()


def test_cached_codes_follow_counted_writes():
    llama, other = cached_and_fresh()
    optimizer = optimizer_of(llama)
    writes = (
        lambda m: [p.mul_(1.1) for p in m.parameters()],
        lambda m: m.load_state_dict(copy.deepcopy(model().state_dict())),
        lambda m: [setattr(p, "data", p.data * 1.2) for p in m.parameters()],
        lambda m: m.double(),
    )
    for write in writes:
        step(llama)
        with torch.no_grad():
            write(llama)
            write(other)
        with weights_rounded() as observed:
            assert equal(step(llama), step(other))
        assert observed["apart"] == 14
    optimizer.step()


def test_weights_with_cached_codes_can_be_swapped():
    """``Module.to`` swaps DTensors, such as those of FSDP2, and refuses weak references."""
    llama, other = model(float8=CACHED), model(float8=ALL).double()
    optimizer = optimizer_of(llama)
    step(llama)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        llama.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert equal(step(llama), step(other))
    optimizer.step()


class Uncounted(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad, alpha=-self.param_groups[0]["lr"])


@pytest.mark.parametrize("optimizer_class", [Uncounted, None])
def test_steps_without_version_count(optimizer_class):
    """As those in C, which the hooks of its class tell, and as those of a loop, which has none."""
    llama, other = cached_and_fresh()
    optimizers = [optimizer_of(m, optimizer_class) for m in (llama, other) if optimizer_class]
    for _ in range(3):
        assert equal(step(llama), step(other))
        for optimizer in optimizers:
            optimizer.step()
        for p in (*llama.parameters(), *other.parameters()) if not optimizers else ():
            p.data.add_(p.grad, alpha=-0.05)


def test_manual_loop_after_an_optimizer():
    """The optimizer is still there, and does not step any more: uses are counted too."""

    llama = model(float8=CACHED)
    optimizer = optimizer_of(llama)
    repeated(lambda: step(llama), 2 * float8.USES)
    assert max(len(w.uses) for w in float8._optimizer_records()[-1].weights.values()) < float8.USES

    def train():
        step(llama)
        for p in llama.parameters():
            p.data.add_(p.grad, alpha=-0.05)

    with pytest.raises(PatchError, match=LEAVE_OUT):
        repeated(train, 2 * float8.USES)
    step(llama)
    optimizer.step()


def repeated(function, times):
    for _ in range(times):
        function()


LEAVE_OUT = "leave cache=True of linear_float8 out"


def test_uncounted_writes_raise_before_the_step():
    llama, optimizer = cached()
    weight = linears(llama)[3].weight
    weight.data[5, 7] += 1e-6 + weight.data[5, 7].abs()
    before = copy.deepcopy(llama.state_dict())
    with pytest.raises(PatchError, match=LEAVE_OUT):
        optimizer.step()
    assert_equal(llama.state_dict().values(), before.values())
    patch(llama, linear_float8=ALL)
    step(llama)
    optimizer.step()


def test_uncounted_writes_raise_where_they_are_undone():
    """Methods that take a gradient elsewhere write through ``.data``, and back before the step."""
    llama, optimizer = cached()
    own = copy.deepcopy(llama.state_dict())
    for p in llama.parameters():
        p.data.mul_(1.5)
    step(llama)
    restore(llama, own)
    with pytest.raises(PatchError, match=LEAVE_OUT):
        optimizer.step()
    step(llama)
    optimizer.step()


def restore(llama, state):
    """Write weights back through ``.data``, which no version counts."""
    for name, p in llama.named_parameters():
        p.data.copy_(state[name])


def test_passes_without_gradients_do_not_read_kept_codes():
    """An evaluation with averaged weights writes them through ``.data``, and back."""
    llama, other = cached_and_fresh()
    optimizer = optimizer_of(llama)
    expected = step(llama)
    own = copy.deepcopy(llama.state_dict())
    with torch.no_grad():
        for p, q in zip(llama.parameters(), other.parameters(), strict=True):
            p.data.mul_(0.5)
            q.data.copy_(p)
        assert torch.equal(llama(input_ids=ids()).logits + 0, other(input_ids=ids()).logits + 0)
        restore(llama, own)
    assert equal(step(llama), expected)
    optimizer.step()


def test_kept_codes_go_with_the_step_and_with_the_model():
    def count():
        return sum(
            w.cached is not None for f in float8._optimizer_records() for w in f.weights.values()
        )

    llama = model(float8=CACHED)
    optimizer = optimizer_of(llama)
    assert count() == 0
    step(llama)
    assert count() == 14
    optimizer.step()
    assert count() == 0
    step(llama)
    alive = weakref.ref(llama)
    unpatch(llama)
    del llama, optimizer
    gc.collect()
    assert count() == 0
    assert alive() is None


def test_written_input_is_rounded_again():
    first, second = nn.Linear(32, 48), nn.Linear(32, 48)
    patch(nn.ModuleList([first, second]), linear_float8=ALL)
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
    observed = []
    thread = threading.Thread(target=lambda x=x: observed.append(float8.codes_of(x)))
    thread.start()
    thread.join()
    assert observed == [None]
    del x, kept, thread
    assert alive() is None


def test_autocast_and_accumulation():
    llama, grads = model(float8=ALL), []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            llama(input_ids=ids(), labels=ids()).loss.backward()
        grads.append([p.grad.clone() for p in llama.parameters()])
    assert all(g.dtype == torch.float32 for g in grads[0])
    assert_equal(grads[1], [2 * g for g in grads[0]])


def test_a_block_ends_and_nothing_stays():
    llama = model(frozen=True)
    before = step(llama)
    weights = [m.weight.detach().clone() for m in linears(llama)]
    with patched(llama, linear_float8=FROZEN):
        with patched(llama, linear_float8=ALL):
            assert not any(isinstance(m.weight, Float8Weight) for m in linears(llama))
        assert all(isinstance(m.weight, Float8Weight) for m in linears(llama))
    assert all(type(m) is nn.Linear and type(m.weight) is nn.Parameter for m in linears(llama))
    assert_equal([m.weight.detach() for m in linears(llama)], weights)
    assert equal(step(llama), before)


# --- codes that norms and activations hand out ---


@contextlib.contextmanager
def recorded(*names):
    """Arguments of forward of operators, by name, while the block runs."""
    observed, call = {name: [] for name in names}, Primitive.call

    def spy(prim, *args):
        twice = torch._C._is_any_autocast_enabled()  # it is called again without
        if prim.direction == "forward" and prim.op.name in observed and not twice:
            observed[prim.op.name].append(args)
        return call(prim, *args)

    with mock.patch.object(Primitive, "call", spy):
        yield observed


def recorded_step(llama, *names):
    with recorded(*names) as observed:
        return step(llama), observed


def apart(a, b):
    """The largest difference of two gradients, of the norm of one of them."""
    assert a.keys() == b.keys()
    return max(((g - b[n]).norm() / b[n].norm()).item() for n, g in a.items())


# --- weights that FSDP2 gathered in FP8; what it does with them is tested on two ranks ---


def test_gather_changes_nothing_where_nothing_is_sharded():
    llama, before = model(), step(model())
    patch(llama, linear_float8={**ALL, "gather": True})
    expected = step(model(float8=ALL))
    for one in (llama, copy.deepcopy(llama)):
        assert equal(step(one), expected)
        linears(one)[0].weight = nn.Parameter(linears(one)[0].weight.detach().clone())
        assert equal(step(one), expected)
    patch(llama, linear_float8=ALL)
    assert equal(step(llama), expected)
    unpatch(llama)
    assert all(type(m) is nn.Linear for m in linears(llama))
    assert equal(step(llama), before)


def test_gathered_weights_train_eager_and_compiled():
    block, plain = (nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 32)) for _ in "ab")
    plain.load_state_dict(block.state_dict())
    for one in (block, plain):
        patch(one, linear_float8=ALL)
    for layer in (block[0], block[2]):
        rows = PLAIN.rows(layer.weight.detach(), None, torch.float8_e4m3fn)
        layer._parameters["weight"] = nn.Parameter(GatheredWeight(*rows, torch.float32))
    options = {"fullgraph": True, "backend": "aot_eager", "dynamic": True}
    compiled = [(torch.compile(owner, **options), owner) for owner in (block, plain)]
    for rows in (6, 9):
        x, results = torch.randn(rows, 32), []
        for call, owner in ((plain, plain), (block, block), *compiled):
            owner.zero_grad()
            inputs = x.clone().requires_grad_()
            y = call(inputs)
            y.square().sum().backward()
            results.append([y.detach(), inputs.grad, *(p.grad.clone() for p in owner.parameters())])
        for expected, eager, *late in zip(*results, strict=True):
            assert torch.equal(eager, expected)
            torch.testing.assert_close(late, [expected] * 2)
    by_hand = torch.nn.functional.linear(x, block[0].weight)  # a reader that knows no codes
    assert torch.equal(by_hand, torch.nn.functional.linear(x, block[0].weight.dequantized()))
    by_hand.sum().backward()
    with pytest.raises(PatchError, match="unpatch the model first"), torch.no_grad():
        block[0].weight.mul_(2)


# --- models that torchao has converted ---


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_models_of_torchao_keep_its_layers_and_get_our_norms(scaling):
    ao = pytest.importorskip("torchao.float8")
    config = dataclasses.replace(
        ao.Float8LinearConfig.from_recipe_name(scaling), emulate=True
    )  # on a CPU
    llama = model(hidden_size=64, intermediate_size=128)
    ao.convert_to_float8_training(
        llama, config=config, module_filter_fn=lambda module, name: name != "lm_head"
    )
    kinds = [type(m) for m in linears(llama)]
    assert {type_name.__name__ for type_name in kinds} == {"Float8Linear"}
    before = step(llama)
    report = patch(llama, linear_float8=ALL)
    assert (report.count("rms_norm"), report.count("swiglu")) == (5, 2)
    assert report.count("linear_float8") == 0
    reasons = {s.reason for s in report.skipped if s.op == "linear_float8" and s.path != "lm_head"}
    assert reasons == {"it has a forward of its own (Float8Linear)"}
    assert [type(m) for m in linears(llama)] == kinds
    after, recorded_calls = recorded_step(llama, "rms_norm", "swiglu", "rms_norm_quantized")
    assert [len(calls) for calls in recorded_calls.values()] == [5, 2, 0]
    assert abs(after[0] - before[0]) < 1e-5 * before[0]
    assert apart(after[1], before[1]) < 1e-2
    unpatch(llama)
    assert equal(step(llama), before)


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
    llama = model()
    with pytest.raises(PatchError, match=text):
        liger_multi.patch(llama, linear_float8=options)
    assert not any(isinstance(m, Float8Linear) for m in llama.modules())


# Frozen weights of patched models that are kept as codes in FP8.


def rounded(weight):
    return dequantized(PLAIN.rows(weight.detach(), None, torch.float8_e4m3fn), weight.dtype)


# --- frozen weights as codes ---


def test_a_frozen_model_multiplies_with_its_codes():
    """Equal, to the bit, to the model whose weights are rounded at every use."""
    llama, other = model(frozen=True, float8=FROZEN), model(frozen=True, float8=ALL)
    assert equal(step(llama), step(other))


@pytest.mark.parametrize("originals", [True, False])
def test_memory_is_codes_and_scales(originals):
    llama = model(torch.bfloat16, frozen=True)
    alive = [weakref.ref(m.weight) for m in linears(llama)]
    expected = [rounded(m.weight) for m in linears(llama)]
    patch(llama, linear_float8={**FROZEN, "originals": originals})
    assert not any(ref() is not None for ref in alive)
    for layer in linears(llama):
        weight, shape = layer.weight, layer.weight.shape
        assert isinstance(weight, nn.Parameter)
        assert (weight.dtype, weight.codes.dtype) == (torch.bfloat16, torch.float8_e4m3fn)
        assert (weight.codes.shape, weight.scale.shape) == (shape, shape[:1])
        assert (weight.original is not None) == originals
    unpatch(llama)
    if not originals:
        assert_equal([m.weight.detach() for m in linears(llama)], expected)


def test_checkpoints_hold_the_original_weights_and_load():
    llama = model(torch.bfloat16, frozen=True)
    state = copy.deepcopy(llama.state_dict())
    patch(llama, linear_float8=FROZEN)
    during = llama.state_dict()
    assert all(type(t) is torch.Tensor and torch.equal(t, state[n]) for n, t in during.items())
    other = model(torch.bfloat16, frozen=True)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    patch(llama, linear_float8=FROZEN)
    llama.load_state_dict(other.state_dict())
    assert all(isinstance(m.weight, Float8Weight) for m in linears(llama))
    patch(other, linear_float8=FROZEN)
    assert equal(step(llama), step(other))
    unpatch(llama)
    assert all(torch.equal(t, 1.5 * state[n]) for n, t in llama.state_dict().items())


def test_copies_and_pickles_are_models_of_their_own():
    llama = model(frozen=True)
    state = copy.deepcopy(llama.state_dict())
    patch(llama, linear_float8=FROZEN)
    before = step(llama)
    copied = copy.deepcopy(llama)
    file = io.BytesIO()
    torch.save(llama, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    unpatch(llama)
    for other in (copied, loaded):
        assert equal(step(other), before)
        unpatch(other)
        assert all(torch.equal(t, state[n]) for n, t in other.state_dict().items())


def test_another_device_dtype_or_reader():
    llama = model(torch.bfloat16, frozen=True, float8=FROZEN)
    layer = linears(llama)[0]
    assert torch.equal(layer.weight + 0, layer.weight.dequantized())
    assert torch.equal(layer.weight.detach()[2], layer.weight.dequantized()[2])
    x = torch.randn(4, layer.in_features, dtype=torch.bfloat16)
    by_hand = torch.nn.functional.linear(x, layer.weight)
    assert torch.equal(by_hand, torch.nn.functional.linear(x, layer.weight.dequantized()))
    llama.float()
    assert isinstance(layer.weight, Float8Weight)
    assert layer.weight.dtype == torch.float32
    llama.to("meta")
    assert layer.weight.codes.is_meta


WRITES = {
    "data": lambda w: w.data.add_(1),
    "no_grad": lambda w: torch.no_grad()(w.mul_)(2),
    "a view": lambda w: torch.no_grad()(w.zero_)(),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_refused_and_name_the_way_out(name):
    llama = model(frozen=True, float8=FROZEN)
    before = step(llama)
    with pytest.raises(PatchError, match="unpatch the model first"):
        WRITES[name](linears(llama)[0].weight)
    assert equal(step(llama), before)


@pytest.mark.parametrize("frozen", [True, False])
def test_inference_mode_and_generation(frozen):
    llama = model(frozen=frozen, float8=FROZEN if frozen else ALL)
    with torch.inference_mode():
        inside = llama(input_ids=ids()).logits + 0
    with torch.no_grad():
        assert torch.equal(inside, llama(input_ids=ids()).logits + 0)
    assert llama.generate(ids()[:, :4], max_new_tokens=3, pad_token_id=0).shape == (2, 7)


def test_shared_weights_stay_shared():
    pair = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    pair[1].weight = pair[0].weight
    pair.requires_grad_(False)
    report = patch(pair, linear_float8=FROZEN)
    assert [s.reason for s in report.skipped if s.op == "linear_float8"] == [
        "its weight is that of another layer too, which would lose it"
    ] * 2
    unpatch(pair)
    assert pair[0].weight is pair[1].weight


def test_replaced_weight_is_quantized_again():
    llama = model(frozen=True, float8=FROZEN)
    llama.load_state_dict(model(frozen=True).state_dict(), assign=True)
    llama.requires_grad_(False)
    assert not any(isinstance(m.weight, Float8Weight) for m in linears(llama))
    patch(llama, linear_float8=FROZEN)
    assert all(isinstance(m.weight, Float8Weight) for m in linears(llama))


def test_trained_weights_are_skipped_and_codes_cannot_be_trained():
    llama = model(frozen=True)
    linears(llama)[0].weight.requires_grad_(True)
    report = patch(llama, linear_float8=FROZEN)
    (path,) = [s.path for s in report.skipped if "requires a gradient" in s.reason]
    assert path.endswith("q_proj")
    assert report.count("linear_float8") == 13
    linears(llama)[1].weight.requires_grad_(True)
    with pytest.raises(PatchError, match="cannot be trained"):
        step(llama)


def test_a_step_dequantizes_no_frozen_weight(monkeypatch):
    """Codes go into GEMMs as they are; the CPU has none, so another function takes its place."""
    llama = model(frozen=True, hidden_size=64, intermediate_size=256, vocab_size=31, float8=FROZEN)
    dtypes = []

    def product(a, b, dtype, fast=False):
        dtypes.extend((a.codes.dtype, b.codes.dtype))
        return a.scale.new_zeros(len(a.scale), len(b.scale), dtype=dtype)

    monkeypatch.setattr(frozen_rows, "product", product)
    with Operations() as operations:
        step(llama, ids(1, 4) % 31)
    assert dtypes == [torch.float8_e4m3fn] * 2 * 2 * 14
    assert max(t.nbytes for t in operations.tensors() if t.itemsize > 1) < 64 * 256 * 2


# Codes that norms and activations hand to layers in FP8, and MLPs of such layers.


def roundings(calls):
    """How many layers, or MLPs of them, rounded their input, of how many."""
    actual = [
        args[OPS[name].fwd.params.index("codes")] is None
        for name in ("linear_float8", "gated_mlp_float8")
        for args in calls.get(name, [])
    ]
    return sum(actual), len(actual)


CODED = ("rms_norm_quantized", "swiglu_quantized", "linear_float8", "gated_mlp_float8")
IN_LAYERS = {"swiglu": {"whole": False}}


@pytest.mark.parametrize("options", [ALL, FROZEN], ids=["trained", "frozen"])
def test_norms_and_activations_write_codes(options):
    """From the second step on; of the layers of a block only o_proj rounds, and no bit differs."""
    llama = model(torch.bfloat16, frozen=options is FROZEN)
    patch(llama, linear_float8=options, **IN_LAYERS)
    first, calls = recorded_step(llama, *CODED)
    assert not calls["rms_norm_quantized"]
    assert not calls["swiglu_quantized"]
    assert roundings(calls) == (8, 14)
    for _ in range(2):
        again, calls = recorded_step(llama, *CODED)
        assert equal(again, first)
        assert len(calls["rms_norm_quantized"]) == 4
        assert len(calls["swiglu_quantized"]) == 2
        assert roundings(calls) == (2, 14)


# --- a whole MLP of layers in FP8 ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [ALL, FROZEN], ids=["trained", "frozen"])
def test_a_whole_mlp_has_the_bits_of_its_layers(options, dtype):
    """Also where the norm before it hands out codes, from the second step on."""
    frozen = options is FROZEN
    llama, layers = model(dtype, frozen), model(dtype, frozen)
    report = patch(llama, linear_float8=options)
    assert {e.replaced_by for e in report.entries if e.op == "swiglu"} == {"gated_mlp_float8[silu]"}
    patch(layers, linear_float8=options, **IN_LAYERS)
    for rounding in (True, False):
        actual, calls = recorded_step(llama, *CODED)
        assert equal(actual, step(layers))
        assert roundings(calls) == ((6, 10) if rounding else (2, 10))
        assert not calls["swiglu_quantized"]


def kept_bytes(llama):
    loss, tensors = saved(lambda: llama(input_ids=ids(), labels=ids()).loss, but=llama.parameters())
    loss.backward()
    return storage_bytes(tensors)


def test_a_whole_mlp_keeps_one_activation_less():
    whole, layers = model(torch.bfloat16), model(torch.bfloat16)
    patch(whole, linear_float8=ALL)
    patch(layers, linear_float8=ALL, **IN_LAYERS)
    inner = ids().numel() * whole.config.intermediate_size * 2
    assert kept_bytes(layers) - kept_bytes(whole) == whole.config.num_hidden_layers * inner


@pytest.mark.parametrize("case", ["trained", "adapters"])
def test_the_last_gemm_of_an_mlp_is_not_computed_again(case):
    """Nor is the product before it; bits are those of a model that keeps all."""
    make, float8 = (adapted, FROZEN) if case == "adapters" else (model, ALL)
    llama, reference = make(torch.bfloat16, float8=float8), make(torch.bfloat16, float8=float8)
    checkpointed(llama, False)
    names = ("linear_float8", "lora_qkv", "swiglu_quantized", "gated_mlp_float8", "lora_mlp")
    actual, calls = recorded_step(llama, *names)
    assert equal(actual, step(reference))
    # of a layer twice: q, k and v, o, gate and up; once: the product and down
    layers, fused = llama.config.num_hidden_layers, case == "adapters"
    expected = (2, 2 + 2 + 1, 1, 0, 0) if fused else (2 * 6 + 1, 0, 1, 0, 0)
    assert [len(calls[n]) for n in names] == [count * layers for count in expected]


def test_a_whole_mlp_accumulates_and_takes_a_second_backward():
    llama, layers = model(torch.bfloat16, float8=ALL), model(torch.bfloat16)
    patch(layers, linear_float8=ALL, **IN_LAYERS)
    for each in (llama, layers):
        for _ in range(2):
            loss = each(input_ids=ids(), labels=ids()).loss
            loss.backward(retain_graph=True)
        loss.backward()
    pairs = zip(llama.parameters(), layers.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


def test_a_whole_mlp_compiled_equals_eager():
    llama = model(float8=ALL)
    mlp = llama.model.layers[0].mlp
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (6, 9):
        x = torch.randn(2, rows, llama.config.hidden_size, requires_grad=True)
        inputs = [x, *mlp.parameters()]
        actual = [[y, *torch.autograd.grad(y.sum(), inputs)] for y in (compiled(x), mlp(x))]
        assert all(torch.equal(a, b) for a, b in zip(*actual, strict=True))


@pytest.mark.parametrize("what", ["a hook", "a small layer", "a backend"])
def test_an_mlp_of_other_layers_runs_them(what):
    """A hook is called, a layer in 16 bits multiplies in them, and a named backend serves all."""
    llama, expected = model(), model()
    for each, how in ((llama, {}), (expected, IN_LAYERS)):
        eight = dict(ALL, **({"backend": "reference"} if what == "a backend" else {}))
        patch(each, linear_float8=eight, **how)
        for layer in each.model.layers:
            if what == "a hook":
                layer.mlp.up_proj.register_forward_hook(lambda m, a, y: 2 * y)
            elif what == "a small layer":
                unpatch(layer.mlp.up_proj)
    actual, calls = recorded_step(llama, *CODED)
    assert not calls["gated_mlp_float8"]
    assert equal(actual, step(expected))


def test_models_without_such_layers_hand_out_nothing():
    llama, other = model(float8=ALL), model(patching={})
    for _ in range(2):
        step(llama)
    with recorded(*CODED) as calls:
        for _ in range(2):
            step(other)
    assert not any(calls.values())
    patch(llama)  # layers as they were: the first call finds its codes unread, and is the last
    _, calls = recorded_step(llama, *CODED)
    assert len(calls["rms_norm_quantized"]) == 4
    _, calls = recorded_step(llama, *CODED)
    assert not any(calls.values())


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
    with recorded(f"{name}_quantized", "linear_float8") as calls:
        y = block(x)
    assert len(calls[f"{name}_quantized"]) == 1
    assert roundings(calls) == (0, 1)
    expected = ops.linear_float8(block.norm(x), block.layer.weight, block.layer.bias)
    assert torch.equal(y, expected)
    assert torch.equal(*(torch.autograd.grad(one.sum(), x)[0] for one in (y, expected)))


BETWEEN = {
    "written to": lambda h: h.mul_(-3.0),
    "a view written to": lambda h: (h[:2].zero_(), h)[1],
    "another tensor": lambda h: h * -3.0,
    "detached": lambda h: h.detach(),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_other_result_is_rounded(what):
    block = learned(Block(nn.RMSNorm(32, eps=1e-5), BETWEEN[what]), torch.randn(4, 32))
    x = torch.randn(4, 32)
    with torch.no_grad(), recorded("rms_norm_quantized", "linear_float8") as calls:
        y = block(x)
        expected = nn.functional.rms_norm(x, (32,), block.norm.weight, 1e-5)
        expected = ops.linear_float8(BETWEEN[what](expected), block.layer.weight, block.layer.bias)
    assert len(calls["rms_norm_quantized"]) == 1
    assert roundings(calls)[0] == 2
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("where", ["norm", "layer", "all modules"])
def test_hooks_writing_past_the_version_counter(where):
    """No version counts what a hook writes through ``.data``, so codes are not handed past it."""
    block, x = learned(Block(nn.RMSNorm(32, eps=1e-5)), torch.randn(4, 32)), torch.randn(4, 32)

    def after(module, args, y):
        if module is block.norm:
            y.data.mul_(-3.0)

    def before(module, args):
        args[0].data.mul_(-3.0)

    hook = {
        "norm": lambda: block.norm.register_forward_hook(after),
        "layer": lambda: block.layer.register_forward_pre_hook(before),
        "all modules": lambda: nn.modules.module.register_module_forward_hook(after),
    }[where]()
    with torch.no_grad():
        y = block(x)
        hook.remove()
        expected = -3.0 * nn.functional.rms_norm(x, (32,), block.norm.weight, 1e-5)
        expected = ops.linear_float8(expected, block.layer.weight, block.layer.bias)
    torch.testing.assert_close(y, expected)


def test_autocast_decides_whether_codes_fit():
    """A layer rounds what autocast makes of a result: of the same dtype, that is the result."""
    block = Block(nn.RMSNorm(32, eps=1e-5))
    learned(block, torch.randn(4, 32))
    x = torch.randn(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            with recorded("linear_float8") as calls:
                y = block(x)
            assert roundings(calls) == (1, 1)
        expected = ops.linear_float8(block.norm(x), block.layer.weight, block.layer.bias)
    assert torch.equal(y, expected)
    block.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        block(x.bfloat16())
        with recorded("linear_float8") as calls:
            block(x.bfloat16())
    assert roundings(calls) == (0, 1)


def test_a_pinned_backend_runs_its_own_norm():
    block, x = learned(Block(nn.RMSNorm(32, eps=1e-5)), torch.randn(4, 32)), torch.randn(4, 32)
    with recorded("rms_norm_quantized", "linear_float8") as calls:
        with liger_multi.use(rms_norm="reference"):
            block(x)
        assert not calls["rms_norm_quantized"]
    assert roundings(calls) == (1, 1)


def test_dispatch_modes_see_the_calls_of_the_first_step():
    """Selective checkpointing looks operations up by name when it computes again."""
    block, x = learned(Block(nn.RMSNorm(32, eps=1e-5)), torch.randn(4, 32)), torch.randn(4, 32)
    with recorded("rms_norm_quantized") as calls, Operations():
        block(x)
    assert not calls["rms_norm_quantized"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_after_codes_are_handed_out(reentrant):
    """Also where forward has plain norms and the recomputation has codes."""
    llama = model(float8=ALL)
    expected = step(llama)
    assert equal(step(llama), expected)
    other = checkpointed(model(float8=ALL), reentrant)
    assert all(equal(step(other), expected) for _ in range(2))


# --- adapters ---


def adapted(dtype=torch.float32, float8=None, **settings):
    llama = adapters(model(dtype), LAYERS, seed=1, std=0.05, **settings)
    if float8 is not None:
        patch(llama, linear_float8=float8)
    return llama


# Adapters on layers in FP8.


def test_adapters_on_a_frozen_base():
    """The loss equals that on a base that is rounded at every use, layer by layer.

    Gradients of x are sums of several layers in another order, and almost always round alike.
    """
    llama, other = adapted(), adapted()
    report = patch(llama, linear_float8=FROZEN)
    assert report.count("linear_float8") == report.count("lora") == 14
    assert not any("lora_A" in e.path or "lora_B" in e.path for e in report.entries)
    patch(other, linear_float8=ALL)
    actual, expected = step(llama), step(other)
    assert actual[0] == expected[0]
    assert apart(actual[1], expected[1]) < 1e-5


def test_fused_adapters_are_as_exact_as_layers():
    """In bf16, other roundings of 16 bits lead to other codes; errors are as large."""
    _, exact = step(adapted())
    results = []
    for options in (FROZEN, ALL):
        loss, gradients = step(adapted(torch.bfloat16, float8=options))
        wrong = sum((g.float() - exact[n]).square().sum() for n, g in gradients.items())
        results.append((loss, wrong.sqrt().item()))
    (fused_loss, fused), (loss, layers) = results
    assert fused_loss == loss
    assert fused < 1.1 * layers


FUSED = ("lora_qkv", "lora_mlp", "linear_float8", "rms_norm_quantized")


def argument_of(calls, name):
    """Whether calls of an operator were given codes of their input."""
    place = OPS[name].fwd.params.index("codes")
    return [args[place] is not None for args in calls[name]]


def test_fused_adapters_take_weights_and_codes_in_float8():
    llama = adapted()
    report = patch(llama, linear_float8=FROZEN)
    assert any(e.replaced_by == "lora_mlp[silu]" for e in report.entries)
    first, calls = recorded_step(llama, *FUSED)
    assert argument_of(calls, "lora_qkv") == argument_of(calls, "lora_mlp") == [False, False]
    assert len(calls["linear_float8"]) == 2  # o_proj
    again, calls = recorded_step(llama, *FUSED)
    assert equal(again, first)
    assert argument_of(calls, "lora_qkv") == argument_of(calls, "lora_mlp") == [True, True]
    assert len(calls["rms_norm_quantized"]) == 4


def test_adapters_on_some_layers_of_a_frozen_base():
    """q and v are fused; k runs over codes as a layer, and the MLP as a whole."""
    peft = pytest.importorskip("peft")
    results = []
    for options in (FROZEN, ALL):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        llama = peft.get_peft_model(model(), config)
        patch(llama, linear_float8=options)
        step(llama)
        with recorded(*FUSED, "gated_mlp_float8") as calls:
            results.append(step(llama))
        if options is FROZEN:
            assert argument_of(calls, "lora_qkv") == [True, True]
            assert roundings(calls) == (2, 6)  # of k, o and the MLP, o
    assert results[0][0] == results[1][0]
    assert apart(results[0][1], results[1][1]) < 1e-5


def test_small_layers_of_fused_adapters_stay_in_16_bits():
    llama = adapted(float8={**FROZEN, "smallest": 32 * 32})
    layers = llama.base_model.model.model.layers[0].self_attn
    weights = [layers.get_submodule(f"{n}_proj").base_layer.weight for n in "qkv"]
    assert [isinstance(w, Float8Weight) for w in weights] == [True, False, False]
    _, calls = recorded_step(llama, *FUSED)
    place = OPS["lora_qkv"].fwd.params.index("q_weight_scale")
    every = [[t is not None for t in args[place : place + 3]] for args in calls["lora_qkv"]]
    assert every == [[True, False, False]] * 2


def test_compiled_fused_adapters_equal_eager():
    mlp = adapted(float8=FROZEN).base_model.model.model.layers[0].mlp
    x = torch.randn(5, 32, requires_grad=True)
    eager = mlp(x)
    torch.testing.assert_close(torch.compile(mlp, fullgraph=True, backend="aot_eager")(x), eager)


def test_adapters_added_saved_and_merged(tmp_path):
    peft = pytest.importorskip("peft")
    llama = model().requires_grad_(False)
    patch(llama, linear_float8=FROZEN)
    wrapped = peft.get_peft_model(llama, peft.LoraConfig(r=4, target_modules=list(LAYERS)))
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
    assert wrapped.merge_and_unload()(input_ids=ids(), labels=ids()).loss < losses[0]
