"""What a compiler makes of a jitted function's source: the statements without their words.

A docstring, a comment or another line break changes no machine code, so it must not make a table
stale whose compilation takes an hour.
"""

from __future__ import annotations

import ast
import functools


@functools.cache
def statements(source: str) -> str:
    """A function's source without docstrings, comments and formatting."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)
