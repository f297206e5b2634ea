"""Names of liger-kernel: installed and taken away, and what trainers import of it is served."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml

from liger_multi.compat import liger_kernel as alias
from liger_multi.compat.liger_kernel import finder
from tests.trainers import liger_suite

TRAINERS = yaml.safe_load(Path(__file__).with_name("alias_names.yaml").read_text())
SOURCE = os.environ.get("LIGER_KERNEL_SOURCE")

PARTS = "parts of kernels; operators are whole here, and launch tables stand beside ours"
SKIPPED = {
    "ops.backends.*": "sets of operators; backends are chosen by liger_multi.configure",
    "ops.configure*": "buffers of kernels for several hosts, which no operator here has",
    "ops.utils.*": PARTS,
    "ops.*_forward": PARTS,
    "ops.*_backward": PARTS,
    "ops.*_fwd": PARTS,
    "ops.*_bwd": PARTS,
    "ops.*_triton": PARTS,
    "ops.*kernel*": PARTS,
    "ops.mlp.*": PARTS,
    "ops.*.get_num_warps": PARTS,
    "ops.fused_moe*": PARTS,
    "triton.monkey_patch.LigerTritonFileCacheManager": "Triton's own cache is used",
    "testing*": "test helpers of the package itself",
}
"""Patterns of names below the package that are not served, with the reason."""

KERNEL_THERE = "on for every model type: what Liger-Kernel has no kernel for, ours has"
OTHERWISE = {
    "transformers.*apply_liger_kernel_to_*": KERNEL_THERE,
}
"""Patterns of names whose signature differs on purpose, with the reason."""


def served(name):
    """What stands under a dotted name; None where nothing does."""
    path = f"{finder.NAME}.{name}".rstrip(".")
    for module, rest in ((path, ""), path.rpartition(".")[::2]):
        try:
            owner = importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        if not rest or getattr(owner, rest, None) is not None:
            return getattr(owner, rest) if rest else owner
    return None


def matching(name, table):
    return [p for p in table if fnmatchcase(name, p)]


def differs(ours, real):
    """How a function cannot be called as the package's; None where it can."""
    if ours is None or real is None:
        return None
    several = {parameter_kind for _, parameter_kind, _ in ours} & {"VAR_POSITIONAL", "VAR_KEYWORD"}
    ours = [p for p in ours if not p[1].startswith("VAR")]
    for i, (name, parameter_kind, default) in enumerate(
        p for p in real if not p[1].startswith("VAR")
    ):
        mine = ours[i] if i < len(ours) and ours[i][0] == name else None
        if mine is None and parameter_kind == "KEYWORD_ONLY":
            mine = next((p for p in ours if p[0] == name), None)
        if mine is None and len(several) == 2:
            continue
        if mine is None:
            return f"no {name}"
        if parameter_kind != "KEYWORD_ONLY" and mine[1] == "KEYWORD_ONLY":
            return f"{name} has no position"
        if default is not None and "<" not in default and mine[2] != default:
            return f"{name}={mine[2]}, not {default}"
    more = [name for name, _, default in ours if default is None]
    more = [name for name in more if name not in {p[0] for p in real}]
    return f"needs {more}" if more else None


@pytest.mark.parametrize("package", TRAINERS)
def test_imports_of_trainers_resolve(installed, package):
    lost = [
        f"{module}.{name}".lstrip(".")
        for module, names in TRAINERS[package].items()
        for name in names.split()
        if served(f"{module}.{name}".lstrip(".")) is None
    ]
    assert lost == []


@pytest.mark.skipif(SOURCE is None, reason="LIGER_KERNEL_SOURCE: make test-liger sets it")
def test_public_names_and_signatures_of_the_package(installed):
    real = liger_suite.surface_of(SOURCE)
    lost = [name for name in real if served(name) is None]
    assert [n for n in lost if not matching(n, SKIPPED)] == []
    assert set(SKIPPED) - {p for n in lost for p in matching(n, SKIPPED)} == set()
    wrong = {}
    for name, there in real.items():
        here = liger_suite.entry(served(name)) if there else {}
        reasons = [differs(here.get(role), there[role]) for role in there]
        if any(reasons):
            wrong[name] = reasons
    assert {n: why for n, why in wrong.items() if not matching(n, OTHERWISE)} == {}
    assert set(OTHERWISE) - {p for n in wrong for p in matching(n, OTHERWISE)} == set()


@pytest.mark.parametrize(
    ("ours", "text"),
    [
        (lambda x, y=1: None, None),
        (lambda x, y=1, z=3: None, None),
        (lambda *args, **kwargs: None, None),
        (lambda x: None, "no y"),
        (lambda y, x=1: None, "no x"),
        (lambda x, y=2: None, "y=2, not 1"),
        (lambda x, *, y=1: None, "y has no position"),
        (lambda x, y=1, *, z: None, "needs ['z']"),
    ],
)
def test_signature_differences(ours, text):
    expected = liger_suite.parameters(lambda x, y=1: None, 0)
    assert differs(liger_suite.parameters(ours, 0), expected) == text


# --- what install does ---

OF_TRL = {"LigerORPOTrainer"}  # derives from a class of TRL


def test_table_names_resolve(installed):
    for path, served in finder.TREE.items():
        module = importlib.import_module(f"liger_kernel.{path}".rstrip("."))
        assert set(served) | set(finder.LAZY.get(path, {})) <= set(module.__all__)
        names = set(module.__all__) - (set() if importlib.util.find_spec("trl") else OF_TRL)
        assert all(getattr(module, name) is not None for name in names)
        assert module.__spec__ is not None


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is not None, reason="the real package is installed"
)
def test_import_is_lazy():
    code = (
        "import sys, liger_multi.compat.liger_kernel as a; a.install(); import liger_kernel\n"
        "assert liger_kernel.__version__\n"
        "heavy = {'transformers', 'trl', 'triton', 'peft'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_install_needs_force_over_real_package(tmp_path, monkeypatch):
    package = tmp_path / "liger_kernel"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '0.8.5'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with pytest.raises(ImportError, match=r"liger_kernel is installed .*force=True"):
            alias.install()
        assert not alias.installed()
        real = importlib.import_module("liger_kernel")
        with pytest.raises(ImportError, match="liger_kernel is installed"):
            alias.install()
        alias.install(force=True)
        alias.install()  # twice is once
        assert importlib.import_module("liger_kernel").__version__ == finder.VERSION
        assert importlib.metadata.version("liger-kernel") == finder.VERSION
        alias.uninstall()
        alias.uninstall()
        assert importlib.import_module("liger_kernel").__file__ == real.__file__
    finally:
        alias.uninstall()
        sys.modules.pop("liger_kernel", None)
