"""The options of a patch call: what each operator takes, defaults, and checks of user input."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import torch

from liger_multi._torch_private import outside_of_graphs
from liger_multi.checks import ACCUMULATE, describe
from liger_multi.dispatch.resolve import by_rows
from liger_multi.errors import PatchError, check_name
from liger_multi.ops.linear_float8 import SMALLEST
from liger_multi.patching.kinds import MLP_KINDS, MLP_OPS, NORM_OPS

# --- mixers of hybrid models ---

MIXER_OPS = (
    *("causal_conv1d", "gated_delta_rule", "gated_short_conv", "kimi_delta_attention"),
    *("selective_scan", "ssd_scan"),
)

SPARSE = "sparse_attention"
"""The patch key of layers whose indexer selects keys."""

REPORTED = ("rms_norm", "swiglu", "geglu", "rope")
"""Operators whose absence is reported even if they are on by default only."""

_OPERATORS = {"lora": "lora_update", "four_bits": "linear"}
"""Operators of patch keys that are not operators."""
PATCH = "patch()"
"""The source of a choice of backend, in messages."""
OpChoice: TypeAlias = bool | str | Mapping[str, Any]


@dataclass(frozen=True)
class Options:
    """Options that every operator has.

    Attributes:
        backend: Name of the backend of the patched instances; None uses the configuration.
    """

    backend: str | None = None

    def shown(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        values = {f.name: (getattr(self, f.name), f.default) for f in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}


@dataclass(frozen=True)
class MlpOptions(Options):
    """Options of gated activations.

    Attributes:
        whole: Whether an MLP with plain layers runs as one operator, which saves less for
            backward; otherwise two GEMMs, an activation and a GEMM.
    """

    whole: bool = True


@dataclass(frozen=True)
class LossOptions(Options):
    """Options of both losses.

    Attributes:
        z_loss: Weight of the squared log-sum-exp, added where gradients are enabled.
        validate: Raise on a target out of range on every device.
    """

    z_loss: float = 0.0
    validate: bool = False


@dataclass(frozen=True)
class FusedOptions(LossOptions):
    """Options of the fused linear cross entropy.

    Attributes:
        chunk: Rows per chunk of logits, a byte budget such as "512MiB", "auto" for the byte budget
            of the configuration, or "lean" for 128 MiB and weight gradients that are summed in the
            dtype of the weight.
        accumulate: Dtype in which the weight gradient is summed over chunks.
        compact: Drop ignored rows before the GEMM.
        materialize_bytes: Materializing larger logits warns, once per line of code.
    """

    chunk: int | str = "auto"
    accumulate: torch.dtype = torch.float32
    compact: bool = True
    materialize_bytes: int = 256 * 2**20


@dataclass(frozen=True)
class Float8Options(Options):
    """Options of linear layers in FP8.

    Attributes:
        frozen: Patch only layers with a frozen weight, and keep that weight in FP8: half of the
            memory of 16 bits. Otherwise weights stay as they are, and each use rounds them.
        originals: Whether the CPU has copies of frozen weights, for ``unpatch`` and checkpoints;
            otherwise these get the dequantized weights.
        smallest: Layers whose weights have fewer elements are not patched.
        gather: Whether FSDP2 gathers trained weights in FP8 too, rather than in 16 bits.
        cache: Whether codes of trained weights are cached until an optimizer steps.
    """

    frozen: bool = False
    originals: bool = True
    smallest: int = SMALLEST
    gather: bool = False
    cache: bool = False


@dataclass(frozen=True)
class FourBitOptions(Options):
    """Options of frozen weights in 4 bits.

    Attributes:
        compute: "bfloat16" for GEMMs in the dtype that a weight is dequantized to; "float8": its
            numbers and the inputs are rounded to FP8 rows, but for stacks of experts.
        smallest: Weights with fewer elements are not rounded to FP8.
    """

    compute: str = "bfloat16"
    smallest: int = SMALLEST


ROTATED = "rms_norm_rope"
"""The patch key of QK-norm and RoPE as one operator."""
PACKING = "packing"
"""The patch key of checks of packed rows, which is no operator."""
_OPTIONS: dict[str, type[Options]] = {
    "four_bits": FourBitOptions,
    **dict.fromkeys((spec.op for spec in MLP_KINDS if spec.activation), MlpOptions),
    "linear_float8": Float8Options,
    "cross_entropy": LossOptions,
    "fused_linear_cross_entropy": FusedOptions,
}
_DEFAULTS: dict[str, bool | Callable[[], bool]] = {
    **dict.fromkeys(
        (
            *NORM_OPS,
            *MLP_OPS,
            *MIXER_OPS,
            SPARSE,
            "fused_moe",
            "rope",
            "lora",
            "four_bits",
            PACKING,
        ),
        True,
    ),
    "linear": by_rows,
    "linear_float8": False,
    ROTATED: True,
    "cross_entropy": False,
    "fused_linear_cross_entropy": True,
}
"""Whether a key is on by default, or a function that tells it at a call."""
BUILT_IN = tuple(_DEFAULTS)
"""Patch keys that no registered probe may have."""
OFF = tuple(name for name, on in _DEFAULTS.items() if on is False)
"""Patch keys that are off unless a call names them."""


@dataclass(frozen=True)
class HeadSettings:
    """The options of an output embedding, of which at least one is not None."""

    fused: FusedOptions | None
    cross_entropy: LossOptions | None

    @property
    def on_real(self) -> LossOptions | None:
        """Options of the loss of real logits; None if PyTorch's does the same."""
        fused = self.fused
        if self.cross_entropy is None and fused is not None and (fused.z_loss or fused.validate):
            return LossOptions(z_loss=fused.z_loss, validate=fused.validate)
        return self.cross_entropy

    @property
    def shown(self) -> dict[str, Any]:
        """Options of the fused loss, or of the other one, that differ from their defaults."""
        return (self.fused or self.cross_entropy or Options()).shown()


@dataclass(frozen=True)
class Request:
    """A parsed patch call.

    Attributes:
        enabled: Options of the operators that are on.
        named: Operators that the call names, rather than those on by default.
        whole: Whether ``strict`` expects an output embedding: the model is not a part of another.
    """

    enabled: Mapping[str, Any]
    named: frozenset[str]
    whole: bool = True

    def get(self, op: str) -> Any:
        """Options of an operator; None when it is off."""
        return self.enabled.get(op)

    @property
    def head(self) -> HeadSettings | None:
        """The settings of the output embedding, or None when both losses are off."""
        fused, plain = (self.get(op) for op in ("fused_linear_cross_entropy", "cross_entropy"))
        return None if fused is None and plain is None else HeadSettings(fused, plain)


def parse_request(
    ops: Mapping[str, OpChoice], probes: Iterable[str] = (), strict: object = False
) -> Request:
    """Check the keyword arguments of a patch call.

    Args:
        ops: Choices by patch key.
        probes: Further keys, of probes that users registered.
        strict: True or False.

    Raises:
        PatchError: An operator or option that does not exist, with the nearest one that does, or a
            value of the wrong form.
    """
    if not isinstance(strict, bool):
        raise PatchError(f"strict must be True or False, got {describe(strict)}")
    defaults = {
        name: default() if callable(default) else default for name, default in _DEFAULTS.items()
    }
    defaults |= dict.fromkeys(probes, True)
    for name in ops:
        check_name(PatchError, "patch key", name, defaults)
    parsed = {name: _parse(name, ops.get(name, default)) for name, default in defaults.items()}
    enabled = {name: options for name, options in parsed.items() if options is not None}
    return Request(enabled, frozenset(name for name in ops if name in enabled))


def _parse(op: str, choice: OpChoice) -> Any:
    options_class = _OPTIONS.get(op, Options)
    if isinstance(choice, bool):
        return options_class() if choice else None
    if op == PACKING:
        raise PatchError(f"{op} must be True or False, got {describe(choice)}")
    if isinstance(choice, str):
        return _checked(op, options_class(backend=choice))
    if not isinstance(choice, Mapping):
        raise PatchError(
            f"{op} must be True, False, a backend's name or a mapping of options, "
            f"got {choice!r} ({type(choice).__name__})"
        )
    allowed = [f.name for f in fields(options_class)]
    for name in choice:
        check_name(PatchError, f"option of {op}", name, allowed)
    return _checked(op, options_class(**choice))


def _checked(op: str, options: Options) -> Options:
    """Refuse invalid values before training."""
    for name in (f.name for f in fields(options)):
        value, (requirement, is_valid) = getattr(options, name), _RULES[name]
        if not is_valid(value):
            raise PatchError(f"{op}: {name} must be {requirement}, got {value!r:.60}")
    if options.backend is not None:
        from liger_multi.dispatch.config import parse

        # raises on an unknown backend
        parse({"ops": {_OPERATORS.get(op, op): options.backend}}, PATCH)
    return options


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_chunk(value: Any) -> bool:
    """Whether the operator accepts a value of ``chunk``."""
    from liger_multi.ops._head import rows_and_budget

    try:
        rows_and_budget("a patch", value)
    except (TypeError, ValueError):
        return False
    return True


_BOOLEAN = ("True or False", lambda value: isinstance(value, bool))
_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "backend": ("the name of a backend or None", lambda v: v is None or isinstance(v, str)),
    "z_loss": ("a number >= 0", lambda v: _is_number(v) and v >= 0),
    "validate": _BOOLEAN,
    "whole": _BOOLEAN,
    "compute": ("'bfloat16' or 'float8'", lambda v: v in ("bfloat16", "float8")),
    "frozen": _BOOLEAN,
    "originals": _BOOLEAN,
    "gather": _BOOLEAN,
    "cache": _BOOLEAN,
    "smallest": ("an integer >= 0", lambda v: _is_int(v) and v >= 0),
    "compact": _BOOLEAN,
    "chunk": (
        "'auto', 'lean', a number of rows >= 1 or a byte budget such as '512MiB'",
        _is_chunk,
    ),
    "accumulate": (
        f"one of {', '.join(map(str, ACCUMULATE))}",
        lambda v: isinstance(v, torch.dtype) and v in ACCUMULATE,
    ),
    "materialize_bytes": ("an integer >= 0", lambda v: _is_int(v) and v >= 0),
}

# --- calls on the backend of an instance ---


def run_bound(
    options: Options, names: tuple[str, ...], function: Callable[..., Any], *args: Any
) -> Any:
    """``function(*args)``, with operators of ``names`` on the backend of the options, if any."""
    if options.backend is None:
        return function(*args)
    return _run_scoped(dict.fromkeys(names, options.backend), function, *args)


def _run_scoped(choices: dict[str, str], function: Callable[..., Any], *args: Any) -> Any:
    from liger_multi.dispatch.config import scope

    with scope(choices, PATCH):
        return function(*args)


# A graph breaks at the scope.
outside_of_graphs(
    _run_scoped,
    "a backend named for a patched model is a scope that no graph can hold; use "
    "liger_multi.configure",
)
