"""Multimodal models with true inputs: loss and every gradient as unpatched, as they are trained."""
# ruff: noqa: E402  (what needs transformers is imported after the skip)

import copy
import functools
import re
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

transformers = pytest.importorskip("transformers")

from liger_multi.dispatch.op import OPS, inline_ops
from liger_multi.patching import patch, unpatch
from tests.comparing import assert_same_gradients, gradients, largest, resolution
from tests.models import Graphs, assert_same_training
from tests.sweep.cases import build, inputs, registered
from tests.sweep.multimodal import modalities
from tests.sweep.run import executed

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
    model = build(pairs[0])
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(drawn * (parameter[0].numel()) ** -0.5)
            elif parameter.numel() > 1:
                parameter.add_(drawn * 0.2)
            else:
                parameter.fill_(0.8)  # gates are born zero
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


def models(model_type):
    """A model, an equal one, and a batch with everything that they take."""
    model, batch = _model(model_type)
    if model_type == "llama4" and _broken(model_type):
        pytest.skip(f"unpatched, it raises: {_broken(model_type)}")
    return copy.deepcopy(model), copy.deepcopy(model), batch


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
    actual = gradients(stock)
    floor = 20 * resolution(actual.values(), torch.finfo(torch.float32).eps)
    unseen = {n for n, p in stock.named_parameters() if p.grad is None or largest(p.grad) < floor}
    dead = re.compile(f"{DEAD.get(model_type, CANCELS)}|{CANCELS}")
    assert not [name for name in unseen if not dead.search(name)]


@every
def test_evaluation_after_training_and_without_the_patch(model_type):
    """Then classes and the bits of a step are those of a model that was never patched."""
    stock, ours, batch = models(model_type)
    patch(ours)
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
    expected, actual = gradients(stock), gradients(ours)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


# --- checkpointing ---


@every
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(model_type, reentrant):
    """Equal to unpatched with it; operators of the layers are called once more."""
    stock, ours, batch = models(model_type)
    patch(ours)
    before = calls(model_type, stock, ours, batch)
    for model in (stock, ours):
        checkpoint(model, reentrant)
    after = calls(model_type, stock, ours, batch)
    unreached = BY_KEYWORD if reentrant else set()
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
    """Freeze the tower, or all of the model but the tower."""
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
    stock, ours, batch = models(model_type)
    patch(ours, fused_linear_cross_entropy={"compact": False})
    whole = [flops(model, batch) for model in (stock, ours)]
    for model in (stock, ours):
        freeze(model_type, model, tower)
    backward = Backward(ours)
    with backward:
        assert_same_training(stock, ours, run(batch))
    assert backward.calls
    assert not backward.wasted
    assert not [n for n in gradients(ours) if in_tower(model_type, n) == tower]
    saved = [
        before - flops(model, batch) for before, model in zip(whole, (stock, ours), strict=True)
    ]
    assert saved[1] >= saved[0] > 0


# --- adapters ---


def linears(model_type, model, tower):
    """Linear layers within layers of the tower, or of the rest."""
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and type(module).forward is torch.nn.Linear.forward  # a router's returns more
        and in_tower(model_type, path) == tower
        and model.get_output_embeddings() is not module
    ]


def adapted(model, targets):
    """Two equal models with adapters that add something."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    adapted_model = peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets)
    )
    with torch.no_grad():
        for name, parameter in adapted_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return adapted_model, copy.deepcopy(adapted_model)


@every
@pytest.mark.parametrize("tower", [True, False], ids=["tower", "the rest"])
def test_lora(model_type, tower):
    stock, _, batch = models(model_type)
    targets = linears(model_type, stock, tower)
    stock, ours = adapted(stock, targets)
    report = patch(ours)
    assert report.count("lora") == len(targets) > 0
    with executed(ours) as record:
        assert_same_training(stock, ours, run(batch))
    assert record.calls.keys() & {"lora_mlp", "lora_qkv", "lora_update"}
    actual = gradients(ours)
    assert actual
    assert all("lora_" in name and in_tower(model_type, name) == tower for name in actual)
    unpatch(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in stock.modules()]


@every
@pytest.mark.parametrize("reentrant", [True, False])
def test_lora_with_checkpointing(model_type, reentrant):
    """On all linear layers; the adapters' operators are called once more."""
    stock, _, batch = models(model_type)
    stock, ours = adapted(stock, [p for t in (True, False) for p in linears(model_type, stock, t)])
    patch(ours)
    before = calls(model_type, stock, ours, batch)
    for model in (stock, ours):
        checkpoint(model, reentrant)
        if reentrant:  # only inputs with gradients reach layers then
            model.enable_input_require_grads()
    after = calls(model_type, stock, ours, batch)
    # transformers marks the inputs of this tower too early: nothing behind them has a gradient
    unreached = BY_KEYWORD | {("qwen3_vl", True)} if reentrant else set()
    for tower in (True, False):
        assert (after[tower] > before[tower]) == ((model_type, tower) not in STORED | unreached)


# --- the compiler ---


@pytest.mark.slow
@every
def test_compiled(model_type):
    """As many graphs as unpatched, with operators of both parts in them.

    Where Dynamo leaves a frame to Python, as loops with a break in them (layers that are dropped at
    random, transformers 5.0), it compiles by themselves the forwards that the frame calls, but not
    those of PyTorch's own classes. A LayerNorm of ours is a graph of one operator there.
    """
    stock, ours, batch = models(model_type)
    patch(ours)
    counts, losses = [], []
    for model in (stock, ours):
        torch._dynamo.reset()
        graphs = Graphs()
        loss = torch.compile(model, backend=graphs)(**batch).loss
        loss.backward()
        counts.append(graphs.count)
        losses.append(loss.detach())
    torch._dynamo.reset()
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-5, atol=0)
    assert_same_gradients(gradients(ours), gradients(stock))
    assert counts[1] - graphs.single <= counts[0]
    assert any("liger_multi." in target for target in graphs.targets)
