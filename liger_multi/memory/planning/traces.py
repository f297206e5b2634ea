"""A simulated step cut at its layers, so that a few of them tell about any number.

Forward of layer 0, 1, ..., the head, backward of ..., 1, 0: middle layers repeat the same births
and deaths, hence the memory at any moment is linear in the number of layers before it, and its
highest moment is in the first or the last repetition. Work is counted beside: products, bytes
that other operators move, and launches.

Models are of shapes alone, with all of their layers or with a few. Frozen weights of few bits are
counted at their stored size, and dequantized for each product.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_multi.memory.estimation import meta_model
from liger_multi.memory.measure import tensors_in
from liger_multi.memory.planning.applying import layers_of, mlps_of
from liger_multi.memory.planning.cost import OWN
from liger_multi.memory.recorder import CATEGORIES, GRADIENTS, PARAMETERS, STATES
from liger_multi.memory.simulation import Simulation, on_meta
from liger_multi.memory.sizes import positions_of

# --- frozen weights of few bits ---


class _Product(torch.autograd.Function):
    """What a product with a stored weight allocates, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        ctx.shape = rows, x.shape[-1]
        weight = x.new_empty(rows, x.shape[-1])
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy @ dy.new_empty(ctx.shape), None


class Stored(nn.Module):
    """Stands in for a linear layer whose weight has few bits.

    Args:
        layer: What it stands for; its stored tensors are kept as they are.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        for i, tensor in enumerate([*layer.parameters(), *layer.buffers()]):
            self.register_buffer(f"stored_{i}", tensor.detach())

    def forward(self, x: Tensor) -> Tensor:
        """A tensor of the right shape."""
        run: Any = _Product.apply
        made: Tensor = run(x, self.out_features)
        return made


def stored_bits(module: Any) -> bool:
    """Whether a module is a linear layer whose weight stands in fewer than 16 bits."""
    if not all(isinstance(getattr(module, n, None), int) for n in ("in_features", "out_features")):
        return False
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.requires_grad:
        return False
    whole: int = module.in_features * module.out_features
    return weight.element_size() < 2 or weight.numel() < whole


def stand_in(model: nn.Module) -> int:
    """Put substitutes where weights are stored in few bits; the bytes of them all."""
    total = 0
    for path, module in list(model.named_modules()):
        if stored_bits(module):
            parent, _, name = path.rpartition(".")
            made = Stored(module)
            setattr(model.get_submodule(parent), name, made)
            total += sum(b.nbytes for b in made.buffers())
    return total


# --- a step, cut ---

DEPTH = 3  # layers of a short simulation: the first, one that stands for many, and the last
BEFORE, HEAD, AFTER = "before", "head", "after"
STATIC = tuple(CATEGORIES.index(name) for name in (PARAMETERS, STATES))
GRADIENT = CATEGORIES.index(GRADIENTS)
_PRODUCTS = {
    "aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::addmm": (1, 2), "aten::baddbmm": (1, 2),
    "aten::addmm.out": (1, 2), "aten::addmm.dtype": (1, 2), "aten::addmm.dtype_out": (1, 2),
    "aten::mm.out": (0, 1), "aten::mm.dtype": (0, 1), "aten::mm.dtype_out": (0, 1),
    "aten::_grouped_mm": (0, 1), "aten::matmul": (0, 1), "aten::linear": (0, 1),
}  # fmt: skip
_FREE = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach")


@dataclass
class Work:
    """What has to be done.

    Attributes:
        flops: Floating point operations of products, by the bytes of a number.
        moved: Bytes that everything else reads and writes.
        launches: Operators that a host starts, weighed by how long that takes.
    """

    flops: dict[int, float] = field(default_factory=dict)
    moved: float = 0.0
    launches: float = 0.0

    def product(self, size: int, count: float) -> None:
        """Count operations of a product."""
        self.flops[size] = self.flops.get(size, 0.0) + count

    def add(self, other: Work, times: float = 1.0) -> None:
        """Add another's work ``times``."""
        for size, count in other.flops.items():
            self.product(size, times * count)
        self.moved += times * other.moved
        self.launches += times * other.launches

    def toward(self, other: Work, share: float) -> Work:
        """As of :class:`Segment`."""
        flops = {n: a + share * (other.flops[n] - a) for n, a in self.flops.items()}
        moved = self.moved + share * (other.moved - self.moved)
        return Work(flops, moved, self.launches)


@dataclass
class Segment:
    """A part of a step.

    Attributes:
        live: Bytes by category after every event, beside what was there at its begin.
        added: The same with gradients that are added to those of an earlier micro-batch.
        work: What it does.
    """

    live: Tensor
    added: Tensor
    work: Work

    def of(self, accumulating: bool) -> Tensor:
        """The bytes after every event."""
        return self.added if accumulating else self.live

    def same(self, other: Segment) -> bool:
        """Whether memory goes the same way."""
        return self.live.shape == other.live.shape and bool((self.live == other.live).all())

    def alike(self, other: Segment) -> bool:
        """Whether the same happens in the same order, at whatever size."""
        return (
            self.live.shape == other.live.shape
            and self.work.launches == other.work.launches
            and self.work.flops.keys() == other.work.flops.keys()
        )

    def toward(self, other: Segment, share: float) -> Segment:
        """A point on the line from this one (0) through another that is :meth:`alike` (1)."""
        return Segment(
            self.live + share * (other.live - self.live),
            self.added + share * (other.added - self.added),
            self.work.toward(other.work, share),
        )


@dataclass
class Trace:
    """A step: its segments by name; ``forward`` and ``backward`` by layer.

    Attributes:
        segments: ``before``, ``head`` and ``after``.
        forward: One a simulated layer.
        backward: The same, by layer as well.
        parameters: Bytes of a layer's parameters, of each one simulated.
        outside: Bytes of all others.
        trained: Bytes of gradients of one layer, and of all others.
        offloaded: Bytes that a layer's forward sends to the host.
    """

    segments: dict[str, Segment]
    forward: list[Segment]
    backward: list[Segment]
    parameters: list[int] = field(default_factory=list)
    outside: int = 0
    offloaded: float = 0.0

    @property
    def uniform(self) -> bool:
        """Whether the layers between the first and the last one are alike."""
        middle = [layers[1:-1] for layers in (self.forward, self.backward)]
        return all(part.same(parts[0]) for parts in middle for part in parts)

    def alike(self, other: Trace) -> bool:
        """Whether the same happens in all segments."""
        mine, theirs = self._every(), other._every()
        return len(mine) == len(theirs) and all(a.alike(b) for a, b in zip(mine, theirs))

    def toward(self, other: Trace, share: float) -> Trace:
        """As of :class:`Segment`."""

        def between(mine: list[Segment], theirs: list[Segment]) -> list[Segment]:
            return [a.toward(b, share) for a, b in zip(mine, theirs, strict=True)]

        names = list(self.segments)
        ends = between([self.segments[n] for n in names], [other.segments[n] for n in names])
        forward = between(self.forward, other.forward)
        return Trace(
            dict(zip(names, ends, strict=True)), forward, between(self.backward, other.backward)
        )

    def _every(self) -> list[Segment]:
        ends = [self.segments[name] for name in (BEFORE, HEAD, AFTER)]
        return [*ends, *self.forward, *self.backward]

    def layer(self, index: int, count: int) -> int:
        """Which simulated layer stands for layer ``index`` of ``count``."""
        depth = len(self.forward)
        if count == depth or index == 0:
            return index
        return depth - 1 if index == count - 1 else 1


Part = tuple[Segment, int]
"""A segment and how often it is repeated."""


def sequence_of(layers: Sequence[Trace]) -> list[Part]:
    """The segments of a step whose layer ``i`` is as in ``layers[i]``, in order."""
    count, first, last = len(layers), layers[0], layers[-1]
    parts: list[Part] = [(first.segments[BEFORE], 1)]
    parts += [(t.forward[t.layer(i, count)], 1) for i, t in enumerate(layers)]
    parts.append((last.segments[HEAD], 1))
    rest = [(t.backward[t.layer(i, count)], 1) for i, t in enumerate(layers)]
    parts += rest[::-1]
    parts.append((first.segments[AFTER], 1))
    return _merged(parts)


def _merged(parts: Iterable[Part]) -> list[Part]:
    merged: list[Part] = []
    for segment, times in parts:
        if merged and merged[-1][0] is segment:
            merged[-1] = (segment, merged[-1][1] + times)
        else:
            merged.append((segment, times))
    return merged


def work_of(parts: Iterable[Part]) -> Work:
    """Everything that the parts do."""
    total = Work()
    for segment, times in parts:
        total.add(segment.work, times)
    return total


def peak_of(
    parts: Sequence[Part], start: Tensor, factors: Tensor, accumulating: bool
) -> tuple[float, Tensor]:
    """Highest moment in bytes of this device, and what is alive then by category.

    Args:
        parts: In order.
        start: Bytes by category before the first part.
        factors: The share of each category that is on this device.
        accumulating: Whether gradients of earlier micro-batches are there.
    """
    best, at, base = float(start @ factors), start, start
    for segment, times in parts:
        live = segment.of(accumulating)
        if not len(live):
            continue
        inside = live @ factors
        place = int(inside.argmax())
        for base_of_one in (base, base + (times - 1) * live[-1]):
            total = float(base_of_one @ factors + inside[place])
            if total > best:
                best, at = total, base_of_one + live[place]
        base = base + times * live[-1]
    return best, at


class Cutting(Simulation):
    """A simulation that notes where layers begin and end, and what is done.

    Args:
        layers: The model's layers, in order.
        **options: Of :class:`Simulation`.
    """

    def __init__(self, layers: Sequence[nn.Module], **options: Any) -> None:
        super().__init__(**options)
        self._layers = {id(layer): i for i, layer in enumerate(layers)}
        self.cuts: list[tuple[int, str, int]] = []  # event, name, layer
        self.works: list[Work] = [Work()]
        self.accumulated: list[tuple[int, int]] = []  # event, bytes
        self._times = 1.0  # that what runs now is done

    def cut(self, name: str, layer: int = 0) -> None:
        """From here on it is another segment."""
        self.cuts.append((len(self.events), name, layer))
        self.works.append(Work())

    def _cutter(self, name: str, layer: int = 0) -> Callable[[Tensor], None]:
        """What cuts when a gradient comes."""

        def hook(_: Tensor) -> None:
            self.cut(name, layer)

        return hook

    def _forwards(self) -> bool:
        return torch._C._current_autograd_node() is None

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
                self.cut(HEAD)

    def _gradient_hook(self, module: str, kind: str) -> Any:
        known = super()._gradient_hook(module, kind)

        def hook(parameter: Tensor) -> None:
            known(parameter)
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
                size = min(size, self._narrow)  # fp32 sums of products of 16 bits
            columns = b.shape[0] if name == "aten::linear" else b.shape[-1]
            work.product(size, times * 2.0 * a.numel() * columns)
            work.launches += times
        elif not (func.is_view or func._schema.name.partition("::")[2] in _FREE):
            moved = sum(map(_bytes, tensors_in((args, *kwargs.values(), (result,)))))
            work.moved += times * moved
            work.launches += times
        return result

    @contextlib.contextmanager
    def surroundings(self) -> Iterator[None]:
        """Where a model can run; of the chunks of a loss only those that differ."""
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
        """The first, one that counts for all that repeat it, and the last, which may be shorter."""
        every = list(blocks)
        yield from every[:1]
        if len(every) > 2:
            self._times *= len(every) - 2
            yield every[1]
            self._times /= len(every) - 2
        yield from every[1:][-1:]

    @property
    def _narrow(self) -> int:
        kinds = {self._autocast} if self._autocast else {p.dtype for _, p in self._parameters()}
        return min((k.itemsize for k in kinds if k and k.is_floating_point), default=4)

    def _count_ours(self, name: str, args: Any, result: Any) -> None:
        work, times = self.works[-1], self._times
        made = list(tensors_in((result,)))
        work.moved += times * sum(map(_bytes, [*tensors_in(args), *made]))
        work.launches += times * OWN
        if name == "attention":
            self._count_attention("backward" if len(made) > 2 else "forward", made[0])
        elif name == "fused_moe":
            weights = sorted(tensors_in(args), key=lambda t: -t.numel() * (t.ndim == 3))[:2]
            rows = next(t.numel() for t in tensors_in(args) if not t.is_floating_point())
            each = 2.0 * rows * sum(math.prod(w.shape[1:]) for w in weights)
            work.product(weights[0].element_size(), each * (3 if len(made) > 2 else 1))

    def _count_attention(self, half: str, made: Tensor) -> None:
        """Half of all pairs of positions; backward has five products where forward has two."""
        count = 2.0 * made.numel() * self._sequence * (2.5 if half == "backward" else 1.0)
        self.works[-1].product(made.element_size(), count)
        self.works[-1].launches += 1

    def named(self, name: str, call: Any) -> Any:
        """Attention is told by its name; everything else is counted where it runs."""
        result = super().named(name, call)
        if name.startswith("scaled_dot_product_attention"):
            half = "backward" if name.endswith("backward") else "forward"
            self._count_attention(half, next(tensors_in((result,))))
        return result

    def warm(self, batch: int) -> None:
        """A forward alone, for what learns from a first step; nothing of it is kept."""
        whole = cast(nn.Module, self._model)
        size = self._vocabulary, self._sequence
        other = Simulation(self._target, None, whole, *size, self._autocast)
        ids = torch.empty(batch, self._sequence, dtype=torch.int64, device="meta")
        model: Any = self._model
        with self._few_chunks(), other.surroundings():
            other.forward(lambda: model(input_ids=ids, labels=ids).loss)

    def standing(self) -> int:
        """Bytes of parameters and buffers, which are there before the step."""
        blocks = [self.blocks[index] for index, _ in self.events[: self.phases[0][0]]]
        return sum(block.size for block in blocks if block.role == PARAMETERS)

    def trace(self) -> Trace:
        """The segments of what was recorded."""
        places = {name: i for i, name in enumerate(CATEGORIES)}
        category = [places[block.category] for block in self.blocks]
        begin = self.phases[0][0] if self.phases else 0
        deltas = torch.zeros(len(self.events), len(CATEGORIES), dtype=torch.float64)
        for at, (index, change) in enumerate(self.events):
            deltas[at, category[index]] = change
        extra = torch.zeros_like(deltas)
        for at, size in self.accumulated:
            extra[min(at, len(extra) - 1), GRADIENT] -= size
        segments: dict[str, Segment] = {}
        forward: dict[int, Segment] = {}
        backward: dict[int, Segment] = {}
        ends = [at for at, _, _ in self.cuts] + [len(self.events)]
        starts = [(begin, BEFORE, 0), *self.cuts]
        for (start, name, layer), end, work in zip(starts, ends, self.works, strict=True):
            live = deltas[start:end].cumsum(0)
            # what leaves when a gradient has been added is seen from the next event on
            segment = Segment(live, live + extra[start:end].cumsum(0), work)
            where = {"forward": forward, "backward": backward}.get(name)
            if where is None:
                segments[name] = segment
            else:
                where[layer] = segment
        empty = torch.zeros(0, len(CATEGORIES), dtype=torch.float64)
        segments.setdefault(AFTER, Segment(empty, empty, Work()))
        return Trace(
            segments,
            [forward[i] for i in sorted(forward)],
            [backward[i] for i in sorted(backward)],
        )


def _bytes(tensor: Tensor) -> int:
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _entered(target: str) -> tuple[str, ...]:
    """Operators whose inner operators are seen and counted one by one."""
    from liger_multi.dispatch.op import OPS
    from liger_multi.memory.simulation import CHUNKED

    return tuple(OPS) if target == "cpu" else CHUNKED


def vector(values: Mapping[str, float]) -> Tensor:
    """Numbers by category as a vector."""
    return torch.tensor([float(values.get(name, 0.0)) for name in CATEGORIES], dtype=torch.float64)


# --- models of shapes ---


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    return tuple(
        (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters()
    )


class Shapes:
    """A configuration's or a model's architecture, copied as often as it is needed.

    Args:
        given: A Hugging Face configuration or model; nothing of it is changed.
        sequence: Tokens that are planned for.

    Attributes:
        count: Layers.
        layer_class: Class of a layer.
        has_mlps: Whether layers have MLPs that can run in tiles.
        quantized: Bytes of frozen weights that are stored in few bits.
        uniform: Whether all layers have equal parameters; may be set to False by who finds that
            they do not behave alike.
    """

    def __init__(self, given: Any, sequence: int) -> None:
        self.given = given
        self.is_model = isinstance(given, nn.Module)
        self.full = meta_model(given, _dtype(given), "sdpa", sequence)
        self.quantized = stand_in(self.full) if self.is_model else 0
        path, layers = layers_of(self.full)
        self.path, self.count = path, len(layers)
        self.layer_class = type(layers[0]).__name__
        self.uniform = len({_signature(layer) for layer in layers}) == 1
        self.has_mlps = bool(mlps_of(self.full))
        self.checked = False  # the first simulation has two middle layers, which are compared
        self._parts: dict[int, Any] = {1: self.full}
        self._sequence = sequence

    @property
    def config(self) -> Any:
        """The configuration."""
        return self.full.config

    @property
    def text(self) -> Any:
        """The configuration of its decoder."""
        return self.config.get_text_config()

    @property
    def positions(self) -> int | None:
        """The longest sequence that its configuration allows, if it names one."""
        return positions_of(self.config)

    def model(self, dtype: torch.dtype, attention: str, parts: int = 1, whole: bool = False) -> Any:
        """A copy on the meta device, in training mode.

        Args:
            dtype: Of its parameters.
            attention: Implementation.
            parts: Devices that heads and inner rows of MLPs are divided over; this is one's share.
            whole: Whether it has all layers.
        """
        source = self._part(parts)
        path, layers = layers_of(source)
        parent, _, name = path.rpartition(".")
        holder: Any = source.get_submodule(parent)
        depth = DEPTH if self.checked else DEPTH + 1
        few = layers if whole or not self.uniform else layers[:depth]
        setattr(holder, name, few)
        try:
            model: Any = on_meta(source, dtype)
        finally:
            setattr(holder, name, layers)
        text = model.config.get_text_config()
        if len(few) < len(layers):
            text.num_hidden_layers = len(few)
        model.config._attn_implementation = "eager" if attention == "eager" else "sdpa"
        return model.train()

    def _part(self, parts: int) -> Any:
        if parts not in self._parts:
            config = copy.deepcopy(self.config)
            text = config.get_text_config()
            if getattr(text, "head_dim", None) is None:
                text.head_dim = text.hidden_size // text.num_attention_heads
            for field in divided(text):
                setattr(text, field, max(1, getattr(text, field) // parts))
            self._parts[parts] = meta_model(config, _dtype(self.given), "sdpa", self._sequence)
        return self._parts[parts]

    def divisible(self, parts: int) -> bool:
        """Whether tensor parallelism over ``parts`` devices cuts this model evenly."""
        if parts == 1:
            return True
        if self.is_model and any(not p.requires_grad for p in self.full.parameters()):
            return False  # adapters would have to be divided as well
        names = divided(self.text)
        return bool(names) and all(getattr(self.text, n) % parts == 0 for n in names)


def divided(text: Any) -> Sequence[str]:
    """Fields of a configuration that tensor parallelism divides."""
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    return [name for name in names if isinstance(getattr(text, name, None), int)]


def _dtype(given: Any) -> torch.dtype:
    if isinstance(given, nn.Module):
        sizes: dict[torch.dtype, int] = {}
        for p in given.parameters():
            if p.is_floating_point():
                sizes[p.dtype] = sizes.get(p.dtype, 0) + p.numel()
        return max(sizes, key=sizes.__getitem__, default=torch.bfloat16)
    return torch.bfloat16
