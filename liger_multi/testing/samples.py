"""Inputs of an operator that tests, benchmarks, the tuner and the cross-compiler share.

A :class:`Sample` states shapes and options; :meth:`Sample.make` turns it into tensors on a device.
Sizes: ``small`` runs everywhere, ``thin`` reaches a limit with little data, ``bench`` is a real
model's shape.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Tensor:
    """A random input: normal floats, or target ids below ``classes`` where that is given.

    Attributes:
        shape: Its shape.
        dtype: Fixed dtype; None follows the test's dtype.
        scale: Standard deviation of the values.
        grad: Whether the input gets a gradient.
        classes: Draw ids below this number instead, int64 where no other dtype is fixed.
        least: The smallest id that is drawn.
        ignored: Share of ids replaced by ``ignore_index``.
        ignore_index: The id of an ignored target.
        positive: Draw values in [0.5, 1.5) (class weights).
        negative: The negated magnitudes of the values (logarithms of decays).
        wide: Follow the test's dtype, but no narrower than fp32.
        integers: Whole numbers (sums without rounding, whose order every dtype agrees on).
        layout: ``contiguous``, ``sliced`` (every second column of a wider tensor), ``transposed``
            (last two axes), ``swapped`` (axes 1 and 2), ``rows`` (a gap between rows),
            ``expanded`` (stride 0 over rows) or ``sorted`` (along the last axis: ids of ranges).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    scale: float = 1.0
    grad: bool = True
    classes: int = 0
    least: int = 0
    ignored: float = 0.0
    ignore_index: int = -100
    positive: bool = False
    negative: bool = False
    integers: bool = False
    wide: bool = False
    layout: str = "contiguous"

    def make(
        self, device: torch.device, dtype: torch.dtype, generator: torch.Generator
    ) -> torch.Tensor:
        """Draw the tensor on the CPU, the same for every device, and move it."""
        if self.classes:
            ids = torch.randint(self.least, self.classes, self.shape, generator=generator)
            drop = torch.arange(ids.numel()).reshape(self.shape) < round(self.ignored * ids.numel())
            ids = ids.masked_fill(drop, self.ignore_index).to(device, self.dtype)
            return _LAYOUTS[self.layout](ids, self.shape)
        shape = (1, *self.shape[1:]) if self.layout == "expanded" else self.shape
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * self.scale
        if self.positive:
            values = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
        values = self.formed(values)
        return _LAYOUTS[self.layout](values.to(device, self.dtype_of(dtype)), self.shape)

    def dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the values in a test of ``dtype``."""
        if self.wide and dtype.itemsize < torch.float32.itemsize:
            return torch.float32
        return self.dtype or dtype

    def empty(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """The tensor without values, for devices that have none."""
        dtype = self.dtype_of(torch.int64 if self.classes else dtype)
        shape = (1, *self.shape[1:]) if self.layout == "expanded" else self.shape
        return _LAYOUTS[self.layout](torch.empty(shape, dtype=dtype, device=device), self.shape)

    def formed(self, values: torch.Tensor) -> torch.Tensor:
        """Apply the sign and rounding of the spec to drawn values."""
        values = -values.abs() if self.negative else values
        return values.round() if self.integers else values


def _sliced(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    doubled: torch.Tensor = x.repeat_interleave(2, -1)
    return doubled[..., ::2]


def _rows(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    wide = x.new_zeros(*shape[:-1], shape[-1] + 24)
    wide[..., 8 : 8 + shape[-1]] = x
    return wide[..., 8 : 8 + shape[-1]]


_LAYOUTS: dict[str, Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]] = {
    "contiguous": lambda x, shape: x,
    "sliced": _sliced,
    "transposed": lambda x, shape: x.mT.contiguous().mT,
    "swapped": lambda x, shape: x.transpose(1, 2).contiguous().transpose(1, 2),
    "rows": _rows,
    "expanded": lambda x, shape: x.expand(shape),
    "sorted": lambda x, shape: x.sort(-1).values,
}


@dataclass(frozen=True)
class Sample:
    """One call of a public operator.

    Attributes:
        name: Unique within the operator.
        tensors: Tensor arguments by name, in the order of the call.
        options: Keyword options of the call.
        size: ``small``, ``thin`` or ``bench``.
        path: The kernel path that its shape reaches and other samples do not.
        is_whole: Fewer rows would not fit the other shapes, so that nothing scales it down.
    """

    name: str
    tensors: Mapping[str, Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    size: str = "small"
    path: str = ""
    is_whole: bool = False

    def make(
        self, device: torch.device | str, dtype: torch.dtype, seed: int = 0
    ) -> dict[str, torch.Tensor]:
        """The tensor arguments; leaves that require grad where the sample says so."""
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, spec in self.tensors.items():
            tensor = spec.make(torch.device(device), dtype, generator)
            tensors[name] = tensor.requires_grad_(spec.grad and tensor.is_floating_point())
        return tensors

    def empty(self, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The same tensors without values."""
        tensors = {}
        for name, spec in self.tensors.items():
            tensor = spec.empty(device, dtype)
            tensors[name] = tensor.requires_grad_(spec.grad and tensor.is_floating_point())
        return tensors

    @property
    def elements(self) -> int:
        """Elements of the largest tensor."""
        return max(math.prod(t.shape) for t in self.tensors.values())


RICHER = {
    "quantize": "quantized",
    "outputs": "with_outputs",
    "output_final_state": "with_state",
    "output_weights": "with_weights",
    "return_quantized": "with_codes",
}
"""Options of samples and formulas that ask for more outputs, and the ending of the function."""
FORMS = ("inplace", "quantized")
"""Endings of operators that an option of a public function chooses."""


def public(op: str) -> str:
    """The public function that calls an operator."""
    for form in FORMS:
        op = op.removesuffix(f"_{form}")
    return op


def contract(op: str) -> Any:
    """The module of the public function that calls an operator."""
    return importlib.import_module(f"liger_multi.ops.{public(op)}")


def function(op: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The public function that returns what options ask for; it takes the tensors of a sample."""
    ops = importlib.import_module(contract(op).__package__)  # where callers may have put their own
    name, options = public(op), dict(options)
    run = getattr(ops, name)
    for option in RICHER.keys() & options.keys():
        richer = getattr(ops, f"{name}_{RICHER[option]}", None)
        if richer is None:
            continue
        value = options.pop(option)
        if value:
            run = richer
        if value and value is not True:  # a function of names takes the names
            options[option] = value
    return functools.partial(_by_parts(op, run), **options)


def _parameters(op: str) -> list[str]:
    return list(inspect.signature(getattr(contract(op), public(op))).parameters)


def adapted(op: str) -> tuple[str, ...]:
    """The layers whose adapters a public function takes as tuples, and samples by parts."""
    return tuple(n.removesuffix("_lora") for n in _parameters(op) if n.endswith("_lora"))


def with_tuples(layers: tuple[str, ...], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a public function: ``gate_lora`` from gate_a, gate_b and gate_scale."""
    grouped = dict(arguments)
    for layer in layers:
        a, b = grouped.pop(f"{layer}_a", None), grouped.pop(f"{layer}_b", None)
        scale = grouped.pop(f"{layer}_scale", 1.0)
        if a is not None or b is not None:
            grouped.setdefault(f"{layer}_lora", (a, b, scale))
    return grouped


def _by_parts(op: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the parts of adapters as arguments of their own."""
    layers, names = adapted(op), []
    if not layers:
        return run
    for name in _parameters(op):
        layer = name.removesuffix("_lora")
        names += [name] if layer == name else [f"{layer}_a", f"{layer}_b"]

    def run_by_parts(*args: Any, **arguments: Any) -> Any:
        positional = dict(zip(names[: len(args)], args, strict=True))
        return run(**with_tuples(layers, {**positional, **arguments}))

    return run_by_parts


def call(op: str, *args: Any, **options: Any) -> Any:
    """Call the public function that returns what the options ask for."""
    return function(op, options)(*args)


def declared(op: str, name: str) -> Any:
    """What the contract of an operator declares: that of its form, or of its public function."""
    form = op.removeprefix(public(op)).strip("_")
    attribute = f"{form.upper() if name.isupper() else form}_{name}"
    return getattr(contract(op), attribute, None) or getattr(contract(op), name)


def of(op: str) -> tuple[Sample, ...]:
    """The samples of an operator, from its contract."""
    return declared(op, "SAMPLES")  # type: ignore[no-any-return]


def compiled(op: str) -> tuple[Sample, ...]:
    """Samples of real sizes: what the cross-compiler takes.

    They are those of the benchmarks, and ``COMPILE_SAMPLES`` of a contract: sizes and options that
    reach kernels which no benchmark starts.
    """
    extra = getattr(contract(op), "COMPILE_SAMPLES", ()) if op == public(op) else ()
    return (*(s for s in of(op) if s.size == "bench"), *extra)
