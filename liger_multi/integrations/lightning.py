"""A callback for Lightning."""

from __future__ import annotations

from typing import Any

from liger_multi.patching import PatchReport
from liger_multi.patching.apply import TrainerPatch
from liger_multi.patching.options import OpChoice

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:  # the older distribution of the same library
    from pytorch_lightning import Callback


class LightningCallback(Callback):
    """Patch the Hugging Face models inside of a ``LightningModule``.

    They are patched at setup, before the strategy wraps and moves them. A model that
    ``configure_model`` makes comes later: call :func:`liger_multi.patch` there.

    Args:
        strict: Raise when anything that was asked for is skipped.
        unpatch_at_end: At teardown, give every module the class that it had before.
        ops: Operators and their options, as for :func:`liger_multi.patch`.
    """

    def __init__(
        self, *, strict: bool = False, unpatch_at_end: bool = False, **ops: OpChoice
    ) -> None:
        super().__init__()
        self.unpatch_at_end = unpatch_at_end
        self._held = TrainerPatch(strict, ops)

    @property
    def report(self) -> PatchReport | None:
        """What was replaced and what was skipped; None before setup."""
        return self._held.report

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Patch what the module holds."""
        self._held.hold(pl_module)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take the patch back, where that was asked for."""
        if self.unpatch_at_end:
            self._held.release()
