"""q, k and v with adapters as one operator: whatever a module does with its layers stays right."""
# ruff: noqa: E402  (what needs peft is imported after the skip)

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.comparing import assert_same_gradients

peft = pytest.importorskip("peft")

from liger_multi import ops, patch, unpatch
from liger_multi.patching.replace import adapters
from liger_multi.patching.replace.adapters import SharedInput
from liger_multi.patching.replace.swap import swapped

NAMES = ("q_proj", "k_proj", "v_proj")


class Attention(nn.Module):
    """Projections of one input, and a mixture of what they give."""

    def __init__(self, bias=True):
        super().__init__()
        self.q_proj = nn.Linear(16, 24, bias=bias)
        self.k_proj = nn.Linear(16, 12, bias=bias)
        self.v_proj = nn.Linear(16, 12, bias=bias)

    def forward(self, x, other=None, mask=None):
        q, k, v = (getattr(self, name)(x) for name in NAMES)
        return torch.tanh(q) * torch.cat([k.sigmoid(), v.sin()], -1)


class KeysOfAnother(Attention):
    def forward(self, x, other):
        q, k, v = self.q_proj(x), self.k_proj(other), self.v_proj(other)
        return torch.tanh(q) * torch.cat([k.sigmoid(), v.sin()], -1)


class KeysOfAHalf(Attention):
    def forward(self, x):
        half = x / 2
        q, k, v = self.q_proj(x), self.k_proj(half), self.v_proj(x)
        return torch.tanh(q) * torch.cat([k.sigmoid(), v.sin()], -1)


class NoKeys(Attention):
    def forward(self, x):
        return self.q_proj(x) * torch.cat([x[..., :12], self.v_proj(x).sin()], -1)


class Twice(Attention):
    """Outputs are written to, as with the clip_qkv of OLMo, and layers are called again."""

    def forward(self, x):
        q, k, v = (getattr(self, name)(x).clamp_(-0.5, 0.5) for name in NAMES)
        return q * self.q_proj(x).tanh() * torch.cat([k, self.k_proj(x).tanh() + v], -1)


class Changed(Attention):
    """Between two calls, the input becomes another."""

    def forward(self, x):
        q, k = self.q_proj(x), self.k_proj(x)
        x += 1
        return q * torch.cat([k, self.v_proj(x)], -1)


class Elsewhere(Attention):
    """Some calls record gradients and others do not."""

    def forward(self, x):
        with torch.no_grad():
            q = self.q_proj(x)
        return q * torch.cat([self.k_proj(x), self.v_proj(x)], -1)


def adapted(kind, targets=NAMES, dtype=torch.float32, **config):
    """A stock module and an equal patched one."""
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), **config)
    stock = peft.inject_adapter_in_model(settings, kind())
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
    found, stock = [], ops.lora_qkv

    def counted(x, **given):
        found.append("".join(n[0] for n in given if n.endswith("_weight")))
        return stock(x, **given)

    monkeypatch.setattr(ops, "lora_qkv", counted)
    return found


def results(module, *inputs, run=None, **options):
    """Output and gradients by name; of parameters that nothing reached, None."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    module.zero_grad()
    y = (run or module)(*(x * 1 for x in inputs), **options)
    y.square().sum().backward()
    found = {n: p.grad for n, p in module.named_parameters()}
    return {"y": y.detach()} | {f"d{i}": x.grad for i, x in enumerate(inputs)} | found


def assert_same(stock, ours, *inputs, **options):
    wanted, got = results(stock, *inputs, **options), results(ours, *inputs, **options)
    assert set(wanted) == set(got)
    same(wanted, got)


def same(wanted, got):
    torch.testing.assert_close(got.pop("y"), wanted.pop("y"), rtol=1e-5, atol=1e-5)
    assert_same_gradients(got, wanted)


def inputs(count=1):
    torch.manual_seed(1)
    return [torch.randn(2, 5, 16) for _ in range(count)]


KINDS = (Attention, KeysOfAHalf, NoKeys, Twice, Elsewhere)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_a_module_does_with_its_layers(kind, calls):
    stock, ours = adapted(kind)
    for _ in range(2):
        assert_same(stock, ours, *inputs())
    assert calls == 2 * ["qkv"]
    assert adapters.together.get() is None


def test_an_input_that_changes_between_two_calls(calls):
    stock, ours = adapted(Changed)
    with torch.no_grad():
        wanted, got = (m(inputs()[0]) for m in (stock, ours))
    torch.testing.assert_close(got, wanted)
    assert calls == ["qkv"]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        results(ours, *inputs())


def test_two_inputs_are_left_to_the_layers(calls):
    stock, ours = adapted(KeysOfAnother)
    assert_same(stock, ours, *inputs(2))
    assert calls == []
    x = inputs()[0]  # the same tensor twice is one input
    run = {stock: lambda x: stock(x, x), ours: lambda x: ours(x, x)}
    wanted, got = (results(m, x, run=run[m]) for m in (stock, ours))
    same(wanted, got)
    assert calls == ["qkv"]


def test_a_mask_is_no_second_input(calls):
    stock, ours = adapted(Attention)
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
    stock, ours = adapted(Attention, **config)
    x = inputs()[0].to(config.get("dtype", torch.float32))
    if x.dtype == torch.float32:
        assert_same(stock, ours, x)
    else:
        exact = copy.deepcopy(stock).double()
        right, wanted, got = (
            results(m, x.to(next(m.parameters()).dtype)) for m in (exact, stock, ours)
        )
        for name, value in right.items():
            if value is not None:
                near, far = ((r[name].double() - value).norm() for r in (got, wanted))
                assert near <= 1.1 * far + 1e-5 * value.norm(), name
    assert calls == [layers]


def test_layers_that_are_more_than_their_adapter(calls):
    stock, ours = adapted(Attention)
    seen = []
    for module in (stock, ours):
        module.k_proj.register_forward_hook(lambda *args: seen.append(1))
    assert_same(stock, ours, *inputs())
    assert (calls, len(seen)) == (["qk"], 2)  # two of them, in the operator's first places
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
        settings = peft.LoraConfig(r=2, target_modules=list(NAMES), **config)
        stock = peft.inject_adapter_in_model(settings, Attention())
        ours = copy.deepcopy(stock)
        patch(ours)
        assert type(ours) is Attention

        def run(module, x):
            torch.manual_seed(2)
            return module(x)

        x = inputs()[0]
        wanted, got = (results(m, x, run=lambda x, m=m: run(m, x)) for m in (stock, ours))
        assert torch.equal(wanted["y"], got["y"])
    stock, ours = adapted(Attention, lora_dropout=0.0)
    for module in (stock, ours):  # it acts in training only, and is asked at every call
        module.q_proj.lora_dropout["default"] = nn.Dropout(0.5)
        module.eval()
    assert_same(stock, ours, *inputs())
    ours.train()(*inputs())
    assert calls == ["qkv", "qk"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant, calls):
    stock, ours = adapted(Attention)
    run = {m: lambda x, m=m: checkpoint(m, x, use_reentrant=reentrant) * 1 for m in (stock, ours)}
    x = inputs()[0]
    wanted, got = (results(m, x, run=run[m]) for m in (stock, ours))
    same(wanted, got)
    assert calls == ["qkv", "qkv"]


def test_without_gradients(calls):
    stock, ours = adapted(Attention)
    x = inputs()[0]
    with torch.no_grad():
        torch.testing.assert_close(ours(x), stock(x))
    assert calls == ["qkv"]
    with torch.inference_mode():  # tensors without versions
        torch.testing.assert_close(ours(x * 1), stock(x * 1))
    assert calls == ["qkv"]


def test_hooks_of_parameters_fire_once():
    ours, fired = adapted(Attention)[1], []
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    results(ours, *inputs())
    assert sorted(fired) == sorted(n for n, p in ours.named_parameters() if p.requires_grad)


def test_gradients_have_memory_of_their_own():
    ours = adapted(Attention)[1]
    found = [g for g in results(ours, *inputs()).values() if g is not None]
    assert len({g.untyped_storage().data_ptr() for g in found}) == len(found)


class Fails(Attention):
    def forward(self, x):
        self.q_proj(x)
        raise ValueError("as it must")


@pytest.mark.parametrize("kind", [NoKeys, Fails])
def test_nothing_outlives_the_call(kind, monkeypatch):
    ours, held, stock = adapted(kind)[1], [], ops.lora_qkv

    def noted(x, **given):
        made = stock(x, **given)
        held.extend(weakref.ref(t) for t in made)
        return made

    monkeypatch.setattr(ops, "lora_qkv", noted)
    x, error = inputs()[0].requires_grad_() * 1, None
    gc.disable()
    try:
        y = ours(x)
    except ValueError as raised:
        error = raised  # and with it, frames
    finally:
        gc.enable()
    assert (error is None) == (kind is NoKeys)
    assert len(held) == 3
    assert held[1]() is None  # the keys, which nobody came for
    assert adapters.together.get() is None
    if error is None:
        del y


def test_what_is_kept_for_backward():
    """The input once and 3 r numbers a row, where PEFT keeps three copies of it."""
    stock, ours = adapted(Attention, dtype=torch.bfloat16)
    rows, width, rank = 7, 16, 4
    for module, kept in ((stock, 3 * rows * (width + rank) * 4), (ours, 3 * rows * rank * 4)):
        x = torch.randn(rows, width, dtype=torch.bfloat16, requires_grad=True) * 1
        own = {p.untyped_storage().data_ptr() for p in (*module.parameters(), x)}
        held = {}

        def note(tensor, own=own, held=held):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                held[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            made = Attention.forward(module, x) if module is stock else module(x)
        after = 2 * rows * 24 * 2 + 2 * rows * 12 * 2  # of tanh, cat, sigmoid and sin
        assert sum(held.values()) == kept + after
        del made


def test_copies_pickles_and_states(calls):
    stock, ours = adapted(Attention)
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert vars(ours).keys() == vars(stock).keys()
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert swapped(twin) == swapped(ours)
        assert_same(stock, twin, *inputs())
    assert calls == ["qkv", "qkv"]
    loaded = adapted(Attention)[1]
    loaded.load_state_dict(stock.state_dict())
    assert_same(stock, loaded, *inputs())


def test_patching_again_and_back(calls):
    ours = adapted(Attention)[1]
    assert {e.status for e in patch(ours).entries} == {"already patched"}
    assert {e.op for e in patch(ours, lora=False).entries} == {"lora"}
    assert type(ours) is Attention
    patch(ours)
    unpatch(ours)
    assert not any(hasattr(type(m), "_liger_multi_swap") for m in ours.modules())


def test_a_named_backend(calls):
    stock = adapted(Attention)[0]
    ours = copy.deepcopy(stock)
    report = patch(ours, lora="reference")
    assert [e.options for e in report.entries] == 3 * [{"backend": "reference"}]
    assert_same(stock, ours, *inputs())
    assert calls == ["qkv"]


def test_a_compiled_module_has_its_layers(calls):
    stock, ours = adapted(Attention)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    x = inputs()[0]
    torch.testing.assert_close(compiled(x), stock(x))
    assert calls == []
    torch._dynamo.reset()
