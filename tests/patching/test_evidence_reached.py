"""What a forward reads beside its module and its input, and what it does for other inputs."""

# ruff: noqa: E402  (what needs transformers is imported after the skip)
import copy
import functools
import sys
import types

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.nn.modules import module as hooks_of_all

transformers = pytest.importorskip("transformers")

from transformers.models.llama import modeling_llama

from liger_multi.patching import patch
from liger_multi.patching.evidence import reached
from liger_multi.patching.evidence.reached import Outcomes
from tests import harness
from tests.models import Mlp, Norm, assert_same_training, batch, build, pair, variant
from tests.patching.test_norms import equal

ALONE = {"fused_linear_cross_entropy": False}
FACTOR = 1.0
FACTORS = [1.0]
CALLS = 0
SEEN = []


def in_order(when, patching, replacing):
    """Patch, and replace a function before or after; what patching gives."""
    if when == "before":
        replacing()
    result = patching()
    if when == "after":
        replacing()
    return result


OTHER_FILE = types.ModuleType("settings_of_somebody")
OTHER_FILE.factor = 1.0


class Table:
    factor = 1.0
    factors = (1.0,)
    lists = [1.0]


def helper(x):
    return x * FACTOR


@functools.lru_cache(maxsize=1)
def cached():
    return FACTORS[0]


def of(scale, base=Mlp):
    """A module whose output goes through a function."""
    return variant(base, lambda m, x: scale(base.forward(m, x)))


def report_of(module):
    return patch(nn.Sequential(module), **ALONE)


def is_served(report):
    return report.count("swiglu") + report.count("rms_norm") == 1


def reasons(report):
    return " ".join(s.reason for s in report.skipped)


# --- values that can be compared ---


def closure():
    factor = 1.0

    def scale(y):
        return y * factor

    def change(value):
        nonlocal factor
        factor = value

    return scale, change


def of_globals(name):
    return lambda value: globals().__setitem__(name, value)


def _pairs():
    scale, change = closure()
    return {
        "a global": (lambda y: y * FACTOR, of_globals("FACTOR")),
        "a global of a helper": (helper, of_globals("FACTOR")),
        "a variable of a closure": (scale, change),
        "another file": (
            lambda y: y * OTHER_FILE.factor,
            lambda value: setattr(OTHER_FILE, "factor", value),
        ),
        "a class": (lambda y: y * Table.factor, lambda value: setattr(Table, "factor", value)),
        "a tuple": (
            lambda y: y * Table.factors[0],
            lambda value: setattr(Table, "factors", (value,)),
        ),
    }


@pytest.mark.parametrize("base", [Mlp, Norm])
@pytest.mark.parametrize("where", _pairs())
def test_values_changed_after_the_patch(where, base, request):
    scale, change = _pairs()[where]
    module = of(scale, base)
    stock, x = copy.deepcopy(module), torch.randn(2, 5, 12)
    report = patch(model := nn.Sequential(module), **ALONE)
    request.addfinalizer(lambda: change(1.0))
    for value in (1.0, 3.0, float("1.0")):  # at last another object of the same value
        change(value)
        equal(stock, module, x, rtol=1e-4)
        with report.watch(model) as watched:
            model(x)
        assert bool(watched.served) == (is_served(report) and value == 1.0)


@pytest.mark.parametrize("where", ["a global", "a class"])
def test_a_compiled_graph_does_not_keep_values(where, request):
    scale, change = _pairs()[where]
    module = of(scale)
    stock, x = copy.deepcopy(module), torch.randn(2, 5, 12)
    assert is_served(report_of(module))
    # torch 2.11 itself keeps an attribute of a class that a forward names
    ours, theirs = (torch.compile(m, backend="eager", fullgraph=True) for m in (module, stock))
    request.addfinalizer(lambda: change(1.0))
    for value in (1.0, 2.0):
        change(value)
        equal(theirs, ours, x, rtol=1e-4)


def test_cached_class_value_is_not_confused(monkeypatch):
    """The probe of a class is kept, but not over a change of what its code reads."""
    module = of(lambda y: y * FACTOR)
    again = type(module)()
    assert is_served(report_of(module))
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    assert not is_served(report_of(again))
    equal(copy.deepcopy(again), again, torch.randn(3, 12), rtol=1e-4)


# --- what cannot be compared, and what code does beside its result ---


def _mutable_default(y, factors=[1.0]):  # noqa: B006
    return y * factors[0]


def _counts(y):
    global CALLS
    CALLS += 1
    return y


def _appends(y):
    SEEN.append(y.detach().mean())
    return y


def _counts_on_a_class(y):
    Table.count = 1
    return y


def _imports(y):
    import settings_of_somebody  # never run: found in the code

    return y * settings_of_somebody.factor


def _of_a_tensor():
    factor = torch.ones(())
    return lambda y: y * factor


@pytest.mark.parametrize("base", [Mlp, Norm])
@pytest.mark.parametrize(
    ("scale", "reason"),
    [
        (lambda y: y * FACTORS[0], "FACTORS (list)"),
        (lambda y: y * Table.lists[0], "lists (list)"),
        (lambda y: y * cached(), "FACTORS (list)"),
        (_mutable_default, "a default that is mutable"),
        (_of_a_tensor(), "a variable of a closure (Tensor)"),
        (_counts, "sets CALLS"),
        (_appends, "SEEN (list)"),
        (_counts_on_a_class, "sets count"),
        (_imports, "imports settings_of_somebody"),
        (lambda y: torch.distributed.get_world_size() * y, "of torch.distributed"),
    ],
)
def test_code_with_extra_behavior_is_left_alone(scale, reason, base):
    report = report_of(of(scale, base))
    assert not is_served(report)
    assert reason in reasons(report)


def test_a_list_of_the_class_is_left_alone():
    module = variant(Mlp, lambda m, x: Mlp.forward(m, x) * m.lists[0])
    type(module).lists = [1.0]
    assert "lists (list) of its class" in reasons(report_of(module))


# --- functions that are replaced ---


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name", "base"), [(F, "silu", Mlp), (torch, "rsqrt", Norm), (F, "linear", Mlp)]
)
def test_replaced_functions_of_pytorch(owner, name, base, when, monkeypatch):
    module, own = base(), getattr(owner, name)
    stock, half = copy.deepcopy(module), lambda *args, **kwargs: own(*args, **kwargs) * 0.5
    assert is_served(report_of(base()))  # the class is known already
    in_order(when, lambda: report_of(module), lambda: monkeypatch.setattr(owner, name, half))
    equal(stock, module, torch.randn(2, 5, 12), rtol=1e-4)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("owner", "name"), [(modeling_llama, "rotate_half"), (F, "linear")])
def test_replaced_functions_reach_a_model(owner, name, when, monkeypatch):
    """The helper of a rotary function, and what the head calls."""
    stock, model = pair("llama")
    patch(build("llama"))  # the functions are known already
    own = getattr(owner, name)
    twice = lambda *args: 2 * own(*args)  # noqa: E731
    report = in_order(when, lambda: patch(model), lambda: monkeypatch.setattr(owner, name, twice))
    assert bool(report.count("rope")) == (when == "after" or owner is F)
    assert_same_training(stock, model)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("options", [{}, {"cross_entropy": True}, ALONE | {"cross_entropy": True}])
@pytest.mark.parametrize("name", ["cross_entropy", "log_softmax", "relu"])
def test_a_wrapper_around_a_loss_runs_once(name, options, when, monkeypatch):
    own, calls = getattr(F, name), []

    @functools.wraps(own)
    def wrapper(*args, **kwargs):
        calls.append(1)
        return 2 * own(*args, **kwargs)

    if when == "before":
        monkeypatch.setattr(F, name, wrapper)
    stock, model = pair("llama", patching=options)
    monkeypatch.setattr(F, name, wrapper)
    results = []
    for each in (stock, model):
        calls.clear()
        logits = each(**(inputs := batch())).logits[:, :-1].flatten(0, 1)
        labels = inputs["labels"][:, 1:].flatten()
        loss = F.cross_entropy(logits, labels) + F.log_softmax(logits, -1).mean()
        (loss + F.relu(logits).mean()).backward()
        results.append((loss.detach(), len(calls), each.lm_head.weight.grad))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("between", [False, True])
def test_a_hook_on_all_modules_acts_on_logits_alone(between):
    stock, model = pair("llama", patching={})

    def scale(module, args, output):
        if isinstance(module, nn.Linear) and isinstance(output, torch.Tensor):
            return output * 1.5
        return None

    results = []
    for each in (stock, model):
        inputs = batch()
        labels, handle = inputs.pop("labels"), None
        if not between:
            handle = hooks_of_all.register_module_forward_hook(scale)
        try:
            logits = each(**inputs).logits
            if between:
                handle = hooks_of_all.register_module_forward_hook(scale)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        finally:
            handle.remove()
        loss.backward()
        results.append((loss.detach(), each.lm_head.weight.grad, each.model.norm.weight.grad))
    torch.testing.assert_close(*results)


# --- other processes ---


FILE = """
import torch
from torch import nn
from torch.autograd import forward_ad
FACTOR = 1.0

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(12, 16), nn.Linear(12, 16)
        self.down_proj, self.act_fn = nn.Linear(16, 12), nn.SiLU()

    def forward(self, x):
        return FACTOR * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
"""
LOAD = """
import copy, torch, liger_multi
from liger_multi.patching import unpatch
model, x = torch.load("model.pt", weights_only=False), torch.ones(3, 12)
y = model(x)
unpatch(model)
torch.testing.assert_close(y, model(x), rtol=1e-5, atol=1e-5)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [("= 1.0", "= 2.0"), ("act_fn(", "act_fn(0.5 * ")])
def test_module_unpickled_with_other_code(old, new, tmp_path):
    """A probe says nothing of code that was edited since the model was saved."""
    file = tmp_path / "code_of_somebody.py"
    file.write_text(FILE)
    save = """
import torch, liger_multi
from torch import nn
from torch.autograd import forward_ad
from code_of_somebody import Mlp
report = liger_multi.patch(model := nn.Sequential(Mlp()), fused_linear_cross_entropy=False)
assert report.count("swiglu") == 1
torch.save(model, "model.pt")
"""
    for script, code in ((save, FILE), (LOAD, FILE), (LOAD, FILE.replace(old, new))):
        file.write_text(code)
        harness.python("-B", "-c", script, cwd=tmp_path, path=[tmp_path])


# --- transforms of torch.func ---


@pytest.mark.parametrize("case", ["llama", "gemma2", "qwen3_moe", "phi3"])
def test_torch_func_transforms_run_unpatched(case):
    """Gradients of each sample, and a derivative forwards."""
    stock, model = pair(case, attn_implementation="eager", patching={})
    inputs = batch(rows=3)
    actual = []
    for each in (stock, model):
        weights = {name: p.detach() for name, p in each.named_parameters()}

        def loss(weights, ids, each=each):
            inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
            return torch.func.functional_call(each, weights, (), inputs).loss

        def of_a_sample(weights, ids, loss=loss):
            return loss(weights, ids[None])

        ids, along = inputs["input_ids"], {n: torch.ones_like(w) for n, w in weights.items()}
        results = [torch.func.grad(loss)(weights, ids)]
        if case != "qwen3_moe":  # its grouped GEMM has neither of them
            by_sample = torch.func.vmap(torch.func.grad(of_a_sample), in_dims=(None, 0))
            results.append(by_sample(weights, ids))
            results.append(torch.func.jvp(functools.partial(loss, ids=ids), (weights,), (along,)))
        actual.append(results)
    torch.testing.assert_close(actual[1], actual[0], rtol=1e-4, atol=1e-5)


def test_a_debugger_has_every_place_for_tools():
    """From Python 3.12 on, conditions are seen by ``sys.monitoring``, which has six places."""
    if sys.version_info < (3, 12):
        pytest.skip("sys.monitoring is of Python 3.12")
    taken = [i for i in range(6) if sys.monitoring.get_tool(i) is None]
    for i in taken:
        sys.monitoring.use_tool_id(i, "somebody")
    try:
        assert is_served(report_of(of(lambda y: y * FACTOR)))
        assert not is_served(report_of(of(lambda y: y * 2 if y.shape[1] > 1000 else y)))
        assert all(sys.monitoring.get_tool(i) == "somebody" for i in taken)
    finally:
        for i in taken:
            sys.monitoring.free_tool_id(i)


def test_a_trace_of_the_thread_comes_back():
    def trace(frame, event, arg):
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        assert is_served(report_of(of(lambda y: y * FACTOR)))
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)


# Branches of a forward: what it does for inputs that no probe brought.


# --- other inputs ---


def clamped_in_fp16(m, x):
    y = m.act_fn(m.gate_proj(x)) * m.up_proj(x)
    if y.dtype == torch.float16:
        y = y.clamp(-0.1, 0.1)
    return m.down_proj(y)


def clamped_where_it_overflows(m, x):
    y = Mlp.forward(m, x)
    if torch.isinf(y).any() and m.training:
        y = y.clamp(-1, 1)
    return y


UNTAKEN = {
    "length": (Mlp, lambda m, x: Mlp.forward(m, x) * (0.5 if x.shape[1] > 1000 else 1.0)),
    "dtype": (Mlp, clamped_in_fp16),
    "overflow": (Mlp, clamped_where_it_overflows),
    "flag of a device": (Norm, lambda m, x: x if x.is_cuda else Norm.forward(m, x)),
    "device": (Norm, lambda m, x: x if x.device.type == "cuda" else Norm.forward(m, x)),
}


@pytest.mark.parametrize("name", UNTAKEN)
def test_untaken_branches(name):
    report = report_of(variant(*UNTAKEN[name]))
    assert not is_served(report)
    assert "a branch that depends on its input" in reasons(report)


def test_a_branch_of_a_rotary_function(monkeypatch):
    own = modeling_llama.apply_rotary_pos_emb

    def longer(q, k, cos, sin, unsqueeze_dim=1):
        if q.shape[-2] > 4096:
            q = q * 2
        return own(q, k, cos, sin, unsqueeze_dim)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", longer)
    report = patch(build("llama"))
    assert not report.count("rope")
    assert "a branch that depends on its input" in reasons(report)


class Optional(Mlp):
    def __init__(self):
        super().__init__()
        self.extra, self.flag = None, False

    def forward(self, x, scale=None):
        y = super().forward(x)
        if scale is not None:
            y = y * scale
        if self.extra is not None and self.flag:
            y = y + self.extra
        return y


def checking(m, x):
    if x.shape[-1] != 12 and x.shape[-1] != 24:
        raise ValueError(f"12 channels, got {x.shape}")
    return Mlp.forward(m, x)


def naming_its_device(m, x):
    """As transformers 5.17 names the device of which it switches autocast off."""
    name = x.device.type if x.device.type != "mps" else "cpu"
    with torch.autocast(name, enabled=False):
        return Norm.forward(m, x)


def on_an_apple(m, x):
    return x if x.device.type == "mps" else Norm.forward(m, x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: variant(Mlp, checking),
        Optional,
        lambda: variant(Norm, naming_its_device),
        lambda: variant(Norm, on_an_apple),
    ],
)
def test_branches_without_effect(make, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    reached._jumps.cache_clear()
    assert is_served(report_of(make()))


def test_branch_on_an_available_device(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    reached._jumps.cache_clear()
    report = report_of(variant(Norm, on_an_apple))
    reached._jumps.cache_clear()
    assert not is_served(report)
    assert "a branch that depends on its input" in reasons(report)


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y.clamp(-1e7, 1e7),
        torch.nan_to_num,
        lambda y: torch.where(y.abs() > 1e7, 0.0, y),
    ],
)
@pytest.mark.parametrize("base", [Mlp, Norm])
def test_distant_bounds(change, base):
    report = report_of(of(change, base))
    if base is Norm and change is not torch.nan_to_num:
        return  # what a norm returns is never that large
    assert not is_served(report)
    assert "large or not finite" in reasons(report)


# --- conditions, by what compilers of several versions make of them ---


class State:
    """What stands for a module."""

    flag, extra, size = False, None, 3


def _either_raises(self, x):
    if x != 1 and x != 2:
        return x
    raise ValueError


def _of_the_module(self, x):
    if self.flag and self.extra is not None:
        x = x + 1
    return x


def _and(self, x):
    if x == 1 and x != self.size and self.size != 8:
        x = x + 1
    return x


@pytest.mark.parametrize(
    ("function", "inputs", "one_sided"),
    [
        (lambda self, x: x * 2 if x > 1000 else x, [1], True),
        (lambda self, x: x * 2 if x > 1000 else x, [1, 2000], False),
        (_either_raises, [5], False),
        (_of_the_module, [1], False),
        (lambda self, x: 0 if x is None else x, [2], False),
        (lambda self, x: x if (x > 3 or self.flag) else 0, [4], True),
        (lambda self, x: x if (x > 3 or self.flag) else 0, [4, 1], False),
        (_and, [1, 3], True),
        (lambda self, x: [i for i in range(3) if x > 5], [1], True),
        (lambda self, x: 1 if (x if self.flag is None else 5) > 3 else 2, [1], True),
    ],
)
def test_one_sided_conditions(function, inputs, one_sided):
    outcomes = Outcomes([function])
    with outcomes.watched():
        for x in inputs:
            function(State(), x)
    assert bool(outcomes.one_sided(argument_count=1)) == one_sided
