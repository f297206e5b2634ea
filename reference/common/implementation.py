"""An entry of a family's table of operators that is made by a function, not written as a class."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Implementation(NamedTuple):
    """Forward and backward of one operator."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
