"""Random programs of what user code does to ``outputs.logits``, on stock and patched models.

A program is a list of statements that its seed determines, and is printed as the Python that runs.
Stock and patched run the same text, and are compared by public behavior alone: values, dtypes,
shapes, strides, ``requires_grad``, gradients and errors.

Modes: ``eager``; ``compiled``, where the model is compiled and the program is not; ``whole``, where
the model and the first statements of the program are compiled as one function.
"""

from __future__ import annotations

import random
import re
import string
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from fuzz_logits_compare import SAVES_LOGITS, UNCOUNTED, Fuzzer, Verdict
from fuzz_logits_run import MODELS, Program, code, inputs, models, statements
from fuzz_logits_steps import CE, CEP, CONTEXTS, EAGER_FORWARDS, FAMILIES, FORWARDS, NLL, PRELUDE, V
from torch import Tensor

from tests.models import FusedCalls

LIMITS = ("recompile_limit", "accumulated_recompile_limit")
"""Settings of the compiler, which gives up on a model that is called in many ways."""
EAGER_ONLY = r"is_tensor|mul_\(1\.25\)|checkpointed"
"""Logits of compiled models are no tensors, which a checkpoint would guard against writes, and
notice no changes of weights but optimizer steps (docs/logits.md)."""


class Generator:
    """Draws programs; runs them on stock as they grow, to know what fits.

    Args:
        seed: Of the program.
        mode: One of ``MODES``.
    """

    def __init__(self, seed: int, mode: str = "eager") -> None:
        self.random = random.Random(seed)
        self.mode = mode

    def program(self) -> Program:
        """The next program."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            while True:
                program = self._drawn()
                if program is not None:
                    return program

    def _drawn(self) -> Program | None:
        eager = self.mode == "eager"
        weights = [model.weight if eager else model.compiled for model in MODELS.values()]
        name = self.random.choices(list(MODELS), weights)[0]
        known, self.model = models(name), name
        known.reset(known.stock)
        self.env: dict[str, Any] = {**PRELUDE, **inputs(), "model": known.stock}
        self.start = set(self.env) | {"__builtins__", "_"}
        self.steps: list[str] = []
        self.fresh, self.graph, self.tracing = 0, 0, self.mode == "whole"
        # a forward of another kind is traced once more
        begin = [*FORWARDS, *EAGER_FORWARDS] if self.mode == "eager" else FORWARDS
        if self._take(self.random.choice(begin)):
            return None
        for _ in range(self.random.randint(3, 13)):
            failed = self._take(*self._statement())
            if failed and self.tracing:
                return None  # a compiled function ends with its first error
        self.tracing = False
        self._finish()
        if self.mode == "whole" and self.graph < 2:
            return None
        return Program(name, self.mode, tuple(self.steps), self.graph)

    def _take(self, text: str, graph: bool = True) -> bool:
        """Append statements and run them; whether one failed."""
        self.tracing = self.tracing and graph
        failed = False
        for step in statements(text):
            self.steps.append(step)
            try:
                exec(code(step), self.env)
            except Exception:
                failed = True
        if self.tracing:
            self.graph = len(self.steps)
        return failed

    def _statement(self) -> tuple[str, bool]:
        """A statement that fits, and whether it may be compiled."""
        families = list(FAMILIES.values())
        if self.tracing and self.random.random() < 0.85:
            families = [f for f in families if f.graph]
        while True:
            family = self.random.choices(families, [f.weight for f in families])[0]
            text = self._filled(self.random.choice(family.statements))
            if text is None or (self.mode != "eager" and re.search(EAGER_ONLY, text)):
                continue
            if self.model in SAVES_LOGITS and re.search(UNCOUNTED, text):
                continue
            graph = family.graph
            if not text.startswith("with ") and self.random.random() < 0.13:
                context = self.random.choice(CONTEXTS)
                text = "\n".join([context, textwrap.indent(text, "    ")])
                graph = graph and "inference" not in context
            return text, graph

    def _filled(self, template: str) -> str | None:
        """A statement with names in the place of its placeholders; None where nothing fits."""
        fillings: dict[str, str] = {}
        for _, name, _, _ in string.Formatter().parse(template):
            if name is not None and name not in fillings:
                value = self._placeholder(name, fillings)
                if value is None:
                    return None
                fillings[name] = value
        if "out" in re.findall(r"\bout\b(?!=)", template) and "out" not in self.env:
            return None
        return template.format(**fillings)

    def _placeholder(self, name: str, fillings: dict[str, str]) -> str | None:
        z = next((fillings[k] for k in ("z", "z2", "z3", "positive", "small") if k in fillings), "")
        if name == "new":
            self.fresh += 1
            return f"v{self.fresh}"
        if name in ("ce", "cep", "nll"):
            return self.random.choice({"ce": CE, "cep": CEP, "nll": NLL}[name]).replace("{z}", z)
        if name == "n":
            return self.random.choice(("0.5", "2.0", "1.3", "-0.7", "3"))
        if name in ("k", "c"):
            return str(self.random.randrange(10 if name == "k" else V))
        if name == "row":
            axes = range(self.env[z].ndim - 1)
            return (
                str(self.random.choice(axes) - self.random.choice((0, len(axes) + 1)))
                if axes
                else None
            )
        fits = [n for n, v in self.env.items() if n not in self.start and self._fits(name, v, z)]
        if "z" in fits and self.random.random() < 0.25:
            return "z"
        return self.random.choice(fits) if fits else None

    def _fits(self, name: str, value: Any, z: str) -> bool:
        """Whether a value may stand for a placeholder."""
        if not isinstance(value, Tensor) or not 0 < value.numel() <= 6000:
            return False
        if not value.is_floating_point():
            return False
        if name == "h":
            return not (value._is_view() and value._version)
        if name in ("x", "g", "l"):
            return name == "x" or (value.requires_grad and (name == "g" or value.ndim == 0))
        if value.ndim == 0 or value.ndim > 4 or value.shape[-1] != V:
            return False
        if name == "w":
            same: bool = value.shape == self.env[z].shape
            return same
        if name in ("z2", "z3"):
            return value.ndim == int(name[1]) and (name == "z2" or value.shape[1] > 2)
        if name == "positive":
            return float(value.detach().min()) > 1e-4
        return name == "z" or float(value.detach().max()) < 12

    def _finish(self) -> None:
        """A backward pass of some of the values."""
        fits = [
            n
            for n, v in self.env.items()
            if n not in self.start and self._fits("g", v, "") and bool(v.detach().isfinite().all())
        ]
        scalars = [n for n in fits if self.env[n].ndim == 0]
        chosen = self.random.sample(scalars, min(len(scalars), 2))
        rest = [n for n in fits if n not in chosen]
        chosen += self.random.sample(rest, min(len(rest), 1 if chosen else 2))
        terms = [
            f"{self.random.choice((0.5, 1.3, -0.7))} * "
            + (n if self.env[n].ndim == 0 else f"{n}.{self.random.choice(('sum()', 'mean()'))}")
            for n in chosen
        ]
        if terms:
            self._take(f"total = {' + '.join(terms)}\ntotal.backward()", graph=False)


def programs(seed: int, count: int, mode: str = "eager", start: int = 0) -> Iterator[Program]:
    """The programs of a seed."""
    for i in range(start, start + count):
        yield Generator(seed * 1_000_003 + i, mode).program()


def run(
    seed: int, count: int, mode: str = "eager", start: int = 0, fused: FusedCalls | None = None
) -> Iterator[tuple[Program, Verdict]]:
    """Judge the programs of a seed."""
    fuzzer = Fuzzer(fused)
    for at, program in enumerate(programs(seed, count, mode, start)):
        yield program, fuzzer.judge(program)
        if mode == "whole" and at % 20 == 19:
            torch._dynamo.reset()


def report(program: Program, verdict: Verdict) -> str:
    """A failure with the program that shows it."""
    return f"{verdict.topic}\n{textwrap.indent(verdict.why, '  ')}\n{program}\n"
