"""What importing costs and needs: nothing optional, no driver, no network, no writable home."""

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from liger_multi import _torch_private

ROOT = Path(__file__).parents[2]
OPTIONAL = (
    "triton",
    "transformers",
    "torch_npu",
    "rich",
    "matplotlib",
    "tokenizers",
    "accelerate",
    "peft",
    "datasets",
    "trl",
)

TRAIN = """
import torch
import liger_multi
from liger_multi import ops

x = torch.randn(6, 16, requires_grad=True)
w = torch.ones(16, requires_grad=True)
head = torch.randn(40, 16, requires_grad=True)
target = torch.tensor([1, 2, -100, 39, 0, 7])
loss = ops.fused_linear_cross_entropy(ops.swiglu(ops.rms_norm(x, w), x), head, target)
loss = loss + ops.cross_entropy(x @ head.T, target)
loss.backward()
assert all(t.grad is not None and t.grad.isfinite().all() for t in (x, w, head))
"""

# A stock model, built from its configuration as nothing can be fetched, and trained patched.
PATCHED = """
import torch
import liger_multi
from transformers import LlamaConfig, LlamaForCausalLM

model = LlamaForCausalLM(LlamaConfig(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
))
liger_multi.patch(model, strict=True)
ids = torch.arange(12).view(2, 6)
out = model(input_ids=ids, labels=ids)
out.loss.backward()
assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
assert out.logits.argmax(-1).shape == ids.shape
"""

# Finds a module where it was told to hide one, and says so as a machine without it would.
HIDE = """
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return None

sys.meta_path.insert(0, Hide())
import importlib.util
original = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name.partition(".")[0] in {names!r} else original(name, package)
)
"""


def python(code, *, cwd=ROOT, **environment):
    """Run code in a fresh interpreter that finds this checkout."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "error:::liger_multi", "-c", code],
        cwd=cwd,
        env={**env, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# A module of ours in which something is missing that a release of PyTorch took away.
BROKEN = """
import sys

class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == {broken!r}:
            raise AttributeError("PyTorch has no frobnicate any more")
        return None

sys.meta_path.insert(0, Broken())
try:
    from {module} import {name}
except ImportError as error:
    assert "frobnicate" in str(error), error
    assert isinstance(error.__cause__, AttributeError)
else:
    raise AssertionError("imported")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "broken"),
    [
        ("liger_multi", "patch", "liger_multi.patching.apply"),
        ("liger_multi.integrations", "TrainerCallback", "liger_multi.patching"),
        ("liger_multi.testing", "bisect", "liger_multi.testing.bisection.compare"),
    ],
)
def test_import_errors_keep_their_cause(module, name, broken):
    python(BROKEN.format(module=module, name=name, broken=broken))


# torch may import one of these itself: what counts is what comes on top.
BEFORE = "import sys, torch\nbefore = set(sys.modules)\n"
ADDED = f"print(*(m for m in {OPTIONAL!r} if m in set(sys.modules) - before))\n"
NO_DEVICES = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "ASCEND_RT_VISIBLE_DEVICES": "",
}


def test_importing_loads_nothing_optional_and_touches_no_driver():
    code = (
        BEFORE
        + "import liger_multi, threading\n"
        + ADDED
        + "print(torch.cuda.is_initialized(), *(t.name for t in threading.enumerate()))"
    )
    assert python(code) == "False MainThread"


@pytest.mark.slow
def test_lazy_modules_load_nothing_optional():
    use = """
import liger_multi
print("liger_multi.nn" in sys.modules)
y = liger_multi.nn.RMSNorm(4)(torch.ones(2, 4))
loss = liger_multi.nn.CrossEntropyLoss()(y, torch.tensor([0, 1]))
from liger_multi import nn
print(nn is liger_multi.nn is sys.modules["liger_multi.nn"], round(loss.item(), 3))
"""
    assert python(BEFORE + use + ADDED, **NO_DEVICES).splitlines() == ["False", "True 1.386"]


def test_the_first_calls_without_a_device_load_nothing_optional():
    assert python(BEFORE + TRAIN + ADDED + "print('ran')", **NO_DEVICES) == "ran"


@pytest.mark.slow
def test_every_operator_runs_with_optional_packages_hidden():
    bound = """
try:
    with liger_multi.use(rms_norm="triton"):
        ops.rms_norm(x, w)
except liger_multi.errors.BackendUnavailableError as error:
    print(error)
"""
    output = python(HIDE.format(names=OPTIONAL) + TRAIN + bound)
    assert "needs Triton, which is not installed" in output
    assert "rms_norm" in output


@pytest.mark.slow
@pytest.mark.parametrize("what", ["operators", "patched model"])
def test_offline_with_a_read_only_home(tmp_path, what):
    if what == "patched model":
        pytest.importorskip("transformers")
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    for folder in (home, work):
        folder.chmod(0o555)
    # A superuser writes where permission is denied: refuse the calls, as a read-only mount does.
    refuse = """
import builtins, os, socket
HOME = os.path.realpath(os.environ["HOME"])

def guard(call):
    def refused(path, *args, **kwargs):
        text = os.fspath(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        text = os.fsdecode(text)
        mode = args[0] if args and isinstance(args[0], str) else kwargs.get("mode", "w")
        writes = call is not real_open or any(c in str(mode) for c in "wax+")
        if writes and os.path.realpath(text).startswith((HOME, os.getcwd())):
            raise OSError(30, "Read-only file system", text)
        return call(path, *args, **kwargs)
    return refused

def offline(*args, **kwargs):
    raise OSError(101, "Network is unreachable")

real_open = builtins.open
builtins.open, os.mkdir, os.makedirs = guard(real_open), guard(os.mkdir), guard(os.makedirs)
socket.socket.connect = socket.getaddrinfo = socket.create_connection = offline
"""
    environment = {
        "HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(home / ".cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
        **NO_DEVICES,  # a driver keeps a cache of its own at home
    }
    train = TRAIN if what == "operators" else PATCHED
    assert python(refuse + train + "print('ran')", cwd=work, **environment) == "ran"
    assert not list(home.iterdir())
    assert not list(work.iterdir())


@pytest.mark.parametrize(
    ("folder", "module"), [("backends", "backends.cuda"), ("reference", "reference.rms_norm")]
)
def test_a_source_folder_refuses_another_name(folder, module):
    code = f"""
for name in ({folder!r}, {module!r}):
    try:
        __import__(name)
    except ImportError as error:
        print(error)
"""
    lines = python(code).splitlines()
    assert len(lines) == 2
    for line in lines:
        assert f"liger_multi.{folder}" in line
        assert repr(folder) in line


@pytest.mark.slow
def test_public_names_and_dir():
    code = """
import sys, liger_multi
print(" ".join(dir(liger_multi)))
print(*[n for n in ("losses", "memory", "nn") if f"liger_multi.{n}" in sys.modules])
print(*[getattr(liger_multi, n).__name__ for n in ("losses", "memory", "nn")])
"""
    public, before, after = python(code).splitlines()
    assert public.split() == sorted(importlib.import_module("liger_multi").__all__)
    assert before == ""
    assert after == "liger_multi.losses liger_multi.memory liger_multi.nn"


def test_absent_attribute_message():
    with pytest.raises(AttributeError, match="'liger_multi' has no attribute 'pach'"):
        importlib.import_module("liger_multi").pach  # noqa: B018


# --- private symbols of PyTorch ---


pytest.importorskip("transformers")

TABLE = sorted({path for symbol in _torch_private.SYMBOLS for path in symbol.paths})
EVERY = "all of them"
DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
SERVER = Path(__file__).with_name("without_symbol.py")


@pytest.fixture(scope="module")
def without():
    """A function that trains a model without a symbol: its traceback, if it failed, and its log."""
    command = [sys.executable, str(SERVER), *TABLE]
    path = os.pathsep.join(
        [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # without a device, whose threads of autograd no fork could take along
        env={**os.environ, "PYTHONPATH": path, **dict.fromkeys(DEVICES, "")},
    ) as server:

        def ask(path):
            server.stdin.write(f"{path}\n")
            server.stdin.flush()
            return json.loads(server.stdout.readline())

        with contextlib.closing(server.stdin):
            yield ask


@pytest.mark.parametrize("path", [EVERY, *TABLE])
def test_a_model_trains_without_a_symbol(without, path):
    error, _ = without(path)
    assert not error, error


def test_missing_symbol_logged_once(without):
    lost = {symbol.paths[0]: symbol.lost for symbol in _torch_private.SYMBOLS}
    for path in ("torch._C._len_torch_dispatch_stack", "torch.Tensor._make_wrapper_subclass"):
        _, log = without(path)
        assert sum(path in line and lost[path] in line for line in log) == 1
    assert without("torch._C._is_any_autocast_enabled")[1] == []  # replaced by public means


def test_symbol_rows_are_complete():
    for symbol in _torch_private.SYMBOLS:
        assert symbol.serves
        assert re.fullmatch(r"2\.\d+ to 2\.\d+", symbol.versions)
        assert re.search(r"\._|^torch\._C\.", symbol.paths[0])


def test_symbols_of_this_pytorch():
    """A release within the versions of a row has its symbol."""
    import torch

    release = tuple(map(int, torch.__version__.split(".")[:2]))
    for symbol in _torch_private.SYMBOLS:
        first, last = (tuple(map(int, v.split("."))) for v in symbol.versions.split(" to "))
        if first <= release <= last:
            assert not symbol.absent, symbol
