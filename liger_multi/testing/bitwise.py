"""Checks of what operators promise about bits, without pytest.

A public call and its gradients are recorded as calls of forward and of backward
(:func:`calls_of`), and each of them is run again: twice, under checkpointing, with other rows
beside a row, with chunks of other sizes. Results are compared bit by bit, so that NaN equals NaN
and 0.0 does not equal -0.0.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from liger_multi.dispatch.bitwise import MODES, RowAxes, as_tuple, promised, without_cache
from liger_multi.dispatch.config import use
from liger_multi.dispatch.op import OPS
from liger_multi.dispatch.resolve import plan_for
from liger_multi.dispatch.torch_ops import Primitive
from liger_multi.errors import BackendUnavailableError
from liger_multi.testing.checks import Order, call, grads, inputs, outputs
from liger_multi.testing.samples import Sample

SETTINGS: dict[str, bool | str] = {"": False, "deterministic": True, "rows": "rows"}
"""What :func:`liger_multi.use` is given for every setting of the switch."""
CHUNKS = (1, 7, 256)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two results have the same bits: tensors, None, or sequences of both."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return torch.equal(_bytes(a), _bytes(b))
    if isinstance(a, Sequence) and isinstance(b, Sequence):
        return len(a) == len(b) and all(same_bits(*pair) for pair in zip(a, b, strict=True))
    return a is None and b is None


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class Call:
    """One call of forward or backward.

    Attributes:
        prim: The direction of the operator.
        args: Its arguments.
        order: The backend, or backends in order, that run it.
    """

    prim: Primitive
    args: tuple[Any, ...]
    order: Order

    @property
    def name(self) -> str:
        """Operator and direction."""
        return f"{self.prim.op.name}.{self.prim.direction}"

    def run(self, mode: str, args: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
        """Call it again under a setting of the switch; what it writes to is copied and returned."""
        args = self.args if args is None else args
        call_args = [
            x.clone() if name in self.prim.mutates and isinstance(x, Tensor) else x
            for name, x in zip(self.prim.params, args, strict=True)
        ]
        with self._under(mode):
            results = as_tuple(self.prim.call(*call_args))
        mutated = [call_args[self.prim.params.index(name)] for name in self.prim.mutates]
        return (*results, *mutated)

    def uncached(self) -> Call:
        """The same call without cached values, which belong to these rows alone."""
        return type(self)(self.prim, without_cache(self.prim, self.args), self.order)

    def promise(self, mode: str) -> frozenset[str]:
        """The properties that its backend promises; empty where no backend takes the call."""
        with self._under(mode), contextlib.suppress(BackendUnavailableError):
            plan = plan_for(self.prim, self.args[self.prim.anchor])
            return promised(plan.chosen(self.args).name, self.prim).under(mode)
        return frozenset()

    def _under(self, mode: str) -> AbstractContextManager[None]:
        choice: Any = {self.prim.op.name: self.order}
        return use(**choice, deterministic=SETTINGS[mode])


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[Primitive, tuple[Any, ...], tuple[Any, ...]]]]:
    """Calls of forward and backward within a block: direction, copies of arguments, results."""
    original, calls = Primitive.call, []

    def call_and_keep(prim: Primitive, *args: Any) -> Any:
        saved_args = tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in args)
        result = original(prim, *args)
        calls.append((prim, saved_args, tuple(t.detach().clone() for t in as_tuple(result))))
        return result

    with mock.patch.object(Primitive, "call", call_and_keep):
        yield calls


def calls_of(
    op: str,
    sample: Sample,
    dtype: torch.dtype,
    device: torch.device,
    order: Order,
    mode: str = "",
) -> list[Call]:
    """The calls of forward and backward that a sample leads to under a setting of the switch."""
    tensors = inputs(sample, device, dtype)
    with recorded() as recorded_calls, use(deterministic=SETTINGS[mode]):
        result, _ = outputs(call(op, tensors, sample.options, **{op: order}))
        generator = torch.Generator().manual_seed(1)
        upstream: dict[str, Tensor | None] = {
            n: torch.randn(t.shape, generator=generator).to(t) for n, t in result.items()
        }
        grads(result, tensors, upstream)
    return [Call(prim, args, order) for prim, args, _ in recorded_calls if prim.op.name == op]


# --- one property each ---


def check_repeat(op_call: Call, mode: str) -> None:
    """Check that a call repeated between other allocations has the same bits."""
    first = op_call.run(mode)
    blocks = [
        torch.full((size,), float("nan"), device=op_call.args[op_call.prim.anchor].device)
        for size in (100, 5000)
    ]
    second = op_call.run(mode)
    del blocks
    _require(op_call, mode, "repeat", first, second, "a second call")


def check_repeats(
    op: str, sample: Sample, dtype: torch.dtype, device: torch.device, order: Order
) -> None:
    """Every call of a sample that promises equal bits of the same call, twice.

    Raises:
        AssertionError: The promise is broken.
    """
    for op_call in calls_of(op, sample, dtype, device, order):
        if "repeat" in op_call.promise(""):
            check_repeat(op_call, "")


def check_recompute(
    op: str, sample: Sample, dtype: torch.dtype, device: torch.device, order: Order, mode: str
) -> None:
    """Check that forward under checkpointing and its recomputation have the same bits."""
    tensors = sample.make(device, dtype)
    overwritten = OPS[op].inplace if sample.options.get("inplace") else None
    names = [n for n in tensors if n != overwritten]

    def run(*args: Tensor) -> Any:
        return call(
            op, {**tensors, **dict(zip(names, args, strict=True))}, sample.options, **choices
        )

    choices: Any = {op: order, "deterministic": SETTINGS[mode]}
    with recorded() as recorded_calls:
        result, _ = outputs(checkpoint(run, *[tensors[n] for n in names], use_reentrant=False))
        grads(result, tensors, {n: torch.ones_like(t) for n, t in result.items()})
    forwards = [(prim, args, out) for prim, args, out in recorded_calls if prim is OPS[op].fwd]
    if len(forwards) == 2:
        (prim, args, first), (_, _, second) = forwards
        _require(Call(prim, args, order), mode, "recompute", first, second, "the recomputation")


def check_rows(op_call: Call, mode: str) -> None:
    """Check that a row has the same bits in other orders and numbers, and beside a row of NaN.

    Gradients of a mean are left out, as it divides by the number of rows.
    """
    op_call, prim = op_call.uncached(), op_call.prim
    by_name = dict(zip(prim.params, op_call.args, strict=True))
    rows, is_mean = RowAxes(prim.op.bitwise, by_name), by_name.get("reduction") == "mean"
    if not rows.count or (is_mean and prim.direction == "backward"):
        return
    args = selected(rows, op_call, torch.arange(rows.count))
    reference = op_call.run(mode, args)

    def compare(index: Tensor, actual: Sequence[Any], own_index: Tensor, label: str) -> None:
        """Rows ``index`` of the whole result with rows ``own_index`` of another one."""
        for name, reference_result, part in zip(
            (*prim.returns, *prim.mutates), reference, actual, strict=True
        ):
            axis = rows.axis(name, reference_result)
            if axis is None or reference_result.shape[axis] != rows.count:
                continue
            if is_mean and name in prim.mutates:
                continue
            sides = (reference_result, index), (part, own_index)
            expected, actual_rows = (t.index_select(axis, i.to(t.device)) for t, i in sides)
            _require(op_call, mode, "rows", (expected,), (actual_rows,), f"{name} of {label}")

    last, generator = rows.count - 1, torch.Generator().manual_seed(2)
    sampled = torch.randint(
        rows.count, (67 if _row_size(rows, by_name) < 512 else 5,), generator=generator
    )
    backwards = list(range(last, -1, -1))
    for chosen in ([0], [last], [last, 0], [0, last, 0], backwards, sampled.tolist()):
        index = torch.tensor(chosen)
        actual = op_call.run(mode, selected(rows, op_call, index))
        compare(index, actual, torch.arange(len(chosen)), f"rows {chosen[:8]}")
    indices = torch.arange(1, rows.count)
    compare(indices, op_call.run(mode, _with_nan(rows, op_call, args)), indices, "rows beside NaN")


def _with_nan(rows: RowAxes, op_call: Call, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with NaN in the first row of whatever has rows."""
    changed = []
    for name, value, arg in zip(op_call.prim.params, op_call.args, args, strict=True):
        flat, axis = rows.flat(name, value)
        if flat is not None and arg.is_floating_point():
            first = torch.zeros(1, dtype=torch.int64, device=arg.device)
            arg = arg.index_fill(axis, first, float("nan"))
        changed.append(arg)
    return tuple(changed)


def _row_size(rows: RowAxes, by_name: Mapping[str, Any]) -> int:
    """Elements of a row in all arguments. Rows of many elements are checked in smaller numbers."""
    flat = (rows.flat(name, value)[0] for name, value in by_name.items())
    elements: int = sum(t.numel() for t in flat if t is not None)
    return elements // rows.count


def selected(rows: RowAxes, op_call: Call, index: Tensor) -> tuple[Any, ...]:
    """The arguments, reduced to some rows."""
    args = []
    for name, value in zip(op_call.prim.params, op_call.args, strict=True):
        flat, axis = rows.flat(name, value)
        args.append(value if flat is None else flat.index_select(axis, index.to(flat.device)))
    return tuple(args)


def check_chunk(op_call: Call, mode: str) -> None:
    """Check that chunks of other sizes give the same bits."""
    prim = op_call.prim
    chunk_index, spec = prim.params.index("chunk"), prim.op.bitwise
    reference = op_call.run(mode)
    for chunk in CHUNKS:
        actual = op_call.run(
            mode, (*op_call.args[:chunk_index], chunk, *op_call.args[chunk_index + 1 :])
        )
        for name, expected, other in zip(prim.returns, reference, actual, strict=True):
            if (
                spec.axis(name) is not None and other.ndim
            ):  # sums over chunks are added in other orders
                _require(
                    op_call, mode, "chunk", (expected,), (other,), f"{name} by chunks of {chunk}"
                )


def _require(
    op_call: Call, mode: str, name: str, expected: Sequence[Any], actual: Sequence[Any], label: str
) -> None:
    if same_bits(expected, actual):
        return
    differ = [
        (a.double() - b.double()).abs().max().item()
        for a, b in zip(expected, actual, strict=True)
        if a.shape == b.shape and a.numel()
    ]
    raise AssertionError(
        f"{op_call.name} by {op_call.order} under deterministic={SETTINGS[mode]!r} promises "
        f"{name!r}, but {label} differs by {differ}"
    )


def check_promises(
    op: str, sample: Sample, dtype: torch.dtype, device: torch.device, order: Order
) -> set[tuple[str, str, str]]:
    """Check every promise that holds for the calls of a sample.

    Args:
        op: Name of the operator.
        sample: Its inputs.
        dtype: Dtype of the inputs whose dtype the sample leaves open.
        device: Device of the tensors.
        order: The backend, or backends in order.

    Returns:
        What was checked: direction, setting of the switch, property.

    Raises:
        AssertionError: A promise is broken; the message names it.
    """
    checked = set()
    for mode in MODES:
        calls: list[Call] = []
        with contextlib.suppress(BackendUnavailableError):  # refused: nothing is promised
            # backward gets what forward kept under the same setting
            calls = calls_of(op, sample, dtype, device, order, mode)
        for op_call in calls:
            promises = op_call.promise(mode)
            for name in sorted(promises & CHECKS.keys()):
                if name == "chunk" and "chunk" not in op_call.prim.params:
                    continue
                CHECKS[name](op_call, mode)
                checked.add((op_call.prim.direction, mode, name))
    for mode in {mode for direction, mode, name in checked if direction == "forward"}:
        check_recompute(op, sample, dtype, device, order, mode)
        checked.add(("forward", mode, "recompute"))
    return checked


CHECKS: dict[str, Callable[[Call, str], Any]] = {
    "repeat": check_repeat,
    "rows": check_rows,
    "chunk": check_chunk,
}


# --- training runs that are compared bit by bit: many steps of a small model ---

# A digest covers the loss of every step and all parameters after the last one, so that two runs
# have equal digests only if every one of these bits is equal.

STEPS = 100
Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Trained:
    """The results of a training run.

    Attributes:
        first: Loss of the first step.
        last: Loss of the last step.
        losses: Digest of all losses.
        parameters: Digest of all parameters.
    """

    first: float
    last: float
    losses: str
    parameters: str


def digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of the bytes of tensors with their shapes and dtypes, shortened."""
    sha256 = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        sha256.update(f"{tuple(plain.shape)} {plain.dtype}".encode())
        sha256.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()[:16]


def batches(
    vocabulary: int, device: torch.device | str, steps: int = STEPS, rows: int = 2, length: int = 16
) -> Iterator[Batch]:
    """Random tokens, the same in every run: five batches in turn, of which a model can learn.

    Lengths and numbers of ignored labels vary.
    """
    for step in range(steps):
        generator = torch.Generator().manual_seed(step % 5)
        size = length - step % 5
        ids = torch.randint(3, vocabulary, (rows, size), generator=generator)
        labels = ids.clone()
        labels[0, : 1 + step % 3] = -100
        yield {"input_ids": ids.to(device), "labels": labels.to(device)}


def train(model: nn.Module, batches: Iterable[Batch], lr: float = 1e-3) -> Trained:
    """Train a model that returns its loss with AdamW; on a device, no step waits for it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    fused = parameters[0].device.type == "cuda"
    optimizer = torch.optim.AdamW(parameters, lr=lr, fused=fused)
    losses: list[Tensor] = []
    for batch in batches:
        output: Any = model(**batch)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(output.loss.detach().clone())
    return Trained(losses[0].item(), losses[-1].item(), digest(losses), digest(parameters))


def train_twice(
    make: Callable[[], nn.Module],
    batches: Callable[[], Iterable[Batch]],
    deterministic: bool | str = True,
) -> tuple[Trained, Trained]:
    """Two runs of equal models on equal batches under a setting of the switch.

    Args:
        make: Builds the model, with the same weights every time.
        batches: The batches of one run.
        deterministic: As :func:`liger_multi.use` takes it.
    """
    runs = []
    with use(deterministic=deterministic):
        for _ in range(2):
            model = make()
            device = next(model.parameters()).device
            # the second run meets other addresses, and memory with other contents
            blocks = [torch.full((1000 * n,), float("nan"), device=device) for n in range(1, 9)]
            del blocks[::2]
            runs.append(train(model, batches()))
    return runs[0], runs[1]
