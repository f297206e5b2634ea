"""Probes meet zeros, tiny and huge numbers and constant rows: what treats them apart is left."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import liger_multi
from liger_multi import losses
from liger_multi.errors import PackingError
from liger_multi.memory import apply_recompute, estimate
from liger_multi.modules import arguments
from liger_multi.patching.rotary import recognized
from tests.comparing import assert_same_gradients, gradients
from tests.models import (
    Mlp,
    Norm,
    assert_same_compiled,
    batch,
    build,
    patched_copy,
    redrawn,
    transformers,
    variant,
)
from tests.patching.test_rotary import half
from tests.sweep import cases


class LayerNorm(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(12))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class Gated(Norm):
    def closed(self, gate: Tensor) -> Tensor:
        return gate

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        x = hidden_states.float()
        n = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        y = self.weight * n.to(hidden_states.dtype)
        return (y * F.silu(self.closed(gate).float())).to(hidden_states.dtype)


def replaced(module: nn.Module) -> set[str]:
    report = liger_multi.patch(nn.Sequential(module), fused_linear_cross_entropy=False)
    return {entry.op for entry in report.entries}


@pytest.mark.parametrize("module_class", [Norm, LayerNorm, Gated])
def test_plain_norms_are_replaced(module_class: Any) -> None:
    assert replaced(module_class())


@pytest.mark.parametrize("size", [5, 24, 63, 1000])
@pytest.mark.parametrize("eps", [1e-12, 1e-5])
def test_norms_of_any_width_are_replaced(size: int, eps: float) -> None:
    assert replaced(nn.LayerNorm(size, eps=eps))
    assert replaced(nn.RMSNorm(size, eps=eps))


def ones_for_zeros(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return torch.where((x == 0).all(-1, keepdim=True), torch.ones_like(y), y)


def zeros_for_constants(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x.amax(-1, keepdim=True) == x.amin(-1, keepdim=True), torch.zeros_like(y), y)


def zeros_for_tiny_rows(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x.abs().amax(-1, keepdim=True) < 1e-10, torch.zeros_like(y), y)


def before(change: Any) -> Any:
    return lambda base, m, x: base.forward(m, change(m, x))


def after(change: Any) -> Any:
    return lambda base, m, x: change(m, x, base.forward(m, x))


OTHER_WAYS: dict[str, Any] = {
    "plain": (Norm, after(lambda m, x, y: y)),
    "zero rows": (Norm, after(ones_for_zeros)),
    "zero rows without gradient": (
        Norm,
        before(lambda m, x: torch.where((x == 0).all(-1, keepdim=True), torch.zeros_like(x), x)),
    ),
    "tiny inputs": (Norm, before(lambda m, x: x.masked_fill(x.abs() < 1e-5, 0))),
    "tiniest inputs": (Norm, before(lambda m, x: x.masked_fill(x.abs() < 1e-20, 0))),
    "tiny rows": (Norm, after(zeros_for_tiny_rows)),
    "tiny outputs": (Norm, after(lambda m, x, y: F.hardshrink(y, 1e-7))),
    "huge inputs": (Norm, before(lambda m, x: x.clamp(-1e10, 1e10))),
    "constant rows": (Norm, after(zeros_for_constants)),
    "infinity": (Norm, before(lambda m, x: torch.nan_to_num(x, neginf=-1.0))),
    "layer norm of constants": (LayerNorm, after(zeros_for_constants)),
    "layer norm of tiny rows": (LayerNorm, before(lambda m, x: zeros_for_tiny_rows(m, x, x))),
    "layer norm of zeros": (LayerNorm, after(ones_for_zeros)),
}


@pytest.mark.parametrize("name", OTHER_WAYS)
def test_norms_with_a_way_of_their_own_are_left(name: str) -> None:
    base, way = OTHER_WAYS[name]
    assert bool(replaced(variant(base, lambda m, x: way(base, m, x)))) == (name == "plain")


def test_gated_norm_with_a_way_of_its_own_is_left() -> None:
    tiny = {"closed": lambda m, gate: gate.masked_fill(gate.abs() < 1e-6, 1.0)}
    assert not replaced(type("Other", (Gated,), tiny)())


MLPS: dict[str, Any] = {
    "plain": after(lambda m, x, y: y),
    "zero rows": after(ones_for_zeros),
    "tiny gates": lambda base, m, x: m.down_proj(
        m.act_fn((gate := m.gate_proj(x)).masked_fill(gate.abs() < 1e-7, 0)) * m.up_proj(x)
    ),
    "tiny outputs": after(lambda m, x, y: y.masked_fill(y.abs() < 1e-9, 0)),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", MLPS)
def test_mlps_with_a_way_of_their_own_are_left(name: str, bias: bool) -> None:
    way = MLPS[name]
    module_class = type("Other", (Mlp,), {"forward": lambda m, x: way(Mlp, m, x)})
    assert bool(replaced(module_class(bias=bias))) == (name == "plain")


def test_rotary_functions() -> None:
    def unless_tiny(*args: Tensor, **options: int) -> Any:
        a, b = half(*args, **options)
        return a, b.masked_fill(b.abs() < 1e-7, 0)

    def unless_huge(*args: Tensor, **options: int) -> Any:
        a, b = half(*args, **options)
        return a.clamp(-1e4, 1e4), b

    assert not isinstance(recognized(half), str)
    assert isinstance(recognized(unless_tiny), str)
    assert isinstance(recognized(unless_huge), str)


def test_experts() -> None:
    model = build("mixtral")
    assert any(e.op == "fused_moe" for e in liger_multi.patch(model).entries)
    liger_multi.unpatch(model)
    experts = type(model.model.layers[0].mlp.experts)

    def cut(m: Any, x: Tensor, *routes: Any) -> Tensor:
        y = experts.forward(m, x, *routes)
        return y.masked_fill(y.abs() < 1e-8, 0)

    def of_zeros(m: Any, x: Tensor, *routes: Any) -> Tensor:
        y = experts.forward(m, x, *routes)
        return torch.where((x == 0).all(-1, keepdim=True), torch.full_like(y, math.pi), y)

    for forward in (cut, of_zeros):
        for layer in model.model.layers:
            layer.mlp.experts.__class__ = type("Other", (experts,), {"forward": forward})
        assert not any(e.op == "fused_moe" for e in liger_multi.patch(model).entries)
        liger_multi.unpatch(model)


# Modules with computed weights: none is computed more often than without a patch.


COUNTS: Counter[str] = Counter()


class Scaled(nn.Module):
    """A parametrization that counts its evaluations."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, weight: Tensor) -> Tensor:
        COUNTS[self.name] += 1
        return weight * 1.01


class Same(Scaled):
    """One that returns the parameter itself, as noise does in evaluation."""

    def forward(self, weight: Tensor) -> Tensor:
        COUNTS[self.name] += 1
        return weight


def parametrize_all(model: nn.Module, by: type[Scaled] = Scaled) -> nn.Module:
    """Parametrize every parameter of a model but those of embeddings."""
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Embedding):
            continue
        for name in [n for n, p in module._parameters.items() if p is not None]:
            parametrize.register_parametrization(module, name, by(f"{path}.{name}"))
    return model


def parametrize_head(model: Any, by: type[Scaled] = Scaled) -> Any:
    parametrize.register_parametrization(model.lm_head, "weight", by("lm_head.weight"))
    return model


def counted(run: Any) -> tuple[Any, Counter[str]]:
    COUNTS.clear()
    return run(), Counter(COUNTS)


def step(model: Any, inputs: Any) -> Tensor:
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach()


def parametrized_and_patched(architecture: str, first: str, **options: Any) -> Any:
    """A patched model with computed weights, and how often the patch computed each."""
    model, in_patch = build(architecture, tied=False), Counter[str]()
    if first == "patched":
        liger_multi.patch(model, **options)
    parametrize_all(model)
    if first == "parametrized":
        _, in_patch = counted(lambda: liger_multi.patch(model, **options))
    return model, in_patch


@pytest.mark.parametrize("first", ["parametrized", "patched"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mixtral", "gpt_oss"])
def test_every_weight_is_computed_once(architecture: str, first: str) -> None:
    stock, inputs = parametrize_all(build(architecture, tied=False)), batch()
    ours, in_patch = parametrized_and_patched(architecture, first)
    assert not in_patch
    expected, times = counted(lambda: step(stock, inputs))
    actual, ours_times = counted(lambda: step(ours, inputs))
    assert ours_times.keys() == times.keys()
    # grouped GEMMs of transformers 5.0 read the size of a weight beside its value
    assert not {name: n for name, n in ours_times.items() if n > times[name]}
    torch.testing.assert_close(actual, expected)
    assert_same_gradients(gradients(ours), gradients(stock))


def test_biases_are_computed_as_often() -> None:
    stock = build(tied=False, mlp_bias=True, attention_bias=True)
    stock.lm_head.bias = nn.Parameter(torch.randn(stock.lm_head.out_features))
    for path, module in list(stock.named_modules()):
        if getattr(module, "bias", None) is not None:
            parametrize.register_parametrization(module, "bias", Scaled(f"{path}.bias"))
    ours, inputs = copy.deepcopy(stock), batch()
    assert not counted(lambda: liger_multi.patch(ours))[1]
    expected, times = counted(lambda: step(stock, inputs))
    actual, ours_times = counted(lambda: step(ours, inputs))
    assert ours_times == times
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("restored", ["before", "after"])
def test_parametrizations_that_come_and_go_after_a_patch(restored: str) -> None:
    """PyTorch removes one from the class of a module, and then gives it the first base of it."""
    inputs, models = batch(), [parametrize_head(build(tied=False)) for _ in range(2)]
    stock, ours = models
    for i, model in enumerate(models):
        parametrize.register_parametrization(model.model.norm, "weight", Scaled("norm"))
        if i:
            liger_multi.patch(model)
        parametrize.register_parametrization(model.model.layers[0].mlp.up_proj, "weight", Same("_"))
        parametrize.register_parametrization(model.lm_head, "weight", Scaled("again"))
    for late in (False, True):
        if late == (restored == "after"):
            liger_multi.unpatch(ours)
        for model in () if late else models:
            for module in [m for m in model.modules() if parametrize.is_parametrized(m)]:
                parametrize.remove_parametrizations(module, "weight")
        torch.testing.assert_close(step(ours, inputs), step(stock, inputs))
    assert type(ours.lm_head) is nn.Linear


def _loss_on_logits(model: Any, inputs: Any) -> Tensor:
    logits = model(input_ids=inputs["input_ids"]).logits
    loss = torch.logsumexp(logits, -1).sum() + logits.argmax(-1).sum() + logits.sum()
    loss.backward()
    return loss.detach()


def _evaluated(model: Any, inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs).loss


def _generated(model: Any, inputs: Any) -> Tensor:
    return model.generate(inputs["input_ids"][:, :4], max_new_tokens=3, do_sample=False)


def _log_probs(model: Any, inputs: Any) -> Tensor:
    hidden = model.model(input_ids=inputs["input_ids"]).last_hidden_state
    with torch.no_grad():
        return losses.tokens(losses.Head(hidden, model.lm_head), inputs["labels"]).log_prob


def _dtype_of_autocast(model: Any, inputs: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return step(model, inputs)


def _frozen(model: Any, inputs: Any) -> Tensor:
    model.lm_head.parametrizations.weight.original.requires_grad_(False)
    return step(model, inputs)


@pytest.mark.parametrize("by", [Scaled, Same])
@pytest.mark.parametrize(
    "run",
    [step, _loss_on_logits, _evaluated, _generated, _dtype_of_autocast, _frozen],
)
@pytest.mark.parametrize(
    "options", [{}, {"cross_entropy": True}, {"fused_linear_cross_entropy": False}], ids=str
)
def test_head_in_other_calls(run: Any, by: type[Scaled], options: dict[str, Any]) -> None:
    stock, inputs = parametrize_head(build(tied=False), by), batch()
    ours = patched_copy(stock, **options)
    expected, times = counted(lambda: run(stock, inputs))
    actual, ours_times = counted(lambda: run(ours, inputs))
    assert ours_times == times
    rtol = 1e-2 if run is _dtype_of_autocast else 1e-5
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("patched", [True, False])
def test_losses_of_a_parametrized_head(patched: bool) -> None:
    model, inputs = parametrize_head(build(tied=False)), batch()
    if patched:
        liger_multi.patch(model)
    _, times = counted(lambda: _log_probs(model, inputs))
    assert times["lm_head.weight"] == 1


@pytest.mark.parametrize("by", [Scaled, Same])
def test_logits_after_a_step(by: type[Scaled]) -> None:
    """A computed weight is the forward's; where it is the parameter itself, the step is noticed."""
    model, inputs = parametrize_head(build(tied=False), by), batch()
    expected = model(**inputs).logits.detach().clone()
    liger_multi.patch(model)
    outputs = model(**inputs)
    outputs.loss.backward()
    torch.optim.SGD(model.parameters(), 0.1, fused=True).step()
    if by is Same:
        with pytest.raises(RuntimeError, match="modified in place"):
            outputs.logits.sum()
    else:
        torch.testing.assert_close(outputs.logits.detach() * 1.0, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_compiled() -> None:
    stock = parametrize_head(build(tied=False))
    assert_same_compiled(stock, patched_copy(stock), batch())


@pytest.mark.parametrize("first", ["parametrized", "patched"])
@pytest.mark.parametrize("options", [{"linear": True}, {"linear_float8": {"smallest": 1}}], ids=str)
def test_linear_layers(options: dict[str, Any], first: str) -> None:
    stock, inputs = parametrize_all(build(tied=False)), batch()
    ours, in_patch = parametrized_and_patched("llama", first, **options)
    assert not in_patch
    _, times = counted(lambda: step(stock, inputs))
    with liger_multi.use(deterministic="rows"):
        _, ours_times = counted(lambda: step(ours, inputs))
    assert ours_times == times


# --- objects of the caller, which fail on any write ---

TOKENS = 24
LENGTHS = (11, 13)
WRITES = ("update", "reset", "crop", "reorder_cache", "early_initialization", "add_layer")


class WrittenError(AssertionError):
    """Something wrote to an object of the caller."""


class Frozen(TorchDispatchMode):
    """In-place operators on tensors of the caller raise."""

    def __init__(self, *tensors):
        super().__init__()
        self.storages = {t.untyped_storage()._cdata for t in tensors if t.numel()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = dict(zip([a.name for a in func._schema.arguments], args)) | (kwargs or {})
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(inputs.get(argument.name)):
                    shared = isinstance(tensor, torch.Tensor) and tensor.numel()
                    if shared and tensor.untyped_storage()._cdata in self.storages:
                        raise WrittenError(f"{func} writes to a tensor of the caller")
        return func(*args, **(kwargs or {}))


def frozen(thing, *methods):
    """The same object, of a class whose attributes and named methods refuse to write."""

    def refused(self, *args, **kwargs):
        raise WrittenError(f"{type(self).__name__} is the caller's")

    module_class = type(thing)
    names = {"__setattr__", "__delattr__", *(m for m in methods if hasattr(module_class, m))}
    where = {"__module__": module_class.__module__, "__qualname__": module_class.__qualname__}
    thing.__class__ = type(
        module_class.__name__, (module_class,), dict.fromkeys(names, refused) | where
    )
    return thing


class Log(list):
    """A list of a module that nobody may write to."""

    def append(self, value):
        raise WrittenError("a list of the caller")

    __setitem__ = extend = insert = clear = pop = append


def rows():
    ids = torch.randint(10, 60, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]}


def tensors(model):
    return [*model.parameters(), *model.buffers()]


@pytest.mark.parametrize(
    "model_type",
    ["llama", "qwen3", "gemma2", "qwen3_moe", "qwen3_next", "lfm2", "deepseek_v32", "llama4_text"],
)
def test_a_patch_and_a_trial_leave_a_model_alone(model_type):
    """Norms, MLPs, experts, mixers, rotary functions, indexers and heads are recognized here."""
    model = cases.build(cases.of_type(model_type)).eval()
    for part in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        frozen(part)
    for module in model.modules():
        vars(module)["log"] = Log([1, 2])
    config, before = model.config, copy.deepcopy(vars(model.config))
    inputs = rows()
    with Frozen(*tensors(model), *inputs.values()):
        report = liger_multi.patch(model)
        with contextlib.suppress(PackingError, ValueError):  # of releases that mix the samples
            model(**inputs, use_cache=False)  # tried first
    assert report.entries
    assert model.config is config
    assert {n: str(v) for n, v in vars(config).items()} == {n: str(v) for n, v in before.items()}
    assert all(type(m.log) is Log for m in model.modules())


@pytest.mark.parametrize("form", ["keyword", "positional", "wrapped", "unknown", "legacy"])
def test_a_cache_is_never_tried_with(form):
    """Caches are recognized under any name and in any place; unknown objects are not tried with."""
    model = build("llama").eval()
    liger_multi.patch(model)
    inputs = rows()
    name = arguments.cache_parameter(type(model).forward)
    observed = []

    class Wrapper:
        def __init__(self, inner):
            vars(self)["inner"] = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def __setattr__(self, name, value):
            raise WrittenError("the wrapper is the caller's")

    class Unknown:
        __slots__ = ()

        def __setattr__(self, name, value):
            raise WrittenError("the object is the caller's")

    cache = frozen(transformers.DynamicCache(config=model.config), *WRITES)
    value = {
        "wrapped": Wrapper(cache),
        "unknown": Unknown(),
        "legacy": ((torch.zeros(1, 2, 0, 16), torch.zeros(1, 2, 0, 16)),) * 2,
    }.get(form, cache)

    def stop(module, args, kwargs):
        observed.append(kwargs)
        if form != "unknown" or "something_else" in kwargs:
            raise InterruptedError

    hook = model.model.register_forward_pre_hook(stop, with_kwargs=True)
    # of a library, or a trial would set it aside
    model.model._forward_pre_hooks[hook.id].__module__ = "transformers.tests"
    args, kwargs = [], {**inputs, name: value}
    if form == "positional":
        names = arguments.parameters_of(type(model).forward)
        args, kwargs = [*map(inputs.get, names[: names.index(name)]), cache], {}
    elif form == "unknown":
        kwargs = {**inputs, "use_cache": False, "something_else": value}
    with pytest.raises(InterruptedError):
        model(*args, **kwargs)
    tried = len(observed) > 1
    assert tried == (form == "unknown"), "from a cache, nothing is tried; else without the object"


def test_an_unknown_object_makes_no_error_of_a_leak():
    """It might be what keeps samples apart, and a trial hands it to nobody."""
    model = build("olmo2")  # of each class, it is said once
    liger_multi.patch(redrawn(model))
    with pytest.raises(PackingError):
        model(**rows(), use_cache=True)
    liger_multi.patch(model)
    with pytest.warns(UserWarning, match=r"hands over no objects, got apart \(object\)"):
        model(**rows(), use_cache=True, apart=object())


class Noting(nn.Module):
    """A norm that keeps what it saw, as statistics and probes of users do."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.variance_epsilon = weight, 1e-6
        self.log, self.table, self.total = [], {}, torch.zeros(1)

    def forward(self, hidden_states):
        self.log.append(hidden_states.shape)
        self.table["last"] = hidden_states.shape
        self.total.add_(1)
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


def test_lists_and_tensors_of_a_module_are_of_its_calls():
    model = build("llama")
    norm = model.model.norm = Noting(model.model.norm.weight)
    liger_multi.patch(model)
    assert (norm.log, norm.table, norm.total.item()) == ([], {}, 0)
    model(**rows(), use_cache=False)
    assert len(norm.log) == norm.total.item() == 1
    assert norm.table == {"last": (1, TOKENS, model.config.hidden_size)}


def test_recomputed_layers_and_estimates_write_no_cache():
    model = build("llama").train()
    cache = frozen(transformers.DynamicCache(config=model.config), *WRITES)
    layer, hidden = model.model.layers[0], torch.randn(1, 5, model.config.hidden_size)
    angles = model.model.rotary_emb(hidden, torch.arange(5)[None])
    handle = apply_recompute(model, "full")
    names = arguments.parameters_of(type(layer).forward)
    at = names.index(arguments.cache_parameter(type(layer).forward))
    for args, kwargs in (
        ((hidden,), {names[at]: cache}),
        ((hidden, *[None] * (at - 1), cache), {}),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is said once for each layer
            layer(*args, **kwargs, position_embeddings=angles)
    handle.remove()
    config = build("llama").config
    before = config.to_dict()
    estimate(config, 1, 16)
    assert config.to_dict() == before
