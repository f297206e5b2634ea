"""Callbacks for trainers, and gpt-oss in 4 bits; each loads its library on first use.

Plain loops and accelerate need none: call :func:`liger_multi.patch` on the model.
"""

import importlib
from typing import TYPE_CHECKING, Any

from liger_multi.errors import loading

if TYPE_CHECKING:
    from liger_multi.integrations.codes import export_codes
    from liger_multi.integrations.lightning import LightningCallback
    from liger_multi.integrations.mxfp4 import (
        dequantize_weights,
        load_mxfp4,
        merge_adapters_mxfp4,
        merge_mxfp4,
    )
    from liger_multi.integrations.trainer import (
        SequenceParallel,
        SharedPrefixes,
        TrainerCallback,
        share_prefixes,
    )

__all__ = [
    "LightningCallback",
    "SequenceParallel",
    "SharedPrefixes",
    "TrainerCallback",
    "dequantize_weights",
    "export_codes",
    "load_mxfp4",
    "merge_adapters_mxfp4",
    "merge_mxfp4",
    "share_prefixes",
]
_HOMES = {
    "LightningCallback": "lightning",
    "SequenceParallel": "trainer",
    "SharedPrefixes": "trainer",
    "TrainerCallback": "trainer",
    "dequantize_weights": "mxfp4",
    "export_codes": "codes",
    "load_mxfp4": "mxfp4",
    "merge_adapters_mxfp4": "mxfp4",
    "merge_mxfp4": "mxfp4",
    "share_prefixes": "trainer",
}


def __getattr__(name: str) -> Any:
    """Load a callback, and with it the trainer's library."""
    if name not in _HOMES:
        raise AttributeError(f"module 'liger_multi.integrations' has no attribute {name!r}")
    with loading(f"liger_multi.integrations.{name}"):
        module = importlib.import_module(f"liger_multi.integrations.{_HOMES[name]}")
        globals()[name] = getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    """The public names, which stand in globals only after their first use."""
    return sorted({*globals(), *__all__})
