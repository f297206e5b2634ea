"""Calls of LoRA layers in every form that PEFT has, on patched and unpatched models alike.

q, k and v with adapters are one operator: whatever a module does with its layers stays right.
"""

# ruff: noqa: E402  (what needs transformers and peft is imported after the skip)
import copy
import functools
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.comparing import assert_same_gradients, gradients, recorded, saved, storage_bytes

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

from test_lora import ATTENTION, MLP, lora

from liger_multi import ops, patch, unpatch
from liger_multi.patching.head.protocol import LazyLogits
from liger_multi.patching.lora import SharedInput, together
from liger_multi.patching.swap import swapped
from tests.models import batch, build, filled, patched_copy, variant

# --- calls in every form ---


EVERYWHERE = (*ATTENTION, *MLP, "lm_head")
INPUTS = {name: torch.cat([t, t.flip(1)]) for name, t in batch().items()}
"""Four rows, so that a batch can mix three adapters."""
MIXED = ["default", "other", "__base__", "default"]


def two_adapters(first=None, second=None, patch_first=False):
    """A stock model and a patched one with two adapters each, in eval mode."""
    models = []
    for ours in (False, True):
        model = build("llama", num_hidden_layers=1)
        if ours and patch_first:
            patch(model)
        model = lora(model, EVERYWHERE, task_type="CAUSAL_LM", **(first or {}))
        torch.manual_seed(5)
        options = {"r": 2, "target_modules": ["q_proj", "up_proj", "lm_head"], **(second or {})}
        options["task_type"] = "CAUSAL_LM"
        model.add_adapter("other", peft.LoraConfig(**options))
        if ours and not patch_first:
            patch(model)
        models.append(filled(model).eval())
    return models


def assert_equal(stock, ours, grad=False, inputs=INPUTS, **call):
    """Losses and logits of two models, and their gradients."""
    with torch.set_grad_enabled(grad):
        expected, got = (m(**inputs, **call) for m in (stock, ours))
    torch.testing.assert_close(got.loss, expected.loss, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(got.logits + 0.0, expected.logits, atol=5e-6, rtol=1e-5)
    if grad:
        for m, out in ((stock, expected), (ours, got)):
            m.zero_grad()
            out.loss.backward()
        assert_same_gradients(gradients(ours), gradients(stock), 1e-4)


NAMES = {
    "mixed": MIXED,
    "one": ["other"] * 4,
    "base": ["__base__"] * 4,
    "none": None,
}


@pytest.mark.parametrize("patch_first", [False, True])
@pytest.mark.parametrize("names", NAMES)
def test_a_batch_of_several_adapters(names, patch_first):
    stock, ours = two_adapters(patch_first=patch_first)
    assert_equal(stock, ours, adapter_names=NAMES[names])
    assert_equal(stock, ours, grad=True)  # nothing of it is left for the next call


KINDS = {
    "dora on top": ({}, {"use_dora": True}),
    "dora": ({"use_dora": True}, {}),
    "rank-stabilized": ({"use_rslora": True}, {"use_rslora": True}),
    "dropout": ({"lora_dropout": 0.5}, {}),
    "biases": ({"lora_bias": True}, {}),
    "activated": ({"alora_invocation_tokens": [3, 4]}, {}),
    "both activated": ({"alora_invocation_tokens": [3]}, {"alora_invocation_tokens": [5, 6]}),
}


@pytest.mark.parametrize("model_type", KINDS)
def test_other_kinds_of_adapters_in_one_batch(model_type):
    stock, ours = two_adapters(*KINDS[model_type])
    if "dora" not in model_type:  # PEFT refuses
        assert_equal(stock, ours, adapter_names=MIXED)
    for name in ("default", "other"):
        for model in (stock, ours):
            model.set_adapter(name)
        assert_equal(stock, ours, grad=True)


def test_keywords_of_adapters_reach_pefts_forward():
    """Whatever PEFT hands to a layer beside its input is PEFT's to interpret."""
    stock, ours = two_adapters()
    offsets = [None, 3, None, 5]
    assert_equal(stock, ours, alora_offsets=offsets)
    hidden = torch.randn(4, 3, 32)
    for path in ("lm_head", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"):
        layers = [m.base_model.model.get_submodule(path) for m in (stock, ours)]
        for call in ({"adapter_names": MIXED}, {"alora_offsets": offsets}):
            expected, got = (layer(hidden, **call) for layer in layers)
            assert torch.equal(got, expected)
        expected, got = (layer(x=hidden) for layer in layers)
        torch.testing.assert_close(got, expected)
        messages = []
        for layer in layers:
            with pytest.raises(TypeError) as raised:
                layer(hidden, nosuch=1)
            messages.append(str(raised.value))
        assert messages[0] == messages[1]


def test_generation_with_an_adapter_per_row():
    stock, ours = two_adapters()
    ids = INPUTS["input_ids"][:, :5]
    options = {"max_new_tokens": 4, "do_sample": False, "adapter_names": MIXED}
    expected, got = (m.generate(input_ids=ids, **options) for m in (stock, ours))
    assert torch.equal(got, expected)


def test_whole_heads_of_several_adapters():
    models = []
    for ours in (False, True):
        model = lora(build("llama", num_hidden_layers=1), ["q_proj"], modules_to_save=["lm_head"])
        model.add_adapter(
            "other", peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
        )
        torch.manual_seed(9)
        with torch.no_grad():
            for copied in model.base_model.model.lm_head.modules_to_save.values():
                copied.weight.add_(torch.randn_like(copied.weight), alpha=0.1)
        if ours:
            patch(model)
        models.append(filled(model).eval())
    assert_equal(*models, adapter_names=MIXED)
    assert_equal(*models, grad=True)


def _one_more(model):
    torch.manual_seed(4)
    model.add_adapter("third", peft.LoraConfig(r=3, target_modules=["k_proj", "v_proj", "lm_head"]))
    filled(model).set_adapter("third")


def _off_and_on(model):
    with model.disable_adapter():
        model(**INPUTS)


CHANGES = {
    "merged": lambda m: m.merge_adapter(),
    "merged and back": lambda m: (m.merge_adapter(), m.unmerge_adapter()),
    "switched": lambda m: m.set_adapter("other"),
    "both": lambda m: m.base_model.set_adapter(["default", "other"]),
    "off": lambda m: m.base_model.disable_adapter_layers(),
    "off and on": _off_and_on,
    "one more": _one_more,
    "one less": lambda m: (m.delete_adapter("default"), m.set_adapter("other")),
    "scaled": lambda m: [x.scale_layer(0.5) for x in m.modules() if hasattr(x, "scale_layer")],
    "combined": lambda m: (
        m.add_weighted_adapter(["default", "other"], [0.7, 0.3], "sum", combination_type="cat"),
        m.set_adapter("sum"),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_adapters_changed_after_the_patch(change):
    stock, ours = two_adapters()
    for model in (stock, ours):
        CHANGES[change](model)
    grad = change not in ("off", "merged")
    assert_equal(stock, ours, grad=grad)
    if change != "merged":
        names = [n for n in MIXED if n in (*stock.peft_config, "__base__")]
        inputs = {n: t[: len(names)] for n, t in INPUTS.items()}
        assert_equal(stock, ours, inputs=inputs, adapter_names=names)
    patch(ours)
    assert_equal(stock, ours, grad=grad)


@pytest.mark.parametrize("end", ["merge_and_unload", "unload"])
def test_adapters_removed_from_a_patched_model(end):
    stock, ours = (getattr(m, end)().requires_grad_() for m in two_adapters())
    assert_equal(stock, ours, grad=True)
    patch(ours)
    assert_equal(stock, ours, grad=True)
    assert isinstance(ours(**INPUTS).logits, LazyLogits)


# --- logits that are computed later ---


def _unpatched(model):
    if hasattr(type(model.base_model.model.lm_head), "_liger_multi_swap"):
        patch(model, fused_linear_cross_entropy=False)
        patch(model, fused_linear_cross_entropy=False)


LATER = {
    "disabled": lambda m: m.base_model.disable_adapter_layers(),
    "switched": CHANGES["switched"],
    "added": CHANGES["both"],
    "deleted": lambda m: m.delete_adapter("default"),
    "rescaled": lambda m: m.base_model.model.lm_head.scale_layer(3.0),
    "unpatched": _unpatched,
}


READERS = {
    "logits": lambda z: z.clone().tolist(),
    "loss": lambda z: F.cross_entropy(z.flatten(0, -2), INPUTS["input_ids"].flatten()).tolist(),
    "row": lambda z: z[:, -1].tolist(),
}


@pytest.mark.parametrize("change", LATER)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("reader", READERS)
def test_logits_are_those_of_the_adapters_of_their_forward(change, grad, reader):
    results = []
    for model in two_adapters():
        with torch.set_grad_enabled(grad):
            logits = model(input_ids=INPUTS["input_ids"]).logits
            LATER[change](model)
            results.append(torch.tensor(READERS[reader](logits)))
    torch.testing.assert_close(results[1], results[0])


def test_logits_of_a_head_without_its_adapters_stay_without():
    results = []
    for model in two_adapters(second={"target_modules": ["q_proj"]}):
        model.set_adapter("other")
        logits = model(input_ids=INPUTS["input_ids"]).logits
        model.set_adapter("default")  # whose head has an adapter
        results.append(logits.clone().tolist())
    torch.testing.assert_close(torch.tensor(results[1]), torch.tensor(results[0]))


def test_logits_cannot_be_computed_after_a_merge():
    """PEFT writes merged weights through .data, which no version counter sees."""
    ours = two_adapters()[1]
    out = ours(**INPUTS)
    ours.merge_adapter()
    with pytest.raises(RuntimeError, match="adapters have been merged"):
        out.logits.sum()


def test_keyword_of_a_plain_head():
    stock, ours = build("llama", num_hidden_layers=1), build("llama", num_hidden_layers=1)
    patch(ours)
    hidden = torch.randn(2, 3, 32)
    torch.testing.assert_close(ours.lm_head(input=hidden) + 0.0, stock.lm_head(input=hidden))


def test_non_numeric_scale_is_left_to_peft():
    stock, ours = two_adapters()
    for model in (stock, ours):
        for module in model.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling["default"] = torch.tensor(1.5)
    assert_equal(stock, ours, grad=True)


# --- shared inputs ---


PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class Attention(nn.Module):
    """Projections of one input, and a mixture of what they give."""

    def __init__(self, bias=True):
        super().__init__()
        self.q_proj = nn.Linear(16, 24, bias=bias)
        self.k_proj = nn.Linear(16, 12, bias=bias)
        self.v_proj = nn.Linear(16, 12, bias=bias)

    def forward(self, x, other=None, mask=None):
        return mixed(*(getattr(self, name)(x) for name in PROJECTIONS))


def mixed(q, k, v):
    return torch.tanh(q) * torch.cat([k.sigmoid(), v.sin()], -1)


def _written(m, x):
    """Outputs are written to, as with the clip_qkv of OLMo, and layers are called again."""
    q, k, v = (getattr(m, name)(x).clamp_(-0.5, 0.5) for name in PROJECTIONS)
    return q * m.q_proj(x).tanh() * torch.cat([k, m.k_proj(x).tanh() + v], -1)


def _changed(m, x):
    """Between two calls, the input becomes another."""
    q, k = m.q_proj(x), m.k_proj(x)
    x += 1
    return q * torch.cat([k, m.v_proj(x)], -1)


def _elsewhere(m, x):
    """Some calls record gradients and others do not."""
    with torch.no_grad():
        q = m.q_proj(x)
    return q * torch.cat([m.k_proj(x), m.v_proj(x)], -1)


def _fails(m, x):
    m.q_proj(x)
    raise ValueError("as it must")


FORWARDS = {
    "plain": Attention.forward,
    "keys of a half": lambda m, x: mixed(m.q_proj(x), m.k_proj(x / 2), m.v_proj(x)),
    "no keys": lambda m, x: m.q_proj(x) * torch.cat([x[..., :12], m.v_proj(x).sin()], -1),
    "written": _written,
    "elsewhere": _elsewhere,
    "keys of another": lambda m, x, y: mixed(m.q_proj(x), m.k_proj(y), m.v_proj(y)),
    "changed": _changed,
    "fails": _fails,
}


def adapted(forward="plain", targets=PROJECTIONS, dtype=torch.float32, **config):
    """A stock module and an equal patched one."""
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), **config)
    module = Attention() if forward == "plain" else variant(Attention, FORWARDS[forward])
    stock = peft.inject_adapter_in_model(settings, module)
    for name, parameter in stock.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" not in name:
            parameter.data = parameter.data.to(dtype)
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    ours = copy.deepcopy(stock)
    report = patch(ours)
    assert {e.replaced_by for e in report.entries if e.op == "lora"} == {"lora_qkv"}
    assert isinstance(ours, SharedInput)
    return stock, ours


@pytest.fixture
def calls(monkeypatch):
    """The layers that every call of the operator had."""
    letters = lambda x, **kwargs: "".join(n[0] for n in kwargs if n.endswith("_weight"))  # noqa: E731
    return recorded(monkeypatch, ops, "lora_qkv", letters)


def results(module, *inputs, run=None, **options):
    """Output and gradients by name; of parameters that nothing reached, None."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    module.zero_grad()
    y = (run or module)(*(x * 1 for x in inputs), **options)
    y.square().sum().backward()
    actual = {n: p.grad for n, p in module.named_parameters()}
    return {"y": y.detach()} | {f"d{i}": x.grad for i, x in enumerate(inputs)} | actual


def assert_same(stock, ours, *inputs, **options):
    expected, got = results(stock, *inputs, **options), results(ours, *inputs, **options)
    assert set(expected) == set(got)
    same(expected, got)


def same(expected, got):
    torch.testing.assert_close(got.pop("y"), expected.pop("y"), rtol=1e-5, atol=1e-5)
    assert_same_gradients(got, expected)


def inputs(count=1):
    torch.manual_seed(1)
    return [torch.randn(2, 5, 16) for _ in range(count)]


@pytest.mark.parametrize("forward", [*FORWARDS][:5])
def test_modules_using_their_layers(forward, calls):
    stock, ours = adapted(forward)
    for _ in range(2):
        assert_same(stock, ours, *inputs())
    assert calls == 2 * ["qkv"]
    assert together.get() is None


def test_input_changed_between_calls(calls):
    stock, ours = adapted("changed")
    with torch.no_grad():
        expected, got = (m(inputs()[0]) for m in (stock, ours))
    torch.testing.assert_close(got, expected)
    assert calls == ["qkv"]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        results(ours, *inputs())


def test_two_inputs_are_left_to_the_layers(calls):
    stock, ours = adapted("keys of another")
    assert_same(stock, ours, *inputs(2))
    assert calls == []
    x = inputs()[0]  # the same tensor twice is one input
    run = {stock: lambda x: stock(x, x), ours: lambda x: ours(x, x)}
    expected, got = (results(m, x, run=run[m]) for m in (stock, ours))
    same(expected, got)
    assert calls == ["qkv"]


def test_a_mask_is_no_second_input(calls):
    stock, ours = adapted()
    mask = torch.zeros(2, 1, 5, 16)
    assert_same(stock, ours, *inputs(), mask=mask)
    assert calls == ["qkv"]


FORMS = {
    "some": ({"targets": ["q_proj", "v_proj"]}, "qk"),
    "ranks": ({"rank_pattern": {"k_proj": 2}}, "qkv"),
    "scales": ({"alpha_pattern": {"k_proj": 1}}, "qkv"),
    "bf16 and fp32": ({"dtype": torch.bfloat16}, "qkv"),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_adapters(form, calls):
    config, layers = FORMS[form]
    stock, ours = adapted(**config)
    x = inputs()[0].to(config.get("dtype", torch.float32))
    if x.dtype == torch.float32:
        assert_same(stock, ours, x)
    else:
        exact = copy.deepcopy(stock).double()
        by_hand, expected, got = (
            results(m, x.to(next(m.parameters()).dtype)) for m in (exact, stock, ours)
        )
        for name, value in by_hand.items():
            if value is not None:
                near, far = ((r[name].double() - value).norm() for r in (got, expected))
                assert near <= 1.1 * far + 1e-5 * value.norm(), name
    assert calls == [layers]


def test_layers_with_more_than_an_adapter(calls):
    stock, ours = adapted()
    observed = []
    for module in (stock, ours):
        module.k_proj.register_forward_hook(lambda *args: observed.append(1))
    assert_same(stock, ours, *inputs())
    assert (calls, len(observed)) == (["qk"], 2)  # two of them, in the operator's first places
    for module in (stock, ours):
        module.q_proj.base_layer.weight.requires_grad_()
    assert_same(stock, ours, *inputs())
    assert calls == ["qk"]  # one is not worth it
    for module in (stock, ours):
        module.q_proj.base_layer.weight.requires_grad_(False)
        module.q_proj.merge()
    assert_same(stock, ours, *inputs())
    assert calls == ["qk"]


def test_a_dropout_and_another_rule_are_pefts(calls):
    for config in ({"lora_dropout": 0.5}, {"use_dora": True}):
        torch.manual_seed(0)
        settings = peft.LoraConfig(r=2, target_modules=list(PROJECTIONS), **config)
        stock = peft.inject_adapter_in_model(settings, Attention())
        ours = patched_copy(stock)
        assert type(ours) is Attention

        def run(module, x):
            torch.manual_seed(2)
            return module(x)

        x = inputs()[0]
        expected, got = (results(m, x, run=lambda x, m=m: run(m, x)) for m in (stock, ours))
        assert torch.equal(expected["y"], got["y"])
    stock, ours = adapted(lora_dropout=0.0)
    for module in (stock, ours):  # it acts in training only, and is asked at every call
        module.q_proj.lora_dropout["default"] = nn.Dropout(0.5)
        module.eval()
    assert_same(stock, ours, *inputs())
    ours.train()(*inputs())
    assert calls == ["qkv", "qk"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant, calls):
    stock, ours = adapted()
    run = {m: lambda x, m=m: checkpoint(m, x, use_reentrant=reentrant) * 1 for m in (stock, ours)}
    x = inputs()[0]
    expected, got = (results(m, x, run=run[m]) for m in (stock, ours))
    same(expected, got)
    assert calls == ["qkv", "qkv"]


def test_without_gradients(calls):
    stock, ours = adapted()
    x = inputs()[0]
    with torch.no_grad():
        torch.testing.assert_close(ours(x), stock(x))
    assert calls == ["qkv"]
    with torch.inference_mode():  # tensors without versions
        torch.testing.assert_close(ours(x * 1), stock(x * 1))
    assert calls == ["qkv"]


def test_hooks_of_parameters_fire_once():
    ours, fired = adapted()[1], []
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    results(ours, *inputs())
    assert sorted(fired) == sorted(n for n, p in ours.named_parameters() if p.requires_grad)


def test_gradients_have_memory_of_their_own():
    ours = adapted()[1]
    actual = [g for g in results(ours, *inputs()).values() if g is not None]
    assert len({g.untyped_storage().data_ptr() for g in actual}) == len(actual)


@pytest.mark.parametrize("forward", ["no keys", "fails"])
def test_nothing_outlives_the_call(forward, monkeypatch):
    ours, held, stock = adapted(forward)[1], [], ops.lora_qkv

    def noted(x, **kwargs):
        output = stock(x, **kwargs)
        held.extend(weakref.ref(t) for t in output)
        return output

    monkeypatch.setattr(ops, "lora_qkv", noted)
    x, error = inputs()[0].requires_grad_() * 1, None
    gc.disable()
    try:
        y = ours(x)
    except ValueError as raised:
        error = raised  # and with it, frames
    finally:
        gc.enable()
    assert (error is None) == (forward == "no keys")
    assert len(held) == 3
    assert held[1]() is None  # the keys, which nobody came for
    assert together.get() is None
    if error is None:
        del y


def test_tensors_saved_for_backward():
    """The input once and 3 r numbers a row, where PEFT keeps three copies of it."""
    stock, ours = adapted(dtype=torch.bfloat16)
    rows, width, rank = 7, 16, 4
    after = 2 * rows * 24 * 2 + 2 * rows * 12 * 2  # of tanh, cat, sigmoid and sin
    runs = functools.partial(Attention.forward, stock), ours
    sizes = 3 * rows * (width + rank) * 4, 3 * rows * rank * 4
    for run, module, size in zip(runs, (stock, ours), sizes, strict=True):
        x = torch.randn(rows, width, dtype=torch.bfloat16, requires_grad=True) * 1
        _, kept = saved(functools.partial(run, x), but=[x, *module.parameters()])
        assert storage_bytes(kept) == size + after


def test_copies_pickles_and_states(calls):
    stock, ours = adapted()
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert vars(ours).keys() == vars(stock).keys()
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert swapped(twin) == swapped(ours)
        assert_same(stock, twin, *inputs())
    assert calls == ["qkv", "qkv"]
    loaded = adapted()[1]
    loaded.load_state_dict(stock.state_dict())
    assert_same(stock, loaded, *inputs())


def test_patching_again_and_back(calls):
    ours = adapted()[1]
    assert {e.status for e in patch(ours).entries} == {"already patched"}
    assert {e.op for e in patch(ours, lora=False).entries} == {"lora"}
    assert type(ours) is Attention
    patch(ours)
    unpatch(ours)
    assert not any(hasattr(type(m), "_liger_multi_swap") for m in ours.modules())


def test_a_named_backend(calls):
    stock = adapted()[0]
    ours = copy.deepcopy(stock)
    report = patch(ours, lora="reference")
    assert [e.options for e in report.entries] == 3 * [{"backend": "reference"}]
    assert_same(stock, ours, *inputs())
    assert calls == ["qkv"]


def test_a_compiled_module_has_its_layers(calls):
    stock, ours = adapted()
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    x = inputs()[0]
    torch.testing.assert_close(compiled(x), stock(x))
    assert calls == []
