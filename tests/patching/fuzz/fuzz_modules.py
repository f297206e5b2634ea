"""Random modules, patched and not.

A case is the source of a module class, with features that a patch may overlook (dropouts, buffers,
scales, detached gradients, casts), and a list of actions of user code: modes, hooks, changed
attributes, replaced submodules and methods. The patched module must equal a copy that is not
patched, in its output, its dtype, every gradient, the random numbers that it draws and the
attributes that it leaves, at the start and after every action.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import types
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as hooks_of_all

from liger_multi.errors import PatchError
from liger_multi.patching import patch, unpatch
from tests.models import Holder

PRELUDE = """
import functools, math, random, types
import torch
from torch import nn
from torch.nn import functional as F

class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, dy):
        return dy / 2

class Scaled(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.alpha, self.function = 1.0, function
    def forward(self, x):
        return self.function(x * self.alpha)

def turned(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)

def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin
"""


class Feature(NamedTuple):
    """Something in a forward: ``{v}`` is the variable that it acts on, ``{n}`` its own name."""

    code: str
    init: str = ""
    body: str = ""  # in the class
    actions: tuple[str, ...] = ()
    spots: tuple[str, ...] = ("x", "gate", "h", "y")


def _changes(*values: object) -> tuple[str, ...]:
    return tuple(f"m.{{n}} = {value}" for value in values)


_TIMES = "{v} = {v} * self.{n}"
_HOOKED = (
    "m.{n}.register_forward_hook(lambda mod, args, out: out * 1.5)",
    "m.{n}.register_forward_pre_hook(lambda mod, args: (args[0] * 0.5,))",
)
FEATURES = {
    "scale": Feature(_TIMES, "self.{n} = 1.0", actions=_changes(0.5, "torch.tensor(2.0)")),
    "scale of the class": Feature(_TIMES, body="{n} = 1.0", actions=("m.{n} = 0.5", "K.{n} = 2.0")),
    "mask": Feature(
        _TIMES,
        "self.register_buffer('{n}', torch.ones(1))",
        actions=("m.{n}.fill_(0.5)", "m.{n} = torch.full_like(m.{n}, 0.25)"),
    ),
    "mask of training": Feature(
        "if self.training: {v} = {v} * self.{n}",
        "self.register_buffer('{n}', torch.ones(1))",
        actions=("m.{n}.fill_(0.5)",),
    ),
    "buffer that is not read": Feature("pass", "self.register_buffer('{n}', torch.ones(1))"),
    "tensor": Feature(_TIMES, "self.{n} = torch.ones(())", actions=("m.{n}.mul_(2)",)),
    "list": Feature("{v} = {v} * self.{n}[0]", "self.{n} = [1.0]", actions=("m.{n}[0] = 0.5",)),
    "config": Feature(
        "{v} = {v} * self.{n}.scale",
        "self.{n} = types.SimpleNamespace(scale=1.0)",
        actions=("m.{n}.scale = 0.5",),
    ),
    "dropout": Feature("{v} = F.dropout({v}, self.{n}, self.training)", "self.{n} = 0.3"),
    "dropout that rests": Feature(
        "{v} = F.dropout({v}, self.{n}, self.training)",
        "self.{n} = 0.0",
        actions=_changes(0.4),
    ),
    "dropout layer": Feature(
        "{v} = self.{n}({v})",
        "self.{n} = nn.Dropout(0.3)",
        actions=("m.{n}.p = 0.6", "m.{n} = nn.Tanh()", *_HOOKED),
    ),
    "dropout layer that rests": Feature(
        "{v} = self.{n}({v})",
        "self.{n} = nn.Dropout(0.0)",
        actions=("m.{n}.p = 0.6", *_HOOKED),
    ),
    "noise": Feature(
        "if self.training: {v} = {v} + torch.randn_like({v}) * self.{n}",
        "self.{n} = 0.0",
        actions=_changes(0.1),
    ),
    "noise of Python": Feature(
        "if self.training: {v} = {v} * (1 + self.{n} * random.random())",
        "self.{n} = 0.0",
        actions=_changes(0.1),
    ),
    "gradient scale": Feature(
        "{v} = {v} * self.{n} + {v}.detach() * (1 - self.{n})", "self.{n} = 0.5"
    ),
    "gradient scale that rests": Feature(
        "{v} = {v} * self.{n} + {v}.detach() * (1 - self.{n})",
        "self.{n} = 1.0",
        actions=_changes(0.25),
    ),
    "detached": Feature("{v} = {v}.detach()", spots=("gate", "x")),
    "autograd function": Feature("{v} = Half.apply({v})"),
    "residual": Feature("{v} = {v} + self.{n} * x", "self.{n} = 0.0", "", _changes(1.0), ("y",)),
    "cast up": Feature("{v} = {v}.float()", spots=("y",)),
    "through fp64": Feature("{v} = {v}.double().to(x.dtype)"),
    "through bf16": Feature("{v} = {v}.bfloat16().to(x.dtype)"),
    "clamp": Feature(
        "{v} = {v}.clamp(-self.{n}, self.{n})", "self.{n} = 1e4", actions=_changes(0.1)
    ),
    "optional clamp": Feature(
        "if self.{n} is not None: {v} = {v}.clamp(-self.{n}, self.{n})",
        "self.{n} = None",
        actions=_changes(0.1),
    ),
    "switch": Feature("if self.{n}: {v} = {v} * 1.5", "self.{n} = False", actions=_changes(True)),
    "mode": Feature("if self.training: {v} = {v} * 1.5"),
    "mode that rests": Feature(
        "if self.training: {v} = {v} * self.{n}", "self.{n} = 1.0", actions=_changes(0.5)
    ),
    "no gradients": Feature("if not torch.is_grad_enabled(): {v} = {v} * 1.5"),
    "rank": Feature("if x.ndim == 2: {v} = {v} * 1.5"),
    "counter": Feature("self.{n} += 1", "self.{n} = 0"),
    "kept": Feature("self.{n} = {v}.detach()", "self.{n} = None"),
    "late": Feature("{v} = {v} * getattr(self, '{n}', 1.0)", actions=_changes(0.5)),
    "property": Feature(
        _TIMES,
        "self._{n} = 1.0",
        "@property\n    def {n}(self): return self._{n}",
        ("m._{n} = 0.5", "K.{n} = 3.0"),
    ),
    "helper": Feature(
        "{v} = self.{n}({v})",
        body="def {n}(self, v): return v",
        actions=("K.{n} = lambda self, v: v * 2", "m.{n} = lambda v: v * 3"),
    ),
    "in place": Feature("x.mul_(1.0)", spots=("x",)),
    "mean of rows": Feature("{v} = {v} + 0.1 * {v}.mean(dim=-2, keepdim=True)"),
    "identity": Feature(
        "{v} = self.{n}({v})",
        "self.{n} = nn.Identity()",
        actions=("m.{n} = nn.Tanh()", "m.{n}.forward = lambda x: x * 2", *_HOOKED),
    ),
    "no layer": Feature(
        "if self.{n} is not None: {v} = self.{n}({v})",
        "self.{n} = None",
        actions=("m.{n} = nn.Tanh()", "m.{n} = nn.Dropout(0.5)"),
    ),
    "no registered layer": Feature(
        "if self.{n} is not None: {v} = self.{n}({v})",
        "self.register_module('{n}', None)",
        actions=("m.{n} = nn.Tanh()",),
    ),
}
SPOTS = {
    "mlp": ("x", "gate", "h", "y"),
    "norm": ("x", "y"),
    "attention": ("x", "q", "y"),
    "experts": ("gate", "h"),
}
ACTIVATIONS = (
    "nn.SiLU()",
    "nn.SiLU()",
    "nn.GELU()",
    "nn.GELU('tanh')",
    "F.silu",
    "functools.partial(F.gelu, approximate='tanh')",
    "Scaled(F.silu)",
    "Scaled(F.gelu)",
    "nn.Mish()",
    "self.own",
)
MODES = ("m.train()", "m.eval()")
CAPTURED = "captured = m.forward; m.forward = lambda *a, **k: captured(*a, **k)"
COMMON = (
    *MODES,
    "m = copy.deepcopy(m)",
    "m.double()",
    "m.bfloat16()",
    "m.requires_grad_(False)",
    "again(m)",
    "unpatch(m)",
    CAPTURED,
    "K.forward = (lambda f: lambda self, *a: f(self, *a) * 2)(K.forward)",
    "K.forward = (lambda f: lambda self, *a: f(self, *a))(K.forward)",
    "m.register_forward_hook(lambda mod, args, out: out + 1)",
    "every(m)",
)
OF_LAYERS = (
    "m.{l}.register_forward_hook(lambda mod, args, out: out * 1.5)",
    "m.{l}.register_forward_hook(lambda mod, args, kw, out: out * 1.5, with_kwargs=True)",
    "m.{l}.register_forward_hook(lambda mod, args, out: out * 0.5, always_call=True)",
    "m.{l}.register_forward_pre_hook(lambda mod, args: (args[0] * 0.5,))",
    "m.{l}.register_full_backward_hook(lambda mod, gin, gout: (gin[0] * 2,))",
    "m.{l}.register_full_backward_pre_hook(lambda mod, gout: (gout[0] * 2,))",
    "m.{l} = nn.Sequential(m.{l}, nn.Tanh())",
    "nn.utils.parametrizations.weight_norm(m.{l})",
    "nn.utils.parametrizations.spectral_norm(m.{l})",
    "m.{l}.forward = (lambda f: lambda x: f(x) * 2)(m.{l}.forward)",
    "m.{l}.weight = nn.Parameter(m.{l}.weight.detach() * 2)",
    "m.{l}.weight.data.mul_(0.5)",
    "m.{l}.bias = nn.Parameter(torch.ones(m.{l}.weight.shape[0], dtype=m.{l}.weight.dtype))",
    "m.{l}.requires_grad_(False)",
)
OF_ACTIVATIONS = (
    "m.act = nn.Tanh()",
    "m.act = torch.tanh",
    "m.act.alpha = 2.0",
    "m.act.function = torch.tanh",
    "m.act.approximate = 'none'",
    "m.act.inplace = True",
    "m.act.forward = torch.tanh",
    "m.act.register_forward_hook(lambda mod, args, out: out * 1.5)",
    "m.act.register_forward_hook(lambda mod, a, kw, out: out * 1.5, with_kwargs=True)",
    "m.act.register_forward_pre_hook(lambda mod, args: (args[0] * 0.5,))",
    "m.act.register_full_backward_hook(lambda mod, gin, gout: (gin[0] * 2,))",
    "m.act.register_full_backward_pre_hook(lambda mod, gout: (gout[0] * 2,))",
    "Scaled.forward = lambda self, x: x.tanh()",
    "Scaled.__call__ = lambda self, x: x.tanh()",
    "K.own = lambda self, x: x.tanh()",
)
OF_NORMS = (
    "m.eps = 0.3",
    "m.eps = torch.tensor(0.2)",
    "m.weight = nn.Parameter(torch.full_like(m.weight, 0.5))",
    "m.weight = nn.Parameter(torch.full_like(m.weight[:1], 0.5))",
    "m.weight.data.mul_(2)",
    "m.bias = nn.Parameter(torch.ones_like(m.weight))",
    "nn.utils.parametrize.register_parametrization(m, 'weight', nn.Tanh())",
)


@dataclass(frozen=True)
class Case:
    """One module and what happens to it; everything but ``source`` may be left out."""

    block: str
    act: str
    form: str
    bias: bool
    names: tuple[str, ...]
    features: tuple[tuple[str, str, str], ...]
    actions: tuple[str, ...]
    training: bool
    wide: bool
    dtype: str
    seed: int

    @property
    def source(self) -> str:
        """The module class."""
        features = [(FEATURES[name], spot, own) for name, spot, own in self.features]
        init = [f.init.format(n=n) for f, _, n in features if f.init]
        body = [f.body.format(n=n) for f, _, n in features if f.body]
        lines = {s: [] for s in SPOTS[self.block]}
        for feature, spot, own in features:
            lines[spot].append(feature.code.format(v=spot, n=own))
        members, forward = globals()[f"_{self.block}"](self, lines)
        text = ["class Generated(nn.Module):", *(f"    {b}" for b in body)]
        text += ["    def own(self, x): return F.silu(x)", "    def __init__(self):"]
        text += [f"        {line}" for line in ("super().__init__()", *members, *init)]
        text += [f"    {line}" for line in forward]
        return "\n".join(text)

    def __str__(self) -> str:
        moment = f"patched in {'train' if self.training else 'eval'} mode, {self.dtype}"
        wide = ", under default dtype fp64" if self.wide else ""
        actions = "\n".join(f"  {a}" for a in self.actions) or "  nothing"
        return f"{self.source}\n# seed {self.seed}, {moment}{wide}; then:\n{actions}"


def _mlp(case: Case, at: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    gate, up, down = case.names
    packed = case.form in ("packed", "interleaved")
    wide = 32 if packed else 16
    members = [f"self.{gate} = nn.Linear(12, {wide}, bias={case.bias})"]
    if not packed:
        members += [f"self.{up} = nn.Linear(12, 16, bias={case.bias})"]
    members += [f"self.{down} = nn.Linear(16, 12, bias={case.bias})", f"self.act = {case.act}"]
    projected = {
        "plain": f"self.{gate}(x), self.{up}(x)",
        "packed": f"self.{gate}(x).chunk(2, -1)",
        "interleaved": f"self.{gate}(x).unflatten(-1, (-1, 2)).unbind(-1)",
        "weights": f"self.{gate}(x), F.linear(x, self.{up}.weight)",
    }
    return members, [
        *("def forward(self, x):", *_indented(at["x"])),
        *(f"    gate, up = {projected[case.form]}", *_indented(at["gate"])),
        *("    h = self.act(gate) * up", *_indented(at["h"])),
        *(f"    y = self.{down}(h)", *_indented(at["y"]), "    return y"),
    ]


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


_NORMS = {
    "llama": "self.weight * (x.float() * r).to(x.dtype)",
    "olmo": "(self.weight * (x.float() * r)).to(x.dtype)",
    "gemma": "(x.float() * r * (1.0 + self.weight.float())).to(x.dtype)",
    "bare": "(x.float() * r).to(x.dtype)",
}


def _norm(case: Case, at: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    members = ["self.eps = 1e-6"]
    if case.form != "bare":
        members += ["self.weight = nn.Parameter(torch.rand(12) + 0.5)"]
    if case.bias and case.form == "layer":
        members += ["self.bias = nn.Parameter(torch.rand(12))"]
    elif case.bias and case.form != "bare":
        members += ["self.register_parameter('bias', None)"]
    forward = ["def forward(self, x):", *_indented(at["x"])]
    if case.form == "layer":
        shift = "self.bias" if case.bias else "None"
        forward += [f"    y = F.layer_norm(x, (12,), self.weight, {shift}, self.eps)"]
    else:
        forward += ["    r = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)"]
        forward += [f"    y = {_NORMS[case.form]}"]
        if case.bias and case.form != "bare":
            forward += ["    if self.bias is not None: y = y + self.bias"]
    return members, [*forward, *_indented(at["y"]), "    return y"]


def _attention(case: Case, at: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    projection = [f"self.{name} = nn.Linear(12, 12, bias={case.bias})" for name in case.names]
    q, k, v = (f"self.{name}(x).unflatten(-1, (3, 4)).mT" for name in case.names)
    turn = "apply_rotary_pos_emb(q, k, cos, sin)"
    if case.form == "helper":
        projection += ["pass"]
    forward = ["def forward(self, x):"]
    if case.form == "helper":
        forward = ["def turn(self, q, k, cos, sin):", f"    return {turn}", *forward]
        turn = "self.turn(q, k, cos, sin)"
    forward += [
        "    x = x.reshape(-1, x.shape[-2] if x.ndim > 2 else 1, 12)",
        *_indented(at["x"]),
        "    angles = torch.arange(x.shape[1] * 4.0).view(1, -1, 4)",
        "    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)",
        *(
            f"    {name} = {projection}.transpose(-1, -2).transpose(1, 2)"
            for name, projection in zip("qkv", (q, k, v), strict=True)
        ),
        *(f"    {line}" for line in at["q"]),
        f"    q, k = {turn}",
        "    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
        "    y = y.transpose(1, 2).flatten(-2)",
    ]
    return projection, [*forward, *_indented(at["y"]), "    return y"]


def _experts(case: Case, at: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    members = [
        "self.gate_up_proj = nn.Parameter(torch.randn(3, 20, 12) * 0.3)",
        "self.down_proj = nn.Parameter(torch.randn(3, 12, 10) * 0.3)",
        f"self.act = {case.act}",
        "self.experts, self.factor = 3, 1.0",
    ]
    factor = " * self.factor" if case.form == "scaled" else ""
    return members, [
        *("def _apply_gate(self, x):", "    gate, up = x.chunk(2, -1)", *_indented(at["gate"])),
        *("    h = self.act(gate) * up", *_indented(at["h"]), "    return h"),
        "def forward(self, x, index, routing):",
        "    y = torch.zeros_like(x)",
        "    for e in range(self.experts):",
        "        row, slot = torch.where(index == e)",
        "        h = self._apply_gate(F.linear(x[row], self.gate_up_proj[e]))",
        "        h = F.linear(h, self.down_proj[e]) * routing[row, slot, None]",
        f"        y = y.index_add(0, row, h.to(y.dtype){factor})",
        "    return y",
    ]


FORMS = {
    "mlp": ("plain",) * 5 + ("packed", "packed", "interleaved", "weights"),
    "norm": ("llama", "llama", "olmo", "gemma", "bare", "layer"),
    "attention": ("plain", "helper"),
    "experts": ("plain", "plain", "scaled"),
}
NAMES = {
    "mlp": (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("fc_a", "fc_b", "fc_c")),
    "attention": (("q_proj", "k_proj", "v_proj"),),
}


DTYPES = ("float32",) * 4 + ("bfloat16",)


def generate(seed: int) -> Case:
    """The case of a seed."""
    draw = random.Random(seed)
    block = draw.choices(list(FORMS), (6, 4, 2, 2))[0]
    names, form = draw.choice(NAMES.get(block, ((),))), draw.choice(FORMS[block])
    features, offered = [], []
    for at in range(draw.choices((0, 1, 2, 3), (3, 5, 2, 1))[0]):
        usable = [n for n, f in FEATURES.items() if {*f.spots} & {*SPOTS[block]}]
        name, own = draw.choice(usable), f"own_{at}"
        spots = [s for s in SPOTS[block] if s in FEATURES[name].spots or s == "q"]
        features.append((name, draw.choice(spots), own))
        offered += [a.format(n=own) for a in FEATURES[name].actions] * 3
    offered += [*COMMON, *OF_NORMS * (2 * (block == "norm"))]
    if block in ("mlp", "experts"):
        offered += OF_ACTIVATIONS
    if block == "experts":
        offered += ["m.factor = 0.5", "m.gate_up_proj.data.mul_(2)", "m.experts = 2"]
        offered += ["K._apply_gate = lambda self, x: x.chunk(2, -1)[0]"]
    if names:
        offered += [f"adapters(m, {names}, {drop})" for drop in (0.0, 0.0, 0.0, 0.3)]
        offered += [a.format(l=draw.choice(names)) for a in OF_LAYERS]
    count = draw.choices((0, 1, 2, 3, 4), (1, 4, 4, 2, 1))[0]
    actions = [draw.choice(offered) for _ in range(count)]
    if CAPTURED in actions:  # a forward that somebody holds does not follow its class
        actions = [a for a in actions if not a.startswith("K.forward")]
    return Case(
        block,
        act=draw.choice(ACTIVATIONS),
        form=form,
        bias=draw.random() < 0.3,
        names=names,
        features=tuple(features),
        actions=tuple(actions),
        training=draw.random() < 0.5,
        wide=draw.random() < 0.1,
        dtype=draw.choice(DTYPES),
        seed=seed,
    )


def _patch(module: nn.Module) -> int:
    report = patch(Holder(module), fused_linear_cross_entropy=False)
    return sum(entry.path == "inner" for entry in report.entries)


class Twin:
    """A module under user code: stock, or patched at the start."""

    def __init__(
        self, case: Case, module: nn.Module, namespace: dict[str, Any], ours: bool
    ) -> None:
        self.case, self.module, self.ours = case, module, ours
        self.namespace = {**namespace, "copy": copy, "K": namespace["Generated"], "every": _every}
        self.namespace |= {"again": self.again, "unpatch": self.unpatch, "adapters": self.adapters}

    def again(self, module: nn.Module) -> None:
        """Patch once more."""
        if self.ours:
            _patch(module)

    def adapters(self, module: nn.Module, names: tuple[str, ...], dropout: float) -> None:
        """Put PEFT's LoRA on the layers, and patch once more."""
        import peft

        config = peft.LoraConfig(
            r=2, target_modules=list(names), lora_dropout=dropout, init_lora_weights=False
        )
        peft.inject_adapter_in_model(config, module)
        module.to(next(module.parameters()).dtype)
        self.again(module)

    def unpatch(self, module: nn.Module) -> None:
        """Give the stock class back, unless somebody put one of theirs on top."""
        if self.ours:
            with contextlib.suppress(PatchError):
                unpatch(Holder(module))

    def act(self, action: str) -> str:
        """Run user code; what it raises, by class."""
        scope = {**self.namespace, "m": self.module}
        torch.manual_seed(5)
        try:
            exec(action, scope)
        except Exception as error:
            return type(error).__name__
        self.module = scope["m"]
        return ""

    def run(self, shape: tuple[int, ...], grad: bool, autocast: bool) -> dict[str, Any]:
        """What a call gives, and what it leaves behind."""
        generator = torch.Generator().manual_seed(self.case.seed)
        first = next(self.module.parameters(), None)
        dtype = getattr(torch, self.case.dtype) if first is None else first.dtype
        leaf = torch.randn(*shape, 12, generator=generator).to(dtype).requires_grad_(grad)
        arguments = [leaf * 1.0]
        if self.case.block == "experts":
            arguments = [leaf.reshape(-1, 12) * 1.0]
            rows = arguments[0].shape[0]
            index = torch.rand(rows, 3, generator=generator).argsort(-1)[:, :2]
            arguments += [index, torch.rand(rows, 2, generator=generator).to(dtype)]
        torch.manual_seed(3)
        random.seed(3)
        self.module.zero_grad()
        actual: dict[str, Any] = {}
        try:
            with torch.set_grad_enabled(grad), torch.autocast("cpu", enabled=autocast):
                y = self.module(*arguments)
            actual["y"], actual["of y"] = y.detach(), (y.dtype, y.requires_grad)
            if y.requires_grad:
                y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
        except Exception as error:
            return {"raised": True, "error": f"{type(error).__name__}: {error}"}
        actual["x"], actual["dx"] = arguments[0].detach(), leaf.grad
        actual |= {f"d{n}": p.grad for n, p in self.module.named_parameters()}
        actual["random"] = (torch.get_rng_state(), random.getstate())
        actual["kept"] = {
            n: v.detach() if isinstance(v, torch.Tensor) else v
            for n, v in vars(self.module).items()
            if n.startswith("own_") and isinstance(v, (int, float, torch.Tensor))
        }
        return actual


def _every(module: nn.Module) -> None:
    """A hook on every module of the process, which changes outputs of activations."""
    kinds = (nn.SiLU, nn.GELU, nn.Linear)

    def hook(mod: nn.Module, args: Any, out: Any) -> Any:
        return out * 1.5 if isinstance(mod, kinds) or type(mod).__name__ == "Scaled" else None

    hooks_of_all.register_module_forward_hook(hook)


def _same(a: Any, b: Any, size: float, bound: float) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        if not a.is_floating_point():
            return torch.equal(a, b)
        return bool(((a.double() - b.double()).abs() <= bound * size + 1e-9).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[n], b[n], size, bound) for n in a)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same(x, y, size, bound) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def difference(stock: dict[str, Any], ours: dict[str, Any], narrow: bool) -> str:
    """What a patched module has different, or nothing.

    In bf16 gradients of low-rank factors through an attention are off by 4 % in either module;
    what a case changes is a factor of 1.5 at least.
    """
    if stock.keys() != ours.keys() or "raised" in stock:
        if "raised" in stock and "raised" in ours:
            return ""
        return f"unpatched {stock.get('error', 'runs')}, patched {ours.get('error', 'runs')}"
    floats = [v for v in stock.values() if isinstance(v, torch.Tensor) and v.is_floating_point()]
    narrow = narrow or any(v.dtype == torch.bfloat16 for v in floats)
    of_all = max([1e-3, *(float(v.abs().max()) for n, v in stock.items() if _is_gradient(n, v))])
    for name, expected in stock.items():
        size = 1.0
        if isinstance(expected, torch.Tensor) and expected.numel():
            size = max(
                float(expected.double().abs().max()), 0.1 * of_all * _is_gradient(name, expected)
            )
        if not _same(expected, ours[name], size, 8e-2 if narrow else 1e-4):
            return f"{name} differs"
    return ""


def _is_gradient(name: str, value: Any) -> bool:
    return name.startswith("d") and isinstance(value, torch.Tensor)


@dataclass
class Outcome:
    """What became of a case."""

    patched: bool
    failure: str = ""
    calls: int = 0
    runs: int = 0


@contextlib.contextmanager
def _operators(outcome: Outcome) -> Any:
    """Count the calls of operators, and leave no hook of all modules behind."""
    from liger_multi import ops

    names = ("gated_mlp", "swiglu", "geglu", "swiglu_packed", "geglu_packed", "rms_norm")
    names += ("swiglu_clamped", "layer_norm", "fused_moe", "rope")
    held = {name: getattr(ops, name) for name in names}

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            outcome.calls += 1
            return function(*args, **kwargs)

        return call

    tables = (hooks_of_all._global_forward_hooks, hooks_of_all._global_forward_pre_hooks)
    try:
        for name, function in held.items():
            setattr(ops, name, counted(function))
        yield
    finally:
        for name, function in held.items():
            setattr(ops, name, function)
        for table in tables:
            table.clear()


def examine(case: Case) -> Outcome:
    """Compare the two twins of a case, at the start and after every action."""
    name = f"fuzzed_{case.seed}"
    module = sys.modules[name] = types.ModuleType(name)
    outcome = Outcome(False)
    try:
        exec(PRELUDE + case.source, vars(module))
        torch.manual_seed(case.seed)
        built = module.Generated().to(getattr(torch, case.dtype)).train(case.training)
        twins = [Twin(case, m, vars(module), m is not built) for m in (built, copy.deepcopy(built))]
        torch.set_default_dtype(torch.float64 if case.wide else torch.float32)
        try:
            outcome.patched = _patch(twins[1].module) > 0
        finally:
            torch.set_default_dtype(torch.float32)
        with _operators(outcome):
            outcome.failure = _compared(case, twins, outcome)
    finally:
        del sys.modules[name]
    return outcome


RUNS = (
    (False, (2, 3), True, False),
    (True, (4,), True, False),
    (False, (2, 3), False, False),
    (False, (2, 3), True, True),
)
"""In the other mode or not, leading axes of the input, with gradients, under autocast."""


def _compared(case: Case, twins: list[Twin], outcome: Outcome) -> str:
    for action in ("", *case.actions):
        # what acts on a class or on all modules acts once for both
        shared = action.startswith(("K.", "Scaled.", "every("))
        errors = [twin.act(action) for twin in twins[: 1 if shared else 2]]
        if len({*errors}) > 1:
            return (
                f"after {action!r}: unpatched {errors[0] or 'runs'}, patched {errors[1] or 'runs'}"
            )
        held = twins[0].module.training
        for other, shape, grad, autocast in RUNS:
            training = held is not other
            for twin in twins:
                twin.module.train(training)
            outcome.runs += 1
            actual = difference(*(twin.run(shape, grad, autocast) for twin in twins), autocast)
            if actual:
                how = f"{'train' if training else 'eval'}, {shape}, {grad=}, {autocast=}"
                return f"after {action or 'patch'!r}: {actual} ({how})"
        for twin in twins:
            twin.module.train(held)
    return ""


@dataclass
class Summary:
    """Counts of a run, and the cases that failed."""

    failures: list[tuple[Case, str]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def run(seed: int, modules: int) -> Summary:
    """Examine ``modules`` cases from ``seed`` on."""
    summary = Summary()
    for at in range(seed, seed + modules):
        case = generate(at)
        outcome = examine(case)
        summary.counts["modules"] += 1
        summary.counts["patched"] += outcome.patched
        summary.counts[f"patched {case.block}"] += outcome.patched
        summary.counts["runs"] += outcome.runs
        summary.counts["served"] += outcome.calls
        if outcome.failure:
            summary.failures.append((case, outcome.failure))
    return summary
