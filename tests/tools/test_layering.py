"""The house's structural rules hold here, and each of them catches a planted violation."""

import ast
import importlib
import inspect
import itertools
from pathlib import Path

import pytest

from ci import layering

ROOT = Path(__file__).parents[2]

CLEAN = {
    "liger_multi/__init__.py": "from liger_multi import ops\n__all__ = ['ops']\n",
    "liger_multi/errors.py": "",
    "liger_multi/dispatch/backend.py": "",
    "liger_multi/dispatch/launch.py": "from liger_multi.dispatch.backend import x\n",
    "liger_multi/dispatch/registry.py": "def f():\n    import liger_multi.errors\n",
    "liger_multi/dispatch/op.py": "from liger_multi.dispatch.registry import f\nimport torch\n",
    "liger_multi/ops/__init__.py": "from liger_multi.ops.rms_norm import rms_norm\n"
    "__all__ = ['rms_norm']\n",
    "liger_multi/ops/rms_norm.py": '"""On npu, gfx942, sm90."""\n'
    "from liger_multi.dispatch.op import Op\n"
    "from liger_multi.testing.samples import Sample\n",
    "liger_multi/testing/__init__.py": "",
    "liger_multi/testing/samples.py": "import torch\n",
    "liger_multi/testing/formulas.py": "from liger_multi.ops import rms_norm\n",
    "liger_multi/testing/suite/plugin.py": "import pytest\n",
    "liger_multi/nn/__init__.py": "from liger_multi.ops import rms_norm\n__all__ = ['rms_norm']\n",
    "liger_multi/patching/__init__.py": "import transformers\nfrom liger_multi import nn\n",
    "liger_multi/cli/main.py": "import rich\n",
    "liger_multi/compat/__init__.py": "from liger_multi.cli import main\n",
    "reference/__init__.py": "from liger_multi.dispatch.backend import Backend\n",
    "reference/norms/rms_norm.py": "import math, torch\n"
    "from liger_multi.reference.common.chunking import r\n",
    "reference/common/chunking.py": "",
    "backends/__init__.py": "",
    "backends/triton/__init__.py": "import torch\n",
    "backends/triton/norms/rms_norm.py": "import triton\n"
    "from liger_multi.dispatch.launch import launch_config\n",
    "backends/cuda/__init__.py": "from liger_multi.dispatch.backend import Backend\n",
    "backends/cuda/rms_norm.py": "from liger_multi.backends.triton.norms import rms_norm\n",
    "backends/rocm/__init__.py": "import torch\nHIP = torch.version.hip\n",
}


@pytest.fixture
def findings(tmp_path):
    """Findings in the clean tree with some files replaced."""

    def run(**changes):
        for path, text in {**CLEAN, **changes.pop("files", {})}.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return [(f.rule, f.path) for f in layering.check(tmp_path)]

    return run


@pytest.mark.slow
def test_this_tree_keeps_every_rule():
    assert "\n".join(map(str, layering.check(ROOT))) == ""


def test_a_clean_tree_has_no_findings(findings):
    assert findings() == []


LINES = "    x = 1\n"
PLANTED = {
    "machinery imports an operator": (
        "layer",
        "liger_multi/dispatch/launch.py",
        "from liger_multi.ops import rms_norm\n",
    ),
    "machinery imports upwards": (
        "layer",
        "liger_multi/errors.py",
        "from liger_multi.dispatch.op import Op\n",
    ),
    "registry imports op": (
        "cycle",
        "liger_multi/dispatch/registry.py",
        "import liger_multi.dispatch.op\n",
    ),
    "registry imports op inside a function": (
        "cycle",
        "liger_multi/dispatch/registry.py",
        "def f():\n    from liger_multi.dispatch import op\n",
    ),
    "operator imports a module": (
        "layer",
        "liger_multi/ops/rms_norm.py",
        "from liger_multi import nn\n",
    ),
    "operator imports a formula": (
        "layer",
        "liger_multi/ops/rms_norm.py",
        "from liger_multi.testing.formulas import FORMULAS\n",
    ),
    "samples import an operator": (
        "layer",
        "liger_multi/testing/samples.py",
        "from liger_multi.ops import rms_norm\n",
    ),
    "module imports patching": (
        "layer",
        "liger_multi/nn/__init__.py",
        "import liger_multi.patching\n",
    ),
    "patching imports a command": (
        "layer",
        "liger_multi/patching/__init__.py",
        "import liger_multi.cli.main\n",
    ),
    "operator imports a module inside a function": (
        "layer",
        "liger_multi/ops/rms_norm.py",
        "def f():\n    from liger_multi import nn\n",
    ),
    "machinery imports an operator by its name": (
        "layer",
        "liger_multi/dispatch/launch.py",
        "def f():\n    return importlib.import_module('liger_multi.ops').rms_norm\n",
    ),
    "a module imports patching by its name": (
        "layer",
        "liger_multi/nn/__init__.py",
        "__all__ = ['x']\nx = import_module('liger_multi.patching')\n",
    ),
    "a command imports what stands above it": (
        "layer",
        "liger_multi/cli/main.py",
        "import liger_multi.compat\n",
    ),
    "operator imports a backend inside a function": (
        "layer",
        "liger_multi/ops/rms_norm.py",
        "def f():\n    import liger_multi.backends.triton\n",
    ),
    "operators in a circle by their names": (
        "cycle",
        "liger_multi/dispatch/registry.py",
        "def f():\n    importlib.import_module('liger_multi.dispatch.op')\n",
    ),
    "reference imports the machinery by its name": (
        "reference",
        "reference/norms/rms_norm.py",
        "importlib.import_module('liger_multi.errors')\n",
    ),
    "backend imports a contract by its name": (
        "backend",
        "backends/cuda/rms_norm.py",
        "importlib.import_module('liger_multi.ops.rms_norm')\n",
    ),
    "core imports triton by its name": (
        "optional",
        "liger_multi/dispatch/launch.py",
        "tl = importlib.import_module('triton.language')\n",
    ),
    "a kernel asks for a capability number": (
        "portable",
        "backends/triton/norms/rms_norm.py",
        "x = torch.cuda.get_device_capability()\n",
    ),
    "a product of fp32 by default": (
        "portable",
        "backends/triton/norms/rms_norm.py",
        "x = tl.dot(a, b)\n",
    ),
    "an atomic sum": (
        "portable",
        "backends/triton/norms/rms_norm.py",
        "tl.atomic_add(a, b)\n",
    ),
    "operator imports a backend": (
        "layer",
        "liger_multi/ops/rms_norm.py",
        "from liger_multi.backends.triton import rms_norm\n",
    ),
    "operator imports its reference": (
        "layer",
        "liger_multi/ops/rms_norm.py",
        "from liger_multi.reference import rms_norm\n",
    ),
    "reference imports the machinery": (
        "reference",
        "reference/norms/rms_norm.py",
        "from liger_multi.errors import E\n",
    ),
    "reference imports the machinery lazily": (
        "reference",
        "reference/norms/rms_norm.py",
        "def f():\n    import liger_multi.dispatch.config\n",
    ),
    "reference imports a package": ("reference", "reference/norms/rms_norm.py", "import numpy\n"),
    "reference imports a kernel": (
        "reference",
        "reference/norms/rms_norm.py",
        "from liger_multi.backends.triton.norms.rms_norm import forward\n",
    ),
    "one vendor imports another": (
        "backend",
        "backends/cuda/rms_norm.py",
        "from liger_multi.backends.rocm import BACKEND\n",
    ),
    "one vendor imports another lazily": (
        "backend",
        "backends/cuda/rms_norm.py",
        "def f():\n    from liger_multi.backends import npu\n",
    ),
    "the shared layer imports a vendor": (
        "backend",
        "backends/triton/norms/rms_norm.py",
        "from liger_multi.backends.cuda import BACKEND\n",
    ),
    "backend imports a contract": (
        "backend",
        "backends/triton/norms/rms_norm.py",
        "from liger_multi.ops.rms_norm import op\n",
    ),
    "core imports triton": (
        "optional",
        "liger_multi/dispatch/launch.py",
        "import triton.language as tl\n",
    ),
    "core imports transformers in a try": (
        "optional",
        "liger_multi/nn/__init__.py",
        "try:\n    from transformers import X\nexcept ImportError:\n    X = None\n",
    ),
    "formulas import pytest": ("optional", "liger_multi/testing/formulas.py", "import pytest\n"),
    "core imports matplotlib in a class": (
        "optional",
        "liger_multi/dispatch/op.py",
        "class A:\n    import matplotlib\n",
    ),
    "long function": ("length", "liger_multi/dispatch/op.py", "def f():\n" + LINES * 81),
    "long method": (
        "length",
        "liger_multi/dispatch/op.py",
        "class A:\n    async def f(self):\n" + f"    {LINES}" * 81,
    ),
    "long reference": ("length", "reference/norms/rms_norm.py", "def forward(x):\n" + LINES * 81),
    "long launcher": (
        "length",
        "backends/triton/norms/rms_norm.py",
        "def forward(x):\n" + LINES * 81,
    ),
    "long kernel": (
        "length",
        "backends/triton/norms/rms_norm.py",
        '@triton.jit\ndef k(x_ptr):\n    """Explained."""\n' + LINES * 81,
    ),
    "kernel without a docstring": (
        "explained",
        "backends/triton/norms/rms_norm.py",
        "@triton.jit\ndef k(x_ptr):\n    x = 1\n",
    ),
    "kernel with arguments of jit and no docstring": (
        "explained",
        "backends/cuda/rms_norm.py",
        "@triton.jit(do_not_specialize=['n'])\ndef k(x_ptr, n):\n    x = 1\n",
    ),
    "kernel with an empty docstring": (
        "explained",
        "backends/triton/norms/rms_norm.py",
        '@triton.jit\ndef k(x_ptr):\n    """ """\n    x = 1\n',
    ),
    "a sum of PyTorch's": (
        "portable",
        "backends/triton/norms/rms_norm.py",
        "def sums(x):\n    return x.float().sum(0)\n",
    ),
    **{
        f"private symbol of torch: {text}": ("private", path, text + "\n")
        for path, text in {
            "liger_multi/dispatch/op.py": "import torch\nx = torch._C._is_tracing()",
            "liger_multi/dispatch/registry.py": "from torch._C._functorch import is_batchedtensor",
            "liger_multi/errors.py": "def f():\n    import torch._dynamo",
            "reference/norms/rms_norm.py": "from torch.nn import Module as M\nx = M._call_impl",
            "backends/triton/norms/rms_norm.py": "import torch\nx = torch._grouped_mm",
            "backends/cuda/rms_norm.py": "import torch\na = torch.ops.aten\nx = a._to_copy.default",
            "liger_multi/testing/formulas.py": "import torch\nx = getattr(torch._C, 'y', None)",
            "liger_multi/testing/samples.py": "import torch\nx = getattr(torch, '_scaled_mm')",
            "liger_multi/nn/__init__.py": "import torch\nx = cast(Any, torch)._C\n__all__ = ['x']",
            "liger_multi/patching/__init__.py": "from torch.utils._pytree import tree_map",
            "liger_multi/cli/main.py": "import sys\nx = 'torch._dynamo' in sys.modules",
        }.items()
    },
    "no __all__": ("exports", "liger_multi/__init__.py", "from liger_multi import ops\n"),
    "modules without __all__": (
        "exports",
        "liger_multi/nn/__init__.py",
        "from liger_multi.ops import rms_norm\n",
    ),
    "a name twice in __all__": ("exports", "liger_multi/__init__.py", "__all__ = ['ops', 'ops']\n"),
    "operator without a reference": ("exports", "liger_multi/ops/swiglu.py", ""),
    "operator not exported": ("exports", "liger_multi/ops/__init__.py", "__all__ = ['rms_norm']\n"),
}


def test_every_rule_has_a_planted_violation():
    assert {rule for rule, _, _ in PLANTED.values()} | {"vendor word"} == layering.RULES.keys()


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_found(findings, name):
    rule, path, text = PLANTED[name]
    assert (rule, path) in findings(files={path: text})


@pytest.mark.parametrize(
    "text",
    [
        "IS = torch.version.hip is None\n",
        "from x import is_hip\n",
        "def is_npu(): pass\n",
        "import torch_npu\n",
        "if device.type == 'npu': pass\n",
        "table = {'gfx942': 1}\n",
        "ARCH = 'sm_90'\n",
        "arch = 'sm80'\n",
        "def f(is_npu): pass\n",
    ],
)
@pytest.mark.parametrize(
    "path",
    [
        "liger_multi/dispatch/op.py",
        "reference/norms/rms_norm.py",
        "backends/triton/norms/rms_norm.py",
    ],
)
def test_a_vendor_word_is_found(findings, path, text):
    assert ("vendor word", path) in findings(files={path: text})


@pytest.mark.parametrize(
    "text",
    ["# on gfx942 and npu\n", '"""For sm90 and npu."""\n', "input, inputs, nputs = 1, 2, 3\n"],
)
def test_comments_and_docstrings_may_name_vendors(findings, text):
    assert findings(files={"liger_multi/errors.py": text}) == []


def test_what_is_short_and_explained_has_no_findings(findings):
    """80 lines are not too many, docstrings do not count, and files have no limit."""
    words = '    """Explained.\n\n' + "    One fact a line.\n" * 90 + '    """\n'
    kernel = f"@triton.jit\ndef k(x_ptr):\n{words}" + LINES * 80
    files = {
        "backends/triton/norms/rms_norm.py": kernel,
        "reference/norms/rms_norm.py": "x = 1\n" * 500,
    }
    assert findings(files=files) == []


def test_a_cycle_is_found(findings):
    broken = findings(
        files={
            "liger_multi/a.py": "import liger_multi.b\n",
            "liger_multi/b.py": "from liger_multi.c import x\n",
            "liger_multi/c.py": "from liger_multi import a\n",
        }
    )
    assert broken == [("cycle", f"liger_multi/{name}.py") for name in "abc"]


def test_imports_for_type_checkers_do_not_count(findings):
    text = "if TYPE_CHECKING:\n    from liger_multi.ops import rms_norm\n    import triton\n"
    assert findings(files={"liger_multi/dispatch/launch.py": text}) == []
    text += "else:\n    import triton\n"
    assert findings(files={"liger_multi/dispatch/launch.py": text})


@pytest.mark.parametrize(
    "text", ["from liger_multi.reference import norms", "import_module('liger_multi.reference')"]
)
def test_functions_may_import_the_reference(findings, text):
    operator = CLEAN["liger_multi/ops/rms_norm.py"]
    assert (
        findings(files={"liger_multi/ops/rms_norm.py": f"{operator}def f():\n    {text}\n"}) == []
    )
    assert findings(files={"liger_multi/ops/rms_norm.py": f"{operator}{text}\n"})


def test_the_links_of_an_editable_install_are_not_read_twice(findings, tmp_path):
    findings()
    (tmp_path / "liger_multi/backends").symlink_to(tmp_path / "backends")
    (tmp_path / "backends/cuda/rms_norm.py").write_text("import liger_multi.ops\n")
    assert [f.path for f in layering.check(tmp_path)] == ["backends/cuda/rms_norm.py"]


@pytest.mark.parametrize("package", ["liger_multi", "liger_multi.ops"])
def test_every_public_name_resolves_and_is_documented(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        if name.startswith("__"):
            continue
        assert inspect.getdoc(value), f"{package}.{name} has no docstring"
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__module__.startswith("liger_multi"), (
                f"{package}.{name} is somebody else's"
            )


@pytest.mark.parametrize(
    "folder", ["liger_multi", "reference", "backends", "benchmarks", "ci", "tests"]
)
def test_nothing_stands_behind_a_return(folder):
    """A message wrapped without parentheses ends early, and its rest is a statement of its own."""
    for file in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
                statements = body if isinstance(body, list) else []
                for statement, dead in itertools.pairwise(statements):
                    ends = isinstance(statement, ast.Return | ast.Raise)
                    assert not ends, f"{file}:{dead.lineno}"
