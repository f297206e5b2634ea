"""Which implementation runs, by Liger-Kernel's names.

Precedence is Liger's: the argument ``impl``, ``LIGER_KERNEL_IMPL_<OP>``, ``LIGER_KERNEL_IMPL``,
:func:`set_impl`. Triton's names stand for what ``auto`` takes here, ``pytorch`` for the reference.
What Liger-Kernel has and this library has not falls back with a warning, or raises with
``LIGER_KERNEL_STRICT=1``. :func:`liger_multi.configure` has finer choices.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from liger_multi import configure, use
from liger_multi.dispatch import registry

BACKENDS = {"nvidia-triton": ("cuda", "rocm"), "ascend-triton": ("npu",), "pytorch": ("reference",)}
"""Name of an implementation to our backends; ``pytorch`` is there on every device."""
ABSENT = ("nvidia-cutile", "nvidia-cutedsl")
_LANGUAGES = {name.partition("-")[2]: name for name in ("nvidia-triton", *ABSENT)}
OPERATORS = (
    "rms_norm",
    "layer_norm",
    "fused_add_rms_norm",
    "jsd",
    "kl_div",
    "softmax",
    "swiglu",
    "geglu",
    "rope",
    "cross_entropy",
    "fused_linear_cross_entropy",
    "fused_linear_jsd",
)
"""Those of ``liger_kernel.functional``; each is an operator of ours by the same name."""

VARIABLES = ("LIGER_KERNEL_IMPL_{}", "LIGER_KERNEL_BACKEND_{}", "LIGER_KERNEL_IMPL")
STRICT = "LIGER_KERNEL_STRICT"


class ImplNotAvailableError(RuntimeError):
    """The implementation that was asked for cannot run."""


class NoImplAvailableError(RuntimeError):
    """There is no such operator. Of those that there are, the reference always can run."""


class LigerImplFallbackWarning(UserWarning):
    """Another implementation runs than the one that was asked for."""


BackendNotAvailableError = ImplNotAvailableError
NoBackendAvailableError = NoImplAvailableError
LigerBackendFallbackWarning = LigerImplFallbackWarning


@dataclass
class Capability:
    """What an implementation needs."""

    min_cc: tuple[int, int] | None = None
    max_cc: tuple[int, int] | None = None
    modules: list[str] = field(default_factory=list)
    requires_cuda: bool = False
    predicate: Callable[..., bool] | None = None


PYTORCH_FALLBACK = Capability()


@dataclass
class OpImpl:
    """One implementation of an operator; the function of ``liger_kernel.functional`` runs it."""

    op_name: str
    impl_name: str
    capability: Capability = field(default_factory=Capability)
    forward: Callable[..., Any] | None = None
    autograd_function: Any = None
    modes: tuple[str, ...] = ()
    default_mode: str | None = None
    preference_rank: int = 100
    tolerances: dict[Any, Any] = field(default_factory=dict)
    notes: str = ""


# --- what there is ---


def all_registered_ops() -> tuple[str, ...]:
    """The operators."""
    return OPERATORS


def all_impls(op_name: str) -> list[str]:
    """Implementations of an operator, on any device."""
    return [*BACKENDS] if op_name in OPERATORS else []


def available_impls(op_name: str, device: Any = None) -> list[str]:
    """Those that can run on a device, the preferred one first; None: the accelerator or the CPU."""
    if device is None:
        impls = (
            torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        )
        device = impls or "cpu"
    serving = {b.name for b in registry.serving(torch.device(device).type)} | {"reference"}
    there = {name for name in serving if registry.unavailable(name) is None}
    return [name for name in all_impls(op_name) if there & {*BACKENDS[name]}]


def list_registered(op_name: str) -> list[OpImpl]:
    """Implementations of an operator."""
    return [_impl(op_name, name) for name in all_impls(op_name)]


def get_registered(op_name: str, backend: str) -> OpImpl | None:
    """One implementation of an operator; None where it has none of that name."""
    return _impl(op_name, backend) if backend in all_impls(op_name) else None


def _impl(op_name: str, name: str) -> OpImpl:
    rank = [*BACKENDS].index(name)
    return OpImpl(op_name, name, modes=("default",), default_mode="default", preference_rank=rank)


def clear_available_cache() -> None:
    """Nothing is kept."""


def get_discovery_failures() -> dict[str, str]:
    """Why backends cannot run on this machine."""
    reasons = {name: registry.unavailable(name) for name in registry.backends()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        """Refused.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"{name}: an implementation of one's own is a backend here; docs/extending.md says how "
            "one is added"
        )

    return refuse


register_impl = register_op = _refused("register_impl")
declare_op_locations = _refused("declare_op_locations")


# --- what was chosen ---

_chosen: str | None = None


def _full(name: Any) -> str | None:
    """A name with its device; None where nothing is said."""
    return _LANGUAGES.get(str(name), str(name)) if name else None


def set_impl(name: str | None) -> None:
    """Choose an implementation for this process; None takes the choice back.

    ``pytorch`` configures the reference as the backend of every operator.
    """
    global _chosen
    before, _chosen = _chosen, _full(name)
    if _chosen == "pytorch":
        configure({"default": "reference"})
    elif before == "pytorch":
        configure(None)


def get_impl() -> str | None:
    """The implementation that :func:`set_impl` chose last, with its device."""
    return _chosen


def read_variables() -> None:
    """Take over ``LIGER_KERNEL_IMPL``, which patched models follow too."""
    named = _full(os.environ.get(VARIABLES[-1]))
    if named == "pytorch":
        set_impl(named)
    elif named is not None and named not in BACKENDS:
        emit_fallback_warning("every operator", named, "auto", "liger_multi has no such backend")


def emit_fallback_warning(op_name: str, requested: str, actual: str, reason: str) -> None:
    """Say that another implementation runs."""
    warnings.warn(
        f"{op_name}: {requested!r} is not available ({reason}); {actual!r} runs",
        LigerImplFallbackWarning,
        stacklevel=2,
    )


def resolve_impl(op_name: str, requested: str | None = None, device: Any = None) -> OpImpl:
    """The implementation that runs.

    Raises:
        NoImplAvailableError: An unknown operator.
        ImplNotAvailableError: An unknown implementation; under ``LIGER_KERNEL_STRICT=1`` also one
            that cannot run on the device.
    """
    variables = (os.environ.get(v.format(op_name.upper())) for v in VARIABLES)
    name = _full(next(filter(None, (requested, *variables, _chosen)), None))
    known, there = all_impls(op_name), available_impls(op_name, device)
    if not known and name is None:
        raise NoImplAvailableError(
            f"No implementation available for op {op_name!r}. Operators: {', '.join(OPERATORS)}"
        )
    if not known or (name is not None and name not in (*known, *ABSENT)):
        raise ImplNotAvailableError(
            f"No {name!r} implementation registered for op {op_name!r}. Registered: "
            f"{known or '<none>'}."
        )
    if name is None or name in there:
        return _impl(op_name, name or there[0])
    reason = "liger_multi has no such backend" if name in ABSENT else "not on this device"
    if os.environ.get(STRICT) == "1":
        raise ImplNotAvailableError(f"{op_name}: {name!r} is not available ({reason})")
    emit_fallback_warning(op_name, name, there[0], reason)
    return _impl(op_name, there[0])


@contextlib.contextmanager
def scope(op_name: str, requested: str | None, mode: str | None, device: Any) -> Iterator[None]:
    """The implementation that was chosen for a call."""
    if mode not in (None, "default"):
        raise ValueError(f"{op_name}: mode must be 'default', got {mode!r}")
    impl_name = resolve_impl(op_name, requested, device).impl_name
    if impl_name == "pytorch":
        with use(default="reference"):
            yield
    elif requested and _chosen == "pytorch":
        with use(default="auto"):
            yield
    else:
        yield


set_backend, get_backend = set_impl, get_impl
available_backends, all_backends, resolve_backend = available_impls, all_impls, resolve_impl
