"""Processes for the ranks of a test.

On a machine without an accelerator they are forked from a server that has imported PyTorch and
transformers, which takes longer than most tests of several ranks. Elsewhere each is an interpreter
of its own: what a driver has begun is not to be forked.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

PRELOADED = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",
    "accelerate",
    "peft",
    "liger_multi.patching",
]


def forks():
    """The context of processes that start with :data:`PRELOADED`; one server serves all tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _run(script, arguments, environment, log):
    """``python script arguments``, in a process that was forked."""
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.environ.update(environment)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(str(script), run_name="__main__")


class Process:
    """One rank."""

    def __init__(self, script, arguments, environment, log, forked):
        self.log = log
        if forked:
            target = forks().Process(target=_run, args=(script, arguments, environment, log))
            target.start()
            self._wait, self.kill = target.join, target.kill
            self._code = lambda: target.exitcode
        else:
            started = subprocess.Popen(
                [sys.executable, str(script), *arguments],
                env={**os.environ, **environment},
                stdout=log.open("w"),
                stderr=subprocess.STDOUT,
            )
            self._code, self.kill = started.poll, started.kill
            self._wait = lambda seconds: _waited(started, seconds)

    def end(self, seconds):
        """Its exit code and what it printed; it is killed where it takes longer."""
        self._wait(max(0.0, seconds))
        code = self._code()
        text = self.log.read_text()
        return code, text if code is not None else f"{text}\nno answer in time"


def _waited(started, seconds):
    try:
        started.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def run(script, folder, every, environment, patience, forked):
    """Run a script once for each list of arguments; exit code and output of every process."""
    started = []
    until = time.monotonic() + patience
    try:
        for rank, arguments in enumerate(every):
            given = {k: v.replace("RANK", str(rank)) for k, v in environment.items()}
            log = folder / f"rank{rank}.log"
            started.append(Process(script, arguments, given, log, forked))
        return [process.end(until - time.monotonic()) for process in started]
    finally:
        for process in started:
            process.kill()
