"""The public names of ``liger_kernel`` and their signatures: ``python -m ci.alias_surface``.

Reads a wheel's modules as syntax trees and writes ``tests/alias_surface.yaml``, which the suite
compares with ``liger_multi.compat.liger_kernel``. Only names and signatures are kept, no code.
``--diff`` writes nothing: it prints what another release, by default the newest, adds, drops or
changes, and fails if there is something.
"""

from __future__ import annotations

import argparse
import ast
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from ci.wheels import downloaded

NAME = "liger_kernel"
PACKAGE = "liger-kernel"
VERSION = "0.8.5"
TARGET = Path(__file__).parent.parent / "tests" / "alias_surface.yaml"
Entry: TypeAlias = "str | dict[str, str]"
"""``value``, the signature of a function, or those of a class: ``init`` and what is called."""
Surface: TypeAlias = dict[str, dict[str, Entry]]
"""Module to public name to entry."""

_FunctionNode = (ast.FunctionDef, ast.AsyncFunctionDef)


# --- from a wheel to syntax trees ---


def modules(wheel: Path) -> dict[str, ast.Module]:
    """Public modules by their path below the package; packages' own names under the package."""
    found = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            parts = name.removesuffix(".py").split("/")
            if not name.endswith(".py") or parts[0] != NAME:
                continue
            path = [p for p in parts[1:] if p != "__init__"]
            if not any(p.startswith("_") for p in path):
                found[".".join(path)] = ast.parse(archive.read(name).decode("utf-8"), name)
    return found


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module, also below conditions."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try, ast.With)):
                yield from statements(getattr(node, field, []))


# --- signatures ---


def arguments(node: ast.arguments, constants: dict[str, str], skip: int = 0) -> str:
    """Names and defaults without annotations; constants of the module as their values."""

    def shown(arg: ast.arg, default: ast.expr | None) -> str:
        if default is None:
            return arg.arg
        text = ast.unparse(default)
        return f"{arg.arg}={constants.get(text, text)}"

    plain = [*node.posonlyargs, *node.args]
    defaults = [*[None] * (len(plain) - len(node.defaults)), *node.defaults]
    made = [shown(a, d) for a, d in zip(plain, defaults, strict=True)][skip:]
    if node.vararg is not None:
        made.append(f"*{node.vararg.arg}")
    elif node.kwonlyargs:
        made.append("*")
    made += [shown(a, d) for a, d in zip(node.kwonlyargs, node.kw_defaults, strict=True)]
    if node.kwarg is not None:
        made.append(f"**{node.kwarg.arg}")
    return f"({', '.join(made)})"


def fields(node: ast.ClassDef) -> str:
    """What a dataclass is made of."""
    made = []
    for f in node.body:
        if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name):
            default = "" if f.value is None else f"={ast.unparse(f.value)}"
            made.append(f"{f.target.id}{default}")
    return f"({', '.join(made)})"


def _method(name: str, classes: list[ast.ClassDef]) -> ast.FunctionDef | None:
    for c in classes:
        for f in c.body:
            if isinstance(f, ast.FunctionDef) and f.name == name:
                return f
    return None


def _line(node: ast.ClassDef, known: dict[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """A class and its bases that the package defines."""
    made = [node]
    for base in node.bases:
        name = ast.unparse(base).rpartition(".")[2]
        if name in known and known[name] is not node:
            made += _line(known[name], known)
    return made


def of_class(
    node: ast.ClassDef, known: dict[str, ast.ClassDef], constants: dict[str, str]
) -> dict[str, str]:
    """Signatures of construction, and of ``apply`` or ``forward``."""
    line = _line(node, known)
    made: dict[str, str] = {}
    bases = {ast.unparse(b) for c in line for b in c.bases}
    if any("dataclass" in ast.unparse(d) for d in node.decorator_list):
        made["init"] = fields(node)
    init, forward, apply = (_method(n, line) for n in ("__init__", "forward", "apply"))
    if init is not None:
        made["init"] = arguments(init.args, constants, 1)
    static = apply is not None or any(b.endswith("autograd.Function") for b in bases)
    called = apply or forward
    if called is not None:
        receivers = 0 if apply is not None else (called.args.args[0].arg == "cls") + 1
        made["apply" if static else "forward"] = arguments(called.args, constants, receivers)
    return made


# --- names ---


def exported(path: str, tree: ast.Module, package: bool) -> Iterator[tuple[str, str]]:
    """Names that a package or ``__all__`` hands on, and where they come from."""
    listed = set()
    for node in statements(tree.body):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            listed |= {c.value for c in ast.walk(node.value) if isinstance(c, ast.Constant)}
    for node in statements(tree.body):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == NAME:
            for a in node.names:
                name = a.asname or a.name
                if not name.startswith("_") and (package or name in listed):
                    yield name, f"{node.module}.{a.name}".partition(".")[2]


def defined(tree: ast.Module, known: dict[str, ast.ClassDef]) -> Iterator[tuple[str, Entry]]:
    """Names that a module defines, with their entries."""
    constants = {}
    for node in statements(tree.body):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in (t for t in targets if isinstance(t, ast.Name)):
                if isinstance(node.value, ast.Constant):
                    constants[target.id] = ast.unparse(node.value)
                yield target.id, "value"
        elif isinstance(node, _FunctionNode):
            jitted = any("jit" in ast.unparse(d) for d in node.decorator_list)
            yield node.name, "kernel" if jitted else arguments(node.args, constants)
        elif isinstance(node, ast.ClassDef):
            yield node.name, of_class(node, known, constants)


def surface(wheel: Path) -> Surface:
    """The public names of a wheel."""
    trees = modules(wheel)
    packages = {p for p in trees if any(other.startswith(f"{p}.") for other in trees)} | {""}
    known = {
        n.name: n for t in trees.values() for n in statements(t.body) if isinstance(n, ast.ClassDef)
    }
    every = {path: dict(defined(tree, known)) for path, tree in trees.items()}
    made: Surface = {
        path: {n: e for n, e in names.items() if not n.startswith("_")}
        for path, names in every.items()
    }
    for path, tree in trees.items():
        for name, source in exported(path, tree, path in packages):
            home, _, own = source.rpartition(".")
            made[path].setdefault(name, _entry(every, home, own))
    return {
        f"{NAME}.{path}".rstrip("."): dict(sorted(names.items()))
        for path, names in sorted(made.items())
    }


def _entry(every: dict[str, dict[str, Entry]], home: str, name: str) -> Entry:
    return every.get(home, {}).get(name, "value")


# --- two surfaces ---


def flat(made: Surface) -> dict[str, Entry]:
    """Dotted names to entries; modules count as names."""
    found: dict[str, Entry] = {}
    for module, names in made.items():
        found[module] = "module"
        found.update({f"{module}.{name}": entry for name, entry in names.items()})
    return found


def differences(old: Surface, new: Surface) -> list[str]:
    """Lines that say what is added, dropped and changed."""
    a, b = flat(old), flat(new)
    made = [f"+ {name}: {b[name]}" for name in sorted(set(b) - set(a))]
    made += [f"- {name}" for name in sorted(set(a) - set(b))]
    both = sorted(set(a) & set(b))
    return made + [f"! {n}: {a[n]} -> {b[n]}" for n in both if a[n] != b[n]]


class _Plain(yaml.SafeDumper):
    """A name that stands in two places is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        """Of nothing."""
        return True


def recorded() -> Surface:
    """The committed names."""
    made: dict[str, Any] = yaml.safe_load(TARGET.read_text(encoding="utf-8"))
    return made["modules"]  # type: ignore[no-any-return]


def main() -> int:
    """Download, and write or compare."""
    parser = argparse.ArgumentParser(description="Record the public names of liger_kernel.")
    parser.add_argument("--version", help=f"the release; {VERSION}, or the newest with --diff")
    parser.add_argument("--diff", action="store_true", help="compare with what is recorded")
    chosen = parser.parse_args()
    version = chosen.version or (None if chosen.diff else VERSION)
    with downloaded(PACKAGE if version is None else f"{PACKAGE}=={version}") as wheel:
        found, release = surface(wheel), wheel.name.split("-")[1]
    if chosen.diff:
        lines = differences(recorded(), found)
        print(f"{PACKAGE} {release}:", *(lines or ["as recorded"]), sep="\n")
        return 1 if lines else 0
    head = "# generated by `python -m ci.alias_surface`: public names of liger_kernel\n"
    made = {"version": release, "modules": found}
    text = yaml.dump(made, Dumper=_Plain, width=1000, sort_keys=False)
    TARGET.write_text(head + text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
