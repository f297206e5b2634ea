"""Signatures and docstrings of generated modules, for editors and type checkers.

``python -m ci.stubs`` writes ``liger_multi/nn/operator_losses.pyi`` from the modules.
The suite wants the file to be what this writes.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from pathlib import Path

from torch import nn

from liger_multi.nn import operator_losses

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
    found = [v for v in vars(operator_losses).values() if isinstance(v, type)]
    found = [v for v in found if v.__module__ == operator_losses.__name__]
    return [v for v in found if issubclass(v, nn.Module)]


def _attributes(module: type[nn.Module]) -> list[str]:
    given = inspect.signature(module).parameters.values()
    return [f"    {p.name}: {p.annotation}" for p in given]


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


def main() -> int:
    """Write the file."""
    PATH.write_text(stub(), encoding="utf-8")
    sys.stdout.write(f"wrote {PATH}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
