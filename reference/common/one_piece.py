"""Whether a compiler looks on: blocks of rows, which bound memory, are then its business."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_in_one_piece: ContextVar[bool] = ContextVar("liger_multi_in_one_piece", default=False)


@contextlib.contextmanager
def one_piece() -> Iterator[None]:
    """Have no blocks of rows within a block: a compiler fuses what would be written in between.

    ``torch.compiler.is_compiling()`` does not say so: before torch 2.13 it is false where
    AOTAutograd traces.
    """
    token = _in_one_piece.set(True)
    try:
        yield
    finally:
        _in_one_piece.reset(token)


def in_one_piece() -> bool:
    """Whether all rows are computed at once."""
    return _in_one_piece.get()
