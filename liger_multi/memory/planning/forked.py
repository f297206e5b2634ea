"""A second process that works at the same time, where the machine has a core for it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch


def can_fork() -> bool:
    """Whether a copy of this process may work: no thread is lost in it, and a second core waits."""
    if sys.platform != "linux" or threading.active_count() > 1:
        return False
    return len(os.sched_getaffinity(0)) > 1 and not torch.cuda.is_initialized()


@contextlib.contextmanager
def forked(work: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Run ``work`` in a copy of this process, which has imported what is slow to import.

    Yields a function that waits for what ``work`` returned, plain data. It returns None where the
    process failed: whoever does the work instead meets the error.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(work, there), daemon=True)
    process.start()
    there.close()

    def result() -> Any:
        try:
            return here.recv()
        except (EOFError, OSError):
            return None

    try:
        yield result
    finally:
        process.terminate()
        process.join()
        here.close()


def _run(work: Callable[[], Any], to: Connection) -> None:
    torch.set_num_threads(1)  # those of the first process are not here
    with contextlib.suppress(Exception):
        to.send(work())
