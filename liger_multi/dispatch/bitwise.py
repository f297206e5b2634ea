"""What operators promise about the bits of their results, and the switch that asks for more.

A contract states a :class:`Bitwise` record: one :class:`Promise` for forward and one for backward,
and which tensors have rows. A backend's module may state another record as ``BITWISE``, and a
backend's own record (:class:`~liger_multi.dispatch.backend.Backend`) which properties none of its
operators has. The switch is ``deterministic`` of a configuration; without one it follows
``torch.use_deterministic_algorithms``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_multi._torch_private import is_deterministic
from liger_multi.dispatch.launch import bounded_by_rows
from liger_multi.dispatch.registry import REFERENCE, backends, module
from liger_multi.errors import ContractError, check_name

if TYPE_CHECKING:
    from liger_multi.dispatch.torch_ops import Primitive

PROPERTIES = {
    "repeat": "the same inputs on the same machine, with as much free memory and as many "
    "threads, give the same bits",
    "recompute": "forward under checkpointing gives the bits of the first forward again",
    "rows": "the result of a row does not depend on the number, content or order of other rows",
    "chunk": "results per row do not depend on the size of chunks",
    "cards": "every card of one architecture gives the same bits",
}
MODES = ("", "deterministic", "rows")
"""Settings of the switch, from the weakest: none, ``deterministic=True``, ``"rows"``."""
NEEDED = {
    "": (),
    "deterministic": ("repeat", "recompute"),
    "rows": ("repeat", "recompute", "rows"),
}


@dataclass(frozen=True)
class Promise:
    """The properties that one direction of an operator has.

    Attributes:
        always: Those that hold under every setting.
        deterministic: Those that ``deterministic=True`` adds.
        rows: Those that ``deterministic="rows"`` adds to both.
        because: For properties that do not always hold: the reason.
    """

    always: frozenset[str] = frozenset()
    deterministic: frozenset[str] = frozenset()
    rows: frozenset[str] = frozenset()
    because: Mapping[str, str] = field(default_factory=dict)

    def under(self, mode: str) -> frozenset[str]:
        """The properties under a setting of the switch."""
        by_mode = {
            "": (),
            "deterministic": self.deterministic,
            "rows": self.deterministic | self.rows,
        }
        return self.always | frozenset(by_mode[mode])

    def since(self, name: str) -> str | None:
        """The weakest setting under which a property holds; None where it never does."""
        return next((mode for mode in MODES if name in self.under(mode)), None)

    def without(self, lost: Mapping[str, str]) -> Promise:
        """The promise without some properties, each with its reason."""
        lost_properties = frozenset(lost)
        return Promise(
            self.always - lost_properties,
            self.deterministic - lost_properties,
            self.rows - lost_properties,
            {**self.because, **lost},
        )


def promise(
    always: str = "", deterministic: str = "", rows: str = "", because: Mapping[str, str] = {}
) -> Promise:
    """A promise, from names of properties and reasons by property.

    Raises:
        ContractError: A name is no property.
    """
    sets = [frozenset(names.split()) for names in (always, deterministic, rows)]
    for name in sorted(frozenset().union(*sets, because)):
        check_name(ContractError, "property of bits", name, PROPERTIES)
    return Promise(sets[0], sets[1], sets[2], because)


_GEMM = "the vendor's library chooses a GEMM by the number of rows and the card"
_TABLE = "a launch table chooses the tile by the number of rows"
PER_ROW = promise("repeat recompute rows cards")
BY_PIECES = promise("repeat recompute cards", rows="rows")
BY_GEMM = promise("repeat recompute", because={"rows": _GEMM, "cards": _GEMM})
BY_OUR_GEMM = promise(
    "repeat recompute", rows="rows chunk", because={"rows": _GEMM, "cards": _GEMM}
)


REFERENCES = {
    "row by row": "dispatch calls it for every row alone",
    "forward": "dispatch calls its forward for every row alone; its gradients count rows",
    "itself": "it looks at the setting, and goes through the rows itself",
    "exact": "no operation of it rounds by the position or the number of rows",
}
"""Operators that write in place have none of them: their calls cannot be repeated row by row."""


@dataclass(frozen=True)
class Bitwise:
    """What an operator promises, and which of its tensors have rows.

    Attributes:
        forward: The promise of forward.
        backward: That of backward: ``rows`` speaks of gradients per row, not of sums over rows.
        batched: The axis of rows of every tensor that has rows, by name; gradients have those of
            their tensors. A negative axis counts from the last one, and a tensor with fewer axes
            has no rows.
        trailing: Axes of the first of them that belong to one row, all others count rows; where
            None, one axis alone counts them (a sequence is one row then).
        reference: How the reference has independent rows: a key of :data:`REFERENCES`.
        cached: Arguments that only save work, without rows: flags, and tensors that may be empty.
    """

    forward: Promise = Promise()
    backward: Promise = Promise()
    batched: Mapping[str, int] = field(default_factory=dict)
    trailing: int | None = None
    reference: str = "row by row"
    cached: frozenset[str] = frozenset()

    def axis(self, name: str) -> int | None:
        """The axis of rows of a tensor or gradient; None where it has none."""
        return self.batched.get(name, self.batched.get(name[1:] if name[:1] == "d" else name))


NO_PROMISE = Bitwise()


def bitwise(
    promise: Promise,
    batched: str,
    trailing: int | None = None,
    *,
    backward: Promise | None = None,
    reference: str = "row by row",
    cached: str = "",
) -> Bitwise:
    """The record of a contract; backward promises what forward does unless it is given.

    Args:
        promise: The promise of forward.
        batched: Names of tensors with rows; ``name:1`` has them at axis 1.
        trailing: Axes of a row, where all leading axes count rows.
        backward: The promise of backward.
        reference: How the reference has independent rows.
        cached: Names of arguments that only save work, and that other rows go without.
    """
    check_name(ContractError, "way of the reference", reference, REFERENCES)
    name_axis_pairs = [(*name.split(":"), "0")[:2] for name in batched.split()]
    axes = {name: int(axis) for name, axis in name_axis_pairs}
    names = frozenset(cached.split())
    return Bitwise(
        promise, promise if backward is None else backward, axes, trailing, reference, names
    )


def promised(name: str, prim: Primitive) -> Promise:
    """What a backend promises for one direction of an operator."""
    stated: Bitwise = getattr(module(name, prim.op.name), "BITWISE", prim.op.bitwise)
    result: Promise = getattr(stated, prim.direction)
    if name == REFERENCE and stated.reference == "exact":
        return result
    rows = result.since("rows") is not None
    if f"{prim.op.name}.{prim.direction}" in bounded_by_rows():
        under_rows = result.rows | {"rows"} if rows else result.rows
        because = {"rows": _TABLE, **result.because}
        always = result.always - {"rows"}
        result = replace(result, always=always, rows=under_rows, because=because)
    row_properties = result.under("rows") & {"rows", "chunk"}
    result = result.without(backends()[name].not_bitwise)
    if goes_row_by_row(name, prim) or (name == REFERENCE and stated.reference == "itself"):
        result = replace(result, rows=result.rows | row_properties)
    return result


def goes_row_by_row(name: str, prim: Primitive) -> bool:
    """Whether a backend's function is called row by row under "rows"."""
    spec: Bitwise = prim.op.bitwise
    promised_rows = getattr(spec, prim.direction).since("rows") is not None
    if name != REFERENCE or prim.op.inplace or not promised_rows:
        return False
    return spec.reference == "row by row" or (spec.reference, prim.direction) == ("forward",) * 2


def refusal(name: str, prim: Primitive, mode: str) -> str | None:
    """Why a backend cannot run a direction under a setting of the switch, or None.

    Under "rows" forward must have independent rows; the page says which backward passes have them.
    """
    properties = promised(name, prim)
    for required in NEEDED[mode]:
        is_exempt = (required, prim.direction) == ("rows", "backward")
        if required not in properties.under(mode) and not is_exempt:
            reason = properties.because.get(required, "its contract promises no more")
            return f"does not promise {required!r} ({reason})"
    return None


def follows_torch() -> str:
    """The setting where no configuration names one: that of PyTorch's own switch."""
    return "deterministic" if is_deterministic() else ""


# --- how a direction is called under "rows" ---


ALIGNED = 16  # bytes; what a thread loads at a time, and with it the order of a sum, follows them
STEP = 16  # elements; Triton compiles another kernel for strides that are no multiples of it


def aligned(prim: Primitive, call: Callable[..., Any], *args: Any) -> Any:
    """Run forward or backward on aligned tensors; others are copied first."""
    tensors = {i: args[i] for i in prim.tensor_indices if args[i] is not None}
    has_rows = {i for i in tensors if prim.op.bitwise.axis(prim.params[i]) is not None}
    copies = {i: _fresh(t) for i, t in tensors.items() if not _is_aligned(t, i in has_rows)}
    result = call(*[copies.get(i, a) for i, a in enumerate(args)]) if copies else call(*args)
    for name in prim.mutates:
        index = prim.params.index(name)
        if index in copies:
            args[index].copy_(copies[index])
    return result


def _fresh(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _is_aligned(x: Tensor, has_rows: bool = False) -> bool:
    """Whether every row starts at a multiple of 16 bytes, if adjacent rows of its length would.

    Axes of size 1 count as well: a row that was sliced out keeps the stride of its tensor. Kernels
    are compiled for steps that 16 divides, or for others. A tensor that ``has_rows`` must be of the
    kind that it would be without gaps, so that the same rows with and without them have one kernel.
    """
    if x.data_ptr() % ALIGNED:
        return False
    dense, is_dense = 1, True
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        is_dense = is_dense and stride == dense
        dense *= max(size, 1)
    if is_dense:
        return True
    if has_rows and x.stride(-1) == 1:
        by_vectors = x.shape[-1] % STEP == 0
        return all((stride % STEP == 0) == by_vectors for stride in x.stride()[:-1])
    return not any(s != 1 and s * x.element_size() % ALIGNED for s in x.stride())


def without_cache(prim: Primitive, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments without cached ones, which only save work and belong to the whole call."""
    cached = prim.op.bitwise.cached
    return tuple(
        a if name not in cached else a[:0] if isinstance(a, Tensor) else False
        for name, a in zip(prim.params, args, strict=True)
    )


def row_by_row(prim: Primitive, call: Callable[..., Any], *args: Any) -> Any:
    """Run a direction on all rows, then row by row, and put the results of rows together.

    Every row is a call of its own on fresh contiguous memory, so that nothing about the others, or
    about its place among them, can show in its bits. Results without rows (sums over them) are
    those of the first run. Tensors without axes for rows are one row.
    """
    rows = RowAxes(prim.op.bitwise, dict(zip(prim.params, args, strict=True)))
    mutated_indices = {prim.params.index(name) for name in prim.mutates}
    copied = mutated_indices if rows.lead else set(prim.tensor_indices)
    fresh = [_fresh(a) if i in copied and a is not None else a for i, a in enumerate(args)]
    result = call(*fresh)
    if not rows.lead:
        for i in mutated_indices:
            args[i].copy_(fresh[i])
        return result
    outs = as_tuple(result)
    args = without_cache(prim, args)
    flat = [rows.flat(n, t) for n, t in zip(prim.params, args, strict=True)]
    parts = []
    for row in range(rows.count):
        row_args = [
            t if x is None else _fresh(x.narrow(axis, row, 1))
            for t, (x, axis) in zip(args, flat, strict=True)
        ]
        parts.append(as_tuple(call(*row_args)))
        for i in mutated_indices:
            x, axis = flat[i]
            x.narrow(axis, row, 1).copy_(row_args[i])
    if not parts:
        return result
    outputs = []
    for j, (name, out) in enumerate(zip(prim.returns, outs, strict=True)):
        x, axis = rows.flat(name, out)
        part = [p[j] for p in parts]
        outputs.append(out if x is None else torch.cat(part, axis).reshape(out.shape))
    return outputs[0] if isinstance(result, Tensor) else tuple(outputs) or None


def as_tuple(result: Any) -> tuple[Any, ...]:
    """The outputs of forward or backward as a tuple."""
    return () if result is None else (result,) if isinstance(result, Tensor) else tuple(result)


class RowAxes:
    """The rows of one call: their number, and where each tensor has them."""

    def __init__(self, spec: Bitwise, tensors: Mapping[str, Any]) -> None:
        self.spec = spec
        row_tensors = (tensors.get(n) for name in spec.batched for n in (name, f"d{name}"))
        first = next((t for t in row_tensors if isinstance(t, Tensor)), None)
        name = next((n for n, t in tensors.items() if t is first), "")
        axis = None if first is None else self.axis(name, first)
        self.lead = torch.Size()
        if first is not None and axis is not None:
            stop = axis + 1 if spec.trailing is None else first.ndim - spec.trailing
            self.lead = first.shape[axis:stop]
        self.count = self.lead.numel() if self.lead else 0

    def axis(self, name: str, tensor: Tensor) -> int | None:
        """The axis of rows of a tensor; None where it has none."""
        axis = self.spec.axis(name)
        axis = axis + tensor.ndim if axis is not None and axis < 0 else axis
        return axis if axis is not None and 0 <= axis < tensor.ndim else None

    def flat(self, name: str, tensor: Any) -> tuple[Any, int]:
        """A tensor with its rows on one axis, and that axis; None where it has none."""
        axis = self.axis(name, tensor) if isinstance(tensor, Tensor) and self.lead else None
        if axis is None:
            return None, 0
        leading_axes, trailing_axes = tensor.shape[:axis], tensor.shape[axis + len(self.lead) :]
        if tensor.shape != (*leading_axes, *self.lead, *trailing_axes):
            return None, 0
        return tensor.reshape(*leading_axes, self.count, *trailing_axes), axis
