"""Who may import whom, how long functions may be, what is explained: ``python -m ci.layering``.

Reads the sources as syntax trees and imports nothing. Every rule is one function from the tree of
files to findings; ``tests/tools/test_layering.py`` plants a violation of each.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

FOLDERS = {
    "liger_multi": "liger_multi",
    "backends": "liger_multi.backends",
    "reference": "liger_multi.reference",
}
SHARED_BACKENDS = ("triton",)  # layers that vendors inherit from, no vendors themselves
# Parts of the package, lowest first. A file beside them belongs to the base. A dotted name is a
# module with a layer of its own: contracts are made of samples.
LAYERS = (
    ("base", "testing.samples"),
    ("dispatch",),
    ("ops",),
    ("nn", "losses", "memory", "testing"),
    ("patching",),
    ("compat", "integrations"),
    ("bench", "cli", "demo", "__main__", "__init__"),
)
LAZY = (
    "triton",
    "transformers",
    "rich",
    "torch_npu",
    "matplotlib",
    "tokenizers",
    "accelerate",
    "peft",
    "datasets",
    "trl",
    "kernels",
    "lightning",
    "pytorch_lightning",
    "pytest",
)
LAZY_EXEMPT = ("patching", "integrations", "bench", "cli", "demo", "testing.suite")
PRINTERS = ("cli", "demo")
VENDOR_WORDS = re.compile(
    r"is_hip|torch\.version\.hip|torch_npu|\bgfx\d+|\bsm_?\d\d|is_npu|\bnpu\b|\bis_rocm\b",
    re.IGNORECASE,
)
FUNCTION_LINES = 80
PRIVATE = "liger_multi._torch_private"  # the one module that names private symbols of PyTorch
PRIVATE_PATH = re.compile(r"torch(\.\w+)*\._(?!_)\w+(\.\w+)*")


class Finding(NamedTuple):
    """One broken rule, at a place."""

    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


class Import(NamedTuple):
    """One imported module; ``eager`` when importing the file imports it.

    Attributes:
        names: What ``from module import names`` takes from it; each may be a module as well, and
            then follows as an import of its own.
    """

    module: str
    line: int
    eager: bool
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class File:
    """One source file of the package."""

    path: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.source, self.path)

    @property
    def module(self) -> str:
        """Its import name."""
        folder, _, rest = self.path.removesuffix(".py").partition("/")
        parts = [FOLDERS[folder], *rest.split("/")]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def part(self) -> str:
        """The part of the package it belongs to: a folder's or a machinery module's name."""
        return self.module.split(".")[1] if "." in self.module else "__init__"

    @property
    def room(self) -> str:
        """The part and the name below it, as in ``testing.samples``."""
        return ".".join(self.module.split(".")[1:3])

    @property
    def vendor(self) -> str | None:
        """The folder below ``backends/``, if it stands in one."""
        return (
            self.path.split("/")[1]
            if self.path.startswith("backends/") and self.path.count("/") > 1
            else None
        )

    @cached_property
    def imports(self) -> list[Import]:
        """Every import, except those for type checkers only."""
        return list(_imports(self.tree, True))


def _imports(node: ast.AST, eager: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(name.name, child.lineno, eager) for name in child.names)
        elif isinstance(child, ast.ImportFrom):
            names = tuple(name.name for name in child.names)
            yield Import(child.module or "", child.lineno, eager, names)
            for name in child.names:  # `from package import module` imports the module
                yield Import(f"{child.module}.{name.name}", child.lineno, eager)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from _imports(other, eager)
        else:
            lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, eager and not lazy)


class Tree:
    """All source files below a checkout's three folders."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: list[File] = []
        for folder in FOLDERS:
            for path in sorted((root / folder).rglob("*.py")):
                relative = path.relative_to(root)
                if not any((root / p).is_symlink() for p in relative.parents):
                    self.files.append(File(relative.as_posix(), path.read_text(encoding="utf-8")))
        self.modules = {f.module: f for f in self.files}

    def of(self, folder: str) -> list[File]:
        """The files below one of the three folders."""
        return [f for f in self.files if f.path.startswith(folder + "/")]

    def target(self, name: str) -> File | None:
        """The file that an import name stands for."""
        return self.modules.get(name)


def _within(module: str, *packages: str) -> bool:
    return any(module == p or module.startswith(p + ".") for p in packages)


def _layer(file: File) -> int:
    layers = {name: number for number, names in enumerate(LAYERS) for name in names}
    return layers.get(file.room, layers.get(file.part, 0))


def downwards(tree: Tree) -> Iterator[Finding]:
    """Parts of the package import what stands below them; only a function may look up."""
    for file in tree.of("liger_multi"):
        for found in file.imports:
            target = tree.target(found.module)
            if target is None or not found.eager or target.module == "liger_multi":
                continue
            if _within(target.module, "liger_multi.backends", "liger_multi.reference"):
                yield Finding(
                    file.path,
                    found.line,
                    "layer",
                    f"imports {target.module}; backends are found by path",
                )
                continue
            if _layer(target) > _layer(file):
                yield Finding(
                    file.path, found.line, "layer", f"{file.module} stands below {target.module}"
                )


def acyclic(tree: Tree) -> Iterator[Finding]:
    """No module imports itself through others, imports inside functions counted."""

    def names_modules(found: Import) -> bool:
        return bool(found.names) and all(f"{found.module}.{n}" in tree.modules for n in found.names)

    edges = {
        f.module: sorted({i.module for i in f.imports if tree.target(i.module) is not f})
        for f in tree.files
    }
    for f in tree.files:
        packages = {i.module for i in f.imports if names_modules(i)}
        packages -= {i.module for i in f.imports if not names_modules(i)}
        edges[f.module] = [m for m in edges[f.module] if m in tree.modules and m not in packages]
    state: dict[str, int] = {}

    def visit(module: str, trail: list[str]) -> Iterator[Finding]:
        state[module] = 1
        for other in edges[module]:
            if state.get(other) == 1:
                loop = [*trail[trail.index(other) :], other]
                yield Finding(tree.modules[module].path, 1, "cycle", " -> ".join(loop))
            elif other not in state:
                yield from visit(other, [*trail, other])
        state[module] = 2

    for module in edges:
        if module not in state:
            yield from visit(module, [module])


def reference_alone(tree: Tree) -> Iterator[Finding]:
    """The reference imports torch and itself; its package file also the record it declares."""
    for file in tree.of("reference"):
        for found in file.imports:
            top = found.module.partition(".")[0]
            allowed = top in sys.stdlib_module_names or top in ("torch", "__future__")
            allowed = allowed or _within(found.module, "liger_multi.reference", PRIVATE)
            allowed = allowed or (
                file.module == FOLDERS["reference"]
                and _within(found.module, "liger_multi.dispatch.backend")
            )
            if not allowed:
                yield Finding(
                    file.path, found.line, "reference", f"imports {found.module}; torch only"
                )


def vendors_apart(tree: Tree) -> Iterator[Finding]:
    """A backend imports its folder, the shared layers, the reference and launch machinery."""
    for file in tree.of("backends"):
        folders = (file.vendor, *(SHARED_BACKENDS if file.vendor not in SHARED_BACKENDS else ()))
        mine = [f"liger_multi.backends.{name}" for name in folders if name]
        for found in file.imports:
            if (
                _within(found.module, "liger_multi.backends")
                and found.module != "liger_multi.backends"
            ):
                if not _within(found.module, *mine):
                    yield Finding(file.path, found.line, "vendor import", f"imports {found.module}")
            elif _within(found.module, "liger_multi") and found.module not in (
                "liger_multi",
                "liger_multi.backends",
            ):
                machinery = [f"dispatch.{n}" for n in ("backend", "bitwise", "launch", "registry")]
                parts = (*machinery, "errors", "reference")
                if not _within(found.module, PRIVATE, *[f"liger_multi.{p}" for p in parts]):
                    yield Finding(
                        file.path, found.line, "backend import", f"imports {found.module}"
                    )


def lazy_packages(tree: Tree) -> Iterator[Finding]:
    """Importing the package imports torch and nothing else that is large or optional."""
    for file in tree.of("liger_multi"):
        if file.part in LAZY_EXEMPT or file.room in LAZY_EXEMPT:
            continue
        for found in file.imports:
            if found.eager and found.module.partition(".")[0] in LAZY:
                yield Finding(
                    file.path,
                    found.line,
                    "lazy",
                    f"imports {found.module} when it is imported itself",
                )


def _docstrings(tree: ast.AST) -> set[int]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                found.add(id(first.value))
    return found


def vendor_words(tree: Tree) -> Iterator[Finding]:
    """Code outside a vendor's folder names no vendor; docstrings and comments may.

    ``compat`` consists of others' names, which it cannot choose.
    """
    for file in tree.files:
        if file.vendor is not None and file.vendor not in SHARED_BACKENDS:
            continue
        if file.part == "compat":
            continue
        skip = _docstrings(file.tree)
        seen = set()
        for node in ast.walk(file.tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in skip
            ):
                text = node.value
            elif isinstance(node, ast.Attribute | ast.Name | ast.Import | ast.ImportFrom):
                text = ast.unparse(node)
            elif isinstance(node, ast.arg):
                text = node.arg
            elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                text = node.name
            else:
                continue
            match = VENDOR_WORDS.search(text)
            if match and (node.lineno, match[0]) not in seen:
                seen.add((node.lineno, match[0]))
                yield Finding(
                    file.path,
                    node.lineno,
                    "vendor word",
                    f"{match[0]!r} outside backends/<vendor>/",
                )


def _functions(file: File) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(file.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def function_length(tree: Tree) -> Iterator[Finding]:
    """The body of a function keeps to 80 lines, kernels too; its docstring does not count."""
    for file in tree.files:
        for node in _functions(file):
            body = node.body if ast.get_docstring(node) is None else node.body[1:]
            lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            if lines > FUNCTION_LINES:
                text = f"{node.name}: {lines} lines, the limit is {FUNCTION_LINES}"
                yield Finding(file.path, node.lineno, "length", text)


def explained(tree: Tree) -> Iterator[Finding]:
    """Every jitted function of a backend says in a docstring what a program does."""
    for file in tree.of("backends"):
        for node in _functions(file):
            jitted = any("jit" in ast.unparse(d) for d in node.decorator_list)
            if jitted and not (ast.get_docstring(node) or "").strip():
                yield Finding(file.path, node.lineno, "explained", f"{node.name} has no docstring")


def _all(tree: ast.Module) -> tuple[int, list[str]]:
    """The line of ``__all__`` and its names; where they are computed, the re-exported ones."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            try:
                return node.lineno, list(ast.literal_eval(node.value))
            except ValueError:
                imports = [n for n in tree.body if isinstance(n, ast.ImportFrom)]
                again = [a.name for n in imports for a in n.names if a.name == a.asname]
                return node.lineno, again
    return 0, []


def exports(tree: Tree) -> Iterator[Finding]:
    """Every operator file has a reference and is exported by name."""
    package = tree.target("liger_multi.ops")
    implemented = {f.module.rpartition(".")[2] for f in tree.of("reference")}
    known = ast.unparse(package.tree) if package else ""
    for file in tree.of("liger_multi/ops"):
        name = file.module.rpartition(".")[2]
        if file is package or name.startswith("_"):
            continue
        if name not in implemented:
            yield Finding(file.path, 1, "exports", f"the operator {name} has no reference")
        if not re.search(rf"\bliger_multi\.ops(\.{name}\b| import (.*\b)?{name}\b)", known):
            yield Finding(
                package.path if package else file.path,
                1,
                "exports",
                f"does not import the operator {name}",
            )
    for name in ("liger_multi", "liger_multi.ops", "liger_multi.nn"):
        package = tree.target(name)
        if package is not None:
            line, names = _all(package.tree)
            doubled = sorted({n for n in names if names.count(n) > 1})
            if not names:
                yield Finding(package.path, 1, "exports", "has no __all__ of literals or aliases")
            elif doubled:
                yield Finding(
                    package.path, line, "exports", f"__all__ lists {', '.join(doubled)} twice"
                )


def _torch_names(tree: ast.Module) -> dict[str, str]:
    """The names of a file that stand for PyTorch or a part of it, with the paths of these."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                names[name.asname or name.name.partition(".")[0]] = (
                    name.name if name.asname else name.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            names |= {n.asname or n.name: f"{node.module}.{n.name}" for n in node.names}
    names = {name: path for name, path in names.items() if _within(path, "torch")}
    for node in ast.walk(tree):  # aten = torch.ops.aten
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            path = _torch_path(node.value, names)
            if path is not None and isinstance(target, ast.Name):
                names.setdefault(target.id, path)
    return names


def _torch_path(node: ast.AST, names: dict[str, str]) -> str | None:
    """The dotted path of an expression that is PyTorch or a part of it."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
        if node.func.id == "cast":
            return _torch_path(node.args[1], names)
        name = node.args[1]
        if node.func.id in ("getattr", "hasattr", "setattr") and isinstance(name, ast.Constant):
            owner = _torch_path(node.args[0], names)
            return owner and f"{owner}.{name.value!s}"
    if isinstance(node, ast.Attribute):
        owner = _torch_path(node.value, names)
        return owner and f"{owner}.{node.attr}"
    return None


def private_torch(tree: Tree) -> Iterator[Finding]:
    """Private symbols of PyTorch stand in one module, which knows what to do without them."""
    for file in tree.files:
        if file.module == PRIVATE:
            continue
        names, skip = _torch_names(file.tree), _docstrings(file.tree)
        paths: dict[tuple[int, str], None] = {}
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Import):
                paths |= {(node.lineno, name.name): None for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                paths |= {(node.lineno, f"{node.module}.{n.name}"): None for n in node.names}
            elif isinstance(node, ast.Call | ast.Attribute):
                paths[node.lineno, _torch_path(node, names) or ""] = None
            elif isinstance(node, ast.Constant) and id(node) not in skip:
                paths[node.lineno, str(node.value)] = None
        for line, path in paths:
            if PRIVATE_PATH.fullmatch(path):
                yield Finding(file.path, line, "private", f"{path}: bind it in {PRIVATE}")


def silence(tree: Tree) -> Iterator[Finding]:
    """The library prints nothing; commands do."""
    for file in tree.files:
        if file.part in PRINTERS:
            continue
        for node in ast.walk(file.tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "print"
            ):
                yield Finding(file.path, node.lineno, "print", "the library prints nothing")


def portable(tree: Tree) -> Iterator[Finding]:
    """Kernels ask for nothing that one vendor's hardware does otherwise.

    Capability numbers mean other cards on other vendors; products of fp32 are of TF32 or XF32
    unless told; an atomic sum has no fixed order, and for 16 bits becomes a loop. PyTorch divides a
    sum among the cores that a card has.
    """
    for file in tree.files:
        if file.vendor is not None and file.vendor not in SHARED_BACKENDS:
            continue
        for node in ast.walk(file.tree):
            if not isinstance(node, ast.Call):
                continue
            name, given = ast.unparse(node.func), {k.arg for k in node.keywords}
            wrong = ""
            if name.endswith("get_device_capability"):
                wrong = "asks for a capability number"
            elif name == "tl.dot" and "input_precision" not in given:
                wrong = "tl.dot without input_precision"
            elif name.startswith("tl.atomic_"):
                wrong = f"{name}: an atomic operation; sum partials of programs instead"
            elif file.vendor is not None and re.search(r"(?<!\btl)\.(sum|mean)$", name):
                wrong = f"{name}: its order follows the card; sum_rows and sum_partials have one"
            if wrong:
                yield Finding(file.path, node.lineno, "portable", wrong)


RULES: tuple[Callable[[Tree], Iterator[Finding]], ...] = (
    downwards,
    acyclic,
    reference_alone,
    vendors_apart,
    lazy_packages,
    vendor_words,
    portable,
    function_length,
    explained,
    exports,
    silence,
    private_torch,
)


def check(root: Path) -> list[Finding]:
    """All findings below a checkout."""
    tree = Tree(root)
    return sorted(finding for rule in RULES for finding in rule(tree))


def main() -> int:
    """Print findings; 1 where there are any."""
    parser = argparse.ArgumentParser(
        description="Check layers, vendor words, lengths of functions, docstrings and exports."
    )
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parent.parent)
    findings = check(parser.parse_args().root)
    print("\n".join(map(str, findings)) or "layering: all rules hold")
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
