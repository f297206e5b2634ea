"""Random programs of what user code does to ``outputs.logits``, on stock and patched models.

A program is a list of statements that its seed determines, and is printed as the Python that runs.
Stock and patched run the same text, and are compared by public behavior alone: values, dtypes,
shapes, strides, ``requires_grad``, gradients and errors.

Modes: ``eager``; ``compiled``, where the model is compiled and the program is not; ``whole``, where
the model and the first statements of the program are compiled as one function.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import pickle
import random
import re
import string
import textwrap
import traceback
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from fuzz_logits_run import (
    MODELS,
    Program,
    Run,
    Seen,
    code,
    describe,
    execute,
    inputs,
    models,
    observe,
    statements,
)
from fuzz_logits_steps import CE, CEP, CONTEXTS, EAGER_FORWARDS, FAMILIES, FORWARDS, NLL, PRELUDE, V
from torch import Tensor

from tests.models import FusedCalls

# --- judging a program: stock and patched, by what their user sees ---

FP32, LOW = 2e-5, 2.0**-7
"""Allowed differences relative to the largest entry (in gradients: of the whole model's), and in
low precision relative to the norm of the exact values."""
REFUSALS = {
    "gradient by logits": (
        r"gradient by logits that were not computed",
        r"autograd\.grad|retain_grad|\.grad\b",
    ),
    "weights changed": (
        r"not computed during the forward pass, and its head's (weights|bias)",
        r"\.mul_\(1\.25\)|\.step\(\)",
    ),
    "hook after the loss": (
        r"hook.*(after|already).*loss|loss.*(was|already).*hook",
        r"hook|retain_grad|\.grad\b",
    ),
    "double backward": (r"has first derivatives only", "create_graph"),
    "logits written in a function": (
        r"autograd\.Function got logits that were not computed",
        r"\.apply\(",
    ),
    "logits that became real": (
        r"Recomputed values .*different metadata|different number of tensors was saved",
        "checkpointed",
    ),
    "view made in C++": (
        r"C\+\+ makes a view of logits",
        r"as_subclass|Parameter|_make_subclass|inference_mode\(\):\n\s+torch\.as_tensor",
    ),
    "write below the protocol": (r"writes to logits that were not computed", r"\.set_\("),
    "object in a function": (r"logits of a compiled model are no tensor", r"\.apply\("),
    "export of a compiled model's logits": (
        r"Can't export tensors that require gradient",
        "as_tensor|asarray|dlpack",
    ),
    "compiler and a view of several results": (
        r"is the output of a function that returns multiple views",
        r"unbind|split|chunk|for .* in ",
    ),
    "compiler and create_graph": (r"compiled with non-empty donated buffers", "create_graph"),
}
"""Errors of ours that stock does not raise, and that may end a program: their messages, and what
the program has to do for them."""
SAVED = (
    r"modified by an inplace operation",
    r"_\(|_foreach|out=|inplace|numpy|\.data|\] = |\*=|/=|\+=|-=",
)
SAVES_LOGITS = ("on_real", "with_loss")
UNCOUNTED = r"\.data\b|numpy|asarray|dlpack|storage"
"""Our cross entropy of real logits saves the logits, stock's their log-softmax. So a write between
the loss and its backward raises in ours; one that autograd does not notice is not tried there."""
LENIENT = {
    "saved tensor written": r"modified by an inplace operation",
    "view of rows with gaps": r"view size is not compatible",
    "view that autograd refuses": r"its base or another view of its base has been modified inplace"
    r"|is a view and is being modified inplace",
}
"""Errors of stock in whose place we may return values. They are compared with those of stock that
keeps what it saved for backward, or that copies where a view cannot be. PyTorch refuses views whose
history it cannot tell (of several results, or made without gradients) once their base was written;
there the program ends, and what was there before is compared."""


@dataclass(frozen=True)
class Verdict:
    """What became of a program.

    Attributes:
        outcome: "equal", "refused" (by one of our own messages), "lenient" (equal where stock
            raises), "compiler" (equal to compiled stock alone), or "failed".
        why: What differs.
        topic: The same in few words, for counting.
        fused: Calls of the fused loss.
        finite: Whether gradients are finite numbers, and there are some.
    """

    outcome: str
    why: str = ""
    topic: str = ""
    fused: int = 0
    finite: bool = True


def refusal(message: str, program: Program) -> str:
    """Which of our own errors a message is; empty when it is none that the program may meet."""
    text = "\n".join(program.steps)
    saved = {"logits saved by the loss": SAVED} if program.model in SAVES_LOGITS else {}
    for name, (pattern, asked) in (REFUSALS | saved).items():
        if re.search(pattern, message, re.DOTALL):
            return name if re.search(asked, text) else ""
    return ""


class Comparison:
    """Compares what two runs left, with the resolution that rounding allows.

    Args:
        program: Both ran it.
        reference: How to run it on stock, with a relative error of its weights.
        exact: How to run it in fp64.
    """

    def __init__(
        self,
        program: Program,
        reference: Callable[[float], dict[str, Any]],
        exact: Callable[[], dict[str, Any]],
    ) -> None:
        self.program, self.reference, self.exact_run = program, reference, exact
        self.stock = reference(0.0)

    @functools.cached_property
    def nudged(self) -> list[dict[str, Any]]:
        """What stock leaves when its weights are off by about one rounding."""
        size = 2.0**-9 if self.program.low else 2.0**-21
        return [self.reference(size * s) for s in (1.0, -0.77, 0.9)]

    @functools.cached_property
    def exact(self) -> dict[str, Any]:
        """What the model in fp64 leaves."""
        return self.exact_run()

    @functools.cached_property
    def largest(self) -> float:
        """The largest entry of any gradient."""
        return max(
            [_size(v.data) for k, v in self.stock.items() if _is_gradient(k, v)], default=0.0
        )

    def differences(self, ours: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Topics and descriptions of what differs."""
        for path in [*self.stock, *(k for k in ours if k not in self.stock)]:
            missing = [side for side, d in (("stock", self.stock), ("ours", ours)) if path not in d]
            if missing:
                yield "missing", f"{path} is missing in {missing[0]}"
                continue
            a, b = self.stock[path], ours[path]
            if isinstance(a, Seen) != isinstance(b, Seen):
                yield self._topic(path, "none"), f"{path}: stock {_short(a)}, ours {_short(b)}"
            elif not isinstance(a, Seen):
                if a != b and not any(n.get(path) != a for n in self.nudged):
                    yield "value", f"{path}: stock {a!r}, ours {b!r}"
            else:
                yield from self._of_tensors(path, a, b)

    def _topic(self, path: str, difference: str) -> str:
        return f"{difference} of gradient" if path.startswith("grad of") else difference

    def _of_tensors(self, path: str, a: Seen, b: Seen) -> Iterator[tuple[str, str]]:
        if isinstance(a.data, str) or isinstance(b.data, str):
            known = LENIENT["view that autograd refuses"]
            if isinstance(a.data, str) and (isinstance(b.data, str) or re.search(known, a.data)):
                return
            yield "error on reading", f"{path}: stock {_short(a)}, ours {_short(b)}"
            return
        if a.description[0][0] == "error" and re.search(
            LENIENT["view that autograd refuses"], a.description[0][1]
        ):
            return
        for (name, expected), (_, got) in zip(a.description, b.description, strict=False):
            if expected != got:
                yield self._topic(path, name), f"{path}: {name} {expected} in stock, {got} in ours"
                if name == "shape":
                    return
        if a.read().shape != b.read().shape:
            yield "shape", f"{path}: values of shape {a.read().shape}, {b.read().shape} in ours"
        elif a.description[0][0] == b.description[0][0] and not self._near(
            path, a.read(), b.read()
        ):
            off = (a.read().double() - b.read().double()).abs().nan_to_num(posinf=0)
            size = _size(a.data)
            yield (
                self._topic(path, "values"),
                (
                    f"{path}: off by {float(off.max()):.3g} of {size:.3g} in "
                    f"{int((off > FP32 * size).sum())} of {off.numel()} entries"
                ),
            )

    def _near(self, path: str, a: Tensor, b: Tensor) -> bool:
        """Whether two tensors agree within what rounding explains."""
        scale = self.largest if path.startswith("grad of") else _size(a)
        if not a.is_floating_point():
            return torch.equal(a, b) or self._ambiguous(path, a, b)
        if torch.equal(torch.isfinite(a), torch.isfinite(b)):
            off = torch.where(torch.isfinite(a), a - b, 0.0).abs()
            if not off.numel() or float(off.max()) <= FP32 * scale + 1e-12:
                return torch.equal(_signs(a), _signs(b))
        return self._resolved(path, a, b)

    def _ambiguous(self, path: str, a: Tensor, b: Tensor) -> bool:
        """Whether integers differ no more than roundings change them."""
        share = float((a != b).double().mean())
        changes = [float((a != n).double().mean()) for n in self._others(path, a)]
        return share <= max([2 * c for c in changes] + [0.3 if self.program.low else 0.0])

    def _others(self, path: str, like: Tensor) -> list[Tensor]:
        actual = [n.get(path) for n in self.nudged]
        return [
            n.data
            for n in actual
            if isinstance(n, Seen) and isinstance(n.data, Tensor) and n.data.shape == like.shape
        ]

    def _resolved(self, path: str, a: Tensor, b: Tensor) -> bool:
        """Whether ours is as near to the truth as stock is, by norm."""
        others = self._others(path, a)
        spread = max([float(_finite(a - n).norm()) for n in others], default=0.0)
        if not self.program.low:
            changed = any(not torch.equal(_signs(a), _signs(n)) for n in others)
            same = torch.equal(_signs(a), _signs(b))
            return (same or changed) and float(_finite(a - b).norm()) <= 10 * spread
        exact = self.exact.get(path)
        if not isinstance(exact, Seen) or not isinstance(exact.data, Tensor):
            exact_data = a  # what is rounded on purpose may not run in fp64
        else:
            exact_data = exact.data
        error, allowed = (float(_finite(x - exact_data).norm()) for x in (b, a))
        whole = self.largest if path.startswith("grad of") else 0.0
        bound = 2 * allowed + 2 * spread + LOW * (float(_finite(exact_data).norm()) + whole)
        return error <= bound + 1e-9


def _is_gradient(path: str, value: Any) -> bool:
    return path.startswith("grad of") and isinstance(value, Seen) and isinstance(value.data, Tensor)


def _finite(values: Tensor) -> Tensor:
    return values.nan_to_num(0.0, 0.0, 0.0)


def _signs(values: Tensor) -> Tensor:
    """What is no finite number: 1 and 2 for the infinities, 3 for NaN."""
    return values.isposinf() + 2 * values.isneginf() + 3 * values.isnan()


def _size(values: Any) -> float:
    if not isinstance(values, Tensor) or not values.numel():
        return 0.0
    return float(_finite(values.double()).abs().max())


def _short(value: Any) -> str:
    if isinstance(value, Seen):
        return value.data if isinstance(value.data, str) else f"a tensor {value.description[0][1]}"
    return repr(value)


class Fuzzer:
    """Judges programs.

    Args:
        fused: Counts the calls of the fused loss.
    """

    def __init__(self, fused: FusedCalls | None = None) -> None:
        self.fused = fused

    def judge(self, program: Program) -> Verdict:
        """Run a program on stock and patched, and compare.

        Eager programs run in a fork: what has no storage may end the process.
        """
        models(program.model)  # made once, here
        if program.mode == "eager" and not torch.cuda.is_available():
            return _isolated(lambda: self._judged(program))
        return self._judged(program)

    def _judged(self, program: Program) -> Verdict:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stock = models(program.model).stock
            verdict = self._against(program, functools.partial(execute, model=stock))
            if verdict.outcome == "failed" and program.mode != "eager":
                again = functools.partial(execute, model=stock, compiled=True)
                if self._against(program, again).outcome != "failed":
                    return replace(verdict, outcome="compiler")
        return verdict

    def _against(self, program: Program, reference: Callable[..., Run]) -> Verdict:
        model = models(program.model)
        calls = self.fused.count if self.fused else 0
        outcome, topic, same = "equal", "", contextlib.nullcontext
        expected = reference(program)
        run = execute(program, model.ours, compiled=True, expected=expected.errors)
        at = _first_difference(expected, run)
        if at is not None and at in expected.errors:
            lenient = _leniency(program, at, expected.errors[at])
            if lenient is not None:
                outcome, (topic, program, same) = "lenient", lenient
                with same():
                    expected = reference(program)
                run = execute(program, model.ours, compiled=True, expected=expected.errors)
                at = _first_difference(expected, run)
            if at is not None and at in expected.errors:
                why = f"stock raises {describe(expected.errors[at])}, ours does not"
                return Verdict("failed", f"{program.steps[at]!r}: {why}", "stock raises")
        if at is not None:
            refused = refusal(str(run.errors[at]), program)
            if not refused:
                why = f"ours raises {describe(run.errors[at])}, stock does not"
                return Verdict("failed", f"{program.steps[at]!r}: {why}", "ours raises")
            if at < program.graph:  # the graph is one statement, and the first
                return Verdict("refused", "", refused)
            # what was there until then is compared, without the first half of the statement
            program = replace(program, steps=program.steps[:at])
            outcome, topic = "refused", refused
            run = execute(program, model.ours, compiled=True)
        fused = self.fused.count - calls if self.fused else 0
        observed = observe(run)

        if outcome == "refused":
            with same():
                expected = reference(program)

        def left(nudge: float) -> dict[str, Any]:
            with same():
                return observe(reference(program, nudge=nudge) if nudge else expected)

        def left_of_kept(nudge: float) -> dict[str, Any]:
            with same(), _kept():
                return observe(reference(program, nudge=nudge))

        exact = functools.cache(lambda: observe(execute(program, model.exact)))
        comparison = Comparison(program, left, exact)
        differences = []
        for subject, why in comparison.differences(observed):
            if subject == "error on reading" and (known := refusal(why, program)):
                outcome, topic = "refused", known
            else:
                differences.append((subject, why))
        of_gradients = {subject for subject, _ in differences} == {"values of gradient"}
        if of_gradients and not list(
            Comparison(program, left_of_kept, exact).differences(observed)
        ):
            outcome, topic, differences = "lenient", "overwritten, and not noticed", []
        if differences:
            topics = ", ".join(sorted({subject for subject, _ in differences}))
            return Verdict("failed", "\n".join(why for _, why in differences[:8]), topics, fused)
        sizes = [v.read() for k, v in comparison.stock.items() if _is_gradient(k, v)]
        finite = bool(sizes) and all(bool(s.isfinite().all()) for s in sizes)
        return Verdict(outcome, "", topic, fused, finite)


def _first_difference(stock: Run, ours: Run) -> int | None:
    """The first statement that only one of two runs refused."""
    return (
        min(stock.errors.keys() ^ ours.errors.keys(), default=None)
        if (stock.errors.keys() != ours.errors.keys())
        else None
    )


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """PyTorch computes gradients from what was there when the operation ran.

    It keeps memory, and checkpoints the input, which may be written to where it does not notice.
    """
    plain = {"checkpointed": lambda function, z, reentrant=False: function(z)}
    copies = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)
    with unittest.mock.patch.dict(PRELUDE, plain), copies:
        yield


def _leniency(program: Program, at: int, error: BaseException) -> Any:
    """Name, program and context of stock that gives values in the place of an error, or None."""
    name = next((n for n, pattern in LENIENT.items() if re.search(pattern, str(error))), "")
    steps = list(program.steps)
    if name == "saved tensor written":
        return name, program, torch.autograd.graph.allow_mutation_on_saved_tensors
    if name == "view of rows with gaps":
        steps[at] = re.sub(r"\.view\(", ".reshape(", steps[at])
        return name, replace(program, steps=tuple(steps)), contextlib.nullcontext
    if name:
        return name, replace(program, steps=tuple(steps[:at])), contextlib.nullcontext
    return None


def _isolated(judge: Callable[[], Verdict]) -> Verdict:
    """The verdict of a fork, which may crash.

    Raises:
        RuntimeError: Autograd has started a thread in this process, so no fork of it can
            differentiate, and all programs would be equal.
    """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        faulthandler.disable()
        torch.set_num_threads(1)  # those of OpenMP do not outlive a fork
        try:
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(_unforkable() or judge(), pipe)
        except BaseException:
            traceback.print_exc()  # a mistake of ours, or of what reads results
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        sent = pipe.read()
    _, status = os.waitpid(child, 0)
    if not sent:
        return Verdict("failed", f"the process ended with status {status}", "crash")
    actual = pickle.loads(sent)
    if isinstance(actual, RuntimeError):
        raise actual
    return actual  # type: ignore[no-any-return]


def _unforkable() -> RuntimeError | None:
    """Why a fork cannot differentiate."""
    try:
        torch.ones(1, requires_grad=True).sum().backward()
    except RuntimeError as error:
        return error
    return None


# --- drawing programs ---

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
            if self._take(*self._statement()) and self.tracing:
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
