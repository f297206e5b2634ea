"""Docstrings and signatures as Markdown."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.tables import table

HEADING = re.compile(r"^([A-Z][A-Za-z ]*):$", re.MULTILINE)
ITEM = re.compile(r"^(\w+): ", re.MULTILINE)


def sections(documented: Any) -> dict[str, str]:
    """A docstring's sections by heading; the summary stands under the empty name."""
    parts = ["", *HEADING.split(inspect.getdoc(documented) or "")]
    return {
        heading: textwrap.dedent(body.strip("\n")).strip()
        for heading, body in zip(parts[::2], parts[1::2], strict=True)
    }


def summary(text: dict[str, str]) -> str:
    """The first paragraph of a docstring's sections in one line, as a cell of a table wants it."""
    return " ".join(text[""].partition("\n\n")[0].split())


def arguments(documented: Any) -> dict[str, str]:
    """What a docstring says of every argument."""
    parts = ITEM.split(sections(documented)["Args"])[1:]
    return {n: " ".join(t.split()) for n, t in zip(parts[::2], parts[1::2], strict=True)}


def listed(section: str) -> str:
    """A section of arguments or errors as a list."""
    return markdown(ITEM.sub(r"- \1: ", section))


def signature(function: Callable[..., Any]) -> str:
    """The call as the source writes it, one argument a line."""
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef)
    parameters = re.sub(r", (?=\w+: |\*)", ",\n    ", ast.unparse(node.args))
    parameters = re.sub(r"(: [^=\n]+)=", r"\1 = ", parameters)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}(\n    {parameters},\n){returns}"


def markdown(text: str) -> str:
    """Docstring text as Markdown: code marks, and references by their last name."""
    text = re.sub(r":\w+:`~?([^`]*)`", lambda match: f"`{match[1].rpartition('.')[2]}`", text)
    return text.replace("``", "`")


def text_table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown whose cells are text of docstrings."""
    return table(heads, [[markdown(c).replace("|", "\\|") for c in line] for line in lines])
