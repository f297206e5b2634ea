"""What the modules share: numbers of a constructor, and losses made from their operator.

A loss module is made from the signature of its operator, as a dataclass is from its fields. The
operator's keyword options are what the constructor takes, checks and keeps; its other arguments are
those of the call. The source of ``__init__`` and ``forward`` is generated and compiled once, so a
call costs what a method written by hand costs. ``python -m ci.stubs`` writes the same signatures
and docstrings for editors and type checkers.
"""

from __future__ import annotations

import importlib
import inspect
import linecache
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from liger_multi import checks, ops
from liger_multi.ops import _head as head
from liger_multi.ops._divergence import FORMS, REDUCTIONS
from liger_multi.ops._divergence_head import VOCABULARIES


def size(module: str, name: str, value: object) -> int:
    """A number of features."""
    number = checks.integer(module, name, value)
    if number < 1:
        raise ValueError(f"{module}: {name} must be at least 1, got {number}")
    return number


def fits(module: nn.Module, x: Tensor, width: int) -> None:
    """The last axis of an input has the width of the module, also where no weight says so."""
    if not isinstance(x, Tensor) or x.ndim == 0 or x.shape[-1] != width:
        raise ValueError(
            f"{type(module).__name__}: the last axis of the input must be {width}, "
            f"got {checks.describe(x)}"
        )


def changed(module: nn.Module) -> str:
    """The arguments of the constructor that are not at their defaults, as it takes them."""
    found = []
    for name, parameter in inspect.signature(type(module)).parameters.items():
        value = getattr(module, name, parameter.default)
        shown = parameter.default is not parameter.empty and not isinstance(value, Tensor)
        if shown and value != parameter.default:
            found.append(f"{name}={value!r}")
    return ", ".join(found)


# --- modules from operators ---

Loss = TypeVar("Loss", bound=type[nn.Module])
Check = Callable[[str, str, Any], object]


def _above_zero(module: str, name: str, value: Any) -> None:
    checks.number(module, name, value, 0.0, above=True)


# by the name of an option; None passes where its type allows it
CHECKS: dict[str, Check] = {
    "accumulate": lambda module, _, value: head.accumulator(module, value),
    "beta": lambda module, name, value: checks.number(module, name, value, 0.0, 1.0),
    "chunk": lambda module, _, value: head.rows_and_budget(module, value),
    "class_weight": lambda module, name, value: checks.floating(module, **{name: value}),
    "compact": checks.boolean,
    "form": lambda module, name, value: checks.one_of(module, name, value, FORMS),
    "ignore_index": checks.integer,
    "label_smoothing": lambda module, name, value: checks.number(module, name, value, 0.0, 1.0),
    "logit_scale": checks.number,
    "reduction": lambda module, name, value: checks.one_of(module, name, value, REDUCTIONS),
    "softcap": _above_zero,
    "square_temperature": checks.boolean,
    "teacher_form": lambda module, name, value: checks.one_of(module, name, value, FORMS),
    "temperature": _above_zero,
    "validate": checks.boolean,
    "vocabulary": lambda module, name, value: checks.one_of(module, name, value, VOCABULARIES),
    "z_loss": lambda module, name, value: checks.number(module, name, value, 0.0),
}


def from_operator(
    name: str, call: str, *, positional: str = "", without: str = ""
) -> Callable[[Loss], Loss]:
    """Give a class the constructor and the call of an operator.

    Args:
        name: Of the operator. The signature is that of its contract, even where a caller has put
            another function into :mod:`liger_multi.ops`.
        call: Docstring of ``forward``.
        positional: Options that the constructor takes by position, in their order.
        without: Options that it does not take.
    """
    contract = importlib.import_module(f"liger_multi.ops.{name}")
    signature = inspect.signature(getattr(contract, name))
    given, outputs = signature.parameters, getattr(contract, "OUTPUTS", ())
    first = positional.split()
    later = [n for n, p in given.items() if p.kind is p.KEYWORD_ONLY]
    options = [*first, *(n for n in later if n not in (*first, *without.split()))]
    tensors = [n for n, p in given.items() if p.kind is not p.KEYWORD_ONLY]

    def keep(module: nn.Module, values: dict[str, Any]) -> None:
        """Check the options, and make them attributes; a tensor is a buffer."""
        super(made[0], module).__init__()
        kind = type(module).__name__
        for option, value in values.items():
            if value is None and "None" in str(given[option].annotation):
                pass
            elif option == "outputs":
                checks.names(kind, value, outputs)
                value = tuple(value)
            else:
                CHECKS[option](kind, option, value)
            if "Tensor" in str(given[option].annotation):
                module.register_buffer(option, value)
            else:
                setattr(module, option, value)

    made: list[Any] = []
    text = {n: _text(p, outputs) for n, p in given.items()}
    star = ["*"] * (len(options) > len(first))
    last = [text[n] for n in options[len(first) :]]
    values = ", ".join(f"{n!r}: {n}" for n in options)
    init = _source(
        "__init__", [*(text[n] for n in first), *star, *last], "None", f"_keep(self, {{{values}}})"
    )
    arguments = ", ".join([*tensors, *(f"{n}=self.{n}" for n in options)])
    forward = _source(
        "forward", [text[n] for n in tensors],
        annotation(signature.return_annotation),
        f'"""{call}"""', f"return ops.{name}({arguments})",
    )  # fmt: skip

    def finish(cls: Loss) -> Loss:
        made.append(cls)
        for method, source in (("__init__", init), ("forward", forward)):
            setattr(cls, method, _compiled(cls, method, source, _keep=keep, OUTPUTS=outputs))
        cls.extra_repr = extra_repr  # type: ignore[method-assign]
        return cls

    return finish


def extra_repr(self: nn.Module) -> str:
    """What was chosen."""
    return changed(self)


def annotation(kind: Any) -> str:
    """A type as modules of this package write it."""
    text = inspect.formatannotation(kind).replace("torch.Tensor", "Tensor")
    return re.sub(r"\bliger_multi\.ops\.\w+\.", "ops.", text)


def _text(parameter: inspect.Parameter, outputs: object) -> str:
    default = "OUTPUTS" if parameter.default is outputs else repr(parameter.default)
    given = "" if parameter.default is parameter.empty else f" = {default}"
    return f"{parameter.name}: {annotation(parameter.annotation)}{given}"


def _source(name: str, parameters: list[str], returns: str, *body: str) -> str:
    """The source of a method, laid out as the formatter would."""
    every = ["self", *parameters]
    line = f"    def {name}({', '.join(every)}) -> {returns}:"
    if len(line) > 100:
        rows = "".join(f"        {parameter},\n" for parameter in every)
        line = f"    def {name}(\n{rows}    ) -> {returns}:"
    return "".join(f"{row}\n" for row in (line, *(f"        {row}" for row in body)))


def _compiled(cls: type, name: str, source: str, **names: Any) -> Any:
    """A method from its source, which debuggers and :mod:`inspect` find."""
    file = f"<{cls.__module__}.{cls.__name__}.{name}>"
    text = f"from __future__ import annotations\nclass {cls.__name__}:\n{source}"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space = {"__name__": cls.__module__, "torch": torch, "Tensor": Tensor, "ops": ops, **names}
    exec(compile(text, file, "exec"), space)
    return vars(space[cls.__name__])[name]
