"""Liger-Kernel's own tests, run with our import names: ``make test-liger``.

The source distribution of a release has the package and its tests. First every public name and
signature of the package is compared with ours (test_alias_surface.py says what may differ). Then
its tests run here as they are, with ``liger_kernel`` served by this library; at least
:data:`SHARE` of those that run have to pass. Parts of its kernels that they import are there by
name alone, and raise when they are used. On a CPU a test that takes longer than ``--limit`` is
skipped.

``--imports PACKAGE==VERSION`` prints what a trainer imports of ``liger_kernel``, for
``alias_names.yaml``.
"""

import argparse
import ast
import collections
import contextlib
import importlib.util
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import types
import zipfile
from pathlib import Path

import pytest
import torch

NAME = "liger_kernel"
PLUGIN = "tests.trainers.liger_suite"  # run as a command, `__name__` is another module's
ROOT = Path(__file__).parents[2]
PARTS = ("backends", "chunked_loss", "megatron", "ops", "transformers", "triton")
"""Folders of its tests; the others are those of one vendor's kernels, and convergence."""
SHARE = 0.96


def fetch(requirement, folder):
    """The unpacked source distribution of a release."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([*pip, "-d", place, requirement], check=True)
        (archive,) = Path(place).glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
        return folder / archive.name.removesuffix(".tar.gz")


# --- public names and their signatures ---


def parameters(call, skip):
    """Names, kinds and defaults of parameters; None where Python does not know them."""
    try:
        signature = [*inspect.signature(call).parameters.values()][skip:]
    except (TypeError, ValueError):
        return None
    return [
        [p.name, p.kind.name, None if p.default is p.empty else repr(p.default)] for p in signature
    ]


def entry(cls):
    """Parameters of a function, or of a class's construction, call and other public methods."""
    if not isinstance(cls, type):
        return {"call": parameters(cls, 0)} if inspect.isroutine(cls) else {}
    own = [c for c in cls.__mro__ if not c.__module__.startswith(("torch", "builtins"))]
    if any("apply" in vars(c) for c in own):
        return {"call": parameters(cls.apply, 0)}
    if issubclass(cls, torch.autograd.Function):
        record = {"call": parameters(cls.forward, 1)}
    else:
        record = {"init": parameters(cls, 0)}
    if issubclass(cls, torch.nn.Module):
        record["call"] = parameters(cls.forward, 1)
    names = {name for c in own for name in vars(c) if not name.startswith("_")}
    names -= {"forward", "backward", "extra_repr"}
    public = {name: getattr(cls, name) for name in sorted(names)}
    return record | {name: parameters(x, 0) for name, x in public.items() if inspect.isroutine(x)}


def surface(root):
    """Public names of the ``liger_kernel`` in a folder, below it, each with its parameters.

    Of a module that cannot be imported here its own functions and classes, without parameters.
    """
    every = {}
    for file in sorted(root.rglob("*.py")):
        *folders, name = file.relative_to(root).with_suffix("").parts
        below = folders if name == "__init__" else [*folders, name]
        if any(part.startswith(("_", "cut")) for part in below):
            continue
        path, package = ".".join((NAME, *below)), name == "__init__"
        every[".".join(below)] = {}
        try:
            names = vars(importlib.import_module(path))
        except ImportError:
            names = {
                node.name: types.SimpleNamespace(__module__=path)
                for node in ast.parse(file.read_text()).body
                if isinstance(node, (ast.FunctionDef, ast.ClassDef))
            }
        for name, value in [*names.items()]:
            home = getattr(value, "__module__", None) or ""
            ours = home == path or (package and home.partition(".")[0] == NAME)
            if ours and not name.startswith("_"):
                every[".".join((*below, name))] = entry(value)
    return every


def surface_of(source):
    """The surface of a package in a folder, read in a process of its own."""
    root = str(Path(source, NAME))
    code = f"import json, {PLUGIN} as m; print(json.dumps(m.surface(m.Path({root!r}))))"
    path = os.pathsep.join([str(source), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
    )
    return json.loads(done.stdout.splitlines()[-1])


# --- what trainers import ---


def imports(requirement):
    """Dotted names below the package that the wheel of a trainer imports, by their modules."""
    by = collections.defaultdict(set)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([*pip, "-d", place, requirement], check=True)
        (wheel,) = Path(place).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            texts = [archive.read(n).decode() for n in archive.namelist() if n.endswith(".py")]
    for text in texts:
        for node in ast.walk(ast.parse(text)) if NAME in text else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(NAME):
                by[node.module.partition(".")[2]] |= {a.name for a in node.names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                by["transformers"] |= set(
                    re.findall(r"^apply_liger_kernel_to_[a-z0-9_]+$", node.value)
                )
    return {module: " ".join(sorted(names)) for module, names in sorted(by.items()) if names}


# --- its tests: this module is their plugin too ---


class Missing:
    """Stands for a part of a kernel."""

    def __init__(self, name):
        self.__name__ = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(self.__name__)

    def __iter__(self):
        return iter(())


def _with_stand_ins(module):
    names, get = vars(module), vars(module).get("__getattr__")

    def look(name):
        with contextlib.suppress(AttributeError):
            if get is not None:
                return get(name)
        if name.startswith("__"):
            raise AttributeError(name)
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"{module.__name__}.{name}")
        return Missing(f"{module.__name__}.{name}")

    names["__getattr__"] = look


OF_A_CPU = {
    "get_device_properties": lambda *_: types.SimpleNamespace(
        total_memory=2**36, name="CPU", multi_processor_count=8
    ),
    "mem_get_info": lambda *_: (2**36, 2**36),
    "memory_allocated": lambda *_: 0,
    "max_memory_allocated": lambda *_: 0,
    "reset_peak_memory_stats": lambda *_: None,
    "empty_cache": lambda: None,
}
"""Functions that its tests ask of any device's module."""


def pytest_addoption(parser):
    parser.addoption("--seconds-of-a-test", type=int, help="longer ones are skipped; 0: none is")


def pytest_configure(config):
    from liger_multi.compat import liger_kernel
    from liger_multi.compat.liger_kernel import finder

    load = finder._Loader.exec_module
    finder._Loader.exec_module = lambda self, module: (load(self, module), _with_stand_ins(module))
    liger_kernel.install(force=True)
    helpers = Path("src", NAME, "testing", "__init__.py")  # which its tests compare with
    spec = importlib.util.spec_from_file_location(f"{NAME}.testing", helpers)
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])
    loaded = importlib.import_module(f"{NAME}.transformers.functional")
    loaded.liger_softmax(torch.ones(2, 2, requires_grad=True)).sum().backward()  # no test loads it
    for name, function in OF_A_CPU.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, function)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    limit = item.config.getoption("--seconds-of-a-test")
    signal.signal(signal.SIGALRM, lambda *_: pytest.skip(f"longer than {limit} s"))
    signal.alarm(limit)
    try:
        return (yield)
    finally:
        signal.alarm(0)


def tests(source, limit, more):
    """Run its tests; how many passed and how many ran."""
    report = source / "report.xml"
    path = os.pathsep.join([str(ROOT), str(source)])
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-p", PLUGIN, "-q", "--tb=line"]
    command += ["-p", "no:randomly", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    # pytest knows this option from the plugin alone: without it the real package would be tested
    command += [f"--seconds-of-a-test={limit}", f"--junitxml={report}"]
    command += [*(more or [f"test/{part}" for part in PARTS])]
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run(command, cwd=source, env=environment, check=False)
    match = re.search(
        r'errors="(\d+)" failures="(\d+)" skipped="(\d+)" tests="(\d+)"', report.read_text()
    )
    errors, failures, skipped, every = map(int, match.groups())
    return every - skipped - errors - failures, every - skipped


def main():
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}")
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "build" / "liger")
    parser.add_argument("--release", default="liger-kernel==0.8.5")
    parser.add_argument("--limit", type=int, default=0 if torch.cuda.is_available() else 20)
    parser.add_argument("--imports", metavar="PACKAGE==VERSION")
    o, more = parser.parse_known_args()
    if o.imports:
        print(json.dumps(imports(o.imports), indent=1))
        return 0
    source = fetch(o.release, o.folder.resolve())
    file = str(Path(__file__).with_name("test_alias_surface.py"))
    surfaces = [sys.executable, "-m", "pytest", "-q", file]
    environment = {**os.environ, "LIGER_KERNEL_SOURCE": str(source / "src")}
    wrong = subprocess.run(surfaces, cwd=ROOT, env=environment, check=False).returncode
    passed, ran = tests(source, o.limit, more)
    print(f"{o.release}: {passed} of {ran} of its tests pass ({passed / max(ran, 1):.1%})")
    return int(bool(wrong) or passed < SHARE * ran)


if __name__ == "__main__":
    sys.exit(main())
