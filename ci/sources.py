"""What a jitted kernel is made of: the text by which a change of its machine code is known."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import types
from typing import Any

import triton
from triton.runtime.jit import JITFunction


@functools.cache
def statements(source: str) -> str:
    """What a compiler makes of a jitted function's source: the statements without their words.

    A docstring, a comment or another line break changes no machine code, so it must not make a
    table stale whose compilation takes an hour.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def _meant(function: Any, used: str) -> Any:
    """What a name with dots is in a jitted function; None of Triton's own modules."""
    first, *rest = used.split(".")
    value = function.fn.__globals__.get(first)
    while isinstance(value, types.ModuleType):
        if not rest or not value.__name__.startswith("liger_multi"):
            return None
        value = getattr(value, rest.pop(0), None)
    return value


@functools.cache
def text_of(kernel: Any) -> str:
    """A kernel's statements, those of the package's functions that it calls, and its constants.

    The text is the same wherever their files stand.
    """
    parts: list[tuple[str, str, str]] = []
    known, left = {kernel}, [kernel]
    while left:
        function = left.pop()
        name, text = function.__name__, statements(function.src)
        parts.append((name, "", text))
        for used in set(re.findall(r"\b[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", text)):
            other = _meant(function, used)
            if isinstance(other, JITFunction) and other not in known:
                known.add(other)
                left.append(other)
            elif isinstance(other, triton.language.constexpr):
                parts.append((name, used, repr(other.value)))
            elif hasattr(other, "__triton_builtin__"):  # what the compiler runs itself
                parts.append((name, used, statements(inspect.getsource(other))))
    return repr(sorted(parts))
