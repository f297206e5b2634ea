"""Rotary functions: what is recognized, and that only patched instances call the operator."""

import copy
import functools
import gc
import importlib
import pickle
import re
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from liger_multi.patching import patch, patched, rotary, unpatch
from liger_multi.patching.evidence import redirect
from liger_multi.patching.options import Options
from liger_multi.patching.rotary import served_function
from tests.comparing import assert_equal, recorded
from tests.models import (
    Graphs,
    assert_same_compiled,
    assert_same_training,
    batch,
    build,
    pair,
    transformers,
)

ONLY = {
    "packing": False,
    "rms_norm": False,
    "swiglu": False,
    "geglu": False,
    "fused_linear_cross_entropy": False,
}


def turn_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def turn_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def half(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + turn_half(q) * sin, k * cos + turn_half(k) * sin


def backwards(q, k, cos, sin, unsqueeze_dim=1):
    return half(q, k, cos, -sin, unsqueeze_dim)


def cast_back(q, k, cos, sin, unsqueeze_dim=1):
    outs = half(q.float(), k.float(), cos.float(), sin.float(), unsqueeze_dim)
    return outs[0].to(q.dtype), outs[1].to(k.dtype)


def partial(q, k, cos, sin, unsqueeze_dim=1):
    width = cos.shape[-1]
    outs = half(q[..., :width], k[..., :width], cos, sin, unsqueeze_dim)
    return tuple(torch.cat((o, x[..., width:]), -1) for o, x in zip(outs, (q, k), strict=True))


def pairs(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + turn_pairs(q) * sin, k * cos + turn_pairs(k) * sin


def pairs_from_first_half(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = (x[..., : x.shape[-1] // 2].repeat_interleave(2, -1) for x in (cos, sin))
    return pairs(q, k, cos, sin, unsqueeze_dim)


def an_angle_a_pair(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = (torch.cat((x, x), -1) for x in (cos, sin))
    return half(q, k, cos, sin, unsqueeze_dim)


def an_angle_an_interleaved_pair(q, k, cos, sin, unsqueeze_dim=1):
    return pairs(q, k, *(x.repeat_interleave(2, -1) for x in (cos, sin)), unsqueeze_dim)


def sorted_pairs(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    if position_ids is not None:  # an assertion would be rewritten by pytest, to code of its own
        raise ValueError("position_ids are not used")
    q, k = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
    return half(q, k, cos, sin, unsqueeze_dim)


def vision(q, k, cos, sin):
    return cast_back(q, k, cos, sin, -2)


KNOWN = {
    half: "half",
    backwards: "half, backwards",
    cast_back: "half, cast back",
    partial: "half",
    pairs: "interleaved",
    pairs_from_first_half: "interleaved, angles in the first half",
    an_angle_a_pair: "half, an angle a pair",
    an_angle_an_interleaved_pair: "interleaved, an angle a pair",
    sorted_pairs: "pairs to halves",
    vision: "half, cast back",
}


@pytest.mark.parametrize("function", KNOWN, ids=lambda f: f.__name__)
def test_kinds_are_recognized(function):
    actual = rotary.recognized(function)
    assert isinstance(actual, rotary.Rotary), actual
    assert actual.spec.name == KNOWN[function]


@pytest.mark.parametrize("function", KNOWN, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16, torch.float32)])
def test_the_served_function_equals_the_stock_one(function, dtypes, calls):
    served = served_function(function.__name__, function, Options())
    width = 4 if "angle" in function.__name__ else 8
    lead = (5, 6) if function is vision else (2, 6, 5)
    q, k = (torch.randn(*shape, 8, dtype=dtypes[0]) for shape in (lead, lead))
    angles = torch.randn(*((5,) if function is vision else (1, 5)), width)
    cos, sin = angles.cos().to(dtypes[1]), angles.sin().to(dtypes[1])
    calls.clear()
    expected, got = function(q, k, cos, sin), served(q, k, cos, sin)
    assert calls["rope"] == 1
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)  # compares dtypes as well


def assert_equal_to(function, served, calls, leaves, *arguments, **named):
    """Results and gradients of both are equal, and one call of the operator was made."""
    calls.clear()
    results = [f(*arguments, **named) for f in (function, served)]
    assert calls["rope"] == 1
    upstream = [torch.randn_like(leaf) for leaf in leaves]
    grads = [torch.autograd.grad(result, leaves, upstream) for result in results]
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-5)


SHARED = {  # positions of two axes, for all rows of a batch: q, unsqueeze_dim
    "pixtral": (half, (2, 6, 5, 8), {"unsqueeze_dim": 0}),
    "kimi_k25": (vision, (2, 5, 6, 8), {}),
}


@pytest.mark.parametrize("tower", SHARED)
@pytest.mark.parametrize("batch", [1, 2])
def test_positions_shared_by_rows(tower, batch, calls):
    function, shape, named = SHARED[tower]
    served = served_function(f"shared_{tower}", function, Options())
    q, k = (torch.randn(batch, *shape[1:], requires_grad=True) for _ in range(2))
    angles = torch.randn(5, 8)
    assert_equal_to(function, served, calls, (q, k), q, k, angles.cos(), angles.sin(), **named)


FILES = {
    "cohere": ("apply_rotary_pos_emb", "interleaved, cast back"),
    "deepseek_v3": (
        "apply_rotary_pos_emb_interleave",
        "pairs to halves, angles in the first half",
    ),
    "ernie4_5": ("apply_rotary_pos_emb", "interleaved, angles in the first half, cast back"),
    "qwen2_vl": ("apply_rotary_pos_emb_vision", "half, cast back"),
    "nanochat": ("apply_rotary_pos_emb", "half, backwards"),
    "gptj": ("apply_rotary_pos_emb", "interleaved, an angle a pair"),
    "codegen": ("apply_rotary_pos_emb", "interleaved, an angle a pair"),
}


@pytest.mark.parametrize("file", FILES)
def test_functions_of_transformers_are_recognized(file):
    module = pytest.importorskip(f"transformers.models.{file}.modeling_{file}")
    name, rotation = FILES[file]
    if file == "deepseek_v3" and "apply_rotary_pos_emb_interleave" in vars(module):
        rotation = (rotation, "pairs to halves")  # transformers < 5.20 asks for an angle a channel
    actual = rotary.recognized(getattr(module, name))
    assert isinstance(actual, rotary.Rotary), actual
    assert actual.spec.name == rotation or actual.spec.name in rotation


@pytest.mark.parametrize("form", ["positions", "names", "both"])
def test_one_tensor_with_sin_before_cos(form, calls):
    stock = importlib.import_module("transformers.models.gptj.modeling_gptj").apply_rotary_pos_emb
    served = served_function("sin_first", stock, Options())
    x, angles = torch.randn(2, 5, 6, 8, requires_grad=True), torch.randn(2, 5, 4)
    inputs = {"tensor": x, "sin": angles.sin(), "cos": angles.cos()}
    by_position = [] if form == "names" else [x] if form == "both" else [*inputs.values()]
    named = dict([*inputs.items()][len(by_position) :])
    assert_equal_to(stock, served, calls, [x], *by_position, **named)


def shifted(q, k, cos, sin, unsqueeze_dim=1):
    q, k = half(q, k, cos, sin, unsqueeze_dim)
    return q + 1e-3, k


def detached(q, k, cos, sin, unsqueeze_dim=1):
    q, k = half(q, k, cos, sin, unsqueeze_dim)
    return q, k + (k.detach() - k) / 2


def rounded(q, k, cos, sin, unsqueeze_dim=1):
    return tuple(x.bfloat16() for x in half(q, k, cos, sin, unsqueeze_dim))


def swapped(q, k, cos, sin, unsqueeze_dim=1):
    return half(q, k, cos, sin, unsqueeze_dim)[::-1]


def other_arguments(tensor, frequencies, unsqueeze_dim=1):
    return half(tensor, tensor, frequencies.cos(), frequencies.sin(), unsqueeze_dim)[0]


def failing(q, k, cos, sin):
    raise ZeroDivisionError("no")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (shifted, "shifted is no rotation of q and k that is known"),
        (detached, "detached is no rotation"),
        (rounded, "rounded is no rotation"),
        (swapped, "swapped is no rotation"),
        (other_arguments, r"takes \(tensor, frequencies, unsqueeze_dim\), not \(q, k, cos, sin\)"),
        (failing, "failing failed on a replica: ZeroDivisionError: no"),
    ],
)
def test_other_functions_are_left_alone(function, reason, monkeypatch):
    modeling = importlib.import_module("transformers.models.llama.modeling_llama")
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", function)
    model = build()
    kinds = [type(m) for m in model.modules()]
    report = patch(model, **ONLY)
    assert [type(m) for m in model.modules()] == kinds
    assert report.count("rope") == 0
    assert len(report.skipped) == 2
    assert re.search(reason, report.skipped[0].reason), report.skipped[0].reason


def calls_half(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    return half(q, k, cos, sin, unsqueeze_dim)


def test_unprobed_calls_run_the_function(calls, monkeypatch):
    observed, own = [], half

    def counted(q, *args, **kwargs):
        observed.append(q.shape)
        return own(q, *args, **kwargs)

    served = served_function("calls_half", calls_half, Options())
    # after the probe, which leaves a function that appends to a list
    monkeypatch.setitem(globals(), "half", counted)
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 3, 6, 8)
    angles = torch.randn(2, 6, 8)
    cos, sin = angles.cos(), angles.sin()
    observed.clear()
    calls.clear()
    plain = [
        served(q, k, cos, sin),
        served(q, k, cos=cos, sin=sin),
        served(q, k, cos, sin, None, 1),
        served(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2),
    ]
    assert calls["rope"] == 4
    assert observed == []
    torch.testing.assert_close(plain[:3], [plain[0]] * 3, rtol=0, atol=0)
    left = [
        ((q, k, cos, sin), {"position_ids": torch.arange(6)}),
        ((q, k, cos, sin), {"unsqueeze_dim": -3}),
        ((q, q[:, :3, :, :], cos[:1, :1], sin[:1, :1]), {}),  # one angle for all tokens
        ((q, k[:1], cos[:1], sin[:1]), {}),
        ((q, k, cos.requires_grad_(), sin), {}),
    ]
    for arguments, named in left:
        expected = own(*arguments, named.get("unsqueeze_dim", 1))
        assert_equal(served(*arguments, **named), expected)
    assert calls["rope"] == 4
    assert len(observed) == len(left)


def test_unpatched_models_call_the_function_of_the_file(monkeypatch, calls):
    modeling = importlib.import_module("transformers.models.llama.modeling_llama")

    def public():  # a private name stays where an earlier patch put it
        return {n: v for n, v in vars(modeling).items() if not n.startswith("_liger_multi_")}

    before = public()
    attention = modeling.LlamaAttention
    methods = dict(vars(attention))
    stock, ours = pair()
    with patched(ours):
        assert modeling.apply_rotary_pos_emb is before["apply_rotary_pos_emb"]
        calls.clear()
        stock(**batch())
        assert not calls["rope"]
        ours(**batch())
        assert calls["rope"] == 2
        assert dict(vars(attention)) == methods
    assert type(ours.model.layers[0].self_attn) is attention
    calls.clear()
    ours(**batch())
    assert not calls["rope"]
    assert public() == before


def test_copies_and_garbage_leave_nothing_behind(calls):
    stock, ours = pair(patching={})
    copied, unpickled = copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))
    gone = weakref.ref(ours.model.layers[0].self_attn)
    del ours
    gc.collect()
    assert gone() is None
    for model in (copied, unpickled):
        calls.clear()
        assert_same_training(stock, model)
        assert calls["rope"] == 2 * calls["fused_linear_cross_entropy"] == 2
        unpatch(model)
        calls.clear()
        model(**batch())
        stock(**batch())
        assert not calls


def test_threads(calls):
    stock, ours = pair()
    expected = stock(**batch()).loss
    patch(ours)

    def work(model):
        for _ in range(10):
            torch.testing.assert_close(model(**batch()).loss, expected, rtol=1e-5, atol=0)

    def swap(other):
        for _ in range(10):
            patch(other)
            unpatch(other)

    calls.clear()
    with ThreadPoolExecutor(3) as pool:
        list(
            pool.map(lambda call: call[0](call[1]), [(work, stock), (work, ours), (swap, build())])
        )
    assert calls["rope"] == 20


def test_a_replaced_method_of_the_stock_class_is_followed(monkeypatch, calls):
    """The class of a patched instance held copies of the methods of the first patch."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    ours = build(patching={})
    unpatch(ours)
    marks = recorded(monkeypatch, LlamaAttention, "forward")
    patch(ours)
    calls.clear()
    ours(**batch())
    assert len(marks) == 2
    assert calls["rope"] == 2  # within the decorator
    monkeypatch.setattr(LlamaAttention, "forward", lambda self, *a, **k: (torch.ones(2, 11, 32), 0))
    assert patch(ours).count("rope") == 0
    ours(**batch())
    assert type(ours.model.layers[0].self_attn) is LlamaAttention


# --- methods of other forms ---


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    return half(q, k, cos, sin, unsqueeze_dim)


def kept(function):
    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        self.observed.append("before")
        return function(self, *args, **kwargs)

    return wrapper


def only_for_the_class(function):
    """As the checkpointing layers of transformers wrap their forward."""

    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        self.observed.append(type(self).forward is wrapper)
        return function(self, *args, **kwargs)

    return wrapper


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.observed = []

    def finish(self, q):
        return q

    def forward(self, q, k, cos, sin, *, scale: float = 1.0):
        """Rotate."""
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return self.finish(q) * scale, k


class Inherited(Plain):
    def finish(self, q):
        return super().finish(q)


def rotated(self, *args):
    return apply_rotary_pos_emb(*args)


def nested(self, q, k, cos, sin):
    def run(*args):
        return apply_rotary_pos_emb(*args)

    return [run(*args) for args in ((q, k, cos, sin),)][0]  # noqa: RUF015


def plain(self, q, k, cos, sin):
    return apply_rotary_pos_emb(q, k, cos, sin)


METHODS = {
    "plain": {},
    "helper": {"rotated": rotated, "forward": lambda self, *args: self.rotated(*args)},
    "nested": {"forward": nested},
    "decorated": {"forward": kept(kept(plain))},
    "by its class": {"forward": only_for_the_class(plain)},
}


INPUTS = (
    torch.randn(2, 4, 5, 8),
    torch.randn(2, 2, 5, 8),
    torch.randn(1, 5, 8),
    torch.rand(1, 5, 8),
)


@pytest.mark.parametrize("methods", [*METHODS, "inherited"])
def test_methods_are_redirected(methods, calls):
    bases, more = ((Inherited,), {}) if methods == "inherited" else ((Plain,), METHODS[methods])
    module = type("Module", bases, more)()
    module_class, expected = type(module), module(*INPUTS)
    stock_seen = list(module.observed)
    module.observed.clear()
    holder = nn.ModuleList([module])
    assert patch(holder, **ONLY).count("rope") == 1
    calls.clear()
    got = module(*INPUTS)
    assert calls["rope"] == 1
    assert module.observed == stock_seen
    torch.testing.assert_close([*got], [*expected])
    unpatch(holder)
    calls.clear()
    module(*INPUTS)
    assert not calls
    assert type(module) is module_class


def test_method_copy_keeps_metadata():
    import inspect

    copied = redirect.redirected(Plain.forward, {"apply_rotary_pos_emb": half})
    assert copied is not Plain.forward
    assert inspect.signature(copied) == inspect.signature(Plain.forward)
    assert (copied.__doc__, copied.__qualname__, copied.__module__) == (
        "Rotate.",
        "Plain.forward",
        __name__,
    )
    assert copied.__globals__ is globals()
    assert "__wrapped__" not in vars(copied)
    assert inspect.getsource(copied) == inspect.getsource(Plain.forward)


def test_name_used_otherwise_is_refused():
    class Both(nn.Module):
        apply_rotary_pos_emb = None

        def forward(self, q, k, cos, sin):
            if self.apply_rotary_pos_emb is None:
                return apply_rotary_pos_emb(q, k, cos, sin)
            return self.apply_rotary_pos_emb(q, k, cos, sin)

    report = patch(nn.ModuleList([Both()]), **ONLY)
    assert "uses the name apply_rotary_pos_emb for something else" in report.skipped[0].reason


class Func(nn.Module):
    """What the kernels hub makes of a function: a module without parameters that calls it."""

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        return half(q, k, cos, sin, unsqueeze_dim)


def test_functions_wrapped_for_the_kernels_hub(monkeypatch, calls):
    function = Func()
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", function)
    module = Plain()
    object.__setattr__(module, "rotary_fn", function)
    assert patch(nn.ModuleList([module]), **ONLY, strict=True).count("rope") == 1
    calls.clear()
    module(*INPUTS)
    assert calls["rope"] == 1
    unpatch(module)
    function.forward = function.forward  # a kernel was put there
    assert "a hub kernel serves" in patch(nn.ModuleList([module]), **ONLY).skipped[0].reason


def test_dtypes_of_autocast_are_those_of_stock():
    """Queries are bf16 there and angles fp32, which gives fp32."""
    modeling = importlib.import_module("transformers.models.llama.modeling_llama")
    stock, ours = pair(patching={})
    dtypes = []
    interface = modeling.ALL_ATTENTION_FUNCTIONS

    def observed(module, query, key, value, *args, **kwargs):
        dtypes.append((query.dtype, key.dtype, value.dtype))
        return interface["sdpa"](module, query, key, value, *args, **kwargs)

    transformers.AttentionInterface.register("observed", observed)
    transformers.masking_utils.AttentionMaskInterface.register(
        "observed", transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    )
    for model in (stock, ours):
        model.set_attn_implementation("observed")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(**batch())
    assert dtypes[:2] == dtypes[2:]
    assert {query for query, *_ in dtypes} == {torch.float32}


@pytest.mark.slow
def test_compiled_calls_follow_the_class():
    stock, ours = pair(num_hidden_layers=1, patching={})
    graphs = Graphs()
    for length in (8, 11):
        inputs = batch(length=length) | {"use_cache": False}
        assert_same_compiled(stock, ours, inputs, backend=graphs, dynamic=True)
    assert "ops/rope.py" in graphs.traces
