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


import liger_multi
from liger_multi.patching import patch, real_logits, unpatch
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
def built(model_type, **config):
    return build(model_type, **config)


class Case:
    """A stock model and its patched copy."""

    def __init__(self, model_type, device, monkeypatch, tmp_path):
        self.model_type, self.device, self.tmp_path = model_type, device, tmp_path
        self.known = ARCHITECTURES[model_type]
        self.calls = Calls(monkeypatch)

    def models(self, dtype=torch.float32, **config):
        """The two models; strict, so that nothing is skipped."""
        stock = copy.deepcopy(built(self.model_type, **config)).to(self.device, dtype)
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
        expected = {op: n * times for op, n in self.known.calls.items()}
        expected[HEAD] = head
        assert dict(self.calls) == {op: n for op, n in expected.items() if n}


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
    expected, got = (m(**inputs).logits for m in models)
    assert got.shape == (*shift.shape, VOCABULARY)
    torch.testing.assert_close(real_logits(got), expected, rtol=1e-5, atol=1e-5)


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
    expected, got = tuples
    assert type(got) is type(expected) is tuple
    assert len(got) == len(expected)
    torch.testing.assert_close(real_logits(got[1]), expected[1], rtol=1e-5, atol=1e-5)


def evaluation(case):
    stock, ours = case.models()
    with torch.no_grad():
        expected, got = (m.eval()(**case.batch()) for m in (stock, ours))
    torch.testing.assert_close(got.loss, expected.loss)
    torch.testing.assert_close(real_logits(got.logits), expected.logits, rtol=1e-5, atol=1e-5)
    case.called()


def no_labels(case):
    stock, ours = case.models()
    ids = case.batch()["input_ids"]
    for mode in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with mode:
            expected, got = (m(input_ids=ids) for m in (stock, ours))
        assert got.loss is expected.loss is None
        torch.testing.assert_close(real_logits(got.logits), expected.logits, rtol=1e-5, atol=1e-5)
    case.called(times=3, head=0)


def generate(case):
    # the loss of routers fails in steps of generation before transformers 5.18
    stock, ours = case.models()
    for model in (stock, ours):
        if getattr(model.config, "output_router_logits", False):
            model.config.output_router_logits = False
    ids = case.batch()["input_ids"][:, :5]
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    expected, got = (m.eval().generate(ids, **arguments) for m in (stock, ours))
    assert torch.equal(got, expected)
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
    expected = {op for op, n in case.known.calls.items() if n}
    opaque = expected & {"rms_norm", "rms_norm_rope", HEAD}
    for op in opaque:
        assert any(f"liger_multi.{op}_forward" in target for target in graphs.targets)
    for op in expected - opaque:  # traced into the graph
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
    for model_type in KINDS:
        for situation in SITUATIONS:
            slow = situation is compiled and model_type not in COMPILED
            marks = [pytest.mark.slow] if slow else []
            yield pytest.param(
                model_type, situation, marks=marks, id=f"{model_type}-{situation.__name__}"
            )


@pytest.mark.parametrize(("model_type", "situation"), list(cases()))
def test_situation(model_type, situation, device, monkeypatch, tmp_path):
    situation(Case(model_type, device, monkeypatch, tmp_path))


@pytest.mark.parametrize("model_type", KINDS)
def test_report_names_running_operators(model_type):
    known = ARCHITECTURES[model_type]
    report = patch(copy.deepcopy(built(model_type)), strict=True)
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


def experts_of(built):
    return [m for m in built.modules() if hasattr(m, "_apply_gate")]


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
    results = []
    for each in (stock, ours):
        streams = x.clone().requires_grad_()
        post, mix, block = each(streams)
        if each is ours:
            y = each.expand(streams, block.tanh(), post, mix)
        else:
            y = post.to(dtype).unsqueeze(-1) * block.tanh().unsqueeze(-2)
            y = y + torch.matmul(mix.to(dtype).mT, streams)
        grads = torch.autograd.grad(y.square().float().sum(), [streams, *each.parameters()])
        results.append((post, mix, block, y, *grads))
    # stock rounds coefficients to bf16 before it mixes
    by = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (0.05, 0.05)}[dtype]
    for expected, got in zip(*results, strict=True):
        size = expected.abs().max().item()
        torch.testing.assert_close(got, expected, rtol=by[0], atol=by[1] * max(1.0, size))


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
def test_unfit_arguments_are_refused(change, error, said):
    inputs = {
        "x": torch.zeros(4, 8),
        "gate_up_weight": torch.zeros(3, 8, 8),
        "down_weight": torch.zeros(3, 8, 4),
        "index": torch.zeros(4, 2, dtype=torch.int64),
        "routing": torch.zeros(4, 2),
    }
    with pytest.raises(error, match=said):
        liger_multi.ops.fused_moe(**(inputs | change))


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
def test_unfit_streams_are_refused(op, change, error, said):
    inputs = {
        "hyper_connections": {
            "weight": torch.zeros(8, 8),
            "bias": torch.zeros(8),
            "scale": torch.zeros(3),
        },
        "hyper_connections_pre": {"pre": torch.zeros(3, 2)},
        "hyper_connections_post": {
            "out": torch.zeros(3, 4),
            "post": torch.zeros(3, 2),
            "mix": torch.zeros(3, 2, 2),
        },
    }[op]
    with pytest.raises(error, match=said):
        getattr(liger_multi.ops, op)(**({"x": torch.zeros(3, 2, 4)} | inputs | change))
