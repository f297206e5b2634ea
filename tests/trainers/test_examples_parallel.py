"""The examples of adapters and of several ranks run on a CPU and learn."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import harness

EXAMPLES = Path(__file__).parents[2] / "examples"
pytest.importorskip("transformers")


def losses(name, ranks=1, **environment):
    """What an example printed as its losses; it runs as a user starts it."""
    # the launcher holds the port of the ranks' meeting itself: nobody else can take it before them
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [sys.executable, *(launcher if ranks > 1 else ()), str(EXAMPLES / f"{name}.py")],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=harness.PATIENCE,
    )
    assert done.returncode == 0, done.stdout
    assert "fused_linear_cross_entropy" in done.stdout
    return [float(x) for x in re.findall(r"step \d+: loss ([0-9.]+)", done.stdout)]


def learns(found):
    assert len(found) == 12
    assert sum(found[-3:]) / 3 < found[0] - 0.3, found


def test_peft():
    pytest.importorskip("peft")
    learns(losses("peft_lora"))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_fsdp2():
    learns(losses("fsdp2", ranks=2))


@pytest.mark.slow
def test_deepspeed():
    pytest.importorskip("deepspeed")
    learns(losses("deepspeed_zero3", ranks=2, DS_ACCELERATOR="cpu"))
