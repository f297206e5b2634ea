"""Hooks and fixtures of the one suite that serves every backend.

``--backend NAME`` (repeatable) runs it natively on that backend's device; without it, everything
that can run on this machine is under test.
"""

import gc
import importlib.util
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

# Before anything imports a hub client: a test that wants the network is a bug.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("LIGER_MULTI_CONFIG", None)
os.environ["LIGER_MULTI_CACHE"] = os.devnull  # no folder: plans simulate, and keep nothing

import pytest
import torch

from liger_multi.testing.checks import poison_empty
from tests import harness
from tests.interpreter import patch_interpreter

# PyTorch lets NVIDIA's convolutions round fp32 to TF32 unless it is told not to.
torch.backends.cudnn.allow_tf32 = False


def pytest_addoption(parser):
    parser.addoption(
        "--backend",
        action="append",
        default=[],
        metavar="NAME",
        help="backend to test on its own device (repeatable); default: all that can run",
    )
    parser.addoption(
        "--results",
        type=Path,
        metavar="FILE",
        help="write what ran where, on which versions, and its counts to this JSON file",
    )
    parser.addoption(
        "--part",
        default="",
        metavar="i/n",
        help="run the ith of n parts, which together are what would run without it",
    )


STARTED = pytest.StashKey[float]()
CASES = pytest.StashKey[Counter[str]]()


class Failures:
    """Names failing tests beside the results while the suite runs: a run may be cut short."""

    def __init__(self, path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid} ({report.when})\n")


def pytest_configure(config):
    config.stash[STARTED] = time.monotonic()
    config.stash[CASES] = Counter()
    if config.getoption("--results") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(
            Failures(config.getoption("--results").with_suffix(".failed"))
        )
    harness.parse_part(config.getoption("--part"))  # refused before anything is collected
    poison_empty()
    if harness.interpreted() and importlib.util.find_spec("triton"):
        patch_interpreter()
    if config.getoption("--backend"):
        harness.selected_backends(config)  # refuses before anything is collected


def pytest_report_header(config):
    return (
        f"backends under test: {', '.join(harness.selected_backends(config))}; device: "
        f"{harness.selected_device(config)}; torch {torch.__version__}"
        + ("; Triton interpreted" if harness.interpreted() else "")
    )


def pytest_itemcollected(item):
    harness.mark_slow_case(item, item.config.stash[CASES])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    named = [n for part in config.getoption("--backend") for n in part.split(",")]
    harness.apply_xfails(items, named, harness.read_xfails(Path(__file__).parent / "xfails"))
    harness.keep_part(config, items)


def pytest_collection_finish():
    """What was collected stays: no later collection of garbage looks through it again.

    Tracing makes many objects that live for a test; by the usual thresholds a sixth of the time of
    tests that compile goes to looking through them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


def pytest_unconfigure():
    gc.unfreeze()  # extensions report what is left of theirs at the end


def pytest_sessionfinish(session, exitstatus):
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.getoption("--part"):
        session.exitstatus = pytest.ExitCode.OK  # fewer tests than parts


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    path = config.getoption("--results")
    if path is None or exitstatus == pytest.ExitCode.INTERRUPTED:
        return  # half a run is no result
    from ci import results

    counts = {n: len(terminalreporter.stats.get(n, ())) for n in results.OUTCOMES}
    backends, device = harness.selected_backends(config), harness.selected_device(config)
    seconds = time.monotonic() - config.stash[STARTED]
    simulated = config.pluginmanager.hasplugin("ci.npu.simulate")
    part = config.getoption("--part")
    notes = ["on a simulated NPU (docs/ascend.md)"] * simulated + [f"part {part}"] * bool(part)
    red = [r.nodeid for n in ("failed", "error") for r in terminalreporter.stats.get(n, ())]
    results.write(path, backends, device, counts, seconds, "; ".join(notes), sorted(set(red)))
    terminalreporter.write_line(f"wrote {path}")


@pytest.fixture
def device(request):
    """Device of the test's ``backend`` parameter, or of the session's backend."""
    callspec = getattr(request.node, "callspec", None)
    backend = callspec.params.get("backend") if callspec else None
    if isinstance(backend, str) and backend != "reference":
        return harness.device_of(backend)
    return harness.selected_device(request.config)


def _settings():
    """What PyTorch keeps for a whole thread or process, by the functions that tell it."""
    tell = (
        torch.is_grad_enabled,
        torch.is_inference_mode_enabled,
        torch.is_anomaly_enabled,
        torch.get_default_dtype,
        torch.get_default_device,
        torch.are_deterministic_algorithms_enabled,
        torch.get_num_threads,
        torch.get_float32_matmul_precision,
    )
    state = {f.__name__: f() for f in tell}
    return state | {f"autocast of {d}": torch.is_autocast_enabled(d) for d in ("cpu", "cuda")}


def _stance_left():
    """How compiled functions run, if that is not the default; afterwards it is."""
    frames = sys.modules.get("torch._dynamo.eval_frame")  # not there: nothing was compiled
    left = frames and frames._stance.stance != "default" and frames._stance
    if left:
        torch.compiler.set_stance("default")
    return left


SETTINGS = _settings()
# Without a device to seed, torch.manual_seed keeps the seed and the caller's stack: milliseconds.
DEFAULT = torch.default_generator
SEED = torch.manual_seed if torch.accelerator.is_available() else DEFAULT.manual_seed


@pytest.fixture(autouse=True)
def settings():
    """No test, and no fixture of a module, leaves PyTorch in a state that later ones run in."""
    yield
    state, stance = _settings(), _stance_left()
    torch.set_grad_enabled(SETTINGS["is_grad_enabled"])
    torch.set_default_dtype(SETTINGS["get_default_dtype"])
    torch.use_deterministic_algorithms(SETTINGS["are_deterministic_algorithms_enabled"])
    assert state == SETTINGS
    assert not stance


@pytest.fixture(autouse=True)
def seed():
    """The same random numbers for every test, alone or among others."""
    random.seed(0)
    SEED(0)
    return 0


@pytest.fixture
def generator(seed):
    """A seeded CPU generator: draw there, then move, so that every device sees the same numbers."""
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def default_configuration():
    """No test sees the configuration that another one left behind."""
    yield
    from liger_multi.dispatch.config import forget

    forget()


@pytest.fixture(autouse=True)
def nothing_compiled():
    """No test meets what the compiler learned, or gave up on, in another one."""
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if hasattr(dynamo, "reset"):
        dynamo.reset()


@pytest.fixture
def one_process():
    """A process group of one process, over gloo."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch is built without gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def fused(monkeypatch):
    """Calls of the fused loss that patched models make."""
    from tests.models import FusedCalls

    return FusedCalls(monkeypatch)


@pytest.fixture
def calls(monkeypatch):
    """How often patched models call each operator."""
    from tests.models import Calls

    return Calls(monkeypatch)
