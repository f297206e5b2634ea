"""No probe and no trial writes to an object of the caller: objects here fail on any write."""

# ruff: noqa: E402  (what needs transformers is imported after the skip)
import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

transformers = pytest.importorskip("transformers")

import liger_multi
from liger_multi import arguments
from liger_multi.errors import PackingError
from liger_multi.memory import apply_recompute, estimate
from tests.models import build, continued
from tests.sweep import cases

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
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return {"input_ids": ids, "position_ids": positions}


def tensors(model):
    return [*model.parameters(), *model.buffers()]


def by_type(model_type):
    pairs = {p.type: p for p in cases.registered() if p.cls.endswith("ForCausalLM")}
    if model_type not in pairs:
        pytest.skip(f"this transformers has no {model_type}")
    return cases.build(pairs[model_type])


@pytest.mark.parametrize(
    "model_type",
    ["llama", "qwen3", "gemma2", "qwen3_moe", "qwen3_next", "lfm2", "deepseek_v32", "llama4_text"],
)
def test_a_patch_and_a_trial_leave_a_model_alone(model_type):
    """Norms, MLPs, experts, mixers, rotary functions, indexers and heads are recognized here."""
    model = by_type(model_type).eval()
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
    hook_of_library = model.model._forward_pre_hooks[hook.id]
    hook_of_library.__module__ = "transformers.tests"  # or a trial would set it aside
    call = {name: value}
    if form == "positional":
        names = arguments.parameters_of(type(model).forward)
        args = [inputs.get(n) for n in names[: names.index(name)]]
        with pytest.raises(InterruptedError):
            model(*args, cache)
    elif form == "unknown":
        with pytest.raises(InterruptedError):
            model(**inputs, use_cache=False, something_else=value)
        assert len(observed) > 1, "the model is tried, without the object"
        return
    else:
        with pytest.raises(InterruptedError):
            model(**inputs, **call)
    assert len(observed) == 1, "a call that goes on from a cache is not tried"


def test_an_unknown_object_makes_no_error_of_a_leak():
    """It might be what keeps samples apart, and a trial hands it to nobody."""
    model = build("olmo2")  # of each class, it is said once
    liger_multi.patch(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
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
    inputs = rows()
    model(**inputs, use_cache=False)
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


@pytest.mark.parametrize("rows_of_a_batch", [1, 2])
def test_generation_equals_unpatched(rows_of_a_batch):
    unpatched = build("llama").eval()
    model = copy.deepcopy(unpatched)
    liger_multi.patch(model)
    ids = torch.randint(10, 60, (rows_of_a_batch, 9), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), unpatched.generate(ids, **options))
    first = model(input_ids=ids, use_cache=True)
    cached = continued(model, first)
    assert arguments.is_cache(next(iter(cached.values())))
    later = model(input_ids=ids[:, :3], **cached, position_ids=torch.arange(9, 12)[None])
    expected = unpatched(torch.cat([ids, ids[:, :3]], 1)).logits[:, 9:]
    torch.testing.assert_close(later.logits, expected, rtol=1e-4, atol=1e-4)
