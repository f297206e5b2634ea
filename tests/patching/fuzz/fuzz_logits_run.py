"""What a program of ``fuzz_logits.py`` is, what it runs on, and what its user then sees."""

from __future__ import annotations

import ast
import copy
import functools
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from fuzz_logits_steps import PRELUDE, V
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput

from liger_multi.patching import patch, real_logits
from tests.models import build

MODES = ("eager", "compiled", "whole")


@dataclass(frozen=True)
class Program:
    """Statements, and what they run on.

    Attributes:
        model: Key of ``MODELS``.
        mode: One of ``MODES``.
        steps: Statements of Python.
        graph: How many of them are compiled with the model, in mode ``whole``.
    """

    model: str
    mode: str
    steps: tuple[str, ...]
    graph: int = 0

    def __str__(self) -> str:
        graph = f" graph={self.graph}" if self.graph else ""
        return "\n".join([f"# model={self.model} mode={self.mode}{graph}", *self.steps])

    @classmethod
    def parse(cls, text: str) -> Program:
        """The program of what ``str`` printed."""
        text = textwrap.dedent(text).strip()
        options = dict(re.findall(r"(\w+)=(\w+)", text.splitlines()[0]))
        return cls(
            options["model"], options["mode"], statements(text), int(options.get("graph", 0))
        )

    @property
    def low(self) -> bool:
        """Whether something is rounded to less than fp32."""
        return MODELS[self.model].dtype.itemsize < 4 or any(
            re.search(r"autocast|bfloat16|half", step) for step in self.steps
        )


def statements(text: str) -> tuple[str, ...]:
    """The top-level statements of a text."""
    return tuple(ast.get_source_segment(text, node) or "" for node in ast.parse(text).body)


def names_of(step: str) -> tuple[set[str], set[str], set[str]]:
    """Names that a statement reads, sets and deletes; parameters of lambdas count as set."""
    used: tuple[set[str], set[str], set[str]] = (set(), set(), set())
    inner = set()
    for node in ast.walk(ast.parse(step)):
        if isinstance(node, ast.arg):
            inner.add(node.arg)
        elif isinstance(node, ast.Name):
            used[(ast.Load, ast.Store, ast.Del).index(type(node.ctx))].add(node.id)
            if isinstance(node.ctx, ast.Store) and f"{node.id} = " not in step:
                used[0].add(node.id)  # an augmented assignment
    return used[0] - inner, used[1], used[2]


class Small(nn.Module):
    """A model with a head and nothing else that the compiler has to trace; its head has a bias.

    Args:
        softcap: Bound of the logits; 0 for none.
    """

    def __init__(self, softcap: float = 0.0) -> None:
        super().__init__()
        self.softcap = softcap
        self.model = nn.Sequential(nn.Embedding(V, 24), nn.Linear(24, 24), nn.Tanh())
        self.lm_head = nn.Linear(24, V)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def loss_function(self, **arguments: Any) -> Any:
        return ForCausalLMLoss(**arguments)

    def forward(
        self, ids: Any, labels: Any = None, logits_to_keep: int = 0, return_dict: bool = True
    ) -> Any:
        logits = self.lm_head(self.model(ids)[:, -logits_to_keep:])
        if self.softcap:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=V)
        if not return_dict:
            return (logits,) if loss is None else (loss, logits)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def _small(**options: Any) -> Any:
    torch.manual_seed(0)
    return Small(**options)


@dataclass(frozen=True)
class Kind:
    """A model, what its patch is called with, and how often it is drawn.

    Attributes:
        build: Makes it, always the same.
        weight: How often it is drawn, relative to others.
        compiled: The same for compiled programs.
        dtype: Of its parameters.
        options: Of the patch.
        backend: Of the compiler.
    """

    build: Callable[[], Any]
    weight: int = 1
    compiled: int = 0
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    backend: str = "eager"


def _kind(architecture: str, *weights: int, **options: Any) -> Kind:
    known = {"vocab_size": V, "num_hidden_layers": 1}
    return Kind(functools.partial(build, architecture, **known), *weights, **options)


MODELS = {
    "llama": _kind("llama", 4, 2),
    "softcapped": _kind("gemma2", 2),
    "tied": _kind("qwen2"),
    "bf16": _kind("llama", dtype=torch.bfloat16),
    "chunked": _kind("llama", options={"fused_linear_cross_entropy": {"chunk": 3}}),
    "with_loss": _kind("llama", options={"cross_entropy": True}),
    "on_real": _kind("llama", options={"fused_linear_cross_entropy": False, "cross_entropy": True}),
    "plain": _kind("llama", 0, options={"fused_linear_cross_entropy": False}),
    "small": Kind(_small, 1, 8),
    "small_capped": Kind(functools.partial(_small, softcap=5.0), 0, 4, backend="aot_eager"),
    "small_with_loss": Kind(_small, 0, 2, options={"cross_entropy": True}),
    "small_bf16": Kind(_small, 0, 2, dtype=torch.bfloat16),
}


class Models:
    """Stock, patched and exact copies of one model, made once and set back for every program."""

    def __init__(self, name: str) -> None:
        known = MODELS[name]
        self.backend = known.backend
        self.stock = known.build().to(known.dtype)
        with torch.no_grad():
            self.stock.lm_head.weight.mul_(6)  # logits of a few units
        self.ours, self.exact = copy.deepcopy(self.stock), copy.deepcopy(self.stock).double()
        patch(self.ours, **known.options)
        self.saved = {
            id(model): [p.detach().clone() for p in model.parameters()]
            for model in (self.stock, self.ours, self.exact)
        }
        self.compiled: dict[int, Any] = {}

    def reset(self, model: Any, nudge: float = 0.0) -> None:
        """Weights as they were made, up to a relative error of ``nudge``, and no gradients."""
        model.train()
        for at, (parameter, value) in enumerate(
            zip(model.parameters(), self.saved[id(model)], strict=True)
        ):
            if nudge:
                noise = torch.sin(torch.arange(value.numel()) * 1.7 + at + 1e6 * nudge)
                value = value.double() * (1 + nudge * noise.view(value.shape))
            parameter.data.copy_(value)
            parameter.grad = None
            parameter.requires_grad_(True)

    def compile(self, model: Any) -> Any:
        """The compiled model; one compilation serves all programs."""
        if id(model) not in self.compiled:
            self.compiled[id(model)] = torch.compile(model, backend=self.backend, dynamic=False)
        return self.compiled[id(model)]


@functools.cache
def models(name: str) -> Models:
    """The models of a kind."""
    return Models(name)


def inputs() -> dict[str, Any]:
    """Tensors that programs start from."""
    ids = (torch.arange(14) * 11 + 5).remainder(V).view(2, 7)
    labels = ids.clone()
    labels[0, :2], labels[1, 5:] = -100, -100
    return {
        "ids": ids,
        "other_ids": (ids * 3 + 1) % V,
        "one": ids[:1, :5].clone(),
        "labels": labels,
    }


@dataclass
class Run:
    """What one run of a program left.

    Attributes:
        env: Names and values.
        errors: By statement.
        model: That it ran on.
    """

    env: dict[str, Any]
    errors: dict[int, BaseException]
    model: Any


@functools.lru_cache(maxsize=4096)
def code(step: str) -> Any:
    """A statement, compiled."""
    return compile(step, "<program>", "exec")


def _compiled_part(program: Program, env: dict[str, Any], backend: str) -> None:
    """Run the first statements as one compiled function."""
    steps = program.steps[: program.graph]
    names: list[str] = []
    for step in steps:
        _, stored, deleted = names_of(step)
        names += sorted(stored - set(names))
        names = [name for name in names if name not in deleted]
    body = [*steps, "return {" + ", ".join(f"{n!r}: {n}" for n in names) + "}"]
    arguments = ("model", *inputs())
    text = f"def program({', '.join(arguments)}):\n" + textwrap.indent("\n".join(body), "    ")
    space = dict(PRELUDE)
    exec(compile(text, "<compiled program>", "exec"), space)
    function = torch.compile(space["program"], backend=backend, dynamic=False)
    env.update(function(*[env[name] for name in arguments]))


def execute(
    program: Program,
    model: Any,
    *,
    compiled: bool = False,
    expected: dict[int, BaseException] | None = None,
    nudge: float = 0.0,
) -> Run:
    """Run a program on one model.

    Args:
        program: It.
        model: Stock, patched or exact.
        compiled: Whether to compile what the mode says, or to run everything eagerly.
        expected: Errors by statement; the run ends where there is one too many or too few.
        nudge: Relative error of the weights.
    """
    pair = models(program.model)
    pair.reset(model, nudge)
    env = {**PRELUDE, **inputs(), "model": model}
    start, errors = 0, dict[int, BaseException]()
    if compiled and program.mode == "compiled":
        env["model"] = pair.compile(model)
    run = Run(env, errors, model)
    torch.manual_seed(0)
    for at, step in enumerate(program.steps):
        if at < start:
            continue
        try:
            if compiled and at < program.graph:
                start = program.graph
                at = start - 1
                _compiled_part(program, env, pair.backend)
            else:
                exec(code(step), env)
        except Exception as error:
            errors[at] = error.with_traceback(None)
        if expected is not None and (at in errors) != (at in expected):
            break
    return run


@dataclass(frozen=True)
class Seen:
    """A tensor as its user sees it; ``data`` in fp64, or integers."""

    description: tuple[tuple[str, Any], ...]
    data: Tensor | str

    def read(self) -> Tensor:
        """The values."""
        assert isinstance(self.data, Tensor)
        return self.data


def _tensor_like(value: Any) -> bool:
    return isinstance(value, Tensor) or hasattr(type(value), "__torch_function__")


def _described(value: Any) -> tuple[tuple[str, Any], ...]:
    shape = tuple(value.shape)
    stride = value.stride()
    # strides along axes of length one, and of nothing, mean nothing
    strides = tuple(s if n > 1 else 0 for s, n in zip(stride, shape)) if value.numel() else ()
    return (
        ("shape", shape),
        ("dtype", value.dtype),
        ("strides", strides),
        ("requires_grad", value.requires_grad),
        ("is_leaf", value.is_leaf),
    )


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        yield f"len({path})", len(value)
        for i, item in enumerate(value):
            yield from _flat(f"{path}[{i}]", item)
    elif isinstance(value, ModelOutput):
        yield from _flat(f"{path}.loss", value.loss)
        yield from _flat(f"{path}.logits", value.logits)
    elif isinstance(value, np.ndarray):
        yield path, torch.from_numpy(value)
    elif isinstance(value, float):
        yield path, torch.tensor(value, dtype=torch.float64)
    elif value is None or _tensor_like(value) or isinstance(value, (int, str, torch.dtype, tuple)):
        yield path, value


def observe(run: Run) -> dict[str, Any]:
    """Everything that a user can read when a program has ended, by the expression that reads it."""
    start = {*PRELUDE, *inputs(), "model", "__builtins__", "_"}
    actual: dict[str, Any] = {}
    for name, value in run.env.items():
        if name not in start:
            actual.update(_flat(name, value))
    for name, parameter in run.model.named_parameters():
        actual[f"grad of {name}"] = parameter.grad
    kinds: dict[str, Any] = {}
    for path, value in actual.items():
        if _tensor_like(value):
            kinds[path] = _attempt(_described, value)
    for path, observation in kinds.items():
        data = _attempt(_values, actual[path])
        actual[path] = Seen(
            (("error", observation),) if isinstance(observation, str) else observation, data
        )
    return actual


def _values(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        value = real_logits(value)
    plain: Tensor = value.detach()
    plain = plain.double() if plain.is_floating_point() else plain.long()
    # a copy that nothing shares; numpy reads what is there
    return torch.from_numpy(np.array(plain.numpy()))


def _attempt(function: Callable[[Any], Any], value: Any) -> Any:
    try:
        return function(value)
    except Exception as error:
        return describe(error)


def describe(error: BaseException) -> str:
    """The type of an error and how its message begins."""
    return f"{type(error).__name__}: {str(error).strip()[:300]}"
