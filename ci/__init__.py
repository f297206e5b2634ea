"""What continuous integration runs.

Here stand the helpers of the workflow and the checks; :mod:`ci.docs` makes pages, :mod:`ci.static`
compiles every kernel for eight GPUs and keeps what it costs in ``baseline.txt``, :mod:`ci.npu`
simulates Ascend, ``docker/`` has the images and ``constraints/`` the versions. What measures stands
in :mod:`benchmarks`.
"""

from __future__ import annotations

import ast
import functools


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
