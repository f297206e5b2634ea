"""A callback for the ``Trainer`` of transformers and for the trainers of TRL."""

from __future__ import annotations

from typing import Any

import transformers

from liger_multi.errors import PatchError
from liger_multi.integrations import sequence
from liger_multi.integrations.prefixes import share_prefixes, unshare_prefixes
from liger_multi.patching import PatchReport
from liger_multi.patching.apply import HeldPatch
from liger_multi.patching.options import OpChoice


class TrainerCallback(transformers.TrainerCallback):
    """Patch a trainer's model, with no change to the trainer.

    The model is patched when the trainer is made, before it is moved, wrapped or compiled; a model
    of ``model_init`` when training begins. Resuming, evaluating, saving and pushing see the same
    parameters under the same names as without it. With ``parallelism_config`` a
    :class:`liger_multi.integrations.SequenceParallel`, rows are spread over ranks from the
    beginning of training on.

    Args:
        strict: Raise when anything that was asked for is skipped.
        shared_prefixes: Let the trainers of TRL that score several answers to a prompt (GRPO, RLOO,
            DPO) compute it once, from the beginning of training on; see
            :func:`liger_multi.integrations.share_prefixes`. Attention is then ours.
        unpatch_at_end: When training ends, give every module the class that it had before: the
            original one, or an earlier patch of yours.
        ops: Operators and their options, as for :func:`liger_multi.patch`.

    Raises:
        PatchError: An unknown operator or option; or, when the trainer is made, a trainer that
            patches the model itself (``use_liger_kernel=True``); or, when training begins, a
            setting that rows over ranks do not serve.
    """

    def __init__(
        self,
        *,
        strict: bool = False,
        unpatch_at_end: bool = False,
        shared_prefixes: bool = False,
        **ops: OpChoice,
    ) -> None:
        self.unpatch_at_end, self.shared_prefixes = unpatch_at_end, shared_prefixes
        self._held = HeldPatch(strict, ops)

    @property
    def report(self) -> PatchReport | None:
        """What was replaced and what was skipped; None before a trainer has brought its model."""
        return self._held.report

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Patch the model that the trainer was given."""
        if getattr(args, "use_liger_kernel", False):
            raise PatchError(
                "use_liger_kernel=True lets the trainer patch the model too; use that (with "
                "liger_multi.compat.liger_kernel.install() for these operators) or this callback"
            )
        if model is not None:
            self._held.hold(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Patch a model that ``model_init`` made, or one that was unpatched at the last end."""
        if model is not None:
            self._held.hold(model)
        if model is not None:
            sequence.spread(model, args, self.shared_prefixes)
        if model is not None and self.shared_prefixes:
            share_prefixes(model)

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Take the patch back, where that was asked for."""
        if self.unpatch_at_end:
            if model is not None:
                sequence.unspread(model)
                unshare_prefixes(model)
            self._held.release()
