"""What a part of patching yields: modules that it replaces, restores or leaves, with the reason.

A part is a generator ``find(model, request)``. :mod:`liger_multi.patching.apply` carries out every
change before it asks for the next one, so a part sees the model as its earlier changes left it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import nn

from liger_multi.patching.report import Skipped
from liger_multi.patching.swap import Swap


@dataclass(frozen=True, eq=False)
class Replace:
    """Give a module the class of a swap.

    Attributes:
        path: Of the module in the model.
        module: The module.
        swap: Its new class.
        replaced_by: What the report says that runs now; None for no line.
        options: Options of the line.
        op: The operator of the line; by default that of the swap.
    """

    path: str
    module: nn.Module
    swap: Swap
    replaced_by: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    op: str = ""


@dataclass(frozen=True, eq=False)
class Restore:
    """Give a module the class back that it had before it was patched, if it was.

    Attributes:
        path: Of the module in the model.
        module: The module.
        instead_of: An operator whose line for this module, of the same call, goes away; there is
            no line for the restored class then.
    """

    path: str
    module: nn.Module
    instead_of: str = ""


@dataclass(frozen=True)
class Relabel:
    """Modules that an earlier part replaced run another operator after all.

    Attributes:
        paths: Of the modules.
        op: The operator of their lines.
        replaced_by: What these say now.
    """

    paths: frozenset[str]
    op: str
    replaced_by: str


Change: TypeAlias = Replace | Restore | Relabel | Skipped
