"""A patch that a callback of a trainer holds on one model and takes back exactly."""

from __future__ import annotations

import logging
import warnings
from typing import Any

from torch import nn

from liger_multi.errors import PatchError
from liger_multi.patching import registered
from liger_multi.patching.apply import patch
from liger_multi.patching.options import OpChoice, parse_request
from liger_multi.patching.report import PatchReport
from liger_multi.patching.swap import Block

logger = logging.getLogger("liger_multi")


class HeldPatch:
    """Patches the models that a trainer brings, one at a time.

    Args:
        strict: As for :func:`liger_multi.patch`.
        ops: As for :func:`liger_multi.patch`; checked here, not when training starts.
    """

    def __init__(self, strict: bool, ops: dict[str, OpChoice]) -> None:
        parse_request(ops, registered.probes(), strict)
        self.strict, self.ops = strict, ops
        self.report: PatchReport | None = None
        self._model: nn.Module | None = None
        self._block: Block | None = None

    def hold(self, model: nn.Module) -> None:
        """Patch ``model``, unless it is the patched one or a wrapper around that.

        An earlier model keeps its patch: a trainer that brings another one is done with it.
        """
        if self._model is not None and any(m is self._model for m in model.modules()):
            return
        block = Block(model)
        self.report = patch(model, strict=self.strict, **self.ops)
        self._model, self._block = model, block
        logger.info("%s", self.report)

    def release(self) -> None:
        """Give every module the class that it had before; warn where that cannot be done."""
        block, self._block, self._model = self._block, None, None
        try:
            if block is not None:
                block.end()
        except PatchError as error:  # the end of a training run is no place for an exception
            warnings.warn(f"the model stays patched: {error}", stacklevel=3)

    def __getstate__(self) -> dict[str, Any]:
        """Options only: a copy of a callback has patched nothing."""
        return {"strict": self.strict, "ops": self.ops}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start over with the options."""
        HeldPatch.__init__(self, **state)
