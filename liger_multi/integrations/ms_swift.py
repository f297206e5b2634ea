"""A callback for ms-swift: ``--external_plugins`` this file, ``--callbacks liger_multi``.

Operators and their options, as for :func:`liger_multi.patch`, stand as JSON in the variable
``LIGER_MULTI_PATCH``, because ms-swift gives a callback no arguments of its own.
"""

from __future__ import annotations

import json
import os
from typing import Any

from swift.callbacks import callbacks_map

from liger_multi.errors import PatchError
from liger_multi.integrations.trainer import TrainerCallback

VARIABLE = "LIGER_MULTI_PATCH"


def _options() -> dict[str, Any]:
    text = os.environ.get(VARIABLE) or "{}"
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise PatchError(f"{VARIABLE} must be a JSON object of operators, got {text!r}")
    return options


class LigerMulti(TrainerCallback):
    """:class:`liger_multi.integrations.TrainerCallback` as ms-swift makes its callbacks."""

    def __init__(self, args: Any, trainer: Any) -> None:
        super().__init__(**_options())
        self.args, self.trainer = args, trainer


callbacks_map["liger_multi"] = LigerMulti
