"""Processes for the ranks of a test.

On a machine without an accelerator they are forked from a server that has imported PyTorch and
transformers, which takes longer than most tests of several ranks. Elsewhere each is an interpreter
of its own: what a driver has begun is not to be forked.

A rank ends without taking its objects apart. The reducer of DistributedDataParallel may be the last
that holds a process group of gloo; it joins the group's thread and has the lock of the interpreter,
which that thread waits for (PyTorch 2.13, now and then on a busy machine).
"""

import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
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


def _forked(script, arguments, environment, log):
    """``python script arguments``, in a process that was forked."""
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.environ.update(environment)
    _rank(script, arguments)


def _rank(script, arguments):
    """Run a script; what it made is held until the process has gone."""
    faulthandler.enable()
    sys.argv = [str(script), *arguments]
    sys.path[:0] = [str(Path(script).parent), str(Path(__file__).parents[1])]
    code, lines = 0, []
    try:
        lines.append(runpy.run_path(str(script), run_name="__main__"))
    except BaseException as error:
        code, lines = 1, [error]
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Process:
    """One rank."""

    def __init__(self, script, arguments, environment, log, forked):
        self.log = log
        if forked:
            target = forks().Process(target=_forked, args=(script, arguments, environment, log))
            target.start()
            self._wait, self.kill = target.join, target.kill
            self._code, self._pid = (lambda: target.exitcode), target.pid
        else:
            started = subprocess.Popen(
                [sys.executable, __file__, str(script), *arguments],
                env={**os.environ, **environment},
                stdout=log.open("w"),
                stderr=subprocess.STDOUT,
            )
            self._code, self._pid, self.kill = started.poll, started.pid, started.kill
            self._wait = lambda seconds: _waited(started, seconds)

    def end(self, seconds):
        """Its exit code and what it printed; where it takes longer, also where it stands."""
        self._wait(max(0.0, seconds))
        code = self._code()
        if code is None:
            os.kill(self._pid, signal.SIGABRT)
            self._wait(5.0)
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
            environ = {k: v.replace("RANK", str(rank)) for k, v in environment.items()}
            log = folder / f"rank{rank}.log"
            started.append(Process(script, arguments, environ, log, forked))
        return [process.end(until - time.monotonic()) for process in started]
    finally:
        for process in started:
            process.kill()


if __name__ == "__main__":
    _rank(sys.argv[1], sys.argv[2:])
