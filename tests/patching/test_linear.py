"""Plain linear layers of a patched model: independent rows on request, PyTorch's layers else.

A library whose GEMMs depend on the number of rows is made for these tests: whether a CPU's do
depends on its instructions and on sizes.
"""

import copy
import importlib
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import handle_torch_function, has_torch_function

import liger_multi
from liger_multi import ops
from liger_multi.errors import PatchError
from liger_multi.patching import patch, patched, real_logits, register_attention, swap, unpatch
from liger_multi.patching.evidence import signature
from liger_multi.patching.linear import CallsLinear, LinearByRows
from tests.comparing import assert_equal, gradients, recorded
from tests.decoding import (
    MODELS,
    all_ones,
    log_prob,
    model as decoded_model,
    prompt,
    roll_out,
    train,
)
from tests.models import VOCABULARY, adapters, batch, build, transformers
from tests.patching.test_mixers import by_package

FUNCTION = F.linear
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def by_batch(x, weight, bias=None):
    """A GEMM whose rows depend on their number, but for probes, which compare with formulas."""
    if has_torch_function((x, weight)):
        return handle_torch_function(by_batch, (x, weight), x, weight, bias)
    rows = x.shape[:-1].numel() if torch._C._get_mkldnn_enabled() else 0
    return FUNCTION(x, weight, bias) * (1.0 + rows * 2.0**-7)


@pytest.fixture
def library(monkeypatch):
    """That function is PyTorch's own, so that nobody takes it for a user's."""
    monkeypatch.setattr(F, "linear", by_batch)
    monkeypatch.setattr(signature, "call_linear", by_batch)
    monkeypatch.setattr(swap, "_classes", {})


@pytest.fixture
def calls(monkeypatch):
    calls = recorded(monkeypatch, ops, "linear", lambda *args: args)
    monkeypatch.setattr(importlib.import_module("liger_multi.ops.linear"), "linear", ops.linear)
    return calls


def rows():
    return liger_multi.use(deterministic="rows")


def model(model_type="llama", dtype=torch.float32, attention="liger_multi", **config):
    register_attention()
    built = build(model_type, **config).to(dtype).eval()
    built.set_attn_implementation(attention)
    return built


def ids(sequences=4, length=11):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (sequences, length), generator=generator)


def alone_as_in_a_batch(container, tokens, grad=False):
    """Whether the logits of every sequence are the same bits in both."""
    with torch.set_grad_enabled(grad):
        whole = real_logits(container(tokens).logits.detach())
        parts = [real_logits(container(one[None]).logits.detach())[0] for one in tokens]
    return [torch.equal(a, b) for a, b in zip(parts, whole, strict=True)]


# --- whole models ---


@pytest.mark.parametrize("grad", [False, True], ids=["scored", "trained"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "phi3"])
def test_a_sequence_alone_is_a_sequence_in_a_batch(model_type, dtype, grad, library):
    ours, tokens = model(model_type, dtype), ids()
    assert not any(alone_as_in_a_batch(ours, tokens, grad))
    with rows():
        report = patch(ours, strict=True)
        assert all(alone_as_in_a_batch(ours, tokens, grad))
    assert report.count("linear") == sum(isinstance(m, LinearByRows) for m in ours.modules()) > 0
    assert "linear" in str(report)
    assert not any(alone_as_in_a_batch(ours, tokens, grad)), "the mode is asked at every call"


@pytest.mark.parametrize("head", [True, False], ids=["lazy", "real"])
def test_every_linear_layer_is_served_once(head, calls):
    ours = model()
    with rows():
        patch(ours, fused_linear_cross_entropy=head)
        with torch.no_grad():
            real_logits(ours(ids()).logits)
    layers = [m.weight for n, m in ours.named_modules() if n.endswith((*ATTENTION, "lm_head"))]
    assert {id(weight) for _, weight, _ in calls} == {id(weight) for weight in layers}
    assert len(calls) == len(layers) == 9


def test_short_sequences_and_gradient_checkpointing(library):
    ours, tokens = model(), ids(3, 1)
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    with rows():
        patch(ours)
        ours.train()
        assert all(alone_as_in_a_batch(ours, tokens, True))


def test_logits_read_after_the_block(library):
    """Lazy logits are computed as the forward pass was."""
    ours, tokens = model(), ids()
    with rows():
        patch(ours)
        expected = real_logits(ours(tokens).logits)
        late = ours(tokens).logits
    assert torch.equal(real_logits(late), expected)


def test_without_the_mode_they_are_pytorchs_layers(calls):
    ours, stock = model(), model()
    assert patch(ours, linear=True).count("linear") == 14
    patch(stock)
    results = []
    for container in (ours, stock):
        out = container(**batch())
        out.loss.backward()
        results.append([real_logits(out.logits.detach()), *gradients(container).values()])
    assert_equal(*results)
    assert not calls


def test_they_are_on_where_the_configuration_asks_for_it():
    ours = model()
    for mode, count in ((False, 0), (True, 0), ("rows", 14)):
        with liger_multi.use(deterministic=mode):
            assert patch(ours).count("linear") == count
            assert patch(ours, linear=False).count("linear") == 0
    liger_multi.configure({"deterministic": "rows"})
    assert patch(ours).count("linear") == 14
    liger_multi.configure(None)
    assert sum(e.op == "linear" and e.status == "restored" for e in patch(ours).entries) == 14
    assert not any(isinstance(m, LinearByRows) for m in ours.modules())


def test_other_keys_serve_as_before():
    """An MLP runs as one operator, and a head has lazy logits, whoever came first."""
    first = {e.path: e.replaced_by for e in patch(model()).entries}
    ours = model()
    patch(ours, linear=True, fused_linear_cross_entropy=False)
    assert isinstance(ours.lm_head, LinearByRows)
    again = patch(ours, linear=True)
    assert {e.path: e.replaced_by for e in again.entries if e.op != "linear"} == first
    assert not isinstance(ours.lm_head, LinearByRows)
    assert {e.status for e in patch(ours, linear=True).entries} == {"already patched"}
    back = patch(ours, linear=True, fused_linear_cross_entropy=False)
    assert isinstance(ours.lm_head, LinearByRows)
    assert back.count("linear") == 15


def test_unpatch_restores_every_class():
    ours = model()
    before = [type(m) for m in ours.modules()]
    state = {n: t.clone() for n, t in ours.state_dict().items()}
    with rows():
        patch(ours)
        assert ours.state_dict().keys() == state.keys()
        unpatch(ours)
        assert [type(m) for m in ours.modules()] == before
        with patched(ours) as report:
            assert report.count("linear") == 14
        assert [type(m) for m in ours.modules()] == before
    assert all(torch.equal(t, state[n]) for n, t in ours.state_dict().items())
    assert not any("forward" in vars(m) for m in ours.modules())


# --- LoRA ---


@pytest.mark.parametrize("patch_first", [False, True])
@pytest.mark.parametrize("lora", [True, False])
def test_lora(patch_first, lora, library):
    ours, tokens = model(), ids()
    with rows():
        if patch_first:
            patch(ours, lora=lora)
        ours = adapters(ours, ["q_proj", "v_proj", "up_proj", "lm_head"]).eval()
        report = patch(ours, lora=lora)
        assert not [s for s in report.skipped if s.op == "linear"]
        assert report.count("lora") == (6 if lora else 0)
        assert all(alone_as_in_a_batch(ours, tokens))
        assert all(alone_as_in_a_batch(ours, tokens, True))
    served = [n for n, m in ours.named_modules() if isinstance(m, LinearByRows)]
    assert {"q_proj.base_layer", "q_proj.lora_A.default"} <= {n.split("attn.")[-1] for n in served}
    unpatch(ours)
    assert not any(isinstance(m, LinearByRows) for m in ours.modules())


# --- single layers ---


class Model(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


def one(layer=None, **options):
    container = Model(nn.Linear(12, 7) if layer is None else layer)
    return container, patch(container, fused_linear_cross_entropy=False, linear=options or True)


X = torch.randn(5, 12, generator=torch.Generator().manual_seed(4))


def independent(container, x=X):
    with rows():
        whole = container(x)
        return all(torch.equal(container(x[i : i + 1])[0], whole[i]) for i in range(len(x)))


def test_copies_pickles_and_states(library):
    container, _ = one()
    for other in (copy.deepcopy(container), pickle.loads(pickle.dumps(container))):
        assert type(other.layer) is type(container.layer)
        assert independent(other)
        assert torch.equal(other(X), container(X))
        other.load_state_dict(container.state_dict())
        unpatch(other)
        assert type(other.layer) is nn.Linear
    assert isinstance(container.layer, LinearByRows)


class Router(nn.Module):
    """Hands its weight to ``F.linear`` by name."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 12))

    def forward(self, x):
        return F.linear(input=x, weight=self.weight)


def test_arguments_of_a_router_by_name(calls):
    container, _ = one(Router())
    assert isinstance(container.layer, CallsLinear)
    stock = container(X)
    assert not calls
    with rows():
        torch.testing.assert_close(container(X), stock)
    assert calls


def test_hooks_see_the_call(calls):
    container, _ = one()
    observed = []
    container.layer.register_forward_pre_hook(lambda m, args: observed.append("before"))
    container.layer.register_forward_hook(lambda m, args, y: observed.append("after") or y * 2)
    with rows():
        y = container(X)
    assert observed == ["before", "after"]
    torch.testing.assert_close(y, container(X))
    assert len(calls) == 1


class Same(nn.Linear):
    """A subclass with PyTorch's forward."""


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Codes(nn.Module):
    """As libraries of quantized weights have them."""

    def __init__(self):
        super().__init__()
        self.in_features, self.out_features = 12, 7
        self.register_buffer("qweight", torch.zeros(7, 3, dtype=torch.int32))

    def forward(self, x):
        return x[:, :7]


def eight_bits():
    layer = nn.Linear(12, 7, bias=False)
    layer.weight = nn.Parameter(torch.zeros(7, 12, dtype=torch.int8), requires_grad=False)
    return layer


def replaced():
    layer = nn.Linear(12, 7)
    layer.forward = lambda x: x[:, :7]
    return layer


LEFT = {
    "own forward": (lambda: Scaled(12, 7), r"a forward of its own \(Scaled\)"),
    "codes": (Codes, r"a forward of its own \(Codes\)"),
    "8 bits": (eight_bits, "stored as torch.int8"),
    "replaced": (replaced, "other code replaced its forward"),
    "parametrized": (lambda: parametrizations.weight_norm(nn.Linear(12, 7)), "parametrize"),
    "attention": (lambda: nn.MultiheadAttention(8, 2), "multiplies with its weight itself"),
}


@pytest.mark.parametrize("case", LEFT)
def test_unfit_layers_are_left(case):
    make, reason = LEFT[case]
    layer = make()
    before = [type(m) for m in layer.modules()]
    container, report = one(layer)
    assert [type(m) for m in container.layer.modules()] == before
    (skipped,) = [s for s in report.skipped if s.op == "linear"]
    assert re.search(reason, skipped.reason)
    with pytest.raises(PatchError, match="strict=True"):
        patch(container, strict=True, fused_linear_cross_entropy=False, linear=True)


def test_a_model_without_a_linear_layer():
    container = Model(nn.Conv1d(3, 3, 3))
    report = patch(container, fused_linear_cross_entropy=False, linear=True)
    assert [s.reason for s in report.skipped if s.op == "linear"] == [
        "the model has no module of this kind"
    ]
    with rows():
        report = patch(container, fused_linear_cross_entropy=False)
    assert not [s for s in report.skipped if s.op == "linear"]


def test_subclasses_with_pytorchs_forward(library):
    container, report = one(Same(12, 7))
    assert [(e.op, e.stock) for e in report.entries] == [("linear", "Same")]
    assert isinstance(container.layer, Same)
    assert independent(container)
    unpatch(container)
    assert type(container.layer) is Same


def test_transposed_layers_of_transformers(monkeypatch):
    layer = pytest.importorskip("transformers.pytorch_utils").Conv1D(7, 12)
    nn.init.normal_(layer.bias)
    expected = layer(X)
    addmm = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda b, x, w: addmm(b, x, w) * (1 + len(x) / 128))
    container, report = one(layer)
    assert report.count("linear") == 1
    assert independent(container)
    with rows():
        torch.testing.assert_close(container(X), expected)


def test_layer_parametrized_after_the_patch(library):
    container, _ = one()
    module_class = type(container.layer)
    parametrizations.weight_norm(container.layer)
    assert independent(container)
    with pytest.raises(PatchError, match="swapped again"):
        unpatch(container)
    parametrize.remove_parametrizations(container.layer, "weight")
    assert type(container.layer) is module_class
    unpatch(container)
    assert type(container.layer) is nn.Linear


def test_a_backend_of_its_own():
    container, report = one(backend="reference")
    assert report.entries[0].options == {"backend": "reference"}
    assert independent(container)
    with pytest.raises(PatchError, match="option of linear"):
        patch(container, linear={"chunk": 3})


def test_a_replaced_forward_of_pytorchs_class(monkeypatch, calls):
    container, _ = one()
    monkeypatch.setattr(nn.Linear, "forward", lambda self, input: input[..., :7])
    with rows():
        assert torch.equal(container(X), X[:, :7])
    assert not calls


def test_a_compiled_model(calls):
    container, _ = one()
    for mode in (False, "rows"):
        torch._dynamo.reset()
        compiled = torch.compile(container, backend="aot_eager", fullgraph=True)
        with liger_multi.use(deterministic=mode):
            assert torch.equal(compiled(X), container(X))


# Tokens decoded with a cache have the bits of the whole sequence under
# ``deterministic="rows"``.


in_rows = pytest.mark.usefixtures("library", "by_rows")


@pytest.fixture
def by_rows():
    with liger_multi.use(deterministic="rows"):
        yield


@in_rows
@pytest.mark.parametrize(("dtype", "greedy"), [(torch.float32, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("model_type", MODELS)
def test_ratios_are_exactly_one(model_type, dtype, greedy):
    policy = decoded_model(model_type, dtype)
    ids, old = roll_out(policy, prompt(7), 200, greedy=greedy)
    assert all_ones(train(policy, ids, 200), old)


@in_rows
@pytest.mark.parametrize("chunk", [1, 16])
@pytest.mark.parametrize("model_type", MODELS)
def test_prompts_in_chunks_and_a_cache_that_goes_on(model_type, chunk):
    policy = decoded_model(model_type)
    cache = transformers.DynamicCache(config=policy.config)
    first, old = roll_out(policy, prompt(37), 20, chunk=chunk, cache=cache)
    # the last token of the first turn is not in the cache yet
    turn = torch.cat([first[:, -1:], prompt(9, seed=2)], 1)
    second, later = roll_out(policy, turn, 20, chunk=chunk, cache=cache)
    ids = torch.cat([first[:, :-1], second], 1)
    new = train(policy, ids, ids.shape[1] - 37)
    assert all_ones(new[:, :20], old)
    assert all_ones(new[:, -20:], later)


@in_rows
@pytest.mark.parametrize("model_type", MODELS)
def test_static_cache(model_type):
    policy = decoded_model(model_type)
    cache = transformers.StaticCache(config=policy.config, max_cache_len=96)
    ids, old = roll_out(policy, prompt(9), 60, cache=cache)
    assert all_ones(train(policy, ids, 60), old)


@in_rows
@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODELS)
def test_left_padding(model_type):
    """Prompts of three lengths are decoded together, trained together, and scored alone."""
    policy, lengths = decoded_model(model_type), [5, 12, 9]
    ids = prompt(12, 3)
    mask = (torch.arange(12) >= 12 - torch.tensor(lengths)[:, None]).long()
    rows, old = roll_out(policy, ids, 20, mask=mask, greedy=False)
    mask = F.pad(mask, (0, 19), value=1)
    places = (mask.cumsum(-1) - 1).clamp_min(0)
    assert all_ones(train(policy, rows, 20, attention_mask=mask, position_ids=places), old)
    for row, length, log_probs in zip(rows, lengths, old, strict=True):
        assert all_ones(train(policy, row[None, 12 - length :], 20), log_probs[None])


@in_rows
def test_generate():
    policy = decoded_model("llama")
    result = policy.generate(
        prompt(7),
        attention_mask=torch.ones(1, 7, dtype=torch.long),
        max_new_tokens=40,
        do_sample=True,
        output_logits=True,
        return_dict_in_generate=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    logits = torch.stack(result.logits, 1).to(policy.dtype)
    old = log_prob(logits, result.sequences[:, 7:]).view(1, -1)
    assert all_ones(train(policy, result.sequences, 40), old)


@in_rows
def test_routers_are_served_and_restored():
    policy = decoded_model("mixtral")
    routers = [m for m in policy.modules() if isinstance(m, CallsLinear)]
    assert len(routers) == 2
    x = torch.randn(5, 32)
    alone = torch.cat([routers[0](row[None])[0] for row in x])
    assert torch.equal(routers[0](x)[0], alone)
    with liger_multi.use(deterministic=False):
        assert not torch.equal(routers[0](x)[0], torch.cat([routers[0](r[None])[0] for r in x]))
    unpatch(policy)
    assert not any(isinstance(m, CallsLinear) for m in policy.modules())


@in_rows
def test_report_names_modules_with_own_matmul():
    register_attention()
    report = patch(build("mixtral").eval(), fused_moe=False)
    paths = [s.path for s in report.skipped if s.op == "linear"]
    assert paths == [f"model.layers.{i}.mlp.experts" for i in (0, 1)], report


@in_rows
def test_the_report_names_layers_with_a_state():
    config = transformers.Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=1,
        num_hidden_layers=2,
    )
    policy = transformers.Mamba2ForCausalLM(config).eval()
    if by_package(policy):
        pytest.skip("mixers of this transformers call no function that an operator stands for")
    skipped = [s for s in patch(policy).skipped if s.op == "linear"]
    assert [s.path for s in skipped] == [f"backbone.layers.{i}.mixer" for i in (0, 1)]
    assert all("state" in s.reason and not s.strict for s in skipped)


@in_rows
def test_log_probs_of_the_fused_head(monkeypatch):
    """It has a GEMM of its own, which is PyTorch's here."""
    monkeypatch.undo()
    policy = decoded_model("llama", torch.bfloat16)
    ids, old = roll_out(policy, prompt(7), 30)
    hidden = policy.model(ids[:, :-1], use_cache=False).last_hidden_state[:, -30:].flatten(0, 1)
    new = ops.fused_linear_log_prob(hidden, policy.lm_head.weight, ids[:, -30:].flatten()).log_prob
    assert all_ones(new, old.flatten())
