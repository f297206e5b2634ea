"""What tests of meaningless input share: whether it was accepted, and time limits of reads."""

import contextlib
import signal

from liger_multi.errors import ConfigurationError


@contextlib.contextmanager
def at_most(seconds):
    """Reads that would block raise instead."""

    def late(*_):
        raise TimeoutError(f"still busy after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Loud:
    """Nothing can be asked of it."""

    def __repr__(self):
        raise OSError("no repr")

    def __eq__(self, other):
        raise OSError("no comparison")

    def __bool__(self):
        raise OSError("no truth")

    __hash__ = object.__hash__


def outcome(function, *args, **options):
    """Whether it was accepted; any other exception than ours fails the test."""
    message = ""
    try:
        function(*args, **options)
    except ConfigurationError as error:
        message = str(error)
        message.encode("utf-8")
    assert len(message) < 3000
    return not message
