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
from liger_multi.dispatch.torch_ops import Primitive
from liger_multi.errors import PatchError
from liger_multi.patching import patch, patched, unpatch
from liger_multi.patching.float8 import linear as float8
from liger_multi.patching.float8.linear import Float8Linear
from liger_multi.patching.float8.weight import Float8Weight, GatheredWeight
from liger_multi.reference.float8.rows import PLAIN, dequantized
from tests.comparing import Operations, gradients
from tests.models import VOCABULARY, build

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


def test_small_layers_and_heads_stay_and_the_report_says_why():
    report = patch(model(), linear_float8=True)
    reasons = {s.path: s.reason for s in report.skipped if s.op == "linear_float8"}
    assert len(reasons) == 15
    assert "it is small" in reasons["model.layers.0.self_attn.q_proj"]
    assert "smallest=4,194,305" in reasons["model.layers.0.self_attn.q_proj"]
    assert "output embedding" in reasons["lm_head"]
    patch(model(), strict=True, linear_float8=True)  # being small is no failure


def test_other_layers_stay():
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
    llama = model(float8=ALL)
    before = step(llama)
    checkpointed(llama, reentrant)
    assert equal(step(llama), before)


def test_weights_written_past_the_version_counter_are_seen():
    """Optimizers in C and ``p.data`` write so; codes of a weight live no longer than a GEMM."""
    llama = model(float8=ALL)
    fresh = model(float8=ALL)
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
            if "float8" in prim.op.name and prim.direction == "forward" and name.endswith("weight"):
                scale = inputs.get(f"{name}_scale", ...)
                if scale is None and isinstance(t, torch.Tensor):
                    observed["within" if t.numel() else "apart"] += 1
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
    waiting = float8._followed()[-1].weights.values()
    assert max(len(w.uses) for w in waiting) < float8.USES

    def train():
        step(llama)
        for p in llama.parameters():
            p.data.add_(p.grad, alpha=-0.05)

    with pytest.raises(PatchError, match="leave cache=True of linear_float8 out"):
        repeated(train, 2 * float8.USES)
    step(llama)
    optimizer.step()


def repeated(function, times):
    for _ in range(times):
        function()


def test_uncounted_writes_raise_before_the_step():
    llama, optimizer = cached()
    weight = linears(llama)[3].weight
    weight.data[5, 7] += 1e-6 + weight.data[5, 7].abs()
    before = copy.deepcopy(llama.state_dict())
    with pytest.raises(PatchError, match="leave cache=True of linear_float8 out"):
        optimizer.step()
    assert all(torch.equal(before[n], t) for n, t in llama.state_dict().items())
    patch(llama, linear_float8=ALL)
    step(llama)
    optimizer.step()


def test_uncounted_writes_raise_where_they_are_undone():
    """Methods that take a gradient elsewhere write through ``.data``, and back before the step."""
    llama, optimizer = cached()
    own = [p.detach().clone() for p in llama.parameters()]
    for p in llama.parameters():
        p.data.mul_(1.5)
    step(llama)
    for p, value in zip(llama.parameters(), own, strict=True):
        p.data.copy_(value)
    with pytest.raises(PatchError, match="leave cache=True of linear_float8 out"):
        optimizer.step()
    step(llama)
    optimizer.step()


def test_passes_without_gradients_do_not_read_kept_codes():
    """An evaluation with averaged weights writes them through ``.data``, and back."""
    llama, other = cached_and_fresh()
    optimizer = optimizer_of(llama)
    expected = step(llama)
    own = [p.detach().clone() for p in llama.parameters()]
    with torch.no_grad():
        for p, q in zip(llama.parameters(), other.parameters(), strict=True):
            p.data.mul_(0.5)
            q.data.copy_(p)
        assert torch.equal(llama(input_ids=ids()).logits + 0, other(input_ids=ids()).logits + 0)
        for p, value in zip(llama.parameters(), own, strict=True):
            p.data.copy_(value)
    assert equal(step(llama), expected)
    optimizer.step()


def test_kept_codes_go_with_the_step_and_with_the_model():
    def count():
        return sum(w.cached is not None for f in float8._followed() for w in f.weights.values())

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
    llama = model(float8=ALL)
    with torch.autocast("cpu", torch.bfloat16):
        loss = llama(input_ids=ids(), labels=ids()).loss
    loss.backward()
    once = {n: p.grad.clone() for n, p in llama.named_parameters()}
    assert all(g.dtype == torch.float32 for g in once.values())
    with torch.autocast("cpu", torch.bfloat16):
        llama(input_ids=ids(), labels=ids()).loss.backward()
    assert all(torch.equal(p.grad, 2 * once[n]) for n, p in llama.named_parameters())


def test_a_block_ends_and_nothing_stays():
    llama = model(frozen=True)
    before = step(llama)
    weights = [m.weight.detach().clone() for m in linears(llama)]
    with patched(llama, linear_float8=FROZEN):
        with patched(llama, linear_float8=ALL):
            assert not any(isinstance(m.weight, Float8Weight) for m in linears(llama))
        assert all(isinstance(m.weight, Float8Weight) for m in linears(llama))
    assert all(type(m) is nn.Linear for m in linears(llama))
    assert all(
        torch.equal(m.weight, w) and type(m.weight) is nn.Parameter
        for m, w in zip(linears(llama), weights, strict=True)
    )
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
    torch._dynamo.reset()
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
    with recorded("rms_norm", "swiglu", "rms_norm_quantized") as recorded_calls:
        after = step(llama)
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
    pairs = zip(linears(llama), expected, strict=True)
    assert originals or all(torch.equal(m.weight, w) for m, w in pairs)


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


def test_codes_cannot_be_trained():
    llama = model(frozen=True, float8=FROZEN)
    linears(llama)[0].weight.requires_grad_(True)
    with pytest.raises(PatchError, match="cannot be trained"):
        step(llama)


def test_trained_weights_are_skipped():
    llama = model(frozen=True)
    linears(llama)[0].weight.requires_grad_(True)
    report = patch(llama, linear_float8=FROZEN)
    (path,) = [s.path for s in report.skipped if "requires a gradient" in s.reason]
    assert path.endswith("q_proj")
    assert report.count("linear_float8") == 13


def test_a_step_dequantizes_no_frozen_weight(monkeypatch):
    """Codes go into GEMMs as they are; the CPU has none, so another function takes its place."""
    llama = model(frozen=True, hidden_size=64, intermediate_size=256, vocab_size=31, float8=FROZEN)
    shapes = []

    def recorded(a, b, dtype, fast=False):
        shapes.append((a.codes.dtype, b.codes.dtype))
        return a.scale.new_zeros(len(a.scale), len(b.scale), dtype=dtype)

    from liger_multi.reference.float8 import frozen

    monkeypatch.setattr(frozen, "product", recorded)
    with Operations() as operations:
        step(llama, ids(1, 4) % 31)
    assert {type_name for pair in shapes for type_name in pair} == {torch.float8_e4m3fn}
    assert len(shapes) == 2 * 14
    sizes = [t.nbytes for t in operations.tensors() if t.itemsize > 1]
    assert max(sizes) < 64 * 256 * 2
