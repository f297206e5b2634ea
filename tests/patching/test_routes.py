"""Routes of experts: recorded, replayed in other layouts of the same sequences, and refused."""

# ruff: noqa: E402  (what needs transformers is imported after the skip)
import contextlib
import copy

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    _CHECKPOINT_PREFIX as PREFIX,
    CheckpointImpl,
    checkpoint_wrapper,
)

from liger_multi import ops, routes, trees
from liger_multi.patching import patch, real_logits, register_attention
from liger_multi.routes import Routes, RoutesError
from tests.comparing import assert_same_gradients, gradients, recorded
from tests.models import build, redrawn

QUIET = {"output_router_logits": False}
LENGTHS = (9, 6, 4)


@pytest.fixture(scope="module", autouse=True)
def attention():
    register_attention()


def deepseek(groups=4, chosen=2):
    """Routers that choose within groups of experts."""
    sizes = {
        "vocab_size": 223,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": chosen,
        "n_group": groups,
        "topk_group": -(-groups // 2),
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes))


def dbrx():
    """Experts whose weights have two axes."""
    experts = {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 16}
    torch.manual_seed(0)
    config = transformers.DbrxConfig(
        vocab_size=223,
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=64,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        ffn_config={**experts, "hidden_size": 32},
        **QUIET,
    )
    return transformers.DbrxForCausalLM(config)


BUILDERS = {
    "mixtral": lambda: build("mixtral", **QUIET),
    "qwen3_moe": lambda: build("qwen3_moe", **QUIET),
    "gpt_oss": lambda: build("gpt_oss", **QUIET),
    "deepseek_v3": deepseek,
    "one_group": lambda: deepseek(1),
    "one_group_of_3": lambda: deepseek(1, 3),
    "dbrx": dbrx,
}


def model_of(name, *, patched=True):
    model = redrawn(BUILDERS[name]())
    model.set_attn_implementation("liger_multi")
    if patched:
        patch(model)
    return model.train()


def is_router(name):
    return any(part in name for part in ("gate.weight", "router.weight", "router.layer.weight"))


def moved(model):
    """The same model with other routers, which choose other experts."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if is_router(name) and parameter.ndim == 2:
                parameter.copy_(parameter.flip(0))
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


@pytest.mark.parametrize("patched", [True, False], ids=["patched", "unpatched"])
@pytest.mark.parametrize("name", BUILDERS)
def test_replayed_routes_of_the_same_model_change_nothing(name, patched):
    model = model_of(name, patched=patched)
    batch = padded()
    plain = model(**batch, use_cache=False).logits
    (plain * batch["attention_mask"][..., None]).sin().sum().backward()
    right = {n: g.clone() for n, g in gradients(model).items()}
    model.zero_grad()
    recorded = recorded_by(model, batch)
    assert recorded.tokens == sum(LENGTHS)
    with routes.replay(model, recorded):
        logits = model(**batch, use_cache=False).logits
        (logits * batch["attention_mask"][..., None]).sin().sum().backward()
    torch.testing.assert_close(logits, plain)
    assert_same_gradients(gradients(model), right)


@pytest.mark.parametrize("name", BUILDERS)
def test_replay_of_routes_in_another_model(name):
    model = model_of(name)
    other, batch = moved(model), padded()
    recorded, today = recorded_by(model, batch), recorded_by(other, batch)
    assert not same(recorded, today)
    with routes.record(other) as again, routes.replay(other, recorded):
        logits = other(**batch, use_cache=False).logits
        (logits * batch["attention_mask"][..., None]).sin().sum().backward()
    assert same(again, recorded)
    routers = [p.grad for n, p in other.named_parameters() if is_router(n) and p.ndim == 2]
    assert routers
    assert all(grad is not None and grad.abs().sum() > 0 for grad in routers)


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


def moved_and_recorded(model):
    """A model with another router, a batch, and the routes of the batch in the first model."""
    batch = padded()
    return moved(model), batch, recorded_by(model, batch)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_layers_that_run_again_choose_the_same(reentrant, inside):
    model = model_of("qwen3_moe")
    other, batch, recorded = moved_and_recorded(model)

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


@pytest.mark.parametrize("impl", CheckpointImpl)
def test_checkpoints_of_pytorch(impl):
    """Layers run again within the block, after the passes of two batches."""
    model = model_of("mixtral")
    other, batches = moved(model), [padded(), {"input_ids": padded()["input_ids"][:, :5]}]
    with torch.no_grad(), routes.record(model) as recorded:
        for batch in batches:
            model(**batch, use_cache=False)

    def gradients_of(other):
        with routes.replay(other, recorded):
            losses = [other(**batch, use_cache=False).logits.sin().sum() for batch in batches]
            sum(losses).backward()
        return {n.replace(PREFIX, ""): g for n, g in gradients(other).items()}

    again = copy.deepcopy(other)
    again.enable_input_require_grads()
    for number, layer in enumerate(again.model.layers):
        again.model.layers[number] = checkpoint_wrapper(layer, impl)
    assert_same_gradients(gradients_of(again), gradients_of(other))


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


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["layers", "model"])
def test_compiled(whole):
    model, batch = model_of("mixtral"), padded()
    expected, other = recorded_by(model, batch), moved(model)
    for layer in other.model.layers[: 0 if whole else None]:
        layer.compile(backend="eager")
    compiled = torch.compile(other, backend="eager") if whole else other
    with routes.replay(compiled, expected):
        logits = compiled(**batch, use_cache=False).logits
    plain = moved(model)
    with routes.replay(plain, expected):
        torch.testing.assert_close(
            real_logits(logits), real_logits(plain(**batch, use_cache=False).logits)
        )


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
    layers = recorded_by(model, batch).layers
    for known, said in (
        ([x[:-1] for x in layers], r"got 19 .* have 18"),
        ([x[:, :1] for x in layers], r"chooses 2 .* have 1"),
    ):
        with routes.replay(model, Routes(known)), pytest.raises(RoutesError, match=said):
            model(**batch)
    for known, said in (
        (layers[:1], "2 layers with experts, and the routes have 1"),
        ([x + 3 for x in layers], "has 4 experts, and the routes of layer 0 name expert 6"),
        ([layers[0], layers[1][:-1]], "layer 0 has 19 tokens, layer 1 18"),
    ):
        with pytest.raises(RoutesError, match=said):
            routes.replay(model, Routes(known)).__enter__()
    with pytest.raises(RoutesError, match="LlamaForCausalLM has no module with experts"):
        routes.record(build()).__enter__()
    for wrong in (torch.ones(2, 3, 1), torch.ones(2, 3, 1).bool(), [[[0]]], torch.ones(3, 1).int()):
        with pytest.raises(RoutesError, match="integers"):
            Routes.from_indices(wrong)
    with pytest.raises(RoutesError, match="layer 0 has an expert -1"):
        Routes.from_indices(torch.full((2, 19, 2), -1))


@pytest.mark.parametrize("first", ["record", "replay"])
def test_what_is_recorded_is_what_is_replayed(first):
    """Whichever block begins first."""
    other, batch, expected = moved_and_recorded(model_of("mixtral"))
    with contextlib.ExitStack() as stack:
        if first == "replay":
            stack.enter_context(routes.replay(other, expected))
        again = stack.enter_context(routes.record(other))
        if first == "record":
            stack.enter_context(routes.replay(other, expected))
        other(**batch, use_cache=False)
    assert same(again, expected)


def test_a_replay_within_another_is_refused():
    model, batch = model_of("mixtral"), padded()
    known = recorded_by(model, batch)
    again = routes.replay(model, known)
    with routes.replay(model, known), pytest.raises(RoutesError, match="replays routes already"):
        again.__enter__()
    assert not any("forward" in vars(m) or m._forward_hooks for m in model.modules())


def test_a_pass_that_raises_takes_no_routes():
    """The same tokens go through the model again, as after an error of memory."""
    other, batch, expected = moved_and_recorded(model_of("mixtral"))
    with routes.record(other) as again, routes.replay(other, expected):
        hook = other.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            other(**batch, use_cache=False)
        hook.remove()
        other(**batch, use_cache=False)
    assert same(again, expected)


def test_checkpointing_enabled_within_a_block_is_kept():
    model, batch = model_of("mixtral"), padded()
    with routes.replay(model, recorded_by(model, batch)):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model(**batch, use_cache=False).logits.sum().backward()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32, np.int32], ids=str)
def test_dtypes_of_indices(dtype, tmp_path):
    other, batch, expected = moved_and_recorded(model_of("mixtral"))
    indices = torch.stack(expected.layers)
    indices = indices.numpy().astype(dtype) if dtype is np.int32 else indices.to(dtype)
    Routes.from_indices(indices).save(tmp_path / "routes")
    for known in (Routes.from_indices(indices), Routes.load(tmp_path / "routes")):
        with routes.record(other) as again, routes.replay(other, known):
            other(**batch, use_cache=False)
        assert same(again, expected)


def test_experts_with_adapters():
    peft = pytest.importorskip("peft")
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=names)
    model, batch = peft.get_peft_model(model_of("mixtral", patched=False), config), padded()
    patch(model)
    expected = recorded_by(model, batch)
    with routes.record(model) as again, routes.replay(model, expected):
        model(**batch, use_cache=False).logits.sum().backward()
    assert same(again, expected)


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
