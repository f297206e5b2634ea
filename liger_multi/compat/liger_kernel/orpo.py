"""``LigerORPOTrainer``: TRL's trainer of ORPO on a patched model; created on first access."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from liger_multi.errors import loading

HOMES = ("trl.experimental.orpo", "trl.trainer", "trl")
"""Where versions of TRL have their trainer, the newest first."""


def _trainer_of_trl() -> Any:
    for home in HOMES:
        try:
            return importlib.import_module(home).ORPOTrainer
        except (ImportError, AttributeError):
            continue
    raise ImportError(
        f"LigerORPOTrainer needs the ORPOTrainer of TRL, which none of {', '.join(HOMES)} has"
    )


@functools.cache
def _made() -> type[Any]:
    from liger_multi.integrations import TrainerCallback

    class LigerORPOTrainer(_trainer_of_trl()):  # type: ignore[misc]
        """TRL's ``ORPOTrainer`` whose model is patched when the trainer is made.

        The losses are TRL's; logits are computed only where they are read.
        """

        def __init__(self, *args: Any, callbacks: Any = None, **kwargs: Any) -> None:
            super().__init__(*args, callbacks=[*(callbacks or ()), TrainerCallback()], **kwargs)

    LigerORPOTrainer.__qualname__ = LigerORPOTrainer.__name__
    return LigerORPOTrainer


def __getattr__(name: str) -> Any:
    if name != "LigerORPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with loading(f"{__name__}.{name}"):
        return _made()
