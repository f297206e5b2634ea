"""The examples of adapters and of several ranks run on a CPU and learn."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
pytest.importorskip("transformers")


def losses(name, ranks=1, **environment):
    """What an example printed as its losses; it runs as a user starts it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    places = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(ranks)}
    started = [
        subprocess.Popen(
            [sys.executable, str(EXAMPLES / f"{name}.py")],
            env={**os.environ, **hidden, **places, **environment}
            | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [p.communicate(timeout=600)[0] for p in started]
    finally:
        for p in started:
            p.kill()
    assert [p.returncode for p in started] == [0] * ranks, said
    assert "fused_linear_cross_entropy" in said[0]
    return [float(x) for x in re.findall(r"step \d+: loss ([0-9.]+)", said[0])]


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
