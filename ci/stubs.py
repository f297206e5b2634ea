"""Signatures that type checkers and editors cannot read from the source.

``python -m ci.stubs`` writes ``liger_multi/nn/operator_losses.pyi`` from the generated modules, and
``liger_multi/ops/__init__.pyi``, where operators whose result has the type that an argument asks
for have an overload for every type. The suite wants the files to be what this writes.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from liger_multi import ops
from liger_multi.nn import operator_losses

# --- generated modules ---

PATH = Path(operator_losses.__file__).with_suffix(".pyi")
HEAD = '''\
"""{doc}"""
# written by `python -m ci.stubs`

import torch
from torch import Tensor, nn

from liger_multi import ops
from liger_multi.ops.fused_linear_log_prob import OUTPUTS
'''


def modules() -> list[type[nn.Module]]:
    """The generated modules, in the order of their file."""
    classes = [v for v in vars(operator_losses).values() if isinstance(v, type)]
    classes = [v for v in classes if v.__module__ == operator_losses.__name__]
    return [v for v in classes if issubclass(v, nn.Module)]


def _attributes(module: type[nn.Module]) -> list[str]:
    parameters = inspect.signature(module).parameters.values()
    return [f"    {p.name}: {p.annotation}" for p in parameters]


def _method(module: type[nn.Module], name: str) -> str:
    """A method without its body."""
    source = inspect.getsource(getattr(module, name))
    head = source[: source.index(":\n", source.index(") -> ")) + 1].replace("'", '"')
    doc = inspect.getdoc(getattr(module, name))
    return f'{head}\n        """{doc}"""\n' if name != "__init__" else f"{head} ...\n"


def stub() -> str:
    """The text of the file."""
    parts = [HEAD.format(doc=(inspect.getdoc(operator_losses) or "") + "\n")]
    for module in modules():
        doc = textwrap.indent(
            f'"""{inspect.getdoc(module)}\n"""', "    ", lambda line: line != "\n"
        )
        init, call = (_method(module, name) for name in ("__init__", "forward"))
        show = "    def extra_repr(self) -> str: ...\n"
        body = "\n".join([doc, "", *_attributes(module), "", init + call, show])
        parts.append(f"class {module.__name__}(nn.Module):\n{body}")
    return "\n".join(parts)


# --- operators ---

OPERATORS = Path(ops.__file__).with_suffix(".pyi")
OPERATORS_HEAD = """\
# written by `python -m ci.stubs`

from typing import Literal, overload

import torch
from typing_extensions import Unpack

"""

ASKED = {
    "quantize": ("None = ...", "str", "str | None"),
    "outputs": ("tuple[()] = ...", "tuple[str, Unpack[tuple[str, ...]]]", "tuple[str, ...]"),
    "output_final_state": ("Literal[False] = ...", "Literal[True]", "bool"),
    "return_quantized": ("Literal[False] = ...", "Literal[True]", "bool"),
    "output_weights": ("Literal[False] = ...", "Literal[True]", "bool"),
}
"""The types of what asks for more than a tensor: of nothing more, of more, and of either."""


def several(function: Callable[..., Any]) -> bool:
    """Whether the type of the result depends on an argument."""
    signature = inspect.signature(function)
    annotation = signature.return_annotation
    return isinstance(annotation, types.UnionType) and not ASKED.keys().isdisjoint(
        signature.parameters
    )


def overloads(function: Callable[..., Any]) -> str:
    """Three overloads: the usual result, the extended one, and one for a flag known at run time."""
    signature = inspect.signature(function)
    usual, more = map(_name, signature.return_annotation.__args__)
    parameters = list(signature.parameters.values())
    asks = next(p.name for p in parameters if p.name in ASKED)
    lines = [_parameter(p) for p in parameters if p.name != asks]
    lines.insert([p.kind for p in parameters].index(inspect.Parameter.KEYWORD_ONLY), "*")
    text = ""
    for literal, result in zip(ASKED[asks], (usual, more, f"{usual} | {more}"), strict=True):
        given = "".join(f"    {line},\n" for line in (*lines, f"{asks}: {literal}"))
        text += f"@overload\ndef {function.__name__}(\n{given}) -> {result}: ...\n"
    return text


def _name(annotation: Any) -> str:
    """A type as it is written where its operators are known."""
    ours = annotation.__module__.startswith("liger_multi.")
    return str(annotation.__name__) if ours else inspect.formatannotation(annotation)


def _parameter(parameter: inspect.Parameter) -> str:
    default = "" if parameter.default is parameter.empty else " = ..."
    annotation = re.sub(
        r"liger_multi\.ops\.\w+\.", "", inspect.formatannotation(parameter.annotation)
    )
    return f"{parameter.name}: {annotation}{default}"


def operators() -> str:
    """The text of the stub of ``liger_multi.ops``."""
    source = Path(ops.__file__).read_text(encoding="utf-8")
    imports = re.findall(r"^from [^(\n]+(?:\([^)]*\))?\n", source, re.M)
    functions = {name: getattr(ops, name) for name in ops.__all__}
    annotation = {n: f for n, f in functions.items() if inspect.isfunction(f) and several(f)}
    kept = [line for line in imports if re.findall(r"\w+", line)[-1] not in annotation]
    public = "".join(f'    "{name}",\n' for name in ops.__all__)
    return "".join(
        [
            OPERATORS_HEAD,
            *kept,
            f"\n__all__ = [\n{public}]\n\n",
            *map(overloads, annotation.values()),
        ]
    )


FILES = {PATH: stub, OPERATORS: operators}


def main() -> int:
    """Write the files."""
    for path, make in FILES.items():
        path.write_text(make(), encoding="utf-8")
        sys.stdout.write(f"wrote {path}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
