"""Callbacks for trainers, each made when its trainer is installed and somebody asks for it.

Plain loops and accelerate need none: call :func:`liger_multi.patch` on the model.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from liger_multi.integrations.lightning import LightningCallback
    from liger_multi.integrations.trainer import TrainerCallback

__all__ = ["LightningCallback", "TrainerCallback"]


def __getattr__(name: str) -> Any:
    """Load a callback, and with it the trainer's library."""
    if name == "TrainerCallback":
        from liger_multi.integrations import trainer as module
    elif name == "LightningCallback":
        from liger_multi.integrations import lightning as module  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module 'liger_multi.integrations' has no attribute {name!r}")
    globals()[name] = getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    """The public names, which stand in globals only after their first use."""
    return sorted({*globals(), *__all__})
