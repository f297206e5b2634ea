"""Every situation for every architecture: equal to stock, and by our operators.

A situation takes a case, which holds two equal models, one of them patched, and counts the
operators' calls.

Experts are recognized, equal to stock in every gradient, and given back.
"""

# ruff: noqa: E402  (what needs transformers is imported after the skip)

import copy
import functools

import pytest
import torch
from packaging import version

transformers = pytest.importorskip("transformers")

from transformers.integrations import moe

import liger_multi
from liger_multi.errors import ConfigurationError
from liger_multi.patching import patch, real_logits, register_experts, unpatch, unregister_experts
from liger_multi.patching.experts.find import experts_kind
from tests.comparing import assert_same_gradients
from tests.models import (
    ARCHITECTURES,
    KINDS,
    VOCABULARY,
    Calls,
    Graphs,
    assert_as_exact,
    assert_same_training,
    batch,
    build,
    graph_batch,
)

# --- situations ---

LENGTH = 8
HEAD = "fused_linear_cross_entropy"


@functools.cache
def built(kind, **config):
    return build(kind, **config)


class Case:
    """A stock model and its patched copy."""

    def __init__(self, kind, device, monkeypatch, tmp_path):
        self.kind, self.device, self.tmp_path = kind, device, tmp_path
        self.known = ARCHITECTURES[kind]
        self.calls = Calls(monkeypatch)

    def models(self, dtype=torch.float32, **config):
        """The two models; strict, so that nothing is skipped."""
        stock = copy.deepcopy(built(self.kind, **config)).to(self.device, dtype)
        ours = copy.deepcopy(stock)
        report = patch(ours, strict=True)
        if not config:
            assert {op: report.count(op) for op in self.known.every} == self.known.every
        self.calls.clear()  # the probes' own
        return stock, ours

    def batch(self, **more):
        return batch(length=LENGTH, device=self.device) | more

    def same_training(self, models, run, rtol=2e-5, times=1, head=1):
        """Equal loss and gradients, and the patched model called its operators.

        Args:
            models: Stock and ours.
            run: From a model to its loss.
            rtol: As in ``assert_same_training``.
            times: How often a forward pass of the layers ran.
            head: How often the fused loss ran.
        """
        assert_same_training(*models, run, rtol=rtol)
        self.called(times, head)

    def called(self, times=1, head=1):
        wanted = {op: n * times for op, n in self.known.calls.items()}
        wanted[HEAD] = head
        assert dict(self.calls) == {op: n for op, n in wanted.items() if n}


def labels(case):
    case.same_training(case.models(), lambda m: m(**case.batch()).loss)


def num_items_in_batch(case):
    items = torch.tensor(31, device=case.device)
    case.same_training(case.models(), lambda m: m(**case.batch(num_items_in_batch=items)).loss)


def custom_loss_on_logits(case):
    inputs = case.batch()

    def run(model):
        logits = model(input_ids=inputs["input_ids"]).logits
        likely = torch.gather(logits.float().softmax(-1), -1, inputs["input_ids"][..., None])
        return (likely - 0.5).pow(2).mean() + logits.pow(2).mean()

    case.same_training(case.models(), run, head=0)


def keep_with_shift_labels(case, keep):
    ids = case.batch()["input_ids"]
    shift = ids[:, -keep:] if isinstance(keep, int) else ids[:, keep]
    inputs = case.batch(
        labels=shift.contiguous(), shift_labels=shift.contiguous(), logits_to_keep=keep
    )
    models = case.models()
    case.same_training(models, lambda m: m(**inputs).loss)
    del inputs["labels"], inputs["shift_labels"]
    wanted, got = (m(**inputs).logits for m in models)
    assert got.shape == (*shift.shape, VOCABULARY)
    torch.testing.assert_close(real_logits(got), wanted, rtol=1e-5, atol=1e-5)


def logits_to_keep_int(case):
    keep_with_shift_labels(case, 5)


def logits_to_keep_tensor(case):
    keep_with_shift_labels(case, torch.tensor([1, 4, 6, 7], device=case.device))


def attentions_and_hidden_states(case):
    stock, ours = case.models(attn_implementation="eager")

    def run(model):
        out = model(**case.batch(), output_attentions=True, output_hidden_states=True)
        assert len(out.attentions) == 2
        assert len(out.hidden_states) == 3
        return (
            out.loss
            + sum(a.pow(2).mean() for a in out.attentions)
            + sum(h.pow(2).mean() for h in out.hidden_states)
        )

    case.same_training((stock, ours), run)
    # transformers 5.0 leaves what captured outputs in the modules, which must not outlive the patch
    unpatch(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in stock.modules()]
    case.calls.clear()
    ours(**case.batch())
    assert not case.calls


def tuple_output(case):
    models = case.models()
    tuples = []

    def run(model):
        tuples.append(model(**case.batch(), return_dict=False))
        return tuples[-1][0]

    case.same_training(models, run)
    wanted, got = tuples
    assert type(got) is type(wanted) is tuple
    assert len(got) == len(wanted)
    torch.testing.assert_close(real_logits(got[1]), wanted[1], rtol=1e-5, atol=1e-5)


def evaluation(case):
    stock, ours = case.models()
    with torch.no_grad():
        wanted, got = (m.eval()(**case.batch()) for m in (stock, ours))
    torch.testing.assert_close(got.loss, wanted.loss)
    torch.testing.assert_close(real_logits(got.logits), wanted.logits, rtol=1e-5, atol=1e-5)
    case.called()


def no_labels(case):
    stock, ours = case.models()
    ids = case.batch()["input_ids"]
    for mode in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with mode:
            wanted, got = (m(input_ids=ids) for m in (stock, ours))
        assert got.loss is wanted.loss is None
        torch.testing.assert_close(real_logits(got.logits), wanted.logits, rtol=1e-5, atol=1e-5)
    case.called(times=3, head=0)


def generate(case):
    # the loss of routers fails in steps of generation before transformers 5.18
    stock, ours = case.models()
    for model in (stock, ours):
        if getattr(model.config, "output_router_logits", False):
            model.config.output_router_logits = False
    ids = case.batch()["input_ids"][:, :5]
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    wanted, got = (m.eval().generate(ids, **arguments) for m in (stock, ours))
    assert torch.equal(got, wanted)
    for op in ("rope", "rms_norm", "rms_norm_rope"):
        assert case.calls[op] == case.known.calls.get(op, 0) * (got.shape[1] - 5)
    assert not case.calls[HEAD]


def gradient_checkpointing(case):
    stock, ours = case.models()
    for model in (stock, ours):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same_training(stock, ours, lambda m: m(**case.batch(), use_cache=False).loss)
    layers = {op: 2 * n for op, n in case.known.calls.items() if op != HEAD}
    layers["rms_norm"] -= 1  # the last one stands outside of the layers
    # in steps, so that the last product is not computed again
    if "gated_mlp" in layers:
        layers |= {op: layers["gated_mlp"] for op in ("swiglu", "geglu") if op in case.known.counts}
    assert dict(case.calls) == {op: n for op, n in layers.items() if n} | {HEAD: 1}


def autocast_bf16(case):
    def run(model):
        return model(**case.batch()).loss

    def cast(model):
        with torch.autocast(case.device.type, dtype=torch.bfloat16):
            return run(model)

    stock, ours = case.models()
    assert_as_exact(stock, ours, copy.deepcopy(stock), cast, run)
    case.called()


def bf16_weights_and_deepcopy(case):
    def run(model):
        return model(**case.batch()).loss

    stock, ours = case.models(torch.bfloat16)
    assert_as_exact(stock, copy.deepcopy(ours), copy.deepcopy(stock).float(), run, run)
    case.called()


def save_and_load(case):
    stock, ours = case.models()
    ours.save_pretrained(case.tmp_path)
    loaded = type(stock).from_pretrained(case.tmp_path).to(case.device).train()
    assert loaded.config.architectures == [type(stock).__name__]
    assert [type(m) for m in loaded.modules()] == [type(m) for m in stock.modules()]
    patch(loaded, strict=True)
    case.calls.clear()
    case.same_training((stock, loaded), lambda m: m(**case.batch()).loss)


def compiled(case):
    config = {"num_hidden_layers": case.known.fewest_layers}
    inputs = graph_batch(length=LENGTH, device=case.device)
    release = version.parse(transformers.__version__)
    if release < version.parse("5.18") and "output_router_logits" in case.known.config:
        config["experts_implementation"] = "batched_mm"  # the default breaks the graph of stock
    stock, ours = case.models(**config)
    ours(**inputs)  # transformers hooks the routers at the first call, which no graph can hold
    graphs = Graphs()
    run = torch.compile(ours, fullgraph=True, backend=graphs)
    assert_same_training(stock, ours, lambda m: (run if m is ours else m)(**inputs).loss)
    assert (graphs.count, graphs.rows) == (1, 0)
    wanted = {op for op, n in case.known.calls.items() if n}
    opaque = wanted & {"rms_norm", "rms_norm_rope", HEAD}
    for op in opaque:
        assert any(f"liger_multi.{op}_forward" in target for target in graphs.targets)
    for op in wanted - opaque:  # traced into the graph
        assert f"ops/{op}.py" in graphs.traces


SITUATIONS = (
    labels,
    num_items_in_batch,
    custom_loss_on_logits,
    logits_to_keep_int,
    logits_to_keep_tensor,
    attentions_and_hidden_states,
    tuple_output,
    evaluation,
    no_labels,
    generate,
    gradient_checkpointing,
    autocast_bf16,
    bf16_weights_and_deepcopy,
    save_and_load,
    compiled,
)


# a dense kind, one with norms before its rotation, and one with experts and sinks
COMPILED = ("llama", "qwen3", "gpt_oss")


def cases():
    """Every kind in every situation; graphs of most are slow."""
    for kind in KINDS:
        for situation in SITUATIONS:
            slow = situation is compiled and kind not in COMPILED
            marks = [pytest.mark.slow] if slow else []
            yield pytest.param(kind, situation, marks=marks, id=f"{kind}-{situation.__name__}")


@pytest.mark.parametrize(("kind", "situation"), list(cases()))
def test_situation(kind, situation, device, monkeypatch, tmp_path):
    situation(Case(kind, device, monkeypatch, tmp_path))


@pytest.mark.parametrize("kind", KINDS)
def test_report_names_what_runs(kind):
    known = ARCHITECTURES[kind]
    report = patch(copy.deepcopy(built(kind)), strict=True)
    by = {entry.op: entry.replaced_by for entry in report.entries}
    assert by["rope"] == f"rope[{known.rope}]"
    if "geglu" in by:
        assert by["geglu"] == "gated_mlp[gelu_tanh]"
    if "swiglu" in by:
        assert by["swiglu"] == ("swiglu_packed" if known.packed else "gated_mlp[silu]")
    text = str(report)
    assert "model.layers.*.self_attn" in text
    absent = {s.op for s in report.skipped}
    assert absent == (set() if {"swiglu", "geglu"} & set(by) else {"swiglu", "geglu"})


# --- experts ---

ROUTED = ("mixtral", "qwen3_moe", "gpt_oss")


def deepseek():
    config = transformers.DeepseekV3Config(
        hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, vocab_size=64, n_routed_experts=8,
        num_local_experts=8, num_experts_per_tok=3, n_group=2, topk_group=1, n_shared_experts=1,
        first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.DeepseekV3ForCausalLM(config)


def model(kind):
    return deepseek() if kind == "deepseek_v3" else build(kind)


def experts_of(built):
    return [m for m in built.modules() if hasattr(m, "_apply_gate")]


def needs_names():
    if version.parse(transformers.__version__) < version.parse("5.7"):
        pytest.skip("models of this transformers take no names of experts but its own")


def numbers(rows=6):
    generator = torch.Generator().manual_seed(4)
    return {"input_ids": torch.randint(64, (2, rows), generator=generator)}


@pytest.mark.parametrize("kind", [*ROUTED, "deepseek_v3"])
@pytest.mark.parametrize("way", ["patch", "interface"])
def test_the_loss_and_every_gradient_are_those_of_stock(kind, way, monkeypatch):
    stock = model(kind).float()
    ours = copy.deepcopy(stock)
    calls, public = [], liger_multi.ops.fused_moe
    monkeypatch.setattr(
        liger_multi.ops, "fused_moe", lambda *a, **k: (calls.append(1), public(*a, **k))[1]
    )
    if way == "interface":
        needs_names()
    if way == "patch":
        report = patch(ours)
        assert report.count("fused_moe") == len(experts_of(stock))
        assert not [s for s in report.skipped if s.op == "fused_moe"]
    else:
        register_experts()
        ours.set_experts_implementation("liger_multi")
    data = batch(length=6) if kind != "deepseek_v3" else numbers()
    data["labels"] = data["input_ids"]
    experts_kind(experts_of(ours)[0])  # the interface asks at its first call
    calls.clear()
    assert_same_training(stock, ours, lambda m: m(**data).loss)
    assert len(calls) == len(experts_of(stock)), "the operator served the step"
    if way == "patch":
        unpatch(ours)
        assert [type(m) for m in experts_of(ours)] == [type(m) for m in experts_of(stock)]
    else:
        unregister_experts()
        assert "liger_multi" not in moe.ALL_EXPERTS_FUNCTIONS


def test_a_routing_of_another_shape_is_for_the_stock_loop():
    """transformers 5.0 hands phimoe's experts that of all experts, which was an error."""
    layer = experts_of(build("mixtral"))[0]
    layer.config._experts_implementation = "eager"
    patched = copy.deepcopy(layer)
    patch(patched)
    x, index = torch.randn(5, 32), torch.rand(5, 4).argsort(-1)[:, :2]
    routing = torch.rand(5, 4)
    torch.testing.assert_close(patched(x, index, routing), layer(x, index, routing))


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_experts_a_token_are_the_eager_loop(kind, dtype):
    """Of two terms the order of the sum is free, so a layer says what the loop says."""
    layer = experts_of(build(kind).to(dtype))[0]
    layer.config._experts_implementation = "eager"
    patched = copy.deepcopy(layer)
    patch(patched)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, layer.down_proj.shape[1 if kind == "mixtral" else 2], generator=generator)
    index = torch.rand(12, 4, generator=generator).argsort(-1)[:, :2]
    routing = torch.rand(12, 2, generator=generator).to(dtype)
    right, y = layer(x.to(dtype), index, routing), patched(x.to(dtype), index, routing)
    # the loop rounds every term to the dtype of the sum, ours only the sum
    by = {torch.float32: (1e-6, 1e-6), torch.bfloat16: (2**-7, 2**-8 * right.abs().max().item())}
    torch.testing.assert_close(y, right, rtol=by[dtype][0], atol=by[dtype][1])


def test_sentinels_of_expert_parallelism_add_nothing():
    """As transformers' grouped GEMMs have it: ids from num_experts on are somebody else's.

    Spelled out here too: those of 5.0 returned 2e34 for them with PyTorch 2.9.
    """
    layer = experts_of(build("mixtral"))[0]
    ours = copy.deepcopy(layer)
    patch(ours)
    layer.config._experts_implementation, layer._is_expert_parallel = "grouped_mm", True

    def spelled_out(x, index, routing):
        y = torch.zeros_like(x)
        for expert, both in enumerate(layer.gate_up_proj):
            gate, up = (x @ both.mT).chunk(2, -1)
            inside = (layer.act_fn(gate) * up) @ layer.down_proj[expert].mT
            y = y + (routing * (index == expert)).sum(-1, keepdim=True) * inside
        return y

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, layer.down_proj.shape[1], generator=generator, requires_grad=True)
    index = torch.randint(5, (9, 2), generator=generator)
    assert (index == 4).any()
    routing = torch.rand(9, 2, generator=generator).requires_grad_()
    runs = [(spelled_out, layer), (ours, ours)]
    if version.parse(transformers.__version__) >= version.parse("5.17"):
        runs.append((layer, layer))
    found = []
    for run, each in runs:
        y = run(x, index, routing)
        found.append((y, *torch.autograd.grad(y.square().sum(), [x, routing, each.down_proj])))
    for other in found[1:]:
        torch.testing.assert_close(other[0], found[0][0], rtol=1e-4, atol=1e-6)
        assert_same_gradients(other[1:], found[0][1:])


def test_a_gate_of_another_kind_stays_stock(monkeypatch):
    built = build("mixtral")
    kind = type(experts_of(built)[0])
    monkeypatch.setattr(kind, "_apply_gate", lambda self, x: x.chunk(2, -1)[0].tanh())
    report = patch(built)
    assert not report.count("fused_moe")
    assert {s.reason for s in report.skipped if s.op == "fused_moe"} == {
        "the gate of MixtralExperts is none that fused_moe has"
    }
    needs_names()
    register_experts()
    try:
        built.set_experts_implementation("liger_multi")
        assert torch.isfinite(built(**batch(length=6)).loss)
    finally:
        unregister_experts()


def test_what_the_gate_of_gpt_oss_is():
    found = experts_kind(experts_of(build("gpt_oss"))[0])
    assert (found.activation, found.interleaved, found.transposed, found.bias) == (
        "swiglu_clamped", True, True, True,
    )  # fmt: skip
    assert dict(found.clamps) == {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0}


def test_a_transformers_that_takes_no_names_is_refused(monkeypatch):
    """5.0 raised when a model asked for the name, with a list of its own."""
    monkeypatch.setattr("transformers.__version__", "5.6.2")  # whatever module stands for it now
    with pytest.raises(ConfigurationError, match=r"needs transformers >= 5\.7, this is 5\.6\.2"):
        register_experts()
    assert "liger_multi" not in moe.ExpertsInterface._global_mapping


def test_a_name_that_is_taken_is_refused():
    needs_names()
    moe.ExpertsInterface.register("taken", print)
    try:
        with pytest.raises(ConfigurationError, match="another 'taken'"):
            register_experts("taken")
    finally:
        del moe.ExpertsInterface._global_mapping["taken"]


# --- modules ---


def test_the_modules_are_those_of_transformers():
    built = build("mixtral")
    stock = experts_of(built)[0]
    ours = liger_multi.nn.Experts(built.config)
    ours.load_state_dict(stock.state_dict())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, built.config.hidden_size, generator=generator)
    index, routing = torch.tensor([[0, 2]] * 7), torch.rand(7, 2, generator=generator)
    torch.testing.assert_close(ours(x, index, routing), stock(x, index, routing))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hyper_connections_are_those_of_deepseek(dtype):
    module = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

    class Config:
        hc_mult, hc_sinkhorn_iters, hc_eps, rms_norm_eps, hidden_size = 4, 7, 1e-6, 1e-6, 24

    stock, ours = module.DeepseekV4HyperConnection(Config), liger_multi.nn.HyperConnection(Config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(2, 5, 4, 24, generator=generator).to(dtype)
    found = []
    for each in (stock, ours):
        streams = x.clone().requires_grad_()
        post, mix, block = each(streams)
        if each is ours:
            y = each.expand(streams, block.tanh(), post, mix)
        else:
            y = post.to(dtype).unsqueeze(-1) * block.tanh().unsqueeze(-2)
            y = y + torch.matmul(mix.to(dtype).mT, streams)
        grads = torch.autograd.grad(y.square().float().sum(), [streams, *each.parameters()])
        found.append((post, mix, block, y, *grads))
    # stock rounds coefficients to bf16 before it mixes
    by = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (0.05, 0.05)}[dtype]
    for right, got in zip(*found, strict=True):
        size = right.abs().max().item()
        torch.testing.assert_close(got, right, rtol=by[0], atol=by[1] * max(1.0, size))


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"index": torch.zeros(4, 2)}, TypeError, "integer class ids"),
        ({"index": torch.zeros(4, 3, dtype=torch.int64)}, ValueError, "same shape"),
        ({"x": torch.zeros(4, 7)}, ValueError, "must be H = 8"),
        ({"down_weight": torch.zeros(3, 8, 5)}, ValueError, r"down_weight must have shape"),
        ({"gate_up_weight": torch.zeros(8, 8)}, ValueError, "three axes"),
        ({"down_bias": torch.zeros(8)}, ValueError, r"down_bias must have shape \(3, 8\)"),
        ({"x": torch.zeros(4, 8).half()}, TypeError, "one dtype"),
        ({"activation": "relu"}, ValueError, "relu"),
        ({"interleaved": 1}, TypeError, "True or False"),
        ({"routing": None}, TypeError, "routing must be"),
    ],
)
def test_what_does_not_fit_is_refused(change, error, said):
    given = {
        "x": torch.zeros(4, 8), "gate_up_weight": torch.zeros(3, 8, 8),
        "down_weight": torch.zeros(3, 8, 4), "index": torch.zeros(4, 2, dtype=torch.int64),
        "routing": torch.zeros(4, 2),
    }  # fmt: skip
    with pytest.raises(error, match=said):
        liger_multi.ops.fused_moe(**(given | change))


@pytest.mark.parametrize(
    ("op", "change", "error", "said"),
    [
        ("hyper_connections", {"iterations": 0}, ValueError, "at least 1"),
        ("hyper_connections", {"weight": torch.zeros(8, 9)}, ValueError, "weight must have shape"),
        ("hyper_connections", {"eps": -1.0}, ValueError, "eps must be at least 0"),
        ("hyper_connections", {"x": torch.zeros(4)}, ValueError, "at least one stream"),
        ("hyper_connections_pre", {"pre": torch.zeros(3, 3)}, ValueError, "pre must have shape"),
        ("hyper_connections_pre", {"pre": None}, TypeError, "pre must be"),
        ("hyper_connections_post", {"mix": torch.zeros(3, 2)}, ValueError, "mix must have shape"),
        ("hyper_connections_post", {"out": torch.zeros(3, 5)}, ValueError, "out must have shape"),
    ],
)
def test_streams_that_do_not_fit_are_refused(op, change, error, said):
    given = {
        "hyper_connections": {
            "weight": torch.zeros(8, 8), "bias": torch.zeros(8), "scale": torch.zeros(3),
        },
        "hyper_connections_pre": {"pre": torch.zeros(3, 2)},
        "hyper_connections_post": {
            "out": torch.zeros(3, 4), "post": torch.zeros(3, 2), "mix": torch.zeros(3, 2, 2),
        },
    }[op]  # fmt: skip
    with pytest.raises(error, match=said):
        getattr(liger_multi.ops, op)(**({"x": torch.zeros(3, 2, 4)} | given | change))
