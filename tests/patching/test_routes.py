"""Routes of experts: recorded, replayed in other layouts of the same sequences, and refused."""

import copy

import pytest
import torch

from liger_multi import ops, routes, trees
from liger_multi.patching import patch, register_attention
from liger_multi.routes import Routes, RoutesError
from tests.comparing import assert_same_gradients, gradients, recorded
from tests.models import build, deepseek, redrawn

QUIET = {"output_router_logits": False}
LENGTHS = (9, 6, 4)


@pytest.fixture(scope="module", autouse=True)
def attention():
    register_attention()


BUILDERS = {
    "mixtral": lambda: build("mixtral", **QUIET),
    "qwen3_moe": lambda: build("qwen3_moe", **QUIET),
    "gpt_oss": lambda: build("gpt_oss", **QUIET),
    "deepseek_v3": lambda: deepseek(n_routed_experts=8, n_group=4, topk_group=2),
}


def model_of(name, *, patched=True):
    model = redrawn(BUILDERS[name]())
    model.set_attn_implementation("liger_multi")
    if patched:
        patch(model)
    return model.train()


def routers_of(model):
    named = [n for n, _ in model.named_parameters() if n.endswith(("gate.weight", "router.weight"))]
    return [p for p in map(model.get_parameter, named) if p.ndim == 2]


def moved(model):
    """The same model with other routers, which choose other experts."""
    other = copy.deepcopy(model)
    for weight in routers_of(other):
        weight.data = weight.detach().flip(0)
    return other


def rows():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 200, (n,), generator=generator) for n in LENGTHS]


def padded(side="right"):
    ids, mask = torch.zeros(3, max(LENGTHS), dtype=torch.long), torch.zeros(3, max(LENGTHS)).long()
    for number, row in enumerate(rows()):
        at = slice(0, len(row)) if side == "right" else slice(max(LENGTHS) - len(row), None)
        ids[number, at], mask[number, at] = row, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def recorded_by(model, batch):
    with torch.no_grad(), routes.record(model) as recorded:
        model(**batch, use_cache=False)
    return recorded


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.layers, other.layers, strict=True))


def swayed(model, batch):
    """Logits of a batch; every visible one counts in a backward pass."""
    logits = model(**batch, use_cache=False).logits
    (logits * batch["attention_mask"][..., None]).sin().sum().backward()
    return logits


@pytest.mark.parametrize("patched", [True, False], ids=["patched", "unpatched"])
@pytest.mark.parametrize("name", BUILDERS)
def test_replayed_routes_of_the_same_model_change_nothing(name, patched):
    model = model_of(name, patched=patched)
    batch = padded()
    plain = swayed(model, batch)
    right = {n: g.clone() for n, g in gradients(model).items()}
    model.zero_grad()
    recorded = recorded_by(model, batch)
    assert recorded.tokens == sum(LENGTHS)
    with routes.replay(model, recorded):
        logits = swayed(model, batch)
    torch.testing.assert_close(logits, plain)
    assert_same_gradients(gradients(model), right)


@pytest.mark.parametrize("name", BUILDERS)
def test_other_routers_replay_the_choice_with_weights_of_today(name):
    model = model_of(name)
    other, batch = moved(model), padded()
    recorded, today = recorded_by(model, batch), recorded_by(other, batch)
    assert not same(recorded, today)
    with routes.record(other) as again, routes.replay(other, recorded):
        swayed(other, batch)
    assert same(again, recorded)
    grads = [router.grad for router in routers_of(other)]
    assert grads
    assert all(grad is not None and grad.abs().sum() > 0 for grad in grads)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_layouts_of_the_same_sequences(name):
    model = model_of(name)
    recorded = recorded_by(model, padded())
    assert same(recorded_by(model, padded("left")), recorded)
    parts = rows()
    packed = {
        "input_ids": torch.cat(parts)[None],
        "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
    }
    assert same(recorded_by(model, packed), recorded)
    with torch.no_grad(), routes.record(model) as micro:
        for row in parts:
            model(input_ids=row[None], use_cache=False)
    assert same(micro, recorded)


def test_shared_prefixes():
    model = model_of("qwen3_moe")
    one, two, three = (row.tolist() for row in rows())
    batch = trees.pack([(one, [two, (three, [two[:2], two])]), (two, [one])])
    ids, mask = batch.unshared()
    unshared = recorded_by(model, {"input_ids": ids, "attention_mask": mask})
    with torch.no_grad(), routes.record(model) as recorded:
        trees.log_probs(model, batch)
    assert recorded.tokens == int(mask.sum())
    assert same(recorded, unshared)
    other = moved(model)
    with torch.no_grad(), routes.record(other) as again, routes.replay(other, unshared):
        trees.log_probs(other, batch)
    assert same(again, unshared)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_layers_that_run_again_choose_the_same(reentrant, inside):
    model = model_of("qwen3_moe")
    other, batch = moved(model), padded()
    recorded = recorded_by(model, batch)

    def gradients_of(backward_inside):
        other.zero_grad()
        with routes.replay(other, recorded):
            loss = other(**batch, use_cache=False).logits.sin().sum()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        return {n: g.clone() for n, g in gradients(other).items()}

    right = gradients_of(True)
    other.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        other.enable_input_require_grads()
    assert_same_gradients(gradients_of(inside), right)
    assert not any("forward" in vars(m) for m in other.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_recomputed_layers_route_as_in_forward(name, reentrant, dtype, monkeypatch):
    """Without a replay, the router of a recomputed layer gives the bits of its forward."""
    model = build(name, **QUIET).to(dtype).train()
    patch(model, strict=True)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    calls = recorded(monkeypatch, ops, "fused_moe")
    batch = padded()
    model(**batch, use_cache=False).logits.sin().sum().backward()
    tokens = batch["input_ids"].numel()
    chosen = [args[3] for args, _ in calls if len(args[3]) == tokens]  # no replica's of a probe
    layers = {"qwen3_moe": 1, "mixtral": 2}[name]  # with experts
    assert len(chosen) == 2 * layers
    assert all(map(torch.equal, chosen[:layers], reversed(chosen[layers:])))


def test_files_and_indices(tmp_path):
    model = model_of("mixtral")
    recorded = recorded_by(model, padded())
    recorded.save(tmp_path / "routes")
    loaded = Routes.load(tmp_path / "routes")
    indices = Routes.from_indices(torch.stack([x.long() for x in recorded.layers]))
    expected = model(**padded(), use_cache=False).logits
    for each in (loaded, indices):
        with routes.replay(model, each):
            torch.testing.assert_close(model(**padded(), use_cache=False).logits, expected)


def test_routes_that_do_not_fit():
    model, batch = model_of("mixtral"), padded()
    recorded = recorded_by(model, batch)
    for change, message in (
        (lambda x: x[:-1], r"got 19 .* have 18"),
        (lambda x: x[:, :1], r"chooses 2 .* have 1"),
    ):
        other = Routes([change(x) for x in recorded.layers])
        with routes.replay(model, other), pytest.raises(RoutesError, match=message):
            model(**batch)
    for call, message in (
        (
            lambda: routes.replay(model, Routes(recorded.layers[:1])).__enter__(),
            "2 layers with experts, and the routes have 1",
        ),
        (
            lambda: routes.record(build()).__enter__(),
            "LlamaForCausalLM has no module with experts",
        ),
        (lambda: Routes.from_indices(torch.ones(2, 3, 1)), "integers"),
    ):
        with pytest.raises(RoutesError, match=message):
            call()


def test_a_router_without_topk_is_refused(monkeypatch):
    model = model_of("mixtral", patched=False)
    router = type(model.model.layers[0].mlp.gate)

    def forward(self, hidden_states):
        logits = torch.nn.functional.linear(hidden_states.flatten(0, -2), self.weight)
        values, indices = logits.softmax(-1).sort(-1, descending=True)
        return logits, values[:, :2], indices[:, :2]

    monkeypatch.setattr(router, "forward", forward)
    with (
        routes.record(model),
        pytest.raises(RoutesError, match=r"mlp is not recognized: .* 0 times"),
    ):
        model(**padded(), use_cache=False)
