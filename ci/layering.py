"""Who may import whom, how long functions may be, what is explained: ``python -m ci.layering``.

Reads the sources as syntax trees and imports nothing. A rule is a function from a file (and the
tree of all files) to lines with texts; ``RULES`` names them. ``tests/tools/test_ci_files.py``
plants a violation of each.
"""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

FOLDERS = {
    "liger_multi": "liger_multi",
    "backends": "liger_multi.backends",
    "reference": "liger_multi.reference",
}
BACKENDS, REFERENCE = FOLDERS["backends"], FOLDERS["reference"]
SHARED_BACKENDS = ("triton",)  # layers that vendors inherit from, no vendors themselves
# Parts of the package, lowest first. A file beside them belongs to the base. A dotted name is a
# module with a layer of its own: contracts are made of samples.
LAYERS = (
    ("base", "testing.samples"),
    ("dispatch",),
    ("ops",),
    ("nn", "losses", "memory", "testing"),
    ("patching",),
    ("distributed", "routes", "trees"),
    ("bench", "cli", "demo"),
    ("compat", "integrations"),
    ("__main__", "__init__"),
)
REGISTRY = "liger_multi.dispatch.registry"  # finds backends by path
HUGGING_FACE = ("transformers", "tokenizers", "accelerate", "peft", "datasets", "trl", "kernels")
LIGHTNING = ("lightning", "pytorch_lightning")
OPTIONAL = (*HUGGING_FACE, *LIGHTNING, "triton", "torch_npu", "rich", "matplotlib", "pytest")
OPTIONAL_EXEMPT = ("patching", "integrations", "bench", "cli", "demo", "testing.suite")
VENDOR_WORDS = re.compile(
    r"is_hip|torch\.version\.hip|torch_npu|\bgfx\d+|\bsm_?\d\d|is_npu|\bnpu\b|\bis_rocm\b",
    re.IGNORECASE,
)
FUNCTION_LINES = 80
PRIVATE = "liger_multi._torch_private"  # the one module that names private symbols of PyTorch
PRIVATE_PATH = re.compile(r"torch(\.\w+)*\._(?!_)\w+(\.\w+)*")
FOR_BACKENDS = [f"liger_multi.dispatch.{n}" for n in ("backend", "bitwise", "launch", "registry")]
FOR_BACKENDS += [PRIVATE, REFERENCE, "liger_multi.errors"]
Functions = ast.FunctionDef | ast.AsyncFunctionDef
Findings = Iterator[tuple[int, str]]


class Finding(NamedTuple):
    """One broken rule, at a place."""

    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


class Import(NamedTuple):
    """One imported module; ``eager`` when importing the file imports it."""

    module: str
    line: int
    eager: bool
    names: tuple[str, ...] = ()


def within(module: str, *packages: str) -> bool:
    """Whether a module is one of some packages or stands in one."""
    return any(module == p or module.startswith(p + ".") for p in packages)


def imports(node: ast.AST, eager: bool = True) -> Iterator[Import]:
    """Every import below a node: statements, in functions too, and ``import_module`` of a constant.

    Those for type checkers only do not count.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from imports(ast.Module(child.orelse, []), eager)
            continue
        if isinstance(child, ast.Import):
            yield from (Import(name.name, child.lineno, eager) for name in child.names)
        elif isinstance(child, ast.ImportFrom):
            names = tuple(name.name for name in child.names)
            yield Import(child.module or "", child.lineno, eager, names)
            for name in names:  # `from package import module` imports the module
                yield Import(f"{child.module}.{name}", child.lineno, eager)
        elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith("import_module"):
            constants = (a.value for a in child.args[:1] if isinstance(a, ast.Constant))
            yield from (Import(str(name), child.lineno, eager) for name in constants)
        yield from imports(child, eager and not isinstance(child, Functions | ast.Lambda))


class File:
    """One source file of the package.

    Attributes:
        module: Its import name.
        part: The part of the package it belongs to: a folder's or a module's name.
        room: The part and the name below it, as in ``testing.samples``.
        layer: The number of its layer, from the bottom.
        backend: The folder below ``backends/``, if it stands in one.
        is_of_vendor: Whether that is one vendor's.
        imports: Every import.
        nodes: All nodes of the tree, without constants that are docstrings.
    """

    def __init__(self, path: str, source: str) -> None:
        self.path, self.source, self.tree = path, source, ast.parse(source, path)
        folder, *names = path.removesuffix(".py").removesuffix("/__init__").split("/")
        self.module = ".".join([FOLDERS[folder], *names])
        parts = self.module.split(".")
        self.part, self.room = parts[1] if len(parts) > 1 else "__init__", ".".join(parts[1:3])
        numbers = {name: number for number, names in enumerate(LAYERS) for name in names}
        self.layer = numbers.get(self.room, numbers.get(self.part, 0))
        self.backend = names[0] if folder == "backends" and names else ""
        self.is_of_vendor = bool(self.backend) and self.backend not in SHARED_BACKENDS
        self.imports = list(imports(self.tree))
        nodes = list(ast.walk(self.tree))
        documented = [n for n in nodes if isinstance(n, ast.Module | ast.ClassDef | Functions)]
        first = [n.body[0] for n in documented if n.body]
        skip = {id(n.value) for n in first if isinstance(n, ast.Expr)}
        self.nodes = [n for n in nodes if not (isinstance(n, ast.Constant) and id(n) in skip)]


class Tree:
    """All source files below a checkout's three folders."""

    def __init__(self, root: Path) -> None:
        paths = [p for folder in FOLDERS for p in sorted((root / folder).rglob("*.py"))]
        relative = [p.relative_to(root) for p in paths]
        # The links of an editable install show the same files again.
        own = [p for p in relative if not any((root / q).is_symlink() for q in p.parents)]
        self.files = [File(p.as_posix(), (root / p).read_text(encoding="utf-8")) for p in own]
        self.modules = {f.module: f for f in self.files}

    @cached_property
    def cycle(self) -> list[str]:
        """Modules that import each other in a circle, if there are any."""
        edges: dict[str, set[str]] = {}
        for file in self.files:
            names = {i.module for i in file.imports} - {file.module}
            # `from package import module` needs no more of the package than is loaded already
            whole = {i.module: self._names_modules(i) for i in file.imports if i.names}
            names -= {module for module, only_modules in whole.items() if only_modules}
            edges[file.module] = names & self.modules.keys()
        try:
            graphlib.TopologicalSorter(edges).prepare()
        except graphlib.CycleError as error:
            return list(reversed(error.args[1]))
        return []

    def _names_modules(self, statement: Import) -> bool:
        return all(f"{statement.module}.{name}" in self.modules for name in statement.names)


def layers(file: File, tree: Tree) -> Findings:
    """Parts of the package import what stands below them; nobody imports a backend."""
    for statement in file.imports if file.path.startswith("liger_multi/") else ():
        target = tree.modules.get(statement.module)
        if target is None or target.module == "liger_multi":
            continue
        if within(target.module, BACKENDS) and file.module != REGISTRY:
            yield statement.line, f"imports {target.module}; backends are found by path"
        elif within(target.module, REFERENCE) and statement.eager:
            yield statement.line, f"imports {target.module}; only functions import the reference"
        elif not within(target.module, BACKENDS, REFERENCE) and target.layer > file.layer:
            yield statement.line, f"{file.module} stands below {target.module}"


def acyclic(file: File, tree: Tree) -> Findings:
    """No module imports itself through others."""
    if file.module in tree.cycle:
        yield 1, " -> ".join(tree.cycle)


def reference_alone(file: File, tree: Tree) -> Findings:
    """The reference imports torch and itself; its package file also the record it declares."""
    allowed = ["torch", "__future__", REFERENCE, PRIVATE, *sys.stdlib_module_names]
    if file.module == REFERENCE:
        allowed.append("liger_multi.dispatch.backend")
    for statement in file.imports if file.path.startswith("reference/") else ():
        if not within(statement.module, *allowed):
            yield statement.line, f"imports {statement.module}; torch only"


def backends_apart(file: File, tree: Tree) -> Findings:
    """A backend imports its folder, the shared layers, the reference and launch machinery."""
    shared = SHARED_BACKENDS if file.is_of_vendor else ()
    own = [f"{BACKENDS}.{name}" for name in (file.backend, *shared) if name]
    roots = ("liger_multi", BACKENDS)
    for statement in file.imports if file.path.startswith("backends/") else ():
        is_allowed = within(statement.module, *own, *FOR_BACKENDS) or statement.module in roots
        if within(statement.module, "liger_multi") and not is_allowed:
            yield statement.line, f"imports {statement.module}"


def optional_packages(file: File, tree: Tree) -> Findings:
    """Importing the package imports torch and nothing else that is large or optional."""
    exempt = {file.part, file.room} & set(OPTIONAL_EXEMPT)
    for statement in file.imports if file.path.startswith("liger_multi/") and not exempt else ():
        if statement.eager and statement.module.partition(".")[0] in OPTIONAL:
            yield statement.line, f"imports {statement.module} when it is imported itself"


def vendor_words(file: File, tree: Tree) -> Findings:
    """Code outside a vendor's folder names no vendor; docstrings and comments may.

    ``compat`` consists of others' names, which it cannot choose.
    """
    words: dict[tuple[int, str], None] = {}
    for node in file.nodes if not file.is_of_vendor and file.part != "compat" else ():
        if isinstance(node, ast.Constant):
            text = node.value if isinstance(node.value, str) else ""
        elif isinstance(node, ast.Attribute | ast.Name | ast.Import | ast.ImportFrom | ast.arg):
            text = ast.unparse(node)
        else:
            text = getattr(node, "name", None) or ""
        match = VENDOR_WORDS.search(text)
        if match:
            words[getattr(node, "lineno", 1), match[0]] = None
    yield from ((line, f"{word!r} outside backends/<vendor>/") for line, word in words)


def portable(file: File, tree: Tree) -> Findings:
    """Kernels ask for nothing that one vendor's hardware does otherwise.

    Capability numbers mean other cards on other vendors (``compat`` serves names that ask for
    them); products of fp32 are of TF32 or XF32 unless told; an atomic sum has no fixed order, and
    for 16 bits becomes a loop. PyTorch divides a sum among the cores that a card has.
    """
    calls = [n for n in file.nodes if isinstance(n, ast.Call)] if not file.is_of_vendor else []
    for node in calls:
        name = ast.unparse(node.func)
        if name.endswith("get_device_capability") and file.part != "compat":
            yield node.lineno, "asks for a capability number"
        elif name == "tl.dot" and "input_precision" not in {k.arg for k in node.keywords}:
            yield node.lineno, "tl.dot without input_precision"
        elif name.startswith("tl.atomic_"):
            yield node.lineno, f"{name}: an atomic operation; sum partials of programs instead"
        elif file.backend and re.search(r"(?<!\btl)\.(sum|mean)$", name):
            yield (
                node.lineno,
                f"{name}: its order follows the card; sum_rows and sum_partials have one",
            )


def function_length(file: File, tree: Tree) -> Findings:
    """The body of a function keeps to 80 lines, kernels too; its docstring does not count."""
    for node in (n for n in file.nodes if isinstance(n, Functions)):
        body = node.body if ast.get_docstring(node) is None else node.body[1:]
        lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
        if lines > FUNCTION_LINES:
            yield node.lineno, f"{node.name}: {lines} lines, the limit is {FUNCTION_LINES}"


def explained(file: File, tree: Tree) -> Findings:
    """Every jitted function of a backend says in a docstring what a program does."""
    for node in (n for n in file.nodes if isinstance(n, Functions) and file.backend):
        is_jitted = "jit" in " ".join(map(ast.unparse, node.decorator_list))
        if is_jitted and not (ast.get_docstring(node) or "").strip():
            yield node.lineno, f"{node.name} has no docstring"


def exports(file: File, tree: Tree) -> Findings:
    """Every operator file has a reference and is exported by name; packages list their names."""
    operators = [f.module.rpartition(".")[2] for f in tree.files if f.room.startswith("ops.")]
    operators = [name for name in operators if not name.startswith("_")]
    name = file.module.rpartition(".")[2]
    if file.room.startswith("ops.") and name in operators:
        reference = rf"reference/(.+/)?{name}\.py"
        if not any(re.fullmatch(reference, f.path) for f in tree.files):
            yield 1, f"the operator {name} has no reference"
    if file.module == "liger_multi.ops":
        taken = {i.module.rpartition(".")[2] for i in file.imports}
        yield from ((1, f"does not import the operator {n}") for n in operators if n not in taken)
    if file.module in ("liger_multi", "liger_multi.ops", "liger_multi.nn"):
        assigned = [n for n in file.tree.body if isinstance(n, ast.Assign)]
        lists = [n for n in assigned if ast.unparse(n.targets[0]) == "__all__"]
        names = [c.value for n in lists for c in ast.walk(n) if isinstance(c, ast.Constant)]
        if not lists:
            yield 1, "has no __all__"
        for name in sorted({str(n) for n in names if names.count(n) > 1}):
            yield lists[0].lineno, f"__all__ lists {name} twice"


def private_torch(file: File, tree: Tree) -> Findings:
    """Private symbols of PyTorch stand in one module, which knows what to do without them."""
    names = {"torch": "torch"}  # what stands for PyTorch or a part of it
    for node in file.nodes:
        if isinstance(node, ast.ImportFrom):
            names |= {n.asname or n.name: f"{node.module}.{n.name}" for n in node.names}
        elif isinstance(node, ast.Import):
            names |= {n.asname: n.name for n in node.names if n.asname}

    def path_of(node: ast.AST) -> str:
        text = re.sub(r"cast\([^,]*, ([\w.]+)\)", r"\1", ast.unparse(node))
        text = re.sub(r"(?:get|has|set)attr\(([\w.]+), '(\w+)'.*", r"\1.\2", text)
        head, dot, rest = text.partition(".")
        return names.get(head, "") + dot + rest

    for node in file.nodes:  # aten = torch.ops.aten
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Attribute):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and within(path_of(node.value), "torch"):
                names.setdefault(target.id, path_of(node.value))
    paths = {(i.line, i.module) for i in file.imports}
    for node in file.nodes if file.module != PRIVATE else ():
        if isinstance(node, ast.Call | ast.Attribute):
            paths.add((node.lineno, path_of(node)))
        elif isinstance(node, ast.Constant):
            paths.add((node.lineno, str(node.value)))
    for line, path in sorted(paths):
        if file.module != PRIVATE and PRIVATE_PATH.fullmatch(path):
            yield line, f"{path}: bind it in {PRIVATE}"


RULES: dict[str, Callable[[File, Tree], Findings]] = {
    "layer": layers,
    "cycle": acyclic,
    "reference": reference_alone,
    "backend": backends_apart,
    "optional": optional_packages,
    "vendor word": vendor_words,
    "portable": portable,
    "length": function_length,
    "explained": explained,
    "exports": exports,
    "private": private_torch,
}


def check(root: Path) -> list[Finding]:
    """All findings below a checkout."""
    tree = Tree(root)
    return sorted(
        Finding(file.path, line, name, text)
        for name, rule in RULES.items()
        for file in tree.files
        for line, text in rule(file, tree)
    )


def main() -> int:
    """Print findings; 1 where there are any."""
    findings = check(Path(__file__).parent.parent)
    print("\n".join(map(str, findings)) or "layering: all rules hold")
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
