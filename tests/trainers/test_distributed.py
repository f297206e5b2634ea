"""Patched models on two ranks train as stock ones in one process do.

Gloo on the CPU; with ``--backend cuda`` NCCL, on the first two devices. All cases share two
processes; distributed_cases.py has them.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests import distributed_cases, harness, processes

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch is built without gloo", allow_module_level=True)

NEEDS = {"adapters": "peft", "deepspeed": "deepspeed"}


class Ranks:
    """Two processes that run cases; what became of each is read from their files."""

    def __init__(self, folder, kind, names):
        # what launchers say of a rank, for DeepSpeed
        environment = {
            "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2",
            "DS_ACCELERATOR": kind, "RANK": "RANK", "LOCAL_RANK": "RANK",
        }  # fmt: skip
        files = [folder / f"{rank}.json" for rank in range(2)]
        every = [
            [str(rank), str(folder / "meet"), kind, str(file), *names]
            for rank, file in enumerate(files)
        ]
        forked = harness.accelerator() is None
        ended = processes.run(
            distributed_cases.__file__, folder, every, environment, harness.PATIENCE, forked
        )
        self.output = "".join(text for _, text in ended)
        self.results = [json.loads(f.read_text()) if f.exists() else {} for f in files]

    def check(self, name):
        for rank, results in enumerate(self.results):
            assert name in results, f"rank {rank} did not come to it:\n{self.output[-3000:]}"
            assert not results[name], f"rank {rank}: {results[name]}"


@pytest.fixture(scope="session")
def started(tmp_path_factory, request):
    """Two ranks for the fast cases, and two for each slow one, when a test asks for them."""
    device, made = harness.selected_device(request.config), {}
    if device.type not in ("cpu", "cuda"):
        pytest.skip(f"no collectives to test on {device.type}")
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device; these need two")

    def ranks(name):
        fast = [n for n in distributed_cases.CASES if n not in distributed_cases.SLOW]
        names = [name] if name in distributed_cases.SLOW else [n for n in fast if not missing(n)]
        key = tuple(names)
        if key not in made:
            made[key] = Ranks(tmp_path_factory.mktemp("ranks"), device.type, names)
        return made[key]

    return ranks


def missing(name):
    """A package that a case needs and this environment lacks."""
    from importlib.util import find_spec

    return [p for word, p in NEEDS.items() if word in name and find_spec(p) is None]


BUILD = """
import sys
from deepspeed.accelerator import get_accelerator
builder = get_accelerator().create_op_builder("AsyncIOBuilder")
if not builder.is_compatible(verbose=False):
    sys.exit(7)
builder.load()
"""


@pytest.fixture
def files_beside_memory(request):
    """DeepSpeed's reader and writer of files, which it compiles when first used, for minutes."""
    kind = harness.selected_device(request.config).type
    built = subprocess.run(
        [sys.executable, "-c", BUILD],
        env={**os.environ, "DS_ACCELERATOR": kind},
        capture_output=True,
        text=True,
    )
    if built.returncode == 7:
        pytest.skip("no libaio with its headers, to compile DeepSpeed's async_io with")
    assert not built.returncode, built.stderr[-3000:]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if n in distributed_cases.SLOW else ())
        for n in distributed_cases.CASES
    ],
)
def test_two_ranks(name, started, request):
    absent = missing(name)
    if absent:
        pytest.skip(f"{absent[0]} is not installed")
    if "nvme" in name:
        request.getfixturevalue("files_beside_memory")
    started(name).check(name)
