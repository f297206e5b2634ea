"""Captured and compiled forwards before and after a patch; patches of other libraries."""

# ruff: noqa: E402  (what needs transformers is imported after the skip)
import contextlib
import copy
import functools
import gc
import operator
import pickle
import random
import sys
import threading
import types
import warnings
from abc import ABCMeta
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

transformers = pytest.importorskip("transformers")


from transformers.models.llama.modeling_llama import LlamaMLP

import liger_multi.patching
from liger_multi.errors import PatchError
from liger_multi.patching import (
    Replacement,
    apply,
    patch,
    patched,
    register,
    unpatch,
    unregister,
)
from liger_multi.patching.apply import TrainerPatch
from liger_multi.patching.swap import swapped
from tests.harness import PATIENCE
from tests.models import (
    ARCHITECTURES,
    Calls,
    Graphs,
    Norm,
    adapters,
    assert_same_compiled,
    assert_same_training,
    batch,
    build,
    pair,
    patched_ops,
)
from tests.patching.test_evidence_signature import ALONE, Holder, Tuned, doubled, patched_pair
from tests.patching.test_norms import modeling

# --- captured forwards ---


def wrapped(module):
    """As accelerate's hooks: the old forward stays with the module, another one calls it."""
    module._old_forward = module.forward
    module.forward = functools.update_wrapper(functools.partial(_called, module), module.forward)


def _called(module, *args, **kwargs):
    return module._old_forward(*args, **kwargs)


KINDS_OF_MODULES = {
    "mlp": lambda model: model.model.layers[0].mlp,
    "norm": lambda model: model.model.norm,
    "attention": lambda model: model.model.layers[0].self_attn,
    "experts": lambda model: model.model.layers[0].mlp.experts,
}


@pytest.mark.parametrize("part", KINDS_OF_MODULES)
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("how", ["unpatch", "patched"])
def test_a_captured_forward_works_after_the_patch(part, copied, how, monkeypatch):
    calls = Calls(monkeypatch)
    stock, ours = pair("mixtral" if part == "experts" else "llama")

    if how == "unpatch":
        patch(ours)
        wrapped(KINDS_OF_MODULES[part](ours))
        unpatch(ours)
    else:
        with patched(ours):
            wrapped(KINDS_OF_MODULES[part](ours))
    model = copy.deepcopy(ours) if copied else ours
    calls.clear()
    assert_same_training(stock, model)
    assert not calls
    module = KINDS_OF_MODULES[part](model)
    module.forward = module._old_forward  # as accelerate removes its hooks
    del module._old_forward
    assert not [s for s in patch(model).skipped if "somebody else" in s.reason]
    calls.clear()
    assert_same_training(stock, model)
    assert calls


def test_a_captured_forward_is_pickled():
    stock, ours = pair(patching={})
    mlp_of = ours.model.layers[0].mlp
    mlp_of._old_forward = mlp_of.forward
    twin = pickle.loads(pickle.dumps(ours))
    unpatch(twin)
    module = twin.model.layers[0].mlp
    assert module._old_forward.__self__ is module
    x = torch.randn(2, 32)
    torch.testing.assert_close(module._old_forward(x), stock.model.layers[0].mlp(x))


def test_accelerates_hooks_before_and_after_unpatching():
    accelerate = pytest.importorskip("accelerate")
    stock, ours = pair(patching=ALONE)
    accelerate.cpu_offload(ours, execution_device=torch.device("cpu"))
    with torch.no_grad():
        expected = stock(**batch()).loss
        torch.testing.assert_close(ours(**batch()).loss, expected)
        unpatch(ours)
        torch.testing.assert_close(ours(**batch()).loss, expected)


def test_a_compiled_forward_after_unpatching():
    stock, ours = pair(num_hidden_layers=1, patching={})
    module = ours.model.layers[0].mlp
    module.forward = torch.compile(module.forward, backend="eager", fullgraph=True)
    assert_same_training(stock, ours)
    unpatch(ours)
    assert_same_training(stock, ours)


def test_a_captured_forward_of_a_probe_of_a_user(request):
    module, x = nn.Tanh(), torch.ones(1)
    register(lambda m: Replacement(_twice, "twice") if type(m) is nn.Tanh else None, "twice")
    request.addfinalizer(lambda: unregister("twice"))
    patch(Holder(module), **ALONE)
    held = module.forward
    assert torch.equal(held(x), x.tanh() * 2)
    unpatch(Holder(module))
    assert torch.equal(held(x), x.tanh())


def _twice(module, stock, x):
    return stock(x) * 2


def test_captured_forwards_of_adapters():
    stock = adapters(build(), ["q_proj", "k_proj", "v_proj", "down_proj"], r=2)
    ours = copy.deepcopy(stock)
    assert patch(ours, **ALONE).count("lora") == 8
    for module in ours.modules():
        if hasattr(module, "lora_A") or type(module).__name__ == "LlamaAttention":
            wrapped(module)
    assert_same_training(stock, ours)
    unpatch(ours)
    assert_same_training(stock, ours)


# --- compiled ---


@pytest.mark.slow
def test_compiled_graphs_keep_compiled_code():
    stock, ours = pair(num_hidden_layers=1, patching={})
    graphs = Graphs()
    for model in (stock, ours):
        model.model.layers[0].mlp.act_fn.register_forward_hook(doubled)
    assert_same_compiled(stock, ours, batch() | {"use_cache": False}, backend=graphs)
    assert "ops/gated_mlp.py" not in graphs.traces
    assert "ops/rms_norm.py" in graphs.traces


def test_a_changed_attribute_compiles_again():
    stock, ours, entries, _ = patched_pair(Tuned())
    assert entries == ["gated_mlp[silu]"]
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    x = torch.randn(3, 12)
    torch.testing.assert_close(compiled(x), stock(x))
    stock.scale = ours.scale = 0.5
    torch.testing.assert_close(compiled(x), stock(x))


# --- patches of other libraries ---


def foreign(function, library):
    """A copy that a library might have put there, which computes the same."""
    parts = function.__name__, function.__defaults__, function.__closure__
    copied = types.FunctionType(function.__code__, function.__globals__, *parts)
    copied.__module__, copied.__kwdefaults__ = library, function.__kwdefaults__
    return copied


LOSS, LIGER = "fused_linear_cross_entropy", "liger_kernel.transformers.x"
FOREIGN = {
    "module": (LlamaMLP, "forward", LIGER, "swiglu", "Liger serves it (LlamaMLP)"),
    "loss in a forward": (
        *(transformers.LlamaForCausalLM, "forward", LIGER, LOSS),
        "Liger replaced the forward of LlamaForCausalLM, with the loss in it",
    ),
    "loss": (
        *(F, "cross_entropy", "unsloth_zoo.losses", LOSS),
        "Unsloth replaced torch.nn.functional.cross_entropy",
    ),
    "head of a trainer": (
        *(None, "forward", "trl.trainer.utils", LOSS),
        "TRL replaced the forward of LlamaForCausalLM",
    ),
    "rotary": (
        *(modeling("llama"), "apply_rotary_pos_emb", LIGER, "rope"),
        "Liger put its apply_rotary_pos_emb into the modeling file",
    ),
}


@pytest.mark.parametrize(
    ("owner", "name", "library", "op", "reason"), FOREIGN.values(), ids=FOREIGN
)
def test_functions_of_other_libraries_are_left(owner, name, library, op, reason, monkeypatch):
    model = build("llama")
    function = foreign(getattr(owner or type(model), name), library)
    monkeypatch.setattr(
        owner or model, name, function if owner else types.MethodType(function, model)
    )
    report = patch(model)
    assert (report.count(op), report.count("rms_norm")) == (0, 5)
    assert any(s.reason.startswith(reason) for s in report.skipped if s.op == op)
    with pytest.raises(PatchError, match=reason.split()[0]):
        patch(model, strict=True)


# Another thread ends or changes a patch while a forward runs, at every line of the patching code.
#
# A trace function stands for the other thread: threads switch between any two lines.


FOLDER = liger_multi.patching.__path__[0]
OTHER = {"rms_norm": False, "swiglu": False, "rope": False, "fused_linear_cross_entropy": False}
KINDS = ("llama", "gemma2", "qwen3_moe")


def build_case(model_type):
    torch.manual_seed(0)
    if model_type == "adapters":
        layers = ["q_proj", "k_proj", "v_proj", "up_proj", "lm_head"]
        return adapters(build("llama", num_hidden_layers=1), layers, r=2)
    return build(model_type, num_hidden_layers=ARCHITECTURES[model_type].fewest_layers)


def results(model):
    model.zero_grad()
    outputs = model(**batch())
    outputs.loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": outputs.loss.detach(), "logits": (outputs.logits * 1.0).detach(), **grads}


class Meanwhile:
    """Calls ``action`` when a line of the patching code is first reached; counts the lines."""

    def __init__(self, line=None, action=lambda: None):
        self.line, self.action, self.lines = line, action, {}

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        here = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and here not in self.lines:
            self.lines[here] = True
            if here == self.line:
                self.action()
        return self

    def run(self, model):
        before = sys.gettrace()
        sys.settrace(self)
        try:
            return results(model)
        finally:
            sys.settrace(before)


def cases():
    """Model and options of the other patch, None for its end; the first of them is quick."""
    for model_type in (*KINDS, "adapters"):
        for other, name in ((None, "ended"), (OTHER, "changed")):
            marks = () if model_type == "llama" and other is None else pytest.mark.slow
            yield pytest.param(model_type, other, id=f"{model_type}-{name}", marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "other"), list(cases()))
def test_at_every_line(model_type, other):
    model = build_case(model_type)
    expected = results(model)

    def act():
        unpatch(model) if other is None else patch(model, **other)

    patch(model)
    meanwhile = Meanwhile()
    meanwhile.run(model)
    assert len(meanwhile.lines) > 100
    for line in meanwhile.lines:
        patch(model)
        actual = Meanwhile(line, act).run(model)
        torch.testing.assert_close(
            actual, expected, rtol=1e-4, atol=1e-5, msg=lambda m, line=line: f"{line}: {m}"
        )
    unpatch(model)
    assert all(swapped(m) is None for m in model.modules())


# What ``patched`` blocks leave behind: nothing, in whatever order and thread they end.


FORMS = (
    {},
    {"rms_norm": False},
    {"swiglu": False, "rope": False},
    {"fused_linear_cross_entropy": {"chunk": 3}},
    {"fused_linear_cross_entropy": False, "lora": False},
)


def state(model):
    return [type(m) for m in model.modules()]


def small():
    return build("llama", num_hidden_layers=1)


def clean():
    """Whether no model type is patched, and the constructor is that of transformers."""
    constructor = transformers.PreTrainedModel.post_init
    stock = constructor.__module__ == "transformers.modeling_utils"
    return not apply._requests and stock and not hasattr(constructor, "__wrapped__")


def enter(target, **options):
    block = patched(target, **options)
    block.__enter__()
    return block


def leave(block):
    block.__exit__(None, None, None)


# --- model types ---


def test_type_blocks_end_in_any_order():
    first, second = enter("llama"), enter("llama", fused_linear_cross_entropy=False)
    other = enter("qwen3")
    leave(first)
    model = small()
    assert patched_ops(model)
    assert type(model.lm_head) is nn.Linear  # the newest of the open blocks
    leave(second)
    assert not patched_ops(small())
    assert patched_ops(build("qwen3", num_hidden_layers=1))
    leave(other)
    assert clean()


def test_patch_and_unpatch_of_a_type_within_blocks():
    with patched("llama"):
        patch("llama", fused_linear_cross_entropy=False)
        assert type(small().lm_head) is nn.Linear
        with patched("llama"):
            assert type(small().lm_head) is not nn.Linear
    assert type(small().lm_head) is nn.Linear  # a patch outlasts the block
    assert patched_ops(small())
    with patched("llama"):
        unpatch("llama")
        assert not patched_ops(small())
        with pytest.raises(PatchError, match="'llama' is not patched"):
            unpatch("llama")
        patch("llama")
    assert patched_ops(small())
    unpatch("llama")
    assert clean()


def test_refused_block_requests_nothing():
    for options, message in (({"nosuch": True}, "nosuch"), ({"strict": 1}, "strict must be")):
        with pytest.raises(PatchError, match=message), patched("llama", **options):
            pass
    with pytest.raises(PatchError, match="unknown model type"), patched("lama"):
        pass
    assert clean()


def test_types_in_threads_leave_nothing_patched():
    ready, observed = threading.Barrier(6), []

    def work(index):
        generator = random.Random(index)
        for _ in range(15):
            ready.wait(60)
            model_type = generator.choice(("llama", "qwen3"))
            with patched(model_type, **generator.choice(FORMS)):
                with contextlib.suppress(PatchError):
                    if generator.random() < 0.2:
                        patch(model_type)
                        unpatch(model_type)
                observed.append(apply.is_type_patched(model_type))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert any(observed)
    assert clean()
    assert not patched_ops(small())


def test_models_of_every_thread_are_built_by_the_newest_request():
    inside, done = threading.Event(), threading.Event()

    def work():
        with patched("llama"):
            inside.set()
            assert done.wait(60)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(work)
        assert inside.wait(60)
        with patched("llama", fused_linear_cross_entropy=False):
            done.set()
            other.result(PATIENCE)
            model = small()
    assert patched_ops(model)
    assert type(model.lm_head) is nn.Linear
    assert clean()


# --- models ---


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_blocks_patches_and_parts(seed):
    """The configuration is that of the newest open block; at the end all is as it was."""
    generator = random.Random(seed)
    model = small()
    if generator.random() < 0.5:
        patch(model, **generator.choice(FORMS))
    before = state(model)
    targets = (model, model.model, model.model.layers[0].mlp, model)
    blocks = []
    for _ in range(14):
        if blocks and generator.random() < 0.45:
            leave(blocks.pop(generator.randrange(len(blocks)))[0])
        elif blocks and generator.random() < 0.3:
            generator.choice((patch, unpatch))(generator.choice(blocks)[1])
        else:
            target = generator.choice(targets)
            blocks.append((enter(target, **generator.choice(FORMS)), target))
    while blocks:
        leave(blocks.pop(generator.randrange(len(blocks)))[0])
    assert state(model) == before


def test_modules_added_and_removed_in_blocks():
    model = small()
    first = enter(model)
    stayed, model.model.norm = model.model.norm, type(small().model.norm)(32)
    second = enter(model)
    assert patched_ops(model.model.norm)
    leave(first)
    assert not patched_ops(stayed)
    late = type(small().model.norm)(32)
    model.model.norm, came = late, model.model.norm
    patch(model)
    leave(second)
    assert not any(map(patched_ops, (model, late, came)))


def test_blocks_with_exception_or_without_end():
    model = small()
    before = state(model)
    with pytest.raises(PatchError), patched(model, nosuch=True):
        pass
    assert state(model) == before
    outer = enter(model)
    forgotten = TrainerPatch(False, {"rms_norm": False})
    forgotten.hold(model)
    del forgotten
    gc.collect()
    leave(outer)
    assert state(model) == before


def test_callback_releases_in_another_order():
    model = small()
    before = state(model)
    block = enter(model, rms_norm=False)
    held = TrainerPatch(False, {})
    held.hold(model)
    newest = state(model)
    leave(block)
    assert state(model) == newest
    held.release()
    assert state(model) == before


@pytest.mark.parametrize("shared", [True, False])
def test_models_in_threads(shared):
    """Two threads patch the same model or one each; results are right all the time."""
    models = [small()] * 2 if shared else [small(), small()]
    before = [state(m) for m in models]
    inputs = batch()
    with torch.no_grad():
        expected = models[0](**inputs).loss

    def work(index):
        generator = random.Random(index)
        for _ in range(8):
            with patched(models[index], **generator.choice(FORMS)), torch.no_grad():
                torch.testing.assert_close(models[index](**inputs).loss, expected)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    assert [state(m) for m in models] == before


# --- options ---


@pytest.mark.parametrize("chunk", ["512MiB", "2KiB", "4096", "auto", 1])
@pytest.mark.parametrize("adapted", [False, True])
def test_patch_takes_chunks_of_the_operator(chunk, adapted):
    stock, ours = (adapters(small(), ["lm_head"]) if adapted else small() for _ in range(2))
    patch(ours, strict=True, fused_linear_cross_entropy={"chunk": chunk})
    head = ours.get_submodule("base_model.model.lm_head" if adapted else "lm_head")
    assert swapped(head).settings.fused.chunk == chunk
    assert_same_training(stock, ours)


NAN, INFINITY = float("nan"), float("inf")
NO_NUMBERS = (True, None, "1", [1], NAN, INFINITY, torch.ones(()))
NO_BOOLEANS = (1, 0, None, "yes", torch.ones(()))
BAD = {
    "chunk": (0, -1, True, None, 1.5, NAN, "", "auto ", "512 parrots", "-1MiB", "0MiB", [4]),
    "accumulate": (None, "float32", torch.int32, torch.float8_e5m2, float, True, 32),
    "compact": NO_BOOLEANS,
    "validate": NO_BOOLEANS,
    "z_loss": (*NO_NUMBERS, -0.1),
    "materialize_bytes": (*NO_NUMBERS, -1, 1.0),
    "backend": (True, 1, ["reference"], torch.ones(())),
}


@pytest.mark.parametrize("option", BAD)
def test_invalid_option_values(option):
    for value in BAD[option]:
        for target in (small(), "llama"):
            with pytest.raises(PatchError, match=f"fused_linear_cross_entropy: {option} must be"):
                patch(target, fused_linear_cross_entropy={option: value})
    assert clean()


# --- what looks up the exact class of a module finds that of the unpatched one ---


def int8(model):
    quantization = pytest.importorskip("torch.ao.quantization")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


@pytest.mark.parametrize(
    "options",
    [{}, {"linear": True}, {"linear_float8": {"smallest": 1}}, {"cross_entropy": True}],
    ids=str,
)
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_quantize_dynamic(architecture, options):
    stock, ours = (m.eval() for m in pair(architecture, tied=False, patching=options))
    expected, got = int8(stock), int8(ours)
    assert list(map(str, map(type, got.modules()))) == list(map(str, map(type, expected.modules())))
    assert "quantized" in type(got.lm_head).__module__
    with torch.no_grad():
        torch.testing.assert_close(got(**batch()).loss, expected(**batch()).loss)
        torch.testing.assert_close(got(**batch()).logits * 1.0, expected(**batch()).logits)


def test_patched_classes_equal_those_of_stock():
    (stock, first), second = pair(tied=False, patching={}), build(tied=False)
    patch(second, fused_linear_cross_entropy={"chunk": 7})
    for name in ("lm_head", "model.norm"):
        own, ours = (type(m.get_submodule(name)) for m in (stock, first))
        assert ours is not own
        assert {own: 1}[ours] == {ours: 1}[own] == 1
        assert ours in [own]
        assert ours in {own}
        assert operator.eq(ours, own)
        assert operator.eq(own, ours)
        assert not operator.ne(ours, own)
    assert operator.ne(type(first.lm_head), type(second.lm_head))
    assert operator.ne(type(first.lm_head), type(first.model.norm))
    assert type("OnTop", (type(first.lm_head),), {}) not in (nn.Linear, type(first.lm_head))


class Abstract(Norm, metaclass=ABCMeta):
    """A norm whose class has a metaclass of its own."""


def test_a_class_with_a_metaclass():
    model = nn.Sequential(Abstract())
    assert patch(model, fused_linear_cross_entropy=False).entries
    assert operator.eq(type(model[0]), Abstract)
    assert isinstance(type(model[0]), ABCMeta)
    again = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(again(torch.ones(2, 12)), model(torch.ones(2, 12)))
    unpatch(model)
    assert type(model[0]) is Abstract
