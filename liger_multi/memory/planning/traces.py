"""A simulated step cut at its layers, so that a few of them tell about any number.

Forward of layer 0, 1, ..., the head, backward of ..., 1, 0: middle layers repeat the same births
and deaths, hence the memory at any moment is linear in the number of layers before it, and its
highest moment is in the first or the last repetition. Work is counted as well: FLOPs of GEMMs,
bytes that other operators move, and launches.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_multi._torch_private import current_autograd_node
from liger_multi.memory.measure import tensors_in
from liger_multi.memory.planning.cost import EXPERTS, OWN
from liger_multi.memory.recorder import CATEGORIES, GRADIENTS, PARAMETERS
from liger_multi.memory.simulation import CHUNKED, Simulation

# --- a step, cut ---

BEFORE, NORM, LOSS, CASTS, HEAD, AFTER = "before", "norm", "loss", "casts", "head", "after"
GRADIENT = CATEGORIES.index(GRADIENTS)
_PRODUCTS = {
    "aten::mm": (0, 1),
    "aten::bmm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::baddbmm": (1, 2),
    "aten::addmm.out": (1, 2),
    "aten::addmm.dtype": (1, 2),
    "aten::addmm.dtype_out": (1, 2),
    "aten::mm.out": (0, 1),
    "aten::mm.dtype": (0, 1),
    "aten::mm.dtype_out": (0, 1),
    "aten::_grouped_mm": (0, 1),
    "aten::matmul": (0, 1),
    "aten::linear": (0, 1),
    "aten::_scaled_mm": (0, 1),
}
_FREE = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach")


Bytes = tuple[float, ...]
"""Bytes by category, in the order of :data:`CATEGORIES`."""

Moment = tuple[float, Bytes, Bytes]
"""Bytes on a device, bytes by category, and those that are there at the end of the segment."""

NOTHING: Bytes = (0.0,) * len(CATEGORIES)


@dataclass
class Work:
    """Work that a device does.

    Attributes:
        flops: FLOPs of GEMMs, by element size in bytes.
        moved: Bytes that all other operators read and write.
        launches: Operators that a host starts, weighed by how long that takes.
        exchanged: Bytes that ranks which share tokens send to each other, or keep.
    """

    flops: dict[int, float] = field(default_factory=dict)
    moved: float = 0.0
    launches: float = 0.0
    exchanged: float = 0.0

    def product(self, size: int, count: float) -> None:
        """Count FLOPs of a GEMM."""
        self.flops[size] = self.flops.get(size, 0.0) + count

    def add(self, other: Work, times: float = 1.0) -> None:
        """Add other work ``times`` times."""
        for size, count in other.flops.items():
            self.product(size, times * count)
        self.moved += times * other.moved
        self.launches += times * other.launches
        self.exchanged += times * other.exchanged

    def interpolated(self, other: Work, share: float) -> Work:
        """As of :class:`Segment`."""
        flops = {n: between(a, other.flops[n], share) for n, a in self.flops.items()}
        moved_bytes = between(self.moved, other.moved, share)
        exchanged = between(self.exchanged, other.exchanged, share)
        return Work(flops, moved_bytes, self.launches, exchanged)


@dataclass
class Segment:
    """A part of a step.

    Attributes:
        categories: Category of every event: a birth or a death.
        sizes: Bytes of every event.
        added: Bytes by number of event that are not allocated where gradients are added to those
            of an earlier micro-batch.
        work: What it does.
    """

    categories: list[int] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    added: dict[int, float] = field(default_factory=dict)
    work: Work = field(default_factory=Work)
    _known: dict[Any, Moment] = field(default_factory=dict, repr=False, compare=False)

    def highest(self, factors: Bytes, accumulating: bool) -> Moment:
        """Peak of a segment that has events.

        Args:
            factors: The share of each category that is on this device.
            accumulating: Whether gradients of earlier micro-batches are there.
        """
        key = factors, accumulating
        if key not in self._known:
            best, peak_event, total = -math.inf, 0, 0.0
            added = self.added if accumulating else {}
            for event, (category, size) in enumerate(zip(self.categories, self.sizes, strict=True)):
                total += size * factors[category]
                if event in added:
                    total -= added[event] * factors[GRADIENT]
                if total > best:
                    best, peak_event = total, event
            self._known[key] = (
                best,
                self._bytes_after(peak_event, added),
                self.net_bytes(accumulating),
            )
        return self._known[key]

    def net_bytes(self, accumulating: bool) -> Bytes:
        """Net bytes by category: at its end minus at its beginning."""
        return self._bytes_after(len(self.sizes) - 1, self.added if accumulating else {})

    def _bytes_after(self, event: int, added: Mapping[int, float]) -> Bytes:
        live = list(NOTHING)
        for category, size in zip(self.categories[: event + 1], self.sizes, strict=False):
            live[category] += size
        live[GRADIENT] -= sum(size for index, size in added.items() if index <= event)
        return tuple(live)

    def same(self, other: Segment) -> bool:
        """Whether all events are equal."""
        return self.categories == other.categories and self.sizes == other.sizes

    def same_events(self, other: Segment) -> bool:
        """Whether the same events happen in the same order, of any size."""
        return (
            self.categories == other.categories
            and self.added.keys() == other.added.keys()
            and self.work.launches == other.work.launches
            and self.work.flops.keys() == other.work.flops.keys()
        )

    def interpolated(self, other: Segment, share: float) -> Segment:
        """Interpolate linearly between this segment (0) and one with :meth:`same_events` (1)."""
        sizes = [between(a, b, share) for a, b in zip(self.sizes, other.sizes, strict=True)]
        added = {
            event: between(size, other.added[event], share) for event, size in self.added.items()
        }
        return Segment(self.categories, sizes, added, self.work.interpolated(other.work, share))

    def as_data(self) -> list[Any]:
        """Plain data."""
        work = self.work
        flops = list(work.flops.items())
        added = list(self.added.items())
        numbers = [work.moved, work.launches, work.exchanged]
        return [self.categories, self.sizes, added, flops, *numbers]

    @classmethod
    def from_data(cls, data: Sequence[Any]) -> Segment:
        """From :meth:`as_data`."""
        categories, sizes, added, flops, *numbers = data
        if len(categories) != len(sizes):
            raise ValueError(f"{len(categories)} categories of {len(sizes)} events")
        return cls(categories, sizes, dict(added), Work(dict(flops), *numbers))


def between(a: float, b: float, share: float) -> float:
    """Interpolate linearly between ``a`` (0) and ``b`` (1), rounded."""
    return float(round(a + share * (b - a)))


# --- what layers do, and what the head does ---

Ends = tuple[tuple[int, float], ...]
"""Category and bytes of what a head leaves; negative for what it frees of others."""


def _ends_alike(a: Ends, b: Ends) -> bool:
    return [category for category, _ in a] == [category for category, _ in b]


def _ends_toward(ends: Ends, other: Ends, share: float) -> Ends:
    pairs = zip(ends, other, strict=True)
    return tuple((category, between(a, b, share)) for (category, a), (_, b) in pairs)


@dataclass
class Head:
    """The head: logits, the loss and their gradients.

    Attributes:
        loss: From the last hidden states on, until forward is over.
        backward: Until the gradient of the last layer's output.
        ends: Bytes that it takes over from the layers and leaves to them.
    """

    loss: Segment
    backward: Segment
    ends: Ends

    def same_events(self, other: Head) -> bool:
        """As of :class:`Segment`."""
        return (
            self.loss.same_events(other.loss)
            and self.backward.same_events(other.backward)
            and _ends_alike(self.ends, other.ends)
        )

    def interpolated(self, other: Head, share: float) -> Head:
        """As of :class:`Segment`."""
        return Head(
            self.loss.interpolated(other.loss, share),
            self.backward.interpolated(other.backward, share),
            _ends_toward(self.ends, other.ends, share),
        )

    def as_data(self) -> dict[str, Any]:
        """Plain data."""
        return {"segments": [self.loss.as_data(), self.backward.as_data()], "ends": self.ends}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Head:
        """From :meth:`as_data`."""
        loss, backward = map(Segment.from_data, data["segments"])
        return cls(loss, backward, _ends_of(data))


def _ends_of(data: Mapping[str, Any]) -> Ends:
    return tuple((int(category), float(size)) for category, size in data["ends"])


@dataclass
class Layer:
    """One layer.

    Attributes:
        forward: Its forward.
        casts: Frees its autocast copies of weights when the model's forward ends.
        backward: Its backward.
    """

    forward: Segment
    casts: Segment
    backward: Segment


@dataclass
class Body:
    """Everything but the head.

    Attributes:
        before: Until the first layer.
        layers: Those that were simulated.
        norm: From the last layer on to the last hidden states.
        casts: As in :class:`Layer`, for weights outside of layers.
        after: From the gradient of the first layer's input on.
        ends: What the head that ran with it took over and left.
        buffers: Bytes that are there before the step, besides parameters.
        offloaded: Bytes that a layer's forward sends to the host.
        offloaded_outside: Bytes that are sent around the layers, as the last one's output.
    """

    before: Segment
    layers: list[Layer]
    norm: Segment
    casts: Segment
    after: Segment
    ends: Ends
    buffers: int = 0
    offloaded: float = 0.0
    offloaded_outside: float = 0.0

    @property
    def uniform(self) -> bool:
        """Whether the layers between the first and the last one are alike."""
        middle = self.layers[1:-1]
        return all(
            layer.forward.same(middle[0].forward) and layer.backward.same(middle[0].backward)
            for layer in middle
        )

    def shorter(self, depth: int | None) -> Body:
        """The same body with fewer layers: some in the middle are left out."""
        if depth is None or len(self.layers) <= depth:
            return self
        left = self.layers[:1] + self.layers[1 + len(self.layers) - depth :]
        return replace(self, layers=left)

    def same_events(self, other: Body) -> bool:
        """As of :class:`Segment`."""
        segments, other_segments = self._segments(), other._segments()
        return (
            len(segments) == len(other_segments)
            and all(a.same_events(b) for a, b in zip(segments, other_segments, strict=True))
            and _ends_alike(self.ends, other.ends)
        )

    def interpolated(self, other: Body, share: float) -> Body:
        """As of :class:`Segment`."""
        pairs = zip(self._segments(), other._segments(), strict=True)
        ends = _ends_toward(self.ends, other.ends, share)
        offloaded = between(self.offloaded, other.offloaded, share)
        offloaded_outside = between(self.offloaded_outside, other.offloaded_outside, share)
        segments = [a.interpolated(b, share) for a, b in pairs]
        return self._of(segments, ends, self.buffers, offloaded, offloaded_outside)

    def _segments(self) -> list[Segment]:
        of_layers = [
            s for layer in self.layers for s in (layer.forward, layer.casts, layer.backward)
        ]
        return [self.before, self.norm, self.casts, self.after, *of_layers]

    @classmethod
    def _of(cls, segments: list[Segment], ends: Ends, buffers: int, *offloaded: float) -> Body:
        before, norm, casts, after, *of_layers = segments
        layers = [Layer(*of_layers[i : i + 3]) for i in range(0, len(of_layers), 3)]
        return cls(before, layers, norm, casts, after, ends, buffers, *offloaded)

    def as_data(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "segments": [segment.as_data() for segment in self._segments()],
            "ends": self.ends,
            "buffers": self.buffers,
            "offloaded": [self.offloaded, self.offloaded_outside],
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Body:
        """From :meth:`as_data`."""
        segments = list(map(Segment.from_data, data["segments"]))
        return cls._of(
            segments, _ends_of(data), int(data["buffers"]), *map(float, data["offloaded"])
        )


@dataclass
class Trace:
    """A step of a model.

    Attributes:
        body: Its layers.
        head: Its head.
    """

    body: Body
    head: Head

    @property
    def fits(self) -> bool:
        """Whether the head takes over and leaves the bytes that the layers were simulated with."""
        return sorted(self.body.ends) == sorted(self.head.ends)

    def layer(self, index: int, count: int) -> Layer:
        """The simulated layer that represents layer ``index`` of ``count``."""
        layers = self.body.layers
        if count == len(layers) or index == 0:
            return layers[index]
        return layers[-1] if index == count - 1 else layers[1]


Part = tuple[Segment, int]
"""A segment and how often it is repeated."""


def sequence_of(
    traces: Sequence[Trace], begin: int = 0, end: int | None = None
) -> tuple[list[Part], list[Part]]:
    """Forward and backward of a model whose layer ``i`` is as in ``traces[i]``, in order.

    Args:
        traces: One trace per layer.
        begin: The first layer.
        end: The layer after the last one; None: all layers, and the head.
    """
    count = len(traces)
    end = count if end is None else end
    layers = [trace.layer(i, count) for i, trace in enumerate(traces[begin:end], begin)]
    forward: list[Part] = [(layer.forward, 1) for layer in layers]
    backward: list[Part] = [(layer.casts, 1) for layer in layers]
    if begin == 0:
        forward.insert(0, (traces[0].body.before, 1))
    if end == count:
        last = traces[-1]
        forward += [(last.body.norm, 1), (last.head.loss, 1)]
        backward += [(last.body.casts, 1), (last.head.backward, 1)]
    backward += [(layer.backward, 1) for layer in layers[::-1]]
    if begin == 0:
        backward.append((traces[0].body.after, 1))
    return _merged(forward), _merged(backward)


def _merged(parts: Iterable[Part]) -> list[Part]:
    segments: list[Part] = []
    for segment, times in parts:
        if segments and segments[-1][0] is segment:
            segments[-1] = (segment, segments[-1][1] + times)
        else:
            segments.append((segment, times))
    return segments


def work_of(parts: Iterable[Part]) -> Work:
    """The sum of the work of the parts."""
    total = Work()
    for segment, times in parts:
        total.add(segment.work, times)
    return total


def peak_of(
    parts: Sequence[Part], start: Bytes, factors: Bytes, accumulating: bool, last: Bytes = NOTHING
) -> tuple[float, Bytes]:
    """Peak in bytes of this device, and the bytes alive then by category.

    Args:
        parts: Segments in order.
        start: Bytes by category before the first part.
        factors: The share of each category that is on this device.
        accumulating: Whether gradients of earlier micro-batches are there.
        last: Bytes that are allocated for a moment after the last part.
    """
    best, at_peak, base = _total(start, factors), start, start
    for segment, times in parts:
        if not segment.sizes:
            continue
        highest, segment_bytes, left = segment.highest(factors, accumulating)
        for repeated in (0, times - 1)[:times]:
            begin = add_bytes(base, left, repeated)
            total = _total(begin, factors) + highest
            if total > best:
                best, at_peak = total, add_bytes(begin, segment_bytes)
        base = add_bytes(base, left, times)
    end = add_bytes(base, last)
    total = _total(end, factors)
    return (total, end) if total > best else (best, at_peak)


def add_bytes(sizes: Bytes, added: Bytes, times: float = 1) -> Bytes:
    """Add bytes by category ``times`` times."""
    return tuple(a + times * b for a, b in zip(sizes, added, strict=True))


def _total(sizes: Bytes, factors: Bytes) -> float:
    return sum(a * b for a, b in zip(sizes, factors, strict=True))


class Cutting(Simulation):
    """A simulation that records where layers begin and end, and their work.

    Args:
        layers: The model's layers, in order.
        inner: The module that runs them and ends with the last hidden states; None: the model.
        ranks: Number of ranks that share the tokens of a sequence.
        **options: Options of :class:`Simulation`, with the tokens of one rank.
    """

    def __init__(
        self, layers: Sequence[nn.Module], inner: nn.Module | None, ranks: int = 1, **options: Any
    ) -> None:
        super().__init__(**options)
        self._ranks = ranks
        self._layers = {id(layer): i for i, layer in enumerate(layers)}
        self._inner = inner
        self.cuts: list[tuple[int, str, int]] = []  # event, name, layer
        self.works: list[Work] = [Work()]
        self.accumulated: list[tuple[int, int]] = []  # event, bytes
        self._times = 1.0  # that what runs now is done

    def cut(self, name: str, layer: int = 0) -> None:
        """Begin another segment."""
        self.cuts.append((len(self.events), name, layer))
        self.works.append(Work())

    def exchange(self, nbytes: int) -> None:
        """Count what is sent to the other ranks."""
        self.works[-1].exchanged += nbytes

    def _cutter(self, name: str, layer: int = 0) -> Callable[[Tensor], None]:
        """A tensor hook that begins another segment when the gradient arrives."""

        def hook(_: Tensor) -> None:
            self.cut(name, layer)

        return hook

    def _forwards(self) -> bool:
        return current_autograd_node() is None

    def _enter(self, module: nn.Module, args: Any) -> None:
        index = self._layers.get(id(module))
        if index is not None and self._forwards():
            if index == 0:
                for tensor in tensors_in(args):
                    if tensor.requires_grad:
                        tensor.register_hook(self._cutter(AFTER))
                        break
            self.cut("forward", index)
        super()._enter(module, args)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        super()._leave(module, args, output)
        index = self._layers.get(id(module))
        if index is not None and self._forwards():
            for tensor in tensors_in((output,)):
                if tensor.requires_grad:
                    tensor.register_hook(self._cutter("backward", index))
                break
            if index == len(self._layers) - 1:
                self.cut(NORM)
                if self._inner is None:
                    self.cut(LOSS)
        if module is self._inner and self._forwards():
            self.cut(LOSS)

    def forward(self, call: Callable[[], Any]) -> Any:
        """As in :class:`Simulation`; autocast copies of weights are freed at its end."""

        def cut() -> Any:
            result = call()
            self.cut(CASTS)
            return result

        result = super().forward(cut)
        self.cut(HEAD)
        return result

    def _gradient_hook(self, module: str, module_class: str) -> Any:
        base_hook = super()._gradient_hook(module, module_class)

        def hook(parameter: Tensor) -> None:
            base_hook(parameter)
            if parameter.grad is not None:
                self.accumulated.append((len(self.events), parameter.grad.nbytes))

        return hook

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator and count it."""
        result = super().run(func, args, kwargs)
        if func.namespace == "liger_multi":
            name = func.name().partition("::")[2].rpartition("_")[0]
            if name not in _entered(self._target):
                self._count_ours(name, args, result)
            return result
        name = func.name()
        work, times = self.works[-1], self._times
        if name in _PRODUCTS:
            a, b = (args[i] for i in _PRODUCTS[name])
            size = a.element_size()
            if self._ops and "fused_linear" in self._ops[0]:
                size = min(size, self._narrow)  # fp32 sums of 16-bit GEMMs
            columns = b.shape[0] if name == "aten::linear" else b.shape[-1]
            work.product(size, times * 2.0 * a.numel() * columns)
            work.launches += times
        elif not (func.is_view or func._schema.name.partition("::")[2] in _FREE):
            moved_bytes = sum(map(_bytes, tensors_in((args, *kwargs.values(), (result,)))))
            work.moved += times * moved_bytes
            work.launches += times
        return result

    @contextlib.contextmanager
    def surroundings(self) -> Iterator[None]:
        """The context in which the model runs; of the chunks of a loss, only distinct ones run."""
        with self._few_chunks(), super().surroundings():
            yield

    @contextlib.contextmanager
    def _few_chunks(self) -> Iterator[None]:
        from liger_multi.reference.cross_entropy.fused_linear import visited

        token = visited.set(self._differing)
        try:
            yield
        finally:
            visited.reset(token)

    def _differing(self, blocks: Iterable[slice]) -> Iterator[slice]:
        """The first chunk, one for all that repeat it, and the last one, which may be shorter."""
        chunks = list(blocks)
        yield from chunks[:1]
        if len(chunks) > 2:
            self._times *= len(chunks) - 2
            yield chunks[1]
            self._times /= len(chunks) - 2
        yield from chunks[1:][-1:]

    @functools.cached_property
    def _narrow(self) -> int:
        dtypes = {self._autocast} if self._autocast else {p.dtype for _, p in self._parameters()}
        return min((d.itemsize for d in dtypes if d and d.is_floating_point), default=4)

    def _count_ours(self, name: str, args: Any, result: Any) -> None:
        work, times = self.works[-1], self._times
        outputs = tensors_in((result,))
        work.moved += times * sum(map(_bytes, [*tensors_in(args), *outputs]))
        work.launches += times * OWN
        if name == "attention":
            self._count_attention("backward" if len(outputs) > 2 else "forward", outputs[0])
        elif name in EXPERTS:
            weights = sorted(tensors_in(args), key=lambda t: -t.numel() * (t.ndim == 3))[:2]
            rows = next(t.numel() for t in tensors_in(args) if not t.is_floating_point())
            product = 2.0 * rows * sum(math.prod(w.shape[1:]) for w in weights)
            work.product(
                weights[0].element_size(), product * (EXPERTS[name] if len(outputs) > 2 else 1)
            )

    def _count_attention(self, half: str, output: Tensor) -> None:
        """Count FLOPs of causal attention: half of all pairs; two GEMMs forward, five backward."""
        tokens = self._sequence * self._ranks
        count = 2.0 * output.numel() * tokens * (2.5 if half == "backward" else 1.0)
        self.works[-1].product(output.element_size(), count)
        self.works[-1].launches += 1

    def named(self, name: str, call: Any) -> Any:
        """Count attention, recognized by its name; other operators are counted where they run."""
        result = super().named(name, call)
        if name.startswith("scaled_dot_product_attention"):
            half = "backward" if name.endswith("backward") else "forward"
            self._count_attention(half, tensors_in((result,))[0])
        return result

    def warm(self, batch: int) -> None:
        """Run one forward for policies that learn from a first step; it is not recorded."""
        full_model = cast(nn.Module, self._model)
        size = self._vocabulary, self._sequence
        simulation = Simulation(self._target, None, full_model, *size, self._autocast)
        shape = batch, self._sequence * self._ranks
        ids = torch.empty(shape, dtype=torch.int64, device="meta")
        model: Any = self._model
        with self._few_chunks(), simulation.surroundings():
            simulation.forward(lambda: model(input_ids=ids, labels=ids).loss)

    def standing(self) -> int:
        """Bytes of parameters and buffers, which exist before the step."""
        blocks = [self.blocks[index] for index, _ in self.events[: self.phases[0][0]]]
        return sum(block.size for block in blocks if block.role == PARAMETERS)

    def recorded(self) -> tuple[Body, Head]:
        """The recorded body and head."""
        parts = self._parts()
        segments = {part[0]: self._segment(range(*part[1:3]), part[3]) for part in parts}
        ends = self._ends([range(*part[1:3]) for part in parts if part[0][0] in (LOSS, HEAD)])
        casts = self._released(parts)
        layers = [
            Layer(
                segments["forward", i],
                casts.get(i, Segment()),
                segments.get(("backward", i), Segment()),  # nothing is trained up to there
            )
            for i in range(len(self._layers))
        ]
        body = Body(
            segments[BEFORE, 0],
            layers,
            segments[NORM, 0],
            casts.get(None, Segment()),
            segments.get((AFTER, 0), Segment()),
            ends,
        )
        return body, Head(segments[LOSS, 0], segments[HEAD, 0], ends)

    def _parts(self) -> list[tuple[tuple[str, int], int, int, Work]]:
        """Name and layer, first event, the one after the last, and work of every segment."""
        begin = self.phases[0][0] if self.phases else 0
        starts = [(begin, BEFORE, 0), *self.cuts]
        stops = [event for event, _, _ in self.cuts] + [len(self.events)]
        return [
            ((name, layer), start, stop, work)
            for (start, name, layer), stop, work in zip(starts, stops, self.works, strict=True)
        ]

    def _segment(self, events: Sequence[int], work: Work) -> Segment:
        """The segment of a range of events."""
        categories = [self._categories[self.events[event][0]] for event in events]
        sizes = [float(self.events[event][1]) for event in events]
        added: dict[int, float] = {}
        last = len(self.events) - 1
        index_of = {event: index for index, event in enumerate(events)}
        for event, size in self.accumulated:
            # what is freed when a gradient has been added shows in the next event
            index = index_of.get(min(event, last))
            if index is not None:
                added[index] = added.get(index, 0.0) + size
        return Segment(categories, sizes, added, work)

    @functools.cached_property
    def _categories(self) -> list[int]:
        """The category of every block."""
        index_of = {name: i for i, name in enumerate(CATEGORIES)}
        return [index_of[block.category] for block in self.blocks]

    def _released(self, parts: Any) -> dict[int | None, Segment]:
        """Blocks that are freed between forward and backward, by the layer that allocated them."""
        layer_of: dict[int, int] = {}
        rows: dict[int | None, list[int]] = {}
        for (name, layer), start, end, _ in parts:
            for event in range(start, end):
                index = self.events[event][0]
                if name == "forward":
                    layer_of.setdefault(index, layer)
                elif name == CASTS:
                    rows.setdefault(layer_of.get(index), []).append(event)
        return {layer: self._segment(layer_events, Work()) for layer, layer_events in rows.items()}

    def _ends(self, events: Iterable[range]) -> Ends:
        """Bytes that were allocated or freed in these events, but not both."""
        changes: dict[int, int] = {}
        for event in chain.from_iterable(events):
            index, change = self.events[event]
            changes[index] = changes.get(index, 0) + change
        return tuple((self._categories[i], float(n)) for i, n in sorted(changes.items()) if n)


def _bytes(tensor: Tensor) -> int:
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _entered(target: str) -> tuple[str, ...]:
    """Operators whose inner operators are counted one by one."""
    from liger_multi.dispatch.op import OPS

    return tuple(OPS) if target == "cpu" else CHUNKED


def vector(values: Mapping[str, float]) -> Bytes:
    """Numbers by category."""
    return tuple(float(values.get(name, 0.0)) for name in CATEGORIES)
