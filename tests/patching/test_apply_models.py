"""Every situation for every architecture: equal to stock, and by our operators.

A situation takes a case, which holds two equal models, one of them patched, and counts the
operators' calls.

Experts are recognized, equal to stock in every gradient, and given back.
"""

import copy
import functools
import re
from collections import Counter

import pytest
import torch
from packaging import version
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import liger_multi
from liger_multi.dispatch.op import OPS, inline_ops
from liger_multi.patching import patch, real_logits, unpatch
from tests.comparing import assert_same_gradients, gradients, largest, resolution
from tests.models import (
    ARCHITECTURES,
    KINDS,
    VOCABULARY,
    Calls,
    Graphs,
    adapters,
    assert_as_exact,
    assert_same_training,
    assert_unpatched,
    batch,
    build,
    experts_of,
    graph_batch,
    patched_copy,
    scaled_to_width,
    transformers,
)
from tests.sweep.cases import build as build_pair, inputs, registered
from tests.sweep.multimodal import modalities
from tests.sweep.run import executed

# --- situations ---

LENGTH = 8
HEAD = "fused_linear_cross_entropy"


@functools.cache
def built(model_type, **config):
    return build(model_type, **config)


class Case:
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

    def loss_of(self, model):
        return model(**self.batch()).loss

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
    case.same_training(case.models(), case.loss_of)


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


def logits_to_keep(case):
    ids = case.batch()["input_ids"]
    models = case.models()
    for keep in (5, torch.tensor([1, 4, 6, 7], device=case.device)):
        shift = (ids[:, -keep:] if isinstance(keep, int) else ids[:, keep]).contiguous()
        inputs = case.batch(labels=shift, shift_labels=shift, logits_to_keep=keep)
        case.calls.clear()
        case.same_training(models, lambda m, inputs=inputs: m(**inputs).loss)
        del inputs["labels"], inputs["shift_labels"]
        expected, got = (m(**inputs).logits for m in models)
        assert got.shape == (*shift.shape, VOCABULARY)
        torch.testing.assert_close(real_logits(got), expected, rtol=1e-5, atol=1e-5)


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
    assert_unpatched(ours, stock)
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
    assert (type(got), len(got)) == (type(expected), len(expected))
    assert isinstance(got, tuple)
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
    def cast(model):
        with torch.autocast(case.device.type, dtype=torch.bfloat16):
            return case.loss_of(model)

    stock, ours = case.models()
    assert_as_exact(stock, ours, copy.deepcopy(stock), cast, case.loss_of)
    case.called()


def bf16_weights_and_deepcopy(case):
    stock, ours = case.models(torch.bfloat16)
    wide = copy.deepcopy(stock).float()
    assert_as_exact(stock, copy.deepcopy(ours), wide, case.loss_of, case.loss_of)
    case.called()


def save_and_load(case):
    stock, ours = case.models()
    ours.save_pretrained(case.tmp_path)
    loaded = type(stock).from_pretrained(case.tmp_path).to(case.device).train()
    assert loaded.config.architectures == [type(stock).__name__]
    assert [type(m) for m in loaded.modules()] == [type(m) for m in stock.modules()]
    patch(loaded, strict=True)
    case.calls.clear()
    case.same_training((stock, loaded), case.loss_of)


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
    logits_to_keep,
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
    mlp = {"geglu": "gated_mlp[gelu_tanh]"}
    mlp["swiglu"] = "swiglu_packed" if known.packed else "gated_mlp[silu]"
    assert all(by[op] == mlp[op] for op in mlp.keys() & by.keys())
    assert "model.layers.*.self_attn" in str(report)
    assert {s.op for s in report.skipped} == (set() if mlp.keys() & by.keys() else {*mlp})


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


ARGUMENTS = {
    "fused_moe": {
        "x": torch.zeros(4, 8),
        "gate_up_weight": torch.zeros(3, 8, 8),
        "down_weight": torch.zeros(3, 8, 4),
        "index": torch.zeros(4, 2, dtype=torch.int64),
        "routing": torch.zeros(4, 2),
    },
    "hyper_connections": {
        "x": torch.zeros(3, 2, 4),
        "weight": torch.zeros(8, 8),
        "bias": torch.zeros(8),
        "scale": torch.zeros(3),
    },
    "hyper_connections_pre": {"x": torch.zeros(3, 2, 4), "pre": torch.zeros(3, 2)},
    "hyper_connections_post": {
        "x": torch.zeros(3, 2, 4),
        "out": torch.zeros(3, 4),
        "post": torch.zeros(3, 2),
        "mix": torch.zeros(3, 2, 2),
    },
}


@pytest.mark.parametrize(
    ("op", "change", "error", "said"),
    [
        ("fused_moe", {"index": torch.zeros(4, 2)}, TypeError, "integer class ids"),
        (
            *("fused_moe", {"index": torch.zeros(4, 3, dtype=torch.int64)}),
            *(ValueError, "same shape"),
        ),
        ("fused_moe", {"x": torch.zeros(4, 7)}, ValueError, "must be H = 8"),
        (
            *("fused_moe", {"down_weight": torch.zeros(3, 8, 5)}),
            *(ValueError, r"down_weight must have shape"),
        ),
        ("fused_moe", {"gate_up_weight": torch.zeros(8, 8)}, ValueError, "three axes"),
        (
            *("fused_moe", {"down_bias": torch.zeros(8)}),
            *(ValueError, r"down_bias must have shape \(3, 8\)"),
        ),
        ("fused_moe", {"x": torch.zeros(4, 8).half()}, TypeError, "one dtype"),
        ("fused_moe", {"activation": "relu"}, ValueError, "relu"),
        ("fused_moe", {"interleaved": 1}, TypeError, "True or False"),
        ("fused_moe", {"routing": None}, TypeError, "routing must be"),
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
def test_unfit_arguments_are_refused(op, change, error, said):
    with pytest.raises(error, match=said):
        getattr(liger_multi.ops, op)(**(ARGUMENTS[op] | change))


# --- multimodal models with true inputs ---

TOWERS = {
    "gemma3": ("vision_tower", "image"),
    "idefics3": ("vision_model", "image"),
    "internvl": ("vision_tower", "image"),
    "llama4": ("vision_model", "image"),
    "llava_next": ("vision_tower", "image"),
    "mllama": ("vision_model", "image"),
    "paligemma": ("vision_tower", "image"),
    "qwen2_5_vl": ("visual", "image"),
    "qwen2_audio": ("audio_tower", "audio"),
    "qwen2_vl": ("visual", "image"),
    "qwen3_vl": ("visual", "image"),
    "smolvlm": ("vision_model", "image"),
    "whisper": ("encoder", "audio"),
}
"""By type the name of the tower within ``model``, and what it takes."""
DEAD = {
    # its pooling head is not called
    "gemma3": r"vision_tower\.(vision_model\.)?head\.",
    # the last layer is not read
    "llava_next": r"vision_tower\.(vision_model\.)?(post_layernorm|encoder\.layers\.1\.)",
    # added behind the last layer that other tokens see
    "qwen3_vl": r"deepstack_merger_list\.1\.",
    # fixed
    "qwen2_audio": r"audio_tower\.embed_positions",
    "whisper": r"encoder\.embed_positions",
}
"""Parameters that the loss of a tiny model does not reach."""
STORED = {("mllama", True)}
"""Parts, towers or the rest, whose layers transformers does not checkpoint."""
BY_KEYWORD = {("llama4", True)}
"""Parts whose layers get hidden states by keyword, of which reentrant checkpoints know nothing: no
parameter of them has a gradient, unpatched or patched, so nothing is computed again."""
CANCELS = r"\bk_proj\.bias"  # the softmax does not see what is added to all scores
every = pytest.mark.parametrize("model_type", TOWERS)


@functools.cache
def _model(model_type):
    pairs = [
        p for p in registered() if p.type == model_type and p.cls.endswith("ConditionalGeneration")
    ]
    model = scaled_to_width(build_pair(pairs[0]), noise=0.2)
    for parameter in model.parameters():
        if parameter.numel() == 1:
            nn.init.constant_(parameter, 0.8)  # gates are born zero
    return model, inputs(pairs[0], model)


@functools.cache
def _broken(model_type):
    """What a step of the unpatched model raises that transformers 5.0 cannot run."""
    model, batch = _model(model_type)
    try:
        model(**batch)
    except AttributeError as error:  # its tower has another output than the model reads
        return str(error)
    return ""


def models(model_type, patching=None):
    """A model, an equal one, patched with options where given, and a batch with all they take."""
    model, batch = _model(model_type)
    if model_type == "llama4" and _broken(model_type):
        pytest.skip(f"unpatched, it raises: {_broken(model_type)}")
    ours = copy.deepcopy(model) if patching is None else patched_copy(model, **patching)
    return copy.deepcopy(model), ours, batch


def in_tower(model_type, name):
    return f".{TOWERS[model_type][0]}." in f".{name}."


def run(batch):
    return lambda model: model(**batch).loss


# --- a step ---


@every
def test_step_reaches_all_parameters(model_type):
    """The others compare what is too large here to be rounding."""
    stock, ours, batch = models(model_type)
    assert TOWERS[model_type][1] in modalities(batch)
    report = patch(ours)
    with executed(ours) as record:
        assert_same_training(stock, ours, run(batch))
    for tower in (True, False):
        patched = [e.path for e in report.entries if in_tower(model_type, e.path) == tower]
        assert sum(path in record.called for path in patched) >= 4
    floor = 20 * resolution(gradients(stock).values(), torch.finfo(torch.float32).eps)
    unseen = {n for n, p in stock.named_parameters() if p.grad is None or largest(p.grad) < floor}
    dead = re.compile(f"{DEAD.get(model_type, CANCELS)}|{CANCELS}")
    assert not [name for name in unseen if not dead.search(name)]


@every
def test_evaluation_after_training_and_without_the_patch(model_type):
    """Then classes and the bits of a step are those of a model that was never patched."""
    stock, ours, batch = models(model_type, {})
    for model in (stock, ours):
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for _ in range(2):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
        model.eval()
    with torch.no_grad():
        expected, actual = stock(**batch), ours(**batch)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-4, atol=0)
    torch.testing.assert_close(
        actual.logits.float(), expected.logits.float(), rtol=0, atol=1e-3 * largest(expected.logits)
    )
    unpatch(ours)
    stock.load_state_dict(ours.state_dict())
    assert [type(m) for m in ours.modules()] == [type(m) for m in stock.modules()]
    for model in (stock.train(), ours.train()):
        model.zero_grad()
        model(**batch).loss.backward()
    torch.testing.assert_close(gradients(ours), gradients(stock), rtol=0, atol=0)


# --- checkpointing ---


@every
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("lora", [False, True], ids=["trained", "lora"])
def test_gradient_checkpointing(model_type, lora, reentrant):
    """Equal to unpatched; operators of the layers, or of all adapters, are called once more."""
    stock, ours, batch = models(model_type, None if lora else {})
    if lora:
        layers = [path for t in (True, False) for path in linears(model_type, stock, t)]
        stock, ours = adapted(stock, layers)
        patch(ours)
    before = calls(model_type, stock, ours, batch)
    for model in (stock, ours):
        checkpoint(model, reentrant)
        if lora and reentrant:  # only inputs with gradients reach layers then
            model.enable_input_require_grads()
    after = calls(model_type, stock, ours, batch)
    # transformers marks the inputs of this tower too early: nothing behind them has a gradient
    unreached = BY_KEYWORD | ({("qwen3_vl", True)} if lora else set()) if reentrant else set()
    for tower in (True, False):
        assert (after[tower] > before[tower]) == ((model_type, tower) not in STORED | unreached)


def checkpoint(model, reentrant):
    model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})


def calls(model_type, stock, ours, batch):
    """Calls of operators in a step that equals the unpatched one: of the tower's, of the rest's."""
    with executed(ours) as record:
        assert_same_training(stock, ours, run(batch))
    counts = {True: 0, False: 0}
    for path, counted in record.called.items():
        counts[in_tower(model_type, path or "")] += counted.total()
    return counts


# --- frozen parts ---


class Backward(TorchDispatchMode):
    """What the backward operators computed of frozen weights.

    Attributes:
        calls: Calls of backward operators.
        wasted: Operators and weights whose gradient was computed for nobody.
    """

    def __init__(self, model):
        super().__init__()
        self.frozen = {p.data_ptr(): n for n, p in model.named_parameters() if not p.requires_grad}
        self.calls, self.wasted = Counter(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("liger_multi::").split(".")[0]
        op = OPS.get(name.removesuffix("_backward"))
        if op is None or not name.endswith("_backward"):
            return output
        self.calls[op.name] += 1
        outputs = (output,) if isinstance(output, torch.Tensor) else output
        grads = dict(zip(op.bwd.returns, outputs, strict=True))
        for param, value in zip(op.bwd.params, args, strict=False):
            weight = isinstance(value, torch.Tensor) and self.frozen.get(value.data_ptr())
            if weight and f"d{param}" in grads and grads[f"d{param}"].numel():
                self.wasted.append((op.name, weight))
        return output


def freeze(model_type, model, tower):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(in_tower(model_type, name) != tower)


def flops(model, batch):
    model.zero_grad()
    with inline_ops(), FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    return counter.get_total_flops()


@every
@pytest.mark.parametrize("tower", [True, False], ids=["tower", "the rest"])
def test_frozen_parts(model_type, tower):
    """No gradients, and none computed: as many products fewer as unpatched, or more."""
    stock, ours, batch = models(model_type, {"fused_linear_cross_entropy": {"compact": False}})
    whole = [flops(model, batch) for model in (stock, ours)]
    for model in (stock, ours):
        freeze(model_type, model, tower)
    backward = Backward(ours)
    with backward:
        assert_same_training(stock, ours, run(batch))
    assert backward.calls
    assert not backward.wasted
    assert not [n for n in gradients(ours) if in_tower(model_type, n) == tower]
    saved = [n - flops(model, batch) for n, model in zip(whole, (stock, ours), strict=True)]
    assert saved[1] >= saved[0] > 0


# --- adapters ---


def linears(model_type, model, tower):
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and type(module).forward is torch.nn.Linear.forward  # a router's returns more
        and in_tower(model_type, path) == tower
        and model.get_output_embeddings() is not module
    ]


def adapted(model, targets):
    stock = adapters(model, targets, std=0.2)
    return stock, copy.deepcopy(stock)


@every
@pytest.mark.parametrize("tower", [True, False], ids=["tower", "the rest"])
def test_lora(model_type, tower):
    stock, _, batch = models(model_type)
    targets = linears(model_type, stock, tower)
    stock, ours = adapted(stock, targets)
    assert patch(ours).count("lora") == len(targets) > 0
    with executed(ours) as record:
        assert_same_training(stock, ours, run(batch))
    assert record.calls.keys() & {"lora_mlp", "lora_qkv", "lora_update"}
    actual = gradients(ours)
    assert actual
    assert all("lora_" in name and in_tower(model_type, name) == tower for name in actual)
    assert_unpatched(ours, stock)


# --- the compiler ---


@pytest.mark.slow
@every
def test_compiled(model_type):
    """As many graphs as unpatched, with operators of both parts in them.

    Where Dynamo leaves a frame to Python, as loops with a break in them (layers that are dropped at
    random, transformers 5.0), it compiles by themselves the forwards that the frame calls, but not
    those of PyTorch's own classes. A LayerNorm of ours is a graph of one operator there.
    """
    stock, ours, batch = models(model_type, {})
    counts, losses = [], []
    for model in (stock, ours):
        torch._dynamo.reset()
        graphs = Graphs()
        loss = torch.compile(model, backend=graphs)(**batch).loss
        loss.backward()
        counts.append(graphs.count)
        losses.append(loss.detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-5, atol=0)
    assert_same_gradients(gradients(ours), gradients(stock))
    assert counts[1] - graphs.single <= counts[0]
    assert any("liger_multi." in target for target in graphs.targets)
