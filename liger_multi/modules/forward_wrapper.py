"""A wrapper around the forward of a module, whose block ends even if the call raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_multi._torch_private import frame_callback, outside_of_graphs


class ForwardWrapper:
    """What stands in for a module's ``forward``; plain attributes, so that copies copy it.

    PyTorch runs no hook after a call that Ctrl-C or another ``BaseException`` ended, so state that
    a hook sets would outlive the call. Here a ``with`` of ``call`` ends it.

    Args:
        module: Whose forward it is; the class may change later.
        call: ``call(forward, args, kwargs)`` runs the forward that was there.
    """

    def __init__(
        self, module: nn.Module, call: Callable[[Callable[..., Any], Any, Any], Any]
    ) -> None:
        self.module = module
        self.call: Callable[[Callable[..., Any], Any, Any], Any] | None = call
        self.before = vars(module).get("forward")
        vars(module)["forward"] = self

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The forward as it was."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        if self.call is None:
            return self.original(*args, **kwargs)
        return self.call(self.original, args, kwargs)

    def remove(self) -> None:
        """Give the forward back; below one that other code put on top, do nothing from now on."""
        self.call = None
        if vars(self.module).get("forward") is not self:
            return
        if self.before is None:
            del vars(self.module)["forward"]
        else:
            vars(self.module)["forward"] = self.before


outside_of_graphs(ForwardWrapper.__call__, "a wrapper of a forward runs eagerly")


def is_compiled() -> bool:
    """Whether a compiler follows this call, or has broken its graph for it."""
    callback = None if frame_callback is None else frame_callback()
    return torch.compiler.is_compiling() or callback not in (None, False)
